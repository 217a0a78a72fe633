//! Inputs of bonds: the links they may use and the policy of a flow.

use std::collections::VecDeque;

use braid_decide::health::Symptom;
use braid_decide::policy::{Admission, AppRule, LinkSelector, Policy, When, admit};
use braid_model::{Class, Direction, Family, LinkSet, Time};

use super::{Core, rules};
use crate::links::BondLink;
use crate::steering::{AppId, FlowRow, RedirectedFlow, Steering, SteeringError};

/// Where a flow that no bond takes may leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// By the system's routes.
    Any,
    /// By this device, which its rule allows.
    Device(String),
    /// Nowhere: none of the allowed devices is usable, or the flow leaves through a relay only.
    Nowhere,
}

/// How a flow is bonded with a peer.
#[derive(Debug, Clone, PartialEq)]
pub struct BondPolicy {
    /// Index of the `[[app]]` entry that applies, from 0; `None` if none does.
    pub rule: Option<usize>,
    /// Weight φ.
    pub weight: f64,
    /// Allowed links Π, by slot.
    pub links: LinkSet,
    /// Number of links that carry each packet.
    pub copies: u8,
    /// Whether its packets go before those of other flows.
    pub urgent: bool,
    /// The only relay it may use, if its rule names one.
    pub relay: Option<String>,
    /// Where it leaves if no peer takes it.
    pub exit: Exit,
    /// Relays that refuse its destination.
    pub refusing: Vec<String>,
    /// The rule that it matched is no longer stored. The rule may have been strict, so the flow is refused.
    pub rule_expired: bool,
}

/// An event of a path over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathEvent {
    /// The path delivers.
    Delivers,
    /// An acknowledgement has been overdue for too long.
    Silent,
}

impl<S: Steering> Core<S> {
    /// Updates the health of the link in `slot` from a bond's path. A delivery proves that the link works. A silent path triggers a probe
    /// of the link, since the peer may be down instead.
    pub fn on_path(&mut self, now: Time, slot: usize, family: Family, event: PathEvent) -> Result<(), SteeringError> {
        if let Some(link) = self.links.in_slot_mut(slot) {
            let health = link.health.get_mut(family);
            match event {
                PathEvent::Delivers => health.on_progress(now, now),
                PathEvent::Silent => health.on_symptom(now, Symptom::Timeout),
            }
        }
        self.reevaluate(now)
    }

    /// Sets whether a peer is reachable. New connections whose rule asks for it are then redirected to the daemon, or go direct. Existing
    /// connections are not touched.
    pub fn set_peer_ready(&mut self, now: Time, name: &str, ready: bool) -> Result<(), SteeringError> {
        let changed = if ready { self.peers.insert(name.to_owned()) } else { self.peers.remove(name) };
        if !changed {
            return Ok(());
        }
        if ready {
            // Its operator may have allowed more destinations meanwhile.
            self.refusals.forget(name);
        }
        let refused = self.update_refused(now);
        self.update_params(now).and(refused)
    }

    /// Links that bonds may use now. Links on standby, because of role, priority, handover or power saving, are backups: the bond itself switches to
    /// them at once when no better link delivers.
    pub fn bond_links(&self) -> Vec<BondLink> {
        let standby = self.params.as_ref().map_or_else(|| self.standby(), |params| params.backup);
        let sole = self.sole;
        let mut links = self.links.bond_links();
        for link in &mut links {
            link.backup = standby.contains(link.slot) || sole.is_some_and(|sole| sole != link.slot);
        }
        links
    }

