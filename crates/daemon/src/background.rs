//! Starts the daemon as a background process that outlives its starter.

use std::ffi::OsStr;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use braid_platform::linux::sys::process::{
    FORWARDED, block_signals, close_inherited, keep_ended_children, leave_session, next_signal, poll, send_signal, signal_descriptor,
};
use braid_store::lock;

/// Time between SIGTERM and SIGKILL.
const KILL_AFTER: Duration = Duration::from_secs(10);
/// Number of bytes read from the end of the log.
const LOG_TAIL: u64 = 256 << 10;
/// A longer log is truncated to its end: its directory is in memory, and a daemon runs for months.
const MAX_LOG: u64 = 4 << 20;
/// Number of log lines shown if the log contains no error.
const TAIL_LINES: usize = 20;

/// A daemon that starts in the background. Dropping it before [`leave`](Self::leave) stops the daemon.
#[derive(Debug)]
pub struct Background {
    child: Child,
    log: Log,
    /// Signals that a user or a terminal sends to this process meanwhile.
    signals: OwnedFd,
    left: bool,
}

impl Background {
    /// Starts this program again with `arguments`, which must make it call [`detach`] and then run the daemon. From then on, signals do
    /// not end this thread: [`pause`](Self::pause) reports them.
    ///
    /// # Errors
    /// If the log cannot be created beside the lock, or the process cannot be started.
    pub fn start<S: AsRef<OsStr>>(arguments: &[S]) -> io::Result<Self> {
        let log = Log::create(&lock::file_of_this_namespace("log")?)?;
        keep_ended_children();
        let mut command = Command::new("/proc/self/exe");
        command.arg0("braid").args(arguments).current_dir("/");
        let child = command.stdin(Stdio::null()).stdout(log.writer()?).stderr(log.writer()?).spawn()?;
        // Not before `spawn`: the daemon would inherit the signal mask.
        block_signals(&FORWARDED)?;
        let signals = signal_descriptor(&FORWARDED)?;
        Ok(Self { child, log, signals, left: false })
    }

    /// Process id of the daemon.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Exit status of the daemon, if it has ended.
    ///
    /// # Errors
    /// Those of `waitpid`.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for `span`, or until a signal asks this process to end. Returns whether a signal arrived.
    ///
    /// # Errors
    /// Those of `poll` and `read`.
    pub fn pause(&self, span: Duration) -> io::Result<bool> {
        poll([(self.signals.as_fd(), true)], Some(span))?;
        Ok(next_signal(self.signals.as_fd())?.is_some())
    }

    /// The error that ended the daemon, or else the last lines of its log.
    pub fn last_words(&self) -> String {
        last_words(&self.log.end().unwrap_or_default())
    }

    /// Leaves the daemon running. Returns the path of its log.
    ///
    /// # Errors
    /// If the log cannot be renamed; the daemon is then stopped.
    pub fn leave(mut self) -> io::Result<PathBuf> {
        self.log.keep()?;
        self.left = true;
        Ok(self.log.kept.clone())
    }

