//! Flows that other hosts open to this machine.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_api::{FlowEnds, MovedFlow, RewriteRequest};
use braid_control::config::Config;
use braid_control::core::MoveOrder;
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, Ends, ExeId, Steering};
use braid_decide::policy::{AppMatcher, AppRule, Carry, LinkSelector, Pattern, ProbeMode, Scheduler};
use braid_decide::tables::DEPARTURE_DEVICE;
use braid_model::{ByteCount, FlowId, LinkFacts, LinkIndex, LinkKind, Protocol, SequenceNumbers};

use super::world::*;

const SECOND: Duration = Duration::from_secs(1);
const STRANGER: &str = "203.0.113.77";

/// Two Ethernet links, rules, and a host that takes requests.
fn world(apps: Vec<AppRule>) -> World {
    let mut config = Config { moves: true, probe: ProbeMode::Continuous, reconnect_after: Some(SECOND), ..config(Scheduler::RoundRobin) };
    config.policy.apps = apps;
    let mut world = World::of_ethernet(FakeSteering::default(), config);
    world.core.set_movers(world.now, BTreeSet::from([SERVER]), BTreeSet::new()).unwrap();
    let mut device = LinkFacts::new(LinkIndex(99), DEPARTURE_DEVICE, LinkKind::Virtual);
    device.addresses = ["10.0.1.2/32", "10.0.2.2/32"].map(|net| net.parse().unwrap()).to_vec();
    world.devices.push(device);
    world
}

/// A host opens a connection to port 22 of the address of the first link.
fn accept(world: &mut World, name: &str, from: IpAddr, port: u16) -> (FlowId, Ends) {
    let app = AppId { exe: ExeId { device: 1, inode: 7 }, name: name.to_owned() };
    let (now, own): (_, SocketAddr) = (world.now, "10.0.1.2:22".parse().unwrap());
    let id = world.core.steering().accept(now, &app, 1000, (own.ip(), own.port()), (from, port)).unwrap();
    world.core.steering().transfer(id, ByteCount::new(1000), ByteCount::new(1000));
    let ends = Ends { protocol: Protocol::Tcp, source: own, destination: SocketAddr::new(from, port) };
    world.core.steering().numbers.insert(ends, SequenceNumbers { sent: id.0 as u32, received: 7 });
    (id, ends)
}

/// What other hosts are asked for within a second.
fn orders(world: &mut World) -> Vec<MoveOrder> {
    world.run(SECOND);
    // The device through which the packets of moved flows leave is there.
    world.set_network();
    world.run(SECOND / 10);
    std::mem::take(&mut world.moves)
}

fn listed(world: &World) -> usize {
    world.core.flows(world.now).iter().filter(|flow| flow.accepted == Some(true)).count()
}

fn rule(matcher: AppMatcher) -> AppRule {
    AppRule { matcher, links: Some(vec![LinkSelector::Name(Pattern::new("lte0"))]), ..AppRule::default() }
}

fn to_sshd() -> AppMatcher {
    AppMatcher { name: Some("sshd".to_owned()), ..AppMatcher::default() }
}

#[test]
fn new_flows_of_the_other_host_move_to_the_link_of_their_rule() {
    let port = AppMatcher { port: Some(22), ..AppMatcher::default() };
    let opener = AppMatcher { port: Some(40_000), ..AppMatcher::default() };
    for (matcher, moves) in [(to_sshd(), 1), (port, 1), (opener, 0)] {
        let mut world = world(vec![rule(matcher)]);
        let (_, own) = accept(&mut world, "sshd", SERVER, 40_000);
        let orders = orders(&mut world);
        assert_eq!(orders.len(), moves, "the port of a rule is that of the service: {orders:?}");
        if let Some(order) = orders.first() {
            assert_eq!((order.flows[0].own, order.flows[0].via), (own, "10.0.2.2:22".parse().unwrap()));
        }
    }
}

#[test]
fn connections_of_strangers_and_what_is_excluded_or_bonded_are_not_listed() {
    let mut world = self::world(vec![AppRule { matcher: to_sshd(), carry: Carry::Bond, ..AppRule::default() }]);
    accept(&mut world, "sshd", SERVER, 40_000);
    accept(&mut world, "httpd", STRANGER.parse().unwrap(), 40_001);
    world.run(SECOND);
    assert_eq!((listed(&world), world.questions.len()), (0, 0));
    accept(&mut world, "httpd", SERVER, 40_002);
    world.run(SECOND);
    assert_eq!(listed(&world), 1);
    let bytes = |world: &mut World| -> u64 { world.core.take_moved().iter().map(|pulse| pulse.rx.get()).sum() };
    assert_eq!(bytes(&mut world), 1000);
    world.core.set_movers(world.now, BTreeSet::new(), BTreeSet::new()).unwrap();
    world.run(SECOND);
    assert_eq!((listed(&world), bytes(&mut world)), (0, 0));
}

