//! Bonds of one host over QUIC: manages connections below, bonds above, and how much each path may send now.
//!
//! A [`Host`] owns a QUIC endpoint. Each path of a bond is one connection. A client's connection uses the link that it was dialled over; a server
//! identifies connections by QUIC's connection IDs. Datagrams enter through [`Host::receive`], leave through the function given to [`Host::drive`],
//! and time passes with [`Host::handle_timeout`]. `Instant`s are arguments.

mod admission;
mod conn;
mod source;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_model::Time;
use bytes::{Bytes, BytesMut};
use noq_proto::crypto::HmacKey;
use noq_proto::{
    ClientConfig, Connection, ConnectionError, DatagramEvent, Dir, EcnCodepoint, Endpoint, EndpointConfig, Event as QuicEvent, FourTuple,
    RandomConnectionIdGenerator, ServerConfig, Transmit, TransportErrorCode, VarInt,
};
use thiserror::Error;

pub use self::admission::refusals;
use self::conn::{Conn, Stage, transport};
pub use self::source::{Source, SourceLimiter, source, sources};
use crate::controller::{PathMetrics, RateController};
use crate::hello::{BondId, CAPABILITIES, CONTROL, DATAGRAMS, Hello, PACKETS, STEPS, Secret, VERSION, WAYPOINT};
use crate::{Bond, Event, FlowKind, Limits, PathId, Side};

/// Length of this host's connection IDs in bytes. IDs are random and unique within a host. They are not a secret: guessing one gives no access.
const CONNECTION_ID: usize = 4;
/// Idle timeout. A path that receives nothing for this long is closed. The same limit ends a server's bond without paths, and a client's bond whose
/// server does not answer new paths either.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Number of handshakes that one source may start at once, and the interval after which it may start another. A handshake costs the server CPU time.
const HANDSHAKE_BURST: u32 = 128;
const HANDSHAKE_INTERVAL: Duration = Duration::from_millis(125);
/// Number of sources whose handshakes are counted at a time.
const MAX_SOURCES: usize = 65_536;
/// Datagrams per transmit call, so that the system can send them in one batch.
const BATCH: NonZeroUsize = NonZeroUsize::new(40).expect("not zero");

/// Identifier of a QUIC connection within a host. It is never reused, so a late call for a closed connection has no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u64);

/// An event for the driver.
#[derive(Debug)]
pub enum HostEvent {
    /// Server: a client requests a path. Answer with [`Host::admit`] or [`Host::refuse`].
    Hello {
        /// The client's connection.
        connection: ConnectionId,
        /// The Hello message.
        hello: Hello,
        /// The address that completed the handshake.
        remote: SocketAddr,
    },
    /// A path has joined its bond.
    Joined {
        /// The path's connection.
        connection: ConnectionId,
        /// The bond.
        bond: BondId,
        /// Identifier of the path.
        path: PathId,
    },
    /// A connection ended, and its path with it.
    Lost {
        /// The connection.
        connection: ConnectionId,
        /// Its bond, if it belonged to one.
        bond: Option<BondId>,
        /// Identifier of the path.
        path: PathId,
        /// Reason, as text.
        reason: String,
        /// Code of the refusal, if the server refused the path.
        refused: Option<u64>,
        /// Whether the other end closed the connection or no longer has its state.
        forgotten: bool,
        /// Client: whether the server presented a key other than the expected one.
        key_mismatch: bool,
    },
    /// A bond ended, with its flows: it violated the protocol, or had no path for too long. A client's bond ends when nothing was received for 90 s
    /// and a path that was dialled since then got no answer.
    Ended {
        /// The bond.
        bond: BondId,
        /// Reason, as text.
        reason: String,
    },
    /// An event of a bond.
    Bond(BondId, Event),
}

/// Why a path cannot be dialled.
#[derive(Debug, Error)]
pub enum DialError {
    /// QUIC rejects the connection parameters.
    #[error("cannot start a connection to {0}: {1}")]
    Connect(SocketAddr, String),
    /// The bond does not exist.
    #[error("bond {0} does not exist: create it first")]
    NoBond(BondId),
}

