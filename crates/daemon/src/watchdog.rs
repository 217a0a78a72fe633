//! The watchdog: a small process that outlives the daemon and removes its rules and routes when the daemon dies, however it dies. It
//! also destroys connections that cannot receive replies without those rules, so that their programs reconnect.
//!
//! The BPF programs need no watchdog: the daemon's file descriptors hold them, and the kernel removes them with it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use braid_platform::linux::bpf::Unshape;
use braid_platform::linux::sys::process::{FORWARDED, block_signals, poll, set_nonblocking};
use braid_platform::linux::{gateway, netlink, outlet, reverse_path};
use braid_store::lock::{LOCK_TIMEOUT, Lock, LockError};

/// A daemon that is silent for longer than this is suspended or hangs: its limits on flows end.
const SILENCE: Duration = Duration::from_secs(5);
/// The longest that the daemon waits for the watchdog's end. If a program keeps a TCP socket locked, the watchdog ends later. Shorter than [`LOCK_TIMEOUT`]: the
/// next daemon may already wait for the lock.
const END: Duration = Duration::from_millis(500);

/// Message to the watchdog: the daemon lives.
const ALIVE: u8 = b'a';
/// Message to the watchdog: end without a sweep.
const QUIT: u8 = b'q';

/// The daemon's handle of the watchdog.
pub struct Watchdog {
    child: Child,
    /// Watchdogs that were replaced and may still wait for a locked socket.
    replaced: Vec<Child>,
    arguments: Vec<String>,
    /// Time of the last message that the daemon lives.
    said: Instant,
    /// Whether the daemon was silent for so long that the watchdog has used its iterator.
    spent: bool,
    unshape: Option<Unshape>,
}

impl Watchdog {
    /// Starts the watchdog: this program, with `arguments` (the hidden subcommand). Its standard input is a pipe that closes when this
    /// process ends.
    pub fn start(arguments: &[&str]) -> io::Result<Self> {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        let child = spawn(&arguments, None)?;
        Ok(Self { child, replaced: Vec::new(), arguments, said: Instant::now(), spent: false, unshape: None })
    }

    /// Makes the watchdog give the flows that the daemon limited their own settings back when the daemon dies.
    pub fn unshape_with(&mut self, unshape: Unshape) -> io::Result<()> {
        self.unshape = Some(unshape);
        self.replace()
    }

    /// Tells the watchdog that the daemon lives; call it several times a second. Starts another watchdog if this one was killed, or ended the limits on
    /// flows because the daemon was silent. Returns whether it was killed.
    ///
    /// # Errors
    /// Another one could not be started. The next call tries again.
    pub fn tend(&mut self) -> io::Result<bool> {
        let _ = self.child.stdin.as_mut().map(|pipe| io::Write::write_all(pipe, &[ALIVE]));
        let silence = std::mem::replace(&mut self.said, Instant::now()).elapsed();
        self.spent |= silence > SILENCE - Duration::from_secs(1);
        self.replaced.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        let killed = self.child.try_wait()?.is_some();
        if killed || self.spent {
            self.replace()?;
        }
        Ok(killed)
    }

    /// Starts another watchdog, and ends this one. The kernel hands descriptors only to new processes.
    fn replace(&mut self) -> io::Result<()> {
        let next = spawn(&self.arguments, self.unshape.as_ref())?;
        let mut old = std::mem::replace(&mut self.child, next);
        quit(&mut old);
        self.replaced.push(old);
        (self.said, self.spent) = (Instant::now(), false);
        Ok(())
    }

    /// Ends the watchdog without a sweep: the caller sweeps. The watchdog gives flows their own settings back that the daemon could not reach.
    pub fn dismiss(mut self) {
        quit(&mut self.child);
        let began = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && began.elapsed() < END {
            sleep(Duration::from_millis(2));
        }
    }
}

/// Starts a watchdog. Its standard output is a new iterator of `unshape`: the kernel's iterators are files that can only be read, once.
fn spawn(arguments: &[String], unshape: Option<&Unshape>) -> io::Result<Child> {
    let output = match unshape {
        Some(unshape) => Stdio::from(unshape.iterator()?),
        None => Stdio::null(),
    };
    let mut command = Command::new("/proc/self/exe");
    // A process group of its own: Ctrl-C at the terminal must reach only the daemon.
    let child = command.args(arguments).stdin(Stdio::piped()).stdout(output).process_group(0).spawn()?;
    // A watchdog that is stopped must not stop the daemon too.
    child.stdin.as_ref().map_or(Ok(()), |pipe| set_nonblocking(pipe.as_fd()))?;
    Ok(child)
}

