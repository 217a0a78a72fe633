//! Starts what lives in the engine.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use braid_engine::daemon;
use braid_engine::run::RunOptions;
use braid_engine::server::UiOptions;
use tracing_subscriber::EnvFilter;

use crate::cli::{self, Steering};

/// `braid up`.
pub(crate) fn up(up: cli::Up, verbose: u8) -> anyhow::Result<()> {
    log("info", verbose);
    let certificate = up.ui_cert.zip(up.ui_key);
    let ui = up.ui.map(|listen| UiOptions { listen, names: up.ui_name, certificate });
    let options = daemon::Options { config: up.config, state_dir: Some(up.state_dir), socket: Some(up.daemon.socket), ui };
    daemon::run(&options)
}

/// `braid run`: exits with the command's own status.
pub(crate) fn run(run: cli::Run) -> anyhow::Result<ExitCode> {
    let Steering { scheduler, links, carry, relay } = run.steering;
    let options = RunOptions { scheduler: scheduler.unwrap_or_default(), links, carry, relay, command: run.command };
    let status = match braid_engine::run::main(options) {
        Ok(status) => status,
        // As a shell would: 127 and 126 for a command that cannot be started, 125 for Braid's own troubles.
        Err(error) => {
            eprintln!("braid: {}", crate::printable_lines(&error.to_string()));
            error.exit_code()
        }
    };
    Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
}

/// The hidden guardian, started by the daemon.
pub(crate) fn guardian(verbose: u8) -> anyhow::Result<()> {
    log("info", verbose);
    braid_engine::guardian::watch()
}

/// Removes what a dead daemon may have left; tells what was done, if there was anything to do.
pub(crate) fn sweep() -> anyhow::Result<Option<String>> {
    daemon::sweep()
}

/// Logs to standard error: what RUST_LOG says, else `usual`, more with --verbose.
pub(crate) fn log(usual: &str, verbose: u8) {
    let level = match verbose {
        0 => usual,
        1 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let time = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    // journald writes the time itself.
    if std::env::var_os("JOURNAL_STREAM").is_some() { time.without_time().init() } else { time.init() }
}
