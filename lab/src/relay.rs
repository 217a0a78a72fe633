//! `braid relay` in the server namespace, and daemons that join it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::daemon::Daemon;
use crate::lab::Lab;

/// Timeout of a start, and of joining over all links.
const LIMIT: Duration = Duration::from_secs(60);
/// The relay's address on the lab's Internet: 203.0.113.20.
const ADDRESS: u8 = 20;
/// Port of the relay.
const PORT: u16 = 5757;

/// A running relay, whose clients may reach the lab's Internet. It ends when this value is dropped.
#[derive(Debug)]
pub struct Relay {
    child: Child,
    braid: PathBuf,
    state: PathBuf,
}

impl Relay {
    /// Starts `braid relay` and waits until it reports that it is up.
    pub fn start(lab: &Lab, braid: &Path) -> Result<Self> {
        let home = lab.directory().join("relay");
        let (state, log) = (home.join("state"), home.join("log"));
        fs::create_dir_all(&home)?;
        let mut command = lab.server().command(braid)?;
        command
            .args(["relay", "--listen", &format!("[::]:{PORT}"), "--allow", "203.0.113.0/24", "--allow", "2001:db8:113::/48"])
            .arg("--state-dir")
            .arg(&state);
        let child = command.stdin(Stdio::null()).stdout(File::create(&log)?).stderr(File::options().append(true).open(&log)?).spawn();
        let child = child.with_context(|| format!("cannot run {}: build it first (cargo build -p braid)", braid.display()))?;
        let mut relay = Self { child, braid: braid.to_owned(), state };
        let begin = Instant::now();
        loop {
            let said = fs::read_to_string(&log).unwrap_or_default();
            if said.contains("the relay is up") {
                return Ok(relay);
            }
            if let Some(status) = relay.child.try_wait()? {
                bail!("braid relay ended at once ({status}):\n{}", said.trim());
            }
            ensure!(begin.elapsed() < LIMIT, "braid relay is not up after {LIMIT:?}:\n{}", said.trim());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Creates an invitation for one client.
    pub fn invite(&self, lab: &Lab) -> Result<String> {
        let mut command = lab.server().command(&self.braid)?;
        command.args(["relay", "invite", "--address", &format!("{}:{PORT}", Lab::internet(ADDRESS))]).arg("--state-dir").arg(&self.state);
        let output = command.output()?;
        ensure!(output.status.success(), "braid relay invite: {}", String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8(output.stdout).context("the invitation is not UTF-8")?.trim().to_owned())
    }

    /// Makes the daemon join under the name "home", and waits until its paths over all links of the lab are good.
    pub fn admit(&self, lab: &Lab, daemon: &Daemon) -> Result<()> {
        let line = self.invite(lab)?;
        let mut command = lab.client().command(&self.braid)?;
        let output = command.args(["join", &line, "--name", "home"]).env("BRAID_SOCKET", daemon.socket()).output()?;
        ensure!(output.status.success(), "braid join: {}", String::from_utf8_lossy(&output.stderr).trim());
        await_paths(lab, daemon)
    }

    /// PID of the relay.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until the daemon reports a good path over each link of the lab.
pub fn await_paths(lab: &Lab, daemon: &Daemon) -> Result<()> {
    let begin = Instant::now();
    loop {
        let status = daemon.status(lab)?;
        let good = good_paths(&status);
        if good == lab.links().len() {
            return Ok(());
        }
        ensure!(
            begin.elapsed() < LIMIT,
            "{good} of {} paths to the relay are good after {LIMIT:?}: {}",
            lab.links().len(),
            status["peers"]
        );
        thread::sleep(Duration::from_millis(20));
    }
}

fn good_paths(status: &serde_json::Value) -> usize {
    let paths = status["peers"][0]["paths"].as_array();
    paths.map_or(0, |paths| paths.iter().filter(|path| path["state"] == "good").count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_good_paths_count() {
        let status = serde_json::json!({ "peers": [{ "paths": [{ "state": "good" }, { "state": "probing" }, { "state": "good" }, {}] }] });
        assert_eq!(good_paths(&status), 2);
        assert_eq!(good_paths(&serde_json::json!({ "peers": [] })), 0);
    }
}
