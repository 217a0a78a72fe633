//! State of a link: its rate, its number of concurrent requests, and whether it responds.

use std::time::Duration;

use braid_model::{ByteCount, Rate, Time};

use crate::meter::Meter;
use crate::types::{Config, LinkSetup};

/// Assumed latency of an unmeasured link.
const DEFAULT_LATENCY: Duration = Duration::from_millis(100);
/// Minimum duration of a trial with more concurrent requests.
const CLIMB_MIN_SPAN: Duration = Duration::from_millis(1000);
/// Time until the next trial after one without a gain.
const CLIMB_PAUSE: Duration = Duration::from_secs(10);
/// A link gets one more initial request per this much round trip, because loss limits a connection more the longer its round trip is.
const RTT_PER_REQUEST: Duration = Duration::from_millis(40);
/// Minimum throughput gain for which more requests are kept.
const MIN_CLIMB_GAIN: f64 = 1.1;
/// Initial retry time of a silent link; it doubles with each retry.
pub(crate) const RETRY_MIN: Duration = Duration::from_millis(500);
pub(crate) const RETRY_MAX: Duration = Duration::from_secs(15);

#[derive(Debug)]
pub(crate) struct ScheduledLink {
    pub(crate) setup: LinkSetup,
    pub(crate) up: bool,
    pub(crate) meter: Meter,
    /// Time from a request to its answer, smoothed.
    pub(crate) latency: Option<Duration>,
    /// Minimum latency.
    min_latency: Option<Duration>,
    /// Rate when the link last had its maximum number of requests.
    rate_at_limit: Option<Rate>,
    /// The latency is only a guess from handshakes so far.
    guessed: bool,
    pub(crate) moved: u64,
    pub(crate) twice: u64,
    /// Maximum number of concurrent requests.
    pub(crate) request_limit: usize,
    climb: Climb,
    /// Set while all requests of the link stall: when it is tried again, and the current pause.
    pub(crate) silent: Option<Silent>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Silent {
    pub(crate) again: Time,
    pub(crate) pause: Duration,
}

/// State of the search for the best number of concurrent requests.
#[derive(Debug, Clone, Copy)]
struct Climb {
    since: Time,
    /// Rate and number of requests before the last increase.
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
            min_latency: None,
            rate_at_limit: None,
            guessed: true,
            moved: 0,
            twice: 0,
            request_limit: config.connections_first.clamp(1, config.connections_most.max(1)),
            climb,
            silent: None,
        }
    }

    /// Whether new requests may use the link.
    pub(crate) fn usable(&self, now: Time) -> bool {
        self.up && self.silent.is_none_or(|silent| silent.again <= now)
    }

    pub(crate) fn latency(&self) -> Duration {
        self.latency.unwrap_or(DEFAULT_LATENCY)
    }

    pub(crate) fn on_latency(&mut self, sample: Duration) {
        self.latency = Some(self.latency.filter(|_| !self.guessed).map_or(sample, |old| (old * 7 + sample) / 8));
        self.min_latency = Some(self.min_latency.map_or(sample, |least| least.min(sample)));
        self.guessed = false;
    }

    /// Records the duration of the first handshake, which takes one or two round trips and perhaps another one for the name lookup.
    pub(crate) fn on_first_handshake(&mut self, took: Duration, most: usize) {
        if self.latency.is_none() {
            self.latency = Some(took / 2);
            let extra = (took.as_nanos() / 2 / RTT_PER_REQUEST.as_nanos()).min(3) as usize;
            self.request_limit = (self.request_limit + extra).min(most.max(1));
        }
    }

    /// Rate of the link, measured or configured.
    pub(crate) fn rate(&self, now: Time) -> Option<Rate> {
        self.meter.rate(now).or(self.setup.rate).filter(|rate| rate.bps() > 0)
    }

    /// Latency without other traffic: the queue that other requests cause does not count.
    pub(crate) fn latency_idle(&self) -> Duration {
        self.min_latency.unwrap_or(self.latency())
    }

    /// Capacity of the link. Towards the end of a file its measured rate is lower, because it has less to do.
    pub(crate) fn capacity(&self, now: Time) -> Option<Rate> {
        self.rate(now).max(self.rate_at_limit)
    }

    /// Records the number of busy connections.
    pub(crate) fn on_busy(&mut self, now: Time, busy: usize) {
        if busy >= self.request_limit {
            self.rate_at_limit = self.meter.rate(now).or(self.rate_at_limit);
        }
    }

    /// Rate of one request in bytes per second.
    pub(crate) fn share(&self, now: Time) -> Option<f64> {
        Some(self.rate(now)?.bps() as f64 / 8.0 / self.request_limit as f64)
    }

    /// Time without data after which a request counts as stalled.
    pub(crate) fn stall(&self) -> Duration {
        (self.latency() * 4 + Duration::from_millis(500)).clamp(Duration::from_millis(800), Duration::from_secs(6))
    }

    /// Records received bytes: the link is not silent.
    pub(crate) fn on_data(&mut self, now: Time, bytes: u64, fresh: u64) {
        self.moved += bytes;
        self.twice += bytes - fresh.min(bytes);
        self.meter.add(now, bytes);
        self.silent = None;
    }

    /// All requests of the link stall or fail.
    pub(crate) fn on_silence(&mut self, now: Time) {
        self.rate_at_limit = None;
        let pause = self.silent.map_or(RETRY_MIN, |silent| (silent.pause * 2).min(RETRY_MAX));
        if self.silent.is_none_or(|silent| silent.again <= now) {
            self.silent = Some(Silent { again: now + pause, pause });
        }
    }

    /// Tests whether more concurrent requests increase the rate. `busy` is the number of active requests; `long` is true if there is enough work for
    /// a while.
    pub(crate) fn climb(&mut self, now: Time, busy: usize, most: usize, long: bool) {
        if busy < self.request_limit || !long {
            self.climb.since = now;
            return;
        }
        let span = CLIMB_MIN_SPAN.max(self.latency() * 8);
        // New connections are not measured during their start.
        let due = if self.climb.before.is_some() { span * 2 } else { span };
        if now < self.climb.not_before || now.since(self.climb.since) < due {
            return;
        }
        let Some(rate) = self.meter.rate_since(now, Time::from_nanos(now.as_nanos().saturating_sub(span.as_nanos() as u64))) else {
            return;
        };
        self.climb.since = now;
        match self.climb.before {
            Some((before, request_limit)) if rate < before.scale(MIN_CLIMB_GAIN) => {
                self.request_limit = request_limit;
                self.climb.before = None;
                self.climb.not_before = now + CLIMB_PAUSE;
            }
            _ if self.request_limit < most => {
                self.climb.before = Some((rate, self.request_limit));
                self.request_limit = (self.request_limit + 2).min(most);
            }
            _ => self.climb.not_before = now + CLIMB_PAUSE,
        }
    }

    /// Bytes that the link may still receive, if `pending` bytes are already requested. `budget` is the number of bytes that the remaining money pays
    /// for.
    pub(crate) fn left(&self, pending: u64, budget: Option<u64>) -> u64 {
        let allowance = self.setup.allowance.map_or(u64::MAX, ByteCount::get).saturating_sub(self.moved).saturating_sub(pending);
        allowance.min(budget.unwrap_or(u64::MAX))
    }
}
