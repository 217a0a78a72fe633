//! Forwards clients' packets between their flows and the relay's device.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use braid_bond::codes;
use braid_model::key::PublicKey;
use braid_peer::destination::Policy;
use braid_peer::packet::{Packet, PacketAddresses, PacketFlows, PacketNets, Verdict};
use braid_platform::linux::outlet::{Outlet, OutletError};
use bytes::Bytes;
use tokio::sync::{mpsc, watch};

use crate::account::Account;
use crate::host_driver::BondFlow;
use crate::packets::{Message, PACKET_MTU};
use crate::relay::receivers::{self, Receivers};

/// A relay's way for packets into the system. It makes changes to the system, which it reverts when it is dropped.
pub struct PacketPort {
    outlet: Arc<Outlet>,
    nets: PacketNets,
}

impl PacketPort {
    /// Opens the device and lets the kernel forward; clients get addresses of `nets`. Must be called inside a tokio runtime. Needs `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// See [`Outlet::open`].
    pub fn open(nets: PacketNets) -> Result<Self, OutletError> {
        let outlet = Arc::new(Outlet::open(PACKET_MTU as u32, &nets.own())?);
        Ok(Self { outlet, nets })
    }
}

/// Forwards packets. Clones share it.
#[derive(Clone)]
pub(super) struct PacketForwarder(Arc<Shared>);

struct Shared {
    outlet: Arc<Outlet>,
    nets: PacketNets,
    clients: Mutex<Clients>,
    /// Set when flows of packets must end.
    stopped: watch::Sender<bool>,
}

#[derive(Default)]
struct Clients {
    places: Places,
    flows: Receivers,
    /// The flows that each client's packets make, over all its connections to this relay.
    judged: BTreeMap<PublicKey, Arc<Mutex<PacketFlows>>>,
}

/// The places of clients in the networks of addresses. A client keeps its place while there is room.
#[derive(Default)]
struct Places {
    of: BTreeMap<PublicKey, u32>,
    taken: BTreeSet<u32>,
}

impl Places {
    /// The place of a client below `size`, if one is free: preferably its number, so that it has the same after a restart. `is_idle` is asked about the
    /// places of others if there is no room.
    fn take(&mut self, key: PublicKey, number: u64, size: u32, is_idle: impl Fn(u32) -> bool) -> Option<u32> {
        if let Some(place) = self.of.get(&key) {
            return Some(*place);
        }
        let wanted = (number % u64::from(size.max(1))) as u32;
        if self.taken.len() >= size as usize {
            let (other, place) = self.of.iter().find(|(_, place)| is_idle(**place)).map(|(other, place)| (*other, *place))?;
            self.of.remove(&other);
            self.taken.remove(&place);
        }
        let free = (wanted..size).chain(0..wanted).find(|place| !self.taken.contains(place))?;
        self.taken.insert(free);
        self.of.insert(key, free);
        Some(free)
    }
}

/// A flow's entry in the table of receivers, until it is dropped.
struct Attached<'a> {
    forwarder: &'a PacketForwarder,
    addresses: PacketAddresses,
    number: u64,
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        self.forwarder.clients().flows.remove(self.number);
    }
}

