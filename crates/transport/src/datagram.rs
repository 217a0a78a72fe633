//! UDP exchanges, and reading from many mostly idle sockets without a buffer per socket.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use tokio::net::UdpSocket;

use crate::host_driver::BondFlow;

/// Largest datagram.
const MAX_DATAGRAM: usize = 65_535;

/// A UDP exchange with one destination. Clones share it.
#[derive(Clone)]
pub enum UdpExchange {
    /// Through a bond.
    Bonded(BondFlow),
    /// Through a socket of this process that is connected to the destination.
    Direct(Arc<UdpSocket>),
}

impl UdpExchange {
    /// Sends a datagram. It is dropped if there is no room, as UDP allows.
    ///
    /// # Errors
    /// The socket's device, address or route is gone: the socket can send nothing any more.
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
    /// The exchange is over.
    pub async fn receive(&self) -> io::Result<Bytes> {
        match self {
            Self::Bonded(flow) => flow.receive().await.map_err(|_| io::ErrorKind::ConnectionReset.into()),
            Self::Direct(socket) => loop {
                match receive(socket).await {
                    // ICMP port unreachable: no socket is bound there now, but one may be later.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    received => return received,
                }
            },
        }
    }
}

/// Whether a send error means that the socket's device, address or route is gone.
fn is_gone(error: &io::Error) -> bool {
    let gone = [libc::ENODEV, libc::ENXIO, libc::ENETDOWN, libc::ENETUNREACH, libc::EADDRNOTAVAIL, libc::EINVAL];
    error.raw_os_error().is_some_and(|errno| gone.contains(&errno))
}

/// Returns the next datagram of a connected socket, if there is one.
///
/// # Errors
/// `WouldBlock` if there is none, or the error of the socket.
pub fn try_receive(socket: &UdpSocket) -> io::Result<Bytes> {
    with_buffer(|buffer| socket.try_recv(buffer).map(|read| Bytes::copy_from_slice(&buffer[..read])))
}

/// Returns the next datagram of any socket, and its sender.
///
/// # Errors
/// As for [`try_receive`].
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

/// All sockets of a thread share one buffer.
fn with_buffer<T>(read: impl FnOnce(&mut [u8]) -> T) -> T {
    thread_local! {
        static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; MAX_DATAGRAM]);
    }
    BUFFER.with_borrow_mut(|buffer| read(buffer))
}
