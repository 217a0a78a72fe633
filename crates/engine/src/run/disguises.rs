//! What the command's carried sockets are to look like.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most sockets remembered.
const MOST: usize = 16_384;

/// One socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Disguise {
    /// Whom its program asked for.
    pub(super) remote: SocketAddr,
    /// The address that it would have had.
    pub(super) local: Option<IpAddr>,
    pub(super) state: State,
}

/// What became of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// A stream whose flow is not open yet.
    Waiting,
    /// A stream whose flow is open.
    Open,
    /// A stream that was not opened, for this reason (`errno`), and of whose failure the kernel does not know yet.
    Failing(i32),
    /// A stream that was not opened, for this reason (`errno`), of which its program has not heard.
    Failed(i32),
    /// A datagram socket; the number tells one connection of a socket from another.
    Datagrams(u64),
}

/// All of them, by their sockets' cookies.
#[derive(Debug, Default)]
pub(super) struct Disguises(Mutex<BTreeMap<u64, Disguise>>);

impl Disguises {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    pub(super) fn get(&self, cookie: u64) -> Option<Disguise> {
        self.all().get(&cookie).copied()
    }

    /// Remembers a socket. Of too many the oldest is forgotten: it shows the loopback's addresses from then on.
    pub(super) fn put(&self, cookie: u64, disguise: Disguise) {
        let mut all = self.all();
        if all.len() >= MOST {
            all.pop_first();
        }
        all.insert(cookie, disguise);
    }

    /// Changes a socket's state, unless it was forgotten.
    pub(super) fn set(&self, cookie: u64, state: State) {
        if let Some(disguise) = self.all().get_mut(&cookie) {
            disguise.state = state;
        }
    }

    pub(super) fn forget(&self, cookie: u64) -> Option<Disguise> {
        self.all().remove(&cookie)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Disguise>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_remembered_until_it_is_forgotten_and_memory_stays_bounded() {
        let disguises = Disguises::default();
        let disguise = Disguise { remote: "192.0.2.1:80".parse().unwrap(), local: None, state: State::Waiting };
        disguises.set(1, State::Open);
        assert!(disguises.is_empty());
        disguises.put(1, disguise);
        disguises.set(1, State::Failed(111));
        assert_eq!(disguises.get(1).unwrap().state, State::Failed(111));
        for cookie in 2..2 + MOST as u64 {
            disguises.put(cookie, disguise);
        }
        assert_eq!(disguises.get(1), None);
        assert_eq!(disguises.all().len(), MOST);
        assert_eq!(disguises.forget(2), Some(disguise));
        assert_eq!(disguises.forget(2), None);
    }
}
