//! Admission of paths: limits on unadmitted connections, first messages, and the server's answers.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use noq_proto::{Dir, Incoming, ServerConfig};

use super::conn::{Conn, HORIZON, Stage, transport};
use super::source::sources;
use super::{ConnectionId, Host, HostEvent, Session};
use crate::controller::{PathMetrics, RateController};
use crate::hello::{CAPABILITIES, Hello, SCHEDULING, VERSION, Welcome};
use crate::{Bond, Limits, MIN_DATAGRAM, PathId, Side};

/// Maximum number of unadmitted connections, in total and from one source. Wider IPv6 networks may have a multiple of it (see [`sources`]). Further
/// connections are refused.
const MAX_UNADMITTED: usize = 1024;
const MAX_UNADMITTED_PER_SOURCE: usize = 128;
/// Below this number of unadmitted connections their sources are not counted.
const SOURCE_CHECK_MIN: usize = 64;
/// Delay after which a refused connection is closed.
const CLOSE_DELAY: Duration = Duration::from_secs(2);
/// Connections of one bond at a time: each path may be replaced by another.
const MAX_CONNECTIONS: usize = 2 * braid_model::LinkSet::CAPACITY;

impl Host {
    /// Server: admits a path. An existing bond must have the same secret and owner. Returns `false` if the path was refused.
    pub fn admit(&mut self, now: Instant, id: ConnectionId, hello: &Hello, owner: &[u8], limits: Limits) -> bool {
        let time = self.time(now);
        if self.conns.get(&id).is_none_or(|conn| conn.stage != Stage::Asked) {
            return false;
        }
        if !self.sessions.contains_key(&hello.bond) {
            if hello.joins {
                self.refuse(now, id, refusals::FORGOTTEN, "this relay no longer knows the bond");
                return false;
            }
            let theirs = || self.sessions.values().filter(|session| session.owner == owner).count();
            if self.sessions.len() >= self.bounds.bonds || !owner.is_empty() && theirs() >= self.bounds.bonds_of_one {
                self.refuse(now, id, refusals::BUSY, "the limit of bonds is reached: end one first");
                return false;
            }
            let bond = Bond::new(Side::Server, limits, time);
            let session = Session {
                bond,
                secret: hello.secret,
                owner: owner.to_vec(),
                established: false,
                capabilities: 0,
                connections: BTreeSet::new(),
                timer: None,
                pathless_since: None,
                last_received: None,
            };
            self.insert_session(hello.bond, session);
        }
        let Some(session) = self.sessions.get_mut(&hello.bond) else { return false };
        let mine = session.secret.is(&hello.secret) && session.owner == owner;
        if !mine {
            self.refuse(now, id, refusals::NOT_YOURS, "the bond belongs to another client");
            return false;
        }
        if session.connections.len() >= MAX_CONNECTIONS {
            self.refuse(now, id, refusals::BUSY, "the bond has reached its limit of paths");
            return false;
        }
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        self.unadmitted.remove(&id);
        (conn.stage, conn.bond, conn.path) = (Stage::Welcomed, Some(hello.bond), PathId(hello.path));
        (conn.link_there, conn.backup) = (hello.link, hello.backup);
        session.connections.insert(id);
        session.pathless_since = None;
        let version = hello.version.min(VERSION);
        let capabilities = CAPABILITIES | self.offered;
        conn.write_greeting(&Welcome { version, capabilities, code: 0, reason: String::new() }.encode());
        self.touched.insert(id);
        true
    }

