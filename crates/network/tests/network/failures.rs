//! Bad days: switches that refuse, vanish, restart or lie, a controller that is restarted, hostile hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::Mac;
use braid_network::mobility::{HoldFrom, Hoolock, NCast};
use braid_network::{AccessKind, Config, Event, Phase, Place, Request, Scope};
use braid_openflow::flow::PacketReason;
use braid_openflow::ids::{Cookie, TableId};
use braid_openflow::{CloseReason, ErrorCode, Version};
use bytes::Bytes;

use crate::basics::{STYLES, ring, two_hosts};
use crate::mobility::campus;
use crate::support::frames::{announcement, datagram, host};
use crate::support::world::{MS, World};

fn entries(world: &World) -> BTreeMap<u64, BTreeSet<String>> {
    world.switches.iter().map(|(datapath, switch)| (*datapath, switch.entries())).collect()
}

#[test]
fn a_new_controller_loses_no_packet_and_touches_no_correct_entry() {
    for (version, tables) in STYLES {
        let mut world = two_hosts(version, tables);
        let before = entries(&world);
        world.switches.values_mut().for_each(|switch| switch.flow_mods = 0);
        world.stream(host(1), host(2), 80, 1, 4000, MS(10));
        world.stream(host(2), host(1), 80, 5001, 4000, MS(10));
        world.after(MS(1000), |world| world.replace_controller(Config::new([9; 32])));
        world.run(Duration::from_secs(41));
        world.converge();
        assert!(world.copies(host(2), 1..4001).iter().all(|copies| *copies == 1), "{version:?}");
        assert!(world.copies(host(1), 5001..9001).iter().all(|copies| *copies == 1), "{version:?}");
        assert_eq!(entries(&world), before);
        let hosts: Vec<_> = world.controller.snapshot(world.now).hosts.into_iter().map(|state| (state.host, state.active)).collect();
        assert_eq!(hosts, [(host(1), vec![Place::new(1, 4)]), (host(2), vec![Place::new(5, 4)])], "{version:?}");
        // Broadcasts follow the edge ports that are known meanwhile. All else stays.
        let mods: usize = world.switches.values().map(|switch| switch.flow_mods).sum();
        assert!(tables == 1 || mods == 0, "{mods} flow-mods");
    }
}

#[test]
fn a_switch_that_comes_back_late_keeps_standing_flows() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.stream(host(1), host(2), 80, 1, 2500, MS(10));
    // The switch in the middle of the path is the last to find the new controller.
    world.after(MS(1000), |world| {
        world.replace_controller(Config::new([9; 32]));
        let rest: Vec<u64> = vec![3];
        for datapath in rest {
            world.after(MS(100), move |world| world.disconnect(datapath));
            world.after(MS(120), move |world| world.disconnect(datapath));
            world.after(MS(15_000), move |world| world.connect(datapath));
        }
    });
    world.run(Duration::from_secs(26));
    world.converge();
    assert!(world.copies(host(2), 1..2501).iter().all(|copies| *copies == 1));
}

#[test]
fn a_full_table_is_avoided_and_named() {
    for (version, tables) in STYLES {
        let mut world = ring(version, tables);
        world.converge();
        // The shortest path from 1 to 3 leads over 2.
        let switch = world.switches.get_mut(&2).unwrap();
        switch.capacity = switch.flows.len();
        world.associate(host(1), 0, Place::new(1, 4));
        world.associate(host(2), 0, Place::new(3, 4));
        world.run(MS(500));
        world.clear();
        world.stream(host(1), host(2), 80, 1, 10, MS(1));
        world.run(MS(100));
        assert!(world.copies(host(2), 1..11).iter().all(|copies| *copies == 1), "{version:?}");
        let refusal = world.events.iter().find(|event| matches!(event, Event::RuleRefused { code: ErrorCode::FlowModFailedTableFull, .. }));
        let text = refusal.unwrap().to_string();
        assert!(text.contains("0000000000000002") && text.contains("full") && text.contains("limit the hosts"), "{text}");
        world.switches.get_mut(&2).unwrap().capacity = 1000;
        world.run(Duration::from_secs(35));
        world.converge();
        assert!(world.loops.is_empty());
    }
}

