//! Connects the command's redirected sockets to the redirector over the loopback, without a listener that would accept them too early.
//!
//! A redirected socket connects to an address whose listener has a full queue, so the kernel ignores every handshake there. The socket
//! stays in the state that its program expects while a handshake is under way. When the flow is open (or refused), a socket of ours at
//! that same address connects to it in turn: TCP's simultaneous open (RFC 9293, 3.5), which completes at once. No other process can do
//! that, since the address is ours. Any other socket that connects there gets no answer.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use braid_platform::linux::seccomp::Reaches;
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::TcpStream;

/// Time limit for completing a handshake over the loopback.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);

/// The silent listeners, one for each family.
pub(super) struct Rendezvous {
    v4: SilentListener,
    /// For sockets that do not reach IPv4. `None` if the host has no IPv6.
    v6: Option<SilentListener>,
}

struct SilentListener {
    address: SocketAddr,
    /// The listener, and the connection that fills its queue.
    _silent: [Socket; 2],
}

impl Rendezvous {
    /// Opens the listeners in this process's network namespace.
    pub(super) fn open() -> io::Result<Self> {
        let v4 = SilentListener::open((Ipv4Addr::LOCALHOST, 0).into())?;
        Ok(Self { v4, v6: SilentListener::open((Ipv6Addr::LOCALHOST, 0).into()).ok() })
    }

    /// The address that a redirected socket connects to.
    pub(super) fn address(&self, reaches: Reaches) -> Option<SocketAddr> {
        match reaches {
            Reaches::V4 | Reaches::Both => Some(self.v4.address),
            Reaches::V6 => self.v6.as_ref().map(|listener| listener.address),
        }
    }

    /// Connects to the socket at `caller`, which is connecting to `address`. Closing the stream resets the caller until the linger option is
    /// cleared, which `splice` does after an orderly end.
    pub(super) async fn join(address: SocketAddr, caller: SocketAddr) -> io::Result<TcpStream> {
        let socket = at(address)?;
        socket.set_linger(Some(Duration::ZERO))?;
        match socket.connect(&caller.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let stream = TcpStream::from_std(socket.into())?;
        tokio::time::timeout(HANDSHAKE_TIMEOUT, stream.writable()).await.map_err(|_| io::ErrorKind::TimedOut)??;
        match SockRef::from(&stream).take_error()? {
            Some(error) => Err(error),
            None => Ok(stream),
        }
    }
}

impl SilentListener {
    fn open(address: SocketAddr) -> io::Result<Self> {
        let socket = at(address)?;
        socket.listen(0)?;
        let address = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::AddrNotAvailable)?;
        // Linux queues one connection more than the backlog. (A filter that drops segments would be simpler, but TCP now needs privilege for it.)
        let filler = Socket::new(Domain::for_address(address), Type::STREAM.cloexec(), None)?;
        filler.connect_timeout(&address.into(), HANDSHAKE_TIMEOUT)?;
        Ok(Self { address, _silent: [socket, filler] })
    }
}

/// A socket at this address, which it may share with other sockets of ours.
fn at(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), None)?;
    socket.set_reuse_port(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn caller(address: SocketAddr) -> Socket {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), None).unwrap();
        assert_eq!(socket.connect(&address.into()).unwrap_err().raw_os_error(), Some(libc::EINPROGRESS));
        socket
    }

    #[tokio::test]
    async fn a_caller_waits_until_it_is_joined() {
        let rendezvous = Rendezvous::open().unwrap();
        let addresses = [rendezvous.address(Reaches::Both), rendezvous.address(Reaches::V6)];
        for address in addresses.into_iter().flatten() {
            let caller = caller(address);
            let local = caller.local_addr().unwrap().as_socket().unwrap();
            assert!(caller.peer_addr().is_err(), "it is not connected yet");
            let stream = Rendezvous::join(address, local).await.unwrap();
            let mut caller = std::net::TcpStream::from(caller);
            assert_eq!(caller.peer_addr().unwrap(), address);
            caller.set_nonblocking(false).unwrap();
            caller.write_all(b"hello").unwrap();
            stream.readable().await.unwrap();
            assert_eq!(stream.try_read(&mut [0; 9]).unwrap(), 5);
            drop(stream);
            assert_eq!(caller.read(&mut [0; 9]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
    }

    #[tokio::test]
    async fn a_closed_caller_is_not_joined() {
        let rendezvous = Rendezvous::open().unwrap();
        let address = rendezvous.address(Reaches::V4).unwrap();
        let gone = caller(address);
        let local = gone.local_addr().unwrap().as_socket().unwrap();
        drop(gone);
        assert_eq!(Rendezvous::join(address, local).await.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
