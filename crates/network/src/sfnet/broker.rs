//! Sessions of programs, their leases, quotas and rights.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use braid_model::{Mac, Time};
use serde_json::Value;

use super::service::{Action, Context, Happening, Lease, LeaseId, Service};
use super::settings::Settings;
use super::state;
use super::wire::{Ask, Say};
use crate::controller::{Controller, Event, MAX_APART, Request, RequestError};
use crate::discovery::VERSION;
use crate::ids::{BlockSpec, FlowId, FlowSpec, GroupSpec};
use crate::reservation::Reservation;

/// A connection of a program. The caller numbers them; a number is not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// For whom the requests of a connection count.
///
/// With an address, they count for the host that the network knows by it: packets that the network delivers for this address reach the program's host. That does not say which
/// program or user it is, nor that the host came by the address honestly: without authentication of ports, a host that claims the address of another (ARP) gets its packets, and counts
/// for it. A key proves the host that the operator gave it to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The connection comes from this address.
    Address(IpAddr),
    /// The program has proven the key of this host.
    Key(Mac),
}

/// What to do with a connection.
#[derive(Debug, Clone, PartialEq)]
pub enum Out {
    /// Write this.
    Say(Say),
    /// Close it, once all is written.
    Close,
}

#[derive(Debug)]
struct Session {
    host: Mac,
    proof: Proof,
    leases: BTreeSet<LeaseId>,
    /// Lines that were not understood.
    malformed: u32,
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    service: &'static str,
    /// `None`: its connection has ended.
    session: Option<SessionId>,
    keep: Duration,
    /// When it ends, if its connection has ended.
    until: Option<Time>,
}

/// Requests of a host in the second that began at `since`.
#[derive(Debug, Clone, Copy)]
struct Asked {
    since: Time,
    count: u32,
}

/// An answer that waits for the switches.
#[derive(Debug)]
struct Waiting {
    until: Time,
    session: SessionId,
    lease: LeaseId,
    say: Say,
}

/// Time in which switches do what a service needs; after it, the program is not kept waiting.
const SETTLE: Duration = Duration::from_secs(2);
/// Lines of a connection that are not understood, after which it is closed.
const MAX_MALFORMED: u32 = 16;
/// Hosts whose requests are counted before those of seconds that are over are forgotten.
const MAX_ASKED: usize = 1024;
/// First number of flows that programs chose: those of operators are small.
const FIRST_FLOW: u32 = 0x4000_0000;
/// Groups of programs have the numbers of their addresses, so that a controller that was started again finds their entries in place.
const GROUPS_V4: u32 = 0x4000_0000;
const GROUPS_V6: u32 = 0x8000_0000;

/// The controller's side of the network that programs can ask.
///
/// The caller passes on connections, lines, and what the controller reports, and takes what is to be written with [`Self::poll_output`] after every input. [`Self::poll_timeout`] covers
/// what is due without input, and what waits for the controller is looked at with every input.
#[derive(Debug, Default)]
pub struct Sfnet {
    settings: Settings,
    services: BTreeMap<&'static str, Box<dyn Service>>,
    sessions: BTreeMap<SessionId, Session>,
    leases: BTreeMap<LeaseId, Held>,
    asked: BTreeMap<Mac, Asked>,
    last: u64,
    groups: BTreeMap<FlowId, IpAddr>,
    spreads: BTreeMap<LeaseId, FlowId>,
    blocks: BTreeMap<BlockSpec, FlowId>,
    waiting: VecDeque<Waiting>,
    out: VecDeque<(SessionId, Out)>,
}

