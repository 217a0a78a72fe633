//! Detects cross traffic that fills the bottleneck's queue, and computes our share of the capacity.

use std::time::{Duration, Instant};

use super::flight::Round;

/// The cross traffic counts as gone after the queue was short for this time.
const GONE_AFTER: Duration = Duration::from_secs(10);

/// Time constant with which the capacity estimate decays, in seconds.
const CAPACITY_DECAY: f64 = 30.0;

/// Without cross traffic the queue is empty at least once in this many rounds: one and a half probing cycles.
const MAX_FULL_ROUNDS: u32 = 12;

/// A loss above this in a full buffer means that the capacity estimate is too high. It is then lowered by 1 % per round.
const MAX_FULL_LOSS: f64 = 0.04;

/// A capacity that was delivered with an empty queue for this many rounds is reliable.
const TRUSTED_ROUNDS: u32 = 20;

/// Share of the capacity that we hold against cross traffic.
const SHARE: f64 = 0.46;

/// Detector of a queue that should be empty but is not: cross traffic fills it, or the path has become longer.
#[derive(Debug, Clone)]
pub(super) struct CrossTraffic {
    /// Whether cross traffic was detected.
    present: bool,
    /// Estimated capacity of the path in bytes per second, from recent samples.
    capacity: f64,
    drain: Option<Drain>,
    standing_at: Instant,
    /// Number of rounds since the queue was last empty.
    full_rounds: u32,
    outrun: u32,
    /// Number of capacity measurements since the cross traffic was detected, and the latest three of them.
    bursts: u32,
    measured: [f64; 3],
    /// Number of rounds in which the capacity was delivered with an empty queue, minus rounds with a queue.
    trust: u32,
    /// Fraction lost in a full buffer, averaged over about sixteen rounds.
    full_loss: f64,
    /// Bytes per second sent in the previous round.
    sent: f64,
}

/// A queue that is being drained.
#[derive(Debug, Clone, Copy)]
struct Drain {
    /// Longest queueing delay, and the round-trip time at the start.
    queue: f64,
    rtt: f64,
    /// Delivery rate at the start, in bytes per second.
    rate: f64,
    /// Expected reduction of the queue by now, and by the next round, since a change of the sending rate shows one round later.
    gone: f64,
    going: f64,
    rounds: u32,
}

/// Result of judging a queue.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum DrainOutcome {
    /// No conclusion yet.
    Open,
    /// The path's round trip has become longer, now `rtt` seconds. Before we slowed down it carried `rate` bytes per second.
    Longer { rtt: f64, rate: f64 },
}

/// Minimum queueing delay of a round in seconds, and the thresholds above which it means a queue and a standing queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queue {
    pub(super) delay: f64,
    pub(super) short: f64,
    pub(super) full: f64,
    /// Fraction of the sent bytes that was lost while the queue was long.
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

    /// The delivery rate below which the queue of cross traffic does not push us, in bytes per second.
    pub(super) fn share(&self) -> f64 {
        if self.present { self.capacity * SHARE } else { 0.0 }
    }

    /// Estimated capacity of the path in bytes per second, from recent samples.
    pub(super) fn capacity(&self) -> f64 {
        self.capacity
    }

    /// Adds a capacity measurement made in the presence of cross traffic.
    pub(super) fn measure(&mut self, capacity: f64) {
        self.measured.rotate_left(1);
        self.measured[2] = capacity.clamp(self.capacity / 32.0, self.capacity * 32.0).max(1.0);
        // Near a full buffer the round trip grows too little, so errors are upwards. Hence the minimum.
        let least = self.measured.iter().copied().fold(f64::INFINITY, f64::min);
        let weight = if self.trust >= TRUSTED_ROUNDS { 0.04 } else { (1.0 / (f64::from(self.bursts) + 1.0)).max(0.2) };
        self.bursts = self.bursts.saturating_add(1);
        // Average the inverses: the measured quantities are delays, and their errors are symmetric.
        self.capacity = 1.0 / ((1.0 - weight) / self.capacity.max(1.0) + weight / least);
    }

    /// Discards all state, as after an outage.
    pub(super) fn reset(&mut self, now: Instant) {
        *self = Self::new(now);
    }

    /// Judges a round with a round-trip time of `rtt` and the queue `queue`. Up to `queue.short` the queue counts as empty, beyond `queue.full` as
    /// standing. We sent `sent` bytes per second.
    pub(super) fn round(&mut self, now: Instant, round: Round, rtt: f64, queue: Queue, sent: f64) -> DrainOutcome {
        self.full_loss += (queue.congested - self.full_loss) / 16.0;
        let forgotten = match self.present {
            true if self.full_loss > MAX_FULL_LOSS => 0.01,
            true => 0.0,
            false => round.span / CAPACITY_DECAY,
        };
        let kept = self.capacity * (1.0 - forgotten).max(0.0);
        self.capacity = kept.max(round.rate);
        let before = std::mem::replace(&mut self.sent, sent);
        if !self.present {
            self.trust = match queue.delay <= queue.short {
                true if round.rate > 0.8 * self.capacity => (self.trust + 1).min(2 * TRUSTED_ROUNDS),
                true => self.trust,
                false => self.trust.saturating_sub(1),
            };
        }
        if queue.delay <= queue.full {
            self.outrun = 0;
            if now.saturating_duration_since(self.standing_at) > GONE_AFTER {
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
                self.check_share(round, before);
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
        if undrained.is_none() && self.full_rounds < MAX_FULL_ROUNDS {
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

    /// Gives up the share when the path no longer delivers it: then the path itself has become slower.
    fn check_share(&mut self, round: Round, sent: f64) {
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
