//! Workload: classes of flows, their arrivals and sizes.

use std::time::Duration;

use braid_model::{ByteCount, Direction, LinkSet, Time};
use braid_netem::Random;

use crate::math;

/// Flows of one kind, as one application opens them. Each flow sends a request to its server, receives a response and closes.
#[derive(Debug, Clone, PartialEq)]
pub struct Class {
    /// Name of the class.
    pub name: String,
    /// Start times of the flows.
    pub arrivals: Arrivals,
    /// Bytes that a flow moves in its main direction.
    pub size: Size,
    /// Main direction: down for a download, which has a small request; up for an upload, which has a small response.
    pub direction: Direction,
    /// Bytes that a flow moves in the other direction.
    pub other: ByteCount,
    /// Index of its server.
    pub server: usize,
    /// The client that opens the flows. Clients share the links, but each has its own estimates of loads and capacities.
    pub client: usize,
    /// The links it may use (Π); `None` allows all.
    pub links: Option<LinkSet>,
    /// Overrides the expected bytes of a flow, regardless of the scheduler's knowledge.
    pub expected: Option<ByteCount>,
}

impl Class {
    /// Downloads from the first server over any link, with requests of 300 bytes.
    pub fn downloads(name: &str, arrivals: Arrivals, size: Size) -> Self {
        Self {
            name: name.to_owned(),
            arrivals,
            size,
            direction: Direction::Down,
            other: ByteCount::new(300),
            server: 0,
            client: 0,
            links: None,
            expected: None,
        }
    }

    /// Uploads to the first server over any link, with responses of 300 bytes.
    pub fn uploads(name: &str, arrivals: Arrivals, size: Size) -> Self {
        Self { direction: Direction::Up, ..Self::downloads(name, arrivals, size) }
    }
}

/// Start times of the flows of a class.
#[derive(Debug, Clone, PartialEq)]
pub enum Arrivals {
    /// A Poisson process.
    Poisson {
        /// Mean number of flows per second.
        per_second: f64,
    },
    /// These times, in ascending order.
    At(Vec<Time>),
}

impl Arrivals {
    /// One flow at time zero.
    pub fn once() -> Self {
        Self::At(vec![Time::ZERO])
    }
}

/// Bytes that flows of a class move in their main direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Size {
    /// The same size for all flows.
    Fixed(ByteCount),
    /// Exponentially distributed sizes with this mean, at least one byte.
    Exponential(ByteCount),
    /// These sizes in order, repeated from the start.
    Listed(Vec<ByteCount>),
    /// Flows that last until the end of the simulation.
    Endless,
}

impl Size {
    /// Maximum size of a flow, because segments are numbered with 32 bits.
    pub const MAX: ByteCount = ByteCount::new(5_000_000_000_000);
}

/// Draws the flows of a class.
#[derive(Debug)]
pub(crate) struct Generator {
    random: Random,
    count: usize,
    at: Time,
}

impl Generator {
    pub(crate) fn new(seed: u64) -> Self {
        Self { random: Random::new(seed), count: 0, at: Time::ZERO }
    }

    /// Start time of the next flow, if there is one.
    pub(crate) fn next_start(&mut self, class: &Class) -> Option<Time> {
        match &class.arrivals {
            Arrivals::Poisson { per_second } if *per_second > 0.0 => {
                let gap = math::exponential(&mut self.random, 1e9 / per_second);
                self.at = self.at + Duration::from_nanos(gap as u64);
                Some(self.at)
            }
            Arrivals::Poisson { .. } => None,
            Arrivals::At(times) => times.get(self.count).copied(),
        }
    }

    /// Size of the flow that starts now.
    pub(crate) fn next_size(&mut self, class: &Class) -> ByteCount {
        let count = self.count;
        self.count += 1;
        match &class.size {
            Size::Fixed(size) => *size,
            Size::Exponential(mean) => {
                let drawn = math::exponential(&mut self.random, mean.get() as f64);
                ByteCount::new((drawn as u64).max(1)).min(Size::MAX)
            }
            Size::Listed(sizes) => sizes[count % sizes.len()],
            Size::Endless => Size::MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poisson_process_has_its_rate_and_a_list_keeps_its_times() {
        let class = Class::downloads("web", Arrivals::Poisson { per_second: 13.0 }, Size::Exponential(ByteCount::new(22_380)));
        let mut generator = Generator::new(5);
        let mut total = 0;
        let mut last = Time::ZERO;
        for _ in 0..20_000 {
            last = generator.next_start(&class).unwrap();
            total += generator.next_size(&class).get();
        }
        let rate = 20_000.0 / (last.as_nanos() as f64 / 1e9);
        assert!((rate - 13.0).abs() < 0.3, "{rate}");
        assert!((total as f64 / 20_000.0 - 22_380.0).abs() < 500.0, "{total}");

        let sizes = Size::Listed(vec![ByteCount::new(1), ByteCount::new(2)]);
        let class = Class::downloads("list", Arrivals::At((1..4).map(Time::from_millis).collect()), sizes);
        let mut generator = Generator::new(5);
        let mut flows = Vec::new();
        while let Some(at) = generator.next_start(&class) {
            flows.push((at.as_nanos() / 1_000_000, generator.next_size(&class).get()));
        }
        assert_eq!(flows, [(1, 1), (2, 2), (3, 1)]);
    }
}
