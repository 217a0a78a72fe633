//! What the command's redirected sockets are to look like.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The most sockets remembered.
const MOST: usize = 16_384;

/// One socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RedirectState {
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
pub(super) struct RedirectStates(Mutex<BTreeMap<u64, RedirectState>>);

impl RedirectStates {
    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    pub(super) fn get(&self, cookie: u64) -> Option<RedirectState> {
        self.all().get(&cookie).copied()
    }

    /// Remembers a socket. Of too many the oldest is forgotten: it shows the loopback's addresses from then on.
    pub(super) fn put(&self, cookie: u64, redirect_state: RedirectState) {
        let mut all = self.all();
        if all.len() >= MOST {
            all.pop_first();
        }
        all.insert(cookie, redirect_state);
    }

    /// Changes a socket's state, unless it was forgotten.
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
        for cookie in 2..2 + MOST as u64 {
            redirect_states.put(cookie, redirect_state);
        }
        assert_eq!(redirect_states.get(1), None);
        assert_eq!(redirect_states.all().len(), MOST);
        assert_eq!(redirect_states.forget(2), Some(redirect_state));
        assert_eq!(redirect_states.forget(2), None);
    }
}
