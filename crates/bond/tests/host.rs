//! Bonds over real QUIC and emulated links.

mod quic;

use std::time::Duration;

use braid_bond::{Carrier, FlowPolicy};
use quic::{Spec, World};

/// The share of the links' sum that one flow gets, after two seconds, downwards.
fn share(specs: &[Spec], seed: u64) -> f64 {
    let mut world = World::new(specs, seed);
    let flow = world.open(FlowPolicy::default(), Carrier::Stream);
    world.run(Duration::from_secs(1), |world| world.hosts[1].bonds().any(|(_, bond)| bond.flow(flow).is_some()));
    world.bulk(1, flow, Duration::from_secs(2));
    world.bulk(1, flow, Duration::from_secs(10)) / world.sum()
}

#[test]
fn one_flow_gets_the_links_sum() {
    for specs in [
        vec![Spec::new(20.0, 5)],
        vec![Spec::new(20.0, 5), Spec::new(20.0, 5)],
        vec![Spec::new(20.0, 5), Spec::new(10.0, 50)],
        vec![Spec::new(20.0, 2), Spec { queue: 1_000_000, ..Spec::new(5.0, 2) }],
    ] {
        let share = share(&specs, 1);
        eprintln!("{specs:?}: {share:.3}");
        assert!(share > 0.90, "{specs:?}: {share}");
    }
}
