//! A host walks over four access points under each manager. Packets go to it every 20 ms, as in table 5.1 of the thesis.

use std::time::Duration;

use braid_model::{Mac, Rate};
use braid_network::mobility::{Balance, BalanceTerms, FlowMode, Hard, HoldFrom, Hoolock, Manager, NCast, Notice, Predict, Report};
use braid_network::{
    Access, AccessId, AccessKind, Channel, Config, FlowId, FlowSpec, HostRefusal, Place, Request, RequestError, Scope, Signal, SliceId,
};
use braid_openflow::Version;

use crate::support::frames::host;
use crate::support::world::{MS, World};

const SERVER: Mac = Mac([2, 0, 0, 0, 1, 9]);
const WALKER: Mac = Mac([2, 0, 0, 0, 1, 1]);
const INTERVAL: Duration = Duration::from_millis(20);
/// Time on each access point.
const STAY: Duration = Duration::from_secs(10);

pub(crate) fn access_id(number: u8) -> AccessId {
    AccessId(Mac([2, 0xaa, 0, 0, 0, number]))
}

pub(crate) fn access(number: u8, kind: AccessKind, entry: Duration) -> Access {
    let place = Place::new(number.into(), 4);
    let (channel, reservable) = (Channel(number.into()), Rate::from_mbps(10));
    Access { id: access_id(number), place, kind, channel, entry, capacity: Rate::from_mbps(20), reservable }
}

/// Access points 1 to 4 at switches that are connected to switch 5 with the server. The fourth may be cellular.
pub(crate) fn campus(version: Version, tables: u8, fourth: AccessKind) -> World {
    campus_of(Config::new([7; 32]), version, tables, fourth)
}

/// The same with a configuration.
pub(crate) fn campus_of(config: Config, version: Version, tables: u8, fourth: AccessKind) -> World {
    let mut world = World::new(config, 3);
    world.add_switch(5, version, tables, 8);
    for number in 1..=4u8 {
        world.add_switch(number.into(), version, tables, 6);
        world.cable(Place::new(number.into(), 1), Place::new(5, number.into()));
        let kind = if number == 4 { fourth } else { AccessKind::Wifi };
        let entry = if kind == AccessKind::Cellular { Duration::from_secs(3) } else { MS(700) };
        world.add_access(access(number, kind, entry));
    }
    // A second way between neighbours, so that paths differ in length.
    world.cable(Place::new(1, 2), Place::new(2, 3));
    world.cable(Place::new(3, 2), Place::new(4, 3));
    world.converge();
    world.associate(SERVER, 0, Place::new(5, 6));
    world.run(MS(100));
    world
}

/// Takes a client with two radios over the access points: each second radio enters while the first one still receives.
fn walk_with_two_radios(world: &mut World, order: &[u8]) -> u64 {
    let mut at = MS(0);
    for (step, number) in order.iter().copied().enumerate() {
        let radio = (step % 2) as u8;
        let entry = world.accesses[&access_id(number)].entry;
        world.after(at, move |world| {
            // A radio that still holds an older access point leaves it.
            if world.hosts[&WALKER].radios.contains_key(&radio) {
                world.dissociate(WALKER, radio);
            }
            world.report(WALKER, Report::Entering(access_id(number)));
            world.after(entry, move |world| world.associate(WALKER, radio, Place::new(number.into(), 4)));
        });
        at += STAY;
    }
    stream_during(world, at)
}

/// With one radio: leaves, enters.
fn walk_with_one_radio(world: &mut World, order: &[u8]) -> u64 {
    let mut at = MS(0);
    for number in order.iter().copied() {
        let entry = world.accesses[&access_id(number)].entry;
        world.after(at, |world| {
            if world.hosts.get(&WALKER).is_some_and(|host| host.radios.contains_key(&0)) {
                world.dissociate(WALKER, 0);
            }
        });
        world.after(at + entry, move |world| world.associate(WALKER, 0, Place::new(number.into(), 4)));
        at += STAY;
    }
    stream_during(world, at)
}

/// Packets from 5 s after the start on. Returns their number.
fn stream_during(world: &mut World, time: Duration) -> u64 {
    world.run(Duration::from_secs(5));
    world.clear();
    let count = ((time - Duration::from_secs(5)).as_millis() / INTERVAL.as_millis()) as u64;
    world.stream(SERVER, WALKER, 80, 1, count, INTERVAL);
    world.run(time);
    count
}

/// Lost, duplicated and reordered packets, as the host's programs see them.
fn outcome(world: &World, count: u64) -> (u64, u64, u64) {
    let delivered = &world.hosts[&WALKER].delivered;
    let mut seen = std::collections::BTreeSet::new();
    let duplicated = delivered.iter().filter(|number| !seen.insert(**number)).count() as u64;
    let reordered = delivered.windows(2).filter(|two| two[1] < two[0]).count() as u64;
    (count - seen.len() as u64, duplicated, reordered)
}

