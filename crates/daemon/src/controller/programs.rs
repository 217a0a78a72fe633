//! Programs that ask the network: sockets around [`braid_network::sfnet`].

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use braid_bond::host::{Source, source};
use braid_config::controller::{ControllerConfig, SfnetSettings};
use braid_decide::bucket::Bucket;
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Mac, Rate, Time};
use braid_network::sfnet::{ALPN, DISCOVERY, Offer, Out, Proof, Say, SessionId, Sfnet, VERSION, all, is_discover};
use braid_network::{Controller, Event, Reservation};
use braid_peer::keys::KeyPair;
use braid_peer::quota::Quota;
use braid_peer::tls::{Clients, stream_key, stream_server};
use braid_platform::linux::sys::bpf::now;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;

use super::clients::Keys;
use super::{ACCEPT_AGAIN, LAST_WORDS, LOADS};
use crate::lines::{HANDSHAKE, read_line, set_up};

/// Most connections of programs, and of one source.
const MAX_CONNECTIONS: (usize, usize) = (4096, 64);
/// Bytes that may wait for a program. One that does not read is cut off.
const MAX_WAITING: usize = 2 << 20;
/// Bytes of requests that a connection may send.
const REQUESTS: (Rate, ByteCount) = (Rate::from_bps(256_000), ByteCount::new(32 << 10));
/// Bytes that are still read of a connection that is closed.
const MAX_UNREAD: u64 = 1 << 20;
/// Answers to programs on this machine's own networks that look for the controller: in a second, and of those to one source.
const ANSWERS: (u32, u32) = (100, 25);

/// What the tasks of programs report.
pub(super) enum ProgramArrival {
    /// A program has connected.
    Opened { id: SessionId, proof: Proof, lines: Lines },
    /// It has sent a line.
    Line { id: SessionId, text: String },
    /// Its connection has ended.
    Closed { id: SessionId },
}

/// The lines of a connection.
#[derive(Clone)]
pub(super) struct Lines {
    lines: mpsc::UnboundedSender<String>,
    waiting: Arc<AtomicUsize>,
}

impl Lines {
    /// `false` if the program does not read.
    fn push(&self, line: String) -> bool {
        let waiting = self.waiting.fetch_add(line.len(), Ordering::Relaxed);
        waiting < MAX_WAITING && self.lines.send(line).is_ok()
    }
}

/// What all listeners share.
#[derive(Clone)]
struct Places {
    connections: Quota<Source>,
    sessions: Arc<AtomicU64>,
}

impl Default for Places {
    fn default() -> Self {
        Self { connections: Quota::new(MAX_CONNECTIONS.0, MAX_CONNECTIONS.1), sessions: Arc::default() }
    }
}

/// Where programs connect, and where with TLS and a key.
pub(super) type Addresses = (Vec<SocketAddr>, Option<(Vec<SocketAddr>, PublicKey)>);

/// Sockets for programs.
pub(super) struct Sockets {
    /// Listeners, and whether connections use TLS.
    listeners: Vec<(TcpListener, bool)>,
    discovery: Option<UdpSocket>,
}

impl Sockets {
    /// Listens as the configuration says.
    ///
    /// # Errors
    /// An address cannot be listened on.
    pub(super) async fn open(settings: &SfnetSettings) -> anyhow::Result<Self> {
        let mut listeners = Vec::new();
        let plain = settings.listen.iter().map(|address| (address, false));
        for (address, tls) in plain.chain(settings.tls_listen.iter().map(|address| (address, true))) {
            let remedy = || format!("cannot listen on {address} for programs: end what uses it, or choose another address in [sfnet]");
            listeners.push((TcpListener::bind(address).await.with_context(remedy)?, tls));
        }
        let shown = settings.listen.iter().chain(&settings.tls_listen).filter_map(v4);
        let remedy = || format!("cannot take UDP packets to {DISCOVERY}: end what uses the port, or write discovery = false in [sfnet]");
        let discovery = settings.discovery.then(|| discovery(shown)).transpose().with_context(remedy)?;
        Ok(Self { listeners, discovery })
    }

