//! Reads the configuration of the slicer of SNMP (`braid net snmp-slicer`). `snmp-slicer.example.toml` explains every key.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use braid_control::config::Finding;
use braid_snmp::{AuthProtocol, Bounds, Limits, Oid, Part, Policy, Shared, View, parts};
use ipnet::IpNet;

use super::controller::{Lines, entries, only};
use super::reader::{Section, Value};
use super::{ConfigErrors, document};

/// What a slicer does.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SlicerConfig {
    /// The devices. No name and no address to listen on is there twice.
    pub devices: Vec<DeviceSettings>,
    /// The slices. No name is there twice. No two may set the same object, except what is shared.
    pub slices: Vec<SliceSettings>,
    /// What slices share. No object is there twice.
    pub shared: Vec<Shared>,
    /// Limits of all managers.
    pub limits: Limits,
    /// What the file has that does no harm.
    pub warnings: Vec<Finding>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSettings {
    /// Its name.
    pub name: String,
    /// Where managers ask for it.
    pub listen: SocketAddr,
    /// Where its agent is.
    pub agent: SocketAddr,
    /// Where its notifications arrive.
    pub notifications: Option<SocketAddr>,
    /// By what its agent knows the slicer.
    pub credentials: CredentialFiles,
    /// Time to answer in.
    pub timeout: Duration,
    /// How often a request is sent again.
    pub retries: u32,
}

/// A slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceSettings {
    /// Its name.
    pub name: String,
    /// What it sees of devices, by their places.
    pub views: BTreeMap<usize, View>,
    /// Its managers.
    pub managers: Vec<ManagerSettings>,
}

/// A manager of a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagerSettings {
    /// By what it is known. No two managers have the same user.
    pub credentials: CredentialFiles,
    /// Where it may ask from.
    pub from: Vec<IpNet>,
    /// Whether it may set what its slice may.
    pub write: bool,
    /// Requests a second.
    pub rate: u32,
    /// Where it takes notifications.
    pub notify: Option<SocketAddr>,
}

/// Files with secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialFiles {
    /// SNMPv2c: the file of the community.
    Community(PathBuf),
    /// SNMPv3.
    User {
        /// The user.
        name: String,
        /// How messages are authenticated.
        auth: AuthProtocol,
        /// The file of the authentication password.
        auth_file: PathBuf,
        /// The file of the privacy password; `None`: nothing is encrypted.
        privacy_file: Option<PathBuf>,
    },
}

const PROTOCOLS: [(&str, AuthProtocol); 4] =
    [("sha1", AuthProtocol::Sha1), ("sha256", AuthProtocol::Sha256), ("sha384", AuthProtocol::Sha384), ("sha512", AuthProtocol::Sha512)];
/// Longest name of a device, slice or user in bytes. Source: RFC 3414 section 5 (SnmpAdminString of 1 to 32 bytes).
const NAME_LIMIT: usize = 32;
/// Most devices, slices, and rows of a view.
const MOST: usize = 1024;
/// Least and largest answers in bytes. Source: RFC 3417 section 3.2.1; UDP.
const ANSWERS: std::ops::RangeInclusive<u64> = 484..=65_507;
const OBJECT: &str = "numbers with dots such as \"1.3.6.1.2.1.1\"; `snmptranslate -On NAME` prints those of a name";

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
    let (config, warnings) = document(file, text, "snmp-slicer.example.toml shows the format", config_of)?;
    Ok(SlicerConfig { warnings, ..config })
}

