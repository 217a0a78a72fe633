//! Switches: their connections, what is sent to them, and what they answer.

use std::collections::BTreeMap;

use braid_model::Time;
use braid_openflow::flow::FlowMod;
use braid_openflow::ids::{DatapathId, PortNo, Xid};
use braid_openflow::multipart::{MultipartRequest, RequestBody};
use braid_openflow::port::{Port, PortReason, PortStatus};
use braid_openflow::switch::{ErrorMessage, Features};
use braid_openflow::{CloseReason, Connection, ErrorCode, Event, Message, SendError, Version};

use super::{
    Bucket, CONFIRM, CONFIRM_AFTER, ConnectionId, LAST, LinkPhase, Origin, Pending, Slicer, Switch, SwitchPhase, packets::Buffers,
};
use crate::actions::Refusal;
use crate::plan::SliceNo;
use crate::table::{Key, Table};

impl Slicer {
    pub(super) fn switch_events(&mut self, now: Time, id: ConnectionId) {
        while let Some(event) = self.downs.get_mut(&id).and_then(|down| down.connection.poll_event()) {
            let datapath = self.downs.get(&id).and_then(|down| down.datapath);
            match (event, datapath) {
                (Event::Ready { version, features: Some(features) }, _) => self.switch_ready(now, id, version, *features),
                (Event::Message { message, .. }, Some(datapath)) => self.asynchronous(now, datapath, *message),
                (Event::Reply { xid, message }, Some(datapath)) => self.replied(now, id, datapath, xid, *message),
                (Event::Done { xid }, _) => {
                    if let Some(down) = self.downs.get_mut(&id) {
                        down.pending.remove(&xid);
                    }
                }
                (Event::Failed { xid, error }, Some(datapath)) => self.failed(now, id, datapath, xid, &error),
                (Event::TimedOut { xid } | Event::Rejected { xid, .. }, Some(datapath)) => self.unanswered(now, id, datapath, xid),
                (Event::Closed { reason, .. }, _) => self.switch_closed(now, id, &reason),
                _ => {}
            }
        }
    }

    fn switch_ready(&mut self, now: Time, id: ConnectionId, version: Version, features: Features) {
        let Some(name) = self.downs.get(&id).map(|down| down.name.clone()) else { return };
        let datapath = features.datapath;
        let stands = self.switches.get(&datapath).is_some_and(|switch| switch.connection.is_some());
        let is_full = self.switches.len() >= self.settings.switches && !self.switches.contains_key(&datapath);
        if features.auxiliary != 0 || stands || is_full {
            if features.auxiliary == 0 {
                let why = if stands {
                    "another connection has the same datapath id: give each switch one of its own"
                } else {
                    "there are too many switches"
                };
                self.trouble(now, None, Some(datapath), None, format!("{name} was refused: {why}"));
            }
            if let Some(down) = self.downs.get_mut(&id) {
                down.connection.close();
            }
            return;
        }
        if let Some(down) = self.downs.get_mut(&id) {
            down.datapath = Some(datapath);
        }
        let space = self.space_at(now, datapath, version);
        let switch = self.switch(datapath, version, &features);
        switch.space = space;
        // Entries of another version cannot be compared, and what was asked for may not be expressible any more.
        if switch.version != version {
            switch.table = Table::default();
            (switch.groups, switch.meters) = (BTreeMap::new(), BTreeMap::new());
        }
        switch.peer.clone_from(&name);
        (switch.connection, switch.phase, switch.version) = (Some(id), SwitchPhase::Reading, version);
        (switch.unconfirmed, switch.confirm_at) = (0, None);
        switch.set_ports(features.ports.iter().cloned());
        switch.features = features;
        self.note(now, None, Some(datapath), format!("connected from {name} with OpenFlow {version}"));
        self.read_tables(now, datapath);
    }

    /// The state of a switch, which may be new.
    pub(super) fn switch(&mut self, datapath: DatapathId, version: Version, features: &Features) -> &mut Switch {
        self.switches.entry(datapath).or_insert_with(|| Switch {
            connection: None,
            peer: String::new(),
            version,
            phase: SwitchPhase::Away,
            features: features.clone(),
            ports: BTreeMap::new(),
            port_list: Vec::new(),
            table: Table::default(),
            groups: BTreeMap::new(),
            meters: BTreeMap::new(),
            rates: BTreeMap::new(),
            has_meters: false,
            space: Vec::new(),
            roles: BTreeMap::new(),
            buffers: Buffers::default(),
            dying: BTreeMap::new(),
            reading: None,
            unconfirmed: 0,
            confirm_at: None,
            rates_of: BTreeMap::<SliceNo, [Bucket; 2]>::new(),
        })
    }

