//! Braid's routing tables and policy rules: one table per link, so that replies, bound sockets and marked packets leave by their link.
//!
//! Priorities among the system's rules:
//!
//! | priority | rule | reason |
//! |---|---|---|
//! | 32763 | `from ADDR to SUBNET lookup T` | two links on one subnet: each reaches and answers its neighbours from its own address |
//! | 32763 | `from ADDR lookup V`, `oif DEVICE lookup V` | programs that use the virtual interface or its address (`platform` adds them) |
//! | 32763 | `iif LAN fwmark CARRIER lookup` a table that makes everything local | what the daemon takes from the gateway's clients |
//! | 32763 | `fwmark DEPARTURE lookup` a table with a device of Braid | moved flows: their packets are rewritten there, and leave over any link |
//! | 32763 | `to ADDR ipproto udp sport PORT dport PORT lookup` such a table | moved flows of datagrams, whose sockets cannot be marked |
//! | 32763 | `from ADDR fwmark MOVED unreachable` | IPv4: a connect that moves to another link must find that its old source address has no route |
//! | 32764 | `oif DEVICE lookup main` | IPv4, without foreign rules at 32764 or 32765: bound sockets need one lookup; a TCP connect makes three |
//! | 32764 | `lookup main suppress_prefixlength 0` | specific routes take precedence over the links' default routes |
//! | 32765 | `oif DEVICE lookup T` | sockets bound to a link for which main has no default route; in IPv6 they would have no route at all |
//! | 32765 | `from ADDR lookup T` | replies and sockets bound to an address; strict `rp_filter` uses this rule too |
//! | 32765 | `fwmark MARK lookup T` | packets steered by mark, regardless of the link that a moved connect leaves |
//! | 32765 | `fwmark PACKET lookup` a table with a device of Braid | packets of the gateway's clients that go through a bond |
//! | 32766 | `lookup main` | the system's own rule |
//!
//! Braid's rules must come after every foreign rule, so that VPNs keep precedence. The kernel puts a rule without a priority (from wg-quick, for
//! example) before all rules except `lookup local`. A rule added after Braid's therefore precedes them. A rule added before Braid's has a priority of
//! 32764 or 32765 at most, and the kernel appends rules of equal priority, so Braid's follow it. Traffic that such a rule routes never reaches
//! Braid's rules.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use braid_model::{
    Family, FlowPorts, LinkFacts, LinkIndex, NetworkSnapshot, NextHop, Protocol, RouteFacts, RouteKind, RuleAction, RuleFacts,
};
use ipnet::IpNet;

/// Marks Braid's rules and routes in the kernel (`rtm_protocol`, `FRA_PROTOCOL`).
///
/// Braid removes every rule and route with this number, so it must be unused. It is free in the kernel's `rtnetlink.h` and iproute2's `rt_protos`
/// (186 to 197 belong to routing daemons).
pub const PROTOCOL: u8 = 177;
/// The system's main table.
pub const MAIN: u32 = 254;

const TABLE_BASE: u32 = 47_000;
const TABLES: u32 = 256;
pub(crate) const MARK_BASE: u32 = 0xB1D0_0000;
pub(crate) const MARK_MASK: u32 = 0xFFFF_0000;
const PRIORITY_SHARED_SUBNET: u32 = 32_763;
/// Priority of the rules of the virtual interface: before all others of Braid, since its address is no link's.
pub const PRIORITY_VIRTUAL: u32 = 32_763;
const PRIORITY_SPECIFIC: u32 = 32_764;
const PRIORITY_BY_LINK: u32 = 32_765;

/// The number of the routing table of the link in `slot`.
pub const fn table(slot: usize) -> u32 {
    TABLE_BASE + slot as u32
}

/// Whether a table belongs to Braid, for any slot.
pub const fn is_our_table(table: u32) -> bool {
    table >= TABLE_BASE && table - TABLE_BASE < TABLES
}

/// The mark that sends a packet out of the link in `slot`.
pub const fn mark(slot: usize) -> u32 {
    MARK_BASE | (slot as u32 + 1)
}

/// The bits of a mark that identify the link. For a moved connect the remaining bits hold the slot that it leaves, plus one ([`LEFT_MASK`]).
const LINK_MASK: u32 = 0xFFFF_00FF;
/// The bits of a mark that identify the link which a moved connect leaves (`BRAID_MOVE_MASK`).
const LEFT_MASK: u32 = 0xFFFF_FF00;

