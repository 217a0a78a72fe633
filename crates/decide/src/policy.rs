//! The user's policy: the scheduler, the roles of links, and which application may use which links (the interface preferences Π of the papers).
//!
//! Plain types and pure functions. `crates/config` parses the configuration file into them. The BPF program evaluates the same functions at `connect`
//! ([`first_match`](Policy::first_match), [`admit`]); a test checks that both agree.

mod apps;
mod bond;
mod links;
mod programs;
mod when;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use braid_model::{Affinity, ByteCount, Class, LinkFacts, LinkKind, LinkSet};
use serde::{Deserialize, Serialize};

use crate::connection::Mode;
use crate::late::LateBinding;
use crate::outlet;
use crate::tables;
use crate::tradeoff::{UtilityRule, Weights};
use crate::tunnel;
use crate::virtual_device::VirtualDevice;
use crate::virtual_interface::MAXDIFF;

pub use crate::pattern::{NAME_LIMIT, Pattern};
pub use apps::{AppMatcher, AppRule, COPIES, Carry, Client, ClientMatcher, Exclusions, Fallback, Portion, Preference, Resolve, Subject};
pub use bond::BondScheduler;
pub use links::{HttpTarget, LINK_KINDS, LinkMatcher, LinkRule, LinkSelector, MeasureServer, ProbeMode, ProbeTarget};
pub use programs::Objection;
pub use when::{
    Clock, FACT_NAME_LIMIT, FACT_VALUE_LIMIT, Facts, InvalidWindow, MOVING, RESERVED_FACTS, TimeWindow, When, is_fact_name, is_fact_value,
    names_program,
};

/// Maximum number of rules evaluated for a flow: exclusions, `[[app]]` entries and rules of programs.
pub const MAX_RULES: usize = 64;

/// The user's complete policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// How the link of a new connection is chosen.
    pub scheduler: Scheduler,
    /// How bonds choose paths; `None`: [`BondScheduler::Weights`] under [`Scheduler::Operetta`], else [`BondScheduler::Midrr`].
    pub bond_scheduler: Option<BondScheduler>,
    /// Whether flows that no rule carries otherwise are bonded while a relay is reachable.
    pub bonds_all: bool,
    /// The relay that carries them; `None`: any that is joined.
    pub relay: Option<String>,
    /// What happens to flows that are to be bonded while no relay takes them, unless their rule says otherwise.
    pub fallback: Fallback,
    /// Which flows of a program share one link; `None` selects by class ([`affinity`](Self::affinity)).
    pub affinity: Option<Affinity>,
    /// Expected size of a flow of an unknown application.
    pub default_demand: ByteCount,
    /// Utility of throughput relative to its price, for [`Scheduler::Operetta`].
    pub utility: UtilityRule,
    /// Weights of energy and money in the price.
    pub weights: Weights,
    /// [`Scheduler::Handover`] moves to another link only if its round-trip time is shorter by more than this.
    pub hysteresis: Duration,
    /// On a low battery, all flows use the link that needs the least energy (`virtual_interface::saves_power`).
    pub power_saving: bool,
    /// `[[link]]` entries; the first that matches a device applies.
    pub links: Vec<LinkRule>,
    /// `[[app]]` entries; the first that matches a flow applies.
    pub apps: Vec<AppRule>,
    /// Flows that Braid leaves to the system.
    pub exclude: Exclusions,
    /// LAN devices of the gateway: Braid forwards the flows of the clients behind them.
    pub lan: Vec<String>,
    /// Whether the gateway's flows may take the fast path.
    pub fast_path: bool,
    /// How packets wait for links, if they do.
    pub late: Option<LateBinding>,
    /// The virtual interface, if there is to be one.
    pub virtual_device: Option<VirtualDevice>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            scheduler: Scheduler::default(),
            bond_scheduler: None,
            bonds_all: false,
            relay: None,
            fallback: Fallback::default(),
            affinity: None,
            default_demand: ByteCount::new(1_000_000),
            utility: UtilityRule::default(),
            weights: Weights::default(),
            hysteresis: MAXDIFF,
            power_saving: false,
            links: Vec::new(),
            apps: Vec::new(),
            exclude: Exclusions::default(),
            lan: Vec::new(),
            fast_path: true,
            late: None,
            virtual_device: None,
        }
    }
}

