//! The command line.

mod adhoc;
mod bond;
mod context;
mod energy;
mod gateway;
pub(crate) mod get;
mod net;
mod net_join;
pub(crate) mod net_slice;
mod past;
mod relay;
mod rules;
mod sfnet;
mod sim;
mod steering;
mod switch;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_daemon::DEFAULT_CONFIG;
use braid_http::{DEFAULT_SOCKET, UiOptions};
use braid_model::Rate;
use clap::{Args, Parser, Subcommand};

pub(crate) use adhoc::{Adhoc, AdhocAction, AdhocQuery, Device, Up as AdhocUpOptions};
pub(crate) use bond::{Bond, BondAction};
pub(crate) use context::{Context, ContextAction};
pub(crate) use energy::{Energy, EnergyFetch, EnergyList, EnergyOffer, EnergyServe};
pub(crate) use gateway::{Gateway, GatewayAction, GatewaySetup};
pub(crate) use get::Get;
pub(crate) use net::{Net, NetAction};
pub(crate) use net_join::{Identity, NetJoin};
pub(crate) use past::{Gains, History, Log};
pub(crate) use relay::{
    Join, Leave, Move, PortRange, Relay, RelayAction, RelayClients, RelayInvite, RelayLimit, RelayLimits, RelayRevoke, RelayServer,
};
pub(crate) use rules::{Rules, RulesAction};
pub(crate) use sfnet::{About, SfnetAction, SfnetCommand};
pub(crate) use sim::{Instance, Sampling, Sim, SimRun};
pub(crate) use steering::{Proxy, Run, Steering};
pub(crate) use switch::{Switch, SwitchAction};

/// Default state directory of the daemon.
pub(crate) const DEFAULT_STATE_DIR: &str = "/var/lib/braid";

/// All the networks around you, at once.
///
/// `braid up` (as root) assigns a link to every connection of this machine. `braid run -- COMMAND` does the same for one command and needs no
/// privilege. `braid doctor` shows what this system supports.
#[derive(Debug, Parser)]
#[command(name = "braid", version, propagate_version = true, disable_help_subcommand = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Log debug messages; given twice: trace messages. RUST_LOG overrides it.
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    pub(crate) verbose: u8,
}

// A variant without a doc comment takes the short and the long help of the type it holds. A doc comment here would hide the long help.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Up(Up),
    Daemon(Foreground),
    /// Stop the daemon. If none runs, remove what a crashed daemon left behind.
    Down(Down),
    /// Reload the configuration and apply it: links and rules to new flows, shares also to running ones.
    Reload(Daemon),
    /// Show a summary of the daemon and its links.
    Status(Query),
    /// Show links in detail.
    Links(Query),
    /// Show live flows.
    Flows(Query),
    /// Show the profile that Braid learnt of each application.
    Apps(Query),
    Bond(Bond),
    /// Show the clients of the gateway: the devices behind this machine.
    Clients(Query),
    /// Show the table of the flows that this machine forwards for clients.
    Switch(Switch),
    Gateway(Gateway),
    Adhoc(Adhoc),
    Net(Net),
    /// Show links, flows, applications, peers and events live in the terminal.
    Top(Daemon),
    Log(Log),
    History(History),
    Gains(Gains),
    Ui(Ui),
    /// Show the policy in force.
    Policy(Query),
    /// Check a configuration file without applying it.
    Check(Check),
    Run(Run),
    Get(Box<Get>),
    Explain(Explain),
    /// List, serve, fetch and offer energy profiles of interfaces.
    #[command(subcommand)]
    Energy(Energy),
    #[command(subcommand)]
    Sim(Sim),
    Join(Join),
    /// Leave a relay, or forget a server and its key.
    Leave(Leave),
    /// List relays and servers that run Braid, and the paths to them.
    Peers(Query),
    /// Move running flows to another link: bonded ones, and direct ones whose host agrees.
    Move(Move),
    Context(Context),
    Rules(Rules),
    Relay(Box<Relay>),
    Doctor(Doctor),
    /// Print a shell completion script to standard output.
    Completions {
        /// Shell to complete for.
        shell: clap_complete::Shell,
    },
    /// Print the manual page to standard output, or write all manual pages to a directory.
    Man {
        /// Directory to write to.
        dir: Option<PathBuf>,
    },
    Proxy(Box<Proxy>),
    /// Remove the rules of a daemon that died (started by the daemon).
    #[command(hide = true)]
    Watchdog {
        /// Of a relay that forwards packets.
        #[arg(long)]
        relay: bool,
    },
}

