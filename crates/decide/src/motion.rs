//! Whether the machine moves, from the readings of an accelerometer: the variance of the acceleration's magnitude.
//!
//! The magnitude does not depend on the machine's orientation, and gravity is constant, so that only shaking remains. A vehicle or a person who
//! walks shakes a machine without pause; a bump of the table does so once.

use std::collections::VecDeque;
use std::time::Duration;

use braid_model::Time;

/// Time over which the variance is computed.
pub const WINDOW: Duration = Duration::from_secs(5);
/// Time between two samples.
pub const INTERVAL: Duration = Duration::from_millis(200);
/// Standard deviation from the median in m/s² from which the machine moves. Sensors at rest have less than 0.1.
const STARTS: f64 = 0.4;
/// Standard deviation in m/s² below which it may stand still.
const STOPS: f64 = 0.2;
/// Minimum number of samples for a judgement.
const MIN_SAMPLES: usize = 10;
/// Share of the samples that must deviate from the median by more than [`STOPS`] to start: a single bump does not.
const MIN_SHARE: f64 = 0.3;
/// The machine still counts as moving for this long after it last shook, for instance at a traffic light.
const HOLD: Duration = Duration::from_secs(60);
/// Samples beyond this magnitude in m/s² are faulty.
const MAX_MAGNITUDE: f64 = 400.0;

/// Detects motion from samples.
#[derive(Debug, Clone, Default)]
pub struct MotionDetector {
    samples: VecDeque<(Time, f64)>,
    shaken: Option<Time>,
    moving: Option<bool>,
}

impl MotionDetector {
    /// Adds the acceleration along three axes in m/s², including gravity, and returns whether the machine moves; `None` while there are too few
    /// samples. A faulty sample is ignored.
    pub fn on_sample(&mut self, now: Time, axes: [f64; 3]) -> Option<bool> {
        let magnitude = axes.iter().map(|axis| axis * axis).sum::<f64>().sqrt();
        // This also rejects a value that is not a number.
        if (0.0..=MAX_MAGNITUDE).contains(&magnitude) {
            self.samples.push_back((now, magnitude));
        }
        while self.samples.front().is_some_and(|(at, _)| now.since(*at) > WINDOW) {
            self.samples.pop_front();
        }
        if self.samples.len() < MIN_SAMPLES {
            return self.moving;
        }
        let count = self.samples.len() as f64;
        // The median, since a single bump would shift the mean away from all other samples.
        let mut magnitudes: Vec<f64> = self.samples.iter().map(|(_, magnitude)| *magnitude).collect();
        magnitudes.sort_by(f64::total_cmp);
        let median = magnitudes[magnitudes.len() / 2];
        let deviations = || magnitudes.iter().map(|magnitude| (magnitude - median).abs());
        let deviation = (deviations().map(|by| by * by).sum::<f64>() / count).sqrt();
        let shaking = deviations().filter(|by| *by > STOPS).count() as f64 >= MIN_SHARE * count;
        if deviation >= STARTS && shaking || self.moving == Some(true) && deviation >= STOPS {
            self.shaken = Some(now);
        }
        self.moving = Some(self.shaken.is_some_and(|shaken| now.since(shaken) < HOLD));
        self.moving
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds samples from `from` for `seconds`; returns the last judgement.
    fn feed(detector: &mut MotionDetector, from: u64, seconds: u64, sample: impl Fn(u64) -> [f64; 3]) -> Option<bool> {
        let step = INTERVAL.as_millis() as u64;
        let mut last = None;
        for number in 0..seconds * 1000 / step {
            last = detector.on_sample(Time::from_millis(from * 1000 + number * step), sample(number));
        }
        last
    }

    fn at_rest(number: u64) -> [f64; 3] {
        [0.02 * (number % 3) as f64, -0.01, 9.81 + 0.03 * (number % 2) as f64]
    }

    fn walking(number: u64) -> [f64; 3] {
        [0.3, 0.1, 9.81 + 2.0 * (number as f64 * 1.3).sin()]
    }

    #[test]
    fn shaking_is_motion_until_a_minute_after_it_ends() {
        let mut detector = MotionDetector::default();
        assert_eq!(feed(&mut detector, 0, 1, at_rest), None, "too few samples");
        assert_eq!(feed(&mut detector, 1, 20, at_rest), Some(false));
        assert_eq!(feed(&mut detector, 21, 10, walking), Some(true));
        assert_eq!(feed(&mut detector, 31, 50, at_rest), Some(true), "a traffic light");
        assert_eq!(feed(&mut detector, 81, 30, at_rest), Some(false));
    }

    #[test]
    fn a_bump_a_new_orientation_and_faulty_samples_are_no_motion() {
        let mut detector = MotionDetector::default();
        feed(&mut detector, 0, 10, at_rest);
        assert_eq!(feed(&mut detector, 10, 10, |number| if number == 7 { [0.0, 0.0, 25.0] } else { at_rest(number) }), Some(false));
        assert_eq!(
            feed(&mut detector, 20, 10, |number| {
                let [x, y, z] = at_rest(number);
                [z, x, y]
            }),
            Some(false)
        );
        let faulty = [[f64::NAN, 0.0, 0.0], [f64::INFINITY, 0.0, 0.0], [1e9, 0.0, 0.0]];
        assert_eq!(feed(&mut detector, 30, 10, |number| faulty[number as usize % 3]), Some(false));
    }
}
