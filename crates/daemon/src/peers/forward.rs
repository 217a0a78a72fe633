//! Forwards redirected flows over a bond to a server or a relay. If no peer takes a flow, the daemon connects to the destination over one link.
//!
//! This choice is made once, when the flow starts. A TCP flow that a peer opened is reset when its bond ends: the destination's connection is the peer's,
//! so the daemon cannot continue it. A UDP exchange restarts with its next datagram.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use braid_bond::{FlowKind, FlowPolicy, Open, Target, codes};
use braid_control::core::{BondPolicy, Ended, Exit, ServerEvent};
use braid_control::steering::RedirectedFlow;
use braid_decide::steer::Prefixes;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Family, PerFamily, Traffic};
use braid_platform::linux::bpf::redirect::{ExchangeKey, Redirect, Redirected};
use braid_platform::linux::sys::bpf::now;
use braid_transport::client::{Client, State};
use braid_transport::{BondFlow, DirectReason, Opening, UdpExchange, splice, splice_connections};
use bytes::Bytes;
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::sync::{Notify, mpsc, watch};

use super::{BondedFlow, Change, Cost, Flows, Peers};

/// Time to wait for a lost bond to come back before its UDP exchanges restart.
const BOND_RETURN_TIMEOUT: Duration = Duration::from_secs(1);
/// Idle time after which a direct UDP exchange ends.
const IDLE_TIMEOUT: Duration = Duration::from_secs(150);
/// Delay before an exchange restarts that got no answer.
const RESTART_AFTER: Duration = Duration::from_secs(1);

/// The forwarded UDP exchanges.
#[derive(Clone, Default)]
pub(crate) struct Exchanges(Arc<Mutex<ExchangeTable>>);

#[derive(Default)]
struct ExchangeTable {
    /// Forwarders with their numbers. The number distinguishes a restarted exchange from the one that ended.
    forwarders: BTreeMap<ExchangeKey, (u64, Arc<Forwarder>)>,
    /// Exchanges of clients that have a forwarder, are being opened, or wait for their restart.
    open: BTreeSet<ExchangeKey>,
    /// For how long each exchange of a client has been idle.
    idle: BTreeMap<ExchangeKey, Duration>,
    last: u64,
}

/// Forwarder of one exchange.
struct Forwarder {
    by: UdpExchange,
    /// Whether the program has sent a datagram since the last check.
    sent: AtomicBool,
    /// Notified when sending has failed.
    broken: Notify,
}

impl Forwarder {
    fn new(by: UdpExchange) -> Arc<Self> {
        Arc::new(Self { by, sent: AtomicBool::new(false), broken: Notify::new() })
    }
}

impl Exchanges {
    /// Sends a datagram of a known exchange; `false` if the exchange is unknown.
    pub(crate) fn send(&self, exchange: &ExchangeKey, payload: Bytes) -> bool {
        let Some(forwarder) = self.lock().forwarders.get(exchange).map(|(_, forwarder)| forwarder.clone()) else { return false };
        match forwarder.by.send(payload) {
            Ok(()) => forwarder.sent.store(true, Ordering::Relaxed),
            Err(_) => forwarder.broken.notify_one(),
        }
        true
    }

    /// Removes an exchange whose program's socket is gone.
    pub(crate) fn forget(&self, exchange: &ExchangeKey) {
        let mut table = self.lock();
        table.open.remove(exchange);
        let gone = table.forwarders.remove(exchange);
        drop(table);
        if let Some((_, forwarder)) = gone
            && let UdpExchange::Bonded(flow) = &forwarder.by
        {
            flow.reset(0);
        }
    }

    /// Begins an exchange of a client. `false` if it has begun already: until it has a forwarder, its datagrams are lost.
    fn begin(&self, exchange: &ExchangeKey) -> bool {
        exchange.client().is_none() || self.lock().open.insert(*exchange)
    }

    /// Lets the next datagram of an exchange begin it anew.
    fn finish(&self, exchange: &ExchangeKey) {
        self.lock().open.remove(exchange);
    }