#[test]
fn a_refused_handover_goes_back() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    world.controller.add_manager(Box::new(Hoolock::new(Duration::from_secs(1), HoldFrom::Attached)));
    world.make_client(host(1));
    world.request(Request::UseManager { scope: Scope::Host(host(1)), manager: "hoolock".into() }).unwrap();
    world.associate(host(1), 0, Place::new(1, 4));
    world.run(MS(200));
    world.switches.get_mut(&2).unwrap().refuses = Some(ErrorCode::FlowModFailedEperm);
    world.clear();
    world.stream(host(9), host(1), 80, 1, 1000, MS(5));
    world.after(MS(500), |world| world.associate(host(1), 1, Place::new(2, 4)));
    world.run(MS(5500));
    assert!(world.events.iter().any(|event| *event == Event::RolledBack { host: host(1) }));
    assert!(world.copies(host(1), 1..1001).iter().all(|copies| *copies == 1));
    assert!(world.hosts[&host(1)].radios.contains_key(&0), "the old link stays");
    let active = world.controller.snapshot(world.now).hosts.iter().find(|state| state.host == host(1)).unwrap().active.clone();
    assert_eq!(active, [Place::new(1, 4)]);
}

#[test]
fn a_switch_without_groups_gets_lists_of_outputs() {
    let mut world = World::new(Config::new([7; 32]), 1);
    for datapath in 1..=2 {
        world.add_switch(datapath, Version::V1_3, 254, 6);
        world.switches.get_mut(&datapath).unwrap().has_groups = false;
    }
    world.cable(Place::new(1, 1), Place::new(2, 1));
    world.run(Duration::from_secs(3));
    world.converge();
    world.associate(host(1), 0, Place::new(1, 4));
    world.associate(host(2), 0, Place::new(2, 4));
    world.run(MS(200));
    world.clear();
    world.send(host(1), announcement(host(1), 7));
    world.run(MS(50));
    assert_eq!(world.copies(host(2), 7..8), [1]);
}

#[test]
fn a_lost_connection_changes_no_path_until_it_is_final() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.stream(host(1), host(2), 80, 1, 10_000, MS(10));
    world.after(MS(1000), |world| world.disconnect(3));
    world.run(Duration::from_secs(20));
    assert!(world.events.iter().any(|event| matches!(event, Event::SwitchAway { .. })));
    assert!(world.controller.snapshot(world.now).switches.iter().any(|switch| matches!(switch.phase, Phase::Away { .. })));
    world.connect(3);
    world.run(Duration::from_secs(81));
    world.converge();
    assert!(world.copies(host(2), 1..10_001).iter().all(|copies| *copies == 1));
}

#[test]
fn a_switch_that_lost_its_tables_gets_them_again() {
    for (version, tables) in STYLES {
        let mut world = two_hosts(version, tables);
        let before = entries(&world);
        world.switches.get_mut(&3).unwrap().restart();
        world.disconnect(3);
        world.run(MS(100));
        world.connect(3);
        world.run(Duration::from_secs(3));
        world.converge();
        assert_eq!(entries(&world), before, "{version:?}");
    }
}

#[test]
fn entries_that_vanish_are_found_by_an_audit() {
    let mut world = two_hosts(Version::V1_3, 254);
    // A group has another number afterwards: numbers that were given up rest.
    let plain = |world: &World| -> Vec<Vec<String>> {
        let plain = |entry: &String| match entry.split_once("GroupId(") {
            Some((before, after)) => format!("{before}{}", after.trim_start_matches(|c: char| c.is_ascii_digit())),
            None => entry.clone(),
        };
        entries(world).values().map(|entries| entries.iter().map(plain).collect()).collect()
    };
    let before = plain(&world);
    world.switches.get_mut(&3).unwrap().flows.retain(|flow| flow.table == 0);
    world.run(Duration::from_secs(65));
    assert_eq!(plain(&world), before);
}

