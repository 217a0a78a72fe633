//! When a client dials the paths of its bond: over which link and family, at which of the peer's addresses, and after which pause.
//!
//! Without I/O: whoever drives it dials, and says what became of it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use braid_model::Family;

use crate::PathId;

/// The first pause before a path is dialled again; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest pause, and the one after a refusal.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(15);
/// A path that has not answered after this is dialled anew: its first packets met another network.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// It is given so much more once the peer has begun to answer: a handshake takes two round trips.
pub const MORE_PATIENCE: Duration = Duration::from_secs(15);

/// A link, by its number in the bond, and a family of it.
pub type Route = (u8, Family);

/// The attempts of one bond, a connection being named by a `C`.
#[derive(Debug)]
pub struct Dialler<C> {
    attempts: BTreeMap<Route, Attempt<C>>,
    next_path: u32,
    /// How often in a row the peer did not know a bond that none of its paths has joined.
    forgotten: u32,
}

#[derive(Debug)]
struct Attempt<C> {
    connection: Option<C>,
    path: Option<PathId>,
    joined: bool,
    failures: u32,
    /// When to dial, or to give a dialled connection up.
    due: Option<Instant>,
    /// The dialled connection has been given more time.
    extended: bool,
    /// Which of the peer's addresses to dial: the next one only after a failure, since one that has answered answers again.
    address: usize,
}

impl<C> Default for Attempt<C> {
    fn default() -> Self {
        Self { connection: None, path: None, joined: false, failures: 0, due: None, extended: false, address: 0 }
    }
}

/// Why a connection is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Nothing was heard of it any more.
    Silent,
    /// The other end has closed it, or does not know it any more. Until a path has joined, anybody on the way may have said so.
    Closed,
    /// The peer refused the client, or has shown another key.
    Refused,
    /// The peer does not know the bond.
    UnknownBond,
}

/// What is to be done with a route that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due<C> {
    /// Its connection has answered, and is given more time.
    Waits,
    /// It is dialled, once its connection, if there is one, is given up.
    Dials(Option<C>),
}

impl<C> Default for Dialler<C> {
    fn default() -> Self {
        Self { attempts: BTreeMap::new(), next_path: 0, forgotten: 0 }
    }
}

impl<C: Copy + PartialEq> Dialler<C> {
    /// A link has come, or lives again: it is dialled at once, unless it has a connection.
    pub fn on_link(&mut self, now: Instant, route: Route) {
        let attempt = self.attempts.entry(route).or_default();
        attempt.failures = 0;
        if attempt.connection.is_none() {
            attempt.due = Some(now);
        }
    }

    /// The peer's addresses are others: `place` gives what of a route, by its old place, now stands where, for those whose path is there.
    pub fn on_addresses(&mut self, place: impl Fn(Family, usize) -> Option<usize>) {
        for ((_, family), attempt) in &mut self.attempts {
            attempt.address = Some(attempt.address).filter(|_| attempt.joined).and_then(|old| place(*family, old)).unwrap_or(0);
        }
    }

    /// Addresses were found: whoever waited for one dials.
    pub fn on_found(&mut self, now: Instant) {
        self.attempts.values_mut().filter(|attempt| attempt.connection.is_none()).for_each(|attempt| attempt.due = Some(now));
    }

