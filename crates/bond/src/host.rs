//! A host's bonds over QUIC: connections below, bonds above, and between them what each path may send now.
//!
//! A [`Host`] owns a QUIC endpoint. Each path of a bond is one connection; a client's runs over the link that it was dialled on, a
//! server's are told apart by QUIC. Datagrams come in with [`Host::receive`], go out through the function given to [`Host::drive`], and time
//! passes with [`Host::handle_timeout`]. `Instant`s are arguments.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_decide::midrr;
use braid_model::{Bytes as Amount, Time};
use bytes::{Bytes, BytesMut};
use noq_proto::congestion::ControllerFactory;
use noq_proto::crypto::HmacKey;
use noq_proto::{
    ClientConfig, Connection, ConnectionError, ConnectionHandle, DatagramEvent, Dir, EcnCodepoint, Endpoint, EndpointConfig,
    Event as QuicEvent, FourTuple, IdleTimeout, Incoming, RandomConnectionIdGenerator, ServerConfig, StreamId, Transmit, TransportConfig,
    TransportErrorCode, VarInt,
};
use thiserror::Error;

use crate::controller::{Gauge, Radio};
use crate::hello::{BondId, Hello, MAX_MESSAGE, Secret, VERSION, Welcome};
use crate::{Bond, Event, Limits, MIN_DATAGRAM, PathFacts, PathId, Side};

/// A bond whose links are all gone is kept this long.
const IDLE: Duration = Duration::from_secs(90);
/// So that address translators on the way keep a quiet path's mapping.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Late binding: a path is given what it can send within this, and a datagram more.
const HORIZON: Duration = Duration::from_millis(2);
/// What QUIC keeps of datagrams that were given to it; never filled, since it is given little.
const DATAGRAM_BUFFER: usize = 4 << 20;
/// What is free of it when nothing waits: QUIC keeps the record of one datagram back.
const EMPTY_SPACE: usize = DATAGRAM_BUFFER - size_of::<Bytes>();
/// Datagrams of one call, so that the system can be given them at once.
const BATCH: NonZeroUsize = NonZeroUsize::new(40).expect("not zero");
/// Strangers (connections that were not admitted) at a time, and of those from one source (an IPv4 address, or an IPv6 network of 64 bits); more are refused.
const STRANGERS: usize = 1024;
const STRANGERS_OF_ONE: usize = 128;
/// With fewer strangers than this nobody counts whose they are.
const FEW: usize = 64;
/// A connection that is no path of a bond after this long is closed; one that was turned away, after this.
const GREETING: Duration = Duration::from_secs(10);
const FAREWELL: Duration = Duration::from_secs(2);
/// Connections of one bond at a time: each of its paths may be replaced by another.
const CONNECTIONS: usize = 2 * midrr::MAX_LINKS;
/// What QUIC may hold of a path's datagrams that cannot go now; beyond it, acknowledgements are dropped: later ones say as much.
const STUCK: usize = 64 << 10;

/// One QUIC connection of a host, until it is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(usize);

/// What happened that the driver should know.
#[derive(Debug)]
pub enum HostEvent {
    /// Server: a client wants a path. To be answered with [`Host::admit`] or [`Host::refuse`].
    Hello {
        /// Its connection.
        connection: ConnectionId,
        /// What it said.
        hello: Hello,
        /// Where it comes from.
        remote: SocketAddr,
    },
    /// A path has joined its bond.
    Joined {
        /// Its connection.
        connection: ConnectionId,
        /// The bond.
        bond: BondId,
        /// The path's number.
        path: PathId,
    },
    /// A connection is gone, and the path it was.
    Lost {
        /// Which.
        connection: ConnectionId,
        /// Its bond, if it had one.
        bond: Option<BondId>,
        /// The path's number.
        path: PathId,
        /// Why, in words.
        reason: String,
        /// The server's code, if it refused the path.
        refused: Option<u64>,
        /// Whether the other end has closed it, or does not know it any more.
        forgotten: bool,
        /// Client: whether the server has shown another key than the expected one.
        another_key: bool,
    },
    /// A bond has ended: it broke the protocol, or had no path for too long.
    Ended {
        /// Which.
        bond: BondId,
        /// Why, in words.
        reason: String,
    },
    /// Something happened in a bond.
    Bond(BondId, Event),
}

/// Why a path cannot be dialled.
#[derive(Debug, Error)]
pub enum DialError {
    /// QUIC refuses.
    #[error("cannot begin a connection to {0}: {1}")]
    Connect(SocketAddr, String),
    /// There is no such bond.
    #[error("bond {0} is not there: begin it first")]
    NoBond(BondId),
}

