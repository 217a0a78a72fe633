//! Datagrams of many sockets, most of which wait: no socket keeps a buffer of its own.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;

use bytes::Bytes;
use tokio::net::UdpSocket;

/// The longest datagram.
const LONGEST: usize = 65_535;

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
///
/// # Errors
/// What the socket says.
pub async fn receive(socket: &UdpSocket) -> io::Result<Bytes> {
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
