//! Figures 4.8 and 4.9: three HTTP downloads by byte range over two interfaces whose speeds change.

use std::time::Duration;

use braid_decide::fair::{FairFlow, Problem, clusters, solve};
use braid_model::{ByteCount, LinkSet, Rate, Time};
use braid_netem::Profile;
use braid_range::Config;

use crate::experiment::{About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Table};
use crate::ranges::{Fetched, Ranged, RangedFile, RangedLink, fetch_ranges};
use crate::tcp::{HEADERS, SEGMENT, TcpConfig};

const SERIES: &str = "HTTP ranges";
const BIN: Duration = Duration::from_millis(500);
/// Seconds that rates may take to settle after a change of the speeds.
const SETTLED: usize = 3;
/// Length in seconds of the windows that are checked then.
const WINDOW: usize = 5;
/// End of the run in seconds.
const END: usize = 40;
/// Allowed relative deviation of rates.
const CLOSE: f64 = 0.1;

/// Name of each flow, and its links as a mask.
const FLOWS: [(&str, u64); 3] = [("a", 0b01), ("b", 0b11), ("c", 0b10)];
/// Start of each phase in seconds, and the speeds of the interfaces in Mbit/s.
const PHASES: [(usize, [u64; 2]); 4] = [(0, [4, 10]), (11, [10, 4]), (18, [4, 10]), (29, [10, 4])];

static ABOUT: About = About {
    name: "thesis-4-8",
    paper: Paper::Thesis,
    figure: "figs. 4.8, 4.9",
    title: "Three HTTP downloads over two interfaces, by byte range",
    setting: "Flow a may use interface 1, c interface 2, b both, all with the same weight. The thesis measured on a real network and does \
              not give the speeds; the clusters of fig. 4.9 change at 11, 18 and 29 s, and so do the speeds here: 4 and 10 Mbit/s, then 10 \
              and 4, and so on. Round trips of 20 ms, queues of 64 and 125 kB (100 ms at the first speeds, at least 64 kB), CUBIC, plain HTTP/1.1, three concurrent requests \
              per interface, and files that do not end within the 40 s. The engine of `braid get` chooses ranges and files. Exact rates \
              are max-min rates, scaled by 1,448/1,500 for headers.",
    sampling: Sampling::Once,
    claims: &[
        Claim { text: "The rate of flow b always tracks the faster flow", paper: "in the plot" },
        Claim { text: "Scheduling is fair though control is coarse", paper: "the max-min fair allocation" },
        Claim {
            text: "Flow b forms a cluster with the faster flow (fig. 4.9)",
            paper: "one clustering until 11 s and from 18 to 29 s, the other else",
        },
    ],
};

/// The experiment of figures 4.8 and 4.9.
pub(super) struct Http;

impl Experiment for Http {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        Point::grid(&[SERIES], &[0.0])
    }

    fn measure(&self, _: &Point, _: &Run<'_>) -> Sample {
        let Ok(fetched) = fetch_ranges(&setting()) else { return Sample::default() };
        let mut sample = Sample::default().value("requests", fetched.requests as f64);
        for (at, (name, _)) in FLOWS.iter().enumerate() {
            let curve = (0..=END * 2).map(|span| (span as f64 / 2.0, mbps(&fetched, at, span.min(END * 2 - 1), span.min(END * 2 - 1) + 1)));
            sample = sample.curve(*name, curve.collect());
            for phase in 0..PHASES.len() {
                let (from, to) = bounds(phase);
                sample = sample.value(format!("{name} {phase}"), mbps(&fetched, at, 2 * (from + SETTLED), 2 * to));
            }
        }
        sample.value("worst", worst(&fetched))
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let value = |name: &str| samples.summary(name, (SERIES, 0.0)).mean;
        let rate = |flow: usize, phase: usize| value(&format!("{} {phase}", FLOWS[flow].0));
        let axes = (Axis::new("time", "s").between(0.0, END as f64), Axis::new("goodput", "Mbit/s").between(0.0, 12.0));
        let chart = Chart::steps("", "Goodput of three HTTP downloads over two interfaces", axes.0, axes.1);
        let chart = FLOWS.iter().fold(chart, |chart, (name, _)| chart.curve(format!("flow {name}"), samples.curve(name, (SERIES, 0.0))));
        let chart = PHASES[1..].iter().fold(chart, |chart, (at, _)| chart.mark(*at as f64, format!("{at} s")));
        let tracks = (0..PHASES.len()).map(|phase| rate(1, phase) / rate(0, phase).max(rate(2, phase)) - 1.0);
        let off = tracks.fold(0.0, |worst: f64, off| if off.abs() > worst.abs() { off } else { worst });
        let gathered = (0..PHASES.len()).all(|phase| clustered(phase, |flow| rate(flow, phase)));
        Results::default()
            .chart(chart)
            .table(rates(rate))
            .table(clustering())
            .note(format!("{:.0} ranges were requested.", value("requests")))
            .comparison(ABOUT.claims[0].judge(
                format!("from {SETTLED} s after each change on: within {:.1} % of it", 100.0 * off.abs()),
                Judgement::met_or_not(off.abs() < CLOSE),
                "",
            ))
            .comparison(ABOUT.claims[1].judge(
                format!(
                    "within {:.1} % of it in any {WINDOW} s (or the rest of the phase) from {SETTLED} s after a change",
                    100.0 * value("worst")
                ),
                Judgement::met_or_not(value("worst") < CLOSE),
                "",
            ))
            .comparison(ABOUT.claims[2].judge(
                if gathered { "{a}, {b, c} until 11 s and from 18 to 29 s, {a, b}, {c} else" } else { "not in all phases" },
                Judgement::met_or_not(gathered),
                "",
            ))
    }
}

