//! `braid proxy`: opens flows for devices that cannot run Braid, according to this machine's policy.
//!
//! A client of the proxy counts as an application: `match = { client = ... }` in `[[app]]` matches it by its address, or by the user name
//! that it authenticated with. Rules without `client` also apply if their other conditions hold; the program and the process are then
//! those of the proxy.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use braid_bond::host::{Source, source};
use braid_bond::{FlowKind, Target};
use braid_decide::policy::{AppRule, Carry, Client, Policy, Resolve, Scheduler, Subject};
use braid_model::Class;
use braid_model::address::{Address, Host};
use braid_peer::destination::{self, DialError, Reason, dial_by, resolve};
use braid_peer::quota::Quota;
use braid_proxy::{Connection, ConnectionRoute, Datagrams, Opened, Origin, Outbound, Pending, Share};
use braid_transport::{FlowStream, Opening, TcpConnection, UdpExchange};
use bytes::Bytes;
use ipnet::IpNet;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;

use crate::{OwnFlows, Ruling, RunError, relays};

/// Maximum number of remotes of one association. A new one replaces the remote that was used least recently.
const MAX_REMOTES: usize = 256;
/// Maximum number of UDP exchanges of all clients, and of one client's address. Each one holds a socket. At the limit, the oldest exchange of
/// the client with the most makes room.
const MAX_EXCHANGES: usize = 4096;
const MAX_EXCHANGES_PER_CLIENT: usize = 1024;
/// Number of answers queued for one client.
const ANSWER_QUEUE: usize = 64;
/// Time that a resolved address is used for datagrams before the name is resolved again.
const NAME_TTL: Duration = Duration::from_secs(30);

/// Options of the proxy.
#[derive(Debug, Clone)]
pub struct ProxyOptions {
    /// Policy that chooses links.
    pub scheduler: Scheduler,
    /// Links to use; empty means all.
    pub links: Vec<String>,
    /// Rules: which flows may use which links, and how flows are forwarded.
    pub policy: Policy,
    /// How flows without a matching rule are forwarded.
    pub carry: Carry,
    /// The relay's name; `None`: the first that was joined.
    pub relay: Option<String>,
    /// Networks besides the Internet that remote clients may reach. Local clients may reach everything that this machine can.
    pub reach: Vec<IpNet>,
}

/// Reason why the proxy cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The links cannot be used.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The relay cannot be used.
    #[error(transparent)]
    Relay(#[from] relays::RelayError),
}

/// Opens flows for the proxy's clients. Clones share the same state.
#[derive(Clone)]
pub struct ProxyFlows(Arc<Inner>);

struct Inner {
    flows: OwnFlows,
    policy: Policy,
    carry: Carry,
    scheduler: Scheduler,
    exe: PathBuf,
    user: u32,
    /// Destinations allowed to clients on this machine, and to remote clients.
    here: destination::Policy,
    elsewhere: destination::Policy,
    /// UDP exchanges of each client.
    exchanges: Quota<Source>,
}

/// The policy's decision for a client's flow to one address.
struct MatchedRule {
    application: String,
    rule: Option<AppRule>,
    excluded: bool,
    /// Whether it leaves through a relay or fails.
    confined: bool,
}

impl MatchedRule {
    fn may_go_direct(&self) -> io::Result<()> {
        if self.confined { Err(io::ErrorKind::NetworkUnreachable.into()) } else { Ok(()) }
    }

    fn ruling<'a>(&'a self, policy: &'a Policy) -> Ruling<'a> {
        Ruling { application: &self.application, policy, rule: self.rule.as_ref() }
    }
}

