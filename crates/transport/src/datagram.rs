//! Exchanges of datagrams, and the reading of many sockets, most of which wait: no socket keeps a buffer of its own.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::UdpSocket;

use crate::host_driver::BondFlow;

/// The longest datagram.
const LONGEST: usize = 65_535;

/// How datagrams are exchanged with one destination. Clones are the same exchange.
#[derive(Clone)]
pub enum UdpExchange {
    /// Through a bond.
    Bonded(BondFlow),
    /// By a socket of this process's own, which is connected to the destination.
    Direct(Arc<UdpSocket>),
}

impl UdpExchange {
    /// Sends a datagram. What there is no room for is lost, as datagrams may be.
    ///
    /// # Errors
    /// The socket's device, its address or its way is gone: nothing can be sent by it any more.
    pub fn send(&self, payload: Bytes) -> io::Result<()> {
        match self {
            Self::Bonded(flow) => drop(flow.send(payload)),
            Self::Direct(socket) => match socket.try_send(&payload) {
                Err(error) if is_gone(&error) => return Err(error),
                _ => {}
            },
        }
        Ok(())
    }

    /// Waits for the next datagram.
    ///
    /// # Errors
    /// There will be none.
    pub async fn receive(&self) -> io::Result<Bytes> {
        match self {
            Self::Bonded(flow) => flow.receive().await.map_err(|_| io::ErrorKind::ConnectionReset.into()),
            Self::Direct(socket) => loop {
                match receive(socket).await {
                    // Nobody listens there, as ICMP told; somebody may yet.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    received => return received,
                }
            },
        }
    }
}

/// Whether an error of sending says that a socket's device, its address or its way is gone.
fn is_gone(error: &io::Error) -> bool {
    let gone = [libc::ENODEV, libc::ENXIO, libc::ENETDOWN, libc::ENETUNREACH, libc::EADDRNOTAVAIL, libc::EINVAL];
    error.raw_os_error().is_some_and(|errno| gone.contains(&errno))
}

/// The next datagram of a connected socket, if one is there.
///
/// # Errors
/// `WouldBlock` if none is there, else what the socket says.
pub fn try_receive(socket: &UdpSocket) -> io::Result<Bytes> {
    with_buffer(|buffer| socket.try_recv(buffer).map(|read| Bytes::copy_from_slice(&buffer[..read])))
}

/// The same of any socket, and who sent it.
///
/// # Errors
/// As of [`try_receive`].
pub fn try_receive_from(socket: &UdpSocket) -> io::Result<(Bytes, SocketAddr)> {
    with_buffer(|buffer| socket.try_recv_from(buffer).map(|(read, from)| (Bytes::copy_from_slice(&buffer[..read]), from)))
}

/// Waits for the next datagram of a connected socket.
async fn receive(socket: &UdpSocket) -> io::Result<Bytes> {
    loop {
        socket.readable().await?;
        match try_receive(socket) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            received => return received,
        }
    }
}

/// All sockets of a thread share one.
fn with_buffer<T>(read: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; LONGEST]);
    }
    BUFFER.with_borrow_mut(|buffer| read(buffer))
}
