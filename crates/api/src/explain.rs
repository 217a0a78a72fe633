//! `POST /v1/explain`: the reason for a flow's choice of link.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::PathState;

/// Request of `POST /v1/explain`: a live flow (`flow`), or a hypothetical flow by program and destination.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExplainRequest {
    /// Id of a live flow.
    pub flow: Option<u64>,
    /// Path of the executable.
    pub exe: Option<String>,
    /// Name of the process. Default: the file name of the executable.
    pub name: Option<String>,
    /// IP address of the destination.
    pub destination: Option<String>,
    /// Destination port.
    pub port: Option<u16>,
    /// `tcp` (default) or `udp`.
    pub protocol: Option<String>,
    /// User id of the program.
    pub user: Option<u32>,
    /// Control group of the program.
    pub cgroup: Option<String>,
}

/// Outcome of the decision for a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Braid assigns it to a link.
    Steered,
    /// A peer carries it over several links.
    Bonded,
    /// The operating system's routing decides.
    LeftAlone,
    /// The connection fails because a strict rule has no usable link.
    Denied,
}

/// The decision for a flow and the reason for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// Description of the flow: program and destination.
    pub subject: String,
    /// Outcome of the decision.
    pub outcome: Outcome,
    /// Whether the flow leaves through a relay or fails (`fallback = "none"`).
    #[serde(default)]
    pub confined: bool,
    /// What leaves directly nevertheless, if the flow is confined; else empty.
    #[serde(default)]
    pub exceptions: Vec<String>,
    /// Device of the chosen link.
    pub link: Option<String>,
    /// Device of the second-best link.
    pub runner_up: Option<String>,
    /// The reason, in one or two sentences.
    pub reason: String,
    /// Number of the `[[app]]` entry that matched, starting at 1.
    pub rule: Option<u32>,
    /// Name of the rule of a program (`GET /v1/rules`) that matched; then `rule` is `null`.
    #[serde(default)]
    pub program_rule: Option<String>,
    /// Conditions of that entry or rule.
    pub rule_text: Option<String>,
    /// Context in which that entry applies, which holds now; `null` if it always applies.
    #[serde(default)]
    pub when: Option<String>,
    /// Earlier entries that match, but do not apply because their condition does not hold now.
    #[serde(default)]
    pub skipped: Vec<SkippedRule>,
    /// Name of the scheduler.
    pub scheduler: String,
    /// Class of the application.
    pub class: Option<String>,
    /// Which flows stay on the same link: `none`, `destination`, `application`.
    pub affinity: Option<String>,
    /// Expected size of the flow in bytes.
    pub demand_bytes: Option<u64>,
    /// Direction of most of these bytes: `down` or `up`.
    pub direction: Option<String>,
    /// Every link, with the inputs of the decision.
    pub candidates: Vec<Candidate>,
    /// Name of the peer that carries the flow; `null` if the kernel sends it directly.
    #[serde(default)]
    pub peer: Option<String>,
    /// For a live flow that a peer carries: how it is spread over the links.
    #[serde(default)]
    pub paths: Vec<Share>,
    /// Whether Braid has seen flows of the program, or a rule names it; `null` for a live flow.
    #[serde(default)]
    pub program_known: Option<bool>,
    /// Under the scheduler `operetta`: the computed optimum for the whole load in the flow's direction.
    #[serde(default)]
    pub optimum: Option<Optimum>,
    /// For a live direct flow: what `weight`, `rate` and `guarantee` give it on its link; `null` if none of them concerns it.
    #[serde(default)]
    pub share: Option<FlowShare>,
}

/// Result of OPERETTA's Algorithm 1 for the load in one direction: direct connections and bonded flows together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Optimum {
    /// The target throughput.
    pub target_bps: u64,
    /// The throughput that all load together reaches.
    pub throughput_bps: u64,
    /// Whether the throughput meets the target.
    pub feasible: bool,
    /// Energy in joules to move the whole load.
    pub energy_j: f64,
    /// Marginal link: the most expensive link that carries bonded traffic. Additional demand would cost its price.
    pub marginal_link: Option<String>,
    /// The weight `w_j` of each link that carries bonded traffic.
    pub weights: Vec<LinkWeight>,
}

