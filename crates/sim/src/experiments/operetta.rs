//! OPERETTA, section VI: figures 3 to 9, with the parameters of Table III.

/// Table III, and the parameters that the paper leaves open. A macro, since `concat!` needs a literal.
macro_rules! table_three {
    () => {
        "Table III: IF1 1 Mbit/s and 634 mW, IF2 0.7 Mbit/s and 95 mW, IF3 2 Mbit/s and 900 mW; small streams of 22.38 kB on average, 13 \
         per second, and large ones of 0.285 MB, 1 per second, both Poisson: 4.6 Mbit/s. Our choices, since the paper does not give them: \
         exponential sizes, a round trip of 50 ms, queues of 50 packets (ns-2's), streams come for 60 s, rates and demands known, one server \
         link of 6 Mbit/s instead of two, chunks in strict order of the weights. Throughput is that of eq. 3, the payload over the time until the \
         last stream has ended, as in DBAS's figures, which have the same workload; what arrives within the 60 s is beside it. Energy is per \
         bit of payload. "
    };
}

mod links;
mod load;
mod mix;
mod utility;

use std::time::Duration;

use braid_decide::operetta::Utility;
use braid_model::{ByteCount, Power, Rate};
use braid_netem::Profile;

use crate::experiment::{Axis, Chart, Dot, Experiment, Sample, Samples, Series, Table};
use crate::{
    Aim, Arrivals, Bonding, Class, DemandKnowledge, Knowledge, LinkOutcome, LinkSpec, LoadKnowledge, Operetta, Outcome, Packets, Quic,
    Scenario, Scheduling, ServerLink, ServerSpec, Size, Spreading, simulate, simulate_with,
};

pub(super) fn all() -> [&'static dyn Experiment; 7] {
    [&mix::Mix, &links::Dynamics, &utility::Sweep, &utility::OverTime, &load::Heterogeneity, &load::Errors, &links::Baselines]
}

/// The paper's names of its variants and baselines.
const XPUT: &str = "OPRTA-XPUT (α = 1)";
const MID: &str = "OPRTA-MID (α = 0.5)";
const ENGR: &str = "OPRTA-ENGR (α = 0)";
const MATCH: &str = "OPRTA-CUR-OS";
const DEFAULT: &str = "current OS (IF3)";
const ROTATION: &str = "round robin";
const WEIGHTED: &str = "weighted round robin";
/// Suffixes of a series if the offered load is lower than Table III's, and the factor.
const LOWER: [(&str, f64); 2] = [(", 3/4 of the load", 0.75), (", half the load", 0.5)];
/// Suffix of a variant's name if the daemon's bond carries packet-oriented streams.
const BY_BOND: &str = ", bond";
const BOUND: &str = "throughput optimum";
const LEAST: &str = "energy optimum";

/// Table III: Mbit/s and mW.
const IF1: (f64, f64) = (1.0, 634.0);
const IF2: (f64, f64) = (0.7, 95.0);
const IF3: (f64, f64) = (2.0, 900.0);
const SERVER: Rate = Rate::from_mbps(6);
/// λ in bytes and β in connections per second.
const SMALL: (u64, f64) = (22_380, 13.0);
const LARGE: (u64, f64) = (285_000, 1.0);
const THROUGHPUT: &str = "throughput";
const ENERGY: &str = "energy";
/// The same within the time span of arrivals.
const WITHIN: &str = "throughput within";
const WITHIN_ENERGY: &str = "energy within";
/// Duration of arrivals, as in DBAS. The paper leaves this and the next two open.
const SPAN: Duration = Duration::from_secs(60);
/// Longest time for the streams to end after that.
const GRACE: Duration = Duration::from_secs(3600);
/// Round trip of each interface.
const ROUND_TRIP: Duration = Duration::from_millis(50);
/// The default queue of ns-2, 50 packets.
const QUEUE: ByteCount = ByteCount::new(50 * 1500);
/// Fraction of payload in a full packet.
const PAYLOAD: f64 = 1448.0 / 1500.0;

/// Scheduler of a series.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scheme {
    Operetta(Aim),
    Fixed(Scheduling, Spreading),
}

