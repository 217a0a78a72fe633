//! Flows that move between links in agreement with the other host.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_api::ExplainRequest;
use braid_control::config::Config;
use braid_control::core::{MoveOrder, MoveStep, Recipient};
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{Ends, Steering};
use braid_decide::policy::{AppMatcher, AppRule, ProbeMode, Scheduler, When};
use braid_decide::tables::DEPARTURE_DEVICE;
use braid_decide::tunnel::{self, Tunnel};
use braid_model::{ByteCount, FlowId, LinkFacts, LinkIndex, LinkKind, Mac, Protocol, SequenceNumbers};

use super::world::*;

const SECOND: Duration = Duration::from_secs(1);

/// Two Ethernet links, and a host that takes requests.
fn world() -> World {
    world_with(Vec::new())
}

/// The same with rules.
fn world_with(apps: Vec<AppRule>) -> World {
    let mut config = Config { moves: true, probe: ProbeMode::Continuous, ..config(Scheduler::RoundRobin) };
    config.policy.apps = apps;
    let mut world = World::of_ethernet(FakeSteering::default(), config);
    world.core.set_movers(world.now, BTreeSet::from([SERVER]), BTreeSet::new()).unwrap();
    world
}

/// A flow that has run for a while: its id and ends.
fn flow(world: &mut World) -> (FlowId, Ends) {
    let ends = flow_of(world);
    world.run(SECOND);
    (FlowId(u64::from(world.core.steering().numbers[&ends].sent)), ends)
}

/// A new flow.
fn flow_of(world: &mut World) -> Ends {
    let Steered::To(_, id) = world.connect("test", 99) else { panic!("not steered") };
    world.core.steering().transfer(id, ByteCount::new(1000), ByteCount::new(1000));
    let now = world.now;
    let row = world.core.steering().flows(now).unwrap().into_iter().find(|row| row.id == id).unwrap();
    let ends = Ends { protocol: Protocol::Tcp, source: row.local.into(), destination: row.remote.into() };
    world.core.steering().numbers.insert(ends, SequenceNumbers { sent: id.0 as u32, received: 7 });
    ends
}

/// Number of the link that has the flow's address.
fn own_link(ends: &Ends) -> u32 {
    if ends.source.ip().to_string() == "10.0.1.2" { 1 } else { 2 }
}

/// The name of the other link.
fn other_name(ends: &Ends) -> &'static str {
    ["lte0", "wlan0"][own_link(ends) as usize - 1]
}

/// The link of a flow dies.
fn kill_link(world: &mut World, ends: &Ends) {
    world.answering.insert(LinkIndex(own_link(ends)), false);
    world.run(SECOND);
}

/// Makes the device that the core asks for, as the daemon does.
fn make_device(world: &mut World) {
    if world.devices.iter().all(|device| device.name != DEPARTURE_DEVICE) {
        world.devices.push(LinkFacts::new(LinkIndex(99), DEPARTURE_DEVICE, LinkKind::Virtual));
    }
    let device = world.devices.iter_mut().find(|device| device.name == DEPARTURE_DEVICE).unwrap();
    device.addresses = ["10.0.1.2/32", "10.0.2.2/32"].map(|net| net.parse().unwrap()).to_vec();
    world.set_network();
}

fn orders(world: &mut World) -> Vec<MoveOrder> {
    std::mem::take(&mut world.moves)
}

/// The device over which a flow's packets leave if they are rewritten.
fn device(world: &mut World, ends: &Ends) -> Option<u32> {
    world.core.steering().rewrites.get(ends).and_then(|rewrite| rewrite.device).map(|device| device.0)
}

/// Lets the other host agree to the only order, and to the test that follows. Returns the last order.
fn agree(world: &mut World) -> MoveOrder {
    let asked: Vec<MoveOrder> = orders(world).into_iter().filter(|order| order.lease.is_some()).collect();
    let [order] = &asked[..] else { panic!("not one order: {asked:?}") };
    answer(world, &asked);
    if order.step != MoveStep::Accept {
        return order.clone();
    }
    world.run(SECOND / 100);
    agree(world)
}

/// Agrees to these orders.
fn answer(world: &mut World, orders: &[MoveOrder]) {
    for order in orders {
        world.core.on_move_answer(world.now, order.number, Ok(BTreeMap::new())).unwrap();
    }
}

