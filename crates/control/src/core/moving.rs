//! Moves running direct flows from link to link, in agreement with the other host (Hercules; Yap's thesis, 2.3.2).
//!
//! The other host runs Braid and takes requests over its bond. A move has these steps, so that neither end receives what it does not expect: this machine
//! accepts the new addresses; the other one accepts them; this machine tests the way with segments that connections ignore; once one has arrived, the other
//! host sends; once something of that has arrived, this machine sends. Leases end at both hosts if one of them is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_api::Accepted;
use braid_decide::detection::HostStatus;
use braid_decide::tunnel::{CLIENT_DEVICE, End, Tunnel};
use braid_model::key::PublicKey;
use braid_model::{Family, Protocol, SequenceNumbers, Time};
use ipnet::IpNet;

use super::Core;
use super::relocated::MovedFlow;
use super::timeouts::RETRY;
use crate::RequestError;
use crate::links::Link;
use crate::steering::{Ends, FlowRow, RedirectedFlow, Steering, SteeringError};

mod accepted;
mod datagrams;
mod explained;
mod leaving;

/// How long a host rewrites a flow's packets without being asked again.
const LEASE: Duration = Duration::from_secs(30);
/// When it is asked again.
const RENEWAL: Duration = Duration::from_secs(10);
/// How long this machine may take until it accepts the new addresses.
const PREPARATION: Duration = Duration::from_secs(3);
/// How often it is looked whether it does.
const LOOK: Duration = Duration::from_millis(10);
/// How long the other host may take to answer.
const ANSWER: Duration = Duration::from_secs(20);
/// Interval at which a way is tested again until something arrives.
const TEST_INTERVAL: Duration = Duration::from_millis(250);
/// Flows of an order whose segments are sent again.
const REPEATED: usize = 8;
/// How long packets of the other host may take to arrive after it began to send.
const TEST: Duration = Duration::from_secs(1);
/// How long it is known at first that a way drops packets. The time doubles with each test of it that fails, up to the longest.
const BLOCKED_FOR: Duration = Duration::from_secs(30);
const BLOCKED_LONGEST: Duration = Duration::from_secs(15 * 60);
/// Why a flow does not use such a way.
const BLOCKED: &str = "a firewall or NAT on the way over that link drops packets of connections whose start it did not see";
/// A flow that could not move is tried again after this time, which doubles up to the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long it is known why a flow could not move.
const REFUSAL: Duration = Duration::from_secs(60);
/// Maximum number of flows of a [`MoveOrder`].
pub const MAX_ORDER: usize = 256;
/// Longest reason of another host, in characters.
const MAX_REASON: usize = 200;
/// Number of ports that are tried if another flow has the flow's own port on the new link.
const PORTS: u16 = 16;

/// What another host is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoveOrder {
    /// Who is asked.
    pub recipient: Recipient,
    /// Number of the order.
    pub number: u64,
    /// Slot of the link whose path shows that this machine receives there; `None`: that is not asked for.
    pub slot: Option<usize>,
    /// For how long; `None`: the flows use their own link again.
    pub lease: Option<Duration>,
    /// What the host does now.
    pub step: MoveStep,
    /// The flows, at most [`MAX_ORDER`].
    pub flows: Vec<OrderedFlow>,
}

/// Who is asked to move flows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recipient {
    /// The host to which they run.
    Host(IpAddr),
    /// A relay, by its name, whose host they pass on the way.
    Waypoint(String),
}

/// A step of a move, at the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MoveStep {
    /// It accepts packets with the new addresses.
    Accept,
    /// It sends such packets once one has arrived.
    Test,
    /// It goes on to do both.
    Renew,
    /// It sends proofs to the own addresses of flows of datagrams.
    Prove,
}

/// A flow of a [`MoveOrder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OrderedFlow {
    /// From this machine, as the socket has it.
    pub own: Ends,
    /// This machine's address and port on the way, as the recipient is to see them.
    pub via: SocketAddr,
    /// The sequence numbers with which it began, or the proof of a flow of datagrams; zero for a waypoint, which does not see them, and where a proof is asked for.
    pub numbers: SequenceNumbers,
    /// If it passes a waypoint: that host's address and port towards the destination; `None`: it has none yet.
    pub far: Option<SocketAddr>,
}

/// The flows that move, and those that have moved.
#[derive(Debug, Default)]
pub(super) struct Moving {
    /// Hosts that take requests.
    hosts: BTreeSet<IpAddr>,
    /// Those to which a tunnel leads, in a bond.
    tunnels: BTreeMap<IpAddr, Tunnel>,
    flows: BTreeMap<Ends, Move>,
    /// Relays that let flows pass.
    waypoints: BTreeSet<String>,
    /// Flows for which a relay was asked for a way, by the order.
    requests: BTreeMap<u64, WayRequest>,
    /// Flows that could not move.
    refused: BTreeMap<Ends, Refusal>,
    /// Ways that drop packets of connections whose start they did not see: from an address of this machine, and so for one network, to a service, since firewalls
    /// judge by the port of the service too.
    blocked: BTreeMap<Judged, Blocked>,
    /// Flows of datagrams.
    datagrams: datagrams::Datagrams,
    /// Hosts whose connections to this machine the steering lists.
    openers: Vec<(IpNet, bool)>,
    /// Flows look for another way at once, because theirs has turned out to be blocked.
    leave: bool,
    /// Orders without answer: their flows, in their order, and who was asked.
    asked: BTreeMap<u64, (Vec<Ends>, Recipient)>,
    last: u64,
    due: Option<Time>,
}

/// Why a flow could not move.
#[derive(Debug)]
struct Refusal {
    reason: String,
    /// When it may be tried again, and the pause before that.
    until: Time,
    pause: Duration,
}

/// By what firewalls judge a flow: an address of this machine, the other end with the port of the service, and whether the service is here.
type Judged = (IpAddr, SocketAddr, bool);