    /// Server: refuses a path.
    pub fn refuse(&mut self, now: Instant, id: ConnectionId, code: u64, reason: &str) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.stage = Stage::Closed;
            conn.deadline = conn.deadline.min(now + CLOSE_DELAY);
            conn.write_greeting(&Welcome { version: VERSION, capabilities: 0, code, reason: reason.to_owned() }.encode());
            if let Some(stream) = conn.stream {
                let _ = conn.connection.send_stream(stream).finish();
            }
            self.touched.insert(id);
        }
    }

    pub(super) fn accept(&mut self, now: Instant, link: u8, incoming: Incoming) {
        let remote = incoming.remote_address();
        self.buffer.clear();
        let validated = incoming.remote_address_validated();
        // A client that has not validated its address gets no state and a small answer. An attacker with forged addresses can use up the budget of an
        // unvalidated address, but not the budget of a validated one.
        let flooded = self.unadmitted.len() >= self.bounds.unvalidated;
        if !validated && incoming.may_retry() && (flooded || !self.unvalidated.take(now, remote)) {
            if let Ok(transmit) = self.endpoint.retry(incoming, &mut self.buffer) {
                self.responses.push_back((link, transmit, self.buffer.clone()));
            }
            return;
        }
        let full = self.conns.len() >= self.bounds.connections || self.unadmitted.len() >= MAX_UNADMITTED || self.is_source_full(remote);
        if full || validated && !self.validated.take(now, remote) {
            let transmit = self.endpoint.refuse(incoming, &mut self.buffer);
            self.responses.push_back((link, transmit, self.buffer.clone()));
            return;
        }
        let metrics = Arc::new(PathMetrics::default());
        let config = self.server.as_ref().map(|config| {
            let mut config = ServerConfig::clone(config);
            config.transport_config(Arc::new(transport(RateController::factory(metrics.clone()), remote)));
            Arc::new(config)
        });
        match self.endpoint.accept(incoming, now, &mut self.buffer, config) {
            Ok((handle, connection)) => {
                let id = self.insert_conn(Conn::new(now, connection, handle, metrics, link, remote));
                self.unadmitted.insert(id);
            }
            Err(error) => {
                if let Some(transmit) = error.response {
                    self.responses.push_back((link, transmit, self.buffer.clone()));
                }
            }
        }
    }

    /// Whether one of the networks of the address has reached its limit of unadmitted connections.
    fn is_source_full(&self, remote: SocketAddr) -> bool {
        if self.unadmitted.len() < SOURCE_CHECK_MIN {
            return false;
        }
        let theirs: Vec<_> = self.unadmitted.iter().filter_map(|id| self.conns.get(id)).flat_map(|conn| sources(conn.remote)).collect();
        let count = |source| theirs.iter().filter(|(theirs, _)| *theirs == source).count();
        sources(remote).into_iter().any(|(source, times)| count(source) >= MAX_UNADMITTED_PER_SOURCE * times as usize)
    }

    /// Processes the first messages.
    pub(super) fn greet(&mut self, now: Instant, id: ConnectionId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if self.server.is_some() && conn.stream.is_none() {
            conn.stream = conn.connection.streams().accept(Dir::Bi);
        }
        let Some(stream) = conn.stream else { return };
        if let Err(reason) = conn.read_greeting(stream) {
            self.close(now, id, reason);
            return;
        }
        if self.server.is_some() {
            match Hello::decode(&conn.inbox) {
                Ok(None) => {}
                Ok(Some(hello)) => {
                    (conn.stage, conn.inbox) = (Stage::Asked, Vec::new());
                    self.events.push_back(HostEvent::Hello { connection: id, hello, remote: conn.remote });
                }
                Err(error) => self.close(now, id, &error.to_string()),
            }
            return;
        }
        match Welcome::decode(&conn.inbox) {
            Ok(None) => {}
            Ok(Some(welcome)) if welcome.code == 0 && welcome.version == VERSION => {
                if let Some(session) = conn.bond.and_then(|bond| self.sessions.get_mut(&bond)) {
                    if welcome.capabilities & SCHEDULING == SCHEDULING {
                        session.bond.on_obedient();
                    }
                    session.capabilities |= welcome.capabilities;
                }
                self.join(now, id);
            }
            Ok(Some(welcome)) => {
                let (code, reason) = match welcome.code {
                    0 => (refusals::VERSION, format!("the relay uses protocol version {}, this client uses {VERSION}", welcome.version)),
                    code => (code, welcome.reason),
                };
                conn.refused = Some(code);
                self.close(now, id, &reason);
            }
            Err(error) => self.close(now, id, &error.to_string()),
        }
    }

    /// Adds an admitted path to its bond.
    pub(super) fn join(&mut self, now: Instant, id: ConnectionId) {
        let time = self.time(now);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some((bond, session)) = conn.bond.and_then(|bond| Some((bond, self.sessions.get_mut(&bond)?))) else { return };
        if conn.connection.datagrams().max_size().is_none_or(|size| size < MIN_DATAGRAM) {
            self.close(now, id, "the other end does not accept QUIC datagrams, or only too small ones");
        } else if session.bond.add_path(time, conn.path, conn.link_there, conn.facts(0, HORIZON)) {
            (conn.stage, conn.inbox) = (Stage::Joined, Vec::new());
            session.bond.set_backup(conn.path, conn.backup);
            session.connections.insert(id);
            session.established = true;
            self.events.push_back(HostEvent::Joined { connection: id, bond, path: conn.path });
        } else {
            self.close(now, id, "the bond has too many paths, or already has a path of that number");
        }
    }
}

/// Codes of a [`Welcome`] that refuses a path.
pub mod refusals {
    /// The client is not registered, or its invitation is not valid.
    pub const UNKNOWN: u64 = 1;
    /// The client was revoked.
    pub const REVOKED: u64 = 2;
    /// The bond belongs to another client.
    pub const NOT_YOURS: u64 = 3;
    /// The relay accepts no new paths now, or a limit of bonds or paths is reached.
    pub const BUSY: u64 = 4;
    /// There is no common protocol version.
    pub const VERSION: u64 = 5;
    /// The bond no longer exists: the server was restarted, or the bond had no path for too long.
    pub const FORGOTTEN: u64 = 6;
}
