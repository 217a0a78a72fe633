//! Any message, for property tests: one strategy for each structure. With 1.0 a message has only what that version can express.

use std::time::Duration;

use braid_model::{ByteCount, Mac};
use braid_openflow::action::{Action, ActionId, Instruction};
use braid_openflow::flags::{FlagKind, Flags, FlowFlags};
use braid_openflow::flow::{FlowCommand, FlowMod, FlowRemoved, PacketIn, PacketOut, PacketReason, RemovedReason};
use braid_openflow::group::{Band, BandKind, Bucket, GroupKind, GroupMod, MeterMod, ModCommand};
use braid_openflow::ids::{
    BufferId, Cookie, DatapathId, ExperimenterId, GroupId, Kbps, MaxLen, MeterId, Permille, PortNo, QueueId, Seconds, TableId,
};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{
    AggregateStats, Description, FlowQuery, FlowStats, GroupDescription, GroupFeatures, GroupKindFeatures, GroupStats, MeterConfig,
    MeterFeatures, MeterStats, MultipartReply, MultipartRequest, PortStats, QueueStats, ReplyBody, RequestBody, TableFeatures,
    TableProperty, TableStats, TableV10, Traffic,
};
use braid_openflow::oxm::{Field, Oxm, OxmId};
use braid_openflow::port::{Port, PortMod, PortReason, PortStatus, Queue, QueueConfig, QueueProperty};
use braid_openflow::switch::{
    AsyncConfig, ErrorMessage, Experimenter, Features, Hello, HelloElement, ReasonMasks, Role, RoleMessage, SwitchConfig, TableMod,
};
use braid_openflow::{ErrorCode, Message, Text, Version};
use bytes::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;

/// A version and a message that it can express.
pub(crate) fn any_message() -> impl Strategy<Value = (Version, Message)> {
    prop::sample::select(Version::ALL.to_vec()).prop_flat_map(|version| (Just(version), message(version)))
}

pub(crate) fn message(version: Version) -> BoxedStrategy<Message> {
    let shared = prop_oneof![
        2 => hello().prop_map(Message::Hello),
        2 => error(version).prop_map(Message::Error),
        1 => data().prop_map(Message::EchoRequest),
        1 => data().prop_map(Message::EchoReply),
        1 => experimenter(version).prop_map(Message::Experimenter),
        1 => prop::sample::select(vec![
            Message::FeaturesRequest,
            Message::GetConfigRequest,
            Message::BarrierRequest,
            Message::BarrierReply,
        ]),
        2 => features(version).prop_map(Message::FeaturesReply),
        1 => switch_config(version).prop_map(Message::GetConfigReply),
        1 => switch_config(version).prop_map(Message::SetConfig),
        2 => packet_in(version).prop_map(Message::PacketIn),
        3 => flow_removed(version).prop_map(Message::FlowRemoved),
        1 => port_status(version).prop_map(Message::PortStatus),
        3 => packet_out(version).prop_map(Message::PacketOut),
        6 => flow_mod(version).prop_map(Message::FlowMod),
        1 => port_mod(version).prop_map(Message::PortMod),
        4 => request(version).prop_map(Message::MultipartRequest),
        8 => reply(version).prop_map(Message::MultipartReply),
        1 => port_no(version).prop_map(Message::QueueConfigRequest),
        2 => queue_config(version).prop_map(Message::QueueConfigReply),
    ];
    if version == Version::V1_0 {
        return shared.boxed();
    }
    let role = || (role(), any::<u64>()).prop_map(|(role, generation)| RoleMessage { role, generation });
    prop_oneof![
        20 => shared,
        2 => group_mod().prop_map(Message::GroupMod),
        2 => meter_mod().prop_map(Message::MeterMod),
        1 => (table(), flags(version, 32)).prop_map(|(table, config)| Message::TableMod(TableMod { table, config })),
        1 => role().prop_map(Message::RoleRequest),
        1 => role().prop_map(Message::RoleReply),
        1 => Just(Message::AsyncRequest),
        1 => async_config().prop_map(Message::AsyncReply),
        1 => async_config().prop_map(Message::SetAsync),
    ]
    .boxed()
}

fn data() -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..40).prop_map(Bytes::from)
}

