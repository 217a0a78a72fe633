//! What leaves over the links although all flows are to leave through a relay (`fallback = "none"` beside `carry = "bond"`).

use std::collections::BTreeSet;
use std::net::IpAddr;

use braid_api::{Explanation, Outcome};
use braid_decide::gateway::{ForwardRule, OwnRules};
use braid_decide::policy::{AppMatcher, AppRule};
use braid_decide::tables::DEPARTURE_DEVICE;
use braid_model::{Class, Family, LinkFacts, Time};
use ipnet::IpNet;

use super::Core;
use super::gateway::allowed_links;
use super::views::matcher_text;
use crate::steering::Steering;

impl<S: Steering> Core<S> {
    /// Completes the explanation of a flow that leaves through a relay or fails.
    pub(super) fn confined(
        &self,
        now: Time,
        mut explanation: Explanation,
        (rule, class, destination): (Option<&AppRule>, Class, IpAddr),
        relay: Option<String>,
    ) -> Explanation {
        let policy = &self.config.policy;
        let why = self.carry_reason(rule, class);
        let only = "fallback = \"none\": it leaves through a relay only";
        let up = relay.as_ref().filter(|relay| self.peers.contains(*relay));
        let obstacle = match (&relay, self.why_refused(now, rule, destination)) {
            (_, Some(refused)) => Some(refused),
            (Some(relay), None) if up.is_none() => Some(format!("the relay {relay} is not reachable now: see \"braid peers\"")),
            (None, None) => Some("no relay is reachable now: see \"braid peers\"".to_owned()),
            _ if explanation.outcome == Outcome::Denied => Some(explanation.reason.clone()),
            _ => None,
        };
        explanation.confined = true;
        explanation.exceptions = self.exceptions(policy.confines(None));
        (explanation.link, explanation.runner_up) = (None, None);
        match obstacle {
            Some(obstacle) => {
                explanation.outcome = Outcome::Denied;
                explanation.reason = format!("{why}, with {only}, and {obstacle}");
            }
            None => {
                explanation.outcome = Outcome::Bonded;
                explanation.peer = relay;
                explanation.reason = format!("{why}, with {only}");
            }
        }
        explanation
    }

    /// What leaves over the links although flows are confined. `all`: whether flows without a rule are confined too, which the firewall enforces.
    fn exceptions(&self, all: bool) -> Vec<String> {
        let mut exceptions: Vec<String> =
            ["address resolution and router discovery (ARP, ND, RA)", "DHCP", "probes of the links' gateways (ICMP echo)"]
                .map(String::from)
                .into();
        let relays: Vec<&str> = self.peers.iter().map(String::as_str).collect();
        let relays = if relays.is_empty() { String::new() } else { format!(", now {}", relays.join(", ")) };
        exceptions.push(format!("Braid's own datagrams to the joined relays{relays}"));
        if all {
            let devices = self.links.devices();
            let networks = devices.iter().flat_map(|(_, facts)| local_networks(facts));
            let networks: BTreeSet<String> = networks.map(|net| net.to_string()).collect();
            let networks = networks.into_iter().collect::<Vec<_>>().join(", ");
            exceptions.push(format!("what stays on the links' own networks: {networks}"));
        }
        let policy = &self.in_force;
        let excepts = |matcher: &AppMatcher| !matcher.is_empty() && (!all || own_rule(matcher, None).is_some());
        let rules = policy.apps.iter().enumerate().filter(|(_, rule)| excepts(&rule.matcher) && !policy.confines(Some(rule)));
        exceptions.extend(rules.map(|(place, rule)| format!("{} {{ {} }}", self.rule_label(place), matcher_text(&rule.matcher))));
        let excluded = policy.exclude.matchers();
        exceptions.extend(excluded.iter().filter(|matcher| excepts(matcher)).map(|matcher| format!("[exclude] {}", matcher_text(matcher))));
        exceptions
    }

    /// What this machine may send over links although everything leaves through a relay only.
    pub(super) fn own_rules(&self, links: &[(usize, &LinkFacts)]) -> OwnRules {
        let policy = &self.in_force;
        // A port of a bridge sends no packets of this machine itself.
        let is_passed = |device: &&LinkFacts| {
            !policy.is_link(device) && device.master.is_none() && !device.addresses.is_empty() && device.name != DEPARTURE_DEVICE
        };
        let rules = self.configured_in_force().filter_map(|rule| {
            let allowed = if policy.confines(Some(rule)) { Some(Vec::new()) } else { allowed_links(rule, links) };
            own_rule(&rule.matcher, allowed)
        });
        let excluded = policy.exclude.matchers().into_iter().filter_map(|matcher| own_rule(&matcher, None));
        let routes = links.iter().flat_map(|(_, facts)| Family::ALL.map(|family| facts.gateways.get(family)));
        OwnRules {
            passed: self.network.interfaces.iter().filter(is_passed).map(|device| device.name.clone()).collect(),
            local: links.iter().map(|(_, facts)| (facts.name.clone(), local_networks(facts))).collect(),
            gateways: routes.flatten().filter_map(|route| route.gateway).collect(),
            rules: excluded.chain(rules).collect(),
        }
    }
}

/// The networks that a link is on. A network chooses its prefix itself, and by a short one it could draw the traffic of the Internet to it, so short
/// prefixes of public addresses are left out.
fn local_networks(facts: &LinkFacts) -> BTreeSet<IpNet> {
    facts.addresses.iter().map(IpNet::trunc).filter(is_local).collect()
}

/// The firewall's rule for packets of this machine. `None` if it matches none of them, or if the firewall does not know what it matches: a program, a
/// class, or a control group, which may be made anew at any time.
fn own_rule(matcher: &AppMatcher, links: Option<Vec<String>>) -> Option<ForwardRule> {
    let known = !matcher.is_empty() && !matcher.names_sender() && matcher.client.is_none();
    let AppMatcher { port, destination, user, .. } = *matcher;
    known.then(|| ForwardRule { user, destination, port, links, ..ForwardRule::default() })
}

/// Whether a prefix is so long, or so private, that what goes there stays near.
fn is_local(net: &IpNet) -> bool {
    match net {
        IpNet::V4(net) => net.prefix_len() >= 16 || net.network().is_private() && net.prefix_len() >= 8,
        IpNet::V6(net) => {
            net.prefix_len() >= 48 || net.network().is_unicast_link_local() || net.network().is_unique_local() && net.prefix_len() >= 8
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_with_a_short_prefix_is_not_local() {
        let local = |net: &str| is_local(&net.parse().unwrap());
        assert!(
            ["192.168.1.0/24", "10.0.0.0/8", "203.0.113.0/30", "100.64.0.0/16", "2001:db8::/64", "fe80::/64", "fd00::/8"]
                .into_iter()
                .all(local)
        );
        assert!(!["0.0.0.0/0", "128.0.0.0/1", "0.0.0.0/8", "203.0.0.0/15", "2000::/3", "::/0", "fc00::/7"].into_iter().any(local));
    }
}
