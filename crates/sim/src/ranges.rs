//! Downloads by byte range over several links (thesis, 4.4.2): [`braid_range`]'s engine, plain HTTP servers, TCP by the segment between them.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_netem::{EmulatedLink, Packet, Profile};
use braid_range::{Action, Config, ConnectionId, Engine, FileId, FileSetup, Head, LinkSetup, RangeError, RequestId, Span};

use crate::tcp::{Ack, AckTiming, HANDSHAKE, HANDSHAKE_WAIT, HEADERS, Receiver, SEGMENT, Segment, Sender, Sending, TcpConfig};

/// A request's payload, and the head of an answer.
const REQUEST: u64 = 300;
const HEAD: u64 = 250;
/// What is left of an answer that nobody wants is read to its end up to this size; else the connection is opened anew.
const WORTH_READING: u64 = 32 * 1024;

/// A link of a download: its ways towards the client and away from it.
#[derive(Debug, Clone)]
pub struct RangedLink {
    /// Towards the client.
    pub down: Profile,
    /// Away from it.
    pub up: Profile,
    /// When its rate towards the client becomes another, in order.
    pub changes: Vec<(Time, Rate)>,
}

/// A file to fetch.
#[derive(Debug, Clone)]
pub struct RangedFile {
    /// Its size, which the first answer tells.
    pub size: ByteCount,
    /// Its weight φ.
    pub weight: f64,
    /// The links it may use, its row of Π.
    pub links: LinkSet,
}

/// Files fetched side by side from one server that speaks HTTP/1.1.
#[derive(Debug, Clone)]
pub struct Ranged {
    /// The links.
    pub links: Vec<RangedLink>,
    /// The files.
    pub files: Vec<RangedFile>,
    /// What the engine is told.
    pub config: Config,
    /// How connections' ends behave.
    pub tcp: TcpConfig,
    /// Round trips until a connection can be asked: 1 for TCP, 2 with TLS 1.3.
    pub round_trips: u32,
    /// How long it lasts at most.
    pub duration: Duration,
    /// Bytes are summed up over spans of this length.
    pub bin: Duration,
    /// Seed of the links' losses.
    pub seed: u64,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// By file and span of time: bytes that were kept.
    pub bins: Vec<Vec<ByteCount>>,
    /// By file: when all of it was there.
    pub ended: Vec<Option<Time>>,
    /// By link: bytes of answers' bodies, and those of them that came twice.
    pub moved: Vec<(ByteCount, ByteCount)>,
    /// How many ranges were asked for.
    pub requests: usize,
}

impl Fetched {
    /// The mean rate of a file from one span of time up to another.
    pub fn rate(&self, file: usize, bin: Duration, from: usize, to: usize) -> Rate {
        let sum = self.bins[file][from..to].iter().fold(ByteCount::ZERO, |sum, bytes| sum + *bytes);
        sum.per(bin * (to - from) as u32)
    }
}

/// Fetches the files.
///
/// # Errors
/// Too many links or files, or a weight that is no positive number.
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

/// What travels: of which connection, and since which of its reconnects.
#[derive(Debug)]
struct Parcel {
    connection: ConnectionId,
    epoch: u32,
    what: What,
}

#[derive(Debug)]
enum What {
    Open,
    Opened,
    Request(Span),
    Data(Segment, Time),
    Ack(Ack),
}

impl Packet for Parcel {
    fn size(&self) -> ByteCount {
        match &self.what {
            What::Open | What::Opened => ByteCount::new(u64::from(HANDSHAKE)),
            What::Request(_) => HEADERS + ByteCount::new(REQUEST),
            What::Data(segment, _) => HEADERS + ByteCount::new(u64::from(segment.size)),
            What::Ack(_) => HEADERS,
        }
    }
}

/// A connection as it is now: both ends.
#[derive(Debug)]
struct Connection {
    link: usize,
    epoch: u32,
    /// When the handshake is repeated; `None`: the connection stands.
    handshake: Option<Time>,
    /// Round trips that the handshakes have taken.
    trips: u32,
    /// Asked for before it stands again.
    waiting: VecDeque<Span>,
    /// The server's end, and what it has yet to send.
    sender: Sender,
    backlog: u64,
    /// The client's end: the segments' sizes, from the first that has not come in order.
    receiver: Receiver,
    sizes: VecDeque<u16>,
    came: u32,
    /// Answers in their order: whose (nobody's: read and thrown away), what is left of the head, what of the body.
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
                self.up[link].push(now, Parcel { connection: id, epoch, what: What::Ack(ack) });
            }
            self.send(id);
        }
    }

    /// Does what the engine wants.
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

    /// Sends a handshake's first packet, again if need be.
    fn open(&mut self, id: ConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.handshake = Some(self.now + HANDSHAKE_WAIT);
        self.up[connection.link].push(self.now, Parcel { connection: id, epoch: connection.epoch, what: What::Open });
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
            self.up[connection.link].push(self.now, Parcel { connection: id, epoch: connection.epoch, what: What::Request(span) });
        }
    }

    fn stop(&mut self, request: RequestId) {
        let of = |connection: &Connection| connection.answers.iter().position(|(whose, ..)| *whose == Some(request));
        let Some((id, place)) = self.connections.iter().find_map(|(id, connection)| Some((*id, of(connection)?))) else { return };
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let (whose, _, rest) = &mut connection.answers[place];
        if *rest <= WORTH_READING {
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
        match parcel.what {
            What::Open => {
                let opened = Parcel { connection: parcel.connection, epoch: parcel.epoch, what: What::Opened };
                self.down[connection.link].push(self.now, opened);
            }
            What::Request(span) => connection.backlog += HEAD + span.len().get(),
            What::Ack(ack) => connection.sender.on_ack(self.now, &ack),
            What::Opened | What::Data(..) => {}
        }
        self.send(parcel.connection);
    }

    /// The server sends what its window lets it.
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
                .push(self.now, Parcel { connection: id, epoch: connection.epoch, what: What::Data(segment, self.now) });
        }
    }

    fn at_client(&mut self, parcel: Parcel) {
        let (id, epoch) = (parcel.connection, parcel.epoch);
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| connection.epoch == epoch) else { return };
        match parcel.what {
            What::Opened if connection.handshake.is_some() && connection.trips + 1 < self.ranged.round_trips => {
                connection.trips += 1;
                self.open(id);
            }
            What::Opened if connection.handshake.take().is_some() => {
                let link = connection.link;
                for span in std::mem::take(&mut connection.waiting) {
                    self.up[link].push(self.now, Parcel { connection: id, epoch, what: What::Request(span) });
                }
                self.engine.on_connected(self.now, id, 1);
            }
            What::Data(segment, sent) => {
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
                    self.up[connection.link].push(self.now, Parcel { connection: id, epoch, what: What::Ack(ack) });
                }
                self.read(id, epoch, bytes);
            }
            What::Open | What::Opened | What::Request(_) | What::Ack(_) => {}
        }
        self.act();
    }

    /// The client reads the next `bytes` of a connection.
    fn read(&mut self, id: ConnectionId, epoch: u32, mut bytes: u64) {
        while bytes > 0 {
            // What the engine does about an answer may end its connection.
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
