//! Moved flows of datagrams.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_api::{ExplainRequest, FlowEnds, MovedFlow, MovedProtocol, RewriteRequest};
use braid_control::config::Config;
use braid_control::core::{MoveOrder, MoveStep, Recipient};
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, Content, Ends, ExeId, MAX_DATAGRAM_FLOWS, Steering};
use braid_decide::policy::{ProbeMode, Scheduler};
use braid_decide::tables::DEPARTURE_DEVICE;
use braid_model::{ByteCount, FlowId, LinkFacts, LinkIndex, LinkKind, Protocol, SequenceNumbers};

use super::world::*;

const SECOND: Duration = Duration::from_secs(1);
const PROOF: SequenceNumbers = SequenceNumbers { sent: 11, received: 22 };

/// Two Ethernet links, and a host that moves flows; those of datagrams, too, if it is a new one.
fn world(is_new: bool) -> World {
    let config = Config { moves: true, probe: ProbeMode::Continuous, ..config(Scheduler::RoundRobin) };
    let mut world = World::of_ethernet(FakeSteering::default(), config);
    let hosts = BTreeSet::from([SERVER]);
    world.core.set_movers(world.now, hosts.clone(), if is_new { hosts } else { BTreeSet::new() }).unwrap();
    world
}

/// A flow of datagrams of a socket that is not connected.
fn flow(world: &mut World, port: u16) -> (FlowId, Ends) {
    let app = AppId { exe: ExeId { device: 1, inode: 7 }, name: "test".to_owned() };
    let begin = world.now;
    let Steered::To(slot, id) = world.core.steering().connect(begin, &app, 1000, (SERVER, port)) else { panic!("not steered") };
    world.core.steering().make_datagrams(id);
    world.core.steering().transfer(id, ByteCount::new(1000), ByteCount::new(1000));
    let now = world.now;
    let row = world.core.steering().flows(now).unwrap().into_iter().find(|row| row.id == id).unwrap();
    let source = IpAddr::from([10, 0, slot as u8 + 1, 2]);
    (id, Ends { protocol: Protocol::Udp, source: SocketAddr::new(source, row.local.1), destination: row.remote.into() })
}

fn orders(world: &mut World) -> Vec<MoveOrder> {
    std::mem::take(&mut world.moves)
}

/// The host proves all flows that were asked for.
fn prove(world: &mut World) -> Vec<MoveOrder> {
    let asked: Vec<MoveOrder> = orders(world).into_iter().filter(|order| order.step == MoveStep::Prove).collect();
    for order in &asked {
        world.core.on_move_answer(world.now, order.number, Ok(BTreeMap::new())).unwrap();
        for flow in &order.flows {
            world.core.steering().numbers.insert(flow.own, PROOF);
        }
    }
    world.run(SECOND);
    asked
}

fn make_device(world: &mut World) {
    let mut device = LinkFacts::new(LinkIndex(99), DEPARTURE_DEVICE, LinkKind::Virtual);
    device.addresses = ["10.0.1.2/32", "10.0.2.2/32"].map(|net| net.parse().unwrap()).to_vec();
    world.devices.push(device);
    world.set_network();
}

/// Agrees to everything until the flow has moved.
fn agree(world: &mut World) {
    for _ in 0..20 {
        for order in orders(world) {
            world.core.on_move_answer(world.now, order.number, Ok(BTreeMap::new())).unwrap();
        }
        world.run(SECOND / 20);
    }
}

