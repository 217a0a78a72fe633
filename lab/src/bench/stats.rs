//! Statistics of measurements.

use serde::Serialize;
use serde_json::{Value, json};

/// Two-sided 95 % points of Student's t for 1 to 30 degrees of freedom.
const STUDENT: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
    2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/// A mean with its spread. All zero for no measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(super) struct Mean {
    /// The arithmetic mean.
    pub(super) mean: f64,
    /// Standard deviation of one measurement; 0 for fewer than two.
    pub(super) deviation: f64,
    /// Half the width of the 95 % confidence interval of the mean; 0 for fewer than two.
    pub(super) half_width: f64,
    /// Number of measurements.
    pub(super) count: usize,
}

impl Mean {
    /// Of these values.
    pub(super) fn of(values: &[f64]) -> Self {
        let count = values.len();
        if count == 0 {
            return Self::default();
        }
        let mean = values.iter().sum::<f64>() / count as f64;
        if count == 1 {
            return Self { mean, deviation: 0.0, half_width: 0.0, count };
        }
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1) as f64).sqrt();
        let student = STUDENT.get(count - 2).copied().unwrap_or(1.96);
        Self { mean, deviation, half_width: student * deviation / (count as f64).sqrt(), count }
    }

    /// Of the ratios of values taken in pairs.
    pub(super) fn of_ratios(over: &[f64], under: &[f64]) -> Self {
        Self::of(&over.iter().zip(under).map(|(over, under)| over / under).collect::<Vec<_>>())
    }

    /// The confidence interval's ends.
    pub(super) fn interval(&self) -> (f64, f64) {
        (self.mean - self.half_width, self.mean + self.half_width)
    }
}

/// A row of measurements without and with Braid, pair by pair.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    pub(super) without: Vec<f64>,
    pub(super) with: Vec<f64>,
}

impl Pairs {
    pub(super) fn push(&mut self, with: bool, value: f64) {
        if with { &mut self.with } else { &mut self.without }.push(value);
    }

    pub(super) fn ratios(&self) -> Vec<f64> {
        self.with.iter().zip(&self.without).map(|(with, without)| with / without).collect()
    }

    /// The mean of the ratios.
    pub(super) fn ratio(&self) -> Mean {
        Mean::of(&self.ratios())
    }

    /// The geometric mean of the ratios, with the ends of its 95 % confidence interval (Student's, of their logarithms):
    /// a ratio and its inverse weigh the same, so two sides that only scatter come to 1.
    pub(super) fn geometric(&self) -> [f64; 3] {
        let logs = Mean::of(&self.ratios().iter().map(|ratio| ratio.ln()).collect::<Vec<_>>());
        let (low, high) = logs.interval();
        [logs.mean, low, high].map(f64::exp)
    }

    /// Additional time with Braid, per pair.
    pub(super) fn more(&self) -> Mean {
        Mean::of(&self.with.iter().zip(&self.without).map(|(with, without)| with - without).collect::<Vec<_>>())
    }

    pub(super) fn json(&self) -> Value {
        json!({ "without": self.without, "with": self.with, "ratio": self.ratio() })
    }
}

/// The value below which `share` (0 to 1) of the values lie, by the nearest rank; 0 for none.
pub(super) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

/// The middle value; 0 for none.
pub(super) fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The largest value; 0 for none.
pub(super) fn worst(values: &[f64]) -> f64 {
    quantile(values, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_has_students_interval() {
        let mean = Mean::of(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!((mean.mean, mean.count), (3.0, 5));
        assert!((mean.deviation - 2.5f64.sqrt()).abs() < 1e-12);
        assert!((mean.half_width - 2.776 * (2.5f64 / 5.0).sqrt()).abs() < 1e-12);
        let (low, high) = mean.interval();
        assert!((low + high - 6.0).abs() < 1e-12 && low < 3.0);
    }

    #[test]
    fn quantiles_work_for_few_and_many_values() {
        assert_eq!(Mean::of(&[]), Mean::default());
        assert_eq!(Mean::of(&[7.0]).half_width, 0.0);
        let many = Mean::of(&(0..100).map(f64::from).collect::<Vec<_>>());
        assert!((many.half_width - 1.96 * many.deviation / 10.0).abs() < 1e-9);
    }

    #[test]
    fn ratios_are_computed_per_pair() {
        assert_eq!(Mean::of_ratios(&[2.0, 9.0], &[1.0, 3.0]).mean, 2.5);
    }

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let values = [5.0, 1.0, 4.0, 2.0, 3.0];
        assert_eq!((median(&values), worst(&values), quantile(&values, 0.99), quantile(&values, 0.0)), (3.0, 5.0, 5.0, 1.0));
        assert_eq!(median(&[1.0, 2.0]), 1.0);
        assert_eq!((median(&[]), worst(&[])), (0.0, 0.0));
    }

    #[test]
    fn scatter_alone_is_no_gain() {
        let mut pairs = Pairs::default();
        for (with, without) in [(2.0, 1.0), (1.0, 2.0), (4.0, 1.0), (1.0, 4.0)] {
            pairs.push(true, with);
            pairs.push(false, without);
        }
        let [middle, low, high] = pairs.geometric();
        assert!((middle - 1.0).abs() < 1e-12 && (low * high - 1.0).abs() < 1e-12 && low < 0.5, "{middle} {low} {high}");
        assert!(pairs.ratio().mean > 1.6);
    }

    #[test]
    fn pairs_keep_their_sides_separate() {
        let mut pairs = Pairs::default();
        for (with, value) in [(true, 9.0), (false, 10.0), (false, 20.0), (true, 19.0)] {
            pairs.push(with, value);
        }
        assert_eq!(pairs.ratios(), [0.9, 0.95]);
        assert!((pairs.ratio().mean - 0.925).abs() < 1e-12);
        assert_eq!(pairs.more().mean, -1.0);
    }
}
