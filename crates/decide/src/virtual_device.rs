//! The virtual interface (Hercules; Yap's thesis, 2.3): a device whose address stays while its flows use different links.
//!
//! It is one end of a pair of Ethernet devices (veth). Programs use the device ([`VirtualDevice::name`]) and its address. What they send comes out of the
//! other end ([`VirtualDevice::switch_end`]) as if a client had sent it, and the gateway forwards it: one path for programs, containers and clients.
//!
//! The kernel drops packets that arrive with its own address as their source. So on its way between the ends a packet has the [`twin`] of the address. Both
//! have the same checksum, so no checksum of the packet changes, whatever its protocol: neither in fragments and segments that the device has yet to cut, nor
//! in the packets that ICMP errors quote (as NPTv6 does it; RFC 6296, 2.6 and 3.6).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::{Family, LinkIndex, NextHop, RouteFacts, RouteKind, RuleFacts};
use ipnet::IpNet;

use crate::tables;

/// Default of `[virtual] name`.
pub const DEFAULT_NAME: &str = "braid0";
/// Maximum length of its name in bytes, so that the other end's name is one too.
pub const NAME_LIMIT: usize = 15 - SWITCH_SUFFIX.len();
/// What the name of the switch's end has in addition.
const SWITCH_SUFFIX: &str = "-sw";

/// First half of the twins of IPv4 addresses: 240.240.0.0/16. It is in the block that is reserved for future use (240.0.0.0/4, RFC 1112), which Linux
/// forwards, so no other network uses it.
const TWINS: u16 = 0xF0F0;

/// The virtual interface as the configuration describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualDevice {
    /// Name of the device that programs use.
    pub name: String,
    /// Its addresses: one of a family at most, none that [`refusal`] rejects.
    pub addresses: Vec<IpAddr>,
}

impl VirtualDevice {
    /// Name of the end at the switch.
    pub fn switch_end(&self) -> String {
        format!("{}{SWITCH_SUFFIX}", self.name)
    }

    /// Its address of this family.
    pub fn address(&self, family: Family) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| Family::of(*address) == family)
    }

    /// The address that the firewall and connection tracking see instead of `address`: the twin, if it is one of the device's.
    pub fn outside(&self, address: IpAddr) -> IpAddr {
        if self.addresses.contains(&address) { twin(address) } else { address }
    }

    /// The reverse of [`outside`](Self::outside).
    pub fn inside(&self, address: IpAddr) -> IpAddr {
        self.addresses.iter().copied().find(|own| twin(*own) == address).unwrap_or(address)
    }
}

/// Why the device cannot have this address; `None`: it can.
pub fn refusal(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(v4) if v4.octets()[0] >= 224 => Some("it is a multicast or reserved address"),
        IpAddr::V4(v4) if v4.octets()[0] == 0 || v4.is_loopback() || v4.is_link_local() => Some("it is no address of a host in a network"),
        IpAddr::V6(v6) if v6.is_multicast() => Some("it is a multicast address"),
        IpAddr::V6(v6) if v6.is_unspecified() || v6.is_loopback() || v6.is_unicast_link_local() || v6.to_ipv4_mapped().is_some() => {
            Some("it is no address of a host in a network")
        }
        _ => None,
    }
}

/// Another address with the same sum in one's complement: for IPv4 in 240.240.0.0/16, for IPv6 in the same /96.
pub fn twin(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let [high, low] = words(v4.octets());
            let low = sum(sum(high, low), !TWINS);
            IpAddr::V4(Ipv4Addr::from(u32::from(TWINS) << 16 | u32::from(low)))
        }
        IpAddr::V6(v6) => {
            let mut words = v6.segments();
            words[6] = sum(words[6], 1);
            words[7] = sum(words[7], !1);
            IpAddr::V6(Ipv6Addr::from(words))
        }
    }
}

