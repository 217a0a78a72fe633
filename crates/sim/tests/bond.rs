//! Tests of the daemon's bond over simulated links.

mod support;

use std::time::Duration;

use braid_bond::BondScheduler as Spread;
use braid_model::{ByteCount, Direction, Rate, Time};
use braid_sim::experiment::{Experiment, Judgement, Machine, Samples, Setting, conclude};
use braid_sim::*;
use support::quic;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// Two links of 2 and 1 Mbit/s. A bond carries all streams: downloads, uploads, and an endless one.
fn scenario(scheduling: Spread, seed: u64) -> Scenario {
    let link = |name, mbps| LinkSpec::symmetric(name, Rate::from_mbps(mbps), MS(50)).with_queue(ByteCount::new(75_000));
    Scenario {
        links: vec![link("fast", 2), link("slow", 1)],
        workload: vec![
            Class::downloads("web", Arrivals::Poisson { per_second: 2.0 }, Size::Exponential(ByteCount::new(40_000))),
            Class::uploads("photos", Arrivals::Poisson { per_second: 0.2 }, Size::Exponential(ByteCount::new(200_000))),
            Class::downloads("film", Arrivals::once(), Size::Endless),
        ],
        packets: Packets { share: 1.0, ..Packets::default() },
        bond: Some(Bonding { scheduling, quic: quic() }),
        duration: Duration::from_secs(10),
        seed,
        ..Scenario::default()
    }
}

fn run(scenario: &Scenario) -> Outcome {
    simulate(scenario).expect("the scenario makes sense")
}

/// Goodput towards the client in Mbit/s, from the third second on.
fn rate(outcome: &Outcome) -> f64 {
    outcome.goodput_between(Direction::Down, Time::from_millis(3000), Time::from_millis(10_000)).bps() as f64 / 1e6
}

#[test]
fn the_same_seed_gives_the_same_outcome_with_different_keys() {
    let text = |seed| serde_json::to_string(&run(&scenario(Spread::Midrr, seed))).expect("JSON");
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn links_are_filled_and_all_bytes_are_accounted_for() {
    for scheduling in [Spread::Midrr, Spread::WeightedRoundRobin] {
        let outcome = run(&scenario(scheduling, 1));
        assert!((2.3..2.9).contains(&rate(&outcome)), "{scheduling:?}: {}", rate(&outcome));
        let moved = outcome.flows.iter().fold(ByteCount::ZERO, |sum, flow| sum + flow.moved.sum());
        assert_eq!(moved, outcome.moved(), "bytes of flows equal bytes of links");
        for flow in outcome.ended(0) {
            assert_eq!(flow.moved, [flow.size, ByteCount::new(300)].into(), "a response and its request");
        }
        assert!(outcome.ended(0).count() > 10 && outcome.ended(1).count() > 0);
        assert!(outcome.links.iter().all(|link| link.goodput.rx < link.carried.rx), "carried bytes include headers");
    }
}

#[test]
fn weights_and_allowed_links_are_respected() {
    // OPERETTA at α = 0 uses the link with the lowest energy per bit, which is the slow one here.
    let power = |link: LinkSpec, milliwatts| link.with_power(braid_model::Power::ZERO, braid_model::Power::from_milliwatts(milliwatts));
    let mut one = scenario(Spread::Weights, 1);
    one.links = one.links.drain(..).zip([900.0, 100.0]).map(|(link, milliwatts)| power(link, milliwatts)).collect();
    one.workload.remove(1);
    let least = braid_decide::operetta::Utility::new(0.0).expect("a utility");
    let outcome = simulate_with(&one, &mut Operetta::with_utility(least)).expect("the scenario makes sense");
    // Except for bytes before the other path had joined.
    assert!(Direction::ALL.iter().all(|way| outcome.links[0].goodput[*way] < ByteCount::new(20_000)), "{:?}", outcome.links[0].goodput);
    assert!(rate(&outcome) > 0.8, "{}", rate(&outcome));

    let mut bound = scenario(Spread::Midrr, 1);
    bound.workload = vec![Class { links: Some(braid_model::LinkSet(0b10)), ..bound.workload.remove(2) }];
    let outcome = run(&bound);
    assert_eq!(outcome.links[0].goodput.rx, ByteCount::ZERO);
    assert!(rate(&outcome) > 0.9, "{}", rate(&outcome));
}

#[test]
fn a_dark_link_costs_only_its_own_capacity() {
    let mut dark = scenario(Spread::Midrr, 1);
    // Packets of an upload delay acknowledgements.
    dark.workload.remove(1);
    let change = |at, dark| LinkChange { at: Time::from_millis(at), link: 0, change: Change::Dark(dark) };
    dark.changes = vec![change(4000, true), change(6000, false)];
    let outcome = run(&dark);
    let during = outcome.goodput_between(Direction::Down, Time::from_millis(4000), Time::from_millis(6000)).bps();
    let after = outcome.goodput_between(Direction::Down, Time::from_millis(7000), Time::from_millis(10_000)).bps();
    assert!((800_000..1_000_000).contains(&during) && after > 2_400_000, "{during} {after}");
}

#[test]
fn a_bond_to_two_servers_is_rejected() {
    let two = Scenario { servers: vec![ServerSpec::default(); 2], ..scenario(Spread::Midrr, 1) };
    let error = simulate(&two).expect_err("there is one peer").to_string();
    assert_eq!(
        error,
        "bond: a bond supports only one server and no learned capacities, since capacities are learned from TCP only; give one server, and let the capacities be known"
    );
}

fn experiment(name: &str) -> &'static dyn Experiment {
    experiments::all().into_iter().find(|experiment| experiment.about().name == name).expect("there is such an experiment")
}

#[test]
fn only_packet_schedulers_spread_one_connection_over_both_interfaces() {
    let (experiment, setting, quic) = (experiment("dbas-6"), Setting { runs: 1, seed: 3 }, quic());
    let machine = Machine { quic: Some(&quic), ..Machine::NONE };
    let samples = Samples::new(setting.jobs(experiment).into_iter().map(|job| job.measure_on(experiment, &machine)).collect());
    let long = |series| samples.summary("the long-lived one", (series, 0.0)).mean;
    let connection = long("CO maximum throughput");
    for packets in ["PO weighted round robin", "bond, weighted round robin", "bond, miDRR"] {
        assert!(connection < 2.0 && long(packets) > 2.6, "{packets}: {connection} {}", long(packets));
    }
    let report = conclude(experiment, &setting, samples).expect("a comparison for each claim");
    assert_eq!(report.results.comparisons[5].judgement, Judgement::Met, "{:?}", report.results.comparisons);
}

#[test]
fn bond_points_have_no_values_without_quic() {
    let experiment = experiment("dbas-6");
    let setting = Setting { runs: 1, seed: 3 };
    let bond = setting.jobs(experiment).into_iter().filter(|job| job.point.series.starts_with("bond"));
    let samples = Samples::new(bond.map(|job| job.measure(experiment)).collect());
    assert!(samples.summary("all connections", ("bond, miDRR", 0.0)).mean.is_nan());
}