/// What flows of one order have in common: a host on the way with the port of the service, and whether the service is here.
type Group = (SocketAddr, bool);

/// A way that drops packets.
#[derive(Debug, Clone, Copy)]
struct Blocked {
    /// When that was last seen.
    at: Time,
    /// How long nobody tries again. For as long again, one flow tries for all.
    pause: Duration,
}

impl Blocked {
    fn is_over(&self, now: Time) -> bool {
        self.at + self.pause <= now
    }
}

/// A relay that was asked to let a flow pass.
#[derive(Debug)]
struct WayRequest {
    own: Ends,
    relay: String,
    slot: usize,
    client: SocketAddr,
    /// When there is no hope of an answer.
    until: Time,
}

/// A host that a flow passes on the way. The flow's addresses on the way are those between this machine and it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Waypoint {
    relay: String,
    /// Its address and port towards the destination.
    far: SocketAddr,
}

/// The link of a flow, and its addresses on the way.
#[derive(Debug, Clone)]
struct Way {
    /// `None`: its packets go on in UDP, through the tunnel to its host.
    slot: Option<usize>,
    wire: Ends,
    waypoint: Option<Waypoint>,
}

#[derive(Debug, Clone)]
struct Move {
    host: IpAddr,
    /// The other host opened it.
    accepted: bool,
    way: Way,
    /// The one that both hosts agreed about before.
    before: Option<Way>,
    /// `None` until they were read.
    numbers: Option<SequenceNumbers>,
    stage: Stage,
    /// The last order about it. Answers to earlier ones do not count.
    order: u64,
    /// The user has moved it, so it stays while its link works.
    by_hand: bool,
    /// Segments sent again before it moved.
    retransmissions: u32,
    /// If it passes a waypoint: segments sent again until its packets last came from there.
    answered: u32,
    /// Since when segments are sent again, and nothing comes from the waypoint.
    silent: Option<Time>,
}

/// What is to be done with a flow that is to use a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plan {
    /// It uses it already, or is moving there.
    Stay,
    /// It gets its own addresses on the way.
    GoHome,
    /// It gets these addresses on the way, of the link in this slot; `None`: of the tunnel to its host.
    Move(Ends, Option<usize>),
}

/// Where a flow is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Goal {
    /// To the link that has its address.
    Home,
    /// To the link in this slot.
    Link(usize),
    /// Into the tunnel to its host.
    Tunnel,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// This machine does not accept the new addresses yet. At this time it gives up.
    Preparing(Time),
    /// The other host was asked to accept the new addresses. At this time there is no hope of an answer.
    Asked(Time),
    /// It accepts them, and the way is tested.
    Testing {
        /// Whether the other host sends.
        sends: bool,
        /// When there is no hope that anything arrives.
        until: Time,
        /// When the next segment is due.
        next: Time,
    },
    /// Both use the new link. At this time the leases are renewed.
    Moved(Time),
}

impl Moving {
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Flows whose packets go through tunnels, not over a link of their own.
    pub(super) fn in_tunnels(&self) -> BTreeSet<Ends> {
        let is_inside = |known: &Move| known.before.as_ref().unwrap_or(&known.way).slot.is_none();
        self.flows.iter().filter(|(_, known)| is_inside(known)).map(|(own, _)| *own).collect()
    }

    fn takes(&self, recipient: &Recipient) -> bool {
        match recipient {
            Recipient::Host(host) => self.hosts.contains(host),
            Recipient::Waypoint(relay) => self.waypoints.contains(relay),
        }
    }

    /// Notes why a flow stays for a while.
    fn refuse(&mut self, now: Time, own: Ends, reason: String) {
        tracing::debug!(source = %own.source, destination = %own.destination, reason, "a flow cannot move");
        let pause = self.refused.get(&own).map_or(FIRST_PAUSE, |before| (before.pause * 2).min(LONGEST_PAUSE));
        self.refused.insert(own, Refusal { reason, until: now + pause, pause });
    }

    /// Whether the flow is on its way.
    fn is_moving(&self, own: &Ends) -> bool {
        self.flows.get(own).is_some_and(|flow| !matches!(flow.stage, Stage::Moved(_)))
    }
}

impl Move {
    /// The way on which both hosts have agreed; `None`: the flow's own.
    fn agreed(&self) -> Option<&Way> {
        if matches!(self.stage, Stage::Moved(_)) { Some(&self.way) } else { self.before.as_ref() }
    }

    /// Who is asked about its move. What is behind a waypoint does not concern the host.
    fn recipient(&self) -> Recipient {
        match (&self.way.waypoint, &self.before) {
            (Some(waypoint), Some(before)) if before.waypoint.as_ref() == Some(waypoint) => Recipient::Waypoint(waypoint.relay.clone()),
            _ => Recipient::Host(self.host),
        }
    }

    /// The flows with which it moves. Firewalls judge by the port of the service; a waypoint has another port for each flow.
    fn group(&self, own: &Ends) -> Group {
        (SocketAddr::new(self.way.wire.destination.ip(), self.service(own)), self.accepted)
    }

    /// Port of its service.
    fn service(&self, own: &Ends) -> u16 {
        if self.accepted { own.source.port() } else { own.destination.port() }
    }

    fn judged(&self, own: &Ends) -> Judged {
        judged(Some(self), self.way.wire.source.ip(), self.way.wire.destination, (self.service(own), self.accepted))
    }

    /// What a recipient is asked, and the slot of the link that it must see. `None`: its sequence numbers are not known.
    fn ordered(&self, own: &Ends, recipient: &Recipient) -> Option<(Option<usize>, OrderedFlow)> {
        let far = self.way.waypoint.as_ref().map(|waypoint| waypoint.far);
        let hidden = far.filter(|_| matches!(recipient, Recipient::Host(_)));
        let flow = OrderedFlow { own: *own, via: hidden.unwrap_or(self.way.wire.source), numbers: self.numbers?, far };
        Some((self.way.slot.filter(|_| hidden.is_none()), flow))
    }
}

