//! Hosts with an ad-hoc device each, in virtual time: the daemon's own code ([`braid_control::adhoc`]) over lossy radios.
//!
//! Radio p of every host is on segment p, where all hosts reach each other. A frame arrives after the segment's delay, or is lost. Frames of programs are pings: the
//! model sends each over the radio with the largest share of the plan, as a flow that keeps its radio, and notes what the programs in the kernel would note.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_api::AdhocChange;
use braid_control::adhoc::fake::FakeRadios;
use braid_control::adhoc::{Adhoc, AdhocSettings};
use braid_decide::adhoc::pair::Counted;
use braid_model::{LinkFacts, LinkIndex, LinkKind, Mac, Time};
use braid_netem::Random;

/// A segment: what the radios in one place have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Segment {
    /// One-way delay.
    pub(crate) delay: Duration,
    /// Share of frames that are lost, in thousandths.
    pub(crate) loss: u64,
}

/// What happens next.
#[derive(Debug)]
enum Event {
    /// A frame of Braid arrives at a host over a radio.
    Frame { host: usize, radio: usize, bytes: Vec<u8> },
    /// A frame of a program arrives.
    Ping { host: usize, radio: usize, from: usize, number: u64, is_reply: bool },
}

struct Host {
    device: Adhoc<FakeRadios>,
    radios: Vec<LinkFacts>,
    next: Time,
    /// Numbers of answered pings.
    answered: BTreeSet<u64>,
}

impl Host {
    /// Counts a frame of a pair, as the programs in the kernel do.
    fn count(&mut self, other: usize, radio: usize, change: impl FnOnce(&mut Counted)) {
        let backend = self.device.backend();
        if backend.pairs.contains(&(mac(other), radio)) {
            change(backend.counted.entry((mac(other), radio)).or_default());
        }
    }
}

/// The network.
pub(crate) struct AdhocWorld {
    now: Time,
    hosts: Vec<Host>,
    segments: Vec<Segment>,
    /// Radios that deliver nothing although they have carrier.
    silent: BTreeSet<(usize, usize)>,
    events: BTreeMap<(Time, u64), Event>,
    /// Number of events so far.
    count: u64,
    dice: Random,
}

fn mac(host: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, host as u8 + 1])
}

impl AdhocWorld {
    /// `hosts` hosts with a radio on each segment; `change`: the settings of each device besides its radios `r0`, `r1`, ...
    pub(crate) fn new(hosts: usize, segments: &[Segment], change: &AdhocChange, seed: u64) -> Self {
        let mut dice = Random::new(seed);
        let add = (0..segments.len()).map(|radio| format!("r{radio}")).collect();
        let change = AdhocChange { add, ..change.clone() };
        let settings = AdhocSettings::default().changed(&change).unwrap_or_default();
        let host = |number: usize| {
            let facts = |radio: usize| LinkFacts {
                mac: Some(Mac([2, 0, 0, 1, radio as u8, number as u8])),
                carrier: true,
                ..LinkFacts::new(LinkIndex(radio as u32 + 2), format!("r{radio}"), LinkKind::Wired)
            };
            let radios: Vec<LinkFacts> = (0..segments.len()).map(facts).collect();
            let mut device = Adhoc::new(FakeRadios::default(), settings.clone(), mac(number), dice.next(), dice.next());
            device.on_devices(&radios);
            // Hosts do not start at the same time.
            let next = Time::ZERO + Duration::from_nanos(dice.up_to(1_000_000_000));
            Host { device, radios, next, answered: BTreeSet::new() }
        };
        let hosts = (0..hosts).map(host).collect();
        Self { now: Time::ZERO, hosts, segments: segments.to_vec(), silent: BTreeSet::new(), events: BTreeMap::new(), count: 0, dice }
    }

    /// The present.
    #[cfg(test)]
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Gives a radio carrier, or takes it away. The host sees it at its next tick.
    pub(crate) fn set_carrier(&mut self, host: usize, radio: usize, carrier: bool) {
        let host = &mut self.hosts[host];
        host.radios[radio].carrier = carrier;
        host.device.on_devices(&host.radios);
    }

    /// Makes a radio deliver nothing, in both directions.
    pub(crate) fn silence(&mut self, host: usize, radio: usize) {
        self.silent.insert((host, radio));
    }

    /// The radio over which a host's flow to another one leaves; `None`: it does not reach it.
    pub(crate) fn radio(&mut self, from: usize, to: usize) -> Option<usize> {
        let plan = *self.hosts[from].device.backend().plans.get(&mac(to))?;
        let best = plan.shares.iter().copied().max().filter(|share| *share > 0)?;
        plan.shares.iter().position(|share| *share == best)
    }

    /// Sends a ping with this number.
    pub(crate) fn ping(&mut self, from: usize, to: usize, number: u64) {
        self.send_ping(from, to, number, false);
    }

