//! Events of a run.

use std::collections::BTreeMap;
use std::path::PathBuf;

use braid_model::{ByteCount, Rate};
use serde::Serialize;

/// Event of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    /// The first response for a file arrived.
    Started {
        /// Name of the file.
        file: String,
        /// Size, if the server reports it.
        size: Option<ByteCount>,
        /// Bytes present from an earlier run.
        there: ByteCount,
        /// The file is downloaded in ranges over all links.
        ranged: bool,
    },
    /// A note for the user.
    Note {
        /// Text of the note.
        text: String,
    },
    /// Progress of the run.
    Progress(Progress),
    /// A file is complete.
    Finished(Outcome),
    /// A file failed.
    Failed {
        /// Name of the file.
        file: String,
        /// Error message.
        error: String,
        /// Exit status for this error.
        code: u8,
    },
}

/// Progress of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Progress {
    /// Time since the start, in seconds.
    pub seconds: f64,
    /// Bytes present of all files that have started.
    pub got: ByteCount,
    /// Total size, if all sizes are known.
    pub size: Option<ByteCount>,
    /// Current rate.
    pub rate_bps: Rate,
    /// Number of complete files, and of all files.
    pub files: (usize, usize),
    /// Progress of each link.
    pub links: Vec<LinkProgress>,
}

/// Progress of a link.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LinkProgress {
    /// Name of the link.
    pub name: String,
    /// Bytes received over the link.
    pub moved: ByteCount,
    /// Part of these bytes that was already present.
    pub twice: ByteCount,
    /// Current rate.
    pub rate_bps: Rate,
    /// Requests in progress on the link.
    pub requests: usize,
}

/// A complete file.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the file.
    pub file: String,
    /// Path of the file; `None` for standard output.
    pub path: Option<PathBuf>,
    /// Size of the file.
    pub size: ByteCount,
    /// Duration of the download in seconds.
    pub seconds: f64,
    /// Bytes of the file that each link delivered.
    pub links: BTreeMap<String, ByteCount>,
}
