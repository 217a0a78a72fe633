//! Answers calls by writing into the caller's memory, as the kernel would.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use super::sys::ProcessMemory;
use super::{Listener, RawCall, Reaches, Socket, sys};

/// Maximum size of a datagram.
const MAX_DATAGRAM: usize = 65_535;
/// Maximum size of the control messages, in words of 8 bytes.
const MAX_CONTROL: usize = 512;
/// Maximum number of pieces of a buffer (`UIO_MAXIOV`).
const MAX_PIECES: u64 = 1024;
/// Maximum number of datagrams in one call.
const MAX_DATAGRAMS: u64 = 64;

/// Result of a call: a value or an error number.
pub type Told = Result<i64, i32>;

impl Listener {
    /// Answers a `getpeername` or `getsockname` on a socket that `reaches` these families.
    pub fn answer_address(&self, call: &RawCall, reaches: Reaches, address: SocketAddr) -> Told {
        put_address(&self.open_memory(call)?, call.thread, (call.args[1], call.args[2]), reaches, address)?;
        Ok(0)
    }

    /// Answers a `getsockopt` of `SO_ERROR`; 0 means no error.
    pub fn answer_error(&self, call: &RawCall, error: i32) -> Told {
        let memory = self.open_memory(call)?;
        let (value, length) = (call.args[3], call.args[4]);
        let room = u32::from_ne_bytes(get(call.thread, length)?) as i32;
        let room = usize::try_from(room).map_err(|_| libc::EINVAL)?.min(size_of::<i32>());
        put(&memory, value, &error.to_ne_bytes()[..room])?;
        put(&memory, length, &(room as u32).to_ne_bytes())?;
        Ok(0)
    }

    /// Answers a `recvfrom`, `recvmsg` or `recvmmsg` on a connected datagram socket with the next pending datagram, as if it came from `from`. A
    /// `recvmmsg` receives as many of the requested datagrams as are pending. Returns `Err(EAGAIN)` if none is pending.
    pub fn answer_datagram(&self, call: &RawCall, socket: &Socket, from: SocketAddr) -> Told {
        let (memory, thread, args) = (self.open_memory(call)?, call.thread, call.args);
        match call.number {
            libc::SYS_recvfrom => {
                let room = [(args[1], args[2])];
                let got = self.receive(call, &memory, socket, &room, 0, args[3] as i32)?;
                if args[5] != 0 {
                    put_address(&memory, thread, (args[4], args[5]), socket.reaches(), from)?;
                }
                Ok(got.length as i64)
            }
            libc::SYS_recvmsg => self.tell_message(call, &memory, socket, args[1], args[2] as i32, from),
            _ => {
                for index in 0..(args[2] as u32 as u64).min(MAX_DATAGRAMS) {
                    let at = args[1].wrapping_add(index * MMSGHDR);
                    match self.tell_message(call, &memory, socket, at, args[3] as i32, from) {
                        Ok(length) => put(&memory, at.wrapping_add(MSGHDR), &(length as u32).to_ne_bytes())?,
                        Err(_) if index > 0 => return Ok(index as i64),
                        Err(error) => return Err(error),
                    }
                }
                Ok((args[2] as u32 as u64).min(MAX_DATAGRAMS) as i64)
            }
        }
    }

    /// Answers a `sendto`, `sendmsg` or `sendmmsg` whose address is the peer of the connected datagram socket, by sending without an address. For
    /// several messages, returns the number sent.
    pub fn send(&self, call: &RawCall, socket: &Socket) -> Told {
        let (thread, args) = (call.thread, call.args);
        match call.number {
            libc::SYS_sendto => {
                let bytes = gather(thread, &[(args[1], args[2])])?;
                self.ensure_waiting(call)?;
                let sent = sys::send_message(socket.as_fd(), &bytes, &[], args[3] as i32);
                sent.map(|sent| sent as i64).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
            }
            libc::SYS_sendmsg => self.send_message(call, socket, args[1], args[2] as i32),
            _ => {
                let memory = self.open_memory(call)?;
                let count = u64::from(args[2] as u32).min(MAX_DATAGRAMS);
                for index in 0..count {
                    let at = args[1].wrapping_add(index * MMSGHDR);
                    match self.send_message(call, socket, at, args[3] as i32) {
                        Ok(length) => put(&memory, at.wrapping_add(MSGHDR), &(length as u32).to_ne_bytes())?,
                        Err(_) if index > 0 => return Ok(index as i64),
                        Err(error) => return Err(error),
                    }
                }
                Ok(count as i64)
            }
        }
    }

