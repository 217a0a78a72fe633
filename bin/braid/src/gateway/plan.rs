//! What `braid gateway setup` does, computed from what is there. Reads and writes nothing.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use braid_control::config::Config;
use braid_model::{Family, LinkFacts, NetworkSnapshot};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use ring::digest::{SHA256, digest};
use serde::Serialize;

use super::files::{ADDED, DNSMASQ_FILE, IFUPDOWN_FILE, NETWORKD_FILES};
use super::system::Manager;

/// The domain of the LAN's names.
const DOMAIN: &str = "lan";
/// Comment before the section in the configuration file.
pub(super) const SECTION_COMMENT: &str = "# Added by `braid gateway setup`.";
/// Shortest and longest prefix of a LAN.
const PREFIX: std::ops::RangeInclusive<u8> = 16..=29;

/// What is there.
pub(super) struct Site<'a> {
    pub(super) network: &'a NetworkSnapshot,
    pub(super) config: &'a Config,
    pub(super) machine_id: &'a str,
    /// The other files that dnsmasq reads, with their text.
    pub(super) dnsmasq: &'a [(PathBuf, String)],
    /// Addresses that an earlier run added, by device.
    pub(super) added: &'a [(String, IpNet)],
    /// The program that sets a device's addresses at boot.
    pub(super) manager: &'a dyn Fn(&LinkFacts) -> Manager,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Plan {
    pub(super) devices: Vec<Lan>,
    pub(super) files: Vec<NewFile>,
    /// Text to add to the configuration file; `None` if the configuration names these devices already.
    pub(super) section: Option<String>,
    /// What the user should know or do.
    pub(super) notes: Vec<String>,
}

/// One LAN device.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Lan {
    pub(super) device: String,
    /// Its IPv4 address and subnet.
    pub(super) ipv4: Ipv4Net,
    /// Its IPv6 address and subnet.
    pub(super) ipv6: Ipv6Net,
    /// The addresses that it does not have yet.
    pub(super) missing: Vec<IpNet>,
}

/// A file to be written. The text is without the header that [`super::seal`] adds.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct NewFile {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// Why nothing can be done.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub(super) struct Refusal(pub(super) String);

fn refuse<T>(reason: String) -> Result<T, Refusal> {
    Err(Refusal(reason))
}

