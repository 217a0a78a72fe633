//! Moved flows.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_api::{FlowEnds, MovedFlow, RewriteRequest};
use braid_control::Cause;
use braid_control::core::Departures;
use braid_control::fake::FakeSteering;
use braid_control::steering::{Ends, Rewrite};
use braid_decide::policy::{Fallback, Policy, Scheduler};
use braid_decide::tables::{DEPARTURE_DEVICE, DEPARTURE_MARK, mark};
use braid_model::{LinkFacts, LinkIndex, LinkKind, Protocol};

use super::world::*;

const SECOND: Duration = Duration::from_secs(1);
const OWN: &str = "10.0.1.2:40000";
const OTHER: &str = "10.0.2.2:40000";
const SERVER: &str = "198.51.100.1:80";

fn flow(own: [&str; 2], wire: [&str; 2]) -> MovedFlow {
    let ends = |[source, destination]: [&str; 2]| FlowEnds { source: source.parse().unwrap(), destination: destination.parse().unwrap() };
    MovedFlow { own: ends(own), wire: ends(wire), sends: false, active: false, remaining_ms: 0 }
}

fn request(flows: &[MovedFlow], lease: Option<Duration>, sends: bool) -> RewriteRequest {
    RewriteRequest { flows: flows.to_vec(), lease_ms: lease.map(|lease| lease.as_millis() as u64), sends }
}

fn ends(source: &str, destination: &str) -> Ends {
    Ends { protocol: Protocol::Tcp, source: source.parse().unwrap(), destination: destination.parse().unwrap() }
}

fn to(source: &str, destination: &str, device: Option<u32>, mark: u32, arrives: bool) -> Rewrite {
    let Ends { source, destination, .. } = ends(source, destination);
    Rewrite { source, destination, device: device.map(LinkIndex), mark, arrives }
}

/// The device that the daemon makes.
fn departures() -> LinkFacts {
    let addresses = vec!["10.0.1.2/32".parse().unwrap()];
    LinkFacts { addresses, ..LinkFacts::new(LinkIndex(99), DEPARTURE_DEVICE, LinkKind::Virtual) }
}

#[test]
fn a_flow_first_receives_then_sends_and_comes_back_when_its_lease_ends() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.core.take_actions();
    let moved = [flow([OWN, SERVER], [OTHER, SERVER])];
    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), false)).unwrap();
    let wanted = Departures { mtu: 1500, addresses: ["10.0.1.2".parse().unwrap()].into() };
    assert_eq!(world.core.take_actions().departures, Some(Some(wanted)));
    assert!(world.core.steering().rewrites.is_empty(), "there is no device yet");
    assert!(!world.core.rewrites_view(world.now)[0].active);

    world.devices.push(departures());
    world.set_network();
    let plan = world.core.take_actions().plan.expect("there are new rules");
    assert!(plan.rules.iter().any(|rule| rule.mark == Some((DEPARTURE_MARK, u32::MAX))));
    let arrives = (ends(SERVER, OTHER), to(SERVER, OWN, Some(99), DEPARTURE_MARK, true));
    let stays = (ends(OWN, SERVER), to(OWN, SERVER, None, 0, false));
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([arrives, stays]));
    let view = world.core.rewrites_view(world.now)[0];
    assert!(view.active && !view.sends, "{view:?}");

    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();
    let leaves = (ends(OWN, SERVER), to(OTHER, SERVER, Some(2), mark(1), false));
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([arrives, leaves]));
    assert!(world.core.rewrites_view(world.now)[0].active);
    // Somebody removes the device.
    world.core.take_actions();
    let device = world.devices.pop().unwrap();
    world.set_network();
    assert!(world.core.take_actions().departures.is_some_and(|device| device.is_some()), "it is made again");
    assert!(!world.core.rewrites_view(world.now)[0].active);
    world.devices.push(device);
    world.set_network();
    assert!(world.core.take_actions().departures.is_none());
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([arrives, leaves]));
    // The link of the flow's own address loses it.
    world.devices[0].addresses.clear();
    world.set_network();
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([arrives, leaves]));
    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();

    world.run(SECOND * 61);
    assert_eq!(world.core.rewrites_view(world.now), []);
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([arrives, stays]), "late packets");
    world.core.take_actions();
    world.now = world.now + SECOND * 31;
    world.core.tick(world.now).unwrap();
    assert!(world.core.steering().rewrites.is_empty());
    assert_eq!(world.core.take_actions().departures, Some(None));
}

#[test]
fn a_flow_leaves_a_link_that_loses_the_address_on_the_way() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.devices.push(departures());
    world.set_network();
    let moved = [flow([OWN, SERVER], [OTHER, SERVER])];
    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();
    world.set_network();
    assert_eq!(world.core.steering().rewrites[&ends(OWN, SERVER)].device, Some(LinkIndex(2)));
    world.devices[1].addresses.clear();
    world.set_network();
    assert_eq!(
        world.core.steering().rewrites[&ends(OWN, SERVER)].device,
        None,
        "no packet leaves with an address that is not this machine's"
    );
}

#[test]
fn what_cannot_be_moved_is_refused_and_changes_nothing() {
    let policy = Policy { bonds_all: true, fallback: Fallback::None, ..Policy::default() };
    let mut confined = World::with(FakeSteering::default(), braid_control::config::Config { policy, ..config(Scheduler::RoundRobin) });
    let moved = [flow([OWN, SERVER], [OTHER, SERVER])];
    let refused = confined.core.rewrite(confined.now, &request(&moved, Some(SECOND), true)).unwrap_err();
    assert!(refused.detail.contains("fallback"), "{refused}");

    let mut world = World::new(config(Scheduler::RoundRobin));
    let cases = [
        ("another host's address", flow([OWN, SERVER], ["10.0.2.3:1", SERVER]), "10.0.2.3 is not an address of this machine"),
        ("another host's flow", flow(["192.0.2.1:1", SERVER], [OTHER, SERVER]), "192.0.2.1 is not an address of this machine"),
        ("families", flow([OWN, SERVER], [OTHER, "[2001:db8::1]:80"]), "not of the same family"),
        ("to this machine", flow([OWN, SERVER], [OTHER, OWN]), "not the address of another host"),
        ("to everybody", flow([OWN, SERVER], [OTHER, "224.0.0.1:80"]), "not the address of another host"),
        ("to port 0", flow([OWN, SERVER], [OTHER, "198.51.100.1:0"]), "not the address of another host"),
    ];
    for (what, bad, word) in cases {
        let good = flow(["10.0.1.2:9", SERVER], ["10.0.2.2:9", SERVER]);
        let refused = world.core.rewrite(world.now, &request(&[good, bad], Some(SECOND), true)).unwrap_err();
        assert!(refused.cause == Cause::Unclear && refused.detail.contains(word), "{what}: {refused}");
        assert_eq!(world.core.rewrites_view(world.now), [], "{what}: all or none");
    }
    for lease in [Duration::ZERO, SECOND * 3601] {
        assert!(world.core.rewrite(world.now, &request(&moved, Some(lease), true)).is_err());
    }
    let twice = [moved[0], flow(["10.0.1.2:40001", SERVER], [OTHER, SERVER])];
    let refused = world.core.rewrite(world.now, &request(&twice, Some(SECOND), true)).unwrap_err();
    assert_eq!(refused.cause, Cause::Conflict, "{refused}");
}