/// Options to reach the daemon.
#[derive(Debug, Args)]
pub(crate) struct Daemon {
    /// Socket of the daemon.
    #[arg(long, value_name = "PATH", env = "BRAID_SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Down {
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print nothing if no daemon runs and there is nothing to remove.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// Options of the commands that read from the daemon.
#[derive(Debug, Args)]
pub(crate) struct Query {
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Start Braid, and return when it assigns links.
///
/// If systemd runs and the package's service is installed, systemd starts the daemon with the options in BRAID_OPTIONS of /etc/default/braid.
/// Otherwise the daemon starts in the background with the options given here. A daemon that already runs keeps its options.
///
/// Exit status: 0 when the daemon assigns links; 1 when it did not start. In that case Braid prints the reason and leaves nothing running.
#[derive(Debug, Args)]
pub(crate) struct Up {
    #[command(flatten)]
    pub(crate) start: Start,
    /// Run the daemon in the foreground, like "braid daemon".
    #[arg(long)]
    pub(crate) foreground: bool,
}

/// Run the daemon in the foreground, for a service manager.
///
/// The daemon notifies the manager through sd_notify when it is ready, and exits on SIGTERM, SIGINT or "braid down". "braid up" starts it in the
/// background.
#[derive(Debug, Args)]
pub(crate) struct Foreground {
    #[command(flatten)]
    pub(crate) start: Start,
    /// Detach from the terminal and the open files of the parent process ("braid up" sets this).
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
    /// Read batteries and models of network devices from this tree instead of /sys (for tests).
    #[arg(long, value_name = "DIR", hide = true)]
    pub(crate) sys: Option<PathBuf>,
}

/// Options to start the daemon with.
#[derive(Debug, Args)]
pub(crate) struct Start {
    /// Configuration file. Default: /etc/braid/braid.toml if it exists, otherwise the built-in defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// State directory of the daemon, where it keeps what it learnt.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub(crate) state_dir: PathBuf,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    #[command(flatten)]
    pub(crate) page: PageOptions,
}

/// Options of a program that serves a web page.
#[derive(Debug, Args)]
pub(crate) struct PageOptions {
    /// Serve the web page on this address, with TLS except on loopback. Without an address: 127.0.0.1:5759.
    #[arg(long, value_name = "ADDR:PORT", num_args = 0..=1, default_missing_value = "127.0.0.1:5759")]
    pub(crate) ui: Option<SocketAddr>,
    /// Accept this host name in the page's address, besides IP addresses and localhost; repeatable.
    #[arg(long, value_name = "NAME", requires = "ui")]
    pub(crate) ui_name: Vec<String>,
    /// Certificate chain of the page (PEM). Default: a self-signed certificate, whose fingerprint is logged.
    #[arg(long, value_name = "FILE", requires_all = ["ui", "ui_key"])]
    pub(crate) ui_cert: Option<PathBuf>,
    /// Private key of the page's certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "ui_cert")]
    pub(crate) ui_key: Option<PathBuf>,
}

impl PageOptions {
    /// The page, if it is wanted.
    pub(crate) fn wanted(self) -> Option<UiOptions> {
        let certificate = self.ui_cert.zip(self.ui_key);
        self.ui.map(|listen| UiOptions { listen, names: self.ui_name, certificate })
    }
}

/// Open the daemon's web page, or print its address.
///
/// The daemon must run with --ui; the package's service does.
#[derive(Debug, Args)]
pub(crate) struct Ui {
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print the address instead of opening it.
    #[arg(long)]
    pub(crate) print: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// Configuration file to check.
    #[arg(default_value = DEFAULT_CONFIG)]
    pub(crate) file: PathBuf,
    /// The file is for another machine: warn about users, links and relays that do not exist here, instead of refusing them.
    #[arg(long)]
    pub(crate) portable: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Explain why a flow gets its link.
///
/// `braid explain 17` explains a live flow by its id (see `braid flows`). `braid explain curl 192.0.2.1:443` explains a flow that does not exist
/// yet.
///
/// Columns, one row for each link. MAY: whether the flow may use the link; WHY NOT gives the reason if not. LOAD: bytes that the link's flows still
/// have to transfer. CAPACITY: in the flow's direction; "assumed" if Braid has not measured it yet. FINISH: time until the link has transferred its
/// load and the flow, which least-finish and least-makespan compare. END: expected time until the flow itself ends, which max-throughput compares.
/// TURN: for the round-robin schedulers, distance to the link's next turn, in flows on the fastest link; the link with the smallest value is next.
///
/// For a flow that a relay or a server carries: PATH is the state of the link's path to it; SHARE is the path's share of the flow's bytes so far;
/// RTT is the path's round-trip time; RATE UP is the rate that the path can carry from here to the peer.
#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// Id of a flow, or path or name of a program.
    #[arg(value_name = "FLOW|PROGRAM")]
    pub(crate) subject: String,
    /// Destination of the program: an address or a name, with a port if it matters.
    pub(crate) destination: Option<String>,
    /// Explain a UDP flow instead of a TCP connection.
    #[arg(long)]
    pub(crate) udp: bool,
    /// User id of the program.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) user: Option<u32>,
    /// Control group of the program.
    #[arg(long, value_name = "PATH")]
    pub(crate) cgroup: Option<String>,
    #[command(flatten)]
    pub(crate) query: Query,
}

/// Show what this system supports, and how to fix what it does not.
///
/// As root, it also asks the kernel to verify every BPF program. It attaches none and leaves nothing behind.
///
/// If the configuration has a [gateway] section, or with --for gateway, it also checks what forwarding for other devices needs.
///
/// Exit status with --for: 0 if the command works here, 1 if it does not, 3 if unknown (usually because only root can verify the BPF programs).
/// Without --for: 1 if neither `up` nor `run` works, else 0. Wrong usage: 2.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Check only what this command needs, and report the result as exit status.
    #[arg(long = "for", value_name = "COMMAND")]
    pub(crate) mode: Option<Mode>,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// State directory of the daemon.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub(crate) state_dir: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A way to use Braid that `braid doctor` checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// The whole machine
    Up,
    /// One command
    Run,
    /// Forwarding for other devices (`[gateway]`)
    Gateway,
}

fn rate(text: &str) -> Result<Rate, String> {
    match text.parse::<Rate>() {
        Ok(rate) if rate == Rate::ZERO => Err("a rate of zero is not allowed; omit the option instead".to_owned()),
        read => read.map_err(|error| error.to_string()),
    }
}

fn span(text: &str) -> Result<Duration, String> {
    let wanted = || format!("{text:?} is not a time span: write a whole number from 1, followed by s, min, h or d, as in 24h");
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
        Some(span) if span > most => Err("a time span is at most one year (366d)".to_owned()),
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
    fn check_reads_the_default_file_unless_one_is_given() {
        let file = |words: &[&str]| match Cli::parse_from([&["braid", "check"], words].concat()).command {
            Command::Check(check) => check.file,
            other => panic!("{other:?}"),
        };
        assert_eq!([file(&[]), file(&["./mine.toml"])], [PathBuf::from(DEFAULT_CONFIG), PathBuf::from("./mine.toml")]);
    }

    #[test]
    fn regression_long_help_is_shown() {
        let mut cli = Cli::command();
        cli.build();
        for (words, expected) in [
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
            (&["gateway", "setup"], "dnsmasq assigns"),
        ] {
            let found = words.iter().try_fold(&cli, |command, word| command.find_subcommand(word)).unwrap();
            let long = found.get_long_about().map(ToString::to_string).unwrap_or_default();
            assert!(long.contains(expected), "{words:?}: {long}");
            let short = found.get_about().map(ToString::to_string).unwrap_or_default();
            assert!((20..90).contains(&short.len()) && long.starts_with(&short), "{words:?}: {short}");
        }
    }

    #[test]
    fn time_spans_are_parsed() {
        assert_eq!(["90s", "15min", "24h", "7d"].map(|text| span(text).unwrap().as_secs()), [90, 900, 86_400, 604_800]);
        for text in ["", "24", "h", "0h", "-1h", "1.5h", "99999999999999999999d", "367d", "1 week"] {
            assert!(span(text).is_err(), "{text}");
        }
    }
}
