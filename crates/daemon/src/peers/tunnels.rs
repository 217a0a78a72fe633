//! The client's ends of tunnels: packets of moved flows that go on inside the bonds to their hosts. One device takes the packets for all of them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use braid_decide::tunnel::{CLIENT_DEVICE, End, Tunnel};
use braid_model::Family;
use braid_peer::packet::{PacketAddresses, addresses, tunnelled};
use braid_platform::linux::tun::{Tun, TunError};
use braid_transport::client::Client;
use braid_transport::{FromRelay, PACKET_MTU, PacketFlow};
use tokio::sync::mpsc;

use super::Change;

/// Delay before a tunnel is opened again.
const RETRY_AFTER: Duration = Duration::from_secs(5);

/// The tunnels of this machine. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Tunnels(Arc<Mutex<Ends>>);

#[derive(Default)]
struct Ends {
    /// The flows that take what is sent into each tunnel.
    flows: BTreeMap<Tunnel, PacketFlow>,
    /// The device, while there are tunnels.
    device: Weak<Tun>,
}

/// A server's tunnel, until it is dropped.
struct Opened<'a> {
    tunnels: &'a Tunnels,
    tunnel: Tunnel,
    host: IpAddr,
    changes: &'a mpsc::UnboundedSender<Change>,
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.tunnels.ends().flows.remove(&self.tunnel);
        let _ = self.changes.send(Change::Tunnel { host: self.host, tunnel: None });
    }
}

impl Tunnels {
    /// Keeps a tunnel to this server open, if the server has any. Never completes.
    pub(super) async fn keep(&self, host: IpAddr, client: &Client, changes: &mpsc::UnboundedSender<Change>) {
        let mut trouble = String::new();
        loop {
            if client.takes_packets()
                && let Err(text) = self.open(host, client, changes).await
                && text != trouble
            {
                tracing::warn!(%host, "moved flows cannot go on in UDP where a firewall or NAT drops them: {text}");
                trouble = text;
            }
            tokio::time::sleep(RETRY_AFTER).await;
        }
    }

    /// Opens a tunnel and carries packets until it ends.
    async fn open(&self, host: IpAddr, client: &Client, changes: &mpsc::UnboundedSender<Change>) -> Result<(), String> {
        let flow = client.open_packets().await.map_err(|code| format!("the server refuses a tunnel ({code})"))?;
        let tunnel = tunnel_of(flow.addresses()).ok_or("the server gave addresses that are none of a tunnel")?;
        let device = self.device().map_err(|error| error.to_string())?;
        {
            let mut ends = self.ends();
            if ends.flows.contains_key(&tunnel) {
                return Err("another server's tunnel has the same addresses".to_owned());
            }
            ends.flows.insert(tunnel, flow.clone());
        }
        let _opened = Opened { tunnels: self, tunnel, host, changes };
        let _ = changes.send(Change::Tunnel { host, tunnel: Some(tunnel) });
        let mut look = tokio::time::interval(RETRY_AFTER);
        // Until the flow or its bond ends, or somebody removes the device.
        loop {
            tokio::select! {
                received = flow.receive() => match received {
                    // Errors: the device's queue is full, or it is turned off. The packet is lost.
                    Ok(FromRelay::Packet(packet)) if tunnelled(tunnel, End::Server, &packet).is_some() => drop(device.send(&packet)),
                    Ok(_) => {}
                    Err(_) => return Ok(()),
                },
                _ = look.tick() => if !device.exists() { return Err(format!("the device {CLIENT_DEVICE} was removed")) },
            }
        }
    }

    /// The device, which exists as long as a tunnel has it.
    fn device(&self) -> Result<Arc<Tun>, TunError> {
        let mut ends = self.ends();
        if let Some(device) = ends.device.upgrade().filter(|device| device.exists()) {
            return Ok(device);
        }
        let device = Arc::new(Tun::make(CLIENT_DEVICE)?);
        device.set_up(PACKET_MTU as u32, &[])?;
        ends.device = Arc::downgrade(&device);
        tokio::spawn(send(ends.device.clone(), self.clone()));
        Ok(device)
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Hands the packets that come over the device to their tunnels, as long as it exists.
async fn send(device: Weak<Tun>, tunnels: Tunnels) {
    let mut buffer = vec![0; PACKET_MTU + 1];
    loop {
        // Packets must not starve other tasks.
        tokio::task::coop::consume_budget().await;
        let Some(open) = device.upgrade() else { return };
        // It must not be kept by its own reader.
        let read = tokio::time::timeout(RETRY_AFTER, open.receive(&mut buffer)).await;
        drop(open);
        match read {
            Ok(Ok(length)) => {
                let packet = &buffer[..length];
                let tunnel = addresses(packet).and_then(|(_, to)| Tunnel::of(to)).map(|(tunnel, _)| tunnel);
                let flow = tunnel.and_then(|tunnel| tunnels.ends().flows.get(&tunnel).cloned());
                if let Some(flow) = flow {
                    flow.send(packet);
                }
            }
            // It was removed. The tunnels notice that, too, and make another.
            Ok(Err(error)) => return tracing::warn!("the device {CLIENT_DEVICE} cannot be read: {error}"),
            Err(_) => {}
        }
    }
}

/// The tunnel whose client's end has these addresses. The server chose them.
fn tunnel_of(given: PacketAddresses) -> Option<Tunnel> {
    let (tunnel, _) = Tunnel::of(given.v4?.into())?;
    let is_end = |address: IpAddr| tunnel.address(End::Client, Family::of(address)) == address;
    given.iter().all(is_end).then_some(tunnel)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_cannot_choose_other_addresses_than_those_of_a_tunnel() {
        let given = |v4: &str, v6: &str| PacketAddresses { v4: Some(v4.parse().unwrap()), v6: Some(v6.parse().unwrap()) };
        assert_eq!(tunnel_of(given("244.0.0.2", "100::2")), Some(Tunnel::new(1)));
        for (v4, v6) in [("244.0.0.3", "100::3"), ("244.0.0.2", "100::4"), ("10.0.0.2", "100::2"), ("244.0.0.2", "fd00::2")] {
            assert_eq!(tunnel_of(given(v4, v6)), None, "{v4} {v6}");
        }
        assert_eq!(tunnel_of(PacketAddresses::default()), None);
    }
}
