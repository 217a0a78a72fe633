//! Arguments of the commands that run, manage and join relays.

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

/// Default state directory of a relay.
pub(crate) const DEFAULT_RELAY_DIR: &str = "/var/lib/braid-relay";

/// Run a relay, and manage who may use it and how much.
///
/// A relay carries its clients' flows over all of their links at once. Only invited clients may use it: "braid relay invite" prints an invitation,
/// and "braid join" takes it on the client. The relay needs no privilege, only access to its state directory, unless it forwards packets (--packets).
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Relay {
    #[command(subcommand)]
    pub(crate) action: Option<RelayAction>,
    #[command(flatten)]
    pub(crate) server: RelayServer,
}

/// Options of the relay server.
#[derive(Debug, Args)]
pub(crate) struct RelayServer {
    /// UDP address to listen on; 5757 is the default port.
    #[arg(long, value_name = "ADDR:PORT", default_value = "[::]:5757")]
    pub(crate) listen: SocketAddr,
    /// Serve anyone without keys, but only connections to services of this host.
    #[arg(long, conflicts_with_all = ["allow"])]
    pub(crate) local: bool,
    /// Let clients reach this private network, too; repeatable.
    #[arg(long, value_name = "NET")]
    pub(crate) allow: Vec<IpNet>,
    /// An address of the relay that its interfaces do not have, for example behind a NAT; repeatable. With --local, all ports of this address must
    /// lead to this host.
    #[arg(long, value_name = "ADDR")]
    pub(crate) own: Vec<IpAddr>,
    /// With --local, the ports that anyone may reach, as 443 or 8000-8999, or "all"; repeatable [default: 80 and 443]. Connections of strangers come
    /// from this host itself, so its firewall does not block them on these ports.
    #[arg(long, value_name = "PORT[-PORT]|all", requires = "local", value_parser = ports)]
    pub(crate) port: Vec<PortRange>,
    /// With --local, limit in each direction for one source (an IPv4 address or an IPv6 /64), in bits per second, as in 10Mbit/s.
    #[arg(long, value_name = "RATE", requires = "local", value_parser = super::rate)]
    pub(crate) rate: Option<Rate>,
    /// With --local, let clients that run Braid move their running connections to this host from one of their links to another. Asks the Braid daemon of this
    /// host, which must run, and allow this user to change things. With CAP_NET_ADMIN, connections of dead links also go on in UDP where a firewall or NAT drops
    /// them.
    #[arg(long, requires = "local")]
    pub(crate) moves: bool,
    /// With --moves, also let clients move their connections to this waypoint: an address of a host that runs "braid relay --waypoint" and that you trust;
    /// repeatable.
    #[arg(long, value_name = "ADDR", requires = "moves")]
    pub(crate) through: Vec<IpAddr>,
    /// Let running connections of clients to other hosts pass this host: a waypoint. Asks the Braid daemon of this host, which must run, and allow this user to
    /// change things. Clients with a limit of rate or bytes get none.
    #[arg(long, conflicts_with = "local")]
    pub(crate) waypoint: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Maximum number of flows of all clients together.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    pub(crate) max_flows: usize,
    /// Maximum number of concurrent TCP connections and UDP flows of one client; "braid relay limit" overrides it. Flows above the limit go direct.
    #[arg(long, value_name = "COUNT", default_value_t = CLIENT_FLOWS)]
    pub(crate) client_flows: u32,
    /// Memory limit of all bonds together: bytes in transit, plus the socket buffers of the system. Above it, the relay ends the largest bond.
    #[arg(long, value_name = "BYTES", default_value_t = MemoryLimits::default().total)]
    pub(crate) max_memory: ByteCount,
    /// Memory limit of the bonds of one client. Above it, the relay ends the client's largest bond.
    #[arg(long, value_name = "BYTES", default_value_t = MemoryLimits::default().client)]
    pub(crate) client_memory: ByteCount,
    /// Also forward IP packets of protocols other than TCP and UDP, such as ping and IPsec, from clients that are gateways. Needs CAP_NET_ADMIN and nftables:
    /// the relay turns on forwarding, and translates the packets to its own addresses.
    #[arg(long, conflicts_with = "local")]
    pub(crate) packets: bool,
    /// Network from which clients get addresses for their packets; one for IPv4, one for IPv6 [default: 198.19.240.0/20 and fd62:7261:6964:7000::/64].
    #[arg(long, value_name = "NET", requires = "packets")]
    pub(crate) packets_net: Vec<IpNet>,
    #[command(flatten)]
    pub(crate) state: RelayState,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RelayAction {
    Invite(RelayInvite),
    Clients(RelayClients),
    /// Revoke a client's access at once, until it is invited again.
    Revoke(RelayRevoke),
    Limit(RelayLimit),
}

/// Options to locate the relay's state.
#[derive(Debug, Args)]
pub(crate) struct RelayState {
    /// Directory of the relay's key and its clients.
    #[arg(long, value_name = "DIR", env = "BRAID_RELAY_STATE_DIR", default_value = DEFAULT_RELAY_DIR)]
    pub(crate) state_dir: PathBuf,
}

/// Print an invitation that lets one device join.
///
/// The invitation holds the relay's addresses and key, and a secret that works once: give it only to the person who joins. On a terminal it is also
/// shown as a QR code.
#[derive(Debug, Args)]
pub(crate) struct RelayInvite {
    /// Public address of the relay, as clients reach it; up to eight, the best first.
    #[arg(long = "address", value_name = "HOST:PORT", required = true)]
    pub(crate) addresses: Vec<Address>,
    /// Name of the client on this relay. Default: the client chooses.
    #[arg(long)]
    pub(crate) name: Option<ClientName>,
    /// How long the invitation is valid: a number followed by s, min, h or d.
    #[arg(long, value_name = "SPAN", default_value = "24h", value_parser = span)]
    pub(crate) expires: Duration,
    /// Initial limits of the client.
    #[command(flatten)]
    pub(crate) limits: RelayLimits,
    #[command(flatten)]
    pub(crate) state: RelayState,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// List the clients, their limits and their usage this month.
///
/// SEEN: when the client was last connected; the relay records it once a minute. DOWN and UP: bytes to and from the client this month. MAX MONTH,
/// MAX DOWN, MAX UP and MAX FLOWS: limits, which "braid relay limit" sets.
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
    /// Name or key of the client, or at least the first eight characters of its key.
    #[arg(value_name = "NAME|KEY")]
    pub(crate) client: String,
    #[command(flatten)]
    pub(crate) state: RelayState,
}

/// Set the limits of a client.
///
/// Limits that are not given stay unchanged; "none" lifts one.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("limits").required(true).multiple(true).args(["rate", "rate_down", "rate_up", "flows", "monthly"])))]
pub(crate) struct RelayLimit {
    /// Name or key of the client, or at least the first eight characters of its key.
    #[arg(value_name = "NAME|KEY")]
    pub(crate) client: String,
    #[command(flatten)]
    pub(crate) limits: RelayLimits,
    #[command(flatten)]
    pub(crate) state: RelayState,
}

/// Limits of a client; "none" means no limit.
#[derive(Debug, Args)]
#[group(skip)]
pub(crate) struct RelayLimits {
    /// Rate in each direction in bits per second, as in 10Mbit/s.
    #[arg(long, conflicts_with_all = ["rate_down", "rate_up"], value_parser = limit::<Rate>)]
    pub(crate) rate: Option<Limit<Rate>>,
    /// Rate to the client in bits per second.
    #[arg(long, value_name = "RATE", value_parser = limit::<Rate>)]
    pub(crate) rate_down: Option<Limit<Rate>>,
    /// Rate from the client in bits per second.
    #[arg(long, value_name = "RATE", value_parser = limit::<Rate>)]
    pub(crate) rate_up: Option<Limit<Rate>>,
    /// Concurrent TCP connections and UDP flows; "none" for the relay's default (--client-flows).
    #[arg(long, alias = "max-flows", value_name = "COUNT", value_parser = limit::<u32>)]
    pub(crate) flows: Option<Limit<u32>>,
    /// Bytes in a calendar month (UTC), both directions together, as in 50GB.
    #[arg(long, value_name = "BYTES", value_parser = limit::<ByteCount>)]
    pub(crate) monthly: Option<Limit<ByteCount>>,
}

/// New value of a limit; `None` lifts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit<T>(pub(crate) Option<T>);

/// Join a relay with an invitation from its operator.
///
/// Asks for the invitation on a terminal and does not show it. Waits at most three seconds for the relay's answer. If the relay does not answer in
/// time, it is joined anyway, and Braid keeps dialling it.
#[derive(Debug, Args)]
pub(crate) struct Join {
    /// Invitation that "braid relay invite" printed. If omitted or "-", Braid asks for it on the terminal, or reads it from standard input. It
    /// contains a secret, and other users of this machine can see arguments.
    pub(crate) line: Option<String>,
    /// Name for the relay on this machine. Default: its host name.
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Join for this user's "braid run" only, without a daemon.
    #[arg(long)]
    pub(crate) user: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

#[derive(Debug, Args)]
pub(crate) struct Leave {
    /// Name of the relay, or address of the server, as "braid peers" lists it.
    pub(crate) name: String,
    /// Leave a relay that was joined with "braid join --user".
    #[arg(long)]
    pub(crate) user: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

#[derive(Debug, Args)]
pub(crate) struct Move {
    /// Id of a flow, or path or name of an application, as "braid flows" lists them.
    #[arg(value_name = "FLOW|APP")]
    pub(crate) what: String,
    /// Link to move to. Default: all links again for a bonded flow, and the one that it began on for a direct one.
    #[arg(long, value_name = "LINK")]
    pub(crate) to: Option<String>,
    /// Let direct connections pass the host of this relay, which must run "braid relay --waypoint". Their server must name that host.
    #[arg(long, value_name = "RELAY")]
    pub(crate) through: Option<String>,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
}

/// A range of ports, or all ports.
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
        _ => Err("write a port from 1 to 65535, a range as in 8000-8999 with the lower port first, or all".to_owned()),
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
            Err("a limit of zero is not allowed; use \"braid relay revoke\" to revoke access, or \"none\" to lift the limit".to_owned())
        }
        Ok(value) => Ok(Limit(Some(value))),
        Err(error) => Err(format!("{error}, or write \"none\" for no limit")),
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
        assert!(limited(&[]).unwrap_err().contains("--monthly"), "at least one limit is required");
        assert!(limited(&["--rate", "1Mbit/s", "--rate-up", "1Mbit/s"]).is_err());
        assert!(limited(&["--flows", "0"]).unwrap_err().contains("revoke"));
        let message = limited(&["--rate", "fast"]).unwrap_err();
        assert!(message.contains("Mbit/s") && message.contains("none"), "{message}");
    }
}
