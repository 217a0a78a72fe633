//! Receives the connections and datagrams that the BPF programs redirect to the daemon.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aya::maps::{Array, HashMap, MapData};
use braid_model::{PerFamily, Time};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::{BpfSteering, convert, failed, take_map};
use crate::linux::client_sockets::ClientSockets;
use crate::linux::netlink::{LOOPBACK_PREFIX, own_loopback_prefix};
use crate::linux::sockdiag;
use crate::linux::sys::{abi, datagram};
use crate::linux::worker::{Question, Worker, pause};
use braid_control::steering::{RedirectedFlow, SteeringError};

/// How long the daemon can still receive what a socket sent before it was closed.
const RELEASED_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connect whose handshake has not been answered keeps its map entry.
const SILENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum age of an entry: by then the kernel has given up the handshake.
const MAX_AGE: Duration = Duration::from_secs(180);

/// Minimum pause between two scans of all exchanges for a datagram of an unknown socket, because a scan takes milliseconds.
const DUMP_PAUSE: Duration = Duration::from_millis(100);
/// How long the start waits for the kernel to name a datagram's socket.
const START_WAIT: Duration = Duration::from_secs(1);
/// How long the first datagram of an exchange waits for that.
const OWNER_WAIT: Duration = Duration::from_millis(250);
/// Maximum number of exchanges whose first datagrams wait for that.
const MAX_LOOKUPS: usize = 16;
/// Idle time after which the exchange between an unconnected socket and one remote ends.
const UNCONNECTED_TIMEOUT: Duration = Duration::from_secs(120);

/// A connection that was redirected to the daemon.
#[derive(Debug)]
pub struct Redirected {
    /// Stream to the program.
    pub stream: TcpStream,
    /// Application and destination of the flow.
    pub flow: RedirectedFlow,
}

/// Kinds of flows that may be redirected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taking {
    /// No flows: all go direct.
    Nothing,
    /// Connections.
    Connections,
    /// Connections and datagrams.
    All,
}

/// Identifies an exchange of redirected datagrams: one connected socket, one remote address of an unconnected socket, or one exchange of a client of the
/// gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExchangeKey {
    /// Local loopback address at which its datagrams arrive; for a client, the remote address.
    near: IpAddr,
    /// Address of the program's or client's socket.
    far: SocketAddr,
    /// The remote port, for a client.
    port: Option<u16>,
}

impl ExchangeKey {
    /// The exchange of a client with a remote address.
    pub fn of_client(client: SocketAddr, remote: SocketAddr) -> Self {
        Self { near: remote.ip(), far: client, port: Some(remote.port()) }
    }

    /// The client and the remote address, for an exchange of a client.
    pub fn client(&self) -> Option<(SocketAddr, SocketAddr)> {
        Some((self.far, SocketAddr::new(self.near, self.port?)))
    }
}

/// A datagram that was redirected to the daemon.
#[derive(Debug)]
pub struct Datagram {
    /// Exchange that the datagram belongs to.
    pub exchange: ExchangeKey,
    /// Length in bytes. The part beyond the buffer is lost.
    pub length: usize,
    /// Application and destination, with the first datagram of an exchange.
    pub flow: Option<RedirectedFlow>,
}

/// Entries that a sweep removed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Number of connections that were redirected but never arrived.
    pub connections: usize,
    /// Ended exchanges, of those that [`receive`](Redirect::receive) returned.
    pub exchanges: Vec<ExchangeKey>,
}

/// Receives redirected flows. Nothing is redirected before [`set_ready`](Self::set_ready), nor after this is dropped.
pub struct Redirect {
    v4: TcpListener,
    /// For sockets that accept no IPv4; `None` without IPv6.
    v6: Option<TcpListener>,
    datagrams4: UdpSocket,
    /// `None` without IPv6.
    datagrams6: Option<UdpSocket>,
    ports: abi::Redirection,
    /// Asks the kernel for the sockets of datagrams, which may have to wait for another program.
    owners: Worker,
    lookups: Mutex<Vec<Lookup>>,
    maps: Mutex<Maps>,
    /// Sockets for clients of the gateway, and whether the BPF programs hand flows to them.
    clients: Option<ClientSockets>,
    takes_clients: AtomicBool,
    /// Families in which packets of other protocols are taken from clients: bit 0 IPv4, bit 1 IPv6.
    takes_packets: AtomicU16,
}

