//! Moved flows: running flows of this machine whose packets have other addresses on the way than in their sockets (mirrored rewriting; Yap's thesis, 2.3.2). Programs with the right to change things ask for them over the API, and so do `moving` here and the relay of a server, for a limited time; the other
//! host must rewrite the packets back.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_api::{FlowEnds, MovedProtocol, RewriteRequest, RewriteState, Rewritten};
use braid_decide::policy::AppRule;
use braid_decide::tables::{self, DEPARTURE_DEVICE, LATE_DEVICE, PACKET_DEVICE};
use braid_decide::tunnel::{self, Tunnel};
use braid_model::{Family, LinkFacts, LinkIndex, LinkKind, Protocol, RouteFacts, RuleFacts, SequenceNumbers, Time};

use super::Core;
use super::gateway::allowed_links;
use super::timeouts::RETRY;
use crate::RequestError;
use crate::steering::{
    Content, Ends, FlowRow, Hasten, Keepalive, MAX_DATAGRAM_FLOWS, MAX_REWRITES, MovedSocket, Port, PortSide, RedirectedFlow, Rewrite,
    Steering, SteeringError,
};

/// The longest time for which a program may move a flow without asking again.
const MAX_LEASE: Duration = Duration::from_secs(3600);
/// Time for which packets under way are still received with addresses that a flow has on the way no longer.
const LINGER: Duration = Duration::from_secs(30);

/// Earlier addresses of a flow with which packets may still arrive.
const MAX_LATE: usize = 2;
/// An end of a flow that has moved sends no packets with the addresses of its socket later than this after it began with others.
const SETTLED: Duration = Duration::from_secs(1);
/// How long the other end may take to begin.
const BEGINNING: Duration = Duration::from_secs(20);
/// How long others must use a moved flow's own addresses until its old proof counts no more, and how long that is known: longer than proofs count.
const CONTEST: Duration = Duration::from_secs(5);
const CONTESTED: Duration = Duration::from_secs(600);
/// A list of flows for checks is not read again within this time.
const LIST_AGE: Duration = Duration::from_millis(500);
/// How often it is looked whether the other host rewrites packets of moved flows.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// The smallest packet size that every network must carry (RFC 8200, 5).
const LEAST_MTU: u32 = 1280;

/// A flow of this machine, and where its packets go instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MovedFlow {
    /// From this machine, as the socket has it.
    pub(super) own: Ends,
    /// From this machine, as packets have it on the way.
    pub(super) wire: Ends,
    /// The sequence numbers with which it began for the other end, if that proves which flow is meant.
    pub(super) numbers: Option<SequenceNumbers>,
    /// It is a flow between two other hosts: what arrives with either addresses leaves with the other ones.
    pub(super) passes: bool,
}

impl MovedFlow {
    /// A flow of this machine.
    pub(super) fn of_socket(own: Ends, wire: Ends) -> Self {
        Self { own, wire, numbers: None, passes: false }
    }
}

/// Why a flow cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum RelocationError {
    /// Source and destination are of different families.
    #[error("{0} and {1} are not of the same family")]
    Families(IpAddr, IpAddr),
    /// The flow, or its packets on the way, would not come from this machine.
    #[error("{0} is not an address of this machine")]
    Foreign(IpAddr),
    /// No host has this address.
    #[error("{0} is not the address of another host")]
    Unusable(IpAddr),
    /// No device leads to the other host.
    #[error("no device leads to {0}")]
    NoWay(IpAddr),
    /// Link-local addresses belong to one network.
    #[error("{0} belongs to one network only")]
    Scoped(SocketAddr),
    /// The kernel cannot write the frames of such a device.
    #[error("{0} has no Ethernet header: moved flows cannot use it")]
    Raw(String),
    /// The system lacks something.
    #[error("this system cannot move flows: {0}")]
    Unsupported(String),
    /// The policy forbids the link.
    #[error("a rule of the flow from {0} does not allow the link {1}")]
    Forbidden(SocketAddr, String),
    /// Everything leaves through a relay.
    #[error("fallback = \"none\": all flows leave through a relay or fail")]
    Confined,
    /// Another flow has these addresses and ports, in its socket or on the way.
    #[error("another flow has the addresses and ports {0} and {1}")]
    Taken(SocketAddr, SocketAddr),
    /// This machine has opened the flow and moves it itself.
    #[error("the host that opened the flow from {0} moves it itself")]
    Own(SocketAddr),
    /// The other end knows the flow by other sequence numbers, or it does not run.
    #[error("no running flow from {0} to {1} began with these sequence numbers")]
    Stranger(SocketAddr, SocketAddr),
    /// The packets of one side may be too large for the other.
    #[error("the devices towards {0} and {1} carry packets of different sizes")]
    Sizes(SocketAddr, SocketAddr),
    /// There are too many.
    #[error("{} flows are moved already, or were a moment ago", MAX_REWRITES / 3)]
    Full,
    /// There are too many flows of datagrams.
    #[error("{MAX_DATAGRAM_FLOWS} flows of datagrams are moved already, or were a moment ago")]
    Datagrams,
    /// No socket receives its datagrams, or none whose way a routing rule may choose.
    #[error("no socket of this machine receives the datagrams to {0}, or its program has bound it to a device or marked it")]
    NoSocket(SocketAddr),
    /// The system chooses the source addresses of such flows.
    #[error(
        "flows of datagrams to another address of this machine than {0} are moved already, and their sockets need not have a source address"
    )]
    OtherSource(IpAddr),
    /// Somebody else has its addresses now.
    #[error("datagrams come from the own addresses of the flow to {0} again: it needs a new proof")]
    Contested(SocketAddr),
    /// Only connections can do that.
    #[error("only flows of datagrams are proved so, and only TCP connections pass waypoints and tunnels")]
    Connections,
    /// It is named twice.
    #[error("the flow from {0} is named twice")]
    Twice(SocketAddr),
    /// Its lease is longer than [`MAX_LEASE`], or zero.
    #[error("a lease is between 1 and {} seconds", MAX_LEASE.as_secs())]
    Lease,
}

impl RelocationError {
    /// Whether other addresses or ports on the way may help.
    pub(super) fn is_taken(&self) -> bool {
        matches!(self, Self::Taken(..))
    }
}