    /// When something is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.attempts.values().filter_map(|attempt| attempt.due).min()
    }

    /// The routes that are due now; of each, [`on_due`](Self::on_due) is to be asked what to do.
    pub fn due(&self, now: Instant) -> Vec<Route> {
        let due = |(_, attempt): &(&Route, &Attempt<C>)| attempt.due.is_some_and(|due| due <= now);
        self.attempts.iter().filter(due).map(|(route, _)| *route).collect()
    }

    /// What to do with a route that is due; `heard` says whether its connection has heard anything.
    pub fn on_due(&mut self, now: Instant, route: Route, heard: impl FnOnce(C) -> bool) -> Due<C> {
        let Some(attempt) = self.attempts.get_mut(&route) else { return Due::Waits };
        attempt.due = None;
        if attempt.connection.is_some_and(heard) && !std::mem::replace(&mut attempt.extended, true) {
            attempt.due = Some(now + MORE_PATIENCE);
            return Due::Waits;
        }
        let given_up = attempt.connection.take();
        attempt.address += usize::from(given_up.is_some());
        Due::Dials(given_up)
    }

    /// Which of the peer's addresses a route is to dial, counted on beyond the last; and whether it has failed before, so that the peer may have
    /// moved.
    pub fn address(&self, route: Route) -> (usize, bool) {
        self.attempts.get(&route).map_or((0, false), |attempt| (attempt.address, attempt.failures > 0))
    }

    /// A number of its own for the path that is dialled next.
    pub fn next_path(&mut self) -> PathId {
        self.next_path += 1;
        PathId(self.next_path - 1)
    }

    /// A route was dialled.
    pub fn on_dialled(&mut self, now: Instant, route: Route, connection: C, path: PathId) {
        if let Some(attempt) = self.attempts.get_mut(&route) {
            (attempt.connection, attempt.path, attempt.due) = (Some(connection), Some(path), Some(now + PATIENCE));
            (attempt.extended, attempt.joined) = (false, false);
        }
    }

    /// A route could not be dialled: no address of its family is known, or the system refuses `the address`.
    pub fn on_undialled(&mut self, now: Instant, route: Route, address_known: bool) {
        if let Some(attempt) = self.attempts.get_mut(&route) {
            attempt.due = Some(now + pause(attempt.failures));
            attempt.failures += 1;
            attempt.address += usize::from(address_known);
            attempt.joined = false;
        }
    }

    /// A connection's path has joined the bond.
    pub fn on_joined(&mut self, connection: C) {
        self.forgotten = 0;
        if let Some(attempt) = self.attempts.values_mut().find(|attempt| attempt.connection == Some(connection)) {
            (attempt.joined, attempt.failures, attempt.due) = (true, 0, None);
        }
    }

    /// A connection is gone. Whether its path had joined; `None` if it is of no route any more.
    pub fn on_lost(&mut self, now: Instant, connection: C, loss: Loss) -> Option<bool> {
        let attempt = self.attempts.values_mut().find(|attempt| attempt.connection == Some(connection))?;
        let joined = attempt.joined;
        attempt.address += usize::from(!joined && loss != Loss::UnknownBond);
        let pause = match loss {
            // A peer that had let this path in, and whose key is proved, is dialled again at once.
            Loss::Closed | Loss::UnknownBond if joined => Duration::ZERO,
            Loss::Refused => LONGEST_PAUSE,
            _ => pause(attempt.failures),
        };
        (attempt.connection, attempt.path, attempt.joined) = (None, None, false);
        attempt.failures += 1;
        attempt.due = Some(now + pause);
        Some(joined)
    }

    /// Another bond takes the place of this one: all routes are dialled after a `pause`, each at its address.
    pub fn restart(&mut self, now: Instant, pause: Duration) {
        for attempt in self.attempts.values_mut() {
            *attempt = Attempt { due: Some(now + pause), address: attempt.address, ..Attempt::default() };
        }
    }

    /// The same after the peer has forgotten the bond before: at once for one whose path had joined or that was forgotten for the first time, else
    /// with growing pauses, since a peer that always says so would be dialled without end.
    pub fn restart_forgotten(&mut self, now: Instant, joined: bool) {
        if joined {
            return self.restart(now, FIRST_PAUSE);
        }
        let pause = if self.forgotten == 0 { Duration::ZERO } else { pause(self.forgotten) };
        self.forgotten = self.forgotten.saturating_add(1);
        self.restart(now, pause);
    }

    /// The same after the bond has ended by itself.
    pub fn restart_ended(&mut self, now: Instant) {
        self.restart(now, FIRST_PAUSE);
    }

    /// The path of a route that has joined.
    pub fn joined_path(&self, route: Route) -> Option<PathId> {
        self.attempts.get(&route).filter(|attempt| attempt.joined)?.path
    }

    /// The route of a path.
    pub fn route_of(&self, path: PathId) -> Option<Route> {
        self.attempts.iter().find(|(_, attempt)| attempt.path == Some(path)).map(|(route, _)| *route)
    }
}

/// The pause before the next try after so many that failed.
fn pause(failures: u32) -> Duration {
    (FIRST_PAUSE * (1 << failures.min(8))).min(LONGEST_PAUSE)
}
