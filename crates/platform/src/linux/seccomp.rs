//! Intercepts the system calls of a command for `braid run`, and steers the sockets behind them, without any privilege.
//!
//! Some calls are inspected and then continue ([`Listener::continue_call`]). The kernel then reads their arguments a second time, and a program could
//! change them in between. That is harmless, because steering is not a security boundary: all the program can achieve is to be steered like another
//! of its own connections.
//!
//! Other calls are answered instead of the kernel ([`Listener::answer`]), some by writing into the caller's memory ([`told`]). The writes respect the
//! caller's own access rights to the memory, as the kernel's writes do, so another thread that changes or unmaps the memory in the meantime sees what
//! it would see with the kernel. The arguments that say what to write and where are read only once. The memory is opened before the check that the
//! call is still waiting. Later writes therefore reach the caller or nobody, even if the caller is killed and its thread id is reused.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use braid_model::{Family, LinkIndex, Protocol};
use socket2::{SockRef, Type};

use super::sys::seccomp as sys;
pub use super::sys::seccomp::{RawCall, Scope};

mod twin;

pub mod told;
pub use twin::Settings;

/// Receives the calls of every thread under one filter.
#[derive(Debug)]
pub struct Listener(OwnedFd);

/// Result of [`Listener::next`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// A call waits for its answer.
    Call(RawCall),
    /// No thread is under the filter any more.
    End,
}

/// Intended action of a call. Distinguishes only what matters for steering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Nothing that could be steered.
    Nothing,
    /// Connect a socket, or send a datagram (the first of several), to this address. An IPv4-mapped address is converted to IPv4.
    Reach {
        /// Destination address.
        remote: SocketAddr,
        /// The socket's descriptor in the caller.
        fd: RawFd,
        /// Whether the call is `connect`.
        connect: bool,
    },
    /// Remove the peer of a socket.
    Dissolve {
        /// The socket's descriptor in the caller.
        fd: RawFd,
    },
    /// Query something that [`told`] can answer.
    Ask {
        /// The socket's descriptor in the caller.
        fd: RawFd,
        /// Subject of the query.
        question: Question,
    },
}

/// What a call queries about a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Address of the remote end.
    Peer,
    /// Address of the local end.
    Local,
    /// Result of a connect in progress.
    Error,
    /// A datagram and its sender.
    Datagram,
}

impl Listener {
    /// Installs a filter on the calling thread and on everything it starts from now on.
    ///
    /// # Errors
    /// See [`install_filter`](sys::install_filter).
    pub fn install(scope: Scope) -> io::Result<Self> {
        let listener = sys::install_filter(scope)?;
        sys::wake_on_same_cpu(listener.as_fd());
        Ok(Self(listener))
    }

