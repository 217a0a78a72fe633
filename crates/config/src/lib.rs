//! Reads the configuration file: one TOML document. `braid.example.toml` explains every key, `controller.example.toml` those of [`controller`], `slicer.example.toml`
//! those of [`slicer`].
//!
//! All errors of a file are reported at once, each with its position, reason and remedy.

#![forbid(unsafe_code)]

mod adhoc;
mod apps;
pub mod controller;
mod datapath;
mod detect;
mod energy;
mod findings;
mod gateway;
mod late;
mod links;
mod named_file;
mod network;
pub mod profiles;
mod reader;
pub mod settings;
pub mod slicer;
pub mod snmp_slicer;
mod targets;
#[cfg(test)]
mod tests;
mod when;
mod world;

use std::path::{Path, PathBuf};
use std::time::Duration;

use braid_control::config::{Config, Finding, Measure, Severity};
use braid_decide::policy::{BondScheduler, ProbeMode, Scheduler};
use braid_model::{Affinity, ByteCount};
use toml::de::DeTable;

pub use findings::ConfigErrors;
use reader::{Reader, Section, Value};
pub use world::{Files, World};

/// Reads a file at the start of the daemon: names that this machine does not have are warnings. `relays` are the joined ones, if known.
pub fn load(path: &Path, relays: Option<Vec<String>>) -> Result<Config, ConfigErrors> {
    read(path, &World { relays, ..World::here(false) })
}

/// Reads a file for `reload`: links, relays and users that this machine does not have are errors.
pub fn check(path: &Path, relays: Option<Vec<String>>) -> Result<Config, ConfigErrors> {
    read(path, &World { relays, files: Files::AskWithoutListing, ..World::here(true) })
}

/// Reads a file and checks it against `world`.
pub fn read(path: &Path, world: &World) -> Result<Config, ConfigErrors> {
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&name, &text, world),
        Err(error) => Err(ConfigErrors::Unreadable { path: name, error }),
    }
}

/// Parses a document; `file` names it in findings.
pub fn parse(file: &str, text: &str, world: &World) -> Result<Config, ConfigErrors> {
    let (config, warnings) = document(file, text, "braid.example.toml shows the format", |section| document_of(section, world))?;
    Ok(Config { warnings, ..config })
}

