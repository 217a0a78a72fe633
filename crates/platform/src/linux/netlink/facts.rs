//! Parses rtnetlink messages into facts.
//!
//! The library parses headers and attributes. Only the needed attributes are read, one at a time, because the library rejects an entire message for
//! one attribute that it cannot parse. A rule or route with an unreadable attribute is treated as if it could match anything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::{ByteCount, Family, FlowPorts, LinkIndex, Mac, NextHop, Protocol, RouteFacts, RouteKind, RuleAction, RuleFacts, Traffic};
use ipnet::IpNet;
use netlink_packet_core::{DecodeError, Emitable, Nla, NlaBuffer, NlasIterator, Parseable, ParseableParametrized};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressHeader};
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkHeader};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteLwEnCapType, RouteMetric, RouteNextHop, RouteNextHopFlags, RouteType,
    RouteVia,
};
use netlink_packet_route::rule::{RuleAction as Action, RuleAttribute, RuleFlags, RuleHeader, RulePortRange};
use netlink_packet_route::stats::{StatsAttribute, StatsHeader};

use super::{is_our_route, is_our_rule};

// Attribute types that neither the library nor libc exports.
const RTA_VIA: u16 = 18;
const FRA_IIFNAME: u16 = 3;
const FRA_OIFNAME: u16 = 17;
const FRA_PAD: u16 = 18;
const IFLA_STATS_LINK_64: u16 = 1;

/// A device as the kernel describes it, before data from sysfs is added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) index: LinkIndex,
    pub(super) name: String,
    /// `ARPHRD_*`.
    pub(super) hardware: u16,
    /// Driver kind of a software device, such as "veth" or "bridge".
    pub(super) driver_kind: Option<String>,
    pub(super) mac: Option<Mac>,
    pub(super) mtu: u32,
    pub(super) carrier: bool,
    /// The bridge, bond or VRF of which it is a port.
    pub(super) master: Option<LinkIndex>,
    /// What somebody has called it besides its name; empty: nothing.
    pub(super) alias: String,
}

/// Reads `RTM_NEWLINK`.
pub(super) fn device(body: &[u8]) -> Option<Device> {
    let header = read("device", LinkHeader::parse(body))?;
    // RUNNING follows the operational state (a Wi-Fi device is not running until it is authenticated), LOWER_UP the carrier itself.
    let carrier = header.flags.contains(LinkFlags::Up | LinkFlags::Running | LinkFlags::LowerUp);
    let (index, hardware) = (LinkIndex(header.index), u16::from(header.link_layer_type));
    let mut device =
        Device { index, name: String::new(), hardware, driver_kind: None, mac: None, mtu: 0, carrier, master: None, alias: String::new() };
    for attribute in attributes(body, &header) {
        let attribute = read("device", attribute)?;
        match attribute.kind() {
            libc::IFLA_LINKINFO => device.driver_kind = driver_kind(attribute.value()),
            libc::IFLA_MASTER => {
                device.master = <[u8; 4]>::try_from(attribute.value()).ok().map(|index| LinkIndex(u32::from_ne_bytes(index)))
            }
            libc::IFLA_IFALIAS => device.alias = name(&attribute),
            libc::IFLA_IFNAME | libc::IFLA_MTU | libc::IFLA_ADDRESS => {
                match LinkAttribute::parse_with_param(&attribute, header.interface_family) {
                    Ok(LinkAttribute::IfName(name)) => device.name = name,
                    Ok(LinkAttribute::Mtu(mtu)) => device.mtu = mtu,
                    Ok(LinkAttribute::Address(address)) => device.mac = <[u8; 6]>::try_from(address).ok().map(Mac),
                    Err(_) if attribute.kind() == libc::IFLA_IFNAME => device.name = name(&attribute),
                    outcome => return read("device", outcome).and(None),
                }
            }
            _ => {}
        }
    }
    Some(device)
}

/// Reads the kind from `IFLA_LINKINFO`. The library parses the entire attribute, including every driver's options, or nothing. A bridge with an
/// option that the library does not support must not be mistaken for a network card.
fn driver_kind(info: &[u8]) -> Option<String> {
    let kind = NlasIterator::new(info).flatten().find(|attribute| attribute.kind() == libc::IFLA_INFO_KIND)?;
    Some(InfoKind::parse(&kind).map_or_else(|_| name(&kind), |kind| kind.to_string()))
}

