//! The interface of a steering backend: the Linux BPF programs, or the fake in tests.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use braid_decide::connection::{LoadTable, Mode};
use braid_decide::late::{LinkState, Totals};
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{
    Affinity, ByteCount, Class, Direction, Family, FlowId, LinkIndex, LinkSet, MAX_LINKS, Mac, PerDirection, PerFamily, Protocol, Rate,
    SequenceNumbers, Time,
};
use ipnet::IpNet;

/// An operation of the steering backend failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {reason}")]
pub struct SteeringError {
    /// The operation, as in "write the policy rules".
    pub action: &'static str,
    /// Error of the system, and the remedy if one is known.
    pub reason: String,
}

/// A link in its slot, with the inputs of the connection rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteerLink {
    /// Interface index.
    pub index: LinkIndex,
    /// Current name of the interface.
    pub name: String,
    /// Route metric; the system prefers the lowest.
    pub rank: u32,
    /// Source address of unconnected IPv4 datagrams.
    pub source4: Option<Ipv4Addr>,
    /// Source address of unconnected IPv6 datagrams.
    pub source6: Option<Ipv6Addr>,
    /// Capacity.
    pub rate: PerDirection<Rate>,
    /// Price per byte, in a common unit of all links.
    pub price: u64,
    /// Virtual time of one flow.
    pub step: u64,
}

/// All inputs of a decision except the loads. They are applied atomically.
#[derive(Debug, Clone, PartialEq)]
pub struct SteerParams {
    /// How a link is chosen. Its target applies to flows whose direction has none in `targets`.
    pub mode: Mode,
    /// Target throughput of the whole load by direction, for [`Mode::CheapestInTime`] (OPERETTA's `T_target`), since capacities differ by direction.
    pub targets: PerDirection<Option<Rate>>,
    /// Number of the configured scheduler, recorded in each flow.
    pub scheduler: u8,
    /// Expected bytes of a flow of an unknown application.
    pub default_demand: ByteCount,
    /// Affinity without a rule; `None`: by class.
    pub affinity: Option<Affinity>,
    /// The links by slot.
    pub links: [Option<SteerLink>; MAX_LINKS],
    /// Slots that may get flows now, by family.
    pub usable: PerFamily<LinkSet>,
    /// Slots that are used only while no other slot is usable.
    pub backup: LinkSet,
    /// The policy's rules, at most 64; the first match applies.
    pub rules: Vec<SteerRule>,
    /// Classes whose connections are redirected, unless a rule decides otherwise.
    pub redirected: Vec<Class>,
    /// Whether connections to hosts that run Braid ([`Steering::set_servers`]) are redirected, unless a rule decides otherwise. UDP is not:
    /// most protocols over UDP would treat the changed order of datagrams as loss.
    pub peer_direct: bool,
    /// Whether flows that match no rule leave through a relay or fail, as those of rules do that are [`confined`](SteerRule::confined).
    pub confined: bool,
}

impl FlowRow {
    /// Whether a program of this machine sends it through the virtual interface.
    pub fn is_through_virtual_device(&self) -> bool {
        self.forwarded && self.app.client_address().is_none()
    }

    /// Port of the service, at the other end or here.
    pub fn service(&self) -> u16 {
        if self.accepted { self.local.1 } else { self.remote.1 }
    }
}

impl RedirectedFlow {
    /// The facts about a flow by which rules are found, as if it had been redirected.
    pub fn of(row: &FlowRow) -> Self {
        Self {
            id: row.id,
            remote: SocketAddr::new(row.remote.0, row.service()),
            app: row.app.clone(),
            process: row.process,
            user: row.user,
            cgroup: row.cgroup,
            class: row.class,
            rule: row.rule,
            direction: row.direction,
            demand: row.demand,
            started: row.started,
            filtered: row.filtered,
            held: false,
            forwarded: row.forwarded,
        }
    }

    /// Whether a program of this machine sends it through the virtual interface.
    pub fn is_through_virtual_device(&self) -> bool {
        self.forwarded && self.app.client_address().is_none()
    }
}

impl AppId {
    /// Identity of a client of the gateway, whose programs are unknown: its flows count as those of one application.
    pub fn client(address: IpAddr) -> Self {
        Self { exe: ExeId { device: CLIENT_DEVICE, inode: 0 }, name: address.to_string() }
    }

