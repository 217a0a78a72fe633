//! Moved flows.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_api::{FlowEnds, MovedFlow, MovedProtocol, RewriteRequest};
use braid_control::Cause;
use braid_control::config::Config;
use braid_control::core::Departures;
use braid_control::fake::FakeSteering;
use braid_control::steering::{Ends, PortSide, Rewrite};
use braid_decide::policy::{Fallback, Policy, Scheduler};
use braid_decide::tables::{DEPARTURE_DEVICE, DEPARTURE_MARK, mark};
use braid_model::{LinkFacts, LinkIndex, LinkKind, Mac, Protocol, SequenceNumbers};

use super::world::*;

const SECOND: Duration = Duration::from_secs(1);
const OWN: &str = "10.0.1.2:40000";
const OTHER: &str = "10.0.2.2:40000";
const SERVER: &str = "198.51.100.1:80";

fn flow(own: [&str; 2], wire: [&str; 2]) -> MovedFlow {
    let ends = |[source, destination]: [&str; 2]| FlowEnds { source: source.parse().unwrap(), destination: destination.parse().unwrap() };
    let protocol = MovedProtocol::Tcp;
    MovedFlow { own: ends(own), wire: ends(wire), protocol, sends: false, active: false, passes: false, remaining_ms: 0, numbers: None }
}

fn request(flows: &[MovedFlow], lease: Option<Duration>, sends: bool) -> RewriteRequest {
    RewriteRequest { flows: flows.to_vec(), lease_ms: lease.map(|lease| lease.as_millis() as u64), sends, partial: false, prove: false }
}

fn ends(source: &str, destination: &str) -> Ends {
    Ends { protocol: Protocol::Tcp, source: source.parse().unwrap(), destination: destination.parse().unwrap() }
}

fn to(source: &str, destination: &str, device: Option<u32>, mark: u32, arrives: bool) -> Rewrite {
    let Ends { source, destination, .. } = ends(source, destination);
    // The address on the way is the second link's.
    let from = arrives.then_some(LinkIndex(2));
    Rewrite { source, destination, device: device.map(LinkIndex), mark, arrives, passes: false, bare: false, from, numbers: None }
}

/// Packets that arrive with the flow's own addresses stay as they are.
fn home() -> (Ends, Rewrite) {
    (ends(SERVER, OWN), Rewrite { arrives: true, ..Rewrite::unchanged(&ends(SERVER, OWN)) })
}

/// Two links with Ethernet headers.
fn ethernet(steering: FakeSteering, config: Config) -> World {
    let mut world = World::of_ethernet(steering, config);
    world.core.take_actions();
    world
}

fn round_robin() -> World {
    ethernet(FakeSteering::default(), config(Scheduler::RoundRobin))
}

/// The network with the device, and all that the core has asked for.
fn set_whole(world: &mut World) {
    world.set_network();
    let plan = world.core.take_actions().plan.expect("there are new rules");
    let mut whole = network(&world.devices);
    whole.rules.extend(plan.rules.iter().cloned());
    whole.routes.extend(plan.kept_routes());
    world.core.on_network(world.now, whole).unwrap();
}

/// The device that the daemon makes.
fn departures() -> LinkFacts {
    let addresses = vec!["10.0.1.2/32".parse().unwrap()];
    LinkFacts { addresses, ..LinkFacts::new(LinkIndex(99), DEPARTURE_DEVICE, LinkKind::Virtual) }
}

