//! What the user decided: which scheduler, which links are what, and which application may use which links (the papers' Π).
//!
//! Plain types and pure questions to them. The configuration file is read into them by the engine; the BPF program asks the same
//! questions at `connect` ([`first_match`](Policy::first_match), [`admit`]) and a test holds the two together.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use braid_model::{Affinity, Bytes, Class, LinkFacts, LinkKind, Rate, Role};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::connection::{LinkMask, Mode};
use crate::energy::Profile;
use crate::tradeoff::{UtilityRule, Weights};
use crate::virtual_interface::MAXDIFF;

/// The most rules that are looked at for a flow: exclusions and `[[app]]` entries together.
pub const MAX_RULES: usize = 64;

/// The kernel keeps this many bytes of a process's name.
pub const NAME_LIMIT: usize = 15;

/// Everything the user decided.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// How links are chosen.
    pub scheduler: Scheduler,
    /// What of a program stays on one link; `None`: by class ([`affinity`](Self::affinity)).
    pub affinity: Option<Affinity>,
    /// What a flow of an unknown application is expected to move.
    pub default_demand: Bytes,
    /// How much throughput is worth its price, for [`Scheduler::Operetta`].
    pub utility: UtilityRule,
    /// What energy and money weigh in the price.
    pub weights: Weights,
    /// How much shorter another link's round trip must be before [`Scheduler::Handover`] moves to it.
    pub maxdiff: Duration,
    /// On a low battery all flows take the link that needs least energy (`virtual_interface::saves_power`).
    pub power_saving: bool,
    /// What is said of links; the first entry that matches a device counts.
    pub links: Vec<LinkRule>,
    /// What is said of applications; the first entry that matches a flow counts.
    pub apps: Vec<AppRule>,
    /// Flows that are left to the system.
    pub exclude: Exclusions,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            scheduler: Scheduler::default(),
            affinity: None,
            default_demand: Bytes::new(1_000_000),
            utility: UtilityRule::default(),
            weights: Weights::default(),
            maxdiff: MAXDIFF,
            power_saving: false,
            links: Vec::new(),
            apps: Vec::new(),
            exclude: Exclusions::default(),
        }
    }
}

impl Policy {
    /// The index of the first `[[app]]` entry all of whose conditions hold.
    pub fn first_match(&self, subject: &Subject<'_>) -> Option<usize> {
        self.apps.iter().position(|rule| rule.matcher.matches(subject))
    }

    /// Whether the flow is left to the system by `[exclude]`; asked before any rule.
    pub fn excludes(&self, subject: &Subject<'_>) -> bool {
        self.exclude.matchers().iter().any(|matcher| matcher.matches(subject))
    }

    /// The `[[link]]` entry that speaks of a device: the first that matches.
    pub fn link_rule(&self, device: &LinkFacts) -> Option<&LinkRule> {
        self.links.iter().find(|rule| rule.matcher.matches(device))
    }

    /// Whether a device counts as a link at all, usable or not.
    ///
    /// Wired, wireless and cellular devices do. VPNs and virtual devices do when an entry singles them out by kind, hardware
    /// address or a name pattern with at least one letter (a bare `*` or an address prefix does not). Loopback never does.
    pub fn is_link(&self, device: &LinkFacts) -> bool {
        match device.kind {
            LinkKind::Wired | LinkKind::Wireless | LinkKind::Cellular => true,
            LinkKind::Vpn | LinkKind::Virtual => self.link_rule(device).is_some_and(|rule| rule.matcher.singles_out()),
            LinkKind::Loopback => false,
        }
    }

    /// What of a program stays on one link: its rule says, else the policy, else its class (browsers: destination).
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
    /// Each link in its turn.
    RoundRobin,
    /// Each link in proportion to its capacity.
    WeightedRoundRobin,
    /// The link on which the flow is expected to end first.
    #[default]
    MaxThroughput,
    /// The cheapest link, in energy and money, that meets a target throughput.
    Operetta,
    /// Each link in inverse proportion to its round-trip time ([`virtual_interface::shares`](crate::virtual_interface::shares)).
    RttShare,
    /// All on the link with the shortest round trip, left only for one that is shorter by more than `maxdiff`
    /// ([`virtual_interface::Handover`](crate::virtual_interface::Handover)).
    Handover,
}

