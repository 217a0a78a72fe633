//! A network of switches in the lab: Open vSwitch with its datapath in user space and the controller are in the client's namespace, each host has one of its
//! own. Switches at other sites ([`crate::backhaul`]) have a namespace and an Open vSwitch of their own.

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::sys;

/// Where switches connect to the controller, in the client's namespace.
pub const CONTROLLER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 6653);
/// Timeout of every expected event, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// `braid net controller`. Dropping it kills it.
#[derive(Debug)]
pub struct Controller<'a> {
    lab: &'a Lab,
    braid: PathBuf,
    /// Of the files of several.
    name: String,
    process: Child,
}

impl<'a> Controller<'a> {
    /// Starts it, and does not wait.
    ///
    /// # Errors
    /// The program is missing.
    pub fn start(lab: &'a Lab, braid: &Path) -> Result<Self> {
        Self::start_with(lab, braid, "")
    }

    /// The same with a configuration.
    ///
    /// # Errors
    /// The program is missing, or the file cannot be written.
    pub fn start_with(lab: &'a Lab, braid: &Path, configuration: &str) -> Result<Self> {
        Self::start_at(lab, braid, configuration, &[CONTROLLER])
    }

    /// The same, for switches that connect to these addresses.
    ///
    /// # Errors
    /// The program is missing, or the file cannot be written.
    pub fn start_at(lab: &'a Lab, braid: &Path, configuration: &str, listens: &[SocketAddr]) -> Result<Self> {
        Self::start_named(lab, braid, "net", configuration, listens)
    }

    /// The same, one of several: `name` is that of its socket and its log.
    ///
    /// # Errors
    /// The program is missing, or the file cannot be written.
    pub fn start_named(lab: &'a Lab, braid: &Path, name: &str, configuration: &str, listens: &[SocketAddr]) -> Result<Self> {
        let file = lab.directory().join(format!("{name}.toml"));
        fs::write(&file, configuration).context("cannot write the controller's configuration")?;
        let log = File::options().create(true).append(true).open(log(lab, name)).context("cannot write the controller's log")?;
        let mut command = lab.client().command(braid)?;
        command.args(["net", "controller", "--socket"]).arg(socket(lab, name));
        command.args(listens.iter().flat_map(|address| ["--listen".to_owned(), address.to_string()]));
        command.arg("--config").arg(file).arg("--state-dir").arg(lab.directory().join(format!("{name}-state")));
        let process = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        let process = process.with_context(|| format!("cannot run {}: build it first (cargo build -p braid)", braid.display()))?;
        Ok(Self { lab, braid: braid.to_owned(), name: name.to_owned(), process })
    }

    /// Runs `braid net` with these arguments.
    ///
    /// # Errors
    /// The program is missing.
    pub fn net(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.lab.client().command(&self.braid)?;
        Ok(command.arg("net").args(arguments).arg("--socket").arg(socket(self.lab, &self.name)).stdin(Stdio::null()).output()?)
    }

    /// `braid net status --json`; `Null` if the controller does not answer.
    ///
    /// # Errors
    /// The program is missing.
    pub fn status(&self) -> Result<Value> {
        Ok(serde_json::from_slice(&self.net(&["status", "--json"])?.stdout).unwrap_or_default())
    }

    /// Waits until it knows so many switches and links, and all switches have their entries.
    ///
    /// # Errors
    /// That takes more than a minute.
    pub fn converges(&self, switches: usize, links: usize) -> Result<()> {
        eventually(&format!("the controller knows {switches} switches and {links} links"), || {
            Ok(is_complete(&self.status()?, switches, links))
        })
        .with_context(|| format!("the controller's log:\n{}", self.log()))
    }

    /// PID of the process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// What it wrote, and the controllers of this lab before it.
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

impl Drop for Controller<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- the controller's log\n{}---", self.log());
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

/// Whether a status has so many switches and links, and all switches have their entries.
pub(crate) fn is_complete(status: &Value, switches: usize, links: usize) -> bool {
    let live = status["switches"].as_array().is_some_and(|all| all.iter().all(|switch| switch["state"] == "live"));
    live && count(status, "switches") == switches && count(status, "links") == links && status["converged"] == true
}

/// Length of a list in a status.
pub(crate) fn count(status: &Value, what: &str) -> usize {
    status[what].as_array().map_or(0, Vec::len)
}

/// Files of one side of TLS, in PEM format.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// Its certificate.
    pub certificate: PathBuf,
    /// The key of that.
    pub key: PathBuf,
    /// The certificate that signs those of the other side.
    pub ca: PathBuf,
}

/// Open vSwitch, with its own database and directory.
#[derive(Debug)]
pub struct Switches<'a> {
    lab: &'a Lab,
    /// The namespace, if it is not the client's.
    own: Option<Namespace>,
    directory: PathBuf,
    daemons: Vec<Child>,
}

impl<'a> Switches<'a> {
    /// Three switches in a ring, `s1` to `s3`, which speak a version such as `OpenFlow13`.
    ///
    /// # Errors
    /// Open vSwitch is missing, or does not start.
    pub fn ring(lab: &'a Lab, version: &str) -> Result<Self> {
        Self::ring_of(lab, version, &format!("tcp:{CONTROLLER}"), None)
    }