/// The rules for packets of programs that use the device or one of its addresses.
pub fn rules(address: IpAddr, device: &str) -> [RuleFacts; 2] {
    let rule = RuleFacts { ours: false, ..tables::rule(Family::of(address), tables::PRIORITY_VIRTUAL, tables::VIRTUAL_TABLE) };
    [RuleFacts { source: Some(address.into()), ..rule.clone() }, RuleFacts { output: Some(device.to_owned()), ..rule }]
}

/// The route of what programs send through the device, and the way back to the twin of its address, which leads over the switch's end.
pub fn routes(address: IpAddr, own: LinkIndex, switch_end: LinkIndex) -> [RouteFacts; 2] {
    let route = |destination, table, device, source| RouteFacts {
        table,
        destination,
        kind: RouteKind::Unicast,
        metric: 0,
        hops: vec![NextHop { device, gateway: None, dead: false }],
        source,
        conditional: false,
        ours: false,
    };
    [
        route(tables::everything(Family::of(address)), tables::VIRTUAL_TABLE, own, Some(address)),
        route(IpNet::from(twin(address)), tables::MAIN, switch_end, None),
    ]
}

fn words([a, b, c, d]: [u8; 4]) -> [u16; 2] {
    [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
}

/// The sum in one's complement (RFC 1071).
fn sum(one: u16, other: u16) -> u16 {
    let (sum, carry) = one.overflowing_add(other);
    // With a carry the sum is 0xfffe at most.
    sum + u16::from(carry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The sum of an address, with one representation of zero.
    fn checksum(address: IpAddr) -> u16 {
        let total = match address {
            IpAddr::V4(v4) => words(v4.octets()).into_iter().fold(0, sum),
            IpAddr::V6(v6) => v6.segments().into_iter().fold(0, sum),
        };
        if total == u16::MAX { 0 } else { total }
    }

    #[test]
    fn twins_of_usual_addresses() {
        let twin_of = |address: &str| twin(address.parse().unwrap()).to_string();
        assert_eq!(twin_of("10.99.0.1"), "240.240.25.115");
        assert_eq!(twin_of("192.168.0.0"), "240.240.207.183");
        assert_eq!(twin_of("fd00::1"), "fd00::1:ffff");
        assert_eq!(twin_of("fd00::"), "fd00::1:fffe");
    }

    #[test]
    fn addresses_change_at_the_pair_and_back() {
        let device = VirtualDevice { name: "braid0".into(), addresses: vec!["10.99.0.1".parse().unwrap(), "fd00::1".parse().unwrap()] };
        assert_eq!((device.switch_end().as_str(), NAME_LIMIT), ("braid0-sw", 12));
        for own in device.addresses.clone() {
            assert_ne!(device.outside(own), own);
            assert_eq!(device.inside(device.outside(own)), own);
        }
        let other: IpAddr = "10.99.0.2".parse().unwrap();
        assert_eq!((device.outside(other), device.inside(other)), (other, other));
        assert_eq!(device.address(Family::V6), Some("fd00::1".parse().unwrap()));
    }

    #[test]
    fn addresses_that_hosts_do_not_have_are_refused() {
        for address in [
            "0.0.0.0",
            "127.0.0.1",
            "169.254.1.1",
            "224.0.0.1",
            "240.240.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "ff02::1",
            "::ffff:10.0.0.1",
        ] {
            assert!(refusal(address.parse().unwrap()).is_some(), "{address}");
        }
        for address in ["10.0.0.1", "100.64.0.1", "203.0.113.5", "fd00::1", "2001:db8::1"] {
            assert_eq!(refusal(address.parse().unwrap()), None, "{address}");
        }
    }

    proptest! {
        #[test]
        fn a_twin_has_the_same_checksum(v4: u32, v6: u128) {
            for address in [IpAddr::V4(v4.into()), IpAddr::V6(v6.into())] {
                prop_assert_eq!(checksum(twin(address)), checksum(address), "{}", address);
                if refusal(address).is_none() {
                    prop_assert_ne!(twin(address), address);
                }
            }
        }
    }
}
