//! Estimates of a link's capacity, round-trip time and loss from its traffic.
//!
//! DBAS II.C.1 measures against servers and combines the result with statistics of normal transfers. Braid relies on normal transfers first, because
//! they cost nothing. Device counters show the carried traffic, which is a lower bound of the capacity. So an estimate rises at once with the
//! evidence. It falls only while flows were backlogged during the whole interval. It falls faster with several flows: a slow server may limit one
//! flow, but hardly all of them. The fall is geometric, so an initial guess of 10 Gbit/s from a device's nominal rate disappears within seconds of
//! bulk traffic.
//!
//! Traffic that never filled the link gives a lower bound only: it may raise an estimate but must not lower it ([`Busy::backlogged`]). An estimate is
//! not [known](Estimate::is_known) while it rests on a guess alone.
//!
//! A failing link carries less and less before Braid detects its death. After it recovers, flows fill it slowly because they come out of
//! retransmission timeouts. Neither phase shows its capacity ([`Capacity::interrupt`]).

use std::time::Duration;

use braid_model::{ByteCount, LinkKind, Rate, Time};

/// Shorter intervals are accumulated up to this length, because they are too noisy.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// The estimate follows the maximum of this many consecutive intervals.
const WINDOW: usize = 6;
/// Time constant of the fall with one backlogged flow, in seconds.
const FALL_ONE_FLOW: f64 = 2.3;
/// Time constant of the fall with two or more flows, in seconds.
const FALL_SEVERAL_FLOWS: f64 = 0.6;
/// Factors on the time constant for a proven capacity while round trips show a queue: one flow, several flows.
const PROVEN_QUEUED: [f64; 2] = [4.0, 3.0];
/// Factors on the time constant for a proven capacity while round trips show no queue. Then the servers, not the link, probably limit the rate (a paced video stream, for example).
const PROVEN_UNQUEUED: [f64; 2] = [60.0, 12.0];
/// A proof expires after this time.
const PROOF_LIFETIME: Duration = Duration::from_secs(60);
/// A link may have been failing for this long before its death is detected. Falls within this time are rolled back.
const ROLLBACK: Duration = Duration::from_secs(10);
/// Time that flows need to fill a link after it recovers.
const RECOVERY: Duration = Duration::from_secs(5);
/// Half-life of the confidence without evidence.
const CONFIDENCE_HALF_LIFE: Duration = Duration::from_secs(600);
/// Seconds of evidence until the confidence reaches one half.
const CONFIDENCE_SECONDS: f64 = 2.0;

/// Initial capacity guess for a link of this kind.
///
/// Wired: the nominal rate of the device, else 100 Mbit/s. Wireless: half of the nominal rate (the medium is shared and half-duplex), else 50 Mbit/s.
/// Cellular: 20 Mbit/s. Others: the nominal rate, else 100 Mbit/s.
pub fn guess(kind: LinkKind, nominal: Option<Rate>) -> Rate {
    let claimed = nominal.filter(|rate| *rate > Rate::ZERO);
    match kind {
        LinkKind::Wireless => claimed.map_or(Rate::from_mbps(50), |rate| rate.scale(0.5)),
        LinkKind::Cellular => Rate::from_mbps(20),
        LinkKind::Wired | LinkKind::Vpn | LinkKind::Virtual | LinkKind::Loopback => claimed.unwrap_or(Rate::from_mbps(100)),
    }
}

/// Activity of a link's flows during an interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Busy {
    /// Number of flows that moved data.
    pub flows: u32,
    /// Number of distinct remote hosts among these flows.
    pub destinations: u32,
    /// At least one flow moved data during the whole interval and was limited by the network, not by its application.
    pub backlogged: bool,
    /// Round-trip times exceeded the link's minimum: packets queue at the link.
    pub queued: bool,
}

/// A capacity estimate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// Estimated capacity.
    pub rate: Rate,
    /// Confidence: 0 is a guess, 1 is certain.
    pub confidence: f64,
    /// Time since the last evidence; `None` if there is none.
    pub age: Option<Duration>,
}