    /// Removes the exchanges of the gateway's clients that were idle for too long: no socket of theirs shows their end. Call it every `interval`.
    pub(crate) fn forget_idle_clients(&self, interval: Duration) {
        let idle: Vec<ExchangeKey> = {
            let mut table = self.lock();
            let ExchangeTable { forwarders, idle, .. } = &mut *table;
            idle.retain(|exchange, _| forwarders.contains_key(exchange));
            for (exchange, (_, forwarder)) in forwarders.iter().filter(|(exchange, _)| exchange.client().is_some()) {
                let since = idle.entry(*exchange).or_default();
                // A direct exchange ends by itself, and uses this flag for it.
                let used = matches!(forwarder.by, UdpExchange::Direct(_)) || forwarder.sent.swap(false, Ordering::Relaxed);
                *since = if used { Duration::ZERO } else { *since + interval };
            }
            idle.iter().filter(|(_, since)| **since >= IDLE_TIMEOUT).map(|(exchange, _)| *exchange).collect()
        };
        idle.iter().for_each(|exchange| self.forget(exchange));
    }

    /// Sets the forwarder of an exchange; returns the forwarder's number.
    fn insert(&self, exchange: ExchangeKey, forwarder: Arc<Forwarder>) -> u64 {
        let mut table = self.lock();
        table.last += 1;
        let number = table.last;
        table.forwarders.insert(exchange, (number, forwarder));
        number
    }

    /// Whether an exchange still has the forwarder of this number.
    fn has(&self, exchange: &ExchangeKey, number: u64) -> bool {
        self.lock().forwarders.get(exchange).is_some_and(|(of, _)| *of == number)
    }

    /// Removes a forwarder that has ended; `true` if the exchange still had it.
    fn end(&self, exchange: &ExchangeKey, number: u64) -> bool {
        let had = self.has(exchange, number);
        if had {
            self.forget(exchange);
            // It may restart, after a pause.
            self.begin(exchange);
        }
        had
    }

    fn lock(&self) -> MutexGuard<'_, ExchangeTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A flow that was opened over a bond.
struct Opened {
    /// Id in the list of flows.
    id: u64,
    flow: BondFlow,
    /// Must be dropped before the flow ends: a bond stays open as long as anyone holds its client.
    client: Client,
    /// Peer at the other end, with the channel for the outcome.
    flow_peer: FlowPeer,
}

/// Peer that a flow was opened to.
enum FlowPeer {
    /// The flow's destination itself, at this port.
    Server { host: IpAddr, port: u16, changes: mpsc::UnboundedSender<Change> },
    /// A relay, by its name.
    Relay { name: String, host: IpAddr, changes: mpsc::UnboundedSender<Change> },
}

impl Opened {
    /// Waits for the bond and for the peer's answer to the flow, and reports the outcome on the peer's channel.
    async fn opening(&self) -> Opening {
        let begun = Instant::now();
        let reached = self.client.wait_until_up(|| begun + self.client.open_timeout(), |state| *state != State::Connecting).await;
        let opening = if reached {
            self.client.opening(self.flow.clone()).await
        } else {
            self.flow.reset(0);
            Opening::Direct(DirectReason::Silent)
        };
        match &self.flow_peer {
            FlowPeer::Server { .. } if !reached => self.flow_peer.report_server(ServerEvent::Lost),
            FlowPeer::Server { port, .. } => match opening {
                // The program's connect may have succeeded before this was known. Later flows then see the port as closed.
                Opening::Direct(DirectReason::Declined(codes::NOT_OPENED)) | Opening::Refused(libc::ECONNREFUSED) => {
                    self.flow_peer.report_server(ServerEvent::Closed(*port));
                }
                Opening::Direct(DirectReason::Declined(codes::NOT_ITS_OWN)) => self.flow_peer.report_server(ServerEvent::NotLocal),
                _ => {}
            },
            FlowPeer::Relay { name, host, changes } => {
                if let Opening::Direct(DirectReason::Declined(code @ (codes::NOT_OPENED | codes::BUSY | codes::QUOTA))) = opening {
                    let _ = changes.send(Change::Refused { name: name.clone(), host: *host, code });
                }
            }
        }
        opening
    }
}

impl FlowPeer {
    fn report_server(&self, event: ServerEvent) {
        if let Self::Server { host, changes, .. } = self {
            let _ = changes.send(Change::Server { host: *host, event });
        }
    }
}

/// Converts a policy to the bond's types.
pub(super) fn flow_policy(policy: &BondPolicy) -> FlowPolicy {
    let weight = (policy.weight * 100.0).clamp(1.0, f64::from(u16::MAX)) as u16;
    FlowPolicy { weight, links: policy.links, copies: policy.copies, urgent: policy.urgent }
}

impl Peers {
    /// Opens a flow to a peer that can take it, and lists it. A server that runs Braid is preferred to any relay, because a relay is a detour.
    fn open_flow(
        &mut self,
        facts: &RedirectedFlow,
        application: String,
        policy: &BondPolicy,
        kind: FlowKind,
        server: Option<PublicKey>,
    ) -> Option<Opened> {
        if policy.rule_expired {
            return None;
        }
        let host = facts.remote.ip();
        let bonded = server.and_then(|key| self.bond_with(host, key));
        let changes = self.changes.clone();
        let (client, peer, flow_peer) = match bonded {
            Some(client) => (client, host.to_string(), FlowPeer::Server { host, port: facts.remote.port(), changes }),
            None => {
                let (client, name) = self.relay(policy)?;
                (client, name.clone(), FlowPeer::Relay { name, host, changes })
            }
        };
        let bond = flow_policy(policy);
        let flow = client.open(Open { kind, target: Target::Address(facts.remote), policy: bond }).ok()?;
        let bonded = BondedFlow {
            application,
            app: facts.app.clone(),
            process: facts.process,
            user: facts.user,
            remote: facts.remote,
            peer,
            started: facts.started,
            policy: bond,
            facts: facts.clone(),
            rule: policy.rule,
            protocol: if kind == FlowKind::Stream { "tcp" } else { "udp" },
            flow: flow.clone(),
            bond_reason: None,
            counted: Default::default(),
            cost: Cost::default(),
            ruled: policy.links,
            weight: bond.weight,
            moved_before: Default::default(),
        };
        let id = self.flows.lock().unwrap_or_else(PoisonError::into_inner).insert(facts.id.0, bonded);
        Some(Opened { id, flow, client, flow_peer })
    }

