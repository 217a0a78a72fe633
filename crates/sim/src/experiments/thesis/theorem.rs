//! Theorem 8: is miDRR max-min fair?

use std::time::Duration;

use braid_decide::fair::instance::max_relative_deviation;
use braid_decide::fair::{FairFlow, Problem, solve};
use braid_decide::midrr::{Flags, MidrrError};
use braid_model::{ByteCount, LinkSet, Rate};
use braid_netem::Random;

use crate::experiment::{
    About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Table, distribution, quantile,
};
use crate::fairness::{Discipline, QueuedFlow, Queueing, random_starts, serve};

const BIT: &str = "service flag (the thesis)";
const COUNTER: &str = "service counter";
/// Random instances of a run have the x values 0, 1, ...; the small counterexample has [`SMALL`].
const INSTANCES: usize = 10;
const SMALL: f64 = -1.0;

const QUANTUM: ByteCount = ByteCount::new(1500);
/// Number of rounds of the slowest flow, and maximum number of packets.
const ROUNDS: f64 = 600.0;
const PACKETS: f64 = 500_000.0;
/// A run is divided into this many parts. Rates exclude the first parts, in which the scheduler converges.
const PARTS: usize = 4;
const WITHIN: f64 = 0.01;

static ABOUT: About = About {
    name: "thesis-4-4",
    paper: Paper::Thesis,
    figure: "Theorem 8, section 4.4",
    title: "How far miDRR is from max-min rates",
    setting: "Random instances, 10 in each run: 2 to 16 interfaces of 1 to 10 Mb/s, 2 to 64 backlogged flows with weights of 1 to 10, \
              random preferences, packets of 64 to 1,500 bytes (one size for each flow), a quantum of 1,500 bytes. The deviation of an \
              instance is the largest deviation of a flow from its exact rate, over the second half of a long run. The thesis has no such \
              figure; it evaluates only the example of fig. 4.5.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "miDRR gives a max-min fair allocation (Theorem 8)", paper: "proven" },
        Claim { text: "One bit for each flow and interface is enough (4.4.1)", paper: "argued" },
    ],
};

/// The experiment on Theorem 8.
pub(super) struct Theorem;

impl Experiment for Theorem {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        let xs: Vec<f64> = [SMALL].into_iter().chain((0..INSTANCES).map(|instance| instance as f64)).collect();
        Point::grid(&[BIT, COUNTER], &xs)
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let discipline = Discipline::Midrr(if point.series == BIT { Flags::Bit } else { Flags::COUNTED });
        if point.x == SMALL {
            let rates = rates(&Queueing { discipline, ..small(run.seed) }).unwrap_or_default();
            return rates.iter().zip(["a", "b"]).fold(Sample::default(), |sample, (bps, flow)| sample.value(flow, bps / 1e6));
        }
        let queueing = Queueing { discipline, ..random(Random::new(run.seed ^ point.x as u64).next()) };
        let deviation = exact(&queueing).zip(rates(&queueing).ok()).map(|(exact, rates)| max_relative_deviation(&exact, &rates));
        Sample::default().value("deviation", deviation.unwrap_or(f64::NAN) * 100.0)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let deviations = |series: &str| -> Vec<f64> {
            (0..INSTANCES).flat_map(|instance| samples.values("deviation", (series, instance as f64))).collect()
        };
        let both = [BIT, COUNTER].map(|series| (series, deviations(series)));
        let share = |found: &[f64]| found.iter().filter(|percent| **percent <= WITHIN * 100.0).count() as f64 / found.len() as f64;
        let at = |found: &[f64], part| quantile(found, part).unwrap_or(f64::NAN);

        let most = both.iter().map(|(_, found)| at(found, 0.99)).fold(1.0, f64::max);
        let axes = (Axis::new("deviation of an instance", "%").between(0.0, most), Axis::new("share of instances", "").between(0.0, 1.0));
        let chart = both.iter().fold(Chart::steps("", ABOUT.title, axes.0, axes.1), |chart, (series, found)| {
            let steps: Vec<_> = [(0.0, 0.0)].into_iter().chain(distribution(found, 200)).chain([(most, 1.0)]).collect();
            chart.curve(*series, &steps)
        });
        let head = ["scheduler", "instances", "within 1 %", "median", "95 %", "worst"];
        let table = both.iter().fold(Table::new("Deviation from exact rates", &head), |table, (series, found)| {
            let shown = [0.5, 0.95, 1.0].map(|part| format!("{:.2} %", at(found, part)));
            let first = [(*series).to_owned(), found.len().to_string(), format!("{:.1} %", share(found) * 100.0)];
            table.row(first.into_iter().chain(shown))
        });
        let small = |series, flow| samples.summary(flow, (series, SMALL)).mean;
        let head = ["scheduler", "flow a", "flow b"];
        let pair = |series| {
            [series, "a", "b"].map(|name| if name == series { series.to_owned() } else { format!("{:.2} Mb/s", small(series, name)) })
        };
        let example = Table::new("Interfaces of 2 and 3 Mb/s, a on both, b on the second, where max-min is 2.5 and 2.5 Mb/s", &head)
            .row(pair(BIT))
            .row(pair(COUNTER));