impl Scheduler {
    /// Every scheduler, in the order of their numbers.
    pub const ALL: [Self; 7] =
        [Self::OnlyOne, Self::RoundRobin, Self::WeightedRoundRobin, Self::MaxThroughput, Self::Operetta, Self::RttShare, Self::Handover];

    /// Whether it spreads flows over all links for speed, rather than keep to the few that are best by another measure.
    pub const fn spreads(self) -> bool {
        matches!(self, Self::RoundRobin | Self::WeightedRoundRobin | Self::MaxThroughput | Self::RttShare)
    }

    /// The name in configuration and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OnlyOne => "only-one",
            Self::RoundRobin => "round-robin",
            Self::WeightedRoundRobin => "weighted-round-robin",
            Self::MaxThroughput => "max-throughput",
            Self::Operetta => "operetta",
            Self::RttShare => "rtt-share",
            Self::Handover => "handover",
        }
    }

    /// The rule that carries it out; Operetta's still needs its target ([`target`](crate::tradeoff::target)).
    pub const fn mode(self) -> Mode {
        match self {
            Self::OnlyOne | Self::Handover => Mode::OnlyOne,
            Self::RoundRobin | Self::WeightedRoundRobin | Self::RttShare => Mode::VirtualStart,
            Self::MaxThroughput | Self::Operetta => Mode::CheapestInTime { target: None },
        }
    }

    /// Whether the steps of virtual time follow the links' weights ([`steps`](crate::connection::steps)): their capacities, or shares.
    pub const fn weighted(self) -> bool {
        matches!(self, Self::WeightedRoundRobin | Self::RttShare)
    }

    /// Whether it needs what only the daemon knows: a policy, round-trip times.
    pub const fn needs_daemon(self) -> bool {
        matches!(self, Self::Operetta | Self::RttShare | Self::Handover)
    }
}

impl fmt::Display for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names nothing of its kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {wanted}")]
pub struct NotUnderstood {
    text: String,
    wanted: &'static str,
}

impl FromStr for Scheduler {
    type Err = NotUnderstood;
    fn from_str(text: &str) -> Result<Self, NotUnderstood> {
        let wanted = "a scheduler: write only-one, round-robin, weighted-round-robin, max-throughput, operetta, rtt-share or handover";
        Self::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| NotUnderstood { text: text.to_owned(), wanted })
    }
}

/// What is said of the links that match.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LinkRule {
    /// Which devices are meant.
    pub matcher: LinkMatcher,
    /// What they are used for.
    pub role: Role,
    /// Its place in the priority table: links of the highest priority that is usable, 0 first, take all flows.
    pub priority: u8,
    /// Their traffic is counted against an allowance.
    pub metered: bool,
    /// The monthly allowance of each; used up, the link is given no more flows.
    pub cap: Option<Bytes>,
    /// The day of the month, 1 to 31, on which the count starts anew (the last day in shorter months).
    pub reset_day: u8,
    /// How eagerly they are probed; `None`: as the configuration says for all.
    pub probe: Option<ProbeMode>,
    /// What is asked whether the Internet is there; empty: as the configuration says for all.
    pub probe_targets: Vec<ProbeTarget>,
    /// Known capacity towards this machine: never estimated.
    pub capacity_down: Option<Rate>,
    /// Known capacity away from this machine: never estimated.
    pub capacity_up: Option<Rate>,
    /// What a gigabyte costs, in any one unit of money.
    pub cost_per_gb: f64,
    /// What it needs; `None`: by its kind, or as the battery shows.
    pub energy: Option<Profile>,
}

/// How eagerly a link is asked whether the Internet is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeMode {
    /// All the time, so that an idle link's death is found within a second.
    Eager,
    /// Rarely while idle, at once on suspicion.
    #[default]
    Sparing,
}

