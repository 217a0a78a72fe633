//! What `braid doctor` finds.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What this system can and cannot do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DoctorReport {
    /// The program's version.
    pub version: String,
    /// Nothing is known to be missing that `braid up` needs; `modes` tells what could not be found out.
    pub whole_machine: bool,
    /// The same for `braid run`.
    pub one_command: bool,
    /// What each way of using Braid can do here.
    #[serde(default)]
    pub modes: Vec<Mode>,
    /// Each thing looked at, in the order of their weight.
    pub checks: Vec<Check>,
}

/// One way of using Braid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Mode {
    /// The command: `up` or `run`.
    pub name: String,
    /// `ok`: it works. `missing`: it does not. `unknown`: this user cannot tell.
    pub verdict: Verdict,
    /// The names of the checks that decide, if it is not `ok`.
    pub because: Vec<String>,
}

/// One thing looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// What was looked at, in one or two words.
    pub name: String,
    /// How it stands.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub remedy: Option<String>,
    /// `braid up` needs it.
    #[serde(default)]
    pub needed_by_up: bool,
    /// `braid run` needs it.
    #[serde(default)]
    pub needed_by_run: bool,
}

/// How a thing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Works, but not as well as it might.
    Warning,
    /// Does not work.
    Missing,
    /// Could not be told.
    Unknown,
}
