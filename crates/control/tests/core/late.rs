//! Which links get their packets late, and over which links the packets of a flow may go.

use std::time::Duration;

use braid_control::config::Config;
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{Ends, LateFlow, LatePlan, Steering};
use braid_decide::late::LateBinding;
use braid_decide::policy::{AppMatcher, AppRule, ProbeMode, Scheduler};
use braid_model::{LinkIndex, Mac, Protocol, Rate};

use super::world::*;

fn world(change: impl FnOnce(&mut Config)) -> World {
    let mut config = Config { probe: ProbeMode::Continuous, ..config(Scheduler::RoundRobin) };
    config.policy.late = Some(LateBinding::default());
    change(&mut config);
    let mut world = World::with(FakeSteering::default(), config);
    for (number, device) in (1..).zip(&mut world.devices) {
        device.mac = Some(Mac([2, 0, 0, 0, 0, number]));
        device.nominal = Some(Rate::from_mbps(100));
    }
    world.set_network();
    world
}

fn plan(world: &mut World) -> Option<LatePlan> {
    world.run(Duration::from_secs(1));
    world.core.steering().late.clone()
}

#[test]
fn links_with_ethernet_headers_are_bound_late_if_the_configuration_asks_for_it() {
    let mut usual = world(|_| ());
    let found = plan(&mut usual).unwrap();
    assert_eq!((found.below, found.links.len(), found.flows.len()), (2, 2, 0));
    assert!(found.links.values().all(|link| link.state.rate.is_none()), "{found:?}");
    assert_eq!(usual.core.status(usual.now).late.unwrap().links, ["wlan0", "lte0"]);
    usual.devices[1].mac = None;
    usual.set_network();
    assert_eq!(plan(&mut usual).unwrap().links.len(), 1);
    let mut off = world(|config| config.policy.late = None);
    assert_eq!(plan(&mut off), None);
    assert_eq!(off.core.status(off.now).late, None);
}

#[test]
fn links_that_are_fast_together_are_left_to_the_kernel() {
    let limit = |up_to| world(|config| config.policy.late = Some(LateBinding { up_to: Rate::from_mbps(up_to), ..LateBinding::default() }));
    assert!(plan(&mut limit(200)).is_some());
    assert!(plan(&mut limit(199)).is_none());
}

#[test]
fn a_dead_link_takes_nothing() {
    let mut world = world(|_| ());
    assert!(plan(&mut world).is_some());
    world.answering.insert(LinkIndex(1), false);
    let links = plan(&mut world).unwrap().links;
    assert_eq!(links.keys().copied().collect::<Vec<_>>(), [1], "its probes must not wait");
}

#[test]
fn flows_of_rules_with_a_weight_have_it() {
    let mut world = world(|config| {
        let matcher = AppMatcher { name: Some("call".into()), ..AppMatcher::default() };
        config.policy.apps = vec![AppRule { matcher, weight: 4.0, ..AppRule::default() }];
    });
    let (Steered::To(..), Steered::To(_, id)) = (world.connect("bulk", 1), world.connect("call", 2)) else { panic!("not steered") };
    let found = plan(&mut world).unwrap();
    let now = world.now;
    let row = world.core.steering().flows(now).unwrap().into_iter().find(|row| row.id == id).unwrap();
    let ends = Ends { protocol: Protocol::Tcp, source: row.local.into(), destination: row.remote.into() };
    assert_eq!(found.flows, [(ends, LateFlow { weight: 4.0, moved: None })].into());
}
