//! `braid gateway`.

use std::path::PathBuf;

use braid_daemon::DEFAULT_CONFIG;
use clap::{Args, Subcommand};

use super::Daemon;

/// Prepare this machine as the gateway of other devices.
#[derive(Debug, Args)]
pub(crate) struct Gateway {
    #[command(subcommand)]
    pub(crate) action: GatewayAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GatewayAction {
    Setup(GatewaySetup),
}

/// Give the devices of a LAN addresses and names, by dnsmasq.
///
/// Without --apply, it only shows what it would do: the files with their text, the addresses of the LAN devices, and the section of the configuration.
/// --undo reverts what --apply did. It leaves files alone that were edited since, and lists them.
///
/// dnsmasq assigns IPv4 addresses by DHCP and advertises an IPv6 prefix that is unique to this machine (RFC 4193). It answers names of the LAN,
/// as in phone.lan, and asks the servers in /etc/resolv.conf for all others.
///
/// Exit status: 0 if all was shown or done, 1 if not.
#[derive(Debug, Args)]
pub(crate) struct GatewaySetup {
    /// Device behind which the clients are; repeatable. Default: those of [gateway] in the configuration.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) lan: Vec<String>,
    /// IPv4 address of the LAN device with the length of its prefix, as in 192.168.7.1/24; repeatable, in the order of the devices. Default: the
    /// address that the device has, otherwise a free one.
    #[arg(long, value_name = "CIDR")]
    pub(crate) address: Vec<String>,
    /// Do it.
    #[arg(long, conflicts_with = "undo")]
    pub(crate) apply: bool,
    /// Revert what --apply did.
    #[arg(long, conflicts_with_all = ["lan", "address"])]
    pub(crate) undo: bool,
    /// Configuration file of the daemon.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub(crate) config: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) daemon: Daemon,
    /// Read and write the files of the system below this directory, and restart no service (for tests).
    #[arg(long, value_name = "DIR", default_value = "/", hide = true)]
    pub(crate) root: PathBuf,
}