/// Conditions on a device; all that are given must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinkMatcher {
    /// The device's name.
    pub name: Option<Pattern>,
    /// What it is made of.
    pub kind: Option<LinkKind>,
    /// Its hardware address.
    pub mac: Option<[u8; 6]>,
    /// One of its addresses lies in here.
    pub address: Option<IpNet>,
}

impl LinkMatcher {
    /// Whether all conditions hold; without any, nothing matches.
    pub fn matches(&self, device: &LinkFacts) -> bool {
        !self.is_empty()
            && self.name.as_ref().is_none_or(|pattern| pattern.matches(&device.name))
            && self.kind.is_none_or(|kind| kind == device.kind)
            && self.mac.is_none_or(|mac| device.mac == Some(mac))
            && self.address.is_none_or(|net| device.addresses.iter().any(|have| net.contains(&have.addr())))
    }

    /// Whether no condition is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it picks devices out by what they are, so that it may turn a virtual device into a link.
    pub fn singles_out(&self) -> bool {
        self.kind.is_some() || self.mac.is_some() || self.name.as_ref().is_some_and(|pattern| !pattern.is_any())
    }
}

/// A name in which each `*` stands for any text, also none.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pattern(String);

impl Pattern {
    /// The pattern as written.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Whether `name` fits, from its first to its last byte.
    pub fn matches(&self, name: &str) -> bool {
        let Some((head, tail)) = self.0.split_once('*') else { return self.0 == name };
        let Some(mut rest) = name.strip_prefix(head) else { return false };
        let mut parts = tail.split('*').peekable();
        while let Some(part) = parts.next() {
            if parts.peek().is_none() {
                return rest.ends_with(part);
            }
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        true
    }

    /// Whether it has nothing but `*`, so that every name fits.
    pub fn is_any(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte == b'*')
    }

    /// The pattern as written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Names links in a rule for applications: `"wlan0"`, `"wwan*"` or `"kind:cellular"`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkSelector {
    /// By the device's name.
    Name(Pattern),
    /// By what it is made of.
    Kind(LinkKind),
}

impl LinkSelector {
    /// Whether the device is meant.
    pub fn matches(&self, device: &LinkFacts) -> bool {
        match self {
            Self::Name(pattern) => pattern.matches(&device.name),
            Self::Kind(kind) => *kind == device.kind,
        }
    }

    /// The slots whose device is meant by any of `selectors`.
    pub fn mask<'a>(selectors: &[Self], slots: impl IntoIterator<Item = (usize, &'a LinkFacts)>) -> LinkMask {
        let mut mask = LinkMask::default();
        for (slot, device) in slots {
            if selectors.iter().any(|selector| selector.matches(device)) {
                mask.insert(slot);
            }
        }
        mask
    }
}

/// The kinds a link may be configured to have, with their names.
pub const LINK_KINDS: [(&str, LinkKind); 5] = [
    ("wired", LinkKind::Wired),
    ("wireless", LinkKind::Wireless),
    ("cellular", LinkKind::Cellular),
    ("vpn", LinkKind::Vpn),
    ("virtual", LinkKind::Virtual),
];

impl FromStr for LinkSelector {
    type Err = NotUnderstood;
    fn from_str(text: &str) -> Result<Self, NotUnderstood> {
        let error = |wanted| Err(NotUnderstood { text: text.to_owned(), wanted });
        if let Some(kind) = text.strip_prefix("kind:") {
            return match LINK_KINDS.iter().find(|(name, _)| *name == kind) {
                Some((_, kind)) => Ok(Self::Kind(*kind)),
                None => error("a link: write kind:wired, kind:wireless, kind:cellular, kind:vpn or kind:virtual"),
            };
        }
        if text.is_empty() || text.len() > NAME_LIMIT || text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) {
            return error("a link: write a device's name of 1 to 15 bytes such as \"wlan0\" or \"wwan*\", or \"kind:cellular\"");
        }
        Ok(Self::Name(Pattern::new(text)))
    }
}

impl fmt::Display for LinkSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(pattern) => f.pad(pattern.as_str()),
            Self::Kind(kind) => write!(f, "kind:{kind}"),
        }
    }
}

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
    /// The only relay that may carry them, by its name; `None`: any.
    pub relay: Option<String>,
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
            relay: None,
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
    fn matches(&self, client: &Client<'_>) -> bool {
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
    pub client: Option<Client<'a>>,
}

