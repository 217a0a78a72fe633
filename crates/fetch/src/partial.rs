//! A partial file: `NAME.braid-part` contains the bytes, and `NAME.braid-journal` lists which of them are present.
//!
//! The journal is a line of JSON (the file's size and its validators by URL), followed by a line `START END` for each piece, appended after the
//! piece is written. A line that was cut short is ignored. The data survives a crash of the program, but not of the machine, so a journal of an
//! earlier boot is ignored, too. The finished file survives both: it is synced before it gets its name. It is also synced while data arrives, so
//! that the end of the download need not sync all of it.
//!
//! Other users may be able to write to the folder. Anything they put in place of these files is refused, or, in place of a journal, ignored: a link,
//! a file of theirs, or a file with another hard link.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};

use braid_model::ByteCount;
use braid_platform::linux::sys::process::own_user;
use braid_range::{Span, Spans};
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::answer::Validator;
use crate::error::FetchError;

/// A longer journal is rewritten.
const MAX_JOURNAL: u64 = 256 * 1024;

/// Amount of data that is synced at once while the file arrives.
const SYNC_STEP: u64 = 2 * 1024 * 1024;

/// Content of a journal's first line.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct JournalHeader {
    /// Boot id of the machine when the journal was written.
    boot: String,
    pub(crate) size: u64,
    /// By hash of the URL.
    pub(crate) validators: BTreeMap<String, Validator>,
}

/// Data of an earlier run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Resumable {
    pub(crate) header: JournalHeader,
    pub(crate) got: Spans,
}

/// A file that is being downloaded.
#[derive(Debug)]
pub(crate) struct Partial {
    target: PathBuf,
    data_path: PathBuf,
    journal_path: PathBuf,
    data: File,
    journal: Option<File>,
    written: u64,
    header: JournalHeader,
    got: Spans,
    /// Bytes written since the last sync began.
    unsynced: u64,
    syncing: Syncing,
}

/// A thread that syncs the file. Dropping it waits for the thread, which holds the file open.
#[derive(Debug, Default)]
struct Syncing(Option<JoinHandle<()>>);

impl Syncing {
    /// Begins a sync if none is running; returns whether it did.
    fn begin(&mut self, file: &File) -> bool {
        if self.0.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return false;
        }
        let Ok(file) = file.try_clone() else { return false };
        // Sync errors show up when the file is finished.
        self.0 = thread::Builder::new().name("sync".to_owned()).spawn(move || drop(file.sync_data())).ok();
        self.0.is_some()
    }
}

impl Drop for Syncing {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

impl Partial {
    /// Opens the partial file of `target`, and reads the data of an earlier run if `resume` is set.
    pub(crate) fn open(target: &Path, resume: bool) -> Result<(Self, Option<Resumable>), FetchError> {
        if target.is_dir() {
            return Err(FetchError::Write { path: target.to_owned(), reason: "it is a directory; name a file with -o".to_owned() });
        }
        let (data_path, journal_path) = (beside(target, ".braid-part"), beside(target, ".braid-journal"));
        let data = open_own(OpenOptions::new().read(true).write(true).create(true).truncate(false), &data_path);
        let data = data.map_err(|error| unwritable(&data_path, &error))?;
        match data.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(FetchError::Busy { path: data_path }),
            // Some file systems have no locks.
            Err(TryLockError::Error(_)) => {}
        }
        let mut partial = Self {
            target: target.to_owned(),
            data_path,
            journal_path,
            data,
            journal: None,
            written: 0,
            header: JournalHeader::default(),
            got: Spans::default(),
            unsynced: 0,
            syncing: Syncing::default(),
        };
        let left = if resume { partial.read_left() } else { None };
        match &left {
            Some(left) => {
                (partial.header, partial.got) = (left.header.clone(), left.got.clone());
                partial.rewrite()?;
            }
            None => partial.restart()?,
        }
        Ok((partial, left))
    }

    fn read_left(&self) -> Option<Resumable> {
        let mut journal = Vec::new();
        open_own(OpenOptions::new().read(true), &self.journal_path).ok()?.read_to_end(&mut journal).ok()?;
        let left = read_journal(&journal)?;
        // The data file must contain all ranges that the journal lists.
        let there = self.data.metadata().ok()?.len();
        let last = left.got.iter().last().map_or(0, |span| span.end().get());
        (left.header.boot == boot() && last <= there && last <= left.header.size).then_some(left)
    }

    /// Records the file's size and the validator of its version.
    pub(crate) fn learn(&mut self, size: ByteCount, url: &str, validator: Option<&Validator>) -> Result<(), FetchError> {
        let Some(validator) = validator else { return Ok(()) };
        if self.header.size == size.get() && self.header.validators.get(url) == Some(validator) {
            return Ok(());
        }
        self.header.size = size.get();
        self.header.validators.insert(url.to_owned(), validator.clone());
        self.rewrite()
    }

