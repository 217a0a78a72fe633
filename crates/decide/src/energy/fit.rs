//! Finds out what links need from what the battery gives, in operation.
//!
//! The battery's power is taken as `rest + sum_j a_j * u_j`, where `u_j` is the share of link j's capacity that is in use. The
//! unknowns are followed by a Kalman filter: the rest of the machine may wander quickly, an interface's appetite only slowly, so
//! that it is changes which go along with a link's use that are put down to the link. Where OPERETTA (III.C) only says that the
//! rates "can also be estimated dynamically", this is our way.

use braid_model::{LinkIndex, Power, Time};

/// How far the rest of the machine is thought to be off at first, as a variance in square watts.
const REST_VARIANCE: f64 = 100.0;
/// By how much a square watt's doubt of the rest grows in a second.
const REST_DRIFT: f64 = 0.02;
/// How far a profile is thought to be off: 2 W, squared.
const LINK_VARIANCE: f64 = 4.0;
/// By how much the doubt of a link grows in a second: half of what it was at first is back after some days.
const LINK_DRIFT: f64 = 1e-5;
/// A sample further off than this many standard deviations counts as this far off.
const OUTLIER: f64 = 3.0;
/// The weight of the newest sample in the estimate of the noise.
const NOISE_GAIN: f64 = 0.02;
/// The least noise, as a variance: sensors are no better than some 30 mW.
const LEAST_NOISE: f64 = 1e-3;
/// Samples closer together say little new.
const LEAST_INTERVAL_NANOS: u64 = 500_000_000;

/// What a link was found to need.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FittedPower {
    /// What full use of the link adds to the battery's load (OPERETTA's `a_j`).
    pub active: Power,
    /// How far it is to be trusted, from 0 (the profile's word) to 1.
    pub confidence: f64,
}

/// The estimator. Its size is that of the number of links; a sample takes time of the order of its square.
#[derive(Debug, Clone, Default)]
pub struct PowerFit {
    links: Vec<LinkIndex>,
    /// The rest of the machine, then each link, in watts.
    state: Vec<f64>,
    /// Covariance, in square watts.
    doubt: Vec<Vec<f64>>,
    /// Variance of what a sample shows beyond what was foreseen.
    noise: f64,
    last: Option<Time>,
}

impl PowerFit {
    /// Takes up a link, with what its profile says until more is known. One that is known already stays as it is.
    pub fn expect(&mut self, link: LinkIndex, active: Power) {
        if self.state.is_empty() {
            self.state.push(0.0);
            self.doubt.push(vec![REST_VARIANCE]);
            self.noise = 1.0;
        }
        if self.links.contains(&link) {
            return;
        }
        self.links.push(link);
        self.state.push(active.watts());
        self.doubt.iter_mut().for_each(|row| row.push(0.0));
        let mut row = vec![0.0; self.state.len()];
        row[self.state.len() - 1] = LINK_VARIANCE;
        self.doubt.push(row);
    }

    /// Forgets links that are gone.
    pub fn retain(&mut self, stays: impl Fn(LinkIndex) -> bool) {
        for at in (0..self.links.len()).rev().filter(|at| !stays(self.links[*at])).collect::<Vec<_>>() {
            self.links.remove(at);
            self.state.remove(at + 1);
            self.doubt.remove(at + 1);
            for row in &mut self.doubt {
                row.remove(at + 1);
            }
        }
    }

    /// Takes in what the battery gave while links were in use, each by a share of its capacity from 0 to 1. Links that are not
    /// named were idle.
    pub fn on_sample(&mut self, now: Time, battery: Power, shares: &[(LinkIndex, f64)]) {
        let seconds = match self.last {
            Some(last) if now.as_nanos().saturating_sub(last.as_nanos()) < LEAST_INTERVAL_NANOS => return,
            Some(last) => now.since(last).as_secs_f64(),
            None => 0.0,
        };
        if self.state.is_empty() {
            return;
        }
        self.last = Some(now);
        self.drift(seconds);
        let named = |link: &LinkIndex| shares.iter().find(|(named, share)| named == link && share.is_finite());
        let share = |link: &LinkIndex| named(link).map_or(0.0, |(_, share)| share.clamp(0.0, 1.0));
        let inputs: Vec<f64> = std::iter::once(1.0).chain(self.links.iter().map(share)).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let column: Vec<f64> = self.doubt.iter().map(|row| dot(row, &inputs)).collect();
        let spread = dot(&column, &inputs).max(0.0);
        let variance = spread + self.noise;
        let bound = OUTLIER * variance.sqrt();
        let surprise = (battery.watts() - dot(&self.state, &inputs)).clamp(-bound, bound);
        // What a sample is off by beyond the doubt that is there already is noise.
        let unexplained = (surprise * surprise - spread).max(LEAST_NOISE);
        self.noise += NOISE_GAIN * (unexplained - self.noise);
        for (at, gain) in column.iter().map(|doubt| doubt / variance).enumerate() {
            self.state[at] = (self.state[at] + gain * surprise).max(0.0);
            for (doubt, other) in self.doubt[at].iter_mut().zip(&column) {
                *doubt -= gain * other;
            }
        }
    }