impl Estimate {
    /// Whether the estimate is more than a guess from the link's kind: configured by the user, learned in this run, or restored from an earlier one.
    pub fn is_known(&self) -> bool {
        self.confidence > 0.0 || self.age.is_some()
    }
}

/// Estimates the capacity of one link in one direction.
#[derive(Debug, Clone)]
pub struct Capacity {
    fixed: bool,
    level: f64,
    confidence: f64,
    evidence: Option<Time>,
    /// Rates of the last intervals in bits per second, the latest last.
    recent: Vec<f64>,
    /// The highest level that traffic has shown recently, and when.
    proven: Option<(f64, Time)>,
    /// The levels before recent falls, the highest first, and the times of the falls.
    recent_falls: Vec<(f64, Time)>,
    /// The estimate does not fall before this time.
    no_fall_before: Time,
    gathered: u64,
    gathered_for: Duration,
    gathered_busy: Option<Busy>,
}

impl Capacity {
    /// Starts with a guess.
    pub fn new(guess: Rate, _now: Time) -> Self {
        Self {
            fixed: false,
            level: guess.bps() as f64,
            confidence: 0.0,
            evidence: None,
            recent: Vec::new(),
            proven: None,
            recent_falls: Vec::new(),
            no_fall_before: Time::ZERO,
            gathered: 0,
            gathered_for: Duration::ZERO,
            gathered_busy: None,
        }
    }

    /// A capacity configured by the user. It never changes.
    pub fn fixed(rate: Rate) -> Self {
        Self { fixed: true, confidence: 1.0, ..Self::new(rate, Time::ZERO) }
    }

    /// Whether the user configured the capacity.
    pub fn is_fixed(&self) -> bool {
        self.fixed
    }

    /// Replaces the guess by an estimate of an earlier run, with a confidence of at least 0.5. Does nothing if there is evidence already.
    pub fn recall(&mut self, rate: Rate) {
        if !self.fixed && rate > Rate::ZERO && self.evidence.is_none() {
            self.level = rate.bps() as f64;
            self.confidence = self.confidence.max(0.5);
        }
    }

    /// The current estimate.
    pub fn estimate(&self, now: Time) -> Estimate {
        let age = self.evidence.map(|at| now.since(at));
        let confidence = if self.fixed { 1.0 } else { self.confidence * decayed(age.unwrap_or_default(), CONFIDENCE_HALF_LIFE) };
        Estimate { rate: Rate::from_bps(self.level as u64), confidence, age }
    }

    /// The link carried `moved` during the `span` that ends at `now`.
    pub fn on_interval(&mut self, now: Time, moved: ByteCount, span: Duration, busy: Busy) {
        if self.fixed || span.is_zero() {
            return;
        }
        self.gathered = self.gathered.saturating_add(moved.get());
        self.gathered_for += span;
        self.gathered_busy = Some(match self.gathered_busy {
            None => busy,
            Some(before) => Busy {
                flows: before.flows.min(busy.flows),
                destinations: before.destinations.min(busy.destinations),
                backlogged: before.backlogged && busy.backlogged,
                queued: before.queued || busy.queued,
            },
        });
        if self.gathered_for < MIN_INTERVAL {
            return;
        }
        let rate = self.gathered as f64 * 8.0 / self.gathered_for.as_secs_f64();
        let span = self.gathered_for;
        let busy = self.gathered_busy.take().unwrap_or_default();
        (self.gathered, self.gathered_for) = (0, Duration::ZERO);
        self.take(now, rate, span, busy);
    }

    /// The link is dead or without carrier at `now`. Discards the traffic since the last interval, because it does not show the capacity. Rolls back
    /// the falls of the last ten seconds, up to the level that traffic has proven within the last minute. The estimate does not fall for five seconds
    /// after the last such call.
    pub fn interrupt(&mut self, now: Time) {
        let lately = self.recent_falls.iter().filter(|(_, at)| now.since(*at) <= ROLLBACK).map(|(level, _)| *level).fold(0.0, f64::max);
        if let Some((proven, _)) = self.proven {
            self.level = self.level.max(lately.min(proven));
        }
        self.recent.clear();
        self.recent_falls.clear();
        (self.gathered, self.gathered_for, self.gathered_busy) = (0, Duration::ZERO, None);
        self.no_fall_before = now + RECOVERY;
    }

