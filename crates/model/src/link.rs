//! Links: interfaces that reach the Internet.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{Mac, Rate};

/// The kernel's interface index. It identifies a link as long as the device exists; device names are only labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkIndex(pub u32);

impl fmt::Display for LinkIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// IP version. Each family of a link has its own liveness.
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

    /// The family of an address. An IPv4-mapped IPv6 address counts as IPv4, since the kernel sends IPv4 packets to it.
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

    /// Mutable reference to the value for `family`.
    pub fn get_mut(&mut self, family: Family) -> &mut T {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}

/// Kind of network device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// Ethernet and similar.
    Wired,
    /// Wi-Fi.
    Wireless,
    /// LTE, 5G and similar.
    Cellular,
    /// A tunnel. Not a link unless configured.
    Vpn,
    /// A bridge, veth, container or other virtual device. Not a link unless configured. (In a container, a veth with its own Internet route
    /// counts as wired.)
    Virtual,
    /// The loopback device. Never a link.
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

/// Role of a link in scheduling.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Carries the flows that the scheduler assigns to it.
    #[default]
    Normal,
    /// Carries flows only while no normal link is alive.
    Backup,
    /// Carries no flow that Braid schedules.
    Excluded,
}

/// Whether a link can carry flows, and if not, why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkState {
    /// Carries flows.
    Up,
    /// Has carrier, but probes or connections get no answer in any configured family.
    Dead,
    /// No carrier, no address or no default route.
    Down,
    /// Alive, but reserved for when no normal link is alive.
    Backup,
    /// Its data allowance is used up.
    Capped,
    /// Not used, because of the configuration or because Braid cannot distinguish it from another link (the reason is shown beside it).
    Excluded,
    /// Not determined yet.
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

/// The operating system's data about one interface, whether or not it is a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkFacts {
    /// Interface index of the device.
    pub index: LinkIndex,
    /// Name of the device, only a label.
    pub name: String,
    /// Kind of device.
    pub kind: LinkKind,
    /// Hardware address, if the device has one.
    pub mac: Option<Mac>,
    /// Largest packet (MTU) in bytes.
    pub mtu: u32,
    /// The device is administratively up and has carrier.
    pub carrier: bool,
    /// The bridge, bond or VRF of which the device is a port.
    pub master: Option<LinkIndex>,
    /// Speed that the device reports, if it reports one.
    pub nominal: Option<Rate>,
    /// Global addresses with their on-link prefixes, without tentative and deprecated addresses.
    pub addresses: Vec<IpNet>,
    /// Default routes of the interface, best metric first.
    pub gateways: PerFamily<Vec<DefaultRoute>>,
    /// DNS servers that the system has configured for this link.
    pub resolvers: Vec<IpAddr>,
}

/// A default route of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DefaultRoute {
    /// The next hop; `None` on point-to-point devices.
    pub gateway: Option<IpAddr>,
    /// Metric. The system uses the route with the lowest.
    pub metric: u32,
}

impl LinkFacts {
    /// A device that is up, with an MTU of 1,500 and nothing else.
    pub fn new(index: LinkIndex, name: impl Into<String>, kind: LinkKind) -> Self {
        Self {
            index,
            name: name.into(),
            kind,
            mac: None,
            mtu: 1500,
            carrier: true,
            master: None,
            nominal: None,
            addresses: Vec::new(),
            gateways: PerFamily::default(),
            resolvers: Vec::new(),
        }
    }

    /// Whether this interface can carry flows of `family`: it has carrier, an address and a default route.
    pub fn usable(&self, family: Family) -> bool {
        self.carrier && !self.gateways.get(family).is_empty() && self.addresses.iter().any(|net| Family::of(net.addr()) == family)
    }

    /// Source address for packets of `family`: the first address listed.
    pub fn source(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().map(IpNet::addr).find(|addr| Family::of(*addr) == family)
    }
}