fn config_of(mut section: Section<'_>) -> SlicerConfig {
    let mut limits = Limits::default();
    if let Some(answer) = section.take("answer_size").and_then(|value| value.whole(ANSWERS)) {
        limits.answer = answer as usize;
    }
    if let Some(repetitions) = section.take("repetitions").and_then(|value| value.whole(1..=1000)) {
        limits.repetitions = repetitions as u32;
    }
    let (mut names, mut listens) = (Lines::new(), Lines::new());
    let devices = entries(&mut section, "device", "a [[device]] entry", |section| device(section, &mut names, &mut listens));
    let device_names: Vec<&str> = devices.iter().map(|one| one.name.as_str()).collect();
    let (mut names, mut users) = (Lines::new(), Lines::new());
    let (reader, mut spans) = (section.reader, Vec::new());
    let slices = entries(&mut section, "slice", "a [[slice]] entry", |section| {
        let span = section.span.clone();
        let read = slice(section, &device_names, &mut names, &mut users)?;
        spans.push(span);
        Some(read)
    });
    let slice_names: Vec<&str> = slices.iter().map(|one| one.name.as_str()).collect();
    let mut objects = Lines::new();
    let shared: Vec<Shared> =
        entries(&mut section, "shared", "a [[shared]] entry", |section| shared(section, &device_names, &slice_names, &mut objects))
            .into_iter()
            .flatten()
            .collect();
    for conflict in conflicts(&slices, devices.len(), &shared) {
        let Conflict { one, other, device, object } = conflict;
        reader.refuse(
            &spans[other],
            format!("slices {} and {} may both set {object} at {}", slices[one].name, slices[other].name, devices[device].name),
            "let one of them only read it, or add a [[shared]] entry that says who decides",
        );
    }
    section.finish();
    SlicerConfig { devices, slices, shared, limits, warnings: Vec::new() }
}

/// Takes a name that is not there yet.
fn name(section: &mut Section<'_>, example: &str, what: &str, lines: &mut Lines<String>) -> Option<String> {
    let reader = section.reader;
    let value = section.need("name", &format!("write name = {example}"))?;
    let text = short(&value)?;
    only(lines, text.clone(), reader, &value.span, what).map(|()| text)
}

fn short(value: &Value<'_>) -> Option<String> {
    let text = value.text()?;
    if text.is_empty() || text.len() > NAME_LIMIT || text.chars().any(char::is_control) {
        return value.refuse(format!("{text:?} is no name"), format!("write 1 to {NAME_LIMIT} bytes"));
    }
    Some(text.to_owned())
}

fn socket(value: &Value<'_>) -> Option<SocketAddr> {
    value.parsed("an address with a port such as \"127.0.0.1:1161\"")
}

fn device(mut section: Section<'_>, names: &mut Lines<String>, listens: &mut Lines<SocketAddr>) -> Option<DeviceSettings> {
    let (reader, span) = (section.reader, section.span.clone());
    let name = name(&mut section, "\"ap1\"", "a device with this name", names);
    let mut address = |value: Value<'_>| {
        let address = socket(&value)?;
        only(listens, address, reader, &value.span, "this address").map(|()| address)
    };
    let listen = section.need("listen", "write listen = \"127.0.0.1:1161\": where managers ask for this device").and_then(&mut address);
    let notifications = section.take("notifications").map(&mut address);
    let agent = section.need("agent", "write agent = \"192.0.2.10:161\": where the device's agent is").and_then(|value| socket(&value));
    let credentials = credentials(&mut section, &mut Lines::new());
    let timeout = section.take("timeout").map_or(Some(Duration::from_secs(1)), |value| {
        let timeout = value.duration()?;
        let fits = (Duration::from_millis(50)..=Duration::from_secs(10)).contains(&timeout);
        if fits { Some(timeout) } else { value.refuse("timeout is out of range".into(), "write \"50 ms\" to \"10 s\"".into()) }
    });
    let retries = section.take("retries").map_or(Some(1), |value| value.whole(0..=5));
    section.finish();
    let notifications = notifications.map_or(Some(None), |address| address.map(Some))?;
    let device = DeviceSettings {
        name: name?,
        listen: listen?,
        agent: agent?,
        notifications,
        credentials: credentials?,
        timeout: timeout?,
        retries: retries? as u32,
    };
    if names.len() > MOST {
        reader.refuse(&span, format!("there are more than {MOST} devices"), "run another slicer for the rest");
        return None;
    }
    Some(device)
}

