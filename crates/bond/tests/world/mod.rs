//! Two bonds over emulated links in virtual time. Each path has a fixed window instead of a congestion controller.
#![allow(dead_code, unreachable_pub, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::time::Duration;

use braid_bond::{Bond, BondError, Event, FlowKey, FlowKind, FlowPolicy, Limits, Open, PathFacts, PathId, PathUpdate, Side, Target};
use braid_model::{ByteCount, Rate, Time};
use braid_netem::{EmulatedLink, Loss, Profile, PushOutcome};
use bytes::{Bytes, BytesMut};

pub const MTU: usize = 1200;

/// A test link; both directions are equal.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub mbps: u64,
    pub delay_ms: u64,
    pub loss: f64,
}

pub struct Wire {
    pub links: [EmulatedLink<Vec<u8>>; 2],
    pub spec: Spec,
    id: PathId,
}

pub struct World {
    pub now: Time,
    pub ends: [Bond; 2],
    pub wires: Vec<Wire>,
    pub events: [Vec<Event>; 2],
    /// Data that each end read of each flow, and when the last byte arrived.
    pub got: [BTreeMap<FlowKey, Vec<u8>>; 2],
    pub messages: [BTreeMap<FlowKey, Vec<Bytes>>; 2],
    /// Longest time without a byte read, by end, while `watch` is set.
    pub gap: [Duration; 2],
    pub last_read: [Time; 2],
    pub error: Option<BondError>,
    /// Time of the test's next action, even if the world itself has nothing to do.
    pub wake: Option<Time>,
}

impl World {
    pub fn new(specs: &[Spec], seed: u64) -> Self {
        let now = Time::from_millis(1000);
        let limits = Limits::default();
        let mut world = Self {
            now,
            ends: [Bond::new(Side::Client, limits, now), Bond::new(Side::Server, limits, now)],
            wires: Vec::new(),
            events: [Vec::new(), Vec::new()],
            got: Default::default(),
            messages: Default::default(),
            gap: [Duration::ZERO; 2],
            last_read: [now; 2],
            error: None,
            wake: None,
        };
        for (at, spec) in specs.iter().enumerate() {
            let profile = Profile {
                rate: Rate::from_mbps(spec.mbps).into(),
                delay: Duration::from_millis(spec.delay_ms),
                loss: Loss::random(spec.loss),
                ..Profile::default()
            };
            let links = [0, 1].map(|side| EmulatedLink::new(profile.clone(), seed * 100 + at as u64 * 2 + side, now));
            let id = PathId(at as u32);
            world.wires.push(Wire { links, spec: *spec, id });
            let facts = world.facts(at, 0);
            for end in &mut world.ends {
                assert!(end.add_path(now, id, at as u8, facts));
            }
        }
        world
    }

    pub fn open(&mut self, policy: FlowPolicy, kind: FlowKind) -> FlowKey {
        let open = Open { kind, target: Target::Name("server".into(), 80), policy };
        self.ends[0].open(self.now, open).unwrap()
    }

    pub fn stream(&mut self) -> FlowKey {
        self.open(FlowPolicy::default(), FlowKind::Stream)
    }

    /// Makes a link dark, or ends it, with or without telling the bonds.
    pub fn set_dark(&mut self, wire: usize, dark: bool, told: bool) {
        let now = self.now;
        self.wires[wire].links.iter_mut().for_each(|link| link.set_dark(now, dark));
        if told {
            let id = self.wires[wire].id;
            self.ends[0].set_link(now, id, if dark { PathUpdate::Down } else { PathUpdate::Up });
        }
    }

    fn facts(&self, wire: usize, side: usize) -> PathFacts {
        let spec = self.wires[wire].spec;
        let rtt = Duration::from_millis(2 * spec.delay_ms);
        let rate = Rate::from_mbps(spec.mbps);
        let window = (rate.bps() / 8 * (rtt + Duration::from_millis(10)).as_millis() as u64 / 1000).max(12_000);
        let view = self.ends[side].paths().find(|(id, _)| *id == self.wires[wire].id).map(|(_, view)| view);
        let in_flight = view.map_or(0, |view| view.in_flight.get());
        PathFacts { rtt, rate, room: ByteCount::new(window.saturating_sub(in_flight)), window: ByteCount::new(window) }
    }

