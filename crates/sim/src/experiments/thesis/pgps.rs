//! Section 4.3: how late packet-by-packet GPS over several interfaces is, and the proof that it cannot be causal.

use std::time::Duration;

use braid_decide::fair::guarantees::{pgps_delay_bound, pgps_service_bound};
use braid_decide::fair::pgps::{Packet, counterexample, fluid, packets};
use braid_decide::fair::{FairFlow, Problem};
use braid_model::{ByteCount, Rate, Time};
use braid_netem::Random;

use crate::experiment::{About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Table};

/// The counterexample on the thesis's 12 interfaces and on two interfaces of 1 Mb/s; x is the number of flows that share the first.
const TWELVE: &str = "12 interfaces (the thesis's example)";
const TWO: &str = "two interfaces of 1 Mb/s";
/// One interface; x is its rate in Mb/s.
const SINGLE: &str = "one interface";
const ALONE: &str = "no new flows";
const JOINED: &str = "three new flows";
/// The thesis's example.
const LARGEST: ByteCount = ByteCount::new(1500);
const SLOW: Rate = Rate::from_mbps(100);
const FAST: Rate = Rate::from_mbps(1000);
const FLOWS: [f64; 6] = [2.0, 5.0, 10.0, 20.0, 40.0, 60.0];
const MANY: f64 = FLOWS[5];
/// The number of flows in the small counterexample.
const FEW: f64 = FLOWS[2];
/// x values of the finishing times: with preferences as in fig. 3.1(c), and without.
const WITH: f64 = 0.0;
const WITHOUT: f64 = 1.0;
/// Random instances on one interface.
const INSTANCES: u64 = 200;

