//! From rtnetlink's messages to facts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::{Family, LinkIndex, NextHop, RouteFacts, RouteKind, RuleAction, RuleFacts};
use ipnet::IpNet;

use super::talk::{attributes, string, u16_at, u32_at};
use super::{is_our_route, is_our_rule};

pub(super) const AF_INET: u8 = libc::AF_INET as u8;
pub(super) const AF_INET6: u8 = libc::AF_INET6 as u8;

pub(super) const RTA_DST: u16 = 1;
pub(super) const RTA_OIF: u16 = 4;
pub(super) const RTA_GATEWAY: u16 = 5;
pub(super) const RTA_PRIORITY: u16 = 6;
pub(super) const RTA_PREFSRC: u16 = 7;
const RTA_MULTIPATH: u16 = 9;
pub(super) const RTA_TABLE: u16 = 15;
pub(super) const RTA_VIA: u16 = 18;

pub(super) const FRA_DST: u16 = 1;
pub(super) const FRA_SRC: u16 = 2;
const FRA_IIFNAME: u16 = 3;
const FRA_GOTO: u16 = 4;
pub(super) const FRA_PRIORITY: u16 = 6;
pub(super) const FRA_FWMARK: u16 = 10;
const FRA_FLOW: u16 = 11;
const FRA_TUN_ID: u16 = 12;
const FRA_SUPPRESS_IFGROUP: u16 = 13;
pub(super) const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
pub(super) const FRA_TABLE: u16 = 15;
pub(super) const FRA_FWMASK: u16 = 16;
pub(super) const FRA_OIFNAME: u16 = 17;
const FRA_PAD: u16 = 18;
pub(super) const FRA_PROTOCOL: u16 = 21;

pub(super) const FR_ACT_TO_TBL: u8 = 1;
const FR_ACT_GOTO: u8 = 2;
const FR_ACT_NOP: u8 = 3;
const FR_ACT_REFUSE: std::ops::RangeInclusive<u8> = 6..=8;
const FIB_RULE_INVERT: u32 = 2;

const RTNH_F_DEAD: u8 = 1;
const LOWER_UP: u32 = 1 << 16;

/// A device as the kernel describes it, before files of the system are asked about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) index: LinkIndex,
    pub(super) name: String,
    /// `ARPHRD_*`.
    pub(super) hardware: u16,
    /// The driver's kind, for devices made by software: "veth", "bridge", ...
    pub(super) made_as: Option<String>,
    pub(super) mac: Option<[u8; 6]>,
    pub(super) mtu: u32,
    pub(super) carrier: bool,
}

/// Reads `RTM_NEWLINK`.
pub(super) fn device(body: &[u8]) -> Option<Device> {
    let flags = u32_at(body, 8)?;
    // RUNNING follows the operational state (a Wi-Fi device has none until it is authenticated), LOWER_UP the carrier itself.
    let wanted = libc::IFF_UP as u32 | libc::IFF_RUNNING as u32 | LOWER_UP;
    let mut device = Device {
        index: LinkIndex(u32_at(body, 4)?),
        name: String::new(),
        hardware: u16_at(body, 2)?,
        made_as: None,
        mac: None,
        mtu: 0,
        carrier: flags & wanted == wanted,
    };
    for (kind, value) in attributes(body.get(16..)?) {
        match kind {
            libc::IFLA_IFNAME => device.name = string(value),
            libc::IFLA_MTU => device.mtu = u32_at(value, 0)?,
            libc::IFLA_ADDRESS => device.mac = <[u8; 6]>::try_from(value).ok(),
            libc::IFLA_LINKINFO => {
                device.made_as = attributes(value).find(|(kind, _)| *kind == libc::IFLA_INFO_KIND).map(|(_, kind)| string(kind));
            }
            _ => {}
        }
    }
    Some(device)
}

/// An address that packets can leave with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) device: LinkIndex,
    pub(super) net: IpNet,
    /// An IPv6 privacy address, which the kernel prefers for what leaves.
    pub(super) temporary: bool,
}

/// Reads `RTM_NEWADDR`; addresses that are not global or cannot be used (yet, or for new flows) are left out.
pub(super) fn address(body: &[u8]) -> Option<Address> {
    let (family, prefix, scope) = (*body.first()?, *body.get(1)?, *body.get(3)?);
    let mut flags = u32::from(*body.get(2)?);
    let (mut local, mut other) = (None, None);
    for (kind, value) in attributes(body.get(8..)?) {
        match kind {
            libc::IFA_LOCAL => local = ip(value),
            libc::IFA_ADDRESS => other = ip(value),
            libc::IFA_FLAGS => flags = u32_at(value, 0)?,
            _ => {}
        }
    }
    let waiting = flags & libc::IFA_F_TENTATIVE != 0 && flags & libc::IFA_F_OPTIMISTIC == 0;
    if scope >= libc::RT_SCOPE_LINK || waiting || flags & (libc::IFA_F_DADFAILED | libc::IFA_F_DEPRECATED) != 0 {
        return None;
    }
    // On point-to-point devices ADDRESS is the other end.
    let net = IpNet::new(local.or(other)?, prefix).ok()?;
    let temporary = family == AF_INET6 && flags & libc::IFA_F_TEMPORARY != 0;
    Some(Address { device: LinkIndex(u32_at(body, 4)?), net, temporary })
}