impl<S: Steering> Core<S> {
    /// Sets the relays that let flows pass.
    pub fn set_waypoints(&mut self, relays: BTreeSet<String>) {
        self.moving.waypoints = relays;
    }

    /// Sets the hosts that take requests to move flows, and those of them that move flows of datagrams, too.
    pub fn set_movers(&mut self, now: Time, hosts: BTreeSet<IpAddr>, datagrams: BTreeSet<IpAddr>) -> Result<(), SteeringError> {
        (self.moving.hosts, self.moving.datagrams.hosts) = if self.config.moves { (hosts, datagrams) } else { Default::default() };
        self.update_openers(now)?;
        self.update_relocated(now)?;
        self.step_moving(now)
    }

    /// Sets the tunnel that leads to a host; `None`: none does any more.
    pub fn set_tunnel(&mut self, now: Time, host: IpAddr, tunnel: Option<Tunnel>) -> Result<(), SteeringError> {
        match tunnel {
            Some(tunnel) => drop(self.moving.tunnels.insert(host, tunnel)),
            None => drop(self.moving.tunnels.remove(&host)),
        }
        self.update_relocated(now)
    }

    /// Hosts that run Braid to which direct flows run that could move. Each needs a bond, over which it can be asked.
    pub fn hosts_to_ask_for_moves(&self, now: Time) -> Vec<(IpAddr, PublicKey)> {
        if !self.moves_flows() {
            return Vec::new();
        }
        let mut hosts = BTreeMap::new();
        for living in self.flows.iter().filter(|living| can_move(&living.row) && !self.has_ended(living)) {
            let host = living.row.remote.0.to_canonical();
            if hosts.contains_key(&host) || !self.may_ask(host) || !self.may_steer(host) {
                continue;
            }
            if let HostStatus::Runs(key) = self.detection.status(now, host)
                && self.could_use_several(&living.row)
            {
                hosts.insert(host, key);
            }
        }
        hosts.into_iter().collect()
    }

    /// Whether a flow could change its link if its destination ran Braid.
    pub(super) fn could_move(&self, row: &FlowRow) -> bool {
        self.moves_flows() && can_move(row) && self.could_use_several(row)
    }

    /// Whether another host takes requests to move flows.
    pub(super) fn has_movers(&self) -> bool {
        self.moves_flows() && !self.moving.hosts.is_empty()
    }

    /// Whether direct flows may move at all.
    fn moves_flows(&self) -> bool {
        self.config.moves && self.steering.unmoved().is_none() && !self.saves_power() && !self.in_force.confines(None)
    }

    fn could_use_several(&self, row: &FlowRow) -> bool {
        !self.rule_expired(row.started, row.rule) && self.links_in_any_context(row).iter().any(|slot| slot != row.slot)
    }

    /// `POST /v1/move`, for direct flows: those with this id, application or program name. `None`: there is none.
    pub fn move_direct(
        &mut self,
        now: Time,
        what: &str,
        to: Option<&str>,
        through: Option<&str>,
    ) -> Option<Result<Accepted, RequestError>> {
        let named = |row: &FlowRow| row.id.0.to_string() == what || self.apps.name(&row.app) == what || row.app.name == what;
        let rows: Vec<FlowRow> = self.flows.iter().map(|living| &living.row).filter(|row| named(row)).cloned().collect();
        if rows.is_empty() {
            return None;
        }
        let slot = to.map(|device| self.links.values().find(|link| link.facts.name == device).map(|link| link.slot));
        if slot == Some(None) {
            let detail = format!("{} is not a link; see \"braid links\"", to.unwrap_or_default());
            return Some(Err(RequestError::not_found("No such link", detail)));
        }
        let wanted: Vec<_> = rows.into_iter().map(|row| (row, slot.flatten())).collect();
        let results = match through {
            None => {
                let goal = |(row, slot): &(FlowRow, Option<usize>)| (row.clone(), slot.map_or(Goal::Home, Goal::Link));
                self.begin_moves(now, &wanted.iter().map(goal).collect::<Vec<_>>(), true)
            }
            Some(relay) => wanted.iter().map(|(row, slot)| self.request_way(now, row, *slot, relay)).collect(),
        };
        let moved = results.iter().filter(|result| result.is_ok()).count();
        let kept: BTreeSet<String> = results.into_iter().filter_map(Result::err).collect();
        // An error is repeated when the next step is due.
        let _ = self.step_moving(now);
        let kept = kept.into_iter().collect::<Vec<_>>().join("; ");
        if moved == 0 {
            return Some(Err(RequestError::conflict("Not moved", format!("no flow was moved: {kept}"))));
        }
        let (flows, verb) = if moved == 1 { ("1 flow".to_owned(), "is") } else { (format!("{moved} flows"), "are") };
        let to = through.map(|relay| format!("the waypoint {relay}")).or(to.map(str::to_owned));
        let to = to.as_deref().unwrap_or("the link that it began on");
        let message = format!(
            "{flows} {verb} moving to {to}, if the other host agrees and the way there passes their packets: \"braid flows\" shows the link, \"braid explain\" why a flow stays"
        );
        let warnings = if kept.is_empty() { Vec::new() } else { vec![format!("some flows were not moved: {kept}")] };
        Some(Ok(Accepted { message, warnings }))
    }

