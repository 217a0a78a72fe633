//! This program as the manager of one agent: requests, answers, time-outs, and the agent's engine and clock (RFC 3414 sections 2.3, 3.2 and 4).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use braid_model::Time;
use subtle::ConstantTimeEq;

use crate::credentials::Credentials;
use crate::engine::Complaint;
use crate::message::{Level, MAX_MESSAGE, Message, ScopedData, ScopedPdu, Secured, SecurityParameters};
use crate::pdu::{Pdu, PduKind};
use crate::random::Random;
use crate::usm::{LocalKeys, UserKeys, WINDOW};

/// Most requests that wait for one agent.
pub(crate) const MOST_WAITING: usize = 256;

/// What an agent sent.
#[derive(Debug)]
pub(crate) enum Received {
    /// The answer to a request of this job.
    Answer(u64, Pdu),
    /// The agent does not take the request of this job.
    Refused(u64, &'static str),
    /// A trap, or an inform, which must be answered.
    Notification(Pdu),
    /// Nothing that counts, for this reason.
    Ignored(&'static str),
    /// What only the agent's state needs, or a late answer.
    Nothing,
}

/// An agent.
#[derive(Debug)]
pub(crate) struct Agent {
    credentials: Credentials,
    timeout: Duration,
    retries: u32,
    remote: Option<Remote>,
    discovery: Option<Discovery>,
    /// By request id.
    waiting: BTreeMap<i32, Waiting>,
    output: VecDeque<Vec<u8>>,
}

/// The agent's engine.
struct Remote {
    engine: Vec<u8>,
    keys: LocalKeys,
    boots: u32,
    /// Its time, and when that was so.
    time: u32,
    at: Time,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Remote").field("boots", &self.boots).field("time", &self.time).finish_non_exhaustive()
    }
}

/// A request by which the agent's engine is found.
#[derive(Debug)]
struct Discovery {
    id: i32,
    due: Time,
}

#[derive(Debug)]
struct Waiting {
    job: u64,
    pdu: Pdu,
    /// The numbers of its messages (SNMPv3).
    messages: Vec<i32>,
    due: Time,
    left: u32,
    /// Whether it was sent again because the clocks differed.
    corrected: bool,
}

impl Agent {
    pub(crate) fn new(credentials: Credentials, timeout: Duration, retries: u32) -> Self {
        let (waiting, output) = (BTreeMap::new(), VecDeque::new());
        Self { credentials, timeout, retries, remote: None, discovery: None, waiting, output }
    }

    /// Sends a request. A request to set is sent once, because the agent may have carried it out although its answer is missing. `false`: too many wait.
    pub(crate) fn send(&mut self, now: Time, random: &mut Random, job: u64, mut pdu: Pdu) -> bool {
        if self.waiting.len() >= MOST_WAITING {
            return false;
        }
        let mut id = random.id();
        while self.waiting.contains_key(&id) {
            id = random.id();
        }
        pdu.request_id = id;
        let (wait, left) = match pdu.kind {
            PduKind::Set => (self.timeout * (1 + self.retries), 0),
            _ => (self.timeout, self.retries),
        };
        self.waiting.insert(id, Waiting { job, pdu, messages: Vec::new(), due: now + wait, left, corrected: false });
        self.transmit(now, random, id);
        true
    }

    /// The requests of this job do not count any more.
    pub(crate) fn forget(&mut self, job: u64) {
        self.waiting.retain(|_, waiting| waiting.job != job);
    }

    fn transmit(&mut self, now: Time, random: &mut Random, id: i32) {
        let Some(waiting) = self.waiting.get_mut(&id) else { return };
        match (&self.credentials, &self.remote) {
            (Credentials::Community(community), _) => self.output.push_back(Message::encode_community(community, &waiting.pdu)),
            (Credentials::User { name, keys }, Some(remote)) => {
                let number = random.id();
                waiting.messages.push(number);
                let time = remote.time_at(now);
                let security = SecurityParameters {
                    engine: remote.engine.clone(),
                    boots: remote.boots,
                    time,
                    user: name.clone(),
                    ..Default::default()
                };
                let scoped = ScopedPdu { engine: remote.engine.clone(), name: Vec::new(), pdu: waiting.pdu.clone() };
                let message = secured(number, keys.level(), security, ScopedData::Plain(scoped));
                self.output.push_back(remote.keys.protect(message, random.word()));
            }
            (Credentials::User { .. }, None) => self.discover(now, random),
        }
    }

