//! `GET /v1/policy`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The policy in force, each entry as text that reads like the configuration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PolicyView {
    /// The scheduler's name.
    pub scheduler: String,
    /// `none`, `destination`, `application`; `null`: by class.
    pub affinity: Option<String>,
    /// What a flow of an unknown application is expected to move.
    pub default_demand_bytes: u64,
    /// How much throughput is worth its price, as text, where the scheduler asks.
    #[serde(default)]
    pub utility: Option<String>,
    /// The `[[link]]` entries in their order.
    pub links: Vec<LinkEntry>,
    /// The `[[app]]` entries in their order: the first that matches decides.
    pub apps: Vec<AppEntry>,
    /// What is left to the system.
    pub exclude: Vec<ExcludeEntry>,
}

/// One `[[link]]` entry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkEntry {
    /// The conditions, `name = "wlan0"`.
    pub matches: String,
    /// Devices it speaks of now.
    pub devices: Vec<String>,
    /// `normal`, `backup`, `excluded`.
    pub role: String,
    /// Its place in the priority table, 0 first.
    #[serde(default)]
    pub priority: u8,
    /// Its traffic is counted.
    pub metered: bool,
    /// The monthly allowance.
    pub cap_bytes: Option<u64>,
    /// The day on which the count starts anew.
    pub reset_day: Option<u8>,
    /// `continuous`, `on-demand`.
    pub probe: Option<String>,
    /// What a gigabyte costs in money.
    #[serde(default)]
    pub cost_per_gb: Option<f64>,
}

/// One `[[app]]` entry.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AppEntry {
    /// The conditions, `exe = "/usr/bin/curl", port = 443`.
    pub matches: String,
    /// The only links allowed; `null`: all.
    pub links: Option<Vec<String>>,
    /// Links preferred.
    pub prefer: Vec<String>,
    /// The class set by the user.
    pub class: Option<String>,
    /// `none`, `destination`, `application`.
    pub affinity: Option<String>,
    /// `auto`, `direct`, `bond`, `duplicate`; empty: not told.
    #[serde(default)]
    pub carry: String,
    /// Over how many links each packet goes, where it goes over several.
    #[serde(default)]
    pub copies: u8,
    /// The only relay that may carry them; `null`: any.
    #[serde(default)]
    pub relay: Option<String>,
    /// Who looks up the names that clients of a proxy open connections to: `here`, `relay`; empty: not told.
    #[serde(default)]
    pub resolve: String,
    /// Its share against other flows.
    pub weight: f64,
}

/// One exclusion.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ExcludeEntry {
    /// The condition, `user = 1000`.
    pub matches: String,
}
