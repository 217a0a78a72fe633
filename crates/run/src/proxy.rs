//! `braid proxy`: flows for what cannot run Braid itself, by the policy of the machine.
//!
//! A client of the proxy stands for the application: `match = { client = ... }` in `[[app]]` means it by its address or by the name that it
//! has shown a password for. Rules without `client` hold too where their other conditions do; the program and its process are the
//! proxy's then.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use braid_bond::host::{Source, source};
use braid_bond::{FlowKind, Target};
use braid_decide::policy::{AppRule, Carry, Policy, ProxyClient, Resolve, Scheduler, Subject};
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

/// Remotes that one association speaks with at a time; the one that was silent longest makes room.
const REMOTES: usize = 256;
/// Exchanges of all clients at a time, and of one client's address. Each keeps a socket; the oldest of whoever has most makes room.
const EXCHANGES: usize = 4096;
const EXCHANGES_OF_ONE: usize = 1024;
/// Answers that wait for one client.
const WAITING: usize = 64;
/// How long a name's address is used for datagrams before it is asked for again.
const NAME_LIFE: Duration = Duration::from_secs(30);

/// What the proxy is told.
#[derive(Debug, Clone)]
pub struct ProxyOptions {
    /// How links are chosen.
    pub scheduler: Scheduler,
    /// The links to use; empty for all.
    pub links: Vec<String>,
    /// Who may use which links, and how flows are forwarded.
    pub policy: Policy,
    /// How flows are forwarded that no rule speaks of.
    pub carry: Carry,
    /// The relay, by its name; `None`: the first that was joined.
    pub relay: Option<String>,
    /// What clients from elsewhere may reach besides the Internet. Those of this machine may reach what it can.
    pub reach: Vec<IpNet>,
}

/// Why the proxy cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The links.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The relay.
    #[error(transparent)]
    Relay(#[from] relays::RelayError),
}

/// Carries what the proxy's clients ask for. Clones are the same.
#[derive(Clone)]
pub struct ProxyFlows(Arc<Inner>);

struct Inner {
    flows: OwnFlows,
    policy: Policy,
    carry: Carry,
    scheduler: Scheduler,
    exe: PathBuf,
    user: u32,
    /// What clients of this machine may reach, and those from elsewhere.
    here: destination::Policy,
    elsewhere: destination::Policy,
    /// Who has how many exchanges of datagrams.
    exchanges: Quota<Source>,
}

/// A client's flow to one address.
struct Ruled {
    application: String,
    rule: Option<AppRule>,
    excluded: bool,
}

impl Ruled {
    fn ruling<'a>(&'a self, policy: &'a Policy) -> Ruling<'a> {
        Ruling { application: &self.application, policy, rule: self.rule.as_ref() }
    }
}

impl ProxyFlows {
    /// Begins to follow links, and to bond where a relay is asked for. To be called inside a tokio runtime.
    ///
    /// # Errors
    /// A link or a relay that is not there.
    pub fn start(options: ProxyOptions) -> Result<Self, ProxyError> {
        let flows = OwnFlows::start(options.scheduler, options.links)?;
        let wanted =
            options.relay.is_some() || options.carry.needs_peer() || options.policy.apps.iter().any(|rule| rule.carry.needs_peer());
        if wanted {
            match flows.bond_with(options.relay.as_deref()) {
                Ok(name) => tracing::info!(relay = name, "flows that are to be bonded go there"),
                // Rules are the machine's: that this user has joined no relay is no mistake.
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
            exchanges: Quota::new(EXCHANGES, EXCHANGES_OF_ONE),
        })))
    }

    /// Keeps what was learnt for the next time.
    pub fn remember(&self) {
        self.0.flows.remember();
    }
}

