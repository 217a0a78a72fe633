//! `braid run`: runs one command over all links, without privilege.
//!
//! It uses four processes:
//!
//! ```text
//! front ── started by the user; waits for the command to end, forwards signals, exits with the command's status
//!   └─ supervisor ── intercepts the command's connects, chooses links, binds sockets
//!        ├─ command ── the user's program under a seccomp filter
//!        └─ guard ── answers "continue" to every call once the supervisor is gone; kills a supervisor that hangs
//! ```
//!
//! The supervisor is the command's parent because some systems (Yama's `ptrace_scope` 1) allow a program to inspect its descendants
//! only. Front, supervisor and guard share only standard error with the command. Supervisor and guard exit when the last process under
//! the filter has ended, which may be long after the command.
//!
//! An unprivileged filter requires `no_new_privs`: programs that gain privileges when started (`sudo`, `ping` on some systems)
//! run without them. A user with `CAP_SYS_ADMIN` does not need `no_new_privs`; programs then keep their privileges.
//!
//! Cost (median, one core of a small virtual machine, Linux 6.18): a steered TCP connect 19 microseconds, a connect that Braid does not
//! steer 8, an unconnected datagram 13, and every `sendmsg` 5, because a filter cannot see whether the call names a destination.
//! Connected datagrams, `write`, `send`, and `sendto` without an address cost nothing.
//!
//! A connect on a link that died in silence is begun again over another link (`retry`). For this the supervisor begins the connect itself
//! and waits for the answer: for each blocking connect, and for a non-blocking one on a link without a recent sign of life.
//!
//! With a relay ([`relays`]) the supervisor forwards TCP connections and connected datagram sockets over all links at once
//! (`redirector`, `exchange`), and answers the program's queries about these sockets (`seccomp::told`). The filter then also intercepts
//! `getpeername`, `getsockname`, `recvmsg`, `recvmmsg`, `recvfrom` with room for an address, and `SO_ERROR`, for every socket. Unconnected
//! datagrams, and sockets that delay their connect until the first bytes (`TCP_FASTOPEN_CONNECT`), go direct. The supervisor stays until
//! the command's last data has arrived, at most one minute.
//!
//! A run saves what it learns about links and programs for the next run, in the user's state directory (`$XDG_STATE_HOME/braid`, else
//! `~/.local/state/braid`), in the daemon's format.
//!
//! `braid run` leaves alone everything that the daemon leaves alone, and in addition: sockets of programs that it may not inspect or
//! that are in another network namespace; datagram sockets that their program bound to a port, because they cannot be distinguished from
//! servers; connected datagram sockets before Linux 6.1. All datagrams of a `sendmmsg` take the link of the first one.

#![forbid(unsafe_code)]

/// Prints a message to the user on standard error. Ignores write errors: standard error may be full, closed, or a terminal that is gone.
macro_rules! warn_user {
    ($($said:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($said)*);
    }};
}

mod choice;
mod chooser;
mod exchange;
mod front;
mod guard;
mod held;
mod learnt_store;
mod links;
mod message;
mod own;
pub mod proxy;
mod reach;
mod redirect_states;
mod redirector;
pub mod relays;
mod rendezvous;
mod retry;
mod streams;
mod supervisor;
mod view;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use braid_decide::policy::{Carry, Scheduler};

pub use own::{OwnFlows, Ruling};
pub use reach::{Reachable, reachable, remember};

/// Options of `braid run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOptions {
    /// Policy that chooses links.
    pub scheduler: Scheduler,
    /// Interfaces to use, by name; empty means every link.
    pub links: Vec<String>,
    /// Whether connections go through a relay. [`Carry::Auto`]: only if `relay` is set.
    pub carry: Carry,
    /// Name under which the relay was joined; `None`: the first relay by name.
    pub relay: Option<String>,
    /// Time that connections wait at the start for the relay. `None`: one second, or five once the relay has begun to answer.
    pub relay_wait: Option<Duration>,
    /// The command and its arguments.
    pub command: Vec<OsString>,
}

