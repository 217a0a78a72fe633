//! Report of `braid doctor`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which modes of Braid this system supports, and the checks behind that.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DoctorReport {
    /// Version of the program.
    pub version: String,
    /// Whether no requirement of `braid up` is known to be missing. `modes` lists what could not be determined.
    pub whole_machine: bool,
    /// Whether no requirement of `braid run` is known to be missing.
    pub one_command: bool,
    /// Support for each mode on this system.
    #[serde(default)]
    pub modes: Vec<Mode>,
    /// All checks, most important first.
    pub checks: Vec<Check>,
}

/// One mode of Braid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Mode {
    /// The command, `up` or `run`, or `gateway`.
    pub name: String,
    /// `ok`: it works. `missing`: it does not work. `unknown`: this user lacks the rights to determine it.
    pub verdict: Verdict,
    /// Names of the deciding checks if the verdict is not `ok`.
    pub because: Vec<String>,
}

/// One check of the system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// Name of the check, one or two words.
    pub name: String,
    /// Result of the check.
    pub verdict: Verdict,
    /// Observed state.
    pub found: String,
    /// Remedy.
    pub remedy: Option<String>,
    /// Whether `braid up` requires it.
    #[serde(default)]
    pub needed_by_up: bool,
    /// Whether `braid run` requires it.
    #[serde(default)]
    pub needed_by_run: bool,
    /// Whether `[gateway]` requires it.
    #[serde(default)]
    pub needed_by_gateway: bool,
}

/// Result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Works.
    Ok,
    /// Works with limitations.
    Warning,
    /// Does not work.
    Missing,
    /// Could not be determined.
    Unknown,
}
