//! Starts the parts of Braid that live in other crates, and configures logging.

use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use braid_daemon::{self as daemon, background};
use braid_platform::linux::bpf::load::LoadError;
use braid_platform::linux::doctor;
use braid_run::RunOptions;
use tracing_subscriber::EnvFilter;

use crate::cli::{self, Steering};

/// `braid daemon`.
pub(crate) fn foreground(options: cli::Foreground, verbose: u8) -> anyhow::Result<()> {
    if options.detached {
        background::detach().context("cannot leave the session that the daemon was started in")?;
    }
    daemon(options.start, options.sys, verbose)
}

/// Runs the daemon in this process. `sys` replaces `/sys`.
pub(crate) fn daemon(start: cli::Start, sys: Option<PathBuf>, verbose: u8) -> anyhow::Result<()> {
    log("info", verbose);
    let ui = start.page.wanted();
    let options = daemon::Options { config: start.config, state_dir: Some(start.state_dir), socket: Some(start.daemon.socket), ui, sys };
    daemon::run(&options).map_err(|error| match error.downcast_ref::<LoadError>() {
        Some(refused) => anyhow::anyhow!("{}", refusal(refused, verbose, doctor::is_locked_down())),
        None => error,
    })
}

/// Explains why the kernel rejected the BPF programs, and the remedy. With `verbose`, the verifier's full log comes first.
fn refusal(error: &LoadError, verbose: u8, locked_down: bool) -> String {
    let mut text = String::new();
    if let LoadError::Program { refusal, .. } = error
        && verbose > 0
    {
        let _ = writeln!(text, "the verifier's log:\n{}", refusal.log.trim_end());
    }
    let _ = write!(text, "{error}");
    if locked_down {
        text += "\nThe kernel is in lockdown mode \"confidentiality\", which keeps BPF programs from reading its memory: \
                 boot without lockdown=confidentiality.";
    }
    let more = if verbose == 0 && matches!(error, LoadError::Program { .. }) {
        "`braid -v up --foreground` shows the verifier's full log. "
    } else {
        ""
    };
    text + "\n" + more + "`sudo braid doctor --for up` verifies every program on this kernel; `braid run -- COMMAND` needs no BPF."
}

/// `braid run`: exits with the command's exit status.
pub(crate) fn run(run: cli::Run) -> anyhow::Result<ExitCode> {
    let Steering { scheduler, links, carry, relay } = run.steering;
    let scheduler = scheduler.unwrap_or_default();
    let options = RunOptions { scheduler, links, carry, relay, relay_wait: run.relay_wait, command: run.command };
    let status = match braid_run::main(options) {
        Ok(status) => status,
        // Exit statuses as in a shell: 127 and 126 if the command cannot be started, 125 for Braid's own errors.
        Err(error) => {
            eprintln!("braid: {}", crate::printable_lines(&error.to_string()));
            error.exit_code()
        }
    };
    Ok(ExitCode::from(u8::try_from(status).unwrap_or(1)))
}

/// The hidden watchdog that the daemon starts, or a relay that forwards packets.
pub(crate) fn watchdog(relay: bool, verbose: u8) -> anyhow::Result<()> {
    log("info", verbose);
    if relay { braid_daemon::watchdog::watch_relay() } else { braid_daemon::watchdog::watch() }
}

/// Logs to standard error at the level of RUST_LOG, otherwise at `usual`, or more with --verbose.
pub(crate) fn log(usual: &str, verbose: u8) {
    let level = match verbose {
        0 => usual,
        1 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let time = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    // journald adds the time itself.
    if std::env::var_os("JOURNAL_STREAM").is_some() { time.without_time().init() } else { time.init() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_platform::linux::bpf::load::Refusal;

    #[test]
    fn a_refusal_shows_the_end_of_the_log_or_with_verbose_all_of_it() {
        let log = (0..237).map(|line| format!("{line}: (b7) r1 = 0\n")).collect();
        let refused = Refusal { reason: "Permission denied (os error 13)".into(), log };
        let error = LoadError::Program { program: "braid_connect4".into(), refusal: refused };
        let short = refusal(&error, 0, false);
        assert!(short.contains("braid_connect4") && short.contains("236: ") && !short.contains("200: "), "{short}");
        assert!(short.lines().count() < 14 && short.contains("doctor --for up") && !short.contains("lockdown"), "{short}");
        assert!(refusal(&error, 1, false).contains("\n0: (b7)"));
        assert!(refusal(&error, 0, true).contains("lockdown=confidentiality"));
    }
}
