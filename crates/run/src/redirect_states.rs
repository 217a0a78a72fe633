//! The state that the command's redirected sockets present to their program.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of remembered sockets.
const MAX_SOCKETS: usize = 16_384;

/// State of one redirected socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RedirectState {
    /// Destination that its program requested.
    pub(super) remote: SocketAddr,
    /// Local address that the socket would have without redirection.
    pub(super) local: Option<IpAddr>,
    pub(super) state: State,
}

/// Phase of a redirected socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// A stream whose flow is not open yet.
    Waiting,
    /// A stream whose flow is open.
    Open,
    /// A stream whose flow was refused with this `errno`; the kernel's socket has not failed yet.
    Failing(i32),
    /// A stream whose flow was refused with this `errno`; its program has not received the error yet.
    Failed(i32),
    /// A datagram socket; the number distinguishes successive connections of one socket.
    Datagrams(u64),
}

/// All redirected sockets, by socket cookie.
#[derive(Debug, Default)]
pub(super) struct RedirectStates(Mutex<BTreeMap<u64, RedirectState>>);

impl RedirectStates {
    /// Whether no socket is redirected.
    pub(super) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    pub(super) fn get(&self, cookie: u64) -> Option<RedirectState> {
        self.all().get(&cookie).copied()
    }

    /// Adds a socket. At the limit, removes the oldest: that socket shows loopback addresses from then on.
    pub(super) fn put(&self, cookie: u64, redirect_state: RedirectState) {
        let mut all = self.all();
        if all.len() >= MAX_SOCKETS {
            all.pop_first();
        }
        all.insert(cookie, redirect_state);
    }

    /// Changes a socket's state, unless the socket was removed.
    pub(super) fn set(&self, cookie: u64, state: State) {
        if let Some(redirect_state) = self.all().get_mut(&cookie) {
            redirect_state.state = state;
        }
    }

    pub(super) fn forget(&self, cookie: u64) -> Option<RedirectState> {
        self.all().remove(&cookie)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, RedirectState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_remembered_until_it_is_forgotten_and_memory_stays_bounded() {
        let redirect_states = RedirectStates::default();
        let redirect_state = RedirectState { remote: "192.0.2.1:80".parse().unwrap(), local: None, state: State::Waiting };
        redirect_states.set(1, State::Open);
        assert!(redirect_states.is_empty());
        redirect_states.put(1, redirect_state);
        redirect_states.set(1, State::Failed(111));
        assert_eq!(redirect_states.get(1).unwrap().state, State::Failed(111));
        for cookie in 2..2 + MAX_SOCKETS as u64 {
            redirect_states.put(cookie, redirect_state);
        }
        assert_eq!(redirect_states.get(1), None);
        assert_eq!(redirect_states.all().len(), MAX_SOCKETS);
        assert_eq!(redirect_states.forget(2), Some(redirect_state));
        assert_eq!(redirect_states.forget(2), None);
    }
}
