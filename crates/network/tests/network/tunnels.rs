//! Links that fail or lose without a port that goes down, as tunnels do.

use std::time::Duration;

use braid_network::mobility::{HoldFrom, Hoolock};
use braid_network::{AccessKind, Event, Place, Request, RequestError};
use braid_openflow::Version;

use crate::basics::two_hosts;
use crate::mobility::{access_id, campus};
use crate::support::frames::host;
use crate::support::world::{MS, World};

/// Both ends of the cable to switch 5 of the ring.
const CABLE: [Place; 2] = [Place::new(3, 3), Place::new(5, 3)];

/// The cables with these ends pass frames of this length.
fn pass(world: &mut World, ends: &[Place], longest: usize) {
    world.longest.extend(ends.iter().map(|end| (*end, longest)));
}

fn links(world: &World) -> usize {
    world.controller.snapshot(world.now).links.len()
}

fn said(world: &World, what: &str) -> usize {
    world.events.iter().filter(|event| event.to_string().contains(what)).count()
}

#[test]
fn a_link_that_drops_large_frames_is_reported_once_and_stays() {
    for (version, tables) in [(Version::V1_0, 1), (Version::V1_3, 254)] {
        let mut world = two_hosts(version, tables);
        world.run(Duration::from_secs(3));
        let full = |world: &World| world.controller.snapshot(world.now).full_frames;
        assert!(full(&world).len() == 5 && full(&world).values().all(|full| *full), "{:?}", full(&world));
        // In one direction only.
        pass(&mut world, &CABLE[..1], 1400);
        world.run(Duration::from_secs(120));
        assert_eq!((links(&world), said(&world, "drops frames of 1500 bytes")), (5, 1));
        assert_eq!(full(&world).values().filter(|full| !**full).count(), 1);
        pass(&mut world, &CABLE[..1], 1514);
        world.run(Duration::from_secs(15));
        assert_eq!((links(&world), said(&world, "passes frames of 1500 bytes now")), (5, 1));
        assert!(full(&world).values().all(|full| *full));
        assert_eq!(said(&world, "no link between"), 0);
    }
}

#[test]
fn a_port_that_its_switch_calls_live_no_more_has_no_link_until_it_does() {
    let mut world = two_hosts(Version::V1_3, 254);
    let end = Place::new(3, 2);
    world.test(end, true);
    world.run(MS(100));
    assert_eq!(links(&world), 5);
    pass(&mut world, &[end, Place::new(2, 1)], 0);
    world.test(end, false);
    world.run(MS(100));
    assert_eq!(links(&world), 4, "it does not wait for missed frames");
    world.stream(host(1), host(2), 80, 1, 100, MS(1));
    world.run(MS(300));
    assert_eq!(world.hosts[&host(2)].arrived.len(), 100, "packets go around it");
    // The frames are missed as well, and come back before the test does: there is no link yet.
    world.run(Duration::from_secs(10));
    pass(&mut world, &[end, Place::new(2, 1)], 1514);
    world.run(Duration::from_secs(3));
    assert_eq!(links(&world), 4);
    world.test(end, true);
    world.run(MS(100));
    assert_eq!(links(&world), 5);
    assert_eq!((said(&world, "no link between"), said(&world, "link between port")), (1, 5 + 2), "lost once, found once");
    assert!(world.loops.is_empty());
}

#[test]
fn a_switch_that_is_cut_off_serves_no_clients_that_are_attached_elsewhere() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    world.controller.add_manager(Box::new(Hoolock::new(Duration::from_secs(600), HoldFrom::Attached)));
    let walker = host(1);
    world.make_client(walker);
    world.request(Request::UseManager { scope: braid_network::Scope::Host(walker), manager: "hoolock".into() }).unwrap();
    world.associate(walker, 0, Place::new(1, 4));
    world.run(MS(500));
    world.associate(walker, 1, Place::new(3, 4));
    world.run(MS(500));
    let active = |world: &World| world.controller.snapshot(world.now).hosts.into_iter().find(|state| state.host == walker).unwrap().active;
    assert_eq!(active(&world), [Place::new(3, 4)]);
    // Switches 3 and 4 keep each other and their connections, and lose the rest.
    let ends = [Place::new(3, 1), Place::new(5, 3), Place::new(4, 1), Place::new(5, 4)];
    pass(&mut world, &ends, 0);
    world.run(Duration::from_secs(8));
    assert_eq!(active(&world), [Place::new(1, 4)]);
    let cut_off = |world: &World| -> Vec<u64> {
        let switches = world.controller.snapshot(world.now).switches;
        switches.into_iter().filter(|switch| switch.cut_off).map(|switch| switch.datapath.0).collect()
    };
    assert_eq!(cut_off(&world), [3, 4]);
    let refused = world.request(Request::MoveHost { host: walker, to: access_id(4) });
    assert_eq!(refused, Err(RequestError::PortDown(Place::new(4, 4))));
    pass(&mut world, &ends, 1514);
    world.run(Duration::from_secs(3));
    assert_eq!(cut_off(&world), [0; 0]);
    world.request(Request::MoveHost { host: walker, to: access_id(4) }).unwrap();
    assert!(!world.events.iter().any(|event| matches!(event, Event::HostDetached { .. })), "hosts of one part still reach each other");
    pass(&mut world, &ends, 0);
    world.run(Duration::from_secs(8));
    assert_eq!(cut_off(&world), [3, 4]);
    // The cables are plugged into switches of others, which may connect them.
    for up in [false, true] {
        ends.iter().for_each(|end| world.set_port(*end, up));
        world.run(MS(500));
    }
    assert_eq!(cut_off(&world), [0; 0]);
    ends.iter().for_each(|end| world.set_port(*end, false));
    world.run(MS(500));
    assert_eq!(cut_off(&world), [3, 4], "they are unplugged again");
}