    /// Writes bytes of the file, and records them in the journal.
    pub(crate) fn write(&mut self, at: ByteCount, bytes: &[u8]) -> Result<(), FetchError> {
        self.data.write_all_at(bytes, at.get()).map_err(|error| unwritable(&self.data_path, &error))?;
        self.got.insert(Span::new(at, at + ByteCount::new(bytes.len() as u64)));
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= SYNC_STEP && self.syncing.begin(&self.data) {
            self.unsynced = 0;
        }
        if self.written > MAX_JOURNAL {
            return self.rewrite();
        }
        if let Some(journal) = &mut self.journal {
            let line = format!("{} {}\n", at.get(), at.get() + bytes.len() as u64);
            journal.write_all(line.as_bytes()).map_err(|error| unwritable(&self.journal_path, &error))?;
            self.written += line.len() as u64;
        }
        Ok(())
    }

    /// Discards all data so far.
    pub(crate) fn restart(&mut self) -> Result<(), FetchError> {
        self.journal = None;
        (self.header, self.got) = (JournalHeader::default(), Spans::default());
        remove(&self.journal_path)?;
        self.data.set_len(0).map_err(|error| unwritable(&self.data_path, &error))
    }

    /// Rewrites the journal atomically.
    fn rewrite(&mut self) -> Result<(), FetchError> {
        self.header.boot = boot();
        let mut text = serde_json::to_vec(&self.header).map_err(|error| unwritable(&self.journal_path, &io::Error::other(error)))?;
        text.push(b'\n');
        self.got.iter().for_each(|span| text.extend(format!("{} {}\n", span.start().get(), span.end().get()).bytes()));
        let next = beside(&self.journal_path, "-new");
        let write = || {
            match fs::remove_file(&next) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&next)?;
            file.write_all(&text)?;
            fs::rename(&next, &self.journal_path)?;
            Ok(file)
        };
        self.journal = Some(write().map_err(|error: io::Error| unwritable(&self.journal_path, &error))?);
        // The length counts from here: otherwise a journal of very many pieces would be rewritten for each new one.
        self.written = 0;
        Ok(())
    }

    /// Checks the complete file against `sha256`, and renames it to its final name.
    pub(crate) fn finish(self, size: ByteCount, sha256: Option<[u8; 32]>) -> Result<(), FetchError> {
        let failed = |error: io::Error| unwritable(&self.data_path, &error);
        self.data.set_len(size.get()).map_err(failed)?;
        if let Some(wanted) = sha256 {
            let found = hash(&self.data).map_err(failed)?;
            if found != wanted {
                remove(&self.journal_path)?;
                let hex = |digest: [u8; 32]| data_encoding::HEXLOWER.encode(&digest);
                return Err(FetchError::Checksum { path: self.target, found: hex(found), wanted: hex(wanted), kept: self.data_path });
            }
        }
        self.data.sync_all().map_err(failed)?;
        fs::rename(&self.data_path, &self.target).map_err(|error| unwritable(&self.target, &error))?;
        remove(&self.journal_path)
    }

    /// Removes the partial file and its journal if they contain no useful data.
    pub(crate) fn abandon(self) {
        if self.journal.is_none() || self.got.is_empty() {
            let _ = remove(&self.journal_path);
            let _ = remove(&self.data_path);
        }
    }
}

fn read_journal(text: &[u8]) -> Option<Resumable> {
    // Text after the last newline is a line that was cut short.
    let text = std::str::from_utf8(&text[..=text.iter().rposition(|byte| *byte == b'\n')?]).ok()?;
    let mut lines = text.lines();
    let header = serde_json::from_str(lines.next()?).ok()?;
    let got: Option<Spans> = lines
        .map(|line| {
            let (start, end) = line.split_once(' ')?;
            let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
            (start <= end).then(|| Span::new(ByteCount::new(start), ByteCount::new(end)))
        })
        .collect();
    Some(Resumable { header, got: got? })
}

/// Opens a regular file that belongs to this user and has one hard link; follows no symbolic link.
fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let refuse = |reason| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    // Opening a pipe in its place would block.
    let file = match options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return refuse("it is a symbolic link, which Braid does not follow; remove it");
        }
        opened => opened?,
    };
    let found = file.metadata()?;
    match () {
        () if !found.is_file() => refuse("it is not a regular file; remove it"),
        () if found.uid() != own_user() => refuse("it belongs to another user; remove it, or name another file with -o"),
        () if found.nlink() != 1 => refuse("it has another hard link; remove it"),
        () => Ok(file),
    }
}