fn use_manager(world: &mut World, manager: Box<dyn Manager>) {
    let name = manager.name().to_owned();
    world.controller.add_manager(manager);
    world.request(Request::UseManager { scope: Scope::Host(WALKER), manager: name }).unwrap();
}

const STYLES: [(Version, u8); 2] = [(Version::V1_0, 1), (Version::V1_3, 254)];
const ORDER: [u8; 8] = [1, 2, 3, 4, 3, 2, 1, 2];

#[test]
fn hard_handover_loses_what_comes_while_no_radio_is_associated() {
    for (version, tables) in STYLES {
        let mut world = campus(version, tables, AccessKind::Wifi);
        let count = walk_with_one_radio(&mut world, &ORDER);
        let (lost, duplicated, reordered) = outcome(&world, count);
        // Seven handovers of 0.7 s and the time of the controller: 35 packets each.
        assert!((7 * 34..=7 * 38).contains(&lost), "{version:?}: {lost} lost");
        assert_eq!((duplicated, reordered), (0, 0));
        assert!(world.loops.is_empty());
    }
}

#[test]
fn hoolock_loses_nothing_and_keeps_the_order() {
    for (version, tables) in STYLES {
        for hold in [1, 2] {
            let mut world = campus(version, tables, AccessKind::Wifi);
            use_manager(&mut world, Box::new(Hoolock::new(Duration::from_secs(hold), HoldFrom::Attached)));
            world.make_client(WALKER);
            let count = walk_with_two_radios(&mut world, &ORDER);
            assert_eq!(outcome(&world, count), (0, 0, 0), "{version:?}, {hold} s");
            assert_eq!(world.hosts[&WALKER].radios.len(), 1, "old links end");
            assert!(world.loops.is_empty());
        }
    }
}

#[test]
fn a_hold_from_the_start_of_entry_loses_packets_if_entry_takes_longer() {
    let lost = |hold: u64, from, fourth| {
        let mut world = campus(Version::V1_3, 254, fourth);
        use_manager(&mut world, Box::new(Hoolock::new(Duration::from_secs(hold), from)));
        world.make_client(WALKER);
        let order = if fourth == AccessKind::Cellular { [3, 4, 3, 4, 3, 4] } else { [1, 2, 3, 4, 3, 2] };
        let count = walk_with_two_radios(&mut world, &order);
        let (lost, duplicated, reordered) = outcome(&world, count);
        assert_eq!((duplicated, reordered), (0, 0));
        lost
    };
    assert_eq!(lost(2, HoldFrom::Entering, AccessKind::Wifi), 0);
    assert_eq!(lost(1, HoldFrom::Expected, AccessKind::Cellular), 0);
    // Entry to the cellular network takes 3 s (thesis, table 5.1: vertical handover).
    let vertical = [1, 2, 4].map(|hold| lost(hold, HoldFrom::Entering, AccessKind::Cellular));
    assert!(vertical[0] > 3 * 95 && vertical[1] > 3 * 45 && vertical[0] > vertical[1] && vertical[2] == 0, "{vertical:?}");
}

#[test]
fn bicast_loses_nothing_and_the_client_removes_duplicates() {
    for (version, tables) in STYLES {
        let mut world = campus(version, tables, AccessKind::Wifi);
        use_manager(&mut world, Box::new(NCast::new(Duration::from_secs(1), 2)));
        world.make_client(WALKER);
        let count = walk_with_two_radios(&mut world, &ORDER);
        let (lost, duplicated, _) = outcome(&world, count);
        assert_eq!((lost, duplicated), (0, 0), "{version:?}");
        let copies = world.hosts[&WALKER].arrived.len() as u64 - count;
        // About 50 packets in each of seven handovers arrive twice.
        assert!((7 * 48..=7 * 56).contains(&copies), "{version:?}: {copies} copies");
        assert_eq!(world.hosts[&WALKER].radios.len(), 1, "old links end");
        assert!(world.loops.is_empty());
    }
}

#[test]
fn hosts_that_do_not_remove_duplicates_get_one_copy() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    use_manager(&mut world, Box::new(NCast::new(Duration::from_secs(1), 2)));
    let count = walk_with_one_radio(&mut world, &[1, 2, 3]);
    let (lost, duplicated, _) = outcome(&world, count);
    assert!(lost > 0 && duplicated == 0);
    assert_eq!(world.hosts[&WALKER].arrived.len() as u64, count - lost);
}

