//! The gateway's firewall rules (nftables): what devices on a LAN send leaves by the link that was chosen for the connection, with its address.
//!
//! A program at the LAN devices' ingress gives the packets of a new connection the mark of a link ([`crate::tables::mark`]). By the mark of the first
//! packet, these rules give the connection a mark of its own (`ct mark`), and by that every later packet in both directions its mark. So a connection
//! keeps its link, and answers pass a strict reverse path filter that considers marks (`src_valid_mark`). The mark of a connection contains the index
//! of the link's device, not its slot: another daemon may give the link another slot.
//!
//! Every forwarded packet is compared with these rules, and to compare the name of a device takes the most time. So the conditions that the fewest packets
//! meet come first in a rule, and the name comes last.
//!
//! | hook | priority | rules |
//! |---|---|---|
//! | prerouting | mangle | connection marks; after conntrack, before routing |
//! | forward | filter - 1 | nothing between ports of a bridge; spoofed sources, connection marks for packets from bridges, strict rules, new connections from outside, maximum segment size |
//! | postrouting | srcnat | masquerade |
//! | input | filter - 1 | spoofed sources of what the daemon takes, and what a relay sends to this machine |
//! | output | filter - 2 | answers of the kernel with the address of another link |
//! | output | filter - 1 | what this machine itself may send over links, if all flows leave through a relay ([`OwnRules`]) |

use std::collections::BTreeSet;
use std::net::IpAddr;

use braid_model::{LinkIndex, Mac, PerFamily};
use ipnet::IpNet;

use crate::tables::{CARRIER_MARK, MARK_BASE, MARK_MASK, PACKET_DEVICE, PACKET_MARK, RELAY_MARK, mark};
use crate::virtual_device::{VirtualDevice, twin};

/// The table with the rules, of family `inet`.
pub const TABLE: &str = "braid_gateway";
/// The table in which the kernel keeps the former values of settings, of family `inet`. [`ruleset`] leaves it alone.
pub const RECORDS: &str = "braid_gateway_restore";

/// Base of the marks of connections.
const CONNECTION_BASE: u32 = 0xB100_0000;
/// The part of such a mark that contains the index of a device.
const CONNECTION_INDEX: u32 = 0x00FF_FFFF;
/// The mark of connections that the daemon takes.
pub const CARRIED_CONNECTION: u32 = CONNECTION_BASE | CONNECTION_INDEX;

/// The mark of connections whose packets go through a bond.
const PACKET_CONNECTION: u32 = CARRIED_CONNECTION - 1;

/// Drops a packet whose source is not behind the device from which it comes.
const FOREIGN_SOURCE: &str = "fib saddr . iif oif missing counter drop comment \"source is not on this LAN\"";

/// Size of the headers of IPv4 and TCP without options, which the maximum segment size leaves out (RFC 9293, 3.7.1).
const IPV4_TCP_HEADERS: u32 = 40;

/// Maximum length of a device's name (`IFNAMSIZ` without the final zero).
const MAX_NAME: usize = 15;
/// Protocols with the destination port in bytes 2 and 3 of their header.
const WITH_PORTS: &str = "{ tcp, udp, udplite, sctp, dccp }";

/// What the gateway forwards, and where to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GatewayPlan {
    /// Names of the LAN devices; they need not exist.
    pub lan: Vec<String>,
    /// The virtual interface. The switch's end of it is one of the LAN devices.
    pub virtual_device: Option<VirtualDevice>,
    /// Names of the links' devices.
    pub links: Vec<String>,
    /// Names of bridges. What goes from one of their ports to another is not forwarded by this machine, although the firewall sees it where bridges pass
    /// the firewall (br_netfilter). A name that cannot be written in a rule is left out.
    pub bridges: BTreeSet<String>,
    /// Slot and index of each link.
    pub slots: Vec<(usize, LinkIndex)>,
    /// The smallest of the largest packets (MTU) of all devices and IPv4 routes, in bytes; `None`: not known.
    pub mtu: Option<u32>,
    /// Whether the LAN has IPv6 addresses other than link-local ones.
    pub ipv6: bool,
    /// Rules in the order in which they are tried; the first that matches applies. Those with `links` hold even while the daemon does not run.
    pub rules: Vec<ForwardRule>,
    /// Ports on loopback at which the daemon takes flows of clients that it carries itself, which have [`CARRIER_MARK`](crate::tables::CARRIER_MARK).
    pub clients: ClientPorts,
    /// Families in which this machine forwarded nothing before: new connections that arrive over a link are dropped, unless a firewall rule of the
    /// system forwards their port (DNAT). The platform sets this when it turns forwarding on.
    pub closed: PerFamily<bool>,
    /// Families in which packets of other protocols go through a bond, over [`PACKET_DEVICE`].
    pub packets: PerFamily<bool>,
    /// What this machine itself may send directly; `None`: anything.
    pub own: Option<OwnRules>,
}

