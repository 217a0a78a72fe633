//! `ovs-ofctl`, as a controller, talks to the switch's side of a connection over a real socket.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "runs ovs-ofctl, and reads a clock and sockets for the connection")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use braid_model::{ByteCount, Time};
use braid_openflow::action::{Action, ActionId, Instruction};
use braid_openflow::flags::{ConfigFlags, FlowFlags};
use braid_openflow::flow::FlowMod;
use braid_openflow::ids::{Cookie, Kbps, MaxLen, PortNo, Seconds, TableId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{
    FlowStats, MultipartReply, MultipartRequest, ReplyBody, RequestBody, TableFeatures, TableProperty, TableStats, TableV10, Traffic,
};
use braid_openflow::oxm::{Field, Oxm, OxmId};
use braid_openflow::port::Port;
use braid_openflow::switch::{Features, SwitchConfig};
use braid_openflow::{Config, Connection, ErrorCode, Event, Message, Side, Version};

use crate::ovs::decoder_exists;
use crate::support::pair::features;
use crate::support::samples::MAC;

/// A switch with one port and one flow entry, on one connection.
struct Switch {
    stream: TcpStream,
    connection: Connection,
    version: Version,
    flow_mods: Vec<FlowMod>,
}

/// Runs `ovs-ofctl` with a switch of `versions`. Returns what it printed, and the flow-mods that it sent.
fn talk(versions: &[Version], arguments: &[&str]) -> (String, Vec<FlowMod>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let arguments: Vec<&str> = arguments.iter().map(|argument| if *argument == "SWITCH" { &address } else { *argument }).collect();
    let mut command = Command::new("ovs-ofctl");
    command.args(["--timeout=60"]).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    // A command may open several connections.
    let mut switches: Vec<Switch> = Vec::new();
    while child.try_wait().unwrap().is_none() {
        let now = Time::from_nanos(start.elapsed().as_nanos() as u64);
        if let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(true).unwrap();
            let config = Config { versions: versions.to_vec(), ..Config::new(Side::Switch) };
            let connection = Connection::new(config, now);
            switches.push(Switch { stream, connection, version: Version::V1_0, flow_mods: Vec::new() });
        }
        switches.iter_mut().for_each(|switch| switch.serve(now));
        std::thread::sleep(Duration::from_millis(1));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    let flow_mods = switches.into_iter().flat_map(|switch| switch.flow_mods).collect();
    (text.split_whitespace().collect::<Vec<_>>().join(" "), flow_mods)
}

impl Switch {
    /// Handles what came, and sends what waits.
    fn serve(&mut self, now: Time) {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.connection.disconnected(),
            Ok(count) => self.connection.receive(now, &buffer[..count]),
            Err(_) if self.connection.poll_timeout().is_some_and(|due| due <= now) => self.connection.handle_timeout(now),
            Err(_) => {}
        }
        while let Some(event) = self.connection.poll_event() {
            match event {
                Event::Ready { version, .. } => self.version = version,
                Event::Message { xid, message } => self.answer(xid, *message),
                Event::Closed { .. } => {}
                event => panic!("{event:?}"),
            }
        }
        let mut out = Vec::new();
        self.connection.poll_output(&mut out);
        // The peer may have closed the connection, and reads little: the messages fit in the socket's buffer.
        let _ = self.stream.write_all(&out);
    }

    fn answer(&mut self, xid: Xid, message: Message) {
        match self.replies(&message) {
            Ok(replies) => replies.into_iter().for_each(|reply| self.connection.respond(xid, reply).unwrap()),
            Err(code) => self.connection.refuse(xid, code, &message).unwrap(),
        }
    }

    /// The replies to a request, or the error.
    fn replies(&mut self, message: &Message) -> Result<Vec<Message>, ErrorCode> {
        let part = |more, body| Message::MultipartReply(MultipartReply { more, body });
        let port = Port {
            number: PortNo(3),
            address: MAC,
            name: "eth3".into(),
            config: Default::default(),
            state: Default::default(),
            current: Default::default(),
            advertised: Default::default(),
            supported: Default::default(),
            peer: Default::default(),
            current_speed: Kbps(0),
            max_speed: Kbps(0),
        };
        Ok(match message {
            Message::FeaturesRequest => {
                let ports = if self.version == Version::V1_0 { vec![port] } else { vec![] };
                vec![Message::FeaturesReply(Features { ports, ..features() })]
            }
            Message::GetConfigRequest => {
                vec![Message::GetConfigReply(SwitchConfig { flags: ConfigFlags::NONE, miss_send_len: MaxLen(99) })]
            }
            Message::BarrierRequest => vec![Message::BarrierReply],
            Message::FlowMod(flow) if flow.priority == 13 => return Err(ErrorCode::FlowModFailedTableFull),
            Message::FlowMod(flow) => {
                self.flow_mods.push(flow.clone());
                vec![]
            }
            Message::MultipartRequest(MultipartRequest { body, .. }) => match body {
                // In two parts.
                RequestBody::Flow(_) => [5, 6].map(|id| part(id == 5, ReplyBody::Flow(vec![entry(id)]))).to_vec(),
                RequestBody::PortDescription => vec![part(false, ReplyBody::PortDescription(vec![port]))],
                RequestBody::Table => {
                    let v10 = Some(TableV10 { name: "only".into(), wildcards: 0x3f_ffff, max_entries: 10 });
                    let table = TableStats { table: TableId(0), v10, active: 2, lookups: None, matched: None };
                    vec![part(false, ReplyBody::Table(vec![table]))]
                }
                // 1.3 has the names of tables in their features.
                RequestBody::TableFeatures(_) => vec![part(false, ReplyBody::TableFeatures(vec![table_features()]))],
                _ => return Err(ErrorCode::BadRequestBadMultipart),
            },
            Message::SetConfig(_) | Message::Error(_) => vec![],
            Message::Experimenter(_) => return Err(ErrorCode::BadRequestBadExperimenter),
            message => panic!("{message:?}"),
        })
    }
}