    /// Doubt grows with time, up to what it was at first.
    fn drift(&mut self, seconds: f64) {
        for at in 0..self.state.len() {
            let (growth, most) = if at == 0 { (REST_DRIFT, REST_VARIANCE) } else { (LINK_DRIFT, LINK_VARIANCE) };
            let doubt = &mut self.doubt[at][at];
            // Rounding may not take it below zero either.
            *doubt = (*doubt + growth * seconds).clamp(0.0, most);
        }
    }

    /// What is known of a link.
    pub fn power(&self, link: LinkIndex) -> Option<FittedPower> {
        let at = self.links.iter().position(|known| *known == link)? + 1;
        let confidence = (1.0 - self.doubt[at][at] / LINK_VARIANCE).clamp(0.0, 1.0);
        Some(FittedPower { active: Power::from_watts(self.state[at]), confidence })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WIFI: LinkIndex = LinkIndex(3);
    const LTE: LinkIndex = LinkIndex(7);

    fn fit() -> PowerFit {
        let mut fit = PowerFit::default();
        fit.expect(WIFI, Power::from_watts(0.1));
        fit.expect(LTE, Power::from_watts(3.0));
        fit
    }

    /// Feeds an hour of a machine whose other load wanders between 4 and 8 W; `glitch` of a hundred samples are nonsense.
    fn machine(fit: &mut PowerFit, truth: [f64; 2], glitches: u64) {
        let mut seed = 1u64;
        let mut chance = |of: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % of
        };
        let mut rest = 6.0;
        for second in 0..3600 {
            rest = f64::clamp(rest + (chance(201) as f64 - 100.0) / 1000.0, 4.0, 8.0);
            let shares = [chance(3) as f64 / 2.0, chance(2) as f64];
            let noise = (chance(201) as f64 - 100.0) / 1000.0;
            let mut power = rest + noise + truth[0] * shares[0] + truth[1] * shares[1];
            if chance(100) < glitches {
                power = 60.0;
            }
            fit.on_sample(Time::from_millis(second * 1000), Power::from_watts(power), &[(WIFI, shares[0]), (LTE, shares[1])]);
        }
    }

    #[test]
    fn appetites_are_found_while_the_rest_wanders() {
        for glitches in [0, 2] {
            let mut fit = fit();
            machine(&mut fit, [0.9, 1.8], glitches);
            let (wifi, lte) = (fit.power(WIFI).unwrap(), fit.power(LTE).unwrap());
            assert!((wifi.active.watts() - 0.9).abs() < 0.15 && (lte.active.watts() - 1.8).abs() < 0.15, "{glitches}: {wifi:?} {lte:?}");
            assert!(wifi.confidence > 0.9 && lte.confidence > 0.9, "{wifi:?} {lte:?}");
        }
    }

    #[test]
    fn a_link_that_is_never_used_keeps_its_profile_and_no_confidence() {
        let mut fit = fit();
        for second in 0..600 {
            fit.on_sample(Time::from_millis(second * 1000), Power::from_watts(5.0), &[]);
        }
        let lte = fit.power(LTE).unwrap();
        assert!((lte.active.watts() - 3.0).abs() < 0.01 && lte.confidence < 0.01, "{lte:?}");
    }

    #[test]
    fn links_come_and_go() {
        let mut fit = fit();
        machine(&mut fit, [0.9, 1.8], 0);
        let before = fit.power(LTE);
        fit.retain(|link| link == LTE);
        assert_eq!((fit.power(WIFI), fit.power(LTE)), (None, before));
        fit.expect(WIFI, Power::from_watts(2.0));
        assert_eq!(fit.power(WIFI), Some(FittedPower { active: Power::from_watts(2.0), confidence: 0.0 }));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn nothing_that_a_sensor_says_breaks_it(samples in prop::collection::vec((0u64..5_000, -1e12f64..1e12, prop_oneof![9 => -3.0f64..3.0, 1 => Just(f64::NAN)]), 0..200)) {
            let mut fit = fit();
            let mut now = 0;
            for (step, watts, share) in samples {
                now += step;
                fit.on_sample(Time::from_millis(now), Power::from_watts(watts), &[(WIFI, share), (LTE, 1.0 - share)]);
            }
            for link in [WIFI, LTE] {
                let found = fit.power(link).unwrap();
                prop_assert!(found.active.watts().is_finite() && (0.0..=1.0).contains(&found.confidence));
            }
        }
    }
}