/// What this machine itself may send although all its flows leave through a relay or fail (`fallback = "none"`). They hold also while the daemon does not run.
/// The daemon's datagrams to relays (with [`RELAY_MARK`]), DHCP, neighbour and router discovery, and group management (IGMP, MLD) may always leave.
///
/// Every device is a link, but those named in `passed`: one that appears while the daemon does not run is not trusted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnRules {
    /// Names of devices that are no links. Loopback needs no mention. A name that cannot be written in a rule is left out.
    pub passed: BTreeSet<String>,
    /// Names of links, with the networks that they are on.
    pub local: Vec<(String, BTreeSet<IpNet>)>,
    /// Gateways of the links, which may get echo requests.
    pub gateways: BTreeSet<IpAddr>,
    /// Rules in the order in which they are tried. Those without `links` except packets, those with `links` drop them on other links. What no rule
    /// matches is dropped.
    pub rules: Vec<ForwardRule>,
}

impl GatewayPlan {
    /// Whether packets of other protocols go through a bond.
    fn takes_packets(&self) -> bool {
        self.packets.v4 || self.packets.v6
    }
}

/// Ports of the daemon's transparent sockets, by family; `None`: without this family or protocol.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientPorts {
    /// Ports that take connections.
    pub connections: PerFamily<Option<u16>>,
    /// Ports that take datagrams.
    pub datagrams: PerFamily<Option<u16>>,
}

/// A rule for packets from the LAN that match every condition.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ForwardRule {
    /// Devices whose packets the rule may match in a way that is not known here, because it names programs, users or control groups: those of the virtual
    /// interface, and those of containers. Neither this rule nor a later one applies to them. Not empty: the rule matches no other packets.
    pub unknown: Vec<String>,
    /// Source address.
    pub client: Option<IpNet>,
    /// User whose process sent the packet; for packets of this machine ([`OwnRules`]).
    pub user: Option<u32>,
    /// Source address on the LAN (Ethernet).
    pub mac: Option<Mac>,
    /// Destination address.
    pub destination: Option<IpNet>,
    /// Destination port of a protocol with ports.
    pub port: Option<u16>,
    /// The destination ports of a class; empty: all.
    pub class_ports: Vec<u16>,
    /// Names of the only links over which such packets may leave; they may still go to other LAN devices. `None`: all links.
    pub links: Option<Vec<String>>,
}

/// The name of a device cannot be written in a firewall rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the device name {name:?} cannot be written in a firewall rule: rename the device (ip link set NAME name NEW)")]
pub struct UnusableName {
    name: String,
}

/// The script for `nft -f` that replaces the rules by those of `plan`, in one transaction, whether or not there are any.
///
/// # Errors
/// A name has characters that nft does not take literally between quotation marks, or is too long.
pub fn ruleset(plan: &GatewayPlan) -> Result<String, UnusableName> {
    let mut lines = vec![format!("table inet {TABLE} {{}}"), format!("delete table inet {TABLE}"), format!("table inet {TABLE} {{")];
    // Without them a rule would only make the kernel track connections.
    if !plan.lan.is_empty() {
        lines.extend(forwarding(plan)?);
    }
    if let Some(own) = &plan.own {
        lines.extend(sending(own)?);
    }
    lines.extend(["}", ""].map(String::from));
    Ok(lines.join("\n"))
}

/// The chains for what devices on a LAN send.
fn forwarding(plan: &GatewayPlan) -> Result<Vec<String>, UnusableName> {
    let names = Names::of(plan)?;
    let copied = CopiedMarks::of(plan, &names);
    let chains = [
        segments(plan, &names),
        sources(&names),
        followers(plan, &names),
        prerouting(plan, &names, &copied),
        forward_chain(plan, &names, copied),
        postrouting(plan, &names),
        input(plan, &names),
        strays(&names),
        strict(plan, &names)?,
    ];
    Ok(chains.concat())
}

/// Names of devices as nft writes them.
struct Names {
    /// The LAN devices, each between quotation marks.
    devices: BTreeSet<String>,
    /// The set of LAN devices; `None`: there are none.
    lan: Option<String>,
    /// Names of the links.
    links: BTreeSet<String>,
    /// The switch's end of the virtual interface.
    switch_end: Option<String>,
}

impl Names {
    fn of(plan: &GatewayPlan) -> Result<Self, UnusableName> {
        let devices = quoted(&plan.lan)?;
        let switch_end: Vec<String> = plan.virtual_device.iter().map(VirtualDevice::switch_end).collect();
        Ok(Self { lan: set(&devices), devices, links: quoted(&plan.links)?, switch_end: quoted(&switch_end)?.pop_first() })
    }
}

/// A chain with its hook and rules.
fn chain(name: &str, hook: &str, rules: Vec<String>) -> Vec<String> {
    let head = [format!("chain {name} {{"), format!("type {hook}; policy accept;")];
    head.into_iter().chain(rules).chain(["}".to_owned()]).collect()
}