    fn direct(&self, remote: SocketAddr, exit: &Exit) -> Direct {
        Direct { remote, exit: exit.clone(), steerable: self.steerable.subscribe() }
    }

    pub(super) fn bond_with(&mut self, host: IpAddr, key: PublicKey) -> Option<Client> {
        let (links, flows) = (self.client_links(), self.flows.clone());
        let client = self.servers.bond(host, key, &links, &self.changes, |host| uses(&flows, host))?;
        self.adopt_plans(&client);
        Some(client)
    }

    /// A reachable relay that may open the flow's destination, and its name.
    fn relay(&self, policy: &BondPolicy) -> Option<(Client, String)> {
        let up = |known: &&super::JoinedRelay| known.is_up() && !policy.refusing.contains(&known.stored.name);
        let known = match &policy.relay {
            Some(name) => self.relays.get(name).filter(up),
            None => self.relays.values().find(up),
        }?;
        Some((known.client.clone(), known.stored.name.clone()))
    }

    /// Forwards a UDP exchange whose first datagram is `payload`. Without a peer it goes direct. Returns the flow's id if it is bonded.
    pub(crate) fn exchange(
        &mut self,
        redirect: Arc<Redirect>,
        (exchange, facts, payload): (ExchangeKey, RedirectedFlow, Bytes),
        application: String,
        policy: &BondPolicy,
        server: Option<PublicKey>,
    ) -> Option<u64> {
        // Several datagrams of a client may have arrived before its exchange had a forwarder.
        if self.exchanges.send(&exchange, payload.clone()) || !self.exchanges.begin(&exchange) {
            return None;
        }
        let (exchanges, permit) = (self.exchanges.clone(), self.flow_limits.enter(facts.user));
        let direct = self.direct(facts.remote, &policy.exit);
        let Some(opened) = self.open_flow(&facts, application, policy, FlowKind::Messages, server) else {
            tokio::spawn(async move {
                let _permit = permit;
                exchange_directly(redirect, exchanges, exchange, direct, payload).await;
            });
            return None;
        };
        let flow = opened.flow.clone();
        let number = exchanges.insert(exchange, Forwarder::new(UdpExchange::Bonded(flow.clone())));
        flow.send(payload.clone());
        let (flows, id) = (self.flows.clone(), opened.id);
        tokio::spawn(async move {
            let _permit = permit;
            let opening = opened.opening().await;
            let mut state = opened.client.state();
            drop(opened);
            let mut received = ByteCount::ZERO;
            if matches!(opening, Opening::Bonded(_)) {
                while let Ok(message) = flow.receive().await {
                    received += ByteCount::new(message.len() as u64);
                    // Datagrams that do not fit into the program's socket buffer are lost.
                    let _ = redirect.answer(&exchange, &message);
                }
            }
            forget(&flows, id, Traffic::received(received));
            if !exchanges.end(&exchange, number) {
                return;
            }
            match opening {
                Opening::Direct(_) => exchange_directly(redirect, exchanges, exchange, direct, payload).await,
                // The bond has ended, or the peer has dropped the exchange. If the exchange went direct at once, it would stay direct, although
                // a restarted relay answers again within a moment. So wait for the bond, but briefly: datagrams sent meanwhile are lost.
                Opening::Bonded(_) => {
                    let _ = tokio::time::timeout(BOND_RETURN_TIMEOUT, state.wait_for(|state| *state == State::Up)).await.map(drop);
                    restart((&redirect, &exchanges), &exchange, received > ByteCount::ZERO).await;
                }
                Opening::Refused(_) => restart((&redirect, &exchanges), &exchange, false).await,
            }
        });
        Some(id)
    }