/// Limits of a server's bonds and connections. Beyond them the server refuses with [`refusals::BUSY`], or QUIC refuses the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostLimits {
    /// Number of bonds.
    pub bonds: usize,
    /// Number of bonds of one owner. The limit does not apply to anonymous clients (the empty owner).
    pub bonds_of_one: usize,
    /// Number of connections, including unadmitted ones.
    pub connections: usize,
    /// With this many unadmitted connections, new clients must first validate their address (QUIC's Retry). 0: always.
    pub unvalidated: usize,
}

impl Default for HostLimits {
    fn default() -> Self {
        Self { bonds: 4096, bonds_of_one: 16, connections: 16_384, unvalidated: 64 }
    }
}

/// The addresses of a path of a server, as its packets have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProvenPath {
    /// The path.
    pub path: PathId,
    /// Address of the client, or of its NAT.
    pub remote: IpAddr,
    /// Address of this host.
    pub local: IpAddr,
    /// Smoothed round-trip time.
    pub rtt: Duration,
}

struct Session {
    bond: Bond,
    secret: Secret,
    /// Owner of the bond, as named by the driver.
    owner: Vec<u8>,
    /// Whether a path has ever joined.
    established: bool,
    /// Client: the server's capabilities.
    capabilities: u64,
    connections: BTreeSet<ConnectionId>,
    timer: Option<Instant>,
    /// Since when the bond has had no connection.
    pathless_since: Option<Instant>,
    /// When a packet was last received over a connection that has ended since.
    last_received: Option<Instant>,
}

/// The bonds of one host.
pub struct Host {
    endpoint: Endpoint,
    epoch: Instant,
    server: Option<Arc<ServerConfig>>,
    conns: BTreeMap<ConnectionId, Conn>,
    /// Connections by QUIC's own handles, which QUIC reuses.
    handles: BTreeMap<usize, ConnectionId>,
    /// Number of connections so far.
    connection_count: u64,
    /// Server: connections in `conns` that were not admitted.
    unadmitted: BTreeSet<ConnectionId>,
    bounds: HostLimits,
    /// Server: capabilities that not every server has.
    offered: u64,
    /// Limits on the handshakes that clients start, before and after they have validated their address.
    unvalidated: SourceLimiter,
    validated: SourceLimiter,
    first_rtt: Option<Duration>,
    sessions: BTreeMap<BondId, Session>,
    timers: BTreeSet<(Instant, Timer)>,
    /// Connections with unprocessed input, and connections that may have something to send.
    touched: BTreeSet<ConnectionId>,
    output_pending: BTreeSet<ConnectionId>,
    dirty_bonds: BTreeSet<BondId>,
    events: VecDeque<HostEvent>,
    responses: VecDeque<(u8, Transmit, Vec<u8>)>,
    buffer: Vec<u8>,
    /// Buffer in which datagrams of bonds are built.
    scratch: BytesMut,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Connection(ConnectionId),
    Bond(BondId),
}

/// Sends datagrams: the link's number (0 at a server), the destination, and one or more datagrams of `segment_size` bytes each.
pub type Sink<'a> = dyn FnMut(u8, &Transmit, &[u8]) + 'a;

/// The capabilities of a server that takes flows of this kind as this client uses them; 0: every server does.
fn capability(kind: FlowKind) -> u64 {
    match kind {
        FlowKind::Stream | FlowKind::Messages => 0,
        FlowKind::Packets => PACKETS,
        FlowKind::Control => CONTROL | STEPS,
    }
}

impl Host {
    /// Creates a host that dials. The caller draws `seed` from a cryptographic source.
    pub fn client(seed: [u8; 32], now: Instant) -> Self {
        Self::new(EndpointConfig::default(), seed, None, now)
    }

    /// Creates a host that accepts connections. With the same `reset` key, a restarted host resets the connections whose state it has lost.
    pub fn server(seed: [u8; 32], reset: Arc<dyn HmacKey>, tls: Arc<dyn noq_proto::crypto::ServerConfig>, now: Instant) -> Self {
        let mut config = ServerConfig::with_crypto(tls);
        config.migration(true);
        Self::new(EndpointConfig::new(reset), seed, Some(Arc::new(config)), now)
    }

