//! Takes the connections and datagrams that the programs turn to the daemon.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aya::maps::{Array, HashMap, MapData};
use braid_model::Time;
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::{BpfSteering, convert, failed, take_map};
use crate::linux::netlink::{LOOPBACK_PREFIX, own_loopback_prefix};
use crate::linux::sockdiag;
use crate::linux::sys::{abi, datagram};
use braid_control::steering::{RedirectedFlow, SteeringError};

/// What was sent before its socket was closed waits this long for the daemon.
const RELEASED_FOR: Duration = Duration::from_secs(10);
/// A connect that sends nothing holds its place this long.
const SILENT_FOR: Duration = Duration::from_secs(10);
/// Nothing arrives after this: the kernel gives a handshake up by then.
const AT_MOST: Duration = Duration::from_secs(180);

/// All exchanges are looked at for a stranger's datagram no more often than this: it takes milliseconds.
const DUMP_PAUSE: Duration = Duration::from_millis(100);
/// What an unconnected socket sends to one remote is forgotten after this long without a datagram from it.
const UNCONNECTED_FOR: Duration = Duration::from_secs(120);

/// A connection that was redirected to the daemon.
#[derive(Debug)]
pub struct Redirected {
    /// To the program.
    pub stream: TcpStream,
    /// Who wanted to go where.
    pub flow: RedirectedFlow,
}

/// What may be redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taking {
    /// Nothing: all go direct.
    Nothing,
    /// Connections.
    Connections,
    /// Connections and datagrams.
    All,
}

/// Identifies an exchange of redirected datagrams: one connected socket, or one remote of an unconnected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExchangeKey {
    /// Where its datagrams come to.
    near: IpAddr,
    /// The program's socket.
    far: SocketAddr,
}

/// A datagram that was redirected to the daemon.
#[derive(Debug)]
pub struct Datagram {
    /// The exchange it belongs to.
    pub exchange: ExchangeKey,
    /// Its length; what of it is beyond the buffer is lost.
    pub length: usize,
    /// With the first of an exchange: who sends it, and where to.
    pub flow: Option<RedirectedFlow>,
}

/// What will not come any more.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Connections that were redirected and never came.
    pub connections: usize,
    /// Exchanges that have ended, of those that were told.
    pub exchanges: Vec<ExchangeKey>,
}

/// Where redirected flows arrive. Nothing is redirected before [`set_ready`](Self::set_ready), nor after this is dropped.
pub struct Redirect {
    v4: TcpListener,
    /// For sockets that take no IPv4; `None` without IPv6.
    v6: Option<TcpListener>,
    datagrams4: UdpSocket,
    /// `None` without IPv6.
    datagrams6: Option<UdpSocket>,
    ports: abi::Redirection,
    maps: Mutex<Maps>,
}

struct Maps {
    switch: Array<MapData, abi::Redirection>,
    arrivals: HashMap<MapData, u32, abi::Arrival>,
    sources6: Array<MapData, u32>,
    exchanges: HashMap<MapData, u32, abi::Arrival>,
    exchange_keys: HashMap<MapData, abi::DatagramKey, u32>,
    heavy_users: HashMap<MapData, u32, u32>,
    shares: HashMap<MapData, u32, abi::Share>,
    /// Exchanges whose sender has been looked at, with their keys.
    known: BTreeMap<ExchangeKey, (u32, u64)>,
    /// The other way round: from where each exchange was heard last.
    heard: BTreeMap<u32, ExchangeKey>,
    /// Exchanges that are heard from elsewhere by now, until they are told.
    moved: Vec<ExchangeKey>,
    /// When all exchanges were looked at last for a stranger's datagram.
    dumped: Option<Instant>,
}

