//! Whether one family of one link lives: a state machine without I/O.
//!
//! Proof of life is an answer or bytes that arrived. A sign of failure (a stall, a timeout) triggers a probe, and counts as one unanswered
//! probe. A link with carrier may reach nothing, so probes leave by the link itself. Sans-IO: the caller sends the probes and passes the time.
//!
//! Detection: with a routine probe every [`CONTINUOUS_PERIOD`], two unanswered ones in a row mark an idle link dead within a second while the
//! round trip is under 200 ms; after a stall or a timeout one is enough. An unanswered SYN triggers a probe and counts for nothing: servers die more
//! often than links.

use std::time::Duration;

use braid_model::Time;

use crate::policy::ProbeMode;

/// Time between routine probes of an eager link.
pub const CONTINUOUS_PERIOD: Duration = Duration::from_millis(300);
/// Time between routine probes of a sparing link at first; it doubles up to [`ON_DEMAND_MOST`].
pub const ON_DEMAND_PERIOD: Duration = Duration::from_secs(30);
/// The longest time between routine probes of a sparing link.
pub const ON_DEMAND_MOST: Duration = Duration::from_secs(300);
/// Time between probes of a dead link at first.
pub const DEAD_PERIOD: Duration = Duration::from_millis(500);
/// The longest time between probes of a dead link that is sparing.
pub const DEAD_MOST: Duration = Duration::from_secs(5);
/// Every so many routine probes one asks a destination instead of the gateway, if one is known: third parties are not probed three times a second.
const THOROUGH_EVERY: u32 = 10;
/// Half-life of the count of deaths.
const FLAP_HALF_LIFE: Duration = Duration::from_secs(30);
/// A timeout counts for nothing where the link has proven this recently that it lives: it takes its time to show.
const FRESH: Duration = Duration::from_millis(500);
/// A stall this soon after an answer triggers no probe: most are idle applications.
const ASKED: Duration = Duration::from_secs(1);
/// How long a probe may take before any round trip is known.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the probe of a dead link may take: it may have come back slow.
const DEAD_PATIENCE: Duration = Duration::from_secs(3);
/// The longest time a flapping link is kept out.
const HOLD_MOST: Duration = Duration::from_secs(30);

/// The state of the link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// No carrier, address or route.
    Unusable,
    /// Not judged yet: treated as living.
    Unknown,
    /// Proven to live.
    Alive,
    /// Under suspicion, being asked: still treated as living.
    Suspect,
    /// No answer.
    Dead,
    /// Something else answers in the Internet's place.
    Portal,
}

/// A sign of death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suffering {
    /// Nobody answered a connection's first segment in time.
    NoAnswer,
    /// A segment was not acknowledged in time.
    Timeout,
    /// Flows were receiving and receive nothing any more.
    Stall,
}

/// The result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// An answer, after this time.
    Alive {
        /// Round-trip time.
        rtt: Duration,
    },
    /// No answer in time.
    Silent,
    /// A wrong answer: a captive portal.
    Portal,
    /// No probe could be sent: no target is known, or the system refused. After a timeout or an unanswered SYN it counts as silence.
    Unasked,
}

/// A probe that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeRequest {
    /// How long to wait for an answer.
    pub timeout: Duration,
    /// Ask destinations instead of the gateway, where any are known.
    pub thorough: bool,
}

/// The state machine of one link and family.
#[derive(Debug, Clone)]
pub struct Health {
    mode: ProbeMode,
    judgement: Judgement,
    /// Smoothed round-trip time of probes.
    srtt: Option<Duration>,
    last_proof: Option<Time>,
    /// When a probe was answered last.
    last_answer: Option<Time>,
    /// When the next probe is due.
    next_probe: Option<Time>,
    /// A probe is under way; if its outcome never comes it counts as silent then.
    waiting_until: Option<Time>,
    /// Signs of death in a row: silent probes, and a stall or timeout as one.
    silent: u32,
    /// The time between probes now.
    period: Duration,
    routine: u32,
    /// Recent deaths, decayed, and when that was brought up to date.
    deaths: f64,
    deaths_at: Time,
    /// A flapping link is kept out until then.
    hold_until: Option<Time>,
    last_sign: Option<Suffering>,
    /// When it became suspect.
    suspect_since: Option<Time>,
    /// It is suspected or dead by its traffic alone: nobody could be asked.
    unasked: bool,
}

