//! Flows of IP packets: the messages of such a flow (docs/protocol.md), and its client side.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use braid_bond::{FlowKind, FlowPolicy, Open, Target, codes};
use braid_peer::packet::{PacketAddresses, addresses};
use bytes::{BufMut, Bytes, BytesMut};

use crate::client::Client;
use crate::host_driver::{BondFlow, Moved, ResetCode};

/// The longest packet, in bytes. With its headers it fits into one datagram over a link of 1,500 bytes.
pub const PACKET_MTU: usize = 1400;

/// Interval at which a client asks for its addresses, because messages may be lost.
const ASK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a client waits for its addresses.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

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

/// What comes from the relay over a flow of packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromRelay {
    /// A packet to one of the client's addresses.
    Packet(Bytes),
    /// The relay does not open this destination.
    Closed(IpAddr),
}

/// The client's end of a flow of packets. The relay drops the packets of an earlier one.
#[derive(Debug, Clone)]
pub struct PacketFlow {
    flow: BondFlow,
    addresses: PacketAddresses,
}

impl Client {
    /// Whether the relay forwards packets. `false` until a path is up.
    pub fn takes_packets(&self) -> bool {
        self.with_bond(|host, bond| host.takes_packets(bond))
    }

    /// Opens a flow of packets and waits for the addresses that the relay gives this client.
    ///
    /// # Errors
    /// The relay refuses, or the bond ends; `ETIMEDOUT` if the relay does not answer.
    pub async fn open_packets(&self) -> Result<PacketFlow, ResetCode> {
        let target = Target::Address((Ipv4Addr::UNSPECIFIED, 0).into());
        let open = Open { kind: FlowKind::Packets, target, policy: FlowPolicy::default() };
        let flow = self.open(open).map_err(|_| ResetCode(codes::BUSY))?;
        let late = || ResetCode(libc::ETIMEDOUT as u64);
        tokio::time::timeout(ASK_TIMEOUT, flow.opened()).await.map_err(|_| late())??;
        let end = Instant::now() + ASK_TIMEOUT;
        while Instant::now() < end {
            flow.send(Message::Ask.encode());
            let answer = async {
                loop {
                    if let Some(Message::Addresses(addresses)) = Message::decode(flow.receive().await?) {
                        return Ok(addresses);
                    }
                }
            };
            if let Ok(answer) = tokio::time::timeout(ASK_INTERVAL, answer).await {
                return Ok(PacketFlow { addresses: answer?, flow });
            }
        }
        Err(late())
    }
}

impl PacketFlow {
    /// The client's addresses. The relay chose them: check them before use.
    pub fn addresses(&self) -> PacketAddresses {
        self.addresses
    }

    /// The bytes of this flow by link, also after its end.
    pub fn moved(&self) -> Moved {
        self.flow.moved()
    }

    /// The flow in its bond.
    pub fn flow(&self) -> &BondFlow {
        &self.flow
    }

    /// Sends a packet, if it comes from one of the client's addresses: the system sends some by itself that do not.
    pub fn send(&self, packet: &[u8]) {
        if addresses(packet).is_some_and(|(source, _)| self.addresses.contain(source)) && packet.len() <= PACKET_MTU {
            self.flow.send(Bytes::copy_from_slice(packet));
        }
    }

    /// The next that comes from the relay. Packets to other than the client's addresses are dropped. Cancel safe.
    ///
    /// # Errors
    /// The flow, or its bond, has ended.
    pub async fn receive(&self) -> Result<FromRelay, ResetCode> {
        loop {
            match Message::decode(self.flow.receive().await?) {
                Some(Message::Packet(packet)) if addresses(&packet).is_some_and(|(_, to)| self.addresses.contain(to)) => {
                    return Ok(FromRelay::Packet(packet));
                }
                Some(Message::Closed(host)) => return Ok(FromRelay::Closed(host)),
                _ => {}
            }
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
