//! Two hosts over emulated links in virtual time: real QUIC, real controllers.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

pub mod scenes;
#[path = "../support/tls.rs"]
mod tls;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_bond::host::{ConnectionId, Host, HostEvent};
use braid_bond::{BondId, Carrier, Event, FlowKey, FlowPolicy, Limits, Open, PathId, PathNews, Secret, Target};
use braid_model::{Rate, Time};
use braid_netem::{Link, Loss, Packet, Profile};
use bytes::{Bytes, BytesMut};
use noq_proto::Transmit;

/// Nobody restarts here.
struct NoResets;

impl noq_proto::crypto::HmacKey for NoResets {
    fn sign(&self, _: &[u8], out: &mut [u8]) {
        out.fill(1);
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, _: &[u8], _: &[u8]) -> Result<(), noq_proto::crypto::CryptoError> {
        Err(noq_proto::crypto::CryptoError)
    }
}

/// A link of the test.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub mbps: f64,
    pub delay_ms: u64,
    pub loss: f64,
    pub queue: u64,
}

impl Spec {
    /// With a buffer of 150 ms, as home links have.
    pub fn new(mbps: f64, delay_ms: u64) -> Self {
        Self { mbps, delay_ms, loss: 0.0, queue: (mbps * 1e6 / 8.0 * 0.15) as u64 }
    }
}

/// What a flow is full of; bytes repeat after a number of them that divides no buffer's size.
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
            assert!(data[at..at + right.len()] == right[..], "byte {offset} and on are not what was sent");
            at += right.len();
        }
    }
}

/// Something that fills a flow.
struct Source {
    side: usize,
    flow: FlowKey,
    written: usize,
    size: usize,
}

struct Datagram(Bytes);

impl Packet for Datagram {
    fn size(&self) -> braid_model::Bytes {
        braid_model::Bytes::new(self.0.len() as u64 + 28)
    }
}

pub struct World {
    base: Instant,
    pub now: Instant,
    pub hosts: [Host; 2],
    links: Vec<[Link<Datagram>; 2]>,
    specs: Vec<Spec>,
    pub bond: BondId,
    pub events: [VecDeque<HostEvent>; 2],
    pub got: [BTreeMap<FlowKey, usize>; 2],
    pub messages: [BTreeMap<FlowKey, Vec<(Instant, Bytes)>>; 2],
    pub last_read: Instant,
    pub gap: Duration,
    pub connections: Vec<ConnectionId>,
    pattern: Pattern,
    sources: Vec<Source>,
}

const SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 5757);

fn client_address(link: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, link as u8, 2], 40_000))
}

impl World {
    pub fn new(specs: &[Spec], seed: u64) -> Self {
        #[allow(clippy::disallowed_methods, reason = "only differences count")]
        let base = Instant::now();
        let (client_tls, server_tls) = tls::ends();
        let (mut client, server) =
            (Host::client([seed as u8; 32], base), Host::server([1 + seed as u8; 32], Arc::new(NoResets), Arc::new(server_tls), base));
        let bond = BondId([7; 16]);
        client.begin(base, bond, Secret([8; 32]), Limits::default());
        let client_tls = Arc::new(client_tls);
        let mut connections = Vec::new();
        let links = specs.iter().enumerate().map(|(at, spec)| {
            let profile = Profile {
                rate: Rate::from_bps((spec.mbps * 1e6) as u64).into(),
                delay: Duration::from_millis(spec.delay_ms),
                loss: Loss::random(spec.loss),
                queue: braid_model::Bytes::new(spec.queue),
                ..Profile::default()
            };
            let path = (PathId(at as u32), at as u8, false);
            connections.push(client.dial(base, bond, path, SERVER, client_tls.clone(), "braid.invalid", (None, "test".into())).unwrap());
            [0, 1].map(|side| Link::new(profile.clone(), seed * 100 + at as u64 * 2 + side, Time::ZERO))
        });
        let links = links.collect();
        Self {
            base,
            now: base,
            hosts: [client, server],
            links,
            specs: specs.to_vec(),
            bond,
            events: Default::default(),
            got: Default::default(),
            messages: Default::default(),
            last_read: base,
            gap: Duration::ZERO,
            connections,
            pattern: Pattern::new(),
            sources: Vec::new(),
        }
    }

    /// A world in which all paths have joined, and a second has passed.
    pub fn up(specs: &[Spec], seed: u64) -> Self {
        let mut world = Self::new(specs, seed);
        let paths = specs.len();
        let up = world.run(Duration::from_secs(20), |world| {
            world.hosts.iter().all(|host| host.bonds().next().is_some_and(|(_, bond)| bond.paths().count() == paths))
        });
        assert!(up, "not all paths joined");
        world.run(Duration::from_secs(1), |_| false);
        world
    }

    /// From now on `flow` is kept full from `side` until `size` bytes are written, and then finished.
    pub fn send(&mut self, side: usize, flow: FlowKey, size: usize) {
        self.sources.push(Source { side, flow, written: 0, size });
    }

    /// Ends what [`Self::send`] began at once, with a reset.
    pub fn cut_off(&mut self, side: usize, flow: FlowKey) {
        self.sources.retain(|source| source.flow != flow);
        let (time, id) = (self.hosts[side].time(self.now), self.bond);
        self.hosts[side].bond(id).unwrap().reset(time, flow, 1);
    }

    /// Bytes in a link's queue.
    pub fn backlog(&self, link: usize, side: usize) -> u64 {
        self.links[link][side].backlog().get()
    }