impl From<RelocationError> for RequestError {
    fn from(error: RelocationError) -> Self {
        match error {
            RelocationError::Taken(..)
            | RelocationError::Full
            | RelocationError::Datagrams
            | RelocationError::NoSocket(_)
            | RelocationError::OtherSource(_)
            | RelocationError::Contested(_)
            | RelocationError::Stranger(..)
            | RelocationError::Own(_) => Self::conflict("Not moved", error.to_string()),
            RelocationError::Unsupported(_) => Self::failed("Not moved", error.to_string()),
            _ => Self::unclear(error.to_string()),
        }
    }
}

/// The device through which packets of moved flows leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departures {
    /// The largest packet that every way of a moved flow can carry, in bytes.
    pub mtu: u32,
    /// Source addresses of the flows.
    pub addresses: BTreeSet<IpAddr>,
}

/// The moved flows, by their own ends.
#[derive(Debug, Default)]
pub(super) struct Relocated {
    flows: BTreeMap<Ends, Entry>,
    /// The device that the daemon was asked for.
    device: Option<Departures>,
    /// Whether that device has been seen with all that belongs to it.
    was_whole: bool,
    /// What the steering has.
    rewrites: BTreeMap<Ends, Rewrite>,
    /// Flows whose sequence numbers are being read.
    reading: BTreeSet<Ends>,
    /// Flows of datagrams to whose own addresses proofs may come.
    pub(super) watched: BTreeSet<Ends>,
    /// Old proofs of flows of datagrams whose own addresses others use, and until when they are known.
    contested: BTreeMap<Ends, (SequenceNumbers, Time)>,
    /// Flows of datagrams that routing rules lead to the device; and whether the route chooses their source address.
    led: BTreeMap<Ends, bool>,
    /// The last list of flows for checks, until the next poll.
    listed: Option<(Time, BTreeMap<Ends, FlowRow>)>,
    /// When to update it: a lease ends, or something is to be tried again.
    due: Option<Time>,
}

#[derive(Debug, Clone)]
struct Entry {
    /// The addresses on the way that were asked for last.
    wire: Ends,
    /// Since when.
    asked: Time,
    /// Those with which its packets leave; `None`: its own. While the other end is not ready for new ones, these are earlier ones.
    sends_by: Option<Ends>,
    /// Since when.
    sends_since: Time,
    /// Earlier ones with which late packets may arrive, and until when.
    late: BTreeMap<Ends, Time>,
    /// When the lease ends.
    until: Time,
    /// The sequence numbers with which its connection began.
    numbers: Option<SequenceNumbers>,
    /// It passes this machine: no socket has `own`.
    passes: bool,
    /// It is a flow of datagrams whose socket has no source address before its way is known, so that the route chooses it.
    chosen: bool,
    /// Of datagrams: when the first and the last came with its own addresses although it has left them.
    at_home: Option<(Time, Time)>,
}

/// The outcome of a request.
pub(super) struct Relocation {
    /// Why flows were refused, by their places in the request.
    pub(super) refused: BTreeMap<usize, RelocationError>,
    /// Whether the kernel has the rest. If not, it is tried again.
    pub(super) applied: Result<(), SteeringError>,
}

impl Entry {
    /// Addresses on the way with which packets may arrive.
    fn arrivals(&self) -> impl Iterator<Item = Ends> {
        self.late.keys().copied().chain([self.wire])
    }

    /// Takes a request. What leaves by these addresses already continues to.
    fn ask(&mut self, now: Time, wire: Ends, sends: bool, until: Time) {
        if self.wire != wire || self.until <= now {
            self.asked = now;
        }
        if self.wire != wire {
            self.late.remove(&wire);
            self.late.insert(self.wire, now + LINGER);
            self.wire = wire;
            while self.late.len() > MAX_LATE
                && let Some(first) = self.late.iter().min_by_key(|(_, until)| **until).map(|(wire, _)| *wire)
            {
                self.late.remove(&first);
            }
        }
        if sends {
            if self.sends_by != Some(wire) {
                self.sends_since = now;
            }
            self.sends_by = Some(wire);
        }
        self.until = until;
    }

    /// Forgets what is over. Returns whether anything is left.
    fn expire(&mut self, now: Time) -> bool {
        self.late.retain(|_, until| *until > now);
        if self.until <= now {
            self.sends_by = None;
        }
        // Without a socket there is nothing to return to. What still arrives is answered with resets, which say so.
        self.until > now || !self.passes && self.until + LINGER > now
    }

    /// When [`expire`](Self::expire) changes something.
    fn due(&self, now: Time) -> Time {
        let end = if self.until > now { self.until } else { self.until + LINGER };
        self.late.values().copied().fold(end, Time::min)
    }
}

/// How packets leave for a moved flow's other end.
#[derive(Debug, Clone, Copy)]
struct Way {
    device: LinkIndex,
    mark: u32,
    /// Whether the source address is the device's own, so that answers arrive there.
    own: bool,
    /// Whether the device's packets have no Ethernet headers.
    bare: bool,
}

/// Number of flows of datagrams.
fn datagrams(flows: &BTreeMap<Ends, Entry>) -> usize {
    flows.keys().filter(|own| own.protocol == Protocol::Udp).count()
}

/// Whether the route would choose another source address than this flow's, because it already chooses that of others.
fn chooses_other(flows: &BTreeMap<Ends, Entry>, own: &Ends) -> bool {
    let source = own.source.ip();
    let is_other = |(known, entry): (&Ends, &Entry)| {
        entry.chosen && known.source.ip() != source && Family::of(known.source.ip()) == Family::of(source)
    };
    flows.iter().any(is_other)
}

impl Relocated {
    /// When it must be updated.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// The addresses on the way of a flow whose lease has not ended.
    pub(super) fn leased(&self, own: &Ends, now: Time) -> Option<Ends> {
        self.flows.get(own).filter(|entry| entry.until > now).map(|entry| entry.wire)
    }

    /// Whether packets of any flow leave with other addresses.
    fn sends(&self) -> bool {
        self.flows.values().any(|entry| entry.sends_by.is_some() && !entry.passes)
    }

