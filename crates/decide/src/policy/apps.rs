//! What is said of applications: conditions on a flow, and what becomes of those that match.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use braid_model::{Affinity, Class};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::links::LinkSelector;

/// The kernel keeps this many bytes of a process's name.
pub const NAME_LIMIT: usize = 15;

/// How a flow is carried.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carry {
    /// As Braid sees fit.
    #[default]
    Auto,
    /// By the kernel, over one link.
    Direct,
    /// To a peer over all links; directly while none can be reached.
    Bond,
    /// To a peer, each packet over several links; directly while none can be reached.
    Duplicate,
}

/// Who looks up the names that clients of Braid's proxy ask for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolve {
    /// This machine.
    #[default]
    Here,
    /// The relay that carries the connection; this machine while there is none that can.
    Relay,
}

impl Resolve {
    /// Every way, with its name in configuration.
    pub const ALL: [(&str, Self); 2] = [("here", Self::Here), ("relay", Self::Relay)];

    /// The name in configuration.
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }
}

/// Over how many links each packet goes that is carried over several, unless said.
pub const COPIES: u8 = 2;

impl Carry {
    /// Every way, with its name in configuration.
    pub const ALL: [(&str, Self); 4] =
        [("auto", Self::Auto), ("direct", Self::Direct), ("bond", Self::Bond), ("duplicate", Self::Duplicate)];

    /// The name in configuration.
    pub const fn name(self) -> &'static str {
        Self::ALL[self as usize].0
    }

    /// Whether it asks for a peer.
    pub const fn needs_peer(self) -> bool {
        matches!(self, Self::Bond | Self::Duplicate)
    }
}

/// What is said of the flows that match.
#[derive(Debug, Clone, PartialEq)]
pub struct AppRule {
    /// Which flows are meant.
    pub matcher: AppMatcher,
    /// The only links they may use; none usable: the flow fails.
    pub links: Option<Vec<LinkSelector>>,
    /// The links they use while one of them is usable.
    pub prefer: Vec<LinkSelector>,
    /// What kind of traffic they are, whatever was learnt.
    pub class: Option<Class>,
    /// What of them stays on one link.
    pub affinity: Option<Affinity>,
    /// How they are carried.
    pub carry: Carry,
    /// Over how many links each packet goes, where it goes over several: at least 2, and no more than there are.
    pub copies: u8,
    /// The only relay that may carry them, by its name; `None`: any.
    pub relay: Option<String>,
    /// Who looks up the names that they go to, where those are known: clients of a proxy name them.
    pub resolve: Resolve,
    /// Their share against other flows (φ); 1 is usual.
    pub weight: f64,
}

impl Default for AppRule {
    fn default() -> Self {
        Self {
            matcher: AppMatcher::default(),
            links: None,
            prefer: Vec::new(),
            class: None,
            affinity: None,
            carry: Carry::default(),
            copies: COPIES,
            relay: None,
            resolve: Resolve::default(),
            weight: 1.0,
        }
    }
}

/// Conditions on a flow; all that are given must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AppMatcher {
    /// The executable's path.
    pub exe: Option<PathBuf>,
    /// The process's name; what is beyond [`NAME_LIMIT`] bytes does not count.
    pub name: Option<String>,
    /// The remote port.
    pub port: Option<u16>,
    /// The remote address lies in here.
    pub destination: Option<IpNet>,
    /// The program runs in this control group or below it: a path from the hierarchy's root, `/user.slice`.
    pub cgroup: Option<String>,
    /// The program's user.
    pub user: Option<u32>,
    /// The client of Braid's proxy; what no proxy carries never matches.
    pub client: Option<ClientMatcher>,
}

/// A client of Braid's proxy, which stands for the application whose flows it carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientMatcher {
    /// It comes from here.
    Network(IpNet),
    /// It has shown the password of this name.
    User(String),
}

impl ClientMatcher {
    fn matches(&self, client: &ProxyClient<'_>) -> bool {
        match self {
            Self::Network(net) => net.contains(&client.address.to_canonical()),
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
            Self::User(name) => f.write_str(name),
        }
    }
}

impl AppMatcher {
    /// Whether all conditions hold; without any, nothing matches.
    pub fn matches(&self, subject: &Subject<'_>) -> bool {
        !self.is_empty()
            && self.exe.as_ref().is_none_or(|exe| subject.exe == Some(exe))
            && self.name.as_ref().is_none_or(|name| kernel_name(name) == kernel_name(subject.name))
            && self.port.is_none_or(|port| port == subject.port)
            && self.destination.is_none_or(|net| net.contains(&subject.destination.to_canonical()))
            && self.cgroup.as_ref().is_none_or(|group| subject.cgroup.is_some_and(|have| lies_in(have, group)))
            && self.user.is_none_or(|user| subject.user == Some(user))
            && self.client.as_ref().is_none_or(|client| subject.client.is_some_and(|have| client.matches(&have)))
    }