#[test]
fn a_flow_is_proved_while_its_link_works_and_moves_when_it_dies() {
    let mut world = world(true);
    let (id, own) = flow(&mut world, 99);
    world.run(SECOND * 2);
    make_device(&mut world);
    let asked = prove(&mut world);
    let [order] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((&order.recipient, order.flows[0].own, order.flows[0].via), (&Recipient::Host(SERVER), own, own.source));
    assert_eq!(order.slot, Some(usize::from(own.source.ip() == IpAddr::from([10, 0, 2, 2]))));
    let key = (id, own.destination);
    assert_eq!(world.core.steering().kept, BTreeMap::from([(key, own.source.ip())]), "its datagrams keep their source");
    let explained = world.core.explain(world.now, &ExplainRequest { flow: Some(id.0), ..ExplainRequest::default() }).unwrap();
    assert!(format!("{explained:?}").contains("can change its link"), "{explained:?}");
    // Proofs are renewed, and their loss does not matter.
    world.run(SECOND * 50);
    assert!(!prove(&mut world).is_empty());
    let dead = LinkIndex(if own.source.ip() == IpAddr::from([10, 0, 1, 2]) { 1 } else { 2 });
    world.answering.insert(dead, false);
    world.run(SECOND);
    let begun: Vec<MoveOrder> = orders(&mut world);
    assert_eq!((begun[0].step, begun[0].flows[0].own, begun[0].flows[0].numbers), (MoveStep::Accept, own, PROOF));
    world.moves = begun;
    agree(&mut world);
    let rewrite = world.core.steering().rewrites[&own];
    assert_eq!(rewrite.device, Some(LinkIndex(3 - dead.0)));
    assert!(world.core.steering().keepalives.iter().any(|keepalive| keepalive.content == Content::Datagram(Some(PROOF))));
    let rules = world.plan.as_ref().unwrap().rules.clone();
    let led = rules.iter().find(|rule| rule.ports.is_some()).unwrap();
    assert_eq!((led.source, led.destination), (Some(own.source.ip().into()), Some(SERVER.into())), "a rule leads them");
    let ports = led.ports.unwrap();
    assert_eq!((ports.protocol, ports.source, ports.destination), (Protocol::Udp, own.source.port(), 99));
    assert_eq!(world.core.steering().kept.get(&key), Some(&own.source.ip()));
}

#[test]
fn a_flow_that_nobody_proves_stays_as_without_moves() {
    let mut world = world(true);
    let (id, own) = flow(&mut world, 99);
    world.run(SECOND * 2);
    make_device(&mut world);
    let asked = orders(&mut world);
    let refused = BTreeMap::from([(0, "a NAT translates it".to_owned())]);
    world.core.on_move_answer(world.now, asked[0].number, Ok(refused)).unwrap();
    world.run(SECOND);
    assert!(world.core.steering().kept.is_empty());
    let answer = world.core.move_direct(world.now, &id.0.to_string(), Some("lte0"), None).unwrap().unwrap_err();
    assert!(answer.detail.contains("has not proved yet"), "{answer}");
    world.answering.insert(LinkIndex(if own.source.ip() == IpAddr::from([10, 0, 1, 2]) { 1 } else { 2 }), false);
    world.run(SECOND * 3);
    assert!(orders(&mut world).iter().all(|order| order.step == MoveStep::Prove));
    assert!(world.core.steering().rewrites.values().all(|rewrite| rewrite.device.is_none()));
}

#[test]
fn a_host_of_an_earlier_version_is_not_asked_and_names_are_not_proved() {
    let mut world = world(false);
    let (id, _) = flow(&mut world, 99);
    world.run(SECOND * 2);
    assert!(orders(&mut world).is_empty());
    let answer = world.core.move_direct(world.now, &id.0.to_string(), Some("lte0"), None).unwrap().unwrap_err();
    assert!(answer.detail.contains("an earlier version"), "{answer}");
    world.core.set_movers(world.now, BTreeSet::from([SERVER]), BTreeSet::from([SERVER])).unwrap();
    assert!(orders(&mut world).is_empty());
    flow(&mut world, 53);
    world.run(SECOND * 2);
    let asked = orders(&mut world);
    assert!(asked.iter().flat_map(|order| &order.flows).all(|flow| flow.own.destination.port() == 99), "{asked:?}");
}

#[test]
fn of_many_flows_only_some_are_proved_and_moved() {
    let mut world = world(true);
    for port in 0..2 * MAX_DATAGRAM_FLOWS as u16 {
        flow(&mut world, 1000 + port);
    }
    world.run(SECOND * 2);
    make_device(&mut world);
    let asked: usize = prove(&mut world).iter().map(|order| order.flows.len()).sum();
    assert_eq!((asked, world.core.steering().kept.len()), (MAX_DATAGRAM_FLOWS, MAX_DATAGRAM_FLOWS));
    // When the flows end, nothing remains.
    let ids: Vec<FlowId> = world.core.steering().kept.keys().map(|(id, _)| *id).collect();
    for id in ids {
        let now = world.now;
        world.core.steering().close(now, id);
    }
    world.run(SECOND * 2);
    prove(&mut world);
    assert_eq!(world.core.steering().kept.len(), MAX_DATAGRAM_FLOWS, "others take their places");
}

