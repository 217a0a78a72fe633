//! What the daemon needs of whatever steers flows: the Linux BPF programs, or the fake in tests.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use braid_decide::connection::{LoadTable, Mode};
use braid_model::{
    Affinity, ByteCount, Class, Direction, Family, FlowId, LinkIndex, LinkSet, MAX_LINKS, PerDirection, PerFamily, Protocol, Rate, Time,
};
use ipnet::IpNet;

/// Why steering could not be changed or read.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action}: {reason}")]
pub struct SteeringError {
    /// What was tried, as in "write the policy rules".
    pub action: &'static str,
    /// What the system said, and the remedy where one is known.
    pub reason: String,
}

/// A link in its slot, as the rule needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SteerLink {
    /// The device.
    pub index: LinkIndex,
    /// Its name now.
    pub name: String,
    /// The system's order of preference, least first.
    pub rank: u32,
    /// The address unconnected IPv4 datagrams leave with.
    pub source4: Option<Ipv4Addr>,
    /// The address unconnected IPv6 datagrams leave with.
    pub source6: Option<Ipv6Addr>,
    /// Capacity.
    pub rate: PerDirection<Rate>,
    /// What a byte costs, in one unit for all links.
    pub price: u64,
    /// Virtual time one flow takes.
    pub step: u64,
}

/// Everything a decision needs besides the loads: written as one.
#[derive(Debug, Clone, PartialEq)]
pub struct SteerParams {
    /// How a link is chosen; its target holds for flows whose direction has none in `targets`.
    pub mode: Mode,
    /// Target throughput of connections, for [`Mode::CheapestInTime`]: links carry less one way than the other.
    pub targets: PerDirection<Option<Rate>>,
    /// Target throughput of connections and bonded flows together: OPERETTA's `T_target`. The kernel is not told.
    pub full_targets: PerDirection<Option<Rate>>,
    /// The configured scheduler's number, remembered by each flow.
    pub scheduler: u8,
    /// What a flow of an unknown application is expected to move.
    pub default_demand: ByteCount,
    /// Affinity where no rule says otherwise; `None` follows the class.
    pub affinity: Option<Affinity>,
    /// The links by slot.
    pub links: [Option<SteerLink>; MAX_LINKS],
    /// Slots that may be given flows now, by family.
    pub usable: PerFamily<LinkSet>,
    /// Slots that are used only while no other usable one is.
    pub backup: LinkSet,
    /// The policy, first match decides; at most 64.
    pub rules: Vec<SteerRule>,
    /// Classes whose connections are redirected where no rule says otherwise.
    pub redirected: Vec<Class>,
    /// Connections to hosts that run Braid themselves ([`Steering::set_servers`]) are redirected where no rule says otherwise. Datagrams
    /// are not: most are of protocols that take another order for loss.
    pub peer_direct: bool,
}

impl SteerParams {
    /// Whether anything may be redirected but to hosts that run Braid.
    pub fn redirects(&self) -> bool {
        let redirects = |rule: &SteerRule| rule.redirect == Some(RedirectPolicy::Redirect) || rule.peer_direct == PeerDirect::All;
        !self.redirected.is_empty() || self.rules.iter().any(redirects)
    }

    /// The same with everything direct.
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

/// An executable as the kernel knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExeId {
    /// The file system's device, as `st_dev` has it.
    pub device: u64,
    /// The file's inode.
    pub inode: u64,
}

/// An application as the kernel knows it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AppId {
    /// Its executable.
    pub exe: ExeId,
    /// The process's name, at most 15 bytes.
    pub name: String,
}

/// What a rule asks of a flow; all that is given must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SteerMatch {
    /// One of these executables (the installed one, and one that was replaced but still runs); `Some` of none matches nothing.
    pub exe: Option<Vec<ExeId>>,
    /// The process's name.
    pub name: Option<String>,
    /// The remote port.
    pub port: Option<u16>,
    /// The remote address.
    pub destination: Option<IpNet>,
    /// A cgroup's id and depth below the root; the program is in it or below. `Some(None)` is one that does not exist: matches nothing.
    pub cgroup: Option<Option<(u64, u32)>>,
    /// The user.
    pub user: Option<u32>,
}

/// What the kernel does with a flow's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RedirectPolicy {
    /// The connection stays on its link.
    Direct,
    /// Redirect it to the daemon, if the daemon accepts connections; else leave it on its link. TCP only.
    Redirect,
}

/// Which flows to hosts that run Braid themselves are redirected to the daemon. None that may use a single link only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PeerDirect {
    /// As [`SteerParams::peer_direct`] says.
    #[default]
    Usual,
    /// Connections and datagrams.
    All,
    /// None for that reason alone.
    Nothing,
}