/// What a server has of bonds and connections at most; what is beyond is turned away with [`refusals::BUSY`], or by QUIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLimits {
    /// Bonds.
    pub bonds: usize,
    /// Bonds of one owner; the owner without a name (anonymous clients) is not one.
    pub bonds_of_one: usize,
    /// Connections, strangers' too.
    pub connections: usize,
    /// From as many strangers on (connections that were not admitted), those who dial must show first that they are where they say
    /// (QUIC's Retry). 0: always.
    pub unproven: usize,
}

impl Default for HostLimits {
    fn default() -> Self {
        Self { bonds: 4096, bonds_of_one: 16, connections: 16_384, unproven: 64 }
    }
}

struct Conn {
    connection: Connection,
    handle: ConnectionHandle,
    gauge: Arc<Gauge>,
    link: u8,
    path: PathId,
    bond: Option<BondId>,
    stage: Stage,
    stream: Option<StreamId>,
    inbox: Vec<u8>,
    /// When it is closed unless it is a path by then.
    deadline: Instant,
    remote: SocketAddr,
    timer: Option<Instant>,
    refused: Option<u64>,
    another_key: bool,
    /// Whether anything has come from the other end.
    heard: bool,
    /// The client's number of the link.
    link_there: u8,
    backup: bool,
    /// What a client says once it can.
    hello: Option<Hello>,
    /// Whether the driver was told that it is gone.
    told: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// TLS, and the first messages.
    Greeting,
    /// Server: the driver is asked.
    Asked,
    /// Server: the client was let in and has not said anything since. Data would be sent before the answer, and for a client that
    /// does not know the answer yet.
    Welcomed,
    Joined,
    Closed,
}

struct Session {
    bond: Bond,
    secret: Secret,
    /// Whose it is, as the driver names them.
    owner: Vec<u8>,
    /// Whether it ever had a path.
    established: bool,
    connections: BTreeSet<usize>,
    timer: Option<Instant>,
    /// Since when it has no connection.
    alone_since: Option<Instant>,
}

/// The bonds of one host.
pub struct Host {
    endpoint: Endpoint,
    epoch: Instant,
    server: Option<Arc<ServerConfig>>,
    conns: BTreeMap<usize, Conn>,
    /// Server: those of `conns` that were not admitted.
    strangers: BTreeSet<usize>,
    bounds: HostLimits,
    sessions: BTreeMap<BondId, Session>,
    timers: BTreeSet<(Instant, Timer)>,
    /// Connections that something was done to, and those that may have something to send for it.
    touched: BTreeSet<usize>,
    speaking: BTreeSet<usize>,
    awake: BTreeSet<BondId>,
    events: VecDeque<HostEvent>,
    responses: VecDeque<(u8, Transmit, Vec<u8>)>,
    buffer: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Connection(usize),
    Bond(BondId),
}

/// How datagrams leave: the link's number (0 at a server), where to, and one or more datagrams of `segment_size` bytes each.
pub type Sink<'a> = dyn FnMut(u8, &Transmit, &[u8]) + 'a;

impl Host {
    /// A host that dials. `seed` is drawn by the caller from a cryptographic source.
    pub fn client(seed: [u8; 32], now: Instant) -> Self {
        Self::new(EndpointConfig::default(), seed, None, now)
    }

    /// A host that is dialled. With the same `reset` key a host that was started anew tells clients of connections it has forgotten.
    pub fn server(seed: [u8; 32], reset: Arc<dyn HmacKey>, tls: Arc<dyn noq_proto::crypto::ServerConfig>, now: Instant) -> Self {
        let mut config = ServerConfig::with_crypto(tls);
        config.migration(true);
        Self::new(EndpointConfig::new(reset), seed, Some(Arc::new(config)), now)
    }

    fn new(mut config: EndpointConfig, seed: [u8; 32], server: Option<Arc<ServerConfig>>, now: Instant) -> Self {
        config.rng_seed(Some(seed));
        // Ids that another run of this host gave out must look like its own, or it would not answer them with a reset.
        config.cid_generator(Arc::new(|| Box::new(RandomConnectionIdGenerator::new(8))));
        Self {
            endpoint: Endpoint::new(Arc::new(config), server.clone(), true),
            epoch: now,
            server,
            conns: BTreeMap::new(),
            strangers: BTreeSet::new(),
            bounds: HostLimits::default(),
            sessions: BTreeMap::new(),
            timers: BTreeSet::new(),
            touched: BTreeSet::new(),
            speaking: BTreeSet::new(),
            awake: BTreeSet::new(),
            events: VecDeque::new(),
            responses: VecDeque::new(),
            buffer: Vec::new(),
        }
    }