    /// Forwards a redirected connection to the destination itself, if that is a server with the key `server`, else to a relay. If the peer no longer
    /// answers or refuses, the daemon connects directly. Returns the flow's id if it is bonded.
    pub(crate) fn forward(
        &mut self,
        redirected: Redirected,
        application: String,
        policy: &BondPolicy,
        server: Option<PublicKey>,
    ) -> Option<u64> {
        let Redirected { stream, flow: facts } = redirected;
        let (direct, permit) = (self.direct(facts.remote, &policy.exit), self.flow_limits.enter(facts.user));
        let Some(opened) = self.open_flow(&facts, application, policy, FlowKind::Stream, server) else {
            tokio::spawn(async move {
                let _permit = permit;
                forward_directly(stream, direct).await;
            });
            return None;
        };
        let (flows, id) = (self.flows.clone(), opened.id);
        tokio::spawn(async move {
            let _permit = permit;
            let opening = opened.opening().await;
            // A held client would keep the bond open, which may have to end before this flow does.
            drop(opened);
            let mut moved = Traffic::default();
            match opening {
                Opening::Bonded(flow) => {
                    let (up, down) = splice(stream, flow).await;
                    moved = [down, up].map(ByteCount::new).into();
                }
                Opening::Refused(errno) => {
                    tracing::debug!(remote = %facts.remote, errno, "the destination refused a flow");
                    refuse(&stream);
                }
                Opening::Direct(_) => {
                    forget(&flows, id, moved);
                    forward_directly(stream, direct).await;
                }
            }
            forget(&flows, id, moved);
        });
        Some(id)
    }
}

/// Whether any flow goes to `host` itself.
pub(super) fn uses(flows: &Flows, host: IpAddr) -> bool {
    flows.lock().unwrap_or_else(PoisonError::into_inner).by_peer.contains_key(&host.to_string())
}

/// Removes an ended flow. `known` is the number of bytes it moved, as far as known: its bond may have dropped the flow before.
fn forget(flows: &Flows, id: u64, known: Traffic) {
    let mut flows = flows.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(mut bonded) = flows.remove(id) else { return };
    let more = bonded.count(known, &flows.costs);
    // `counted` is a sum over links, which may include bytes that were sent twice, so `known` is preferred.
    let by_links = |known: ByteCount, counted: ByteCount| if known > ByteCount::ZERO { known } else { counted };
    let (rx, tx) = (by_links(known.rx, bonded.counted.rx), by_links(known.tx, bonded.counted.tx));
    *flows.moved.entry(bonded.mover()).or_default() += more;
    if rx + tx > ByteCount::ZERO {
        let port = bonded.remote.port();
        let ended = Ended { app: bonded.app, port, started: bonded.started, at: now(), rx, tx };
        flows.ended.push((ended, bonded.cost, bonded.flow.moved()));
    }
}

/// A flow that no peer takes: its destination, its link, and the prefixes that may be steered.
#[derive(Clone)]
struct Direct {
    remote: SocketAddr,
    exit: Exit,
    steerable: watch::Receiver<PerFamily<Prefixes>>,
}

impl Direct {
    fn may_steer(&self) -> bool {
        let remote = self.remote.ip();
        self.steerable.borrow().get(Family::of(remote)).contains(remote)
    }

