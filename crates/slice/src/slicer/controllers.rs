//! Controllers: their connections, and what they ask for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use braid_model::Time;
use braid_openflow::flags::ConfigFlags;
use braid_openflow::ids::{DatapathId, MaxLen, PortNo, Xid};
use braid_openflow::switch::{Features, RoleMessage, SwitchConfig};
use braid_openflow::{CloseReason, Config, Connection, ErrorCode, Event, Message, MessageKind, SendError, Version};

use super::{ConnectionId, Dial, Link, LinkId, LinkPhase, Origin, Pending, Slicer, Up};
use crate::actions::Refusal;
use crate::plan::SliceNo;

/// After a connection of at least this time, delays begin anew.
const STEADY: Duration = Duration::from_secs(10);
/// Bytes of a packet that a controller of 1.0 gets if it does not say how many. Source: OpenFlow 1.0.1, `OFP_DEFAULT_MISS_SEND_LEN`.
const MISS: MaxLen = MaxLen(128);

impl Slicer {
    /// A controller is connected. `false` if it is not wanted any more: then the caller closes the connection.
    pub fn dialled(&mut self, now: Time, link: &LinkId, id: ConnectionId) -> bool {
        self.now = now;
        let Some(slice) = self.plan.slices.iter().find(|(_, planned)| planned.name == link.slice).map(|(slice, _)| *slice) else {
            return false;
        };
        let version = self.switches.get(&link.switch).map(|switch| switch.version);
        let Some(state) = self.links.get_mut(link).filter(|link| link.state == LinkPhase::Dialling) else { return false };
        state.state = LinkPhase::Up(id);
        // A controller sees the switch as it is: what one version expresses, the other may not.
        let versions = version.map_or_else(|| Version::ALL.to_vec(), |version| vec![version]);
        let connection = Connection::new(Config { versions, ..self.settings.controller.clone() }, now);
        let up = Up {
            connection,
            link: link.clone(),
            slice,
            switch: link.switch,
            version: None,
            backlog: VecDeque::new(),
            asked: 0,
            config: SwitchConfig { flags: ConfigFlags::NONE, miss_send_len: MISS },
            since: now,
            ready_at: None,
        };
        self.ups.insert(id, up);
        true
    }

    /// A controller cannot be reached.
    pub fn not_dialled(&mut self, now: Time, link: &LinkId, reason: &str) {
        self.now = now;
        let (first, most) = self.settings.redial;
        let Some(state) = self.links.get_mut(link).filter(|link| link.state == LinkPhase::Dialling) else { return };
        let is_news = state.delay == first;
        state.state = LinkPhase::Idle { until: now + state.delay };
        state.delay = (state.delay * 2).min(most);
        if is_news {
            let slice = self.number_of(&link.slice);
            let text = format!("no controller at {}: {reason}; start it, or change its address", link.address);
            self.trouble(now, slice, Some(link.switch), None, text);
        }
        self.work(now);
    }

    pub(super) fn number_of(&self, name: &str) -> Option<SliceNo> {
        self.plan.slices.iter().find(|(_, planned)| planned.name == name).map(|(slice, _)| *slice)
    }

    /// Dials what is due.
    pub(super) fn dial_due(&mut self, now: Time) {
        for (id, link) in &mut self.links {
            if matches!(link.state, LinkPhase::Idle { until } if until <= now) {
                link.state = LinkPhase::Dialling;
                self.dials.push_back(Dial(id.clone()));
            }
        }
    }

    pub(super) fn controller_events(&mut self, now: Time, id: ConnectionId) {
        while let Some(event) = self.ups.get_mut(&id).and_then(|up| up.connection.poll_event()) {
            match event {
                Event::Ready { version, .. } => {
                    let Some(up) = self.ups.get_mut(&id) else { return };
                    up.version = Some(version);
                    let (slice, switch, address) = (up.slice, up.switch, up.link.address.clone());
                    self.note(now, Some(slice), Some(switch), format!("its controller at {address} is connected with OpenFlow {version}"));
                }
                Event::Message { xid, message } => {
                    if let Some(up) = self.ups.get_mut(&id) {
                        up.backlog.push_back((xid, *message));
                    }
                }
                Event::Rejected { code, malformed, .. } => {
                    let Some(up) = self.ups.get(&id) else { return };
                    let (slice, switch) = (up.slice, up.switch);
                    self.counters.entry(slice).or_default().refused += 1;
                    let (message, text) = match malformed {
                        Some(error) => (error.message, format!("it is malformed: {error}; correct the controller")),
                        None => ("message", format!("it was answered with {code}")),
                    };
                    self.trouble(now, Some(slice), Some(switch), Some(message), text);
                }
                Event::Closed { reason, .. } => self.controller_closed(now, id, &reason),
                _ => {}
            }
        }
    }

