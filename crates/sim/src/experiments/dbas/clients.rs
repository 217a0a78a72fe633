//! Section IV.C: many clients in the same network.

use std::time::Duration;

use braid_model::{ByteCount, Direction, Rate};
use braid_netem::Profile;

use super::{
    CO_MOST, CO_WEIGHTED, GRACE, LARGE, LARGE_RATE, ONLY_1, SMALL, SMALL_RATE, SPAN, THROUGHPUT, WITHIN, mbit, mbps, received, scheduler,
    within,
};
use crate::experiment::{About, Axis, Chart, Claim, Experiment, Judgement, Paper, Point, Results, Run, Sample, Samples, Sampling, Table};
use crate::schedule::{NewStream, Scheduler, View};
use crate::{
    Arrivals, CapacityKnowledge, Class, DemandKnowledge, Knowledge, LinkSpec, LoadKnowledge, Outcome, Scenario, ServerLink, ServerSpec,
    Size, simulate_with,
};

const SCHEDULERS: [&str; 3] = [ONLY_1, CO_WEIGHTED, CO_MOST];
const CLIENTS: [f64; 6] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0];
const MOST: f64 = CLIENTS[5];
/// Capacities and total load as multiples of Table I's: with this many clients each has Table I's load.
const SCALE: f64 = 10.0;
/// Capacities of the two networks in Mbit/s, together and in total.
const IF1: f64 = 2.0 * SCALE;
const IF2: f64 = SCALE;
/// A client's first estimate of each interface.
const FIRST: Rate = Rate::from_mbps(1);
/// Jain's index of what clients received, each relative to what it asked for.
const FAIRNESS: &str = "fairness";
/// The sum of all clients' estimates of both interfaces at their last decisions, in percent of the capacities.
const ESTIMATED: &str = "estimated";
/// A client's share of what it asked for that arrived within the span: the least and the largest among the clients, in percent.
const LEAST_SERVED: &str = "least served";
const MOST_SERVED: &str = "most served";

static ABOUT: About = About {
    name: "dbas-clients",
    paper: Paper::Dbas,
    figure: "section IV.C",
    title: "Many clients in the same networks",
    setting: "1 to 50 clients with two interfaces each, on two networks that all of them share: IF1's has 20 Mbit/s, IF2's 10, the server 60, ten \
              times Table I. All clients together offer ten times Table I's load, 46 Mbit/s, so that with ten clients each has Table I's. Each client \
              decides by its own: it has its own turns, counts the loads of its own connections only, and estimates each interface's bandwidth from \
              its own traffic (first 1 Mbit/s). Queues hold 500 packets, ten times those of dbas-3a. Connections are opened for 60 s; everything else is \
              as in dbas-3a. Packet-oriented schedulers are not in it. The paper confirmed its statement by simulations that it does not show. \
              At most five runs.",
    sampling: Sampling::Repeated,
    claims: &[
        Claim { text: "DBAS scales with the number of clients: 50 carry as much as one", paper: "highly scalable" },
        Claim { text: "Clients share the common bandwidth", paper: "in words" },
        Claim { text: "Each client's estimates capture its share", paper: "in words" },
    ],
};

/// The experiment of section IV.C.
pub(super) struct Clients;