static ABOUT: About = About {
    name: "thesis-4-3",
    paper: Paper::Thesis,
    figure: "Theorems 5, 6 and 7, Lemmas 4 to 6, fig. 4.1",
    title: "Packet-by-packet GPS is later than Theorem 5 says, and cannot be causal",
    setting: "Fluid GPS and packet-by-packet GPS, both with the future known. The counterexample has 12 interfaces as in the thesis's example, \
              of 100 Mb/s and one of 1 Gb/s, and packets of 1,500 bytes. x flows with one packet each may use interface 1 only, and flow b \
              interfaces 1 and 2; two flows of a thousandth of the weight fill the rest. A packet of b arrives each time just before interface 1 \
              is free and just after interface 2 has started a packet. The fluid system serves b on interface 2 at once. Packet by packet, \
              interface 1 takes b's packets, since they are due first, and the packets of the x flows wait until they are due, all at about the \
              same time. The same on two interfaces of 1 Mb/s. On one interface: 200 random instances of three flows. Theorem 7: the flows \
              of fig. 3.1(c) with first packets of 1,500 and 750 bytes and a permanent backlog behind them; in one case three more flows \
              arrive a microsecond later.",
    sampling: Sampling::Once,
    claims: &[
        Claim { text: "A packet is at most so much later than in the fluid system (Theorem 5), with 12 interfaces", paper: "5.04 ms" },
        Claim {
            text: "... because a fast interface diverts a slow one at most ⌈log2 n⌉ times (Lemma 5)", paper: "4.8 ms of the 5.04 ms"
        },
        Claim { text: "With one interface it is at most one packet late (Lemmas 4 and 6)", paper: "0.012 to 0.12 ms" },
        Claim {
            text: "A flow is at most so far behind the fluid system (Theorem 6)",
            paper: "Theorem 5's delay at the rate of its interfaces",
        },
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
        let mut points = Point::grid(&[TWELVE, TWO], &FLOWS);
        points.extend(Point::grid(&[SINGLE], &[SLOW, FAST].map(mbps)));
        points.extend(Point::grid(&[ALONE, JOINED], &[WITH, WITHOUT]));
        points
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        match point.series.as_str() {
            TWELVE => lag(SLOW, point.x as usize, &others()),
            TWO => lag(Rate::from_mbps(1), point.x as usize, &[]),
            SINGLE => Sample::default().value("late", ms(alone(Rate::from_mbps(point.x as u64), run.seed))),
            series => {
                let [a, b] = finishes(series == JOINED, point.x == WITH);
                Sample::default().value("a", a).value("b", b)
            }
        }
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let value = |name: &str, series: &str, x: f64| samples.summary(name, (series, x)).mean;
        let links = [&[SLOW, SLOW], &others()[..]].concat();
        let bound = ms(pgps_delay_bound(&links, LARGEST));
        let line = |value: f64| [(FLOWS[0], value), (MANY, value)];
        let late: Vec<(f64, f64)> = FLOWS.map(|flows| (flows, value("late", TWELVE, flows))).to_vec();
        let chart = Chart::lines(
            "",
            "How much later than in the fluid system a packet is, 12 interfaces",
            Axis::new("flows that share interface 1", "").between(0.0, MANY),
            Axis::new("extra delay", "ms"),
        )
        .curve("the counterexample", &late)
        .curve("the bound of Theorem 5", &line(bound));

        let (one, two) = (bounds(&links), bounds(&[Rate::from_mbps(1); 2]));
        let head = ["interfaces", "flows", "a packet is late by", "Theorem 5", "a flow is behind by", "Theorem 6"];
        let mut lags = Table::new("The counterexample", &head);
        for (series, flows, (delay, service)) in [(TWELVE, MANY, one), (TWO, FEW, two)] {
            lags = lags.row([
                series.to_owned(),
                flows.to_string(),
                format!("{:.3} ms", value("late", series, flows)),
                format!("{delay:.3} ms"),
                format!("{:.1} kB", value("behind", series, flows)),
                format!("{service:.1} kB"),
            ]);
        }

        let finish = |series, x| ["a", "b"].map(|flow| value(flow, series, x));
        let first = |[a, b]: [f64; 2]| if a < b { "a first" } else { "b first" };
        let orders = |x| [ALONE, JOINED].map(|series| first(finish(series, x)));
        let mut table = Table::new("Finishing times in the fluid system", &["case", "p_a finishes", "p_b finishes"]);
        for (case, x) in [("with preferences", WITH), ("without", WITHOUT)] {
            for series in [ALONE, JOINED] {
                let [a, b] = finish(series, x);
                table = table.row([format!("{case}, {series}"), format!("{a:.3} ms"), format!("{b:.3} ms")]);
            }
        }
        let (with, without) = (orders(WITH), orders(WITHOUT));
        let (worst, small) = (value("late", TWELVE, MANY), value("late", TWO, FEW));
        let singles = [FAST, SLOW].map(|rate| (value("late", SINGLE, mbps(rate)), ms(rate.time_for(LARGEST))));
        // Lemmas 4 and 6 allow two packets; what is beyond them is Lemma 5's part.
        let diverted = worst - 2.0 * ms(SLOW.time_for(LARGEST));
        let lemma = bound - 2.0 * ms(SLOW.time_for(LARGEST));
        Results::default()
            .chart(chart)
            .table(lags)
            .table(table)
            .comparison(ABOUT.claims[0].judge(
                format!("{worst:.2} ms with {MANY} flows; on two interfaces of 1 Mb/s {small:.0} ms with {FEW}, where the bound is {:.0} ms", two.0),
                Judgement::met_or_not(worst <= bound && small <= two.0),
                "The delay grows with the number of flows that share interface 1, about one packet for each, so no bound without that number holds.",
            ))
            .comparison(ABOUT.claims[1].judge(
                format!("{diverted:.2} ms beyond the two packets of Lemmas 4 and 6"),
                Judgement::met_or_not(diverted <= lemma),
                "The proof says that an interface that was delayed can only be delayed further by one that is itself late. Here interface 2 is never \
                 late, and diverts interface 1 with each packet of b.",
            ))
            .comparison(ABOUT.claims[2].judge(
                format!("at most {:.4} ms at 1 Gb/s, {:.4} ms at 100 Mb/s in {INSTANCES} random instances", singles[0].0, singles[1].0),
                Judgement::met_or_not(singles.iter().all(|(late, bound)| late <= bound)),
                "",
            ))
            .comparison(ABOUT.claims[3].judge(
                format!(
                    "{:.1} kB with {MANY} flows, where the theorem allows {:.1}; on two interfaces {:.1} kB instead of {:.1}",
                    value("behind", TWELVE, MANY),
                    one.1,
                    value("behind", TWO, FEW),
                    two.1
                ),
                Judgement::met_or_not(value("behind", TWELVE, MANY) <= one.1 && value("behind", TWO, FEW) <= two.1),
                format!(
                    "It is Theorem 5's delay times a rate, so it fails with it. The thesis's example of 3.125 MB for a flow of 5 Gb/s does not follow \
                     from its formula, which gives {:.2} MB; 3.125 MB are 5 ms at 5 Gb/s.",
                    5.04e-3 * 5e9 / 8e6
                ),
            ))
            .comparison(ABOUT.claims[4].judge(with.join("; "), Judgement::met_or_not(with == ["b first", "a first"]), ""))
            .comparison(ABOUT.claims[5].judge(without.join("; "), Judgement::met_or_not(without == ["b first"; 2]), ""))
    }
}

