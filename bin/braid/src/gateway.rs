//! `braid gateway setup`: addresses and names for the LAN, by dnsmasq.

mod files;
mod plan;
mod system;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use braid_api::{Accepted, Status};
use braid_config::{self as config, ConfigErrors, World, settings};
use braid_control::config::Config;
use braid_daemon::DEFAULT_CONFIG;
use braid_platform::linux::netlink;
use ipnet::IpNet;
use serde::Serialize;

use crate::cli::GatewaySetup;
use crate::client;
use crate::table::Page;
use files::{DNSMASQ_FILE, NETWORKD_FILES};
use plan::{Plan, Site};
use system::{State, System, execute};

/// What setup shows, or did.
#[derive(Debug, Serialize)]
struct Report {
    /// Whether it was done, not only shown.
    applied: bool,
    /// The configuration file.
    config: PathBuf,
    #[serde(flatten)]
    plan: Plan,
    /// Debian packages to install.
    missing: Vec<&'static str>,
    /// The command that installs them.
    #[serde(skip_serializing_if = "Option::is_none")]
    install: Option<String>,
    /// What was done besides writing these files.
    done: Vec<String>,
}

/// What --undo did.
#[derive(Debug, Default, Serialize)]
struct Undone {
    done: Vec<String>,
    /// Files that were left alone, because they were edited.
    left: Vec<PathBuf>,
    notes: Vec<String>,
}

