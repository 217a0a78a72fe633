//! What a link can carry, how long its round trip takes and what it loses, learnt from traffic.
//!
//! DBAS II.C.1 measures against servers and combines that with statistics of the normal transfers; here the normal transfers come
//! first, since they cost nothing. A device's counters show what a link carried, which is at most what it can carry: so an estimate
//! rises at once with the evidence and falls only while flows had more to move during the whole interval, and faster the more
//! flows there were, since one of them may be held back by a slow server, several hardly all. The fall is geometric: a first guess
//! from a device's nominal 10 Gbit/s is forgotten within seconds of real bulk traffic.
//!
//! Traffic that never filled the link shows what it carries at least, not what it can: it may raise an estimate, and must not lower one
//! ([`Busy::backlogged`]). Until anything but a guess is behind it, an estimate is not [known](Estimate::is_known), whatever it says.
//!
//! A link that dies carries less and less before it is known to be dead, and flows that come out of their timeouts fill it slowly when
//! it lives again; neither says what it can carry ([`Capacity::interrupt`]).

use std::time::Duration;

use braid_model::{LinkKind, Rate, Time};

/// Intervals shorter than this are gathered until they are long enough to say something.
const INTERVAL_LEAST: Duration = Duration::from_millis(200);
/// The estimate follows the highest of this many intervals in a row.
const WINDOW: usize = 6;
/// Time constant of the fall with one backlogged flow, in seconds.
const FALL_ALONE: f64 = 2.3;
/// Time constant of the fall with two or more.
const FALL_SEVERAL: f64 = 0.6;
/// A capacity that was proven resists this much longer, with one flow or several, while their round trips show a queue.
const PROVEN_QUEUED: [f64; 2] = [4.0, 3.0];
/// And while they show none: then the servers, not the link, are likely to set the pace (a paced video stream, say).
const PROVEN_UNQUEUED: [f64; 2] = [60.0, 12.0];
/// Proofs are forgotten after this.
const PROOF_LIFE: Duration = Duration::from_secs(60);
/// A link may have been dying for this long before that was known: what the estimate lost meanwhile is given back.
const DYING: Duration = Duration::from_secs(10);
/// Flows take this long to fill a link that lives again.
const RECOVERY: Duration = Duration::from_secs(5);
/// Confidence halves in this time without evidence.
const CONFIDENCE_HALF_LIFE: Duration = Duration::from_secs(600);
/// Busy seconds until the confidence is a half.
const CONFIDENCE_SECONDS: f64 = 2.0;

/// What a link of this kind is taken for before anything is known.
///
/// Wired: what the device claims, else 100 Mbit/s. Wireless: half of what it claims (the air is shared and half-duplex), else
/// 50 Mbit/s. Cellular: 20 Mbit/s. Others: what they claim, else 100 Mbit/s.
pub fn guess(kind: LinkKind, nominal: Option<Rate>) -> Rate {
    let claimed = nominal.filter(|rate| *rate > Rate::ZERO);
    match kind {
        LinkKind::Wireless => claimed.map_or(Rate::from_mbps(50), |rate| rate.scale(0.5)),
        LinkKind::Cellular => Rate::from_mbps(20),
        LinkKind::Wired | LinkKind::Vpn | LinkKind::Virtual | LinkKind::Loopback => claimed.unwrap_or(Rate::from_mbps(100)),
    }
}

/// How much the flows of a link had to do during an interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Busy {
    /// Flows that moved something.
    pub flows: u32,
    /// Different remote hosts among theirs.
    pub destinations: u32,
    /// At least one was there, and moved something, all the time, as fast as its way took it: one that had no more to move is none of them.
    pub backlogged: bool,
    /// Round trips were longer than the link's least: packets wait for it.
    pub queued: bool,
}

/// A capacity as it is thought to be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The capacity.
    pub rate: Rate,
    /// How far it is to be trusted: 0 is a guess, 1 is certain.
    pub confidence: f64,
    /// Since the last evidence; `None` if there never was any.
    pub age: Option<Duration>,
}