impl Inner {
    fn rule(&self, origin: &Origin, remote: SocketAddr) -> Ruled {
        let client = ProxyClient { address: origin.client.ip(), user: origin.user.as_deref() };
        let subject = Subject {
            exe: Some(&self.exe),
            name: "braid",
            port: remote.port(),
            destination: remote.ip(),
            cgroup: None,
            user: Some(self.user),
            client: Some(client),
        };
        let usual = || AppRule { carry: self.carry, ..AppRule::default() };
        let rule = self.policy.first_match(&subject).map(|index| self.policy.apps[index].clone());
        let rule = match rule {
            Some(rule) if rule.carry == Carry::Auto => Some(AppRule { carry: self.carry, ..rule }),
            None if self.carry != Carry::Auto => Some(usual()),
            rule => rule,
        };
        let application = origin.user.clone().unwrap_or_else(|| origin.client.ip().to_canonical().to_string());
        Ruled { application: format!("proxy:{application}"), rule, excluded: self.policy.excludes(&subject) }
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
        let (stream, link) = self.flows.connect(remote, ruling).await?;
        stream.set_nodelay(true)?;
        Ok(Opened { stream: Box::new(TcpConnection::new(stream)), route: link.map(|link| ConnectionRoute { link, remote }) })
    }

    /// Opens a connection to a name that the relay is to look up; `None` if it is not, or the relay cannot.
    async fn open_by_name(&self, origin: &Origin, target: &Address) -> Option<Result<Opened, DialError>> {
        let Host::Name(name) = &target.host else { return None };
        // What clients from elsewhere may not reach shows in addresses, and names of this network mean nothing in the relay's.
        let name = name.to_string();
        if !origin.client.ip().to_canonical().is_loopback()
            || !name.contains('.')
            || [".localhost", ".local"].iter().any(|end| name.ends_with(end))
        {
            return None;
        }
        // Its address is known to nobody here, so a condition on it holds only if all addresses meet it.
        let ruled = self.rule(origin, (Ipv4Addr::UNSPECIFIED, target.port()).into());
        let asked = |rule: &AppRule| rule.resolve == Resolve::Relay && rule.carry.needs_peer();
        if ruled.excluded || !ruled.rule.as_ref().is_some_and(asked) {
            return None;
        }
        match self.flows.bond(FlowKind::Stream, Target::Name(name, target.port()), ruled.ruling(&self.policy)).await {
            Opening::Bonded(flow) => Some(Ok(Opened { stream: Box::new(FlowStream::new(flow)), route: None })),
            Opening::Direct(_) => None,
            Opening::Refused(errno) => {
                Some(Err(DialError { target: target.clone(), reason: Reason::of(&io::Error::from_raw_os_error(errno)) }))
            }
        }
    }

    /// How a download may be divided: over the links that its rule allows, unless it is to go over one, or the scheduler keeps to
    /// few links for their price or steadiness.
    fn share(&self, origin: &Origin, route: ConnectionRoute) -> Option<Share> {
        let ruled = self.rule(origin, route.remote);
        let carry = ruled.rule.as_ref().map_or(Carry::Auto, |rule| rule.carry);
        if ruled.excluded || !self.scheduler.spreads() || matches!(carry, Carry::Direct | Carry::Duplicate) {
            return None;
        }
        let links = self.flows.divided(route.remote, ruled.ruling(&self.policy));
        let weight = ruled.rule.as_ref().map_or(1.0, |rule| rule.weight);
        links.iter().any(|(link, _)| *link == route.link).then_some(Share { links, weight })
    }