impl Scheme {
    /// The scheme of a series name, with or without the suffix of a bond.
    fn named(series: &str) -> Self {
        match split(series).0.strip_suffix(BY_BOND).unwrap_or(split(series).0) {
            XPUT => Self::utility(1.0),
            MID => Self::utility(0.5),
            ENGR => Self::utility(0.0),
            MATCH => Self::Operetta(Aim::Match(2)),
            ROTATION => Self::Fixed(Scheduling::RoundRobin, Spreading::RoundRobin),
            WEIGHTED => Self::Fixed(Scheduling::WeightedRoundRobin, Spreading::WeightedRoundRobin),
            _ => Self::Fixed(Scheduling::OnlyOne(2), Spreading::RoundRobin),
        }
    }

    fn utility(alpha: f64) -> Self {
        Self::Operetta(Aim::Target(braid_decide::operetta::Target::Utility(Utility::new(alpha).unwrap_or(Utility::MOST_THROUGHPUT))))
    }
}

/// Parameters of one point, nominal unless changed.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Setup {
    scheme: Scheme,
    /// γ, 0 to 1.
    mix: f64,
    /// Rate of IF1 in Mbit/s.
    if1: f64,
    /// λ in bytes and β of the large class.
    large: (u64, f64),
    /// Estimated demand as a multiple of the actual demand.
    error: f64,
    /// Streams per second as a multiple of Table III's.
    load: f64,
    span: Duration,
}

impl Setup {
    fn nominal(scheme: Scheme) -> Self {
        Self { scheme, mix: 0.25, if1: IF1.0, large: LARGE, error: 1.0, load: 1.0, span: SPAN }
    }

    /// The nominal setup of a series, with the load that its name says.
    fn of(series: &str) -> Self {
        Self { load: split(series).1, ..Self::nominal(Scheme::named(series)) }
    }

    fn scenario(&self, seed: u64) -> Scenario {
        let link = |name, (mbps, milliwatts): (f64, f64)| {
            LinkSpec::symmetric(name, rate(mbps), ROUND_TRIP).with_queue(QUEUE).with_power(Power::ZERO, Power::from_milliwatts(milliwatts))
        };
        let server = Profile { rate: SERVER.into(), ..Profile::default() };
        let class = |name, (size, per_second): (u64, f64)| {
            Class::downloads(name, Arrivals::Poisson { per_second: per_second * self.load }, Size::Exponential(ByteCount::new(size)))
        };
        let (scheduling, spreading) = match self.scheme {
            Scheme::Fixed(scheduling, spreading) => (scheduling, spreading),
            Scheme::Operetta(_) => (Scheduling::MaximumThroughput, Spreading::Weights),
        };
        // The current OS has no packet-oriented streams, whatever servers support.
        let share = if matches!(scheduling, Scheduling::OnlyOne(_)) { 0.0 } else { self.mix };
        Scenario {
            links: vec![link("IF1", (self.if1, IF1.1)), link("IF2", IF2), link("IF3", IF3)],
            servers: vec![ServerSpec { link: Some(ServerLink { down: server.clone(), up: server }) }],
            workload: vec![class("small", SMALL), class("large", self.large)],
            scheduling,
            knowledge: Knowledge { demand: DemandKnowledge::Factor(self.error), load: LoadKnowledge::Papers, ..Knowledge::default() },
            packets: Packets { share, spreading, late: false, ..Packets::default() },
            duration: self.span,
            seed,
            ..Scenario::default()
        }
    }

    /// Measures until all streams have ended (eq. 3: `L / max_j Δ_j`), and within the span of arrivals.
    fn measure(&self, seed: u64) -> Sample {
        run(&Scenario { grace: GRACE, ..self.scenario(seed) }, self.scheme).map_or_else(Sample::default, |outcome| measured(&outcome))
    }

    /// Like [`measure`](Self::measure), but packet streams use the daemon's bond instead of the model.
    fn measure_bonded(&self, seed: u64, quic: &Quic) -> Sample {
        let bond = Some(Bonding { scheduling: braid_bond::BondScheduler::Weights, quic: quic.clone() });
        run(&Scenario { bond, grace: GRACE, ..self.scenario(seed) }, self.scheme).map_or_else(Sample::default, |outcome| measured(&outcome))
    }
}

/// The name of a series without the suffix of its load, and the load.
fn split(series: &str) -> (&str, f64) {
    LOWER.iter().find_map(|(suffix, load)| Some((series.strip_suffix(suffix)?, *load))).unwrap_or((series, 1.0))
}

