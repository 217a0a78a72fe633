//! The command line.

use std::ffi::OsString;
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use braid_carry::relay::Memory;
use braid_decide::policy::{Carry, Scheduler};
use braid_engine::server::DEFAULT_SOCKET;
use braid_fetch::{Checksum, Credentials};
use braid_model::{Bytes, Rate};
use braid_peer::address::Address;
use braid_peer::name::ClientName;
use clap::{Args, Parser, Subcommand};
use ipnet::IpNet;

/// Where state is kept unless told otherwise.
pub(crate) const DEFAULT_STATE_DIR: &str = "/var/lib/braid";

/// Where a relay keeps its state unless told otherwise.
pub(crate) const DEFAULT_RELAY_DIR: &str = "/var/lib/braid-relay";

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

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start the daemon, in the foreground.
    Up(Up),
    /// Stop the daemon; without one, sweep what a dead one may have left.
    Down(Daemon),
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
    /// Show the policy in force.
    Policy(Query),
    /// Tell what is wrong in a configuration file, without applying it.
    Check(Check),
    /// Run one command over all links, with no privilege.
    Run(Run),
    /// Download files over all links at once, from any server, with no privilege.
    Get(Box<Get>),
    /// Tell why a flow gets the link it gets.
    Explain(Explain),
    /// List, serve and fetch profiles of the energy that interfaces need.
    #[command(subcommand)]
    Energy(Energy),
    /// Simulate: the papers' experiments, and instances of one's own.
    #[command(subcommand)]
    Sim(Sim),
    /// Bond with a relay from now on, by the line that its operator gave.
    Join(Join),
    /// Leave a relay, or forget a server and its key.
    Leave(Leave),
    /// List the relays and the servers that run Braid, and the paths to them.
    Peers(Query),
    /// Carry running bonded flows over another link.
    Move(Move),
    /// Run a relay, and decide who may use it and how much.
    Relay(Box<Relay>),
    /// Tell what this system can and cannot do, and the remedy.
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
    /// Carry what other devices ask for over all links, as an HTTP and SOCKS5 proxy.
    Proxy(Box<Proxy>),
    /// Take a dead daemon's rules down (started by the daemon).
    #[command(hide = true)]
    Guardian,
}

