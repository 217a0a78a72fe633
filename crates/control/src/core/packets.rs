//! Packets of the gateway's clients that go through a relay: protocols other than TCP and UDP. One relay takes them, whichever rule asks for it.

use std::collections::BTreeSet;

use braid_decide::policy::Carry;
use braid_decide::tables::{self, PACKET_DEVICE};
use braid_model::{Family, PerFamily, RouteFacts, RuleFacts, Time};

use super::Core;
use super::gateway::is_link_local;
use crate::steering::{Steering, SteeringError};

impl<S: Steering> Core<S> {
    /// Chooses the relay that takes packets, among those that offer it and are reachable. `None` if none may take any.
    pub fn choose_packet_relay(&mut self, now: Time, offering: &BTreeSet<String>) -> (Option<String>, Result<(), SteeringError>) {
        let chosen = if self.is_gateway() { self.wanted_packet_relay(offering).map(str::to_owned) } else { None };
        if chosen == self.packet_relay {
            return (chosen, Ok(()));
        }
        self.packet_relay.clone_from(&chosen);
        (chosen, self.update_params(now))
    }

    /// The relay of the policy, or of the first rule that names one, or any.
    fn wanted_packet_relay<'a>(&'a self, offering: &'a BTreeSet<String>) -> Option<&'a str> {
        let policy = &self.config.policy;
        if let Some(relay) = policy.relay.as_ref().filter(|_| policy.bonds_all) {
            return offering.get(relay).map(String::as_str);
        }
        let bonding = || policy.apps.iter().filter(|rule| matches!(rule.carry, Carry::Bond | Carry::Duplicate));
        if let Some(relay) = bonding().filter_map(|rule| offering.get(rule.relay.as_ref()?)).next() {
            return Some(relay);
        }
        let any = policy.bonds_all || bonding().any(|rule| rule.relay.is_none());
        let current = self.packet_relay.as_ref().and_then(|relay| offering.get(relay));
        current.or(offering.first()).filter(|_| any).map(String::as_str)
    }

    /// Families in which the daemon's device of packets has an address.
    pub(super) fn packet_families(&self) -> PerFamily<bool> {
        let device = self.network.interfaces.iter().find(|device| device.name == PACKET_DEVICE);
        let has = |family| {
            device.is_some_and(|device| device.addresses.iter().any(|net| Family::of(net.addr()) == family && !is_link_local(net.addr())))
        };
        match !self.in_force.forwards() {
            true => PerFamily::default(),
            false => PerFamily { v4: has(Family::V4), v6: has(Family::V6) },
        }
    }

    /// The rules and routes that send packets over that device.
    pub(super) fn packet_tables(&self) -> Vec<(RuleFacts, RouteFacts)> {
        let families = self.packet_families();
        let device = self.network.interfaces.iter().find(|device| device.name == PACKET_DEVICE);
        let wanted = Family::ALL.into_iter().filter(|family| *families.get(*family));
        device.into_iter().flat_map(|device| wanted.clone().map(|family| tables::packets(family, device.index))).collect()
    }
}
