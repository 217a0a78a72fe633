//! Accounts for the system's buffers of a client's sockets, which are part of the relay's memory.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use braid_bond::BondId;
use braid_model::ByteCount;
use braid_platform::linux::sys::socket::buffered;
use socket2::SockRef;

/// Number of sockets of one client that keep the system's default buffer sizes.
const DEFAULT_SIZE_SOCKETS: usize = 256;
/// Buffer size per direction of further sockets. The system doubles it for its own bookkeeping.
const SMALL_BUFFER: usize = 64 << 10;

/// Sockets of one client's flows.
#[derive(Debug, Default)]
pub(crate) struct Sockets(Mutex<BTreeMap<RawFd, BondId>>);

/// Guard: the socket is counted while the guard lives. Drop it before the socket, since the system reuses the descriptor number.
#[derive(Debug)]
pub(crate) struct Counted<'a> {
    sockets: &'a Sockets,
    socket: RawFd,
}

impl Sockets {
    /// Counts the socket of a flow of `bond`. If the client has many sockets, it gets small buffers.
    pub(crate) fn count(&self, bond: BondId, socket: &impl AsFd) -> Counted<'_> {
        let number = socket.as_fd().as_raw_fd();
        let many = {
            let mut sockets = self.lock();
            sockets.insert(number, bond);
            sockets.len() > DEFAULT_SIZE_SOCKETS
        };
        if many {
            // A failure is harmless: the socket works with larger buffers, and they are counted.
            let socket = SockRef::from(socket);
            let _ = socket.set_recv_buffer_size(SMALL_BUFFER);
            let _ = socket.set_send_buffer_size(SMALL_BUFFER);
        }
        Counted { sockets: self, socket: number }
    }

    /// Bytes that the system holds for the sockets of each bond.
    pub(crate) fn held(&self) -> BTreeMap<BondId, ByteCount> {
        let mut held: BTreeMap<BondId, ByteCount> = BTreeMap::new();
        for (socket, bond) in self.lock().iter() {
            *held.entry(*bond).or_default() += buffered(*socket);
        }
        held
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RawFd, BondId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.sockets.lock().remove(&self.socket);
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn sockets_count_for_their_bond_and_many_sockets_get_small_buffers() {
        let sockets = Sockets::default();
        let [one, other] = [1, 2].map(|name| BondId([name; 16]));
        let bound = || UdpSocket::bind("127.0.0.1:0").unwrap();
        let (full, empty, sender) = (bound(), bound(), bound());
        sender.send_to(&[0; 5000], full.local_addr().unwrap()).unwrap();
        let counted = (sockets.count(one, &full), sockets.count(other, &empty));
        let held = sockets.held();
        assert!(held[&one].get() >= 5000 && held[&other] == ByteCount::ZERO, "{held:?}");
        let size = |socket: &UdpSocket| SockRef::from(socket).recv_buffer_size().unwrap();
        let before = size(&empty);
        let many: Vec<UdpSocket> = (0..DEFAULT_SIZE_SOCKETS).map(|_| bound()).collect();
        let all: Vec<Counted<'_>> = many.iter().map(|socket| sockets.count(one, socket)).collect();
        assert_eq!((size(&empty), size(&many[0]), size(&many[DEFAULT_SIZE_SOCKETS - 1])), (before, before, 2 * SMALL_BUFFER));
        drop((counted, all));
        assert!(sockets.held().is_empty());
    }
}
