//! The device as a datapath: entries of a remote controller lead new flows, within the user's policy, and go with the controller.

use std::time::Duration;

use braid_api::ExplainRequest;
use braid_control::config::Config;
use braid_control::core::{MAX_CONTROLLER_RULES, NewRule};
use braid_control::datapath::{Agent, ECHO};
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, ExeId};
use braid_decide::policy::{AppMatcher, AppRule, Exclusions, LinkRule, Scheduler};
use braid_model::{ByteCount, FlowId, Role};
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::{FlowFlags, PortState};
use braid_openflow::flow::{FlowCommand, FlowMod, FlowRemoved, PacketIn, PacketOut, PacketReason, RemovedReason};
use braid_openflow::ids::{BufferId, Cookie, PortNo, Seconds, TableId};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{FlowQuery, FlowStats, MultipartReply, MultipartRequest, PortStats, ReplyBody, RequestBody};
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::port::{Port, PortReason, PortStatus};
use braid_openflow::switch::{Role as ControllerRole, RoleMessage};
use braid_openflow::{CloseReason, Config as OpenFlow, Connection, ErrorCode, Event, Message, Side, Version};
use bytes::Bytes;

use super::world::*;

const SECOND: Duration = Duration::from_secs(1);
/// Longer than changes of the table wait.
const SOON: Duration = Duration::from_millis(30);
/// Longer than a poll of the flows.
const POLL: Duration = Duration::from_millis(300);
const WLAN: PortNo = PortNo(1);
const LTE: PortNo = PortNo(2);

/// A device that is handed to a controller.
struct Handed {
    world: World,
    agent: Agent,
    controller: Connection,
}

impl Handed {
    /// Two links, of which wlan0 is the system's choice.
    fn new() -> Self {
        Self::with(config(Scheduler::OnlyOne))
    }

    fn with(config: Config) -> Self {
        let mut world = World::of_ethernet(FakeSteering::default(), config);
        world.run(SECOND);
        let mut handed = Self { agent: Agent::new(None), controller: Connection::new(OpenFlow::new(Side::Controller), world.now), world };
        handed.agent.connected(handed.world.now);
        let events = handed.talk();
        assert!(matches!(&events[..], [Event::Ready { version: Version::V1_3, features: Some(_) }]), "{events:?}");
        assert!(handed.agent.is_in_control());
        handed
    }

    /// Carries bytes both ways until there are none. Returns the controller's events.
    fn talk(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        loop {
            let (mut down, mut up) = (Vec::new(), Vec::new());
            self.controller.poll_output(&mut down);
            self.agent.receive(self.world.now, &mut self.world.core, &down).unwrap();
            self.agent.poll_output(&mut up);
            self.controller.receive(self.world.now, &up);
            events.extend(std::iter::from_fn(|| self.controller.poll_event()));
            if down.is_empty() && up.is_empty() {
                return events;
            }
        }
    }

    /// Lets time pass. Returns the controller's events.
    fn pass(&mut self, span: Duration) -> Vec<Event> {
        let (end, mut events) = (self.world.now + span, Vec::new());
        while self.world.now < end {
            self.world.run(Duration::from_millis(10));
            let now = self.world.now;
            self.agent.step(now, &mut self.world.core).unwrap();
            assert!(self.agent.poll_timeout().is_none_or(|due| due > now), "something was due and had no effect");
            self.controller.handle_timeout(now);
            events.extend(self.talk());
        }
        events
    }

    /// Sends a command and a barrier. Returns the error of the command, if there is one.
    fn command(&mut self, message: Message) -> Option<ErrorCode> {
        let now = self.world.now;
        let sent = self.controller.request(now, message).unwrap();
        self.controller.request(now, Message::BarrierRequest).unwrap();
        let events = self.pass(SOON);
        let outcome = |event: &Event| match event {
            Event::Done { xid } | Event::Reply { xid, .. } if *xid == sent => Some(None),
            Event::Failed { xid, error } if *xid == sent => Some(Some(error.code)),
            _ => None,
        };
        events.iter().find_map(outcome).unwrap_or_else(|| panic!("neither done nor failed: {events:?}"))
    }