/// Reads `RTM_NEWROUTE`; entries of the routing cache are left out.
pub(super) fn route(body: &[u8]) -> Option<RouteFacts> {
    let header = body.get(..12)?;
    let (family, flags) = (header[0], u32_at(header, 8)?);
    if flags & libc::RTM_F_CLONED != 0 {
        return None;
    }
    let mut destination = unspecified(family)?;
    let (mut table, mut metric, mut source) = (u32::from(header[4]), 0, None);
    let (mut single, mut hops) = (Hop::default(), Vec::new());
    for (kind, value) in attributes(&body[12..]) {
        match kind {
            RTA_DST => destination = ip(value)?,
            RTA_TABLE => table = u32_at(value, 0)?,
            RTA_PRIORITY => metric = u32_at(value, 0)?,
            RTA_PREFSRC => source = ip(value),
            RTA_MULTIPATH => hops = multipath(value),
            _ => single.read(kind, value),
        }
    }
    if let Some(device) = single.device {
        hops.insert(0, NextHop { device, gateway: single.gateway, dead: flags as u8 & RTNH_F_DEAD != 0 });
    }
    let kind = match header[7] {
        libc::RTN_UNICAST => RouteKind::Unicast,
        libc::RTN_LOCAL => RouteKind::Local,
        libc::RTN_BROADCAST | libc::RTN_ANYCAST | libc::RTN_MULTICAST => RouteKind::Broadcast,
        libc::RTN_THROW => RouteKind::Throw,
        _ => RouteKind::Refuse,
    };
    Some(RouteFacts {
        table,
        destination: IpNet::new(destination, header[1]).ok()?,
        kind,
        metric,
        hops,
        source,
        conditional: header[2] != 0 || header[3] != 0,
        ours: is_our_route(header[5], table),
    })
}

#[derive(Default)]
struct Hop {
    device: Option<LinkIndex>,
    gateway: Option<IpAddr>,
}

impl Hop {
    fn read(&mut self, kind: u16, value: &[u8]) {
        match kind {
            RTA_OIF => self.device = u32_at(value, 0).map(LinkIndex),
            RTA_GATEWAY => self.gateway = ip(value),
            // A gateway of the other family (RFC 5549): its family first.
            RTA_VIA => self.gateway = value.get(2..).and_then(ip),
            _ => {}
        }
    }
}

/// The next hops of `RTA_MULTIPATH`: `struct rtnexthop` with attributes, one after the other.
fn multipath(value: &[u8]) -> Vec<NextHop> {
    let mut rest = value;
    let walk = std::iter::from_fn(|| {
        let length = u16_at(rest, 0)? as usize;
        let entry = rest.get(..length).filter(|entry| entry.len() >= 8)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        let mut hop = Hop::default();
        attributes(&entry[8..]).for_each(|(kind, value)| hop.read(kind, value));
        Some(NextHop { device: LinkIndex(u32_at(entry, 4)?), gateway: hop.gateway, dead: entry[2] & RTNH_F_DEAD != 0 })
    });
    walk.collect()
}

/// Reads `RTM_NEWRULE`.
pub(super) fn rule(body: &[u8]) -> Option<RuleFacts> {
    let header = body.get(..12)?;
    let family = family(header[0])?;
    let (mut source, mut destination, mut mark, mut mask) = (None, None, None, None);
    let (mut table, mut target, mut protocol) = (u32::from(header[4]), 0, 0);
    let mut rule = RuleFacts {
        family,
        priority: 0,
        source: None,
        destination: None,
        mark: None,
        input: None,
        output: None,
        conditional: header[3] != 0,
        invert: u32_at(header, 8)? & FIB_RULE_INVERT != 0,
        action: RuleAction::Other,
        suppress_prefix_len: None,
        suppress_group: false,
        ours: false,
    };
    for (kind, value) in attributes(&body[12..]) {
        match kind {
            FRA_DST => destination = ip(value),
            FRA_SRC => source = ip(value),
            FRA_IIFNAME => rule.input = Some(string(value)),
            FRA_OIFNAME => rule.output = Some(string(value)),
            FRA_GOTO => target = u32_at(value, 0)?,
            FRA_PRIORITY => rule.priority = u32_at(value, 0)?,
            FRA_FWMARK => mark = u32_at(value, 0),
            FRA_FWMASK => mask = u32_at(value, 0),
            FRA_TABLE => table = u32_at(value, 0)?,
            FRA_PROTOCOL => protocol = *value.first()?,
            // "None" is told as -1.
            FRA_SUPPRESS_PREFIXLEN => rule.suppress_prefix_len = u8::try_from(u32_at(value, 0)?).ok(),
            FRA_SUPPRESS_IFGROUP => rule.suppress_group = u32_at(value, 0)? != u32::MAX,
            FRA_TUN_ID => rule.conditional |= value.iter().any(|byte| *byte != 0),
            FRA_FLOW | FRA_PAD => {}
            // Users, ports, protocols, l3mdev, and whatever a later kernel selects by.
            _ => rule.conditional = true,
        }
    }
    rule.source = prefix(source, header[2], family);
    rule.destination = prefix(destination, header[1], family);
    rule.mark = match (mark, mask) {
        (None | Some(0), None | Some(0)) => None,
        (mark, mask) => Some((mark.unwrap_or(0), mask.unwrap_or(u32::MAX))),
    };
    rule.action = match header[7] {
        FR_ACT_TO_TBL => RuleAction::Table(table),
        FR_ACT_GOTO => RuleAction::Goto(target),
        FR_ACT_NOP => RuleAction::Nop,
        action if FR_ACT_REFUSE.contains(&action) => RuleAction::Refuse,
        _ => RuleAction::Other,
    };
    rule.ours = is_our_rule(protocol, rule.priority);
    Some(rule)
}