/// Plans addresses and names for the LAN devices `lan`, or those of the configuration if it is empty.
pub(super) fn plan(site: &Site<'_>, lan: &[String], addresses: &[String]) -> Result<Plan, Refusal> {
    let configured = &site.config.policy.lan;
    let names = if lan.is_empty() { configured } else { lan };
    if names.is_empty() {
        return refuse(format!("name the device behind which the clients are: --lan DEVICE; {}", candidates(site)));
    }
    if addresses.len() > names.len() {
        return refuse(format!("{} addresses for {} devices: give --address once for each --lan", addresses.len(), names.len()));
    }
    let mut lans: Vec<Lan> = Vec::new();
    for (number, name) in names.iter().enumerate() {
        if lans.iter().any(|other| other.device == *name) {
            return refuse(format!("--lan {name} is given twice: remove one of the two"));
        }
        let facts = device(site, name)?;
        let ipv4 = subnet(site, facts, addresses.get(number).map(String::as_str), &lans)?;
        let ipv6 = unique_local(site.machine_id, number)?;
        let missing = [IpNet::from(ipv4), ipv6.into()].into_iter().filter(|net| !facts.addresses.contains(net)).collect();
        lans.push(Lan { device: name.clone(), ipv4, ipv6, missing });
    }
    let mut notes = foreign_dhcp(site, &lans)?;
    let mut files = vec![NewFile { path: DNSMASQ_FILE.into(), text: dnsmasq(site, &lans, &mut notes) }];
    for lan in lans.iter().filter(|lan| !added(site, lan).is_empty()) {
        match site.network.interfaces.iter().find(|facts| facts.name == lan.device).map(site.manager) {
            Some(Manager::Networkd) => files.push(networkd(lan)),
            Some(Manager::Ifupdown) => ifupdown(lan, &mut files),
            Some(Manager::Other(hint)) => notes.push(format!(
                "the addresses of {} do not survive a reboot: {}",
                lan.device,
                hint.replace("{4}", &lan.ipv4.to_string()).replace("{6}", &lan.ipv6.to_string())
            )),
            None => {}
        }
    }
    let wanted = names.iter().all(|name| configured.contains(name));
    let section = match (wanted, configured.is_empty()) {
        (true, _) => None,
        (false, true) => Some(format!("{SECTION_COMMENT}\n[gateway]\nlan = [{}]\n", quoted(names))),
        (false, false) => {
            let mut all = configured.clone();
            all.extend(names.iter().filter(|name| !configured.contains(name)).cloned());
            notes.push(format!("the configuration has a [gateway] section already: change it to lan = [{}]", quoted(&all)));
            None
        }
    };
    Ok(Plan { devices: lans, files, section, notes })
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

/// The devices that could be LAN devices, as advice.
fn candidates(site: &Site<'_>) -> String {
    let fits = |facts: &&LinkFacts| device(site, &facts.name).is_ok();
    let names: Vec<&str> = site.network.interfaces.iter().filter(fits).map(|facts| facts.name.as_str()).collect();
    if names.is_empty() { "no device here is without a default route".to_owned() } else { format!("possible: {}", names.join(", ")) }
}

/// The LAN device of this name, if it can be one.
fn device<'a>(site: &Site<'a>, name: &str) -> Result<&'a LinkFacts, Refusal> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name == "lo" || !name.chars().all(plain) {
        return refuse(format!(
            "{name:?} cannot be a LAN device: name one with letters, digits, `.`, `_` and `-` only, as `ip link` shows it"
        ));
    }
    let Some(facts) = site.network.interfaces.iter().find(|facts| facts.name == name) else {
        return refuse(format!("there is no device {name}: compare the name with `ip link`"));
    };
    if Family::ALL.iter().any(|family| !facts.gateways.get(*family).is_empty()) {
        return refuse(format!("{name} has a default route, so it is a link to the Internet: name a device behind which the clients are"));
    }
    if site.config.policy.links.iter().any(|rule| rule.matcher.name.as_ref().is_some_and(|pattern| pattern.as_str() == name)) {
        return refuse(format!(
            "{name} has a [[link]] entry in the configuration: a device is either a link or a LAN device; remove the entry"
        ));
    }
    Ok(facts)
}

/// The IPv4 address and subnet of a LAN device.
fn subnet(site: &Site<'_>, facts: &LinkFacts, asked: Option<&str>, lans: &[Lan]) -> Result<Ipv4Net, Refusal> {
    let name = &facts.name;
    let others = site.network.interfaces.iter().filter(|other| other.index != facts.index);
    let taken: Vec<(&str, Ipv4Net)> = others
        .flat_map(|other| other.addresses.iter().filter_map(|net| Some((other.name.as_str(), v4(*net)?))))
        .chain(lans.iter().map(|lan| (lan.device.as_str(), lan.ipv4)))
        .collect();
    let overlapping = |net: &Ipv4Net| taken.iter().find(|(_, other)| net.contains(other) || other.contains(net)).copied();
    let found = match (asked, facts.addresses.iter().find_map(|net| v4(*net))) {
        (Some(text), _) => address(text)?,
        (None, Some(present)) => present,
        (None, None) => {
            let mut nets = (7..=254).map(|third| Ipv4Net::new_assert(Ipv4Addr::new(192, 168, third, 1), 24));
            return nets
                .find(|net| overlapping(net).is_none())
                .map_or_else(|| refuse(format!("no subnet in 192.168.0.0/16 is free for {name}: give one with --address")), Ok);
        }
    };
    if !PREFIX.contains(&found.prefix_len()) {
        return refuse(format!("{found} cannot be the subnet of {name}: take a prefix from /{} to /{}", PREFIX.start(), PREFIX.end()));
    }
    if !found.addr().is_private() {
        return refuse(format!(
            "{found} is not private (RFC 1918): take an address in 192.168.0.0/16, 172.16.0.0/12 or 10.0.0.0/8 for {name}"
        ));
    }
    if let Some((device, other)) = overlapping(&found) {
        return refuse(format!(
            "{found} for {name} overlaps {other} of {device}, so answers to clients would be ambiguous: take another subnet with --address"
        ));
    }
    Ok(found)
}

