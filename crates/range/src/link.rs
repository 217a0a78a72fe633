//! A link: what it brings, how many requests it takes at a time, whether it answers.

use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};

use crate::meter::Meter;
use crate::types::{Config, LinkSetup};

/// Assumed of a link before anything was measured.
const LATENCY: Duration = Duration::from_millis(100);
/// Trying more requests at once takes at least this long.
const CLIMB: Duration = Duration::from_millis(1000);
/// After a try that brought nothing, the next comes after this.
const CLIMB_AGAIN: Duration = Duration::from_secs(10);
/// A link gets one more request at first for each such part of its round trip: what loss leaves of a connection falls with that.
const FARTHER: Duration = Duration::from_millis(40);
/// What more requests must bring to be kept.
const CLIMB_GAIN: f64 = 1.1;
/// A silent link is tried again after this, then after twice as long, and so on.
pub(crate) const RETRY_FIRST: Duration = Duration::from_millis(500);
pub(crate) const RETRY_MOST: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct ScheduledLink {
    pub(crate) setup: LinkSetup,
    pub(crate) up: bool,
    pub(crate) meter: Meter,
    /// From a question to its answer, smoothed.
    pub(crate) latency: Option<Duration>,
    /// The least of it.
    quickest: Option<Duration>,
    /// What it brought when it had its limit of requests last.
    full: Option<Rate>,
    /// It was only guessed so far, from handshakes.
    guessed: bool,
    pub(crate) moved: u64,
    pub(crate) twice: u64,
    /// Requests at a time, at most.
    pub(crate) request_limit: usize,
    climb: Climb,
    /// All its requests stall: since when it is tried again, and for how long it is left alone next.
    pub(crate) silent: Option<Silent>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Silent {
    pub(crate) again: Time,
    pub(crate) pause: Duration,
}

/// The search for the number of requests that a link takes at a time.
#[derive(Debug, Clone, Copy)]
struct Climb {
    since: Time,
    /// The rate and the number before the last step up.
    before: Option<(Rate, usize)>,
    not_before: Time,
}

impl ScheduledLink {
    pub(crate) fn new(setup: LinkSetup, config: &Config) -> Self {
        let climb = Climb { since: Time::ZERO, before: None, not_before: Time::ZERO };
        Self {
            setup,
            up: true,
            meter: Meter::default(),
            latency: None,
            quickest: None,
            full: None,
            guessed: true,
            moved: 0,
            twice: 0,
            request_limit: config.connections_first.clamp(1, config.connections_most.max(1)),
            climb,
            silent: None,
        }
    }

    /// Whether it may be asked for anything new.
    pub(crate) fn usable(&self, now: Time) -> bool {
        self.up && self.silent.is_none_or(|silent| silent.again <= now)
    }

    pub(crate) fn latency(&self) -> Duration {
        self.latency.unwrap_or(LATENCY)
    }

    pub(crate) fn on_latency(&mut self, sample: Duration) {
        self.latency = Some(self.latency.filter(|_| !self.guessed).map_or(sample, |old| (old * 7 + sample) / 8));
        self.quickest = Some(self.quickest.map_or(sample, |least| least.min(sample)));
        self.guessed = false;
    }

    /// The first connection stands after so long: handshakes take a round trip or two, the name perhaps another.
    pub(crate) fn on_first_handshake(&mut self, took: Duration, most: usize) {
        if self.latency.is_none() {
            self.latency = Some(took / 2);
            let farther = (took.as_nanos() / 2 / FARTHER.as_nanos()).min(3) as usize;
            self.request_limit = (self.request_limit + farther).min(most.max(1));
        }
    }

    /// What it brings, measured or assumed.
    pub(crate) fn rate(&self, now: Time) -> Option<Rate> {
        self.meter.rate(now).or(self.setup.rate).filter(|rate| rate.bps() > 0)
    }

    /// From a question to its answer while nothing else is under way: the queue that others keep is not to be waited for.
    pub(crate) fn latency_idle(&self) -> Duration {
        self.quickest.unwrap_or(self.latency())
    }

    /// What it could bring: towards the end of a file it brings less, since it has less to do.
    pub(crate) fn capacity(&self, now: Time) -> Option<Rate> {
        self.rate(now).max(self.full)
    }

    /// So many requests are at work.
    pub(crate) fn on_busy(&mut self, now: Time, busy: usize) {
        if busy >= self.request_limit {
            self.full = self.meter.rate(now).or(self.full);
        }
    }

    /// What one of its requests brings.
    pub(crate) fn share(&self, now: Time) -> Option<f64> {
        Some(self.rate(now)?.bps() as f64 / 8.0 / self.request_limit as f64)
    }

    /// How long a request may bring nothing before its range is given to others.
    pub(crate) fn stall(&self) -> Duration {
        (self.latency() * 4 + Duration::from_millis(500)).clamp(Duration::from_millis(800), Duration::from_secs(6))
    }

    /// Bytes came: it is not silent.
    pub(crate) fn on_data(&mut self, now: Time, bytes: u64, fresh: u64) {
        self.moved += bytes;
        self.twice += bytes - fresh.min(bytes);
        self.meter.add(now, bytes);
        self.silent = None;
    }

    /// All its requests stall or fail.
    pub(crate) fn on_silence(&mut self, now: Time) {
        self.full = None;
        let pause = self.silent.map_or(RETRY_FIRST, |silent| (silent.pause * 2).min(RETRY_MOST));
        if self.silent.is_none_or(|silent| silent.again <= now) {
            self.silent = Some(Silent { again: now + pause, pause });
        }
    }

    /// Whether more requests at once bring more. `busy`: requests at work; `long`: there is enough to do for a while.
    pub(crate) fn climb(&mut self, now: Time, busy: usize, most: usize, long: bool) {
        if busy < self.request_limit || !long {
            self.climb.since = now;
            return;
        }
        let span = CLIMB.max(self.latency() * 8);
        // New connections are not judged by their beginning.
        let due = if self.climb.before.is_some() { span * 2 } else { span };
        if now < self.climb.not_before || now.since(self.climb.since) < due {
            return;
        }
        let Some(rate) = self.meter.rate_since(now, Time::from_nanos(now.as_nanos().saturating_sub(span.as_nanos() as u64))) else {
            return;
        };
        self.climb.since = now;
        match self.climb.before {
            Some((before, request_limit)) if rate < before.scale(CLIMB_GAIN) => {
                self.request_limit = request_limit;
                self.climb.before = None;
                self.climb.not_before = now + CLIMB_AGAIN;
            }
            _ if self.request_limit < most => {
                self.climb.before = Some((rate, self.request_limit));
                self.request_limit = (self.request_limit + 2).min(most);
            }
            _ => self.climb.not_before = now + CLIMB_AGAIN,
        }
    }

    /// Bytes it may still bring, `pending` of which are asked for; `budget`: what the money left buys of it.
    pub(crate) fn left(&self, pending: u64, budget: Option<u64>) -> u64 {
        let allowance = self.setup.allowance.map_or(u64::MAX, ByteCount::get).saturating_sub(self.moved).saturating_sub(pending);
        allowance.min(budget.unwrap_or(u64::MAX))
    }
}
