//! Network changes: links, routing tables, and the prefixes that may be steered.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use braid_decide::steer::{self, Prefixes};
use braid_decide::tables;
use braid_model::{Family, LinkFacts, NetworkSnapshot, PerFamily, Protocol, Time};

use super::{Core, Stuck};
use crate::links::Link;
use crate::steering::{FlowRow, Steering, SteeringError};

impl<S: Steering> Core<S> {
    /// Processes a network change.
    pub fn on_network(&mut self, now: Time, network: NetworkSnapshot) -> Result<(), SteeringError> {
        let policy = &self.in_force;
        let devices: Vec<&LinkFacts> = network.interfaces.iter().filter(|device| policy.is_link(device)).collect();
        let indexes = || devices.iter().map(|device| device.index);
        let (conflicts, with_lan) = (tables::conflicts(&network, indexes()), tables::lan_conflicts(&network, indexes(), &policy.lan));
        let refused = |device: &LinkFacts| conflicts.get(&device.index).or_else(|| with_lan.get(&device.index)).cloned();
        let mut identify = Vec::new();
        let new = |device: &LinkFacts, slot| {
            let rule = policy.link_rule(device).cloned().unwrap_or_default();
            identify.push((device.index, device.name.clone()));
            Link::new(device.clone(), slot, rule, self.config.probe, now)
        };
        for slot in self.links.on_devices(now, devices, refused, new) {
            self.detection.forget_link(slot);
        }
        if !identify.is_empty() {
            self.actions.identify.extend(identify);
            self.choose_profiles();
        }
        self.fit.retain(|index| self.links.get(index).is_some());
        self.energy_service.retain(|index| self.links.get(index).is_some());
        self.network = network;
        let tables = self.update_tables(now);
        let judged = self.reevaluate(now);
        let gateway = self.update_gateway();
        let kept = self.keep_gateway(now);
        let relocated = self.update_relocated(now);
        tables.and(judged).and(gateway).and(kept).and(relocated).and(self.update_servers(now))
    }

    /// Updates rules, routes, and the prefixes that the kernel may steer.
    pub(super) fn update_tables(&mut self, now: Time) -> Result<(), SteeringError> {
        let steered: BTreeMap<_, _> =
            self.links.iter().filter(|(_, link)| link.refused.is_none()).map(|(index, link)| (index, link.slot)).collect();
        let mut plan = tables::plan(&self.network, &steered);
        let forwarded = self.in_force.forwarded_devices();
        if !forwarded.is_empty() {
            for (rules, route) in Family::ALL.map(|family| tables::carrier(family, &forwarded)) {
                plan.rules.extend(rules);
                plan.routes.push(route);
            }
        }
        for (rule, route) in self.packet_tables().into_iter().chain(self.relocation_tables()) {
            plan.rules.push(rule);
            plan.routes.push(route);
        }
        if self.plan.as_ref() != Some(&plan) {
            self.actions.plan = Some(plan.clone());
            self.plan = Some(plan);
            self.tables_upkeep.on_change();
        }
        self.keep_tables(now);
        let usable: BTreeSet<_> = steered.keys().copied().collect();
        for family in Family::ALL {
            let map = steer::prefix_map(&self.network, &usable, family);
            self.steering.set_prefixes(family, &map)?;
            if self.links.set_steerable(family, Prefixes::new(map)) {
                self.follow_tunnel(family, now)?;
            }
        }
        self.steering.set_resolvers(&self.links.resolvers().iter().map(|(resolver, links)| (*resolver, *links)).collect::<Vec<_>>())
    }

    /// Whether the system routes `to` through a link's default route.
    pub fn may_steer(&self, to: IpAddr) -> bool {
        self.links.may_steer(to)
    }

    /// Prefixes that the system routes through links' default routes.
    pub fn steerable(&self) -> &PerFamily<Prefixes> {
        self.links.steerable()
    }

    /// Ends flows that are bound to a link but whose destination now belongs to a tunnel, so that they reconnect through the tunnel.
    fn follow_tunnel(&mut self, family: Family, now: Time) -> Result<(), SteeringError> {
        if self.params.is_none() {
            return Ok(());
        }
        // Includes flows that started since the last poll.
        let flows = self.steering.flows(now)?;
        // The link still has its default route, but the system no longer chooses it: another route takes precedence.
        let passed_over =
            |row: &FlowRow| self.links.get(row.link).is_some_and(|link| link.configured(family)) && !self.may_steer(row.remote.0);
        // Forwarded packets meet the routing rules one by one, and follow the tunnel by themselves. To end what the other host opened helps nobody.
        let leaked = flows.iter().filter(|row| !row.forwarded && !row.accepted && row.family == family && passed_over(row));
        let leaked: Vec<_> = leaked.map(|row| Stuck { tunnelled: true, ..Stuck::of(row) }).collect();
        self.actions.stuck.extend(leaked.into_iter().filter(|flow| flow.protocol == Protocol::Tcp && self.ending.insert(flow.id)));
        Ok(())
    }
}