fn v4(net: IpNet) -> Option<Ipv4Net> {
    match net {
        IpNet::V4(net) => Some(net),
        IpNet::V6(_) => None,
    }
}

/// The address that the user gives. The address of the subnet itself stands for its first host.
fn address(text: &str) -> Result<Ipv4Net, Refusal> {
    let Ok(net) = text.parse::<Ipv4Net>() else {
        return refuse(format!(
            "{text:?} is no IPv4 address with a prefix: write one as in 192.168.7.1/24; the IPv6 prefix is chosen for you"
        ));
    };
    if net.prefix_len() > 30 || net.addr() != net.network() && net.addr() != net.broadcast() {
        return Ok(net);
    }
    if net.addr() == net.broadcast() {
        return refuse(format!("{text} is the broadcast address of its subnet: take another one"));
    }
    Ok(Ipv4Net::new_assert(Ipv4Addr::from_bits(net.network().to_bits() + 1), net.prefix_len()))
}

/// The address in the device's IPv6 subnet. Its prefix is a local one (RFC 4193, section 3.1): `fd`, 40 bits that identify this machine, and the
/// number of the device, from 1. The 40 bits are a hash (section 3.2.2) of the machine's id, which is not derivable from them (machine-id(5)).
fn unique_local(machine_id: &str, number: usize) -> Result<Ipv6Net, Refusal> {
    let id = machine_id.trim();
    if id.len() != 32 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return refuse(
            "/etc/machine-id is missing or no machine id, so no IPv6 prefix can be derived: run `systemd-machine-id-setup`".to_owned(),
        );
    }
    let hash = digest(&SHA256, format!("braid gateway ULA {id}").as_bytes());
    let mut octets = [0; 16];
    octets[0] = 0xfd;
    octets[1..6].copy_from_slice(&hash.as_ref()[..5]);
    let subnet = u16::try_from(number + 1).map_err(|_| Refusal("too many LAN devices: name fewer".to_owned()))?;
    octets[6..8].copy_from_slice(&subnet.to_be_bytes());
    octets[15] = 1;
    Ok(Ipv6Net::new_assert(Ipv6Addr::from(octets), 64))
}

/// The first and last address that clients get. In a subnet of 64 addresses or more, the first 20 and the last 5 are left for devices with addresses
/// set by hand. dnsmasq never assigns its own address.
fn range(net: Ipv4Net) -> (Ipv4Addr, Ipv4Addr) {
    let (first, last) = (net.network().to_bits(), net.broadcast().to_bits());
    let (below, above) = if last - first >= 63 { (20, 5) } else { (1, 1) };
    (Ipv4Addr::from_bits(first + below), Ipv4Addr::from_bits(last - above))
}

/// The addresses that this and earlier runs add to the device.
fn added(site: &Site<'_>, lan: &Lan) -> Vec<IpNet> {
    let before = |net: &IpNet| site.added.iter().any(|(device, other)| *device == lan.device && other == net);
    [IpNet::from(lan.ipv4), lan.ipv6.into()].into_iter().filter(|net| lan.missing.contains(net) || before(net)).collect()
}

fn dnsmasq(site: &Site<'_>, lans: &[Lan], notes: &mut Vec<String>) -> String {
    let mut text = String::new();
    for (lan, net) in lans.iter().flat_map(|lan| added(site, lan).into_iter().map(move |net| (lan, net))) {
        let _ = writeln!(text, "{ADDED}{} {net}", lan.device);
    }
    for lan in lans {
        let _ = writeln!(text, "interface={}", lan.device);
    }
    // dnsmasq does not start with both.
    let restricted = lines(site.dnsmasq).find(|(_, key, _)| *key == "bind-interfaces").map(|(path, ..)| path);
    match restricted {
        Some(path) => notes.push(format!(
            "bind-dynamic is left out, because {} has bind-interfaces: dnsmasq starts only while the LAN device exists",
            path.display()
        )),
        None => text.push_str("bind-dynamic\n"),
    }
    let _ = writeln!(text, "# Names of the LAN, as in phone.{DOMAIN}; other servers are never asked for them.");
    let _ = writeln!(text, "domain={DOMAIN}\nlocal=/{DOMAIN}/\nexpand-hosts");
    for lan in lans {
        let _ = writeln!(text, "interface-name=gateway.{DOMAIN},{}", lan.device);
    }
    text.push_str("# Addresses: IPv4 by DHCP, IPv6 by router advertisements.\nenable-ra\n");
    for lan in lans {
        let (first, last) = range(lan.ipv4);
        let _ = writeln!(text, "dhcp-range={first},{last},{},12h", lan.ipv4.netmask());
        let _ = writeln!(text, "dhcp-range={},ra-names,slaac,64,12h", lan.ipv6.network());
    }
    text
}