#[test]
fn a_silent_switch_does_not_hold_up_the_others() {
    let mut world = two_hosts(Version::V1_3, 254);
    // Its connection stays, but it answers nothing.
    let switch = world.switches.get_mut(&4).unwrap();
    switch.connection = None;
    world.associate(host(3), 0, Place::new(2, 4));
    world.run(MS(1500));
    world.clear();
    world.send(host(1), datagram(host(1), host(3), 80, 1));
    world.run(MS(50));
    assert_eq!(world.copies(host(3), 1..2), [1]);
    assert!(world.events.iter().any(|event| matches!(event, Event::SwitchSilent { .. } | Event::SwitchAway { .. })));
}

#[test]
fn a_switch_that_does_not_read_loses_its_connection() {
    let mut config = Config::new([7; 32]);
    config.connection.max_queued = braid_model::ByteCount::new(2500);
    let mut world = World::new(config, 1);
    for datapath in 1..=2 {
        world.add_switch(datapath, Version::V1_3, 254, 6);
    }
    world.cable(Place::new(1, 1), Place::new(2, 1));
    world.converge();
    world.associate(host(1), 0, Place::new(1, 4));
    world.run(MS(100));
    world.deaf.insert(2);
    // Packets to unknown hosts go out of all edge ports, until too much waits. Then a new host needs an entry.
    world.stream(host(1), host(99), 80, 1, 30, MS(1));
    world.run(MS(100));
    world.associate(host(2), 0, Place::new(2, 4));
    world.run(MS(100));
    let is_closed = |event: &Event| matches!(event, Event::SwitchAway { datapath, reason: CloseReason::Overflow, .. } if datapath.0 == 2);
    assert!(world.events.iter().any(is_closed));
}

#[test]
fn what_waits_for_all_switches_together_is_bounded() {
    let mut world = World::new(Config { max_waiting: braid_model::ByteCount::new(6000), ..Config::new([7; 32]) }, 1);
    for datapath in 1..=2 {
        world.add_switch(datapath, Version::V1_3, 254, 6);
    }
    world.cable(Place::new(1, 1), Place::new(2, 1));
    world.converge();
    world.deaf.insert(2);
    // One port gets a quarter of the packets that the controller forwards.
    for port in 3..6u32 {
        let from = host(port as u8);
        world.associate(from, 0, Place::new(1, port));
        world.stream(from, host(99), 80, 100 * u64::from(port), 30, MS(1));
    }
    world.run(MS(500));
    let overflows = |event: &Event| match event {
        Event::SwitchAway { datapath, reason: CloseReason::Overflow, .. } => Some(datapath.0),
        _ => None,
    };
    assert_eq!(world.events.iter().filter_map(overflows).collect::<Vec<_>>(), [2]);
}

#[test]
fn a_host_cannot_forge_a_link_and_its_made_up_addresses_stay_bounded() {
    let mut world = two_hosts(Version::V1_3, 254);
    // A host replays what it received, and sends the same with another place.
    let mut frame = vec![0x01, 0x80, 0xc2, 0, 0, 0x0e, 2, 0x42, 0x52, 0x44, 0, 0, 0x88, 0xcc];
    frame.extend([2, 9, 7, 0, 0, 0, 0, 0, 0, 0, 1, 4, 5, 7, 0, 0, 0, 5, 6, 2, 0, 120]);
    frame.extend([254, 28, 0x42, 0x52, 0x44, 1]);
    frame.extend([0; 24]);
    frame.extend([0, 0]);
    world.send(host(2), Bytes::from(frame));
    world.run(MS(100));
    assert!(world.events.iter().any(|event| matches!(event, Event::FalseLink { .. })));
    assert_eq!(world.controller.snapshot(world.now).links.len(), 5);
    for number in 0..2000u32 {
        let [a, b, c, d] = number.to_be_bytes();
        let made_up = Mac([6, 6, a, b, c, d]);
        world.send(host(2), datagram(made_up, host(1), 80, (1 << 60) + u64::from(number)));
    }
    world.run(Duration::from_secs(3));
    let hosts = world.controller.snapshot(world.now).hosts;
    assert!(hosts.len() <= 2 + 256 && hosts.iter().any(|state| state.host == host(1)), "{}", hosts.len());
    assert!(world.events.iter().any(|event| matches!(event, Event::HostRefused { .. })));
}

