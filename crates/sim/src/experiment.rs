//! The framework of experiments: points that can be measured on all cores, statistics, charts, and claims set beside results.
//!
//! # How to write one
//!
//! An experiment is a type without state. It says what it is ([`About`]), lists its [`Point`]s (a series and an x value each),
//! measures one point with one seed, and puts all that was measured together into [`Results`]:
//!
//! ```
//! use braid_sim::experiment::*;
//!
//! struct Narrowing;
//!
//! static ABOUT: About = About {
//!     name: "dbas-0x", // the paper's short name and the figure; what `braid sim run` takes
//!     paper: Paper::Dbas,
//!     figure: "fig. 0x",
//!     title: "Throughput as IF2 narrows",
//!     setting: "Two links of 2 Mbit/s and x Mbit/s.",
//!     sampling: Sampling::Repeated,
//!     claims: &[Claim { text: "Two links carry more than one", paper: "up to 100 % more" }],
//! };
//!
//! impl Experiment for Narrowing {
//!     fn about(&self) -> &'static About {
//!         &ABOUT
//!     }
//!     fn points(&self) -> Vec<Point> {
//!         Point::grid(&["one link", "two links"], &[1.0, 2.0])
//!     }
//!     fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
//!         let noise = (run.seed % 100) as f64 / 1e4; // a simulation with `run.seed` stands here
//!         let rest = if point.series == "two links" { point.x } else { 0.0 };
//!         Sample::default().value("throughput", 2.0 + rest + noise)
//!     }
//!     fn assemble(&self, samples: &Samples) -> Results {
//!         let gain = samples.gain("throughput", ("two links", 2.0), ("one link", 2.0)); // percent, paired by run
//!         let chart = Chart::lines("", "Throughput", Axis::new("IF2's capacity", "Mbit/s"), Axis::new("throughput", "Mbit/s"))
//!             .with(samples.series("throughput"));
//!         let met = if gain.mean > 90.0 { Judgement::Met } else { Judgement::NotMet };
//!         Results::default().chart(chart).comparison(ABOUT.claims[0].judge(format!("{gain:.0} %"), met, "Nothing shares the second link."))
//!     }
//! }
//!
//! let setting = Setting { runs: 3, seed: 1 };
//! let samples = setting.jobs(&Narrowing).into_iter().map(|job| job.measure(&Narrowing)).collect();
//! let report = conclude(&Narrowing, &setting, Samples::new(samples)).unwrap();
//! assert_eq!(report.results.comparisons[0].judgement, Judgement::Met);
//! ```
//!
//! Then add it to [`crate::experiments::all`]. What to know:
//!
//! - Every run has one seed for all points: schedulers are compared on the same workload (common random numbers), so prefer
//!   [`Samples::gain`], which compares run by run, to comparing two means.
//! - `measure` must be a function of its arguments; points are measured on many cores, in any order. Only an experiment that is
//!   [`Sampling::Timed`] may look at [`Run::clock`]. [`Run::quic`] does not change what comes out.
//! - A [`Sample`] has numbers by name and curves by name (a rate over time, a distribution).
//! - Comparisons come in the order of [`About::claims`], one each. Where something differs from the paper, say why.
//! - Names of charts become file names: `NAME.svg` for an empty name, else `NAME-CHART.svg`. Text is Markdown without tables.

mod report;
mod results;
mod sample;
mod stats;

use braid_model::Time;
use braid_netem::Random;
use serde::Serialize;

use crate::pair::Quic;

pub use braid_plot::{Axis, Chart, Dot, Series, Shape};
pub use report::{Report, markdown};
pub use results::{Claim, Comparison, Judgement, Results, Table};
pub use sample::{Curve, Sample, Samples};
pub use stats::{Summary, distribution, quantile};

/// One experiment of a paper.
pub trait Experiment: Sync {
    /// What it is.
    fn about(&self) -> &'static About;
    /// What is measured, in the order of legends.
    fn points(&self) -> Vec<Point>;
    /// How often a point is measured at most, where one takes long and differs little from run to run. Comparisons are then of the first runs.
    fn most_runs(&self, point: &Point) -> u32 {
        let _ = point;
        u32::MAX
    }
    /// Measures one point once.
    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample;
    /// Puts what was measured together.
    fn assemble(&self, samples: &Samples) -> Results;
}

/// What an experiment is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct About {
    /// The paper's short name and the figure, as in `dbas-3a`.
    pub name: &'static str,
    /// Where it was first done.
    pub paper: Paper,
    /// The figure or table, as in "fig. 3a".
    pub figure: &'static str,
    /// What is shown.
    pub title: &'static str,
    /// Links, workload and whatever else was set, and how it differs from the paper's setting.
    pub setting: &'static str,
    /// How often a point is measured.
    pub sampling: Sampling,
    /// What the paper says came out.
    pub claims: &'static [Claim],
}

/// The papers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Paper {
    /// The middleware for dynamic multiple network interfaces scheduling, 2009.
    Dnis,
    /// The dynamic bandwidth aggregation system, 2012.
    Dbas,
    /// The optimal energy-efficient bandwidth aggregation system, 2012.
    Operetta,
    /// The virtual interface, 2011.
    VirtualInterface,
    /// Yap's thesis, 2013.
    Thesis,
}