fn ms(span: Duration) -> f64 {
    span.as_nanos() as f64 / 1e6
}

fn mbps(rate: Rate) -> f64 {
    rate.bps() as f64 / 1e6
}

/// The interfaces of the thesis's example besides the two of the counterexample.
fn others() -> Vec<Rate> {
    [vec![SLOW; 9], vec![FAST]].concat()
}

/// The bounds of Theorem 5 in milliseconds, and of Theorem 6 in kilobytes for a flow that may use the first interface.
fn bounds(links: &[Rate]) -> (f64, f64) {
    let service = pgps_service_bound(links, LARGEST, &[0]).map_or(f64::NAN, |bytes| bytes.get() as f64 / 1e3);
    (ms(pgps_delay_bound(links, LARGEST)), service)
}

/// The counterexample: how late the latest packet of the flows on the first interface is (ms), and how far the flow of small weight there is behind
/// at most (kB).
fn lag(rate: Rate, flows: usize, others: &[Rate]) -> Sample {
    let (problem, arrivals) = counterexample(rate, LARGEST, flows, others);
    let (Ok(fluid), Ok(sent)) = (fluid(&problem, &arrivals), packets(&problem, &arrivals)) else { return Sample::default() };
    let finish = |packet: usize| Some((fluid[packet]?, sent[packet]?.finish));
    let Some(times) = (0..arrivals.len()).map(finish).collect::<Option<Vec<(Time, Time)>>>() else { return Sample::default() };
    let late = times[..flows].iter().map(|(fluid, sent)| sent.since(*fluid)).max().unwrap_or_default();
    let filler: Vec<usize> = (0..arrivals.len()).filter(|packet| arrivals[*packet].flow == flows + 2).collect();
    let done = |now: Time, by: fn(&(Time, Time)) -> Time| -> u64 {
        filler.iter().filter(|packet| by(&times[**packet]) <= now).map(|packet| arrivals[*packet].size.get()).sum()
    };
    let behind = filler.iter().map(|packet| {
        let now = times[*packet].0;
        done(now, |(fluid, _)| *fluid).saturating_sub(done(now, |(_, sent)| *sent))
    });
    Sample::default().value("late", ms(late)).value("behind", behind.max().unwrap_or(0) as f64 / 1e3)
}

/// The latest packet of random instances on one interface: three flows of random weights, packets of random sizes at random times.
fn alone(rate: Rate, seed: u64) -> Duration {
    let mut dice = Random::new(seed);
    let mut worst = Duration::ZERO;
    for _ in 0..INSTANCES {
        let flows = (0..3).map(|_| FairFlow::backlogged((1 + dice.up_to(9)) as f64, &[0])).collect();
        let problem = Problem { links: vec![rate], flows };
        let span = rate.time_for(LARGEST).as_nanos() as u64 * 40;
        let mut arrivals: Vec<Packet> = (0..60)
            .map(|_| {
                let size = ByteCount::new(64 + dice.up_to(LARGEST.get() - 64));
                Packet { flow: dice.up_to(2) as usize, size, arrival: Time::from_nanos(dice.up_to(span)) }
            })
            .collect();
        arrivals.sort_by_key(|packet| packet.arrival);
        let (Ok(fluid), Ok(sent)) = (fluid(&problem, &arrivals), packets(&problem, &arrivals)) else { return Duration::MAX };
        let late = fluid.iter().zip(&sent).filter_map(|(fluid, sent)| Some((*sent)?.finish.since((*fluid)?)));
        worst = worst.max(late.max().unwrap_or_default());
    }
    worst
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
