//! The parameters of the connection rule that the kernel applies.

use std::net::IpAddr;

use braid_decide::connection::{Mode, steps};
use braid_model::{Class, Direction, Family, MAX_LINKS, PerDirection, PerFamily, Rate, Time};

use super::timeouts::RETRY;
use super::{Core, rules};
use crate::links::Link;
use crate::steering::{SteerLink, SteerParams, Steering, SteeringError};

impl<S: Steering> Core<S> {
    /// Writes the parameters to the kernel if they changed.
    ///
    /// Before the first [`on_network`](Core::on_network) it writes nothing: without links, the kernel would refuse the flows of strict rules.
    pub(super) fn update_params(&mut self, now: Time) -> Result<(), SteeringError> {
        if self.plan.is_none() {
            return Ok(());
        }
        let params = self.build_params(now);
        self.params_due = None;
        if self.params.as_ref() != Some(&params) {
            self.params_due = Some(now + RETRY);
            self.steering.set_params(&params)?;
            self.params_due = None;
            // A rule names links, which may get other slots, and may prefer links only while one of them is usable.
            self.actions.rules_changed |=
                self.params.as_ref().is_some_and(|old| old.usable != params.usable || names(old) != names(&params));
            self.params = Some(params);
            // The used servers depend on the usable links.
            self.update_servers(now)?;
        }
        self.update_packets(now)
    }

    /// Passes on the packet load that OPERETTA's targets include.
    fn update_packets(&mut self, now: Time) -> Result<(), SteeringError> {
        let packets = self.target_packets();
        if packets != self.packets {
            self.params_due = Some(now + RETRY);
            self.steering.set_packets(packets)?;
            self.params_due = None;
            self.packets = packets;
        }
        Ok(())
    }

    fn build_params(&mut self, now: Time) -> SteerParams {
        let sole = self.sole(now);
        self.sole = sole;
        let policy = &self.config.policy;
        let backup = self.standby();
        let steps = steps(&self.weights(now), policy.scheduler.weighted());
        let prices = self.prices(now);
        let mut links = [const { None }; MAX_LINKS];
        for link in self.links.values() {
            let price = prices.get(&link.facts.index).copied().unwrap_or(0);
            links[link.slot] = Some(self.steer_link(link, steps[link.slot], price, now));
        }
        if let Some(sole) = sole {
            for (slot, link) in links.iter_mut().enumerate() {
                let Some(link) = link else { continue };
                link.rank = if slot == sole { 0 } else { link.rank.saturating_add(1) };
            }
        }
        let usable = PerFamily { v4: self.links.usable(Family::V4), v6: self.links.usable(Family::V6) };
        let targets = self.targets(&links, usable.v4 | usable.v6, backup);
        let devices = self.links.devices();
        let mut params = SteerParams {
            mode: if sole.is_some() { Mode::OnlyOne } else { policy.scheduler.mode() },
            targets,
            scheduler: policy.scheduler as u8,
            default_demand: policy.default_demand,
            affinity: policy.affinity,
            links,
            usable,
            backup,
            rules: rules::steer_rules(&self.in_force, &devices, &self.executables, (&self.peers, &self.clients), self.names.as_mut()),
            redirected: self.redirected_classes(),
            peer_direct: false,
            confined: self.in_force.confines(None),
        };
        params.peer_direct = self.wants_peer_direct(&params);
        let rules = params.rules.iter_mut().skip(rules::exclusions(&self.in_force));
        for (steer, rule) in rules.zip(&self.in_force.apps) {
            steer.no_packets = rule.relay.is_some() && rule.relay != self.packet_relay;
        }
        params
    }

    /// The classes whose flows are bonded without a rule.
    fn redirected_classes(&self) -> Vec<Class> {
        let policy = &self.config.policy;
        let reached = policy.relay.as_ref().map_or(!self.peers.is_empty(), |relay| self.peers.contains(relay));
        if policy.bonds_all && (reached || policy.confines(None)) {
            return vec![Class::Unclassified, Class::RealTime, Class::Browser, Class::Bulk];
        }
        // Real-time flows go over two links at once, unless a link is metered.
        let duplicates = !self.peers.is_empty() && self.links.values().all(|link| !link.rule.metered);
        if duplicates { vec![Class::RealTime] } else { Vec::new() }
    }

    fn steer_link(&self, link: &Link, step: u64, price: u64, now: Time) -> SteerLink {
        let facts = &link.facts;
        let metric = Family::ALL.iter().filter_map(|family| facts.gateways.get(*family).first()).map(|route| route.metric).min();
        let rate = PerDirection::from_fn(|direction| rate_of(link, direction, now));
        SteerLink {
            index: facts.index,
            name: facts.name.clone(),
            rank: metric.unwrap_or(u32::MAX),
            source4: facts.source(Family::V4).and_then(|addr| match addr {
                IpAddr::V4(v4) => Some(v4),
                IpAddr::V6(_) => None,
            }),
            source6: facts.source(Family::V6).and_then(|addr| match addr {
                IpAddr::V6(v6) => Some(v6),
                IpAddr::V4(_) => None,
            }),
            rate,
            price,
            step,
        }
    }
}

/// Rounds a rate down to about 3 %. Estimates change all the time; the kernel gets only larger changes.
pub(super) fn coarse(rate: u64) -> u64 {
    if rate < 32 {
        return rate;
    }
    let shift = rate.ilog2() - 5;
    (rate >> shift) << shift
}

/// A link's capacity in the resolution that the kernel gets.
pub(super) fn rate_of(link: &Link, direction: Direction, now: Time) -> Rate {
    Rate::from_bps(coarse(link.estimate(direction, now).rate.bytes_per_second()).saturating_mul(8))
}

/// The links' names by slot.
fn names(params: &SteerParams) -> [Option<&str>; MAX_LINKS] {
    params.links.each_ref().map(|link| Some(link.as_ref()?.name.as_str()))
}