    fn discover(&mut self, now: Time, random: &mut Random) {
        if self.discovery.as_ref().is_some_and(|discovery| discovery.due > now) {
            return;
        }
        let id = self.discovery.as_ref().map_or_else(|| random.id(), |discovery| discovery.id);
        let scoped = ScopedPdu { engine: Vec::new(), name: Vec::new(), pdu: Pdu::new(PduKind::Get, id, Vec::new()) };
        let message = secured(id, Level::Plain, SecurityParameters::default(), ScopedData::Plain(scoped));
        self.output.push_back(message.encode().0);
        self.discovery = Some(Discovery { id, due: now + self.timeout });
    }

    pub(crate) fn poll_output(&mut self) -> Option<Vec<u8>> {
        self.output.pop_front()
    }

    pub(crate) fn poll_timeout(&self) -> Option<Time> {
        let discovery = self.discovery.as_ref().filter(|_| !self.waiting.is_empty()).map(|discovery| discovery.due);
        self.waiting.values().map(|waiting| waiting.due).chain(discovery).min()
    }

    /// Sends again what was not answered in time. Returns the jobs whose requests have been sent often enough.
    pub(crate) fn handle_timeout(&mut self, now: Time, random: &mut Random) -> Vec<u64> {
        let due: Vec<i32> = self.waiting.iter().filter(|(_, waiting)| waiting.due <= now).map(|(id, _)| *id).collect();
        let mut expired = Vec::new();
        for id in due {
            let Some(waiting) = self.waiting.get_mut(&id) else { continue };
            if waiting.left == 0 {
                expired.extend(self.waiting.remove(&id).map(|waiting| waiting.job));
                // An agent that has lost its number of starts has an old clock, whose messages are not taken: it is asked for it anew.
                self.remote = None;
                continue;
            }
            (waiting.left, waiting.due) = (waiting.left - 1, now + self.timeout);
            self.transmit(now, random, id);
        }
        if self.waiting.is_empty() {
            self.discovery = None;
        } else if self.discovery.as_ref().is_some_and(|discovery| discovery.due <= now) {
            self.discover(now, random);
        }
        expired
    }

    /// Takes a datagram of the agent.
    pub(crate) fn receive(&mut self, now: Time, random: &mut Random, bytes: &[u8]) -> Received {
        match (Message::decode(bytes), &self.credentials) {
            (Err(malformed), _) => Received::Ignored(malformed.what),
            (Ok(Message::Community { community, pdu }), Credentials::Community(own)) if bool::from(community[..].ct_eq(own)) => {
                match pdu.kind {
                    PduKind::Response => match self.waiting.remove(&pdu.request_id) {
                        Some(waiting) => Received::Answer(waiting.job, pdu),
                        None => Received::Nothing,
                    },
                    PduKind::Trap | PduKind::Inform => Received::Notification(pdu),
                    _ => Received::Ignored("neither an answer nor a notification"),
                }
            }
            (Ok(Message::Secured(message)), Credentials::User { keys, .. }) => {
                let keys = keys.clone();
                self.receive_secured(now, random, &keys, &message, bytes)
            }
            (Ok(_), _) => Received::Ignored("a message with another community or version than the agent's"),
        }
    }

    fn receive_secured(&mut self, now: Time, random: &mut Random, keys: &UserKeys, message: &Secured, bytes: &[u8]) -> Received {
        if message.level == Level::Plain {
            return self.receive_plain(now, random, keys, message);
        }
        let Some(remote) = self.remote.as_mut().filter(|remote| remote.engine == message.security.engine) else {
            // A trap may come before the first request.
            self.discover(now, random);
            return Received::Ignored("a message of an engine that is not known yet");
        };
        if !remote.keys.verify(bytes, &message.digest_at) {
            return Received::Ignored("a message with a wrong digest");
        }
        if !remote.is_timely(now, &message.security) {
            return Received::Ignored("a message of long ago");
        }
        let Ok(Ok(scoped)) = remote.keys.open(message) else { return Received::Ignored("a message that cannot be decrypted") };
        let id = self.waiting.iter().find(|(_, waiting)| waiting.messages.contains(&message.id)).map(|(id, _)| *id);
        match (scoped.pdu.kind, id) {
            (PduKind::Report, Some(id)) => {
                // The clock has just been set.
                if let Some(waiting) =
                    self.waiting.get_mut(&id).filter(|waiting| !waiting.corrected && is(&scoped.pdu, Complaint::TimeWindow))
                {
                    waiting.corrected = true;
                    self.transmit(now, random, id);
                    return Received::Nothing;
                }
                self.refused(id, &scoped.pdu)
            }
            (PduKind::Response, Some(id)) if message.level == keys.level() && scoped.pdu.request_id == id => match self.waiting.remove(&id)
            {
                Some(waiting) => Received::Answer(waiting.job, scoped.pdu),
                None => Received::Nothing,
            },
            (PduKind::Trap, _) if message.level == keys.level() => Received::Notification(scoped.pdu),
            _ => Received::Nothing,
        }
    }

