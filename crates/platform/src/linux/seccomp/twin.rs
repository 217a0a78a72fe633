//! A second socket with the same settings as a program's socket, which can take the place of the first one in the program.
//!
//! Without privilege a bound socket cannot be bound to another device. Connecting it again in place would also wake programs that poll it: the kernel
//! reports an error when it dissolves a connect. A new socket has neither problem, as long as nothing but one descriptor refers to the old one.

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, RawFd};

use libc::{SOL_IP, SOL_IPV6, SOL_SOCKET, SOL_TCP, c_int};
use socket2::{Domain, Protocol as SocketProtocol, SockRef, Type};

use super::super::sys::seccomp as sys;
use super::{RawCall, Socket};

/// Maximum number of a program's descriptors that are searched for other references to its socket. Each costs a system call while a connect waits.
const MAX_DESCRIPTORS: usize = 512;
/// Maximum length of the kernel's description of a descriptor, in bytes. That of an epoll instance has a line for each descriptor that it watches.
const MAX_DESCRIPTION: u64 = 64 << 10;

/// Options that a program may set before it connects, in an order in which they can be set. The list has no options that the kernel refuses to return.
const OPTIONS: &[(c_int, c_int)] = &[
    (SOL_SOCKET, libc::SO_REUSEADDR),
    (SOL_SOCKET, libc::SO_REUSEPORT),
    (SOL_SOCKET, libc::SO_KEEPALIVE),
    (SOL_SOCKET, libc::SO_LINGER),
    (SOL_SOCKET, libc::SO_OOBINLINE),
    (SOL_SOCKET, libc::SO_DONTROUTE),
    (SOL_SOCKET, libc::SO_PRIORITY),
    (SOL_SOCKET, libc::SO_RCVLOWAT),
    (SOL_SOCKET, libc::SO_RCVTIMEO),
    (SOL_SOCKET, libc::SO_SNDTIMEO),
    (SOL_SOCKET, libc::SO_TIMESTAMP),
    (SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (SOL_SOCKET, libc::SO_TIMESTAMPING),
    (SOL_SOCKET, libc::SO_BUSY_POLL),
    (SOL_SOCKET, libc::SO_MAX_PACING_RATE),
    (SOL_SOCKET, libc::SO_INCOMING_CPU),
    (SOL_SOCKET, libc::SO_ZEROCOPY),
    (SOL_SOCKET, libc::SO_TXTIME),
    (SOL_SOCKET, libc::SO_LOCK_FILTER),
    (SOL_TCP, libc::TCP_CONGESTION),
    (SOL_TCP, libc::TCP_NODELAY),
    (SOL_TCP, libc::TCP_CORK),
    (SOL_TCP, libc::TCP_MAXSEG),
    (SOL_TCP, libc::TCP_KEEPIDLE),
    (SOL_TCP, libc::TCP_KEEPINTVL),
    (SOL_TCP, libc::TCP_KEEPCNT),
    (SOL_TCP, libc::TCP_SYNCNT),
    (SOL_TCP, libc::TCP_LINGER2),
    (SOL_TCP, libc::TCP_WINDOW_CLAMP),
    (SOL_TCP, libc::TCP_USER_TIMEOUT),
    (SOL_TCP, libc::TCP_THIN_LINEAR_TIMEOUTS),
    (SOL_TCP, libc::TCP_NOTSENT_LOWAT),
    (SOL_TCP, libc::TCP_QUICKACK),
    (SOL_TCP, TCP_INQ),
    (SOL_TCP, TCP_TX_DELAY),
    (SOL_IP, libc::IP_OPTIONS),
    (SOL_IP, libc::IP_TOS),
    (SOL_IP, libc::IP_TTL),
    (SOL_IP, libc::IP_MINTTL),
    (SOL_IP, libc::IP_RECVERR),
    (SOL_IP, libc::IP_RECVTOS),
    (SOL_IP, libc::IP_RECVTTL),
    (SOL_IP, libc::IP_PKTINFO),
    (SOL_IP, libc::IP_MTU_DISCOVER),
    (SOL_IP, libc::IP_FREEBIND),
    (SOL_IP, libc::IP_BIND_ADDRESS_NO_PORT),
    (SOL_IP, IP_LOCAL_PORT_RANGE),
    (SOL_IPV6, libc::IPV6_V6ONLY),
    (SOL_IPV6, libc::IPV6_TCLASS),
    (SOL_IPV6, libc::IPV6_UNICAST_HOPS),
    (SOL_IPV6, libc::IPV6_RECVERR),
    (SOL_IPV6, libc::IPV6_RECVPKTINFO),
    (SOL_IPV6, libc::IPV6_RECVTCLASS),
    (SOL_IPV6, libc::IPV6_RECVHOPLIMIT),
    (SOL_IPV6, libc::IPV6_MTU_DISCOVER),
    (SOL_IPV6, libc::IPV6_DONTFRAG),
    (SOL_IPV6, libc::IPV6_ADDR_PREFERENCES),
    (SOL_IPV6, IPV6_AUTOFLOWLABEL),
    (SOL_IPV6, IPV6_FLOWINFO_SEND),
];

/// Options whose value the kernel doubles when it is set.
const DOUBLED: [c_int; 2] = [libc::SO_RCVBUF, libc::SO_SNDBUF];

/// Values from `linux/tcp.h`, `linux/in.h` and `linux/in6.h`; missing in the `libc` crate for some targets.
const TCP_INQ: c_int = 36;
const TCP_TX_DELAY: c_int = 37;
const IP_LOCAL_PORT_RANGE: c_int = 51;
const IPV6_FLOWINFO_SEND: c_int = 33;
const IPV6_AUTOFLOWLABEL: c_int = 70;

/// The settings of a program's socket that is about to connect. Take them before the connect, which changes some of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    domain: Domain,
    nonblocking: bool,
    /// In the order of [`DOUBLED`] and [`OPTIONS`]; `None` if the kernel or the socket's family lacks the option.
    values: Vec<Option<Vec<u8>>>,
}

