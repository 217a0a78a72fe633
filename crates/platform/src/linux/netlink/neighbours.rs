//! The system's table of neighbours: their hardware addresses.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use braid_model::{LinkIndex, Mac};
use netlink_packet_core::Parseable;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState};

use super::talk::NetlinkSocket;

/// An address of each neighbour behind a device whose hardware address is known; of IPv4 if there is one.
///
/// # Errors
/// The kernel rejects the request, or a sandbox forbids AF_NETLINK.
pub fn hardware_addresses(device: LinkIndex) -> io::Result<BTreeMap<Mac, IpAddr>> {
    let read = |body: &[u8]| {
        let found = NeighbourMessage::parse(body).ok().filter(|found| found.header.ifindex == device.0)?;
        let (mut mac, mut address) = (None, None);
        for attribute in found.attributes {
            match attribute {
                NeighbourAttribute::LinkLayerAddress(bytes) => mac = <[u8; 6]>::try_from(bytes).ok().map(Mac),
                NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => address = Some(IpAddr::V4(v4)),
                NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => address = Some(IpAddr::V6(v6)),
                _ => {}
            }
        }
        mac.zip(address)
    };
    let found = NetlinkSocket::open()?.dump(&RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()), read)?;
    // Those of IPv4 last, because the last one stays.
    let (v4, v6): (Vec<_>, Vec<_>) = found.into_iter().partition(|(_, address): &(Mac, IpAddr)| address.is_ipv4());
    Ok(v6.into_iter().chain(v4).collect())
}

/// Ends the search for neighbours behind a device that no packet leaves. The kernel keeps packets for them for three seconds, and TCP sends no segment again
/// that it knows to be still in a queue of this machine: a flow that has moved to another link would wait for it. The kernel tells the sockets that the host
/// is unreachable, and TCP forgets the last doubling of its timer (RFC 6069).
///
/// # Errors
/// The kernel rejects the request, or a sandbox forbids AF_NETLINK.
pub fn forget_unanswered(device: LinkIndex) -> io::Result<()> {
    let mut socket = NetlinkSocket::open()?;
    let read = |body: &[u8]| {
        let found = NeighbourMessage::parse(body).ok()?;
        (found.header.ifindex == device.0 && found.header.state == NeighbourState::Incomplete).then_some(found)
    };
    let found = socket.dump(&RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default()), read)?;
    for neighbour in found {
        let mut gone = NeighbourMessage::default();
        gone.header = neighbour.header;
        gone.attributes = neighbour
            .attributes
            .into_iter()
            .filter(|attribute| {
                matches!(attribute, NeighbourAttribute::Destination(NeighbourAddress::Inet(_) | NeighbourAddress::Inet6(_)))
            })
            .collect();
        match socket.change(RouteNetlinkMessage::DelNeighbour(gone), 0) {
            // It was found, or given up, meanwhile.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            done => done?,
        }
    }
    Ok(())
}
