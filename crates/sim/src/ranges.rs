//! Downloads by byte range over several links (thesis, 4.4.2): the engine of [`braid_range`], plain HTTP servers, and segment-level TCP
//! between them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_netem::{EmulatedLink, Packet, Profile};
use braid_range::{Action, Config, ConnectionId, Engine, FileId, FileSetup, Head, LinkSetup, RangeError, RequestId, Span};

use crate::tcp::{Ack, AckTiming, HANDSHAKE, HANDSHAKE_WAIT, HEADERS, Receiver, SEGMENT, Segment, Sender, Sending, TcpConfig};

/// Payload of a request, and size of a response head, in bytes.
const REQUEST: u64 = 300;
const HEAD: u64 = 250;
/// If at most this many bytes of a cancelled response remain, they are read and discarded. Otherwise the connection is reopened.
const MAX_DISCARD: u64 = 32 * 1024;

/// A link of a download, with its two directions.
#[derive(Debug, Clone)]
pub struct RangedLink {
    /// Profile of the direction towards the client.
    pub down: Profile,
    /// Profile of the direction away from the client.
    pub up: Profile,
    /// Changes of the rate towards the client, in ascending order of time.
    pub changes: Vec<(Time, Rate)>,
}

/// A file to fetch.
#[derive(Debug, Clone)]
pub struct RangedFile {
    /// Size of the file. The engine learns it from the first response.
    pub size: ByteCount,
    /// Weight φ.
    pub weight: f64,
    /// The links it may use: its row of Π.
    pub links: LinkSet,
}

/// Concurrent downloads of files from one HTTP/1.1 server.
#[derive(Debug, Clone)]
pub struct Ranged {
    /// The links.
    pub links: Vec<RangedLink>,
    /// The files.
    pub files: Vec<RangedFile>,
    /// Configuration of the engine.
    pub config: Config,
    /// TCP parameters of both ends.
    pub tcp: TcpConfig,
    /// Round trips until a connection can send a request: 1 for TCP, 2 with TLS 1.3.
    pub round_trips: u32,
    /// Maximum duration.
    pub duration: Duration,
    /// Width of the time bins.
    pub bin: Duration,
    /// Seed of random losses on the links.
    pub seed: u64,
}

/// Results of a simulated download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Bytes kept, by file and time bin.
    pub bins: Vec<Vec<ByteCount>>,
    /// Time at which each file was complete.
    pub ended: Vec<Option<Time>>,
    /// By link: bytes of response bodies, and the duplicate bytes among them.
    pub moved: Vec<(ByteCount, ByteCount)>,
    /// Number of ranges requested.
    pub requests: usize,
}

impl Fetched {
    /// Mean rate of a file in bins `from..to`.
    pub fn rate(&self, file: usize, bin: Duration, from: usize, to: usize) -> Rate {
        let sum = self.bins[file][from..to].iter().fold(ByteCount::ZERO, |sum, bytes| sum + *bytes);
        sum.per(bin * (to - from) as u32)
    }
}

/// Runs the simulation.
///
/// # Errors
/// Too many links or files, or a weight that is not a positive number.
pub fn fetch_ranges(ranged: &Ranged) -> Result<Fetched, RangeError> {
    let mut engine = Engine::new(ranged.config);
    for _ in &ranged.links {
        engine.add_link(LinkSetup::default())?;
    }
    let server = engine.add_server();
    let mut ids = Vec::new();
    for file in &ranged.files {
        let setup = FileSetup { weight: file.weight, links: file.links, ..FileSetup::new(vec![server]) };
        ids.push(engine.add_file(Time::ZERO, setup)?);
    }
    let spans = ranged.duration.as_nanos().div_ceil(ranged.bin.as_nanos().max(1)) as usize;
    let way = |profile: &Profile, number: usize| EmulatedLink::new(profile.clone(), ranged.seed.wrapping_add(number as u64), Time::ZERO);
    let mut world = World {
        ranged,
        engine,
        ids,
        now: Time::ZERO,
        down: ranged.links.iter().enumerate().map(|(number, link)| way(&link.down, 2 * number)).collect(),
        up: ranged.links.iter().enumerate().map(|(number, link)| way(&link.up, 2 * number + 1)).collect(),
        changed: vec![0; ranged.links.len()],
        connections: BTreeMap::new(),
        fetched: Fetched {
            bins: vec![vec![ByteCount::ZERO; spans]; ranged.files.len()],
            ended: vec![None; ranged.files.len()],
            moved: Vec::new(),
            requests: 0,
        },
    };
    world.run();
    Ok(world.fetched)
}

