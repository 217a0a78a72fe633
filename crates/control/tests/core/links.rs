//! Links appear, die, return and use up their allowance.

use braid_api::LinkState;
use std::time::Duration;

use braid_api::LinkStatus;
use braid_control::config::Config;
use braid_control::core::{Due, PathEvent};
use braid_control::fake::Steered;
use braid_control::steering::{Steering, UNANSWERED};
use braid_decide::health::Outcome;
use braid_decide::policy::{AppMatcher, AppRule, LinkRule, ProbeMode, Scheduler};
use braid_model::{ByteCount, Direction, Family, FlowId, LinkIndex, PerDirection, Rate, Role, Traffic};

use super::world::*;

#[test]
fn both_links_are_used_and_listed() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
    assert_eq!((world.state("wlan0"), world.state("lte0")), ("up".to_owned(), "up".to_owned()));
    let now = world.now;
    let status = world.core.status(now);
    assert_eq!((status.scheduler.as_str(), status.links.len()), ("round-robin", 2));
}

#[test]
fn an_idle_dead_link_is_left_within_one_second_and_used_again_within_two() {
    let mut config = config(Scheduler::RoundRobin);
    config.probe = ProbeMode::Continuous;
    let mut world = World::new(config);
    world.run(Duration::from_secs(3));
    world.answering.insert(LinkIndex(1), false);
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["lte0"]);
    assert_eq!(world.state("wlan0"), "dead");
    world.answering.insert(LinkIndex(1), true);
    world.run(Duration::from_secs(2));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
}

#[test]
fn a_stall_is_detected_within_a_second_without_continuous_probes() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    let flows: Vec<FlowId> =
        (0..2).filter_map(|_| if let Steered::To(_, id) = world.connect("bulk", 8) { Some(id) } else { None }).collect();
    for _ in 0..20 {
        flows.iter().for_each(|id| world.core.steering().transfer(*id, ByteCount::new(100_000), ByteCount::new(100)));
        world.run(Duration::from_millis(100));
    }
    world.answering.insert(LinkIndex(1), false);
    for _ in 0..10 {
        // The flow on the other link continues.
        world.core.steering().transfer(flows[1], ByteCount::new(100_000), ByteCount::new(100));
        world.run(Duration::from_millis(100));
    }
    assert_eq!(world.state("wlan0"), "dead");
    assert_eq!(world.used(), ["lte0"]);
}

