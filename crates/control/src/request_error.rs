//! Why a client's request cannot be done, in the terms of what decides. The API's server makes problem details of it.

use std::fmt;

use braid_api::Finding;

/// Whose matter it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The request cannot be understood.
    Unclear,
    /// What it names is not there.
    NotFound,
    /// It does not fit what stands now.
    Conflict,
    /// What it would put in force is wrong.
    Invalid,
    /// It could not be done here.
    Failed,
}

/// A request that is not done; nothing is changed by it, unless `detail` says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestError {
    /// Whose matter it is.
    pub cause: Cause,
    /// The kind of error, the same for every occurrence.
    pub title: &'static str,
    /// This occurrence: the thing, the reason and the remedy.
    pub detail: String,
    /// What is wrong in a configuration that was refused.
    pub findings: Vec<Finding>,
}

impl RequestError {
    /// The request cannot be understood.
    pub fn unclear(detail: impl Into<String>) -> Self {
        Self::new(Cause::Unclear, "Not understood", detail)
    }

    /// What the request names is not there.
    pub fn not_found(title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Cause::NotFound, title, detail)
    }

    /// The request does not fit what stands now.
    pub fn conflict(title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Cause::Conflict, title, detail)
    }

    /// What the request would put in force is wrong.
    pub fn invalid(title: &'static str, detail: impl Into<String>) -> Self {
        Self::new(Cause::Invalid, title, detail)
    }

    /// The request could not be done here.
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
