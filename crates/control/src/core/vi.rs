//! The virtual interface's rules for whole flows: links that wait for a better one, shares by RTT, handover with hysteresis, and power
//! saving (`decide::virtual_interface`).

use braid_decide::policy::Scheduler;
use braid_decide::virtual_interface::{self as vi, Interface, WINDOW};
use braid_model::{ByteCount, Direction, Family, LinkSet, MAX_LINKS, Power, Rate, Role, Time};

use super::Core;
use super::params::{coarse, rate_of};
use crate::links::Link;
use crate::steering::Steering;

/// Assumed packet size. It does not affect which link takes the least energy.
const PACKET: ByteCount = ByteCount::new(1500);

impl<S: Steering> Core<S> {
    /// Links that are unused while a better one is usable: those with a lower priority than the best usable link, and backups after all
    /// others.
    ///
    /// If a rule or an address family leaves only such links to a flow, the flow may use all of them, whatever their priorities.
    pub(super) fn standby(&self) -> LinkSet {
        let usable = self.links.usable(Family::V4) | self.links.usable(Family::V6);
        let best = self.links.values().filter(|link| usable.contains(link.slot)).map(level).min();
        let waits = |link: &&Link| best.map_or(link.rule.role == Role::Backup, |best| level(link) > best);
        let mut standby = LinkSet::default();
        self.links.values().filter(waits).for_each(|link| standby.insert(link.slot));
        standby
    }

    /// Weight of each link in weighted round robin, in a common unit.
    pub(super) fn weights(&self, now: Time) -> [u64; MAX_LINKS] {
        let mut weights = [0; MAX_LINKS];
        if self.config.policy.scheduler == Scheduler::RttShare {
            for (weight, share) in weights.iter_mut().zip(vi::shares(&self.interfaces(now))) {
                // Rounded, so that not every sample causes an update of the kernel.
                *weight = coarse((share * f64::from(1 << 20)) as u64);
            }
        } else {
            for link in self.links.values() {
                weights[link.slot] = rate_of(link, Direction::Down, now).bytes_per_second();
            }
        }
        weights
    }

    /// The only link for all flows, if there is one: to save power, or because the scheduler is a handover.
    pub(super) fn sole(&mut self, now: Time) -> Option<usize> {
        let interfaces = self.interfaces(now);
        if self.saves_power() {
            let shares = vi::power_saving_shares(&interfaces, WINDOW, PACKET);
            let used: Vec<usize> = (0..MAX_LINKS).filter(|slot| shares[*slot] > 0.0).collect();
            if let [sole] = used[..] {
                return Some(sole);
            }
        }
        if self.config.policy.scheduler != Scheduler::Handover {
            return None;
        }
        self.handover.update(&interfaces)
    }

    /// Whether flows use the links with the least energy because the battery is low.
    pub(super) fn saves_power(&self) -> bool {
        let battery = |supply: &braid_decide::tradeoff::Supply| vi::saves_power(Some((supply.level * 100.0) as u8), supply.plugged);
        self.config.policy.power_saving && self.supply.as_ref().is_some_and(battery)
    }

    /// The links as inputs of the rules, by slot; empty slots are unavailable.
    fn interfaces(&self, now: Time) -> [Interface; MAX_LINKS] {
        let empty = Interface { priority: 0, available: false, srtt: None, bandwidth: Rate::ZERO, falls_per_hour: 0.0, power: Power::ZERO };
        let mut interfaces = [empty; MAX_LINKS];
        let usable = self.links.usable(Family::V4) | self.links.usable(Family::V6);
        // A link of unknown power must not look free.
        let powers = self.links.values().filter_map(|link| self.active_power(link, now));
        let dearest = powers.fold(Power::ZERO, |most, power| if power > most { power } else { most });
        for link in self.links.values() {
            interfaces[link.slot] = Interface {
                priority: level(link),
                available: usable.contains(link.slot),
                srtt: link.rtt.smoothed(now),
                bandwidth: rate_of(link, Direction::Down, now),
                falls_per_hour: link.stability.falls_per_day().unwrap_or(0.0) / 24.0,
                power: self.active_power(link, now).unwrap_or(dearest),
            };
        }
        interfaces
    }
}

/// Rank of a link: its priority, 0 first; backups after all others.
fn level(link: &Link) -> u32 {
    let behind = if link.rule.role == Role::Backup { 1 << 16 } else { 0 };
    behind + u32::from(link.rule.priority)
}