/// Data whose length is a multiple of `unit`.
fn data_of(unit: usize) -> impl Strategy<Value = Bytes> {
    vec(any::<u8>(), 0..40).prop_map(move |mut bytes| {
        bytes.truncate(bytes.len() / unit * unit);
        bytes.into()
    })
}

fn text(most: usize) -> impl Strategy<Value = Text> {
    vec(1u8..=255, 0..=most).prop_map(Text::new)
}

fn mac() -> impl Strategy<Value = Mac> {
    any::<[u8; 6]>().prop_map(Mac)
}

fn port_no(version: Version) -> BoxedStrategy<PortNo> {
    if version == Version::V1_0 { any::<u16>().prop_map(PortNo::from_v10).boxed() } else { any::<u32>().prop_map(PortNo).boxed() }
}

fn flags<K: FlagKind + 'static>(version: Version, bits: u32) -> impl Strategy<Value = Flags<K>> {
    any::<u32>().prop_map(move |wire| Flags::from_wire(version, wire & u32::MAX >> (32 - bits)))
}

fn buffer() -> impl Strategy<Value = Option<BufferId>> {
    prop::option::of((0..u32::MAX).prop_map(BufferId))
}

fn counter() -> impl Strategy<Value = Option<u64>> {
    prop::option::of(0..u64::MAX)
}

fn byte_counter() -> impl Strategy<Value = Option<ByteCount>> {
    counter().prop_map(|count| count.map(ByteCount::new))
}

fn traffic() -> impl Strategy<Value = Traffic> {
    (counter(), byte_counter()).prop_map(|(packets, bytes)| Traffic { packets, bytes })
}

fn duration() -> impl Strategy<Value = Option<Duration>> {
    prop::option::of((any::<u32>(), 0u32..1_000_000_000).prop_map(|(seconds, nanos)| Duration::new(seconds.into(), nanos)))
}

fn late_duration(version: Version) -> BoxedStrategy<Option<Duration>> {
    if version == Version::V1_0 { Just(None).boxed() } else { duration().boxed() }
}

fn seconds() -> impl Strategy<Value = Seconds> {
    any::<u16>().prop_map(Seconds)
}

fn cookie() -> impl Strategy<Value = Cookie> {
    any::<u64>().prop_map(Cookie)
}

fn table() -> impl Strategy<Value = TableId> {
    any::<u8>().prop_map(TableId)
}

fn experimenter_id() -> impl Strategy<Value = ExperimenterId> {
    any::<u32>().prop_map(ExperimenterId)
}

/// A value that 1.0 cannot express: its neutral value there.
fn late<T: Clone + std::fmt::Debug + 'static>(version: Version, neutral: T, any: impl Strategy<Value = T> + 'static) -> BoxedStrategy<T> {
    if version == Version::V1_0 { Just(neutral).boxed() } else { any.boxed() }
}

fn hello() -> impl Strategy<Value = Hello> {
    let element = prop_oneof![
        vec(any::<u32>(), 0..3).prop_map(HelloElement::VersionBitmap),
        (2u16.., data()).prop_map(|(kind, data)| HelloElement::Other { kind, data }),
    ];
    vec(element, 0..3).prop_map(|elements| Hello { elements })
}

fn error(version: Version) -> impl Strategy<Value = ErrorMessage> {
    let named: Vec<ErrorCode> = ErrorCode::all().filter(|code| code.numbers(version).is_some()).collect();
    let named = prop::sample::select(named);
    let code = if version == Version::V1_0 {
        named.boxed()
    } else {
        let other = (any::<u16>(), any::<u32>()).prop_map(|(exp_type, experimenter)| ErrorCode::Experimenter { exp_type, experimenter });
        prop_oneof![4 => named, 1 => other].boxed()
    };
    (code, data()).prop_map(|(code, data)| ErrorMessage { code, data })
}

fn experimenter(version: Version) -> impl Strategy<Value = Experimenter> {
    let exp_type = late(version, None, any::<u32>().prop_map(Some));
    (experimenter_id(), exp_type, data()).prop_map(|(experimenter, exp_type, data)| Experimenter { experimenter, exp_type, data })
}