    /// Address of the client; `None` for a program.
    pub fn client_address(&self) -> Option<IpAddr> {
        (self.exe.device == CLIENT_DEVICE).then(|| self.name.parse().ok())?
    }
}

/// `device` of the [`ExeId`] of a client. No file system has this number.
const CLIENT_DEVICE: u64 = u64::MAX;

impl SteerParams {
    /// Whether anything may be redirected other than TCP connections to hosts that run Braid.
    pub fn redirects(&self) -> bool {
        let redirects = |rule: &SteerRule| rule.redirect == Some(RedirectPolicy::Redirect) || rule.peer_direct == PeerDirect::All;
        !self.redirected.is_empty() || self.rules.iter().any(redirects)
    }

    /// The same parameters without redirection.
    pub fn without_redirection(&self) -> Self {
        let mut direct = Self { redirected: Vec::new(), peer_direct: false, ..self.clone() };
        for rule in &mut direct.rules {
            rule.redirect = rule.redirect.map(|_| RedirectPolicy::Direct);
            rule.peer_direct = PeerDirect::Nothing;
        }
        direct
    }

    /// How a link is chosen for a flow in `direction`.
    pub fn mode_for(&self, direction: Direction) -> Mode {
        match self.mode {
            Mode::CheapestInTime { target } => Mode::CheapestInTime { target: self.targets[direction].or(target) },
            other => other,
        }
    }
}

/// Identity of an executable in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExeId {
    /// Device of its file system, as `st_dev`.
    pub device: u64,
    /// Inode of the file.
    pub inode: u64,
}

/// Identity of an application in the kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AppId {
    /// Its executable.
    pub exe: ExeId,
    /// Name of the process, at most 15 bytes.
    pub name: String,
}

/// Conditions of a rule; all given ones must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SteerMatch {
    /// One of these executables (the installed one, and replaced ones that still run); an empty list matches nothing.
    pub exe: Option<Vec<ExeId>>,
    /// Name of the process.
    pub name: Option<String>,
    /// Remote port.
    pub port: Option<u16>,
    /// Transport protocol.
    pub protocol: Option<Protocol>,
    /// Prefix of the remote address.
    pub destination: Option<IpNet>,
    /// Id and depth below the root of a cgroup that contains the program, directly or not. `Some(None)`: the cgroup does not exist; matches
    /// nothing.
    pub cgroup: Option<Option<(u64, u32)>>,
    /// User id.
    pub user: Option<u32>,
    /// Class of the application, as far as the backend has it when the flow starts.
    pub class: Option<Class>,
    /// Prefix of the client's address: forwarded flows only.
    pub client: Option<IpNet>,
    /// Hardware address of the client: forwarded flows only.
    pub mac: Option<Mac>,
}

/// What the kernel does with a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedirectPolicy {
    /// It stays on its link.
    Direct,
    /// It is redirected to the daemon if the daemon accepts connections; else it stays on its link. TCP only.
    Redirect,
}

/// Which flows to hosts that run Braid are redirected to the daemon. A flow that may use only one link never is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PeerDirect {
    /// According to [`SteerParams::peer_direct`].
    #[default]
    Usual,
    /// TCP and UDP flows.
    All,
    /// None for this reason alone.
    Nothing,
}

/// One rule of the policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SteerRule {
    /// Conditions.
    pub matching: SteerMatch,
    /// Whether Braid leaves these flows alone.
    pub exclude: bool,
    /// Slots that the flows may use, if limited.
    pub links: Option<LinkSet>,
    /// Slots that the flows use while one of them is usable.
    pub prefer: Option<LinkSet>,
    /// Class of the flows.
    pub class: Option<Class>,
    /// Affinity of the flows.
    pub affinity: Option<Affinity>,
    /// Whether the flows are redirected; `None`: by class ([`SteerParams::redirected`]).
    pub redirect: Option<RedirectPolicy>,
    /// Which of them are bonded directly to a host that runs Braid; none with [`RedirectPolicy::Direct`].
    pub peer_direct: PeerDirect,
    /// Whether flows of clients of protocols other than TCP and UDP are never redirected, because another relay takes their packets than the rule's.
    pub no_packets: bool,
    /// Whether the flows leave through a relay or fail. They are redirected then, whatever else holds.
    pub confined: bool,
}

