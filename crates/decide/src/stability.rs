//! How often a link falls, and how long it lives between two falls.

use std::time::Duration;

use braid_model::Time;

/// Weights of past time halve in this time of observation, so that a link that was repaired counts as stable after some days.
const HALF_LIFE: Duration = Duration::from_secs(86_400);
/// Time without falls that is assumed before the observation, so that one fall in the first minute does not count as hundreds a day.
const PRIOR: f64 = 3600.0;

/// Estimates the stability of a link. The estimate changes only with an input, not by itself as time passes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stability {
    /// Seconds of observation, those in which the link was alive, and falls. All with decay.
    observed: f64,
    alive: f64,
    falls: f64,
    at: Option<Time>,
    counted: u64,
}

impl Stability {
    /// Reports whether the link is alive, and its number of falls so far. The time since the last call counts with the state now.
    pub fn on_state(&mut self, now: Time, alive: bool, falls: u64) {
        let seconds = self.at.map_or(0.0, |at| now.since(at).as_secs_f64());
        let left = crate::capacity::decayed(Duration::from_secs_f64(seconds), HALF_LIFE);
        let fell = falls.saturating_sub(self.counted);
        self.observed = self.observed * left + seconds;
        self.alive = self.alive * left + if alive || fell > 0 { seconds } else { 0.0 };
        self.falls = self.falls * left + fell as f64;
        (self.at, self.counted) = (Some(now), falls);
    }

    /// Falls per day of observation; `None` before the first observation.
    pub fn falls_per_day(&self) -> Option<f64> {
        (self.observed > 0.0).then(|| self.falls * 86_400.0 / (self.observed + PRIOR))
    }

    /// Mean time alive per fall; `None` if there was none in the last days.
    pub fn mean_life(&self) -> Option<Duration> {
        // After seven half-lives a single fall is forgotten.
        (self.falls > 0.01).then(|| Duration::from_secs_f64(self.alive / self.falls))
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
        assert!(before > 15.0 && stability.falls_per_day().unwrap() < 0.1 && stability.mean_life().is_none_or(|life| life > HALF_LIFE));
    }
}
