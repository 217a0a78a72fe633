//! The congestion controller of a path, and what a bond reads from it.

use std::sync::atomic::{AtomicU64, Ordering};

use braid_model::{Bytes, Rate};

/// What a path's controller tells its bond, and the one thing a bond tells the controller; shared between the two.
///
/// QUIC's connection does not show its bytes in flight nor its pacing rate, and late binding needs both.
#[derive(Debug, Default)]
pub struct Gauge {
    in_flight: AtomicU64,
    window: AtomicU64,
    pacing: AtomicU64,
    probe: AtomicU64,
}

impl Gauge {
    /// Bytes sent and neither acknowledged nor given up.
    pub fn in_flight(&self) -> Bytes {
        Bytes::new(self.in_flight.load(Ordering::Relaxed))
    }

    /// The congestion window.
    pub fn window(&self) -> Bytes {
        Bytes::new(self.window.load(Ordering::Relaxed))
    }

    /// The rate at which packets may leave; zero before the first sample.
    pub fn pacing(&self) -> Rate {
        Rate::from_bps(self.pacing.load(Ordering::Relaxed).saturating_mul(8))
    }

    /// Admits this many bytes beyond the window, so that a path whose window is full of what was lost can still be probed.
    pub fn allow_probe(&self, bytes: Bytes) {
        self.probe.store(bytes.get(), Ordering::Relaxed);
    }
}