/// SHA-256 of a file.
fn hash(file: &File) -> io::Result<[u8; 32]> {
    let mut context = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; 256 * 1024];
    let mut at = 0;
    loop {
        match file.read_at(&mut buffer, at)? {
            0 => break,
            count => {
                context.update(&buffer[..count]);
                at += count as u64;
            }
        }
    }
    context.finish().as_ref().try_into().map_err(io::Error::other)
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn remove(path: &Path) -> Result<(), FetchError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(unwritable(path, &error)),
        _ => Ok(()),
    }
}

fn unwritable(path: &Path, error: &io::Error) -> FetchError {
    FetchError::Write { path: path.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag() -> Validator {
        Validator::Tag("\"a\"".into())
    }

    fn begun(target: &Path) -> Partial {
        let (mut partial, left) = Partial::open(target, true).unwrap();
        assert_eq!(left, None);
        partial.learn(ByteCount::new(100), "http://h/f", Some(&tag())).unwrap();
        partial.write(ByteCount::new(10), &[7; 20]).unwrap();
        partial
    }

    #[test]
    fn written_data_is_found_again_and_the_file_appears_when_complete() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        drop(begun(&target));
        let (mut partial, left) = Partial::open(&target, true).unwrap();
        let left = left.unwrap();
        assert_eq!((left.got.count(), left.header.size, left.header.validators["http://h/f"].clone()), (ByteCount::new(20), 100, tag()));
        assert!(!target.exists());
        partial.write(ByteCount::ZERO, &[1; 10]).unwrap();
        partial.write(ByteCount::new(30), &[2; 70]).unwrap();
        partial.finish(ByteCount::new(100), None).unwrap();
        assert_eq!(fs::read(&target).unwrap().len(), 100);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file remains");
    }

    #[test]
    fn a_truncated_line_and_another_boot_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        drop(begun(&target));
        let journal = beside(&target, ".braid-journal");
        let text = fs::read_to_string(&journal).unwrap();
        fs::write(&journal, text.clone() + "30 4").unwrap();
        assert_eq!(Partial::open(&target, true).unwrap().1.unwrap().got.count(), ByteCount::new(20));
        for broken in [text.replace(&boot(), "another"), text.clone() + "4 3\n", text.clone() + "0 999\n", "{}\n".into(), String::new()] {
            fs::write(&journal, &broken).unwrap();
            fs::write(beside(&target, ".braid-part"), [7; 30]).unwrap();
            assert_eq!(Partial::open(&target, true).unwrap().1, None, "{broken}");
        }
    }

    #[test]
    fn regression_files_and_links_of_other_users_are_never_written() {
        use std::os::unix::fs::{chown, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (target, precious) = (folder.path().join("f"), folder.path().join("precious"));
        let (part, journal) = (beside(&target, ".braid-part"), beside(&target, ".braid-journal"));
        fs::write(&precious, "precious").unwrap();
        let refused = || Partial::open(&target, true).unwrap_err().to_string();
        symlink(&precious, &part).unwrap();
        assert!(refused().contains("a symbolic link") && refused().contains("remove it"), "{}", refused());
        fs::remove_file(&part).unwrap();
        fs::hard_link(&precious, &part).unwrap();
        assert!(refused().contains("another hard link"), "{}", refused());
        fs::remove_file(&part).unwrap();
        if own_user() == 0 {
            fs::write(&part, "theirs").unwrap();
            chown(&part, Some(65534), None).unwrap();
            assert!(refused().contains("another user"), "{}", refused());
            fs::remove_file(&part).unwrap();
        }
        drop(begun(&target));
        fs::rename(&journal, folder.path().join("theirs")).unwrap();
        symlink("theirs", &journal).unwrap();
        symlink(&precious, beside(&journal, "-new")).unwrap();
        let (mut partial, left) = Partial::open(&target, true).unwrap();
        assert_eq!(left, None, "a journal behind a link is ignored");
        partial.learn(ByteCount::new(100), "http://h/f", Some(&tag())).unwrap();
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn two_downloads_cannot_write_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        let _first = begun(&target);
        assert!(matches!(Partial::open(&target, true), Err(FetchError::Busy { .. })));
    }

    #[test]
    fn a_wrong_checksum_does_not_create_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        let error = begun(&target).finish(ByteCount::new(100), Some([0; 32])).unwrap_err();
        assert!(matches!(error, FetchError::Checksum { .. }) && !target.exists(), "{error}");
    }

    #[test]
    fn a_long_journal_is_rewritten_with_the_same_content() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        let (mut partial, _) = Partial::open(&target, false).unwrap();
        partial.learn(ByteCount::new(1 << 30), "http://h/f", Some(&tag())).unwrap();
        (0..40_000u64).for_each(|at| partial.write(ByteCount::new(at), &[1]).unwrap());
        assert!(fs::metadata(&partial.journal_path).unwrap().len() < MAX_JOURNAL + 1000);
        drop(partial);
        assert_eq!(Partial::open(&target, true).unwrap().1.unwrap().got.count(), ByteCount::new(40_000));
    }
}
