//! What a run tells.

use std::collections::BTreeMap;
use std::path::PathBuf;

use braid_model::{ByteCount, Rate};
use serde::Serialize;

/// What a run tells.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The first answer about a file came.
    Started {
        /// Its name.
        file: String,
        /// Its size, where told.
        size: Option<ByteCount>,
        /// What an earlier run brought of it.
        there: ByteCount,
        /// It comes in ranges, over all links.
        ranged: bool,
    },
    /// Something the user should know.
    Note {
        /// The note, for people.
        text: String,
    },
    /// How far all is.
    Progress(Progress),
    /// A file is complete.
    Finished(Outcome),
    /// A file cannot be had.
    Failed {
        /// Its name.
        file: String,
        /// Why.
        error: String,
        /// The exit status that tells it.
        code: u8,
    },
}

/// How far all is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Progress {
    /// Since the beginning, in seconds.
    pub seconds: f64,
    /// What is there of all files that were begun.
    pub got: ByteCount,
    /// Their size, once all are known.
    pub size: Option<ByteCount>,
    /// What comes now.
    pub rate_bps: Rate,
    /// Files that are complete, and all.
    pub files: (usize, usize),
    /// By link.
    pub links: Vec<LinkProgress>,
}

/// What a link does.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkProgress {
    /// Its name.
    pub name: String,
    /// What it brought.
    pub moved: ByteCount,
    /// What of that was there already.
    pub twice: ByteCount,
    /// What it brings now.
    pub rate_bps: Rate,
    /// Requests at work on it.
    pub requests: usize,
}

/// A file that is complete.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Its name.
    pub file: String,
    /// Where it is; `None`: it went to standard output.
    pub path: Option<PathBuf>,
    /// Its size.
    pub size: ByteCount,
    /// How long it took.
    pub seconds: f64,
    /// What each link brought of it.
    pub links: BTreeMap<String, ByteCount>,
}
