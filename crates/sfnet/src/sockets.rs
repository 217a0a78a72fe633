//! Ordinary sockets for multicast groups.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use socket2::{Domain, Protocol, Socket, Type};

/// Routers that a datagram may pass.
const TTL: u32 = 16;

/// A socket that receives what is sent to a port of a group, by the device with this address. Several programs of a host can have one each.
///
/// # Errors
/// No device has the address, or the port is in use otherwise.
pub fn receiver(group: Ipv4Addr, port: u16, own: Ipv4Addr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from((group, port)).into())?;
    socket.join_multicast_v4(&group, &own)?;
    Ok(socket.into())
}

/// A socket that sends to groups by the device with this address.
///
/// # Errors
/// No device has the address.
pub fn sender(own: Ipv4Addr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.bind(&SocketAddr::from((own, 0)).into())?;
    socket.set_multicast_if_v4(&own)?;
    socket.set_multicast_ttl_v4(TTL)?;
    Ok(socket.into())
}