/// What `read` makes of a document, and its warnings. `format` is the remedy for a text that is no TOML.
fn document<T: Default>(
    file: &str,
    text: &str,
    format: &str,
    read: impl FnOnce(Section<'_>) -> T,
) -> Result<(T, Vec<Finding>), ConfigErrors> {
    let reader = Reader::new(file, text);
    let (document, broken) = DeTable::parse_recoverable(text);
    for error in &broken {
        let span = error.span().unwrap_or(0..0);
        reader.refuse(&span, error.message().trim(), format);
    }
    // A malformed document is not read further: the rest would only produce meaningless findings.
    let mut parsed = T::default();
    if broken.is_empty() {
        parsed = read(Section::new(&reader, "the configuration", document.span(), document.get_ref()));
    }
    let findings = reader.into_findings();
    if findings.iter().any(|finding| finding.severity == Severity::Error) {
        return Err(ConfigErrors::Refused(findings));
    }
    Ok((parsed, findings))
}

/// The names of [`Affinity`].
const AFFINITIES: [(&str, Affinity); 3] =
    [("none", Affinity::None), ("destination", Affinity::Destination), ("application", Affinity::Application)];

/// Reads a [`ProbeMode`].
fn probe_mode(value: &reader::Value<'_>) -> Option<ProbeMode> {
    let names = [("continuous", ProbeMode::Continuous), ("on-demand", ProbeMode::OnDemand)];
    value.one_of_renamed(&names, &[("eager", "continuous"), ("sparing", "on-demand")])
}

fn document_of(mut section: Section<'_>, world: &World) -> Config {
    let mut config = Config::default();
    if let Some(version) = section.take("version")
        && let Some(number) = version.whole(0..=u64::MAX)
        && number != 1
    {
        version.reader.refuse(&version.span, format!("version {number} of the format is not supported"), "write version = 1, or omit it");
    }
    if let Some(scheduler) = section.take("scheduler").and_then(|value| value.one_of(&Scheduler::ALL.map(|one| (one.name(), one)))) {
        config.policy.scheduler = scheduler;
    }
    (config.policy.bonds_all, config.policy.relay) = apps::carry_all(&mut section, world);
    config.policy.fallback = apps::fallback(&mut section, config.policy.bonds_all).unwrap_or_default();
    if let Some(bond) = section.take("bond").and_then(|value| value.section("[bond]")) {
        config.policy.bond_scheduler = bond_scheduler(bond);
    }
    config.policy.affinity = section.take("affinity").and_then(|value| value.one_of(&AFFINITIES));
    if let Some(demand) = section.take("default_demand").and_then(|value| value.quantity("an amount of data such as \"1 MB\"")) {
        config.policy.default_demand = demand;
    }
    if let Some(mode) = section.take("probe").and_then(|value| probe_mode(&value)) {
        config.probe = mode;
    }
    config.probe_targets = section.take("probe_targets").map(targets::probe_targets).unwrap_or_default();
    config.move_connects = section.take("move_connects").and_then(|value| value.flag()).unwrap_or(true);
    if let Some(value) = section.take_renamed("reconnect_after", "destroy_stuck_after") {
        let never = value.is_text() && value.text() == Some("never");
        config.reconnect_after = if never { None } else { value.duration().or(config.reconnect_after) };
    }
    config.destroy_pinned = section.take("destroy_pinned").and_then(|value| value.flag()).unwrap_or(false);
    if let Some(value) = section.take("detect") {
        detect::detect(&value, &mut config);
    }
    if let Some(measure) = section.take("measure").and_then(|value| value.section("[measure]")) {
        config.measure = measure_of(measure, config.measure);
    }
    if let Some(utility) = section.take("utility").and_then(|value| energy::utility(&value)) {
        config.policy.utility = utility;
    }
    if let Some(hysteresis) = section.take_renamed("hysteresis", "maxdiff").and_then(|value| value.duration()) {
        config.policy.hysteresis = hysteresis;
    }
    config.policy.power_saving = section.take("power_saving").and_then(|value| value.flag()).unwrap_or(false);
    if let Some(weights) = section.take("price").and_then(|value| energy::weights(&value)) {
        config.policy.weights = weights;
    }
    if let Some((path, profiles)) = section.take("energy_profiles").and_then(|value| energy::profiles(&value, world)) {
        config.energy_profiles = Some(path);
        config.profiles = profiles;
    }
    let service = section.take("energy_service");
    config.energy_service = energy::service(service.as_ref(), section.take("energy_service_key").as_ref());
    let links = section.take("link").map(|value| links::entries(value, &config.profiles, world)).unwrap_or_default();
    let exclude = section.take("exclude").and_then(|value| value.section("[exclude]"));
    config.policy.exclude = exclude.map(|exclude| apps::exclusions(exclude, world, config.policy.confines(None))).unwrap_or_default();
    config.policy.apps = section.take("app").map(|value| apps::entries(value, &links, &config.policy, world)).unwrap_or_default();
    config.policy.links = links.into_iter().map(|link| link.rule).collect();
    if let Some(gateway) = section.take("gateway").and_then(|value| value.section("[gateway]")) {
        (config.policy.lan, config.policy.fast_path) = gateway::lan(gateway, &config.policy.links);
    }
    config.policy.late = section.take("late").and_then(|value| late::late(&value));
    if let Some(section) = section.take("virtual").and_then(|value| value.section("[virtual]")) {
        config.policy.virtual_device = gateway::virtual_device(section, &config.policy.links, &config.policy.lan);
    }
    config.adhoc = section.take("adhoc").and_then(|value| value.section("[adhoc]")).and_then(adhoc::adhoc);
    let datapath = section.take("datapath").and_then(|value| value.section("[datapath]"));
    config.datapath = datapath.and_then(|section| datapath::datapath(section, world));
    if let Some(value) = section.take("network") {
        config.network = value.section("[network]").and_then(network::network);
        if config.adhoc.is_some() {
            let remedy =
                "take one of them out; a second device is made by `braid net join` or `braid adhoc up --socket`, in a process of its own";
            value.reader.refuse(&value.span, "[network] and [adhoc] are both there, and the daemon has one such device", remedy);
        }
    }
    section.finish();
    config
}

/// `[bond]`: the rule by which bonds choose paths.
fn bond_scheduler(mut section: Section<'_>) -> Option<BondScheduler> {
    let scheduler = section.take("scheduler").and_then(|value| value.one_of(&BondScheduler::ALL.map(|one| (one.name(), one))));
    let copies = section.take("copies").and_then(|value| {
        let copies = value.whole(2..=8)?;
        if !matches!(scheduler, Some(BondScheduler::Redundant(_))) {
            value.reader.refuse(&value.span, "only scheduler = \"redundant\" takes copies", "take copies out, or write that scheduler");
        }
        Some(copies as u8)
    });
    section.finish();
    match (scheduler, copies) {
        (Some(BondScheduler::Redundant(_)), Some(copies)) => Some(BondScheduler::Redundant(copies)),
        (scheduler, _) => scheduler,
    }
}

fn measure_of(mut section: Section<'_>, default: Measure) -> Measure {
    let servers = section.take("servers").map(targets::servers).unwrap_or_default();
    let every = section.take("every").and_then(|value| {
        let every = value.duration()?;
        let enough = every >= Duration::from_secs(60);
        if enough { Some(every) } else { value.refuse("every is less than a minute".into(), "write at least \"1 min\"".into()) }
    });
    let connections = section.take("connections").and_then(|value| value.whole(1..=8));
    let amount = |value: Value<'_>| {
        let amount: ByteCount = value.quantity("an amount of data such as \"32 MB\"")?;
        let enough = amount >= ByteCount::new(1_000_000);
        if enough {
            Some(amount)
        } else {
            value.refuse(format!("{} is less than 1 MB, too little for a measurement", value.key), "write at least \"1 MB\"".into())
        }
    };
    let max_bytes = section.take("max_bytes").and_then(amount);
    let max_daily = section.take("max_daily").and_then(amount);
    let certificates = section.take("certificates").and_then(|value| value.text()).map(PathBuf::from);
    section.finish();
    Measure {
        servers,
        every: every.unwrap_or(default.every),
        connections: connections.map_or(default.connections, |count| count as u8),
        max_bytes: max_bytes.unwrap_or(default.max_bytes),
        max_daily: max_daily.unwrap_or(default.max_daily),
        certificates,
    }
}
