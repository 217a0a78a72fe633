//! Peers: the relays that the user joined, the servers that run Braid themselves, and the flows bonded with them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use braid_api::{
    Accepted, Flow as FlowView, LinkBytes, MoveRequest, Path as PathView, PathState as ApiPathState, Peer as PeerView, PeerKind, PeerState,
};
use braid_bond::{BondScheduler, FlowPolicy, PathId, PathState, PathView as BondPath, SchedulingPlan};
use braid_control::RequestError;
use braid_control::core::{BondPolicy, BondReason, BondScheduling, Bonded, Ended, MoveOrder, PacketLoad, Question, Recipient, ServerEvent};
use braid_control::history::AppPulse;
use braid_control::links::BondLink;
use braid_control::steering::{AppId, RedirectedFlow};
use braid_decide::demand::remaining;
use braid_decide::detection::{DetectionAnswer, HostStatus};
use braid_decide::energy::{ByteCost, EnergyMeter};
use braid_decide::steer::Prefixes;
use braid_decide::tables::RELAY_MARK;
use braid_decide::tunnel::Tunnel;
use braid_model::address::HostName;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Joules, LinkSet, PerDirection, PerFamily, Rate, Time, Traffic};
use braid_peer::keys::{CLIENT_KEY, KeyPair};
use braid_peer::state::StateDir;
use braid_platform::linux::bpf::redirect::Redirect;
use braid_store::joined::{self, NotInvited, Stored};
use braid_transport::client::{Client, ClientLink, PathChange, State};
use braid_transport::{BondFlow, Moved};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, mpsc, watch};

mod explained;
mod flow_limits;
mod forward;
mod moves;
mod names;
pub(crate) mod packets;
pub(crate) mod pins;
pub(crate) mod redirected;
mod servers;
mod shares;
mod tunnels;

use flow_limits::FlowLimits;
use forward::Exchanges;
use packets::PacketCarrier;
use servers::{ServerStatus, Servers};

/// Reason shown for a peer that cannot prove its pinned key.
const KEY_MISMATCH: &str = "its key differs from the key of the invitation or of the first contact: run \"braid leave\" for it; join a relay with a new invitation";

/// Time to wait for a bond to report the byte counts of a flow that ended.
const FINAL_COUNT_TIMEOUT: Duration = Duration::from_millis(100);

/// An event of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A relay was left. Another one with the same name may have been joined since.
    Left {
        /// Name of the relay.
        name: String,
    },
    /// A relay became reachable or unreachable.
    Relay {
        /// Name of the relay.
        name: String,
        /// Number of the session that reports this. A session that ended may still report after the next one has started.
        session: u64,
        /// Whether the relay is reachable.
        ready: bool,
    },
    /// A relay refused to open a destination, or takes no flows at present.
    Refused {
        /// Name of the relay.
        name: String,
        /// Address of the destination.
        host: IpAddr,
        /// Error code of the refusal ([`braid_bond::codes`]).
        code: u64,
    },
    /// A relay does not open a destination to packets.
    PacketsRefused {
        /// Name of the relay.
        name: String,
        /// Address of the destination.
        host: IpAddr,
    },
    /// The result of asking a host whether it runs Braid.
    Answer {
        /// Address of the host.
        host: IpAddr,
        /// Slot of the link that carried the question.
        link: usize,
        /// Answer of the host, or the lack of one.
        answer: DetectionAnswer<PublicKey>,
    },
    /// The host names in `detect` were resolved.
    Named {
        /// Addresses that the names resolve to.
        hosts: BTreeSet<IpAddr>,
    },
    /// A path of a bond started or stopped delivering.
    Path(PathChange),
    /// A server or a relay takes requests to move flows, or takes them no more.
    Mover {
        /// Who.
        recipient: Recipient,
        /// Whether it takes them.
        ready: bool,
        /// Whether it takes those about flows of datagrams.
        datagrams: bool,
    },
    /// A relay lets the flow of a [`MoveOrder`] pass.
    Passage {
        /// Number of the order.
        number: u64,
        /// The relay's address and port towards this machine.
        near: SocketAddr,
        /// And towards the flow's destination.
        far: SocketAddr,
    },
    /// A host got no segment of the test of a [`MoveOrder`], or sees that a NAT translates the way.
    MoveBlocked {
        /// Number of the order.
        number: u64,
        /// What it says, by the places of the flows in the order.
        reasons: BTreeMap<usize, String>,
    },
    /// A tunnel leads to a server, or none does any more.
    Tunnel {
        /// Address of the server.
        host: IpAddr,
        /// The tunnel.
        tunnel: Option<Tunnel>,
    },
    /// The answer to a [`MoveOrder`].
    MoveAnswer {
        /// Number of the order.
        number: u64,
        /// Why flows were refused, by their places in the order; or why there is no answer.
        answer: Result<BTreeMap<usize, String>, String>,
    },
    /// An event of the bond to a server.
    Server {
        /// Address of the server.
        host: IpAddr,
        /// Event of the bond.
        event: ServerEvent,
    },
}

