//! DBAS (2012), section IV: connections and packets over links of 2 Mbit/s and less.

mod applications;
mod granularity;
mod interfaces;

use std::time::Duration;

use braid_model::{Bytes, Direction, Rate, Time};
use braid_netem::Profile;

use crate::experiment::{About, Axis, Chart, Experiment, Point, Results, Run, Sample, Samples};
use crate::{
    Arrivals, Class, DemandKnowledge, Knowledge, LinkSpec, LoadKnowledge, Outcome, Packets, Scenario, Scheduling, ServerLink, ServerSpec,
    Size, Spreading, simulate,
};

pub(super) fn all() -> [&'static dyn Experiment; 6] {
    [
        &interfaces::NARROW_CONNECTIONS,
        &interfaces::NARROW_PACKETS,
        &interfaces::LOSSY_CONNECTIONS,
        &interfaces::LOSSY_PACKETS,
        &applications::APPLICATIONS,
        &granularity::Granularity,
    ]
}

/// Schedulers over a range of settings.
struct Sweep {
    about: &'static About,
    series: &'static [&'static str],
    xs: &'static [f64],
    /// The x axis' label and unit.
    x: (&'static str, &'static str),
    setup: fn(f64) -> Setup,
    /// Adds the verdicts.
    judge: fn(Results, &Samples) -> Results,
}

impl Experiment for Sweep {
    fn about(&self) -> &'static About {
        self.about
    }

    fn points(&self) -> Vec<Point> {
        Point::grid(self.series, self.xs)
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        (self.setup)(point.x).measure(&point.series, run.seed)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let chart = |name, title: &str, value| {
            let x = Axis::new(self.x.0, self.x.1);
            Chart::lines(name, title, x, Axis::new("throughput", "Mbit/s")).with(samples.series(value))
        };
        let results = Results::default()
            .chart(chart("", self.about.title, THROUGHPUT))
            .chart(chart("span", &format!("{}, within the 60 s", self.about.title), WITHIN));
        (self.judge)(results, samples)
    }
}

// The schedulers by their names in legends.
const ONLY_1: &str = "only IF1";
const ONLY_2: &str = "only IF2";
const CO_ROUND: &str = "CO round robin";
const CO_WEIGHTED: &str = "CO weighted round robin";
const CO_MOST: &str = "CO maximum throughput";
const PO_ROUND: &str = "PO round robin";
const PO_WEIGHTED: &str = "PO weighted round robin";

const CONNECTIONS: [&str; 4] = [ONLY_1, CO_ROUND, CO_WEIGHTED, CO_MOST];
const PACKETS: [&str; 3] = [ONLY_1, PO_ROUND, PO_WEIGHTED];

/// Payload over the time until the last connection opened in [`SPAN`] ended, in Mbit/s.
const THROUGHPUT: &str = "throughput";
/// Payload that arrived within [`SPAN`], over that span, in Mbit/s.
const WITHIN: &str = "throughput within the span";

/// Connections are opened for so long.
const SPAN: Duration = Duration::from_secs(60);
/// No batch takes as long as this.
const GRACE: Duration = Duration::from_secs(7200);
const IF1: f64 = 2.0;
/// Table I: λ of the two classes, and connections per second of the small one.
const SMALL: Bytes = Bytes::new(22_380);
const LARGE: Bytes = Bytes::new(285_000);
const SMALL_RATE: f64 = 13.0;
const LARGE_RATE: f64 = 1.0;

/// One setting of Table I.
#[derive(Debug, Clone, Copy)]
struct Setup {
    /// IF2's capacity in Mbit/s.
    if2: f64,
    /// IF2's loss, as a share.
    loss: f64,
    /// Small and large connections per second.
    rates: [f64; 2],
}

impl Setup {
    const NOMINAL: Self = Self { if2: 1.0, loss: 0.0, rates: [SMALL_RATE, LARGE_RATE] };

