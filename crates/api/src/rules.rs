//! Rules that programs add for a limited time, and the rates that they reserve.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::AppEntry;

/// Request of `POST /v1/rules`: adds a rule, renews or changes it, or removes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleChange {
    /// Name of the rule, unique on this machine: 1 to 32 lower-case letters, digits, `-` and `_`, starting with a letter.
    pub name: String,
    /// The rule: keys and values of an `[[app]]` entry of the configuration without `when` and `guarantee`, for example `{"match": {"port": 443}, "prefer": ["wlan0"]}`.
    /// `null` removes the rule.
    #[serde(default)]
    pub rule: Option<Map<String, Value>>,
    /// What to keep free on a link for the direct flows that the rule matches.
    #[serde(default)]
    pub reserve: Option<Reserve>,
    /// Time after which the rule is removed: 1 s to 1 h. Another request with the same name renews it. Required with `rule`.
    #[serde(default)]
    pub lease_ms: Option<u64>,
    /// Whether the rule outlives the program that asks. Otherwise it is removed when the process that opened the connection to the Unix socket ends. A
    /// rule that was added over TCP, or from another process namespace, always outlives its program.
    #[serde(default)]
    pub stays: bool,
}

/// Rates to keep free on a link.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Reserve {
    /// Rate towards this machine; at least one of the two is required.
    pub down_bps: Option<u64>,
    /// Rate away from this machine.
    pub up_bps: Option<u64>,
    /// Device of the link; `null`: Braid chooses one that can keep the rates.
    pub link: Option<String>,
}

/// A rule that a program has added.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramRule {
    /// Name of the rule.
    pub name: String,
    /// Id of the process with which the rule ends; `null`: only its lease ends it.
    pub process: Option<u32>,
    /// Name of that process; "remote controller" for an entry of the controller that `[datapath]` names.
    pub program: Option<String>,
    /// Rest of its lease; 0 for an entry of the remote controller, which has none.
    pub remaining_ms: u64,
    /// The rule. It applies to flows that no `[[app]]` entry of the configuration matches. `unmet`: why it does not apply now.
    pub entry: AppEntry,
    /// What is kept free for its flows.
    #[serde(default)]
    pub reservation: Option<Reservation>,
}

/// What is kept free on a link for the flows of a program's rule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reservation {
    /// Rate towards this machine.
    pub down_bps: Option<u64>,
    /// Rate away from this machine.
    pub up_bps: Option<u64>,
    /// Device of the link on which it is kept; `null` if none can keep it.
    pub link: Option<String>,
    /// Whether it is kept.
    pub kept: bool,
    /// Why it is not kept.
    pub reason: Option<String>,
}