/// The secrets of a manager or of an agent.
fn credentials(section: &mut Section<'_>, users: &mut Lines<String>) -> Option<CredentialFiles> {
    const WANTED: &str =
        "write community_file = \"/etc/braid/snmp/NAME.community\" for SNMPv2c; or user, auth, auth_file and privacy_file for SNMPv3";
    let (reader, span) = (section.reader, section.span.clone());
    let community = section.take("community_file");
    let user = section.take("user");
    let [auth, auth_file, privacy_file] = ["auth", "auth_file", "privacy_file"].map(|key| section.take(key));
    match (community, user) {
        (Some(community), None) => {
            if let Some(value) = [auth, auth_file, privacy_file].into_iter().flatten().next() {
                return value.refuse(
                    format!("{} belongs to a user of SNMPv3", value.key),
                    "remove it, or write user in place of community_file".into(),
                );
            }
            community.whole_path("\"/etc/braid/snmp/blue.community\"").map(CredentialFiles::Community)
        }
        (None, Some(user)) => {
            let name = short(&user)?;
            only(users, name.clone(), reader, &user.span, "a manager with this user")?;
            let (Some(auth), Some(auth_file)) = (auth, auth_file) else {
                reader.refuse(&span, "a user needs auth and auth_file", WANTED);
                return None;
            };
            let path = |value: Value<'_>| value.whole_path("\"/etc/braid/snmp/blue.auth\"");
            let (auth, auth_file, privacy_file) = (auth.one_of(&PROTOCOLS), path(auth_file), privacy_file.map(path));
            let privacy_file = privacy_file.map_or(Some(None), |file| file.map(Some))?;
            Some(CredentialFiles::User { name, auth: auth?, auth_file: auth_file?, privacy_file })
        }
        (Some(_), Some(user)) => user.refuse("both community_file and user are there".into(), "write one entry for each of them".into()),
        (None, None) => {
            reader.refuse(&span, "neither community_file nor user is there", WANTED);
            None
        }
    }
}

fn slice(mut section: Section<'_>, devices: &[&str], names: &mut Lines<String>, users: &mut Lines<String>) -> Option<SliceSettings> {
    let (reader, span) = (section.reader, section.span.clone());
    let name = name(&mut section, "\"blue\"", "a slice with this name", names);
    let managers = entries(&mut section, "manager", "a [[slice.manager]] entry", |section| manager(section, users));
    let mut all: BTreeMap<usize, Vec<Part>> = BTreeMap::new();
    for (places, part) in entries(&mut section, "view", "a [[slice.view]] entry", |section| view(section, devices)) {
        for place in places {
            all.entry(place).or_default().push(part.clone());
        }
    }
    section.finish();
    if names.len() > MOST {
        reader.refuse(&span, format!("there are more than {MOST} slices"), "run another slicer for the rest");
        return None;
    }
    Some(SliceSettings { name: name?, views: all.into_iter().map(|(place, parts)| (place, View::new(parts))).collect(), managers })
}

fn manager(mut section: Section<'_>, users: &mut Lines<String>) -> Option<ManagerSettings> {
    let credentials = credentials(&mut section, users);
    let from = section.take("from").map_or_else(
        || Some(["127.0.0.0/8", "::1/128"].iter().filter_map(|net| net.parse().ok()).collect()),
        |value| value.list()?.iter().map(|value| value.parsed("a network such as \"192.0.2.0/24\"")).collect(),
    );
    let write = section.take("write").map_or(Some(false), |value| value.flag());
    let rate = section.take("rate").map_or(Some(100), |value| value.whole(1..=10_000));
    let notify = section.take("notify").map(|value| socket(&value));
    section.finish();
    let notify = notify.map_or(Some(None), |address| address.map(Some))?;
    Some(ManagerSettings { credentials: credentials?, from: from?, write: write?, rate: rate? as u32, notify })
}