/// A flow that was redirected to the daemon.
#[derive(Debug, Clone, PartialEq)]
pub struct RedirectedFlow {
    /// Id: the socket cookie.
    pub id: FlowId,
    /// Destination that the program requested.
    pub remote: SocketAddr,
    /// Its application.
    pub app: AppId,
    /// The process that opened it.
    pub process: u32,
    /// That process's user.
    pub user: u32,
    /// That process's cgroup.
    pub cgroup: u64,
    /// Its class.
    pub class: Class,
    /// Index of the matching rule.
    pub rule: Option<u8>,
    /// Expected direction of most bytes.
    pub direction: Direction,
    /// Expected number of bytes.
    pub demand: ByteCount,
    /// When the program started the flow.
    pub started: Time,
    /// Foreign BPF programs filter its cgroup: it may go to a relay, but not directly to a server that runs Braid.
    pub filtered: bool,
    /// It was redirected because it was unknown whether its destination runs Braid ([`Steering::set_hold`]).
    pub held: bool,
    /// Whether the switch has handed it over, for a client or from the virtual interface.
    pub forwarded: bool,
}

/// A flow, as the steering backend reports it.
#[derive(Debug, Clone, PartialEq)]
pub struct FlowRow {
    /// Id: the socket cookie.
    pub id: FlowId,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Address family of its packets.
    pub family: Family,
    /// Its application.
    pub app: AppId,
    /// The process that opened it.
    pub process: u32,
    /// The LAN device of its client; `None`: it is no client's flow.
    pub lan: Option<LinkIndex>,
    /// That process's user.
    pub user: u32,
    /// That process's cgroup.
    pub cgroup: u64,
    /// Local address and port; the address is unspecified if unknown. Of a forwarded flow, those of its client.
    pub local: (IpAddr, u16),
    /// Whether the other host opened it. The port of its service is the local one then.
    pub accepted: bool,
    /// If so: retransmission timeouts since the other host last acknowledged something. Of other flows the kernel reports each.
    pub timeouts: u8,
    /// Whether the switch forwards it, for a client or through the virtual interface: it has no socket that Braid could change.
    pub forwarded: bool,
    /// Remote address and port.
    pub remote: (IpAddr, u16),
    /// Slot of its link at the start.
    pub slot: usize,
    /// Its link.
    pub link: LinkIndex,
    /// Expected direction of most bytes.
    pub direction: Direction,
    /// Class at its start.
    pub class: Class,
    /// Number of the scheduler that placed it.
    pub scheduler: u8,
    /// Index of the matching rule.
    pub rule: Option<u8>,
    /// When it started.
    pub started: Time,
    /// When this row was read.
    pub read_at: Time,
    /// Expected number of bytes at its start.
    pub demand: ByteCount,
    /// Bytes counted for it in its link's load.
    pub reserved: ByteCount,
    /// Bytes received.
    pub rx: ByteCount,
    /// Bytes sent.
    pub tx: ByteCount,
    /// Smoothed RTT in microseconds, if known.
    pub rtt_us: Option<u32>,
    /// Round trip that the kernel measured as receiver, in microseconds; only of TCP flows that receive. During a download `rtt_us` hardly changes.
    pub receive_rtt_us: Option<u32>,
    /// Retransmitted segments; TCP only.
    pub retransmissions: Option<u32>,
    /// Segments sent; TCP only.
    pub segments_out: Option<u32>,
    /// Delivery rate sampled by the kernel, while not limited by the application.
    pub delivery_rate: Option<Rate>,
    /// Whether its handshake is unanswered.
    pub connecting: bool,
    /// Since when its SYN has been unanswered, if the connect may move to another link ([`Steering::move_connects`]).
    pub unanswered_since: Option<Time>,
    /// How often its unanswered connect moved to another link.
    pub moves: u8,
    /// Whether its connect was moved and its socket still has the temporary settings of the move.
    pub moving: bool,
    /// Foreign BPF programs filter its cgroup, so it goes direct although its destination runs Braid.
    pub filtered: bool,
    /// Whether [`Steering::shape`] can limit it: a TCP flow. Of a forwarded one the handshake must have been seen.
    pub limitable: bool,
    /// Whether its packets take the fast path ([`Steering::set_fast_path`]).
    pub fast: bool,
}

