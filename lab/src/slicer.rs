//! `braid net slicer` in the lab.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::lab::Lab;
use crate::network::eventually;

/// The address of a controller behind the slicer, in the client's namespace.
pub const fn behind(number: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 6700 + number)
}

/// `braid net slicer`. Dropping it kills it.
#[derive(Debug)]
pub struct Slicer<'a> {
    lab: &'a Lab,
    braid: PathBuf,
    name: String,
    process: Child,
}

impl<'a> Slicer<'a> {
    /// Starts it, and does not wait. `name` is that of its files. With the same name, it continues what a killed one has begun.
    ///
    /// # Errors
    /// The program is missing, or the file cannot be written.
    pub fn start(lab: &'a Lab, braid: &Path, name: &str, listen: SocketAddr, configuration: &str) -> Result<Self> {
        let file = lab.directory().join(format!("{name}.toml"));
        fs::write(&file, configuration).context("cannot write the slicer's configuration")?;
        let log = File::options().create(true).append(true).open(log(lab, name)).context("cannot write the slicer's log")?;
        let mut command = lab.client().command(braid)?;
        command.args(["net", "slicer", "--socket"]).arg(socket(lab, name)).args(["--listen", &listen.to_string()]);
        command.arg("--config").arg(file).arg("--state-dir").arg(lab.directory().join(format!("{name}-state")));
        let process = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        let process = process.with_context(|| format!("cannot run {}: build it first (cargo build -p braid)", braid.display()))?;
        Ok(Self { lab, braid: braid.to_owned(), name: name.to_owned(), process })
    }

    /// Runs `braid net slice` with these arguments.
    ///
    /// # Errors
    /// The program is missing.
    pub fn slice(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.lab.client().command(&self.braid)?;
        command.args(["net", "slice"]).args(arguments).arg("--socket").arg(socket(self.lab, &self.name));
        Ok(command.stdin(Stdio::null()).output()?)
    }

    /// `braid net slice list --json`; `Null` if the slicer does not answer.
    ///
    /// # Errors
    /// The program is missing.
    pub fn status(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&self.slice(&["list", "--json"])?.stdout).unwrap_or_default())
    }

    /// Waits until so many switches are in order, and all controllers are connected to all of them.
    ///
    /// # Errors
    /// That takes more than a minute.
    pub fn serves(&self, switches: usize) -> Result<()> {
        eventually(&format!("the slicer serves {switches} switches"), || {
            let status = self.status()?;
            let live = |switch: &Value| switch["state"] == "live";
            let count = status["switches"].as_array().map_or(0, |all| all.iter().filter(|switch| live(switch)).count());
            let connected =
                |slice: &Value| slice["links"].as_array().is_some_and(|links| links.iter().all(|link| !link["version"].is_null()));
            Ok(count == switches && status["slices"].as_array().is_some_and(|slices| slices.iter().all(connected)))
        })
        .with_context(|| format!("the slicer's log:\n{}", self.log()))
    }

    /// PID of the process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// What it wrote, and the slicers of this name before it.
    pub fn log(&self) -> String {
        fs::read_to_string(log(self.lab, &self.name)).unwrap_or_default()
    }

    /// Sends SIGKILL, and waits until it has ended.
    ///
    /// # Errors
    /// It has ended before.
    pub fn kill(mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }
}

impl Drop for Slicer<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the slicer's log\n{}---", self.log());
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn socket(lab: &Lab, name: &str) -> PathBuf {
    lab.directory().join(format!("{name}.sock"))
}

fn log(lab: &Lab, name: &str) -> PathBuf {
    lab.directory().join(format!("{name}.log"))
}
