//! Estimates the power of links from the battery's discharge power during operation.
//!
//! The model of the battery's power is `rest + sum_j a_j * u_j`, where `u_j` is the used share of link j's capacity. A Kalman filter tracks the
//! unknowns. The rest of the machine may change quickly, but a link's power changes only slowly, so the filter attributes changes that correlate with
//! a link's use to that link. OPERETTA (III.C) only says that the rates "can also be estimated dynamically"; this method is Braid's own.

use braid_model::{LinkIndex, Power, Time};

/// Initial variance of the rest of the machine, in square watts.
const REST_VARIANCE: f64 = 100.0;
/// Growth of the variance of the rest, in square watts per second.
const REST_DRIFT: f64 = 0.02;
/// Initial variance of a link's power: the profile may be off by 2 W.
const LINK_VARIANCE: f64 = 4.0;
/// Growth of the variance of a link's power per second: half of the initial variance is back after some days.
const LINK_DRIFT: f64 = 1e-5;
/// A residual is clipped to this many standard deviations.
const OUTLIER: f64 = 3.0;
/// Weight of the newest sample in the noise estimate.
const NOISE_GAIN: f64 = 0.02;
/// Minimum noise variance: sensors are no more precise than about 30 mW.
const MIN_NOISE: f64 = 1e-3;
/// Samples closer together than this are ignored, because they contain little new information.
const MIN_INTERVAL_NANOS: u64 = 500_000_000;

/// The estimated power of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FittedPower {
    /// Additional battery load at full use of the link (OPERETTA's `a_j`).
    pub active: Power,
    /// Confidence, from 0 (the profile's value) to 1.
    pub confidence: f64,
}

/// The estimator. Its state is quadratic in the number of links, and so is the time of a sample.
#[derive(Debug, Clone, Default)]
pub struct PowerFit {
    links: Vec<LinkIndex>,
    /// Power of the rest of the machine, then of each link, in watts.
    state: Vec<f64>,
    /// Covariance of the state, in square watts.
    covariance: Vec<Vec<f64>>,
    /// Variance of a sample's residual that the covariance does not explain.
    noise: f64,
    last: Option<Time>,
}

impl PowerFit {
    /// Adds a link with the power from its profile as the initial value. Does nothing if the link exists.
    pub fn expect(&mut self, link: LinkIndex, active: Power) {
        if self.state.is_empty() {
            self.state.push(0.0);
            self.covariance.push(vec![REST_VARIANCE]);
            self.noise = 1.0;
        }
        if self.links.contains(&link) {
            return;
        }
        self.links.push(link);
        self.state.push(active.watts());
        self.covariance.iter_mut().for_each(|row| row.push(0.0));
        let mut row = vec![0.0; self.state.len()];
        row[self.state.len() - 1] = LINK_VARIANCE;
        self.covariance.push(row);
    }

    /// Removes the links for which `stays` returns false.
    pub fn retain(&mut self, stays: impl Fn(LinkIndex) -> bool) {
        for at in (0..self.links.len()).rev().filter(|at| !stays(self.links[*at])).collect::<Vec<_>>() {
            self.links.remove(at);
            self.state.remove(at + 1);
            self.covariance.remove(at + 1);
            for row in &mut self.covariance {
                row.remove(at + 1);
            }
        }
    }

    /// Processes a sample: the battery's discharge power while links were in use, each by a share of its capacity from 0 to 1. Links without a share
    /// were idle.
    pub fn on_sample(&mut self, now: Time, battery: Power, shares: &[(LinkIndex, f64)]) {
        let seconds = match self.last {
            Some(last) if now.as_nanos().saturating_sub(last.as_nanos()) < MIN_INTERVAL_NANOS => return,
            Some(last) => now.since(last).as_secs_f64(),
            None => 0.0,
        };
        if self.state.is_empty() {
            return;
        }
        self.last = Some(now);
        self.grow_variances(seconds);
        let named = |link: &LinkIndex| shares.iter().find(|(named, share)| named == link && share.is_finite());
        let share = |link: &LinkIndex| named(link).map_or(0.0, |(_, share)| share.clamp(0.0, 1.0));
        let inputs: Vec<f64> = std::iter::once(1.0).chain(self.links.iter().map(share)).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let column: Vec<f64> = self.covariance.iter().map(|row| dot(row, &inputs)).collect();
        let state_variance = dot(&column, &inputs).max(0.0);
        let variance = state_variance + self.noise;
        let bound = OUTLIER * variance.sqrt();
        let residual = (battery.watts() - dot(&self.state, &inputs)).clamp(-bound, bound);
        // The part of the residual that the covariance does not explain is noise.
        let unexplained = (residual * residual - state_variance).max(MIN_NOISE);
        self.noise += NOISE_GAIN * (unexplained - self.noise);
        for (at, gain) in column.iter().map(|covariance| covariance / variance).enumerate() {
            self.state[at] = (self.state[at] + gain * residual).max(0.0);
            for (covariance, other) in self.covariance[at].iter_mut().zip(&column) {
                *covariance -= gain * other;
            }
        }
    }

    /// Lets the variances grow with time, up to their initial values.
    fn grow_variances(&mut self, seconds: f64) {
        for at in 0..self.state.len() {
            let (growth, most) = if at == 0 { (REST_DRIFT, REST_VARIANCE) } else { (LINK_DRIFT, LINK_VARIANCE) };
            let covariance = &mut self.covariance[at][at];
            // Rounding errors must not make a variance negative.
            *covariance = (*covariance + growth * seconds).clamp(0.0, most);
        }
    }

    /// The current estimate for a link.
    pub fn power(&self, link: LinkIndex) -> Option<FittedPower> {
        let at = self.links.iter().position(|known| *known == link)? + 1;
        let confidence = (1.0 - self.covariance[at][at] / LINK_VARIANCE).clamp(0.0, 1.0);
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

    /// Feeds an hour of samples from a machine whose other load varies between 4 and 8 W. `glitches` percent of the samples are wrong.
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
    fn link_powers_are_found_while_the_rest_varies() {
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
    fn removed_links_lose_their_estimate() {
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
        fn arbitrary_sensor_values_keep_estimates_finite(samples in prop::collection::vec((0u64..5_000, -1e12f64..1e12, prop_oneof![9 => -3.0f64..3.0, 1 => Just(f64::NAN)]), 0..200)) {
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
