//! The messages that `vectors.py` encodes, by the names of their vectors.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use braid_model::{ByteCount, Mac};
use braid_openflow::action::{Action, ActionId, Instruction};
use braid_openflow::flags::{Capabilities, ConfigFlags, FlowFlags, MeterFlags, PortConfig, PortFeatures, PortState, TableConfig};
use braid_openflow::flow::{FlowCommand, FlowMod, FlowRemoved, PacketIn, PacketOut, PacketReason, RemovedReason};
use braid_openflow::group::{Band, BandKind, Bucket, GroupKind, GroupMod, MeterMod, ModCommand};
use braid_openflow::ids::{
    BufferId, Cookie, DatapathId, ExperimenterId, GroupId, Kbps, MaxLen, MeterId, Permille, PortNo, QueueId, Seconds, TableId,
};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{
    AggregateStats, Description, FlowQuery, FlowStats, MultipartReply, MultipartRequest, PortStats, QueueStats, ReplyBody, RequestBody,
    TableFeatures, TableProperty, TableStats, TableV10, Traffic,
};
use braid_openflow::oxm::{Field, Oxm, OxmId};
use braid_openflow::port::{Port, PortMod, PortReason, PortStatus, Queue, QueueConfig, QueueProperty};
use braid_openflow::switch::{
    AsyncConfig, ErrorMessage, Experimenter, Features, Hello, ReasonMasks, Role, RoleMessage, SwitchConfig, TableMod,
};
use braid_openflow::{ErrorCode, Message, Version};
use bytes::Bytes;

pub(crate) const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
const EXPERIMENTER: ExperimenterId = ExperimenterId(0x00ab_cdef);

fn text(bytes: &'static [u8]) -> Bytes {
    Bytes::from_static(bytes)
}

fn request(body: RequestBody) -> Message {
    Message::MultipartRequest(MultipartRequest::new(body))
}

fn reply(body: ReplyBody) -> Message {
    Message::MultipartReply(MultipartReply::new(body))
}

fn output(port: u32, max_len: u16) -> Action {
    Action::Output { port: PortNo(port), max_len: MaxLen(max_len) }
}

fn experimenter(exp_type: Option<u32>) -> Experimenter {
    Experimenter { experimenter: EXPERIMENTER, exp_type, data: text(b"data") }
}

fn match_1_3() -> Match {
    Match::new([
        Oxm::in_port(PortNo(7)),
        Oxm::masked(Field::EthDst, 0x0200_0000_0000u64, 0xffff_ff00_0000u64),
        Oxm::exact(Field::EthType, 0x800u16),
        Oxm::vlan(Some(5)),
        Oxm::exact(Field::IpProto, 6u8),
        Oxm::ipv4(Field::Ipv4Src, Ipv4Addr::new(10, 0, 0, 0), 8),
        Oxm::exact(Field::TcpDst, 80u16),
    ])
}

fn actions_1_3() -> Vec<Action> {
    vec![
        output(2, 128),
        Action::CopyTtlOut,
        Action::CopyTtlIn,
        Action::SetMplsTtl(9),
        Action::DecMplsTtl,
        Action::PushVlan(0x8100),
        Action::PopVlan,
        Action::PushMpls(0x8847),
        Action::PopMpls(0x800),
        Action::SetQueue(QueueId(3)),
        Action::Group(GroupId(4)),
        Action::SetNwTtl(10),
        Action::DecNwTtl,
        Action::SetField(Oxm::ipv6(Field::Ipv6Src, Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 128)),
        Action::PushPbb(0x88e7),
        Action::PopPbb,
        Action::Experimenter { experimenter: EXPERIMENTER, data: text(b"12345678") },
    ]
}

