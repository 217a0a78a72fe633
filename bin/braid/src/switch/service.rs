//! The daemon as the package's systemd service.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use braid_daemon::background::last_words;
use braid_http::DEFAULT_SOCKET;
use braid_platform::linux::sys::process::own_user;
use indicatif::ProgressBar;

use crate::client;

const UNIT: &str = "braid.service";
/// Search path of service units (systemd.unit(5)).
const UNITS: [&str; 3] = ["/etc/systemd/system", "/lib/systemd/system", "/usr/lib/systemd/system"];
/// Time limit for systemctl. systemd's own limits are shorter, unless the unit was changed.
const LIMIT: Duration = Duration::from_secs(120);

/// Whether systemd runs, has Braid's unit, and would start it in this network namespace.
pub(super) fn is_here() -> bool {
    let namespace = |process: &str| std::fs::metadata(format!("/proc/{process}/ns/net")).map(|found| (found.dev(), found.ino()));
    // Same test as sd_booted(3).
    Path::new("/run/systemd/system").is_dir()
        && UNITS.iter().any(|folder| Path::new(folder).join(UNIT).exists())
        && namespace("1").is_ok_and(|systemd| namespace("self").is_ok_and(|own| own == systemd))
}

/// Whether a service manager started this process as the daemon: units written for earlier versions run `braid up` (systemd.exec(5), sd_notify(3)).
pub(super) fn started_this() -> bool {
    let own = std::process::id().to_string();
    std::env::var_os("NOTIFY_SOCKET").is_some() || std::env::var_os("SYSTEMD_EXEC_PID").is_some_and(|started| started == *own)
}

/// Starts the service. On an error, returns the daemon's messages and leaves the service stopped.
pub(super) fn start(progress: &ProgressBar) -> anyhow::Result<()> {
    let begin = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    // systemd limits starts in ten seconds. An explicit start by the user must not fail for that reason.
    let _ = systemctl(&["reset-failed", UNIT], progress);
    let Err(error) = systemctl(&["start", UNIT], progress) else { return Ok(()) };
    // Otherwise systemd would keep restarting it.
    let _ = systemctl(&["stop", UNIT], progress);
    match words_since(begin) {
        words if words.is_empty() => Err(error),
        words => bail!("the daemon did not start: {words}\n`systemctl status braid` and `journalctl -u braid` show more"),
    }
}

/// Stops the service.
pub(super) fn stop(progress: &ProgressBar) -> anyhow::Result<()> {
    systemctl(&["stop", UNIT], &progress.clone().with_message("Braid is stopping"))
}

/// Whether systemd has started the process that listens on `socket`, or is starting it, and this user may stop it.
pub(super) fn runs(socket: &Path) -> bool {
    if own_user() != 0 || !is_here() {
        return false;
    }
    let Some(shown) = output(Command::new("systemctl").args(["show", UNIT, "--property=ActiveState", "--property=MainPID"])) else {
        return false;
    };
    let field = |name: &str| shown.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    // False while the unit stops: its own `braid down` must not wait for its own end.
    if !matches!(field("ActiveState="), "active" | "activating" | "reloading") {
        return false;
    }
    match client::listener(socket) {
        Ok(server) => server.pid().is_some_and(|process| field("MainPID=") == process.to_string()),
        Err(error) => error.is_not_running() && socket == Path::new(DEFAULT_SOCKET),
    }
}

/// Runs `systemctl` to its end. An error contains its output.
fn systemctl(words: &[&str], progress: &ProgressBar) -> anyhow::Result<()> {
    let mut command = Command::new("systemctl");
    command.arg("--no-ask-password").args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot run systemctl")?;
    let begin = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begin.elapsed() > LIMIT {
            child.kill()?;
        }
        progress.tick();
        std::thread::sleep(super::PAUSE);
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        let _ = stderr.read_to_string(&mut said);
    }
    bail!("`systemctl {}` failed ({status}): {}", words.join(" "), said.trim())
}

/// Last messages of the daemon in systemd's journal since `begin` (seconds of Unix time).
fn words_since(begin: u64) -> String {
    // The last messages may not be in the journal yet.
    let _ = output(Command::new("journalctl").arg("--sync"));
    let mut command = Command::new("journalctl");
    command.args(["--unit", UNIT, "--identifier", "braid", "--lines", "200", "--output", "cat", "--no-pager", "--quiet"]);
    last_words(&output(command.arg(format!("--since=@{begin}"))).unwrap_or_default())
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
