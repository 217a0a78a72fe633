//! HTTP errors as problem details (RFC 9457).

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Reason why a request failed. Sent as `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    /// Type of the problem; `about:blank` if it adds nothing to the status.
    #[serde(rename = "type", default = "blank")]
    pub kind: String,
    /// Summary of the problem type, the same for every occurrence.
    pub title: String,
    /// HTTP status code.
    pub status: u16,
    /// Details of this occurrence: the affected object, the reason and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Errors and warnings of a rejected configuration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// One error or warning in a configuration, with its position.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// Severity: `error`, `warning`.
    pub severity: String,
    /// Path of the file.
    pub file: String,
    /// Line number, starting at 1.
    pub line: u64,
    /// Column in characters, starting at 1.
    pub column: u64,
    /// Text of the line.
    pub excerpt: String,
    /// Description of the problem.
    pub reason: String,
    /// The most similar valid name.
    pub nearest: Option<String>,
    /// Remedy.
    pub remedy: Option<String>,
}

impl Problem {
    /// Media type of problem details.
    pub const MEDIA_TYPE: &'static str = "application/problem+json";

    /// A problem of the type `about:blank`.
    pub fn new(status: u16, title: &str, detail: impl Into<String>) -> Self {
        Self { kind: blank(), title: title.to_owned(), status, detail: Some(detail.into()), findings: Vec::new() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.detail {
            Some(detail) => write!(f, "{}: {detail}", self.title),
            None => write!(f, "{} (HTTP status {})", self.title, self.status),
        }
    }
}

impl std::error::Error for Problem {}

fn blank() -> String {
    "about:blank".to_owned()
}
