//! What slices set: their own, what policies mediate, and all or nothing.

use std::time::Duration;

use braid_snmp::{Bounds, ErrorStatus, Event, Policy, Setup, Shared, Slicer, Value};

use crate::support::*;

const POWER: &str = "1.3.6.1.4.1.8072.9999.9999.1.1.4.1";
const ADMIN: &str = "1.3.6.1.2.1.2.2.1.7.3";
const OPER: &str = "1.3.6.1.2.1.2.2.1.8.3";
/// The interfaces of the slices blue and green.
const OWN: [&str; 2] = ["1.3.6.1.2.1.2.2.1.7.11", "1.3.6.1.2.1.2.2.1.7.12"];
const UP: Value = Value::Integer(1);
const DOWN: Value = Value::Integer(2);

/// Slices blue and green: both see the radio and its interface 3; 11 is blue's and 12 green's.
fn setup(policy: Policy, bounds: Bounds, object: &str) -> Setup {
    let see = |own: u32| {
        vec![
            table("1.3.6.1.2.1.2.2.1", &[&[3], &[own]], &[7]),
            table("1.3.6.1.4.1.8072.9999.9999.1.1", &[&[1]], &[4]),
            subtree("1.3.6.1.2.1.1", false),
        ]
    };
    let shared = vec![Shared { device: 0, object: oid(object), policy, bounds }];
    Setup { devices: vec![device("ap1")], slices: vec![slice("blue", see(11)), slice("green", see(12))], shared, ..Setup::default() }
}

fn agent() -> Tree {
    let interfaces = [3, 11, 12].into_iter().flat_map(|row| [7, 8].map(|column| (oid(&format!("1.3.6.1.2.1.2.2.1.{column}.{row}")), UP)));
    let others = [(oid(POWER), Value::Integer(20)), (oid("1.3.6.1.2.1.1.5.0"), Value::Octets(b"ap".to_vec()))];
    Tree::new(interfaces.chain(others))
}

fn world(policy: Policy, bounds: Bounds, object: &str) -> World {
    World::new(setup(policy, bounds, object), vec![agent()])
}

/// What a slice gets that sets the power.
fn sets(world: &mut World, slice: &str, value: i32) -> ErrorStatus {
    world.set(slice, &[(POWER, Value::Integer(value))]).0
}

fn power(world: &World) -> Value {
    world.agents[0].objects[&oid(POWER)].clone()
}

#[test]
fn a_slice_sets_its_own_and_nothing_else() {
    let mut world = world(Policy::Fixed, Bounds::default(), POWER);
    assert_eq!(world.set("blue", &[(OWN[0], DOWN)]), (ErrorStatus::NoError, 0));
    assert_eq!([OWN[0], OWN[1]].map(|name| world.agents[0].objects[&oid(name)].clone()), [DOWN, UP]);
    // Another slice's, one that does not exist in the view, and one that may only be read.
    for name in [OWN[1], "1.3.6.1.2.1.2.2.1.7.4", "1.3.6.1.2.1.2.2.1.8.11", "1.3.6.1.2.1.1.5.0", "1.3.6.1.2.1.25.1.0"] {
        let before = world.agents[0].objects.clone();
        // Nothing of a request counts if a part of it is refused.
        assert_eq!(world.set("blue", &[(OWN[0], UP), (name, DOWN)]), (ErrorStatus::NoAccess, 2), "{name}");
        assert_eq!(world.agents[0].objects, before);
    }
    assert_eq!(world.set("blue", &[(OWN[0], UP), (OWN[0], DOWN)]), (ErrorStatus::InconsistentValue, 2));
    assert_eq!(world.set("blue", &[(OWN[0], Value::Null)]), (ErrorStatus::WrongType, 1));
    let texts: Vec<String> = world.events.iter().map(ToString::to_string).collect();
    assert!(texts.iter().any(|text| text.contains("slice blue got noAccess when it set") && text.contains("[[slice.view]]")), "{texts:?}");
    assert!(world.events.iter().any(|event| matches!(event, Event::Set { slice, .. } if slice == "blue")));
}

#[test]
fn a_manager_that_may_only_read_sets_nothing() {
    let mut setup = setup(Policy::Fixed, Bounds::default(), POWER);
    setup.slices[0].managers[0].write = false;
    let mut world = World::new(setup, vec![agent()]);
    assert_eq!(world.set("blue", &[(OWN[0], DOWN)]), (ErrorStatus::NoAccess, 1));
    assert_eq!(world.get("blue", OWN[0]), UP);
}

