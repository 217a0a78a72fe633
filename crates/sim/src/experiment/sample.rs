//! What was measured, and questions to it.

use std::collections::BTreeMap;

use super::stats::Summary;
use super::{Job, Point};
use braid_plot::{Dot, Series};

/// (x, y) pairs.
pub type Curve = Vec<(f64, f64)>;

/// What one measurement gave.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sample {
    values: BTreeMap<String, f64>,
    curves: BTreeMap<String, Curve>,
}

impl Sample {
    /// With a number under a name.
    pub fn value(mut self, name: impl Into<String>, value: f64) -> Self {
        self.values.insert(name.into(), value);
        self
    }

    /// With a curve under a name.
    pub fn curve(mut self, name: impl Into<String>, curve: Curve) -> Self {
        self.curves.insert(name.into(), curve);
        self
    }
}

/// What all measurements of an experiment gave, in the order of its points and, for each, of its runs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples(Vec<(Job, Sample)>);

impl Samples {
    /// From the samples of [`super::Setting::jobs`], in that order.
    pub fn new(samples: Vec<(Job, Sample)>) -> Self {
        Self(samples)
    }

    /// The number `name` of every run at one point.
    pub fn values(&self, name: &str, at: (&str, f64)) -> Vec<f64> {
        self.at(at).filter_map(|sample| sample.values.get(name)).copied().collect()
    }

    /// Its mean over the runs; no number if it was not measured.
    pub fn summary(&self, name: &str, at: (&str, f64)) -> Summary {
        Summary::of(&self.values(name, at))
    }

    /// By how many percent `name` is greater at `at` than at `base`, compared run by run.
    pub fn gain(&self, name: &str, at: (&str, f64), base: (&str, f64)) -> Summary {
        let pairs = self.values(name, at).into_iter().zip(self.values(name, base));
        Summary::of(&pairs.map(|(value, base)| (value / base - 1.0) * 100.0).collect::<Vec<_>>())
    }

    /// The curve `name` of the first run at one point; empty if there is none.
    pub fn curve(&self, name: &str, at: (&str, f64)) -> &[(f64, f64)] {
        self.at(at).find_map(|sample| sample.curves.get(name)).map_or(&[], Vec::as_slice)
    }

    /// The series' x values, in the order of points.
    pub fn xs(&self, series: &str) -> Vec<f64> {
        self.points().filter(|point| point.series == series).map(|point| point.x).collect()
    }

    /// The number `name` over x: a line for each series, with confidence intervals.
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
    fn numbers_are_found_by_point_and_compared_run_by_run() {
        let samples = samples();
        assert_eq!(samples.values("rate", ("a", 1.0)), [2.0, 4.0]);
        assert_eq!(samples.xs("a"), [1.0, 2.0]);
        let gain = samples.gain("rate", ("b", 1.0), ("a", 1.0));
        assert_eq!((gain.mean, gain.half), (50.0, 0.0), "though the means differ from run to run");
        assert_eq!(samples.curve("over time", ("b", 1.0)), [(0.0, 3.0)]);
    }

    #[test]
    fn what_was_not_measured_is_no_number() {
        assert!(samples().summary("rate", ("b", 2.0)).mean.is_nan());
        assert!(samples().summary("delay", ("a", 1.0)).mean.is_nan());
        assert_eq!(samples().curve("delay", ("a", 1.0)), []);
    }

    #[test]
    fn lines_follow_the_points() {
        let lines = samples().series("rate");
        assert_eq!(lines.iter().map(|line| (line.name.as_str(), line.dots.len())).collect::<Vec<_>>(), [("a", 2), ("b", 1)]);
        assert_eq!((lines[0].dots[0].y, lines[0].dots[1].half), (3.0, 0.0));
        assert!(lines[0].dots[0].half > 12.0, "two runs say little");
    }
}
