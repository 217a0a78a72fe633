//! Facts about the context that conditions of rules (`when`) refer to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One fact about the context.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Fact {
    /// Name of the fact, for example `moving`.
    pub name: String,
    /// Value, for example `true`.
    pub value: String,
    /// Source of the value: `set` (by a user), `sensor` (an accelerometer) or `system`.
    pub source: String,
    /// For a value that was set for a limited time: when it is cleared.
    #[serde(default)]
    pub remaining_ms: Option<u64>,
}

/// Request of `POST /v1/context`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FactChange {
    /// Name of the fact: 1 to 32 lower-case letters, digits, `-` and `_`, starting with a letter.
    pub name: String,
    /// New value of 1 to 64 bytes; `null` clears the fact.
    #[serde(default)]
    pub value: Option<String>,
    /// Time after which the fact is cleared; `null`: never.
    #[serde(default)]
    pub for_ms: Option<u64>,
}