impl Paper {
    /// How a reader finds it.
    pub fn citation(self) -> &'static str {
        match self {
            Self::Dnis => "Saeed, Habak, Fouad, Youssef: DNIS, a middleware for dynamic multiple network interfaces scheduling (2009)",
            Self::Dbas => "Habak, Youssef, Harras: DBAS, a deployable bandwidth aggregation system (2012)",
            Self::Operetta => "Habak, Harras, Youssef: OPERETTA, an optimal energy efficient bandwidth aggregation system (2012)",
            Self::VirtualInterface => {
                "Mota: Combining heterogeneous access networks with ad-hoc networks for cost-effective connectivity (2011)"
            }
            Self::Thesis => "Yap: Using all networks around us, Stanford University (2013)",
        }
    }
}

/// How often a point is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sampling {
    /// Once: there is no chance in it.
    Once,
    /// As often as the setting's runs say.
    Repeated,
    /// Once, alone on the machine, by a clock: results differ from run to run.
    Timed,
}

/// A place in a figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The line it lies on.
    pub series: String,
    /// Its place on the x axis.
    pub x: f64,
}

impl Point {
    /// Every series at every x.
    pub fn grid(series: &[&str], xs: &[f64]) -> Vec<Self> {
        series.iter().flat_map(|series| xs.iter().map(|x| Self { series: (*series).to_owned(), x: *x })).collect()
    }
}

/// One measurement's circumstances.
pub struct Run<'a> {
    /// Which run, from 0.
    pub index: u32,
    /// The same for all points of a run.
    pub seed: u64,
    /// The time now, for [`Sampling::Timed`]; stands still in all others.
    pub clock: &'a dyn Fn() -> Time,
    /// For what runs over real QUIC. Without it, such points give no numbers.
    pub quic: Option<&'a Quic>,
}

/// What pure code cannot make and some experiments need.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// The time now.
    pub clock: &'a dyn Fn() -> Time,
    /// For what runs over real QUIC.
    pub quic: Option<&'a Quic>,
}

impl Machine<'_> {
    /// Neither: time stands still.
    pub const NONE: Machine<'static> = Machine { clock: &|| Time::ZERO, quic: None };
}

/// What a user chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// How often each point is measured, where there is chance in it.
    pub runs: u32,
    /// What all chance comes from.
    pub seed: u64,
}

impl Default for Setting {
    /// The papers' 15 runs.
    fn default() -> Self {
        Self { runs: 15, seed: 1 }
    }
}

impl Setting {
    /// All measurements that `experiment` needs, point by point.
    pub fn jobs(&self, experiment: &dyn Experiment) -> Vec<Job> {
        let about = experiment.about();
        let runs = if about.sampling == Sampling::Repeated { self.runs } else { 1 };
        let seeds: Vec<u64> = (0..runs).map(|index| self.seed_of(about.name, index)).collect();
        let points = experiment.points();
        points
            .iter()
            .flat_map(|point| {
                let runs = seeds.iter().zip(0..experiment.most_runs(point));
                runs.map(|(seed, index)| Job { point: point.clone(), index, seed: *seed })
            })
            .collect()
    }

    /// A seed that depends on the experiment and the run only, so that one experiment alone gives what it gives among all.
    fn seed_of(&self, name: &str, index: u32) -> u64 {
        let named = name.bytes().fold(self.seed, |mixed, byte| Random::new(mixed ^ u64::from(byte)).next());
        Random::new(named ^ u64::from(index)).next()
    }
}

/// One measurement to be made.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Of what.
    pub point: Point,
    /// Which run.
    pub index: u32,
    /// Its seed.
    pub seed: u64,
}

impl Job {
    /// Makes it, without a clock and without QUIC.
    pub fn measure(self, experiment: &dyn Experiment) -> (Self, Sample) {
        self.measure_on(experiment, &Machine::NONE)
    }

    /// Makes it with what a machine has.
    pub fn measure_on(self, experiment: &dyn Experiment, machine: &Machine<'_>) -> (Self, Sample) {
        let Machine { clock, quic } = *machine;
        let sample = experiment.measure(&self.point, &Run { index: self.index, seed: self.seed, clock, quic });
        (self, sample)
    }
}

/// Why an experiment's results cannot be shown: a mistake in the experiment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsound {
    /// A chart or table lacks a number.
    #[error("{experiment}: {place} has no number; ask for a series and value that were measured")]
    NoNumber {
        /// Which experiment.
        experiment: &'static str,
        /// Where in its results.
        place: String,
    },
    /// A claim has no comparison, or a comparison no claim.
    #[error("{experiment}: comparisons do not match the claims one by one; give one comparison for each claim, in their order")]
    Comparisons {
        /// Which experiment.
        experiment: &'static str,
    },
}

/// What `experiment` found, from the samples of all its jobs.
///
/// # Errors
///
/// [`Unsound`] if a chart has a point that is no number, or claims and comparisons do not match.
pub fn conclude(experiment: &dyn Experiment, setting: &Setting, samples: Samples) -> Result<Report, Unsound> {
    let about = experiment.about();
    let results = experiment.assemble(&samples);
    if let Some(place) = results.gap() {
        return Err(Unsound::NoNumber { experiment: about.name, place });
    }
    let judged = results.comparisons.iter().map(|comparison| &comparison.claim);
    if !judged.eq(about.claims.iter()) {
        return Err(Unsound::Comparisons { experiment: about.name });
    }
    Ok(Report { about, setting: *setting, results })
}
