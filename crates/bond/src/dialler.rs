//! Decides when a client dials the paths of its bond: over which link and address family, to which address of the peer, and after which delay.
//!
//! Without I/O: the driver dials and reports the outcome.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use braid_model::Family;

use crate::PathId;

/// Initial delay before a path is redialled. It doubles up to `MAX_PAUSE`.
const INITIAL_PAUSE: Duration = Duration::from_millis(500);
/// Longest delay before a redial. It also applies after a refusal.
pub const MAX_PAUSE: Duration = Duration::from_secs(15);
/// Time after which an unanswered path is redialled. Its first packets may have been sent into another network.
pub const DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Additional time once the peer has begun to answer: a handshake takes two round trips.
pub const EXTENDED_DIAL_TIMEOUT: Duration = Duration::from_secs(15);

/// A link, by its number in the bond, and an address family.
pub type Route = (u8, Family);

/// Connection attempts of one bond. `C` identifies a connection.
#[derive(Debug)]
pub struct Dialler<C> {
    attempts: BTreeMap<Route, Attempt<C>>,
    next_path: u32,
    /// Number of consecutive reports that the peer does not know the bond, since a path last joined.
    unknown_bond_count: u32,
}

#[derive(Debug)]
struct Attempt<C> {
    connection: Option<C>,
    path: Option<PathId>,
    joined: bool,
    failures: u32,
    /// When to dial, or when to give up the current connection.
    due: Option<Instant>,
    /// Whether the current connection got `EXTENDED_DIAL_TIMEOUT`.
    extended: bool,
    /// Index of the peer's address to dial. It advances only after a failure, since an address that answered is likely to answer again.
    address: usize,
}

impl<C> Default for Attempt<C> {
    fn default() -> Self {
        Self { connection: None, path: None, joined: false, failures: 0, due: None, extended: false, address: 0 }
    }
}

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The connection timed out.
    TimedOut,
    /// The other end closed the connection or no longer has its state. Before the path has joined, an on-path attacker may have forged this.
    Closed,
    /// The peer refused the client, or presented the wrong key.
    Refused,
    /// The peer does not know the bond.
    UnknownBond,
}

/// Action for a route that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due<C> {
    /// The connection has answered. It gets more time.
    Wait,
    /// Dial the route. Close its current connection first, if there is one.
    Dial(Option<C>),
}

impl<C> Default for Dialler<C> {
    fn default() -> Self {
        Self { attempts: BTreeMap::new(), next_path: 0, unknown_bond_count: 0 }
    }
}

impl<C: Copy + PartialEq> Dialler<C> {
    /// A link appeared or recovered. Dials it at once, unless it has a connection.
    pub fn on_link(&mut self, now: Instant, route: Route) {
        let attempt = self.attempts.entry(route).or_default();
        attempt.failures = 0;
        if attempt.connection.is_none() {
            attempt.due = Some(now);
        }
    }

    /// The peer's addresses changed. `place` maps the old index of an address, by family, to its new index. Routes that have joined keep their
    /// address; all others start again at the first.
    pub fn on_addresses(&mut self, place: impl Fn(Family, usize) -> Option<usize>) {
        for ((_, family), attempt) in &mut self.attempts {
            attempt.address = Some(attempt.address).filter(|_| attempt.joined).and_then(|old| place(*family, old)).unwrap_or(0);
        }
    }

    /// New addresses were found. Dials all routes without a connection.
    pub fn on_found(&mut self, now: Instant) {
        self.attempts.values_mut().filter(|attempt| attempt.connection.is_none()).for_each(|attempt| attempt.due = Some(now));
    }

