//! This program as an authoritative engine: what managers send to it by SNMPv3 (RFC 3412 section 7.2, RFC 3414 section 3.2).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use braid_model::Time;

use crate::message::{Level, MAX_MESSAGE, ScopedData, ScopedPdu, Secured, SecurityParameters};
use crate::oid::Oid;
use crate::pdu::{Pdu, PduKind, Value, VarBind};
use crate::random::Random;
use crate::usm::{LocalKeys, MOST, UserKeys, WINDOW};

/// For how long a request to set is known again: as long as its time is taken, and a second for its fraction.
const REMEMBERED: Duration = Duration::from_secs(2 * WINDOW as u64 + 1);
/// Most requests to set of a user that are known again. More are dropped until old ones are forgotten.
const MOST_REMEMBERED: usize = 16_384;

/// Counters that reports carry. Source: RFC 3414 section 5, RFC 3412 section 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Complaint {
    /// The user does not have this level.
    SecurityLevel,
    /// The time is outside the window.
    TimeWindow,
    /// There is no such user.
    UserName,
    /// The engine is another one.
    EngineId,
    /// The digest is wrong.
    Digest,
    /// It cannot be decrypted.
    Decryption,
    /// There is no such context.
    Context,
    /// Another engine is meant.
    Handler,
}

impl Complaint {
    /// The name of its counter.
    pub(crate) fn counter(self) -> Oid {
        let usm = |number| Oid::known(&[1, 3, 6, 1, 6, 3, 15, 1, 1, number, 0]);
        match self {
            Self::SecurityLevel => usm(1),
            Self::TimeWindow => usm(2),
            Self::UserName => usm(3),
            Self::EngineId => usm(4),
            Self::Digest => usm(5),
            Self::Decryption => usm(6),
            Self::Context => Oid::known(&[1, 3, 6, 1, 6, 3, 12, 1, 5, 0]),
            Self::Handler => Oid::known(&[1, 3, 6, 1, 6, 3, 11, 2, 1, 3, 0]),
        }
    }
}

/// What the engine makes of a message.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// A user's request.
    Request(Box<Accepted>),
    /// This is the answer, and no more.
    Report(Complaint, Vec<u8>),
    /// No answer.
    Dropped(&'static str),
}

/// A user's request.
#[derive(Debug)]
pub(crate) struct Accepted {
    pub(crate) user: Vec<u8>,
    pub(crate) envelope: Envelope,
    pub(crate) pdu: Pdu,
}

/// What the answer repeats.
#[derive(Debug, Clone)]
pub(crate) struct Envelope {
    pub(crate) id: i32,
    pub(crate) level: Level,
    /// The largest answer that the manager takes, in bytes.
    pub(crate) max_size: usize,
}

struct User {
    keys: LocalKeys,
    level: Level,
    /// Digests of requests to set, and when they came.
    seen: BTreeSet<Vec<u8>>,
    order: VecDeque<(Time, Vec<u8>)>,
}

/// The engine of this program.
pub(crate) struct Engine {
    id: Vec<u8>,
    boots: u32,
    start: Time,
    users: BTreeMap<Vec<u8>, User>,
    counters: BTreeMap<Complaint, u32>,
    salt: u64,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("boots", &self.boots).finish_non_exhaustive()
    }
}

impl Engine {
    pub(crate) fn new(id: Vec<u8>, boots: u32, start: Time, random: &mut Random) -> Self {
        Self { id, boots: boots.min(MOST), start, users: BTreeMap::new(), counters: BTreeMap::new(), salt: random.word() }
    }

    pub(crate) fn add_user(&mut self, name: &[u8], keys: &UserKeys) {
        let user = User { keys: keys.localise(&self.id), level: keys.level(), seen: BTreeSet::new(), order: VecDeque::new() };
        self.users.insert(name.to_vec(), user);
    }

    fn time(&self, now: Time) -> u32 {
        now.since(self.start).as_secs().min(u64::from(MOST)) as u32
    }

