//! Switches: their connections, and what they answer.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::{ByteCount, Mac, Time};
use braid_openflow::flags::ConfigFlags;
use braid_openflow::ids::{DatapathId, MaxLen, MeterId, PortNo, Xid};
use braid_openflow::multipart::{FlowQuery, MultipartRequest, PortStats, ReplyBody, RequestBody};
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::port::{PortReason, PortStatus};
use braid_openflow::switch::{ErrorMessage, Features, SwitchConfig};
use braid_openflow::{CloseReason, ErrorCode, Event as Message, SendError, Version};

use super::{Controller, Event, Peer, Pending, Phase, Switch};
use crate::hosts::Host;
use crate::ids::{ConnectionId, Place};
use crate::mobility::{HostEvent, Load};
use crate::rules::{Command, Effect, Key, Owner, Reading, Table};
use crate::topology::Change;

/// Most switches at once, with those that are away.
const MAX_SWITCHES: usize = 2048;
/// Most bytes that are still sent on a connection that is closed.
const MAX_LAST: ByteCount = ByteCount::new(64 << 10);

impl Controller {
    pub(super) fn connection_events(&mut self, now: Time, connection: ConnectionId) {
        while let Some(event) = self.peers.get_mut(&connection).and_then(|peer| peer.connection.poll_event()) {
            match event {
                Message::Ready { version, features: Some(features) } => self.switch_ready(now, connection, version, &features),
                Message::Message { message, .. } => self.asynchronous(now, connection, *message),
                Message::Reply { xid, message } => self.replied(now, connection, xid, *message),
                Message::Done { xid } => {
                    if let Some(peer) = self.peers.get_mut(&connection) {
                        peer.pending.remove(&xid);
                    }
                }
                Message::Failed { xid, error } => self.failed(now, connection, xid, &error),
                Message::TimedOut { xid } => self.timed_out(connection, xid),
                // A request whose reply is malformed is over.
                Message::Rejected { xid, .. } => self.timed_out(connection, xid),
                Message::Closed { reason, .. } => self.closed(now, connection, reason),
                Message::Ready { features: None, .. } => {}
            }
        }
    }

    fn switch_ready(&mut self, now: Time, connection: ConnectionId, version: Version, features: &Features) {
        let Some(name) = self.peers.get(&connection).map(|peer| peer.name.clone()) else { return };
        let datapath = features.datapath;
        let standing = self.switches.get(&datapath).filter(|switch| switch.connection.is_some()).map(|switch| switch.peer.clone());
        if features.auxiliary != 0 || standing.is_some() {
            if let (Some(standing), 0) = (standing, features.auxiliary) {
                self.log(Event::DuplicateDatapath { datapath, standing, refused: name });
            }
            if let Some(peer) = self.peers.get_mut(&connection) {
                peer.connection.close();
            }
            return;
        }
        if self.switches.len() >= MAX_SWITCHES && !self.switches.contains_key(&datapath) {
            self.log(Event::TooManySwitches { datapath, peer: name });
            if let Some(peer) = self.peers.get_mut(&connection) {
                peer.connection.close();
            }
            return;
        }
        self.inherit_until.get_or_insert(now + self.config.inherit);
        if let Some(peer) = self.peers.get_mut(&connection) {
            peer.datapath = Some(datapath);
        }
        let style = crate::rules::Style::of(version, features.tables);
        let switch = self.switches.entry(datapath).or_insert_with(|| Switch {
            peer: String::new(),
            connection: None,
            phase: Phase::Reading,
            table: Table::new(style),
            reading: None,
            wrote: false,
            next_audit: now,
            uncertain: BTreeSet::new(),
            echo: None,
        });
        switch.peer.clone_from(&name);
        (switch.connection, switch.phase) = (Some(connection), Phase::Reading);
        switch.table.style = style;
        self.log(Event::SwitchUp { datapath, peer: name, version });
        // Ports of 1.3 come by a request. Until then those that are known stay.
        self.topology.add_switch(datapath);
        if version == Version::V1_0 {
            let changes = self.topology.set_ports(datapath, &features.ports);
            self.topology_changed(now, changes);
        } else {
            self.ask(now, datapath, RequestBody::PortDescription, Pending::Ports);
            self.ask(now, datapath, RequestBody::MeterFeatures, Pending::MeterFeatures);
        }
        // Whole packets to the controller, which can then send them on at another switch.
        let config = SwitchConfig { flags: ConfigFlags::NONE, miss_send_len: MaxLen::NO_BUFFER };
        self.send(datapath, braid_openflow::Message::SetConfig(config));
        self.read_tables(now, datapath);
    }

