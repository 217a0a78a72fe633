//! Which destinations may be steered: those that the kernel itself would send over a link's default route.
//!
//! Braid leaves all other destinations alone (VPNs, IPsec policies, containers, static routes, neighbours, the machine itself), and so it does where
//! the outcome cannot be predicted. The result is a prefix map, looked up by longest prefix match at every connect.
//!
//! The kernel code that this module models: `fib_rules_lookup` (net/core/fib_rules.c), `fib_table_lookup` (net/ipv4/fib_trie.c) and
//! `fib6_table_lookup` (net/ipv6/route.c).

mod prefixes;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::{Family, LinkIndex, NetworkSnapshot, RouteFacts, RouteKind, RuleAction, RuleFacts};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub use prefixes::Prefixes;

/// Computes for every destination of `family` whether it may be steered over `links`, for the socket call of a program that set neither a source
/// address, a device nor a mark.
///
/// The value is `true` (steer) where the kernel, by all rules and tables except Braid's own, would use a default route (`0.0.0.0/0`, `::/0` or
/// `2000::/3`) whose usable next hops are all in `links`. If a selector cannot be evaluated in advance, this must hold whether or not it matches. The
/// value is `false` where an IPsec policy covers the destination, and where the default route sets a source address that its device does not have.
/// Both are how VPNs without a device of their own work; a socket bound to a link would bypass them and send in clear text.
///
/// The entries are in ascending order, the first is `/0`, and none repeats the value of its nearest covering entry. Complexity: O(n log n) for n
/// routes, times the number of rules.
pub fn prefix_map(snapshot: &NetworkSnapshot, links: &BTreeSet<LinkIndex>, family: Family) -> Vec<(IpNet, bool)> {
    let links = &own_addressed(snapshot, links);
    let chain = Chain::new(snapshot, family);
    let mut cells = Cells::new(snapshot, &chain, family);
    let mut walk: Vec<Cell> = Vec::new();
    let mut covering: BTreeMap<u32, Vec<(IpNet, &[&RouteFacts])>> = BTreeMap::new();
    let mut map = Vec::new();
    for net in std::mem::take(&mut cells.nets) {
        while walk.last().is_some_and(|cell| !cell.net.contains(&net)) {
            walk.pop();
        }
        for stack in covering.values_mut() {
            while stack.last().is_some_and(|(above, _)| !above.contains(&net)) {
                stack.pop();
            }
        }
        for (table, routes) in &cells.routes {
            if let Some(routes) = routes.get(&net) {
                covering.entry(*table).or_default().push((net, routes));
            }
        }
        let above = walk.last();
        let never = above.is_some_and(|cell| cell.never) || cells.never.contains(&net);
        let steer = !never && chain.leads_to_default(net, &covering, links);
        if above.is_none_or(|cell| cell.steer != steer) {
            map.push((net, steer));
        }
        walk.push(Cell { net, steer, never });
    }
    map
}

/// Whether a route to `destination` counts as a default route: `/0`, and for IPv6 also all global unicast addresses.
pub fn is_default(destination: IpNet) -> bool {
    destination.prefix_len() == 0 || destination == IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3))
}

/// The links whose default routes set no source address, or one of the link's own.
fn own_addressed(snapshot: &NetworkSnapshot, links: &BTreeSet<LinkIndex>) -> BTreeSet<LinkIndex> {
    let has = |device: LinkIndex, address: IpAddr| {
        snapshot.interface(device).is_some_and(|facts| facts.addresses.iter().any(|net| net.addr() == address))
    };
    let defaults = snapshot.routes.iter().filter(|route| !route.ours && is_default(route.destination));
    let sources = defaults.filter_map(|route| Some((route, route.source?)));
    let foreign: BTreeSet<LinkIndex> =
        sources.flat_map(|(route, source)| route.hops.iter().map(|hop| hop.device).filter(move |device| !has(*device, source))).collect();
    links.difference(&foreign).copied().collect()
}

/// A prefix without the longer prefixes of the partition.
struct Cell {
    net: IpNet,
    steer: bool,
    /// The prefix lies in a range that is never steered.
    never: bool,
}

