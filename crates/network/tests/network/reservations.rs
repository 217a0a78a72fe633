//! Rates that clients reserve: where they are kept, and by which meters.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{Mac, PerDirection, Rate};
use braid_network::mobility::{Balance, BalanceTerms, Hard, Report};
use braid_network::{Access, AccessKind, AccessState, Config, HostState, Place, Request, RequestError, Scope};
use braid_openflow::Version;
use braid_openflow::action::Instruction;
use braid_openflow::ids::MeterId;
use proptest::prelude::*;

use crate::mobility::{access, access_id, campus};
use crate::support::frames::host;
use crate::support::world::{MS, World};

const SERVER: Mac = Mac([2, 0, 0, 0, 1, 9]);
const CLIENT: Mac = Mac([2, 0, 0, 0, 1, 1]);
const OTHER: Mac = Mac([2, 0, 0, 0, 1, 2]);
const MOVER: Mac = Mac([2, 0, 0, 0, 1, 3]);

fn rates(down: u64, up: u64) -> PerDirection<Rate> {
    PerDirection { down: Rate::from_mbps(down), up: Rate::from_mbps(up) }
}

/// A client and a host without Braid at the first access point, of 20 Mbit/s of which 10 may be reserved.
fn two_hosts(version: Version, tables: u8) -> World {
    let mut world = campus(version, tables, AccessKind::Wifi);
    world.make_client(CLIENT);
    for mac in [CLIENT, OTHER] {
        world.associate(mac, 0, Place::new(1, 4));
    }
    world.run(MS(200));
    world
}

fn at(world: &World, number: u8) -> AccessState {
    let all = world.controller.snapshot(world.now).accesses;
    all.into_iter().find(|state| state.access.id == access_id(number)).unwrap()
}

fn state(world: &World, mac: Mac) -> HostState {
    world.controller.snapshot(world.now).hosts.into_iter().find(|state| state.host == mac).unwrap()
}

/// The rates of the meters of a switch that entries use, in kbit/s, and how many entries use each.
fn meters(world: &World, datapath: u64) -> BTreeMap<u32, usize> {
    let switch = &world.switches[&datapath];
    let mut used: BTreeMap<MeterId, usize> = BTreeMap::new();
    for instruction in switch.flows.iter().flat_map(|flow| &flow.instructions) {
        if let Instruction::Meter(meter) = instruction {
            *used.entry(*meter).or_default() += 1;
        }
    }
    let mut rates = BTreeMap::new();
    for (meter, uses) in used {
        *rates.entry(switch.meters[&meter][0].rate).or_default() += uses;
    }
    rates
}

fn reserve(world: &mut World, mac: Mac, rates: PerDirection<Rate>) -> Result<(), RequestError> {
    let answer = world.controller.report(world.now, mac, Report::Reserve(rates));
    world.run(MS(1100));
    answer
}

#[test]
fn others_are_limited_to_what_is_left() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.associate(host(3), 0, Place::new(1, 4));
    world.run(MS(200));
    reserve(&mut world, CLIENT, rates(8, 5)).unwrap();
    // 12 Mbit/s towards three hosts are not reserved, and 15 from them: the one that reserves gets a third of that.
    assert_eq!(meters(&world, 1), BTreeMap::from([(8_000, 2), (12_000, 1), (10_000, 3)]));
    assert_eq!((at(&world, 1).reserved, at(&world, 1).enforces), (rates(8, 5), PerDirection::both(true)));
    assert_eq!(world.reservations[&CLIENT].kept[&access_id(1)], rates(8, 5));
    assert_eq!(state(&world, CLIENT).reservation, world.reservations[&CLIENT]);
    assert!([2, 3, 4, 5].iter().all(|datapath| meters(&world, *datapath).is_empty()));
    reserve(&mut world, CLIENT, rates(0, 0)).unwrap();
    assert_eq!((meters(&world, 1), at(&world, 1).reserved), (BTreeMap::new(), rates(0, 0)));
    assert_eq!(world.reservations[&CLIENT], braid_network::Reservation::default());
    // The next reading removes the meters that were shared.
    world.run(Duration::from_secs(35));
    assert!(world.switches[&1].meters.is_empty());
    world.converge();
}

