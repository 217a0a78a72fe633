//! The relay: accepts paths from registered clients and opens sockets for their flows. It needs no privileges and no firewall rules, unless it forwards
//! packets ([`PacketPort`]).
//!
//! With [`Reach::Itself`] it runs on a server itself: it has no registry, serves anyone, and opens only the host's own services.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use braid_bond::host::{ConnectionId, Host, HostLimits, refusals};
use braid_bond::{Bond, BondId, FlowKind, Hello, Limits as BondLimits, Open, PathState, Target, codes};
use braid_model::address::Address;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Rate};
use braid_peer::destination::{Policy, Ports, Reason, dial_tcp, resolve};
use braid_peer::keys::KeyPair;
use braid_peer::limits::{Direction, Exceeded, Limits, Meter};
use braid_peer::registry::{Month, RegisteredClient, Registry};
use braid_peer::tls::{self, Clients};
use ipnet::IpNet;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;

mod clock;
mod control;
mod memory;
mod packets;
mod receivers;
mod registry_worker;
mod tunnels;

pub use control::{ArrivalResult, FlowToMove, MoveResult, Mover};
pub use memory::MemoryLimits;
pub use packets::PacketPort;
pub use tunnels::TunnelPort;

use clock::Clock;
use control::ControlServer;
use packets::PacketForwarder;
use registry_worker::{Applicant, RegistryEvent, RegistryWorker, Used};
use tunnels::Tunnels;

use crate::account::Account;
use crate::datagram;
use crate::host_driver::BondFlow;
use crate::host_driver::{HostDriver, Notice};
use crate::socket::{Binding, UdpLink};
use crate::sources::Sources;
use crate::splice::{code, splice_metered};

/// Who is served, and which destinations are opened for them.
pub enum Reach {
    /// Serves clients of the registry, to the Internet and to `allow`.
    Internet {
        /// Registry of clients.
        registry: Box<Registry>,
        /// Networks that the policy would otherwise refuse.
        allow: Vec<IpNet>,
        /// Addresses of the relay in addition to those of its interfaces.
        own: Vec<IpAddr>,
    },
    /// Serves anyone, to this host's own services.
    Itself {
        /// Public addresses that lead to this host with all ports, although its interfaces do not have them.
        own: Vec<IpAddr>,
        /// The ports that are opened.
        ports: Ports,
        /// Rate limit per direction for one source (an IPv4 address, or an IPv6 /64 network); `None`: no limit.
        rate: Option<Rate>,
    },
}

/// Configuration of a relay.
pub struct Options {
    /// Address to listen on.
    pub listen: SocketAddr,
    /// Key pair of the relay.
    pub keys: KeyPair,
    /// Who is served.
    pub reach: Reach,
    /// Maximum number of flows of all clients together.
    pub flows: usize,
    /// Maximum number of flows of a client without a limit of its own.
    pub client_flows: u32,
    /// Limits of the memory of bonds.
    pub memory: MemoryLimits,
    /// The way for IP packets of registered clients; `None`: clients get none.
    pub packets: Option<PacketPort>,
    /// Moves this host's running flows to other links of their clients; `None`: they stay.
    pub mover: Option<Arc<dyn Mover>>,
    /// The way for packets of moved flows inside bonds, if clients are anonymous; `None`: flows stay where what is on their way drops or translates them. Needs
    /// `mover`.
    pub tunnels: Option<TunnelPort>,
    /// Waypoints between this host and its clients: to their addresses, too, clients may move flows.
    pub waypoints: Vec<IpAddr>,
    /// Lets flows of registered clients to other hosts pass. Needs `mover`.
    pub passes: bool,
}

/// Why a relay or a client cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The listening socket cannot be opened.
    #[error("cannot listen on {}: {}; {}", .0, .1, remedy(.1))]
    Listen(SocketAddr, std::io::Error),
    /// A client's socket cannot be opened.
    #[error("cannot open a socket on {0}: {1}")]
    Socket(String, std::io::Error),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// The system provides no random numbers.
    #[error("the system provides no random numbers")]
    Random,
    /// The thread of the registry cannot be started.
    #[error("cannot start a thread for the registry: {0}; raise the limit of this user's tasks")]
    Thread(std::io::Error),
}

