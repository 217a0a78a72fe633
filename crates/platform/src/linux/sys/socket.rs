//! Kernel memory of sockets, and sockets that send Ethernet frames.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use braid_model::{ByteCount, LinkIndex, Mac};
use socket2::{Domain, SockAddr, SockAddrStorage, Socket, Type};

/// Value from `asm-generic/socket.h`; missing in the `libc` crate.
const SO_MEMINFO: libc::c_int = 55;
/// The number of the request has another type with each C library.
#[allow(clippy::unnecessary_cast, reason = "it is necessary with musl")]
const SIOCGIFFLAGS: libc::Ioctl = libc::SIOCGIFFLAGS as libc::Ioctl;

/// Kernel memory that a socket's received and unsent bytes occupy, including overhead. 0 if the descriptor is not a socket.
pub fn buffered(socket: RawFd) -> ByteCount {
    let mut places = [0u32; libc::SK_MEMINFO_DROPS as usize + 1];
    let mut length = size_of_val(&places) as libc::socklen_t;
    let at = places.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `length` bytes to `places`, and the length to `length`; both are ours.
    let result = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, SO_MEMINFO, at, &raw mut length) };
    if result != 0 {
        return ByteCount::ZERO;
    }
    let of = |place: libc::c_int| u64::from(places[place as usize]);
    // For TCP, WMEM_QUEUED also includes sent data that may be retransmitted.
    let unsent = of(libc::SK_MEMINFO_WMEM_ALLOC).max(of(libc::SK_MEMINFO_WMEM_QUEUED));
    ByteCount::new(of(libc::SK_MEMINFO_RMEM_ALLOC) + unsent + of(libc::SK_MEMINFO_BACKLOG))
}

/// A socket that sends Ethernet frames over a device, and receives none. Does not block. Needs `CAP_NET_RAW`.
///
/// # Errors
/// `EPERM` without the privilege, `ENODEV` if the device is gone, `ENETDOWN` if it is off.
pub fn sender_of_frames(device: LinkIndex) -> io::Result<Socket> {
    // Protocol 0: nothing arrives.
    bound_to_device(device, 0)
}

/// Bytes of frames that wait in the kernel until the process reads them: some 100 ms at 300 Mbit/s, because a process may have to wait for a processor.
const RECEIVE_BUFFER: libc::c_int = 4 << 20;

/// A socket that sends Ethernet frames over a device, and receives those of one EtherType. While it exists, the device also receives frames for `also`, and all
/// multicasts. Does not block. Needs `CAP_NET_RAW`.
///
/// # Errors
/// Those of [`sender_of_frames`]; `InvalidData` if the device carries no Ethernet frames, as a radio in monitor mode.
pub fn frames(device: LinkIndex, ether_type: u16, also: Option<Mac>) -> io::Result<Socket> {
    let socket = bound_to_device(device, ether_type)?;
    // SAFETY: the address of a socket of packets is a sockaddr_ll, which any bytes of the storage are.
    let hardware = unsafe { (*socket.local_addr()?.as_ptr().cast::<libc::sockaddr_ll>()).sll_hatype };
    if hardware != libc::ARPHRD_ETHER {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it carries no Ethernet frames (a radio in monitor mode?)"));
    }
    let join = |kind: libc::c_int, address: Option<Mac>| {
        // SAFETY: all zero bytes are a valid packet_mreq.
        let mut request: libc::packet_mreq = unsafe { std::mem::zeroed() };
        request.mr_ifindex = i32::try_from(device.0).map_err(|_| io::ErrorKind::InvalidInput)?;
        request.mr_type = kind as u16;
        if let Some(Mac(bytes)) = address {
            request.mr_alen = 6;
            request.mr_address[..6].copy_from_slice(&bytes);
        }
        let (at, length) = (std::ptr::from_ref(&request).cast(), size_of::<libc::packet_mreq>() as libc::socklen_t);
        // SAFETY: the kernel reads one packet_mreq, which is ours.
        match unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, at, length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    let set = |level: libc::c_int, option: libc::c_int, value: libc::c_int| {
        let (at, length) = (std::ptr::from_ref(&value).cast(), size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: the kernel reads one integer, which is ours.
        match unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, at, length) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    set(libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
    set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER)?;
    join(libc::PACKET_MR_ALLMULTI, None)?;
    also.map_or(Ok(()), |mac| join(libc::PACKET_MR_UNICAST, Some(mac)))?;
    Ok(socket)
}

fn bound_to_device(device: LinkIndex, ether_type: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::PACKET, Type::RAW.nonblocking().cloexec(), None)?;
    let mut storage = SockAddrStorage::zeroed();
    // SAFETY: a sockaddr_ll of zeroes is valid, and smaller than the storage.
    let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = ether_type.to_be();
    address.sll_ifindex = i32::try_from(device.0).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the storage holds a sockaddr_ll, as the length says.
    let address = unsafe { SockAddr::new(storage, size_of::<libc::sockaddr_ll>() as libc::socklen_t) };
    socket.bind(&address)?;
    Ok(socket)
}

/// Whether a device is on and has carrier, as far as the kernel has noticed (`SIOCGIFFLAGS`). `socket` is any of the device's network namespace.
///
/// # Errors
/// `ENODEV` if there is none of this name; `EINVAL` if the name is longer than 15 bytes.
pub fn is_running(socket: BorrowedFd<'_>, device: &str) -> io::Result<bool> {
    // SAFETY: all zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if device.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    // SAFETY: SIOCGIFFLAGS reads the name, which ends with a zero byte, and writes the flags; the request is ours.
    if unsafe { libc::ioctl(socket.as_raw_fd(), SIOCGIFFLAGS, &raw mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has written the flags.
    Ok(libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags }) & libc::IFF_RUNNING != 0)
}

/// Bytes that were written to a TCP socket and that the other end has not acknowledged, or the memory of what a socket of frames has sent and its device has not
/// finished (`SIOCOUTQ`).
///
/// # Errors
/// Errors of `ioctl`.
pub fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut waiting: libc::c_int = 0;
    // SAFETY: SIOCOUTQ, which has the number of TIOCOUTQ, writes one int to `waiting`.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(waiting).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn unread_data_is_counted_at_both_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        assert_eq!(buffered(near.as_raw_fd()), ByteCount::ZERO);
        near.set_nonblocking(true).unwrap();
        let piece = [0; 65_536];
        let mut written = 0;
        while let Ok(more) = near.write(&piece) {
            written += more as u64;
        }
        let held = buffered(near.as_raw_fd()) + buffered(far.as_raw_fd());
        assert!(held.get() >= written, "{held} of {written}");
        assert!(buffered(near.as_raw_fd()).get() > 0 && buffered(far.as_raw_fd()).get() > 0);
    }

    #[test]
    fn unread_data_that_was_acknowledged_no_longer_waits() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_far, _) = listener.accept().unwrap();
        near.write_all(&[0; 1000]).unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while unacknowledged(near.as_fd()).unwrap() > 0 {
            assert!(std::time::Instant::now() < end);
        }
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 65_536]).is_ok() {}
        assert!(unacknowledged(near.as_fd()).unwrap() > 0, "the other end's buffer is full");
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(unacknowledged(file.as_fd()).is_err());
    }

    #[test]
    fn datagrams_are_counted_and_other_descriptors_hold_nothing() {
        let (near, far) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        near.send_to(&[0; 1000], far.local_addr().unwrap()).unwrap();
        assert!(buffered(far.as_raw_fd()).get() >= 1000);
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!((buffered(file.as_raw_fd()), buffered(-1)), (ByteCount::ZERO, ByteCount::ZERO));
    }
}
