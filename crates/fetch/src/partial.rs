//! A file on its way: `NAME.braid-part` with the bytes and `NAME.braid-journal`, which tells which of them are there.
//!
//! The journal is a line of JSON (the file's size and its validators by address), then a line `START END` for each piece written, appended
//! after the piece. A line that a sudden end cut short counts for nothing. What survives the program's death need not survive the
//! machine's: a journal of an earlier boot counts for nothing either. The finished file does: it is on the disk before it gets its name, and
//! is brought there while it comes, so that the end need not wait for all of it.
//!
//! Others may write to the folder. What they put in the place of these files is refused, or, of a journal, counts for nothing: a link, a file of
//! theirs, or one that has another name too.

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

/// A longer journal is written anew.
const LONG: u64 = 256 * 1024;

/// So much is brought to the disk at once while a file comes.
const STEP: u64 = 2 * 1024 * 1024;

/// What is known of a file that is fetched.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Knowledge {
    /// The machine's start that the journal belongs to.
    boot: String,
    pub(crate) size: u64,
    /// By address.
    pub(crate) validators: BTreeMap<String, Validator>,
}

/// What an earlier run left.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Left {
    pub(crate) knowledge: Knowledge,
    pub(crate) got: Spans,
}

/// A file on its way.
#[derive(Debug)]
pub(crate) struct Partial {
    target: PathBuf,
    data_path: PathBuf,
    journal_path: PathBuf,
    data: File,
    journal: Option<File>,
    written: u64,
    knowledge: Knowledge,
    got: Spans,
    /// Bytes written since the disk was last asked to have them all.
    unsynced: u64,
    syncing: Syncing,
}

/// A thread that waits for the disk; its file is open until it ends, which is waited for.
#[derive(Debug, Default)]
struct Syncing(Option<JoinHandle<()>>);

impl Syncing {
    /// Begins if nothing is under way; whether it did.
    fn begin(&mut self, file: &File) -> bool {
        if self.0.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return false;
        }
        let Ok(file) = file.try_clone() else { return false };
        // What goes wrong shows when the file is finished.
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
    /// Opens the partial file of `target`, and reads what an earlier run left if it is to go on (`resume`).
    pub(crate) fn open(target: &Path, resume: bool) -> Result<(Self, Option<Left>), FetchError> {
        if target.is_dir() {
            return Err(FetchError::Write { path: target.to_owned(), reason: "it is a directory; name a file by -o".to_owned() });
        }
        let (data_path, journal_path) = (beside(target, ".braid-part"), beside(target, ".braid-journal"));
        let data = open_own(OpenOptions::new().read(true).write(true).create(true).truncate(false), &data_path);
        let data = data.map_err(|error| unwritable(&data_path, &error))?;
        match data.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(FetchError::Busy { path: data_path }),
            // A file system without locks.
            Err(TryLockError::Error(_)) => {}
        }
        let mut partial = Self {
            target: target.to_owned(),
            data_path,
            journal_path,
            data,
            journal: None,
            written: 0,
            knowledge: Knowledge::default(),
            got: Spans::default(),
            unsynced: 0,
            syncing: Syncing::default(),
        };
        let left = if resume { partial.read_left() } else { None };
        match &left {
            Some(left) => {
                (partial.knowledge, partial.got) = (left.knowledge.clone(), left.got.clone());
                partial.rewrite()?;
            }
            None => partial.restart()?,
        }
        Ok((partial, left))
    }

    fn read_left(&self) -> Option<Left> {
        let mut journal = Vec::new();
        open_own(OpenOptions::new().read(true), &self.journal_path).ok()?.read_to_end(&mut journal).ok()?;
        let left = read_journal(&journal)?;
        // What is told to be there must be there.
        let there = self.data.metadata().ok()?.len();
        let last = left.got.iter().last().map_or(0, |span| span.end().get());
        (left.knowledge.boot == boot() && last <= there && last <= left.knowledge.size).then_some(left)
    }

    /// Now it is known how large the file is and what names its state.
    pub(crate) fn learn(&mut self, size: ByteCount, url: &str, validator: Option<&Validator>) -> Result<(), FetchError> {
        let Some(validator) = validator else { return Ok(()) };
        if self.knowledge.size == size.get() && self.knowledge.validators.get(url) == Some(validator) {
            return Ok(());
        }
        self.knowledge.size = size.get();
        self.knowledge.validators.insert(url.to_owned(), validator.clone());
        self.rewrite()
    }

    /// Writes bytes of the file, and notes that they are there.
    pub(crate) fn write(&mut self, at: ByteCount, bytes: &[u8]) -> Result<(), FetchError> {
        self.data.write_all_at(bytes, at.get()).map_err(|error| unwritable(&self.data_path, &error))?;
        self.got.insert(Span::new(at, at + ByteCount::new(bytes.len() as u64)));
        self.unsynced += bytes.len() as u64;
        if self.unsynced >= STEP && self.syncing.begin(&self.data) {
            self.unsynced = 0;
        }
        if self.written > LONG {
            return self.rewrite();
        }
        if let Some(journal) = &mut self.journal {
            let line = format!("{} {}\n", at.get(), at.get() + bytes.len() as u64);
            journal.write_all(line.as_bytes()).map_err(|error| unwritable(&self.journal_path, &error))?;
            self.written += line.len() as u64;
        }
        Ok(())
    }

    /// What came so far counts for nothing.
    pub(crate) fn restart(&mut self) -> Result<(), FetchError> {
        self.journal = None;
        (self.knowledge, self.got) = (Knowledge::default(), Spans::default());
        remove(&self.journal_path)?;
        self.data.set_len(0).map_err(|error| unwritable(&self.data_path, &error))
    }

    /// Writes the journal anew, whole at once.
    fn rewrite(&mut self) -> Result<(), FetchError> {
        self.knowledge.boot = boot();
        let mut text = serde_json::to_vec(&self.knowledge).map_err(|error| unwritable(&self.journal_path, &io::Error::other(error)))?;
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
        // Counted from here: a journal of very many pieces is not written anew for each further one.
        self.written = 0;
        Ok(())
    }

    /// All is there: the file appears under its name. `sha256`: what it must be.
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

    /// Leaves nothing behind if nothing is worth keeping.
    pub(crate) fn abandon(self) {
        if self.journal.is_none() || self.got.is_empty() {
            let _ = remove(&self.journal_path);
            let _ = remove(&self.data_path);
        }
    }
}