/// A forwarded flow, with what the fast path must know of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FastFlow {
    /// Its transport protocol: TCP or UDP.
    pub protocol: Protocol,
    /// The client's address and port, or those of the program that uses the virtual interface.
    pub client: SocketAddr,
    /// The same as connection tracking knows them.
    pub tracked: SocketAddr,
    /// The remote address and port.
    pub remote: SocketAddr,
    /// Index of its LAN device, or of the virtual interface.
    pub lan: LinkIndex,
    /// Whether the client is a program of this machine.
    pub own: bool,
    /// Slot of its link.
    pub slot: usize,
    /// Index of its link.
    pub link: LinkIndex,
    /// Name of its link.
    pub device: String,
    /// Maximum packet size of its link, in bytes.
    pub mtu: u32,
    /// Address of its link. With another one, connection tracking has another translation.
    pub source: IpAddr,
}

/// Maximum number of flows in the fast path.
pub const MAX_FAST: usize = 4096;

// A flow of `Steering::shape`, and its limits.
pub use braid_decide::shaping::{MAX_SHAPES, Progress as ShapedFlow, Shape};

/// Result of [`Steering::shape`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ShapeStep {
    /// Progress of the listed flows that still exist.
    pub flows: Vec<ShapedFlow>,
    /// How long the system was busy with it.
    pub took: Duration,
    /// Whether all sockets have the limits of this step. While a socket is locked, they get them later.
    pub complete: bool,
}

/// An event of the steering backend.
#[derive(Debug, Clone, PartialEq)]
pub enum SteeringEvent {
    /// A flow ended, with its final counters.
    Ended(Box<FlowRow>),
    /// A new application made its first connect.
    NewApp {
        /// The application.
        app: AppId,
        /// Id of one of its processes, which may have exited already.
        process: u32,
        /// Cgroup of that process.
        cgroup: u64,
        /// Class by its name.
        class: Class,
    },
    /// A segment of a flow was not acknowledged in time.
    Symptom {
        /// Link of the flow.
        link: LinkIndex,
        /// Address family of the flow.
        family: Family,
        /// Whether it was the SYN.
        connecting: bool,
        /// Number of retransmissions so far.
        retries: u32,
        /// Remote address and port.
        remote: (IpAddr, u16),
    },
}

/// Evidence from connections about a link and family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signs {
    /// Handshakes answered since the slot was assigned.
    pub answered: u64,
    /// Time of the last answer, computed from the connection's start and its RTT, since it is reported later.
    pub answered_at: Time,
    /// Remote address and port of the last answer.
    pub remote: Option<(IpAddr, u16)>,
    /// Segments not acknowledged in time.
    pub timeouts: u64,
}

/// Counters since the backend was loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SteeringCounters {
    /// Flows that got a link.
    pub steered: u64,
    /// Connects and datagrams that were left alone.
    pub left_alone: u64,
    /// Flows denied by a strict rule.
    pub denied: u64,
    /// Sockets that the kernel refused to steer.
    pub failed: u64,
    /// Flows that were steered but not tracked, because a map was full.
    pub untracked: u64,
    /// Events lost because the ring was full.
    pub lost_events: u64,
    /// Ended flows.
    pub ended: u64,
    /// Connections redirected to the daemon.
    pub redirected: u64,
    /// Connections that should have been redirected but went direct, because a map was full or no path was available.
    pub not_redirected: u64,
    /// Unanswered connects moved to another link.
    pub moved: u64,
    /// Forwarded flows that got a link.
    pub forwarded: u64,
    /// Forwarded flows that followed the system's routes, because the table was full or their client had too many.
    pub overflowed: u64,
    /// Packets of forwarded flows that took the fast path ([`Steering::set_fast_path`]).
    pub fast_packets: u64,
}

/// A device at which the switch acts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    /// Its index.
    pub index: LinkIndex,
    /// Its name.
    pub name: String,
    /// What is behind it.
    pub side: PortSide,
}

/// Addresses and ports of packets in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ends {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Where they come from.
    pub source: SocketAddr,
    /// Where they go to.
    pub destination: SocketAddr,
}