/// All peers.
pub struct Peers {
    dir: PathBuf,
    relays: BTreeMap<String, JoinedRelay>,
    servers: Servers,
    /// Host names of servers in `detect`.
    detected: names::Names,
    links: Vec<BondLink>,
    /// Scheduling of bonds.
    scheduling: Option<BondScheduling>,
    flows: Flows,
    exchanges: Exchanges,
    flow_limits: FlowLimits,
    packets: PacketCarrier,
    /// Number of relay sessions started so far.
    sessions: u64,
    changes: mpsc::UnboundedSender<Change>,
    /// Prefixes that may be steered, for flows that no peer takes.
    steerable: watch::Sender<PerFamily<Prefixes>>,
}

type Flows = Arc<Mutex<BondedFlows>>;

/// The bonded flows.
#[derive(Default)]
struct BondedFlows {
    /// Living flows by id: the socket cookie, or a number of ours if one socket has several flows.
    living: BTreeMap<u64, BondedFlow>,
    /// Number of living flows per peer.
    by_peer: BTreeMap<String, usize>,
    /// Last number given to a flow without a cookie of its own.
    last_own_id: u64,
    /// Bytes of ended flows since the last `take_moved`, by application.
    moved: BTreeMap<Mover, Traffic>,
    /// Flows that ended since the last `take_ended`.
    ended: Vec<(Ended, Cost, Moved)>,
    /// Latest energy cost per byte, by slot.
    costs: BTreeMap<u8, ByteCost>,
    /// A flow began or ended.
    changed: Arc<Notify>,
}

/// An application that moves bytes: its name, and its address if it is a client of the gateway.
type Mover = (String, Option<IpAddr>);

/// First flow id that is not a socket cookie: the kernel counts cookies from one. Those of forwarded flows begin at twice this number
/// (`BRAID_FORWARDED_ID`), and none reaches 2^53, up to which JavaScript represents integers exactly.
const FIRST_OWN_ID: u64 = 1 << 51;

impl BondedFlows {
    /// Adds a flow and returns its id: `wanted`, unless another flow has it.
    fn insert(&mut self, wanted: u64, flow: BondedFlow) -> u64 {
        let id = if self.living.contains_key(&wanted) {
            self.last_own_id += 1;
            FIRST_OWN_ID + self.last_own_id
        } else {
            wanted
        };
        *self.by_peer.entry(flow.peer.clone()).or_default() += 1;
        self.living.insert(id, flow);
        self.changed.notify_one();
        id
    }

    fn remove(&mut self, id: u64) -> Option<BondedFlow> {
        let flow = self.living.remove(&id)?;
        self.changed.notify_one();
        if let Some(count) = self.by_peer.get_mut(&flow.peer) {
            *count -= 1;
            if *count == 0 {
                self.by_peer.remove(&flow.peer);
            }
        }
        Some(flow)
    }
}

struct JoinedRelay {
    stored: Stored,
    client: Client,
    session: u64,
    /// Takes requests to let flows pass.
    orders: mpsc::UnboundedSender<MoveOrder>,
    /// Whether the relay takes such requests.
    passes: bool,
}

impl JoinedRelay {
    fn is_up(&self) -> bool {
        *self.client.state().borrow() == State::Up
    }
}

struct BondedFlow {
    application: String,
    app: AppId,
    process: u32,
    user: u32,
    remote: SocketAddr,
    peer: String,
    started: Time,
    policy: FlowPolicy,
    facts: RedirectedFlow,
    /// Index of the `[[app]]` entry that gave it its policy.
    rule: Option<usize>,
    protocol: &'static str,
    flow: BondFlow,
    bond_reason: Option<BondReason>,
    /// Bytes already counted for the application.
    counted: Traffic,
    cost: Cost,
    /// Links that the rule allows. `braid move` may have moved the flow to others.
    ruled: LinkSet,
    /// Weight that the rule gives. The flow has less if it shares it with others of its client.
    weight: u16,
    /// Bytes moved when the weights were last divided.
    moved_before: Traffic,
}

/// Energy cost of a flow.
#[derive(Default)]
struct Cost {
    /// Bytes already counted, by slot.
    counted: BTreeMap<u8, Traffic>,
    energy: EnergyMeter,
}

impl Cost {
    /// Adds the energy of the bytes moved since the last call, at the current cost per byte. `by_link` holds totals.
    fn count(&mut self, by_link: &[(u8, Traffic)], costs: &BTreeMap<u8, ByteCost>) {
        for (link, moved) in by_link {
            let more = moved.since(self.counted.insert(*link, *moved).unwrap_or_default());
            self.energy.count(costs.get(link).copied(), more.rx, more.tx);
        }
    }
}

impl BondedFlow {
    fn mover(&self) -> Mover {
        (self.application.clone(), self.app.client_address())
    }

