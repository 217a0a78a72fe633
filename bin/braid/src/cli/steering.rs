//! Arguments of `braid run` and `braid proxy`, which steer flows without a daemon.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_decide::policy::{Carry, Scheduler};
use clap::Args;
use ipnet::IpNet;

/// Run one command over all links, without privileges.
///
/// Braid intercepts the command's connections with a seccomp filter, which needs no privilege. In return, programs that gain privileges when started
/// (sudo, su) do not work. The exit status is that of the command. What Braid learns of links and programs is kept for the next run in
/// ~/.local/state/braid. With --relay or --carry bond, TCP connections and connected UDP sockets use all links at once, through a relay joined with
/// "braid join --user". While the relay does not answer, they go direct; --relay-wait delays them first. A running daemon ignores the command's
/// connections, and "braid flows" does not list them.
#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) steering: Steering,
    /// Delay connections at the start for at most this long until the relay is reached. Default: 1s, or 5s if the relay has begun to answer.
    #[arg(long, value_name = "SPAN", value_parser = super::span)]
    pub(crate) relay_wait: Option<Duration>,
    /// Command to run, with its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Run an HTTP and SOCKS5 proxy that carries other devices' connections over all links.
///
/// HTTP, CONNECT and SOCKS5 share one port and need no privilege. Clients set it as their proxy, or load http://ADDRESS/proxy.pac. By default it
/// listens on loopback, for the programs of the user who starts it. --allow-user admits other users of this machine, --allow admits clients of other
/// machines. The rules of the configuration apply: match = { client = "192.168.7.0/24" }, or a name of --passwords, stands for the application.
/// --carry applies to flows that no rule matches.
#[derive(Debug, Args)]
pub(crate) struct Proxy {
    /// Address to listen on.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:5758")]
    pub(crate) listen: SocketAddr,
    /// Admit clients of this network; repeatable. Default: only this machine, subject to --allow-user.
    #[arg(long, value_name = "NET")]
    pub(crate) allow: Vec<IpNet>,
    /// Admit this user of this machine, by name or number, or "all"; repeatable. Default: the user who starts the proxy, and root. With --passwords
    /// the password decides.
    #[arg(long, value_name = "USER|all")]
    pub(crate) allow_user: Vec<String>,
    /// Require a user name and password: a file with lines of NAME:PASSWORD that only its owner may read.
    #[arg(long, value_name = "FILE")]
    pub(crate) passwords: Option<PathBuf>,
    /// Let clients of other machines reach this network, besides the Internet; repeatable.
    #[arg(long, value_name = "NET")]
    pub(crate) reach: Vec<IpNet>,
    /// Configuration file, for its rules. Default: /etc/braid/braid.toml if it exists, otherwise the built-in defaults.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) steering: Steering,
}

/// Options for the choice of links and carriage of flows without a daemon.
#[derive(Debug, Args)]
pub(crate) struct Steering {
    /// Scheduler. Default: that of the configuration if one is read, else max-throughput.
    #[arg(long, short, value_name = "NAME", value_parser = scheduler_parser())]
    pub(crate) scheduler: Option<Scheduler>,
    /// Use this link; repeatable. Default: all links.
    #[arg(long = "link", short, value_name = "NAME")]
    pub(crate) links: Vec<String>,
    /// How to carry flows: auto, direct, bond (over all links, through a relay), or duplicate (each packet over two links).
    #[arg(long, value_name = "HOW", default_value = "auto", hide_default_value = true, value_parser = carry_parser())]
    pub(crate) carry: Carry,
    /// Relay to use, by the name given to "braid join --user". Default: the first by name, if a relay is needed.
    #[arg(long, value_name = "NAME")]
    pub(crate) relay: Option<String>,
}

fn carry_parser() -> impl clap::builder::TypedValueParser<Value = Carry> {
    use clap::builder::TypedValueParser;
    let of = |name: String| Carry::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, carry)| carry).ok_or("unknown value");
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
    fn options_after_the_command_belong_to_the_command() {
        let cli = Cli::try_parse_from(["braid", "run", "-s", "round-robin", "--link", "wlan0", "--", "curl", "--json", "-v"]).unwrap();
        let Command::Run(run) = cli.command else { panic!() };
        assert_eq!((run.steering.scheduler, run.steering.links, cli.verbose), (Some(Scheduler::RoundRobin), vec!["wlan0".to_owned()], 0));
        assert_eq!(run.command, ["curl", "--json", "-v"]);
    }

    #[test]
    fn an_unknown_scheduler_is_rejected_with_the_valid_names() {
        let error = Cli::try_parse_from(["braid", "run", "-s", "max-troughput", "true"]).unwrap_err().to_string();
        assert!(error.contains("max-throughput") && error.contains("weighted-round-robin") && !error.contains("operetta"), "{error}");
    }
}
