//! Two hosts over emulated links in virtual time, with real QUIC and real controllers.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

pub mod scenes;
#[path = "../support/tls.rs"]
mod tls;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use braid_bond::host::HostEvent;
use braid_bond::{Bond, Event, FlowKey, FlowKind, FlowPolicy, Limits, Open, PathId, PathUpdate, Side, Target};
use braid_model::{Rate, Time};
use braid_netem::{EmulatedLink, Loss, Packet, Profile};
use braid_sim::{Pair, Quic};
use bytes::Bytes;

/// A test link.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub mbps: f64,
    pub delay_ms: u64,
    pub loss: f64,
    pub queue: u64,
}

impl Spec {
    /// A link with a buffer of 150 ms, as home links have.
    pub fn new(mbps: f64, delay_ms: u64) -> Self {
        Self { mbps, delay_ms, loss: 0.0, queue: (mbps * 1e6 / 8.0 * 0.15) as u64 }
    }
}

/// Content of a flow: bytes with a period that does not divide any buffer size.
struct Pattern(Bytes);

impl Pattern {
    const PERIOD: usize = 65_521;

    fn new() -> Self {
        Self((0..3 * Self::PERIOD).map(|at| ((at % Self::PERIOD * 7919) >> 8) as u8).collect())
    }

    fn at(&self, offset: usize, most: usize) -> Bytes {
        let from = offset % Self::PERIOD;
        self.0.slice(from..from + most.min(2 * Self::PERIOD))
    }

    fn check(&self, offset: usize, data: &[u8]) {
        let mut at = 0;
        while at < data.len() {
            let right = self.at(offset + at, data.len() - at);
            assert!(data[at..at + right.len()] == right[..], "the bytes from {offset} on differ from the sent ones");
            at += right.len();
        }
    }
}

/// A sender that keeps a flow's buffer full.
struct Source {
    side: usize,
    flow: FlowKey,
    written: usize,
    size: usize,
}

struct Datagram(Bytes);

impl Packet for Datagram {
    fn size(&self) -> braid_model::ByteCount {
        braid_model::ByteCount::new(self.0.len() as u64 + 28)
    }
}

const ENDS: [Side; 2] = [Side::Client, Side::Server];

pub struct World {
    quic: Quic,
    pub now: Instant,
    pair: Pair,
    links: Vec<[EmulatedLink<Datagram>; 2]>,
    specs: Vec<Spec>,
    pub got: [BTreeMap<FlowKey, usize>; 2],
    pub messages: [BTreeMap<FlowKey, Vec<(Instant, Bytes)>>; 2],
    pub last_read: Instant,
    pub gap: Duration,
    /// If not zero, the hosts' timers fire only at multiples of this time.
    pub tick: Duration,
    /// Number of bursts and of datagrams that each host has sent.
    pub bursts: [(usize, usize); 2],
    /// Reason why each end ended the bond.
    pub ended: [Option<String>; 2],
    pattern: Pattern,
    sources: Vec<Source>,
}

impl World {
    pub fn new(specs: &[Spec], seed: u64) -> Self {
        #[allow(clippy::disallowed_methods, reason = "only differences matter")]
        let epoch = Instant::now();
        let (client, server) = tls::ends();
        let quic = Quic { epoch, client, server };
        let pair = Pair::new(&quic, epoch, seed, specs.len(), Limits::default()).unwrap();
        let links = specs.iter().enumerate().map(|(at, spec)| {
            let profile = Profile {
                rate: Rate::from_bps((spec.mbps * 1e6) as u64).into(),
                delay: Duration::from_millis(spec.delay_ms),
                loss: Loss::random(spec.loss),
                queue: braid_model::ByteCount::new(spec.queue),
                ..Profile::default()
            };
            [0, 1].map(|side| EmulatedLink::new(profile.clone(), seed * 100 + at as u64 * 2 + side, Time::ZERO))
        });
        let links = links.collect();
        Self {
            quic,
            now: epoch,
            pair,
            links,
            specs: specs.to_vec(),
            got: Default::default(),
            messages: Default::default(),
            last_read: epoch,
            gap: Duration::ZERO,
            tick: Duration::ZERO,
            bursts: Default::default(),
            ended: Default::default(),
            pattern: Pattern::new(),
            sources: Vec::new(),
        }
    }

    /// A world one second after all paths have joined.
    pub fn up(specs: &[Spec], seed: u64) -> Self {
        let mut world = Self::new(specs, seed);
        let paths = specs.len();
        let up = world.run(Duration::from_secs(20), |world| {
            ENDS.iter().all(|end| world.pair.look(*end).is_some_and(|bond| bond.paths().count() == paths))
        });
        assert!(up, "not all paths joined");
        world.run(Duration::from_secs(1), |_| false);
        world
    }

    /// Keeps `flow` full from `side` until `size` bytes are written, and then finishes it.
    pub fn send(&mut self, side: usize, flow: FlowKey, size: usize) {
        self.sources.push(Source { side, flow, written: 0, size });
    }

    /// Stops a transfer of [`Self::send`] with a reset.
    pub fn cut_off(&mut self, side: usize, flow: FlowKey) {
        self.sources.retain(|source| source.flow != flow);
        let (bond, time) = self.end(side);
        bond.reset(time, flow, 1);
    }

    /// The bond of one end, and its clock.
    pub fn end(&mut self, side: usize) -> (&mut Bond, Time) {
        self.pair.end(self.now, ENDS[side]).unwrap()
    }

    /// Bytes in a link's queue.
    pub fn backlog(&self, link: usize, side: usize) -> u64 {
        self.links[link][side].backlog().get()
    }

    /// Bytes that a link has delivered for `side`, including headers.
    pub fn delivered(&self, link: usize, side: usize) -> u64 {
        self.links[link][side].stats().delivered_bytes.get()
    }

