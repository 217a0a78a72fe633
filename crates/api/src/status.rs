//! `GET /v1/status` and `GET /v1/links`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::LinkState;

/// Overview of the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Active scheduler of connections: `max-throughput`, `least-finish`, `least-makespan`, `round-robin`, `weighted-round-robin`, `rtt-share`,
    /// `random`, `handover`, `operetta` or `only-one`.
    pub scheduler: String,
    /// All links, in the order of their interface indices.
    pub links: Vec<LinkStatus>,
    /// Number of live flows.
    pub flows: u64,
    /// Hosts that carry flows over several links.
    #[serde(default)]
    pub peers: Vec<crate::Peer>,
    /// How Braid intercepts connections: `ebpf`: those of this machine and of the gateway's clients; `gateway`: only those of clients; `none`.
    #[serde(default)]
    pub interception: Option<String>,
    /// Time since the daemon started, in milliseconds.
    #[serde(default)]
    pub uptime_ms: Option<u64>,
    /// Path of the active configuration file; `null` if the defaults apply.
    #[serde(default)]
    pub config: Option<String>,
    /// Counters since the daemon started.
    #[serde(default)]
    pub counters: Counters,
    /// State of the battery; `null` if no battery is known.
    #[serde(default)]
    pub battery: Option<Battery>,
    /// Current utility of throughput, 0 to 1, if the scheduler uses it. Also `null` while the scheduler only matches the throughput of the
    /// system's own choice.
    #[serde(default)]
    pub utility: Option<f64>,
    /// Whether all flows use the links with the lowest energy, because the battery is low (`power_saving`).
    #[serde(default)]
    pub saving_power: bool,
    /// Target for the total throughput of downloads, if the scheduler has one.
    #[serde(default)]
    pub target_down_bps: Option<u64>,
    /// Target for the total throughput of uploads, if the scheduler has one.
    #[serde(default)]
    pub target_up_bps: Option<u64>,
    /// Warnings for the user, for example: a mode that is not available, a store that cannot be written, a rejected reload.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Address of the web page, if the daemon serves it over TCP.
    #[serde(default)]
    pub ui: Option<String>,
    /// The virtual interface; `null` if the configuration has none.
    #[serde(default)]
    pub virtual_interface: Option<VirtualInterfaceStatus>,
    /// Packets that wait for a link (late binding); `null`: none do.
    #[serde(default)]
    pub late: Option<LateStatus>,
    /// Name of the ad-hoc device; `null`: there is none.
    #[serde(default)]
    pub adhoc: Option<String>,
}

/// Packets that wait for a link, and what became of those before them since late binding began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Late")]
pub struct LateStatus {
    /// Devices of the links.
    pub links: Vec<String>,
    /// Packets that wait.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Packets that got a link.
    pub bound: u64,
    /// Packets that were dropped because too many of their flow waited.
    pub dropped: u64,
    /// Packets that were dropped because no link took them in time.
    pub expired: u64,
    /// Packets that got another link than the last one of their flow.
    pub rebound: u64,
}

/// The virtual interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "VirtualInterface")]
pub struct VirtualInterfaceStatus {
    /// Name of the device.
    pub name: String,
    /// Its addresses, which programs see as their own.
    pub addresses: Vec<String>,
    /// Whether flows can use it.
    pub up: bool,
    /// Why not; `null` if it is up.
    pub reason: Option<String>,
    /// Number of live flows through it.
    pub flows: u64,
    /// Current rate of the device towards this machine's programs, in bits per second; `null` until its counters were read twice.
    pub rate_down_bps: Option<u64>,
    /// Current rate of the device away from this machine's programs, in bits per second.
    pub rate_up_bps: Option<u64>,
}

/// State of the battery.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Battery {
    /// Charge of all batteries together, 0 to 1.
    pub level: f64,
    /// Whether the machine is plugged in.
    pub plugged: bool,
    /// Power that the batteries deliver now, in watts.
    #[serde(default)]
    pub power_w: Option<f64>,
}