    /// The policy of a redirected connection: weight φ, links Π as slots, number of copies, required relay, and refusing relays.
    pub fn bond_policy(&self, now: Time, flow: &RedirectedFlow) -> BondPolicy {
        let (place, rule) = self.indexed_rule_of(now, flow).unzip();
        let devices = self.links.devices();
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, devices.iter().copied());
        let allowed = rule.and_then(|rule| rule.links.as_deref().map(mask));
        let preferred = rule.filter(|rule| !rule.prefer.is_empty()).map(|rule| mask(&rule.prefer));
        let usable = Family::ALL.iter().fold(LinkSet::default(), |all, family| all | self.links.usable(*family));
        // Preferred links count only if they are allowed and one of them is usable.
        let within = preferred.map(|mask| mask & allowed.unwrap_or(mask)).filter(|mask| !(*mask & usable).is_empty());
        let family = Family::of(flow.remote.ip());
        let rule_expired = self.rule_expired(flow.started, flow.rule);
        let exit = match admit(self.links.usable(family), self.standby(), allowed, preferred) {
            _ if rule_expired || self.config.policy.confines(rule) => Exit::Nowhere,
            Admission::Use(mask) => {
                let widest = self.widest(now, mask).and_then(|slot| self.links.in_slot(slot));
                widest.map_or(Exit::Any, |link| Exit::Device(link.facts.name.clone()))
            }
            Admission::Deny => Exit::Nowhere,
            Admission::LeaveAlone => Exit::Any,
        };
        BondPolicy {
            rule: place,
            weight: rule.map_or(1.0, |rule| rule.weight),
            links: within.or(allowed).unwrap_or(LinkSet::ALL),
            exit,
            copies: self.copies(rule, flow.class == Class::RealTime),
            urgent: flow.class == Class::RealTime,
            relay: self.config.policy.relay_of(rule).map(str::to_owned),
            refusing: self.refusing(now, flow.remote.ip()),
            rule_expired,
        }
    }

    /// The link with the highest receive rate among these slots.
    pub(super) fn widest(&self, now: Time, of: LinkSet) -> Option<usize> {
        let found = self.links.values().filter(|link| of.contains(link.slot));
        let widest = found.max_by_key(|link| (link.estimate(Direction::Down, now).rate, std::cmp::Reverse(link.slot)));
        widest.map(|link| link.slot)
    }

    /// Display name of a redirected connection's application.
    pub fn application_of(&self, flow: &RedirectedFlow) -> String {
        self.application_named(&flow.app)
    }

    /// Display name of an application.
    pub fn application_named(&self, app: &AppId) -> String {
        self.apps.name(app)
    }

    /// The `[[app]]` entry that applies to a redirected flow; `None` if none does, or if the entries of its start are no longer stored. A flow
    /// keeps the configuration of its start; if entries of it have conditions, the context of `now` decides which of them applies.
    pub fn rule_of(&self, now: Time, flow: &RedirectedFlow) -> Option<&AppRule> {
        self.indexed_rule_of(now, flow).map(|(_, rule)| rule)
    }

    /// [`rule_of`](Self::rule_of) with the index of the entry, from 0.
    pub fn indexed_rule_of(&self, now: Time, flow: &RedirectedFlow) -> Option<(usize, &AppRule)> {
        let (exclusions, apps) = self.rules_at(flow.started)?;
        let matched = flow.rule.and_then(|rule| usize::from(rule).checked_sub(exclusions));
        if apps.iter().all(|rule| rule.when.is_empty()) {
            return self.rule_at(flow.started, flow.rule);
        }
        self.match_again(now, flow, apps.iter().map(Some).chain(self.program_rules_at(flow.started)), matched)
    }

    /// The rules of programs when a flow started; `None` in the place of one that is gone.
    fn program_rules_at(&self, started: Time) -> impl Iterator<Item = Option<&AppRule>> {
        (0..self.programs.len()).map(move |place| self.programs.matched(place, started))
    }

    /// The links that a flow may use now or in another context; none if the entries of its start are no longer stored.
    pub(super) fn links_in_any_context(&self, row: &FlowRow) -> LinkSet {
        let Some((exclusions, apps)) = self.rules_at(row.started) else { return LinkSet::default() };
        let matched = row.rule.and_then(|rule| usize::from(rule).checked_sub(exclusions));
        let flow = RedirectedFlow::of(row);
        let mut links = LinkSet::default();
        let rules = apps.iter().map(Some).chain(self.program_rules_at(row.started));
        for rule in self.applicable(&flow, rules, matched).map(|(_, rule)| Some(rule)).chain([None]) {
            links = links | self.admitted(rule, row.family);
            if rule.is_some_and(|rule| rule.when.is_empty()) {
                break;
            }
        }
        links
    }

    /// Number of exclusions and the `[[app]]` entries that were configured when a flow started; `None` if they are no longer stored.
    fn rules_at(&self, started: Time) -> Option<(usize, &[AppRule])> {
        Some(match self.past.at(started)? {
            RulesAt::Past(rules) => (rules.exclusions, &rules.apps),
            RulesAt::Current => (rules::exclusions(&self.config.policy), &self.config.policy.apps),
        })
    }

    /// The `[[app]]` entry that had this kernel rule number when a flow started, and its index, from 0. The rules of programs follow the entries; one that is
    /// gone is no rule.
    pub(super) fn rule_at(&self, started: Time, rule: Option<u8>) -> Option<(usize, &AppRule)> {
        let (exclusions, apps) = self.rules_at(started)?;
        let place = usize::from(rule?).checked_sub(exclusions)?;
        let found = match place.checked_sub(apps.len()) {
            None => apps.get(place),
            Some(program) => self.programs.matched(program, started),
        };
        Some((place, found?))
    }

    /// The place of a program's rule among those of programs, if the index of [`rule_at`](Self::rule_at) is one.
    pub(super) fn program_place(&self, started: Time, place: usize) -> Option<usize> {
        place.checked_sub(self.rules_at(started)?.1.len())
    }

    /// Whether a flow matched a rule that is no longer stored.
    pub(super) fn rule_expired(&self, started: Time, rule: Option<u8>) -> bool {
        rule.is_some() && self.past.at(started).is_none()
    }
}

