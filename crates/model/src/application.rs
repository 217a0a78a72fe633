//! Applications: the programs whose flows Braid schedules.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A program, identified by its executable and the name of its process (not of one of its threads).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Application {
    /// Path of the executable; `None` if the process ended before Braid could read it.
    pub exe: Option<PathBuf>,
    /// Name of the process, at most 15 bytes.
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

/// Traffic class of an application (DNIS III.A). `Bulk` is an addition: DBAS also distinguishes bandwidth-intensive applications.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Not classified.
    #[default]
    Unclassified,
    /// Calls, games, remote shells: little data, sensitive to delay.
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