#[test]
fn a_flow_moves_in_three_steps_is_renewed_and_goes_home() {
    let mut world = world();
    let (id, ends) = flow(&mut world);
    let to = other_name(&ends);
    let moved = world.core.move_direct(world.now, &id.0.to_string(), Some(to), None).unwrap().unwrap();
    assert!(moved.message.starts_with(&format!("1 flow is moving to {to}")), "{}", moved.message);
    assert!(orders(&mut world).is_empty(), "this machine does not accept the new addresses yet");
    make_device(&mut world);
    world.run(SECOND / 10);
    assert_eq!(device(&mut world, &ends), None, "the other host has not agreed");
    assert!(world.core.steering().keepalives.is_empty());
    let order = agree(&mut world);
    assert_eq!((order.step, world.core.steering().keepalives[0].way.source.ip()), (MoveStep::Test, order.flows[0].via.ip()));
    assert_eq!((order.recipient.clone(), order.flows.len(), order.flows[0].own), (Recipient::Host(SERVER), 1, ends));
    assert_eq!(order.flows[0].numbers.sent, id.0 as u32);
    assert_eq!(device(&mut world, &ends), Some(3 - own_link(&ends)));
    assert_eq!(world.core.steering().hastened.last().map(|hasten| hasten.own), Some(ends));
    // Both leases are renewed as long as the flow lives.
    world.run(SECOND * 11);
    assert_eq!(agree(&mut world).flows, order.flows);
    world.run(SECOND * 25);
    assert!(device(&mut world, &ends).is_some());
    assert_eq!(orders(&mut world).len(), 2, "without an answer it asks again");
    let home = world.core.move_direct(world.now, "test", None, None).unwrap().unwrap();
    assert!(home.message.contains("moving"), "{}", home.message);
    world.run(SECOND / 10);
    assert_eq!(device(&mut world, &ends), None);
    let last = orders(&mut world).pop().unwrap();
    assert_eq!((last.slot, last.lease, last.flows), (None, None, order.flows));
}

#[test]
fn flows_leave_a_dead_link_together_and_stay_if_the_host_refuses() {
    let mut world = world();
    let flows: Vec<_> = (0..20).map(|_| flow(&mut world)).collect();
    world.answering.insert(LinkIndex(1), false);
    let on_dead: Vec<Ends> = flows.iter().map(|(_, ends)| *ends).filter(|ends| own_link(ends) == 1).collect();
    assert_eq!(on_dead.len(), 10);
    world.run(SECOND);
    make_device(&mut world);
    world.run(SECOND / 10);
    let [order] = &orders(&mut world)[..] else { panic!("not one order") };
    assert_eq!(order.flows.iter().map(|flow| flow.own).collect::<BTreeSet<_>>(), on_dead.iter().copied().collect());
    assert!(world.stuck.is_empty(), "flows that move are not ended");
    let refused = BTreeMap::from([(3, "no".to_owned())]);
    world.core.on_move_answer(world.now, order.number, Ok(refused)).unwrap();
    let stays = order.flows[3].own;
    world.run(SECOND / 100);
    agree(&mut world);
    for ends in &on_dead {
        assert_eq!(device(&mut world, ends), (*ends != stays).then_some(2), "{ends:?}");
    }
}

#[test]
fn flows_that_leave_a_dead_link_spread_over_the_others() {
    let mut world = world();
    world.devices.push(LinkFacts { mac: Some(Mac([2, 0, 0, 0, 0, 3])), ..facts(3, "eth0") });
    world.set_network();
    let flows: Vec<_> = (0..30).map(|_| flow(&mut world).1).collect();
    let on_dead = flows.iter().filter(|ends| own_link(ends) == 1).count();
    assert_eq!(on_dead, 10);
    kill_link(&mut world, &flows[0]);
    make_device(&mut world);
    world.run(SECOND / 10);
    let asked: BTreeMap<Option<usize>, usize> = orders(&mut world).iter().map(|order| (order.slot, order.flows.len())).collect();
    assert_eq!(asked.values().copied().collect::<Vec<_>>(), [5, 5], "{asked:?}");
}

