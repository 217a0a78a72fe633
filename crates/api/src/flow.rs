//! `GET /v1/flows`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One live connection or datagram exchange.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Flow {
    /// Names the flow while the daemon lives.
    pub id: u64,
    /// The executable's path, or the process's name where the path is not known.
    pub application: String,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// Address and port at this end.
    pub local: Option<String>,
    /// Address and port at the other end.
    pub remote: String,
    /// The link's device.
    pub link: String,
    /// How its bytes are moved: `direct`, or `bond`: over all links of its peer.
    pub carry: String,
    /// The scheduler that chose the link.
    pub scheduler: String,
    /// Bytes received.
    pub rx_bytes: Option<u64>,
    /// Bytes sent.
    pub tx_bytes: Option<u64>,
    /// Round-trip time.
    pub rtt_us: Option<u64>,
    /// Since its start.
    pub age_ms: Option<u64>,
    /// The process's name.
    #[serde(default)]
    pub name: Option<String>,
    /// The process's number.
    #[serde(default)]
    pub pid: Option<u32>,
    /// The process's user.
    #[serde(default)]
    pub user: Option<u32>,
    /// The process's control group, where it has one of its own.
    #[serde(default)]
    pub cgroup: Option<String>,
    /// `real-time`, `browser`, `bulk`, `unclassified`.
    #[serde(default)]
    pub class: Option<String>,
    /// Bytes it is expected to move.
    #[serde(default)]
    pub demand_bytes: Option<u64>,
    /// Segments sent again.
    #[serde(default)]
    pub retransmissions: Option<u64>,
    /// The kernel's last sample of what it sends.
    #[serde(default)]
    pub delivery_rate_bps: Option<u64>,
    /// The `[[app]]` entry that decided, counted from 1.
    #[serde(default)]
    pub rule: Option<u32>,
    /// Joules that moving its bytes took so far.
    #[serde(default)]
    pub energy_j: Option<f64>,
    /// Who carries it to its destination, where that is not the kernel.
    #[serde(default)]
    pub peer: Option<String>,
    /// What went over each link, where it uses several.
    #[serde(default)]
    pub by_link: Vec<LinkBytes>,
}

/// What a flow moved over one link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkBytes {
    /// The link's device.
    pub link: String,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
}
