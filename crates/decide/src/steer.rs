//! Which destinations may be steered: those that the kernel itself would send by a link's default route.
//!
//! Everything else (VPNs, IPsec policies, containers, static routes, neighbours, the machine itself) is left alone, and so is whatever cannot be
//! told ahead. The answer is a prefix map, looked up by longest prefix at every connect.
//!
//! The kernel's side of it: `fib_rules_lookup` (net/core/fib_rules.c), `fib_table_lookup` (net/ipv4/fib_trie.c) and
//! `fib6_table_lookup` (net/ipv6/route.c).

mod prefixes;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::{Family, LinkIndex, NetworkSnapshot, RouteFacts, RouteKind, RuleAction, RuleFacts};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

pub use prefixes::Prefixes;

/// Says for every destination of `family` whether it may be steered over `links`, as the socket call of a program that bound and marked
/// nothing would see it.
///
/// `true` (steer) stands where the kernel, by all its rules and tables but Braid's own, would take a default route (`0.0.0.0/0`, `::/0` or
/// `2000::/3`) whose every usable hop is in `links`; where a selector cannot be told ahead, it must do so either way. Not where an IPsec policy
/// covers it, nor by a default route that gives packets an address which its device does not have: both are how VPNs without a device of
/// their own work, and a socket bound to a link would leave them in clear.
/// The entries are in rising order, the first is `/0`, and none repeats the answer of its nearest covering entry.
/// Takes O(n log n) for n routes, times the number of rules.
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

/// Whether a route to `destination` counts as a default route: `/0`, and in IPv6 also all global addresses.
pub fn is_default(destination: IpNet) -> bool {
    destination.prefix_len() == 0 || destination == IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3))
}

/// Those of the links whose default routes name no source address, or one of the link's own.
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

/// A prefix less the prefixes of the partition below it.
struct Cell {
    net: IpNet,
    steer: bool,
    /// It lies in a range that is never steered.
    never: bool,
}

/// The partition of the addresses: within one cell every rule and table gives the same answer.
struct Cells<'a> {
    /// Every prefix that occurs, in rising order: covering ones before the covered.
    nets: BTreeSet<IpNet>,
    /// The roots of what is never steered.
    never: BTreeSet<IpNet>,
    /// Routes by table and prefix, best metric first.
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

/// Ranges that no default route should carry anywhere, and those that Braid has no business with.
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

/// Whether a selector matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    Yes,
    No,
    Maybe,
}

/// Everything that may come of a look-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ends {
    /// Something else than a default route of a link.
    elsewhere: bool,
    /// The next rule is tried.
    onward: bool,
}

/// One family's rules in the kernel's order, Braid's own left out.
struct Chain<'a> {
    rules: Vec<&'a RuleFacts>,
}

impl<'a> Chain<'a> {
    fn new(snapshot: &'a NetworkSnapshot, family: Family) -> Self {
        Self { rules: snapshot.rules.iter().filter(|rule| rule.family == family && !rule.ours).collect() }
    }

    /// Whether every way through the rules ends in a default route of `links`, for the addresses of the cell `net`.
    fn leads_to_default(&self, net: IpNet, covering: &BTreeMap<u32, Vec<(IpNet, &[&RouteFacts])>>, links: &BTreeSet<LinkIndex>) -> bool {
        let mut starts = BTreeSet::from([0]);
        while let Some(start) = starts.pop_first() {
            let mut position = start;
            loop {
                // Behind the last rule the kernel has no route.
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
                        // A goto without target is no rule at all; the kernel only goes forward.
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
                if !ends.onward && matches == Match::Yes {
                    break;
                }
            }
        }
        true
    }
}

/// Whether `rule` is for packets of a socket without device, mark and source address to the addresses of the cell `net`.
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

/// Looks up a cell in a table whose routes that cover it are `stack`, the longest prefix last.
fn look_up(rule: &RuleFacts, stack: &[(IpNet, &[&RouteFacts])], links: &BTreeSet<LinkIndex>) -> Ends {
    let mut ends = Ends::default();
    for (net, routes) in stack.iter().rev() {
        for alike in routes.chunk_by(|one, other| one.metric == other.metric) {
            let mut certain = false;
            // Which of several routes of one metric is taken is the kernel's to say: IPv6 takes turns.
            for route in alike.iter().filter(|route| !is_dead(route)) {
                let end = result(rule, *net, route, links);
                ends.elsewhere |= end.elsewhere;
                ends.onward |= end.onward;
                certain |= !route.conditional;
            }
            if certain {
                return ends;
            }
        }
    }
    ends.onward = true;
    ends
}

/// Whether the kernel passes over the route as if it were not there.
fn is_dead(route: &RouteFacts) -> bool {
    !route.hops.is_empty() && route.hops.iter().all(|hop| hop.dead)
}

/// What comes of finding `route` by `rule`.
fn result(rule: &RuleFacts, net: IpNet, route: &RouteFacts, links: &BTreeSet<LinkIndex>) -> Ends {
    match route.kind {
        RouteKind::Throw => return Ends { elsewhere: false, onward: true },
        // A refusal is an error, and errors are not suppressed.
        RouteKind::Refuse => return Ends { elsewhere: true, onward: false },
        RouteKind::Unicast | RouteKind::Local | RouteKind::Broadcast => {}
    }
    if rule.suppress_prefix_len.is_some_and(|len| net.prefix_len() <= len) {
        return Ends { elsewhere: false, onward: true };
    }
    let mut hops = route.hops.iter().filter(|hop| !hop.dead).peekable();
    let link = route.kind == RouteKind::Unicast && is_default(net) && hops.peek().is_some() && hops.all(|hop| links.contains(&hop.device));
    Ends { elsewhere: !link, onward: rule.suppress_group }
}

#[cfg(test)]
mod tests;
