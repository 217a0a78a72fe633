//! Whether somebody else holds the bottleneck's queue, and which share of it is ours.

use std::time::{Duration, Instant};

use super::flight::Round;

/// How long a queue must have been short until the rival counts as gone.
const GONE: Duration = Duration::from_secs(10);

/// Which part of the capacity is held against a rival.
const SHARE: f64 = 0.5;

/// A queue that should be empty and is not: somebody else fills it, or the path has become longer.
#[derive(Debug, Clone)]
pub(super) struct Rival {
    /// Seen at all.
    present: bool,
    /// What the path can carry, in bytes a second, as far as it was seen lately.
    capacity: f64,
    capacity_at: Instant,
    /// The queue is being emptied: its delay at the beginning, the round trip then, and how much should have gone since, in seconds.
    drain: Option<(f64, f64, f64)>,
    short_since: Instant,
    outrun: u32,
}

/// What a queue that did not go means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Verdict {
    /// Nothing yet.
    Open,
    /// The path's round trip is longer than it was: this many seconds.
    Longer(f64),
}

impl Rival {
    pub(super) fn new(now: Instant) -> Self {
        Self { present: false, capacity: 0.0, capacity_at: now, drain: None, short_since: now, outrun: 0 }
    }

    pub(super) fn is_present(&self) -> bool {
        self.present
    }

    /// The rate below which the rival's queue does not push us, in bytes a second delivered.
    pub(super) fn share(&self) -> f64 {
        if self.present { self.capacity * SHARE } else { 0.0 }
    }

    /// Forgets all, as after a dark time.
    pub(super) fn reset(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Judges a round in which packets waited at least `queue` seconds of a round trip of `rtt`; more than `most` is a standing queue.
    /// We sent `sent` bytes a second.
    pub(super) fn round(&mut self, now: Instant, round: Round, rtt: f64, queue: f64, most: f64, sent: f64) -> Verdict {
        if round.rate > self.capacity || (!self.present && now.saturating_duration_since(self.capacity_at) > Duration::from_secs(30)) {
            self.capacity = round.rate;
            self.capacity_at = now;
        }
        if queue <= most {
            self.drain = None;
            self.outrun = 0;
            if now.saturating_duration_since(self.short_since) > GONE {
                self.present = false;
            }
            return Verdict::Open;
        }
        self.short_since = now;
        if self.present {
            self.hold(now, round);
        }
        let (first, first_rtt, gone) = self.drain.unwrap_or((queue, rtt, 0.0));
        let gone = gone + (1.0 - sent / round.rate.max(1.0)).max(0.0) * round.span;
        self.drain = Some((first.max(queue), first_rtt, gone));
        if gone < 1.5 * first.max(queue) {
            return Verdict::Open;
        }
        self.drain = None;
        if (rtt - first_rtt).abs() < 0.05 * queue.min(gone) {
            return Verdict::Longer(rtt);
        }
        self.present = true;
        Verdict::Open
    }

    /// Gives up the share when it is delivered no longer: then the path itself has become slower.
    fn hold(&mut self, now: Instant, round: Round) {
        if round.rate > 0.8 * self.share() {
            self.outrun = 0;
            return;
        }
        self.outrun += 1;
        if self.outrun >= 4 {
            self.outrun = 0;
            self.capacity = round.rate;
            self.capacity_at = now;
        }
    }
}
