//! Both sides of a connection: handshake, requests, barriers, keep-alive, errors, roles and the end.

use std::time::Duration;

use crate::support::pair::{Pair, features};
use braid_model::ByteCount;
use braid_openflow::flow::{FlowMod, PacketIn, PacketReason};
use braid_openflow::ids::{Cookie, PortNo, TableId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{MultipartReply, MultipartRequest, ReplyBody, RequestBody, TableStats};
use braid_openflow::oxm::Oxm;
use braid_openflow::switch::{AsyncConfig, ErrorMessage, ReasonMasks, Role, RoleMessage};
use braid_openflow::{
    CloseReason, Config, Connection, ErrorCode, Event, FrameError, Header, Message, MessageKind, PartLimits, Roles, SendError, Side,
    Version,
};
use bytes::Bytes;
use proptest::prelude::*;

const BOTH: &[Version] = &Version::ALL;
const OLD: &[Version] = &[Version::V1_0];
const NEW: &[Version] = &[Version::V1_3];

fn flow() -> Message {
    Message::FlowMod(FlowMod::default())
}

fn packet_in() -> Message {
    Message::PacketIn(PacketIn {
        buffer: None,
        total_len: 0,
        reason: PacketReason::NoMatch,
        table: TableId(0),
        cookie: Cookie(0),
        matching: Match::new([Oxm::in_port(PortNo(1))]),
        data: Bytes::new(),
    })
}

fn tables(ids: &[u8], more: bool) -> Message {
    let table = |id: &u8| TableStats { table: TableId(*id), v10: None, active: 0, lookups: None, matched: None };
    Message::MultipartReply(MultipartReply { more, body: ReplyBody::Table(ids.iter().map(table).collect()) })
}

/// Bytes of a message with a version that may differ from the one that it is encoded for.
fn bytes(version: Version, header_version: u8, xid: u32, message: &Message) -> Vec<u8> {
    let mut out = Vec::new();
    message.encode(version, Xid(xid), &mut out).unwrap();
    out[0] = header_version;
    out
}

fn sent(connection: &mut Connection) -> Vec<(Header, Message)> {
    let (mut out, mut splitter, mut messages) = (Vec::new(), braid_openflow::Splitter::default(), Vec::new());
    connection.poll_output(&mut out);
    splitter.push(&out);
    while let Some(message) = splitter.next_message().unwrap() {
        messages.push(Message::decode(&message).unwrap());
    }
    messages
}

fn closed(events: &[Event]) -> &CloseReason {
    let Some(Event::Closed { reason, .. }) = events.last() else { panic!("{events:?}") };
    reason
}

#[test]
fn the_newest_common_version_is_used() {
    for (controller, switch, version) in [
        (BOTH, BOTH, Version::V1_3),
        (BOTH, OLD, Version::V1_0),
        (OLD, BOTH, Version::V1_0),
        (NEW, BOTH, Version::V1_3),
        (OLD, OLD, Version::V1_0),
    ] {
        let mut pair = Pair::new(controller, switch);
        let (at_controller, at_switch) = pair.exchange();
        assert_eq!(at_controller, [Event::Ready { version, features: Some(Box::new(features())) }]);
        assert_eq!(at_switch, [Event::Ready { version, features: None }]);
        assert_eq!((pair.controller.version(), pair.switch.version()), (Some(version), Some(version)));
    }
}

#[test]
fn without_a_common_version_both_sides_close() {
    let mut pair = Pair::new(OLD, NEW);
    let (at_controller, at_switch) = pair.exchange();
    // The side that reads the hello first refuses, the other one gets the error or refuses too.
    for events in [at_controller, at_switch] {
        assert!(matches!(closed(&events), CloseReason::NoCommonVersion(_) | CloseReason::Refused(_)), "{events:?}");
    }
    assert!(pair.controller.is_closed() && pair.switch.is_closed());
    assert_eq!((pair.controller.poll_timeout(), pair.switch.poll_timeout()), (None, None));
}

#[test]
fn versions_without_a_bitmap_follow_the_smaller_one() {
    // Version of the peer's hello, bitmap, our versions, the version.
    let table: [(&str, &[Version], Option<Version>); 9] = [
        ("0400000800000001", BOTH, Some(Version::V1_3)),
        ("0600000800000001", BOTH, Some(Version::V1_3)),
        ("0100000800000001", BOTH, Some(Version::V1_0)),
        ("0300000800000001", BOTH, None),
        ("0600000800000001", OLD, Some(Version::V1_0)),
        ("0100000800000001", NEW, None),
        // 1.0, 1.1 and 1.5: the bitmap shows a common version that the smaller number does not.
        ("06000010000000010001000800000046", BOTH, Some(Version::V1_0)),
        ("0600001000000001000100080000006c", BOTH, None),
        ("04000010000000010001000800000012", BOTH, Some(Version::V1_3)),
    ];
    for (hello, versions, expected) in table {
        let digits: Vec<u32> = hello.chars().map(|digit| digit.to_digit(16).unwrap()).collect();
        let hello_bytes: Vec<u8> = digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect();
        let mut pair = Pair::new(BOTH, versions);
        pair.switch.receive(pair.now, &hello_bytes);
        assert_eq!(pair.switch.version(), expected, "{hello} {versions:?}");
        let answers = sent(&mut pair.switch);
        let refused =
            answers.iter().any(|(_, message)| matches!(message, Message::Error(error) if error.code == ErrorCode::HelloFailedIncompatible));
        assert_eq!(refused, expected.is_none(), "{hello}");
    }
}

#[test]
fn hellos_of_1_0_have_no_body() {
    let mut pair = Pair::new(OLD, BOTH);
    let (old, new) = (sent(&mut pair.controller), sent(&mut pair.switch));
    assert_eq!((old[0].0.version, old[0].0.length), (1, 8));
    assert_eq!((new[0].0.version, new[0].0.length), (4, 16));
}

#[test]
fn the_handshake_ends_in_time_or_the_connection_does() {
    let mut pair = Pair::new(BOTH, BOTH);
    // The switch answers the hello, and not the request for its features.
    let hello = bytes(Version::V1_3, 4, 1, &Message::Hello(Default::default()));
    pair.controller.receive(pair.now, &hello);
    pair.pass(Duration::from_millis(9999));
    assert!(!pair.controller.is_closed() && !pair.switch.is_closed());
    pair.pass(Duration::from_millis(1));
    for side in [&mut pair.controller, &mut pair.switch] {
        assert_eq!(side.poll_event(), Some(Event::Closed { reason: CloseReason::HandshakeTimeout, abandoned: vec![] }));
    }
}

#[test]
fn other_messages_than_a_hello_first_are_refused() {
    let mut pair = Pair::new(BOTH, BOTH);
    pair.switch.receive(pair.now, &bytes(Version::V1_3, 4, 9, &Message::FeaturesRequest));
    let events: Vec<_> = std::iter::from_fn(|| pair.switch.poll_event()).collect();
    assert_eq!(closed(&events), &CloseReason::NoHello);
    let answers = sent(&mut pair.switch);
    assert!(matches!(&answers[1], (Header { xid: Xid(9), .. }, Message::Error(error)) if error.code == ErrorCode::HelloFailedIncompatible));
    let refusal = Message::Error(ErrorMessage { code: ErrorCode::HelloFailedEperm, data: Bytes::new() });
    pair.controller.receive(pair.now, &bytes(Version::V1_3, 4, 9, &refusal));
    assert!(matches!(pair.controller.poll_event(), Some(Event::Closed { reason: CloseReason::Refused(_), .. })));
}

#[test]
fn nothing_is_sent_before_the_handshake_or_after_the_end() {
    let mut pair = Pair::new(BOTH, BOTH);
    assert_eq!(pair.controller.send(flow()), Err(SendError::NotReady(MessageKind::FlowMod)));
    pair.exchange();
    assert!(pair.controller.send(flow()).is_ok());
    pair.controller.close();
    assert_eq!(pair.controller.request(pair.now, flow()), Err(SendError::Closed(MessageKind::FlowMod)));
    // A version that lacks the message is an error too, and sends nothing.
    let mut old = Pair::ready(Version::V1_0);
    assert!(matches!(old.controller.request(old.now, Message::AsyncRequest), Err(SendError::Encode(_))));
    assert_eq!(old.controller.queued(), ByteCount::ZERO);
}

#[test]
fn replies_find_their_requests() {
    let mut pair = Pair::ready(Version::V1_3);
    let config = pair.controller.request(pair.now, Message::GetConfigRequest).unwrap();
    let barrier = pair.controller.request(pair.now, Message::BarrierRequest).unwrap();
    let (_, requests) = pair.exchange();
    assert_eq!(requests.len(), 2);
    // The replies come in another order, and after one that nobody asked for.
    pair.switch.respond(Xid(77), Message::BarrierReply).unwrap();
    pair.switch.respond(barrier, Message::BarrierReply).unwrap();
    let failed = ErrorMessage { code: ErrorCode::BadRequestEperm, data: Bytes::new() };
    pair.switch.respond(config, Message::Error(failed.clone())).unwrap();
    let (events, _) = pair.exchange();
    assert_eq!(
        events,
        [
            Event::Message { xid: Xid(77), message: Box::new(Message::BarrierReply) },
            Event::Reply { xid: barrier, message: Box::new(Message::BarrierReply) },
            Event::Failed { xid: config, error: failed },
        ]
    );
}

#[test]
fn a_barrier_completes_the_commands_before_it() {
    let mut pair = Pair::ready(Version::V1_0);
    let commands: Vec<Xid> = (0..3).map(|_| pair.controller.request(pair.now, flow()).unwrap()).collect();
    let barrier = pair.controller.request(pair.now, Message::BarrierRequest).unwrap();
    let after = pair.controller.request(pair.now, flow()).unwrap();
    pair.exchange();
    let error = ErrorMessage { code: ErrorCode::FlowModFailedTableFull, data: Bytes::new() };
    pair.switch.respond(commands[1], Message::Error(error.clone())).unwrap();
    pair.switch.respond(barrier, Message::BarrierReply).unwrap();
    let (events, _) = pair.exchange();
    let reply = Event::Reply { xid: barrier, message: Box::new(Message::BarrierReply) };
    let done = |xid| Event::Done { xid };
    assert_eq!(events, [Event::Failed { xid: commands[1], error }, done(commands[0]), done(commands[2]), reply]);
    pair.controller.disconnected();
    assert_eq!(pair.controller.poll_event(), Some(Event::Closed { reason: CloseReason::Peer, abandoned: vec![after] }));
}

#[test]
fn requests_time_out_and_commands_with_their_barrier() {
    let mut pair = Pair::ready(Version::V1_3);
    let command = pair.controller.request(pair.now, flow()).unwrap();
    let barrier = pair.controller.request(pair.now, Message::BarrierRequest).unwrap();
    pair.pass(Duration::from_secs(1));
    let later = pair.controller.request(pair.now, Message::GetConfigRequest).unwrap();
    pair.pass(Duration::from_secs(9));
    let timed_out = |xid| Some(Event::TimedOut { xid });
    assert_eq!((pair.controller.poll_event(), pair.controller.poll_event()), (timed_out(command), timed_out(barrier)));
    assert_eq!(pair.controller.poll_event(), None);
    pair.pass(Duration::from_secs(1));
    assert_eq!(pair.controller.poll_event(), timed_out(later));
}

#[test]
fn outstanding_requests_are_limited() {
    let config = Config { max_outstanding: 2, ..Config::new(Side::Controller) };
    let mut pair = Pair::with(config, Config::new(Side::Switch));
    pair.exchange();
    pair.controller.request(pair.now, flow()).unwrap();
    pair.controller.request(pair.now, Message::BarrierRequest).unwrap();
    let refused = pair.controller.request(pair.now, Message::BarrierRequest);
    assert_eq!(refused, Err(SendError::Outstanding { kind: MessageKind::BarrierRequest, count: 2 }));
    assert!(pair.controller.send(flow()).is_ok());
}

#[test]
fn echo_requests_keep_a_connection_alive() {
    let mut pair = Pair::ready(Version::V1_3);
    for _ in 0..10 {
        pair.pass(Duration::from_secs(10));
        let (at_controller, at_switch) = pair.exchange();
        assert!(at_controller.is_empty() && at_switch.is_empty(), "{at_controller:?} {at_switch:?}");
    }
    // The switch falls silent.
    pair.pass(Duration::from_secs(10));
    assert!(matches!(&sent(&mut pair.controller)[..], [(_, Message::EchoRequest(_))]));
    pair.pass(Duration::from_millis(4999));
    assert!(!pair.controller.is_closed());
    pair.pass(Duration::from_millis(1));
    assert_eq!(pair.controller.poll_event(), Some(Event::Closed { reason: CloseReason::Silent, abandoned: vec![] }));
}

#[test]
fn any_message_counts_as_a_sign_of_life() {
    let mut pair = Pair::ready(Version::V1_3);
    pair.pass(Duration::from_secs(10));
    assert!(matches!(&sent(&mut pair.controller)[..], [(_, Message::EchoRequest(_))]));
    pair.switch.send(packet_in()).unwrap();
    pair.collect();
    let bytes = std::mem::take(&mut pair.to_controller);
    pair.controller.receive(pair.now, &bytes);
    pair.pass(Duration::from_secs(5));
    assert!(!pair.controller.is_closed());
}

#[test]
fn own_echo_requests_get_their_data_back() {
    let mut pair = Pair::ready(Version::V1_3);
    let data = Bytes::from_static(b"ping");
    let xid = pair.switch.request(pair.now, Message::EchoRequest(data.clone())).unwrap();
    let (at_controller, at_switch) = pair.exchange();
    assert!(at_controller.is_empty());
    assert_eq!(at_switch, [Event::Reply { xid, message: Box::new(Message::EchoReply(data)) }]);
}

#[test]
fn replies_in_several_parts_arrive_as_one() {
    let mut pair = Pair::ready(Version::V1_3);
    let ask = || Message::MultipartRequest(MultipartRequest::new(RequestBody::Table));
    let xid = pair.controller.request(pair.now, ask()).unwrap();
    pair.exchange();
    for (ids, more) in [(&[1, 2][..], true), (&[], true), (&[3], false)] {
        pair.switch.respond(xid, tables(ids, more)).unwrap();
        // Other messages may come between.
        pair.switch.send(packet_in()).unwrap();
    }
    let (events, _) = pair.exchange();
    assert_eq!(events.len(), 4);
    assert!(events.contains(&Event::Reply { xid, message: Box::new(tables(&[1, 2, 3], false)) }));
    // A part of another kind ends the request.
    let xid = pair.controller.request(pair.now, ask()).unwrap();
    pair.exchange();
    pair.switch.respond(xid, tables(&[1], true)).unwrap();
    pair.switch.respond(xid, Message::MultipartReply(MultipartReply::new(ReplyBody::Port(vec![])))).unwrap();
    let (events, _) = pair.exchange();
    assert_eq!(events, [Event::Rejected { xid, code: ErrorCode::BadRequestBadMultipart, malformed: None }]);
    assert_eq!(pair.controller.poll_timeout(), Some(pair.now + Duration::from_secs(10)), "only the echo is due");
}

#[test]
fn parts_are_limited() {
    let limits = PartLimits { bytes: ByteCount::new(100), sequences: 1 };
    let config = |side| Config { parts: limits, ..Config::new(side) };
    let mut pair = Pair::with(config(Side::Controller), config(Side::Switch));
    pair.exchange();
    let xid = pair.controller.request(pair.now, Message::MultipartRequest(MultipartRequest::new(RequestBody::Table))).unwrap();
    pair.exchange();
    pair.switch.respond(xid, tables(&[1, 2], true)).unwrap();
    pair.switch.respond(xid, tables(&[3, 4], true)).unwrap();
    let overflow = |xid| Event::Rejected { xid, code: ErrorCode::BadRequestMultipartBufferOverflow, malformed: None };
    assert_eq!(pair.exchange().0, [overflow(xid)]);
    // At the switch: two requests whose parts are missing.
    let part = || Message::MultipartRequest(MultipartRequest { more: true, body: RequestBody::TableFeatures(vec![]) });
    pair.controller.send(part()).unwrap();
    let xid = pair.controller.send(part()).unwrap();
    let (at_controller, at_switch) = pair.exchange();
    assert_eq!(at_switch, [overflow(xid)]);
    assert!(matches!(&at_controller[..], [Event::Message { message, .. }] if matches!(&**message, Message::Error(_))));
    // The first one is forgotten in time.
    pair.pass(Duration::from_secs(9));
    pair.exchange();
    pair.pass(Duration::from_secs(1));
    pair.controller.send(part()).unwrap();
    assert_eq!(pair.exchange(), (vec![], vec![]));
}

#[test]
fn malformed_and_misplaced_messages_are_answered_with_errors() {
    let mut pair = Pair::ready(Version::V1_3);
    let mut unknown = bytes(Version::V1_3, 4, 5, &Message::BarrierRequest);
    unknown[1] = 99;
    let mut short = bytes(Version::V1_3, 4, 6, &flow());
    short.truncate(40);
    short[3] = 40;
    let other_version = bytes(Version::V1_0, 1, 7, &Message::BarrierRequest);
    let unknown_version = bytes(Version::V1_3, 5, 8, &Message::BarrierRequest);
    let wrong_side = bytes(Version::V1_3, 4, 9, &packet_in());
    let table = [
        (unknown, ErrorCode::BadRequestBadType),
        (short, ErrorCode::BadRequestBadLen),
        (other_version, ErrorCode::BadRequestBadVersion),
        (unknown_version, ErrorCode::BadRequestBadVersion),
        (wrong_side, ErrorCode::BadRequestBadType),
    ];
    for (message, code) in table {
        pair.switch.receive(pair.now, &message);
        let Some(Event::Rejected { xid, code: rejected, .. }) = pair.switch.poll_event() else { panic!("{code}") };
        let answers = sent(&mut pair.switch);
        let [(header, Message::Error(error))] = &answers[..] else { panic!("{answers:?}") };
        assert_eq!((rejected, error.code, header.xid, header.version), (code, code, xid, 4));
        assert_eq!(error.data, message[..message.len().min(64)]);
    }
    // A malformed reply ends its request, and is not answered. Neither is an error.
    let xid = pair.controller.request(pair.now, Message::GetConfigRequest).unwrap();
    sent(&mut pair.controller);
    pair.controller.receive(pair.now, &[4, 8, 0, 9, 0, 0, 0, xid.0 as u8, 0]);
    assert!(matches!(pair.controller.poll_event(), Some(Event::Rejected { xid: asked, malformed: Some(_), .. }) if asked == xid));
    pair.controller.receive(pair.now, &[4, 1, 0, 9, 0, 0, 0, 1, 0]);
    assert!(sent(&mut pair.controller).is_empty() && !pair.controller.is_closed());
}

#[test]
fn refusals_repeat_the_beginning_of_the_request() {
    let mut pair = Pair::ready(Version::V1_3);
    let long = Message::FlowMod(FlowMod { matching: Match::new([Oxm::vlan(Some(5)), Oxm::in_port(PortNo(1))]), ..FlowMod::default() });
    for (request, length) in [(Message::GetConfigRequest, 8), (long, 64)] {
        let asked = pair.controller.request(pair.now, request).unwrap();
        let (_, at_switch) = pair.exchange();
        let [Event::Message { xid, message }] = &at_switch[..] else { panic!("{at_switch:?}") };
        pair.switch.refuse(*xid, ErrorCode::BadRequestEperm, message).unwrap();
        let (at_controller, _) = pair.exchange();
        let [Event::Failed { xid, error }] = &at_controller[..] else { panic!("{at_controller:?}") };
        let repeated = bytes(Version::V1_3, 4, asked.0, message);
        assert_eq!((*xid, &error.data[..]), (asked, &repeated[..length]));
    }
    // A request in parts may be too long for one message.
    let request = RequestBody::Experimenter(braid_openflow::switch::Experimenter {
        experimenter: braid_openflow::ids::ExperimenterId(1),
        exp_type: Some(2),
        data: vec![0; 70_000].into(),
    });
    pair.switch.refuse(Xid(9), ErrorCode::BadRequestBadExperimenter, &Message::MultipartRequest(MultipartRequest::new(request))).unwrap();
    let (at_controller, _) = pair.exchange();
    let [Event::Message { message, .. }] = &at_controller[..] else { panic!("{at_controller:?}") };
    assert!(matches!(&**message, Message::Error(error) if error.data[..] == [4, 18, 0, 8, 0, 0, 0, 9]));
}

#[test]
fn errors_that_1_0_lacks_become_bad_type() {
    let mut pair = Pair::ready(Version::V1_0);
    let mut malformed =
        bytes(Version::V1_0, 1, 5, &Message::FlowMod(FlowMod { matching: Match::new([Oxm::vlan(Some(5))]), ..FlowMod::default() }));
    malformed[8 + 18] = 0x20;
    pair.switch.receive(pair.now, &malformed);
    let answers = sent(&mut pair.switch);
    assert!(matches!(&answers[..], [(_, Message::Error(error))] if error.code == ErrorCode::BadRequestBadType));
}

#[test]
fn a_stream_that_cannot_be_split_ends_the_connection() {
    let mut pair = Pair::ready(Version::V1_3);
    pair.switch.receive(pair.now, &[4, 2, 0, 7, 0, 0, 0, 3, 1]);
    let answers = sent(&mut pair.switch);
    assert!(matches!(&answers[..], [(Header { xid: Xid(3), .. }, Message::Error(error))] if error.code == ErrorCode::BadRequestBadLen));
    assert!(matches!(pair.switch.poll_event(), Some(Event::Closed { reason: CloseReason::Framing(FrameError::Short { .. }), .. })));
    pair.switch.receive(pair.now, &[0; 100]);
    assert_eq!((pair.switch.poll_event(), pair.switch.queued()), (None, ByteCount::ZERO));
}

#[test]
fn a_peer_that_does_not_read_is_dropped() {
    let config = Config { max_queued: ByteCount::new(1000), ..Config::new(Side::Switch) };
    let mut pair = Pair::with(Config::new(Side::Controller), config);
    pair.exchange();
    let echo = bytes(Version::V1_3, 4, 1, &Message::EchoRequest(Bytes::from_static(&[0; 92])));
    for count in 0..20 {
        assert_eq!(pair.switch.is_closed(), count > 10, "{count}");
        pair.switch.receive(pair.now, &echo);
    }
    assert!(matches!(pair.switch.poll_event(), Some(Event::Closed { reason: CloseReason::Overflow, .. })));
    assert_eq!(pair.switch.queued(), ByteCount::new(1000));
}

#[test]
fn what_waits_is_taken_in_parts_or_dropped() {
    let mut pair = Pair::ready(Version::V1_3);
    let echo = bytes(Version::V1_3, 4, 1, &Message::EchoRequest(Bytes::from_static(&[7; 92])));
    let answer = bytes(Version::V1_3, 4, 1, &Message::EchoReply(Bytes::from_static(&[7; 92])));
    (0..20).for_each(|_| pair.switch.receive(pair.now, &echo));
    let (mut taken, mut part) = (Vec::new(), Vec::new());
    while pair.switch.poll_part(300, &mut part) {
        assert!(part.len() <= 300);
        taken.append(&mut part);
        assert_eq!(pair.switch.queued(), ByteCount::new(2000 - taken.len() as u64));
    }
    assert_eq!(taken, answer.repeat(20));
    pair.switch.receive(pair.now, &echo);
    pair.switch.overflow();
    assert!(matches!(pair.switch.poll_event(), Some(Event::Closed { reason: CloseReason::Overflow, .. })));
    assert_eq!(pair.switch.queued(), ByteCount::ZERO);
}

#[test]
fn slaves_change_nothing_and_get_what_they_configured() {
    let mut pair = Pair::ready(Version::V1_3);
    let mut roles = Roles::default();
    let request = RoleMessage { role: Role::Slave, generation: 7 };
    let asked = pair.controller.request(pair.now, Message::RoleRequest(request)).unwrap();
    let (_, at_switch) = pair.exchange();
    let Some(Event::Message { xid, message }) = at_switch.first() else { panic!("{at_switch:?}") };
    let Message::RoleRequest(request) = **message else { panic!("{message:?}") };
    let change = roles.request(0, request).unwrap();
    pair.switch.set_role(roles.role(0));
    pair.switch.respond(*xid, Message::RoleReply(change.reply)).unwrap();
    assert!(matches!(&pair.exchange().0[..], [Event::Reply { xid, .. }] if *xid == asked));

    let command = pair.controller.request(pair.now, flow()).unwrap();
    let (at_controller, _) = pair.exchange();
    assert!(matches!(&at_controller[..], [Event::Failed { xid, error }] if *xid == command && error.code == ErrorCode::BadRequestIsSlave));
    assert_eq!(pair.switch.notify(packet_in()), Ok(false));
    let wanted = AsyncConfig { packet_in: ReasonMasks { master: 0, slave: 1 }, ..AsyncConfig::default() };
    pair.controller.send(Message::SetAsync(wanted)).unwrap();
    let get = pair.controller.request(pair.now, Message::AsyncRequest).unwrap();
    let (at_controller, at_switch) = pair.exchange();
    assert_eq!((at_controller, at_switch), (vec![Event::Reply { xid: get, message: Box::new(Message::AsyncReply(wanted)) }], vec![]));
    assert_eq!(pair.switch.notify(packet_in()), Ok(true));
    pair.switch.set_role(Role::Master);
    assert_eq!(pair.switch.notify(packet_in()), Ok(false));
}

#[test]
fn shutdown_waits_for_outstanding_replies() {
    let mut pair = Pair::ready(Version::V1_3);
    let barrier = pair.controller.request(pair.now, Message::BarrierRequest).unwrap();
    pair.controller.shutdown(pair.now);
    assert!(matches!(pair.controller.request(pair.now, flow()), Err(SendError::Closed(_))));
    pair.exchange();
    pair.switch.respond(barrier, Message::BarrierReply).unwrap();
    let (events, _) = pair.exchange();
    assert!(matches!(&events[..], [Event::Reply { .. }, Event::Closed { reason: CloseReason::Local, .. }]), "{events:?}");
    // Without a reply it ends in time.
    let mut pair = Pair::ready(Version::V1_3);
    let barrier = pair.controller.request(pair.now, Message::BarrierRequest).unwrap();
    pair.controller.shutdown(pair.now);
    pair.pass(Duration::from_secs(5));
    assert_eq!(pair.controller.poll_event(), Some(Event::Closed { reason: CloseReason::Local, abandoned: vec![barrier] }));
    // Without outstanding requests it ends at once.
    let mut pair = Pair::ready(Version::V1_3);
    pair.controller.shutdown(pair.now);
    assert!(pair.controller.is_closed());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// However the bytes are cut, the events are the same.
    #[test]
    fn events_do_not_depend_on_how_bytes_arrive(cuts in prop::collection::vec(1usize..40, 1..30), count in 1usize..6) {
        let mut pair = Pair::ready(Version::V1_3);
        let ask = |_| pair.controller.request(pair.now, Message::MultipartRequest(MultipartRequest::new(RequestBody::Table))).unwrap();
        let requests: Vec<Xid> = (0..count).map(ask).collect();
        pair.exchange();
        for xid in requests {
            pair.switch.respond(xid, tables(&[6], true)).unwrap();
            pair.switch.respond(xid, tables(&[7, 8], false)).unwrap();
            pair.switch.send(packet_in()).unwrap();
        }
        pair.collect();
        let (bytes, mut from) = (std::mem::take(&mut pair.to_controller), 0);
        for cut in cuts.iter().cycle() {
            let to = (from + cut).min(bytes.len());
            pair.controller.receive(pair.now, &bytes[from..to]);
            from = to;
            if from == bytes.len() {
                break;
            }
        }
        let events: Vec<_> = std::iter::from_fn(|| pair.controller.poll_event()).collect();
        prop_assert_eq!(events.len(), 2 * count);
        prop_assert_eq!(events.iter().filter(|event| matches!(event, Event::Reply { .. })).count(), count);
    }
}