    fn controller_closed(&mut self, now: Time, id: ConnectionId, reason: &CloseReason) {
        let Some(up) = self.ups.remove(&id) else { return };
        if let Some(roles) = self.switches.get_mut(&up.switch).and_then(|switch| switch.roles.get_mut(&up.slice)) {
            roles.remove(id);
        }
        let (first, most) = self.settings.redial;
        if let Some(link) = self.links.get_mut(&up.link).filter(|link| link.state == LinkPhase::Up(id)) {
            if now.since(up.since) >= STEADY {
                link.delay = first;
            }
            *link = Link { state: LinkPhase::Idle { until: now + link.delay }, delay: (link.delay * 2).min(most) };
            let text = format!("its controller at {} is gone ({reason}); its entries stay, and it is dialled again", up.link.address);
            self.trouble(now, Some(up.slice), Some(up.switch), None, text);
        }
        self.last_words(id, up.connection);
    }

    /// The controllers of a slice at a switch.
    pub(super) fn ups_of(&self, slice: SliceNo, datapath: DatapathId) -> Vec<ConnectionId> {
        self.ups.iter().filter(|(_, up)| up.slice == slice && up.switch == datapath).map(|(id, _)| *id).collect()
    }

    /// Sends an asynchronous message. `false` if the controller does not get it, though it wants to.
    pub(super) fn notify(&mut self, id: ConnectionId, message: Message) -> bool {
        self.ups.get_mut(&id).is_some_and(|up| up.connection.notify(message).is_ok())
    }

    /// Answers a controller.
    pub(super) fn respond(&mut self, now: Time, id: ConnectionId, xid: Xid, message: Message) {
        let Some(up) = self.ups.get_mut(&id) else { return };
        match up.connection.respond(xid, message) {
            Ok(()) => {}
            Err(SendError::Queued { .. }) => {
                up.connection.overflow();
                self.controller_events(now, id);
            }
            Err(error) => {
                let (slice, switch) = (up.slice, up.switch);
                self.trouble(now, Some(slice), Some(switch), None, format!("a reply was lost: {error}"));
            }
        }
    }

    /// Refuses a controller's message by an error, and says why.
    pub(super) fn refuse(&mut self, now: Time, origin: &Origin, refusal: &Refusal) {
        let Some(up) = self.ups.get_mut(&origin.up) else { return };
        let (slice, switch) = (up.slice, up.switch);
        let version = up.version.unwrap_or(Version::V1_3);
        let code = if refusal.code.numbers(version).is_some() { refusal.code } else { fallback(&origin.message) };
        if matches!(up.connection.refuse(origin.xid, code, &origin.message), Err(SendError::Queued { .. })) {
            up.connection.overflow();
            self.controller_events(now, origin.up);
        }
        self.counters.entry(slice).or_default().refused += 1;
        self.trouble(now, Some(slice), Some(switch), Some(origin.message.kind().name()), refusal.reason.clone());
    }

    pub(super) fn answered(&mut self, id: ConnectionId) {
        if let Some(up) = self.ups.get_mut(&id) {
            up.asked = up.asked.saturating_sub(1);
        }
    }

    pub(super) fn answered_if_asked(&mut self, origin: &Origin) {
        if origin.message.kind().reply().is_some() {
            self.answered(origin.up);
        }
    }

