//! Links and servers for the engine in virtual time: the requests of a link share its rate, each limited by the rate of one connection.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};
use braid_range::{
    Action, Config, ConnectionId, Engine, Failure, FileId, FileSetup, Head, LinkId, LinkSetup, RequestId, ServerId, Span, Spans,
};

pub(crate) const STEP: Duration = Duration::from_millis(1);

/// A simulated link. At a rate of zero it swallows everything.
pub(crate) struct SimLink {
    pub rate: Box<dyn Fn(Time) -> Rate>,
    pub rtt: Duration,
    /// Maximum rate of one connection.
    pub each: Rate,
    pub setup: LinkSetup,
}

impl SimLink {
    pub(crate) fn new(mbps: f64, rtt_ms: u64) -> Self {
        let rate = Rate::from_mbps(1).scale(mbps);
        Self {
            rate: Box::new(move |_| rate),
            rtt: Duration::from_millis(rtt_ms),
            each: Rate::from_mbps(100_000),
            setup: LinkSetup::default(),
        }
    }

    pub(crate) fn each(mut self, mbps: f64) -> Self {
        self.each = Rate::from_mbps(1).scale(mbps);
        self
    }

    pub(crate) fn varying(mut self, rate: impl Fn(Time) -> Rate + 'static) -> Self {
        self.rate = Box::new(rate);
        self
    }
}

/// Behaviour of the servers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ServerBehaviour {
    /// Answer with the whole file, regardless of the requested range.
    pub whole: bool,
    /// Send no validators.
    pub loose: bool,
    /// Refuse more concurrent requests than this (over one link).
    pub limit: Option<usize>,
    /// Break the connection after this many bytes of an answer.
    pub breaks: Option<u64>,
    /// Send at most this much of a range.
    pub short: Option<u64>,
    /// Number of requests that may overlap on a connection.
    pub depth: usize,
}

struct SimResponse {
    request: RequestId,
    file: FileId,
    span: Span,
    /// The whole file was requested.
    whole: bool,
    at: u64,
    begins: Time,
    head: bool,
    carry: f64,
}

struct SimConnection {
    link: usize,
    ready: Time,
    connected: bool,
    responses: Vec<SimResponse>,
}

pub(crate) struct World {
    pub engine: Engine,
    pub now: Time,
    pub links: Vec<SimLink>,
    pub behaviour: ServerBehaviour,
    pub server: ServerId,
    connections: BTreeMap<ConnectionId, SimConnection>,
    pub sizes: BTreeMap<FileId, u64>,
    pub kept: BTreeMap<FileId, Spans>,
    pub ended: BTreeMap<FileId, (Time, Action)>,
    /// Kept bytes by file and second.
    pub served: BTreeMap<(FileId, u64), u64>,
    /// Readers in order: rate, bytes taken, and window.
    pub readers: BTreeMap<FileId, (Rate, f64, u64)>,
    pub asked: usize,
    pub most_connections: usize,
    /// Answers of adopted files: their connections are read only as far as the window reaches.
    adopted: BTreeSet<RequestId>,
}

impl World {
    pub(crate) fn new(config: Config, links: Vec<SimLink>, behaviour: ServerBehaviour) -> Self {
        let mut engine = Engine::new(config);
        for link in &links {
            engine.add_link(link.setup).unwrap();
        }
        let server = engine.add_server();
        Self {
            engine,
            now: Time::ZERO,
            links,
            behaviour,
            server,
            connections: BTreeMap::new(),
            sizes: BTreeMap::new(),
            kept: BTreeMap::new(),
            ended: BTreeMap::new(),
            served: BTreeMap::new(),
            readers: BTreeMap::new(),
            asked: 0,
            most_connections: 0,
            adopted: BTreeSet::new(),
        }
    }

    pub(crate) fn add(&mut self, size: u64, change: impl FnOnce(&mut FileSetup)) -> FileId {
        let mut setup = FileSetup::new(vec![self.server]);
        change(&mut setup);
        let got = setup.got.clone();
        let id = self.engine.add_file(self.now, setup).unwrap();
        self.sizes.insert(id, size);
        self.kept.insert(id, got);
        id
    }

