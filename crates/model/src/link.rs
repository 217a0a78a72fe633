//! Links: interfaces that reach the Internet.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::Rate;

/// The kernel's number of a network device; it names a link for as long as the device exists. Device names are labels only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkIndex(pub u32);

impl fmt::Display for LinkIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// An IP version. The two families of one link live and die apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address; an IPv4-mapped IPv6 address counts as IPv4, since that is what the kernel sends.
    pub fn of(address: IpAddr) -> Self {
        if address.to_canonical().is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// One value for each family.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PerFamily<T> {
    /// The value for IPv4.
    pub v4: T,
    /// The value for IPv6.
    pub v6: T,
}

impl<T> PerFamily<T> {
    /// The value for `family`.
    pub fn get(&self, family: Family) -> &T {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }

    /// The value for `family`, to change it.
    pub fn get_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}

/// What a link is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// Ethernet and the like.
    Wired,
    /// Wi-Fi.
    Wireless,
    /// LTE, 5G and the like.
    Cellular,
    /// A tunnel: a link only when configured.
    Vpn,
    /// A bridge, veth, container or other virtual device: a link only when configured (a veth with an Internet route of its own in a container counts as wired).
    Virtual,
    /// The machine itself: never a link.
    Loopback,
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Wired => "wired",
            Self::Wireless => "wireless",
            Self::Cellular => "cellular",
            Self::Vpn => "vpn",
            Self::Virtual => "virtual",
            Self::Loopback => "loopback",
        })
    }
}

/// What a link is used for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Carries whatever the scheduler gives it.
    #[default]
    Normal,
    /// Carries flows only while no normal link lives.
    Backup,
    /// Carries nothing that Braid schedules.
    Excluded,
}

/// Whether a link can be given flows, and if not, why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkState {
    /// Given flows.
    Up,
    /// Has carrier, but probes or connections get no answer in any family it is configured for.
    Dead,
    /// No carrier, no address or no default route.
    Down,
    /// Alive, kept for when no normal link lives.
    Backup,
    /// Its data allowance is used up.
    Capped,
    /// Not to be used: by configuration, or because it cannot be told from another link (the reason is shown beside it).
    Excluded,
    /// Not judged yet.
    Unknown,
}

impl fmt::Display for LinkState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Up => "up",
            Self::Dead => "dead",
            Self::Down => "down",
            Self::Backup => "backup",
            Self::Capped => "capped",
            Self::Excluded => "excluded",
            Self::Unknown => "unknown",
        })
    }
}

/// What the operating system says of one interface, whether or not it is a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkFacts {
    /// The device's number.
    pub index: LinkIndex,
    /// The device's name: a label.
    pub name: String,
    /// What the device is.
    pub kind: LinkKind,
    /// Hardware address, where the device has one.
    pub mac: Option<[u8; 6]>,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// Administratively up and with carrier.
    pub carrier: bool,
    /// The speed the device claims, where it claims one.
    pub nominal: Option<Rate>,
    /// Global addresses with their on-link prefixes, tentative and deprecated ones left out.
    pub addresses: Vec<IpNet>,
    /// Gateways of its default routes, best metric first; `None` in the inner option is a default route without gateway (point to point).
    pub gateways: PerFamily<Vec<DefaultRoute>>,
    /// DNS servers the system has for this link.
    pub resolvers: Vec<IpAddr>,
}

/// A default route of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DefaultRoute {
    /// The next hop; `None` on point-to-point devices.
    pub gateway: Option<IpAddr>,
    /// The route's metric: the lowest is the system's choice.
    pub metric: u32,
}

impl LinkFacts {
    /// Whether this interface could carry flows of `family` at all: carrier, an address and a default route.
    pub fn usable(&self, family: Family) -> bool {
        self.carrier && !self.gateways.get(family).is_empty() && self.addresses.iter().any(|net| Family::of(net.addr()) == family)
    }

    /// The address packets of `family` leave with: the first one listed.
    pub fn source(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().map(IpNet::addr).find(|addr| Family::of(*addr) == family)
    }
}
