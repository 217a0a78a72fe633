//! The kernel's reverse path filter (`rp_filter`, RFC 3704): which IPv4 answers it drops, and connections that it would starve.

use std::net::{IpAddr, SocketAddr};

use braid_model::{LinkIndex, Protocol};

use super::netlink::{self, Files};
use super::sockdiag::{self, TcpSocket};

/// Whether the kernel drops IPv4 packets on this device that do not come the way it would answer them (strict mode).
#[must_use]
pub fn is_strict(device: &str) -> bool {
    let value = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter")).unwrap_or_default();
        text.trim().parse::<u8>().unwrap_or(0)
    };
    value("all").max(value(device)) == 1
}

/// Ends the TCP connections that can hear no answer any more, so that their programs connect anew at once instead of waiting: those bound to
/// a device with a strict filter while the kernel would reach their far end by others only. Call it when Braid's rules are gone: it is they
/// that let the answers in. Returns how many were ended.
///
/// Needs `CAP_NET_ADMIN`. Best effort: what cannot be found out or ended stays as it is.
pub fn end_stranded() -> usize {
    let bound = |socket: &TcpSocket| socket.link.filter(|_| socket.local.is_ipv4() && !socket.local.ip().is_loopback());
    let sockets = sockdiag::dump_tcp().unwrap_or_default();
    let candidates: Vec<(&TcpSocket, LinkIndex)> = sockets.iter().filter_map(|socket| Some((socket, bound(socket)?))).collect();
    if candidates.is_empty() {
        return 0;
    }
    let Ok(network) = netlink::snapshot(&Files::default()) else { return 0 };
    let strict: Vec<LinkIndex> = network.interfaces.iter().filter(|link| is_strict(&link.name)).map(|link| link.index).collect();
    let ended = candidates.into_iter().filter(|(socket, link)| {
        strict.contains(link)
            && goes_elsewhere(socket.local, socket.remote, *link)
            && sockdiag::destroy(Protocol::Tcp, socket.local, socket.remote, Some(*link)).unwrap_or(false)
    });
    ended.count()
}

/// Whether the kernel's way from `local` to `remote` is known, and none by `link`.
fn goes_elsewhere(local: SocketAddr, remote: SocketAddr, link: LinkIndex) -> bool {
    let (IpAddr::V4(from), IpAddr::V4(to)) = (local.ip(), remote.ip()) else { return false };
    match netlink::route_between(from, to) {
        Ok(Some(route)) => route.hops.iter().all(|hop| hop.device != link),
        _ => false,
    }
}