#[test]
fn a_host_that_does_not_answer_or_agree_keeps_its_flows() {
    let mut world = world();
    let (id, ends) = flow(&mut world);
    let to = other_name(&ends);
    let ask = |world: &mut World| world.core.move_direct(world.now, &id.0.to_string(), Some(to), None).unwrap();
    ask(&mut world).unwrap();
    make_device(&mut world);
    world.run(SECOND * 25);
    let first = orders(&mut world);
    assert_eq!((first[0].slot.is_some(), first[1].slot), (true, None), "what may have been done is undone");
    assert_eq!(device(&mut world, &ends), None);
    // A late answer changes nothing.
    world.core.on_move_answer(world.now, first[0].number, Ok(BTreeMap::new())).unwrap();
    assert_eq!(device(&mut world, &ends), None);
    // Its socket does not follow.
    world.core.steering().stubborn.insert(ends);
    ask(&mut world).unwrap();
    world.run(SECOND * 5);
    assert!(orders(&mut world).iter().all(|order| order.slot.is_none()));
    // The host takes no requests any more.
    world.core.steering().stubborn.clear();
    world.core.set_movers(world.now, BTreeSet::new(), BTreeSet::new()).unwrap();
    let refused = ask(&mut world).unwrap_err();
    assert!(refused.detail.contains("does not agree to moves"), "{refused}");
    assert!(world.core.move_direct(world.now, "nobody", Some(to), None).is_none());
    let unknown = world.core.move_direct(world.now, "test", Some("eth7"), None).unwrap().unwrap_err();
    assert!(unknown.detail.contains("eth7 is not a link"), "{unknown}");
}

#[test]
fn a_flow_that_has_moved_is_not_moved_again_while_the_list_of_flows_is_old() {
    let mut world = world();
    let (_, ends) = flow(&mut world);
    kill_link(&mut world, &ends);
    make_device(&mut world);
    world.run(SECOND / 10);
    let order = agree(&mut world);
    // The fake's list of flows goes on to show the dead link.
    world.run(SECOND);
    assert!(device(&mut world, &ends).is_some());
    assert!(orders(&mut world).is_empty(), "after {order:?}");
}

/// Moves the flow to the other link, which the other host agrees to. Returns the flow, and the number of that link.
fn moved(world: &mut World) -> (FlowId, Ends, u32) {
    let (id, ends) = flow(world);
    let to = 3 - own_link(&ends);
    world.core.move_direct(world.now, &id.0.to_string(), Some(other_name(&ends)), None).unwrap().unwrap();
    world.run(SECOND / 10);
    make_device(world);
    world.run(SECOND / 10);
    agree(world);
    assert_eq!(device(world, &ends), Some(to));
    (id, ends, to)
}

#[test]
fn an_answer_to_an_earlier_order_does_not_count() {
    let mut world = world();
    let (id, ends, to) = moved(&mut world);
    world.run(SECOND * 11);
    let renewal = orders(&mut world).pop().unwrap();
    // A third link, to which the flow is to move while the renewal is under way.
    world.devices.insert(2, LinkFacts { mac: Some(Mac([2, 0, 0, 0, 0, 9])), ..facts(3, "eth0") });
    world.set_network();
    world.core.move_direct(world.now, &id.0.to_string(), Some("eth0"), None).unwrap().unwrap();
    world.run(SECOND / 10);
    let next = orders(&mut world).pop().unwrap();
    assert_ne!(next.flows[0].via.ip(), renewal.flows[0].via.ip());
    world.core.on_move_answer(world.now, renewal.number, Ok(BTreeMap::new())).unwrap();
    assert_eq!(device(&mut world, &ends), Some(to), "the other host has not agreed to the third link");
    // It refuses: the flow stays on the second one.
    world.core.on_move_answer(world.now, next.number, Ok(BTreeMap::from([(0, "no".to_owned())]))).unwrap();
    world.run(SECOND / 10);
    assert_eq!(device(&mut world, &ends), Some(to));
    let asked = orders(&mut world).pop().unwrap();
    assert_eq!(asked.flows, renewal.flows, "and its lease there is renewed");
}

#[test]
fn a_flow_that_has_left_a_dead_link_is_not_ended() {
    let mut world = world();
    let (id, ends) = flow(&mut world);
    kill_link(&mut world, &ends);
    make_device(&mut world);
    // The answer comes after `reconnect_after`.
    world.run(SECOND * 6);
    agree(&mut world);
    world.run(SECOND * 6);
    assert!(device(&mut world, &ends).is_some() && !world.stuck.contains(&id), "{:?}", world.stuck);
}

#[test]
fn regression_a_flow_follows_the_rule_of_another_context_that_excludes_its_link() {
    let matcher = AppMatcher { name: Some("test".into()), ..AppMatcher::default() };
    let moving = When { facts: [("moving".to_owned(), "true".to_owned())].into(), ..When::default() };
    let mut world = world_with(vec![
        AppRule { matcher: matcher.clone(), when: moving, links: only(&["lte0"]), ..AppRule::default() },
        AppRule { matcher, links: only(&["wlan0"]), ..AppRule::default() },
    ]);
    let (_, ends) = flow(&mut world);
    assert_eq!(own_link(&ends), 1);
    world.core.on_moving(world.now, Some(true)).unwrap();
    world.run(SECOND / 10);
    make_device(&mut world);
    world.run(SECOND / 10);
    agree(&mut world);
    assert_eq!(device(&mut world, &ends), Some(2));
}

