//! Datagrams with the address they were sent to, which the standard library does not tell.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use socket2::SockAddr;

/// Room for one control message, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Has an IPv4 socket tell each datagram's destination.
pub fn tell_destinations(socket: BorrowedFd<'_>) -> io::Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the option takes an integer, which lives across the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_PKTINFO,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The next datagram, cut to `buffer`: its length, where it is from, and where it was sent to (::1 on an IPv6 socket, which is bound to
/// that). Does not block.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, IpAddr)> {
    let mut control = Control([0; 64]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut length = 0;
    let mut to = IpAddr::V6(Ipv6Addr::LOCALHOST);
    // SAFETY: `try_init` hands out storage for any address and its size; the message refers to live buffers of the sizes that it tells,
    // and the control messages that are walked are those that the kernel wrote into `control`.
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
            if !header.is_null() && (*header).cmsg_level == libc::IPPROTO_IP && (*header).cmsg_type == libc::IP_PKTINFO {
                let info: libc::in_pktinfo = std::ptr::read_unaligned(libc::CMSG_DATA(header).cast());
                to = IpAddr::V4(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()));
            }
            Ok(())
        })
    }?;
    let from = from.as_socket().ok_or_else(|| io::Error::other("a datagram from no address"))?;
    Ok((length, from, to))
}

/// Sends a datagram, from an address of this machine. Does not block.
pub fn send(socket: BorrowedFd<'_>, from: IpAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
    let to = SockAddr::from(to);
    let mut control = Control([0; 64]);
    let mut part = libc::iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: payload.len() };
    // SAFETY: the message refers to live buffers of the sizes that it tells, which the kernel only reads; the control message is written
    // into `control`, which has room for it.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_name = to.as_ptr().cast_mut().cast();
        message.msg_namelen = to.len();
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if let IpAddr::V4(from) = from {
            let size = size_of::<libc::in_pktinfo>() as libc::c_uint;
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::IPPROTO_IP;
            (*header).cmsg_type = libc::IP_PKTINFO;
            (*header).cmsg_len = libc::CMSG_LEN(size) as _;
            let info = libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr { s_addr: u32::from_ne_bytes(from.octets()) },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            std::ptr::write_unaligned(libc::CMSG_DATA(header).cast(), info);
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
    fn a_datagram_tells_where_it_was_sent_to_and_is_answered_from_there() {
        let server = UdpSocket::bind("0.0.0.0:0").unwrap();
        tell_destinations(server.as_fd()).unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        let near: IpAddr = "127.64.1.2".parse().unwrap();
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
