//! Health of one link in one address family: a state machine without I/O.
//!
//! Probe answers and received bytes prove that a link is alive. A symptom triggers a probe; a stall or a timeout also counts as one unanswered probe. A
//! link with carrier may still reach nothing, so probes are sent over the link itself. The caller sends the probes and passes in the time.
//!
//! Detection time: with a routine probe every [`CONTINUOUS_PERIOD`], two consecutive unanswered probes mark an idle link dead within a second if the
//! round trip is under 200 ms. After a stall or a timeout one unanswered probe is enough. An unanswered SYN triggers a probe but does not count as an
//! unanswered one, because servers fail more often than links.

use std::time::Duration;

use braid_model::Time;

use crate::policy::ProbeMode;

/// Time between routine probes in [`ProbeMode::Continuous`].
pub const CONTINUOUS_PERIOD: Duration = Duration::from_millis(300);
/// Initial time between routine probes in [`ProbeMode::OnDemand`]. It doubles up to [`ON_DEMAND_MAX_PERIOD`].
pub const ON_DEMAND_PERIOD: Duration = Duration::from_secs(30);
/// Maximum time between routine probes in [`ProbeMode::OnDemand`].
pub const ON_DEMAND_MAX_PERIOD: Duration = Duration::from_secs(300);
/// Initial time between probes of a dead link.
pub const DEAD_PERIOD: Duration = Duration::from_millis(500);
/// Maximum time between probes of a dead link in [`ProbeMode::OnDemand`].
pub const DEAD_MAX_PERIOD: Duration = Duration::from_secs(5);
/// In continuous mode, one in this many routine probes of a live link goes to a destination, if one is known. The others go to the gateway, so that no
/// third party is probed three times a second.
const THOROUGH_PROBE_INTERVAL: u32 = 10;
/// Half-life of the death count.
const FLAP_HALF_LIFE: Duration = Duration::from_secs(30);
/// A timeout is ignored if the link was proven alive this recently, because a timeout shows up late.
const RECENT_PROOF: Duration = Duration::from_millis(500);
/// A stall this soon after a probe answer triggers no probe: most such stalls are idle applications.
const RECENT_ANSWER: Duration = Duration::from_secs(1);
/// Probe timeout while no round-trip time is known.
const INITIAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Probe timeout of a dead link. It is long because the link may come back with a long round trip.
const DEAD_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum hold time of a flapping link.
const MAX_HOLD: Duration = Duration::from_secs(30);

/// State of a link in one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reachability {
    /// No carrier, address or route.
    Unusable,
    /// No evidence yet: treated as alive.
    Unknown,
    /// Proven alive.
    Alive,
    /// After a symptom or one unanswered probe, while the next probe is pending: still treated as alive.
    Suspect,
    /// Two signs of death, or the link came back but is held because it flaps.
    Dead,
    /// A captive portal answers instead of the Internet.
    Portal,
}

/// A sign that the link may be dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symptom {
    /// A SYN was not answered in time.
    NoAnswer,
    /// A segment was not acknowledged in time.
    Timeout,
    /// Flows were receiving data and stopped receiving.
    Stall,
}

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The probe was answered.
    Alive {
        /// Round-trip time.
        rtt: Duration,
    },
    /// No answer before the timeout.
    Silent,
    /// A wrong answer: a captive portal intercepted the probe.
    Portal,
    /// The probe could not be sent: no target is known, or the system refused. After a timeout or an unanswered SYN this counts as an unanswered
    /// probe.
    NotSent,
}

/// A probe that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeRequest {
    /// Time to wait for an answer.
    pub timeout: Duration,
    /// Probe destinations, if any are known. Otherwise, and if there are none, probe the gateway.
    pub thorough: bool,
}

/// State machine of one link and family.
#[derive(Debug, Clone)]
pub struct Health {
    mode: ProbeMode,
    reachability: Reachability,
    /// Smoothed round-trip time of probes.
    srtt: Option<Duration>,
    last_proof: Option<Time>,
    /// Time of the last probe answer.
    last_answer: Option<Time>,
    /// Time of the next probe.
    next_probe: Option<Time>,
    /// Set while a probe is pending: if no outcome arrives by then, the probe counts as silent.
    waiting_until: Option<Time>,
    /// Consecutive signs of death: unanswered probes, plus one for a stall or a timeout.
    unanswered: u32,
    /// Current time between probes.
    period: Duration,
    routine: u32,
    /// Recent deaths, decayed up to `deaths_at`.
    deaths: f64,
    deaths_at: Time,
    /// A flapping link is held down until then.
    hold_until: Option<Time>,
    last_sign: Option<Symptom>,
    /// When the link became suspect.
    suspect_since: Option<Time>,
    /// The link is suspect or dead by its traffic alone, because no probe could be sent.
    presumed: bool,
}

