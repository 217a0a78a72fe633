//! `braid context`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{Query, span};

/// List, set and clear facts that conditions of rules (`when`) refer to.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Context {
    #[command(subcommand)]
    pub(crate) action: Option<ContextAction>,
    #[command(flatten)]
    pub(crate) query: Query,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ContextAction {
    /// Set a fact. Rules whose condition refers to it apply at once, also to running bonded flows.
    Set {
        /// Name and value, such as moving=true.
        #[arg(value_name = "NAME=VALUE", value_parser = assignment)]
        fact: (String, String),
        /// Clear it after this time, such as 10m. Time in which the machine sleeps does not count.
        #[arg(long = "for", value_name = "SPAN", value_parser = span)]
        span: Option<Duration>,
        #[command(flatten)]
        daemon: super::Daemon,
    },
    /// Clear a fact. A sensor's value, if there is one, applies again.
    Clear {
        /// Name of the fact.
        name: String,
        #[command(flatten)]
        daemon: super::Daemon,
    },
}

fn assignment(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
    parts.filter(|(name, value)| !name.is_empty() && !value.is_empty()).ok_or_else(|| "write NAME=VALUE, such as moving=true".to_owned())
}