impl Ends {
    /// Those of a flow, as its packets have them.
    pub fn of(row: &FlowRow) -> Self {
        let end = |(ip, port): (IpAddr, u16)| SocketAddr::new(ip.to_canonical(), port);
        Self { protocol: row.protocol, source: end(row.local), destination: end(row.remote) }
    }

    /// The other direction.
    pub fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source, ..self }
    }
}

/// What becomes of the packets of a moved flow, in one direction (mirrored rewriting; Yap's thesis, 2.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewrite {
    /// Source afterwards.
    pub source: SocketAddr,
    /// Destination afterwards.
    pub destination: SocketAddr,
    /// The device over which they leave, or by which they seem to arrive; `None`: they leave over the flow's own link, or arrive as they are.
    pub device: Option<LinkIndex>,
    /// They are for this machine, or pass it.
    pub arrives: bool,
    /// They arrive, and leave over the device, for another host; without one they are dropped.
    pub passes: bool,
    /// They leave over a device whose packets have no Ethernet headers.
    pub bare: bool,
    /// If they arrive: the only device over which they may; `None`: any.
    pub from: Option<LinkIndex>,
    /// Their firewall mark afterwards.
    pub mark: u32,
    /// If they leave: the sequence numbers with which the connection began, if known. Another connection with the same addresses does not move.
    pub numbers: Option<SequenceNumbers>,
}

impl Rewrite {
    /// The packets of this machine with these ends leave as they are.
    pub fn unchanged(ends: &Ends) -> Self {
        Self {
            source: ends.source,
            destination: ends.destination,
            device: None,
            arrives: false,
            passes: false,
            bare: false,
            from: None,
            mark: 0,
            numbers: None,
        }
    }
}

/// What the system knows about a moved flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MovedSocket {
    /// Whether its socket does as its entry says. One that its program bound to a device or marked does not, nor one that somebody keeps locked.
    pub follows: bool,
    /// Of datagrams: whether its socket has a source address before their way is known.
    pub has_source: bool,
    /// Whether the other host does not know the connection by its addresses on the way: it answered with a reset, which was dropped. Once it was read, it is `false` until the next reset.
    pub refused: bool,
    /// The sequence numbers with which it began, or the proof that came last in a datagram; `None`: they are not known yet.
    pub numbers: Option<SequenceNumbers>,
    /// What a segment of it without data says; `None`: that is not known yet.
    pub segment: Option<Segment>,
    /// When the last packet arrived with the addresses of its socket.
    pub home: Option<Time>,
    /// When the last packet arrived with those on the way.
    pub moved: Option<Time>,
    /// Addresses on the way, from this machine, with which somebody begins another connection. Once they were read, `None` until the next attempt.
    pub claimed: Option<Ends>,
    /// How many times in a row its retransmission timer has doubled.
    pub doublings: u32,
}

/// Links whose packets are bound late (`decide::late`; Yap's thesis, 2.4).
#[derive(Debug, Clone, PartialEq)]
pub struct LatePlan {
    /// How many full packets may be below the binding point.
    pub below: u32,
    /// The links by slot.
    pub links: BTreeMap<usize, LateLink>,
    /// The device through which moved flows leave, if there is one.
    pub departure: Option<LinkIndex>,
    /// The flows to which other terms apply than to the rest: weight 1, and the link over which their packets leave already.
    pub flows: BTreeMap<Ends, LateFlow>,
}

/// A link of a [`LatePlan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LateLink {
    /// Its index.
    pub index: LinkIndex,
    /// Its name.
    pub name: String,
    /// Its hardware address.
    pub mac: Mac,
    /// How fast it is.
    pub state: LinkState,
}

/// A flow of a [`LatePlan`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LateFlow {
    /// Its weight among the flows of a link.
    pub weight: f64,
    /// It is moved: the slot of the link over which its packets leave.
    pub moved: Option<usize>,
}

/// What waits, and what became of packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LateState {
    /// Packets that wait.
    pub packets: usize,
    /// Their bytes.
    pub bytes: ByteCount,
    /// What became of the others.
    pub totals: Totals,
}

/// What a TCP segment without data says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Sequence number of the first byte that is not acknowledged.
    pub unacknowledged: u32,
    /// Sequence number of the next byte that is expected.
    pub expected: u32,
    /// The window, as in the segment's header.
    pub window: u16,
}

