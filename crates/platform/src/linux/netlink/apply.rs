//! Making our rules and routes what they should be, and removing them.

use std::io;
use std::net::IpAddr;

use braid_decide::tables::{PROTOCOL, TablePlan};
use braid_model::{Family, NetworkSnapshot, NextHop, RouteFacts, RouteKind, RuleAction, RuleFacts};
use ipnet::IpNet;

use super::DumpError;
use super::facts::{self, AF_INET, AF_INET6};
use super::follow;
use super::talk::{ACK, CREATE, Conversation, EXCLUSIVE, REPLACE, REQUEST, Request};

/// What IPv6 makes of a route without metric.
const IPV6_METRIC: u32 = 1024;

/// Why rules or routes could not be changed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The kernel does not talk to us.
    #[error("cannot open an rtnetlink socket: {0}; a sandbox may forbid AF_NETLINK sockets: allow them")]
    Open(#[source] io::Error),
    /// What stands there now could not be read.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// One entry was refused.
    #[error("cannot {verb} {entry}: {source}; {}", remedy(.source))]
    Refused {
        /// "add" or "remove".
        verb: &'static str,
        /// The rule or route, in ip(8)'s words.
        entry: String,
        /// What the kernel said.
        source: io::Error,
    },
}

fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "it needs CAP_NET_ADMIN: run as root",
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENODEV | libc::ENETDOWN) => {
            "the device changed meanwhile: it is tried again at its next change"
        }
        Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT) => "the kernel needs CONFIG_IP_MULTIPLE_TABLES and CONFIG_IPV6_MULTIPLE_TABLES",
        _ => "`braid doctor` tells what this kernel can do",
    }
}

/// How many entries were removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Policy rules.
    pub rules: usize,
    /// Routes.
    pub routes: usize,
}

/// Makes our rules and routes in this thread's namespace those of `plan`, where `snapshot` tells what stands there now. Adds first,
/// then removes, so that there is no moment without; does nothing when nothing differs. A route has at most one hop. Goes on after a
/// refusal, and tells the first one.
pub fn apply(plan: &TablePlan, snapshot: &NetworkSnapshot) -> Result<(), ApplyError> {
    let wanted_rules: Vec<_> = plan.rules.iter().map(|rule| RuleFacts { ours: true, ..rule.clone() }).collect();
    let mut wanted_routes: Vec<RouteFacts> = Vec::new();
    for route in plan.routes.iter().map(settled) {
        // One destination and metric hold one route: the first.
        if !wanted_routes.iter().any(|other| same_place(other, &route)) {
            wanted_routes.push(route);
        }
    }
    // What a gateway is reached by comes before the gateway.
    wanted_routes.sort_by_key(|route| route.hops.iter().any(|hop| hop.gateway.is_some()));
    let standing_routes: Vec<_> = snapshot.routes.iter().filter(|route| route.ours).map(settled).collect();
    let standing_rules: Vec<_> = snapshot.rules.iter().filter(|rule| rule.ours).collect();

    let mut changes = Changes::open()?;
    for route in wanted_routes.iter().filter(|route| !standing_routes.contains(route)) {
        changes.make("add", route_text(route), add_route(route), libc::EEXIST);
    }
    for rule in wanted_rules.iter().filter(|rule| !standing_rules.contains(rule)) {
        changes.make("add", rule_text(rule), rule_request(libc::RTM_NEWRULE, CREATE | EXCLUSIVE, rule), libc::EEXIST);
    }
    for rule in standing_rules.iter().filter(|rule| !wanted_rules.contains(rule)) {
        changes.make("remove", rule_text(rule), rule_request(libc::RTM_DELRULE, 0, rule), libc::ENOENT);
    }
    for route in standing_routes.iter().filter(|route| !wanted_routes.iter().any(|wanted| same_place(wanted, route))) {
        changes.make("remove", route_text(route), remove_route(route), libc::ESRCH);
    }
    changes.finish()
}

/// Removes every rule and route of ours in this thread's namespace: rules first, so that nothing is looked up in a half-empty table.
/// Blocks, and needs no daemon; with nothing to remove it needs no privilege either.
pub fn sweep() -> Result<Swept, ApplyError> {
    let mut changes = Changes::open()?;
    let mut swept = Swept::default();
    for rule in follow::rules(&mut changes.kernel)?.iter().filter(|rule| rule.ours) {
        swept.rules += usize::from(changes.make("remove", rule_text(rule), rule_request(libc::RTM_DELRULE, 0, rule), libc::ENOENT));
    }
    for route in follow::routes(&mut changes.kernel)?.iter().filter(|route| route.ours) {
        swept.routes += usize::from(changes.make("remove", route_text(route), remove_route(route), libc::ESRCH));
    }
    changes.finish().map(|()| swept)
}

/// Changes made one after the other; the first refusal is kept, the others are logged.
struct Changes {
    kernel: Conversation,
    refused: Option<ApplyError>,
}

impl Changes {
    fn open() -> Result<Self, ApplyError> {
        Ok(Self { kernel: Conversation::open().map_err(ApplyError::Open)?, refused: None })
    }

