//! What came of a scenario.

use std::time::Duration;

use braid_model::{ByteCount, Direction, Joules, PerDirection, Rate, Time, Traffic};
use serde::Serialize;

/// What came of a scenario. Pairs are by [`Direction`]: down, up. Goodput is payload that arrived for the first time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// The scenario's seed.
    pub seed: u64,
    /// How long it ran, in nanoseconds: the duration and as much of the grace as flows needed.
    pub ran_ns: u64,
    /// The scenario's duration in nanoseconds.
    pub duration_ns: u64,
    /// Width of the bins in nanoseconds; the last one may be cut short.
    pub bin_ns: u64,
    /// By link, in the scenario's order.
    pub links: Vec<LinkOutcome>,
    /// By flow, in the order they started.
    pub flows: Vec<FlowOutcome>,
    /// How full the battery was at the end of each bin, 0 to 1.
    pub battery: Vec<f64>,
    /// What it took.
    pub counters: Counters,
}

/// What one link did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkOutcome {
    /// Its name.
    pub name: String,
    /// Payload that arrived for the first time.
    pub goodput: Traffic,
    /// The same in each bin of time.
    pub goodput_bins: Vec<Traffic>,
    /// All that arrived at its far end, headers and repetitions included.
    pub carried: Traffic,
    /// Packets lost at random, by a full queue, or in the dark.
    pub dropped: PerDirection<u64>,
    /// Connection- and packet-oriented streams that were given to it.
    pub flows: u64,
    /// How long it transmitted or received, in nanoseconds.
    pub busy_ns: u64,
    /// The same in each bin of time.
    pub busy_bins_ns: Vec<u64>,
    /// What being active took beyond being idle: OPERETTA's `a_j t_j`.
    pub energy: Joules,
    /// What it would have taken idle all the time.
    pub idle_energy: Joules,
}

/// What came of one flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FlowOutcome {
    /// Its class, by its place in the scenario.
    pub class: usize,
    /// When it started.
    pub start: Time,
    /// When its client had everything, if that came to be.
    pub end: Option<Time>,
    /// What it was to move; endless flows 5 TB.
    pub size: ByteCount,
    /// What it moved.
    pub moved: Traffic,
    /// Its link; `None` for one that was spread, or refused.
    pub link: Option<usize>,
    /// No link could be had for it.
    pub refused: bool,
}

/// What a simulation took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Events handled.
    pub events: u64,
    /// Packets sent by clients and servers.
    pub packets: u64,
    /// Data segments among them.
    pub segments: u64,
    /// Data segments that were sent again.
    pub repeated: u64,
    /// Retransmission timers that ran out.
    pub timeouts: u64,
}

impl FlowOutcome {
    /// How long it took, if it ended.
    pub fn took(&self) -> Option<Duration> {
        self.end.map(|end| end.since(self.start))
    }
}

impl Outcome {
    /// Goodput of all links and both directions, over the scenario's duration and the grace it used.
    pub fn goodput(&self) -> Rate {
        self.moved().per(Duration::from_nanos(self.ran_ns))
    }

    /// Goodput of one direction from `from` to `to`, by whole bins within; zero if there are none.
    pub fn goodput_between(&self, direction: Direction, from: Time, to: Time) -> Rate {
        let bins = from.as_nanos().div_ceil(self.bin_ns)..to.as_nanos() / self.bin_ns;
        let within = |link: &LinkOutcome| {
            let moved = link.goodput_bins.iter().enumerate().filter(|(index, _)| bins.contains(&(*index as u64)));
            moved.map(|(_, moved)| moved[direction].get()).sum::<u64>()
        };
        let moved = self.links.iter().map(within).sum();
        ByteCount::new(moved).per(Duration::from_nanos(bins.end.saturating_sub(bins.start).saturating_mul(self.bin_ns)))
    }

