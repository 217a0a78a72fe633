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
/// Smallest receive window, in bytes: two segments without options. With less, the sender sends one, whose acknowledgement is delayed.
const MIN_WINDOW: f64 = 2.0 * 1460.0;
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
/// A trial begins when the round trip exceeds the base by this factor, and the rate is below this share of the target, in this many steps in a row.
const TRIAL: (f64, f64, u32) = (1.25, 0.85, 2);
/// The kernel's RTT follows a longer path within some steps. A round trip that exceeds that of the step before by this factor still rises.
const RISING: f64 = 1.05;
/// Largest factor of a base in a trial.
const TRIAL_FACTOR: f64 = 3.0;
/// Duration of a trial in round trips, and the longest one. In this time a larger window shows in the round trip.
const TRIAL_ROUND_TRIPS: f64 = 3.0;
const TRIAL_LONGEST: Duration = Duration::from_millis(1500);
/// The round trip grows by this share of what the window grew by: the windows have made a queue.
const TRIAL_QUEUE: f64 = 0.4;
/// A flow whose round trip exceeds the base by less than this factor waits in no queue, so that a trial may begin again.
const NO_QUEUE: f64 = 1.1;
/// Time for which windows that made a queue are not raised again, unless the flow waits in no queue any more.
const BLOCKED: Duration = Duration::from_secs(10);

/// A flow's receive window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    trim: f64,
    bytes: Option<f64>,
    in_effect: bool,
    /// Round trip at the last step, in seconds.
    round_trip: f64,
    /// Steps in a row in which the path seemed longer.
    longer: u32,
    trial: Option<Trial>,
    /// No trial begins before this time.
    blocked: Time,
}

impl Default for Window {
    fn default() -> Self {
        Self { trim: 1.0, bytes: None, in_effect: false, round_trip: 0.0, longer: 0, trial: None, blocked: Time::default() }
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

/// A window for a longer round trip, until it has shown whether it makes a queue.
#[derive(Debug, Clone, Copy)]
struct Trial {
    end: Time,
    /// The longest round trip that shows no queue.
    limit: f64,
    /// The base before.
    base: f64,
}

impl Inputs<'_> {
    /// Begins or ends a trial of this flow. Each flow has its own: a server determines the round trips of its flows. Returns whether one goes on.
    fn is_in_trial(&mut self, now: Time, draining: bool) -> bool {
        if let Some(Trial { end, limit, base }) = self.window.trial {
            if now < end {
                return true;
            }
            self.window.trial = None;
            if self.round_trip > limit {
                *self.base = self.base.min(base);
                self.window.blocked = now + BLOCKED;
            }
            return false;
        }
        let growth = self.round_trip / *self.base;
        // A trial that began too early would see the rest of the rise as a queue of its own.
        let rises = self.round_trip > RISING * std::mem::replace(&mut self.window.round_trip, self.round_trip);
        if growth < NO_QUEUE {
            self.window.blocked = Time::default();
        }
        let seems_longer = self.window.in_effect && !draining && !rises && growth > TRIAL.0 && self.rate < TRIAL.1 * self.target;
        self.window.longer = if seems_longer { self.window.longer + 1 } else { 0 };
        if self.window.longer < TRIAL.2 || now < self.window.blocked {
            return false;
        }
        let growth = growth.min(TRIAL_FACTOR);
        let end = now + Duration::from_secs_f64(TRIAL_ROUND_TRIPS * self.round_trip).min(TRIAL_LONGEST);
        self.window.trial = Some(Trial { end, limit: self.round_trip * (1.0 + TRIAL_QUEUE * (growth - 1.0)), base: *self.base });
        self.window.longer = 0;
        *self.base *= growth;
        true
    }
}

impl Window {
    /// The flow has no target any more. Returns its base without a trial.
    pub(super) fn end(&mut self, base: Option<f64>) -> Option<f64> {
        let window = std::mem::take(self);
        base.map(|base| window.trial.map_or(base, |trial| base.min(trial.base)))
    }

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
            // Without new counters there is nothing new to learn.
            if share > 0.0 && !flow.is_in_trial(now, draining) {
                flow.window.correct((*flow.base, flow.target, flow.rate, flow.round_trip), share, draining);
            }
        }
        self.judge(flows, now);
        for flow in flows {
            let ideal = flow.target / 8.0 * (*flow.base + EXTRA) + SEGMENT / 2.0;
            flow.window.bytes = Some((flow.window.trim * ideal).max(MIN_WINDOW));
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A trial that began while the smoothed round trip still rose saw the rest of the rise as a queue of its own, and blocked the next one for 10 s.
    #[test]
    fn regression_a_trial_waits_until_the_round_trip_has_risen() {
        let (target, mut base) = (6.4e6, 0.06);
        let mut window = Window { in_effect: true, round_trip: base, ..Window::default() };
        let mut trials = Vec::new();
        for (step, round_trip) in [0.076, 0.092, 0.104, 0.112, 0.116, 0.118, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12].into_iter().enumerate() {
            let now = Time::from_millis(1000 + 100 * step as u64);
            let mut inputs = Inputs { window: &mut window, base: &mut base, target, rate: target / 2.0, round_trip };
            trials.push(inputs.is_in_trial(now, false));
        }
        assert!(!trials[3] && trials[5], "{trials:?}");
        assert!(base > 0.11 && window.blocked == Time::default(), "the base is {base} s");
    }
}