/// Whether `mark` is one of Braid's, for any slot.
pub const fn is_ours(mark: u32) -> bool {
    mark & MARK_MASK == MARK_BASE && mark & !MARK_MASK != 0
}

/// The mark of packets of the gateway's clients that the daemon takes (`BRAID_CARRIER_MARK`).
pub const CARRIER_MARK: u32 = MARK_BASE | 0xFE;
/// The table with the routes through the virtual interface.
pub const VIRTUAL_TABLE: u32 = TABLE_BASE + TABLES - 3;
/// The table that makes every destination local, for such packets.
const CARRIER_TABLE: u32 = TABLE_BASE + TABLES - 1;
/// The mark of packets of the gateway's clients that go through a bond as packets (`BRAID_PACKET_MARK`).
pub const PACKET_MARK: u32 = MARK_BASE | 0xFD;
/// The device over which the system hands such packets to the daemon. It exists while a relay takes them.
pub const PACKET_DEVICE: &str = "braid-packets";
/// The table for such packets.
const PACKET_TABLE: u32 = TABLE_BASE + TABLES - 2;
/// The mark of packets of this machine's moved flows (`BRAID_DEPARTURE_MARK`).
pub const DEPARTURE_MARK: u32 = MARK_BASE | 0xFB;
/// The device through which such packets leave: a program at its egress rewrites them, and sends each over its link.
pub const DEPARTURE_DEVICE: &str = "braid-moves";
/// The table for such packets.
const DEPARTURE_TABLE: u32 = TABLE_BASE + TABLES - 4;
/// The same for datagrams of sockets that leave the choice of their source address to the route.
const DATAGRAM_TABLE: u32 = TABLE_BASE + TABLES - 5;
/// The loopback device, the first of every network namespace.
const LOOPBACK: LinkIndex = LinkIndex(1);

/// The device to which packets go that wait for a link ([`crate::late`]).
pub const LATE_DEVICE: &str = "braid-late";
/// The mark of packets that have waited, and of which the link is chosen (`BRAID_LATE_MARK`). No routing rule matches it.
pub const LATE_MARK: u32 = MARK_BASE | 0xFF00;

/// The mark of the daemon's own datagrams to relays. No routing rule matches it; the firewall knows by it what may leave directly if nothing else may.
pub const RELAY_MARK: u32 = MARK_BASE | 0xFC;

/// The rules and the route that deliver packets with [`CARRIER_MARK`] from the LAN devices to this machine, whatever their destination.
///
/// The rules name the devices, because a reverse path filter that considers marks would find the packets' sources local too.
pub fn carrier(family: Family, lan: &[String]) -> (Vec<RuleFacts>, RouteFacts) {
    let rule = |device: &String| RuleFacts {
        mark: Some((CARRIER_MARK, u32::MAX)),
        input: Some(device.clone()),
        ..rule(family, PRIORITY_SHARED_SUBNET, CARRIER_TABLE)
    };
    let rules = lan.iter().map(rule).collect();
    let route = RouteFacts {
        table: CARRIER_TABLE,
        destination: everything(family),
        kind: RouteKind::Local,
        metric: metric(family, 0),
        hops: vec![NextHop { device: LOOPBACK, gateway: None, dead: false }],
        source: None,
        conditional: false,
        ours: true,
    };
    (rules, route)
}

/// The rule and the route that send packets with [`PACKET_MARK`] over the device with this index, which is [`PACKET_DEVICE`].
pub fn packets(family: Family, device: LinkIndex) -> (RuleFacts, RouteFacts) {
    marked((family, PACKET_MARK), PRIORITY_BY_LINK, PACKET_TABLE, device)
}

/// The rule and the route that send packets with [`DEPARTURE_MARK`] over the device with this index, which is [`DEPARTURE_DEVICE`], whatever links their
/// source addresses belong to.
pub fn departures(family: Family, device: LinkIndex) -> (RuleFacts, RouteFacts) {
    marked((family, DEPARTURE_MARK), PRIORITY_SHARED_SUBNET, DEPARTURE_TABLE, device)
}