    fn flow_mod(&mut self, flow: FlowMod) -> Option<ErrorCode> {
        self.command(Message::FlowMod(flow))
    }

    #[track_caller]
    fn add(&mut self, flow: FlowMod) {
        assert_eq!(self.flow_mod(flow), None);
    }

    fn ask(&mut self, body: RequestBody) -> ReplyBody {
        let request = Message::MultipartRequest(MultipartRequest::new(body));
        let asked = self.controller.request(self.world.now, request).unwrap();
        let events = self.talk();
        let reply = events.into_iter().find_map(|event| match event {
            Event::Reply { xid, message } if xid == asked => Some(*message),
            _ => None,
        });
        match reply {
            Some(Message::MultipartReply(MultipartReply { body, .. })) => body,
            other => panic!("{other:?}"),
        }
    }

    fn stats(&mut self) -> Vec<FlowStats> {
        match self.ask(RequestBody::Flow(FlowQuery::default())) {
            ReplyBody::Flow(stats) => stats,
            other => panic!("{other:?}"),
        }
    }

    fn ports(&mut self) -> Vec<Port> {
        match self.ask(RequestBody::PortDescription) {
            ReplyBody::PortDescription(ports) => ports,
            other => panic!("{other:?}"),
        }
    }

    /// Number of rules in the kernel.
    fn rules(&mut self) -> usize {
        self.world.core.steering().params().unwrap().rules.len()
    }

    /// A new flow to this port of the server: its slot and id.
    fn flow(&mut self, port: u16) -> (usize, FlowId) {
        let app = AppId { exe: ExeId { device: 1, inode: 3 }, name: "test".to_owned() };
        let now = self.world.now;
        match self.world.core.steering().connect(now, &app, 1000, (SERVER, port)) {
            Steered::To(slot, id) => (slot, id),
            other => panic!("{other:?}"),
        }
    }

    fn transfer(&mut self, id: FlowId, bytes: u64) {
        self.world.core.steering().transfer(id, ByteCount::new(bytes), ByteCount::ZERO);
    }
}

fn tcp(port: u16) -> Match {
    Match::new([Oxm::exact(Field::EthType, 0x0800u16), Oxm::exact(Field::IpProto, 6u8), Oxm::exact(Field::TcpDst, port)])
}

fn output(port: PortNo) -> Vec<Instruction> {
    vec![Instruction::ApplyActions(vec![Action::output(port)])]
}

/// An entry that leads TCP flows to this port over a link.
fn lead(port: u16, link: PortNo) -> FlowMod {
    FlowMod { matching: tcp(port), instructions: output(link), ..FlowMod::default() }
}

/// The entry for flows that no other one matches.
fn miss() -> FlowMod {
    FlowMod { priority: 0, cookie: Cookie(7), instructions: output(PortNo::CONTROLLER), ..FlowMod::default() }
}

fn all(command: FlowCommand) -> FlowMod {
    FlowMod { command, table: TableId::ALL, ..FlowMod::default() }
}

fn matching(port: u16) -> AppRule {
    AppRule { matcher: AppMatcher { port: Some(port), ..AppMatcher::default() }, ..AppRule::default() }
}

fn packet_ins(events: Vec<Event>) -> Vec<PacketIn> {
    let packet = |event| match event {
        Event::Message { message, .. } => match *message {
            Message::PacketIn(packet) => Some(packet),
            _ => None,
        },
        _ => None,
    };
    events.into_iter().filter_map(packet).collect()
}

fn removed(events: Vec<Event>) -> Vec<FlowRemoved> {
    let flow = |event| match event {
        Event::Message { message, .. } => match *message {
            Message::FlowRemoved(removed) => Some(removed),
            _ => None,
        },
        _ => None,
    };
    events.into_iter().filter_map(flow).collect()
}

