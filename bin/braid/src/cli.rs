//! The command line.

mod energy;
pub(crate) mod get;
mod past;
mod relay;
mod sim;
mod steering;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_daemon::DEFAULT_CONFIG;
use braid_http::DEFAULT_SOCKET;
use clap::{Args, Parser, Subcommand};

pub(crate) use energy::{Energy, EnergyFetch, EnergyList, EnergyServe};
pub(crate) use get::Get;
pub(crate) use past::{Gains, History, Log};
pub(crate) use relay::{
    Join, Leave, Move, PortRange, Relay, RelayAction, RelayClients, RelayInvite, RelayLimit, RelayLimits, RelayRevoke, RelayServer,
};
pub(crate) use sim::{Instance, Sampling, Sim, SimRun};
pub(crate) use steering::{Proxy, Run, Steering};

/// Where state is kept unless told otherwise.
pub(crate) const DEFAULT_STATE_DIR: &str = "/var/lib/braid";

/// All the networks around you, at once.
///
/// `braid up` (as root) gives every connection of this machine its link; `braid run -- COMMAND` does the same for one command with
/// no privilege. `braid doctor` tells what this system can do.
#[derive(Debug, Parser)]
#[command(name = "braid", version, propagate_version = true, disable_help_subcommand = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Log more; twice: everything. RUST_LOG overrides it.
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

// A variant without words of its own has those of what it holds, the long ones too: its own would hide them.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Up(Up),
    Daemon(Foreground),
    /// Stop the daemon; without one, sweep what a dead one may have left.
    Down(Down),
    /// Read the configuration again and apply it to new flows.
    Reload(Daemon),
    /// Show the daemon and its links at a glance.
    Status(Query),
    /// Show links in detail.
    Links(Query),
    /// Show live flows.
    Flows(Query),
    /// Show what was learnt of applications.
    Apps(Query),
    /// Show links, flows, applications and events as they change.
    Top(Daemon),
    Log(Log),
    History(History),
    Gains(Gains),
    Ui(Ui),
    /// Show the policy in force.
    Policy(Query),
    /// Tell what is wrong in a configuration file, without applying it.
    Check(Check),
    Run(Run),
    Get(Box<Get>),
    Explain(Explain),
    /// List, serve and fetch profiles of the energy that interfaces need.
    #[command(subcommand)]
    Energy(Energy),
    #[command(subcommand)]
    Sim(Sim),
    Join(Join),
    /// Leave a relay, or forget a server and its key.
    Leave(Leave),
    /// List the relays and the servers that run Braid, and the paths to them.
    Peers(Query),
    /// Carry running bonded flows over another link.
    Move(Move),
    Relay(Box<Relay>),
    Doctor(Doctor),
    /// Write a completion script for a shell to standard output.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Write the manual page to standard output, or all manual pages to a directory.
    Man {
        /// The directory.
        dir: Option<PathBuf>,
    },
    Proxy(Box<Proxy>),
    /// Take a dead daemon's rules down (started by the daemon).
    #[command(hide = true)]
    Watchdog,
}

/// How the daemon is reached.
#[derive(Debug, Args)]
pub(crate) struct Daemon {
    /// The daemon's socket.
    #[arg(long, value_name = "PATH", env = "BRAID_SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Down {
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Say nothing where no daemon runs and none has left anything.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// A question to the daemon.
#[derive(Debug, Args)]
pub(crate) struct Query {
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Switch Braid on, and return when it steers.
///
/// Where systemd runs and the package's service is installed, systemd starts the daemon; its options are BRAID_OPTIONS in /etc/default/braid.
/// Elsewhere the daemon starts in the background with the options given here. A daemon that runs already keeps its own options.
///
/// Exit status: 0 when the daemon steers, 1 when it did not start; the reason is then printed, and nothing is left running.
#[derive(Debug, Args)]
pub(crate) struct Up {
    #[command(flatten)]
    pub(crate) start: Start,
    /// Be the daemon, in the foreground, as "braid daemon" is.
    #[arg(long)]
    pub(crate) foreground: bool,
}

/// Run the daemon in the foreground, for a service manager.
///
/// It notifies the manager by sd_notify when it steers, and ends on SIGTERM, SIGINT or "braid down". "braid up" starts it in the background.
#[derive(Debug, Args)]
pub(crate) struct Foreground {
    #[command(flatten)]
    pub(crate) start: Start,
    /// Leave the terminal and the files of whoever started it ("braid up" sets this).
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
}

/// What a daemon is started with.
#[derive(Debug, Args)]
pub(crate) struct Start {
    /// The configuration file. Left out: /etc/braid/braid.toml where there is one, else the defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Where what is learnt is kept.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub(crate) state_dir: PathBuf,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Serve the web page on this address, with TLS except on loopback. Without an address: 127.0.0.1:5759.
    #[arg(long, value_name = "ADDR:PORT", num_args = 0..=1, default_missing_value = "127.0.0.1:5759")]
    pub(crate) ui: Option<SocketAddr>,
    /// Let browsers come to the page by this name, besides addresses and localhost; may be given several times.
    #[arg(long, value_name = "NAME", requires = "ui")]
    pub(crate) ui_name: Vec<String>,
    /// The page's certificate chain (PEM). Left out: one of Braid's own, whose fingerprint is logged.
    #[arg(long, value_name = "FILE", requires_all = ["ui", "ui_key"])]
    pub(crate) ui_cert: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "ui_cert")]
    pub(crate) ui_key: Option<PathBuf>,
}

