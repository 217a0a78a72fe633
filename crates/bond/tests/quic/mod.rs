//! Two hosts over emulated links in virtual time: real QUIC, real controllers.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part")]

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
    pub fn new(mbps: f64, delay_ms: u64) -> Self {
        Self { mbps, delay_ms, loss: 0.0, queue: 1_500_000 }
    }
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
        }
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
                        *self.got[side].entry(*flow).or_default() += data.len();
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
            self.settle();
            if done(self) {
                return true;
            }
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

    /// Keeps `flow` full from `side` for `span`; the mean rate at which the other end read, in Mbit/s.
    pub fn bulk(&mut self, side: usize, flow: FlowKey, span: Duration) -> f64 {
        let before = self.got[1 - side].get(&flow).copied().unwrap_or(0);
        let start = self.now;
        self.run(span, |world| {
            world.fill(side, flow);
            false
        });
        let got = self.got[1 - side].get(&flow).copied().unwrap_or(0) - before;
        got as f64 * 8e-6 / (self.now - start).as_secs_f64()
    }

    pub fn fill(&mut self, side: usize, flow: FlowKey) {
        let (time, id) = (self.hosts[side].time(self.now), self.bond);
        let Some(bond) = self.hosts[side].bond(id) else { return };
        let room = bond.writable(time, flow);
        if room > 0 {
            bond.write(flow, Bytes::from(vec![0; room]));
        }
    }

    pub fn sum(&self) -> f64 {
        self.specs.iter().map(|spec| spec.mbps * (1.0 - spec.loss)).sum()
    }
}