impl ProxyFlows {
    /// Starts to follow the links, and to bond if a relay is needed. Call it inside a tokio runtime.
    ///
    /// # Errors
    /// A named link or relay does not exist.
    pub fn start(options: ProxyOptions) -> Result<Self, ProxyError> {
        let flows = OwnFlows::start(options.scheduler, options.links)?;
        let wanted =
            options.relay.is_some() || options.carry.needs_peer() || options.policy.apps.iter().any(|rule| rule.carry.needs_peer());
        if wanted {
            match flows.bond_with(options.relay.as_deref()) {
                Ok(name) => tracing::info!(relay = name, "bonded flows use this relay"),
                // The rules apply to the whole machine, so it is no error if this user has not joined a relay.
                Err(error) if options.relay.is_none() && !options.carry.needs_peer() => tracing::info!("{error}"),
                Err(error) => return Err(error.into()),
            }
        }
        let everything = ["0.0.0.0/0", "::/0"].map(|net| net.parse::<IpNet>()).into_iter().flatten().collect();
        Ok(Self(Arc::new(Inner {
            flows,
            policy: options.policy,
            carry: options.carry,
            scheduler: options.scheduler,
            exe: std::env::current_exe().unwrap_or_default(),
            user: braid_platform::linux::sys::process::own_user(),
            here: destination::Policy::relay(everything, Vec::new()),
            elsewhere: destination::Policy::relay(options.reach, Vec::new()),
            exchanges: Quota::new(MAX_EXCHANGES, MAX_EXCHANGES_PER_CLIENT),
        })))
    }

    /// Stores what was learnt for the next run.
    pub fn remember(&self) {
        self.0.flows.remember();
    }
}

impl Inner {
    fn rule(&self, origin: &Origin, remote: SocketAddr) -> MatchedRule {
        let client = Client { address: origin.client.ip(), user: origin.user.as_deref(), mac: None };
        let subject = Subject {
            exe: Some(&self.exe),
            name: "braid",
            port: remote.port(),
            protocol: None,
            destination: remote.ip(),
            cgroup: None,
            user: Some(self.user),
            client: Some(client),
            // The programs behind the proxy's clients are unknown, and so are their classes.
            class: Class::Unclassified,
        };
        let usual = || AppRule { carry: self.carry, ..AppRule::default() };
        let rule = self.policy.first_match(&subject).map(|index| self.policy.apps[index].clone());
        let rule = match rule {
            Some(rule) if rule.carry == Carry::Auto => Some(AppRule { carry: self.carry, ..rule }),
            None if self.carry != Carry::Auto => Some(usual()),
            rule => rule,
        };
        let application = origin.user.clone().unwrap_or_else(|| origin.client.ip().to_canonical().to_string());
        let excluded = self.policy.excludes(&subject);
        let confined = !excluded && self.policy.confines(rule.as_ref());
        MatchedRule { application: format!("proxy:{application}"), rule, excluded, confined }
    }

    fn reach(&self, origin: &Origin) -> &destination::Policy {
        if origin.client.ip().to_canonical().is_loopback() { &self.here } else { &self.elsewhere }
    }

    async fn open(&self, origin: &Origin, remote: SocketAddr) -> io::Result<Opened> {
        let ruled = self.rule(origin, remote);
        if ruled.excluded {
            return Ok(Opened { stream: Box::new(TcpConnection::new(tokio::net::TcpStream::connect(remote).await?)), route: None });
        }
        let ruling = ruled.ruling(&self.policy);
        if ruled.rule.as_ref().is_some_and(|rule| rule.carry.needs_peer()) {
            match self.flows.bond(FlowKind::Stream, Target::Address(remote), ruling).await {
                Opening::Bonded(flow) => return Ok(Opened { stream: Box::new(FlowStream::new(flow)), route: None }),
                Opening::Refused(errno) => return Err(io::Error::from_raw_os_error(errno)),
                Opening::Direct(_) => {}
            }
        }
        ruled.may_go_direct()?;
        let (stream, link) = self.flows.connect(remote, ruling).await?;
        stream.set_nodelay(true)?;
        Ok(Opened { stream: Box::new(TcpConnection::new(stream)), route: link.map(|link| ConnectionRoute { link, remote }) })
    }