/// The field of each vector `field_NAME` of 1.3.
fn fields_1_3() -> Vec<Oxm> {
    let (one, mac) = (Ipv4Addr::new(10, 0, 0, 1), 0x0200_0000_0001u64);
    let v6 = |last| Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last);
    vec![
        Oxm::exact(Field::InPort, 1u8),
        Oxm::exact(Field::InPhyPort, 2u8),
        Oxm::masked(Field::Metadata, 3u8, 0xffu8),
        Oxm::masked(Field::EthDst, mac & !0xff, 0xffff_ffff_ff00u64),
        Oxm::mac(Field::EthSrc, MAC),
        Oxm::exact(Field::EthType, 0x800u16),
        Oxm::masked(Field::VlanVid, 0x1000u16, 0x1000u16),
        Oxm::exact(Field::VlanPcp, 5u8),
        Oxm::exact(Field::IpDscp, 46u8),
        Oxm::exact(Field::IpEcn, 1u8),
        Oxm::exact(Field::IpProto, 17u8),
        Oxm::ipv4(Field::Ipv4Src, Ipv4Addr::new(10, 1, 0, 0), 16),
        Oxm::ipv4(Field::Ipv4Dst, one, 32),
        Oxm::exact(Field::TcpSrc, 11u8),
        Oxm::exact(Field::TcpDst, 12u8),
        Oxm::exact(Field::UdpSrc, 13u8),
        Oxm::exact(Field::UdpDst, 14u8),
        Oxm::exact(Field::SctpSrc, 15u8),
        Oxm::exact(Field::SctpDst, 16u8),
        Oxm::exact(Field::Icmpv4Type, 8u8),
        Oxm::exact(Field::Icmpv4Code, 0u8),
        Oxm::exact(Field::ArpOp, 2u8),
        Oxm::ipv4(Field::ArpSpa, Ipv4Addr::new(10, 1, 2, 0), 24),
        Oxm::ipv4(Field::ArpTpa, Ipv4Addr::new(10, 1, 2, 3), 32),
        Oxm::mac(Field::ArpSha, MAC),
        Oxm::masked(Field::ArpTha, 0x0200_0000_0000u64, 0xff00_0000_0000u64),
        Oxm::ipv6(Field::Ipv6Src, v6(0), 32),
        Oxm::ipv6(Field::Ipv6Dst, v6(1), 128),
        Oxm::masked(Field::Ipv6Flabel, 0x12345u32, 0xfffffu32),
        Oxm::exact(Field::Icmpv6Type, 135u8),
        Oxm::exact(Field::Icmpv6Code, 0u8),
        Oxm::ipv6(Field::Ipv6NdTarget, Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 128),
        Oxm::mac(Field::Ipv6NdSll, MAC),
        Oxm::mac(Field::Ipv6NdTll, MAC),
        Oxm::exact(Field::MplsLabel, 0xabcdeu32),
        Oxm::exact(Field::MplsTc, 3u8),
        Oxm::exact(Field::MplsBos, 1u8),
        Oxm::masked(Field::PbbIsid, 0x12_3400u32, 0xff_ff00u32),
        Oxm::masked(Field::TunnelId, 1u64 << 40, 0xffu64 << 40),
        Oxm::masked(Field::Ipv6Exthdr, 5u8, 0x1ffu16),
    ]
}

fn table_features() -> TableFeatures {
    let masked = OxmId::Basic { field: Field::EthDst, masked: true };
    let exact = OxmId::Basic { field: Field::EthType, masked: false };
    TableFeatures {
        table: TableId(2),
        name: "two".into(),
        metadata_match: 0xff,
        metadata_write: 0xf0,
        config: TableConfig::from_wire(Version::V1_3, 3),
        max_entries: 1000,
        properties: vec![
            TableProperty::Instructions { miss: false, ids: vec![ActionId::Basic(1), ActionId::Basic(4)] },
            TableProperty::NextTables { miss: true, ids: vec![TableId(1), TableId(2), TableId(3)] },
            TableProperty::WriteActions { miss: false, ids: vec![ActionId::Basic(0), ActionId::Basic(22)] },
            TableProperty::ApplyActions { miss: true, ids: vec![ActionId::Basic(25)] },
            TableProperty::Match(vec![masked.clone(), exact.clone()]),
            TableProperty::Wildcards(vec![masked]),
            TableProperty::WriteSetField { miss: true, ids: vec![exact] },
            TableProperty::ApplySetField { miss: false, ids: vec![] },
            TableProperty::Experimenter { miss: false, experimenter: EXPERIMENTER, exp_type: 2, data: text(b"1234") },
        ],
    }
}

