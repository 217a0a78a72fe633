//! Applications: the programs whose flows are scheduled.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A program: its executable and the name of its process (not of one of its threads).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Application {
    /// The executable's path; `None` when the process ended before it could be read.
    pub exe: Option<PathBuf>,
    /// The process's name, at most 15 bytes.
    pub name: String,
}

impl fmt::Display for Application {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.exe {
            Some(exe) => exe.display().fmt(f),
            None => self.name.fmt(f),
        }
    }
}

/// What kind of traffic an application makes (DNIS III.A; bulk added, since DBAS tells bandwidth-intensive programs apart too).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Nothing known.
    #[default]
    Unclassified,
    /// Calls, games, remote shells: little data, delay matters.
    RealTime,
    /// Web pages: many short flows.
    Browser,
    /// Long transfers.
    Bulk,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Unclassified => "unclassified",
            Self::RealTime => "real-time",
            Self::Browser => "browser",
            Self::Bulk => "bulk",
        })
    }
}