#[test]
fn packet_ins_of_any_content_do_no_harm() {
    let mut world = two_hosts(Version::V1_0, 1);
    for number in 0..20_000u64 {
        let length = world.chance() % 120;
        let mut frame: Vec<u8> = (0..length).map(|_| (world.chance() & 0xff) as u8).collect();
        if frame.len() > 24 && number % 2 == 0 {
            let kinds = [[0x08, 0x06], [0x08, 0x00], [0x86, 0xdd], [0x88, 0xcc], [0x81, 0x00]];
            frame[12..14].copy_from_slice(&kinds[(number / 2 % 5) as usize]);
            frame[6] &= 0xfe;
            frame[14] = 0x45;
            frame[23] = 17;
            frame[20] = 58;
        }
        let port = (world.chance() % 8) as u32;
        world.switches.get_mut(&2).unwrap().packet_in(port, &frame.into(), PacketReason::NoMatch, Cookie(0), TableId(0));
        if number % 500 == 0 {
            world.run(MS(10));
        }
    }
    world.run(MS(100));
    world.clear();
    world.send(host(1), datagram(host(1), host(2), 80, 1));
    world.run(MS(100));
    assert_eq!(world.copies(host(2), 1..2), [1]);
}

#[test]
fn two_hosts_with_one_address_are_said() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    for number in 0..12u64 {
        let place = Place::new(1 + number % 2, 4);
        world.after(MS(number * 300), move |world| {
            world.hosts.entry(host(1)).or_default().radios.clear();
            world.associate(host(1), 0, place);
        });
    }
    world.run(Duration::from_secs(5));
    let text = world.events.iter().find(|event| matches!(event, Event::DuplicateHost { .. })).unwrap().to_string();
    assert!(
        text.contains("02:00:00:00:01:01") && text.contains("switch 0000000000000001") && text.contains("switch 0000000000000002"),
        "{text}"
    );
}

#[test]
fn bicast_survives_a_link_that_fails_meanwhile() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    world.controller.add_manager(Box::new(NCast::new(Duration::from_secs(3), 2)));
    world.make_client(host(1));
    world.request(Request::UseManager { scope: Scope::Host(host(1)), manager: "n-cast".into() }).unwrap();
    world.associate(host(1), 0, Place::new(1, 4));
    world.run(MS(500));
    world.clear();
    world.stream(host(9), host(1), 80, 1, 1000, MS(5));
    world.after(MS(1000), |world| world.associate(host(1), 1, Place::new(3, 4)));
    world.after(MS(2000), |world| world.set_port(Place::new(1, 4), false));
    world.run(MS(6000));
    let mut delivered = world.hosts[&host(1)].delivered.clone();
    delivered.sort_unstable();
    assert_eq!(delivered, (1..=1000).collect::<Vec<_>>());
}

#[test]
fn a_clock_that_jumps_loses_neither_links_nor_hosts() {
    let mut world = two_hosts(Version::V1_3, 254);
    world.now = world.now + Duration::from_secs(4000);
    world.run(Duration::from_secs(5));
    // Connections time out, and come back.
    world.converge();
    let snapshot = world.controller.snapshot(world.now);
    assert_eq!((snapshot.links.len(), snapshot.hosts.len()), (5, 2));
}
