//! The network as the operating system sees it: interfaces, routes and policy rules at one moment.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::{Family, LinkFacts, LinkIndex};

/// Everything Braid follows in the kernel's routing, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetworkSnapshot {
    /// Every interface, links or not, in rising order of index.
    pub interfaces: Vec<LinkFacts>,
    /// Every route of every table.
    pub routes: Vec<RouteFacts>,
    /// Every policy rule, in the order in which the kernel tries them, per family.
    pub rules: Vec<RuleFacts>,
    /// Where IPsec policies of this machine's own packets (XFRM, RFC 4301 section 4.4.1) protect or block what is sent.
    pub protected: Vec<IpNet>,
}

impl NetworkSnapshot {
    /// The interface with this number.
    pub fn interface(&self, index: LinkIndex) -> Option<&LinkFacts> {
        self.interfaces.iter().find(|facts| facts.index == index)
    }
}

/// What a route does with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteKind {
    /// Sends it to a next hop.
    Unicast,
    /// Delivers it here.
    Local,
    /// Sends it as broadcast, multicast or anycast.
    Broadcast,
    /// Refuses or drops it.
    Refuse,
    /// Ends the look-up in this table; the next rule is tried.
    Throw,
}

/// One route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteFacts {
    /// The table it stands in.
    pub table: u32,
    /// Where it leads.
    pub destination: IpNet,
    /// What it does.
    pub kind: RouteKind,
    /// The lowest wins among routes to one destination.
    pub metric: u32,
    /// Where it sends packets; several for a multipath route, none where `kind` needs none.
    pub hops: Vec<NextHop>,
    /// The source address it gives packets that have none, where it names one.
    pub source: Option<IpAddr>,
    /// It applies to some packets only, by a selector not told here (source prefix, type of service).
    pub conditional: bool,
    /// Braid made it.
    pub ours: bool,
}

impl RouteFacts {
    /// The route's family.
    pub fn family(&self) -> Family {
        match self.destination {
            IpNet::V4(_) => Family::V4,
            IpNet::V6(_) => Family::V6,
        }
    }
}

/// Where a route sends packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextHop {
    /// The device.
    pub device: LinkIndex,
    /// The gateway; `None` is on-link.
    pub gateway: Option<IpAddr>,
    /// The kernel does not use it now (its device is down).
    pub dead: bool,
}

/// What a policy rule does with a packet it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleAction {
    /// Looks it up in a table.
    Table(u32),
    /// Goes on at the first rule with this priority.
    Goto(u32),
    /// Goes on at the next rule.
    Nop,
    /// Refuses or drops it.
    Refuse,
    /// Something not understood here.
    Other,
}

/// One policy rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleFacts {
    /// The rule's family.
    pub family: Family,
    /// Rules are tried in rising order.
    pub priority: u32,
    /// Packets from here only.
    pub source: Option<IpNet>,
    /// Packets to there only.
    pub destination: Option<IpNet>,
    /// Packets with this mark only: value and mask.
    pub mark: Option<(u32, u32)>,
    /// Packets that came in by this device only (never packets of this machine's own, unless it is `lo`).
    pub input: Option<String>,
    /// Packets of sockets bound to this device only.
    pub output: Option<String>,
    /// Other selectors (type of service, ports, user, protocol, l3mdev, tunnel): whether it matches cannot be told ahead.
    pub conditional: bool,
    /// Matches what its selectors do not match.
    pub invert: bool,
    /// What it does.
    pub action: RuleAction,
    /// Results whose prefix is this long or shorter do not count, and the next rule is tried.
    pub suppress_prefix_len: Option<u8>,
    /// Results through some group of devices do not count; which, is not told here.
    pub suppress_group: bool,
    /// Braid made it.
    pub ours: bool,
}
