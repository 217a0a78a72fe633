//! The slicer: an agent to managers, and a manager to agents.

mod event;
mod notice;
mod reading;
mod setting;
mod setup;

pub use event::Event;
pub use setup::{DeviceSetup, Identity, Limits, ManagerSetup, Setup, SliceSetup};

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_decide::bucket::Bucket;
use braid_model::{ByteCount, Rate, Time};
use ipnet::IpNet;
use subtle::ConstantTimeEq;

use crate::agent::{Agent, Received};
use crate::credentials::Credentials;
use crate::engine::{Engine, Envelope, Verdict};
use crate::message::{MAX_MESSAGE, Message};
use crate::oid::Oid;
use crate::pdu::{ErrorStatus, Pdu, PduKind, Value, VarBind};
use crate::policy::{Mediator, Names};
use crate::random::Random;
use crate::view::View;
use reading::{Failure, Reading, Sight};
use setting::Setting;

/// Most requests of one slice that wait for one device, so that a device that does not answer does not use up the slice's others.
const MOST_JOBS: usize = 16;
/// Most variables of a request. More are answered with tooBig.
const MOST_BINDINGS: usize = 128;
/// Bytes around a PDU in a message, at most: header, security parameters and context.
const ENVELOPE: usize = 256;
/// Time in which a request is answered, or fails.
const DEADLINE: Duration = Duration::from_secs(20);
/// Reports a second to one address, and most addresses that get any in one second.
const REPORTS: u32 = 20;
const REPORTED: usize = 4096;
/// Events that may wait.
const MOST_EVENTS: usize = 1024;

/// What a slicer gives out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// A datagram to a manager, from the address of a device.
    ToManager {
        /// The device.
        device: usize,
        /// The manager.
        to: SocketAddr,
        /// The datagram.
        bytes: Vec<u8>,
    },
    /// A datagram to the agent of a device.
    ToAgent {
        /// The device.
        device: usize,
        /// The datagram.
        bytes: Vec<u8>,
    },
    /// A datagram to the sender of an inform, from the address where notifications of the device arrive.
    ToNotifier {
        /// The device.
        device: usize,
        /// The sender.
        to: SocketAddr,
        /// The datagram.
        bytes: Vec<u8>,
    },
    /// A text to store in place of the former one. Then call [`Slicer::stored`].
    Store {
        /// The job that waits for it; `None`: none does.
        job: Option<u64>,
        /// The text.
        text: String,
    },
}

/// A slicer.
#[derive(Debug)]
pub struct Slicer {
    engine: Engine,
    random: Random,
    devices: Vec<Device>,
    device_names: Vec<String>,
    slice_names: Vec<String>,
    views: Vec<BTreeMap<usize, View>>,
    managers: Vec<Manager>,
    users: BTreeMap<Vec<u8>, usize>,
    mediator: Mediator,
    limits: Limits,
    jobs: BTreeMap<u64, Job>,
    last_job: u64,
    /// By slice and device.
    busy: BTreeMap<(usize, usize), usize>,
    reports: Reports,
    /// The text that was given out last.
    given: String,
    output: VecDeque<Output>,
    events: VecDeque<Event>,
}

#[derive(Debug)]
struct Device {
    agent: Agent,
    /// Requests to set, of which the first one is carried out.
    sets: VecDeque<u64>,
}

#[derive(Debug)]
struct Manager {
    slice: usize,
    credentials: Credentials,
    from: Vec<IpNet>,
    write: bool,
    bucket: Bucket,
    notify: Option<SocketAddr>,
}

impl Manager {
    fn may_ask_from(&self, from: IpAddr) -> bool {
        let from = from.to_canonical();
        self.from.iter().any(|net| net.contains(&from))
    }
}

/// A manager's request.
#[derive(Debug)]
struct Job {
    device: usize,
    manager: usize,
    slice: usize,
    from: SocketAddr,
    /// `None`: SNMPv2c.
    envelope: Option<Envelope>,
    request: Pdu,
    deadline: Time,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Reading(Reading),
    Setting(Setting),
}