    /// Where programs connect, and where with TLS and this key.
    ///
    /// # Errors
    /// Those of the system.
    pub(super) fn addresses(&self, key: Option<PublicKey>) -> io::Result<Addresses> {
        let of = |tls: bool| self.listeners.iter().filter(move |(_, own)| *own == tls).map(|(listener, _)| listener.local_addr());
        let with_tls = of(true).collect::<Result<Vec<_>, _>>()?;
        Ok((of(false).collect::<Result<_, _>>()?, key.filter(|_| !with_tls.is_empty()).map(|key| (with_tls, key))))
    }

    /// Serves programs until the tasks are aborted.
    ///
    /// # Errors
    /// The keys cannot be used.
    pub(super) fn serve(
        self,
        identity: Option<&KeyPair>,
        offer: Option<&Offer>,
        keys: &watch::Receiver<Keys>,
        arrivals: &mpsc::Sender<ProgramArrival>,
    ) -> anyhow::Result<Vec<JoinHandle<()>>> {
        let acceptor = identity.map(|identity| stream_server(identity, Clients::Keyed, ALPN)).transpose()?;
        let acceptor = acceptor.map(|config| TlsAcceptor::from(Arc::new(config)));
        let places = Places::default();
        let accept = |(listener, tls): (TcpListener, bool)| {
            let acceptor = acceptor.clone().filter(|_| tls);
            tokio::spawn(accept(listener, acceptor, places.clone(), keys.clone(), arrivals.clone()))
        };
        let answering = self.discovery.zip(offer.cloned()).map(|(socket, offer)| tokio::spawn(answer(socket, offer)));
        Ok(self.listeners.into_iter().map(accept).chain(answering).collect())
    }
}

fn v4(address: &SocketAddr) -> Option<Ipv4Addr> {
    match address.ip() {
        IpAddr::V4(v4) if !v4.is_unspecified() => Some(v4),
        _ => None,
    }
}

/// A socket for what programs send on networks in which this machine has one of these addresses.
fn discovery(addresses: impl Iterator<Item = Ipv4Addr>) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::V4(DISCOVERY).into())?;
    for address in addresses.collect::<BTreeSet<_>>() {
        socket.join_multicast_v4(DISCOVERY.ip(), &address)?;
    }
    UdpSocket::from_std(socket.into())
}

/// What programs get that look for the controller; `None`: they are not answered.
pub(super) fn offer(config: &ControllerConfig, key: Option<PublicKey>) -> Option<Offer> {
    let settings = config.sfnet.as_ref().filter(|settings| settings.discovery)?;
    let first = |listen: &[SocketAddr]| listen.iter().find_map(|address| Some(SocketAddrV4::new(v4(address)?, address.port())));
    let (plain, tls) = (first(&settings.listen), first(&settings.tls_listen));
    let address = *plain.or(tls)?.ip();
    let at = |socket: Option<SocketAddrV4>| socket.filter(|socket| *socket.ip() == address).map(|socket| socket.port());
    let key = key.filter(|_| tls.is_some()).map(|key| key.to_string());
    Some(Offer { sfnet: VERSION, address, port: at(plain), tls_port: at(tls), key })
}

/// Answers programs on this machine's own networks until this process ends. Those at switches ask by these.
async fn answer(socket: UdpSocket, offer: Offer) {
    let (datagram, mut since, mut answered) = (offer.datagram(), now(), BTreeMap::<IpAddr, u32>::new());
    let mut buffer = [0; 1024];
    loop {
        let Ok((length, peer)) = socket.recv_from(&mut buffer).await else {
            sleep(ACCEPT_AGAIN).await;
            continue;
        };
        if now().since(since) >= Duration::from_secs(1) {
            (since, answered) = (now(), BTreeMap::new());
        }
        let may = answered.values().sum::<u32>() < ANSWERS.0 && answered.get(&peer.ip()).is_none_or(|count| *count < ANSWERS.1);
        if may && buffer.get(..length).is_some_and(is_discover) {
            *answered.entry(peer.ip()).or_default() += 1;
            let _ = socket.try_send_to(&datagram, peer);
        }
    }
}