impl Estimate {
    /// Whether it is more than a guess from what kind of link this is: told by the user, learnt now or in an earlier life.
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
    /// The highest level that traffic has shown lately, and when.
    proven: Option<(f64, Time)>,
    /// The levels that it fell from lately, the highest first, and when it left them.
    fallen: Vec<(f64, Time)>,
    /// It learns of no fall before.
    sound_from: Time,
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
            fallen: Vec::new(),
            sound_from: Time::ZERO,
            gathered: 0,
            gathered_for: Duration::ZERO,
            gathered_busy: None,
        }
    }

    /// A capacity the user knows: it never changes.
    pub fn fixed(rate: Rate) -> Self {
        Self { fixed: true, confidence: 1.0, ..Self::new(rate, Time::ZERO) }
    }

    /// Whether the user knows it.
    pub fn is_fixed(&self) -> bool {
        self.fixed
    }

    /// What was learnt in an earlier life replaces the guess, half-trusted.
    pub fn recall(&mut self, rate: Rate) {
        if !self.fixed && rate > Rate::ZERO && self.evidence.is_none() {
            self.level = rate.bps() as f64;
            self.confidence = self.confidence.max(0.5);
        }
    }

    /// The estimate now.
    pub fn estimate(&self, now: Time) -> Estimate {
        let age = self.evidence.map(|at| now.since(at));
        let confidence = if self.fixed { 1.0 } else { self.confidence * halved(age.unwrap_or_default(), CONFIDENCE_HALF_LIFE) };
        Estimate { rate: Rate::from_bps(self.level as u64), confidence, age }
    }

    /// The link moved `moved` in the `span` that ends now.
    pub fn on_interval(&mut self, now: Time, moved: braid_model::ByteCount, span: Duration, busy: Busy) {
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
        if self.gathered_for < INTERVAL_LEAST {
            return;
        }
        let rate = self.gathered as f64 * 8.0 / self.gathered_for.as_secs_f64();
        let span = self.gathered_for;
        let busy = self.gathered_busy.take().unwrap_or_default();
        (self.gathered, self.gathered_for) = (0, Duration::ZERO);
        self.take(now, rate, span, busy);
    }

    /// The link is dead, or has no carrier, now. What it moved since the last interval says nothing of its capacity; what the estimate
    /// lost within the last ten seconds is given back, as far as traffic had shown it in the minute before; and for five seconds from
    /// the last such call on it does not fall.
    pub fn interrupt(&mut self, now: Time) {
        let lately = self.fallen.iter().filter(|(_, at)| now.since(*at) <= DYING).map(|(level, _)| *level).fold(0.0, f64::max);
        if let Some((proven, _)) = self.proven {
            self.level = self.level.max(lately.min(proven));
        }
        self.recent.clear();
        self.fallen.clear();
        (self.gathered, self.gathered_for, self.gathered_busy) = (0, Duration::ZERO, None);
        self.sound_from = now + RECOVERY;
    }

    fn take(&mut self, now: Time, rate: f64, span: Duration, busy: Busy) {
        if self.recent.len() == WINDOW {
            self.recent.remove(0);
        }
        self.recent.push(rate);
        if self.proven.is_some_and(|(_, at)| now.since(at) > PROOF_LIFE) {
            self.proven = None;
        }
        // One interval may catch a burst out of a buffer: two in a row must agree.
        let shown = self.recent.iter().rev().take(2).copied().fold(f64::INFINITY, f64::min);
        if self.recent.len() >= 2 && shown > 0.0 && self.proven.is_none_or(|(proven, _)| shown >= proven) {
            self.proven = Some((shown, now));
        }
        if self.recent.len() >= 2 && shown >= self.level {
            self.level = shown;
            self.note(now, span);
        } else if busy.backlogged && busy.flows > 0 && now >= self.sound_from {
            self.fall(now, span, busy);
        } else {
            // Nobody wanted more: the interval says nothing of what could have been had.
            self.recent.clear();
        }
    }

    /// Flows had more to move than the link moved: it cannot carry more than its best of late.
    fn fall(&mut self, now: Time, span: Duration, busy: Busy) {
        let best = self.recent.iter().copied().fold(1.0, f64::max);
        if self.recent.len() < 2 || best >= self.level {
            return;
        }
        let several = busy.flows >= 2;
        let mut constant = if several { FALL_SEVERAL } else { FALL_ALONE };
        if self.proven.is_some_and(|(proven, _)| self.level <= proven * 1.02) {
            constant *= if busy.queued { PROVEN_QUEUED } else { PROVEN_UNQUEUED }[usize::from(several)];
        }
        // level moves towards best by the share 1 - exp(-t / constant), on a logarithmic scale: multiplied by (best/level)^share.
        let x = span.as_secs_f64() / constant;
        let share = 1.0 - 1.0 / (1.0 + x + x * x / 2.0 + x * x * x / 6.0);
        // Those that are lower than this one are of no use, nor are those of long ago.
        self.fallen.retain(|(level, at)| *level > self.level && now.since(*at) <= DYING);
        self.fallen.push((self.level, now));
        self.level *= power(best / self.level, share);
        self.note(now, span);
    }

    fn note(&mut self, now: Time, span: Duration) {
        let seconds = span.as_secs_f64();
        self.confidence += (1.0 - self.confidence) * (seconds / (seconds + CONFIDENCE_SECONDS)).min(1.0);
        self.evidence = Some(now);
    }

    /// The kernel's sample of what one flow delivered, while it had more to send: the link carries at least this.
    pub fn on_delivery_rate(&mut self, now: Time, rate: Rate) {
        // Behind a link that gathers acknowledgements a sample can be far too high: it counts only as far as the counters bear it out.
        let best = self.recent.iter().copied().fold(0.0, f64::max);
        let rate = (rate.bps() as f64).min(best * 1.25);
        if !self.fixed && rate > self.level {
            self.level += (rate - self.level) / 8.0;
            self.evidence = Some(now);
        }
    }

    /// An active measurement.
    pub fn on_measured(&mut self, now: Time, rate: Rate) {
        if !self.fixed && rate > Rate::ZERO {
            self.level = rate.bps() as f64;
            self.proven = Some((self.level, now));
            self.confidence = self.confidence.max(0.9);
            self.evidence = Some(now);
        }
    }
}

