//! Figures 1.1 and 3.1: effect of interface preferences on fair queueing per interface.

use std::time::Duration;

use braid_decide::fair::{FairFlow, Problem, solve};
use braid_decide::midrr::Flags;
use braid_model::{ByteCount, LinkSet, Rate};

use crate::experiment::{
    About, Axis, Chart, Claim, Dot, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Series,
};
use crate::fairness::{Discipline, QueuedFlow, Queueing, random_starts, serve};

const EACH: &str = "fair queueing on each interface";
const MIDRR: &str = "miDRR";
const EXACT: &str = "max-min (exact)";
/// Number of one-second bins. The first is excluded from rates.
const SECONDS: usize = 31;

static ABOUT: About = About {
    name: "thesis-3-1",
    paper: Paper::Thesis,
    figure: "figs. 1.1, 3.1",
    title: "Fair queueing on each interface is unfair where flows have preferences",
    setting: "Two backlogged flows with packets of 1,500 bytes. (a) one interface of 2 Mb/s; (b) two of 1 Mb/s, both flows use both; (c) \
              flow b uses interface 2 only; (d) as (c), but b has twice the weight, a case discussed in section 3.1. Fair queueing on each \
              interface is deficit round robin, which according to the thesis gives the same result as WFQ (4.4).",
    sampling: Sampling::Once,
    claims: &[
        Claim { text: "Without preferences, fair queueing on each interface is fair (a, b)", paper: "a 1, b 1 Mb/s" },
        Claim { text: "With preferences it is not (c)", paper: "a 1.5, b 0.5 Mb/s" },
        Claim { text: "A fair allocation exists (c), and miDRR reaches it", paper: "a 1, b 1 Mb/s" },
        Claim { text: "A weight that preferences do not allow wastes no capacity (d)", paper: "a 1, b 1 Mb/s" },
    ],
};

/// Name, capacities in Mb/s, links of flows a and b as masks, weight of b.
const CASES: [(&str, &[u64], [u64; 2], f64); 4] = [
    ("(a)", &[2], [0b1, 0b1], 1.0),
    ("(b)", &[1, 1], [0b11, 0b11], 1.0),
    ("(c)", &[1, 1], [0b11, 0b10], 1.0),
    ("(d) φb = 2", &[1, 1], [0b11, 0b10], 2.0),
];

/// The experiment of figures 1.1 and 3.1.
pub(super) struct Preferences;

impl Experiment for Preferences {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        Point::grid(&[EACH, MIDRR, EXACT], &[0.0, 1.0, 2.0, 3.0])
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let (_, capacities, links, weight) = CASES[point.x as usize];
        let capacities: Vec<Rate> = capacities.iter().map(|mbps| Rate::from_mbps(*mbps)).collect();
        let weights = [1.0, weight];
        let rates = match point.series.as_str() {
            EXACT => exact(&capacities, links, weights),
            EACH => queued(capacities, links, weights, Discipline::PerLink, run.seed),
            _ => queued(capacities, links, weights, Discipline::Midrr(Flags::Bit), run.seed),
        };
        Sample::default().value("a", rates[0]).value("b", rates[1])
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let rate = |series: &str, case: usize, flow: &str| samples.summary(flow, (series, case as f64)).mean;
        let places: Vec<String> = CASES.iter().flat_map(|(case, ..)| ["a", "b"].map(|flow| format!("flow {flow}\n{case}"))).collect();
        let places: Vec<&str> = places.iter().map(String::as_str).collect();
        let line = |series: &str| {
            let rates = (0..CASES.len()).flat_map(|case| ["a", "b"].map(|flow| rate(series, case, flow)));
            let dots = rates.enumerate().map(|(place, y)| Dot { x: place as f64, y, half: 0.0 }).collect();
            Series { name: series.to_owned(), dots }
        };
        let chart = Chart::bars("", ABOUT.title, &places, Axis::new("rate", "Mb/s")).with(vec![line(EACH), line(MIDRR), line(EXACT)]);
        let judge = |claim: usize, series, cases: &[usize], wanted: [f64; 2], why: &str| {
            let found: Vec<[f64; 2]> = cases.iter().map(|case| ["a", "b"].map(|flow| rate(series, *case, flow))).collect();
            let met = found.iter().all(|found| found.iter().zip(wanted).all(|(found, wanted)| (found - wanted).abs() < 0.01));
            let here: Vec<String> = found.iter().map(|[a, b]| format!("a {a:.2}, b {b:.2}")).collect();
            ABOUT.claims[claim].judge(format!("{} Mb/s", here.join("; ")), Judgement::met_or_not(met), why)
        };
        Results::default()
            .chart(chart)
            .comparison(judge(0, EACH, &[0, 1], [1.0, 1.0], ""))
            .comparison(judge(
                1,
                EACH,
                &[2],
                [1.5, 0.5],
                "Interface 2 does not take flow a's rate on interface 1 into account. (Section 4.4 swaps the flows.)",
            ))
            .comparison(judge(2, MIDRR, &[2], [1.0, 1.0], ""))
            .comparison(judge(3, MIDRR, &[3], [1.0, 1.0], "Flow b gets all of the only interface that it may use; flow a gets the rest."))
    }
}

/// Simulated rates of flows a and b in Mb/s.
fn queued(links: Vec<Rate>, allowed: [u64; 2], weights: [f64; 2], discipline: Discipline, seed: u64) -> [f64; 2] {
    let flow = |at: usize| QueuedFlow {
        weight: weights[at],
        links: LinkSet(allowed[at]),
        packet: ByteCount::new(1500),
        demand: None,
        volume: None,
    };
    let queueing = Queueing {
        starts: random_starts(&links, seed),
        links,
        flows: vec![flow(0), flow(1)],
        discipline,
        quantum: ByteCount::new(1500),
        duration: Duration::from_secs(SECONDS as u64),
        bin: Duration::from_secs(1),
        seed,
    };
    // An error becomes NaN, which then fails as a missing number.
    let Ok(service) = serve(&queueing) else { return [f64::NAN; 2] };
    [0, 1].map(|flow| service.rate(flow, 1, SECONDS).bps() as f64 / 1e6)
}

fn exact(links: &[Rate], allowed: [u64; 2], weights: [f64; 2]) -> [f64; 2] {
    let flow = |at: usize| FairFlow::backlogged(weights[at], &LinkSet(allowed[at]).iter().collect::<Vec<_>>());
    match solve(&Problem { links: links.to_vec(), flows: vec![flow(0), flow(1)] }) {
        Ok(allocation) => [0, 1].map(|flow| allocation.rates_bps[flow] / 1e6),
        Err(_) => [f64::NAN; 2],
    }
}