/// The rule and the route that send datagrams from `source` to `destination` over the device with this index, which is [`DEPARTURE_DEVICE`]. `chosen`: their socket has
/// no source address, so that the route chooses it: all such flows of a family have the same one.
pub fn departing_datagrams(source: SocketAddr, destination: SocketAddr, chosen: bool, device: LinkIndex) -> (RuleFacts, RouteFacts) {
    let family = Family::of(source.ip());
    let table = if chosen { DATAGRAM_TABLE } else { DEPARTURE_TABLE };
    let rule = RuleFacts {
        source: (!chosen).then(|| source.ip().into()),
        destination: Some(destination.ip().into()),
        ports: Some(FlowPorts { protocol: Protocol::Udp, source: source.port(), destination: destination.port() }),
        conditional: true,
        ..rule(family, PRIORITY_SHARED_SUBNET, table)
    };
    (rule, RouteFacts { source: chosen.then(|| source.ip()), ..only_route(family, table, device) })
}

/// The rule for packets of this family with this mark, and the only route of its table.
fn marked((family, mark): (Family, u32), priority: u32, table: u32, device: LinkIndex) -> (RuleFacts, RouteFacts) {
    let rule = RuleFacts { mark: Some((mark, u32::MAX)), ..rule(family, priority, table) };
    (rule, only_route(family, table, device))
}

/// A route to everything over this device.
fn only_route(family: Family, table: u32, device: LinkIndex) -> RouteFacts {
    RouteFacts {
        table,
        destination: everything(family),
        kind: RouteKind::Unicast,
        metric: metric(family, 0),
        hops: vec![NextHop { device, gateway: None, dead: false }],
        source: None,
        conditional: false,
        ours: true,
    }
}

/// The prefix of the default route.
pub fn everything(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::V4(Default::default()),
        Family::V6 => IpNet::V6(Default::default()),
    }
}

/// The exact set of rules and routes that Braid must have in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TablePlan {
    /// Rules, in the order in which they must be added.
    pub rules: Vec<RuleFacts>,
    /// Routes; on-link routes precede those with a gateway.
    pub routes: Vec<RouteFacts>,
}

impl TablePlan {
    /// The routes as the kernel reports them once they are set ([`normalized`]). It holds one route per destination and metric: the first.
    pub fn kept_routes(&self) -> Vec<RouteFacts> {
        let mut kept: Vec<RouteFacts> = Vec::new();
        for route in self.routes.iter().map(normalized) {
            if !kept.iter().any(|other| same_key(other, &route)) {
                kept.push(route);
            }
        }
        kept
    }

    /// Number of rules and routes of this plan that the kernel does not have.
    pub fn missing(&self, snapshot: &NetworkSnapshot) -> usize {
        let routes: Vec<RouteFacts> = snapshot.routes.iter().filter(|route| route.ours).map(normalized).collect();
        let rules: Vec<&RuleFacts> = snapshot.rules.iter().filter(|rule| rule.ours).collect();
        let lacks_rule = |rule: &&RuleFacts| !rules.contains(&&RuleFacts { ours: true, ..(*rule).clone() });
        self.rules.iter().filter(lacks_rule).count() + self.kept_routes().iter().filter(|route| !routes.contains(route)).count()
    }
}

/// A route of Braid's as the kernel would report it, without properties that change by themselves.
pub fn normalized(route: &RouteFacts) -> RouteFacts {
    let mut route = RouteFacts { destination: route.destination.trunc(), conditional: false, ours: true, ..route.clone() };
    route.hops.iter_mut().for_each(|hop| hop.dead = false);
    route.metric = metric(route.family(), route.metric);
    route
}

/// Whether the kernel can hold only one of two routes.
pub fn same_key(a: &RouteFacts, b: &RouteFacts) -> bool {
    (a.table, a.destination, a.metric) == (b.table, b.destination, b.metric)
}

