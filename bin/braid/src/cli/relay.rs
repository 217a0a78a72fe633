//! The command line of relays: running one, and joining one.

use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use braid_model::address::Address;
use braid_model::{ByteCount, Rate};
use braid_peer::name::ClientName;
use braid_transport::relay::{CLIENT_FLOWS, MemoryLimits};
use clap::{Args, Subcommand};
use ipnet::IpNet;

use super::{Daemon, span};

/// Where a relay keeps its state unless told otherwise.
pub(crate) const DEFAULT_RELAY_DIR: &str = "/var/lib/braid-relay";

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
    /// With --local, the ports that anyone may reach, as 443 or 8000-8999, or "all"; may be given several times [default: 80 and 443]. Strangers
    /// seem to come from this host itself, so that its firewall does not keep them from a port that is opened here.
    #[arg(long, value_name = "PORT[-PORT]|all", requires = "local", value_parser = ports)]
    pub(crate) port: Vec<PortRange>,
    /// With --local, bits per second in each direction for one source (an IPv4 address, an IPv6 network of 64 bits), as in 10Mbit/s.
    #[arg(long, value_name = "RATE", requires = "local", value_parser = rate)]
    pub(crate) rate: Option<Rate>,
    /// Flows of all clients together, at most.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    pub(crate) max_flows: usize,
    /// Connections and UDP exchanges of one client at a time, unless "braid relay limit" gives it its own number; what is beyond goes direct.
    #[arg(long, value_name = "COUNT", default_value_t = CLIENT_FLOWS)]
    pub(crate) client_flows: u32,
    /// Bytes that all bonds together may hold on their way through, with what the system buffers for their sockets; the largest is ended beyond it.
    #[arg(long, value_name = "BYTES", default_value_t = MemoryLimits::default().total)]
    pub(crate) max_memory: ByteCount,
    /// The same for the bonds of one client.
    #[arg(long, value_name = "BYTES", default_value_t = MemoryLimits::default().client)]
    pub(crate) client_memory: ByteCount,
    #[command(flatten)]
    pub(crate) state: RelayState,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RelayAction {
    Invite(RelayInvite),
    Clients(RelayClients),
    /// Shut a client out, at once and until it is invited again.
    Revoke(RelayRevoke),
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

/// List the clients, their limits and what they used this month.
///
/// SEEN is when the client was last there, as the relay writes it down once a minute. DOWN and UP are what it used this month, towards it and
/// from it; MOST A MONTH, MOST DOWN, MOST UP and MOST FLOWS are its limits, which "braid relay limit" sets.
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
    /// Connections and UDP exchanges at a time; "none" for as many as the relay grants everybody (--client-flows).
    #[arg(long, alias = "max-flows", value_name = "COUNT", value_parser = limit::<u32>)]
    pub(crate) flows: Option<Limit<u32>>,
    /// Bytes in a calendar month (UTC), both directions together, as in 50GB.
    #[arg(long, value_name = "BYTES", value_parser = limit::<ByteCount>)]
    pub(crate) monthly: Option<Limit<ByteCount>>,
}

/// A limit as it is to be; `None` lifts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit<T>(pub(crate) Option<T>);

/// Bond with a relay from now on, by the line that its operator gave.
///
/// Asks for the line on a terminal, without showing it. Waits three seconds at most for the relay's answer. One that gives none yet is joined
/// all the same, and dialled again and again.
#[derive(Debug, Args)]
pub(crate) struct Join {
    /// What "braid relay invite" printed. Left out, or "-": asked for on a terminal, else read from standard input. It holds a secret, and other
    /// users of this machine see what stands here.
    pub(crate) line: Option<String>,
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

/// Some ports, or all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PortRange {
    All,
    Some(RangeInclusive<u16>),
}

impl PortRange {
    pub(crate) fn range(self) -> Option<RangeInclusive<u16>> {
        match self {
            Self::All => None,
            Self::Some(range) => Some(range),
        }
    }
}

fn ports(text: &str) -> Result<PortRange, String> {
    if text == "all" {
        return Ok(PortRange::All);
    }
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (first.trim().parse::<u16>(), last.trim().parse::<u16>()) {
        (Ok(first), Ok(last)) if 0 < first && first <= last => Ok(PortRange::Some(first..=last)),
        _ => Err("write a port from 1 to 65535, two with the lower first, as in 8000-8999, or all".to_owned()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

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
        assert_eq!((set.limits.monthly, set.limits.rate_up), (Some(Limit(Some(ByteCount::new(50_000_000_000)))), None));
        assert!(limited(&[]).unwrap_err().contains("--monthly"), "one of them is needed");
        assert!(limited(&["--rate", "1Mbit/s", "--rate-up", "1Mbit/s"]).is_err());
        assert!(limited(&["--flows", "0"]).unwrap_err().contains("revoke"));
        let told = limited(&["--rate", "fast"]).unwrap_err();
        assert!(told.contains("Mbit/s") && told.contains("none"), "{told}");
    }
}