    /// Transfers everything that is due.
    fn settle(&mut self) {
        for side in 0..2 {
            for wire in 0..self.wires.len() {
                let facts = self.facts(wire, side);
                let (now, id) = (self.now, self.wires[wire].id);
                self.ends[side].set_facts(id, facts);
                let mut out = BytesMut::new();
                while self.ends[side].poll_datagram(now, id, MTU, &mut out) {
                    assert!(!out.is_empty() && out.len() <= MTU, "{} bytes", out.len());
                    // UDP, IP and QUIC headers are about this size.
                    let mut packet = out.split().to_vec();
                    packet.extend_from_slice(&[0; 60]);
                    let _: PushOutcome = self.wires[wire].links[side].push(now, packet);
                }
            }
            self.drain(side);
        }
    }

    fn drain(&mut self, side: usize) {
        while let Some(event) = self.ends[side].poll_event() {
            if let Event::Readable(flow) = event {
                let mut any = false;
                while let Some(data) = self.ends[side].read(self.now, flow, usize::MAX) {
                    any = true;
                    self.got[side].entry(flow).or_default().extend_from_slice(&data);
                }
                while let Some(message) = self.ends[side].read_message(flow) {
                    any = true;
                    self.messages[side].entry(flow).or_default().push(message);
                }
                if any {
                    self.gap[side] = self.gap[side].max(self.now.since(self.last_read[side]));
                    self.last_read[side] = self.now;
                }
            }
            self.events[side].push(event);
        }
    }

    /// Runs until `done` or for `limit`. Returns whether `done` was reached.
    pub fn run(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> bool {
        let end = self.now + limit;
        let mut spins = 0;
        loop {
            self.settle();
            if self.error.is_some() || done(self) {
                return self.error.is_none();
            }
            // `done` may have written data.
            self.settle();
            let timers = self.ends.iter().filter_map(Bond::poll_timeout);
            let wires = self.wires.iter().flat_map(|wire| &wire.links).filter_map(EmulatedLink::poll_timeout);
            let next = timers.chain(wires).chain(self.wake.take()).min().unwrap_or(end);
            // A due timer without an effect would cause an endless loop.
            spins = if next <= self.now { spins + 1 } else { 0 };
            assert!(spins < 1000, "a timer that was due at {:?} had no effect", self.now);
            let next = next.max(self.now);
            if next > end || self.now >= end {
                self.now = end;
                return false;
            }
            self.now = next;
            for wire in 0..self.wires.len() {
                for side in 0..2 {
                    while let Some(packet) = self.wires[wire].links[side].pop(self.now) {
                        let length = packet.len() - 60;
                        let data = Bytes::from(packet).slice(..length);
                        let (now, id) = (self.now, self.wires[wire].id);
                        if let Err(error) = self.ends[1 - side].receive(now, id, data) {
                            self.error = Some(error);
                        }
                    }
                }
            }
            let now = self.now;
            self.ends.iter_mut().filter(|end| end.poll_timeout().is_some_and(|due| due <= now)).for_each(|end| end.handle_timeout(now));
        }
    }

    /// Sends `size` bytes from `side`. Returns the time until the other end has read them all.
    pub fn transfer(&mut self, side: usize, flow: FlowKey, size: usize, limit: Duration) -> Option<Duration> {
        let data: Vec<u8> = pattern(flow, size);
        let start = self.now;
        let mut written = 0;
        self.last_read[1 - side] = start;
        self.gap = [Duration::ZERO; 2];
        let done = self.run(limit, |world| {
            let room = world.ends[side].writable(world.now, flow).min(size - written);
            if room > 0 {
                world.ends[side].write(flow, Bytes::copy_from_slice(&data[written..written + room]));
                written += room;
                if written == size {
                    world.ends[side].finish(world.now, flow);
                }
            }
            world.got[1 - side].get(&flow).map_or(0, Vec::len) >= size
        });
        assert!(self.got[1 - side].get(&flow).is_none_or(|got| *got == data[..got.len()]), "{flow} differs from the sent data");
        done.then(|| self.now.since(start))
    }
}

pub fn pattern(flow: FlowKey, size: usize) -> Vec<u8> {
    (0..size).map(|at| (at as u64 / 7 + flow.0 * 31 + (at as u64 % 251)) as u8).collect()
}