/// A map from marks of packets to marks of connections, or the other way.
fn mark_map(pairs: impl IntoIterator<Item = (u32, u32)>) -> String {
    let pairs: Vec<String> = pairs.into_iter().map(|(from, to)| format!("{from:#x} : {to:#x}")).collect();
    format!("map {{ {} }}", pairs.join(", "))
}

/// Where the switch may send a packet that the daemon does not take: marks of packets, and of their connections.
fn ways(plan: &GatewayPlan) -> Vec<(u32, u32)> {
    let links = plan.slots.iter().map(|(slot, index)| (mark(*slot), connection_mark(*index)));
    links.chain(plan.takes_packets().then_some((PACKET_MARK, PACKET_CONNECTION))).collect()
}

/// Condition on a mark: it is one of Braid's.
fn ours() -> String {
    format!("& {MARK_MASK:#x} == {MARK_BASE:#x}")
}

/// Rules that copy the switch's mark to the connection.
#[derive(Default)]
struct CopiedMarks {
    /// From the first packet of a connection.
    first: Option<String>,
    /// From a later packet, to another link.
    moved: Option<String>,
}

impl CopiedMarks {
    fn of(plan: &GatewayPlan, names: &Names) -> Self {
        let Some(lan) = &names.lan else { return Self::default() };
        let (ways, ours) = (ways(plan), ours());
        // A retransmitted first packet belongs to a confirmed entry, which has its mark. The entry of a first packet that was dropped does not remain.
        let all = mark_map(ways.iter().copied().chain([(CARRIER_MARK, CARRIED_CONNECTION)]));
        let first = format!("ct status & confirmed == 0 ct mark 0 meta mark {ours} iifname {lan} ct mark set meta mark {all}");
        // Other protocols than TCP follow the switch when it gives them another link, because theirs is dead. The kernel then makes a new connection.
        let moved = format!(
            "meta l4proto != tcp meta mark {ours} ct direction original ct mark & 0xff000000 == {CONNECTION_BASE:#x} \
             ct mark != {CARRIED_CONNECTION:#x} iifname {lan} ct mark set meta mark {}",
            mark_map(ways.iter().copied())
        );
        Self { first: Some(first), moved: (!ways.is_empty()).then_some(moved) }
    }
}

/// Name of the chain for the packets of connections with this mark.
fn follower(connection: u32) -> String {
    format!("connection_{connection:x}")
}

/// The chains that give packets the mark of their connection, and the daemon what it takes.
fn followers(plan: &GatewayPlan, names: &Names) -> Vec<String> {
    let follower = |mark: u32, connection: u32, more: Vec<String>| {
        let head = [format!("chain {} {{", follower(connection)), format!("meta mark set {mark:#x}")];
        head.into_iter().chain(more).chain(["}".to_owned()])
    };
    let ways = ways(plan).into_iter().flat_map(|(mark, connection)| follower(mark, connection, Vec::new()));
    let taken = names.lan.iter().flat_map(|lan| taken(plan, lan)).collect();
    ways.chain(follower(CARRIER_MARK, CARRIED_CONNECTION, taken)).collect()
}

/// Gives connections their marks, and packets those of their connections. A packet of a known connection passes two rules.
fn prerouting(plan: &GatewayPlan, names: &Names, copied: &CopiedMarks) -> Vec<String> {
    let connections = ways(plan).into_iter().map(|(_, connection)| connection).chain([CARRIED_CONNECTION]);
    let verdicts: Vec<String> = connections.map(|connection| format!("{connection:#x} : goto {}", follower(connection))).collect();
    let follow = format!("ct mark vmap {{ {} }}", verdicts.join(", "));
    let first = copied.first.iter().map(|first| format!("{first} {follow}"));
    let rules = copied.moved.iter().cloned().chain([follow.clone()]).chain(first);
    let cleared = names.lan.iter().map(|lan| format!("meta mark {} iifname {lan} meta mark set 0", ours()));
    chain("prerouting", "filter hook prerouting priority mangle", rules.chain(cleared).collect())
}

/// Rules that give the daemon what it takes.
fn taken(plan: &GatewayPlan, lan: &str) -> Vec<String> {
    let mut rules = Vec::new();
    for (protocol, ports) in [("tcp", plan.clients.connections), ("udp", plan.clients.datagrams)] {
        let to = |family, address, port: Option<u16>| {
            port.map(|port| format!("meta nfproto {family} meta l4proto {protocol} iifname {lan} tproxy {address}:{port}"))
        };
        rules.extend(to("ipv4", "ip to 127.0.0.1", ports.v4));
        rules.extend(to("ipv6", "ip6 to [::1]", ports.v6));
    }
    rules
}