#[test]
fn a_flow_first_receives_then_sends_and_comes_back_when_its_lease_ends() {
    let mut world = round_robin();
    let moved = [flow([OWN, SERVER], [OTHER, SERVER])];
    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), false)).unwrap();
    let wanted = Departures { mtu: 1500, addresses: ["10.0.1.2".parse().unwrap()].into() };
    assert_eq!(world.core.take_actions().departures, Some(Some(wanted)));
    assert!(world.core.steering().rewrites.is_empty(), "there is no device yet");
    assert!(!world.core.rewrites_view(world.now).unwrap()[0].active);

    world.devices.push(departures());
    set_whole(&mut world);
    let arrives = (ends(SERVER, OTHER), to(SERVER, OWN, Some(99), DEPARTURE_MARK, true));
    let stays = (ends(OWN, SERVER), to(OWN, SERVER, None, 0, false));
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([home(), arrives, stays]));
    let view = world.core.rewrites_view(world.now).unwrap()[0];
    assert!(view.active && !view.sends, "{view:?}");

    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();
    let leaves = (ends(OWN, SERVER), to(OTHER, SERVER, Some(2), mark(1), false));
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([home(), arrives, leaves]));
    assert!(world.core.rewrites_view(world.now).unwrap()[0].active);
    // Somebody removes the device: it is made again, and meanwhile no packet is answered with a reset.
    world.core.take_actions();
    let device = world.devices.pop().unwrap();
    world.set_network();
    assert!(world.core.take_actions().departures.is_some_and(|device| device.is_some()));
    assert!(!world.core.rewrites_view(world.now).unwrap()[0].active);
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([home(), arrives, leaves]));
    world.devices.push(device);
    set_whole(&mut world);
    assert!(world.core.take_actions().departures.is_none());
    // Somebody turns it off, with which it loses its routes.
    world.set_network();
    assert!(world.core.take_actions().departures.is_some_and(|device| device.is_some()));
    // The link of the flow's own address loses it.
    world.devices[0].addresses.clear();
    world.set_network();
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([home(), arrives, leaves]));
    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();

    world.run(SECOND * 61);
    assert_eq!(world.core.rewrites_view(world.now).unwrap(), []);
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([home(), arrives, stays]), "late packets");
    world.core.take_actions();
    world.now = world.now + SECOND * 31;
    world.core.tick(world.now).unwrap();
    assert!(world.core.steering().rewrites.is_empty());
    assert_eq!(world.core.take_actions().departures, Some(None));
}

#[test]
fn a_flow_leaves_a_link_that_loses_the_address_on_the_way() {
    let mut world = round_robin();
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
    let mut confined = ethernet(FakeSteering::default(), Config { policy, ..config(Scheduler::RoundRobin) });
    let moved = [flow([OWN, SERVER], [OTHER, SERVER])];
    let refused = confined.core.rewrite(confined.now, &request(&moved, Some(SECOND), true)).unwrap_err();
    assert!(refused.detail.contains("fallback"), "{refused}");

    let mut without = ethernet(FakeSteering::clients_only(), config(Scheduler::RoundRobin));
    let refused = without.core.rewrite(without.now, &request(&moved, Some(SECOND), true)).unwrap_err();
    assert!(refused.detail.contains("this system cannot move flows"), "{refused}");

    let mut world = round_robin();
    let cases = [
        ("another host's address", flow([OWN, SERVER], ["10.0.2.3:1", SERVER]), "10.0.2.3 is not an address of this machine"),
        ("another host's flow", flow(["192.0.2.1:1", SERVER], [OTHER, SERVER]), "192.0.2.1 is not an address of this machine"),
        ("families", flow([OWN, SERVER], [OTHER, "[2001:db8::1]:80"]), "not of the same family"),
        ("to this machine", flow([OWN, SERVER], [OTHER, OWN]), "not the address of another host"),
        ("to everybody", flow([OWN, SERVER], [OTHER, "224.0.0.1:80"]), "not the address of another host"),
        ("a scope", flow([OWN, SERVER], [OTHER, "[2001:db8::1%5]:80"]), "belongs to one network only"),
        ("a link-local address", flow(["[fe80::1]:1", SERVER], [OTHER, SERVER]), "belongs to one network only"),
        ("to port 0", flow([OWN, SERVER], [OTHER, "198.51.100.1:0"]), "not the address of another host"),
    ];
    for (what, bad, word) in cases {
        let good = flow(["10.0.1.2:9", SERVER], ["10.0.2.2:9", SERVER]);
        let refused = world.core.rewrite(world.now, &request(&[good, bad], Some(SECOND), true)).unwrap_err();
        assert!(refused.cause == Cause::Unclear && refused.detail.contains(word), "{what}: {refused}");
        assert_eq!(world.core.rewrites_view(world.now).unwrap(), [], "{what}: all or none");
    }
    for lease in [Duration::ZERO, SECOND * 3601] {
        assert!(world.core.rewrite(world.now, &request(&moved, Some(lease), true)).is_err());
    }
    let twice = [moved[0], flow(["10.0.1.2:40001", SERVER], [OTHER, SERVER])];
    let refused = world.core.rewrite(world.now, &request(&twice, Some(SECOND), true)).unwrap_err();
    assert_eq!(refused.cause, Cause::Conflict, "{refused}");
    world.devices[1].mac = None;
    world.set_network();
    let refused = world.core.rewrite(world.now, &request(&moved, Some(SECOND), true)).unwrap_err();
    assert!(refused.detail.contains("lte0 has no Ethernet header"), "{refused}");
}

