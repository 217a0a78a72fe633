//! The other hosts of moved flows: a daemon, and a relay that takes requests to move the host's flows, or to let flows pass it.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::sys;

/// Timeout of a start.
const LIMIT: Duration = Duration::from_secs(60);

/// Address of the host behind the server ([`Lab::far`]), in both families.
pub const FAR: [&str; 2] = ["198.51.100.10", "2001:db8:100::10"];

/// Gives the server, which a host behind it makes a router, firewall rules.
///
/// # Errors
/// `nft` is missing or rejects the rules.
pub fn nft(lab: &Lab, script: &str) -> Result<()> {
    let output = lab.server().command("nft")?.arg(script).output().context("cannot run nft: install nftables")?;
    ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Makes the server a stateful firewall on the second link. To the client it lets only what belongs to the client's connections. `strict`: it must have seen their
/// SYN; `drops`: it also drops what comes from the client without that.
///
/// # Errors
/// As for [`nft`].
pub fn firewall(lab: &Lab, strict: bool, drops: bool) -> Result<()> {
    let from_client = if drops { "iifname l1 ct state invalid drop" } else { "" };
    nft(
        lab,
        &format!(
            "table inet firewall {{ chain forward {{ type filter hook forward priority 0;
                {from_client}
                oifname l1 ct state != {{ established, related }} drop
            }}
            }}"
        ),
    )?;
    lab.server().sysctl("netfilter/nf_conntrack_tcp_loose", if strict { "0" } else { "1" })
}

/// Makes the server a NAT on the second link.
///
/// # Errors
/// As for [`nft`].
pub fn nat(lab: &Lab) -> Result<()> {
    nft(
        lab,
        "table inet nat { chain out { type nat hook postrouting priority 100;
            oifname far0 ip saddr 10.77.1.0/24 masquerade
            oifname far0 ip6 saddr fd77:0:0:1::/64 masquerade
        }
        }",
    )
}

/// A program at the other end. Dropping it sends SIGTERM and waits.
#[derive(Debug)]
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = sys::terminate(self.0.id());
        }
        let _ = self.0.wait();
    }
}

impl Program {
    /// Starts `braid` and waits until `is_ready`, which gets its log.
    fn start(
        host: &Namespace,
        braid: &Path,
        home: &Path,
        socket: &Path,
        arguments: &[&str],
        is_ready: impl Fn(&str) -> bool,
    ) -> Result<Self> {
        fs::create_dir_all(home)?;
        let path = home.join("log");
        let mut command = host.command(braid)?;
        command.args(arguments).arg("--state-dir").arg(home.join("state")).arg("--socket").arg(socket);
        let log = File::create(&path)?;
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        let mut program = Self(child.with_context(|| format!("cannot run {}: build it first (cargo build -p braid)", braid.display()))?);
        let begin = Instant::now();
        loop {
            let said = fs::read_to_string(&path).unwrap_or_default();
            if is_ready(&said) {
                return Ok(program);
            }
            if let Some(status) = program.0.try_wait()? {
                bail!("braid {} ended at once ({status}):\n{}", arguments.join(" "), said.trim());
            }
            ensure!(begin.elapsed() < LIMIT, "braid {} is not up after {LIMIT:?}:\n{}", arguments.join(" "), said.trim());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// `braid daemon` at the other end of the client's connections ([`Lab::host`]).
#[derive(Debug)]
pub struct ServerDaemon {
    program: Program,
    home: PathBuf,
}

impl ServerDaemon {
    /// Starts it and waits until it answers.
    pub fn start(lab: &Lab, braid: &Path) -> Result<Self> {
        Self::start_on(lab.host(), lab.directory().join("far"), braid)
    }

    /// The same on another host, with its files in `home`.
    pub fn start_on(host: &Namespace, home: PathBuf, braid: &Path) -> Result<Self> {
        fs::create_dir_all(&home)?;
        let config = home.join("braid.toml");
        // The device of a host behind the server: virtual devices are links only if named.
        fs::write(&config, "version = 1\n[[link]]\nname = \"eth0\"\n")?;
        let arguments = ["daemon", "--config", config.to_str().context("the lab's directory is not UTF-8")?];
        let socket = home.join("socket");
        let program = Program::start(host, braid, &home, &socket, &arguments, |_| UnixStream::connect(&socket).is_ok())?;
        Ok(Self { program, home })
    }

    /// Path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.home.join("socket")
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.home.join("log")).unwrap_or_default()
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.program.0.kill()?;
        self.program.0.wait()?;
        Ok(())
    }
}

/// `braid relay --local --moves` beside it, or another relay.
#[derive(Debug)]
pub struct MovesRelay {
    program: Program,
    home: PathBuf,
}

impl MovesRelay {
    /// Starts it and waits until it listens. The server's daemon must run.
    pub fn start(lab: &Lab, braid: &Path) -> Result<Self> {
        Self::start_on(lab.host(), lab.directory().join("far"), braid, &["--local", "--moves"])
    }

    /// Starts `braid relay` with these options beside the daemon whose files are in `daemon`.
    pub fn start_on(host: &Namespace, daemon: PathBuf, braid: &Path, options: &[&str]) -> Result<Self> {
        let home = daemon.join("relay");
        let arguments: Vec<&str> = ["relay"].iter().chain(options).copied().collect();
        let program = Program::start(host, braid, &home, &daemon.join("socket"), &arguments, |log| log.contains("the relay is up"))?;
        Ok(Self { program, home })
    }

    /// Its state directory.
    pub fn state(&self) -> PathBuf {
        self.home.join("state")
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) -> Result<()> {
        self.program.0.kill()?;
        self.program.0.wait()?;
        Ok(())
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.home.join("log")).unwrap_or_default()
    }
}
