//! A hostile controller sends anything, and a reference model of the flow space says what it may have done: nothing to packets of others.

use std::time::Duration;

use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::FlowFlags;
use braid_openflow::flow::{FlowCommand, FlowMod};
use braid_openflow::group::{Band, BandKind, Bucket, GroupKind, GroupMod, MeterMod, ModCommand};
use braid_openflow::ids::{BufferId, Cookie, GroupId, MeterId, PortNo, QueueId, Seconds, TableId};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{FlowQuery, MultipartRequest, RequestBody};
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::{Event, Message, Version};
use braid_slice::{Limits, Part, SliceSpec};
use braid_switch::frames::host;
use bytes::Bytes;

use crate::support::*;

const PORTS: u32 = 5;
const HOSTILE: &str = "hostile";
const VICTIM: &str = "victim";

/// The reference: which slice has a frame at a port, by the description of the slices alone.
struct Reference(Vec<(String, SliceSpec)>);

impl Reference {
    fn owner(&self, port: u32, frame: &[u8]) -> &str {
        let has = |part: &Part| {
            let at_port = part.ports.contains(PortNo(port));
            at_port && part.header.oxms().all(|oxm| holds(&oxm, frame))
        };
        let claims = |(_, spec): &&(String, SliceSpec)| spec.space.iter().any(has);
        self.0.iter().filter(claims).max_by_key(|(_, spec)| spec.priority).map_or("production", |(name, _)| name)
    }
}

fn be(frame: &[u8], at: usize, size: usize) -> Option<u128> {
    Some(frame.get(at..at + size)?.iter().fold(0, |value, byte| value << 8 | u128::from(*byte)))
}

/// Whether a frame of this test has a field.
fn holds(oxm: &Oxm, frame: &[u8]) -> bool {
    let Oxm::Basic { field, value, mask } = oxm else { return false };
    let tagged = be(frame, 12, 2) == Some(0x8100);
    let at = if tagged { 16 } else { 12 };
    let ethertype = be(frame, at, 2);
    let ip = |offset, size| if ethertype == Some(0x0800) { be(frame, at + 2 + offset, size) } else { None };
    let port = |protocol, offset: usize| if ip(9, 1) == Some(protocol) { ip(20 + offset, 2) } else { None };
    let found = match field {
        Field::EthDst => be(frame, 0, 6),
        Field::EthSrc => be(frame, 6, 6),
        Field::EthType => ethertype,
        Field::VlanVid if tagged => be(frame, 14, 2).map(|tag| tag & 0xfff | 0x1000),
        Field::VlanVid => Some(0),
        Field::IpProto => ip(9, 1),
        Field::Ipv4Src => ip(12, 4),
        Field::Ipv4Dst => ip(16, 4),
        Field::TcpDst => port(6, 2),
        Field::UdpDst => port(17, 2),
        other => panic!("{other:?}"),
    };
    found.is_some_and(|found| found & mask.unwrap_or(u128::MAX) == *value)
}

fn vlan(id: u16) -> Oxm {
    Oxm::vlan(Some(id))
}

fn ip() -> Oxm {
    Oxm::exact(Field::EthType, 0x0800u16)
}

fn network(field: Field, second: u8) -> Oxm {
    Oxm::ipv4(field, [10, second, 0, 0].into(), 16)
}

/// Kinds of slices: by ports, VLANs, hosts, addresses, applications, and mixtures.
fn worlds() -> Vec<(Vec<Part>, u8, Vec<Part>, u8)> {
    let http = [ip(), Oxm::exact(Field::IpProto, 6u8), Oxm::exact(Field::TcpDst, 80u16)];
    vec![
        (vec![at(&[1, 2], &[])], 0, vec![at(&[3, 4], &[])], 0),
        (vec![part(&[vlan(10)])], 0, vec![part(&[vlan(20)])], 0),
        (vec![part(&[from(host(1))]), part(&[to(host(1))])], 0, vec![part(&[from(host(2))]), part(&[to(host(2))])], 1),
        (vec![part(&[from(host(1))]), part(&[to(host(1))])], 2, vec![part(&[from(host(2))]), part(&[to(host(2))])], 1),
        (vec![part(&[ip(), network(Field::Ipv4Src, 1)]), part(&[ip(), network(Field::Ipv4Dst, 1)])], 0, vec![part(&http)], 3),
        (vec![part(&http)], 1, vec![at(&[1, 2, 3], &[])], 0),
        (vec![at(&[1, 2], &[]), at(&[5], &[vlan(10)])], 1, vec![at(&[3, 4], &[]), at(&[5], &[vlan(20)])], 1),
        (vec![part(&[])], 0, vec![at(&[5], &[])], 1),
        (vec![part(&[Oxm::vlan(None)])], 0, vec![part(&[Oxm::masked(Field::VlanVid, 0x1000u16, 0x1000u16), from(host(2))])], 0),
    ]
}

