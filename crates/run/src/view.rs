//! The links that a program without privilege may use. All such programs share this view.

use braid_model::{Family, LinkFacts, LinkKind, NetworkSnapshot, PerFamily};

/// The links of a network.
pub(super) struct View<'a> {
    /// All links, wanted or not.
    pub(super) all: Vec<&'a LinkFacts>,
    /// The wanted links.
    pub(super) links: Vec<Usable<'a>>,
    /// Names of the links unusable for IPv4 because the system drops answers that do not arrive by the best route.
    pub(super) refused: Vec<String>,
}

/// A wanted link.
pub(super) struct Usable<'a> {
    /// The system's facts about the link.
    pub(super) facts: &'a LinkFacts,
    /// Metric of its best default route, in each family that sockets bound to it can use.
    pub(super) ranks: PerFamily<Option<u32>>,
}

impl<'a> View<'a> {
    /// An empty `wanted` means every link. `filtered` returns whether an interface drops IPv4 answers that do not arrive by the best route
    /// (strict `rp_filter`).
    pub(super) fn of(network: &'a NetworkSnapshot, wanted: &[String], filtered: impl Fn(&str) -> bool) -> Self {
        let all = among(network, wanted);
        let best = all.iter().filter_map(|facts| rank(facts, Family::V4)).min();
        let (mut links, mut refused) = (Vec::new(), Vec::new());
        for facts in all.iter().copied().filter(|facts| wanted.is_empty() || wanted.contains(&facts.name)) {
            let mut ranks = PerFamily { v4: rank(facts, Family::V4), v6: rank(facts, Family::V6) };
            if ranks.v4.is_some() && ranks.v4 != best && filtered(&facts.name) && !has_source_rule(network, facts) {
                ranks.v4 = None;
                refused.push(facts.name.clone());
            }
            links.push(Usable { facts, ranks });
        }
        Self { all, links, refused }
    }
}

/// The links among a network's interfaces: real devices, virtual devices named in `wanted`, and, in a container without real devices,
/// every virtual device with a route to the Internet.
fn among<'a>(network: &'a NetworkSnapshot, wanted: &[String]) -> Vec<&'a LinkFacts> {
    let real = |facts: &LinkFacts| matches!(facts.kind, LinkKind::Wired | LinkKind::Wireless | LinkKind::Cellular);
    let usable = |facts: &LinkFacts| Family::ALL.iter().any(|family| facts.usable(*family));
    let container = !network.interfaces.iter().any(|facts| real(facts) && usable(facts));
    let is_link =
        |facts: &&LinkFacts| real(facts) || wanted.contains(&facts.name) || (container && facts.kind == LinkKind::Virtual && usable(facts));
    network.interfaces.iter().filter(is_link).collect()
}

/// Metric of the link's best default route, if it can carry flows of `family`.
fn rank(facts: &LinkFacts, family: Family) -> Option<u32> {
    facts.gateways.get(family).iter().map(|route| route.metric).min().filter(|_| facts.usable(family))
}

/// Whether a routing rule handles packets from the link's own address separately, so that its answers pass the strictest reverse-path filter.
fn has_source_rule(network: &NetworkSnapshot, facts: &LinkFacts) -> bool {
    let source = facts.source(Family::V4);
    network.rules.iter().any(|rule| rule.source.is_some_and(|net| net.prefix_len() == 32 && Some(net.addr()) == source))
}