#[test]
fn flows_on_a_dead_link_are_ended_after_the_grace_period_unless_pinned() {
    let mut config = config(Scheduler::OnlyOne);
    config.probe = ProbeMode::Continuous;
    config.reconnect_after = Some(Duration::from_secs(2));
    config.policy.apps = vec![AppRule {
        matcher: AppMatcher { exe: Some("/usr/bin/curl".into()), ..AppMatcher::default() },
        links: only(&["wlan0"]),
        ..AppRule::default()
    }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let Steered::To(0, free) = world.connect("free", 9) else { panic!() };
    let Steered::To(0, _pinned) = world.connect("curl", 7) else { panic!() };
    world.run(Duration::from_secs(1));
    world.answering.insert(LinkIndex(1), false);
    let mut ended = Vec::new();
    for _ in 0..50 {
        world.run(Duration::from_millis(10));
        assert!(world.core.take_actions().stuck.is_empty() || world.state("wlan0") == "dead");
    }
    for step in 0..500 {
        let end = world.now + Duration::from_millis(10);
        world.core.tick(end).unwrap();
        if step % 25 == 0 {
            world.core.poll(end).unwrap();
        }
        world.now = end;
        let actions = world.core.take_actions();
        ended.extend(actions.stuck.iter().map(|stuck| stuck.id));
        for plan in actions.probes {
            world
                .core
                .on_probe(end, plan.link, plan.family, if plan.link.0 == 1 { Outcome::Silent } else { Outcome::Alive { rtt: RTT } })
                .unwrap();
        }
    }
    assert_eq!(ended, [free], "the free flow once, the pinned one never");
}

#[test]
fn an_unanswered_connect_that_cannot_move_ends_with_its_link() {
    let (grace, never) = (Some(Duration::from_secs(60)), None);
    for (move_connects, reconnect_after, ends) in [(false, grace, true), (false, never, false), (true, grace, false)] {
        let mut config = Config { move_connects, reconnect_after, ..config(Scheduler::OnlyOne) };
        config.probe = ProbeMode::Continuous;
        let mut world = World::new(config);
        world.run(Duration::from_secs(1));
        let Steered::To(0, waiting) = world.connect("curl", 7) else { panic!() };
        let Steered::To(0, answered) = world.connect("curl", 7) else { panic!() };
        let now = world.now;
        world.core.steering().answer(now, answered);
        world.run(Duration::from_secs(1));
        assert!(world.stuck.is_empty());
        world.answering.insert(LinkIndex(1), false);
        world.run(Duration::from_secs(3));
        assert_eq!(world.state("wlan0"), "dead");
        let ended: &[FlowId] = if ends { &[waiting] } else { &[] };
        assert_eq!(world.stuck, ended, "{move_connects} {reconnect_after:?}: the answered one has its grace period");
    }
}

#[test]
fn an_unanswered_connect_is_moved_after_its_wait() {
    for wanted in [true, false] {
        let mut world = World::new(Config { move_connects: wanted, ..config(Scheduler::OnlyOne) });
        world.core.steering().set_moves_connects(true);
        world.run(Duration::from_secs(1));
        let Steered::To(0, _) = world.connect("curl", 443) else { panic!() };
        let begun = world.now;
        world.core.poll(begun).unwrap();
        let before = begun + (UNANSWERED - Duration::from_nanos(1));
        world.core.tick(before).unwrap();
        assert_eq!(world.core.steering().counters().unwrap().moved, 0);
        assert_eq!(world.core.poll_timeout(before) == (begun + UNANSWERED, Due::Unanswered), wanted);
        world.core.tick(begun + UNANSWERED).unwrap();
        assert_eq!(world.core.steering().counters().unwrap().moved, u64::from(wanted));
    }
}

#[test]
fn path_events_of_a_bond_affect_the_health_of_its_links() {
    let mut config = config(Scheduler::RoundRobin);
    config.probe = ProbeMode::OnDemand;
    let mut world = World::new(config);
    world.run(Duration::from_secs(5));
    let report = |world: &mut World, event| world.core.on_path(world.now, 0, Family::V4, event).unwrap();
    // The peer is gone: the links answer probes.
    report(&mut world, PathEvent::Silent);
    world.run(Duration::from_secs(3));
    assert_eq!(world.state("wlan0"), "up");
    // A dead link is detected by one silent probe, long before the next routine one.
    world.answering.insert(LinkIndex(1), false);
    report(&mut world, PathEvent::Silent);
    world.run(Duration::from_secs(3));
    assert_eq!((world.state("wlan0"), world.used()), ("dead".to_owned(), vec!["lte0".to_owned()]));
    let bonds = world.core.bond_links();
    assert_eq!(bonds.iter().map(|link| (link.v4.is_some(), link.dead.v4)).collect::<Vec<_>>(), [(true, true), (true, false)], "kept");
    report(&mut world, PathEvent::Delivers);
    assert_eq!((world.state("wlan0"), world.used()), ("up".to_owned(), vec!["wlan0".to_owned(), "lte0".to_owned()]));
}

#[test]
fn if_every_link_appears_dead_all_are_treated_as_up() {
    let mut config = config(Scheduler::RoundRobin);
    config.probe = ProbeMode::Continuous;
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.answering = [(LinkIndex(1), false), (LinkIndex(2), false)].into();
    world.run(Duration::from_secs(2));
    assert_eq!((world.state("wlan0"), world.state("lte0")), ("dead".to_owned(), "dead".to_owned()));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
    let now = world.now;
    assert!(world.core.status(now).warnings.iter().any(|warning| warning.contains("treats all as up")));
}

#[test]
fn a_backup_link_is_used_only_while_no_other_is_usable() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.links = vec![LinkRule { role: Role::Backup, ..link_rule("lte0") }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["wlan0"]);
    assert_eq!(world.state("lte0"), "backup");
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(world.used(), ["lte0"]);
}