/// What the relay of this host asks for.
fn request(own: [&str; 2], prove: bool, sends: bool) -> RewriteRequest {
    let ends = |[source, destination]: [&str; 2]| FlowEnds { source: source.parse().unwrap(), destination: destination.parse().unwrap() };
    let wire = if prove { ends(own) } else { ends([own[0], "203.0.113.9:5000"]) };
    let numbers = Some(braid_api::SequenceNumbers { sent: 1, received: 2 });
    let flow = MovedFlow {
        own: ends(own),
        wire,
        protocol: MovedProtocol::Udp,
        sends: false,
        active: false,
        passes: false,
        remaining_ms: 0,
        numbers,
    };
    RewriteRequest { flows: vec![flow], lease_ms: Some(60_000), sends, partial: true, prove }
}

#[test]
fn a_server_proves_and_moves_flows_of_its_sockets_only() {
    let mut world = world(true);
    let own = ["10.0.1.2:7000", "198.51.100.7:5000"];
    let ends = Ends { protocol: Protocol::Udp, source: own[0].parse().unwrap(), destination: own[1].parse().unwrap() };
    world.core.steering().stubborn.insert(ends);
    for prove in [true, false] {
        let done = world.core.rewrite(world.now, &request(own, prove, false)).unwrap();
        assert!(done.flows[0].refused.as_ref().is_some_and(|reason| reason.contains("no socket")), "{done:?}");
    }
    world.core.steering().stubborn.clear();
    let done = world.core.rewrite(world.now, &request(own, true, false)).unwrap();
    assert_eq!(done.flows[0].refused, None);
    let sent = world.core.steering().keepalives.pop().unwrap();
    assert_eq!((sent.way, sent.content), (ends, Content::Datagram(Some(SequenceNumbers { sent: 1, received: 2 }))));
    assert!(world.core.steering().rewrites.is_empty(), "nothing has moved");
    world.core.rewrite(world.now, &request(own, false, false)).unwrap();
    make_device(&mut world);
    let done = world.core.rewrite(world.now, &request(own, false, true)).unwrap();
    assert_eq!(done.flows[0].refused, None);
    world.run(SECOND / 10);
    let plan = world.plan.clone().unwrap();
    let led = plan.rules.iter().find(|rule| rule.ports.is_some()).unwrap();
    assert_eq!(led.source, None, "a server's socket need not have a source address");
    assert!(plan.routes.iter().any(|route| route.source == Some(ends.source.ip()) && route.hops[0].device == LinkIndex(99)));
    // The route can choose one address only.
    let done = world.core.rewrite(world.now, &request(["10.0.2.2:7000", own[1]], false, false)).unwrap();
    assert!(done.flows[0].refused.as_ref().is_some_and(|reason| reason.contains("another address of this machine")), "{done:?}");
    let sourced = Ends { source: "10.0.2.2:7000".parse().unwrap(), ..ends };
    world.core.steering().sourced.insert(sourced);
    let done = world.core.rewrite(world.now, &request(["10.0.2.2:7000", own[1]], false, false)).unwrap();
    assert_eq!(done.flows[0].refused, None, "its socket has a source address");
    let arrives = world.core.steering().rewrites[&Ends { source: "203.0.113.9:5000".parse().unwrap(), destination: ends.source, ..ends }];
    assert_eq!(arrives.numbers, Some(SequenceNumbers { sent: 1, received: 2 }), "the proof must come by the new way");
    // Others use the flow's own addresses: the old proof counts no more, whatever comes by the new way.
    for _ in 0..40 {
        world.run(SECOND);
        let now = world.now;
        world.core.steering().home.insert(ends, now);
        world.core.steering().arrived.insert(ends, now);
        if world.now.since(Default::default()) < SECOND * 30 {
            world.core.rewrite(world.now, &request(own, false, true)).unwrap();
        }
    }
    let done = world.core.rewrite(world.now, &request(own, false, true)).unwrap();
    assert!(done.flows[0].refused.as_ref().is_some_and(|reason| reason.contains("a new proof")), "{done:?}");
    let mut renewed = request(own, false, false);
    renewed.flows[0].numbers = Some(braid_api::SequenceNumbers { sent: 3, received: 4 });
    let done = world.core.rewrite(world.now, &renewed).unwrap();
    assert_eq!(done.flows[0].refused, None, "with a new proof it moves again");
    let arrives = world.core.steering().rewrites[&Ends { source: "203.0.113.9:5000".parse().unwrap(), destination: ends.source, ..ends }];
    assert_eq!(arrives.numbers, Some(SequenceNumbers { sent: 3, received: 4 }));
    // Neither tunnels nor waypoints take datagrams.
    let mut passing = request(["10.0.1.2:7001", own[1]], false, false);
    passing.flows[0].passes = true;
    let done = world.core.rewrite(world.now, &passing).unwrap();
    assert!(done.flows[0].refused.is_some(), "{done:?}");
}