#[test]
fn flows_stay_where_a_firewall_drops_what_it_did_not_see_begin_and_nobody_asks_again_for_a_while() {
    for passes_one_way in [false, true] {
        let mut world = world();
        let flows: Vec<(FlowId, Ends)> = (0..20).map(|_| flow(&mut world)).collect();
        let (id, first) = flows[0];
        let new: IpAddr = ["10.0.2.2", "10.0.1.2"][own_link(&first) as usize - 1].parse().unwrap();
        world.core.steering().firewalled.insert(new);
        world.core.move_direct(world.now, "test", Some(other_name(&first)), None).unwrap().unwrap();
        world.run(SECOND / 10);
        make_device(&mut world);
        world.run(SECOND / 10);
        let accept = orders(&mut world);
        answer(&mut world, &accept);
        world.run(SECOND / 10);
        let test = orders(&mut world);
        assert_eq!((test.len(), test[0].step, test[0].flows.len()), (1, MoveStep::Test, 10));
        assert_eq!(world.core.steering().keepalives.len(), 10);
        if passes_one_way {
            answer(&mut world, &test);
            world.run(SECOND / 2);
            assert!(world.core.steering().keepalives.len() > 20, "it tries again");
            assert_eq!(device(&mut world, &first), None);
            world.run(SECOND);
        } else {
            world.core.on_move_blocked(world.now, test[0].number, BTreeMap::new()).unwrap();
        }
        world.run(SECOND / 10);
        assert!(orders(&mut world).iter().all(|order| order.slot.is_none()), "the other host goes back, too");
        assert!(flows.iter().all(|(_, ends)| device(&mut world, ends).is_none()));
        let refused = world.core.move_direct(world.now, &id.0.to_string(), Some(other_name(&first)), None).unwrap().unwrap_err();
        assert!(refused.detail.contains("a firewall or NAT"), "{refused}");
        // The flows of a dead link do not wait for what is known.
        kill_link(&mut world, &first);
        world.run(SECOND);
        assert!(orders(&mut world).is_empty());
        let explained = world.core.explain(world.now, &ExplainRequest { flow: Some(id.0), ..ExplainRequest::default() }).unwrap();
        assert!(format!("{explained:?}").contains("a firewall or NAT"), "{explained:?}");
        world.core.steering().firewalled.clear();
        let begin = world.now;
        while world.moves.is_empty() {
            world.run(SECOND / 10);
            assert!(world.now < begin + SECOND * 90, "nobody tests again");
        }
        agree(&mut world);
        assert!(device(&mut world, &first).is_some());
    }
}

/// The device of tunnels, as the daemon makes it.
const TUNNEL_DEVICE: u32 = 98;

/// A tunnel leads to the host.
fn open_tunnel(world: &mut World, number: u32) {
    if world.devices.iter().all(|device| device.name != tunnel::CLIENT_DEVICE) {
        world.devices.push(LinkFacts::new(LinkIndex(TUNNEL_DEVICE), tunnel::CLIENT_DEVICE, LinkKind::Virtual));
        world.set_network();
    }
    world.core.set_tunnel(world.now, SERVER, Some(Tunnel::new(number))).unwrap();
}

/// A flow whose link dies, and the order to move it to the other one, which the host answers with this.
fn blocked(world: &mut World, reasons: &BTreeMap<usize, String>) -> (FlowId, Ends) {
    make_device(world);
    let (id, ends) = flow(world);
    kill_link(world, &ends);
    while world.moves.is_empty() {
        world.run(SECOND / 10);
    }
    let order = only_order(world);
    assert_eq!((order.step, order.slot.is_some()), (MoveStep::Accept, true));
    world.core.on_move_blocked(world.now, order.number, reasons.clone()).unwrap();
    world.run(SECOND / 100);
    (id, ends)
}

fn explanation(world: &mut World, id: FlowId) -> String {
    format!("{:?}", world.core.explain(world.now, &ExplainRequest { flow: Some(id.0), ..ExplainRequest::default() }).unwrap())
}