/// Partition of the address space: within one cell every rule and table gives the same result.
struct Cells<'a> {
    /// All prefixes of the partition in ascending order: covering prefixes precede the covered ones.
    nets: BTreeSet<IpNet>,
    /// The roots of the ranges that are never steered.
    never: BTreeSet<IpNet>,
    /// Routes by table and prefix, sorted by metric.
    routes: BTreeMap<u32, BTreeMap<IpNet, Vec<&'a RouteFacts>>>,
}

impl<'a> Cells<'a> {
    fn new(snapshot: &'a NetworkSnapshot, chain: &Chain<'a>, family: Family) -> Self {
        let mut never: BTreeSet<IpNet> = never_steered(family).into_iter().collect();
        let addresses = snapshot.interfaces.iter().flat_map(|facts| &facts.addresses).map(|net| IpNet::from(net.addr()));
        never.extend(addresses.filter(|net| of_family(*net, family)));
        never.extend(snapshot.protected.iter().map(IpNet::trunc).filter(|net| of_family(*net, family)));

        let mut nets = never.clone();
        nets.insert(everything(family));
        nets.extend(chain.rules.iter().filter_map(|rule| rule.destination).map(|net| net.trunc()));

        let tables: BTreeSet<u32> = chain.rules.iter().filter_map(|rule| table_of(rule)).collect();
        let mut routes: BTreeMap<u32, BTreeMap<IpNet, Vec<&RouteFacts>>> = BTreeMap::new();
        for route in snapshot.routes.iter().filter(|route| !route.ours && route.family() == family && tables.contains(&route.table)) {
            let net = route.destination.trunc();
            nets.insert(net);
            routes.entry(route.table).or_default().entry(net).or_default().push(route);
        }
        for route in routes.values_mut().flat_map(BTreeMap::values_mut) {
            route.sort_by_key(|route| route.metric);
        }
        Self { nets, never, routes }
    }
}

/// Ranges that no default route should carry, and ranges that are out of Braid's scope.
fn never_steered(family: Family) -> Vec<IpNet> {
    match family {
        Family::V4 => [([0, 0, 0, 0], 8), ([127, 0, 0, 0], 8), ([169, 254, 0, 0], 16), ([224, 0, 0, 0], 4), ([240, 0, 0, 0], 4)]
            .map(|(octets, len)| IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::from(octets), len)))
            .to_vec(),
        Family::V6 => [
            (Ipv6Addr::UNSPECIFIED, 128),
            (Ipv6Addr::LOCALHOST, 128),
            (Ipv4Addr::UNSPECIFIED.to_ipv6_mapped(), 96),
            (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10),
            (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8),
        ]
        .map(|(address, len)| IpNet::V6(Ipv6Net::new_assert(address, len)))
        .to_vec(),
    }
}

fn everything(family: Family) -> IpNet {
    match family {
        Family::V4 => IpNet::V4(Ipv4Net::default()),
        Family::V6 => IpNet::V6(Ipv6Net::default()),
    }
}

fn of_family(net: IpNet, family: Family) -> bool {
    matches!((net, family), (IpNet::V4(_), Family::V4) | (IpNet::V6(_), Family::V6))
}

fn table_of(rule: &RuleFacts) -> Option<u32> {
    match rule.action {
        RuleAction::Table(table) => Some(table),
        _ => None,
    }
}

/// Whether a rule's selectors match.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    Yes,
    No,
    Maybe,
}

/// The possible outcomes of a lookup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct LookupEnds {
    /// The lookup may end in something other than a link's default route.
    elsewhere: bool,
    /// The lookup may continue with the next rule.
    falls_through: bool,
}

/// The rules of one family in the kernel's order, without Braid's own.
struct Chain<'a> {
    rules: Vec<&'a RuleFacts>,
}

impl<'a> Chain<'a> {
    fn new(snapshot: &'a NetworkSnapshot, family: Family) -> Self {
        Self { rules: snapshot.rules.iter().filter(|rule| rule.family == family && !rule.ours).collect() }
    }