    /// Whether it must be updated now.
    fn is_due(&self, now: Time) -> bool {
        self.due.is_some_and(|due| due <= now)
    }
}

impl<S: Steering> Core<S> {
    /// `GET /v1/rewrites`.
    pub fn rewrites_view(&mut self, now: Time) -> Result<Vec<braid_api::MovedFlow>, RequestError> {
        if self.relocated.flows.is_empty() {
            return Ok(Vec::new());
        }
        let active = self.active_moves(now).map_err(|error| RequestError::failed("Not read", error.to_string()))?;
        let ends = |ends: &Ends| FlowEnds { source: ends.source, destination: ends.destination };
        let living = self.relocated.flows.iter().filter(|(_, entry)| entry.until > now);
        let view = |(own, entry): (&Ends, &Entry)| braid_api::MovedFlow {
            own: ends(own),
            wire: ends(&entry.wire),
            protocol: if own.protocol == Protocol::Udp { MovedProtocol::Udp } else { MovedProtocol::Tcp },
            sends: entry.sends_by == Some(entry.wire),
            active: active.contains_key(own) || self.is_passed(own),
            passes: entry.passes,
            remaining_ms: entry.until.since(now).as_millis() as u64,
            numbers: None,
        };
        Ok(living.map(view).collect())
    }

    /// The flows that the kernel rewrites as they were asked for, and whose sockets follow.
    pub(super) fn active_moves(&mut self, now: Time) -> Result<BTreeMap<Ends, MovedSocket>, SteeringError> {
        let mut sockets = self.look(now, false)?;
        let is_there = self.departure().is_some();
        let Relocated { flows, rewrites, .. } = &self.relocated;
        sockets.retain(|own, socket| {
            let in_place = |entry: &Entry| {
                rewrites.contains_key(&entry.wire.reversed())
                    && rewrites.get(own).is_some_and(|rewrite| rewrite.device.is_some() == entry.sends_by.is_some())
            };
            is_there && socket.follows && flows.get(own).is_some_and(in_place)
        });
        Ok(sockets)
    }

    /// Reads what the kernel knows about moved flows. Ends the leases of those that the other host does not rewrite: it has ended theirs, or its Braid is gone.
    /// It answers with resets then, and sends packets with the addresses of the socket.
    pub(super) fn look(&mut self, now: Time, fresh: bool) -> Result<BTreeMap<Ends, MovedSocket>, SteeringError> {
        let sockets = self.steering.moved_sockets(fresh)?;
        for (own, socket) in &sockets {
            let Some(entry) = self.relocated.flows.get_mut(own) else { continue };
            entry.numbers = entry.numbers.or(socket.numbers);
            if let Some(claimed) = socket.claimed {
                entry.late.remove(&claimed);
            }
            // Anybody can send a reset. It counts if nothing else comes.
            let is_refused = socket.refused && socket.moved.is_none_or(|at| at + LOOK_INTERVAL < now);
            // Packets may overtake each other.
            let settled = socket.moved.map_or(entry.sends_since + BEGINNING, |at| at.max(entry.sends_since) + SETTLED);
            if own.protocol == Protocol::Udp
                && entry.sends_by.is_some()
                && let Some(at) = socket.home.filter(|at| *at > entry.sends_since + BEGINNING)
            {
                entry.at_home = Some((entry.at_home.map_or(at, |(first, _)| first), at));
            }
            if is_refused || entry.sends_by.is_some() && socket.home.is_some_and(|at| at > settled) {
                entry.until = entry.until.min(now);
            }
        }
        Ok(sockets)
    }

    /// Looks whether the other hosts still rewrite, if that is due, and ends leases.
    pub(super) fn expire_relocated(&mut self, now: Time) -> Result<(), SteeringError> {
        if !self.relocated.is_due(now) {
            return Ok(());
        }
        let looked = if self.relocated.sends() { self.look(now, false).map(drop) } else { Ok(()) };
        self.update_relocated(now).and(looked)
    }

    /// `POST /v1/rewrites`.
    pub fn rewrite(&mut self, now: Time, request: &RewriteRequest) -> Result<Rewritten, RequestError> {
        let ends = |ends: FlowEnds, protocol| {
            let protocol = if protocol == MovedProtocol::Udp { Protocol::Udp } else { Protocol::Tcp };
            Ends { protocol, source: ends.source, destination: ends.destination }
        };
        let of = |numbers: &braid_api::SequenceNumbers| SequenceNumbers { sent: numbers.sent, received: numbers.received };
        let moved = |flow: &braid_api::MovedFlow| MovedFlow {
            own: ends(flow.own, flow.protocol),
            wire: ends(flow.wire, flow.protocol),
            numbers: flow.numbers.as_ref().map(of),
            passes: flow.passes,
        };
        let flows: Vec<_> = request.flows.iter().map(moved).collect();
        let (mut done, verb) = match request.lease_ms {
            _ if request.prove => (Relocation { refused: self.send_proofs(now, &flows), applied: Ok(()) }, "have proofs under way"),
            Some(lease) => {
                let lease = Duration::from_millis(lease);
                let done = self.relocate_if(now, &flows, request.sends, lease, Some(request.partial)).map_err(RequestError::from)?;
                let places = flows.iter().enumerate().filter(|(place, _)| !done.refused.contains_key(place));
                places.for_each(|(_, flow)| self.leave_move(&flow.own));
                (done, "moved")
            }
            None => {
                // Those that this machine moves itself by now stay there.
                let own: Vec<_> = flows.iter().map(|flow| flow.own).filter(|own| !self.keeps_move(own)).collect();
                (Relocation { refused: BTreeMap::new(), applied: self.bring_back(now, &own) }, "came back")
            }
        };
        done.applied.map_err(|error| RequestError::failed("Not applied", format!("{error}; Braid tries again")))?;
        let unread = |error: SteeringError| RequestError::failed("Not read", error.to_string());
        let active = self.active_moves(now).map_err(unread)?;
        let arrived = self.arrived(flows.iter().map(|flow| flow.own)).map_err(unread)?;
        let message = format!("{} flows {verb}", flows.len() - done.refused.len());
        let state = |(place, flow): (usize, &MovedFlow)| RewriteState {
            active: active.contains_key(&flow.own) || self.is_passed(&flow.own),
            arrives: arrived.contains(&flow.own),
            refused: done.refused.remove(&place).map(|reason| reason.to_string()),
        };
        Ok(Rewritten { message, flows: flows.iter().enumerate().map(state).collect() })
    }

