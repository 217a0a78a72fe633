//! Watches the executables that rules name. An upgrade replaces the file, and the kernel identifies the new file by another inode number.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tokio::net::unix::pipe;

use super::sys::watch::{add_watch, inotify, remove_watch};

/// Events that may replace or remove a file.
const FILE_EVENTS: u32 = libc::IN_CREATE
    | libc::IN_MOVED_TO
    | libc::IN_MOVED_FROM
    | libc::IN_DELETE
    | libc::IN_DELETE_SELF
    | libc::IN_MOVE_SELF
    | libc::IN_ONLYDIR;

/// Events that concern a watched directory as a whole and have no file name.
const DIRECTORY_EVENTS: u32 = libc::IN_DELETE_SELF | libc::IN_MOVE_SELF | libc::IN_UNMOUNT | libc::IN_Q_OVERFLOW;

/// Length of `struct inotify_event` without its name.
const HEADER: usize = 16;

/// Why executables cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// An inotify instance cannot be created.
    #[error("cannot watch executables (inotify): {0}; raise sysctl fs.inotify.max_user_instances, otherwise upgrades need a reload")]
    Start(#[source] io::Error),
    /// One directory cannot be watched.
    #[error(
        "cannot watch {directory} for new executables: {source}; raise sysctl fs.inotify.max_user_watches, otherwise upgrades need a reload"
    )]
    Add {
        /// Path of the directory.
        directory: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel's events cannot be read.
    #[error("cannot read the events of watched executables (inotify): {0}; upgrades need a reload")]
    Read(#[source] io::Error),
}

/// Watches a set of executables for changes.
#[derive(Debug)]
pub struct ExeWatch {
    /// An inotify descriptor. tokio's pipe type can read it and wait for it.
    events: pipe::Receiver,
    files: BTreeSet<PathBuf>,
    /// For each watch descriptor of a directory: the names in it that matter.
    names: BTreeMap<i32, BTreeSet<OsString>>,
}

impl ExeWatch {
    /// Creates a watch of no files. Must run inside a tokio runtime with I/O enabled.
    ///
    /// # Errors
    /// Fails if the user has reached the limit of inotify instances.
    pub fn new() -> Result<Self, WatchError> {
        let events = inotify().and_then(pipe::Receiver::from_file_unchecked).map_err(WatchError::Start)?;
        Ok(Self { events, files: BTreeSet::new(), names: BTreeMap::new() })
    }

    /// Replaces the set of watched files. They need not exist. For a symbolic link, its target is watched too.
    ///
    /// Call it before you read the files, so that no change in between is missed.
    ///
    /// # Errors
    /// Fails if a directory cannot be watched; the other directories are watched nevertheless.
    pub fn set(&mut self, files: &BTreeSet<PathBuf>) -> Result<(), WatchError> {
        self.files = files.clone();
        self.arm()
    }

    /// Waits until one of the files may have been created, replaced, moved or deleted. Several changes at once count as one. Changes made before the
    /// call but after `set` count. A move of a directory above the file's own directory is not detected. The future may be dropped and the method
    /// called again at any time.
    ///
    /// # Errors
    /// Fails if the kernel's events cannot be read, or if a directory can no longer be watched. Re-read the files in this case too.
    pub async fn changed(&mut self) -> Result<(), WatchError> {
        loop {
            self.events.readable().await.map_err(WatchError::Read)?;
            if self.drain()? {
                // Directories may have appeared or disappeared, and links may have new targets.
                return self.arm();
            }
        }
    }

    /// Reads all pending events and returns whether one matters.
    fn drain(&mut self) -> Result<bool, WatchError> {
        let mut buffer = vec![0; 16 * 1024];
        let mut matters = false;
        loop {
            match self.events.try_read(&mut buffer) {
                Ok(0) => return Err(WatchError::Read(io::ErrorKind::UnexpectedEof.into())),
                Ok(length) => events(&buffer[..length], |watch, mask, name| {
                    matters |= mask & DIRECTORY_EVENTS != 0 || self.names.get(&watch).is_some_and(|names| names.contains(name));
                }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(matters),
                Err(error) => return Err(WatchError::Read(error)),
            }
        }
    }

    /// Repeats until nothing changes, because a directory may appear just before the one above it is watched.
    fn arm(&mut self) -> Result<(), WatchError> {
        loop {
            let before = std::mem::take(&mut self.names);
            let outcome = self.arm_once();
            for gone in before.keys().filter(|watch| !self.names.contains_key(watch)) {
                remove_watch(self.events.as_fd(), *gone);
            }
            if outcome.is_err() || self.names == before {
                return outcome;
            }
        }
    }

    fn arm_once(&mut self) -> Result<(), WatchError> {
        let mut outcome = Ok(());
        let targets = self.files.iter().filter_map(|file| file.canonicalize().ok());
        for file in self.files.iter().cloned().chain(targets) {
            match self.watch(&file) {
                Ok(Some((watch, name))) => {
                    self.names.entry(watch).or_default().insert(name);
                }
                Ok(None) => {}
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    /// Watches the file's directory, or its nearest existing ancestor, for the next path component on the way to the file.
    fn watch(&self, file: &Path) -> Result<Option<(i32, OsString)>, WatchError> {
        let mut path = file;
        while let (Some(directory), Some(name)) = (path.parent(), path.file_name()) {
            match add_watch(self.events.as_fd(), directory, FILE_EVENTS) {
                Ok(watch) => return Ok(Some((watch, name.to_owned()))),
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES)) => path = directory,
                Err(source) => return Err(WatchError::Add { directory: directory.to_owned(), source }),
            }
        }
        Ok(None)
    }
}

/// Calls `each` with the watch descriptor, mask and name of every event in `bytes`.
fn events(mut bytes: &[u8], mut each: impl FnMut(i32, u32, &OsStr)) {
    let word = |bytes: &[u8], at: usize| bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map(u32::from_ne_bytes);
    while let (Some(watch), Some(mask), Some(length)) = (word(bytes, 0), word(bytes, 4), word(bytes, 12)) {
        let end = HEADER.saturating_add(length as usize).min(bytes.len());
        let name = bytes[HEADER..end].split(|byte| *byte == 0).next().unwrap_or_default();
        each(watch as i32, mask, OsStr::from_bytes(name));
        bytes = &bytes[end..];
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    /// Runs `change` on a directory in which the files `watched` are watched. Returns whether the change was detected.
    fn noticed(watched: &[&str], prepare: impl FnOnce(&Path), change: impl FnOnce(&Path)) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let root = tempfile::tempdir().unwrap();
            prepare(root.path());
            let mut watch = ExeWatch::new().unwrap();
            watch.set(&watched.iter().map(|name| root.path().join(name)).collect()).unwrap();
            change(root.path());
            // The kernel queues an event before the call that caused it returns.
            tokio::time::timeout(Duration::from_millis(200), watch.changed()).await.is_ok()
        })
    }

    fn put(path: PathBuf) {
        fs::write(path, "#!/bin/sh\n").unwrap();
    }

    #[test]
    fn every_way_to_replace_a_file_is_detected() {
        let prepare = |root: &Path| {
            put(root.join("curl"));
            put(root.join("curl.new"));
        };
        assert!(noticed(&["curl"], prepare, |root| fs::rename(root.join("curl.new"), root.join("curl")).unwrap()));
        assert!(noticed(&["curl"], prepare, |root| fs::remove_file(root.join("curl")).unwrap()));
        assert!(noticed(&["curl"], prepare, |root| fs::rename(root.join("curl"), root.join("old")).unwrap()));
        assert!(noticed(&["wget"], prepare, |root| put(root.join("wget"))));
    }

    #[test]
    fn changes_of_other_files_are_ignored() {
        assert!(!noticed(&["curl"], |root| put(root.join("curl")), |root| put(root.join("wget"))));
        assert!(!noticed(&[], |_| {}, |root| put(root.join("curl"))));
    }

    #[test]
    fn the_target_of_a_link_is_watched() {
        let prepare = |root: &Path| {
            fs::create_dir(root.join("real")).unwrap();
            put(root.join("real/python3.11"));
            std::os::unix::fs::symlink("real/python3.11", root.join("python")).unwrap();
        };
        assert!(noticed(&["python"], prepare, |root| fs::remove_file(root.join("real/python3.11")).unwrap()));
    }

    #[test]
    fn a_directory_created_later_is_watched() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let root = tempfile::tempdir().unwrap();
            let mut watch = ExeWatch::new().unwrap();
            watch.set(&BTreeSet::from([root.path().join("opt/app/bin")])).unwrap();
            fs::create_dir(root.path().join("opt")).unwrap();
            watch.changed().await.unwrap();
            fs::create_dir(root.path().join("opt/app")).unwrap();
            watch.changed().await.unwrap();
            put(root.path().join("opt/app/bin"));
            watch.changed().await.unwrap();
            fs::remove_dir_all(root.path().join("opt")).unwrap();
            watch.changed().await.unwrap();
        });
    }

    #[test]
    fn removed_files_are_no_longer_watched() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let root = tempfile::tempdir().unwrap();
            let mut watch = ExeWatch::new().unwrap();
            watch.set(&BTreeSet::from([root.path().join("curl")])).unwrap();
            watch.set(&BTreeSet::new()).unwrap();
            assert!(watch.names.is_empty());
            put(root.path().join("curl"));
            assert!(tokio::time::timeout(Duration::from_millis(50), watch.changed()).await.is_err());
        });
    }
}
