//! Expected size of a flow, learned from earlier flows.

use std::time::Duration;

use braid_model::{ByteCount, Direction, Time};

use crate::capacity::decayed;

/// Half-life of the confidence.
const HALF_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Expected bytes of an application's flows to one port (DBAS eq. 1), by direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Demand {
    /// Expected bytes towards this machine.
    pub down: ByteCount,
    /// Expected bytes away from this machine.
    pub up: ByteCount,
    /// Number of flows learned from.
    pub count: u64,
    /// Time at which the last of these flows ended.
    pub updated: Time,
}

impl Demand {
    /// Learns from a flow that ended. The first flow sets the estimate. A flow that moved nothing is ignored.
    ///
    /// The BPF program uses the same arithmetic (`learn_step` in `ebpf/flow.h`).
    pub fn learn(&mut self, down: ByteCount, up: ByteCount, now: Time) {
        if down + up == ByteCount::ZERO {
            return;
        }
        if self.count == 0 {
            (self.down, self.up) = (down, up);
        } else {
            self.down = step(self.down, down);
            self.up = step(self.up, up);
        }
        self.count = self.count.saturating_add(1);
        self.updated = now;
    }

    /// Expected bytes of a future flow in both directions.
    pub fn total(&self) -> ByteCount {
        self.down + self.up
    }

    /// Direction of most of the expected bytes.
    pub fn direction(&self) -> Direction {
        if self.up > self.down { Direction::Up } else { Direction::Down }
    }

    /// Confidence, 0 to 1: it rises with the number of flows and falls with the time since the last one.
    pub fn confidence(&self, now: Time) -> f64 {
        let count = self.count as f64;
        count / (count + 4.0) * decayed(now.since(self.updated), HALF_LIFE)
    }
}

/// DBAS eq. 1 with a = 1/8 in whole bytes: `C - C/8 + CC/8`, each eighth rounded down. For a constant sequence the estimate converges to within 8
/// bytes.
pub fn step(estimate: ByteCount, sample: ByteCount) -> ByteCount {
    ByteCount::new(estimate.get() - (estimate.get() >> 3)) + ByteCount::new(sample.get() >> 3)
}

/// Expected remaining bytes of an active flow: `max(C - moved, moved)`, so that a flow which exceeds its estimate still counts as load.
pub fn remaining(expected: ByteCount, moved: ByteCount) -> ByteCount {
    expected.saturating_sub(moved).max(moved)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_flow_sets_the_estimate_and_the_next_moves_it_by_an_eighth() {
        let mut demand = Demand::default();
        demand.learn(ByteCount::new(8000), ByteCount::new(80), Time::ZERO);
        assert_eq!((demand.down, demand.up), (ByteCount::new(8000), ByteCount::new(80)));
        demand.learn(ByteCount::new(16_000), ByteCount::new(80), Time::ZERO);
        assert_eq!(demand.down, ByteCount::new(9000));
        assert_eq!((demand.count, demand.direction()), (2, Direction::Down));
    }

    #[test]
    fn a_failed_connection_is_ignored() {
        let mut demand = Demand::default();
        demand.learn(ByteCount::ZERO, ByteCount::ZERO, Time::ZERO);
        assert_eq!(demand, Demand::default());
    }

    #[test]
    fn a_flow_that_exceeds_its_estimate_still_counts() {
        let bytes = ByteCount::new;
        assert_eq!(remaining(bytes(100), bytes(0)), bytes(100));
        assert_eq!(remaining(bytes(100), bytes(30)), bytes(70));
        assert_eq!(remaining(bytes(100), bytes(500)), bytes(500));
    }

    #[test]
    fn confidence_grows_with_flows_and_decays_with_time() {
        let mut demand = Demand::default();
        assert_eq!(demand.confidence(Time::ZERO), 0.0);
        for _ in 0..12 {
            demand.learn(ByteCount::new(1), ByteCount::ZERO, Time::ZERO);
        }
        assert_eq!(demand.confidence(Time::ZERO), 0.75);
        assert!(demand.confidence(Time::ZERO + HALF_LIFE) < 0.38);
    }

    proptest! {
        #[test]
        fn a_constant_sequence_converges_within_eight_bytes(start in any::<u64>(), value in any::<u64>()) {
            let mut estimate = ByteCount::new(start);
            for _ in 0..600 {
                estimate = step(estimate, ByteCount::new(value));
            }
            prop_assert!(estimate.get().abs_diff(value) <= 8, "{} for {value}", estimate.get());
        }
    }
}