/// What may be forwarded.
fn forward_chain(plan: &GatewayPlan, names: &Names, copied: CopiedMarks) -> Vec<String> {
    let within: Vec<String> = plan.bridges.iter().filter(|name| is_literal(name)).map(|name| format!("\"{name}\" . \"{name}\"")).collect();
    let mut rules: Vec<String> = Vec::new();
    if !within.is_empty() {
        rules.push(format!("iifname . oifname {{ {} }} return", within.join(", ")));
    }
    if let Some(lan) = &names.lan {
        rules.push(format!("iifname {lan} jump sources"));
        // Where bridges pass the firewall (br_netfilter, as Docker sets it), prerouting comes before the switch has decided.
        if !plan.bridges.is_empty() {
            rules.extend(copied.first.into_iter().chain(copied.moved));
        }
        if plan.rules.iter().any(|rule| rule.links.is_some()) {
            rules.push(format!("iifname {lan} jump rules"));
        }
    }
    const UNASKED: &str = "ct state new,invalid,untracked";
    const UNKNOWN: &str = "ct state invalid,untracked";
    if plan.takes_packets() {
        // The relay sends answers only.
        rules.push(format!("{UNASKED} iifname \"{PACKET_DEVICE}\" counter drop"));
    }
    // From outside: nobody but the LAN may use what was turned on for it.
    let outside = names.lan.as_ref().map_or(String::new(), |lan| format!(" iifname != {lan}"));
    let family = match plan.closed {
        PerFamily { v4: true, v6: true } => Some(""),
        PerFamily { v4: true, v6: false } => Some(" meta nfproto ipv4"),
        PerFamily { v4: false, v6: true } => Some(" meta nfproto ipv6"),
        PerFamily { v4: false, v6: false } => None,
    };
    rules.extend(family.map(|family| format!("ct state new ct status & dnat == 0{family}{outside} counter drop")));
    if let Some(family) = family {
        // What connection tracking does not know has no status.
        rules.push(format!("{UNKNOWN}{family}{outside} counter drop"));
    }
    // Nothing would translate their addresses.
    rules.extend(
        names.lan.iter().zip(set(&exits(plan, names))).map(|(lan, exits)| format!("{UNKNOWN} iifname {lan} oifname {exits} counter drop")),
    );
    // Only answers come to the twin of the virtual interface's address.
    rules.extend(names.switch_end.iter().map(|switch_end| format!("{UNASKED} oifname {switch_end} counter drop")));
    if !names.links.is_empty() {
        rules.push("tcp flags & (syn | rst) == syn jump segments".to_owned());
    }
    chain("forward", "filter hook forward priority filter - 1", rules)
}

/// Drops spoofed sources. Where all clients are behind one device, the first packet of a client's connection answers for the others: the mark shows that it is a
/// client's.
fn sources(names: &Names) -> Vec<String> {
    let ours = format!("ct direction original ct state established ct mark & 0xff000000 == {CONNECTION_BASE:#x} return");
    let known = (names.devices.len() == 1).then_some(ours);
    let rules = known.into_iter().chain([FOREIGN_SOURCE.to_owned()]);
    ["chain sources {".to_owned()].into_iter().chain(rules).chain(["}".to_owned()]).collect()
}

/// Lowers the maximum segment size of connections over links to what fits through: the route's MTU counts.
fn segments(plan: &GatewayPlan, names: &Names) -> Vec<String> {
    // To look up the route takes much time, and most segments fit through every device. With IPv6 a router may have announced another MTU.
    let fitting = plan.mtu.and_then(|mtu| mtu.checked_sub(IPV4_TCP_HEADERS)).map(u16::try_from);
    let fitting = fitting.and_then(Result::ok).map(|size| format!("meta nfproto ipv4 tcp option maxseg size <= {size} return"));
    let fit = |links: String| ["iifname", "oifname"].map(|direction| format!("{direction} {links} tcp option maxseg size set rt mtu"));
    let rules = fitting.into_iter().chain(set(&names.links).into_iter().flat_map(fit));
    ["chain segments {".to_owned()].into_iter().chain(rules).chain(["}".to_owned()]).collect()
}

/// The devices by which packets leave translated.
fn exits(plan: &GatewayPlan, names: &Names) -> BTreeSet<String> {
    names.links.iter().cloned().chain(plan.takes_packets().then(|| format!("\"{PACKET_DEVICE}\""))).collect()
}

/// Translates what leaves.
fn postrouting(plan: &GatewayPlan, names: &Names) -> Vec<String> {
    let lan = names.lan.iter().zip(set(&exits(plan, names))).map(|(lan, exits)| format!("iifname {lan} oifname {exits} masquerade"));
    // Nobody else has a route to the twin of the virtual interface's address.
    let own = names.switch_end.iter().map(|switch_end| format!("iifname {switch_end} masquerade"));
    chain("postrouting", "nat hook postrouting priority srcnat", lan.chain(own).collect())
}

