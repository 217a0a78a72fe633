//! Live events and history: `GET /v1/events`, `/v1/notes`, `/v1/history`, `/v1/history/apps`, `/v1/gains` and `/v1/tradeoff`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Flow;

/// One event, described in a sentence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Note {
    /// Increases from note to note, also across restarts of the daemon.
    pub id: u64,
    /// Time in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Subject: `link`, `flow`, `peer`, `config`, `battery`, `policy`.
    pub kind: String,
    /// Severity: `info`, `warning`.
    pub level: String,
    /// Description in a sentence. It contains untrusted names: display it as plain text.
    pub text: String,
}

/// Measurements of all links at one moment, or averages over a span that ends at that moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Sample {
    /// Time in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// All links, in the order of their interface indices.
    pub links: Vec<LinkSample>,
}

/// Measurements of one link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkSample {
    /// Device of the link.
    pub name: String,
    /// Receive rate.
    pub rx_bps: Option<u64>,
    /// Send rate.
    pub tx_bps: Option<u64>,
    /// Round-trip time.
    pub rtt_us: Option<u64>,
    /// Fraction of segments that were retransmitted, 0 to 1.
    pub loss: Option<f64>,
    /// Power in watts for the transfer of its bytes, in addition to the idle power.
    pub power_w: Option<f64>,
}

/// `flows` of `GET /v1/events`: changes among the live flows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlowChanges {
    /// Whether `put` lists all live flows. If so, discard all flows received before.
    pub full: bool,
    /// Flows that are new or changed. A change of `age_ms` alone does not count.
    pub put: Vec<Flow>,
    /// Ids of flows that ended.
    pub gone: Vec<u64>,
}

/// `GET /v1/history`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct History {
    /// Interval between samples. There are no samples for times when the daemon did not run.
    pub resolution_ms: u64,
    /// Samples, oldest first.
    pub samples: Vec<Sample>,
}

/// `GET /v1/history/apps`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppHistory {
    /// Interval between samples. There are no samples for times when the daemon did not run.
    pub resolution_ms: u64,
    /// Samples, oldest first.
    pub samples: Vec<AppsSample>,
}

/// Average rates of applications over a span that ends at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppsSample {
    /// Time in milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Applications that moved data, at most 16, in descending order of rate.
    pub apps: Vec<AppSample>,
    /// Receive rate of all other applications together.
    pub rest_rx_bps: u64,
    /// Send rate of all other applications together.
    pub rest_tx_bps: u64,
}

/// Average rates of one application.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AppSample {
    /// The application, as in `application` of flows and applications. It is untrusted: display it as plain text.
    pub application: String,
    /// Receive rate.
    pub rx_bps: u64,
    /// Send rate.
    pub tx_bps: u64,
    /// Number of live flows; in a sample of a history, the largest number at any moment of it.
    pub flows: u64,
}

/// Interval between the samples of a history. It also determines how far back the history goes.
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

/// Benefit of Braid over some days, compared with using only the link that the system would choose.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Gains {
    /// Number of days in the sum, including today.
    pub days: u32,
    /// Bytes per link.
    pub links: Vec<LinkGain>,
    /// Bonded flows that continued over other links when a link died. Direct flows cannot.
    pub flows_moved: u64,
    /// Flows that Braid closed because their link was dead, so that their programs reconnect.
    pub flows_ended: u64,
    /// Seconds during which the link of the system's choice was dead and another link was alive.
    pub outage_bridged_s: u64,
    /// Energy in joules.
    pub energy_j: Compared,
    /// Cost of data, in the currency of the configuration; `null` if no link has a cost.
    pub money: Option<Compared>,
    /// Always true: the values without Braid are estimates of a model.
    pub estimated: bool,
}

/// Share of one link in [`Gains`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LinkGain {
    /// Device of the link.
    pub name: String,
    /// Bytes that the device received.
    pub rx_bytes: u64,
    /// Bytes that the device sent.
    pub tx_bytes: u64,
}

/// A value with Braid, and the estimate for the system's single link. Bytes are counted; energy and money with Braid are computed from them, the values
/// without Braid from a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Compared {
    /// Value with all links; `null` if it is unknown for every link.
    pub actual: Option<f64>,
    /// Value if all bytes had used the link of the system's choice; `null` if it is unknown for that link.
    pub only_one: Option<f64>,
}

/// One point of `GET /v1/tradeoff`: total throughput of the present links at one utility, and the power for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TradeoffPoint {
    /// Utility of throughput, 0 to 1.
    pub utility: f64,
    /// Total throughput of downloads; `null` if no capacity of a link is known.
    pub throughput_bps: Option<u64>,
    /// Power in watts at that throughput, in addition to the idle power; `null` if the power profile of a used link is unknown.
    pub power_w: Option<f64>,
}