    /// Begins to move flows. Returns why flows stay, in the same order.
    fn begin_moves(&mut self, now: Time, wanted: &[(FlowRow, Goal)], by_hand: bool) -> Vec<Result<(), String>> {
        let plans: Vec<Result<Plan, String>> = wanted.iter().map(|(row, to)| self.plan_move(now, row, *to)).collect();
        let mut results: Vec<Result<(), String>> = plans.iter().map(|plan| plan.as_ref().map(|_| ()).map_err(Clone::clone)).collect();
        let home: Vec<Ends> =
            wanted.iter().zip(&plans).filter(|(_, plan)| **plan == Ok(Plan::GoHome)).map(|((row, _), _)| Ends::of(row)).collect();
        // What fails in the kernel is repeated by the next update.
        let _ = self.go_home(now, &home);
        let mut left: Vec<(usize, MovedFlow, Option<usize>)> = Vec::new();
        for (place, (row, _)) in wanted.iter().enumerate() {
            if let Ok(Plan::Move(wire, slot)) = plans[place] {
                left.push((place, MovedFlow::of_socket(Ends::of(row), wire), slot));
            }
        }
        // A flow whose port another one has on the new link gets another port.
        for _ in 0..PORTS {
            if left.is_empty() {
                break;
            }
            let flows: Vec<MovedFlow> = left.iter().map(|(_, flow, _)| *flow).collect();
            let mut refused = match self.relocate(now, &flows, false, LEASE) {
                Ok(done) => done.refused,
                Err(error) => {
                    left.iter().for_each(|(place, ..)| results[*place] = Err(error.to_string()));
                    break;
                }
            };
            let mut again = Vec::new();
            for (number, (place, flow, slot)) in left.into_iter().enumerate() {
                match refused.remove(&number) {
                    None => {
                        results[place] = Ok(());
                        let waypoint = self.moving.flows.get(&flow.own).and_then(|known| known.way.waypoint.clone());
                        let way = Way { slot, wire: flow.wire, waypoint };
                        self.prepare(now, &wanted[place].0, way, by_hand);
                    }
                    Some(error) => {
                        if error.is_taken() {
                            let mut next = flow;
                            next.wire.source.set_port(flow.wire.source.port().wrapping_add(1).max(1024));
                            again.push((place, next, slot));
                        }
                        results[place] = Err(error.to_string());
                    }
                }
            }
            left = again;
        }
        results
    }

    /// Checks whether a flow can move.
    fn plan_move(&self, now: Time, row: &FlowRow, to: Goal) -> Result<Plan, String> {
        if !can_move(row) {
            return Err("only established TCP connections and flows of datagrams of this machine's programs can move".to_owned());
        }
        let own = Ends::of(row);
        let host = own.destination.ip();
        if !self.moving.hosts.contains(&host) {
            return Err(format!(
                "{host} does not agree to moves: this machine needs moves = true in [detect], and the host \"braid relay --local --moves\"; a direct flow to any \
                 other host cannot change its link"
            ));
        }
        self.moving.datagrams.check(&own)?;
        let known = self.moving.flows.get(&own);
        if self.is_moved_by_others(now, row) {
            return Err("the other host, or a program, moves it already".to_owned());
        }
        if to == Goal::Home {
            return Ok(Plan::GoHome);
        }
        let waypoint = known.and_then(|known| known.way.waypoint.as_ref());
        if let (Some(known), Some(waypoint)) = (known, waypoint) {
            let is_there = matches!(known.stage, Stage::Moved(_)) || known.recipient() != Recipient::Host(host);
            if !self.moving.waypoints.contains(&waypoint.relay) {
                let lives =
                    self.links.iter().any(|(_, link)| link.facts.source(row.family) == Some(own.source.ip()) && link.usable(row.family));
                return if lives { Ok(Plan::GoHome) } else { Err(format!("the waypoint {} cannot be asked now", waypoint.relay)) };
            }
            if !is_there {
                return Err(format!("it is moving to the waypoint {}", waypoint.relay));
            }
        }
        let Goal::Link(slot) = to else {
            if own.protocol == Protocol::Udp {
                return Err(format!("{BLOCKED}, and only TCP goes on inside the bond"));
            }
            let tunnel = self.moving.tunnels.get(&host).ok_or_else(|| format!("{BLOCKED}, and {host} takes no packets over its bond"))?;
            let [source, destination] = [End::Client, End::Server].map(|end| tunnel.address(end, row.family));
            let wire = Ends {
                source: SocketAddr::new(source, own.source.port()),
                destination: SocketAddr::new(destination, own.destination.port()),
                ..own
            };
            let is_there = known.is_some_and(|known| known.way.slot.is_none() && known.way.wire.source.ip() == source);
            let device = self.network.interfaces.iter().find(|device| device.name == CLIENT_DEVICE);
            let rule = self.rule_of(now, &RedirectedFlow::of(row));
            return match waypoint {
                Some(waypoint) => Err(format!("it passes the waypoint {}", waypoint.relay)),
                None if device.is_some_and(|device| !self.allows(rule, device)) => {
                    Err("its rule names links, and the bond to its host, in which it could go on, uses all".to_owned())
                }
                None => Ok(if is_there { Plan::Stay } else { Plan::Move(wire, None) }),
            };
        };
        let address = self.links.in_slot(slot).and_then(|link| link.facts.source(row.family));
        let address = address.ok_or_else(|| format!("the link has no address of the family of {host}"))?;
        if address == own.source.ip() && waypoint.is_none() {
            return Ok(Plan::GoHome);
        }
        // The list of flows may be older than the move.
        let is_there = |known: &Move| known.way.slot == Some(slot) && known.way.wire.source.ip() == address;
        if known.is_some_and(is_there) {
            return Ok(Plan::Stay);
        }
        let destination = destination(known, &own);
        if self
            .moving
            .blocked
            .get(&judged(known, address, destination, (row.service(), row.accepted)))
            .is_some_and(|blocked| blocked.at + BLOCKED_FOR > now)
        {
            return Err(format!("{BLOCKED}, as a test has shown less than {} s ago", BLOCKED_FOR.as_secs()));
        }
        Ok(Plan::Move(Ends { source: SocketAddr::new(address, own.source.port()), destination, ..own }, Some(slot)))
    }

