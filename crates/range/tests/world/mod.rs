//! Links and servers for the engine in virtual time: requests of a link share its rate, each bounded by what one connection gets through.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};
use braid_range::{
    Action, Config, ConnectionId, Engine, Failure, FileId, FileSetup, Head, LinkId, LinkSetup, RequestId, ServerId, Span, Spans,
};

pub(crate) const STEP: Duration = Duration::from_millis(1);

/// What a link is like at a moment; a rate of zero: it swallows everything.
pub(crate) struct SimLink {
    pub rate: Box<dyn Fn(Time) -> Rate>,
    pub rtt: Duration,
    /// What one connection gets through at most.
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

/// How servers answer.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Manners {
    /// Answer with the whole file, whatever was asked.
    pub whole: bool,
    /// Without validators.
    pub loose: bool,
    /// More requests at once than this (over one link) are refused.
    pub limit: Option<usize>,
    /// The connection breaks after so many bytes of an answer.
    pub breaks: Option<u64>,
    /// At most so much of a range is given.
    pub short: Option<u64>,
    /// Requests that may overlap on a connection.
    pub depth: usize,
}

struct SimResponse {
    request: RequestId,
    file: FileId,
    span: Span,
    /// Asked for whole.
    whole: bool,
    at: u64,
    begins: Time,
    head: bool,
    carry: f64,
}

struct SimConnection {
    link: usize,
    ready: Time,
    told: bool,
    responses: Vec<SimResponse>,
}

pub(crate) struct World {
    pub engine: Engine,
    pub now: Time,
    pub links: Vec<SimLink>,
    pub manners: Manners,
    pub server: ServerId,
    connections: BTreeMap<ConnectionId, SimConnection>,
    pub sizes: BTreeMap<FileId, u64>,
    pub kept: BTreeMap<FileId, Spans>,
    pub ended: BTreeMap<FileId, (Time, Action)>,
    /// By file and second: bytes kept.
    pub served: BTreeMap<(FileId, u64), u64>,
    /// Readers in order: how fast, and what they took.
    pub readers: BTreeMap<FileId, (Rate, f64, u64)>,
    pub asked: usize,
    pub most_connections: usize,
    /// Answers that files came with: their connections are read only as far as the window reaches.
    adopted: BTreeSet<RequestId>,
}

impl World {
    pub(crate) fn new(config: Config, links: Vec<SimLink>, manners: Manners) -> Self {
        let mut engine = Engine::new(config);
        for link in &links {
            engine.add_link(link.setup).unwrap();
        }
        let server = engine.add_server();
        Self {
            engine,
            now: Time::ZERO,
            links,
            manners,
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

    /// A file whose whole answer is under way over `link`, for a reader with this window.
    pub(crate) fn adopt(&mut self, size: u64, link: usize, window: u64, change: impl FnOnce(&mut FileSetup)) -> FileId {
        let mut setup = FileSetup::new(vec![self.server]);
        (setup.size, setup.window) = (Some(ByteCount::new(size)), Some(ByteCount::new(window)));
        change(&mut setup);
        let (file, connection, request) = self.engine.adopt(self.now, LinkId(link), setup).unwrap();
        let span = Span::new(ByteCount::ZERO, ByteCount::new(size));
        let response = SimResponse { request, file, span, whole: true, at: 0, begins: self.now, head: true, carry: 0.0 };
        self.connections.insert(connection, SimConnection { link, ready: self.now, told: true, responses: vec![response] });
        self.adopted.insert(request);
        self.sizes.insert(file, size);
        self.kept.insert(file, Spans::default());
        file
    }

    /// Runs until every file has ended, at most to `limit`. Gives the time of the last end.
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
            // Whatever there was to do without an event shows in the timeout.
            assert!(due.is_some_and(|due| due <= self.now), "{action:?} came before {due:?}");
            count += 1;
            assert!(count < 100_000, "the engine does not come to rest: {action:?}");
            match action {
                Action::Connect { connection, link, .. } => {
                    let ready = self.now + self.links[link.0].rtt * 3;
                    self.connections.insert(connection, SimConnection { link: link.0, ready, told: false, responses: Vec::new() });
                    self.most_connections = self.most_connections.max(self.connections.len());
                }
                Action::Ask { request, connection, file, span, .. } => {
                    self.asked += 1;
                    let size = self.sizes[&file];
                    let whole = span.is_none();
                    let wanted = span.unwrap_or(Span::new(ByteCount::ZERO, ByteCount::new(size)));
                    let short = self.manners.short.filter(|_| !whole).unwrap_or(u64::MAX);
                    let end = wanted.end().get().min(size).min(wanted.start().get().saturating_add(short));
                    let span = if self.manners.whole {
                        Span::new(ByteCount::ZERO, ByteCount::new(size))
                    } else {
                        Span::new(wanted.start(), ByteCount::new(end))
                    };
                    let connection = self.connections.get_mut(&connection).expect("asked on a connection that was connected");
                    assert!(connection.told, "asked on a connection before it stood");
                    let begins = self.now + self.links[connection.link].rtt;
                    let at = span.start().get();
                    connection.responses.push(SimResponse { request, file, span, whole, at, begins, head: false, carry: 0.0 });
                }
                Action::Stop { request } => {
                    self.connections.values_mut().for_each(|connection| connection.responses.retain(|response| response.request != request))
                }
                Action::Close { connection } => drop(self.connections.remove(&connection)),
                Action::Restart { file } => {
                    assert!(self.manners.loose, "what can be joined is kept");
                    self.kept.insert(file, Spans::default());
                }
                Action::Done { file, size } => {
                    assert_eq!(size.get(), self.sizes[&file]);
                    assert_eq!(self.kept[&file].count(), size, "done means all is there");
                    assert!(self.ended.insert(file, (self.now, action)).is_none(), "ended once");
                }
                Action::GiveUp { file, .. } => assert!(self.ended.insert(file, (self.now, action)).is_none(), "ended once"),
            }
        }
        assert!(self.engine.poll_timeout().is_none_or(|due| due > self.now), "nothing to do, and yet due");
    }