    fn new(mut config: EndpointConfig, seed: [u8; 32], server: Option<Arc<ServerConfig>>, now: Instant) -> Self {
        config.rng_seed(Some(seed));
        // Connection IDs of an earlier run must look valid, or the endpoint would not answer them with a reset.
        config.cid_generator(Arc::new(|| Box::new(RandomConnectionIdGenerator::new(CONNECTION_ID))));
        Self {
            endpoint: Endpoint::new(Arc::new(config), server.clone(), true),
            epoch: now,
            server,
            conns: BTreeMap::new(),
            handles: BTreeMap::new(),
            connection_count: 0,
            unadmitted: BTreeSet::new(),
            bounds: HostLimits::default(),
            offered: 0,
            unvalidated: SourceLimiter::new(HANDSHAKE_BURST, HANDSHAKE_INTERVAL, MAX_SOURCES),
            validated: SourceLimiter::new(HANDSHAKE_BURST, HANDSHAKE_INTERVAL, MAX_SOURCES),
            first_rtt: None,
            sessions: BTreeMap::new(),
            timers: BTreeSet::new(),
            touched: BTreeSet::new(),
            output_pending: BTreeSet::new(),
            dirty_bonds: BTreeSet::new(),
            events: VecDeque::new(),
            responses: VecDeque::new(),
            buffer: Vec::new(),
            scratch: BytesMut::new(),
        }
    }

    /// Server: replaces the default limits. Existing bonds and connections beyond the new limits stay.
    pub fn set_limits(&mut self, limits: HostLimits) {
        self.bounds = limits;
    }

    /// Server: announces to the clients of later paths that it takes flows of this kind, which not every server does.
    pub fn offer(&mut self, kind: FlowKind) {
        self.offered |= capability(kind);
        if kind == FlowKind::Control {
            self.offered |= DATAGRAMS;
        }
    }

    /// Client: whether the server of this bond moves flows of datagrams, too. `false` until a path has joined.
    pub fn moves_datagrams(&self, bond: BondId) -> bool {
        self.takes(bond, FlowKind::Control) && self.sessions.get(&bond).is_some_and(|session| session.capabilities & DATAGRAMS != 0)
    }

    /// Client: whether the server of this bond takes flows of this kind, which not every server does. `false` until a path has joined.
    pub fn takes(&self, bond: BondId, kind: FlowKind) -> bool {
        self.sessions.get(&bond).is_some_and(|session| session.capabilities & capability(kind) == capability(kind))
    }

    /// Server: announces to the clients of later paths that it lets flows to other hosts pass, and takes control flows about them.
    pub fn offer_waypoint(&mut self) {
        self.offer(FlowKind::Control);
        self.offered |= WAYPOINT;
    }

    /// Client: whether the server of this bond lets flows to other hosts pass. `false` until a path has joined.
    pub fn is_waypoint(&self, bond: BondId) -> bool {
        self.takes(bond, FlowKind::Control) && self.sessions.get(&bond).is_some_and(|session| session.capabilities & WAYPOINT != 0)
    }

    /// Client: sets the assumed round-trip time before the first measurement. QUIC repeats a first packet after three round trips. The default is a
    /// third of a second.
    pub fn set_first_rtt(&mut self, rtt: Duration) {
        self.first_rtt = Some(rtt);
    }

    /// Converts an instant to the clock of the bonds.
    pub fn time(&self, now: Instant) -> Time {
        Time::from_nanos(u64::try_from(now.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX)) + Duration::from_secs(1)
    }

    fn instant(&self, time: Time) -> Instant {
        self.epoch + time.since(Time::ZERO).saturating_sub(Duration::from_secs(1))
    }

    /// Client: creates a bond. Flows may be opened before a path exists. `id` and `secret` must be random.
    pub fn begin(&mut self, now: Instant, id: BondId, secret: Secret, limits: Limits) {
        let bond = Bond::new(Side::Client, limits, self.time(now));
        self.insert_session(
            id,
            Session {
                bond,
                secret,
                owner: Vec::new(),
                established: false,
                capabilities: 0,
                connections: BTreeSet::new(),
                timer: None,
                pathless_since: None,
                last_received: None,
            },
        );
    }