/// A usable source address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) device: LinkIndex,
    pub(super) net: IpNet,
    /// Whether this is an IPv6 privacy address, which the kernel prefers as a source address.
    pub(super) temporary: bool,
}

/// Reads `RTM_NEWADDR`. Omits addresses that are not global, not usable yet, or not usable for new flows.
pub(super) fn address(body: &[u8]) -> Option<Address> {
    let header = read("address", AddressHeader::parse(body))?;
    let mut flags = AddressFlags::from_bits_retain(u32::from(header.flags.bits()));
    let (mut local, mut other) = (None, None);
    for attribute in attributes(body, &header) {
        let attribute = read("address", attribute)?;
        if !matches!(attribute.kind(), libc::IFA_LOCAL | libc::IFA_ADDRESS | libc::IFA_FLAGS) {
            continue;
        }
        match read("address", AddressAttribute::parse(&attribute))? {
            AddressAttribute::Local(address) => local = Some(address),
            AddressAttribute::Address(address) => other = Some(address),
            AddressAttribute::Flags(all) => flags = all,
            _ => {}
        }
    }
    let waiting = flags.contains(AddressFlags::Tentative) && !flags.contains(AddressFlags::Optimistic);
    let unusable = waiting || flags.intersects(AddressFlags::Dadfailed | AddressFlags::Deprecated);
    if u8::from(header.scope) >= libc::RT_SCOPE_LINK || unusable {
        return None;
    }
    // On point-to-point devices ADDRESS is the remote end.
    let net = IpNet::new(local.or(other)?, header.prefix_len).ok()?;
    // One bit has two names: IFA_F_SECONDARY for IPv4, IFA_F_TEMPORARY for IPv6.
    let temporary = header.family == AddressFamily::Inet6 && flags.contains(AddressFlags::Secondary);
    Some(Address { device: LinkIndex(header.index), net, temporary })
}

/// Reads `RTM_NEWROUTE`. Omits entries of the routing cache. A route that cannot be parsed completely is conditional and has no hops; if its
/// destination is unreadable, it covers everything. Braid does not steer what such a route may concern.
pub(super) fn route(body: &[u8]) -> Option<RouteFacts> {
    let header = read("route", RouteHeader::parse(body))?;
    if header.flags.contains(RouteFlags::Cloned) {
        return None;
    }
    let (mut destination, mut table, mut metric, mut source) = (None, u32::from(header.table), 0, None);
    let (mut device, mut gateway, mut hops, mut complete) = (None, None, Vec::new(), true);
    for attribute in attributes(body, &header) {
        let attribute = match attribute {
            Ok(attribute) if !DECISIVE.contains(&attribute.kind()) => continue,
            // Encapsulation attributes are not parsed, so the type is irrelevant.
            Ok(attribute) => RouteAttribute::parse_with_param(&attribute, (header.address_family, header.kind, RouteLwEnCapType::None)),
            Err(error) => Err(error),
        };
        match read("route", attribute) {
            Some(RouteAttribute::Destination(address)) => destination = ip(&address),
            Some(RouteAttribute::Table(number)) => table = number,
            Some(RouteAttribute::Priority(number)) => metric = number,
            Some(RouteAttribute::PrefSource(address)) => source = ip(&address),
            Some(RouteAttribute::MultiPath(several)) => hops = several.iter().map(next_hop).collect(),
            Some(RouteAttribute::Oif(index)) => device = Some(LinkIndex(index)),
            Some(other) => gateway = gateway_of(&other).or(gateway),
            None => complete = false,
        }
    }
    if let Some(device) = device {
        hops.insert(0, NextHop { device, gateway, dead: header.flags.contains(RouteFlags::Dead) });
    }
    if !complete {
        hops.clear();
    }
    let unspecified = unspecified(family(header.address_family)?);
    let length = if complete || destination.is_some() { header.destination_prefix_length } else { 0 };
    let kind = match header.kind {
        RouteType::Unicast => RouteKind::Unicast,
        RouteType::Local => RouteKind::Local,
        RouteType::Broadcast | RouteType::Anycast | RouteType::Multicast => RouteKind::Broadcast,
        RouteType::Throw => RouteKind::Throw,
        _ => RouteKind::Refuse,
    };
    Some(RouteFacts {
        table,
        destination: IpNet::new(destination.unwrap_or(unspecified), length).ok()?,
        kind,
        metric,
        hops,
        source,
        conditional: !complete || header.source_prefix_length != 0 || header.tos != 0,
        ours: is_our_route(header.protocol.into(), table),
    })
}

