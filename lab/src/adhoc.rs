//! Ad-hoc devices of the lab's two hosts, whose radios are the lab's links.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::lab::Lab;
use crate::namespace::Namespace;

/// Timeout until a device is up, and its neighbours are.
const LIMIT: Duration = Duration::from_secs(60);

/// A device without a daemon: `braid adhoc up` at one host. Dropping it ends it.
#[derive(Debug)]
pub struct AdhocHost<'a> {
    host: &'a Namespace,
    braid: PathBuf,
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

/// A host: 0 is the client of the lab, whose radios have the names of its links; 1 the server, whose radios are `l0`, `l1`, ...
pub fn adhoc_host(lab: &Lab, number: usize) -> &Namespace {
    if number == 0 { lab.client() } else { lab.server() }
}

impl<'a> AdhocHost<'a> {
    /// IPv4 addresses of the hosts' devices.
    pub const ADDRESSES: [&'static str; 2] = ["10.55.0.1", "10.55.0.2"];
    /// Their IPv6 addresses.
    pub const ADDRESSES6: [&'static str; 2] = ["fd55::1", "fd55::2"];

    /// Name of the radio of a host on this link.
    pub fn radio(lab: &Lab, number: usize, link: usize) -> String {
        if number == 0 { lab.links()[link].name().to_owned() } else { format!("l{link}") }
    }

    /// Starts it with all links as radios, waits until it is up, and gives it its addresses.
    pub fn start(lab: &'a Lab, braid: &Path, number: usize, more: &str) -> Result<Self> {
        let radios: String = (0..lab.links().len()).map(|link| format!(" --radio {}", Self::radio(lab, number, link))).collect();
        let mut device = Self::begin(lab, braid, number, &format!("{radios} {more}"))?;
        device.wait_up()?;
        let (v4, v6) = (Self::ADDRESSES[number], Self::ADDRESSES6[number]);
        adhoc_host(lab, number).ip(&format!("address add {v4}/24 dev vi0\n"))?;
        // IPv6 may be off.
        let _ = adhoc_host(lab, number).ip(&format!("address add {v6}/64 dev vi0 nodad\n"));
        Ok(device)
    }

    /// Starts `braid adhoc up` with these arguments, and does not wait.
    pub fn begin(lab: &'a Lab, braid: &Path, number: usize, arguments: &str) -> Result<Self> {
        Self::begin_at(adhoc_host(lab, number), lab.directory(), braid, number, arguments)
    }

    /// The same at any host, with files of this number in `directory`.
    pub(crate) fn begin_at(host: &'a Namespace, directory: &Path, braid: &Path, number: usize, arguments: &str) -> Result<Self> {
        let [socket, log] = ["socket", "log"].map(|kind| directory.join(format!("adhoc-{number}.{kind}")));
        File::create(&log)?;
        let appended = || File::options().append(true).open(&log);
        let mut command = host.command(braid)?;
        command.args(["adhoc", "up"]).args(arguments.split_whitespace()).arg("--socket").arg(&socket);
        let child = command.stdin(Stdio::null()).stdout(appended()?).stderr(appended()?).spawn();
        let child = child.with_context(|| format!("cannot run {}", braid.display()))?;
        Ok(Self { host, braid: braid.to_owned(), child, socket, log })
    }

    /// Waits until the device is up.
    pub(crate) fn wait_up(&mut self) -> Result<()> {
        let begin = Instant::now();
        while self.status()?.is_none() {
            if self.child.try_wait()?.is_some() || begin.elapsed() > LIMIT {
                bail!("the ad-hoc device does not come up: {}", self.log());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Runs `braid adhoc` with these arguments for the device.
    pub fn braid(&self, arguments: &str) -> Result<Output> {
        let mut command = self.host.command(&self.braid)?;
        Ok(command.arg("adhoc").args(arguments.split_whitespace()).env("BRAID_SOCKET", &self.socket).stdin(Stdio::null()).output()?)
    }

    /// `braid adhoc --json`; `None` if it fails.
    pub fn status(&self) -> Result<Option<Value>> {
        let output = self.braid("--json")?;
        Ok(if output.status.success() { Some(serde_json::from_slice(&output.stdout)?) } else { None })
    }

    /// `braid adhoc neighbours --json`.
    pub fn neighbours(&self) -> Result<Vec<Value>> {
        let output = self.braid("neighbours --json")?;
        if !output.status.success() {
            bail!("braid adhoc neighbours: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let answer: Value = serde_json::from_slice(&output.stdout)?;
        Ok(answer["neighbours"].as_array().cloned().unwrap_or_default())
    }

    /// Waits until there are `count` pairs that are up, measured and, if `used`, have a share.
    pub fn wait_pairs(&self, count: usize, used: bool) -> Result<()> {
        let begin = Instant::now();
        loop {
            let rows = self.neighbours()?;
            let good = |row: &&Value| {
                row["state"] == "up" && row["rtt_us"].is_u64() && (!used || row["share"].as_f64().is_some_and(|share| share > 0.0))
            };
            if rows.iter().filter(good).count() == count {
                return Ok(());
            }
            if begin.elapsed() > LIMIT {
                bail!("not {count} pairs are up after {LIMIT:?}: {rows:?}");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// The process.
    pub fn process(&mut self) -> &mut Child {
        &mut self.child
    }

    /// What it wrote.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for AdhocHost<'_> {
    fn drop(&mut self) {
        let _ = self.braid("down");
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(5) && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The routing daemon babeld at one host, which announces the host's address. Dropping it ends it.
#[derive(Debug)]
pub struct Babel {
    child: Child,
}

impl Babel {
    /// Addresses that the hosts announce to each other.
    pub const ADDRESSES: [&'static str; 2] = ["10.66.0.1", "10.66.1.1"];

    /// Gives the host its address, and starts babeld on these devices.
    pub fn start(lab: &Lab, number: usize, devices: &[String]) -> Result<Self> {
        Self::start_at(adhoc_host(lab, number), lab.directory(), number, Self::ADDRESSES[number], devices)
    }

    /// The same at any host, with files of this number in `directory`. `address` is in 10.66.0.0/16; `arguments` are options and devices.
    pub(crate) fn start_at(host: &Namespace, directory: &Path, number: usize, address: &str, arguments: &[String]) -> Result<Self> {
        host.ip(&format!("address replace {address}/32 dev lo\n"))?;
        let mut command = host.command("babeld")?;
        for statement in ["redistribute local ip 10.66.0.0/16 allow", "redistribute local deny"] {
            command.args(["-C", statement]);
        }
        let file = |kind: &str| directory.join(format!("babel-{number}.{kind}"));
        command.arg("-I").arg(file("pid")).arg("-S").arg(file("state")).args(arguments);
        let log = File::create(file("log"))?;
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        Ok(Self { child: child.context("cannot run babeld: run lab/install-deps.sh")? })
    }
}

impl Drop for Babel {
    fn drop(&mut self) {
        // It removes its routes.
        let _ = crate::sys::terminate(self.child.id());
        let _ = self.child.wait();
    }
}
