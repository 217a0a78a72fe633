//! The links of a network as a program without privilege may use them: the one view that all of those have.

use braid_model::{Family, LinkFacts, LinkKind, NetworkSnapshot, PerFamily};

/// The links of a network.
pub(super) struct View<'a> {
    /// All of them, wanted or not.
    pub(super) all: Vec<&'a LinkFacts>,
    /// Those that are wanted.
    pub(super) links: Vec<Usable<'a>>,
    /// Names of those that cannot be used for IPv4, since the system drops answers that do not come in by the best route.
    pub(super) refused: Vec<String>,
}

/// A link that is wanted.
pub(super) struct Usable<'a> {
    /// What the system tells of it.
    pub(super) facts: &'a LinkFacts,
    /// The metric of its best default route, in each family that sockets bound to it can be used for.
    pub(super) ranks: PerFamily<Option<u32>>,
}

impl<'a> View<'a> {
    /// `wanted` empty stands for every link; `filtered` tells whether a device drops IPv4 answers that do not come in by the best route
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

/// The links among a network's interfaces: real devices, the virtual ones that were asked for, and in a container, which has no real
/// ones, every virtual device with a way to the Internet.
fn among<'a>(network: &'a NetworkSnapshot, wanted: &[String]) -> Vec<&'a LinkFacts> {
    let real = |facts: &LinkFacts| matches!(facts.kind, LinkKind::Wired | LinkKind::Wireless | LinkKind::Cellular);
    let usable = |facts: &LinkFacts| Family::ALL.iter().any(|family| facts.usable(*family));
    let container = !network.interfaces.iter().any(|facts| real(facts) && usable(facts));
    let is_link =
        |facts: &&LinkFacts| real(facts) || wanted.contains(&facts.name) || (container && facts.kind == LinkKind::Virtual && usable(facts));
    network.interfaces.iter().filter(is_link).collect()
}

/// The metric of a link's best default route, if it can carry flows of `family` at all.
fn rank(facts: &LinkFacts, family: Family) -> Option<u32> {
    facts.gateways.get(family).iter().map(|route| route.metric).min().filter(|_| facts.usable(family))
}

/// Whether a rule looks packets from the link's own address up apart, so that its answers pass the strictest reverse-path filter.
fn has_source_rule(network: &NetworkSnapshot, facts: &LinkFacts) -> bool {
    let source = facts.source(Family::V4);
    network.rules.iter().any(|rule| rule.source.is_some_and(|net| net.prefix_len() == 32 && Some(net.addr()) == source))
}
