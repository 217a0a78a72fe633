//! IPsec policies (XFRM): the destinations for which the kernel protects or blocks what this machine sends, independent of the routing tables.
//!
//! The kernel compares a policy with the addresses of a packet. Tunnels without a device (as strongSwan makes) give the system's own packets a source
//! address of the tunnel. A socket bound to a link has the link's address instead; the policy does not apply to it, and it would send in clear.
//!
//! Source: `struct xfrm_userpolicy_info` and its attributes in include/uapi/linux/xfrm.h.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_core::NlasIterator;
use netlink_sys::constants::NETLINK_XFRM;
use netlink_sys::{Socket, SocketAddr};

use super::talk::NetlinkSocket;

const XFRM_MSG_GETPOLICY: u16 = 0x15;
/// Size of `struct xfrm_userpolicy_id`, the body of the request.
const POLICY_ID: usize = 64;
/// Size of `struct xfrm_userpolicy_info`.
const POLICY: usize = 168;
const XFRMNLGRP_POLICY: u32 = 4;
const XFRMA_TMPL: u16 = 5;
const XFRMA_MARK: u16 = 21;
const XFRMA_IF_ID: u16 = 31;
const POLICY_OUT: u8 = 1;
const POLICY_BLOCK: u8 = 1;

/// Destinations for which outgoing policies protect or block. Empty if the kernel has no IPsec, or if this process may not read the policies (this
/// needs CAP_NET_ADMIN).
pub(super) fn protected() -> io::Result<Vec<IpNet>> {
    match read() {
        Err(error) if is_unavailable(&error) => Ok(Vec::new()),
        outcome => outcome,
    }
}

fn read() -> io::Result<Vec<IpNet>> {
    let mut found = Vec::new();
    NetlinkSocket::with(NETLINK_XFRM)?.dump_all(XFRM_MSG_GETPOLICY, POLICY_ID, |body| found.extend(covered(body)))?;
    found.sort();
    found.dedup();
    Ok(found)
}

/// Subscribes to policy changes. `None` if the kernel has no IPsec or this process may not subscribe.
pub(super) fn listen() -> io::Result<Option<Socket>> {
    let open = || {
        let mut socket = Socket::new(NETLINK_XFRM)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.add_membership(XFRMNLGRP_POLICY)?;
        Ok(socket)
    };
    match open() {
        Ok(socket) => Ok(Some(socket)),
        Err(error) if is_unavailable(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_unavailable(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT | libc::ENOENT))
}

/// Destinations for which a policy protects or blocks what this machine sends. If the policy cannot be parsed completely, this is the whole family,
/// or both. A policy that only permits is not counted: routes may cover its destinations as well, and not steering those does no harm. Policies of a
/// device (`if_id`) or of marked packets are ignored as well, because routes lead to them and Braid reads the routes.
fn covered(body: &[u8]) -> Vec<IpNet> {
    let everywhere = || [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)].map(|ip| IpNet::new_assert(ip, 0));
    let (Some(info), Some(attributes)) = (body.get(..POLICY), body.get(POLICY..)) else { return everywhere().to_vec() };
    let (mut applies, mut elsewhere) = (info[161] == POLICY_BLOCK, false);
    for attribute in NlasIterator::new(attributes).flatten() {
        let number = |at: usize| attribute.value().get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes);
        match attribute.kind() {
            XFRMA_TMPL => applies |= attribute.value_length() > 0,
            XFRMA_MARK => elsewhere |= number(0) & number(4) != 0,
            XFRMA_IF_ID => elsewhere |= number(0) != 0,
            _ => {}
        }
    }
    if info[160] != POLICY_OUT || !applies || elsewhere {
        return Vec::new();
    }
    let (v4, v6): ([u8; 4], [u8; 16]) = (info[..4].try_into().unwrap_or_default(), info[..16].try_into().unwrap_or_default());
    let address = match i32::from(u16::from_ne_bytes([info[40], info[41]])) {
        libc::AF_INET => IpAddr::from(v4),
        libc::AF_INET6 => IpAddr::from(v6),
        _ => return everywhere().to_vec(),
    };
    let whole = || everywhere().into_iter().find(|net| net.addr().is_ipv4() == address.is_ipv4());
    IpNet::new(address, info[42]).ok().map(|net| net.trunc()).or_else(whole).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(family: i32, address: &[u8], length: u8, (direction, action): (u8, u8), templates: usize) -> Vec<u8> {
        let mut body = vec![0; POLICY];
        body[..address.len()].copy_from_slice(address);
        body[40..42].copy_from_slice(&(family as u16).to_ne_bytes());
        (body[42], body[160], body[161]) = (length, direction, action);
        if templates > 0 {
            body.extend((4 + 64 * templates as u16).to_ne_bytes());
            body.extend(XFRMA_TMPL.to_ne_bytes());
            body.extend(vec![0; 64 * templates]);
        }
        body
    }

    #[test]
    fn outgoing_policies_that_protect_or_block_cover_their_destinations() {
        let v4 = |length, kind, templates| covered(&policy(libc::AF_INET, &[10, 1, 2, 3], length, kind, templates)).first().copied();
        assert_eq!(v4(8, (1, 0), 1), Some("10.0.0.0/8".parse().unwrap()));
        assert_eq!(v4(0, (1, 0), 2), Some("0.0.0.0/0".parse().unwrap()));
        assert_eq!(v4(32, (1, 1), 0), Some("10.1.2.3/32".parse().unwrap()), "it blocks");
        assert_eq!(v4(8, (1, 0), 0), None, "it permits");
        assert_eq!([0, 2, 4].map(|direction| v4(8, (direction, 0), 1)), [None; 3], "incoming, forwarded, and policies of one socket");
        let v6 = covered(&policy(libc::AF_INET6, &"2001:db8::1".parse::<Ipv6Addr>().unwrap().octets(), 32, (1, 0), 1));
        assert_eq!(v6, ["2001:db8::/32".parse().unwrap()]);
        for (kind, value, covers) in [(XFRMA_IF_ID, 7u32, false), (XFRMA_IF_ID, 0, true), (XFRMA_MARK, 7, false), (XFRMA_MARK, 0, true)] {
            let mut body = policy(libc::AF_INET, &[10, 1, 2, 3], 8, (1, 0), 1);
            body.extend(if kind == XFRMA_MARK { 12u16 } else { 8 }.to_ne_bytes());
            body.extend(kind.to_ne_bytes());
            body.extend(value.to_ne_bytes());
            body.extend(if kind == XFRMA_MARK { vec![0xff; 4] } else { vec![] });
            assert_eq!(!covered(&body).is_empty(), covers, "{kind} {value}");
        }
    }

    #[test]
    fn regression_an_unreadable_policy_covers_everything() {
        let whole = policy(libc::AF_INET, &[10, 1, 2, 3], 8, (1, 0), 1);
        for end in 0..POLICY {
            assert_eq!(covered(&whole[..end]).len(), 2, "{end}");
        }
        for end in POLICY..whole.len() {
            let _ = covered(&whole[..end]);
        }
        assert_eq!(covered(&policy(libc::AF_INET, &[10, 1, 2, 3], 33, (1, 0), 1)), ["0.0.0.0/0".parse().unwrap()]);
        assert_eq!(covered(&policy(77, &[10, 1, 2, 3], 8, (1, 0), 1)).len(), 2);
    }
}