impl Health {
    /// Creates an unusable link.
    pub fn new(mode: ProbeMode, now: Time) -> Self {
        Self {
            mode,
            reachability: Reachability::Unusable,
            srtt: None,
            last_proof: None,
            last_answer: None,
            next_probe: None,
            waiting_until: None,
            unanswered: 0,
            period: Duration::ZERO,
            routine: 0,
            deaths: 0.0,
            deaths_at: now,
            hold_until: None,
            last_sign: None,
            suspect_since: None,
            presumed: false,
        }
    }

    /// Whether the link counts as dead by its traffic alone, because no probe could be sent. Its flows are then not terminated.
    pub fn is_presumed(&self) -> bool {
        self.presumed
    }

    /// Changes the probe mode. State and estimates are kept; the next probe follows the new mode.
    pub fn set_mode(&mut self, now: Time, mode: ProbeMode) {
        self.mode = mode;
        if mode == ProbeMode::Continuous {
            // In on-demand mode a dead link has backed off. In continuous mode it never does.
            self.period = self.period.min(DEAD_PERIOD);
        }
        if self.next_probe.is_some() {
            self.probe_again(now, Duration::ZERO);
        }
    }

    /// The current probe mode.
    pub fn mode(&self) -> ProbeMode {
        self.mode
    }

    /// The current state.
    pub fn reachability(&self) -> Reachability {
        self.reachability
    }

    /// When the link was last proven alive.
    pub fn last_proof(&self) -> Option<Time> {
        self.last_proof
    }

    /// Whether new flows may use the link.
    pub fn alive(&self) -> bool {
        matches!(self.reachability, Reachability::Unknown | Reachability::Alive | Reachability::Suspect)
    }

    /// Why the link is not alive, as a message for users.
    pub fn reason(&self) -> Option<String> {
        let why = match self.reachability {
            Reachability::Portal => "a captive portal intercepts the traffic: open a web page in a browser and log in",
            Reachability::Dead if self.hold_until.is_some() => "the link is flapping: Braid does not use it until it stays up",
            Reachability::Dead => match self.last_sign {
                Some(Symptom::NoAnswer) => "connections and probes get no answer",
                Some(Symptom::Timeout) => "segments and probes get no answer",
                Some(Symptom::Stall) => "its flows receive nothing and probes get no answer",
                None => "probes get no answer",
            },
            _ => return None,
        };
        Some(why.to_owned())
    }

    /// Reports whether the link has carrier, an address and a default route.
    pub fn on_usable(&mut self, now: Time, usable: bool) {
        match (usable, self.reachability) {
            (true, Reachability::Unusable) => {
                self.unanswered = 0;
                self.last_sign = None;
                self.reachability = Reachability::Unknown;
                self.hold(now);
                if self.hold_until.is_some() {
                    self.reachability = Reachability::Dead;
                    self.period = DEAD_PERIOD;
                }
                self.probe_again(now, Duration::ZERO);
            }
            (false, reachability) if reachability != Reachability::Unusable => {
                // A held link that becomes unusable has flapped again.
                if reachability != Reachability::Dead || self.hold_until.is_some() {
                    self.count_death(now);
                }
                self.reachability = Reachability::Unusable;
                self.next_probe = None;
                self.waiting_until = None;
            }
            _ => {}
        }
    }

    /// Bytes or an acknowledgement arrived between `since` and `now`. Bytes that may have arrived before the link became suspect do not clear the
    /// suspicion.
    pub fn on_progress(&mut self, now: Time, since: Time) {
        let suspected = matches!(self.reachability, Reachability::Suspect | Reachability::Dead);
        let stale = suspected && self.suspect_since.is_some_and(|suspicion| since < suspicion);
        if self.reachability == Reachability::Unusable || self.reachability == Reachability::Portal || self.held(now) || stale {
            return;
        }
        self.revive(now);
    }