    async fn open_by(&self, origin: &Origin, route: ConnectionRoute) -> io::Result<Box<dyn Connection>> {
        let ruled = self.rule(origin, route.remote);
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

/// Hands answers on until there will be none.
async fn answer(exchange: UdpExchange, from: SocketAddr, to: mpsc::Sender<(SocketAddr, Bytes)>) {
    while let Ok(payload) = exchange.receive().await {
        // What nobody fetches is lost, as in any socket's buffer.
        if let Err(mpsc::error::TrySendError::Closed(_)) = to.try_send((from, payload)) {
            return;
        }
    }
}

/// A client's datagrams.
struct Association {
    inner: Arc<Inner>,
    origin: Origin,
    remotes: Mutex<BTreeMap<SocketAddr, Spoken>>,
    names: Mutex<BTreeMap<Address, (SocketAddr, Instant)>>,
    answers: mpsc::Sender<(SocketAddr, Bytes)>,
    waiting: tokio::sync::Mutex<mpsc::Receiver<(SocketAddr, Bytes)>>,
}

/// A remote that was spoken with.
struct Spoken {
    exchange: UdpExchange,
    last: Instant,
    /// Its answers are waited for as long as this lives.
    answers: Abort,
}

struct Abort(tokio::task::AbortHandle);

impl Drop for Abort {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Association {
    fn new(inner: Arc<Inner>, origin: Origin) -> Self {
        let (answers, waiting) = mpsc::channel(WAITING);
        let waiting = tokio::sync::Mutex::new(waiting);
        Self { inner, origin, remotes: Mutex::default(), names: Mutex::default(), answers, waiting }
    }

    /// The address of a target: names are asked for anew after a while.
    async fn find(&self, target: &Address) -> Option<SocketAddr> {
        let named = matches!(target.host, Host::Name(_));
        if named {
            let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((address, at)) = names.get(target).filter(|(_, at)| at.elapsed() < NAME_LIFE) {
                let _ = at;
                return Some(*address);
            }
        }
        let found = resolve(target, self.inner.reach(&self.origin)).await;
        let address = *found.inspect_err(|error| tracing::debug!(%error, "a datagram goes nowhere")).ok()?.first()?;
        if named {
            let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
            names.retain(|_, (_, at)| at.elapsed() < NAME_LIFE);
            if names.len() < REMOTES {
                names.insert(target.clone(), (address, Instant::now()));
            }
        }
        Some(address)
    }

    /// Sends by an exchange that is there; the next datagram begins another once it is broken.
    fn send_by(&self, exchange: &UdpExchange, remote: SocketAddr, payload: Bytes) {
        if exchange.send(payload).is_err() {
            self.remotes.lock().unwrap_or_else(PoisonError::into_inner).remove(&remote);
        }
    }

    fn spoken(&self, remote: SocketAddr) -> Option<UdpExchange> {
        let mut remotes = self.remotes.lock().unwrap_or_else(PoisonError::into_inner);
        let spoken = remotes.get_mut(&remote)?;
        if spoken.answers.0.is_finished() {
            // Its flow has ended, or its socket is broken: the next datagram begins another.
            remotes.remove(&remote);
            return None;
        }
        spoken.last = Instant::now();
        Some(spoken.exchange.clone())
    }
}

impl Datagrams for Association {
    fn send<'a>(&'a self, target: &'a Address, payload: Bytes) -> Pending<'a, ()> {
        Box::pin(async move {
            let Some(remote) = self.find(target).await else { return };
            if let Some(exchange) = self.spoken(remote) {
                return self.send_by(&exchange, remote, payload);
            }
            let whose = source(self.origin.client);
            let Some((permit, ended)) = self.inner.exchanges.take(whose) else { return };
            let exchange = match self.inner.exchange(&self.origin, remote).await {
                Ok(exchange) => exchange,
                Err(error) => return tracing::debug!(%remote, %error, "no exchange can be begun"),
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
            if remotes.len() >= REMOTES
                && let Some(oldest) = remotes.iter().min_by_key(|(_, spoken)| spoken.last).map(|(remote, _)| *remote)
            {
                remotes.remove(&oldest);
            }
            remotes.insert(remote, Spoken { exchange, last: Instant::now(), answers: Abort(answers) });
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

    /// Carries everything as the system would.
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
    async fn regression_one_client_has_so_many_exchanges_however_many_associations() {
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
            remotes.values().filter(|spoken| !spoken.answers.0.is_finished()).count()
        };
        let alive = || greedy.iter().map(lives).sum::<usize>();
        while alive() > 8 {
            tokio::task::yield_now().await;
        }
        assert_eq!((alive(), lives(&other)), (8, 1));
        // One that made room begins anew.
        greedy[0].send(&target, Bytes::from_static(b"again")).await;
        assert_eq!(lives(&greedy[0]), 1);
    }
}