/// What may reach this machine: what the daemon takes does not pass the forward chain.
fn input(plan: &GatewayPlan, names: &Names) -> Vec<String> {
    let lan = names.lan.iter().map(|lan| format!("meta mark {CARRIER_MARK:#x} iifname {lan} {FOREIGN_SOURCE}"));
    // Where bridges pass the firewall, prerouting comes before the switch has decided, and what the daemon takes does not pass the forward chain.
    let copied = names.lan.iter().filter(|_| !plan.bridges.is_empty()).map(|lan| {
        format!("ct status & confirmed == 0 ct mark 0 meta mark {CARRIER_MARK:#x} iifname {lan} ct mark set {CARRIED_CONNECTION:#x}")
    });
    // The relay, too, must not reach this machine itself.
    let relay = plan.takes_packets().then(|| format!("iifname \"{PACKET_DEVICE}\" counter drop"));
    chain("input", "filter hook input priority filter - 1", lan.chain(copied).chain(relay).collect())
}

/// What the kernel itself answers to late packets of connections that connection tracking has forgotten, because their link was down. While the link's
/// routing rules are missing, such answers would leave over another link, and show its network where a client went over the first.
fn strays(names: &Names) -> Vec<String> {
    let Some(links) = set(&names.links) else { return Vec::new() };
    let answers = ["tcp flags & rst == rst", "icmp type destination-unreachable", "icmpv6 type destination-unreachable"];
    let rules = answers.map(|answer| format!("{answer} oifname {links} fib saddr . oif type != local counter drop"));
    chain("strays", "filter hook output priority filter - 2", rules.into())
}

/// The rules of the configuration, which the forward chain asks.
fn strict(plan: &GatewayPlan, names: &Names) -> Result<Vec<String>, UnusableName> {
    let mut lines = vec!["chain rules {".to_owned()];
    for rule in &plan.rules {
        if let Some(devices) = set(&quoted(&rule.unknown)?) {
            lines.push(format!("iifname {devices} return"));
            continue;
        }
        lines.extend(forward(rule, &names.devices)?);
        for address in plan.virtual_device.iter().flat_map(|device| &device.addresses) {
            if rule.client.is_some_and(|net| net.contains(address)) {
                lines.extend(forward(&ForwardRule { client: Some(twin(*address).into()), ..rule.clone() }, &names.devices)?);
            }
        }
    }
    lines.push("}".into());
    Ok(lines)
}

/// The chain for what this machine itself sends. It does not track connections.
fn sending(own: &OwnRules) -> Result<Vec<String>, UnusableName> {
    let mut rules = vec!["oifname \"lo\" return".to_owned()];
    let passed: Vec<String> = own.passed.iter().filter(|name| is_literal(name)).cloned().collect();
    rules.extend(set(&quoted(&passed)?).map(|passed| format!("oifname {passed} return")));
    rules.push(format!("meta mark {RELAY_MARK:#x} meta l4proto udp return"));
    rules.extend(
        [
            "meta nfproto ipv4 udp sport 68 udp dport 67 return",
            "meta nfproto ipv6 udp sport 546 udp dport 547 return",
            "icmpv6 type { nd-router-solicit, nd-router-advert, nd-neighbor-solicit, nd-neighbor-advert, nd-redirect } return",
            "icmpv6 type { mld-listener-query, mld-listener-report, mld-listener-done, mld2-listener-report } return",
            "ip protocol igmp return",
            "ip6 daddr fe80::/10 return",
        ]
        .map(String::from),
    );
    for (link, nets) in own.local.iter().filter(|(link, _)| is_literal(link)) {
        for net in nets {
            let family = if net.addr().is_ipv4() { "ip" } else { "ip6" };
            rules.push(format!("oifname \"{link}\" {family} daddr {} return", net.trunc()));
        }
    }
    rules.extend(own.gateways.iter().map(|gateway| match gateway {
        IpAddr::V4(gateway) => format!("ip daddr {gateway} icmp type echo-request return"),
        IpAddr::V6(gateway) => format!("ip6 daddr {gateway} icmpv6 type echo-request return"),
    }));
    for rule in own.rules.iter().filter(|rule| rule.unknown.is_empty()) {
        rules.extend(forward(rule, &BTreeSet::new())?);
    }
    rules.push("counter drop comment \"leaves through a relay only\"".to_owned());
    Ok(chain("output", "filter hook output priority filter - 1", rules))
}

/// The mark of connections over the link with this index.
fn connection_mark(index: LinkIndex) -> u32 {
    CONNECTION_BASE | (index.0 & CONNECTION_INDEX)
}

