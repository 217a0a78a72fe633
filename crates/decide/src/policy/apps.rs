//! Application rules: conditions on flows, and the treatment of the flows that match.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use braid_model::{Affinity, Class, Mac, Protocol, Rate};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::links::LinkSelector;
use super::when::When;
use crate::pattern::kernel_name;

/// How a flow is transported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carry {
    /// Braid chooses.
    #[default]
    Auto,
    /// By the kernel, over one link.
    Direct,
    /// To a peer over all links; directly if no peer is reachable.
    Bond,
    /// To a peer, with each packet sent over several links; directly if no peer is reachable.
    Duplicate,
}

/// Where the host names requested by clients of Braid's proxy are resolved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolve {
    /// On this machine.
    #[default]
    Here,
    /// At the relay that carries the connection; on this machine if no relay can.
    Relay,
}

impl Resolve {
    /// All variants with their names in the configuration.
    pub const ALL: [(&str, Self); 2] = [("here", Self::Here), ("relay", Self::Relay)];

    /// Name in the configuration.
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// What happens to a flow that is to be bonded, but that no relay takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fallback {
    /// It leaves over a link, as without a relay.
    #[default]
    Direct,
    /// It fails.
    None,
}

impl Fallback {
    /// All variants with their names in the configuration.
    pub const ALL: [(&str, Self); 2] = [("direct", Self::Direct), ("none", Self::None)];

    /// Name in the configuration.
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// Default number of links over which each packet of a duplicated flow is sent.
pub const COPIES: u8 = 2;

impl Carry {
    /// All variants with their names in the configuration.
    pub const ALL: [(&str, Self); 4] =
        [("auto", Self::Auto), ("direct", Self::Direct), ("bond", Self::Bond), ("duplicate", Self::Duplicate)];

    /// Name in the configuration.
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }

    /// Whether it requires a peer.
    pub const fn needs_peer(self) -> bool {
        matches!(self, Self::Bond | Self::Duplicate)
    }
}

/// An `[[app]]` entry: a matcher, and the settings for the flows that match.
#[derive(Debug, Clone, PartialEq)]
pub struct AppRule {
    /// Selects the flows.
    pub matcher: AppMatcher,
    /// Context in which the entry applies.
    pub when: When,
    /// The only links that the flows may use; if none is usable, the flow fails.
    pub links: Option<Vec<LinkSelector>>,
    /// The links that the flows use if any of them is usable.
    pub prefer: Vec<LinkSelector>,
    /// Traffic class, which overrides the learned one.
    pub class: Option<Class>,
    /// Which flows share one link.
    pub affinity: Option<Affinity>,
    /// How the flows are transported.
    pub carry: Carry,
    /// Number of links over which each packet is sent in duplicate mode: at least 2, at most the number of links.
    pub copies: u8,
    /// Name of the only relay that may carry the flows; `None` allows any relay.
    pub relay: Option<String>,
    /// What happens if no relay takes the flows, if they are to be bonded; `None`: what the policy says ([`Policy::fallback`](super::Policy::fallback)).
    pub fallback: Option<Fallback>,
    /// Where destination names are resolved, if they are known: only clients of the proxy provide names.
    pub resolve: Resolve,
    /// Weight relative to other flows (φ); the default is 1.
    pub weight: f64,
    /// Whether the entry gives a weight, also one of 1. Rules that name clients then share the link between them.
    pub weighs: bool,
    /// The most that the rule's flows get together on one link, in each direction. Direct TCP flows only.
    pub rate: Option<Portion>,
    /// The least that they get together on one link, as far as they want it, in each direction. Direct TCP flows only.
    pub guarantee: Option<Portion>,
}

/// An amount of a link's capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Portion {
    /// A fixed rate.
    Rate(Rate),
    /// A share of the link's current capacity, above 0 and at most 1.
    Share(f64),
}

impl Portion {
    /// The rate on a link of this capacity; `None` if that depends on an unknown capacity.
    pub fn of(self, capacity: Option<Rate>) -> Option<Rate> {
        match self {
            Self::Rate(rate) => Some(rate),
            Self::Share(share) => capacity.map(|capacity| capacity.scale(share)),
        }
    }
}

impl fmt::Display for Portion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(rate) => write!(f, "{rate}"),
            Self::Share(share) => write!(f, "{} %", (share * 1e4).round() / 100.0),
        }
    }
}