fn read_journal(text: &[u8]) -> Option<Left> {
    // Behind the last line's end stands what was cut short.
    let text = std::str::from_utf8(&text[..=text.iter().rposition(|byte| *byte == b'\n')?]).ok()?;
    let mut lines = text.lines();
    let knowledge = serde_json::from_str(lines.next()?).ok()?;
    let got: Option<Spans> = lines
        .map(|line| {
            let (start, end) = line.split_once(' ')?;
            let (start, end): (u64, u64) = (start.parse().ok()?, end.parse().ok()?);
            (start <= end).then(|| Span::new(ByteCount::new(start), ByteCount::new(end)))
        })
        .collect();
    Some(Left { knowledge, got: got? })
}

/// Opens a plain file of this user's that has one name, and none through a link.
fn open_own(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let refuse = |reason| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    // A pipe in its place would keep us waiting.
    let file = match options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return refuse("it is a link, which is not followed; remove it"),
        opened => opened?,
    };
    let found = file.metadata()?;
    match () {
        () if !found.is_file() => refuse("it is no plain file; remove it"),
        () if found.uid() != own_user() => refuse("it belongs to another user; remove it, or name another file by -o"),
        () if found.nlink() != 1 => refuse("it has another name too; remove it"),
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
    fn what_was_written_is_found_again_and_appears_when_complete() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        drop(begun(&target));
        let (mut partial, left) = Partial::open(&target, true).unwrap();
        let left = left.unwrap();
        assert_eq!(
            (left.got.count(), left.knowledge.size, left.knowledge.validators["http://h/f"].clone()),
            (ByteCount::new(20), 100, tag())
        );
        assert!(!target.exists());
        partial.write(ByteCount::ZERO, &[1; 10]).unwrap();
        partial.write(ByteCount::new(30), &[2; 70]).unwrap();
        partial.finish(ByteCount::new(100), None).unwrap();
        assert_eq!(fs::read(&target).unwrap().len(), 100);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_line_cut_short_and_another_boot_count_for_nothing() {
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
    fn regression_nothing_is_written_through_what_others_put_there() {
        use std::os::unix::fs::{chown, symlink};
        let folder = tempfile::tempdir().unwrap();
        let (target, precious) = (folder.path().join("f"), folder.path().join("precious"));
        let (part, journal) = (beside(&target, ".braid-part"), beside(&target, ".braid-journal"));
        fs::write(&precious, "precious").unwrap();
        let refused = || Partial::open(&target, true).unwrap_err().to_string();
        symlink(&precious, &part).unwrap();
        assert!(refused().contains("a link") && refused().contains("remove it"), "{}", refused());
        fs::remove_file(&part).unwrap();
        fs::hard_link(&precious, &part).unwrap();
        assert!(refused().contains("another name"), "{}", refused());
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
        assert_eq!(left, None, "a journal behind a link counts for nothing");
        partial.learn(ByteCount::new(100), "http://h/f", Some(&tag())).unwrap();
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn two_do_not_write_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        let _first = begun(&target);
        assert!(matches!(Partial::open(&target, true), Err(FetchError::Busy { .. })));
    }

    #[test]
    fn another_checksum_keeps_the_name_free() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        let error = begun(&target).finish(ByteCount::new(100), Some([0; 32])).unwrap_err();
        assert!(matches!(error, FetchError::Checksum { .. }) && !target.exists(), "{error}");
    }

    #[test]
    fn a_long_journal_is_written_anew_and_says_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("f");
        let (mut partial, _) = Partial::open(&target, false).unwrap();
        partial.learn(ByteCount::new(1 << 30), "http://h/f", Some(&tag())).unwrap();
        (0..40_000u64).for_each(|at| partial.write(ByteCount::new(at), &[1]).unwrap());
        assert!(fs::metadata(&partial.journal_path).unwrap().len() < LONG + 1000);
        drop(partial);
        assert_eq!(Partial::open(&target, true).unwrap().1.unwrap().got.count(), ByteCount::new(40_000));
    }
}
