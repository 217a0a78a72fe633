//! What bonds are told: the links they may use, and what the policy says of a flow.

use std::collections::VecDeque;

use braid_decide::health::Suffering;
use braid_decide::policy::{Admission, AppRule, LinkSelector, Policy, admit};
use braid_model::{Class, Direction, Family, LinkSet, Time};

use super::{Core, rules};
use crate::links::BondLink;
use crate::steering::{RedirectedFlow, Steering, SteeringError};

/// Where a flow may leave that no bond takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// Wherever the system sends it.
    Any,
    /// By this device, one of those that its rule allows.
    Device(String),
    /// None of those is there.
    Nowhere,
}

/// How a connection is to be bonded with a peer.
#[derive(Debug, Clone, PartialEq)]
pub struct BondPolicy {
    /// φ.
    pub weight: f64,
    /// Π, by slot.
    pub links: LinkSet,
    /// Over how many links each packet goes; 1: over one.
    pub copies: u8,
    /// Before others.
    pub urgent: bool,
    /// The only peer that it may be bonded with.
    pub relay: Option<String>,
    /// Where it may leave if no peer takes it.
    pub exit: Exit,
    /// Relays that do not open its destination.
    pub refusing: Vec<String>,
    /// The rule that it matched is too long ago to be known: it may have been strict, so the flow goes nowhere.
    pub forgotten: bool,
}

/// What a bond says of a path over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathEvent {
    /// It delivers.
    Delivers,
    /// It owes an acknowledgement for too long.
    Silent,
}

impl<S: Steering> Core<S> {
    /// A bond's word counts in the health of the link in `slot`: what it delivers proves that the link lives, and a silent path has the link asked,
    /// since the peer may be gone instead.
    pub fn on_path(&mut self, now: Time, slot: usize, family: Family, event: PathEvent) -> Result<(), SteeringError> {
        if let Some(link) = self.links.in_slot_mut(slot) {
            let health = link.health.get_mut(family);
            match event {
                PathEvent::Delivers => health.on_progress(now, now),
                PathEvent::Silent => health.on_suffering(now, Suffering::Timeout),
            }
        }
        self.judge(now)
    }

    /// A peer can be reached from now on, or cannot: connections whose rule asks for it are redirected to the daemon, or go direct. Those that
    /// run are not touched.
    pub fn set_peer_ready(&mut self, now: Time, name: &str, ready: bool) -> Result<(), SteeringError> {
        let changed = if ready { self.peers.insert(name.to_owned()) } else { self.peers.remove(name) };
        if !changed {
            return Ok(());
        }
        if ready {
            // Its operator may have allowed more meanwhile.
            self.refusals.forget(name);
        }
        let told = self.update_refused(now);
        self.update_params(now).and(told)
    }

    /// The links that bonds may use now, by slot. Those that wait for a better one, by role, priority, a handover or to save power, are
    /// backups: they take over at once, and by the bond's own word, when no better one delivers.
    pub fn bond_links(&self) -> Vec<BondLink> {
        let waiting = self.params.as_ref().map_or_else(|| self.waiting(), |params| params.backup);
        let sole = self.sole;
        let mut links = self.links.bond_links();
        for link in &mut links {
            link.backup = waiting.contains(link.slot) || sole.is_some_and(|sole| sole != link.slot);
        }
        links
    }