impl Health {
    /// A link that has nothing yet.
    pub fn new(mode: ProbeMode, now: Time) -> Self {
        Self {
            mode,
            judgement: Judgement::Unusable,
            srtt: None,
            last_proof: None,
            last_answer: None,
            next_probe: None,
            waiting_until: None,
            silent: 0,
            period: Duration::ZERO,
            routine: 0,
            deaths: 0.0,
            deaths_at: now,
            hold_until: None,
            last_sign: None,
            suspect_since: None,
            unasked: false,
        }
    }

    /// Whether it is called dead by its traffic alone, since nobody could be asked. Flows are not ended for that.
    pub fn is_presumed(&self) -> bool {
        self.unasked
    }

    /// Another entry holds for the link: what is known of it stays, and it is probed by the new mode from now on.
    pub fn set_mode(&mut self, now: Time, mode: ProbeMode) {
        self.mode = mode;
        if mode == ProbeMode::Continuous {
            // A dead link that was sparing has backed off; an eager one never does.
            self.period = self.period.min(DEAD_PERIOD);
        }
        if self.next_probe.is_some() {
            self.probe_again(now, Duration::ZERO);
        }
    }

    /// How it is probed.
    pub fn mode(&self) -> ProbeMode {
        self.mode
    }

    /// What is held of it now.
    pub fn judgement(&self) -> Judgement {
        self.judgement
    }

    /// Whether it may be given new flows.
    pub fn alive(&self) -> bool {
        matches!(self.judgement, Judgement::Unknown | Judgement::Alive | Judgement::Suspect)
    }

    /// Why it is not, for people.
    pub fn reason(&self) -> Option<String> {
        let why = match self.judgement {
            Judgement::Portal => "something else answers in the Internet's place: a captive portal wants to be opened in a browser",
            Judgement::Dead if self.hold_until.is_some() => "it comes and goes: it is kept out until it stays",
            Judgement::Dead => match self.last_sign {
                Some(Suffering::NoAnswer) => "connections and probes get no answer",
                Some(Suffering::Timeout) => "segments and probes get no answer",
                Some(Suffering::Stall) => "its flows receive nothing and probes get no answer",
                None => "probes get no answer",
            },
            _ => return None,
        };
        Some(why.to_owned())
    }

    /// Carrier, address and default route are there, or not.
    pub fn on_usable(&mut self, now: Time, usable: bool) {
        match (usable, self.judgement) {
            (true, Judgement::Unusable) => {
                self.silent = 0;
                self.last_sign = None;
                self.judgement = Judgement::Unknown;
                self.hold(now);
                if self.hold_until.is_some() {
                    self.judgement = Judgement::Dead;
                    self.period = DEAD_PERIOD;
                }
                self.probe_again(now, Duration::ZERO);
            }
            (false, judgement) if judgement != Judgement::Unusable => {
                // One that goes while it is kept out for coming and going has not stayed either.
                if judgement != Judgement::Dead || self.hold_until.is_some() {
                    self.count_death(now);
                }
                self.judgement = Judgement::Unusable;
                self.next_probe = None;
                self.waiting_until = None;
            }
            _ => {}
        }
    }

