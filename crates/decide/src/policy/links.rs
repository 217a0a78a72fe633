//! Link rules: settings for links, and the selectors by which rules refer to links.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use braid_model::{ByteCount, LinkFacts, LinkKind, LinkSet, Mac, Rate, Role};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::when::When;
use super::{InvalidText, NAME_LIMIT};
use crate::energy::Profile;
use crate::pattern::Pattern;

/// A `[[link]]` entry: a matcher, and the settings for the links that match.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LinkRule {
    /// Selects the devices.
    pub matcher: LinkMatcher,
    /// Context in which the entry applies.
    pub when: When,
    /// Role of the links.
    pub role: Role,
    /// Priority of the links: those with the highest usable priority (0 first) take all flows.
    pub priority: u8,
    /// Whether traffic counts towards an allowance.
    pub metered: bool,
    /// Monthly allowance of each link. Once it is used up, the link gets no more flows.
    pub cap: Option<ByteCount>,
    /// Day of the month, 1 to 31, on which the count restarts (the last day in shorter months).
    pub reset_day: u8,
    /// Probe mode; `None` uses the global setting.
    pub probe: Option<ProbeMode>,
    /// Probe targets; if empty, the global setting applies.
    pub probe_targets: Vec<ProbeTarget>,
    /// Configured capacity towards this machine; it is never estimated.
    pub capacity_down: Option<Rate>,
    /// Configured capacity away from this machine; it is never estimated.
    pub capacity_up: Option<Rate>,
    /// Cost per gigabyte, in any one unit of money.
    pub cost_per_gb: f64,
    /// Power profile; `None` selects it by kind and fits it to the battery's readings.
    pub energy: Option<Profile>,
}

/// How often the link's Internet access is probed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeMode {
    /// Continuously, so that the death of an idle link is detected within a second.
    Continuous,
    /// Rarely while idle, and at once after a symptom.
    #[default]
    OnDemand,
}

/// Conditions on a device; all conditions that are set must hold.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LinkMatcher {
    /// Name of the device.
    pub name: Option<Pattern>,
    /// Kind of the device.
    pub kind: Option<LinkKind>,
    /// Hardware address of the device.
    pub mac: Option<Mac>,
    /// Prefix that contains one of the device's addresses.
    pub address: Option<IpNet>,
}

impl LinkMatcher {
    /// Whether all conditions hold. A matcher without conditions matches nothing.
    pub fn matches(&self, device: &LinkFacts) -> bool {
        !self.is_empty()
            && self.name.as_ref().is_none_or(|pattern| pattern.matches(&device.name))
            && self.kind.is_none_or(|kind| kind == device.kind)
            && self.mac.is_none_or(|mac| device.mac == Some(mac))
            && self.address.is_none_or(|net| device.addresses.iter().any(|have| net.contains(&have.addr())))
    }

    /// Whether no condition is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether the matcher selects devices by identity, so that it may turn a virtual device into a link.
    pub fn singles_out(&self) -> bool {
        self.kind.is_some() || self.mac.is_some() || self.name.as_ref().is_some_and(|pattern| !pattern.is_any())
    }
}

/// Selects links in an application rule: `"wlan0"`, `"wwan*"` or `"kind:cellular"`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkSelector {
    /// By name of the device.
    Name(Pattern),
    /// By kind of the device.
    Kind(LinkKind),
}

impl LinkSelector {
    /// Whether the device matches.
    pub fn matches(&self, device: &LinkFacts) -> bool {
        match self {
            Self::Name(pattern) => pattern.matches(&device.name),
            Self::Kind(kind) => *kind == device.kind,
        }
    }

    /// The slots whose device matches any of `selectors`.
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

/// The kinds that may be configured for a link, with their names.
pub const LINK_KINDS: [(&str, LinkKind); 5] = [
    ("wired", LinkKind::Wired),
    ("wireless", LinkKind::Wireless),
    ("cellular", LinkKind::Cellular),
    ("vpn", LinkKind::Vpn),
    ("virtual", LinkKind::Virtual),
];

impl FromStr for LinkSelector {
    type Err = InvalidText;
    fn from_str(text: &str) -> Result<Self, InvalidText> {
        let error = |wanted| Err(InvalidText { text: text.to_owned(), wanted });
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

/// A probe target: what a probe contacts over one link to check for Internet access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeTarget {
    /// A TCP connect; both acceptance and refusal count as an answer.
    Tcp(SocketAddr),
    /// An ICMP echo request.
    Icmp(IpAddr),
    /// A web page with a known answer, which distinguishes the Internet from a captive portal.
    Http(HttpTarget),
}

/// A web page with a known answer, over plain HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpTarget {
    /// Address of the server.
    pub address: SocketAddr,
    /// Value of the `Host` header.
    pub host: String,
    /// Path of the page, including the leading slash.
    pub path: String,
    /// Expected status code.
    pub status: u16,
    /// Expected start of the body; empty accepts any body.
    pub body: String,
}

/// A server with which capacities are measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasureServer {
    /// The page to download.
    pub page: HttpTarget,
    /// Whether the connection is encrypted (HTTPS). The server's certificate must be valid for the host of `page`.
    pub tls: bool,
    /// Path that accepts uploads by POST; `None`: the server measures only downloads.
    pub upload: Option<String>,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use braid_model::LinkIndex;
    use proptest::prelude::*;

    pub(in crate::policy) fn device(name: &str, kind: LinkKind) -> LinkFacts {
        LinkFacts {
            mac: Some(Mac([2, 0, 0, 0, 0, 1])),
            addresses: vec!["10.1.2.3/24".parse().unwrap()],
            ..LinkFacts::new(LinkIndex(1), name, kind)
        }
    }

    pub(in crate::policy) fn named(text: &str) -> LinkMatcher {
        LinkMatcher { name: Some(Pattern::new(text)), ..LinkMatcher::default() }
    }

    #[test]
    fn patterns_match_whole_names() {
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
            mac: Some(Mac([2, 0, 0, 0, 0, 1])),
            address: Some("10.1.0.0/16".parse().unwrap()),
            ..named("wl*")
        };
        assert!(all.matches(&wifi));
        assert!(!LinkMatcher { kind: Some(LinkKind::Wired), ..all.clone() }.matches(&wifi));
        assert!(!LinkMatcher { mac: Some(Mac([0; 6])), ..all.clone() }.matches(&wifi));
        assert!(!LinkMatcher { address: Some("10.2.0.0/16".parse().unwrap()), ..all.clone() }.matches(&wifi));
        assert!(!LinkMatcher::default().matches(&wifi));
    }

    #[test]
    fn selectors_parse_from_their_text() {
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
