//! The calls whose answers are deferred.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time that a blocking connect waits here before it waits in the kernel, where signals can interrupt it.
pub(super) const HOLD_TIMEOUT: Duration = Duration::from_secs(1);

/// Numbers of the deferred calls. The guard reads the lowest one, to let these calls continue if this process dies.
pub(super) struct HeldCalls {
    numbers: Mutex<BTreeSet<u64>>,
    /// Lowest of the numbers; `u64::MAX` if there are none.
    oldest: &'static AtomicU64,
}

impl HeldCalls {
    pub(super) fn new(oldest: &'static AtomicU64) -> Arc<Self> {
        Arc::new(Self { numbers: Mutex::default(), oldest })
    }

    /// Records that the call waits here for its answer, until the result is dropped.
    pub(super) fn hold(self: &Arc<Self>, call: u64) -> Hold {
        self.change(|numbers| {
            numbers.insert(call);
        });
        Hold(self.clone(), call)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeSet<u64>)) {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut numbers);
        self.oldest.store(numbers.first().copied().unwrap_or(u64::MAX), Ordering::SeqCst);
    }
}

/// A call that waits here for its answer.
pub(super) struct Hold(Arc<HeldCalls>, u64);

impl Drop for Hold {
    fn drop(&mut self) {
        self.0.change(|numbers| {
            numbers.remove(&self.1);
        });
    }
}