fn any_frame(random: &mut Random) -> Bytes {
    let mac = |random: &mut Random| if random.below(6) == 0 { [0xff; 6] } else { host(1 + random.below(4) as u8).0 };
    let mut frame = [mac(random), mac(random)].concat();
    frame[6] &= 0xfe;
    match random.below(4) {
        0 => frame.extend([0x81, 0, 0, 10]),
        1 => frame.extend([0x81, 0, 0x20, 20]),
        _ => {}
    }
    let address = |random: &mut Random| [10, random.below(3) as u8, 0, random.below(4) as u8];
    match random.below(5) {
        0 => {
            frame.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
            frame.extend([0; 20]);
        }
        1 => frame.extend([0x12, 0x34, 1, 2, 3, 4]),
        _ => {
            let (protocol, one, other) = (random.one(&[6u8, 17, 1]), address(random), address(random));
            frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0]);
            frame.extend(one);
            frame.extend(other);
            frame.extend([0x10, 0]);
            frame.extend(random.one(&[80u16, 53, 443]).to_be_bytes());
            frame.extend([0; 16]);
        }
    }
    frame.extend(random.next().to_be_bytes());
    frame.into()
}

fn any_field(random: &mut Random) -> Oxm {
    let mac = host(1 + random.below(4) as u8);
    match random.below(16) {
        0 => Oxm::in_port(PortNo(random.below(7) as u32)),
        1 => from(mac),
        2 => to(mac),
        3 => Oxm::exact(Field::EthType, random.one(&[0x0800u16, 0x0806, 0x1234, 0x88cc])),
        4 => random.one(&[vlan(10), vlan(20), vlan(30), Oxm::vlan(None)]),
        5 => Oxm::masked(Field::VlanVid, 0x1000u16, 0x1000u16),
        6 => Oxm::exact(Field::VlanPcp, random.below(8) as u8),
        7 => Oxm::exact(Field::IpProto, random.one(&[6u8, 17, 1])),
        8 => network(random.one(&[Field::Ipv4Src, Field::Ipv4Dst]), random.below(3) as u8),
        9 => Oxm::ipv4(random.one(&[Field::Ipv4Src, Field::Ipv4Dst]), [10, 1, 0, random.below(4) as u8].into(), 32),
        10 => Oxm::exact(Field::TcpDst, random.one(&[80u16, 53, 443])),
        11 => Oxm::exact(Field::UdpDst, random.one(&[80u16, 53, 443])),
        12 => Oxm::masked(random.one(&[Field::EthSrc, Field::EthDst]), random.below(2), 1u8),
        13 => Oxm::exact(Field::IpDscp, random.below(64) as u8),
        14 => Oxm::exact(Field::Metadata, random.below(3) as u8),
        _ => Oxm::exact(Field::ArpOp, 1u8),
    }
}

fn any_match(random: &mut Random) -> Match {
    let mut fields: Vec<Oxm> = (0..random.below(5)).map(|_| any_field(random)).collect();
    if random.below(2) == 0 {
        fields.push(ip());
        fields.push(Oxm::exact(Field::IpProto, random.one(&[6u8, 17])));
    }
    if random.below(10) > 0 {
        fields.sort();
        fields.dedup_by_key(|oxm| oxm.field());
    }
    Match { fields }
}

fn any_port(random: &mut Random) -> PortNo {
    let reserved =
        [PortNo::IN_PORT, PortNo::TABLE, PortNo::NORMAL, PortNo::FLOOD, PortNo::ALL, PortNo::CONTROLLER, PortNo::LOCAL, PortNo::ANY];
    if random.below(3) == 0 { random.one(&reserved) } else { PortNo(random.below(7) as u32) }
}

