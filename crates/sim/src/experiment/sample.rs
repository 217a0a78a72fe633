//! Samples of measurements, and queries on them.

use std::collections::BTreeMap;

use super::stats::Summary;
use super::{Job, Point};
use braid_plot::{Dot, Series};

/// (x, y) pairs.
pub type Curve = Vec<(f64, f64)>;

/// Values and curves of one measurement.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    values: BTreeMap<String, f64>,
    curves: BTreeMap<String, Curve>,
}

impl Sample {
    /// Adds a named value.
    pub fn value(mut self, name: impl Into<String>, value: f64) -> Self {
        self.values.insert(name.into(), value);
        self
    }

    /// Adds a named curve.
    pub fn curve(mut self, name: impl Into<String>, curve: Curve) -> Self {
        self.curves.insert(name.into(), curve);
        self
    }
}

/// Samples of all measurements of an experiment, ordered by point, then by run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples(Vec<(Job, Sample)>);

impl Samples {
    /// Wraps the samples of [`super::Setting::jobs`], in that order.
    pub fn new(samples: Vec<(Job, Sample)>) -> Self {
        Self(samples)
    }

    /// The value `name` of every run at one point.
    pub fn values(&self, name: &str, at: (&str, f64)) -> Vec<f64> {
        self.at(at).filter_map(|sample| sample.values.get(name)).copied().collect()
    }

    /// Summary of the value over the runs. Its mean is NaN if the value was not measured.
    pub fn summary(&self, name: &str, at: (&str, f64)) -> Summary {
        Summary::of(&self.values(name, at))
    }

    /// Difference of `name` at `at` relative to `base` in percent, compared run by run.
    pub fn gain(&self, name: &str, at: (&str, f64), base: (&str, f64)) -> Summary {
        let pairs = self.values(name, at).into_iter().zip(self.values(name, base));
        Summary::of(&pairs.map(|(value, base)| (value / base - 1.0) * 100.0).collect::<Vec<_>>())
    }

    /// Statistics of a number that is computed from all points of one run: `of` gets the values of a run by name and point, and the result is
    /// computed for each run that every point has.
    pub fn per_run(&self, of: impl Fn(&dyn Fn(&str, (&str, f64)) -> f64) -> f64) -> Summary {
        let runs = self.0.iter().map(|(job, _)| job.index).max().map_or(0, |last| last + 1);
        let number = |run: u32| {
            of(&|name, (series, x)| {
                let mut at = self.0.iter().filter(|(job, _)| job.index == run && job.point.series == series && job.point.x == x);
                at.find_map(|(_, sample)| sample.values.get(name)).copied().unwrap_or(f64::NAN)
            })
        };
        Summary::of(&(0..runs).map(number).filter(|number| !number.is_nan()).collect::<Vec<_>>())
    }

    /// The curve `name` of the first run at one point; empty if there is none.
    pub fn curve(&self, name: &str, at: (&str, f64)) -> &[(f64, f64)] {
        self.at(at).find_map(|sample| sample.curves.get(name)).map_or(&[], Vec::as_slice)
    }

    /// The x values of a series, in the order of points.
    pub fn xs(&self, series: &str) -> Vec<f64> {
        self.points().filter(|point| point.series == series).map(|point| point.x).collect()
    }

    /// The value `name` over x: one line per series, with confidence intervals.
    pub fn series(&self, name: &str) -> Vec<Series> {
        let mut lines: Vec<Series> = Vec::new();
        for point in self.points() {
            let summary = self.summary(name, (&point.series, point.x));
            let dot = Dot { x: point.x, y: summary.mean, half: summary.half };
            match lines.iter_mut().find(|line| line.name == point.series) {
                Some(line) => line.dots.push(dot),
                None => lines.push(Series { name: point.series.clone(), dots: vec![dot] }),
            }
        }
        lines
    }

    fn points(&self) -> impl Iterator<Item = &Point> {
        self.0.iter().filter(|(job, _)| job.index == 0).map(|(job, _)| &job.point)
    }

    fn at<'a, 'b>(&'a self, (series, x): (&'b str, f64)) -> impl Iterator<Item = &'a Sample> + use<'a, 'b> {
        self.0.iter().filter(move |(job, _)| job.point.series == series && job.point.x == x).map(|(_, sample)| sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Samples {
        let measured = |series: &str, x, index, value| {
            let job = Job { point: Point { series: series.to_owned(), x }, index, seed: 0 };
            (job, Sample::default().value("rate", value).curve("over time", vec![(0.0, value)]))
        };
        Samples::new(vec![
            measured("a", 1.0, 0, 2.0),
            measured("a", 1.0, 1, 4.0),
            measured("a", 2.0, 0, 5.0),
            measured("a", 2.0, 1, 5.0),
            measured("b", 1.0, 0, 3.0),
            measured("b", 1.0, 1, 6.0),
        ])
    }

    #[test]
    fn values_are_selected_by_point_and_compared_run_by_run() {
        let samples = samples();
        assert_eq!(samples.values("rate", ("a", 1.0)), [2.0, 4.0]);
        assert_eq!(samples.xs("a"), [1.0, 2.0]);
        let gain = samples.gain("rate", ("b", 1.0), ("a", 1.0));
        assert_eq!((gain.mean, gain.half), (50.0, 0.0), "though the values differ between runs");
        assert_eq!(samples.curve("over time", ("b", 1.0)), [(0.0, 3.0)]);
    }

    #[test]
    fn numbers_of_one_run_are_compared_within_it() {
        let ratio = samples().per_run(|value| value("rate", ("b", 1.0)) / value("rate", ("a", 1.0)));
        assert_eq!((ratio.count, ratio.mean, ratio.half), (2, 1.5, 0.0));
        assert_eq!(samples().per_run(|value| value("rate", ("c", 1.0))).count, 0);
    }

    #[test]
    fn values_that_were_not_measured_are_nan() {
        assert!(samples().summary("rate", ("b", 2.0)).mean.is_nan());
        assert!(samples().summary("delay", ("a", 1.0)).mean.is_nan());
        assert_eq!(samples().curve("delay", ("a", 1.0)), []);
    }

    #[test]
    fn lines_follow_the_points() {
        let lines = samples().series("rate");
        assert_eq!(lines.iter().map(|line| (line.name.as_str(), line.dots.len())).collect::<Vec<_>>(), [("a", 2), ("b", 1)]);
        assert_eq!((lines[0].dots[0].y, lines[0].dots[1].half), (3.0, 0.0));
        assert!(lines[0].dots[0].half > 12.0, "two runs give a wide interval");
    }
}