/// Computes the rules and routes for the links in their `slots`.
///
/// A link is included in each family for which it is usable now (carrier, address, default route). Links that [`conflicts`] refuses are left out.
pub fn plan(snapshot: &NetworkSnapshot, slots: &BTreeMap<LinkIndex, usize>) -> TablePlan {
    let refused = conflicts(snapshot, slots.keys().copied());
    let links: Vec<(usize, &LinkFacts)> = slots
        .iter()
        .filter(|(index, _)| !refused.contains_key(index))
        .filter_map(|(index, slot)| Some((*slot, snapshot.interface(*index)?)))
        .collect();
    let mut plan = TablePlan::default();
    for family in Family::ALL {
        let links: Vec<_> = links.iter().copied().filter(|(_, facts)| facts.usable(family)).collect();
        if links.is_empty() {
            continue;
        }
        if may_use_main_by_device(snapshot, family) {
            let output = |facts: &LinkFacts| RuleFacts { output: Some(facts.name.clone()), ..rule(family, PRIORITY_SPECIFIC, MAIN) };
            plan.rules.extend(links.iter().map(|(_, facts)| output(facts)));
        }
        plan.rules.push(RuleFacts { suppress_prefix_len: Some(0), ..rule(family, PRIORITY_SPECIFIC, MAIN) });
        let mut rules_of_links = Vec::new();
        for (slot, facts) in &links {
            let others = links.iter().filter(|(other, _)| other != slot).flat_map(|(_, facts)| subnets(snapshot, facts, family));
            let others: Vec<IpNet> = others.collect();
            let subnets = subnets(snapshot, facts, family);
            rules_of_links.extend(rules(*slot, facts, family, &subnets, &others));
            plan.routes.extend(routes(*slot, facts, family, &subnets));
        }
        // The kernel evaluates rules of one priority in this order. A TCP connect makes one or two lookups by source address for its answer.
        rules_of_links.sort_by_key(|rule| (rule.output.is_none(), rule.source.is_none()));
        plan.rules.extend(rules_of_links);
    }
    plan
}

/// Whether lookups by device may use the whole main table before all other rules. This does not work in IPv6: there the main table returns the
/// overall best default route to senders with a source address and no bound socket (echo replies, the last acknowledgement of a connection). It is
/// not safe either if foreign rules stand among Braid's, because a foreign rule that blocks traffic must be evaluated first.
fn may_use_main_by_device(snapshot: &NetworkSnapshot, family: Family) -> bool {
    let among = |rule: &RuleFacts| !rule.ours && rule.family == family && (PRIORITY_SPECIFIC..=PRIORITY_BY_LINK).contains(&rule.priority);
    family == Family::V4 && !snapshot.rules.iter().any(among)
}

/// Links that cannot be distinguished because they have the same address: the link with the higher index is refused, with the reason.
pub fn conflicts(snapshot: &NetworkSnapshot, links: impl IntoIterator<Item = LinkIndex>) -> BTreeMap<LinkIndex, String> {
    let mut links: Vec<&LinkFacts> = links.into_iter().filter_map(|index| snapshot.interface(index)).collect();
    links.sort_by_key(|facts| facts.index);
    let mut holders: BTreeMap<IpAddr, &LinkFacts> = BTreeMap::new();
    let mut refused = BTreeMap::new();
    for facts in links {
        let held = facts.addresses.iter().find_map(|net| holders.get(&net.addr()).map(|holder| (net.addr(), *holder)));
        match held {
            Some((address, holder)) => {
                let reason = format!(
                    "{} and {} both have the address {address}, so packets match both links; give one of the networks another address range",
                    holder.name, facts.name
                );
                refused.insert(facts.index, reason);
            }
            None => holders.extend(facts.addresses.iter().map(|net| (net.addr(), facts))),
        }
    }
    refused
}

/// Links that share a subnet with a LAN device of the gateway, with the reason: answers to clients would leave over the link.
pub fn lan_conflicts(
    snapshot: &NetworkSnapshot,
    links: impl IntoIterator<Item = LinkIndex>,
    lan: &[String],
) -> BTreeMap<LinkIndex, String> {
    let devices = snapshot.interfaces.iter().filter(|facts| lan.contains(&facts.name));
    let own: Vec<(&LinkFacts, IpNet)> = devices.flat_map(|device| device.addresses.iter().map(move |net| (device, *net))).collect();
    let conflict = |facts: &LinkFacts| {
        let nets = Family::ALL.into_iter().flat_map(|family| subnets(snapshot, facts, family));
        nets.chain(facts.addresses.iter().map(|net| net.addr().into())).find_map(|net| {
            let (device, other) = own.iter().find(|(_, own)| overlap(net, *own))?;
            Some(format!(
                "{} is in the network {net}, which overlaps {} of the LAN device {}, so answers to clients would be ambiguous; give the LAN another \
                 address range",
                facts.name,
                other.trunc(),
                device.name
            ))
        })
    };
    links.into_iter().filter_map(|index| Some((index, conflict(snapshot.interface(index)?)?))).collect()
}

