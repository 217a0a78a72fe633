//! Packets that switches send to the controller: LLDP, and those of hosts.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::{Mac, Time};
use braid_openflow::action::Action;
use braid_openflow::flow::{PacketIn, PacketOut, PacketReason};
use braid_openflow::ids::{DatapathId, PortNo, TableId};
use braid_openflow::{Message, Version};
use bytes::Bytes;

use super::{Complaint, Controller, Event, Phase};
use crate::discovery::Discovery;
use crate::frame::{self, Frame};
use crate::hosts::{HostRefusal, Sight};
use crate::ids::{AccessKind, Place};
use crate::lldp::LldpError;
use crate::mobility::HostEvent;
use crate::rules::Owner;

/// Where the EtherType of a frame is.
const ETHERTYPE: usize = 12;

impl Controller {
    pub(super) fn packet_in(&mut self, now: Time, datapath: DatapathId, packet: &PacketIn) {
        let Some(port) = packet.in_port() else { return };
        let place = Place { datapath, port };
        if frame::be16(&packet.data, ETHERTYPE) == Some(frame::LLDP) {
            if self.topology.port(place).is_none() {
                return;
            }
            let is_access = |place: Place| self.accesses.values().any(|access| access.place == place);
            match self.topology.receive(place, &packet.data, is_access) {
                Ok(changes) => {
                    self.timed(now, place, &packet.data);
                    self.topology_changed(now, changes);
                }
                Err(LldpError::Foreign) => {}
                Err(reason) if self.may_complain(now, place, Complaint::FalseLink) => self.log(Event::FalseLink { place, reason }),
                Err(_) => {}
            }
            return;
        }
        if self.config.offer.is_some() && Discovery::is_meant(&packet.data) {
            return self.discovered(now, place, &packet.data);
        }
        let Some(frame) = Frame::parse(&packet.data) else { return };
        let is_edge = self.topology.is_edge(place, now) && !self.mergers().contains(&place);
        if is_edge {
            self.learn(now, place, frame.source);
        }
        if let Some((host, address)) = frame.claim {
            self.hosts.claim(now, host, address);
        }
        let two_tables = self.switches.get(&datapath).is_some_and(|switch| switch.table.style.two_tables);
        // Else the switch has sent it on, too.
        let waits = if two_tables { packet.table != TableId(0) } else { packet.reason == PacketReason::NoMatch };
        if waits && packet.data.len() >= usize::from(packet.total_len) {
            self.forward(now, place, &frame, &packet.data, is_edge);
        }
    }

    /// A packet shows where a host is.
    pub(super) fn learn(&mut self, now: Time, place: Place, host: Mac) {
        let kind = self.accesses.values().find(|access| access.place == place).map(|access| access.kind);
        let client = self.hosts.get(host).filter(|state| state.client.is_some());
        // Clients say themselves where they are: a late packet is not to undo that, nor is a host that uses their address.
        if client.is_some_and(|state| state.attachments.values().any(|attachment| attachment.reported)) {
            return;
        }
        // One that says nothing is at one place.
        let others: Vec<Place> =
            client.into_iter().flat_map(|state| state.attachments.keys()).copied().filter(|other| *other != place).collect();
        // If it is refused, an event says so.
        if self.attach(now, host, place, kind.unwrap_or_default()).is_ok() {
            others.into_iter().for_each(|other| self.detach(now, host, other));
        }
    }

    pub(super) fn attach(&mut self, now: Time, host: Mac, place: Place, kind: AccessKind) -> Result<(), HostRefusal> {
        match self.hosts.see(now, host, place, kind) {
            Sight::Known | Sight::Ignored => return Ok(()),
            Sight::New => self.log(Event::HostNew { host, place }),
            Sight::Attached => self.log(Event::HostAttached { host, place }),
            Sight::Duplicate { places } => {
                self.log(Event::DuplicateHost { host, places });
                return Ok(());
            }
            Sight::Refused(reason) => {
                if self.may_complain(now, place, Complaint::TooManyHosts) {
                    self.log(Event::HostRefused { place, reason });
                }
                return Err(reason);
            }
        }
        self.adopted.remove(&host);
        self.dirty.owners.insert(Owner::Source(host));
        self.attachments_changed(host);
        self.reservations.hosts_changed(place);
        self.host_event(now, host, &HostEvent::Attached(place));
        Ok(())
    }