/// A packet, with its connection and the connection's epoch (number of reconnects).
#[derive(Debug)]
struct Parcel {
    connection: ConnectionId,
    epoch: u32,
    kind: ParcelKind,
}

#[derive(Debug)]
enum ParcelKind {
    Open,
    Opened,
    Request(Span),
    Data(Segment, Time),
    Ack(Ack),
}

impl Packet for Parcel {
    fn size(&self) -> ByteCount {
        match &self.kind {
            ParcelKind::Open | ParcelKind::Opened => ByteCount::new(u64::from(HANDSHAKE)),
            ParcelKind::Request(_) => HEADERS + ByteCount::new(REQUEST),
            ParcelKind::Data(segment, _) => HEADERS + ByteCount::new(u64::from(segment.size)),
            ParcelKind::Ack(_) => HEADERS,
        }
    }
}

/// State of both ends of a connection.
#[derive(Debug)]
struct Connection {
    link: usize,
    epoch: u32,
    /// Time at which the handshake is repeated; `None` if the connection is established.
    handshake: Option<Time>,
    /// Round trips of handshakes completed so far.
    trips: u32,
    /// Requests made before the connection is re-established.
    waiting: VecDeque<Span>,
    /// Server's end, and the bytes it still has to send.
    sender: Sender,
    backlog: u64,
    /// Client's end: sizes of the segments, starting at the first that has not arrived in order.
    receiver: Receiver,
    sizes: VecDeque<u16>,
    came: u32,
    /// Responses in order: the request (`None`: read and discarded), remaining bytes of the head, and of the body.
    answers: VecDeque<(Option<RequestId>, u64, u64)>,
}

struct World<'a> {
    ranged: &'a Ranged,
    engine: Engine,
    ids: Vec<FileId>,
    now: Time,
    down: Vec<EmulatedLink<Parcel>>,
    up: Vec<EmulatedLink<Parcel>>,
    changed: Vec<usize>,
    connections: BTreeMap<ConnectionId, Connection>,
    fetched: Fetched,
}