    /// Sends a request or a command. A switch that does not read loses its connection; its tables are put in order when it returns.
    pub(super) fn transmit(&mut self, now: Time, datapath: DatapathId, message: Message, pending: Pending) -> Option<Xid> {
        let switch = self.switches.get_mut(&datapath)?;
        let id = switch.connection?;
        let down = self.downs.get_mut(&id)?;
        let is_command = message.kind().reply().is_none();
        match down.connection.request(now, message) {
            Ok(xid) => {
                down.pending.insert(xid, pending);
                if is_command {
                    switch.unconfirmed += 1;
                    switch.confirm_at.get_or_insert(now + CONFIRM_AFTER);
                    if switch.unconfirmed >= CONFIRM {
                        self.barrier(now, datapath, None);
                    }
                }
                Some(xid)
            }
            Err(SendError::Encode(error)) => {
                let origin = match pending {
                    Pending::Row { origin, .. }
                    | Pending::Group { origin, .. }
                    | Pending::Meter { origin, .. }
                    | Pending::Command { origin } => origin,
                    Pending::Ask { origin, .. } => Some(origin),
                    _ => None,
                };
                if let Some(origin) = origin {
                    self.refuse(now, &origin, &Refusal::new(ErrorCode::BadRequestEperm, format!("{error}: use what this version has")));
                }
                None
            }
            Err(error) => {
                if matches!(error, SendError::Queued { .. }) {
                    down.connection.overflow();
                } else {
                    down.connection.close();
                }
                self.trouble(
                    now,
                    None,
                    Some(datapath),
                    None,
                    format!("its connection is ended: {error}; it is put in order when it returns"),
                );
                None
            }
        }
    }

    /// Asks a switch to confirm all that was sent before.
    pub(super) fn barrier(&mut self, now: Time, datapath: DatapathId, origin: Option<Origin>) {
        if let Some(switch) = self.switches.get_mut(&datapath) {
            (switch.unconfirmed, switch.confirm_at) = (0, None);
        }
        self.transmit(now, datapath, Message::BarrierRequest, Pending::Barrier { origin });
    }

    pub(super) fn ask(&mut self, now: Time, datapath: DatapathId, body: RequestBody, pending: Pending) {
        self.transmit(now, datapath, Message::MultipartRequest(MultipartRequest::new(body)), pending);
    }

    /// Sends the changes of rows.
    pub(super) fn send_rows(&mut self, now: Time, datapath: DatapathId, rows: Vec<(FlowMod, Key)>, origin: Option<&Origin>) {
        for (flow, key) in rows {
            let pending = match flow.command {
                braid_openflow::flow::FlowCommand::DeleteStrict => Pending::Command { origin: None },
                _ => Pending::Row { cookie: flow.cookie, key, origin: origin.cloned() },
            };
            self.transmit(now, datapath, Message::FlowMod(flow), pending);
        }
    }

    fn asynchronous(&mut self, now: Time, datapath: DatapathId, message: Message) {
        match message {
            Message::PacketIn(packet) => self.packet_in(now, datapath, packet),
            Message::FlowRemoved(removed) => self.flow_removed(now, datapath, &removed),
            Message::PortStatus(status) => self.port_status(now, datapath, status),
            _ => {}
        }
    }

