//! Applies Braid's rules and routes to the kernel, and removes them.

use std::io;
use std::net::Ipv6Addr;

use braid_decide::tables::{PROTOCOL, TablePlan, normalized, same_key};
use braid_model::{Family, LinkIndex, NetworkSnapshot, NextHop, RouteFacts, RouteKind, RuleAction, RuleFacts};
use ipnet::{IpNet, Ipv6Net};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction as Action, RuleAttribute, RuleHeader, RuleMessage, RulePortRange};

use super::DumpError;
use super::facts::address_family;
use super::follow;
use super::talk::NetlinkSocket;

/// Prefix to which the datagrams of unconnected IPv6 sockets are redirected; `REDIRECT_PREFIX` in `redirect.h`. It is a unique local prefix (RFC 4193
/// has networks choose theirs at random) that is made local here, so that nothing sent to it leaves the machine.
pub const LOOPBACK_PREFIX: IpNet = IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfd62, 0x7261, 0x6964, 0x5757, 0, 0, 0, 0), 64));

/// Priority of the marker rule of [`allow_connect_moves`], behind all rules that lead anywhere.
const MARKER_PRIORITY: u32 = 32_765;
/// `RT_TABLE_LOCAL`, the table of local addresses, which the kernel searches first.
const LOCAL_TABLE: u32 = 255;
/// `LOOPBACK_IFINDEX` of the kernel: the first device of every namespace.
const LOOPBACK: LinkIndex = LinkIndex(1);

/// Why rules or routes could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// An rtnetlink socket cannot be opened.
    #[error("cannot open an rtnetlink socket: {0}; a sandbox may forbid AF_NETLINK sockets: allow them")]
    Open(#[source] io::Error),
    /// The current rules and routes could not be read.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// `net.ipv4.ip_dynaddr` cannot be written.
    #[error("cannot write net.ipv4.ip_dynaddr: {0}; a sandbox may forbid it: a service needs ReadWritePaths=/proc/sys/net/ipv4/ip_dynaddr")]
    Dynaddr(#[source] io::Error),
    /// Another device has the name of one end of the virtual interface.
    #[error("cannot make the virtual interface: there is another device {name}; give the virtual interface another name ([virtual] name)")]
    Taken {
        /// The name.
        name: String,
    },
    /// Another device has the name of the device for moved flows.
    #[error("cannot move flows: there is another device {name}; rename it (ip link set {name} name NEW)")]
    Occupied {
        /// The name.
        name: String,
    },
    /// A setting of a device cannot be written.
    #[error("cannot write {path}: {source}; a sandbox may forbid it: a service needs ReadWritePaths=/proc/sys/net")]
    Setting {
        /// Its path.
        path: String,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The kernel rejected one entry.
    #[error("cannot {verb} {entry}: {source}; {}", remedy(.source))]
    Refused {
        /// Attempted operation, such as "add".
        verb: &'static str,
        /// The rule, route, address or device, in the notation of ip(8).
        entry: String,
        /// Error of the kernel.
        source: io::Error,
    },
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "this needs CAP_NET_ADMIN: run as root",
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENODEV | libc::ENETDOWN) => {
            "the device changed in the meantime: Braid retries at its next change"
        }
        Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT) => "the kernel needs CONFIG_IP_MULTIPLE_TABLES and CONFIG_IPV6_MULTIPLE_TABLES",
        _ => "`braid doctor` shows what this kernel supports",
    }
}

/// Mark of the rule that records that [`allow_connect_moves`] changed the kernel's setting. No packet carries it.
const MARKER_FWMARK: (u32, u32) = (0xB1D0_FF00, u32::MAX);
/// Kernel setting that lets a connect choose another source address if its own is no longer routable (`ip_dynaddr`, ip-sysctl).
const DYNADDR: &str = "/proc/sys/net/ipv4/ip_dynaddr";

fn marker_rule() -> RuleFacts {
    let refuse =
        RuleFacts { action: RuleAction::Refuse, mark: Some(MARKER_FWMARK), ..braid_decide::tables::rule(Family::V4, MARKER_PRIORITY, 0) };
    RuleFacts { ours: true, ..refuse }
}