/// Accepts programs until this process ends.
async fn accept(
    listener: TcpListener,
    acceptor: Option<TlsAcceptor>,
    places: Places,
    keys: watch::Receiver<Keys>,
    arrivals: mpsc::Sender<ProgramArrival>,
) {
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a program; trying again");
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        // The oldest of those who have most makes room.
        let Some((permit, displaced)) = places.connections.take(source(peer)) else { continue };
        let id = SessionId(places.sessions.fetch_add(1, Ordering::Relaxed));
        let (acceptor, keys, arrivals) = (acceptor.clone(), keys.clone(), arrivals.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = enter(stream, peer, id, acceptor, keys, &arrivals) => {}
                _ = displaced => {}
            }
            let _ = arrivals.send(ProgramArrival::Closed { id }).await;
            drop(permit);
        });
    }
}

async fn enter(
    stream: TcpStream,
    peer: SocketAddr,
    id: SessionId,
    acceptor: Option<TlsAcceptor>,
    mut keys: watch::Receiver<Keys>,
    arrivals: &mpsc::Sender<ProgramArrival>,
) {
    set_up(&stream);
    let Some(acceptor) = acceptor else {
        let (reading, writing) = stream.into_split();
        return serve(reading, writing, id, Proof::Address(peer.ip().to_canonical()), arrivals).await;
    };
    let Ok(Ok(secured)) = timeout(HANDSHAKE, acceptor.accept(stream)).await else { return };
    let Some(key) = stream_key(secured.get_ref().1.peer_certificates()) else { return };
    let host = keys.borrow_and_update().get(&key).copied();
    let (reading, mut writing) = tokio::io::split(secured);
    match host {
        Some(host) => tokio::select! {
            () = serve(reading, writing, id, Proof::Key(host), arrivals) => {}
            () = is_revoked(keys, key, host) => {}
        },
        None => {
            let reason = format!("no [[host]] of the controller has the key {key}: add one with this host's Ethernet address");
            let _ = timeout(HANDSHAKE, writing.write_all(Say::Bye { reason }.line().as_bytes())).await;
            let _ = timeout(HANDSHAKE, writing.shutdown()).await;
        }
    }
}

/// Waits until the configuration gives a key to another host, or to none.
async fn is_revoked(mut keys: watch::Receiver<Keys>, key: PublicKey, host: Mac) {
    while keys.changed().await.is_ok() {
        if keys.borrow_and_update().get(&key) != Some(&host) {
            return;
        }
    }
    std::future::pending().await
}

