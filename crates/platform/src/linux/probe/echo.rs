//! Echo requests (RFC 792, RFC 4443 section 4), through an unprivileged ping socket if the system allows it, otherwise a raw socket.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::process;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use braid_model::checksum;
use socket2::{Domain, Protocol, Type};
use tokio::net::UdpSocket;

use super::{ProbeError, ProbeOutcome, bound};

/// Minimum number of requests in one probe, evenly spread over its time, so that a single lost packet does not make the link appear dead.
const MIN_REQUESTS: u32 = 3;

/// Bounds of the interval between requests. The lower bound avoids a timer of zero. The upper bound keeps the long probe of a dead link responsive:
/// its return must be detected before the flows on it are ended.
const INTERVAL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(400));

const HEADER: usize = 8;

/// Distinguishes the probes of this process. Raw sockets receive every answer from their remote address.
static NEXT_TOKEN: AtomicU16 = AtomicU16::new(0);

/// Sends requests until an answer arrives. The caller must stop it after `timeout`.
pub(super) async fn ask(device: &str, address: IpAddr, timeout: Duration) -> Result<ProbeOutcome, ProbeError> {
    let socket = open(device, address)?;
    let echo = Echo::new(address);
    let mut sent: Vec<Instant> = Vec::new();
    let mut timer = tokio::time::interval((timeout / MIN_REQUESTS).clamp(INTERVAL.0, INTERVAL.1));
    loop {
        tokio::select! {
            answer = receive(&socket, &echo) => {
                let sequence = answer.map_err(|error| ProbeError::from_socket("receive an echo reply", error))?;
                if let Some(start) = sent.get(usize::from(sequence)) {
                    return Ok(ProbeOutcome::Alive { rtt: start.elapsed() });
                }
            }
            _ = timer.tick(), if sent.len() < usize::from(u16::MAX) => {
                let request = echo.request(sent.len() as u16);
                sent.push(Instant::now());
                socket.send(&request).await.map_err(|error| ProbeError::from_socket("send an echo request", error))?;
            }
        }
    }
}

/// Opens a socket connected to `address`, so that it receives only packets from that address and ICMP errors about it.
///
/// It is not a UDP socket, but the operations that tokio's `UdpSocket` uses on a connected socket work on every datagram socket.
fn open(device: &str, address: IpAddr) -> Result<UdpSocket, ProbeError> {
    let (domain, protocol) = match address {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
    };
    let socket = match bound(device, domain, Type::DGRAM, protocol) {
        Err(error) if error.is_forbidden() => bound(device, domain, Type::RAW, protocol)?,
        other => other?,
    };
    socket.connect(&SocketAddr::new(address, 0).into()).map_err(ProbeError::impossible("connect an echo socket"))?;
    UdpSocket::from_std(socket.into()).map_err(ProbeError::impossible("wait for the socket"))
}

/// Sequence number of the next answer to one of this probe's requests.
async fn receive(socket: &UdpSocket, echo: &Echo) -> io::Result<u16> {
    let mut packet = [0; 256];
    loop {
        let length = socket.recv(&mut packet).await?;
        if let Some(sequence) = echo.sequence_of_answer(&packet[..length]) {
            return Ok(sequence);
        }
    }
}

/// Identity shared by the requests of one probe.
struct Echo {
    v4: bool,
    /// Identifier and payload. A ping socket replaces the identifier, so answers are compared by their payload.
    token: [u8; 8],
}

impl Echo {
    fn new(address: IpAddr) -> Self {
        let count = NEXT_TOKEN.fetch_add(1, Ordering::Relaxed).to_be_bytes();
        let process = process::id().to_be_bytes();
        Self { v4: address.is_ipv4(), token: [count[0], count[1], process[0], process[1], process[2], process[3], b'b', b'r'] }
    }

    fn request(&self, sequence: u16) -> [u8; HEADER + 8] {
        let mut packet = [0; HEADER + 8];
        packet[0] = if self.v4 { 8 } else { 128 };
        packet[4..6].copy_from_slice(&self.token[..2]);
        packet[6..8].copy_from_slice(&sequence.to_be_bytes());
        packet[HEADER..].copy_from_slice(&self.token);
        // For IPv6 the kernel fills in the checksum.
        if self.v4 {
            let sum = checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        packet
    }

    /// Returns the sequence number if the packet is an answer to one of these requests. Raw IPv4 sockets prefix it with the IP header.
    fn sequence_of_answer(&self, packet: &[u8]) -> Option<u16> {
        let packet = match packet.first()? {
            first if self.v4 && first >> 4 == 4 => packet.get(usize::from(first & 15) * 4..)?,
            _ => packet,
        };
        let reply = if self.v4 { 0 } else { 129 };
        let ours = packet.len() >= HEADER && packet[..2] == [reply, 0] && packet[HEADER..] == self.token;
        ours.then(|| u16::from_be_bytes([packet[6], packet[7]]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(echo: &Echo, sequence: u16) -> Vec<u8> {
        let mut packet = echo.request(sequence).to_vec();
        packet[0] = if echo.v4 { 0 } else { 129 };
        packet
    }

    #[test]
    fn a_packet_with_its_checksum_sums_to_zero() {
        let echo = Echo::new("192.0.2.1".parse().unwrap());
        assert_eq!(checksum(&echo.request(0x1234)), 0);
    }

    #[test]
    fn only_answers_to_this_probe_count() {
        for address in ["192.0.2.1", "2001:db8::1"] {
            let (mine, other) = (Echo::new(address.parse().unwrap()), Echo::new(address.parse().unwrap()));
            assert_eq!(mine.sequence_of_answer(&reply(&mine, 2)), Some(2));
            assert_eq!(mine.sequence_of_answer(&reply(&other, 2)), None, "another probe's");
            assert_eq!(mine.sequence_of_answer(&mine.request(2)), None, "the request itself, as on loopback");
            assert_eq!(mine.sequence_of_answer(&reply(&mine, 2)[..9]), None, "cut off");
            assert_eq!(mine.sequence_of_answer(&[]), None);
        }
    }

    #[test]
    fn the_ip_header_of_raw_sockets_is_skipped() {
        let echo = Echo::new("192.0.2.1".parse().unwrap());
        let mut packet = vec![0x46];
        packet.resize(24, 0);
        packet.extend(reply(&echo, 1));
        assert_eq!(echo.sequence_of_answer(&packet), Some(1));
        assert_eq!(echo.sequence_of_answer(&packet[..10]), None);
    }
}
