//! `GET /v1/apps`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is known of one application, towards one destination port.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct App {
    /// The executable's path, or the process's name where the path is not known.
    pub application: String,
    /// The process's name.
    pub name: String,
    /// The destination port.
    pub port: Option<u16>,
    /// `real-time`, `browser`, `bulk`, `unclassified`.
    pub class: String,
    /// Where the class comes from: `user`, `executable`, `port`, `pattern`.
    pub class_source: Option<String>,
    /// Bytes a flow is expected to move (DBAS eq. 1).
    pub demand_bytes: Option<u64>,
    /// Flows it was learnt from.
    pub samples: u64,
    /// How far the demand is to be trusted, 0 to 1.
    pub confidence: Option<f64>,
    /// Since the last flow it was learnt from.
    pub age_ms: Option<u64>,
    /// Mean rate received (DNIS III.A).
    pub rate_down_bps: Option<u64>,
    /// Mean rate sent.
    pub rate_up_bps: Option<u64>,
    /// Highest rate received.
    pub max_rate_down_bps: Option<u64>,
    /// Highest rate sent.
    pub max_rate_up_bps: Option<u64>,
    /// Live flows.
    pub flows: u64,
    /// Joules that all the application's flows took since the daemon's start, to whatever port.
    #[serde(default)]
    pub energy_j: Option<f64>,
}
