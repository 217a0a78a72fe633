//! `braid net`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_daemon::controller::MANAGERS;
use clap::{Args, Subcommand};

use super::{Identity, NetJoin};

/// The network's side: one OpenFlow controller over Wi-Fi, cellular and wire, for devices that use many networks at once.
#[derive(Debug, Args)]
pub(crate) struct Net {
    #[command(subcommand)]
    pub(crate) action: NetAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum NetAction {
    /// Run the controller in the foreground, for switches of OpenFlow 1.0 and 1.3 such as Open vSwitch.
    ///
    /// It finds switches, links and hosts, and routes; flows go on while it is away. It needs no privileges. Without TLS, which a configuration file turns on,
    /// connections are neither authenticated nor encrypted: listen on addresses that only switches reach.
    Controller(Controller),
    /// Join a network with a controller as a client: one Ethernet device over several radios, which the controller directs.
    ///
    /// The device has the address of the radios, and goes with this process. While there is no controller, it uses a radio that has a link. Needs root.
    Join(Box<NetJoin>),
    /// Print this client's public key, by which the controller's configuration names it.
    Key(Identity),
    /// Show the switches, links, access points and hosts of the controller.
    Status(NetQuery),
    /// Choose the mobility manager of a host: how its packets move when it does.
    Manager {
        /// Ethernet address of the host, as `status` shows it.
        host: String,
        /// `hard`: its packets go where it was seen last. `hoolock`: the host keeps its old link for a while. `n-cast`: packets go to both places for a while,
        /// if the host removes duplicates. `predict` and `balance` add to `hoolock`: the one sends hosts to the access point where such hosts went before, the
        /// other one from busy access points to others.
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(MANAGERS))]
        manager: String,
        #[command(flatten)]
        at: ControllerSocket,
    },
    /// Ask a host that runs Braid to go to an access point.
    Move {
        /// Ethernet address of the host, as `status` shows it.
        host: String,
        /// Address of the access point, as `status` shows it.
        access: String,
        #[command(flatten)]
        at: ControllerSocket,
    },
}

/// Options of the controller.
#[derive(Debug, Args)]
pub(crate) struct Controller {
    /// Configuration file; `controller.example.toml` explains it. Other options count more. It is read again after SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Address and port where switches connect; may be repeated. Default: 127.0.0.1:6653.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Vec<SocketAddr>,
    /// Mobility manager of hosts for which none is chosen. Default: hard.
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(MANAGERS))]
    pub(crate) manager: Option<String>,
    /// For how long `hoolock` holds the old link, and `n-cast` sends to both places. Default: 2s.
    #[arg(long, value_name = "SPAN", value_parser = super::span)]
    pub(crate) hold: Option<Duration>,
    #[command(flatten)]
    pub(crate) identity: Identity,
    #[command(flatten)]
    pub(crate) at: ControllerSocket,
}

/// How to reach the controller.
#[derive(Debug, Clone, Args)]
pub(crate) struct ControllerSocket {
    /// Socket of the controller.
    #[arg(long, value_name = "PATH", env = "BRAID_NET_SOCKET", default_value = "/run/braid/net.sock")]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct NetQuery {
    #[command(flatten)]
    pub(crate) at: ControllerSocket,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
