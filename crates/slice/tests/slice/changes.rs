//! Slices that are changed and removed while everything runs, users who opt in, versions of controllers, and slicers that are killed.

use std::time::Duration;

use braid_model::Mac;
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flow::FlowMod;
use braid_openflow::ids::{Cookie, PortNo, TableId};
use braid_openflow::oxm::Oxm;
use braid_openflow::{ErrorCode, Message, Version};
use braid_slice::{SliceSpec, Stage, SwitchPhase, User};
use braid_switch::frames::{datagram, host};

use crate::support::*;

fn two() -> [(&'static str, SliceSpec); 2] {
    [("a", slice(vec![at(&[1, 2], &[])])), ("b", slice(vec![at(&[3, 4], &[])]))]
}

fn flood() -> Vec<Action> {
    vec![Action::output(PortNo::FLOOD)]
}

#[test]
fn a_removed_slice_leaves_nothing_and_others_notice_nothing() {
    for version in Version::ALL {
        let mut world = World::with_switch(&two(), version, 4);
        for slice in ["a", "b"] {
            world.send(slice, Message::FlowMod(add(1, &[], flood())));
        }
        let b = world.tenant("b", 1);
        let before = world.model().entries();
        world.set(|wanted| drop(wanted.slices.remove("a"))).unwrap();
        assert!(world.tenants.contains_key(&b) && world.tenants.len() == 1);
        assert_eq!(world.frame(3, &datagram(host(1), host(2), 53, 7)).0, [4]);
        // Its ports belong to nobody: ordinary forwarding.
        assert_eq!(world.frame(1, &datagram(host(1), host(2), 53, 7)).0, [2, 3, 4]);
        let a = two()[0].1.clone();
        world.set(|wanted| drop(wanted.slices.insert("a".to_owned(), a))).unwrap();
        world.send("a", Message::FlowMod(add(1, &[], flood())));
        assert_eq!(world.model().entries(), before);
    }
}

#[test]
fn a_change_keeps_connections_and_loses_no_message() {
    let mut world = World::with_switch(&two(), Version::V1_3, 5);
    let id = world.tenant("a", 1);
    let now = world.now;
    for number in 0..500u16 {
        world.tenants.get_mut(&id).unwrap().connection.request(now, Message::FlowMod(add(number, &[], flood()))).unwrap();
        if number == 250 {
            world.set(|wanted| wanted.slices.get_mut("a").unwrap().space = vec![at(&[1, 2, 5], &[])]).unwrap();
        }
    }
    world.settle();
    assert_eq!(world.tenant("a", 1), id);
    assert_eq!(world.frame(1, &datagram(host(1), host(2), 53, 7)).0, [2, 5]);
    let entries = |world: &World| world.slicer.snapshot().slices.iter().find(|slice| slice.name == "a").unwrap().entries;
    assert_eq!(entries(&world), (500, 1500));
    // What lies outside of a smaller space goes, with a reason.
    world.send("a", Message::FlowMod(add(600, &[Oxm::in_port(PortNo(5))], flood())));
    world.set(|wanted| wanted.slices.get_mut("a").unwrap().space = vec![at(&[1, 2], &[])]).unwrap();
    assert_eq!(entries(&world), (500, 1000));
    assert!(world.troubles().contains("an entry of table 0 with priority 600 was removed"), "{}", world.troubles());
    assert!(world.set(|wanted| wanted.slices.get_mut("a").unwrap().space = vec![at(&[3], &[])]).is_err());
    assert_eq!(entries(&world), (500, 1000));
}

#[test]
fn users_opt_in_and_out() {
    let open = SliceSpec { opt_in: true, priority: 1, ..slice(Vec::new()) };
    let mut world = World::with_switch(&[("one", open.clone()), ("two", open)], Version::V1_3, 3);
    assert_eq!(world.frame(1, &datagram(host(1), host(2), 53, 7)).0, [2, 3]);
    for (number, slice) in [(1, "one"), (2, "two")] {
        world.set(|wanted| drop(wanted.users.insert(User::Host(host(number)), slice.to_owned()))).unwrap();
    }
    world.send("one", Message::FlowMod(add(1, &[], out(3))));
    world.send("two", Message::FlowMod(add(1, &[], out(1))));
    // The sender's slice has what goes from one user to the other.
    assert_eq!(world.frame(1, &datagram(host(1), host(2), 53, 7)).0, [3]);
    assert_eq!(world.frame(2, &datagram(host(2), host(1), 53, 7)).0, [1]);
    assert_eq!(world.frame(2, &datagram(host(3), host(1), 53, 7)).0, [3]);
    world.set(|wanted| drop(wanted.users.remove(&User::Host(host(1))))).unwrap();
    assert_eq!(world.frame(1, &datagram(host(1), host(3), 53, 7)).0, [2, 3]);
    assert_eq!(world.refused("one", Message::FlowMod(add(1, &[], out(3)))), Some(ErrorCode::FlowModFailedEperm));
}

#[test]
fn a_new_version_gets_some_hosts_and_gives_them_back() {
    let mut world = World::with_switch(&[("base", slice(vec![at(&[1, 2, 3], &[])]))], Version::V1_3, 3);
    let miss = |actions| Message::FlowMod(add(0, &[], actions));
    world.send("base", miss(vec![Action::output(PortNo::CONTROLLER), Action::output(PortNo(2))]));
    let hosts: Vec<Mac> = (1..=40).map(host).collect();
    let stage = |percent, hosts: &[Mac]| SliceSpec {
        stage: Some(Stage { of: "base".to_owned(), hosts: hosts.iter().copied().collect(), percent }),
        ..slice(Vec::new())
    };
    let next = stage(25, &hosts[..1]);
    world.set(|wanted| drop(wanted.slices.insert("next".to_owned(), next))).unwrap();
    world.send("next", miss(out(3)));
    // The slicer learns hosts by their packets.
    hosts.iter().for_each(|host_| drop(world.frame(1, &datagram(*host_, host(200), 53, 7))));
    world.pass(Duration::from_secs(1));
    let staged = world.slicer.snapshot().slices.iter().find(|slice| slice.name == "next").unwrap().staged.clone();
    assert!(staged.contains(&hosts[0]) && (2..25).contains(&staged.len()), "{staged:?}");
    for one in &hosts {
        let expected = if staged.contains(one) { [3] } else { [2] };
        assert_eq!(world.frame(1, &datagram(*one, host(200), 53, 7)).0, expected, "{one}");
        assert_eq!(world.frame(1, &datagram(host(201), *one, 53, 7)).0, expected, "to {one}");
    }
    // A restart keeps them.
    world.restart();
    assert_eq!(world.slicer.snapshot().slices.iter().find(|slice| slice.name == "next").unwrap().staged, staged);
    // Rolled back.
    world.set(|wanted| drop(wanted.slices.remove("next"))).unwrap();
    for one in &hosts {
        assert_eq!(world.frame(1, &datagram(*one, host(200), 53, 7)).0, [2]);
    }
}

#[test]
fn a_killed_slicer_comes_back_without_touching_correct_entries() {
    for version in Version::ALL {
        let mut world = World::with_switch(&two(), version, 4);
        for slice in ["a", "b"] {
            for number in 0..20 {
                world.send(slice, Message::FlowMod(FlowMod { cookie: Cookie(number), ..add(number as u16, &[], flood()) }));
            }
        }
        let before = world.model().entries();
        let (frame, mods) = (datagram(host(1), host(2), 53, 7), world.model().flow_mods);
        assert_eq!(world.frame(1, &frame).0, [2]);
        world.restart();
        assert_eq!((world.model().entries(), world.model().flow_mods), (before.clone(), mods));
        let shown = world.slicer.snapshot();
        assert_eq!(shown.slices.iter().map(|slice| slice.entries.0).collect::<Vec<_>>(), [0, 20, 20]);
        // What changed while it was away is put in order.
        let id = *world.switches.keys().next().unwrap();
        let mut switch = world.disconnect(id);
        let stranger = switch.flows[0].clone();
        switch.flows.remove(3);
        switch.flows.push(braid_switch::Flow { priority: 60_000, fields: Vec::new(), cookie: Cookie(1), ..stranger });
        world.connect(switch);
        assert_eq!(world.model().entries(), before);
        // Without its journal it knows no entry, and removes them all.
        world.journal.clear();
        world.restart();
        assert_eq!(world.frame(1, &frame).0, [0; 0]);
        assert_eq!(world.refused("a", Message::FlowMod(add(1, &[], flood()))), None);
    }
}

#[test]
fn a_switch_that_loses_everything_gets_it_back() {
    let mut world = World::with_switch(&two(), Version::V1_3, 4);
    world.send("a", Message::FlowMod(add(1, &[], flood())));
    let goto = FlowMod { instructions: vec![Instruction::GotoTable(TableId(1))], ..add(2, &[], Vec::new()) };
    world.send("a", Message::FlowMod(goto));
    world.send("a", Message::FlowMod(FlowMod { table: TableId(1), ..add(1, &[], flood()) }));
    let before = world.model().entries();
    let id = *world.switches.keys().next().unwrap();
    let mut switch = world.disconnect(id);
    assert!(world.tenants.is_empty());
    switch.restart();
    world.connect(switch);
    assert_eq!(world.model().entries(), before);
    world.tenant("a", 1);
}

#[test]
fn a_controller_that_cannot_be_reached_is_dialled_seldom() {
    let mut world = World::new(&two());
    world.reachable = false;
    world.connect(switch(1, Version::V1_3, 4));
    world.pass(Duration::from_secs(60));
    assert!(world.troubles().contains("no controller at controller: no route"));
    assert_eq!(world.slicer.snapshot().switches[0].phase, SwitchPhase::Live);
    world.reachable = true;
    world.pass(Duration::from_secs(20));
    world.tenant("a", 1);
}

#[test]
fn a_slice_with_a_rate_has_a_meter_in_its_first_table() {
    let mut a = two()[0].1.clone();
    a.rate = Some(braid_model::Rate::from_mbps(5));
    let mut world = World::with_switch(&[("a", a)], Version::V1_3, 3);
    world.send("a", Message::FlowMod(add(1, &[], flood())));
    let meters = world.model().meters.clone();
    assert_eq!(meters.values().map(|bands| bands[0].rate).collect::<Vec<_>>(), [5000]);
    world.frame(1, &datagram(host(1), host(2), 53, 7));
    assert!(world.model().metered.values().sum::<u64>() > 0);
    world.set(|wanted| wanted.slices.get_mut("a").unwrap().rate = None).unwrap();
    assert!(world.model().meters.is_empty());
    assert_eq!(world.frame(1, &datagram(host(1), host(2), 53, 7)).0, [2]);
}