/// Counters of flows and events since the daemon started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Counters {
    /// Flows that Braid assigned to a link.
    pub steered: Option<u64>,
    /// Flows that a rule leaves to the system.
    pub left: Option<u64>,
    /// Flows that failed because a strict rule had no usable link.
    pub denied: Option<u64>,
    /// Flows that the kernel failed to steer.
    pub failed: Option<u64>,
    /// Flows that were steered but not tracked, because the table was full.
    pub untracked: Option<u64>,
    /// Kernel events that were lost.
    pub lost_events: Option<u64>,
    /// Connections redirected to the daemon, which forwards them to a peer.
    pub redirected: Option<u64>,
    /// Connections that should have been redirected but went direct, because a table was full or there was no route.
    pub not_redirected: Option<u64>,
    /// Connection attempts moved to another link because their link got no answer.
    pub moved: Option<u64>,
    /// Flows of clients of the gateway that got a link.
    pub forwarded: Option<u64>,
    /// Flows of clients that followed the system's routes, because the table was full or the client had too many.
    pub overflowed: Option<u64>,
    /// Packets of clients' flows that took the gateway's fast path.
    pub fast_packets: Option<u64>,
}

/// One link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Link")]
pub struct LinkStatus {
    /// Name of the device.
    pub name: String,
    /// Whether the link can carry flows.
    pub state: LinkState,
    /// Kind: `wired`, `wireless`, `cellular`, `vpn`, `virtual`.
    pub kind: String,
    /// Addresses with prefix lengths.
    pub addresses: Vec<String>,
    /// Estimated capacity towards this machine; `null` until traffic has shown it. The scheduler's default is not reported here.
    pub capacity_down_bps: Option<u64>,
    /// Estimated capacity away from this machine; `null` until sent traffic has filled the link or exceeded the default.
    pub capacity_up_bps: Option<u64>,
    /// Round-trip time.
    pub rtt_us: Option<u64>,
    /// Fraction of segments that were retransmitted, 0 to 1.
    pub loss: Option<f64>,
    /// Bytes that Braid's flows received over it since the daemon started.
    pub rx_bytes: Option<u64>,
    /// Bytes that Braid's flows sent over it since the daemon started.
    pub tx_bytes: Option<u64>,
    /// Number of live flows on it.
    pub flows: u64,
    /// Interface index of the device.
    #[serde(default)]
    pub index: Option<u32>,
    /// Reason for the state, if there is a specific one.
    #[serde(default)]
    pub reason: Option<String>,
    /// Role: `normal`, `backup`, `excluded`.
    #[serde(default)]
    pub role: Option<String>,
    /// State of IPv4 on this link.
    #[serde(default)]
    pub state_v4: Option<String>,
    /// State of IPv6 on this link.
    #[serde(default)]
    pub state_v6: Option<String>,
    /// Gateways of its default routes.
    #[serde(default)]
    pub gateways: Vec<String>,
    /// DNS servers of this link.
    #[serde(default)]
    pub resolvers: Vec<String>,
    /// Largest packet (MTU) in bytes.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Bytes that the device received, including traffic that Braid does not schedule.
    #[serde(default)]
    pub device_rx_bytes: Option<u64>,
    /// Bytes that the device sent, including traffic that Braid does not schedule.
    #[serde(default)]
    pub device_tx_bytes: Option<u64>,
    /// Current receive rate.
    #[serde(default)]
    pub rate_down_bps: Option<u64>,
    /// Current send rate.
    #[serde(default)]
    pub rate_up_bps: Option<u64>,
    /// Estimate of the bytes that its flows still have to receive.
    #[serde(default)]
    pub load_down_bytes: Option<u64>,
    /// Estimate of the bytes that its flows still have to send.
    #[serde(default)]
    pub load_up_bytes: Option<u64>,
    /// Confidence in the capacity towards this machine, 0 to 1.
    #[serde(default)]
    pub capacity_confidence: Option<f64>,
    /// Time since traffic last updated the capacity towards this machine.
    #[serde(default)]
    pub capacity_age_ms: Option<u64>,
    /// Confidence in the capacity away from this machine, 0 to 1.
    #[serde(default)]
    pub capacity_up_confidence: Option<f64>,
    /// Time since traffic last updated the capacity away from this machine.
    #[serde(default)]
    pub capacity_up_age_ms: Option<u64>,
    /// Whether its traffic counts against an allowance.
    #[serde(default)]
    pub metered: bool,
    /// Monthly allowance in bytes.
    #[serde(default)]
    pub cap_bytes: Option<u64>,
    /// Bytes of the allowance used since the last reset.
    #[serde(default)]
    pub used_bytes: Option<u64>,
    /// Energy in joules for the transfer of the device's bytes since the daemon started, in addition to the idle energy.
    #[serde(default)]
    pub energy_j: Option<f64>,
    /// Energy in joules per gigabyte received.
    #[serde(default)]
    pub energy_down_j_per_gb: Option<f64>,
    /// Energy in joules per gigabyte sent.
    #[serde(default)]
    pub energy_up_j_per_gb: Option<f64>,
    /// Source of the energy figures: the source of a power profile, or the battery.
    #[serde(default)]
    pub energy_source: Option<String>,
    /// Power profile of the device.
    #[serde(default)]
    pub energy_profile: Option<LinkProfile>,
    /// Model of the device, from a database of hardware or from the device itself.
    #[serde(default)]
    pub model: Option<String>,
    /// Vendor and device numbers of the device on the PCI or USB bus, in hexadecimal.
    #[serde(default)]
    pub hardware_id: Option<String>,
    /// Estimated size of the buffer in front of the link towards this machine; `null` until a flow has filled the link.
    #[serde(default)]
    pub buffer_down_bytes: Option<u64>,
    /// Estimated size of the buffer in front of the link away from this machine.
    #[serde(default)]
    pub buffer_up_bytes: Option<u64>,
    /// Active measurements; `null` if there was none.
    #[serde(default)]
    pub measured: Option<LinkMeasured>,
    /// How often the link goes down or dies per day, also in earlier runs of the daemon; the last day of observation counts most.
    #[serde(default)]
    pub falls_per_day: Option<f64>,
    /// Mean time between two falls in seconds; `null` if there was none in the last days.
    #[serde(default)]
    pub mean_life_s: Option<u64>,
    /// Cost per gigabyte, in the currency of the configuration.
    #[serde(default)]
    pub cost_per_gb: Option<f64>,
}