/// `base` to the power of `exponent` in [0, 1], for `base` in (0, 1], by arithmetic that is the same on every machine.
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

/// What is left of 1 after `age`, halving every `half_life`; straight between the halvings.
pub(crate) fn halved(age: Duration, half_life: Duration) -> f64 {
    let halves = (age.as_secs_f64() / half_life.as_secs_f64()).min(60.0);
    let whole = halves as u32;
    let rest = halves - f64::from(whole);
    (1.0 - rest / 2.0) / (1u64 << whole) as f64
}

/// Round-trip time: smoothed as in RFC 6298, and the least of late.
#[derive(Debug, Clone, Default)]
pub struct Rtt {
    smoothed: Option<Duration>,
    least: Option<(Duration, Time)>,
    at: Time,
}

impl Rtt {
    /// How long the least value counts.
    const LEAST_LIFE: Duration = Duration::from_secs(300);
    /// How long the smoothed one does.
    const SMOOTHED_LIFE: Duration = Duration::from_secs(600);

    /// A measurement.
    pub fn on_sample(&mut self, now: Time, rtt: Duration) {
        self.smoothed = Some(self.smoothed.map_or(rtt, |smoothed| (smoothed * 7 + rtt) / 8));
        if self.least.is_none_or(|(least, at)| rtt <= least || now.since(at) > Self::LEAST_LIFE) {
            self.least = Some((rtt, now));
        }
        self.at = now;
    }