    /// Server: other limits than the usual. What is beyond them already stays.
    pub fn set_limits(&mut self, limits: HostLimits) {
        self.bounds = limits;
    }

    /// A moment of the host's clock as bonds see it.
    pub fn time(&self, now: Instant) -> Time {
        Time::from_nanos(u64::try_from(now.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)) + Duration::from_secs(1)
    }

    fn instant(&self, time: Time) -> Instant {
        self.epoch + time.since(Time::ZERO).saturating_sub(Duration::from_secs(1))
    }

    /// Client: begins a bond; flows may be opened before any path is there. `id` and `secret` are random.
    pub fn begin(&mut self, now: Instant, id: BondId, secret: Secret, limits: Limits) {
        let bond = Bond::new(Side::Client, limits, self.time(now));
        self.insert_session(
            id,
            Session { bond, secret, owner: Vec::new(), established: false, connections: BTreeSet::new(), timer: None, alone_since: None },
        );
    }

    /// Client: dials a path. `hello` has the invitation's token and a name, if the relay does not know this client yet.
    #[allow(clippy::too_many_arguments, reason = "they are the path")]
    pub fn dial(
        &mut self,
        now: Instant,
        bond: BondId,
        (path, link, backup): (PathId, u8, bool),
        remote: SocketAddr,
        tls: Arc<dyn noq_proto::crypto::ClientConfig>,
        server_name: &str,
        (token, name): (Option<[u8; 16]>, String),
    ) -> Result<ConnectionId, DialError> {
        let session = self.sessions.get(&bond).ok_or(DialError::NoBond(bond))?;
        let (secret, joins) = (session.secret, session.established);
        let gauge = Arc::new(Gauge::default());
        let mut config = ClientConfig::new(tls);
        config.transport_config(Arc::new(transport(Radio::factory(gauge.clone()))));
        let (handle, connection) =
            self.endpoint.connect(now, config, remote, server_name).map_err(|error| DialError::Connect(remote, error.to_string()))?;
        let hello = Hello { version: VERSION, capabilities: 0, bond, secret, path: path.0, link, joins, backup, token, name };
        let conn = Conn { bond: Some(bond), hello: Some(hello), path, backup, ..Conn::new(now, connection, handle, gauge, link, remote) };
        self.insert_conn(conn);
        Ok(ConnectionId(handle.0))
    }

    /// Server: takes a path in. A bond that is there already must have the same secret and owner. `false` if it may not join.
    pub fn admit(&mut self, now: Instant, id: ConnectionId, hello: &Hello, owner: &[u8], limits: Limits) -> bool {
        let time = self.time(now);
        if self.conns.get(&id.0).is_none_or(|conn| conn.stage != Stage::Asked) {
            return false;
        }
        if !self.sessions.contains_key(&hello.bond) {
            if hello.joins {
                self.refuse(now, id, refusals::FORGOTTEN, "that bond is not known here any more");
                return false;
            }
            let theirs = || self.sessions.values().filter(|session| session.owner == owner).count();
            if self.sessions.len() >= self.bounds.bonds || !owner.is_empty() && theirs() >= self.bounds.bonds_of_one {
                self.refuse(now, id, refusals::BUSY, "there are as many bonds as there may be: end one first");
                return false;
            }
            let bond = Bond::new(Side::Server, limits, time);
            let session = Session {
                bond,
                secret: hello.secret,
                owner: owner.to_vec(),
                established: false,
                connections: BTreeSet::new(),
                timer: None,
                alone_since: None,
            };
            self.insert_session(hello.bond, session);
        }
        let Some(session) = self.sessions.get_mut(&hello.bond) else { return false };
        let mine = session.secret.is(&hello.secret) && session.owner == owner;
        if !mine {
            self.refuse(now, id, refusals::NOT_YOURS, "that bond is another's");
            return false;
        }
        if session.connections.len() >= CONNECTIONS {
            self.refuse(now, id, refusals::BUSY, "that bond has as many paths as it may have");
            return false;
        }
        let Some(conn) = self.conns.get_mut(&id.0) else { return false };
        self.strangers.remove(&id.0);
        (conn.stage, conn.bond, conn.path) = (Stage::Welcomed, Some(hello.bond), PathId(hello.path));
        (conn.link_there, conn.backup) = (hello.link, hello.backup);
        session.connections.insert(id.0);
        session.alone_since = None;
        let version = hello.version.min(VERSION);
        conn.say(&Welcome { version, capabilities: 0, code: 0, reason: String::new() }.encode());
        self.touched.insert(id.0);
        true
    }

