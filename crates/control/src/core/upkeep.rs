//! Sets again what somebody else has removed from the kernel: routing rules, routes, firewall tables, the virtual interface.
//!
//! At once at first. If it is removed again and again, there are delays, which double: Braid does not compete with another program in a tight loop.

use std::net::IpAddr;
use std::time::Duration;

use braid_decide::virtual_device;
use braid_model::{RouteFacts, Time};

use super::Core;
use crate::steering::{Steering, SteeringError};

/// The first of the delays that double.
const FIRST: Duration = Duration::from_secs(1);
/// Longest delay.
const LONGEST: Duration = Duration::from_secs(60);
/// Something that stayed for this long is set again at once.
const CALM: Duration = Duration::from_secs(120);
/// After this number of removals in a row the delays grow, and there is a warning.
const MANY: u32 = 3;

/// How sure it is that something is missing.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// Shortest delay after it was set, because the news of that must arrive.
    settle: Duration,
    /// How long it must be missing.
    confirm: Duration,
}

/// For rules, routes and devices. The network is read in several steps: an address may be there and its routes already gone.
const NETWORK: Patience = Patience { settle: Duration::from_secs(1), confirm: Duration::from_millis(100) };
/// For firewall rules. What is known of them is never old, and while they are missing strict rules do not hold.
const FIREWALL: Patience = Patience { settle: Duration::from_millis(50), confirm: Duration::ZERO };

/// A part of the kernel's configuration that Braid sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Routing rules and routes.
    Tables,
    /// The firewall tables of the gateway or of `fallback = "none"`, and the virtual interface.
    Gateway,
}

impl Kept {
    /// What it is, in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tables => "Braid's routing rules or routes",
            Self::Gateway => "Braid's firewall rules or virtual interface",
        }
    }

    /// How to find who removes it.
    fn hint(self) -> &'static str {
        match self {
            Self::Tables => "`ip monitor rule route` shows when; often it is a program that manages the network",
            Self::Gateway => "`nft monitor` names its process",
        }
    }
}

/// Whether one of them is there.
#[derive(Debug, Default)]
pub(super) struct Upkeep {
    /// Since when the kernel has it; `None`: it is not set yet, or wanted no more.
    set: Option<Time>,
    /// Since when it has been missing.
    missing: Option<Time>,
    /// How often in a row it was removed soon after it had been set.
    removals: u32,
    /// When to look again.
    due: Option<Time>,
}

impl Upkeep {
    /// It is about to be set, or to be removed by Braid itself.
    pub(super) fn on_change(&mut self) {
        (self.set, self.missing, self.due) = (None, None, None);
    }

    /// It is set.
    fn on_set(&mut self, now: Time) {
        (self.set, self.missing, self.due) = (Some(now), None, Some(now + NETWORK.settle));
    }

    /// Takes whether it is missing. Returns whether it is to be set now.
    fn must_restore(&mut self, now: Time, missing: bool, patience: Patience) -> bool {
        let Some(set) = self.set else { return false };
        if !missing {
            self.missing = None;
            self.due = self.due.filter(|due| now < *due);
            return false;
        }
        if now.since(set) >= CALM {
            self.removals = 0;
        }
        let delay = match self.removals.checked_sub(MANY) {
            Some(more) => (FIRST * 2u32.saturating_pow(more.min(16))).min(LONGEST),
            None => patience.settle,
        };
        let earliest = (set + delay).max(*self.missing.get_or_insert(now) + patience.confirm);
        if now < earliest {
            self.due = Some(earliest);
            return false;
        }
        self.removals = self.removals.saturating_add(1);
        self.on_change();
        true
    }

    /// When to look again.
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    fn warning(&self, now: Time, what: Kept) -> Option<String> {
        let fought = self.removals > MANY && self.set.is_none_or(|set| now.since(set) < CALM);
        fought.then(|| {
            format!(
                "another program has removed {} {} times in a row; Braid waits up to {} s before it sets them again, and meanwhile strict rules do not \
                 hold and traffic follows the system's own rules; make that program leave them alone ({})",
                what.name(),
                self.removals,
                LONGEST.as_secs(),
                what.hint()
            )
        })
    }
}

impl<S: Steering> Core<S> {
    /// The kernel has accepted the last rules and routes, or the last plan of the gateway.
    pub fn on_set(&mut self, now: Time, what: Kept) {
        match what {
            Kept::Tables => self.tables_upkeep.on_set(now),
            Kept::Gateway => {
                self.firewall_lost = false;
                self.gateway_upkeep.on_set(now);
            }
        }
    }

    /// Somebody has changed the firewall tables of Braid: `lost`: they lack what was set.
    pub fn on_firewall(&mut self, now: Time, lost: bool) -> Result<(), SteeringError> {
        self.firewall_lost = lost;
        self.keep_gateway(now)
    }

    /// Whether the firewall has the rules of the last plan.
    pub(super) fn has_firewall(&self) -> bool {
        self.gateway_upkeep.set.is_some() && !self.firewall_lost
    }

    /// Looks again where it is due.
    pub(super) fn keep_up(&mut self, now: Time) -> Result<(), SteeringError> {
        let is_due = |upkeep: &Upkeep| upkeep.due().is_some_and(|due| due <= now);
        if is_due(&self.tables_upkeep) {
            self.keep_tables(now);
        }
        if is_due(&self.gateway_upkeep) { self.keep_gateway(now) } else { Ok(()) }
    }