    /// The smoothed time; `None` before the first measurement, and after ten minutes without one.
    pub fn smoothed(&self, now: Time) -> Option<Duration> {
        self.smoothed.filter(|_| now < self.at + Self::SMOOTHED_LIFE)
    }

    /// When the smoothed time becomes too old.
    pub fn poll_timeout(&self, now: Time) -> Option<Time> {
        self.smoothed(now).map(|_| self.at + Self::SMOOTHED_LIFE)
    }

    /// Since the last measurement, and how far the value is to be trusted (0 to 1, half after a minute).
    pub fn age(&self, now: Time) -> Option<(Duration, f64)> {
        self.smoothed.map(|_| (now.since(self.at), halved(now.since(self.at), Duration::from_secs(60))))
    }

    /// The least time of the last minutes.
    pub fn least(&self) -> Option<Duration> {
        self.least.map(|(least, _)| least)
    }
}

/// The share of segments sent again; what is long past counts less.
#[derive(Debug, Clone, Default)]
pub struct Loss {
    sent: f64,
    again: f64,
    at: Time,
}

impl Loss {
    const HALF_LIFE: Duration = Duration::from_secs(60);
    /// Fewer segments than this say nothing.
    const LEAST: f64 = 20.0;

    /// So many segments were sent since the last call, so many of them again.
    pub fn on_segments(&mut self, now: Time, sent: u64, again: u64) {
        let left = halved(now.since(self.at), Self::HALF_LIFE);
        self.sent = self.sent * left + sent as f64;
        self.again = self.again * left + again.min(sent) as f64;
        self.at = now;
    }

    /// Since the last segments, and how far the share is to be trusted (0 to 1, more with the segments it rests on).
    pub fn age(&self, now: Time) -> Option<(Duration, f64)> {
        let weight = self.sent * halved(now.since(self.at), Self::HALF_LIFE);
        (self.sent > 0.0).then(|| (now.since(self.at), weight / (weight + 100.0)))
    }

