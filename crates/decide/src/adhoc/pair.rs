//! A neighbour over one radio: whether it is reached, its round trip and its loss.

use std::time::Duration;

use braid_model::Time;

use crate::virtual_interface::Srtt;

/// Interval between samples of the round trip: the mean of what was measured meanwhile is one. The paper samples every 5 s; with equation 1 and a weight of 1/8 it
/// would take 40 s to follow a change.
pub const SAMPLED: Duration = Duration::from_secs(1);
/// A pair over which frames leave, but over which nothing came for this time or two round trips, is probed.
const SUSPICION: Duration = Duration::from_millis(40);
/// Interval of probes of a suspected pair.
const PROBED: Duration = Duration::from_millis(20);
/// Number of probes without an answer after which a pair is dead, if the first of them is as old as [`PATIENCE`] or three round trips. At a loss of 5 % of all
/// frames they stay unanswered one time in 10,000.
const PROBES: u32 = 4;
/// See [`PROBES`]. Together with [`SUSPICION`] less than the shortest retransmission timer of TCP on Linux (200 ms): the first retransmission takes another radio.
const PATIENCE: Duration = Duration::from_millis(80);
/// Interval of probes of a dead pair, and after [`PATIENT_PROBES`] of them.
const DEAD_PROBED: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(5)];
const PATIENT_PROBES: u32 = 20;
/// Frames left for the neighbour within this time: its round trip matters.
const TALKING: Duration = Duration::from_secs(10);
/// Probes whose answers count.
const OUTSTANDING: u32 = 8;

/// What the programs in the kernel counted for a pair since they began.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// When a frame of the neighbour arrived last; zero: never.
    pub heard: Time,
    /// When a frame left for it last; zero: never.
    pub sent: Time,
    /// Sum of measured round trips.
    pub round_trips: Duration,
    /// Number of measured round trips.
    pub samples: u32,
}

/// A probe to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// Its number.
    pub sequence: u32,
    /// Whether it is an echo request of Braid, which a plain host does not answer.
    pub is_echo: bool,
}

/// State of a pair.
#[derive(Debug, Clone)]
pub struct Pair {
    /// Whether the neighbour answers echoes, as far as this is known: it announced itself before anything else was heard, or has answered one.
    echoes: bool,
    /// A plain host has announced itself: an echo will tell.
    offers: bool,
    /// Whether the neighbour has answered over this radio.
    proven: bool,
    heard: Time,
    /// The first frame that left after anything was heard.
    unanswered: Option<Time>,
    counted: Counted,
    srtt: Srtt,
    /// Round trips since the last sample for `srtt`.
    sum: Duration,
    samples: u32,
    sampled: Time,
    probes: Probes,
    /// When it was probed out of turn.
    asked: Option<Time>,
    dead: bool,
    announcements: Announcements,
    /// Place of the neighbour's radio, if it runs Braid.
    remote: Option<u8>,
}

/// Probes since the neighbour was heard.
#[derive(Debug, Clone, Copy, Default)]
struct Probes {
    sequence: u32,
    /// Number of all.
    sent: u32,
    /// The first and the last one, and their number.
    first: Time,
    last: Time,
    unanswered: u32,
    /// The one whose answer is a sample.
    timed: Option<(u32, Time)>,
}

impl Pair {
    /// A pair whose neighbour was heard at `heard`, by a frame that is no announcement. It counts as living.
    pub fn plain(heard: Time) -> Self {
        Self {
            echoes: false,
            offers: false,
            proven: false,
            heard,
            unanswered: None,
            counted: Counted::default(),
            srtt: Srtt::default(),
            sum: Duration::ZERO,
            samples: 0,
            sampled: heard,
            probes: Probes::default(),
            asked: None,
            dead: false,
            announcements: Announcements::default(),
            remote: None,
        }
    }