/// What os-ken encodes for 1.3.
fn samples_1_3() -> Vec<(&'static str, Message)> {
    let flow = FlowMod {
        cookie: Cookie(0x1122_3344_5566_7788),
        cookie_mask: Cookie(0xff),
        table: TableId(3),
        command: FlowCommand::ModifyStrict,
        idle_timeout: Seconds(10),
        hard_timeout: Seconds(20),
        priority: 100,
        buffer: Some(BufferId(0x55)),
        out_port: PortNo::ANY,
        out_group: GroupId::ANY,
        flags: FlowFlags::SEND_FLOW_REM,
        matching: match_1_3(),
        instructions: vec![
            Instruction::Meter(MeterId(6)),
            Instruction::ApplyActions(actions_1_3()),
            Instruction::ClearActions,
            Instruction::WriteActions(vec![Action::Group(GroupId(9))]),
            Instruction::WriteMetadata { metadata: 0xa0, mask: 0xf0 },
            Instruction::GotoTable(TableId(4)),
        ],
    };
    let buckets = vec![
        Bucket { weight: 5, watch_port: PortNo(1), watch_group: GroupId::ANY, actions: vec![output(1, 0xffff)] },
        Bucket { weight: 6, watch_port: PortNo::ANY, watch_group: GroupId(7), actions: vec![] },
    ];
    let bands = vec![
        Band { rate: 1000, burst: 100, kind: BandKind::Drop },
        Band { rate: 500, burst: 50, kind: BandKind::DscpRemark(1) },
        Band { rate: 7, burst: 8, kind: BandKind::Experimenter { experimenter: EXPERIMENTER, data: Bytes::new() } },
    ];
    let query = FlowQuery {
        table: TableId(1),
        out_port: PortNo(2),
        out_group: GroupId(3),
        cookie: Cookie(4),
        cookie_mask: Cookie(5),
        matching: match_1_3(),
    };
    let port = PortMod {
        number: PortNo(3),
        address: MAC,
        config: PortConfig::PORT_DOWN,
        mask: PortConfig::PORT_DOWN | PortConfig::NO_FWD,
        advertise: PortFeatures::COPPER,
    };
    let masks = |master, slave| ReasonMasks { master, slave };
    let role = RoleMessage { role: Role::Master, generation: 0x1122_3344_5566_7788 };
    let failed = ErrorMessage { code: ErrorCode::Experimenter { exp_type: 9, experimenter: EXPERIMENTER.0 }, data: text(b"why") };
    let packet = PacketOut { buffer: None, in_port: PortNo::CONTROLLER, actions: vec![output(2, 128)], data: text(b"packet") };
    let meter = MeterMod { command: ModCommand::Add, flags: MeterFlags::KBPS | MeterFlags::BURST, meter: MeterId(6), bands };
    let table_features = RequestBody::TableFeatures(vec![table_features()]);
    vec![
        ("hello", Message::Hello(Hello::default())),
        ("error", Message::Error(ErrorMessage { code: ErrorCode::BadMatchDupField, data: text(b"request") })),
        ("error_experimenter", Message::Error(failed)),
        ("echo_request", Message::EchoRequest(text(b"ping"))),
        ("echo_reply", Message::EchoReply(text(b"ping"))),
        ("experimenter", Message::Experimenter(experimenter(Some(5)))),
        ("features_request", Message::FeaturesRequest),
        ("get_config_request", Message::GetConfigRequest),
        ("set_config", Message::SetConfig(SwitchConfig { flags: ConfigFlags::FRAG_REASM, miss_send_len: MaxLen::NO_BUFFER })),
        ("packet_out", Message::PacketOut(packet)),
        ("flow_mod", Message::FlowMod(flow)),
        (
            "group_mod",
            Message::GroupMod(GroupMod { command: ModCommand::Modify, kind: GroupKind::FastFailover, group: GroupId(12), buckets }),
        ),
        ("port_mod", Message::PortMod(port)),
        ("table_mod", Message::TableMod(TableMod { table: TableId::ALL, config: TableConfig::from_wire(Version::V1_3, 3) })),
        ("meter_mod", Message::MeterMod(meter)),
        ("desc_request", request(RequestBody::Description)),
        ("flow_request", request(RequestBody::Flow(query))),
        ("aggregate_request", request(RequestBody::Aggregate(FlowQuery::default()))),
        ("table_request", request(RequestBody::Table)),
        ("port_request", request(RequestBody::Port(PortNo(5)))),
        ("queue_request", request(RequestBody::Queue { port: PortNo(5), queue: QueueId(6) })),
        ("group_request", request(RequestBody::Group(GroupId(7)))),
        ("group_desc_request", request(RequestBody::GroupDescription)),
        ("group_features_request", request(RequestBody::GroupFeatures)),
        ("meter_request", request(RequestBody::Meter(MeterId(8)))),
        ("meter_config_request", request(RequestBody::MeterConfig(MeterId::ALL))),
        ("meter_features_request", request(RequestBody::MeterFeatures)),
        ("table_features_request", Message::MultipartRequest(MultipartRequest { more: true, body: table_features })),
        ("port_desc_request", request(RequestBody::PortDescription)),
        ("experimenter_request", request(RequestBody::Experimenter(experimenter(Some(5))))),
        ("barrier_request", Message::BarrierRequest),
        ("queue_get_config_request", Message::QueueConfigRequest(PortNo::ANY)),
        ("role_request", Message::RoleRequest(role)),
        ("get_async_request", Message::AsyncRequest),
        ("set_async", Message::SetAsync(AsyncConfig { packet_in: masks(1, 2), port_status: masks(3, 4), flow_removed: masks(5, 6) })),
    ]
}