/// What a rule asks for its direct TCP flows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Preference {
    /// Weight (φ) of each flow of this machine, and of each client as a whole.
    pub weight: f64,
    /// Whether the weight divides the links between clients even if it is 1.
    pub among_clients: bool,
    /// The most that they get together on one link, in each direction.
    pub rate: Option<Portion>,
    /// The least that they get together on one link.
    pub guarantee: Option<Portion>,
}

impl Default for Preference {
    fn default() -> Self {
        Self { weight: 1.0, among_clients: false, rate: None, guarantee: None }
    }
}

impl Preference {
    /// Whether the flows need something of the other flows on their link, not only a limit of their own.
    pub fn shares(&self) -> bool {
        (self.weight - 1.0).abs() > f64::EPSILON || self.among_clients || self.guarantee.is_some()
    }
}

impl AppRule {
    /// What the rule asks for its direct TCP flows.
    pub fn preference(&self) -> Preference {
        let among_clients = self.weighs && self.matcher.client.is_some();
        Preference { weight: self.weight, among_clients, rate: self.rate, guarantee: self.guarantee }
    }
}

impl Default for AppRule {
    fn default() -> Self {
        Self {
            matcher: AppMatcher::default(),
            when: When::default(),
            links: None,
            prefer: Vec::new(),
            class: None,
            affinity: None,
            carry: Carry::default(),
            copies: COPIES,
            relay: None,
            fallback: None,
            resolve: Resolve::default(),
            weight: 1.0,
            weighs: false,
            rate: None,
            guarantee: None,
        }
    }
}

/// Conditions on a flow; all conditions that are set must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AppMatcher {
    /// Path of the executable.
    pub exe: Option<PathBuf>,
    /// Name of the process; bytes beyond [`NAME_LIMIT`](super::NAME_LIMIT) are ignored.
    pub name: Option<String>,
    /// Remote port.
    pub port: Option<u16>,
    /// Transport protocol. Only rules of a remote controller name one.
    pub protocol: Option<Protocol>,
    /// Prefix that contains the remote address.
    pub destination: Option<IpNet>,
    /// Control group that contains the program, directly or below it: a path from the root of the hierarchy, such as `/user.slice`.
    pub cgroup: Option<String>,
    /// User ID of the program.
    pub user: Option<u32>,
    /// Client of the proxy or of the gateway; this machine's own flows never match.
    pub client: Option<ClientMatcher>,
    /// Class of the application. Of a rule's own `class` it is independent: that one applies after the match.
    pub class: Option<Class>,
}

/// Selects a client of Braid's proxy or of its gateway, which represents the application whose flows it carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientMatcher {
    /// Prefix that contains the client's address.
    Network(IpNet),
    /// Hardware address of a client of the gateway.
    Mac(Mac),
    /// User name with which a client of the proxy has authenticated.
    User(String),
}

impl ClientMatcher {
    fn matches(&self, client: &Client<'_>) -> bool {
        match self {
            Self::Network(net) => net.contains(&client.address.to_canonical()),
            Self::Mac(mac) => client.mac == Some(*mac),
            Self::User(name) => client.user == Some(name),
        }
    }

    fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Network(mine), Self::Network(theirs)) => mine.contains(theirs),
            (mine, theirs) => mine == theirs,
        }
    }
}

impl fmt::Display for ClientMatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(net) => write!(f, "{net}"),
            Self::Mac(mac) => write!(f, "{mac}"),
            Self::User(name) => f.write_str(name),
        }
    }
}

impl AppMatcher {
    /// Whether it has a condition on the program, its control group or its class, which a packet does not show.
    pub fn names_sender(&self) -> bool {
        self.exe.is_some() || self.name.is_some() || self.cgroup.is_some() || self.class.is_some()
    }

    /// Whether all conditions hold. A matcher without conditions matches nothing.
    pub fn matches(&self, subject: &Subject<'_>) -> bool {
        !self.is_empty()
            && self.exe.as_ref().is_none_or(|exe| subject.exe == Some(exe))
            && self.name.as_ref().is_none_or(|name| kernel_name(name) == kernel_name(subject.name))
            && self.port.is_none_or(|port| port == subject.port)
            && self.protocol.is_none_or(|protocol| subject.protocol == Some(protocol))
            && self.destination.is_none_or(|net| net.contains(&subject.destination.to_canonical()))
            && self.cgroup.as_ref().is_none_or(|group| subject.cgroup.is_some_and(|have| lies_in(have, group)))
            && self.user.is_none_or(|user| subject.user == Some(user))
            && self.client.as_ref().is_none_or(|client| subject.client.is_some_and(|have| client.matches(&have)))
            && self.class.is_none_or(|class| class == subject.class)
    }

