//! `GET /v1/policy`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The active policy. Conditions (`matches`, `when`) are text in the syntax of the configuration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyView {
    /// Name of the scheduler.
    pub scheduler: String,
    /// Affinity: `none`, `destination`, `application`; `null` if it depends on the class.
    pub affinity: Option<String>,
    /// Expected bytes per flow of an unknown application.
    pub default_demand_bytes: u64,
    /// Utility setting as text, if the scheduler uses it.
    #[serde(default)]
    pub utility: Option<String>,
    /// Utility setting by its parts, whether or not the scheduler uses it.
    #[serde(default)]
    pub utility_setting: Option<UtilityView>,
    /// How flows are carried that no rule carries otherwise: `direct`, or `bond` (while a relay is reachable).
    #[serde(default)]
    pub carry: Option<String>,
    /// The relay that carries them; `null`: any that is joined.
    #[serde(default)]
    pub relay: Option<String>,
    /// What happens to bonded flows that no relay takes, unless their entry says otherwise: `direct`, or `none` (they fail).
    #[serde(default)]
    pub fallback: Option<String>,
    /// LAN devices of the gateway.
    #[serde(default)]
    pub lan: Vec<String>,
    /// The virtual interface, if there is to be one.
    #[serde(default)]
    pub virtual_interface: Option<VirtualInterfaceView>,
    /// Name of the bonds' scheduler; `null` if it follows from `scheduler`: `weights` with `operetta`, else `midrr`.
    #[serde(default)]
    pub bond_scheduler: Option<String>,
    /// Number of paths that carry each packet, if `bond_scheduler` is `redundant`.
    #[serde(default)]
    pub bond_copies: Option<u8>,
    /// Which hosts are asked whether they run Braid; `null`: none.
    #[serde(default)]
    pub detection: Option<DetectionView>,
    /// How capacities are measured; `null`: only from ordinary transfers.
    #[serde(default)]
    pub measurement: Option<MeasurementView>,
    /// The `[[link]]` entries in order.
    pub links: Vec<LinkEntry>,
    /// The `[[app]]` entries in order. The first entry that matches decides.
    pub apps: Vec<AppEntry>,
    /// Traffic that Braid leaves to the system.
    pub exclude: Vec<ExcludeEntry>,
}

/// The virtual interface as configured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VirtualInterfaceView {
    /// Name of the device.
    pub name: String,
    /// Its addresses.
    pub addresses: Vec<String>,
}

/// Hosts that are asked whether they run Braid.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DetectionView {
    /// Whether every public host that answers a flow is asked.
    pub everybody: bool,
    /// Hosts and networks that are asked.
    pub hosts: Vec<String>,
    /// Private networks whose hosts are asked.
    pub networks: Vec<String>,
    /// Milliseconds that the first connection to a host waits for its answer, at most.
    pub hold_ms: u64,
}

/// Active measurements of links' capacities.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MeasurementView {
    /// URLs of the servers, all used at once.
    pub servers: Vec<String>,
    /// Seconds between two measurements of one link.
    pub every_s: u64,
    /// Maximum number of bytes of one measurement.
    pub max_bytes: u64,
    /// Maximum number of bytes of all measurements of one link within a day.
    pub max_daily_bytes: u64,
}

/// A utility of throughput, 0 (least cost) to 1 (most throughput).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UtilityView {
    /// Function: `fixed`, `battery` (the battery's level), `step` (changes at a battery level), `match-default` (the throughput of the system's own
    /// choice).
    pub function: String,
    /// Utility, if `fixed`.
    pub value: Option<f64>,
    /// Battery level at which it changes, if `step`.
    pub threshold: Option<f64>,
    /// Utility at or above the threshold.
    pub above: Option<f64>,
    /// Utility below the threshold.
    pub below: Option<f64>,
    /// Utility while plugged in; `null`: the same as on battery.
    pub plugged_in: Option<f64>,
}

/// One `[[link]]` entry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkEntry {
    /// Conditions, for example `name = "wlan0"`.
    pub matches: String,
    /// Context in which the entry applies, for example `moving = true`; `null` if it always does.
    #[serde(default)]
    pub when: Option<String>,
    /// Why the entry does not apply now; `null` if it applies.
    #[serde(default)]
    pub unmet: Option<String>,
    /// Devices that the entry matches now.
    pub devices: Vec<String>,
    /// Role: `normal`, `backup`, `excluded`.
    pub role: String,
    /// Position in the priority table, starting at 0.
    #[serde(default)]
    pub priority: u8,
    /// Whether its traffic counts against an allowance.
    pub metered: bool,
    /// Monthly allowance in bytes.
    pub cap_bytes: Option<u64>,
    /// Day of the month on which the count restarts.
    pub reset_day: Option<u8>,
    /// Probe mode: `continuous`, `on-demand`.
    pub probe: Option<String>,
    /// Cost per gigabyte, in the currency of the configuration.
    #[serde(default)]
    pub cost_per_gb: Option<f64>,
}

/// One `[[app]]` entry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AppEntry {
    /// Conditions, for example `exe = "/usr/bin/curl", port = 443`.
    pub matches: String,
    /// Context in which the entry applies, for example `moving = true`; `null` if it always does.
    #[serde(default)]
    pub when: Option<String>,
    /// Why the entry does not apply now; `null` if it applies.
    #[serde(default)]
    pub unmet: Option<String>,
    /// The only links allowed; `null` if all are.
    pub links: Option<Vec<String>>,
    /// Preferred links.
    pub prefer: Vec<String>,
    /// Class set by the user.
    pub class: Option<String>,
    /// Affinity: `none`, `destination`, `application`.
    pub affinity: Option<String>,
    /// How flows are carried: `auto`, `direct`, `bond`, `duplicate`; empty if a daemon of an older version does not report it.
    #[serde(default)]
    pub carry: String,
    /// Number of links over which each packet is sent, if it is duplicated.
    #[serde(default)]
    pub copies: u8,
    /// The only relay that may carry the flows; `null` if any may.
    #[serde(default)]
    pub relay: Option<String>,
    /// What happens to flows that no relay takes: `direct`, `none` (they fail); `null`: what the policy says.
    #[serde(default)]
    pub fallback: Option<String>,
    /// Where host names in requests of proxy clients are resolved: `here`, `relay`; empty if a daemon of an older version does not report it.
    #[serde(default)]
    pub resolve: String,
    /// Weight relative to other flows.
    pub weight: f64,
    /// The most that its flows get together on one link: a rate, or a percentage of the link's capacity; `null` if not limited.
    #[serde(default)]
    pub rate: Option<String>,
    /// The least that its flows get together on one link: a rate, or a percentage of the link's capacity; `null` if nothing is guaranteed.
    #[serde(default)]
    pub guarantee: Option<String>,
}

/// One exclusion.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExcludeEntry {
    /// Condition, for example `user = 1000`.
    pub matches: String,
}