fn statuses(events: Vec<Event>) -> Vec<PortStatus> {
    let status = |event| match event {
        Event::Message { message, .. } => match *message {
            Message::PortStatus(status) => Some(status),
            _ => None,
        },
        _ => None,
    };
    events.into_iter().filter_map(status).collect()
}

#[test]
fn entries_lead_new_flows_and_go_with_the_controller() {
    let mut device = Handed::new();
    assert_eq!(device.world.used(), ["wlan0"]);
    let (_, earlier) = device.flow(443);
    device.add(lead(443, LTE));
    assert_eq!((device.world.used(), device.flow(80).0), (vec!["lte0".to_owned()], 0), "only flows that the entry matches");
    device.pass(SOON);
    let (slot, led) = device.flow(443);
    assert_eq!(slot, 1);
    device.pass(POLL);
    let explained =
        device.world.core.explain(device.world.now, &ExplainRequest { flow: Some(led.0), ..ExplainRequest::default() }).unwrap();
    assert_eq!(explained.program_rule.as_deref(), Some("controller:1"));
    assert_eq!(explained.rule_text.as_deref(), Some("port = 443, protocol = \"tcp\", destination = \"0.0.0.0/0\""));
    let rules = device.world.core.program_rules(device.world.now);
    assert_eq!(rules.iter().map(|rule| rule.program.as_deref()).collect::<Vec<_>>(), [Some("remote controller")]);
    let error = device.world.core.remove_rule(device.world.now, "controller:1").unwrap_err();
    assert!(error.detail.contains("belongs to the remote controller"), "{error}");

    device.agent.disconnected(device.world.now, &mut device.world.core).unwrap();
    assert_eq!((device.world.used(), device.rules()), (vec!["wlan0".to_owned()], 0), "at once");
    assert!(!device.agent.is_in_control() && device.agent.entries() == 0);
    device.pass(POLL);
    let flows = device.world.core.flows(device.world.now);
    let link = |id: FlowId| flows.iter().find(|flow| flow.id == id.0).map(|flow| flow.link.clone());
    assert_eq!([link(earlier), link(led)], [Some("wlan0".to_owned()), Some("lte0".to_owned())], "running flows go on");

    // The next connection begins with an empty table.
    device.agent.connected(device.world.now);
    device.controller = Connection::new(OpenFlow::new(Side::Controller), device.world.now);
    device.talk();
    assert_eq!((device.stats(), device.world.used()), (vec![], vec!["wlan0".to_owned()]));
}

#[test]
fn a_controller_that_does_not_answer_is_lost_within_two_seconds() {
    let mut device = Handed::new();
    device.add(lead(443, LTE));
    let since = device.world.now;
    while device.agent.poll_end().is_none_or(|reason| reason != CloseReason::Silent) {
        assert_eq!(device.world.used(), ["lte0"]);
        device.world.run(Duration::from_millis(10));
        device.agent.step(device.world.now, &mut device.world.core).unwrap();
        device.agent.poll_output(&mut Vec::new());
        assert!(device.world.now.since(since) <= ECHO * 2 + SOON);
    }
    assert_eq!((device.world.used(), device.rules()), (vec!["wlan0".to_owned()], 0));
    // One that answers stays.
    let mut device = Handed::new();
    device.add(lead(443, LTE));
    device.pass(SECOND * 10);
    assert_eq!((device.agent.poll_end(), device.world.used()), (None, vec!["lte0".to_owned()]));
}

