//! Rules that programs add at run time, and what the user's policy promises against them.

use braid_model::LinkFacts;

use super::{AppRule, MAX_RULES, Policy};

/// Why a program's rule cannot apply. The policy's own entries come first, so a program's rule never changes what they decide; these are the promises that
/// it could break for the other flows, or the reasons why it would match none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Objection {
    /// It has a condition on the context.
    #[error("it has when, which only entries of the configuration have: add the rule when it is to apply, and remove it afterwards")]
    Conditional,
    /// It guarantees a rate without regard to what the links can keep.
    #[error("it has guarantee, which only entries of the configuration have: reserve the rate instead")]
    Guarantee,
    /// `[exclude]` matches all its flows.
    #[error("[exclude] leaves all flows that it matches to the system: match others, or change [exclude]")]
    Excluded,
    /// An entry matches all its flows.
    #[error(
        "[[app]] entry {0} of the configuration matches all its flows, and entries of the configuration come first: match others, or change that entry"
    )]
    Shadowed(usize),
    /// All flows leave through a relay or fail.
    #[error(
        "fallback = \"none\" at the top of the configuration: all flows leave through a relay or fail, so leave out carry and fallback"
    )]
    Confined,
    /// All flows are bonded.
    #[error(
        "carry = \"bond\" at the top of the configuration: all flows are bonded, so only an entry of the configuration may except some"
    )]
    Bonded,
    /// All flows use one relay.
    #[error("the configuration names the relay {0} for all flows, so a program's rule names it, too, or leaves out carry and relay")]
    Relay(String),
    /// It uses a link that waits until the others fail.
    #[error("it names the link {0}, which has role = \"backup\" in the configuration: name other links, or change the role")]
    Backup(String),
    /// There are too many rules.
    #[error("exclusions, entries of the configuration and rules of programs are more than {MAX_RULES}: remove or merge some")]
    NoRoom,
}