#[test]
fn a_flow_moves_on_to_third_addresses_without_a_gap() {
    let mut world = round_robin();
    world.devices.push(LinkFacts { mac: Some(Mac([2; 6])), ..facts(3, "eth0") });
    world.devices.push(departures());
    world.set_network();
    let (first, second) = ([flow([OWN, SERVER], [OTHER, SERVER])], [flow([OWN, SERVER], ["10.0.3.2:40000", SERVER])]);
    world.core.rewrite(world.now, &request(&first, Some(SECOND * 600), true)).unwrap();
    world.set_network();
    world.core.rewrite(world.now, &request(&second, Some(SECOND * 600), false)).unwrap();
    let old = (ends(SERVER, OTHER), to(SERVER, OWN, Some(99), DEPARTURE_MARK, true));
    let new = (ends(SERVER, "10.0.3.2:40000"), Rewrite { from: Some(LinkIndex(3)), ..old.1 });
    let leaves = (ends(OWN, SERVER), to(OTHER, SERVER, Some(2), mark(1), false));
    assert_eq!(
        world.core.steering().rewrites,
        BTreeMap::from([home(), old, new, leaves]),
        "it sends as before until the other end is ready"
    );
    let view = world.core.rewrites_view(world.now).unwrap()[0];
    assert!(view.active && !view.sends && view.wire == second[0].wire, "{view:?}");
    world.core.rewrite(world.now, &request(&second, Some(SECOND * 600), true)).unwrap();
    let leaves = (ends(OWN, SERVER), to("10.0.3.2:40000", SERVER, Some(3), mark(2), false));
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([home(), old, new, leaves]));
    world.run(SECOND * 31);
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([home(), new, leaves]), "late packets have arrived");
}

#[test]
fn a_flow_whose_socket_does_not_follow_is_not_active() {
    let mut world = round_robin();
    world.devices.push(departures());
    world.set_network();
    let own = ends(OWN, SERVER);
    world.core.steering().stubborn.insert(own);
    world.core.rewrite(world.now, &request(&[flow([OWN, SERVER], [OTHER, SERVER])], Some(SECOND * 60), false)).unwrap();
    world.set_network();
    assert!(world.core.steering().rewrites.contains_key(&own));
    assert!(!world.core.rewrites_view(world.now).unwrap()[0].active);
    world.core.steering().stubborn.clear();
    assert!(world.core.rewrites_view(world.now).unwrap()[0].active);
}

#[test]
fn only_the_flow_that_began_with_the_given_numbers_is_moved() {
    let mut world = round_robin();
    let numbers = |sent, received| SequenceNumbers { sent, received };
    world.core.steering().numbers.insert(ends(OWN, SERVER), numbers(1000, 5000));
    let ask = |world: &mut World, sent, received, sends| {
        let flow = MovedFlow { numbers: Some(braid_api::SequenceNumbers { sent, received }), ..flow([OWN, SERVER], [OTHER, SERVER]) };
        world.core.rewrite(world.now, &request(&[flow], Some(SECOND * 60), sends))
    };
    for (sent, received) in [(5000, 1002), (4998, 1000), (1000, 5000), (0, 0)] {
        let refused = ask(&mut world, sent, received, false).unwrap_err();
        assert!(refused.cause == Cause::Conflict && refused.detail.contains("sequence numbers"), "{refused}");
        assert!(world.core.take_actions().departures.is_none());
        assert!(world.core.steering().rewrites.is_empty());
    }
    // Guesses, the close ones among them.
    for guess in 0..100_000_u32 {
        let (sent, received) = if guess % 2 == 0 { (5000, 1002 + guess) } else { (guess.wrapping_mul(2_654_435_761), 1000) };
        assert!((4999..=5001).contains(&sent) && (999..=1001).contains(&received) || ask(&mut world, sent, received, true).is_err());
    }
    assert!(world.core.steering().rewrites.is_empty());
    // An end may count its SYN.
    ask(&mut world, 5001, 999, false).unwrap();
    assert!(world.core.take_actions().departures.is_some());
    ask(&mut world, 5001, 999, true).unwrap();
    // Nobody else moves it on, and nobody once it has ended or another connection has its addresses and ports.
    assert!(ask(&mut world, 7, 7, true).is_err());
    world.core.steering().numbers.insert(ends(OWN, SERVER), numbers(1001, 5000));
    assert!(ask(&mut world, 7, 1001, true).is_err());
    world.core.steering().numbers.clear();
    assert!(ask(&mut world, 5001, 999, true).is_err());
}

