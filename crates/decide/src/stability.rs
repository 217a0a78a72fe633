//! How often a link falls, and how long it lives between two falls.

use std::time::Duration;

use braid_model::Time;

/// Weights of past time halve in this time of observation, so that a link that was repaired counts as stable after some days.
const HALF_LIFE: Duration = Duration::from_secs(86_400);
/// Time without falls that is assumed before the observation, so that one fall in the first minute does not count as hundreds a day.
const PRIOR: f64 = 3600.0;

/// The longest observation that the decay leaves, with a margin. A longer one cannot be an estimate of Braid's.
const MAX_OBSERVED: f64 = 200_000.0;
/// The earlier sums arrive shortly after the first observation. Later ones are the link's own.
const MAX_OBSERVED_BEFORE: f64 = 60.0;
/// The most falls that such an observation may have: one a second, and some more in a short one.
const MAX_FALLS_PER_SECOND: f64 = 1.0;
const MAX_FALLS_AT_ONCE: f64 = 10.0;

/// The sums behind an estimate, as they are stored across restarts. They contain no times, so a changed clock does not affect them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StabilitySums {
    /// Seconds of observation, with decay.
    pub observed: f64,
    /// Seconds of these in which the link was alive.
    pub alive: f64,
    /// Falls in that time.
    pub falls: f64,
}

/// Estimates the stability of a link. The estimate changes only with an input, not by itself as time passes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stability {
    sums: StabilitySums,
    /// Whether the sums of an earlier run are in `sums`.
    recalled: bool,
    at: Option<Time>,
    counted: u64,
}

impl Stability {
    /// Reports whether the link is alive, and its number of falls so far. The time since the last call counts with the state now.
    pub fn on_state(&mut self, now: Time, alive: bool, falls: u64) {
        let seconds = self.at.map_or(0.0, |at| now.since(at).as_secs_f64());
        let left = crate::capacity::decayed(Duration::from_secs_f64(seconds), HALF_LIFE);
        let fell = falls.saturating_sub(self.counted);
        self.sums.observed = self.sums.observed * left + seconds;
        self.sums.alive = self.sums.alive * left + if alive || fell > 0 { seconds } else { 0.0 };
        self.sums.falls = self.sums.falls * left + fell as f64;
        (self.at, self.counted) = (Some(now), falls);
    }

    /// Falls per day of observation; `None` before the first observation.
    pub fn falls_per_day(&self) -> Option<f64> {
        (self.sums.observed > 0.0).then(|| self.sums.falls * 86_400.0 / (self.sums.observed + PRIOR))
    }

    /// Mean time alive per fall; `None` if there was none in the last days.
    pub fn mean_life(&self) -> Option<Duration> {
        // After seven half-lives a single fall is forgotten.
        (self.sums.falls > 0.01).then(|| Duration::from_secs_f64(self.sums.alive / self.sums.falls))
    }

    /// The sums to store; `None` before the first observation.
    pub fn sums(&self) -> Option<StabilitySums> {
        (self.sums.observed > 0.0).then_some(self.sums)
    }

    /// Continues with the sums of an earlier run. The time between the runs does not count. Ignored if the link has been observed for longer than
    /// a minute or has sums of an earlier run already, or if the sums are impossible: a file may hold anything.
    pub fn recall(&mut self, sums: StabilitySums) {
        let possible = (f64::MIN_POSITIVE..=MAX_OBSERVED).contains(&sums.observed)
            && (0.0..=sums.observed).contains(&sums.alive)
            && (0.0..=sums.observed * MAX_FALLS_PER_SECOND + MAX_FALLS_AT_ONCE).contains(&sums.falls);
        if possible && !self.recalled && self.sums.observed < MAX_OBSERVED_BEFORE {
            self.recalled = true;
            self.sums.observed += sums.observed;
            self.sums.alive += sums.alive;
            self.sums.falls += sums.falls;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Observes for `hours` once a minute. The link falls every `period` minutes, and is dead for `down` of them.
    fn observe(stability: &mut Stability, from: u64, hours: u64, period: u64, down: u64) -> u64 {
        let mut falls = stability.counted;
        for minute in 1..=hours * 60 {
            let phase = minute % period;
            falls += u64::from(phase == period - down);
            let dead = phase >= period - down;
            stability.on_state(Time::from_millis((from + minute) * 60_000), !dead, falls);
        }
        from + hours * 60
    }

    #[test]
    fn falls_and_lives_are_averaged() {
        let mut stability = Stability::default();
        stability.on_state(Time::ZERO, true, 0);
        assert_eq!((stability.falls_per_day(), stability.mean_life()), (None, None));
        observe(&mut stability, 0, 48, 120, 10);
        // Twelve falls a day, each after 110 minutes alive; the assumed hour without falls lowers the first.
        let (falls, life) = (stability.falls_per_day().unwrap(), stability.mean_life().unwrap().as_secs_f64() / 60.0);
        assert!((10.5..12.5).contains(&falls) && (105.0..117.0).contains(&life), "{falls} {life}");
    }

    #[test]
    fn a_repaired_link_becomes_stable_and_one_early_fall_does_not_condemn_a_link() {
        let mut stability = Stability::default();
        stability.on_state(Time::ZERO, true, 0);
        stability.on_state(Time::from_millis(60_000), false, 1);
        assert!((20.0..25.0).contains(&stability.falls_per_day().unwrap()));
        let end = observe(&mut stability, 1, 24, 60, 5);
        let before = stability.falls_per_day().unwrap();
        for hour in 1..=24 * 10 {
            stability.on_state(Time::from_millis((end + hour * 60) * 60_000), true, stability.counted);
        }
        assert!(stability.sums().unwrap().observed < MAX_OBSERVED);
        assert!(before > 15.0 && stability.falls_per_day().unwrap() < 0.1 && stability.mean_life().is_none_or(|life| life > HALF_LIFE));
    }

    #[test]
    fn an_estimate_continues_after_a_restart_and_impossible_sums_are_ignored() {
        let mut before = Stability::default();
        before.on_state(Time::ZERO, true, 0);
        observe(&mut before, 0, 24, 60, 5);
        let mut after = Stability::default();
        after.recall(before.sums().unwrap());
        assert_eq!((after.falls_per_day(), after.mean_life()), (before.falls_per_day(), before.mean_life()));
        // The clock of the new run starts anywhere, and its count of falls at zero.
        after.on_state(Time::from_millis(7), true, 0);
        assert_eq!(after.sums(), before.sums());
        after.on_state(Time::from_millis(60_007), false, 1);
        assert!(after.falls_per_day() > before.falls_per_day());
        let known = after.sums();
        after.recall(before.sums().unwrap());
        assert_eq!(after.sums(), known, "an observed link keeps its own estimate");
        let sums = |observed, alive, falls| StabilitySums { observed, alive, falls };
        let bad = [
            sums(f64::NAN, 0.0, 0.0),
            sums(f64::INFINITY, 1.0, 1.0),
            sums(-5.0, 0.0, 0.0),
            sums(1e9, 1.0, 1.0),
            sums(100.0, 101.0, 1.0),
            sums(100.0, f64::NAN, 1.0),
            sums(100.0, 50.0, -1.0),
            sums(100.0, 50.0, 1e300),
            sums(0.0, 0.0, 0.0),
        ];
        for impossible in bad {
            let mut fresh = Stability::default();
            fresh.recall(impossible);
            assert_eq!(fresh, Stability::default(), "{impossible:?}");
        }
    }
}