/// A selector's prefix; a length with no address is a prefix of zeros.
fn prefix(address: Option<IpAddr>, length: u8, family: Family) -> Option<IpNet> {
    if length == 0 && address.is_none() {
        return None;
    }
    let zeros = match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    IpNet::new(address.unwrap_or(zeros), length).ok()
}

fn family(number: u8) -> Option<Family> {
    match number {
        AF_INET => Some(Family::V4),
        AF_INET6 => Some(Family::V6),
        _ => None,
    }
}

fn unspecified(number: u8) -> Option<IpAddr> {
    match family(number)? {
        Family::V4 => Some(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        Family::V6 => Some(IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
    }
}

/// An address of either family, told by its length.
fn ip(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linux::netlink::talk::Request;
    use proptest::prelude::*;

    /// The body of a message with this fixed part and these attributes.
    fn body(fixed: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut request = Request::new(0, 0, fixed);
        for (kind, value) in attributes {
            request.attribute(*kind, value);
        }
        request.finish(0).split_off(16)
    }

    #[test]
    fn each_hop_of_a_multipath_route_is_read() {
        let hop = |flags: u8, device: u32, gateway: [u8; 4]| {
            let mut entry = vec![16, 0, flags, 0];
            entry.extend(device.to_ne_bytes());
            entry.extend([8, 0, 5, 0]);
            entry.extend(gateway);
            entry
        };
        let hops = [hop(0, 3, [10, 0, 0, 1]), hop(RTNH_F_DEAD, 4, [10, 1, 0, 1])].concat();
        let route = route(&body(&[AF_INET, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0], &[(RTA_MULTIPATH, &hops)])).unwrap();
        assert_eq!(route.destination.to_string(), "0.0.0.0/0");
        let read: Vec<_> = route.hops.iter().map(|hop| (hop.device.0, hop.gateway.unwrap().to_string(), hop.dead)).collect();
        assert_eq!(read, [(3, "10.0.0.1".to_owned(), false), (4, "10.1.0.1".to_owned(), true)]);
    }

    #[test]
    fn a_gateway_of_the_other_family_is_read_and_a_cached_route_is_not() {
        let via = [&[10, 0][..], &[0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]].concat();
        let attributes: [(u16, &[u8]); 2] = [(RTA_OIF, &2u32.to_ne_bytes()), (RTA_VIA, &via)];
        let mut fixed = [AF_INET, 0, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
        assert_eq!(route(&body(&fixed, &attributes)).unwrap().hops[0].gateway, Some("fe80::1".parse().unwrap()));
        fixed[8..].copy_from_slice(&libc::RTM_F_CLONED.to_ne_bytes());
        assert_eq!(route(&body(&fixed, &attributes)), None);
    }

    #[test]
    fn a_source_route_is_conditional_and_so_is_a_rule_with_an_unknown_selector() {
        let source = body(&[AF_INET6, 0, 56, 0, 254, 3, 0, 1, 0, 0, 0, 0], &[]);
        assert!(route(&source).unwrap().conditional);
        let fixed = [AF_INET6, 0, 0, 0, 254, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0];
        assert!(!rule(&body(&fixed, &[(FRA_PRIORITY, &[9, 0, 0, 0])])).unwrap().conditional);
        assert!(rule(&body(&fixed, &[(99, &[1])])).unwrap().conditional);
    }

    #[test]
    fn only_addresses_that_new_flows_can_use_are_read() {
        let read = |flags: u32, scope: u8| {
            let fixed = [AF_INET6, 64, 0, scope, 5, 0, 0, 0];
            address(&body(&fixed, &[(libc::IFA_ADDRESS, &[0x20; 16]), (libc::IFA_FLAGS, &flags.to_ne_bytes())]))
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
        fn any_bytes_are_read_or_left(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (device(&bytes), address(&bytes), route(&bytes), rule(&bytes));
        }
    }
}