#[test]
fn a_flow_that_the_other_host_does_not_know_comes_back() {
    let mut world = round_robin();
    let moved = [flow([OWN, SERVER], [OTHER, SERVER])];
    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();
    world.devices.push(departures());
    set_whole(&mut world);
    let device = |world: &mut World| world.core.steering().rewrites[&ends(OWN, SERVER)].device;
    assert_eq!(device(&mut world), Some(LinkIndex(2)));
    world.core.steering().disowned.insert(ends(OWN, SERVER));
    world.run(SECOND);
    assert_eq!(device(&mut world), None);
    assert!(world.core.rewrites_view(world.now).unwrap().is_empty());
    // Once it was read, it is no more.
    world.core.steering().disowned.clear();
    for (late, is_back) in [(900, false), (1100, true)] {
        world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), false)).unwrap();
        world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();
        let at = world.now + Duration::from_millis(late);
        world.core.steering().home.insert(ends(OWN, SERVER), at);
        world.run(SECOND * 2);
        assert_eq!(device(&mut world).is_none(), is_back, "packets with its own addresses still came after {late} ms");
    }
    world.core.steering().home.clear();
    world.core.rewrite(world.now, &request(&moved, Some(SECOND * 60), true)).unwrap();
    world.run(SECOND);
    assert_eq!(device(&mut world), Some(LinkIndex(2)));
}

#[test]
fn some_flows_are_moved_if_the_request_says_so() {
    let mut world = round_robin();
    let (good, bad) = (flow([OWN, SERVER], [OTHER, SERVER]), flow(["10.0.1.2:40001", SERVER], ["10.9.9.9:40001", SERVER]));
    let ask = |partial| RewriteRequest { partial, ..request(&[bad, good, good], Some(SECOND * 60), false) };
    assert!(world.core.rewrite(world.now, &ask(false)).unwrap_err().detail.contains("10.9.9.9"));
    assert!(world.core.rewrites_view(world.now).unwrap().is_empty());
    let done = world.core.rewrite(world.now, &ask(true)).unwrap();
    assert!(done.flows[0].refused.as_ref().is_some_and(|reason| reason.contains("10.9.9.9")), "{done:?}");
    assert!(done.flows[1].refused.is_none() && done.flows[2].refused.as_ref().is_some_and(|reason| reason.contains("twice")));
    assert_eq!(world.core.rewrites_view(world.now).unwrap().len(), 1);
}

#[test]
fn a_flow_keeps_few_earlier_addresses_and_gives_them_up_to_a_new_connection() {
    let mut world = round_robin();
    let wire = |port: u16| format!("10.0.2.2:{port}");
    for port in 40_000..40_010 {
        world.core.rewrite(world.now, &request(&[flow([OWN, SERVER], [&wire(port), SERVER])], Some(SECOND * 60), true)).unwrap();
        world.run(SECOND / 10);
    }
    world.devices.push(departures());
    set_whole(&mut world);
    let arrivals = |world: &mut World| -> Vec<u16> {
        let moved = |(ends, rewrite): (&Ends, &Rewrite)| (rewrite.arrives && rewrite.device.is_some()).then(|| ends.destination.port());
        world.core.steering().rewrites.iter().filter_map(moved).collect()
    };
    assert_eq!(arrivals(&mut world), [40_007, 40_008, 40_009]);
    world.core.steering().claimed.insert(ends(OWN, SERVER), ends(&wire(40_007), SERVER));
    world.run(SECOND);
    assert_eq!(arrivals(&mut world), [40_008, 40_009]);
    // The present ones are the flow's.
    world.core.steering().claimed.insert(ends(OWN, SERVER), ends(&wire(40_009), SERVER));
    world.run(SECOND);
    assert_eq!(arrivals(&mut world), [40_008, 40_009]);
}

