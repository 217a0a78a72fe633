//! Bonds to servers that run Braid themselves. The first flow starts a bond; a bond that is idle for a while ends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use braid_control::core::{MoveOrder, Question, Recipient, ServerEvent};
use braid_decide::detection::{DetectionAnswer, HostStatus};
use braid_model::key::PublicKey;
use braid_transport::client::{Client, ClientLink, HostAnswer, Peer, State, ask};
use tokio::sync::mpsc;

use super::Change;
use super::tunnels::Tunnels;

/// UDP port of hosts that run Braid (docs/protocol.md).
pub(super) const PORT: u16 = 5757;
/// Time without flows after which a bond ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of bonds: each has sockets on every link.
const MAX_BONDS: usize = 32;

/// The bonds.
#[derive(Default)]
pub(super) struct Servers {
    bonds: BTreeMap<IpAddr, Server>,
    /// Tunnels in them.
    tunnels: Tunnels,
}

/// A bond to one host.
pub(super) struct Server {
    pub(super) client: Client,
    key: PublicKey,
    /// When the bond last had a flow.
    used: Instant,
    /// Takes requests to move flows.
    orders: mpsc::UnboundedSender<MoveOrder>,
    /// Whether the server takes such requests, and those about flows of datagrams.
    moves: bool,
    moves_datagrams: bool,
}

impl Servers {
    pub(super) fn is_empty(&self) -> bool {
        self.bonds.is_empty()
    }

    pub(super) fn clients(&self) -> impl Iterator<Item = &Client> {
        self.bonds.values().map(|server| &server.client)
    }

    /// The client of the bond to the host with this address, if there is one.
    pub(super) fn client(&self, name: &str) -> Option<&Client> {
        self.bonds.get(&name.parse().ok()?).map(|server| &server.client)
    }

    /// The bond to `host`, started if there is none; `None` if there are too many. `busy` returns whether a bond has flows.
    pub(super) fn bond(
        &mut self,
        host: IpAddr,
        key: PublicKey,
        links: &[ClientLink],
        changes: &mpsc::UnboundedSender<Change>,
        busy: impl Fn(IpAddr) -> bool,
    ) -> Option<Client> {
        if self.bonds.get(&host).is_some_and(|server| server.key != key) {
            self.bonds.remove(&host);
        }
        if !self.bonds.contains_key(&host) {
            if self.bonds.len() >= MAX_BONDS {
                let idle = self.bonds.iter().filter(|(host, _)| !busy(**host)).min_by_key(|(_, server)| server.used);
                let idle = idle.map(|(host, _)| *host)?;
                self.bonds.remove(&idle);
            }
            self.bonds.insert(host, begin(host, key, links, &self.tunnels, changes)?);
        }
        let server = self.bonds.get_mut(&host)?;
        server.used = Instant::now();
        Some(server.client.clone())
    }

    /// Whether a bond to this host exists, or can begin without the end of another.
    pub(super) fn has_room_for(&self, host: IpAddr) -> bool {
        self.bonds.len() < MAX_BONDS || self.bonds.contains_key(&host)
    }

    /// Takes the orders for a host.
    pub(super) fn orders(&self, host: IpAddr) -> Option<&mpsc::UnboundedSender<MoveOrder>> {
        self.bonds.get(&host).map(|server| &server.orders)
    }

    pub(super) fn note_mover(&mut self, host: IpAddr, ready: bool, datagrams: bool) {
        if let Some(server) = self.bonds.get_mut(&host) {
            (server.moves, server.moves_datagrams) = (ready, datagrams);
        }
    }

    pub(super) fn movers(&self, datagrams: bool) -> BTreeSet<IpAddr> {
        let moves = |server: &Server| server.moves && (server.moves_datagrams || !datagrams);
        self.bonds.iter().filter(|(_, server)| moves(server)).map(|(host, _)| *host).collect()
    }

    /// Ends bonds that have had no flows for [`IDLE_TIMEOUT`].
    pub(super) fn sweep(&mut self, busy: impl Fn(IpAddr) -> bool) {
        let now = Instant::now();
        self.bonds.retain(|host, server| {
            if busy(*host) {
                server.used = now;
            }
            let kept = now.saturating_duration_since(server.used) < IDLE_TIMEOUT;
            if !kept {
                tracing::info!(%host, "ended the idle bond to a server");
            }
            kept
        });
    }

