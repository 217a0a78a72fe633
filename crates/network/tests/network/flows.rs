//! Chosen flows, groups and limits.

use std::time::Duration;

use braid_model::Rate;
use braid_network::merge::Duplicates;
use braid_network::mobility::FlowMode;
use braid_network::{AccessKind, FlowId, FlowSpec, GroupSpec, Place, Request, RequestError};
use braid_openflow::Version;
use braid_openflow::action::Instruction;

use crate::mobility::campus;
use crate::support::frames::{datagram, host};
use crate::support::world::{MS, World};

const VIDEO: u16 = 5004;

fn spec(from: u8, to: u8) -> FlowSpec {
    FlowSpec { to: host(to), from: Some(host(from)), protocol: Some(17), port: Some(VIDEO) }
}

/// A client (host 1) with three radios at access points 1, 2 and 4, and a server (host 9).
fn three_radios(version: Version, tables: u8) -> World {
    let mut world = campus(version, tables, AccessKind::Cellular);
    world.make_client(host(1));
    for (radio, number) in [(0, 4), (1, 2), (2, 1)] {
        world.associate(host(1), radio, Place::new(number, 4));
        world.run(MS(100));
    }
    world.converge();
    world
}

#[test]
fn three_copies_of_a_flow_survive_loss_and_the_rest_goes_once() {
    for (version, tables) in [(Version::V1_0, 1), (Version::V1_3, 254)] {
        let mut world = three_radios(version, tables);
        let flow = Request::SetFlow { id: FlowId(1), spec: spec(9, 1), mode: FlowMode::Copies(3) };
        world.request(flow).unwrap();
        world.run(MS(100));
        world.converge();
        world.clear();
        for number in [1, 2, 4] {
            world.loss.insert(Place::new(number, 4), 30);
        }
        world.stream(host(9), host(1), VIDEO, 1, 5000, MS(2));
        world.stream(host(9), host(1), 80, 10_000, 5000, MS(2));
        world.run(Duration::from_secs(11));
        let got = |range: std::ops::Range<u64>| {
            let numbers: std::collections::BTreeSet<u64> =
                world.hosts[&host(1)].delivered.iter().filter(|number| range.contains(number)).copied().collect();
            numbers.len()
        };
        // Three losses of 3 % are 0.0027 %; one is 150 of 5000.
        assert!(got(1..5001) >= 4998, "{}", got(1..5001));
        assert!((4750..4950).contains(&got(10_000..15_000)), "{}", got(10_000..15_000));
        // No link carries a packet twice.
        assert!(world.crossed.iter().all(|((_, place), count)| place.port.0 > 1000 || *count <= 1));
        assert!(world.loops.is_empty());
    }
}

#[test]
fn copies_towards_the_network_are_removed_where_they_meet() {
    for (version, tables) in [(Version::V1_0, 1), (Version::V1_3, 254)] {
        let mut world = three_radios(version, tables);
        let merger = Place::new(3, 6);
        world.mergers.insert(merger, Duplicates::new(Duration::from_secs(1), 3));
        let flow = Request::SetFlow { id: FlowId(2), spec: spec(1, 9), mode: FlowMode::Merged(merger) };
        world.request(flow).unwrap();
        world.run(MS(100));
        world.converge();
        world.clear();
        world.hosts.get_mut(&host(1)).unwrap().sends_copies = true;
        world.stream(host(1), host(9), VIDEO, 1, 100, MS(5));
        world.run(MS(800));
        let numbers = world.copies(host(9), 1..101);
        assert!(numbers.iter().all(|copies| *copies == 1), "{numbers:?}");
        assert!(world.loops.is_empty());
        world.request(Request::RemoveFlow(FlowId(2))).unwrap();
        world.run(MS(100));
        world.converge();
        world.clear();
        world.stream(host(1), host(9), VIDEO, 1000, 10, MS(5));
        world.run(MS(200));
        assert_eq!(world.hosts[&host(9)].arrived.len(), 30);
    }
}

#[test]
fn a_group_gets_each_packet_once_over_each_link() {
    for (version, tables) in [(Version::V1_0, 1), (Version::V1_3, 1), (Version::V1_3, 254)] {
        let mut world = campus(version, tables, AccessKind::Wifi);
        for number in 1..=4 {
            world.associate(host(number), 0, Place::new(number.into(), 4));
        }
        world.run(MS(200));
        let members = vec![host(1), host(2), host(4)];
        let group = GroupSpec { address: [239, 1, 2, 3].into(), members };
        world.request(Request::SetGroup { id: FlowId(1), spec: group }).unwrap();
        world.run(MS(100));
        world.converge();
        world.clear();
        let address = braid_model::Mac([1, 0, 0x5e, 1, 2, 3]);
        world.send(host(2), datagram(host(2), address, 99, 5));
        world.send(host(9), datagram(host(9), address, 99, 6));
        world.run(MS(100));
        let copies: Vec<_> = [1, 2, 3, 4].map(|number| world.copies(host(number), 5..7)).to_vec();
        assert_eq!(copies, [[1, 1], [0, 1], [0, 0], [1, 1]], "{version:?}");
        assert!(world.crossed.iter().all(|((_, place), count)| place.port.0 > 1000 || *count <= 1));
    }
}

#[test]
fn limits_are_meters_at_the_attachment() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    world.associate(host(1), 0, Place::new(1, 4));
    world.run(MS(100));
    world.request(Request::SetLimit { host: host(1), limit: Some(Rate::from_mbps(3)) }).unwrap();
    world.run(MS(100));
    world.converge();
    let metered = |world: &World, datapath: u64| {
        let is_meter = |instruction: &Instruction| matches!(instruction, Instruction::Meter(_));
        world.switches[&datapath].flows.iter().filter(|flow| flow.instructions.iter().any(is_meter)).count()
    };
    assert_eq!((metered(&world, 1), metered(&world, 5), world.switches[&1].meters.len()), (2, 0, 2));
    world.request(Request::SetLimit { host: host(1), limit: None }).unwrap();
    world.run(MS(100));
    assert_eq!((metered(&world, 1), world.switches[&1].meters.len()), (0, 0));
}

#[test]
fn requests_that_cannot_be_met_are_refused() {
    let mut world = campus(Version::V1_3, 254, AccessKind::Wifi);
    let mut flow = |id, spec, mode| world.request(Request::SetFlow { id: FlowId(id), spec, mode });
    assert_eq!(flow(1, spec(9, 1), FlowMode::Copies(2)), Err(RequestError::UnknownHost(host(1))));
    assert_eq!(flow(1, spec(1, 9), FlowMode::Copies(2)), Err(RequestError::NoRemoval(host(9))));
    assert!(matches!(flow(1, FlowSpec { protocol: None, ..spec(1, 9) }, FlowMode::Movable), Err(RequestError::Invalid(_))));
    flow(1, spec(1, 9), FlowMode::Movable).unwrap();
    assert_eq!(flow(2, spec(1, 9), FlowMode::Movable), Err(RequestError::Overlap(FlowId(1))));
    let group = GroupSpec { address: [10, 0, 0, 1].into(), members: Vec::new() };
    assert!(world.request(Request::SetGroup { id: FlowId(1), spec: group }).is_err());
}
