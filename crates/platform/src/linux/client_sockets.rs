//! Transparent sockets (`IP_TRANSPARENT`, ip(7)), which take what clients of the gateway send to other hosts. A firewall rule hands them the packets
//! (`tproxy`, `decide::gateway`). They are bound to loopback addresses, so that nothing else reaches them.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use braid_decide::gateway::ClientPorts;
use braid_model::PerFamily;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::sys::datagram;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;
/// Maximum number of sockets that send the answers of remote hosts. The one that was idle longest is closed first.
const MAX_ANSWERERS: usize = 1024;

/// The sockets of one address family.
struct Sockets {
    connections: TcpListener,
    datagrams: UdpSocket,
}

/// The sockets for clients.
pub struct ClientSockets {
    v4: Sockets,
    /// `None` without IPv6.
    v6: Option<Sockets>,
    /// Sockets that send the answers of remote hosts, bound to their addresses, with the time of their last use.
    answerers: Mutex<BTreeMap<SocketAddr, (Arc<std::net::UdpSocket>, Instant)>>,
}

impl ClientSockets {
    /// Opens the sockets in this thread's network namespace. Needs `CAP_NET_ADMIN` or `CAP_NET_RAW`.
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self { v4: Sockets::open(false)?, v6: Sockets::open(true).ok(), answerers: Mutex::default() })
    }

    /// The ports for the firewall rules.
    pub fn ports(&self) -> ClientPorts {
        let port = |address: io::Result<SocketAddr>| address.ok().map(|address| address.port());
        let both = |get: fn(&Sockets) -> io::Result<SocketAddr>| PerFamily {
            v4: port(get(&self.v4)),
            v6: self.v6.as_ref().and_then(|v6| port(get(v6))),
        };
        ClientPorts {
            connections: both(|sockets| sockets.connections.local_addr()),
            datagrams: both(|sockets| sockets.datagrams.local_addr()),
        }
    }

    /// The next connection of a client, with the client and the host to which it connects. Cancel safe.
    ///
    /// # Errors
    /// Errors of the system, such as too many open files. Wait a little and call again.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr, SocketAddr)> {
        loop {
            let v6 = async {
                match &self.v6 {
                    Some(v6) => v6.connections.accept().await,
                    None => std::future::pending().await,
                }
            };
            let accepted = tokio::select! {
                accepted = self.v4.connections.accept() => accepted,
                accepted = v6 => accepted,
            };
            let (stream, client) = match accepted {
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                other => other?,
            };
            let remote = stream.local_addr()?;
            // A program of this machine reaches the listener at its own address.
            if !remote.ip().is_loopback() {
                return Ok((stream, client, remote));
            }
        }
    }

    /// The next datagram of a client: its length, the client, and the host to which it was sent. The part beyond the buffer is lost. If this is
    /// cancelled, a datagram may be lost.
    pub async fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
        loop {
            tokio::task::coop::consume_budget().await;
            let v6 = async {
                match &self.v6 {
                    Some(v6) => v6.datagrams.readable().await.map(|()| &v6.datagrams),
                    None => std::future::pending().await,
                }
            };
            let socket = tokio::select! {
                ready = self.v4.datagrams.readable() => ready.map(|()| &self.v4.datagrams)?,
                ready = v6 => ready?,
            };
            match socket.try_io(Interest::READABLE, || datagram::receive_original(socket.as_fd(), buffer)) {
                Ok((_, _, remote)) if remote.ip().is_loopback() => {}
                Ok(received) => return Ok(received),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends a datagram to a client with the address of a remote host as its source. Does not block: an error of kind `WouldBlock` means that the
    /// datagram was dropped because the socket buffer is full.
    pub fn answer(&self, client: SocketAddr, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.answerer(remote)?.send_to(payload, client).map(drop)
    }

    fn answerer(&self, remote: SocketAddr) -> io::Result<Arc<std::net::UdpSocket>> {
        let mut answerers = self.answerers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((socket, used)) = answerers.get_mut(&remote) {
            *used = Instant::now();
            return Ok(socket.clone());
        }
        if answerers.len() >= MAX_ANSWERERS
            && let Some(idle) = answerers.iter().min_by_key(|(_, (_, used))| *used).map(|(remote, _)| *remote)
        {
            answerers.remove(&idle);
        }
        // Other programs may use the address too, or a dual-stack socket of this daemon.
        let socket = transparent(remote, Type::DGRAM, true)?;
        let socket: Arc<std::net::UdpSocket> = Arc::new(socket.into());
        answerers.insert(remote, (socket.clone(), Instant::now()));
        Ok(socket)
    }
}

impl Sockets {
    fn open(ipv6: bool) -> io::Result<Self> {
        let address: SocketAddr = if ipv6 { (Ipv6Addr::LOCALHOST, 0).into() } else { (Ipv4Addr::LOCALHOST, 0).into() };
        let connections = transparent(address, Type::STREAM, false)?;
        connections.listen(BACKLOG)?;
        let datagrams = transparent(address, Type::DGRAM, false)?;
        datagram::report_original(datagrams.as_fd(), ipv6)?;
        Ok(Self { connections: TcpListener::from_std(connections.into())?, datagrams: UdpSocket::from_std(datagrams.into())? })
    }
}

/// A socket that may have any address. It is not dual-stack. If its address were `shared`, any user's program could take datagrams from it.
fn transparent(address: SocketAddr, kind: Type, shared: bool) -> io::Result<Socket> {
    let protocol = if kind == Type::STREAM { Protocol::TCP } else { Protocol::UDP };
    let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
        datagram::set_transparent6(socket.as_fd())?;
    } else {
        socket.set_ip_transparent_v4(true)?;
    }
    socket.set_reuse_address(shared)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}
