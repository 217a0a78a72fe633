//! The kernel's list of sockets (`sock_diag`): byte counts of connections, and the means to close one.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use braid_model::{ByteCount, LinkIndex, Protocol, Rate};
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload, NetlinkSerializable};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_packet_sock_diag::{SockDiagDestroy, SockDiagMessage};
use netlink_sys::constants::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr as NetlinkAddr};

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const TCP_SYN_SENT: u8 = 2;
/// Matches any socket, instead of a cookie.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// Why a `sock_diag` request failed.
#[derive(Debug, thiserror::Error)]
pub enum SockDiagError {
    /// The sockets could not be listed.
    #[error("cannot list the machine's TCP sockets (sock_diag): {0}; the kernel needs CONFIG_INET_DIAG")]
    List(#[source] io::Error),
    /// The socket could not be closed.
    #[error(
        "cannot close the connection from {local} to {remote} (SOCK_DESTROY): {source}; this needs CAP_NET_ADMIN and CONFIG_INET_DIAG_DESTROY"
    )]
    Destroy {
        /// Local address.
        local: SocketAddr,
        /// Remote address.
        remote: SocketAddr,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// One TCP socket.
#[derive(Debug, Clone, PartialEq)]
pub struct TcpSocket {
    /// Local address.
    pub local: SocketAddr,
    /// Remote address.
    pub remote: SocketAddr,
    /// Inode number of the socket in /proc/PID/fd; 0 for a socket that no program holds any more.
    pub inode: u32,
    /// Whether its handshake has not been answered yet.
    pub connecting: bool,
    /// Device to which the socket is bound.
    pub link: Option<LinkIndex>,
    /// Bytes received. This and what follows is zero or `None` for a socket whose details were not asked for.
    pub rx: ByteCount,
    /// Bytes acknowledged by the remote end.
    pub tx: ByteCount,
    /// Smoothed round-trip time; `None` before the first sample.
    pub rtt: Option<Duration>,
    /// Number of retransmitted segments.
    pub retransmissions: u32,
    /// Delivery rate as sampled by the kernel; `None` without a sample, or if the program had nothing to send.
    pub delivery_rate: Option<Rate>,
}

/// All TCP sockets of this network namespace that are connected, connecting or closing, with details of those whose inode numbers `detailed` accepts. Needs
/// no privilege.
///
/// The kernel waits for the lock of a socket whose details are asked for, which its program may keep as long as it likes. Before Linux 6.9 it may also wait
/// for another program's request of that kind. So call this on a [`Worker`](super::worker::Worker) where waiting does harm.
///
/// # Errors
/// The kernel refused the request.
pub fn dump_tcp(detailed: impl Fn(u32) -> bool) -> Result<Vec<TcpSocket>, SockDiagError> {
    let mut sockets = Vec::new();
    for family in [AF_INET, AF_INET6] {
        for listed in list(family).map_err(SockDiagError::List)? {
            let socket = if detailed(listed.header.inode) { details(&listed).map_err(SockDiagError::List)? } else { Some(listed) };
            sockets.extend(socket.as_ref().map(tcp_socket));
        }
    }
    Ok(sockets)
}

fn list(family: u8) -> io::Result<Vec<InetResponse>> {
    let request = InetRequest {
        family,
        protocol: libc::IPPROTO_TCP as u8,
        extensions: ExtensionFlags::empty(),
        states: StateFlags::all() - StateFlags::LISTEN - StateFlags::TIME_WAIT,
        socket_id: if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() },
    };
    let socket = send(SockDiagMessage::InetRequest(request), NLM_F_REQUEST | NLM_F_DUMP)?;
    let mut sockets = Vec::new();
    loop {
        let (bytes, _) = socket.recv_from_full()?;
        let mut rest = &bytes[..];
        while rest.len() >= 16 {
            let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
            match message.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => sockets.push(*response),
                NetlinkPayload::Done(_) => return Ok(sockets),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                _ => {}
            }
            let length = (message.header.length as usize).next_multiple_of(4).max(16);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

/// The same socket with its details; `None` if it has closed.
fn details(of: &InetResponse) -> io::Result<Option<InetResponse>> {
    let header = &of.header;
    find(InetRequest {
        family: header.family,
        protocol: libc::IPPROTO_TCP as u8,
        extensions: ExtensionFlags::INFO,
        states: StateFlags::all(),
        socket_id: header.socket_id.clone(),
    })
}

/// The socket that a request names; `None` if there is none.
fn find(request: InetRequest) -> io::Result<Option<InetResponse>> {
    let socket = send(SockDiagMessage::InetRequest(request), NLM_F_REQUEST)?;
    let (bytes, _) = socket.recv_from_full()?;
    match NetlinkMessage::<SockDiagMessage>::deserialize(&bytes).map_err(io::Error::other)?.payload {
        NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => Ok(Some(*response)),
        NetlinkPayload::Error(error) if error.to_io().raw_os_error() == Some(libc::ENOENT) => Ok(None),
        NetlinkPayload::Error(error) => Err(error.to_io()),
        _ => Ok(None),
    }
}

fn send<M: NetlinkSerializable>(message: M, flags: u16) -> io::Result<Socket>
where
    NetlinkPayload<M>: From<M>,
{
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
    packet.finalize();
    let mut bytes = vec![0; packet.header.length as usize];
    packet.serialize(&mut bytes);
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    socket.connect(&NetlinkAddr::new(0, 0))?;
    socket.send(&bytes, 0)?;
    Ok(socket)
}

fn tcp_socket(response: &InetResponse) -> TcpSocket {
    let header = &response.header;
    let id = &header.socket_id;
    let info = response.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(bytes) => Some(Info(bytes)),
        _ => None,
    });
    let info = info.unwrap_or(Info(&[]));
    let rtt = [info.u32(68), info.u32(92)].into_iter().find(|rtt| *rtt > 0);
    let app_limited = info.0.get(7).is_some_and(|bits| bits & 1 == 1);
    TcpSocket {
        local: SocketAddr::new(id.source_address.to_canonical(), id.source_port),
        remote: SocketAddr::new(id.destination_address.to_canonical(), id.destination_port),
        inode: header.inode,
        connecting: header.state == TCP_SYN_SENT,
        link: (id.interface_id != 0).then_some(LinkIndex(id.interface_id)),
        rx: ByteCount::new(info.u64(128)),
        // The kernel counts the SYN as one byte.
        tx: ByteCount::new(info.u64(120).saturating_sub(1)),
        rtt: rtt.map(|micros| Duration::from_micros(micros.into())),
        retransmissions: info.u32(100),
        delivery_rate: Some(info.u64(160)).filter(|rate| *rate > 0 && !app_limited).map(|rate| Rate::from_bps(rate.saturating_mul(8))),
    }
}

