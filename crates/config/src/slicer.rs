//! Reads the configuration of a slicer (`braid net slicer --config`). `slicer.example.toml` explains every key.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;

use braid_control::config::Finding;
use braid_model::Rate;
use braid_openflow::ids::DatapathId;
use braid_slice::{Limits, Part, Permission, Ports, SliceSpec, Stage, Wanted, headers};

use super::controller::{Lines, MAX_PORT, NAME_LIMIT, TlsFiles, addresses, datapath, entries, only, rate, station, tls};
use super::reader::{Section, Value};
use super::{ConfigErrors, document};

/// What a slicer does.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SlicerConfig {
    /// Where switches connect; empty: where the program says.
    pub listen: Vec<SocketAddr>,
    /// Where users opt in.
    pub users_listen: Vec<SocketAddr>,
    /// Certificates for the connections of switches; `None`: no TLS.
    pub tls: Option<TlsFiles>,
    /// The slices. They can be as they are described.
    pub wanted: Wanted,
    /// What the file has that does no harm.
    pub warnings: Vec<Finding>,
}

/// The largest numbers of things in a slice.
const MAX_ENTRIES: u64 = 1_000_000;
const MAX_RATE: u64 = 1_000_000;
const MAX_QUEUE: u64 = 0xffff_fffe;

/// Reads a file.
pub fn load(path: &Path) -> Result<SlicerConfig, ConfigErrors> {
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&name, &text),
        Err(error) => Err(ConfigErrors::Unreadable { path: name, error }),
    }
}

/// Parses a document; `file` names it in findings.
pub fn parse(file: &str, text: &str) -> Result<SlicerConfig, ConfigErrors> {
    let (config, warnings) = document(file, text, "slicer.example.toml shows the format", config_of)?;
    Ok(SlicerConfig { warnings, ..config })
}

fn config_of(mut section: Section<'_>) -> SlicerConfig {
    let (reader, span) = (section.reader, section.span.clone());
    let listen = section.take("listen").map(|value| addresses(&value, "\"192.0.2.1:6653\"")).unwrap_or_default();
    let users_listen = section.take("users_listen").map(|value| addresses(&value, "\"192.0.2.1:2210\"")).unwrap_or_default();
    let tls = section.take("tls").and_then(|value| value.section("[tls]")).and_then(tls);
    let mut names = Lines::new();
    let slices = entries(&mut section, "slice", "a [[slice]] entry", |section| slice(section, &mut names));
    section.finish();
    let wanted = Wanted { slices: slices.into_iter().collect(), ..Wanted::default() };
    if let Err(error) = wanted.check() {
        reader.refuse(&span, error.to_string(), "correct the [[slice]] entries that it names");
    }
    SlicerConfig { listen, users_listen, tls, wanted, warnings: Vec::new() }
}

fn slice(mut section: Section<'_>, names: &mut Lines<String>) -> Option<(String, SliceSpec)> {
    let reader = section.reader;
    let text = |value: &Value<'_>| value.text().map(str::to_owned);
    let name = section.need("name", "write name = \"guests\"").and_then(|value| {
        let text = name_of(&value)?;
        only(names, text.clone(), reader, &value.span, "a slice with this name").map(|()| text)
    });
    let controllers = section.take("controllers").and_then(|value| value.list()).unwrap_or_default();
    let controllers = controllers.iter().filter_map(controller).collect();
    let priority = section.take("priority").and_then(|value| value.whole(0..=3)).unwrap_or_default() as u8;
    let within = section.take("within").and_then(|value| text(&value));
    let opt_in = section.take("opt_in").and_then(|value| value.flag()).unwrap_or_default();
    let stage = section.take("stage").and_then(|value| value.section("stage")).and_then(stage);
    let rate: Option<Rate> = section.take("rate").and_then(|value| rate(&value));
    let queues = section.take("queues").and_then(|value| value.list()).unwrap_or_default();
    let queues = queues.iter().filter_map(|value| value.whole(0..=MAX_QUEUE)).map(|queue| queue as u32).collect();
    let usual = Limits::default();
    let mut limit = |key, most, usual: u64| section.take(key).and_then(|value| value.whole(1..=most)).unwrap_or(usual);
    let limits = Limits {
        entries: limit("max_entries", MAX_ENTRIES, usual.entries as u64) as usize,
        from_controller: limit("max_messages", MAX_RATE, usual.from_controller.into()) as u32,
        to_controller: limit("max_packets", MAX_RATE, usual.to_controller.into()) as u32,
        ..usual
    };
    let space = entries(&mut section, "space", "a [[slice.space]] entry", parts);
    section.finish();
    let name = name?;
    let space: Vec<Part> = space.into_iter().flatten().collect();
    Some((name, SliceSpec { controllers, priority, space, within, opt_in, stage, rate, queues, limits }))
}