    /// When the next route is due.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.attempts.values().filter_map(|attempt| attempt.due).min()
    }

    /// Routes that are due now. Call [`on_due`](Self::on_due) for each.
    pub fn due(&self, now: Instant) -> Vec<Route> {
        let due = |(_, attempt): &(&Route, &Attempt<C>)| attempt.due.is_some_and(|due| due <= now);
        self.attempts.iter().filter(due).map(|(route, _)| *route).collect()
    }

    /// Returns the action for a route that is due. `answered` returns whether a connection has received anything.
    pub fn on_due(&mut self, now: Instant, route: Route, answered: impl FnOnce(C) -> bool) -> Due<C> {
        let Some(attempt) = self.attempts.get_mut(&route) else { return Due::Wait };
        attempt.due = None;
        if attempt.connection.is_some_and(answered) && !std::mem::replace(&mut attempt.extended, true) {
            attempt.due = Some(now + EXTENDED_DIAL_TIMEOUT);
            return Due::Wait;
        }
        let given_up = attempt.connection.take();
        attempt.address += usize::from(given_up.is_some());
        Due::Dial(given_up)
    }

    /// Index of the peer's address that the route dials next (counted on past the last address; the caller wraps it), and whether the route has
    /// failed before, so that the peer's addresses may have changed.
    pub fn address(&self, route: Route) -> (usize, bool) {
        self.attempts.get(&route).map_or((0, false), |attempt| (attempt.address, attempt.failures > 0))
    }

    /// Returns a new identifier for the path that is dialled next.
    pub fn next_path(&mut self) -> PathId {
        self.next_path += 1;
        PathId(self.next_path - 1)
    }

    /// A dial was started.
    pub fn on_dialled(&mut self, now: Instant, route: Route, connection: C, path: PathId) {
        if let Some(attempt) = self.attempts.get_mut(&route) {
            (attempt.connection, attempt.path, attempt.due) = (Some(connection), Some(path), Some(now + DIAL_TIMEOUT));
            (attempt.extended, attempt.joined) = (false, false);
        }
    }

    /// A dial could not be started: no address of the family is known, or the system rejects the address (`address_known`).
    pub fn on_dial_failed(&mut self, now: Instant, route: Route, address_known: bool) {
        if let Some(attempt) = self.attempts.get_mut(&route) {
            attempt.due = Some(now + pause(attempt.failures));
            attempt.failures += 1;
            attempt.address += usize::from(address_known);
            attempt.joined = false;
        }
    }

    /// The path of a connection joined the bond.
    pub fn on_joined(&mut self, connection: C) {
        self.unknown_bond_count = 0;
        if let Some(attempt) = self.attempts.values_mut().find(|attempt| attempt.connection == Some(connection)) {
            (attempt.joined, attempt.failures, attempt.due) = (true, 0, None);
        }
    }

    /// A connection ended. Returns whether its path had joined; `None` if the connection belongs to no route any more.
    pub fn on_lost(&mut self, now: Instant, connection: C, loss: Loss) -> Option<bool> {
        let attempt = self.attempts.values_mut().find(|attempt| attempt.connection == Some(connection))?;
        let joined = attempt.joined;
        attempt.address += usize::from(!joined && loss != Loss::UnknownBond);
        let pause = match loss {
            // A peer that had accepted this path, and whose key is verified, is redialled at once.
            Loss::Closed | Loss::UnknownBond if joined => Duration::ZERO,
            Loss::Refused => MAX_PAUSE,
            _ => pause(attempt.failures),
        };
        (attempt.connection, attempt.path, attempt.joined) = (None, None, false);
        attempt.failures += 1;
        attempt.due = Some(now + pause);
        Some(joined)
    }

    /// A new bond replaces this one. Redials all routes after `pause`, each at its current address.
    pub fn restart(&mut self, now: Instant, pause: Duration) {
        for attempt in self.attempts.values_mut() {
            *attempt = Attempt { due: Some(now + pause), address: attempt.address, ..Attempt::default() };
        }
    }

    /// Restarts after the peer lost the bond's state. The delay is short if a path had joined, and zero at the first report; after that it grows,
    /// since a peer that reports this every time would otherwise be redialled in a loop.
    pub fn restart_unknown_bond(&mut self, now: Instant, joined: bool) {
        if joined {
            return self.restart(now, INITIAL_PAUSE);
        }
        let pause = if self.unknown_bond_count == 0 { Duration::ZERO } else { pause(self.unknown_bond_count) };
        self.unknown_bond_count = self.unknown_bond_count.saturating_add(1);
        self.restart(now, pause);
    }

    /// Restarts after the bond ended at this end.
    pub fn restart_ended(&mut self, now: Instant) {
        self.restart(now, INITIAL_PAUSE);
    }

    /// The current connection of a route, whether or not its path has joined.
    pub fn connection(&self, route: Route) -> Option<C> {
        self.attempts.get(&route)?.connection
    }

    /// The path of a route, if it has joined.
    pub fn joined_path(&self, route: Route) -> Option<PathId> {
        self.attempts.get(&route).filter(|attempt| attempt.joined)?.path
    }

    /// The route of a path.
    pub fn route_of(&self, path: PathId) -> Option<Route> {
        self.attempts.iter().find(|(_, attempt)| attempt.path == Some(path)).map(|(route, _)| *route)
    }
}

/// Delay before the next attempt after this many failures.
fn pause(failures: u32) -> Duration {
    (INITIAL_PAUSE * (1 << failures.min(8))).min(MAX_PAUSE)
}
