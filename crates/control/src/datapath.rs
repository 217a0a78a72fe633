//! This device as a datapath of a remote controller (Yap's thesis, 2.3: the control plane can be run by the operator, or outsourced).
//!
//! [`Agent`] is the switch's side of one OpenFlow 1.3 connection, without I/O. It shows the links as ports, and makes the controller's flow entries rules of
//! the core ([`Core::set_controller_rules`]), behind the user's entries and the rules of programs:
//!
//! - An entry chooses the link of new flows. A flow is both directions of its packets, and keeps its link.
//! - Everything enters by [`PortNo::LOCAL`]: programs of this machine, and clients behind it.
//! - The user's policy comes first: what it forbids is refused. No entry lets a flow fail: while the port of an entry is down, the local policy decides about
//!   its flows, as about those that no entry matches.
//! - If an entry sends flows to the controller, a packet-in shows the packet with which each begins. The flow does not wait for the answer, so a packet-out
//!   that lets it go has no effect.
//! - Bytes of entries are those of their flows in both directions. Packets are not counted.
//! - When the connection ends, or the controller does not answer an echo request, all entries go at once.

mod meaning;
mod packet;
mod ports;
mod requests;
mod table;

use std::time::Duration;

use braid_decide::policy::AppRule;
use braid_model::{ByteCount, Mac, Time};
use braid_openflow::action::Action;
use braid_openflow::flags::{Capabilities, ConfigFlags};
use braid_openflow::flow::{FlowMod, PacketIn, PacketOut, PacketReason};
use braid_openflow::group::ModCommand;
use braid_openflow::ids::{Cookie, DatapathId, MaxLen, PortNo, TableId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{AggregateStats, MultipartReply, ReplyBody, RequestBody, Traffic};
use braid_openflow::oxm::Oxm;
use braid_openflow::port::QueueConfig;
use braid_openflow::switch::{Features, RoleMessage, SwitchConfig};
use braid_openflow::{CloseReason, Config, Connection, ErrorCode, Event, Message, PartLimits, Roles, SendError, Side, Version};

use crate::core::{ControllerJudge, Core, FlowNote};
use crate::steering::{Steering, SteeringError};
use ports::Ports;
use table::{Bounds, FlowTable, TABLE};

/// Silence of the controller after which it is asked whether it is there, and time for its answer.
pub const ECHO: Duration = Duration::from_secs(1);
/// Time for the controller's hello.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Changes of the table are put in force together, at most once in this time, so that a controller cannot keep the device busy with them.
const PACE: Duration = Duration::from_millis(10);
/// The number of a device without any.
const UNKNOWN: DatapathId = DatapathId(1);
/// Most bytes that wait for a controller that does not read.
const MAX_QUEUED: ByteCount = ByteCount::new(1 << 20);
/// Most barriers that are answered together.
const MAX_BARRIERS: usize = 1024;
/// No request in several parts is answered with more than an error.
const PARTS: PartLimits = PartLimits { bytes: ByteCount::new(256 << 10), sequences: 2 };

/// The switch's side of the connection to a remote controller.
///
/// The caller reports what happens to the connection, passes what was received to [`receive`](Self::receive) while [`takes_input`](Self::takes_input), and calls
/// [`step`](Self::step) after each input to the core and when [`poll_timeout`](Self::poll_timeout) is due. After each call it sends what
/// [`poll_output`](Self::poll_output) gives, and closes the connection if [`poll_end`](Self::poll_end) says so.
pub struct Agent {
    /// The number that the user has chosen.
    id: Option<DatapathId>,
    /// The number on this connection.
    datapath: DatapathId,
    connection: Option<Connection>,
    /// Whether the hellos are exchanged.
    in_control: bool,
    /// Why the connection is to be closed.
    ended: Option<CloseReason>,
    roles: Roles<()>,
    config: SwitchConfig,
    ports: Ports,
    table: FlowTable,
    /// The table has changed since it was put in force last.
    is_changed: bool,
    /// When it may be put in force again.
    next: Time,
    /// Barriers that wait for that.
    barriers: Vec<Xid>,
    /// A message behind them whose answer has to follow theirs. What came after it waits in the connection.
    postponed: Option<(Xid, Box<Message>)>,
    /// The policy, for the flow-mods that are handled together.
    judge: Option<ControllerJudge>,
}

impl Agent {
    /// An agent without connection. `id`: the number by which the controller knows this device; `None`: that of the first link's hardware address.
    pub fn new(id: Option<DatapathId>) -> Self {
        Self {
            id,
            datapath: id.unwrap_or(UNKNOWN),
            connection: None,
            in_control: false,
            ended: None,
            roles: Roles::default(),
            config: SwitchConfig { flags: ConfigFlags::NONE, miss_send_len: MaxLen(128) },
            ports: Ports::default(),
            table: FlowTable::default(),
            is_changed: false,
            next: Time::ZERO,
            barriers: Vec::new(),
            postponed: None,
            judge: None,
        }
    }

    /// A connection to the controller was established.
    pub fn connected(&mut self, now: Time) {
        let config = Config {
            versions: vec![Version::V1_3],
            handshake_timeout: HANDSHAKE,
            echo_interval: ECHO,
            echo_timeout: ECHO,
            max_queued: MAX_QUEUED,
            parts: PARTS,
            ..Config::new(Side::Switch)
        };
        self.connection = Some(Connection::new(config, now));
    }

    /// Handles received bytes. An error is that of the kernel, which is tried again.
    pub fn receive<S: Steering>(&mut self, now: Time, core: &mut Core<S>, bytes: &[u8]) -> Result<(), SteeringError> {
        if let Some(connection) = &mut self.connection {
            connection.receive(now, bytes);
        }
        self.step(now, core)
    }

    /// The connection has ended, or there is to be none: all entries go.
    pub fn disconnected<S: Steering>(&mut self, now: Time, core: &mut Core<S>) -> Result<(), SteeringError> {
        (self.connection, self.ended) = (None, None);
        self.release(now, core)
    }

    /// Does what is due, and follows the links and flows of the core.
    pub fn step<S: Steering>(&mut self, now: Time, core: &mut Core<S>) -> Result<(), SteeringError> {
        let Some(connection) = &mut self.connection else { return Ok(()) };
        if connection.poll_timeout().is_some_and(|due| due <= now) {
            connection.handle_timeout(now);
        }
        let mut done = self.handle_events(now, core);
        if self.in_control {
            self.follow(now, core);
            let (any, removed) = self.table.expire(now);
            self.is_changed |= any;
            removed.into_iter().for_each(|removed| self.notify(Message::FlowRemoved(removed)));
        }
        if self.is_changed && self.next <= now {
            let applied = self.apply(now, core);
            let rest = self.handle_events(now, core);
            done = done.and(applied).and(rest);
        }
        done
    }

    /// When to call [`step`](Self::step).
    pub fn poll_timeout(&self) -> Option<Time> {
        let connection = self.connection.as_ref().and_then(Connection::poll_timeout);
        let apply = self.is_changed.then_some(self.next);
        [connection, self.table.next_due(), apply].into_iter().flatten().min()
    }

    /// Whether it handles more of what the controller sends. If not, it does so when [`poll_timeout`](Self::poll_timeout) is due.
    pub fn takes_input(&self) -> bool {
        self.postponed.is_none() && self.barriers.len() < MAX_BARRIERS
    }

    /// Moves all bytes that wait to the end of `out`. `false` if there are none.
    pub fn poll_output(&mut self, out: &mut Vec<u8>) -> bool {
        self.connection.as_mut().is_some_and(|connection| connection.poll_output(out))
    }

    /// Why the connection is to be closed, once. The last bytes are still to be sent. The entries are gone already.
    pub fn poll_end(&mut self) -> Option<CloseReason> {
        self.ended.take()
    }

    /// Whether the controller has the flow table.
    pub fn is_in_control(&self) -> bool {
        self.in_control
    }

    /// Number of the controller's entries.
    pub fn entries(&self) -> usize {
        self.table.len()
    }

    /// The number by which the controller knows this device, once it is in control.
    pub fn datapath(&self) -> DatapathId {
        self.datapath
    }

    /// The hardware address of this machine's own port.
    fn own_address(&self) -> Mac {
        let [_, _, a, b, c, d, e, f] = self.datapath.0.to_be_bytes();
        Mac([a, b, c, d, e, f])
    }

    /// Gives the controller the table.
    fn hand_over<S: Steering>(&mut self, now: Time, core: &mut Core<S>) {
        self.in_control = true;
        self.ports = Ports::default();
        self.ports.follow(core.link_ports(now));
        let of = |mac: Mac| DatapathId(mac.0.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)));
        self.datapath = self.id.or_else(|| self.ports.first_mac().map(of)).unwrap_or(UNKNOWN);
        core.watch_flows(true);
    }

    /// Takes the table back.
    fn release<S: Steering>(&mut self, now: Time, core: &mut Core<S>) -> Result<(), SteeringError> {
        (self.in_control, self.is_changed, self.postponed) = (false, false, None);
        self.barriers.clear();
        self.table.clear();
        self.roles.remove(());
        core.watch_flows(false);
        core.set_controller_rules(now, Vec::new())
    }

    /// Puts the table in force if it has changed, and answers the barriers that wait for that.
    fn apply<S: Steering>(&mut self, now: Time, core: &mut Core<S>) -> Result<(), SteeringError> {
        let mut applied = Ok(());
        if std::mem::take(&mut self.is_changed) {
            self.next = now + PACE;
            applied = core.set_controller_rules(now, self.table.rules(&self.ports));
        }
        std::mem::take(&mut self.barriers).into_iter().for_each(|xid| self.respond(xid, Message::BarrierReply));
        applied
    }

    fn handle_events<S: Steering>(&mut self, now: Time, core: &mut Core<S>) -> Result<(), SteeringError> {
        let mut done = Ok(());
        self.judge = None;
        while self.takes_input() || self.barriers.is_empty() {
            if let Some((xid, message)) = self.postponed.take() {
                done = done.and(self.handle(now, core, xid, message));
                continue;
            }
            match self.connection.as_mut().and_then(Connection::poll_event) {
                None => break,
                Some(Event::Ready { .. }) => self.hand_over(now, core),
                Some(Event::Message { xid, message }) => done = done.and(self.handle(now, core, xid, message)),
                Some(Event::Closed { reason, .. }) => {
                    self.ended = Some(reason);
                    done = done.and(self.release(now, core));
                }
                // The connection has answered what it rejected. This side sends no requests but echoes.
                Some(Event::Rejected { .. } | Event::Reply { .. } | Event::Done { .. } | Event::Failed { .. } | Event::TimedOut { .. }) => {
                }
            }
        }
        self.judge = None;
        done
    }

    /// Handles a message. An error is that of the kernel.
    fn handle<S: Steering>(&mut self, now: Time, core: &mut Core<S>, xid: Xid, message: Box<Message>) -> Result<(), SteeringError> {
        let waits = !self.barriers.is_empty();
        match *message {
            Message::BarrierRequest => {
                self.barriers.push(xid);
                let is_due = !self.is_changed || self.next <= now;
                return if is_due { self.apply(now, core) } else { Ok(()) };
            }
            // Flow-mods behind a barrier come in force with those before it, all at once. So many barriers cost no more time than one.
            Message::FlowMod(ref flow) if waits => {
                if self.flow_mod(now, core, flow).is_err() {
                    self.postponed = Some((xid, message));
                }
                return Ok(());
            }
            _ if waits => {
                self.postponed = Some((xid, message));
                return Ok(());
            }
            _ => {}
        }
        if let Err(code) = self.answer(now, core, xid, &message)
            && let Some(connection) = &mut self.connection
            && let Err(SendError::Queued { .. }) = connection.refuse(xid, code, &message)
        {
            connection.close();
        }
        Ok(())
    }

    /// Answers a request or obeys a command, or returns the error to answer with.
    fn answer<S: Steering>(&mut self, now: Time, core: &Core<S>, xid: Xid, message: &Message) -> Result<(), ErrorCode> {
        match message {
            Message::FeaturesRequest => self.respond(xid, Message::FeaturesReply(self.features())),
            Message::GetConfigRequest => self.respond(xid, Message::GetConfigReply(self.config)),
            Message::SetConfig(config) if !config.flags.is_empty() => return Err(ErrorCode::SwitchConfigFailedBadFlags),
            Message::SetConfig(config) => self.config = *config,
            Message::FlowMod(flow) => self.flow_mod(now, core, flow)?,
            Message::PacketOut(packet) => self.packet_out(packet)?,
            Message::MultipartRequest(request) => {
                let body = self.describe(now, core, &request.body)?;
                self.respond(xid, Message::MultipartReply(MultipartReply::new(body)));
            }
            Message::RoleRequest(request) => self.change_role(xid, *request)?,
            Message::QueueConfigRequest(port) => {
                self.respond(xid, Message::QueueConfigReply(QueueConfig { port: *port, queues: Vec::new() }));
            }
            // Controllers begin with this.
            Message::GroupMod(group) if group.command == ModCommand::Delete => {}
            Message::GroupMod(_) => return Err(ErrorCode::GroupModFailedOutOfGroups),
            Message::MeterMod(meter) if meter.command == ModCommand::Delete => {}
            Message::MeterMod(_) => return Err(ErrorCode::MeterModFailedOutOfMeters),
            Message::TableMod(table) if table.table != TABLE && table.table != TableId::ALL => {
                return Err(ErrorCode::TableModFailedBadTable);
            }
            Message::TableMod(table) if table.config.is_empty() => {}
            Message::TableMod(_) => return Err(ErrorCode::TableModFailedBadConfig),
            // The links are the user's.
            Message::PortMod(port) if self.ports.name(port.number).is_some() => return Err(ErrorCode::PortModFailedEperm),
            Message::PortMod(_) => return Err(ErrorCode::PortModFailedBadPort),
            Message::Experimenter(_) => return Err(ErrorCode::BadRequestBadExperimenter),
            _ => {}
        }
        Ok(())
    }

    fn features(&self) -> Features {
        Features {
            datapath: self.datapath(),
            buffers: 0,
            tables: 1,
            auxiliary: 0,
            capabilities: Capabilities::FLOW_STATS | Capabilities::TABLE_STATS | Capabilities::PORT_STATS,
            actions: 0,
            ports: Vec::new(),
        }
    }

    fn flow_mod<S: Steering>(&mut self, now: Time, core: &Core<S>, flow: &FlowMod) -> Result<(), ErrorCode> {
        let judge = self.judge.take().unwrap_or_else(|| core.controller_judge(now));
        let objection = |rule: &AppRule| judge.objection(rule);
        let removed = self.table.change(now, flow, &Bounds { ports: &self.ports, room: core.controller_room(), objection: &objection });
        self.judge = Some(judge);
        let removed = removed?;
        self.is_changed = true;
        removed.into_iter().for_each(|removed| self.notify(Message::FlowRemoved(removed)));
        Ok(())
    }

    /// The flow of a packet-in goes on already. Other packets are not sent.
    fn packet_out(&mut self, packet: &PacketOut) -> Result<(), ErrorCode> {
        if packet.buffer.is_some() {
            return Err(ErrorCode::BadRequestBufferUnknown);
        }
        for action in &packet.actions {
            match action {
                Action::Output {
                    port: PortNo::NORMAL | PortNo::FLOOD | PortNo::ALL | PortNo::TABLE | PortNo::IN_PORT | PortNo::LOCAL,
                    ..
                } => {}
                Action::Output { port, .. } if self.ports.name(*port).is_some() => {}
                Action::Output { .. } => return Err(ErrorCode::BadActionBadOutPort),
                Action::Group(_) => return Err(ErrorCode::BadActionBadOutGroup),
                _ => return Err(ErrorCode::BadActionBadType),
            }
        }
        if packet.in_port == PortNo::LOCAL || packet.actions.is_empty() { Ok(()) } else { Err(ErrorCode::BadRequestEperm) }
    }

    fn change_role(&mut self, xid: Xid, request: RoleMessage) -> Result<(), ErrorCode> {
        let change = self.roles.request((), request)?;
        if let Some(connection) = &mut self.connection {
            connection.set_role(change.reply.role);
        }
        self.respond(xid, Message::RoleReply(change.reply));
        Ok(())
    }

    fn describe<S: Steering>(&mut self, now: Time, core: &Core<S>, request: &RequestBody) -> Result<ReplyBody, ErrorCode> {
        Ok(match request {
            RequestBody::Description => ReplyBody::Description(Box::new(requests::description())),
            RequestBody::Flow(query) => ReplyBody::Flow(self.table.stats(now, query)),
            RequestBody::Aggregate(query) => {
                let entries = self.table.stats(now, query);
                let bytes = entries.iter().filter_map(|entry| entry.traffic.bytes).fold(ByteCount::ZERO, |sum, bytes| sum + bytes);
                let traffic = Traffic { packets: None, bytes: Some(bytes) };
                ReplyBody::Aggregate(AggregateStats { traffic, flows: entries.len() as u32 })
            }
            RequestBody::Table => ReplyBody::Table(vec![requests::table_stats(self.table.len())]),
            RequestBody::TableFeatures(wanted) if wanted.is_empty() => {
                ReplyBody::TableFeatures(vec![requests::table_features(core.controller_room())])
            }
            RequestBody::TableFeatures(_) => return Err(ErrorCode::TableFeaturesFailedEperm),
            RequestBody::Port(port) => {
                // With the present counters.
                self.follow_links(now, core);
                ReplyBody::Port(self.ports.stats(*port).ok_or(ErrorCode::BadRequestBadPort)?)
            }
            RequestBody::PortDescription => ReplyBody::PortDescription(self.ports.describe(self.own_address())),
            RequestBody::Queue { .. } => ReplyBody::Queue(Vec::new()),
            RequestBody::Group(_) => ReplyBody::Group(Vec::new()),
            RequestBody::GroupDescription => ReplyBody::GroupDescription(Vec::new()),
            RequestBody::Meter(_) => ReplyBody::Meter(Vec::new()),
            RequestBody::MeterConfig(_) => ReplyBody::MeterConfig(Vec::new()),
            RequestBody::GroupFeatures | RequestBody::MeterFeatures | RequestBody::Experimenter(_) => {
                return Err(ErrorCode::BadRequestBadMultipart);
            }
        })
    }

    /// Follows the links and the flows of the core.
    fn follow<S: Steering>(&mut self, now: Time, core: &mut Core<S>) {
        self.follow_links(now, core);
        for note in core.take_flow_notes() {
            let report = self.table.count(now, &note).and_then(table::Entry::report).filter(|_| note.is_new);
            if let Some((cookie, is_miss)) = report {
                self.packet_in(&note, cookie, if is_miss { PacketReason::NoMatch } else { PacketReason::Action });
            }
        }
    }

    fn follow_links<S: Steering>(&mut self, now: Time, core: &Core<S>) {
        let changes = self.ports.follow(core.link_ports(now));
        // Rules name devices.
        self.is_changed |= !changes.is_empty() && self.table.len() > 0;
        changes.into_iter().for_each(|change| self.notify(Message::PortStatus(change)));
    }

    fn packet_in(&mut self, flow: &FlowNote, cookie: Cookie, reason: PacketReason) {
        let data = packet::first_packet(flow, self.own_address());
        let matching = Match::new([Oxm::in_port(PortNo::LOCAL)]);
        let total_len = data.len() as u16;
        self.notify(Message::PacketIn(PacketIn { buffer: None, total_len, reason, table: TABLE, cookie, matching, data }));
    }

    /// Tells the controller something. One that does not read misses it.
    fn notify(&mut self, message: Message) {
        if let Some(connection) = &mut self.connection {
            let _ = connection.notify(message);
        }
    }

    /// Answers a request. A controller that does not read the answers is lost.
    fn respond(&mut self, xid: Xid, message: Message) {
        if let Some(connection) = &mut self.connection
            && let Err(SendError::Queued { .. }) = connection.respond(xid, message)
        {
            connection.close();
        }
    }
}
