//! Packets to controllers and from them.

use std::collections::BTreeMap;

use braid_model::{ByteCount, Mac, Time};
use braid_openflow::action::Action;
use braid_openflow::flow::{PacketIn, PacketOut, PacketReason};
use braid_openflow::ids::{BufferId, Cookie, DatapathId, PortNo};
use braid_openflow::oxm::Field;
use braid_openflow::{ErrorCode, Message, Version};
use bytes::Bytes;

use super::lldp::Marker;
use super::{ConnectionId, Origin, Pending, Slicer, Switch};
use crate::actions::{Packets, Refusal};
use crate::journal::Record;
use crate::packet::{LLDP, header_of};
use crate::plan::{PRODUCTION, SliceNo};
use crate::space::{Header, Ports};
use crate::table::read_cookie;

/// In packets of which no entry is known, the value that the specification has for that.
const NO_COOKIE: Cookie = Cookie(u64::MAX);

/// A packet that waits in a switch.
#[derive(Debug, Clone)]
struct Buffer {
    real: BufferId,
    in_port: PortNo,
    header: Header,
    due: Time,
}

/// Packets that wait in a switch, by the numbers that slices know.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    known: BTreeMap<(SliceNo, u32), Buffer>,
    last: BTreeMap<SliceNo, u32>,
}

impl Buffers {
    fn add(&mut self, slice: SliceNo, most: usize, buffer: Buffer) -> BufferId {
        let own = (slice, 0)..=(slice, u32::MAX);
        while self.known.range(own.clone()).count() >= most.max(1) {
            // The one that is due first makes room.
            let first = self.known.range(own.clone()).min_by_key(|(_, buffer)| buffer.due).map(|(key, _)| *key);
            first.map(|key| self.known.remove(&key));
        }
        let last = self.last.entry(slice).or_default();
        // The largest number means that there is no buffer.
        *last = (*last + 1) % (u32::MAX - 1);
        self.known.insert((slice, *last), buffer);
        BufferId(*last)
    }

    fn take(&mut self, slice: SliceNo, buffer: BufferId) -> Option<Buffer> {
        self.known.remove(&(slice, buffer.0))
    }

    pub(super) fn due(&self) -> Option<Time> {
        self.known.values().map(|buffer| buffer.due).min()
    }

    fn expire(&mut self, now: Time) {
        self.known.retain(|_, buffer| buffer.due > now);
    }
}

impl Switch {
    /// The slice that has a packet. `None` if that is not clear.
    fn owner(&self, port: PortNo, header: &Header) -> Option<SliceNo> {
        let meets = |owned: &&crate::plan::Owned| {
            let region = &owned.region;
            region.permission.write && (region.ports.contains(port) || region.ports == Ports::All) && !region.header.is_disjoint(header)
        };
        // The highest come first.
        let first = self.space.iter().find(meets)?;
        header.is_within(&first.region.header).then_some(first.slice)
    }

    /// Slices that get copies of a packet.
    fn readers(&self, port: PortNo, header: &Header, owner: SliceNo) -> Vec<SliceNo> {
        let reads = |owned: &&crate::plan::Owned| {
            let region = &owned.region;
            owned.slice != owner
                && region.permission.read
                && !region.permission.write
                && region.ports.contains(port)
                && header.is_within(&region.header)
        };
        let mut slices: Vec<SliceNo> = self.space.iter().filter(reads).map(|owned| owned.slice).collect();
        slices.sort();
        slices.dedup();
        slices
    }
}

