//! Why a request is refused. The API server converts it to problem details (RFC 9457).

use std::fmt;

use braid_api::Finding;

/// Category of the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The request cannot be understood.
    Unclear,
    /// The named object does not exist.
    NotFound,
    /// The request conflicts with the current state.
    Conflict,
    /// The requested configuration is not valid.
    Invalid,
    /// The operation failed.
    Failed,
}

/// A refused request. Nothing is changed, unless `detail` says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestError {
    /// Category of the error.
    pub cause: Cause,
    /// Kind of the error, the same for every occurrence.
    pub title: &'static str,
    /// This occurrence: object, reason and remedy.
    pub detail: String,
    /// Findings of a refused configuration.
    pub findings: Vec<Finding>,
}

impl RequestError {
    /// The request cannot be understood.
    pub fn unclear(detail: impl Into<String>) -> Self {
        Self::new(Cause::Unclear, "Not understood", detail)
    }

    /// The named object does not exist.
    pub fn not_found(title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Cause::NotFound, title, detail)
    }

    /// The request conflicts with the current state.
    pub fn conflict(title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Cause::Conflict, title, detail)
    }

    /// The requested configuration is not valid.
    pub fn invalid(title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Cause::Invalid, title, detail)
    }

    /// The operation failed.
    pub fn failed(title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Cause::Failed, title, detail)
    }

    fn new(cause: Cause, title: &'static str, detail: impl Into<String>) -> Self {
        Self { cause, title, detail: detail.into(), findings: Vec::new() }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.title, self.detail)
    }
}

impl std::error::Error for RequestError {}