    /// Bytes moved since the last call. The total is at least `least`.
    fn count(&mut self, least: Traffic, costs: &BTreeMap<u8, ByteCost>) -> Traffic {
        let by_link = self.flow.view().map(|view| view.by_link).unwrap_or_default();
        let sum = by_link.iter().fold(Traffic::default(), |sum, (_, moved)| sum + *moved);
        self.cost.count(&by_link, costs);
        // After the bond has dropped the flow, its view is empty and adds nothing.
        let total = sum.max(self.counted).max(least);
        total.since(std::mem::replace(&mut self.counted, total))
    }
}

/// Names of the joined relays in the state directory; `None` if they cannot be read.
pub fn joined(dir: &Path) -> Option<Vec<String>> {
    Some(joined::read(dir).ok()?.into_iter().map(|peer| peer.name).collect())
}

impl Peers {
    /// Opens the relays that were joined before. Their events arrive on the channel. A relay that cannot be read is logged and skipped.
    /// `open_files` is this process's limit of open files.
    pub fn open(dir: &Path, open_files: u64) -> (Self, mpsc::UnboundedReceiver<Change>) {
        let (changes, receiver) = mpsc::unbounded_channel();
        let mut peers = Self {
            dir: dir.to_owned(),
            relays: BTreeMap::new(),
            servers: Servers::default(),
            detected: names::Names::default(),
            links: Vec::new(),
            scheduling: None,
            flows: Flows::default(),
            exchanges: Exchanges::default(),
            flow_limits: FlowLimits::new(open_files),
            packets: PacketCarrier::default(),
            sessions: 0,
            changes,
            steerable: watch::Sender::new(PerFamily::default()),
        };
        match joined::read(dir) {
            Ok(stored) => {
                for peer in stored {
                    let name = peer.name.clone();
                    if let Err(error) = peers.begin(peer) {
                        tracing::warn!(peer = name, "{}", error.detail);
                    }
                }
            }
            Err(error) => tracing::warn!("the relays joined before, in {}, cannot be read ({error}): join again", dir.display()),
        }
        (peers, receiver)
    }

    /// Resolves the host names in `detect`. Their addresses arrive on the channel, now and after each change.
    pub fn look_up(&mut self, names: &[HostName]) {
        self.detected.want(names, &self.changes);
    }

    /// Names of the joined relays.
    pub fn names(&self) -> Vec<String> {
        self.relays.keys().cloned().collect()
    }

    /// Whether there are no peers.
    pub fn is_empty(&self) -> bool {
        self.relays.is_empty() && self.servers.is_empty()
    }

    /// Sets how bonds distribute flows over links.
    pub fn set_scheduling(&mut self, scheduling: BondScheduling) {
        if self.scheduling.as_ref() == Some(&scheduling) {
            return;
        }
        let plans = plans(&scheduling);
        self.scheduling = Some(scheduling);
        self.clients().for_each(|client| client.set_plans(plans.up, plans.down));
    }

    /// Notified when a bonded flow began or ended.
    pub fn changed(&self) -> Arc<Notify> {
        self.flows.lock().unwrap_or_else(PoisonError::into_inner).changed.clone()
    }

    /// Expected bytes of the bonded flows.
    pub fn packet_load(&self) -> PacketLoad {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sum = PacketLoad { flows: u32::try_from(flows.living.len()).unwrap_or(u32::MAX), ..PacketLoad::default() };
        // OPERETTA's weights depend on what is left now. Elsewhere the counts of the last second are enough, and reading them costs less.
        let exact = self.scheduling.as_ref().is_some_and(|known| known.scheduler == BondScheduler::Weights);
        for bonded in flows.living.values() {
            let Some(reason) = &bonded.bond_reason else { continue };
            let mut moved = bonded.counted;
            if exact && let Some(view) = bonded.flow.view() {
                moved = moved.max(view.by_link.iter().fold(Traffic::default(), |sum, (_, moved)| sum + *moved));
            }
            sum.load[reason.direction] += remaining(reason.demand, moved.sum());
            sum.unmoved[reason.direction] += reason.demand.saturating_sub(moved.sum());
        }
        sum
    }

    /// Clients of the bonds with relays and servers.
    fn clients(&self) -> impl Iterator<Item = &Client> {
        self.relays.values().map(|known| &known.client).chain(self.servers.clients())
    }

    /// Sets the current links of all bonds.
    pub fn set_links(&mut self, links: Vec<BondLink>) {
        if self.links != links {
            self.links = links;
            let links = self.client_links();
            self.clients().for_each(|client| client.set_links(links.clone()));
        }
    }