impl Slicer {
    pub(super) fn packet_in(&mut self, now: Time, datapath: DatapathId, packet: PacketIn) {
        let Some(port) = packet.in_port() else { return };
        if Marker::is_discovery(&packet.data) {
            return self.discovery_in(now, datapath, port, packet);
        }
        let Some(switch) = self.switches.get(&datapath) else { return };
        let header = header_of(&packet.data);
        let entry = read_cookie(packet.cookie).filter(|_| switch.version == Version::V1_3);
        let found = match entry {
            Some((slice, number)) => {
                // The entry may have gone meanwhile.
                let flow = switch.table.entries.get(&number).map(|entry| &entry.flow);
                // Its rows are narrower than what the specification calls a miss.
                let is_miss = flow.is_some_and(|flow| flow.priority == 0 && flow.matching.fields.is_empty());
                let reason = if is_miss && packet.reason == PacketReason::Action { PacketReason::NoMatch } else { packet.reason };
                Some((slice, flow.map_or(NO_COOKIE, |flow| flow.cookie), reason))
            }
            None => switch.owner(port, &header).map(|slice| {
                let reason = if switch.version == Version::V1_0 { switch.reason(slice, port, &header) } else { packet.reason };
                (slice, if switch.version == Version::V1_0 { Cookie(0) } else { NO_COOKIE }, reason)
            }),
        };
        let Some((slice, cookie, reason)) = found else { return };
        let readers = switch.readers(port, &header, slice);
        self.see_host(now, slice, &header);
        let buffer = packet.buffer;
        let packet = PacketIn { buffer: None, cookie, reason, ..packet };
        self.deliver(now, datapath, slice, packet.clone(), buffer.map(|real| (real, header)));
        for reader in readers {
            let cookie = if packet.cookie == Cookie(0) { Cookie(0) } else { NO_COOKIE };
            self.deliver(now, datapath, reader, PacketIn { cookie, ..packet.clone() }, None);
        }
    }

    /// A frame of LLDP: it is the slice's that has sent it; one from outside is the slice's that has such packets.
    fn discovery_in(&mut self, now: Time, datapath: DatapathId, port: PortNo, packet: PacketIn) {
        let Some(switch) = self.switches.get(&datapath) else { return };
        let (slice, data) = match self.marker.read(&packet.data) {
            Some((slice, data)) if switch.sees(slice, port) => (slice, data),
            Some(_) => return,
            None => match switch.owner(port, &header_of(&packet.data)) {
                Some(slice) => (slice, packet.data.clone()),
                None => return,
            },
        };
        // The mark of the entry by which the slice asked for it.
        let asks = |entry: &&crate::table::Entry| entry.slice == slice && entry.flow.matching.exact(Field::EthType) == Some(LLDP.into());
        let cookie = match switch.version {
            Version::V1_0 => Cookie(0),
            Version::V1_3 => switch.table.entries.values().find(asks).map_or(NO_COOKIE, |entry| entry.flow.cookie),
        };
        let total_len = u16::try_from(data.len()).unwrap_or(u16::MAX);
        self.deliver(
            now,
            datapath,
            slice,
            PacketIn { buffer: None, cookie, data, total_len, reason: PacketReason::Action, ..packet },
            None,
        );
    }

    fn deliver(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, packet: PacketIn, buffer: Option<(BufferId, Header)>) {
        let ups: Vec<ConnectionId> = self.ups_of(slice, datapath);
        let (Some(switch), Some(planned)) = (self.switches.get_mut(&datapath), self.plan.slices.get(&slice)) else { return };
        if ups.is_empty() {
            return;
        }
        let [_, bucket] = switch.limits(slice, &planned.spec, now);
        if !bucket.take(ByteCount::new(1), now) {
            self.counters.entry(slice).or_default().dropped += 1;
            return;
        }
        let in_port = packet.in_port().unwrap_or(PortNo::ANY);
        let due = now + self.settings.buffer;
        let buffer =
            buffer.map(|(real, header)| switch.buffers.add(slice, planned.spec.limits.buffers, Buffer { real, in_port, header, due }));
        let message = Message::PacketIn(PacketIn { buffer, ..packet });
        let delivered = ups.into_iter().map(|id| self.notify(id, message.clone())).filter(|done| *done).count();
        let counters = self.counters.entry(slice).or_default();
        if delivered > 0 {
            counters.packets += 1;
        } else {
            counters.dropped += 1;
        }
    }