    /// Judges a message, in the order of RFC 3414 section 3.2.
    pub(crate) fn receive(&mut self, now: Time, message: &Secured, bytes: &[u8]) -> Verdict {
        let security = &message.security;
        if security.engine != self.id {
            return self.complain(now, message, Complaint::EngineId, Level::Plain);
        }
        let time = self.time(now);
        let Some(user) = self.users.get_mut(&security.user) else {
            return self.complain(now, message, Complaint::UserName, Level::Plain);
        };
        // Also a level below the user's own is refused: who can leave out a lock has none.
        if message.level != user.level {
            return self.complain(now, message, Complaint::SecurityLevel, Level::Plain);
        }
        if !user.keys.verify(bytes, &message.digest_at) {
            return self.complain(now, message, Complaint::Digest, Level::Plain);
        }
        if self.boots == MOST || security.boots != self.boots || security.time.abs_diff(time) > WINDOW {
            return self.complain(now, message, Complaint::TimeWindow, Level::Authenticated);
        }
        let scoped = match user.keys.open(message) {
            Err(_) => return self.complain(now, message, Complaint::Decryption, Level::Authenticated),
            Ok(Err(_)) => return Verdict::Dropped("what it encrypts is no PDU"),
            Ok(Ok(scoped)) => scoped,
        };
        let level = message.level;
        if scoped.engine != self.id {
            return self.complain(now, message, Complaint::Handler, level);
        }
        if !scoped.name.is_empty() {
            return self.complain(now, message, Complaint::Context, level);
        }
        let is_copy =
            scoped.pdu.kind == PduKind::Set && self.users.get_mut(&security.user).is_some_and(|user| !user.is_new(now, &security.digest));
        if is_copy {
            return Verdict::Dropped("it is a copy of an earlier request to set, or too many came");
        }
        let envelope = Envelope { id: message.id, level: message.level, max_size: (message.max_size as usize).min(MAX_MESSAGE) };
        Verdict::Request(Box::new(Accepted { user: security.user.clone(), envelope, pdu: scoped.pdu }))
    }

    /// Encodes a PDU to a user, of which this engine is the authoritative one.
    pub(crate) fn encode(&mut self, now: Time, user: &[u8], id: i32, level: Level, pdu: Pdu) -> Option<Vec<u8>> {
        let message = self.message(now, user.to_vec(), id, level, pdu);
        let salt = self.next_salt();
        self.users.get(user).map(|user| user.keys.protect(message, salt))
    }

    fn next_salt(&mut self) -> u64 {
        self.salt = self.salt.wrapping_add(1);
        self.salt
    }

    fn message(&self, now: Time, user: Vec<u8>, id: i32, level: Level, pdu: Pdu) -> Secured {
        let security = SecurityParameters { engine: self.id.clone(), boots: self.boots, time: self.time(now), user, ..Default::default() };
        let data = ScopedData::Plain(ScopedPdu { engine: self.id.clone(), name: Vec::new(), pdu });
        Secured { id, max_size: MAX_MESSAGE as i32, level, reportable: false, security, digest_at: 0..0, data }
    }

    fn complain(&mut self, now: Time, message: &Secured, complaint: Complaint, level: Level) -> Verdict {
        let count = self.counters.entry(complaint).or_default();
        *count = count.wrapping_add(1);
        let count = *count;
        let inner = match &message.data {
            ScopedData::Plain(scoped) => Some(&scoped.pdu),
            ScopedData::Encrypted(_) => None,
        };
        let wanted = message.reportable && inner.is_none_or(|pdu| pdu.kind.is_confirmed());
        if !wanted {
            return Verdict::Dropped("it asks for no report");
        }
        let binding = VarBind::new(complaint.counter(), Value::Counter32(count));
        let pdu = Pdu::new(PduKind::Report, inner.map_or(0, |pdu| pdu.request_id), vec![binding]);
        let report = self.message(now, message.security.user.clone(), message.id, level, pdu);
        let salt = self.next_salt();
        let bytes = match self.users.get(&message.security.user).filter(|_| level > Level::Plain) {
            Some(user) => user.keys.protect(report, salt),
            None => report.encode().0,
        };
        Verdict::Report(complaint, bytes)
    }
}

impl User {
    /// Whether no message with this digest came within the time in which one would be taken again.
    fn is_new(&mut self, now: Time, digest: &[u8]) -> bool {
        while self.order.front().is_some_and(|(at, _)| now.since(*at) > REMEMBERED) {
            let (_, old) = self.order.pop_front().unwrap_or_default();
            self.seen.remove(&old);
        }
        if self.order.len() >= MOST_REMEMBERED || !self.seen.insert(digest.to_vec()) {
            return false;
        }
        self.order.push_back((now, digest.to_vec()));
        true
    }
}
