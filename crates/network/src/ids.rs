//! What the network consists of: places, kinds of access, flows.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use braid_model::{Mac, Rate};
use braid_openflow::ids::{DatapathId, PortNo};
use ipnet::Ipv4Net;

/// A connection of a switch to the controller. The caller numbers them; a number is not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A port of a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The switch.
    pub datapath: DatapathId,
    /// Its port.
    pub port: PortNo,
}

impl Place {
    /// Port `port` of switch `datapath`.
    pub const fn new(datapath: u64, port: u32) -> Self {
        Self { datapath: DatapathId(datapath), port: PortNo(port) }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {} of switch {:016x}", self.port, self.datapath.0)
    }
}

/// The address by which clients know an access point: the BSSID of Wi-Fi; of other kinds any address that no other access point has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AccessId(pub Mac);

impl fmt::Display for AccessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Kind of a network by which hosts enter. Handover is the same for all: flows are routed anew (thesis section 5.3.1).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AccessKind {
    /// A cable.
    #[default]
    Wired,
    /// Wi-Fi.
    Wifi,
    /// LTE, WiMAX and the like.
    Cellular,
}

/// A radio channel, in the numbers of its kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Channel(pub u16);

/// Strength of a received signal in dBm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Signal(pub i16);

/// An access point: a port behind which hosts enter by radio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Its address.
    pub id: AccessId,
    /// The port.
    pub place: Place,
    /// Its kind.
    pub kind: AccessKind,
    /// Its channel.
    pub channel: Channel,
    /// Time that a host needs to enter. WiMAX takes several seconds (thesis section 5.5.2).
    pub entry: Duration,
    /// What it carries in each direction.
    pub capacity: Rate,
    /// What of that clients may reserve together.
    pub reservable: Rate,
}

/// A slice: hosts whose mobility manager is chosen together (thesis section 5.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceId(pub u32);

/// A flow or group of receivers that an operator or a program has chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u32);

/// Which packets to a host, or from it, are a chosen flow. What is `None` may have any value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FlowSpec {
    /// The host that receives the packets.
    pub to: Mac,
    /// The host that sends them.
    pub from: Option<Mac>,
    /// IP protocol of IPv4 packets, such as 17 for UDP.
    pub protocol: Option<u8>,
    /// Destination port; only with protocol 6 or 17.
    pub port: Option<u16>,
}

/// Packets that do not reach a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockSpec {
    /// The host.
    pub to: Mac,
    /// Who sends them.
    pub from: Sender,
}

/// Senders of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sender {
    /// A host of the network.
    Host(Mac),
    /// IPv4 addresses, inside or outside of the network.
    Network(Ipv4Net),
}

/// Receivers of a multicast group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// The multicast address.
    pub address: IpAddr,
    /// The participants, who may also send.
    pub members: Vec<Mac>,
}