    /// Waits for the next call.
    ///
    /// # Errors
    /// Errors of the kernel that the caller cannot handle.
    pub fn next(&self) -> io::Result<Heard> {
        loop {
            // On older kernels the receiving ioctl itself never returns when the last thread is gone.
            let [ready] = super::sys::process::poll([(self.0.as_fd(), true)], None)?;
            if ready.readable {
                match sys::receive(self.0.as_fd()) {
                    Ok(call) => return Ok(Heard::Call(call)),
                    Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR)) => {}
                    Err(error) => return Err(error),
                }
            } else if ready.hung_up {
                return Ok(Heard::End);
            }
        }
    }

    /// Lets the call `id` continue. Returns `false` if the call no longer waits for an answer.
    pub fn continue_call(&self, id: u64) -> bool {
        sys::answer_continue(self.0.as_fd(), id).is_ok()
    }

    /// Gives the call `id` its result: a value or an error number. Returns `false` if the call no longer waits for an answer.
    pub fn answer(&self, id: u64, result: Result<i64, i32>) -> bool {
        sys::answer(self.0.as_fd(), id, result).is_ok()
    }

    /// Whether the call `id` still waits for its answer.
    pub fn is_waiting(&self, id: u64) -> bool {
        sys::is_waiting(self.0.as_fd(), id)
    }

    /// Puts `socket` in place of the caller's descriptor `fd`, which refers to the socket with this cookie. The call still waits for its answer.
    ///
    /// # Errors
    /// `ENOENT` if the call no longer waits, or if `fd` now refers to something else.
    pub fn replace(&self, call: &RawCall, (fd, cookie): (RawFd, u64), socket: &Socket, closes_on_exec: bool) -> io::Result<()> {
        if self.socket(call, fd)?.is_none_or(|current| current.cookie() != cookie) {
            return Err(io::Error::from_raw_os_error(libc::ENOENT));
        }
        sys::replace_descriptor(self.0.as_fd(), call.id, fd, socket.as_fd(), closes_on_exec)
    }

    /// Determines what the call is about to do, by reading the caller's memory.
    ///
    /// # Errors
    /// `EPERM` if the caller's memory may not be read; other errors if the caller has ended or its memory has changed.
    pub fn intent(&self, call: &RawCall) -> io::Result<Intent> {
        let [fd, second, third, _, fifth, sixth] = call.args;
        let (address, length, connect) = match call.number {
            libc::SYS_connect => (second, third as u32, true),
            libc::SYS_sendto => (fifth, sixth as u32, false),
            // Both arguments begin with a `msghdr`, which begins with the address and its length.
            libc::SYS_sendmsg | libc::SYS_sendmmsg => {
                let mut head = [0u8; size_of::<u64>() + size_of::<u32>()];
                sys::read_memory(call.thread, second, &mut head)?;
                let [a, b, c, d, e, f, g, h, i, j, k, l] = head;
                (u64::from_ne_bytes([a, b, c, d, e, f, g, h]), u32::from_ne_bytes([i, j, k, l]), false)
            }
            number => {
                let question = match number {
                    libc::SYS_getpeername => Question::Peer,
                    libc::SYS_getsockname => Question::Local,
                    libc::SYS_getsockopt => Question::Error,
                    libc::SYS_recvfrom | libc::SYS_recvmsg | libc::SYS_recvmmsg => Question::Datagram,
                    _ => return Ok(Intent::Nothing),
                };
                return Ok(Intent::Ask { fd: fd as RawFd, question });
            }
        };
        if address == 0 {
            return Ok(Intent::Nothing);
        }
        let mut bytes = [0u8; size_of::<libc::sockaddr_in6>()];
        let length = (length as usize).min(bytes.len());
        let read = sys::read_memory(call.thread, address, &mut bytes[..length])?;
        let nobody = bytes[..read].first_chunk().is_some_and(|family| u16::from_ne_bytes(*family) == libc::AF_UNSPEC as u16);
        Ok(match parse_address(&bytes[..read]) {
            Some(remote) => Intent::Reach { remote, fd: fd as RawFd, connect },
            None if connect && nobody => Intent::Dissolve { fd: fd as RawFd },
            None => Intent::Nothing,
        })
    }

    /// Duplicates the caller's socket. Returns `None` if `fd` is not a TCP or UDP socket, or if the call no longer waits.
    ///
    /// # Errors
    /// `EPERM` if the caller may not be accessed; other errors if the caller or its descriptor is gone.
    pub fn socket(&self, call: &RawCall, fd: RawFd) -> io::Result<Option<Socket>> {
        let socket = sys::duplicate(call.thread, fd)?;
        // Only this check proves that thread id, memory and descriptor all belonged to the caller.
        if !sys::is_waiting(self.0.as_fd(), call.id) {
            return Ok(None);
        }
        Ok(Socket::new(socket))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Parses the IPv4 or IPv6 address in a caller's `sockaddr`. Returns `None` for other families and truncated addresses.
fn parse_address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_ne_bytes(*bytes.first_chunk()?);
    let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
    match i32::from(family) {
        libc::AF_INET => {
            let octets: [u8; 4] = *bytes.get(4..)?.first_chunk()?;
            Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from(octets)), port))
        }
        libc::AF_INET6 => {
            // The scope may be missing (RFC 2133). It matters only for addresses that are not steered.
            let octets: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
            Some(SocketAddr::new(IpAddr::V6(Ipv6Addr::from(octets)).to_canonical(), port))
        }
        _ => None,
    }
}

/// A duplicated descriptor of a supervised program's TCP or UDP socket. Drop it before the call continues, because a connection closes only when its
/// last descriptor is closed.
#[derive(Debug)]
pub struct Socket {
    file: File,
    protocol: Protocol,
}