#[test]
fn who_uses_less_leaves_the_rest_to_the_others() {
    let mut world = two_hosts(Version::V1_3, 254);
    reserve(&mut world, CLIENT, rates(10, 0)).unwrap();
    assert!(meters(&world, 1).contains_key(&5_000), "{:?}", meters(&world, 1));
    // Next to nothing goes to the client, and all others together want more than there is.
    world.stream(SERVER, CLIENT, 80, 1, 400, MS(20));
    world.stream(SERVER, OTHER, 80, 10_000, 9_000, Duration::from_micros(10));
    world.run(Duration::from_secs(4));
    assert!(meters(&world, 1).keys().any(|rate| *rate > 9_000 && *rate <= 10_000), "{:?}", meters(&world, 1));
    assert_eq!(at(&world, 1).reserved, rates(10, 0));
}

#[test]
fn a_reservation_follows_its_host_and_one_that_does_not_fit_is_refused() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.make_client(OTHER);
    world.associate(OTHER, 0, Place::new(1, 4));
    world.run(MS(100));
    reserve(&mut world, CLIENT, rates(8, 1)).unwrap();
    reserve(&mut world, OTHER, rates(3, 1)).unwrap();
    let refusal = world.reservations[&OTHER].refused[0].to_string();
    assert!(
        refusal.contains("02:aa:00:00:00:01 cannot reserve 3.0 Mbit/s towards") && refusal.contains("2.0 Mbit/s and 9.0 Mbit/s are left"),
        "{refusal}"
    );
    // It goes to where there is room.
    world.dissociate(OTHER, 0);
    world.associate(OTHER, 0, Place::new(2, 4));
    world.run(MS(500));
    assert_eq!((world.reservations[&OTHER].kept[&access_id(2)], world.reservations[&OTHER].refused.len()), (rates(3, 1), 0));
    // The first one follows, and does not fit there.
    world.dissociate(CLIENT, 0);
    world.associate(CLIENT, 0, Place::new(2, 4));
    world.run(MS(500));
    assert_eq!(state(&world, CLIENT).active, [Place::new(2, 4)], "it moves anyway");
    assert_eq!((world.reservations[&CLIENT].kept.len(), world.reservations[&CLIENT].refused.len()), (0, 1));
    assert_eq!((at(&world, 1).reserved, at(&world, 2).reserved), (rates(0, 0), rates(3, 1)));
    assert!(meters(&world, 1).is_empty());
    // When the other one ends, it gets its turn.
    world.client_left(OTHER);
    world.run(MS(500));
    assert_eq!((world.reservations[&CLIENT].kept[&access_id(2)], at(&world, 2).reserved), (rates(8, 1), rates(8, 1)));
    // With its packet path the reservation is lost.
    world.dissociate(CLIENT, 0);
    world.run(MS(500));
    assert_eq!((world.reservations[&CLIENT].kept.len(), at(&world, 2).reserved), (0, rates(0, 0)));
    world.client_left(CLIENT);
    world.run(MS(500));
    assert_eq!(state(&world, CLIENT).reservation, braid_network::Reservation::default());
}

#[test]
fn switches_without_meters_only_count() {
    for (version, tables, has_meters, enforces) in
        [(Version::V1_0, 1, true, [false; 2]), (Version::V1_3, 254, false, [false; 2]), (Version::V1_3, 1, true, [true, false])]
    {
        let mut world = campus(version, tables, AccessKind::Wifi);
        world.switches.get_mut(&1).unwrap().has_meters = has_meters;
        world.make_client(CLIENT);
        [CLIENT, OTHER].into_iter().for_each(|mac| world.associate(mac, 0, Place::new(1, 4)));
        world.run(MS(200));
        reserve(&mut world, CLIENT, rates(4, 4)).unwrap();
        world.converge();
        assert_eq!(
            (at(&world, 1).reserved, at(&world, 1).enforces.to_array()),
            (rates(4, 4), enforces),
            "{version:?} {tables} {has_meters}"
        );
        assert_eq!(meters(&world, 1).is_empty(), !enforces[0]);
        world.clear();
        world.stream(SERVER, OTHER, 80, 1, 10, MS(5));
        world.run(MS(500));
        assert_eq!(world.hosts[&OTHER].delivered.len(), 10);
    }
}

#[test]
fn what_is_reserved_is_not_free_for_others() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.make_client(OTHER);
    world.associate(OTHER, 0, Place::new(1, 4));
    reserve(&mut world, CLIENT, rates(8, 2)).unwrap();
    world.run(Duration::from_secs(7));
    let free = |mac| {
        let free = world.controller.free_at(mac)[0].1;
        [free.down, free.up].map(|rate| (rate.bps() as f64 / 1e6).round() as u64)
    };
    assert_eq!((free(CLIENT), free(OTHER)), ([20, 20], [12, 18]));
    let used: BTreeMap<_, _> = world.controller.utilisations().collect();
    assert!((40..42).contains(&used[&access_id(1)]), "{used:?}");
}