async fn serve(
    reading: impl AsyncRead + Unpin,
    mut writing: impl AsyncWrite + Unpin,
    id: SessionId,
    proof: Proof,
    arrivals: &mpsc::Sender<ProgramArrival>,
) {
    let (lines, mut given) = mpsc::unbounded_channel::<String>();
    let waiting = Arc::new(AtomicUsize::new(0));
    let opened = ProgramArrival::Opened { id, proof, lines: Lines { lines, waiting: waiting.clone() } };
    if arrivals.send(opened).await.is_err() {
        return;
    }
    let mut reader = BufReader::new(reading);
    let reading = async {
        let mut allowed = Bucket::new(REQUESTS.0, REQUESTS.1, now());
        loop {
            let text = match read_line(&mut reader).await {
                Ok(Some(text)) => text,
                Ok(None) => return None,
                Err(error) => return Some(error.to_string()),
            };
            while !allowed.take(ByteCount::new(text.len() as u64 + 1), now()) {
                sleep(Duration::from_millis(50)).await;
            }
            if arrivals.send(ProgramArrival::Line { id, text }).await.is_err() {
                return None;
            }
        }
    };
    let writer = async {
        while let Some(line) = given.recv().await {
            let written = async {
                writing.write_all(line.as_bytes()).await?;
                writing.flush().await
            };
            if !matches!(timeout(HANDSHAKE, written).await, Ok(Ok(()))) {
                return;
            }
            waiting.fetch_sub(line.len(), Ordering::Relaxed);
        }
    };
    let reason = tokio::select! {
        reason = reading => reason,
        () = writer => None,
    };
    if let Some(reason) = reason {
        let _ = timeout(HANDSHAKE, writing.write_all(Say::Bye { reason }.line().as_bytes())).await;
    }
    let _ = timeout(HANDSHAKE, writing.shutdown()).await;
    // A socket that is closed with bytes unread resets the connection, and the last words with it.
    let _ = timeout(LAST_WORDS, tokio::io::copy(&mut reader.take(MAX_UNREAD), &mut tokio::io::sink())).await;
}

/// The programs that are connected.
pub(super) struct Programs {
    sfnet: Sfnet,
    sessions: BTreeMap<SessionId, Lines>,
    next_loads: Time,
}

impl Programs {
    /// Programs with the services and rights of a configuration; `None`: it serves none.
    pub(super) fn new(config: &ControllerConfig) -> Option<Self> {
        let (settings, rights) = (config.sfnet.as_ref()?, config.rights()?);
        let mut sfnet = Sfnet::new(rights);
        all(settings.groups.clone()).into_iter().for_each(|service| sfnet.add_service(service));
        Some(Self { sfnet, sessions: BTreeMap::new(), next_loads: now() })
    }

    /// Other rights come into force.
    pub(super) fn configure(&mut self, controller: &mut Controller, config: &ControllerConfig) {
        if let Some(rights) = config.rights() {
            self.sfnet.configure(now(), controller, rights);
        }
    }

    pub(super) fn on_arrival(&mut self, controller: &mut Controller, arrival: ProgramArrival) {
        match arrival {
            ProgramArrival::Opened { id, proof, lines } => {
                self.sessions.insert(id, lines);
                self.sfnet.opened(now(), controller, id, proof);
            }
            ProgramArrival::Line { id, text } => self.sfnet.line(now(), controller, id, &text),
            ProgramArrival::Closed { id } => {
                self.sessions.remove(&id);
                self.sfnet.closed(now(), controller, id);
            }
        }
    }

    pub(super) fn event(&mut self, controller: &mut Controller, event: &Event) {
        self.sfnet.event(now(), controller, event);
    }

    pub(super) fn reserved(&mut self, controller: &mut Controller, host: Mac, reservation: &Reservation) {
        self.sfnet.reserved(now(), controller, host, reservation);
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.sfnet.poll_timeout()
    }

    /// Does what is due, and passes on what programs are told.
    pub(super) fn pump(&mut self, controller: &mut Controller) {
        if now() >= self.next_loads {
            self.next_loads = now() + LOADS;
            self.sfnet.measured(now(), controller);
        }
        if self.sfnet.poll_timeout().is_some_and(|due| due <= now()) {
            self.sfnet.handle_timeout(now(), controller);
        }
        self.sfnet.advance(now(), controller);
        while let Some((id, out)) = self.sfnet.poll_output() {
            let is_cut_off = match (self.sessions.get(&id), out) {
                (Some(lines), Out::Say(say)) => !lines.push(say.line()),
                (_, Out::Close) => true,
                (None, _) => false,
            };
            if is_cut_off {
                // Without a sender the task ends once all is written.
                self.sessions.remove(&id);
                self.sfnet.closed(now(), controller, id);
            }
        }
    }
}