/// The rules of one link, from its own subnets and those of the other links.
fn rules(slot: usize, facts: &LinkFacts, family: Family, subnets: &[IpNet], others: &[IpNet]) -> Vec<RuleFacts> {
    let by_link = rule(family, PRIORITY_BY_LINK, table(slot));
    let mut rules = vec![
        RuleFacts { output: Some(facts.name.clone()), ..by_link.clone() },
        RuleFacts { mark: Some((mark(slot), LINK_MASK)), ..by_link.clone() },
    ];
    let shared: Vec<&IpNet> = subnets.iter().filter(|net| others.iter().any(|other| overlap(**net, *other))).collect();
    for address in addresses(facts, family) {
        let source = Some(IpNet::from(address));
        rules.push(RuleFacts { source, ..by_link.clone() });
        if family == Family::V4 {
            let left = Some((MARK_BASE | (slot as u32 + 1) << 8, LEFT_MASK));
            rules.push(RuleFacts { source, mark: left, priority: PRIORITY_SHARED_SUBNET, action: RuleAction::Refuse, ..by_link.clone() });
        }
        rules.extend(shared.iter().map(|subnet| RuleFacts {
            source,
            destination: Some(**subnet),
            priority: PRIORITY_SHARED_SUBNET,
            ..by_link.clone()
        }));
    }
    rules
}

/// The routing table of one link.
fn routes(slot: usize, facts: &LinkFacts, family: Family, subnets: &[IpNet]) -> Vec<RouteFacts> {
    let mut only = addresses(facts, family);
    let source = only.next().filter(|_| only.next().is_none());
    let route = |destination, gateway, metric| RouteFacts {
        table: table(slot),
        destination,
        kind: RouteKind::Unicast,
        metric,
        hops: vec![NextHop { device: facts.index, gateway, dead: false }],
        source,
        conditional: false,
        ours: true,
    };
    let mut routes: Vec<RouteFacts> = Vec::new();
    for subnet in subnets {
        routes.push(route(*subnet, None, metric(family, 0)));
    }
    let everything = everything(family);
    for default in facts.gateways.get(family) {
        let route = route(everything, default.gateway, metric(family, default.metric));
        // Of two gateways with one metric the kernel uses one, and it refuses the second route because it exists already.
        if routes.iter().all(|other| (other.destination, other.metric) != (route.destination, route.metric)) {
            routes.push(route);
        }
    }
    routes
}

/// The kernel's default metric for IPv6 routes without a metric.
fn metric(family: Family, metric: u32) -> u32 {
    if family == Family::V6 && metric == 0 { 1024 } else { metric }
}

/// A rule of Braid's without selectors.
pub fn rule(family: Family, priority: u32, table: u32) -> RuleFacts {
    RuleFacts {
        family,
        priority,
        ports: None,
        source: None,
        destination: None,
        mark: None,
        input: None,
        output: None,
        conditional: false,
        invert: false,
        action: RuleAction::Table(table),
        suppress_prefix_len: None,
        suppress_group: false,
        ours: true,
    }
}

fn addresses(facts: &LinkFacts, family: Family) -> impl Iterator<Item = IpAddr> {
    facts.addresses.iter().map(IpNet::addr).filter(move |address| Family::of(*address) == family)
}

/// The link's on-link prefixes without duplicates: the destinations that the main table sends to the device without a gateway. The prefix lengths of
/// the addresses are not reliable: neighbours of a `noprefixroute` address are reached through the gateway only.
fn subnets(snapshot: &NetworkSnapshot, facts: &LinkFacts, family: Family) -> Vec<IpNet> {
    let on_link = |route: &&RouteFacts| {
        route.table == MAIN
            && route.family() == family
            && route.kind == RouteKind::Unicast
            && !route.conditional
            && matches!(route.hops[..], [NextHop { device, gateway: None, .. }] if device == facts.index)
            && !crate::steer::is_default(route.destination)
            && !is_link_local(route.destination.addr())
    };
    let mut subnets: Vec<IpNet> = snapshot.routes.iter().filter(on_link).map(|route| route.destination.trunc()).collect();
    subnets.sort();
    subnets.dedup();
    subnets
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || v6.is_multicast(),
    }
}