    /// Opens a connection to a name that the relay resolves. `None` if the rule does not request that, or the relay cannot do it.
    async fn open_by_name(&self, origin: &Origin, target: &Address) -> Option<Result<Opened, DialError>> {
        let Host::Name(name) = &target.host else { return None };
        // Restrictions for remote clients apply to addresses, and local names have no meaning in the relay's network.
        let name = name.to_string();
        if !origin.client.ip().to_canonical().is_loopback()
            || !name.contains('.')
            || [".localhost", ".local"].iter().any(|end| name.ends_with(end))
        {
            return None;
        }
        // The address is not known here, so a condition on it holds only if every address meets it.
        let ruled = self.rule(origin, (Ipv4Addr::UNSPECIFIED, target.port()).into());
        let asked = |rule: &AppRule| rule.resolve == Resolve::Relay && rule.carry.needs_peer();
        if ruled.excluded || !ruled.rule.as_ref().is_some_and(asked) {
            return None;
        }
        match self.flows.bond(FlowKind::Stream, Target::Name(name, target.port()), ruled.ruling(&self.policy)).await {
            Opening::Bonded(flow) => Some(Ok(Opened { stream: Box::new(FlowStream::new(flow)), route: None })),
            // The look-up on this machine would reveal the name.
            Opening::Direct(_) => {
                ruled.may_go_direct().err().map(|error| Err(DialError { target: target.clone(), reason: Reason::of(&error) }))
            }
            Opening::Refused(errno) => {
                Some(Err(DialError { target: target.clone(), reason: Reason::of(&io::Error::from_raw_os_error(errno)) }))
            }
        }
    }

    /// How a download may be split: over the links that its rule allows. `None` if the rule requires one link, or the scheduler keeps
    /// to few links because of their price or stability.
    fn share(&self, origin: &Origin, route: ConnectionRoute) -> Option<Share> {
        let ruled = self.rule(origin, route.remote);
        let carry = ruled.rule.as_ref().map_or(Carry::Auto, |rule| rule.carry);
        if ruled.excluded || ruled.confined || !self.scheduler.spreads() || matches!(carry, Carry::Direct | Carry::Duplicate) {
            return None;
        }
        let links = self.flows.divided(route.remote, ruled.ruling(&self.policy));
        let weight = ruled.rule.as_ref().map_or(1.0, |rule| rule.weight);
        links.iter().any(|(link, _)| *link == route.link).then_some(Share { links, weight })
    }

    async fn open_by(&self, origin: &Origin, route: ConnectionRoute) -> io::Result<Box<dyn Connection>> {
        let ruled = self.rule(origin, route.remote);
        ruled.may_go_direct()?;
        let stream = self.flows.connect_by(route.link, route.remote, ruled.ruling(&self.policy)).await?;
        stream.set_nodelay(true)?;
        Ok(Box::new(TcpConnection::new(stream)))
    }

    async fn exchange(&self, origin: &Origin, remote: SocketAddr) -> io::Result<UdpExchange> {
        let ruled = self.rule(origin, remote);
        if ruled.excluded {
            let any: SocketAddr = if remote.is_ipv6() { ([0u16; 8], 0).into() } else { ([0, 0, 0, 0], 0).into() };
            let socket = UdpSocket::bind(any).await?;
            socket.connect(remote).await?;
            return Ok(UdpExchange::Direct(Arc::new(socket)));
        }
        let ruling = ruled.ruling(&self.policy);
        if ruled.rule.as_ref().is_some_and(|rule| rule.carry.needs_peer())
            && let Opening::Bonded(flow) = self.flows.bond(FlowKind::Messages, Target::Address(remote), ruling).await
        {
            return Ok(UdpExchange::Bonded(flow));
        }
        ruled.may_go_direct()?;
        Ok(UdpExchange::Direct(Arc::new(self.flows.exchange(remote, ruling)?)))
    }
}