/// A socket whose retransmission timer has doubled while its link was dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hasten {
    /// Its addresses and ports.
    pub own: Ends,
    /// Sequence number of the first byte that is not acknowledged.
    pub unacknowledged: u32,
    /// How many times in a row the timer has doubled.
    pub doublings: u32,
}

/// A packet of a running flow that no program gets, on a way that the flow may take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keepalive {
    /// Its addresses and ports.
    pub way: Ends,
    /// Name of the device over which it leaves.
    pub device: String,
    /// Its firewall mark.
    pub mark: u32,
    /// What it says.
    pub content: Content,
}

/// What a [`Keepalive`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// A segment without data and with a byte number that was acknowledged: both ends of the connection ignore it (RFC 9293, 3.8.4).
    Segment(Segment),
    /// A datagram that Braid at the other end takes (`BRAID_MESSAGE`), with the flow's proof: whoever repeats it later receives the flow's datagrams. `None`: of a flow without
    /// one, which a program with the right to do so moves.
    Datagram(Option<SequenceNumbers>),
}

/// Maximum number of flows of datagrams of this machine that move, or may move at any time. Each has a routing rule while it has moved.
pub const MAX_DATAGRAM_FLOWS: usize = 64;

/// Maximum number of entries of [`Steering::set_rewrites`].
pub const MAX_REWRITES: usize = 65_536;

/// What is behind a [`Port`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PortSide {
    /// Clients of a LAN.
    Lan,
    /// Clients of a LAN, at a port of its bridge. Behind the bridge a packet no longer shows the socket of a container.
    Member,
    /// A link, over which flows of the LAN leave.
    Link,
    /// Programs of this machine: the virtual interface. Packets have its address.
    Programs,
    /// The other end of the virtual interface. Packets have the [`twin`](braid_decide::virtual_device::twin) of its address.
    Switch,
    /// A link over which moved flows arrive.
    Arrivals,
    /// The device through which the packets of this machine's moved flows leave.
    Departures,
    /// A link whose packets wait in a queue until it can take them.
    Late,
}

/// A client of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientRow {
    /// Its address.
    pub address: IpAddr,
    /// Its hardware address; `None` if the LAN device has none.
    pub mac: Option<Mac>,
    /// The LAN device.
    pub lan: LinkIndex,
    /// When its last flow began.
    pub seen: Time,
}

/// Expected bytes of an application's flows to one port. The backend keeps it (DBAS eq. 1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemandEstimate {
    /// The application.
    pub app: AppId,
    /// Remote port.
    pub port: u16,
    /// Received bytes.
    pub down: ByteCount,
    /// Sent bytes.
    pub up: ByteCount,
    /// Number of flows behind the estimate.
    pub count: u64,
    /// Time of the last change.
    pub updated: Time,
}

/// A SYN that is unanswered for this long is retried over another link (`BRAID_UNANSWERED_NS`). The kernel retransmits a SYN after one
/// second (RFC 6298, section 2). Half of that leaves the daemon enough time, and most paths enough to answer.
pub const UNANSWERED: Duration = Duration::from_millis(500);

/// Load of bonded flows on a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BondedLoad {
    /// Remaining bytes over this link.
    pub load: PerDirection<ByteCount>,
    /// Number of bonded flows.
    pub flows: u32,
}

/// Load of bonded flows by slot.
pub type BondedLoads = [BondedLoad; MAX_LINKS];

/// Function that dumps the flows, on any thread.
pub type Dump<W> = Box<dyn FnOnce() -> Result<W, SteeringError> + Send>;

