//! Packets of running flows that no program gets. Of TCP: what the kernel sends as keep-alive (RFC 9293, 3.8.4), with other addresses. Of UDP: messages that Braid
//! at the other end takes (`ebpf/rewrite.bpf.c`). And the message that lets a connection send again at once after its link was dead (RFC 6069).

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};

use braid_control::steering::{Content, Hasten, Keepalive, Segment};
use braid_model::{SequenceNumbers, checksum};
use socket2::{Domain, Protocol, Socket, Type};

const TCP: u8 = 6;
const UDP: u8 = 17;
/// Protocol of a socket whose packets come with their IP headers.
const RAW: i32 = 255;
/// Length of a TCP header without options.
const HEADER: usize = 20;
const HOPS: u8 = 64;
/// Offset of the header's length in words, and the flag of an acknowledgement.
const OFFSET: u8 = (HEADER as u8 / 4) << 4;
const ACK: u8 = 0x10;

/// Length of a UDP header.
const UDP_HEADER: usize = 8;
/// How a message between two hosts that run Braid begins (`BRAID_MESSAGE`).
const MESSAGE: &[u8; 16] = b"braid: this way?";

/// Sends packets. What the system refuses counts as lost.
pub(super) fn send(keepalives: &[Keepalive]) {
    let way = |keepalive: &Keepalive| (keepalive.device.clone(), keepalive.mark, keepalive.way.destination.is_ipv4());
    let mut sockets = BTreeMap::new();
    for keepalive in keepalives {
        let socket = sockets.entry(way(keepalive)).or_insert_with(|| open(keepalive));
        let to = SocketAddr::new(keepalive.way.destination.ip(), 0).into();
        let sent = socket
            .as_ref()
            .map_err(ToString::to_string)
            .and_then(|socket| socket.send_to(&packet(keepalive), &to).map_err(|error| error.to_string()));
        if let Err(error) = sent {
            tracing::debug!(source = %keepalive.way.source, destination = %keepalive.way.destination, "a packet was not sent: {error}");
        }
    }
}

/// A socket for packets that leave as this one does.
fn open(keepalive: &Keepalive) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(keepalive.way.destination), Type::RAW, Some(Protocol::from(RAW)))?;
    socket.bind_device(Some(keepalive.device.as_bytes()))?;
    socket.set_mark(keepalive.mark)?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// The most messages for one socket: without a doubling of its timer, TCP waits at least a round trip.
const MOST: u32 = 3;
/// Types and codes of "destination unreachable" that TCP takes for a sign of a broken way (RFC 6069, 4): ICMP, and ICMPv6.
const UNREACHABLE: [[u8; 2]; 2] = [[3, 1], [1, 0]];

/// Tells a socket of this machine that the other end was unreachable, once for each doubling of its timer.
pub(super) fn hasten(hasten: &Hasten) -> io::Result<()> {
    let here = SocketAddr::new(hasten.own.source.ip(), 0);
    let protocol = if here.is_ipv4() { Protocol::ICMPV4 } else { Protocol::ICMPV6 };
    let socket = Socket::new(Domain::for_address(here), Type::RAW, Some(protocol))?;
    socket.set_nonblocking(true)?;
    // From this machine to itself, so that it never leaves.
    socket.bind(&here.into())?;
    let message = unreachable(hasten);
    (0..hasten.doublings.min(MOST)).try_for_each(|_| socket.send_to(&message, &here.into()).map(drop))
}