/// Default limit of a client's simultaneous TCP connections and UDP flows: less than half of a relay's limit.
pub const CLIENT_FLOWS: u32 = 4096;

/// Remedy for a failure to listen.
fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "another relay or program uses this port: find it with `ss -lunp` and stop it, or choose another port with --listen"
        }
        std::io::ErrorKind::AddrNotAvailable => {
            "no interface of this host has that address: omit --listen to use all addresses (behind a NAT, give the public address only to \
             `braid relay invite --address`)"
        }
        std::io::ErrorKind::PermissionDenied => "ports below 1024 need root: choose another port with --listen",
        _ => "choose another address or port with --listen",
    }
}

/// How long flows may continue after the relay was told to stop.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Idle timeout of a UDP flow (RFC 4787 requires at least two minutes).
const UDP_IDLE_TIMEOUT: Duration = Duration::from_secs(150);
/// Interval at which usage is written to the registry.
const FLUSH_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the presence of idle clients is written: less often, to spare the disk.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(60);
const ANONYMOUS_BONDS: usize = 512;
/// Flows of one anonymous source.
const ANONYMOUS_FLOWS_OF_ONE: u32 = 256;

struct Relay {
    driver: HostDriver,
    /// Owns the registry; `None` with [`Reach::Itself`].
    worker: Option<RegistryWorker>,
    policy: Policy,
    accounts: BTreeMap<PublicKey, Arc<Account>>,
    owners: BTreeMap<BondId, Owner>,
    /// With [`Reach::Itself`]: the anonymous sources, and the limits of each.
    sources: Sources,
    share: Limits,
    limit: usize,
    client_flows: u32,
    memory: MemoryLimits,
    packets: Option<PacketForwarder>,
    tunnels: Option<Tunnels>,
    control: Option<ControlServer>,
    clock: Clock,
    draining: bool,
    /// When the presence of clients was last written.
    present: Instant,
    open: Arc<()>,
}

/// Owner of a bond.
struct Owner {
    key: Option<PublicKey>,
    account: Arc<Account>,
    /// Address of its first path.
    remote: SocketAddr,
}

/// Runs a relay until `stop` completes and its flows have ended, or half a minute has passed since. Calls `ready` with the listening address.
pub async fn run(options: Options, ready: impl FnOnce(SocketAddr), stop: impl Future<Output = ()>) -> Result<(), RelayError> {
    let clients = match options.reach {
        Reach::Internet { .. } => Clients::Keyed,
        Reach::Itself { .. } => Clients::Anonymous,
    };
    let mut host = Host::server(random()?, Arc::new(options.keys.reset_key()), tls::server(&options.keys, clients)?, Instant::now());
    if clients == Clients::Anonymous {
        // A client that is served without a key must at least prove its address.
        host.set_limits(HostLimits { unvalidated: 0, bonds: ANONYMOUS_BONDS, ..HostLimits::default() });
    }
    // A stranger gets no packets, whatever the options say.
    let packets = options.packets.filter(|_| clients == Clients::Keyed).map(PacketForwarder::start);
    // In the bond of an anonymous client, packets are those of its moved flows.
    let tunnels = options.tunnels.filter(|_| clients == Clients::Anonymous && options.mover.is_some());
    let tunnels = match tunnels {
        Some(port) => Some(Tunnels::start(port, u32::from_ne_bytes(random()?))),
        None => None,
    };
    if packets.is_some() || tunnels.is_some() {
        host.offer(FlowKind::Packets);
    }
    // A stranger's flows do not pass.
    let passes = options.passes && clients == Clients::Keyed;
    if options.mover.is_some() && passes {
        host.offer_waypoint();
    } else if options.mover.is_some() {
        host.offer(FlowKind::Control);
    }
    let (driver, mut notices) = HostDriver::start(host);
    let ipv6 = options.listen.is_ipv6();
    let binding = Binding { address: Some(options.listen), ..Binding::default() };
    let socket = UdpLink::bind(ipv6, &binding).map_err(|error| RelayError::Listen(options.listen, error))?;
    let address = socket.local_addr().map_err(|error| RelayError::Listen(options.listen, error))?;
    driver.set_socket(0, Some(socket), ipv6);
    ready(address);
    let mut share = Limits { flows: Some(ANONYMOUS_FLOWS_OF_ONE), ..Limits::default() };
    let (worker, policy) = match options.reach {
        Reach::Internet { registry, allow, own } => {
            (Some(RegistryWorker::start(*registry).map_err(RelayError::Thread)?), Policy::relay(allow, own))
        }
        Reach::Itself { own, ports, rate } => {
            (share.rate_down, share.rate_up) = (rate, rate);
            tracing::info!(%ports, "serving these ports of this host to anyone");
            (None, Policy::local(Vec::new(), own, ports, address.port()))
        }
    };
    let serve = |mover| ControlServer::new(mover, driver.clone(), tunnels.clone(), options.waypoints, passes);
    let control = options.mover.map(serve).transpose()?;
    let mut relay = Relay {
        driver,
        worker,
        policy,
        accounts: BTreeMap::new(),
        owners: BTreeMap::new(),
        sources: Sources::default(),
        share,
        limit: options.flows,
        client_flows: options.client_flows,
        memory: options.memory,
        packets,
        tunnels,
        control,
        clock: Clock::start(),
        draining: false,
        present: Instant::now(),
        open: Arc::new(()),
    };
    relay.serve(&mut notices, stop).await;
    Ok(())
}