/// Lets connects in this thread's namespace choose another source address if theirs is no longer routable (`net.ipv4.ip_dynaddr`), until [`sweep`]
/// reverts it. Does nothing if the setting is already on. A marker rule that matches no packet records in the kernel that the setting was off, so
/// that any later [`sweep`] finds it, even after a crash of the daemon. Returns whether it turned the setting on.
pub fn allow_connect_moves() -> Result<bool, ApplyError> {
    if read_dynaddr() != Some(0) {
        return Ok(false);
    }
    mark_connect_moves()?;
    std::fs::write(DYNADDR, "1").map_err(ApplyError::Dynaddr).map(|()| true)
}

/// Sets the marker rule of [`allow_connect_moves`], which somebody may have removed.
pub fn mark_connect_moves() -> Result<(), ApplyError> {
    let mut changes = Changes::open()?;
    changes.make("add", rule_text(&marker_rule()), add_rule(&marker_rule(), PROTOCOL), libc::EEXIST);
    changes.finish()
}

fn read_dynaddr() -> Option<u8> {
    std::fs::read_to_string(DYNADDR).ok()?.trim().parse().ok()
}

/// Number of removed entries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Policy rules.
    pub rules: usize,
    /// Routes.
    pub routes: usize,
}

/// Changes Braid's rules and routes in this thread's namespace to those of `plan`. `snapshot` is the current state. Adds entries before it removes
/// others, so that there is no gap; does nothing if the two agree. Each route has at most one hop. Continues after a rejected entry and returns the
/// first error.
pub fn apply(plan: &TablePlan, snapshot: &NetworkSnapshot) -> Result<(), ApplyError> {
    let wanted_rules: Vec<_> = plan.rules.iter().map(|rule| RuleFacts { ours: true, ..rule.clone() }).collect();
    let mut wanted_routes = plan.kept_routes();
    // Add the routes to gateways before the routes through them.
    wanted_routes.sort_by_key(|route| route.hops.iter().any(|hop| hop.gateway.is_some()));
    let current_routes: Vec<_> = snapshot.routes.iter().filter(|route| route.ours).map(normalized).collect();
    let current_rules: Vec<_> = snapshot.rules.iter().filter(|rule| rule.ours && rule.mark != Some(MARKER_FWMARK)).collect();

    let mut changes = Changes::open()?;
    for route in wanted_routes.iter().filter(|route| !current_routes.contains(route)) {
        changes.make("add", route_text(route), add_route(route), libc::EEXIST);
    }
    for rule in wanted_rules.iter().filter(|rule| !current_rules.contains(rule)) {
        changes.make("add", rule_text(rule), add_rule(rule, PROTOCOL), libc::EEXIST);
    }
    for rule in in_order_of_removal(&current_rules).filter(|rule| !wanted_rules.contains(rule)) {
        changes.make("remove", rule_text(rule), remove_rule(rule, PROTOCOL), libc::ENOENT);
    }
    for route in current_routes.iter().filter(|route| !wanted_routes.iter().any(|wanted| same_key(wanted, route))) {
        changes.make("remove", route_text(route), remove_route(route), libc::ESRCH);
    }
    changes.finish()
}

/// Makes all addresses of [`LOOPBACK_PREFIX`] local to the loopback device in this thread's namespace, until [`sweep`] reverts it. Does nothing if
/// they already are.
pub fn own_loopback_prefix() -> Result<(), ApplyError> {
    let route = normalized(&RouteFacts {
        table: LOCAL_TABLE,
        kind: RouteKind::Local,
        destination: LOOPBACK_PREFIX,
        metric: 0,
        hops: vec![NextHop { device: LOOPBACK, gateway: None, dead: false }],
        source: None,
        conditional: false,
        ours: true,
    });
    let message = route_message(&route, RouteScope::Host, RouteFlags::empty());
    let mut changes = Changes::open()?;
    changes.make("add", route_text(&route), (RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL), libc::EEXIST);
    changes.finish()
}

