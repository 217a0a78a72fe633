//! State shared between a controller and its bond.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use braid_model::{ByteCount, Rate};

/// From this pace on, in bytes per second, the bond's host paces instead of QUIC. QUIC's pacer catches up on at most two milliseconds, which is how
/// late timers fire, so on fast paths it would send less than the pace.
pub(super) const FAST: f64 = 12.5e6;

/// State that a path's controller publishes for its bond, plus the probe allowance that the bond sets.
///
/// QUIC's connection exposes neither its bytes in flight nor its pacing rate, and late binding needs both.
#[derive(Debug, Default)]
pub struct PathMetrics {
    in_flight: AtomicU64,
    window: AtomicU64,
    pacing: AtomicU64,
    delivery: AtomicU64,
    min_rtt: AtomicU64,
    queueing: AtomicU64,
    probe: AtomicU64,
}

impl PathMetrics {
    /// Bytes sent and neither acknowledged nor declared lost.
    pub fn in_flight(&self) -> ByteCount {
        ByteCount::new(self.in_flight.load(Ordering::Relaxed))
    }

    /// Congestion window.
    pub fn window(&self) -> ByteCount {
        ByteCount::new(self.window.load(Ordering::Relaxed))
    }

    /// Pacing rate; zero before the first sample.
    pub fn pacing(&self) -> Rate {
        rate(self.pacing.load(Ordering::Relaxed))
    }

    /// Whether the path is too fast for QUIC's pacer. QUIC then sends at once, and the host paces.
    pub fn is_fast(&self) -> bool {
        self.pacing.load(Ordering::Relaxed) as f64 >= FAST
    }

    /// Rate at which the path would deliver a continuous load, after random loss; zero before the first sample.
    ///
    /// A flow that sends little does not lower it, so it may be old. It never exceeds a measured rate, except during startup, where it is the rate of
    /// the current round trip's window.
    pub fn delivery_rate(&self) -> Rate {
        rate(self.delivery.load(Ordering::Relaxed))
    }

    /// Minimum round-trip time, without queues; `None` before the first sample.
    pub fn min_rtt(&self) -> Option<Duration> {
        match self.min_rtt.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        }
    }

    /// Minimum by which the latest packets took longer than [`min_rtt`](Self::min_rtt): the delay in the bottleneck's queue.
    pub fn queueing_delay(&self) -> Duration {
        Duration::from_nanos(self.queueing.load(Ordering::Relaxed))
    }

    /// Allows this many bytes beyond those in flight, so that a path whose window is full of lost packets can still be probed.
    pub fn allow_probe(&self, bytes: ByteCount) {
        self.probe.store(bytes.get(), Ordering::Relaxed);
    }

    pub(super) fn probe(&self) -> u64 {
        self.probe.load(Ordering::Relaxed)
    }

    /// Counts `bytes` sent beyond the window against the allowance.
    pub(super) fn use_probe(&self, bytes: u64) {
        self.probe.store(self.probe().saturating_sub(bytes), Ordering::Relaxed);
    }

    pub(super) fn set_in_flight(&self, bytes: u64) {
        self.in_flight.store(bytes, Ordering::Relaxed);
    }

    /// Publishes the state. Window in bytes, rates in bytes per second, times in seconds.
    pub(super) fn set(&self, window: u64, pacing: f64, delivery: f64, min_rtt: f64, queueing: f64) {
        self.window.store(window, Ordering::Relaxed);
        // `as` saturates, and maps NaN and negative numbers to zero.
        self.pacing.store(pacing as u64, Ordering::Relaxed);
        self.delivery.store(delivery as u64, Ordering::Relaxed);
        self.min_rtt.store((min_rtt * 1e9) as u64, Ordering::Relaxed);
        self.queueing.store((queueing * 1e9) as u64, Ordering::Relaxed);
    }
}

fn rate(bytes_per_second: u64) -> Rate {
    Rate::from_bps(bytes_per_second.saturating_mul(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_numbers_saturate() {
        let metrics = PathMetrics::default();
        metrics.set(u64::MAX, f64::INFINITY, f64::NAN, -1.0, 0.25);
        assert_eq!(metrics.pacing().bps(), u64::MAX);
        assert_eq!(metrics.delivery_rate(), Rate::ZERO);
        assert_eq!(metrics.min_rtt(), None);
        assert_eq!(metrics.queueing_delay(), Duration::from_millis(250));
    }

    #[test]
    fn a_probe_is_used_up() {
        let metrics = PathMetrics::default();
        metrics.allow_probe(ByteCount::new(2000));
        metrics.use_probe(1400);
        assert_eq!(metrics.probe(), 600);
        metrics.use_probe(1400);
        assert_eq!(metrics.probe(), 0);
    }
}
