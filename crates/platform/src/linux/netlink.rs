//! Reads, follows and changes the kernel's network configuration over rtnetlink.
//!
//! [`Follower`] and [`snapshot`] read and need no privilege. [`apply`] and [`sweep`] change the configuration and need `CAP_NET_ADMIN`. All functions
//! act on the network namespace of the calling thread.

mod advertised;
mod apply;
pub mod departures;
mod device;
mod device_setup;
mod facts;
pub mod firewall;
mod follow;
mod ipsec;
pub(super) mod macsec;
pub mod neighbours;
pub(super) mod netfilter;
mod talk;
pub mod virtual_device;
pub mod wireless;

use std::io;
use std::net::{IpAddr, Ipv4Addr};

use braid_decide::tables::{self, PROTOCOL};
use braid_model::{LinkIndex, NetworkSnapshot, RouteFacts, RouteKind, Traffic};

pub use super::resolvers::Files;
pub use apply::{ApplyError, LOOPBACK_PREFIX, Swept, allow_connect_moves, apply, mark_connect_moves, own_loopback_prefix};
pub(super) use device_setup::{add_address, set_mac, set_most_segments, set_mtu, turn_on};
pub use follow::{FollowError, Follower};
use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteFlags, RouteMessage};
use netlink_packet_route::stats::{StatsFilterMask, StatsMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use talk::NetlinkSocket;

/// Removes all of Braid's rules and routes in this thread's namespace, and the device for moved flows. Blocks and needs no daemon. Needs no privilege if there
/// is nothing to remove.
pub fn sweep() -> Result<Swept, ApplyError> {
    let swept = apply::sweep();
    // After the rules that lead to it.
    departures::remove().and(swept)
}

/// Whether Braid made a route: decided by its protocol number and by its table, whose number nobody else assigns.
fn is_our_route(protocol: u8, table: u32) -> bool {
    protocol == PROTOCOL && tables::is_our_table(table)
}

/// Whether filters at the ingress of this device change, police or redirect packets before Braid's programs see them or, from Linux 6.6 on, after that.
pub(super) fn has_ingress_filters(device: LinkIndex) -> io::Result<bool> {
    const GET_FILTERS: u16 = 46;
    // The ingress of the queueing disciplines `clsact` and `ingress` (TC_H_MAKE(TC_H_CLSACT, TC_H_MIN_INGRESS)).
    const INGRESS: u32 = 0xffff_fff2;
    let index = device.0.to_ne_bytes();
    // struct tcmsg: family, index, handle, parent, information.
    let body = [&[0; 4], &index[..], &[0; 4], &INGRESS.to_ne_bytes(), &[0; 4]].concat();
    let mut found = false;
    NetlinkSocket::open()?.request(GET_FILTERS, NLM_F_REQUEST | NLM_F_DUMP, &body, |_| found = true)?;
    Ok(found)
}

/// Whether Braid made a rule: decided by its protocol number and its priority.
fn is_our_rule(protocol: u8, priority: u32) -> bool {
    protocol == PROTOCOL && (32_763..=32_765).contains(&priority)
}

/// Why the network could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the machine's {what} (rtnetlink): {source}; a sandbox may forbid AF_NETLINK sockets: allow them")]
pub struct DumpError {
    what: &'static str,
    #[source]
    source: io::Error,
}

/// The current network, without the resolvers that routers advertise, which only a [`Follower`] receives. Blocks while it reads: 41 ms with 10,000
/// routes in an unoptimized build.
pub fn snapshot(files: &Files) -> Result<NetworkSnapshot, DumpError> {
    let mut kernel = NetlinkSocket::open().map_err(|source| DumpError { what: "network", source })?;
    follow::take(&mut kernel, files, &advertised::Advertised::default())
}

/// The route that the kernel uses from one of the machine's addresses to another host, by all its rules. `None` if the answer contains no route.
///
/// # Errors
/// `ENETUNREACH` and similar errors if there is no route.
pub fn route_between(from: Ipv4Addr, to: Ipv4Addr) -> io::Result<Option<RouteFacts>> {
    let mut request = RouteMessage::default();
    request.header.address_family = AddressFamily::Inet;
    (request.header.source_prefix_length, request.header.destination_prefix_length) = (32, 32);
    request.header.flags = RouteFlags::FibMatch;
    request.attributes = vec![RouteAttribute::Source(RouteAddress::Inet(from)), RouteAttribute::Destination(RouteAddress::Inet(to))];
    NetlinkSocket::open()?.ask(RouteNetlinkMessage::GetRoute(request), facts::route)
}

/// Distance of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nearness {
    /// The kernel delivers packets to it locally.
    Own,
    /// A neighbour: a route other than a default route leads to it without a gateway.
    Neighbour,
    /// Any other address.
    Elsewhere,
}

/// Whether the kernel delivers packets to this address locally; see [`nearness`].
///
/// # Errors
/// Fails as [`nearness`] does.
pub fn is_own_address(ip: IpAddr) -> io::Result<bool> {
    nearness(ip).map(|nearness| nearness == Nearness::Own)
}

/// Distance of an address by the kernel's current rules and routes. One short exchange; needs no privilege.
///
/// # Errors
/// Fails if a sandbox forbids AF_NETLINK, or if the kernel does not support the address family. The distance is unknown then.
pub fn nearness(ip: IpAddr) -> io::Result<Nearness> {
    let mut request = RouteMessage::default();
    let (family, length, destination) = match ip {
        IpAddr::V4(v4) => (AddressFamily::Inet, 32, RouteAddress::Inet(v4)),
        IpAddr::V6(v6) => (AddressFamily::Inet6, 128, RouteAddress::Inet6(v6)),
    };
    request.header.address_family = family;
    request.header.destination_prefix_length = length;
    request.header.flags = RouteFlags::FibMatch;
    request.attributes = vec![RouteAttribute::Destination(destination)];
    match NetlinkSocket::open()?.ask(RouteNetlinkMessage::GetRoute(request), facts::route) {
        Ok(Some(route)) if matches!(route.kind, RouteKind::Local | RouteKind::Broadcast) => Ok(Nearness::Own),
        // A default route over a tunnel or PPP has no gateway either, so it does not make its destinations neighbours.
        Ok(Some(route))
            if route.destination.prefix_len() > 0 && !route.hops.is_empty() && route.hops.iter().all(|hop| hop.gateway.is_none()) =>
        {
            Ok(Nearness::Neighbour)
        }
        Ok(Some(_)) => Ok(Nearness::Elsewhere),
        Ok(None) => Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer contains no route")),
        // There is no route, or a route that rejects packets. The address is not local, because the kernel searches the local table first.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES)) => {
            Ok(Nearness::Elsewhere)
        }
        Err(error) => Err(error),
    }
}

/// Bytes received and sent by every device since its creation, in ascending order of index. One short system call; needs no privilege.
pub fn device_counters() -> Result<Vec<(LinkIndex, Traffic)>, DumpError> {
    let mut request = StatsMessage::default();
    request.header.filter_mask = StatsFilterMask::Link64;
    let mut counters = NetlinkSocket::open()
        .and_then(|mut kernel| kernel.dump(&RouteNetlinkMessage::GetStats(request), facts::counters))
        .map_err(|source| DumpError { what: "device counters", source })?;
    counters.sort();
    Ok(counters)
}