fn name_of(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    if text.is_empty() || text.len() > NAME_LIMIT || text.chars().any(char::is_control) {
        return value.refuse(format!("{text:?} is no name"), format!("write 1 to {NAME_LIMIT} bytes"));
    }
    Some(text.to_owned())
}

fn controller(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    let is_address = text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
    if is_address {
        Some(text.to_owned())
    } else {
        value.refuse(format!("{text:?} has no host and port"), "write \"127.0.0.1:6654\"".into())
    }
}

fn stage(mut section: Section<'_>) -> Option<Stage> {
    let of =
        section.need("of", "write of = \"guests\": the slice of which some hosts get this controller").and_then(|value| name_of(&value));
    let hosts = section.take("hosts").and_then(|value| value.list()).unwrap_or_default();
    let hosts: BTreeSet<_> = hosts.iter().filter_map(station).collect();
    let percent = section.take("percent").and_then(|value| value.whole(0..=100)).unwrap_or_default() as u8;
    section.finish();
    Some(Stage { of: of?, hosts, percent })
}

/// The parts that an entry describes: one for senders, one for receivers, and so on.
fn parts(mut section: Section<'_>) -> Option<Vec<Part>> {
    let mut refused = false;
    let switch = section.condition("switch", &mut refused, datapath).map(DatapathId);
    let ports = section.condition("ports", &mut refused, |value| {
        let ports: Option<BTreeSet<u32>> = value.list()?.iter().map(|port| port.whole(1..=MAX_PORT).map(|port| port as u32)).collect();
        Some(ports?).filter(|ports| !ports.is_empty()).or_else(|| value.refuse("ports is empty".into(), "remove it, for all ports".into()))
    });
    let matching = section.condition("match", &mut refused, |value| {
        let text = value.text()?;
        headers(text).map_or_else(|error| value.refuse(error.to_string(), "write such as match = \"vlan=10\"".into()), Some)
    });
    let usual = Permission::default();
    let mut flag = |key, usual: bool| section.take(key).and_then(|value| value.flag()).unwrap_or(usual);
    let permission =
        Permission { read: flag("read", usual.read), write: flag("write", usual.write), delegate: flag("delegate", usual.delegate) };
    section.finish();
    if refused {
        return None;
    }
    let ports = ports.map_or(Ports::All, Ports::Only);
    let headers = matching.unwrap_or_else(|| vec![braid_slice::space::Header::ANY]);
    Some(headers.into_iter().map(|header| Part { switch, ports: ports.clone(), header, permission }).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../slicer.example.toml"));

    fn errors(text: &str) -> String {
        parse("slicer.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn the_example_is_read_with_all_its_parts() {
        assert!(parse("slicer.example.toml", EXAMPLE).is_ok());
        let all: String = EXAMPLE.lines().map(|line| line.strip_prefix("#: ").unwrap_or(line).to_owned() + "\n").collect();
        let config = parse("slicer.example.toml", &all).unwrap_or_else(|errors| panic!("{errors}"));
        assert!(config.tls.is_some() && config.wanted.slices.len() >= 4 && config.warnings.is_empty());
        assert!(config.wanted.slices.values().any(|slice| slice.stage.is_some()));
    }

    #[test]
    fn errors_name_the_place_and_the_remedy() {
        let space = "[[slice.space]]\n";
        for (text, expected) in [
            ("[[slice]]\nname = \"a\"\ncontrollers = [\"x\"]\n", "has no host and port"),
            ("[[slice]]\nname = \"a\"\npriority = 4\n", "priority"),
            (&format!("[[slice]]\nname = \"a\"\n{space}match = \"colour=red\"\n"), "there is no condition \"colour\""),
            (&format!("[[slice]]\nname = \"production\"\n{space}"), "give it no space"),
            (&format!("[[slice]]\nname = \"a\"\n{space}ports = []\n"), "ports is empty"),
            (&format!("[[slice]]\nname = \"a\"\n{space}[[slice]]\nname = \"b\"\n{space}"), "slices a and b overlap"),
            ("[slice]\nname = \"a\"\n", "[[slice]]"),
            ("[[slice]]\nname = \"a\"\nstage = { of = \"b\" }\n", "there is no slice b"),
        ] {
            let found = errors(text);
            assert!(found.contains(expected), "{text}: {found}");
        }
    }
}
