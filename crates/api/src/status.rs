//! `GET /v1/status` and `GET /v1/links`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LinkState;

/// The daemon at a glance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// The scheduler in force: `only-one`, `round-robin`, `weighted-round-robin`, `max-throughput`, `operetta`.
    pub scheduler: String,
    /// Every link, in the order of their devices' numbers.
    pub links: Vec<LinkStatus>,
    /// Live flows.
    pub flows: u64,
    /// Hosts that carry flows over several links.
    #[serde(default)]
    pub peers: Vec<crate::Peer>,
    /// How connections are met: `ebpf` or `none`.
    #[serde(default)]
    pub interception: Option<String>,
    /// Since the daemon's start, in milliseconds.
    #[serde(default)]
    pub uptime_ms: Option<u64>,
    /// The configuration file in force; `null`: the defaults.
    #[serde(default)]
    pub config: Option<String>,
    /// What was met and what became of it, since the start.
    #[serde(default)]
    pub counters: Counters,
    /// What the machine runs on; `null`: no battery is known.
    #[serde(default)]
    pub battery: Option<Battery>,
    /// What throughput is worth now, 0 to 1, where the scheduler asks; `null` also while it matches the system's own choice.
    #[serde(default)]
    pub utility: Option<f64>,
    /// Whether all flows go where they take least energy, since the battery is low (`power_saving`).
    #[serde(default)]
    pub saving_power: bool,
    /// The throughput that downloads are to reach together, where the scheduler has one.
    #[serde(default)]
    pub target_down_bps: Option<u64>,
    /// The throughput that uploads are to reach together.
    #[serde(default)]
    pub target_up_bps: Option<u64>,
    /// What the user should know: a mode that had to be given up, a store that cannot be written, a reload that was refused.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// The web page's address, where the daemon serves one over TCP.
    #[serde(default)]
    pub ui: Option<String>,
}

/// What the machine runs on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Battery {
    /// The charge of all batteries, 0 to 1.
    pub level: f64,
    /// The machine is plugged in.
    pub plugged: bool,
    /// What the batteries give now, in watts.
    #[serde(default)]
    pub power_w: Option<f64>,
}

/// What was met and what became of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Counters {
    /// Flows given a link by Braid.
    pub steered: Option<u64>,
    /// Flows left to the system by rule.
    pub left: Option<u64>,
    /// Flows that failed because a strict rule had no usable link.
    pub denied: Option<u64>,
    /// Flows the kernel refused to steer.
    pub failed: Option<u64>,
    /// Flows steered but not followed, for want of room.
    pub untracked: Option<u64>,
    /// Events of the kernel that were lost.
    pub lost_events: Option<u64>,
    /// Connections redirected to the daemon, which forwards them to a peer.
    pub redirected: Option<u64>,
    /// Connections that should have been, and went direct for want of room or of a way.
    pub not_redirected: Option<u64>,
    /// Connects moved to another link, since nobody answered them on theirs.
    pub moved: Option<u64>,
}

/// One link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Link")]
pub struct LinkStatus {
    /// The device's name.
    pub name: String,
    /// Whether it can be given flows.
    pub state: LinkState,
    /// `wired`, `wireless`, `cellular`, `vpn`, `virtual`.
    pub kind: String,
    /// Its addresses with prefix lengths.
    pub addresses: Vec<String>,
    /// Estimated capacity towards this machine; `null` until traffic has shown it: what the rule guesses meanwhile is no knowledge.
    pub capacity_down_bps: Option<u64>,
    /// Estimated capacity away from this machine; `null` until something was sent that filled the link, or more than was guessed.
    pub capacity_up_bps: Option<u64>,
    /// Round-trip time.
    pub rtt_us: Option<u64>,
    /// Share of segments sent again, 0 to 1.
    pub loss: Option<f64>,
    /// Bytes that Braid's flows received over it since the daemon's start.
    pub rx_bytes: Option<u64>,
    /// Bytes that Braid's flows sent over it since the daemon's start.
    pub tx_bytes: Option<u64>,
    /// Live flows on it.
    pub flows: u64,
    /// The device's number.
    #[serde(default)]
    pub index: Option<u32>,
    /// Why it is in this state, where there is something to say.
    #[serde(default)]
    pub reason: Option<String>,
    /// `normal`, `backup`, `excluded`.
    #[serde(default)]
    pub role: Option<String>,
    /// The state of IPv4 alone.
    #[serde(default)]
    pub state_v4: Option<String>,
    /// The state of IPv6 alone.
    #[serde(default)]
    pub state_v6: Option<String>,
    /// Next hops of its default routes.
    #[serde(default)]
    pub gateways: Vec<String>,
    /// DNS servers reached over it.
    #[serde(default)]
    pub resolvers: Vec<String>,
    /// Largest packet.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Bytes the device received, whoever caused them.
    #[serde(default)]
    pub device_rx_bytes: Option<u64>,
    /// Bytes the device sent, whoever caused them.
    #[serde(default)]
    pub device_tx_bytes: Option<u64>,
    /// What it receives now.
    #[serde(default)]
    pub rate_down_bps: Option<u64>,
    /// What it sends now.
    #[serde(default)]
    pub rate_up_bps: Option<u64>,
    /// What its flows still have to receive, as estimated.
    #[serde(default)]
    pub load_down_bytes: Option<u64>,
    /// What its flows still have to send, as estimated.
    #[serde(default)]
    pub load_up_bytes: Option<u64>,
    /// How far the capacity towards this machine is to be trusted, 0 to 1.
    #[serde(default)]
    pub capacity_confidence: Option<f64>,
    /// Since it was last learnt from traffic.
    #[serde(default)]
    pub capacity_age_ms: Option<u64>,
    /// How far the capacity away from this machine is to be trusted, 0 to 1.
    #[serde(default)]
    pub capacity_up_confidence: Option<f64>,
    /// Since it was last learnt from traffic.
    #[serde(default)]
    pub capacity_up_age_ms: Option<u64>,
    /// Its traffic is counted against an allowance.
    #[serde(default)]
    pub metered: bool,
    /// The monthly allowance.
    #[serde(default)]
    pub cap_bytes: Option<u64>,
    /// Used of it since the last reset.
    #[serde(default)]
    pub used_bytes: Option<u64>,
    /// Joules that moving the device's bytes took since the daemon's start, beyond what it needs when idle.
    #[serde(default)]
    pub energy_j: Option<f64>,
    /// Joules that a gigabyte received takes.
    #[serde(default)]
    pub energy_down_j_per_gb: Option<f64>,
    /// Joules that a gigabyte sent takes.
    #[serde(default)]
    pub energy_up_j_per_gb: Option<f64>,
    /// Where that is known from: a profile's source, or the battery.
    #[serde(default)]
    pub energy_source: Option<String>,
    /// What a gigabyte costs in money.
    #[serde(default)]
    pub cost_per_gb: Option<f64>,
}

/// The daemon took a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accepted {
    /// What was done, for people.
    pub message: String,
    /// What the user should know of it, such as what `check` would warn of.
    #[serde(default)]
    pub warnings: Vec<String>,
}