    /// Bytes that a link has delivered of what `side` sent, headers and all.
    pub fn delivered(&self, link: usize, side: usize) -> u64 {
        self.links[link][side].stats().delivered_bytes.get()
    }

    pub fn received(&self, side: usize, flow: FlowKey) -> usize {
        self.got[side].get(&flow).copied().unwrap_or(0)
    }

    /// Bytes of payload that arrived at `side` over `link` since the flow began.
    pub fn arrived(&self, side: usize, flow: FlowKey, link: u8) -> u64 {
        let view = self.hosts[side].bonds().next().and_then(|(_, bond)| bond.flow(flow));
        view.and_then(|view| view.by_link.iter().find(|(of, ..)| *of == link).map(|(.., rx)| rx.get())).unwrap_or(0)
    }

    fn pump(&mut self) {
        let (id, pattern) = (self.bond, &self.pattern);
        let hosts = &mut self.hosts;
        let now = self.now;
        self.sources.retain_mut(|source| {
            let time = hosts[source.side].time(now);
            let Some(bond) = hosts[source.side].bond(id) else { return true };
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
        Time::from_nanos(self.now.duration_since(self.base).as_nanos() as u64)
    }

    pub fn open(&mut self, policy: FlowPolicy, carrier: Carrier) -> FlowKey {
        let open = Open { carrier, target: Target::Name("server".into(), 80), policy };
        let (now, bond) = (self.hosts[0].time(self.now), self.bond);
        self.hosts[0].bond(bond).unwrap().open(now, open).unwrap()
    }

    pub fn set_dark(&mut self, link: usize, dark: bool, told: bool) {
        let now = self.time();
        self.links[link].iter_mut().for_each(|link| link.set_dark(now, dark));
        if told {
            let (now, bond) = (self.hosts[0].time(self.now), self.bond);
            self.hosts[0].bond(bond).unwrap().set_link(now, PathId(link as u32), if dark { PathNews::Down } else { PathNews::Up });
        }
    }

    fn settle(&mut self) {
        let time = self.time();
        for side in 0..2 {
            let mut out: Vec<(usize, Bytes)> = Vec::new();
            let links = self.links.len();
            let mut sink = |link: u8, transmit: &Transmit, data: &[u8]| {
                let at =
                    if side == 0 { usize::from(link) } else { (0..links).find(|at| client_address(*at) == transmit.destination).unwrap() };
                for part in data.chunks(transmit.segment_size.unwrap_or(data.len())) {
                    out.push((at, Bytes::copy_from_slice(part)));
                }
            };
            self.hosts[side].drive(self.now, &mut sink);
            for (at, data) in out {
                self.links[at][side].push(time, Datagram(data));
            }
            self.drain(side);
        }
    }

    fn drain(&mut self, side: usize) {
        let now = self.now;
        while let Some(event) = self.hosts[side].poll_event() {
            match &event {
                HostEvent::Hello { connection, hello, .. } => {
                    let (connection, hello) = (*connection, hello.clone());
                    assert!(self.hosts[side].admit(now, connection, &hello, b"client", Limits::default()));
                }
                HostEvent::Bond(id, Event::Readable(flow)) => {
                    let time = self.hosts[side].time(now);
                    let bond = self.hosts[side].bond(*id).unwrap();
                    let mut any = false;
                    while let Some(data) = bond.read(time, *flow, usize::MAX) {
                        let got = self.got[side].entry(*flow).or_default();
                        self.pattern.check(*got, &data);
                        *got += data.len();
                        any = true;
                    }
                    while let Some(message) = bond.read_message(*flow) {
                        self.messages[side].entry(*flow).or_default().push((now, message));
                    }
                    if any {
                        self.gap = self.gap.max(now - self.last_read);
                        self.last_read = now;
                    }
                }
                _ => {}
            }
            self.events[side].push_back(event);
        }
    }

    /// Runs until `done` or for `limit`; whether it came to that.
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
            let wires = self.links.iter().flatten().filter_map(Link::poll_timeout);
            let wires = wires.map(|time| self.base + time.since(Time::ZERO));
            let next = self.hosts.iter().filter_map(Host::poll_timeout).chain(wires).min().unwrap_or(end);
            if next > end || self.now >= end {
                self.now = end;
                return false;
            }
            spins = if next <= self.now { spins + 1 } else { 0 };
            assert!(spins < 1000, "a timer is due and nothing happens");
            self.now = next.max(self.now);
            let time = self.time();
            for at in 0..self.links.len() {
                for side in 0..2 {
                    while let Some(Datagram(data)) = self.links[at][side].pop(time) {
                        let from = if side == 0 { client_address(at) } else { SERVER };
                        self.hosts[1 - side].receive(self.now, at as u8, (from, None), None, BytesMut::from(&data[..]));
                    }
                }
            }
            for host in &mut self.hosts {
                host.handle_timeout(self.now);
            }
        }
    }

    /// The mean rate, in Mbit/s, at which `side` reads `flow` in the next `span`.
    pub fn rate(&mut self, side: usize, flow: FlowKey, span: Duration) -> f64 {
        let (before, start) = (self.received(side, flow), self.now);
        self.run(span, |_| false);
        (self.received(side, flow) - before) as f64 * 8e-6 / (self.now - start).as_secs_f64()
    }

    pub fn sum(&self) -> f64 {
        self.specs.iter().map(|spec| spec.mbps * (1.0 - spec.loss)).sum()
    }
}