/// The first datagram of an exchange, which waits until the kernel has named its socket.
struct Lookup {
    exchange: ExchangeKey,
    payload: Vec<u8>,
    /// Length in bytes, which may be longer than the payload.
    length: usize,
    /// Cookie of the socket that sent it; `None` if it is closed.
    owner: Question<io::Result<Option<u64>>>,
}

struct Maps {
    switch: Array<MapData, abi::Redirection>,
    arrivals: HashMap<MapData, u32, abi::Arrival>,
    sources6: Array<MapData, u32>,
    exchanges: HashMap<MapData, u32, abi::Arrival>,
    exchange_keys: HashMap<MapData, abi::DatagramKey, u32>,
    heavy_users: HashMap<MapData, u32, u32>,
    shares: HashMap<MapData, u32, abi::Share>,
    packet_bypass: HashMap<MapData, abi::Address, u32>,
    /// Exchanges whose sender has been verified, with their map keys and socket cookies.
    known: BTreeMap<ExchangeKey, (u32, u64)>,
    /// Reverse index: the exchange from which each map entry last received a datagram.
    last_exchanges: BTreeMap<u32, ExchangeKey>,
    /// Exchanges whose socket has changed its address, until the next sweep reports them.
    moved: Vec<ExchangeKey>,
    /// Time of the last scan of all exchanges for a datagram of an unknown socket.
    dumped: Option<Instant>,
}

impl BpfSteering {
    /// Opens the listeners for redirected flows in this process's network namespace. Call it at most once for each instance of the programs, inside a
    /// tokio runtime.
    ///
    /// The listeners are bound to the loopback device, so that nothing from outside reaches them. They carry no mark, because their packets must
    /// follow the system's rules for loopback, not a link's.
    pub fn redirect(&mut self) -> Result<Redirect, SteeringError> {
        const ACTION: &str = "open the listener for redirected connections";
        let fail = |reason: String| SteeringError { action: ACTION, reason };
        let refused = |error: io::Error| {
            fail(format!("{error}; set the loopback device up (ip link set lo up); without it all connections go direct"))
        };
        let v4 = listener((Ipv4Addr::UNSPECIFIED, 0).into()).map_err(refused)?;
        let v6 = listener((Ipv6Addr::LOCALHOST, 0).into()).ok();
        let datagrams4 = datagram_socket((Ipv4Addr::UNSPECIFIED, 0).into()).map_err(refused)?;
        datagram::report_destinations(datagrams4.as_fd(), false).map_err(refused)?;
        let datagrams6 = if v6.is_some() { datagrams6() } else { None };
        let port = |listener: &TcpListener| listener.local_addr().map(|addr| addr.port());
        let datagram_port = |socket: &UdpSocket| socket.local_addr().map(|addr| addr.port());
        let mut ports = abi::Redirection {
            port4: port(&v4).map_err(refused)?,
            port6: v6.as_ref().map_or(Ok(0), port).map_err(refused)?,
            datagrams4: datagram_port(&datagrams4).map_err(refused)?,
            datagrams6: datagrams6.as_ref().map_or(Ok(0), datagram_port).map_err(refused)?,
            ..Default::default()
        };
        if !can_find_owners(ports.datagrams4) {
            tracing::warn!("datagrams are not redirected: the kernel cannot report their sockets; it needs CONFIG_INET_UDP_DIAG");
            (ports.datagrams4, ports.datagrams6) = (0, 0);
        }
        // Verifies that the loopback device is up.
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
            packet_bypass: HashMap::try_from(map("packet_bypass")?).map_err(failed(ACTION))?,
            known: BTreeMap::new(),
            last_exchanges: BTreeMap::new(),
            moved: Vec::new(),
            dumped: None,
        };
        let owners = Worker::new("braid-owners", MAX_LOOKUPS);
        Ok(Redirect {
            v4,
            v6,
            datagrams4,
            datagrams6,
            ports,
            owners,
            lookups: Mutex::default(),
            maps: Mutex::new(maps),
            clients: None,
            takes_clients: AtomicBool::new(false),
            takes_packets: AtomicU16::new(0),
        })
    }
}

