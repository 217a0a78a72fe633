//! Makes and removes the device through which packets of this machine's moved flows leave ([`DEPARTURE_DEVICE`]): a bridge without ports. Whatever comes through
//! it is rewritten and sent over a link by a program at its egress, or else dropped.

use std::collections::BTreeSet;
use std::net::IpAddr;

use braid_decide::tables::DEPARTURE_DEVICE;
use braid_model::{LinkIndex, Mac};
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};

use super::apply::Changes;
use super::virtual_device::{HARDWARE, addresses, delete};
use super::{ApplyError, DumpError, device_setup, facts};

/// Makes the device in this thread's network namespace, for packets of at most `mtu` bytes, or takes over the one that is there.
///
/// # Errors
/// The system has another device with this name; the kernel rejects something, such as a bridge on a kernel without `CONFIG_BRIDGE`; a setting of the device
/// cannot be written.
pub fn make(mtu: u32) -> Result<LinkIndex, ApplyError> {
    let mut changes = Changes::open()?;
    let mut found = find(&mut changes)?;
    if found.is_none() && changes.make("add", format!("device {DEPARTURE_DEVICE}"), create(), 0) {
        found = find(&mut changes)?;
    }
    let Some(found) = found else { return changes.finish().and(Err(taken())) };
    if !found.ours {
        return Err(taken());
    }
    let mut on = device_setup::turned_on(found.index);
    on.attributes = vec![LinkAttribute::Mtu(mtu)];
    changes.make("turn on", format!("device {DEPARTURE_DEVICE}"), (RouteNetlinkMessage::SetLink(on), 0), 0);
    changes.finish()?;
    // What arrives by it has the mark that leads back to it, so that a strict reverse path filter lets it pass.
    let path = format!("/proc/sys/net/ipv4/conf/{DEPARTURE_DEVICE}/src_valid_mark");
    std::fs::write(&path, "1").map_err(|source| ApplyError::Setting { path, source })?;
    Ok(found.index)
}

/// Removes the device from this thread's network namespace. Returns whether there was one. Needs no privilege if there is not.
///
/// # Errors
/// The kernel rejects it.
pub fn remove() -> Result<bool, ApplyError> {
    let mut changes = Changes::open()?;
    let Some(found) = find(&mut changes)?.filter(|found| found.ours) else { return Ok(false) };
    let removed = changes.make("remove", format!("device {DEPARTURE_DEVICE}"), (delete(found.index), 0), libc::ENODEV);
    changes.finish().map(|()| removed)
}

/// Makes these the addresses of the device with this index: the source addresses of moved flows, which their own links may lose, or go down with. Without an
/// address of this machine the kernel would neither send nor receive their packets.
///
/// # Errors
/// The kernel rejects an address. All others are set.
pub fn keep(device: LinkIndex, wanted: &BTreeSet<IpAddr>) -> Result<(), ApplyError> {
    let mut changes = Changes::open()?;
    let current: BTreeSet<IpAddr> = addresses(&mut changes, device)?.into_iter().collect();
    let change = |address: IpAddr| device_setup::address_of(device, IpNet::from(address));
    for address in wanted.difference(&current) {
        let message = RouteNetlinkMessage::NewAddress(change(*address));
        changes.make("add", format!("address {address} to {DEPARTURE_DEVICE}"), (message, NLM_F_CREATE | NLM_F_EXCL), libc::EEXIST);
    }
    for address in current.difference(wanted) {
        let message = RouteNetlinkMessage::DelAddress(change(*address));
        changes.make("remove", format!("address {address} from {DEPARTURE_DEVICE}"), (message, 0), libc::EADDRNOTAVAIL);
    }
    changes.finish()
}

fn taken() -> ApplyError {
    ApplyError::Occupied { name: DEPARTURE_DEVICE.to_owned() }
}

struct Found {
    index: LinkIndex,
    ours: bool,
}

fn find(changes: &mut Changes) -> Result<Option<Found>, ApplyError> {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let is_ours = |found: &facts::Device| found.driver_kind.as_deref() == Some("bridge") && found.mac == Some(Mac(HARDWARE));
    let named = |body: &[u8]| {
        let found = facts::device(body).filter(|found| found.name == DEPARTURE_DEVICE)?;
        Some(Found { index: found.index, ours: is_ours(&found) })
    };
    let found = changes.kernel.dump(&request, named).map_err(|source| DumpError { what: "devices", source })?;
    Ok(found.into_iter().next())
}

fn create() -> (RouteNetlinkMessage, u16) {
    let mut message = LinkMessage::default();
    message.header.flags = LinkFlags::Noarp;
    message.header.change_mask = LinkFlags::Noarp;
    message.attributes = vec![
        LinkAttribute::IfName(DEPARTURE_DEVICE.to_owned()),
        LinkAttribute::Address(HARDWARE.to_vec()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
    ];
    (RouteNetlinkMessage::NewLink(message), NLM_F_CREATE | NLM_F_EXCL)
}
