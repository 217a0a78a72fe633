//! Client side: maintains one bond to one relay over the available links.
//!
//! Each link has one socket per address family in which it can reach the relay, and one path on each socket. The client dials a path until it is
//! answered. The bond is up as soon as one path is. A path whose link goes down and comes back continues.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use braid_bond::dialler::{Dialler, Due, Loss, MAX_PAUSE, Route};
use braid_bond::host::{ConnectionId, Host, refusals};
use braid_bond::{Bond, BondId, FlowError, Limits, Open, PathId, PathState, PathUpdate, PathView, SchedulingPlan, Secret};
use braid_model::address::Address;
use braid_model::key::PublicKey;
use braid_model::{Family, PerFamily};
use braid_peer::keys::KeyPair;
use braid_peer::tls::{self, Expect};
use noq_proto::crypto::rustls::QuicClientConfig;
use tokio::sync::{broadcast, mpsc, watch};

use crate::found::PeerAddresses;
use crate::host_driver::BondFlow;
use crate::host_driver::{HostDriver, Notice};
use crate::relay::{RelayError, random};
use crate::socket::{Binding, UdpLink};

/// The peer of a bond.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Addresses at which the peer may be reached.
    pub addresses: Vec<Address>,
    /// Public key; without one the client accepts the first key presented.
    pub key: Option<PublicKey>,
    /// Token of an invitation, until the relay has registered this client.
    pub token: Option<[u8; 16]>,
    /// Name that the client asks for.
    pub name: String,
}

/// The properties of a link that matter to bonds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientLink {
    /// Number of the link in the bond, 0 to 63.
    pub number: u8,
    /// Network interface of the link.
    pub device: Option<String>,
    /// Local IPv4 address; `None` if the link has no IPv4 route.
    pub v4: Option<IpAddr>,
    /// Local IPv6 address; `None` if the link has no IPv6 route.
    pub v6: Option<IpAddr>,
    /// Whether to use the link only while no other path is good.
    pub backup: bool,
    /// Address families in which link detection found the link dead. Existing paths are kept. When a family stops being dead, a missing path is
    /// dialled at once.
    pub dead: PerFamily<bool>,
}

/// A change of a path's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathChange {
    /// Number of the link in the bond.
    pub link: u8,
    /// Address family of the path.
    pub family: Family,
    /// New state.
    pub state: PathState,
}

/// State of the connection to the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// No path has been established yet.
    Connecting,
    /// At least one path delivers.
    Up,
    /// No path is established or delivers; with the reason of the last failure.
    Unreachable(String),
    /// The peer refused this client; with its reason.
    Refused(String),
    /// The host at the peer's address presented a key other than the peer's. The client sends it nothing.
    KeyMismatch,
}

/// Scheduling plans of this end and of the peer.
type Plans = (SchedulingPlan, SchedulingPlan);

/// Capacity of the broadcast channel of path changes.
const PATH_CHANGES: usize = 64;
/// An acknowledgement should arrive within four round trips, clamped to these bounds.
const MIN_ACK_WAIT: Duration = Duration::from_millis(500);
const MAX_ACK_WAIT: Duration = Duration::from_secs(3);

/// Handle to a bond with a peer. Clones share it.
#[derive(Clone)]
pub struct Client {
    driver: HostDriver,
    bond: Arc<Mutex<BondId>>,
    plans: Arc<Mutex<Plans>>,
    links: watch::Sender<Vec<ClientLink>>,
    addresses: watch::Sender<Vec<Address>>,
    state: watch::Receiver<State>,
    paths: broadcast::Sender<PathChange>,
}