impl Sfnet {
    /// Without services.
    pub fn new(settings: Settings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Adds a service, or replaces the one of the same name that nobody has asked for yet.
    pub fn add_service(&mut self, service: Box<dyn Service>) {
        self.services.insert(service.name(), service);
    }

    /// Other rights come into force. What is not allowed any more ends.
    pub fn configure(&mut self, now: Time, controller: &mut Controller, settings: Settings) {
        self.settings = settings;
        let barred: Vec<SessionId> =
            self.sessions.iter().filter(|(_, session)| !self.settings.admits(session.host)).map(|(id, _)| *id).collect();
        barred.into_iter().for_each(|id| self.close(now, controller, id, "the controller's configuration bars this host"));
        let ended: Vec<LeaseId> = self
            .leases
            .iter()
            .filter(|(_, held)| !self.settings.offers(held.service) || !self.settings.admits(held.lease.host))
            .map(|(id, _)| *id)
            .collect();
        ended
            .into_iter()
            .for_each(|id| self.end_lease(now, controller, id, None, "the controller's configuration does not offer it any more"));
        self.advance(now, controller);
    }

    /// A program has connected. If it is not served, it is told why, and the connection is closed.
    pub fn opened(&mut self, now: Time, controller: &mut Controller, id: SessionId, proof: Proof) {
        match self.admit(controller, proof) {
            Ok(host) => {
                let services = self.services.keys().filter(|name| self.settings.offers(name)).map(|name| (*name).to_owned()).collect();
                self.say(id, Say::Welcome { version: VERSION, host: host.to_string(), services });
                self.sessions.insert(id, Session { host, proof, leases: BTreeSet::new(), malformed: 0 });
            }
            Err(reason) => {
                self.say(id, Say::Bye { reason });
                self.out.push_back((id, Out::Close));
            }
        }
        self.advance(now, controller);
    }

    fn admit(&self, controller: &Controller, proof: Proof) -> Result<Mac, String> {
        let host = match proof {
            Proof::Key(host) => host,
            Proof::Address(address) => controller.host_of(address).ok_or_else(|| {
                format!(
                    "{address} is no address of a host that the network has seen: ask for the controller at {} first, or send another packet that \
                     shows the address (ARP, DHCP, neighbour discovery)",
                    super::DISCOVERY
                )
            })?,
        };
        if !self.settings.admits(host) {
            return Err(format!("the controller's configuration bars {host}"));
        }
        if self.sessions.values().filter(|session| session.host == host).count() >= self.settings.quotas.sessions {
            return Err(format!("{host} has {} connections already: end one", self.settings.quotas.sessions));
        }
        Ok(host)
    }

    /// A connection has ended. What its program asked for goes, at once or after the time that the program chose.
    pub fn closed(&mut self, now: Time, controller: &mut Controller, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.waiting.retain(|waiting| waiting.session != id);
        for lease in session.leases {
            let Some(held) = self.leases.get_mut(&lease) else { continue };
            (held.session, held.until) = (None, Some(now + held.keep));
            if held.keep == Duration::ZERO {
                self.end_lease(now, controller, lease, None, "");
            }
        }
        self.advance(now, controller);
    }

    /// A program has sent a line, without its end.
    pub fn line(&mut self, now: Time, controller: &mut Controller, id: SessionId, text: &str) {
        let Some((host, proof)) = self.sessions.get(&id).map(|session| (session.host, session.proof)) else { return };
        // A host that is being plugged in elsewhere is not known for a moment. If it is gone, its connection ends.
        if let Proof::Address(address) = proof
            && controller.host_of(address).is_some_and(|owner| owner != host)
        {
            let reason = format!("{address} is not the address of {host} any more: connect again");
            self.close(now, controller, id, &reason);
            return self.advance(now, controller);
        }
        let ask = match Ask::read(text) {
            Ok(ask) => ask,
            Err((number, reason)) => {
                self.say(id, Say::refused(number, &reason));
                let malformed = self.sessions.get_mut(&id).map_or(0, |session| {
                    session.malformed += 1;
                    session.malformed
                });
                if malformed >= MAX_MALFORMED {
                    self.close(
                        now,
                        controller,
                        id,
                        "it sends lines that are none of the protocol: read the handbook's chapter on the network",
                    );
                }
                return self.advance(now, controller);
            }
        };
        let answer = if self.may_ask(now, host) {
            self.answer(now, controller, id, host, &ask)
        } else {
            Err(format!("this host asks more than {} times a second: wait", self.settings.quotas.requests))
        };
        match answer {
            Ok(Some(say)) => self.say(id, say),
            Ok(None) => {}
            Err(reason) => self.say(id, Say::refused(Some(ask.id()), &reason)),
        }
        self.advance(now, controller);
    }

    fn may_ask(&mut self, now: Time, host: Mac) -> bool {
        let asked = self.asked.entry(host).or_insert(Asked { since: now, count: 0 });
        if now.since(asked.since) >= Duration::from_secs(1) {
            *asked = Asked { since: now, count: 0 };
        }
        asked.count = asked.count.saturating_add(1);
        let may = asked.count <= self.settings.quotas.requests;
        // Seconds that are over say nothing any more.
        if self.asked.len() > MAX_ASKED {
            self.asked.retain(|_, asked| now.since(asked.since) < Duration::from_secs(1));
        }
        may
    }

    fn answer(&mut self, now: Time, controller: &mut Controller, id: SessionId, host: Mac, ask: &Ask) -> Result<Option<Say>, String> {
        let context = Context { now, network: controller, rights: &self.settings };
        match ask {
            Ask::State { id, to } => {
                let to = to.as_ref().map(|to| context.host(to)).transpose()?;
                Ok(Some(Say::State { id: *id, state: state::state(&context, host, to) }))
            }
            Ask::Start { id: number, service, with, keep, host: claimed } => {
                if let Some(claimed) = claimed
                    && context.host(claimed)? != host
                {
                    return Err(format!("requests of this connection count for {host} only: let a program there ask"));
                }
                let keep = Duration::from_secs((*keep).into());
                let (lease, result) = self.start(now, controller, (id, host), service, with, keep)?;
                let say = Say::Started { id: *number, lease: lease.0, result };
                self.waiting.push_back(Waiting { until: now + SETTLE, session: id, lease, say });
                Ok(None)
            }
            Ask::End { id: number, lease } => {
                let lease = LeaseId(*lease);
                let is_own = self.sessions.get(&id).is_some_and(|session| session.leases.contains(&lease));
                if !is_own {
                    return Err(format!("this connection has no lease {}", lease.0));
                }
                self.end_lease(now, controller, lease, Some(*number), "the program has ended it");
                Ok(None)
            }
        }
    }

    fn start(
        &mut self,
        now: Time,
        controller: &mut Controller,
        (id, host): (SessionId, Mac),
        name: &str,
        with: &Value,
        keep: Duration,
    ) -> Result<(LeaseId, Value), String> {
        let quotas = self.settings.quotas;
        let shown: String = name.chars().take(64).collect();
        let offered = self.services.iter_mut().find(|(known, _)| **known == name && self.settings.offers(known));
        let Some((name, service)) = offered else {
            return Err(format!("the controller offers no service {shown:?}: its welcome lists those that it offers"));
        };
        let name = *name;
        if keep > quotas.keep {
            return Err(format!("{name}: keep is at most {} s", quotas.keep.as_secs()));
        }
        let count = |of: &dyn Fn(&Held) -> bool| self.leases.values().filter(|held| of(held)).count();
        let (of_session, of_host) = (count(&|held| held.session == Some(id)), count(&|held| held.lease.host == host));
        for (has, most, whose) in [
            (of_session, quotas.leases_of_session, "this connection has"),
            (of_host, quotas.leases_of_host, "this host has"),
            (self.leases.len(), quotas.leases, "all programs together have"),
        ] {
            if has >= most {
                return Err(format!("{name}: {whose} {most} leases already: end one"));
            }
        }
        self.last += 1;
        let lease = Lease { id: LeaseId(self.last), host };
        let mut actions = Vec::new();
        let context = Context { now, network: controller, rights: &self.settings };
        let result = service.start(&context, lease, with, &mut actions).map_err(|reason| format!("{name}: {reason}"))?;
        self.leases.insert(lease.id, Held { lease, service: name, session: Some(id), keep, until: None });
        if let Some(session) = self.sessions.get_mut(&id) {
            session.leases.insert(lease.id);
        }
        if let Err(reason) = self.perform(now, controller, actions) {
            self.end_lease(now, controller, lease.id, None, "");
            return Err(format!("{name}: {reason}"));
        }
        Ok((lease.id, result))
    }

    /// Ends a lease. Its program is told, if there is a reason and it has not asked for it.
    fn end_lease(&mut self, now: Time, controller: &mut Controller, id: LeaseId, number: Option<u64>, reason: &str) {
        let Some(Held { lease, service, session, .. }) = self.leases.remove(&id) else { return };
        if let Some(own) = session.and_then(|session| self.sessions.get_mut(&session)) {
            own.leases.remove(&id);
        }
        let mut actions = Vec::new();
        let context = Context { now, network: controller, rights: &self.settings };
        if let Some(service) = self.services.get_mut(service) {
            service.end(&context, lease, &mut actions);
        }
        // What ends cannot fail, but for what is gone already.
        for action in actions {
            let _ = self.perform(now, controller, vec![action]);
        }
        if let Some(session) = session.filter(|_| !reason.is_empty()) {
            // Behind what was still to be said of it.
            let (kept, of_lease) = std::mem::take(&mut self.waiting).into_iter().partition(|waiting| waiting.lease != id);
            let of_lease: VecDeque<Waiting> = of_lease;
            self.waiting = kept;
            of_lease.into_iter().for_each(|waiting| self.say(waiting.session, waiting.say));
            self.say(session, Say::Ended { id: number, lease: id.0, reason: reason.to_owned() });
        }
    }

    /// Lets the controller do what a service wants, up to the first action that it refuses.
    fn perform(&mut self, now: Time, controller: &mut Controller, actions: Vec<Action>) -> Result<(), String> {
        for action in actions {
            let done = match action {
                Action::Group { address, members } => self.group(now, controller, address, members),
                Action::Spread { lease, flows } => self.spread(now, controller, lease, flows),
                Action::Block { spec, blocked } => self.block(now, controller, spec, blocked),
                Action::Reserve { host, rates } => controller.request(now, Request::ReserveForPrograms { host, rates }),
                Action::Report { lease, event } => {
                    self.report(lease, event);
                    Ok(())
                }
                Action::End { lease, reason } => {
                    self.end_lease(now, controller, lease, None, &reason);
                    Ok(())
                }
            };
            done.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn report(&mut self, lease: LeaseId, event: Value) {
        let Some(session) = self.leases.get(&lease).and_then(|held| held.session) else { return };
        let say = Say::Event { lease: lease.0, event };
        match self.waiting.iter().find(|waiting| waiting.lease == lease).map(|waiting| waiting.until) {
            // It begins with the answer.
            Some(until) => self.waiting.push_back(Waiting { until, session, lease, say }),
            None => self.say(session, say),
        }
    }

    fn group(&mut self, now: Time, controller: &mut Controller, address: IpAddr, members: Vec<Mac>) -> Result<(), RequestError> {
        let id = group_id(address);
        if self.groups.get(&id).is_some_and(|other| *other != address) {
            return Err(RequestError::Overlap(id));
        }
        if members.is_empty() {
            return match self.groups.remove(&id) {
                Some(_) => controller.request(now, Request::RemoveGroup(id)),
                None => Ok(()),
            };
        }
        controller.request(now, Request::SetGroup { id, spec: GroupSpec { address, members } })?;
        self.groups.insert(id, address);
        Ok(())
    }

    fn spread(&mut self, now: Time, controller: &mut Controller, lease: LeaseId, flows: Vec<FlowSpec>) -> Result<(), RequestError> {
        if flows.is_empty() {
            return match self.spreads.remove(&lease) {
                Some(id) => controller.request(now, Request::SetSpread { id, flows }),
                None => Ok(()),
            };
        }
        let taken: BTreeSet<FlowId> = self.spreads.values().copied().collect();
        let free = || (0..).map(|slot| FlowId(FIRST_FLOW + slot * MAX_APART as u32)).find(|id| !taken.contains(id));
        let Some(id) = self.spreads.get(&lease).copied().or_else(free) else {
            return Err(RequestError::Invalid("there are too many flows"));
        };
        controller.request(now, Request::SetSpread { id, flows })?;
        self.spreads.insert(lease, id);
        Ok(())
    }

    fn block(&mut self, now: Time, controller: &mut Controller, spec: BlockSpec, blocked: bool) -> Result<(), RequestError> {
        if !blocked {
            return match self.blocks.remove(&spec) {
                Some(id) => controller.request(now, Request::SetBlock { id, spec: None }),
                None => Ok(()),
            };
        }
        let taken: BTreeSet<FlowId> = self.blocks.values().copied().collect();
        let Some(id) = (1..).map(FlowId).find(|id| !taken.contains(id)) else {
            return Err(RequestError::Invalid("there are too many blocks"));
        };
        controller.request(now, Request::SetBlock { id, spec: Some(spec) })?;
        self.blocks.insert(spec, id);
        Ok(())
    }

    /// The controller reports an event.
    pub fn event(&mut self, now: Time, controller: &mut Controller, event: &Event) {
        self.happens(now, controller, Happening::Event(event));
    }

    /// The controller has measured loads, or some time has passed since it last did.
    pub fn measured(&mut self, now: Time, controller: &mut Controller) {
        self.happens(now, controller, Happening::Measured);
    }

    /// The reservation of a host has changed.
    pub fn reserved(&mut self, now: Time, controller: &mut Controller, host: Mac, reservation: &Reservation) {
        self.happens(now, controller, Happening::Reserved(host, reservation));
    }

    fn happens(&mut self, now: Time, controller: &mut Controller, happening: Happening<'_>) {
        if !self.leases.is_empty() {
            let mut actions = Vec::new();
            let context = Context { now, network: controller, rights: &self.settings };
            self.services.values_mut().for_each(|service| service.handle(&context, happening, &mut actions));
            for action in actions {
                // Nobody waits for an answer: a service that cannot do without it ends its leases.
                let _ = self.perform(now, controller, vec![action]);
            }
        }
        self.advance(now, controller);
    }

    fn say(&mut self, id: SessionId, say: Say) {
        self.out.push_back((id, Out::Say(say)));
    }

    /// Closes a connection from this side.
    fn close(&mut self, now: Time, controller: &mut Controller, id: SessionId, reason: &str) {
        self.say(id, Say::Bye { reason: reason.to_owned() });
        self.out.push_back((id, Out::Close));
        self.closed(now, controller, id);
    }

    /// Gives the answers that waited for switches. The caller calls this after every input of the controller.
    pub fn advance(&mut self, now: Time, controller: &Controller) {
        let is_settled = controller.is_settled();
        while self.waiting.front().is_some_and(|waiting| is_settled || waiting.until <= now) {
            if let Some(Waiting { session, say, .. }) = self.waiting.pop_front() {
                self.say(session, say);
            }
        }
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Time> {
        let leases = self.leases.values().filter_map(|held| held.until);
        leases.chain(self.waiting.front().map(|waiting| waiting.until)).min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time, controller: &mut Controller) {
        let ended: Vec<LeaseId> =
            self.leases.iter().filter(|(_, held)| held.until.is_some_and(|until| until <= now)).map(|(id, _)| *id).collect();
        ended.into_iter().for_each(|id| self.end_lease(now, controller, id, None, ""));
        self.advance(now, controller);
    }

    /// The next thing to do with a connection.
    pub fn poll_output(&mut self) -> Option<(SessionId, Out)> {
        self.out.pop_front()
    }

    /// Connections, and leases.
    pub fn counts(&self) -> (usize, usize) {
        (self.sessions.len(), self.leases.len())
    }
}

fn group_id(address: IpAddr) -> FlowId {
    FlowId(match address {
        IpAddr::V4(v4) => GROUPS_V4 | (u32::from(v4) & 0x7f_ffff),
        IpAddr::V6(v6) => GROUPS_V6 | (u128::from(v6) as u32 & (GROUPS_V6 - 1)),
    })
}