fn match_1_0() -> Match {
    Match::new([
        Oxm::in_port(PortNo(7)),
        Oxm::exact(Field::EthType, 0x800u16),
        Oxm::vlan(Some(5)),
        Oxm::exact(Field::IpProto, 6u8),
        Oxm::ipv4(Field::Ipv4Src, Ipv4Addr::new(10, 0, 0, 0), 8),
        Oxm::exact(Field::TcpDst, 80u16),
    ])
}

fn flow_with(fields: impl IntoIterator<Item = Oxm>) -> Message {
    Message::FlowMod(FlowMod { matching: Match::new(fields), ..FlowMod::default() })
}

/// What os-ken encodes for 1.0.
fn samples_1_0() -> Vec<(&'static str, Message)> {
    let (one, two) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));
    let actions = vec![
        output(2, 128),
        Action::SetVlanVid(5),
        Action::SetVlanPcp(3),
        Action::PopVlan,
        Action::SetField(Oxm::mac(Field::EthSrc, MAC)),
        Action::SetField(Oxm::mac(Field::EthDst, MAC)),
        Action::SetField(Oxm::ipv4(Field::Ipv4Src, one, 32)),
        Action::SetField(Oxm::ipv4(Field::Ipv4Dst, two, 32)),
        Action::SetField(Oxm::exact(Field::IpDscp, 46u8)),
        Action::SetField(Oxm::exact(Field::TpSrc, 1u8)),
        Action::SetField(Oxm::exact(Field::TpDst, 2u8)),
        Action::Enqueue { port: PortNo(3), queue: QueueId(4) },
        Action::Experimenter { experimenter: EXPERIMENTER, data: text(b"12345678") },
    ];
    let flow = FlowMod {
        cookie: Cookie(0x1122_3344_5566_7788),
        command: FlowCommand::Delete,
        idle_timeout: Seconds(10),
        hard_timeout: Seconds(20),
        priority: 100,
        buffer: Some(BufferId(0x55)),
        out_port: PortNo::LOCAL,
        flags: FlowFlags::EMERG,
        matching: match_1_0(),
        instructions: vec![Instruction::ApplyActions(actions[..1].to_vec())],
        ..FlowMod::default()
    };
    let port = PortMod {
        number: PortNo(3),
        address: MAC,
        config: PortConfig::NO_FLOOD,
        mask: PortConfig::NO_FLOOD | PortConfig::PORT_DOWN,
        advertise: PortFeatures::COPPER,
    };
    let ipv4 = Oxm::exact(Field::EthType, 0x800u16);
    let icmp = [
        Oxm::exact(Field::IpDscp, 46u8),
        Oxm::exact(Field::IpProto, 1u8),
        Oxm::exact(Field::Icmpv4Type, 8u8),
        Oxm::exact(Field::Icmpv4Code, 0u8),
    ];
    let arp = [
        Oxm::mac(Field::EthDst, MAC),
        Oxm::mac(Field::EthSrc, MAC),
        Oxm::exact(Field::EthType, 0x806u16),
        Oxm::vlan(None),
        Oxm::exact(Field::VlanPcp, 0u8),
        Oxm::exact(Field::ArpOp, 1u8),
        Oxm::ipv4(Field::ArpSpa, one, 32),
        Oxm::ipv4(Field::ArpTpa, two, 32),
    ];
    let packet = PacketOut { buffer: None, in_port: PortNo::ANY, actions, data: text(b"packet") };
    vec![
        ("hello", Message::Hello(Hello::default())),
        ("error", Message::Error(ErrorMessage { code: ErrorCode::FlowModFailedTableFull, data: text(b"request") })),
        ("echo_request", Message::EchoRequest(text(b"ping"))),
        ("echo_reply", Message::EchoReply(text(b"ping"))),
        ("features_request", Message::FeaturesRequest),
        ("get_config_request", Message::GetConfigRequest),
        ("set_config", Message::SetConfig(SwitchConfig { flags: ConfigFlags::FRAG_DROP, miss_send_len: MaxLen(128) })),
        ("packet_out", Message::PacketOut(packet)),
        ("flow_mod", Message::FlowMod(flow)),
        ("field_arp", flow_with(arp)),
        ("field_icmp", flow_with([ipv4.clone()].into_iter().chain(icmp))),
        ("field_udp", flow_with([ipv4, Oxm::exact(Field::IpProto, 17u8), Oxm::exact(Field::UdpSrc, 53u8)])),
        ("field_no_protocol", flow_with([Oxm::exact(Field::VlanPcp, 6u8), Oxm::exact(Field::TpSrc, 53u8)])),
        ("port_mod", Message::PortMod(port)),
        ("desc_request", request(RequestBody::Description)),
        ("flow_request", request(RequestBody::Flow(FlowQuery { matching: match_1_0(), ..FlowQuery::default() }))),
        (
            "aggregate_request",
            request(RequestBody::Aggregate(FlowQuery { table: TableId(0xfe), out_port: PortNo(5), ..FlowQuery::default() })),
        ),
        ("table_request", request(RequestBody::Table)),
        ("port_request", request(RequestBody::Port(PortNo::ANY))),
        ("queue_request", request(RequestBody::Queue { port: PortNo::ALL, queue: QueueId(6) })),
        ("barrier_request", Message::BarrierRequest),
        ("queue_get_config_request", Message::QueueConfigRequest(PortNo(5))),
    ]
}