impl Client {
    /// Starts a bond with `peer`. Set the links with [`Self::set_links`]. Must be called inside a tokio runtime. `mark` excludes the bond's own
    /// packets from steering.
    pub fn start(peer: Peer, keys: Option<&KeyPair>, mark: Option<u32>) -> Result<Self, RelayError> {
        let expect = peer.key.map_or(Expect::Any, Expect::Pinned);
        let tls = tls::client(keys, expect)?;
        let (driver, notices) = HostDriver::start(Host::client(random()?, Instant::now()));
        let (links, links_seen) = watch::channel(Vec::new());
        let (addresses, addresses_seen) = watch::channel(peer.addresses.clone());
        let (state_sender, state) = watch::channel(State::Connecting);
        let path_changes = broadcast::Sender::new(PATH_CHANGES);
        let bond = Arc::new(Mutex::new(BondId(random()?)));
        let plans = Arc::new(Mutex::new(Plans::default()));
        let task = ClientTask {
            driver: driver.clone(),
            bond: bond.clone(),
            plans: plans.clone(),
            found: PeerAddresses::new(&peer.addresses),
            peer,
            tls,
            limits: if keys.is_some() { Limits::default() } else { Limits::ANONYMOUS },
            mark,
            links: Vec::new(),
            dialler: Dialler::default(),
            state: state_sender,
            changes: path_changes.clone(),
        };
        task.begin()?;
        tokio::spawn(task.run(links_seen, addresses_seen, notices));
        Ok(Self { driver, bond, plans, links, addresses, state, paths: path_changes })
    }

    /// Sets the current links.
    pub fn set_links(&self, links: Vec<ClientLink>) {
        self.links.send_if_modified(|old| {
            let changed = *old != links;
            *old = links;
            changed
        });
    }

    /// Sets how this end and the peer distribute what they send over paths, in this bond and in later ones.
    pub fn set_plans(&self, own: SchedulingPlan, peers: SchedulingPlan) {
        let before = std::mem::replace(&mut *self.plans.lock().unwrap_or_else(PoisonError::into_inner), (own, peers));
        if before != (own, peers) {
            let id = self.bond();
            self.driver.with(|host, _| host.bond(id).map(|bond| bond.set_plans(own, peers)));
        }
    }

    /// Whether the peer supports plans. `false` until a path is up.
    pub fn obeys_plan(&self) -> bool {
        let id = self.bond();
        self.driver.with(|host, _| host.bonds().any(|(of, bond)| of == id && bond.obeys()))
    }

    /// Sets the peer's addresses. New paths are dialled there; existing paths continue.
    pub fn set_addresses(&self, addresses: Vec<Address>) {
        self.addresses.send_replace(addresses);
    }