    /// Gives all flows their own addresses back, for the end of the daemon.
    pub fn release_moves(&mut self) -> Result<(), SteeringError> {
        self.relocated = Relocated::default();
        self.steering.release_rewrites()
    }

    /// Moves flows, or extends their leases.
    pub(super) fn relocate(&mut self, now: Time, flows: &[MovedFlow], sends: bool, lease: Duration) -> Result<Relocation, RelocationError> {
        self.relocate_if(now, flows, sends, lease, None)
    }

    /// The same. `request`: somebody else asks, and whether the others move if one is refused.
    fn relocate_if(
        &mut self,
        now: Time,
        flows: &[MovedFlow],
        sends: bool,
        lease: Duration,
        request: Option<bool>,
    ) -> Result<Relocation, RelocationError> {
        if lease.is_zero() || lease > MAX_LEASE {
            return Err(RelocationError::Lease);
        }
        if let Some(reason) = self.steering.unmoved() {
            return Err(RelocationError::Unsupported(reason));
        }
        if self.in_force.confines(None) {
            return Err(RelocationError::Confined);
        }
        self.list_flows(now, flows);
        let proved = self.prove(now, flows);
        // Whole seconds, so that leases end together.
        let until = Time::from_nanos((now + lease).as_nanos().next_multiple_of(1_000_000_000));
        // The route chooses the source address of datagrams whose socket has none.
        let is_chosen = |own: &Ends| {
            let has_source = self.is_listed(own) || proved.get(own).is_some_and(|(_, has_source)| *has_source);
            own.protocol == Protocol::Udp && !has_source
        };
        let mut next = self.relocated.flows.clone();
        let mut arrivals: BTreeSet<Ends> = next.values().flat_map(Entry::arrivals).collect();
        let (mut named, mut refused) = (BTreeSet::new(), BTreeMap::new());
        for (place, flow) in flows.iter().enumerate() {
            let MovedFlow { own, wire, passes, .. } = flow;
            let known = next.get(own);
            let is_its = known.is_some_and(|entry| entry.arrivals().any(|of| of == *wire));
            // A way keeps its port towards the client as long as it lasts: with another one it is another client's, who got the port of a way that still lives.
            let is_others = |entry: &Entry| entry.passes != *passes || *passes && entry.wire.source != wire.source;
            let is_foreign = known.is_some_and(is_others)
                || wire != own && next.contains_key(wire)
                || *passes && (self.is_listed(own) || known.is_none() && arrivals.contains(own));
            let checked = match self.check_relocation(now, own, wire).and_then(|()| self.check_passage(flow)) {
                Err(error) => Err(error),
                Ok(()) if request.is_some() && self.keeps_move(own) => Err(RelocationError::Own(own.source)),
                Ok(()) if !named.insert(*own) => Err(RelocationError::Twice(own.source)),
                Ok(()) if flow.numbers.is_some() && !proved.contains_key(own) => Err(match own.protocol {
                    Protocol::Udp => RelocationError::NoSocket(own.source),
                    _ => RelocationError::Stranger(own.source, own.destination),
                }),
                Ok(()) if own.protocol == Protocol::Udp && known.is_none() && datagrams(&next) >= MAX_DATAGRAM_FLOWS => {
                    Err(RelocationError::Datagrams)
                }
                Ok(()) if known.is_none() && is_chosen(own) && chooses_other(&next, own) => {
                    Err(RelocationError::OtherSource(own.source.ip()))
                }
                Ok(()) if self.is_contested(now, flow) => Err(RelocationError::Contested(own.source)),
                Ok(()) if is_foreign => Err(RelocationError::Taken(own.source, own.destination)),
                Ok(()) if wire != own && (self.is_listed(wire) || !is_its && arrivals.contains(wire)) => {
                    Err(RelocationError::Taken(wire.source, wire.destination))
                }
                Ok(()) if known.is_none() && 2 * next.len() + arrivals.len() + 3 > MAX_REWRITES => Err(RelocationError::Full),
                Ok(()) => Ok(()),
            };
            match (checked, next.entry(*own)) {
                (Err(error), _) if request == Some(false) => {
                    // Removes the entries by which numbers were read. They do nothing, so that an error may wait for the next update.
                    let _ = self.update_relocated(now);
                    return Err(error);
                }
                (Err(error), _) => drop(refused.insert(place, error)),
                (Ok(()), btree_map::Entry::Occupied(known)) => {
                    let entry = known.into_mut();
                    for wire in entry.arrivals() {
                        arrivals.remove(&wire);
                    }
                    // A newer proof, if the flow does not go on as it was moved: the other end may have forgotten the earlier one.
                    let is_new_move = entry.wire != *wire || entry.until <= now;
                    let proof = proved.get(own).map(|(numbers, _)| *numbers).or_else(|| self.proof_of(own).filter(|_| is_new_move));
                    if let Some(proof) = proof.filter(|proof| own.protocol == Protocol::Udp && entry.numbers != Some(*proof)) {
                        (entry.numbers, entry.at_home) = (Some(proof), None);
                    }
                    entry.ask(now, *wire, sends, until);
                    arrivals.extend(entry.arrivals());
                }
                (Ok(()), btree_map::Entry::Vacant(free)) => {
                    let (sends_by, numbers) =
                        (sends.then_some(*wire), proved.get(own).map(|(numbers, _)| *numbers).or_else(|| self.proof_of(own)));
                    let (late, passes, chosen) = (BTreeMap::new(), *passes, is_chosen(own));
                    let (asked, sends_since, at_home) = (now, now, None);
                    free.insert(Entry { wire: *wire, asked, sends_by, sends_since, late, until, numbers, passes, chosen, at_home });
                    arrivals.insert(*wire);
                }
            }
        }
        let begins = |(own, entry): (&Ends, &Entry)| {
            let before = self.relocated.flows.get(own).and_then(|known| known.sends_by);
            (!entry.passes && entry.sends_by == Some(entry.wire) && before != entry.sends_by && named.contains(own)).then_some(*own)
        };
        let begin: Vec<Ends> = next.iter().filter_map(begins).collect();
        self.relocated.flows = next;
        let applied = self.update_relocated(now);
        self.knock(now, &begin);
        self.hasten(&begin);
        Ok(Relocation { refused, applied })
    }

