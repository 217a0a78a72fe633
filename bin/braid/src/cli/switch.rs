//! `braid switch`.

use clap::{Args, Subcommand};

use super::Query;

/// Show the table of the flows that this machine forwards for clients.
#[derive(Debug, Args)]
pub(crate) struct Switch {
    #[command(subcommand)]
    pub(crate) action: SwitchAction,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SwitchAction {
    /// Show the flows that this machine forwards for clients. `braid flows` shows them too, among its own.
    Flows(Query),
}