    /// Asks for all entries, groups and meters.
    fn read_tables(&mut self, now: Time, datapath: DatapathId) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        (switch.reading, switch.wrote) = (Some(Reading::default()), false);
        if switch.table.style.version == Version::V1_3 {
            self.ask(now, datapath, RequestBody::GroupDescription, Pending::Groups);
            self.ask(now, datapath, RequestBody::MeterConfig(MeterId::ALL), Pending::Meters);
        }
        self.ask(now, datapath, RequestBody::Flow(FlowQuery::default()), Pending::Flows);
    }

    pub(super) fn ask(&mut self, now: Time, datapath: DatapathId, body: RequestBody, pending: Pending) {
        self.transmit(now, datapath, braid_openflow::Message::MultipartRequest(MultipartRequest::new(body)), pending);
    }

    /// Sends a request or command. A switch that does not read what waits loses its connection, and is asked for its tables when it returns.
    pub(super) fn transmit(
        &mut self,
        now: Time,
        datapath: DatapathId,
        message: braid_openflow::Message,
        pending: Pending,
    ) -> Option<(ConnectionId, Xid)> {
        let connection = self.switches.get(&datapath)?.connection?;
        let peer = self.peers.get_mut(&connection)?;
        match peer.connection.request(now, message) {
            Ok(xid) => {
                peer.pending.insert(xid, pending);
                Some((connection, xid))
            }
            Err(error) => {
                if let (Pending::Command(effect), Some(switch)) = (&pending, self.switches.get_mut(&datapath)) {
                    switch.table.undo(effect);
                }
                match error {
                    SendError::Queued { .. } => peer.connection.overflow(),
                    _ => peer.connection.close(),
                }
                self.overflowed.insert(connection);
                None
            }
        }
    }

    /// Ends the connections for which most waits, while too much waits for all together.
    pub(super) fn bound_waiting(&mut self) {
        loop {
            let total = self.peers.values().map(|peer| peer.connection.queued()).fold(ByteCount::ZERO, |sum, queued| sum + queued);
            let open = self.peers.iter_mut().filter(|(_, peer)| !peer.connection.is_closed());
            let Some((id, peer)) = open.max_by_key(|(_, peer)| peer.connection.queued()).filter(|_| total > self.config.max_waiting) else {
                return;
            };
            peer.connection.overflow();
            self.overflowed.insert(*id);
        }
    }

    /// Sends a message that has no reply.
    pub(super) fn send(&mut self, datapath: DatapathId, message: braid_openflow::Message) {
        let connection = self.switches.get(&datapath).and_then(|switch| switch.connection);
        if let Some(peer) = connection.and_then(|connection| self.peers.get_mut(&connection)) {
            // It is for a packet only: if too much waits, the packet is lost.
            let _ = peer.connection.send(message);
        }
    }

    /// Sends commands, with a barrier where one depends on others: groups and meters before flow entries, their removal after.
    pub(super) fn command(&mut self, now: Time, datapath: DatapathId, commands: Vec<Command>) -> Option<(ConnectionId, Xid)> {
        let class = |command: &Command| match command.effect {
            Effect::Group | Effect::Meter => 0,
            Effect::Flow { .. } => 1,
            Effect::Removal => 2,
        };
        let mut last = None;
        if let Some(switch) = self.switches.get_mut(&datapath) {
            switch.wrote |= !commands.is_empty();
        }
        let mut classes: BTreeMap<u8, Vec<Command>> = BTreeMap::new();
        for command in commands {
            classes.entry(class(&command)).or_default().push(command);
        }
        for commands in classes.into_values() {
            for command in commands {
                self.transmit(now, datapath, command.message, Pending::Command(command.effect));
            }
            last = self.transmit(now, datapath, braid_openflow::Message::BarrierRequest, Pending::Barrier);
        }
        last
    }

    fn asynchronous(&mut self, now: Time, connection: ConnectionId, message: braid_openflow::Message) {
        let Some(datapath) = self.peers.get(&connection).and_then(|peer| peer.datapath) else { return };
        match message {
            braid_openflow::Message::PacketIn(packet) => self.packet_in(now, datapath, &packet),
            braid_openflow::Message::PortStatus(PortStatus { reason, port }) => {
                let place = Place { datapath, port: port.number };
                let changes = match reason {
                    PortReason::Delete => self.topology.remove_port(place),
                    PortReason::Add | PortReason::Modify => self.topology.set_port(datapath, &port),
                };
                self.topology_changed(now, changes);
            }
            _ => {}
        }
    }

    fn replied(&mut self, now: Time, connection: ConnectionId, xid: Xid, message: braid_openflow::Message) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let (Some(pending), Some(datapath)) = (peer.pending.remove(&xid), peer.datapath) else { return };
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        if let Pending::Echo(sent) = pending {
            switch.echo = Some(now.since(sent));
            return;
        }
        let body = match message {
            braid_openflow::Message::MultipartReply(reply) => reply.body,
            _ => {
                if switch.phase == Phase::Silent {
                    switch.phase = Phase::Live;
                    self.topology.set_present(datapath);
                    self.dirty.all = true;
                }
                return self.barrier_done(now, connection, xid);
            }
        };
        let mut complete = false;
        match (pending, body, &mut switch.reading) {
            (Pending::Ports, ReplyBody::PortDescription(ports), _) => {
                let changes = self.topology.set_ports(datapath, &ports);
                self.topology_changed(now, changes);
            }
            (Pending::MeterFeatures, ReplyBody::MeterFeatures(features), _) => {
                switch.table.style.meters &= features.max_meters > 0;
                switch.table.style.most_meters = features.max_meters;
                self.dirty.all = true;
            }
            (Pending::Groups, ReplyBody::GroupDescription(groups), Some(reading)) => reading.groups = groups,
            (Pending::Meters, ReplyBody::MeterConfig(meters), Some(reading)) => reading.meters = meters,
            // It was asked for last.
            (Pending::Flows, ReplyBody::Flow(flows), Some(reading)) => {
                reading.flows = flows;
                complete = true;
            }
            (Pending::Counters, ReplyBody::Port(ports), _) => self.counted(now, datapath, &ports),
            (Pending::MeterCounters, ReplyBody::Meter(meters), _) => self.meters_read(now, datapath, &meters),
            _ => {}
        }
        if complete {
            self.tables_read(now, datapath);
        }
    }

    fn failed(&mut self, now: Time, connection: ConnectionId, xid: Xid, error: &ErrorMessage) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        let (Some(pending), Some(datapath)) = (peer.pending.remove(&xid), peer.datapath) else { return };
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        match pending {
            Pending::Command(effect) => {
                switch.table.undo(&effect);
                switch.next_audit = switch.next_audit.min(now + std::time::Duration::from_secs(1));
                self.refused(now, datapath, effect, error.code);
            }
            Pending::Barrier => self.barrier_done(now, connection, xid),
            Pending::Groups => switch.table.style.groups = false,
            Pending::Meters | Pending::MeterFeatures => switch.table.style.meters = false,
            // Without its tables it cannot be controlled: it may return.
            Pending::Flows => peer.connection.close(),
            Pending::Ports | Pending::Counters | Pending::MeterCounters | Pending::Echo(_) => {}
        }
    }

    /// A switch refused a command. Entries of this owner avoid it for a while; a route that ends at it goes back.
    fn refused(&mut self, now: Time, datapath: DatapathId, effect: Effect, code: ErrorCode) {
        let owner = match effect {
            // The entry is written again without a group or meter.
            Effect::Group | Effect::Meter => {
                self.dirty.all = true;
                return;
            }
            Effect::Removal => return,
            Effect::Flow { owner, .. } => owner,
        };
        self.dirty.owners.insert(owner);
        // Without groups or meters it may accept the entry. If it did not use them already, trying again at once would never end.
        if let Some(style) = self.switches.get_mut(&datapath).map(|switch| &mut switch.table.style) {
            let goes_without = match code {
                ErrorCode::BadActionBadOutGroup => std::mem::take(&mut style.groups),
                ErrorCode::MeterModFailedUnknownMeter => std::mem::take(&mut style.meters),
                _ => false,
            };
            if goes_without {
                return;
            }
        }
        self.log(Event::RuleRefused { datapath, owner, code });
        self.abandon(owner);
        self.refused.insert((owner, datapath), now + self.config.retry);
        if let Owner::Host(host) | Owner::Source(host) = owner {
            self.roll_back(now, host, datapath);
        }
    }

    /// A request or command is not answered. The connection ends; when the switch returns, its tables are read.
    fn timed_out(&mut self, connection: ConnectionId, xid: Xid) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        match peer.pending.remove(&xid) {
            Some(Pending::Counters | Pending::MeterCounters | Pending::Echo(_)) | None => {}
            Some(_) => peer.connection.close(),
        }
    }

    fn closed(&mut self, now: Time, connection: ConnectionId, reason: CloseReason) {
        let Some(Peer { name, datapath, pending, connection: mut ended }) = self.peers.remove(&connection) else { return };
        let mut last = Vec::new();
        // Who has left more unread than this does not read.
        if ended.queued() <= MAX_LAST {
            ended.poll_output(&mut last);
        }
        self.closed.push_back((connection, last));
        let Some(datapath) = datapath else {
            return self.log(Event::Handshake { peer: name, reason });
        };
        if let Some(switch) = self.switches.get_mut(&datapath) {
            (switch.connection, switch.phase, switch.reading) = (None, Phase::Away { since: now }, None);
            let owners = pending.into_values().filter_map(|pending| match pending {
                Pending::Command(Effect::Flow { owner, .. }) => Some(owner),
                _ => None,
            });
            switch.uncertain.extend(owners);
        }
        self.counters.retain(|place, _| place.datapath != datapath);
        self.loads.retain(|place, _| place.datapath != datapath);
        self.metered.retain(|(at, _), _| *at != datapath);
        self.log(Event::SwitchAway { datapath, peer: name, reason });
        self.topology.set_absent(datapath);
        // What waits for this switch is planned anew, around it.
        self.dirty.urgent |= self.update.is_some();
        self.dirty.all = true;
    }

    fn tables_read(&mut self, now: Time, datapath: DatapathId) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some(reading) = switch.reading.take() else { return };
        switch.next_audit = now + self.config.audit_interval;
        if switch.wrote {
            // Commands were on the way: read again.
            switch.next_audit = now + std::time::Duration::from_secs(1);
            return;
        }
        let (commands, lively, changed) = switch.table.read(&reading);
        switch.uncertain.clear();
        let is_new = switch.phase == Phase::Reading;
        if is_new {
            if self.inherit_until.is_some() {
                // These owners have entries for the ports of links.
                let of_links = [Owner::Base, Owner::Broadcast].into_iter().flat_map(|owner| switch.table.of(owner));
                of_links.filter_map(|(key, _)| in_port(key)).for_each(|port| self.topology.presume(Place { datapath, port }));
            }
            switch.phase = Phase::Settling { until: now + self.config.settle };
            self.topology.set_present(datapath);
            self.dirty.owners.insert(Owner::Base);
            self.probe(now, Some((datapath, None)));
        } else {
            self.dirty.owners.extend(changed);
            self.audit_hosts(now, datapath, &lively);
        }
        self.command(now, datapath, commands);
    }

    /// Hosts whose packets a switch has counted live.
    fn audit_hosts(&mut self, now: Time, datapath: DatapathId, lively: &BTreeSet<Owner>) {
        let two_tables = self.switches.get(&datapath).is_some_and(|switch| switch.table.style.two_tables);
        let owner = |host| if two_tables { Owner::Source(host) } else { Owner::Host(host) };
        let ports: Vec<PortNo> = self.topology.ports(datapath).collect();
        let here: BTreeSet<Mac> = ports.into_iter().flat_map(|port| self.hosts.at(Place { datapath, port })).collect();
        for host in here {
            if self.hosts.audit(host, lively.contains(&owner(host))) {
                self.forget_host(now, host);
            }
        }
    }

    /// Hosts without an attachment are forgotten after the same time as silent ones.
    pub(super) fn sweep_hosts(&mut self, now: Time) {
        let lost: Vec<Mac> = self.hosts.iter().filter(|(_, host)| host.attachments.is_empty()).map(|(host, _)| host).collect();
        for host in lost {
            if self.hosts.audit(host, false) {
                self.forget_host(now, host);
            }
        }
    }

    pub(super) fn switch_timers(&mut self, now: Time) {
        let datapaths: Vec<DatapathId> = self.switches.keys().copied().collect();
        for datapath in datapaths {
            match self.switches.get(&datapath).map(|switch| (switch.phase, switch.next_audit)) {
                Some((Phase::Settling { until }, _)) if until <= now => self.settled(now, datapath),
                Some((Phase::Away { since }, _)) if since + self.config.away <= now => {
                    self.switches.remove(&datapath);
                    self.log(Event::SwitchGone { datapath });
                    let changes = self.topology.remove_switch(datapath);
                    self.topology_changed(now, changes);
                    self.dirty.all = true;
                }
                Some((Phase::Live, next)) if next <= now => {
                    if let Some(switch) = self.switches.get_mut(&datapath) {
                        switch.next_audit = now + self.config.audit_interval;
                    }
                    self.read_tables(now, datapath);
                }
                _ => {}
            }
        }
    }

    /// The links of a switch are known by now. Its entries show which hosts a former controller knew.
    fn settled(&mut self, now: Time, datapath: DatapathId) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        switch.phase = Phase::Live;
        self.dirty.all = true;
        let (mut found, mut routed, mut receiving) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let table = &switch.table;
        for owner in table.owners() {
            for (key, entry) in table.of(owner) {
                match owner {
                    Owner::Source(host) => found.extend(in_port(key).map(|port| (host, port))),
                    Owner::Host(host) => {
                        let ports = || entry.content.outputs.iter().map(move |port| (host, *port));
                        routed.extend(ports());
                        found.extend(ports().filter(|_| !table.style.two_tables && entry.content.here));
                    }
                    Owner::Group(id) => receiving.extend(entry.content.outputs.iter().map(|port| (id, *port))),
                    _ => {}
                }
            }
        }
        for (id, port) in receiving {
            let place = Place { datapath, port };
            if self.inherit_until.is_some() && self.topology.is_edge(place, now) {
                self.inherited.entry(id).or_default().insert(place);
            }
        }
        for (host, port) in found {
            let place = Place { datapath, port };
            if self.topology.is_edge(place, now) {
                self.adopt(now, host, place, routed.contains(&(host, port)));
            }
        }
    }

    /// What changed in the topology, for hosts and paths.
    pub(super) fn topology_changed(&mut self, now: Time, changes: Vec<Change>) {
        let has_lost = changes.iter().any(|change| matches!(change, Change::LinkLost(_) | Change::PortDown(_)));
        // What is found changes nothing while no switch is cut off.
        if has_lost || !changes.is_empty() && self.topology.has_cut_off() {
            self.dirty.all |= self.topology.find_cut_off();
        }
        for change in changes {
            match change {
                Change::LinkFound(link) => {
                    self.log(Event::LinkUp(link));
                    self.dirty.all = true;
                }
                Change::LinkLost(link) => {
                    self.log(Event::LinkDown(link));
                    self.dirty.urgent = true;
                    match self.changed_by(link) {
                        Some(owners) => self.dirty.owners.extend(owners),
                        None => self.dirty.all = true,
                    }
                }
                Change::LinkNarrow(link) => self.log(Event::LinkNarrow(link)),
                Change::LinkWide(link) => self.log(Event::LinkWide(link)),
                Change::NoEdge(place) => self.detach_all(now, place),
                Change::PortUp(place) => {
                    self.log(Event::PortUp(place));
                    self.probe(now, Some((place.datapath, Some(place.port))));
                    self.dirty.owners.insert(Owner::Base);
                }
                Change::PortDown(place) => {
                    self.log(Event::PortDown(place));
                    // A link that ended there is another change.
                    self.dirty.urgent |= self.hosts.at(place).next().is_some() || self.mergers().contains(&place);
                    self.detach_all(now, place);
                    self.dirty.owners.extend([Owner::Base, Owner::Broadcast]);
                }
            }
        }
        if has_lost {
            self.leave_cut_off(now);
        }
    }

    /// Clients whose packets go to switches that are cut off, and that are attached elsewhere too, count as newly attached there: their managers route them.
    fn leave_cut_off(&mut self, now: Time) {
        let better = |(host, state): (Mac, &Host)| {
            let is_served = state.active.is_empty() || state.active.iter().any(|place| !self.topology.is_cut_off(place.datapath));
            let serving = state.attachments.iter().filter(|(place, _)| !is_served && self.topology.serves(**place));
            serving.max_by_key(|(place, attachment)| (attachment.since, **place)).map(|(place, _)| (host, *place))
        };
        let moved: Vec<(Mac, Place)> = self.hosts.iter().filter_map(better).collect();
        for (host, place) in moved {
            self.host_event(now, host, &HostEvent::Attached(place));
        }
    }

    fn detach_all(&mut self, now: Time, place: Place) {
        let hosts: Vec<Mac> = self.hosts.at(place).collect();
        for host in hosts {
            self.detach(now, host, place);
        }
        self.dirty.owners.insert(Owner::Broadcast);
    }

    /// An attachment of a host ended.
    pub(super) fn detach(&mut self, now: Time, host: Mac, place: Place) {
        if self.hosts.detach(host, place) {
            self.log(Event::HostDetached { host, place });
            self.dirty.owners.insert(Owner::Source(host));
            self.attachments_changed(host);
            self.reservations.hosts_changed(place);
            self.host_event(now, host, &HostEvent::Detached(place));
            // Without an attachment nothing shows life. A client may come back.
            if self.hosts.get(host).is_some_and(|host| host.attachments.is_empty() && host.client.is_none()) {
                self.forget_host(now, host);
            }
        }
    }

    /// Asks for the counters of ports with access points.
    pub(super) fn measure(&mut self, now: Time) {
        self.loads_measured(now);
        let switches: BTreeSet<DatapathId> = self.accesses.values().map(|access| access.place.datapath).collect();
        for datapath in switches.into_iter().filter(|datapath| self.is_live(*datapath)).collect::<Vec<_>>() {
            self.ask(now, datapath, RequestBody::Port(PortNo::ANY), Pending::Counters);
        }
        for datapath in self.metered_switches() {
            self.ask(now, datapath, RequestBody::Meter(MeterId::ALL), Pending::MeterCounters);
        }
    }

    fn counted(&mut self, now: Time, datapath: DatapathId, ports: &[PortStats]) {
        // A switch may name any port, so only those of access points are kept.
        let measured: BTreeSet<PortNo> =
            self.accesses.values().filter(|access| access.place.datapath == datapath).map(|access| access.place.port).collect();
        for stats in ports.iter().filter(|stats| measured.contains(&stats.port)) {
            let (Some(up), Some(down)) = (stats.rx_bytes, stats.tx_bytes) else { continue };
            let place = Place { datapath, port: stats.port };
            if let Some((at, old_up, old_down)) = self.counters.insert(place, (now, up, down)) {
                // Counters that go back are those of a switch that was restarted.
                let span = now.since(at);
                let load = Load { up: up.saturating_sub(old_up).per(span), down: down.saturating_sub(old_down).per(span) };
                self.loads.insert(place, load);
            }
        }
    }
}

fn in_port(key: &Key) -> Option<PortNo> {
    key.fields.iter().find_map(|oxm| match oxm {
        Oxm::Basic { field: Field::InPort, value, mask: None } => u32::try_from(*value).ok().map(PortNo),
        _ => None,
    })
}