    /// Bytes or an acknowledgement arrived some time between `since` and now. What may have come before the suspicion arose does not
    /// allay it.
    pub fn on_progress(&mut self, now: Time, since: Time) {
        let doubted = matches!(self.judgement, Judgement::Suspect | Judgement::Dead);
        let stale = doubted && self.suspect_since.is_some_and(|suspicion| since < suspicion);
        if self.judgement == Judgement::Unusable || self.judgement == Judgement::Portal || self.held(now) || stale {
            return;
        }
        self.revive(now);
    }

    /// A sign of death: it is asked at once.
    pub fn on_suffering(&mut self, now: Time, sign: Suffering) {
        if !self.alive() {
            return;
        }
        let outweighed = match sign {
            // What arrived before does not speak against it, but whoever was asked just now is not asked again.
            Suffering::Stall => self.last_answer.is_some_and(|answer| now.since(answer) < ASKED),
            Suffering::NoAnswer | Suffering::Timeout => self.last_proof.is_some_and(|proof| now.since(proof) < FRESH),
        };
        if outweighed {
            return;
        }
        self.last_sign = Some(sign);
        if sign != Suffering::NoAnswer {
            self.silent = self.silent.max(1);
        }
        if self.judgement != Judgement::Suspect {
            self.suspect(now);
            if self.waiting_until.is_none() {
                self.probe_again(now, Duration::ZERO);
            }
        }
    }

    fn suspect(&mut self, now: Time) {
        self.judgement = Judgement::Suspect;
        self.suspect_since = Some(now);
    }

    /// The outcome of the probe under way.
    pub fn on_probe(&mut self, now: Time, outcome: Outcome) {
        self.waiting_until = None;
        if self.judgement == Judgement::Unusable {
            return;
        }
        match outcome {
            Outcome::Alive { rtt } => {
                self.last_answer = Some(now);
                self.srtt = Some(self.srtt.map_or(rtt, |srtt| (srtt * 7 + rtt) / 8));
                if self.held(now) {
                    self.probe_again(now, DEAD_PERIOD);
                } else {
                    self.revive(now);
                }
            }
            Outcome::Silent => {
                self.unasked = false;
                self.on_silence(now);
            }
            Outcome::Portal => {
                if self.judgement != Judgement::Portal {
                    self.count_death(now);
                    self.period = DEAD_PERIOD;
                }
                self.judgement = Judgement::Portal;
                self.back_off(now);
            }
            Outcome::Unasked => self.on_unasked(now),
        }
    }

    fn on_unasked(&mut self, now: Time) {
        match self.judgement {
            // Nothing refutes the sign for which it was to be asked. A stall may be a pause as well.
            Judgement::Suspect if self.last_sign != Some(Suffering::Stall) => {
                self.unasked = true;
                self.on_silence(now);
            }
            // Where that could be asked of nobody, its return cannot be found out either, other than by traffic.
            Judgement::Suspect => self.try_it(now),
            Judgement::Dead if self.unasked && !self.held(now) => self.try_it(now),
            Judgement::Alive => self.probe_again(now, self.period),
            _ => {
                self.period = self.period.max(DEAD_PERIOD);
                self.back_off(now);
            }
        }
    }

    /// Nothing is known of it: it is tried.
    fn try_it(&mut self, now: Time) {
        self.judgement = Judgement::Unknown;
        self.silent = 0;
        self.last_sign = None;
        self.suspect_since = None;
        self.unasked = false;
        self.period = self.period.max(DEAD_PERIOD);
        self.back_off(now);
    }

    fn on_silence(&mut self, now: Time) {
        self.silent = self.silent.saturating_add(1);
        match self.judgement {
            Judgement::Dead | Judgement::Portal => self.back_off(now),
            _ if self.silent >= 2 => {
                self.count_death(now);
                self.judgement = Judgement::Dead;
                self.period = DEAD_PERIOD;
                self.probe_again(now, DEAD_PERIOD);
            }
            _ => {
                self.suspect(now);
                self.probe_again(now, Duration::ZERO);
            }
        }
    }