    /// Adopts a file whose whole answer is in progress over `link`, for a reader with this window.
    pub(crate) fn adopt(&mut self, size: u64, link: usize, window: u64, change: impl FnOnce(&mut FileSetup)) -> FileId {
        let mut setup = FileSetup::new(vec![self.server]);
        (setup.size, setup.window) = (Some(ByteCount::new(size)), Some(ByteCount::new(window)));
        change(&mut setup);
        let (file, connection, request) = self.engine.adopt(self.now, LinkId(link), setup).unwrap();
        let span = Span::new(ByteCount::ZERO, ByteCount::new(size));
        let response = SimResponse { request, file, span, whole: true, at: 0, begins: self.now, head: true, carry: 0.0 };
        self.connections.insert(connection, SimConnection { link, ready: self.now, connected: true, responses: vec![response] });
        self.adopted.insert(request);
        self.sizes.insert(file, size);
        self.kept.insert(file, Spans::default());
        file
    }

    /// Runs until every file has ended, at most to `limit`. Returns the time of the last end.
    pub(crate) fn run(&mut self, limit: Duration) -> Duration {
        while self.ended.len() < self.sizes.len() {
            assert!(self.now < Time::ZERO + limit, "not ended after {limit:?}: {:?} {:?}", self.ended, self.engine);
            self.step();
        }
        self.ended.values().map(|(at, _)| at.since(Time::ZERO)).max().unwrap()
    }

    pub(crate) fn step(&mut self) {
        self.act();
        self.now = self.now + STEP;
        for link in 0..self.links.len() {
            self.serve_link(link);
        }
        self.read();
    }

    fn act(&mut self) {
        let due = self.engine.poll_timeout();
        let mut count = 0;
        while let Some(action) = self.engine.poll(self.now) {
            // Every action without a preceding event must have been announced by `poll_timeout`.
            assert!(due.is_some_and(|due| due <= self.now), "{action:?} came before {due:?}");
            count += 1;
            assert!(count < 100_000, "the engine does not become idle: {action:?}");
            match action {
                Action::Connect { connection, link, .. } => {
                    let ready = self.now + self.links[link.0].rtt * 3;
                    self.connections.insert(connection, SimConnection { link: link.0, ready, connected: false, responses: Vec::new() });
                    self.most_connections = self.most_connections.max(self.connections.len());
                }
                Action::Ask { request, connection, file, span, .. } => {
                    self.asked += 1;
                    let size = self.sizes[&file];
                    let whole = span.is_none();
                    let wanted = span.unwrap_or(Span::new(ByteCount::ZERO, ByteCount::new(size)));
                    let short = self.behaviour.short.filter(|_| !whole).unwrap_or(u64::MAX);
                    let end = wanted.end().get().min(size).min(wanted.start().get().saturating_add(short));
                    let span = if self.behaviour.whole {
                        Span::new(ByteCount::ZERO, ByteCount::new(size))
                    } else {
                        Span::new(wanted.start(), ByteCount::new(end))
                    };
                    let connection = self.connections.get_mut(&connection).expect("requests use known connections");
                    assert!(connection.connected, "requests use established connections only");
                    let begins = self.now + self.links[connection.link].rtt;
                    let at = span.start().get();
                    connection.responses.push(SimResponse { request, file, span, whole, at, begins, head: false, carry: 0.0 });
                }
                Action::Stop { request } => {
                    self.connections.values_mut().for_each(|connection| connection.responses.retain(|response| response.request != request))
                }
                Action::Close { connection } => drop(self.connections.remove(&connection)),
                Action::Restart { file } => {
                    assert!(self.behaviour.loose, "joinable bytes are never discarded");
                    self.kept.insert(file, Spans::default());
                }
                Action::Done { file, size } => {
                    assert_eq!(size.get(), self.sizes[&file]);
                    assert_eq!(self.kept[&file].count(), size, "a completed file has all bytes");
                    assert!(self.ended.insert(file, (self.now, action)).is_none(), "a file ends once");
                }
                Action::GiveUp { file, .. } => assert!(self.ended.insert(file, (self.now, action)).is_none(), "a file ends once"),
            }
        }
        assert!(self.engine.poll_timeout().is_none_or(|due| due > self.now), "poll_timeout is due, but there is no action");
    }