impl Policy {
    /// Why the rule of a program cannot apply beside this policy ([`in_force`](Self::in_force)). `place`: its place among the programs' rules. `backups`: the
    /// links with the role backup.
    pub fn objection(&self, rule: &AppRule, place: usize, backups: &[&LinkFacts]) -> Option<Objection> {
        let exclusions = self.exclude.matchers();
        let shadows = |entry: &AppRule| !entry.matcher.is_empty() && entry.matcher.covers(&rule.matcher);
        let selects = |facts: &&&LinkFacts| rule.links.iter().flatten().chain(&rule.prefer).any(|selector| selector.matches(facts));
        if !rule.when.is_empty() {
            Some(Objection::Conditional)
        } else if rule.guarantee.is_some() {
            Some(Objection::Guarantee)
        } else if exclusions.iter().any(|matcher| matcher.covers(&rule.matcher)) {
            Some(Objection::Excluded)
        } else if let Some(entry) = self.apps.iter().position(shadows) {
            Some(Objection::Shadowed(entry + 1))
        } else if self.confines(None) && !self.confines(Some(rule)) {
            Some(Objection::Confined)
        } else if self.bonds_all && rule.carry == super::Carry::Direct {
            Some(Objection::Bonded)
        } else if let Some(relay) = self.relay.as_deref().filter(|relay| self.bonds_all && self.relay_of(Some(rule)) != Some(relay)) {
            Some(Objection::Relay(relay.to_owned()))
        } else if let Some(backup) = backups.iter().find(selects) {
            Some(Objection::Backup(backup.name.clone()))
        } else {
            (exclusions.len() + self.apps.len() + place >= MAX_RULES).then_some(Objection::NoRoom)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AppMatcher, Carry, Exclusions, Fallback, LinkSelector, Pattern, Portion, When};
    use super::*;
    use braid_model::{LinkIndex, LinkKind};

    fn named(names: &[&str]) -> Vec<LinkSelector> {
        names.iter().map(|name| LinkSelector::Name(Pattern::new(*name))).collect()
    }

    fn matching(name: &str) -> AppRule {
        AppRule { matcher: AppMatcher { name: Some(name.to_owned()), ..AppMatcher::default() }, ..AppRule::default() }
    }

    #[test]
    fn a_rule_that_could_never_match_names_what_comes_first() {
        let exclude = Exclusions { names: vec!["ssh".to_owned()], ..Exclusions::default() };
        let policy = Policy { exclude, apps: vec![AppRule::default(), matching("curl")], ..Policy::default() };
        assert_eq!(policy.objection(&matching("wget"), 0, &[]), None, "an entry without conditions in force matches nothing");
        assert_eq!(policy.objection(&matching("ssh"), 0, &[]), Some(Objection::Excluded));
        let mut narrower = matching("curl");
        narrower.matcher.port = Some(443);
        assert_eq!(policy.objection(&narrower, 0, &[]), Some(Objection::Shadowed(2)));
        let wider = AppRule { matcher: AppMatcher { port: Some(443), ..AppMatcher::default() }, ..AppRule::default() };
        assert_eq!(policy.objection(&wider, 0, &[]), None, "the entry decides only for its own flows");
        assert_eq!(policy.objection(&wider, MAX_RULES - 4, &[]), None);
        assert_eq!(policy.objection(&wider, MAX_RULES - 3, &[]), Some(Objection::NoRoom));
    }

    #[test]
    fn a_rule_may_not_lead_flows_around_the_relay() {
        let bonded = Policy { bonds_all: true, relay: Some("home".into()), ..Policy::default() };
        let confined = Policy { fallback: Fallback::None, ..bonded.clone() };
        let rule = |carry, relay: Option<&str>, fallback| AppRule { carry, relay: relay.map(str::to_owned), fallback, ..matching("curl") };
        let relay = || Some(Objection::Relay("home".into()));
        for (rule, beside_bonded, beside_confined) in [
            (rule(Carry::Auto, None, None), None, None),
            (rule(Carry::Bond, Some("home"), None), None, None),
            (rule(Carry::Bond, None, None), relay(), relay()),
            (rule(Carry::Bond, Some("work"), None), relay(), relay()),
            (rule(Carry::Direct, None, None), Some(Objection::Bonded), Some(Objection::Confined)),
            (rule(Carry::Bond, Some("home"), Some(Fallback::Direct)), None, Some(Objection::Confined)),
        ] {
            assert_eq!(bonded.objection(&rule, 0, &[]), beside_bonded, "{rule:?}");
            assert_eq!(confined.objection(&rule, 0, &[]), beside_confined, "{rule:?}");
            assert_eq!(Policy::default().objection(&rule, 0, &[]), None, "{rule:?}");
        }
    }

    #[test]
    fn a_rule_may_not_name_a_backup_link_a_condition_or_a_guarantee() {
        let lte = LinkFacts::new(LinkIndex(2), "lte0", LinkKind::Cellular);
        let strict = AppRule { links: Some(named(&["wlan0", "lte*"])), ..matching("curl") };
        let soft = AppRule { prefer: named(&["lte0"]), ..matching("curl") };
        for rule in [&strict, &soft] {
            assert_eq!(Policy::default().objection(rule, 0, &[&lte]), Some(Objection::Backup("lte0".into())));
            assert_eq!(Policy::default().objection(rule, 0, &[]), None);
        }
        let running = AppRule { when: When { running: Some("game".into()), ..When::default() }, ..matching("curl") };
        assert_eq!(Policy::default().objection(&running, 0, &[]), Some(Objection::Conditional));
        // Together with the user's guarantees it could exceed a link, and each would get less.
        let all = AppRule { guarantee: Some(Portion::Share(1.0)), ..matching("curl") };
        assert_eq!(Policy::default().objection(&all, 0, &[]), Some(Objection::Guarantee));
    }
}