/// Throughput in Mbit/s, energy in nJ/bit and each link's share, for the downloaded payload.
fn measured(outcome: &Outcome) -> Sample {
    let bits = |link: &LinkOutcome| link.goodput.rx.get() as f64 * 8.0;
    let all: f64 = outcome.links.iter().map(bits).sum();
    let sample =
        Sample::default().value(THROUGHPUT, all / (outcome.ran_ns as f64 / 1e9) / 1e6).value(ENERGY, outcome.energy().get() / all * 1e9);
    let bins = (outcome.duration_ns / outcome.bin_ns) as usize;
    let within: f64 =
        outcome.links.iter().flat_map(|link| link.goodput_bins.iter().take(bins)).map(|moved| moved.rx.get() as f64 * 8.0).sum();
    let spent = |link: &LinkOutcome| {
        let busy: u64 = link.busy_bins_ns.iter().take(bins).sum();
        link.energy.get() * busy as f64 / link.busy_ns.max(1) as f64
    };
    let spent: f64 = outcome.links.iter().map(spent).sum();
    let sample =
        sample.value(WITHIN, within / (outcome.duration_ns as f64 / 1e9) / 1e6).value(WITHIN_ENERGY, spent / within.max(1.0) * 1e9);
    outcome.links.iter().fold(sample, |sample, link| sample.value(link.name.as_str(), bits(link) / all))
}

/// Throughput and energy within the span of arrivals, beside those of eq. 3.
fn within(samples: &Samples, x: &str) -> Table {
    pairs(samples, "Within the 60 s (Mbit/s, nJ/bit)", x, (WITHIN, WITHIN_ENERGY), |series| split(series).1 == 1.0)
}

/// Throughput and energy if less is offered.
fn at_lower_loads(samples: &Samples, x: &str) -> Table {
    pairs(samples, "At lower loads (Mbit/s, nJ/bit)", x, (THROUGHPUT, ENERGY), |series| split(series).1 < 1.0)
}

fn pairs(samples: &Samples, title: &str, x: &str, (throughput, energy): (&str, &str), has: impl Fn(&str) -> bool) -> Table {
    let lines: Vec<Series> = samples.series(throughput).into_iter().filter(|line| has(&line.name)).collect();
    let mut xs: Vec<f64> = lines.iter().flat_map(|line| &line.dots).map(|dot| dot.x).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let columns: Vec<&str> = [x].into_iter().chain(lines.iter().map(|line| line.name.as_str())).collect();
    xs.iter().fold(Table::new(title, &columns), |table, x| {
        let cell = |line: &Series| match line.dots.iter().find(|dot| dot.x == *x) {
            Some(dot) => format!("{:.2}, {:.0}", dot.y, samples.summary(energy, (&line.name, *x)).mean),
            None => String::new(),
        };
        table.row([x.to_string()].into_iter().chain(lines.iter().map(cell)))
    })
}

fn run(scenario: &Scenario, scheme: Scheme) -> Option<Outcome> {
    match scheme {
        Scheme::Operetta(aim) => simulate_with(scenario, &mut Operetta::new(aim)).ok(),
        Scheme::Fixed(..) => simulate(scenario).ok(),
    }
}

fn rate(mbps: f64) -> Rate {
    Rate::from_bps((mbps * 1e6) as u64)
}

/// Payload rate of all links at full use, in Mbit/s.
fn bound(if1: f64) -> f64 {
    (if1 + IF2.0 + IF3.0) * PAYLOAD
}

/// Minimum energy per bit of payload, in nJ.
fn least(if1: f64) -> f64 {
    [(if1, IF1.1), IF2, IF3].iter().map(|(mbps, milliwatts)| milliwatts / mbps).fold(f64::INFINITY, f64::min) / PAYLOAD
}

/// Energy of a fully used interface per bit of payload, in nJ.
fn per_bit((mbps, milliwatts): (f64, f64)) -> f64 {
    milliwatts / mbps / PAYLOAD
}

/// The two charts of most figures: throughput and energy per bit, each with its optimum.
fn charts(samples: &Samples, over: &str, x: &Axis, if1: impl Fn(f64) -> f64) -> [Chart; 2] {
    let mut xs: Vec<f64> = samples.series(THROUGHPUT).iter().flat_map(|series| &series.dots).map(|dot| dot.x).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let optimum = |value: &dyn Fn(f64) -> f64| xs.iter().map(|at| (*at, value(if1(*at)))).collect::<Vec<_>>();
    let throughput = Chart::lines("throughput", &format!("Throughput {over}"), x.clone(), Axis::new("throughput", "Mbit/s"))
        .with(flat(nominal(samples.series(THROUGHPUT)), &xs))
        .curve(BOUND, &optimum(&bound));
    let energy = Chart::lines("energy", &format!("Energy per unit of data {over}"), x.clone(), Axis::new("energy", "nJ/bit"))
        .with(flat(nominal(samples.series(ENERGY)), &xs))
        .curve(LEAST, &optimum(&least));
    [throughput, energy]
}