#[test]
fn policies_answer_as_documented() {
    use ErrorStatus::{InconsistentValue, NoAccess, NoError, NotWritable, WrongType, WrongValue};
    let bounds = || Bounds { least: Some(5), most: Some(30), values: None };

    let mut fixed = world(Policy::Fixed, Bounds::default(), POWER);
    assert_eq!([sets(&mut fixed, "blue", 10), sets(&mut fixed, "green", 10)], [NotWritable; 2]);

    let mut owned = world(Policy::Owner(1), bounds(), POWER);
    assert_eq!(
        [sets(&mut owned, "blue", 10), sets(&mut owned, "green", 10), sets(&mut owned, "green", 31)],
        [NoAccess, NoError, WrongValue]
    );
    assert_eq!(power(&owned), Value::Integer(10));

    let mut bounded = world(Policy::Anyone, bounds(), POWER);
    assert_eq!([4, 31, 5, 30].map(|value| sets(&mut bounded, "blue", value)), [WrongValue, WrongValue, NoError, NoError]);
    assert_eq!(bounded.set("blue", &[(POWER, Value::Octets(b"x".to_vec()))]), (WrongType, 1));

    let only = Bounds { values: Some([1, 6, 11].into()), ..Bounds::default() };
    let mut listed = world(Policy::Anyone, only, POWER);
    assert_eq!([6, 7].map(|value| sets(&mut listed, "blue", value)), [NoError, WrongValue]);

    let mut lowest = world(Policy::Lowest, bounds(), POWER);
    for (slice, asked, set) in [("blue", 15, 15), ("green", 20, 15), ("blue", 25, 20), ("green", 6, 6), ("green", 30, 25)] {
        assert_eq!(sets(&mut lowest, slice, asked), NoError);
        assert_eq!(power(&lowest), Value::Integer(set), "{slice} asks for {asked}");
        assert_eq!(lowest.get("blue", POWER), Value::Integer(set));
    }
    let mut highest = world(Policy::Highest, Bounds::default(), POWER);
    for (slice, asked, set) in [("blue", 15, 15), ("green", 10, 15), ("blue", 5, 10)] {
        assert_eq!((sets(&mut highest, slice, asked), power(&highest)), (NoError, Value::Integer(set)));
    }

    let mut lease = world(Policy::Lease(Duration::from_secs(60)), bounds(), POWER);
    assert_eq!([sets(&mut lease, "blue", 10), sets(&mut lease, "green", 10)], [NoError, InconsistentValue]);
    lease.pass(Duration::from_secs(59));
    assert_eq!([sets(&mut lease, "blue", 11), sets(&mut lease, "green", 10)], [NoError, InconsistentValue]);
    lease.pass(Duration::from_secs(60));
    assert_eq!([sets(&mut lease, "green", 10), sets(&mut lease, "blue", 10)], [NoError, InconsistentValue]);
}

#[test]
fn a_slice_switches_its_virtual_interface_off_and_the_shared_one_stays() {
    let to = [(0, oid(OWN[0]))].into();
    let mut world =
        world(Policy::Virtual { operational: Some(oid(OPER)), to }, Bounds { values: Some([1, 2].into()), ..Bounds::default() }, ADMIN);
    assert_eq!(world.set("blue", &[(ADMIN, DOWN)]), (ErrorStatus::NoError, 0));
    let object = |world: &World, name: &str| world.agents[0].objects[&oid(name)].clone();
    assert_eq!([object(&world, ADMIN), object(&world, OPER), object(&world, OWN[0])], [UP, UP, DOWN]);
    for (slice, seen) in [("blue", DOWN), ("green", UP)] {
        assert_eq!([world.get(slice, ADMIN), world.get(slice, OPER)], [seen.clone(), seen.clone()]);
        let walked = world.walk(slice);
        assert!(walked.contains(&(oid(ADMIN), seen.clone())) && walked.contains(&(oid(OPER), seen)), "{walked:?}");
    }
    // Green has no interface of its own there: the value is remembered only.
    let requests = world.agents[0].requests;
    assert_eq!(world.set("green", &[(ADMIN, DOWN)]), (ErrorStatus::NoError, 0));
    assert_eq!((world.agents[0].requests, world.get("green", ADMIN)), (requests, DOWN));
    assert_eq!(world.set("blue", &[(ADMIN, UP)]), (ErrorStatus::NoError, 0));
    assert_eq!([world.get("blue", OPER), world.get("green", OPER), object(&world, OWN[0])], [UP, DOWN, UP]);
    assert_eq!(world.set("blue", &[(ADMIN, Value::Integer(3))]), (ErrorStatus::WrongValue, 1));
    assert_eq!(world.set("blue", &[(ADMIN, Value::Gauge32(1))]), (ErrorStatus::WrongType, 1));
    assert_eq!(world.set("blue", &[(ADMIN, DOWN), (OWN[0], UP)]), (ErrorStatus::InconsistentValue, 2));
}