    fn serve_link(&mut self, link: usize) {
        let (rate, each) = ((self.links[link].rate)(self.now), self.links[link].each);
        if rate == Rate::ZERO {
            return;
        }
        for (id, connection) in self.connections.iter_mut().filter(|(_, connection)| connection.link == link) {
            if !connection.connected && connection.ready <= self.now {
                connection.connected = true;
                self.engine.on_connected(self.now, *id, self.behaviour.depth.max(1));
            }
        }
        let busy = self
            .connections
            .values()
            .filter(|connection| connection.link == link)
            .filter(|connection| connection.responses.first().is_some_and(|response| response.begins <= self.now));
        let (count, mut left) = (busy.count(), rate.bps() as f64 / 8.0 * STEP.as_secs_f64());
        let mut share = left / count.max(1) as f64;
        let ids: Vec<ConnectionId> = self.connections.iter().filter(|(_, connection)| connection.link == link).map(|(id, _)| *id).collect();
        share = share.min(each.bps() as f64 / 8.0 * STEP.as_secs_f64());
        let mut serving = 0;
        for id in ids {
            left -= share;
            serving += self.serve(id, share, serving);
        }
        assert!(left > -1e9);
    }

    /// Advances the first answer of a connection by one step; returns 1 if it is served.
    fn serve(&mut self, id: ConnectionId, share: f64, serving: usize) -> usize {
        let Some(connection) = self.connections.get_mut(&id) else { return 0 };
        let Some(response) = connection.responses.first_mut().filter(|response| response.begins <= self.now) else { return 0 };
        let (request, file) = (response.request, response.file);
        if !response.head {
            if self.behaviour.limit.is_some_and(|limit| serving >= limit) {
                connection.responses.remove(0);
                self.engine.on_failed(self.now, request, Failure::Refused { wait: None });
                return 0;
            }
            response.head = true;
            let span = (!self.behaviour.whole && !response.whole).then_some(response.span);
            let head = Head { size: Some(ByteCount::new(self.sizes[&file])), span, joinable: !self.behaviour.loose };
            self.engine.on_head(self.now, request, head);
            self.act();
        }
        let Some(connection) = self.connections.get_mut(&id) else { return 1 };
        let Some(response) = connection.responses.first_mut().filter(|response| response.request == request) else { return 1 };
        response.carry += share;
        let mut count = (response.carry as u64).min(response.span.end().get() - response.at);
        if self.adopted.contains(&request) {
            count = count.min(self.engine.limit(file).get().saturating_sub(response.at));
            response.carry = response.carry.min(count as f64 + share);
        }
        response.carry -= count as f64;
        let came = Span::new(ByteCount::new(response.at), ByteCount::new(response.at + count));
        response.at += count;
        let (ended, broke) = (
            response.at == response.span.end().get(),
            self.behaviour.breaks.is_some_and(|most| response.at - response.span.start().get() >= most),
        );
        if ended {
            connection.responses.remove(0);
        }
        if count > 0 {
            let place = self.engine.place(request);
            let fresh = self.engine.on_data(self.now, request, ByteCount::new(count));
            for span in fresh {
                assert_eq!(place, Some(came.start()), "fresh bytes start at the answer's position");
                assert!(came.start() <= span.start() && span.end() <= came.end(), "fresh bytes are among the received ones");
                let kept = self.kept.get_mut(&file).unwrap();
                assert!(kept.within(span).is_empty(), "every byte is fresh once");
                kept.insert(span);
                *self.served.entry((file, self.now.as_nanos() / 1_000_000_000)).or_default() += span.len().get();
                if let Some((_, taken, window)) = self.readers.get(&file) {
                    assert!(span.end().get() <= *taken as u64 + window, "bytes stay within the window");
                }
            }
        }
        if ended {
            self.engine.on_end(self.now, request);
        } else if broke {
            self.connections.remove(&id);
            self.engine.on_connection_lost(self.now, id);
        }
        1
    }

    fn read(&mut self) {
        for (file, (rate, taken, _)) in &mut self.readers {
            let there = self.kept[file].contiguous(ByteCount::ZERO).get() as f64;
            *taken = (*taken + rate.bps() as f64 / 8.0 * STEP.as_secs_f64()).min(there);
            self.engine.on_taken(self.now, *file, ByteCount::new(*taken as u64));
        }
    }

    pub(crate) fn done(&self, file: FileId) -> bool {
        matches!(self.ended.get(&file), Some((_, Action::Done { .. })))
    }

    /// Number of bytes that links delivered although they were already present.
    pub(crate) fn twice(&self) -> u64 {
        (0..self.links.len()).map(|link| self.engine.link(self.now, LinkId(link)).unwrap().twice.get()).sum()
    }
}
