//! The watchdog: a small process that outlives the daemon and takes its rules and routes down when it dies, however it dies. Connections
//! that can hear no answer without them it ends, so that their programs connect anew.
//!
//! The BPF programs need no watchdog: they are held by the daemon's descriptors and go with it.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use braid_platform::linux::sys::process::{FORWARDED, block_signals};
use braid_platform::linux::{netlink, reverse_path};
use braid_store::lock::{Lock, LockError, PATIENCE};

/// The daemon's end. While it lives, the watchdog waits.
pub struct Watchdog {
    child: Child,
    arguments: Vec<String>,
}

impl Watchdog {
    /// Starts the watchdog: this program again, with `arguments` (the hidden subcommand). Its standard input is a pipe that ends
    /// when this process does.
    pub fn start(arguments: &[&str]) -> io::Result<Self> {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        Ok(Self { child: spawn(&arguments)?, arguments })
    }

    /// Starts another watchdog if this one was killed; whether it was.
    pub fn revive(&mut self) -> io::Result<bool> {
        if self.child.try_wait()?.is_none() {
            return Ok(false);
        }
        self.child = spawn(&self.arguments)?;
        Ok(true)
    }

    /// Ends the watchdog without a sweep by it: the caller has swept, or will.
    pub fn dismiss(mut self) {
        if let Some(mut pipe) = self.child.stdin.take() {
            let _ = io::Write::write_all(&mut pipe, b"q");
        }
        let _ = self.child.wait();
    }
}

fn spawn(arguments: &[String]) -> io::Result<Child> {
    let mut command = Command::new("/proc/self/exe");
    // A group of its own: Ctrl-C at the terminal is for the daemon.
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0).spawn()
}

/// The watchdog's whole life: waits for the pipe to end, then sweeps.
pub fn watch() -> anyhow::Result<()> {
    // A service manager asks all its processes to end; this one ends after the daemon.
    block_signals(&FORWARDED)?;
    crate::privilege::narrow_to_sweeping()?;
    let mut word = [0];
    loop {
        match io::stdin().read(&mut word) {
            Ok(0) => break,
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    // Under the lock, since the next daemon may have started already: then it has swept itself, and what is there is its own.
    let _lock = match Lock::take_within(PATIENCE) {
        Err(LockError::Held(_)) => return Ok(()),
        // No daemon shows, though the lock cannot be had: what is there is a dead one's.
        Err(LockError::Stranger { .. }) => None,
        other => Some(other?),
    };
    let swept = netlink::sweep()?;
    let ended = reverse_path::end_stranded();
    tracing::info!(?swept, ended, "the daemon is gone; its rules and routes are taken down");
    Ok(())
}
