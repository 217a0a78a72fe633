//! Reads the configuration of a network's controller (`braid net controller --config`). `controller.example.toml` explains every key.

mod programs;
#[cfg(test)]
mod tests;

pub use programs::SfnetSettings;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use braid_control::config::Finding;
use braid_decide::policy::Portion;
use braid_model::key::PublicKey;
use braid_model::{Mac, Rate};
use braid_network::mobility::{FlowMode, NAMES};
use braid_network::paths::Weight;
use braid_network::sfnet::HostRights;
use braid_network::{Access, AccessId, AccessKind, Channel, FlowSpec, GroupSpec, Place, group_address};

use super::links::mac;
use super::reader::{Reader, Section, Value};
use super::{ConfigErrors, document};

/// What a controller does.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ControllerConfig {
    /// Where switches connect; empty: where the program says.
    pub listen: Vec<SocketAddr>,
    /// The mobility manager of hosts for which none is chosen; one of [`NAMES`].
    pub manager: Option<String>,
    /// For how long managers keep an old attachment.
    pub hold: Option<Duration>,
    /// Certificates for the connections of switches; `None`: no TLS.
    pub tls: Option<TlsFiles>,
    /// Where clients connect.
    pub clients_listen: Vec<SocketAddr>,
    /// Programs that ask the network; `None`: they are not served.
    pub sfnet: Option<SfnetSettings>,
    /// Access points. Neither an address nor a place is there twice.
    pub accesses: Vec<Access>,
    /// Weights of links, by the port at either end. No port is there twice.
    pub weights: Vec<(Place, Weight)>,
    /// Slices. No name is there twice.
    pub slices: Vec<SliceSettings>,
    /// Hosts. Neither an address nor a key is there twice.
    pub hosts: Vec<HostSettings>,
    /// Multicast groups. No Ethernet address is there twice.
    pub groups: Vec<GroupSpec>,
    /// Chosen flows. No specification is there twice.
    pub flows: Vec<(FlowSpec, FlowMode)>,
    /// What the file has that does no harm.
    pub warnings: Vec<Finding>,
}

/// Files in PEM format for the connections of switches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The controller's certificate, with those between it and its root.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Roots of the switches' certificates.
    pub ca: PathBuf,
}

/// A slice: hosts whose mobility manager is chosen together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceSettings {
    /// Its name.
    pub name: String,
    /// Its mobility manager.
    pub manager: Option<String>,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSettings {
    /// Its Ethernet address.
    pub mac: Mac,
    /// Its key, by which it may report where it is.
    pub key: Option<PublicKey>,
    /// Its mobility manager.
    pub manager: Option<String>,
    /// Name of its slice.
    pub slice: Option<String>,
    /// The most that it sends and receives.
    pub limit: Option<Rate>,
    /// What its programs may ask the network; `None`: what all may.
    pub programs: Option<HostRights>,
}

const KINDS: [(&str, AccessKind); 3] = [("wired", AccessKind::Wired), ("wifi", AccessKind::Wifi), ("cellular", AccessKind::Cellular)];
/// Numbers of IP protocols.
const PROTOCOLS: [(&str, u8); 3] = [("icmp", 1), ("tcp", 6), ("udp", 17)];
/// The largest number of a port. Source: OpenFlow 1.3.5 section 7.2.1 (`OFPP_MAX`).
pub(super) const MAX_PORT: u64 = 0xffff_ff00;
/// The least rate that meters express.
const LEAST_LIMIT: Rate = Rate::from_bps(1000);
/// What clients may reserve of an access point that does not say it, and the most that one may say.
const RESERVABLE: Portion = Portion::Share(0.5);
const MOST_RESERVABLE: f64 = 0.9;
/// Most copies of a flow.
const MAX_COPIES: u64 = 8;
/// Weights of links: the usual one, which each end has, and the largest one, with which sums of a path stay below 2^32.
const WEIGHTS: std::ops::RangeInclusive<u64> = 10..=100_000;
/// Longest name of a slice in bytes.
pub(super) const NAME_LIMIT: usize = 64;

/// Lines in which something was named.
pub(super) type Lines<K> = BTreeMap<K, usize>;

/// Reads a file.
pub fn load(path: &Path) -> Result<ControllerConfig, ConfigErrors> {
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&name, &text),
        Err(error) => Err(ConfigErrors::Unreadable { path: name, error }),
    }
}

/// Parses a document; `file` names it in findings.
pub fn parse(file: &str, text: &str) -> Result<ControllerConfig, ConfigErrors> {
    let (config, warnings) = document(file, text, "controller.example.toml shows the format", config_of)?;
    Ok(ControllerConfig { warnings, ..config })
}

