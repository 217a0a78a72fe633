//! Errors over HTTP: problem details (RFC 9457).

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Why a request failed; sent as `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Problem {
    /// The kind of problem; `about:blank` where the status says all.
    #[serde(rename = "type", default = "blank")]
    pub kind: String,
    /// The kind in words, the same for every occurrence.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// This occurrence: the thing, the reason and the remedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// What is wrong in a configuration that was refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// One thing found in a configuration, at its place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finding {
    /// `error`, `warning`.
    pub severity: String,
    /// The file.
    pub file: String,
    /// The line, counted from 1.
    pub line: u64,
    /// The character in it, counted from 1.
    pub column: u64,
    /// The line itself.
    pub excerpt: String,
    /// What is wrong.
    pub reason: String,
    /// The nearest valid name.
    pub nearest: Option<String>,
    /// What to do.
    pub remedy: Option<String>,
}

impl Problem {
    /// The media type problems are sent as.
    pub const MEDIA_TYPE: &'static str = "application/problem+json";

    /// A problem whose kind the status and `title` say.
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