#[test]
fn a_flow_of_a_dead_link_goes_on_in_udp_where_the_other_link_drops_it_and_goes_home() {
    for reasons in [BTreeMap::new(), BTreeMap::from([(0, "a NAT translates it".to_owned())])] {
        let mut world = world();
        open_tunnel(&mut world, 1);
        let (id, ends) = blocked(&mut world, &reasons);
        let taken = orders(&mut world);
        let [home, inside] = &taken[..] else { panic!("{taken:?}") };
        assert_eq!((home.lease, inside.step, inside.slot), (None, MoveStep::Accept, None));
        assert_eq!(inside.flows[0].via.ip().to_string(), "244.0.0.2");
        answer(&mut world, &taken);
        world.run(SECOND / 100);
        let renewal = only_order(&mut world);
        assert_eq!((renewal.step, device(&mut world, &ends)), (MoveStep::Renew, None), "the host sends first");
        answer(&mut world, &[renewal]);
        let leaves = world.core.steering().rewrites[&ends];
        assert_eq!(
            (leaves.device, leaves.bare, leaves.destination.ip().to_string()),
            (Some(LinkIndex(TUNNEL_DEVICE)), true, "244.0.0.3".to_owned())
        );
        assert!(
            world
                .core
                .steering()
                .keepalives
                .iter()
                .all(|keepalive| keepalive.device != "wlan0" || keepalive.way.source.ip() != ends.source.ip())
        );
        let explained = explanation(&mut world, id);
        assert!(explained.contains("goes on in UDP") && explained.contains("encrypts"), "{explained}");
        // What arrives through the tunnel says nothing about the dead link.
        for _ in 0..11 {
            world.core.steering().transfer(id, ByteCount::new(100_000), ByteCount::new(1000));
            world.run(SECOND);
            assert_eq!(device(&mut world, &ends), Some(TUNNEL_DEVICE));
        }
        let renewal = only_order(&mut world);
        assert_eq!((renewal.step, renewal.slot), (MoveStep::Renew, None));
        answer(&mut world, &[renewal]);
        // Later the other link is tried again. If it still drops packets, nothing changes.
        while !world.moves.iter().any(|order| order.slot.is_some()) {
            world.run(SECOND / 10);
            let renewals: Vec<MoveOrder> = world.moves.iter().filter(|order| order.slot.is_none()).cloned().collect();
            world.moves.retain(|order| order.slot.is_some());
            answer(&mut world, &renewals);
        }
        let again = only_order(&mut world);
        world.core.on_move_blocked(world.now, again.number, BTreeMap::new()).unwrap();
        world.run(SECOND / 10);
        assert_eq!(device(&mut world, &ends), Some(TUNNEL_DEVICE));
        let renewals = orders(&mut world);
        answer(&mut world, &renewals);
        // Its own link is better.
        world.answering.insert(LinkIndex(own_link(&ends)), true);
        world.run(SECOND * 3);
        assert_eq!(device(&mut world, &ends), None);
        assert!(explanation(&mut world, id).contains("can change its link"));
    }
}

#[test]
fn a_host_that_calls_its_tunnel_blocked_is_not_asked_at_once_again() {
    let mut world = world();
    open_tunnel(&mut world, 1);
    let (_, ends) = blocked(&mut world, &BTreeMap::new());
    let begin = world.now;
    let mut count = 0;
    while world.now < begin + SECOND * 20 {
        for order in orders(&mut world).into_iter().filter(|order| order.lease.is_some()) {
            count += 1;
            world.core.on_move_blocked(world.now, order.number, BTreeMap::new()).unwrap();
        }
        world.run(SECOND / 20);
    }
    assert!((3..15).contains(&count), "{count}");
    assert_eq!(device(&mut world, &ends), None);
    // Nor does a relay's answer to a request for a way stay for ever.
    world.core.set_waypoints(BTreeSet::from(["way".to_owned()]));
    world.answering.insert(LinkIndex(own_link(&ends)), true);
    world.run(SECOND * 5);
    orders(&mut world);
    world.core.move_direct(world.now, "test", None, Some("way")).unwrap().unwrap();
    let asked = only_order(&mut world);
    world.core.on_move_blocked(world.now, asked.number, BTreeMap::new()).unwrap();
    world.run(SECOND * 30);
    orders(&mut world);
    world.core.move_direct(world.now, "test", None, Some("way")).unwrap().unwrap();
}