    /// Handles a controller's message.
    pub(super) fn handle(&mut self, now: Time, id: ConnectionId, xid: Xid, message: Message) {
        let Some(up) = self.ups.get_mut(&id) else { return };
        let (slice, datapath) = (up.slice, up.switch);
        self.counters.entry(slice).or_default().messages += 1;
        let message = Arc::new(message);
        let origin = Origin { up: id, xid, message: message.clone() };
        match &*message {
            Message::FeaturesRequest => self.features(now, datapath, slice, &origin),
            Message::GetConfigRequest => {
                let config = up.config;
                self.respond(now, id, xid, Message::GetConfigReply(config));
            }
            // The slice's own in appearance: the switch sends whole packets, so that no buffer is shared.
            Message::SetConfig(config) => up.config = *config,
            Message::BarrierRequest => {
                up.asked += 1;
                self.barrier(now, datapath, Some(origin));
            }
            Message::RoleRequest(request) => self.role(now, datapath, slice, &origin, *request),
            Message::MultipartRequest(request) => self.ask_statistics(now, datapath, slice, origin, &request.body),
            Message::QueueConfigRequest(port) => self.queues(now, datapath, slice, origin, *port),
            changing => match self.may_write(slice) {
                Err(refusal) => self.refuse(now, &origin, &refusal),
                Ok(()) => match changing {
                    Message::FlowMod(flow) => self.flow_mod(now, datapath, slice, origin, flow),
                    Message::PacketOut(packet) => self.packet_out(now, datapath, slice, origin, packet),
                    Message::GroupMod(group) => self.group_mod(now, datapath, slice, origin, group),
                    Message::MeterMod(meter) => self.meter_mod(now, datapath, slice, origin, meter),
                    other => {
                        let (code, what) = match other.kind() {
                            MessageKind::PortMod => (ErrorCode::PortModFailedEperm, "ports are shared: the operator configures them"),
                            MessageKind::TableMod => (ErrorCode::TableModFailedEperm, "tables are shared: the operator configures them"),
                            MessageKind::Experimenter => {
                                (ErrorCode::BadRequestBadExperimenter, "what an experimenter's message does is unknown")
                            }
                            MessageKind::Error => return,
                            _ => (ErrorCode::BadRequestBadType, "a controller does not send it"),
                        };
                        self.refuse(now, &origin, &Refusal::new(code, what));
                    }
                },
            },
        }
    }

    fn may_write(&self, slice: SliceNo) -> Result<(), Refusal> {
        let Some(planned) = self.plan.slices.get(&slice) else { return Ok(()) };
        if planned.regions.is_empty() || planned.regions.iter().any(|region| region.permission.write) {
            return Ok(());
        }
        Err(Refusal::new(ErrorCode::BadRequestEperm, "the slice may only read: give a part of its space write = true"))
    }

    fn features(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: &Origin) {
        let (Some(switch), Some(planned)) = (self.switches.get(&datapath), self.plan.slices.get(&slice)) else { return };
        let ports = if switch.version == Version::V1_0 { switch.ports_of(slice) } else { Vec::new() };
        let buffers = switch.features.buffers.min(planned.spec.limits.buffers as u32);
        let features = Features { ports, buffers, ..switch.features.clone() };
        self.respond(now, origin.up, origin.xid, Message::FeaturesReply(features));
    }

    /// Each slice has a master of its own. The switch does not learn of it.
    fn role(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: &Origin, request: RoleMessage) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let roles = switch.roles.entry(slice).or_default();
        match roles.request(origin.up, request) {
            Ok(change) => {
                let role = roles.role(origin.up);
                if let Some(other) = change.demoted.and_then(|other| self.ups.get_mut(&other)) {
                    other.connection.set_role(braid_openflow::switch::Role::Slave);
                }
                if let Some(up) = self.ups.get_mut(&origin.up) {
                    up.connection.set_role(role);
                }
                self.respond(now, origin.up, origin.xid, Message::RoleReply(change.reply));
            }
            Err(code) => self.refuse(now, origin, &Refusal::new(code, "the number of the election is older than the last one's")),
        }
    }

    fn queues(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: Origin, port: PortNo) {
        let sees = self.switches.get(&datapath).is_some_and(|switch| port == PortNo::ANY || switch.sees(slice, port));
        if !sees {
            return self.refuse(
                now,
                &origin,
                &Refusal::new(ErrorCode::QueueOpFailedBadPort, format!("port {port} is not one of its ports")),
            );
        }
        self.asks(origin.up);
        let pending = Pending::Ask { origin, ask: super::statistics::Ask::Queues };
        self.transmit(now, datapath, Message::QueueConfigRequest(port), pending);
    }

    pub(super) fn asks(&mut self, id: ConnectionId) {
        if let Some(up) = self.ups.get_mut(&id) {
            up.asked += 1;
        }
    }
}

/// The error for a message if the version lacks the one that says more.
fn fallback(message: &Message) -> ErrorCode {
    match message.kind() {
        MessageKind::FlowMod => ErrorCode::FlowModFailedEperm,
        _ => ErrorCode::BadRequestEperm,
    }
}
