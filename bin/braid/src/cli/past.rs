//! Arguments of the commands that show the past.

use clap::{Args, ValueEnum};

use super::Query;

/// Show what happened, in plain words.
///
/// The log lists links that came and went, flows that moved, and configuration changes. Braid keeps the last 1,000 notes across restarts. Times are
/// local; --utc shows UTC. JSON has milliseconds of Unix time.
#[derive(Debug, Args)]
pub(crate) struct Log {
    #[command(flatten)]
    pub(crate) query: Query,
    #[command(flatten)]
    pub(crate) times: Times,
    /// Show the last N notes.
    #[arg(long, short = 'n', value_name = "NUMBER", default_value_t = 30)]
    pub(crate) lines: usize,
    /// Keep printing new notes until interrupted.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) follow: bool,
}

/// Show the traffic of links or applications over time.
///
/// Times are local; --utc shows UTC. JSON has milliseconds of Unix time. The table omits samples in which no link transferred data; JSON does not.
#[derive(Debug, Args)]
pub(crate) struct History {
    #[command(flatten)]
    pub(crate) query: Query,
    #[command(flatten)]
    pub(crate) times: Times,
    /// Time between samples, which also sets the period: five minutes, one hour, one day or thirty days.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) resolution: Step,
    /// Show samples in which no link transferred data, too.
    #[arg(long, conflicts_with = "apps")]
    pub(crate) all: bool,
    /// Show applications instead of links.
    #[arg(long)]
    pub(crate) apps: bool,
    /// Show only this application, by its name in `braid flows`.
    #[arg(long, value_name = "NAME", requires = "apps")]
    pub(crate) app: Option<String>,
}

/// Format of times.
#[derive(Debug, Args)]
pub(crate) struct Times {
    /// Show times in UTC instead of local time.
    #[arg(long)]
    pub(crate) utc: bool,
}

/// Time between samples.
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
    /// Name of the resolution in the API.
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
/// Energy and money are estimates, compared with the system's own choice of link.
#[derive(Debug, Args)]
pub(crate) struct Gains {
    #[command(flatten)]
    pub(crate) query: Query,
    /// Number of days, including today; Braid keeps 400.
    #[arg(long, value_name = "NUMBER", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=400))]
    pub(crate) days: u32,
}