/// How the daemon is reached.
#[derive(Debug, Args)]
pub(crate) struct Daemon {
    /// The daemon's socket.
    #[arg(long, value_name = "PATH", env = "BRAID_SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
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

#[derive(Debug, Args)]
pub(crate) struct Up {
    /// The configuration file. Left out: /etc/braid/braid.toml where there is one, else the defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Where what is learnt is kept.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub(crate) state_dir: PathBuf,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

#[derive(Debug, Args)]
pub(crate) struct Check {
    /// The configuration file.
    pub(crate) file: PathBuf,
    /// The file is for another machine: programs, links and relays that this one does not have are warned of, not refused.
    #[arg(long)]
    pub(crate) portable: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Run one command over all links, with no privilege.
///
/// Its connections are heard by a seccomp filter, which no privilege is needed for; in return programs that gain privilege when
/// started (sudo, su) do not. Exits with the command's own status. What it learns of links and programs is kept for the next run in
/// ~/.local/state/braid. With --relay, TCP connections and connected UDP sockets use all links at once, through a relay that was joined with
/// "braid join --user"; while it does not answer, they go direct.
#[derive(Debug, Args)]
pub(crate) struct Run {
    /// How links are chosen.
    #[arg(long, short, value_name = "NAME", default_value_t, value_parser = scheduler_parser())]
    pub(crate) scheduler: Scheduler,
    /// Use this link; may be given several times. Left out: all.
    #[arg(long = "link", short, value_name = "NAME")]
    pub(crate) links: Vec<String>,
    /// Whether connections go to a relay: auto (if --relay names one), direct, bond, or duplicate (each packet over two links).
    #[arg(long, value_name = "HOW", default_value = "auto", hide_default_value = true, value_parser = carry_parser())]
    pub(crate) carry: Carry,
    /// The relay, by the name it was joined under. Left out: the first by name, if --carry asks for one.
    #[arg(long, value_name = "NAME")]
    pub(crate) relay: Option<String>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Carry what other devices and programs ask for over all links: a proxy (HTTP, CONNECT, SOCKS5) on one port, with no privilege.
///
/// Clients set it as their proxy, or load http://ADDRESS/proxy.pac. It listens on the loopback unless told otherwise; clients from elsewhere
/// are let in by --allow. Rules of the configuration hold: match = { client = "192.168.7.0/24" }, or a name of --passwords, stands for the
/// application.
#[derive(Debug, Args)]
pub(crate) struct Proxy {
    /// Listen here.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:5758")]
    pub(crate) listen: SocketAddr,
    /// Let clients in from this network; may be given several times. Left out: only this machine's.
    #[arg(long, value_name = "NET")]
    pub(crate) allow: Vec<IpNet>,
    /// Ask clients for a name and a password: lines of NAME:PASSWORD in a file that only its owner may read.
    #[arg(long, value_name = "FILE")]
    pub(crate) passwords: Option<PathBuf>,
    /// Let clients from elsewhere reach this network besides the Internet; may be given several times.
    #[arg(long, value_name = "NET")]
    pub(crate) reach: Vec<IpNet>,
    /// The configuration file, for its rules. Left out: /etc/braid/braid.toml where there is one, else the defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// How links are chosen. Left out: as the configuration says.
    #[arg(long, short, value_name = "NAME", value_parser = scheduler_parser())]
    pub(crate) scheduler: Option<Scheduler>,
    /// Use this link; may be given several times. Left out: all.
    #[arg(long = "link", short, value_name = "NAME")]
    pub(crate) links: Vec<String>,
    /// How flows are carried that no rule speaks of: auto (one link each), direct, bond (over all links, through a relay), or duplicate.
    #[arg(long, value_name = "HOW", default_value = "auto", hide_default_value = true, value_parser = carry_parser())]
    pub(crate) carry: Carry,
    /// The relay, by the name it was joined under with braid join --user. Left out: the first by name.
    #[arg(long, value_name = "NAME")]
    pub(crate) relay: Option<String>,
}

/// Download files over all links at once, from any server, with no privilege.
///
/// A file is asked for in ranges (HTTP), each over a link of its own choice, where the server allows that and proves that they are of one file;
/// else it comes whole over one link. Addresses that end in the same name, or all of them with -o, are mirrors of one file. What came is kept
/// beside the file (NAME.braid-part, NAME.braid-journal) until it is complete: -C goes on after any end. Where the daemon runs, its estimates,
/// states, prices and allowances of links hold. Exits with curl's statuses where they fit.
#[derive(Debug, Args)]
pub(crate) struct Get {
    /// The addresses.
    #[arg(required = true, value_name = "URL")]
    pub(crate) urls: Vec<String>,
    /// Write to this file; "-" is standard output.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Name the file as the address does. That is done anyway; for curl's habit.
    #[arg(long, short = 'O', conflicts_with = "output")]
    pub(crate) remote_name: bool,
    /// Put files into this directory.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) output_dir: PathBuf,
    /// Go on with what an earlier run left, if it is of the same file still.
    #[arg(long = "continue", short = 'C')]
    pub(crate) resume: bool,
    /// Keep the file only if this is its checksum: sha256: and 64 hexadecimal digits. The k-th is of the k-th file.
    #[arg(long, value_name = "sha256:HEX")]
    pub(crate) checksum: Vec<Checksum>,
    /// How much a file counts when several share links. The k-th is of the k-th file; left out: 1.
    #[arg(long, value_name = "NUMBER")]
    pub(crate) weight: Vec<f64>,
    /// Use this link; may be given several times. Left out: all.
    #[arg(long = "link", short, value_name = "NAME")]
    pub(crate) links: Vec<String>,
    /// Let a link bring no more than so much, as in lte0=500MB; may be given several times.
    #[arg(long, value_name = "LINK=AMOUNT", value_parser = link_amount)]
    pub(crate) max_link: Vec<(String, Bytes)>,
    /// What 10^9 bytes over a link cost, as in lte0=2.5; may be given several times.
    #[arg(long, value_name = "LINK=PRICE", value_parser = link_price)]
    pub(crate) price: Vec<(String, f64)>,
    /// Spend no more than so much on all files, by --price and the daemon's prices.
    #[arg(long, value_name = "AMOUNT", value_parser = price)]
    pub(crate) max_cost: Option<f64>,
    /// Bring no more than this over all links together, as in 10Mbit/s.
    #[arg(long, value_name = "RATE")]
    pub(crate) limit_rate: Option<Rate>,
    /// Refuse larger files.
    #[arg(long, value_name = "AMOUNT")]
    pub(crate) max_filesize: Option<Bytes>,
    /// Add a field to the header of requests; may be given several times.
    #[arg(long, short = 'H', value_name = "NAME: VALUE", value_parser = header_field)]
    pub(crate) header: Vec<(hyper::header::HeaderName, hyper::header::HeaderValue)>,
    /// Ask as this user (basic authentication), at the hosts named only.
    #[arg(long, short, value_name = "USER:PASSWORD")]
    pub(crate) user: Option<Credentials>,
    /// Take users and passwords from ~/.netrc.
    #[arg(long, short)]
    pub(crate) netrc: bool,
    /// Take users and passwords from this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) netrc_file: Option<PathBuf>,
    /// Send the cookies of this file (Netscape's form). Those that answers set are sent back while the run lasts in any case.
    #[arg(long, short = 'b', value_name = "FILE")]
    pub(crate) cookie: Option<PathBuf>,
    /// Use this proxy (http://HOST:PORT, or socks5://HOST:PORT, which resolves names); "" for none. Left out: as http_proxy, https_proxy,
    /// all_proxy and no_proxy say.
    #[arg(long, short = 'x', value_name = "PROXY")]
    pub(crate) proxy: Option<String>,
    /// Trust the roots in this file (PEM) instead of the system's.
    #[arg(long, value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
    /// Do not offer HTTP/2.
    #[arg(long = "http1.1")]
    pub(crate) http1: bool,
    /// Follow no more redirections than this.
    #[arg(long, value_name = "COUNT", default_value_t = 30)]
    pub(crate) max_redirs: u32,
    /// Give a file up when so many attempts in a row bring nothing.
    #[arg(long, value_name = "COUNT", default_value_t = 12, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) tries: u32,
    /// Give a file up when nothing came for so long: a number and s, min or h.
    #[arg(long, value_name = "SPAN", default_value = "60s", value_parser = span)]
    pub(crate) timeout: Duration,
    /// Give a connection up that does not stand after so long.
    #[arg(long, value_name = "SPAN", default_value = "15s", value_parser = span)]
    pub(crate) connect_timeout: Duration,
    /// Open no more connections than this to a server over one link.
    #[arg(long, value_name = "COUNT", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) connections: u32,
    /// Say nothing but errors.
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Tell all that happens as JSON, one event a line, on standard output.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

fn link_amount(text: &str) -> Result<(String, Bytes), String> {
    let (link, amount) = text.split_once('=').ok_or("write LINK=AMOUNT, as in lte0=500MB")?;
    Ok((link.to_owned(), amount.parse().map_err(|error: braid_model::UnitError| error.to_string())?))
}

fn link_price(text: &str) -> Result<(String, f64), String> {
    let (link, amount) = text.split_once('=').ok_or("write LINK=PRICE, as in lte0=2.5")?;
    Ok((link.to_owned(), price(amount)?))
}

fn price(text: &str) -> Result<f64, String> {
    let price: f64 = text.parse().map_err(|_| "write a number".to_owned())?;
    if price.is_finite() && price >= 0.0 { Ok(price) } else { Err("write a number from 0".to_owned()) }
}

fn header_field(text: &str) -> Result<(hyper::header::HeaderName, hyper::header::HeaderValue), String> {
    let (name, value) = text.split_once(':').ok_or("write NAME: VALUE")?;
    let name: hyper::header::HeaderName = name.trim().parse().map_err(|_| format!("{name:?} is no name of a header field"))?;
    if [hyper::header::RANGE, hyper::header::IF_RANGE].contains(&name) {
        return Err(format!("{name} is Braid's own to set"));
    }
    Ok((name, value.trim().parse().map_err(|_| "its value holds what no header may".to_owned())?))
}

fn carry_parser() -> impl clap::builder::TypedValueParser<Value = Carry> {
    use clap::builder::TypedValueParser;
    let of = |name: String| Carry::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, carry)| carry).ok_or("no such way");
    clap::builder::PossibleValuesParser::new(Carry::ALL.map(|(name, _)| name)).try_map(of)
}

fn scheduler_parser() -> impl clap::builder::TypedValueParser<Value = Scheduler> {
    use clap::builder::TypedValueParser;
    let names = Scheduler::ALL.into_iter().filter(|scheduler| !scheduler.needs_daemon()).map(Scheduler::name);
    clap::builder::PossibleValuesParser::new(names).try_map(|name| name.parse::<Scheduler>())
}

/// Tell why a flow gets the link it gets.
///
/// `braid explain 17` explains a live flow by its id (see `braid flows`); `braid explain curl 192.0.2.1:443` one to come.
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

#[derive(Debug, Subcommand)]
pub(crate) enum Energy {
    /// List the profiles that ship with Braid, and those of a file.
    List(EnergyList),
    /// Give profiles to others, over HTTP.
    Serve(EnergyServe),
    /// Take profiles from others.
    Fetch(EnergyFetch),
}

#[derive(Debug, Args)]
pub(crate) struct EnergyList {
    /// A file of profiles, which go before those that ship with Braid.
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a file of profiles.
    #[arg(long, conflicts_with = "json")]
    pub(crate) toml: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyServe {
    /// Where to listen; others than this machine may read only if you name an address they reach.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:7632")]
    pub(crate) listen: SocketAddr,
    /// The database; made with the profiles that ship with Braid if there is none.
    #[arg(long, value_name = "FILE")]
    pub(crate) db: PathBuf,
    /// Put the profiles of this file into the database first; may be given several times.
    #[arg(long, value_name = "FILE")]
    pub(crate) import: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct EnergyFetch {
    /// The service, http://HOST:PORT; with a path and query to ask for some only (/v1/profiles?technology=5g).
    pub(crate) url: hyper::Uri,
    /// Add them to this file, which is written anew, without what comments it had. Left out: print them.
    #[arg(long, value_name = "FILE")]
    pub(crate) into: Option<PathBuf>,
}

/// Run a relay, and decide who may use it and how much.
///
/// A relay carries its clients' flows over all of their links at once. Nobody may use it who was not invited: "braid relay invite" prints
/// a line that "braid join" takes on the client. All of it needs no privilege, only the relay's state directory.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Relay {
    #[command(subcommand)]
    pub(crate) action: Option<RelayAction>,
    #[command(flatten)]
    pub(crate) server: RelayServer,
}

/// How the relay runs.
#[derive(Debug, Args)]
pub(crate) struct RelayServer {
    /// Where it listens (UDP); 5757 is the reserved port.
    #[arg(long, value_name = "ADDR:PORT", default_value = "[::]:5757")]
    pub(crate) listen: SocketAddr,
    /// Serve anyone, without keys, and reach this host's own services only.
    #[arg(long, conflicts_with_all = ["allow"])]
    pub(crate) local: bool,
    /// Let clients reach this network too, though it is private; may be given several times.
    #[arg(long, value_name = "NET")]
    pub(crate) allow: Vec<IpNet>,
    /// An address of the relay's own that its interfaces do not show, as behind a translator; may be given several times. With --local all of
    /// its ports must be this host's.
    #[arg(long, value_name = "ADDR")]
    pub(crate) own: Vec<IpAddr>,
    /// With --local, the services that anyone may reach, as 443 or 8000-8999; may be given several times. Left out: all but mail's (25, 465,
    /// 587), whose servers trust their own host, from which strangers seem to come.
    #[arg(long, value_name = "PORT[-PORT]", requires = "local", value_parser = ports)]
    pub(crate) port: Vec<RangeInclusive<u16>>,
    /// With --local, bits per second in each direction for one source (an IPv4 address, an IPv6 network of 64 bits), as in 10Mbit/s.
    #[arg(long, value_name = "RATE", requires = "local", value_parser = rate)]
    pub(crate) rate: Option<Rate>,
    /// Flows of all clients together, at most.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    pub(crate) max_flows: usize,
    /// Bytes that all bonds together may hold on their way through; the largest is ended beyond it.
    #[arg(long, value_name = "BYTES", default_value_t = Memory::default().total)]
    pub(crate) max_memory: Bytes,
    /// The same for the bonds of one client.
    #[arg(long, value_name = "BYTES", default_value_t = Memory::default().client)]
    pub(crate) client_memory: Bytes,
    #[command(flatten)]
    pub(crate) state: RelayState,
}

#[derive(Debug, Args)]
pub(crate) struct Join {
    /// What "braid relay invite" printed.
    pub(crate) line: String,
    /// What the relay shall be called here. Left out: its host.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Join for this user's "braid run" alone, without a daemon.
    #[arg(long)]
    pub(crate) user: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

#[derive(Debug, Args)]
pub(crate) struct Leave {
    /// The relay's name, or the server's address, as "braid peers" lists it.
    pub(crate) name: String,
    /// Leave one that was joined for this user alone.
    #[arg(long)]
    pub(crate) user: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

#[derive(Debug, Args)]
pub(crate) struct Move {
    /// A flow's id, or an application's path or name, as "braid flows" lists them.
    #[arg(value_name = "FLOW|APP")]
    pub(crate) what: String,
    /// The link; left out: all links again.
    #[arg(long, value_name = "LINK")]
    pub(crate) to: Option<String>,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RelayAction {
    /// Print a line that lets one device join.
    Invite(RelayInvite),
    /// List the clients, their limits and what they used this month.
    Clients(RelayClients),
    /// Shut a client out, at once and until it is invited again.
    Revoke(RelayRevoke),
    /// Set what a client may use.
    Limit(RelayLimit),
}

/// Where a relay keeps its state.
#[derive(Debug, Args)]
pub(crate) struct RelayState {
    /// Where the relay keeps its key and its clients.
    #[arg(long, value_name = "DIR", env = "BRAID_RELAY_STATE_DIR", default_value = DEFAULT_RELAY_DIR)]
    pub(crate) state_dir: PathBuf,
}

/// Print a line that lets one device join.
///
/// The line holds the relay's addresses and key, and a secret that is good once: show it to nobody but who shall join. On a terminal it is
/// shown as a QR code too.
#[derive(Debug, Args)]
pub(crate) struct RelayInvite {
    /// Where clients reach the relay, as seen from outside; may be given up to eight times, the best first.
    #[arg(long = "address", value_name = "HOST:PORT", required = true)]
    pub(crate) addresses: Vec<Address>,
    /// What the client shall be called here. Left out: it chooses.
    #[arg(long)]
    pub(crate) name: Option<ClientName>,
    /// How long the invitation is good: a number and s, min, h or d.
    #[arg(long, value_name = "SPAN", default_value = "24h", value_parser = span)]
    pub(crate) expires: Duration,
    /// What the client may use from the start.
    #[command(flatten)]
    pub(crate) limits: RelayLimits,
    #[command(flatten)]
    pub(crate) state: RelayState,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RelayClients {
    #[command(flatten)]
    pub(crate) state: RelayState,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RelayRevoke {
    /// The client: its name, its key, or the first eight characters of the key or more.
    #[arg(value_name = "NAME|KEY")]
    pub(crate) client: String,
    #[command(flatten)]
    pub(crate) state: RelayState,
}

/// Set what a client may use.
///
/// Limits that are not named stay as they are; "none" lifts one.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("limits").required(true).multiple(true).args(["rate", "rate_down", "rate_up", "flows", "monthly"])))]
pub(crate) struct RelayLimit {
    /// The client: its name, its key, or the first eight characters of the key or more.
    #[arg(value_name = "NAME|KEY")]
    pub(crate) client: String,
    #[command(flatten)]
    pub(crate) limits: RelayLimits,
    #[command(flatten)]
    pub(crate) state: RelayState,
}

/// Limits of a client; "none" is none.
#[derive(Debug, Args)]
#[group(skip)]
pub(crate) struct RelayLimits {
    /// Bits per second in each direction, as in 10Mbit/s.
    #[arg(long, conflicts_with_all = ["rate_down", "rate_up"], value_parser = limit::<Rate>)]
    pub(crate) rate: Option<Limit<Rate>>,
    /// Bits per second towards the client.
    #[arg(long, value_name = "RATE", value_parser = limit::<Rate>)]
    pub(crate) rate_down: Option<Limit<Rate>>,
    /// Bits per second from the client.
    #[arg(long, value_name = "RATE", value_parser = limit::<Rate>)]
    pub(crate) rate_up: Option<Limit<Rate>>,
    /// Flows at a time.
    #[arg(long, alias = "max-flows", value_name = "COUNT", value_parser = limit::<u32>)]
    pub(crate) flows: Option<Limit<u32>>,
    /// Bytes in a calendar month (UTC), both directions together, as in 50GB.
    #[arg(long, value_name = "BYTES", value_parser = limit::<Bytes>)]
    pub(crate) monthly: Option<Limit<Bytes>>,
}

/// A limit as it is to be; `None` lifts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit<T>(pub(crate) Option<T>);

fn ports(text: &str) -> Result<RangeInclusive<u16>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse::<u16>(), last.trim().parse::<u16>()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(first..=last),
        _ => Err("write a port from 1 to 65535, or two with the lower first, as in 8000-8999".to_owned()),
    }
}

fn rate(text: &str) -> Result<Rate, String> {
    match text.parse::<Rate>() {
        Ok(rate) if rate == Rate::ZERO => Err("nothing at all is no rate; leave it out for no limit".to_owned()),
        read => read.map_err(|error| error.to_string()),
    }
}

fn limit<T: FromStr + Default + PartialEq>(text: &str) -> Result<Limit<T>, String>
where
    T::Err: Display,
{
    if text == "none" {
        return Ok(Limit(None));
    }
    match text.parse::<T>() {
        Ok(value) if value == T::default() => {
            Err("nothing at all is no limit; \"braid relay revoke\" shuts a client out, \"none\" lifts the limit".to_owned())
        }
        Ok(value) => Ok(Limit(Some(value))),
        Err(error) => Err(format!("{error}; or \"none\" for no limit")),
    }
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
        Some(span) if span > most => Err("an invitation is good for a year (366d) at most".to_owned()),
        Some(span) => Ok(span),
        None => Err(wanted()),
    }
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Where what is learnt would be kept.
    #[arg(long, value_name = "DIR", default_value = DEFAULT_STATE_DIR)]
    pub(crate) state_dir: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Simulate: the papers' experiments, and instances of one's own.
///
/// The schedulers are those of the daemon. The same seed gives the same results on every machine; what is measured by a clock is
/// marked.
#[derive(Debug, Subcommand)]
pub(crate) enum Sim {
    /// Show the experiments.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run an experiment, or all.
    Run(SimRun),
    /// Run all experiments and write the page that sets the papers' claims beside the results.
    Report {
        /// The directory: the page is reproduction.md, its plots go into reproduction/.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        #[command(flatten)]
        sampling: Sampling,
    },
    /// Compute the fairest rates for flows and links, and what miDRR makes of them packet by packet.
    #[command(after_help = FAIR_FORMAT)]
    Fair(Instance),
    /// Choose a stream's link, and packets' shares, as OPERETTA does.
    #[command(after_help = OPERETTA_FORMAT)]
    Operetta(Instance),
}

const FAIR_FORMAT: &str = r#"The instance (a demand of null has no limit; duration_s and seed are for the packet-level run):
  {"links": [{"name": "1", "capacity_bps": 3000000}],
   "flows": [{"name": "a", "weight": 1, "links": ["1"], "demand_bps": null, "packet_bytes": 1500}],
   "duration_s": 60, "seed": 1}
The result:
  {"rates_bps": {"a": ...}, "clusters": [{"flows": [...], "links": [...], "rate_per_weight_bps": ...}],
   "midrr": {"rates_bps": {"a": ...}, "max_relative_deviation": ...}, "midrr_flags": {...}}
midrr is the variant with service counters, midrr_flags the thesis's own with service flags, which is not always fair."#;

const OPERETTA_FORMAT: &str = r#"The instance (kinds are connection and packet; alpha is the utility, 0 to 1):
  {"alpha": 1.0,
   "links": [{"name": "wifi", "rate_bps": 1000000, "power_mw": 634}],
   "streams": [{"load_bytes": 1000, "kind": "connection", "link": "wifi"}, {"load_bytes": 1000, "kind": "packet"}],
   "new": {"load_bytes": 1000, "kind": "connection"}}
The result (assignment is null for a packet-oriented new stream; energy_j is that of all streams' remaining load):
  {"assignment": "wifi", "weights": {"wifi": 1.0}, "energy_j": ..., "throughput_bps": ..., "target_bps": ..., "feasible": true}"#;

#[derive(Debug, Args)]
pub(crate) struct SimRun {
    /// An experiment's name (see `braid sim list`), or "all".
    #[arg(value_name = "NAME|all")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) sampling: Sampling,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write plots (SVG) and results (JSON) into this directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// What all chance in experiments comes from, and how often it is tried.
#[derive(Debug, Args)]
pub(crate) struct Sampling {
    /// How often each point is measured, where there is chance in it.
    #[arg(long, value_name = "COUNT", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) runs: u32,
    /// What all chance comes from.
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Use this many threads. Left out: one for each processor.
    #[arg(long, value_name = "COUNT")]
    pub(crate) threads: Option<NonZeroUsize>,
}

#[derive(Debug, Args)]
pub(crate) struct Instance {
    /// The instance as JSON; "-" reads standard input.
    #[arg(long, value_name = "FILE")]
    pub(crate) instance: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
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
    fn what_follows_the_command_belongs_to_it() {
        let cli = Cli::try_parse_from(["braid", "run", "-s", "round-robin", "--link", "wlan0", "--", "curl", "--json", "-v"]).unwrap();
        let Command::Run(run) = cli.command else { panic!() };
        assert_eq!((run.scheduler, run.links, cli.verbose), (Scheduler::RoundRobin, vec!["wlan0".to_owned()], 0));
        assert_eq!(run.command, ["curl", "--json", "-v"]);
    }

    fn limited(words: &[&str]) -> Result<RelayLimit, String> {
        let words = [&["braid", "relay", "limit", "phone"], words].concat();
        match Cli::try_parse_from(words).map_err(|error| error.to_string())?.command {
            Command::Relay(relay) => match relay.action {
                Some(RelayAction::Limit(limit)) => Ok(limit),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn limits_are_set_and_lifted() {
        let set = limited(&["--rate", "10Mbit/s", "--flows", "none", "--monthly", "50GB"]).unwrap();
        assert_eq!((set.limits.rate, set.limits.flows), (Some(Limit(Some(Rate::from_mbps(10)))), Some(Limit(None))));
        assert_eq!((set.limits.monthly, set.limits.rate_up), (Some(Limit(Some(Bytes::new(50_000_000_000)))), None));
        assert!(limited(&[]).unwrap_err().contains("--monthly"), "one of them is needed");
        assert!(limited(&["--rate", "1Mbit/s", "--rate-up", "1Mbit/s"]).is_err());
        assert!(limited(&["--flows", "0"]).unwrap_err().contains("revoke"));
        let told = limited(&["--rate", "fast"]).unwrap_err();
        assert!(told.contains("Mbit/s") && told.contains("none"), "{told}");
    }

    #[test]
    fn spans_of_time_are_read() {
        assert_eq!(["90s", "15min", "24h", "7d"].map(|text| span(text).unwrap().as_secs()), [90, 900, 86_400, 604_800]);
        for text in ["", "24", "h", "0h", "-1h", "1.5h", "99999999999999999999d", "367d", "1 week"] {
            assert!(span(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_wrong_scheduler_is_refused_with_the_valid_ones() {
        let error = Cli::try_parse_from(["braid", "run", "-s", "max-troughput", "true"]).unwrap_err().to_string();
        assert!(error.contains("max-throughput") && error.contains("weighted-round-robin") && !error.contains("operetta"), "{error}");
    }
}