/// One rule of the policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SteerRule {
    /// Which flows.
    pub matching: SteerMatch,
    /// Leave them alone.
    pub exclude: bool,
    /// They may use these links only.
    pub links: Option<LinkSet>,
    /// They use these links while one of them is usable.
    pub prefer: Option<LinkSet>,
    /// Their class.
    pub class: Option<Class>,
    /// Their affinity.
    pub affinity: Option<Affinity>,
    /// Whether they are redirected; `None`: by their class ([`SteerParams::redirected`]).
    pub redirect: Option<RedirectPolicy>,
    /// What of them goes straight to a host that runs Braid; nothing does with [`RedirectPolicy::Direct`].
    pub peer_direct: PeerDirect,
}

/// A connection that was redirected to the daemon, and what is known of it.
#[derive(Debug, Clone, PartialEq)]
pub struct RedirectedFlow {
    /// Its name: its socket's cookie, as for every flow.
    pub id: FlowId,
    /// Where its program wanted to go.
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
    /// Index of the rule that matched.
    pub rule: Option<u8>,
    /// Which way its bytes are expected to go.
    pub direction: Direction,
    /// Bytes it is expected to move.
    pub demand: ByteCount,
    /// When its program asked.
    pub started: Time,
    /// It goes to a relay, not straight to a destination that runs Braid: BPF programs of others filter its cgroup.
    pub filtered: bool,
}

/// A flow as steering sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct FlowRow {
    /// Its name.
    pub id: FlowId,
    /// Transport.
    pub protocol: Protocol,
    /// Family of its packets.
    pub family: Family,
    /// Its application.
    pub app: AppId,
    /// The process that opened it.
    pub process: u32,
    /// That process's user.
    pub user: u32,
    /// That process's cgroup.
    pub cgroup: u64,
    /// This end; the address is unspecified where it is not known.
    pub local: (IpAddr, u16),
    /// The other end.
    pub remote: (IpAddr, u16),
    /// The slot its link was in.
    pub slot: usize,
    /// Its link.
    pub link: LinkIndex,
    /// Which way its bytes were expected to go.
    pub direction: Direction,
    /// Its class when it started.
    pub class: Class,
    /// Number of the scheduler that placed it.
    pub scheduler: u8,
    /// Index of the rule that matched.
    pub rule: Option<u8>,
    /// When it started.
    pub started: Time,
    /// When this was read.
    pub read_at: Time,
    /// Bytes it was expected to move.
    pub demand: ByteCount,
    /// Bytes it weighs on its link.
    pub reserved: ByteCount,
    /// Bytes received.
    pub rx: ByteCount,
    /// Bytes sent.
    pub tx: ByteCount,
    /// Smoothed round-trip time, where there is one.
    pub rtt_us: Option<u32>,
    /// Retransmitted segments; TCP only.
    pub retransmissions: Option<u32>,
    /// Segments sent; TCP only.
    pub segments_out: Option<u32>,
    /// Delivery rate by the kernel's own sampling, not limited by the application.
    pub delivery_rate: Option<Rate>,
    /// Whether its handshake has not been answered yet.
    pub connecting: bool,
    /// Since when its SYN waits for an answer, if it may be moved to another link ([`Steering::move_connects`]).
    pub unanswered_since: Option<Time>,
    /// How often its connect was moved to another link for want of an answer.
    pub moves: u8,
    /// Its connect was moved, and what that takes is still on its socket.
    pub moving: bool,
    /// It goes direct though its destination runs Braid: BPF programs of others filter its cgroup.
    pub filtered: bool,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum SteeringEvent {
    /// A flow ended; its final figures.
    Ended(FlowRow),
    /// An application never seen before connects.
    NewApp {
        /// The application.
        app: AppId,
        /// A process of it, which may be gone already.
        process: u32,
        /// That process's cgroup.
        cgroup: u64,
        /// Its class by name.
        class: Class,
    },
    /// A segment of a flow was not answered in time.
    Suffering {
        /// The link.
        link: LinkIndex,
        /// The family.
        family: Family,
        /// It was the first one: nobody answered the connection.
        connecting: bool,
        /// How often it has been sent again.
        retries: u32,
        /// To whom.
        remote: (IpAddr, u16),
    },
}

/// What connections tell of a link and family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signs {
    /// Handshakes answered since the slot was taken.
    pub answered: u64,
    /// When the last one was; a little before, since it is told later: by the connection's beginning and its round trip.
    pub answered_at: Time,
    /// By whom.
    pub remote: Option<(IpAddr, u16)>,
    /// Segments not answered in time.
    pub timeouts: u64,
}

/// What steering has counted since it was loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SteeringCounters {
    /// Flows given a link.
    pub steered: u64,
    /// Connects and datagrams left alone.
    pub left_alone: u64,
    /// Flows refused by a strict rule.
    pub denied: u64,
    /// Sockets the kernel refused to steer.
    pub failed: u64,
    /// Flows steered but not followed, for want of memory.
    pub untracked: u64,
    /// Events that found no room.
    pub lost_events: u64,
    /// Flows ended.
    pub ended: u64,
    /// Connections redirected to the daemon.
    pub redirected: u64,
    /// Connections that should have been, and went direct for want of room or of a way.
    pub not_redirected: u64,
    /// Connects moved to another link for want of an answer.
    pub moved: u64,
}