    /// The probe that is due now, if one is. The caller sends it and reports by [`on_probe`](Self::on_probe).
    pub fn poll_probe(&mut self, now: Time) -> Option<ProbeRequest> {
        self.next_probe.filter(|due| *due <= now)?;
        self.next_probe = None;
        let timeout = self.timeout();
        // The outcome should come by itself; if it never does, that is silence too.
        self.waiting_until = Some(now + timeout + Duration::from_secs(1));
        self.routine = self.routine.wrapping_add(1);
        let thorough =
            self.judgement != Judgement::Alive || self.mode == ProbeMode::OnDemand || self.routine.is_multiple_of(THOROUGH_EVERY);
        Some(ProbeRequest { timeout, thorough })
    }

    fn timeout(&self) -> Duration {
        match self.srtt {
            _ if !self.alive() => DEAD_PATIENCE,
            None => PATIENCE,
            Some(srtt) => (srtt * 3 / 2 + Duration::from_millis(50)).clamp(Duration::from_millis(200), Duration::from_secs(2)),
        }
    }

    /// Lets time pass.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.waiting_until.is_some_and(|until| until <= now) {
            self.on_probe(now, Outcome::Silent);
        }
        if self.hold_until.is_some_and(|until| until <= now) {
            self.hold_until = None;
            if self.judgement == Judgement::Dead && self.waiting_until.is_none() {
                self.probe_again(now, Duration::ZERO);
            }
        }
    }

    /// When something is due: a probe, or the end of a wait.
    pub fn poll_timeout(&self) -> Option<Time> {
        [self.next_probe, self.waiting_until, self.hold_until].into_iter().flatten().min()
    }

    fn probe_again(&mut self, now: Time, after: Duration) {
        self.next_probe = Some(now + after);
    }

    fn back_off(&mut self, now: Time) {
        self.probe_again(now, self.period);
        if self.mode == ProbeMode::OnDemand {
            self.period = (self.period * 3 / 2).min(DEAD_MOST);
        }
    }

    /// It lives. The next routine probe is a period away from the last proof, so that traffic makes probes needless.
    fn revive(&mut self, now: Time) {
        let (first, most) = match self.mode {
            ProbeMode::Continuous => (CONTINUOUS_PERIOD, CONTINUOUS_PERIOD),
            ProbeMode::OnDemand => (ON_DEMAND_PERIOD, ON_DEMAND_MOST),
        };
        self.period = if self.judgement == Judgement::Alive { (self.period * 2).clamp(first, most) } else { first };
        self.judgement = Judgement::Alive;
        self.unasked = false;
        self.silent = 0;
        self.last_sign = None;
        self.suspect_since = None;
        self.last_proof = Some(now);
        self.probe_again(now, self.period);
    }

    fn count_death(&mut self, now: Time) {
        self.decay(now);
        self.deaths += 1.0;
        self.hold(now);
    }

    fn decay(&mut self, now: Time) {
        let halves = now.since(self.deaths_at).as_secs_f64() / FLAP_HALF_LIFE.as_secs_f64();
        // Linear between halvings: no platform logarithms in pure code.
        let whole = halves.min(60.0) as u32;
        self.deaths /= (1u64 << whole) as f64 * (1.0 + (halves.min(60.0) - f64::from(whole)));
        self.deaths_at = now;
    }

    /// From the fourth death in about a minute on a link is kept out for a while, longer each time.
    fn hold(&mut self, now: Time) {
        self.decay(now);
        let excess = self.deaths - 3.0;
        if excess >= 0.5 {
            let seconds = (1u64 << (excess.round() as u32).min(6)) as f64;
            self.hold_until = Some(now + Duration::from_secs_f64(seconds).min(HOLD_MOST));
        }
    }

    fn held(&self, now: Time) -> bool {
        self.hold_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RTT: Duration = Duration::from_millis(20);
    /// A satellite's round trip.
    const FAR: Duration = Duration::from_millis(700);

    fn ms(millis: u64) -> Time {
        Time::from_millis(millis)
    }

    /// A link that answers probes after [`RTT`] when `up(time)`; runs the machine by its own timeouts and returns when its
    /// judgement changed, and to what.
    fn simulate(health: &mut Health, from: u64, to: u64, up: impl Fn(u64) -> bool) -> Vec<(u64, Judgement)> {
        simulate_at(health, from, to, RTT, up)
    }

    fn simulate_at(health: &mut Health, from: u64, to: u64, rtt: Duration, up: impl Fn(u64) -> bool) -> Vec<(u64, Judgement)> {
        let mut changes = Vec::new();
        let mut answers: Vec<(Time, Outcome)> = Vec::new();
        let mut last = health.judgement();
        for milli in from..to {
            let now = ms(milli);
            answers.retain(|(at, outcome)| {
                let due = *at <= now;
                if due {
                    health.on_probe(now, *outcome);
                }
                !due
            });
            health.handle_timeout(now);
            if let Some(request) = health.poll_probe(now) {
                let answered = up(milli) && rtt <= request.timeout;
                answers.push(if answered { (now + rtt, Outcome::Alive { rtt }) } else { (now + request.timeout, Outcome::Silent) });
            }
            if health.judgement() != last {
                last = health.judgement();
                changes.push((milli, last));
            }
        }
        changes
    }

    fn settled(mode: ProbeMode) -> Health {
        let mut health = Health::new(mode, ms(0));
        health.on_usable(ms(0), true);
        simulate(&mut health, 0, 1000, |_| true);
        assert_eq!(health.judgement(), Judgement::Alive);
        health
    }

    fn when(changes: &[(u64, Judgement)], wanted: Judgement) -> Option<u64> {
        changes.iter().find(|(_, judgement)| *judgement == wanted).map(|(at, _)| *at)
    }

    #[test]
    fn an_idle_eager_link_is_found_dead_within_a_second_and_used_again_within_two() {
        for dark in 1000..1400 {
            let mut health = settled(ProbeMode::Continuous);
            let changes = simulate(&mut health, 1000, 20_000, |now| now < dark || now >= 15_000);
            let dead = when(&changes, Judgement::Dead).unwrap();
            assert!(dead < dark + 1000, "dark at {dark}, dead at {dead}");
            let back = changes.iter().rev().find(|(_, judgement)| *judgement == Judgement::Alive).unwrap().0;
            assert!((15_000..17_000).contains(&back), "{changes:?}");
        }
    }

    #[test]
    fn a_stall_is_followed_up_at_once_even_when_sparing() {
        let mut health = settled(ProbeMode::OnDemand);
        let mut changes = simulate(&mut health, 1000, 5000, |_| true);
        assert!(changes.is_empty());
        health.on_suffering(ms(5000), Suffering::Stall);
        changes = simulate(&mut health, 5000, 6000, |_| false);
        assert!(when(&changes, Judgement::Dead).unwrap() < 5400, "{changes:?}");
        assert!(health.reason().unwrap().contains("receive nothing"));
    }

    #[test]
    fn a_stall_of_one_server_does_not_kill_a_link_that_answers() {
        let mut health = settled(ProbeMode::OnDemand);
        for second in 1..10 {
            health.on_suffering(ms(second * 1000), Suffering::Stall);
            let changes = simulate(&mut health, second * 1000, (second + 1) * 1000, |_| true);
            assert!(when(&changes, Judgement::Dead).is_none());
            assert!(health.alive());
        }
    }

    #[test]
    fn a_far_link_is_given_the_time_it_needs() {
        for mode in [ProbeMode::Continuous, ProbeMode::OnDemand] {
            let mut health = Health::new(mode, ms(0));
            health.on_usable(ms(0), true);
            let changes = simulate_at(&mut health, 0, 60_000, FAR, |_| true);
            assert_eq!(changes.iter().map(|(_, judgement)| *judgement).collect::<Vec<_>>(), [Judgement::Alive]);
        }
    }

    #[test]
    fn regression_a_link_held_from_the_start_is_not_probed_without_end() {
        let mut health = Health::new(ProbeMode::Continuous, ms(0));
        for step in 0..10 {
            health.on_usable(ms(step), step % 2 == 0);
        }
        health.on_usable(ms(10), true);
        assert_eq!(health.judgement(), Judgement::Dead);
        let mut probes = 0;
        for milli in 10..1010 {
            health.handle_timeout(ms(milli));
            while health.poll_probe(ms(milli)).is_some() {
                probes += 1;
                health.on_probe(ms(milli), Outcome::Silent);
                assert!(probes < 10);
            }
        }
    }

    #[test]
    fn regression_bytes_from_before_a_suspicion_do_not_allay_it() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_suffering(ms(3000), Suffering::Timeout);
        health.on_progress(ms(3100), ms(2850));
        assert_eq!(health.judgement(), Judgement::Suspect);
        health.on_progress(ms(3350), ms(3100));
        assert_eq!(health.judgement(), Judgement::Alive);
    }

    #[test]
    fn regression_bytes_from_before_a_death_do_not_revive() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_suffering(ms(3000), Suffering::Timeout);
        let mut now = 3000;
        while health.judgement() != Judgement::Dead {
            assert!(now < 60_000, "{health:?}");
            if health.poll_probe(ms(now)).is_some() {
                health.on_probe(ms(now + 50), Outcome::Silent);
            }
            now += 100;
            health.handle_timeout(ms(now));
        }
        health.on_progress(ms(now), ms(2950));
        assert_eq!(health.judgement(), Judgement::Dead);
        health.on_progress(ms(now + 10), ms(now));
        assert_eq!(health.judgement(), Judgement::Alive);
    }

    #[test]
    fn regression_a_dead_server_and_one_lost_probe_do_not_kill_a_link() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_suffering(ms(3000), Suffering::NoAnswer);
        health.poll_probe(ms(3000)).unwrap();
        health.on_probe(ms(3200), Outcome::Silent);
        assert!(health.alive());
        health.poll_probe(ms(3200)).unwrap();
        health.on_probe(ms(3220), Outcome::Alive { rtt: RTT });
        assert_eq!(health.judgement(), Judgement::Alive);
    }

    #[test]
    fn traffic_makes_probes_needless() {
        let mut health = settled(ProbeMode::Continuous);
        for step in 0..100 {
            let now = ms(1000 + step * 100);
            health.on_progress(now, now);
            assert_eq!(health.poll_probe(now), None);
        }
    }

    #[test]
    fn routine_probes_of_a_sparing_link_are_rare() {
        let mut health = settled(ProbeMode::OnDemand);
        let mut probes = 0;
        for second in 1..3600 {
            if health.poll_probe(ms(second * 1000)).is_some() {
                probes += 1;
                health.on_probe(ms(second * 1000 + 20), Outcome::Alive { rtt: RTT });
            }
        }
        assert!((5..20).contains(&probes), "{probes}");
    }

    #[test]
    fn a_portal_is_no_internet_until_it_answers_as_it_should() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_probe(ms(1000), Outcome::Portal);
        assert_eq!((health.judgement(), health.alive()), (Judgement::Portal, false));
        health.on_progress(ms(1100), ms(1100));
        assert_eq!(health.judgement(), Judgement::Portal, "the portal's own page is no proof");
        let changes = simulate(&mut health, 1100, 3000, |_| true);
        assert!(when(&changes, Judgement::Alive).is_some());
    }

    #[test]
    fn a_link_that_flaps_every_second_is_kept_out_for_longer_and_longer() {
        let mut health = settled(ProbeMode::Continuous);
        let mut alive = 0;
        let mut changes = 0;
        for second in 1..61 {
            health.on_usable(ms(second * 1000), second % 2 == 0);
            changes += simulate(&mut health, second * 1000, (second + 1) * 1000, |_| true)
                .iter()
                .filter(|(_, judgement)| *judgement == Judgement::Alive)
                .count();
            alive += u32::from(health.alive());
        }
        assert!(changes < 15 && alive < 15, "alive {alive} times after {changes} changes");
        health.on_usable(ms(61_000), true);
        simulate(&mut health, 61_000, 120_000, |_| true);
        assert!(health.alive(), "it stays now and is trusted again");
    }

    #[test]
    fn an_outcome_that_never_comes_counts_as_silence() {
        let mut health = Health::new(ProbeMode::Continuous, ms(0));
        health.on_usable(ms(0), true);
        for _ in 0..2 {
            let due = health.poll_timeout().unwrap();
            health.handle_timeout(due);
            health.poll_probe(due).unwrap();
            let lost = health.poll_timeout().unwrap();
            health.handle_timeout(lost);
        }
        assert_eq!(health.judgement(), Judgement::Dead);
    }

    #[test]
    fn a_link_that_cannot_be_asked_is_used_until_its_traffic_suffers() {
        let mut health = Health::new(ProbeMode::OnDemand, ms(0));
        health.on_usable(ms(0), true);
        let mut asked = 0;
        for milli in 0..60_000 {
            health.handle_timeout(ms(milli));
            if health.poll_probe(ms(milli)).is_some() {
                asked += 1;
                health.on_probe(ms(milli), Outcome::Unasked);
            }
            assert_eq!(health.judgement(), Judgement::Unknown, "after {milli} ms");
        }
        assert!((10..30).contains(&asked), "tried {asked} times in a minute");
        health.on_suffering(ms(60_000), Suffering::Timeout);
        assert!(health.poll_probe(ms(60_000)).is_some());
        health.on_probe(ms(60_000), Outcome::Unasked);
        assert_eq!(health.judgement(), Judgement::Dead, "nothing refutes the sign");
        let tried = (60_000..70_000).find(|milli| {
            health.handle_timeout(ms(*milli));
            if health.poll_probe(ms(*milli)).is_some() {
                health.on_probe(ms(*milli), Outcome::Unasked);
            }
            health.alive()
        });
        assert!(tried.is_some_and(|at| at <= 61_000), "it is tried again: {tried:?}");
        health.on_suffering(ms(71_000), Suffering::Stall);
        assert!(health.poll_probe(ms(71_000)).is_some());
        health.on_probe(ms(71_000), Outcome::Unasked);
        assert!(health.alive(), "a pause in a download is no death");
    }

    proptest! {
        /// Whatever happens, a usable link always has something due: it is never forgotten.
        #[test]
        fn a_usable_link_is_never_forgotten(steps in prop::collection::vec((0..9u8, 1..2000u64), 1..200), eager in any::<bool>()) {
            let mode = if eager { ProbeMode::Continuous } else { ProbeMode::OnDemand };
            let mut health = Health::new(mode, ms(0));
            let mut now = 0;
            for (what, wait) in steps {
                now += wait;
                let time = ms(now);
                match what {
                    0 => health.on_usable(time, true),
                    1 => health.on_usable(time, false),
                    2 => health.on_progress(time, time),
                    3 => health.on_suffering(time, Suffering::Timeout),
                    4 => health.on_probe(time, Outcome::Alive { rtt: RTT }),
                    5 => health.on_probe(time, Outcome::Silent),
                    6 => health.on_probe(time, Outcome::Portal),
                    7 => health.on_probe(time, Outcome::Unasked),
                    _ => {
                        health.handle_timeout(time);
                        health.poll_probe(time);
                    }
                }
                let usable = health.judgement() != Judgement::Unusable;
                prop_assert_eq!(usable, health.next_probe.is_some() || health.waiting_until.is_some());
                prop_assert!(!usable || health.poll_timeout().is_some());
            }
        }
    }
}
