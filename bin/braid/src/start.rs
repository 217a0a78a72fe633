//! Starts what lives in the engine.

use std::io;
use std::process::ExitCode;

use tracing_subscriber::EnvFilter;

use crate::cli;

/// `braid up`.
pub(crate) fn up(up: cli::Up, verbose: u8) -> anyhow::Result<()> {
    log("info", verbose);
    let config = up.config.or_else(|| Some(cli::DEFAULT_CONFIG.into()).filter(|path: &std::path::PathBuf| path.exists()));
    let _options = (config, up.state_dir, up.daemon.socket);
    anyhow::bail!("this build has no daemon yet: use `braid run -- COMMAND`")
}

/// `braid run`: exits with the command's own status.
pub(crate) fn run(run: cli::Run) -> anyhow::Result<ExitCode> {
    let _options = (run.scheduler, run.links, run.command, run.daemon.socket);
    anyhow::bail!("this build cannot run commands yet")
}

/// The hidden guardian, started by the daemon.
pub(crate) fn guardian(verbose: u8) -> anyhow::Result<()> {
    log("info", verbose);
    anyhow::bail!("this build has no guardian yet")
}

/// Removes what a dead daemon may have left; tells what was done.
pub(crate) fn sweep() -> anyhow::Result<String> {
    anyhow::bail!("this build has no daemon yet, so there is nothing to sweep")
}

/// Logs to standard error: what RUST_LOG says, else `usual`, more with --verbose.
fn log(usual: &str, verbose: u8) {
    let level = match verbose {
        0 => usual,
        1 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let time = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    // journald writes the time itself.
    if std::env::var_os("JOURNAL_STREAM").is_some() { time.without_time().init() } else { time.init() }
}
