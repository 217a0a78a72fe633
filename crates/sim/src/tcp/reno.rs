//! Reno (RFC 5681): one segment more per round trip, half after a loss.

use super::Window;

/// Its state is the window alone.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reno;

impl Reno {
    /// `acked` segments were acknowledged in congestion avoidance.
    pub(crate) fn on_ack(window: &mut Window, acked: f64) {
        window.size += acked / window.size;
    }

    /// The window after a loss.
    pub(crate) fn reduced(window: &Window) -> f64 {
        window.size / 2.0
    }
}