        let (bit, counter) = (&both[0].1, &both[1].1);
        let tell = |found: &[f64]| format!("{:.0} % of instances within 1 %, worst {:.1} % off", share(found) * 100.0, at(found, 1.0));
        Results::default()
            .chart(chart)
            .table(table)
            .table(example)
            .comparison(ABOUT.claims[0].judge(
                tell(bit),
                Judgement::met_or_not(share(bit) == 1.0),
                "The proof assumes that between two visits of an interface other interfaces gave a flow one turn. They may have given it \
                 two, and the flag then loses one. The proof also treats turns as sequential, while a flow's concurrent turns on several \
                 interfaces share one deficit counter.",
            ))
            .comparison(ABOUT.claims[1].judge(
                format!("one bit: {}; with a counter, and credit kept by turn: {}", tell(bit), tell(counter)),
                Judgement::met_or_not(share(bit) >= share(counter)),
                "A small counter instead of the flag fixes this; the remaining deviation decreases with the length of the run. In the \
                 example of fig. 4.5 the flag is enough.",
            ))
    }
}

/// Rates in bits per second.
fn rates(queueing: &Queueing) -> Result<Vec<f64>, MidrrError> {
    let service = serve(queueing)?;
    Ok((0..queueing.flows.len()).map(|flow| service.rate(flow, PARTS / 2, PARTS).bps() as f64).collect())
}

fn exact(queueing: &Queueing) -> Option<Vec<f64>> {
    let flow = |flow: &QueuedFlow| FairFlow::backlogged(flow.weight, &flow.links.iter().collect::<Vec<_>>());
    let problem = Problem { links: queueing.links.clone(), flows: queueing.flows.iter().map(flow).collect() };
    Some(solve(&problem).ok()?.rates_bps)
}

fn flow(weight: f64, links: u64, packet: u64) -> QueuedFlow {
    QueuedFlow { weight, links: LinkSet(links), packet: ByteCount::new(packet), demand: None, volume: None }
}

/// Creates a run that is long enough for the slowest flow.
fn lasting(links: Vec<Rate>, flows: Vec<QueuedFlow>, seed: u64) -> Queueing {
    let starts = random_starts(&links, seed);
    let discipline = Discipline::Midrr(Flags::Bit);
    let span = Duration::from_secs(1);
    let queueing = Queueing { links, flows, discipline, quantum: QUANTUM, duration: span, bin: span, starts, seed };
    let exact = exact(&queueing).unwrap_or_default();
    let per_weight = queueing.flows.iter().zip(&exact).map(|(flow, rate)| rate / flow.weight).fold(f64::INFINITY, f64::min);
    let packets: f64 = queueing.flows.iter().zip(&exact).map(|(flow, rate)| rate / (flow.packet.get() as f64 * 8.0)).sum();
    let seconds = (ROUNDS * QUANTUM.get() as f64 * 8.0 / per_weight).min(PACKETS / packets).max(1.0);
    let bin = Duration::from_nanos((seconds * 1e9) as u64 / PARTS as u64);
    Queueing { duration: bin * PARTS as u32, bin, ..queueing }
}

fn small(seed: u64) -> Queueing {
    lasting(vec![Rate::from_mbps(2), Rate::from_mbps(3)], vec![flow(1.0, 0b11, 1500), flow(1.0, 0b10, 1500)], seed)
}

fn random(seed: u64) -> Queueing {
    let mut random = Random::new(seed);
    let count = 2 + random.up_to(14);
    let links: Vec<Rate> = (0..count).map(|_| Rate::from_bps(1_000_000 + random.up_to(9_000_000))).collect();
    let all = (1u64 << count) - 1;
    // From flows that use most interfaces to flows that use few interfaces.
    let thin = random.up_to(3);
    let preference = |random: &mut Random| match (0..=thin).fold(all, |mask, _| mask & random.next()) {
        0 => 1 << random.up_to(count - 1),
        mask => mask,
    };
    let flows = (0..2 + random.up_to(62)).map(|_| {
        let links = preference(&mut random);
        flow((1 + random.up_to(9)) as f64, links, 64 + random.up_to(1436))
    });
    let flows = flows.collect();
    lasting(links, flows, seed)
}