    fn port_status(&mut self, now: Time, datapath: DatapathId, status: PortStatus) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let before = switch.port_list.clone();
        match status.reason {
            PortReason::Delete => drop(switch.ports.remove(&status.port.number)),
            PortReason::Add | PortReason::Modify => drop(switch.ports.insert(status.port.number, status.port.clone())),
        }
        switch.list_ports();
        let is_live = switch.phase == SwitchPhase::Live;
        if before != switch.port_list && is_live {
            let numbers: Vec<u64> = switch.table.entries.keys().copied().collect();
            self.set_system(now, datapath, true);
            self.renew_entries(now, datapath, numbers);
            self.renew_groups(now, datapath);
        }
        let Some(switch) = self.switches.get(&datapath) else { return };
        let see: Vec<ConnectionId> = self
            .ups
            .iter()
            .filter(|(_, up)| up.switch == datapath && switch.sees(up.slice, status.port.number))
            .map(|(id, _)| *id)
            .collect();
        for id in see {
            self.notify(id, Message::PortStatus(status.clone()));
        }
    }

    fn replied(&mut self, now: Time, id: ConnectionId, datapath: DatapathId, xid: Xid, message: Message) {
        let Some(pending) = self.downs.get_mut(&id).and_then(|down| down.pending.remove(&xid)) else { return };
        match (pending, message) {
            (Pending::Barrier { origin: Some(origin) }, _) => {
                self.answered(origin.up);
                self.respond(now, origin.up, origin.xid, Message::BarrierReply);
            }
            (Pending::Ask { origin, ask }, message) => self.statistics(now, datapath, &origin, ask, message),
            (Pending::Reading(part), Message::MultipartReply(reply)) => self.read(now, datapath, part, Some(reply.body)),
            (Pending::Settled, _) => self.settled(now, datapath),
            _ => {}
        }
    }

    fn failed(&mut self, now: Time, id: ConnectionId, datapath: DatapathId, xid: Xid, error: &ErrorMessage) {
        let Some(pending) = self.downs.get_mut(&id).and_then(|down| down.pending.remove(&xid)) else { return };
        let by_switch = |code: ErrorCode| Refusal::new(code, format!("the switch refuses it ({code})"));
        let refusal = by_switch(error.code);
        let origin = match pending {
            Pending::Row { cookie, key, origin } => {
                self.row_refused(now, datapath, cookie, &key, origin.is_none(), error.code);
                origin
            }
            Pending::Group { slice, group, before, origin } => {
                self.group_refused(datapath, slice, group, before);
                origin
            }
            Pending::Meter { slice, meter, before, origin } => {
                self.meter_refused(datapath, slice, meter, before);
                origin
            }
            Pending::Command { origin } | Pending::Barrier { origin } => origin,
            Pending::Ask { origin, .. } => Some(origin),
            Pending::Reading(part) => return self.read(now, datapath, part, None),
            Pending::Settled => return self.settled(now, datapath),
        };
        if let Some(origin) = origin {
            self.answered_if_asked(&origin);
            self.refuse(now, &origin, &refusal);
        }
    }

    /// A switch did not answer, or its answer cannot be read.
    fn unanswered(&mut self, now: Time, id: ConnectionId, datapath: DatapathId, xid: Xid) {
        let Some(pending) = self.downs.get_mut(&id).and_then(|down| down.pending.remove(&xid)) else { return };
        match pending {
            Pending::Ask { origin, .. } | Pending::Barrier { origin: Some(origin) } => {
                self.answered_if_asked(&origin);
                self.refuse(now, &origin, &Refusal::new(ErrorCode::BadRequestEperm, "the switch does not answer: ask again later"));
            }
            Pending::Reading(_) | Pending::Settled => {
                self.trouble(
                    now,
                    None,
                    Some(datapath),
                    None,
                    "it does not show its tables; its connection is ended, and it may return".to_owned(),
                );
                if let Some(down) = self.downs.get_mut(&id) {
                    down.connection.close();
                }
            }
            _ => {}
        }
    }

    fn switch_closed(&mut self, now: Time, id: ConnectionId, reason: &CloseReason) {
        let Some(down) = self.downs.remove(&id) else { return };
        self.last_words(id, down.connection);
        let Some(datapath) = down.datapath else { return };
        if let Some(switch) = self.switches.get_mut(&datapath).filter(|switch| switch.connection == Some(id)) {
            (switch.connection, switch.phase, switch.reading) = (None, SwitchPhase::Away, None);
            (switch.unconfirmed, switch.confirm_at) = (0, None);
            switch.dying.clear();
            switch.buffers = Buffers::default();
        }
        self.note(now, None, Some(datapath), format!("disconnected ({reason}); its entries stay"));
        self.sync_links(now);
    }

    /// What is left to write on a connection that is over.
    pub(super) fn last_words(&mut self, id: ConnectionId, mut connection: Connection) {
        let mut last = Vec::new();
        if connection.queued() <= LAST {
            connection.poll_output(&mut last);
        }
        self.closed.push_back((id, last));
    }

    /// Wants connections to controllers for what there is, and ends the others.
    pub(super) fn sync_links(&mut self, now: Time) {
        let mut wanted = std::collections::BTreeSet::new();
        for (datapath, switch) in self.switches.iter().filter(|(_, switch)| switch.phase == SwitchPhase::Live) {
            for (number, planned) in &self.plan.slices {
                // Users and hosts may come at any time.
                let waits = planned.spec.opt_in || planned.spec.stage.is_some();
                if !waits && !switch.space.iter().any(|owned| owned.slice == *number) {
                    continue;
                }
                let link = |address: &String| super::LinkId { slice: planned.name.clone(), switch: *datapath, address: address.clone() };
                wanted.extend(planned.spec.controllers.iter().map(link));
            }
        }
        let gone: Vec<super::LinkId> = self.links.keys().filter(|link| !wanted.contains(link)).cloned().collect();
        for link in gone {
            if let Some(super::Link { state: LinkPhase::Up(id), .. }) = self.links.remove(&link) {
                if let Some(up) = self.ups.get_mut(&id) {
                    up.connection.close();
                }
                self.controller_events(now, id);
            }
        }
        let delay = self.settings.redial.0;
        for link in wanted {
            self.links.entry(link).or_insert(super::Link { state: LinkPhase::Idle { until: now }, delay });
        }
        self.dial_due(now);
    }
}

impl Switch {
    pub(super) fn set_ports(&mut self, ports: impl Iterator<Item = Port>) {
        self.ports = ports.map(|port| (port.number, port)).collect();
        self.list_ports();
    }

    fn list_ports(&mut self) {
        self.port_list = self.ports.keys().copied().filter(|port| *port < PortNo::MAX).collect();
    }
}