impl Socket {
    /// Wraps a socket of this process. Returns `None` if it is neither TCP nor UDP.
    pub fn new(socket: OwnedFd) -> Option<Self> {
        let it = SockRef::from(&socket);
        let inet = matches!(it.domain().ok()?, socket2::Domain::IPV4 | socket2::Domain::IPV6);
        let protocol = match (it.r#type().ok()?, it.protocol().ok()??) {
            (Type::STREAM, socket2::Protocol::TCP) => Protocol::Tcp,
            (Type::DGRAM, socket2::Protocol::UDP) => Protocol::Udp,
            _ => return None,
        };
        inet.then(|| Self { file: File::from(socket), protocol })
    }

    /// Transport protocol of the socket.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Inode number, which identifies the socket in the kernel's socket tables; 0 if unknown.
    pub fn inode(&self) -> u64 {
        self.file.metadata().map_or(0, |facts| facts.ino())
    }

    /// Socket cookie, unique until the machine reboots; 0 if unknown.
    pub fn cookie(&self) -> u64 {
        sys::wide_option(self.file.as_fd(), libc::SO_COOKIE).unwrap_or(0)
    }

    /// Whether the socket belongs to the network namespace with this cookie. Returns `true` if the kernel does not report it (before Linux 5.14).
    pub fn is_in(&self, namespace: Option<u64>) -> bool {
        let own = sys::wide_option(self.file.as_fd(), SO_NETNS_COOKIE).ok();
        own.is_none() || own == namespace
    }

    /// Local address and port; unspecified and 0 if the socket is not bound.
    pub fn local(&self) -> SocketAddr {
        let unbound = SocketAddr::from(([0, 0, 0, 0], 0));
        let local = SockRef::from(&self.file).local_addr().ok().and_then(|local| local.as_socket());
        local.map_or(unbound, |local| SocketAddr::new(local.ip().to_canonical(), local.port()))
    }

    /// Whether the socket has a peer.
    pub fn connected(&self) -> bool {
        SockRef::from(&self.file).peer_addr().is_ok()
    }

    /// Whether its program, or another program on its behalf, has set a device or a mark that determines the route of its packets.
    pub fn is_directed(&self) -> bool {
        let set = |name| sys::int_option(self.file.as_fd(), libc::SOL_SOCKET, name).is_ok_and(|value| value != 0);
        set(SO_BINDTOIFINDEX) || set(libc::SO_MARK)
    }

    /// Whether `connect` would start a connection: the socket is a TCP socket that is not connecting, connected or listening.
    pub fn is_fresh_stream(&self) -> bool {
        self.protocol == Protocol::Tcp && sys::tcp_is_closed(self.file.as_fd()).unwrap_or(false)
    }

    /// Whether the socket waits for the answer to its SYN.
    pub fn is_connecting(&self) -> bool {
        sys::tcp_is_connecting(self.file.as_fd()).unwrap_or(false)
    }

    /// Whether the socket is non-blocking.
    pub fn is_nonblocking(&self) -> bool {
        SockRef::from(&self.file).nonblocking().unwrap_or(false)
    }

    /// The address families that the socket can reach.
    pub fn reaches(&self) -> Reaches {
        let it = SockRef::from(&self.file);
        match it.domain() {
            Ok(socket2::Domain::IPV6) if it.only_v6().unwrap_or(true) => Reaches::V6,
            Ok(socket2::Domain::IPV6) => Reaches::Both,
            _ => Reaches::V4,
        }
    }

    /// Whether `connect` would only record the address, so that the first data starts the connection (TCP Fast Open).
    pub fn connects_late(&self) -> bool {
        sys::int_option(self.file.as_fd(), libc::IPPROTO_TCP, TCP_FASTOPEN_CONNECT).is_ok_and(|value| value != 0)
    }

    /// Starts to connect the socket without waiting, even if it is blocking.
    ///
    /// # Errors
    /// Errors of `connect`, except `EINPROGRESS`, which is a success here.
    pub fn begin(&self, to: SocketAddr) -> io::Result<()> {
        let it = SockRef::from(&self.file);
        let to = match (self.reaches(), to.ip()) {
            (Reaches::Both, IpAddr::V4(ip)) => SocketAddr::new(ip.to_ipv6_mapped().into(), to.port()),
            _ => to,
        };
        let waits = !self.is_nonblocking();
        if waits {
            it.set_nonblocking(true)?;
        }
        let begun = it.connect(&to.into());
        if waits {
            it.set_nonblocking(false)?;
        }
        match begun {
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => Ok(()),
            other => other,
        }
    }