    /// The current state, and its changes.
    pub fn state(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Whether at least one path delivers.
    pub fn is_up(&self) -> bool {
        *self.state.borrow() == State::Up
    }

    /// Whether a current connection of the bond has received anything from the peer. While the state is [`State::Connecting`], this distinguishes a
    /// slow handshake from an absent peer.
    pub fn is_answered(&self) -> bool {
        let id = self.bond();
        self.driver.with(|host, _| host.has_received_any(id))
    }

    /// Opens a flow.
    pub fn open(&self, open: Open) -> Result<BondFlow, FlowError> {
        self.driver.open(self.bond(), open)
    }

    /// Subscribes to changes of paths. The channel closes with the last handle of this client. A slow receiver misses the oldest changes.
    pub fn path_changes(&self) -> broadcast::Receiver<PathChange> {
        self.paths.subscribe()
    }

    /// The current paths.
    pub fn paths(&self) -> Vec<(PathId, PathView)> {
        let id = self.bond();
        self.driver.with(|host, _| host.bonds().find(|(of, _)| *of == id).map(|(_, bond)| bond.paths().collect())).unwrap_or_default()
    }

    /// Address of the other end of a path.
    pub fn remote(&self, path: PathId) -> Option<IpAddr> {
        self.with_bond(|host, bond| host.remote(bond, path))
    }

    /// Completes when an acknowledgement is overdue and nothing was received from the peer within the time that one should take, for example because
    /// its host is down. Never completes if the peer acknowledges what it is sent now. The bond itself waits longer before it gives up its last path
    /// than a program should wait that could use a direct connection instead.
    pub async fn wait_for_silence(&self) {
        loop {
            let paths = self.paths();
            let heard =
                |paths: &[(PathId, PathView)]| paths.iter().map(|(_, path)| path.delivered.get() + path.received.get()).sum::<u64>();
            let good = |(_, path): &&(PathId, PathView)| path.state == PathState::Good;
            let round_trip = paths.iter().filter(good).map(|(_, path)| path.srtt).min().unwrap_or_default();
            tokio::time::sleep((round_trip * 4).clamp(MIN_ACK_WAIT, MAX_ACK_WAIT)).await;
            // After this process was suspended, process received packets first.
            tokio::task::yield_now().await;
            let now = self.paths();
            if now.iter().filter(good).all(|(_, path)| path.in_flight.get() == 0) {
                return std::future::pending().await;
            }
            if heard(&now) == heard(&paths) {
                return;
            }
        }
    }

    /// Number of flows, including finished flows whose last bytes are not acknowledged yet.
    pub fn flows(&self) -> usize {
        let id = self.bond();
        self.driver.with(|host, _| host.bond(id).map_or(0, |bond| bond.flows()))
    }

    /// Ends the bond and closes it at the peer. Data in flight is lost, and no new flows can be opened.
    pub fn end(&self) {
        let id = std::mem::replace(&mut *self.bond.lock().unwrap_or_else(PoisonError::into_inner), BondId([0; 16]));
        self.driver.with(|host, now| host.end(now, id, "the client closed the bond"));
    }

    /// Looks at the host and the current bond.
    pub(crate) fn with_bond<T>(&self, look: impl FnOnce(&Host, BondId) -> T) -> T {
        let id = self.bond();
        self.driver.with(|host, _| look(host, id))
    }

    fn bond(&self) -> BondId {
        *self.bond.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The task that maintains the paths.
struct ClientTask {
    driver: HostDriver,
    bond: Arc<Mutex<BondId>>,
    /// Plans of this bond and of later ones.
    plans: Arc<Mutex<Plans>>,
    peer: Peer,
    tls: Arc<QuicClientConfig>,
    limits: Limits,
    mark: Option<u32>,
    links: Vec<ClientLink>,
    found: PeerAddresses,
    dialler: Dialler<ConnectionId>,
    state: watch::Sender<State>,
    changes: broadcast::Sender<PathChange>,
}

impl ClientTask {
    fn begin(&self) -> Result<(), RelayError> {
        let (id, secret) = (BondId(random()?), Secret(random()?));
        *self.bond.lock().unwrap_or_else(PoisonError::into_inner) = id;
        let (own, peers) = *self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        self.driver.with(|host, now| {
            host.begin(now, id, secret, self.limits);
            if let Some(bond) = host.bond(id) {
                bond.set_plans(own, peers);
            }
        });
        Ok(())
    }

    fn id(&self) -> BondId {
        *self.bond.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(
        mut self,
        mut links: watch::Receiver<Vec<ClientLink>>,
        mut addresses: watch::Receiver<Vec<Address>>,
        mut notices: mpsc::UnboundedReceiver<Notice>,
    ) {
        loop {
            let due = self.dialler.poll_timeout().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            tokio::select! {
                changed = links.changed() => {
                    if changed.is_err() {
                        // The last handle was dropped, so the bond ends.
                        let id = self.id();
                        self.driver.with(|host, now| host.end(now, id, "the client closed the bond"));
                        return self.driver.flush_closes().await;
                    }
                    let now = links.borrow_and_update().clone();
                    self.on_links(now);
                }
                // If the sender is gone, so are all handles; the `links` branch handles that.
                Ok(()) = addresses.changed() => {
                    let now = addresses.borrow_and_update().clone();
                    self.on_addresses(now);
                }
                notice = notices.recv() => match notice {
                    Some(notice) => self.on_notice(notice),
                    None => return,
                },
                changed = self.found.changed() => if changed {
                    self.dialler.on_found(Instant::now());
                },
                () = tokio::time::sleep_until(due.into()) => self.on_due(),
            }
        }
    }

    fn on_links(&mut self, links: Vec<ClientLink>) {
        let old = std::mem::replace(&mut self.links, links);
        for ipv6 in [false, true] {
            let address = |link: &ClientLink| if ipv6 { link.v6 } else { link.v4 };
            for gone in old.iter().filter(|link| address(link).is_some()) {
                let now = self.links.iter().find(|link| link.number == gone.number);
                if now.and_then(address).is_none() {
                    self.send_update(gone.number, ipv6, PathUpdate::Down);
                } else if now.and_then(address) != address(gone) {
                    // The address changed: QUIC migrates the path to the new socket.
                    self.open_socket(gone.number, ipv6);
                }
            }
            for link in self.links.clone().iter().filter(|link| address(link).is_some()) {
                let before = old.iter().find(|before| before.number == link.number);
                if before.and_then(address).is_none() {
                    self.open_socket(link.number, ipv6);
                    let update = if link.backup { PathUpdate::Backup } else { PathUpdate::Up };
                    self.dialler.on_link(Instant::now(), (link.number, family(ipv6)));
                    self.send_update(link.number, ipv6, update);
                    continue;
                }
                if before.is_some_and(|before| before.backup != link.backup) {
                    self.send_update(link.number, ipv6, if link.backup { PathUpdate::Backup } else { PathUpdate::Up });
                }
                let dead = |link: &ClientLink| *link.dead.get(family(ipv6));
                if before.is_some_and(dead) && !dead(link) {
                    self.dialler.on_link(Instant::now(), (link.number, family(ipv6)));
                }
            }
        }
    }

    fn send_update(&self, link: u8, ipv6: bool, update: PathUpdate) {
        let Some(path) = self.dialler.joined_path((link, family(ipv6))) else { return };
        let id = self.id();
        self.driver.with(|host, now| {
            let time = host.time(now);
            if let Some(bond) = host.bond(id) {
                bond.set_link(time, path, update);
            }
        });
    }

    fn open_socket(&self, number: u8, ipv6: bool) {
        let Some(link) = self.links.iter().find(|link| link.number == number) else { return };
        let address = if ipv6 { link.v6 } else { link.v4 }.map(|ip| SocketAddr::new(ip, 0));
        match UdpLink::bind(ipv6, &Binding { address, device: link.device.clone(), mark: self.mark }) {
            Ok(socket) => {
                self.driver.set_socket(number, Some(socket), ipv6);
                if let Some(connection) = self.dialler.connection((number, family(ipv6))) {
                    self.driver.with(|host, now| host.change_address(now, connection));
                }
            }
            Err(error) => tracing::warn!(link = number, device = link.device, %error, "cannot open a socket for a path over this link"),
        }
    }

    /// The peer's addresses changed. An established path keeps its address; the others start with the first.
    fn on_addresses(&mut self, addresses: Vec<Address>) {
        self.peer.addresses = addresses;
        let old = std::mem::replace(&mut self.found, PeerAddresses::new(&self.peer.addresses));
        let place = |family: Family, before: usize| {
            let ipv6 = family == Family::V6;
            self.found.place(ipv6, old.address(ipv6, before)?)
        };
        self.dialler.on_addresses(place);
        self.found.resolve();
    }

    fn on_due(&mut self) {
        for route @ (link, family) in self.dialler.due(Instant::now()) {
            let (now, heard) = (Instant::now(), |connection| self.driver.with(|host, _| host.has_received(connection)));
            let Due::Dial(given_up) = self.dialler.on_due(now, route, heard) else { continue };
            if let Some(connection) = given_up {
                self.driver.with(|host, now| host.close(now, connection, "no answer over UDP: the relay is down, or UDP to it is blocked"));
            }
            let address = |of: &ClientLink| if family == Family::V6 { of.v6 } else { of.v4 };
            if self.links.iter().any(|of| of.number == link && address(of).is_some()) {
                self.dial(route);
            }
        }
    }

    fn dial(&mut self, route: Route) {
        let (link, family) = route;
        let backup = self.links.iter().any(|of| of.number == link && of.backup);
        let (place, failed_before) = self.dialler.address(route);
        let Some(remote) = self.found.address(family == Family::V6, place) else {
            self.dialler.on_dial_failed(Instant::now(), route, false);
            self.found.resolve();
            return;
        };
        if failed_before {
            // The peer's address may have changed.
            self.found.resolve();
        }
        let path = self.dialler.next_path();
        let (id, tls, name, token) = (self.id(), self.tls.clone(), self.peer.name.clone(), self.peer.token);
        let dialled = self.driver.with(|host, now| host.dial(now, id, (path, link, backup), remote, tls, tls::SERVER_NAME, (token, name)));
        match dialled {
            Ok(connection) => self.dialler.on_dialled(Instant::now(), route, connection, path),
            Err(error) => {
                tracing::warn!(link, %error, "cannot dial a path");
                self.dialler.on_dial_failed(Instant::now(), route, true);
            }
        }
    }

    fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Joined(connection, ..) => {
                self.dialler.on_joined(connection);
                // The relay has registered this client now.
                self.peer.token = None;
                self.update_state("");
            }
            Notice::Lost { connection, reason, refused, forgotten, key_mismatch } => {
                let loss = match refused {
                    Some(refusals::FORGOTTEN) => Loss::UnknownBond,
                    Some(_) => Loss::Refused,
                    None if key_mismatch => Loss::Refused,
                    None if forgotten => Loss::Closed,
                    None => Loss::TimedOut,
                };
                let joined = self.dialler.on_lost(Instant::now(), connection, loss);
                if loss == Loss::UnknownBond {
                    // Otherwise the connection belongs to a previous bond.
                    if let Some(joined) = joined {
                        self.state.send_replace(if joined { State::Unreachable(reason) } else { State::Connecting });
                        self.replace_bond("the peer no longer has this bond");
                        self.dialler.restart_unknown_bond(Instant::now(), joined);
                    }
                } else if refused.is_some_and(|code| code != refusals::BUSY) {
                    self.state.send_replace(State::Refused(reason));
                    self.replace_bond("the peer refused this client");
                    self.dialler.restart(Instant::now(), MAX_PAUSE);
                } else if key_mismatch && *self.state.borrow() != State::Up {
                    self.state.send_replace(State::KeyMismatch);
                } else {
                    self.update_state(&reason);
                }
            }
            Notice::Ended(bond, reason) => {
                tracing::info!(%bond, reason, "a bond has ended");
                // The bond ended at this end: nothing was received for too long, or the peer violated the protocol.
                if bond == self.id() {
                    self.state.send_replace(State::Unreachable(reason));
                    self.replace_bond("the bond has ended");
                    self.dialler.restart_ended(Instant::now());
                }
            }
            Notice::Path(_, path, state) => {
                tracing::info!(%path, ?state, "the state of a path changed");
                if let Some((link, family)) = self.dialler.route_of(path) {
                    // There may be no receiver.
                    let _ = self.changes.send(PathChange { link, family, state });
                }
                self.update_state("no path delivers");
            }
            Notice::Hello(..) | Notice::Incoming(..) | Notice::Closed(..) => {}
        }
    }
}

impl ClientTask {
    /// Updates the state: up as long as a path delivers.
    fn update_state(&self, reason: &str) {
        let id = self.id();
        let good = |bond: &Bond| bond.paths().any(|(_, path)| path.state == PathState::Good);
        let up = self.driver.with(|host, _| host.bonds().any(|(of, bond)| of == id && good(bond)));
        let next = if up { State::Up } else { State::Unreachable(reason.to_owned()) };
        self.state.send_if_modified(|state| {
            let changed = if up { *state != State::Up } else { *state == State::Up || *state == State::Connecting };
            if changed {
                *state = next;
            }
            changed
        });
    }

    /// Replaces a lost bond, whose flows are lost too, by a new one.
    fn replace_bond(&mut self, reason: &str) {
        let old = self.id();
        self.driver.with(|host, now| host.end(now, old, reason));
        if let Err(error) = self.begin() {
            tracing::error!(%error, "cannot create a new bond");
        }
    }
}

fn family(ipv6: bool) -> Family {
    if ipv6 { Family::V6 } else { Family::V4 }
}

/// Answer of a host to the question whether it runs Braid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostAnswer {
    /// It runs Braid, serves anyone, and proved that it owns this key.
    Runs(PublicKey),
    /// It sent nothing.
    Silent,
    /// It presented a key other than the expected one.
    KeyMismatch,
    /// It runs another service, or serves invited clients only; with the reason.
    Refused(String),
    /// It began to answer, or was busy. A later attempt may succeed.
    Unfinished,
}

/// Time to wait for an answer to the first datagram. QUIC would repeat the datagram after three times this, so it sends only one.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);
/// Additional time for a host that has begun to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

/// Asks a host whether it runs Braid. Sends a single datagram if the host does not answer, and presents no key and no name. `expect` is the host's
/// pinned key.
pub async fn ask(remote: SocketAddr, link: &ClientLink, expect: Option<PublicKey>, mark: Option<u32>) -> Result<HostAnswer, RelayError> {
    let (ipv6, number) = (remote.is_ipv6(), link.number);
    let address = if ipv6 { link.v6 } else { link.v4 }.map(|ip| SocketAddr::new(ip, 0));
    let binding = Binding { address, device: link.device.clone(), mark };
    let tls = tls::client(None, expect.map_or(Expect::Any, Expect::Pinned))?;
    let (driver, mut notices) = HostDriver::start(Host::client(random()?, Instant::now()));
    let (id, secret) = (BondId(random()?), Secret(random()?));
    let socket = UdpLink::bind(ipv6, &binding).map_err(|error| RelayError::Socket(link.device.clone().unwrap_or_default(), error))?;
    driver.set_socket(number, Some(socket), ipv6);
    let dialled = driver.with(|host, now| {
        host.set_first_rtt(ASK_TIMEOUT);
        host.begin(now, id, secret, Limits::ANONYMOUS);
        host.dial(now, id, (PathId(0), number, false), remote, tls, tls::SERVER_NAME, (None, String::new()))
    });
    let connection = match dialled {
        Ok(connection) => connection,
        Err(error) => return Ok(HostAnswer::Refused(error.to_string())),
    };
    let answer = match tokio::time::timeout(ASK_TIMEOUT, answer_to(&driver, connection, &mut notices)).await {
        Ok(answer) => answer,
        Err(_) if !driver.with(|host, _| host.has_received(connection)) => HostAnswer::Silent,
        Err(_) => {
            let rest = tokio::time::timeout(ANSWER_TIMEOUT, answer_to(&driver, connection, &mut notices)).await;
            rest.unwrap_or(HostAnswer::Unfinished)
        }
    };
    if answer == HostAnswer::Silent {
        // Without a socket, no close packet is sent to a host that does not answer.
        driver.set_socket(number, None, ipv6);
    }
    driver.with(|host, now| host.end(now, id, "the question is answered"));
    if answer != HostAnswer::Silent {
        tokio::spawn(async move { driver.flush_closes().await });
    }
    Ok(answer)
}

async fn answer_to(driver: &HostDriver, connection: ConnectionId, notices: &mut mpsc::UnboundedReceiver<Notice>) -> HostAnswer {
    loop {
        match notices.recv().await {
            Some(Notice::Joined(..)) => {
                let key = driver.with(|host, _| host.connection(connection).and_then(tls::peer_key));
                return key.map_or_else(|| HostAnswer::Refused("it presented no key".to_owned()), HostAnswer::Runs);
            }
            Some(Notice::Lost { key_mismatch: true, .. }) => return HostAnswer::KeyMismatch,
            Some(Notice::Lost { refused: Some(refusals::BUSY), .. }) => return HostAnswer::Unfinished,
            Some(Notice::Lost { reason, .. }) => return HostAnswer::Refused(reason),
            Some(_) => {}
            None => return HostAnswer::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_bond::{FlowKind, FlowPolicy, Target};

    /// Timeout for any expected event on a busy machine.
    const TIMEOUT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn regression_a_bond_that_times_out_resets_its_flows_and_is_replaced() {
        let peer = Peer { addresses: Vec::new(), key: None, token: None, name: String::new() };
        let client = Client::start(peer, None, None).unwrap();
        let (id, mut state) = (client.bond(), client.state());
        let open = || Open { kind: FlowKind::Stream, target: Target::Name("server".into(), 80), policy: FlowPolicy::default() };
        let flow = client.open(open()).unwrap();
        client.driver.with(|host, now| host.end(now, id, "nothing was heard"));
        assert_eq!(flow.opened().await.unwrap_err().0, libc::ECONNRESET as u64);
        let told = tokio::time::timeout(TIMEOUT, state.wait_for(|state| *state == State::Unreachable("nothing was heard".into())));
        told.await.expect("the state did not change").unwrap();
        let begun = async {
            while client.bond() == id || client.open(open()).is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, begun).await.expect("no new bond was created");
        client.end();
        assert!(client.open(open()).is_err());
    }
}