impl Outbound for ProxyFlows {
    fn connect<'a>(&'a self, origin: &'a Origin, target: &'a Address) -> Pending<'a, Result<Opened, DialError>> {
        Box::pin(async move {
            if let Some(opened) = self.0.open_by_name(origin, target).await {
                return opened;
            }
            dial_by(target, self.0.reach(origin), |remote| {
                let (inner, origin) = (self.0.clone(), origin.clone());
                async move { inner.open(&origin, remote).await }
            })
            .await
        })
    }

    fn share(&self, origin: &Origin, route: ConnectionRoute) -> Option<Share> {
        self.0.share(origin, route)
    }

    fn connect_by<'a>(&'a self, origin: &'a Origin, route: ConnectionRoute) -> Pending<'a, io::Result<Box<dyn Connection>>> {
        Box::pin(self.0.open_by(origin, route))
    }

    fn datagrams<'a>(&'a self, origin: &'a Origin) -> Pending<'a, io::Result<Box<dyn Datagrams>>> {
        let association = Association::new(self.0.clone(), origin.clone());
        Box::pin(async move { Ok(Box::new(association) as Box<dyn Datagrams>) })
    }
}

/// Forwards answers until the exchange ends.
async fn answer(exchange: UdpExchange, from: SocketAddr, to: mpsc::Sender<(SocketAddr, Bytes)>) {
    while let Ok(payload) = exchange.receive().await {
        // If the queue is full, the datagram is lost, as in any socket buffer.
        if let Err(mpsc::error::TrySendError::Closed(_)) = to.try_send((from, payload)) {
            return;
        }
    }
}

/// A client's UDP association.
struct Association {
    inner: Arc<Inner>,
    origin: Origin,
    remotes: Mutex<BTreeMap<SocketAddr, RemoteExchange>>,
    names: Mutex<BTreeMap<Address, (SocketAddr, Instant)>>,
    answers: mpsc::Sender<(SocketAddr, Bytes)>,
    waiting: tokio::sync::Mutex<mpsc::Receiver<(SocketAddr, Bytes)>>,
}

/// The exchange with one remote.
struct RemoteExchange {
    exchange: UdpExchange,
    last: Instant,
    /// Task that forwards the answers; dropping this aborts it.
    answers: AbortOnDrop,
}

struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Association {
    fn new(inner: Arc<Inner>, origin: Origin) -> Self {
        let (answers, waiting) = mpsc::channel(ANSWER_QUEUE);
        let waiting = tokio::sync::Mutex::new(waiting);
        Self { inner, origin, remotes: Mutex::default(), names: Mutex::default(), answers, waiting }
    }

    /// The address of a target. Names are resolved again after [`NAME_TTL`].
    async fn find(&self, target: &Address) -> Option<SocketAddr> {
        let named = matches!(target.host, Host::Name(_));
        if named {
            let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((address, at)) = names.get(target).filter(|(_, at)| at.elapsed() < NAME_TTL) {
                let _ = at;
                return Some(*address);
            }
        }
        let found = resolve(target, self.inner.reach(&self.origin)).await;
        let address = *found.inspect_err(|error| tracing::debug!(%error, "cannot resolve a datagram's target; drops it")).ok()?.first()?;
        if named {
            let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            names.retain(|_, (_, at)| at.elapsed() < NAME_TTL);
            if names.len() < MAX_REMOTES {
                names.insert(target.clone(), (address, Instant::now()));
            }
        }
        Some(address)
    }

    /// Sends over an existing exchange. Removes a broken one, so that the next datagram opens another.
    fn send_by(&self, exchange: &UdpExchange, remote: SocketAddr, payload: Bytes) {
        if exchange.send(payload).is_err() {
            self.remotes.lock().unwrap_or_else(PoisonError::into_inner).remove(&remote);
        }
    }

    fn existing_exchange(&self, remote: SocketAddr) -> Option<UdpExchange> {
        let mut remotes = self.remotes.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = remotes.get_mut(&remote)?;
        if entry.answers.0.is_finished() {
            // The flow has ended or its socket is broken; the next datagram opens another.
            remotes.remove(&remote);
            return None;
        }
        entry.last = Instant::now();
        Some(entry.exchange.clone())
    }
}