fn port(version: Version) -> impl Strategy<Value = Port> {
    let speed = || late(version, Kbps(0), any::<u32>().prop_map(Kbps));
    let features = || flags(version, 32);
    (
        (port_no(version), mac(), text(16), flags(version, 32), flags(version, 32)),
        (features(), features(), features(), features(), speed(), speed()),
    )
        .prop_map(|((number, address, name, config, state), (current, advertised, supported, peer, current_speed, max_speed))| Port {
            number,
            address,
            name,
            config,
            state,
            current,
            advertised,
            supported,
            peer,
            current_speed,
            max_speed,
        })
}

fn features(version: Version) -> impl Strategy<Value = Features> {
    let ports = if version == Version::V1_0 { vec(port(version), 0..4).boxed() } else { Just(Vec::new()).boxed() };
    let actions = if version == Version::V1_0 { any::<u32>().boxed() } else { Just(0).boxed() };
    (any::<u64>(), any::<u32>(), any::<u8>(), late(version, 0, any::<u8>()), flags(version, 32), actions, ports).prop_map(
        |(datapath, buffers, tables, auxiliary, capabilities, actions, ports)| Features {
            datapath: DatapathId(datapath),
            buffers,
            tables,
            auxiliary,
            capabilities,
            actions,
            ports,
        },
    )
}

fn switch_config(version: Version) -> impl Strategy<Value = SwitchConfig> {
    (flags(version, 16), any::<u16>()).prop_map(|(flags, length)| SwitchConfig { flags, miss_send_len: MaxLen(length) })
}

fn port_status(version: Version) -> impl Strategy<Value = PortStatus> {
    let reason = prop::sample::select(vec![PortReason::Add, PortReason::Delete, PortReason::Modify]);
    (reason, port(version)).prop_map(|(reason, port)| PortStatus { reason, port })
}

fn port_mod(version: Version) -> impl Strategy<Value = PortMod> {
    (port_no(version), mac(), flags(version, 32), flags(version, 32), flags(version, 32))
        .prop_map(|(number, address, config, mask, advertise)| PortMod { number, address, config, mask, advertise })
}

/// A field of the specification, with a value, and often a mask.
fn basic(field: Field) -> impl Strategy<Value = Oxm> {
    let bits = field.full_mask();
    (any::<u128>(), prop::option::of(any::<u128>())).prop_map(move |(value, mask)| Oxm::Basic {
        field,
        value: value & bits,
        mask: mask.map(|mask| mask & bits),
    })
}

fn other_oxm() -> impl Strategy<Value = Oxm> {
    // The specification defines the first forty fields of class 0x8000.
    let class = prop_oneof![0u16..3, Just(0x8000), Just(0xffff)];
    (class, 40u8..128, any::<bool>(), vec(any::<u8>(), 4..20)).prop_map(|(class, field, masked, body)| Oxm::Other {
        class,
        field,
        masked,
        body: body.into(),
    })
}

fn fields_1_3() -> Vec<Field> {
    Field::all().filter(|field| field.number().is_some()).collect()
}

pub(crate) fn matching(version: Version) -> BoxedStrategy<Match> {
    if version == Version::V1_0 {
        return match_1_0().boxed();
    }
    let basics = prop::sample::subsequence(fields_1_3(), 0..8).prop_flat_map(|fields| fields.into_iter().map(basic).collect::<Vec<_>>());
    (basics, vec(other_oxm(), 0..2)).prop_map(|(basics, others)| Match::new(basics.into_iter().chain(others))).boxed()
}