    /// What the policy says of a redirected connection: φ, Π as slots, over how many links each packet is to go, the relay it must use, and
    /// those that are of no use.
    pub fn bond_policy(&self, now: Time, flow: &RedirectedFlow) -> BondPolicy {
        let rule = self.rule_of(flow);
        let devices = self.links.devices();
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, devices.iter().copied());
        let allowed = rule.and_then(|rule| rule.links.as_deref().map(mask));
        let preferred = rule.filter(|rule| !rule.prefer.is_empty()).map(|rule| mask(&rule.prefer));
        let usable = Family::ALL.iter().fold(LinkSet::default(), |all, family| all | self.links.usable(*family));
        // Preferred are some of those that are allowed, and only while one of them can be used.
        let within = preferred.map(|mask| mask & allowed.unwrap_or(mask)).filter(|mask| !(*mask & usable).is_empty());
        let family = Family::of(flow.remote.ip());
        let forgotten = self.is_forgotten(flow.started, flow.rule);
        let exit = match admit(self.links.usable(family), self.waiting(), allowed, preferred) {
            _ if forgotten => Exit::Nowhere,
            Admission::Use(mask) => self.widest(now, mask).map_or(Exit::Any, Exit::Device),
            Admission::Deny => Exit::Nowhere,
            Admission::LeaveAlone => Exit::Any,
        };
        BondPolicy {
            weight: rule.map_or(1.0, |rule| rule.weight),
            links: within.or(allowed).unwrap_or(LinkSet::ALL),
            exit,
            copies: self.copies(rule, flow.class == Class::RealTime),
            urgent: flow.class == Class::RealTime,
            relay: rule.and_then(|rule| rule.relay.clone()),
            refusing: self.refusing(now, flow.remote.ip()),
            forgotten,
        }
    }

    /// The device that brings most, of some.
    fn widest(&self, now: Time, of: LinkSet) -> Option<String> {
        let found = self.links.values().filter(|link| of.contains(link.slot));
        let widest = found.max_by_key(|link| (link.estimate(Direction::Down, now).rate, std::cmp::Reverse(link.slot)));
        widest.map(|link| link.facts.name.clone())
    }

    /// The application of a redirected connection, for people.
    pub fn application_of(&self, flow: &RedirectedFlow) -> String {
        self.apps.name(&flow.app)
    }

    /// The `[[app]]` entry that a redirected flow matched when its program asked; `None` where none did, or where that is too long ago.
    pub fn rule_of(&self, flow: &RedirectedFlow) -> Option<&AppRule> {
        self.placed_rule_of(flow).map(|(_, rule)| rule)
    }

    /// The same, and which entry it was, from 0.
    pub(super) fn placed_rule_of(&self, flow: &RedirectedFlow) -> Option<(usize, &AppRule)> {
        self.rule_then(flow.started, flow.rule)
    }

    /// The `[[app]]` entry that the kernel's rule with this number was when a flow started, and which it was, from 0.
    pub(super) fn rule_then(&self, started: Time, rule: Option<u8>) -> Option<(usize, &AppRule)> {
        let (exclusions, apps) = match self.past.at(started)? {
            InForce::Then(rules) => (rules.exclusions, &rules.apps),
            InForce::Now => (rules::exclusions(&self.config.policy), &self.config.policy.apps),
        };
        let place = usize::from(rule?).checked_sub(exclusions)?;
        Some((place, apps.get(place)?))
    }

    /// Whether a flow matched a rule that is too long ago to be known.
    pub(super) fn is_forgotten(&self, started: Time, rule: Option<u8>) -> bool {
        rule.is_some() && self.past.at(started).is_none()
    }
}

/// Policies that are remembered.
const VERSIONS: usize = 16;

/// Rules as they were: flows name theirs by number, and an exchange of datagrams may begin anew long after it matched.
#[derive(Default)]
pub(super) struct PastRules {
    /// Oldest first.
    versions: VecDeque<Rules>,
    /// What began before this is of rules that are forgotten.
    since: Time,
}

struct Rules {
    until: Time,
    exclusions: usize,
    apps: Vec<AppRule>,
}

enum InForce<'a> {
    Then(&'a Rules),
    Now,
}

impl PastRules {
    /// Remembers the rules of `old` where `new` has others.
    pub(super) fn keep(&mut self, now: Time, old: &Policy, new: &Policy) {
        let exclusions = rules::exclusions(old);
        if old.apps == new.apps && exclusions == rules::exclusions(new) {
            return;
        }
        self.versions.push_back(Rules { until: now, exclusions, apps: old.apps.clone() });
        if self.versions.len() > VERSIONS {
            self.since = self.versions.pop_front().map_or(self.since, |rules| rules.until);
        }
    }

    fn at(&self, started: Time) -> Option<InForce<'_>> {
        if started < self.since {
            return None;
        }
        Some(self.versions.iter().find(|rules| started < rules.until).map_or(InForce::Now, InForce::Then))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(weights: &[f64]) -> Policy {
        Policy { apps: weights.iter().map(|weight| AppRule { weight: *weight, ..AppRule::default() }).collect(), ..Policy::default() }
    }

    #[test]
    fn rules_are_those_of_their_time() {
        let mut past = PastRules::default();
        let weights = |past: &PastRules, at: u64| {
            past.at(Time::from_nanos(at)).map(|in_force| match in_force {
                InForce::Then(rules) => rules.apps.iter().map(|rule| rule.weight).collect(),
                InForce::Now => vec![],
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
