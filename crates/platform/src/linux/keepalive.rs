//! Segments without data for running TCP connections: what the kernel sends as keep-alive (RFC 9293, 3.8.4), with other addresses.

use std::io;
use std::net::{IpAddr, SocketAddr};

use braid_control::steering::Keepalive;
use socket2::{Domain, Protocol, Socket, Type};

use super::probe::echo::checksum;

const TCP: u8 = 6;
/// Protocol of a socket whose packets come with their IP headers.
const RAW: i32 = 255;
/// Length of a TCP header without options.
const HEADER: usize = 20;
const HOPS: u8 = 64;
/// Offset of the header's length in words, and the flag of an acknowledgement.
const OFFSET: u8 = (HEADER as u8 / 4) << 4;
const ACK: u8 = 0x10;

/// Sends the segment.
pub(super) fn send(keepalive: &Keepalive) -> io::Result<()> {
    let to = keepalive.way.destination.ip();
    let socket = Socket::new(Domain::for_address(keepalive.way.destination), Type::RAW, Some(Protocol::from(RAW)))?;
    socket.bind_device(Some(keepalive.device.as_bytes()))?;
    socket.set_mark(keepalive.mark)?;
    socket.set_nonblocking(true)?;
    socket.send_to(&packet(keepalive), &SocketAddr::new(to, 0).into()).map(drop)
}

/// The packet. The kernel fills in the checksum of the IPv4 header.
fn packet(keepalive: &Keepalive) -> Vec<u8> {
    let (from, to) = (keepalive.way.source, keepalive.way.destination);
    let mut tcp = Vec::with_capacity(HEADER);
    tcp.extend([from.port(), to.port()].map(u16::to_be_bytes).concat());
    // The last byte that was acknowledged: it is outside the window, so that the other end ignores it.
    tcp.extend([keepalive.segment.unacknowledged.wrapping_sub(1), keepalive.segment.expected].map(u32::to_be_bytes).concat());
    tcp.extend([OFFSET, ACK]);
    tcp.extend([keepalive.segment.window, 0, 0].map(u16::to_be_bytes).concat());
    let addresses = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => [from.octets(), to.octets()].concat(),
        (IpAddr::V6(from), IpAddr::V6(to)) => [from.octets(), to.octets()].concat(),
        // Both ends of a flow are of one family.
        _ => Vec::new(),
    };
    let pseudo = [&addresses[..], &[0, TCP, 0, HEADER as u8], &tcp].concat();
    tcp[16..18].copy_from_slice(&checksum(&pseudo).to_be_bytes());
    let head = match from.ip() {
        IpAddr::V4(_) => vec![0x45, 0, 0, 20 + HEADER as u8, 0, 0, 0x40, 0, HOPS, TCP, 0, 0],
        IpAddr::V6(_) => vec![0x60, 0, 0, 0, 0, HEADER as u8, TCP, HOPS],
    };
    [head, addresses, tcp].concat()
}

#[cfg(test)]
mod tests {
    use braid_control::steering::{Ends, Segment};
    use braid_model::Protocol;

    use super::*;

    #[test]
    fn the_segment_is_the_kernels_keepalive() {
        for (source, destination, header, addresses) in [("10.0.1.2:5", "10.0.2.1:80", 20, 12), ("[fd00::1]:5", "[fd00::2]:80", 40, 8)] {
            let way = Ends { protocol: Protocol::Tcp, source: source.parse().unwrap(), destination: destination.parse().unwrap() };
            let keepalive =
                Keepalive { way, device: "lte0".into(), mark: 0, segment: Segment { unacknowledged: 0, expected: 9, window: 502 } };
            let packet = packet(&keepalive);
            let (ip, tcp) = packet.split_at(header);
            assert_eq!(tcp[..16], [0, 5, 0, 80, 255, 255, 255, 255, 0, 0, 0, 9, 0x50, 0x10, 1, 246]);
            // The sum over the pseudo-header and the segment is zero (RFC 1071).
            assert_eq!(checksum(&[&ip[addresses..], &[0, TCP, 0, 20], tcp].concat()), 0);
        }
    }
}
