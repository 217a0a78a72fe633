//! `braid bond`.

use clap::{Args, Subcommand};

use super::Daemon;

/// Bond everything, or only what rules say.
///
/// Changes `carry` and `relay` in the daemon's configuration file; `braid policy` shows the result. Local networks, VPNs and what rules carry otherwise
/// are excepted. Applies to new flows, of this machine and of the gateway's clients.
#[derive(Debug, Args)]
pub(crate) struct Bond {
    #[command(subcommand)]
    pub(crate) action: BondAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BondAction {
    /// Send all flows over all links, through a relay, while one is reachable.
    On {
        /// The relay. Without it, the only joined one.
        #[arg(long, value_name = "NAME")]
        relay: Option<String>,
        #[command(flatten)]
        daemon: Daemon,
    },
    /// Give each flow one link, except those that rules bond.
    Off(Daemon),
}
