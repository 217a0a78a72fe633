//! The journal: what a slicer that is started again has to know of its entries.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use braid_peer::state::StateDir;

/// The journal's file in the state directory.
const NAME: &str = "slicer.journal";
/// The longest journal that is read.
const MOST: u64 = 1 << 30;
/// Bytes that are appended before it is written anew, besides as many as it had.
const GROWTH: u64 = 16 << 20;

/// A file to which records are appended. What is written survives the process, not the machine's power.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: Option<File>,
    length: u64,
    /// Length when it was written anew.
    base: u64,
    /// Whether writing failed, so that it is reported once.
    failed: bool,
}

impl Journal {
    /// Opens the journal, and reads what is in it.
    pub(super) fn open(state_dir: &Path) -> anyhow::Result<(Self, Vec<u8>)> {
        let path = StateDir::open(state_dir)?.path().join(NAME);
        let mut text = Vec::new();
        if path.exists() {
            let cannot = || format!("cannot read {}: remove it, and all entries are written anew", path.display());
            File::open(&path).with_context(cannot)?.take(MOST).read_to_end(&mut text).with_context(cannot)?;
        }
        Ok((Self { path, file: None, length: 0, base: 0, failed: false }, text))
    }

    /// Appends records. Returns an error that is new.
    pub(super) fn append(&mut self, records: &[u8]) -> Option<String> {
        self.length += records.len() as u64;
        let written = match &mut self.file {
            Some(file) => file.write_all(records),
            None => Err(std::io::Error::other("it is not open")),
        };
        let failed = std::mem::replace(&mut self.failed, written.is_err());
        let error = written.err().filter(|_| !failed)?;
        Some(format!(
            "cannot write {}: {error}; a slicer that is started again would remove entries. Make room on the disk",
            self.path.display()
        ))
    }

    /// Whether most of it is over.
    pub(super) fn is_long(&self) -> bool {
        self.length > self.base * 2 + GROWTH || self.failed
    }

    /// Writes it anew.
    pub(super) fn compact(&mut self, all: &[u8]) {
        let beside = self.path.with_extension("new");
        let write = || {
            let mut file = File::create(&beside)?;
            file.write_all(all)?;
            fs::rename(&beside, &self.path)?;
            Ok::<_, std::io::Error>(file)
        };
        match write() {
            Ok(file) => {
                (self.file, self.failed) = (Some(file), false);
                (self.length, self.base) = (all.len() as u64, all.len() as u64);
            }
            Err(error) => {
                tracing::warn!("cannot write {}: {error}; make room on the disk", self.path.display());
                // It is tried again after as many bytes.
                (self.base, self.failed) = (self.length, false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_appended_is_read_again() {
        let scratch = tempfile::tempdir().unwrap();
        let (mut journal, text) = Journal::open(scratch.path()).unwrap();
        assert!(text.is_empty());
        journal.compact(b"base");
        assert_eq!(journal.append(b" and more"), None);
        assert_eq!(Journal::open(scratch.path()).unwrap().1, b"base and more");
        journal.append(&vec![0; GROWTH as usize + 100]);
        assert!(journal.is_long());
        journal.compact(b"new");
        assert!(!journal.is_long());
        assert_eq!(Journal::open(scratch.path()).unwrap().1, b"new");
    }
}