    fn take(&mut self, now: Time, rate: f64, span: Duration, busy: Busy) {
        if self.recent.len() == WINDOW {
            self.recent.remove(0);
        }
        self.recent.push(rate);
        if self.proven.is_some_and(|(_, at)| now.since(at) > PROOF_LIFETIME) {
            self.proven = None;
        }
        // One interval may contain a burst from a buffer, so two consecutive intervals must agree.
        let shown = self.recent.iter().rev().take(2).copied().fold(f64::INFINITY, f64::min);
        if self.recent.len() >= 2 && shown > 0.0 && self.proven.is_none_or(|(proven, _)| shown >= proven) {
            self.proven = Some((shown, now));
        }
        if self.recent.len() >= 2 && shown >= self.level {
            self.level = shown;
            self.record_evidence(now, span);
        } else if busy.backlogged && busy.flows > 0 && now >= self.no_fall_before {
            self.fall(now, span, busy);
        } else {
            // The flows did not use the link fully, so the interval does not bound the capacity.
            self.recent.clear();
        }
    }

    /// Lowers the estimate: flows were backlogged, so the capacity is at most the recent maximum.
    fn fall(&mut self, now: Time, span: Duration, busy: Busy) {
        let best = self.recent.iter().copied().fold(1.0, f64::max);
        if self.recent.len() < 2 || best >= self.level {
            return;
        }
        let several = busy.flows >= 2;
        let mut constant = if several { FALL_SEVERAL_FLOWS } else { FALL_ONE_FLOW };
        if self.proven.is_some_and(|(proven, _)| self.level <= proven * 1.02) {
            constant *= if busy.queued { PROVEN_QUEUED } else { PROVEN_UNQUEUED }[usize::from(several)];
        }
        // The level moves towards `best` by the share 1 - exp(-t / constant) on a logarithmic scale: it is multiplied by (best/level)^share.
        let x = span.as_secs_f64() / constant;
        let share = 1.0 - 1.0 / (1.0 + x + x * x / 2.0 + x * x * x / 6.0);
        // Lower levels and old ones are not needed for the rollback.
        self.recent_falls.retain(|(level, at)| *level > self.level && now.since(*at) <= ROLLBACK);
        self.recent_falls.push((self.level, now));
        self.level *= power(best / self.level, share);
        self.record_evidence(now, span);
    }

    fn record_evidence(&mut self, now: Time, span: Duration) {
        let seconds = span.as_secs_f64();
        self.confidence += (1.0 - self.confidence) * (seconds / (seconds + CONFIDENCE_SECONDS)).min(1.0);
        self.evidence = Some(now);
    }

    /// The kernel's delivery-rate sample of a backlogged flow: a lower bound of the capacity.
    pub fn on_delivery_rate(&mut self, now: Time, rate: Rate) {
        // With aggregated acknowledgements a sample can be far too high, so the recent counters limit it.
        let best = self.recent.iter().copied().fold(0.0, f64::max);
        let rate = (rate.bps() as f64).min(best * 1.25);
        if !self.fixed && rate > self.level {
            self.level += (rate - self.level) / 8.0;
            self.evidence = Some(now);
        }
    }

    /// Records the result of an active measurement.
    pub fn on_measured(&mut self, now: Time, rate: Rate) {
        if !self.fixed && rate > Rate::ZERO {
            self.level = rate.bps() as f64;
            self.proven = Some((self.level, now));
            self.confidence = self.confidence.max(0.9);
            self.evidence = Some(now);
        }
    }
}

/// `base` to the power of `exponent` in [0, 1], for `base` in (0, 1]. The arithmetic gives the same result on every machine.
fn power(base: f64, exponent: f64) -> f64 {
    // Binary digits of the exponent: base^(1/2), base^(1/4), ... by square roots, which IEEE 754 defines exactly.
    let (mut result, mut root, mut rest) = (1.0, base, exponent);
    for _ in 0..30 {
        root = root.sqrt();
        rest *= 2.0;
        if rest >= 1.0 {
            rest -= 1.0;
            result *= root;
        }
    }
    result
}