/// Removes all of Braid's rules and routes. Removes rules first, so that no lookup uses a half-empty table.
pub(super) fn sweep() -> Result<Swept, ApplyError> {
    let mut changes = Changes::open()?;
    let mut swept = Swept::default();
    for rule in in_order_of_removal(&follow::rules(&mut changes.kernel)?).filter(|rule| rule.ours) {
        // If somebody has changed the setting since, keep their value.
        if rule.mark == Some(MARKER_FWMARK) && read_dynaddr() == Some(1) {
            std::fs::write(DYNADDR, "0").map_err(ApplyError::Dynaddr)?;
        }
        swept.rules += usize::from(changes.make("remove", rule_text(rule), remove_rule(rule, PROTOCOL), libc::ENOENT));
    }
    let on_loopback = |route: &RouteFacts| route.table == LOCAL_TABLE && route.destination == LOOPBACK_PREFIX;
    for route in follow::routes(&mut changes.kernel)?.iter().filter(|route| route.ours || on_loopback(route)) {
        swept.routes += usize::from(changes.make("remove", route_text(route), remove_route(route), libc::ESRCH));
    }
    changes.finish().map(|()| swept)
}

/// Rules, with the last of the kernel's order first. In its order, the rules for specific routes would go before those that lead to the links' tables.
/// Meanwhile a packet for a client, which has a link's mark, would leave over that link.
fn in_order_of_removal<T>(rules: &[T]) -> impl Iterator<Item = &T> {
    rules.iter().rev()
}

/// A request to the kernel, and its flags, such as `NLM_F_CREATE`.
pub(super) type Change = (RouteNetlinkMessage, u16);

/// Makes changes one after the other. Keeps the first error and logs all of them.
pub(super) struct Changes {
    pub(super) kernel: NetlinkSocket,
    refused: Option<ApplyError>,
}

impl Changes {
    pub(super) fn open() -> Result<Self, ApplyError> {
        Ok(Self { kernel: NetlinkSocket::open().map_err(ApplyError::Open)?, refused: None })
    }

    /// Makes one change. `already` is the error that means that there is nothing to do. Returns whether something was changed.
    pub(super) fn make(&mut self, verb: &'static str, entry: String, change: Change, already: i32) -> bool {
        match self.kernel.change(change.0, change.1) {
            Ok(()) => return true,
            Err(error) if error.raw_os_error() == Some(already) => {}
            Err(source) => {
                let error = ApplyError::Refused { verb, entry, source };
                tracing::debug!(%error);
                self.refused.get_or_insert(error);
            }
        }
        false
    }

    pub(super) fn finish(self) -> Result<(), ApplyError> {
        self.refused.map_or(Ok(()), Err)
    }
}

fn add_route(route: &RouteFacts) -> Change {
    let gateway = route.hops.first().and_then(|hop| hop.gateway);
    let scope = match (route.kind, gateway) {
        (RouteKind::Local, _) => RouteScope::Host,
        (RouteKind::Unicast, None) => RouteScope::Link,
        _ => RouteScope::Universe,
    };
    // The table holds the routes of one device, so the kernel need not look up the gateway.
    let flags = if gateway.is_some() { RouteFlags::Onlink } else { RouteFlags::empty() };
    (RouteNetlinkMessage::NewRoute(route_message(route, scope, flags)), NLM_F_CREATE | NLM_F_REPLACE)
}

fn remove_route(route: &RouteFacts) -> Change {
    (RouteNetlinkMessage::DelRoute(route_message(route, RouteScope::NoWhere, RouteFlags::empty())), 0)
}

pub(super) fn route_message(route: &RouteFacts, scope: RouteScope, flags: RouteFlags) -> RouteMessage {
    let kind = match route.kind {
        RouteKind::Unicast => RouteType::Unicast,
        RouteKind::Local => RouteType::Local,
        RouteKind::Broadcast => RouteType::Broadcast,
        RouteKind::Refuse => RouteType::Unreachable,
        RouteKind::Throw => RouteType::Throw,
    };
    let mut message = RouteMessage::default();
    message.header = RouteHeader {
        address_family: address_family(route.family()),
        destination_prefix_length: route.destination.prefix_len(),
        protocol: PROTOCOL.into(),
        scope,
        kind,
        flags,
        ..Default::default()
    };
    message.attributes = vec![
        RouteAttribute::Table(route.table),
        RouteAttribute::Destination(route.destination.addr().into()),
        RouteAttribute::Priority(route.metric),
    ];
    if let Some(NextHop { device, gateway, .. }) = route.hops.first() {
        message.attributes.push(RouteAttribute::Oif(device.0));
        message.attributes.extend(gateway.map(|gateway| match gateway.is_ipv4() == route.destination.addr().is_ipv4() {
            true => RouteAttribute::Gateway(gateway.into()),
            // A gateway of the other address family (RFC 5549).
            false => RouteAttribute::Via(gateway.into()),
        }));
    }
    message.attributes.extend(route.source.map(|source| RouteAttribute::PrefSource(source.into())));
    message
}