#[test]
fn a_flow_between_other_hosts_passes_until_its_lease_ends() {
    const NEAR: &str = "10.0.1.2:40001";
    const FAR: &str = "10.0.2.2:40002";
    const CLIENTS: [&str; 2] = ["192.0.2.7:50000", "192.0.2.8:50000"];
    let mut world = round_robin();
    let ask = |world: &mut World, client: &str, sends| {
        let passing = MovedFlow { passes: true, ..flow([FAR, SERVER], [NEAR, client]) };
        world.core.rewrite(world.now, &request(&[passing], Some(SECOND * 30), sends)).unwrap()
    };
    let pass = |[source, destination]: [&str; 2], device: u32| {
        let (from, mark) = (Some(LinkIndex(3 - device)), mark(device as usize - 1));
        Rewrite { from, passes: true, ..to(source, destination, Some(device), mark, true) }
    };
    assert!(ask(&mut world, CLIENTS[0], true).flows[0].active, "it needs no device of Braid's");
    let down = (ends(SERVER, FAR), pass([NEAR, CLIENTS[0]], 1));
    let up = |client| (ends(client, NEAR), pass([FAR, SERVER], 2));
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([down, up(CLIENTS[0])]));
    assert!(world.core.steering().ports().iter().all(|port| port.side == PortSide::Arrivals) && !world.core.steering().ports().is_empty());
    // The client moves: its new address is only noted until it has tested the way.
    ask(&mut world, CLIENTS[1], false);
    let noted = world.core.steering().rewrites[&ends(CLIENTS[1], NEAR)];
    assert_eq!((noted.device, noted.passes), (None, true));
    assert_eq!(world.core.steering().rewrites[&ends(SERVER, FAR)], down.1);
    ask(&mut world, CLIENTS[1], true);
    let moved = (ends(SERVER, FAR), pass([NEAR, CLIENTS[1]], 1));
    assert_eq!(world.core.steering().rewrites, BTreeMap::from([moved, up(CLIENTS[0]), up(CLIENTS[1])]), "late packets still pass");
    // Another client that got its port towards the server does not get the flow.
    let taken = MovedFlow { passes: true, ..flow([FAR, SERVER], ["10.0.1.2:40011", "192.0.2.99:6"]) };
    assert!(world.core.rewrite(world.now, &request(&[taken], Some(SECOND), true)).is_err());
    assert_eq!(world.core.steering().rewrites[&ends(SERVER, FAR)], moved.1);
    // Nobody else gets its ports.
    let other = MovedFlow { passes: true, ..flow(["10.0.2.2:40003", SERVER], [NEAR, CLIENTS[1]]) };
    assert!(world.core.rewrite(world.now, &request(&[other], Some(SECOND), true)).is_err());
    let of_socket = flow([FAR, SERVER], [NEAR, CLIENTS[1]]);
    assert!(world.core.rewrite(world.now, &request(&[of_socket], Some(SECOND), true)).is_err());
    world.run(SECOND * 31);
    assert!(world.core.steering().rewrites.is_empty() && world.core.steering().ports().is_empty());
    // The devices carry packets of different sizes.
    world.devices[1].mtu = 1280;
    world.set_network();
    let passing = MovedFlow { passes: true, ..flow([FAR, SERVER], [NEAR, CLIENTS[0]]) };
    let refused = world.core.rewrite(world.now, &request(&[passing], Some(SECOND), true)).unwrap_err();
    assert!(refused.detail.contains("different sizes"), "{refused}");
}