#[test]
fn priorities_order_the_entries_and_commands_change_them() {
    let mut device = Handed::new();
    let wide = |link| FlowMod { priority: 5, instructions: output(link), cookie: Cookie(0x10), ..FlowMod::default() };
    device.add(FlowMod { priority: 9, ..lead(443, PortNo::NORMAL) });
    device.add(wide(LTE));
    device.add(FlowMod { priority: 1, ..lead(80, WLAN) });
    assert_eq!([443, 80, 22].map(|port| device.flow(port).0), [0, 1, 1], "the policy decides about port 443");
    let stats = device.stats();
    assert_eq!(stats.iter().map(|entry| entry.priority).collect::<Vec<_>>(), [9, 5, 1]);
    assert_eq!((stats[0].matching.clone(), stats[0].instructions.clone()), (tcp(443), output(PortNo::NORMAL)));
    // All entries with this cookie, then the one with this match and priority.
    device.add(FlowMod { command: FlowCommand::Modify, cookie_mask: Cookie(u64::MAX), ..wide(WLAN) });
    assert_eq!([80, 22].map(|port| device.flow(port).0), [0, 0]);
    device.add(FlowMod { command: FlowCommand::ModifyStrict, priority: 1, ..lead(443, LTE) });
    assert_eq!(device.flow(443).0, 0, "no entry has that priority and match");
    device.add(FlowMod { command: FlowCommand::ModifyStrict, priority: 9, ..lead(443, LTE) });
    assert_eq!(device.flow(443).0, 1);
    device.add(FlowMod { out_port: WLAN, ..all(FlowCommand::Delete) });
    assert_eq!(device.stats().iter().map(|entry| entry.priority).collect::<Vec<_>>(), [9]);
    device.add(FlowMod { command: FlowCommand::DeleteStrict, priority: 8, ..lead(443, LTE) });
    assert_eq!(device.rules(), 1);
    device.add(FlowMod { matching: Match::new([Oxm::exact(Field::EthType, 0x0800u16)]), ..all(FlowCommand::Delete) });
    assert_eq!((device.rules(), device.agent.entries()), (0, 0));
}

#[test]
fn what_the_device_cannot_do_or_the_user_forbids_is_refused_and_changes_nothing() {
    let mut config = config(Scheduler::OnlyOne);
    config.policy.apps = vec![matching(22)];
    config.policy.exclude = Exclusions { destinations: vec!["203.0.113.99/32".parse().unwrap()], ..Exclusions::default() };
    config.policy.links = vec![LinkRule { role: Role::Backup, ..link_rule("lte0") }];
    let mut device = Handed::with(config);
    device.add(lead(443, WLAN));
    let (known, rules) = (device.stats(), device.rules());
    let excluded = Match::new([Oxm::exact(Field::EthType, 0x0800u16), Oxm::ipv4(Field::Ipv4Dst, [203, 0, 113, 99].into(), 32)]);
    for (flow, expected) in [
        (lead(80, LTE), ErrorCode::FlowModFailedEperm),
        (lead(22, WLAN), ErrorCode::FlowModFailedEperm),
        (FlowMod { matching: excluded, ..lead(80, WLAN) }, ErrorCode::FlowModFailedEperm),
        (FlowMod { instructions: vec![], ..lead(80, WLAN) }, ErrorCode::FlowModFailedEperm),
        (lead(80, PortNo(9)), ErrorCode::BadActionBadOutPort),
        (FlowMod { matching: Match::new([Oxm::in_port(WLAN)]), ..lead(80, WLAN) }, ErrorCode::BadMatchBadValue),
        (FlowMod { matching: Match::new([Oxm::exact(Field::EthDst, 2u8)]), ..lead(80, WLAN) }, ErrorCode::BadMatchBadField),
        (FlowMod { table: TableId(1), ..lead(80, WLAN) }, ErrorCode::FlowModFailedBadTableId),
        (FlowMod { buffer: Some(BufferId(1)), ..lead(80, WLAN) }, ErrorCode::BadRequestBufferUnknown),
        (FlowMod { flags: FlowFlags::CHECK_OVERLAP, ..lead(443, WLAN) }, ErrorCode::FlowModFailedOverlap),
        (FlowMod { command: FlowCommand::Modify, ..lead(443, LTE) }, ErrorCode::FlowModFailedEperm),
    ] {
        assert_eq!(device.flow_mod(flow.clone()), Some(expected), "{flow:?}");
        let now = device.stats();
        let without_age = |stats: &[FlowStats]| stats.iter().map(|entry| FlowStats { duration: None, ..entry.clone() }).collect::<Vec<_>>();
        assert_eq!((without_age(&now), device.rules()), (without_age(&known), rules), "{flow:?}");
    }
    // A wide entry applies to what the user's entries leave.
    device.add(FlowMod { instructions: output(WLAN), ..FlowMod::default() });
    assert_eq!(device.agent.entries(), 2);
}