/// The message about the socket's first segment that is not acknowledged. The kernel fills in the checksum of ICMPv6.
fn unreachable(hasten: &Hasten) -> Vec<u8> {
    let (from, to) = (hasten.own.source, hasten.own.destination);
    let (head, addresses) = header(from.ip(), to.ip(), TCP, HEADER as u8);
    let segment = [&from.port().to_be_bytes()[..], &to.port().to_be_bytes(), &hasten.unacknowledged.to_be_bytes()].concat();
    let kind = UNREACHABLE[usize::from(from.is_ipv6())];
    let mut message = [&kind[..], &[0; 6], &head, &addresses, &segment].concat();
    if from.is_ipv4() {
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    message
}

/// The packet. The kernel fills in the checksum of the IPv4 header.
fn packet(keepalive: &Keepalive) -> Vec<u8> {
    let (from, to) = (keepalive.way.source, keepalive.way.destination);
    let ports = [from.port(), to.port()].map(u16::to_be_bytes).concat();
    let (protocol, check, mut transport) = match keepalive.content {
        Content::Segment(segment) => (TCP, 16, [ports, rest_of_segment(segment)].concat()),
        Content::Datagram(proof) => (UDP, 6, [ports, rest_of_datagram(proof)].concat()),
    };
    let (head, addresses) = header(from.ip(), to.ip(), protocol, transport.len() as u8);
    let pseudo = [&addresses[..], &[0, protocol, 0, transport.len() as u8], &transport].concat();
    // In UDP, zero would mean that there is none (RFC 768).
    let sum = checksum(&pseudo);
    let sum = if sum == 0 && protocol == UDP { u16::MAX } else { sum };
    transport[check..check + 2].copy_from_slice(&sum.to_be_bytes());
    [head, addresses, transport].concat()
}

/// What follows the ports of a TCP segment.
fn rest_of_segment(segment: Segment) -> Vec<u8> {
    // The last byte that was acknowledged: it is outside the window, so that the other end ignores it.
    let numbers = [segment.unacknowledged.wrapping_sub(1), segment.expected].map(u32::to_be_bytes).concat();
    [numbers, vec![OFFSET, ACK], [segment.window, 0, 0].map(u16::to_be_bytes).concat()].concat()
}

/// What follows the ports of a datagram with a message.
fn rest_of_datagram(proof: Option<SequenceNumbers>) -> Vec<u8> {
    let proof = proof.map_or([0; 2], |proof| [proof.sent, proof.received]).map(u32::to_be_bytes).concat();
    let length = (UDP_HEADER + MESSAGE.len() + proof.len()) as u16;
    [&[length, 0].map(u16::to_be_bytes).concat()[..], MESSAGE, &proof].concat()
}

/// The IP header of a packet with `length` bytes after it, up to its addresses, and these.
fn header(from: IpAddr, to: IpAddr, protocol: u8, length: u8) -> (Vec<u8>, Vec<u8>) {
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            (vec![0x45, 0, 0, 20 + length, 0, 0, 0x40, 0, HOPS, protocol, 0, 0], [from.octets(), to.octets()].concat())
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => (vec![0x60, 0, 0, 0, 0, length, protocol, HOPS], [from.octets(), to.octets()].concat()),
        // Both ends of a flow are of one family.
        _ => (Vec::new(), Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use braid_control::steering::Ends;
    use braid_model::Protocol;

    use super::*;

    #[test]
    fn a_socket_is_told_about_its_own_segment() {
        for (source, destination, kind) in [("10.0.1.2:5", "10.0.2.1:80", [3, 1]), ("[fd00::1]:5", "[fd00::2]:80", [1, 0])] {
            let own = Ends { protocol: Protocol::Tcp, source: source.parse().unwrap(), destination: destination.parse().unwrap() };
            let message = unreachable(&Hasten { own, unacknowledged: 9, doublings: 1 });
            assert_eq!((&message[..2], &message[message.len() - 8..]), (&kind[..], &[0, 5, 0, 80, 0, 0, 0, 9][..]));
            if own.source.is_ipv4() {
                assert_eq!(checksum(&message), 0);
            }
        }
    }

    #[test]
    fn the_segment_is_the_kernels_keepalive() {
        for (source, destination, header, addresses) in [("10.0.1.2:5", "10.0.2.1:80", 20, 12), ("[fd00::1]:5", "[fd00::2]:80", 40, 8)] {
            let way = Ends { protocol: Protocol::Tcp, source: source.parse().unwrap(), destination: destination.parse().unwrap() };
            let content = Content::Segment(Segment { unacknowledged: 0, expected: 9, window: 502 });
            let packet = packet(&Keepalive { way, device: "lte0".into(), mark: 0, content });
            let (ip, tcp) = packet.split_at(header);
            assert_eq!(tcp[..16], [0, 5, 0, 80, 255, 255, 255, 255, 0, 0, 0, 9, 0x50, 0x10, 1, 246]);
            // The sum over the pseudo-header and the segment is zero (RFC 1071).
            assert_eq!(checksum(&[&ip[addresses..], &[0, TCP, 0, 20], tcp].concat()), 0);
        }
    }
    #[test]
    fn a_message_is_a_datagram_of_the_flow() {
        for (source, destination, header, addresses) in [("10.0.1.2:5", "10.0.2.1:80", 20, 12), ("[fd00::1]:5", "[fd00::2]:80", 40, 8)] {
            let way = Ends { protocol: Protocol::Udp, source: source.parse().unwrap(), destination: destination.parse().unwrap() };
            let content = Content::Datagram(Some(SequenceNumbers { sent: 1, received: 2 }));
            let packet = packet(&Keepalive { way, device: "lte0".into(), mark: 0, content });
            let (ip, udp) = packet.split_at(header);
            assert_eq!((&udp[..6], &udp[8..]), (&[0, 5, 0, 80, 0, 32][..], &b"braid: this way?\0\0\0\x01\0\0\0\x02"[..]));
            assert_eq!(checksum(&[&ip[addresses..], &[0, UDP, 0, 32], udp].concat()), 0);
        }
    }
}
