//! A world in virtual time: QUIC connections that share one bottleneck of two emulated links.
//!
//! Runs with the same flows, links and seed are identical, except for values that TLS draws at random (keys, connection IDs). These change no sizes
//! and no times.

#![allow(dead_code, reason = "tests and examples use different parts")]

mod flow;
mod tls;
mod traces;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use braid_model::{ByteCount, Rate, Time};
use braid_netem::{EmulatedLink, Packet, Profile, PushOutcome, RateSource};

pub(crate) use flow::{Controllers, SimFlow, Source};
#[allow(unused_imports, reason = "tests and examples use different parts")]
pub(crate) use traces::cellular;

/// Bytes that IP and UDP add to each packet.
const HEADERS: u64 = 28;

/// A packet on a link.
#[derive(Debug)]
pub(crate) struct Parcel {
    flow: usize,
    pushed: Time,
    data: Vec<u8>,
}

impl Packet for Parcel {
    fn size(&self) -> ByteCount {
        ByteCount::new(self.data.len() as u64 + HEADERS)
    }
}

/// Flows from senders to receivers through one bottleneck.
pub(crate) struct World {
    base: Instant,
    now: Time,
    seed: u64,
    forward: EmulatedLink<Parcel>,
    back: EmulatedLink<Parcel>,
    /// Acknowledgements wait until the next multiple of this time, as on a radio that grants uplink slots periodically.
    pub(crate) hold: Duration,
    held: VecDeque<(Time, Parcel)>,
    flows: Vec<SimFlow>,
    waits: Vec<Wait>,
    offered: BTreeMap<usize, (u64, u64)>,
}

/// Queueing delay of a packet at the bottleneck.
#[derive(Debug, Clone, Copy)]
struct Wait {
    at: Time,
    flow: usize,
    wait: Duration,
}

impl World {
    /// Creates a bottleneck with `forward` for the data, and a fast link of the same delay for the acknowledgements.
    pub(crate) fn new(forward: Profile, seed: u64) -> Self {
        let back = Profile { rate: RateSource::Unlimited, delay: forward.delay, ..Profile::default() };
        #[expect(clippy::disallowed_methods, reason = "all times are offsets from an arbitrary instant")]
        let base = Instant::now();
        Self {
            base,
            now: Time::ZERO,
            seed,
            forward: EmulatedLink::new(forward, seed, Time::ZERO),
            back: EmulatedLink::new(back, seed ^ 0x5555, Time::ZERO),
            hold: Duration::ZERO,
            held: VecDeque::new(),
            flows: Vec::new(),
            waits: Vec::new(),
            offered: BTreeMap::new(),
        }
    }

    /// Adds a flow that starts at `start`. Returns its number.
    pub(crate) fn add(&mut self, controllers: &Controllers, source: Source, start: Time) -> usize {
        let number = self.flows.len();
        self.flows.push(SimFlow::new(controllers, source, start, self.seed.wrapping_add(number as u64)));
        number
    }

    /// The flow with this number.
    pub(crate) fn flow(&mut self, number: usize) -> &mut SimFlow {
        &mut self.flows[number]
    }

    /// Changes the data link, and the delay of the acknowledgements with it.
    pub(crate) fn configure(&mut self, forward: Profile) {
        let back = Profile { delay: forward.delay, ..self.back.profile().clone() };
        self.back.configure(self.now, back);
        self.forward.configure(self.now, forward);
    }

    /// Makes both directions dark, or ends it.
    pub(crate) fn set_dark(&mut self, dark: bool) {
        self.forward.set_dark(self.now, dark);
        self.back.set_dark(self.now, dark);
    }

    /// Runs the world until `end`.
    pub(crate) fn run_until(&mut self, end: Time) {
        loop {
            self.deliver();
            for number in 0..self.flows.len() {
                self.drive(number);
            }
            let next = self.next().max(self.now);
            if next > end {
                self.now = end;
                return;
            }
            self.now = next;
        }
    }

    /// Rate at which flow `number` delivered data to its receiver's application from `from` to `to`, in bits per second.
    pub(crate) fn goodput(&self, number: usize, from: Time, to: Time) -> f64 {
        self.flows[number].received_between(from, to) as f64 * 8.0 / to.since(from).as_secs_f64()
    }