/// The lines at Table III's load.
fn nominal(mut lines: Vec<Series>) -> Vec<Series> {
    lines.retain(|line| split(&line.name).1 == 1.0);
    lines
}

/// Extends lines that are measured at one x value only, because they do not depend on x, to all x values.
fn flat(mut lines: Vec<Series>, xs: &[f64]) -> Vec<Series> {
    for line in &mut lines {
        if let [only] = line.dots[..] {
            line.dots = xs.iter().map(|x| Dot { x: *x, ..only }).collect();
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::{Job, Judgement, Point, Setting, conclude};

    fn short(scheme: Scheme) -> Setup {
        Setup { span: Duration::from_secs(20), ..Setup::nominal(scheme) }
    }

    fn numbers(setup: &Setup) -> [f64; 4] {
        let samples = Samples::new(vec![(Job { point: Point { series: String::new(), x: 0.0 }, index: 0, seed: 3 }, setup.measure(3))]);
        [THROUGHPUT, ENERGY, "IF1", "IF3"].map(|name| samples.summary(name, ("", 0.0)).mean)
    }

    #[test]
    fn series_names_map_to_their_schemes() {
        assert_eq!(Scheme::named(MATCH), Scheme::Operetta(Aim::Match(2)));
        assert_eq!(Scheme::named(DEFAULT), Scheme::Fixed(Scheduling::OnlyOne(2), Spreading::RoundRobin));
        assert_eq!(Scheme::named(XPUT), Scheme::utility(1.0));
        assert_ne!(Scheme::named(WEIGHTED), Scheme::named(ROTATION));
    }

    #[test]
    fn utility_trades_throughput_for_energy() {
        let [most, mid, least_energy, default] = [XPUT, MID, ENGR, DEFAULT].map(|name| numbers(&short(Scheme::named(name))));
        assert!(most[0] > 1.5 * default[0] && most[0] < bound(IF1.0), "{most:?} {default:?}");
        assert!((most[1] / default[1] - 1.0).abs() < 0.1, "the same energy: {most:?} {default:?}");
        assert!(most[0] > mid[0] && mid[0] > least_energy[0], "{most:?} {mid:?} {least_energy:?}");
        assert!(most[1] > mid[1] && mid[1] > least_energy[1] && least_energy[1] >= least(IF1.0), "{most:?} {mid:?} {least_energy:?}");
        assert!(mid[2] < 0.05 && least_energy[3] < 0.01, "{mid:?} {least_energy:?}");
    }

    #[test]
    fn the_default_is_matched_over_the_cheaper_interface() {
        let with = |if1| numbers(&Setup { if1, ..short(Scheme::named(MATCH)) });
        let ([.., slow1, slow3], fast) = (with(1.0), with(2.0));
        assert!(slow1 < 0.05 && slow3 > 0.5, "{slow1} {slow3}");
        assert!(fast[2] > 0.5 && fast[3] < 0.05, "{fast:?}");
        assert!(fast[1] < 0.7 * per_bit(IF3), "{fast:?}");
    }

    #[test]
    fn links_use_power_only_while_they_are_active() {
        let [_, energy, _, share] = numbers(&short(Scheme::named(DEFAULT)));
        assert_eq!(share, 1.0);
        assert!((1.0..1.1).contains(&(energy / per_bit(IF3))), "{energy}");
    }

    #[test]
    fn a_figure_has_all_its_judgements() {
        let setting = Setting { runs: 1, seed: 1 };
        let measure = |job: Job| {
            let sample = Setup { mix: job.point.x / 100.0, ..short(Scheme::named(&job.point.series)) }.measure(job.seed);
            (job, sample)
        };
        let samples = setting.jobs(&mix::Mix).into_iter().map(measure).collect();
        let report = conclude(&mix::Mix, &setting, Samples::new(samples)).unwrap();
        assert_eq!(report.results.comparisons[4].judgement, Judgement::Met, "{:?}", report.results.comparisons[4]);
        assert!(report.plots().iter().all(|(_, svg)| svg.starts_with("<svg")));
    }
}
