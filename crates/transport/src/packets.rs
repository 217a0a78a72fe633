//! The messages of a flow of IP packets (docs/protocol.md).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use braid_peer::packet::PacketAddresses;
use bytes::{BufMut, Bytes, BytesMut};

/// The longest packet, in bytes. With its headers it fits into one datagram over a link of 1,500 bytes.
pub const PACKET_MTU: usize = 1400;

const ADDRESSES: u8 = 0;
const CLOSED: u8 = 1;
const V4: u8 = 4;
const V6: u8 = 6;

/// A message of a flow of packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    /// An IP packet, from its header on.
    Packet(Bytes),
    /// Client: asks for its addresses.
    Ask,
    /// Server: the client's addresses.
    Addresses(PacketAddresses),
    /// Server: this destination is not opened.
    Closed(IpAddr),
}

impl Message {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            Self::Packet(packet) => return packet.clone(),
            Self::Ask => out.put_u8(ADDRESSES),
            Self::Addresses(addresses) => {
                out.put_u8(ADDRESSES);
                out.put_slice(&addresses.v4.unwrap_or(Ipv4Addr::UNSPECIFIED).octets());
                out.put_slice(&addresses.v6.unwrap_or(Ipv6Addr::UNSPECIFIED).octets());
            }
            Self::Closed(IpAddr::V4(ip)) => {
                out.put_slice(&[CLOSED, V4]);
                out.put_slice(&ip.octets());
            }
            Self::Closed(IpAddr::V6(ip)) => {
                out.put_slice(&[CLOSED, V6]);
                out.put_slice(&ip.octets());
            }
        }
        out.freeze()
    }

    /// `None` for a message that must be ignored.
    pub(crate) fn decode(message: Bytes) -> Option<Self> {
        let v4 = |bytes: &[u8]| Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?));
        let v6 = |bytes: &[u8]| Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?));
        match &message[..] {
            [first, ..] if matches!(first >> 4, V4 | V6) => (message.len() <= PACKET_MTU).then(|| Self::Packet(message.clone())),
            [ADDRESSES] => Some(Self::Ask),
            [ADDRESSES, rest @ ..] if rest.len() == 20 => {
                let (v4, v6) = (v4(&rest[..4])?, v6(&rest[4..])?);
                let (v4, v6) = (Some(v4).filter(|ip| !ip.is_unspecified()), Some(v6).filter(|ip| !ip.is_unspecified()));
                Some(Self::Addresses(PacketAddresses { v4, v6 }))
            }
            [CLOSED, V4, rest @ ..] => Some(Self::Closed(v4(rest)?.into())),
            [CLOSED, V6, rest @ ..] => Some(Self::Closed(v6(rest)?.into())),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let addresses = |v4: Option<&str>, v6: Option<&str>| {
            Message::Addresses(PacketAddresses { v4: v4.map(|ip| ip.parse().unwrap()), v6: v6.map(|ip| ip.parse().unwrap()) })
        };
        let messages = [
            Message::Ask,
            addresses(Some("198.19.240.2"), Some("fd00::2")),
            addresses(None, Some("fd00::2")),
            addresses(Some("198.19.240.2"), None),
            Message::Closed("10.0.0.1".parse().unwrap()),
            Message::Closed("fd00::1".parse().unwrap()),
            Message::Packet(Bytes::from_static(&[0x45, 0, 0])),
            Message::Packet(Bytes::from(vec![0x60; PACKET_MTU])),
        ];
        for message in messages {
            assert_eq!(Message::decode(message.encode()), Some(message));
        }
    }

    #[test]
    fn other_messages_are_ignored() {
        for message in
            [&[][..], &[0, 0], &[0; 20], &[0; 22], &[1], &[1, 4, 1, 2, 3], &[1, 4, 1, 2, 3, 4, 5], &[1, 5, 1, 2, 3, 4], &[2], &[0x50, 1]]
        {
            assert_eq!(Message::decode(Bytes::copy_from_slice(message)), None, "{message:?}");
        }
        assert_eq!(Message::decode(Bytes::from(vec![0x45; PACKET_MTU + 1])), None, "too long");
    }
}