    /// The same, for a controller at `target`, such as `tcp:ADDRESS:PORT`, with these files for TLS.
    ///
    /// # Errors
    /// Open vSwitch is missing, or does not start.
    pub fn ring_of(lab: &'a Lab, version: &str, target: &str, files: Option<&TlsFiles>) -> Result<Self> {
        let switches = Self::start(lab, None, "ovs")?;
        if let Some(files) = files {
            switches.use_tls(files)?;
        }
        for (number, name) in (1..).zip(["s1", "s2", "s3"]) {
            switches.add(name, number, version, target)?;
        }
        for (one, other) in [("s1", "s2"), ("s2", "s3"), ("s1", "s3")] {
            switches.cable(one, other)?;
        }
        Ok(switches)
    }

    /// Open vSwitch with one switch, `s1`, whose controller is at [`CONTROLLER`].
    ///
    /// # Errors
    /// Open vSwitch is missing, or does not start.
    pub fn one(lab: &'a Lab, version: &str) -> Result<Self> {
        let switches = Self::start(lab, None, "ovs")?;
        switches.add("s1", 1, version, &format!("tcp:{CONTROLLER}"))?;
        Ok(switches)
    }

    /// The number of a port.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn number(&self, port: &str) -> Result<u32> {
        let number = self.vsctl(&format!("get Interface {port} ofport"))?;
        number.trim().parse().with_context(|| format!("{port} is no port: {}", number.trim()))
    }

    /// Open vSwitch without a switch, in the client's namespace or its own, with a directory of this name.
    pub(crate) fn start(lab: &'a Lab, own: Option<Namespace>, directory: &str) -> Result<Self> {
        let directory = lab.directory().join(directory);
        fs::create_dir(&directory).context("cannot make the switches' directory")?;
        let mut switches = Self { lab, own, directory, daemons: Vec::new() };
        let database = switches.directory.join("conf.db").display().to_string();
        printed(switches.tool("ovsdb-tool")?.args(["create", &database, "/usr/share/openvswitch/vswitch.ovsschema"]))?;
        let remote = format!("--remote=punix:{}", switches.directory.join("db.sock").display());
        switches.daemon("ovsdb-server", &[&remote, &database])?;
        eventually("the switches' database answers", || Ok(switches.vsctl("--no-wait init").is_ok()))?;
        switches.daemon("ovs-vswitchd", &["--disable-system"])?;
        Ok(switches)
    }

    /// The namespace of the switches.
    pub fn namespace(&self) -> &Namespace {
        self.own.as_ref().unwrap_or(self.lab.client())
    }

    /// Makes a device of the switches' namespace a port of a switch. Returns its number.
    ///
    /// # Errors
    /// There is no such switch or device.
    pub fn port(&self, switch: &str, device: &str) -> Result<u32> {
        self.vsctl(&format!("add-port {switch} {device}"))?;
        let number = self.vsctl(&format!("get Interface {device} ofport"))?;
        number.trim().parse().with_context(|| format!("{device} is no port of {switch}: {}", number.trim()))
    }

    fn tool(&self, program: &str) -> Result<Command> {
        let mut command = self.namespace().command(program)?;
        for place in ["OVS_RUNDIR", "OVS_DBDIR", "OVS_LOGDIR"] {
            command.env(place, &self.directory);
        }
        Ok(command)
    }

    fn daemon(&mut self, program: &str, arguments: &[&str]) -> Result<()> {
        let log = File::create(self.directory.join(format!("{program}.log")))?;
        let mut command = self.tool(program)?;
        let child = command.args(arguments).stdin(Stdio::null()).stderr(log.try_clone()?).stdout(log).spawn();
        self.daemons.push(child.with_context(|| format!("cannot run {program}: run lab/install-deps.sh"))?);
        Ok(())
    }

    pub(crate) fn vsctl(&self, line: &str) -> Result<String> {
        let database = format!("--db=unix:{}", self.directory.join("db.sock").display());
        printed(self.tool("ovs-vsctl")?.args(["--timeout=20", &database]).args(line.split(' ')))
    }

    /// A switch that follows the controller only, also while that is away.
    pub(crate) fn add(&self, name: &str, datapath: u64, version: &str, target: &str) -> Result<()> {
        let line = format!(
            "add-br {name} -- set bridge {name} datapath_type=netdev fail_mode=secure protocols={version} \
             other-config:datapath-id={datapath:016x} other-config:disable-in-band=true -- set-controller {name} {target} -- \
             set controller {name} max_backoff=1000 inactivity_probe=5000"
        );
        self.vsctl(&line).map(drop)
    }

    /// Connections to controllers show these certificates.
    pub(crate) fn use_tls(&self, files: &TlsFiles) -> Result<()> {
        let [key, certificate, ca] = [&files.key, &files.certificate, &files.ca].map(|file| file.display().to_string());
        self.vsctl(&format!("set-ssl {key} {certificate} {ca}")).map(drop)
    }

    /// A cable between two switches. Its ends are `ONE-OTHER` and `OTHER-ONE`.
    fn cable(&self, one: &str, other: &str) -> Result<()> {
        let (near, far) = (format!("{one}-{other}"), format!("{other}-{one}"));
        self.namespace().ip(&format!("link add name {near} up type veth peer name {far}\nlink set dev {far} up\n"))?;
        self.vsctl(&format!("add-port {one} {near} -- add-port {other} {far}")).map(drop)
    }

    /// Breaks the cable with this end, or repairs it.
    ///
    /// # Errors
    /// There is no such end.
    pub fn set_cable(&self, end: &str, up: bool) -> Result<()> {
        self.namespace().ip(&format!("link set dev {end} {}\n", if up { "up" } else { "down" }))
    }

    /// The entries of a switch, without their counters.
    ///
    /// # Errors
    /// The switch does not answer.
    pub fn entries(&self, name: &str) -> Result<Vec<String>> {
        let text = printed(self.tool("ovs-ofctl")?.args(["-O", "OpenFlow10,OpenFlow13", "--no-stats", "dump-flows", name]))?;
        let mut lines: Vec<String> = text.lines().filter(|line| line.contains("actions=")).map(str::to_owned).collect();
        lines.sort();
        Ok(lines)
    }

    /// Starts a controller of the ring, and two hosts: one with cables to the switches `at`, the other at `s2`. They reach each other, and the controller knows
    /// them.
    ///
    /// # Errors
    /// That takes more than a minute.
    pub fn serve(&self, braid: &Path, at: &[&str]) -> Result<(Controller<'a>, [Host; 2])> {
        let controller = Controller::start(self.lab, braid)?;
        let hosts = [Host::start(self, 1, at)?, Host::start(self, 2, &["s2"])?];
        controller.converges(3, 3)?;
        let [one, other] = &hosts;
        // Before a port is known to lead to hosts, the controller passes on their packets itself.
        eventually("the hosts reach each other, and the controller knows them", || {
            Ok(one.pings(other)? && count(&controller.status()?, "hosts") == hosts.len())
        })?;
        controller.converges(3, 3)?;
        Ok((controller, hosts))
    }
}

