//! The `braid` program in the client namespace: the daemon if permitted, else `braid run` around every program.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::lab::Lab;
use crate::sys;

/// Timeout until the daemon reports all links up.
const START_LIMIT: Duration = Duration::from_secs(60);

/// A running daemon. Dropping it sends SIGTERM, and SIGKILL if the daemon does not end within three seconds.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    braid: PathBuf,
    socket: PathBuf,
}

impl Daemon {
    /// Starts `braid daemon` with this scheduler and all links of the lab, and waits until it reports all of them up. Its estimates stay in
    /// the lab's directory for the next daemon. `more` is added to the configuration; its `[[link]]` entries replace those of the lab.
    pub fn start(lab: &Lab, braid: &Path, scheduler: &str, more: &str) -> Result<Self> {
        let home = lab.directory().join("braid");
        fs::create_dir_all(home.join("state"))?;
        let (config, socket, log) = (home.join("braid.toml"), home.join("socket"), home.join("log"));
        fs::write(&config, configuration(lab, scheduler, more)?)?;
        let mut command = lab.client().command(braid)?;
        command.arg("daemon").arg("--config").arg(&config).arg("--state-dir").arg(home.join("state")).arg("--socket").arg(&socket);
        let child = command.stdin(Stdio::null()).stdout(File::create(&log)?).stderr(File::options().append(true).open(&log)?).spawn();
        let child = child.with_context(|| format!("cannot run {}: build it first (cargo build -p braid)", braid.display()))?;
        let mut daemon = Self { child, braid: braid.to_owned(), socket };
        let begin = Instant::now();
        loop {
            let up = daemon.status(lab).map(|status| links_up(&status));
            if up.as_ref().is_ok_and(|up| *up == lab.links().len()) {
                return Ok(daemon);
            }
            let report = || fs::read_to_string(&log).unwrap_or_default();
            if let Some(status) = daemon.child.try_wait()? {
                bail!("braid daemon ended at once ({status}):\n{}", report().trim());
            }
            if begin.elapsed() > START_LIMIT {
                bail!("braid daemon: {up:?} of {} links are up after {START_LIMIT:?}:\n{}", lab.links().len(), report().trim());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Output of `braid status --json`.
    pub fn status(&self, lab: &Lab) -> Result<serde_json::Value> {
        let mut command = lab.client().command(&self.braid)?;
        let output = command.args(["status", "--json"]).env("BRAID_SOCKET", &self.socket).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            bail!("braid status: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        serde_json::from_slice(&output.stdout).context("braid status --json printed no JSON")
    }

    /// PID of the daemon.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Path of the daemon's socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = sys::terminate(self.child.id());
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(3) {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A command that runs `program` in the client under `braid run`.
pub fn run_under(lab: &Lab, braid: &Path, scheduler: &str, program: &str) -> Result<Command> {
    let mut command = lab.client().command(braid)?;
    command.args(["run", "--scheduler", scheduler]);
    for link in lab.links() {
        command.args(["--link", link.name()]);
    }
    command.arg("--").arg(program);
    Ok(command)
}

fn configuration(lab: &Lab, scheduler: &str, more: &str) -> Result<String> {
    let mut text = format!("version = 1\nscheduler = \"{scheduler}\"\n{more}\n");
    // The benchmark may have entries of its own for some links.
    for link in lab.links().iter().filter(|link| !more.contains(&format!("name = \"{}\"", link.name()))) {
        writeln!(text, "[[link]]\nname = \"{}\"", link.name())?;
    }
    Ok(text)
}

fn links_up(status: &serde_json::Value) -> usize {
    let links = status["links"].as_array();
    links.map_or(0, |links| links.iter().filter(|link| link["state"] == "up").count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_that_are_up_count() {
        let status = serde_json::json!({ "links": [{ "state": "up" }, { "state": "dead" }, { "state": "up" }, {}] });
        assert_eq!(links_up(&status), 2);
        assert_eq!(links_up(&serde_json::json!({})), 0);
    }
}