    /// Ends bonds to hosts that may no longer be reached over links, for example because a tunnel covers them.
    pub(super) fn keep(&mut self, may_reach: impl Fn(IpAddr) -> bool) {
        self.bonds.retain(|host, _| may_reach(*host));
    }

    /// Ends the bond to a host. Returns whether there was one.
    pub(super) fn end(&mut self, host: IpAddr) -> bool {
        self.bonds.remove(&host).is_some()
    }

    /// Status of each host with a bond, and of each known host without one.
    pub(super) fn list(&self, known: &[(IpAddr, HostStatus<PublicKey>, Option<String>)]) -> Vec<(IpAddr, ServerStatus<'_>)> {
        let mut all: BTreeMap<IpAddr, ServerStatus<'_>> = BTreeMap::new();
        for (host, host_status, unused) in known {
            let status = match host_status {
                HostStatus::KeyMismatch(_) => ServerStatus::KeyMismatch,
                _ => ServerStatus::Idle(unused.clone()),
            };
            all.insert(*host, status);
        }
        for (host, server) in &self.bonds {
            let status = all.entry(*host).or_insert(ServerStatus::Bonded(&server.client));
            if !matches!(status, ServerStatus::KeyMismatch) {
                *status = ServerStatus::Bonded(&server.client);
            }
        }
        all.into_iter().collect()
    }
}

/// Status of a host that runs Braid.
pub(super) enum ServerStatus<'a> {
    /// It has a bond.
    Bonded(&'a Client),
    /// It has no bond; the reason if none is possible.
    Idle(Option<String>),
    /// It shows a different key than before.
    KeyMismatch,
}

fn begin(host: IpAddr, key: PublicKey, links: &[ClientLink], tunnels: &Tunnels, changes: &mpsc::UnboundedSender<Change>) -> Option<Server> {
    let addresses = vec![std::net::SocketAddr::new(host, PORT).into()];
    // No name and no key: a server does not need to identify its clients.
    let peer = Peer { addresses, key: Some(key), token: None, name: String::new() };
    let client = Client::start(peer, None, None).map_err(|error| tracing::warn!(%host, "cannot start a bond to a server: {error}")).ok()?;
    client.set_links(links.to_vec());
    super::follow_paths(&client, changes);
    tracing::info!(%host, key = key.short(), "starting a bond to a server");
    let orders = super::moves::serve(Recipient::Host(host), client.clone(), Some(tunnels.clone()), changes.clone());
    let (mut state, changes) = (client.state(), changes.clone());
    tokio::spawn(async move {
        let mut reported = None;
        while state.changed().await.is_ok() {
            let event = match &*state.borrow_and_update() {
                State::Connecting => continue,
                State::Up => ServerEvent::Reached,
                State::Unreachable(_) | State::Refused(_) => ServerEvent::Lost,
                State::KeyMismatch => ServerEvent::KeyMismatch,
            };
            if reported != Some(event) {
                reported = Some(event);
                let _ = changes.send(Change::Server { host, event });
            }
        }
    });
    Some(Server { orders, moves: false, moves_datagrams: false, client, key, used: Instant::now() })
}

/// Asks a host in the background whether it runs Braid. The answer arrives as a [`Change`].
pub(super) fn question(question: Question, link: ClientLink, changes: mpsc::UnboundedSender<Change>) {
    tokio::spawn(async move {
        let to = std::net::SocketAddr::new(question.host, PORT);
        let answer = match ask(to, &link, question.expect, None).await {
            Ok(HostAnswer::Runs(key)) => DetectionAnswer::Runs(key),
            Ok(HostAnswer::KeyMismatch) => DetectionAnswer::KeyMismatch,
            Ok(HostAnswer::Silent) => DetectionAnswer::Silent,
            Ok(HostAnswer::Unfinished) => DetectionAnswer::Unfinished,
            Ok(HostAnswer::Refused(reason)) => {
                tracing::debug!(host = %question.host, reason, "the host answers, but does not serve unknown clients");
                DetectionAnswer::Silent
            }
            Err(error) => {
                tracing::debug!(host = %question.host, %error, "cannot ask a host whether it runs Braid");
                DetectionAnswer::Silent
            }
        };
        let _ = changes.send(Change::Answer { host: question.host, link: question.link.slot, answer });
    });
}