fn any_actions(random: &mut Random, version: Version) -> Vec<Action> {
    let mut action = || match (random.below(12), version) {
        (0..=4, _) => Action::output(any_port(random)),
        (5, Version::V1_0) => Action::SetVlanVid(random.one(&[10, 20, 30])),
        (6, Version::V1_0) => Action::SetVlanPcp(3),
        (7, _) => Action::PopVlan,
        (5, _) => Action::PushVlan(0x8100),
        (6, _) => Action::SetField(random.one(&[vlan(10), vlan(20), Oxm::exact(Field::VlanVid, 0u8)])),
        (8, _) => Action::SetField(Oxm::mac(random.one(&[Field::EthSrc, Field::EthDst]), host(1 + random.below(4) as u8))),
        (9, _) => Action::SetField(Oxm::ipv4(random.one(&[Field::Ipv4Src, Field::Ipv4Dst]), [10, random.below(3) as u8, 0, 1].into(), 32)),
        (10, Version::V1_0) => Action::SetField(Oxm::exact(random.one(&[Field::TpSrc, Field::TpDst]), random.one(&[80u16, 53]))),
        (10, _) => Action::SetField(Oxm::exact(random.one(&[Field::TcpDst, Field::UdpDst]), random.one(&[80u16, 53]))),
        (_, Version::V1_0) => Action::Enqueue { port: any_port(random), queue: QueueId(1) },
        (_, _) => {
            let group = Action::Group(GroupId(random.below(4) as u32));
            random.one(&[group, Action::SetQueue(QueueId(1)), Action::DecNwTtl])
        }
    };
    let count = [1, 1, 2, 3, 5][action_count(&mut action)];
    (0..count).map(|_| action()).collect()
}

/// How many actions: as the first one says, which is dropped.
fn action_count(action: &mut impl FnMut() -> Action) -> usize {
    match action() {
        Action::Output { port, .. } => port.0 as usize % 5,
        _ => 3,
    }
}

fn any_flow(random: &mut Random, version: Version) -> FlowMod {
    use FlowCommand::*;
    let command = random.one(&[Add, Add, Add, Add, Add, Add, Modify, ModifyStrict, Delete, DeleteStrict]);
    let forged =
        [0xb5cu64 << 52 | 1 << 40 | random.below(50), 0xb5cu64 << 52 | 2 << 40 | random.below(50), 0xb5cf_ff00_0000_0000, 7, u64::MAX];
    let mut flow = FlowMod {
        command,
        cookie: Cookie(random.one(&forged)),
        priority: {
            let any = random.below(65_536) as u16;
            random.one(&[0, 1, 100, 101, 5000, 5041, 32_768, 65_535, any])
        },
        matching: any_match(random),
        flags: if random.below(4) == 0 { FlowFlags::SEND_FLOW_REM } else { FlowFlags::NONE },
        idle_timeout: Seconds(random.one(&[0, 0, 0, 10])),
        buffer: Some(BufferId(random.below(10) as u32)).filter(|_| random.below(8) == 0),
        out_port: if random.below(8) == 0 { any_port(random) } else { PortNo::ANY },
        instructions: vec![Instruction::ApplyActions(any_actions(random, version))],
        ..FlowMod::default()
    };
    if version == Version::V1_3 {
        flow.table = TableId(random.one(&[0, 0, 0, 1, 2, 255]));
        flow.cookie_mask = Cookie(random.one(&[0, 0, u64::MAX, 0xfff << 52]));
        flow.instructions = (0..1 + random.below(3))
            .map(|_| match random.below(8) {
                0..=3 => Instruction::ApplyActions(any_actions(random, version)),
                4 => Instruction::WriteActions(any_actions(random, version)),
                5 => Instruction::GotoTable(TableId(random.below(5) as u8)),
                6 => random.one(&[Instruction::ClearActions, Instruction::WriteMetadata { metadata: 1, mask: 3 }]),
                _ => Instruction::Meter(MeterId(random.below(3) as u32)),
            })
            .collect();
    }
    flow
}