    /// Server: turns a path away.
    pub fn refuse(&mut self, now: Instant, id: ConnectionId, code: u64, reason: &str) {
        if let Some(conn) = self.conns.get_mut(&id.0) {
            conn.stage = Stage::Closed;
            conn.deadline = conn.deadline.min(now + FAREWELL);
            conn.say(&Welcome { version: VERSION, capabilities: 0, code, reason: reason.to_owned() }.encode());
            if let Some(stream) = conn.stream {
                let _ = conn.connection.send_stream(stream).finish();
            }
            self.touched.insert(id.0);
        }
    }

    /// The QUIC connection of a path, to read the peer's key from.
    pub fn connection(&self, id: ConnectionId) -> Option<&Connection> {
        self.conns.get(&id.0).map(|conn| &conn.connection)
    }

    /// Client: whether anything that belongs to a connection has come from the other end.
    pub fn has_heard(&self, id: ConnectionId) -> bool {
        self.conns.get(&id.0).is_some_and(|conn| conn.heard)
    }

    /// The host's own addresses that a bond's paths have reached it at, as far as the system tells.
    pub fn local_addresses(&self, bond: BondId) -> BTreeSet<IpAddr> {
        let session = self.sessions.get(&bond);
        let connections = session.into_iter().flat_map(|session| &session.connections).filter_map(|id| self.conns.get(id));
        let own = |conn: &Conn| conn.connection.network_path(noq_proto::PathId::ZERO).ok()?.local_ip();
        connections.filter_map(own).map(|ip| ip.to_canonical()).collect()
    }

    /// A bond, to be used; it is driven with the next [`Self::drive`].
    pub fn bond(&mut self, id: BondId) -> Option<&mut Bond> {
        let session = self.sessions.get_mut(&id)?;
        self.awake.insert(id);
        Some(&mut session.bond)
    }

    /// Bonds that are there.
    pub fn bonds(&self) -> impl Iterator<Item = (BondId, &Bond)> {
        self.sessions.iter().map(|(id, session)| (*id, &session.bond))
    }

    /// Ends a bond: its connections are closed.
    pub fn end(&mut self, now: Instant, id: BondId, reason: &str) {
        let Some(session) = self.sessions.remove(&id) else { return };
        if let Some(at) = session.timer {
            self.timers.remove(&(at, Timer::Bond(id)));
        }
        for connection in session.connections {
            self.close(now, ConnectionId(connection), reason);
        }
        // Those that still shake hands for it.
        let greeting: Vec<usize> = self.conns.iter().filter(|(_, conn)| conn.bond == Some(id)).map(|(at, _)| *at).collect();
        greeting.into_iter().for_each(|at| self.close(now, ConnectionId(at), reason));
        self.awake.remove(&id);
        self.events.push_back(HostEvent::Ended { bond: id, reason: reason.to_owned() });
    }

    /// Closes one connection, and its path with it.
    pub fn close(&mut self, now: Instant, id: ConnectionId, reason: &str) {
        if let Some(conn) = self.conns.get_mut(&id.0) {
            conn.connection.close(now, VarInt::from_u32(0), Bytes::copy_from_slice(reason.as_bytes()));
            self.touched.insert(id.0);
            self.lose(id.0, reason, false);
        }
    }

