//! The addresses of a tunnel: of moved flows whose packets go on inside a bond, because what is on their way drops or translates them.
//!
//! Packets have these addresses only between the rewriting program of a host and its end of the bond. No device and no route has them, so they come from ranges
//! that no host has: of 240.0.0.0/4 (RFC 1112, 4) and of 100::/64 (RFC 6666).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_model::Family;

/// The device through which a client's packets enter its tunnels.
pub const CLIENT_DEVICE: &str = "braid-udp";
/// The same at a server. One host may be both.
pub const SERVER_DEVICE: &str = "braid-udp-relay";

/// Number of different tunnels.
const TUNNELS: u32 = 1 << 25;
/// 244.0.0.0/6. The virtual interface's twins are in 240.240.0.0/16.
const NET4: u32 = 0xF400_0000;
const NET6: u128 = 0x0100 << 112;

/// The tunnel between a client and a server. The server numbers its tunnels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tunnel(u32);

/// An end of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The host that has opened the bond.
    Client,
    /// The other one.
    Server,
}

impl Tunnel {
    /// The tunnel of this number, of which the last 25 bits count.
    pub fn new(number: u32) -> Self {
        Self(number % TUNNELS)
    }

    /// The address of an end.
    pub fn address(self, end: End, family: Family) -> IpAddr {
        let host = self.0 << 1 | u32::from(end == End::Server);
        match family {
            Family::V4 => Ipv4Addr::from(NET4 | host).into(),
            Family::V6 => Ipv6Addr::from(NET6 | u128::from(host)).into(),
        }
    }

    /// The tunnel that has this address, and the end; `None`: it is another address.
    pub fn of(address: IpAddr) -> Option<(Self, End)> {
        let host = match address {
            IpAddr::V4(ip) => u32::from(ip).checked_sub(NET4)?,
            IpAddr::V6(ip) => u32::try_from(u128::from(ip).checked_sub(NET6)?).ok()?,
        };
        let end = if host & 1 == 0 { End::Client } else { End::Server };
        (host >> 1 < TUNNELS).then_some((Self(host >> 1), end))
    }
}

/// The device of this machine over which packets with this source enter a tunnel; `None`: it is no address of one.
pub fn device(source: IpAddr) -> Option<&'static str> {
    Tunnel::of(source).map(|(_, end)| match end {
        End::Client => CLIENT_DEVICE,
        End::Server => SERVER_DEVICE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_tunnels_are_told_from_all_others() {
        for number in [0, 1, 77_777, TUNNELS - 1] {
            for (family, end) in Family::ALL.into_iter().flat_map(|family| [(family, End::Client), (family, End::Server)]) {
                let address = Tunnel::new(number).address(end, family);
                assert_eq!(Tunnel::of(address), Some((Tunnel(number), end)), "{address}");
                assert!(!address.is_multicast() && !address.is_unspecified() && !address.is_loopback());
            }
        }
        assert_eq!(Tunnel::new(1).address(End::Server, Family::V4).to_string(), "244.0.0.3");
        assert_eq!(Tunnel::new(1).address(End::Client, Family::V6).to_string(), "100::2");
        for other in [
            "239.255.255.255",
            "240.240.0.1",
            "243.255.255.255",
            "248.0.0.0",
            "255.255.255.255",
            "10.0.0.1",
            "100:0:0:1::",
            "100::400:0",
            "ff::1",
            "::1",
        ] {
            assert_eq!(Tunnel::of(other.parse().unwrap()), None, "{other}");
        }
    }
}