#[test]
fn flows_enter_no_tunnel_that_is_gone_or_that_their_rule_excludes() {
    // A tunnel uses all links.
    let matcher = AppMatcher { name: Some("test".into()), ..AppMatcher::default() };
    let rule = AppRule { matcher, links: only(&["wlan0", "lte0"]), ..AppRule::default() };
    for rules in [Vec::new(), vec![rule]] {
        let (is_ruled, mut world) = (!rules.is_empty(), world_with(rules));
        if is_ruled {
            open_tunnel(&mut world, 1);
        }
        let (id, ends) = blocked(&mut world, &BTreeMap::new());
        assert!(orders(&mut world).iter().all(|order| order.lease.is_none()));
        assert_eq!(device(&mut world, &ends), None);
        let explained = explanation(&mut world, id);
        assert!(explained.contains(if is_ruled { "its rule names links" } else { "takes no packets over its bond" }), "{explained}");
    }
    // Another tunnel leads to the same host.
    let mut world = world();
    open_tunnel(&mut world, 1);
    let (_, ends) = blocked(&mut world, &BTreeMap::new());
    for _ in 0..2 {
        let taken = orders(&mut world);
        answer(&mut world, &taken);
        world.run(SECOND / 100);
    }
    assert_eq!(device(&mut world, &ends), Some(TUNNEL_DEVICE));
    world.core.set_tunnel(world.now, SERVER, None).unwrap();
    open_tunnel(&mut world, 2);
    while !world.moves.iter().any(|order| order.flows[0].via.ip().to_string() == "244.0.0.4") {
        world.run(SECOND / 10);
    }
}

#[test]
fn nothing_moves_without_the_setting() {
    let mut world = World::with(FakeSteering::default(), Config { probe: ProbeMode::Continuous, ..config(Scheduler::RoundRobin) });
    world.core.set_movers(world.now, BTreeSet::from([SERVER]), BTreeSet::new()).unwrap();
    let (id, ends) = flow(&mut world);
    kill_link(&mut world, &ends);
    world.run(SECOND);
    assert!(orders(&mut world).is_empty() && world.core.hosts_to_ask_for_moves(world.now).is_empty());
    assert!(world.core.move_direct(world.now, &id.0.to_string(), Some("lte0"), None).unwrap().is_err());
}

#[test]
fn a_thousand_flows_are_asked_for_in_few_orders_and_get_other_ports_where_theirs_are_taken() {
    let mut world = world();
    let flows: Vec<Ends> = (0..1000).map(|_| flow_of(&mut world)).collect();
    world.run(SECOND);
    world.answering.insert(LinkIndex(1), false);
    world.run(SECOND);
    make_device(&mut world);
    world.run(SECOND / 10);
    let orders = orders(&mut world);
    let on_dead = flows.iter().filter(|ends| own_link(ends) == 1).count();
    assert_eq!(orders.iter().map(|order| order.flows.len()).sum::<usize>(), on_dead);
    assert_eq!(orders.len(), on_dead.div_ceil(256));
    answer(&mut world, &orders);
    world.run(SECOND / 100);
    let tests = self::orders(&mut world);
    answer(&mut world, &tests);
    assert_eq!(flows.iter().filter(|ends| device(&mut world, ends) == Some(2)).count(), on_dead);
}

// ------------------------------------------------------------------ waypoints

const NEAR: &str = "198.51.100.10:40001";
const FAR: &str = "198.51.100.10:40002";

fn way() -> Recipient {
    Recipient::Waypoint("way".to_owned())
}

/// The only order, once it is due.
fn only_order(world: &mut World) -> MoveOrder {
    world.run(SECOND / 100);
    let [order] = &orders(world)[..] else { panic!("not one order") };
    order.clone()
}

/// Lets the waypoint grant a way, and stops before the host is asked. Returns the link to the waypoint.
fn granted(world: &mut World, id: FlowId) -> u32 {
    world.core.set_waypoints(BTreeSet::from(["way".to_owned()]));
    world.core.move_direct(world.now, &id.0.to_string(), None, Some("way")).unwrap().unwrap();
    let asked = only_order(world);
    assert_eq!((&asked.recipient, asked.slot.is_some(), asked.flows[0].far), (&way(), true, None));
    world.core.on_way(world.now, asked.number, NEAR.parse().unwrap(), FAR.parse().unwrap()).unwrap();
    world.run(SECOND / 10);
    make_device(world);
    world.run(SECOND / 10);
    if asked.flows[0].via.ip().to_string() == "10.0.1.2" { 1 } else { 2 }
}

