//! Figures 4.6 and 4.7: duration of a decision of miDRR.

use braid_decide::midrr::{Flags, FlowKey, Midrr, MidrrError};
use braid_model::{ByteCount, LinkSet, Time};
use braid_netem::Random;

use crate::experiment::{
    About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Summary, Table, distribution,
    quantile,
};

const PACKET: ByteCount = ByteCount::new(1000);
/// Number of timed decisions, and of untimed warm-up decisions before them.
const DECISIONS: usize = 100_000;
const WARM: usize = 20_000;
/// Number of steps of a distribution.
const STEPS: usize = 200;

static FLOWS_ABOUT: About = About {
    name: "thesis-4-6",
    paper: Paper::Thesis,
    figure: "fig. 4.6",
    title: "Time of a decision with more flows, four interfaces",
    setting: "Every flow is backlogged with packets of 1,000 bytes and may use every interface; a quantum is one packet, so that every \
              decision searches for the next flow. Interfaces request packets in random order. A measured time covers one decision, the \
              update of the flow's next packet, and the reading of the clock. The thesis measured its kernel module on a Core Duo of 2.26 \
              GHz.",
    sampling: Sampling::Timed,
    claims: &[Claim { text: "The time does not depend on the number of flows", paper: "one curve for all" }],
};

static LINKS_ABOUT: About = About {
    name: "thesis-4-7",
    paper: Paper::Thesis,
    figure: "fig. 4.7",
    title: "Time of a decision with more interfaces, 32 flows",
    setting: "As in fig. 4.6.",
    sampling: Sampling::Timed,
    claims: &[
        Claim { text: "The time grows with the number of interfaces", paper: "up to about 2.5 µs" },
        Claim { text: "A decision with 16 interfaces is fast", paper: "under 2.5 µs" },
        Claim { text: "This allows a throughput with packets of 1,000 bytes of", paper: "more than 3 Gb/s" },
    ],
};

/// The experiment of figure 4.6.
pub(super) const FLOWS: Overhead = Overhead { about: &FLOWS_ABOUT, over: Over::Flows };
/// The experiment of figure 4.7.
pub(super) const LINKS: Overhead = Overhead { about: &LINKS_ABOUT, over: Over::Links };

/// An experiment that measures the duration of decisions.
pub(super) struct Overhead {
    about: &'static About,
    over: Over,
}

#[derive(PartialEq)]
enum Over {
    Flows,
    Links,
}

impl Overhead {
    fn xs(&self) -> &'static [f64] {
        match self.over {
            Over::Flows => &[8.0, 32.0, 128.0, 1000.0],
            Over::Links => &[2.0, 4.0, 8.0, 16.0],
        }
    }

    fn series(&self, x: f64) -> String {
        format!("{x} {}", if self.over == Over::Flows { "flows" } else { "interfaces" })
    }
}

impl Experiment for Overhead {
    fn about(&self) -> &'static About {
        self.about
    }

    fn points(&self) -> Vec<Point> {
        self.xs().iter().map(|x| Point { series: self.series(*x), x: *x }).collect()
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let (flows, links) = match self.over {
            Over::Flows => (point.x as usize, 4),
            Over::Links => (32, point.x as usize),
        };
        let times = times(flows, links, run).unwrap_or_default();
        let clock: Vec<f64> = (0..DECISIONS).map(|_| nanos((run.clock)(), (run.clock)())).collect();
        let share = |times: &[f64], share| quantile(times, share).unwrap_or(f64::NAN);
        Sample::default()
            .value("median", share(&times, 0.5))
            .value("p90", share(&times, 0.9))
            .value("p99", share(&times, 0.99))
            .value("clock", share(&clock, 0.5))
            .curve("distribution", distribution(&times, STEPS))
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let value = |name: &str, x: f64| samples.summary(name, (&self.series(x), x)).mean;
        let most = self.xs().iter().map(|x| value("p99", *x)).fold(1.0, f64::max);
        let chart = Chart::steps(
            "",
            self.about.title,
            Axis::new("time of a decision", "ns").between(0.0, most),
            Axis::new("share of decisions", "").between(0.0, 1.0),
        );
        let chart = self.xs().iter().fold(chart, |chart, x| {
            let series = self.series(*x);
            let curve = samples.curve("distribution", (&series, *x));
            let begin = curve.first().map(|(least, _)| (*least, 0.0));
            chart.curve(series.clone(), &begin.into_iter().chain(curve.iter().copied()).collect::<Vec<_>>())
        });
        let head = [if self.over == Over::Flows { "flows" } else { "interfaces" }, "median", "90 %", "99 %"];
        let table = self.xs().iter().fold(Table::new("Times in nanoseconds", &head), |table, x| {
            table.row([x.to_string()].into_iter().chain(["median", "p90", "p99"].map(|name| format!("{:.0}", value(name, *x)))))
        });
        let clock = self.xs().iter().map(|x| value("clock", *x)).fold(f64::INFINITY, f64::min);
        let results =
            Results::default().chart(chart).table(table).note(format!("Reading the clock alone accounts for {clock:.0} ns of each."));
        let (least, most) = (self.xs()[0], self.xs()[self.xs().len() - 1]);
        let (first, last) = (value("median", least), value("median", most));
        let medians = format!("median {first:.0} ns with {least}, {last:.0} ns with {most}");
        if self.over == Over::Flows {
            let flat = last < 1.5 * first + clock / 2.0;
            let why = "The round of a link is searched in words of 64 flows, and words without backlogged flows are skipped. More flows \
                       use more memory, though.";
            return results.comparison(self.about.claims[0].judge(medians, Judgement::met_or_not(flat), why));
        }
        let (p99, gigabits) = (value("p99", most), PACKET.get() as f64 * 8.0 / last);
        let why = "The thesis visits flows that were served elsewhere one by one; here they are skipped 64 at a time.";
        results
            .comparison(self.about.claims[0].judge(
                medians,
                Judgement::met_or_differs(last > 1.5 * first, Summary::exact(last - first)),
                why,
            ))
            .comparison(self.about.claims[1].judge(format!("99 % within {p99:.0} ns"), Judgement::met_or_not(p99 < 2500.0), ""))
            .comparison(self.about.claims[2].judge(
                format!("{gigabits:.0} Gb/s"),
                Judgement::met_or_not(gigabits > 3.0),
                "Computed from the median.",
            ))
    }
}

/// Duration of each decision in nanoseconds.
fn times(flows: usize, links: usize, run: &Run<'_>) -> Result<Vec<f64>, MidrrError> {
    let mut midrr = Midrr::new(links, PACKET, Flags::Bit)?;
    for _ in 0..flows {
        let key: FlowKey = midrr.add_flow(1.0, (0..links).collect::<LinkSet>())?;
        midrr.set_head(key, Some(PACKET))?;
    }
    let mut random = Random::new(run.seed);
    let mut times = Vec::with_capacity(DECISIONS);
    for number in 0..WARM + DECISIONS {
        let link = random.up_to(links as u64 - 1) as usize;
        let begin = (run.clock)();
        if let Some(grant) = midrr.next(link) {
            midrr.set_head(grant.flow, Some(PACKET))?;
        }
        let end = (run.clock)();
        if number >= WARM {
            times.push(nanos(begin, end));
        }
    }
    Ok(times)
}

fn nanos(begin: Time, end: Time) -> f64 {
    end.since(begin).as_nanos() as f64
}
