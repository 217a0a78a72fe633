//! The daemon's bond over simulated links.

mod support;

use std::time::Duration;

use braid_bond::Scheduling as Spread;
use braid_model::{Bytes, Direction, Rate, Time};
use braid_sim::*;
use support::quic;

const MS: fn(u64) -> Duration = Duration::from_millis;

/// Two links of 2 and 1 Mbit/s, with everything spread by a bond.
fn scenario(scheduling: Spread, seed: u64) -> Scenario {
    let link = |name, mbps| LinkSpec::symmetric(name, Rate::from_mbps(mbps), MS(50)).with_queue(Bytes::new(75_000));
    Scenario {
        links: vec![link("fast", 2), link("slow", 1)],
        workload: vec![
            Class::downloads("web", Arrivals::Poisson { per_second: 2.0 }, Size::Exponential(Bytes::new(40_000))),
            Class::uploads("photos", Arrivals::Poisson { per_second: 0.2 }, Size::Exponential(Bytes::new(200_000))),
            Class::downloads("film", Arrivals::once(), Size::Endless),
        ],
        packets: Packets { share: 1.0, ..Packets::default() },
        bond: Some(Bonding { scheduling, quic: quic() }),
        duration: Duration::from_secs(20),
        grace: Duration::ZERO,
        seed,
        ..Scenario::default()
    }
}

#[test]
fn a_seed_gives_the_same_outcome_though_keys_differ() {
    let text = |seed| serde_json::to_string(&simulate(&scenario(Spread::Midrr, seed)).expect("a scenario")).expect("JSON");
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn one_flow_fills_both_links_beside_others() {
    for scheduling in [Spread::Midrr, Spread::RoundRobin, Spread::WeightedRoundRobin] {
        let outcome = simulate(&scenario(scheduling, 1)).expect("a scenario");
        let rate = outcome.goodput_between(Direction::Down, Time::from_millis(5000), Time::from_millis(20_000));
        println!("{scheduling:?} {rate:?} {:?}", outcome.summary());
        let moved = outcome.flows.iter().fold(Bytes::ZERO, |sum, flow| sum + flow.moved[0] + flow.moved[1]);
        assert_eq!(moved, outcome.moved(), "what flows moved came over links");
    }
}