/// Reason why the command could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No command was given.
    #[error("no command to run; write it after --, as in: braid run -- curl https://example.org")]
    NoCommand,
    /// A named link does not exist.
    #[error("no interface is named {name:?}{}", hint(.nearest, .known))]
    UnknownLink {
        /// Name that was requested.
        name: String,
        /// Existing name most similar to it.
        nearest: Option<String>,
        /// All existing names.
        known: Vec<String>,
    },
    /// A wait for a relay was requested without a relay.
    #[error("--relay-wait needs a relay to wait for: add --relay NAME or --carry bond")]
    NothingToWaitFor,
    /// The relay cannot be used.
    #[error("{0}")]
    Relay(#[from] relays::RelayError),
    /// The command could not be started.
    #[error("cannot run {program:?}: {source}")]
    Command {
        /// Program that was to be started.
        program: OsString,
        /// Error from the system.
        source: io::Error,
    },
    /// The system does not allow supervision of a command.
    #[error(
        "cannot intercept the command's connections (seccomp user notification): {0}; this needs Linux 5.6 or later and, in a container, \
         a seccomp profile that allows it. Run the command without braid run, or start the daemon as root: braid up"
    )]
    Filter(#[source] io::Error),
    /// A basic system call failed.
    #[error("cannot {action}: {source}")]
    System {
        /// Operation that failed.
        action: &'static str,
        /// Error from the system.
        source: io::Error,
    },
}

impl RunError {
    /// Exit status for this error, with the convention of `env` and `timeout`: 127 for a command not found, 126 for one that
    /// cannot be started, 125 for anything else.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Command { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Command { .. } => 126,
            _ => 125,
        }
    }
}

/// Runs the command to its end and returns its exit status, or 128 plus the signal number if a signal ended it.
///
/// Call it from a process with a single thread, before any runtime starts, because it forks. Afterwards standard input, output and
/// error of this process point to `/dev/null`: they belonged to the command.
///
/// # Errors
/// [`RunError`]; the command has not started then.
pub fn main(options: RunOptions) -> Result<i32, RunError> {
    if options.command.is_empty() {
        return Err(RunError::NoCommand);
    }
    check_links(&options.links, interface_names().map_err(|source| RunError::System { action: "read /proc/net/dev", source })?)?;
    let relay = match (options.carry, &options.relay) {
        (Carry::Direct, _) | (Carry::Auto, None) => None,
        (_, name) => Some(relays::Relay::find(name.as_deref())?),
    };
    if options.relay_wait.is_some() && relay.is_none() {
        return Err(RunError::NothingToWaitFor);
    }
    front::run(&options, relay)
}

/// Every interface of this network namespace. Reads `/proc/self/net/dev` because `/sys/class/net` may belong to another namespace.
fn interface_names() -> io::Result<Vec<String>> {
    let table = std::fs::read_to_string("/proc/self/net/dev")?;
    Ok(table.lines().skip(2).filter_map(|line| line.rsplit_once(':').map(|(name, _)| name.trim().to_owned())).collect())
}

fn check_links(wanted: &[String], known: Vec<String>) -> Result<(), RunError> {
    let Some(name) = wanted.iter().find(|name| !known.contains(name)) else { return Ok(()) };
    let likeness = |other: &&String| (strsim::jaro_winkler(name, other) * 1000.0) as u32;
    let nearest = known.iter().max_by_key(likeness).filter(|other| likeness(other) > 700).cloned();
    Err(RunError::UnknownLink { name: name.clone(), nearest, known })
}

fn hint(nearest: &Option<String>, known: &[String]) -> String {
    let mut text = String::new();
    if let Some(nearest) = nearest {
        let _ = write!(text, "; did you mean {nearest:?}?");
    }
    let _ = write!(text, " (existing: {})", known.join(", "));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn an_unknown_link_is_refused_with_the_nearest_name() {
        let known = names(&["lo", "wlan0", "eth0"]);
        assert!(check_links(&names(&["eth0", "wlan0"]), known.clone()).is_ok());
        let error = check_links(&names(&["eth0", "wlna0"]), known.clone()).unwrap_err();
        assert_eq!(error.to_string(), r#"no interface is named "wlna0"; did you mean "wlan0"? (existing: lo, wlan0, eth0)"#);
        let error = check_links(&names(&["zzz"]), known).unwrap_err();
        assert!(!error.to_string().contains("did you mean"), "{error}");
    }

    #[test]
    fn interface_names_include_the_loopback() {
        assert!(interface_names().unwrap().contains(&"lo".to_owned()));
    }

    #[test]
    fn an_empty_command_is_refused() {
        let (scheduler, carry) = (Scheduler::default(), Carry::Auto);
        let options = RunOptions { scheduler, links: vec![], carry, relay: None, relay_wait: None, command: vec![] };
        assert!(matches!(main(options), Err(RunError::NoCommand)));
    }

    #[test]
    fn exit_codes_are_those_of_other_wrappers() {
        let command = |code| RunError::Command { program: "x".into(), source: io::Error::from_raw_os_error(code) };
        assert_eq!((command(2).exit_code(), command(13).exit_code(), RunError::NoCommand.exit_code()), (127, 126, 125));
    }
}
