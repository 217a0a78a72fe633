//! Carries packets of the gateway's clients, of protocols other than TCP and UDP, through the bond to one relay. The switch marks them, a routing rule
//! sends them over a device of this process, and the firewall translates their sources to the address that the relay gave this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use braid_api::{Flow as FlowView, LinkBytes};
use braid_bond::codes;
use braid_control::steering::FlowRow;
use braid_decide::refusals::Refusals;
use braid_decide::tables::PACKET_DEVICE;
use braid_model::{Family, LinkFacts, NetworkSnapshot, PerFamily, Time, Traffic};
use braid_peer::packet::{PacketAddresses, is_inner};
use braid_platform::linux::sys::bpf::now;
use braid_platform::linux::tun::{Tun, TunError};
use braid_transport::client::Client;
use braid_transport::{FromRelay, PACKET_MTU, PacketFlow};
use ipnet::IpNet;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::{Change, Mover, Peers};

/// Delay before a flow of packets is opened again that was refused or has ended.
const RETRY_AFTER: Duration = Duration::from_secs(2);
/// The least time between two refused destinations of which the relay tells. The others are told again when they are tried again.
const REFUSAL_INTERVAL: Duration = Duration::from_millis(100);
/// Routes to larger parts of the Internet than this are default routes in pieces, as VPNs have them.
const WIDE: u8 = 4;

/// Flows whose packets go through the bond, and the task that carries them.
#[derive(Default)]
pub(super) struct PacketCarrier {
    session: Option<Session>,
    flows: Vec<PacketRow>,
    /// Destinations that the relay refuses, and those that the switch knows of.
    refusals: Refusals,
    bypassing: BTreeSet<IpAddr>,
}

/// A flow of packets to a relay.
struct Session {
    relay: String,
    /// Number of the relay's session. A relay that was joined again is another.
    number: u64,
    flow: Arc<Mutex<Option<PacketFlow>>>,
    task: JoinHandle<()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        // This closes the device, so the kernel removes it, its addresses and its routes.
        self.task.abort();
    }
}

/// A flow of a client, and the name of its application.
pub(crate) struct PacketRow {
    pub(crate) row: FlowRow,
    pub(crate) application: String,
}

impl PacketRow {
    fn mover(&self) -> Mover {
        (self.application.clone(), self.row.app.client_address())
    }
}

impl Peers {
    /// Names of the reachable relays that take packets.
    pub(crate) fn packet_relays(&self) -> BTreeSet<String> {
        let offering = self.relays.iter().filter(|(_, known)| known.is_up() && known.client.takes_packets());
        offering.map(|(name, _)| name.clone()).collect()
    }

    /// Carries packets to this relay from now on, or none. `network` is the current network, which shows what addresses are in use.
    pub(crate) fn carry_packets(&mut self, relay: Option<&str>, network: &watch::Receiver<Arc<NetworkSnapshot>>) {
        let found = relay.and_then(|name| self.relays.get(name).map(|known| (name, known)));
        let same = |session: &Session| found.is_some_and(|(name, known)| session.relay == name && session.number == known.session);
        if self.packets.session.is_none() && found.is_none() || self.packets.session.as_ref().is_some_and(same) {
            return self.update_packet_bypass();
        }
        // The switch sends no more packets over the old device. It gets others as soon as the new one has its rules.
        self.flow_limits.take_packets(PerFamily::default());
        self.packets.session = found.map(|(name, known)| {
            let flow = Arc::new(Mutex::new(None));
            let (relay, client, network, changes) = (name.to_owned(), known.client.clone(), network.clone(), self.changes.clone());
            let task = tokio::spawn(carry(client, relay, flow.clone(), network, changes));
            Session { relay: name.to_owned(), number: known.session, flow, task }
        });
        // The relay's operator may have allowed more destinations meanwhile.
        self.packets.refusals = Refusals::default();
        self.update_packet_bypass();
    }

    /// The relay does not open this destination to packets. Flows there go direct.
    pub(crate) fn on_packets_refused(&mut self, relay: &str, host: IpAddr) {
        if self.packets.session.as_ref().is_some_and(|session| session.relay == relay) && self.packets.refusals.add(now(), relay, host) {
            tracing::info!(relay, %host, "the relay forwards no packets there: they go direct");
        }
        self.update_packet_bypass();
    }

    fn update_packet_bypass(&mut self) {
        let hosts = self.packets.refusals.by_all(now(), self.packets.session.iter().map(|session| &session.relay));
        if hosts != self.packets.bypassing {
            self.flow_limits.set_packet_bypass(&self.packets.bypassing, &hosts);
            self.packets.bypassing = hosts;
        }
    }

    /// Sets in which families the switch sends packets to the device, whose firewall and routing rules are in place.
    pub(crate) fn take_packets(&self, families: PerFamily<bool>) {
        let families = if self.packets.session.is_some() { families } else { PerFamily::default() };
        self.flow_limits.take_packets(families);
    }