    /// A pair whose neighbour announced itself at `heard`. It is dead until the neighbour answers an echo: an announcement can be forged, and a radio that receives
    /// may be out of reach in the other direction. The numbers of probes begin at `seed`, a random number, so that an answer proves that the probe arrived.
    pub fn announced(heard: Time, seed: u32) -> Self {
        let probes = Probes { sequence: seed, ..Probes::default() };
        Self { echoes: true, dead: true, probes, ..Self::plain(heard) }
    }

    /// Whether the neighbour has answered over this radio.
    pub fn is_proven(&self) -> bool {
        self.proven
    }

    /// Whether it is probed by echoes, because the neighbour seems to run Braid.
    pub fn answers_echoes(&self) -> bool {
        self.echoes
    }

    /// Whether a plain host has announced itself, so that one echo will tell whether it runs Braid.
    pub fn is_offered(&self) -> bool {
        self.offers
    }

    /// A plain host has sent a frame after this host sent it one.
    pub fn prove(&mut self) {
        self.proven |= !self.echoes;
    }

    /// Whether the neighbour runs Braid: it has answered an echo.
    pub fn is_braid(&self) -> bool {
        self.echoes && self.proven
    }

    /// When the neighbour was heard last.
    pub fn heard(&self) -> Time {
        self.heard
    }

    /// Whether frames leave and none arrives.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Smoothed round trip (equation 1); `None`: not measured.
    pub fn srtt(&self) -> Option<Duration> {
        self.srtt.get()
    }

    /// Share of the neighbour's announcements that did not arrive, from 0 to 1; `None` before there were any.
    pub fn loss(&self) -> Option<f64> {
        self.announcements.loss()
    }

    /// Takes the kernel's counts. Whatever arrives after a probe answers it, if the neighbour does not run Braid.
    pub fn on_counted(&mut self, now: Time, counted: Counted) {
        let before = std::mem::replace(&mut self.counted, counted);
        // Counters that went back began again at zero.
        let known = if counted.samples < before.samples { Counted::default() } else { before };
        self.sum += counted.round_trips.saturating_sub(known.round_trips);
        self.samples = self.samples.saturating_add(counted.samples - known.samples);
        let before = before.heard;
        if !self.echoes && self.probes.unanswered > 0 && counted.heard > self.probes.last {
            self.on_answer(counted.heard, self.probes.sequence);
        } else if counted.heard > before {
            self.on_heard(counted.heard);
        }
        if counted.sent > self.heard {
            self.unanswered.get_or_insert(counted.sent);
        }
        self.take_sample(now);
    }

    /// A frame of the neighbour arrived, other than an announcement or an answer.
    pub fn on_heard(&mut self, at: Time) {
        self.heard = self.heard.max(at);
        // Frames that still arrive over a dead pair do not prove the other direction. Only an answer does.
        if !self.dead {
            self.unanswered = self.unanswered.filter(|sent| *sent > at);
            self.probes.unanswered = 0;
        }
    }

    /// An announcement with this number arrived.
    pub fn on_announcement(&mut self, at: Time, sequence: u32) {
        self.announcements.note(sequence);
        self.heard = self.heard.max(at);
        self.offers |= !self.echoes;
    }

    /// A frame over this pair left the neighbour's radio with this place.
    pub fn set_remote(&mut self, radio: u8) {
        self.remote = Some(radio);
    }

    /// The neighbour says which of its radios work, a bit for each place.
    pub fn on_working(&mut self, works: u8) {
        self.dead |= self.echoes && self.remote.is_some_and(|radio| works >> radio & 1 == 0);
    }

    /// The radio has lost its carrier. With a carrier again it must answer an echo before it is used.
    pub fn lose(&mut self) {
        self.dead |= self.echoes;
    }

    /// The answer to the echo with this number arrived. Returns false for one that is not outstanding.
    pub fn on_reply(&mut self, now: Time, sequence: u32) -> bool {
        if self.probes.sequence.wrapping_sub(sequence) >= OUTSTANDING.min(self.probes.sent) {
            return false;
        }
        self.echoes = true;
        self.offers = false;
        self.on_answer(now, sequence);
        true
    }

