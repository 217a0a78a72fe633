//! What somebody else removes from the kernel is set again.

use std::time::Duration;

use braid_control::core::{Due, Kept};
use braid_control::fake::FakeSteering;
use braid_decide::policy::{Policy, Scheduler};

use super::world::*;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn removed_rules_and_routes_are_set_again() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    let plan = world.core.take_actions().plan.expect("there are links");
    let mut whole = network(&world.devices);
    whole.rules.extend(plan.rules.iter().cloned());
    whole.routes.extend(plan.kept_routes());
    world.core.on_network(world.now, network(&world.devices)).unwrap();
    assert!(world.core.take_actions().restored.is_empty(), "nobody has said that they were set");
    world.core.on_set(world.now, Kept::Tables);
    // Old news.
    world.core.on_network(world.now, network(&world.devices)).unwrap();
    assert!(world.core.take_actions().restored.is_empty());
    world.core.on_network(world.now, whole.clone()).unwrap();
    world.now = world.now + SECOND * 10;
    world.core.tick(world.now).unwrap();
    assert!(world.core.take_actions().restored.is_empty());
    for count in 0..8 {
        let mut less = whole.clone();
        if count % 2 == 0 { less.rules.pop() } else { less.routes.pop().map(|_| less.rules[0].clone()) }.unwrap();
        world.core.on_network(world.now, less).unwrap();
        let (due, why) = world.core.poll_timeout(world.now);
        if why == Due::Upkeep {
            world.now = due;
            world.core.tick(world.now).unwrap();
        }
        // Other timers may be due before.
        while world.now < due + SECOND * 60 {
            let actions = world.core.take_actions();
            if !actions.restored.is_empty() {
                assert_eq!((actions.restored, actions.plan.as_ref()), (vec![Kept::Tables], Some(&plan)));
                break;
            }
            world.now = world.now + SECOND / 4;
            world.core.tick(world.now).unwrap();
        }
        world.core.on_set(world.now, Kept::Tables);
    }
    let warnings = world.core.status(world.now).warnings;
    assert!(
        warnings.iter().any(|warning| warning.contains("has removed Braid's routing rules or routes 8 times in a row")),
        "{warnings:?}"
    );
    world.core.on_network(world.now, whole).unwrap();
    world.now = world.now + SECOND * 120;
    world.core.tick(world.now).unwrap();
    assert!(!world.core.status(world.now).warnings.iter().any(|warning| warning.contains("has removed")));
}

#[test]
fn removed_firewall_rules_are_set_again() {
    let policy = Policy { lan: vec!["lan0".into()], ..Policy::default() };
    let mut world = World::with(FakeSteering::default(), braid_control::config::Config { policy, ..config(Scheduler::RoundRobin) });
    let plan = world.core.take_actions().gateway.expect("it is a gateway");
    world.core.on_firewall(world.now, true).unwrap();
    assert!(world.core.take_actions().gateway.is_none(), "not before they are set");
    world.core.on_set(world.now, Kept::Gateway);
    world.now = world.now + SECOND;
    world.core.on_firewall(world.now, true).unwrap();
    let actions = world.core.take_actions();
    assert_eq!((actions.restored, actions.gateway), (vec![Kept::Gateway], Some(plan)));
    world.core.on_firewall(world.now, true).unwrap();
    assert!(world.core.take_actions().gateway.is_none(), "they are being set");
    world.core.on_set(world.now, Kept::Gateway);
    world.run(SECOND);
    assert!(world.core.take_actions().gateway.is_none());
}
