//! `braid rules`.

use std::time::Duration;

use braid_model::Rate;
use clap::{Args, Subcommand};

use super::{Query, rate, span};

/// List, add and remove rules and reservations that apply for a limited time.
///
/// Programs add such rules over the API (POST /v1/rules). They apply to flows that no entry of the configuration matches.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Rules {
    #[command(subcommand)]
    pub(crate) action: Option<RulesAction>,
    #[command(flatten)]
    pub(crate) query: Query,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RulesAction {
    /// Add a rule for a limited time, or renew or change the one with this name.
    Add {
        /// Name of the rule: lower-case letters, digits, - and _.
        name: String,
        /// Keys of an [[app]] entry, separated by commas, such as 'match = { name = "rsync" }, links = ["wlan0"]'.
        rule: String,
        /// Remove it after this time: 1s to 1h. Time in which the machine sleeps does not count.
        #[arg(long = "for", value_name = "SPAN", value_parser = span)]
        span: Duration,
        /// Keep this rate towards this machine free for its direct flows, such as "2 Mbit/s".
        #[arg(long, value_name = "RATE", value_parser = rate)]
        reserve_down: Option<Rate>,
        /// Keep this rate away from this machine free for its direct flows.
        #[arg(long, value_name = "RATE", value_parser = rate)]
        reserve_up: Option<Rate>,
        /// Keep it free on this link. Default: one that can keep it.
        #[arg(long, value_name = "LINK")]
        reserve_on: Option<String>,
        #[command(flatten)]
        daemon: super::Daemon,
    },
    /// Remove a rule.
    Remove {
        /// Name of the rule.
        name: String,
        #[command(flatten)]
        daemon: super::Daemon,
    },
}
