//! The switch.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::{ByteCount, Mac, Time};
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::{FlowFlags, MeterFlags, PortConfig, PortState};
use braid_openflow::flow::{FlowCommand, FlowMod, FlowRemoved, PacketIn, PacketReason, RemovedReason};
use braid_openflow::group::{Band, Bucket, ModCommand};
use braid_openflow::ids::{Cookie, DatapathId, GroupId, Kbps, MeterId, PortNo, Seconds, TableId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{
    FlowStats, GroupDescription, MeterConfig, MeterFeatures, MeterStats, MultipartReply, PortStats, ReplyBody, RequestBody, Traffic,
};
use braid_openflow::oxm::Oxm;
use braid_openflow::port::{Port, PortReason, PortStatus};
use braid_openflow::switch::Features;
use braid_openflow::{Config, Connection, ErrorCode, Event, Message, Side, Version};
use bytes::Bytes;

use crate::fields::{matches, rewritten};

/// A flow entry.
#[derive(Debug, Clone)]
pub struct Flow {
    /// Its table.
    pub table: u8,
    /// Its priority.
    pub priority: u16,
    /// Which packets it is for, in canonical form.
    pub fields: Vec<Oxm>,
    /// Its mark.
    pub cookie: Cookie,
    /// What happens to the packets.
    pub instructions: Vec<Instruction>,
    /// Packets so far.
    pub packets: u64,
    /// Whether the controller wants to know when it goes.
    pub reports: bool,
}

/// A switch with one connection. It panics if it gets what the controller never sends.
#[derive(Debug)]
pub struct SwitchModel {
    /// Its datapath id.
    pub datapath: u64,
    /// Its version of OpenFlow.
    pub version: Version,
    /// Its number of tables.
    pub tables: u8,
    /// Whether each port is up.
    pub ports: BTreeMap<u32, bool>,
    /// The connection to the controller.
    pub connection: Option<Connection>,
    /// Its entries; those of the highest priority come first.
    pub flows: Vec<Flow>,
    /// Its groups, which send a copy to each bucket.
    pub groups: BTreeMap<GroupId, Vec<Bucket>>,
    /// Its meters, which limit nothing.
    pub meters: BTreeMap<MeterId, Vec<Band>>,
    /// Bytes that went into each meter.
    pub metered: BTreeMap<MeterId, u64>,
    /// Most entries.
    pub capacity: usize,
    /// Error with which flow-mods that add or change are answered.
    pub refuses: Option<ErrorCode>,
    /// Whether it has groups.
    pub has_groups: bool,
    /// Whether it has meters.
    pub has_meters: bool,
    /// Flow-mods that it got.
    pub flow_mods: usize,
    /// Flow, group and meter mods that it got.
    pub commands: usize,
    /// Those of them that an answered barrier confirms.
    pub confirmed: usize,
    /// Bytes from and to each port.
    pub counters: BTreeMap<u32, (u64, u64)>,
    /// Ports whose other ends are tested (BFD), and whether they answer.
    pub tested: BTreeMap<u32, bool>,
}

/// Flow entries in one part of a reply, which has at most 64 KiB.
const PART: usize = 200;

/// Frames to send out of ports.
pub type Out = Vec<(u32, Bytes)>;

impl SwitchModel {
    /// A switch without ports and connection.
    pub fn new(datapath: u64, version: Version, tables: u8) -> Self {
        Self {
            datapath,
            version,
            tables,
            ports: BTreeMap::new(),
            connection: None,
            flows: Vec::new(),
            groups: BTreeMap::new(),
            meters: BTreeMap::new(),
            metered: BTreeMap::new(),
            has_meters: true,
            capacity: 10_000,
            refuses: None,
            has_groups: true,
            flow_mods: 0,
            commands: 0,
            confirmed: 0,
            counters: BTreeMap::new(),
            tested: BTreeMap::new(),
        }
    }

    /// Begins a connection to a controller.
    pub fn connect(&mut self, now: Time) {
        let config = Config { versions: vec![self.version], ..Config::new(Side::Switch) };
        self.connection = Some(Connection::new(config, now));
    }

    /// Loses its tables, as after a power failure.
    pub fn restart(&mut self) {
        self.connection = None;
        self.flows.clear();
        self.groups.clear();
        self.meters.clear();
    }

    fn port(&self, number: u32) -> Port {
        let down = if self.ports.get(&number) == Some(&true) { PortState::NONE } else { PortState::LINK_DOWN };
        let live = if self.tested.get(&number) == Some(&true) { PortState::LIVE } else { PortState::NONE };
        Port {
            number: PortNo(number),
            address: Mac([2, 0, 0, self.datapath as u8, 0, number as u8]),
            name: format!("p{number}").as_str().into(),
            config: PortConfig::NONE,
            state: down | live,
            current: Default::default(),
            advertised: Default::default(),
            supported: Default::default(),
            peer: Default::default(),
            current_speed: Kbps(0),
            max_speed: Kbps(0),
        }
    }

    /// Sets the state of a port, and reports a change to the controller.
    pub fn set_port(&mut self, number: u32, up: bool) {
        if self.ports.insert(number, up) != Some(up) {
            let status = PortStatus { reason: PortReason::Modify, port: self.port(number) };
            self.notify(Message::PortStatus(status));
        }
    }

    /// The other end of a port answers, or does not any more. Reports it to the controller.
    pub fn test(&mut self, number: u32, answers: bool) {
        self.tested.insert(number, answers);
        let status = PortStatus { reason: PortReason::Modify, port: self.port(number) };
        self.notify(Message::PortStatus(status));
    }

    fn notify(&mut self, message: Message) {
        if let Some(connection) = &mut self.connection {
            let _ = connection.notify(message);
        }
    }

    /// Bytes came from the controller.
    pub fn receive(&mut self, now: Time, bytes: &[u8]) -> Out {
        let Some(connection) = &mut self.connection else { return Vec::new() };
        connection.receive(now, bytes);
        self.events()
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        self.connection.as_ref()?.poll_timeout()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        if let Some(connection) = self.connection.as_mut().filter(|connection| connection.poll_timeout().is_some_and(|due| due <= now)) {
            connection.handle_timeout(now);
            self.events();
        }
    }

    fn events(&mut self) -> Out {
        let mut out = Vec::new();
        while let Some(event) = self.connection.as_mut().and_then(Connection::poll_event) {
            match event {
                Event::Message { xid, message } => out.extend(self.handle(xid, *message)),
                Event::Closed { .. } => self.connection = None,
                _ => {}
            }
        }
        out
    }

    fn respond(&mut self, xid: Xid, message: Message) {
        if let Some(connection) = &mut self.connection {
            connection.respond(xid, message).expect("the version has the message, and the controller reads");
        }
    }

    fn handle(&mut self, xid: Xid, message: Message) -> Out {
        self.commands += usize::from(matches!(message, Message::FlowMod(_) | Message::GroupMod(_) | Message::MeterMod(_)));
        let refusal = match &message {
            Message::FeaturesRequest => {
                let ports: Vec<Port> = self.ports.keys().map(|number| self.port(*number)).collect();
                let features = Features {
                    datapath: DatapathId(self.datapath),
                    buffers: 0,
                    tables: self.tables,
                    auxiliary: 0,
                    capabilities: Default::default(),
                    actions: 0,
                    ports: if self.version == Version::V1_0 { ports } else { Vec::new() },
                };
                self.respond(xid, Message::FeaturesReply(features));
                None
            }
            Message::BarrierRequest => {
                self.confirmed = self.commands;
                self.respond(xid, Message::BarrierReply);
                None
            }
            Message::MultipartRequest(request) => {
                let parts = self.stats(&request.body);
                if parts.is_empty() {
                    return self.refuse(xid, ErrorCode::BadRequestBadMultipart, &message);
                }
                let last = parts.len() - 1;
                for (number, body) in parts.into_iter().enumerate() {
                    self.respond(xid, Message::MultipartReply(MultipartReply { more: number < last, body }));
                }
                None
            }
            Message::FlowMod(flow) => self.flow_mod(flow),
            Message::GroupMod(group) => match (group.command, self.has_groups) {
                (_, false) => Some(ErrorCode::GroupModFailedOutOfGroups),
                _ if group.buckets.iter().flat_map(|bucket| &bucket.actions).any(|action| matches!(action, Action::Group(_))) => {
                    Some(ErrorCode::GroupModFailedChainingUnsupported)
                }
                (ModCommand::Add, _) if self.groups.contains_key(&group.group) => Some(ErrorCode::GroupModFailedGroupExists),
                (ModCommand::Modify, _) if !self.groups.contains_key(&group.group) => Some(ErrorCode::GroupModFailedUnknownGroup),
                (ModCommand::Delete, _) => {
                    self.groups.remove(&group.group);
                    let uses = |flow: &Flow| actions(&flow.instructions).any(|action| *action == Action::Group(group.group));
                    self.flows.retain(|flow| !uses(flow));
                    None
                }
                _ => {
                    self.groups.insert(group.group, group.buckets.clone());
                    None
                }
            },
            Message::MeterMod(meter) => match (meter.command, self.meters.contains_key(&meter.meter)) {
                _ if !self.has_meters => Some(ErrorCode::MeterModFailedOutOfMeters),
                (ModCommand::Add, true) => Some(ErrorCode::MeterModFailedMeterExists),
                (ModCommand::Modify, false) => Some(ErrorCode::MeterModFailedUnknownMeter),
                (ModCommand::Delete, _) => {
                    self.meters.remove(&meter.meter);
                    self.metered.remove(&meter.meter);
                    self.flows.retain(|flow| !flow.instructions.contains(&Instruction::Meter(meter.meter)));
                    None
                }
                _ => {
                    self.meters.insert(meter.meter, meter.bands.clone());
                    None
                }
            },
            Message::PacketOut(packet) => {
                let from = Some(packet.in_port).filter(|port| *port < PortNo::MAX).map(|port| (port.0, false));
                let mut frame = packet.data.clone();
                return self.apply(&packet.actions, from, &mut frame, Cookie(0), TableId(0), packet.in_port.0);
            }
            _ => None,
        };
        match refusal {
            Some(code) => self.refuse(xid, code, &message),
            None => Vec::new(),
        }
    }

    fn refuse(&mut self, xid: Xid, code: ErrorCode, message: &Message) -> Out {
        if let Some(connection) = &mut self.connection {
            connection.refuse(xid, code, message).expect("the version has the error, and the controller reads");
        }
        Vec::new()
    }

    fn flow_mod(&mut self, flow: &FlowMod) -> Option<ErrorCode> {
        self.flow_mods += 1;
        assert_eq!(flow.matching.check(), Ok(()), "{flow:?}");
        let fields = flow.matching.canonical().fields;
        let same = |known: &Flow| known.table == flow.table.0 && known.priority == flow.priority && known.fields == fields;
        if matches!(flow.command, FlowCommand::DeleteStrict | FlowCommand::Delete) {
            let asked = |known: &Flow| match flow.command {
                FlowCommand::DeleteStrict => same(known),
                _ => {
                    let table = flow.table == TableId::ALL || flow.table.0 == known.table || self.version == Version::V1_0;
                    table && is_within(&known.fields, &fields) && (known.cookie.0 ^ flow.cookie.0) & flow.cookie_mask.0 == 0
                }
            };
            let (gone, left) = std::mem::take(&mut self.flows).into_iter().partition(asked);
            self.flows = left;
            let gone: Vec<Flow> = gone;
            gone.into_iter().for_each(|flow| self.removed(&flow, RemovedReason::Delete));
            return None;
        }
        if self.refuses.is_some() {
            return self.refuses;
        }
        let bad = |action: &Action| matches!(action, Action::Group(group) if !self.groups.contains_key(group));
        if actions(&flow.instructions).any(bad) {
            return Some(ErrorCode::BadActionBadOutGroup);
        }
        let known = self.flows.iter().position(same);
        match (flow.command, known) {
            (FlowCommand::ModifyStrict, Some(at)) => self.flows[at].instructions.clone_from(&flow.instructions),
            (FlowCommand::ModifyStrict, None) if self.version == Version::V1_3 => {}
            (_, known) => {
                if let Some(at) = known {
                    self.flows.remove(at);
                } else if self.flows.len() >= self.capacity {
                    return Some(ErrorCode::FlowModFailedTableFull);
                }
                let (cookie, instructions) = (flow.cookie, flow.instructions.clone());
                let reports = flow.flags.contains(FlowFlags::SEND_FLOW_REM);
                self.flows.push(Flow { table: flow.table.0, priority: flow.priority, fields, cookie, instructions, packets: 0, reports });
                self.flows.sort_by_key(|flow| std::cmp::Reverse(flow.priority));
            }
        }
        None
    }

    /// An entry is gone.
    fn removed(&mut self, flow: &Flow, reason: RemovedReason) {
        if !flow.reports {
            return;
        }
        self.notify(Message::FlowRemoved(FlowRemoved {
            cookie: flow.cookie,
            priority: flow.priority,
            reason,
            table: TableId(flow.table),
            duration: None,
            idle_timeout: Seconds(0),
            hard_timeout: Seconds(0),
            packets: Some(flow.packets),
            bytes: Some(ByteCount::ZERO),
            matching: Match { fields: flow.fields.clone() },
        }));
    }

    /// An entry's time is over.
    pub fn time_out(&mut self, at: usize) {
        let flow = self.flows.remove(at);
        self.removed(&flow, RemovedReason::IdleTimeout);
    }

    /// The parts of the reply; none if the switch does not support the request.
    fn stats(&self, body: &RequestBody) -> Vec<ReplyBody> {
        let body = match body {
            RequestBody::Flow(query) => {
                let part = |flows: &[Flow]| ReplyBody::Flow(flows.iter().map(stats_of).collect());
                let asked = |flow: &&Flow| (flow.cookie.0 ^ query.cookie.0) & query.cookie_mask.0 == 0;
                let flows: Vec<Flow> = self.flows.iter().filter(asked).cloned().collect();
                return if flows.is_empty() { vec![part(&[])] } else { flows.chunks(PART).map(part).collect() };
            }
            RequestBody::GroupDescription if self.has_groups => ReplyBody::GroupDescription(
                self.groups
                    .iter()
                    .map(|(group, buckets)| GroupDescription {
                        kind: braid_openflow::group::GroupKind::All,
                        group: *group,
                        buckets: buckets.clone(),
                    })
                    .collect(),
            ),
            RequestBody::MeterConfig(_) => ReplyBody::MeterConfig(
                self.meters
                    .iter()
                    .map(|(meter, bands)| MeterConfig { flags: Default::default(), meter: *meter, bands: bands.clone() })
                    .collect(),
            ),
            RequestBody::Meter(_) => ReplyBody::Meter(
                self.meters
                    .keys()
                    .map(|meter| MeterStats {
                        meter: *meter,
                        flows: 0,
                        traffic: Traffic {
                            packets: None,
                            bytes: Some(ByteCount::new(self.metered.get(meter).copied().unwrap_or_default())),
                        },
                        duration: None,
                        bands: Vec::new(),
                    })
                    .collect(),
            ),
            RequestBody::MeterFeatures => ReplyBody::MeterFeatures(MeterFeatures {
                max_meters: if self.has_meters { 1 << 16 } else { 0 },
                band_types: 1 << 1,
                flags: MeterFlags::KBPS | MeterFlags::BURST,
                max_bands: 1,
                max_colours: 0,
            }),
            RequestBody::PortDescription => ReplyBody::PortDescription(self.ports.keys().map(|number| self.port(*number)).collect()),
            RequestBody::Port(_) => ReplyBody::Port(self.ports.keys().map(|port| self.port_stats(*port)).collect()),
            _ => return Vec::new(),
        };
        vec![body]
    }

    fn port_stats(&self, port: u32) -> PortStats {
        let (rx, tx) = self.counters.get(&port).copied().unwrap_or_default();
        PortStats::of_bytes(PortNo(port), Some(ByteCount::new(rx)), Some(ByteCount::new(tx)))
    }

    /// A frame came in.
    pub fn frame(&mut self, port: u32, frame: &Bytes) -> Out {
        if self.ports.get(&port) != Some(&true) {
            return Vec::new();
        }
        self.counters.entry(port).or_default().0 += frame.len() as u64;
        self.pipeline(port, frame)
    }

    /// A frame goes through the tables.
    fn pipeline(&mut self, port: u32, frame: &Bytes) -> Out {
        let (mut out, mut frame, mut set, mut metadata, mut table) = (Vec::new(), frame.clone(), Vec::new(), 0u64, 0);
        loop {
            let found = self.flows.iter_mut().find(|flow| flow.table == table && matches(&flow.fields, port, metadata, &frame));
            let Some(flow) = found else {
                // A switch of 1.0 asks the controller, one of 1.3 drops.
                if self.version == Version::V1_0 {
                    self.packet_in(port, &frame, PacketReason::NoMatch, Cookie(0), TableId(0));
                }
                return out;
            };
            flow.packets += 1;
            let (instructions, cookie, miss) = (flow.instructions.clone(), flow.cookie, flow.priority == 0);
            let mut next = None;
            for instruction in &instructions {
                match instruction {
                    Instruction::ApplyActions(actions) => {
                        out.extend(self.apply(actions, Some((port, miss)), &mut frame, cookie, TableId(table), port));
                    }
                    Instruction::WriteActions(actions) => set.extend(actions.iter().cloned()),
                    Instruction::ClearActions => set.clear(),
                    Instruction::WriteMetadata { metadata: bits, mask } => metadata = metadata & !mask | bits & mask,
                    Instruction::GotoTable(to) => next = Some(to.0),
                    Instruction::Meter(meter) => {
                        assert!(self.meters.contains_key(meter));
                        *self.metered.entry(*meter).or_default() += frame.len() as u64;
                    }
                    Instruction::Experimenter { .. } => panic!("{instruction:?}"),
                }
            }
            match next {
                Some(to) => table = to,
                None => {
                    out.extend(self.action_set(&set, (port, miss), &mut frame, cookie, TableId(table)));
                    return out;
                }
            }
        }
    }

    /// Executes an action set: of each kind the last one, rewriting first, and of groups and outputs one. Source: OpenFlow 1.3.5 section 5.10.
    fn action_set(&mut self, set: &[Action], from: (u32, bool), frame: &mut Bytes, cookie: Cookie, table: TableId) -> Out {
        let sends = |action: &&Action| matches!(action, Action::Output { .. } | Action::Group(_));
        let order = |action: &&Action| match action {
            Action::PopVlan => 0,
            Action::PushVlan(_) => 1,
            _ => 2,
        };
        let mut rewriting: Vec<&Action> = set.iter().filter(|action| !sends(action)).collect();
        rewriting.sort_by_key(order);
        rewriting.into_iter().for_each(|action| *frame = rewritten(frame, action));
        let group = set.iter().rev().find(|action| matches!(action, Action::Group(_)));
        let last = group.or(set.iter().rev().find(sends)).cloned();
        last.map(|action| self.apply(&[action], Some(from), frame, cookie, table, from.0)).unwrap_or_default()
    }

    /// `came`: the port where the frame came in, also if that is a reserved one.
    fn apply(
        &mut self,
        actions: &[Action],
        from: Option<(u32, bool)>,
        frame: &mut Bytes,
        cookie: Cookie,
        table: TableId,
        came: u32,
    ) -> Out {
        let mut out = Vec::new();
        for action in actions {
            match action {
                Action::Output { port, .. } | Action::Enqueue { port, .. } => {
                    out.extend(self.output(*port, from, frame, cookie, table, came))
                }
                Action::Group(group) => {
                    for bucket in self.groups.get(group).cloned().unwrap_or_default() {
                        let mut copy = frame.clone();
                        let miss = from.is_some_and(|(_, miss)| miss);
                        out.extend(self.action_set(&bucket.actions, (came, miss), &mut copy, cookie, table));
                    }
                }
                other => *frame = rewritten(frame, other),
            }
        }
        out
    }

    fn output(&mut self, to: PortNo, from: Option<(u32, bool)>, frame: &Bytes, cookie: Cookie, table: TableId, came: u32) -> Out {
        let in_port = from.map(|(port, _)| port);
        let ports: Vec<u32> = match to {
            PortNo::CONTROLLER => {
                if let Some((in_port, miss)) = from {
                    let reason = if miss { PacketReason::NoMatch } else { PacketReason::Action };
                    self.packet_in(in_port, frame, reason, cookie, table);
                }
                return Vec::new();
            }
            PortNo::TABLE => return self.pipeline(came, frame),
            PortNo::IN_PORT => in_port.into_iter().collect(),
            PortNo::FLOOD | PortNo::ALL | PortNo::NORMAL => self.ports.keys().copied().filter(|port| Some(*port) != in_port).collect(),
            PortNo(port) if Some(port) == in_port => Vec::new(),
            PortNo(port) => vec![port],
        };
        let mut out = Vec::new();
        for port in ports.into_iter().filter(|port| self.ports.get(port) == Some(&true)) {
            self.counters.entry(port).or_default().1 += frame.len() as u64;
            out.push((port, frame.clone()));
        }
        out
    }

    /// Sends a frame to the controller.
    pub fn packet_in(&mut self, port: u32, frame: &Bytes, reason: PacketReason, cookie: Cookie, table: TableId) {
        let (cookie, table) = if self.version == Version::V1_0 { (Cookie(0), TableId(0)) } else { (cookie, table) };
        let matching = Match::new([Oxm::in_port(PortNo(port))]);
        let total_len = frame.len() as u16;
        self.notify(Message::PacketIn(PacketIn { buffer: None, total_len, reason, table, cookie, matching, data: frame.clone() }));
    }

    /// What stands in the tables, without counters.
    pub fn entries(&self) -> BTreeSet<String> {
        self.flows.iter().map(|flow| format!("{} {} {:?} {:?}", flow.table, flow.priority, flow.fields, flow.instructions)).collect()
    }
}

fn stats_of(flow: &Flow) -> FlowStats {
    FlowStats {
        table: TableId(flow.table),
        duration: None,
        priority: flow.priority,
        idle_timeout: Seconds(0),
        hard_timeout: Seconds(0),
        flags: Default::default(),
        cookie: flow.cookie,
        traffic: Traffic { packets: Some(flow.packets), bytes: None },
        matching: Match { fields: flow.fields.clone() },
        instructions: flow.instructions.clone(),
    }
}

fn actions(instructions: &[Instruction]) -> impl Iterator<Item = &Action> {
    instructions.iter().flat_map(|instruction| match instruction {
        Instruction::ApplyActions(actions) => actions.as_slice(),
        _ => &[],
    })
}

/// Whether all packets of one match are in the other.
fn is_within(one: &[Oxm], other: &[Oxm]) -> bool {
    other.iter().all(|wanted| match wanted {
        Oxm::Basic { field, value, mask } => one.iter().any(|own| match own {
            Oxm::Basic { field: found, value: own, mask: bits } => {
                let (mask, bits) = (mask.unwrap_or(field.full_mask()), bits.unwrap_or(field.full_mask()));
                found == field && bits & mask == mask && own & mask == *value
            }
            Oxm::Other { .. } => false,
        }),
        other => one.contains(other),
    })
}

#[cfg(test)]
mod tests {
    use braid_openflow::multipart::{FlowQuery, MultipartRequest};
    use braid_openflow::oxm::Field;

    use super::*;

    /// Carries bytes both ways until there are none.
    fn talk(controller: &mut Connection, switch: &mut SwitchModel) -> Vec<Event> {
        loop {
            let (mut down, mut up) = (Vec::new(), Vec::new());
            controller.poll_output(&mut down);
            switch.receive(Time::ZERO, &down);
            switch.connection.as_mut().unwrap().poll_output(&mut up);
            controller.receive(Time::ZERO, &up);
            if down.is_empty() && up.is_empty() {
                return std::iter::from_fn(|| controller.poll_event()).collect();
            }
        }
    }

    #[test]
    fn barriers_confirm_changes_and_a_table_that_exceeds_a_message_comes_in_parts() {
        for version in Version::ALL {
            let mut controller = Connection::new(Config::new(Side::Controller), Time::ZERO);
            let mut switch = SwitchModel::new(1, version, 2);
            switch.connect(Time::ZERO);
            talk(&mut controller, &mut switch);
            for port in 0..1000u16 {
                let udp = [Oxm::exact(Field::EthType, 0x0800u16), Oxm::exact(Field::IpProto, 17u8), Oxm::exact(Field::UdpDst, port)];
                let instructions = vec![Instruction::ApplyActions(vec![Action::output(PortNo(2))])];
                let flow = FlowMod { matching: Match::new(udp), instructions, ..FlowMod::default() };
                controller.request(Time::ZERO, Message::FlowMod(flow)).unwrap();
            }
            talk(&mut controller, &mut switch);
            assert_eq!((switch.commands, switch.confirmed), (1000, 0));
            let all = MultipartRequest::new(RequestBody::Flow(FlowQuery::default()));
            for request in [Message::BarrierRequest, Message::MultipartRequest(all)] {
                controller.request(Time::ZERO, request).unwrap();
            }
            let events = talk(&mut controller, &mut switch);
            assert_eq!((switch.commands, switch.confirmed), (1000, 1000));
            let flows = events.iter().find_map(|event| match event {
                Event::Reply { message, .. } => match message.as_ref() {
                    Message::MultipartReply(MultipartReply { body: ReplyBody::Flow(flows), .. }) => Some(flows.len()),
                    _ => None,
                },
                _ => None,
            });
            assert_eq!(flows, Some(1000));
        }
    }
}
