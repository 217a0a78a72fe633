//! Programs ask the network: discovery, services, leases, and programs that lie, flood or die.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::{Mac, PerDirection, Rate};
use braid_network::mobility::Report;
use braid_network::sfnet::{HostRights, Offer, Quotas, Say, Sees, SessionId, Settings, Sfnet, all};
use braid_network::{AccessKind, Config, Event, Place};
use braid_openflow::Version;
use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::basics::STYLES;
use crate::mobility::{access_id, campus_of};
use crate::support::entry;
use crate::support::frames::{self, announcement, datagram, host};
use crate::support::world::{MS, World};

const SERVER: Mac = Mac([2, 0, 0, 0, 1, 9]);
const GROUP: Mac = Mac([1, 0, 0x5e, 0x40, 1, 2]);
const SECOND: Duration = Duration::from_secs(1);

fn offer() -> Offer {
    Offer { sfnet: 1, address: [10, 0, 1, 254].into(), port: Some(2210), tls_port: None, key: None }
}

fn config() -> Config {
    Config { offer: Some(offer()), ..Config::new([7; 32]) }
}

fn services(settings: Settings) -> Sfnet {
    let mut sfnet = Sfnet::new(settings);
    all(vec!["239.192.0.0/14".parse().unwrap(), "ff15::/16".parse().unwrap()]).into_iter().for_each(|service| sfnet.add_service(service));
    sfnet
}

/// Hosts 1 to 4 at access points 1 to 4, the server behind switch 5, and a controller that programs can ask.
fn asked(version: Version, tables: u8) -> World {
    let mut world = campus_of(config(), version, tables, AccessKind::Wifi);
    world.sfnet = services(Settings::default());
    for number in 1..=4 {
        world.associate(host(number), 0, Place::new(number.into(), 4));
    }
    world.run(MS(200));
    world.converge();
    world
}

fn start(world: &mut World, id: SessionId, number: u64, service: &str, with: Value, keep: u32) {
    world.line(id, &json!({"ask": "start", "id": number, "service": service, "with": with, "keep": keep}).to_string());
    world.run(MS(100));
}

/// Starts a service that must be granted. Returns the lease and what the service said.
#[track_caller]
fn granted(world: &mut World, id: SessionId, service: &str, with: Value) -> (u64, Value) {
    granted_for(world, id, service, with, 0)
}

#[track_caller]
fn granted_for(world: &mut World, id: SessionId, service: &str, with: Value, keep: u32) -> (u64, Value) {
    start(world, id, 77, service, with, keep);
    let started = |say: &Say| match say {
        Say::Started { id: 77, lease, result } => Some((*lease, result.clone())),
        _ => None,
    };
    world.said[&id].iter().rev().find_map(started).unwrap_or_else(|| panic!("{:?}", world.said[&id].last()))
}

/// The reason of the last refusal.
#[track_caller]
fn refused(world: &mut World, id: SessionId, service: &str, with: Value) -> String {
    start(world, id, 78, service, with, 0);
    match world.said[&id].last() {
        Some(Say::Refused { id: Some(78), reason }) => reason.clone(),
        other => panic!("{other:?}"),
    }
}

fn join(group: &str) -> Value {
    json!({ "group": group })
}

fn events(world: &World, id: SessionId, of: u64) -> Vec<Value> {
    let event = |say: &Say| match say {
        Say::Event { lease, event } if *lease == of => Some(event.clone()),
        _ => None,
    };
    world.said[&id].iter().filter_map(event).collect()
}

fn state(world: &mut World, id: SessionId, to: Option<&str>) -> Value {
    world.line(id, &json!({"ask": "state", "id": 5, "to": to}).to_string());
    match world.said[&id].last() {
        Some(Say::State { id: 5, state }) => state.clone(),
        other => panic!("{other:?}"),
    }
}

fn entries(world: &World) -> BTreeMap<u64, usize> {
    world.switches.iter().map(|(datapath, switch)| (*datapath, switch.flows.len())).collect()
}

/// How often packets to the group arrive at hosts 1 to 4, if this host sends one. No link may carry it twice.
fn reach(world: &mut World, from: Mac) -> [usize; 4] {
    world.clear();
    world.send(from, datagram(from, GROUP, 99, 5));
    world.run(MS(100));
    assert!(world.crossed.iter().all(|((_, place), count)| place.port.0 > 1000 || *count <= 1), "a link carries a packet twice");
    [1, 2, 3, 4].map(|number| world.copies(host(number), 5..6)[0])
}