    fn scenario(&self, series: &str, seed: u64) -> Scenario {
        let link = |name, mbps, loss| {
            LinkSpec::symmetric(name, mbit(mbps), Duration::from_millis(50)).with_queue(Bytes::new(75_000)).with_loss(loss)
        };
        let class =
            |name, per_second, size| Class::downloads(name, Arrivals::Poisson { per_second }, Size::Exponential(size));
        let server = Profile { rate: mbit(6.0).into(), ..Profile::default() };
        let (scheduling, packets) = scheduler(series);
        Scenario {
            links: vec![link("IF1", IF1, 0.0), link("IF2", self.if2, self.loss)],
            servers: vec![ServerSpec { link: Some(ServerLink { down: server.clone(), up: server }) }],
            workload: vec![class("small", self.rates[0], SMALL), class("large", self.rates[1], LARGE)],
            scheduling,
            knowledge: Knowledge {
                demand: DemandKnowledge::Learnt { first: Bytes::new(100_000) },
                load: LoadKnowledge::Papers,
                ..Knowledge::default()
            },
            packets,
            duration: SPAN,
            grace: GRACE,
            seed,
            ..Scenario::default()
        }
    }

    /// Both throughputs; nothing if it cannot be simulated, which is refused.
    fn measure(&self, series: &str, seed: u64) -> Sample {
        let Ok(outcome) = simulate(&self.scenario(series, seed)) else { return Sample::default() };
        let all = received(&outcome).per(Duration::from_nanos(outcome.ran_ns));
        Sample::default().value(THROUGHPUT, mbps(all)).value(WITHIN, mbps(within(&outcome)))
    }
}

/// How connections get their links, and how chunks are spread where all servers run DBAS too.
fn scheduler(series: &str) -> (Scheduling, Packets) {
    // Chunks go round in strict order, as the paper describes it: where their turn is, they wait.
    let spread = |spreading| Packets { share: 1.0, spreading, late: false, ..Packets::default() };
    match series {
        ONLY_2 => (Scheduling::OnlyOne(1), Packets::default()),
        CO_ROUND => (Scheduling::RoundRobin, Packets::default()),
        CO_WEIGHTED => (Scheduling::WeightedRoundRobin, Packets::default()),
        CO_MOST => (Scheduling::MaximumThroughput, Packets::default()),
        PO_ROUND => (Scheduling::RoundRobin, spread(Spreading::RoundRobin)),
        PO_WEIGHTED => (Scheduling::RoundRobin, spread(Spreading::WeightedRoundRobin)),
        _ => (Scheduling::OnlyOne(0), Packets::default()),
    }
}

fn received(outcome: &Outcome) -> Bytes {
    outcome.links.iter().fold(Bytes::ZERO, |sum, link| sum + link.goodput[Direction::Down as usize])
}

fn within(outcome: &Outcome) -> Rate {
    let span = Time::ZERO + Duration::from_nanos(outcome.duration_ns);
    outcome.goodput_between(Direction::Down, Time::ZERO, span)
}

fn mbit(mbps: f64) -> Rate {
    Rate::from_bps((mbps * 1e6) as u64)
}

fn mbps(rate: Rate) -> f64 {
    rate.bps() as f64 / 1e6
}

/// The series whose throughput is most at `x`.
fn best<'a>(samples: &Samples, among: &[&'a str], x: f64) -> &'a str {
    let mean = |series: &str| samples.summary(THROUGHPUT, (series, x)).mean;
    among.iter().copied().fold(among[0], |best, series| if mean(series) > mean(best) { series } else { best })
}

/// The greatest gain in percent of one series over another, and at which x.
fn most_gain(samples: &Samples, series: &str, base: &str) -> (f64, f64) {
    let gains = samples.xs(series).into_iter().map(|x| (samples.gain(THROUGHPUT, (series, x), (base, x)).mean, x));
    gains.fold((f64::NEG_INFINITY, 0.0), |most, gain| if gain.0 > most.0 { gain } else { most })
}

/// By how many percent `series` is behind the best of `others` at worst, and at which x; negative if it always leads.
fn most_behind(samples: &Samples, series: &str, others: &[&str]) -> (f64, f64) {
    let behind = samples.xs(series).into_iter().map(|x| {
        let best = best(samples, others, x);
        (-samples.gain(THROUGHPUT, (series, x), (best, x)).mean, x)
    });
    behind.fold((f64::NEG_INFINITY, 0.0), |most, behind| if behind.0 > most.0 { behind } else { most })
}

/// Whether a gain is the paper's, within a fifth of it.
fn is_about(found: f64, paper: f64) -> bool {
    (found / paper - 1.0).abs() <= 0.2
}