/// Exponential decay of 1 over `age` with `half_life`, linear between the halvings.
pub(crate) fn decayed(age: Duration, half_life: Duration) -> f64 {
    let halves = (age.as_secs_f64() / half_life.as_secs_f64()).min(60.0);
    let whole = halves as u32;
    let rest = halves - f64::from(whole);
    (1.0 - rest / 2.0) / (1u64 << whole) as f64
}

/// Round-trip time: smoothed as in RFC 6298, and the recent minimum.
#[derive(Debug, Clone, Default)]
pub struct Rtt {
    smoothed: Option<Duration>,
    least: Option<(Duration, Time)>,
    at: Time,
}

impl Rtt {
    /// Lifetime of the minimum.
    const MIN_LIFETIME: Duration = Duration::from_secs(300);
    /// Lifetime of the smoothed value.
    const SMOOTHED_LIFETIME: Duration = Duration::from_secs(600);

    /// Records a sample.
    pub fn on_sample(&mut self, now: Time, rtt: Duration) {
        self.smoothed = Some(self.smoothed.map_or(rtt, |smoothed| (smoothed * 7 + rtt) / 8));
        if self.least.is_none_or(|(least, at)| rtt <= least || now.since(at) > Self::MIN_LIFETIME) {
            self.least = Some((rtt, now));
        }
        self.at = now;
    }

    /// The smoothed round-trip time; `None` before the first sample, and ten minutes after the last.
    pub fn smoothed(&self, now: Time) -> Option<Duration> {
        self.smoothed.filter(|_| now < self.at + Self::SMOOTHED_LIFETIME)
    }

    /// When the smoothed value expires.
    pub fn poll_timeout(&self, now: Time) -> Option<Time> {
        self.smoothed(now).map(|_| self.at + Self::SMOOTHED_LIFETIME)
    }

    /// Time since the last sample, and the confidence in the value (0 to 1, one half after a minute).
    pub fn age(&self, now: Time) -> Option<(Duration, f64)> {
        self.smoothed.map(|_| (now.since(self.at), decayed(now.since(self.at), Duration::from_secs(60))))
    }

    /// The minimum round-trip time of the last minutes.
    pub fn least(&self) -> Option<Duration> {
        self.least.map(|(least, _)| least)
    }
}

/// Size of the buffer in front of a link, in one direction: the largest queue of the last hours.
///
/// While the link is full, a flow's round trip exceeds its unloaded one by the time that the queue takes to drain, so the queue holds that time times
/// the link's rate. Queues that never fill the buffer, and flows that begin in a standing queue, make the estimate too low, never too high.
#[derive(Debug, Clone, Default)]
pub struct Buffer {
    largest: f64,
    at: Time,
}

impl Buffer {
    /// The estimate halves in this time without a larger queue, since a link may lead to another network.
    const HALF_LIFE: Duration = Duration::from_secs(6 * 3600);
    /// Minimum share of the capacity in use from which the link counts as full.
    const FULL: f64 = 0.8;

    /// Records a flow's round trip while the link moved `rate` of its `capacity`. `unloaded` is the flow's least round trip.
    pub fn on_sample(&mut self, now: Time, rtt: Duration, unloaded: Duration, rate: Rate, capacity: Rate) {
        if capacity == Rate::ZERO || (rate.bps() as f64) < Self::FULL * capacity.bps() as f64 {
            return;
        }
        let queue = rtt.saturating_sub(unloaded).as_secs_f64() * rate.bps() as f64 / 8.0;
        let left = self.largest * decayed(now.since(self.at), Self::HALF_LIFE);
        if queue > left {
            // A single outlier, such as a retransmitted acknowledgement, counts only in part.
            self.largest = left + (queue - left) / 4.0;
            self.at = now;
        }
    }

    /// The size; `None` before the link was full.
    pub fn size(&self, now: Time) -> Option<ByteCount> {
        (self.largest > 0.0).then(|| ByteCount::new((self.largest * decayed(now.since(self.at), Self::HALF_LIFE)) as u64))
    }
}

