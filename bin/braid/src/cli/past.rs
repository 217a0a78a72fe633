//! Commands that look back.

use clap::{Args, ValueEnum};

use super::Query;

/// Show what happened, in plain words.
///
/// Links that came and went, flows that moved, changes of the configuration. The last 1,000 notes are kept, across restarts. Times are local; --utc shows UTC. JSON has milliseconds of Unix time.
#[derive(Debug, Args)]
pub(crate) struct Log {
    #[command(flatten)]
    pub(crate) query: Query,
    #[command(flatten)]
    pub(crate) times: Times,
    /// Show the last so many.
    #[arg(long, short = 'n', value_name = "NUMBER", default_value_t = 30)]
    pub(crate) lines: usize,
    /// Go on with what happens from now on, until interrupted.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) follow: bool,
}

/// Show what links or applications moved, over time.
///
/// Times are local; --utc shows UTC. JSON has milliseconds of Unix time. Moments at which no link moved anything are left out, but in JSON.
#[derive(Debug, Args)]
pub(crate) struct History {
    #[command(flatten)]
    pub(crate) query: Query,
    #[command(flatten)]
    pub(crate) times: Times,
    /// How finely, and so how far back: five minutes, an hour, a day or thirty days.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) resolution: Step,
    /// Show also the moments at which no link moved anything.
    #[arg(long, conflicts_with = "apps")]
    pub(crate) all: bool,
    /// By application instead of by link.
    #[arg(long)]
    pub(crate) apps: bool,
    /// This application only, by the name that `braid flows` shows.
    #[arg(long, value_name = "NAME", requires = "apps")]
    pub(crate) app: Option<String>,
}

/// How times are shown.
#[derive(Debug, Args)]
pub(crate) struct Times {
    /// Show times in UTC instead of local time.
    #[arg(long)]
    pub(crate) utc: bool,
}

/// The time from one sample to the next.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(crate) enum Step {
    /// The last five minutes.
    #[default]
    #[value(name = "1s")]
    Second,
    /// The last hour.
    #[value(name = "10s")]
    TenSeconds,
    /// The last day.
    #[value(name = "5m")]
    FiveMinutes,
    /// The last thirty days.
    #[value(name = "1h")]
    Hour,
}

impl Step {
    /// As the API calls it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Second => "1s",
            Self::TenSeconds => "10s",
            Self::FiveMinutes => "5m",
            Self::Hour => "1h",
        }
    }
}

/// Show what Braid gained: bytes by link, flows saved, outages bridged, energy and money.
///
/// Energy and money are estimates, against the system's own choice.
#[derive(Debug, Args)]
pub(crate) struct Gains {
    #[command(flatten)]
    pub(crate) query: Query,
    /// Over so many days, today among them; 400 are kept.
    #[arg(long, value_name = "NUMBER", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=400))]
    pub(crate) days: u32,
}