/// A link's weight.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkWeight {
    /// The link.
    pub link: String,
    /// Its share of all bonded traffic, 0 to 1.
    pub weight: f64,
}

/// An `[[app]]` entry that matches a flow, but whose condition on the context does not hold now.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SkippedRule {
    /// Number of the entry, starting at 1.
    pub rule: u32,
    /// Conditions on the flow.
    pub rule_text: String,
    /// Context in which the entry applies, for example `moving = true`.
    pub when: String,
    /// The part of it that does not hold, for example `moving is not set`.
    pub unmet: String,
}

/// What `weight`, `rate` and `guarantee` give a live flow on its link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlowShare {
    /// Weight of its rule.
    pub weight: f64,
    /// Limit of its rule, as in the configuration.
    pub rate: Option<String>,
    /// Guarantee of its rule, as in the configuration.
    pub guarantee: Option<String>,
    /// Share of the link towards this machine.
    pub down: ShareDirection,
    /// Share of the link away from this machine.
    pub up: ShareDirection,
    /// Reason why the preferences have no effect on the flow; `null` if they have.
    pub note: Option<String>,
    /// What the network of the link keeps for the guarantees of all its flows; `null` if Braid has asked it for nothing.
    #[serde(default)]
    pub network: Option<crate::NetworkReservation>,
}

/// A flow's share of its link in one direction.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ShareDirection {
    /// Rate that a program has reserved on this link for the flows of the rule together (`GET /v1/rules`).
    #[serde(default)]
    pub reserved_bps: Option<u64>,
    /// Rate to which Braid limits the flow now; `null` if it does not.
    pub target_bps: Option<u64>,
    /// Measured rate; `null` if the flow is not measured.
    pub measured_bps: Option<u64>,
    /// Minimum rate of the flow while it has data to move and the link's current flows stay the same; `null` if the link's capacity is unknown.
    pub guaranteed_bps: Option<u64>,
    /// Longest wait in the sender of a burst of up to 64 KiB, for a flow whose own rate is below the one at which it is served at least.
    pub delay_us: Option<u64>,
    /// Condition of `delay_us`, or the reason why there is no bound.
    pub delay_note: Option<String>,
}

/// Share of one link in a flow that a peer carries.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Share {
    /// Device of the link.
    pub link: String,
    /// Whether the flow may use the link.
    pub allowed: bool,
    /// State of the path over this link, as in [`Path`](crate::Path); `null` if there is no path.
    pub state: Option<PathState>,
    /// Reason why the link carries nothing of the flow now.
    pub reason: Option<String>,
    /// Bytes of the flow received over this link.
    pub rx_bytes: u64,
    /// Bytes of the flow sent over this link.
    pub tx_bytes: u64,
    /// Fraction of all bytes of the flow, 0 to 1.
    pub share: Option<f64>,
    /// Smoothed round-trip time of the path.
    pub rtt_us: Option<u64>,
    /// Delivery rate of the path in the upward direction. Only the peer can measure the downward direction.
    pub rate_bps: Option<u64>,
}

/// One link, with the inputs of the decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Candidate {
    /// Device of the link.
    pub link: String,
    /// Whether the flow may use the link.
    pub allowed: bool,
    /// Reason why the flow may not use it.
    pub reason: Option<String>,
    /// Bytes that its flows still have to move in the flow's direction.
    pub load_bytes: Option<u64>,
    /// Capacity in the flow's direction.
    pub capacity_bps: Option<u64>,
    /// Whether `capacity_bps` is the default, because nothing has been measured in that direction yet.
    #[serde(default)]
    pub capacity_assumed: bool,
    /// Time until the link has moved its load and the flow.
    pub finish_us: Option<u64>,
    /// Expected time until the flow ends on this link. The scheduler `max-throughput` compares this value. It can be less than `finish_us`,
    /// since a short flow does not wait for all of the load.
    pub end_us: Option<u64>,
    /// Virtual start time under the round-robin schedulers, in units of one flow on the fastest link.
    pub virtual_start: Option<f64>,
    /// Rank of the link in the system's own order, lowest first.
    pub rank: Option<u32>,
    /// Number of live flows on the link.
    pub flows: Option<u64>,
}
