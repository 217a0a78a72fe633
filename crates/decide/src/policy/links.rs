//! What is said of links, and how rules name them.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use braid_model::{ByteCount, LinkFacts, LinkKind, LinkSet, Rate, Role};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::{NAME_LIMIT, NotUnderstood};
use crate::energy::Profile;
use crate::pattern::Pattern;

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
    pub cap: Option<ByteCount>,
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
    Continuous,
    /// Rarely while idle, at once on suspicion.
    #[default]
    OnDemand,
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
    pub fn mask<'a>(selectors: &[Self], slots: impl IntoIterator<Item = (usize, &'a LinkFacts)>) -> LinkSet {
        let mut mask = LinkSet::default();
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use braid_model::{LinkIndex, PerFamily};
    use proptest::prelude::*;

    pub(in crate::policy) fn device(name: &str, kind: LinkKind) -> LinkFacts {
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

    pub(in crate::policy) fn named(text: &str) -> LinkMatcher {
        LinkMatcher { name: Some(Pattern::new(text)), ..LinkMatcher::default() }
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
    fn selectors_are_read_as_they_are_written() {
        for text in ["wlan0", "ww*", "kind:cellular"] {
            assert_eq!(text.parse::<LinkSelector>().unwrap().to_string(), text);
        }
        for text in ["", "kind:warp", "a name", "far-too-long-a-name"] {
            assert!(text.parse::<LinkSelector>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_pattern_made_from_a_name_matches_it(name in "[a-z0-9]{0,12}", from in 0usize..12, to in 0usize..12) {
            let (from, to) = (from.min(to).min(name.len()), from.max(to).min(name.len()));
            let pattern = Pattern::new(format!("{}*{}", &name[..from], &name[to..]));
            prop_assert!(pattern.matches(&name));
        }
    }
}