#[test]
fn a_capped_link_gets_no_flows_until_its_month_ends() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.links = vec![LinkRule { metered: true, cap: Some(ByteCount::new(1_000_000)), ..link_rule("lte0") }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let counters = |lte: u64| [(LinkIndex(1), Traffic::default()), (LinkIndex(2), Traffic::received(ByteCount::new(lte)))];
    world.core.on_counters(world.now, UNIX, &counters(5_000_000));
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0", "lte0"], "earlier traffic of the device does not count");
    world.core.on_counters(world.now, UNIX + 1, &counters(6_000_000));
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0"]);
    assert_eq!(world.state("lte0"), "capped");
    world.core.on_counters(world.now, UNIX + 40 * 86_400, &counters(6_000_100));
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
}

#[test]
fn a_second_link_with_the_same_address_is_refused_with_the_reason() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.devices[1].addresses = world.devices[0].addresses.clone();
    world.set_network();
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0"]);
    let now = world.now;
    let lte = world.core.links(now).into_iter().find(|link| link.name == "lte0").unwrap();
    assert_eq!(lte.state, LinkState::Excluded);
    assert!(lte.reason.unwrap().contains("10.0.1.2"));
}

#[test]
fn a_33rd_link_is_listed_with_the_reason() {
    let mut world = World::new(Config::default());
    world.devices = (1..=33).map(|number| facts(number, &format!("eth{number}"))).collect();
    world.set_network();
    let links = world.core.links(world.now);
    assert_eq!(links.len(), 33);
    let last = links.iter().find(|link| link.name == "eth33").unwrap();
    assert_eq!((last.state, last.flows), (LinkState::Excluded, 0));
    assert!(last.reason.as_ref().unwrap().contains("at most 32 links"), "{last:?}");
    assert!(links.iter().filter(|link| link.name != "eth33").all(|link| link.state != LinkState::Excluded));
    world.devices.remove(0);
    world.set_network();
    let links = world.core.links(world.now);
    assert!(links.len() == 32 && links.iter().all(|link| link.state != LinkState::Excluded), "it gets the slot of a removed link");
}

#[test]
fn regression_a_link_that_loses_its_carrier_under_load_keeps_its_capacity() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    world.run(Duration::from_secs(1));
    let flows: Vec<FlowId> =
        (0..3).filter_map(|_| if let Steered::To(0, id) = world.connect("bulk", 8) { Some(id) } else { None }).collect();
    assert_eq!(flows.len(), 3);
    let mut received = ByteCount::ZERO;
    let mut transfer = |world: &mut World, quarters: u32, bytes: u64| {
        for _ in 0..quarters {
            flows.iter().for_each(|id| world.core.steering().transfer(*id, ByteCount::new(bytes), ByteCount::ZERO));
            received += ByteCount::new(bytes * flows.len() as u64);
            world.run(Duration::from_millis(250));
            let now = world.now;
            world.core.on_counters(now, UNIX, &[(LinkIndex(1), Traffic::received(received))]);
        }
        let now = world.now;
        world.core.links(now)[0].capacity_down_bps.unwrap() as f64 / 1e6
    };
    let proven = transfer(&mut world, 40, 500_000);
    assert!((45.0..60.0).contains(&proven), "{proven}");
    let dying = transfer(&mut world, 16, 200);
    assert!(dying < 40.0, "not yet distinguishable from a slow link: {dying}");
    world.devices[0].carrier = false;
    world.set_network();
    let gone = transfer(&mut world, 4, 0);
    world.devices[0].carrier = true;
    world.set_network();
    let back = transfer(&mut world, 8, 1000);
    for kept in [gone, back] {
        assert!((45.0..60.0).contains(&kept), "{kept} after {proven}");
    }
}