    /// Whether others use the own addresses of a moved flow of datagrams now, so that its old proof counts no more. Connections show that by their sequence numbers.
    fn is_contested(&self, now: Time, flow: &MovedFlow) -> bool {
        let entry = self.relocated.flows.get(&flow.own);
        let is_its_proof = |entry: &Entry| entry.numbers.is_some() && entry.numbers == flow.numbers;
        let is_used = |entry: &Entry| is_its_proof(entry) && entry.at_home.is_some_and(|(first, last)| last.since(first) > CONTEST);
        let is_old = |(numbers, until): &(SequenceNumbers, Time)| *until > now && flow.numbers == Some(*numbers);
        entry.is_some_and(is_used) || self.relocated.contested.get(&flow.own).is_some_and(is_old)
    }

    /// Notes the proofs of flows whose own addresses others use.
    fn note_contested(&mut self, now: Time) {
        self.relocated.contested.retain(|_, (_, until)| *until > now);
        for (own, entry) in &self.relocated.flows {
            if let (Some((first, last)), Some(numbers)) = (entry.at_home, entry.numbers)
                && last.since(first) > CONTEST
                && self.relocated.contested.len() < MAX_REWRITES
            {
                self.relocated.contested.insert(*own, (numbers, now + CONTESTED));
            }
        }
    }

    /// Sends the owners of flows of datagrams proofs to the flows' own addresses. Returns why some get none.
    fn send_proofs(&mut self, now: Time, flows: &[MovedFlow]) -> BTreeMap<usize, RelocationError> {
        let (mut refused, mut proofs) = (BTreeMap::new(), Vec::new());
        let there = self.prove(now, flows);
        for (place, MovedFlow { own, numbers, .. }) in flows.iter().enumerate() {
            let device = self.way_of(own).and_then(|way| Some((self.network.interface(way.device)?.name.clone(), way.mark)));
            match (self.check_relocation(now, own, own), device) {
                (Err(error), _) => drop(refused.insert(place, error)),
                _ if own.protocol != Protocol::Udp => drop(refused.insert(place, RelocationError::Connections)),
                (Ok(()), _) if !there.contains_key(own) => drop(refused.insert(place, RelocationError::NoSocket(own.source))),
                (Ok(()), None) => drop(refused.insert(place, RelocationError::NoWay(own.destination.ip()))),
                (Ok(()), Some((device, mark))) => {
                    proofs.push(Keepalive { way: *own, device, mark, content: Content::Datagram(*numbers) });
                }
            }
        }
        // Removes the entries by which sockets were looked for. They do nothing, so that an error may wait for the next update.
        let _ = self.update_relocated(now);
        self.steering.send_keepalives(&proofs);
        refused
    }

    /// Sends a packet of each flow over its way, if that is not its own: the other end sees that the way passes packets, and a firewall on it lets in what
    /// comes back. No program gets it.
    pub(super) fn knock(&mut self, now: Time, flows: &[Ends]) {
        if flows.is_empty() {
            return;
        }
        // Without the sockets' numbers nothing is sent, as if it was lost.
        let sockets = self.look(now, true).unwrap_or_default();
        let keepalive = |own: &Ends| {
            let entry = self.relocated.flows.get(own).filter(|entry| entry.wire != *own)?;
            let way = self.way_of(&entry.wire)?;
            let device = self.network.interface(way.device)?.name.clone();
            let content = match own.protocol {
                Protocol::Udp => Content::Datagram(entry.numbers),
                _ => Content::Segment(sockets.get(own)?.segment?),
            };
            Some(Keepalive { way: entry.wire, device, mark: way.mark, content })
        };
        let keepalives: Vec<Keepalive> = flows.iter().filter_map(keepalive).collect();
        self.steering.send_keepalives(&keepalives);
    }

    /// Lets flows send again by their new way at once what was lost with their old one. [`knock`](Self::knock) has just read their sockets.
    fn hasten(&mut self, flows: &[Ends]) {
        if flows.is_empty() {
            return;
        }
        let sockets = self.steering.moved_sockets(false).unwrap_or_default();
        let of = |own: &Ends| {
            let socket = sockets.get(own).filter(|socket| socket.doublings > 0)?;
            Some(Hasten { own: *own, unacknowledged: socket.segment?.unacknowledged, doublings: socket.doublings })
        };
        let doubled: Vec<Hasten> = flows.iter().filter_map(of).collect();
        self.steering.hasten(&doubled);
    }

    /// Of these flows, those of which a packet has arrived with the addresses on the way since they were asked to have them.
    pub(super) fn arrived(&mut self, flows: impl Iterator<Item = Ends>) -> Result<BTreeSet<Ends>, SteeringError> {
        let known: Vec<_> = flows.filter_map(|own| Some((own, self.relocated.flows.get(&own)?))).collect();
        let ways: Vec<Ends> = known.iter().map(|(_, entry)| entry.wire.reversed()).collect();
        let last = self.steering.arrivals(&ways)?;
        let is_new = |entry: &Entry| last.get(&entry.wire.reversed()).is_some_and(|at| *at >= entry.asked);
        Ok(known.into_iter().filter(|(_, entry)| is_new(entry)).map(|(own, _)| own).collect())
    }

    /// Returns the flows that run and began with the sequence numbers that the request gives, these numbers as this machine has them, and whether a socket of datagrams has
    /// a source address.
    fn prove(&mut self, now: Time, flows: &[MovedFlow]) -> BTreeMap<Ends, (SequenceNumbers, bool)> {
        let asked: BTreeMap<Ends, SequenceNumbers> = flows.iter().filter_map(|flow| Some((flow.own, flow.numbers?))).collect();
        if asked.is_empty() {
            return BTreeMap::new();
        }
        self.relocated.reading = asked.keys().copied().collect();
        let read = self.update_relocated(now).and_then(|()| self.look(now, true));
        self.relocated.reading.clear();
        let proved = |(own, socket): (Ends, MovedSocket)| {
            let has_source = socket.has_source;
            let theirs = *asked.get(&own)?;
            let numbers = match own.protocol {
                // Whoever asks has checked the proof.
                Protocol::Udp => socket.follows.then_some(theirs),
                _ => socket.numbers.filter(|numbers| numbers.mirror(theirs)),
            };
            Some((own, (numbers?, has_source)))
        };
        read.unwrap_or_default().into_iter().filter_map(proved).collect()
    }

