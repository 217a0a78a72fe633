//! Snapshot of the operating system's network configuration: interfaces, routes and policy rules.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{Family, LinkFacts, LinkIndex, Protocol};

/// The kernel's interfaces and routing configuration at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkSnapshot {
    /// All interfaces, whether or not they are links, in ascending order of index.
    pub interfaces: Vec<LinkFacts>,
    /// All routes of all tables.
    pub routes: Vec<RouteFacts>,
    /// All policy rules; within a family, in the order in which the kernel evaluates them.
    pub rules: Vec<RuleFacts>,
    /// Destinations for which an IPsec policy (XFRM, RFC 4301 section 4.4.1) protects or blocks packets that this machine sends.
    pub protected: Vec<IpNet>,
    /// The smallest largest packet (MTU) that an IPv4 route states, in bytes; `None`: none states any.
    pub route_mtu: Option<u32>,
}

impl NetworkSnapshot {
    /// The interface with this index.
    pub fn interface(&self, index: LinkIndex) -> Option<&LinkFacts> {
        self.interfaces.iter().find(|facts| facts.index == index)
    }
}

/// Action of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteKind {
    /// Sends the packet to a next hop.
    Unicast,
    /// Delivers the packet to this machine.
    Local,
    /// Sends the packet as broadcast, multicast or anycast.
    Broadcast,
    /// Rejects or drops the packet.
    Refuse,
    /// Ends the lookup in this table. The kernel continues with the next rule.
    Throw,
}

/// One route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteFacts {
    /// Number of the routing table that contains the route.
    pub table: u32,
    /// Destination prefix.
    pub destination: IpNet,
    /// Action of the route.
    pub kind: RouteKind,
    /// Metric. Among routes to the same destination the lowest metric wins.
    pub metric: u32,
    /// Next hops: several for a multipath route, none for kinds that need none.
    pub hops: Vec<NextHop>,
    /// Preferred source address for packets without one, if the route sets it.
    pub source: Option<IpAddr>,
    /// The route has a selector that this type does not represent (source prefix, type of service), so it applies to some packets only.
    pub conditional: bool,
    /// Braid installed the route.
    pub ours: bool,
}

impl RouteFacts {
    /// Address family of the route.
    pub fn family(&self) -> Family {
        match self.destination {
            IpNet::V4(_) => Family::V4,
            IpNet::V6(_) => Family::V6,
        }
    }
}

/// Protocol and ports of a flow, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowPorts {
    /// Transport protocol.
    pub protocol: Protocol,
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
}

/// One next hop of a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextHop {
    /// Output device.
    pub device: LinkIndex,
    /// Gateway; `None` if the destination is on-link.
    pub gateway: Option<IpAddr>,
    /// The kernel does not use this hop now (its device is down).
    pub dead: bool,
}

/// Action of a policy rule on the packets that it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleAction {
    /// Looks the destination up in this table.
    Table(u32),
    /// Continues with the first rule of this priority.
    Goto(u32),
    /// Continues with the next rule.
    Nop,
    /// Rejects or drops the packet.
    Refuse,
    /// An action that Braid does not model.
    Other,
}

/// One policy rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleFacts {
    /// Address family of the rule.
    pub family: Family,
    /// Priority. The kernel evaluates rules in ascending order.
    pub priority: u32,
    /// Matches only packets from this prefix.
    pub source: Option<IpNet>,
    /// Matches only packets to this prefix.
    pub destination: Option<IpNet>,
    /// Matches only packets with this firewall mark: value and mask.
    pub mark: Option<(u32, u32)>,
    /// Matches only packets received on this device. Packets that this machine originates match only if the device is `lo`.
    pub input: Option<String>,
    /// Matches only packets of sockets bound to this device.
    pub output: Option<String>,
    /// Matches only packets of a flow with this protocol and these ports. Such a rule is also [`conditional`](Self::conditional).
    pub ports: Option<FlowPorts>,
    /// The rule has other selectors (type of service, ports, user, protocol, l3mdev, tunnel), so Braid cannot predict whether it matches.
    pub conditional: bool,
    /// The rule matches the packets that its selectors do not match.
    pub invert: bool,
    /// Action of the rule.
    pub action: RuleAction,
    /// The rule ignores lookup results whose prefix is this long or shorter; the kernel then evaluates the next rule.
    pub suppress_prefix_len: Option<u8>,
    /// The rule ignores lookup results through one device group. This type does not record which group.
    pub suppress_group: bool,
    /// Braid installed the rule.
    pub ours: bool,
}