    /// What happened, oldest first.
    pub fn poll_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// When [`Self::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Time has passed. Then [`Self::drive`].
    pub fn handle_timeout(&mut self, now: Instant) {
        let time = self.time(now);
        while let Some((at, timer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, timer));
            match timer {
                Timer::Connection(id) => {
                    let Some(conn) = self.conns.get_mut(&id) else { continue };
                    conn.timer = None;
                    conn.connection.handle_timeout(now);
                    if conn.pending_deadline().is_some_and(|at| at <= now) {
                        self.close(now, ConnectionId(id), "no greeting");
                    }
                    self.touched.insert(id);
                }
                Timer::Bond(id) => {
                    let Some(session) = self.sessions.get_mut(&id) else { continue };
                    session.timer = None;
                    session.bond.handle_timeout(time);
                    if self.server.is_some() && session.alone_since.is_some_and(|since| now.saturating_duration_since(since) >= IDLE) {
                        self.end(now, id, "no path for too long");
                    }
                    self.awake.insert(id);
                }
            }
        }
    }

    /// A UDP payload came in over `link`.
    pub fn receive(
        &mut self,
        now: Instant,
        link: u8,
        (remote, local): (SocketAddr, Option<IpAddr>),
        ecn: Option<EcnCodepoint>,
        data: BytesMut,
    ) {
        self.buffer.clear();
        match self.endpoint.handle(now, FourTuple::new(remote, local), ecn, data, &mut self.buffer) {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                if let Some(conn) = self.conns.get_mut(&handle.0) {
                    conn.connection.handle_event(event);
                    (conn.remote, conn.heard) = (remote, true);
                    self.touched.insert(handle.0);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.accept(now, link, incoming),
            Some(DatagramEvent::Response(transmit)) => self.responses.push_back((link, transmit, self.buffer.clone())),
            None => {}
        }
    }

    fn accept(&mut self, now: Instant, link: u8, incoming: Incoming) {
        let remote = incoming.remote_address();
        self.buffer.clear();
        // Whoever has not shown yet that it is where it says it is gets no state and a small answer.
        if !incoming.remote_address_validated() && incoming.may_retry() && self.strangers.len() >= self.bounds.unproven {
            if let Ok(transmit) = self.endpoint.retry(incoming, &mut self.buffer) {
                self.responses.push_back((link, transmit, self.buffer.clone()));
            }
            return;
        }
        let alike = |id: &&usize| self.conns.get(*id).is_some_and(|conn| source(conn.remote) == source(remote));
        let crowded = self.conns.len() >= self.bounds.connections || self.strangers.len() >= STRANGERS;
        if crowded || self.strangers.len() >= FEW && self.strangers.iter().filter(alike).count() >= STRANGERS_OF_ONE {
            let transmit = self.endpoint.refuse(incoming, &mut self.buffer);
            self.responses.push_back((link, transmit, self.buffer.clone()));
            return;
        }
        let gauge = Arc::new(Gauge::default());
        let config = self.server.as_ref().map(|config| {
            let mut config = ServerConfig::clone(config);
            config.transport_config(Arc::new(transport(Radio::factory(gauge.clone()))));
            Arc::new(config)
        });
        match self.endpoint.accept(incoming, now, &mut self.buffer, config) {
            Ok((handle, connection)) => {
                self.strangers.insert(handle.0);
                self.insert_conn(Conn::new(now, connection, handle, gauge, link, remote));
            }
            Err(error) => {
                if let Some(transmit) = error.response {
                    self.responses.push_back((link, transmit, self.buffer.clone()));
                }
            }
        }
    }

    // Driving.

    /// Moves everything that can move: from connections to bonds and back, and out through `sink`. To be called after every input.
    pub fn drive(&mut self, now: Instant, sink: &mut Sink<'_>) {
        for (link, transmit, data) in self.responses.drain(..) {
            sink(link, &transmit, &data);
        }
        while let Some(id) = self.touched.pop_first() {
            self.take_in(now, id);
        }
        while let Some(id) = self.awake.pop_first() {
            self.drive_bond(now, id, sink);
        }
        // Connections of no bond, and those whose bond has just ended.
        while let Some(id) = self.speaking.pop_first() {
            self.give_out(now, id, true, sink);
        }
    }

    /// Takes in what a connection has to say.
    fn take_in(&mut self, now: Instant, id: usize) {
        let time = self.time(now);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        while let Some(event) = conn.connection.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(conn.handle, event) {
                conn.connection.handle_event(answer);
            }
        }
        let mut lost = None;
        while let Some(event) = conn.connection.poll() {
            match event {
                QuicEvent::Connected => {
                    if let Some(hello) = conn.hello.take() {
                        conn.stream = conn.connection.streams().open(Dir::Bi);
                        conn.say(&hello.encode());
                    }
                }
                QuicEvent::ConnectionLost { reason } => lost = Some(reason),
                _ => {}
            }
        }
        if let Some(reason) = lost {
            let forgotten =
                matches!(reason, ConnectionError::Reset | ConnectionError::ConnectionClosed(_) | ConnectionError::ApplicationClosed(_));
            let (bond, left) = (conn.bond, matches!(reason, ConnectionError::ApplicationClosed(_)));
            conn.another_key = is_another_key(&reason);
            self.lose(id, &reason.to_string(), forgotten);
            // A client that says goodbye on its last path does not come back.
            if let Some(bond) = bond.filter(|bond| left && self.server.is_some() && self.is_alone(*bond)) {
                self.end(now, bond, "its client has ended it");
            }
        } else if conn.stage == Stage::Greeting {
            self.greet(now, id);
        }
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let first = if conn.stage == Stage::Welcomed { conn.connection.datagrams().recv() } else { None };
        if first.is_some() {
            self.join(now, id);
        }
        let Some(conn) = self.conns.get_mut(&id) else { return };
        match conn.bond.filter(|_| conn.stage == Stage::Joined) {
            Some(bond) => {
                let broken = self.sessions.get_mut(&bond).and_then(|session| {
                    let rest = std::iter::from_fn(|| conn.connection.datagrams().recv());
                    first.into_iter().chain(rest).find_map(|data| session.bond.receive(time, conn.path, data).err())
                });
                self.awake.insert(bond);
                if let Some(error) = broken {
                    self.end(now, bond, &error.to_string());
                }
            }
            // Nobody has anything to say before it is let in, or after; what it says all the same is not kept.
            None => while conn.connection.datagrams().recv().is_some() {},
        }
        self.speaking.insert(id);
    }

    fn is_alone(&self, bond: BondId) -> bool {
        self.sessions.get(&bond).is_some_and(|session| session.connections.is_empty())
    }

    /// The first messages.
    fn greet(&mut self, now: Instant, id: usize) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if self.server.is_some() && conn.stream.is_none() {
            conn.stream = conn.connection.streams().accept(Dir::Bi);
        }
        let Some(stream) = conn.stream else { return };
        if let Err(reason) = conn.hear(stream) {
            self.close(now, ConnectionId(id), reason);
            return;
        }
        if self.server.is_some() {
            match Hello::decode(&conn.inbox) {
                Ok(None) => {}
                Ok(Some(hello)) => {
                    (conn.stage, conn.inbox) = (Stage::Asked, Vec::new());
                    self.events.push_back(HostEvent::Hello { connection: ConnectionId(id), hello, remote: conn.remote });
                }
                Err(error) => self.close(now, ConnectionId(id), &error.to_string()),
            }
            return;
        }
        match Welcome::decode(&conn.inbox) {
            Ok(None) => {}
            Ok(Some(welcome)) if welcome.code == 0 && welcome.version == VERSION => self.join(now, id),
            Ok(Some(welcome)) => {
                let (code, reason) = match welcome.code {
                    0 => (refusals::VERSION, format!("it speaks version {} of the protocol, this is {VERSION}", welcome.version)),
                    code => (code, welcome.reason),
                };
                conn.refused = Some(code);
                self.close(now, ConnectionId(id), &reason);
            }
            Err(error) => self.close(now, ConnectionId(id), &error.to_string()),
        }
    }

    /// The server has taken a path in, and here both know it.
    fn join(&mut self, now: Instant, id: usize) {
        let time = self.time(now);
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some((bond, session)) = conn.bond.and_then(|bond| Some((bond, self.sessions.get_mut(&bond)?))) else { return };
        if conn.connection.datagrams().max_size().is_none_or(|size| size < MIN_DATAGRAM) {
            self.close(now, ConnectionId(id), "it takes no datagrams, or too small ones");
        } else if session.bond.add_path(time, conn.path, conn.link_there, conn.facts(0, HORIZON)) {
            (conn.stage, conn.inbox) = (Stage::Joined, Vec::new());
            session.bond.set_backup(conn.path, conn.backup);
            session.connections.insert(id);
            session.established = true;
            self.events.push_back(HostEvent::Joined { connection: ConnectionId(id), bond, path: conn.path });
        } else {
            self.close(now, ConnectionId(id), "too many paths, or a path of that number is there already");
        }
    }

    /// A connection is gone, or going: its path is, and the driver hears of it once.
    fn lose(&mut self, id: usize, reason: &str, forgotten: bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.told {
            return;
        }
        conn.told = true;
        let joined = std::mem::replace(&mut conn.stage, Stage::Closed) == Stage::Joined;
        let event = HostEvent::Lost {
            connection: ConnectionId(id),
            bond: conn.bond,
            path: conn.path,
            reason: reason.to_owned(),
            refused: conn.refused,
            forgotten,
            another_key: conn.another_key,
        };
        self.events.push_back(event);
        let Some(bond) = conn.bond else { return };
        if let Some(session) = self.sessions.get_mut(&bond)
            && session.connections.remove(&id)
        {
            // One that has not joined may have named another's number.
            if joined {
                session.bond.remove_path(conn.path);
            }
            self.awake.insert(bond);
        }
    }

    /// Gives all of a bond's paths what they can send.
    fn drive_bond(&mut self, now: Instant, id: BondId, sink: &mut Sink<'_>) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let connections: Vec<usize> = session.connections.iter().copied().collect();
        if connections.is_empty() {
            session.alone_since.get_or_insert(now);
        } else {
            session.alone_since = None;
        }
        loop {
            let mut sent = false;
            for connection in &connections {
                let touched = self.speaking.remove(connection);
                sent |= self.give_out(now, *connection, touched, sink);
            }
            // Where paths are chosen, one that was asked before may be the next.
            if !sent || self.sessions.get(&id).is_none_or(|session| !session.bond.is_chosen()) {
                break;
            }
        }
        while let Some(event) = self.sessions.get_mut(&id).and_then(|session| session.bond.poll_event()) {
            self.events.push_back(HostEvent::Bond(id, event));
        }
        self.set_bond_timer(now, id);
    }

    /// Sends what a connection has, and what its bond gives it, until it is full; whether there was anything. A connection that nothing was
    /// done to since, and that is given nothing, is not asked.
    fn give_out(&mut self, now: Instant, id: usize, touched: bool, sink: &mut Sink<'_>) -> bool {
        let time = self.time(now);
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        let (mut any, mut ask, mut asked) = (false, touched, touched);
        let mut bond = conn.bond.filter(|_| conn.stage == Stage::Joined).and_then(|bond| self.sessions.get_mut(&bond));
        loop {
            if let Some(session) = &mut bond {
                ask |= conn.fill(time, &mut session.bond);
                asked |= ask;
            }
            if !std::mem::take(&mut ask) {
                break;
            }
            let mut sent = false;
            self.buffer.clear();
            while let Some(transmit) = conn.connection.poll_transmit(now, BATCH, &mut self.buffer) {
                sink(conn.link, &transmit, &self.buffer[..transmit.size]);
                self.buffer.clear();
                sent = true;
            }
            any |= sent;
            if !sent || bond.is_none() {
                break;
            }
        }
        if !asked {
            return false;
        }
        while let Some(event) = conn.connection.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(conn.handle, event) {
                conn.connection.handle_event(answer);
            }
        }
        let gone = conn.connection.is_drained();
        let timer = if gone { None } else { [conn.connection.poll_timeout(), conn.pending_deadline()].into_iter().flatten().min() };
        let old = std::mem::replace(&mut conn.timer, timer);
        if old != timer {
            old.map(|at| self.timers.remove(&(at, Timer::Connection(id))));
            timer.map(|at| self.timers.insert((at, Timer::Connection(id))));
        }
        if gone {
            self.lose(id, "closed", false);
            self.conns.remove(&id);
            self.strangers.remove(&id);
        }
        any
    }

    fn set_bond_timer(&mut self, now: Instant, id: BondId) {
        let Some(session) = self.sessions.get(&id) else { return };
        let idle = session.alone_since.filter(|_| self.server.is_some()).map(|since| since + IDLE);
        let own = session.bond.poll_timeout().map(|time| self.instant(time).max(now));
        let timer = [idle, own].into_iter().flatten().min();
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let old = std::mem::replace(&mut session.timer, timer);
        if old != timer {
            old.map(|at| self.timers.remove(&(at, Timer::Bond(id))));
            timer.map(|at| self.timers.insert((at, Timer::Bond(id))));
        }
    }

    fn insert_conn(&mut self, conn: Conn) {
        let id = conn.handle.0;
        self.conns.insert(id, conn);
        self.touched.insert(id);
    }

    fn insert_session(&mut self, id: BondId, session: Session) {
        self.sessions.insert(id, session);
        self.awake.insert(id);
    }
}

