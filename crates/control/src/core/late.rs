//! Which links get their packets late (`decide::late`; Yap's thesis, 2.4).

use std::collections::BTreeMap;

use braid_api::LateStatus;
use braid_decide::late::{LateBinding, LinkState};
use braid_decide::policy::Preference;
use braid_model::{Direction, Family, Rate, Time};

use super::Core;
use super::timeouts::RETRY;
use crate::links::Link;
use crate::steering::{Ends, LateFlow, LateLink, LatePlan, LateState, Steering, SteeringError};

/// Late binding ends only if the links carry this multiple of the limit, so that estimates near the limit do not turn it on and off.
const MARGIN: f64 = 1.25;

/// Links whose packets are bound late.
#[derive(Debug, Default)]
pub(super) struct Late {
    /// What the steering has.
    plan: Option<LatePlan>,
    /// Why nothing is bound late although the configuration asks for it.
    trouble: Option<String>,
    /// When it was last tried.
    tried: Time,
}

impl<S: Steering> Core<S> {
    /// Binds packets late, or no longer.
    pub(super) fn follow_late(&mut self, now: Time) -> Result<(), SteeringError> {
        let plan = self.in_force.late.and_then(|wanted| self.late_plan(now, wanted));
        // Somebody may have removed its device.
        let works = self.late.trouble.is_none() && (plan.is_none() || self.steering.late_state().is_some());
        if plan == self.late.plan && (works || now.since(self.late.tried) < RETRY) {
            return Ok(());
        }
        self.late.tried = now;
        let set = self.steering.set_late(plan.as_ref());
        let trouble = set.as_ref().err().map(ToString::to_string);
        // What keeps failing is said once.
        let known = std::mem::replace(&mut self.late.trouble, trouble) == self.late.trouble;
        self.late.plan = plan;
        if known { Ok(()) } else { set }
    }

    /// What is wrong, for the user.
    pub(super) fn late_warnings(&self) -> Option<String> {
        self.late.trouble.clone()
    }

    /// Whether packets over the link in `slot` wait until it can take them.
    pub(super) fn is_late(&self, slot: usize) -> bool {
        self.late.trouble.is_none() && self.late.plan.as_ref().is_some_and(|plan| plan.links.contains_key(&slot))
    }

    /// What waits; `None` while nothing is bound late.
    pub(super) fn late_status(&self) -> Option<LateStatus> {
        let plan = self.late.plan.as_ref()?;
        let LateState { packets, bytes, totals } = self.steering.late_state()?;
        Some(LateStatus {
            links: plan.links.values().map(|link| link.name.clone()).collect(),
            packets: packets as u64,
            bytes: bytes.get(),
            bound: totals.bound,
            dropped: totals.dropped,
            expired: totals.expired,
            rebound: totals.rebound,
        })
    }

    fn late_plan(&self, now: Time, wanted: LateBinding) -> Option<LatePlan> {
        let usable = self.links.usable(Family::V4) | self.links.usable(Family::V6);
        let known = |slot| self.late.plan.as_ref().and_then(|plan| plan.links.get(&slot)?.state.rate);
        let link = |(_, link): (_, &Link)| {
            let facts = &link.facts;
            // What the queue sends has Ethernet headers. Probes and address assignment of links that are not usable must not wait until they are.
            let mac = facts.mac.filter(|_| link.refused.is_none() && usable.contains(link.slot))?;
            let estimate = link.estimate(Direction::Up, now);
            let rate = estimate.is_known().then_some(estimate.rate);
            // Small changes are not worth another plan.
            let is_near = |old: &Rate| rate.is_some_and(|new| new.bps().abs_diff(old.bps()) * 50 < old.bps());
            let rate = known(link.slot).filter(is_near).or(rate);
            let state = LinkState { rate, is_fixed: link.capacity.up.is_fixed() };
            Some((link.slot, LateLink { index: facts.index, name: facts.name.clone(), mac, state }))
        };
        let links: BTreeMap<usize, LateLink> = self.links.iter().filter_map(link).collect();
        let rates = self.links.values().map(|link| link.estimate(Direction::Up, now).rate);
        let limit = wanted.up_to.scale(if self.late.plan.is_some() { MARGIN } else { 1.0 });
        // What waits stays while no link is usable.
        if links.is_empty() && self.late.plan.is_none() || rates.fold(Rate::ZERO, |sum, rate| sum + rate) > limit {
            return None;
        }
        let departure = self.departure().map(|device| device.index);
        Some(LatePlan { below: wanted.below, links, departure, flows: self.late_flows() })
    }

    /// Flows of this machine's programs that have a weight, or leave over another link than that of their socket.
    fn late_flows(&self) -> BTreeMap<Ends, LateFlow> {
        let weighted = self.in_force.apps.iter().any(|rule| rule.preference().weight != Preference::default().weight);
        let rows = self.flows.iter().map(|living| &living.row).filter(|row| weighted && !row.forwarded);
        let weights = rows.map(|row| (Ends::of(row), LateFlow { weight: self.weight_of(row), moved: None }));
        let mut flows: BTreeMap<Ends, LateFlow> = weights.filter(|(_, flow)| flow.weight != 1.0).collect();
        for (ends, device) in self.departing() {
            let moved = self.links.get(device).map(|link| link.slot);
            flows.entry(ends).or_insert(LateFlow { weight: 1.0, moved: None }).moved = moved;
        }
        flows
    }
}
