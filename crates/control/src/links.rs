//! The link table: which links there are, the slot of each, whether it lives, and what it can carry. The daemon and `braid run` each keep one of
//! this type.

mod link;
mod slots;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_decide::health::Outcome;
use braid_decide::policy::ProbeTarget;
use braid_decide::steer::Prefixes;
use braid_model::{Family, LinkFacts, LinkIndex, LinkSet, PerFamily, Role, Time};

pub use link::Link;
use slots::Slots;

/// Why a link has no slot.
pub const NO_SLOT: &str = "there are more links than the 32 that Braid can use at once: exclude one of them to use this one";

/// A probe to be sent out of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbePlan {
    /// The link.
    pub link: LinkIndex,
    /// Its device's name.
    pub device: String,
    /// The family to judge.
    pub family: Family,
    /// Gateways to ask; empty if there are targets.
    pub gateways: Vec<IpAddr>,
    /// Destinations to ask: configured ones, and those that answered lately.
    pub targets: Vec<ProbeTarget>,
    /// How long to wait.
    pub timeout: Duration,
}

/// A link as bonds see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BondLink {
    /// Its slot, which is also its number in bonds.
    pub slot: usize,
    /// Its device.
    pub device: String,
    /// Its address, where IPv4 may be used on it; set for dead links too: a bond checks its paths by itself, and often sees first that one is back.
    pub v4: Option<IpAddr>,
    /// The same for IPv6.
    pub v6: Option<IpAddr>,
    /// Families in which nothing answers.
    pub dead: PerFamily<bool>,
    /// Used only while no normal link is usable.
    pub backup: bool,
    /// Its bytes are counted.
    pub metered: bool,
}

/// The links, by device, and the destinations that they may be given.
#[derive(Debug, Default)]
pub struct LinkTable {
    links: BTreeMap<LinkIndex, Link>,
    slots: Slots,
    overflow: Vec<LinkFacts>,
    steerable: PerFamily<Prefixes>,
    resolvers: BTreeMap<IpAddr, LinkSet>,
}