    /// Device to bind to. A flow that belongs to a tunnel by now follows the system's routes, as the program's own socket would.
    fn device(&self) -> io::Result<Option<&str>> {
        match &self.exit {
            Exit::Device(device) if self.may_steer() => Ok(Some(device)),
            Exit::Any | Exit::Device(_) => Ok(None),
            Exit::Nowhere => Err(io::ErrorKind::NetworkUnreachable.into()),
        }
    }

    async fn connect(&self) -> io::Result<(TcpStream, bool)> {
        let socket = if self.remote.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
        let device = self.device()?;
        if let Some(device) = device {
            socket.bind_device(Some(device.as_bytes()))?;
        }
        Ok((socket.connect(self.remote).await?, device.is_some()))
    }

    async fn connect_datagrams(&self) -> io::Result<(UdpSocket, bool)> {
        let any: SocketAddr = if self.remote.is_ipv6() { ([0u16; 8], 0).into() } else { ([0, 0, 0, 0], 0).into() };
        let socket = UdpSocket::bind(any).await?;
        let device = self.device()?;
        if let Some(device) = device {
            socket.bind_device(Some(device.as_bytes()))?;
        }
        socket.connect(self.remote).await?;
        Ok((socket, device.is_some()))
    }

    /// Waits until a flow that is `bound` to a link must no longer be steered, because a tunnel now covers its destination. Never returns if the flow is
    /// not bound.
    async fn belongs_to_a_tunnel(&self, bound: bool) {
        let mut steerable = self.steerable.clone();
        loop {
            steerable.mark_unchanged();
            if bound && !self.may_steer() {
                return;
            }
            if !bound || steerable.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// Forwards a connection directly. When a tunnel takes over its destination, the connection is reset, so that the program reconnects
/// through the tunnel.
async fn forward_directly(stream: TcpStream, direct: Direct) {
    match direct.connect().await {
        Ok((onward, bound)) => tokio::select! {
            () = splice_connections(stream, onward) => {}
            () = direct.belongs_to_a_tunnel(bound) => tracing::info!(remote = %direct.remote, "ended a flow that now belongs to a tunnel"),
        },
        Err(error) => {
            tracing::debug!(remote = %direct.remote, %error, "a direct connection failed");
            refuse(&stream);
        }
    }
}

/// Forwards a UDP exchange directly. Its later datagrams arrive at the daemon too, through `exchanges`.
async fn exchange_directly(redirect: Arc<Redirect>, exchanges: Exchanges, exchange: ExchangeKey, direct: Direct, payload: Bytes) {
    let (forwarder, bound) = match direct.connect_datagrams().await {
        Ok((socket, bound)) => (Forwarder::new(UdpExchange::Direct(Arc::new(socket))), bound),
        Err(error) => {
            tracing::debug!(remote = %direct.remote, %error, "cannot open a socket for a direct exchange");
            return restart((&redirect, &exchanges), &exchange, false).await;
        }
    };
    let number = exchanges.insert(exchange, forwarder.clone());
    let _ = forwarder.by.send(payload);
    let mut answered = false;
    while exchanges.has(&exchange, number) {
        let received = tokio::select! {
            received = tokio::time::timeout(IDLE_TIMEOUT, forwarder.by.receive()) => received,
            () = forwarder.broken.notified() => break,
            // The exchange restarts with its next datagram, inside the tunnel.
            () = direct.belongs_to_a_tunnel(bound) => break,
        };
        match received {
            Ok(Ok(payload)) => {
                answered = true;
                let _ = redirect.answer(&exchange, &payload);
            }
            Ok(Err(_)) => break,
            // The exchange is in use, by a program that only sends.
            Err(_) if forwarder.sent.swap(false, Ordering::Relaxed) => {}
            Err(_) => break,
        }
    }
    if exchanges.end(&exchange, number) {
        restart((&redirect, &exchanges), &exchange, answered).await;
    }
}

/// Makes the next datagram of an exchange start it anew: at once if the exchange was `answered`, else after a pause in which its datagrams are lost.
async fn restart((redirect, exchanges): (&Redirect, &Exchanges), exchange: &ExchangeKey, answered: bool) {
    if !answered {
        tokio::time::sleep(RESTART_AFTER).await;
    }
    exchanges.finish(exchange);
    redirect.renew(exchange);
}

/// Makes closing the program's socket reset the connection.
pub(super) fn refuse(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}
