//! The relay: takes paths from clients it knows and opens sockets for their flows. It needs no privilege and no rules.
//!
//! With [`Reach::Itself`] it is a server's own: it knows nobody, serves anyone, and opens the host's own services only.

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
mod memory;
mod registry_worker;

pub use memory::MemoryLimits;

use clock::Clock;
use registry_worker::{Applicant, RegistryEvent, RegistryWorker, Used};

use crate::account::Account;
use crate::datagram;
use crate::host_driver::BondFlow;
use crate::host_driver::{HostDriver, Notice};
use crate::socket::{Binding, UdpLink};
use crate::sources::Sources;
use crate::splice::{code, splice_metered};

/// Who is served, and what is opened for them.
pub enum Reach {
    /// Clients of the registry, to the Internet and to `allow`.
    Internet {
        /// Who the clients are.
        registry: Box<Registry>,
        /// Networks that would else be refused.
        allow: Vec<IpNet>,
        /// Addresses at which the relay answers besides those of its interfaces.
        own: Vec<IpAddr>,
    },
    /// Anyone, to this host's own services.
    Itself {
        /// Addresses under which all of this host is known outside, though its interfaces do not have them.
        own: Vec<IpAddr>,
        /// The services that are opened.
        ports: Ports,
        /// What may pass in each direction for one source (an IPv4 address, an IPv6 network of 64 bits); `None`: no limit.
        rate: Option<Rate>,
    },
}

/// How a relay is to be.
pub struct Options {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Its key.
    pub keys: KeyPair,
    /// Whom it serves.
    pub reach: Reach,
    /// Flows of all clients together, at most.
    pub flows: usize,
    /// Flows of one client that has no limit of its own, at most.
    pub client_flows: u32,
    /// What bonds may hold.
    pub memory: MemoryLimits,
}

/// Why a relay cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// Its socket cannot be had.
    #[error("cannot listen on {}: {}; {}", .0, .1, remedy(.1))]
    Listen(SocketAddr, std::io::Error),
    /// A socket of a client's.
    #[error("cannot open a socket on {0}: {1}")]
    Socket(String, std::io::Error),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// No random numbers.
    #[error("the system gives no random numbers")]
    Random,
    /// No thread for the registry.
    #[error("cannot start a thread for the registry: {0}; raise the limit of this user's tasks")]
    Thread(std::io::Error),
}

/// Connections and exchanges of datagrams that one client may have at a time unless told otherwise: less than half of what a relay takes.
pub const CLIENT_FLOWS: u32 = 4096;

/// What to do where a relay cannot listen.
fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "another relay or program is there: `ss -lunp` shows it; stop it, or name another port with --listen"
        }
        std::io::ErrorKind::AddrNotAvailable => {
            "no interface of this host has that address: leave --listen out for all of them (behind a translator, the public address goes into \
             `braid relay invite --address` only)"
        }
        std::io::ErrorKind::PermissionDenied => "ports below 1024 need root: name another with --listen",
        _ => "name another address or port with --listen",
    }
}

/// How long flows may go on after the relay was told to stop.
const DRAIN: Duration = Duration::from_secs(30);
/// A quiet UDP flow is forgotten after this (RFC 4787 asks for two minutes at least).
const UDP_IDLE: Duration = Duration::from_secs(150);
/// Usage is written down this often.
const FLUSH: Duration = Duration::from_secs(10);
/// That a client is there, though it moves nothing, only this often: a disk has better things to do.
const PRESENCE: Duration = Duration::from_secs(60);
const ANONYMOUS_BONDS: usize = 512;
/// Flows of one source.
const ANONYMOUS_FLOWS_OF_ONE: u32 = 256;