    fn send_message(&self, call: &RawCall, socket: &Socket, at: u64, flags: i32) -> Told {
        let message = Message::read(call.thread, at)?;
        let bytes = gather(call.thread, &message.pieces)?;
        let mut control = vec![0; if message.control == 0 { 0 } else { message.room.min(MAX_CONTROL as u64 * 8) as usize }];
        if !control.is_empty() {
            sys::read_memory(call.thread, message.control, &mut control).map_err(|error| error.raw_os_error().unwrap_or(libc::EFAULT))?;
        }
        self.ensure_waiting(call)?;
        let sent = sys::send_message(socket.as_fd(), &bytes, &control, flags);
        sent.map(|sent| sent as i64).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// Whether a datagram call may block: `false` if its flags include `MSG_DONTWAIT`.
    pub fn may_wait(&self, call: &RawCall) -> bool {
        flags_of(call) & libc::MSG_DONTWAIT == 0
    }

    /// Whether the call reads the socket's error queue instead of datagrams.
    pub fn wants_errors(&self, call: &RawCall) -> bool {
        flags_of(call) & libc::MSG_ERRQUEUE != 0
    }

    fn tell_message(&self, call: &RawCall, memory: &ProcessMemory, socket: &Socket, at: u64, flags: i32, from: SocketAddr) -> Told {
        let message = Message::read(call.thread, at)?;
        let room = if message.control == 0 { 0 } else { message.room };
        let got = self.receive(call, memory, socket, &message.pieces, room, flags)?;
        put(memory, message.control, &got.control)?;
        if message.name != 0 {
            let bytes = sockaddr(socket.reaches(), from);
            put(memory, message.name, &bytes[..(message.name_room as usize).min(bytes.len())])?;
            put(memory, at.wrapping_add(8), &(bytes.len() as u32).to_ne_bytes())?;
        }
        put(memory, at.wrapping_add(40), &(got.control.len() as u64).to_ne_bytes())?;
        put(memory, at.wrapping_add(48), &got.flags.to_ne_bytes())?;
        Ok(got.length as i64)
    }

    /// Receives a datagram and distributes it over these pieces (address, length) of the caller's memory.
    fn receive(
        &self,
        call: &RawCall,
        memory: &ProcessMemory,
        socket: &Socket,
        pieces: &[(u64, u64)],
        control_room: u64,
        flags: i32,
    ) -> Result<ReceivedMessage, i32> {
        let room = pieces.iter().fold(0u64, |sum, (_, length)| sum.saturating_add(*length)).min(MAX_DATAGRAM as u64) as usize;
        let mut bytes = vec![0; room];
        let mut words = vec![0u64; (control_room / 8).min(MAX_CONTROL as u64) as usize];
        self.ensure_waiting(call)?;
        let received = sys::receive_message(socket.as_fd(), &mut bytes, &mut words, flags & !libc::MSG_CMSG_CLOEXEC);
        let received = received.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        let mut rest = &bytes[..received.length.min(room)];
        for (address, length) in pieces {
            let (now, later) = rest.split_at(rest.len().min(usize::try_from(*length).unwrap_or(usize::MAX)));
            put(memory, *address, now)?;
            rest = later;
        }
        let control = words.iter().flat_map(|word| word.to_ne_bytes()).take(received.control).collect();
        Ok(ReceivedMessage { length: received.length, control, flags: received.flags })
    }

    /// Opens the memory of the waiting thread. The check must follow the opening: only then is it certain that the memory belongs to that thread and
    /// not to one with a reused id.
    fn open_memory(&self, call: &RawCall) -> Result<ProcessMemory, i32> {
        let memory = ProcessMemory::open(call.thread).map_err(|error| error.raw_os_error().unwrap_or(libc::EFAULT))?;
        self.ensure_waiting(call).map(|()| memory)
    }

    fn ensure_waiting(&self, call: &RawCall) -> Result<(), i32> {
        if self.is_waiting(call.id) { Ok(()) } else { Err(libc::EINTR) }
    }
}

/// A caller's `struct msghdr`.
struct Message {
    name: u64,
    name_room: u32,
    pieces: Vec<(u64, u64)>,
    control: u64,
    room: u64,
}

impl Message {
    fn read(thread: i32, at: u64) -> Result<Self, i32> {
        let header: [u8; MSGHDR as usize] = get(thread, at)?;
        let word = |offset: usize| header.get(offset..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        let (first, count) = (word(16), word(24));
        if count > MAX_PIECES {
            return Err(libc::EMSGSIZE);
        }
        let mut pieces = Vec::new();
        for index in 0..count {
            let piece: [u8; 16] = get(thread, first.wrapping_add(index * 16))?;
            let half = |offset: usize| piece.get(offset..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| u64::from_ne_bytes(*bytes));
            pieces.push((half(0), half(8)));
        }
        Ok(Self { name: word(0), name_room: word(8) as u32, pieces, control: word(32), room: word(40) })
    }
}

/// Reads these pieces of the caller's memory. Fails if they exceed the maximum size of a datagram.
fn gather(thread: i32, pieces: &[(u64, u64)]) -> Result<Vec<u8>, i32> {
    let mut bytes = Vec::new();
    for (address, length) in pieces.iter().filter(|(_, length)| *length > 0) {
        let begin = bytes.len();
        let length = usize::try_from(*length).ok().filter(|length| length.saturating_add(begin) <= MAX_DATAGRAM).ok_or(libc::EMSGSIZE)?;
        bytes.resize(begin + length, 0);
        match sys::read_memory(thread, *address, &mut bytes[begin..]) {
            Ok(read) if read == length => {}
            Ok(_) => return Err(libc::EFAULT),
            Err(error) => return Err(error.raw_os_error().unwrap_or(libc::EFAULT)),
        }
    }
    Ok(bytes)
}

struct ReceivedMessage {
    length: usize,
    control: Vec<u8>,
    flags: i32,
}

/// Sizes of `struct msghdr` and `struct mmsghdr` with 64-bit pointers.
const MSGHDR: u64 = 56;
const MMSGHDR: u64 = 64;

fn flags_of(call: &RawCall) -> i32 {
    let index = if call.number == libc::SYS_recvmsg { 2 } else { 3 };
    call.args[index] as i32
}

/// Writes an address into the caller's buffer, truncated to its size, and the untruncated length in place of the size.
fn put_address(memory: &ProcessMemory, thread: i32, (to, length): (u64, u64), reaches: Reaches, address: SocketAddr) -> Result<(), i32> {
    let room = u32::from_ne_bytes(get(thread, length)?) as i32;
    let room = usize::try_from(room).map_err(|_| libc::EINVAL)?;
    let bytes = sockaddr(reaches, address);
    put(memory, to, &bytes[..room.min(bytes.len())])?;
    put(memory, length, &(bytes.len() as u32).to_ne_bytes())
}

fn get<const N: usize>(thread: i32, address: u64) -> Result<[u8; N], i32> {
    let mut bytes = [0; N];
    match sys::read_memory(thread, address, &mut bytes) {
        Ok(read) if read == N => Ok(bytes),
        Ok(_) => Err(libc::EFAULT),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EFAULT)),
    }
}