/// Whether Braid makes devices of this name, except the virtual interface, whose name the configuration sets.
pub fn is_made(device: &str) -> bool {
    let made = [
        tables::PACKET_DEVICE,
        tables::DEPARTURE_DEVICE,
        tables::LATE_DEVICE,
        outlet::DEVICE,
        tunnel::CLIENT_DEVICE,
        tunnel::SERVER_DEVICE,
    ];
    made.contains(&device)
}

impl Policy {
    /// Index of the first `[[app]]` entry whose conditions all hold.
    pub fn first_match(&self, subject: &Subject<'_>) -> Option<usize> {
        self.apps.iter().position(|rule| rule.matcher.matches(subject))
    }

    /// The policy that applies with these facts. Entries whose condition does not hold keep their position, so that the kernel's rule numbers
    /// stay valid, but get an empty matcher, which matches nothing.
    pub fn in_force(&self, facts: &Facts<'_>) -> Self {
        let mut policy = self.clone();
        for rule in policy.apps.iter_mut().filter(|rule| !rule.when.holds(facts)) {
            rule.matcher = AppMatcher::default();
        }
        for rule in policy.links.iter_mut().filter(|rule| !rule.when.holds(facts)) {
            rule.matcher = LinkMatcher::default();
        }
        policy
    }

    /// The conditions of all entries.
    pub fn conditions(&self) -> impl Iterator<Item = &When> {
        self.apps.iter().map(|rule| &rule.when).chain(self.links.iter().map(|rule| &rule.when)).filter(|when| !when.is_empty())
    }

    /// Whether `[exclude]` leaves the flow to the system. This is evaluated before any rule.
    pub fn excludes(&self, subject: &Subject<'_>) -> bool {
        self.exclude.matchers().iter().any(|matcher| matcher.matches(subject))
    }

    /// The first `[[link]]` entry that matches a device.
    pub fn link_rule(&self, device: &LinkFacts) -> Option<&LinkRule> {
        self.links.iter().find(|rule| rule.matcher.matches(device))
    }

    /// Whether a device counts as a link, usable or not.
    ///
    /// Wired, wireless and cellular devices do. VPNs and virtual devices do if an entry selects them by kind, hardware address or a name pattern with
    /// at least one letter (a bare `*` or an address prefix is not enough). Loopback never does.
    ///
    /// A LAN device of the gateway never is, nor is a device that Braid made.
    pub fn is_link(&self, device: &LinkFacts) -> bool {
        let own = self.virtual_device.as_ref().map(|own| own.name.as_str());
        if own == Some(device.name.as_str()) || is_made(&device.name) || self.forwarded_devices().contains(&device.name) {
            return false;
        }
        match device.kind {
            LinkKind::Wired | LinkKind::Wireless | LinkKind::Cellular => true,
            LinkKind::Vpn | LinkKind::Virtual => self.link_rule(device).is_some_and(|rule| rule.matcher.singles_out()),
            LinkKind::Loopback => false,
        }
    }

    /// Names of the devices from which Braid forwards: the LAN devices, and the switch's end of the virtual interface.
    pub fn forwarded_devices(&self) -> Vec<String> {
        self.lan.iter().cloned().chain(self.virtual_device.as_ref().map(VirtualDevice::switch_end)).collect()
    }

    /// Whether Braid forwards anything.
    pub fn forwards(&self) -> bool {
        !self.lan.is_empty() || self.virtual_device.is_some()
    }

    /// The only relay that may carry a flow with this rule; `None`: any.
    pub fn relay_of<'a>(&'a self, rule: Option<&'a AppRule>) -> Option<&'a str> {
        let usual = || self.relay.as_deref().filter(|_| self.bonds_all && rule.is_none_or(|rule| rule.carry == Carry::Auto));
        rule.and_then(|rule| rule.relay.as_deref()).or_else(usual)
    }

    /// Whether a flow with this rule is to be bonded. `None`: a flow that no rule matches.
    pub fn bonds(&self, rule: Option<&AppRule>) -> bool {
        rule.map_or(self.bonds_all, |rule| rule.carry.needs_peer() || rule.carry == Carry::Auto && self.bonds_all)
    }

