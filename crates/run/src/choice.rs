//! Shares one [`Chooser`] among the threads of a run, and binds sockets to the chosen links.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use braid_model::Time;
use braid_platform::linux::seccomp::{self, Socket};

use super::chooser::{Chooser, DatagramRoute, DatagramSocket};

/// A shared link chooser with its clock.
pub(super) struct Choice {
    chooser: Mutex<Chooser>,
    started: Instant,
    namespace: Option<u64>,
}

impl Choice {
    pub(super) fn new(chooser: Mutex<Chooser>) -> Self {
        Self { chooser, started: Instant::now(), namespace: seccomp::own_namespace() }
    }

    pub(super) fn now(&self) -> Time {
        Time::from_nanos(u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    pub(super) fn chooser(&self) -> MutexGuard<'_, Chooser> {
        self.chooser.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a socket is in our network namespace. The command may have created namespaces of its own, which have other devices.
    pub(super) fn is_ours(&self, socket: &Socket) -> bool {
        socket.is_in(self.namespace)
    }

    /// Binds a stream that is about to connect to a link. Returns whether it is bound now.
    pub(super) fn steer(&self, socket: &Socket, inode: u64, remote: SocketAddr, application: &str) -> bool {
        let link = self.chooser().stream(self.now(), inode, remote, application);
        let bound = link.is_some_and(|link| socket.bind(link).is_ok());
        if link.is_some() && !bound {
            self.chooser().withdraw(self.now(), inode);
        }
        bound
    }

    /// Connects to `remote` over a link, on behalf of a program whose own socket cannot connect any more.
    pub(super) async fn connect(&self, remote: SocketAddr, application: &str) -> io::Result<tokio::net::TcpStream> {
        let socket = own(remote, socket2::Type::STREAM)?;
        self.steer(&socket, socket.inode(), remote, application);
        finish(socket, remote).await
    }

    /// Opens a UDP socket to `remote` over a link, on behalf of a program.
    pub(super) fn exchange(&self, remote: SocketAddr) -> io::Result<tokio::net::UdpSocket> {
        let socket = own(remote, socket2::Type::DGRAM)?;
        let facts = DatagramSocket { cookie: socket.cookie(), bound: false, routed: false };
        if let DatagramRoute::Link(link) = self.chooser().datagram(self.now(), facts, remote) {
            let _ = socket.bind(link);
        }
        socket.begin(remote)?;
        tokio::net::UdpSocket::from_std(OwnedFd::from(socket).into())
    }
}

/// Connects a socket and waits for the handshake.
pub(super) async fn finish(socket: Socket, remote: SocketAddr) -> io::Result<tokio::net::TcpStream> {
    socket.begin(remote)?;
    let stream = tokio::net::TcpStream::from_std(OwnedFd::from(socket).into())?;
    stream.writable().await?;
    stream.take_error()?.map_or(Ok(stream), Err)
}

/// Creates a non-blocking socket of this process.
pub(super) fn own(remote: SocketAddr, kind: socket2::Type) -> io::Result<Socket> {
    let socket = socket2::Socket::new(socket2::Domain::for_address(remote), kind.nonblocking().cloexec(), None)?;
    Socket::new(socket.into()).ok_or_else(|| io::ErrorKind::Unsupported.into())
}
