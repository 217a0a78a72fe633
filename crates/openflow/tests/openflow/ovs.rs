//! Open vSwitch understands what the crate encodes: `ovs-ofctl ofp-print` decodes it to the same meaning.

#![allow(clippy::disallowed_methods, reason = "runs ovs-ofctl")]

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::hex;
use crate::support::samples::{MAC, samples};
use braid_model::ByteCount;
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::{FlowFlags, GroupCapabilities, MeterFlags, PortConfig, PortFeatures, PortState};
use braid_openflow::flow::{FlowCommand, FlowMod, FlowRemoved, PacketIn, PacketReason, RemovedReason};
use braid_openflow::group::{Band, BandKind, Bucket, GroupKind, GroupMod, MeterMod, ModCommand};
use braid_openflow::ids::{BufferId, Cookie, DatapathId, GroupId, Kbps, MaxLen, MeterId, Permille, PortNo, QueueId, Seconds, TableId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{
    FlowStats, GroupDescription, GroupFeatures, GroupKindFeatures, GroupStats, MeterConfig, MeterFeatures, MeterStats, MultipartReply,
    PortStats, QueueStats, ReplyBody, TableStats, Traffic,
};
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::port::{Port, PortReason, PortStatus, Queue, QueueConfig, QueueProperty};
use braid_openflow::switch::{AsyncConfig, ErrorMessage, Features, Hello, Role, RoleMessage};
use braid_openflow::{ErrorCode, Message, Version};
use bytes::Bytes;

/// Samples that Open vSwitch does not support: experimenters, some actions and tables, emergency entries with time-outs.
const UNSUPPORTED: [&str; 12] = [
    "os-ken/of13/error_experimenter",
    "os-ken/of13/experimenter",
    "os-ken/of13/flow_mod",
    "os-ken/of13/group_mod",
    "os-ken/of13/meter_mod",
    "os-ken/of13/table_features_request",
    "os-ken/of13/experimenter_request",
    "os-ken/of10/flow_mod",
    "os-ken/of10/packet_out",
    "manual/of10/vendor",
    "manual/of10/vendor_request",
    "manual/of10/vendor_reply",
];

/// Whether Open vSwitch's decoder is there. In CI it must be.
pub(crate) fn decoder_exists() -> bool {
    let found = Command::new("ovs-ofctl").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let found = found.is_ok_and(|status| status.success());
    assert!(found || std::env::var_os("CI").is_none(), "ovs-ofctl is missing: run lab/install-deps.sh");
    if !found {
        eprintln!("skipped: ovs-ofctl is missing");
    }
    found
}

fn printed(version: Version, message: &Message) -> String {
    let mut out = Vec::new();
    message.encode(version, Xid(1), &mut out).unwrap_or_else(|error| panic!("{error}"));
    let output = Command::new("ovs-ofctl").args(["ofp-print", &hex(&out)]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Checks that Open vSwitch prints each of the texts.
fn expect(version: Version, message: &Message, texts: &[&str]) {
    let printed = printed(version, message);
    assert!(!printed.contains("***"), "{message:?}: {printed}");
    for text in texts {
        assert!(printed.contains(text), "{text} is not in: {printed}");
    }
}

#[test]
fn samples_are_understood() {
    if !decoder_exists() {
        return;
    }
    for (name, version, message) in samples().iter().filter(|(name, ..)| !name.contains("field_") && !UNSUPPORTED.contains(&&name[..])) {
        let printed = printed(*version, message);
        assert!(!printed.contains("***"), "{name}: {printed}");
    }
}

fn flow(fields: impl IntoIterator<Item = Oxm>, instructions: Vec<Instruction>) -> Message {
    let flags = FlowFlags::SEND_FLOW_REM;
    Message::FlowMod(FlowMod { matching: Match::new(fields), instructions, flags, ..FlowMod::default() })
}

#[test]
fn fields_are_understood() {
    if !decoder_exists() {
        return;
    }
    let (ip, ipv6) = (Oxm::exact(Field::EthType, 0x0800u16), Oxm::exact(Field::EthType, 0x86ddu16));
    let (arp, mpls) = (Oxm::exact(Field::EthType, 0x0806u16), Oxm::exact(Field::EthType, 0x8847u16));
    let proto = |ethertype: &Oxm, number: u8| vec![ethertype.clone(), Oxm::exact(Field::IpProto, number)];
    let number = |field, value: u16| Oxm::exact(field, value);
    let v4 = |field, length| Oxm::ipv4(field, Ipv4Addr::new(10, 0, 0, 0), length);
    let v6 = |field, length| Oxm::ipv6(field, Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), length);
    let mut solicit = proto(&ipv6, 58);
    solicit.push(number(Field::Icmpv6Type, 135));
    let mut advertise = proto(&ipv6, 58);
    advertise.push(number(Field::Icmpv6Type, 136));
    let table: Vec<(Vec<Oxm>, Oxm, &str)> = vec![
        (vec![], Oxm::in_port(PortNo::LOCAL), "in_port=LOCAL"),
        (vec![], Oxm::masked(Field::Metadata, 3u8, 0xffu8), "metadata=0x3/0xff"),
        (vec![], Oxm::mac(Field::EthDst, MAC), "dl_dst=02:00:00:00:00:01"),
        (vec![], Oxm::masked(Field::EthSrc, 1u64 << 40, 1u64 << 40), "dl_src=01:00:00:00:00:00/01:00:00:00:00:00"),
        (vec![], number(Field::EthType, 0x88cc), "dl_type=0x88cc"),
        (vec![], Oxm::vlan(Some(5)), "dl_vlan=5"),
        (vec![], Oxm::vlan(None), "vlan_tci=0x0000"),
        (vec![], Oxm::masked(Field::VlanVid, 0x1000u16, 0x1000u16), "vlan_tci=0x1000/0x1000"),
        (vec![Oxm::vlan(Some(5))], number(Field::VlanPcp, 3), "dl_vlan_pcp=3"),
        (vec![ip.clone()], number(Field::IpDscp, 46), "nw_tos=184"),
        (vec![ip.clone()], number(Field::IpEcn, 1), "nw_ecn=1"),
        (vec![ip.clone()], number(Field::IpProto, 47), "nw_proto=47"),
        (vec![ip.clone()], v4(Field::Ipv4Src, 8), "nw_src=10.0.0.0/8"),
        (vec![ip.clone()], v4(Field::Ipv4Dst, 32), "nw_dst=10.0.0.0"),
        (proto(&ip, 6), number(Field::TcpSrc, 11), "tcp,tp_src=11"),
        (proto(&ip, 6), number(Field::TcpDst, 12), "tcp,tp_dst=12"),
        (proto(&ip, 17), number(Field::UdpSrc, 13), "udp,tp_src=13"),
        (proto(&ipv6, 17), number(Field::UdpDst, 14), "udp6,tp_dst=14"),
        (proto(&ip, 132), number(Field::SctpSrc, 15), "sctp,tp_src=15"),
        (proto(&ip, 132), number(Field::SctpDst, 16), "sctp,tp_dst=16"),
        (proto(&ip, 1), number(Field::Icmpv4Type, 8), "icmp_type=8"),
        (proto(&ip, 1), number(Field::Icmpv4Code, 2), "icmp_code=2"),
        (vec![arp.clone()], number(Field::ArpOp, 2), "arp_op=2"),
        (vec![arp.clone()], v4(Field::ArpSpa, 24), "arp_spa=10.0.0.0/24"),
        (vec![arp.clone()], v4(Field::ArpTpa, 32), "arp_tpa=10.0.0.0"),
        (vec![arp.clone()], Oxm::mac(Field::ArpSha, MAC), "arp_sha=02:00:00:00:00:01"),
        (vec![arp], Oxm::mac(Field::ArpTha, MAC), "arp_tha=02:00:00:00:00:01"),
        (vec![ipv6.clone()], v6(Field::Ipv6Src, 32), "ipv6_src=2001:db8::/32"),
        (vec![ipv6.clone()], v6(Field::Ipv6Dst, 128), "ipv6_dst=2001:db8::"),
        (vec![ipv6.clone()], Oxm::exact(Field::Ipv6Flabel, 0x12345u32), "ipv6_label=0x12345"),
        (proto(&ipv6, 58), number(Field::Icmpv6Type, 135), "icmp_type=135"),
        (proto(&ipv6, 58), number(Field::Icmpv6Code, 1), "icmp_code=1"),
        (solicit.clone(), v6(Field::Ipv6NdTarget, 128), "nd_target=2001:db8::"),
        (solicit, Oxm::mac(Field::Ipv6NdSll, MAC), "nd_sll=02:00:00:00:00:01"),
        (advertise, Oxm::mac(Field::Ipv6NdTll, MAC), "nd_tll=02:00:00:00:00:01"),
        (vec![mpls.clone()], Oxm::exact(Field::MplsLabel, 0xabcdeu32), "mpls_label=703710"),
        (vec![mpls.clone()], number(Field::MplsTc, 3), "mpls_tc=3"),
        (vec![mpls], number(Field::MplsBos, 1), "mpls_bos=1"),
        (vec![], Oxm::masked(Field::TunnelId, 1u64 << 40, 0xffu64 << 40), "tun_id=0x10000000000/0xff0000000000"),
    ];
    for (before, oxm, text) in table {
        let fields: Vec<Oxm> = before.into_iter().chain([oxm]).collect();
        assert_eq!(Match::new(fields.clone()).check(), Ok(()), "{text}");
        expect(Version::V1_3, &flow(fields, vec![]), &[text]);
    }
}

#[test]
fn actions_and_instructions_are_understood() {
    if !decoder_exists() {
        return;
    }
    let mpls = Oxm::exact(Field::EthType, 0x8847u16);
    let ip = Oxm::exact(Field::EthType, 0x0800u16);
    let table = [
        (ip.clone(), Action::Output { port: PortNo::CONTROLLER, max_len: MaxLen(128) }, "CONTROLLER:128"),
        (ip.clone(), Action::SetQueue(QueueId(3)), "set_queue:3"),
        (ip.clone(), Action::Group(GroupId(4)), "group:4"),
        (ip.clone(), Action::PushVlan(0x8100), "push_vlan:0x8100"),
        (ip.clone(), Action::PushMpls(0x8847), "push_mpls:0x8847"),
        (mpls.clone(), Action::PopMpls(0x0800), "pop_mpls:0x0800"),
        (mpls.clone(), Action::SetMplsTtl(9), "set_mpls_ttl(9)"),
        (mpls, Action::DecMplsTtl, "dec_mpls_ttl"),
        (ip.clone(), Action::SetNwTtl(10), "mod_nw_ttl:10"),
        (ip.clone(), Action::DecNwTtl, "dec_ttl"),
        (ip, Action::SetField(Oxm::ipv4(Field::Ipv4Dst, Ipv4Addr::new(10, 0, 0, 9), 32)), "set_field:10.0.0.9->ip_dst"),
        (Oxm::vlan(Some(5)), Action::PopVlan, "pop_vlan"),
    ];
    for (field, action, text) in table {
        expect(Version::V1_3, &flow([field], vec![Instruction::ApplyActions(vec![action])]), &[text]);
    }
    let instructions = vec![
        Instruction::Meter(MeterId(6)),
        Instruction::ApplyActions(vec![Action::output(PortNo(1))]),
        Instruction::ClearActions,
        Instruction::WriteActions(vec![Action::Group(GroupId(9))]),
        Instruction::WriteMetadata { metadata: 0xa0, mask: 0xf0 },
        Instruction::GotoTable(TableId(4)),
    ];
    let texts = ["meter:6,output:1,clear_actions,write_actions(group:9),write_metadata:0xa0/0xf0,goto_table:4", "send_flow_rem"];
    expect(Version::V1_3, &flow([], instructions), &texts);
    let actions = vec![
        Action::SetVlanVid(5),
        Action::SetVlanPcp(3),
        Action::PopVlan,
        Action::SetField(Oxm::exact(Field::TpDst, 80u16)),
        Action::SetField(Oxm::exact(Field::IpDscp, 46u8)),
        Action::Enqueue { port: PortNo(3), queue: QueueId(4) },
    ];
    let fields = [Oxm::exact(Field::EthType, 0x0800u16), Oxm::exact(Field::IpProto, 6u8)];
    let texts = ["tcp send_flow_rem actions=mod_vlan_vid:5,mod_vlan_pcp:3,strip_vlan,mod_tp_dst:80,mod_nw_tos:184,enqueue:3:4"];
    expect(Version::V1_0, &flow(fields, vec![Instruction::ApplyActions(actions)]), &texts);
}

#[test]
fn changes_by_a_controller_are_understood() {
    if !decoder_exists() {
        return;
    }
    let bucket =
        |weight, watch_port, port| Bucket { weight, watch_port, watch_group: GroupId::ANY, actions: vec![Action::output(PortNo(port))] };
    let group = |kind, buckets| Message::GroupMod(GroupMod { command: ModCommand::Add, kind, group: GroupId(12), buckets });
    let failover = group(GroupKind::FastFailover, vec![bucket(0, PortNo(1), 1), bucket(0, PortNo(2), 2)]);
    let texts = ["ADD group_id=12,type=ff", "watch_port:1,actions=output:1", "watch_port:2,actions=output:2"];
    expect(Version::V1_3, &failover, &texts);
    let select = group(GroupKind::Select, vec![bucket(5, PortNo::ANY, 1)]);
    expect(Version::V1_3, &select, &["type=select", "weight:5,actions=output:1"]);
    let bands = vec![Band { rate: 1000, burst: 100, kind: BandKind::Drop }, Band { rate: 500, burst: 50, kind: BandKind::DscpRemark(1) }];
    let flags = MeterFlags::KBPS | MeterFlags::BURST | MeterFlags::STATS;
    let meter = MeterMod { command: ModCommand::Add, flags, meter: MeterId(6), bands };
    let texts =
        ["ADD meter=6 kbps burst stats", "type=drop rate=1000 burst_size=100", "type=dscp_remark rate=500 burst_size=50 prec_level=1"];
    expect(Version::V1_3, &Message::MeterMod(meter), &texts);
    let deletion = FlowMod {
        command: FlowCommand::DeleteStrict,
        table: TableId(3),
        cookie: Cookie(1),
        cookie_mask: Cookie(0xff),
        out_port: PortNo(9),
        priority: 77,
        ..FlowMod::default()
    };
    let texts = ["DEL_STRICT table:3 priority=77", "cookie:0x1/0xff", "out_port:9"];
    expect(Version::V1_3, &Message::FlowMod(deletion), &texts);
    expect(Version::V1_3, &Message::Hello(Hello::new(&Version::ALL)), &["OFPT_HELLO (OF1.3)", "version bitmap: 0x01, 0x04"]);
    let role = RoleMessage { role: Role::Slave, generation: 5 };
    expect(Version::V1_3, &Message::RoleReply(role), &["role=secondary generation_id=5"]);
    let texts =
        ["PACKET_IN: no_match action", "PORT_STATUS: add delete modify", "FLOW_REMOVED: idle hard delete group_delete", "PACKET_IN: (off)"];
    expect(Version::V1_3, &Message::AsyncReply(AsyncConfig::default()), &texts);
}

#[test]
fn errors_are_understood() {
    if !decoder_exists() {
        return;
    }
    // Open vSwitch calls vendors what 1.3 calls experimenters, and has other names for some codes.
    let is_named = |text: &str| text.contains("OFPHFC") || text.contains("OFPB") || text.contains("FC_");
    for code in ErrorCode::all() {
        for version in Version::ALL.into_iter().filter(|version| code.numbers(*version).is_some()) {
            let printed = printed(version, &Message::Error(ErrorMessage { code, data: Bytes::new() }));
            assert!(is_named(&printed) && !printed.contains("***decode"), "{code} of {version}: {printed}");
        }
    }
}

fn reply(body: ReplyBody) -> Message {
    Message::MultipartReply(MultipartReply::new(body))
}

#[test]
fn messages_of_a_switch_are_understood() {
    if !decoder_exists() {
        return;
    }
    let features = Features {
        datapath: DatapathId(0x1122_3344_5566_7788),
        buffers: 256,
        tables: 254,
        auxiliary: 1,
        capabilities: Default::default(),
        actions: 0,
        ports: vec![],
    };
    expect(Version::V1_3, &Message::FeaturesReply(features), &["dpid:1122334455667788", "n_tables:254, n_buffers:256, auxiliary_id:1"]);
    let packet = PacketIn {
        buffer: Some(BufferId(7)),
        total_len: 100,
        reason: PacketReason::InvalidTtl,
        table: TableId(3),
        cookie: Cookie(9),
        matching: Match::new([Oxm::in_port(PortNo(5)), Oxm::exact(Field::Metadata, 6u8)]),
        data: Bytes::from_static(&[0; 20]),
    };
    let texts = ["table_id=3 cookie=0x9 total_len=100", "metadata=0x6,in_port=5 (via invalid_ttl) data_len=20 buffer=0x00000007"];
    expect(Version::V1_3, &Message::PacketIn(packet), &texts);
    let (duration, packets, bytes) = (Some(Duration::from_millis(5500)), Some(10), Some(ByteCount::new(2000)));
    let matching = Match::new([Oxm::in_port(PortNo(5))]);
    let removed = FlowRemoved {
        cookie: Cookie(9),
        priority: 100,
        reason: RemovedReason::GroupDelete,
        table: TableId(3),
        duration,
        idle_timeout: Seconds(10),
        hard_timeout: Seconds(20),
        packets,
        bytes,
        matching: matching.clone(),
    };
    let texts = ["in_port=5 reason=group_delete table_id=3 cookie:0x9 duration5.500s idle10 hard20 pkts10 bytes2000"];
    expect(Version::V1_3, &Message::FlowRemoved(removed), &texts);
    let port = Port {
        number: PortNo(3),
        address: MAC,
        name: "eth3".into(),
        config: PortConfig::NO_PACKET_IN,
        state: PortState::LIVE,
        current: PortFeatures::RATE_10GB_FD | PortFeatures::FIBER,
        advertised: PortFeatures::NONE,
        supported: PortFeatures::RATE_40GB_FD,
        peer: PortFeatures::NONE,
        current_speed: Kbps(10_000_000),
        max_speed: Kbps(40_000_000),
    };
    let texts = [
        "3(eth3): addr:02:00:00:00:00:01",
        "config: NO_PACKET_IN",
        "state: LIVE",
        "current: 10GB-FD FIBER",
        "speed: 10000 Mbps now, 40000 Mbps max",
    ];
    expect(Version::V1_3, &Message::PortStatus(PortStatus { reason: PortReason::Add, port: port.clone() }), &texts);
    expect(Version::V1_3, &reply(ReplyBody::PortDescription(vec![port])), &texts);
    let queues = vec![Queue {
        id: QueueId(1),
        port: PortNo(3),
        properties: vec![QueueProperty::MinRate(Permille(500)), QueueProperty::MaxRate(Permille(999))],
    }];
    expect(Version::V1_3, &Message::QueueConfigReply(QueueConfig { port: PortNo(3), queues }), &["queue 1: min_rate:50.0% max_rate:99.9%"]);
    let traffic = Traffic { packets, bytes };
    let flows = FlowStats {
        table: TableId(3),
        duration,
        priority: 100,
        idle_timeout: Seconds(10),
        hard_timeout: Seconds(20),
        flags: FlowFlags::RESET_COUNTS,
        cookie: Cookie(9),
        traffic,
        matching,
        instructions: vec![Instruction::GotoTable(TableId(4))],
    };
    let texts = [
        "cookie=0x9, duration=5.500s, table=3, n_packets=10, n_bytes=2000, idle_timeout=10, hard_timeout=20, reset_counts priority=100,in_port=5 actions=goto_table:4",
    ];
    expect(Version::V1_3, &reply(ReplyBody::Flow(vec![flows.clone(), flows])), &texts);
    let table = TableStats { table: TableId(3), v10: None, active: 4, lookups: Some(50), matched: Some(40) };
    expect(Version::V1_3, &reply(ReplyBody::Table(vec![table])), &["table 3: active=4, lookup=50, matched=40"]);
    messages_of_a_switch_about_counters(duration, traffic);
}

/// Statistics of ports, queues, groups and meters.
fn messages_of_a_switch_about_counters(duration: Option<Duration>, traffic: Traffic) {
    let count = Some;
    let ports = PortStats {
        port: PortNo(3),
        rx_packets: count(1),
        tx_packets: count(2),
        rx_bytes: Some(ByteCount::new(3)),
        tx_bytes: Some(ByteCount::new(4)),
        rx_dropped: count(5),
        tx_dropped: count(6),
        rx_errors: count(7),
        tx_errors: count(8),
        rx_frame_errors: count(9),
        rx_over_errors: count(10),
        rx_crc_errors: count(11),
        collisions: None,
        duration,
    };
    let texts =
        ["rx pkts=1, bytes=3, drop=5, errs=7, frame=9, over=10, crc=11", "tx pkts=2, bytes=4, drop=6, errs=8, coll=?", "duration=5.500s"];
    expect(Version::V1_3, &reply(ReplyBody::Port(vec![ports])), &texts);
    let queue = QueueStats {
        port: PortNo(3),
        queue: QueueId(1),
        tx_bytes: Some(ByteCount::new(1000)),
        tx_packets: count(10),
        tx_errors: count(1),
        duration,
    };
    expect(Version::V1_3, &reply(ReplyBody::Queue(vec![queue])), &["port 3 queue 1: bytes=1000, pkts=10, errors=1, duration=5.500s"]);
    let group = GroupStats { group: GroupId(12), references: 2, traffic, duration, buckets: vec![traffic, Traffic::default()] };
    let texts = ["group_id=12,duration=5.500s,ref_count=2,packet_count=10,byte_count=2000,bucket0:packet_count=10,byte_count=2000"];
    expect(Version::V1_3, &reply(ReplyBody::Group(vec![group])), &texts);
    let bucket = Bucket { weight: 5, watch_port: PortNo::ANY, watch_group: GroupId::ANY, actions: vec![Action::output(PortNo(1))] };
    let description = GroupDescription { kind: GroupKind::Select, group: GroupId(12), buckets: vec![bucket] };
    let texts = ["group_id=12,type=select,bucket=", "weight:5,actions=output:1"];
    expect(Version::V1_3, &reply(ReplyBody::GroupDescription(vec![description.clone(), description])), &texts);
    let mut kinds = [GroupKindFeatures { supported: true, max_groups: 8, actions: 1 }; 4];
    kinds[2].supported = false;
    let capabilities = GroupCapabilities::SELECT_WEIGHT | GroupCapabilities::CHAINING;
    expect(
        Version::V1_3,
        &reply(ReplyBody::GroupFeatures(GroupFeatures { capabilities, kinds })),
        &["Types: 0xb Capabilities: 0x5 all group: max_groups=0x8 actions: output"],
    );
    let bands = vec![Band { rate: 1000, burst: 0, kind: BandKind::Drop }];
    let config = MeterConfig { flags: MeterFlags::PKTPS, meter: MeterId(6), bands };
    expect(Version::V1_3, &reply(ReplyBody::MeterConfig(vec![config])), &["meter=6 pktps bands= type=drop rate=1000"]);
    let stats = MeterStats { meter: MeterId(6), flows: 2, traffic, duration, bands: vec![traffic] };
    let texts = ["meter:6 flow_count:2 packet_in_count:10 byte_in_count:2000 duration:5.500s bands: 0: packet_count:10 byte_count:2000"];
    expect(Version::V1_3, &reply(ReplyBody::Meter(vec![stats])), &texts);
    let features = MeterFeatures { max_meters: 100, band_types: 0b110, flags: MeterFlags::KBPS, max_bands: 5, max_colours: 3 };
    expect(Version::V1_3, &reply(ReplyBody::MeterFeatures(features)), &["max_meter:100 max_bands:5 max_color:3", "drop dscp_remark"]);
}