    fn on_answer(&mut self, now: Time, sequence: u32) {
        if let Some((_, sent)) = self.probes.timed.take_if(|(timed, _)| *timed == sequence) {
            let round_trip = now.since(sent);
            if self.dead && self.proven {
                // It was slower than its round trip let expect: that is known at once, not by an eighth.
                self.srtt = Srtt::default();
            }
            self.add_sample(round_trip);
        }
        self.dead = false;
        self.proven = true;
        self.on_heard(now);
    }

    /// Adds a measured round trip.
    pub fn add_sample(&mut self, round_trip: Duration) {
        self.sum += round_trip;
        self.samples = self.samples.saturating_add(1);
    }

    /// Whether frames have left for the neighbour over this radio, not long ago.
    pub fn is_talking(&self, now: Time) -> bool {
        now.since(self.counted.sent) < TALKING
    }

    /// A probe to send now, if one is due. `idle`: the pair of a neighbour to which frames leave over any radio (`talks`) is probed if it has no sample for this time,
    /// and any pair after ten times this.
    pub fn probe(&mut self, now: Time, idle: Duration, talks: bool) -> Option<Probe> {
        self.judge(now);
        let since_last = now.since(self.probes.last);
        let idle = if talks || self.srtt.get().is_none() { idle } else { idle * 10 };
        let due = if self.dead {
            since_last >= DEAD_PROBED[usize::from(self.probes.unanswered > PATIENT_PROBES)]
        } else if self.is_suspected(now) {
            since_last >= PROBED
        } else {
            now.since(self.sampled) >= idle && self.samples == 0 && since_last >= idle
        };
        let offered = self.offers && since_last >= DEAD_PROBED[0];
        if !due && !offered {
            return None;
        }
        self.offers = false;
        let probes = &mut self.probes;
        probes.sequence = probes.sequence.wrapping_add(1);
        probes.sent = probes.sent.saturating_add(1);
        if probes.unanswered == 0 {
            probes.first = now;
        }
        probes.unanswered = probes.unanswered.saturating_add(1);
        probes.last = now;
        if probes.timed.is_none_or(|(_, sent)| now.since(sent) > Duration::from_secs(5)) {
            probes.timed = Some((probes.sequence, now));
        }
        Some(Probe { sequence: probes.sequence, is_echo: self.echoes || offered })
    }

    /// The number of a probe out of turn; `None`: there was one within the last second. Its answer counts, its absence does not, and the others are not delayed: whoever
    /// has recorded a frame can cause this.
    pub fn ask(&mut self, now: Time) -> Option<u32> {
        if self.asked.is_some_and(|asked| now.since(asked) < SAMPLED) {
            return None;
        }
        self.asked = Some(now);
        self.probes.sequence = self.probes.sequence.wrapping_add(1);
        self.probes.sent = self.probes.sent.saturating_add(1);
        Some(self.probes.sequence)
    }

    /// Whether something is missing, so that the pair must be looked at soon.
    pub fn is_suspected(&self, now: Time) -> bool {
        self.unanswered.is_some_and(|sent| now.since(sent) >= self.patience(SUSPICION, 2))
            || self.probes.unanswered > 0 && now.since(self.probes.last) >= self.patience(SUSPICION, 2)
    }

    /// Whether frames leave now, so that a failure must be found soon.
    pub fn is_busy(&self, now: Time) -> bool {
        self.is_suspected(now) || now.since(self.counted.sent) < SAMPLED
    }

    fn judge(&mut self, now: Time) {
        let probes = &self.probes;
        if probes.unanswered >= PROBES && now.since(probes.first) >= self.patience(PATIENCE, 3) {
            self.dead = true;
        }
    }

    fn patience(&self, least: Duration, round_trips: u32) -> Duration {
        self.srtt.get().map_or(least, |srtt| least.max(srtt * round_trips))
    }

