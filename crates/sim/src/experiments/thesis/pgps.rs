//! Section 4.3: bounds of packet-by-packet GPS over several interfaces, and the proof that it cannot be causal.

use std::time::Duration;

use braid_decide::fair::guarantees::{pgps_delay_bound, pgps_service_bound};
use braid_decide::fair::pgps::{Packet, fluid};
use braid_decide::fair::{FairFlow, Problem};
use braid_model::{ByteCount, Rate, Time};

use crate::experiment::{About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Table};

const BOUND: &str = "Theorem 5";
const SLOWEST: &str = "one packet on the slowest interface";
const ALONE: &str = "no new flows";
const JOINED: &str = "three new flows";
/// The thesis's example.
const LARGEST: ByteCount = ByteCount::new(1500);
const INTERFACES: usize = 12;
/// x values of the finishing times: with preferences as in fig. 3.1(c), and without.
const WITH: f64 = 0.0;
const WITHOUT: f64 = 1.0;

static ABOUT: About = About {
    name: "thesis-4-3",
    paper: Paper::Thesis,
    figure: "sections 4.3.1, 4.3.2",
    title: "The cost of packet-by-packet GPS, and why it cannot be causal",
    setting: "Interfaces of 100 Mb/s and one of 1 Gb/s, packets of up to 1,500 bytes, a flow that may use 5 Gb/s. The second part uses the \
              flows of fig. 3.1(c) with first packets of 1,500 and 750 bytes and a permanent backlog behind them; in one case three more \
              flows arrive a microsecond later.",
    sampling: Sampling::Once,
    claims: &[
        Claim { text: "Extra delay with 12 interfaces (Theorem 5)", paper: "5.04 ms" },
        Claim { text: "Extra delay with a single interface", paper: "0.012 to 0.12 ms" },
        Claim { text: "Difference in service with 12 interfaces (Theorem 6)", paper: "3.125 MB" },
        Claim { text: "With preferences, which packet finishes first depends on future flows (Theorem 7)", paper: "b first; a first" },
        Claim { text: "Without preferences it does not", paper: "b first either way" },
    ],
};

/// The experiment of section 4.3.
pub(super) struct Bounds;

impl Experiment for Bounds {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        let counts: Vec<f64> = (2..=16).map(f64::from).collect();
        let mut points = Point::grid(&[BOUND, SLOWEST], &counts);
        points.extend(Point::grid(&[ALONE, JOINED], &[WITH, WITHOUT]));
        points
    }

    fn measure(&self, point: &Point, _: &Run<'_>) -> Sample {
        let ms = |span: Duration| span.as_nanos() as f64 / 1e6;
        match point.series.as_str() {
            BOUND => Sample::default().value("delay", ms(pgps_delay_bound(&interfaces(point.x as usize), LARGEST))),
            SLOWEST => Sample::default().value("delay", ms(Rate::from_mbps(100).time_for(LARGEST))),
            series => {
                let [a, b] = finishes(series == JOINED, point.x == WITH);
                Sample::default().value("a", a).value("b", b)
            }
        }
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let bounds = samples.series("delay").into_iter().filter(|series| [BOUND, SLOWEST].contains(&series.name.as_str())).collect();
        let chart = Chart::lines(
            "",
            "How much later than in the fluid system a packet may finish",
            Axis::new("interfaces", "").between(0.0, 16.0),
            Axis::new("extra delay", "ms"),
        );
        let delay = samples.summary("delay", (BOUND, INTERFACES as f64)).mean;
        let (slow, fast) = (samples.summary("delay", (SLOWEST, 2.0)).mean, Rate::from_mbps(1000).time_for(LARGEST));
        let fast = fast.as_nanos() as f64 / 1e6;
        // 5 Gb/s for the flow: five times the fastest interface.
        let all = interfaces(INTERFACES);
        let service = pgps_service_bound(&all, LARGEST, &[INTERFACES - 1; 5]).map_or(f64::NAN, |bytes| bytes.get() as f64 / 1e6);

        let finish = |series, x| ["a", "b"].map(|flow| samples.summary(flow, (series, x)).mean);
        let first = |[a, b]: [f64; 2]| if a < b { "a first" } else { "b first" };
        let orders = |x| [ALONE, JOINED].map(|series| first(finish(series, x)));
        let head = ["case", "p_a finishes", "p_b finishes"];
        let mut table = Table::new("Finishing times in the fluid system", &head);
        for (case, x) in [("with preferences", WITH), ("without", WITHOUT)] {
            for series in [ALONE, JOINED] {
                let [a, b] = finish(series, x);
                table = table.row([format!("{case}, {series}"), format!("{a:.3} ms"), format!("{b:.3} ms")]);
            }
        }
        let (with, without) = (orders(WITH), orders(WITHOUT));
        let near = |found: f64, wanted: f64| Judgement::met_or_differs((found - wanted).abs() < 1e-9);
        Results::default()
            .chart(chart.with(bounds))
            .table(table)
            .comparison(ABOUT.claims[0].judge(format!("{delay:.2} ms"), near(delay, 5.04), ""))
            .comparison(ABOUT.claims[1].judge(
                format!("{fast:.3} to {slow:.3} ms"),
                Judgement::met_or_differs((fast - 0.012).abs() < 1e-9 && (slow - 0.12).abs() < 1e-9),
                "Transmission time of one packet at 1 Gb/s and at 100 Mb/s.",
            ))
            .comparison(ABOUT.claims[2].judge(
                format!("{service:.2} MB"),
                near(service, 3.125),
                "5.04 ms at 5 Gb/s are 3.15 MB; the thesis's 3.125 MB correspond to 5 ms.",
            ))
            .comparison(ABOUT.claims[3].judge(with.join("; "), Judgement::met_or_not(with == ["b first", "a first"]), ""))
            .comparison(ABOUT.claims[4].judge(without.join("; "), Judgement::met_or_not(without == ["b first"; 2]), ""))
    }
}

/// Rates of `count` interfaces. The last one is the fastest.
fn interfaces(count: usize) -> Vec<Rate> {
    let mut all = vec![Rate::from_mbps(100); count];
    if let Some(last) = all.last_mut() {
        *last = Rate::from_mbps(1000);
    }
    all
}

/// Finishing times in milliseconds of the first packets of a and b in the fluid system.
fn finishes(joined: bool, preferences: bool) -> [f64; 2] {
    let (all, second): (&[usize], &[usize]) = (&[0, 1], if preferences { &[1] } else { &[0, 1] });
    let mut flows = vec![FairFlow::backlogged(1.0, all), FairFlow::backlogged(1.0, second)];
    let packet = |flow, size, micros: u64| Packet { flow, size: ByteCount::new(size), arrival: Time::from_nanos(micros * 1000) };
    let mut arrivals = vec![packet(0, 1500, 0), packet(1, 750, 0), packet(0, 15_000, 0), packet(1, 15_000, 0)];
    if joined {
        flows.extend((0..3).map(|_| FairFlow::backlogged(1.0, second)));
        arrivals.extend((2..5).map(|flow| packet(flow, 15_000, 1)));
    }
    let problem = Problem { links: vec![Rate::from_mbps(1); 2], flows };
    let Ok(finished) = fluid(&problem, &arrivals) else { return [f64::NAN; 2] };
    [0, 1].map(|packet| finished[packet].map_or(f64::NAN, |at| at.as_nanos() as f64 / 1e6))
}