    /// Lists the flows of this machine. The list includes those that started since the last poll, if one of them is to be moved.
    fn list_flows(&mut self, now: Time, flows: &[MovedFlow]) {
        let of = |rows: &mut dyn Iterator<Item = FlowRow>| -> BTreeMap<Ends, FlowRow> {
            rows.filter(|row| !row.forwarded).map(|row| (Ends::of(&row), row)).collect()
        };
        if self.relocated.listed.as_ref().is_some_and(|(at, _)| *at + LIST_AGE > now) {
            return;
        }
        let known = of(&mut self.flows.iter().map(|living| living.row.clone()));
        let has_all = flows.iter().all(|flow| flow.passes || known.contains_key(&flow.own));
        let rows = match if has_all { None } else { self.steering.flows(now).ok() } {
            Some(mut rows) => {
                self.place_datagrams(&mut rows);
                self.judge_accepted(now, &mut rows);
                of(&mut rows.into_iter())
            }
            None => known,
        };
        self.relocated.listed = Some((now, rows));
    }

    /// Forgets that list.
    pub(super) fn drop_list(&mut self) {
        self.relocated.listed = None;
    }

    /// Whether this machine's programs have a flow with these ends.
    fn is_listed(&self, ends: &Ends) -> bool {
        self.relocated.listed.as_ref().is_some_and(|(_, rows)| rows.contains_key(ends))
    }

    /// Lets flows use their own addresses again. Unknown ones are ignored.
    pub(super) fn bring_back(&mut self, now: Time, flows: &[Ends]) -> Result<(), SteeringError> {
        for own in flows {
            if let Some(entry) = self.relocated.flows.get_mut(own) {
                entry.until = entry.until.min(now);
            }
        }
        self.update_relocated(now)
    }

    fn check_relocation(&self, now: Time, own: &Ends, wire: &Ends) -> Result<(), RelocationError> {
        let row = self.relocated.listed.as_ref().and_then(|(_, rows)| rows.get(own));
        let ends = [own.source, own.destination, wire.source, wire.destination];
        let is_scoped = |end: &&SocketAddr| matches!(end, SocketAddr::V6(v6) if v6.scope_id() != 0 || v6.flowinfo() != 0 || v6.ip().is_unicast_link_local());
        if let Some(scoped) = ends.iter().find(is_scoped) {
            return Err(RelocationError::Scoped(*scoped));
        }
        let family = Family::of(own.source.ip());
        if let Some(other) = ends.iter().find(|end| Family::of(end.ip()) != family) {
            return Err(RelocationError::Families(own.source.ip(), other.ip()));
        }
        let kept = self.relocated.device.as_ref().is_some_and(|device| device.addresses.contains(&own.source.ip()));
        let in_tunnel = match [wire.source, wire.destination].map(|end| Tunnel::of(end.ip())) {
            [None, None] => false,
            [Some((one, from)), Some((other, to))] if one == other && from != to => true,
            _ => return Err(RelocationError::Unusable(wire.destination.ip())),
        };
        // A link that goes down loses its address before its flows have moved.
        for (source, kept) in [(own.source, kept || row.is_some()), (wire.source, in_tunnel)] {
            if !kept && !self.has_address(source.ip()) {
                return Err(RelocationError::Foreign(source.ip()));
            }
        }
        for destination in [own.destination, wire.destination] {
            let ip = destination.ip();
            if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || self.has_address(ip) || destination.port() == 0 {
                return Err(RelocationError::Unusable(ip));
            }
        }
        let way = self.way_of(wire).and_then(|way| self.network.interface(way.device));
        let device = way.ok_or(RelocationError::NoWay(wire.destination.ip()))?;
        if own.protocol == Protocol::Udp && in_tunnel {
            return Err(RelocationError::Connections);
        }
        if device.mac.is_none() && !in_tunnel {
            return Err(RelocationError::Raw(device.name.clone()));
        }
        // The rule that holds in the present context, as for a flow that Braid itself moves.
        let rule = row.and_then(|row| self.rule_of(now, &RedirectedFlow::of(row)));
        match row {
            Some(_) if self.in_force.confines(rule) => Err(RelocationError::Confined),
            Some(_) if !self.allows(rule, device) => Err(RelocationError::Forbidden(own.source, device.name.clone())),
            _ => Ok(()),
        }
    }

    /// Checks what concerns flows between other hosts only.
    fn check_passage(&self, flow: &MovedFlow) -> Result<(), RelocationError> {
        let mtu = |ends: &Ends| {
            self.way_of(ends)
                .and_then(|way| self.network.interface(way.device))
                .filter(|device| device.mac.is_some())
                .map(|device| device.mtu)
        };
        match (mtu(&flow.own), mtu(&flow.wire)) {
            _ if !flow.passes => Ok(()),
            _ if flow.own.protocol == Protocol::Udp => Err(RelocationError::Connections),
            // No router reports a packet that is too large for the second device.
            (Some(one), Some(other)) if one == other => Ok(()),
            (None, _) => Err(RelocationError::NoWay(flow.own.destination.ip())),
            _ => Err(RelocationError::Sizes(flow.own.destination, flow.wire.destination)),
        }
    }

    /// Whether a flow between other hosts passes this machine, in both directions.
    fn is_passed(&self, own: &Ends) -> bool {
        let has_ports = self.ports.0.iter().any(|port| port.side == PortSide::Arrivals);
        let has = |ends: Ends| self.relocated.rewrites.get(&ends).is_some_and(|rewrite| rewrite.passes);
        has_ports && self.relocated.flows.get(own).is_some_and(|entry| has(own.reversed()) && has(entry.wire.reversed()))
    }