/// A match as 1.0 decodes to: fields in the order of their numbers, with the meaning that the protocol gives them.
fn match_1_0() -> impl Strategy<Value = Match> {
    let some = prop::option::of::<BoxedStrategy<u64>>;
    let link = (
        some(any::<u16>().prop_map(|port| PortNo::from_v10(port).0.into()).boxed()),
        some((0u64..1 << 48).boxed()),
        some((0u64..1 << 48).boxed()),
        some(prop::sample::select(vec![0x0800u64, 0x0806, 0x86dd, 0x05ff]).boxed()),
        some(prop_oneof![Just(0u64), 0x1000u64..0x2000].boxed()),
        some((0u64..8).boxed()),
    );
    let address = || prop::option::of((any::<u32>(), 1u8..=32));
    let network = (
        some((0u64..64).boxed()),
        some(prop::sample::select(vec![1u64, 6, 17, 132]).boxed()),
        address(),
        address(),
        some((0u64..256).boxed()),
        some((0u64..256).boxed()),
    );
    (link, network).prop_map(|((in_port, dst, src, ethertype, vlan, pcp), (dscp, proto, from, to, tp_src, tp_dst))| {
        let is_arp = ethertype == Some(0x0806);
        let [op, source, destination] =
            if is_arp { [Field::ArpOp, Field::ArpSpa, Field::ArpTpa] } else { [Field::IpProto, Field::Ipv4Src, Field::Ipv4Dst] };
        let ports = match proto.filter(|_| !is_arp) {
            Some(6) => [Field::TcpSrc, Field::TcpDst],
            Some(17) => [Field::UdpSrc, Field::UdpDst],
            Some(1) => [Field::Icmpv4Type, Field::Icmpv4Code],
            _ => [Field::TpSrc, Field::TpDst],
        };
        let exact = |field, value: Option<u64>| value.map(|value| Oxm::exact(field, value));
        let address = |field, value: Option<(u32, u8)>| value.map(|(value, length)| Oxm::ipv4(field, value.into(), length));
        let fields = [
            exact(Field::InPort, in_port),
            exact(Field::EthDst, dst),
            exact(Field::EthSrc, src),
            exact(Field::EthType, ethertype),
            exact(Field::VlanVid, vlan),
            exact(Field::VlanPcp, pcp),
            exact(Field::IpDscp, dscp),
            exact(op, proto),
            address(source, from),
            address(destination, to),
            exact(ports[0], tp_src),
            exact(ports[1], tp_dst),
        ];
        Match::new(fields.into_iter().flatten())
    })
}

fn action(version: Version) -> BoxedStrategy<Action> {
    let output = (port_no(version), any::<u16>()).prop_map(|(port, length)| Action::Output { port, max_len: MaxLen(length) });
    let other = (experimenter_id(), data_of(8)).prop_map(|(experimenter, data)| Action::Experimenter { experimenter, data });
    if version == Version::V1_0 {
        let fields = vec![Field::EthSrc, Field::EthDst, Field::Ipv4Src, Field::Ipv4Dst, Field::IpDscp, Field::TpSrc, Field::TpDst];
        let set = (prop::sample::select(fields), any::<u128>()).prop_map(|(field, value)| Oxm::exact(field, value & field.full_mask()));
        return prop_oneof![
            output,
            set.prop_map(Action::SetField),
            any::<u16>().prop_map(Action::SetVlanVid),
            any::<u8>().prop_map(Action::SetVlanPcp),
            Just(Action::PopVlan),
            (port_no(version), any::<u32>()).prop_map(|(port, queue)| Action::Enqueue { port, queue: QueueId(queue) }),
            other,
        ]
        .boxed();
    }
    let set = (prop::sample::select(fields_1_3()), any::<u128>()).prop_map(|(field, value)| Oxm::exact(field, value & field.full_mask()));
    let set = prop_oneof![4 => set, 1 => other_oxm()];
    let plain = vec![Action::CopyTtlOut, Action::CopyTtlIn, Action::DecMplsTtl, Action::DecNwTtl, Action::PopVlan, Action::PopPbb];
    prop_oneof![
        2 => output,
        2 => set.prop_map(Action::SetField),
        2 => prop::sample::select(plain),
        1 => any::<u32>().prop_map(|queue| Action::SetQueue(QueueId(queue))),
        1 => any::<u32>().prop_map(|group| Action::Group(GroupId(group))),
        1 => any::<u8>().prop_map(Action::SetMplsTtl),
        1 => any::<u8>().prop_map(Action::SetNwTtl),
        1 => any::<u16>().prop_map(Action::PushVlan),
        1 => any::<u16>().prop_map(Action::PushMpls),
        1 => any::<u16>().prop_map(Action::PopMpls),
        1 => any::<u16>().prop_map(Action::PushPbb),
        1 => other,
    ]
    .boxed()
}

fn actions(version: Version) -> impl Strategy<Value = Vec<Action>> {
    vec(action(version), 0..5)
}

