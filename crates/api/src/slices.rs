//! `GET /v1/slices` and `POST /v1/slices`: the slices of a network (`braid net slicer`).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a slicer does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SlicerStatus {
    /// Where switches connect: addresses with ports.
    pub listens: Vec<String>,
    /// The slices; the production slice has what nobody claims.
    pub slices: Vec<SliceView>,
    /// The switches.
    pub switches: Vec<SlicedSwitch>,
    /// What went wrong last, the newest first: each names slice, message and remedy.
    pub troubles: Vec<SliceTrouble>,
}

/// A slice and what it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SliceView {
    /// Its description.
    #[serde(flatten)]
    pub slice: SliceDescription,
    /// Whether it is in the configuration file, so that only that can change it.
    pub in_file: bool,
    /// Users who have opted in: Ethernet or IP addresses.
    pub users: Vec<String>,
    /// Hosts that are given to it as a version of another slice's controller.
    pub staged: Vec<String>,
    /// Its connections to controllers.
    pub links: Vec<SliceLink>,
    /// Entries of its controllers.
    pub entries: u64,
    /// Entries in switches that stand for them.
    pub rows: u64,
    /// Messages of its controllers so far.
    pub messages: u64,
    /// Messages of its controllers that were refused.
    pub refused: u64,
    /// Packets that its controllers got.
    pub packets: u64,
    /// Packets that they did not get, because there were too many or because they do not read.
    pub dropped: u64,
}

/// A connection to a controller of a slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SliceLink {
    /// Datapath id of the switch that the controller sees by it.
    pub datapath: String,
    /// Address of the controller.
    pub controller: String,
    /// Version of OpenFlow; null while there is no connection.
    pub version: Option<String>,
}

/// A switch of a slicer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SlicedSwitch {
    /// Datapath id: 16 hexadecimal digits.
    pub datapath: String,
    /// Address from which it connected last.
    pub peer: String,
    /// `live`, `reading` (its tables), `away` (it has no connection).
    pub state: String,
    /// Version of OpenFlow.
    pub version: String,
    /// Entries in it, with the slicer's own.
    pub rows: u64,
    /// Its ports.
    pub ports: Vec<u32>,
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SliceTrouble {
    /// How long ago.
    pub age_ms: u64,
    /// Name of the slice, if it is one's.
    pub slice: Option<String>,
    /// Datapath id of the switch, if it is at one.
    pub datapath: Option<String>,
    /// Name of the message, if one was refused.
    pub message: Option<String>,
    /// What happened, and what to do.
    pub text: String,
}

/// A slice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SliceDescription {
    /// Its name.
    pub name: String,
    /// Addresses of its controllers: `HOST:PORT`.
    #[serde(default)]
    pub controllers: Vec<String>,
    /// 0 to 3: where slices overlap, the higher one has the packets.
    #[serde(default)]
    pub priority: u8,
    /// Its space.
    #[serde(default)]
    pub space: Vec<SlicePart>,
    /// The slice within whose space it lies.
    #[serde(default)]
    pub within: Option<String>,
    /// Whether users may opt in.
    #[serde(default)]
    pub opt_in: bool,
    /// It is another version of this slice's controller.
    #[serde(default)]
    pub stage_of: Option<String>,
    /// Hosts of that slice that it gets: Ethernet addresses.
    #[serde(default)]
    pub stage_hosts: Vec<String>,
    /// And so many percent of all hosts of that slice.
    #[serde(default)]
    pub stage_percent: u8,
    /// The most that it sends through a switch.
    #[serde(default)]
    pub rate_bps: Option<u64>,
    /// Queues that it may use.
    #[serde(default)]
    pub queues: Vec<u32>,
    /// Most entries in each switch.
    #[serde(default)]
    pub max_entries: Option<u64>,
    /// Most messages of a controller in a second, from each switch's connection.
    #[serde(default)]
    pub max_messages: Option<u32>,
    /// Most packets to its controllers in a second, from each switch.
    #[serde(default)]
    pub max_packets: Option<u32>,
}

/// A part of a slice's space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SlicePart {
    /// Datapath id of the switch; null: all.
    #[serde(default)]
    pub switch: Option<String>,
    /// Ports; none: all.
    #[serde(default)]
    pub ports: Vec<u32>,
    /// Which packets, such as `vlan=10` or `ip=10.1.0.0/16, protocol=tcp, port_dst=80`; empty: all.
    #[serde(default, rename = "match")]
    pub matching: String,
    /// Whether the slice gets copies of packets that go to a controller.
    #[serde(default = "yes")]
    pub read: bool,
    /// Whether the packets are the slice's.
    #[serde(default = "yes")]
    pub write: bool,
    /// Whether other slices may lie within it.
    #[serde(default)]
    pub delegate: bool,
}

fn yes() -> bool {
    true
}

impl Default for SlicePart {
    fn default() -> Self {
        Self { switch: None, ports: Vec::new(), matching: String::new(), read: true, write: true, delegate: false }
    }
}

/// A change of slices: one of these.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SliceChange {
    /// Adds a slice.
    #[serde(default)]
    pub add: Option<SliceDescription>,
    /// Changes the slice of this name.
    #[serde(default)]
    pub change: Option<SliceDescription>,
    /// Removes the slice of this name, and its entries.
    #[serde(default)]
    pub remove: Option<String>,
    /// A user opts in.
    #[serde(default)]
    pub join: Option<SliceUser>,
    /// A user opts out: an Ethernet or IP address.
    #[serde(default)]
    pub leave: Option<String>,
}

/// A user of a slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SliceUser {
    /// Name of the slice.
    pub slice: String,
    /// Ethernet or IP address.
    pub user: String,
}