    /// The tables of a switch show a host that a former controller knew.
    pub(super) fn adopt(&mut self, now: Time, host: Mac, place: Place, is_routed: bool) {
        if self.hosts.get(host).is_some() && !self.adopted.contains(&host) {
            return;
        }
        let kind = self.accesses.values().find(|access| access.place == place).map(|access| access.kind);
        if !matches!(self.hosts.see(now, host, place, kind.unwrap_or_default()), Sight::New | Sight::Attached) {
            return;
        }
        self.adopted.insert(host);
        if let Some(state) = self.hosts.get_mut(host).filter(|_| is_routed) {
            state.active.push(place);
            self.standing.insert(host, state.active.clone());
            self.roots.entry(host).or_insert(place.datapath);
        }
        self.dirty.owners.extend([Owner::Source(host), Owner::Host(host)]);
        self.attachments_changed(host);
        self.reservations.hosts_changed(place);
    }

    /// Forgets a host.
    pub(super) fn forget_host(&mut self, _now: Time, host: Mac) {
        let Some(state) = self.hosts.remove(host) else { return };
        state.attachments.keys().for_each(|place| self.reservations.hosts_changed(*place));
        self.reservations.moved(host);
        self.log(Event::HostGone { host });
        self.managers.values_mut().for_each(|manager| manager.forget(host));
        self.roots.remove(&host);
        self.standing.remove(&host);
        self.routing.remove(&host);
        self.adopted.remove(&host);
        self.refused.retain(|(owner, _), _| ![Owner::Host(host), Owner::Source(host)].contains(owner));
        self.end([Owner::Source(host), Owner::Host(host)]);
        self.attachments_changed(host);
    }

    /// Sends a packet on for which a switch has no entry: to its host, or if it comes from a host, out of all edge ports. A port may look like an edge port
    /// because the switch at its other end is not connected: so that the packet cannot come back, no packet is sent on twice.
    fn forward(&mut self, now: Time, from: Place, frame: &Frame, data: &Bytes, floods: bool) {
        if !self.flood_budget.take(now, from) || !self.forwarded.passes(now, None, data) {
            return;
        }
        let known = self.hosts.get(frame.destination).map(|host| host.active.clone()).filter(|active| !active.is_empty());
        let places = match known {
            Some(active) => active,
            None if !floods => return,
            None => {
                let mergers = self.mergers();
                self.topology.edges(now).into_iter().filter(|place| !mergers.contains(place)).collect()
            }
        };
        let mut by_switch: BTreeMap<DatapathId, BTreeSet<PortNo>> = BTreeMap::new();
        for place in places.into_iter().filter(|place| *place != from) {
            by_switch.entry(place.datapath).or_default().insert(place.port);
        }
        for (datapath, ports) in by_switch {
            self.packet_out(datapath, ports.into_iter().map(Action::output).collect(), data.clone());
        }
    }

    pub(super) fn packet_out(&mut self, datapath: DatapathId, actions: Vec<Action>, data: Bytes) {
        let Some(switch) = self.switches.get(&datapath) else { return };
        let in_port = if switch.table.style.version == Version::V1_0 { PortNo::ANY } else { PortNo::CONTROLLER };
        self.send(datapath, Message::PacketOut(PacketOut { buffer: None, in_port, actions, data }));
    }

    /// Sends LLDP frames: of one switch, or one port of it, or all.
    pub(super) fn probe(&mut self, now: Time, only: Option<(DatapathId, Option<PortNo>)>) {
        let switches = &self.switches;
        let live = |datapath: DatapathId| {
            let phase = switches.get(&datapath).map(|switch| switch.phase);
            matches!(phase, Some(Phase::Live | Phase::Settling { .. }))
        };
        let (frames, changes) = self.topology.probe(now, only, live);
        if only.is_none() {
            self.echo(now);
        }
        for (place, frame) in frames {
            self.packet_out(place.datapath, vec![Action::output(place.port)], frame);
        }
        self.topology_changed(now, changes);
    }
}