impl Settings {
    /// A fresh socket with these settings. `None` if it differs from the program's socket in any known option: the kernel may refuse a value, or allow
    /// it to others only.
    ///
    /// # Errors
    /// The system has no socket left.
    pub fn twin(&self) -> io::Result<Option<Socket>> {
        let twin = socket2::Socket::new(self.domain, Type::STREAM.cloexec(), Some(SocketProtocol::TCP))?;
        twin.set_nonblocking(self.nonblocking)?;
        let Some(twin) = Socket::new(twin.into()) else { return Ok(None) };
        for (&(level, name), value) in options().zip(&self.values) {
            let Some(value) = value.as_deref().filter(|value| read(twin.as_fd(), level, name).as_deref() != Some(value)) else { continue };
            // Errors show in the comparison below.
            let _ = match value.first_chunk() {
                Some(number) if level == SOL_SOCKET && DOUBLED.contains(&name) => {
                    sys::set_int_option(twin.as_fd(), level, name, c_int::from_ne_bytes(*number) / 2)
                }
                _ => sys::set_raw_option(twin.as_fd(), level, name, value),
            };
        }
        Ok(Some(twin).filter(|twin| twin.settings().as_ref() == Some(self)))
    }
}

impl Socket {
    /// The socket's settings, for [`Settings::twin`]. `None` if the socket has something that a second socket cannot get: a port, or a packet filter.
    pub fn settings(&self) -> Option<Settings> {
        let it = SockRef::from(&self.file);
        // The kernel returns the length of the filter in instructions.
        let filtered = sys::int_option(self.file.as_fd(), SOL_SOCKET, libc::SO_GET_FILTER).is_ok_and(|length| length != 0);
        if filtered || self.local().port() != 0 {
            return None;
        }
        let values = options().map(|(level, name)| read(self.file.as_fd(), *level, *name)).collect();
        Some(Settings { domain: it.domain().ok()?, nonblocking: self.is_nonblocking(), values })
    }

    /// Whether the descriptor `fd`, which is the caller's copy of this socket, closes when the caller starts another program. `None` if more than this
    /// descriptor refers to the socket (another descriptor, or an epoll instance), or if the search would take too long: the caller has more than 512
    /// descriptors, or an epoll instance that watches a thousand.
    pub fn sole_reference(&self, call: &RawCall, fd: RawFd) -> Option<bool> {
        let folder = format!("/proc/{}/fd", call.thread);
        let name = format!("socket:[{}]", self.inode());
        let (mut count, mut seen) = (0, 0);
        for entry in fs::read_dir(&folder).ok()? {
            let entry = entry.ok()?;
            seen += 1;
            if seen > MAX_DESCRIPTORS {
                return None;
            }
            // The program may close descriptors meanwhile.
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let target = target.to_string_lossy();
            count += usize::from(target == name);
            if target == "anon_inode:[eventpoll]" {
                match facts(call, &entry.file_name().to_string_lossy()) {
                    Ok(facts) if !watches(&facts, fd) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    _ => return None,
                }
            }
        }
        (count == 1).then_some(())?;
        closes_on_exec(&facts(call, &fd.to_string()).ok()?)
    }
}

