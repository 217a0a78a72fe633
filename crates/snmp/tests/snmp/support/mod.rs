//! A slicer between managers and model agents.
#![allow(dead_code, unreachable_pub, reason = "each target of the fuzzer uses a part")]

pub mod entry;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use braid_model::Time;
use braid_snmp::{
    Credentials, DeviceSetup, ErrorStatus, Event, Identity, ManagerSetup, Message, Oid, Output, Part, Pdu, PduKind, Setup, SliceSetup,
    Slicer, Value, VarBind, View,
};

/// A name.
pub fn oid(text: &str) -> Oid {
    text.parse().unwrap()
}

/// Where managers are.
pub fn manager_address() -> SocketAddr {
    "127.0.0.1:40000".parse().unwrap()
}

/// An engine's identity.
pub fn identity(number: u8) -> Identity {
    Identity { engine: vec![0x80, 0, 0, 1, 5, number], boots: 3, seed: [number; 32] }
}

/// A device whose agent takes the community `agent`.
pub fn device(name: &str) -> DeviceSetup {
    let credentials = Credentials::Community(b"agent".to_vec());
    DeviceSetup { name: name.into(), credentials, timeout: Duration::from_secs(1), retries: 1 }
}

/// A slice whose manager may set, has the slice's name as community, and sees this of the first device.
pub fn slice(name: &str, parts: Vec<Part>) -> SliceSetup {
    let nets = vec!["127.0.0.0/8".parse().unwrap()];
    let manager = ManagerSetup { write: true, rate: 10_000, ..ManagerSetup::new(Credentials::Community(name.as_bytes().to_vec()), nets) };
    SliceSetup { name: name.into(), views: BTreeMap::from([(0, View::new(parts))]), managers: vec![manager] }
}

/// All below a name.
pub fn subtree(root: &str, write: bool) -> Part {
    Part::Subtree { root: oid(root), except: Vec::new(), write }
}

/// Rows of a table.
pub fn table(entry: &str, rows: &[&[u32]], write: &[u32]) -> Part {
    let rows = rows.iter().map(|row| row.to_vec()).collect();
    Part::Table { entry: oid(entry), columns: None, rows, write: write.iter().copied().collect() }
}

/// A model agent. It answers what it has, and takes every value for what it has.
#[derive(Debug, Clone, Default)]
pub struct Tree {
    pub objects: BTreeMap<Oid, Value>,
    /// Requests that it carried out.
    pub requests: usize,
    /// The error with which it answers requests to set.
    pub refuses: Option<(ErrorStatus, i32)>,
    /// The most variables of an answer; more is tooBig.
    pub room: usize,
}

impl Tree {
    /// An agent with these objects.
    pub fn new(objects: impl IntoIterator<Item = (Oid, Value)>) -> Self {
        Self { objects: objects.into_iter().collect(), room: usize::MAX, ..Self::default() }
    }

    /// Answers a request.
    pub fn answer(&mut self, request: &Pdu) -> Pdu {
        self.requests += 1;
        let (mut bindings, next) = (Vec::new(), |name: &Oid| {
            use std::ops::Bound::{Excluded, Unbounded};
            self.objects.range((Excluded(name.clone()), Unbounded)).next()
        });
        let after = |name: &Oid| match next(name) {
            Some((name, value)) => VarBind::new(name.clone(), value.clone()),
            None => VarBind::new(name.clone(), Value::EndOfMibView),
        };
        match request.kind {
            PduKind::Get => bindings.extend(request.bindings.iter().map(|one| {
                let value = self.objects.get(&one.name).cloned().unwrap_or(Value::NoSuchObject);
                VarBind::new(one.name.clone(), value)
            })),
            PduKind::GetNext => bindings.extend(request.bindings.iter().map(|one| after(&one.name))),
            PduKind::GetBulk => {
                let mut cursors: Vec<Oid> = request.bindings.iter().map(|one| one.name.clone()).collect();
                for _ in 0..request.index {
                    for cursor in &mut cursors {
                        let found = after(cursor);
                        *cursor = found.name.clone();
                        bindings.push(found);
                    }
                }
            }
            PduKind::Set => match self.refuses {
                Some((status, index)) => {
                    return Pdu { status: status.number(), index, ..response(request, request.bindings.clone()) };
                }
                None => {
                    for one in &request.bindings {
                        self.objects.insert(one.name.clone(), one.value.clone());
                    }
                    bindings.clone_from(&request.bindings);
                }
            },
            _ => panic!("an agent does not expect {request:?}"),
        }
        if bindings.len() > self.room {
            return Pdu { status: ErrorStatus::TooBig.number(), ..response(request, Vec::new()) };
        }
        response(request, bindings)
    }
}

