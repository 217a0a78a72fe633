//! `GET /v1/apps`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Learned data about one application towards one destination port.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct App {
    /// Path of the executable, or name of the process if the path is unknown.
    pub application: String,
    /// Name of the process.
    pub name: String,
    /// Destination port.
    pub port: Option<u16>,
    /// Class: `real-time`, `browser`, `bulk`, `unclassified`.
    pub class: String,
    /// Source of the class: `user`, `executable`, `port`, `pattern`.
    pub class_source: Option<String>,
    /// Expected bytes per flow (DBAS eq. 1).
    pub demand_bytes: Option<u64>,
    /// Number of flows that the data was learned from.
    pub samples: u64,
    /// Confidence in the demand, 0 to 1.
    pub confidence: Option<f64>,
    /// Time since the last flow that the data was learned from.
    pub age_ms: Option<u64>,
    /// Mean receive rate (DNIS III.A).
    pub rate_down_bps: Option<u64>,
    /// Mean send rate.
    pub rate_up_bps: Option<u64>,
    /// Highest receive rate.
    pub max_rate_down_bps: Option<u64>,
    /// Highest send rate.
    pub max_rate_up_bps: Option<u64>,
    /// Number of live flows.
    pub flows: u64,
    /// Energy in joules that all flows of the application took since the daemon started, regardless of port.
    #[serde(default)]
    pub energy_j: Option<f64>,
}
