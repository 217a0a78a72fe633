//! `GET /v1/network` and `POST /v1/network`: the network of a controller (`braid net controller`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The network that a controller serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkStatus {
    /// Where switches connect: addresses with ports.
    pub listens: Vec<String>,
    /// Switches, also those that have lost their connection a short time ago.
    pub switches: Vec<NetworkSwitch>,
    /// Links between switches.
    pub links: Vec<NetworkLink>,
    /// Access points.
    pub accesses: Vec<NetworkAccess>,
    /// Hosts.
    pub hosts: Vec<NetworkHost>,
    /// Names of the mobility managers.
    pub managers: Vec<String>,
    /// Whether all connected switches have the entries that they should have.
    pub converged: bool,
}

/// A switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkSwitch {
    /// Datapath id: 16 hexadecimal digits.
    pub datapath: String,
    /// Address from which it connected last.
    pub peer: String,
    /// `live`, `reading` (its tables), `settling` (its links are found), `silent` (it does not answer), `away` (it has no connection), `cut-off` (it follows
    /// the controller, and has lost the links to the others).
    pub state: String,
    /// Number of its entries that are the controller's.
    pub entries: u64,
    /// Its ports.
    pub ports: Vec<NetworkPort>,
}

/// A port of a switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkPort {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Whether it is up.
    pub up: bool,
    /// Whether it leads to hosts, not to a switch.
    pub edge: bool,
}

/// A port of a switch, as an end of a link or the place of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkPlace {
    /// Datapath id of the switch.
    pub datapath: String,
    /// Number of the port.
    pub port: u32,
}

/// A link between switches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkLink {
    /// One end.
    pub one: NetworkPlace,
    /// The other end.
    pub other: NetworkPlace,
    /// Whether it passes frames of 1,500 bytes after the Ethernet header, as hosts send them; `null`: not known yet.
    pub full_frames: Option<bool>,
}

/// An access point: a port behind which hosts enter by radio.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkAccess {
    /// Its address: the BSSID of Wi-Fi.
    pub id: String,
    /// The port.
    pub place: NetworkPlace,
    /// `wired`, `wifi` or `cellular`.
    pub kind: String,
    /// Its channel, in the numbers of its kind; `null`: not configured.
    pub channel: Option<u16>,
    /// Whether hosts can enter: its port is up, and its switch answers and is not cut off from the others.
    pub serves: bool,
    /// What it carries in each direction, in bits per second.
    pub capacity_bps: u64,
    /// What comes from its hosts; `null`: not measured.
    pub rate_up_bps: Option<u64>,
    /// What goes to its hosts; `null`: not measured.
    pub rate_down_bps: Option<u64>,
    /// What of its capacity clients may reserve together, in bits per second.
    pub reservable_bps: u64,
    /// What clients have reserved of what comes from hosts, in bits per second.
    pub reserved_up_bps: u64,
    /// What clients have reserved of what goes to hosts, in bits per second.
    pub reserved_down_bps: u64,
    /// Whether its switch limits others to what is not reserved of what comes from hosts. If not, reservations are only counted.
    pub enforces_up: bool,
    /// The same for what goes to hosts.
    pub enforces_down: bool,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkHost {
    /// Its Ethernet address.
    pub mac: String,
    /// Its IP addresses.
    pub addresses: Vec<String>,
    /// Where it is attached.
    pub attachments: Vec<NetworkPlace>,
    /// The attachments to which its packets go; the main one comes first.
    pub active: Vec<NetworkPlace>,
    /// Its mobility manager.
    pub manager: String,
    /// Whether it runs Braid and reports where it is.
    pub client: bool,
    /// What it has asked to be reserved; `null`: nothing.
    pub reservation: Option<NetworkReservation>,
}

/// Rates that a host asked its network to reserve, and what became of that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkReservation {
    /// The rate towards the host that it asked for, in bits per second.
    pub asked_down_bps: u64,
    /// The rate away from it that it asked for, in bits per second.
    pub asked_up_bps: u64,
    /// The access points that keep a reservation for it. One whose host asks for more than is left stays as it is.
    pub kept: Vec<NetworkKept>,
    /// Why it is not kept as asked for at all access points over which the host's packets go; `null`: it is.
    pub reason: Option<String>,
}

/// What an access point keeps for a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NetworkKept {
    /// Address of the access point.
    pub access: String,
    /// The rate towards the host, in bits per second.
    pub down_bps: u64,
    /// The rate away from it, in bits per second.
    pub up_bps: u64,
}

/// A change for a host: either its manager, or where it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkChange {
    /// Ethernet address of the host.
    pub host: String,
    /// Name of its mobility manager from now on.
    #[serde(default)]
    pub manager: Option<String>,
    /// Address of the access point to which it is asked to go. The host must run Braid.
    #[serde(default)]
    pub to: Option<String>,
}
