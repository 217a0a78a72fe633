//! Tables 5, 6 and 7: TCP throughput over several interfaces, with an idle and a saturated access point.

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Time};
use braid_netem::Random;

use super::{WIFI_B, WIFI_G, Wifi};
use crate::experiment::{
    About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Summary, Table,
};
use crate::tcp::TcpConfig;
use crate::{Arrivals, Class, LinkPower, Medium, Scenario, Scheduling, Size, VirtualInterface, simulate, simulate_with};

pub(super) const VIRTUAL: &str = "virtual interface";
/// The same if no packet is lost when a flow moves.
pub(super) const LOSSLESS: &str = "virtual interface, moves lose nothing";
pub(super) const RAW: &str = "one interface, without it";
/// Numbers of concurrent flows. [`SEVERAL`] stands for the paper's "multiple" flows.
const FLOWS: [f64; 5] = [1.0, 2.0, 3.0, 4.0, 8.0];
const SEVERAL: f64 = 4.0;
/// "Typical TCP window size is equal to 64 Kbyte" (section 3.2.4).
const WINDOW: ByteCount = ByteCount::new(65_536);
/// Duration of the paper's readings.
const SPAN: Duration = Duration::from_secs(100);

/// A gain within this many percentage points of the paper's counts as met.
const CLOSE: f64 = 10.0;

/// Table 5.
pub(super) static IDLE: Throughput = Throughput {
    about: &IDLE_ABOUT,
    interfaces: &[(WIFI_G, 0), (WIFI_G, 1)],
    saturated: false,
    paper: [23.627, 42.615, 28.879],
    gains: &[
        (
            1.0,
            0.0,
            "One flow uses one interface at a time. The paper compares with its table 3; table 5 itself has 28.9 Mbit/s for one interface, \
             which is the goodput of the links here; against that the paper's is -18 %.",
        ),
        (
            SEVERAL,
            79.0,
            "The paper's 79 % are relative to table 3's 23.7 Mbit/s; relative to table 5's own 28.9 Mbit/s they would be 48 %. Two idle \
             access points carry twice as much as one if nothing else limits the device.",
        ),
    ],
};

static IDLE_ABOUT: About = About {
    name: "vi-5",
    paper: Paper::VirtualInterface,
    figure: "table 5",
    title: "Two interfaces on two access points",
    setting: "The device sends over two 802.11g interfaces, each alone on an access point, where one TCP flow gets 28.9 Mbit/s (table 5) \
              with a round trip of 1.73 ms (table 1) and the paper's typical window of 64 KB. Endless uploads start within the first \
              second. Every 5 s each flow gets a new turn on an interface, in proportion to the inverse of smoothed round-trip times \
              (equation 2). What is on its way over the old interface when a flow moves is lost: the paper has losses of 1 to 4 % \
              with the virtual interface, \"due to the fact that we are constantly switching the physical interfaces\". A second run loses nothing. \
              The paper gives neither the length of a turn nor the number of its \"multiple\" flows: 4 here. A gain within \
              10 points of the paper's counts as met.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "One data flow is about as fast as without the virtual interface", paper: "23.6 against 23.7 Mbit/s (table 3)" },
        Claim { text: "Several data flows are faster together", paper: "42.6 against 23.7 Mbit/s (+79 %)" },
    ],
};

/// Table 6.
pub(super) static SATURATED: Throughput = Throughput {
    about: &SATURATED_ABOUT,
    interfaces: &[(WIFI_G, 0), (WIFI_G, 1)],
    saturated: true,
    paper: [19.125, 33.575, 11.713],
    gains: &[
        (
            1.0,
            63.0,
            "The saturated access point leaves an interface half of the air time here (14.4 Mbit/s), 41 % in the paper. Round-trip times \
             are twice as long there, so two of three turns are on the other access point.",
        ),
        (SEVERAL, 187.0, "Both interfaces are used at the same time."),
    ],
};

static SATURATED_ABOUT: About = About {
    name: "vi-6",
    paper: Paper::VirtualInterface,
    figure: "table 6",
    title: "Two interfaces, one of them on a saturated access point",
    setting: "As table 5, with another 802.11g station that sends all the time on the first access point. All stations that wait for a \
              channel are equally likely to send the next packet (802.11's DCF without collisions).",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "One data flow is faster than on the saturated access point alone", paper: "19.1 against 11.7 Mbit/s (+63 %)" },
        Claim { text: "Several data flows together are also faster", paper: "33.6 against 11.7 Mbit/s (+187 %)" },
    ],
};