/// The settings in files of dnsmasq: file, name and value.
fn lines(files: &[(PathBuf, String)]) -> impl Iterator<Item = (&Path, &str, &str)> {
    files.iter().flat_map(|(path, text)| {
        text.lines().map(|line| line.split_once('#').map_or(line, |(setting, _)| setting).trim()).filter(|line| !line.is_empty()).map(
            |line| {
                let (key, value) = line.split_once('=').unwrap_or((line, ""));
                (path.as_path(), key.trim(), value.trim())
            },
        )
    })
}

/// Refuses if another file of dnsmasq serves DHCP on one of the devices, or forbids it. Returns what else is worth knowing.
fn foreign_dhcp(site: &Site<'_>, lans: &[Lan]) -> Result<Vec<String>, Refusal> {
    let mut notes = Vec::new();
    let names = |value: &str, device: &str| value.split(',').any(|word| word.trim().trim_start_matches("interface:") == device);
    for lan in lans {
        for (path, key, value) in lines(site.dnsmasq) {
            let conflict = match key {
                "dhcp-range" => {
                    let inside = |word: &str| word.trim().parse::<Ipv4Addr>().is_ok_and(|address| lan.ipv4.contains(&address));
                    let inside6 = |word: &str| word.trim().parse::<Ipv6Addr>().is_ok_and(|address| lan.ipv6.contains(&address));
                    // A file with one interface line and a range serves that interface, whatever the subnet.
                    let serves =
                        lines(site.dnsmasq).any(|(other, key, value)| other == path && key == "interface" && names(value, &lan.device));
                    serves || names(value, &lan.device) || value.split(',').any(|word| inside(word) || inside6(word))
                }
                "no-dhcp-interface" | "except-interface" => names(value, &lan.device),
                _ => false,
            };
            if conflict {
                return refuse(format!(
                    "{} has {key}={value}, which concerns {}: remove that line, or keep that configuration and use `[gateway]` without setup",
                    path.display(),
                    lan.device
                ));
            }
        }
    }
    let served: Vec<&Path> =
        lines(site.dnsmasq).filter(|(_, key, _)| matches!(*key, "interface" | "listen-address")).map(|(p, ..)| p).collect();
    if !site.dnsmasq.is_empty() && served.is_empty() && lines(site.dnsmasq).next().is_some() {
        notes.push("dnsmasq answers only on the LAN devices and loopback from now on; before, it answered on every device".to_owned());
    }
    Ok(notes)
}

/// A file of systemd-networkd.
fn networkd(lan: &Lan) -> NewFile {
    let text = format!(
        "[Match]\nName={}\n\n[Network]\nAddress={}\nAddress={}\nIPv6AcceptRA=no\nConfigureWithoutCarrier=yes\n",
        lan.device, lan.ipv4, lan.ipv6
    );
    NewFile { path: format!("{NETWORKD_FILES}{}.network", lan.device).into(), text }
}

/// Adds the device to ifupdown's file (interfaces(5)).
fn ifupdown(lan: &Lan, files: &mut Vec<NewFile>) {
    let device = &lan.device;
    let stanza = format!(
        "allow-hotplug {device}\niface {device} inet static\n    address {}\niface {device} inet6 static\n    address {}\n",
        lan.ipv4, lan.ipv6
    );
    match files.iter_mut().find(|file| file.path == Path::new(IFUPDOWN_FILE)) {
        Some(file) => file.text += &stanza,
        None => files.push(NewFile { path: IFUPDOWN_FILE.into(), text: stanza }),
    }
}