/// The rule as lines; none if no packet can match it.
fn forward(rule: &ForwardRule, lan: &BTreeSet<String>) -> Result<Vec<String>, UnusableName> {
    if let (Some(client), Some(destination)) = (rule.client, rule.destination)
        && client.addr().is_ipv4() != destination.addr().is_ipv4()
    {
        return Ok(Vec::new());
    }
    let address = |direction, net: IpNet| {
        let family = if net.addr().is_ipv4() { "ip" } else { "ip6" };
        // Such a prefix is only a condition on the family.
        match net.prefix_len() {
            0 => format!("meta nfproto {}", if family == "ip" { "ipv4" } else { "ipv6" }),
            _ => format!("{family} {direction} {}", net.trunc()),
        }
    };
    let conditions = [
        rule.mac.map(|mac| format!("ether saddr {mac}")),
        rule.client.map(|net| address("saddr", net)),
        rule.user.map(|user| format!("meta skuid {user}")),
        rule.destination.map(|net| address("daddr", net)),
        rule.port.map(|port| format!("meta l4proto {WITH_PORTS} th dport {port}")),
        (!rule.class_ports.is_empty()).then(|| {
            let ports: Vec<String> = rule.class_ports.iter().map(u16::to_string).collect();
            format!("meta l4proto {WITH_PORTS} th dport {{ {} }}", ports.join(", "))
        }),
    ];
    let line = |more: Option<String>, verdict: &str| {
        let words: Vec<String> = conditions.iter().flatten().cloned().chain(more).chain([verdict.to_owned()]).collect();
        words.join(" ")
    };
    let mut lines = Vec::new();
    if let Some(links) = &rule.links {
        let allowed: BTreeSet<String> = quoted(links)?.union(lan).cloned().collect();
        lines.push(line(set(&allowed).map(|allowed| format!("oifname != {allowed}")), "counter drop"));
    }
    lines.push(line(None, "return"));
    Ok(lines)
}

/// The names between quotation marks, without duplicates.
fn quoted(names: &[String]) -> Result<BTreeSet<String>, UnusableName> {
    let quote = |name: &String| if is_literal(name) { Ok(format!("\"{name}\"")) } else { Err(UnusableName { name: name.clone() }) };
    names.iter().map(quote).collect()
}

/// Whether nft takes this name literally between quotation marks. There are no escapes there, except for an asterisk, which is a wildcard otherwise.
fn is_literal(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"*\\".contains(&byte))
}