/// Table 7.
pub(super) static SHARED: Throughput = Throughput {
    about: &SHARED_ABOUT,
    interfaces: &[(WIFI_G, 0), (WIFI_G, 0), (WIFI_B, 0)],
    saturated: true,
    paper: [9.915, 14.756, 11.713],
    gains: &[
        (
            1.0,
            -15.0,
            "Turns on 802.11b are slow for the flow, and also for the other station, whose packets wait for the longer 802.11b packets.",
        ),
        (
            SEVERAL,
            26.0,
            "With several flows the 802.11b interface nearly always has something to send. Each station on a channel sends the same number \
             of packets, so the slow packets of 802.11b slow all stations, the other station most of all. This holds for three flows and \
             more, up to the 8 measured.",
        ),
    ],
};

static SHARED_ABOUT: About = About {
    name: "vi-7",
    paper: Paper::VirtualInterface,
    figure: "table 7",
    title: "Three interfaces on one saturated access point",
    setting: "As table 6, with two 802.11g and one 802.11b interface (5.9 Mbit/s alone, a usual value; the paper gives none) and the other \
              station, all on one access point and one channel.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "One data flow is slower than over one interface alone", paper: "9.9 against 11.7 Mbit/s (-15 %)" },
        Claim { text: "Several data flows are faster together", paper: "14.8 against 11.7 Mbit/s (+26 %)" },
    ],
};

/// The experiment of one of the tables.
pub(super) struct Throughput {
    about: &'static About,
    /// The interfaces of the device, and the access point of each.
    interfaces: &'static [(Wifi, usize)],
    /// Whether another station saturates the first access point.
    saturated: bool,
    /// The paper's throughputs in Mbit/s: one flow, several flows, one interface alone.
    paper: [f64; 3],
    /// For each claim: number of flows, the gain in percent that the paper states (for table 5: over table 3's value), and the explanation.
    gains: &'static [(f64, f64, &'static str)],
}

impl Throughput {
    fn scenario(&self, flows: usize, series: &str, span: Duration, seed: u64) -> Scenario {
        let only = series == RAW;
        let mut links: Vec<_> = self.interfaces.iter().enumerate().map(|(at, (wifi, _))| wifi.link(&at.to_string())).collect();
        let count = links.len();
        links.push(WIFI_G.link("of another station"));
        let last = self.interfaces.iter().map(|(_, access_point)| *access_point).max().unwrap_or(0);
        let on = |access_point: usize| {
            let mine = (0..count).filter(|link| self.interfaces[*link].1 == access_point);
            Medium { links: mine.chain((access_point == 0).then_some(count)).collect() }
        };
        let mut dice = Random::new(seed);
        let mut starts: Vec<Time> = (0..flows).map(|_| Time::from_nanos(dice.up_to(1_000_000_000))).collect();
        starts.sort_unstable();
        let mine =
            Class { links: Some(mask(0..if only { 1 } else { count })), ..Class::uploads("flows", Arrivals::At(starts), Size::Endless) };
        let other = Class { links: Some(mask(count..count + 1)), ..Class::uploads("other station", Arrivals::once(), Size::Endless) };
        let workload = if self.saturated { vec![mine, other] } else { vec![mine] };
        Scenario {
            media: (0..=last).map(on).collect(),
            links,
            workload,
            scheduling: Scheduling::OnlyOne(0),
            moves_lose: series == VIRTUAL,
            tcp: TcpConfig { receive_window: WINDOW, ..TcpConfig::default() },
            duration: span,
            seed,
            ..Scenario::default()
        }
    }
}

fn mask(links: impl Iterator<Item = usize>) -> LinkSet {
    let mut mask = LinkSet::default();
    links.for_each(|link| mask.insert(link));
    mask
}