    /// Whether no condition is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether this matcher matches every flow that `other` matches.
    pub fn covers(&self, other: &Self) -> bool {
        fn same<T: PartialEq>(mine: &Option<T>, theirs: &Option<T>) -> bool {
            mine.is_none() || mine == theirs
        }
        same(&self.exe, &other.exe)
            && self.name.as_ref().is_none_or(|name| other.name.as_ref().is_some_and(|their| kernel_name(name) == kernel_name(their)))
            && same(&self.port, &other.port)
            && same(&self.protocol, &other.protocol)
            && self.destination.is_none_or(|net| other.destination.is_some_and(|their| net.contains(&their)))
            && self.cgroup.as_ref().is_none_or(|group| other.cgroup.as_ref().is_some_and(|their| lies_in(their, group)))
            && same(&self.user, &other.user)
            && self.client.as_ref().is_none_or(|client| other.client.as_ref().is_some_and(|their| client.covers(their)))
            && same(&self.class, &other.class)
    }
}

fn lies_in(group: &str, above: &str) -> bool {
    let above = above.trim_end_matches('/');
    group.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A flow as input to the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject<'a> {
    /// Path of the program's executable.
    pub exe: Option<&'a Path>,
    /// Name of the process.
    pub name: &'a str,
    /// Remote port.
    pub port: u16,
    /// Transport protocol; `None`: unknown.
    pub protocol: Option<Protocol>,
    /// Remote address; an IPv4-mapped address counts as IPv4.
    pub destination: IpAddr,
    /// Control group of the program: a path from the root of the hierarchy.
    pub cgroup: Option<&'a str>,
    /// User ID of the program.
    pub user: Option<u32>,
    /// Client of the proxy or of the gateway to which the flow belongs.
    pub client: Option<Client<'a>>,
    /// Class of the application.
    pub class: Class,
}

/// A client of the proxy or of the gateway as input to the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client<'a> {
    /// Address of the client.
    pub address: IpAddr,
    /// User name with which the client has authenticated to the proxy.
    pub user: Option<&'a str>,
    /// Hardware address of a client of the gateway.
    pub mac: Option<Mac>,
}

/// Flows that Braid leaves to the system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// Paths of executables.
    pub exes: Vec<PathBuf>,
    /// Process names.
    pub names: Vec<String>,
    /// User IDs.
    pub users: Vec<u32>,
    /// Control groups, including those below them.
    pub cgroups: Vec<String>,
    /// Destination prefixes.
    pub destinations: Vec<IpNet>,
}

impl Exclusions {
    /// One matcher per exclusion: a flow is excluded if any of them matches.
    pub fn matchers(&self) -> Vec<AppMatcher> {
        let none = AppMatcher::default;
        let exes = self.exes.iter().map(|exe| AppMatcher { exe: Some(exe.clone()), ..none() });
        let names = self.names.iter().map(|name| AppMatcher { name: Some(name.clone()), ..none() });
        let users = self.users.iter().map(|user| AppMatcher { user: Some(*user), ..none() });
        let cgroups = self.cgroups.iter().map(|group| AppMatcher { cgroup: Some(group.clone()), ..none() });
        let destinations = self.destinations.iter().map(|net| AppMatcher { destination: Some(*net), ..none() });
        exes.chain(names).chain(users).chain(cgroups).chain(destinations).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(in crate::policy) fn curl() -> Subject<'static> {
        Subject {
            exe: Some(Path::new("/usr/bin/curl")),
            name: "curl",
            port: 443,
            protocol: Some(Protocol::Tcp),
            destination: "192.0.2.7".parse().unwrap(),
            cgroup: Some("/user.slice/user-1000.slice"),
            user: Some(1000),
            client: None,
            class: Class::Unclassified,
        }
    }

    #[test]
    fn a_class_rule_matches_applications_of_its_class_only() {
        let calls = AppMatcher { class: Some(Class::RealTime), ..AppMatcher::default() };
        assert!(calls.matches(&Subject { class: Class::RealTime, ..curl() }) && !calls.matches(&curl()) && !calls.is_empty());
        assert!(calls.covers(&AppMatcher { name: Some("zoom".into()), ..calls.clone() }) && !calls.covers(&AppMatcher::default()));
    }

