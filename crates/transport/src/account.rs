//! Accounting of a client: its limits, bytes and sockets.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use braid_bond::BondId;
use braid_model::{ByteCount, Time};
use braid_peer::destination::Policy;
use braid_peer::limits::{Direction, Limits, Meter};
use braid_peer::registry::{ClientId, Month};

use tokio::sync::Semaphore;

use crate::sockets::{Counted, Sockets};

/// Maximum number of flows of one client that pass this host at a time.
const MAX_WAYS: usize = 256;

/// Meter of a client, shared by all its bonds and flows.
pub(crate) struct Account {
    pub(crate) meter: Mutex<Meter>,
    pub(crate) started: Instant,
    pub(crate) client: Option<ClientId>,
    /// Bytes towards the client and from it that are not written to the registry yet.
    pub(crate) moved: [AtomicU64; 2],
    /// Destination policy of the client, with its own resolver quota.
    pub(crate) policy: Policy,
    pub(crate) sockets: Sockets,
    /// Flows between the client and other hosts that may still pass this host.
    pub(crate) ways: Arc<Semaphore>,
}

impl Account {
    /// Creates the account of a client with these limits and this usage of the current month.
    pub(crate) fn new(limits: Limits, client: Option<(ClientId, Month)>, policy: &Policy) -> Self {
        let started = Instant::now();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        let policy = policy.for_another_client();
        let used = client.map_or(ByteCount::ZERO, |(_, month)| month.down + month.up);
        let meter = Mutex::new(Meter::new(limits, used, Time::ZERO, unix));
        Self {
            meter,
            started,
            client: client.map(|(client, _)| client),
            moved: Default::default(),
            policy,
            sockets: Sockets::default(),
            ways: Arc::new(Semaphore::new(MAX_WAYS)),
        }
    }

    pub(crate) fn now(&self) -> (Time, i64) {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        (Time::from_nanos(self.started.elapsed().as_nanos() as u64) + Duration::from_secs(1), unix)
    }

    pub(crate) fn meter<T>(&self, act: impl FnOnce(&mut Meter) -> T) -> T {
        act(&mut self.meter.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts the system's buffers of the socket of a flow of `bond`.
    pub(crate) fn count_socket(&self, bond: BondId, socket: &impl AsFd) -> Counted<'_> {
        self.sockets.count(bond, socket)
    }

    /// Waits until `amount` bytes may pass, and counts them. Returns `false` if the client's monthly quota is used up.
    pub(crate) async fn pass(&self, direction: Direction, amount: usize) -> bool {
        self.moved[usize::from(direction == Direction::Up)].fetch_add(amount as u64, Ordering::Relaxed);
        let amount = ByteCount::new(amount as u64);
        let (now, unix) = self.now();
        let (due, allowed) = self.meter(|meter| {
            let due = meter.ready_at(direction, amount, now);
            meter.on_bytes(direction, amount, now, unix);
            (due, meter.may_continue().is_ok())
        });
        if due > now {
            tokio::time::sleep(due.since(now)).await;
        }
        allowed
    }
}