    /// Whether every path through the rules ends in a default route of `links`, for the addresses of the cell `net`.
    fn leads_to_default(&self, net: IpNet, covering: &BTreeMap<u32, Vec<(IpNet, &[&RouteFacts])>>, links: &BTreeSet<LinkIndex>) -> bool {
        let mut starts = BTreeSet::from([0]);
        while let Some(start) = starts.pop_first() {
            let mut position = start;
            loop {
                // After the last rule the kernel has no route.
                let Some(rule) = self.rules.get(position) else { return false };
                let matches = matches(rule, net);
                position += 1;
                if matches == Match::No {
                    continue;
                }
                let ends = match rule.action {
                    RuleAction::Nop => continue,
                    RuleAction::Refuse | RuleAction::Other => return false,
                    RuleAction::Goto(priority) => {
                        // The kernel ignores a goto without a target, and it only jumps forward.
                        let Some(target) = self.rules.iter().position(|rule| rule.priority == priority) else { continue };
                        if target < position {
                            return false;
                        }
                        if matches == Match::Yes {
                            position = target;
                        } else {
                            starts.insert(target);
                        }
                        continue;
                    }
                    RuleAction::Table(table) => look_up(rule, covering.get(&table).map_or(&[], Vec::as_slice), links),
                };
                if ends.elsewhere {
                    return false;
                }
                if !ends.falls_through && matches == Match::Yes {
                    break;
                }
            }
        }
        true
    }
}

/// Whether `rule` matches packets to the addresses of the cell `net`, sent by a socket without device, mark and source address.
fn matches(rule: &RuleFacts, net: IpNet) -> Match {
    let source = rule.source.is_none_or(|source| source.prefix_len() == 0 || source.contains(&IpAddr::V4(Ipv4Addr::UNSPECIFIED)));
    let known = source
        && rule.destination.is_none_or(|destination| destination.contains(&net))
        && rule.mark.is_none_or(|(value, mask)| value & mask == 0)
        && rule.input.as_deref().is_none_or(|device| device == "lo")
        && rule.output.is_none();
    match (known, rule.conditional, rule.invert) {
        (true, true, _) => Match::Maybe,
        (matching, _, invert) if matching != invert => Match::Yes,
        _ => Match::No,
    }
}

/// Looks up a cell in a table. `stack` holds the table's routes that cover the cell, the longest prefix last.
fn look_up(rule: &RuleFacts, stack: &[(IpNet, &[&RouteFacts])], links: &BTreeSet<LinkIndex>) -> LookupEnds {
    let mut ends = LookupEnds::default();
    for (net, routes) in stack.iter().rev() {
        for alike in routes.chunk_by(|one, other| one.metric == other.metric) {
            let mut certain = false;
            // The kernel chooses among several routes of one metric. For IPv6 it alternates.
            for route in alike.iter().filter(|route| !is_dead(route)) {
                let end = route_ends(rule, *net, route, links);
                ends.elsewhere |= end.elsewhere;
                ends.falls_through |= end.falls_through;
                certain |= !route.conditional;
            }
            if certain {
                return ends;
            }
        }
    }
    ends.falls_through = true;
    ends
}

/// Whether the kernel ignores the route because all its next hops are dead.
fn is_dead(route: &RouteFacts) -> bool {
    !route.hops.is_empty() && route.hops.iter().all(|hop| hop.dead)
}

/// The outcome when `rule` finds `route`.
fn route_ends(rule: &RuleFacts, net: IpNet, route: &RouteFacts, links: &BTreeSet<LinkIndex>) -> LookupEnds {
    match route.kind {
        RouteKind::Throw => return LookupEnds { elsewhere: false, falls_through: true },
        // A refusing route returns an error, and rules do not suppress errors.
        RouteKind::Refuse => return LookupEnds { elsewhere: true, falls_through: false },
        RouteKind::Unicast | RouteKind::Local | RouteKind::Broadcast => {}
    }
    if rule.suppress_prefix_len.is_some_and(|len| net.prefix_len() <= len) {
        return LookupEnds { elsewhere: false, falls_through: true };
    }
    let mut hops = route.hops.iter().filter(|hop| !hop.dead).peekable();
    let link = route.kind == RouteKind::Unicast && is_default(net) && hops.peek().is_some() && hops.all(|hop| links.contains(&hop.device));
    LookupEnds { elsewhere: !link, falls_through: rule.suppress_group }
}

#[cfg(test)]
mod tests;