    /// Remembers the sender of a packet, if there are several versions of its slice's controller.
    fn see_host(&mut self, now: Time, slice: SliceNo, header: &Header) {
        let Some(planned) = self.plan.slices.get(&slice).filter(|planned| planned.name != PRODUCTION) else { return };
        let name = planned.spec.stage.as_ref().map_or(&planned.name, |stage| &stage.of);
        let mut stages = self.wanted.slices.values().filter_map(|spec| spec.stage.as_ref()).filter(|stage| stage.of == *name).peekable();
        if stages.peek().is_none() {
            return;
        }
        let Some([.., a, b, c, d, e, f]) = header.exact(Field::EthSrc).map(u128::to_be_bytes) else { return };
        let host = Mac([a, b, c, d, e, f]);
        let is_staged = stages.any(|stage| stage.includes(host));
        let hosts = self.hosts.entry(name.clone()).or_default();
        if a & 1 == 1 || hosts.len() >= self.settings.hosts || !hosts.insert(host) {
            return;
        }
        let base = self.number_of(&name.clone()).unwrap_or(slice);
        if is_staged {
            self.replan_at.get_or_insert(now + super::COLLECT);
        }
        self.record(&Record::Host(base, host));
    }

    pub(super) fn packet_out(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: Origin, packet: &PacketOut) {
        match self.checked_packet(datapath, slice, packet) {
            Ok(packet) => {
                self.transmit(now, datapath, Message::PacketOut(packet), Pending::Command { origin: Some(origin) });
            }
            Err(refusal) => self.refuse(now, &origin, &refusal),
        }
    }

    fn checked_packet(&mut self, datapath: DatapathId, slice: SliceNo, packet: &PacketOut) -> Result<PacketOut, Refusal> {
        let gone = || Refusal::new(ErrorCode::BadRequestEperm, "the slice or the switch is gone");
        let switch = self.switches.get_mut(&datapath).ok_or_else(gone)?;
        let planned = self.plan.slices.get(&slice).ok_or_else(gone)?;
        let (mut in_port, header, buffer) = match packet.buffer {
            Some(buffer) => {
                let unknown =
                    || Refusal::new(ErrorCode::BadRequestBufferUnknown, format!("no packet waits as number {}: send its bytes", buffer.0));
                let known = switch.buffers.take(slice, buffer).ok_or_else(unknown)?;
                (known.in_port, known.header, Some(known.real))
            }
            None => (packet.in_port, header_of(&packet.data), None),
        };
        let is_real = in_port < PortNo::MAX || in_port == PortNo::LOCAL;
        let bounds = switch.bounds(planned, slice);
        if is_real && !bounds.sees(in_port) {
            return Err(Refusal::new(ErrorCode::BadRequestEperm, format!("port {in_port} is not one of its ports")));
        }
        if Marker::is_discovery(&packet.data) && buffer.is_none() {
            let data = self.marker.mark(slice, &packet.data);
            let full =
                || Refusal::new(ErrorCode::BadRequestEperm, "the LLDP frame has no room for the slice's mark: make it 16 bytes shorter");
            let actions = discovery_actions(packet, &bounds.ports.iter().copied().filter(|port| bounds.sees(*port)).collect::<Vec<_>>())?;
            return Ok(PacketOut { data: data.ok_or_else(full)?, actions, ..packet.clone() });
        }
        let ports = if is_real { Ports::Only([in_port.0].into()) } else { Ports::All };
        let mut packets = Packets { ports, header, changed: Vec::new(), level: None };
        let actions = bounds.apply(&mut packets, &packet.actions)?;
        if !is_real && in_port != PortNo::ANY {
            in_port = PortNo::CONTROLLER;
        }
        let data = if buffer.is_some() { Bytes::new() } else { packet.data.clone() };
        Ok(PacketOut { buffer, in_port, actions, data })
    }

    /// Lets a packet that waits go through the tables, as a flow-mod with its number asks for.
    pub(super) fn release_buffer(
        &mut self,
        now: Time,
        datapath: DatapathId,
        slice: SliceNo,
        origin: &Origin,
        buffer: BufferId,
    ) -> Result<(), Refusal> {
        let actions = vec![Action::output(PortNo::TABLE)];
        let packet = PacketOut { buffer: Some(buffer), in_port: PortNo::CONTROLLER, actions, data: Bytes::new() };
        let packet = self.checked_packet(datapath, slice, &packet)?;
        self.transmit(now, datapath, Message::PacketOut(packet), Pending::Command { origin: Some(origin.clone()) });
        Ok(())
    }