/// `struct tcp_info`, to which new kernels only append. A field that an older kernel lacks reads as 0.
struct Info<'a>(&'a [u8]);

impl Info<'_> {
    fn u32(&self, offset: usize) -> u32 {
        self.0.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
    }

    fn u64(&self, offset: usize) -> u64 {
        self.0.get(offset..offset + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
    }
}

/// Closes a connection, so that its program receives ECONNABORTED at once. Returns `Ok(false)` if the connection does not exist.
///
/// `link` is the device to which the socket is bound, if any. With the socket's cookie, another socket that has its addresses by now stays open. Waits for the lock of a TCP socket, which its program may keep as long as it likes: call it on
/// a [`Worker`](super::worker::Worker) where waiting does harm.
pub fn destroy(
    protocol: Protocol,
    local: SocketAddr,
    remote: SocketAddr,
    link: Option<LinkIndex>,
    cookie: Option<u64>,
) -> Result<bool, SockDiagError> {
    let found = destroy_as(protocol, local, remote, link, cookie);
    // The kernel lists an IPv4-mapped socket under IPv6.
    let found = match found {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) && local.is_ipv4() => {
            destroy_as(protocol, as_mapped(local), as_mapped(remote), link, cookie)
        }
        other => other,
    };
    match found {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(source) => Err(SockDiagError::Destroy { local, remote, source }),
    }
}

/// A socket and its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Socket cookie, unique until the machine reboots.
    pub cookie: u64,
    /// User id; `None` if no program holds the socket any more.
    pub user: Option<u32>,
}

