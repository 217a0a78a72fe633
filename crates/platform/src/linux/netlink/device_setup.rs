//! Sets up a device of this process.

use std::io;

use braid_model::{Family, LinkIndex, Mac};
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};

use super::facts::address_family;
use super::talk::NetlinkSocket;

/// Sets the size of a device's largest packet in bytes, and turns the device on.
///
/// # Errors
/// Errors of the kernel: `ENODEV`, `EPERM`, `EINVAL` for a size that the device cannot have.
pub(crate) fn turn_on(device: LinkIndex, mtu: u32) -> io::Result<()> {
    let mut message = turned_on(device);
    message.attributes = vec![LinkAttribute::Mtu(mtu)];
    NetlinkSocket::open()?.change(RouteNetlinkMessage::SetLink(message), 0)
}

/// Sets the size of a device's largest packet in bytes.
///
/// # Errors
/// As [`turn_on`].
pub(crate) fn set_mtu(device: LinkIndex, mtu: u32) -> io::Result<()> {
    set(device, LinkAttribute::Mtu(mtu))
}

/// Sets how many segments one packet of the system to this device may contain, as for network cards that cut them.
///
/// # Errors
/// As [`turn_on`].
pub(crate) fn set_most_segments(device: LinkIndex, most: u32) -> io::Result<()> {
    set(device, LinkAttribute::GsoMaxSegs(most))
}

/// Sets a device's Ethernet address. Some devices must be off.
///
/// # Errors
/// Errors of the kernel: `ENODEV`, `EPERM`, `EBUSY`.
pub(crate) fn set_mac(device: LinkIndex, mac: Mac) -> io::Result<()> {
    set(device, LinkAttribute::Address(mac.0.to_vec()))
}

fn set(device: LinkIndex, attribute: LinkAttribute) -> io::Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = device.0;
    message.attributes = vec![attribute];
    NetlinkSocket::open()?.change(RouteNetlinkMessage::SetLink(message), 0)
}

/// The message that turns a device on.
pub(super) fn turned_on(device: LinkIndex) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = device.0;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message
}

/// Gives a device an address, with the prefix of its network. It is in use at once: nobody is asked whether another host has it.
///
/// # Errors
/// Errors of the kernel: `ENODEV`, `EPERM`, `EACCES` if IPv6 is turned off.
pub(crate) fn add_address(device: LinkIndex, address: IpNet) -> io::Result<()> {
    NetlinkSocket::open()?.change(RouteNetlinkMessage::NewAddress(address_of(device, address)), NLM_F_CREATE | NLM_F_REPLACE)
}

/// The message for an address of a device.
pub(super) fn address_of(device: LinkIndex, address: IpNet) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = address_family(Family::of(address.addr()));
    message.header.prefix_len = address.prefix_len();
    message.header.index = device.0;
    message.header.flags = AddressHeaderFlags::Nodad;
    message.attributes = vec![
        AddressAttribute::Local(address.addr()),
        AddressAttribute::Address(address.addr()),
        AddressAttribute::Flags(AddressFlags::Nodad),
    ];
    message
}
