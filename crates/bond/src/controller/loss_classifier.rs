//! Distinguishes losses in a full buffer from random losses.

use std::collections::VecDeque;

use super::filters::WindowedMax;

/// Number of remembered round-trip samples.
const MEMORY: usize = 512;

/// Classifies a loss by the queueing delay of the packet before it (Cen, Cosman and Voelker, "End-to-end differentiation of congestion and wireless
/// losses", IEEE/ACM Transactions on Networking 2003: the Spike scheme).
#[derive(Debug, Clone)]
pub(super) struct LossClassifier {
    /// Packet numbers and round-trip times in seconds, by number.
    trips: VecDeque<(u64, f64)>,
    /// Maximum round-trip times of the latest rounds, in seconds.
    longest: WindowedMax<16>,
    lost: f64,
}

impl LossClassifier {
    pub(super) fn new() -> Self {
        Self { trips: VecDeque::new(), longest: WindowedMax::new(), lost: 0.0 }
    }

    pub(super) fn acknowledge(&mut self, number: u64, rtt: f64) {
        self.longest.raise(rtt);
        if self.trips.back().is_some_and(|last| last.0 >= number) {
            return;
        }
        if self.trips.len() >= MEMORY {
            self.trips.pop_front();
        }
        self.trips.push_back((number, rtt));
    }

    /// Maximum round-trip time of the latest rounds, in seconds.
    pub(super) fn longest(&self) -> f64 {
        self.longest.get()
    }

    /// Counts a loss. Returns whether the queue was long then: at least 0.7 of its recent maximum, and at least `least` seconds.
    pub(super) fn lose(&mut self, number: u64, bytes: f64, min_rtt: f64, least: f64) -> bool {
        let place = self.trips.partition_point(|trip| trip.0 < number);
        let Some(trip) = place.checked_sub(1).and_then(|place| self.trips.get(place)) else { return false };
        let congested = trip.1 - min_rtt >= least.max(0.7 * (self.longest.get() - min_rtt));
        if congested {
            self.lost += bytes;
        }
        congested
    }

    /// Ends a round. Returns the bytes that were lost in it while the queue was long.
    pub(super) fn round(&mut self) -> f64 {
        self.longest.add(0.0);
        std::mem::take(&mut self.lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_counts_only_when_the_queue_was_long() {
        let mut losses = LossClassifier::new();
        assert!(!losses.lose(1, 1000.0, 0.020, 0.002), "there is no sample yet");
        for (number, rtt) in [(1, 0.020), (2, 0.028), (3, 0.030), (7, 0.021)] {
            losses.acknowledge(number, rtt);
        }
        assert!(losses.lose(4, 1000.0, 0.020, 0.002));
        assert!(losses.lose(3, 1000.0, 0.020, 0.002));
        assert!(!losses.lose(8, 1000.0, 0.020, 0.002));
        assert!(!losses.lose(4, 1000.0, 0.020, 0.050));
        assert_eq!(losses.round(), 2000.0);
        assert_eq!(losses.round(), 0.0);
    }
}
