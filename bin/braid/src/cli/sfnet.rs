//! `braid net sfnet`.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use braid_model::Rate;
use braid_model::key::PublicKey;
use clap::{Args, Subcommand, ValueEnum};

use super::rate;

/// Ask the network: for its state, and for services, on behalf of this host.
///
/// The network's controller must have [sfnet] in its configuration. What a command asks for ends with it, also if it is killed; --keep keeps it for some seconds more. While the controller
/// is away, the command connects again, and asks again.
#[derive(Debug, Args)]
pub(crate) struct SfnetCommand {
    #[command(subcommand)]
    pub(crate) action: SfnetAction,
    /// Where the controller takes programs. By default it is looked for.
    #[arg(long, global = true, value_name = "ADDRESS:PORT")]
    pub(crate) controller: Option<SocketAddr>,
    /// Network device by which the controller is looked for. Default: all.
    #[arg(long, global = true, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// Connect with TLS, and prove the key of this directory (`braid net key --state-dir DIR` prints it), which must be that of this host in the controller's configuration.
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) identity: Option<PathBuf>,
    /// Key of the controller, as it prints it; with --identity. Without it, whoever answers counts as the controller.
    #[arg(long, global = true, value_name = "KEY", requires = "identity")]
    pub(crate) controller_key: Option<PublicKey>,
    /// For how many seconds what was asked for stays after the connection has ended, such as for a controller that is started again.
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 0)]
    pub(crate) keep: u32,
    /// Print JSON, one object a line.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SfnetAction {
    /// Find the controller.
    Discover,
    /// Show what this host may see of the network.
    State {
        /// Also show the path to this host, by its IP or Ethernet address.
        #[arg(long, value_name = "HOST")]
        to: Option<String>,
    },
    /// Join a multicast group and print the datagrams that are sent to it.
    Receive {
        /// Address of the group, such as 239.192.1.2.
        group: Ipv4Addr,
        /// UDP port.
        #[arg(long, default_value_t = 5000)]
        port: u16,
        /// End after so many datagrams.
        #[arg(long, value_name = "NUMBER")]
        count: Option<u64>,
    },
    /// Send texts to a multicast group, one a datagram.
    Send {
        /// Address of the group, such as 239.192.1.2.
        group: Ipv4Addr,
        /// UDP port.
        #[arg(long, default_value_t = 5000)]
        port: u16,
        /// The texts. Without any, the lines of the standard input.
        texts: Vec<String>,
    },
    /// Reserve rates for this host at its access points.
    Reserve {
        /// Rate towards this host, such as "2 Mbit/s".
        #[arg(long, value_name = "RATE", value_parser = rate, required_unless_present = "up")]
        down: Option<Rate>,
        /// Rate away from this host.
        #[arg(long, value_name = "RATE", value_parser = rate)]
        up: Option<Rate>,
    },
    /// Lead flows between this host and another one over paths of their own, one for each port of the receiver.
    Multipath {
        /// The host that sends to this one, by its IP or Ethernet address.
        #[arg(long, value_name = "HOST", required_unless_present = "to", conflicts_with = "to")]
        from: Option<String>,
        /// The host to which this one sends.
        #[arg(long, value_name = "HOST")]
        to: Option<String>,
        /// Protocol of the flows.
        #[arg(long, value_enum, default_value_t = FlowProtocol::Udp)]
        protocol: FlowProtocol,
        /// Ports of the receiver, such as 5001,5002.
        #[arg(long, value_delimiter = ',', required = true)]
        ports: Vec<u16>,
    },
    /// Let packets of a sender not reach this host.
    Block {
        /// Ethernet address, IPv4 address, or a network of those such as 10.9.0.0/28.
        sender: String,
    },
    /// Print what happens to this host: handovers, loads of its access points, losses of links.
    Watch {
        /// What to print. Default: all.
        #[arg(value_enum)]
        about: Vec<About>,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum FlowProtocol {
    Tcp,
    Udp,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum About {
    Handover,
    Load,
    Link,
}

impl FlowProtocol {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

impl About {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Handover => "handover",
            Self::Load => "load",
            Self::Link => "link",
        }
    }
}