fn put(memory: &ProcessMemory, address: u64, bytes: &[u8]) -> Result<(), i32> {
    if bytes.is_empty() {
        return Ok(());
    }
    memory.write(address, bytes).map_err(|error| error.raw_os_error().unwrap_or(libc::EFAULT))
}

/// Encodes an address as the kernel does: for an IPv6 socket always in IPv6 form.
fn sockaddr(reaches: Reaches, address: SocketAddr) -> Vec<u8> {
    let port = address.port().to_be_bytes();
    let mut bytes = Vec::with_capacity(size_of::<libc::sockaddr_in6>());
    let v6 = match (reaches, address.ip()) {
        (Reaches::V4, IpAddr::V4(ip)) => {
            bytes.extend((libc::AF_INET as u16).to_ne_bytes());
            bytes.extend(port);
            bytes.extend(ip.octets());
            bytes.extend([0; 8]);
            return bytes;
        }
        (_, IpAddr::V4(ip)) => ip.to_ipv6_mapped(),
        (_, IpAddr::V6(ip)) => ip,
    };
    bytes.extend((libc::AF_INET6 as u16).to_ne_bytes());
    bytes.extend(port);
    bytes.extend([0; 4]);
    bytes.extend(v6.octets());
    bytes.extend([0; 4]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_socket_receives_ipv6_addresses() {
        let read = |reaches, text: &str| super::super::parse_address(&sockaddr(reaches, text.parse().unwrap()));
        for (reaches, text, length) in
            [(Reaches::V4, "192.0.2.1:80", 16), (Reaches::Both, "192.0.2.1:80", 28), (Reaches::V6, "[2001:db8::1]:9", 28)]
        {
            assert_eq!(read(reaches, text), Some(text.parse().unwrap()));
            assert_eq!(sockaddr(reaches, text.parse().unwrap()).len(), length);
        }
    }

    #[test]
    fn an_address_is_truncated_to_the_buffer_and_its_length_returned() {
        let me = std::process::id() as i32;
        let memory = ProcessMemory::open(me).unwrap();
        let at = |bytes: &mut [u8]| bytes.as_mut_ptr() as u64;
        let (mut room, mut length) = ([0xffu8; 28], 6u32.to_ne_bytes());
        put_address(&memory, me, (at(&mut room), at(&mut length)), Reaches::V4, "192.0.2.1:80".parse().unwrap()).unwrap();
        assert_eq!((&room[2..8], u32::from_ne_bytes(length)), (&[0, 80, 192, 0, 0xff, 0xff][..], 16));
        let mut negative = (-1i32).to_ne_bytes();
        let result = put_address(&memory, me, (at(&mut room), at(&mut negative)), Reaches::V4, "192.0.2.1:80".parse().unwrap());
        assert_eq!(result, Err(libc::EINVAL));
        assert_eq!(put_address(&memory, me, (at(&mut room), 8), Reaches::V4, "192.0.2.1:80".parse().unwrap()), Err(libc::EFAULT));
    }
}