#[test]
fn a_full_table_refuses_entries_and_ten_thousand_changes_are_few_for_the_kernel() {
    let mut device = Handed::new();
    for port in 0..MAX_CONTROLLER_RULES as u16 {
        device.add(lead(1000 + port, LTE));
    }
    assert_eq!(device.flow_mod(lead(443, LTE)), Some(ErrorCode::FlowModFailedTableFull));
    device.add(FlowMod { cookie: Cookie(5), ..lead(1000, WLAN) });
    assert_eq!((device.agent.entries(), device.rules()), (MAX_CONTROLLER_RULES, MAX_CONTROLLER_RULES));
    device.add(all(FlowCommand::Delete));
    let (before, began) = (device.world.core.steering().changes(), device.world.now);
    for round in 0..1000u16 {
        for port in 0..10 {
            let flow = if round % 2 == 0 {
                lead(1000 + port, LTE)
            } else {
                FlowMod { command: FlowCommand::DeleteStrict, ..lead(1000 + port, LTE) }
            };
            device.controller.request(device.world.now, Message::FlowMod(flow)).unwrap();
        }
        device.controller.request(device.world.now, Message::BarrierRequest).unwrap();
        let failed = |event: &Event| matches!(event, Event::Failed { .. } | Event::TimedOut { .. });
        if round % 100 == 99 {
            let events = device.pass(SOON);
            assert!(!events.iter().any(failed), "{events:?}");
        }
    }
    device.pass(SECOND);
    let (changes, took) = (device.world.core.steering().changes() - before, device.world.now.since(began));
    assert!(u128::from(changes) <= took.as_millis() / 5 + 10, "{changes} changes in {took:?}");
    assert_eq!((device.agent.entries(), device.world.used()), (0, vec!["wlan0".to_owned()]));
}

#[test]
fn a_thousand_barriers_take_no_longer_than_one_and_answers_keep_their_order() {
    let mut device = Handed::new();
    device.add(lead(80, LTE));
    let (before, now) = (device.world.core.steering().changes(), device.world.now);
    let bad = FlowMod { matching: Match::new([Oxm::exact(Field::EthDst, 2u8)]), ..lead(80, WLAN) };
    let mut expected = Vec::new();
    for round in 0..1000u16 {
        let link = if round % 2 == 0 { LTE } else { WLAN };
        device.controller.request(now, Message::FlowMod(lead(1000 + round % 9, link))).unwrap();
        expected.push((device.controller.request(now, Message::BarrierRequest).unwrap(), false));
    }
    expected.push((device.controller.request(now, Message::FlowMod(bad)).unwrap(), true));
    device.controller.request(now, Message::FlowMod(lead(443, LTE))).unwrap();
    expected.push((device.controller.request(now, Message::BarrierRequest).unwrap(), false));
    let events = device.pass(SOON);
    let answer = |event: &Event| match event {
        Event::Reply { xid, .. } => Some((*xid, false)),
        Event::Failed { xid, .. } => Some((*xid, true)),
        _ => None,
    };
    assert_eq!(events.iter().filter_map(answer).collect::<Vec<_>>(), expected);
    let changes = device.world.core.steering().changes() - before;
    assert!(changes <= 20, "{changes}");
    assert_eq!(device.world.used(), ["lte0"]);
}