    /// Whether no condition is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether every flow that `other` matches is matched by this one too.
    pub fn covers(&self, other: &Self) -> bool {
        fn same<T: PartialEq>(mine: &Option<T>, theirs: &Option<T>) -> bool {
            mine.is_none() || mine == theirs
        }
        same(&self.exe, &other.exe)
            && self.name.as_ref().is_none_or(|name| other.name.as_ref().is_some_and(|their| kernel_name(name) == kernel_name(their)))
            && same(&self.port, &other.port)
            && self.destination.is_none_or(|net| other.destination.is_some_and(|their| net.contains(&their)))
            && self.cgroup.as_ref().is_none_or(|group| other.cgroup.as_ref().is_some_and(|their| lies_in(their, group)))
            && same(&self.user, &other.user)
            && self.client.as_ref().is_none_or(|client| other.client.as_ref().is_some_and(|their| client.covers(their)))
    }
}

/// What of a process's name the kernel keeps.
fn kernel_name(name: &str) -> &[u8] {
    &name.as_bytes()[..name.len().min(NAME_LIMIT)]
}

fn lies_in(group: &str, above: &str) -> bool {
    let above = above.trim_end_matches('/');
    group.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A flow as rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject<'a> {
    /// The program's executable.
    pub exe: Option<&'a Path>,
    /// The name of its process.
    pub name: &'a str,
    /// The remote port.
    pub port: u16,
    /// The remote address; an IPv4-mapped one counts as IPv4.
    pub destination: IpAddr,
    /// The program's control group: a path from the hierarchy's root.
    pub cgroup: Option<&'a str>,
    /// The program's user.
    pub user: Option<u32>,
    /// The client of the proxy that makes the flow for it.
    pub client: Option<ProxyClient<'a>>,
}

/// A client of the proxy as rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProxyClient<'a> {
    /// Where it is.
    pub address: IpAddr,
    /// The name that it has shown the password of.
    pub user: Option<&'a str>,
}

/// Flows that are left to the system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// Programs by executable.
    pub exes: Vec<PathBuf>,
    /// Programs by process name.
    pub names: Vec<String>,
    /// Programs of these users.
    pub users: Vec<u32>,
    /// Programs in these control groups or below.
    pub cgroups: Vec<String>,
    /// Whatever goes there.
    pub destinations: Vec<IpNet>,
}

impl Exclusions {
    /// One matcher per exclusion: the flow is excluded when any matches.
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
            destination: "192.0.2.7".parse().unwrap(),
            cgroup: Some("/user.slice/user-1000.slice"),
            user: Some(1000),
            client: None,
        }
    }

    #[test]
    fn a_client_s_rule_is_for_what_the_proxy_carries() {
        let rule = |client| AppMatcher { client: Some(client), ..AppMatcher::default() };
        let network = rule(ClientMatcher::Network("192.168.7.0/24".parse().unwrap()));
        let ann = rule(ClientMatcher::User("ann".into()));
        let from = |address: &str, user| Subject { client: Some(ProxyClient { address: address.parse().unwrap(), user }), ..curl() };
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
            destination: Some("192.0.2.0/24".parse().unwrap()),
            cgroup: Some("/user.slice/".into()),
            user: Some(1000),
            client: None,
        };
        assert!(all.matches(&curl()));
        for broken in [
            AppMatcher { exe: Some("/usr/bin/wget".into()), ..all.clone() },
            AppMatcher { name: Some("wget".into()), ..all.clone() },
            AppMatcher { port: Some(80), ..all.clone() },
            AppMatcher { destination: Some("192.0.3.0/24".parse().unwrap()), ..all.clone() },
            AppMatcher { cgroup: Some("/user".into()), ..all.clone() },
            AppMatcher { user: Some(0), ..all.clone() },
        ] {
            assert!(!broken.matches(&curl()), "{broken:?}");
        }
        assert!(!AppMatcher::default().matches(&curl()), "an empty matcher must not match everything");
    }

    #[test]
    fn mapped_addresses_match_ipv4_prefixes_and_names_are_cut_as_the_kernel_cuts_them() {
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
                destination,
                cgroup,
                user,
                client: None,
            })
    }

    proptest! {
        #[test]
        fn a_covering_matcher_matches_whatever_the_other_does(
            mine in matcher(), other in matcher(), port in 1u16..3, user in 0u32..2, last in 0u8..4, name in "[ab]", group in "/[ab](/[ab])?",
        ) {
            let subject = Subject {
                exe: None, name: &name, port, user: Some(user), destination: IpAddr::from([10, 0, 0, last]), cgroup: Some(&group),
                client: None,
            };
            if !mine.is_empty() && mine.covers(&other) && other.matches(&subject) {
                prop_assert!(mine.matches(&subject));
            }
        }
    }
}
