//! What one slice sees and may do beside another one.

use std::time::Duration;

use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::{FlowFlags, PortConfig};
use braid_openflow::flow::{FlowCommand, FlowMod, PacketReason};
use braid_openflow::group::{Bucket, GroupKind, GroupMod, ModCommand};
use braid_openflow::ids::{Cookie, GroupId, PortNo, TableId};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{FlowQuery, MultipartReply, MultipartRequest, ReplyBody, RequestBody};
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::port::PortMod;
use braid_openflow::switch::{Role, RoleMessage};
use braid_openflow::{ErrorCode, Event, Message, Version};
use braid_slice::{Limits, Permission, SliceSpec};
use braid_switch::frames::{announcement, datagram, host};

use crate::support::*;

fn two() -> [(&'static str, SliceSpec); 2] {
    [("a", slice(vec![at(&[1, 2], &[])])), ("b", slice(vec![at(&[3, 4], &[])]))]
}

fn replies(events: &[Event]) -> Vec<ReplyBody> {
    let body = |event: &Event| match event {
        Event::Reply { message, .. } => match &**message {
            Message::MultipartReply(MultipartReply { body, .. }) => Some(body.clone()),
            _ => None,
        },
        _ => None,
    };
    events.iter().filter_map(body).collect()
}

fn ask(world: &mut World, slice: &str, body: RequestBody) -> Vec<ReplyBody> {
    replies(&world.send(slice, Message::MultipartRequest(MultipartRequest::new(body))))
}

fn flows(world: &mut World, slice: &str, query: FlowQuery) -> Vec<braid_openflow::multipart::FlowStats> {
    match ask(world, slice, RequestBody::Flow(query)).as_slice() {
        [ReplyBody::Flow(flows)] => flows.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn each_slice_has_its_ports_and_its_packets() {
    for version in Version::ALL {
        let mut world = World::with_switch(&two(), version, 4);
        let frame = datagram(host(1), host(2), 53, 7);
        // Without entries each slice's packets are its own: those of nobody go by ordinary forwarding.
        let (ports, packets) = world.frame(1, &frame);
        assert_eq!(ports, [0; 0]);
        assert_eq!(packets.len(), usize::from(version == Version::V1_0));
        assert_eq!(world.refused("a", Message::FlowMod(add(100, &[to(host(2))], out(2)))), None);
        assert_eq!(world.frame(1, &frame).0, [2]);
        // The other slice's packets are not matched.
        assert_eq!(world.frame(3, &frame).0, [0; 0]);
        let foreign = world.refused("a", Message::FlowMod(add(100, &[to(host(2))], out(3))));
        assert_eq!(foreign, Some(ErrorCode::BadActionEperm));
        let foreign = world.refused("a", Message::FlowMod(add(100, &[Oxm::in_port(PortNo(3))], out(2))));
        assert_eq!(foreign, Some(ErrorCode::FlowModFailedEperm));
        assert!(world.troubles().contains("slice a: switch 0000000000000001: FLOW_MOD refused: "), "{}", world.troubles());
        // A flood stays within the slice.
        assert_eq!(world.refused("a", Message::FlowMod(add(50, &[], vec![Action::output(PortNo::FLOOD)]))), None);
        assert_eq!(world.frame(1, &announcement(host(1), 1)).0, [2]);
        assert_eq!(world.refused("b", Message::FlowMod(add(60, &[], vec![Action::output(PortNo::ALL)]))), None);
        assert_eq!(world.frame(4, &announcement(host(1), 1)).0, [3]);
    }
}

#[test]
fn what_nobody_claims_is_forwarded_as_usual() {
    for version in Version::ALL {
        let mut world = World::with_switch(&[("a", slice(vec![part(&[from(host(1))]), part(&[to(host(1))])]))], version, 3);
        assert_eq!(world.frame(1, &datagram(host(2), host(3), 53, 7)).0, [2, 3]);
        assert_eq!(world.frame(1, &datagram(host(1), host(3), 53, 7)).0, [0; 0]);
    }
}

#[test]
fn packets_go_to_the_owner_and_copies_to_readers() {
    let reads = Permission { read: true, write: false, delegate: false };
    let mut reader = slice(vec![part(&[Oxm::exact(Field::EthType, 0x0800u16)])]);
    reader.space[0].permission = reads;
    let [a, b] = two();
    let mut world = World::with_switch(&[a, b, ("r", reader)], Version::V1_3, 4);
    let miss = FlowMod { cookie: Cookie(u64::MAX - 1), ..add(0, &[], vec![Action::output(PortNo::CONTROLLER)]) };
    assert_eq!(world.refused("a", Message::FlowMod(miss)), None);
    let (_, packets) = world.frame(1, &datagram(host(1), host(2), 53, 7));
    let who: Vec<&str> = packets.iter().map(|(slice, _)| slice.as_str()).collect();
    assert_eq!(who, ["a", "r"]);
    assert_eq!((packets[0].1.cookie, packets[1].1.cookie), (Cookie(u64::MAX - 1), Cookie(u64::MAX)));
    assert!(world.refused("r", Message::FlowMod(add(0, &[], out(1)))).is_some());
    let (_, packets) = world.frame(1, &announcement(host(1), 7));
    assert_eq!(packets.len(), 1);
}

#[test]
fn a_switch_of_1_0_says_why_a_packet_comes() {
    let mut world = World::with_switch(&two(), Version::V1_0, 4);
    let frame = datagram(host(1), host(2), 53, 7);
    assert_eq!(world.frame(1, &frame).1[0].1.reason, PacketReason::NoMatch);
    assert_eq!(world.refused("a", Message::FlowMod(add(9, &[to(host(2))], vec![Action::output(PortNo::CONTROLLER)]))), None);
    assert_eq!(world.frame(1, &frame).1[0].1.reason, PacketReason::Action);
}

#[test]
fn entries_look_as_their_controller_made_them_and_wildcard_deletes_touch_no_others() {
    for version in Version::ALL {
        let mut world = World::with_switch(&two(), version, 4);
        for (slice, cookie) in [("a", 0xdead_beef_dead_beef), ("b", 5)] {
            let flow = FlowMod { cookie: Cookie(cookie), ..add(100, &[to(host(2))], vec![Action::output(PortNo::FLOOD)]) };
            assert_eq!(world.refused(slice, Message::FlowMod(flow)), None);
        }
        world.frame(1, &datagram(host(1), host(2), 53, 7));
        let shown = flows(&mut world, "a", FlowQuery::default());
        assert_eq!(shown.len(), 1);
        assert_eq!((shown[0].cookie, shown[0].priority, shown[0].traffic.packets), (Cookie(0xdead_beef_dead_beef), 100, Some(1)));
        assert_eq!(shown[0].matching.canonical(), Match::new([to(host(2))]).canonical());
        assert_eq!(shown[0].instructions, [Instruction::ApplyActions(vec![Action::output(PortNo::FLOOD)])]);
        let all = FlowMod {
            command: FlowCommand::Delete,
            table: if version == Version::V1_0 { TableId(0) } else { TableId::ALL },
            ..FlowMod::default()
        };
        assert_eq!(world.refused("b", Message::FlowMod(all)), None);
        assert_eq!(flows(&mut world, "b", FlowQuery::default()).len(), 0);
        assert_eq!(flows(&mut world, "a", FlowQuery::default()).len(), 1);
        assert_eq!(world.frame(1, &datagram(host(1), host(2), 53, 7)).0, [2]);
        let aggregate = ask(&mut world, "a", RequestBody::Aggregate(FlowQuery::default()));
        assert!(
            matches!(aggregate.as_slice(), [ReplyBody::Aggregate(sum)] if sum.flows == 1 && sum.traffic.packets == Some(2)),
            "{aggregate:?}"
        );
    }
}

#[test]
fn modifying_and_strict_deleting_change_one_entry() {
    for version in Version::ALL {
        let mut world = World::with_switch(&two(), version, 4);
        world.send("a", Message::FlowMod(add(100, &[to(host(2))], out(2))));
        world.send("a", Message::FlowMod(add(101, &[to(host(3))], out(2))));
        let change = FlowMod { command: FlowCommand::ModifyStrict, ..add(100, &[to(host(2))], out(1)) };
        assert_eq!(world.refused("a", Message::FlowMod(change)), None);
        assert_eq!(world.frame(2, &datagram(host(1), host(2), 53, 7)).0, [1]);
        let foreign = FlowMod { command: FlowCommand::Modify, ..add(100, &[], out(3)) };
        assert_eq!(world.refused("a", Message::FlowMod(foreign)), Some(ErrorCode::BadActionEperm));
        assert_eq!(world.frame(2, &datagram(host(1), host(2), 53, 7)).0, [1]);
        let delete = FlowMod { command: FlowCommand::DeleteStrict, ..add(100, &[to(host(2))], Vec::new()) };
        world.send("a", Message::FlowMod(delete));
        assert_eq!(flows(&mut world, "a", FlowQuery::default()).len(), 1);
        // By the port to which entries send.
        let delete = FlowMod { command: FlowCommand::Delete, out_port: PortNo(1), ..FlowMod::default() };
        world.send("a", Message::FlowMod(delete));
        assert_eq!(flows(&mut world, "a", FlowQuery::default()).len(), 1);
        let delete = FlowMod { command: FlowCommand::Delete, out_port: PortNo(2), ..FlowMod::default() };
        world.send("a", Message::FlowMod(delete));
        assert_eq!(flows(&mut world, "a", FlowQuery::default()).len(), 0);
    }
}

#[test]
fn the_end_of_an_entry_is_reported_once_as_the_controller_knows_it() {
    for version in Version::ALL {
        let mut world = World::with_switch(&two(), version, 4);
        let flow = FlowMod { cookie: Cookie(77), flags: FlowFlags::SEND_FLOW_REM, ..add(100, &[to(host(2))], out(2)) };
        let removed = |events: &[Event]| -> Vec<(u64, u64)> {
            let of = |event: &Event| match event {
                Event::Message { message, .. } => match &**message {
                    Message::FlowRemoved(flow) => Some((flow.cookie.0, flow.packets.unwrap())),
                    _ => None,
                },
                _ => None,
            };
            events.iter().filter_map(of).collect()
        };
        world.send("a", Message::FlowMod(flow.clone()));
        world.frame(1, &datagram(host(1), host(2), 53, 7));
        let events = world.send("a", Message::FlowMod(FlowMod { command: FlowCommand::Delete, ..FlowMod::default() }));
        assert_eq!(removed(&events), [(77, 1)]);
        // Its time is over: two rows, one report.
        world.send("a", Message::FlowMod(flow));
        let of_a = |switch: &braid_switch::SwitchModel| switch.flows.iter().position(|flow| flow.reports);
        while let Some(at) = of_a(world.model()) {
            world.model().time_out(at);
        }
        world.settle();
        let id = world.tenant("a", 1);
        assert_eq!(removed(&world.tenants[&id].events), [(77, 0)]);
    }
}

#[test]
fn packet_outs_stay_within_the_slice() {
    for version in Version::ALL {
        let mut world =
            World::with_switch(&[("a", slice(vec![at(&[1, 2], &[from(host(1))])])), ("b", slice(vec![at(&[3], &[])]))], version, 3);
        let (own, foreign) = (datagram(host(1), host(2), 53, 7), datagram(host(9), host(2), 53, 7));
        let none = if version == Version::V1_0 { PortNo::ANY } else { PortNo::CONTROLLER };
        let mut sent = |message: Message| {
            world.out.clear();
            let refused = world.refused("a", message);
            (refused.is_some(), world.out.iter().map(|(_, port, _)| *port).collect::<Vec<_>>())
        };
        assert_eq!(sent(packet_out(none, out(2), &own)), (false, vec![2]));
        assert_eq!(sent(packet_out(none, out(3), &own)), (true, vec![]));
        assert_eq!(sent(packet_out(none, out(2), &foreign)), (true, vec![]));
        assert_eq!(sent(packet_out(PortNo(3), out(2), &own)), (true, vec![]));
        assert_eq!(sent(packet_out(none, vec![Action::output(PortNo::FLOOD)], &own)), (false, vec![1, 2]));
        assert_eq!(sent(packet_out(PortNo(1), vec![Action::output(PortNo::ALL)], &own)), (false, vec![2]));
        assert_eq!(sent(packet_out(none, vec![Action::output(PortNo::NORMAL)], &own)), (true, vec![]));
        let spoof = vec![Action::SetField(Oxm::mac(Field::EthSrc, host(9))), Action::output(PortNo(2))];
        assert_eq!(sent(packet_out(none, spoof, &own)), (true, vec![]));
        assert_eq!(sent(packet_out(PortNo(1), vec![Action::output(PortNo::TABLE)], &own)), (false, vec![]));
    }
}

#[test]
fn links_are_found_by_each_slice_alone() {
    for version in Version::ALL {
        let parts = |number| vec![part(&[from(host(number))]), part(&[to(host(number))])];
        let mut world = World::with_switch(&[("a", SliceSpec { priority: 1, ..slice(parts(1)) }), ("b", slice(parts(2)))], version, 3);
        let mut frame = [&[1, 0x80, 0xc2, 0, 0, 0xe, 2, 0, 0, 0, 0, 1, 0x88, 0xcc][..], &[7; 40]].concat();
        for full in [false, true] {
            if full {
                frame.resize(1514, 0);
            }
            world.out.clear();
            assert_eq!(world.refused("b", packet_out(PortNo::ANY, out(1), &frame.clone().into())), None);
            let sent = world.out[0].2.clone();
            assert!(sent.len() <= 1514);
            let (_, packets) = world.frame(2, &sent);
            assert_eq!(packets.len(), 1, "{:?}", world.troubles());
            assert_eq!((packets[0].0.as_str(), &packets[0].1.data[..]), ("b", &frame[..]));
            // A host changes a byte: it is nobody's.
            let mut forged = sent.to_vec();
            forged[30] ^= 1;
            assert_eq!(world.frame(2, &forged.into()).1, []);
        }
        // The entry by which controllers ask for them.
        let entry = add(65_000, &[Oxm::exact(Field::EthType, 0x88ccu16)], vec![Action::output(PortNo::CONTROLLER)]);
        assert_eq!(world.refused("b", Message::FlowMod(FlowMod { cookie: Cookie(3), ..entry })), None);
        assert_eq!(flows(&mut world, "b", FlowQuery::default()).len(), 1);
    }
}

#[test]
fn ports_are_shown_to_their_slices_only() {
    let mut world = World::with_switch(&two(), Version::V1_3, 4);
    let answer = ask(&mut world, "b", RequestBody::PortDescription);
    let [ReplyBody::PortDescription(ports)] = answer.as_slice() else { panic!() };
    assert_eq!(ports.iter().map(|port| port.number.0).collect::<Vec<_>>(), [3, 4]);
    let answer = ask(&mut world, "b", RequestBody::Port(PortNo::ANY));
    let [ReplyBody::Port(counters)] = answer.as_slice() else { panic!() };
    assert_eq!(counters.iter().map(|port| port.port.0).collect::<Vec<_>>(), [3, 4]);
    assert_eq!(
        world.refused("b", Message::MultipartRequest(MultipartRequest::new(RequestBody::Port(PortNo(1))))),
        Some(ErrorCode::BadRequestBadPort)
    );
    let status = |world: &World, slice: &str| {
        let id = world.tenant(slice, 1);
        world.tenants[&id]
            .events
            .iter()
            .filter(|event| matches!(event, Event::Message { message, .. } if matches!(&**message, Message::PortStatus(_))))
            .count()
    };
    world.tenants.values_mut().for_each(|tenant| tenant.events.clear());
    world.model().set_port(4, false);
    world.settle();
    assert_eq!((status(&world, "a"), status(&world, "b")), (0, 1));
    let change = PortMod {
        number: PortNo(3),
        address: host(1),
        config: PortConfig::PORT_DOWN,
        mask: PortConfig::PORT_DOWN,
        advertise: Default::default(),
    };
    assert_eq!(world.refused("b", Message::PortMod(change)), Some(ErrorCode::PortModFailedEperm));
}

#[test]
fn a_flood_reaches_ports_that_come_later() {
    let mut world = World::with_switch(&[("a", slice(vec![part(&[])]))], Version::V1_3, 2);
    world.send("a", Message::FlowMod(add(1, &[], vec![Action::output(PortNo::FLOOD)])));
    assert_eq!(world.frame(1, &announcement(host(1), 1)).0, [2]);
    world.model().set_port(3, true);
    world.settle();
    assert_eq!(world.frame(1, &announcement(host(1), 1)).0, [2, 3]);
}

#[test]
fn groups_have_numbers_of_their_own() {
    let mut world = World::with_switch(&two(), Version::V1_3, 4);
    let group = |command, ports: &[u32]| {
        let bucket = |port: &u32| Bucket { weight: 0, watch_port: PortNo::ANY, watch_group: GroupId::ANY, actions: out(*port) };
        Message::GroupMod(GroupMod { command, kind: GroupKind::All, group: GroupId(1), buckets: ports.iter().map(bucket).collect() })
    };
    assert_eq!(world.refused("a", group(ModCommand::Add, &[1, 2])), None);
    assert_eq!(world.refused("b", group(ModCommand::Add, &[3, 4])), None);
    assert_eq!(world.refused("b", group(ModCommand::Add, &[3])), Some(ErrorCode::GroupModFailedGroupExists));
    assert_eq!(world.refused("b", group(ModCommand::Modify, &[1])), Some(ErrorCode::BadActionEperm));
    let to_group = |slice: &str, world: &mut World| world.refused(slice, Message::FlowMod(add(10, &[], vec![Action::Group(GroupId(1))])));
    assert_eq!([to_group("a", &mut world), to_group("b", &mut world)], [None, None]);
    let frame = announcement(host(1), 1);
    assert_eq!((world.frame(1, &frame).0, world.frame(3, &frame).0), (vec![2], vec![4]));
    let answer = ask(&mut world, "b", RequestBody::GroupDescription);
    let [ReplyBody::GroupDescription(groups)] = answer.as_slice() else { panic!() };
    assert_eq!((groups.len(), groups[0].group, groups[0].buckets.len()), (1, GroupId(1), 2));
    // Deleting all of one slice leaves the other's.
    let all = GroupMod { command: ModCommand::Delete, kind: GroupKind::All, group: GroupId::ALL, buckets: Vec::new() };
    assert_eq!(world.refused("b", Message::GroupMod(all)), None);
    assert_eq!((world.frame(1, &frame).0, world.frame(3, &frame).0), (vec![2], vec![]));
    assert_eq!(flows(&mut world, "b", FlowQuery::default()).len(), 0);
}

#[test]
fn limits_hold_and_other_slices_notice_nothing() {
    let [mut a, b] = two();
    a.1.limits = Limits { entries: 10, to_controller: 20, ..Limits::default() };
    let mut world = World::with_switch(&[a, b], Version::V1_3, 4);
    let mut full = 0;
    for number in 0..20 {
        full += usize::from(
            world.refused("a", Message::FlowMod(add(number, &[to(host(1))], out(2)))) == Some(ErrorCode::FlowModFailedTableFull),
        );
    }
    // Each entry is one row for each of two ports.
    assert_eq!(full, 15);
    for slice in ["a", "b"] {
        let delete = FlowMod { command: FlowCommand::Delete, ..FlowMod::default() };
        world.send(slice, Message::FlowMod(delete));
        world.send(slice, Message::FlowMod(add(0, &[], vec![Action::output(PortNo::CONTROLLER)])));
    }
    let got = |world: &mut World, port| {
        (0..200).filter(|number| !world.frame(port, &datagram(host(1), host(2), 53, *number)).1.is_empty()).count()
    };
    assert_eq!((got(&mut world, 1), got(&mut world, 3)), (20, 200));
    let dropped: Vec<u64> = world.slicer.snapshot().slices.iter().map(|slice| slice.counters.dropped).collect();
    assert_eq!(dropped, [0, 180, 0]);
}

#[test]
fn too_many_messages_wait_and_none_is_lost() {
    let [mut a, b] = two();
    a.1.limits = Limits { from_controller: 100, ..Limits::default() };
    let mut world = World::with_switch(&[a, b], Version::V1_3, 4);
    let id = world.tenant("a", 1);
    let now = world.now;
    for number in 0..1000u16 {
        world.tenants.get_mut(&id).unwrap().connection.request(now, Message::FlowMod(add(number, &[to(host(1))], out(2)))).unwrap();
    }
    world.settle();
    assert!(flows(&mut world, "b", FlowQuery::default()).is_empty());
    let count = |world: &World| world.slicer.snapshot().slices.iter().find(|slice| slice.name == "a").unwrap().entries.0;
    assert!(count(&world) <= 110, "{}", count(&world));
    world.pass(Duration::from_secs(12));
    assert_eq!(count(&world), 1000);
}

#[test]
fn a_controller_that_does_not_read_is_cut_off_alone() {
    let mut world = World::with_switch(&two(), Version::V1_3, 4);
    for slice in ["a", "b"] {
        world.send(slice, Message::FlowMod(add(0, &[], vec![Action::output(PortNo::CONTROLLER)])));
    }
    let (id, other) = (world.tenant("a", 1), world.tenant("b", 1));
    world.tenants.get_mut(&id).unwrap().deaf = true;
    for number in 0..20_000u64 {
        let frame = datagram(host(1), host(2), 53, number);
        world.now = world.now + Duration::from_millis(1);
        let out = world.model().frame(1, &frame);
        assert!(out.is_empty());
        if number % 100 == 0 {
            world.settle();
            world.tenants.values_mut().for_each(|tenant| tenant.events.clear());
        }
    }
    world.pass(Duration::from_secs(20));
    assert!(world.tenants.contains_key(&other) && !world.tenants.contains_key(&id), "{}", world.troubles());
    assert!(world.troubles().contains("slice a"));
    world.pass(Duration::from_secs(20));
    // It is dialled again.
    world.tenant("a", 1);
}

#[test]
fn each_slice_elects_a_master_of_its_own() {
    let two_controllers = |mut spec: SliceSpec| {
        spec.controllers.push("second".to_owned());
        spec
    };
    let [a, b] = two();
    let mut world = World::with_switch(&[(a.0, two_controllers(a.1)), b], Version::V1_3, 4);
    let ids: Vec<_> = world.tenants.iter().filter(|(_, tenant)| tenant.link.slice == "a").map(|(id, _)| *id).collect();
    assert_eq!(ids.len(), 2);
    let master = |generation| Message::RoleRequest(RoleMessage { role: Role::Master, generation });
    world.send_from(ids[0], master(1));
    world.send_from(ids[1], master(2));
    let events = world.send_from(ids[0], Message::FlowMod(add(1, &[], out(2))));
    assert!(
        events.iter().any(|event| matches!(event, Event::Failed { error, .. } if error.code == ErrorCode::BadRequestIsSlave)),
        "{events:?}"
    );
    let stale = world.send_from(ids[0], master(1));
    assert!(stale.iter().any(|event| matches!(event, Event::Failed { error, .. } if error.code == ErrorCode::RoleRequestFailedStale)));
    assert_eq!(world.refused("b", Message::FlowMod(add(1, &[], out(3)))), None);
}

#[test]
fn regression_a_group_gets_no_packets_that_were_changed_into_anothers() {
    let parts = |number| vec![part(&[from(host(number))]), part(&[to(host(number))])];
    let mut world = World::with_switch(&[("a", slice(parts(1))), ("b", SliceSpec { priority: 1, ..slice(parts(2)) })], Version::V1_3, 4);
    let bucket = Bucket { weight: 0, watch_port: PortNo::ANY, watch_group: GroupId::ANY, actions: out(2) };
    let group = GroupMod { command: ModCommand::Add, kind: GroupKind::All, group: GroupId(1), buckets: vec![bucket] };
    assert_eq!(world.refused("a", Message::GroupMod(group)), None);
    let changed = |number| vec![Action::SetField(Oxm::mac(Field::EthDst, host(number))), Action::Group(GroupId(1))];
    assert_eq!(world.refused("a", Message::FlowMod(add(10, &[from(host(1))], changed(2)))), Some(ErrorCode::BadActionEperm));
    assert_eq!(world.refused("a", Message::FlowMod(add(10, &[from(host(1))], changed(3)))), None);
    assert_eq!(world.frame(1, &datagram(host(1), host(4), 53, 7)).0, [2]);
    let frame = datagram(host(1), host(4), 53, 7);
    assert!(world.refused("a", packet_out(PortNo::CONTROLLER, changed(2), &frame)).is_some());
    assert_eq!(world.refused("a", packet_out(PortNo::CONTROLLER, changed(3), &frame)), None);
    // Action sets are executed on what the packet is at the end.
    let later = FlowMod {
        instructions: vec![
            Instruction::ApplyActions(vec![Action::SetField(Oxm::mac(Field::EthDst, host(2)))]),
            Instruction::WriteActions(out(2)),
        ],
        ..add(11, &[from(host(1))], Vec::new())
    };
    assert_eq!(world.refused("a", Message::FlowMod(later)), Some(ErrorCode::BadActionEperm));
}
