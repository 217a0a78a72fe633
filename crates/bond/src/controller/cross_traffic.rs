//! Whether somebody else holds the bottleneck's queue, and which share of it is ours.

use std::time::{Duration, Instant};

use super::flight::Round;

/// How long a queue must have been short until the rival counts as gone.
const GONE: Duration = Duration::from_secs(10);

/// How slowly the capacity is forgotten, in seconds.
const FORGET: f64 = 30.0;

/// Alone we empty the queue at least once in so many rounds: a probing cycle and a half.
const NEVER_EMPTY: u32 = 12;

/// More loss than this in a full buffer means that the capacity is thought too great: it is then lowered by a hundredth a round.
const OVERRUN: f64 = 0.04;

/// A capacity that was delivered over an empty queue for so many rounds is known well.
const TRUSTED: u32 = 20;

/// Which part of the capacity is held against a rival.
const SHARE: f64 = 0.46;

/// A queue that should be empty and is not: somebody else fills it, or the path has become longer.
#[derive(Debug, Clone)]
pub(super) struct CrossTraffic {
    /// Seen at all.
    present: bool,
    /// What the path can carry, in bytes a second, as far as it was seen lately.
    capacity: f64,
    drain: Option<Drain>,
    standing_at: Instant,
    /// For how many rounds the queue has not been empty.
    full_rounds: u32,
    outrun: u32,
    /// Measurements of the capacity since it was seen, and the latest three of them.
    bursts: u32,
    measured: [f64; 3],
    /// For how many rounds the capacity was delivered over an empty queue, less those with a queue.
    trust: u32,
    /// Which part is lost in a full buffer, over about sixteen rounds.
    full_loss: f64,
    /// Bytes a second sent in the round before.
    sent: f64,
}

/// A queue that is being emptied.
#[derive(Debug, Clone, Copy)]
struct Drain {
    /// The longest delay, and the round trip at the beginning.
    queue: f64,
    rtt: f64,
    /// What was delivered then, in bytes a second.
    rate: f64,
    /// How much should have gone by now, and by the next round, since what is sent shows a round later.
    gone: f64,
    going: f64,
    rounds: u32,
}

/// What a queue that did not go means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum DrainOutcome {
    /// Nothing yet.
    Open,
    /// The path's round trip is longer than it was, now `rtt` seconds; before we went slower it carried `rate` bytes a second.
    Longer { rtt: f64, rate: f64 },
}

/// The least time in seconds that packets waited in a round, and from which on that means a queue and a standing one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queue {
    pub(super) delay: f64,
    pub(super) short: f64,
    pub(super) full: f64,
    /// Which part of what was sent was lost where the queue was long.
    pub(super) congested: f64,
}

