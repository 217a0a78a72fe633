//! Learning, forwarding, links that fail.

use braid_network::{Config, Event, Place};
use braid_openflow::Version;

use crate::support::frames::{announcement, datagram, host};
use crate::support::world::{MS, World};

/// Switches 1 to 4 in a ring, 5 behind 3. Ports 1 and 2 go around the ring, 3 leads to 5, hosts are behind ports 4 to 6.
pub(crate) fn ring(version: Version, tables: u8) -> World {
    ring_with(Config::new([7; 32]), version, tables)
}

pub(crate) fn ring_with(config: Config, version: Version, tables: u8) -> World {
    let mut world = World::new(config, 1);
    for datapath in 1..=5 {
        world.add_switch(datapath, version, tables, 6);
    }
    for (one, other) in [(1, 2), (2, 3), (3, 4), (4, 1)] {
        world.cable(Place::new(one, 1), Place::new(other, 2));
    }
    world.cable(Place::new(3, 3), Place::new(5, 3));
    world
}

pub(crate) const STYLES: [(Version, u8); 3] = [(Version::V1_0, 1), (Version::V1_3, 1), (Version::V1_3, 254)];

/// Hosts 1 and 2 at switches 1 and 5 of the ring.
pub(crate) fn two_hosts(version: Version, tables: u8) -> World {
    let mut world = ring(version, tables);
    world.converge();
    world.associate(host(1), 0, Place::new(1, 4));
    world.associate(host(2), 0, Place::new(5, 4));
    world.run(MS(200));
    world.converge();
    world.clear();
    world
}

#[test]
fn hosts_reach_each_other_once() {
    for (version, tables) in STYLES {
        let mut world = ring(version, tables);
        world.converge();
        let places = [Place::new(1, 4), Place::new(2, 4), Place::new(5, 4), Place::new(5, 5)];
        for (number, place) in places.into_iter().enumerate() {
            world.associate(host(number as u8), 0, place);
        }
        world.run(MS(200));
        world.converge();
        world.clear();
        let mut number = 0;
        for from in 0..4 {
            for to in (0..4).filter(|to| *to != from) {
                number += 1;
                world.send(host(from), datagram(host(from), host(to), 80, number));
                world.run(MS(50));
                for other in 0..4 {
                    let copies = world.copies(host(other), number..number + 1);
                    assert_eq!(copies, [usize::from(other == to)], "{version:?} {from} to {to}, at {other}");
                }
            }
        }
        // A broadcast reaches each host once, over each link at most once.
        world.send(host(0), announcement(host(0), 900));
        world.run(MS(50));
        for other in 1..4 {
            assert_eq!(world.copies(host(other), 900..901), [1], "{version:?}");
        }
        assert!(world.loops.is_empty());
    }
}

#[test]
fn a_link_that_fails_is_avoided_at_once() {
    for (version, tables) in STYLES {
        let mut world = two_hosts(version, tables);
        world.stream(host(1), host(2), 80, 1, 1000, MS(1));
        world.after(MS(300), |world| world.set_port(Place::new(3, 2), false));
        world.run(MS(1500));
        let lost: Vec<u64> = (1..=1000).filter(|number| !world.hosts[&host(2)].arrived.contains(number)).collect();
        // The control connection takes 2 ms each way.
        assert!(lost.len() <= 25, "{version:?}: {} lost", lost.len());
        assert!(world.loops.is_empty() && world.hosts[&host(2)].arrived.len() == 1000 - lost.len());
    }
}

#[test]
fn two_switches_with_one_id_are_named() {
    let mut world = ring(Version::V1_3, 254);
    world.converge();
    world.add_switch(77, Version::V1_3, 254, 2);
    world.switches.get_mut(&77).unwrap().datapath = 3;
    world.run(MS(200));
    let text = world.events.iter().find(|event| matches!(event, Event::DuplicateDatapath { .. })).unwrap().to_string();
    assert!(text.contains("peer-3") && text.contains("peer-77") && text.contains("0000000000000003"), "{text}");
}
