//! What `braid run` and `braid proxy` take: they steer flows without a daemon.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_decide::policy::{Carry, Scheduler};
use clap::Args;
use ipnet::IpNet;

/// Run one command over all links, with no privilege.
///
/// Its connections are heard by a seccomp filter, which no privilege is needed for; in return programs that gain privilege when
/// started (sudo, su) do not. Exits with the command's own status. What it learns of links and programs is kept for the next run in
/// ~/.local/state/braid. With --relay or --carry bond, TCP connections and connected UDP sockets use all links at once, through a relay that
/// was joined with "braid join --user"; while it does not answer, they go direct (--relay-wait: not at once). A daemon that runs leaves the command's connections alone, and
/// "braid flows" does not list them.
#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) steering: Steering,
    /// Let connections wait this long at the start until the relay is reached. Left out: 1s, or 5s if it has begun to answer.
    #[arg(long, value_name = "SPAN", value_parser = super::span)]
    pub(crate) relay_wait: Option<Duration>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Carry what other devices ask for over all links, as an HTTP and SOCKS5 proxy.
///
/// All of it (HTTP, CONNECT, SOCKS5) is on one port, and needs no privilege. Clients set it as their proxy, or load http://ADDRESS/proxy.pac. It listens on the loopback unless told otherwise, for
/// the programs of the user who starts it; other users of this machine are let in by --allow-user, clients from elsewhere by --allow. Rules of the configuration hold: match = { client = "192.168.7.0/24" }, or a name of --passwords, stands for the
/// application; --carry is for flows that no rule speaks of.
#[derive(Debug, Args)]
pub(crate) struct Proxy {
    /// Listen here.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:5758")]
    pub(crate) listen: SocketAddr,
    /// Let clients in from this network; may be given several times. Left out: only this machine's, as --allow-user says.
    #[arg(long, value_name = "NET")]
    pub(crate) allow: Vec<IpNet>,
    /// Let this machine's user in, by name or number, or "all"; may be given several times. Left out: the one who starts it, and root. With
    /// --passwords the password decides.
    #[arg(long, value_name = "USER|all")]
    pub(crate) allow_user: Vec<String>,
    /// Ask clients for a name and a password: lines of NAME:PASSWORD in a file that only its owner may read.
    #[arg(long, value_name = "FILE")]
    pub(crate) passwords: Option<PathBuf>,
    /// Let clients from elsewhere reach this network besides the Internet; may be given several times.
    #[arg(long, value_name = "NET")]
    pub(crate) reach: Vec<IpNet>,
    /// The configuration file, for its rules. Left out: /etc/braid/braid.toml where there is one, else the defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) steering: Steering,
}

/// How flows without a daemon get their links, and which are carried.
#[derive(Debug, Args)]
pub(crate) struct Steering {
    /// How links are chosen. Left out: as the configuration says where one is read, else max-throughput.
    #[arg(long, short, value_name = "NAME", value_parser = scheduler_parser())]
    pub(crate) scheduler: Option<Scheduler>,
    /// Use this link; may be given several times. Left out: all.
    #[arg(long = "link", short, value_name = "NAME")]
    pub(crate) links: Vec<String>,
    /// How flows are carried: auto, direct, bond (over all links, through a relay), or duplicate (each packet over two links).
    #[arg(long, value_name = "HOW", default_value = "auto", hide_default_value = true, value_parser = carry_parser())]
    pub(crate) carry: Carry,
    /// The relay, by the name it was joined under with "braid join --user". Left out: the first by name, if one is needed.
    #[arg(long, value_name = "NAME")]
    pub(crate) relay: Option<String>,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    #[test]
    fn what_follows_the_command_belongs_to_it() {
        let cli = Cli::try_parse_from(["braid", "run", "-s", "round-robin", "--link", "wlan0", "--", "curl", "--json", "-v"]).unwrap();
        let Command::Run(run) = cli.command else { panic!() };
        assert_eq!((run.steering.scheduler, run.steering.links, cli.verbose), (Some(Scheduler::RoundRobin), vec!["wlan0".to_owned()], 0));
        assert_eq!(run.command, ["curl", "--json", "-v"]);
    }

    #[test]
    fn a_wrong_scheduler_is_refused_with_the_valid_ones() {
        let error = Cli::try_parse_from(["braid", "run", "-s", "max-troughput", "true"]).unwrap_err().to_string();
        assert!(error.contains("max-throughput") && error.contains("weighted-round-robin") && !error.contains("operetta"), "{error}");
    }
}