#[test]
fn entries_end_with_their_time_or_without_traffic() {
    let mut device = Handed::new();
    device.add(FlowMod { hard_timeout: Seconds(1), flags: FlowFlags::SEND_FLOW_REM, cookie: Cookie(3), ..lead(80, LTE) });
    device.add(FlowMod { idle_timeout: Seconds(2), flags: FlowFlags::SEND_FLOW_REM, ..lead(443, LTE) });
    let (_, id) = device.flow(443);
    let gone = removed(device.pass(SECOND));
    assert_eq!(gone.iter().map(|gone| (gone.reason, gone.cookie)).collect::<Vec<_>>(), [(RemovedReason::HardTimeout, Cookie(3))]);
    for _ in 0..5 {
        device.transfer(id, 1000);
        assert_eq!(removed(device.pass(SECOND)), []);
    }
    assert_eq!(device.stats()[0].traffic.bytes, Some(ByteCount::new(5000)));
    let gone = removed(device.pass(SECOND * 2));
    assert_eq!(
        gone.iter().map(|gone| (gone.reason, gone.bytes)).collect::<Vec<_>>(),
        [(RemovedReason::IdleTimeout, Some(ByteCount::new(5000)))]
    );
    assert_eq!((device.rules(), device.world.used()), (0, vec!["wlan0".to_owned()]));
    // An entry without a time-out stays, and nobody asked about one that is deleted.
    device.add(lead(443, LTE));
    device.pass(SECOND * 30);
    assert_eq!(device.agent.entries(), 1);
    device.add(FlowMod { flags: FlowFlags::SEND_FLOW_REM, ..lead(80, LTE) });
    device.controller.request(device.world.now, Message::FlowMod(all(FlowCommand::Delete))).unwrap();
    assert_eq!(removed(device.pass(SOON)).iter().map(|gone| gone.reason).collect::<Vec<_>>(), [RemovedReason::Delete]);
}

#[test]
fn packet_ins_show_new_flows_that_no_entry_and_no_rule_of_others_decides() {
    let mut config = config(Scheduler::OnlyOne);
    config.policy.apps = vec![matching(22)];
    let mut device = Handed::with(config);
    device.flow(80);
    assert_eq!(packet_ins(device.pass(POLL)), [], "nobody asked for any");
    device.add(miss());
    device.add(lead(443, LTE));
    device.add(FlowMod { cookie: Cookie(9), ..lead(53, PortNo::CONTROLLER) });
    for port in [22, 443] {
        device.flow(port);
    }
    assert_eq!(packet_ins(device.pass(POLL)), []);
    let (slot, id) = device.flow(80);
    assert_eq!(slot, 0, "it does not wait");
    let shown = packet_ins(device.pass(POLL));
    let [packet] = &shown[..] else { panic!("{shown:?}") };
    assert_eq!((packet.reason, packet.cookie, packet.in_port()), (PacketReason::NoMatch, Cookie(7), Some(PortNo::LOCAL)));
    assert_eq!((packet.buffer, usize::from(packet.total_len)), (None, packet.data.len()));
    assert_eq!((&packet.data[30..34], &packet.data[36..38]), (&[203, 0, 113, 10][..], &80u16.to_be_bytes()[..]));
    device.transfer(id, 1000);
    assert_eq!(packet_ins(device.pass(POLL)), [], "once");
    device.flow(53);
    let shown = packet_ins(device.pass(POLL));
    assert_eq!(shown.iter().map(|packet| (packet.reason, packet.cookie)).collect::<Vec<_>>(), [(PacketReason::Action, Cookie(9))]);
    // A flow that ends between two polls.
    let (_, short) = device.flow(80);
    let now = device.world.now;
    device.world.core.steering().close(now, short);
    assert_eq!(packet_ins(device.pass(POLL)).len(), 1);

    // What the sample controllers answer.
    let out = |port, in_port| PacketOut { buffer: None, in_port, actions: vec![Action::output(port)], data: packet.data.clone() };
    for (packet, expected) in [
        (out(PortNo::FLOOD, PortNo::LOCAL), None),
        (out(LTE, PortNo::LOCAL), None),
        (PacketOut { actions: vec![], ..out(LTE, PortNo::CONTROLLER) }, None),
        (out(LTE, PortNo::CONTROLLER), Some(ErrorCode::BadRequestEperm)),
        (out(PortNo(9), PortNo::LOCAL), Some(ErrorCode::BadActionBadOutPort)),
        (PacketOut { buffer: Some(BufferId(1)), ..out(LTE, PortNo::LOCAL) }, Some(ErrorCode::BadRequestBufferUnknown)),
    ] {
        assert_eq!(device.command(Message::PacketOut(packet.clone())), expected, "{packet:?}");
    }
}