/// Share of retransmitted segments, with exponential decay.
#[derive(Debug, Clone, Default)]
pub struct Loss {
    sent: f64,
    retransmitted: f64,
    at: Time,
}

impl Loss {
    const HALF_LIFE: Duration = Duration::from_secs(60);
    /// Minimum number of segments for an estimate.
    const MIN_SEGMENTS: f64 = 20.0;

    /// Reports the segments sent since the last call, and how many of them were retransmissions.
    pub fn on_segments(&mut self, now: Time, sent: u64, retransmitted: u64) {
        let left = decayed(now.since(self.at), Self::HALF_LIFE);
        self.sent = self.sent * left + sent as f64;
        self.retransmitted = self.retransmitted * left + retransmitted.min(sent) as f64;
        self.at = now;
    }

    /// Time since the last segments, and the confidence in the share (0 to 1, rising with the number of segments).
    pub fn age(&self, now: Time) -> Option<(Duration, f64)> {
        let weight = self.sent * decayed(now.since(self.at), Self::HALF_LIFE);
        (self.sent > 0.0).then(|| (now.since(self.at), weight / (weight + 100.0)))
    }

    /// The share of retransmissions, 0 to 1; `None` while there are too few segments.
    pub fn rate(&self, now: Time) -> Option<f64> {
        let left = decayed(now.since(self.at), Self::HALF_LIFE);
        (self.sent * left >= Self::MIN_SEGMENTS).then(|| self.retransmitted / self.sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STEP: Duration = Duration::from_millis(250);
    const TEN_GIGABIT: Rate = Rate::from_mbps(10_000);

    /// A link of `mbps` with `bulk` greedy flows, and one flow that its server limits to `slow_mbps`.
    fn run(capacity: &mut Capacity, from: u64, seconds: u64, mbps: f64, bulk: u32, slow_mbps: f64) -> u64 {
        let steps = seconds * 4;
        for step in 0..steps {
            let now = Time::from_millis(from + step * 250);
            let moved = if bulk > 0 { mbps } else { slow_mbps.min(mbps) };
            let flows = bulk + u32::from(slow_mbps > 0.0);
            let busy = Busy { flows, destinations: flows, backlogged: flows > 0, queued: bulk > 0 };
            capacity.on_interval(now, ByteCount::new((moved * 1e6 / 8.0 * 0.25) as u64), STEP, busy);
        }
        from + steps * 250
    }

    fn mbps(capacity: &Capacity, at: u64) -> f64 {
        capacity.estimate(Time::from_millis(at)).rate.bps() as f64 / 1e6
    }

    #[test]
    fn the_buffer_is_the_largest_queue_of_a_full_link() {
        let (ms, mbps) = (Duration::from_millis, Rate::from_mbps);
        let mut buffer = Buffer::default();
        let at = Time::from_millis;
        buffer.on_sample(at(0), ms(500), ms(20), mbps(1), mbps(8));
        assert_eq!(buffer.size(at(0)), None, "the link is not full");
        for sample in 0..40 {
            buffer.on_sample(at(sample), ms(120), ms(20), mbps(8), mbps(8));
        }
        // 100 ms at 8 Mbit/s.
        let size = buffer.size(at(40)).unwrap().get();
        assert!((99_000..=100_000).contains(&size), "{size}");
        buffer.on_sample(at(41), ms(30), ms(20), mbps(8), mbps(8));
        assert!(buffer.size(at(41)).unwrap().get().abs_diff(size) < 100, "a short queue says nothing");
        assert!(buffer.size(at(6 * 3_600_000)).unwrap().get().abs_diff(size / 2) < 100);
    }

    #[test]
    fn a_guess_far_too_high_is_corrected_within_three_seconds_of_several_flows() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 3, 20.0, 3, 0.0);
        assert!((20.0..23.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        assert!(capacity.estimate(Time::from_millis(at)).confidence > 0.4);
    }

    #[test]
    fn a_guess_far_too_high_is_corrected_within_ten_seconds_of_one_flow() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 20.0, 1, 0.0);
        assert!((20.0..23.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
    }

    #[test]
    fn an_estimate_rises_at_once() {
        let mut capacity = Capacity::new(Rate::from_mbps(5), Time::ZERO);
        let at = run(&mut capacity, 0, 1, 100.0, 2, 0.0);
        assert!((mbps(&capacity, at) - 100.0).abs() < 1.0);
    }

    #[test]
    fn one_slow_server_does_not_halve_the_estimate_of_a_proven_link() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 100.0, 3, 0.0);
        let at = run(&mut capacity, at, 20, 100.0, 0, 1.0);
        assert!(mbps(&capacity, at) > 40.0, "{}", mbps(&capacity, at));
    }

