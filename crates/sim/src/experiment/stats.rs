//! Means, confidence intervals, quantiles and distributions.

use std::fmt;

use serde::Serialize;

/// Student's t, 97.5 % quantile, for 1 to 30 degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
    2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// Student's t, 97.5 % quantile, for more degrees of freedom: (lowest number of degrees, t).
const STUDENT_FAR: [(usize, f64); 4] = [(1000, 1.962), (120, 1.980), (60, 2.000), (40, 2.021)];

/// Statistics of repeated measurements. Displayed as `mean ± half`, with the requested precision.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Number of measurements.
    pub count: usize,
    /// Mean; NaN without measurements.
    pub mean: f64,
    /// Sample standard deviation (divisor n - 1); zero for fewer than two measurements.
    pub deviation: f64,
    /// Half the width of the 95 % confidence interval of the mean (Student's t); zero for fewer than two measurements.
    pub half: f64,
}

impl Summary {
    /// Computes the statistics of `values`, in their order.
    pub fn of(values: &[f64]) -> Self {
        let count = values.len();
        let mean = values.iter().sum::<f64>() / count as f64;
        if count < 2 {
            return Self { count, mean, deviation: 0.0, half: 0.0 };
        }
        let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
        let deviation = (squares / (count - 1) as f64).sqrt();
        Self { count, mean, deviation, half: student(count - 1) * deviation / (count as f64).sqrt() }
    }

    /// A number without a spread, for example the result of a deterministic run.
    pub fn exact(value: f64) -> Self {
        Self { count: 1, mean: value, deviation: 0.0, half: 0.0 }
    }

    /// The lower end of the confidence interval.
    pub fn least(&self) -> f64 {
        self.mean - self.half
    }

    /// The same measurements with the opposite sign.
    pub fn negated(self) -> Self {
        Self { mean: -self.mean, ..self }
    }

    /// The one of `several` whose confidence interval has the lowest lower end; NaN if one of them is. Without any, infinite.
    pub fn weakest(several: impl IntoIterator<Item = Self>) -> Self {
        several.into_iter().fold(Self::exact(f64::INFINITY), |weakest, one| {
            if one.least() < weakest.least() || one.least().is_nan() { one } else { weakest }
        })
    }

    /// Whether the confidence interval contains `value`.
    pub fn holds(&self, value: f64) -> bool {
        (self.mean - value).abs() <= self.half
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let places = f.precision().unwrap_or(2);
        write!(f, "{:.places$}", self.mean)?;
        if self.count > 1 { write!(f, " ± {:.places$}", self.half) } else { Ok(()) }
    }
}

/// Between rows of the table this uses the row with fewer degrees of freedom, so that an interval is never too narrow.
fn student(freedom: usize) -> f64 {
    match STUDENT_FAR.iter().find(|(from, _)| freedom >= *from) {
        Some((_, t)) => *t,
        None => STUDENT[freedom.clamp(1, STUDENT.len()) - 1],
    }
}

/// The `share` quantile (0 to 1) of `samples`, by the nearest-rank method. `None` without samples.
pub fn quantile(samples: &[f64], share: f64) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

/// The cumulative distribution of `samples` as at most `most` steps: (value, share of samples up to this value).
pub fn distribution(samples: &[f64], most: usize) -> Vec<(f64, f64)> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (count, most) = (sorted.len(), most.clamp(1, sorted.len().max(1)));
    let ranks = (1..=most).map(|step| (step * count).div_ceil(most));
    ranks.filter_map(|rank| Some((*sorted.get(rank.checked_sub(1)?)?, rank as f64 / count as f64))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_matches_known_values() {
        let summary = Summary::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert_eq!((summary.count, summary.mean), (8, 5.0));
        assert!((summary.deviation - 2.138_089_935).abs() < 1e-9, "{summary:?}");
        assert!((summary.half - 2.365 * 2.138_089_935 / 8f64.sqrt()).abs() < 1e-9, "{summary:?}");
        assert!(summary.holds(6.7) && !summary.holds(6.8));
        assert_eq!(format!("{summary:.1}"), "5.0 ± 1.8");
    }

    #[test]
    fn one_measurement_has_no_interval_and_an_empty_sample_no_mean() {
        assert_eq!(format!("{:.2}", Summary::of(&[3.0])), "3.00");
        assert!(Summary::of(&[]).mean.is_nan());
    }

    #[test]
    fn confidence_falls_with_more_measurements() {
        assert_eq!([1, 14, 30, 35, 40, 119, 5000].map(student), [12.706, 2.145, 2.042, 2.042, 2.021, 2.0, 1.962]);
        assert!((1..2000).all(|freedom| student(freedom) >= student(freedom + 1)));
    }

    #[test]
    fn distributions_are_steps_up_to_one() {
        let samples = [4.0, 1.0, 3.0, 2.0];
        assert_eq!(distribution(&samples, 10), [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]);
        assert_eq!(distribution(&samples, 2), [(2.0, 0.5), (4.0, 1.0)]);
        assert_eq!(distribution(&[], 5), []);
        assert_eq!([0.0, 0.5, 0.51, 1.0].map(|share| quantile(&samples, share)), [Some(1.0), Some(2.0), Some(3.0), Some(4.0)]);
        assert_eq!(quantile(&[], 0.5), None);
    }
}