/// The socket at `local` that receives what `remote` sends, in this network namespace; `None` if there is none. Needs no privilege.
///
/// Before Linux 6.9 this may wait as [`dump_tcp`] does, for as long as another program likes.
pub fn owner(protocol: Protocol, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<Owner>> {
    Ok(find(by_ends(protocol, local, remote))?.map(|InetResponse { header, .. }| {
        // The kernel reports root as the user of a closed socket.
        let user = (header.inode != 0).then_some(header.uid);
        Owner { cookie: u64::from_ne_bytes(header.socket_id.cookie), user }
    }))
}

/// A request for the socket at `local` that receives what `remote` sends.
fn by_ends(protocol: Protocol, local: SocketAddr, remote: SocketAddr) -> InetRequest {
    let (local, remote) =
        (SocketAddr::new(local.ip().to_canonical(), local.port()), SocketAddr::new(remote.ip().to_canonical(), remote.port()));
    // For UDP the kernel expects the two addresses in reverse order.
    let (source, destination) = if protocol == Protocol::Udp { (remote, local) } else { (local, remote) };
    InetRequest {
        family: if local.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol: protocol.number(),
        extensions: ExtensionFlags::empty(),
        states: StateFlags::all(),
        socket_id: SocketId {
            source_port: source.port(),
            destination_port: destination.port(),
            source_address: source.ip(),
            destination_address: destination.ip(),
            interface_id: 0,
            cookie: NO_COOKIE,
        },
    }
}

/// How a UDP socket sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpSender {
    /// Whether routing rules choose its way: nobody has bound it to a device, or given it a foreign mark.
    pub follows_rules: bool,
    /// Whether it has a source address before its way is known.
    pub has_source: bool,
}

/// The UDP socket at `local` that receives what `remote` sends; `None`: there is none. Needs `CAP_NET_ADMIN`; otherwise the kernel does not report marks. See [`owner`].
pub fn udp_sender(local: SocketAddr, remote: SocketAddr, is_foreign: impl Fn(u32) -> bool) -> io::Result<Option<UdpSender>> {
    let found = find(by_ends(Protocol::Udp, local, remote))?;
    let is_marked = |socket: &InetResponse| socket.nlas.iter().any(|nla| matches!(nla, Nla::Mark(mark) if *mark != 0 && is_foreign(*mark)));
    let sender = |socket: InetResponse| UdpSender {
        follows_rules: socket.header.socket_id.interface_id == 0 && !is_marked(&socket),
        has_source: !socket.header.socket_id.source_address.to_canonical().is_unspecified(),
    };
    Ok(found.map(sender))
}

