//! Random histories: after any of them the network converges, hosts reach each other once, and no packet has looped.

use std::collections::BTreeSet;
use std::time::Duration;

use braid_network::paths::Weight;
use braid_network::{Config, Place, Request};
use braid_openflow::{ErrorCode, Version};
use proptest::prelude::*;

use crate::basics::ring_with;
use crate::support::frames::{datagram, host};
use crate::support::switch::SwitchModel;
use crate::support::world::{MS, World};

#[derive(Debug, Clone)]
enum Step {
    /// The state of a cable, by its number.
    Cable(usize, bool),
    /// A host moves to a switch. Each host has its own port there.
    Move(u8, u64),
    /// A switch loses its connection, and returns after a time in ms.
    Disconnect(u64, u64),
    /// A switch loses its tables too.
    Restart(u64, u64),
    /// A switch refuses entries for a time in ms.
    Refuse(u64, u64),
    /// A switch takes so long to answer, in ms.
    Slow(u64),
    /// The controller is replaced.
    Replace,
    Wait(u64),
}

const CABLES: [(u64, u32); 5] = [(1, 1), (2, 1), (3, 1), (4, 1), (3, 3)];

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..5usize, any::<bool>()).prop_map(|(cable, up)| Step::Cable(cable, up)),
        4 => (1..4u8, 1..6u64).prop_map(|(host, at)| Step::Move(host, at)),
        2 => (1..6u64, 1..3000u64).prop_map(|(at, time)| Step::Disconnect(at, time)),
        1 => (1..6u64, 1..3000u64).prop_map(|(at, time)| Step::Restart(at, time)),
        2 => (1..6u64, 1..3000u64).prop_map(|(at, time)| Step::Refuse(at, time)),
        1 => (1..400u64).prop_map(Step::Slow),
        1 => Just(Step::Replace),
        6 => (1..3000u64).prop_map(Step::Wait),
    ]
}

fn play(world: &mut World, step: &Step) {
    match *step {
        Step::Cable(cable, up) => world.set_port(Place::new(CABLES[cable].0, CABLES[cable].1), up),
        Step::Move(number, datapath) => {
            world.hosts.entry(host(number)).or_default().radios.clear();
            world.associate(host(number), 0, Place::new(datapath, 3 + u32::from(number)));
        }
        Step::Disconnect(datapath, time) | Step::Restart(datapath, time) => {
            if matches!(step, Step::Restart(..)) {
                world.switches.get_mut(&datapath).unwrap().restart();
            }
            world.disconnect(datapath);
            world.after(MS(time), move |world| {
                if world.switches[&datapath].connection.is_none() {
                    world.connect(datapath);
                }
            });
        }
        Step::Refuse(datapath, time) => {
            world.switches.get_mut(&datapath).unwrap().refuses = Some(ErrorCode::FlowModFailedTableFull);
            world.after(MS(time), move |world| world.switches.get_mut(&datapath).unwrap().refuses = None);
        }
        Step::Slow(time) => world.control_delay = MS(time),
        Step::Replace => world.replace_controller(config(9)),
        Step::Wait(time) => world.run(MS(time)),
    }
}

/// Plans for two or three owners at once, so that one waits for the other.
fn config(key: u8) -> Config {
    Config { planned_at_once: 12, ..Config::new([key; 32]) }
}

fn tables_of(world: &World) -> Vec<BTreeSet<String>> {
    world.switches.values().map(SwitchModel::entries).collect()
}

/// Traffic among three hosts during the history.
fn converges(version: Version, tables: u8, steps: &[Step]) {
    let mut world = ring_with(config(7), version, tables);
    world.converge();
    for number in 1..=3 {
        world.associate(host(number), 0, Place::new(number.into(), 3 + u32::from(number)));
    }
    world.run(MS(200));
    for (pair, (from, to)) in [(1, 2), (2, 3), (3, 1)].into_iter().enumerate() {
        world.stream(host(from), host(to), 80, 1 + 10_000 * pair as u64, 400, MS(25));
    }
    for step in steps {
        play(&mut world, step);
        world.run(MS(20));
    }
    world.run(Duration::from_secs(10));
    assert!(world.loops.is_empty(), "frames loop: {:?}", world.loops);
    // All is well again: cables, connections, speed; hosts say where they are.
    for (datapath, port) in CABLES {
        world.set_port(Place::new(datapath, port), true);
    }
    world.control_delay = MS(2);
    world.run(Duration::from_secs(45));
    for number in 1..=3 {
        let place = world.hosts[&host(number)].radios[&0];
        world.associate(host(number), 0, place);
    }
    world.run(Duration::from_secs(35));
    for number in 1..=3 {
        let place = world.hosts[&host(number)].radios[&0];
        world.associate(host(number), 0, place);
    }
    world.converge();
    world.clear();
    for (number, (from, to)) in [(1, 2), (2, 3), (3, 1), (2, 1), (3, 2), (1, 3)].into_iter().enumerate() {
        let number = 900_000 + number as u64;
        world.send(host(from), datagram(host(from), host(to), 80, number));
        world.run(MS(50));
        assert_eq!(world.copies(host(to), number..number + 1), [1], "{from} to {to}");
    }
    // What stands is what a new controller wants, too.
    let before = tables_of(&world);
    world.replace_controller(config(11));
    world.run(Duration::from_secs(40));
    world.converge();
    assert!(before == tables_of(&world), "a new controller changes the tables");
    // What is planned for a lost link is all that it changes.
    let (datapath, port) = CABLES[steps.len() % CABLES.len()];
    let place = Place::new(datapath, port);
    world.set_port(place, false);
    world.run(MS(500));
    world.converge();
    let before = tables_of(&world);
    world.request(Request::SetWeight { place, weight: Weight::default() }).unwrap();
    world.converge();
    assert!(before == tables_of(&world), "the loss of {place} changes more");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn networks_of_1_3_converge(steps in prop::collection::vec(step(), 1..25)) {
        converges(Version::V1_3, 254, &steps);
    }

    #[test]
    fn networks_of_1_0_converge(steps in prop::collection::vec(step(), 1..25)) {
        converges(Version::V1_0, 1, &steps);
    }
}

#[test]
fn regression_a_refused_source_entry_is_tried_again() {
    converges(Version::V1_3, 254, &[Step::Cable(0, false), Step::Refuse(2, 66), Step::Move(2, 4), Step::Cable(1, false), Step::Move(2, 2)]);
}

#[test]
fn regression_the_controller_does_not_forward_a_packet_that_it_forwarded() {
    converges(Version::V1_0, 1, &[Step::Slow(283), Step::Move(2, 5), Step::Wait(1813), Step::Restart(5, 1), Step::Replace]);
}

#[test]
fn regression_switches_that_lose_their_tables_while_the_controller_is_replaced() {
    converges(Version::V1_3, 254, &[Step::Restart(3, 124), Step::Replace, Step::Refuse(2, 73), Step::Restart(2, 34)]);
}

#[test]
fn regression_a_port_whose_switch_is_away_is_no_edge_port() {
    let down_and_up = [Step::Cable(0, false), Step::Slow(21), Step::Cable(0, true), Step::Disconnect(1, 1851), Step::Wait(1050)];
    for (version, tables) in [(Version::V1_0, 1), (Version::V1_3, 254)] {
        converges(version, tables, &[&down_and_up[..], &[Step::Move(1, 1), Step::Wait(100)]].concat());
    }
}