impl Drop for Switches<'_> {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A host, in a namespace of its own.
#[derive(Debug)]
pub struct Host {
    namespace: Namespace,
    /// Its IPv4 address.
    pub address: Ipv4Addr,
    /// Its Ethernet address.
    pub mac: String,
}

impl Host {
    /// A host with cables to these switches. The first one is plugged in: its device at the host is `eth0`, the others `eth1` and so on, with the same address.
    ///
    /// # Errors
    /// There is no such switch.
    pub fn start(switches: &Switches<'_>, number: u8, at: &[&str]) -> Result<Self> {
        let namespace = switches.lab.namespace("host's")?;
        let host = Self { namespace, address: Ipv4Addr::new(10, 9, 0, number), mac: format!("02:00:00:00:09:{number:02x}") };
        let (mac, path) = (&host.mac, host.namespace.path());
        for (place, switch) in at.iter().enumerate() {
            let port = format!("{switch}-h{number}");
            let line = format!("link add name {port} up type veth peer name eth{place} address {mac} netns {path}\n");
            switches.namespace().ip(&line)?;
            // The switches take no frames whose checksums a network card would add.
            host.namespace.run(|| sys::plain_frames(&format!("eth{place}")))?.context("cannot switch off offloads")?;
            switches.vsctl(&format!("add-port {switch} {port}"))?;
        }
        host.sh("ip link set lo up")?;
        host.plug("eth0")?;
        Ok(host)
    }

    /// Its namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Runs a script of the shell.
    ///
    /// # Errors
    /// It fails.
    pub fn sh(&self, script: &str) -> Result<()> {
        printed(self.namespace.command("sh")?.args(["-ec", script])).map(drop)
    }

    /// Gives the host's address to this device, and to no other, and sets it up.
    ///
    /// # Errors
    /// There is no such device.
    pub fn plug(&self, device: &str) -> Result<()> {
        let address = self.address;
        self.sh(&format!("ip -4 addr flush scope global; ip addr add {address}/24 dev {device}; ip link set {device} up"))
    }

    /// Whether another host answers within a second.
    ///
    /// # Errors
    /// `ping` is missing.
    pub fn pings(&self, other: &Self) -> Result<bool> {
        self.reaches(other.address)
    }

    /// Whether this address answers within a second.
    ///
    /// # Errors
    /// `ping` is missing.
    pub fn reaches(&self, address: Ipv4Addr) -> Result<bool> {
        let mut ping = self.namespace.command("ping")?;
        ping.args(["-c1", "-W1", "-q", &address.to_string()]).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(ping.status().context("cannot run ping: run lab/install-deps.sh")?.success())
    }
}

/// What a program prints, if it succeeds.
pub(crate) fn printed(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {command:?}: run lab/install-deps.sh"))?;
    ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Waits until `check` holds.
pub(crate) fn eventually(what: &str, mut check: impl FnMut() -> Result<bool>) -> Result<()> {
    let begin = Instant::now();
    while !check()? {
        ensure!(begin.elapsed() < LIMIT, "not within {LIMIT:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
