//! DBAS (2012), section IV: connections and packets over links of 2 Mbit/s and less.

mod applications;
mod clients;
mod granularity;
mod interfaces;

use std::time::Duration;

use braid_model::{ByteCount, Direction, Rate, Time, Traffic};
use braid_netem::Profile;

use crate::experiment::{About, Axis, Chart, Experiment, Point, Results, Run, Sample, Samples, Summary, Table};
use crate::{
    Arrivals, Bonding, Class, DemandKnowledge, Knowledge, LinkSpec, LoadKnowledge, Outcome, Packets, Scenario, Scheduling, ServerLink,
    ServerSpec, Size, Spreading, simulate,
};

pub(super) fn all() -> [&'static dyn Experiment; 7] {
    [
        &interfaces::NARROW_CONNECTIONS,
        &interfaces::NARROW_PACKETS,
        &interfaces::LOSSY_CONNECTIONS,
        &interfaces::LOSSY_PACKETS,
        &applications::APPLICATIONS,
        &granularity::Granularity,
        &clients::Clients,
    ]
}

/// An experiment that compares schedulers over a range of one parameter.
struct Sweep {
    about: &'static About,
    series: &'static [&'static str],
    xs: &'static [f64],
    /// x values at which the bond is measured.
    bond_xs: &'static [f64],
    /// Label and unit of the x axis.
    x: (&'static str, &'static str),
    setup: fn(f64) -> Setup,
    /// The x value at which throughput is also shown by other definitions.
    detail_x: f64,
    /// Whether other queue sizes and spans are measured at that x value.
    queues: bool,
    /// Series that are measured for the reasons, and not shown in the charts.
    reasons: &'static [&'static str],
    /// Adds the comparisons.
    judge: fn(Results, &Samples) -> Results,
}

impl Experiment for Sweep {
    fn about(&self) -> &'static About {
        self.about
    }

    fn points(&self) -> Vec<Point> {
        let mut points = Point::grid(self.series, self.xs);
        points.extend(Point::grid(&BONDS, self.bond_xs));
        points.extend(Point::grid(self.reasons, self.xs));
        let others = QUEUES.iter().map(|(name, _)| name).chain(SPANS.iter().map(|(name, _)| name));
        for name in others.filter(|_| self.queues) {
            points.extend(self.series.iter().map(|series| Point { series: format!("{series}{name}"), x: self.detail_x }));
        }
        points
    }

    fn max_runs(&self, point: &Point) -> u32 {
        max_runs(point)
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        let setup = (self.setup)(point.x);
        let other = QUEUES.iter().find_map(|(name, queue)| Some((point.series.strip_suffix(name)?, ByteCount::new(*queue))));
        let (series, queue) = other.unwrap_or((&point.series, setup.queue));
        let other = SPANS.iter().find_map(|(name, seconds)| Some((series.strip_suffix(name)?, Duration::from_secs(*seconds))));
        let (series, span) = other.unwrap_or((series, setup.span));
        Setup { queue, span, ..setup }.measure(series, run)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let chart = |name, title: &str, value| {
            let x = Axis::new(self.x.0, self.x.1);
            let mut series = samples.series(value);
            series.retain(|series| self.shown().contains(&series.name.as_str()));
            Chart::lines(name, title, x, Axis::new("throughput", "Mbit/s")).with(series)
        };
        let mut results = Results::default().chart(chart("", self.about.title, THROUGHPUT)).chart(chart(
            "span",
            &format!("{}, within the 60 s", self.about.title),
            WITHIN,
        ));
        results = results.table(self.definitions(samples));
        if self.queues {
            results = results.table(self.queues(samples)).table(self.spans(samples));
        }
        (self.judge)(results.note(self.tails(samples)), samples)
    }
}