    /// Whether a flow with this rule leaves through a relay or fails (`fallback = "none"`). `None`: a flow that no rule matches. What
    /// [`excludes`](Self::excludes) matches is not confined.
    pub fn confines(&self, rule: Option<&AppRule>) -> bool {
        self.bonds(rule) && rule.and_then(|rule| rule.fallback).unwrap_or(self.fallback) == Fallback::None
    }

    /// How bonds choose paths.
    pub fn bond_scheduler(&self) -> BondScheduler {
        self.bond_scheduler.unwrap_or(if self.scheduler == Scheduler::Operetta { BondScheduler::Weights } else { BondScheduler::Midrr })
    }

    /// Which flows of a program share one link: from its rule, else from the policy, else from its class (browsers: destination).
    pub fn affinity(&self, rule: Option<&AppRule>, class: Class) -> Affinity {
        rule.and_then(|rule| rule.affinity).or(self.affinity).unwrap_or(match class {
            Class::Browser => Affinity::Destination,
            Class::Unclassified | Class::RealTime | Class::Bulk => Affinity::None,
        })
    }
}

/// How the link of a new connection is chosen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheduler {
    /// The system's own choice.
    OnlyOne,
    /// Links in rotation.
    RoundRobin,
    /// Links in proportion to their capacities.
    WeightedRoundRobin,
    /// The link on which the flow is expected to end first.
    #[default]
    MaxThroughput,
    /// The cheapest link, in energy and money, that meets a target throughput.
    Operetta,
    /// Links in inverse proportion to their round-trip times ([`virtual_interface::shares`](crate::virtual_interface::shares)).
    RttShare,
    /// All flows on the link with the shortest round-trip time. It changes only for a link that is shorter by more than `hysteresis`
    /// ([`virtual_interface::Handover`](crate::virtual_interface::Handover)).
    Handover,
    /// The link that finishes its own load and the flow first: the papers' maximum throughput ([`Mode::LeastFinish`]).
    LeastFinish,
    /// The link with which the whole system's load is done first: the papers' objective as printed ([`Mode::LeastMakespan`]).
    LeastMakespan,
    /// A random link.
    Random,
}

impl Scheduler {
    /// All schedulers, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::OnlyOne,
        Self::RoundRobin,
        Self::WeightedRoundRobin,
        Self::MaxThroughput,
        Self::Operetta,
        Self::RttShare,
        Self::Handover,
        Self::LeastFinish,
        Self::LeastMakespan,
        Self::Random,
    ];

    /// Whether the scheduler spreads flows over all links for speed, instead of using the few that are best by another measure.
    pub const fn spreads(self) -> bool {
        match self {
            Self::RoundRobin | Self::WeightedRoundRobin | Self::MaxThroughput | Self::RttShare => true,
            Self::LeastFinish | Self::LeastMakespan | Self::Random => true,
            Self::OnlyOne | Self::Operetta | Self::Handover => false,
        }
    }

    /// Name in the configuration and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OnlyOne => "only-one",
            Self::RoundRobin => "round-robin",
            Self::WeightedRoundRobin => "weighted-round-robin",
            Self::MaxThroughput => "max-throughput",
            Self::Operetta => "operetta",
            Self::RttShare => "rtt-share",
            Self::Handover => "handover",
            Self::LeastFinish => "least-finish",
            Self::LeastMakespan => "least-makespan",
            Self::Random => "random",
        }
    }

    /// The placement rule that implements the scheduler. Operetta's still needs its target ([`target`](crate::tradeoff::target)).
    pub const fn mode(self) -> Mode {
        match self {
            Self::OnlyOne | Self::Handover => Mode::OnlyOne,
            Self::RoundRobin | Self::WeightedRoundRobin | Self::RttShare => Mode::VirtualStart,
            Self::MaxThroughput | Self::Operetta => Mode::CheapestInTime { target: None },
            Self::LeastFinish => Mode::LeastFinish,
            Self::LeastMakespan => Mode::LeastMakespan,
            Self::Random => Mode::Random,
        }
    }

    /// Whether the steps of virtual time follow the links' weights ([`steps`](crate::connection::steps)): capacities or shares.
    pub const fn weighted(self) -> bool {
        matches!(self, Self::WeightedRoundRobin | Self::RttShare)
    }

    /// Whether the scheduler needs data that only the daemon has: a policy, round-trip times.
    pub const fn needs_daemon(self) -> bool {
        matches!(self, Self::Operetta | Self::RttShare | Self::Handover)
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that is not one of the valid values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {wanted}")]
pub struct InvalidText {
    text: String,
    wanted: &'static str,
}

impl FromStr for Scheduler {
    type Err = InvalidText;
    fn from_str(text: &str) -> Result<Self, InvalidText> {
        let wanted = "a scheduler: write max-throughput, least-finish, least-makespan, weighted-round-robin, round-robin, random, operetta, \
                      rtt-share, handover or only-one";
        Self::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| InvalidText { text: text.to_owned(), wanted })
    }
}