    /// Whether flows between other hosts pass this machine.
    fn is_passed_by_any(&self) -> bool {
        self.relocated.flows.values().any(|entry| entry.passes)
    }

    /// Whether a rule allows this device.
    pub(super) fn allows(&self, rule: Option<&AppRule>, device: &LinkFacts) -> bool {
        let Some(rule) = rule else { return true };
        let links: Vec<_> = self.links.iter().map(|(_, link)| (link.slot, &link.facts)).collect();
        allowed_links(rule, &links).is_none_or(|allowed| allowed.contains(&device.name))
    }

    /// Whether this is an address of this machine. Those of moved flows, whose links may have lost them, do not count.
    fn has_address(&self, address: IpAddr) -> bool {
        let mut devices = self.network.interfaces.iter().filter(|device| device.name != DEPARTURE_DEVICE);
        devices.any(|device| device.addresses.iter().any(|net| net.addr() == address))
    }

    /// The device over which packets with these ends leave: that of tunnels if it is an address of one, and else the link that has the source address, or the device on whose network the destination is, or the
    /// link that the system prefers.
    fn way_of(&self, wire: &Ends) -> Option<Way> {
        let (source, destination) = (wire.source.ip(), wire.destination.ip());
        if let Some(name) = tunnel::device(source) {
            let device = self.network.interfaces.iter().find(|device| device.name == name && device.carrier)?;
            return Some(Way { device: device.index, mark: 0, own: true, bare: true });
        }
        if !self.has_address(source) {
            return None;
        }
        let usable = || self.links.iter().filter(|(_, link)| link.refused.is_none());
        let over = |(device, slot): (LinkIndex, usize), own| Way { device, mark: tables::mark(slot), own, bare: false };
        let has = |device: &LinkFacts, address: IpAddr| device.addresses.iter().any(|net| net.addr() == address);
        if let Some((index, link)) = usable().find(|(_, link)| has(&link.facts, source)) {
            return Some(over((index, link.slot), true));
        }
        let near = |device: &&LinkFacts| device.name != DEPARTURE_DEVICE && device.addresses.iter().any(|net| net.contains(&destination));
        if let Some(device) = self.network.interfaces.iter().find(near) {
            return Some(Way { device: device.index, mark: 0, own: false, bare: false });
        }
        let metric = |facts: &LinkFacts| facts.gateways.get(Family::of(destination)).first().map(|route| route.metric);
        let best = usable().filter_map(|(index, link)| Some((metric(&link.facts)?, index, link.slot))).min();
        best.map(|(_, index, slot)| over((index, slot), false))
    }

    /// The device through which packets leave, once it exists.
    pub(super) fn departure(&self) -> Option<&LinkFacts> {
        self.relocated.device.as_ref()?;
        self.network.interfaces.iter().find(|device| device.name == DEPARTURE_DEVICE)
    }

    /// Whether that device has all that belongs to it: its addresses, and the routes that lead to it, which it loses if somebody turns it off.
    fn is_departure_whole(&self) -> bool {
        let (Some(device), Some(wanted)) = (self.departure(), &self.relocated.device) else { return false };
        let has = |address: &IpAddr| device.addresses.iter().any(|net| net.addr() == *address);
        let leads = |wanted: &RouteFacts| {
            self.network.routes.iter().any(|route| route.table == wanted.table && route.hops.iter().any(|hop| hop.device == device.index))
        };
        let families: BTreeSet<Family> = wanted.addresses.iter().map(|address| Family::of(*address)).collect();
        wanted.addresses.iter().all(has) && families.iter().all(|family| leads(&tables::departures(*family, device.index).1))
    }

    /// The rules and routes for packets of moved flows.
    pub(super) fn relocation_tables(&self) -> Vec<(RuleFacts, RouteFacts)> {
        let Some(device) = self.departure() else { return Vec::new() };
        let marked = Family::ALL.map(|family| tables::departures(family, device.index));
        let datagrams =
            self.relocated.led.iter().map(|(own, chosen)| tables::departing_datagrams(own.source, own.destination, *chosen, device.index));
        marked.into_iter().chain(datagrams).collect()
    }

    /// Makes routing rules lead the datagrams of flows that leave with other addresses.
    fn lead_datagrams(&mut self, now: Time) -> Result<(), SteeringError> {
        let leaves = |own: &Ends| self.relocated.rewrites.get(own).is_some_and(|rewrite| rewrite.device.is_some());
        let flows = self.relocated.flows.iter().filter(|(own, _)| own.protocol == Protocol::Udp && leaves(own));
        let led: BTreeMap<Ends, bool> = flows.map(|(own, entry)| (*own, entry.chosen)).collect();
        if led == self.relocated.led {
            return Ok(());
        }
        self.relocated.led = led;
        self.update_tables(now)
    }

    /// Where the switch acts for moved flows. Packets pass the device above a port of a bridge or bond.
    pub(super) fn relocation_ports(&self) -> Vec<Port> {
        if self.relocated.device.is_none() && !self.is_passed_by_any() {
            return Vec::new();
        }
        let is_arrival = |device: &&LinkFacts| {
            let is_made = [DEPARTURE_DEVICE, PACKET_DEVICE, LATE_DEVICE].contains(&device.name.as_str());
            !is_made && device.kind != LinkKind::Loopback && (device.master.is_none() || self.links.get(device.index).is_some())
        };
        let port = |device: &LinkFacts, side| Port { index: device.index, name: device.name.clone(), side };
        let departure = self.departure().map(|device| port(device, PortSide::Departures));
        let arrivals = self.network.interfaces.iter().filter(is_arrival).map(|device| port(device, PortSide::Arrivals));
        departure.into_iter().chain(arrivals).collect()
    }