/// A datagram of a program that looks for the controller. Numbers make them different.
fn question(from: Mac, number: u64) -> Bytes {
    let payload = format!(r#"{{"ask":"discover","n":"{number:08}"}}"#).into_bytes();
    let length = 8 + payload.len() as u16;
    let mut frame =
        [&[1, 0, 0x5e, 0, 0, 3][..], &from.0, &[8, 0, 0x45, 0], &(20 + length).to_be_bytes(), &[0, 0, 0, 0, 1, 17, 0, 0]].concat();
    frame.extend([10, 0, from.0[4], from.0[5], 224, 0, 0, 3, 0x9c, 0x40]);
    frame.extend(2209u16.to_be_bytes());
    frame.extend(length.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    frame.into()
}

#[test]
fn a_program_finds_the_controller_and_nobody_else_gets_its_question() {
    for (version, tables) in STYLES {
        let mut world = asked(version, tables);
        world.clear();
        world.send(host(1), question(host(1), 0));
        world.run(MS(50));
        assert_eq!(world.offers, [(host(1), offer())], "{version:?} {tables}");
        let number = frames::number(&question(host(1), 0));
        let crossed: Vec<_> = world.crossed.keys().filter(|(crossed, place)| *crossed == number && place.port.0 <= 3).collect();
        assert_eq!(crossed, [] as [&(u64, Place); 0], "it is not flooded: {version:?} {tables}");
        assert_eq!(world.controller.host_of([10, 0, 1, 1].into()), Some(host(1)));
    }
}

#[test]
fn a_flood_of_questions_keeps_nobody_from_an_answer() {
    let mut world = asked(Version::V1_3, 254);
    world.run(SECOND);
    for number in 0..5000u64 {
        world.after(Duration::from_micros(number * 400), move |world| world.send(host(1), question(host(1), number)));
    }
    for number in 0..4 {
        world.after(MS(200 + number * 400), move |world| world.send(host(2), question(host(2), 9000 + number)));
    }
    world.run(SECOND * 3);
    let count = |mac: Mac| world.offers.iter().filter(|(to, _)| *to == mac).count();
    assert_eq!(count(host(2)), 4);
    assert!((25..=100).contains(&count(host(1))), "{}", count(host(1)));
    // A controller that serves no programs answers nobody.
    let mut world = campus_of(Config::new([7; 32]), Version::V1_3, 254, AccessKind::Wifi);
    world.send(SERVER, question(SERVER, 1));
    world.run(MS(50));
    assert_eq!(world.offers, []);
}

#[test]
fn a_group_has_the_hosts_of_its_programs_and_ends_with_them() {
    for (version, tables) in STYLES {
        let mut world = asked(version, tables);
        let before = entries(&world);
        let [one, two, again] = [(1, 1), (2, 2), (3, 1)].map(|(number, of)| world.program(number, host(of)));
        let (_, result) = granted(&mut world, one, "multicast", join("239.192.1.2"));
        assert_eq!(result, json!({"group": "239.192.1.2", "hosts": 1}));
        granted(&mut world, two, "multicast", join("239.192.1.2"));
        let (lease, result) = granted(&mut world, again, "multicast", join("239.192.1.2"));
        assert_eq!(result["hosts"], 2, "two programs of one host");
        assert_eq!(reach(&mut world, SERVER), [1, 1, 0, 0], "{version:?} {tables}");
        assert_eq!(reach(&mut world, host(1)), [0, 1, 0, 0]);
        // One of the host's two programs dies, then the other one ends its lease.
        world.program_ends(one);
        world.run(MS(100));
        assert_eq!(reach(&mut world, SERVER), [1, 1, 0, 0]);
        world.line(again, &json!({"ask": "end", "id": 6, "lease": lease}).to_string());
        world.run(MS(100));
        assert!(matches!(world.said[&again].last(), Some(Say::Ended { id: Some(6), .. })), "{:?}", world.said[&again]);
        assert_eq!(reach(&mut world, SERVER), [0, 1, 0, 0]);
        world.program_ends(two);
        world.run(MS(100));
        assert_eq!((world.sfnet.counts(), entries(&world)), ((1, 0), before));
    }
}

#[test]
fn a_receiver_that_moves_keeps_receiving() {
    for (version, tables) in STYLES {
        let mut world = asked(version, tables);
        let (one, two) = (world.program(1, host(1)), world.program(2, host(2)));
        granted(&mut world, one, "multicast", join("239.192.1.2"));
        granted(&mut world, two, "multicast", join("239.192.1.2"));
        world.dissociate(host(1), 0);
        world.associate(host(1), 0, Place::new(3, 5));
        world.run(MS(500));
        world.converge();
        assert_eq!(reach(&mut world, SERVER), [1, 1, 0, 0], "{version:?} {tables}");
        // It is unplugged, so that the network forgets it, and plugged in elsewhere.
        world.set_port(Place::new(3, 5), false);
        world.run(SECOND);
        assert!(world.events.contains(&Event::HostGone { host: host(1) }));
        world.associate(host(1), 0, Place::new(4, 5));
        world.run(SECOND * 2);
        world.converge();
        assert_eq!(reach(&mut world, SERVER), [1, 1, 0, 0], "{version:?} {tables}");
        state(&mut world, one, None);
        assert!(world.closed.is_empty());
    }
}

#[test]
fn leases_outlive_their_connection_for_as_long_as_asked() {
    let mut world = asked(Version::V1_3, 254);
    let one = world.program(1, host(1));
    granted_for(&mut world, one, "multicast", join("239.192.1.2"), 5);
    world.program_ends(one);
    world.run(SECOND * 4);
    assert_eq!((world.sfnet.counts(), reach(&mut world, SERVER)), ((0, 1), [1, 0, 0, 0]));
    // It comes back in time: nothing changes when the former lease ends.
    let again = world.program(2, host(1));
    granted_for(&mut world, again, "multicast", join("239.192.1.2"), 5);
    world.run(SECOND * 3);
    assert_eq!((world.sfnet.counts(), reach(&mut world, SERVER)), ((1, 1), [1, 0, 0, 0]));
    world.program_ends(again);
    world.run(SECOND * 6);
    // An address without a group is that of a broadcast.
    assert_eq!((world.sfnet.counts(), reach(&mut world, SERVER)), ((0, 0), [1, 1, 1, 1]));
    start(&mut world, again, 3, "multicast", join("239.192.1.2"), 0);
    let other = world.program(3, host(1));
    start(&mut world, other, 4, "multicast", join("239.192.1.2"), 301);
    assert!(matches!(world.said[&other].last(), Some(Say::Refused { reason, .. }) if reason.contains("at most 300 s")));
}

#[test]
fn a_new_controller_finds_the_groups_that_are_asked_for_again_in_place() {
    let mut world = asked(Version::V1_3, 254);
    for number in 1..=2 {
        let id = world.program(number, host(number as u8));
        granted(&mut world, id, "multicast", join("239.192.1.2"));
    }
    let cookies = |world: &World| -> BTreeSet<u64> { world.switches[&5].flows.iter().map(|flow| flow.cookie.0).collect() };
    let before = cookies(&world);
    world.clear();
    world.stream(SERVER, GROUP, 99, 1, 400, MS(20));
    world.replace_controller(config());
    world.sfnet = services(Settings::default());
    world.run(SECOND * 2);
    // The programs look for it, by which it learns their addresses, and ask again.
    for number in 1..=2u8 {
        world.send(host(number), question(host(number), number.into()));
        world.run(MS(50));
        let id = world.program(10 + u64::from(number), host(number));
        granted(&mut world, id, "multicast", join("239.192.1.2"));
    }
    world.run(SECOND * 7);
    assert_eq!(cookies(&world), before, "entries stay");
    for number in 1..=2 {
        let copies = world.copies(host(number), 1..401);
        assert!(copies.iter().all(|copies| *copies == 1), "{copies:?}");
    }
    // What nobody asks for again goes.
    world.program_ends(SessionId(11));
    world.program_ends(SessionId(12));
    world.run(SECOND * 40);
    assert_eq!(reach(&mut world, SERVER), [1, 1, 1, 1], "a broadcast again");
}

#[test]
fn requests_count_for_the_host_of_the_connection_only() {
    let mut world = asked(Version::V1_3, 254);
    let id = world.program(1, host(1));
    let Some(Say::Welcome { host: own, services, .. }) = world.said[&id].first() else { panic!("{:?}", world.said[&id]) };
    assert_eq!((own, services.join(" ").as_str()), (&host(1).to_string(), "access multicast multipath notices reserve"));
    for (claimed, refused) in [("10.0.1.2", true), ("02:00:00:00:01:02", true), ("10.0.1.1", false), ("10.9.9.9", true), ("x", true)] {
        let line = json!({"ask": "start", "id": 1, "service": "multicast", "with": join("239.192.1.2"), "host": claimed});
        world.line(id, &line.to_string());
        world.run(MS(50));
        assert_eq!(matches!(world.said[&id].last(), Some(Say::Refused { .. })), refused, "{claimed}: {:?}", world.said[&id].last());
    }
    // Another session cannot end it.
    let other = world.program(2, host(1));
    world.line(other, r#"{"ask":"end","id":9,"lease":1}"#);
    assert!(matches!(world.said[&other].last(), Some(Say::Refused { id: Some(9), reason }) if reason.contains("no lease 1")));
    // Nobody has this address.
    let stranger = world.program_at(3, [10, 0, 7, 7]);
    assert!(world.closed.contains(&stranger) && format!("{:?}", world.said[&stranger]).contains("224.0.0.3:2209"));
    // The address goes to another host.
    let mut claim = announcement(host(2), 1 << 60).to_vec();
    claim[28..32].copy_from_slice(&[10, 0, 1, 1]);
    world.send(host(2), claim.into());
    world.run(MS(50));
    world.line(id, r#"{"ask":"state","id":4}"#);
    assert!(
        world.closed.contains(&id) && format!("{:?}", world.said[&id].last()).contains("not the address of"),
        "{:?}",
        world.said[&id].last()
    );
    world.run(MS(100));
    assert_eq!(world.sfnet.counts(), (1, 0));
}

#[test]
fn addresses_of_groups_are_those_of_programs() {
    let mut world = asked(Version::V1_3, 254);
    world.sfnet = {
        let mut sfnet = Sfnet::new(Settings::default());
        all(vec!["239.0.0.0/8".parse().unwrap(), "ff00::/8".parse().unwrap()]).into_iter().for_each(|service| sfnet.add_service(service));
        sfnet
    };
    let id = world.program(1, host(1));
    for (group, part) in [
        ("10.0.0.1", "is no multicast address"),
        ("224.0.0.251", "take one of 239.0.0.0/8, ff00::/8"),
        ("239.0.0.251", "which hosts need for themselves"),
        ("239.128.0.5", "which hosts need for themselves"),
        ("ff02::1", "which hosts need for themselves"),
        ("ff02::1:ff00:1", "take one"),
        ("x", "invalid IP address"),
    ] {
        let reason = refused(&mut world, id, "multicast", join(group));
        let fits = reason.starts_with("multicast: ")
            && (reason.contains(part) || reason.contains("need for themselves") || group == "ff02::1:ff00:1");
        assert!(fits, "{group}: {reason}");
    }
    granted(&mut world, id, "multicast", join("239.1.2.3"));
    let reason = refused(&mut world, id, "multicast", join("239.129.2.3"));
    assert!(reason.contains("the same address as 239.1.2.3"), "{reason}");
    granted(&mut world, id, "multicast", join("ff15::abcd:1"));
    // Of these, the last 31 bits are the same.
    let reason = refused(&mut world, id, "multicast", join("ff15::2bcd:1"));
    assert!(reason.contains("already has these packets"), "{reason}");
    let reason = refused(&mut world, id, "multicast", json!({}));
    assert!(reason.contains("missing field `group`; write \"with\":{\"group\":"), "{reason}");
    // What was refused has left nothing.
    world.program_ends(id);
    world.run(MS(100));
    assert_eq!(world.controller.snapshot(world.now).groups, BTreeMap::new());
}

#[test]
fn flows_go_over_paths_of_their_own_while_there_are_any() {
    for (version, tables) in STYLES {
        let mut world = asked(version, tables);
        let before = entries(&world);
        let id = world.program(1, host(1));
        let with = json!({"from": "10.0.1.9", "protocol": "udp", "ports": [5001, 5002]});
        let (_, result) = granted(&mut world, id, "multipath", with.clone());
        assert_eq!(result, json!({"links": [1, 2], "disjoint": true}));
        let over = |world: &mut World, port: u16| -> BTreeSet<u64> {
            world.clear();
            world.send(SERVER, datagram(SERVER, host(1), port, 3));
            world.run(MS(50));
            assert_eq!(world.copies(host(1), 3..4), [1]);
            world.crossed.keys().filter(|(number, place)| *number == 3 && place.port.0 <= 3).map(|(_, place)| place.datapath.0).collect()
        };
        assert_eq!((over(&mut world, 5001), over(&mut world, 5002)), ([5].into(), [2, 5].into()), "{version:?} {tables}");
        assert_eq!(over(&mut world, 5003), [5].into(), "other flows go as before");
        // Both go on when one path breaks, and apart again when it is back.
        world.set_port(Place::new(1, 1), false);
        world.run(MS(500));
        assert_eq!((over(&mut world, 5001), over(&mut world, 5002)), ([2, 5].into(), [2, 5].into()));
        world.set_port(Place::new(1, 1), true);
        world.run(SECOND * 4);
        world.converge();
        assert_eq!((over(&mut world, 5001), over(&mut world, 5002)), ([5].into(), [2, 5].into()));
        // The sender asks for the other direction. Who moves takes the paths along.
        let server = world.program(2, SERVER);
        let reason = refused(&mut world, server, "multipath", json!({"to": "10.0.1.1", "protocol": "udp", "ports": [5002]}));
        assert!(reason.contains("already has these packets"), "{reason}");
        world.dissociate(host(1), 0);
        world.associate(host(1), 0, Place::new(2, 4));
        world.run(SECOND);
        world.converge();
        assert_eq!((over(&mut world, 5001), over(&mut world, 5002)), ([5].into(), [1, 5].into()));
        world.program_ends(id);
        world.dissociate(host(1), 0);
        world.associate(host(1), 0, Place::new(1, 4));
        world.run(SECOND);
        world.converge();
        assert_eq!((world.controller.snapshot(world.now).flows.len(), entries(&world)), (0, before));
        for wrong in [
            json!({"from": "10.0.1.1", "protocol": "udp", "ports": [1]}),
            json!({"from": "10.0.1.9", "to": "10.0.1.9", "protocol": "udp", "ports": [1]}),
            json!({"from": "10.0.1.9", "protocol": "sctp", "ports": [1]}),
            json!({"from": "10.0.1.9", "protocol": "udp", "ports": []}),
            json!({"from": "10.0.1.9", "protocol": "udp", "ports": [1, 2, 3, 4, 5, 6, 7, 8, 9]}),
            json!({"from": "10.0.1.9", "protocol": "udp", "ports": [7, 7]}),
            json!({"from": "10.0.9.9", "protocol": "udp", "ports": [7]}),
        ] {
            let again = world.program(3, host(1));
            refused(&mut world, again, "multipath", wrong);
            world.program_ends(again);
        }
        assert_eq!(world.controller.snapshot(world.now).flows.len(), 0, "nothing is left half-made");
    }
}

#[test]
fn blocked_senders_do_not_reach_the_host_that_asked() {
    for (version, tables) in STYLES {
        let mut world = asked(version, tables);
        let before = entries(&world);
        let reaches = |world: &mut World, from: Mac, to: Mac| {
            world.clear();
            world.send(from, datagram(from, to, 80, 3));
            world.run(MS(50));
            world.copies(to, 3..4) == [1]
        };
        for sender in ["10.0.1.2", "10.0.1.2/31", "02:00:00:00:01:02"] {
            let (one, again) = (world.program(1, host(1)), world.program(2, host(1)));
            let (_, result) = granted(&mut world, one, "access", json!({"from": sender}));
            assert_eq!(result["from"].as_str().unwrap().trim_end_matches("/32"), sender);
            granted(&mut world, again, "access", json!({"from": sender}));
            assert!(!reaches(&mut world, host(2), host(1)), "{version:?} {tables} {sender}");
            assert_eq!(reaches(&mut world, host(3), host(1)), !sender.contains('/'));
            for (from, to) in [(4, 1), (2, 3), (1, 2)] {
                assert!(reaches(&mut world, host(from), host(to)), "{version:?} {tables} {sender}: {from} to {to}");
            }
            // The sender moves.
            world.dissociate(host(2), 0);
            world.associate(host(2), 0, Place::new(3, 5));
            world.run(SECOND * 2);
            assert!(!reaches(&mut world, host(2), host(1)));
            world.dissociate(host(2), 0);
            world.associate(host(2), 0, Place::new(2, 4));
            world.run(SECOND * 2);
            world.program_ends(one);
            world.run(MS(100));
            assert!(!reaches(&mut world, host(2), host(1)), "the other program still wants it");
            world.program_ends(again);
            world.run(MS(100));
            assert!(reaches(&mut world, host(2), host(1)));
            world.converge();
            assert_eq!(entries(&world), before);
            // A host that moves too often counts as two.
            world.run(SECOND * 11);
        }
        let id = world.program(3, host(1));
        for wrong in ["", "10.0.0.0/33", "ff:ff:ff:ff:ff:ff", "fe80::1"] {
            assert!(refused(&mut world, id, "access", json!({"from": wrong})).contains("no Ethernet address"));
        }
    }
}

#[test]
fn programs_reserve_for_hosts_without_braid_beside_what_clients_reserve() {
    let mut world = asked(Version::V1_3, 254);
    let rates = |world: &World, number: u8| {
        let all = world.controller.snapshot(world.now).accesses;
        let of = all.into_iter().find(|state| state.access.id == access_id(number)).unwrap();
        (of.reserved.down.bps() / 1_000_000, of.reserved.up.bps() / 1_000_000)
    };
    let mbps = |down: u64, up: u64| json!({"down_bps": down * 1_000_000, "up_bps": up * 1_000_000});
    let (one, two) = (world.program(1, host(1)), world.program(2, host(1)));
    let (first, _) = granted(&mut world, one, "reserve", mbps(4, 0));
    world.run(SECOND * 2);
    granted(&mut world, two, "reserve", mbps(3, 2));
    world.run(SECOND * 2);
    assert_eq!(rates(&world, 1), (7, 2));
    let told = events(&world, one, first);
    assert_eq!(
        told.last().unwrap(),
        &json!({"kept": [{"access": access_id(1).to_string(), "down_bps": 7_000_000, "up_bps": 2_000_000}], "reason": null})
    );
    // 10 of 20 may be reserved.
    let reason = refused(&mut world, two, "reserve", mbps(4, 0));
    assert!(reason.contains("cannot reserve 11.0 Mbit/s towards the host") && reason.contains("ask for less"), "{reason}");
    assert!(refused(&mut world, two, "reserve", mbps(0, 0)).contains("nothing is reserved"));
    assert!(refused(&mut world, two, "reserve", json!({"down_bps": u64::MAX, "up_bps": u64::MAX})).contains("cannot reserve"));
    assert!(refused(&mut world, two, "reserve", json!({"down_bps": -1})).contains("invalid value"));
    // The host joins as a client and reserves, too. When it leaves, what programs have stays.
    world.make_client(host(1));
    world.controller.report(world.now, host(1), Report::Reserve(PerDirection { down: Rate::from_mbps(2), up: Rate::ZERO })).unwrap();
    world.run(SECOND * 2);
    assert_eq!(rates(&world, 1), (9, 2));
    world.client_left(host(1));
    world.run(SECOND * 2);
    assert_eq!(rates(&world, 1), (7, 2));
    // It moves to where the reservation does not fit: the program is told.
    let other = world.program(3, host(2));
    granted(&mut world, other, "reserve", mbps(6, 0));
    world.dissociate(host(1), 0);
    world.associate(host(1), 0, Place::new(2, 4));
    world.run(SECOND * 2);
    assert!(events(&world, one, first).last().unwrap()["reason"].as_str().unwrap().contains("cannot reserve"));
    world.program_ends(other);
    world.run(SECOND * 2);
    assert_eq!((rates(&world, 2), events(&world, one, first).last().unwrap()["reason"].clone()), ((7, 2), Value::Null));
    world.program_ends(one);
    world.program_ends(two);
    world.run(SECOND * 3);
    assert_eq!((rates(&world, 1), rates(&world, 2)), ((0, 0), (0, 0)));
}

#[test]
fn notices_say_what_happens_to_the_host_and_no_more() {
    let mut world = asked(Version::V1_3, 254);
    let settings = Settings { hosts: [(host(2), HostRights::Sees(Sees::Network))].into(), ..Settings::default() };
    world.sfnet = services(settings);
    let (one, two) = (world.program(1, host(1)), world.program(2, host(2)));
    let (handover, result) = granted(&mut world, one, "notices", json!({"about": ["handover"]}));
    assert_eq!(result, json!({"at": ["1:4"]}));
    let (all, _) = granted(&mut world, one, "notices", Value::Null);
    let (links, _) = granted(&mut world, two, "notices", json!({"about": ["link", "load"]}));
    world.set_port(Place::new(3, 2), false);
    world.run(MS(200));
    assert_eq!(events(&world, one, all), [] as [Value; 0]);
    assert_eq!(events(&world, two, links), [json!({"about": "link", "ends": ["3:2", "4:3"], "up": false})]);
    world.dissociate(host(1), 0);
    world.associate(host(1), 0, Place::new(2, 4));
    world.run(SECOND);
    let moved = json!({"about": "handover", "to": [{"port": "2:4", "access": access_id(2).to_string()}]});
    assert_eq!(events(&world, one, handover), std::slice::from_ref(&moved));
    assert!(events(&world, one, all).contains(&moved));
    // Load: the model's time runs, and so do measurements.
    world.stream(SERVER, host(1), 80, 10, 60_000, Duration::from_micros(50));
    for _ in 0..5 {
        world.run(SECOND);
        world.sfnet.measured(world.now, &mut world.controller);
    }
    world.run(MS(10));
    let busy =
        |event: &Value| event["about"] == "load" && event["access"] == access_id(2).to_string() && event["percent"].as_u64() > Some(10);
    assert!(events(&world, one, all).iter().any(busy), "{:?}", events(&world, one, all));
    assert!(events(&world, one, handover).len() == 1);
    assert!(refused(&mut world, one, "notices", json!({"about": ["weather"]})).contains("unknown variant `weather`"));
}

#[test]
fn the_state_is_what_the_program_may_see() {
    let mut world = asked(Version::V1_3, 254);
    world.sfnet = services(Settings { hosts: [(host(2), HostRights::Sees(Sees::Network))].into(), ..Settings::default() });
    world.run(SECOND * 5);
    let (one, two) = (world.program(1, host(1)), world.program(2, host(2)));
    let own = state(&mut world, one, Some("10.0.1.4"));
    assert_eq!(own.as_object().unwrap().keys().collect::<Vec<_>>(), ["host", "path"]);
    assert_eq!((&own["host"]["mac"], &own["host"]["attachments"][0]["port"]), (&json!(host(1).to_string()), &json!("1:4")));
    assert_eq!(own["host"]["attachments"][0]["access"]["capacity_bps"], 20_000_000);
    // A link takes 1 ms in the model, and a connection 2 ms in each direction.
    assert_eq!(own["path"], json!({"to": host(4).to_string(), "links": 2, "delay_us": 2000}));
    let all = state(&mut world, two, Some("02:00:00:00:01:04"));
    assert_eq!(all["path"]["over"].as_array().unwrap().len(), 2);
    assert_eq!(
        (all["switches"].as_array().unwrap().len(), all["links"].as_array().unwrap().len(), all["accesses"].as_array().unwrap().len()),
        (5, 6, 4)
    );
    assert!(all["links"].as_array().unwrap().iter().all(|link| link["delay_us"] == 1000), "{}", all["links"]);
    let text = all.to_string();
    assert!(!text.contains(&host(3).to_string()) && !text.contains("10.0.1.3"), "other hosts are not shown: {text}");
    world.line(one, r#"{"ask":"state","id":6,"to":"10.0.1.77"}"#);
    assert!(matches!(world.said[&one].last(), Some(Say::Refused { id: Some(6), .. })));
}

#[test]
fn a_program_that_asks_for_everything_gets_its_share_and_leaves_nothing() {
    let mut world = asked(Version::V1_3, 254);
    let quotas = Quotas { sessions: 3, leases_of_session: 8, leases_of_host: 12, leases: 20, requests: 1000, ..Quotas::default() };
    world.sfnet = services(Settings { quotas, ..Settings::default() });
    let before = entries(&world);
    let greedy: Vec<SessionId> = (1..=4).map(|number| world.program(number, host(1))).collect();
    assert!(world.closed.contains(&greedy[3]) && format!("{:?}", world.said[&greedy[3]]).contains("has 3 connections already"));
    let mut reasons = BTreeSet::new();
    for number in 0..200u32 {
        let id = greedy[number as usize % 3];
        let (service, with) = match number % 4 {
            0 => ("multicast", join(&format!("239.193.{}.1", number % 256))),
            1 => ("access", json!({"from": format!("10.{number}.0.0/16")})),
            2 => ("notices", Value::Null),
            _ => ("reserve", json!({"down_bps": 1000})),
        };
        world.line(id, &json!({"ask": "start", "id": number, "service": service, "with": with}).to_string());
    }
    world.run(SECOND * 2);
    for id in &greedy[..3] {
        for say in &world.said[id] {
            if let Say::Refused { reason, .. } = say {
                reasons.insert(reason.split(": ").nth(1).unwrap_or_default().to_owned());
            }
        }
    }
    assert_eq!(world.sfnet.counts(), (3, 12));
    assert!(reasons.contains("this host has 12 leases already"), "{reasons:?}");
    // Others are served.
    let other = world.program(9, host(2));
    granted(&mut world, other, "multicast", join("239.192.1.2"));
    world.program_ends(other);
    greedy.into_iter().for_each(|id| world.program_ends(id));
    world.run(SECOND * 40);
    world.converge();
    assert_eq!((world.sfnet.counts(), entries(&world)), ((0, 0), before));
    assert!(world.switches[&1].meters.is_empty());
}

#[test]
fn a_program_that_babbles_or_asks_too_often_is_stopped() {
    let mut world = asked(Version::V1_3, 254);
    let (id, other) = (world.program(1, host(1)), world.program(2, host(2)));
    for number in 0..100 {
        world.line(id, &json!({"ask": "state", "id": number}).to_string());
    }
    let refusals = world.said[&id]
        .iter()
        .filter(|say| matches!(say, Say::Refused { reason, .. } if reason.contains("more than 50 times a second")))
        .count();
    assert_eq!(refusals, 50);
    state(&mut world, other, None);
    world.run(SECOND);
    state(&mut world, id, None);
    for _ in 0..16 {
        world.line(id, "GET / HTTP/1.1");
    }
    assert!(world.closed.contains(&id) && matches!(world.said[&id].last(), Some(Say::Bye { .. })));
    world.line(id, r#"{"ask":"state","id":1}"#);
    assert_eq!(world.sfnet.counts(), (1, 0));
}

#[test]
fn rights_that_change_end_what_is_not_allowed_any_more() {
    let mut world = asked(Version::V1_3, 254);
    let (one, two) = (world.program(1, host(1)), world.program(2, host(2)));
    granted(&mut world, one, "multicast", join("239.192.1.2"));
    let (lease, _) = granted(&mut world, two, "multicast", join("239.192.1.2"));
    granted(&mut world, two, "notices", Value::Null);
    let services = Some(BTreeSet::from(["notices".to_owned()]));
    let settings = Settings { services, hosts: [(host(1), HostRights::Nothing)].into(), ..Settings::default() };
    world.grant(settings);
    world.run(MS(100));
    assert!(world.closed.contains(&one) && !world.closed.contains(&two));
    assert!(world.said[&two].iter().any(|say| matches!(say, Say::Ended { id: None, lease: ended, .. } if *ended == lease)));
    assert_eq!((world.sfnet.counts(), world.controller.snapshot(world.now).groups.len()), ((1, 1), 0));
    assert!(refused(&mut world, two, "multicast", join("239.192.1.2")).contains("no service \"multicast\""));
    let again = world.program(3, host(1));
    assert!(world.closed.contains(&again));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn whatever_programs_do_nothing_of_it_stays(script in prop::collection::vec(any::<u8>(), 1..200)) {
        entry::sfnet(&script);
    }
}