fn config_of(mut section: Section<'_>) -> ControllerConfig {
    let listen = section.take("listen").map(|value| addresses(&value, "\"192.0.2.1:6653\"")).unwrap_or_default();
    let manager = section.take("manager").and_then(|value| manager(&value));
    let hold = section.take("hold").and_then(|value| value.duration());
    let tls = section.take("tls").and_then(|value| value.section("[tls]")).and_then(tls);
    let clients = section.take("clients").and_then(|value| value.section("[clients]"));
    let clients_listen = clients.map(clients_listen).unwrap_or_default();
    let sfnet = section.take("sfnet").and_then(|value| value.section("[sfnet]")).map(programs::sfnet);
    let (mut ids, mut places) = (Lines::new(), Lines::new());
    let accesses = entries(&mut section, "access", "an [[access]] entry", |section| access(section, &mut ids, &mut places));
    let mut ends = Lines::new();
    let weights = entries(&mut section, "link", "a [[link]] entry", |section| link(section, &mut ends));
    let mut names = Lines::new();
    let slices = entries(&mut section, "slice", "a [[slice]] entry", |section| slice(section, &mut names));
    let (mut macs, mut keys) = (Lines::new(), Lines::new());
    let hosts = entries(&mut section, "host", "a [[host]] entry", |section| host(section, &slices, &mut macs, &mut keys));
    let mut addresses = Lines::new();
    let groups = entries(&mut section, "group", "a [[group]] entry", |section| group(section, &mut addresses));
    let mut specs = Lines::new();
    let flows = entries(&mut section, "flow", "a [[flow]] entry", |section| flow(section, &mut specs));
    section.finish();
    let warnings = Vec::new();
    ControllerConfig { listen, manager, hold, tls, clients_listen, sfnet, accesses, weights, slices, hosts, groups, flows, warnings }
}

/// The entries of a list of tables.
pub(super) fn entries<T>(
    document: &mut Section<'_>,
    key: &'static str,
    what: &'static str,
    mut read: impl FnMut(Section<'_>) -> Option<T>,
) -> Vec<T> {
    let values = document.take(key).and_then(|value| value.list()).unwrap_or_default();
    values.iter().filter_map(|value| read(value.section(what)?)).collect()
}

/// Refuses what an earlier line names.
pub(super) fn only<K: Ord>(lines: &mut Lines<K>, key: K, reader: &Reader<'_>, span: &Range<usize>, what: &str) -> Option<()> {
    match lines.entry(key) {
        Entry::Vacant(entry) => {
            entry.insert(reader.line(span));
            Some(())
        }
        Entry::Occupied(entry) => {
            reader.refuse(span, format!("line {} has {what}, too", entry.get()), "remove one of the two, or change it");
            None
        }
    }
}

pub(super) fn addresses(value: &Value<'_>, example: &str) -> Vec<SocketAddr> {
    let (mut lines, wanted) = (Lines::new(), format!("an address with a port such as {example}"));
    let address = |value: &Value<'_>| {
        let address: SocketAddr = value.parsed(&wanted)?;
        only(&mut lines, address, value.reader, &value.span, "this address").map(|()| address)
    };
    value.list().unwrap_or_default().iter().filter_map(address).collect()
}

fn manager(value: &Value<'_>) -> Option<String> {
    value.one_of(&NAMES.map(|name| (name, name))).map(str::to_owned)
}

pub(super) fn tls(mut section: Section<'_>) -> Option<TlsFiles> {
    let mut path = |key, remedy| section.need(key, remedy).and_then(|value| value.whole_path("\"/etc/braid/net-key.pem\""));
    let certificate = path("certificate", "write certificate = \"/etc/braid/net-cert.pem\": the controller's certificate");
    let key = path("key", "write key = \"/etc/braid/net-key.pem\": the private key of the certificate");
    let ca = path("ca", "write ca = \"/etc/braid/switch-ca.pem\": the certificate that signs those of the switches");
    section.finish();
    Some(TlsFiles { certificate: certificate?, key: key?, ca: ca? })
}

fn clients_listen(mut section: Section<'_>) -> Vec<SocketAddr> {
    let listen = section.take("listen").map(|value| addresses(&value, "\"192.0.2.1:2209\"")).unwrap_or_default();
    section.finish();
    listen
}