impl BpfSteering {
    /// Opens the listeners for redirected flows, in this process's network namespace; once in the life of the programs. Must be
    /// called inside a tokio runtime.
    ///
    /// The listeners are bound to the loopback device, so that nothing from outside reaches them, and carry no mark: their packets must
    /// follow the system's rules for the loopback, not a link's.
    pub fn redirect(&mut self) -> Result<Redirect, SteeringError> {
        const ACTION: &str = "open the listener for redirected connections";
        let fail = |reason: String| SteeringError { action: ACTION, reason };
        let refused = |error: io::Error| {
            fail(format!("{error}; it needs the loopback device up (ip link set lo up), without it all connections go direct"))
        };
        let v4 = listener((Ipv4Addr::UNSPECIFIED, 0).into()).map_err(refused)?;
        let v6 = listener((Ipv6Addr::LOCALHOST, 0).into()).ok();
        let datagrams4 = datagram_socket((Ipv4Addr::UNSPECIFIED, 0).into()).map_err(refused)?;
        datagram::tell_destinations(datagrams4.as_fd(), false).map_err(refused)?;
        let datagrams6 = if v6.is_some() { datagrams6() } else { None };
        let port = |listener: &TcpListener| listener.local_addr().map(|addr| addr.port());
        let datagram_port = |socket: &UdpSocket| socket.local_addr().map(|addr| addr.port());
        let mut ports = abi::Redirection {
            port4: port(&v4).map_err(refused)?,
            port6: v6.as_ref().map_or(Ok(0), port).map_err(refused)?,
            datagrams4: datagram_port(&datagrams4).map_err(refused)?,
            datagrams6: datagrams6.as_ref().map_or(Ok(0), datagram_port).map_err(refused)?,
        };
        if !owners_are_told(ports.datagrams4) {
            tracing::warn!("datagrams are not redirected: the kernel does not tell whose they are; it needs CONFIG_INET_UDP_DIAG");
            (ports.datagrams4, ports.datagrams6) = (0, 0);
        }
        // Proves that the loopback is up.
        std::net::TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, ports.port4).into(), Duration::from_secs(1)).map_err(refused)?;
        let mut map = |name| take_map(&mut self.ebpf, name).map_err(|error| fail(error.to_string()));
        let maps = Maps {
            switch: Array::try_from(map("redirection")?).map_err(failed(ACTION))?,
            arrivals: HashMap::try_from(map("arrivals")?).map_err(failed(ACTION))?,
            sources6: Array::try_from(map("sources6")?).map_err(failed(ACTION))?,
            exchanges: HashMap::try_from(map("exchanges")?).map_err(failed(ACTION))?,
            exchange_keys: HashMap::try_from(map("exchange_keys")?).map_err(failed(ACTION))?,
            heavy_users: HashMap::try_from(map("heavy_users")?).map_err(failed(ACTION))?,
            shares: HashMap::try_from(map("shares")?).map_err(failed(ACTION))?,
            known: BTreeMap::new(),
            heard: BTreeMap::new(),
            moved: Vec::new(),
            dumped: None,
        };
        Ok(Redirect { v4, v6, datagrams4, datagrams6, ports, maps: Mutex::new(maps) })
    }
}

impl Redirect {
    /// Lets flows be redirected from now on, or has them go direct. What was redirected already stays, but what unconnected sockets
    /// send goes direct from the next datagram.
    pub fn set_ready(&self, taking: Taking) -> Result<(), SteeringError> {
        let ports = match taking {
            Taking::Nothing => abi::Redirection::default(),
            Taking::Connections => abi::Redirection { datagrams4: 0, datagrams6: 0, ..self.ports },
            Taking::All => self.ports,
        };
        self.maps().switch.set(0, ports, 0).map_err(failed("switch redirection"))
    }

    /// A user has as many redirected flows as it may have, and its next ones go direct; or it has not any more. At most 1,024 users: more is an
    /// error.
    pub fn set_heavy(&self, user: u32, heavy: bool) -> Result<(), SteeringError> {
        let users = &mut self.maps().heavy_users;
        match heavy {
            true => users.insert(user, 1, 0).map_err(failed("let a user's flows go direct")),
            // It may not have found room.
            false => {
                let _ = users.remove(&user);
                Ok(())
            }
        }
    }

    /// The next redirected connection. Whatever else comes to the listeners is closed without a word. Nothing is lost when the future is
    /// dropped.
    ///
    /// An error is the system's, such as too many open files: wait a little and call again.
    pub async fn accept(&self) -> io::Result<Redirected> {
        loop {
            let v6 = async {
                match &self.v6 {
                    Some(listener) => listener.accept().await,
                    None => std::future::pending().await,
                }
            };
            let accepted = tokio::select! {
                accepted = self.v4.accept() => accepted,
                accepted = v6 => accepted,
            };
            let (stream, peer) = match accepted {
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                other => other?,
            };
            if let Some(flow) = stream.local_addr().ok().and_then(|local| self.claim(local, peer)) {
                return Ok(Redirected { stream, flow });
            }
        }
    }

