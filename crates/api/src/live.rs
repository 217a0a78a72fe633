//! What is told as it happens, and what is remembered of it: `GET /v1/events`, `/v1/notes`, `/v1/history`, `/v1/history/apps` and
//! `/v1/gains`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Flow;

/// What happened, in plain words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Note {
    /// Grows from note to note, also from one life of the daemon to the next.
    pub id: u64,
    /// Milliseconds of Unix time.
    pub at_ms: u64,
    /// `link`, `flow`, `peer`, `config`, `battery`, `policy`.
    pub kind: String,
    /// `info`, `warning`.
    pub level: String,
    /// In a sentence. Names in it are others' to choose: show it as text.
    pub text: String,
}

/// What links did at one moment, or on average over a span that ends with it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Sample {
    /// Milliseconds of Unix time.
    pub at_ms: u64,
    /// Every link, in the order of their devices' numbers.
    pub links: Vec<LinkSample>,
}

/// What one link did.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkSample {
    /// The link's device.
    pub name: String,
    /// What it received.
    pub rx_bps: Option<u64>,
    /// What it sent.
    pub tx_bps: Option<u64>,
    /// Round-trip time.
    pub rtt_us: Option<u64>,
    /// Share of segments sent again, 0 to 1.
    pub loss: Option<f64>,
    /// Watts that moving its bytes took, beyond what it needs when idle.
    pub power_w: Option<f64>,
}

/// `flows` of `GET /v1/events`: what has changed among the live flows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlowChanges {
    /// `put` is every live flow: forget those known before.
    pub full: bool,
    /// Flows that are new, or changed in more than their age.
    pub put: Vec<Flow>,
    /// Ids of those that ended.
    pub gone: Vec<u64>,
}

/// `GET /v1/history`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct History {
    /// The time from one sample to the next. Samples are missing for when the daemon did not run.
    pub resolution_ms: u64,
    /// The oldest first.
    pub samples: Vec<Sample>,
}

/// `GET /v1/history/apps`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppHistory {
    /// The time from one sample to the next. Samples are missing for when the daemon did not run.
    pub resolution_ms: u64,
    /// The oldest first.
    pub samples: Vec<AppsSample>,
}

/// What applications moved, on average over a span that ends at a moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppsSample {
    /// Milliseconds of Unix time.
    pub at_ms: u64,
    /// Those that moved something, the busiest first; at most 16.
    pub apps: Vec<AppSample>,
    /// What all others received.
    pub rest_rx_bps: u64,
    /// What all others sent.
    pub rest_tx_bps: u64,
}

/// What one application moved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppSample {
    /// The application, as flows and applications name it. Others chose it: show it as text.
    pub application: String,
    /// What it received.
    pub rx_bps: u64,
    /// What it sent.
    pub tx_bps: u64,
    /// Its live flows; of a span, the most at a time.
    pub flows: u64,
}

/// How finely [`History`] is told, and how far back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Resolution {
    /// The last five minutes.
    #[default]
    #[serde(rename = "1s")]
    Second,
    /// The last hour.
    #[serde(rename = "10s")]
    TenSeconds,
    /// The last day.
    #[serde(rename = "5m")]
    FiveMinutes,
    /// The last thirty days.
    #[serde(rename = "1h")]
    Hour,
}

/// What Braid gained over some days, against using only the link that the system would choose. Energy, money and outages are estimates.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Gains {
    /// The days summed up, today among them.
    pub days: u32,
    /// Bytes by link.
    pub links: Vec<LinkGain>,
    /// Flows that went on over another link when theirs died.
    pub flows_moved: u64,
    /// Flows that were ended since their link was dead, so that their programs connect anew.
    pub flows_ended: u64,
    /// Seconds for which the system's own choice was dead and another link was not.
    pub outage_bridged_s: u64,
    /// Joules.
    pub energy_j: Compared,
    /// Money, in the configuration's unit; `null` where no link costs any.
    pub money: Option<Compared>,
    /// Always true: what would have been is the model's estimate.
    pub estimated: bool,
}

/// One link's part in [`Gains`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LinkGain {
    /// The link's device.
    pub name: String,
    /// Bytes the device received.
    pub rx_bytes: u64,
    /// Bytes the device sent.
    pub tx_bytes: u64,
}

/// What was, and what would have been.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Compared {
    /// With all links; `null`: not known of any.
    pub actual: Option<f64>,
    /// Had all bytes gone over the system's own choice; `null`: not known of it.
    pub only_one: Option<f64>,
}

/// One point of `GET /v1/tradeoff`: what the links present could give together, and what that takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TradeoffPoint {
    /// What throughput is worth, 0 to 1.
    pub utility: f64,
    /// Downloads together; `null` where no link's capacity is known.
    pub throughput_bps: Option<u64>,
    /// Watts beyond idle at that throughput; `null` where a link that is used is of unknown appetite.
    pub power_w: Option<f64>,
}
