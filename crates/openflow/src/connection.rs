//! One connection between a controller and a switch, from either side, without I/O.

mod transactions;
mod types;

pub use types::{CloseReason, Config, Event, SendError, Side};

use std::collections::VecDeque;

use braid_model::{ByteCount, Time};
use bytes::Bytes;

use crate::codes::ErrorCode;
use crate::error::DecodeError;
use crate::frame::Splitter;
use crate::ids::Xid;
use crate::message::{HEADER, Header, Message, MessageKind, Sender};
use crate::multipart::{MultipartReply, MultipartRequest, ReplyBody, RequestBody};
use crate::reassembly::{Joined, Reassembly};
use crate::switch::{AsyncConfig, ErrorMessage, Hello, Role};
use crate::version::Version;
use transactions::Transactions;

/// Bytes of a request that an error repeats. Source: OpenFlow 1.3.5 section 7.4.4: at least 64.
const ERROR_DATA: usize = 64;
/// Bytes that may wait for a peer of which nothing is known yet.
const MAX_QUEUED_BEFORE: ByteCount = ByteCount::new(64 << 10);

/// One connection between a controller and a switch. It does no I/O and reads no clock.
///
/// The caller passes received bytes to [`Self::receive`] and the time to [`Self::handle_timeout`] when [`Self::poll_timeout`] is due. After each
/// call it takes the bytes to send with [`Self::poll_output`] and the events with [`Self::poll_event`].
///
/// The connection itself exchanges hellos, asks the switch for its features, answers echo requests, sends its own when the peer is silent, answers
/// malformed and misplaced messages with errors, joins messages of several parts, and finds the replies and errors of requests. At a switch it also
/// answers requests about asynchronous messages and refuses changes by a slave.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    state: State,
    splitter: Splitter,
    output: Vec<u8>,
    /// Bytes at the start of `output` that the caller has taken.
    taken: usize,
    events: VecDeque<Event>,
    transactions: Transactions,
    replies: Reassembly<ReplyBody>,
    requests: Reassembly<RequestBody>,
    /// When the last message came.
    last_received: Time,
    /// When the echo request was sent that is not answered.
    echo: Option<Time>,
    role: Role,
    asynchronous: AsyncConfig,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Waits for the peer's hello until `due`.
    Hello {
        due: Time,
    },
    /// Waits for the switch's features until `due`.
    Features {
        version: Version,
        xid: Xid,
        due: Time,
    },
    Ready {
        version: Version,
    },
    /// Waits for outstanding replies until `due`.
    Closing {
        version: Version,
        due: Time,
    },
    Closed,
}

impl Connection {
    /// A connection that was just established. Its hello waits to be sent.
    pub fn new(config: Config, now: Time) -> Self {
        let mut connection = Self {
            state: State::Hello { due: now + config.handshake_timeout },
            splitter: Splitter::new(config.max_message),
            output: Vec::new(),
            taken: 0,
            events: VecDeque::new(),
            transactions: Transactions::default(),
            replies: Reassembly::new(config.parts),
            requests: Reassembly::new(config.parts),
            last_received: now,
            echo: None,
            role: Role::default(),
            asynchronous: AsyncConfig::default(),
            config,
        };
        let version = connection.newest();
        // Hellos of 1.0 have no body.
        let hello = if version == Version::V1_0 { Hello::default() } else { Hello::new(&connection.config.versions) };
        let xid = connection.transactions.next_xid();
        connection.answer(version, xid, Message::Hello(hello));
        connection
    }

    /// The side.
    pub fn side(&self) -> Side {
        self.config.side
    }

    /// The version, once it is negotiated.
    pub fn version(&self) -> Option<Version> {
        match self.state {
            State::Features { version, .. } | State::Ready { version } | State::Closing { version, .. } => Some(version),
            State::Hello { .. } | State::Closed => None,
        }
    }

    /// Whether the connection is over.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Bytes that wait to be sent.
    pub fn queued(&self) -> ByteCount {
        ByteCount::new(self.waiting() as u64)
    }

    /// Moves all bytes that wait to the end of `out`. `false` if there are none.
    pub fn poll_output(&mut self, out: &mut Vec<u8>) -> bool {
        let any = self.waiting() > 0;
        // A queue that was long keeps no memory.
        let mut waiting = std::mem::take(&mut self.output);
        waiting.drain(..std::mem::take(&mut self.taken));
        if out.is_empty() {
            *out = waiting
        } else {
            out.append(&mut waiting)
        }
        any
    }

