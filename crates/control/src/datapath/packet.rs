//! The packet with which a flow begins, as the controller is shown it: this device has flows, and never sees their packets.

use std::net::IpAddr;

use braid_model::{Mac, Protocol, checksum};
use bytes::Bytes;

use crate::core::FlowNote;

/// Where the packet goes. The links' gateways have other addresses.
const GATEWAY: Mac = Mac([2, 0, 0, 0, 0, 1]);
const HOPS: u8 = 64;
/// A TCP header behind its sequence numbers: five words, SYN, the largest window, no checksum yet.
const SYN: [u8; 8] = [5 << 4, 2, 0xff, 0xff, 0, 0, 0, 0];
/// Where TCP and UDP have their checksums.
const TCP_CHECKSUM: usize = 16;
const UDP_CHECKSUM: usize = 6;

/// The first packet of a flow, with Ethernet addresses; `from` is this device's.
pub(super) fn first_packet(flow: &FlowNote, from: Mac) -> Bytes {
    let remote = flow.remote.0.to_canonical();
    // Unknown addresses of sockets may be of the other family.
    let local = flow.local.0.to_canonical();
    let (source, destination) = match (local, remote) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => (source.octets().to_vec(), destination.octets().to_vec()),
        (_, IpAddr::V4(destination)) => (vec![0; 4], destination.octets().to_vec()),
        (IpAddr::V6(source), IpAddr::V6(destination)) => (source.octets().to_vec(), destination.octets().to_vec()),
        (_, IpAddr::V6(destination)) => (vec![0; 16], destination.octets().to_vec()),
    };
    let protocol = flow.protocol.number();
    let payload = transport(flow, &source, &destination);
    let length = payload.len() as u16;
    let mut frame = [&GATEWAY.0[..], &from.0].concat();
    if remote.is_ipv4() {
        frame.extend(0x0800u16.to_be_bytes());
        let [high, low] = (length + 20).to_be_bytes();
        let head = [0x45, 0, high, low, 0, 0, 0x40, 0, HOPS, protocol, 0, 0];
        let mut header = [&head[..], &source[..], &destination[..]].concat();
        set(&mut header, 10);
        frame.extend(header);
    } else {
        frame.extend(0x86ddu16.to_be_bytes());
        let [high, low] = length.to_be_bytes();
        frame.extend([0x60, 0, 0, 0, high, low, protocol, HOPS]);
        frame.extend([source, destination].concat());
    }
    frame.extend(payload);
    frame.into()
}

/// The header of TCP or UDP; nothing for other protocols.
fn transport(flow: &FlowNote, source: &[u8], destination: &[u8]) -> Vec<u8> {
    let ports = [flow.local.1.to_be_bytes(), flow.remote.1.to_be_bytes()].concat();
    let (mut header, at) = match flow.protocol {
        Protocol::Tcp => ([&ports[..], &[0; 8], &SYN].concat(), TCP_CHECKSUM),
        Protocol::Udp => ([&ports[..], &[0, 8, 0, 0]].concat(), UDP_CHECKSUM),
        Protocol::Other(_) => return Vec::new(),
    };
    let length = header.len() as u8;
    // The pseudo-headers of IPv4 and IPv6 have the same sum.
    let covered = [source, destination, &[0, flow.protocol.number(), 0, length], &header[..]].concat();
    header.iter_mut().skip(at).zip(checksum(&covered).to_be_bytes()).for_each(|(byte, new)| *byte = new);
    header
}

/// Sets the checksum at this place of a header.
fn set(header: &mut [u8], at: usize) {
    let sum = checksum(header).to_be_bytes();
    header.iter_mut().skip(at).zip(sum).for_each(|(byte, new)| *byte = new);
}

#[cfg(test)]
mod tests {
    use braid_model::ByteCount;

    use super::*;

    fn note(protocol: Protocol, local: &str, remote: &str) -> FlowNote {
        let (local, remote) = ((local.parse().unwrap(), 40_000), (remote.parse().unwrap(), 443));
        FlowNote { protocol, local, remote, rule: None, is_new: true, moved: ByteCount::ZERO }
    }

    #[test]
    fn packets_have_the_flows_addresses_and_valid_checksums() {
        let own = Mac([2, 0, 0, 0, 9, 9]);
        let tcp = first_packet(&note(Protocol::Tcp, "10.0.1.2", "203.0.113.10"), own);
        assert_eq!((tcp.len(), &tcp[6..14]), (54, &[2, 0, 0, 0, 9, 9, 8, 0][..]));
        assert_eq!((&tcp[26..34], &tcp[34..38]), (&[10, 0, 1, 2, 203, 0, 113, 10][..], &[0x9c, 0x40, 1, 0xbb][..]));
        assert_eq!((checksum(&tcp[14..34]), tcp[47]), (0, 2));
        assert_eq!(checksum(&[&tcp[26..34], &[0, 6, 0, 20], &tcp[34..]].concat()), 0);
        let udp = first_packet(&note(Protocol::Udp, "::ffff:0.0.0.0", "203.0.113.10"), own);
        assert_eq!(checksum(&[&udp[26..34], &[0, 17, 0, 8], &udp[34..]].concat()), 0);
        // A socket of IPv6 without an address.
        let unknown = first_packet(&note(Protocol::Udp, "::", "203.0.113.10"), own);
        assert_eq!(unknown, udp);
        let udp6 = first_packet(&note(Protocol::Udp, "fd00::2", "2001:db8::1"), own);
        assert_eq!((udp6.len(), &udp6[12..14], udp6[20]), (62, &[0x86, 0xdd][..], 17));
        assert_eq!(checksum(&[&udp6[22..54], &[0, 0, 0, 8, 0, 0, 0, 17], &udp6[54..]].concat()), 0);
        let ping = first_packet(&note(Protocol::Other(1), "192.168.7.20", "203.0.113.10"), own);
        assert_eq!((ping.len(), ping[23]), (34, 1));
    }
}