/// Open the daemon's web page, or tell its address.
///
/// The daemon must have been started with --ui, as the package's service is.
#[derive(Debug, Args)]
pub(crate) struct Ui {
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print the address, and open nothing.
    #[arg(long)]
    pub(crate) print: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The configuration file.
    #[arg(default_value = DEFAULT_CONFIG)]
    pub(crate) file: PathBuf,
    /// The file is for another machine: users, links and relays that this one does not have are warned of, not refused.
    #[arg(long)]
    pub(crate) portable: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Tell why a flow gets the link it gets.
///
/// `braid explain 17` explains a live flow by its id (see `braid flows`); `braid explain curl 192.0.2.1:443` one to come.
///
/// What the rule sees of each link: MAY, whether the flow may use it (WHY NOT tells why it may not); LOAD, what the link's flows still have to
/// move; CAPACITY, in the flow's direction ("assumed" where nothing has been measured yet); FINISH, the time until its load and the flow are both
/// done; END, the time until the flow itself is expected to end, which max-throughput compares; TURN, how far its turn is off under the round
/// robins, in flows on the fastest link: the least is next.
///
/// Of a flow that a relay or a server carries: PATH, the state of the link's path there; SHARE, of the flow's bytes so far; RTT, the path's round
/// trip; RATE UP, what it can carry from here to there.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// A flow's id, or a program by path or name.
    #[arg(value_name = "FLOW|PROGRAM")]
    pub(crate) subject: String,
    /// Where the program connects to: an address or name, with a port where it matters.
    pub(crate) destination: Option<String>,
    /// A UDP exchange instead of a TCP connection.
    #[arg(long)]
    pub(crate) udp: bool,
    /// The program's user, by number.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) user: Option<u32>,
    /// The program's control group.
    #[arg(long, value_name = "PATH")]
    pub(crate) cgroup: Option<String>,
    #[command(flatten)]
    pub(crate) query: Query,
}

/// Tell what this system can and cannot do, and the remedy.
///
/// As root it also has the kernel try every BPF program; none is attached, and nothing is left behind.
///
/// Exit status with --for: 0 the command works here, 1 it does not, 3 not known (most often because only root may try the BPF programs).
/// Without --for: 0 unless `up` and `run` both do not work, then 1. Wrong usage ends with 2.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Look only at what this command needs, and answer by the exit status.
    #[arg(long = "for", value_name = "COMMAND")]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Where what is learnt would be kept.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub(crate) state_dir: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A way of using Braid that `braid doctor` judges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// The whole machine
    Up,
    /// One command
    Run,
}

fn span(text: &str) -> Result<Duration, String> {
    let wanted = || format!("{text:?} is no span of time: write a whole number from 1 and s, min, h or d, as in 24h");
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match text[end..].trim() {
        "s" => 1,
        "min" | "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(wanted()),
    };
    let seconds = text[..end].parse::<u64>().ok().and_then(|number| number.checked_mul(unit)).filter(|seconds| *seconds > 0);
    let most = Duration::from_secs(366 * 86_400);
    match seconds.map(Duration::from_secs) {
        Some(span) if span > most => Err("a span of time is a year (366d) at most".to_owned()),
        Some(span) => Ok(span),
        None => Err(wanted()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn check_looks_at_the_file_in_force_unless_another_is_named() {
        let file = |words: &[&str]| match Cli::parse_from([&["braid", "check"], words].concat()).command {
            Command::Check(check) => check.file,
            other => panic!("{other:?}"),
        };
        assert_eq!([file(&[]), file(&["./mine.toml"])], [PathBuf::from(DEFAULT_CONFIG), PathBuf::from("./mine.toml")]);
    }

    #[test]
    fn regression_the_long_words_of_a_command_are_shown() {
        let mut cli = Cli::command();
        cli.build();
        for (words, told) in [
            (&["explain"][..], "TURN"),
            (&["run"], "seccomp"),
            (&["doctor"], "Exit status"),
            (&["get"], "mirrors"),
            (&["proxy"], "/proxy.pac"),
            (&["log"], "1,000 notes"),
            (&["join"], "three seconds"),
            (&["relay"], "invited"),
            (&["relay", "clients"], "SEEN"),
            (&["sim"], "same seed"),
            (&["relay", "invite"], "QR code"),
            (&["relay", "limit"], "lifts one"),
        ] {
            let found = words.iter().try_fold(&cli, |command, word| command.find_subcommand(word)).unwrap();
            let long = found.get_long_about().map(ToString::to_string).unwrap_or_default();
            assert!(long.contains(told), "{words:?}: {long}");
            let short = found.get_about().map(ToString::to_string).unwrap_or_default();
            assert!((20..90).contains(&short.len()) && long.starts_with(&short), "{words:?}: {short}");
        }
    }

    #[test]
    fn spans_of_time_are_read() {
        assert_eq!(["90s", "15min", "24h", "7d"].map(|text| span(text).unwrap().as_secs()), [90, 900, 86_400, 604_800]);
        for text in ["", "24", "h", "0h", "-1h", "1.5h", "99999999999999999999d", "367d", "1 week"] {
            assert!(span(text).is_err(), "{text}");
        }
    }
}