/// A steering backend. All calls are quick and do not block. Dumping thousands of flows takes milliseconds and may run on another thread.
pub trait Steering {
    /// Result of a dump.
    type Dumped: Send + 'static;
    /// Sends a heartbeat; without it steering stops within two seconds.
    fn heartbeat(&mut self, now: Time) -> Result<(), SteeringError>;
    /// Applies new parameters and rules atomically.
    fn set_params(&mut self, params: &SteerParams) -> Result<(), SteeringError>;
    /// Replaces the prefix map. The longest prefix decides: `true` if the destination may be steered.
    fn set_prefixes(&mut self, family: Family, map: &[(IpNet, bool)]) -> Result<(), SteeringError>;
    /// Replaces the map of resolvers, which are reached through the links of their mask.
    fn set_resolvers(&mut self, resolvers: &[(IpAddr, LinkSet)]) -> Result<(), SteeringError>;
    /// Replaces the set of hosts that run Braid, and of their ports that are not available that way. At most 1024 entries each; the rest
    /// are ignored.
    fn set_servers(&mut self, servers: &[IpAddr], closed: &[(IpAddr, u16)]) -> Result<(), SteeringError>;
    /// Replaces the map of destinations whose TCP connections are redirected until it is known whether the destination runs Braid, in ascending order.
    /// The longest prefix decides; a destination without a prefix is not held. Long prefixes that do not fit are ignored.
    fn set_hold(&mut self, map: &[(IpNet, bool)]) -> Result<(), SteeringError>;
    /// Replaces the map of hosts whose TCP connections to this machine are listed as flows, in ascending order. The longest prefix decides; connections of a
    /// host without a prefix are not listed. Long prefixes that do not fit are ignored. Where the system cannot list them, a warning says
    /// so and nothing else changes.
    fn set_openers(&mut self, map: &[(IpNet, bool)]) -> Result<(), SteeringError>;
    /// Replaces the set of destinations that all relays refuse. Flows there go direct, even if a rule or class would redirect them. At most
    /// 512 entries; the rest are ignored.
    fn set_refused(&mut self, refused: &[IpAddr]) -> Result<(), SteeringError>;
    /// Sets the classes of process names, for applications not seen before.
    fn set_names(&mut self, names: &[(&str, Class)]) -> Result<(), SteeringError>;
    /// Sets an application's class, and the class by the pattern of its traffic. The latter counts only for rules, and only while `class` is
    /// [`Class::Unclassified`].
    fn set_class(&mut self, app: &AppId, class: Class, learnt: Class) -> Result<(), SteeringError>;
    /// Seeds an estimate from an earlier run.
    fn seed(&mut self, learnt: &DemandEstimate) -> Result<(), SteeringError>;
    /// Updates an estimate from a bonded flow that ended now, as from a steered one.
    fn learn(&mut self, app: &AppId, port: u16, down: ByteCount, up: ByteCount, now: Time) -> Result<(), SteeringError>;
    /// All estimates.
    fn estimates(&mut self) -> Result<Vec<DemandEstimate>, SteeringError>;
    /// Starts to list the living flows. The returned function dumps them and updates their loads.
    fn begin_dump(&mut self, now: Time) -> Result<Dump<Self::Dumped>, SteeringError>;
    /// Returns the living flows of a dump and corrects inconsistent loads, unless another dump ran meanwhile. Flows that ended during the
    /// dump may be included.
    fn end_dump(&mut self, now: Time, dumped: Self::Dumped) -> Result<Vec<FlowRow>, SteeringError>;
    /// Dumps the living flows at once.
    fn flows(&mut self, now: Time) -> Result<Vec<FlowRow>, SteeringError> {
        let dump = self.begin_dump(now)?;
        let dumped = dump()?;
        self.end_dump(now, dumped)
    }
    /// Whether there is little room for new forwarded flows, so that ended and idle ones should be removed soon. A dump does that.
    fn is_under_pressure(&self) -> bool {
        false
    }
    /// Moves connects whose SYN has been unanswered for [`UNANSWERED`] to another link that their rules allow, before the kernel
    /// retransmits it, and confirms moved connects that were answered. If the system does not support this, connects stay where they are.
    fn move_connects(&mut self) -> Result<(), SteeringError>;
    /// Sets [`LoadTable::packets`] of the next decisions: remaining bytes of bonded flows that the targets include and no link's load does.
    fn set_packets(&mut self, packets: PerDirection<ByteCount>) -> Result<(), SteeringError>;
    /// Sets the load of bonded flows by slot. The next dump adds it to the load table.
    fn set_bonded_loads(&mut self, loads: &BondedLoads) -> Result<(), SteeringError>;
    /// Makes these the limits of running TCP flows, by id; a flow without an entry gets its own settings back. Flows whose socket is
    /// connecting are skipped, and of a forwarded flow only windows are limited. At most 4096; the rest are ignored. If the system does not support this, no flow is limited and none is returned.
    fn shape(&mut self, now: Time, shapes: &BTreeMap<FlowId, Shape>) -> Result<ShapeStep, SteeringError>;
    /// Makes the switch act at these devices, and at no others. `own` is the virtual interface, if there is one.
    fn set_ports(&mut self, ports: &[Port], own: Option<&VirtualDevice>) -> Result<(), SteeringError>;
    /// Makes these forwarded flows, by id, and no others take the fast path: their packets are rewritten and sent without the system's firewall, connection
    /// tracking and routing, which see a packet of each direction about once a second and can end it. At most [`MAX_FAST`]; the rest are ignored. A flow whose
    /// translation is not found, or cannot be imitated, goes on as before. If the system does not support this, none takes it.
    fn set_fast_path(&mut self, flows: &BTreeMap<FlowId, FastFlow>) -> Result<(), SteeringError>;
    /// Makes these the rewritten flows, and no others, by the addresses and ports of their packets before. At most [`MAX_REWRITES`]; the rest are ignored.
    fn set_rewrites(&mut self, rewrites: &BTreeMap<Ends, Rewrite>) -> Result<(), SteeringError>;
    /// The rewritten flows, by what leaves, and flows of datagrams of which only arrivals are watched. `fresh`: looks for their sockets now; connections that are not there have no `numbers`.
    fn moved_sockets(&mut self, fresh: bool) -> Result<BTreeMap<Ends, MovedSocket>, SteeringError>;
    /// When the last packet arrived with these addresses, of those that [`set_rewrites`](Self::set_rewrites) was called with for packets that arrive.
    fn arrivals(&mut self, of: &[Ends]) -> Result<BTreeMap<Ends, Time>, SteeringError>;
    /// Tells sockets of this machine that the host at the other end was unreachable. Each time TCP takes back a doubling of its retransmission timer, and sends
    /// again at once if the shorter time has passed (RFC 6069). What the system refuses counts as lost.
    fn hasten(&mut self, sockets: &[Hasten]);
    /// Sends such packets. What the system refuses counts as lost.
    fn send_keepalives(&mut self, keepalives: &[Keepalive]);
    /// Datagrams of these sockets to these destinations keep this source address, whatever becomes of its link; others do not. Of sockets that are not connected.
    /// At most [`MAX_DATAGRAM_FLOWS`]; the rest are ignored.
    fn keep_sources(&mut self, flows: &BTreeMap<(FlowId, SocketAddr), IpAddr>) -> Result<(), SteeringError>;
    /// Binds the packets of these links late, and of no others; `None`: of none. What waits then leaves at once.
    fn set_late(&mut self, plan: Option<&LatePlan>) -> Result<(), SteeringError>;
    /// What waits for a link; `None` while nothing is bound late.
    fn late_state(&self) -> Option<LateState>;
    /// Rewrites no flow any more, and waits until their sockets have their own links again.
    fn release_rewrites(&mut self) -> Result<(), SteeringError> {
        self.set_rewrites(&BTreeMap::new())
    }
    /// Why running flows cannot be moved; `None`: they can.
    fn unmoved(&self) -> Option<String> {
        None
    }
    /// Forgets a forwarded flow: its next packet begins another one.
    fn forget_forwarded(&mut self, protocol: Protocol, client: SocketAddr, remote: SocketAddr) -> Result<(), SteeringError>;
    /// The clients of the gateway.
    fn clients(&mut self) -> Result<Vec<ClientRow>, SteeringError>;
    /// Loads as the next decision uses them, with the current parameters.
    fn load_table(&mut self) -> Result<LoadTable, SteeringError>;
    /// Evidence from connections about the link in `slot`.
    fn signs(&mut self, slot: usize, family: Family) -> Result<Signs, SteeringError>;
    /// The counters.
    fn counters(&mut self) -> Result<SteeringCounters, SteeringError>;
    /// Whether flows of this machine's own programs get links. If not, the backend serves only the gateway's clients.
    fn steers_host(&self) -> bool {
        true
    }
    /// Warnings for the user.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
    /// Returns pending events, at most about `limit`.
    fn events(&mut self, limit: usize) -> Vec<SteeringEvent>;
}
