//! Figure 6: one endless connection.

use super::{
    BOND, BOND_ROUND, BOND_WEIGHTED, CO_BRAID, CO_MOST, CO_ROUND, CO_WEIGHTED, IF1, ONLY_1, PO_ROUND, PO_WEIGHTED, SPAN, Setup, max_runs,
    mbps, within,
};
use crate::experiment::{
    About, Axis, Chart, Claim, Dot, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Series,
};
use crate::{Arrivals, Class, Size, simulate};
use braid_model::ByteCount;

const SCHEDULERS: [(&str, &str); 10] = [
    (ONLY_1, "only IF1"),
    (CO_ROUND, "CO\nround robin"),
    (CO_WEIGHTED, "CO\nweighted r. r."),
    (CO_MOST, "CO max.\nthroughput"),
    (CO_BRAID, "CO\nBraid's rule"),
    (PO_ROUND, "PO\nround robin"),
    (PO_WEIGHTED, "PO\nweighted r. r."),
    (BOND_ROUND, "bond\nround robin"),
    (BOND_WEIGHTED, "bond\nweighted r. r."),
    (BOND, "bond\nmiDRR"),
];
const ALL: &str = "all connections";
const LONG: &str = "the long-lived one";
/// IF2's capacity in Mbit/s in the runs for the reason of the last claims; x is the capacity of IF2.
const NARROW: f64 = 0.5;
/// Short connections per second.
const RATE: f64 = 0.25;

static ABOUT: About = About {
    name: "dbas-6",
    paper: Paper::Dbas,
    figure: "fig. 6",
    title: "One long-lived connection and a few short ones",
    setting: "Both interfaces have 2 Mbit/s. One connection is always backlogged; others are opened 0.25 times per second and move 0.285 \
              MB each. There are no small connections: with 13 per second, as in Table I, the second interface would be full in any case. \
              Everything else is as in dbas-3a and dbas-3b, but throughput is the payload that arrives within 60 s, since the long connection does not end. Schedulers know that \
              the connection is long. The bond is as in dbas-3b.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "Connection-oriented schedulers achieve the same as a single interface", paper: "in words" },
        Claim { text: "Packet-oriented weighted round robin achieves the highest throughput", paper: "in words" },
        Claim { text: "It is near the optimum, the sum of both capacities", paper: "9 % below at worst" },
        Claim { text: "Packet-oriented round robin performs poorly", paper: "in words" },
        Claim { text: "The bond: it achieves the highest throughput", paper: "in words" },
        Claim { text: "The bond: it is near the optimum, the sum of both capacities", paper: "9 % below at worst" },
        Claim { text: "The bond: round robin performs poorly", paper: "in words" },
    ],
};

/// The experiment of figure 6.
pub(super) struct Granularity;