/// Which links a flow may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// One of these; never empty.
    Use(LinkSet),
    /// No link, and the rule is strict: the flow must fail.
    Deny,
    /// No link: the system decides.
    LeaveAlone,
}

/// Determines the links that a flow may use, from its rule and the state of the links.
///
/// `usable`: the links that are alive in the flow's family, have allowance left and are not excluded. `backup`: the links with the role backup.
/// `links` and `prefer`: the masks of the rule's selectors; `None` if the rule has none. Backup links are used only if the remaining set has no
/// normal link. A preferred backup link counts as preferred.
pub fn admit(usable: LinkSet, backup: LinkSet, links: Option<LinkSet>, prefer: Option<LinkSet>) -> Admission {
    let mut pool = usable;
    if let Some(links) = links {
        pool = pool & links;
        if pool.is_empty() {
            return Admission::Deny;
        }
    }
    if let Some(prefer) = prefer.filter(|prefer| !(pool & *prefer).is_empty()) {
        pool = pool & prefer;
    }
    let normal = pool - backup;
    match if normal.is_empty() { pool } else { normal } {
        LinkSet::EMPTY => Admission::LeaveAlone,
        links => Admission::Use(links),
    }
}

#[cfg(test)]
mod tests {
    use super::apps::tests::curl;
    use super::links::tests::{device, named};
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_matching_entry_decides() {
        let rule = |matcher, weight| AppRule { matcher, weight, ..AppRule::default() };
        let by_port = AppMatcher { port: Some(443), ..AppMatcher::default() };
        let by_name = AppMatcher { name: Some("curl".into()), ..AppMatcher::default() };
        let other = AppMatcher { port: Some(22), ..AppMatcher::default() };
        let policy = Policy { apps: vec![rule(other, 1.0), rule(by_name, 2.0), rule(by_port, 3.0)], ..Policy::default() };
        assert_eq!(policy.first_match(&curl()), Some(1));
        assert_eq!(policy.first_match(&Subject { name: "wget", ..curl() }), Some(2));
        assert_eq!(policy.first_match(&Subject { name: "wget", port: 80, ..curl() }), None);
    }

    #[test]
    fn an_entry_whose_condition_does_not_hold_matches_nothing_and_keeps_its_place() {
        let moving = When { facts: [(MOVING.to_owned(), "true".to_owned())].into(), ..When::default() };
        let matcher = AppMatcher { name: Some("curl".into()), ..AppMatcher::default() };
        let conditional = AppRule { matcher: matcher.clone(), when: moving.clone(), weight: 2.0, ..AppRule::default() };
        let policy = Policy {
            apps: vec![conditional, AppRule { matcher, ..AppRule::default() }],
            links: vec![LinkRule { matcher: named("eth*"), when: moving, priority: 1, ..LinkRule::default() }],
            ..Policy::default()
        };
        let (eth, none) = (device("eth0", LinkKind::Wired), Default::default());
        let with = |value: &str| {
            let values = [(MOVING.to_owned(), value.to_owned())].into();
            policy.in_force(&Facts { values: &values, running: &|_| false, time_of_day: None, battery: None, ssids: &none })
        };
        assert_eq!((with("true").first_match(&curl()), with("false").first_match(&curl())), (Some(0), Some(1)));
        assert_eq!((with("true").link_rule(&eth).map(|rule| rule.priority), with("false").link_rule(&eth)), (Some(1), None));
        assert_eq!(policy.conditions().count(), 2);
    }