impl CrossTraffic {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            present: false,
            capacity: 0.0,
            drain: None,
            standing_at: now,
            full_rounds: 0,
            outrun: 0,
            bursts: 0,
            measured: [f64::INFINITY; 3],
            trust: 0,
            full_loss: 0.0,
            sent: 0.0,
        }
    }

    pub(super) fn is_present(&self) -> bool {
        self.present
    }

    /// The rate below which the rival's queue does not push us, in bytes a second delivered.
    pub(super) fn share(&self) -> f64 {
        if self.present { self.capacity * SHARE } else { 0.0 }
    }

    /// What the path can carry, in bytes a second, as far as it was seen lately.
    pub(super) fn capacity(&self) -> f64 {
        self.capacity
    }

    /// Takes a measurement of the capacity in the presence of the rival.
    pub(super) fn measure(&mut self, capacity: f64) {
        self.measured.rotate_left(1);
        self.measured[2] = capacity.clamp(self.capacity / 32.0, self.capacity * 32.0).max(1.0);
        // Where the buffer is nearly full the round trip grows too little, so that errors are upwards.
        let least = self.measured.iter().copied().fold(f64::INFINITY, f64::min);
        let weight = if self.trust >= TRUSTED { 0.04 } else { (1.0 / (f64::from(self.bursts) + 1.0)).max(0.2) };
        self.bursts = self.bursts.saturating_add(1);
        // The mean of the inverses: the delays are what is measured, and their errors are even.
        self.capacity = 1.0 / ((1.0 - weight) / self.capacity.max(1.0) + weight / least);
    }

    /// Forgets all, as after a dark time.
    pub(super) fn reset(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Judges a round in which packets waited at least `queue` seconds of a round trip of `rtt`. Up to `short` the queue counts as empty,
    /// beyond `most` as standing. We sent `sent` bytes a second.
    pub(super) fn round(&mut self, now: Instant, round: Round, rtt: f64, queue: Queue, sent: f64) -> DrainOutcome {
        self.full_loss += (queue.congested - self.full_loss) / 16.0;
        let forgotten = match self.present {
            true if self.full_loss > OVERRUN => 0.01,
            true => 0.0,
            false => round.span / FORGET,
        };
        let kept = self.capacity * (1.0 - forgotten).max(0.0);
        self.capacity = kept.max(round.rate);
        let before = std::mem::replace(&mut self.sent, sent);
        if !self.present {
            self.trust = match queue.delay <= queue.short {
                true if round.rate > 0.8 * self.capacity => (self.trust + 1).min(2 * TRUSTED),
                true => self.trust,
                false => self.trust.saturating_sub(1),
            };
        }
        if queue.delay <= queue.full {
            self.outrun = 0;
            if now.saturating_duration_since(self.standing_at) > GONE {
                self.present = false;
            }
        } else {
            self.standing_at = now;
        }
        if queue.delay <= queue.short {
            if let Some(drain) = self.drain.take()
                && !self.present
            {
                self.capacity = drain.rate.max(round.rate);
            }
            self.full_rounds = 0;
            return DrainOutcome::Open;
        }
        if self.present {
            self.drain = None;
            if queue.delay > queue.full {
                self.hold(round, before);
            }
            return DrainOutcome::Open;
        }
        self.full_rounds += 1;
        self.judge(round, rtt, queue, sent)
    }

    fn judge(&mut self, round: Round, rtt: f64, queue: Queue, sent: f64) -> DrainOutcome {
        if queue.delay > queue.full {
            let new = Drain { queue: queue.delay, rtt, rate: round.rate, gone: 0.0, going: 0.0, rounds: 0 };
            let drain = self.drain.get_or_insert(new);
            drain.queue = drain.queue.max(queue.delay);
            drain.gone += drain.going;
            drain.going = (1.0 - sent / round.rate.max(1.0)).max(0.0) * round.span;
            drain.rounds += 1;
        }
        let undrained = self.drain.filter(|drain| drain.gone >= 1.5 * drain.queue && drain.rounds >= 4);
        if undrained.is_none() && self.full_rounds < NEVER_EMPTY {
            return DrainOutcome::Open;
        }
        self.full_rounds = 0;
        self.drain = None;
        if let Some(drain) = undrained
            && (rtt - drain.rtt).abs() < 0.05 * queue.delay.min(drain.gone)
        {
            return DrainOutcome::Longer { rtt, rate: drain.rate };
        }
        self.present = true;
        self.forget_bursts();
        DrainOutcome::Open
    }

    /// Gives up the share when it is delivered no longer: then the path itself has become slower.
    fn hold(&mut self, round: Round, sent: f64) {
        if sent < 0.8 * self.share() || round.rate > 0.7 * self.share() {
            self.outrun = 0;
            return;
        }
        self.outrun += 1;
        if self.outrun >= 2 {
            self.outrun = 0;
            self.capacity = round.rate;
            self.trust = 0;
            self.forget_bursts();
        }
    }

    fn forget_bursts(&mut self) {
        self.bursts = 0;
        self.measured = [f64::INFINITY; 3];
    }
}