/// The places of the devices that an entry names; all, if it names none.
fn places(section: &mut Section<'_>, devices: &[&str]) -> Option<Vec<usize>> {
    let Some(value) = section.take("devices") else { return Some((0..devices.len()).collect()) };
    let place = |value: &Value<'_>| {
        let text = value.text()?;
        let found = devices.iter().position(|name| *name == text);
        found.or_else(|| value.refuse_name("device", text, devices.iter().copied(), format!("add a [[device]] entry with name = {text:?}")))
    };
    value.list()?.iter().map(place).collect::<Option<BTreeSet<_>>>().map(|places| places.into_iter().collect())
}

/// A name with at least the parts of `1.3.6`.
fn object(value: &Value<'_>) -> Option<Oid> {
    let oid: Oid = value.parsed(OBJECT)?;
    if oid.parts().len() >= 3 { Some(oid) } else { value.refuse(format!("{oid} is too short"), "write at least \"1.3.6\"".into()) }
}

fn columns(value: &Value<'_>) -> Option<BTreeSet<u32>> {
    value.list()?.iter().map(|value| value.whole(1..=u64::from(u32::MAX)).map(|column| column as u32)).collect()
}

fn view(mut section: Section<'_>, devices: &[&str]) -> Option<(Vec<usize>, Part)> {
    let (reader, span) = (section.reader, section.span.clone());
    let places = places(&mut section, devices);
    let (subtree, table) = (section.take("subtree"), section.take("table"));
    let part = match (subtree, table) {
        (Some(subtree), None) => {
            let root = object(&subtree);
            let except = section.take("except").map_or(Some(Vec::new()), |value| value.list()?.iter().map(object).collect());
            let write = section.take("write").map_or(Some(false), |value| value.flag());
            root.zip(except).zip(write).map(|((root, except), write)| Part::Subtree { root, except, write })
        }
        (None, Some(table)) => {
            let entry = object(&table).and_then(|table| table.below(&[1]));
            let columns_seen = section.take("columns").map(|value| columns(&value));
            let rows = section.need("rows", "write rows = [\"3\"]: the indexes of the rows that the slice sees, or what they begin with");
            let rows = rows.and_then(|value| rows_of(&value));
            let write = section.take("write").map_or(Some(BTreeSet::new()), |value| columns(&value));
            let columns_seen = columns_seen.map_or(Some(None), |columns| columns.map(Some));
            let all = entry.zip(columns_seen).zip(rows).zip(write);
            all.map(|(((entry, columns), rows), write)| Part::Table { entry, columns, rows, write })
        }
        _ => {
            reader.refuse(
                &span,
                "a view needs either subtree or table",
                "write subtree = \"1.3.6.1.2.1.1\", or table = \"1.3.6.1.2.1.2.2\" with rows",
            );
            return None;
        }
    };
    section.finish();
    places.zip(part)
}

fn rows_of(value: &Value<'_>) -> Option<BTreeSet<Vec<u32>>> {
    let row = |value: &Value<'_>| {
        let text = value.text()?;
        parts(text).or_else(|| value.refuse(format!("{text:?} is no index"), "write numbers with dots such as \"3\" or \"10.1\"".into()))
    };
    let rows: BTreeSet<Vec<u32>> = value.list()?.iter().map(row).collect::<Option<_>>()?;
    if rows.is_empty() || rows.len() > MOST {
        return value.refuse(format!("{} rows", rows.len()), format!("write 1 to {MOST}"));
    }
    Some(rows)
}