    /// Takes a message without authentication, which can only be a report about a message whose number it repeats.
    fn receive_plain(&mut self, now: Time, random: &mut Random, keys: &UserKeys, message: &Secured) -> Received {
        let ScopedData::Plain(scoped) = &message.data else { return Received::Ignored("encrypted without authentication") };
        if scoped.pdu.kind != PduKind::Report {
            return Received::Ignored("a message without authentication");
        }
        let SecurityParameters { engine, boots, time, .. } = &message.security;
        if self.discovery.as_ref().is_some_and(|discovery| discovery.id == message.id) && (5..=32).contains(&engine.len()) {
            self.discovery = None;
            self.remote = Some(Remote { engine: engine.clone(), keys: keys.localise(engine), boots: *boots, time: *time, at: now });
            for id in self.waiting.keys().copied().collect::<Vec<_>>() {
                self.transmit(now, random, id);
            }
            return Received::Nothing;
        }
        let Some(id) = self.waiting.iter().find(|(_, waiting)| waiting.messages.contains(&message.id)).map(|(id, _)| *id) else {
            return Received::Ignored("a report about nothing that was asked");
        };
        if is(&scoped.pdu, Complaint::EngineId) {
            // The agent has another engine than before.
            self.remote = None;
            self.discover(now, random);
            return Received::Nothing;
        }
        self.refused(id, &scoped.pdu)
    }

    fn refused(&mut self, id: i32, report: &Pdu) -> Received {
        const REASONS: [(Complaint, &str); 5] = [
            (Complaint::UserName, "the agent does not have this user (usmStatsUnknownUserNames)"),
            (Complaint::Digest, "the agent's user has another password or authentication (usmStatsWrongDigests)"),
            (Complaint::Decryption, "the agent's user has another password or encryption (usmStatsDecryptionErrors)"),
            (Complaint::SecurityLevel, "the agent's user has another level (usmStatsUnsupportedSecLevels)"),
            (Complaint::TimeWindow, "the agent's clock does not match (usmStatsNotInTimeWindows)"),
        ];
        let reason =
            REASONS.into_iter().find(|(complaint, _)| is(report, *complaint)).map_or("the agent reports an error", |(_, reason)| reason);
        match self.waiting.remove(&id) {
            Some(waiting) => Received::Refused(waiting.job, reason),
            None => Received::Ignored(reason),
        }
    }
}

fn is(report: &Pdu, complaint: Complaint) -> bool {
    report.bindings.first().is_some_and(|binding| binding.name == complaint.counter())
}

fn secured(id: i32, level: Level, security: SecurityParameters, data: ScopedData) -> Secured {
    Secured { id, max_size: MAX_MESSAGE as i32, level, reportable: true, security, digest_at: 0..0, data }
}

impl Remote {
    fn time_at(&self, now: Time) -> u32 {
        self.time.saturating_add(u32::try_from(now.since(self.at).as_secs()).unwrap_or(u32::MAX)).min(i32::MAX as u32)
    }

    /// Whether an authenticated message is no old one; moves the clock forward. Source: RFC 3414 section 3.2, step 7b.
    fn is_timely(&mut self, now: Time, security: &SecurityParameters) -> bool {
        if security.boots > self.boots || (security.boots == self.boots && security.time > self.time) {
            (self.boots, self.time, self.at) = (security.boots, security.time, now);
        }
        security.boots == self.boots && security.time.saturating_add(WINDOW) >= self.time_at(now)
    }
}
