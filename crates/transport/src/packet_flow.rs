//! The client's side of a flow of IP packets.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use braid_bond::{FlowKind, FlowPolicy, Open, Target, codes};
use braid_peer::packet::{PacketAddresses, addresses};
use bytes::Bytes;

use crate::client::Client;
use crate::host_driver::{BondFlow, ResetCode};
use crate::packets::{Message, PACKET_MTU};

/// Interval at which a client asks for its addresses, because messages may be lost.
const ASK_INTERVAL: Duration = Duration::from_millis(500);
/// How long a client waits for its addresses.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);

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
        self.with_bond(|host, bond| host.takes(bond, FlowKind::Packets))
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
