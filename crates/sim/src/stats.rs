//! Results of a simulation.

use std::time::Duration;

use braid_model::{ByteCount, Direction, Joules, PerDirection, Rate, Time, Traffic};
use serde::Serialize;

/// Results of a simulation. Pairs are indexed by [`Direction`]: down, up. Goodput is payload that arrived for the first time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Seed of the scenario.
    pub seed: u64,
    /// Simulated time in nanoseconds: the duration, plus the part of the grace period that flows needed.
    pub ran_ns: u64,
    /// Duration of the scenario in nanoseconds.
    pub duration_ns: u64,
    /// Width of the time bins in nanoseconds. The last bin may be shorter.
    pub bin_ns: u64,
    /// Results per link, in the order of the scenario.
    pub links: Vec<LinkOutcome>,
    /// Results per flow, in the order of their starts.
    pub flows: Vec<FlowOutcome>,
    /// Battery level at the end of each bin, 0 to 1.
    pub battery: Vec<f64>,
    /// Counters of the simulation.
    pub counters: Counters,
}

/// Results of one link.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkOutcome {
    /// Name of the link.
    pub name: String,
    /// Payload that arrived for the first time.
    pub goodput: Traffic,
    /// Goodput in each time bin.
    pub goodput_bins: Vec<Traffic>,
    /// Bytes that arrived at its far end, including headers and retransmissions.
    pub carried: Traffic,
    /// Packets lost at random, in a full queue, or while the link was dark.
    pub dropped: PerDirection<u64>,
    /// Number of streams assigned to it, connection- and packet-oriented.
    pub flows: u64,
    /// Time in which it transmitted or received, in nanoseconds.
    pub busy_ns: u64,
    /// Busy time in each time bin, in nanoseconds.
    pub busy_bins_ns: Vec<u64>,
    /// Energy of the active state in addition to the idle energy: OPERETTA's `a_j t_j`.
    pub energy: Joules,
    /// Energy if it had been idle all the time.
    pub idle_energy: Joules,
}

/// Results of one flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FlowOutcome {
    /// Index of its class in the scenario.
    pub class: usize,
    /// Start time.
    pub start: Time,
    /// Time at which the client had all data; `None` if that did not happen.
    pub end: Option<Time>,
    /// Size of the flow; 5 TB for endless flows.
    pub size: ByteCount,
    /// Bytes that it moved.
    pub moved: Traffic,
    /// Its link; `None` if it was spread over links, or refused.
    pub link: Option<usize>,
    /// Whether it was refused because no link was available.
    pub refused: bool,
}

/// Counters of a simulation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Events processed.
    pub events: u64,
    /// Packets sent by clients and servers.
    pub packets: u64,
    /// Data segments among these packets.
    pub segments: u64,
    /// Data segments that were retransmitted.
    pub repeated: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
}

impl FlowOutcome {
    /// Duration of the flow, if it ended.
    pub fn took(&self) -> Option<Duration> {
        self.end.map(|end| end.since(self.start))
    }
}

impl Outcome {
    /// Goodput of all links and both directions, over the simulated time.
    pub fn goodput(&self) -> Rate {
        self.moved().per(Duration::from_nanos(self.ran_ns))
    }

    /// Goodput of one direction over the whole bins between `from` and `to`; zero if there are none.
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

    /// Energy of the links' active state in addition to the idle energy.
    pub fn energy(&self) -> Joules {
        self.links.iter().map(|link| link.energy).sum()
    }

    /// Joules per bit of payload (OPERETTA figs. 3b to 9b); zero if nothing moved.
    pub fn energy_per_bit(&self) -> f64 {
        let bits = self.moved().get() as f64 * 8.0;
        if bits > 0.0 { self.energy().get() / bits } else { 0.0 }
    }

    /// Summary of the results.
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

    /// Flows of a class that ended, in the order of their starts.
    pub fn ended(&self, class: usize) -> impl Iterator<Item = &FlowOutcome> {
        self.flows.iter().filter(move |flow| flow.class == class && flow.end.is_some())
    }

    /// Mean duration of the flows of a class that ended.
    pub fn mean_time(&self, class: usize) -> Option<Duration> {
        let (count, total) =
            self.ended(class).filter_map(FlowOutcome::took).fold((0u32, Duration::ZERO), |(n, sum), took| (n + 1, sum + took));
        total.checked_div(count)
    }
}

/// Summary of an [`Outcome`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Goodput of all links and both directions, in bits per second.
    pub goodput_bps: u64,
    /// Goodput per link, in bits per second.
    pub link_goodput_bps: Vec<u64>,
    /// Each link's share of the payload, 0 to 1; zeros if nothing moved.
    pub link_share: Vec<f64>,
    /// Energy of the links' active state in addition to the idle energy, in joules.
    pub energy_j: f64,
    /// Joules per bit of payload.
    pub energy_per_bit_j: f64,
    /// Flows that started, by class.
    pub started: Vec<u64>,
    /// Flows that ended, by class.
    pub ended: Vec<u64>,
    /// Mean duration of the flows that ended, by class, in nanoseconds.
    pub mean_time_ns: Vec<Option<u64>>,
}

/// Counters of one link, collected per time bin.
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

    /// Closes the current bin. `busy` is the total busy time of the link so far.
    pub(crate) fn close(&mut self, busy: Duration) {
        self.bins.push(std::mem::take(&mut self.current));
        let before: u64 = self.busy.iter().sum();
        self.busy.push(busy.as_nanos() as u64 - before);
    }
}
