//! Hosts that attack the network, and switches that forward what the controller does not see.

use std::time::Duration;

use braid_model::Time;
use braid_network::{AccessKind, Config, ConnectionId, Controller, Event, Place};
use braid_openflow::ErrorCode;

use crate::basics::{STYLES, two_hosts};
use crate::mobility::campus;
use crate::support::frames::{announcement, datagram, host};
use crate::support::world::{MS, World};

fn broadcasts_arrive_once(world: &mut World) {
    world.clear();
    world.send(host(1), announcement(host(1), 7));
    world.run(MS(200));
    assert!(world.loops.is_empty(), "a broadcast circles");
    assert_eq!(world.copies(host(2), 7..8), [1]);
}

#[test]
fn a_switch_that_is_gone_but_forwards_makes_no_loop() {
    for (version, tables) in STYLES {
        let mut world = two_hosts(version, tables);
        world.disconnect(2);
        world.run(Duration::from_secs(70));
        assert!(world.events.iter().any(|event| matches!(event, Event::SwitchGone { .. })));
        broadcasts_arrive_once(&mut world);
    }
}

#[test]
fn a_switch_that_never_finds_the_new_controller_makes_no_loop() {
    for (version, tables) in STYLES {
        let mut world = two_hosts(version, tables);
        world.replace_controller(Config::new([9; 32]));
        for _ in 0..20 {
            world.disconnect(2);
            world.run(MS(30));
        }
        world.run(Duration::from_secs(70));
        broadcasts_arrive_once(&mut world);
    }
}

#[test]
fn a_switch_that_drops_lldp_frames_makes_no_loop() {
    for (version, tables) in STYLES {
        let mut world = two_hosts(version, tables);
        world.drops_lldp.extend(1..=5);
        world.run(Duration::from_secs(10));
        assert_eq!(world.controller.snapshot(world.now).links, []);
        world.clear();
        world.send(host(1), announcement(host(1), 7));
        world.run(MS(200));
        assert!(world.loops.is_empty(), "a broadcast circles");
    }
}

#[test]
fn a_port_of_a_link_serves_hosts_after_it_is_plugged_anew() {
    for (version, tables) in STYLES {
        let mut world = two_hosts(version, tables);
        let (one, other) = (Place::new(1, 1), Place::new(2, 2));
        world.set_port(one, false);
        world.cables.retain(|from, _| *from != one && *from != other);
        world.run(MS(500));
        world.set_port(one, true);
        world.run(Duration::from_secs(3));
        world.associate(host(3), 0, one);
        world.run(MS(200));
        world.clear();
        world.send(host(2), datagram(host(2), host(3), 80, 1));
        world.run(MS(100));
        assert_eq!(world.copies(host(3), 1..2), [1]);
    }
}

#[test]
fn a_host_that_returns_lldp_frames_does_not_cut_off_its_access_point() {
    let (version, tables) = STYLES[2];
    let mut world = campus(version, tables, AccessKind::Wifi);
    world.associate(host(1), 0, Place::new(1, 4));
    world.run(MS(500));
    world.reflects.insert(Place::new(1, 4));
    world.run(Duration::from_secs(5));
    world.clear();
    world.send(host(9), datagram(host(9), host(1), 80, 1));
    world.run(MS(100));
    assert_eq!(world.copies(host(1), 1..2), [1]);
    let text = world.events.iter().find(|event| matches!(event, Event::FalseLink { .. })).unwrap().to_string();
    assert!(text.contains("access point"), "{text}");
}

#[test]
fn a_host_at_a_cable_cannot_take_the_address_of_a_client() {
    for (version, tables) in STYLES {
        let mut world = campus(version, tables, AccessKind::Wifi);
        world.make_client(host(1));
        world.associate(host(1), 0, Place::new(1, 4));
        world.associate(host(2), 0, Place::new(5, 7));
        world.run(MS(500));
        world.send(host(2), announcement(host(1), 1 << 60));
        world.run(MS(500));
        world.clear();
        world.send(host(9), datagram(host(9), host(1), 80, 1));
        world.run(MS(100));
        assert_eq!(world.copies(host(1), 1..2), [1], "{version:?}");
    }
}

#[test]
fn a_host_that_floods_leaves_others_their_share_of_the_slow_path() {
    let mut world = two_hosts(STYLES[0].0, STYLES[0].1);
    world.clear();
    world.stream(host(2), host(99), 80, 1000, 3000, MS(1));
    // Nobody knows where host 98 is: the controller sends it on to all.
    world.associate(host(1), 0, Place::new(1, 4));
    world.hosts.entry(host(98)).or_default().radios.insert(0, Place::new(3, 4));
    world.stream(host(1), host(98), 80, 1, 20, MS(100));
    world.run(Duration::from_secs(3));
    assert!(world.copies(host(98), 1..21).iter().all(|copies| *copies == 1));
}

#[test]
fn a_switch_that_knows_no_group_is_not_asked_without_end() {
    let mut world = two_hosts(STYLES[2].0, STYLES[2].1);
    let switch = world.switches.get_mut(&3).unwrap();
    (switch.refuses, switch.flow_mods) = (Some(ErrorCode::BadActionBadOutGroup), 0);
    world.associate(host(3), 0, Place::new(4, 4));
    world.run(Duration::from_secs(5));
    let mods = world.switches[&3].flow_mods;
    assert!(mods < 20, "{mods} flow-mods");
}

#[test]
fn a_peer_without_a_common_version_gets_the_reason() {
    let (now, id) = (Time::ZERO, ConnectionId(1));
    let mut controller = Controller::new(Config::new([7; 32]), now);
    controller.connected(now, id, "192.0.2.1:40000");
    controller.poll_output(id, &mut Vec::new());
    // A hello of OpenFlow 1.2 with a bitmap that has only 1.2.
    controller.receive(now, id, &[3, 0, 0, 16, 0, 0, 0, 1, 0, 1, 0, 8, 0, 0, 0, 8]);
    let (closed, bytes) = controller.poll_closed().unwrap();
    assert_eq!((bytes[1], closed), (1, id), "an error");
}

#[test]
fn the_load_of_a_switch_that_is_away_is_not_known() {
    let (version, tables) = STYLES[2];
    let mut world = campus(version, tables, AccessKind::Wifi);
    world.run(Duration::from_secs(6));
    let loads =
        |world: &World| -> Vec<bool> { world.controller.snapshot(world.now).accesses.iter().map(|access| access.load.is_some()).collect() };
    assert_eq!(loads(&world), [true; 4]);
    world.disconnect(1);
    world.run(Duration::from_secs(6));
    assert_eq!(loads(&world), [false, true, true, true]);
}