fn overlap(one: IpNet, other: IpNet) -> bool {
    one.contains(&other) || other.contains(&one)
}

#[cfg(test)]
mod tests {
    use braid_model::{DefaultRoute, LinkKind};

    use super::*;

    fn link(index: u32, nets: &[&str], gateways: &[&str]) -> LinkFacts {
        let mut facts = LinkFacts {
            addresses: nets.iter().map(|net| net.parse().unwrap()).collect(),
            ..LinkFacts::new(LinkIndex(index), format!("link{index}"), LinkKind::Wired)
        };
        for gateway in gateways {
            let gateway: IpAddr = gateway.parse().unwrap();
            facts.gateways.get_mut(Family::of(gateway)).push(DefaultRoute { gateway: Some(gateway), metric: 100 + index });
        }
        facts
    }

    fn network(interfaces: Vec<LinkFacts>) -> (NetworkSnapshot, BTreeMap<LinkIndex, usize>) {
        let slots = interfaces.iter().enumerate().map(|(slot, facts)| (facts.index, slot)).collect();
        let routes = interfaces.iter().flat_map(connected).collect();
        (NetworkSnapshot { interfaces, routes, ..NetworkSnapshot::default() }, slots)
    }

    /// The routes that the kernel adds with addresses.
    fn connected(facts: &LinkFacts) -> impl Iterator<Item = RouteFacts> {
        let hops = vec![NextHop { device: facts.index, gateway: None, dead: false }];
        facts.addresses.iter().filter(|net| net.prefix_len() < net.max_prefix_len()).map(move |net| RouteFacts {
            table: MAIN,
            destination: net.trunc(),
            kind: RouteKind::Unicast,
            metric: 0,
            hops: hops.clone(),
            source: Some(net.addr()),
            conditional: false,
            ours: false,
        })
    }

    fn shown(plan: &TablePlan) -> Vec<String> {
        let rules = plan.rules.iter().map(|rule| {
            let action = match rule.action {
                RuleAction::Table(table) => format!("lookup {table}"),
                RuleAction::Refuse => "unreachable".to_owned(),
                _ => panic!("{rule:?}"),
            };
            let source = rule.source.map_or(String::new(), |net| format!(" from {net}"));
            let to = rule.destination.map_or(String::new(), |net| format!(" to {net}"));
            let mark = rule.mark.map_or(String::new(), |(value, _)| format!(" mark {value:x}"));
            let output = rule.output.as_ref().map_or(String::new(), |name| format!(" oif {name}"));
            let suppress = if rule.suppress_prefix_len == Some(0) { " suppress 0" } else { "" };
            format!("{}{source}{to}{output}{mark} {action}{suppress}", rule.priority)
        });
        let routes = plan.routes.iter().map(|route| {
            let via = route.hops[0].gateway.map_or(String::new(), |gateway| format!(" via {gateway}"));
            let source = route.source.map_or(String::new(), |source| format!(" src {source}"));
            format!("{}: {}{via} dev {}{source} metric {}", route.table, route.destination, route.hops[0].device, route.metric)
        });
        rules.chain(routes).collect()
    }