impl Experiment for Clients {
    fn about(&self) -> &'static About {
        &ABOUT
    }

    fn points(&self) -> Vec<Point> {
        Point::grid(&SCHEDULERS, &CLIENTS)
    }

    fn max_runs(&self, _: &Point) -> u32 {
        5
    }

    fn measure(&self, point: &Point, run: &Run<'_>) -> Sample {
        measure(&scenario(point.x as usize, SPAN, run.seed), &point.series)
    }

    fn assemble(&self, samples: &Samples) -> Results {
        let x = || Axis::new("clients", "").between(0.0, MOST);
        let mean = |name, series, clients| samples.summary(name, (series, clients)).mean;
        let sum = Chart::lines("sum", "Throughput of all clients together", x(), Axis::new("throughput", "Mbit/s"))
            .with(samples.series(THROUGHPUT));
        let fair = Chart::lines("fairness", "Fairness among the clients", x(), Axis::new("Jain's index", "").between(0.0, 1.0))
            .with(samples.series(FAIRNESS));
        let head =
            ["clients", "Mbit/s until all have ended", "Mbit/s within the 60 s", "Jain's index", "least and most served", "estimates"];
        let table = CLIENTS.into_iter().fold(Table::new(CO_MOST, &head), |table, clients| {
            let value = |name| mean(name, CO_MOST, clients);
            table.row([
                clients.to_string(),
                format!("{:.1}", samples.summary(THROUGHPUT, (CO_MOST, clients))),
                format!("{:.1}", value(WITHIN)),
                format!("{:.3}", value(FAIRNESS)),
                format!("{:.0} and {:.0} % of the offered", value(LEAST_SERVED), value(MOST_SERVED)),
                format!("{:.0} % of the capacities", value(ESTIMATED)),
            ])
        });
        let (change, weighted) =
            (samples.gain(THROUGHPUT, (CO_MOST, MOST), (CO_MOST, 1.0)), samples.gain(THROUGHPUT, (CO_WEIGHTED, MOST), (CO_WEIGHTED, 1.0)));
        let least = CLIENTS.map(|clients| mean(FAIRNESS, CO_MOST, clients)).into_iter().fold(1.0, f64::min);
        let captured = CLIENTS.map(|clients| (mean(ESTIMATED, CO_MOST, clients), clients));
        let (far, far_at) =
            captured.into_iter().fold((100.0_f64, 0.0), |far, one| if (one.0 - 100.0).abs() > (far.0 - 100.0).abs() { one } else { far });
        Results::default()
            .chart(sum)
            .chart(fair)
            .table(table)
            .comparison(ABOUT.claims[0].judge(
                format!("{change:+.1} % from 1 to {MOST} clients; weighted round robin {weighted:+.1} %"),
                Judgement::met_or_not(change.least() > -5.0),
                format!(
                    "It is met if the interval excludes a loss of 5 %. Within the 60 s it is {:+.1} %.",
                    samples.gain(WITHIN, (CO_MOST, MOST), (CO_MOST, 1.0)).mean
                ),
            ))
            .comparison(ABOUT.claims[1].judge(
                format!("Jain's index of the served share of each client's load at least {least:.3}"),
                Judgement::met_or_not(least >= 0.9),
                format!(
                    "With {MOST} clients the least served one receives {:.0} % of what it asks for within the 60 s, the most served one {:.0} %: a client \
                     asks for few large connections then.",
                    mean(LEAST_SERVED, CO_MOST, MOST),
                    mean(MOST_SERVED, CO_MOST, MOST)
                ),
            ))
            .comparison(ABOUT.claims[2].judge(
                format!("all estimates together are {far:.0} % of the capacities with {far_at} clients, the farthest"),
                Judgement::met_or_not((far - 100.0).abs() <= 20.0),
                "The estimator is Braid's: it keeps what it has seen while a link was busy, so the estimates of clients that come and go add up to more \
                 than there is. The paper does not describe its own in detail.",
            ))
    }
}

fn scenario(clients: usize, span: Duration, seed: u64) -> Scenario {
    let queue = ByteCount::new(500 * 1500);
    let link = |name, mbps| LinkSpec::symmetric(name, mbit(mbps), Duration::from_millis(50)).with_queue(queue);
    let server = Profile { rate: mbit(6.0 * SCALE).into(), queue, ..Profile::default() };
    let class = |client: usize, name: &str, rate: f64, size| Class {
        client,
        ..Class::downloads(name, Arrivals::Poisson { per_second: rate * SCALE / clients as f64 }, Size::Exponential(size))
    };
    Scenario {
        links: vec![link("IF1", IF1), link("IF2", IF2)],
        servers: vec![ServerSpec { link: Some(ServerLink { down: server.clone(), up: server }) }],
        workload: (0..clients)
            .flat_map(|client| [class(client, "small", SMALL_RATE, SMALL), class(client, "large", LARGE_RATE, LARGE)])
            .collect(),
        knowledge: Knowledge {
            demand: DemandKnowledge::Learnt { first: ByteCount::new(100_000) },
            capacity: CapacityKnowledge::Learnt { first: FIRST },
            load: LoadKnowledge::Papers,
        },
        duration: span,
        grace: GRACE,
        seed,
        ..Scenario::default()
    }
}

/// The scheduler of each client, by the client of a class, and the client's last estimates of the interfaces.
struct Each {
    clients: Vec<Box<dyn Scheduler>>,
    of_class: Vec<usize>,
    estimates: Vec<Vec<Rate>>,
}

