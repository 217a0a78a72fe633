//! Tunnels: packets of moved flows between clients and this host that go on inside their bonds, because what is on their way drops or translates them.
//!
//! This host's daemon rewrites them: what leaves for a tunnel comes over the device here, and what a client sends is handed to the device. A client can only
//! send segments of its moved flows, from its own end of its tunnel to this host's end.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use braid_bond::{BondId, codes};
use braid_decide::tunnel::{End, SERVER_DEVICE, Tunnel};
use braid_model::Family;
use braid_peer::packet::{PacketAddresses, tunnelled};
use braid_platform::linux::tun::{Tun, TunError};
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::account::Account;
use crate::host_driver::BondFlow;
use crate::packets::{Message, PACKET_MTU};
use crate::relay::receivers::{self, Receivers};

/// The device of a server's tunnels, which lives as long as this.
pub struct TunnelPort(Arc<Tun>);

impl TunnelPort {
    /// Makes the device. Must be called inside a tokio runtime. Needs `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// See [`TunError`].
    pub fn open() -> Result<Self, TunError> {
        let device = Tun::make(SERVER_DEVICE)?;
        device.set_up(PACKET_MTU as u32, &[])?;
        Ok(Self(Arc::new(device)))
    }
}

/// The tunnels of a server. Clones share them.
#[derive(Clone)]
pub(super) struct Tunnels(Arc<Shared>);

struct Shared {
    device: Arc<Tun>,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    by_bond: BTreeMap<BondId, Tunnel>,
    receivers: Receivers,
    /// Number of the last tunnel.
    last: u32,
    /// The flows in tunnels, by the client's address and port and by this host's port, and when their leases end.
    flows: BTreeMap<(SocketAddr, u16), Instant>,
}

/// A bond's tunnel, until it is dropped.
struct Place<'a> {
    tunnels: &'a Tunnels,
    bond: BondId,
    tunnel: Tunnel,
    number: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut open = self.tunnels.open();
        open.by_bond.remove(&self.bond);
        open.receivers.remove(self.number);
    }
}

impl Tunnels {
    /// Starts to forward. Tunnels are numbered from `first` on: a client of several servers tells their tunnels by their numbers.
    pub(super) fn start(port: TunnelPort, first: u32) -> Self {
        let open = Mutex::new(Open { last: first, ..Open::default() });
        let tunnels = Self(Arc::new(Shared { device: port.0.clone(), open }));
        let weak = Arc::downgrade(&tunnels.0);
        tokio::spawn(async move {
            let deliver = |packet: &[u8]| weak.upgrade().map(|shared| Self(shared).open().receivers.deliver(packet)).is_some();
            receivers::read(&port.0, deliver).await;
        });
        tunnels
    }

    /// The tunnel in a bond.
    pub(super) fn of(&self, bond: BondId) -> Option<Tunnel> {
        self.open().by_bond.get(&bond).copied()
    }

    /// Takes packets over a flow until it ends. A bond has one tunnel.
    pub(super) async fn forward(&self, flow: &BondFlow, account: &Account) {
        let Some((place, waiting)) = self.take(flow.bond()) else { return flow.answer(codes::BUSY) };
        flow.answer(0);
        let take = |message: Message| match message {
            // Errors: the device's queue is full, or its administrator turned it off. The packet is lost.
            Message::Packet(packet) if self.takes(place.tunnel, &packet) => drop(self.0.device.send(&packet)),
            Message::Ask => drop(flow.send(Message::Addresses(addresses(place.tunnel)).encode())),
            _ => {}
        };
        receivers::exchange(flow, account, waiting, take).await;
    }

    /// Takes the segments of these flows, each by the client's address and port and by this host's port, until their leases end.
    pub(super) fn allow(&self, flows: impl Iterator<Item = (SocketAddr, u16)>, until: Instant) {
        let (mut open, now) = (self.open(), Instant::now());
        open.flows.retain(|_, until| *until > now);
        open.flows.extend(flows.map(|flow| (flow, until)));
    }

    /// Whether a packet of a tunnel's client is a segment of a flow that has moved there.
    fn takes(&self, tunnel: Tunnel, packet: &[u8]) -> bool {
        let Some([from, to]) = tunnelled(tunnel, End::Client, packet) else { return false };
        let family = if packet[0] >> 4 == 4 { Family::V4 } else { Family::V6 };
        let client = SocketAddr::new(tunnel.address(End::Client, family), from);
        self.open().flows.get(&(client, to)).is_some_and(|until| *until > Instant::now())
    }

    fn take(&self, bond: BondId) -> Option<(Place<'_>, mpsc::Receiver<Bytes>)> {
        let mut open = self.open();
        if open.by_bond.contains_key(&bond) {
            return None;
        }
        let tunnel = loop {
            open.last = open.last.wrapping_add(1);
            let tunnel = Tunnel::new(open.last);
            if !open.receivers.has(tunnel.address(End::Client, Family::V4)) {
                break tunnel;
            }
        };
        open.by_bond.insert(bond, tunnel);
        let (number, receiver) = open.receivers.add(addresses(tunnel).iter());
        Some((Place { tunnels: self, bond, tunnel, number }, receiver))
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The addresses of the client's end.
fn addresses(tunnel: Tunnel) -> PacketAddresses {
    let of = |family| tunnel.address(End::Client, family);
    let (IpAddr::V4(v4), IpAddr::V6(v6)) = (of(Family::V4), of(Family::V6)) else { return PacketAddresses::default() };
    PacketAddresses { v4: Some(v4), v6: Some(v6) }
}
