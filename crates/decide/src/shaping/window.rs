//! Receive windows: how much the far end may have under way to a flow, so that it sends at the flow's target.
//!
//! A sender that is limited by the window sends one window per round trip. So the window is the target times the flow's round trip without a queue (its
//! *base*), times a trim. Flows of one link share its queue, so their rates keep the ratio of their targets while a queue drains, and the sum of the
//! windows bounds the queue. A window that followed the measured rate alone would also follow the queue.
//!
//! The trim corrects what the product misses: whole segments, delayed acknowledgements, a base that is out of date. It rises while the window limits the
//! flow and the flow is too slow. A longer round trip may be a longer path or a queue of these flows themselves, and only the effect of a larger window
//! distinguishes them: if round trips stay, the path is longer, and the bases take over the trim. If they grow with the windows, the trim goes back.

use std::time::Duration;

use braid_model::Time;

use super::STEP;

/// Payload of a full segment, in bytes.
const SEGMENT: f64 = 1448.0;
/// Smallest receive window, in bytes. A smaller one stalls the sender.
const MIN_WINDOW: f64 = 2.0 * SEGMENT;
/// Time that a segment spends in addition to the base: acknowledgements wait for a second segment. In seconds.
const EXTRA: f64 = 0.001;
/// Bounds of the trim; the upper one is multiplied by what the round trip now exceeds the base by.
const TRIM: (f64, f64) = (0.7, 1.5);
/// Largest change of the trim in one step, up and down.
const UP: f64 = 0.04;
const DOWN: f64 = 0.08;
/// The window takes effect if the measured rate is between these shares of one window per round trip: below, the sender is limited by something else;
/// above, data of an earlier window is still under way.
const IN_EFFECT: std::ops::RangeInclusive<f64> = 0.75..=1.3;
/// The round trip before counts until the trim is larger by the first factor, the one after from the second one on: it may be longer by the third one.
const JUDGED: (f64, f64, f64) = (1.08, 1.25, 1.07);
/// Time for which a trim that made a queue is not raised again.
const BLOCKED: Duration = Duration::from_secs(10);

/// A flow's receive window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    trim: f64,
    bytes: Option<f64>,
    in_effect: bool,
}

impl Default for Window {
    fn default() -> Self {
        Self { trim: 1.0, bytes: None, in_effect: false }
    }
}

/// What the window of a flow depends on. Rates in bits per second, times in seconds.
pub(super) struct Inputs<'a> {
    pub(super) window: &'a mut Window,
    pub(super) base: &'a mut f64,
    pub(super) target: f64,
    pub(super) rate: f64,
    pub(super) round_trip: f64,
}

/// The state of the trims of one link's flows.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Trims {
    /// Number of flows, mean trim and mean round trip when the trims began to rise.
    reference: Option<(usize, f64, f64)>,
    blocked: Option<Time>,
}

impl Window {
    /// In bytes.
    pub(super) fn bytes(&self) -> Option<u64> {
        self.bytes.map(|bytes| bytes as u64)
    }

    /// Whether the window limits the flow, and nothing else does.
    pub(super) fn is_in_effect(&self) -> bool {
        self.in_effect
    }

    /// A new trim from the flow's rate. `share`: steps since the last change. `draining`: the link's queue is becoming shorter.
    fn correct(&mut self, inputs: (f64, f64, f64, f64), share: f64, draining: bool) {
        let (base, target, rate, round_trip) = inputs;
        let Some(bytes) = self.bytes else { return };
        // A change takes a round trip to show.
        let share = share * (STEP.as_secs_f64() / round_trip).min(1.0);
        self.in_effect = IN_EFFECT.contains(&(rate * round_trip / (bytes * 8.0)));
        if self.in_effect {
            if rate < 0.97 * target {
                self.trim *= 1.0 + share * (0.25 * (target / rate - 1.0)).min(UP);
            } else if rate > 1.03 * target && !draining {
                self.trim *= 1.0 - share * (0.25 * (1.0 - target / rate)).min(DOWN);
            }
        }
        self.trim = self.trim.clamp(TRIM.0, TRIM.1 * (round_trip / base).max(1.0));
    }
}

impl Trims {
    /// Sets the windows of the flows of a link that have a target. `share`: steps since the last call.
    pub(super) fn set(&mut self, flows: &mut [Inputs<'_>], now: Time, share: f64, draining: bool) {
        for flow in flows.iter_mut() {
            flow.window.correct((*flow.base, flow.target, flow.rate, flow.round_trip), share, draining);
        }
        self.judge(flows, now);
        for flow in flows {
            let ideal = flow.target / 8.0 * (*flow.base + EXTRA) + SEGMENT / 2.0;
            flow.window.bytes = Some((flow.window.trim * ideal).max(MIN_WINDOW));
        }
    }

    /// Keeps larger trims only if they do not make a queue.
    fn judge(&mut self, flows: &mut [Inputs<'_>], now: Time) {
        let mean = |value: &dyn Fn(&Inputs<'_>) -> f64| {
            let weight: f64 = flows.iter().map(|flow| flow.target).sum();
            flows.iter().map(|flow| value(flow) * flow.target).sum::<f64>() / weight.max(1.0)
        };
        let (trim, round_trip) = (mean(&|flow| flow.window.trim), mean(&|flow| flow.round_trip));
        let Some((count, before, round_trip_before)) = self.reference.filter(|(count, ..)| *count == flows.len()) else {
            self.reference = Some((flows.len(), trim, round_trip));
            return;
        };
        if trim < JUDGED.0 * before {
            self.reference = Some((count, trim.min(before), round_trip));
            return;
        }
        if self.blocked.is_some_and(|until| now < until) {
            return scale(flows, before / trim);
        }
        if trim < JUDGED.1 * before {
            return;
        }
        self.reference = None;
        if round_trip > JUDGED.2 * round_trip_before {
            self.blocked = Some(now + BLOCKED);
            return scale(flows, before / trim);
        }
        for flow in flows.iter_mut().filter(|flow| flow.window.trim > 1.0) {
            let longer = flow.window.trim.min(flow.round_trip / *flow.base).max(1.0);
            *flow.base *= longer;
            flow.window.trim /= longer;
        }
    }
}

fn scale(flows: &mut [Inputs<'_>], factor: f64) {
    for flow in flows {
        flow.window.trim *= factor;
    }
}