/// A set of these names; `None` instead of an empty one, which nft does not parse.
fn set(names: &BTreeSet<String>) -> Option<String> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    (!names.is_empty()).then(|| format!("{{ {} }}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> GatewayPlan {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
        GatewayPlan {
            lan: names(&["eth1", "br-lan"]),
            links: names(&["wlan0", "wwan0"]),
            bridges: names(&["br-lan", "docker0", "odd\"name"]).into_iter().collect(),
            slots: vec![(0, LinkIndex(2)), (3, LinkIndex(7))],
            mtu: Some(1428),
            ..Default::default()
        }
    }

    fn with(rule: ForwardRule) -> String {
        ruleset(&GatewayPlan { rules: vec![rule], ..plan() }).unwrap()
    }

    #[test]
    fn the_whole_script() {
        let expected = r#"table inet braid_gateway {}
delete table inet braid_gateway
table inet braid_gateway {
chain segments {
meta nfproto ipv4 tcp option maxseg size <= 1388 return
iifname { "wlan0", "wwan0" } tcp option maxseg size set rt mtu
oifname { "wlan0", "wwan0" } tcp option maxseg size set rt mtu
}
chain sources {
fib saddr . iif oif missing counter drop comment "source is not on this LAN"
}
chain connection_b1000002 {
meta mark set 0xb1d00001
}
chain connection_b1000007 {
meta mark set 0xb1d00004
}
chain connection_b1ffffff {
meta mark set 0xb1d000fe
}
chain prerouting {
type filter hook prerouting priority mangle; policy accept;
meta l4proto != tcp meta mark & 0xffff0000 == 0xb1d00000 ct direction original ct mark & 0xff000000 == 0xb1000000 ct mark != 0xb1ffffff iifname { "br-lan", "eth1" } ct mark set meta mark map { 0xb1d00001 : 0xb1000002, 0xb1d00004 : 0xb1000007 }
ct mark vmap { 0xb1000002 : goto connection_b1000002, 0xb1000007 : goto connection_b1000007, 0xb1ffffff : goto connection_b1ffffff }
ct status & confirmed == 0 ct mark 0 meta mark & 0xffff0000 == 0xb1d00000 iifname { "br-lan", "eth1" } ct mark set meta mark map { 0xb1d00001 : 0xb1000002, 0xb1d00004 : 0xb1000007, 0xb1d000fe : 0xb1ffffff } ct mark vmap { 0xb1000002 : goto connection_b1000002, 0xb1000007 : goto connection_b1000007, 0xb1ffffff : goto connection_b1ffffff }
meta mark & 0xffff0000 == 0xb1d00000 iifname { "br-lan", "eth1" } meta mark set 0
}
chain forward {
type filter hook forward priority filter - 1; policy accept;
iifname . oifname { "br-lan" . "br-lan", "docker0" . "docker0" } return
iifname { "br-lan", "eth1" } jump sources
ct status & confirmed == 0 ct mark 0 meta mark & 0xffff0000 == 0xb1d00000 iifname { "br-lan", "eth1" } ct mark set meta mark map { 0xb1d00001 : 0xb1000002, 0xb1d00004 : 0xb1000007, 0xb1d000fe : 0xb1ffffff }
meta l4proto != tcp meta mark & 0xffff0000 == 0xb1d00000 ct direction original ct mark & 0xff000000 == 0xb1000000 ct mark != 0xb1ffffff iifname { "br-lan", "eth1" } ct mark set meta mark map { 0xb1d00001 : 0xb1000002, 0xb1d00004 : 0xb1000007 }
iifname { "br-lan", "eth1" } jump rules
ct state new ct status & dnat == 0 meta nfproto ipv6 iifname != { "br-lan", "eth1" } counter drop
ct state invalid,untracked meta nfproto ipv6 iifname != { "br-lan", "eth1" } counter drop
ct state invalid,untracked iifname { "br-lan", "eth1" } oifname { "wlan0", "wwan0" } counter drop
tcp flags & (syn | rst) == syn jump segments
}
chain postrouting {
type nat hook postrouting priority srcnat; policy accept;
iifname { "br-lan", "eth1" } oifname { "wlan0", "wwan0" } masquerade
}
chain input {
type filter hook input priority filter - 1; policy accept;
meta mark 0xb1d000fe iifname { "br-lan", "eth1" } fib saddr . iif oif missing counter drop comment "source is not on this LAN"
ct status & confirmed == 0 ct mark 0 meta mark 0xb1d000fe iifname { "br-lan", "eth1" } ct mark set 0xb1ffffff
}
chain strays {
type filter hook output priority filter - 2; policy accept;
tcp flags & rst == rst oifname { "wlan0", "wwan0" } fib saddr . oif type != local counter drop
icmp type destination-unreachable oifname { "wlan0", "wwan0" } fib saddr . oif type != local counter drop
icmpv6 type destination-unreachable oifname { "wlan0", "wwan0" } fib saddr . oif type != local counter drop
}
chain rules {
meta l4proto { tcp, udp, udplite, sctp, dccp } th dport 80 return
oifname != { "br-lan", "eth1", "wwan0" } counter drop
return
}
}
"#;
        let first = ForwardRule { port: Some(80), ..Default::default() };
        let second = ForwardRule { links: Some(vec!["wwan0".into()]), ..Default::default() };
        let closed = PerFamily { v4: false, v6: true };
        assert_eq!(ruleset(&GatewayPlan { rules: vec![first, second], closed, ..plan() }).unwrap(), expected);
    }

    #[test]
    fn every_packet_proves_its_source_where_another_device_could_have_sent_it() {
        let sources = |lan: &[&str]| {
            let lan = lan.iter().map(|name| (*name).to_owned()).collect();
            let script = ruleset(&GatewayPlan { lan, ..plan() }).unwrap();
            script.lines().skip_while(|line| *line != "chain sources {").skip(1).take_while(|line| *line != "}").count()
        };
        assert_eq!((sources(&["eth1", "br-lan"]), sources(&["eth1"])), (1, 2));
    }

    #[test]
    fn packets_through_a_bond_are_translated_and_only_answers_come_back() {
        let script = ruleset(&GatewayPlan { packets: PerFamily { v4: true, v6: false }, ..plan() }).unwrap();
        let has = |line: &str| assert!(script.lines().any(|known| known == line), "{line}\n{script}");
        has("ct state new,invalid,untracked iifname \"braid-packets\" counter drop");
        has("iifname \"braid-packets\" counter drop");
        has("iifname { \"br-lan\", \"eth1\" } oifname { \"braid-packets\", \"wlan0\", \"wwan0\" } masquerade");
        // A flow may change between a link and the bond, but never joins or leaves those that the daemon takes.
        assert_eq!(script.matches("0xb1d000fd : 0xb1fffffe").count(), 4);
        assert_eq!(script.matches("0xb1fffffe : goto connection_b1fffffe").count(), 2);
        assert!(script.contains("chain connection_b1fffffe {\nmeta mark set 0xb1d000fd\n}"), "{script}");
        assert!(!ruleset(&plan()).unwrap().contains("braid-packets"));
    }

    #[test]
    fn a_strict_rule_has_all_conditions() {
        let rule = ForwardRule {
            unknown: Vec::new(),
            client: Some("192.168.1.7/24".parse().unwrap()),
            user: None,
            mac: Some(Mac([2, 0, 0xab, 0, 0, 1])),
            destination: Some("198.51.100.0/24".parse().unwrap()),
            port: Some(443),
            class_ports: vec![22, 5060],
            links: Some(vec!["wlan0".into()]),
        };
        let text = with(rule);
        let wanted = "\nether saddr 02:00:ab:00:00:01 ip saddr 192.168.1.0/24 ip daddr 198.51.100.0/24 \
            meta l4proto { tcp, udp, udplite, sctp, dccp } th dport 443 meta l4proto { tcp, udp, udplite, sctp, dccp } th dport { 22, 5060 } oifname != { \"br-lan\", \"eth1\", \"wlan0\" } counter drop";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn what_leaves_through_a_relay_only_is_dropped_but_for_exceptions() {
        let strict = |rule: ForwardRule| ForwardRule { links: Some(Vec::new()), ..rule };
        let own = OwnRules {
            passed: ["br0".to_owned(), "a\"b".to_owned()].into(),
            local: vec![("wlan0".to_owned(), ["192.168.1.0/24".parse().unwrap(), "2001:db8:1::/64".parse().unwrap()].into())],
            gateways: ["10.64.0.1".parse().unwrap()].into(),
            rules: vec![
                ForwardRule { user: Some(7), ..ForwardRule::default() },
                ForwardRule { unknown: vec!["braid0-sw".into()], ..ForwardRule::default() },
                strict(ForwardRule { destination: Some("198.51.100.7/32".parse().unwrap()), port: Some(443), ..ForwardRule::default() }),
                ForwardRule {
                    destination: Some("198.51.100.0/24".parse().unwrap()),
                    links: Some(vec!["wwan0".into()]),
                    ..ForwardRule::default()
                },
            ],
        };
        let expected = r#"table inet braid_gateway {}
delete table inet braid_gateway
table inet braid_gateway {
chain output {
type filter hook output priority filter - 1; policy accept;
oifname "lo" return
oifname { "br0" } return
meta mark 0xb1d000fc meta l4proto udp return
meta nfproto ipv4 udp sport 68 udp dport 67 return
meta nfproto ipv6 udp sport 546 udp dport 547 return
icmpv6 type { nd-router-solicit, nd-router-advert, nd-neighbor-solicit, nd-neighbor-advert, nd-redirect } return
icmpv6 type { mld-listener-query, mld-listener-report, mld-listener-done, mld2-listener-report } return
ip protocol igmp return
ip6 daddr fe80::/10 return
oifname "wlan0" ip daddr 192.168.1.0/24 return
oifname "wlan0" ip6 daddr 2001:db8:1::/64 return
ip daddr 10.64.0.1 icmp type echo-request return
meta skuid 7 return
ip daddr 198.51.100.7/32 meta l4proto { tcp, udp, udplite, sctp, dccp } th dport 443 counter drop
ip daddr 198.51.100.7/32 meta l4proto { tcp, udp, udplite, sctp, dccp } th dport 443 return
ip daddr 198.51.100.0/24 oifname != { "wwan0" } counter drop
ip daddr 198.51.100.0/24 return
counter drop comment "leaves through a relay only"
}
}
"#;
        assert_eq!(ruleset(&GatewayPlan { own: Some(own), ..GatewayPlan::default() }).unwrap(), expected);
    }

    #[test]
    fn a_rule_without_links_allows_no_link() {
        let text = with(ForwardRule { destination: Some("2001:db8::/32".parse().unwrap()), links: Some(Vec::new()), ..Default::default() });
        assert!(text.contains("ip6 daddr 2001:db8::/32 oifname != { \"br-lan\", \"eth1\" } counter drop"), "{text}");
    }

    #[test]
    fn a_prefix_of_length_zero_matches_its_family_only() {
        let text = with(ForwardRule { destination: Some("0.0.0.0/0".parse().unwrap()), links: Some(Vec::new()), ..Default::default() });
        assert!(text.contains("meta nfproto ipv4 oifname !="), "{text}");
    }

    #[test]
    fn a_rule_of_two_families_matches_nothing() {
        let rule =
            ForwardRule { client: Some("10.0.0.0/8".parse().unwrap()), destination: Some("::/0".parse().unwrap()), ..Default::default() };
        assert_eq!(with(rule), ruleset(&plan()).unwrap());
    }

    #[test]
    fn without_devices_the_chains_have_no_rule_for_them() {
        let text =
            ruleset(&GatewayPlan { closed: PerFamily { v4: true, v6: true }, rules: vec![ForwardRule::default()], ..Default::default() });
        let text = text.unwrap();
        assert!(!text.contains("ifname") && !text.contains("{ }"), "{text}");
        let lan_only = ruleset(&GatewayPlan { links: Vec::new(), ..plan() }).unwrap();
        assert!(lan_only.contains("iifname") && !lan_only.contains("masquerade"), "{lan_only}");
    }

    #[test]
    fn names_that_nft_does_not_take_literally_are_refused() {
        let used = |name: &str| ruleset(&GatewayPlan { links: vec![name.into()], ..plan() });
        for name in ["eth0.5", "a@b", "x;y", "{}#$'`~", "-", "exactly15bytes.", "0"] {
            assert!(used(name).unwrap().contains(&format!("{{ \"{name}\" }}")), "{name}");
        }
        for name in ["", "eth*", "*", "a\"b", "a\\*", "a b", "a\nb", "a\u{1}", "dév0", "sixteen bytes..."] {
            assert!(used(name).is_err(), "{name}");
            assert!(ruleset(&GatewayPlan { lan: vec![name.into()], ..plan() }).is_err(), "{name}");
            let rules = vec![ForwardRule { links: Some(vec![name.into()]), ..Default::default() }];
            assert!(ruleset(&GatewayPlan { rules, ..plan() }).is_err(), "{name}");
        }
        assert!(used("a\"b").unwrap_err().to_string().contains(r#""a\"b""#));
    }
}