fn any_message(random: &mut Random, version: Version) -> Message {
    let flow = |random: &mut Random| Message::FlowMod(any_flow(random, version));
    match (random.below(20), version) {
        (0..=12, _) => flow(random),
        (13..=15, _) => {
            let (port, actions, frame) = (any_port(random), any_actions(random, version), any_frame(random));
            packet_out(port, actions, &frame)
        }
        (16, _) => {
            let port = PortNo(random.below(7) as u32);
            Message::MultipartRequest(MultipartRequest::new(random.one(&[
                RequestBody::Flow(FlowQuery::default()),
                RequestBody::Aggregate(FlowQuery::default()),
                RequestBody::Port(port),
            ])))
        }
        (17, Version::V1_3) => {
            let bucket = |random: &mut Random| Bucket {
                weight: 0,
                watch_port: if random.below(4) == 0 { any_port(random) } else { PortNo::ANY },
                watch_group: GroupId::ANY,
                actions: any_actions(random, version).into_iter().filter(|action| !matches!(action, Action::Group(_))).collect(),
            };
            let buckets = (0..random.below(4)).map(|_| bucket(random)).collect();
            let command = random.one(&[ModCommand::Add, ModCommand::Add, ModCommand::Modify, ModCommand::Delete]);
            Message::GroupMod(GroupMod {
                command,
                kind: GroupKind::All,
                group: GroupId(random.one(&[0, 1, 2, 3, GroupId::ALL.0])),
                buckets,
            })
        }
        (18, Version::V1_3) => Message::MeterMod(MeterMod {
            command: random.one(&[ModCommand::Add, ModCommand::Modify, ModCommand::Delete]),
            flags: Default::default(),
            meter: MeterId(random.one(&[1, 2, MeterId::ALL.0, MeterId::CONTROLLER.0])),
            bands: vec![Band { rate: 1, burst: 1, kind: BandKind::Drop }],
        }),
        _ => flow(random),
    }
}

/// What the victim does: it forwards by address, and floods the rest; with 1.3, its miss goes to its controller.
fn serve(world: &mut World, reference: &Reference, version: Version) {
    let ports: Vec<u32> = (1..=PORTS)
        .filter(|port| {
            reference.0.iter().any(|(name, spec)| name == VICTIM && spec.space.iter().any(|part| part.ports.contains(PortNo(*port))))
        })
        .collect();
    for number in 1..=4u8 {
        let port = ports[usize::from(number) % ports.len()];
        let _ = world.refused(VICTIM, Message::FlowMod(add(100, &[to(host(number))], out(port))));
    }
    let _ = world.refused(VICTIM, Message::FlowMod(add(50, &[to(braid_switch::frames::BROADCAST)], vec![Action::output(PortNo::FLOOD)])));
    if version == Version::V1_3 {
        let _ = world.refused(VICTIM, Message::FlowMod(add(0, &[], vec![Action::output(PortNo::CONTROLLER)])));
    }
}

fn world_of(slices: &[(String, SliceSpec)], version: Version) -> World {
    let slices: Vec<(&str, SliceSpec)> = slices.iter().map(|(name, spec)| (name.as_str(), spec.clone())).collect();
    World::with_switch(&slices, version, PORTS)
}

/// Packets that leave by ports, and those that slices get.
type Fate = (Vec<(u32, Bytes)>, Vec<(String, Bytes)>);

/// What becomes of a frame: where it leaves, as what, and who gets it.
fn fate(world: &mut World, port: u32, frame: &Bytes) -> Fate {
    let (_, packets) = world.frame(port, frame);
    let mut left: Vec<(u32, Bytes)> = world.out.iter().map(|(_, port, frame)| (*port, frame.clone())).collect();
    left.sort();
    (left, packets.into_iter().map(|(slice, packet)| (slice, packet.data)).collect())
}