fn access(mut section: Section<'_>, ids: &mut Lines<Mac>, places: &mut Lines<Place>) -> Option<Access> {
    let (reader, span) = (section.reader, section.span.clone());
    let remedy = "write id = \"02:00:5e:10:00:01\": the BSSID, or an address that no other access point has";
    let id = section.need("id", remedy).and_then(|value| {
        let id = station(&value)?;
        only(ids, id, reader, &value.span, "an access point with this id").map(|()| id)
    });
    let switch = section.need("switch", "write switch = \"1\": its datapath, as `braid net status` shows it");
    let switch = switch.and_then(|value| datapath(&value));
    let port = section.need("port", "write port = 1: the number of its port at the switch").and_then(|value| value.whole(1..=MAX_PORT));
    let kind = section.take("kind").and_then(|value| value.one_of(&KINDS)).unwrap_or_default();
    let channel = section.take("channel").and_then(|value| value.whole(0..=u64::from(u16::MAX))).unwrap_or_default();
    let entry = section.take("entry").and_then(|value| value.duration()).unwrap_or_default();
    let capacity = section.need("capacity", "write capacity = \"100 Mbit/s\": what it carries in each direction");
    let capacity = capacity.and_then(|value| rate(&value));
    let reservable = section.take("reservable").map_or(Some(RESERVABLE), |value| reservable(&value, capacity));
    section.finish();
    let place = Place::new(switch?, port? as u32);
    only(places, place, reader, &span, "an access point at this port")?;
    let (capacity, channel) = (capacity?, Channel(channel as u16));
    let reservable = reservable?.of(Some(capacity)).unwrap_or_default();
    Some(Access { id: AccessId(id?), place, kind, channel, entry, capacity, reservable })
}

/// What clients may reserve of an access point.
fn reservable(value: &Value<'_>, capacity: Option<Rate>) -> Option<Portion> {
    const WANTED: &str = "a rate such as \"8 Mbit/s\", or a percentage of the capacity such as \"50 %\"; 0 for none";
    if let Some(percent) = value.is_text().then(|| value.text()).flatten().and_then(|text| text.trim().strip_suffix('%')) {
        let number = percent.trim().parse::<f64>().ok().filter(|number| (0.0..=MOST_RESERVABLE * 100.0).contains(number));
        return match number {
            Some(number) => Some(Portion::Share(number / 100.0)),
            None => {
                value.refuse(format!("{percent:?} is not a percentage from 0 to {}", MOST_RESERVABLE * 100.0), format!("write {WANTED}"))
            }
        };
    }
    let rate: Rate = value.quantity(WANTED)?;
    match capacity.map(|capacity| capacity.scale(MOST_RESERVABLE)).filter(|most| rate > *most) {
        Some(most) => value.refuse(
            format!("{rate} leaves too little to hosts without a reservation"),
            format!("write at most {most}, which is {} % of the capacity", MOST_RESERVABLE * 100.0),
        ),
        None => Some(Portion::Rate(rate)),
    }
}

fn link(mut section: Section<'_>, ends: &mut Lines<Place>) -> Option<(Place, Weight)> {
    let (reader, span) = (section.reader, section.span.clone());
    let switch = section.need("switch", "write switch = \"1\": the datapath of the switch at one end, as `braid net status` shows it");
    let switch = switch.and_then(|value| datapath(&value));
    let port = section.need("port", "write port = 1: the number of the link's port there").and_then(|value| value.whole(1..=MAX_PORT));
    let weight = section.need("weight", "write weight = 100: paths with a smaller sum are taken, and other links have 10");
    let weight = weight.and_then(|value| value.whole(WEIGHTS));
    section.finish();
    let place = Place::new(switch?, port? as u32);
    only(ends, place, reader, &span, "a link at this port")?;
    Some((place, Weight(weight? as u32)))
}

fn slice(mut section: Section<'_>, names: &mut Lines<String>) -> Option<SliceSettings> {
    let reader = section.reader;
    let name = section.need("name", "write name = \"guests\"").and_then(|value| {
        let text = value.text()?;
        if text.is_empty() || text.len() > NAME_LIMIT || text.chars().any(char::is_control) {
            return value.refuse(format!("{text:?} is no name"), format!("write 1 to {NAME_LIMIT} bytes"));
        }
        only(names, text.to_owned(), reader, &value.span, "a slice with this name").map(|()| text.to_owned())
    });
    let manager = section.take("manager").and_then(|value| manager(&value));
    section.finish();
    Some(SliceSettings { name: name?, manager })
}

