//! The network as it is: links come and go, and with them tables and what may be steered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use braid_decide::connection::LinkMask;
use braid_decide::steer::{self, Verdict};
use braid_decide::tables;
use braid_model::{Family, LinkFacts, NetworkSnapshot, Protocol, Time};

use super::{CROWDED, Core, Link, Stuck};
use crate::steering::{FlowRow, Steering, SteeringError};

impl<S: Steering> Core<S> {
    /// The network changed.
    pub fn on_network(&mut self, now: Time, network: NetworkSnapshot) -> Result<(), SteeringError> {
        let policy = &self.config.policy;
        let links: BTreeSet<_> = network.interfaces.iter().filter(|device| policy.is_link(device)).map(|device| device.index).collect();
        let crowd = self.slots.update(&links);
        let conflicts = tables::conflicts(&network, links.iter().copied());
        self.links.retain(|index, _| links.contains(index));
        self.fit.retain(|index| links.contains(&index));
        for device in network.interfaces.iter().filter(|device| links.contains(&device.index)) {
            let Some(slot) = self.slots.get(device.index) else { continue };
            if self.links.get(&device.index).is_none_or(|link| !is_same_network(&link.facts, device)) {
                self.detection.forget_link(slot);
            }
            let link = self.links.entry(device.index).or_insert_with(|| {
                let rule = policy.link_rule(device).cloned().unwrap_or_default();
                let mut link = Link::new(device.clone(), slot, rule, self.config.probe, now);
                link.model = self.names.model(&device.name);
                link
            });
            link.facts = device.clone();
            link.refused = conflicts.get(&device.index).cloned();
            for family in Family::ALL {
                let usable = link.configured(family);
                link.health.get_mut(family).on_usable(now, usable);
            }
            link.count_falls();
        }
        let crowd: Vec<_> = network.interfaces.iter().filter(|device| crowd.contains(&device.index)).cloned().collect();
        if self.crowd != crowd {
            for device in &crowd {
                tracing::warn!(link = device.name, "{CROWDED}");
            }
            self.crowd = crowd;
        }
        self.network = network;
        let tables = self.update_tables(now);
        let judged = self.judge(now);
        tables.and(judged).and(self.update_servers(now))
    }

    /// Rules, routes, and what the kernel may steer.
    fn update_tables(&mut self, now: Time) -> Result<(), SteeringError> {
        let steered: BTreeMap<_, _> =
            self.links.iter().filter(|(_, link)| link.refused.is_none()).map(|(index, link)| (*index, link.slot)).collect();
        let plan = tables::plan(&self.network, &steered);
        if self.plan.as_ref() != Some(&plan) {
            self.todo.plan = Some(plan.clone());
            self.plan = Some(plan);
        }
        let usable: BTreeSet<_> = steered.keys().copied().collect();
        for family in Family::ALL {
            let map: Vec<_> = steer::prefix_map(&self.network, &usable, family)
                .into_iter()
                .map(|(net, verdict)| (net, verdict == Verdict::Steer))
                .collect();
            self.steering.set_prefixes(family, &map)?;
            let before = std::mem::replace(self.steerable.get_mut(family), map);
            if before != *self.steerable.get(family) {
                self.follow_tunnel(family, now)?;
            }
        }
        let mut resolvers: BTreeMap<IpAddr, LinkMask> = BTreeMap::new();
        for link in self.links.values() {
            for resolver in &link.facts.resolvers {
                resolvers.entry(*resolver).or_default().insert(link.slot);
            }
        }
        self.steering.set_resolvers(&resolvers.into_iter().collect::<Vec<_>>())
    }

    /// Whether the system would send `to` through a link's default route.
    pub fn may_steer(&self, to: IpAddr) -> bool {
        let map = self.steerable.get(Family::of(to));
        let covering = map.iter().filter(|(net, _)| net.contains(&to)).max_by_key(|(net, _)| net.prefix_len());
        covering.is_some_and(|(_, steer)| *steer)
    }

    /// Flows bound to a link whose destination now belongs to a tunnel are ended, so that they begin again inside it.
    fn follow_tunnel(&mut self, family: Family, now: Time) -> Result<(), SteeringError> {
        if self.params.is_none() {
            return Ok(());
        }
        // Those begun since the last poll too.
        let flows = self.steering.flows(now)?;
        // A link that still has its default route, and yet is not the system's choice: something goes before it.
        let passed_over =
            |row: &FlowRow| self.links.get(&row.link).is_some_and(|link| link.configured(family)) && !self.may_steer(row.remote.0);
        let leaked = flows.iter().filter(|row| row.family == family && passed_over(row));
        let leaked: Vec<_> = leaked.map(|row| Stuck { tunnelled: true, ..Stuck::of(row) }).collect();
        self.todo.stuck.extend(leaked.into_iter().filter(|flow| flow.protocol == Protocol::Tcp && self.ending.insert(flow.id)));
        Ok(())
    }

    /// The slots that may be given flows of `family`. If every link that could be used is judged dead, all are treated as up.
    pub(super) fn usable(&self, family: Family) -> LinkMask {
        let mut mask = LinkMask::default();
        let mut fallback = LinkMask::default();
        for link in self.links.values().filter(|link| link.configured(family) && !link.capped()) {
            fallback.insert(link.slot);
            if link.health.get(family).alive() {
                mask.insert(link.slot);
            }
        }
        if mask == LinkMask::default() { fallback } else { mask }
    }
}

/// Whether a device leads to the network that it led to before, as far as addresses and gateways tell.
fn is_same_network(before: &LinkFacts, now: &LinkFacts) -> bool {
    let gateways =
        |facts: &LinkFacts| Family::ALL.map(|family| facts.gateways.get(family).iter().map(|route| route.gateway).collect::<Vec<_>>());
    before.addresses == now.addresses && gateways(before) == gateways(now)
}
