//! Receive windows: how much the far end may have under way to a flow, so that it sends at the flow's target.
//!
//! A sender that is limited by the window sends one window per round trip. So the window is the target times the flow's round trip without a queue (its
//! *base*), times a trim. Flows of one link share its queue, so their rates keep the ratio of their targets while a queue drains, and the sum of the
//! windows bounds the queue. A window that followed the measured rate alone would also follow the queue.
//!
//! The trim corrects what the product misses: whole segments, delayed acknowledgements, a base that is out of date. It rises while the window limits the
//! flow and the flow is too slow. A longer round trip may be a longer path or a queue of these flows themselves, and only the effect of a larger window
//! distinguishes them: if round trips stay, the path is longer, and the bases take over the trim. If they grow with the windows, the trim goes back.
//!
//! If the rates fall as much as the round trips grow, the windows do not rise step by step: a *trial* takes the new round trips as the bases at once. BBR
//! keeps the rate of the last ten round trips only. After that it would not use larger windows until it measures the least round trip again, for up to 10 s.

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
/// A trial begins when round trips exceed the bases by this factor, and rates are below this share of the targets, in this many steps in a row.
const TRIAL: (f64, f64, u32) = (1.25, 0.85, 2);
/// Largest factor of a base in a trial.
const TRIAL_FACTOR: f64 = 3.0;
/// Round trips grow by this share of what the windows grew by: the windows have made a queue.
const TRIAL_QUEUE: f64 = 0.4;
/// Duration of a trial in round trips. In this time a larger window shows in the round trips.
const TRIAL_ROUND_TRIPS: f64 = 3.0;
/// Time for which windows that made a queue are not raised again.
const BLOCKED: Duration = Duration::from_secs(10);

/// A flow's receive window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    trim: f64,
    bytes: Option<f64>,
    in_effect: bool,
    /// The base before the present trial.
    before_trial: Option<f64>,
}

impl Default for Window {
    fn default() -> Self {
        Self { trim: 1.0, bytes: None, in_effect: false, before_trial: None }
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
    /// Steps in a row in which the path seemed longer.
    longer: u32,
    trial: Option<Trial>,
    blocked: Option<Time>,
}

#[derive(Debug, Clone, Copy)]
struct Trial {
    end: Time,
    /// The longest mean round trip that shows no queue.
    limit: f64,
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

    /// The base has become shorter by this factor. A trim that is larger than 1 corrected the former base.
    pub(super) fn on_shorter_base(&mut self, factor: f64) {
        self.trim = self.trim.min((self.trim * factor).max(1.0));
    }

    fn check_effect(&mut self, rate: f64, round_trip: f64) {
        self.in_effect = self.bytes.is_some_and(|bytes| IN_EFFECT.contains(&(rate * round_trip / (bytes * 8.0))));
    }

    /// A new trim from the flow's rate. `share`: steps since the last change. `draining`: the link's queue is becoming shorter.
    fn correct(&mut self, inputs: (f64, f64, f64, f64), share: f64, draining: bool) {
        let (base, target, rate, round_trip) = inputs;
        // A change takes a round trip to show.
        let share = share * (STEP.as_secs_f64() / round_trip).min(1.0);
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
            flow.window.check_effect(flow.rate, flow.round_trip);
        }
        if !self.try_longer(flows, now, draining) {
            for flow in flows.iter_mut() {
                flow.window.correct((*flow.base, flow.target, flow.rate, flow.round_trip), share, draining);
            }
            self.judge(flows, now);
        }
        for flow in flows {
            let ideal = flow.target / 8.0 * (*flow.base + EXTRA) + SEGMENT / 2.0;
            flow.window.bytes = Some((flow.window.trim * ideal).max(MIN_WINDOW));
        }
    }

    /// Begins or ends a trial. Returns whether one goes on.
    fn try_longer(&mut self, flows: &mut [Inputs<'_>], now: Time, draining: bool) -> bool {
        let round_trip = mean(flows, |flow| flow.round_trip);
        if let Some(Trial { end, limit }) = self.trial {
            if now < end {
                return true;
            }
            let made_queue = round_trip > limit;
            for flow in flows {
                let old = flow.window.before_trial.take().filter(|_| made_queue);
                *flow.base = flow.base.min(old.unwrap_or(f64::INFINITY));
            }
            self.blocked = made_queue.then(|| now + BLOCKED);
            (self.trial, self.reference) = (None, None);
            return false;
        }
        let limited = mean(flows, |flow| f64::from(u8::from(flow.window.in_effect))) > 0.5;
        let growth = mean(flows, |flow| flow.round_trip / *flow.base);
        let reached = mean(flows, |flow| flow.rate / flow.target);
        let seems_longer = limited && !draining && growth > TRIAL.0 && reached < TRIAL.1;
        self.longer = if seems_longer { self.longer + 1 } else { 0 };
        if self.longer < TRIAL.2 || self.is_blocked(now) {
            return false;
        }
        self.longer = 0;
        let end = now + Duration::from_secs_f64(TRIAL_ROUND_TRIPS * round_trip);
        self.trial = Some(Trial { end, limit: round_trip * (1.0 + TRIAL_QUEUE * (growth.min(TRIAL_FACTOR) - 1.0)) });
        for flow in flows.iter_mut().filter(|flow| flow.window.in_effect) {
            flow.window.before_trial = Some(*flow.base);
            *flow.base *= (flow.round_trip / *flow.base).clamp(1.0, TRIAL_FACTOR);
        }
        true
    }

    fn is_blocked(&self, now: Time) -> bool {
        self.blocked.is_some_and(|until| now < until)
    }

    /// Keeps larger trims only if they do not make a queue.
    fn judge(&mut self, flows: &mut [Inputs<'_>], now: Time) {
        let (trim, round_trip) = (mean(flows, |flow| flow.window.trim), mean(flows, |flow| flow.round_trip));
        let Some((count, before, round_trip_before)) = self.reference.filter(|(count, ..)| *count == flows.len()) else {
            self.reference = Some((flows.len(), trim, round_trip));
            return;
        };
        if trim < JUDGED.0 * before {
            self.reference = Some((count, trim.min(before), round_trip));
            return;
        }
        if self.is_blocked(now) {
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

/// Mean over the flows, weighted by their targets.
fn mean(flows: &[Inputs<'_>], value: impl Fn(&Inputs<'_>) -> f64) -> f64 {
    let weight: f64 = flows.iter().map(|flow| flow.target).sum();
    flows.iter().map(|flow| value(flow) * flow.target).sum::<f64>() / weight.max(1.0)
}

fn scale(flows: &mut [Inputs<'_>], factor: f64) {
    for flow in flows {
        flow.window.trim *= factor;
    }
}