    /// Asks a relay to let a flow pass, over the link in this slot, or over the widest one that the flow's rule admits.
    fn request_way(&mut self, now: Time, row: &FlowRow, slot: Option<usize>, relay: &str) -> Result<(), String> {
        self.plan_move(now, row, Goal::Home)?;
        let own = Ends::of(row);
        if own.protocol == Protocol::Udp {
            return Err("only TCP connections pass a waypoint".to_owned());
        }
        if !self.moving.waypoints.contains(relay) {
            return Err(format!(
                "{relay} is no waypoint: a waypoint is a relay that this machine has joined, with \"braid relay --waypoint\" beside a daemon"
            ));
        }
        if self.moving.is_moving(&own) || self.moving.requests.values().any(|request| request.own == own) {
            return Err("it is moving already".to_owned());
        }
        let admitted = self.admitted(self.rule_of(now, &RedirectedFlow::of(row)), row.family);
        let slot = slot.or_else(|| self.widest(now, admitted)).ok_or("its rule admits no link that works")?;
        let address =
            self.links.in_slot(slot).and_then(|link| link.facts.source(row.family)).ok_or("the link has no address of its family")?;
        let client = SocketAddr::new(address, own.source.port());
        self.moving.requests.insert(self.moving.last + 1, WayRequest { own, relay: relay.to_owned(), slot, client, until: now + ANSWER });
        let flow = OrderedFlow { own, via: client, numbers: SequenceNumbers { sent: 0, received: 0 }, far: None };
        self.order(&Recipient::Waypoint(relay.to_owned()), Some(slot), Some(LEASE), MoveStep::Renew, vec![flow]);
        Ok(())
    }

    /// A relay lets the flow of this order pass, at its address `near` towards this machine and `far` towards the other host, which can be asked now.
    pub fn on_way(&mut self, now: Time, number: u64, near: SocketAddr, far: SocketAddr) -> Result<(), SteeringError> {
        self.moving.asked.remove(&number);
        let Some(WayRequest { own, relay, slot, client, .. }) = self.moving.requests.remove(&number) else { return Ok(()) };
        let row = self.flows.iter().map(|living| &living.row).find(|row| Ends::of(row) == own).cloned();
        // It may have ended, or have begun to leave a dead link meanwhile.
        let Some(row) = row.filter(|_| !self.moving.is_moving(&own)) else { return Ok(()) };
        let wire = Ends { source: client, destination: near, ..own };
        let mut done = self.relocate(now, &[MovedFlow::of_socket(own, wire)], false, LEASE);
        let refused =
            done.as_mut().map_or_else(|error| Some(error.to_string()), |done| done.refused.remove(&0).map(|error| error.to_string()));
        match refused {
            Some(reason) => self.moving.refuse(now, own, reason),
            None => {
                let way = Way { slot: Some(slot), wire, waypoint: Some(Waypoint { relay, far }) };
                self.prepare(now, &row, way, true);
            }
        }
        self.step_moving(now)
    }

    fn prepare(&mut self, now: Time, row: &FlowRow, way: Way, by_hand: bool) {
        let (own, retransmissions) = (Ends::of(row), row.retransmissions.unwrap_or(0));
        tracing::debug!(source = %own.source, destination = %own.destination, wire = %way.wire.source, "a flow begins to move");
        let known = self.moving.flows.get(&own);
        let before = known.and_then(Move::agreed).cloned();
        let numbers = known.and_then(|known| known.numbers);
        let stage = Stage::Preparing(now + PREPARATION);
        let (host, accepted) = (own.destination.ip(), row.accepted);
        self.moving.flows.insert(
            own,
            Move {
                host,
                accepted,
                way,
                before,
                numbers,
                stage,
                order: 0,
                by_hand,
                retransmissions,
                answered: retransmissions,
                silent: None,
            },
        );
        self.moving.due = Some(now);
    }

    /// Gives flows their own addresses on the way again. Both ends always accept these.
    fn go_home(&mut self, now: Time, flows: &[Ends]) -> Result<(), SteeringError> {
        let mut told: BTreeMap<IpAddr, Vec<OrderedFlow>> = BTreeMap::new();
        for own in flows {
            // A waypoint's lease ends by itself. Until then what is under way arrives.
            if let Some(moved) = self.moving.flows.remove(own)
                && let Some((_, flow)) = moved.ordered(own, &Recipient::Host(moved.host))
            {
                told.entry(moved.host).or_default().push(flow);
            }
        }
        for (host, flows) in told {
            flows.chunks(MAX_ORDER).for_each(|part| self.order(&Recipient::Host(host), None, None, MoveStep::Renew, part.to_vec()));
        }
        if flows.is_empty() { Ok(()) } else { self.bring_back(now, flows) }
    }

    fn order(&mut self, recipient: &Recipient, slot: Option<usize>, lease: Option<Duration>, step: MoveStep, flows: Vec<OrderedFlow>) {
        self.moving.last += 1;
        let (number, recipient) = (self.moving.last, recipient.clone());
        if lease.is_some() {
            for flow in &flows {
                self.moving.flows.entry(flow.own).and_modify(|known| known.order = number);
            }
            self.moving.asked.insert(number, (flows.iter().map(|flow| flow.own).collect(), recipient.clone()));
        }
        tracing::debug!(?recipient, number, slot, ?step, flows = flows.len(), "asking a host to move flows");
        self.actions.moves.push(MoveOrder { recipient, number, slot, lease, step, flows });
    }