/// Active measurements of a link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LinkMeasured {
    /// Result of the last measurement towards this machine; `null`: not measured, or it failed.
    pub down_bps: Option<u64>,
    /// Result of the last measurement away from this machine.
    pub up_bps: Option<u64>,
    /// Number of servers that took part in the last measurement.
    pub servers: u32,
    /// Age of the last measurement.
    pub age_ms: u64,
    /// Why a server did not take part in it; `null` if all did.
    pub failure: Option<String>,
    /// Bytes that all measurements have received since the daemon started.
    pub rx_bytes: u64,
    /// Bytes that all measurements have sent since the daemon started.
    pub tx_bytes: u64,
    /// Bytes of the current day, in both directions.
    pub day_bytes: u64,
    /// Maximum number of bytes of a day, in both directions (`max_daily`).
    pub max_day_bytes: u64,
}

/// The power profile chosen for a link, and the power measured from the battery.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkProfile {
    /// Technology of the device: `wifi`, `bluetooth`, `gprs`, `3g`, `lte`, `5g`, `ethernet`.
    pub technology: String,
    /// Model that the profile is for; `*`: any of the technology.
    pub model: String,
    /// Where the profile comes from: `shipped` with Braid, `file` (`energy_profiles`), `service` (`energy_service`), `configuration`.
    pub origin: String,
    /// How near the profile's model is to the device: `exact`, `model`, `series`, `technology`. `null` if the configuration gives the profile.
    pub nearness: Option<String>,
    /// Power of the idle device in milliwatts, according to the profile.
    pub idle_mw: f64,
    /// Power above idle at full use in milliwatts, fitted to the battery's power; `null` until the battery has discharged under Braid.
    pub fitted_mw: Option<f64>,
    /// Confidence in `fitted_mw`, 0 to 1. Braid uses the fitted power from 0.5 on.
    pub confidence: Option<f64>,
}

/// The daemon accepted a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Accepted {
    /// Description of what the daemon did.
    pub message: String,
    /// Warnings for the user, for example those of `braid check`.
    #[serde(default)]
    pub warnings: Vec<String>,
}