/// A flow that passes the waypoint: its id, ends, and link to the waypoint.
fn passing(world: &mut World) -> (FlowId, Ends, u32) {
    let (id, ends) = flow(world);
    let link = granted(world, id);
    agree(world);
    assert_eq!(device(world, &ends), Some(link));
    (id, ends, link)
}

#[test]
fn a_flow_moves_to_a_waypoint_and_only_the_waypoint_is_asked_behind_it() {
    let mut world = world();
    let (id, ends) = flow(&mut world);
    let link = granted(&mut world, id);
    let order = agree(&mut world);
    // The host sees the waypoint only.
    assert_eq!((&order.recipient, order.slot, order.flows[0].via), (&Recipient::Host(SERVER), None, FAR.parse().unwrap()));
    assert_eq!(world.core.steering().keepalives[0].way.destination, NEAR.parse().unwrap());
    let leaves = world.core.steering().rewrites[&ends];
    assert_eq!((leaves.device, leaves.destination), (Some(LinkIndex(link)), NEAR.parse().unwrap()));
    let explained = |world: &mut World| {
        let request = ExplainRequest { flow: Some(id.0), ..ExplainRequest::default() };
        format!("{:?}", world.core.explain(world.now, &request).unwrap())
    };
    assert!(explained(&mut world).contains("through the waypoint way"));
    // Both are asked again, the waypoint first.
    world.run(SECOND * 11);
    let renewal = only_order(&mut world);
    assert_eq!((&renewal.recipient, renewal.step, renewal.flows[0].far), (&way(), MoveStep::Renew, Some(FAR.parse().unwrap())));
    answer(&mut world, &[renewal]);
    let renewal = only_order(&mut world);
    assert_eq!((&renewal.recipient, renewal.step), (&Recipient::Host(SERVER), MoveStep::Renew));
    answer(&mut world, &[renewal]);
    // Its link dies.
    world.answering.insert(LinkIndex(link), false);
    world.run(SECOND);
    let behind = agree(&mut world);
    assert_eq!((&behind.recipient, behind.step, behind.flows[0].far), (&way(), MoveStep::Test, Some(FAR.parse().unwrap())));
    assert_eq!(device(&mut world, &ends), Some(3 - link));
    assert!(orders(&mut world).is_empty(), "the host is not asked");
    world.answering.insert(LinkIndex(link), true);
    world.run(SECOND * 5);
    world.core.move_direct(world.now, "test", None, None).unwrap().unwrap();
    world.run(SECOND / 10);
    assert_eq!(device(&mut world, &ends), None);
    assert_eq!(only_order(&mut world).recipient, Recipient::Host(SERVER));
}

#[test]
fn a_flow_goes_home_if_its_waypoint_does_not_agree_any_more() {
    let mut world = world();
    // The waypoint refuses, or does not answer until its lease ends; the host refuses to go on.
    for how in 0..3 {
        let (_, ends, _) = passing(&mut world);
        world.run(SECOND * 11);
        let renewal = only_order(&mut world);
        let refused = || Ok(BTreeMap::from([(0, "no".to_owned())]));
        match how {
            0 => world.core.on_move_answer(world.now, renewal.number, refused()).unwrap(),
            1 => world.run(SECOND * 30),
            _ => {
                answer(&mut world, &[renewal]);
                let renewal = only_order(&mut world);
                world.core.on_move_answer(world.now, renewal.number, refused()).unwrap();
            }
        }
        world.run(SECOND / 10);
        assert_eq!(device(&mut world, &ends), None, "{how}");
        world.run(SECOND * 60);
        orders(&mut world);
    }
}

#[test]
fn flows_that_pass_a_waypoint_are_asked_for_together() {
    let mut world = world();
    world.core.set_waypoints(BTreeSet::from(["way".to_owned()]));
    let flows: Vec<_> = (0..20).map(|_| flow(&mut world)).collect();
    make_device(&mut world);
    for (number, (id, _)) in flows.iter().enumerate() {
        world.core.move_direct(world.now, &id.0.to_string(), Some("wlan0"), Some("way")).unwrap().unwrap();
        let asked = only_order(&mut world);
        let at = |port: usize| format!("198.51.100.10:{port}").parse().unwrap();
        world.core.on_way(world.now, asked.number, at(40_000 + 2 * number), at(40_001 + 2 * number)).unwrap();
        world.run(SECOND / 10);
        make_device(&mut world);
        world.run(SECOND / 10);
        agree(&mut world);
    }
    while world.moves.is_empty() {
        world.run(SECOND / 10);
    }
    let renewal = only_order(&mut world);
    assert_eq!((&renewal.recipient, renewal.flows.len()), (&Recipient::Waypoint("way".to_owned()), 20));
    answer(&mut world, &[renewal]);
    world.run(SECOND / 100);
    let renewal = only_order(&mut world);
    assert_eq!((&renewal.recipient, renewal.flows.len()), (&Recipient::Host(SERVER), 20));
    answer(&mut world, &[renewal]);
    // The fake counts a flow on the link of its socket, so that half of them leave.
    world.answering.insert(LinkIndex(1), false);
    world.run(SECOND);
    let behind = only_order(&mut world);
    assert_eq!((behind.step, behind.flows.len()), (MoveStep::Accept, 10));
}