impl Sweep {
    /// The series of the charts.
    fn shown(&self) -> Vec<&'static str> {
        let bonds: &[&str] = if self.bond_xs.is_empty() { &[] } else { &BONDS };
        [self.series, bonds].concat()
    }

    /// Explains the effect of connections that end late on the throughput.
    fn tails(&self, samples: &Samples) -> String {
        let all = |series: &str| -> Vec<f64> { self.xs.iter().flat_map(|x| samples.values(TAIL, (series, *x))).collect() };
        let tails = self.series.iter().map(|series| format!("{series} {:.0} %", Summary::of(&all(series)).mean));
        format!(
            "Fraction of the time until the last connection ended that passed after 99 % of the payload had arrived: {}. Many connections \
             share a queue of 50 packets. A few of them, often small ones, lose several packets in a row and wait in TCP's exponential \
             backoff while the links are idle. This lowers all throughputs, most of all if many connections are on one link.",
            tails.collect::<Vec<_>>().join(", ")
        )
    }

    fn definitions(&self, samples: &Samples) -> Table {
        let definitions = [
            ("all payload over the time until the last connection ended", THROUGHPUT),
            ("99 % of the payload over the time until it had arrived", NEARLY),
            ("what arrived within the 60 s", WITHIN),
        ];
        definitions.iter().fold(self.table("by other definitions", "throughput"), |table, (text, value)| {
            table.row(self.cells((*text).to_owned(), samples, value, ""))
        })
    }

    fn queues(&self, samples: &Samples) -> Table {
        let usual = ("", Setup::NOMINAL.queue.get());
        [usual].iter().chain(&QUEUES).fold(self.table("with other queues", "queues"), |table, (name, queue)| {
            table.row(self.cells(format!("{} packets", queue / 1500), samples, THROUGHPUT, name))
        })
    }

    fn spans(&self, samples: &Samples) -> Table {
        let usual = ("", SPAN.as_secs());
        SPANS
            .iter()
            .chain([&usual])
            .fold(self.table("if connections are opened for another time", "opened for"), |table, (name, seconds)| {
                table.row(self.cells(format!("{seconds} s"), samples, THROUGHPUT, name))
            })
    }

    fn table(&self, what: &str, head: &str) -> Table {
        let title = format!("Throughput in Mbit/s {what}; {}: {} {}", self.x.0, self.detail_x, self.x.1);
        Table::new(title, &[&[head], self.series].concat())
    }

    fn cells(&self, head: String, samples: &Samples, value: &str, suffix: &str) -> Vec<String> {
        let cell = |series: &&str| {
            let Summary { mean, half, .. } = samples.summary(value, (&format!("{series}{suffix}"), self.detail_x));
            format!("{mean:.2} ± {half:.2}")
        };
        [vec![head], self.series.iter().map(cell).collect()].concat()
    }
}

// Names of the schedulers in legends.
const ONLY_1: &str = "only IF1";
const ONLY_2: &str = "only IF2";
const CO_ROUND: &str = "CO round robin";
const CO_WEIGHTED: &str = "CO weighted round robin";
/// The rule as printed: the interface that finishes its load and the new connection first ("minimizing the time needed to finish the current system
/// load in addition to the load introduced by the new connection"; of interfaces that do not prolong that time, the one that finishes first).
const CO_MOST: &str = "CO maximum throughput";
/// The same with exactly known demands.
const CO_KNOWN: &str = "CO maximum throughput, demands known";
/// The daemon's rule: the interface on which the connection itself is expected to end first.
const CO_BRAID: &str = "CO Braid's rule";
/// One connection that lasts for the whole span, over IF2.
const CO_ONE: &str = "one endless connection over IF2";
const PO_ROUND: &str = "PO round robin";
const PO_WEIGHTED: &str = "PO weighted round robin";
const BOND_ROUND: &str = "bond, round robin";
const BOND_WEIGHTED: &str = "bond, weighted round robin";
const BOND: &str = "bond, miDRR";

const CONNECTIONS: [&str; 5] = [ONLY_1, CO_ROUND, CO_WEIGHTED, CO_MOST, CO_BRAID];
const PACKETS: [&str; 3] = [ONLY_1, PO_ROUND, PO_WEIGHTED];
/// Schedulers of the daemon's bond. Its default is miDRR.
const BONDS: [&str; 3] = [BOND_ROUND, BOND_WEIGHTED, BOND];

/// Payload over the time until the last connection opened in [`SPAN`] ended, in Mbit/s.
const THROUGHPUT: &str = "throughput";
/// Payload that arrived within [`SPAN`], over that span, in Mbit/s.
const WITHIN: &str = "throughput within the span";

/// 99 % of the payload over the time until that much had arrived, in Mbit/s.
const NEARLY: &str = "throughput of 99 %";
/// Percentage of the time in which the last hundredth of the payload arrived.
const TAIL: &str = "tail";
/// Percentage of the time in which IF1 was busy.
const BUSY: &str = "busy";
/// Percentage of headers and retransmissions in the bytes that IF2 carried to the client.
const WASTE: &str = "waste";