#[test]
fn load_moves_nobody_to_where_much_is_reserved() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.controller.add_manager(Box::new(Balance::new(Hard, BalanceTerms { low: 0.4, ..BalanceTerms::default() })));
    world.request(Request::UseManager { scope: Scope::Host(MOVER), manager: "balance".into() }).unwrap();
    reserve(&mut world, CLIENT, rates(9, 0)).unwrap();
    let narrow = Access { capacity: Rate::from_bps(40_000), ..access(3, AccessKind::Wifi, MS(1)) };
    world.request(Request::SetAccess(narrow)).unwrap();
    world.make_client(MOVER);
    world.associate(MOVER, 0, Place::new(3, 4));
    world.run(MS(500));
    world.report(MOVER, Report::Signals(vec![(access_id(1), braid_network::Signal(-40))]));
    world.stream(SERVER, MOVER, 80, 1, 4000, MS(5));
    world.run(Duration::from_secs(20));
    assert!(world.notices.is_empty(), "{:?}", world.notices);
    reserve(&mut world, CLIENT, rates(1, 0)).unwrap();
    world.stream(SERVER, MOVER, 80, 10_000, 4000, MS(5));
    world.run(Duration::from_secs(20));
    assert!(!world.notices.is_empty());
}

#[test]
fn an_access_point_that_changes_is_asked_again() {
    let mut world = two_hosts(Version::V1_3, 254);
    reserve(&mut world, CLIENT, rates(8, 1)).unwrap();
    let change = |world: &mut World, reservable| {
        world
            .request(Request::SetAccess(Access { reservable: Rate::from_mbps(reservable), ..access(1, AccessKind::Wifi, MS(700)) }))
            .unwrap();
        world.run(MS(100));
        (at(world, 1).reserved == rates(8, 1), meters(world, 1).is_empty(), world.reservations[&CLIENT].refused.len())
    };
    assert_eq!(change(&mut world, 7), (false, true, 1));
    assert_eq!(change(&mut world, 9), (true, false, 0));
    world.request(Request::RemoveAccess(access_id(1))).unwrap();
    world.run(MS(100));
    assert_eq!((meters(&world, 1).len(), world.reservations[&CLIENT].kept.len()), (0, 0));
}

#[test]
fn a_limit_counts_beside_a_reservation() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.request(Request::SetLimit { host: OTHER, limit: Some(Rate::from_mbps(3)) }).unwrap();
    reserve(&mut world, CLIENT, rates(8, 8)).unwrap();
    assert_eq!(meters(&world, 1), BTreeMap::from([(3_000, 2), (17_000, 2)]));
    reserve(&mut world, CLIENT, rates(0, 0)).unwrap();
    assert_eq!(meters(&world, 1), BTreeMap::from([(3_000, 2)]));
}

#[test]
fn a_new_controller_clears_the_meters_until_the_client_asks_again() {
    let mut world = two_hosts(Version::V1_3, 254);
    reserve(&mut world, CLIENT, rates(8, 8)).unwrap();
    let before = meters(&world, 1);
    assert!(!before.is_empty());
    world.replace_controller(Config::new([9; 32]));
    world.run(Duration::from_secs(1));
    assert_eq!(meters(&world, 1), before, "what stands stays until the controller has read it");
    world.run(Duration::from_secs(4));
    assert!(meters(&world, 1).is_empty());
    world.make_client(CLIENT);
    world.associate(CLIENT, 0, Place::new(1, 4));
    world.run(MS(500));
    reserve(&mut world, CLIENT, rates(8, 8)).unwrap();
    assert_eq!(meters(&world, 1), before);
    // A client that comes back at once finds its meters, and no entry is written.
    world.run(Duration::from_secs(40));
    world.converge();
    assert_eq!(world.switches[&1].meters.len(), 4);
}