fn quit(child: &mut Child) {
    if let Some(mut pipe) = child.stdin.take() {
        let _ = io::Write::write_all(&mut pipe, &[QUIT]);
    }
}

/// Gives the flows that the daemon limited their own settings back. Without an iterator, standard output is /dev/null, which cannot be read.
fn unshape() {
    let read = io::stdout().as_fd().try_clone_to_owned().and_then(|output| File::from(output).read_to_end(&mut Vec::new()));
    if let Err(error) = read {
        tracing::debug!(%error, "no flow had a limit that could be removed");
    }
}

/// Main function of the watchdog: waits for the pipe to close, then sweeps.
pub fn watch() -> anyhow::Result<()> {
    // A service manager signals all processes of the service; the watchdog must end after the daemon. systemd's own watchdog does it with SIGABRT.
    block_signals(&FORWARDED)?;
    block_signals(&[libc::SIGABRT])?;
    crate::privilege::narrow_to_sweeping()?;
    if wait_for_death(Some(SILENCE)) == Ended::Regularly {
        unshape();
        return Ok(());
    }
    // On a thread, because it may have to wait for a locked socket. The iterator belongs to the dead daemon, so this needs no lock.
    let unshaping = thread::Builder::new().spawn(unshape);
    let swept = sweep();
    match unshaping {
        Ok(thread) => drop(thread.join()),
        // The system has no thread left. Nothing else waits any more.
        Err(_) => unshape(),
    }
    swept
}

/// Main function of the watchdog of a relay that forwards packets: waits for the pipe to close, then reverts what the relay changed in the system.
pub fn watch_relay() -> anyhow::Result<()> {
    block_signals(&FORWARDED)?;
    crate::privilege::narrow_to_sweeping()?;
    if wait_for_death(None) == Ended::Died && outlet::sweep()? {
        tracing::info!("the relay died; removed its firewall rules and restored the kernel's settings");
    }
    Ok(())
}

/// How the daemon ended.
#[derive(PartialEq)]
enum Ended {
    /// It asked the watchdog to end.
    Regularly,
    /// The pipe closed.
    Died,
}

/// Waits for the daemon's end. While the daemon is silent for longer than `silence`, its limits on flows would go stale, so they end.
fn wait_for_death(mut silence: Option<Duration>) -> Ended {
    let mut words = [0; 64];
    loop {
        let Ok([ready]) = poll([(io::stdin().as_fd(), true)], silence) else { return Ended::Died };
        if !ready.readable && !ready.hung_up {
            tracing::warn!("the daemon has been silent for 5 s; its limits on flows end");
            // On a thread, because it may have to wait for a locked socket while the daemon dies.
            if let Err(error) = thread::Builder::new().spawn(unshape) {
                tracing::warn!("flows keep their limits while the daemon is silent: {error}");
            }
            // The descriptor can be used once. A daemon that continues starts another watchdog.
            silence = None;
            continue;
        }
        match io::stdin().read(&mut words) {
            Ok(0) => return Ended::Died,
            Ok(read) if words[..read].contains(&QUIT) => return Ended::Regularly,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ended::Died,
        }
    }
}

/// Removes the dead daemon's rules and routes, and ends connections that cannot receive replies without them.
fn sweep() -> anyhow::Result<()> {
    // Sweep under the lock. If the next daemon holds it, that daemon has already swept, and the remaining rules are its own.
    let lock = match Lock::take_within(LOCK_TIMEOUT) {
        Err(LockError::Held(_)) => return Ok(()),
        // The lock is held, but no daemon runs: the rules belong to a dead one.
        Err(LockError::Stranger { .. }) => None,
        other => Some(other?),
    };
    let swept = netlink::sweep()?;
    gateway::release();
    drop(lock);
    let ended = reverse_path::end_stranded();
    tracing::info!(?swept, ended, "the daemon died; removed its rules and routes");
    Ok(())
}