fn host(mut section: Section<'_>, slices: &[SliceSettings], macs: &mut Lines<Mac>, keys: &mut Lines<PublicKey>) -> Option<HostSettings> {
    let reader = section.reader;
    let address = section.need("mac", "write mac = \"02:00:5e:10:00:02\": the host's Ethernet address").and_then(|value| {
        let address = station(&value)?;
        only(macs, address, reader, &value.span, "a host with this address").map(|()| address)
    });
    let key = section.take("key").and_then(|value| {
        let key = public_key(&value)?;
        only(keys, key, reader, &value.span, "a host with this key").map(|()| key)
    });
    let manager = section.take("manager").and_then(|value| manager(&value));
    let slice = section.take("slice").and_then(|value| {
        let text = value.text()?;
        let names = || slices.iter().map(|slice| slice.name.as_str());
        if names().any(|name| name == text) {
            return Some(text.to_owned());
        }
        value.refuse_name("slice", text, names(), format!("add a [[slice]] entry with name = {text:?}"))
    });
    let limit = section.take("limit").and_then(|value| {
        let limit = rate(&value)?;
        if limit >= LEAST_LIMIT {
            Some(limit)
        } else {
            value.refuse(format!("{limit} is too low"), format!("write at least {LEAST_LIMIT}"))
        }
    });
    let programs = section.take("programs").and_then(|value| programs::rights(&value));
    section.finish();
    Some(HostSettings { mac: address?, key, manager, slice, limit, programs })
}

fn group(mut section: Section<'_>, addresses: &mut Lines<Mac>) -> Option<GroupSpec> {
    let reader = section.reader;
    let address = section.need("address", "write address = \"239.1.2.3\": the multicast address").and_then(|value| {
        let address: IpAddr = value.parsed("a multicast address such as \"239.1.2.3\" or \"ff0e::1\"")?;
        let Some(ethernet) = group_address(address) else {
            return value.refuse(format!("{address} is no multicast address"), "write one such as \"239.1.2.3\" or \"ff0e::1\"".into());
        };
        // Groups whose addresses differ in the first bits only are one group for Ethernet.
        only(addresses, ethernet, reader, &value.span, "a group with this address on Ethernet").map(|()| address)
    });
    let mut lines = Lines::new();
    let member = |value: &Value<'_>| {
        let member = station(value)?;
        only(&mut lines, member, reader, &value.span, "this member").map(|()| member)
    };
    let members = section.need("members", "write members = [\"02:00:5e:10:00:02\"]: the hosts' Ethernet addresses");
    let members = members.and_then(|value| value.list()).unwrap_or_default().iter().filter_map(member).collect();
    section.finish();
    Some(GroupSpec { address: address?, members })
}

fn flow(mut section: Section<'_>, specs: &mut Lines<FlowSpec>) -> Option<(FlowSpec, FlowMode)> {
    let (reader, span) = (section.reader, section.span.clone());
    let to = section.need("to", "write to = \"02:00:5e:10:00:02\": the host that receives it").and_then(|value| station(&value));
    let from = section.take("from").and_then(|value| station(&value));
    let protocol = section.take("protocol").and_then(|value| protocol(&value));
    let port = section.take("port").and_then(|value| {
        let port = value.whole(1..=u64::from(u16::MAX))? as u16;
        if matches!(protocol, Some(6 | 17)) {
            return Some(port);
        }
        value.refuse("a flow with a port needs a protocol that has ports".into(), "add protocol = \"tcp\" or \"udp\"".into())
    });
    let copies = section.take("copies").and_then(|value| value.whole(2..=MAX_COPIES));
    section.finish();
    let spec = FlowSpec { to: to?, from, protocol, port };
    only(specs, spec, reader, &span, "an entry with the same flow")?;
    Some((spec, copies.map_or(FlowMode::Movable, |copies| FlowMode::Copies(copies as u8))))
}

fn protocol(value: &Value<'_>) -> Option<u8> {
    if value.is_text() { value.one_of(&PROTOCOLS) } else { value.whole(0..=u64::from(u8::MAX)).map(|number| number as u8) }
}

/// The address of one station.
pub(super) fn station(value: &Value<'_>) -> Option<Mac> {
    let address = mac(value)?;
    if address.0[0] & 1 == 0 {
        return Some(address);
    }
    value.refuse(format!("{address} is the address of several stations"), "write the address of one network device".into())
}

pub(super) fn datapath(value: &Value<'_>) -> Option<u64> {
    let text = value.text()?;
    // The conversion alone would accept a sign.
    let number = text.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| u64::from_str_radix(text, 16).ok()).flatten();
    let remedy = "write 1 to 16 hexadecimal digits, as `braid net status` shows them";
    number.or_else(|| value.refuse(format!("{text:?} is not the datapath of a switch"), remedy.into()))
}

fn public_key(value: &Value<'_>) -> Option<PublicKey> {
    match value.text()?.parse::<PublicKey>() {
        Ok(key) => Some(key),
        Err(error) => value.refuse(error.to_string(), "write the key that `braid net key` prints on the host".into()),
    }
}

pub(super) fn rate(value: &Value<'_>) -> Option<Rate> {
    let rate: Rate = value.quantity("a rate such as \"20 Mbit/s\"")?;
    if rate == Rate::ZERO { value.refuse(format!("{} is zero", value.key), "write a rate above 0".into()) } else { Some(rate) }
}
