//! Cleans up after a lab, however it ends.
//!
//! A small process waits until the lab's end of a pipe closes. It kills all processes in the lab's namespaces (which vanish with their
//! last process) and removes the lab's directory. If it is killed together with the lab, the next lab's start cleans up.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use crate::namespace::{MARK, Namespace};
use crate::sys;

const PREFIX: &str = "braid-lab-";
/// Name of the lock file, locked while the lab runs.
const LOCK: &str = "lock";

/// Positional: the directory, then the namespaces' numbers.
const SCRIPT: &str = r#"
dir=$1; shift
read -r nothing
tries=0
while [ $tries -lt 100 ]; do
    found=
    for line in $(stat -L -c '%i:%n' /proc/[0-9]*/ns/net 2>/dev/null); do
        for namespace in "$@"; do
            if [ "${line%%:*}" = "$namespace" ]; then
                pid=${line#*:/proc/}
                kill -9 "${pid%%/*}" 2>/dev/null
                found=1
            fi
        done
    done
    [ -n "$found" ] || break
    tries=$((tries + 1))
    sleep 0.02
done
case "$dir" in */braid-lab-*) rm -rf -- "$dir" ;; esac
"#;

/// A lab's directory, whose lock shows that the lab runs.
#[derive(Debug)]
pub(crate) struct Home {
    directory: PathBuf,
    _lock: File,
}

impl Home {
    /// Creates a directory, after cleaning up after dead labs of this user.
    pub(crate) fn new() -> Result<Self> {
        sweep(&std::env::temp_dir());
        loop {
            let directory = tempfile::Builder::new().prefix(PREFIX).tempdir().context("cannot make the lab's directory")?;
            let path = directory.path().join(LOCK);
            let lock = File::create(&path)?;
            lock.lock().context("cannot lock the lab's directory")?;
            // Another starting lab may have found this directory unlocked, and have removed it as dead.
            if path.exists() {
                return Ok(Self { directory: directory.keep(), _lock: lock });
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.directory
    }

    /// The mark in the environment of the lab's programs.
    pub(crate) fn mark(&self) -> String {
        self.directory.to_string_lossy().into_owned()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // Usually the watchdog has already removed it.
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// The watchdog process.
#[derive(Debug)]
pub(crate) struct Watchdog(Child);

impl Watchdog {
    /// Starts the watchdog. It holds the namespaces open, so that their numbers are not reused before it has finished.
    pub(crate) fn start(home: &Home, namespaces: &[&Namespace]) -> Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", SCRIPT, "braid-lab-watchdog"]).arg(home.path());
        for namespace in namespaces {
            command.arg(namespace.inode()?.to_string());
        }
        sys::detach_keeping(&mut command, namespaces.iter().map(|n| n.network().as_raw_fd()).collect());
        let child = command.current_dir("/").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Ok(Self(child.context("cannot start the watchdog")?))
    }
}

impl Drop for Watchdog {
    /// Triggers the cleanup and waits until it is done.
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Removes the remains of this user's dead labs in `parent`: processes with their mark, and their directories.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    let user = sys::effective_user();
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX) && entry.metadata().is_ok_and(|meta| meta.uid() == user);
        // Held until everything is removed: a lab that waits for the lock then sees that it was treated as dead.
        if let Some(_lock) = ours.then(|| dead(&entry.path())).flatten() {
            kill_marked(&entry.path());
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Takes the lock of a dead lab, which no process holds. A directory without a lock file belongs to a starting lab, or to none.
fn dead(directory: &Path) -> Option<File> {
    let lock = File::open(directory.join(LOCK)).ok()?;
    lock.try_lock().is_ok().then_some(lock)
}

fn kill_marked(directory: &Path) {
    let mark = format!("{MARK}={}", directory.display());
    let Ok(processes) = fs::read_dir("/proc") else { return };
    for process in processes.flatten() {
        let Ok(pid) = process.file_name().to_string_lossy().parse::<i32>() else { continue };
        let marked = fs::read(process.path().join("environ"))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes()));
        if marked {
            let _: io::Result<()> = sys::kill(pid);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_sweep_removes_dead_labs_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let make = |name: &str, lock: bool| {
            let path = parent.path().join(name);
            fs::create_dir(&path).unwrap();
            lock.then(|| File::create(path.join(LOCK)).unwrap())
        };
        let alive = make("braid-lab-alive", true).unwrap();
        alive.lock().unwrap();
        make("braid-lab-dead", true);
        make("braid-lab-half-made", false);
        make("other", true);
        let mut victim =
            Command::new("sleep").arg("1000").env(MARK, parent.path().join("braid-lab-dead").to_str().unwrap()).spawn().unwrap();
        let mut bystander = Command::new("sleep").arg("1000").spawn().unwrap();
        // The kernel resumes the parent before it has set the new program's environment.
        while fs::read(format!("/proc/{}/environ", victim.id())).unwrap().is_empty() {
            thread::yield_now();
        }
        sweep(parent.path());
        let mut left: Vec<_> = fs::read_dir(parent.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(left, ["braid-lab-alive", "braid-lab-half-made", "other"]);
        assert!(!victim.wait().unwrap().success());
        assert_eq!(bystander.try_wait().unwrap(), None);
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }
}