    #[test]
    fn any_exclusion_excludes() {
        let exclude = Exclusions { users: vec![7], names: vec!["curl".into()], ..Exclusions::default() };
        let policy = Policy { exclude, ..Policy::default() };
        assert!(policy.excludes(&curl()));
        assert!(policy.excludes(&Subject { name: "x", user: Some(7), ..curl() }));
        assert!(!policy.excludes(&Subject { name: "x", ..curl() }));
    }

    #[test]
    fn virtual_devices_are_links_only_when_singled_out() {
        let policy = |matcher| Policy { links: vec![LinkRule { matcher, ..LinkRule::default() }], ..Policy::default() };
        let bridge = device("docker0", LinkKind::Virtual);
        assert!(!Policy::default().is_link(&bridge));
        assert!(!policy(named("*")).is_link(&bridge));
        assert!(!policy(LinkMatcher { address: Some("10.0.0.0/8".parse().unwrap()), ..LinkMatcher::default() }).is_link(&bridge));
        assert!(policy(named("docker*")).is_link(&bridge));
        assert!(policy(LinkMatcher { kind: Some(LinkKind::Virtual), ..LinkMatcher::default() }).is_link(&bridge));
        assert!(!policy(named("lo")).is_link(&device("lo", LinkKind::Loopback)));
        assert!(Policy::default().is_link(&device("eth0", LinkKind::Wired)));
    }

    #[test]
    fn browsers_keep_their_link_per_destination_unless_configured_otherwise() {
        let mut policy = Policy::default();
        assert_eq!(policy.affinity(None, Class::Browser), Affinity::Destination);
        assert_eq!(policy.affinity(None, Class::Bulk), Affinity::None);
        policy.affinity = Some(Affinity::None);
        assert_eq!(policy.affinity(None, Class::Browser), Affinity::None);
        let rule = AppRule { affinity: Some(Affinity::Application), ..AppRule::default() };
        assert_eq!(policy.affinity(Some(&rule), Class::Browser), Affinity::Application);
    }

    #[test]
    fn schedulers_parse_from_their_names() {
        for scheduler in Scheduler::ALL {
            assert_eq!(scheduler.to_string().parse(), Ok(scheduler));
        }
        assert!("fastest".parse::<Scheduler>().unwrap_err().to_string().contains("max-throughput"));
    }

    #[test]
    fn a_strict_rule_denies_and_no_rule_leaves_alone() {
        let (none, first, second) = (LinkSet::EMPTY, LinkSet(1), LinkSet(2));
        assert_eq!(admit(first, none, Some(second), None), Admission::Deny);
        assert_eq!(admit(first, none, None, Some(second)), Admission::Use(first));
        assert_eq!(admit(none, none, None, None), Admission::LeaveAlone);
        assert_eq!(admit(LinkSet(3), second, None, None), Admission::Use(first));
        assert_eq!(admit(second, second, None, None), Admission::Use(second));
        assert_eq!(admit(LinkSet(3), second, None, Some(second)), Admission::Use(second));
        assert_eq!(admit(none, none, Some(first), Some(first)), Admission::Deny);
    }

    proptest! {
        #[test]
        fn admission_keeps_to_the_rule(
            usable: u64, backup: u64, links in prop::option::of(any::<u64>()), prefer in prop::option::of(any::<u64>()),
        ) {
            let pool = usable & links.unwrap_or(u64::MAX);
            match admit(LinkSet(usable), LinkSet(backup), links.map(LinkSet), prefer.map(LinkSet)) {
                Admission::Use(LinkSet(mask)) => {
                    prop_assert!(mask != 0 && mask & !pool == 0);
                    if prefer.is_some_and(|prefer| pool & prefer != 0) {
                        prop_assert_eq!(mask & !prefer.unwrap(), 0);
                    }
                    // Normal and backup links are never mixed, and backup links are used only if there is no normal one.
                    prop_assert!(mask & backup == 0 || mask & !backup == 0);
                    if mask & backup != 0 && prefer.is_none() {
                        prop_assert_eq!(pool & !backup, 0);
                    }
                }
                Admission::Deny => prop_assert!(links.is_some() && pool == 0),
                Admission::LeaveAlone => prop_assert!(links.is_none() && usable == 0),
            }
        }
    }
}