/// The largest packet that an IPv4 route states, from `RTM_NEWROUTE`.
pub(super) fn route_mtu(body: &[u8]) -> Option<u32> {
    let header = RouteHeader::parse(body).ok().filter(|header| header.address_family == AddressFamily::Inet)?;
    let metrics = attributes(body, &header).flatten().find(|attribute| attribute.kind() == libc::RTA_METRICS)?;
    let parsed = RouteAttribute::parse_with_param(&metrics, (header.address_family, header.kind, RouteLwEnCapType::None)).ok()?;
    let RouteAttribute::Metrics(metrics) = parsed else { return None };
    metrics.iter().find_map(|metric| if let RouteMetric::Mtu(mtu) = metric { Some(*mtu) } else { None })
}

/// The attributes that determine where a route leads. Metrics, cache entries and encapsulations do not.
const DECISIVE: [u16; 8] =
    [libc::RTA_DST, libc::RTA_OIF, libc::RTA_GATEWAY, libc::RTA_PRIORITY, libc::RTA_PREFSRC, libc::RTA_MULTIPATH, libc::RTA_TABLE, RTA_VIA];

fn next_hop(hop: &RouteNextHop) -> NextHop {
    let gateway = hop.attributes.iter().find_map(gateway_of);
    NextHop { device: LinkIndex(hop.interface_index), gateway, dead: hop.flags.contains(RouteNextHopFlags::Dead) }
}

