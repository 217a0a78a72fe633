//! The kernel's reverse path filter (`rp_filter`, RFC 3704): which devices drop IPv4 answers, and which connections can receive none.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_model::{LinkIndex, Protocol};

use super::netlink::{self, Files};
use super::sockdiag::{self, TcpSocket};
use super::worker::Worker;

/// The longest that [`end_stranded`] waits.
const END_WAIT: Duration = Duration::from_secs(1);

/// Whether the kernel drops IPv4 packets that arrive on this device if it would route the answer by another device (strict mode).
#[must_use]
pub fn is_strict(device: &str) -> bool {
    let value = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter")).unwrap_or_default();
        text.trim().parse::<u8>().unwrap_or(0)
    };
    value("all").max(value(device)) == 1
}

/// Closes the TCP connections that can receive no more answers, so that their programs reconnect at once instead of waiting for a timeout. These are
/// connections bound to a device with a strict filter whose remote end the kernel routes by other devices only. Call it after Braid's routing rules
/// are removed: until then those rules let the answers pass the filter. Returns the number of closed connections.
///
/// Needs `CAP_NET_ADMIN`. Best effort: a connection that cannot be examined or closed stays open. Returns after one second at the latest, with 0 if
/// the kernel still waits for a locked socket then.
pub fn end_stranded() -> usize {
    let ended = Worker::new("braid-stranded", 1).ask(END_WAIT, end_stranded_now);
    ended.unwrap_or_else(|error| {
        tracing::warn!("connections that can receive no more answers may stay open until they time out: {error}");
        0
    })
}

fn end_stranded_now() -> usize {
    let bound = |socket: &TcpSocket| socket.link.filter(|_| socket.local.is_ipv4() && !socket.local.ip().is_loopback());
    let sockets = sockdiag::dump_tcp(|_| false).unwrap_or_default();
    let candidates: Vec<(&TcpSocket, LinkIndex)> = sockets.iter().filter_map(|socket| Some((socket, bound(socket)?))).collect();
    if candidates.is_empty() {
        return 0;
    }
    let Ok(network) = netlink::snapshot(&Files::default()) else { return 0 };
    let strict: Vec<LinkIndex> = network.interfaces.iter().filter(|link| is_strict(&link.name)).map(|link| link.index).collect();
    let ended = candidates.into_iter().filter(|(socket, link)| {
        strict.contains(link)
            && uses_another_device(socket.local, socket.remote, *link)
            && sockdiag::destroy(Protocol::Tcp, socket.local, socket.remote, Some(*link), None).unwrap_or(false)
    });
    ended.count()
}

/// Whether the kernel has a route from `local` to `remote` and that route does not use `link`.
fn uses_another_device(local: SocketAddr, remote: SocketAddr, link: LinkIndex) -> bool {
    let (IpAddr::V4(from), IpAddr::V4(to)) = (local.ip(), remote.ip()) else { return false };
    match netlink::route_between(from, to) {
        Ok(Some(route)) => route.hops.iter().all(|hop| hop.device != link),
        _ => false,
    }
}
