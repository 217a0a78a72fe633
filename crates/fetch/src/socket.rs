//! Sockets bound to a link's device.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;

/// Returns a connected TCP socket that is bound to `device`.
pub(crate) async fn connect(device: &str, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.bind_device(Some(device.as_bytes()))?;
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    let socket = tokio::net::TcpSocket::from_std_stream(socket.into());
    socket.connect(address).await
}