#[test]
fn a_flow_goes_home_if_its_waypoint_falls_silent_and_not_if_only_segments_are_lost() {
    let mut world = world();
    let (id, ends, link) = passing(&mut world);
    for lost in 1..=3 {
        world.core.steering().lose(id, 1);
        world.run(SECOND / 2);
        let now = world.now;
        // What was sent again is acknowledged.
        world.core.steering().arrived.insert(ends, now);
        world.run(SECOND * 3);
        assert_eq!(device(&mut world, &ends), Some(link), "{lost}");
    }
    world.run(SECOND * 3);
    assert_eq!(device(&mut world, &ends), Some(link), "nothing is sent");
    world.core.steering().lose(id, 1);
    world.run(SECOND / 2);
    assert_eq!(device(&mut world, &ends), Some(link), "it may still answer");
    world.core.steering().lose(id, 1);
    world.run(SECOND * 3);
    assert_eq!(device(&mut world, &ends), None);
    assert!(explanation(&mut world, id).contains("nothing comes from the waypoint way any more"));
}

#[test]
fn a_waypoint_that_refuses_or_is_silent_keeps_the_flow_where_it_is() {
    let mut world = world();
    let (id, ends) = flow(&mut world);
    let refused = world.core.move_direct(world.now, "test", None, Some("way")).unwrap().unwrap_err();
    assert!(refused.detail.contains("way is no waypoint"), "{refused}");
    world.core.set_waypoints(BTreeSet::from(["way".to_owned()]));
    for answers in [true, false] {
        world.core.move_direct(world.now, "test", None, Some("way")).unwrap().unwrap();
        let twice = world.core.move_direct(world.now, "test", None, Some("way")).unwrap().unwrap_err();
        assert!(twice.detail.contains("moving already"), "{twice}");
        let asked = only_order(&mut world);
        if answers {
            world.core.on_move_answer(world.now, asked.number, Ok(BTreeMap::from([(0, "private".to_owned())]))).unwrap();
        } else {
            world.run(SECOND * 25);
            // Late.
            world.core.on_way(world.now, asked.number, NEAR.parse().unwrap(), FAR.parse().unwrap()).unwrap();
        }
        world.run(SECOND / 10);
        let request = ExplainRequest { flow: Some(id.0), ..ExplainRequest::default() };
        let explained = format!("{:?}", world.core.explain(world.now, &request).unwrap());
        let why = if answers { "the waypoint way refused: private" } else { "it does not answer" };
        assert!(explained.contains(why), "{explained}");
        assert_eq!(device(&mut world, &ends), None);
        assert!(orders(&mut world).is_empty());
    }
    // The host does not name the waypoint.
    granted(&mut world, id);
    let order = only_order(&mut world);
    world.core.on_move_answer(world.now, order.number, Ok(BTreeMap::from([(0, "no such waypoint".to_owned())]))).unwrap();
    world.run(SECOND / 10);
    assert_eq!(device(&mut world, &ends), None);
}

#[test]
fn a_flow_moves_from_another_link_to_a_waypoint_and_stays_there_if_the_host_refuses() {
    let mut world = world();
    let (id, ends, to) = moved(&mut world);
    granted(&mut world, id);
    assert_eq!(device(&mut world, &ends), Some(to));
    let order = only_order(&mut world);
    assert_eq!((&order.recipient, order.flows[0].via), (&Recipient::Host(SERVER), FAR.parse().unwrap()));
    world.core.on_move_answer(world.now, order.number, Ok(BTreeMap::from([(0, "no".to_owned())]))).unwrap();
    world.run(SECOND / 10);
    assert_eq!(device(&mut world, &ends), Some(to));
    let leaves = world.core.steering().rewrites[&ends];
    assert_eq!(leaves.destination, ends.destination);
}