    #[test]
    fn each_link_and_family_gets_its_table_and_rules() {
        let (snapshot, slots) = network(vec![
            link(2, &["10.0.0.2/24", "2001:db8::2/64", "2001:db8::3/64"], &["10.0.0.1", "fe80::1"]),
            link(5, &["10.0.1.2/24"], &["10.0.1.1"]),
        ]);
        let expected = [
            "32764 oif link2 lookup 254",
            "32764 oif link5 lookup 254",
            "32764 lookup 254 suppress 0",
            "32765 oif link2 lookup 47000",
            "32765 oif link5 lookup 47001",
            "32765 from 10.0.0.2/32 lookup 47000",
            "32763 from 10.0.0.2/32 mark b1d00100 unreachable",
            "32765 from 10.0.1.2/32 lookup 47001",
            "32763 from 10.0.1.2/32 mark b1d00200 unreachable",
            "32765 mark b1d00001 lookup 47000",
            "32765 mark b1d00002 lookup 47001",
            "32764 lookup 254 suppress 0",
            "32765 oif link2 lookup 47000",
            "32765 from 2001:db8::2/128 lookup 47000",
            "32765 from 2001:db8::3/128 lookup 47000",
            "32765 mark b1d00001 lookup 47000",
            "47000: 10.0.0.0/24 dev #2 src 10.0.0.2 metric 0",
            "47000: 0.0.0.0/0 via 10.0.0.1 dev #2 src 10.0.0.2 metric 102",
            "47001: 10.0.1.0/24 dev #5 src 10.0.1.2 metric 0",
            "47001: 0.0.0.0/0 via 10.0.1.1 dev #5 src 10.0.1.2 metric 105",
            "47000: 2001:db8::/64 dev #2 metric 1024",
            "47000: ::/0 via fe80::1 dev #2 metric 102",
        ];
        let plan = plan(&snapshot, &slots);
        assert_eq!(shown(&plan), expected);
        assert!(plan.rules.iter().all(|rule| rule.ours) && plan.routes.iter().all(|route| route.ours));
    }

    #[test]
    fn what_the_kernel_lacks_of_a_plan_is_counted() {
        let (mut snapshot, slots) = network(vec![
            link(2, &["10.0.0.2/24", "2001:db8::2/64"], &["10.0.0.1", "10.0.0.254", "fe80::1"]),
            link(5, &["10.0.1.2/24"], &["10.0.1.1"]),
        ]);
        let mut plan = plan(&snapshot, &slots);
        // The kernel holds one of these.
        plan.routes.push(RouteFacts { source: None, ..plan.routes[0].clone() });
        let all = plan.rules.len() + plan.kept_routes().len();
        assert_eq!((plan.missing(&snapshot), plan.kept_routes().len()), (all, plan.routes.len() - 1));
        snapshot.rules.extend(plan.rules.iter().cloned());
        snapshot.routes.extend(plan.kept_routes().into_iter().map(|route| RouteFacts { conditional: true, ..route }));
        assert_eq!(plan.missing(&snapshot), 0);
        snapshot.routes.last_mut().unwrap().ours = false;
        snapshot.rules.pop();
        assert_eq!(plan.missing(&snapshot), 2);
        assert_eq!(TablePlan::default().missing(&snapshot), 0);
    }

    #[test]
    fn a_foreign_rule_among_ours_is_evaluated_before_the_main_table() {
        let (mut snapshot, slots) = network(vec![link(2, &["10.0.0.2/24"], &["10.0.0.1"])]);
        let by_device = |snapshot: &NetworkSnapshot| shown(&plan(snapshot, &slots)).contains(&"32764 oif link2 lookup 254".to_owned());
        for (priority, ours, family, wanted) in [
            (32_763, false, Family::V4, true),
            (32_764, false, Family::V4, false),
            (32_765, false, Family::V4, false),
            (32_766, false, Family::V4, true),
            (32_765, true, Family::V4, true),
            (32_765, false, Family::V6, true),
        ] {
            snapshot.rules = vec![RuleFacts { ours, ..rule(family, priority, 51_820) }];
            assert_eq!(by_device(&snapshot), wanted, "{priority} {ours} {family}");
        }
    }

    #[test]
    fn links_on_one_subnet_reach_its_neighbours_from_their_own_addresses() {
        let (snapshot, slots) =
            network(vec![link(2, &["192.168.43.2/24"], &["192.168.43.1"]), link(3, &["192.168.43.9/24"], &["192.168.43.1"])]);
        let plan = shown(&plan(&snapshot, &slots));
        assert!(plan.contains(&"32763 from 192.168.43.2/32 to 192.168.43.0/24 lookup 47000".to_owned()), "{plan:?}");
        assert!(plan.contains(&"32763 from 192.168.43.9/32 to 192.168.43.0/24 lookup 47001".to_owned()), "{plan:?}");
    }