fn gateway_of(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        // A gateway of the other address family (RFC 5549).
        RouteAttribute::Via(RouteVia::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Via(RouteVia::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

/// Reads `RTM_NEWRULE`. A rule that cannot be parsed completely may match anything and do anything.
pub(super) fn rule(body: &[u8]) -> Option<RuleFacts> {
    let header = read("rule", RuleHeader::parse(body))?;
    let family = family(header.family)?;
    let (mut source, mut destination, mut mark, mut mask) = (None, None, None, None);
    let (mut table, mut target, mut protocol, mut complete) = (u32::from(header.table), 0, 0, true);
    let (mut transport, mut source_port, mut destination_port) = (None, None, None);
    let mut rule = RuleFacts {
        family,
        priority: 0,
        source: None,
        destination: None,
        mark: None,
        input: None,
        output: None,
        ports: None,
        conditional: header.tos != 0,
        invert: header.flags.contains(RuleFlags::Invert),
        action: RuleAction::Other,
        suppress_prefix_len: None,
        suppress_group: false,
        ours: false,
    };
    for attribute in attributes(body, &header) {
        match read("rule", attribute.and_then(|attribute| rule_attribute(&attribute))) {
            Some(RuleAttribute::Destination(address)) => destination = Some(address),
            Some(RuleAttribute::Source(address)) => source = Some(address),
            Some(RuleAttribute::Iifname(name)) => rule.input = Some(name),
            Some(RuleAttribute::Oifname(name)) => rule.output = Some(name),
            Some(RuleAttribute::Goto(priority)) => target = priority,
            Some(RuleAttribute::Priority(priority)) => rule.priority = priority,
            Some(RuleAttribute::FwMark(value)) => mark = Some(value),
            Some(RuleAttribute::FwMask(value)) => mask = Some(value),
            Some(RuleAttribute::Table(number)) => table = number,
            Some(RuleAttribute::Protocol(number)) => protocol = number.into(),
            // The kernel encodes "none" as -1.
            Some(RuleAttribute::SuppressPrefixLen(length)) => rule.suppress_prefix_len = u8::try_from(length).ok(),
            Some(RuleAttribute::SuppressIfGroup(group)) => rule.suppress_group = group != u32::MAX,
            Some(RuleAttribute::TunId(tunnel)) => rule.conditional |= tunnel != 0,
            Some(RuleAttribute::Realm(_)) => {}
            Some(RuleAttribute::Other(pad)) if pad.kind() == FRA_PAD => {}
            // Ports and protocols, and also users, l3mdev, and selectors of later kernels.
            Some(other) => {
                rule.conditional = true;
                match other {
                    RuleAttribute::IpProtocol(number) => transport = Some(Protocol::from_number(number.into())),
                    RuleAttribute::SourcePortRange(range) => source_port = only(range),
                    RuleAttribute::DestinationPortRange(range) => destination_port = only(range),
                    _ => {}
                }
            }
            None => complete = false,
        }
    }
    rule.conditional |= !complete;
    if let (Some(protocol), Some(source), Some(destination)) = (transport, source_port, destination_port) {
        rule.ports = Some(FlowPorts { protocol, source, destination });
    }
    rule.source = prefix(source, header.src_len, family);
    rule.destination = prefix(destination, header.dst_len, family);
    rule.mark = match (mark, mask) {
        (None | Some(0), None | Some(0)) => None,
        (mark, mask) => Some((mark.unwrap_or(0), mask.unwrap_or(u32::MAX))),
    };
    rule.action = match header.action {
        _ if !complete => RuleAction::Other,
        Action::ToTable => RuleAction::Table(table),
        Action::Goto => RuleAction::Goto(target),
        Action::Nop => RuleAction::Nop,
        Action::Blackhole | Action::Unreachable | Action::Prohibit => RuleAction::Refuse,
        _ => RuleAction::Other,
    };
    rule.ours = is_our_rule(protocol, rule.priority);
    Some(rule)
}

/// The port, if a range has only one.
fn only(range: RulePortRange) -> Option<u16> {
    (range.start == range.end).then_some(range.start)
}

/// Parses an attribute with the library, but also accepts device names that are not UTF-8.
fn rule_attribute(attribute: &NlaBuffer<&[u8]>) -> Result<RuleAttribute, DecodeError> {
    RuleAttribute::parse(attribute).or_else(|error| match attribute.kind() {
        FRA_IIFNAME => Ok(RuleAttribute::Iifname(name(attribute))),
        FRA_OIFNAME => Ok(RuleAttribute::Oifname(name(attribute))),
        _ => Err(error),
    })
}

/// Prefix of a selector. A length without an address means a prefix of zeros.
fn prefix(address: Option<IpAddr>, length: u8, family: Family) -> Option<IpNet> {
    if length == 0 && address.is_none() {
        return None;
    }
    IpNet::new(address.unwrap_or(unspecified(family)), length).ok()
}

/// Reads `RTM_NEWSTATS`: bytes received and sent.
pub(super) fn counters(body: &[u8]) -> Option<(LinkIndex, Traffic)> {
    let header = read("counters", StatsHeader::parse(body))?;
    let counted = attributes(body, &header).flatten().find(|attribute| attribute.kind() == IFLA_STATS_LINK_64)?;
    match read("counters", StatsAttribute::parse(&counted))? {
        StatsAttribute::Link64(stats) => {
            Some((LinkIndex(header.ifindex), [ByteCount::new(stats.rx_bytes), ByteCount::new(stats.tx_bytes)].into()))
        }
        _ => None,
    }
}

/// The attributes behind the fixed header. Truncated or malformed data yields an error as the last item.
fn attributes<'a>(body: &'a [u8], header: &impl Emitable) -> NlasIterator<&'a [u8]> {
    NlasIterator::new(body.get(header.buffer_len()..).unwrap_or_default())
}

/// Returns the parsed value, or logs the parse error.
fn read<T>(what: &'static str, outcome: Result<T, DecodeError>) -> Option<T> {
    outcome.inspect_err(|error| tracing::debug!(what, %error, "cannot parse an rtnetlink message")).ok()
}

/// A device name, up to its terminating zero. It need not be UTF-8.
fn name(attribute: &NlaBuffer<&[u8]>) -> String {
    let bytes = attribute.value().split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

fn family(number: AddressFamily) -> Option<Family> {
    match number {
        AddressFamily::Inet => Some(Family::V4),
        AddressFamily::Inet6 => Some(Family::V6),
        _ => None,
    }
}

/// The library's constant for a family.
pub(super) fn address_family(family: Family) -> AddressFamily {
    match family {
        Family::V4 => AddressFamily::Inet,
        Family::V6 => AddressFamily::Inet6,
    }
}

fn unspecified(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::DefaultNla;
    use netlink_packet_route::address::AddressMessage;
    use netlink_packet_route::link::LinkMessage;
    use netlink_packet_route::route::RouteMessage;
    use netlink_packet_route::rule::RuleMessage;
    use proptest::prelude::*;

    fn bytes(message: &impl Emitable) -> Vec<u8> {
        let mut bytes = vec![0; message.buffer_len()];
        message.emit(&mut bytes);
        bytes
    }

    fn raw(kind: u16, value: &[u8]) -> DefaultNla {
        DefaultNla::new(kind, value.to_vec())
    }

    fn read_route(header: RouteHeader, attributes: Vec<RouteAttribute>) -> Option<RouteFacts> {
        let mut message = RouteMessage::default();
        (message.header, message.attributes) = (header, attributes);
        route(&bytes(&message))
    }

    fn read_rule(attributes: Vec<RuleAttribute>) -> RuleFacts {
        let mut message = RuleMessage::default();
        message.header = RuleHeader { family: AddressFamily::Inet6, table: 254, action: Action::ToTable, ..Default::default() };
        message.attributes = attributes;
        rule(&bytes(&message)).unwrap()
    }

    fn read_device(attributes: Vec<LinkAttribute>) -> Option<Device> {
        let mut message = LinkMessage::default();
        (message.header.index, message.attributes) = (7, attributes);
        device(&bytes(&message))
    }

    fn unicast(address_family: AddressFamily) -> RouteHeader {
        RouteHeader { address_family, table: 254, kind: RouteType::Unicast, ..Default::default() }
    }

    #[test]
    fn each_hop_of_a_multipath_route_is_read() {
        let hop = |flags, interface_index, gateway: [u8; 4]| {
            let mut hop = RouteNextHop::default();
            (hop.flags, hop.interface_index) = (flags, interface_index);
            hop.attributes = vec![RouteAttribute::Gateway(RouteAddress::Inet(gateway.into()))];
            hop
        };
        let hops = vec![hop(RouteNextHopFlags::empty(), 3, [10, 0, 0, 1]), hop(RouteNextHopFlags::Dead, 4, [10, 1, 0, 1])];
        let route = read_route(unicast(AddressFamily::Inet), vec![RouteAttribute::MultiPath(hops)]).unwrap();
        assert_eq!(route.destination.to_string(), "0.0.0.0/0");
        let read: Vec<_> = route.hops.iter().map(|hop| (hop.device.0, hop.gateway.unwrap().to_string(), hop.dead)).collect();
        assert_eq!(read, [(3, "10.0.0.1".to_owned(), false), (4, "10.1.0.1".to_owned(), true)]);
    }

    #[test]
    fn a_gateway_of_the_other_family_is_read_and_a_cached_route_is_not() {
        let attributes = vec![RouteAttribute::Oif(2), RouteAttribute::Via(RouteVia::Inet6("fe80::1".parse().unwrap()))];
        let header = unicast(AddressFamily::Inet);
        assert_eq!(read_route(header.clone(), attributes.clone()).unwrap().hops[0].gateway, Some("fe80::1".parse().unwrap()));
        assert_eq!(read_route(RouteHeader { flags: RouteFlags::Cloned, ..header }, attributes), None);
    }

    #[test]
    fn source_routes_and_rules_with_unknown_selectors_are_conditional() {
        let source = RouteHeader { source_prefix_length: 56, ..unicast(AddressFamily::Inet6) };
        assert!(read_route(source, vec![]).unwrap().conditional);
        assert!(!read_rule(vec![RuleAttribute::Priority(9), RuleAttribute::Other(raw(FRA_PAD, &[]))]).conditional);
        let unknown = read_rule(vec![RuleAttribute::Other(raw(99, &[1]))]);
        assert_eq!((unknown.conditional, unknown.action), (true, RuleAction::Table(254)));
    }

    #[test]
    fn an_unreadable_rule_may_do_anything() {
        // A table number of three bytes.
        let rule = read_rule(vec![RuleAttribute::Priority(9), RuleAttribute::Other(raw(15, &[1, 2, 3]))]);
        assert_eq!((rule.priority, rule.conditional, rule.action), (9, true, RuleAction::Other));
        let mut cut = RuleMessage::default();
        cut.header.family = AddressFamily::Inet;
        let cut = [&bytes(&cut)[..], &[200, 0, 1, 0]].concat();
        assert_eq!(rule_action(&cut), (true, RuleAction::Other));
    }

    fn rule_action(body: &[u8]) -> (bool, RuleAction) {
        let rule = rule(body).unwrap();
        (rule.conditional, rule.action)
    }

    #[test]
    fn an_unreadable_route_is_conditional_and_has_no_hops() {
        let header = RouteHeader { destination_prefix_length: 8, ..unicast(AddressFamily::Inet) };
        let to = RouteAttribute::Destination(RouteAddress::Inet([10, 0, 0, 0].into()));
        let bad = |kind| RouteAttribute::Other(raw(kind, &[1, 2, 3]));
        let route = read_route(header.clone(), vec![to.clone(), RouteAttribute::Oif(2), bad(libc::RTA_GATEWAY)]).unwrap();
        assert_eq!((route.destination.to_string().as_str(), route.conditional, route.hops.len()), ("10.0.0.0/8", true, 0));
        let route = read_route(header.clone(), vec![bad(libc::RTA_DST), RouteAttribute::Oif(2)]).unwrap();
        assert_eq!((route.destination.to_string().as_str(), route.conditional), ("0.0.0.0/0", true), "it may cover everything");
        // Attributes that do not determine where the route leads may be malformed.
        let route = read_route(header, vec![to, RouteAttribute::Oif(2), bad(libc::RTA_METRICS), bad(77)]).unwrap();
        assert_eq!((route.conditional, route.hops.len()), (false, 1));
    }

    #[test]
    fn a_device_is_read_despite_malformed_other_attributes() {
        let unreadable = LinkAttribute::Other(raw(libc::IFLA_OPERSTATE, &[1, 2, 3]));
        let latin = LinkAttribute::Other(raw(libc::IFLA_IFNAME, b"caf\xe9\0"));
        let device = read_device(vec![unreadable, latin, LinkAttribute::Mtu(1400), LinkAttribute::Address(vec![2; 6])]).unwrap();
        assert_eq!((device.index.0, device.name.as_str(), device.mtu, device.mac), (7, "caf\u{fffd}", 1400, Some(Mac([2; 6]))));
        assert_eq!(read_device(vec![LinkAttribute::Other(raw(libc::IFLA_MTU, &[1]))]), None);
    }

    #[test]
    fn a_software_device_with_an_unreadable_option_is_recognized() {
        // IFLA_INFO_KIND "bridge", then IFLA_INFO_DATA with a forward delay of three bytes.
        let kind = [&[11, 0, 1, 0][..], b"bridge\0\0"].concat();
        let option = [12, 0, 2, 0, 7, 0, 1, 0, 1, 2, 3, 0];
        let info = LinkAttribute::Other(raw(libc::IFLA_LINKINFO, &[&kind[..], &option].concat()));
        assert_eq!(read_device(vec![info]).unwrap().driver_kind.as_deref(), Some("bridge"));
        let port = LinkAttribute::Other(raw(libc::IFLA_LINKINFO, &[11, 0, 4, 0, b'b', b'r', b'i', b'd', b'g', b'e', 0, 0]));
        assert_eq!(read_device(vec![port]).unwrap().driver_kind, None, "a network card in a bridge stays a network card");
    }

    #[test]
    fn only_addresses_usable_by_new_flows_are_read() {
        let read = |flags, scope: u8| {
            let mut message = AddressMessage::default();
            message.header =
                AddressHeader { family: AddressFamily::Inet6, prefix_len: 64, scope: scope.into(), index: 5, ..Default::default() };
            let net = IpAddr::from([0x20; 16]);
            message.attributes = vec![AddressAttribute::Address(net), AddressAttribute::Flags(AddressFlags::from_bits_retain(flags))];
            address(&bytes(&message))
        };
        assert!(read(libc::IFA_F_TEMPORARY, 0).unwrap().temporary);
        assert!(read(libc::IFA_F_TENTATIVE | libc::IFA_F_OPTIMISTIC, 0).is_some());
        for flags in [libc::IFA_F_TENTATIVE, libc::IFA_F_DADFAILED, libc::IFA_F_DEPRECATED] {
            assert_eq!(read(flags, 0), None);
        }
        assert_eq!(read(0, libc::RT_SCOPE_LINK), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (device(&bytes), address(&bytes), route(&bytes), rule(&bytes), counters(&bytes));
        }

        #[test]
        fn any_attribute_value_is_parsed_without_panic(kind in 0u16..32, value in prop::collection::vec(any::<u8>(), 0..40)) {
            read_device(vec![LinkAttribute::Other(raw(kind, &value))]);
            read_rule(vec![RuleAttribute::Other(raw(kind, &value))]);
            for family in [AddressFamily::Inet, AddressFamily::Inet6] {
                prop_assert!(read_route(unicast(family), vec![RouteAttribute::Other(raw(kind, &value))]).is_some());
            }
        }
    }
}