    /// Sets rules and routes again that the network lacks.
    pub(super) fn keep_tables(&mut self, now: Time) {
        let missing = self.plan.as_ref().map_or(0, |plan| plan.missing(&self.network));
        if self.tables_upkeep.must_restore(now, missing > 0, NETWORK) {
            self.actions.plan = self.plan.clone();
            self.actions.restored.push(Kept::Tables);
        }
    }

    /// Sets the system's part of the gateway again if something of it is missing.
    pub(super) fn keep_gateway(&mut self, now: Time) -> Result<(), SteeringError> {
        let missing = self.firewall_lost || self.has_lost_own_device();
        if self.gateway_upkeep.must_restore(now, missing, if self.firewall_lost { FIREWALL } else { NETWORK }) {
            self.actions.gateway = Some(self.gateway.clone());
            self.actions.restored.push(Kept::Gateway);
            return self.leave_fast_path();
        }
        Ok(())
    }

    /// Whether the virtual interface is not there, does not work, or lacks a rule or route.
    fn has_lost_own_device(&self) -> bool {
        let Some(own) = self.virtual_device() else { return false };
        let device = |name: &str| self.network.interfaces.iter().find(|facts| facts.name == name && facts.carrier);
        let (Some(facts), Some(switch_end)) = (device(&own.name), device(&own.switch_end())) else { return true };
        let has_route = |wanted: &RouteFacts| {
            let by_same_device = |route: &RouteFacts| route.hops.iter().map(|hop| hop.device).eq(wanted.hops.iter().map(|hop| hop.device));
            let same = |route: &RouteFacts| (route.table, route.destination) == (wanted.table, wanted.destination) && by_same_device(route);
            self.network.routes.iter().any(same)
        };
        let lacks = |address: &IpAddr| {
            // Where IPv6 is turned off, the platform makes the interface without.
            let is_there = facts.addresses.iter().any(|net| net.addr() == *address);
            let rules = virtual_device::rules(*address, &own.name);
            let routes = virtual_device::routes(*address, facts.index, switch_end.index);
            if is_there {
                !rules.iter().all(|rule| self.network.rules.contains(rule)) || !routes.iter().all(has_route)
            } else {
                address.is_ipv4()
            }
        };
        own.addresses.iter().any(lacks)
    }

    pub(super) fn upkeep_warnings(&self, now: Time) -> impl Iterator<Item = String> {
        [(&self.tables_upkeep, Kept::Tables), (&self.gateway_upkeep, Kept::Gateway)]
            .into_iter()
            .filter_map(move |(upkeep, what)| upkeep.warning(now, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn what_is_removed_is_set_again_at_once_and_later_more_rarely() {
        let mut upkeep = Upkeep::default();
        let mut now = Time::from_millis(1000);
        assert!(!upkeep.must_restore(now, true, NETWORK), "it was never set");
        upkeep.on_set(now);
        now = now + SECOND * 10;
        assert!(!upkeep.must_restore(now, false, NETWORK) && upkeep.due().is_none());
        assert!(!upkeep.must_restore(now, true, NETWORK), "a reading in several steps");
        assert_eq!(upkeep.due(), Some(now + NETWORK.confirm));
        now = now + NETWORK.confirm;
        assert!(upkeep.must_restore(now, true, NETWORK));
        assert!(!upkeep.must_restore(now, true, NETWORK), "it is being set");
        let mut waited = Vec::new();
        for _ in 0..10 {
            upkeep.on_set(now);
            assert!(!upkeep.must_restore(now, true, NETWORK));
            let due = upkeep.due().unwrap();
            waited.push(due.since(now).as_secs());
            now = due;
            assert!(upkeep.must_restore(now, true, NETWORK), "at the announced time");
        }
        assert_eq!(waited, [1, 1, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(upkeep.warning(now, Kept::Tables).is_some_and(|text| text.contains("11 times")));
        upkeep.on_set(now);
        now = now + CALM;
        assert!(!upkeep.must_restore(now, false, NETWORK) && upkeep.warning(now, Kept::Tables).is_none());
        assert!(upkeep.must_restore(now, true, FIREWALL), "at once after a quiet time");
        assert!(upkeep.warning(now, Kept::Tables).is_none());
    }

    #[test]
    fn missing_firewall_rules_are_set_again_sooner() {
        let mut upkeep = Upkeep::default();
        let now = Time::from_millis(1000);
        upkeep.on_set(now);
        assert!(!upkeep.must_restore(now, true, FIREWALL));
        assert_eq!(upkeep.due(), Some(now + FIREWALL.settle));
        assert!(upkeep.must_restore(now + FIREWALL.settle, true, FIREWALL));
    }

    #[test]
    fn old_news_is_no_loss() {
        let mut upkeep = Upkeep::default();
        let now = Time::from_millis(1000);
        upkeep.on_set(now);
        assert!(!upkeep.must_restore(now + SECOND / 50, true, NETWORK), "the network was read before");
        assert!(!upkeep.must_restore(now + SECOND / 25, false, NETWORK));
        assert_eq!(upkeep.due(), Some(now + SECOND));
        assert!(!upkeep.must_restore(now + SECOND, false, NETWORK));
        assert_eq!((upkeep.due(), upkeep.removals), (None, 0));
    }
}
