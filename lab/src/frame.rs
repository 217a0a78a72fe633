//! Ethernet frames on a link, and filters that count them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use braid_model::{ByteCount, Direction, Protocol};
use braid_netem::Packet;

const HEADER: usize = 14;

/// An Ethernet frame in transit. Its size is that of the IP packet in it.
#[derive(Debug, Clone)]
pub(crate) struct Frame(pub(crate) Vec<u8>);

impl Packet for Frame {
    fn size(&self) -> ByteCount {
        ByteCount::new(self.0.len().saturating_sub(HEADER) as u64)
    }

    /// ARP and neighbour discovery. Radio links retransmit them, and a lost one would stop the link for a second.
    fn is_exempt_from_loss(&self) -> bool {
        match ether_type(&self.0) {
            Some(0x0806) => true,
            Some(0x86dd) => self.0.get(20) == Some(&58) && matches!(self.0.get(54), Some(133..=137)),
            _ => false,
        }
    }
}

/// Packets to count. `None` matches all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filter {
    /// Direction, as the client sees it: up is towards the server.
    pub direction: Option<Direction>,
    /// Source address.
    pub source: Option<IpAddr>,
    /// Destination address.
    pub destination: Option<IpAddr>,
    /// TCP or UDP.
    pub protocol: Option<Protocol>,
    /// Source port; only TCP and UDP have one.
    pub source_port: Option<u16>,
    /// Destination port.
    pub port: Option<u16>,
}

impl Filter {
    /// Packets from the client to this address.
    pub fn to(destination: impl Into<IpAddr>) -> Self {
        Self { direction: Some(Direction::Up), destination: Some(destination.into()), ..Self::default() }
    }

    /// Restricts the filter to this protocol and destination port.
    pub fn port(self, protocol: Protocol, port: u16) -> Self {
        Self { protocol: Some(protocol), port: Some(port), ..self }
    }

    pub(crate) fn matches(&self, direction: Direction, packet: &Summary) -> bool {
        fn fits<T: PartialEq>(wanted: Option<T>, found: T) -> bool {
            wanted.is_none_or(|wanted| wanted == found)
        }
        fits(self.direction, direction)
            && fits(self.source, packet.source)
            && fits(self.destination, packet.destination)
            && self.protocol.is_none_or(|wanted| packet.protocol == Some(wanted))
            && self.source_port.is_none_or(|wanted| packet.ports.is_some_and(|(source, _)| source == wanted))
            && self.port.is_none_or(|wanted| packet.ports.is_some_and(|(_, port)| port == wanted))
    }
}

/// The header fields that a [`Filter`] compares. Only first fragments have ports; IPv6 extension headers are not parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summary {
    source: IpAddr,
    destination: IpAddr,
    protocol: Option<Protocol>,
    ports: Option<(u16, u16)>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = self.protocol.map_or_else(|| "other".to_owned(), |protocol| protocol.to_string());
        match self.ports {
            Some((source, target)) => {
                write!(f, "{protocol} {} to {}", SocketAddr::new(self.source, source), SocketAddr::new(self.destination, target))
            }
            None => write!(f, "{protocol} {} to {}", self.source, self.destination),
        }
    }
}

impl Summary {
    /// The headers of the IP packet in the frame; `None` if it holds no IP packet.
    pub(crate) fn of(frame: &[u8]) -> Option<Self> {
        let ip = frame.get(HEADER..)?;
        let (source, destination, number, payload) = match ether_type(frame)? {
            0x0800 => {
                let first = u16::from_be_bytes([*ip.get(6)?, *ip.get(7)?]) & 0x1fff == 0;
                let payload = first.then_some(usize::from(*ip.first()? & 15) * 4);
                (IpAddr::V4(v4(ip.get(12..16)?)?), IpAddr::V4(v4(ip.get(16..20)?)?), *ip.get(9)?, payload)
            }
            0x86dd => (IpAddr::V6(v6(ip.get(8..24)?)?), IpAddr::V6(v6(ip.get(24..40)?)?), *ip.get(6)?, Some(40)),
            _ => return None,
        };
        let protocol = match number {
            6 => Some(Protocol::Tcp),
            17 => Some(Protocol::Udp),
            _ => None,
        };
        let ports = protocol.and(payload).and_then(|at| ip.get(at..at + 4));
        let ports = ports.map(|p| (u16::from_be_bytes([p[0], p[1]]), u16::from_be_bytes([p[2], p[3]])));
        Some(Self { source, destination, protocol, ports })
    }
}

fn ether_type(frame: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes([*frame.get(12)?, *frame.get(13)?]))
}

fn v4(bytes: &[u8]) -> Option<Ipv4Addr> {
    <[u8; 4]>::try_from(bytes).ok().map(Into::into)
}

fn v6(bytes: &[u8]) -> Option<Ipv6Addr> {
    <[u8; 16]>::try_from(bytes).ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp(destination: [u8; 4], port: u16) -> Vec<u8> {
        let mut frame = vec![0u8; HEADER + 28];
        frame[12..14].copy_from_slice(&[8, 0]);
        frame[14] = 0x45;
        frame[23] = 17;
        frame[26..30].copy_from_slice(&[10, 77, 0, 2]);
        frame[30..34].copy_from_slice(&destination);
        frame[34..36].copy_from_slice(&4000u16.to_be_bytes());
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        frame
    }

    #[test]
    fn a_filter_matches_what_it_names_only() {
        let packet = Summary::of(&udp([203, 0, 113, 10], 53)).unwrap();
        let wanted = Filter::to([203, 0, 113, 10]).port(Protocol::Udp, 53);
        assert!(wanted.matches(Direction::Up, &packet));
        assert!(Filter::default().matches(Direction::Down, &packet));
        assert!(!wanted.matches(Direction::Down, &packet));
        assert!(!Filter { port: Some(54), ..wanted }.matches(Direction::Up, &packet));
        assert!(!Filter { source_port: Some(1), ..wanted }.matches(Direction::Up, &packet));
        assert!(!Filter { protocol: Some(Protocol::Tcp), ..wanted }.matches(Direction::Up, &packet));
        assert!(!Filter::to([203, 0, 113, 11]).matches(Direction::Up, &packet));
    }

    #[test]
    fn later_fragments_have_no_ports_and_short_frames_do_not_match() {
        let mut frame = udp([1, 2, 3, 4], 53);
        frame[21] = 1;
        assert_eq!(Summary::of(&frame).unwrap().ports, None);
        for length in 0..HEADER + 20 {
            assert_eq!(Summary::of(&frame[..length]), None);
        }
    }

    #[test]
    fn ipv6_is_parsed_and_neighbour_discovery_is_exempt() {
        let mut frame = vec![0u8; HEADER + 48];
        frame[12..14].copy_from_slice(&[0x86, 0xdd]);
        frame[20] = 6;
        frame[53] = 7;
        frame[56..58].copy_from_slice(&443u16.to_be_bytes());
        let packet = Summary::of(&frame).unwrap();
        assert_eq!((packet.destination, packet.ports), ("::7".parse().unwrap(), Some((0, 443))));
        assert!(!Frame(frame.clone()).is_exempt_from_loss());
        (frame[20], frame[54]) = (58, 135);
        assert!(Frame(frame.clone()).is_exempt_from_loss());
        frame[54] = 128;
        assert!(!Frame(frame).is_exempt_from_loss(), "an echo request is an ordinary packet");
    }

    #[test]
    fn a_frame_counts_as_its_packet() {
        assert_eq!(Frame(vec![0; 1514]).size(), ByteCount::new(1500));
    }
}