    #[test]
    fn a_client_rule_matches_proxied_flows_only() {
        let rule = |client| AppMatcher { client: Some(client), ..AppMatcher::default() };
        let network = rule(ClientMatcher::Network("192.168.7.0/24".parse().unwrap()));
        let ann = rule(ClientMatcher::User("ann".into()));
        let from = |address: &str, user| Subject { client: Some(Client { address: address.parse().unwrap(), user, mac: None }), ..curl() };
        assert!(network.matches(&from("::ffff:192.168.7.9", None)) && !network.matches(&from("192.168.8.9", Some("ann"))));
        assert!(ann.matches(&from("192.168.8.9", Some("ann"))) && !ann.matches(&from("192.168.7.9", None)));
        assert!(!network.matches(&curl()) && !ann.matches(&curl()));
        assert!(network.covers(&rule(ClientMatcher::Network("192.168.7.9/32".parse().unwrap()))) && !network.covers(&ann));
    }

    #[test]
    fn every_condition_of_a_rule_must_hold() {
        let all = AppMatcher {
            exe: Some("/usr/bin/curl".into()),
            name: Some("curl".into()),
            port: Some(443),
            protocol: Some(Protocol::Tcp),
            destination: Some("192.0.2.0/24".parse().unwrap()),
            cgroup: Some("/user.slice/".into()),
            user: Some(1000),
            client: None,
            class: Some(Class::Unclassified),
        };
        assert!(all.matches(&curl()));
        for broken in [
            AppMatcher { exe: Some("/usr/bin/wget".into()), ..all.clone() },
            AppMatcher { name: Some("wget".into()), ..all.clone() },
            AppMatcher { port: Some(80), ..all.clone() },
            AppMatcher { protocol: Some(Protocol::Udp), ..all.clone() },
            AppMatcher { destination: Some("192.0.3.0/24".parse().unwrap()), ..all.clone() },
            AppMatcher { cgroup: Some("/user".into()), ..all.clone() },
            AppMatcher { user: Some(0), ..all.clone() },
            AppMatcher { class: Some(Class::Bulk), ..all.clone() },
        ] {
            assert!(!broken.matches(&curl()), "{broken:?}");
        }
        assert!(!AppMatcher::default().matches(&curl()), "an empty matcher must not match everything");
    }

    #[test]
    fn mapped_addresses_match_ipv4_prefixes_and_names_are_truncated_like_the_kernel_s() {
        let net = AppMatcher { destination: Some("192.0.2.0/24".parse().unwrap()), ..AppMatcher::default() };
        assert!(net.matches(&Subject { destination: "::ffff:192.0.2.9".parse().unwrap(), ..curl() }));
        let long = AppMatcher { name: Some("a-very-long-process-name".into()), ..AppMatcher::default() };
        assert!(long.matches(&Subject { name: "a-very-long-pro", ..curl() }));
    }

    fn matcher() -> impl Strategy<Value = AppMatcher> {
        let net = (0u8..4, 30u8..=32).prop_map(|(last, len)| IpNet::new(IpAddr::from([10, 0, 0, last]), len).unwrap().trunc());
        (
            prop::option::of("[ab]"),
            prop::option::of(1u16..3),
            prop::option::of(net),
            prop::option::of("/[ab](/[ab])?"),
            prop::option::of(0u32..2),
        )
            .prop_map(|(name, port, destination, cgroup, user)| AppMatcher {
                exe: None,
                name,
                port,
                protocol: None,
                destination,
                cgroup,
                user,
                client: None,
                class: None,
            })
    }

    proptest! {
        #[test]
        fn a_covering_matcher_matches_every_flow_of_the_other(
            mine in matcher(), other in matcher(), port in 1u16..3, user in 0u32..2, last in 0u8..4, name in "[ab]", group in "/[ab](/[ab])?",
        ) {
            let subject = Subject {
                exe: None, name: &name, port, protocol: None, user: Some(user), destination: IpAddr::from([10, 0, 0, last]), cgroup: Some(&group),
                client: None, class: Class::Unclassified,
            };
            if !mine.is_empty() && mine.covers(&other) && other.matches(&subject) {
                prop_assert!(mine.matches(&subject));
            }
        }
    }
}