    /// The same for all flows together.
    pub(crate) fn total(&self, from: Time, to: Time) -> f64 {
        (0..self.flows.len()).map(|number| self.goodput(number, from, to)).sum()
    }

    /// Quantile (0 to 1) of the queueing delays of packets that arrived from `from` to `to`, of flow `number` or of all flows (`None`).
    pub(crate) fn wait(&self, number: Option<usize>, quantile: f64, from: Time, to: Time) -> Duration {
        let wanted = |w: &&Wait| w.at >= from && w.at < to && number.is_none_or(|n| n == w.flow);
        let mut waits: Vec<Duration> = self.waits.iter().filter(wanted).map(|w| w.wait).collect();
        waits.sort_unstable();
        let last = waits.len().saturating_sub(1);
        waits.get((last as f64 * quantile) as usize).copied().unwrap_or_default()
    }

    /// Fraction of flow `number`'s packets that were dropped because the queue was full.
    pub(crate) fn overrun(&self, number: usize) -> f64 {
        let (offered, dropped) = self.offered.get(&number).copied().unwrap_or_default();
        dropped as f64 / offered.max(1) as f64
    }

    fn next(&self) -> Time {
        let links = [self.forward.poll_timeout(), self.back.poll_timeout(), self.held.front().map(|(due, _)| *due)];
        let flows = self.flows.iter().filter_map(|flow| flow.next(self.base));
        links.into_iter().flatten().chain(flows).min().unwrap_or(Time::MAX)
    }

    fn deliver(&mut self) {
        while let Some(parcel) = self.forward.pop(self.now) {
            let profile = self.forward.profile();
            let sending = match &profile.rate {
                RateSource::Constant(rate) if rate.bps() > 0 => rate.time_for(parcel.size()),
                _ => Duration::ZERO,
            };
            let wait = self.now.since(parcel.pushed).saturating_sub(profile.delay + sending);
            self.waits.push(Wait { at: self.now, flow: parcel.flow, wait });
            let at = self.base + Duration::from_nanos(self.now.as_nanos());
            self.flows[parcel.flow].receiver.take(at, parcel.data);
        }
        while let Some(parcel) = self.back.pop(self.now) {
            let step = (self.hold.as_nanos() as u64).max(1);
            let due = Time::from_nanos(self.now.as_nanos().div_ceil(step) * step);
            self.held.push_back((due, parcel));
        }
        while self.held.front().is_some_and(|(due, _)| *due <= self.now) {
            let Some((_, parcel)) = self.held.pop_front() else { break };
            let at = self.base + Duration::from_nanos(self.now.as_nanos());
            self.flows[parcel.flow].sender.take(at, parcel.data);
        }
    }

    fn drive(&mut self, number: usize) {
        let flow = &mut self.flows[number];
        if !flow.is_due(self.base, self.now) {
            return;
        }
        let (data, acks) = flow.drive(self.base, self.now);
        for data in data {
            let parcel = Parcel { flow: number, pushed: self.now, data };
            let full = self.forward.push(self.now, parcel) == PushOutcome::QueueFull;
            let count = self.offered.entry(number).or_default();
            count.0 += 1;
            count.1 += u64::from(full);
        }
        for data in acks {
            self.back.push(self.now, Parcel { flow: number, pushed: self.now, data });
        }
    }
}

/// A bottleneck of `mbps` with a round trip of `rtt` and a buffer of `buffer` bytes.
pub(crate) fn bottleneck(mbps: f64, rtt: Duration, buffer: u64) -> Profile {
    let rate = Rate::from_bps((mbps * 1e6) as u64);
    Profile { rate: rate.into(), delay: rtt / 2, queue: ByteCount::new(buffer), ..Profile::default() }
}

/// `factor` bandwidth-delay products in bytes.
pub(crate) fn bdp(mbps: f64, rtt: Duration, factor: f64) -> u64 {
    (mbps * 1e6 / 8.0 * rtt.as_secs_f64() * factor) as u64
}