    /// `already` is what the kernel says when nothing is left to do. Tells whether something was changed.
    fn make(&mut self, verb: &'static str, entry: String, request: Request, already: i32) -> bool {
        match self.kernel.change(request) {
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

    fn finish(self) -> Result<(), ApplyError> {
        self.refused.map_or(Ok(()), Err)
    }
}

/// The route as the kernel would show it, without what changes by itself.
fn settled(route: &RouteFacts) -> RouteFacts {
    let mut route = RouteFacts { destination: route.destination.trunc(), conditional: false, ours: true, ..route.clone() };
    route.hops.iter_mut().for_each(|hop| hop.dead = false);
    if route.family() == Family::V6 && route.metric == 0 {
        route.metric = IPV6_METRIC;
    }
    route
}

/// Whether the kernel holds only one of the two.
fn same_place(a: &RouteFacts, b: &RouteFacts) -> bool {
    (a.table, a.destination, a.metric) == (b.table, b.destination, b.metric)
}

fn add_route(route: &RouteFacts) -> Request {
    let gateway = route.hops.first().and_then(|hop| hop.gateway);
    let scope = match (route.kind, gateway) {
        (RouteKind::Unicast, None) => libc::RT_SCOPE_LINK,
        _ => libc::RT_SCOPE_UNIVERSE,
    };
    // The table holds the one device's routes: the gateway need not be found by another look-up.
    let flags = if gateway.is_some() { u32::from(RTNH_F_ONLINK) } else { 0 };
    route_request(libc::RTM_NEWROUTE, CREATE | REPLACE, route, scope, flags)
}

fn remove_route(route: &RouteFacts) -> Request {
    route_request(libc::RTM_DELROUTE, 0, route, libc::RT_SCOPE_NOWHERE, 0)
}

const RTNH_F_ONLINK: u8 = 4;

fn route_request(message: u16, flags: u16, route: &RouteFacts, scope: u8, route_flags: u32) -> Request {
    let kind = match route.kind {
        RouteKind::Unicast => libc::RTN_UNICAST,
        RouteKind::Local => libc::RTN_LOCAL,
        RouteKind::Broadcast => libc::RTN_BROADCAST,
        RouteKind::Refuse => libc::RTN_UNREACHABLE,
        RouteKind::Throw => libc::RTN_THROW,
    };
    let mut header = [number(route.family()), route.destination.prefix_len(), 0, 0, 0, PROTOCOL, scope, kind, 0, 0, 0, 0];
    header[8..].copy_from_slice(&route_flags.to_ne_bytes());
    let mut request = Request::new(message, REQUEST | ACK | flags, &header);
    request.attribute(facts::RTA_TABLE, &route.table.to_ne_bytes());
    request.attribute(facts::RTA_DST, &octets(route.destination.addr()));
    request.attribute(facts::RTA_PRIORITY, &route.metric.to_ne_bytes());
    if let Some(NextHop { device, gateway, .. }) = route.hops.first() {
        request.attribute(facts::RTA_OIF, &device.0.to_ne_bytes());
        match gateway {
            Some(gateway) if gateway.is_ipv4() == route.destination.addr().is_ipv4() => {
                request.attribute(facts::RTA_GATEWAY, &octets(*gateway));
            }
            // A gateway of the other family (RFC 5549): its family first.
            Some(gateway) => {
                let family = if gateway.is_ipv4() { AF_INET } else { AF_INET6 };
                request.attribute(facts::RTA_VIA, &[&u16::from(family).to_ne_bytes()[..], &octets(*gateway)].concat());
            }
            None => {}
        }
    }
    if let Some(source) = route.source {
        request.attribute(facts::RTA_PREFSRC, &octets(source));
    }
    request
}

fn rule_request(message: u16, flags: u16, rule: &RuleFacts) -> Request {
    let length = |net: Option<IpNet>| net.map_or(0, |net| net.prefix_len());
    let header = [number(rule.family), length(rule.destination), length(rule.source), 0, 0, 0, 0, facts::FR_ACT_TO_TBL, 0, 0, 0, 0];
    let mut request = Request::new(message, REQUEST | ACK | flags, &header);
    request.attribute(facts::FRA_PRIORITY, &rule.priority.to_ne_bytes());
    request.attribute(facts::FRA_PROTOCOL, &[PROTOCOL]);
    for (kind, net) in [(facts::FRA_DST, rule.destination), (facts::FRA_SRC, rule.source)] {
        if let Some(net) = net {
            request.attribute(kind, &octets(net.addr()));
        }
    }
    if let Some(device) = &rule.output {
        request.attribute(facts::FRA_OIFNAME, &[device.as_bytes(), &[0]].concat());
    }
    if let Some((mark, mask)) = rule.mark {
        request.attribute(facts::FRA_FWMARK, &mark.to_ne_bytes()).attribute(facts::FRA_FWMASK, &mask.to_ne_bytes());
    }
    if let RuleAction::Table(table) = rule.action {
        request.attribute(facts::FRA_TABLE, &table.to_ne_bytes());
    }
    if let Some(length) = rule.suppress_prefix_len {
        request.attribute(facts::FRA_SUPPRESS_PREFIXLEN, &u32::from(length).to_ne_bytes());
    }
    request
}

fn number(family: Family) -> u8 {
    match family {
        Family::V4 => AF_INET,
        Family::V6 => AF_INET6,
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn route_text(route: &RouteFacts) -> String {
    let hop = route.hops.first();
    let gateway = hop.and_then(|hop| hop.gateway).map_or(String::new(), |gateway| format!(" via {gateway}"));
    let device = hop.map_or(String::new(), |hop| format!(" on device {}", hop.device));
    format!("route {}{gateway}{device} in table {}", route.destination, route.table)
}

fn rule_text(rule: &RuleFacts) -> String {
    let mut text = format!("{} rule {}:", rule.family, rule.priority);
    for (word, net) in [("from", rule.source), ("to", rule.destination)] {
        if let Some(net) = net {
            text += &format!(" {word} {net}");
        }
    }
    if let Some(device) = &rule.output {
        text += &format!(" oif {device}");
    }
    if let Some((mark, mask)) = rule.mark {
        text += &format!(" fwmark {mark:#x}/{mask:#x}");
    }
    if let RuleAction::Table(table) = rule.action {
        text += &format!(" lookup {table}");
    }
    text
}
