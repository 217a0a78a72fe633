//! Framework of the experiments: points that are measured in parallel, statistics, charts, and comparisons of claims with results.
//!
//! # How to write an experiment
//!
//! An experiment is a stateless type. It describes itself ([`About`]), lists its [`Point`]s (each a series and an x value), measures one
//! point with one seed, and assembles all samples into [`Results`]:
//!
//! ```
//! use braid_sim::experiment::*;
//!
//! struct Narrowing;
//!
//! static ABOUT: About = About {
//!     name: "dbas-0x", // short name of the paper, and the figure; the argument of `braid sim run`
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
//!         let noise = (run.seed % 100) as f64 / 1e4; // in a real experiment: a simulation with `run.seed`
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
//! Then add it to [`crate::experiments::all`]. Rules:
//!
//! - Each run has one seed for all points, so schedulers are compared on the same workload (common random numbers). Prefer
//!   [`Samples::gain`], which compares run by run, to a comparison of two means.
//! - `measure` must be a function of its arguments, since points are measured on many cores, in any order. Only a [`Sampling::Timed`]
//!   experiment may read [`Run::clock`]. [`Run::quic`] does not affect results.
//! - A [`Sample`] has named values and named curves (a rate over time, a distribution).
//! - Give one comparison per claim, in the order of [`About::claims`]. If a result differs from the paper, explain why.
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
    /// Description of the experiment.
    fn about(&self) -> &'static About;
    /// The points to measure, in the order of the legends.
    fn points(&self) -> Vec<Point>;
    /// Maximum number of runs of a point. Use it for a point that takes long and varies little between runs. Comparisons then use the first
    /// runs only.
    fn max_runs(&self, point: &Point) -> u32 {
        let _ = point;
        u32::MAX
    }
    /// Measures one point once.
    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample;
    /// Assembles the results from all samples.
    fn assemble(&self, samples: &Samples) -> Results;
}

/// Description of an experiment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct About {
    /// Short name of the paper, and the figure, for example `dbas-3a`.
    pub name: &'static str,
    /// Paper of the original experiment.
    pub paper: Paper,
    /// Figure or table, for example "fig. 3a".
    pub figure: &'static str,
    /// Title of the experiment.
    pub title: &'static str,
    /// Links, workload and other parameters, and how they differ from the paper's.
    pub setting: &'static str,
    /// How often each point is measured.
    pub sampling: Sampling,
    /// Claims of the paper about the results.
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
    /// Citation: authors, title and year.
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

/// How often each point of an experiment is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sampling {
    /// Once, because the experiment is deterministic.
    Once,
    /// [`Setting::runs`] times.
    Repeated,
    /// Once, with a real clock and without other load on the machine. Results vary between runs.
    Timed,
}

/// One point of a figure.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// Series of the point.
    pub series: String,
    /// Value on the x axis.
    pub x: f64,
}

impl Point {
    /// All combinations of `series` and `xs`.
    pub fn grid(series: &[&str], xs: &[f64]) -> Vec<Self> {
        series.iter().flat_map(|series| xs.iter().map(|x| Self { series: (*series).to_owned(), x: *x })).collect()
    }
}

/// Inputs of one measurement.
pub struct Run<'a> {
    /// Index of the run, starting at 0.
    pub index: u32,
    /// Seed, the same for all points of a run.
    pub seed: u64,
    /// Clock for [`Sampling::Timed`] experiments; constant for all others.
    pub clock: &'a dyn Fn() -> Time,
    /// Environment for points that run over real QUIC. Without it, such points have no values.
    pub quic: Option<&'a Quic>,
}

/// Inputs that some experiments need but pure code cannot create.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// Clock.
    pub clock: &'a dyn Fn() -> Time,
    /// Environment for points that run over real QUIC.
    pub quic: Option<&'a Quic>,
}

impl Machine<'_> {
    /// Constant clock, no QUIC.
    pub const NONE: Machine<'static> = Machine { clock: &|| Time::ZERO, quic: None };
}

/// Settings of the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// Number of runs of each point of a [`Sampling::Repeated`] experiment.
    pub runs: u32,
    /// Seed of all randomness.
    pub seed: u64,
}

impl Default for Setting {
    /// 15 runs, as in the papers.
    fn default() -> Self {
        Self { runs: 15, seed: 1 }
    }
}

impl Setting {
    /// All measurements that `experiment` needs, ordered by point.
    pub fn jobs(&self, experiment: &dyn Experiment) -> Vec<Job> {
        let about = experiment.about();
        let runs = if about.sampling == Sampling::Repeated { self.runs } else { 1 };
        let seeds: Vec<u64> = (0..runs).map(|index| self.seed_of(about.name, index)).collect();
        let points = experiment.points();
        points
            .iter()
            .flat_map(|point| {
                let runs = seeds.iter().zip(0..experiment.max_runs(point));
                runs.map(|(seed, index)| Job { point: point.clone(), index, seed: *seed })
            })
            .collect()
    }

    /// A seed that depends only on the experiment and the run, so that an experiment gives the same results alone and among all others.
    fn seed_of(&self, name: &str, index: u32) -> u64 {
        let named = name.bytes().fold(self.seed, |mixed, byte| Random::new(mixed ^ u64::from(byte)).next());
        Random::new(named ^ u64::from(index)).next()
    }
}

/// One measurement to make.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Point to measure.
    pub point: Point,
    /// Index of the run.
    pub index: u32,
    /// Seed of the run.
    pub seed: u64,
}

impl Job {
    /// Makes the measurement without a clock and without QUIC.
    pub fn measure(self, experiment: &dyn Experiment) -> (Self, Sample) {
        self.measure_on(experiment, &Machine::NONE)
    }

    /// Makes the measurement with the inputs of `machine`.
    pub fn measure_on(self, experiment: &dyn Experiment, machine: &Machine<'_>) -> (Self, Sample) {
        let Machine { clock, quic } = *machine;
        let sample = experiment.measure(&self.point, &Run { index: self.index, seed: self.seed, clock, quic });
        (self, sample)
    }
}

/// Reason why the results of an experiment cannot be reported. It is always a bug in the experiment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// A chart or table lacks a number.
    #[error("{experiment}: {place} has no number; use a series and value that were measured")]
    NoNumber {
        /// Name of the experiment.
        experiment: &'static str,
        /// Place in its results.
        place: String,
    },
    /// A claim has no comparison, or a comparison no claim.
    #[error("{experiment}: comparisons do not match the claims; give one comparison for each claim, in the same order")]
    Comparisons {
        /// Name of the experiment.
        experiment: &'static str,
    },
}

/// Assembles the report of `experiment` from the samples of all its jobs.
///
/// # Errors
///
/// [`ReportError`] if a chart has a point without a finite number, or if claims and comparisons do not match.
pub fn conclude(experiment: &dyn Experiment, setting: &Setting, samples: Samples) -> Result<Report, ReportError> {
    let about = experiment.about();
    let results = experiment.assemble(&samples);
    if let Some(place) = results.gap() {
        return Err(ReportError::NoNumber { experiment: about.name, place });
    }
    let judged = results.comparisons.iter().map(|comparison| &comparison.claim);
    if !judged.eq(about.claims.iter()) {
        return Err(ReportError::Comparisons { experiment: about.name });
    }
    Ok(Report { about, setting: *setting, results })
}