    fn take_sample(&mut self, now: Time) {
        if self.samples > 0 && (self.srtt.get().is_none() || now.since(self.sampled) >= SAMPLED) {
            self.srtt.sample(self.sum / self.samples);
            (self.sum, self.samples, self.sampled) = (Duration::ZERO, 0, now);
        }
    }
}

/// Which of the neighbour's last 64 announcements arrived.
#[derive(Debug, Clone, Copy, Default)]
struct Announcements {
    last: u32,
    /// The lowest bit is the last one.
    arrived: u64,
    expected: u32,
}

impl Announcements {
    fn note(&mut self, sequence: u32) {
        let ahead = sequence.wrapping_sub(self.last);
        let behind = self.last.wrapping_sub(sequence);
        if self.expected == 0 || ahead > 1000 && behind > 1000 {
            // The first one, or the neighbour has started again.
            *self = Self { last: sequence, arrived: 1, expected: 1 };
        } else if ahead <= 1000 {
            self.arrived = self.arrived.checked_shl(ahead).unwrap_or(0) | 1;
            self.expected = (self.expected + ahead).min(64);
            self.last = sequence;
        } else if behind < 64 {
            self.arrived |= 1 << behind;
        }
    }

    fn loss(&self) -> Option<f64> {
        let mask = if self.expected >= 64 { u64::MAX } else { (1 << self.expected) - 1 };
        let arrived = (self.arrived & mask).count_ones();
        (self.expected > 0).then(|| 1.0 - f64::from(arrived) / f64::from(self.expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;
    const IDLE: Duration = Duration::from_secs(1);

    /// A probe of a neighbour that has no other radio.
    fn probed(pair: &mut Pair, ms: u64) -> Option<Probe> {
        let talks = pair.is_talking(at(ms));
        pair.probe(at(ms), IDLE, talks)
    }

    fn at(ms: u64) -> Time {
        Time::ZERO + MS(1000 + ms)
    }

    /// A pair that has answered.
    fn lively() -> Pair {
        let mut pair = Pair::announced(at(0), 7);
        let probe = probed(&mut pair, 0).unwrap();
        assert!(pair.is_dead() && !pair.is_proven());
        assert!(pair.on_reply(at(0), probe.sequence) && pair.is_braid());
        (pair.sum, pair.samples) = (Duration::ZERO, 0);
        pair
    }

    fn sent(pair: &mut Pair, now: u64, sent: u64, heard: u64) {
        pair.on_counted(at(now), Counted { heard: at(heard), sent: at(sent), ..pair.counted });
    }

    #[test]
    fn a_black_hole_is_dead_before_tcp_sends_again() {
        let mut pair = lively();
        sent(&mut pair, 0, 0, 0);
        let (mut probes, mut now) = (0, 0);
        while !pair.is_dead() {
            // As often as the process looks.
            now += 10;
            sent(&mut pair, now, now, 0);
            probes += u32::from(probed(&mut pair, now).is_some());
            assert!(now < 200, "{pair:?}");
        }
        assert!(now >= 120 && probes >= PROBES, "{now} ms, {probes} probes");
    }

    #[test]
    fn a_pair_that_hears_stays_alive_and_is_not_probed() {
        let mut pair = lively();
        for now in (0..2000).step_by(10) {
            sent(&mut pair, now, now, now);
            pair.add_sample(MS(5));
            assert_eq!(probed(&mut pair, now), None);
        }
        assert!(!pair.is_dead());
    }

    #[test]
    fn a_dead_pair_lives_again_with_an_answer_not_with_what_it_hears() {
        let mut pair = lively();
        for now in (0..400).step_by(10) {
            sent(&mut pair, now, now, 0);
            probed(&mut pair, now);
        }
        assert!(pair.is_dead());
        pair.on_announcement(at(500), 1);
        pair.on_heard(at(510));
        assert!(pair.is_dead());
        let probe = (510..2000).step_by(10).find_map(|now| probed(&mut pair, now)).unwrap();
        for other in [probe.sequence + 1, probe.sequence - 8, 0] {
            assert!(!pair.on_reply(at(2000), other), "it is not outstanding");
        }
        assert!(pair.is_dead());
        assert!(pair.on_reply(at(2000), probe.sequence));
        assert!(!pair.is_dead() && pair.heard() == at(2000));
    }

    #[test]
    fn a_question_out_of_turn_is_answered_and_accuses_nobody() {
        let mut pair = lively();
        for now in (0..400).step_by(10) {
            pair.ask(at(now));
        }
        assert!(probed(&mut pair, 400).is_none() && !pair.is_dead());
        let sequence = pair.ask(at(1000)).unwrap();
        assert_eq!(pair.ask(at(1510)), None, "one a second, whatever arrives");
        assert!(pair.on_reply(at(1520), sequence));
    }

    #[test]
    fn questions_out_of_turn_do_not_delay_probes() {
        let mut pair = lively();
        for now in (0..200).step_by(10) {
            sent(&mut pair, now, now, 0);
            pair.ask(at(now));
            probed(&mut pair, now);
        }
        assert!(pair.is_dead());
    }

    #[test]
    fn a_long_round_trip_has_patience() {
        let mut pair = lively();
        pair.add_sample(MS(400));
        pair.on_counted(at(0), Counted { heard: at(0), ..Counted::default() });
        for now in (0..1200).step_by(10) {
            sent(&mut pair, now, now, 0);
            probed(&mut pair, now);
        }
        assert!(!pair.is_dead(), "800 ms of suspicion and 1,200 ms of patience");
    }

    #[test]
    fn an_idle_pair_is_probed_each_second_and_the_answer_is_a_sample() {
        let mut pair = lively();
        assert_eq!(probed(&mut pair, 990), None);
        let probe = probed(&mut pair, 1000).unwrap();
        assert_eq!(probed(&mut pair, 1010), None);
        assert!(pair.on_reply(at(1030), probe.sequence));
        pair.on_counted(at(1030), Counted::default());
        assert_eq!(pair.srtt(), Some(MS(30)));
        assert_eq!(probed(&mut pair, 2000), None);
        assert!(probed(&mut pair, 2030).is_some());
    }

    #[test]
    fn the_kernels_samples_are_averaged_each_second_and_smoothed() {
        let mut pair = lively();
        let counted = |round_trips, samples| Counted { heard: at(0), round_trips: MS(round_trips), samples, ..Counted::default() };
        pair.on_counted(at(0), counted(80, 1));
        assert_eq!(pair.srtt(), Some(MS(80)));
        pair.on_counted(at(500), counted(280, 2));
        pair.on_counted(at(1000), counted(400, 3));
        assert_eq!(pair.srtt(), Some(MS(90)), "a mean of 160 ms, by an eighth");
    }

    #[test]
    fn regression_counters_that_begin_again_are_no_samples_of_zero() {
        let mut pair = lively();
        let counted = |round_trips, samples| Counted { heard: at(0), round_trips: MS(round_trips), samples, ..Counted::default() };
        pair.on_counted(at(0), counted(80, 1));
        pair.on_counted(at(1000), counted(0, 0));
        pair.on_counted(at(2000), counted(80, 1));
        assert_eq!(pair.srtt(), Some(MS(80)));
    }

    #[test]
    fn loss_is_the_share_of_missing_announcements() {
        let mut pair = lively();
        assert_eq!(pair.loss(), None);
        for sequence in (u32::MAX - 9..=u32::MAX).chain(0..10).filter(|sequence| sequence % 4 != 1) {
            pair.on_announcement(at(0), sequence);
        }
        assert!((pair.loss().unwrap() - 0.25).abs() < 0.06, "{:?}", pair.loss());
        pair.on_announcement(at(0), 5_000_000);
        assert_eq!(pair.loss(), Some(0.0), "the neighbour has started again");
        pair.on_announcement(at(0), 5_000_500);
        assert!(pair.loss().unwrap() > 0.98);
    }
}
