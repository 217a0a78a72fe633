//! Figure 4.5: miDRR over time, with its clusters.

use std::time::Duration;

use braid_decide::fair::{FairFlow, Problem, clusters, solve};
use braid_decide::midrr::Flags;
use braid_model::{ByteCount, LinkSet, Rate, Time};

use crate::experiment::{
    About, Axis, Chart, Claim, Curve, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Summary, Table,
};
use crate::fairness::{Discipline, QueuedFlow, Queueing, Service, serve};

const SERIES: &str = "miDRR";
const SECONDS: usize = 100;
/// Width of the bins of rates: for the whole run, and for the first seconds.
const SPAN: Duration = Duration::from_secs(1);
const SHORT: Duration = Duration::from_millis(500);
const FIRST: f64 = 5.0;
const QUANTUM: ByteCount = ByteCount::new(1500);
const LARGE_QUANTUM: ByteCount = ByteCount::new(60_000);

/// Name, weight, links as a mask, and volume in Mbit: the amount that the flow would send at exact rates by 66 s or 85 s.
const FLOWS: [(&str, f64, u64, Option<f64>); 3] =
    [("a", 1.0, 0b01, Some(198.0)), ("b", 2.0, 0b11, Some(440.0 + 26.0 / 3.0 * 19.0)), ("c", 1.0, 0b10, None)];
const LINKS: [u64; 2] = [3, 10];
/// Per phase: its start in seconds, the remaining flows, and the thesis's rates in Mb/s.
const PHASES: [(f64, &[usize], [f64; 3]); 3] =
    [(0.0, &[0, 1, 2], [3.0, 20.0 / 3.0, 10.0 / 3.0]), (66.0, &[1, 2], [0.0, 26.0 / 3.0, 13.0 / 3.0]), (85.0, &[2], [0.0, 0.0, 10.0])];

static ABOUT: About = About {
    name: "thesis-4-5",
    paper: Paper::Thesis,
    figure: "fig. 4.5",
    title: "miDRR over two interfaces",
    setting: "Interfaces of 3 and 10 Mb/s. Flow a may use the first, c the second, b both; b has twice the weight. All are backlogged, \
              with packets of 1,500 bytes and a quantum of 1,500 bytes times the weight (the thesis gives neither), until they have sent \
              the volume that takes a 66 s and b 85 s at exact rates. The first seconds are shown with a quantum of 60,000 bytes, and b \
              before a in the round of interface 1.",
    sampling: Sampling::Once,
    claims: &[
        Claim { text: "All three flows (0 to 66 s)", paper: "a 3, b 6.67, c 3.33 Mb/s" },
        Claim { text: "b and c alone (66 to 85 s)", paper: "b 8.67, c 4.33 Mb/s" },
        Claim { text: "c alone (from 85 s)", paper: "c 10 Mb/s" },
        Claim { text: "The rate clustering property is upheld throughout", paper: "{a}, {b, c}; then {b, c}; then {c}" },
        Claim { text: "At first flow a receives less, which is quickly corrected", paper: "a about 2 Mb/s, then 3" },
    ],
};

/// The experiment of figure 4.5.
pub(super) struct Convergence;

