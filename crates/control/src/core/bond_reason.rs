//! Explains why flows are bonded.

use std::net::IpAddr;

use braid_api::{Explanation, Outcome};
use braid_decide::policy::AppRule;
use braid_model::{ByteCount, Class, Direction, Time};

use super::views::{matcher_text, when_text};
use super::{Core, rules};
use crate::steering::{RedirectPolicy, RedirectedFlow, Steering};

/// Why a flow is bonded, recorded at its start.
#[derive(Debug, Clone, PartialEq)]
pub struct BondReason {
    /// The `[[app]]` entry that matched, counted from 1.
    pub rule: Option<u32>,
    /// Conditions of the entry.
    pub rule_text: Option<String>,
    /// Name of the rule, if a program has added it; then it has no number.
    pub program_rule: Option<String>,
    /// Context in which that rule applies.
    pub when: Option<String>,
    /// Traffic class of the flow.
    pub class: Class,
    /// Expected number of bytes.
    pub demand: ByteCount,
    /// Direction of most of these bytes.
    pub direction: Direction,
    /// The reason, as a clause.
    pub reason: String,
}

impl<S: Steering> Core<S> {
    /// Why a redirected flow is bonded. `peer_direct`: whether its peer is its own server.
    pub fn bond_reason(&self, now: Time, flow: &RedirectedFlow, peer_direct: bool) -> BondReason {
        let (place, rule) = self.indexed_rule_of(now, flow).unzip();
        let program = place.and_then(|place| self.program_place(flow.started, place));
        BondReason {
            rule: place.filter(|_| program.is_none()).map(|place| place as u32 + 1),
            program_rule: program.and_then(|program| self.programs.name(program)).map(str::to_owned),
            rule_text: rule.map(|rule| matcher_text(&rule.matcher)),
            when: rule.and_then(|rule| when_text(&rule.when)),
            class: flow.class,
            demand: flow.demand,
            direction: flow.direction,
            reason: if peer_direct { "the server runs Braid itself".to_owned() } else { self.carry_reason(rule, flow.class) },
        }
    }

    /// Completes the explanation of a future flow: it may be bonded with a peer, or would be if a peer were reachable.
    pub(super) fn or_bonded(&self, now: Time, mut explanation: Explanation, destination: IpAddr, port: u16) -> Explanation {
        let Some(params) = self.params.as_ref().filter(|_| explanation.outcome == Outcome::Steered) else { return explanation };
        let program = || self.programs.place_of(explanation.program_rule.as_ref()?).map(|place| self.config.policy.apps.len() + place);
        let place = explanation.rule.map(|rule| rule as usize - 1).or_else(program);
        let rule = place.and_then(|place| self.in_force.apps.get(place));
        let redirect = place.and_then(|place| params.rules.get(rules::exclusions(&self.config.policy) + place)?.redirect);
        let named = |class: &&Class| explanation.class.as_ref().is_some_and(|name| *name == class.to_string());
        let by_class = params.redirected.iter().find(named).copied();
        let (class, by_class) = (by_class.unwrap_or_default(), by_class.is_some());
        let asks_link = port == 53 && self.links.values().any(|link| link.facts.resolvers.contains(&destination));
        let relay = self.config.policy.relay_of(rule).map(str::to_owned).or_else(|| {
            let refusing = self.refusing(now, destination);
            self.peers.iter().find(|relay| !refusing.contains(relay)).cloned()
        });
        let confined = self.config.policy.confines(rule) && explanation.outcome != Outcome::LeftAlone;
        if confined {
            return self.confined(now, explanation, (rule, class, destination), relay);
        }
        let redirected = redirect == Some(RedirectPolicy::Redirect) || redirect.is_none() && by_class;
        if redirected && asks_link {
            explanation.reason += "; the destination is a link's own resolver, which no peer can reach";
        } else if redirected && let Some(refused) = self.why_refused(now, rule, destination) {
            explanation.reason += &format!("; {}, but {refused}, so it goes direct", self.carry_reason(rule, class));
        } else if redirected {
            let alone = explanation.link.take().map(|link| format!("; without bonding it would go over {link}: {}", explanation.reason));
            explanation.reason = format!("{}{}", self.carry_reason(rule, class), alone.unwrap_or_default());
            explanation.peer = relay;
            explanation.outcome = Outcome::Bonded;
            explanation.runner_up = None;
        } else if let Some(rule) = rule.filter(|rule| rule.carry.needs_peer()) {
            let wanted = rule.relay.as_ref().map_or("a relay, but none is".to_owned(), |relay| format!("the relay {relay}, but it is not"));
            explanation.reason += &format!("; the rule asks for {wanted} reachable now, so the flow goes direct: see \"braid peers\"");
        }
        explanation
    }

    /// Why a flow of this class with this rule is bonded, as a clause.
    pub(super) fn carry_reason(&self, rule: Option<&AppRule>, class: Class) -> String {
        let policy = &self.config.policy;
        let duplicates = class == Class::RealTime && self.copies(rule, true) > 1;
        match rule {
            Some(rule) if rule.carry.needs_peer() => reason(rule),
            _ if policy.bonds_all && !duplicates => {
                let relay = policy.relay.as_ref().map(|relay| format!(" and relay = \"{relay}\"")).unwrap_or_default();
                format!("the configuration sets carry = \"bond\"{relay} for all flows without another rule")
            }
            _ => "it is real-time, a relay is reachable and no link is metered, so each packet goes over two links".to_owned(),
        }
    }
}

fn reason(rule: &AppRule) -> String {
    let relay = rule.relay.as_ref().map(|relay| format!(" and relay = \"{relay}\"")).unwrap_or_default();
    let unseen = "Braid sends its packets, so firewalls that filter by user or cgroup do not recognise them";
    format!("the rule sets carry = \"{}\"{relay} ({unseen})", rule.carry.name())
}