#[test]
fn a_predicted_channel_shortens_the_hunt() {
    // The host hunts over eleven channels at 100 ms each, unless it was told one.
    let lost = |manager: Option<Box<dyn Manager>>| {
        let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
        if let Some(manager) = manager {
            use_manager(&mut world, manager);
        }
        world.make_client(WALKER);
        world.hosts.get_mut(&WALKER).unwrap().is_client = true;
        // It walks in circles: after two rounds, its way is known.
        let order: Vec<u8> = (0..4).flat_map(|_| [1, 2, 3, 4]).collect();
        world.after(MS(0), |world| world.associate(WALKER, 0, Place::new(1, 4)));
        for step in 1..order.len() {
            let (from, to) = (order[step - 1], order[step]);
            let at = Duration::from_secs(4 * step as u64);
            world.after(at - MS(200), move |world| world.report(WALKER, Report::Signals(vec![(access_id(from), Signal(-80))])));
            world.after(at, move |world| {
                world.dissociate(WALKER, 0);
                let told = world
                    .notices
                    .last()
                    .is_some_and(|(_, notice)| *notice == Notice::GoTo { access: access_id(to), channel: Channel(to.into()) });
                let hunt = if told { MS(100) } else { MS(1100) };
                world.after(hunt, move |world| world.associate(WALKER, 0, Place::new(to.into(), 4)));
            });
        }
        // The last two rounds.
        world.run(Duration::from_secs(33));
        world.clear();
        world.stream(SERVER, WALKER, 80, 1, 1500, INTERVAL);
        world.run(Duration::from_secs(31));
        outcome(&world, 1500).0
    };
    let (without, with) = (lost(None), lost(Some(Box::new(Predict::new(Hard)))));
    assert!(without > 7 * 50 && with < 7 * 10, "{without} lost without, {with} with predictions");
}

#[test]
fn load_moves_a_host_once() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Cellular);
    use_manager(&mut world, Box::new(Balance::new(Hard, BalanceTerms::default())));
    world.request(Request::SetAccess(Access { capacity: Rate::from_bps(40_000), ..access(3, AccessKind::Wifi, MS(1)) })).unwrap();
    world.make_client(WALKER);
    // Attached to Wi-Fi and cellular; Wi-Fi is used.
    world.associate(WALKER, 1, Place::new(4, 4));
    world.run(MS(100));
    world.associate(WALKER, 0, Place::new(3, 4));
    world.run(MS(100));
    let active =
        |world: &World| world.controller.snapshot(world.now).hosts.iter().find(|state| state.host == WALKER).unwrap().active.clone();
    assert_eq!(active(&world), [Place::new(3, 4)]);
    // 50 bytes every 5 ms are 80 kbit/s.
    world.stream(SERVER, WALKER, 80, 1, 12_000, MS(5));
    world.run(Duration::from_secs(20));
    assert_eq!(active(&world), [Place::new(4, 4)]);
    let moves = |world: &World| {
        world.events.iter().filter(|event| matches!(event, braid_network::Event::Routed { host, .. } if *host == WALKER)).count()
    };
    let before = moves(&world);
    world.run(Duration::from_secs(45));
    assert_eq!(moves(&world), before, "it stays");
    assert_eq!(outcome(&world, 12_000).0, 0);
}

/// Whom the walker is told to go to.
fn told(world: &World) -> Vec<AccessId> {
    let goes = |(_, notice): &(Mac, Notice)| match notice {
        Notice::GoTo { access, .. } => Some(*access),
        _ => None,
    };
    world.notices.iter().filter_map(goes).collect()
}

#[test]
fn regression_an_access_point_that_serves_nobody_is_not_idle() {
    for is_down in [true, false] {
        let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
        use_manager(&mut world, Box::new(Balance::new(Hard, BalanceTerms::default())));
        let narrow = Access { capacity: Rate::from_bps(40_000), ..access(3, AccessKind::Wifi, MS(1)) };
        world.request(Request::SetAccess(narrow)).unwrap();
        world.make_client(WALKER);
        world.associate(WALKER, 0, Place::new(3, 4));
        world.run(Duration::from_secs(6));
        world.report(WALKER, Report::Signals(vec![(access_id(1), Signal(-50)), (access_id(4), Signal(-60))]));
        if is_down {
            world.set_port(Place::new(1, 4), false)
        } else {
            world.disconnect(1)
        }
        world.stream(SERVER, WALKER, 80, 1, 4000, MS(5));
        world.run(Duration::from_secs(20));
        assert_eq!(told(&world), [access_id(4)], "down: {is_down}");
    }
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    use_manager(&mut world, Box::new(Predict::new(Hard)));
    world.make_client(WALKER);
    for number in [1, 2, 1] {
        if world.hosts[&WALKER].radios.contains_key(&0) {
            world.dissociate(WALKER, 0);
        }
        world.associate(WALKER, 0, Place::new(number, 4));
        world.run(MS(500));
    }
    for expected in [vec![access_id(2)], vec![]] {
        world.notices.clear();
        world.report(WALKER, Report::WantsMove(None));
        assert_eq!(told(&world), expected);
        let refused = world.request(Request::MoveHost { host: WALKER, to: access_id(2) });
        assert_eq!(refused.is_err(), expected.is_empty());
        world.set_port(Place::new(2, 4), false);
        world.run(Duration::from_secs(5));
    }
}