    /// Whether it was answered.
    pub(crate) fn is_answered(&self, from: usize, number: u64) -> bool {
        self.hosts[from].answered.contains(&number)
    }

    fn send_ping(&mut self, from: usize, to: usize, number: u64, is_reply: bool) {
        let Some(radio) = self.radio(from, to) else { return };
        let now = self.now;
        self.hosts[from].count(to, radio, |counted| counted.sent = now);
        if self.passes(from, to, radio) {
            self.schedule(radio, Event::Ping { host: to, radio, from, number, is_reply });
        }
    }

    fn passes(&mut self, from: usize, to: usize, radio: usize) -> bool {
        let works = |host: usize| self.hosts[host].radios[radio].carrier && !self.silent.contains(&(host, radio));
        works(from) && works(to) && self.dice.up_to(999) >= self.segments[radio].loss
    }

    fn schedule(&mut self, radio: usize, event: Event) {
        self.count += 1;
        self.events.insert((self.now + self.segments[radio].delay, self.count), event);
    }

    /// Lets time pass until `end`.
    pub(crate) fn run_until(&mut self, end: Time) {
        loop {
            let event = self.events.first_key_value().map(|((at, _), _)| *at);
            let tick = self.hosts.iter().map(|host| host.next).min();
            let Some(next) = event.into_iter().chain(tick).min().filter(|next| *next <= end) else { break };
            self.now = self.now.max(next);
            match self.events.pop_first() {
                Some(((at, _), event)) if at <= next => self.happen(event),
                later => self.events.extend(later),
            }
            for host in 0..self.hosts.len() {
                if self.hosts[host].next <= self.now {
                    let now = self.now;
                    let due = self.hosts[host].device.tick(now);
                    self.hosts[host].next = due.unwrap_or(now + Duration::from_millis(500));
                }
                self.flush(host);
            }
        }
        self.now = self.now.max(end);
    }

    fn happen(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Frame { host, radio, bytes } => self.hosts[host].device.on_frame(now, radio, &bytes),
            Event::Ping { host, radio, from, number, is_reply } => {
                self.hosts[host].count(from, radio, |counted| counted.heard = now);
                if is_reply {
                    self.hosts[host].answered.insert(number);
                } else {
                    self.send_ping(host, from, number, true);
                }
            }
        }
    }

    /// Puts the frames that a host has sent on the air.
    fn flush(&mut self, host: usize) {
        for (radio, bytes) in std::mem::take(&mut self.hosts[host].device.backend().sent) {
            for other in (0..self.hosts.len()).filter(|other| *other != host) {
                let for_all = bytes[0] & 1 == 1;
                if (for_all || bytes[..6] == mac(other).0) && self.passes(host, other, radio) {
                    self.schedule(radio, Event::Frame { host: other, radio, bytes: bytes.clone() });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn two(loss: u64, seed: u64) -> AdhocWorld {
        let segment = Segment { delay: Duration::from_millis(2), loss };
        let mut world = AdhocWorld::new(2, &[segment; 2], &AdhocChange::default(), seed);
        world.run_until(Time::ZERO + SECOND * 5);
        world
    }

    /// The longest time without an answer in milliseconds, by pings each 10 ms for 3 s.
    fn gap(world: &mut AdhocWorld, mut at_start: impl FnMut(&mut AdhocWorld)) -> u64 {
        let begin = world.now();
        for number in 0..300 {
            if number == 100 {
                at_start(world);
            }
            world.ping(0, 1, number);
            world.run_until(begin + Duration::from_millis(10) * (number as u32 + 1));
        }
        let mut longest = (0, 0);
        for number in 0..300 {
            let run = if world.is_answered(0, number) { 0 } else { longest.1 + 1 };
            longest = (longest.0.max(run), run);
        }
        longest.0 * 10
    }

    #[test]
    fn hosts_find_each_other_over_all_radios_whatever_is_lost() {
        for (loss, seed) in [(0, 1), (50, 2), (200, 3)] {
            let mut world = two(loss, seed);
            let plan = world.hosts[0].device.backend().plans[&mac(1)];
            assert!(plan.shares[0] > 0 && plan.shares[1] > 0, "{loss}: {plan:?}");
        }
    }

    #[test]
    fn a_radio_that_fails_is_left_within_half_a_second() {
        for seed in 0..20 {
            let mut world = two(50, seed);
            let silent = gap(&mut world, |world| {
                let used = world.radio(0, 1).unwrap();
                world.silence(1, used);
            });
            let mut world = two(50, seed);
            let detached = gap(&mut world, |world| {
                let used = world.radio(0, 1).unwrap();
                world.set_carrier(0, used, false);
            });
            assert!(silent < 500 && detached <= 100, "seed {seed}: {silent} and {detached} ms");
        }
    }
}