/// What an application's flows to one port are expected to move (kept by the steering itself, by DBAS eq. 1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DemandEstimate {
    /// The application.
    pub app: AppId,
    /// The remote port.
    pub port: u16,
    /// Bytes towards this machine.
    pub down: ByteCount,
    /// Bytes away from it.
    pub up: ByteCount,
    /// Flows learnt from.
    pub count: u64,
    /// When it changed last.
    pub updated: Time,
}

/// A SYN without an answer for so long is sent again by another link (`BRAID_UNANSWERED_NS`). The kernel sends it again after a second
/// (RFC 6298, section 2): half of it leaves the daemon time, and most paths an answer.
pub const UNANSWERED: Duration = Duration::from_millis(500);

/// What bonded flows weigh on a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BondedLoad {
    /// Bytes that they still have to move over it.
    pub load: PerDirection<ByteCount>,
    /// The flows.
    pub flows: u32,
}

/// The same for each slot.
pub type BondedLoads = [BondedLoad; MAX_LINKS];

/// Dumps the flows, on any thread.
pub type Dump<W> = Box<dyn FnOnce() -> Result<W, SteeringError> + Send>;

/// Steers flows. All calls are quick and do not block; thousands of flows take milliseconds to dump, which another thread may do.
pub trait Steering {
    /// What a dump returns.
    type Dumped: Send + 'static;
    /// Says that the daemon is alive; without it steering stops within two seconds.
    fn heartbeat(&mut self, now: Time) -> Result<(), SteeringError>;
    /// Puts new parameters and rules in force at once, together.
    fn set_params(&mut self, params: &SteerParams) -> Result<(), SteeringError>;
    /// Replaces the map of what may be steered: by longest prefix, `true` where it may.
    fn set_prefixes(&mut self, family: Family, map: &[(IpNet, bool)]) -> Result<(), SteeringError>;
    /// Replaces the map of resolvers that are to be asked through the links of the mask.
    fn set_resolvers(&mut self, resolvers: &[(IpAddr, LinkSet)]) -> Result<(), SteeringError>;
    /// Replaces the set of hosts that run Braid themselves, and of their services (ports) that are not to be had that way; at most 1024
    /// each, the first ones count.
    fn set_servers(&mut self, servers: &[IpAddr], closed: &[(IpAddr, u16)]) -> Result<(), SteeringError>;
    /// Replaces the set of destinations that no relay opens: what a rule or its class would have redirected goes direct there. At most 512,
    /// the first ones count.
    fn set_refused(&mut self, refused: &[IpAddr]) -> Result<(), SteeringError>;
    /// Sets the class of process names not seen before.
    fn set_names(&mut self, names: &[(&str, Class)]) -> Result<(), SteeringError>;
    /// Sets an application's class.
    fn set_class(&mut self, app: &AppId, class: Class) -> Result<(), SteeringError>;
    /// Seeds an estimate of an earlier run.
    fn seed(&mut self, learnt: &DemandEstimate) -> Result<(), SteeringError>;
    /// Learns from a bonded flow, as from one of its own: an application's, to a port, that moved so much and ended now.
    fn learn(&mut self, app: &AppId, port: u16, down: ByteCount, up: ByteCount, now: Time) -> Result<(), SteeringError>;
    /// All estimates.
    fn estimates(&mut self) -> Result<Vec<DemandEstimate>, SteeringError>;
    /// Begins to list the living flows: what is returned dumps them and brings their loads up to date.
    fn begin_dump(&mut self, now: Time) -> Result<Dump<Self::Dumped>, SteeringError>;
    /// The living flows as a dump found them; heals loads that went astray, unless another dump was on its way meanwhile. Flows that
    /// ended during the dump may be among them.
    fn end_dump(&mut self, now: Time, dumped: Self::Dumped) -> Result<Vec<FlowRow>, SteeringError>;
    /// The living flows, dumped at once.
    fn flows(&mut self, now: Time) -> Result<Vec<FlowRow>, SteeringError> {
        let dump = self.begin_dump(now)?;
        let dumped = dump()?;
        self.end_dump(now, dumped)
    }
    /// Moves connects whose SYN has waited [`UNANSWERED`] for an answer to another link that their rules allow, before the kernel sends it
    /// again, and settles those that were moved and answered. Where the system cannot do that they wait.
    fn move_connects(&mut self) -> Result<(), SteeringError>;
    /// What bonded flows weigh on each link: the next dump brings the load table up to date with it.
    fn set_bonded_loads(&mut self, loads: &BondedLoads) -> Result<(), SteeringError>;
    /// The loads as the next decision will see them, with the parameters in force.
    fn load_table(&mut self) -> Result<LoadTable, SteeringError>;
    /// What connections tell of the link in `slot`.
    fn signs(&mut self, slot: usize, family: Family) -> Result<Signs, SteeringError>;
    /// Counters.
    fn counters(&mut self) -> Result<SteeringCounters, SteeringError>;
    /// What does not work as it should, for people.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
    /// Takes the events that have come; at most about `limit`.
    fn events(&mut self, limit: usize) -> Vec<SteeringEvent>;
}
