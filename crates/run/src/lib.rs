//! `braid run`: one command over all links, with no privilege.
//!
//! Four processes:
//!
//! ```text
//! front ── waits for the command's end, passes signals on, ends with its status (what the user started)
//!   └─ supervisor ── hears the command's connects, chooses links, binds sockets
//!        ├─ command ── the user's program under a seccomp filter
//!        └─ guard ── answers "continue" to everything once the supervisor is gone; ends one that hangs
//! ```
//!
//! The supervisor is the command's parent because some systems (Yama's `ptrace_scope` 1) let a program look into its descendants
//! only. Front, supervisor and guard share nothing with the command but its standard error; supervisor and guard end when the last
//! process under the filter has ended, which may be long after the command.
//!
//! An unprivileged filter demands `no_new_privs`: programs that would gain privileges when started (`sudo`, `ping` on some systems)
//! run without them. Whoever may do without (`CAP_SYS_ADMIN`) keeps them.
//!
//! What it costs (median, one core of a small virtual machine, Linux 6.18): a steered TCP connect 19 microseconds, a connect that is
//! left alone 8, an unconnected datagram 13, and every `sendmsg` 5, since a filter cannot see whether it names a destination.
//! Connected datagrams, and all that is sent by `write`, `send` and `sendto` without an address, cost nothing.
//!
//! With a relay ([`relays`]) the supervisor forwards TCP connections and connected datagram sockets over all links at once
//! (`redirector`, `exchange`), and answers what the program asks about them (`seccomp::told`). Then the filter asks about `getpeername`,
//! `getsockname`, `recvmsg`, `recvmmsg`, `recvfrom` with room for an address and `SO_ERROR` too, for every socket. Unconnected datagrams,
//! and sockets that wait for their first bytes (`TCP_FASTOPEN_CONNECT`), go direct. The supervisor stays until what the command sent last
//! has arrived, but for a minute at most.
//!
//! What a run learns of links and programs, it keeps for the next one in the user's state directory (`$XDG_STATE_HOME/braid`, else
//! `~/.local/state/braid`), in the daemon's format.
//!
//! What is left alone besides what the daemon leaves alone: sockets of programs that may not be looked into or that live in another
//! network namespace; datagram sockets that their program bound to a port, which cannot be told from servers; connected datagram
//! sockets before Linux 6.1. A `sendmmsg` goes where its first datagram goes.

#![forbid(unsafe_code)]

/// Says something to the user. Standard error may be full, closed or a terminal that is gone: then it is not said.
macro_rules! say {
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
mod learnt_store;
mod links;
mod meeting;
mod message;
mod own;
pub mod proxy;
mod reach;
mod redirect_states;
mod redirector;
pub mod relays;
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

/// What `braid run` is asked to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunOptions {
    /// How links are chosen.
    pub scheduler: Scheduler,
    /// The interfaces to use, by name; empty for every link.
    pub links: Vec<String>,
    /// Whether connections go to a relay. [`Carry::Auto`]: if one is named.
    pub carry: Carry,
    /// The relay, by the name that it was joined under; `None`: the first by name.
    pub relay: Option<String>,
    /// For how long connections wait at the start until the relay is reached. `None`: for a second, or five if it has begun to answer.
    pub relay_wait: Option<Duration>,
    /// The command and its arguments.
    pub command: Vec<OsString>,
}

/// Why the command could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// No command was given.
    #[error("no command to run; write it after --, as in: braid run -- curl https://example.org")]
    NoCommand,
    /// A link named does not exist.
    #[error("no interface is named {name:?}{}", hint(.nearest, .known))]
    UnknownLink {
        /// What was asked for.
        name: String,
        /// The existing name most like it.
        nearest: Option<String>,
        /// All names there are.
        known: Vec<String>,
    },
    /// A wait for a relay was asked for, and no relay.
    #[error("--relay-wait is of no use without a relay to wait for: add --relay NAME or --carry bond")]
    NothingToWaitFor,
    /// The relay cannot be used.
    #[error("{0}")]
    Relay(#[from] relays::RelayError),
    /// The command could not be started.
    #[error("cannot run {program:?}: {source}")]
    Command {
        /// What was to be started.
        program: OsString,
        /// What the system said.
        source: io::Error,
    },
    /// The system does not let a command be supervised.
    #[error(
        "cannot hear the command's connections (seccomp user notification): {0}; this needs Linux 5.6 or later and, in a container, \
         a seccomp profile that allows it. Run the command without braid run, or start the daemon as root: braid up"
    )]
    Filter(#[source] io::Error),
    /// Something the system always grants was refused.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl RunError {
    /// The exit status that tells of this error, as `env` and `timeout` have it: 127 for a command not found, 126 for one that
    /// cannot be started, 125 for anything else.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Command { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            Self::Command { .. } => 126,
            _ => 125,
        }
    }
}

/// Runs the command to its end and returns its exit status, 128 and the number for a signal.
///
/// Call it from a process with a single thread, before any runtime is started; it forks. Afterwards standard input, output and
/// error of this process lead nowhere: they belonged to the command.
///
/// # Errors
/// [`RunError`]; the command has not been started then.
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

/// Every interface of this network namespace. `/sys/class/net` may belong to another one.
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
    let _ = write!(text, " (there are: {})", known.join(", "));
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
        assert_eq!(error.to_string(), r#"no interface is named "wlna0"; did you mean "wlan0"? (there are: lo, wlan0, eth0)"#);
        let error = check_links(&names(&["zzz"]), known).unwrap_err();
        assert!(!error.to_string().contains("did you mean"), "{error}");
    }

    #[test]
    fn this_machine_has_a_loopback() {
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