    /// `POST /v1/join`.
    pub fn join(&mut self, line: &str, name: Option<&str>) -> Result<Accepted, RequestError> {
        let stored = Stored::invited(line, name, self.relays.values().map(|known| &known.stored)).map_err(|error| match &error {
            NotInvited::Line(_) => RequestError::invalid("No invitation", error.to_string()),
            NotInvited::Name => RequestError::invalid("No name", error.to_string()),
            NotInvited::Taken(_) => RequestError::conflict("Name in use", error.to_string()),
            NotInvited::Joined(_) => RequestError::conflict("Joined already", error.to_string()),
        })?;
        let name = stored.name.clone();
        // A new invitation for a joined relay updates it.
        let renewed = self.relays.get(&name).map(|known| known.is_up());
        if let Some(up) = renewed
            && !(up && self.renew(&stored))
        {
            self.end(&name);
            self.begin(stored)?;
        } else if renewed.is_none() {
            self.begin(stored)?;
        }
        self.store().map_err(|error| {
            RequestError::failed("Not stored", format!("{name} is in use until the daemon ends, but cannot be stored: {error}"))
        })?;
        let message = match renewed {
            None => {
                format!("connecting to {name} over all links: see \"braid peers\"; set carry = \"bond\" in [[app]] to send flows there")
            }
            Some(true) => format!(
                "{name} was joined before and is up: it stays up and also uses the addresses of this invitation. The invitation's token was not used: to apply its limits, run \"braid leave {name}\" and join again"
            ),
            Some(false) => format!("{name} was joined before: reconnecting, also at the addresses of this invitation"),
        };
        Ok(Accepted { message, warnings: Vec::new() })
    }

    /// Adopts the addresses of a new invitation for a relay that is up, without disturbing its flows; `false` if that is impossible.
    fn renew(&mut self, stored: &Stored) -> bool {
        let Some(known) = self.relays.get_mut(&stored.name) else { return false };
        let Ok(peer) = stored.peer() else { return false };
        known.client.set_addresses(peer.addresses);
        known.stored.addresses = stored.addresses.clone();
        true
    }

    /// `POST /v1/leave`.
    pub fn leave(&mut self, name: &str) -> Result<Accepted, RequestError> {
        if !self.relays.contains_key(name) {
            let names: Vec<&str> = self.relays.keys().map(String::as_str).collect();
            let joined =
                if names.is_empty() { "no relay is joined".to_owned() } else { format!("the joined relays are {}", names.join(", ")) };
            let detail = format!("there is no peer called {name}: {joined}; to leave a server, give its address from `braid peers`");
            return Err(RequestError::not_found("No such peer", detail));
        }
        self.end(name);
        self.store().map_err(|error| {
            RequestError::failed(
                "Not stored",
                format!("{name} returns when the daemon restarts, because the change cannot be written: {error}"),
            )
        })?;
        Ok(Accepted { message: format!("left {name}; its flows have ended"), warnings: Vec::new() })
    }

    /// Asks a host whether it runs Braid; the answer comes as a [`Change`].
    pub fn ask(&self, question: Question) {
        let link = client_link(&question.link);
        servers::question(question, link, self.changes.clone());
    }

    /// Asks a server to move flows; the answer comes as a [`Change`].
    pub fn order(&self, order: MoveOrder) {
        let number = order.number;
        let orders = match &order.recipient {
            Recipient::Host(host) => self.servers.orders(*host),
            Recipient::Waypoint(name) => self.relays.get(name).map(|known| &known.orders),
        };
        if orders.is_none_or(|orders| orders.send(order).is_err()) {
            let _ = self.changes.send(Change::MoveAnswer { number, answer: Err("there is no bond to it".to_owned()) });
        }
    }

    /// Notes whether a server or a relay takes requests to move flows.
    pub fn note_mover(&mut self, recipient: &Recipient, ready: bool, datagrams: bool) {
        match recipient {
            Recipient::Host(host) => self.servers.note_mover(*host, ready, datagrams),
            Recipient::Waypoint(name) => drop(self.relays.get_mut(name).map(|known| known.passes = ready)),
        }
    }

    /// Relays that let flows pass.
    pub fn waypoints(&self) -> BTreeSet<String> {
        self.relays.iter().filter(|(_, known)| known.passes).map(|(name, _)| name.clone()).collect()
    }

    /// Servers that take requests to move flows. `datagrams`: only those that move flows of datagrams.
    pub fn movers(&self, datagrams: bool) -> BTreeSet<IpAddr> {
        self.servers.movers(datagrams)
    }

    /// Starts bonds to these servers, or keeps them: they may be asked to move direct flows.
    pub fn keep_bonds(&mut self, hosts: Vec<(IpAddr, PublicKey)>) {
        for (host, key) in hosts {
            // Beyond the limit of bonds, flows stay on their links.
            if self.servers.has_room_for(host) {
                let _ = self.bond_with(host, key);
            }
        }
    }

    /// Ends the bond to a server and its flows. Returns whether there was one.
    pub fn end_server(&mut self, host: IpAddr) -> bool {
        self.servers.end(host)
    }

    /// Sets the prefixes that the system routes through links' default routes. Exchanges that left by a link but now belong to a tunnel
    /// end.
    pub fn set_steerable(&mut self, steerable: &PerFamily<Prefixes>) {
        self.steerable.send_if_modified(|known| {
            let changed = known != steerable;
            if changed {
                *known = steerable.clone();
            }
            changed
        });
    }

    /// Ends bonds to servers that may no longer be reached over links, and their flows, so that applications reconnect by another way.
    pub fn keep_servers(&mut self, may_reach: impl Fn(IpAddr) -> bool) {
        self.servers.keep(may_reach);
    }