    #[test]
    fn an_unusable_link_gets_no_rules_or_routes() {
        let mut dark = link(2, &["10.0.0.2/24"], &["10.0.0.1"]);
        dark.carrier = false;
        let (snapshot, slots) = network(vec![dark, link(3, &["10.0.1.2/24"], &[]), link(4, &[], &["10.0.2.1"])]);
        assert_eq!(plan(&snapshot, &slots), TablePlan::default());
        assert_eq!(plan(&snapshot, &BTreeMap::from([(LinkIndex(99), 0)])), TablePlan::default());
    }

    #[test]
    fn a_link_without_subnet_or_gateway_has_a_default_route_only() {
        let mut modem = link(2, &["10.64.1.7/32"], &[]);
        modem.gateways.v4.push(DefaultRoute { gateway: None, metric: 700 });
        let (snapshot, slots) = network(vec![modem]);
        assert_eq!(shown(&plan(&snapshot, &slots))[6..], ["47000: 0.0.0.0/0 dev #2 src 10.64.1.7 metric 700"]);
    }

    #[test]
    fn an_address_without_a_prefix_route_has_no_on_link_subnet() {
        let (mut snapshot, slots) = network(vec![link(2, &["2001:db8::2/64"], &["fe80::1"])]);
        snapshot.routes.clear();
        assert_eq!(shown(&plan(&snapshot, &slots))[4..], ["47000: ::/0 via fe80::1 dev #2 src 2001:db8::2 metric 102"]);
    }

    #[test]
    fn several_gateways_are_kept_and_one_metric_is_used_once() {
        let mut lan = link(2, &["10.0.0.2/24"], &["10.0.0.1", "10.0.0.254"]);
        lan.gateways.v4.push(DefaultRoute { gateway: Some("10.0.0.253".parse().unwrap()), metric: 900 });
        let (snapshot, slots) = network(vec![lan]);
        let gateways: Vec<_> = plan(&snapshot, &slots).routes.iter().filter_map(|route| route.hops[0].gateway).collect();
        assert_eq!(gateways, ["10.0.0.1".parse::<IpAddr>().unwrap(), "10.0.0.253".parse().unwrap()]);
    }

    #[test]
    fn the_second_of_two_links_with_one_address_is_refused() {
        let (snapshot, slots) = network(vec![
            link(2, &["192.168.42.129/24"], &["192.168.42.1"]),
            link(3, &["192.168.42.129/24"], &["192.168.42.1"]),
            link(4, &["10.0.0.2/24"], &["10.0.0.1"]),
        ]);
        let refused = conflicts(&snapshot, slots.keys().copied());
        assert_eq!(refused.keys().collect::<Vec<_>>(), [&LinkIndex(3)]);
        assert!(refused[&LinkIndex(3)].starts_with("link2 and link3 both have the address 192.168.42.129"), "{refused:?}");
        let plan = plan(&snapshot, &slots);
        assert!(
            plan.routes.iter().all(|route| route.table != table(1))
                && plan.rules.iter().all(|rule| rule.mark != Some((mark(1), LINK_MASK)))
        );
    }

    #[test]
    fn a_link_in_a_subnet_of_the_lan_is_refused() {
        let (snapshot, slots) = network(vec![
            link(2, &["192.168.1.2/24", "2001:db8:1::2/64"], &["192.168.1.1"]),
            link(3, &["10.0.0.2/24", "2001:db8:2::2/64"], &["10.0.0.1"]),
            link(4, &["10.0.0.0/8"], &[]),
            link(5, &["192.168.0.1/16"], &[]),
        ]);
        let links = || slots.keys().copied().filter(|index| *index < LinkIndex(4));
        let refused = |lan: &[&str]| lan_conflicts(&snapshot, links(), &lan.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert!(refused(&[]).is_empty() && refused(&["link9"]).is_empty());
        let one = refused(&["link5"]);
        assert_eq!(one.keys().collect::<Vec<_>>(), [&LinkIndex(2)]);
        let reason = "link2 is in the network 192.168.1.0/24, which overlaps 192.168.0.0/16 of the LAN device link5";
        assert!(one[&LinkIndex(2)].starts_with(reason), "{one:?}");
        assert_eq!(refused(&["link4", "link5"]).len(), 2);
    }

    #[test]
    fn foreign_marks_are_not_ours() {
        assert!((0..32).all(|slot| is_ours(mark(slot))));
        assert!(![0, 1, 0xca6c, MARK_BASE, 0xB1D1_0001, u32::MAX].into_iter().any(is_ours));
    }
}