    /// Takes the socket's pending error, so that its program no longer receives it.
    pub fn take_error(&self) -> Option<io::Error> {
        SockRef::from(&self.file).take_error().ok().flatten()
    }

    /// Receive timeout of the socket; `None` if it waits indefinitely.
    pub fn patience(&self) -> Option<Duration> {
        SockRef::from(&self.file).read_timeout().ok().flatten()
    }

    /// Send timeout of the socket, which also limits `connect`; `None` if it waits indefinitely.
    pub fn send_timeout(&self) -> Option<Duration> {
        SockRef::from(&self.file).write_timeout().ok().flatten()
    }

    /// Binds the socket to `link` permanently.
    ///
    /// # Errors
    /// `EPERM` if it is bound already, `ENODEV` if there is no such device.
    pub fn bind(&self, link: LinkIndex) -> io::Result<()> {
        sys::set_int_option(self.file.as_fd(), libc::SOL_SOCKET, SO_BINDTOIFINDEX, device_number(link)?)
    }

    /// The link through which packets of `family` are routed, if one was set.
    pub fn route(&self, family: Family) -> Option<LinkIndex> {
        let (level, name) = unicast_option(family);
        let value = sys::int_option(self.file.as_fd(), level, name).ok()?;
        let index = u32::from_be(value as u32);
        (index != 0).then_some(LinkIndex(index))
    }

    /// Routes the socket's packets of `family` through `link`, or as the system chooses. This does not bind the socket: it still receives from all
    /// links, and the route can be changed at any time. Only routing uses the setting, and not for TCP sockets.
    ///
    /// # Errors
    /// Errors of `setsockopt`.
    pub fn set_route(&self, family: Family, link: Option<LinkIndex>) -> io::Result<()> {
        let (level, name) = unicast_option(family);
        let index = link.map_or(Ok(0), device_number)?;
        sys::set_int_option(self.file.as_fd(), level, name, index.to_be())
    }

    /// Removes the peer and the source address that was chosen for it.
    ///
    /// # Errors
    /// Errors of `connect`.
    pub fn disconnect(&self) -> io::Result<()> {
        sys::disconnect(self.file.as_fd())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        socket.file.into()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// The address families that a socket can reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaches {
    /// IPv4 only: an IPv4 socket.
    V4,
    /// IPv4 and IPv6: an IPv6 socket that accepts IPv4-mapped addresses.
    Both,
    /// IPv6 only: an IPv6 socket that does not accept them.
    V6,
}

/// Cookie of this process's network namespace; `None` if the kernel does not report it.
pub fn own_namespace() -> Option<u64> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, Type::DGRAM, None).ok()?;
    sys::wide_option(socket.as_fd(), SO_NETNS_COOKIE).ok()
}

/// Whether the kernel honours [`Socket::set_route`] for connected datagram sockets too (Linux 6.1). On older kernels the packets of a connected
/// socket would sooner or later leave by that link with the address of another.
pub fn routes_connected_datagrams() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").is_ok_and(|release| is_at_least(&release, (6, 1)))
}

fn is_at_least(release: &str, wanted: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= wanted
}

/// Value from `asm-generic/socket.h`.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Value from `linux/tcp.h`.
const TCP_FASTOPEN_CONNECT: libc::c_int = 30;

/// Value from `asm-generic/socket.h`; missing in the `libc` crate.
const SO_BINDTOIFINDEX: libc::c_int = 62;

fn unicast_option(family: Family) -> (libc::c_int, libc::c_int) {
    match family {
        Family::V4 => (libc::SOL_IP, IP_UNICAST_IF),
        Family::V6 => (libc::SOL_IPV6, libc::IPV6_UNICAST_IF),
    }
}

/// Value from `linux/in.h`.
const IP_UNICAST_IF: libc::c_int = 50;