    pub fn received(&self, side: usize, flow: FlowKey) -> usize {
        self.got[side].get(&flow).copied().unwrap_or(0)
    }

    /// Payload bytes that arrived at `side` over `link` since the flow started.
    pub fn arrived(&self, side: usize, flow: FlowKey, link: u8) -> u64 {
        let view = self.pair.look(ENDS[side]).and_then(|bond| bond.flow(flow));
        view.and_then(|view| view.by_link.iter().find(|(of, _)| *of == link).map(|(_, moved)| moved.rx.get())).unwrap_or(0)
    }

    fn pump(&mut self) {
        let (pair, now, pattern) = (&mut self.pair, self.now, &self.pattern);
        self.sources.retain_mut(|source| {
            let Some((bond, time)) = pair.end(now, ENDS[source.side]) else { return true };
            if bond.flow(source.flow).is_none() {
                return true;
            }
            let mut room = bond.writable(time, source.flow).min(source.size - source.written);
            while room > 0 {
                let data = pattern.at(source.written, room);
                (room, source.written) = (room - data.len(), source.written + data.len());
                bond.write(source.flow, data);
            }
            if source.written == source.size {
                bond.finish(time, source.flow);
            }
            source.written < source.size
        });
    }

    pub fn time(&self) -> Time {
        self.quic.time(self.now)
    }

    pub fn open(&mut self, policy: FlowPolicy, kind: FlowKind) -> FlowKey {
        let open = Open { kind, target: Target::Name("server".into(), 80), policy };
        let (bond, now) = self.end(0);
        bond.open(now, open).unwrap()
    }

    pub fn set_dark(&mut self, link: usize, dark: bool, told: bool) {
        let now = self.time();
        self.links[link].iter_mut().for_each(|link| link.set_dark(now, dark));
        if told {
            let (bond, now) = self.end(0);
            bond.set_link(now, PathId(link as u32), if dark { PathUpdate::Down } else { PathUpdate::Up });
        }
    }

    /// Dials another path over a link.
    pub fn dial(&mut self, link: usize) {
        self.pair.dial(self.now, link).expect("the bond does not exist");
    }

    /// Number of paths of an end, if it has the bond.
    pub fn paths(&self, side: usize) -> Option<usize> {
        self.pair.look(ENDS[side]).map(|bond| bond.paths().count())
    }

    fn settle(&mut self) {
        let time = self.time();
        for side in 0..2 {
            let (links, mut sent) = (&mut self.links, 0);
            self.pair.send(self.now, ENDS[side], |at, data| {
                sent += 1;
                links[at][side].push(time, Datagram(data));
            });
            self.bursts[side].0 += usize::from(sent > 0);
            self.bursts[side].1 += sent;
            self.drain(side);
        }
    }

    fn drain(&mut self, side: usize) {
        let now = self.now;
        while let Some(event) = self.pair.poll_event(now, ENDS[side], Limits::default()) {
            let flow = match event {
                HostEvent::Bond(_, Event::Readable(flow)) => flow,
                HostEvent::Ended { reason, .. } => {
                    self.ended[side] = Some(reason);
                    continue;
                }
                _ => continue,
            };
            let (bond, time) = self.pair.end(now, ENDS[side]).unwrap();
            let mut any = false;
            while let Some(data) = bond.read(time, flow, usize::MAX) {
                let got = self.got[side].entry(flow).or_default();
                self.pattern.check(*got, &data);
                *got += data.len();
                any = true;
            }
            while let Some(message) = bond.read_message(flow) {
                self.messages[side].entry(flow).or_default().push((now, message));
            }
            if any {
                self.gap = self.gap.max(now - self.last_read);
                self.last_read = now;
            }
        }
    }

    /// Runs until `done` or for `limit`. Returns whether `done` was reached.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = self.now + limit;
        let mut spins = 0;
        loop {
            self.pump();
            self.settle();
            if done(self) {
                return true;
            }
            self.pump();
            self.settle();
            let wires = self.links.iter().flatten().filter_map(EmulatedLink::poll_timeout);
            let wires = wires.map(|time| self.quic.instant(time));
            let timer = self.pair.poll_timeout().map(|at| self.ticked(at));
            let next = timer.into_iter().chain(wires).min().unwrap_or(end);
            if next > end || self.now >= end {
                self.now = end;
                return false;
            }
            spins = if next <= self.now { spins + 1 } else { 0 };
            assert!(spins < 1000, "a due timer had no effect");
            self.now = next.max(self.now);
            let time = self.time();
            for at in 0..self.links.len() {
                for side in 0..2 {
                    while let Some(Datagram(data)) = self.links[at][side].pop(time) {
                        self.pair.receive(self.now, ENDS[1 - side], at, &data);
                    }
                }
            }
            self.pair.handle_timeout(self.now);
        }
    }

    fn ticked(&self, at: Instant) -> Instant {
        let tick = self.tick.as_nanos();
        let since = self.quic.time(at).since(Time::ZERO).as_nanos();
        if tick == 0 { at } else { at + Duration::from_nanos((since.next_multiple_of(tick) - since) as u64) }
    }

    /// Mean rate in Mbit/s at which `side` reads `flow` during the next `span`.
    pub fn rate(&mut self, side: usize, flow: FlowKey, span: Duration) -> f64 {
        let (before, start) = (self.received(side, flow), self.now);
        self.run(span, |_| false);
        (self.received(side, flow) - before) as f64 * 8e-6 / (self.now - start).as_secs_f64()
    }

    pub fn sum(&self) -> f64 {
        self.specs.iter().map(|spec| spec.mbps * (1.0 - spec.loss)).sum()
    }
}