impl Experiment for Granularity {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        let equal = SCHEDULERS.iter().map(|(series, _)| Point { series: (*series).to_owned(), x: 0.0 });
        equal.chain(Point::grid(&[PO_ROUND, PO_WEIGHTED, BOND_ROUND, BOND_WEIGHTED], &[NARROW])).collect()
    }

    fn max_runs(&self, point: &Point) -> u32 {
        max_runs(point)
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let setup = Setup { if2: if point.x > 0.0 { point.x } else { IF1 }, rates: [0.0, RATE], ..Setup::NOMINAL };
        let Some(mut scenario) = setup.scenario_on(&point.series, run) else { return Sample::default() };
        let mut long = Class::downloads("long", Arrivals::once(), Size::Endless);
        long.expected = Some(ByteCount::new(SPAN.as_secs() * 250_000));
        scenario.workload.insert(0, long);
        scenario.grace = std::time::Duration::ZERO;
        let Ok(outcome) = simulate(&scenario) else { return Sample::default() };
        let long = outcome.flows.iter().filter(|flow| flow.class == 0).map(|flow| flow.moved.rx.per(SPAN)).map(mbps).sum();
        Sample::default().value(ALL, mbps(within(&outcome))).value(LONG, long)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let line = |value: &str| {
            let dot = |(at, (series, _)): (usize, &(&str, &str))| {
                let summary = samples.summary(value, (series, 0.0));
                Dot { x: at as f64, y: summary.mean, half: summary.half }
            };
            Series { name: value.to_owned(), dots: SCHEDULERS.iter().enumerate().map(dot).collect() }
        };
        let places = SCHEDULERS.map(|(_, place)| place);
        let chart = Chart::bars("", ABOUT.title, &places, Axis::new("throughput", "Mbit/s")).with(vec![line(ALL), line(LONG)]);
        let mean = |value, series| samples.summary(value, (series, 0.0)).mean;
        let gain = |series, base| samples.gain(ALL, (series, 0.0), (base, 0.0)).mean;
        let narrow = |series, base| samples.gain(ALL, (series, NARROW), (base, NARROW)).mean;
        let connections = [CO_ROUND, CO_WEIGHTED, CO_MOST].map(|series| gain(series, ONLY_1));
        let most = connections.into_iter().fold(f64::NEG_INFINITY, f64::max);
        let longest = [CO_ROUND, CO_WEIGHTED, CO_MOST].map(|series| mean(LONG, series)).into_iter().fold(0.0, f64::max);
        let over = gain(PO_WEIGHTED, CO_MOST);
        let missing = 100.0 * (1.0 - mean(ALL, PO_WEIGHTED) / (2.0 * IF1));
        let round = gain(PO_ROUND, PO_WEIGHTED);
        let (by_bond, bond_over) = (mean(LONG, BOND), gain(BOND, CO_MOST));
        let bond_missing = [BOND_WEIGHTED, BOND].map(|series| 100.0 * (1.0 - mean(ALL, series) / (2.0 * IF1)));
        let bond_round = gain(BOND_ROUND, BOND_WEIGHTED);
        Results::default()
            .chart(chart)
            .comparison(ABOUT.claims[0].judge(
                format!("up to {most:.0} % more; the long-lived one alone at most {longest:.2} Mbit/s"),
                Judgement::met_or_not(most.abs() < 10.0),
                "The long-lived connection uses a single interface. The rest is the short connections, 0.57 Mbit/s, on the other \
                 interface.",
            ))
            .comparison(ABOUT.claims[1].judge(
                format!("{over:.0} % above connection-oriented maximum throughput"),
                Judgement::met_or_not(over > 0.0 && round <= 1.0),
                "Packet-oriented round robin behaves the same here.",
            ))
            .comparison(ABOUT.claims[2].judge(
                format!("{missing:.1} % below"),
                Judgement::met_or_not(missing <= 9.0),
                "Headers alone take 3.5 %.",
            ))
            .comparison(ABOUT.claims[3].judge(
                format!("{round:+.1} % against weighted round robin"),
                Judgement::met_or_not(round < -10.0),
                format!(
                    "The paper gives both interfaces 2 Mbit/s, but explains the result by different capacities. With equal capacities both \
                     schedulers behave the same; if IF2 has {NARROW} Mbit/s, round robin has {:+.0} %.",
                    narrow(PO_ROUND, PO_WEIGHTED)
                ),
            ))
            .comparison(ABOUT.claims[4].judge(
                format!("miDRR {bond_over:.0} % above connection-oriented maximum throughput; the long-lived one {by_bond:.2} Mbit/s"),
                Judgement::met_or_not(bond_over > 0.0),
                "The bond divides the long-lived connection over both interfaces, which connection-oriented schedulers cannot do.",
            ))
            .comparison(ABOUT.claims[5].judge(
                format!("{:.1} % below, miDRR {:.1} %", bond_missing[0], bond_missing[1]),
                Judgement::met_or_not(bond_missing.iter().all(|missing| *missing <= 9.0)),
                "Headers of IP, UDP, QUIC and the bond take about 5 %; acknowledgements of both ends and the first round trips take the \
                 rest. The model has no handshake except TCP's and no second layer of numbering.",
            ))
            .comparison(ABOUT.claims[6].judge(
                format!("{bond_round:+.1} % against weighted round robin"),
                Judgement::met_or_not(bond_round < -10.0),
                format!(
                    "Both interfaces are equal, as above. If IF2 has {NARROW} Mbit/s, the bond's round robin has {:+.0} %.",
                    narrow(BOND_ROUND, BOND_WEIGHTED)
                ),
            ))
    }
}
