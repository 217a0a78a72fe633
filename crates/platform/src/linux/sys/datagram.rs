//! Datagrams with their destination address, which the standard library does not report.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use socket2::SockAddr;

/// Buffer for one control message, with the alignment that the kernel requires.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Makes a transparent socket report the address and port to which each datagram was sent (`IP_RECVORIGDSTADDR`).
pub fn report_original(socket: BorrowedFd<'_>, ipv6: bool) -> io::Result<()> {
    set_flags(
        socket,
        match ipv6 {
            true => &[(libc::IPPROTO_IPV6, libc::IPV6_RECVORIGDSTADDR)],
            false => &[(libc::IPPROTO_IP, libc::IP_RECVORIGDSTADDR)],
        },
    )
}

/// Lets an IPv6 socket have any address (`IPV6_TRANSPARENT`).
pub fn set_transparent6(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_flags(socket, &[(libc::IPPROTO_IPV6, libc::IPV6_TRANSPARENT)])
}

/// Makes a socket report each datagram's destination, and lets an IPv6 socket send from addresses that are local only by a route.
pub fn report_destinations(socket: BorrowedFd<'_>, ipv6: bool) -> io::Result<()> {
    set_flags(
        socket,
        match ipv6 {
            true => &[(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO), (libc::IPPROTO_IPV6, IPV6_FREEBIND)],
            false => &[(libc::IPPROTO_IP, libc::IP_PKTINFO)],
        },
    )
}

/// Turns on options, given by level and name.
fn set_flags(socket: BorrowedFd<'_>, options: &[(libc::c_int, libc::c_int)]) -> io::Result<()> {
    let on: libc::c_int = 1;
    for (level, name) in options {
        let size = size_of_val(&on) as libc::socklen_t;
        // SAFETY: the options take an integer, which lives across the call.
        if unsafe { libc::setsockopt(socket.as_raw_fd(), *level, *name, (&raw const on).cast(), size) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Value from `linux/in6.h`.
const IPV6_FREEBIND: libc::c_int = 78;

/// Receives the next datagram, truncated to `buffer`. Returns its length, source and destination. Does not block.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, IpAddr)> {
    receive_with_port(socket, buffer).map(|(length, from, to)| (length, from, to.ip()))
}

/// The same for a socket that [reports](report_original) the address and port to which each datagram was sent.
pub fn receive_original(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
    receive_with_port(socket, buffer)
}

/// The port of the destination is 0 unless the socket reports it.
fn receive_with_port(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
    let mut control = Control([0; 64]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut length = 0;
    let mut to = SocketAddr::from((Ipv6Addr::LOCALHOST, 0));
    // SAFETY: `try_init` provides storage for any address, and its size. The message refers to live buffers of the stated sizes, and the control
    // messages that are read are those that the kernel wrote into `control`.
    let (_, from) = unsafe {
        SockAddr::try_init(|storage, size| {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_name = storage.cast();
            message.msg_namelen = *size;
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = control.0.len() as _;
            let received = libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT);
            if received < 0 {
                return Err(io::Error::last_os_error());
            }
            length = received as usize;
            *size = message.msg_namelen;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            match header.as_ref().map(|header| (header.cmsg_level, header.cmsg_type)) {
                Some((libc::IPPROTO_IP, libc::IP_PKTINFO)) => {
                    let info: libc::in_pktinfo = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                    to = (Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()), 0).into();
                }
                Some((libc::IPPROTO_IPV6, libc::IPV6_PKTINFO)) => {
                    let info: libc::in6_pktinfo = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                    to = (Ipv6Addr::from(info.ipi6_addr.s6_addr), 0).into();
                }
                Some((libc::IPPROTO_IP, libc::IP_ORIGDSTADDR)) => {
                    let info: libc::sockaddr_in = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                    to = (Ipv4Addr::from(info.sin_addr.s_addr.to_ne_bytes()), u16::from_be(info.sin_port)).into();
                }
                Some((libc::IPPROTO_IPV6, libc::IPV6_ORIGDSTADDR)) => {
                    let info: libc::sockaddr_in6 = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                    to = (Ipv6Addr::from(info.sin6_addr.s6_addr), u16::from_be(info.sin6_port)).into();
                }
                _ => {}
            }
            Ok(())
        })
    }?;
    let from = from.as_socket().ok_or_else(|| io::Error::other("a datagram without a source address"))?;
    Ok((length, from, to))
}

/// Sends a datagram from an address of this machine. Does not block.
pub fn send(socket: BorrowedFd<'_>, from: IpAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
    let to = SockAddr::from(to);
    let mut control = Control([0; 64]);
    let mut part = libc::iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: payload.len() };
    // SAFETY: the message refers to live buffers of the stated sizes, which the kernel only reads. The control message is written into `control`,
    // which is large enough.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_name = to.as_ptr().cast_mut().cast();
        message.msg_namelen = to.len();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        let (level, kind, size) = match from {
            IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_PKTINFO, size_of::<libc::in_pktinfo>() as libc::c_uint),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, size_of::<libc::in6_pktinfo>() as libc::c_uint),
        };
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        ((*header).cmsg_level, (*header).cmsg_type, (*header).cmsg_len) = (level, kind, libc::CMSG_LEN(size) as _);
        match from {
            IpAddr::V4(from) => {
                let info = libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: libc::in_addr { s_addr: u32::from_ne_bytes(from.octets()) },
                    ipi_addr: libc::in_addr { s_addr: 0 },
                };
                std::ptr::write_unaligned(libc::CMSG_DATA(header).cast(), info);
            }
            IpAddr::V6(from) => {
                let info = libc::in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: from.octets() }, ipi6_ifindex: 0 };
                std::ptr::write_unaligned(libc::CMSG_DATA(header).cast(), info);
            }
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT)
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    #[test]
    fn a_datagram_reports_its_destination_and_is_answered_from_it() {
        check_destination_and_answer("0.0.0.0:0", "127.0.0.1:0", "127.64.1.2");
        if UdpSocket::bind("[::1]:0").is_ok() {
            check_destination_and_answer("[::]:0", "[::1]:0", "::1");
        }
    }

    fn check_destination_and_answer(server: &str, client: &str, near: &str) {
        let server = UdpSocket::bind(server).unwrap();
        let near: IpAddr = near.parse().unwrap();
        report_destinations(server.as_fd(), near.is_ipv6()).unwrap();
        let client = UdpSocket::bind(client).unwrap();
        let port = server.local_addr().unwrap().port();
        client.send_to(b"hello", (near, port)).unwrap();
        let mut buffer = [0; 3];
        assert_eq!(receive(server.as_fd(), &mut buffer).unwrap(), (3, client.local_addr().unwrap(), near));
        assert_eq!(receive(server.as_fd(), &mut buffer).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        send(server.as_fd(), near, client.local_addr().unwrap(), b"answer").unwrap();
        let mut buffer = [0; 10];
        assert_eq!(client.recv_from(&mut buffer).unwrap(), (6, (near, port).into()));
    }
}