    /// Payload that arrived, over all links and both directions.
    pub fn moved(&self) -> ByteCount {
        self.links.iter().fold(Traffic::default(), |sum, link| sum + link.goodput).sum()
    }

    /// What the links' activity took beyond being idle.
    pub fn energy(&self) -> Joules {
        self.links.iter().map(|link| link.energy).sum()
    }

    /// Joules per bit of payload (OPERETTA figs. 3b to 9b); zero if nothing moved.
    pub fn energy_per_bit(&self) -> f64 {
        let bits = self.moved().get() as f64 * 8.0;
        if bits > 0.0 { self.energy().get() / bits } else { 0.0 }
    }

    /// The outcome in few numbers.
    pub fn summary(&self) -> Summary {
        let span = Duration::from_nanos(self.ran_ns);
        let moved: Vec<ByteCount> = self.links.iter().map(|link| link.goodput.sum()).collect();
        let all = self.moved().get().max(1) as f64;
        let classes = self.flows.iter().map(|flow| flow.class + 1).max().unwrap_or(0);
        let count =
            |class, ended: bool| self.flows.iter().filter(|flow| flow.class == class && (flow.end.is_some() || !ended)).count() as u64;
        Summary {
            goodput_bps: self.goodput().bps(),
            link_goodput_bps: moved.iter().map(|moved| moved.per(span).bps()).collect(),
            link_share: moved.iter().map(|moved| moved.get() as f64 / all).collect(),
            energy_j: self.energy().get(),
            energy_per_bit_j: self.energy_per_bit(),
            started: (0..classes).map(|class| count(class, false)).collect(),
            ended: (0..classes).map(|class| count(class, true)).collect(),
            mean_time_ns: (0..classes).map(|class| self.mean_time(class).map(|mean| mean.as_nanos() as u64)).collect(),
        }
    }

    /// Flows of a class that ended, in the order they started.
    pub fn ended(&self, class: usize) -> impl Iterator<Item = &FlowOutcome> {
        self.flows.iter().filter(move |flow| flow.class == class && flow.end.is_some())
    }

    /// The mean time that flows of a class took, of those that ended.
    pub fn mean_time(&self, class: usize) -> Option<Duration> {
        let (count, total) =
            self.ended(class).filter_map(FlowOutcome::took).fold((0u32, Duration::ZERO), |(n, sum), took| (n + 1, sum + took));
        total.checked_div(count)
    }
}

/// An outcome in few numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Goodput of all links and both directions, in bits per second.
    pub goodput_bps: u64,
    /// The same by link.
    pub link_goodput_bps: Vec<u64>,
    /// Each link's share of the payload, 0 to 1; zeros if nothing moved.
    pub link_share: Vec<f64>,
    /// What the links' activity took beyond being idle, in joules.
    pub energy_j: f64,
    /// Joules per bit of payload.
    pub energy_per_bit_j: f64,
    /// Flows that started, by class.
    pub started: Vec<u64>,
    /// Flows that ended, by class.
    pub ended: Vec<u64>,
    /// The mean time that those took, by class, in nanoseconds.
    pub mean_time_ns: Vec<Option<u64>>,
}

/// Bins of time that fill up.
#[derive(Debug, Default)]
pub(crate) struct LinkBins {
    pub(crate) goodput: Traffic,
    pub(crate) bins: Vec<Traffic>,
    pub(crate) carried: Traffic,
    pub(crate) flows: u64,
    pub(crate) busy: Vec<u64>,
    current: Traffic,
}

impl LinkBins {
    pub(crate) fn on_goodput(&mut self, direction: Direction, amount: ByteCount) {
        self.goodput[direction] += amount;
        self.current[direction] += amount;
    }

    /// A bin ends, by which the link was busy for `busy` in all.
    pub(crate) fn close(&mut self, busy: Duration) {
        self.bins.push(std::mem::take(&mut self.current));
        let before: u64 = self.busy.iter().sum();
        self.busy.push(busy.as_nanos() as u64 - before);
    }
}