fn instructions(version: Version) -> BoxedStrategy<Vec<Instruction>> {
    if version == Version::V1_0 {
        let some = |actions: Vec<Action>| if actions.is_empty() { vec![] } else { vec![Instruction::ApplyActions(actions)] };
        return actions(version).prop_map(some).boxed();
    }
    let instruction = prop_oneof![
        table().prop_map(Instruction::GotoTable),
        (any::<u64>(), any::<u64>()).prop_map(|(metadata, mask)| Instruction::WriteMetadata { metadata, mask }),
        actions(version).prop_map(Instruction::WriteActions),
        actions(version).prop_map(Instruction::ApplyActions),
        Just(Instruction::ClearActions),
        any::<u32>().prop_map(|meter| Instruction::Meter(MeterId(meter))),
        (experimenter_id(), data()).prop_map(|(experimenter, data)| Instruction::Experimenter { experimenter, data }),
    ];
    vec(instruction, 0..4).boxed()
}

fn flow_mod(version: Version) -> impl Strategy<Value = FlowMod> {
    let commands = vec![FlowCommand::Add, FlowCommand::Modify, FlowCommand::ModifyStrict, FlowCommand::Delete, FlowCommand::DeleteStrict];
    let head = (
        cookie(),
        late(version, Cookie(0), cookie()),
        late(version, TableId(0), table()),
        prop::sample::select(commands),
        seconds(),
        seconds(),
    );
    let rest = (
        any::<u16>(),
        buffer(),
        port_no(version),
        late(version, GroupId::ANY, any::<u32>().prop_map(GroupId)),
        flags(version, 16),
        matching(version),
        instructions(version),
    );
    (head, rest).prop_map(|((cookie, cookie_mask, table, command, idle_timeout, hard_timeout), rest)| {
        let (priority, buffer, out_port, out_group, flags, matching, instructions) = rest;
        FlowMod {
            cookie,
            cookie_mask,
            table,
            command,
            idle_timeout,
            hard_timeout,
            priority,
            buffer,
            out_port,
            out_group,
            flags,
            matching,
            instructions,
        }
    })
}

fn flow_removed(version: Version) -> impl Strategy<Value = FlowRemoved> {
    let mut reasons = vec![RemovedReason::IdleTimeout, RemovedReason::HardTimeout, RemovedReason::Delete];
    reasons.extend((version == Version::V1_3).then_some(RemovedReason::GroupDelete));
    let head = (cookie(), any::<u16>(), prop::sample::select(reasons), late(version, TableId(0), table()), duration());
    let rest = (seconds(), late(version, Seconds(0), seconds()), counter(), byte_counter(), matching(version));
    (head, rest).prop_map(|((cookie, priority, reason, table, duration), (idle_timeout, hard_timeout, packets, bytes, matching))| {
        FlowRemoved { cookie, priority, reason, table, duration, idle_timeout, hard_timeout, packets, bytes, matching }
    })
}

fn packet_in(version: Version) -> impl Strategy<Value = PacketIn> {
    let mut reasons = vec![PacketReason::NoMatch, PacketReason::Action];
    reasons.extend((version == Version::V1_3).then_some(PacketReason::InvalidTtl));
    let matching = if version == Version::V1_0 {
        port_no(version).prop_map(|port| Match::new([Oxm::in_port(port)])).boxed()
    } else {
        matching(version)
    };
    let (table, cookie) = (late(version, TableId(0), table()), late(version, Cookie(0), cookie()));
    (buffer(), any::<u16>(), prop::sample::select(reasons), table, cookie, matching, data()).prop_map(
        |(buffer, total_len, reason, table, cookie, matching, data)| PacketIn { buffer, total_len, reason, table, cookie, matching, data },
    )
}

fn packet_out(version: Version) -> impl Strategy<Value = PacketOut> {
    (buffer(), port_no(version), actions(version), data()).prop_map(|(buffer, in_port, actions, data)| PacketOut {
        buffer,
        in_port,
        actions,
        data,
    })
}

fn command() -> impl Strategy<Value = ModCommand> {
    prop::sample::select(vec![ModCommand::Add, ModCommand::Modify, ModCommand::Delete])
}

fn group_kind() -> impl Strategy<Value = GroupKind> {
    prop::sample::select(vec![GroupKind::All, GroupKind::Select, GroupKind::Indirect, GroupKind::FastFailover])
}