impl LinkTable {
    /// Takes in the devices that are links now. `refused` says why one cannot be used at all, and `new` builds the link of a new device.
    /// Returns the slots whose link is new, or leads to another network than before.
    pub fn on_devices<'a>(
        &mut self,
        now: Time,
        devices: impl IntoIterator<Item = &'a LinkFacts>,
        refused: impl Fn(&LinkFacts) -> Option<String>,
        mut new: impl FnMut(&LinkFacts, usize) -> Link,
    ) -> Vec<usize> {
        let devices: BTreeMap<LinkIndex, &LinkFacts> = devices.into_iter().map(|facts| (facts.index, facts)).collect();
        let indices: BTreeSet<LinkIndex> = devices.keys().copied().collect();
        let without: BTreeSet<LinkIndex> = self.slots.update(&indices).into_iter().collect();
        self.links.retain(|index, _| indices.contains(index));
        let mut elsewhere = Vec::new();
        for (index, facts) in &devices {
            let Some(slot) = self.slots.get(*index) else { continue };
            if self.links.get(index).is_none_or(|link| !is_same_network(&link.facts, facts)) {
                elsewhere.push(slot);
            }
            let link = self.links.entry(*index).or_insert_with(|| new(facts, slot));
            link.facts.clone_from(facts);
            link.refused = refused(facts);
            for family in Family::ALL {
                let usable = link.configured(family);
                link.health.get_mut(family).on_usable(now, usable);
            }
            link.count_falls();
        }
        let overflow: Vec<_> = devices.into_values().filter(|facts| without.contains(&facts.index)).cloned().collect();
        if self.overflow != overflow {
            overflow.iter().for_each(|facts| tracing::warn!(link = facts.name, "{NO_SLOT}"));
            self.overflow = overflow;
        }
        self.resolvers.clear();
        for link in self.links.values() {
            for resolver in &link.facts.resolvers {
                self.resolvers.entry(*resolver).or_default().insert(link.slot);
            }
        }
        elsewhere
    }

    /// Takes in which destinations of `family` may be steered; `false` if nothing changed.
    pub fn set_steerable(&mut self, family: Family, prefixes: Prefixes) -> bool {
        let before = std::mem::replace(self.steerable.get_mut(family), prefixes);
        before != *self.steerable.get(family)
    }

    /// Whether the system would send `to` through a link's default route.
    pub fn may_steer(&self, to: IpAddr) -> bool {
        self.steerable.get(Family::of(to)).contains(to)
    }

    /// What the system would send through links' default routes.
    pub fn steerable(&self) -> &PerFamily<Prefixes> {
        &self.steerable
    }

    /// The name servers of links: each is asked through its own.
    pub fn resolvers(&self) -> &BTreeMap<IpAddr, LinkSet> {
        &self.resolvers
    }

    /// Links that there is no slot for.
    pub fn overflow(&self) -> &[LinkFacts] {
        &self.overflow
    }

    /// Every link by device.
    pub fn iter(&self) -> impl Iterator<Item = (LinkIndex, &Link)> {
        self.links.iter().map(|(index, link)| (*index, link))
    }

    /// Every link.
    pub fn values(&self) -> impl Iterator<Item = &Link> {
        self.links.values()
    }

    /// Every link, to be changed.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.links.values_mut()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// The link of a device.
    pub fn get(&self, index: LinkIndex) -> Option<&Link> {
        self.links.get(&index)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, index: LinkIndex) -> Option<&mut Link> {
        self.links.get_mut(&index)
    }

    /// The link in a slot.
    pub fn in_slot(&self, slot: usize) -> Option<&Link> {
        self.links.values().find(|link| link.slot == slot)
    }

    /// The same, to be changed.
    pub fn in_slot_mut(&mut self, slot: usize) -> Option<&mut Link> {
        self.links.values_mut().find(|link| link.slot == slot)
    }

    /// The facts of every link by slot, as link selectors take them.
    pub fn devices(&self) -> Vec<(usize, &LinkFacts)> {
        self.links.values().map(|link| (link.slot, &link.facts)).collect()
    }

    /// The slots that may be given flows of `family`. If every link that could be used is judged dead, all are treated as up.
    pub fn usable(&self, family: Family) -> LinkSet {
        let mut alive = LinkSet::default();
        for link in self.links.values().filter(|link| link.usable(family)) {
            alive.insert(link.slot);
        }
        if alive.is_empty() { self.configured(family) } else { alive }
    }

    /// The slots that could be given flows of `family`, dead or alive.
    pub fn configured(&self, family: Family) -> LinkSet {
        let mut mask = LinkSet::default();
        for link in self.links.values().filter(|link| link.configured(family) && !link.capped()) {
            mask.insert(link.slot);
        }
        mask
    }

    /// Lets time pass in the health of links, and returns the probes that are due. `configured` are the targets of links that have none of their
    /// own.
    pub fn poll_probes(&mut self, now: Time, configured: &[ProbeTarget]) -> Vec<ProbePlan> {
        let known = |family: Family| -> Vec<_> {
            let answered = self.links.values().filter_map(|link| *link.last_answer.get(family));
            // Not those that are routed through a tunnel by now.
            answered.filter(|(addr, _)| self.may_steer(*addr)).collect()
        };
        let known = PerFamily { v4: known(Family::V4), v6: known(Family::V6) };
        let mut probes = Vec::new();
        for link in self.links.values_mut() {
            for family in Family::ALL {
                let health = link.health.get_mut(family);
                health.handle_timeout(now);
                if let Some(request) = health.poll_probe(now) {
                    probes.push(link.probe_plan(family, request, configured, known.get(family)));
                }
            }
            link.count_falls();
        }
        probes
    }

    /// The outcome of a probe.
    pub fn on_probe(&mut self, now: Time, index: LinkIndex, family: Family, outcome: Outcome) {
        let Some(link) = self.links.get_mut(&index) else { return };
        let health = link.health.get_mut(family);
        let before = health.judgement();
        health.on_probe(now, outcome);
        tracing::debug!(link = link.facts.name, ?family, ?outcome, ?before, after = ?health.judgement(), "a probe has ended");
        if let Outcome::Alive { rtt } = outcome {
            link.rtt.on_sample(now, rtt);
        }
    }

    /// The links that bonds may use, by slot: neither excluded nor refused, dead ones included.
    pub fn bond_links(&self) -> Vec<BondLink> {
        let address = |link: &Link, family| link.facts.source(family).filter(|_| link.configured(family) && !link.capped());
        let dead = |link: &Link, family| !link.health.get(family).alive();
        let view = |link: &Link| BondLink {
            slot: link.slot,
            device: link.facts.name.clone(),
            v4: address(link, Family::V4),
            v6: address(link, Family::V6),
            dead: PerFamily { v4: dead(link, Family::V4), v6: dead(link, Family::V6) },
            backup: link.rule.role == Role::Backup,
            metered: link.rule.metered,
        };
        self.links.values().filter(|link| link.refused.is_none() && link.rule.role != Role::Excluded).map(view).collect()
    }
}

/// Whether a device leads to the network that it led to before, as far as addresses and gateways tell.
fn is_same_network(before: &LinkFacts, now: &LinkFacts) -> bool {
    let gateways =
        |facts: &LinkFacts| Family::ALL.map(|family| facts.gateways.get(family).iter().map(|route| route.gateway).collect::<Vec<_>>());
    before.addresses == now.addresses && gateways(before) == gateways(now)
}
