//! `braid net`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use braid_daemon::controller::MANAGERS;
use clap::{Args, Subcommand};

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
    /// It finds switches, links and hosts, and routes; flows go on while it is away. It needs no privileges. Connections are neither authenticated nor
    /// encrypted: listen on addresses that only switches reach.
    Controller(Controller),
    /// Show the switches, links and hosts of the controller.
    Status(NetQuery),
    /// Choose the mobility manager of a host: how its packets move when it does.
    Manager {
        /// Ethernet address of the host, as `status` shows it.
        host: String,
        /// `hard`: its packets go where it was seen last. `hoolock`: packets to its former place are still sent for a while. `n-cast`: they go to both places
        /// for a while, if the host removes duplicates.
        #[arg(value_parser = clap::builder::PossibleValuesParser::new(MANAGERS))]
        manager: String,
        #[command(flatten)]
        at: ControllerSocket,
    },
}

/// Options of the controller.
#[derive(Debug, Args)]
pub(crate) struct Controller {
    /// Address and port where switches connect; may be repeated.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:6653")]
    pub(crate) listen: Vec<SocketAddr>,
    /// Mobility manager of hosts for which none is chosen.
    #[arg(long, default_value = MANAGERS[0], value_parser = clap::builder::PossibleValuesParser::new(MANAGERS))]
    pub(crate) manager: String,
    /// For how long `hoolock` holds the old link, and `n-cast` sends to both places.
    #[arg(long, value_name = "SPAN", default_value = "2s", value_parser = super::span)]
    pub(crate) hold: Duration,
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