fn traffic(packets: u64, bytes: u64) -> Traffic {
    Traffic { packets: Some(packets), bytes: Some(ByteCount::new(bytes)) }
}

/// What a switch sends with 1.0.
fn switch_samples_1_0() -> Vec<(&'static str, Message)> {
    let port = Port {
        number: PortNo::LOCAL,
        address: MAC,
        name: "br0".into(),
        config: PortConfig::NO_FLOOD,
        state: PortState::LINK_DOWN | PortState::STP_FORWARD,
        current: PortFeatures::COPPER | PortFeatures::RATE_1GB_FD,
        advertised: PortFeatures::AUTONEG,
        supported: PortFeatures::PAUSE,
        peer: PortFeatures::PAUSE_ASYM,
        current_speed: Kbps(0),
        max_speed: Kbps(0),
    };
    let stats = Capabilities::FLOW_STATS | Capabilities::TABLE_STATS | Capabilities::PORT_STATS;
    let features = Features {
        datapath: DatapathId(0x1122_3344_5566_7788),
        buffers: 256,
        tables: 2,
        auxiliary: 0,
        capabilities: stats | Capabilities::ARP_MATCH_IP,
        actions: 0xfff,
        ports: vec![port.clone()],
    };
    let matching = Match::new([Oxm::in_port(PortNo(7)), Oxm::exact(Field::EthType, 0x800u16)]);
    let packet = PacketIn {
        buffer: Some(BufferId(0x55)),
        total_len: 100,
        reason: PacketReason::Action,
        table: TableId(0),
        cookie: Cookie(0),
        matching: Match::new([Oxm::in_port(PortNo(7))]),
        data: text(b"packet"),
    };
    let duration = Some(Duration::new(5, 600));
    let removed = FlowRemoved {
        cookie: Cookie(9),
        priority: 100,
        reason: RemovedReason::Delete,
        table: TableId(0),
        duration,
        idle_timeout: Seconds(10),
        hard_timeout: Seconds(0),
        packets: Some(1000),
        bytes: Some(ByteCount::new(2000)),
        matching: matching.clone(),
    };
    let queue = |id, property| Queue { id: QueueId(id), port: PortNo(7), properties: vec![property] };
    let queues = vec![queue(1, QueueProperty::MinRate(Permille(500))), queue(2, QueueProperty::None)];
    vec![
        ("vendor", Message::Experimenter(experimenter(None))),
        ("features_reply", Message::FeaturesReply(features)),
        ("get_config_reply", Message::GetConfigReply(SwitchConfig { flags: ConfigFlags::NONE, miss_send_len: MaxLen(128) })),
        ("packet_in", Message::PacketIn(packet)),
        ("flow_removed", Message::FlowRemoved(removed)),
        ("port_status", Message::PortStatus(PortStatus { reason: PortReason::Modify, port })),
        ("vendor_request", request(RequestBody::Experimenter(experimenter(None)))),
        ("vendor_reply", reply(ReplyBody::Experimenter(experimenter(None)))),
        ("barrier_reply", Message::BarrierReply),
        ("queue_get_config_reply", Message::QueueConfigReply(QueueConfig { port: PortNo(7), queues })),
    ]
}