impl Conn {
    fn new(now: Instant, connection: Connection, handle: ConnectionHandle, gauge: Arc<Gauge>, link: u8, remote: SocketAddr) -> Self {
        Self {
            connection,
            handle,
            gauge,
            link,
            path: PathId(u32::MAX),
            bond: None,
            stage: Stage::Greeting,
            stream: None,
            inbox: Vec::new(),
            deadline: now + GREETING,
            remote,
            timer: None,
            refused: None,
            another_key: false,
            heard: false,
            link_there: link,
            backup: false,
            hello: None,
            told: false,
        }
    }

    /// Until when it must have become a path, as long as that is open.
    fn pending_deadline(&self) -> Option<Instant> {
        (self.stage != Stage::Joined && !self.told).then_some(self.deadline)
    }

    fn say(&mut self, message: &[u8]) {
        if let Some(stream) = self.stream {
            // An empty stream takes a message of this size whole.
            let _ = self.connection.send_stream(stream).write(message);
        }
    }

    /// Reads what came on the greeting's stream.
    fn hear(&mut self, stream: StreamId) -> Result<(), &'static str> {
        let mut stream = self.connection.recv_stream(stream);
        let Ok(mut chunks) = stream.read(true) else { return Ok(()) };
        while let Ok(Some(chunk)) = chunks.next(MAX_MESSAGE + 3) {
            self.inbox.extend_from_slice(&chunk.bytes);
            if self.inbox.len() > MAX_MESSAGE + 2 {
                let _ = chunks.finalize();
                return Err("the first message is too long");
            }
        }
        let _ = chunks.finalize();
        Ok(())
    }

    /// What the path can send at once: what its window and its pace admit within the horizon, and a datagram of `most` bytes so that it
    /// never starves.
    fn facts(&mut self, most: u64, horizon: Duration) -> PathFacts {
        let queued = EMPTY_SPACE.saturating_sub(self.connection.datagrams().send_buffer_space()) as u64;
        let window = self.gauge.window();
        let free = window.get().saturating_sub(self.gauge.in_flight().get());
        let room = (free.min(self.paced(horizon)) + most).saturating_sub(queued);
        // Less than a datagram is none: it would only make them small.
        let room = if room < most { 0 } else { room };
        let rtt = self.connection.rtt(noq_proto::PathId::ZERO).unwrap_or(Duration::from_millis(100));
        PathFacts { rtt, rate: self.gauge.delivery_rate(), room: Amount::new(room), window }
    }

    /// Bytes that may leave within `span`.
    fn paced(&self, span: Duration) -> u64 {
        self.gauge.pacing().bytes_per_second().saturating_mul(span.as_micros() as u64) / 1_000_000
    }

    /// Gives QUIC what the bond has for this path now; whether there was anything.
    fn fill(&mut self, now: Time, bond: &mut Bond) -> bool {
        let Some(max) = self.connection.datagrams().max_size() else { return false };
        // What is urgent is not to find more than one datagram before it.
        let horizon = if bond.hurries(now) && self.paced(HORIZON) < 2 * max as u64 { Duration::ZERO } else { HORIZON };
        let facts = self.facts(max as u64, horizon);
        bond.set_facts(self.path, facts);
        if bond.wants_probe(now, self.path) {
            self.gauge.allow_probe(Amount::new(2 * max as u64));
        }
        let mut out = BytesMut::new();
        let mut any = false;
        while bond.poll_datagram(now, self.path, max, &mut out) {
            if facts.room == Amount::ZERO && self.connection.datagrams().send_buffer_space() < DATAGRAM_BUFFER - STUCK {
                out.clear();
                continue;
            }
            any = true;
            if self.connection.datagrams().send(out.split().freeze(), false).is_err() {
                // Its tracker will find it lost.
                break;
            }
        }
        any
    }
}

