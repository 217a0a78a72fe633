//! SNMPv3 on both sides: a slicer whose device is another slicer, in front of a model agent.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::Time;
use braid_snmp::{
    AuthProtocol, Credentials, DeviceSetup, Event, Identity, ManagerSetup, Message, Output, Pdu, PduKind, Setup, SliceSetup, Slicer,
    UserKeys, Value, VarBind, View,
};

use crate::support::*;

const NAME: &str = "1.3.6.1.2.1.1.5.0";
const OTHER: &str = "1.3.6.1.2.1.1.6.0";

fn user(protocol: AuthProtocol, password: &str, privacy: Option<&str>) -> Credentials {
    let keys = UserKeys::from_passwords(protocol, password.as_bytes(), privacy.map(str::as_bytes)).unwrap();
    Credentials::User { name: b"blue".to_vec(), keys }
}

/// A slicer that speaks SNMPv3 to managers.
fn inner(credentials: Credentials) -> Slicer {
    let manager = ManagerSetup { write: true, ..ManagerSetup::new(credentials, vec!["127.0.0.0/8".parse().unwrap()]) };
    let views = BTreeMap::from([(0, View::new(vec![subtree("1.3.6.1.2.1.1", true)]))]);
    let slices = vec![SliceSetup { name: "blue".into(), views, managers: vec![manager] }];
    Slicer::new(Time::ZERO, &identity(9), Setup { devices: vec![device("ap1")], slices, ..Setup::default() })
}

/// A slicer that speaks SNMPv3 to its agent.
fn outer(credentials: Credentials) -> Slicer {
    let device = DeviceSetup { credentials, ..device("inner") };
    let see = vec![subtree("1.3.6.1.2.1.1.5", true)];
    Slicer::new(Time::ZERO, &identity(1), Setup { devices: vec![device], slices: vec![slice("sub", see)], ..Setup::default() })
}

struct Cascade {
    now: Time,
    outer: Slicer,
    inner: Slicer,
    agent: Tree,
    /// Datagrams to the inner slicer.
    sent: Vec<Vec<u8>>,
    /// Datagrams to the outer slicer.
    answered: Vec<Vec<u8>>,
    events: Vec<Event>,
}

impl Cascade {
    fn new(outside: Credentials, inside: Credentials) -> Self {
        let agent = Tree::new([NAME, OTHER].map(|name| (oid(name), Value::Octets(name.into()))));
        let (sent, answered, events) = (Vec::new(), Vec::new(), Vec::new());
        Self { now: Time::from_millis(5_000_000), outer: outer(outside), inner: inner(inside), agent, sent, answered, events }
    }

    fn ask(&mut self, pdu: &Pdu) -> Option<Pdu> {
        let bytes = Message::encode_community(b"sub", pdu);
        self.outer.receive_request(self.now, 0, manager_address(), &bytes);
        let answer = self.run()?;
        let Message::Community { pdu, .. } = Message::decode(&answer).unwrap() else { panic!() };
        Some(pdu)
    }

    fn run(&mut self) -> Option<Vec<u8>> {
        let mut answer = None;
        loop {
            if let Some(output) = self.outer.poll_output() {
                match output {
                    Output::ToManager { bytes, .. } => answer = Some(bytes),
                    Output::ToAgent { bytes, .. } => {
                        self.inner.receive_request(self.now, 0, manager_address(), &bytes);
                        self.sent.push(bytes);
                    }
                    other => panic!("{other:?}"),
                }
            } else if let Some(output) = self.inner.poll_output() {
                match output {
                    Output::ToManager { bytes, .. } => {
                        self.outer.receive_answer(self.now, 0, &bytes);
                        self.answered.push(bytes);
                    }
                    Output::ToAgent { bytes, .. } => {
                        let Message::Community { community, pdu } = Message::decode(&bytes).unwrap() else { panic!() };
                        let bytes = Message::encode_community(&community, &self.agent.answer(&pdu));
                        self.inner.receive_answer(self.now, 0, &bytes);
                    }
                    other => panic!("{other:?}"),
                }
            } else {
                break;
            }
        }
        while let Some(event) = self.outer.poll_event().or_else(|| self.inner.poll_event()) {
            self.events.push(event);
        }
        answer
    }