    /// The other host's answer: why flows were refused, by their places in the order; or why there is none.
    pub fn on_move_answer(&mut self, now: Time, number: u64, answer: Result<BTreeMap<usize, String>, String>) -> Result<(), SteeringError> {
        let asked = self.moving.asked.remove(&number);
        if let Some(request) = self.moving.requests.remove(&number) {
            let reason = answer.map_or_else(|reason| reason, |refused| refused.into_values().next().unwrap_or_default());
            self.moving.refuse(now, request.own, quoted(&format!("the waypoint {}", request.relay), &reason));
            return Ok(());
        }
        let Some((flows, recipient)) = asked else { return Ok(()) };
        if self.on_proofs(now, number, &flows, &answer) {
            return Ok(());
        }
        let (mut renewed, mut failed) = (Vec::new(), Vec::new());
        let mut next: BTreeMap<(Recipient, Option<usize>, MoveStep), Vec<OrderedFlow>> = BTreeMap::new();
        for (place, own) in flows.iter().enumerate() {
            // The flow may have been moved on since, or have gone home.
            let Some(known) = self.moving.flows.get_mut(own).filter(|known| known.order == number) else { continue };
            match (&answer, known.stage) {
                // It is asked again, or the lease ends.
                (Err(_), Stage::Moved(_)) => known.stage = Stage::Moved(now + RETRY * 8),
                (Err(reason), _) => failed.push((*own, reason.clone())),
                (Ok(refused), _) => match refused.get(&place) {
                    Some(reason) => {
                        let who = match &recipient {
                            Recipient::Host(_) => "the other host".to_owned(),
                            Recipient::Waypoint(relay) => format!("the waypoint {relay}"),
                        };
                        failed.push((*own, quoted(&who, reason)));
                    }
                    None => match known.stage {
                        // The waypoint goes on; now the host.
                        Stage::Moved(_) if matches!(recipient, Recipient::Waypoint(_)) => {
                            let host = Recipient::Host(known.host);
                            if let Some((slot, flow)) = known.ordered(own, &host) {
                                next.entry((host, slot, MoveStep::Renew)).or_default().push(flow);
                            }
                        }
                        Stage::Moved(_) => renewed.push(MovedFlow::of_socket(*own, known.way.wire)),
                        Stage::Testing { .. } if known.way.slot.is_none() => renewed.push(MovedFlow::of_socket(*own, known.way.wire)),
                        Stage::Testing { next, .. } => known.stage = Stage::Testing { sends: true, until: now + TEST, next },
                        Stage::Preparing(_) | Stage::Asked(_) => {
                            // It is known that a bond passes packets.
                            let is_known = known.way.slot.is_none();
                            let step = if is_known { MoveStep::Renew } else { MoveStep::Test };
                            let until = now + ANSWER;
                            known.stage = Stage::Testing { sends: false, until, next: if is_known { until } else { now } };
                            if let Some((slot, flow)) = known.ordered(own, &recipient) {
                                next.entry((recipient.clone(), slot, step)).or_default().push(flow);
                            }
                        }
                    },
                },
            }
        }
        for ((recipient, slot, step), flows) in next {
            self.order(&recipient, slot, Some(LEASE), step, flows);
        }
        failed.extend(self.send_by_new_link(now, &renewed));
        let given_up = self.give_up(now, failed);
        self.step_moving(now).and(given_up)
    }

    /// Processes the answer of a host that got no segment of the test of this order, or sees that a NAT translates the way. It has moved none of the flows, and
    /// may say why, by their places.
    pub fn on_move_blocked(&mut self, now: Time, number: u64, mut reasons: BTreeMap<usize, String>) -> Result<(), SteeringError> {
        if self.moving.requests.contains_key(&number) {
            return self.on_move_answer(now, number, Err(BLOCKED.to_owned()));
        }
        let flows = self.moving.asked.remove(&number).map(|(flows, _)| flows).unwrap_or_default();
        let is_its = |own: &Ends| self.moving.flows.get(own).is_some_and(|known| known.order == number);
        let blocked = flows.into_iter().enumerate().filter(|(_, own)| is_its(own));
        let said =
            |(place, own)| (own, reasons.remove(&place).map_or_else(|| BLOCKED.to_owned(), |reason| quoted("the other host", &reason)));
        let blocked = blocked.map(said).collect();
        self.note_blocked(now, blocked)
    }

    /// Notes that the ways of these flows do not pass their packets. Flows that cannot stay where they are take another way.
    fn note_blocked(&mut self, now: Time, flows: Vec<(Ends, String)>) -> Result<(), SteeringError> {
        if flows.is_empty() {
            return Ok(());
        }
        // Of a tunnel nothing is known afterwards: a host that refuses it is asked again after a pause.
        let of_link = |own: &Ends| self.moving.flows.get(own).filter(|known| known.way.slot.is_some()).map(|known| known.judged(own));
        let ways: BTreeMap<Ends, _> = flows.iter().filter_map(|(own, _)| Some((*own, of_link(own)?))).collect();
        for service in ways.values() {
            let known = self.moving.blocked.get(service).copied();
            if known.is_none_or(|known| known.is_over(now)) {
                let pause = known.map_or(BLOCKED_FOR, |known| (known.pause * 2).min(BLOCKED_LONGEST));
                self.moving.blocked.insert(*service, Blocked { at: now, pause });
            }
        }
        let done = self.give_up(now, flows);
        for own in ways.keys() {
            self.moving.refused.entry(*own).and_modify(|refusal| refusal.until = now);
        }
        // The next step finds other ways, for all flows whose answers have arrived by then.
        self.moving.leave |= !ways.is_empty();
        if self.moving.leave {
            self.moving.due = Some(now);
        }
        done
    }

