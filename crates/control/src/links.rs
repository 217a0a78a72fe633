//! The link table: the links with their slots, health and capacities. The daemon and `braid run` each have one.

mod link;
mod measurements;
mod slots;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_decide::health::Outcome;
use braid_decide::policy::ProbeTarget;
use braid_decide::steer::Prefixes;
use braid_model::{Family, LinkFacts, LinkIndex, LinkSet, PerFamily, Role, Time};

pub use link::{ChosenProfile, Link};
pub use measurements::{Measured, Measurements};
use slots::Slots;

/// Reason for a link without a slot.
pub const NO_SLOT: &str = "Braid can use at most 32 links at once: exclude another link to use this one";

/// A probe to be sent over a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbePlan {
    /// Index of the interface.
    pub link: LinkIndex,
    /// Name of the interface.
    pub device: String,
    /// Address family to judge.
    pub family: Family,
    /// Gateways to probe; empty if there are targets.
    pub gateways: Vec<IpAddr>,
    /// Destinations to probe: configured ones, and those that answered recently.
    pub targets: Vec<ProbeTarget>,
    /// Time to wait for an answer.
    pub timeout: Duration,
}

/// A link, as bonds use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BondLink {
    /// Its slot, which is also its link number in bonds.
    pub slot: usize,
    /// Name of its interface.
    pub device: String,
    /// Its IPv4 address, if IPv4 may be used. Set for dead links too: a bond checks its own paths, and often detects a recovery first.
    pub v4: Option<IpAddr>,
    /// Its IPv6 address, likewise.
    pub v6: Option<IpAddr>,
    /// Whether each family is dead.
    pub dead: PerFamily<bool>,
    /// Whether it is used only while no normal link is usable.
    pub backup: bool,
    /// Whether it is metered.
    pub metered: bool,
    /// Whether its allowance is used up. Then it has no address.
    pub capped: bool,
}

/// The links by interface, and the prefixes that may be steered.
#[derive(Debug, Default)]
pub struct LinkTable {
    links: BTreeMap<LinkIndex, Link>,
    slots: Slots,
    overflow: Vec<LinkFacts>,
    steerable: PerFamily<Prefixes>,
    resolvers: BTreeMap<IpAddr, LinkSet>,
}

impl LinkTable {
    /// Updates the links from the current devices. `refused` returns why a device cannot be used; `new` creates the link of a new device.
    /// Returns the slots whose link is new or leads to another network than before.
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

    /// Sets the prefixes of `family` that may be steered; `false` if nothing changed.
    pub fn set_steerable(&mut self, family: Family, prefixes: Prefixes) -> bool {
        let before = std::mem::replace(self.steerable.get_mut(family), prefixes);
        before != *self.steerable.get(family)
    }

    /// Whether the system routes `to` through a link's default route.
    pub fn may_steer(&self, to: IpAddr) -> bool {
        self.steerable.get(Family::of(to)).contains(to)
    }

    /// Prefixes that the system routes through links' default routes.
    pub fn steerable(&self) -> &PerFamily<Prefixes> {
        &self.steerable
    }

    /// DNS resolvers of links. Each is reached through its own link.
    pub fn resolvers(&self) -> &BTreeMap<IpAddr, LinkSet> {
        &self.resolvers
    }

    /// Links without a slot.
    pub fn overflow(&self) -> &[LinkFacts] {
        &self.overflow
    }

    /// All links with their interfaces.
    pub fn iter(&self) -> impl Iterator<Item = (LinkIndex, &Link)> {
        self.links.iter().map(|(index, link)| (*index, link))
    }

    /// All links.
    pub fn values(&self) -> impl Iterator<Item = &Link> {
        self.links.values()
    }

    /// All links, mutably.
    pub fn values_mut(&mut self) -> impl Iterator<Item = &mut Link> {
        self.links.values_mut()
    }

    /// Whether there are no links.
    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// The link of an interface.
    pub fn get(&self, index: LinkIndex) -> Option<&Link> {
        self.links.get(&index)
    }

    /// The link of an interface, mutably.
    pub fn get_mut(&mut self, index: LinkIndex) -> Option<&mut Link> {
        self.links.get_mut(&index)
    }

    /// The link in a slot.
    pub fn in_slot(&self, slot: usize) -> Option<&Link> {
        self.links.values().find(|link| link.slot == slot)
    }

    /// The link in a slot, mutably.
    pub fn in_slot_mut(&mut self, slot: usize) -> Option<&mut Link> {
        self.links.values_mut().find(|link| link.slot == slot)
    }

    /// Slots and facts of all links, as link selectors need them.
    pub fn devices(&self) -> Vec<(usize, &LinkFacts)> {
        self.links.values().map(|link| (link.slot, &link.facts)).collect()
    }

    /// Slots that may get flows of `family`. If all configured links are dead, they are all treated as up.
    pub fn usable(&self, family: Family) -> LinkSet {
        let mut alive = LinkSet::default();
        for link in self.links.values().filter(|link| link.usable(family)) {
            alive.insert(link.slot);
        }
        if alive.is_empty() { self.configured(family) } else { alive }
    }

    /// Configured slots for flows of `family`, dead or alive.
    pub fn configured(&self, family: Family) -> LinkSet {
        let mut mask = LinkSet::default();
        for link in self.links.values().filter(|link| link.configured(family) && !link.capped()) {
            mask.insert(link.slot);
        }
        mask
    }

    /// Runs the timers of the links' health and returns the probes that are due. `configured` are the targets of links without their own. Unless `beyond`,
    /// only gateways are probed.
    pub fn poll_probes(&mut self, now: Time, configured: &[ProbeTarget], beyond: bool) -> Vec<ProbePlan> {
        let known = |family: Family| -> Vec<_> {
            let answered = self.links.values().filter_map(|link| *link.last_answer.get(family));
            // Without destinations that are routed through a tunnel by now.
            answered.filter(|(addr, _)| self.may_steer(*addr)).collect()
        };
        let known = PerFamily { v4: known(Family::V4), v6: known(Family::V6) };
        let mut probes = Vec::new();
        for link in self.links.values_mut() {
            for family in Family::ALL {
                let health = link.health.get_mut(family);
                health.handle_timeout(now);
                if let Some(mut request) = health.poll_probe(now) {
                    request.thorough &= beyond;
                    probes.push(link.probe_plan(family, request, configured, known.get(family)));
                }
            }
            link.count_falls();
        }
        probes
    }

    /// Processes the outcome of a probe.
    pub fn on_probe(&mut self, now: Time, index: LinkIndex, family: Family, outcome: Outcome) {
        let Some(link) = self.links.get_mut(&index) else { return };
        let health = link.health.get_mut(family);
        let before = health.reachability();
        health.on_probe(now, outcome);
        tracing::debug!(link = link.facts.name, ?family, ?outcome, ?before, after = ?health.reachability(), "probe finished");
        if let Outcome::Alive { rtt } = outcome {
            link.rtt.on_sample(now, rtt);
        }
    }

    /// Links that bonds may use: neither excluded nor refused, but including dead ones.
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
            capped: link.capped(),
        };
        self.links.values().filter(|link| link.refused.is_none() && link.rule.role != Role::Excluded).map(view).collect()
    }
}

/// Whether a device still leads to the same network, judged by its addresses and gateways.
fn is_same_network(before: &LinkFacts, now: &LinkFacts) -> bool {
    let gateways =
        |facts: &LinkFacts| Family::ALL.map(|family| facts.gateways.get(family).iter().map(|route| route.gateway).collect::<Vec<_>>());
    before.addresses == now.addresses && gateways(before) == gateways(now)
}