fn buckets() -> impl Strategy<Value = Vec<Bucket>> {
    let bucket = (any::<u16>(), any::<u32>(), any::<u32>(), actions(Version::V1_3)).prop_map(|(weight, port, group, actions)| Bucket {
        weight,
        watch_port: PortNo(port),
        watch_group: GroupId(group),
        actions,
    });
    vec(bucket, 0..4)
}

fn group_mod() -> impl Strategy<Value = GroupMod> {
    (command(), group_kind(), any::<u32>(), buckets()).prop_map(|(command, kind, group, buckets)| GroupMod {
        command,
        kind,
        group: GroupId(group),
        buckets,
    })
}

fn bands() -> impl Strategy<Value = Vec<Band>> {
    let kind = prop_oneof![
        Just(BandKind::Drop),
        any::<u8>().prop_map(BandKind::DscpRemark),
        (experimenter_id(), data()).prop_map(|(experimenter, data)| BandKind::Experimenter { experimenter, data }),
    ];
    vec((any::<u32>(), any::<u32>(), kind).prop_map(|(rate, burst, kind)| Band { rate, burst, kind }), 0..4)
}

fn meter_mod() -> impl Strategy<Value = MeterMod> {
    (command(), flags(Version::V1_3, 16), any::<u32>(), bands()).prop_map(|(command, flags, meter, bands)| MeterMod {
        command,
        flags,
        meter: MeterId(meter),
        bands,
    })
}

fn queue_config(version: Version) -> impl Strategy<Value = QueueConfig> {
    let min = any::<u16>().prop_map(|rate| QueueProperty::MinRate(Permille(rate)));
    let max = any::<u16>().prop_map(|rate| QueueProperty::MaxRate(Permille(rate)));
    let other = (experimenter_id(), data()).prop_map(|(experimenter, data)| QueueProperty::Experimenter { experimenter, data });
    let property =
        if version == Version::V1_0 { prop_oneof![min, Just(QueueProperty::None)].boxed() } else { prop_oneof![min, max, other].boxed() };
    let queue = (any::<u32>(), port_no(version), vec(property, 0..3));
    (port_no(version), vec(queue, 0..4)).prop_map(move |(port, queues)| {
        let queue = |(id, own, properties)| Queue { id: QueueId(id), port: if version == Version::V1_0 { port } else { own }, properties };
        QueueConfig { port, queues: queues.into_iter().map(queue).collect() }
    })
}

fn role() -> impl Strategy<Value = Role> {
    prop::sample::select(vec![Role::NoChange, Role::Equal, Role::Master, Role::Slave])
}

fn async_config() -> impl Strategy<Value = AsyncConfig> {
    let masks = || (any::<u32>(), any::<u32>()).prop_map(|(master, slave)| ReasonMasks { master, slave });
    (masks(), masks(), masks()).prop_map(|(packet_in, port_status, flow_removed)| AsyncConfig { packet_in, port_status, flow_removed })
}

fn flow_query(version: Version) -> impl Strategy<Value = FlowQuery> {
    let group = late(version, GroupId::ANY, any::<u32>().prop_map(GroupId));
    let cookie = || late(version, Cookie(0), cookie());
    (table(), port_no(version), group, cookie(), cookie(), matching(version)).prop_map(
        |(table, out_port, out_group, cookie, cookie_mask, matching)| FlowQuery {
            table,
            out_port,
            out_group,
            cookie,
            cookie_mask,
            matching,
        },
    )
}

fn request(version: Version) -> BoxedStrategy<MultipartRequest> {
    let shared = prop_oneof![
        prop::sample::select(vec![RequestBody::Description, RequestBody::Table]),
        flow_query(version).prop_map(RequestBody::Flow),
        flow_query(version).prop_map(RequestBody::Aggregate),
        port_no(version).prop_map(RequestBody::Port),
        (port_no(version), any::<u32>()).prop_map(|(port, queue)| RequestBody::Queue { port, queue: QueueId(queue) }),
        experimenter(version).prop_map(RequestBody::Experimenter),
    ];
    if version == Version::V1_0 {
        return shared.prop_map(MultipartRequest::new).boxed();
    }
    let plain = vec![RequestBody::GroupDescription, RequestBody::GroupFeatures, RequestBody::MeterFeatures, RequestBody::PortDescription];
    let body = prop_oneof![
        4 => shared,
        1 => prop::sample::select(plain),
        1 => any::<u32>().prop_map(|group| RequestBody::Group(GroupId(group))),
        1 => any::<u32>().prop_map(|meter| RequestBody::Meter(MeterId(meter))),
        1 => any::<u32>().prop_map(|meter| RequestBody::MeterConfig(MeterId(meter))),
        2 => vec(table_features(), 0..3).prop_map(RequestBody::TableFeatures),
    ];
    (any::<bool>(), body).prop_map(|(more, body)| MultipartRequest { more, body }).boxed()
}