impl Datagrams for Association {
    fn send<'a>(&'a self, target: &'a Address, payload: Bytes) -> Pending<'a, ()> {
        Box::pin(async move {
            let Some(remote) = self.find(target).await else { return };
            if let Some(exchange) = self.existing_exchange(remote) {
                return self.send_by(&exchange, remote, payload);
            }
            let whose = source(self.origin.client);
            let Some((permit, ended)) = self.inner.exchanges.take(whose) else { return };
            let exchange = match self.inner.exchange(&self.origin, remote).await {
                Ok(exchange) => exchange,
                Err(error) => return tracing::debug!(%remote, %error, "cannot open a UDP exchange"),
            };
            let _ = exchange.send(payload);
            let answered = answer(exchange.clone(), remote, self.answers.clone());
            let answers = tokio::spawn(async move {
                let _permit = permit;
                tokio::select! {
                    () = answered => {}
                    _ = ended => {}
                }
            });
            let answers = answers.abort_handle();
            let mut remotes = self.remotes.lock().unwrap_or_else(PoisonError::into_inner);
            if remotes.len() >= MAX_REMOTES
                && let Some(oldest) = remotes.iter().min_by_key(|(_, entry)| entry.last).map(|(remote, _)| *remote)
            {
                remotes.remove(&oldest);
            }
            remotes.insert(remote, RemoteExchange { exchange, last: Instant::now(), answers: AbortOnDrop(answers) });
        })
    }

    fn receive(&self) -> Pending<'_, io::Result<(SocketAddr, Bytes)>> {
        Box::pin(async { self.waiting.lock().await.recv().await.ok_or_else(|| io::ErrorKind::BrokenPipe.into()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_decide::policy::Exclusions;

    /// Flows that all take the system's route.
    fn flows(exchanges: Quota<Source>) -> Arc<Inner> {
        let exclude = Exclusions { destinations: vec!["0.0.0.0/0".parse().unwrap()], ..Exclusions::default() };
        let policy = Policy { exclude, ..Policy::default() };
        let scheduler = policy.scheduler;
        let options = ProxyOptions { scheduler, links: Vec::new(), policy, carry: Carry::Auto, relay: None, reach: Vec::new() };
        let mut flows = ProxyFlows::start(options).unwrap();
        Arc::get_mut(&mut flows.0).unwrap().exchanges = exchanges;
        flows.0
    }

    #[tokio::test]
    async fn regression_the_exchanges_of_one_client_are_limited_over_all_its_associations() {
        let inner = flows(Quota::new(12, 8));
        let client = |address: &str| Association::new(inner.clone(), Origin { client: address.parse().unwrap(), user: None });
        let remote = std::net::UdpSocket::bind(("127.0.0.1", 0)).unwrap();
        let target = remote.local_addr().unwrap().into();
        let greedy: Vec<_> = (0..20).map(|_| client("127.0.0.2:1")).collect();
        let other = client("127.0.0.3:1");
        other.send(&target, Bytes::from_static(b"first")).await;
        for association in &greedy {
            association.send(&target, Bytes::from_static(b"more")).await;
        }
        let lives = |association: &Association| {
            let remotes = association.remotes.lock().unwrap();
            remotes.values().filter(|entry| !entry.answers.0.is_finished()).count()
        };
        let alive = || greedy.iter().map(lives).sum::<usize>();
        while alive() > 8 {
            tokio::task::yield_now().await;
        }
        assert_eq!((alive(), lives(&other)), (8, 1));
        // An association whose exchange was evicted opens a new one.
        greedy[0].send(&target, Bytes::from_static(b"again")).await;
        assert_eq!(lives(&greedy[0]), 1);
    }
}
