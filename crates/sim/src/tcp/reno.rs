//! Reno (RFC 5681): the window grows by one segment per round trip and halves after a loss.

use super::Window;

/// Stateless: Reno depends on the window only.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reno;

impl Reno {
    /// Grows the window for `acked` segments in congestion avoidance.
    pub(crate) fn on_ack(window: &mut Window, acked: f64) {
        window.size += acked / window.size;
    }

    /// The window after a loss.
    pub(crate) fn reduced(window: &Window) -> f64 {
        window.size / 2.0
    }
}