/// The kernel's description of a caller's descriptor.
///
/// # Errors
/// `NotFound` if the caller has closed it; `FileTooLarge` if the description is too long.
fn facts(call: &RawCall, descriptor: &str) -> io::Result<String> {
    let mut facts = String::new();
    let file = fs::File::open(format!("/proc/{}/fdinfo/{descriptor}", call.thread))?;
    file.take(MAX_DESCRIPTION).read_to_string(&mut facts)?;
    if facts.len() as u64 >= MAX_DESCRIPTION {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(facts)
}

/// Whether an epoll instance with this description has the descriptor `fd`: a line `tfd: FD events: ...`.
fn watches(facts: &str, fd: RawFd) -> bool {
    let watched = facts.lines().filter_map(|line| line.strip_prefix("tfd:")?.split_whitespace().next()?.parse::<RawFd>().ok());
    watched.into_iter().any(|watched| watched == fd)
}

/// The flag in a description's line `flags: OCTAL`.
fn closes_on_exec(facts: &str) -> Option<bool> {
    let flags = facts.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = c_int::from_str_radix(flags.trim(), 8).ok()?;
    Some(flags & libc::O_CLOEXEC != 0)
}

fn options() -> impl Iterator<Item = &'static (c_int, c_int)> {
    const BUFFERS: &[(c_int, c_int)] = &[(SOL_SOCKET, DOUBLED[0]), (SOL_SOCKET, DOUBLED[1])];
    BUFFERS.iter().chain(OPTIONS)
}

fn read(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> Option<Vec<u8>> {
    sys::raw_option(socket, level, name).ok()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use super::*;

    fn tcp(domain: Domain) -> Socket {
        Socket::new(socket2::Socket::new(domain, Type::STREAM, None).unwrap().into()).unwrap()
    }

    #[test]
    fn a_twin_has_every_setting_of_its_original() {
        for domain in [Domain::IPV4, Domain::IPV6] {
            let socket = tcp(domain);
            let plain = socket.settings().unwrap();
            assert_eq!(plain.twin().unwrap().unwrap().settings().unwrap(), plain);
            let it = SockRef::from(&socket.file);
            it.set_nonblocking(true).unwrap();
            it.set_keepalive(true).unwrap();
            it.set_tcp_nodelay(true).unwrap();
            it.set_recv_buffer_size(100_000).unwrap();
            it.set_linger(Some(Duration::from_secs(3))).unwrap();
            it.set_write_timeout(Some(Duration::from_millis(2500))).unwrap();
            it.set_tcp_mss(1000).unwrap();
            it.set_tcp_user_timeout(Some(Duration::from_secs(9))).unwrap();
            match domain {
                Domain::IPV4 => it.set_tos_v4(16).unwrap(),
                _ => it.set_tclass_v6(16).unwrap(),
            }
            let settings = socket.settings().unwrap();
            assert_ne!(settings, plain);
            let twin = settings.twin().unwrap().unwrap();
            let it = SockRef::from(&twin.file);
            assert!(it.nonblocking().unwrap() && it.keepalive().unwrap() && it.tcp_nodelay().unwrap());
            assert_eq!((it.recv_buffer_size().unwrap(), it.tcp_mss().unwrap()), (200_000, 1000));
            assert_eq!((it.linger().unwrap(), twin.send_timeout()), (Some(Duration::from_secs(3)), Some(Duration::from_millis(2500))));
        }
    }

    #[test]
    fn a_socket_with_a_port_has_no_twin() {
        let socket = tcp(Domain::IPV4);
        SockRef::from(&socket.file).bind(&std::net::SocketAddr::from(([0, 0, 0, 0], 0)).into()).unwrap();
        assert_eq!(socket.settings(), None);
    }

    #[test]
    fn other_references_to_a_socket_are_found() {
        let call = RawCall { id: 0, thread: std::process::id() as i32, number: libc::SYS_connect, args: [0; 6] };
        // Other tests of this process do not touch this socket.
        let socket = tcp(Domain::IPV4);
        let fd = socket.as_raw_fd();
        assert_eq!(socket.sole_reference(&call, fd), Some(true));
        let copy = socket.file.try_clone().unwrap();
        assert_eq!(socket.sole_reference(&call, fd), None);
        drop(copy);
        assert_eq!(socket.sole_reference(&call, fd), Some(true));
        let many: Vec<_> = (0..MAX_DESCRIPTORS).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        assert_eq!(socket.sole_reference(&call, fd), None, "too many to search");
        drop(many);
        assert!(watches("pos:\t0\nflags:\t02\ntfd:       12 events:       19 data: c\n", 12) && !watches("tfd: 12 events: 19\n", 1));
        assert_eq!((closes_on_exec("pos:\t0\nflags:\t02000002\n"), closes_on_exec("flags:\t04002\n")), (Some(true), Some(false)));
    }
}