    /// The share, 0 to 1; `None` while too little was sent to tell.
    pub fn rate(&self, now: Time) -> Option<f64> {
        let left = halved(now.since(self.at), Self::HALF_LIFE);
        (self.sent * left >= Self::LEAST).then(|| self.again / self.sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::ByteCount;
    use proptest::prelude::*;

    const STEP: Duration = Duration::from_millis(250);
    const TEN_GIGABIT: Rate = Rate::from_mbps(10_000);

    /// A link of `mbps` shared by `bulk` flows that want all they can get and one held to `slow_mbps` by its server.
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
    fn a_wild_first_guess_is_forgotten_within_three_seconds_of_several_flows() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 3, 20.0, 3, 0.0);
        assert!((20.0..23.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        assert!(capacity.estimate(Time::from_millis(at)).confidence > 0.4);
    }

    #[test]
    fn and_within_ten_of_one() {
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
    fn one_slow_server_does_not_ruin_a_proven_link() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 100.0, 3, 0.0);
        let at = run(&mut capacity, at, 20, 100.0, 0, 1.0);
        assert!(mbps(&capacity, at) > 40.0, "{}", mbps(&capacity, at));
    }

    #[test]
    fn samples_of_a_sender_do_not_raise_it_above_what_was_carried() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 20.0, 3, 0.0);
        for _ in 0..1000 {
            capacity.on_delivery_rate(Time::from_millis(at), Rate::from_mbps(1000));
        }
        assert!(mbps(&capacity, at) <= 25.1, "{}", mbps(&capacity, at));
    }

    #[test]
    fn a_link_that_falls_to_a_fifth_is_followed() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 50.0, 3, 0.0);
        let at = run(&mut capacity, at, 8, 10.0, 3, 0.0);
        assert!((10.0..12.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        let at = run(&mut capacity, at, 1, 50.0, 3, 0.0);
        assert!(mbps(&capacity, at) > 49.0);
    }

    #[test]
    fn regression_a_dying_link_does_not_teach_its_capacity() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 50.0, 3, 0.0);
        // Its flows still try for seconds, and next to nothing gets through.
        let at = run(&mut capacity, at, 4, 0.02, 3, 0.0);
        assert!(mbps(&capacity, at) < 30.0, "nothing tells it from a slow link so far: {}", mbps(&capacity, at));
        capacity.interrupt(Time::from_millis(at));
        assert!((49.0..52.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        // It lives again, and its flows come out of their timeouts one by one.
        let at = run(&mut capacity, at + 1000, 3, 0.1, 3, 0.0);
        assert!((49.0..52.0).contains(&mbps(&capacity, at)), "{}", mbps(&capacity, at));
        let at = run(&mut capacity, at, 12, 5.0, 3, 0.0);
        assert!((5.0..7.0).contains(&mbps(&capacity, at)), "one that stays slow is followed: {}", mbps(&capacity, at));
    }

    #[test]
    fn a_death_does_not_bring_a_wild_guess_back() {
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
    fn idleness_changes_the_confidence_only() {
        let mut capacity = Capacity::new(TEN_GIGABIT, Time::ZERO);
        let at = run(&mut capacity, 0, 10, 20.0, 3, 0.0);
        let before = capacity.estimate(Time::from_millis(at));
        let at = run(&mut capacity, at, 1200, 20.0, 0, 0.0);
        let after = capacity.estimate(Time::from_millis(at));
        assert_eq!(before.rate, after.rate);
        assert!(after.confidence < before.confidence / 3.0);
    }

    #[test]
    fn a_single_burst_is_not_believed() {
        let mut capacity = Capacity::new(Rate::from_mbps(20), Time::ZERO);
        let mut at = run(&mut capacity, 0, 5, 20.0, 2, 0.0);
        let busy = Busy { flows: 2, destinations: 2, backlogged: true, queued: true };
        capacity.on_interval(Time::from_millis(at), ByteCount::new(10_000_000), STEP, busy);
        at = run(&mut capacity, at + 250, 1, 20.0, 2, 0.0);
        assert!(mbps(&capacity, at) < 25.0, "{}", mbps(&capacity, at));
    }

    #[test]
    fn regression_traffic_that_leaves_the_link_empty_teaches_no_capacity() {
        let mut capacity = Capacity::new(Rate::from_mbps(100), Time::ZERO);
        // Acknowledgements and requests of 159 kbit/s, for ten minutes.
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
    fn what_is_told_and_what_was_learnt_before_is_known() {
        assert!(Capacity::fixed(Rate::from_mbps(7)).estimate(Time::ZERO).is_known());
        let mut capacity = Capacity::new(Rate::from_mbps(100), Time::ZERO);
        assert!(!capacity.estimate(Time::ZERO).is_known());
        capacity.recall(Rate::from_mbps(30));
        assert!(capacity.estimate(Time::from_millis(1)).is_known());
    }

    #[test]
    fn what_the_user_knows_never_changes() {
        let mut capacity = Capacity::fixed(Rate::from_mbps(7));
        let at = run(&mut capacity, 0, 10, 20.0, 3, 0.0);
        assert_eq!(capacity.estimate(Time::from_millis(at)).rate, Rate::from_mbps(7));
    }

    #[test]
    fn guesses_follow_the_kind() {
        assert_eq!(guess(LinkKind::Wired, Some(Rate::from_mbps(1000))), Rate::from_mbps(1000));
        assert_eq!(guess(LinkKind::Wireless, Some(Rate::from_mbps(300))), Rate::from_mbps(150));
        assert_eq!(guess(LinkKind::Cellular, None), Rate::from_mbps(20));
        assert_eq!(guess(LinkKind::Wired, None), Rate::from_mbps(100));
    }

    #[test]
    fn loss_is_told_once_enough_was_sent_and_forgets() {
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
        fn power_is_right(base in 1e-6..1.0f64, exponent in 0.0..0.999f64) {
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