    fn said(&self, part: &str) -> bool {
        self.events.iter().any(|event| event.to_string().contains(part))
    }
}

fn get(name: &str, id: i32) -> Pdu {
    Pdu { request_id: id, ..Pdu::asking(PduKind::Get, [oid(name)]) }
}

fn set(value: &[u8], id: i32) -> Pdu {
    Pdu::new(PduKind::Set, id, vec![VarBind::new(oid(NAME), Value::Octets(value.to_vec()))])
}

#[test]
fn slicers_cascade_by_every_protocol() {
    for protocol in [AuthProtocol::Sha1, AuthProtocol::Sha256, AuthProtocol::Sha384, AuthProtocol::Sha512] {
        for privacy in [None, Some("another password")] {
            let both = || user(protocol, "a good password", privacy);
            let mut cascade = Cascade::new(both(), both());
            let answer = cascade.ask(&get(NAME, 1)).unwrap();
            assert_eq!((answer.status, &answer.bindings[0].value), (0, &Value::Octets(NAME.into())), "{protocol:?}");
            // The outer view counts, too.
            assert_eq!(cascade.ask(&get(OTHER, 2)).unwrap().bindings[0].value, Value::NoSuchObject);
            assert_eq!(cascade.ask(&set(b"ap", 3)).unwrap().status, 0);
            assert_eq!(cascade.agent.objects[&oid(NAME)], Value::Octets(b"ap".to_vec()));
            // Encrypted, the value is not on the wire.
            let shown = cascade.answered.iter().any(|bytes| bytes.windows(NAME.len()).any(|part| part == NAME.as_bytes()));
            assert_eq!(shown, privacy.is_none());
        }
    }
}

#[test]
fn the_engine_is_found_once_and_its_clock_is_learnt() {
    let both = || user(AuthProtocol::Sha256, "a good password", Some("another password"));
    let mut cascade = Cascade::new(both(), both());
    for id in 1..=5 {
        assert!(cascade.ask(&get(NAME, id)).is_some());
    }
    assert_eq!(cascade.sent.len(), 6, "one to find the engine, and one a request");
    // Long after, too: both clocks run.
    cascade.now = cascade.now + Duration::from_secs(100_000);
    assert!(cascade.ask(&get(NAME, 6)).is_some());
    assert_eq!(cascade.sent.len(), 7);
    // The inner one starts again: same id, another clock. Then another engine.
    cascade.inner = inner(both());
    assert!(cascade.ask(&get(NAME, 7)).is_some());
    let mut setup = Setup { devices: vec![device("ap1")], ..Setup::default() };
    let manager = ManagerSetup::new(both(), vec!["127.0.0.0/8".parse().unwrap()]);
    let views = BTreeMap::from([(0, View::new(vec![subtree("1.3", false)]))]);
    setup.slices = vec![SliceSetup { name: "blue".into(), views, managers: vec![manager] }];
    cascade.inner = Slicer::new(cascade.now, &identity(8), setup.clone());
    assert!(cascade.ask(&get(NAME, 8)).is_some());
    // One that has lost its number of starts looks like a copy of the past. After a time-out it is asked anew.
    cascade.inner = Slicer::new(cascade.now, &Identity { boots: 2, ..identity(8) }, setup);
    assert!(cascade.ask(&get(NAME, 9)).is_none());
    for _ in 0..4 {
        cascade.now = cascade.now + Duration::from_secs(1);
        cascade.outer.handle_timeout(cascade.now);
        cascade.run();
    }
    assert!(cascade.ask(&get(NAME, 10)).is_some());
}

#[test]
fn wrong_secrets_get_nothing_and_are_named() {
    let right = || user(AuthProtocol::Sha256, "a good password", Some("another password"));
    for (wrong, part) in [
        (user(AuthProtocol::Sha256, "a bad password", Some("another password")), "usmStatsWrongDigests"),
        (user(AuthProtocol::Sha512, "a good password", Some("another password")), "usmStatsWrongDigests"),
        (user(AuthProtocol::Sha256, "a good password", None), "usmStatsUnsupportedSecLevels"),
        (
            Credentials::User {
                name: b"red".to_vec(),
                keys: UserKeys::from_passwords(AuthProtocol::Sha256, b"a good password", None).unwrap(),
            },
            "usmStatsUnknownUserNames",
        ),
    ] {
        let mut cascade = Cascade::new(wrong, right());
        let answer = cascade.ask(&get(NAME, 1)).unwrap();
        assert_eq!((answer.status, answer.index), (5, 0), "genErr");
        assert!(cascade.said(part), "{:?}", cascade.events);
        assert_eq!(cascade.agent.requests, 0);
    }
    // With another privacy password nothing sensible comes out, and nothing happens.
    let mut cascade = Cascade::new(user(AuthProtocol::Sha256, "a good password", Some("a third password")), right());
    assert!(cascade.ask(&get(NAME, 1)).is_none() && cascade.agent.requests == 0);
}