/// Whether this end found the other's key wrong: TLS's alert `access_denied` (49), as rustls gives it for a verifier's own refusal.
fn is_another_key(reason: &ConnectionError) -> bool {
    matches!(reason, ConnectionError::TransportError(error) if error.code == TransportErrorCode::crypto(49))
}

/// Whom strangers are counted by: an IPv6 network gives each of its hosts as many addresses as it likes.
pub fn source(remote: SocketAddr) -> u128 {
    match remote.ip().to_canonical() {
        IpAddr::V4(ip) => u128::from(ip.to_bits()),
        IpAddr::V6(ip) => ip.to_bits() >> 64 << 64,
    }
}

/// Codes of a [`Welcome`] that turns a path away.
pub mod refusals {
    /// The client is not known, or its invitation is not valid.
    pub const UNKNOWN: u64 = 1;
    /// The client was revoked.
    pub const REVOKED: u64 = 2;
    /// The bond is another's, or has all the paths it may have.
    pub const NOT_YOURS: u64 = 3;
    /// The relay takes no new paths now.
    pub const BUSY: u64 = 4;
    /// The versions have nothing in common.
    pub const VERSION: u64 = 5;
    /// The bond is not there any more: the server was restarted, or the bond had no path for too long.
    pub const FORGOTTEN: u64 = 6;
}

fn transport(controllers: Arc<dyn ControllerFactory + Send + Sync>) -> TransportConfig {
    let mut config = TransportConfig::default();
    config
        .congestion_controller_factory(controllers)
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .stream_receive_window(VarInt::from_u32(4096))
        .datagram_receive_buffer_size(Some(DATAGRAM_BUFFER))
        .datagram_send_buffer_size(DATAGRAM_BUFFER)
        .keep_alive_interval(Some(KEEP_ALIVE))
        .max_idle_timeout(IdleTimeout::try_from(IDLE).ok());
    config
}