    /// The next redirected datagram. Whatever else comes is dropped. Nothing is lost when the future is dropped.
    pub async fn receive(&self, buffer: &mut [u8]) -> io::Result<Datagram> {
        loop {
            // Waiting for readiness and `try_io` cost no budget: strangers' datagrams could keep all other tasks from running.
            tokio::task::coop::consume_budget().await;
            let v6 = async {
                match &self.datagrams6 {
                    Some(socket) => socket.readable().await.map(|()| socket),
                    None => std::future::pending().await,
                }
            };
            // Whichever is ready, at random where both are.
            let socket = tokio::select! {
                ready = self.datagrams4.readable() => ready.map(|()| &self.datagrams4)?,
                ready = v6 => ready?,
            };
            match socket.try_io(Interest::READABLE, || datagram::receive(socket.as_fd(), buffer)) {
                Ok((length, far, near)) => {
                    let exchange = ExchangeKey { near, far };
                    if let Some(flow) = self.recognise(exchange) {
                        return Ok(Datagram { exchange, length, flow });
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a datagram to an exchange's program, which sees it come from where it sent to. Does not block: an error of the kind
    /// `WouldBlock` means that it was dropped for want of room.
    pub fn answer(&self, exchange: &ExchangeKey, payload: &[u8]) -> io::Result<()> {
        let socket = match exchange.near {
            IpAddr::V4(_) => &self.datagrams4,
            IpAddr::V6(_) => self.datagrams6.as_ref().ok_or(io::ErrorKind::NotConnected)?,
        };
        socket.try_io(Interest::WRITABLE, || datagram::send(socket.as_fd(), exchange.near, exchange.far, payload))
    }

    /// What forwarded an exchange is gone, and its program need not know: its next datagram is told with its flow again, as its first was.
    pub fn renew(&self, exchange: &ExchangeKey) {
        self.maps().known.remove(exchange);
    }

    /// Forgets what will not arrive any more, and tells the exchanges that have ended. To be called every few seconds.
    pub fn sweep(&self, now: Time) -> Result<Swept, SteeringError> {
        const ACTION: &str = "forget redirected flows that are over";
        // The device may have been down in between.
        if self.datagrams6.is_some()
            && let Err(error) = own_loopback_prefix()
        {
            tracing::debug!("{error}");
        }
        let mut maps = self.maps();
        let age = |since: u64| now.since(Time::from_nanos(since));
        // One that is being written has no start yet.
        let over = |arrival: &abi::Arrival| {
            let released = arrival.released != 0 && age(arrival.released) > RELEASED_FOR;
            let silent = arrival.source_port == 0 && age(arrival.started) > SILENT_FOR;
            arrival.started != 0 && (released || silent || age(arrival.started) > AT_MOST)
        };
        let ended = |exchange: &abi::Arrival| {
            let patience = if exchange.flags & abi::arrival::UNCONNECTED != 0 { UNCONNECTED_FOR } else { RELEASED_FOR };
            exchange.started != 0 && exchange.released != 0 && age(exchange.released) > patience
        };
        let mut swept = Swept::default();
        let gone: Vec<_> = maps.arrivals.iter().filter_map(Result::ok).filter(|(_, arrival)| over(arrival)).collect();
        for (key, _) in gone {
            swept.connections += usize::from(maps.arrivals.remove(&key).is_ok());
        }
        let gone: Vec<_> = maps.exchanges.iter().filter_map(Result::ok).filter(|(_, exchange)| ended(exchange)).collect();
        for (key, exchange) in gone {
            maps.exchanges.remove(&key).map_err(failed(ACTION))?;
            // One that is connected over IPv4 has none.
            let _ = maps.exchange_keys.remove(&exchange_key(&exchange));
        }
        let Maps { exchanges, known, heard, moved, .. } = &mut *maps;
        let lives = |key: &u32, socket: u64| exchanges.get(key, 0).is_ok_and(|exchange| exchange.socket == socket);
        swept.exchanges = std::mem::take(moved);
        known.retain(|exchange, (key, socket)| {
            let lives = lives(key, *socket);
            if !lives {
                swept.exchanges.push(*exchange);
            }
            lives
        });
        heard.retain(|key, exchange| known.get(exchange).is_some_and(|(of, _)| of == key));
        maps.count_shares().map_err(failed(ACTION))?;
        Ok(swept)
    }

    /// How many connections have been redirected and not been taken.
    pub fn waiting(&self) -> usize {
        self.maps().arrivals.keys().filter_map(Result::ok).count()
    }

    /// Takes the entry of the connection between these two, if it is the one that the programs redirected here.
    fn claim(&self, local: SocketAddr, peer: SocketAddr) -> Option<RedirectedFlow> {
        let mut maps = self.maps();
        let (key, source) = match (local.ip(), peer.ip()) {
            (IpAddr::V4(local), IpAddr::V4(peer)) => (u32::from_ne_bytes(local.octets()), u32::from_ne_bytes(peer.octets())),
            (IpAddr::V6(_), IpAddr::V6(Ipv6Addr::LOCALHOST)) => (maps.sources6.get(&u32::from(peer.port()), 0).ok()?, 0),
            _ => return None,
        };
        let arrival = maps.arrivals.get(&key, 0).ok()?;
        if arrival.source_port != peer.port() || arrival.source != source {
            return None;
        }
        maps.arrivals.remove(&key).ok()?;
        maps.give_back(arrival.user);
        Some(convert::redirected(&arrival))
    }

    /// Whether a datagram is of an exchange that the programs redirected here; with the first of one, whose it is.
    fn recognise(&self, exchange: ExchangeKey) -> Option<Option<RedirectedFlow>> {
        let mut maps = self.maps();
        if let Some((key, socket)) = maps.known.get(&exchange)
            && maps.exchanges.get(key, 0).is_ok_and(|entry| entry.socket == *socket && !is_closed(&entry))
        {
            return Some(None);
        }
        let (key, arrival) = maps.sender(exchange, self.ports)?;
        maps.known.insert(exchange, (key, arrival.socket));
        // A socket has one address at a time: what it had before is over, or one exchange could be told as many.
        if let Some(before) = maps.heard.insert(key, exchange).filter(|before| *before != exchange) {
            maps.known.remove(&before);
            maps.moved.push(before);
        }
        Some(Some(convert::redirected(&arrival)))
    }

    fn maps(&self) -> MutexGuard<'_, Maps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Maps {
    /// A user's connection has arrived, and is reserved no more. What the programs reserve in the same moment may be lost: `count_shares` sets it
    /// right.
    fn give_back(&mut self, user: u32) {
        if let Ok(share) = self.shares.get(&user, 0) {
            let _ = self.shares.insert(user, abi::Share { arrivals: share.arrivals.saturating_sub(1), ..share }, 0);
        }
    }

    /// Counts anew what each user has reserved.
    fn count_shares(&mut self) -> Result<(), aya::maps::MapError> {
        let mut counted = BTreeMap::<u32, abi::Share>::new();
        for (_, arrival) in self.arrivals.iter().filter_map(Result::ok).filter(|(_, arrival)| arrival.started != 0) {
            counted.entry(arrival.user).or_default().arrivals += 1;
        }
        for (_, exchange) in self.exchanges.iter().filter_map(Result::ok).filter(|(_, exchange)| exchange.started != 0) {
            counted.entry(exchange.user).or_default().exchanges += 1;
        }
        let users: Vec<u32> = self.shares.keys().filter_map(Result::ok).collect();
        for user in users {
            match counted.get(&user) {
                Some(share) => self.shares.insert(user, *share, 0)?,
                None => drop(self.shares.remove(&user)),
            }
        }
        Ok(())
    }

    /// The entry of an exchange, if its datagram came from the socket that it is of: by asking the kernel for the sender, or, where that is
    /// closed, by what the programs noted then.
    fn sender(&mut self, exchange: ExchangeKey, ports: abi::Redirection) -> Option<(u32, abi::Arrival)> {
        // Nobody's: seen before the kernel is asked for the sender, which takes several calls.
        if addressed(exchange.near).is_some_and(|key| self.exchanges.get(&key, 0).is_err()) {
            return None;
        }
        let port = if exchange.near.is_ipv4() { ports.datagrams4 } else { ports.datagrams6 };
        let owner = sockdiag::udp_owner(exchange.far, SocketAddr::new(exchange.near, port)).ok()?;
        let entry = match (addressed(exchange.near), owner) {
            (Some(key), _) => Some((key, self.exchanges.get(&key, 0).ok()?)),
            (None, Some(socket)) => {
                let key = self.exchange_keys.get(&abi::DatagramKey { socket, ..Default::default() }, 0).ok()?;
                Some((key, self.exchanges.get(&key, 0).ok()?))
            }
            (None, None) => self.closed(exchange.far),
        };
        entry.filter(|(_, entry)| owner.map_or_else(|| closed_at(entry, exchange.far), |socket| socket == entry.socket))
    }
}

impl Maps {
    /// The exchange at ::1 whose socket had this address and is closed. All exchanges are looked at for it, so that it is not done for every
    /// datagram of strangers: what a closed socket sent last may be lost meanwhile.
    fn closed(&mut self, far: SocketAddr) -> Option<(u32, abi::Arrival)> {
        if self.dumped.is_some_and(|dumped| dumped.elapsed() < DUMP_PAUSE) {
            return None;
        }
        let found = self.exchanges.iter().filter_map(Result::ok).find(|(_, entry)| closed_at(entry, far));
        // One that is found will be asked for again by nobody else.
        if found.is_none() {
            self.dumped = Some(Instant::now());
        }
        found
    }
}

/// The key of the exchange that this loopback address is of; `None`: it is shared (::1).
fn addressed(near: IpAddr) -> Option<u32> {
    match near {
        IpAddr::V4(near) => Some(u32::from_ne_bytes(near.octets())),
        IpAddr::V6(near) if LOOPBACK_PREFIX.contains(&IpAddr::V6(near)) => {
            let [.., a, b, c, d] = near.octets();
            Some(u32::from_ne_bytes([a, b, c, d]))
        }
        IpAddr::V6(_) => None,
    }
}

/// Whether the exchange's socket was closed: its port may be another's by now.
fn is_closed(entry: &abi::Arrival) -> bool {
    entry.source_port != 0
}

/// Whether the exchange's socket was closed, and had this address.
fn closed_at(entry: &abi::Arrival, far: SocketAddr) -> bool {
    let source = match far.ip() {
        IpAddr::V4(v4) => u32::from_ne_bytes(v4.octets()),
        IpAddr::V6(_) => 0,
    };
    entry.source_port == far.port() && entry.source == source
}

/// What `exchange_keys` has of an exchange, if anything.
fn exchange_key(exchange: &abi::Arrival) -> abi::DatagramKey {
    let key = abi::DatagramKey { socket: exchange.socket, ..Default::default() };
    if exchange.flags & abi::arrival::UNCONNECTED == 0 {
        return key;
    }
    abi::DatagramKey { remote: exchange.remote, port: exchange.port.into(), ..key }
}

impl Drop for Redirect {
    fn drop(&mut self) {
        if let Err(error) = self.set_ready(Taking::Nothing) {
            tracing::warn!("{error}: new connections may be refused until Braid ends");
        }
    }
}

/// A listener on the loopback device, alone with its port: without `SO_REUSEADDR` nobody can bind a more specific address to it.
fn listener(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None)?;
    socket.bind_device(Some(b"lo"))?;
    socket.bind(&addr.into())?;
    socket.listen(abi::MAX_ARRIVALS as i32)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

/// The socket for IPv6 datagrams, and the addresses that it needs.
fn datagrams6() -> Option<UdpSocket> {
    if let Err(error) = own_loopback_prefix() {
        tracing::warn!("IPv6 datagrams are not redirected: {error}");
        return None;
    }
    let socket = datagram_socket((Ipv6Addr::UNSPECIFIED, 0).into()).ok()?;
    datagram::tell_destinations(socket.as_fd(), true).ok().map(|()| socket)
}

/// A socket for datagrams, likewise.
fn datagram_socket(addr: SocketAddr) -> io::Result<UdpSocket> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::DGRAM, None)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind_device(Some(b"lo"))?;
    socket.bind(&addr.into())?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket.into())
}

/// Whether the kernel says whose a datagram is: tried with a socket of our own.
fn owners_are_told(port: u16) -> bool {
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let own = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr().map(|addr| (socket, addr)));
    own.is_ok_and(|(_socket, addr)| sockdiag::udp_owner(addr, to).is_ok_and(|owner| owner.is_some()))
}
