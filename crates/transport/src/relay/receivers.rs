//! Which client's flow takes what the system sends over a device of the relay.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use braid_peer::limits::Direction;
use braid_peer::packet::addresses;
use braid_platform::linux::tun::Tun;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::account::Account;
use crate::host_driver::BondFlow;
use crate::packets::{Message, PACKET_MTU};

/// Packets that wait for one client. Further ones are lost.
const WAITING: usize = 256;
/// Delay before a device is read again after an error.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The flows by the addresses to which their packets go.
#[derive(Default)]
pub(super) struct Receivers {
    flows: BTreeMap<IpAddr, (u64, mpsc::Sender<Bytes>)>,
    last: u64,
}

impl Receivers {
    /// Directs what is sent to these addresses to a flow. Returns its number and its packets.
    pub(super) fn add(&mut self, addresses: impl IntoIterator<Item = IpAddr>) -> (u64, mpsc::Receiver<Bytes>) {
        let (sender, receiver) = mpsc::channel(WAITING);
        self.last += 1;
        self.flows.extend(addresses.into_iter().map(|address| (address, (self.last, sender.clone()))));
        (self.last, receiver)
    }

    /// Forgets a flow. A later one may have its addresses.
    pub(super) fn remove(&mut self, number: u64) {
        self.flows.retain(|_, (of, _)| *of != number);
    }

    /// Whether a flow has this address.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        self.flows.contains_key(&address)
    }

    /// Hands a packet to the flow that has its destination.
    pub(super) fn deliver(&self, packet: &[u8]) {
        if let Some((_, sender)) = addresses(packet).and_then(|(_, to)| self.flows.get(&to)) {
            let _ = sender.try_send(Bytes::copy_from_slice(packet));
        }
    }
}

/// Hands each message of a client to `take`, and sends it the packets that wait for it, within its limits, until the flow ends.
pub(super) async fn exchange(flow: &BondFlow, account: &Account, mut waiting: mpsc::Receiver<Bytes>, take: impl Fn(Message)) {
    let up = async {
        while let Ok(message) = flow.receive().await {
            if !account.pass(Direction::Up, message.len()).await {
                return;
            }
            Message::decode(message).into_iter().for_each(&take);
        }
    };
    let down = async {
        while let Some(packet) = waiting.recv().await {
            if !account.pass(Direction::Down, packet.len()).await {
                return;
            }
            flow.send(packet);
        }
    };
    tokio::select! {
        () = up => {}
        () = down => {}
    }
}

/// Hands each packet that the system sends over the device to `deliver`, until that returns `false`.
pub(super) async fn read(device: &Tun, deliver: impl Fn(&[u8]) -> bool) {
    let mut buffer = vec![0; PACKET_MTU + 1];
    loop {
        match device.receive(&mut buffer).await {
            Ok(length) if deliver(&buffer[..length]) => {}
            Ok(_) => return,
            Err(error) => {
                tracing::warn!("cannot read clients' packets from the relay's device: {error}; restart the relay");
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
        // One busy client must not keep the others waiting.
        tokio::task::coop::consume_budget().await;
    }
}