/// Moves this many bytes (received, sent) by each flow and by the device every quarter of a second; returns wlan0 at the end.
fn transfer(world: &mut World, flows: &[FlowId], quarters: u32, [rx, tx]: [u64; 2], sample: Option<Rate>) -> LinkStatus {
    let seen = |world: &mut World| {
        let now = world.now;
        world.core.links(now).into_iter().find(|link| link.name == "wlan0").unwrap()
    };
    for _ in 0..quarters {
        for id in flows {
            world.core.steering().transfer(*id, ByteCount::new(rx), ByteCount::new(tx));
            world.core.steering().sample(*id, sample);
        }
        world.run(Duration::from_millis(250));
        let before = seen(world);
        let before = Traffic::from([before.device_rx_bytes, before.device_tx_bytes].map(|bytes| ByteCount::new(bytes.unwrap_or(0))));
        let count = flows.len() as u64;
        let counters = [(LinkIndex(1), before + [ByteCount::new(rx * count), ByteCount::new(tx * count)].into())];
        let now = world.now;
        world.core.on_counters(now, UNIX, &counters);
    }
    world.run(Duration::from_millis(100));
    seen(world)
}

#[test]
fn the_rate_of_a_busy_path_counts_within_what_the_device_sends() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    let flow = sender(&mut world);
    let rate = |world: &mut World| {
        let now = world.now;
        world.core.all_links_mut().next().unwrap().estimate(Direction::Up, now).rate
    };
    let claim = |world: &mut World| {
        let now = world.now;
        (0..100).for_each(|_| world.core.on_path_rates(now, &[(0, Rate::from_mbps(10_000)), (31, Rate::from_mbps(1))].into()).unwrap());
    };
    let initial = rate(&mut world);
    claim(&mut world);
    assert_eq!(rate(&mut world), initial, "nothing was sent");
    transfer(&mut world, &[flow], 240, [1_000, 375_000], Some(Rate::from_mbps(12)));
    let before = rate(&mut world);
    claim(&mut world);
    let after = rate(&mut world);
    assert!(after > before && after.bps() <= before.bps() * 126 / 100, "{before} {after}: at most 1.25 of what the device sends");
}

/// A program that sends more than it receives, with a flow on wlan0.
fn sender(world: &mut World) -> FlowId {
    world.run(Duration::from_secs(1));
    let Steered::To(0, first) = world.connect("sender", 9) else { panic!() };
    world.core.steering().transfer(first, ByteCount::new(100), ByteCount::new(900));
    let now = world.now;
    world.core.steering().close(now, first);
    let Steered::To(0, id) = world.connect("sender", 9) else { panic!() };
    id
}

#[test]
fn regression_requests_and_acknowledgements_do_not_change_the_send_capacity() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    let flow = sender(&mut world);
    let rate = |world: &mut World| world.core.steering().params().unwrap().links[0].as_ref().unwrap().rate;
    let guess = rate(&mut world);
    let link = transfer(&mut world, &[flow], 240, [1_000, 4_970], None);
    assert_eq!((link.capacity_up_bps, link.capacity_up_age_ms, link.capacity_up_confidence), (None, None, Some(0.0)));
    assert_eq!(rate(&mut world), guess, "the rule's rate is unchanged too");
    // An old sample from before the requests.
    let link = transfer(&mut world, &[flow], 240, [1_000, 4_970], Some(Rate::from_mbps(12)));
    assert_eq!(link.capacity_up_bps, None);
    let link = transfer(&mut world, &[flow], 240, [1_000, 375_000], Some(Rate::from_mbps(12)));
    let learnt = link.capacity_up_bps.unwrap() as f64 / 12e6;
    assert!((0.95..1.2).contains(&learnt) && link.capacity_up_confidence > Some(0.5), "{link:?}");
    let link = transfer(&mut world, &[flow], 480, [1_000, 4_970], Some(Rate::from_mbps(12)));
    assert!(link.capacity_up_bps.unwrap() > 11_000_000, "later small traffic changes nothing: {link:?}");
}