/// A response without an error.
pub fn response(request: &Pdu, bindings: Vec<VarBind>) -> Pdu {
    Pdu::new(PduKind::Response, request.request_id, bindings)
}

/// A slicer and the agents of its devices, which take the community `agent`.
pub struct World {
    pub now: Time,
    pub slicer: Slicer,
    pub agents: Vec<Tree>,
    /// What the slicer stored last.
    pub stored: Option<String>,
    /// Whether it can be stored.
    pub disk: bool,
    pub events: Vec<Event>,
    last: i32,
}

impl World {
    /// A slicer with this setup.
    pub fn new(setup: Setup, agents: Vec<Tree>) -> Self {
        let slicer = Slicer::new(Time::ZERO, &identity(1), setup);
        Self { now: Time::ZERO, slicer, agents, stored: None, disk: true, events: Vec::new(), last: 0 }
    }

    /// Sends a request of a manager, and returns the answer, if there is one before time passes.
    pub fn ask(&mut self, community: &str, mut pdu: Pdu) -> Option<Pdu> {
        self.last += 1;
        pdu.request_id = self.last;
        let bytes = Message::encode_community(community.as_bytes(), &pdu);
        self.slicer.receive_request(self.now, 0, manager_address(), &bytes);
        let mut answers = self.run();
        assert!(answers.len() <= 1, "{answers:?}");
        let Message::Community { community: own, pdu: answer } = Message::decode(&answers.pop()?).unwrap() else { panic!() };
        assert_eq!((own, answer.kind, answer.request_id), (community.as_bytes().to_vec(), PduKind::Response, self.last));
        Some(answer)
    }

    /// Reads one name.
    pub fn get(&mut self, community: &str, name: &str) -> Value {
        let mut answer = self.ask(community, Pdu::asking(PduKind::Get, [oid(name)])).unwrap();
        assert_eq!(answer.status, 0);
        answer.bindings.remove(0).value
    }

    /// Sets variables, and returns the error and its place.
    pub fn set(&mut self, community: &str, values: &[(&str, Value)]) -> (ErrorStatus, i32) {
        let bindings = values.iter().map(|(name, value)| VarBind::new(oid(name), value.clone())).collect();
        let answer = self.ask(community, Pdu::new(PduKind::Set, 0, bindings)).unwrap();
        (ErrorStatus::of(answer.status).unwrap(), answer.index)
    }

    /// Walks over all that a manager sees.
    pub fn walk(&mut self, community: &str) -> Vec<(Oid, Value)> {
        let (mut at, mut all) = (oid("0.0"), Vec::new());
        loop {
            let mut answer = self.ask(community, Pdu::asking(PduKind::GetNext, [at.clone()])).unwrap();
            assert_eq!(answer.status, 0, "{answer:?}");
            let VarBind { name, value } = answer.bindings.remove(0);
            if value == Value::EndOfMibView {
                assert_eq!(name, at);
                return all;
            }
            assert!(name > at, "{name} after {at}");
            at = name.clone();
            all.push((name, value));
        }
    }

    /// Carries out what the slicer gives out, until nothing is left. Returns what goes to managers.
    pub fn run(&mut self) -> Vec<Vec<u8>> {
        let mut answers = Vec::new();
        while let Some(output) = self.slicer.poll_output() {
            match output {
                Output::ToManager { bytes, .. } | Output::ToNotifier { bytes, .. } => answers.push(bytes),
                Output::ToAgent { device, bytes } => {
                    let Message::Community { community, pdu } = Message::decode(&bytes).unwrap() else { panic!() };
                    assert_eq!(community, b"agent");
                    let Some(agent) = self.agents.get_mut(device) else { continue };
                    let answer = Message::encode_community(&community, &agent.answer(&pdu));
                    self.slicer.receive_answer(self.now, device, &answer);
                }
                Output::Store { job, text } => {
                    if self.disk {
                        self.stored = Some(text);
                    }
                    self.slicer.stored(self.now, job, self.disk);
                }
            }
        }
        while let Some(event) = self.slicer.poll_event() {
            self.events.push(event);
        }
        answers
    }

    /// Lets time pass until the slicer wants nothing, but no longer than so long.
    pub fn pass(&mut self, time: Duration) -> Vec<Vec<u8>> {
        let (end, mut answers) = (self.now + time, Vec::new());
        while let Some(due) = self.slicer.poll_timeout().filter(|due| *due <= end) {
            self.now = due.max(self.now);
            self.slicer.handle_timeout(self.now);
            answers.extend(self.run());
        }
        self.now = end;
        answers
    }
}