impl Each {
    fn new(scenario: &Scenario, series: &str) -> Self {
        let of_class: Vec<usize> = scenario.workload.iter().map(|class| class.client).collect();
        let count = of_class.iter().max().map_or(0, |last| last + 1);
        let clients = (0..count).map(|client| crate::schedule::scheduler(scheduler(series).0, scenario.seed ^ client as u64)).collect();
        Self { clients, of_class, estimates: vec![vec![FIRST; scenario.links.len()]; count] }
    }
}

impl Scheduler for Each {
    fn connection(&mut self, view: &View<'_>, new: &NewStream) -> Option<usize> {
        let client = self.of_class[new.class];
        self.estimates[client] = view.links.iter().map(|link| link.rate[Direction::Down]).collect();
        self.clients[client].connection(view, new)
    }
}

fn measure(scenario: &Scenario, series: &str) -> Sample {
    let mut each = Each::new(scenario, series);
    let Ok(outcome) = simulate_with(scenario, &mut each) else { return Sample::default() };
    let served = served(&outcome, scenario);
    let estimated: f64 = each.estimates.iter().flatten().map(|rate| mbps(*rate)).sum();
    let end = |start, better: fn(f64, f64) -> f64| 100.0 * served.iter().copied().fold(start, better);
    Sample::default()
        .value(THROUGHPUT, mbps(received(&outcome).per(Duration::from_nanos(outcome.ran_ns))))
        .value(WITHIN, mbps(within(&outcome)))
        .value(FAIRNESS, jain(&served))
        .value(LEAST_SERVED, end(f64::INFINITY, f64::min))
        .value(MOST_SERVED, end(0.0, f64::max))
        .value(ESTIMATED, 100.0 * estimated / (IF1 + IF2))
}

/// For each client, the share of the bytes it asked for within the span that had been served within the span. A flow counts by the part of its time
/// that lies within the span.
fn served(outcome: &Outcome, scenario: &Scenario) -> Vec<f64> {
    let clients = scenario.workload.iter().map(|class| class.client).max().map_or(0, |last| last + 1);
    let mut all = vec![(0.0, 0.0); clients];
    let span = Duration::from_nanos(outcome.duration_ns).as_secs_f64();
    for flow in &outcome.flows {
        let (asked, served) = &mut all[scenario.workload[flow.class].client];
        let size = flow.size.get() as f64;
        let start = flow.start.as_nanos() as f64 / 1e9;
        let end = flow.end.map_or(f64::INFINITY, |end| end.as_nanos() as f64 / 1e9);
        *asked += size;
        *served += size * if end <= span { 1.0 } else { ((span - start) / (end - start)).max(0.0) };
    }
    all.into_iter().filter(|(asked, _)| *asked > 0.0).map(|(asked, served)| served / asked).collect()
}

/// Jain's index: 1 if all are equal, 1/n if one has all.
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), share| (sum + share, squares + share * share));
    sum * sum / (shares.len() as f64 * squares)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jains_index_is_one_for_equals() {
        assert_eq!(jain(&[0.5, 0.5, 0.5]), 1.0);
        assert!((jain(&[1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
    }

    #[test]
    fn each_client_sees_only_its_own_load() {
        let mut scenario = scenario(2, Duration::from_secs(5), 3);
        // The first client opens one huge connection; the second one's single small connection then sees two idle interfaces.
        let at = |millis| Arrivals::At(vec![braid_model::Time::from_millis(millis)]);
        scenario.workload[0] = Class::downloads("huge", at(0), Size::Fixed(ByteCount::new(5_000_000)));
        scenario.workload[0].expected = Some(ByteCount::new(5_000_000));
        scenario.workload[2].arrivals = at(1000);
        scenario.workload.truncate(3);
        scenario.workload.remove(1);
        let count = |client| {
            let mut scenario = scenario.clone();
            scenario.workload[1].client = client;
            let outcome = simulate_with(&scenario, &mut Each::new(&scenario, CO_MOST)).unwrap();
            outcome.flows[1].link
        };
        assert_eq!((count(1), count(0)), (Some(0), Some(1)), "another client's load is not seen, one's own is");
    }

    #[test]
    fn many_clients_fill_the_links_that_one_fills() {
        let within = |clients| {
            let sample = measure(&scenario(clients, Duration::from_secs(10), 1), CO_MOST);
            let job = crate::experiment::Job { point: Point { series: String::new(), x: 0.0 }, index: 0, seed: 1 };
            Samples::new(vec![(job, sample)]).summary(WITHIN, ("", 0.0)).mean
        };
        let (one, many) = (within(1), within(20));
        assert!(one > 15.0 && many > 0.7 * one, "{one} {many}");
    }
}
