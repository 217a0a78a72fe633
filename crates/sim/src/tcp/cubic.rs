//! CUBIC (RFC 9438). It uses [`cbrt`](crate::math::cbrt), so that results are the same on every machine.

use std::time::Duration;

use braid_model::Time;

use super::Window;
use crate::math::cbrt;

/// Growth constant in segments per cubic second (section 5).
const C: f64 = 0.4;
/// Multiplicative decrease factor after a loss (section 4.6).
const BETA: f64 = 0.7;
/// Additive increase in segments per round trip that matches Reno for this `BETA` (section 4.3).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

#[derive(Debug, Clone, Default)]
pub(crate) struct Cubic {
    /// Window before the last loss, reduced by fast convergence.
    most: f64,
    epoch: Option<Epoch>,
}

/// A period of congestion avoidance without loss.
#[derive(Debug, Clone)]
struct Epoch {
    start: Time,
    /// K: seconds until the window is back at the plateau.
    k: f64,
    /// Window at the plateau of the curve.
    origin: f64,
    /// Estimate of Reno's window.
    estimate: f64,
    /// Window before the loss. Above it, the Reno estimate grows at Reno's rate.
    prior: f64,
}

impl Cubic {
    /// Grows the window for `acked` segments in congestion avoidance (sections 4.2 to 4.5).
    pub(crate) fn on_ack(&mut self, window: &mut Window, acked: f64, now: Time, round_trip: Duration) {
        let most = self.most;
        let epoch = self.epoch.get_or_insert_with(|| {
            let behind = (most - window.size).max(0.0);
            Epoch { start: now, k: cbrt(behind / C), origin: most.max(window.size), estimate: window.size, prior: most }
        });
        let alpha = if epoch.estimate < epoch.prior { ALPHA } else { 1.0 };
        epoch.estimate += alpha * acked / window.size;
        let elapsed = now.since(epoch.start).as_secs_f64();
        if epoch.at(elapsed) < epoch.estimate {
            window.size = window.size.max(epoch.estimate);
            return;
        }
        let target = epoch.at(elapsed + round_trip.as_secs_f64()).clamp(window.size, 1.5 * window.size);
        window.size += (target - window.size) / window.size * acked;
    }

    /// Records that the window was not used. The curve restarts when the window is used again.
    pub(crate) fn on_unused(&mut self) {
        self.epoch = None;
    }

    /// Records a loss and returns the window after it (sections 4.6, 4.7).
    pub(crate) fn reduced(&mut self, window: &Window) -> f64 {
        self.most = if window.size < self.most { window.size * (1.0 + BETA) / 2.0 } else { window.size };
        self.epoch = None;
        window.size * BETA
    }
}

impl Epoch {
    fn at(&self, seconds: f64) -> f64 {
        let t = seconds - self.k;
        self.origin + C * t * t * t
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_reaches_the_plateau_after_k_seconds_and_then_grows() {
        // A window of 1,000 loses 300: K = cbrt(300 / 0.4) = 9.09 s.
        let mut cubic = Cubic::default();
        let mut window = Window { size: 1000.0, threshold: f64::INFINITY };
        window.size = cubic.reduced(&window);
        assert_eq!(window.size, 700.0);
        let round = Duration::from_millis(100);
        let mut sizes = Vec::new();
        for step in 0..130u64 {
            let acked = window.size;
            cubic.on_ack(&mut window, acked, Time::from_millis(step * 100), round);
            sizes.push(window.size);
        }
        assert!((sizes[90] - 1000.0).abs() < 1.0, "{}", sizes[90]);
        assert!(sizes[20] - sizes[10] > 10.0 * (sizes[90] - sizes[80]), "steep first, then flat");
        let wanted = 1000.0 + 0.4 * (12.0f64 - 9.086).powi(3);
        assert!((sizes[119] - wanted).abs() < 1.5, "{} not {wanted}", sizes[119]);
    }

    #[test]
    fn a_small_window_grows_like_reno() {
        let mut cubic = Cubic::default();
        let mut window = Window { size: 10.0, threshold: f64::INFINITY };
        window.size = cubic.reduced(&window);
        let round = Duration::from_millis(10);
        for step in 0..50u64 {
            let acked = window.size;
            cubic.on_ack(&mut window, acked, Time::from_millis(step * 10), round);
        }
        // From 7 to 10 at 0.529 a round trip, then 1 a round trip: about 7 + 6 * 0.529 + 44.
        assert!((window.size - 54.0).abs() < 2.0, "{}", window.size);
    }

    #[test]
    fn a_second_loss_below_the_first_triggers_fast_convergence() {
        let mut cubic = Cubic::default();
        cubic.reduced(&Window { size: 100.0, threshold: 0.0 });
        cubic.reduced(&Window { size: 80.0, threshold: 0.0 });
        assert_eq!(cubic.most, 68.0);
    }
}
