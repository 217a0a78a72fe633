//! `POST /v1/explain`: why a flow gets the link it gets.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::PathState;

/// What to explain: a live flow by `flow`, or a flow to come by program and destination.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExplainRequest {
    /// A live flow's id.
    pub flow: Option<u64>,
    /// The executable's path.
    pub exe: Option<String>,
    /// The process's name; left out: the executable's last part.
    pub name: Option<String>,
    /// The destination: an address.
    pub destination: Option<String>,
    /// The destination's port.
    pub port: Option<u16>,
    /// `tcp` (left out) or `udp`.
    pub protocol: Option<String>,
    /// The program's user.
    pub user: Option<u32>,
    /// The program's control group.
    pub cgroup: Option<String>,
}

/// What becomes of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// It gets a link.
    Steered,
    /// A peer carries it, over several links.
    Bonded,
    /// The system decides.
    LeftAlone,
    /// It fails: a strict rule has no usable link.
    Denied,
}

/// Why a flow gets the link it gets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// The flow explained, in words: program and destination.
    pub subject: String,
    /// What becomes of it.
    pub outcome: Outcome,
    /// The link chosen.
    pub link: Option<String>,
    /// The link that would have been next.
    pub runner_up: Option<String>,
    /// In one or two sentences.
    pub reason: String,
    /// The `[[app]]` entry that matched, counted from 1.
    pub rule: Option<u32>,
    /// That entry's conditions.
    pub rule_text: Option<String>,
    /// The scheduler's name.
    pub scheduler: String,
    /// The application's class.
    pub class: Option<String>,
    /// What stays on one link.
    pub affinity: Option<String>,
    /// Bytes the flow is expected to move.
    pub demand_bytes: Option<u64>,
    /// `down` or `up`: which way most of them go.
    pub direction: Option<String>,
    /// Every link with what the rule saw of it.
    pub candidates: Vec<Candidate>,
    /// Who carries it, where that is not the kernel.
    #[serde(default)]
    pub peer: Option<String>,
    /// How a living flow that a peer carries is spread over the links.
    #[serde(default)]
    pub paths: Vec<Share>,
    /// Whether flows of the program have been seen, or a rule speaks of it; `null` for a living flow.
    #[serde(default)]
    pub program_known: Option<bool>,
    /// Under the scheduler `operetta`: what the links are to do with all load in the flow's direction.
    #[serde(default)]
    pub optimum: Option<Optimum>,
}

/// The outcome of OPERETTA's Algorithm 1 for everything that has to be moved in one direction, connections and bonded flows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Optimum {
    /// The target throughput.
    pub target_bps: u64,
    /// The throughput that all load together reaches.
    pub throughput_bps: u64,
    /// The throughput meets the target.
    pub feasible: bool,
    /// The energy that moving all load takes.
    pub energy_j: f64,
    /// The dearest link that carries bonded traffic: more demand would be paid at its price.
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

/// One link's part in a flow that a peer carries.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Share {
    /// The link.
    pub link: String,
    /// The flow may use it.
    pub allowed: bool,
    /// Its path's state, as in [`Path`](crate::Path); `null` without one.
    pub state: Option<PathState>,
    /// Why it carries nothing of the flow now.
    pub reason: Option<String>,
    /// Bytes of the flow received over it.
    pub rx_bytes: u64,
    /// Bytes of the flow sent over it.
    pub tx_bytes: u64,
    /// Of all the flow's bytes, 0 to 1.
    pub share: Option<f64>,
    /// Its path's smoothed round-trip time.
    pub rtt_us: Option<u64>,
    /// What its path can deliver from here, that is upwards: what comes from the peer is the peer's to know.
    pub rate_bps: Option<u64>,
}

/// One link as the rule saw it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Candidate {
    /// The link.
    pub link: String,
    /// The flow may use it.
    pub allowed: bool,
    /// Why it may not.
    pub reason: Option<String>,
    /// What its flows still have to move in the flow's direction.
    pub load_bytes: Option<u64>,
    /// Its capacity in the flow's direction.
    pub capacity_bps: Option<u64>,
    /// Nothing has been measured in that direction yet: the capacity is what the rule assumes meanwhile.
    #[serde(default)]
    pub capacity_assumed: bool,
    /// When it would be done with its load and the flow.
    pub finish_us: Option<u64>,
    /// When the flow itself is expected to end on it, which maximum throughput compares: shorter flows do not wait for all of its load.
    pub end_us: Option<u64>,
    /// Its virtual start time, under the round robins, in units of one flow on the fastest link.
    pub virtual_start: Option<f64>,
    /// The system's own order, least first.
    pub rank: Option<u32>,
    /// Live flows on it.
    pub flows: Option<u64>,
}