impl Experiment for Throughput {
    fn about(&self) -> &'static About {
        self.about
    }

    fn points(&self) -> Vec<Point> {
        let mut points = Point::grid(&[VIRTUAL, LOSSLESS], &FLOWS);
        points.extend(Point::grid(&[RAW], &[1.0, FLOWS[FLOWS.len() - 1]]));
        points
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let (rates, lost) = self.rates(point.x as usize, &point.series, SPAN, run.seed);
        let Some((other, mine)) = rates.split_last() else { return Sample::default() };
        let sample = Sample::default().value("lost", lost).value("throughput", mine.iter().sum()).value("other", *other);
        mine.iter().enumerate().fold(sample, |sample, (at, rate)| sample.value(format!("link {at}"), *rate))
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let axes = (Axis::new("flows at once", ""), Axis::new("throughput", "Mbit/s"));
        let chart = Chart::lines("", self.about.title, axes.0.between(0.0, FLOWS[FLOWS.len() - 1]), axes.1)
            .with(samples.series("throughput"))
            .curve("paper, virtual interface", &[(1.0, self.paper[0]), (SEVERAL, self.paper[1])]);
        let mut results = Results::default().chart(chart).table(self.table(samples));
        for (claim, (flows, paper, why)) in self.about.claims.iter().zip(self.gains) {
            let gain = samples.gain("throughput", (VIRTUAL, *flows), (RAW, 1.0));
            let rates = [(VIRTUAL, *flows), (RAW, 1.0)].map(|at| samples.summary("throughput", at).mean);
            let here = format!("{:.1} against {:.1} Mbit/s ({:+.0} %)", rates[0], rates[1], gain.mean);
            results = results.comparison(claim.judge(here, judge(gain, *paper), format!("{why} {}", self.lossless(samples, *flows))));
        }
        results
    }
}

impl Throughput {
    /// What the run without losses in moves shows.
    fn lossless(&self, samples: &Samples, flows: f64) -> String {
        let gain = samples.gain("throughput", (LOSSLESS, flows), (RAW, 1.0));
        let lost = [VIRTUAL, LOSSLESS].map(|series| samples.summary("lost", (series, flows)).mean);
        format!(
            "{:.2} % of the segments were sent again. If moves lose nothing, it is {:.1} Mbit/s ({:+.0} %), and {:.2} %.",
            lost[0],
            samples.summary("throughput", (LOSSLESS, flows)).mean,
            gain.mean,
            lost[1]
        )
    }

    /// Rates in Mbit/s sent over each interface, and by the other station; and the percentage of segments that were sent again.
    pub(super) fn rates(&self, flows: usize, series: &str, span: Duration, seed: u64) -> (Vec<f64>, f64) {
        let scenario = self.scenario(flows, series, span, seed);
        let station = (WIFI_G, 0);
        let interfaces = self.interfaces.iter().chain([&station]);
        let interfaces: Vec<_> = interfaces.map(|(wifi, _)| wifi.interface(LinkPower::default())).collect();
        let outcome =
            if series == RAW { simulate(&scenario) } else { simulate_with(&scenario, &mut VirtualInterface::new(&interfaces, true)) };
        let Ok(outcome) = outcome else { return (Vec::new(), f64::NAN) };
        let lost = 100.0 * outcome.counters.repeated as f64 / outcome.counters.segments.max(1) as f64;
        let rates = outcome.links.iter().map(|link| link.goodput.tx.per(span).bps() as f64 / 1e6).collect();
        (rates, lost)
    }

    fn table(&self, samples: &Samples) -> Table {
        let names: Vec<String> = self.interfaces.iter().enumerate().map(|(at, (wifi, _))| format!("{} {at}", wifi.name)).collect();
        let mut columns = vec!["", "paper (Mbit/s)", "here (Mbit/s)", "sent again (%)"];
        columns.extend(names.iter().map(String::as_str));
        columns.push("other station");
        let mut table = Table::new(format!("{}, {} seconds", self.about.figure, SPAN.as_secs()), &columns);
        let [one, several, raw] = self.paper.map(|paper| format!("{paper:.1}"));
        let rows = [
            ("one flow", VIRTUAL, 1.0, one),
            ("several flows (4)", VIRTUAL, SEVERAL, several),
            ("one flow, moves lose nothing", LOSSLESS, 1.0, String::new()),
            ("several flows (4), moves lose nothing", LOSSLESS, SEVERAL, String::new()),
            ("one interface, one flow", RAW, 1.0, raw),
        ];
        for (name, series, flows, paper) in rows {
            let mean = |value: &str| format!("{:.1}", samples.summary(value, (series, flows)).mean);
            let mut row = vec![name.to_owned(), paper, format!("{:.1}", samples.summary("throughput", (series, flows)))];
            row.push(format!("{:.2}", samples.summary("lost", (series, flows)).mean));
            row.extend((0..names.len()).map(|at| mean(&format!("link {at}"))));
            row.push(if self.saturated { mean("other") } else { "none".to_owned() });
            table = table.row(row);
        }
        table
    }
}

/// Compares two gains in percent. A gain of zero is an equality.
fn judge(here: Summary, paper: f64) -> Judgement {
    let met = (here.mean - paper).abs() <= CLOSE;
    match paper {
        0.0 => Judgement::met_or_not(met),
        _ if paper > 0.0 => Judgement::met_or_differs(met, here),
        _ => Judgement::met_or_differs(met, here.negated()),
    }
}