impl Relay {
    async fn serve(&mut self, notices: &mut mpsc::UnboundedReceiver<Notice>, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        let mut every_second = tokio::time::interval(Duration::from_secs(1));
        let mut flush = tokio::time::interval(FLUSH_INTERVAL);
        let mut until = None;
        loop {
            let registry_event = async {
                match &mut self.worker {
                    Some(worker) => worker.event().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = &mut stop, if !self.draining => {
                    tracing::info!(flows = self.flows(), "stopping: refusing new flows, waiting for the existing ones");
                    self.draining = true;
                    // A flow of packets has no end of its own.
                    self.packets.iter().for_each(PacketForwarder::stop);
                    until = Some(Instant::now() + DRAIN_TIMEOUT);
                }
                notice = notices.recv() => match notice {
                    Some(notice) => self.on_notice(notice),
                    None => break,
                },
                event = registry_event => self.on_registry_event(event),
                _ = every_second.tick() => {
                    if let Some(jump) = self.clock.jump() {
                        tracing::warn!("{jump}");
                    }
                    self.refresh();
                    self.guard_memory();
                }
                _ = flush.tick() => {
                    if self.worker.as_ref().is_some_and(|worker| !worker.is_writing()) {
                        self.write_usage();
                    }
                }
            }
            if until.is_some_and(|until| !self.is_busy() || Instant::now() >= until) {
                break;
            }
        }
        let bonds: Vec<BondId> = self.owners.keys().copied().collect();
        self.driver.with(|host, now| bonds.iter().for_each(|bond| host.end(now, *bond, "the relay is stopping")));
        self.write_usage();
        self.driver.flush_closes().await;
        if let Some(worker) = self.worker.take() {
            worker.end().await;
        }
    }

    fn flows(&self) -> usize {
        Arc::strong_count(&self.open) - 1
    }

    /// Whether there are flows, or finished flows whose last bytes are not acknowledged yet. Flows of packets do not count.
    fn is_busy(&self) -> bool {
        self.flows() > 0 || self.driver.with(|host, _| host.bonds().any(|(_, bond)| bond.has_ending_flows()))
    }

    fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Hello(connection, hello, remote) => self.on_hello(connection, hello, remote),
            Notice::Incoming(flow, open) => self.on_flow(flow, open),
            Notice::Ended(bond, reason) => {
                if let Some(owner) = self.owners.remove(&bond) {
                    self.sources.on_bond_ended(owner.remote);
                    tracing::info!(%bond, reason, "a bond has ended");
                }
            }
            Notice::Joined(..) | Notice::Lost { .. } | Notice::Path(..) | Notice::Closed(..) => {}
        }
    }

    fn on_hello(&mut self, connection: ConnectionId, hello: Box<Hello>, remote: SocketAddr) {
        if let Err((code, reason)) = self.try_admit(connection, hello, remote) {
            self.refuse(connection, remote, code, &reason);
        }
    }

    /// Admits a path, or asks the registry about it. Returns an error if the path must be refused.
    fn try_admit(&mut self, connection: ConnectionId, hello: Box<Hello>, remote: SocketAddr) -> Result<(), (u64, String)> {
        self.check_accepting()?;
        let Some(worker) = &self.worker else {
            let new = !self.owners.contains_key(&hello.bond);
            let fresh = || Account::new(self.share, None, &self.policy);
            let account = self.sources.take(Instant::now(), remote, new, fresh).map_err(|reason| (refusals::BUSY, reason.to_owned()))?;
            self.admit(connection, &hello, remote, None, account);
            return Ok(());
        };
        let key = self.driver.with(|host, _| host.connection(connection).and_then(tls::peer_key));
        let key = key.ok_or_else(|| (refusals::UNKNOWN, "the client presented no key".to_owned()))?;
        let asked = worker.judge(Applicant { connection, hello, remote, key });
        asked.then_some(()).ok_or_else(|| (refusals::BUSY, "the relay's registry is busy: try again later".to_owned()))
    }

    fn check_accepting(&self) -> Result<(), (u64, String)> {
        if self.draining { Err((refusals::BUSY, "the relay is stopping".to_owned())) } else { Ok(()) }
    }

    fn refuse(&self, connection: ConnectionId, remote: SocketAddr, code: u64, reason: &str) {
        tracing::info!(%remote, reason, "refused a path");
        self.driver.with(|host, now| host.refuse(now, connection, code, reason));
    }

    fn admit(&mut self, connection: ConnectionId, hello: &Hello, remote: SocketAddr, key: Option<PublicKey>, account: Arc<Account>) {
        let owner = key.as_ref().map_or(&[][..], |key| key.as_bytes());
        let theirs = |(bond, owner): &(&BondId, &Owner)| **bond != hello.bond && Arc::ptr_eq(&owner.account, &account);
        let others = self.owners.iter().filter(theirs).count();
        let limits = if key.is_some() { self.memory.part(self.limit, others) } else { BondLimits::ANONYMOUS };
        let known = self.owners.contains_key(&hello.bond);
        let admitted = self.driver.with(|host, now| {
            // The notice of the bond's end is still queued. A path admitted now would create a bond without an owner, which no account counts.
            if known && host.bond(hello.bond).is_none() {
                host.refuse(now, connection, refusals::FORGOTTEN, "this bond has just ended");
                return false;
            }
            host.admit(now, connection, hello, owner, limits)
        });
        if admitted {
            tracing::info!(bond = %hello.bond, path = hello.path, %remote, "a path has joined");
            self.owners.entry(hello.bond).or_insert_with(|| {
                self.sources.on_bond_started(remote);
                Owner { key, account, remote }
            });
        }
    }

    /// Processes an event of the registry.
    fn on_registry_event(&mut self, event: RegistryEvent) {
        match event {
            RegistryEvent::Judged(applicant, decision) => {
                let Applicant { connection, hello, remote, key } = applicant;
                match self.check_accepting().and(*decision) {
                    Ok((client, month)) => {
                        let account = self.account_of(key, &client, month);
                        self.admit(connection, &hello, remote, Some(key), account);
                    }
                    Err((code, reason)) => self.refuse(connection, remote, code, &reason),
                }
            }
            RegistryEvent::Refreshed(clients) => clients.into_iter().for_each(|(key, client)| self.on_client(key, client)),
            RegistryEvent::Written => {}
        }
    }

    fn account_of(&mut self, key: PublicKey, client: &RegisteredClient, month: Month) -> Arc<Account> {
        let limits = self.granted(client.limits);
        if let Some(account) = self.accounts.get(&key) {
            // A redeemed invitation may have changed the limits.
            let (now, _) = account.now();
            account.meter(|meter| meter.set_limits(limits, now));
            return account.clone();
        }
        let account = Arc::new(Account::new(limits, Some((client.id, month)), &self.policy));
        self.accounts.insert(key, account.clone());
        account
    }

    /// A client's limits, with defaults for those that are not set.
    fn granted(&self, limits: Limits) -> Limits {
        Limits { flows: limits.flows.or(Some(self.client_flows)), ..limits }
    }

    fn on_flow(&mut self, flow: BondFlow, open: Open) {
        let Some(Owner { account, key, .. }) = self.owners.get(&flow.bond()) else { return flow.reset(codes::BUSY) };
        if self.draining || self.flows() >= self.limit {
            return flow.answer(codes::BUSY);
        }
        match account.meter(Meter::open_flow) {
            Ok(()) => {}
            Err(Exceeded::Flows(_)) => return flow.answer(codes::BUSY),
            Err(Exceeded::Monthly(_)) => return flow.answer(codes::QUOTA),
        }
        let (account, counted) = (account.clone(), (!open.kind.is_lasting()).then(|| self.open.clone()));
        let (packets, tunnels, control) = (self.packets.clone().zip(*key), self.tunnels.clone(), self.control.clone());
        let policy = match self.worker {
            Some(_) => account.policy.clone(),
            None => account.policy.reached_at(self.driver.with(|host, _| host.local_addresses(flow.bond()))),
        };
        let named = self.worker.is_none() && matches!(open.target, Target::Name(..));
        tokio::spawn(async move {
            match open.kind {
                // Anonymous clients may not use the server's resolver.
                _ if named => flow.answer(libc::EACCES as u64),
                FlowKind::Stream => stream(flow, &open.target, &account, &policy).await,
                FlowKind::Messages => messages(flow, &open.target, &account, &policy).await,
                FlowKind::Packets => match (&packets, &tunnels) {
                    (Some((packets, key)), _) => packets.forward(&flow, *key, &account, &policy).await,
                    (None, Some(tunnels)) => tunnels.forward(&flow, &account).await,
                    (None, None) => flow.answer(codes::NOT_OPENED),
                },
                FlowKind::Control => match &control {
                    Some(control) => control.serve(flow, &account, &policy).await,
                    None => flow.answer(codes::NOT_OPENED),
                },
            }
            account.meter(Meter::close_flow);
            drop(counted);
        });
    }

    /// Applies changes of the registry to connected clients.
    fn refresh(&mut self) {
        self.sources.sweep(Instant::now());
        if let Some(worker) = &mut self.worker {
            worker.refresh(self.accounts.keys().copied().collect());
        }
    }

    /// Applies the current registry entry of a client.
    fn on_client(&self, key: PublicKey, client: Option<RegisteredClient>) {
        let Some(account) = self.accounts.get(&key) else { return };
        match client.filter(|client| client.revoked.is_none()) {
            Some(client) => {
                let (now, _) = account.now();
                account.meter(|meter| meter.set_limits(self.granted(client.limits), now));
            }
            None => {
                let theirs = self.owners.iter().filter(|(_, owner)| owner.key == Some(key)).map(|(bond, _)| *bond);
                let theirs: Vec<BondId> = theirs.collect();
                self.driver.with(|host, now| theirs.iter().for_each(|bond| host.end(now, *bond, "revoked")));
            }
        }
    }

    /// Ends bonds that hold too much memory.
    fn guard_memory(&self) {
        // Bonds with the same account belong to one client, or to one anonymous source.
        let accounts: BTreeMap<*const Account, &Account> =
            self.owners.values().map(|owner| (Arc::as_ptr(&owner.account), &*owner.account)).collect();
        let sockets: BTreeMap<BondId, ByteCount> = accounts.values().flat_map(|account| account.sockets.held()).collect();
        let bonds: Vec<_> = self.driver.with(|host, _| host.bonds().map(|(bond, state)| (bond, state.held())).collect());
        for (bond, _) in bonds.iter().filter(|(bond, _)| !self.owners.contains_key(bond)) {
            tracing::error!(%bond, "ended a bond without an owner");
            self.driver.with(|host, now| host.end(now, *bond, "the bond has no owner"));
        }
        let all = |(bond, held): (BondId, ByteCount)| {
            let owner = Arc::as_ptr(&self.owners.get(&bond)?.account);
            Some((bond, owner, held + sockets.get(&bond).copied().unwrap_or_default()))
        };
        let held: Vec<_> = bonds.into_iter().filter_map(all).collect();
        for (bond, excess) in self.memory.excess(&held) {
            tracing::warn!(%bond, "ended a bond: {}", excess.reason());
            self.driver.with(|host, now| host.end(now, bond, excess.reason()));
        }
    }

    /// Clients with a working path. A bond may outlive its client for a while, so its existence is not enough.
    fn present(&self) -> BTreeSet<PublicKey> {
        let good = |bond: &Bond| bond.paths().any(|(_, path)| path.state == PathState::Good);
        let bonds: Vec<BondId> = self.driver.with(|host, _| host.bonds().filter(|(_, bond)| good(bond)).map(|(id, _)| id).collect());
        bonds.iter().filter_map(|bond| self.owners.get(bond)?.key).collect()
    }

    /// Writes the usage of clients to the registry, and their presence at a longer interval.
    fn write_usage(&mut self) {
        let due = self.worker.is_some() && self.present.elapsed() >= PRESENCE_INTERVAL;
        let present = if due { self.present() } else { BTreeSet::new() };
        if due {
            self.present = Instant::now();
        }
        let Some(worker) = &mut self.worker else { return };
        let used = |(key, account): (&PublicKey, &Arc<Account>)| {
            let client = account.client?;
            let [down, up] = [0, 1].map(|way: usize| ByteCount::new(account.moved[way].swap(0, Ordering::Relaxed)));
            (down != ByteCount::ZERO || up != ByteCount::ZERO || present.contains(key)).then_some(Used { client, down, up })
        };
        worker.write(self.accounts.iter().filter_map(used).collect());
    }
}