/// A client of the proxy as rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Client<'a> {
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

/// What is asked, out of one link, whether the Internet is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeTarget {
    /// A connect; an answer of either kind counts.
    Tcp(SocketAddr),
    /// An echo request.
    Icmp(IpAddr),
    /// A page with a known answer, so that a captive portal is told from the Internet.
    Http(HttpTarget),
}

/// A page with a known answer, over plain HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpTarget {
    /// The server.
    pub address: SocketAddr,
    /// What the `Host` header says.
    pub host: String,
    /// The page, from its first slash.
    pub path: String,
    /// The status expected.
    pub status: u16,
    /// What the body must begin with; empty: anything.
    pub body: String,
}

/// Which links a flow may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// One of these; never empty.
    Use(LinkMask),
    /// None, and its rule is strict: the flow must fail.
    Deny,
    /// None: the system decides.
    LeaveAlone,
}

/// Which links a flow may use, by its rule and the links' state.
///
/// `usable` are the links alive in the flow's family, with allowance left and not excluded; `backup` those whose role is backup;
/// `links` and `prefer` the masks of the rule's selectors, `None` where the rule has none. Backup links serve while no normal
/// link of the remaining set does; a preferred backup link counts as preferred.
pub fn admit(usable: LinkMask, backup: LinkMask, links: Option<LinkMask>, prefer: Option<LinkMask>) -> Admission {
    let mut pool = usable.0;
    if let Some(links) = links {
        pool &= links.0;
        if pool == 0 {
            return Admission::Deny;
        }
    }
    if let Some(prefer) = prefer.filter(|prefer| pool & prefer.0 != 0) {
        pool &= prefer.0;
    }
    let normal = pool & !backup.0;
    match if normal != 0 { normal } else { pool } {
        0 => Admission::LeaveAlone,
        mask => Admission::Use(LinkMask(mask)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::{LinkIndex, PerFamily};
    use proptest::prelude::*;

    fn device(name: &str, kind: LinkKind) -> LinkFacts {
        LinkFacts {
            index: LinkIndex(1),
            name: name.into(),
            kind,
            mac: Some([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            carrier: true,
            nominal: None,
            addresses: vec!["10.1.2.3/24".parse().unwrap()],
            gateways: PerFamily::default(),
            resolvers: Vec::new(),
        }
    }

    fn named(text: &str) -> LinkMatcher {
        LinkMatcher { name: Some(Pattern::new(text)), ..LinkMatcher::default() }
    }

    fn curl() -> Subject<'static> {
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
        let from = |address: &str, user| Subject { client: Some(Client { address: address.parse().unwrap(), user }), ..curl() };
        assert!(network.matches(&from("::ffff:192.168.7.9", None)) && !network.matches(&from("192.168.8.9", Some("ann"))));
        assert!(ann.matches(&from("192.168.8.9", Some("ann"))) && !ann.matches(&from("192.168.7.9", None)));
        assert!(!network.matches(&curl()) && !ann.matches(&curl()));
        assert!(network.covers(&rule(ClientMatcher::Network("192.168.7.9/32".parse().unwrap()))) && !network.covers(&ann));
    }

    #[test]
    fn patterns_match_from_end_to_end() {
        for (pattern, name, fits) in [
            ("wlan0", "wlan0", true),
            ("wlan0", "wlan01", false),
            ("wl*", "wlan0", true),
            ("*0", "wlan0", true),
            ("w*n*0", "wlan0", true),
            ("w*x*", "wlan0", false),
            ("ab*ba", "aba", false),
            ("*", "", true),
            ("", "", true),
            ("a*", "", false),
        ] {
            assert_eq!(Pattern::new(pattern).matches(name), fits, "{pattern} {name}");
        }
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
    fn link_conditions_must_all_hold() {
        let wifi = device("wlan0", LinkKind::Wireless);
        let all = LinkMatcher {
            kind: Some(LinkKind::Wireless),
            mac: Some([2, 0, 0, 0, 0, 1]),
            address: Some("10.1.0.0/16".parse().unwrap()),
            ..named("wl*")
        };
        assert!(all.matches(&wifi));
        assert!(!LinkMatcher { kind: Some(LinkKind::Wired), ..all.clone() }.matches(&wifi));
        assert!(!LinkMatcher { mac: Some([0; 6]), ..all.clone() }.matches(&wifi));
        assert!(!LinkMatcher { address: Some("10.2.0.0/16".parse().unwrap()), ..all.clone() }.matches(&wifi));
        assert!(!LinkMatcher::default().matches(&wifi));
    }

    #[test]
    fn browsers_keep_their_link_per_destination_unless_told_otherwise() {
        let mut policy = Policy::default();
        assert_eq!(policy.affinity(None, Class::Browser), Affinity::Destination);
        assert_eq!(policy.affinity(None, Class::Bulk), Affinity::None);
        policy.affinity = Some(Affinity::None);
        assert_eq!(policy.affinity(None, Class::Browser), Affinity::None);
        let rule = AppRule { affinity: Some(Affinity::Application), ..AppRule::default() };
        assert_eq!(policy.affinity(Some(&rule), Class::Browser), Affinity::Application);
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for scheduler in Scheduler::ALL {
            assert_eq!(scheduler.to_string().parse(), Ok(scheduler));
        }
        assert!("fastest".parse::<Scheduler>().unwrap_err().to_string().contains("max-throughput"));
        for text in ["wlan0", "ww*", "kind:cellular"] {
            assert_eq!(text.parse::<LinkSelector>().unwrap().to_string(), text);
        }
        for text in ["", "kind:warp", "a name", "far-too-long-a-name"] {
            assert!(text.parse::<LinkSelector>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_strict_rule_denies_and_no_rule_leaves_alone() {
        let (none, first, second) = (LinkMask(0), LinkMask(1), LinkMask(2));
        assert_eq!(admit(first, none, Some(second), None), Admission::Deny);
        assert_eq!(admit(first, none, None, Some(second)), Admission::Use(first));
        assert_eq!(admit(none, none, None, None), Admission::LeaveAlone);
        assert_eq!(admit(LinkMask(3), second, None, None), Admission::Use(first));
        assert_eq!(admit(second, second, None, None), Admission::Use(second));
        assert_eq!(admit(LinkMask(3), second, None, Some(second)), Admission::Use(second));
        assert_eq!(admit(none, none, Some(first), Some(first)), Admission::Deny);
    }

    proptest! {
        #[test]
        fn admission_keeps_to_the_rule(
            usable: u32, backup: u32, links in prop::option::of(any::<u32>()), prefer in prop::option::of(any::<u32>()),
        ) {
            let pool = usable & links.unwrap_or(u32::MAX);
            match admit(LinkMask(usable), LinkMask(backup), links.map(LinkMask), prefer.map(LinkMask)) {
                Admission::Use(LinkMask(mask)) => {
                    prop_assert!(mask != 0 && mask & !pool == 0);
                    if prefer.is_some_and(|prefer| pool & prefer != 0) {
                        prop_assert_eq!(mask & !prefer.unwrap(), 0);
                    }
                    // Normal and backup links are never mixed, and backup links serve only for want of normal ones.
                    prop_assert!(mask & backup == 0 || mask & !backup == 0);
                    if mask & backup != 0 && prefer.is_none() {
                        prop_assert_eq!(pool & !backup, 0);
                    }
                }
                Admission::Deny => prop_assert!(links.is_some() && pool == 0),
                Admission::LeaveAlone => prop_assert!(links.is_none() && usable == 0),
            }
        }

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

        #[test]
        fn a_pattern_made_from_a_name_matches_it(name in "[a-z0-9]{0,12}", from in 0usize..12, to in 0usize..12) {
            let (from, to) = (from.min(to).min(name.len()), from.max(to).min(name.len()));
            let pattern = Pattern::new(format!("{}*{}", &name[..from], &name[to..]));
            prop_assert!(pattern.matches(&name));
        }
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
}