    fn serve_link(&mut self, link: usize) {
        let (rate, each) = ((self.links[link].rate)(self.now), self.links[link].each);
        if rate == Rate::ZERO {
            return;
        }
        for (id, connection) in self.connections.iter_mut().filter(|(_, connection)| connection.link == link) {
            if !connection.told && connection.ready <= self.now {
                connection.told = true;
                self.engine.on_connected(self.now, *id, self.manners.depth.max(1));
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

    /// One step of the first answer of a connection; 1 if it is served.
    fn serve(&mut self, id: ConnectionId, share: f64, serving: usize) -> usize {
        let Some(connection) = self.connections.get_mut(&id) else { return 0 };
        let Some(response) = connection.responses.first_mut().filter(|response| response.begins <= self.now) else { return 0 };
        let (request, file) = (response.request, response.file);
        if !response.head {
            if self.manners.limit.is_some_and(|limit| serving >= limit) {
                connection.responses.remove(0);
                self.engine.on_failed(self.now, request, Failure::Refused { wait: None });
                return 0;
            }
            response.head = true;
            let span = (!self.manners.whole && !response.whole).then_some(response.span);
            let head = Head { size: Some(ByteCount::new(self.sizes[&file])), span, joinable: !self.manners.loose };
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
            self.manners.breaks.is_some_and(|most| response.at - response.span.start().get() >= most),
        );
        if ended {
            connection.responses.remove(0);
        }
        if count > 0 {
            let place = self.engine.place(request);
            let fresh = self.engine.on_data(self.now, request, ByteCount::new(count));
            for span in fresh {
                assert_eq!(place, Some(came.start()), "fresh bytes of an answer at its place");
                assert!(came.start() <= span.start() && span.end() <= came.end(), "fresh bytes are of those that came");
                let kept = self.kept.get_mut(&file).unwrap();
                assert!(kept.within(span).is_empty(), "every byte once");
                kept.insert(span);
                *self.served.entry((file, self.now.as_nanos() / 1_000_000_000)).or_default() += span.len().get();
                if let Some((_, taken, window)) = self.readers.get(&file) {
                    assert!(span.end().get() <= *taken as u64 + window, "never beyond the window");
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

    /// Bytes that links brought though they were there already.
    pub(crate) fn twice(&self) -> u64 {
        (0..self.links.len()).map(|link| self.engine.link(self.now, LinkId(link)).unwrap().twice.get()).sum()
    }
}