    /// Sets the living flows whose packets go through the bond.
    pub(crate) fn set_packet_flows(&mut self, rows: Vec<PacketRow>) {
        if rows.is_empty() && self.packets.flows.is_empty() {
            return;
        }
        let mut flows = self.flows.lock().unwrap_or_else(PoisonError::into_inner);
        let before: BTreeMap<_, _> = self.packets.flows.iter().map(|known| (known.row.id, moved(&known.row))).collect();
        for known in &rows {
            let more = moved(&known.row).since(before.get(&known.row.id).copied().unwrap_or_default());
            *flows.moved.entry(known.mover()).or_default() += more;
        }
        drop(flows);
        self.packets.flows = rows;
    }

    /// The living flows whose packets go through the bond.
    pub(super) fn packet_flows(&self) -> impl Iterator<Item = &FlowRow> {
        self.packets.flows.iter().map(|known| &known.row)
    }

    /// The same for `GET /v1/flows`. The links are those of all packets, because these are one flow of the bond.
    pub(super) fn packet_views(&self, now: Time, own: Option<&str>) -> Vec<FlowView> {
        let session = self.packets.session.as_ref();
        let flow = session.and_then(|session| session.flow.lock().unwrap_or_else(PoisonError::into_inner).clone());
        let by_link = flow.and_then(|flow| flow.flow().view()).map(|view| view.by_link).unwrap_or_default();
        let links: Vec<String> = by_link.iter().map(|(link, _)| self.device(*link)).collect();
        let view = |PacketRow { row, application }: &PacketRow| {
            let client = row.app.client_address();
            FlowView {
                id: row.id.0,
                application: application.clone(),
                protocol: row.protocol.to_string(),
                local: (row.local.1 != 0).then(|| std::net::SocketAddr::from(row.local).to_string()),
                remote: std::net::SocketAddr::from(row.remote).to_string(),
                link: links.join("+"),
                carry: "bond".to_owned(),
                scheduler: self.scheduler_name().to_owned(),
                rx_bytes: Some(row.rx.get()),
                tx_bytes: Some(row.tx.get()),
                rtt_us: None,
                age_ms: Some(now.since(row.started).as_millis() as u64),
                name: client.is_none().then(|| row.app.name.clone()),
                pid: client.is_none().then_some(row.process),
                user: client.is_none().then_some(row.user),
                cgroup: None,
                class: Some(row.class.to_string()),
                demand_bytes: None,
                retransmissions: None,
                delivery_rate_bps: None,
                rule: None,
                program_rule: None,
                energy_j: None,
                peer: session.map(|session| session.relay.clone()),
                client: client.map(|client| client.to_string()),
                virtual_interface: own.filter(|_| row.is_through_virtual_device()).map(str::to_owned),
                fast_path: None,
                moved_to: None,
                accepted: None,
                late: None,
                by_link: Vec::<LinkBytes>::new(),
            }
        };
        self.packets.flows.iter().map(view).collect()
    }
}

fn moved(row: &FlowRow) -> Traffic {
    Traffic { rx: row.rx, tx: row.tx }
}