#[test]
fn links_are_ports_that_change_and_go() {
    let mut device = Handed::new();
    let names: Vec<_> = device.ports().iter().map(|port| (port.number, port.name.to_string(), port.state)).collect();
    let live = |number, name: &str| (number, name.to_owned(), PortState::LIVE);
    assert_eq!(names, [live(WLAN, "wlan0"), live(LTE, "lte0"), live(PortNo::LOCAL, "local")]);
    device.add(lead(443, LTE));
    device.world.devices[1].carrier = false;
    device.world.set_network();
    let changes = statuses(device.pass(SOON));
    let [PortStatus { reason: PortReason::Modify, port }] = &changes[..] else { panic!("{changes:?}") };
    assert_eq!((port.number, port.state), (LTE, PortState::LINK_DOWN));
    assert_eq!(device.world.used(), ["wlan0"], "the local policy decides while the link is down");
    device.world.devices[1].carrier = true;
    device.world.set_network();
    device.pass(SECOND * 3);
    assert_eq!(device.world.used(), ["lte0"]);
    // Another device with that name is another port.
    let old = device.world.devices.remove(1);
    device.world.set_network();
    assert_eq!(statuses(device.pass(SOON)).iter().map(|status| status.reason).collect::<Vec<_>>(), [PortReason::Delete]);
    device.world.devices.push(braid_model::LinkFacts { index: braid_model::LinkIndex(7), ..old });
    device.world.set_network();
    let added = statuses(device.pass(SECOND * 3));
    assert_eq!((added[0].reason, added[0].port.number, device.world.used()), (PortReason::Add, PortNo(7), vec!["wlan0".to_owned()]));
    let ReplyBody::Port(stats) = device.ask(RequestBody::Port(PortNo::ANY)) else { panic!("no counters") };
    assert_eq!(stats.iter().map(|stats: &PortStats| stats.port).collect::<Vec<_>>(), [WLAN, PortNo(7), PortNo::LOCAL]);
}

#[test]
fn a_slave_changes_nothing() {
    let mut device = Handed::new();
    let role = |role, generation| Message::RoleRequest(RoleMessage { role, generation });
    assert_eq!(device.command(role(ControllerRole::Slave, 1)), None);
    assert_eq!(device.flow_mod(lead(443, LTE)), Some(ErrorCode::BadRequestIsSlave));
    device.command(role(ControllerRole::Master, 2));
    assert_eq!(device.command(role(ControllerRole::Master, 1)), Some(ErrorCode::RoleRequestFailedStale));
    device.add(lead(443, LTE));
    assert_eq!(device.world.used(), ["lte0"]);
}

#[test]
fn rules_of_programs_come_first_and_move_no_counter() {
    let mut device = Handed::new();
    device.add(lead(443, LTE));
    let (_, id) = device.flow(443);
    device.pass(POLL);
    let rule = AppRule { links: only(&["wlan0"]), ..matching(443) };
    let new = |name| NewRule { name, program: None, rule: rule.clone(), reserve: None, lease: SECOND * 60 };
    device.world.core.put_rule(device.world.now, new("first")).unwrap();
    device.world.core.put_rule(device.world.now, new("second")).unwrap();
    assert_eq!((device.world.used(), device.rules()), (vec!["wlan0".to_owned()], 3));
    device.transfer(id, 1000);
    device.pass(POLL);
    assert_eq!(device.stats()[0].traffic.bytes, Some(ByteCount::new(1000)), "the flow began under the entry");
    device.world.core.remove_rule(device.world.now, "first").unwrap();
    device.world.core.remove_rule(device.world.now, "second").unwrap();
    assert_eq!(device.world.used(), ["lte0"]);
    device.add(FlowMod { priority: 0xffff, ..lead(80, LTE) });
    device.transfer(id, 1000);
    device.pass(POLL);
    assert_eq!(device.stats()[1].traffic.bytes, Some(ByteCount::new(2000)));
    device.agent.disconnected(device.world.now, &mut device.world.core).unwrap();
    assert_eq!((device.rules(), device.world.core.program_rules(device.world.now)), (0, vec![]));
}