/// Cookie of the UDP socket at `local` that receives what `remote` sends, in this network namespace; `None` if there is none. See [`owner`].
pub fn udp_owner(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u64>> {
    Ok(owner(Protocol::Udp, local, remote)?.map(|owner| owner.cookie))
}

fn as_mapped(addr: SocketAddr) -> SocketAddr {
    match addr.ip() {
        IpAddr::V4(v4) => SocketAddr::new(v4.to_ipv6_mapped().into(), addr.port()),
        IpAddr::V6(_) => addr,
    }
}

fn destroy_as(protocol: Protocol, local: SocketAddr, remote: SocketAddr, link: Option<LinkIndex>, cookie: Option<u64>) -> io::Result<()> {
    let request = InetRequest {
        family: if local.is_ipv4() { AF_INET } else { AF_INET6 },
        protocol: protocol.number(),
        extensions: ExtensionFlags::empty(),
        states: StateFlags::all(),
        socket_id: SocketId {
            source_port: local.port(),
            destination_port: remote.port(),
            source_address: local.ip(),
            destination_address: remote.ip(),
            interface_id: link.map_or(0, |link| link.0),
            cookie: cookie.map_or(NO_COOKIE, u64::to_ne_bytes),
        },
    };
    let message = SockDiagDestroy::new(SockDiagMessage::InetRequest(request));
    let socket = send(message, NLM_F_REQUEST | NLM_F_ACK)?;
    let (bytes, _) = socket.recv_from_full()?;
    match NetlinkMessage::<SockDiagMessage>::deserialize(&bytes).map_err(io::Error::other)?.payload {
        NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn pair(host: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        (near, far)
    }

    #[test]
    fn a_connection_is_listed_with_its_byte_counts() {
        for host in ["127.0.0.1", "::1"] {
            let Ok(_) = TcpListener::bind((host, 0)) else { continue };
            let (mut near, mut far) = pair(host);
            far.write_all(&[7; 3000]).unwrap();
            near.read_exact(&mut [0; 3000]).unwrap();
            let mine = near.local_addr().unwrap();
            let find = |detailed: bool| dump_tcp(|_| detailed).unwrap().into_iter().find(|socket| socket.local == mine).unwrap();
            let listed = find(true);
            assert_eq!((listed.remote, listed.rx, listed.connecting), (near.peer_addr().unwrap(), ByteCount::new(3000), false));
            assert_ne!(listed.inode, 0);
            assert_eq!((listed.link, listed.rtt.is_some()), (None, true));
            let listed = find(false);
            assert_eq!((listed.remote, listed.rx, listed.connecting), (near.peer_addr().unwrap(), ByteCount::ZERO, false));
        }
    }

    #[test]
    fn an_existing_connection_is_closed_and_a_missing_one_is_reported() {
        let (mut near, _far) = pair("127.0.0.1");
        let (local, remote) = (near.local_addr().unwrap(), near.peer_addr().unwrap());
        let cookie = socket2::SockRef::from(&near).cookie().unwrap();
        match destroy(Protocol::Tcp, local, remote, None, Some(cookie + 1)) {
            Ok(found) => {
                assert!(!found, "another socket has these addresses");
                assert!(destroy(Protocol::Tcp, local, remote, None, Some(cookie)).unwrap());
                assert!(near.read(&mut [0; 1]).is_err());
                assert!(!destroy(Protocol::Tcp, local, remote, None, None).unwrap());
            }
            // SAFETY: a plain system call without arguments.
            Err(error) if unsafe { libc::geteuid() } != 0 => eprintln!("skipped, because it needs root: {error}"),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn a_connection_has_a_user_until_its_program_closes_it() {
        let (near, far) = pair("127.0.0.1");
        let (local, remote) = (near.local_addr().unwrap(), near.peer_addr().unwrap());
        let mapped = |address| as_mapped(address);
        let cookie = socket2::SockRef::from(&near).cookie().unwrap();
        let own = Some(Owner { cookie, user: Some(crate::linux::sys::process::own_user()) });
        assert_eq!(owner(Protocol::Tcp, local, remote).unwrap(), own);
        assert_eq!(owner(Protocol::Tcp, mapped(local), mapped(remote)).unwrap(), own);
        drop(near);
        // The far end is still open, so the kernel keeps this socket.
        assert_eq!(owner(Protocol::Tcp, local, remote).unwrap().map(|owner| owner.user), Some(None));
        drop(far);
        assert_eq!(owner(Protocol::Tcp, "127.0.0.1:1".parse().unwrap(), remote).unwrap(), None);
    }

    #[test]
    fn a_udp_socket_is_found_by_both_its_ends() {
        let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let (client, other) = (std::net::UdpSocket::bind("127.0.0.1:0").unwrap(), std::net::UdpSocket::bind("0.0.0.0:0").unwrap());
        let remote = server.local_addr().unwrap();
        client.connect(remote).unwrap();
        let cookie = |socket: &std::net::UdpSocket| socket2::SockRef::from(socket).cookie().unwrap();
        assert_eq!(udp_owner(client.local_addr().unwrap(), remote).unwrap(), Some(cookie(&client)));
        let wildcard = SocketAddr::new(remote.ip(), other.local_addr().unwrap().port());
        assert_eq!(udp_owner(wildcard, remote).unwrap(), Some(cookie(&other)));
        drop(other);
        assert_eq!(udp_owner(wildcard, remote).unwrap(), None);
    }

    #[test]
    fn missing_fields_of_an_older_kernel_read_as_zero() {
        assert_eq!(Info(&[1, 2, 3]).u64(128), 0);
    }
}