#[test]
fn a_client_that_asks_all_the_time_costs_little() {
    let mut world = two_hosts(Version::V1_3, 254);
    let before = world.switches[&1].commands;
    for step in 0..3000u64 {
        let odd = Rate::from_bps(step * 1000 % 9_000_000);
        let rates = [rates(1, 1), rates(u64::MAX / 1_000_000, 1), PerDirection::both(odd), PerDirection::both(Rate::from_bps(u64::MAX))];
        world.report(CLIENT, Report::Reserve(rates[step as usize % 4]));
        world.run(MS(1));
        let reserved = at(&world, 1).reserved;
        assert!(reserved.iter().all(|rate| *rate <= Rate::from_mbps(10)));
    }
    assert!(world.switches[&1].commands - before < 50, "{}", world.switches[&1].commands - before);
    assert_eq!(world.controller.report(world.now, OTHER, Report::Reserve(rates(1, 1))), Err(RequestError::NoClient(OTHER)));
}

#[test]
fn regression_a_number_that_one_entry_gives_up_is_not_given_to_another_at_once() {
    let mut world = two_hosts(Version::V1_3, 254);
    for mac in [OTHER, MOVER] {
        world.make_client(mac);
        world.associate(mac, 0, Place::new(if mac == OTHER { 1 } else { 3 }, 4));
    }
    world.run(MS(200));
    for mac in [CLIENT, MOVER] {
        reserve(&mut world, mac, rates(0, 1)).unwrap();
    }
    world.dissociate(MOVER, 0);
    world.associate(MOVER, 0, Place::new(1, 4));
    world.client_left(CLIENT);
    world.run(Duration::from_secs(2));
    assert!(at(&world, 1).enforces.down, "no meter was refused");
    assert!(!meters(&world, 1).is_empty());
}

#[derive(Debug, Clone)]
enum Step {
    Reserve(u8, u64, u64),
    Move(u8, u64),
    Leave(u8),
    Disconnect(u64),
    Access(u8, u64),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..4u8, 0..12u64, 0..12u64).prop_map(|(host, down, up)| Step::Reserve(host, down, up)),
        3 => (1..4u8, 1..5u64).prop_map(|(host, at)| Step::Move(host, at)),
        1 => (1..4u8).prop_map(Step::Leave),
        1 => (1..5u64).prop_map(Step::Disconnect),
        1 => (1..5u8, 0..20u64).prop_map(|(access, reservable)| Step::Access(access, reservable)),
        4 => (1..3000u64).prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn no_access_point_promises_more_than_it_has(steps in proptest::collection::vec(step(), 1..40)) {
        let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
        for number in 1..4 {
            world.make_client(host(number));
            world.associate(host(number), 0, Place::new(number.into(), 4));
        }
        world.run(MS(200));
        for step in steps {
            match step {
                Step::Reserve(number, down, up) => world.report(host(number), Report::Reserve(rates(down, up))),
                Step::Move(number, to) => {
                    world.dissociate_all(host(number));
                    world.associate(host(number), 0, Place::new(to, 4));
                }
                Step::Leave(number) => {
                    world.client_left(host(number));
                    prop_assert_eq!(state(&world, host(number)).reservation.kept.len(), 0);
                }
                Step::Disconnect(datapath) => {
                    world.disconnect(datapath);
                    world.after(MS(700), move |world| {
                        if world.switches[&datapath].connection.is_none() {
                            world.connect(datapath);
                        }
                    });
                }
                Step::Access(number, reservable) => {
                    let changed = Access { reservable: Rate::from_mbps(reservable), ..access(number, AccessKind::Wifi, MS(700)) };
                    world.request(Request::SetAccess(changed)).unwrap();
                }
                Step::Wait(time) => world.run(MS(time)),
            }
            world.run(MS(5));
            let snapshot = world.controller.snapshot(world.now);
            for state in &snapshot.accesses {
                let kept = snapshot.hosts.iter().filter_map(|host| host.reservation.kept.get(&state.access.id));
                let sum = kept.fold(PerDirection::default(), |sum: PerDirection<Rate>, kept| PerDirection { down: sum.down + kept.down, up: sum.up + kept.up });
                prop_assert_eq!(sum, state.reserved);
                prop_assert!(sum.down <= state.access.reservable && sum.up <= state.access.reservable);
            }
            for host in &snapshot.hosts {
                let here = |id| snapshot.accesses.iter().any(|state| state.access.id == id && host.active.contains(&state.access.place));
                prop_assert!(host.reservation.kept.keys().all(|id| here(*id)), "{host:?}");
            }
        }
        world.run(Duration::from_secs(40));
        world.converge();
        // No entry has another meter than it should have.
        for datapath in 1..5u64 {
            let total = at(&world, datapath as u8).reserved;
            prop_assert_eq!(meters(&world, datapath).is_empty(), total == PerDirection::default(), "{}: {:?}", datapath, meters(&world, datapath));
        }
    }
}