#[test]
fn regression_an_unexpected_upload_does_not_change_the_receive_capacity() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    world.run(Duration::from_secs(1));
    let Steered::To(0, id) = world.connect("unheard-of", 10) else { panic!() };
    let link = transfer(&mut world, &[id], 120, [4_970, 375_000], Some(Rate::from_mbps(12)));
    assert_eq!(link.capacity_down_bps, None, "{link:?}");
    assert!(link.capacity_up_bps.is_some());
    let link = transfer(&mut world, &[id], 60, [1_000_000, 4_970], None);
    assert!((30_000_000..36_000_000).contains(&link.capacity_down_bps.unwrap()), "{link:?}");
}

#[test]
fn regression_a_short_failure_between_two_samples_is_counted() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    let falls = |world: &World| world.core.pulses(world.now, |_| 0).iter().map(|pulse| pulse.falls).collect::<Vec<_>>();
    assert_eq!(falls(&world), [0, 0]);
    for carrier in [false, true, false, true] {
        world.devices[0].carrier = carrier;
        world.set_network();
        world.run(Duration::from_millis(500));
    }
    assert_eq!((world.state("wlan0").as_str(), falls(&world)), ("up", vec![2, 0]));
    // A change of the configuration entry is not a failure.
    let mut changed = config(Scheduler::RoundRobin);
    changed.policy.links = vec![LinkRule { priority: 1, ..link_rule("wlan0") }];
    world.core.reconfigure(world.now, changed).unwrap();
    world.run(Duration::from_secs(1));
    assert_eq!(falls(&world), [2, 0]);
}

#[test]
fn regression_a_flow_that_has_just_ended_is_not_counted() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    let Steered::To(_, id) = world.connect("curl", 7) else { panic!() };
    world.run(Duration::from_secs(1));
    let flows = |world: &mut World| {
        let status = world.core.status(world.now);
        (status.flows, status.links.iter().map(|link| link.flows).sum::<u64>())
    };
    assert_eq!(flows(&mut world), (1, 1));
    let now = world.now;
    world.core.steering().close(now, id);
    let events = world.core.steering().events(10);
    world.core.on_events(now, events).unwrap();
    assert_eq!(flows(&mut world), (0, 0));
}

#[test]
fn what_a_network_has_free_and_the_own_traffic_are_the_capacity() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    world.run(Duration::from_secs(1));
    let free = PerDirection { down: Rate::from_mbps(12), up: Rate::from_mbps(3) };
    let now = world.now;
    let rates = |world: &mut World| {
        let link = world.core.all_links_mut().next().unwrap();
        PerDirection::from_fn(|direction| link.estimate(direction, now).rate)
    };
    let before = rates(&mut world);
    world.core.on_free_capacity(now, "no-link", free).unwrap();
    assert_eq!(rates(&mut world), before);
    world.core.on_free_capacity(now, "wlan0", free).unwrap();
    assert_eq!(rates(&mut world), free, "an idle host has what is free");
    world.core.all_links_mut().next().unwrap().rate = PerDirection { down: Some(Rate::from_mbps(5)), up: None };
    world.core.on_free_capacity(now, "wlan0", free).unwrap();
    assert_eq!(rates(&mut world), PerDirection { down: Rate::from_mbps(17), up: Rate::from_mbps(3) });
    world.core.all_links_mut().next().unwrap().rate = PerDirection::both(None);
    world.core.on_free_capacity(now, "wlan0", PerDirection::both(Rate::ZERO)).unwrap();
    assert!(rates(&mut world).down < Rate::from_mbps(1), "others fill the access point");
}