/// The statistics that a switch sends with 1.0.
fn stats_samples_1_0() -> Vec<(&'static str, Message)> {
    let matching = Match::new([Oxm::in_port(PortNo(7)), Oxm::exact(Field::EthType, 0x800u16)]);
    let entry = FlowStats {
        table: TableId(1),
        duration: Some(Duration::new(5, 600)),
        priority: 100,
        idle_timeout: Seconds(10),
        hard_timeout: Seconds(20),
        flags: FlowFlags::NONE,
        cookie: Cookie(9),
        traffic: traffic(1000, 2000),
        matching,
        instructions: vec![Instruction::ApplyActions(vec![output(2, 0)])],
    };
    let description = Description {
        manufacturer: "maker".into(),
        hardware: "box".into(),
        software: "1.2".into(),
        serial: "7".into(),
        datapath: "attic".into(),
    };
    let table = TableStats {
        table: TableId(1),
        v10: Some(TableV10 { name: "classifier".into(), wildcards: 0x3f_ffff, max_entries: 1000 }),
        active: 3,
        lookups: Some(400),
        matched: Some(300),
    };
    let port_stats = PortStats {
        port: PortNo(7),
        rx_packets: Some(1),
        tx_packets: Some(2),
        rx_bytes: Some(ByteCount::new(3)),
        tx_bytes: Some(ByteCount::new(4)),
        rx_dropped: Some(5),
        tx_dropped: Some(6),
        rx_errors: Some(7),
        tx_errors: Some(8),
        rx_frame_errors: Some(9),
        rx_over_errors: Some(10),
        rx_crc_errors: Some(11),
        collisions: None,
        duration: None,
    };
    let queue_stats = QueueStats {
        port: PortNo(7),
        queue: QueueId(6),
        tx_bytes: Some(ByteCount::new(1000)),
        tx_packets: Some(10),
        tx_errors: Some(1),
        duration: None,
    };
    let flows = MultipartReply { more: true, body: ReplyBody::Flow(vec![entry.clone(), entry]) };
    vec![
        ("desc_reply", reply(ReplyBody::Description(Box::new(description)))),
        ("flow_reply", Message::MultipartReply(flows)),
        ("aggregate_reply", reply(ReplyBody::Aggregate(AggregateStats { traffic: traffic(1000, 2000), flows: 3 }))),
        ("table_reply", reply(ReplyBody::Table(vec![table]))),
        ("port_reply", reply(ReplyBody::Port(vec![port_stats]))),
        ("queue_reply", reply(ReplyBody::Queue(vec![queue_stats]))),
    ]
}

/// Name of the vector, version and message of each sample.
pub(crate) fn samples() -> Vec<(String, Version, Message)> {
    let fields = fields_1_3().into_iter().map(|oxm| {
        let name = oxm.field().expect("a field of the specification").name();
        (format!("os-ken/of13/field_{name}"), Version::V1_3, flow_with([oxm]))
    });
    let named = |folder: &'static str, version, samples: Vec<(&'static str, Message)>| {
        samples.into_iter().map(move |(name, message)| (format!("{folder}/{name}"), version, message))
    };
    let v13 = named("os-ken/of13", Version::V1_3, samples_1_3());
    let v10 = named("os-ken/of10", Version::V1_0, samples_1_0());
    let switch = named("manual/of10", Version::V1_0, switch_samples_1_0());
    let stats = named("manual/of10", Version::V1_0, stats_samples_1_0());
    v13.chain(fields).chain(v10).chain(switch).chain(stats).collect()
}