impl Experiment for Convergence {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        Point::grid(&[SERIES], &[0.0])
    }

    fn measure(&self, _: &Point, _: &Run<'_>) -> Sample {
        let span = Duration::from_secs(FIRST as u64);
        let mut large = Queueing { quantum: LARGE_QUANTUM, ..queueing(SHORT, span) };
        large.flows.swap(0, 1);
        let runs = (serve(&queueing(SPAN, SPAN * SECONDS as u32)), serve(&queueing(SHORT, span)), serve(&large));
        let (Ok(all), Ok(first), Ok(mut large)) = runs else { return Sample::default() };
        large.bins.swap(0, 1);
        let mut sample = Sample::default();
        for (at, (name, ..)) in FLOWS.iter().enumerate() {
            let curves = [("all", rates(&all, at, SPAN)), ("first", rates(&first, at, SHORT)), ("large", rates(&large, at, SHORT))];
            sample = curves.into_iter().fold(sample, |sample, (which, curve)| sample.curve(format!("{name} {which}"), curve));
            for (phase, (from, _, _)) in PHASES.iter().enumerate() {
                // Skip the bins in which a phase starts or ends, since they mix two phases.
                let to = PHASES.get(phase + 1).map_or(SECONDS, |(to, ..)| *to as usize - 1);
                let rate = all.rate(at, *from as usize + 1, to).bps() as f64 / 1e6;
                sample = sample.value(format!("{name} {phase}"), rate);
            }
            if let Some(end) = all.ended[at] {
                sample = sample.value(format!("{name} end"), end.as_nanos() as f64 / 1e9);
            }
        }
        sample
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let value = |name: &str| samples.summary(name, (SERIES, 0.0)).mean;
        let over = |chart: Chart, which: &str| {
            FLOWS.iter().fold(chart, |chart, (name, ..)| {
                chart.curve(format!("flow {name}"), samples.curve(&format!("{name} {which}"), (SERIES, 0.0)))
            })
        };
        let axes = || (Axis::new("time", "s"), Axis::new("rate", "Mb/s"));
        let (x, y) = axes();
        let whole = Chart::steps("c", "miDRR over two interfaces: rates over time", x, y.between(0.0, 12.0));
        let (a_end, b_end) = (value("a end"), value("b end"));
        let whole = over(whole, "all").mark(a_end, format!("a ends, {a_end:.1} s")).mark(b_end, format!("b ends, {b_end:.1} s"));
        let (x, y) = axes();
        let first =
            over(Chart::steps("d", "miDRR over two interfaces: the first seconds", x.between(0.0, FIRST), y.between(0.0, 12.0)), "large");

        let mut results = Results::default().chart(whole).chart(first).table(setup()).table(cluster_table());
        for (phase, (_, flows, wanted)) in PHASES.iter().enumerate() {
            let found: Vec<(&str, f64, f64)> =
                flows.iter().map(|flow| (FLOWS[*flow].0, value(&format!("{} {phase}", FLOWS[*flow].0)), wanted[*flow])).collect();
            let met = found.iter().all(|(_, found, wanted)| (found / wanted - 1.0).abs() < 0.01);
            let here: Vec<String> = found.iter().map(|(name, found, _)| format!("{name} {found:.2}")).collect();
            results = results.comparison(ABOUT.claims[phase].judge(format!("{} Mb/s", here.join(", ")), Judgement::met_or_not(met), ""));
        }
        let upheld = (0..PHASES.len()).all(|phase| clusters_of(phase).len() == if phase == 0 { 2 } else { 1 });
        let one_packet = 1500.0 * 8.0 / SHORT.as_secs_f64() / 1e6;
        let [(small, small_settled), (least, settled)] = ["a first", "a large"].map(|curve| settling(samples.curve(curve, (SERIES, 0.0))));
        let turn = FLOWS[1].1 * LARGE_QUANTUM.get() as f64 * 8.0 / (LINKS[0] as f64 * 1e6);
        results
            .comparison(ABOUT.claims[3].judge(
                format!("as claimed; rates per weight within {:.1} % in a cluster", 100.0 * spread(&value)),
                Judgement::met_or_not(upheld && spread(&value) < 0.01),
                "",
            ))
            .comparison(ABOUT.claims[4].judge(
                format!(
                    "a {small:.2} Mb/s in the first {0:.1} s with a quantum of 1,500 bytes; with 60,000 bytes and b before a {least:.2} Mb/s, then 3 \
                     after {settled:.1} s",
                    SHORT.as_secs_f64()
                ),
                // A packet less in the first bin is no effect.
                Judgement::met_or_differs((small - 2.0).abs() < 0.5 && small_settled < FIRST / 2.0, Summary::exact(3.0 - small - 1.5 * one_packet)),
                format!(
                    "With a quantum of one packet a has at most a packet less ({one_packet:.3} Mb/s in that time). The thesis does not give its quantum. \
                     A large one shows the effect: it is flow b's first turn on interface 1, before interface 2 has served b, {turn:.2} s with 60,000 \
                     bytes.",
                ),
            ))
    }
}