fn device_number(link: LinkIndex) -> io::Result<libc::c_int> {
    libc::c_int::try_from(link.0).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sockaddr(address: &str) -> Vec<u8> {
        let address: SocketAddr = address.parse().unwrap();
        let raw = socket2::SockAddr::from(address);
        let mut bytes = (raw.family()).to_ne_bytes().to_vec();
        bytes.extend(address.port().to_be_bytes());
        match address.ip() {
            IpAddr::V4(ip) => {
                bytes.extend(ip.octets());
                bytes.extend([0; 8]);
            }
            IpAddr::V6(ip) => {
                bytes.extend([0; 4]);
                bytes.extend(ip.octets());
                bytes.extend([0; 4]);
            }
        }
        bytes
    }

    #[test]
    fn addresses_are_parsed_and_mapped_ones_converted() {
        let parse = |text: &str| parse_address(&sockaddr(text)).map(|address| address.to_string());
        assert_eq!(parse("192.0.2.1:80").as_deref(), Some("192.0.2.1:80"));
        assert_eq!(parse("[2001:db8::1]:443").as_deref(), Some("[2001:db8::1]:443"));
        assert_eq!(parse("[::ffff:192.0.2.1]:443").as_deref(), Some("192.0.2.1:443"));
    }

    #[test]
    fn other_and_truncated_addresses_are_rejected() {
        assert_eq!(parse_address(&[]), None);
        assert_eq!(parse_address(&[2, 0, 0]), None);
        assert_eq!(parse_address(&sockaddr("192.0.2.1:80")[..7]), None);
        assert_eq!(parse_address(&sockaddr("[2001:db8::1]:80")[..23]), None);
        let mut unix = sockaddr("192.0.2.1:80");
        unix[..2].copy_from_slice(&(libc::AF_UNIX as u16).to_ne_bytes());
        assert_eq!(parse_address(&unix), None);
        let mut none = sockaddr("192.0.2.1:80");
        none[..2].fill(0);
        assert_eq!(parse_address(&none), None);
    }

    fn of(socket: impl Into<OwnedFd>) -> Option<Socket> {
        Socket::new(socket.into())
    }

    #[test]
    fn only_tcp_and_udp_sockets_are_accepted() {
        let tcp = of(socket2::Socket::new(socket2::Domain::IPV6, Type::STREAM, None).unwrap()).unwrap();
        assert_eq!((tcp.protocol(), tcp.is_fresh_stream(), tcp.is_directed()), (Protocol::Tcp, true, false));
        assert_eq!(of(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap().protocol(), Protocol::Udp);
        assert!(of(std::os::unix::net::UnixDatagram::unbound().unwrap()).is_none());
        assert!(of(File::open("/dev/null").unwrap()).is_none());
    }

    #[test]
    fn a_stream_is_bound_once_and_a_datagram_route_can_change() {
        let loopback = LinkIndex(1);
        let tcp = of(socket2::Socket::new(socket2::Domain::IPV4, Type::STREAM, None).unwrap()).unwrap();
        tcp.bind(loopback).unwrap();
        assert!(tcp.is_directed());
        let udp = of(socket2::Socket::new(socket2::Domain::IPV6, Type::DGRAM, None).unwrap()).unwrap();
        for family in Family::ALL {
            assert_eq!(udp.route(family), None);
            udp.set_route(family, Some(loopback)).unwrap();
            assert_eq!(udp.route(family), Some(loopback));
            udp.set_route(family, None).unwrap();
            assert_eq!(udp.route(family), None);
        }
        assert!(udp.set_route(Family::V4, Some(LinkIndex(u32::MAX))).is_err());
    }

    #[test]
    fn releases_are_compared_by_number() {
        let new_enough = |release| is_at_least(release, (6, 1));
        assert!(new_enough("6.1.0-13-amd64") && new_enough("6.18.44") && new_enough("10.0"));
        assert!(!new_enough("6.0.19") && !new_enough("5.15.0-91-generic") && !new_enough("") && !new_enough("x"));
    }

    #[test]
    fn sockets_belong_to_the_namespace_that_created_them() {
        let udp = of(std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap();
        assert!(udp.is_in(own_namespace()));
        assert!(!udp.is_in(own_namespace().map(|cookie| cookie + 1)) || own_namespace().is_none());
    }

    #[test]
    fn duplicates_of_a_socket_have_the_same_cookie_and_inode() {
        let udp = std::net::UdpSocket::bind("[::ffff:127.0.0.1]:0").unwrap();
        let one = of(udp.try_clone().unwrap()).unwrap();
        let two = of(udp).unwrap();
        assert_eq!((one.cookie(), one.inode()), (two.cookie(), two.inode()));
        assert!(one.cookie() != 0 && one.inode() != 0);
        assert!(one.local().is_ipv4() && one.local().port() != 0 && !one.connected());
    }
}