    fn end(&mut self) -> io::Result<()> {
        let process = i32::try_from(self.child.id()).map_err(io::Error::other)?;
        if self.child.try_wait()?.is_none() {
            send_signal(process, libc::SIGTERM)?;
            send_signal(process, libc::SIGCONT)?;
        }
        let end = Instant::now() + KILL_AFTER;
        while self.child.try_wait()?.is_none() {
            if Instant::now() > end {
                self.child.kill()?;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if !self.left {
            let _ = self.end();
        }
    }
}

/// Whether this process is a background daemon, whose standard output is its log.
static DETACHED: AtomicBool = AtomicBool::new(false);

/// Truncates the log to its end if it is too long. A daemon calls this periodically. Does nothing if standard output is not this
/// program's log.
///
/// # Errors
/// Those of reading and writing the log.
pub fn bound_log() -> io::Result<()> {
    if !DETACHED.load(Ordering::Relaxed) {
        return Ok(());
    }
    bound(&File::from(io::stdout().as_fd().try_clone_to_owned()?), MAX_LOG)
}

fn bound(mut log: &File, max: u64) -> io::Result<()> {
    let facts = log.metadata()?;
    if !facts.is_file() || facts.len() <= max {
        return Ok(());
    }
    let end = end_of(log)?;
    let first = end.find('\n').map_or(0, |line| line + 1);
    log.set_len(0)?;
    log.write_all(format!("(the older lines were cut off: the log is limited to {max} bytes)\n{}", &end[first..]).as_bytes())
}

/// The last [`LOG_TAIL`] bytes of a log.
fn end_of(file: &File) -> io::Result<String> {
    let length = file.metadata()?.len();
    let first = length.saturating_sub(LOG_TAIL);
    let mut bytes = vec![0; usize::try_from(length - first).map_err(io::Error::other)?];
    // The writers share this file's offset, so it must not move.
    file.read_exact_at(&mut bytes, first)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Leaves the starter's session and open files. Call it first: it closes every file except the standard ones.
///
/// # Errors
/// Those of `close_range` and `setsid`.
pub fn detach() -> io::Result<()> {
    DETACHED.store(true, Ordering::Relaxed);
    close_inherited(&[])?;
    leave_session()?;
    // The kernel would otherwise name the process "exe", after /proc/self/exe.
    std::fs::write("/proc/self/comm", "braid")
}

/// The daemon's log file, readable by its user and root only. Dropping it removes the file, unless it was kept.
///
/// It is created under a unique name, so that of two daemons that start at once, the refused one does not touch the other's log.
#[derive(Debug)]
struct Log {
    file: File,
    path: PathBuf,
    /// Path after [`keep`](Self::keep).
    kept: PathBuf,
}

impl Log {
    fn create(kept: &Path) -> io::Result<Self> {
        if let Some(folder) = kept.parent() {
            DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        }
        let path = kept.with_extension(format!("log-{}", std::process::id()));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Never opens a file that another user created.
        let file = OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Self { file, path, kept: kept.to_owned() })
    }

    fn writer(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    fn keep(&self) -> io::Result<()> {
        std::fs::rename(&self.path, &self.kept)
    }

    fn end(&self) -> io::Result<String> {
        end_of(&self.file)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        // A kept log has another name.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The last error that the program printed, or else the last lines of `log`.
pub fn last_words(log: &str) -> String {
    let lines: Vec<&str> = log.trim_end().lines().collect();
    let words = match lines.iter().rposition(|line| line.starts_with("braid: ")) {
        Some(error) => lines[error..].join("\n"),
        None => lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"),
    };
    words.strip_prefix("braid: ").map_or(words.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_last_error_is_shown_or_else_the_last_lines() {
        let lines = (0..30).map(|line| format!("INFO {line}\n")).collect::<String>();
        assert_eq!(last_words(&format!("{lines}braid: old\nINFO x\nbraid: line 3:\n  rol = 3\n")), "line 3:\n  rol = 3");
        assert_eq!(last_words(&lines).lines().collect::<Vec<_>>().len(), TAIL_LINES);
        assert!(last_words(&lines).ends_with("INFO 29"));
        assert_eq!(last_words(""), "");
    }

    #[test]
    fn a_long_log_is_truncated_to_its_end_and_stays_writable() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::create(&folder.path().join("run/network-1.log")).unwrap();
        let mut writer = log.writer().unwrap();
        let line = |number: u32| format!("INFO {number:08}\n");
        (0..50_000).for_each(|number| writer.write_all(line(number).as_bytes()).unwrap());
        bound(&log.file, 1 << 20).unwrap();
        assert_eq!(log.file.metadata().unwrap().len(), 50_000 * 14, "a log below the limit is not truncated");
        bound(&log.file, 600_000).unwrap();
        writer.write_all(b"INFO next\n").unwrap();
        let left = std::fs::read_to_string(&log.path).unwrap();
        let lines: Vec<&str> = left.lines().collect();
        assert!(left.len() as u64 <= LOG_TAIL + 200 && lines[0].contains("cut off"), "{}", lines[0]);
        assert!(lines[1].len() == 13 && lines[1].starts_with("INFO 000"), "whole lines: {}", lines[1]);
        assert_eq!(&lines[lines.len() - 2..], ["INFO 00049999", "INFO next"]);
    }

    #[test]
    fn the_log_is_private_and_a_refused_start_keeps_the_other_daemons_log() {
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("run/network-1.log");
        std::fs::create_dir(folder.path().join("run")).unwrap();
        let there = kept.with_extension(format!("log-{}", std::process::id()));
        std::fs::write(folder.path().join("victim"), "precious").unwrap();
        std::os::unix::fs::symlink(folder.path().join("victim"), &there).unwrap();
        std::fs::write(&kept, "another's").unwrap();

        let log = Log::create(&kept).unwrap();
        let mut writer = log.writer().unwrap();
        writer.write_all("ü and more".as_bytes()).unwrap();
        assert_eq!(log.end().unwrap(), "ü and more");
        writer.write_all(b"; the end").unwrap();
        assert_eq!(log.end().unwrap(), "ü and more; the end");
        assert_eq!(std::fs::metadata(&there).unwrap().permissions().mode() & 0o777, 0o600);
        drop(log);
        assert!(!there.exists());
        assert_eq!(std::fs::read_to_string(&kept).unwrap(), "another's");

        Log::create(&kept).unwrap().keep().unwrap();
        assert_eq!(std::fs::read_to_string(&kept).unwrap(), "");
        assert_eq!(std::fs::read_to_string(folder.path().join("victim")).unwrap(), "precious");
    }
}