/// Other queue sizes in bytes, and the suffix of their series.
const QUEUES: [(&str, u64); 3] = [(", 200 packets", 300_000), (", 1000 packets", 1_500_000), (", 10000 packets", 15_000_000)];

/// Other time spans in seconds in which connections are opened, and the suffix of their series.
const SPANS: [(&str, u64); 2] = [(", 5 s", 5), (", 15 s", 15)];

/// Time span in which connections are opened.
const SPAN: Duration = Duration::from_secs(60);
/// Grace period, longer than any batch takes.
const GRACE: Duration = Duration::from_secs(7200);
const IF1: f64 = 2.0;
/// Table I: mean size λ of the two classes, and connections per second of the small one.
const SMALL: ByteCount = ByteCount::new(22_380);
const LARGE: ByteCount = ByteCount::new(285_000);
const SMALL_RATE: f64 = 13.0;
const LARGE_RATE: f64 = 1.0;

/// Parameters of one point; Table I has the nominal ones.
#[derive(Debug, Clone, Copy)]
struct Setup {
    /// IF2's capacity in Mbit/s.
    if2: f64,
    /// IF2's loss, as a fraction.
    loss: f64,
    /// Small and large connections per second.
    rates: [f64; 2],
    /// Queue size of each of the client's links.
    queue: ByteCount,
    /// Time span in which connections are opened.
    span: Duration,
}

impl Setup {
    const NOMINAL: Self = Self { if2: 1.0, loss: 0.0, rates: [SMALL_RATE, LARGE_RATE], queue: ByteCount::new(75_000), span: SPAN };

    fn scenario(&self, series: &str, seed: u64) -> Scenario {
        let link =
            |name, mbps, loss| LinkSpec::symmetric(name, mbit(mbps), Duration::from_millis(50)).with_queue(self.queue).with_loss(loss);
        let class = |name, per_second, size| Class::downloads(name, Arrivals::Poisson { per_second }, Size::Exponential(size));
        let server = Profile { rate: mbit(6.0).into(), ..Profile::default() };
        let (scheduling, packets) = scheduler(series);
        let learnt = DemandKnowledge::Learnt { first: ByteCount::new(100_000) };
        let demand = if series == CO_KNOWN { DemandKnowledge::Oracle } else { learnt };
        Scenario {
            links: vec![link("IF1", IF1, 0.0), link("IF2", self.if2, self.loss)],
            servers: vec![ServerSpec { link: Some(ServerLink { down: server.clone(), up: server }) }],
            workload: match series {
                CO_ONE => vec![Class::downloads("endless", Arrivals::once(), Size::Endless)],
                _ => vec![class("small", self.rates[0], SMALL), class("large", self.rates[1], LARGE)],
            },
            scheduling,
            knowledge: Knowledge { demand, load: LoadKnowledge::Papers, ..Knowledge::default() },
            packets,
            duration: self.span,
            grace: if series == CO_ONE { Duration::ZERO } else { GRACE },
            seed,
            ..Scenario::default()
        }
    }

    /// Measures with a bond, if the series is one of a bond. Gives no values without QUIC.
    fn scenario_on(&self, series: &str, run: &Run<'_>) -> Option<Scenario> {
        let bond = match spreading(series) {
            Some(scheduling) => Some(Bonding { scheduling, quic: run.quic?.clone() }),
            None => None,
        };
        Some(Scenario { bond, ..self.scenario(series, run.seed) })
    }

    /// All values of a point. Empty if the scenario is invalid, which then fails as a missing number.
    fn measure(&self, series: &str, run: &Run<'_>) -> Sample {
        let Some(Ok(outcome)) = self.scenario_on(series, run).map(|scenario| simulate(&scenario)) else { return Sample::default() };
        let all = received(&outcome).per(Duration::from_nanos(outcome.ran_ns));
        let (all, tail) = (mbps(all), tail(&outcome));
        let nearly = all * 0.99 / (1.0 - tail / 100.0);
        let within = mbps(within(&outcome));
        let share = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
        let busy = share(outcome.links[0].busy_ns, outcome.ran_ns);
        let waste = 100.0 - share(outcome.links[1].goodput.rx.get(), outcome.links[1].carried.rx.get());
        let sample = Sample::default().value(BUSY, busy).value(WASTE, waste);
        sample.value(THROUGHPUT, all).value(NEARLY, nearly).value(WITHIN, within).value(TAIL, tail)
    }
}