#[test]
fn flows_of_one_service_leave_a_dead_link_by_one_order_and_are_not_ended() {
    let mut world = world(Vec::new());
    let flows: Vec<Ends> = (0..20).map(|number| accept(&mut world, "sshd", SERVER, 40_000 + number).1).collect();
    assert!(orders(&mut world).is_empty());
    world.answering.insert(LinkIndex(1), false);
    // The host does not answer.
    let orders = orders(&mut world);
    assert_eq!(orders.iter().map(|order| order.flows.len()).collect::<Vec<_>>(), [20]);
    assert!(flows.iter().all(|own| orders[0].flows.iter().any(|flow| flow.own == *own)));
    world.run(SECOND * 10);
    assert_eq!((world.stuck.clone(), listed(&world)), (Vec::new(), 20));
}

/// What the other host asks for to have a flow of this machine moved to its second link.
fn request(own: &Ends) -> RewriteRequest {
    let ends = |ends: &Ends| FlowEnds { source: ends.source, destination: ends.destination };
    let wire = Ends { destination: "203.0.113.11:40000".parse().unwrap(), ..*own };
    let protocol = braid_api::MovedProtocol::Tcp;
    let flow = MovedFlow {
        own: ends(own),
        wire: ends(&wire),
        protocol,
        sends: false,
        active: false,
        passes: false,
        remaining_ms: 0,
        numbers: None,
    };
    RewriteRequest { flows: vec![flow], lease_ms: Some(60_000), sends: true, partial: true, prove: false }
}

#[test]
fn of_two_hosts_that_both_move_a_flow_the_one_that_opened_it_decides() {
    let mut world = world(Vec::new());
    // The other host opened it, and asks while this machine moves it.
    let (id, own) = accept(&mut world, "sshd", SERVER, 40_000);
    world.run(SECOND);
    world.core.move_direct(world.now, &id.0.to_string(), Some("lte0"), None).unwrap().unwrap();
    assert_eq!(orders(&mut world).len(), 1);
    let done = world.core.rewrite(world.now, &request(&own)).unwrap();
    assert_eq!(done.flows[0].refused, None);
    assert!(orders(&mut world).is_empty(), "it is left to the other host");
    // This machine opened it.
    let Steered::To(_, id) = world.connect("test", 99) else { panic!("not steered") };
    world.core.steering().transfer(id, ByteCount::new(1000), ByteCount::new(1000));
    let now = world.now;
    let row = world.core.steering().flows(now).unwrap().into_iter().find(|row| row.id == id).unwrap();
    let ends = Ends::of(&row);
    world.core.steering().numbers.insert(ends, SequenceNumbers { sent: 5, received: 7 });
    world.run(SECOND);
    let other = ["wlan0", "lte0"].into_iter().find(|name| *name != row_link(&world, id)).unwrap();
    world.core.move_direct(world.now, &id.0.to_string(), Some(other), None).unwrap().unwrap();
    assert_eq!(orders(&mut world).len(), 1);
    let done = world.core.rewrite(world.now, &request(&ends)).unwrap();
    assert!(done.flows[0].refused.as_ref().unwrap().contains("moves it itself"), "{done:?}");
}

#[test]
fn the_host_that_opened_a_flow_leaves_it_to_the_other_one_until_its_own_link_dies() {
    let mut world = world(Vec::new());
    let Steered::To(_, id) = world.connect("test", 99) else { panic!("not steered") };
    world.core.steering().transfer(id, ByteCount::new(1000), ByteCount::new(1000));
    let now = world.now;
    let row = world.core.steering().flows(now).unwrap().into_iter().find(|row| row.id == id).unwrap();
    let own = Ends::of(&row);
    world.core.steering().numbers.insert(own, SequenceNumbers { sent: 5, received: 7 });
    world.run(SECOND);
    assert_eq!(world.core.rewrite(world.now, &request(&own)).unwrap().flows[0].refused, None);
    let other = ["wlan0", "lte0"].into_iter().find(|name| *name != row_link(&world, id)).unwrap();
    let refused = world.core.move_direct(world.now, &id.0.to_string(), Some(other), None).unwrap().unwrap_err();
    assert!(refused.detail.contains("moves it already"), "{refused:?}");
    assert!(orders(&mut world).is_empty());
    world.answering.insert(row.link, false);
    assert_eq!(orders(&mut world).iter().map(|order| order.flows[0].own).collect::<Vec<_>>(), [own]);
    // The other one gives up meanwhile.
    world.core.rewrite(world.now, &RewriteRequest { lease_ms: None, ..request(&own) }).unwrap();
    assert!(world.core.rewrites_view(world.now).unwrap().iter().any(|flow| flow.own.source == own.source));
}

fn row_link(world: &World, id: FlowId) -> String {
    world.core.flows(world.now).into_iter().find(|flow| flow.id == id.0).unwrap().link
}