async fn stream(flow: BondFlow, target: &Target, account: &Arc<Account>, policy: &Policy) {
    let dialled = match address(target) {
        Some(address) => dial_tcp(&address, policy).await.map_err(|error| error.reason),
        None => Err(Reason::NameNotFound),
    };
    match dialled {
        Ok(stream) => {
            flow.answer(0);
            splice_metered(stream, flow, account).await;
        }
        Err(reason) => flow.answer(reason.errno() as u64),
    }
}

async fn messages(flow: BondFlow, target: &Target, account: &Arc<Account>, policy: &Policy) {
    let socket = match udp(target, policy).await {
        Ok(socket) => socket,
        Err(code) => return flow.answer(code),
    };
    let _counted = account.count_socket(flow.bond(), &socket);
    flow.answer(0);
    loop {
        tokio::select! {
            message = flow.receive() => {
                let Ok(message) = message else { return };
                if !account.pass(Direction::Up, message.len()).await {
                    return;
                }
                let _ = socket.send(&message).await;
            }
            _ = socket.readable() => match datagram::try_receive(&socket) {
                Ok(message) => {
                    if !account.pass(Direction::Down, message.len()).await {
                        return;
                    }
                    flow.send(message);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                // The target's port is closed. It may open again.
                Err(error) if code(&error) == libc::ECONNREFUSED as u64 => {}
                Err(_) => return,
            },
            () = tokio::time::sleep(UDP_IDLE_TIMEOUT) => return,
        }
    }
}

async fn udp(target: &Target, policy: &Policy) -> Result<UdpSocket, u64> {
    let address = address(target).ok_or(Reason::NameNotFound.errno() as u64)?;
    let found = resolve(&address, policy).await.map_err(|error| error.reason.errno() as u64)?;
    let to = *found.first().ok_or(Reason::NameNotFound.errno() as u64)?;
    let any: SocketAddr = if to.is_ipv6() { (Ipv6Addr::UNSPECIFIED, 0).into() } else { (Ipv4Addr::UNSPECIFIED, 0).into() };
    let socket = UdpSocket::bind(any).await.map_err(|error| code(&error))?;
    socket.connect(to).await.map_err(|error| code(&error))?;
    Ok(socket)
}

fn address(target: &Target) -> Option<Address> {
    target.to_string().parse().ok()
}

/// Random bytes from the system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], RelayError> {
    use ring::rand::SecureRandom;
    let mut bytes = [0; N];
    ring::rand::SystemRandom::new().fill(&mut bytes).map_err(|_| RelayError::Random)?;
    Ok(bytes)
}