impl Redirect {
    /// Sets which flows are redirected from now on. Flows that are already redirected stay so, except that the datagrams of unconnected sockets go
    /// direct from the next one on if datagrams are no longer redirected.
    pub fn set_ready(&self, taking: Taking) -> Result<(), SteeringError> {
        let ports = match taking {
            Taking::Nothing => abi::Redirection::default(),
            Taking::Connections => abi::Redirection { datagrams4: 0, datagrams6: 0, ..self.ports },
            Taking::All => self.ports,
        };
        let takes = taking == Taking::All && self.takes_clients.load(Ordering::Relaxed);
        let sockets = self.clients.as_ref().filter(|_| takes).map(ClientSockets::ports).unwrap_or_default();
        let port = |ports: PerFamily<Option<u16>>| [ports.v4, ports.v6].map(Option::unwrap_or_default);
        let (clients, client_datagrams) = (port(sockets.connections), port(sockets.datagrams));
        let packets = self.takes_packets.load(Ordering::Relaxed);
        let redirection = abi::Redirection { packets, clients, client_datagrams, ..ports };
        self.maps().switch.set(0, redirection, 0).map_err(failed("switch redirection"))
    }

    /// Opens the sockets for clients of the gateway. Call it at most once, inside a tokio runtime.
    pub fn open_for_clients(&mut self) -> io::Result<()> {
        self.clients = Some(ClientSockets::open()?);
        Ok(())
    }

    /// The sockets for clients of the gateway, if they are open.
    pub fn clients(&self) -> Option<&ClientSockets> {
        self.clients.as_ref()
    }

    /// Sets whether flows of clients are handed to the daemon, from the next [`set_ready`](Self::set_ready) on. The firewall rules must be in place.
    pub fn take_clients(&self, takes: bool) {
        self.takes_clients.store(takes && self.clients.is_some(), Ordering::Relaxed);
    }

    /// Sets in which families packets of clients, of protocols other than TCP and UDP, are sent over the device of packets, from the next
    /// [`set_ready`](Self::set_ready) on. The firewall and routing rules must be in place.
    pub fn take_packets(&self, families: PerFamily<bool>) {
        self.takes_packets.store(u16::from(families.v4) | u16::from(families.v6) << 1, Ordering::Relaxed);
    }

    /// Sets whether packets of clients to this address go direct, because the relay refuses it. Holds at most 512 addresses; more are an error.
    pub fn let_packets_bypass(&self, host: IpAddr, bypass: bool) -> Result<(), SteeringError> {
        let key = abi::Address { word: convert::mapped(host) };
        let hosts = &mut self.maps().packet_bypass;
        match bypass {
            true => hosts.insert(key, 1, 0).map_err(failed("let packets to a refused address go direct")),
            // The entry may be missing, because the map may have been full.
            false => {
                let _ = hosts.remove(&key);
                Ok(())
            }
        }
    }

    /// Marks a user that has reached its limit of redirected flows, so that its next flows go direct, or clears the mark. Holds at most 1,024 users;
    /// marking more is an error.
    pub fn set_heavy(&self, user: u32, heavy: bool) -> Result<(), SteeringError> {
        let users = &mut self.maps().heavy_users;
        match heavy {
            true => users.insert(user, 1, 0).map_err(failed("let a user's flows go direct")),
            // The entry may be missing, because the map may have been full.
            false => {
                let _ = users.remove(&user);
                Ok(())
            }
        }
    }

    /// Returns the next redirected connection. Connections that were not redirected are closed silently. Cancel safe.
    ///
    /// # Errors
    /// Errors of the system, such as too many open files. Wait a little and call again.
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