/// The shared object, once for each device.
fn shared(mut section: Section<'_>, devices: &[&str], slices: &[&str], objects: &mut Lines<(usize, Oid)>) -> Option<Vec<Shared>> {
    let (reader, span) = (section.reader, section.span.clone());
    let places = places(&mut section, devices);
    let wanted = "write object = \"1.3.6.1.2.1.2.2.1.7.3\": the instance that slices share";
    let object_of = section.need("object", wanted).and_then(|value| object(&value));
    let policy =
        section.need("policy", "write policy = \"owner\", \"fixed\", \"anyone\", \"lowest\", \"highest\", \"lease\" or \"virtual\"");
    let policy = policy
        .and_then(|value| value.one_of(&["owner", "fixed", "anyone", "lowest", "highest", "lease", "virtual"].map(|name| (name, name))));
    let mut limit = |key| section.take(key).map(|value| value.number(-2_147_483_648.0, 4_294_967_295.0).map(|number| number as i64));
    let (least, most) = (limit("least"), limit("most"));
    let values = section.take("values").map(|value| {
        let number = |value: &Value<'_>| value.number(-2_147_483_648.0, 4_294_967_295.0).map(|number| number as i64);
        value.list()?.iter().map(number).collect::<Option<BTreeSet<_>>>()
    });
    let slice_of = |value: &Value<'_>, text: &str| {
        let found = slices.iter().position(|name| *name == text);
        found.or_else(|| value.refuse_name("slice", text, slices.iter().copied(), format!("add a [[slice]] entry with name = {text:?}")))
    };
    let policy = match policy? {
        "fixed" => Some(Policy::Fixed),
        "anyone" => Some(Policy::Anyone),
        "lowest" => Some(Policy::Lowest),
        "highest" => Some(Policy::Highest),
        "owner" => {
            let owner = section.need("slice", "write slice = \"blue\": the slice that owns the object");
            owner.and_then(|value| slice_of(&value, value.text()?)).map(Policy::Owner)
        }
        "lease" => {
            let hold = section.need("hold", "write hold = \"10 min\": for how long a slice that sets the object holds it");
            hold.and_then(|value| value.duration()).map(Policy::Lease)
        }
        _ => {
            let operational = section.take("operational").map(|value| object(&value));
            let mut to = BTreeMap::new();
            if let Some(own) = section.take("to").and_then(|value| value.section("the table to")) {
                let mut lines = Lines::new();
                for (text, value) in own.rest() {
                    let target = object(&value)?;
                    only(&mut lines, target.clone(), reader, &value.span, "this object")?;
                    to.insert(slice_of(&value, text)?, target);
                }
            }
            operational.map_or(Some(None), |object| object.map(Some)).map(|operational| Policy::Virtual { operational, to })
        }
    };
    section.finish();
    let least = least.map_or(Some(None), |number| number.map(Some))?;
    let most = most.map_or(Some(None), |number| number.map(Some))?;
    let values = values.map_or(Some(None), |values| values.map(Some))?;
    if least.zip(most).is_some_and(|(least, most)| least > most) {
        reader.refuse(&span, "least is above most", "exchange the two");
        return None;
    }
    let (object, policy, bounds) = (object_of?, policy?, Bounds { least, most, values });
    let all = places?.into_iter().map(|device| {
        only(objects, (device, object.clone()), reader, &span, "this object at the same device")?;
        Some(Shared { device, object: object.clone(), policy: policy.clone(), bounds: bounds.clone() })
    });
    all.collect()
}

/// Two slices that may set the same object, which is not shared.
struct Conflict {
    one: usize,
    other: usize,
    device: usize,
    object: Oid,
}

fn conflicts(slices: &[SliceSettings], devices: usize, shared: &[Shared]) -> Vec<Conflict> {
    let mut conflicts = Vec::new();
    for device in 0..devices {
        let mut all: Vec<(Oid, usize, &[Oid])> = Vec::new();
        for (place, slice) in slices.iter().enumerate() {
            let writable = slice.views.get(&device).map(View::writable).unwrap_or_default();
            all.extend(writable.into_iter().map(|(name, except)| (name, place, except)));
        }
        all.sort();
        // Those that the current one is below.
        let mut above: Vec<&(Oid, usize, &[Oid])> = Vec::new();
        for current in &all {
            above.retain(|one| current.0.starts_with(&one.0));
            let is_left_out = |except: &[Oid]| except.iter().any(|except| current.0.starts_with(except));
            let is_shared = shared.iter().any(|one| one.device == device && one.object == current.0);
            let rival = above.iter().find(|one| one.1 != current.1 && !is_left_out(one.2));
            if let Some(rival) = rival.filter(|_| !is_shared && conflicts.len() < 16) {
                conflicts.push(Conflict { one: rival.1, other: current.1, device, object: current.0.clone() });
            }
            above.push(current);
        }
    }
    conflicts
}