    /// Ends leases, and makes the kernel rewrite what is left. Packets leave only once the device is there; before, the flows stay where they are.
    pub(super) fn update_relocated(&mut self, now: Time) -> Result<(), SteeringError> {
        self.note_contested(now);
        self.relocated.flows.retain(|_, entry| entry.expire(now));
        let look = self.relocated.sends().then_some(now + LOOK_INTERVAL);
        self.relocated.due = self.relocated.flows.values().map(|entry| entry.due(now)).chain(look).min();
        let of_sockets = || self.relocated.flows.iter().filter(|(_, entry)| !entry.passes);
        let addresses: BTreeSet<IpAddr> = of_sockets().map(|(own, _)| own.source.ip()).collect();
        let ways = of_sockets().filter_map(|(_, entry)| self.way_of(&entry.wire));
        let mtu = ways.filter_map(|way| Some(self.network.interface(way.device)?.mtu)).min();
        let mtu = mtu.or_else(|| self.links.values().map(|link| link.facts.mtu).min());
        // Once a flow may move it is made in advance: that takes as long as the rest of a move.
        let wanted = !addresses.is_empty() || self.has_movers();
        let device = wanted.then(|| Departures { mtu: mtu.unwrap_or(LEAST_MTU).max(LEAST_MTU), addresses: addresses.clone() });
        if device != self.relocated.device {
            self.actions.departures = Some(device.clone());
            (self.relocated.device, self.relocated.was_whole) = (device, false);
        }
        let is_whole = self.is_departure_whole();
        if std::mem::replace(&mut self.relocated.was_whole, is_whole) && !is_whole {
            // Somebody has removed the device, or what belongs to it.
            self.actions.departures = Some(self.relocated.device.clone());
        }
        let departure = self.ports.0.iter().find(|port| port.side == PortSide::Departures).map(|port| port.index);
        let mut rewrites = match departure {
            Some(departure) => self.wanted_rewrites(departure),
            // What arrives is dropped until the device is there again, and sent again. Without entries the kernel would answer with resets.
            None => {
                let is_moved =
                    |ends: &Ends, rewrite: &Rewrite| !rewrite.passes && (rewrite.arrives || self.relocated.flows.contains_key(ends));
                let known = self.relocated.rewrites.iter().filter(|(ends, rewrite)| is_moved(ends, rewrite));
                if addresses.is_empty() { BTreeMap::new() } else { known.map(|(ends, rewrite)| (*ends, *rewrite)).collect() }
            }
        };
        rewrites.extend(self.passing_rewrites());
        for own in &self.relocated.reading {
            rewrites.entry(*own).or_insert(Rewrite::unchanged(own));
        }
        for own in &self.relocated.watched {
            let back = own.reversed();
            rewrites.entry(back).or_insert(Rewrite { arrives: true, ..Rewrite::unchanged(&back) });
        }
        if rewrites != self.relocated.rewrites {
            if let Err(error) = self.steering.set_rewrites(&rewrites) {
                self.relocated.due = Some(now + RETRY);
                return Err(error);
            }
            self.relocated.rewrites = rewrites;
            self.follow_late(now)?;
        }
        self.lead_datagrams(now)?;
        // A flow of this machine waits for a device, whose appearance changes the ports anyway.
        let has_ports = self.ports.0.iter().any(|port| port.side == PortSide::Arrivals);
        let is_passed = self.is_passed_by_any();
        if is_passed != has_ports && (is_passed || self.relocated.device.is_none()) { self.update_gateway() } else { Ok(()) }
    }

    /// The flows whose packets leave with other addresses, and the devices over which they do.
    pub(super) fn departing(&self) -> impl Iterator<Item = (Ends, LinkIndex)> {
        let departing = self.relocated.rewrites.iter().filter(|(_, rewrite)| !rewrite.arrives);
        departing.filter_map(|(ends, rewrite)| Some((*ends, rewrite.device?)))
    }

    fn wanted_rewrites(&self, departure: LinkIndex) -> BTreeMap<Ends, Rewrite> {
        let mut rewrites = BTreeMap::new();
        for (own, entry) in self.relocated.flows.iter().filter(|(_, entry)| !entry.passes) {
            let to = |ends: &Ends, device, mark| Rewrite { device, mark, ..Rewrite::unchanged(ends) };
            rewrites.insert(own.reversed(), Rewrite { arrives: true, ..Rewrite::unchanged(&own.reversed()) });
            // What comes out of a tunnel comes over its device only.
            let is_open = |wire: &Ends| tunnel::device(wire.source.ip()).is_none() || self.way_of(wire).is_some();
            for wire in entry.arrivals().filter(|wire| wire != own && is_open(wire)) {
                let from = self.way_of(&wire).filter(|way| way.own).map(|way| way.device);
                // The proof of a flow of datagrams must come by this way first.
                let numbers = entry.numbers.filter(|_| own.protocol == Protocol::Udp);
                let arrives = Rewrite { arrives: true, from, numbers, ..to(&own.reversed(), Some(departure), tables::DEPARTURE_MARK) };
                rewrites.insert(wire.reversed(), arrives);
            }
            let way = entry.sends_by.and_then(|wire| Some((wire, self.way_of(&wire)?)));
            let departs =
                way.map_or(Rewrite::unchanged(own), |(wire, way)| Rewrite { bare: way.bare, ..to(&wire, Some(way.device), way.mark) });
            rewrites.insert(*own, Rewrite { numbers: entry.numbers, ..departs });
        }
        rewrites
    }

    /// What becomes of packets between other hosts that pass this machine.
    fn passing_rewrites(&self) -> BTreeMap<Ends, Rewrite> {
        let mut rewrites = BTreeMap::new();
        for (own, entry) in self.relocated.flows.iter().filter(|(_, entry)| entry.passes) {
            // What arrives by `by`'s way leaves with `to`. `by` is from this machine, too.
            let pass = |by: &Ends, to: Option<Ends>| {
                let way = to.and_then(|to| self.way_of(&to));
                let from = self.way_of(by).filter(|way| way.own).map(|way| way.device);
                let ends = to.unwrap_or(*by);
                let (device, mark) = (way.map(|way| way.device), way.map_or(0, |way| way.mark));
                Rewrite { device, mark, arrives: true, passes: true, from, ..Rewrite::unchanged(&ends) }
            };
            rewrites.insert(own.reversed(), pass(own, entry.sends_by));
            for wire in entry.arrivals() {
                // Until the other end has tested the new way, its segments only show that they arrive.
                let is_tested = wire != entry.wire || entry.sends_by == Some(wire);
                rewrites.insert(wire.reversed(), pass(&wire, is_tested.then_some(*own)));
            }
        }
        rewrites
    }
}