pub(super) fn add_rule(rule: &RuleFacts, protocol: u8) -> Change {
    (RouteNetlinkMessage::NewRule(rule_message(rule, protocol)), NLM_F_CREATE | NLM_F_EXCL)
}

pub(super) fn remove_rule(rule: &RuleFacts, protocol: u8) -> Change {
    (RouteNetlinkMessage::DelRule(rule_message(rule, protocol)), 0)
}

fn rule_message(rule: &RuleFacts, protocol: u8) -> RuleMessage {
    let length = |net: Option<IpNet>| net.map_or(0, |net| net.prefix_len());
    let mut message = RuleMessage::default();
    message.header = RuleHeader {
        family: address_family(rule.family),
        dst_len: length(rule.destination),
        src_len: length(rule.source),
        action: if rule.action == RuleAction::Refuse { Action::Unreachable } else { Action::ToTable },
        ..Default::default()
    };
    message.attributes = vec![RuleAttribute::Priority(rule.priority), RuleAttribute::Protocol(protocol.into())];
    let mut add = |attribute: Option<RuleAttribute>| message.attributes.extend(attribute);
    add(rule.destination.map(|net| RuleAttribute::Destination(net.addr())));
    add(rule.source.map(|net| RuleAttribute::Source(net.addr())));
    add(rule.input.clone().map(RuleAttribute::Iifname));
    add(rule.output.clone().map(RuleAttribute::Oifname));
    add(rule.mark.map(|(mark, _)| RuleAttribute::FwMark(mark)));
    add(rule.mark.map(|(_, mask)| RuleAttribute::FwMask(mask)));
    if let RuleAction::Table(table) = rule.action {
        add(Some(RuleAttribute::Table(table)));
    }
    add(rule.suppress_prefix_len.map(|length| RuleAttribute::SuppressPrefixLen(length.into())));
    let only = |port| RulePortRange { start: port, end: port };
    add(rule.ports.map(|ports| RuleAttribute::IpProtocol(ports.protocol.number().into())));
    add(rule.ports.map(|ports| RuleAttribute::SourcePortRange(only(ports.source))));
    add(rule.ports.map(|ports| RuleAttribute::DestinationPortRange(only(ports.destination))));
    message
}

pub(super) fn route_text(route: &RouteFacts) -> String {
    let hop = route.hops.first();
    let gateway = hop.and_then(|hop| hop.gateway).map_or(String::new(), |gateway| format!(" via {gateway}"));
    let device = hop.map_or(String::new(), |hop| format!(" on device {}", hop.device));
    format!("route {}{gateway}{device} in table {}", route.destination, route.table)
}

pub(super) fn rule_text(rule: &RuleFacts) -> String {
    let mut text = format!("{} rule {}:", rule.family, rule.priority);
    for (word, net) in [("from", rule.source), ("to", rule.destination)] {
        if let Some(net) = net {
            text += &format!(" {word} {net}");
        }
    }
    if let Some(device) = &rule.input {
        text += &format!(" iif {device}");
    }
    if let Some(device) = &rule.output {
        text += &format!(" oif {device}");
    }
    if let Some((mark, mask)) = rule.mark {
        text += &format!(" fwmark {mark:#x}/{mask:#x}");
    }
    if let Some(ports) = &rule.ports {
        text += &format!(" {:?} sport {} dport {}", ports.protocol, ports.source, ports.destination);
    }
    match rule.action {
        RuleAction::Table(table) => text += &format!(" lookup {table}"),
        RuleAction::Refuse => text += " unreachable",
        RuleAction::Goto(_) | RuleAction::Nop | RuleAction::Other => {}
    }
    text
}
