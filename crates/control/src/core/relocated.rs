//! Moved flows: running TCP flows of this machine whose packets have other addresses on the way than in their sockets (mirrored rewriting; Yap's thesis,
//! 2.3.2). Programs with the right to change things ask for them over the API, for a limited time; the other host must rewrite the packets back.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_api::{Accepted, FlowEnds, RewriteRequest};
use braid_decide::tables::{self, DEPARTURE_DEVICE};
use braid_model::{Family, LinkFacts, LinkIndex, Protocol, RouteFacts, RuleFacts, Time};

use super::Core;
use super::gateway::allowed_links;
use super::timeouts::RETRY;
use crate::RequestError;
use crate::steering::{Ends, FlowRow, MAX_REWRITES, Port, PortSide, Rewrite, Steering, SteeringError};

/// Maximum number of moved flows: each has two entries in the kernel.
const MAX_MOVED: usize = MAX_REWRITES / 2;
/// The longest time for which a program may move a flow without asking again.
const MAX_LEASE: Duration = Duration::from_secs(3600);
/// Time for which packets under way are still received after a flow has come back.
const LINGER: Duration = Duration::from_secs(30);

/// A flow of this machine, and where its packets go instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MovedFlow {
    /// From this machine, as the socket has it.
    own: Ends,
    /// From this machine, as packets have it on the way.
    wire: Ends,
}

/// Why a flow cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum RelocationError {
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
    /// The policy forbids the link.
    #[error("a rule of the flow from {0} does not allow the link {1}")]
    Forbidden(SocketAddr, String),
    /// Everything leaves through a relay.
    #[error("fallback = \"none\": all flows leave through a relay or fail")]
    Confined,
    /// Another flow has these addresses and ports on the way.
    #[error("another flow has the addresses and ports {0} and {1} on the way")]
    Taken(SocketAddr, SocketAddr),
    /// There are too many.
    #[error("{MAX_MOVED} flows are moved already")]
    Full,
    /// Its lease is longer than [`MAX_LEASE`], or zero.
    #[error("a lease is between 1 and {} seconds", MAX_LEASE.as_secs())]
    Lease,
}