impl PacketForwarder {
    /// Starts to forward.
    pub(super) fn start(port: PacketPort) -> Self {
        let PacketPort { outlet, nets } = port;
        let forwarder =
            Self(Arc::new(Shared { outlet: outlet.clone(), nets, clients: Mutex::default(), stopped: watch::Sender::new(false) }));
        let weak = Arc::downgrade(&forwarder.0);
        let mut stopped = forwarder.0.stopped.subscribe();
        tokio::spawn(async move {
            let deliver = |packet: &[u8]| weak.upgrade().map(|shared| Self(shared).clients().flows.deliver(packet)).is_some();
            tokio::select! {
                () = receivers::read(outlet.device(), deliver) => {}
                // An error: the forwarder is gone.
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
        });
        forwarder
    }

    /// Ends all flows of packets, and takes no more.
    pub(super) fn stop(&self) {
        self.0.stopped.send_replace(true);
    }

    /// Takes packets over a flow until it ends.
    pub(super) async fn forward(&self, flow: &BondFlow, key: PublicKey, account: &Account, policy: &Policy) {
        let mut stopped = self.0.stopped.subscribe();
        let Some((attached, waiting)) = self.attach(key, account).filter(|_| !*stopped.borrow_and_update()) else {
            return flow.answer(codes::BUSY);
        };
        flow.answer(0);
        let flows = self.clients().judged.entry(key).or_default().clone();
        let take = |message: Message| match message {
            Message::Packet(packet) => {
                if let Some(host) = self.send(&packet, &flows, (&attached.addresses, account, policy)) {
                    flow.send(Message::Closed(host).encode());
                }
            }
            Message::Ask => drop(flow.send(Message::Addresses(attached.addresses).encode())),
            _ => {}
        };
        tokio::select! {
            () = receivers::exchange(flow, account, waiting, take) => {}
            _ = stopped.wait_for(|stopped| *stopped) => {}
        }
    }

    /// Gives a client its addresses, and directs what is sent to them to this flow.
    fn attach(&self, key: PublicKey, account: &Account) -> Option<(Attached<'_>, mpsc::Receiver<Bytes>)> {
        let nets = &self.0.nets;
        let mut clients = self.clients();
        let Clients { places, flows, judged } = &mut *clients;
        let number = account.client.map_or(0, |client| client.number());
        let is_idle = |place: u32| !nets.addresses(place).iter().any(|address| flows.has(address));
        let mut found = nets.addresses(places.take(key, number, nets.size(), is_idle)?);
        let has = |v4: bool| self.0.outlet.addresses().iter().any(|address| address.is_ipv4() == v4);
        (found.v4, found.v6) = (found.v4.filter(|_| has(true)), found.v6.filter(|_| has(false)));
        judged.retain(|key, _| places.of.contains_key(key));
        let (number, receiver) = flows.add(found.iter());
        Some((Attached { forwarder: self, addresses: found, number }, receiver))
    }

    /// Hands a client's packet to the system, if it may leave. Returns its destination if the client must be told that it is not opened.
    fn send(&self, packet: &[u8], flows: &Mutex<PacketFlows>, whose: (&PacketAddresses, &Account, &Policy)) -> Option<IpAddr> {
        let (own, account, policy) = whose;
        let read = match Packet::read(packet) {
            // TCP and UDP have flows of their own. As packets, they could take ports from which this machine itself sends.
            Ok(read) if own.contain(read.source) && ![libc::IPPROTO_TCP, libc::IPPROTO_UDP].contains(&i32::from(read.protocol)) => read,
            Ok(_) => return None,
            Err(reason) => {
                tracing::debug!("dropped a client's packet: {reason}");
                return None;
            }
        };
        let most = account.meter(|meter| meter.limits().flows).unwrap_or(u32::MAX) as usize;
        let (now, _) = account.now();
        let is_open = |host: IpAddr| !self.0.nets.contain(host) && policy.check_host(host).is_ok();
        let verdict = flows.lock().unwrap_or_else(PoisonError::into_inner).judge(now, &read, most, is_open);
        match verdict {
            // Errors: the device's queue is full, or its administrator turned it off. The packet is lost.
            Verdict::Pass => drop(self.0.outlet.device().send(packet)),
            Verdict::Closed { tell: true } | Verdict::Full { tell: true } => return Some(read.destination),
            Verdict::Closed { tell: false } | Verdict::Full { tell: false } => {}
        }
        None
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.0.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_peer::keys::KeyPair;

    fn key() -> PublicKey {
        KeyPair::generate().unwrap().public()
    }

    #[test]
    fn clients_keep_their_places_and_idle_ones_make_room() {
        let mut places = Places::default();
        let keys: Vec<PublicKey> = (0..5).map(|_| key()).collect();
        let busy = |_: u32| false;
        assert_eq!(places.take(keys[0], 7, 3, busy), Some(1));
        assert_eq!(places.take(keys[1], 4, 3, busy), Some(2), "the next after one that is taken");
        assert_eq!(places.take(keys[2], 1, 3, busy), Some(0));
        assert_eq!(places.take(keys[0], 99, 3, busy), Some(1), "it keeps its place");
        assert_eq!(places.take(keys[3], 1, 3, busy), None);
        assert_eq!(places.take(keys[3], 1, 3, |place| place == 2), Some(2), "of the client that is idle");
        assert_eq!(places.take(keys[1], 4, 3, busy), None);
        assert_eq!((places.of.len(), places.taken.len()), (3, 3));
    }
}
