//! Connections made and timed within this process, which must then be inside the client namespace.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use socket2::{Domain, Protocol, Socket, Type};

use crate::lab::Lab;

/// Begins a TCP connection and tells how long the call took, and the address it got; ends it without leaving anything waiting. A byte goes over
/// it if it can, since those of real programs move something and so teach what to expect of the next.
pub(super) fn connect(to: SocketAddr) -> io::Result<(Duration, IpAddr)> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_linger(Some(Duration::ZERO))?;
    let to = to.into();
    let begin = Instant::now();
    let result = socket.connect(&to);
    let took = begin.elapsed();
    match result {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
        _ => {}
    }
    let _ = socket.send(&[0]);
    let local = socket.local_addr()?.as_socket().ok_or_else(|| io::Error::other("a connection without an address"))?;
    Ok((took, local.ip()))
}

/// The number of the lab's link that has this address; `None` if none has.
pub(super) fn link_of(local: IpAddr) -> Option<usize> {
    match local.to_canonical() {
        IpAddr::V4(v4) if v4.octets()[..2] == [10, 77] => Some(v4.octets()[2].into()),
        IpAddr::V6(v6) if v6.segments()[0] == 0xfd77 => Some(v6.segments()[3].into()),
        _ => None,
    }
}

/// A socket that listens at port `port` of 203.0.113.10, and its address.
pub(super) fn listener(lab: &Lab, port: u16) -> Result<(Socket, SocketAddr)> {
    let to: SocketAddr = (Lab::internet(10), port).into();
    let socket = lab.server().run(|| -> io::Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        socket.bind(&to.into())?;
        socket.listen(4096)?;
        Ok(socket)
    })??;
    Ok((socket, to))
}

/// A server in the lab that accepts connections and closes them at once, as long as the lab exists.
pub(super) fn accept_and_drop(lab: &Lab, port: u16) -> Result<SocketAddr> {
    let (socket, to) = listener(lab, port)?;
    thread::spawn(move || while socket.accept().is_ok() {});
    Ok(to)
}

/// A server in the lab that accepts connections and keeps them open, as long as the lab exists.
pub(super) fn accept_and_keep(lab: &Lab, port: u16) -> Result<SocketAddr> {
    let to: SocketAddr = (Lab::internet(10), port).into();
    let listener = lab.server().run(|| TcpListener::bind(to))??;
    thread::spawn(move || {
        let mut kept: Vec<TcpStream> = Vec::new();
        kept.extend(listener.incoming().flatten());
    });
    Ok(to)
}

/// A datagram server at 203.0.113.10 that takes everything and answers nothing.
pub(super) fn swallow_datagrams(lab: &Lab, port: u16) -> Result<SocketAddr> {
    let to: SocketAddr = (Lab::internet(10), port).into();
    let socket = lab.server().run(|| UdpSocket::bind(to))??;
    thread::spawn(move || {
        let mut buffer = [0; 2048];
        while socket.recv(&mut buffer).is_ok() {}
    });
    Ok(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_identified_by_their_addresses() {
        assert_eq!(link_of("10.77.3.2".parse().unwrap()), Some(3));
        assert_eq!(link_of("::ffff:10.77.3.2".parse().unwrap()), Some(3));
        assert_eq!(link_of("fd77:0:0:2::2".parse().unwrap()), Some(2));
        assert_eq!(link_of("127.0.0.1".parse().unwrap()), None);
    }

    #[test]
    fn a_connection_is_begun_whether_or_not_someone_answers() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (took, local) = connect(listener.local_addr().unwrap()).unwrap();
        assert!(took > Duration::ZERO);
        assert_eq!(local, IpAddr::from([127, 0, 0, 1]));
    }
}