/// The connection scheduler of a series, and its packet scheduler if all servers run DBAS.
fn scheduler(series: &str) -> (Scheduling, Packets) {
    // Strict order, as the paper describes it: each chunk waits for the link whose turn it is.
    let spread = |spreading| Packets { share: 1.0, spreading, late: false, ..Packets::default() };
    match series {
        ONLY_2 | CO_ONE => (Scheduling::OnlyOne(1), Packets::default()),
        CO_ROUND => (Scheduling::RoundRobin, Packets::default()),
        CO_WEIGHTED => (Scheduling::WeightedRoundRobin, Packets::default()),
        CO_MOST | CO_KNOWN => (Scheduling::LeastFinish, Packets::default()),
        CO_BRAID => (Scheduling::MaximumThroughput, Packets::default()),
        PO_ROUND => (Scheduling::RoundRobin, spread(Spreading::RoundRobin)),
        PO_WEIGHTED => (Scheduling::RoundRobin, spread(Spreading::WeightedRoundRobin)),
        BOND_ROUND | BOND_WEIGHTED | BOND => (Scheduling::RoundRobin, Packets { share: 1.0, ..Packets::default() }),
        _ => (Scheduling::OnlyOne(0), Packets::default()),
    }
}

/// The bond's scheduling, if the series is one of a bond.
fn spreading(series: &str) -> Option<braid_bond::BondScheduler> {
    match series {
        BOND_ROUND => Some(braid_bond::BondScheduler::RoundRobin),
        BOND_WEIGHTED => Some(braid_bond::BondScheduler::WeightedRoundRobin),
        BOND => Some(braid_bond::BondScheduler::Midrr),
        _ => None,
    }
}

fn received(outcome: &Outcome) -> ByteCount {
    outcome.links.iter().fold(ByteCount::ZERO, |sum, link| sum + link.goodput.rx)
}

fn within(outcome: &Outcome) -> Rate {
    let span = Time::ZERO + Duration::from_nanos(outcome.duration_ns);
    outcome.goodput_between(Direction::Down, Time::ZERO, span)
}

fn tail(outcome: &Outcome) -> f64 {
    let bins = outcome.links.first().map_or(0, |link| link.goodput_bins.len());
    let arrived =
        |bin| outcome.links.iter().filter_map(|link| link.goodput_bins.get(bin)).map(|moved: &Traffic| moved.rx.get()).sum::<u64>();
    let mut left = received(outcome).get() / 100;
    let late = (0..bins).rev().take_while(|bin| {
        let (rest, exceeded) = left.overflowing_sub(arrived(*bin));
        left = rest;
        !exceeded
    });
    100.0 * late.count() as f64 * outcome.bin_ns as f64 / outcome.ran_ns as f64
}

fn mbit(mbps: f64) -> Rate {
    Rate::from_bps((mbps * 1e6) as u64)
}

fn mbps(rate: Rate) -> f64 {
    rate.bps() as f64 / 1e6
}

/// The series with the highest throughput at `x`.
fn best<'a>(samples: &Samples, among: &[&'a str], x: f64) -> &'a str {
    let mean = |series: &str| samples.summary(THROUGHPUT, (series, x)).mean;
    among.iter().copied().fold(among[0], |best, series| if mean(series) > mean(best) { series } else { best })
}

/// The largest gain in percent of one series over another, and its x value.
fn most_gain(samples: &Samples, series: &str, base: &str) -> (f64, f64) {
    let gains = samples.xs(series).into_iter().map(|x| (samples.gain(THROUGHPUT, (series, x), (base, x)).mean, x));
    most(gains)
}

/// The largest deficit in percent of `series` behind the best of `others`, and its x value; negative if `series` always leads.
fn most_behind(samples: &Samples, series: &str, others: &[&str]) -> (f64, f64) {
    let behind = samples.xs(series).into_iter().map(|x| {
        let best = best(samples, others, x);
        (-samples.gain(THROUGHPUT, (series, x), (best, x)).mean, x)
    });
    most(behind)
}