/// Reports of this second.
#[derive(Debug, Default)]
struct Reports {
    second: u64,
    counts: BTreeMap<IpAddr, u32>,
}

impl Reports {
    fn may_send(&mut self, now: Time, to: IpAddr) -> bool {
        let second = now.since(Time::ZERO).as_secs();
        if second != self.second {
            (self.second, self.counts) = (second, BTreeMap::new());
        }
        if self.counts.len() >= REPORTED && !self.counts.contains_key(&to) {
            return false;
        }
        let count = self.counts.entry(to).or_default();
        *count += 1;
        *count <= REPORTS
    }
}

struct SliceSight<'a> {
    view: &'a View,
    mediator: &'a Mediator,
    slice: usize,
    device: usize,
}

impl Sight for SliceSight<'_> {
    fn view(&self) -> &View {
        self.view
    }

    fn overlay(&self, name: &Oid) -> Option<Value> {
        self.mediator.overlay(self.slice, self.device, name)
    }
}

/// An answer that is complete.
type Answer = (ErrorStatus, usize, Vec<VarBind>);

impl Slicer {
    /// A slicer.
    pub fn new(now: Time, identity: &Identity, setup: Setup) -> Self {
        let mut random = Random::new(&identity.seed);
        let mut engine = Engine::new(identity.engine.clone(), identity.boots, now, &mut random);
        let (mut managers, mut users) = (Vec::new(), BTreeMap::new());
        for (slice, one) in setup.slices.iter().enumerate() {
            for manager in &one.managers {
                if let Credentials::User { name, keys } = &manager.credentials {
                    engine.add_user(name, keys);
                    users.insert(name.clone(), managers.len());
                }
                let rate = u64::from(manager.rate);
                managers.push(Manager {
                    slice,
                    credentials: manager.credentials.clone(),
                    from: manager.from.clone(),
                    write: manager.write,
                    // A request counts as a byte.
                    bucket: Bucket::new(Rate::from_bps(8 * rate), ByteCount::new(2 * rate), now),
                    notify: manager.notify,
                });
            }
        }
        let device =
            |one: &DeviceSetup| Device { agent: Agent::new(one.credentials.clone(), one.timeout, one.retries), sets: VecDeque::new() };
        Self {
            engine,
            random,
            devices: setup.devices.iter().map(device).collect(),
            device_names: setup.devices.into_iter().map(|one| one.name).collect(),
            slice_names: setup.slices.iter().map(|one| one.name.clone()).collect(),
            views: setup.slices.into_iter().map(|one| one.views).collect(),
            managers,
            users,
            mediator: Mediator::new(setup.shared),
            limits: setup.limits,
            jobs: BTreeMap::new(),
            last_job: 0,
            busy: BTreeMap::new(),
            reports: Reports::default(),
            given: String::new(),
            output: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// Takes what an earlier slicer stored.
    ///
    /// # Errors
    /// The text is something else; nothing of it counts.
    pub fn restore(&mut self, now: Time, text: &str) -> Result<(), serde_json::Error> {
        self.mediator.restore(now, Names { devices: &self.device_names, slices: &self.slice_names }, text)
    }

    /// The text to store of what slices have asked for, such as after a change of the configuration.
    pub fn to_store(&self) -> String {
        self.mediator.kept(Names { devices: &self.device_names, slices: &self.slice_names })
    }

    /// Takes a datagram that came for a device from a manager.
    pub fn receive_request(&mut self, now: Time, device: usize, from: SocketAddr, bytes: &[u8]) {
        if device >= self.devices.len() {
            return;
        }
        match Message::decode(bytes) {
            Err(error) => {
                let device = self.device_names[device].clone();
                self.event(Event::Malformed { device, from, error });
            }
            Ok(Message::Community { community, pdu }) => {
                let matches = |manager: &Manager| match &manager.credentials {
                    Credentials::Community(own) => bool::from(own[..].ct_eq(&community[..])),
                    Credentials::User { .. } => false,
                };
                match self.managers.iter().position(matches).filter(|place| self.managers[*place].may_ask_from(from.ip())) {
                    Some(manager) => self.request(now, device, manager, from, None, pdu),
                    None => {
                        let device = self.device_names[device].clone();
                        self.event(Event::Stranger { device, from });
                    }
                }
            }
            Ok(Message::Secured(message)) => match self.engine.receive(now, &message, bytes) {
                Verdict::Dropped(why) => {
                    let device = self.device_names[device].clone();
                    self.event(Event::Dropped { device, from, why });
                }
                Verdict::Report(complaint, bytes) => {
                    if self.reports.may_send(now, from.ip()) {
                        self.output.push_back(Output::ToManager { device, to: from, bytes });
                    }
                    let device = self.device_names[device].clone();
                    self.event(Event::Reported { device, from, complaint });
                }
                Verdict::Request(accepted) => match self.users.get(&accepted.user).copied() {
                    Some(manager) if self.managers[manager].may_ask_from(from.ip()) => {
                        self.request(now, device, manager, from, Some(accepted.envelope), accepted.pdu);
                    }
                    _ => {
                        let device = self.device_names[device].clone();
                        self.event(Event::Stranger { device, from });
                    }
                },
            },
        }
    }

    fn request(&mut self, now: Time, device: usize, manager: usize, from: SocketAddr, envelope: Option<Envelope>, request: Pdu) {
        let slice = self.managers[manager].slice;
        let refuse = |why| Event::Flood { slice: self.slice_names[slice].clone(), from, why };
        if !request.kind.is_request() {
            let why = "it is no request; managers only ask";
            return self.event(Event::Dropped { device: self.device_names[device].clone(), from, why });
        }
        let again = |job: &Job| (job.device, job.manager, job.from, job.request.request_id) == (device, manager, from, request.request_id);
        if self.jobs.values().any(again) {
            // A manager that waits asks again.
            return;
        }
        if !self.managers[manager].bucket.take(ByteCount::new(1), now) {
            let event = refuse("more came than its `rate` allows; raise it, or look at the manager");
            return self.event(event);
        }
        if self.busy.get(&(slice, device)).is_some_and(|count| *count >= MOST_JOBS) {
            let event = refuse("too many of the slice wait for this device; look at whether its agent answers");
            return self.event(event);
        }
        let room = envelope.as_ref().map_or(MAX_MESSAGE, |envelope| envelope.max_size).min(self.limits.answer);
        let sight = SliceSight { view: view(&self.views, slice, device), mediator: &self.mediator, slice, device };
        let work = match request.kind {
            PduKind::Set => Work::Setting(Setting::default()),
            // It is answered at once.
            _ if request.bindings.len() > MOST_BINDINGS => Work::Setting(Setting::default()),
            _ => Work::Reading(Reading::new(&request, room, self.limits.repetitions, &sight)),
        };
        let is_set = request.kind == PduKind::Set;
        // The answer to a request to set repeats it. Whether it fits is known before anything is set.
        let is_big = request.bindings.len() > MOST_BINDINGS || (is_set && request.size() + ENVELOPE > room);
        self.last_job += 1;
        let id = self.last_job;
        self.jobs.insert(id, Job { device, manager, slice, from, envelope, request, deadline: now + DEADLINE, work });
        *self.busy.entry((slice, device)).or_default() += 1;
        if is_big {
            self.finish(now, id, (ErrorStatus::TooBig, 0, Vec::new()));
        } else if is_set {
            self.queue_set(now, id);
        } else {
            self.read_on(now, id);
        }
    }

    /// Asks the agent for what is missing, or answers.
    fn read_on(&mut self, now: Time, id: u64) {
        let Some(Job { device, work: Work::Reading(reading), .. }) = self.jobs.get_mut(&id) else { return };
        let device = *device;
        let Some(pdu) = reading.next() else {
            let Some(Job { work, .. }) = self.jobs.get_mut(&id) else { return };
            let Work::Reading(reading) = std::mem::replace(work, Work::Setting(Setting::default())) else { return };
            return self.finish(now, id, (ErrorStatus::NoError, 0, reading.finish()));
        };
        self.ask(now, id, device, pdu);
    }

    /// Sends a request to an agent. If too many wait there, the job fails.
    fn ask(&mut self, now: Time, id: u64, device: usize, pdu: Pdu) {
        if !self.devices[device].agent.send(now, &mut self.random, id, pdu) {
            if let Some(job) = self.jobs.get(&id) {
                let why = "too many requests wait for this device; look at whether its agent answers";
                let event = Event::Flood { slice: self.slice_names[job.slice].clone(), from: job.from, why };
                self.event(event);
            }
            let is_set = matches!(self.jobs.get(&id), Some(Job { work: Work::Setting(_), .. }));
            let status = if is_set { ErrorStatus::ResourceUnavailable } else { ErrorStatus::GenErr };
            self.finish(now, id, (status, 0, Vec::new()));
        }
        self.flush(device);
    }

    fn flush(&mut self, device: usize) {
        while let Some(bytes) = self.devices[device].agent.poll_output() {
            self.output.push_back(Output::ToAgent { device, bytes });
        }
    }

    /// Takes a datagram of a device's agent.
    pub fn receive_answer(&mut self, now: Time, device: usize, bytes: &[u8]) {
        let Some(one) = self.devices.get_mut(device) else { return };
        let received = one.agent.receive(now, &mut self.random, bytes);
        self.flush(device);
        match received {
            Received::Answer(id, pdu) => self.answered(now, id, pdu),
            Received::Refused(id, why) => {
                let device = self.device_names[device].clone();
                self.event(Event::Agent { device, why });
                self.failed(now, id);
            }
            Received::Notification(_) | Received::Nothing => {}
            Received::Ignored(why) => {
                let device = self.device_names[device].clone();
                self.event(Event::Agent { device, why });
            }
        }
    }

    fn answered(&mut self, now: Time, id: u64, pdu: Pdu) {
        let Some(Job { device, slice, deadline, work, .. }) = self.jobs.get_mut(&id) else { return };
        let Work::Reading(reading) = work else { return self.set_answered(now, id, &pdu) };
        let (device, slice, is_late) = (*device, *slice, now > *deadline);
        let sight = SliceSight { view: view(&self.views, slice, device), mediator: &self.mediator, slice, device };
        let failure = match reading.answer(pdu, &sight) {
            Ok(()) if is_late => Failure::Faulty("it takes too long: ask for less at once, or give the slice fewer rows"),
            Ok(()) => return self.read_on(now, id),
            Err(failure) => failure,
        };
        let name = reading.first_name().cloned();
        match failure {
            Failure::Error(status, place) => self.finish(now, id, (status, place, Vec::new())),
            Failure::Faulty(what) => {
                if let Some(name) = name {
                    let event =
                        Event::Faulty { device: self.device_names[device].clone(), slice: self.slice_names[slice].clone(), name, what };
                    self.event(event);
                }
                self.finish(now, id, (ErrorStatus::GenErr, 0, Vec::new()));
            }
        }
    }

    /// The agent does not answer a job's request, or does not take it.
    fn failed(&mut self, now: Time, id: u64) {
        match self.jobs.get(&id) {
            Some(Job { work: Work::Setting(_), .. }) => self.set_failed(now, id),
            Some(_) => self.finish(now, id, (ErrorStatus::GenErr, 0, Vec::new())),
            None => {}
        }
    }

    /// Sends an answer to the manager, and ends the job.
    fn finish(&mut self, now: Time, id: u64, answer: Answer) {
        let Some(job) = self.jobs.remove(&id) else { return };
        if let Some(count) = self.busy.get_mut(&(job.slice, job.device)) {
            *count -= 1;
            if *count == 0 {
                self.busy.remove(&(job.slice, job.device));
            }
        }
        self.devices[job.device].agent.forget(id);
        let (status, place, mut bindings) = answer;
        let repeats = status != ErrorStatus::NoError && status != ErrorStatus::TooBig;
        if repeats {
            bindings.clone_from(&job.request.bindings);
        }
        let room = job.envelope.as_ref().map_or(MAX_MESSAGE, |envelope| envelope.max_size).min(self.limits.answer);
        let mut pdu = Pdu { status: status.number(), index: place as i32, ..Pdu::new(PduKind::Response, job.request.request_id, bindings) };
        let mut bytes = self.encode(now, &job, pdu.clone());
        if bytes.len() > room && job.request.kind == PduKind::GetBulk && status == ErrorStatus::NoError {
            pdu.bindings.truncate(fitting(&pdu.bindings, bytes.len() - room));
            bytes = self.encode(now, &job, pdu.clone());
        }
        if bytes.len() > room
            || (pdu.bindings.is_empty() && status == ErrorStatus::NoError && !job.request.bindings.is_empty() && !job.is_empty_bulk())
        {
            bytes = self.encode(now, &job, Pdu { status: ErrorStatus::TooBig.number(), index: 0, bindings: Vec::new(), ..pdu });
        }
        self.output.push_back(Output::ToManager { device: job.device, to: job.from, bytes });
        self.set_ended(now, job.device, id);
    }

    fn encode(&mut self, now: Time, job: &Job, pdu: Pdu) -> Vec<u8> {
        match (&job.envelope, &self.managers[job.manager].credentials) {
            (Some(envelope), Credentials::User { name, .. }) => {
                let name = name.clone();
                self.engine.encode(now, &name, envelope.id, envelope.level, pdu).unwrap_or_default()
            }
            (_, Credentials::Community(community)) => Message::encode_community(community, &pdu),
            (None, Credentials::User { .. }) => Vec::new(),
        }
    }

    /// When to call [`handle_timeout`](Self::handle_timeout) at the latest.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.devices.iter().filter_map(|device| device.agent.poll_timeout()).min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        for device in 0..self.devices.len() {
            let expired = self.devices[device].agent.handle_timeout(now, &mut self.random);
            self.flush(device);
            for id in expired {
                if let Some(job) = self.jobs.get(&id) {
                    let name = match &job.work {
                        Work::Reading(reading) => reading.first_name().cloned(),
                        Work::Setting(_) => job.request.bindings.first().map(|binding| binding.name.clone()),
                    };
                    if let Some(name) = name {
                        let slice = self.slice_names[job.slice].clone();
                        self.event(Event::Silent { device: self.device_names[device].clone(), slice, name });
                    }
                }
                self.failed(now, id);
            }
        }
    }

    /// What to send or to store next.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.output.pop_front()
    }

    /// What to report next.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn event(&mut self, event: Event) {
        if self.events.len() < MOST_EVENTS {
            self.events.push_back(event);
        }
    }
}

impl Job {
    /// Whether the manager asked for nothing.
    fn is_empty_bulk(&self) -> bool {
        self.request.kind == PduKind::GetBulk && self.request.status <= 0 && self.request.index <= 0
    }
}

/// The view of a slice, which may be empty.
fn view(views: &[BTreeMap<usize, View>], slice: usize, device: usize) -> &View {
    static NOTHING: View = View::nothing();
    views.get(slice).and_then(|views| views.get(&device)).unwrap_or(&NOTHING)
}

/// How many of the variables may stay so that the message has so many bytes less.
fn fitting(bindings: &[VarBind], excess: usize) -> usize {
    let (mut left, mut kept) = (excess, bindings.len());
    for binding in bindings.iter().rev() {
        if left == 0 {
            break;
        }
        let mut bytes = Vec::new();
        binding.encode(&mut bytes);
        left = left.saturating_sub(bytes.len());
        kept -= 1;
    }
    kept
}