fn attack(seed: u64, messages: usize) {
    let mut random = Random(seed | 1);
    let kinds = worlds();
    let per_world = messages / (kinds.len() * 2);
    for (kind, (hostile, one, victim, other)) in kinds.into_iter().enumerate() {
        for version in Version::ALL {
            let mut specs: Vec<(String, SliceSpec)> = [(HOSTILE, hostile.clone(), one), (VICTIM, victim.clone(), other)]
                .into_iter()
                .map(|(name, space, priority)| (name.to_owned(), SliceSpec { priority, ..slice(space) }))
                .collect();
            for (_, spec) in &mut specs {
                spec.limits = Limits { entries: 600, to_controller: 1_000_000, ..Limits::default() };
            }
            // 1.0 has no masks of VLANs.
            if version == Version::V1_0 && kind == 8 {
                continue;
            }
            let reference = Reference(specs.clone());
            let (mut attacked, mut quiet) = (world_of(&specs, version), world_of(&specs, version));
            serve(&mut attacked, &reference, version);
            serve(&mut quiet, &reference, version);
            for number in 0..per_world {
                let message = any_message(&mut random, version);
                let context = || format!("seed {seed}, slices {kind}, {version:?}, message {number}: {message:?}");
                attacked.now = attacked.now + Duration::from_millis(1);
                attacked.out.clear();
                let Some(id) = attacked.tenants.iter().find(|(_, tenant)| tenant.link.slice == HOSTILE).map(|(id, _)| *id) else {
                    panic!("cut off: {}\n{}", context(), attacked.troubles());
                };
                let now = attacked.now;
                let tenant = attacked.tenants.get_mut(&id).unwrap();
                tenant.events.clear();
                // Some of it cannot be encoded at all.
                if tenant.connection.request(now, message.clone()).is_err() {
                    continue;
                }
                if number % 16 == 0 {
                    tenant.connection.request(now, Message::BarrierRequest).unwrap();
                }
                attacked.settle();
                // Packets that it sends are its own, wherever they leave.
                for (_, port, frame) in &attacked.out {
                    assert_eq!(reference.owner(*port, frame), HOSTILE, "left by port {port}: {frame:?}: {}", context());
                }
                if number % 8 != 0 {
                    continue;
                }
                let (port, frame) = (1 + random.below(PORTS.into()) as u32, any_frame(&mut random));
                let owner = reference.owner(port, &frame).to_owned();
                let (left, packets) = fate(&mut attacked, port, &frame);
                if owner == HOSTILE {
                    for (port, frame) in &left {
                        assert_eq!(reference.owner(*port, frame), HOSTILE, "left by port {port}: {frame:?}: {}", context());
                    }
                    assert!(packets.iter().all(|(slice, _)| slice == HOSTILE), "{packets:?}: {}", context());
                } else {
                    assert_eq!((left, packets), fate(&mut quiet, port, &frame), "at port {port}, {owner}'s: {frame:?}: {}", context());
                }
            }
            // The other slice's entries are as they were.
            let of_victim = |world: &World| world.slicer.snapshot().slices.iter().find(|slice| slice.name == VICTIM).unwrap().entries;
            assert_eq!(of_victim(&attacked), of_victim(&quiet));
            let hostile = attacked.slicer.snapshot().slices.into_iter().find(|slice| slice.name == HOSTILE).unwrap();
            assert!(hostile.entries.1 <= 600 && hostile.counters.refused > 0, "{hostile:?}");
        }
    }
}

#[test]
fn a_hostile_controller_does_nothing_to_packets_of_others() {
    attack(seed("a_hostile_controller"), 20_000);
}

#[test]
#[ignore = "takes minutes: the million of the benchmark"]
fn a_million_hostile_messages_do_nothing_to_packets_of_others() {
    attack(seed("a_million"), 1_000_000);
}

#[test]
fn half_messages_and_noise_end_one_connection_at_most() {
    let mut random = Random(seed("half_messages") | 1);
    let slices = [(HOSTILE.to_owned(), slice(vec![at(&[1, 2], &[])])), (VICTIM.to_owned(), slice(vec![at(&[3, 4], &[])]))];
    let mut world = world_of(&slices, Version::V1_3);
    let victim = world.tenant(VICTIM, 1);
    let mut ended = 0;
    for _ in 0..300 {
        world.pass(Duration::from_secs(20));
        let id = world.tenant(HOSTILE, 1);
        let mut bytes = Vec::new();
        any_message(&mut random, Version::V1_3)
            .encode(Version::V1_3, braid_openflow::ids::Xid(random.next() as u32), &mut bytes)
            .unwrap_or(());
        for _ in 0..random.below(4) {
            if !bytes.is_empty() {
                let at = random.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << random.below(8);
            }
        }
        bytes.truncate(random.below(bytes.len() as u64 + 1) as usize);
        world.slicer.receive(world.now, id, &bytes);
        world.settle();
        if !world.tenants.contains_key(&id) || random.below(2) == 0 {
            ended += 1;
            world.slicer.disconnected(world.now, id);
            world.settle();
        }
    }
    assert!(ended > 10 && world.tenants.contains_key(&victim), "{ended}");
    let done = world.send(VICTIM, Message::FlowMod(add(1, &[], out(4))));
    assert!(done.iter().any(|event| matches!(event, Event::Done { .. })));
    assert_eq!(world.frame(3, &any_frame(&mut random)).0, [4]);
}