    /// Does what is due at switches.
    pub(super) fn expire(&mut self, now: Time) {
        let switches: Vec<DatapathId> = self.switches.keys().copied().collect();
        for datapath in switches {
            if let Some(switch) = self.switches.get_mut(&datapath) {
                switch.buffers.expire(now);
            }
            self.expire_dying(now, datapath);
        }
    }
}

impl Switch {
    /// Why a switch of 1.0 sends a packet to the controller. It does not say so, because its miss is an entry, too.
    fn reason(&self, slice: SliceNo, port: PortNo, header: &Header) -> PacketReason {
        let sends = |entry: &crate::table::Entry| {
            let to_controller = |action: &Action| matches!(action, Action::Output { port: PortNo::CONTROLLER, .. });
            let matching = &entry.flow.matching;
            entry.slice == slice
                && crate::table::actions(&entry.flow.instructions).any(to_controller)
                && matching.in_port().is_none_or(|own| own == port)
                && Header::of(matching).is_some_and(|own| header.is_within(&own))
        };
        if self.table.entries.values().any(sends) { PacketReason::Action } else { PacketReason::NoMatch }
    }
}

/// Frames of LLDP leave by the slice's ports, as they are, whatever its space is.
fn discovery_actions(packet: &PacketOut, ports: &[PortNo]) -> Result<Vec<Action>, Refusal> {
    let mut actions = Vec::new();
    for action in &packet.actions {
        match action {
            Action::Output { port: PortNo::FLOOD | PortNo::ALL, .. } => {
                actions.extend(ports.iter().filter(|port| **port != packet.in_port).map(|port| Action::output(*port)));
            }
            Action::Output { port, .. } if ports.contains(port) => actions.push(action.clone()),
            Action::Output { port, .. } => {
                return Err(Refusal::new(ErrorCode::BadActionEperm, format!("port {port} is not one of its ports")));
            }
            _ => return Err(Refusal::new(ErrorCode::BadActionEperm, "frames of LLDP leave as they are: only send them")),
        }
    }
    Ok(actions)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn buffers_are_bounded_and_time_out() {
        let mut buffers = Buffers::default();
        let at = |second| Time::ZERO + Duration::from_secs(second);
        let buffer = |real, second| Buffer { real: BufferId(real), in_port: PortNo(1), header: Header::ANY, due: at(second) };
        let first = buffers.add(SliceNo(1), 2, buffer(10, 5));
        let second = buffers.add(SliceNo(1), 2, buffer(11, 6));
        let other = buffers.add(SliceNo(2), 2, buffer(12, 4));
        let third = buffers.add(SliceNo(1), 2, buffer(13, 7));
        assert!(buffers.take(SliceNo(1), first).is_none() && buffers.take(SliceNo(2), third).is_none());
        assert_eq!(buffers.due(), Some(at(4)));
        buffers.expire(at(6));
        assert!(buffers.take(SliceNo(1), second).is_none() && buffers.take(SliceNo(2), other).is_none());
        assert_eq!(buffers.take(SliceNo(1), third).map(|buffer| buffer.real), Some(BufferId(13)));
    }

    #[test]
    fn discovery_leaves_by_the_slices_ports_only() {
        let out = |actions| PacketOut { buffer: None, in_port: PortNo::CONTROLLER, actions, data: Bytes::new() };
        let ports = [PortNo(1), PortNo(2)];
        assert_eq!(discovery_actions(&out(vec![Action::output(PortNo::FLOOD)]), &ports).unwrap().len(), 2);
        for action in [Action::output(PortNo(3)), Action::output(PortNo::TABLE), Action::output(PortNo::NORMAL), Action::PopVlan] {
            assert!(discovery_actions(&out(vec![action]), &ports).is_err());
        }
    }
}