/// `braid gateway setup`.
pub(crate) fn setup(asked: &GatewaySetup) -> anyhow::Result<ExitCode> {
    let system = System::new(&asked.root);
    if asked.undo {
        let undone = undo(asked, &system)?;
        crate::print(asked.json, &undone, show_undone)?;
        return Ok(if undone.left.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    let mut report = prepare(asked, &system)?;
    if asked.apply {
        apply(asked, &system, &mut report)?;
    }
    crate::print(asked.json, &report, show)?;
    Ok(ExitCode::SUCCESS)
}

/// Plans everything, and changes nothing.
fn prepare(asked: &GatewaySetup, system: &System<'_>) -> anyhow::Result<Report> {
    let network = netlink::snapshot(&netlink::Files::default())?;
    let (config, dnsmasq) = (configuration(&asked.config)?, system.dnsmasq_files()?);
    let added = match system.state(Path::new(DNSMASQ_FILE))? {
        State::Written(_) => system.added(),
        State::Absent | State::Edited => Vec::new(),
    };
    let machine_id = system.machine_id();
    let manager = |device: &_| system.manager(device);
    let site = Site { network: &network, config: &config, machine_id: &machine_id, dnsmasq: &dnsmasq, added: &added, manager: &manager };
    let plan = plan::plan(&site, &asked.lan, &asked.address)?;
    let missing = system.missing_packages();
    let install = (!missing.is_empty()).then(|| format!("apt install {}", missing.join(" ")));
    Ok(Report { applied: false, config: asked.config.clone(), plan, missing, install, done: Vec::new() })
}

/// The configuration; the defaults if there is no file.
fn configuration(path: &Path) -> anyhow::Result<Config> {
    match config::load(path, None) {
        Err(ConfigErrors::Unreadable { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(Config::default()),
        loaded => loaded.map_err(|error| anyhow::anyhow!("{error}")),
    }
}

fn apply(asked: &GatewaySetup, system: &System<'_>, report: &mut Report) -> anyhow::Result<()> {
    let Report { plan, done, .. } = report;
    let mut stale = system.written();
    stale.retain(|path| plan.files.iter().all(|file| file.path != *path));
    for path in plan.files.iter().map(|file| &file.path).chain(&stale) {
        match system.state(path)? {
            State::Edited => bail!(
                "{} was edited, or is not Braid's: move it away, or keep it and give up `braid gateway setup`; nothing was changed",
                system.place(path).display()
            ),
            State::Written(text) if !plan.files.iter().any(|file| file.path == *path && file.text == text) => bail!(
                "{} has other settings from an earlier run: run `braid gateway setup --undo` first; nothing was changed",
                system.place(path).display()
            ),
            State::Written(_) | State::Absent => {}
        }
    }
    // The record of the addresses is on disk before they are set.
    for file in &plan.files {
        system.write(&file.path, &file.text)?;
    }
    for lan in &plan.devices {
        execute(&["ip", "link", "set", "dev", &lan.device, "up"])?;
        for net in &lan.missing {
            execute(&["ip", "address", "replace", &net.to_string(), "dev", &lan.device])?;
            done.push(format!("set {net} on {}", lan.device));
        }
    }
    if let Some(section) = &plan.section {
        let text = plan::with_section(&settings::read_file(&asked.config)?, section);
        write_config(&asked.config, &text)?;
        done.push(format!("added [gateway] to {}", asked.config.display()));
        plan.notes.push(to_start(asked));
    }
    let networkd = plan.files.iter().any(|file| file.path.to_string_lossy().starts_with(NETWORKD_FILES));
    if networkd && system.is_real() {
        execute(&["networkctl", "reload"]).map(|()| done.push("systemd-networkd has read its new file".to_owned()))?;
    }
    plan.notes.extend(restart(system, done));
    report.applied = true;
    Ok(())
}

/// Writes the configuration after a check.
fn write_config(path: &Path, text: &str) -> anyhow::Result<()> {
    let world = World { relays: None, ..World::here(false) };
    config::parse(&path.display().to_string(), text, &world).map_err(|error| anyhow::anyhow!("{error}"))?;
    settings::replace_file(path, text).with_context(|| format!("cannot write {}; run this command with sudo", path.display()))
}

/// How to make the daemon forward. A running one has dropped the privileges to load more programs, so it must be started again.
fn to_start(asked: &GatewaySetup) -> String {
    let default = asked.config == Path::new(DEFAULT_CONFIG);
    let up = if default { "`braid up`".to_owned() } else { format!("`braid up --config {}`", asked.config.display()) };
    match client::read::<Status>(&asked.daemon.socket, "/v1/status") {
        Ok(_) => format!("restart the daemon, which has not loaded the gateway's programs: `braid down`, then {up}"),
        Err(_) => format!("start the daemon: {up}"),
    }
}

/// Makes a daemon that uses this configuration file read it again. Returns what remains to do.
fn reload(asked: &GatewaySetup, done: &mut Vec<String>) -> Option<String> {
    let uses = |status: &Status| status.config.as_ref().is_some_and(|path| Path::new(path) == asked.config);
    let status: Status = client::read(&asked.daemon.socket, "/v1/status").ok().filter(uses)?;
    match client::send::<Accepted>(&asked.daemon.socket, "/v1/reload", &()) {
        Ok(_) => {
            done.push(format!("the daemon (version {}) has read the configuration again", status.version));
            None
        }
        Err(error) => Some(format!("the daemon did not take the configuration: {error}; see `braid check`, then run `braid reload`")),
    }
}

/// Makes dnsmasq read its files again. Returns what remains to do.
fn restart(system: &System<'_>, done: &mut Vec<String>) -> Option<String> {
    match system.service() {
        Some(words) if system.is_real() => match execute(words) {
            Ok(()) => {
                done.push("restarted dnsmasq".to_owned());
                None
            }
            Err(error) => Some(format!("{error:#}; see `journalctl -u dnsmasq`")),
        },
        Some(words) => Some(format!("restart dnsmasq: {}", words.join(" "))),
        None => Some("dnsmasq reads its files when it starts".to_owned()),
    }
}

/// Reverts what setup did, as far as nobody has changed it since.
fn undo(asked: &GatewaySetup, system: &System<'_>) -> anyhow::Result<Undone> {
    let mut undone = Undone::default();
    let added = match system.state(Path::new(DNSMASQ_FILE))? {
        State::Written(_) => system.added(),
        State::Absent | State::Edited => Vec::new(),
    };
    let network = netlink::snapshot(&netlink::Files::default())?;
    let has = |device: &str, net: &IpNet| network.interfaces.iter().any(|facts| facts.name == *device && facts.addresses.contains(net));
    let mut is_networkd = false;
    for (device, net) in added.iter().filter(|(device, net)| has(device, net)) {
        execute(&["ip", "address", "delete", &net.to_string(), "dev", device])?;
        undone.done.push(format!("removed {net} from {device}"));
    }
    for path in system.written() {
        if system.state(&path)? == State::Edited {
            undone.left.push(path);
            continue;
        }
        system.remove(&path)?;
        is_networkd |= path.to_string_lossy().starts_with(NETWORKD_FILES);
        undone.done.push(format!("removed {}", path.display()));
    }
    if is_networkd && system.is_real() {
        undone.notes.extend(execute(&["networkctl", "reload"]).err().map(|error| format!("{error:#}")));
    }
    let text = settings::read_file(&asked.config)?;
    match plan::without_section(&text) {
        Some(without) => {
            write_config(&asked.config, &without)?;
            undone.done.push(format!("removed [gateway] from {}", asked.config.display()));
            let remaining = reload(asked, &mut undone.done);
            undone.notes.extend(remaining);
        }
        None if text.contains(plan::SECTION_COMMENT) => undone.left.push(asked.config.clone()),
        None => {}
    }
    if undone.done.iter().any(|line| line.contains(DNSMASQ_FILE)) && system.service().is_some() {
        let remaining = restart(system, &mut undone.done);
        undone.notes.extend(remaining);
    }
    Ok(undone)
}

fn show(page: &mut Page<'_>, report: &Report) -> io::Result<()> {
    let Report { applied, config, plan, install, done, .. } = report;
    let tense = |future: &'static str, past: &'static str| if *applied { past } else { future };
    for file in &plan.files {
        page.line(format!("{} {}:", tense("would write", "wrote"), file.path.display()))?;
        file.text.lines().try_for_each(|line| page.line(format!("    {line}")))?;
    }
    for lan in plan.devices.iter().filter(|_| !applied) {
        match &lan.missing[..] {
            [] => page.line(format!("{} has {} and {}", lan.device, lan.ipv4, lan.ipv6))?,
            nets => nets.iter().try_for_each(|net| page.line(format!("would run: ip address replace {net} dev {}", lan.device)))?,
        }
    }
    if let Some(section) = plan.section.as_ref().filter(|_| !applied) {
        page.line(format!("would add to {}:", config.display()))?;
        section.lines().try_for_each(|line| page.line(format!("    {line}")))?;
    }
    done.iter().try_for_each(|line| page.line(line))?;
    if let Some(install) = install {
        page.line(format!("missing: dnsmasq as a service; install it{}: {install}", tense(" after --apply", "")))?;
    }
    plan.notes.iter().try_for_each(|note| page.line(format!("note: {note}")))?;
    if !applied {
        page.line("nothing was changed; --apply does it, and --undo reverts it")?;
    }
    Ok(())
}

fn show_undone(page: &mut Page<'_>, undone: &Undone) -> io::Result<()> {
    undone.done.iter().try_for_each(|line| page.line(line))?;
    undone
        .left
        .iter()
        .try_for_each(|path| page.line(format!("left alone, because it was edited: {}; change it by hand", path.display())))?;
    undone.notes.iter().try_for_each(|note| page.line(format!("note: {note}")))?;
    if undone.done.is_empty() && undone.left.is_empty() {
        page.line("there is nothing to undo")?;
    }
    Ok(())
}
