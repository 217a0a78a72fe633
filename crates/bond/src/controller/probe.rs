//! Measures a bottleneck's capacity while cross traffic keeps its queue filled.

use std::time::Instant;

/// A short burst above our usual rate.
///
/// A queue of constant length drains as fast as all senders together fill it. Bytes beyond our usual rate lengthen the queue by that amount, and the
/// round-trip time by bytes / capacity, as long as the other senders have not reacted.
#[derive(Debug, Clone)]
pub(super) struct Burst {
    first: u64,
    last: u64,
    begun: Instant,
    /// Our usual rate, in bytes per second.
    rate: f64,
    bytes: f64,
    excess: f64,
    /// Minimum round-trip times of the packets just before the burst and at its end, in seconds; infinite until known.
    before: f64,
    after: f64,
    lost: bool,
}

impl Burst {
    pub(super) fn new(now: Instant, first: u64, rate: f64) -> Self {
        let (before, after) = (f64::INFINITY, f64::INFINITY);
        Self { first, last: first, begun: now, rate, bytes: 0.0, excess: 0.0, before, after, lost: false }
    }

    /// Counts a packet of the burst. Returns the bytes beyond the usual rate so far.
    pub(super) fn send(&mut self, now: Instant, number: u64, bytes: f64) -> f64 {
        self.last = number;
        self.bytes += bytes;
        self.excess = self.bytes - self.rate * now.saturating_duration_since(self.begun).as_secs_f64();
        self.excess
    }

    /// Bytes beyond the usual rate.
    pub(super) fn excess(&self) -> f64 {
        self.excess
    }

    /// Processes a round-trip sample. Returns whether the burst is over.
    pub(super) fn acknowledge(&mut self, number: u64, rtt: f64) -> bool {
        // Minimum of several samples, since the acknowledgement of an odd packet may have been delayed (RFC 9000, section 13.2.1).
        if number <= self.first && number + 4 > self.first {
            self.before = self.before.min(rtt);
        }
        if number + 1 >= self.last && number <= self.last + 2 {
            self.after = self.after.min(rtt);
        }
        number >= self.last + 2
    }

    pub(super) fn lose(&mut self, number: u64) {
        self.lost |= number >= self.first && number <= self.last + 2;
    }

    /// Whether the burst overflowed the buffer.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Estimated capacity in bytes per second; `None` if the burst gave no valid estimate.
    pub(super) fn capacity(&self) -> Option<f64> {
        let longer = self.after - self.before;
        let told = longer.is_finite() && longer > 0.001 && self.excess > 0.0 && !self.lost;
        told.then(|| self.excess / longer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any instant does")]
    fn the_delay_that_a_burst_adds_gives_the_capacity() {
        let start = Instant::now();
        let mut burst = Burst::new(start, 10, 500_000.0);
        for step in 0..11 {
            burst.send(start + Duration::from_millis(step), 10 + step, 2000.0);
        }
        assert!(!burst.acknowledge(10, 0.100));
        assert!(!burst.acknowledge(18, 0.114));
        assert!(!burst.acknowledge(20, 0.117));
        assert!(burst.acknowledge(22, 0.142));
        assert!((burst.capacity().unwrap() - 1_000_000.0).abs() < 1.0);
        burst.lose(15);
        assert_eq!(burst.capacity(), None);
    }
}