#[test]
fn copies_of_requests_to_set_and_old_messages_do_nothing() {
    let both = || user(AuthProtocol::Sha256, "a good password", None);
    let mut cascade = Cascade::new(both(), both());
    assert_eq!(cascade.ask(&set(b"one", 1)).unwrap().status, 0);
    let (copy, requests) = (cascade.sent.last().unwrap().clone(), cascade.agent.requests);
    assert_eq!(cascade.ask(&set(b"two", 2)).unwrap().status, 0);
    for seconds in [0, 100, 149] {
        cascade.inner.receive_request(cascade.now + Duration::from_secs(seconds), 0, manager_address(), &copy);
        cascade.run();
    }
    assert!(cascade.said("copy of an earlier request to set"), "{:?}", cascade.events);
    cascade.inner.receive_request(cascade.now + Duration::from_secs(152), 0, manager_address(), &copy);
    cascade.run();
    assert_eq!((cascade.agent.requests, &cascade.agent.objects[&oid(NAME)]), (requests + 1, &Value::Octets(b"two".to_vec())));
    assert!(cascade.said("copy of an old message"), "{:?}", cascade.events);
}

#[test]
fn changed_messages_are_refused_wherever_they_are_changed() {
    let both = || user(AuthProtocol::Sha256, "a good password", Some("another password"));
    let mut cascade = Cascade::new(both(), both());
    assert!(cascade.ask(&set(b"one", 1)).is_some());
    let (request, answer, requests) =
        (cascade.sent.last().unwrap().clone(), cascade.answered.last().unwrap().clone(), cascade.agent.requests);
    for place in 0..request.len() {
        let mut changed = request.clone();
        changed[place] ^= 0x01;
        cascade.inner.receive_request(cascade.now, 0, manager_address(), &changed);
        cascade.run();
    }
    for place in 0..answer.len() {
        let mut changed = answer.clone();
        changed[place] ^= 0x01;
        cascade.outer.receive_answer(cascade.now, 0, &changed);
        assert!(cascade.run().is_none());
    }
    assert_eq!(cascade.agent.requests, requests);
}

#[test]
fn regression_a_message_that_claims_authentication_needs_a_digest() {
    let both = || user(AuthProtocol::Sha256, "a good password", None);
    let mut cascade = Cascade::new(both(), both());
    assert!(cascade.ask(&get(NAME, 1)).is_some());
    let request = cascade.sent.last().unwrap().clone();
    let Message::Secured(message) = Message::decode(&request).unwrap() else { panic!() };
    // The digest is left out: shorter lengths all the way up.
    let mut bytes = request[..message.digest_at.start].to_vec();
    bytes.extend(&request[message.digest_at.end..]);
    let (cut, at) = (message.digest_at.len() as u8, message.digest_at.start - 1);
    bytes[at] = 0;
    bytes[1] -= cut;
    // The security parameters: the OCTET STRING and the SEQUENCE inside.
    let outer = bytes.windows(4).position(|head| head[0] == 4 && head[2] == 0x30 && head[1] == head[3] + 2).unwrap();
    bytes[outer + 1] -= cut;
    bytes[outer + 3] -= cut;
    let Ok(Message::Secured(cut)) = Message::decode(&bytes) else { panic!("{bytes:?}") };
    assert!(cut.security.digest.is_empty());
    let requests = cascade.agent.requests;
    cascade.inner.receive_request(cascade.now, 0, manager_address(), &bytes);
    cascade.run();
    assert!(cascade.agent.requests == requests && cascade.said("digest"), "{:?}", cascade.events);
}