impl World<'_> {
    fn run(&mut self) {
        let end = Time::ZERO + self.ranged.duration;
        self.act();
        while let Some(due) = self.next_event().filter(|due| *due < end) {
            self.now = self.now.max(due);
            self.change();
            for link in 0..self.ranged.links.len() {
                while let Some(parcel) = self.up[link].pop(self.now) {
                    self.at_server(parcel);
                }
                while let Some(parcel) = self.down[link].pop(self.now) {
                    self.at_client(parcel);
                }
            }
            self.timers();
            self.act();
            if self.fetched.ended.iter().all(Option::is_some) {
                break;
            }
        }
        let view = |link| self.engine.link(self.now, braid_range::LinkId(link)).map(|view| (view.moved, view.twice)).unwrap_or_default();
        self.fetched.moved = (0..self.ranged.links.len()).map(view).collect();
    }

    fn next_event(&self) -> Option<Time> {
        let links = self.down.iter().chain(&self.up).filter_map(EmulatedLink::poll_timeout);
        let connections = self
            .connections
            .values()
            .flat_map(|connection| [connection.handshake, connection.sender.deadline(), connection.receiver.deadline()])
            .flatten();
        let changes = self.ranged.links.iter().zip(&self.changed).filter_map(|(link, done)| link.changes.get(*done)).map(|(at, _)| *at);
        links.chain(connections).chain(changes).chain(self.engine.poll_timeout()).min()
    }

    fn change(&mut self) {
        for (number, link) in self.ranged.links.iter().enumerate() {
            while let Some((at, rate)) = link.changes.get(self.changed[number]).filter(|(at, _)| *at <= self.now) {
                debug_assert!(*at <= self.now);
                self.changed[number] += 1;
                let profile = Profile { rate: (*rate).into(), ..self.down[number].profile().clone() };
                self.down[number].configure(self.now, profile);
            }
        }
    }

    fn timers(&mut self) {
        let due = |at: Option<Time>, now: Time| at.is_some_and(|at| at <= now);
        let ids: Vec<ConnectionId> = self.connections.keys().copied().collect();
        for id in ids {
            let now = self.now;
            let Some(connection) = self.connections.get_mut(&id) else { continue };
            if due(connection.handshake, now) {
                self.open(id);
                continue;
            }
            if due(connection.sender.deadline(), now) {
                connection.sender.on_timeout(now);
            }
            if due(connection.receiver.deadline(), now)
                && let Some(ack) = connection.receiver.take_ack()
            {
                let (link, epoch) = (connection.link, connection.epoch);
                self.up[link].push(now, Parcel { connection: id, epoch, kind: ParcelKind::Ack(ack) });
            }
            self.send(id);
        }
    }

    /// Executes the actions of the engine.
    fn act(&mut self) {
        while let Some(action) = self.engine.poll(self.now) {
            match action {
                Action::Connect { connection, link, .. } => {
                    self.connections.insert(connection, Connection::new(link.0, &self.ranged.tcp));
                    self.open(connection);
                }
                Action::Ask { request, connection, file, span, .. } => self.ask(request, connection, file, span),
                Action::Stop { request } => self.stop(request),
                Action::Close { connection } => drop(self.connections.remove(&connection)),
                Action::Done { file, .. } => {
                    if let Some(place) = self.ids.iter().position(|id| *id == file) {
                        self.fetched.ended[place] = Some(self.now);
                    }
                }
                Action::Restart { .. } | Action::GiveUp { .. } => {}
            }
        }
    }

    /// Sends the first packet of a handshake, or repeats it.
    fn open(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.handshake = Some(self.now + HANDSHAKE_WAIT);
        self.up[connection.link].push(self.now, Parcel { connection: id, epoch: connection.epoch, kind: ParcelKind::Open });
    }

    fn ask(&mut self, request: RequestId, id: ConnectionId, file: FileId, span: Option<Span>) {
        self.fetched.requests += 1;
        let size = self.ids.iter().position(|known| *known == file).map_or(ByteCount::ZERO, |place| self.ranged.files[place].size);
        let span = span.unwrap_or(Span::new(ByteCount::ZERO, size));
        let span = Span::new(span.start().min(size), span.end().min(size));
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.answers.push_back((Some(request), HEAD, span.len().get()));
        if connection.handshake.is_some() {
            connection.waiting.push_back(span);
        } else {
            self.up[connection.link].push(self.now, Parcel { connection: id, epoch: connection.epoch, kind: ParcelKind::Request(span) });
        }
    }

    fn stop(&mut self, request: RequestId) {
        let of = |connection: &Connection| connection.answers.iter().position(|(whose, ..)| *whose == Some(request));
        let Some((id, place)) = self.connections.iter().find_map(|(id, connection)| Some((*id, of(connection)?))) else { return };
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let (whose, _, rest) = &mut connection.answers[place];
        if *rest <= MAX_DISCARD {
            *whose = None;
            return;
        }
        *connection = Connection { epoch: connection.epoch + 1, ..Connection::new(connection.link, &self.ranged.tcp) };
        self.open(id);
    }

    fn at_server(&mut self, parcel: Parcel) {
        let Some(connection) = self.connections.get_mut(&parcel.connection).filter(|connection| connection.epoch == parcel.epoch) else {
            return;
        };
        match parcel.kind {
            ParcelKind::Open => {
                let opened = Parcel { connection: parcel.connection, epoch: parcel.epoch, kind: ParcelKind::Opened };
                self.down[connection.link].push(self.now, opened);
            }
            ParcelKind::Request(span) => connection.backlog += HEAD + span.len().get(),
            ParcelKind::Ack(ack) => connection.sender.on_ack(self.now, &ack),
            ParcelKind::Opened | ParcelKind::Data(..) => {}
        }
        self.send(parcel.connection);
    }

    /// Sends from the server as much as the window allows.
    fn send(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        loop {
            let segment = match connection.sender.next(self.now) {
                Sending::Again(segment) => segment,
                Sending::Room if connection.backlog > 0 => {
                    let size = connection.backlog.min(SEGMENT.get());
                    connection.backlog -= size;
                    connection.sizes.push_back(size as u16);
                    connection.sender.send(self.now, 0, size as u16)
                }
                Sending::Room | Sending::Full => return,
            };
            self.down[connection.link]
                .push(self.now, Parcel { connection: id, epoch: connection.epoch, kind: ParcelKind::Data(segment, self.now) });
        }
    }

    fn at_client(&mut self, parcel: Parcel) {
        let (id, epoch) = (parcel.connection, parcel.epoch);
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| connection.epoch == epoch) else { return };
        match parcel.kind {
            ParcelKind::Opened if connection.handshake.is_some() && connection.trips + 1 < self.ranged.round_trips => {
                connection.trips += 1;
                self.open(id);
            }
            ParcelKind::Opened if connection.handshake.take().is_some() => {
                let link = connection.link;
                for span in std::mem::take(&mut connection.waiting) {
                    self.up[link].push(self.now, Parcel { connection: id, epoch, kind: ParcelKind::Request(span) });
                }
                self.engine.on_connected(self.now, id, 1);
            }
            ParcelKind::Data(segment, sent) => {
                let (_, timing) = connection.receiver.on_segment(self.now, segment.number, sent);
                let in_order = connection.receiver.in_order();
                let mut bytes = 0;
                while connection.came < in_order {
                    connection.came += 1;
                    bytes += u64::from(connection.sizes.pop_front().unwrap_or(0));
                }
                if timing == AckTiming::Now
                    && let Some(ack) = connection.receiver.take_ack()
                {
                    self.up[connection.link].push(self.now, Parcel { connection: id, epoch, kind: ParcelKind::Ack(ack) });
                }
                self.read(id, epoch, bytes);
            }
            ParcelKind::Open | ParcelKind::Opened | ParcelKind::Request(_) | ParcelKind::Ack(_) => {}
        }
        self.act();
    }

    /// Reads the next `bytes` of a connection at the client.
    fn read(&mut self, id: ConnectionId, epoch: u32, mut bytes: u64) {
        while bytes > 0 {
            // An action of the engine on a response may close its connection.
            let Some(connection) = self.connections.get_mut(&id).filter(|connection| connection.epoch == epoch) else { return };
            let Some((request, head, rest)) = connection.answers.front_mut() else { return };
            let request = *request;
            if *head > 0 {
                let part = bytes.min(*head);
                (*head, bytes) = (*head - part, bytes - part);
                if *head == 0
                    && let Some(request) = request
                {
                    let rest = *rest;
                    self.on_head(request, rest);
                }
                continue;
            }
            let part = bytes.min(*rest);
            (*rest, bytes) = (*rest - part, bytes - part);
            let ended = *rest == 0;
            if ended {
                connection.answers.pop_front();
            }
            if let Some(request) = request {
                self.on_body(request, part, ended);
            }
        }
    }

    fn on_head(&mut self, request: RequestId, rest: u64) {
        let (Some(at), Some(file)) = (self.engine.place(request), self.file_of(request)) else { return };
        let span = Span::new(at, at + ByteCount::new(rest));
        let head = Head { size: Some(self.ranged.files[file].size), span: Some(span), joinable: true };
        self.engine.on_head(self.now, request, head);
        self.act();
    }

    fn on_body(&mut self, request: RequestId, part: u64, ended: bool) {
        let Some(file) = self.file_of(request) else { return };
        let fresh = self.engine.on_data(self.now, request, ByteCount::new(part));
        let span = (self.now.as_nanos() / self.ranged.bin.as_nanos().max(1) as u64) as usize;
        if let Some(bin) = self.fetched.bins[file].get_mut(span) {
            *bin = fresh.iter().fold(*bin, |sum, span| sum + span.len());
        }
        if ended {
            self.engine.on_end(self.now, request);
        }
        self.act();
    }

    fn file_of(&self, request: RequestId) -> Option<usize> {
        let file = self.engine.file_of(request)?;
        self.ids.iter().position(|id| *id == file)
    }
}

impl Connection {
    fn new(link: usize, tcp: &TcpConfig) -> Self {
        Self {
            link,
            epoch: 0,
            handshake: Some(Time::ZERO),
            trips: 0,
            waiting: VecDeque::new(),
            sender: Sender::new(tcp),
            backlog: 0,
            receiver: Receiver::new(tcp),
            sizes: VecDeque::new(),
            came: 0,
            answers: VecDeque::new(),
        }
    }
}
