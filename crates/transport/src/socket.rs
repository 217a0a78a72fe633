//! A UDP socket that sends and receives many datagrams per system call.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use bytes::BytesMut;
use noq_proto::EcnCodepoint;
use noq_udp::{BATCH_SIZE, RecvMeta, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::sync::Notify;

/// Requested size of the system's buffer in each direction. The system may grant less.
const SYSTEM_BUFFER: usize = 4 << 20;
/// Limit of the pending bytes while the system accepts no more. Further datagrams are dropped, as in any full queue.
const MAX_PENDING: usize = 2 << 20;
/// Largest read: GRO combines up to 64 KiB of datagrams.
const READ: usize = 64 << 10;

/// Local binding of a socket.
#[derive(Debug, Clone, Default)]
pub struct Binding {
    /// Local address; with `None` the system chooses.
    pub address: Option<SocketAddr>,
    /// The interface that the socket must use.
    pub device: Option<String>,
    /// Packet mark that excludes its packets from steering.
    pub mark: Option<u32>,
}

/// UDP socket of a link.
#[derive(Debug)]
pub struct UdpLink {
    io: UdpSocket,
    state: UdpSocketState,
    pending: Mutex<Pending>,
    /// Notifies `flush` of pending datagrams.
    stuck: Notify,
}

/// Destination and parameters of a batch of datagrams.
#[derive(Debug, Clone, Copy)]
struct Heading {
    to: SocketAddr,
    ecn: Option<EcnCodepoint>,
    segment: Option<usize>,
    from: Option<IpAddr>,
}

#[derive(Debug, Default)]
struct Pending {
    queue: VecDeque<(Heading, Vec<u8>)>,
    bytes: usize,
}

impl Pending {
    fn park(&mut self, heading: Heading, data: &[u8]) {
        self.bytes += data.len();
        self.queue.push_back((heading, data.to_vec()));
    }
}

impl UdpLink {
    /// Opens a socket of one address family. Errors are those of the system.
    pub fn bind(ipv6: bool, binding: &Binding) -> io::Result<Self> {
        let domain = if ipv6 { Domain::IPV6 } else { Domain::IPV4 };
        let socket = Socket::new(domain, Type::DGRAM.nonblocking().cloexec(), Some(Protocol::UDP))?;
        if let Some(mark) = binding.mark {
            socket.set_mark(mark)?;
        }
        if let Some(device) = &binding.device {
            socket.bind_device(Some(device.as_bytes()))?;
        }
        let wildcard = if ipv6 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
        let address = binding.address.unwrap_or_else(|| SocketAddr::new(wildcard, 0));
        if ipv6 {
            // A server with a wildcard address receives both families on one socket.
            socket.set_only_v6(!(address.ip().is_unspecified() && address.port() != 0))?;
        }
        socket.bind(&address.into())?;
        let io = UdpSocket::from_std(socket.into())?;
        let state = UdpSocketState::new(UdpSockRef::from(&io))?;
        // Smaller buffers are not an error.
        let _ = state.set_send_buffer_size(UdpSockRef::from(&io), SYSTEM_BUFFER);
        let _ = state.set_recv_buffer_size(UdpSockRef::from(&io), SYSTEM_BUFFER);
        Ok(Self { io, state, pending: Mutex::default(), stuck: Notify::new() })
    }

    /// Local address of the socket.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    /// Sends one datagram, or several of the given segment size. Queues what the system does not accept now.
    pub fn send(&self, transmit: &noq_proto::Transmit, data: &[u8]) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let heading = Heading { to: transmit.destination, ecn: transmit.ecn, segment: transmit.segment_size, from: transmit.src_ip };
        if pending.queue.is_empty() && self.try_send(heading, data) {
            return;
        }
        if pending.bytes + data.len() <= MAX_PENDING {
            pending.park(heading, data);
            self.stuck.notify_one();
        }
    }

    /// Queues a datagram as if the system had rejected it.
    #[cfg(test)]
    pub(crate) fn park(&self, to: SocketAddr, data: &[u8]) {
        let heading = Heading { to, ecn: None, segment: None, from: None };
        self.pending.lock().unwrap().park(heading, data);
        self.stuck.notify_one();
    }

    /// Returns `false` if the system cannot accept the datagrams now. Other errors count as sent: QUIC will detect the loss.
    fn try_send(&self, heading: Heading, data: &[u8]) -> bool {
        let Heading { to, ecn, segment, from } = heading;
        let ecn = ecn.and_then(|ecn| noq_udp::EcnCodepoint::from_bits(ecn as u8));
        let transmit = noq_udp::Transmit { destination: to, ecn, contents: data, segment_size: segment, src_ip: from };
        let sent = self.io.try_io(Interest::WRITABLE, || self.state.try_send(UdpSockRef::from(&self.io), &transmit));
        !matches!(sent, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends queued datagrams whenever the system accepts them. Returns only on an error. Cancel-safe.
    pub async fn flush(&self) -> io::Result<()> {
        loop {
            if !self.has_pending() {
                self.stuck.notified().await;
                continue;
            }
            self.io.writable().await?;
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            while let Some((heading, data)) = pending.queue.pop_front() {
                if !self.try_send(heading, &data) {
                    pending.queue.push_front((heading, data));
                    break;
                }
                pending.bytes -= data.len();
            }
        }
    }

    /// Whether datagrams are queued.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.lock().unwrap_or_else(PoisonError::into_inner).queue.is_empty()
    }

    /// Waits for datagrams and passes all datagrams of one system call to `take`: source, destination, ECN, payload.
    pub async fn receive(
        &self,
        buffer: &mut Vec<u8>,
        mut take: impl FnMut(SocketAddr, Option<IpAddr>, Option<EcnCodepoint>, BytesMut),
    ) -> io::Result<()> {
        self.io.readable().await?;
        buffer.resize(READ * BATCH_SIZE, 0);
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let mut slices: Vec<IoSliceMut<'_>> = buffer.chunks_mut(READ).map(IoSliceMut::new).collect();
        let mut last = 0;
        let read = self.io.try_io(Interest::READABLE, || match self.state.recv(UdpSockRef::from(&self.io), &mut slices, &mut metas)? {
            BATCH_SIZE => Ok(BATCH_SIZE),
            // There are no more datagrams. A further call that only reports this would cost as much as reading some.
            count => {
                last = count;
                Err(io::ErrorKind::WouldBlock.into())
            }
        });
        let count = match read {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => last,
            // Errors caused by an earlier datagram (no route, closed port) are not errors of this socket.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH)) => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for (meta, data) in metas.iter().zip(slices.iter()).take(count) {
            let ecn = meta.ecn.and_then(|ecn| EcnCodepoint::from_bits(ecn as u8));
            let mut all = BytesMut::from(&data[..meta.len]);
            while !all.is_empty() {
                let one = all.split_to(meta.stride.clamp(1, all.len()));
                take(meta.addr, meta.dst_ip, ecn, one);
            }
        }
        Ok(())
    }
}