fn table_features() -> impl Strategy<Value = TableFeatures> {
    let properties = vec(table_property(), 0..4);
    (table(), text(32), any::<u64>(), any::<u64>(), flags(Version::V1_3, 32), any::<u32>(), properties).prop_map(
        |(table, name, metadata_match, metadata_write, config, max_entries, properties)| TableFeatures {
            table,
            name,
            metadata_match,
            metadata_write,
            config,
            max_entries,
            properties,
        },
    )
}

fn table_property() -> impl Strategy<Value = TableProperty> {
    let id = prop_oneof![(0u16..0xffff).prop_map(ActionId::Basic), experimenter_id().prop_map(ActionId::Experimenter)];
    let ids = vec(id, 0..4);
    let basic = (prop::sample::select(fields_1_3()), any::<bool>()).prop_map(|(field, masked)| OxmId::Basic { field, masked });
    let other = (0u16..3, 0u8..128, any::<bool>(), any::<u8>(), prop::option::of(experimenter_id())).prop_map(
        |(class, field, masked, length, experimenter)| OxmId::Other {
            class: if experimenter.is_some() { 0xffff } else { class },
            field,
            masked,
            length,
            experimenter,
        },
    );
    let oxms = vec(prop_oneof![3 => basic, 1 => other], 0..4);
    let tables = vec(table(), 0..6);
    (0u8..9, any::<bool>(), ids, oxms, tables, experimenter_id(), data()).prop_map(|(kind, miss, ids, oxms, tables, experimenter, data)| {
        match kind {
            0 => TableProperty::Instructions { miss, ids },
            1 => TableProperty::NextTables { miss, ids: tables },
            2 => TableProperty::WriteActions { miss, ids },
            3 => TableProperty::ApplyActions { miss, ids },
            4 => TableProperty::Match(oxms),
            5 => TableProperty::Wildcards(oxms),
            6 => TableProperty::WriteSetField { miss, ids: oxms },
            7 => TableProperty::ApplySetField { miss, ids: oxms },
            _ => TableProperty::Experimenter { miss, experimenter, exp_type: 7, data },
        }
    })
}

fn reply(version: Version) -> BoxedStrategy<MultipartReply> {
    let description =
        (text(256), text(256), text(256), text(32), text(256)).prop_map(|(manufacturer, hardware, software, serial, datapath)| {
            Box::new(Description { manufacturer, hardware, software, serial, datapath })
        });
    let shared = prop_oneof![
        description.prop_map(ReplyBody::Description),
        vec(flow_stats(version), 0..4).prop_map(ReplyBody::Flow),
        (traffic(), any::<u32>()).prop_map(|(traffic, flows)| ReplyBody::Aggregate(AggregateStats { traffic, flows })),
        vec(table_stats(version), 0..4).prop_map(ReplyBody::Table),
        vec(port_stats(version), 0..4).prop_map(ReplyBody::Port),
        vec(queue_stats(version), 0..4).prop_map(ReplyBody::Queue),
        experimenter(version).prop_map(ReplyBody::Experimenter),
    ];
    let body = if version == Version::V1_0 { shared.boxed() } else { prop_oneof![1 => shared, 1 => late_reply()].boxed() };
    (any::<bool>(), body).prop_map(|(more, body)| MultipartReply { more, body }).boxed()
}