    /// Sends flows' packets over the links that both hosts agreed about, and goes on to. Returns why flows cannot.
    fn send_by_new_link(&mut self, now: Time, agreed: &[MovedFlow]) -> Vec<(Ends, String)> {
        let mut refused = match self.relocate(now, agreed, true, LEASE) {
            Ok(done) => done.refused.into_iter().map(|(place, error)| (place, error.to_string())).collect(),
            Err(error) => (0..agreed.len()).map(|place| (place, error.to_string())).collect::<BTreeMap<_, _>>(),
        };
        let (mut arrived, mut failed) = (false, Vec::new());
        for (place, flow) in agreed.iter().enumerate() {
            match (refused.remove(&place), self.moving.flows.get_mut(&flow.own)) {
                (Some(reason), _) => failed.push((flow.own, reason)),
                (None, Some(known)) => {
                    arrived |= !matches!(known.stage, Stage::Moved(_));
                    (known.stage, known.before) = (Stage::Moved(now + RENEWAL), None);
                    let judged = known.judged(&flow.own);
                    if self.moving.blocked.remove(&judged).is_some() {
                        let is_like = |own: &Ends| own.destination.ip() == judged.1.ip();
                        let waiting = self.moving.refused.iter_mut().filter(|(own, _)| is_like(own));
                        waiting.for_each(|(_, refusal)| refusal.until = now);
                    }
                    self.moving.refused.remove(&flow.own);
                }
                (None, None) => {}
            }
        }
        if arrived {
            let moved: BTreeSet<Ends> = agreed.iter().map(|flow| flow.own).collect();
            let left = self.flows.iter().map(|living| &living.row).filter(|row| moved.contains(&Ends::of(row)));
            let links = self.links.iter();
            let of = |row: &FlowRow| (row.local.0, row.family);
            let homes: BTreeSet<(IpAddr, Family)> = left.map(of).collect();
            let is_dead = |link: &Link| {
                homes
                    .iter()
                    .any(|(source, family)| !link.usable(*family) && link.facts.source(*family).is_none_or(|address| address == *source))
            };
            self.actions.left.extend(links.filter(|(_, link)| is_dead(link)).map(|(index, _)| index));
        }
        failed
    }