fn queueing(bin: Duration, duration: Duration) -> Queueing {
    let flow = |&(_, weight, links, mbit): &(&str, f64, u64, Option<f64>)| QueuedFlow {
        weight,
        links: LinkSet(links),
        packet: ByteCount::new(1500),
        demand: None,
        volume: mbit.map(|mbit| ByteCount::new((mbit * 125_000.0) as u64)),
    };
    Queueing {
        links: LINKS.map(Rate::from_mbps).to_vec(),
        flows: FLOWS.iter().map(flow).collect(),
        discipline: Discipline::Midrr(Flags::Bit),
        quantum: QUANTUM,
        duration,
        bin,
        starts: vec![Time::ZERO; LINKS.len()],
        seed: 0,
    }
}

/// Mean rates in Mb/s, each at the start of its bin; the last is repeated at its end.
fn rates(service: &Service, flow: usize, bin: Duration) -> Curve {
    let spans = service.bins[flow].len();
    let rate = |span: usize| service.rate(flow, span, span + 1).bps() as f64 / 1e6;
    (0..=spans).map(|span| (span as f64 * bin.as_secs_f64(), rate(span.min(spans - 1)))).collect()
}

/// The lowest rate of flow a in Mb/s, and the time from which it stays within a tenth of 3 Mb/s.
fn settling(rates: &[(f64, f64)]) -> (f64, f64) {
    let least = rates.iter().map(|(_, rate)| *rate).fold(f64::INFINITY, f64::min);
    let last = rates.iter().rposition(|(_, rate)| (rate / 3.0 - 1.0).abs() > 0.1);
    (least, last.map_or(0.0, |last| rates.get(last + 1).map_or(FIRST, |(at, _)| *at)))
}

/// The largest relative difference of rates per weight within a cluster, over all phases.
fn spread(value: &impl Fn(&str) -> f64) -> f64 {
    let mut most = 0.0_f64;
    for phase in 0..PHASES.len() {
        for (flows, _) in clusters_of(phase) {
            let per_weight = flows.iter().map(|flow| value(&format!("{} {phase}", FLOWS[*flow].0)) / FLOWS[*flow].1);
            let (low, high) = per_weight.fold((f64::INFINITY, 0.0_f64), |(low, high), rate| (low.min(rate), high.max(rate)));
            most = most.max(high / low - 1.0);
        }
    }
    most
}

/// The exact clusters of a phase: flows of [`FLOWS`], and rate per weight in Mb/s.
fn clusters_of(phase: usize) -> Vec<(Vec<usize>, f64)> {
    let left = PHASES[phase].1;
    let flow = |flow: &usize| FairFlow::backlogged(FLOWS[*flow].1, &LinkSet(FLOWS[*flow].2).iter().collect::<Vec<_>>());
    let problem = Problem { links: LINKS.map(Rate::from_mbps).to_vec(), flows: left.iter().map(flow).collect() };
    let Ok(allocation) = solve(&problem) else { return Vec::new() };
    let found = clusters(&problem, &allocation, 1e-9);
    found.iter().map(|cluster| (cluster.flows.iter().map(|flow| left[*flow]).collect(), cluster.rate_per_weight_bps / 1e6)).collect()
}

fn setup() -> Table {
    let links = |mask| LinkSet(mask).iter().map(|link| format!("{} ({} Mb/s)", link + 1, LINKS[link])).collect::<Vec<_>>().join(", ");
    FLOWS.iter().fold(
        Table::new("(a) Flows and the interfaces they may use", &["flow", "weight", "interfaces"]),
        |table, (name, weight, mask, _)| table.row([(*name).to_owned(), weight.to_string(), links(*mask)]),
    )
}

fn cluster_table() -> Table {
    let mut table = Table::new("(b) Clusters of the exact allocation", &["from", "flows", "rate per weight"]);
    for (phase, (from, ..)) in PHASES.iter().enumerate() {
        for (flows, rate) in clusters_of(phase) {
            let names: Vec<&str> = flows.iter().map(|flow| FLOWS[*flow].0).collect();
            table = table.row([format!("{from:.0} s"), names.join(", "), format!("{rate:.2} Mb/s")]);
        }
    }
    table
}