#[test]
fn a_kernel_that_fails_gets_the_table_later() {
    let mut device = Handed::new();
    device.controller.request(device.world.now, Message::FlowMod(lead(443, LTE))).unwrap();
    let mut bytes = Vec::new();
    device.controller.poll_output(&mut bytes);
    device.world.core.steering().set_chaos(Some(1));
    device.agent.receive(device.world.now, &mut device.world.core, &bytes).unwrap_err();
    device.world.core.steering().set_chaos(None);
    device.pass(SECOND);
    assert_eq!(device.world.used(), ["lte0"]);
    device.world.core.steering().set_chaos(Some(1));
    device.agent.disconnected(device.world.now, &mut device.world.core).unwrap_err();
    device.world.core.steering().set_chaos(None);
    device.world.run(SECOND);
    assert_eq!((device.world.used(), device.rules()), (vec!["wlan0".to_owned()], 0));
}

/// A stream of messages with damaged bytes, cut into pieces, for many seeds: the agent answers, or ends the connection, and takes its entries back.
#[test]
fn damaged_messages_do_no_harm() {
    let messages = [
        Message::FlowMod(lead(443, LTE)),
        Message::FlowMod(miss()),
        Message::FlowMod(all(FlowCommand::Delete)),
        Message::BarrierRequest,
        Message::MultipartRequest(MultipartRequest::new(RequestBody::Flow(FlowQuery::default()))),
        Message::MultipartRequest(MultipartRequest { more: true, body: RequestBody::TableFeatures(Vec::new()) }),
        Message::PacketOut(PacketOut {
            buffer: None,
            in_port: PortNo::LOCAL,
            actions: vec![Action::output(LTE)],
            data: Bytes::from_static(&[1; 60]),
        }),
        Message::EchoRequest(Bytes::from_static(b"?")),
        Message::RoleRequest(RoleMessage { role: ControllerRole::Slave, generation: 1 }),
    ];
    let mut device = Handed::new();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut closed = 0;
    for _ in 0..2000 {
        let mut stream = Vec::new();
        for _ in 0..3 {
            messages[random(messages.len())].encode(Version::V1_3, braid_openflow::ids::Xid(9), &mut stream).unwrap();
        }
        for _ in 0..random(4) {
            let at = random(stream.len());
            stream[at] = random(256) as u8;
        }
        for piece in stream.chunks(1 + random(90)) {
            device.agent.receive(device.world.now, &mut device.world.core, piece).unwrap();
        }
        device.world.run(Duration::from_millis(10));
        device.agent.step(device.world.now, &mut device.world.core).unwrap();
        device.agent.poll_output(&mut Vec::new());
        // A damaged length makes the rest wait for bytes that do not come, and a silent controller is lost.
        if device.agent.poll_end().is_some() || random(50) == 0 {
            closed += 1;
            assert!(device.agent.entries() == 0 || device.agent.is_in_control());
            device.agent.disconnected(device.world.now, &mut device.world.core).unwrap();
            assert_eq!((device.agent.entries(), device.rules()), (0, 0));
            device.agent.connected(device.world.now);
            device.controller = Connection::new(OpenFlow::new(Side::Controller), device.world.now);
            device.talk();
            assert!(device.agent.is_in_control());
        }
    }
    assert!(closed > 20, "{closed}");
}