    /// Returns the next redirected datagram. Datagrams that were not redirected are dropped. If this is cancelled, a datagram may be lost.
    ///
    /// The first datagram of an exchange waits until the kernel has named its socket. Those of other exchanges do not wait for it, because a program can
    /// delay the kernel's answer.
    pub async fn receive(&self, buffer: &mut [u8]) -> io::Result<Datagram> {
        let mut looks = 0;
        loop {
            // `readable` and `try_io` do not consume the cooperative budget. Without this, foreign datagrams could starve all other tasks.
            tokio::task::coop::consume_budget().await;
            if let Some(datagram) = self.take_recognised(buffer) {
                return Ok(datagram);
            }
            let looks_again = !self.lookups().is_empty();
            let v6 = async {
                match &self.datagrams6 {
                    Some(socket) => socket.readable().await.map(|()| socket),
                    None => std::future::pending().await,
                }
            };
            // Takes the ready socket, at random if both are ready.
            let socket = tokio::select! {
                ready = self.datagrams4.readable() => ready.map(|()| &self.datagrams4)?,
                ready = v6 => ready?,
                () = pause(looks), if looks_again => {
                    looks += 1;
                    continue;
                }
            };
            match socket.try_io(Interest::READABLE, || datagram::receive(socket.as_fd(), buffer)) {
                Ok((length, far, near)) => {
                    let exchange = ExchangeKey { near, far, port: None };
                    if self.maps().knows(exchange) {
                        return Ok(Datagram { exchange, length, flow: None });
                    }
                    looks = 0;
                    self.look_up(exchange, &buffer[..length.min(buffer.len())], length);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a datagram to the program of an exchange. The program sees the address it sent to as the source. Does not block: an error of kind
    /// `WouldBlock` means that the datagram was dropped because the socket buffer is full.
    pub fn answer(&self, exchange: &ExchangeKey, payload: &[u8]) -> io::Result<()> {
        if let Some((client, remote)) = exchange.client() {
            return self.clients.as_ref().ok_or(io::ErrorKind::NotConnected)?.answer(client, remote, payload);
        }
        let socket = match exchange.near {
            IpAddr::V4(_) => &self.datagrams4,
            IpAddr::V6(_) => self.datagrams6.as_ref().ok_or(io::ErrorKind::NotConnected)?,
        };
        socket.try_io(Interest::WRITABLE, || datagram::send(socket.as_fd(), exchange.near, exchange.far, payload))
    }

    /// Removes the verified sender of an exchange, because its forwarder is gone. The next datagram is returned with its flow again, like the first.
    /// The program does not notice.
    pub fn renew(&self, exchange: &ExchangeKey) {
        self.maps().known.remove(exchange);
    }

    /// Removes the entries of flows that will not arrive any more, and returns the exchanges that have ended. Call it every few seconds.
    pub fn sweep(&self, now: Time) -> Result<Swept, SteeringError> {
        const ACTION: &str = "remove redirected flows that have ended";
        // Add the prefix again, because the device may have been down in between.
        if self.datagrams6.is_some()
            && let Err(error) = own_loopback_prefix()
        {
            tracing::debug!("{error}");
        }
        let mut maps = self.maps();
        let age = |since: u64| now.since(Time::from_nanos(since));
        // An entry that is still being written has no start time yet.
        let over = |arrival: &abi::Arrival| {
            let released = arrival.released != 0 && age(arrival.released) > RELEASED_TIMEOUT;
            let silent = arrival.source_port == 0 && age(arrival.started) > SILENT_TIMEOUT;
            arrival.started != 0 && (released || silent || age(arrival.started) > MAX_AGE)
        };
        let ended = |exchange: &abi::Arrival| {
            let timeout = if exchange.flags & abi::arrival::UNCONNECTED != 0 { UNCONNECTED_TIMEOUT } else { RELEASED_TIMEOUT };
            exchange.started != 0 && exchange.released != 0 && age(exchange.released) > timeout
        };
        let mut swept = Swept::default();
        let gone: Vec<_> = maps.arrivals.iter().filter_map(Result::ok).filter(|(_, arrival)| over(arrival)).collect();
        for (key, _) in gone {
            swept.connections += usize::from(maps.arrivals.remove(&key).is_ok());
        }
        let gone: Vec<_> = maps.exchanges.iter().filter_map(Result::ok).filter(|(_, exchange)| ended(exchange)).collect();
        for (key, exchange) in gone {
            maps.exchanges.remove(&key).map_err(failed(ACTION))?;
            // Ignore errors: an exchange connected over IPv4 has no such key.
            let _ = maps.exchange_keys.remove(&exchange_key(&exchange));
        }
        let Maps { exchanges, known, last_exchanges, moved, .. } = &mut *maps;
        let lives = |key: &u32, socket: u64| exchanges.get(key, 0).is_ok_and(|exchange| exchange.socket == socket);
        swept.exchanges = std::mem::take(moved);
        known.retain(|exchange, (key, socket)| {
            let lives = lives(key, *socket);
            if !lives {
                swept.exchanges.push(*exchange);
            }
            lives
        });
        last_exchanges.retain(|key, exchange| known.get(exchange).is_some_and(|(of, _)| of == key));
        maps.count_shares().map_err(failed(ACTION))?;
        Ok(swept)
    }

    /// Number of redirected connections that have not been accepted.
    pub fn waiting(&self) -> usize {
        self.maps().arrivals.keys().filter_map(Result::ok).count()
    }

    /// Takes the entry of the connection between these two addresses, if the programs redirected that connection here.
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
        maps.release_share(arrival.user);
        Some(convert::redirected(&arrival))
    }

    /// Asks the kernel for the socket that sent the first datagram of an exchange, and keeps the datagram until then. Drops a datagram of an exchange that
    /// the programs did not redirect here, whose socket is already being looked up, or beyond [`MAX_LOOKUPS`].
    fn look_up(&self, exchange: ExchangeKey, payload: &[u8], length: usize) {
        // Reject unknown addresses before asking the kernel for the sender, which takes several system calls.
        if address_key(exchange.near).is_some_and(|key| self.maps().exchanges.get(&key, 0).is_err()) {
            return;
        }
        let mut lookups = self.lookups();
        if lookups.len() >= MAX_LOOKUPS || lookups.iter().any(|lookup| lookup.exchange == exchange) {
            return;
        }
        let port = if exchange.near.is_ipv4() { self.ports.datagrams4 } else { self.ports.datagrams6 };
        let (far, near) = (exchange.far, SocketAddr::new(exchange.near, port));
        match self.owners.begin(OWNER_WAIT, move || sockdiag::udp_owner(far, near)) {
            Ok(owner) => lookups.push(Lookup { exchange, payload: payload.to_vec(), length, owner }),
            Err(error) => tracing::debug!("dropped a datagram: {error}"),
        }
    }

    /// Takes the next first datagram whose socket the kernel has named, and drops those that did not come from their exchange's socket.
    fn take_recognised(&self, buffer: &mut [u8]) -> Option<Datagram> {
        loop {
            let (Lookup { exchange, payload, length, .. }, owner) = self.take_answered()?;
            match owner {
                Ok(owner) => {
                    let Some(flow) = self.recognise(exchange, owner) else { continue };
                    let kept = payload.len().min(buffer.len());
                    buffer[..kept].copy_from_slice(&payload[..kept]);
                    return Some(Datagram { exchange, length, flow: Some(flow) });
                }
                Err(error) => tracing::debug!("dropped a datagram: {error}"),
            }
        }
    }

    /// Takes a look-up that the kernel has answered, or that has taken too long.
    fn take_answered(&self) -> Option<(Lookup, io::Result<Option<u64>>)> {
        let mut lookups = self.lookups();
        let mut answers = lookups.iter().enumerate().filter_map(|(place, lookup)| Some((place, lookup.owner.answer()?)));
        let (place, owner) = answers.next()?;
        Some((lookups.remove(place), owner.and_then(|owner| owner)))
    }

    /// The flow of an exchange if its first datagram came from the exchange's socket. `owner` is the cookie of the socket that sent it, if that is open.
    fn recognise(&self, exchange: ExchangeKey, owner: Option<u64>) -> Option<RedirectedFlow> {
        let mut maps = self.maps();
        let (key, arrival) = maps.sender(exchange, owner)?;
        maps.known.insert(exchange, (key, arrival.socket));
        // A socket has one address at a time, so the previous address is no longer valid. Otherwise one exchange could be reported as many.
        if let Some(before) = maps.last_exchanges.insert(key, exchange).filter(|before| *before != exchange) {
            maps.known.remove(&before);
            maps.moved.push(before);
        }
        Some(convert::redirected(&arrival))
    }

    fn lookups(&self) -> MutexGuard<'_, Vec<Lookup>> {
        self.lookups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn maps(&self) -> MutexGuard<'_, Maps> {
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Maps {
    /// Releases the reservation of a user's connection that has arrived. A reservation that the programs make at the same moment may be lost;
    /// `count_shares` corrects that.
    fn release_share(&mut self, user: u32) {
        if let Ok(share) = self.shares.get(&user, 0) {
            let _ = self.shares.insert(user, abi::Share { arrivals: share.arrivals.saturating_sub(1), ..share }, 0);
        }
    }

    /// Recounts what each user has reserved.
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

    /// Whether the sender of an exchange has been verified and its socket is open.
    fn knows(&self, exchange: ExchangeKey) -> bool {
        let open = |(key, socket): &(u32, u64)| self.exchanges.get(key, 0).is_ok_and(|entry| entry.socket == *socket && !is_closed(&entry));
        self.known.get(&exchange).is_some_and(open)
    }

    /// Finds the entry of an exchange if its datagram came from the exchange's socket: from the socket `owner` or, if the socket is closed, from the address
    /// that the programs recorded at the close.
    fn sender(&mut self, exchange: ExchangeKey, owner: Option<u64>) -> Option<(u32, abi::Arrival)> {
        let entry = match (address_key(exchange.near), owner) {
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
    /// Finds the exchange at ::1 whose socket had this address and is closed. This scans all exchanges, so it is rate limited, or every datagram of
    /// an unknown socket would cause a scan. The last datagrams of a closed socket may therefore be lost.
    fn closed(&mut self, far: SocketAddr) -> Option<(u32, abi::Arrival)> {
        if self.dumped.is_some_and(|dumped| dumped.elapsed() < DUMP_PAUSE) {
            return None;
        }
        let found = self.exchanges.iter().filter_map(Result::ok).find(|(_, entry)| closed_at(entry, far));
        // A successful scan needs no pause: no other datagram asks for the same entry again.
        if found.is_none() {
            self.dumped = Some(Instant::now());
        }
        found
    }
}

/// Key of the exchange that owns this loopback address; `None` if the address is shared (::1).
fn address_key(near: IpAddr) -> Option<u32> {
    match near {
        IpAddr::V4(near) => Some(u32::from_ne_bytes(near.octets())),
        IpAddr::V6(near) if LOOPBACK_PREFIX.contains(&IpAddr::V6(near)) => {
            let [.., a, b, c, d] = near.octets();
            Some(u32::from_ne_bytes([a, b, c, d]))
        }
        IpAddr::V6(_) => None,
    }
}

/// Whether the exchange's socket was closed. Another socket may then have its port.
fn is_closed(entry: &abi::Arrival) -> bool {
    entry.source_port != 0
}

/// Whether the exchange's socket was closed and had this address.
fn closed_at(entry: &abi::Arrival, far: SocketAddr) -> bool {
    let source = match far.ip() {
        IpAddr::V4(v4) => u32::from_ne_bytes(v4.octets()),
        IpAddr::V6(_) => 0,
    };
    entry.source_port == far.port() && entry.source == source
}

/// The key of an exchange in `exchange_keys`, if it has an entry there.
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
            tracing::warn!("{error}: new connections may be refused until Braid exits");
        }
    }
}

/// Opens a listener on the loopback device that owns its port: without `SO_REUSEADDR` nobody can bind a more specific address to it.
fn listener(addr: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None)?;
    socket.bind_device(Some(b"lo"))?;
    socket.bind(&addr.into())?;
    socket.listen(abi::MAX_ARRIVALS as i32)?;
    socket.set_nonblocking(true)?;
    TcpListener::from_std(socket.into())
}

/// Opens the socket for IPv6 datagrams and adds the addresses that it needs.
fn datagrams6() -> Option<UdpSocket> {
    if let Err(error) = own_loopback_prefix() {
        tracing::warn!("IPv6 datagrams are not redirected: {error}");
        return None;
    }
    let socket = datagram_socket((Ipv6Addr::UNSPECIFIED, 0).into()).ok()?;
    datagram::report_destinations(socket.as_fd(), true).ok().map(|()| socket)
}

/// Opens a datagram socket on the loopback device that owns its port, as [`listener`] does.
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

/// Whether the kernel can report the sending socket of a datagram. Tested with a socket of our own.
fn can_find_owners(port: u16) -> bool {
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let own = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr().map(|addr| (socket, addr)));
    own.is_ok_and(|(_socket, addr)| {
        // A worker of its own, which ends here: the one that stays starts later, with fewer privileges.
        let owner = Worker::new("braid-owner", 1).ask(START_WAIT, move || sockdiag::udp_owner(addr, to));
        match owner {
            Ok(found) => matches!(found, Ok(Some(_))),
            // The kernel waits for another program now, and answers later.
            Err(error) => error.kind() == io::ErrorKind::TimedOut,
        }
    })
}