struct Relay {
    driver: HostDriver,
    /// Has the registry; `None` with [`Reach::Itself`].
    worker: Option<RegistryWorker>,
    policy: Policy,
    accounts: BTreeMap<PublicKey, Arc<Account>>,
    owners: BTreeMap<BondId, Owner>,
    /// With [`Reach::Itself`]: who uses it, and what one source may.
    sources: Sources,
    share: Limits,
    limit: usize,
    client_flows: u32,
    memory: MemoryLimits,
    clock: Clock,
    draining: bool,
    /// When it was last written down who is there.
    present: Instant,
    open: Arc<()>,
}

/// Whose a bond is.
struct Owner {
    key: Option<PublicKey>,
    account: Arc<Account>,
    /// Where its first path came from.
    remote: SocketAddr,
}

/// Runs a relay until `stop` is done and its flows have ended, or half a minute has passed. `ready` is told where it listens.
pub async fn run(options: Options, ready: impl FnOnce(SocketAddr), stop: impl Future<Output = ()>) -> Result<(), RelayError> {
    let clients = match options.reach {
        Reach::Internet { .. } => Clients::Keyed,
        Reach::Itself { .. } => Clients::Anonymous,
    };
    let mut host = Host::server(random()?, Arc::new(options.keys.reset_key()), tls::server(&options.keys, clients)?, Instant::now());
    if clients == Clients::Anonymous {
        // Whoever may be served without a key must at least be where it says.
        host.set_limits(HostLimits { unproven: 0, bonds: ANONYMOUS_BONDS, ..HostLimits::default() });
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
            tracing::info!(%ports, "anyone may reach these ports of this host");
            (None, Policy::local(Vec::new(), own, ports, address.port()))
        }
    };
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
        let mut flush = tokio::time::interval(FLUSH);
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
                    tracing::info!(flows = self.flows(), "stopping: no new flows, those that run may end");
                    self.draining = true;
                    until = Some(Instant::now() + DRAIN);
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
                        self.write_down();
                    }
                }
            }
            if until.is_some_and(|until| !self.is_busy() || Instant::now() >= until) {
                break;
            }
        }
        let bonds: Vec<BondId> = self.owners.keys().copied().collect();
        self.driver.with(|host, now| bonds.iter().for_each(|bond| host.end(now, *bond, "the relay is stopping")));
        self.write_down();
        self.driver.farewell().await;
        if let Some(worker) = self.worker.take() {
            worker.end().await;
        }
    }

    fn flows(&self) -> usize {
        Arc::strong_count(&self.open) - 1
    }

    /// Whether there are flows, or ends of flows whose last bytes are still on their way.
    fn is_busy(&self) -> bool {
        self.flows() > 0 || self.driver.with(|host, _| host.bonds().any(|(_, bond)| bond.flows() > 0))
    }

    fn on_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Hello(connection, hello, remote) => self.on_hello(connection, hello, remote),
            Notice::Incoming(flow, open) => self.on_flow(flow, open),
            Notice::Ended(bond, reason) => {
                if let Some(owner) = self.owners.remove(&bond) {
                    self.sources.ended(owner.remote);
                    tracing::info!(%bond, reason, "a bond has ended");
                }
            }
            Notice::Joined(..) | Notice::Lost { .. } | Notice::Path(..) | Notice::Closed(..) => {}
        }
    }

    fn on_hello(&mut self, connection: ConnectionId, hello: Box<Hello>, remote: SocketAddr) {
        if let Err((code, reason)) = self.hear(connection, hello, remote) {
            self.turn_away(connection, remote, code, &reason);
        }
    }

    /// Lets a path in, or asks the registry about it; or why it may not be.
    fn hear(&mut self, connection: ConnectionId, hello: Box<Hello>, remote: SocketAddr) -> Result<(), (u64, String)> {
        self.may_begin()?;
        let Some(worker) = &self.worker else {
            let new = !self.owners.contains_key(&hello.bond);
            let fresh = || Account::new(self.share, None, &self.policy);
            let account = self.sources.take(Instant::now(), remote, new, fresh).map_err(|reason| (refusals::BUSY, reason.to_owned()))?;
            self.let_in(connection, &hello, remote, None, account);
            return Ok(());
        };
        let key = self.driver.with(|host, _| host.connection(connection).and_then(tls::peer_key));
        let key = key.ok_or_else(|| (refusals::UNKNOWN, "it has shown no key".to_owned()))?;
        let asked = worker.judge(Applicant { connection, hello, remote, key });
        asked.then_some(()).ok_or_else(|| (refusals::BUSY, "too many wait for the relay's registry: try again later".to_owned()))
    }

    fn may_begin(&self) -> Result<(), (u64, String)> {
        if self.draining { Err((refusals::BUSY, "the relay is stopping".to_owned())) } else { Ok(()) }
    }

    fn turn_away(&self, connection: ConnectionId, remote: SocketAddr, code: u64, reason: &str) {
        tracing::info!(%remote, reason, "a path is turned away");
        self.driver.with(|host, now| host.refuse(now, connection, code, reason));
    }

    fn let_in(&mut self, connection: ConnectionId, hello: &Hello, remote: SocketAddr, key: Option<PublicKey>, account: Arc<Account>) {
        let owner = key.as_ref().map_or(&[][..], |key| key.as_bytes());
        let theirs = |(bond, owner): &(&BondId, &Owner)| **bond != hello.bond && Arc::ptr_eq(&owner.account, &account);
        let others = self.owners.iter().filter(theirs).count();
        let limits = if key.is_some() { self.memory.part(self.limit, others) } else { BondLimits::ANONYMOUS };
        let known = self.owners.contains_key(&hello.bond);
        let admitted = self.driver.with(|host, now| {
            // Its end waits among the notices: let in now, it would live on without an owner, counted by nobody.
            if known && host.bond(hello.bond).is_none() {
                host.refuse(now, connection, refusals::FORGOTTEN, "this bond has just ended");
                return false;
            }
            host.admit(now, connection, hello, owner, limits)
        });
        if admitted {
            tracing::info!(bond = %hello.bond, path = hello.path, %remote, "a path has joined");
            self.owners.entry(hello.bond).or_insert_with(|| {
                self.sources.begun(remote);
                Owner { key, account, remote }
            });
        }
    }

    /// The registry has said something.
    fn on_registry_event(&mut self, event: RegistryEvent) {
        match event {
            RegistryEvent::Judged(applicant, decision) => {
                let Applicant { connection, hello, remote, key } = applicant;
                match self.may_begin().and(*decision) {
                    Ok((client, month)) => {
                        let account = self.account_of(key, &client, month);
                        self.let_in(connection, &hello, remote, Some(key), account);
                    }
                    Err((code, reason)) => self.turn_away(connection, remote, code, &reason),
                }
            }
            RegistryEvent::Refreshed(clients) => clients.into_iter().for_each(|(key, client)| self.on_client(key, client)),
            RegistryEvent::Written => {}
        }
    }

    fn account_of(&mut self, key: PublicKey, client: &RegisteredClient, month: Month) -> Arc<Account> {
        let limits = self.granted(client.limits);
        if let Some(account) = self.accounts.get(&key) {
            // An invitation may have brought other limits.
            let (now, _) = account.now();
            account.meter(|meter| meter.set_limits(limits, now));
            return account.clone();
        }
        let account = Arc::new(Account::new(limits, Some((client.id, month)), &self.policy));
        self.accounts.insert(key, account.clone());
        account
    }

    /// A client's limits, with those that everybody has.
    fn granted(&self, limits: Limits) -> Limits {
        Limits { flows: limits.flows.or(Some(self.client_flows)), ..limits }
    }

    fn on_flow(&mut self, flow: BondFlow, open: Open) {
        let Some(Owner { account, .. }) = self.owners.get(&flow.bond()) else { return flow.reset(codes::BUSY) };
        if self.draining || self.flows() >= self.limit {
            return flow.answer(codes::BUSY);
        }
        match account.meter(Meter::open_flow) {
            Ok(()) => {}
            Err(Exceeded::Flows(_)) => return flow.answer(codes::BUSY),
            Err(Exceeded::Monthly(_)) => return flow.answer(codes::QUOTA),
        }
        let (account, counted) = (account.clone(), self.open.clone());
        let policy = match self.worker {
            Some(_) => account.policy.clone(),
            None => account.policy.reached_at(self.driver.with(|host, _| host.local_addresses(flow.bond()))),
        };
        let named = self.worker.is_none() && matches!(open.target, Target::Name(..));
        tokio::spawn(async move {
            match open.kind {
                // Strangers have no business with the resolver.
                _ if named => flow.answer(libc::EACCES as u64),
                FlowKind::Stream => stream(flow, &open.target, &account, &policy).await,
                FlowKind::Messages => messages(flow, &open.target, &account, &policy).await,
            }
            account.meter(Meter::close_flow);
            drop(counted);
        });
    }

    /// What others have changed in the registry is to take effect on those who are connected.
    fn refresh(&mut self) {
        self.sources.sweep(Instant::now());
        if let Some(worker) = &mut self.worker {
            worker.refresh(self.accounts.keys().copied().collect());
        }
    }

    /// What a client is now.
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

    /// Ends bonds that hold too much.
    fn guard_memory(&self) {
        // Who shares an account is one client, or one source of anonymous ones.
        let accounts: BTreeMap<*const Account, &Account> =
            self.owners.values().map(|owner| (Arc::as_ptr(&owner.account), &*owner.account)).collect();
        let sockets: BTreeMap<BondId, ByteCount> = accounts.values().flat_map(|account| account.sockets.held()).collect();
        let bonds: Vec<_> = self.driver.with(|host, _| host.bonds().map(|(bond, state)| (bond, state.held())).collect());
        for (bond, _) in bonds.iter().filter(|(bond, _)| !self.owners.contains_key(bond)) {
            tracing::error!(%bond, "a bond without an owner is ended");
            self.driver.with(|host, now| host.end(now, *bond, "it has no owner"));
        }
        let all = |(bond, held): (BondId, ByteCount)| {
            let owner = Arc::as_ptr(&self.owners.get(&bond)?.account);
            Some((bond, owner, held + sockets.get(&bond).copied().unwrap_or_default()))
        };
        let held: Vec<_> = bonds.into_iter().filter_map(all).collect();
        for (bond, excess) in self.memory.excess(&held) {
            tracing::warn!(%bond, "a bond is ended: {}", excess.reason());
            self.driver.with(|host, now| host.end(now, bond, excess.reason()));
        }
    }

    /// Clients with a path that works: a bond outlives its client for a while.
    fn present(&self) -> BTreeSet<PublicKey> {
        let good = |bond: &Bond| bond.paths().any(|(_, path)| path.state == PathState::Good);
        let bonds: Vec<BondId> = self.driver.with(|host, _| host.bonds().filter(|(_, bond)| good(bond)).map(|(id, _)| id).collect());
        bonds.iter().filter_map(|bond| self.owners.get(bond)?.key).collect()
    }

    /// Has written down what clients have used, and now and then who is there.
    fn write_down(&mut self) {
        let due = self.worker.is_some() && self.present.elapsed() >= PRESENCE;
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
                // The target's port is closed: it may open again.
                Err(error) if code(&error) == libc::ECONNREFUSED as u64 => {}
                Err(_) => return,
            },
            () = tokio::time::sleep(UDP_IDLE) => return,
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

/// Bytes from the system's source of chance.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], RelayError> {
    use ring::rand::SecureRandom;
    let mut bytes = [0; N];
    ring::rand::SystemRandom::new().fill(&mut bytes).map_err(|_| RelayError::Random)?;
    Ok(bytes)
}