#[test]
fn a_client_whose_attachment_is_refused_gets_the_reason() {
    let mut config = Config::new([7; 32]);
    config.hosts.per_port = 1;
    let mut world = World::new(config, 3);
    world.add_switch(1, Version::V1_3, 254, 6);
    world.add_access(access(1, AccessKind::Wifi, MS(1)));
    world.converge();
    world.make_client(SERVER);
    world.associate(SERVER, 0, Place::new(1, 4));
    world.run(MS(100));
    world.make_client(WALKER);
    let refused = world.controller.report(world.now, WALKER, Report::Associated(access_id(1)));
    assert_eq!(refused, Err(RequestError::Refused(HostRefusal::Port)));
}

#[test]
fn a_choice_of_a_manager_ends() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    world.controller.add_manager(Box::new(Hoolock::new(MS(1000), HoldFrom::Attached)));
    world.controller.add_manager(Box::new(NCast::new(MS(1000), 2)));
    let manager = |world: &World| {
        let hosts = world.controller.snapshot(world.now).hosts;
        hosts.into_iter().find(|state| state.host == SERVER).unwrap().manager
    };
    world.request(Request::SetSlice { host: SERVER, slice: Some(SliceId(1)) }).unwrap();
    for (scope, name) in [(Scope::All, "hoolock"), (Scope::Slice(SliceId(1)), "n-cast"), (Scope::Host(SERVER), "hard")] {
        world.request(Request::UseManager { scope, manager: name.into() }).unwrap();
        assert_eq!(manager(&world), name);
    }
    for (scope, name) in [(Scope::Host(SERVER), "n-cast"), (Scope::Slice(SliceId(1)), "hoolock"), (Scope::All, "hard")] {
        world.request(Request::DropManager(scope)).unwrap();
        assert_eq!(manager(&world), name);
    }
}

#[test]
fn managers_are_chosen_by_host_before_slice() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    world.associate(host(1), 0, Place::new(1, 4));
    world.run(MS(100));
    for manager in [Box::new(NCast::new(MS(1000), 2)) as Box<dyn Manager>, Box::new(Hoolock::new(MS(1000), HoldFrom::Attached))] {
        world.controller.add_manager(manager);
    }
    let now = world.now;
    let manager = |world: &World| world.controller.snapshot(now).hosts.iter().find(|state| state.host == host(1)).unwrap().manager.clone();
    assert_eq!(manager(&world), "hard");
    let mut request = |request| world.request(request);
    request(Request::SetSlice { host: host(1), slice: Some(SliceId(4)) }).unwrap();
    request(Request::UseManager { scope: Scope::Slice(SliceId(4)), manager: "n-cast".into() }).unwrap();
    assert!(request(Request::UseManager { scope: Scope::Host(host(1)), manager: "no".into() }).unwrap_err().to_string().contains("\"no\""));
    assert_eq!(manager(&world), "n-cast");
    world.request(Request::UseManager { scope: Scope::Host(host(1)), manager: "hoolock".into() }).unwrap();
    assert_eq!(manager(&world), "hoolock");
}

#[test]
fn load_moves_a_chosen_flow_and_leaves_the_rest() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Cellular);
    use_manager(&mut world, Box::new(Balance::new(Hard, BalanceTerms::default())));
    let narrow = Access { capacity: Rate::from_bps(40_000), ..access(3, AccessKind::Wifi, MS(1)) };
    world.request(Request::SetAccess(narrow)).unwrap();
    world.make_client(WALKER);
    world.associate(WALKER, 1, Place::new(4, 4));
    world.run(MS(100));
    world.associate(WALKER, 0, Place::new(3, 4));
    world.run(MS(100));
    let spec = FlowSpec { to: WALKER, from: None, protocol: Some(17), port: Some(5004) };
    world.request(Request::SetFlow { id: FlowId(1), spec, mode: FlowMode::Movable }).unwrap();
    world.stream(SERVER, WALKER, 5004, 1, 4000, MS(5));
    world.run(Duration::from_secs(21));
    let snapshot = world.controller.snapshot(world.now);
    assert_eq!(snapshot.flows[&FlowId(1)].placed, Some(Place::new(4, 4)));
    assert_eq!(snapshot.hosts.iter().find(|state| state.host == WALKER).unwrap().active, [Place::new(3, 4)]);
    assert_eq!(outcome(&world, 4000), (0, 0, 0));
}