    /// A symptom: the link becomes suspect and is probed at once.
    pub fn on_symptom(&mut self, now: Time, sign: Symptom) {
        if !self.alive() {
            return;
        }
        let refuted = match sign {
            // Bytes that arrived before a stall do not refute it. A recent probe answer makes another probe unnecessary.
            Symptom::Stall => self.last_answer.is_some_and(|answer| now.since(answer) < RECENT_ANSWER),
            Symptom::NoAnswer | Symptom::Timeout => self.last_proof.is_some_and(|proof| now.since(proof) < RECENT_PROOF),
        };
        if refuted {
            return;
        }
        self.last_sign = Some(sign);
        if sign != Symptom::NoAnswer {
            self.unanswered = self.unanswered.max(1);
        }
        if self.reachability != Reachability::Suspect {
            self.suspect(now);
            if self.waiting_until.is_none() {
                self.probe_again(now, Duration::ZERO);
            }
        }
    }

    fn suspect(&mut self, now: Time) {
        self.reachability = Reachability::Suspect;
        self.suspect_since = Some(now);
    }

    /// Reports the outcome of the pending probe.
    pub fn on_probe(&mut self, now: Time, outcome: Outcome) {
        self.waiting_until = None;
        if self.reachability == Reachability::Unusable {
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
                self.presumed = false;
                self.on_silence(now);
            }
            Outcome::Portal => {
                if self.reachability != Reachability::Portal {
                    self.count_death(now);
                    self.period = DEAD_PERIOD;
                }
                self.reachability = Reachability::Portal;
                self.back_off(now);
            }
            Outcome::NotSent => self.on_not_sent(now),
        }
    }

    fn on_not_sent(&mut self, now: Time) {
        match self.reachability {
            // Nothing refutes the symptom that triggered the probe. A stall is the exception: it may be a pause.
            Reachability::Suspect if self.last_sign != Some(Symptom::Stall) => {
                self.presumed = true;
                self.on_silence(now);
            }
            // If no probe can be sent, only traffic can show that the link works again, so new flows must try it.
            Reachability::Suspect => self.reset_to_unknown(now),
            Reachability::Dead if self.presumed && !self.held(now) => self.reset_to_unknown(now),
            Reachability::Alive => self.probe_again(now, self.period),
            _ => {
                self.period = self.period.max(DEAD_PERIOD);
                self.back_off(now);
            }
        }
    }

    /// Resets the state to unknown, so that new flows try the link.
    fn reset_to_unknown(&mut self, now: Time) {
        self.reachability = Reachability::Unknown;
        self.unanswered = 0;
        self.last_sign = None;
        self.suspect_since = None;
        self.presumed = false;
        self.period = self.period.max(DEAD_PERIOD);
        self.back_off(now);
    }

    fn on_silence(&mut self, now: Time) {
        self.unanswered = self.unanswered.saturating_add(1);
        match self.reachability {
            Reachability::Dead | Reachability::Portal => self.back_off(now),
            _ if self.unanswered >= 2 => {
                self.count_death(now);
                self.reachability = Reachability::Dead;
                self.period = DEAD_PERIOD;
                self.probe_again(now, DEAD_PERIOD);
            }
            _ => {
                self.suspect(now);
                self.probe_again(now, Duration::ZERO);
            }
        }
    }

    /// Returns the probe that is due, if any. The caller sends it and reports the outcome to [`on_probe`](Self::on_probe).
    pub fn poll_probe(&mut self, now: Time) -> Option<ProbeRequest> {
        self.next_probe.filter(|due| *due <= now)?;
        self.next_probe = None;
        let timeout = self.timeout();
        // The caller should report the outcome. If it never does, the probe counts as silent.
        self.waiting_until = Some(now + timeout + Duration::from_secs(1));
        self.routine = self.routine.wrapping_add(1);
        let thorough = self.reachability != Reachability::Alive
            || self.mode == ProbeMode::OnDemand
            || self.routine.is_multiple_of(THOROUGH_PROBE_INTERVAL);
        Some(ProbeRequest { timeout, thorough })
    }

    fn timeout(&self) -> Duration {
        match self.srtt {
            _ if !self.alive() => DEAD_TIMEOUT,
            None => INITIAL_TIMEOUT,
            Some(srtt) => (srtt * 3 / 2 + Duration::from_millis(50)).clamp(Duration::from_millis(200), Duration::from_secs(2)),
        }
    }

    /// Handles everything due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        if self.waiting_until.is_some_and(|until| until <= now) {
            self.on_probe(now, Outcome::Silent);
        }
        if self.hold_until.is_some_and(|until| until <= now) {
            self.hold_until = None;
            if self.reachability == Reachability::Dead && self.waiting_until.is_none() {
                self.probe_again(now, Duration::ZERO);
            }
        }
    }

    /// Time of the next event: a probe, or the end of a wait.
    pub fn poll_timeout(&self) -> Option<Time> {
        [self.next_probe, self.waiting_until, self.hold_until].into_iter().flatten().min()
    }

    fn probe_again(&mut self, now: Time, after: Duration) {
        self.next_probe = Some(now + after);
    }

    fn back_off(&mut self, now: Time) {
        self.probe_again(now, self.period);
        if self.mode == ProbeMode::OnDemand {
            self.period = (self.period * 3 / 2).min(DEAD_MAX_PERIOD);
        }
    }

    /// Marks the link alive. The next routine probe is due one period after this proof, so traffic replaces probes.
    fn revive(&mut self, now: Time) {
        let (first, most) = match self.mode {
            ProbeMode::Continuous => (CONTINUOUS_PERIOD, CONTINUOUS_PERIOD),
            ProbeMode::OnDemand => (ON_DEMAND_PERIOD, ON_DEMAND_MAX_PERIOD),
        };
        self.period = if self.reachability == Reachability::Alive { (self.period * 2).clamp(first, most) } else { first };
        self.reachability = Reachability::Alive;
        self.presumed = false;
        self.unanswered = 0;
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
        // Linear between halvings: platform logarithms differ, so pure code must not use them.
        let whole = halves.min(60.0) as u32;
        self.deaths /= (1u64 << whole) as f64 * (1.0 + (halves.min(60.0) - f64::from(whole)));
        self.deaths_at = now;
    }

    /// From about the fourth death within a minute on, a link is held down, and longer each time.
    fn hold(&mut self, now: Time) {
        self.decay(now);
        let excess = self.deaths - 3.0;
        if excess >= 0.5 {
            let seconds = (1u64 << (excess.round() as u32).min(6)) as f64;
            self.hold_until = Some(now + Duration::from_secs_f64(seconds).min(MAX_HOLD));
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
    /// RTT of a satellite link.
    const LONG_RTT: Duration = Duration::from_millis(700);

    fn ms(millis: u64) -> Time {
        Time::from_millis(millis)
    }

    /// Runs the state machine by its own timeouts. The link answers probes after [`RTT`] when `up(time)`. Returns the times and states of all
    /// changes.
    fn simulate(health: &mut Health, from: u64, to: u64, up: impl Fn(u64) -> bool) -> Vec<(u64, Reachability)> {
        simulate_at(health, from, to, RTT, up)
    }

    fn simulate_at(health: &mut Health, from: u64, to: u64, rtt: Duration, up: impl Fn(u64) -> bool) -> Vec<(u64, Reachability)> {
        let mut changes = Vec::new();
        let mut answers: Vec<(Time, Outcome)> = Vec::new();
        let mut last = health.reachability();
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
            if health.reachability() != last {
                last = health.reachability();
                changes.push((milli, last));
            }
        }
        changes
    }

    fn settled(mode: ProbeMode) -> Health {
        let mut health = Health::new(mode, ms(0));
        health.on_usable(ms(0), true);
        simulate(&mut health, 0, 1000, |_| true);
        assert_eq!(health.reachability(), Reachability::Alive);
        health
    }

    fn when(changes: &[(u64, Reachability)], wanted: Reachability) -> Option<u64> {
        changes.iter().find(|(_, reachability)| *reachability == wanted).map(|(at, _)| *at)
    }

    #[test]
    fn an_idle_continuously_probed_link_is_found_dead_within_a_second_and_used_again_within_two() {
        for dark in 1000..1400 {
            let mut health = settled(ProbeMode::Continuous);
            let changes = simulate(&mut health, 1000, 20_000, |now| now < dark || now >= 15_000);
            let dead = when(&changes, Reachability::Dead).unwrap();
            assert!(dead < dark + 1000, "dark at {dark}, dead at {dead}");
            let back = changes.iter().rev().find(|(_, reachability)| *reachability == Reachability::Alive).unwrap().0;
            assert!((15_000..17_000).contains(&back), "{changes:?}");
        }
    }

    #[test]
    fn a_stall_triggers_a_probe_at_once_even_on_demand() {
        let mut health = settled(ProbeMode::OnDemand);
        let mut changes = simulate(&mut health, 1000, 5000, |_| true);
        assert!(changes.is_empty());
        health.on_symptom(ms(5000), Symptom::Stall);
        changes = simulate(&mut health, 5000, 6000, |_| false);
        assert!(when(&changes, Reachability::Dead).unwrap() < 5400, "{changes:?}");
        assert!(health.reason().unwrap().contains("receive nothing"));
    }

    #[test]
    fn a_stall_of_one_server_does_not_kill_a_link_that_answers() {
        let mut health = settled(ProbeMode::OnDemand);
        for second in 1..10 {
            health.on_symptom(ms(second * 1000), Symptom::Stall);
            let changes = simulate(&mut health, second * 1000, (second + 1) * 1000, |_| true);
            assert!(when(&changes, Reachability::Dead).is_none());
            assert!(health.alive());
        }
    }

    #[test]
    fn a_link_with_a_long_rtt_stays_alive() {
        for mode in [ProbeMode::Continuous, ProbeMode::OnDemand] {
            let mut health = Health::new(mode, ms(0));
            health.on_usable(ms(0), true);
            let changes = simulate_at(&mut health, 0, 60_000, LONG_RTT, |_| true);
            assert_eq!(changes.iter().map(|(_, reachability)| *reachability).collect::<Vec<_>>(), [Reachability::Alive]);
        }
    }

    #[test]
    fn regression_probes_of_a_link_held_from_the_start_are_rate_limited() {
        let mut health = Health::new(ProbeMode::Continuous, ms(0));
        for step in 0..10 {
            health.on_usable(ms(step), step % 2 == 0);
        }
        health.on_usable(ms(10), true);
        assert_eq!(health.reachability(), Reachability::Dead);
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
    fn regression_bytes_from_before_a_suspicion_do_not_clear_it() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_symptom(ms(3000), Symptom::Timeout);
        health.on_progress(ms(3100), ms(2850));
        assert_eq!(health.reachability(), Reachability::Suspect);
        health.on_progress(ms(3350), ms(3100));
        assert_eq!(health.reachability(), Reachability::Alive);
    }

    #[test]
    fn regression_bytes_from_before_a_death_do_not_revive_the_link() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_symptom(ms(3000), Symptom::Timeout);
        let mut now = 3000;
        while health.reachability() != Reachability::Dead {
            assert!(now < 60_000, "{health:?}");
            if health.poll_probe(ms(now)).is_some() {
                health.on_probe(ms(now + 50), Outcome::Silent);
            }
            now += 100;
            health.handle_timeout(ms(now));
        }
        health.on_progress(ms(now), ms(2950));
        assert_eq!(health.reachability(), Reachability::Dead);
        health.on_progress(ms(now + 10), ms(now));
        assert_eq!(health.reachability(), Reachability::Alive);
    }

    #[test]
    fn regression_a_dead_server_and_one_lost_probe_do_not_kill_a_link() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_symptom(ms(3000), Symptom::NoAnswer);
        health.poll_probe(ms(3000)).unwrap();
        health.on_probe(ms(3200), Outcome::Silent);
        assert!(health.alive());
        health.poll_probe(ms(3200)).unwrap();
        health.on_probe(ms(3220), Outcome::Alive { rtt: RTT });
        assert_eq!(health.reachability(), Reachability::Alive);
    }

    #[test]
    fn traffic_replaces_probes() {
        let mut health = settled(ProbeMode::Continuous);
        for step in 0..100 {
            let now = ms(1000 + step * 100);
            health.on_progress(now, now);
            assert_eq!(health.poll_probe(now), None);
        }
    }

    #[test]
    fn routine_probes_of_an_on_demand_link_are_rare() {
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
    fn a_portal_link_is_not_alive_until_a_probe_gets_the_right_answer() {
        let mut health = settled(ProbeMode::OnDemand);
        health.on_probe(ms(1000), Outcome::Portal);
        assert_eq!((health.reachability(), health.alive()), (Reachability::Portal, false));
        health.on_progress(ms(1100), ms(1100));
        assert_eq!(health.reachability(), Reachability::Portal, "the portal's own page is no proof");
        let changes = simulate(&mut health, 1100, 3000, |_| true);
        assert!(when(&changes, Reachability::Alive).is_some());
    }

    #[test]
    fn a_link_that_flaps_every_second_is_held_down_for_increasing_times() {
        let mut health = settled(ProbeMode::Continuous);
        let mut alive = 0;
        let mut changes = 0;
        for second in 1..61 {
            health.on_usable(ms(second * 1000), second % 2 == 0);
            changes += simulate(&mut health, second * 1000, (second + 1) * 1000, |_| true)
                .iter()
                .filter(|(_, reachability)| *reachability == Reachability::Alive)
                .count();
            alive += u32::from(health.alive());
        }
        assert!(changes < 15 && alive < 15, "alive {alive} times after {changes} changes");
        health.on_usable(ms(61_000), true);
        simulate(&mut health, 61_000, 120_000, |_| true);
        assert!(health.alive(), "a stable link is used again");
    }

    #[test]
    fn a_missing_probe_outcome_counts_as_silence() {
        let mut health = Health::new(ProbeMode::Continuous, ms(0));
        health.on_usable(ms(0), true);
        for _ in 0..2 {
            let due = health.poll_timeout().unwrap();
            health.handle_timeout(due);
            health.poll_probe(due).unwrap();
            let lost = health.poll_timeout().unwrap();
            health.handle_timeout(lost);
        }
        assert_eq!(health.reachability(), Reachability::Dead);
    }

    #[test]
    fn a_link_that_cannot_be_probed_is_used_until_its_traffic_shows_a_symptom() {
        let mut health = Health::new(ProbeMode::OnDemand, ms(0));
        health.on_usable(ms(0), true);
        let mut probes = 0;
        for milli in 0..60_000 {
            health.handle_timeout(ms(milli));
            if health.poll_probe(ms(milli)).is_some() {
                probes += 1;
                health.on_probe(ms(milli), Outcome::NotSent);
            }
            assert_eq!(health.reachability(), Reachability::Unknown, "after {milli} ms");
        }
        assert!((10..30).contains(&probes), "probed {probes} times in a minute");
        health.on_symptom(ms(60_000), Symptom::Timeout);
        assert!(health.poll_probe(ms(60_000)).is_some());
        health.on_probe(ms(60_000), Outcome::NotSent);
        assert_eq!(health.reachability(), Reachability::Dead, "nothing refutes the symptom");
        let tried = (60_000..70_000).find(|milli| {
            health.handle_timeout(ms(*milli));
            if health.poll_probe(ms(*milli)).is_some() {
                health.on_probe(ms(*milli), Outcome::NotSent);
            }
            health.alive()
        });
        assert!(tried.is_some_and(|at| at <= 61_000), "the link becomes usable again: {tried:?}");
        health.on_symptom(ms(71_000), Symptom::Stall);
        assert!(health.poll_probe(ms(71_000)).is_some());
        health.on_probe(ms(71_000), Outcome::NotSent);
        assert!(health.alive(), "a pause in a download does not kill the link");
    }

    proptest! {
        /// After any sequence of events, a usable link has a probe or a wait pending.
        #[test]
        fn a_usable_link_always_has_a_probe_pending_or_due(steps in prop::collection::vec((0..9u8, 1..2000u64), 1..200), eager in any::<bool>()) {
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
                    3 => health.on_symptom(time, Symptom::Timeout),
                    4 => health.on_probe(time, Outcome::Alive { rtt: RTT }),
                    5 => health.on_probe(time, Outcome::Silent),
                    6 => health.on_probe(time, Outcome::Portal),
                    7 => health.on_probe(time, Outcome::NotSent),
                    _ => {
                        health.handle_timeout(time);
                        health.poll_probe(time);
                    }
                }
                let usable = health.reachability() != Reachability::Unusable;
                prop_assert_eq!(usable, health.next_probe.is_some() || health.waiting_until.is_some());
                prop_assert!(!usable || health.poll_timeout().is_some());
            }
        }
    }
}
