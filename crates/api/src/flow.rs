//! `GET /v1/flows`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One live TCP connection or UDP exchange.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Flow {
    /// Id of the flow, unique while the daemon runs, and less than 2^53.
    pub id: u64,
    /// Path of the executable, or name of the process if the path is unknown.
    pub application: String,
    /// Protocol: `tcp` or `udp`; a client's may be another, such as `icmp`, `sctp`, `gre` or `protocol-103`.
    pub protocol: String,
    /// Local address and port.
    pub local: Option<String>,
    /// Remote address and port.
    pub remote: String,
    /// Device of the link.
    pub link: String,
    /// How its bytes travel: `direct`, or `bond` (over all links of its peer).
    pub carry: String,
    /// The scheduler that chose the link.
    pub scheduler: String,
    /// Bytes received.
    pub rx_bytes: Option<u64>,
    /// Bytes sent.
    pub tx_bytes: Option<u64>,
    /// Round-trip time.
    pub rtt_us: Option<u64>,
    /// Time since its start.
    pub age_ms: Option<u64>,
    /// Name of the process.
    #[serde(default)]
    pub name: Option<String>,
    /// Process id.
    #[serde(default)]
    pub pid: Option<u32>,
    /// User id of the process.
    #[serde(default)]
    pub user: Option<u32>,
    /// Control group of the process, if it has one of its own.
    #[serde(default)]
    pub cgroup: Option<String>,
    /// Class: `real-time`, `browser`, `bulk`, `unclassified`.
    #[serde(default)]
    pub class: Option<String>,
    /// Expected size in bytes.
    #[serde(default)]
    pub demand_bytes: Option<u64>,
    /// Number of retransmitted segments.
    #[serde(default)]
    pub retransmissions: Option<u64>,
    /// Latest delivery rate sample of the kernel for the sending direction.
    #[serde(default)]
    pub delivery_rate_bps: Option<u64>,
    /// Number of the `[[app]]` entry that decided, starting at 1.
    #[serde(default)]
    pub rule: Option<u32>,
    /// Name of the rule of a program (`GET /v1/rules`) that decided; then `rule` is `null`.
    #[serde(default)]
    pub program_rule: Option<String>,
    /// Energy in joules for the transfer of its bytes so far.
    #[serde(default)]
    pub energy_j: Option<f64>,
    /// Name of the peer that carries it; `null` if the kernel sends it directly.
    #[serde(default)]
    pub peer: Option<String>,
    /// Address of the client of the gateway to which it belongs; `null`: a flow of this machine.
    #[serde(default)]
    pub client: Option<String>,
    /// Name of the virtual interface, if a program of this machine sends the flow through it.
    #[serde(default)]
    pub virtual_interface: Option<String>,
    /// Whether its packets take the gateway's fast path now, past the firewall, connection tracking and routing; `null`: no packets of it are forwarded.
    #[serde(default)]
    pub fast_path: Option<bool>,
    /// Device of the link over which its packets leave, if it has moved there from the link of its socket; `bond`: they go on in UDP, over all links of the
    /// bond to its host, which encrypts them.
    #[serde(default)]
    pub moved_to: Option<String>,
    /// Whether the other host opened it. Such flows are listed if they may move: of hosts that agree to it, run Braid or are named; `null`: a bond carries it.
    #[serde(default)]
    pub accepted: Option<bool>,
    /// Whether its packets wait in a queue of Braid until its link can take them (late binding); `null`: a bond carries it.
    #[serde(default)]
    pub late: Option<bool>,
    /// Bytes per link, if it uses several links.
    #[serde(default)]
    pub by_link: Vec<LinkBytes>,
}

/// Bytes that a flow moved over one link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkBytes {
    /// Device of the link.
    pub link: String,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
}