/// Keeps a flow of packets open to a relay, as long as the relay takes it.
async fn carry(
    client: Client,
    relay: String,
    current: Arc<Mutex<Option<PacketFlow>>>,
    network: watch::Receiver<Arc<NetworkSnapshot>>,
    changes: mpsc::UnboundedSender<Change>,
) {
    let mut device: Option<(Tun, Vec<IpNet>)> = None;
    let mut trouble = String::new();
    loop {
        let outcome = match client.open_packets().await {
            Ok(flow) => {
                let addresses = usable(flow.addresses(), &network.borrow());
                // While the flow was interrupted, the device stayed.
                let made = match device.take().filter(|(_, has)| *has == addresses) {
                    Some((made, _)) => Ok(made),
                    None => make(&addresses, &relay),
                };
                match made {
                    Ok(made) => {
                        tracing::info!(relay, ?addresses, "packets of the gateway's clients go through a relay");
                        *current.lock().unwrap_or_else(PoisonError::into_inner) = Some(flow.clone());
                        let ended = exchange(&made, &flow, &relay, &changes).await;
                        *current.lock().unwrap_or_else(PoisonError::into_inner) = None;
                        device = ended.is_ok().then_some((made, addresses));
                        ended.map_err(|error| format!("the device {PACKET_DEVICE} cannot be read: {error}"))
                    }
                    Err(error) => Err(error),
                }
            }
            Err(code) => {
                device = None;
                let why = if code.0 == codes::BUSY { "it has no room for another client" } else { "it refused" };
                Err(format!("the relay {relay} takes no packets of this machine: {why} ({code})"))
            }
        };
        match outcome {
            Ok(()) => trouble.clear(),
            Err(text) if text != trouble => {
                tracing::warn!("packets of the gateway's clients go direct: {text}");
                trouble = text;
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

/// Makes the device. The routing and firewall rules follow when the network shows it.
fn make(addresses: &[IpNet], relay: &str) -> Result<Tun, String> {
    if addresses.is_empty() {
        return Err(format!(
            "the relay {relay} gave addresses that are in use here, or public: its operator can choose others with --packets-net"
        ));
    }
    let up = || -> Result<Tun, TunError> {
        let device = Tun::make(PACKET_DEVICE)?;
        device.set_up(PACKET_MTU as u32, addresses)?;
        Ok(device)
    };
    up().map_err(|error| error.to_string())
}

/// Moves packets until the flow ends.
///
/// # Errors
/// The device cannot be read.
async fn exchange(device: &Tun, flow: &PacketFlow, relay: &str, changes: &mpsc::UnboundedSender<Change>) -> std::io::Result<()> {
    let mut buffer = vec![0; PACKET_MTU + 1];
    let mut told = tokio::time::Instant::now();
    loop {
        // Packets must not starve other tasks.
        tokio::task::coop::consume_budget().await;
        tokio::select! {
            read = device.receive(&mut buffer) => flow.send(&buffer[..read?]),
            received = flow.receive() => match received {
                // Errors: the device's queue is full. The packet is lost.
                Ok(FromRelay::Packet(packet)) => drop(device.send(&packet)),
                // A hostile relay may refuse at any rate.
                Ok(FromRelay::Closed(_)) if told > tokio::time::Instant::now() => {}
                Ok(FromRelay::Closed(host)) => {
                    told = tokio::time::Instant::now() + REFUSAL_INTERVAL;
                    let _ = changes.send(Change::PacketsRefused { name: relay.to_owned(), host });
                }
                Err(_) => return Ok(()),
            },
        }
    }
}

/// The addresses from the relay that this machine can take, as networks of one address: not public, and not within a network that is in use here.
fn usable(given: PacketAddresses, network: &NetworkSnapshot) -> Vec<IpNet> {
    let in_use = |address: IpAddr| {
        let others = network.interfaces.iter().filter(|device| device.name != PACKET_DEVICE);
        let here = others.flat_map(|device| &device.addresses).any(|net| net.contains(&address));
        let own = network.interfaces.iter().find(|device| device.name == PACKET_DEVICE).map(|device| device.index);
        let routed = network.routes.iter().filter(|route| !route.ours && route.destination.prefix_len() >= WIDE);
        let elsewhere = |route: &&braid_model::RouteFacts| route.hops.iter().all(|hop| Some(hop.device) != own);
        here || routed.filter(elsewhere).any(|route| route.destination.contains(&address))
    };
    // Hosts that only the default route reaches.
    let needed = |address: IpAddr| {
        let gateways = |device: &LinkFacts| Family::ALL.map(|family| device.gateways.get(family).clone()).concat();
        let is_gateway = |device: &LinkFacts| gateways(device).iter().any(|route| route.gateway == Some(address));
        network.interfaces.iter().any(|device| device.resolvers.contains(&address) || is_gateway(device))
    };
    given.iter().filter(|address| is_inner(*address) && !in_use(*address) && !needed(*address)).map(IpNet::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::{LinkIndex, LinkKind, NextHop, RouteFacts, RouteKind};

    fn given(v4: &str, v6: &str) -> PacketAddresses {
        PacketAddresses { v4: Some(v4.parse().unwrap()), v6: Some(v6.parse().unwrap()) }
    }

    #[test]
    fn only_private_addresses_outside_networks_in_use_are_taken_from_a_relay() {
        let device = LinkFacts {
            addresses: vec!["192.168.7.1/24".parse().unwrap(), "fd07::1/64".parse().unwrap()],
            ..LinkFacts::new(LinkIndex(2), "eth1", LinkKind::Wired)
        };
        let route = |to: &str| RouteFacts {
            table: 254,
            destination: to.parse().unwrap(),
            kind: RouteKind::Unicast,
            metric: 0,
            hops: vec![NextHop { device: LinkIndex(3), gateway: None, dead: false }],
            source: None,
            conditional: false,
            ours: false,
        };
        let routes = ["0.0.0.0/0", "0.0.0.0/1", "10.0.0.0/8", "fd01::/16"].map(route).to_vec();
        let network = NetworkSnapshot { interfaces: vec![device], routes, ..NetworkSnapshot::default() };
        let take = |v4: &str, v6: &str| usable(given(v4, v6), &network).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(take("198.19.240.2", "fd62::2"), ["198.19.240.2/32", "fd62::2/128"]);
        assert_eq!(take("192.168.7.9", "fd62::2"), ["fd62::2/128"], "on the LAN");
        assert_eq!(take("198.19.240.2", "fd07::2"), ["198.19.240.2/32"]);
        assert!(take("10.1.2.3", "fd01::1").is_empty(), "behind a route");
        assert!(take("8.8.8.8", "2001:db8::1").is_empty(), "public");
        assert!(take("127.0.0.1", "::1").is_empty());
    }
}