/// The text without the section that setup added; `None` if it is not there as it was added.
pub(super) fn without_section(text: &str) -> Option<String> {
    let begin = text.find(SECTION_COMMENT)?;
    let block: String = text[begin..].split_inclusive('\n').take(3).collect();
    let mut lines = block.lines();
    let ours = lines.next() == Some(SECTION_COMMENT) && lines.next() == Some("[gateway]") && lines.next()?.starts_with("lan = [\"");
    // A key after it would belong to another section without it.
    let (before, rest) = (&text[..begin], &text[begin + block.len()..]);
    let next = rest.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    let before = before.strip_suffix('\n').filter(|shorter| shorter.ends_with('\n')).unwrap_or(before);
    (ours && next.is_none_or(|line| line.starts_with('['))).then(|| format!("{before}{rest}"))
}

/// The text with the section added.
pub(super) fn with_section(text: &str, section: &str) -> String {
    let end = if text.is_empty() {
        ""
    } else if text.ends_with('\n') {
        "\n"
    } else {
        "\n\n"
    };
    format!("{text}{end}{section}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::{DefaultRoute, LinkIndex, LinkKind, PerFamily};

    const ID: &str = "0123456789abcdef0123456789abcdef\n";

    fn facts(index: u32, name: &str, addresses: &[&str], routed: bool) -> LinkFacts {
        let route = DefaultRoute { gateway: None, metric: 0 };
        LinkFacts {
            addresses: addresses.iter().map(|net| net.parse().unwrap()).collect(),
            gateways: PerFamily { v4: if routed { vec![route] } else { Vec::new() }, v6: Vec::new() },
            ..LinkFacts::new(LinkIndex(index), name, LinkKind::Wired)
        }
    }

    fn network() -> NetworkSnapshot {
        let interfaces = vec![
            facts(2, "eth0", &["192.168.7.2/24", "192.168.8.2/24"], true),
            facts(3, "lan0", &[], false),
            facts(4, "lan1", &["10.0.5.1/24"], false),
        ];
        NetworkSnapshot { interfaces, ..NetworkSnapshot::default() }
    }

    fn planned(config: &str, dnsmasq: &[(&str, &str)], lan: &[&str], addresses: &[&str]) -> Result<Plan, Refusal> {
        let config = braid_config::parse("braid.toml", config, &braid_config::World::default()).unwrap();
        let files: Vec<_> = dnsmasq.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        let manager = |_: &LinkFacts| Manager::Other("set {4}".to_owned());
        let site = Site { network: &network(), config: &config, machine_id: ID, dnsmasq: &files, added: &[], manager: &manager };
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        plan(&site, &owned(lan), &owned(addresses))
    }

    fn refusal(dnsmasq: &[(&str, &str)], lan: &[&str], addresses: &[&str]) -> String {
        planned("", dnsmasq, lan, addresses).unwrap_err().0
    }

    #[test]
    fn a_free_subnet_and_a_stable_prefix_are_chosen() {
        let plan = planned("", &[], &["lan0", "lan1"], &[]).unwrap();
        let nets: Vec<_> = plan.devices.iter().map(|lan| (lan.ipv4.to_string(), lan.missing.len())).collect();
        assert_eq!(nets, [("192.168.9.1/24".to_owned(), 2), ("10.0.5.1/24".to_owned(), 1)]);
        let [one, two] = [0, 1].map(|number| plan.devices[number].ipv6);
        assert!(one.network().is_unique_local() && one.network().octets()[0] == 0xfd, "{one}");
        assert_eq!((one.network().segments()[..3].to_vec(), one.network().segments()[3]), (two.network().segments()[..3].to_vec(), 1));
        assert_eq!(unique_local(ID, 0), Ok(one));
        assert_ne!(unique_local("1123456789abcdef0123456789abcdef", 0), Ok(one));
        assert!(unique_local("uninitialized\n", 0).unwrap_err().0.contains("machine-id"));
        let text = &plan.files[0].text;
        for line in [
            "# added: lan0 192.168.9.1/24",
            "interface=lan0",
            "interface=lan1",
            "bind-dynamic",
            "dhcp-range=192.168.9.20,192.168.9.250,255.255.255.0,12h",
            "dhcp-range=10.0.5.20,10.0.5.250,255.255.255.0,12h",
            "local=/lan/",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("# added: lan1 10.0.5.1"), "an address that was there before is not recorded");
        assert_eq!(plan.section.unwrap(), "# Added by `braid gateway setup`.\n[gateway]\nlan = [\"lan0\", \"lan1\"]\n");
        assert!(plan.notes[0].contains("do not survive a reboot: set 192.168.9.1/24"), "{:?}", plan.notes);
    }

    #[test]
    fn what_cannot_work_is_refused() {
        assert!(refusal(&[], &[], &[]).contains("possible: lan0, lan1"));
        assert!(refusal(&[], &["eth0"], &[]).contains("default route"));
        assert!(refusal(&[], &["lan7"], &[]).contains("no device lan7"));
        assert!(refusal(&[], &["lan0", "lan0"], &[]).contains("twice"));
        assert!(refusal(&[], &["lan0,eth0"], &[]).contains("cannot be a LAN device"));
        assert!(refusal(&[], &["lan0"], &["192.168.7.1/24"]).contains("overlaps 192.168.7.2/24 of eth0"));
        assert!(refusal(&[], &["lan0"], &["10.0.0.1/16"]).contains("overlaps 10.0.5.1/24 of lan1"));
        assert!(refusal(&[], &["lan0", "lan1"], &["10.9.0.1/24", "10.9.0.2/25"]).contains("of lan0"));
        assert!(refusal(&[], &["lan0"], &["8.8.8.1/24"]).contains("not private"));
        assert!(refusal(&[], &["lan0"], &["10.9.0.1/8"]).contains("prefix from /16"));
        assert!(refusal(&[], &["lan0"], &["10.9.0.255/24"]).contains("broadcast"));
        assert!(refusal(&[], &["lan0"], &["fd00::1/64"]).contains("no IPv4 address"));
        assert!(refusal(&[], &["lan0"], &["10.9.0.1/24", "10.8.0.1/24"]).contains("once for each"));
        let link = planned("[[link]]\nname = \"lan0\"\n", &[], &["lan0"], &[]).unwrap_err().0;
        assert!(link.contains("[[link]] entry"), "{link}");
        assert_eq!(planned("", &[], &["lan0"], &["10.9.0.0/24"]).unwrap().devices[0].ipv4.to_string(), "10.9.0.1/24");
    }

    #[test]
    fn another_dhcp_configuration_for_the_device_is_refused() {
        let path = "/etc/dnsmasq.conf";
        for text in [
            "interface=lan0\ndhcp-range=10.9.9.2,10.9.9.9\n",
            "dhcp-range=interface:lan0,10.9.9.2,10.9.9.9\n",
            "dhcp-range = 192.168.9.50, 192.168.9.60 # mine\n",
            "no-dhcp-interface=lan0\n",
            "except-interface=eth0,lan0\n",
        ] {
            let reason = refusal(&[(path, text)], &["lan0"], &[]);
            assert!(reason.starts_with("/etc/dnsmasq.conf has "), "{reason}");
        }
        let other = "#dhcp-range=192.168.9.50,192.168.9.60\ninterface=lan1\ndhcp-range=10.0.5.2,10.0.5.9\nbind-interfaces\n";
        let plan = planned("", &[(path, other)], &["lan0"], &[]).unwrap();
        assert!(!plan.files[0].text.contains("bind-dynamic") && plan.notes.iter().any(|note| note.contains("bind-interfaces")));
    }

    #[test]
    fn the_section_is_added_once_and_removed_as_added() {
        assert_eq!(planned("[gateway]\nlan = [\"lan0\"]\n", &[], &[], &[]).unwrap().section, None);
        let more = planned("[gateway]\nlan = [\"lan0\"]\n", &[], &["lan1"], &[]).unwrap();
        assert!(more.section.is_none() && more.notes.iter().any(|note| note.contains("change it to lan = [\"lan0\", \"lan1\"]")));
        let section = planned("", &[], &["lan0"], &[]).unwrap().section.unwrap();
        for before in ["", "version = 1\n"] {
            assert_eq!(without_section(&with_section(before, &section)).as_deref(), Some(before));
        }
        assert_eq!(without_section(&format!("a = 1\n\n{section}\n[[link]]\nname = \"x\"\n")).unwrap(), "a = 1\n\n[[link]]\nname = \"x\"\n");
        assert_eq!(without_section(&format!("{section}more = 1\n")), None, "a key that was added to it");
        assert_eq!(without_section("[gateway]\nlan = [\"lan0\"]\n"), None);
    }
}