    #[test]
    fn delivery_rate_samples_are_limited_by_the_carried_traffic() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 20.0, 3, 0.0);
        for _ in 0..1000 {
            capacity.on_delivery_rate(Time::from_millis(at), Rate::from_mbps(1000));
        }
        assert!(mbps(&capacity, at) <= 25.1, "{}", mbps(&capacity, at));
    }

    #[test]
    fn the_estimate_follows_a_link_that_drops_to_a_fifth() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 50.0, 3, 0.0);
        let at = run(&mut capacity, at, 8, 10.0, 3, 0.0);
        assert!((10.0..12.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        let at = run(&mut capacity, at, 1, 50.0, 3, 0.0);
        assert!(mbps(&capacity, at) > 49.0);
    }

    #[test]
    fn regression_a_failing_link_does_not_lower_its_capacity() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 50.0, 3, 0.0);
        // Its flows keep trying for seconds, and almost nothing gets through.
        let at = run(&mut capacity, at, 4, 0.02, 3, 0.0);
        assert!(mbps(&capacity, at) < 30.0, "so far it looks like a slow link: {}", mbps(&capacity, at));
        capacity.interrupt(Time::from_millis(at));
        assert!((49.0..52.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        // It recovers, and its flows come out of their timeouts one by one.
        let at = run(&mut capacity, at + 1000, 3, 0.1, 3, 0.0);
        assert!((49.0..52.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        let at = run(&mut capacity, at, 12, 5.0, 3, 0.0);
        assert!((5.0..7.0).contains(&mbps(&capacity, at)), "the estimate follows a link that stays slow: {}", mbps(&capacity, at));
    }

    #[test]
    fn an_interrupt_does_not_restore_an_unproven_guess() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 3, 20.0, 3, 0.0);
        let before = mbps(&capacity, at);
        for step in 0..10 {
            capacity.interrupt(Time::from_millis(at + step * 250));
        }
        assert_eq!(mbps(&capacity, at), before);
        let mut untouched = Capacity::new(Rate::from_mbps(7), Time::ZERO);
        untouched.interrupt(Time::from_millis(at));
        assert_eq!(mbps(&untouched, at), 7.0);
    }

    #[test]
    fn idle_time_lowers_the_confidence_only() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 20.0, 3, 0.0);
        let before = capacity.estimate(Time::from_millis(at));
        let at = run(&mut capacity, at, 1200, 20.0, 0, 0.0);
        let after = capacity.estimate(Time::from_millis(at));
        assert_eq!(before.rate, after.rate);
        assert!(after.confidence < before.confidence / 3.0);
    }

    #[test]
    fn a_single_burst_does_not_raise_the_estimate() {
        let mut capacity = Capacity::new(Rate::from_mbps(20), Time::ZERO);
        let mut at = run(&mut capacity, 0, 5, 20.0, 2, 0.0);
        let busy = Busy { flows: 2, destinations: 2, backlogged: true, queued: true };
        capacity.on_interval(Time::from_millis(at), ByteCount::new(10_000_000), STEP, busy);
        at = run(&mut capacity, at + 250, 1, 20.0, 2, 0.0);
        assert!(mbps(&capacity, at) < 25.0, "{}", mbps(&capacity, at));
    }

    #[test]
    fn regression_traffic_that_does_not_fill_the_link_does_not_change_its_capacity() {
        let mut capacity = Capacity::new(Rate::from_mbps(100), Time::ZERO);
        // Acknowledgements and requests at 159 kbit/s, for ten minutes.
        for step in 0..2400 {
            capacity.on_interval(Time::from_millis(step * 250), ByteCount::new(4_970), STEP, Busy::default());
        }
        let estimate = capacity.estimate(Time::from_millis(600_000));
        assert_eq!((estimate.rate, estimate.is_known()), (Rate::from_mbps(100), false));
        let at = run(&mut capacity, 600_000, 5, 12.0, 3, 0.0);
        let estimate = capacity.estimate(Time::from_millis(at));
        assert!(estimate.is_known() && (12.0..13.0).contains(&mbps(&capacity, at)), "{estimate:?}");
    }

    #[test]
    fn a_configured_or_recalled_capacity_is_known() {
        assert!(Capacity::fixed(Rate::from_mbps(7)).estimate(Time::ZERO).is_known());
        let mut capacity = Capacity::new(Rate::from_mbps(100), Time::ZERO);
        assert!(!capacity.estimate(Time::ZERO).is_known());
        capacity.recall(Rate::from_mbps(30));
        assert!(capacity.estimate(Time::from_millis(1)).is_known());
    }

    #[test]
    fn a_configured_capacity_never_changes() {
        let mut capacity = Capacity::fixed(Rate::from_mbps(7));
        let at = run(&mut capacity, 0, 10, 20.0, 3, 0.0);
        assert_eq!(capacity.estimate(Time::from_millis(at)).rate, Rate::from_mbps(7));
    }

    #[test]
    fn the_guess_depends_on_the_kind_of_link() {
        assert_eq!(guess(LinkKind::Wired, Some(Rate::from_mbps(1000))), Rate::from_mbps(1000));
        assert_eq!(guess(LinkKind::Wireless, Some(Rate::from_mbps(300))), Rate::from_mbps(150));
        assert_eq!(guess(LinkKind::Cellular, None), Rate::from_mbps(20));
        assert_eq!(guess(LinkKind::Wired, None), Rate::from_mbps(100));
    }

    #[test]
    fn loss_needs_enough_segments_and_decays() {
        let mut loss = Loss::default();
        loss.on_segments(Time::from_millis(0), 10, 5);
        assert_eq!(loss.rate(Time::from_millis(0)), None);
        loss.on_segments(Time::from_millis(0), 90, 5);
        assert!((loss.rate(Time::from_millis(0)).unwrap() - 0.1).abs() < 1e-9);
        loss.on_segments(Time::from_millis(600_000), 100, 0);
        assert!(loss.rate(Time::from_millis(600_000)).unwrap() < 0.001);
    }

    #[test]
    fn round_trips_are_smoothed() {
        let mut rtt = Rtt::default();
        rtt.on_sample(Time::from_millis(0), Duration::from_millis(80));
        rtt.on_sample(Time::from_millis(1), Duration::from_millis(160));
        assert_eq!(rtt.smoothed(Time::from_millis(1)), Some(Duration::from_millis(90)));
        assert_eq!(rtt.least(), Some(Duration::from_millis(80)));
        assert_eq!(rtt.smoothed(Time::from_millis(700_000)), None);
    }

    proptest! {
        #[test]
        fn power_matches_powf(base in 1e-6..1.0f64, exponent in 0.0..0.999f64) {
            prop_assert!((power(base, exponent) - base.powf(exponent)).abs() < 1e-6);
        }

        #[test]
        fn the_estimate_stays_between_the_guess_and_the_evidence(
            rates in prop::collection::vec(0.0..1000.0f64, 1..100), guess in 1..1000u64, flows in 0..4u32,
        ) {
            let mut capacity = Capacity::new(Rate::from_mbps(guess), Time::ZERO);
            for (step, rate) in rates.iter().enumerate() {
                let busy = Busy { flows, destinations: flows, backlogged: flows > 0, queued: flows > 1 };
                capacity.on_interval(Time::from_millis(step as u64 * 250), ByteCount::new((rate * 31_250.0) as u64), STEP, busy);
            }
            let highest = rates.iter().copied().fold(guess as f64, f64::max);
            let now = mbps(&capacity, rates.len() as u64 * 250);
            prop_assert!(now > 0.0 && now <= highest * 1.001, "{now} over {highest}");
        }
    }
}
