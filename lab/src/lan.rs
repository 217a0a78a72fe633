//! Networks behind the two ends: a LAN behind the client, which reaches the links only through it, and a host behind the server.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, ensure};

use crate::namespace::Namespace;
use crate::site::{Site, await_addresses, settle};

/// The client's device in the LAN.
pub(crate) const DEVICE: &str = "lan0";
/// The most devices of a LAN: their last octets are 20 to 99.
pub(crate) const MOST: usize = 80;
/// Last octet of the first device's address.
const FIRST: usize = 20;
/// MAC address of the client in the LAN: the same after the device was removed and made again.
const OWN_MAC: &str = "02:07:00:00:00:01";

/// Kind and size of a LAN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LanSpec {
    /// This many devices at an Ethernet switch.
    Switch(usize),
    /// One device at the other end of a veth pair, as fast as the kernel.
    Cable,
}

impl LanSpec {
    /// Number of devices.
    pub(crate) fn count(self) -> usize {
        match self {
            Self::Switch(count) => count,
            Self::Cable => 1,
        }
    }
}

/// The last two decimal digits of a device's addresses.
fn digits(device: usize) -> usize {
    FIRST + device
}

/// Address of device `device` (from 0): 192.168.7.20, .21, ...
pub(crate) fn address(device: usize) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 7, digits(device) as u8)
}

/// fd07::20, fd07::21, ...: the decimal digits of the IPv4 address read as hexadecimal ones.
pub(crate) fn address6(device: usize) -> Ipv6Addr {
    let digits = (digits(device) / 10 * 16 + digits(device) % 10) as u16;
    Ipv6Addr::new(0xfd07, 0, 0, 0, 0, 0, 0, digits)
}

/// 02:07:00:00:00:20, :21, ...
pub(crate) fn mac(device: usize) -> String {
    format!("02:07:00:00:00:{}", digits(device))
}

/// Makes the LAN of these devices. The switch is in the namespace between.
pub(crate) fn make(site: &Site<'_>, spec: LanSpec, devices: &[Namespace]) -> Result<()> {
    ensure!(spec.count() <= MOST, "a LAN has at most {MOST} devices, not {}", spec.count());
    devices.iter().try_for_each(|device| settle(device, site.ipv6))?;
    if let LanSpec::Switch(_) = spec {
        let mut lines = String::from("link add name switch up type bridge forward_delay 0 mcast_snooping 0\n");
        for (i, device) in devices.iter().enumerate() {
            writeln!(lines, "link add name d{i} up master switch type veth peer name eth0 address {} netns {}", mac(i), device.path())?;
        }
        site.between.ip(&lines)?;
        devices.iter().enumerate().try_for_each(|(i, device)| configure(site, i, device))?;
    }
    plug(site, spec, devices)
}

/// Makes the client's device, with its addresses. A cable has the device at its other end too.
pub(crate) fn plug(site: &Site<'_>, spec: LanSpec, devices: &[Namespace]) -> Result<()> {
    let client = site.client;
    match spec {
        LanSpec::Switch(_) => {
            let peer = format!("peer name {DEVICE} address {OWN_MAC} netns {}", client.path());
            site.between.ip(&format!("link add name lan up master switch type veth {peer}\n"))?;
        }
        LanSpec::Cable => {
            let device = devices.first().context("a cable without a device")?;
            let peer = format!("peer name eth0 address {} netns {}", mac(0), device.path());
            client.ip(&format!("link add name {DEVICE} address {OWN_MAC} type veth {peer}\n"))?;
            configure(site, 0, device)?;
        }
    }
    let mut lines = format!("link set dev {DEVICE} up\naddress add 192.168.7.1/24 dev {DEVICE}\n");
    if site.ipv6 {
        writeln!(lines, "address add fd07::1/64 dev {DEVICE} nodad")?;
    }
    client.ip(&lines)?;
    let own = usize::from(site.ipv6);
    await_addresses(client, &["local fd07:"], own)?;
    devices.iter().try_for_each(|device| await_addresses(device, &["local fd07:", "local fe80:"], 2 * own))
}

/// Removes the client's device, as a pulled USB adapter does. The devices at a switch keep their carrier.
pub(crate) fn unplug(client: &Namespace) -> Result<()> {
    client.ip(&format!("link delete dev {DEVICE}\n"))
}

/// Gives a device its addresses and its default routes, which lead to the client.
fn configure(site: &Site<'_>, number: usize, device: &Namespace) -> Result<()> {
    let mut lines = format!("link set dev lo up\nlink set dev eth0 up\naddress add {}/24 dev eth0\n", address(number));
    writeln!(lines, "route add default via 192.168.7.1 dev eth0")?;
    if site.ipv6 {
        writeln!(lines, "address add {}/64 dev eth0 nodad\nroute add ::/0 via fd07::1 dev eth0", address6(number))?;
    }
    device.ip(&lines)
}

/// Connects the host behind the server: 198.51.100.10 and 2001:db8:100::10. All devices have an MTU of 1500, but the server forwards only
/// packets of at most `path_mtu` bytes, and reports larger ones (ICMP).
pub(crate) fn make_far(site: &Site<'_>, far: &Namespace, links: usize, path_mtu: u32) -> Result<()> {
    let server = site.server;
    settle(far, site.ipv6)?;
    server.sysctl("ipv4/ip_forward", "1")?;
    let limit = format!("mtu lock {path_mtu}");
    let mut here = format!("link add name far0 up type veth peer name eth0 netns {}\naddress add 198.51.100.1/24 dev far0\n", far.path());
    let mut there = String::from("link set dev lo up\nlink set dev eth0 up\naddress add 198.51.100.10/24 dev eth0\n");
    writeln!(here, "route add 198.51.100.10/32 dev far0 {limit}")?;
    writeln!(there, "route add default via 198.51.100.1 dev eth0")?;
    for i in 0..links {
        writeln!(here, "route add 10.77.{i}.2/32 dev l{i} {limit}")?;
    }
    if site.ipv6 {
        server.sysctl("ipv6/conf/all/forwarding", "1")?;
        writeln!(here, "address add 2001:db8:100::1/64 dev far0 nodad\nroute add 2001:db8:100::10/128 dev far0 {limit}")?;
        writeln!(there, "address add 2001:db8:100::10/64 dev eth0 nodad\nroute add ::/0 via 2001:db8:100::1 dev eth0")?;
        for i in 0..links {
            writeln!(here, "route add fd77:0:0:{i:x}::2/128 dev l{i} {limit}")?;
        }
    }
    server.ip(&here)?;
    far.ip(&there)?;
    await_addresses(far, &["local 2001:db8:100:", "local fe80:"], 2 * usize::from(site.ipv6))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_devices_addresses_have_the_same_digits() {
        assert_eq!(
            (address(0).to_string(), address6(0).to_string(), mac(0)),
            ("192.168.7.20".into(), "fd07::20".into(), "02:07:00:00:00:20".into())
        );
        assert_eq!(
            (address(11).to_string(), address6(11).to_string(), mac(11)),
            ("192.168.7.31".into(), "fd07::31".into(), "02:07:00:00:00:31".into())
        );
        assert_eq!(address(MOST - 1).to_string(), "192.168.7.99");
    }
}
