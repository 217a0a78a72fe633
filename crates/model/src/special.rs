//! Special-purpose addresses, which are not part of the global Internet (IANA's registries, RFC 6890).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Purpose of a special-purpose address, for example "private"; `None` for an address of the global Internet. A relay opens no connection
/// to a special-purpose address unless its operator allows it. For an address that [embeds](carried) an IPv4 address, the result is the
/// purpose of the embedded address.
pub fn purpose(ip: IpAddr) -> Option<&'static str> {
    let ip = ip.to_canonical();
    own_purpose(ip).or_else(|| own_purpose(carried(ip)?.into()))
}

/// Purpose of the address itself, regardless of an [embedded](carried) one. `None` for an address of the global Internet, which includes
/// NAT64 and 6to4 addresses.
pub fn own_purpose(ip: IpAddr) -> Option<&'static str> {
    match ip {
        IpAddr::V4(ip) => SPECIAL_V4.iter().find(|(net, length, _)| within(ip, *net, *length)).map(|(_, _, purpose)| *purpose),
        IpAddr::V6(ip) => purpose_v6(ip),
    }
}

/// The IPv4 address embedded in a NAT64 or 6to4 address (RFC 6052, section 2.1; RFC 3056, section 2).
pub fn carried(ip: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(ip) = ip else { return None };
    let bits = u128::from(ip);
    match ip.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => Some(Ipv4Addr::from(bits as u32)),
        [0x2002, ..] => Some(Ipv4Addr::from((bits >> 80) as u32)),
        _ => None,
    }
}

const SPECIAL_V4: [(Ipv4Addr, u32, &str); 19] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8, "unspecified"),
    (Ipv4Addr::new(10, 0, 0, 0), 8, "private"),
    (Ipv4Addr::new(100, 64, 0, 0), 10, "provider-internal"),
    (Ipv4Addr::new(127, 0, 0, 0), 8, "loopback"),
    (Ipv4Addr::new(169, 254, 0, 0), 16, "link-local"),
    (Ipv4Addr::new(172, 16, 0, 0), 12, "private"),
    (Ipv4Addr::new(192, 0, 0, 0), 24, "reserved"),
    (Ipv4Addr::new(192, 0, 2, 0), 24, "documentation"),
    (Ipv4Addr::new(192, 88, 99, 0), 24, "reserved"),
    (Ipv4Addr::new(192, 168, 0, 0), 16, "private"),
    (Ipv4Addr::new(198, 18, 0, 0), 15, "benchmarking"),
    (Ipv4Addr::new(198, 51, 100, 0), 24, "documentation"),
    (Ipv4Addr::new(203, 0, 113, 0), 24, "documentation"),
    (Ipv4Addr::new(224, 0, 0, 0), 4, "multicast"),
    (Ipv4Addr::new(255, 255, 255, 255), 32, "broadcast"),
    (Ipv4Addr::new(240, 0, 0, 0), 4, "reserved"),
    // These addresses are in public ranges, but each host of the provider reaches its own platform through them: Azure's agent and resolver
    // (Microsoft Learn, "What is IP address 168.63.129.16"), IBM Cloud's infrastructure and service endpoints (IBM Cloud Docs, "Service
    // network for VPC"). Other large providers use the ranges above: 169.254.0.0/16, and Alibaba 100.64.0.0/10.
    (Ipv4Addr::new(168, 63, 129, 16), 32, "cloud platform"),
    (Ipv4Addr::new(161, 26, 0, 0), 16, "cloud platform"),
    (Ipv4Addr::new(166, 8, 0, 0), 14, "cloud platform"),
];

/// IANA assigns global unicast addresses from 2000::/3 only. Every other range counts as reserved unless it is listed here.
fn purpose_v6(ip: Ipv6Addr) -> Option<&'static str> {
    match ip.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("unspecified"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("loopback"),
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] => None,
        [first, ..] if first & 0xfe00 == 0xfc00 => Some("private"),
        [first, ..] if first & 0xffc0 == 0xfe80 => Some("link-local"),
        [first, ..] if first & 0xff00 == 0xff00 => Some("multicast"),
        [0x2001, 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => Some("documentation"),
        // Teredo, benchmarking, ORCHID and other protocol assignments.
        [0x2001, 0..=0x1ff, ..] => Some("reserved"),
        [first, ..] if first & 0xe000 == 0x2000 => None,
        _ => Some("reserved"),
    }
}

fn within(ip: Ipv4Addr, net: Ipv4Addr, length: u32) -> bool {
    (u32::from(ip) ^ u32::from(net)) >> (32 - length) == 0
}