/// Table of the throughput of the model and of the bond as percentages of `optimum`, over all x values; `x` is the column head.
fn shares(samples: &Samples, x: &str, optimum: impl Fn(f64) -> f64) -> Table {
    let series = [&[PO_WEIGHTED], &BONDS[..]].concat();
    let table = Table::new("Throughput in percent of the sum of both interfaces", &[&[x], &series[..]].concat());
    samples.xs(BOND).into_iter().fold(table, |table, x| {
        let cell = |series: &&str| {
            let Summary { mean, half, .. } = samples.summary(THROUGHPUT, (series, x));
            let [mean, half] = [mean, half].map(|value| 100.0 * value / optimum(x));
            format!("{mean:.1} ± {half:.1}")
        };
        table.row(std::iter::once(format!("{x}")).chain(series.iter().map(cell)))
    })
}

/// Limits the runs of a bond, which are slow because every datagram is encrypted.
fn max_runs(point: &Point) -> u32 {
    if BONDS.contains(&point.series.as_str()) { 5 } else { u32::MAX }
}

/// The largest value, and its x value.
fn most(values: impl Iterator<Item = (f64, f64)>) -> (f64, f64) {
    values.fold((f64::NEG_INFINITY, 0.0), |most, one| if one.0 > most.0 { one } else { most })
}

/// Text for explanations: gain of `series` over `base` at `x` by the other definitions of throughput.
fn otherwise(samples: &Samples, series: &str, base: &str, x: f64) -> String {
    let gain = |value| samples.gain(value, (series, x), (base, x)).mean;
    format!("Measured until 99 % of the payload have arrived it is {:+.0} %, within the 60 s {:+.0} %.", gain(NEARLY), gain(WITHIN))
}

/// The gain in throughput of `series` over `base` at `x`.
fn gain_at(samples: &Samples, series: &str, base: &str, x: f64) -> Summary {
    samples.gain(THROUGHPUT, (series, x), (base, x))
}

/// Whether a gain is within a fifth of the paper's.
fn is_about(found: f64, paper: f64) -> bool {
    (found / paper - 1.0).abs() <= 0.2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nominal load over a shorter time.
    fn throughput(setup: Setup, series: &str) -> f64 {
        let mut scenario = setup.scenario(series, 7);
        scenario.duration = Duration::from_secs(15);
        let outcome = simulate(&scenario).unwrap();
        assert!(outcome.flows.iter().all(|flow| flow.end.is_some()), "{series}");
        mbps(received(&outcome).per(Duration::from_nanos(outcome.ran_ns)))
    }

    #[test]
    fn round_robin_is_as_slow_as_its_slow_half() {
        let narrow = Setup { if2: 0.25, ..Setup::NOMINAL };
        let [only, round, weighted] = [ONLY_1, CO_ROUND, CO_WEIGHTED].map(|series| throughput(narrow, series));
        assert!(round < 0.6 && round < only / 2.0 && weighted > 2.0 * round, "{only} {round} {weighted}");
        let [round, weighted] = [PO_ROUND, PO_WEIGHTED].map(|series| throughput(narrow, series));
        assert!(round < weighted && weighted > 1.0, "{round} {weighted}");
    }

    #[test]
    fn loss_is_on_the_second_interface_only() {
        let lossy = Setup { loss: 0.1, ..Setup::NOMINAL };
        assert_eq!(throughput(lossy, ONLY_1), throughput(Setup::NOMINAL, ONLY_1));
        assert!(throughput(lossy, ONLY_2) < throughput(Setup::NOMINAL, ONLY_2));
    }

    #[test]
    fn a_queue_is_tried_at_its_points_only() {
        let sweep = &interfaces::NARROW_CONNECTIONS;
        let points = sweep.points();
        let swept = sweep.series.len() * sweep.xs.len() + sweep.reasons.len() * sweep.xs.len();
        assert_eq!(points.len(), swept + sweep.series.len() * (QUEUES.len() + SPANS.len()));
        assert!(points[swept..].iter().all(|point| point.x == sweep.detail_x));
    }

    #[test]
    fn the_tail_is_the_time_of_the_last_hundredth() {
        let mut scenario = Setup::NOMINAL.scenario(ONLY_1, 1);
        let flow = |size| Size::Listed(vec![ByteCount::new(size)]);
        // 2 MB at once, and 10 kB after 20 s.
        scenario.workload = vec![
            Class::downloads("most", Arrivals::once(), flow(2_000_000)),
            Class::downloads("rest", Arrivals::At(vec![Time::from_millis(20_000)]), flow(10_000)),
        ];
        scenario.duration = Duration::from_secs(40);
        let outcome = simulate(&scenario).unwrap();
        // 99 % have arrived within the ninth of forty seconds.
        assert_eq!(tail(&outcome), 100.0 * 31.0 / 40.0);
    }
}