/// Replies that 1.0 does not have.
fn late_reply() -> impl Strategy<Value = ReplyBody> {
    let group = (any::<u32>(), any::<u32>(), traffic(), duration(), vec(traffic(), 0..4)).prop_map(
        |(group, references, traffic, duration, buckets)| GroupStats { group: GroupId(group), references, traffic, duration, buckets },
    );
    let description = (group_kind(), any::<u32>(), buckets()).prop_map(|(kind, group, buckets)| GroupDescription {
        kind,
        group: GroupId(group),
        buckets,
    });
    let kind = (any::<bool>(), any::<u32>(), any::<u32>()).prop_map(|(supported, max_groups, actions)| GroupKindFeatures {
        supported,
        max_groups,
        actions,
    });
    let group_features = (flags(Version::V1_3, 32), [kind.clone(), kind.clone(), kind.clone(), kind])
        .prop_map(|(capabilities, kinds)| ReplyBody::GroupFeatures(GroupFeatures { capabilities, kinds }));
    let meter = (any::<u32>(), any::<u32>(), traffic(), duration(), vec(traffic(), 0..4))
        .prop_map(|(meter, flows, traffic, duration, bands)| MeterStats { meter: MeterId(meter), flows, traffic, duration, bands });
    let config = (flags(Version::V1_3, 16), any::<u32>(), bands()).prop_map(|(flags, meter, bands)| MeterConfig {
        flags,
        meter: MeterId(meter),
        bands,
    });
    let meter_features = (any::<u32>(), any::<u32>(), flags(Version::V1_3, 32), any::<u8>(), any::<u8>()).prop_map(
        |(max_meters, band_types, flags, max_bands, max_colours)| {
            ReplyBody::MeterFeatures(MeterFeatures { max_meters, band_types, flags, max_bands, max_colours })
        },
    );
    prop_oneof![
        vec(group, 0..4).prop_map(ReplyBody::Group),
        vec(description, 0..4).prop_map(ReplyBody::GroupDescription),
        group_features,
        vec(meter, 0..4).prop_map(ReplyBody::Meter),
        vec(config, 0..4).prop_map(ReplyBody::MeterConfig),
        meter_features,
        vec(table_features(), 0..4).prop_map(ReplyBody::TableFeatures),
        vec(port(Version::V1_3), 0..4).prop_map(ReplyBody::PortDescription),
    ]
}

fn flow_stats(version: Version) -> impl Strategy<Value = FlowStats> {
    let head = (table(), duration(), any::<u16>(), seconds(), seconds());
    let rest = (late(version, FlowFlags::NONE, flags(version, 16)), cookie(), traffic(), matching(version), instructions(version));
    (head, rest).prop_map(|((table, duration, priority, idle_timeout, hard_timeout), (flags, cookie, traffic, matching, instructions))| {
        FlowStats { table, duration, priority, idle_timeout, hard_timeout, flags, cookie, traffic, matching, instructions }
    })
}

fn table_stats(version: Version) -> impl Strategy<Value = TableStats> {
    let v10 =
        (text(32), any::<u32>(), any::<u32>()).prop_map(|(name, wildcards, max_entries)| Some(TableV10 { name, wildcards, max_entries }));
    let v10 = if version == Version::V1_0 { v10.boxed() } else { Just(None).boxed() };
    (table(), v10, any::<u32>(), counter(), counter()).prop_map(|(table, v10, active, lookups, matched)| TableStats {
        table,
        v10,
        active,
        lookups,
        matched,
    })
}

fn port_stats(version: Version) -> impl Strategy<Value = PortStats> {
    let counters = vec(counter(), 10);
    (port_no(version), counters, byte_counter(), byte_counter(), late_duration(version)).prop_map(
        |(port, counters, rx_bytes, tx_bytes, duration)| PortStats {
            port,
            rx_packets: counters[0],
            tx_packets: counters[1],
            rx_bytes,
            tx_bytes,
            rx_dropped: counters[2],
            tx_dropped: counters[3],
            rx_errors: counters[4],
            tx_errors: counters[5],
            rx_frame_errors: counters[6],
            rx_over_errors: counters[7],
            rx_crc_errors: counters[8],
            collisions: counters[9],
            duration,
        },
    )
}

fn queue_stats(version: Version) -> impl Strategy<Value = QueueStats> {
    (port_no(version), any::<u32>(), byte_counter(), counter(), counter(), late_duration(version)).prop_map(
        |(port, queue, tx_bytes, tx_packets, tx_errors, duration)| QueueStats {
            port,
            queue: QueueId(queue),
            tx_bytes,
            tx_packets,
            tx_errors,
            duration,
        },
    )
}