    /// Ends bonds to servers that have no flows.
    pub fn sweep(&mut self) {
        let flows = self.flows.clone();
        self.servers.sweep(|host| forward::uses(&flows, host));
    }

    /// `POST /v1/move`.
    pub fn move_flows(&self, request: &MoveRequest) -> Result<Accepted, RequestError> {
        let to = match &request.to {
            None => None,
            Some(device) => match self.links.iter().find(|link| link.device == *device) {
                Some(link) => Some(link),
                None => {
                    let known: Vec<&str> = self.links.iter().map(|link| link.device.as_str()).collect();
                    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                    let detail = format!("{device} is not a link; the links are: {known}; see \"braid links\"");
                    return Err(RequestError::not_found("No such link", detail));
                }
            },
        };
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut moved, mut kept) = (0, BTreeMap::<String, String>::new());
        for (id, bonded) in flows.living.iter_mut() {
            if id.to_string() != request.what && bonded.application != request.what && bonded.app.name != request.what {
                continue;
            }
            // A flow on a link without a working path would wait forever.
            if let Some(why) = to.and_then(|link| self.without_path(&bonded.peer, link)) {
                kept.insert(bonded.peer.clone(), why);
                continue;
            }
            bonded.policy.links = to.map_or(bonded.ruled, |link| LinkSet::only(link.slot));
            bonded.flow.set_policy(bonded.policy);
            moved += 1;
        }
        let kept: Vec<String> = kept.into_iter().map(|(peer, why)| format!("no path to {peer}: {why}")).collect();
        let kept = to.filter(|_| !kept.is_empty()).map(|link| format!("{} has {}", link.device, kept.join("; ")));
        match (moved, kept) {
            (0, Some(kept)) => {
                let detail = format!("{kept}; no flow was moved: \"braid peers\" lists the paths");
                Err(RequestError::conflict("No path", detail))
            }
            (0, None) => {
                let detail = format!(
                    "no bonded flow has the id, application or name {}: see \"braid flows\"; only flows that a peer carries can be moved",
                    request.what
                );
                Err(RequestError::not_found("No such flow", detail))
            }
            (_, kept) => {
                let to = request.to.as_deref().unwrap_or("all links of their rule");
                let flows = if moved == 1 { "1 flow".to_owned() } else { format!("{moved} flows") };
                let warnings = kept.into_iter().map(|kept| format!("some flows were not moved: {kept}")).collect();
                Ok(Accepted { message: format!("{flows} moved to {to}"), warnings })
            }
        }
    }

    /// Gives each flow to which another rule applies now, or whose rule admits other links now, the policy of that rule. Returns their number.
    /// `rule_of` determines the policy of a flow and its reason; its second argument is whether the peer is the flow's own server. Flows that keep
    /// their rule also keep a link that `braid move` chose while the rule admits it. A flow stays with its peer, whatever its new rule says about that.
    pub fn apply_rules(&self, rule_of: impl Fn(&RedirectedFlow, bool) -> (BondPolicy, BondReason)) -> usize {
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = 0;
        for bonded in flows.living.values_mut() {
            let (policy, bond_reason) = rule_of(&bonded.facts, !self.relays.contains_key(&bonded.peer));
            if (policy.rule, policy.links) == (bonded.rule, bonded.ruled) || policy.rule_expired {
                continue;
            }
            let same_rule = policy.rule == bonded.rule;
            let was_moved = bonded.policy.links != bonded.ruled;
            (bonded.rule, bonded.ruled) = (policy.rule, policy.links);
            if same_rule && was_moved && !(bonded.policy.links & policy.links).is_empty() {
                continue;
            }
            bonded.policy = forward::flow_policy(&policy);
            bonded.weight = bonded.policy.weight;
            bonded.bond_reason = Some(bond_reason);
            bonded.flow.set_policy(bonded.policy);
            changed += 1;
        }
        changed
    }

    /// Reason why no path to a peer over a link works; `None` if one does.
    fn without_path(&self, peer: &str, link: &BondLink) -> Option<String> {
        let client = self.relays.get(peer).map(|known| &known.client).or_else(|| self.servers.client(peer));
        let of_link = |(_, path): &(PathId, BondPath)| usize::from(path.link) == link.slot;
        let paths: Vec<_> = client.map(Client::paths).unwrap_or_default().into_iter().filter(of_link).collect();
        why_no_path(link, peer, &paths.iter().map(|(_, path)| path.state).collect::<Vec<_>>())
    }

    /// Send rates of the paths that fill their congestion window, by the number of their link; the fastest path of each link. A path that has little
    /// to send shows nothing about its link.
    pub(crate) fn busy_rates(&self) -> BTreeMap<u8, Rate> {
        let mut rates: BTreeMap<u8, Rate> = BTreeMap::new();
        for client in self.relays.values().map(|known| &known.client).chain(self.servers.clients()) {
            let busy = |path: &BondPath| path.state == PathState::Good && path.in_flight.get() >= path.window.get() / 2;
            for (_, path) in client.paths().iter().filter(|(_, path)| busy(path)) {
                let rate = rates.entry(path.link).or_default();
                *rate = (*rate).max(path.rate);
            }
        }
        rates
    }

    /// Starts to take redirected flows.
    pub(crate) fn take(&self, redirect: Arc<Redirect>) -> mpsc::Receiver<redirected::Arrival> {
        self.flow_limits.attach(redirect.clone());
        redirected::take(redirect, self.exchanges.clone(), self.flow_limits.clone())
    }

    /// Sets whether flows of the gateway's clients that are to be bonded are handed to the daemon.
    pub(crate) fn take_clients(&self, takes: bool) {
        self.flow_limits.take_clients(takes);
    }

    /// `GET /v1/peers`: relays, then servers. `known` lists the hosts that are known to run Braid.
    pub fn views(&self, known: &[(IpAddr, HostStatus<PublicKey>, Option<String>)]) -> Vec<PeerView> {
        let relay = |known: &JoinedRelay| {
            let address = known.stored.addresses.first().cloned().unwrap_or_default();
            self.peer_view(known.stored.name.clone(), PeerKind::Relay, address, &known.client)
        };
        let server = |(host, status): (IpAddr, ServerStatus<'_>)| {
            let (name, address) = (host.to_string(), SocketAddr::new(host, servers::PORT).to_string());
            let without = |state, reason| PeerView {
                name: host.to_string(),
                kind: PeerKind::Server,
                address: SocketAddr::new(host, servers::PORT).to_string(),
                state,
                reason,
                paths: Vec::new(),
                packets: false,
            };
            match status {
                ServerStatus::Bonded(client) => self.peer_view(name, PeerKind::Server, address, client),
                ServerStatus::Idle(reason) => without(PeerState::Idle, reason),
                ServerStatus::KeyMismatch => without(PeerState::Refused, Some(KEY_MISMATCH.to_owned())),
            }
        };
        self.relays.values().map(relay).chain(self.servers.list(known).into_iter().map(server)).collect()
    }

    fn peer_view(&self, name: String, kind: PeerKind, address: String, client: &Client) -> PeerView {
        let (state, reason) = match &*client.state().borrow() {
            State::Connecting => (PeerState::Connecting, None),
            State::Up => (PeerState::Up, None),
            State::Unreachable(reason) => (PeerState::Unreachable, Some(reason.clone())),
            State::Refused(reason) => (PeerState::Refused, Some(reason.clone())),
            State::KeyMismatch => (PeerState::Refused, Some(KEY_MISMATCH.to_owned())),
        };
        let found = client.paths();
        let mut paths: Vec<PathView> = found.iter().map(|(_, path)| self.path_view(path)).collect();
        let missing = |link: &&BondLink| state == PeerState::Up && !found.iter().any(|(_, path)| usize::from(path.link) == link.slot);
        paths.extend(self.links.iter().filter(missing).map(|link| PathView {
            link: link.device.clone(),
            state: ApiPathState::None,
            reason: why_no_path(link, &name, &[]),
            ..PathView::default()
        }));
        PeerView { name, kind, address, state, reason, paths, packets: client.takes_packets() }
    }

    /// The bonded flows, for `GET /v1/flows`. `own` is the name of the virtual interface.
    pub fn flow_views(&self, now: Time, own: Option<&str>) -> Vec<FlowView> {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let bonded = flows.living.iter().map(|(id, bonded)| {
            let through = own.filter(|_| bonded.facts.is_through_virtual_device());
            FlowView { virtual_interface: through.map(str::to_owned), ..self.flow_view(*id, bonded, now) }
        });
        bonded.chain(self.packet_views(now, own)).collect()
    }

    /// Whether the flow with this id is bonded and passes the virtual interface.
    pub fn is_through_virtual_device(&self, id: u64) -> bool {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        flows.living.get(&id).is_some_and(|bonded| bonded.facts.is_through_virtual_device())
    }

    /// Number of bonded flows through the virtual interface.
    pub fn flows_of_virtual_device(&self) -> u64 {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let bonded = flows.living.values().filter(|bonded| bonded.facts.is_through_virtual_device());
        (bonded.count() + self.packet_flows().filter(|row| row.is_through_virtual_device()).count()) as u64
    }

    /// Number of bonded flows that have used each device.
    pub fn flows_by_device(&self) -> BTreeMap<String, u64> {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counts = BTreeMap::new();
        for link in flows.living.values().filter_map(|bonded| bonded.flow.view()).flat_map(|view| view.by_link) {
            *counts.entry(self.device(link.0)).or_default() += 1;
        }
        counts
    }

    /// Bytes that applications moved through peers since the last call. `costs` is the energy cost per byte, by slot.
    pub fn take_moved(&self, costs: BTreeMap<u8, ByteCost>) -> Vec<AppPulse> {
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let BondedFlows { living, moved, costs: known, .. } = &mut *flows;
        *known = costs;
        let mut sums: BTreeMap<Mover, (Traffic, u64)> = BTreeMap::new();
        for (mover, moved) in std::mem::take(moved) {
            sums.insert(mover, (moved, 0));
        }
        for bonded in living.values_mut() {
            let more = bonded.count(Traffic::default(), known);
            let (moved, count) = sums.entry(bonded.mover()).or_default();
            *moved += more;
            *count += 1;
        }
        let pulse = |((application, client), (moved, flows)): (Mover, (Traffic, u64))| AppPulse {
            application,
            rx: moved.rx,
            tx: moved.tx,
            flows,
            client,
        };
        sums.into_iter().map(pulse).filter(|pulse| pulse.rx + pulse.tx > ByteCount::ZERO).collect()
    }

    /// The living bonded flows.
    pub fn living(&self) -> Bonded {
        let flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let mut living = Bonded::new();
        for bonded in flows.living.values() {
            let (count, energy) = living.entry((bonded.app.clone(), bonded.remote.port())).or_default();
            *count += 1;
            energy.absorb(bonded.cost.energy);
        }
        for row in self.packet_flows() {
            living.entry((row.app.clone(), row.remote.1)).or_default().0 += 1;
        }
        living
    }

    /// Flows that ended since the last call, and their energy. Flows that ended less than [`FINAL_COUNT_TIMEOUT`] ago come with a later
    /// call: their bonds may still report final byte counts.
    pub fn take_ended(&self, now: Time) -> Vec<(Ended, EnergyMeter)> {
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let BondedFlows { ended, costs, .. } = &mut *flows;
        let settled = ended.extract_if(.., |(flow, ..)| now.since(flow.at) >= FINAL_COUNT_TIMEOUT);
        let reported = settled.map(|(flow, mut cost, moved)| {
            cost.count(&moved.by_link(), costs);
            (flow, cost.energy)
        });
        reported.collect()
    }

    fn flow_view(&self, id: u64, bonded: &BondedFlow, now: Time) -> FlowView {
        let moved = bonded.flow.view().map(|view| view.by_link).unwrap_or_default();
        let by_link: Vec<LinkBytes> = moved
            .iter()
            .map(|(link, moved)| LinkBytes { link: self.device(*link), rx_bytes: moved.rx.get(), tx_bytes: moved.tx.get() })
            .collect();
        let links: Vec<&str> = by_link.iter().map(|link| link.link.as_str()).collect();
        let client = bonded.app.client_address();
        FlowView {
            id,
            application: bonded.application.clone(),
            protocol: bonded.protocol.to_owned(),
            local: None,
            remote: bonded.remote.to_string(),
            link: links.join("+"),
            carry: "bond".to_owned(),
            scheduler: self.scheduler_name().to_owned(),
            rx_bytes: Some(by_link.iter().map(|link| link.rx_bytes).sum()),
            tx_bytes: Some(by_link.iter().map(|link| link.tx_bytes).sum()),
            rtt_us: None,
            age_ms: Some(now.since(bonded.started).as_millis() as u64),
            name: client.is_none().then(|| bonded.app.name.clone()),
            pid: client.is_none().then_some(bonded.process),
            user: client.is_none().then_some(bonded.user),
            cgroup: None,
            class: bonded.bond_reason.as_ref().map(|bond_reason| bond_reason.class.to_string()),
            demand_bytes: bonded.bond_reason.as_ref().map(|bond_reason| bond_reason.demand.get()),
            retransmissions: None,
            delivery_rate_bps: None,
            rule: bonded.bond_reason.as_ref().and_then(|bond_reason| bond_reason.rule),
            program_rule: bonded.bond_reason.as_ref().and_then(|bond_reason| bond_reason.program_rule.clone()),
            energy_j: bonded.cost.energy.total().map(Joules::get),
            peer: Some(bonded.peer.clone()),
            client: client.map(|client| client.to_string()),
            virtual_interface: None,
            fast_path: None,
            moved_to: None,
            accepted: None,
            late: None,
            by_link,
        }
    }

    fn path_view(&self, path: &BondPath) -> PathView {
        let sent = path.delivered.get() + path.lost.get();
        PathView {
            link: self.device(path.link),
            state: path_state(path),
            reason: None,
            rtt_us: Some(path.srtt.as_micros() as u64),
            cwnd: Some(path.window.get()),
            rate_bps: Some(path.rate.bps()).filter(|rate| *rate > 0),
            loss: (sent > 0).then(|| path.lost.get() as f64 / sent as f64),
            queued: Some(path.in_flight.get()),
            rx_bytes: Some(path.received.get()),
            tx_bytes: Some(path.delivered.get()),
        }
    }

    fn device(&self, number: u8) -> String {
        let link = self.links.iter().find(|link| link.slot == usize::from(number));
        link.map_or_else(|| format!("link {number} (gone)"), |link| link.device.clone())
    }

    /// Applies the current scheduling to a bond.
    fn adopt_plans(&self, client: &Client) {
        if let Some(scheduling) = &self.scheduling {
            let plans = plans(scheduling);
            client.set_plans(plans.up, plans.down);
        }
    }

    fn client_links(&self) -> Vec<ClientLink> {
        self.links.iter().filter(|link| link.v4.is_some() || link.v6.is_some()).map(client_link).collect()
    }

    /// Starts a client for a relay.
    fn begin(&mut self, stored: Stored) -> Result<(), RequestError> {
        let cannot = |detail: String| RequestError::failed("Cannot bond", detail);
        let dir = StateDir::open(&self.dir).map_err(|error| cannot(error.to_string()))?;
        let keys = KeyPair::load_or_generate(&dir, CLIENT_KEY).map_err(|error| cannot(error.to_string()))?;
        let peer = stored.peer().map_err(cannot)?;
        let client = Client::start(peer, Some(&keys), Some(RELAY_MARK)).map_err(|error| cannot(error.to_string()))?;
        client.set_links(self.client_links());
        self.adopt_plans(&client);
        follow_paths(&client, &self.changes);
        let (mut state, changes, name) = (client.state(), self.changes.clone(), stored.name.clone());
        self.sessions += 1;
        let session = self.sessions;
        tokio::spawn(async move {
            let mut reported = false;
            loop {
                let ready = *state.borrow_and_update() == State::Up;
                if ready != reported {
                    reported = ready;
                    let _ = changes.send(Change::Relay { name: name.clone(), session, ready });
                }
                if state.changed().await.is_err() {
                    let _ = changes.send(Change::Relay { name, session, ready: false });
                    return;
                }
            }
        });
        let orders = moves::serve(Recipient::Waypoint(stored.name.clone()), client.clone(), None, self.changes.clone());
        self.relays.insert(stored.name.clone(), JoinedRelay { stored, client, session, orders, passes: false });
        Ok(())
    }

    fn end(&mut self, name: &str) {
        if self.relays.remove(name).is_some() {
            let _ = self.changes.send(Change::Left { name: name.to_owned() });
        }
    }

    /// Whether `session` is the relay's current session.
    pub fn is_current(&self, name: &str, session: u64) -> bool {
        self.relays.get(name).is_some_and(|known| known.session == session)
    }

    /// Whether a relay of this name is joined.
    pub fn is_joined(&self, name: &str) -> bool {
        self.relays.contains_key(name)
    }

    /// Removes the token of a relay that has accepted this client: it is spent.
    pub fn on_ready(&mut self, name: &str) {
        let Some(known) = self.relays.get_mut(name) else { return };
        if known.stored.token.take().is_some()
            && let Err(error) = self.store()
        {
            tracing::warn!("cannot store the joined relays: {error}");
        }
    }

    fn store(&self) -> std::io::Result<()> {
        joined::write(&self.dir, &self.relays.values().map(|known| &known.stored).collect::<Vec<_>>())
    }
}