    /// Tests the ways of flows that wait for it: sends segments, and looks whether something has arrived. If it has for one flow of an order, all of them move.
    fn test_ways(&mut self, now: Time) -> Result<Vec<(Ends, String)>, SteeringError> {
        let mut due = Vec::new();
        let mut repeated: BTreeMap<u64, usize> = BTreeMap::new();
        for (own, flow) in &mut self.moving.flows {
            if let Stage::Testing { next, until, .. } = &mut flow.stage
                && *next <= now
            {
                // A firewall must see one segment of each flow. To find out whether anything passes, a few of an order are sent again.
                let is_first = until.since(*next) >= ANSWER;
                let again = repeated.entry(flow.order).or_default();
                *again += usize::from(!is_first);
                if is_first || *again <= REPEATED {
                    due.push(*own);
                }
                *next = now + TEST_INTERVAL;
            }
        }
        self.knock(now, &due);
        let waits = |flow: &Move| matches!(flow.stage, Stage::Testing { sends: true, .. });
        let waiting: BTreeMap<Ends, Move> =
            self.moving.flows.iter().filter(|(_, flow)| waits(flow)).map(|(own, flow)| (*own, flow.clone())).collect();
        if waiting.is_empty() {
            return Ok(Vec::new());
        }
        let arrived = self.arrived(waiting.keys().copied())?;
        let open: BTreeSet<u64> = arrived.iter().map(|own| waiting[own].order).collect();
        let (open, closed): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(_, flow)| open.contains(&flow.order));
        let open: Vec<MovedFlow> = open.into_iter().map(|(own, flow)| MovedFlow::of_socket(own, flow.way.wire)).collect();
        let failed = if open.is_empty() { Vec::new() } else { self.send_by_new_link(now, &open) };
        let is_over = |flow: &Move| matches!(flow.stage, Stage::Testing { until, .. } if until <= now);
        let blocked = closed.into_iter().filter(|(_, flow)| is_over(flow)).map(|(own, _)| (own, BLOCKED.to_owned())).collect();
        self.note_blocked(now, blocked)?;
        Ok(failed)
    }

    /// Leaves flows where they are: on the link that both hosts agreed about last.
    fn give_up(&mut self, now: Time, flows: Vec<(Ends, String)>) -> Result<(), SteeringError> {
        let (mut home, mut back) = (Vec::new(), Vec::new());
        for (own, reason) in flows {
            self.moving.refuse(now, own, reason);
            match self.moving.flows.get(&own).and_then(|known| known.before.clone()) {
                Some(way) => back.push((MovedFlow::of_socket(own, way.wire), way)),
                None => home.push(own),
            }
        }
        if !back.is_empty() {
            let flows: Vec<MovedFlow> = back.iter().map(|(flow, _)| *flow).collect();
            let refused = self.relocate(now, &flows, true, LEASE).map(|done| done.refused);
            for (place, (flow, way)) in back.into_iter().enumerate() {
                match self.moving.flows.get_mut(&flow.own) {
                    // The other host may have agreed to the new addresses, so it is asked at once.
                    Some(known) if refused.as_ref().is_ok_and(|refused| !refused.contains_key(&place)) => {
                        (known.way, known.before, known.stage) = (way, None, Stage::Moved(now));
                    }
                    _ => home.push(flow.own),
                }
            }
            self.moving.due = Some(now);
        }
        self.go_home(now, &home)
    }

    /// Takes the moves a step further, if that is due.
    pub(super) fn expire_moves(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.moving.due.is_some_and(|due| due <= now) { self.step_moving(now) } else { Ok(()) }
    }

    fn step_moving(&mut self, now: Time) -> Result<(), SteeringError> {
        // If the kernel cannot be read, again soon.
        self.moving.due = (!self.moving.flows.is_empty() || !self.moving.requests.is_empty()).then_some(now + RETRY);
        let is_due = |stage: &Stage| matches!(stage, Stage::Moved(at) if *at <= now);
        let prepares = self.moving.flows.values().any(|flow| matches!(flow.stage, Stage::Preparing(_)));
        let renews = self.moving.flows.values().any(|flow| is_due(&flow.stage));
        // Flows whose renewal is due soon are asked for together.
        let ahead = if renews { RENEWAL / 2 } else { Duration::ZERO };
        let active = if prepares { self.active_moves(now)? } else { BTreeMap::new() };
        let (mut living, mut sockets) = (BTreeMap::new(), BTreeMap::new());
        if renews {
            let flows = self.flows.iter().map(|living| &living.row).filter(|row| can_move(row));
            living = flows.map(|row| (Ends::of(row), row.retransmissions.unwrap_or(0))).collect::<BTreeMap<_, _>>();
            sockets = self.look(now, false)?;
        }
        let mut failed = self.test_ways(now)?;
        let mut over = BTreeSet::new();
        // Each order is about one way, since all its flows move if one segment arrives.
        let mut ready: BTreeMap<(Group, Option<usize>, Recipient, bool), Vec<OrderedFlow>> = BTreeMap::new();
        for (own, flow) in &mut self.moving.flows {
            let leased = self.relocated.leased(own, now) == Some(flow.way.wire);
            match flow.stage {
                _ if !leased => failed.push((*own, "the other host no longer rewrites its packets, or its lease ended".to_owned())),
                Stage::Preparing(until) => {
                    if let Some(numbers) = active.get(own).and_then(|socket| self.moving.datagrams.numbers(own, socket)) {
                        (flow.numbers, flow.stage) = (Some(numbers), Stage::Asked(now + ANSWER));
                        let recipient = flow.recipient();
                        if let Some((slot, ordered)) = flow.ordered(own, &recipient) {
                            ready.entry((flow.group(own), slot, recipient, false)).or_default().push(ordered);
                        }
                    } else if until <= now {
                        failed.push((
                            *own,
                            "its program bound or marked its socket, or this machine does not accept the new addresses in time".to_owned(),
                        ));
                    }
                }
                Stage::Asked(until) if until <= now => failed.push((*own, "the other host does not answer".to_owned())),
                Stage::Testing { sends: false, until, .. } if until <= now => {
                    failed.push((*own, "the other host does not answer".to_owned()))
                }
                Stage::Asked(_) | Stage::Testing { .. } => {}
                Stage::Moved(at) if at > now + ahead => {}
                Stage::Moved(_) => match (living.get(own), flow.numbers) {
                    // Its lease runs out while its last packets are under way.
                    (None, _) | (_, None) => drop(over.insert(*own)),
                    (Some(sent_again), _)
                        if *sent_again > flow.retransmissions && sockets.get(own).is_none_or(|socket| socket.moved.is_none()) =>
                    {
                        failed.push((*own, "nothing comes over the new link: a firewall may drop what it did not see begin".to_owned()));
                    }
                    (_, Some(_)) => {
                        let waypoint = flow.way.waypoint.as_ref().map(|waypoint| Recipient::Waypoint(waypoint.relay.clone()));
                        let recipient = waypoint.unwrap_or(Recipient::Host(flow.host));
                        if let Some((slot, ordered)) = flow.ordered(own, &recipient) {
                            ready.entry((flow.group(own), slot, recipient, true)).or_default().push(ordered);
                        }
                        // The next time, if there is no answer.
                        flow.stage = Stage::Moved(now + RENEWAL);
                    }
                },
            }
        }
        self.moving.flows.retain(|own, _| !over.contains(own));
        for ((_, slot, recipient, renewal), flows) in ready {
            let step = if renewal { MoveStep::Renew } else { MoveStep::Accept };
            if self.moving.takes(&recipient) {
                flows.chunks(MAX_ORDER).for_each(|part| self.order(&recipient, slot, Some(LEASE), step, part.to_vec()));
            } else if !renewal {
                failed.extend(flows.iter().map(|flow| (flow.own, "the other host cannot be asked now".to_owned())));
            }
        }
        let late: Vec<u64> = self.moving.requests.iter().filter(|(_, request)| request.until <= now).map(|(number, _)| *number).collect();
        for number in late {
            self.on_move_answer(now, number, Err("it does not answer".to_owned()))?;
        }
        let done = self.give_up(now, failed);
        let next = |flow: &Move| match flow.stage {
            Stage::Preparing(_) | Stage::Testing { sends: true, .. } => now + LOOK,
            Stage::Testing { until, next, .. } => until.min(next),
            Stage::Asked(at) | Stage::Moved(at) => at,
        };
        let requests = self.moving.requests.values().map(|request| request.until);
        let leave = self.moving.leave.then_some(now);
        self.moving.due = self.moving.flows.values().map(next).chain(requests).chain(leave).min();
        done
    }
}

/// By what firewalls judge a flow between this address and there, with the port of its service, and whether that is here. A waypoint has a port of its own.
fn judged(known: Option<&Move>, source: IpAddr, destination: SocketAddr, (service, accepted): (u16, bool)) -> Judged {
    let passes = known.is_some_and(|known| known.way.waypoint.is_some());
    (source, if passes { destination } else { SocketAddr::new(destination.ip(), service) }, accepted)
}

/// Where a flow's packets go on a link: to its host, or to its waypoint.
fn destination(known: Option<&Move>, own: &Ends) -> SocketAddr {
    known.filter(|known| known.way.waypoint.is_some()).map_or(own.destination, |known| known.way.wire.destination)
}

/// What another host says.
fn quoted(who: &str, reason: &str) -> String {
    format!("{who} refused: {}", braid_model::printable(reason).chars().take(MAX_REASON).collect::<String>())
}

/// Whether a flow is one that its other host could help to move.
fn can_move(row: &FlowRow) -> bool {
    (row.protocol == Protocol::Tcp || datagrams::is_movable(row))
        && !row.forwarded
        && !row.connecting
        && !row.moving
        && !row.local.0.is_unspecified()
        && row.local.1 != 0
}