impl From<RelocationError> for RequestError {
    fn from(error: RelocationError) -> Self {
        match error {
            RelocationError::Taken(..) | RelocationError::Full => Self::conflict("Not moved", error.to_string()),
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
    /// Whether that device has been seen.
    is_there: bool,
    /// What the steering has.
    rewrites: BTreeMap<Ends, Rewrite>,
    /// When to update it: a lease ends, or something is to be tried again.
    due: Option<Time>,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    wire: Ends,
    /// Whether its packets leave rewritten; those that arrive always are.
    sends: bool,
    /// When the lease ends; afterwards packets are still received for a while.
    until: Time,
}

impl Relocated {
    /// When it must be updated.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Whether it must be updated now.
    pub(super) fn is_due(&self, now: Time) -> bool {
        self.due.is_some_and(|due| due <= now)
    }
}

impl<S: Steering> Core<S> {
    /// `GET /v1/rewrites`.
    pub fn rewrites_view(&self, now: Time) -> Vec<braid_api::MovedFlow> {
        let ends = |ends: &Ends| FlowEnds { source: ends.source, destination: ends.destination };
        let living = self.relocated.flows.iter().filter(|(_, entry)| entry.until > now);
        let view = |(own, entry): (&Ends, &Entry)| braid_api::MovedFlow {
            own: ends(own),
            wire: ends(&entry.wire),
            sends: entry.sends,
            active: self.relocated.rewrites.get(own).is_some_and(|rewrite| rewrite.device.is_some() == entry.sends),
            remaining_ms: entry.until.since(now).as_millis() as u64,
        };
        living.map(view).collect()
    }

    /// `POST /v1/rewrites`.
    pub fn rewrite(&mut self, now: Time, request: &RewriteRequest) -> Result<Accepted, RequestError> {
        let ends = |ends: FlowEnds| Ends { protocol: Protocol::Tcp, source: ends.source, destination: ends.destination };
        let (applied, done) = match request.lease_ms {
            Some(lease) => {
                let flows: Vec<_> = request.flows.iter().map(|flow| MovedFlow { own: ends(flow.own), wire: ends(flow.wire) }).collect();
                (self.relocate(now, &flows, request.sends, Duration::from_millis(lease)).map_err(RequestError::from)?, "moved")
            }
            None => {
                let flows: Vec<_> = request.flows.iter().map(|flow| ends(flow.own)).collect();
                (self.bring_back(now, &flows), "came back")
            }
        };
        let message = format!("{} flows {done}", request.flows.len());
        applied.map_err(|error| RequestError::failed("Not applied", format!("{error}; Braid tries again")))?;
        Ok(Accepted { message, warnings: Vec::new() })
    }

    /// Gives all flows their own addresses back, for the end of the daemon.
    pub fn release_moves(&mut self) -> Result<(), SteeringError> {
        self.relocated = Relocated::default();
        self.steering.set_rewrites(&BTreeMap::new())
    }

    /// Moves flows, or extends their leases: all of them, or none.
    fn relocate(
        &mut self,
        now: Time,
        flows: &[MovedFlow],
        sends: bool,
        lease: Duration,
    ) -> Result<Result<(), SteeringError>, RelocationError> {
        if lease.is_zero() || lease > MAX_LEASE {
            return Err(RelocationError::Lease);
        }
        let mut next = self.relocated.flows.clone();
        for flow in flows {
            self.check_relocation(flow)?;
            next.insert(flow.own, Entry { wire: flow.wire, sends, until: now + lease });
        }
        if next.len() > MAX_MOVED {
            return Err(RelocationError::Full);
        }
        let mut taken = BTreeSet::new();
        if let Some((_, entry)) = next.iter().find(|(_, entry)| !taken.insert(entry.wire)) {
            return Err(RelocationError::Taken(entry.wire.source, entry.wire.destination));
        }
        self.relocated.flows = next;
        Ok(self.update_relocated(now))
    }

    /// Lets flows use their own addresses again. Unknown ones are ignored.
    fn bring_back(&mut self, now: Time, flows: &[Ends]) -> Result<(), SteeringError> {
        for own in flows {
            if let Some(entry) = self.relocated.flows.get_mut(own) {
                entry.until = entry.until.min(now);
            }
        }
        self.update_relocated(now)
    }

    fn check_relocation(&self, flow: &MovedFlow) -> Result<(), RelocationError> {
        let MovedFlow { own, wire } = flow;
        let family = Family::of(own.source.ip());
        for end in [own.destination, wire.source, wire.destination] {
            if Family::of(end.ip()) != family {
                return Err(RelocationError::Families(own.source.ip(), end.ip()));
            }
        }
        let kept = self.relocated.device.as_ref().is_some_and(|device| device.addresses.contains(&own.source.ip()));
        for (source, kept) in [(own.source, kept), (wire.source, false)] {
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
        let (device, _) = self.way_of(wire).ok_or(RelocationError::NoWay(wire.destination.ip()))?;
        if self.in_force.confines(None) {
            return Err(RelocationError::Confined);
        }
        self.forbidden(own, device).map_or(Ok(()), |link| Err(RelocationError::Forbidden(own.source, link)))
    }

    /// The device's name, if the flow's rule does not allow it.
    fn forbidden(&self, own: &Ends, device: LinkIndex) -> Option<String> {
        let end = |(ip, port): (IpAddr, u16)| SocketAddr::new(ip, port);
        let is_it = |row: &FlowRow| row.protocol == own.protocol && end(row.local) == own.source && end(row.remote) == own.destination;
        let row = self.flows.iter().map(|living| &living.row).find(|row| is_it(row))?;
        let (_, rule) = self.rule_at(row.started, row.rule)?;
        let links: Vec<_> = self.links.iter().map(|(_, link)| (link.slot, &link.facts)).collect();
        let name = &self.network.interface(device)?.name;
        let allowed = allowed_links(rule, &links)?;
        (!allowed.contains(name)).then(|| name.clone())
    }

    /// Whether this is an address of this machine. Those of moved flows, whose links may have lost them, do not count.
    fn has_address(&self, address: IpAddr) -> bool {
        let mut devices = self.network.interfaces.iter().filter(|device| device.name != DEPARTURE_DEVICE);
        devices.any(|device| device.addresses.iter().any(|net| net.addr() == address))
    }

    /// The device over which packets with these ends leave, and their mark: the link that has the source address, or the device on whose network the
    /// destination is, or the link that the system prefers.
    fn way_of(&self, wire: &Ends) -> Option<(LinkIndex, u32)> {
        let (source, destination) = (wire.source.ip(), wire.destination.ip());
        if !self.has_address(source) {
            return None;
        }
        let usable = || self.links.iter().filter(|(_, link)| link.refused.is_none());
        let marked = |(index, slot): (LinkIndex, usize)| (index, tables::mark(slot));
        let has = |device: &LinkFacts, address: IpAddr| device.addresses.iter().any(|net| net.addr() == address);
        if let Some((index, link)) = usable().find(|(_, link)| has(&link.facts, source)) {
            return Some(marked((index, link.slot)));
        }
        let near = |device: &&LinkFacts| device.name != DEPARTURE_DEVICE && device.addresses.iter().any(|net| net.contains(&destination));
        if let Some(device) = self.network.interfaces.iter().find(near) {
            return Some((device.index, 0));
        }
        let metric = |facts: &LinkFacts| facts.gateways.get(Family::of(destination)).first().map(|route| route.metric);
        let best = usable().filter_map(|(index, link)| Some((metric(&link.facts)?, index, link.slot))).min();
        best.map(|(_, index, slot)| marked((index, slot)))
    }

    /// Index of the device through which packets leave, once it exists.
    fn departure(&self) -> Option<LinkIndex> {
        self.relocated.device.as_ref()?;
        self.network.interfaces.iter().find(|device| device.name == DEPARTURE_DEVICE).map(|device| device.index)
    }

    /// The rules and routes for packets of moved flows.
    pub(super) fn relocation_tables(&self) -> Vec<(RuleFacts, RouteFacts)> {
        self.departure().into_iter().flat_map(|device| Family::ALL.map(|family| tables::departures(family, device))).collect()
    }

    /// Where the switch acts for moved flows.
    pub(super) fn relocation_ports(&self) -> Vec<Port> {
        let Some(departure) = self.departure() else { return Vec::new() };
        let is_arrival = |device: &LinkFacts| device.index != departure && device.name != "lo";
        let arrivals = self.network.interfaces.iter().filter(|device| is_arrival(device));
        let port = |device: &LinkFacts, side| Port { index: device.index, name: device.name.clone(), side };
        let own = self.network.interface(departure).map(|device| port(device, PortSide::Departures));
        arrivals.map(|device| port(device, PortSide::Arrivals)).chain(own).collect()
    }

    /// Ends leases, and makes the kernel rewrite what is left. Packets leave only once the device is there; before, the flows stay where they are.
    pub(super) fn update_relocated(&mut self, now: Time) -> Result<(), SteeringError> {
        self.relocated.flows.retain(|_, entry| entry.until + LINGER > now);
        let ends = self.relocated.flows.values().map(|entry| if entry.until > now { entry.until } else { entry.until + LINGER });
        self.relocated.due = ends.min();
        let addresses: BTreeSet<IpAddr> = self.relocated.flows.keys().map(|own| own.source.ip()).collect();
        let ways: Vec<_> = self.relocated.flows.values().filter_map(|entry| self.way_of(&entry.wire)).collect();
        let mtu = ways.iter().filter_map(|(device, _)| Some(self.network.interface(*device)?.mtu)).min();
        let device = (!addresses.is_empty()).then(|| Departures { mtu: mtu.unwrap_or(1280).max(1280), addresses });
        // Somebody else may have removed it.
        let is_there = self.departure().is_some();
        let was_there = std::mem::replace(&mut self.relocated.is_there, is_there);
        if device != self.relocated.device || (device.is_some() && was_there && !is_there) {
            self.actions.departures = Some(device.clone());
            self.relocated.device = device;
        }
        let departure = self.ports.0.iter().find(|port| port.side == PortSide::Departures).map(|port| port.index);
        let mut rewrites = BTreeMap::new();
        for (departure, (own, entry)) in
            departure.into_iter().flat_map(|device| self.relocated.flows.iter().map(move |flow| (device, flow)))
        {
            let ends = |ends: Ends| (ends.source, ends.destination);
            let to = |(source, destination), device, mark, arrives| Rewrite { source, destination, device, mark, arrives };
            rewrites.insert(entry.wire.reversed(), to(ends(own.reversed()), Some(departure), tables::DEPARTURE_MARK, true));
            let departs = match self.way_of(&entry.wire).filter(|_| entry.sends && entry.until > now) {
                Some((device, mark)) => to(ends(entry.wire), Some(device), mark, false),
                None => to(ends(*own), None, 0, false),
            };
            rewrites.insert(*own, departs);
        }
        if rewrites != self.relocated.rewrites {
            if let Err(error) = self.steering.set_rewrites(&rewrites) {
                self.relocated.due = Some(now + RETRY);
                return Err(error);
            }
            self.relocated.rewrites = rewrites;
        }
        Ok(())
    }
}
