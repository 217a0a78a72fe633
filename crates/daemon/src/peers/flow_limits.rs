//! How many redirected flows the daemon forwards: bounded for each user and for all, by the files it may have open. The kernel's programs let
//! what is beyond go direct.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use braid_platform::linux::bpf::redirect::{Redirect, Taking};

/// Open files that are not for flows: probes, kernel tables, paths, the API, the store.
const KEPT: u64 = 512;
/// More flows of one user than this are no better for it.
const OF_ONE: usize = 8192;
/// More open files than this make no difference.
const FILES: u64 = 1 << 20;

/// The most flows at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bounds {
    all: usize,
    of_one: usize,
}

impl Bounds {
    /// With so many open files. A flow needs two where no peer takes it: the program's connection and its own.
    fn of(open_files: u64) -> Self {
        let files = open_files.min(FILES);
        let all = (files - KEPT.min(files / 2)) / 2;
        let all = usize::try_from(all).unwrap_or(usize::MAX).max(2);
        Self { all, of_one: (all / 4).clamp(1, OF_ONE) }
    }
}

/// What the kernel's programs are to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LimitChange {
    /// A user has as many as it may have, or not any more.
    Heavy(u32, bool),
    /// There are as many as there may be, or not any more.
    Full(bool),
}

/// The flows by user.
#[derive(Debug)]
struct Counts {
    bounds: Bounds,
    users: BTreeMap<u32, usize>,
    all: usize,
    heavy: BTreeSet<u32>,
    full: bool,
}

impl Counts {
    fn new(bounds: Bounds) -> Self {
        Self { bounds, users: BTreeMap::new(), all: 0, heavy: BTreeSet::new(), full: false }
    }

    fn enter(&mut self, user: u32) -> Vec<LimitChange> {
        self.all += 1;
        let own = self.users.entry(user).or_default();
        *own += 1;
        let mut changes = Vec::new();
        if *own >= self.bounds.of_one && self.heavy.insert(user) {
            changes.push(LimitChange::Heavy(user, true));
        }
        if self.all >= self.bounds.all && !std::mem::replace(&mut self.full, true) {
            changes.push(LimitChange::Full(true));
        }
        changes
    }

    fn leave(&mut self, user: u32) -> Vec<LimitChange> {
        let Entry::Occupied(mut own) = self.users.entry(user) else { return Vec::new() };
        self.all -= 1;
        *own.get_mut() -= 1;
        let left = *own.get();
        if left == 0 {
            own.remove();
        }
        let mut changes = Vec::new();
        if left <= eased(self.bounds.of_one) && self.heavy.remove(&user) {
            changes.push(LimitChange::Heavy(user, false));
        }
        if self.all <= eased(self.bounds.all) && std::mem::take(&mut self.full) {
            changes.push(LimitChange::Full(false));
        }
        changes
    }
}

/// Where a bound that was reached is lifted, so that it does not change with each flow.
fn eased(bound: usize) -> usize {
    bound - bound.div_ceil(8)
}

/// Counts the flows, and tells the kernel's programs. Clones are the same.
#[derive(Clone)]
pub(super) struct FlowLimits(Arc<Mutex<Inner>>);

struct Inner {
    counts: Counts,
    /// The system gives no more files.
    exhausted: bool,
    redirect: Option<Arc<Redirect>>,
}

/// A flow is counted for as long as this lives.
pub(super) struct FlowPermit {
    flow_limits: FlowLimits,
    user: u32,
}

impl FlowLimits {
    /// For a process that may have so many open files.
    pub(super) fn new(open_files: u64) -> Self {
        Self(Arc::new(Mutex::new(Inner { counts: Counts::new(Bounds::of(open_files)), exhausted: false, redirect: None })))
    }

    /// Whom to tell.
    pub(super) fn tell(&self, redirect: Arc<Redirect>) {
        self.lock().redirect = Some(redirect);
    }

    /// Counts a flow of this user.
    pub(super) fn enter(&self, user: u32) -> FlowPermit {
        let mut inner = self.lock();
        let changes = inner.counts.enter(user);
        inner.pass_on(&changes);
        drop(inner);
        FlowPermit { flow_limits: self.clone(), user }
    }

    /// The system has no file for one more flow, or has again: meanwhile flows go direct.
    pub(super) fn set_exhausted(&self, exhausted: bool) {
        let mut inner = self.lock();
        if inner.exhausted != exhausted {
            inner.exhausted = exhausted;
            inner.update_gate();
        }
    }

    /// Whether it had none when it was last asked.
    pub(super) fn is_exhausted(&self) -> bool {
        self.lock().exhausted
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for FlowPermit {
    fn drop(&mut self) {
        let mut inner = self.flow_limits.lock();
        let changes = inner.counts.leave(self.user);
        inner.pass_on(&changes);
    }
}

impl Inner {
    fn pass_on(&self, changes: &[LimitChange]) {
        for change in changes {
            match *change {
                LimitChange::Full(_) => self.update_gate(),
                LimitChange::Heavy(user, heavy) => {
                    let most = self.counts.bounds.of_one;
                    if heavy {
                        tracing::info!(user, "a user has {most} bonded flows, the most there may be: its next ones go direct");
                    }
                    let told = self.redirect.as_ref().map_or(Ok(()), |redirect| redirect.set_heavy(user, heavy));
                    told.unwrap_or_else(|error| tracing::warn!("{error}"));
                }
            }
        }
    }

    /// Lets flows be redirected, or not.
    fn update_gate(&self) {
        let Some(redirect) = &self.redirect else { return };
        let open = !self.exhausted && !self.counts.full;
        match open {
            true => tracing::info!("there is room for bonded flows again"),
            false => tracing::warn!(
                "no more flows can be bonded: {} are, and each may need two open files (LimitNOFILE= of the service, ulimit -Hn); new ones go direct",
                self.counts.all
            ),
        }
        if let Err(error) = redirect.set_ready(if open { Taking::All } else { Taking::Nothing }) {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_shared_out() {
        assert_eq!(Bounds::of(65_536), Bounds { all: 32_512, of_one: 8128 });
        assert_eq!(Bounds::of(u64::MAX).of_one, OF_ONE);
        assert_eq!(Bounds::of(400), Bounds { all: 100, of_one: 25 });
        assert!([0, 1, 2, 3].iter().all(|files| Bounds::of(*files).of_one > 0));
    }

    #[test]
    fn one_user_is_stopped_long_before_all_are_and_let_go_on_later() {
        let mut counts = Counts::new(Bounds { all: 32, of_one: 8 });
        let changes: Vec<LimitChange> = (0..12).flat_map(|_| counts.enter(1000)).collect();
        assert_eq!(changes, [LimitChange::Heavy(1000, true)]);
        assert_eq!(counts.enter(1001), []);
        let changes: Vec<LimitChange> = (0..12).flat_map(|_| counts.leave(1000)).collect();
        assert_eq!(changes, [LimitChange::Heavy(1000, false)]);
        assert_eq!((counts.users.len(), counts.all, counts.heavy.len()), (1, 1, 0));
        assert_eq!(counts.leave(1000), [], "there is none of it any more");
    }

    #[test]
    fn all_together_are_stopped_too() {
        let mut counts = Counts::new(Bounds { all: 8, of_one: 4 });
        let changes: Vec<LimitChange> = (0..8).flat_map(|user| counts.enter(user)).collect();
        assert_eq!(changes, [LimitChange::Full(true)]);
        assert_eq!((counts.leave(0), counts.leave(1)), (vec![LimitChange::Full(false)], vec![]));
    }
}