#[test]
fn nothing_is_remembered_of_what_the_agent_refuses() {
    let virtual_one = || Policy::Virtual { operational: None, to: [(0, oid(OWN[0]))].into() };
    let mut world = world(virtual_one(), Bounds::default(), ADMIN);
    world.agents[0].refuses = Some((ErrorStatus::ResourceUnavailable, 2));
    let stored = world.slicer.to_store();
    // The agent's second variable is the third of the request.
    let request = [(ADMIN, DOWN), ("1.3.6.1.4.1.8072.9999.9999.1.1.4.1", Value::Integer(1))];
    assert_eq!(world.set("blue", &request), (ErrorStatus::ResourceUnavailable, 2));
    assert_eq!((world.get("blue", ADMIN), world.slicer.to_store(), world.stored.clone()), (UP, stored.clone(), Some(stored)));
    // Nor of what cannot be stored: the agent is not asked.
    (world.disk, world.agents[0].refuses) = (false, None);
    let requests = world.agents[0].requests;
    assert_eq!(world.set("blue", &[(ADMIN, DOWN)]), (ErrorStatus::ResourceUnavailable, 0));
    assert_eq!((world.agents[0].requests, world.get("blue", ADMIN)), (requests, UP));
    assert!(world.events.iter().any(|event| event.to_string().contains("state directory")));
}

#[test]
fn what_slices_asked_for_survives_a_restart() {
    let mut world = world(Policy::Lowest, Bounds::default(), POWER);
    assert_eq!(sets(&mut world, "blue", 10), ErrorStatus::NoError);
    let text = world.stored.clone().unwrap();
    world.slicer = Slicer::new(world.now, &identity(1), setup(Policy::Lowest, Bounds::default(), POWER));
    world.slicer.restore(world.now, &text).unwrap();
    assert_eq!(sets(&mut world, "green", 25), ErrorStatus::NoError);
    assert_eq!(power(&world), Value::Integer(10));
    // What is no longer configured is left out; a damaged text is refused as a whole.
    let mut other = Slicer::new(world.now, &identity(1), setup(Policy::Fixed, Bounds::default(), POWER));
    other.restore(world.now, &text).unwrap();
    assert!(!other.to_store().contains("10") && other.restore(world.now, &text[1..]).is_err());
}

#[test]
fn requests_to_set_of_a_device_are_carried_out_one_after_another() {
    let mut world = world(Policy::Lowest, Bounds::default(), POWER);
    world.agents.clear();
    let send = |world: &mut World, slice: &str, id: i32, value: i32| {
        let pdu = braid_snmp::Pdu::new(braid_snmp::PduKind::Set, id, vec![braid_snmp::VarBind::new(oid(POWER), Value::Integer(value))]);
        let bytes = braid_snmp::Message::encode_community(slice.as_bytes(), &pdu);
        world.slicer.receive_request(world.now, 0, manager_address(), &bytes);
        assert!(world.run().is_empty());
    };
    send(&mut world, "blue", 100, 12);
    send(&mut world, "green", 101, 18);
    // The agent answers neither. Each waits its time: blue's, then green's.
    let answers = world.pass(Duration::from_secs(10));
    assert_eq!(answers.len(), 2, "both get an answer");
    world.agents.push(agent());
    // Of blue's request nothing is remembered.
    assert_eq!(sets(&mut world, "green", 18), ErrorStatus::NoError);
    assert_eq!(power(&world), Value::Integer(18));
}