fn setting() -> Ranged {
    let way = |rate: Rate| Profile {
        rate: rate.into(),
        delay: Duration::from_millis(10),
        queue: ByteCount::new((rate.bytes_per_second() / 10).max(64_000)),
        ..Profile::default()
    };
    let link = |number: usize| RangedLink {
        down: way(Rate::from_mbps(PHASES[0].1[number])),
        up: way(Rate::from_mbps(10)),
        changes: PHASES[1..].iter().map(|(at, speeds)| (Time::from_millis(*at as u64 * 1000), Rate::from_mbps(speeds[number]))).collect(),
    };
    Ranged {
        links: (0..2).map(link).collect(),
        files: FLOWS
            .iter()
            .map(|(_, mask)| RangedFile { size: ByteCount::new(1_000_000_000), weight: 1.0, links: LinkSet(*mask) })
            .collect(),
        config: Config { connections_first: 3, connections_most: 3, ..Config::default() },
        tcp: TcpConfig::default(),
        round_trips: 1,
        duration: Duration::from_secs(END as u64),
        bin: BIN,
        seed: 0,
    }
}

/// Start and end of a phase in seconds.
fn bounds(phase: usize) -> (usize, usize) {
    (PHASES[phase].0, PHASES.get(phase + 1).map_or(END, |next| next.0))
}

/// Mean rate of a flow in the bins `from..to` of width [`BIN`], in Mbit/s.
fn mbps(fetched: &Fetched, flow: usize, from: usize, to: usize) -> f64 {
    fetched.rate(flow, BIN, from, to).bps() as f64 / 1e6
}

fn problem(phase: usize) -> Problem {
    let payload = |speed: u64| Rate::from_mbps(speed).scale(SEGMENT.get() as f64 / (SEGMENT.get() + HEADERS.get()) as f64);
    let flow = |(_, mask): &(&str, u64)| FairFlow::backlogged(1.0, &LinkSet(*mask).iter().collect::<Vec<_>>());
    Problem { links: PHASES[phase].1.map(payload).to_vec(), flows: FLOWS.iter().map(flow).collect() }
}

/// The max-min rates of a phase in Mbit/s.
fn exact(phase: usize) -> Vec<f64> {
    let problem = problem(phase);
    solve(&problem).map(|allocation| allocation.rates_bps.iter().map(|rate| rate / 1e6).collect()).unwrap_or_default()
}

/// The largest relative deviation of any flow from its exact rate, over all windows within one phase after its settling time.
fn worst(fetched: &Fetched) -> f64 {
    let mut worst = 0.0_f64;
    for phase in 0..PHASES.len() {
        let (from, to) = bounds(phase);
        let rates = exact(phase);
        // A phase shorter than the window is checked as a whole.
        let length = (2 * WINDOW).min(2 * (to - from - SETTLED));
        for start in 2 * (from + SETTLED)..=2 * to - length {
            for (flow, rate) in rates.iter().enumerate() {
                worst = worst.max((mbps(fetched, flow, start, start + length) / rate - 1.0).abs());
            }
        }
    }
    worst
}

/// Whether flow b is in a cluster with the faster of the other flows, and the slower one is alone.
fn clustered(phase: usize, rate: impl Fn(usize) -> f64) -> bool {
    let (fast, slow) = if PHASES[phase].1[0] > PHASES[phase].1[1] { (0, 2) } else { (2, 0) };
    (rate(1) / rate(fast) - 1.0).abs() < CLOSE && rate(slow) < rate(1) * (1.0 - CLOSE)
}

fn rates(rate: impl Fn(usize, usize) -> f64) -> Table {
    let title = format!("Mean goodput in Mbit/s from {SETTLED} s after each change, and the exact rates");
    let mut table = Table::new(title, &["from", "interfaces", "flow a", "flow b", "flow c", "exact"]);
    for (phase, (from, speeds)) in PHASES.iter().enumerate() {
        let exact: Vec<String> = exact(phase).iter().map(|rate| format!("{rate:.2}")).collect();
        let here = (0..FLOWS.len()).map(|flow| format!("{:.2}", rate(flow, phase)));
        let row = [format!("{from} s"), format!("{} and {} Mbit/s", speeds[0], speeds[1])].into_iter().chain(here);
        table = table.row(row.chain([exact.join(", ")]));
    }
    table
}

fn clustering() -> Table {
    let mut table = Table::new("Clusters of the exact allocation (fig. 4.9)", &["from", "flows", "rate of each"]);
    for (phase, (from, _)) in PHASES.iter().enumerate() {
        let problem = problem(phase);
        let Ok(allocation) = solve(&problem) else { continue };
        for cluster in clusters(&problem, &allocation, 1e-9) {
            let names: Vec<&str> = cluster.flows.iter().map(|flow| FLOWS[*flow].0).collect();
            table = table.row([format!("{from} s"), names.join(", "), format!("{:.2} Mbit/s", cluster.rate_per_weight_bps / 1e6)]);
        }
    }
    table
}