/// Number of earlier policies that are kept.
const MAX_VERSIONS: usize = 16;

/// Earlier rules. Flows refer to rules by number, and a UDP exchange may restart long after it matched.
#[derive(Default)]
pub(super) struct PastRules {
    /// Oldest first.
    versions: VecDeque<Rules>,
    /// The rules of flows that started earlier are no longer stored.
    since: Time,
}

struct Rules {
    until: Time,
    exclusions: usize,
    apps: Vec<AppRule>,
}

enum RulesAt<'a> {
    Past(&'a Rules),
    Current,
}

impl PastRules {
    /// Stores the rules of `old` if `new` has different ones.
    pub(super) fn keep(&mut self, now: Time, old: &Policy, new: &Policy) {
        let exclusions = rules::exclusions(old);
        if old.apps == new.apps && exclusions == rules::exclusions(new) {
            return;
        }
        self.versions.push_back(Rules { until: now, exclusions, apps: old.apps.clone() });
        if self.versions.len() > MAX_VERSIONS {
            self.since = self.versions.pop_front().map_or(self.since, |rules| rules.until);
        }
    }

    /// The conditions of all stored rules.
    pub(super) fn conditions(&self) -> impl Iterator<Item = &When> {
        self.versions.iter().flat_map(|rules| &rules.apps).map(|rule| &rule.when).filter(|when| !when.is_empty())
    }

    fn at(&self, started: Time) -> Option<RulesAt<'_>> {
        if started < self.since {
            return None;
        }
        Some(self.versions.iter().find(|rules| started < rules.until).map_or(RulesAt::Current, RulesAt::Past))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(weights: &[f64]) -> Policy {
        Policy { apps: weights.iter().map(|weight| AppRule { weight: *weight, ..AppRule::default() }).collect(), ..Policy::default() }
    }

    #[test]
    fn flows_keep_the_rules_of_their_start() {
        let mut past = PastRules::default();
        let weights = |past: &PastRules, at: u64| {
            past.at(Time::from_nanos(at)).map(|in_force| match in_force {
                RulesAt::Past(rules) => rules.apps.iter().map(|rule| rule.weight).collect(),
                RulesAt::Current => vec![],
            })
        };
        assert_eq!(weights(&past, 0), Some(vec![]));
        past.keep(Time::from_nanos(10), &policy(&[1.0]), &policy(&[2.0, 1.0]));
        past.keep(Time::from_nanos(20), &policy(&[2.0, 1.0]), &policy(&[2.0, 1.0]));
        past.keep(Time::from_nanos(30), &policy(&[2.0, 1.0]), &policy(&[]));
        assert_eq!([9, 10, 29, 30].map(|at| weights(&past, at)), [vec![1.0], vec![2.0, 1.0], vec![2.0, 1.0], vec![]].map(Some));
        for at in 4..=18 {
            past.keep(Time::from_nanos(at * 10), &policy(&[at as f64]), &policy(&[]));
        }
        assert_eq!([weights(&past, 9), weights(&past, 10)], [None, Some(vec![2.0, 1.0])]);
    }
}