    /// Client: dials a path. The token of an invitation and a name are needed only if the relay does not know this client yet.
    #[allow(clippy::too_many_arguments, reason = "they describe the path")]
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
        let metrics = Arc::new(PathMetrics::default());
        let mut config = ClientConfig::new(tls);
        let mut settings = transport(RateController::factory(metrics.clone()), remote);
        if let Some(rtt) = self.first_rtt {
            settings.initial_rtt(rtt);
        }
        config.transport_config(Arc::new(settings));
        let (handle, connection) =
            self.endpoint.connect(now, config, remote, server_name).map_err(|error| DialError::Connect(remote, error.to_string()))?;
        let hello = Hello { version: VERSION, capabilities: CAPABILITIES, bond, secret, path: path.0, link, joins, backup, token, name };
        let conn = Conn { bond: Some(bond), hello: Some(hello), path, backup, ..Conn::new(now, connection, handle, metrics, link, remote) };
        Ok(self.insert_conn(conn))
    }

    /// The QUIC connection of a path, for access to the peer's key.
    pub fn connection(&self, id: ConnectionId) -> Option<&Connection> {
        self.conns.get(&id).map(|conn| &conn.connection)
    }

    /// Client: whether a connection has received anything from the other end.
    pub fn has_received(&self, id: ConnectionId) -> bool {
        self.conns.get(&id).is_some_and(|conn| conn.last_received.is_some())
    }

    /// Client: whether any current connection of a bond has received anything from the other end.
    pub fn has_received_any(&self, bond: BondId) -> bool {
        self.conns.values().any(|conn| conn.bond == Some(bond) && conn.last_received.is_some())
    }

    /// The host's own addresses that the bond's paths were received at, as far as the system reports them.
    pub fn local_addresses(&self, bond: BondId) -> BTreeSet<IpAddr> {
        let session = self.sessions.get(&bond);
        let connections = session.into_iter().flat_map(|session| &session.connections).filter_map(|id| self.conns.get(id));
        let own = |conn: &Conn| conn.connection.network_path(noq_proto::PathId::ZERO).ok()?.local_ip();
        connections.filter_map(own).map(|ip| ip.to_canonical()).collect()
    }

    /// Server: the paths of a bond over which something may be sent, with the addresses at both ends. The other end has proved that it receives at its
    /// address: the handshake needed it. A path that has changed its address since is not among them.
    pub fn proven_paths(&self, bond: BondId) -> Vec<ProvenPath> {
        let session = self.sessions.get(&bond);
        let connections = session.into_iter().flat_map(|session| &session.connections).filter_map(|id| self.conns.get(id));
        let proven = |conn: &Conn| {
            let now = conn.connection.network_path(noq_proto::PathId::ZERO).ok()?;
            let same = now.remote().ip() == conn.remote.ip() && conn.stage == Stage::Joined;
            let (remote, local) = (conn.remote.ip().to_canonical(), now.local_ip()?.to_canonical());
            same.then_some(ProvenPath { path: conn.path, remote, local, rtt: conn.rtt() })
        };
        connections.filter_map(proven).collect()
    }

    /// Address of the other end of a path.
    pub fn remote(&self, bond: BondId, path: PathId) -> Option<IpAddr> {
        let connections = self.sessions.get(&bond)?.connections.iter().filter_map(|id| self.conns.get(id));
        connections.filter(|conn| conn.path == path).map(|conn| conn.remote.ip().to_canonical()).next()
    }

    /// A bond, for use by the driver. The next [`Self::drive`] processes it.
    pub fn bond(&mut self, id: BondId) -> Option<&mut Bond> {
        let session = self.sessions.get_mut(&id)?;
        self.dirty_bonds.insert(id);
        Some(&mut session.bond)
    }

    /// The existing bonds.
    pub fn bonds(&self) -> impl Iterator<Item = (BondId, &Bond)> {
        self.sessions.iter().map(|(id, session)| (*id, &session.bond))
    }

    /// Ends a bond and closes its connections.
    pub fn end(&mut self, now: Instant, id: BondId, reason: &str) {
        let Some(session) = self.sessions.remove(&id) else { return };
        if let Some(at) = session.timer {
            self.timers.remove(&(at, Timer::Bond(id)));
        }
        // Without this code a client would wait for the bond to return.
        let code = if self.server.is_some() { refusals::FORGOTTEN } else { 0 };
        for connection in session.connections {
            self.close_with(now, connection, code, reason);
        }
        // Connections that are still in the handshake for this bond.
        let greeting: Vec<ConnectionId> = self.conns.iter().filter(|(_, conn)| conn.bond == Some(id)).map(|(at, _)| *at).collect();
        greeting.into_iter().for_each(|at| self.close_with(now, at, code, reason));
        self.dirty_bonds.remove(&id);
        self.events.push_back(HostEvent::Ended { bond: id, reason: reason.to_owned() });
    }

    /// Closes one connection and its path.
    pub fn close(&mut self, now: Instant, id: ConnectionId, reason: &str) {
        self.close_with(now, id, 0, reason);
    }

    fn close_with(&mut self, now: Instant, id: ConnectionId, code: u64, reason: &str) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.close_pending |= !conn.connection.is_closed();
            conn.connection.close(now, VarInt::try_from(code).unwrap_or_default(), Bytes::copy_from_slice(reason.as_bytes()));
            self.touched.insert(id);
            self.on_lost(now, id, reason, false);
        }
    }

    /// Client: the link of a connection has another local address. The connection continues from the new one (RFC 9000, 9.2): until now its packets asked the
    /// system for the old one as their source, which it refuses.
    pub fn change_address(&mut self, now: Instant, id: ConnectionId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.connection.handle_network_change(None, now);
        self.dirty_bonds.extend(conn.bond);
        self.touched.insert(id);
        self.output_pending.insert(id);
    }

    /// Whether a close packet has not been sent yet: it waits for its turn as any packet does.
    pub fn has_pending_closes(&self) -> bool {
        self.conns.values().any(|conn| conn.close_pending)
    }

    /// Returns the oldest pending event.
    pub fn poll_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// When to call [`Self::handle_timeout`] next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Processes the passage of time. Call [`Self::drive`] afterwards.
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
                        self.close(now, id, "no first message arrived in time");
                    }
                    self.touched.insert(id);
                }
                Timer::Bond(id) => {
                    let Some(session) = self.sessions.get_mut(&id) else { continue };
                    session.timer = None;
                    session.bond.handle_timeout(time);
                    if self.server.is_some()
                        && session.pathless_since.is_some_and(|since| now.saturating_duration_since(since) >= IDLE_TIMEOUT)
                    {
                        self.end(now, id, "the bond had no path for too long");
                    }
                    self.dirty_bonds.insert(id);
                }
            }
        }
    }

    /// Processes a UDP payload that was received over `link`.
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
                let Some(id) = self.handles.get(&handle.0).copied() else { return };
                if let Some(conn) = self.conns.get_mut(&id) {
                    conn.connection.handle_event(event);
                    conn.last_received = Some(now);
                    self.touched.insert(id);
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.accept(now, link, incoming),
            Some(DatagramEvent::Response(transmit)) => self.responses.push_back((link, transmit, self.buffer.clone())),
            None => {}
        }
    }

    // Driving.

    /// Moves received data from connections to bonds. The driver can then read flows, and write to flows that waited for room, before it calls
    /// [`Self::drive`].
    pub fn process_input(&mut self, now: Instant) {
        while let Some(id) = self.touched.pop_first() {
            self.process_connection(now, id);
            if let Some(bond) = self.conns.get(&id).and_then(|conn| conn.bond) {
                self.collect_events(bond);
            }
        }
    }

    /// Moves all pending data between connections and bonds, and out through `sink`. Call it after every input.
    pub fn drive(&mut self, now: Instant, sink: &mut Sink<'_>) {
        for (link, transmit, data) in self.responses.drain(..) {
            sink(link, &transmit, &data);
        }
        self.process_input(now);
        while let Some(id) = self.dirty_bonds.pop_first() {
            self.drive_bond(now, id, sink);
        }
        // Connections without a bond, and those whose bond has just ended.
        while let Some(id) = self.output_pending.pop_first() {
            self.flush_conn(now, id, true, sink);
        }
    }

    /// Processes the pending events and datagrams of a connection.
    fn process_connection(&mut self, now: Instant, id: ConnectionId) {
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
                        conn.write_greeting(&hello.encode());
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
            conn.key_mismatch = is_another_key(&reason);
            let ended = |close: &noq_proto::ApplicationClose| u64::from(close.error_code) == refusals::FORGOTTEN;
            if self.server.is_none() && matches!(&reason, ConnectionError::ApplicationClosed(close) if ended(close)) {
                conn.refused = Some(refusals::FORGOTTEN);
            }
            self.on_lost(now, id, &reason.to_string(), forgotten);
            // A client that closes its last path does not return.
            if let Some(bond) = bond.filter(|bond| left && self.server.is_some() && self.has_no_path(*bond)) {
                self.end(now, bond, "the client ended the bond");
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
                self.dirty_bonds.insert(bond);
                if let Some(error) = broken {
                    self.end(now, bond, &error.to_string());
                }
            }
            // Datagrams before admission or after the end are not valid. Drop them.
            None => while conn.connection.datagrams().recv().is_some() {},
        }
        self.output_pending.insert(id);
    }

    fn has_no_path(&self, bond: BondId) -> bool {
        self.sessions.get(&bond).is_some_and(|session| session.connections.is_empty())
    }

    /// A connection ended or is ending. Removes its path and reports the event once.
    fn on_lost(&mut self, now: Instant, id: ConnectionId, reason: &str, forgotten: bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if conn.loss_reported {
            return;
        }
        conn.loss_reported = true;
        let joined = std::mem::replace(&mut conn.stage, Stage::Closed) == Stage::Joined;
        let event = HostEvent::Lost {
            connection: id,
            bond: conn.bond,
            path: conn.path,
            reason: reason.to_owned(),
            refused: conn.refused,
            forgotten,
            key_mismatch: conn.key_mismatch,
        };
        self.events.push_back(event);
        let (last_received, Some(bond)) = (conn.last_received, conn.bond) else { return };
        let Some(session) = self.sessions.get_mut(&bond) else { return };
        session.last_received = session.last_received.max(last_received);
        if session.connections.remove(&id) {
            // A connection that has not joined may have claimed the identifier of another connection's path.
            if joined {
                session.bond.remove_path(conn.path);
            }
            self.dirty_bonds.insert(bond);
        }
        self.end_if_unreachable(now, bond, joined);
    }

    /// Client: ends a bond without paths that has received nothing for too long and has just failed to get a new path. Without a link nothing is
    /// dialled, and the bond stays until the link returns.
    fn end_if_unreachable(&mut self, now: Instant, bond: BondId, joined: bool) {
        let Some(session) = self.sessions.get(&bond).filter(|session| !joined && session.established) else { return };
        let silent = session.last_received.is_some_and(|last_received| now.saturating_duration_since(last_received) >= IDLE_TIMEOUT);
        if self.server.is_none() && session.connections.is_empty() && silent {
            self.end(now, bond, "nothing was received from the other end for too long");
        }
    }

    /// Fills all paths of a bond with data to send.
    fn drive_bond(&mut self, now: Instant, id: BondId, sink: &mut Sink<'_>) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        let connections: Vec<ConnectionId> = session.connections.iter().copied().collect();
        if connections.is_empty() {
            session.pathless_since.get_or_insert(now);
        } else {
            session.pathless_since = None;
        }
        loop {
            let mut sent = false;
            for connection in &connections {
                let touched = self.output_pending.remove(connection);
                sent |= self.flush_conn(now, *connection, touched, sink);
            }
            // Under a packet scheduler, a path that was polled before may be chosen next.
            if !sent || self.sessions.get(&id).is_none_or(|session| !session.bond.has_packet_scheduler()) {
                break;
            }
        }
        self.collect_events(id);
        self.set_bond_timer(now, id);
    }

    fn collect_events(&mut self, id: BondId) {
        while let Some(event) = self.sessions.get_mut(&id).and_then(|session| session.bond.poll_event()) {
            self.events.push_back(HostEvent::Bond(id, event));
        }
    }

    /// Sends the pending packets of a connection, and data of its bond until the path is full. Returns whether it sent anything. A connection without
    /// new input and without new data is not polled.
    fn flush_conn(&mut self, now: Instant, id: ConnectionId, touched: bool, sink: &mut Sink<'_>) -> bool {
        let time = self.time(now);
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        let held = conn.held(now);
        let mut ask = touched && held.is_none();
        let (mut any, mut asked) = (false, ask);
        let mut bond = conn.bond.filter(|_| conn.stage == Stage::Joined).and_then(|bond| self.sessions.get_mut(&bond));
        loop {
            if let Some(session) = &mut bond {
                ask |= conn.fill(time, &mut session.bond, held.is_some(), &mut self.scratch);
                asked |= ask;
            }
            if !std::mem::take(&mut ask) {
                break;
            }
            let mut sent = false;
            self.buffer.clear();
            while let Some(transmit) = conn.connection.poll_transmit(now, BATCH, &mut self.buffer) {
                sink(conn.link, &transmit, &self.buffer[..transmit.size]);
                conn.spend(transmit.size);
                self.buffer.clear();
                (conn.close_pending, sent) = (false, true);
            }
            any |= sent;
            if !sent || bond.is_none() {
                break;
            }
        }
        if !asked {
            if held.is_some() {
                set_timer(&mut self.timers, &mut conn.timer, held, Timer::Connection(id));
            }
            return false;
        }
        while let Some(event) = conn.connection.poll_endpoint_events() {
            if let Some(answer) = self.endpoint.handle_event(conn.handle, event) {
                conn.connection.handle_event(answer);
            }
        }
        let gone = conn.connection.is_drained();
        let timer = if gone { None } else { [conn.connection.poll_timeout(), conn.pending_deadline()].into_iter().flatten().min() };
        let timer = timer.map(|at| conn.held(now).map_or(at, |until| at.max(until)));
        set_timer(&mut self.timers, &mut conn.timer, timer, Timer::Connection(id));
        if gone {
            self.on_lost(now, id, "closed", false);
            self.remove_conn(id);
        }
        any
    }

    fn set_bond_timer(&mut self, now: Instant, id: BondId) {
        let Some(session) = self.sessions.get(&id) else { return };
        let idle = session.pathless_since.filter(|_| self.server.is_some()).map(|since| since + IDLE_TIMEOUT);
        let own = session.bond.poll_timeout().map(|time| self.instant(time).max(now));
        let timer = [idle, own].into_iter().flatten().min();
        let Some(session) = self.sessions.get_mut(&id) else { return };
        set_timer(&mut self.timers, &mut session.timer, timer, Timer::Bond(id));
    }

    fn insert_conn(&mut self, conn: Conn) -> ConnectionId {
        self.connection_count += 1;
        let id = ConnectionId(self.connection_count);
        self.handles.insert(conn.handle.0, id);
        self.conns.insert(id, conn);
        self.touched.insert(id);
        id
    }

    fn remove_conn(&mut self, id: ConnectionId) {
        let handle = self.conns.remove(&id).map(|conn| conn.handle.0);
        // QUIC may have reused the handle already.
        if let Some(handle) = handle.filter(|handle| self.handles.get(handle) == Some(&id)) {
            self.handles.remove(&handle);
        }
        self.unadmitted.remove(&id);
    }

    fn insert_session(&mut self, id: BondId, session: Session) {
        self.sessions.insert(id, session);
        self.dirty_bonds.insert(id);
    }
}

/// Replaces or removes a timer.
fn set_timer(timers: &mut BTreeSet<(Instant, Timer)>, own: &mut Option<Instant>, at: Option<Instant>, timer: Timer) {
    let old = std::mem::replace(own, at);
    if old != at {
        old.map(|at| timers.remove(&(at, timer)));
        at.map(|at| timers.insert((at, timer)));
    }
}

/// Whether this end rejected the other's key: TLS alert `access_denied` (49), which rustls sends when a verifier rejects the certificate.
fn is_another_key(reason: &ConnectionError) -> bool {
    matches!(reason, ConnectionError::TransportError(error) if error.code == TransportErrorCode::crypto(49))
}