    /// Moves at most `most` bytes that wait to the end of `out`. `false` if there are none.
    pub fn poll_part(&mut self, most: usize, out: &mut Vec<u8>) -> bool {
        if self.waiting() <= most {
            return self.poll_output(out);
        }
        let end = self.taken + most;
        out.extend_from_slice(self.output.get(self.taken..end).unwrap_or_default());
        self.taken = end;
        // Each byte is moved once on average.
        if self.taken > self.output.len() / 2 {
            self.output.drain(..std::mem::take(&mut self.taken));
        }
        true
    }

    fn waiting(&self) -> usize {
        self.output.len() - self.taken
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        let requests = [self.transactions.next_due(), self.requests.oldest().map(|last| last + self.config.request_timeout)];
        let requests = requests.into_iter().flatten().min();
        match self.state {
            State::Hello { due } | State::Features { due, .. } => Some(requests.map_or(due, |other| due.min(other))),
            State::Ready { .. } => Some(requests.map_or(self.echo_due(), |other| other.min(self.echo_due()))),
            State::Closing { due, .. } => Some(requests.map_or(due, |other| due.min(other)).min(self.echo_due())),
            State::Closed => None,
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.is_closed() {
            return;
        }
        while let Some(late) = self.transactions.expire(now) {
            for xid in late {
                self.replies.forget(xid);
                self.events.push_back(Event::TimedOut { xid });
            }
        }
        // 1.3 has no error for a request whose parts do not come.
        while let Some(last) = self.requests.oldest().filter(|last| *last + self.config.request_timeout <= now) {
            self.requests.expire(last);
        }
        match self.state {
            State::Hello { due } | State::Features { due, .. } if due <= now => self.end(CloseReason::HandshakeTimeout),
            State::Closing { due, .. } if due <= now || self.transactions.is_empty() => self.end(CloseReason::Local),
            State::Ready { version } | State::Closing { version, .. } if self.echo_due() <= now => {
                if self.echo.is_some() {
                    return self.end(CloseReason::Silent);
                }
                let xid = self.transactions.next_xid();
                self.echo = Some(now);
                self.answer(version, xid, Message::EchoRequest(Bytes::new()));
            }
            _ => {}
        }
    }

    /// Sends a request, whose reply will be an event, or a command, such as a flow-mod. A command is done when a later barrier is.
    pub fn request(&mut self, now: Time, message: Message) -> Result<Xid, SendError> {
        let kind = message.kind();
        let version = self.sendable(kind)?;
        if self.transactions.len() >= self.config.max_outstanding {
            return Err(SendError::Outstanding { kind, count: self.transactions.len() });
        }
        let xid = self.transactions.next_xid();
        message.encode(version, xid, &mut self.output)?;
        self.transactions.add(xid, kind.reply(), now + self.config.request_timeout);
        Ok(xid)
    }

    /// Sends a message that this side does not wait for, such as a packet-out. Its errors are events of the kind [`Event::Message`].
    pub fn send(&mut self, message: Message) -> Result<Xid, SendError> {
        let version = self.sendable(message.kind())?;
        let xid = self.transactions.next_xid();
        message.encode(version, xid, &mut self.output)?;
        Ok(xid)
    }

    /// Answers a request of the peer. A reply in several parts is sent by several calls. An error is sent by [`Self::refuse`].
    pub fn respond(&mut self, xid: Xid, message: Message) -> Result<(), SendError> {
        let version = self.sendable(message.kind())?;
        Ok(message.encode(version, xid, &mut self.output)?)
    }

    /// Refuses a request of the peer: answers it with an error that repeats its first 64 bytes, as the specification demands. Source: OpenFlow 1.3.5
    /// section 7.4.4. Open vSwitch finds the request by these bytes.
    pub fn refuse(&mut self, xid: Xid, code: ErrorCode, request: &Message) -> Result<(), SendError> {
        let version = self.sendable(MessageKind::Error)?;
        let mut data = Vec::new();
        if request.encode(version, xid, &mut data).is_err() {
            // A request that came in several parts may be too long for one message: its header remains.
            let number = request.kind().number(version).unwrap_or_default();
            data.extend_from_slice(&[version.wire(), number, 0, HEADER as u8]);
            data.extend_from_slice(&xid.0.to_be_bytes());
        }
        data.truncate(ERROR_DATA);
        self.respond(xid, Message::Error(ErrorMessage { code, data: data.into() }))
    }

    /// Sends an asynchronous message of a switch, unless the controller's role and configuration of asynchronous messages exclude it. Returns whether it
    /// was sent.
    pub fn notify(&mut self, message: Message) -> Result<bool, SendError> {
        if !self.includes(&message) {
            return Ok(false);
        }
        self.send(message).map(|_| true)
    }

    /// Sets the role of the controller at a switch, as [`crate::Roles`] decides it.
    pub fn set_role(&mut self, role: Role) {
        self.role = role;
    }

    /// Accepts no more requests, and closes the connection when all outstanding ones are done, or their time is over.
    pub fn shutdown(&mut self, now: Time) {
        match self.state {
            State::Ready { version } if !self.transactions.is_empty() => {
                self.state = State::Closing { version, due: now + self.config.shutdown_timeout };
            }
            State::Closing { .. } => {}
            _ => self.end(CloseReason::Local),
        }
    }

    /// Closes the connection at once.
    pub fn close(&mut self) {
        self.end(CloseReason::Local);
    }

    /// Closes the connection at once, because the peer does not read. What waits is dropped.
    pub fn overflow(&mut self) {
        (self.output, self.taken) = (Vec::new(), 0);
        self.end(CloseReason::Overflow);
    }

    /// The peer closed the connection.
    pub fn disconnected(&mut self) {
        self.end(CloseReason::Peer);
    }

    /// Handles received bytes.
    pub fn receive(&mut self, now: Time, bytes: &[u8]) {
        self.splitter.push(bytes);
        while !self.is_closed() {
            match self.splitter.next_message() {
                Ok(Some(message)) => self.receive_message(now, &message),
                Ok(None) => return,
                Err(error) => {
                    let (crate::FrameError::Short { header } | crate::FrameError::Long { header, .. }) = error;
                    if let Some(version) = self.version() {
                        self.answer_error(version, header.xid, ErrorCode::BadRequestBadLen, Bytes::new());
                    }
                    self.end(CloseReason::Framing(error));
                }
            }
        }
    }

    fn receive_message(&mut self, now: Time, bytes: &Bytes) {
        (self.last_received, self.echo) = (now, None);
        let decoded = Message::decode(bytes);
        match self.state {
            State::Hello { due } => self.receive_hello(decoded, bytes, due),
            State::Features { version, .. } | State::Ready { version } | State::Closing { version, .. } => match decoded {
                Ok((header, message)) => self.receive_valid(now, version, header, message, bytes),
                Err(error) => self.reject_malformed(version, bytes, error),
            },
            State::Closed => {}
        }
        if matches!(self.state, State::Closing { .. }) && self.transactions.is_empty() {
            self.end(CloseReason::Local);
        }
    }

    /// Negotiates the version. Source: OpenFlow 1.3.5 section 6.3.1.
    fn receive_hello(&mut self, decoded: Result<(Header, Message), DecodeError>, bytes: &Bytes, due: Time) {
        let (header, hello) = match decoded {
            Ok((header, Message::Hello(hello))) => (header, hello),
            Ok((_, Message::Error(error))) => return self.end(CloseReason::Refused(error)),
            Ok((header, _)) => return self.refuse_hello(header, "expected a hello", CloseReason::NoHello),
            Err(error) => {
                let header = Header::read(bytes);
                return match header.filter(|header| header.kind != 0) {
                    Some(header) => self.refuse_hello(header, "expected a hello", CloseReason::NoHello),
                    None => self.end(CloseReason::Malformed(Box::new(error))),
                };
            }
        };
        let Some(version) = negotiate(&self.config.versions, header.version, hello.bitmap()) else {
            return self.refuse_hello(header, "no common version", CloseReason::NoCommonVersion(header.version));
        };
        if self.config.side == Side::Switch {
            self.state = State::Ready { version };
            self.events.push_back(Event::Ready { version, features: None });
        } else {
            let xid = self.transactions.next_xid();
            self.state = State::Features { version, xid, due };
            self.answer(version, xid, Message::FeaturesRequest);
        }
    }

    /// Answers that the hello failed, and ends the connection.
    fn refuse_hello(&mut self, header: Header, text: &'static str, reason: CloseReason) {
        let version = Version::from_wire(header.version).filter(|version| self.config.versions.contains(version));
        let version = version.unwrap_or(self.newest());
        let error = ErrorMessage { code: ErrorCode::HelloFailedIncompatible, data: Bytes::from_static(text.as_bytes()) };
        self.answer(version, header.xid, Message::Error(error));
        self.end(reason);
    }

    fn receive_valid(&mut self, now: Time, version: Version, header: Header, message: Message, bytes: &Bytes) {
        let (xid, kind) = (header.xid, message.kind());
        let foreign = match kind.sender() {
            Sender::Both => false,
            Sender::Controller => self.config.side == Side::Controller,
            Sender::Switch => self.config.side == Side::Switch,
        };
        match message {
            Message::Hello(_) => {}
            Message::Error(error) => self.receive_error(xid, error),
            _ if header.version != version.wire() => self.reject(version, xid, ErrorCode::BadRequestBadVersion, bytes),
            _ if foreign => self.reject(version, xid, ErrorCode::BadRequestBadType, bytes),
            Message::EchoRequest(data) => self.answer(version, xid, Message::EchoReply(data)),
            Message::FeaturesReply(features) if matches!(self.state, State::Features { xid: asked, .. } if asked == xid) => {
                self.state = State::Ready { version };
                self.events.push_back(Event::Ready { version, features: Some(Box::new(features)) });
            }
            Message::MultipartReply(reply) if self.transactions.awaits(xid, kind) => self.receive_part(now, xid, header, reply),
            // The echo reply of this connection's own request, or a late one.
            Message::EchoReply(_) if !self.transactions.awaits(xid, kind) => {}
            message if self.transactions.awaits(xid, kind) => self.complete(xid, message),
            message if self.role == Role::Slave && message.changes_switch() => {
                self.reject(version, xid, ErrorCode::BadRequestIsSlave, bytes);
            }
            Message::MultipartRequest(request) => self.receive_request_part(now, version, header, request, bytes),
            Message::AsyncRequest => self.answer(version, xid, Message::AsyncReply(self.asynchronous)),
            Message::SetAsync(config) => self.asynchronous = config,
            message => self.events.push_back(Event::Message { xid, message: Box::new(message) }),
        }
    }

    fn receive_error(&mut self, xid: Xid, error: ErrorMessage) {
        if matches!(self.state, State::Features { xid: asked, .. } if asked == xid) {
            return self.end(CloseReason::NoFeatures(error));
        }
        if matches!(error.code, ErrorCode::HelloFailedIncompatible | ErrorCode::HelloFailedEperm) {
            return self.end(CloseReason::Refused(error));
        }
        self.replies.forget(xid);
        self.events.push_back(if self.transactions.remove(xid) {
            Event::Failed { xid, error }
        } else {
            Event::Message { xid, message: Box::new(Message::Error(error)) }
        });
    }

    fn receive_part(&mut self, now: Time, xid: Xid, header: Header, reply: MultipartReply) {
        match self.replies.push(now, xid, ByteCount::new(header.length.into()), reply.more, reply.body) {
            Joined::Complete(body) => self.complete(xid, Message::MultipartReply(MultipartReply::new(body))),
            Joined::Partial => {}
            Joined::Mismatch => self.give_up(xid, ErrorCode::BadRequestBadMultipart),
            Joined::Overflow => self.give_up(xid, ErrorCode::BadRequestMultipartBufferOverflow),
        }
    }

    fn receive_request_part(&mut self, now: Time, version: Version, header: Header, request: MultipartRequest, bytes: &Bytes) {
        let xid = header.xid;
        match self.requests.push(now, xid, ByteCount::new(header.length.into()), request.more, request.body) {
            Joined::Complete(body) => {
                let message = Box::new(Message::MultipartRequest(MultipartRequest::new(body)));
                self.events.push_back(Event::Message { xid, message });
            }
            Joined::Partial => {}
            Joined::Mismatch => self.reject(version, xid, ErrorCode::BadRequestBadMultipart, bytes),
            Joined::Overflow => self.reject(version, xid, ErrorCode::BadRequestMultipartBufferOverflow, bytes),
        }
    }

    /// A request got its reply. A barrier's reply completes the commands before it too.
    fn complete(&mut self, xid: Xid, message: Message) {
        if message.kind() == MessageKind::BarrierReply {
            let done = self.transactions.take_commands_before(xid);
            self.events.extend(done.into_iter().map(|xid| Event::Done { xid }));
        }
        self.transactions.remove(xid);
        self.events.push_back(Event::Reply { xid, message: Box::new(message) });
    }

    /// A reply cannot be used.
    fn give_up(&mut self, xid: Xid, code: ErrorCode) {
        self.replies.forget(xid);
        self.transactions.remove(xid);
        self.events.push_back(Event::Rejected { xid, code, malformed: None });
    }

    fn reject(&mut self, version: Version, xid: Xid, code: ErrorCode, bytes: &Bytes) {
        self.answer_error(version, xid, code, bytes.slice(..bytes.len().min(ERROR_DATA)));
        self.events.push_back(Event::Rejected { xid, code, malformed: None });
    }

    /// Answers a malformed message, except errors and replies: the sender of a reply does not expect an answer.
    fn reject_malformed(&mut self, version: Version, bytes: &Bytes, error: DecodeError) {
        let Some(Header { xid, kind, .. }) = Header::read(bytes) else { return };
        let is_reply = match MessageKind::from_number(version, kind) {
            Some(MessageKind::Error) => true,
            Some(kind) => MessageKind::all().any(|request| request.reply() == Some(kind)),
            None => false,
        };
        if is_reply {
            self.replies.forget(xid);
            self.transactions.remove(xid);
        } else {
            self.requests.forget(xid);
            self.answer_error(version, xid, error.code, bytes.slice(..bytes.len().min(ERROR_DATA)));
        }
        if matches!(self.state, State::Features { xid: asked, .. } if asked == xid) {
            return self.end(CloseReason::Malformed(Box::new(error)));
        }
        self.events.push_back(Event::Rejected { xid, code: error.code, malformed: Some(Box::new(error)) });
    }

    fn answer_error(&mut self, version: Version, xid: Xid, code: ErrorCode, data: Bytes) {
        // 1.0 lacks some errors. It has one for unknown requests.
        let code = if code.numbers(version).is_some() { code } else { ErrorCode::BadRequestBadType };
        self.answer(version, xid, Message::Error(ErrorMessage { code, data }));
    }

    /// Sends a message of the connection itself. If too many bytes wait, the peer does not read them, and the connection ends.
    fn answer(&mut self, version: Version, xid: Xid, message: Message) {
        if self.is_closed() {
            return;
        }
        let is_known = !matches!(self.state, State::Hello { .. } | State::Features { .. });
        if self.queued() >= if is_known { self.config.max_queued } else { self.config.max_queued.min(MAX_QUEUED_BEFORE) } {
            return self.end(CloseReason::Overflow);
        }
        // It encodes: the version has it, and it is no longer than what it answers.
        let _ = message.encode(version, xid, &mut self.output);
    }

    fn sendable(&self, kind: MessageKind) -> Result<Version, SendError> {
        match self.state {
            _ if self.queued() >= self.config.max_queued => Err(SendError::Queued { kind, bytes: self.waiting() }),
            State::Ready { version } => Ok(version),
            State::Hello { .. } | State::Features { .. } => Err(SendError::NotReady(kind)),
            State::Closing { .. } | State::Closed => Err(SendError::Closed(kind)),
        }
    }

    /// Whether the controller's role and configuration include an asynchronous message. They include all other messages.
    fn includes(&self, message: &Message) -> bool {
        let (masks, reason) = match message {
            Message::PacketIn(packet) => (self.asynchronous.packet_in, packet.reason as u32),
            Message::PortStatus(status) => (self.asynchronous.port_status, status.reason as u32),
            Message::FlowRemoved(flow) => (self.asynchronous.flow_removed, flow.reason as u32),
            _ => return true,
        };
        let mask = if self.role == Role::Slave { masks.slave } else { masks.master };
        mask >> reason & 1 == 1
    }

    /// When to send an echo request, or to give up because of one.
    fn echo_due(&self) -> Time {
        self.echo.map_or(self.last_received + self.config.echo_interval, |sent| sent + self.config.echo_timeout)
    }

    fn newest(&self) -> Version {
        self.config.versions.iter().max().copied().unwrap_or(Version::V1_0)
    }

    fn end(&mut self, reason: CloseReason) {
        if !self.is_closed() {
            self.state = State::Closed;
            let abandoned = self.transactions.clear();
            self.events.push_back(Event::Closed { reason, abandoned });
        }
    }
}

/// The version of a connection, by the version of the peer's hello and its bitmap. Source: OpenFlow 1.3.5 section 6.3.1.
fn negotiate(ours: &[Version], theirs: u8, bitmap: Option<&[u32]>) -> Option<Version> {
    let newest = ours.iter().max()?;
    match bitmap.filter(|_| *newest >= Version::V1_3) {
        Some(bitmap) => {
            let bits = bitmap.first().copied().unwrap_or_default();
            ours.iter().filter(|version| bits >> version.wire() & 1 == 1).max().copied()
        }
        None => Version::from_wire(theirs.min(newest.wire())).filter(|version| ours.contains(version)),
    }
}