/// Plans of a bond's ends. The peer's plan is that of the download direction.
fn plans(scheduling: &BondScheduling) -> PerDirection<SchedulingPlan> {
    PerDirection::from_fn(|direction| match scheduling.scheduler {
        BondScheduler::Weights => SchedulingPlan::weights(
            scheduling.weights[direction].iter().filter_map(|(slot, share)| Some((u8::try_from(*slot).ok()?, *share))),
        ),
        scheduler => SchedulingPlan::new(scheduler),
    })
}

/// Forwards the path changes of a bond to `changes`.
fn follow_paths(client: &Client, changes: &mpsc::UnboundedSender<Change>) {
    let (mut paths, changes) = (client.path_changes(), changes.clone());
    tokio::spawn(async move {
        loop {
            match paths.recv().await {
                Ok(path) => drop(changes.send(Change::Path(path))),
                // Missed changes do not matter: the next change of each path carries its current state.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
        }
    });
}

/// Reason why no path of a link to `peer` works, given the states of that link's paths; `None` if one works.
fn why_no_path(link: &BondLink, peer: &str, states: &[PathState]) -> Option<String> {
    match states {
        _ if link.capped => Some("its allowance is used up".to_owned()),
        _ if link.v4.is_none() && link.v6.is_none() => Some("the link is down, dead or has no address".to_owned()),
        [] => Some(format!("{peer} has not answered over it; Braid keeps trying to connect")),
        states if states.iter().all(|state| *state == PathState::Dead) => Some("it is dead".to_owned()),
        _ => None,
    }
}

fn path_state(path: &BondPath) -> ApiPathState {
    match path.state {
        PathState::Good if path.backup => ApiPathState::Backup,
        PathState::Probing => ApiPathState::Probing,
        PathState::Good => ApiPathState::Good,
        PathState::Suspect => ApiPathState::Suspect,
        PathState::Dead => ApiPathState::Dead,
    }
}

fn client_link(link: &BondLink) -> ClientLink {
    ClientLink {
        number: link.slot as u8,
        device: Some(link.device.clone()),
        v4: link.v4,
        v6: link.v6,
        backup: link.backup,
        dead: link.dead,
    }
}