fn table_features() -> TableFeatures {
    let miss = false;
    let actions = || vec![ActionId::Basic(0)];
    let fields = || vec![OxmId::Basic { field: Field::InPort, masked: false }];
    TableFeatures {
        table: TableId(0),
        name: "only".into(),
        metadata_match: 0,
        metadata_write: 0,
        config: Default::default(),
        max_entries: 10,
        properties: vec![
            TableProperty::Instructions { miss, ids: vec![ActionId::Basic(4)] },
            TableProperty::NextTables { miss, ids: vec![] },
            TableProperty::WriteActions { miss, ids: actions() },
            TableProperty::ApplyActions { miss, ids: actions() },
            TableProperty::Match(fields()),
            TableProperty::Wildcards(fields()),
            TableProperty::WriteSetField { miss, ids: vec![] },
            TableProperty::ApplySetField { miss, ids: vec![] },
        ],
    }
}

fn entry(id: u64) -> FlowStats {
    FlowStats {
        table: TableId(0),
        duration: Some(Duration::from_secs(id)),
        priority: 100,
        idle_timeout: Seconds(0),
        hard_timeout: Seconds(0),
        flags: FlowFlags::NONE,
        cookie: Cookie(id),
        traffic: Traffic { packets: Some(1), bytes: Some(ByteCount::new(2)) },
        matching: Match::new([Oxm::in_port(PortNo(3))]),
        instructions: vec![Instruction::ApplyActions(vec![Action::output(PortNo(4))])],
    }
}

#[test]
fn a_real_controller_reads_a_switch() {
    if !decoder_exists() {
        return;
    }
    for (versions, option, name) in [
        (&[Version::V1_0][..], "OpenFlow10", "OFPT_FEATURES_REPLY (xid="),
        (&[Version::V1_3], "OpenFlow13", "OFPT_FEATURES_REPLY (OF1.3)"),
        (&Version::ALL, "OpenFlow13", "OFPT_FEATURES_REPLY (OF1.3)"),
        (&Version::ALL, "OpenFlow10", "OFPT_FEATURES_REPLY (xid="),
        (&Version::ALL, "OpenFlow10,OpenFlow11,OpenFlow12,OpenFlow13,OpenFlow14,OpenFlow15", "OFPT_FEATURES_REPLY (OF1.3)"),
    ] {
        let (printed, _) = talk(versions, &["-O", option, "show", "SWITCH"]);
        for text in [name, "dpid:000000000000002a", "3(eth3): addr:02:00:00:00:00:01", "miss_send_len=99"] {
            assert!(printed.contains(text), "{option}: {text} is not in: {printed}");
        }
        let (printed, _) = talk(versions, &["-O", option, "dump-flows", "SWITCH"]);
        for text in ["cookie=0x5, duration=5s", "cookie=0x6, duration=6s", "priority=100,in_port=3 actions=output:4"] {
            assert!(printed.contains(text), "{option}: {text} is not in: {printed}");
        }
    }
    let (printed, _) = talk(&[Version::V1_0], &["-O", "OpenFlow13", "show", "SWITCH"]);
    assert!(printed.contains("version negotiation failed"), "{printed}");
}

#[test]
fn a_real_controller_changes_a_switch() {
    if !decoder_exists() {
        return;
    }
    let fields = [
        Oxm::exact(Field::EthType, 0x0800u16),
        Oxm::exact(Field::IpProto, 6u8),
        Oxm::ipv4(Field::Ipv4Src, [10, 0, 0, 0].into(), 8),
        Oxm::exact(Field::TcpDst, 80u16),
    ];
    for (option, version) in [("OpenFlow10", Version::V1_0), ("OpenFlow13", Version::V1_3)] {
        let text = "priority=7,idle_timeout=60,cookie=9,tcp,nw_src=10.0.0.0/8,tp_dst=80,actions=output:2";
        let (printed, flows) = talk(&[version], &["-O", option, "add-flow", "SWITCH", text]);
        let [flow] = &flows[..] else { panic!("{printed}: {flows:?}") };
        assert_eq!((flow.priority, flow.idle_timeout, flow.cookie), (7, Seconds(60), Cookie(9)));
        assert_eq!(flow.matching.canonical(), Match::new(fields.clone()).canonical());
        let output = Action::Output { port: PortNo(2), max_len: MaxLen(0) };
        assert_eq!(flow.instructions, [Instruction::ApplyActions(vec![output])]);
        let (printed, flows) = talk(&[version], &["-O", option, "add-flow", "SWITCH", "priority=13,actions=drop"]);
        assert!(flows.is_empty() && printed.contains("OFPFMFC_TABLE_FULL"), "{printed}");
    }
}
