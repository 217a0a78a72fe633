//! Limits on redirected flows that the daemon forwards, per user and in total. The limit of open files determines both. Beyond a limit
//! the BPF programs let flows go direct.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use braid_model::PerFamily;
use braid_platform::linux::bpf::redirect::{Redirect, Taking};

/// Open files reserved for other uses: probes, kernel tables, paths, the API, the store.
const RESERVED_FILES: u64 = 512;
/// Maximum number of flows of one user, however many open files there are.
const MAX_PER_USER: usize = 8192;
/// Open files beyond this number are not used.
const MAX_FILES: u64 = 1 << 20;

/// Maximum numbers of simultaneous flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FlowCaps {
    all: usize,
    per_user: usize,
}

impl FlowCaps {
    /// Limits for `open_files` open files. A flow that no peer takes needs two: the program's connection and the daemon's own.
    fn of(open_files: u64) -> Self {
        let files = open_files.min(MAX_FILES);
        let all = (files - RESERVED_FILES.min(files / 2)) / 2;
        let all = usize::try_from(all).unwrap_or(usize::MAX).max(2);
        Self { all, per_user: (all / 4).clamp(1, MAX_PER_USER) }
    }
}

/// A change that the BPF programs must be given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LimitChange {
    /// The user has reached its limit (true), or has room again (false).
    Heavy(u32, bool),
    /// The total limit is reached (true), or there is room again (false).
    Full(bool),
}

/// Numbers of flows, by user and in total.
#[derive(Debug)]
struct Counts {
    caps: FlowCaps,
    users: BTreeMap<u32, usize>,
    all: usize,
    heavy: BTreeSet<u32>,
    full: bool,
}

impl Counts {
    fn new(caps: FlowCaps) -> Self {
        Self { caps, users: BTreeMap::new(), all: 0, heavy: BTreeSet::new(), full: false }
    }

    fn enter(&mut self, user: u32) -> Vec<LimitChange> {
        self.all += 1;
        let own = self.users.entry(user).or_default();
        *own += 1;
        let mut changes = Vec::new();
        if *own >= self.caps.per_user && self.heavy.insert(user) {
            changes.push(LimitChange::Heavy(user, true));
        }
        if self.all >= self.caps.all && !std::mem::replace(&mut self.full, true) {
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
        if left <= release_at(self.caps.per_user) && self.heavy.remove(&user) {
            changes.push(LimitChange::Heavy(user, false));
        }
        if self.all <= release_at(self.caps.all) && std::mem::take(&mut self.full) {
            changes.push(LimitChange::Full(false));
        }
        changes
    }
}

/// Count at which a reached limit is lifted. The margin keeps the limit from toggling with every flow.
fn release_at(bound: usize) -> usize {
    bound - bound.div_ceil(8)
}

/// Counts flows and updates the BPF programs. Clones share the counts.
#[derive(Clone)]
pub(super) struct FlowLimits(Arc<Mutex<Inner>>);

struct Inner {
    counts: Counts,
    /// The system has no more file descriptors.
    exhausted: bool,
    redirect: Option<Arc<Redirect>>,
}

/// Counts one flow while it lives.
pub(super) struct FlowPermit {
    flow_limits: FlowLimits,
    user: u32,
}

impl FlowLimits {
    /// Creates the limits for a process that may have `open_files` open files.
    pub(super) fn new(open_files: u64) -> Self {
        Self(Arc::new(Mutex::new(Inner { counts: Counts::new(FlowCaps::of(open_files)), exhausted: false, redirect: None })))
    }

    /// Sets the BPF side that receives the changes.
    pub(super) fn attach(&self, redirect: Arc<Redirect>) {
        self.lock().redirect = Some(redirect);
    }

    /// Counts a flow of `user`.
    pub(super) fn enter(&self, user: u32) -> FlowPermit {
        let mut inner = self.lock();
        let changes = inner.counts.enter(user);
        inner.publish(&changes);
        drop(inner);
        FlowPermit { flow_limits: self.clone(), user }
    }

    /// Sets whether the system has run out of file descriptors. While it has, new flows go direct.
    pub(super) fn set_exhausted(&self, exhausted: bool) {
        let mut inner = self.lock();
        if inner.exhausted != exhausted {
            inner.exhausted = exhausted;
            inner.update_gate();
        }
    }

    /// Sets whether flows of the gateway's clients are handed to the daemon.
    pub(super) fn take_clients(&self, takes: bool) {
        let inner = self.lock();
        if let Some(redirect) = &inner.redirect {
            redirect.take_clients(takes);
            inner.set_gate();
        }
    }

    /// Sets in which families packets of clients are sent to the daemon's device. They take no files, so no limit applies.
    pub(super) fn take_packets(&self, families: PerFamily<bool>) {
        let inner = self.lock();
        if let Some(redirect) = &inner.redirect {
            redirect.take_packets(families);
            inner.set_gate();
        }
    }

    /// Lets packets of clients to these addresses go direct, and no longer those to others of `before`.
    pub(super) fn set_packet_bypass(&self, before: &BTreeSet<IpAddr>, hosts: &BTreeSet<IpAddr>) {
        let inner = self.lock();
        let Some(redirect) = &inner.redirect else { return };
        let gone = before.difference(hosts).map(|host| (*host, false));
        for (host, bypass) in gone.chain(hosts.difference(before).map(|host| (*host, true))) {
            redirect.let_packets_bypass(host, bypass).unwrap_or_else(|error| tracing::warn!("{error}"));
        }
    }

    /// Last value of [`set_exhausted`](Self::set_exhausted).
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
        inner.publish(&changes);
    }
}

impl Inner {
    fn publish(&self, changes: &[LimitChange]) {
        for change in changes {
            match *change {
                LimitChange::Full(_) => self.update_gate(),
                LimitChange::Heavy(user, heavy) => {
                    let max = self.counts.caps.per_user;
                    if heavy {
                        tracing::info!(user, "a user reached the limit of {max} bonded flows: its new flows go direct");
                    }
                    let done = self.redirect.as_ref().map_or(Ok(()), |redirect| redirect.set_heavy(user, heavy));
                    done.unwrap_or_else(|error| tracing::warn!("{error}"));
                }
            }
        }
    }

    /// Whether new flows may be redirected.
    fn is_open(&self) -> bool {
        !self.exhausted && !self.counts.full
    }

    /// Turns redirection of new flows on or off.
    fn update_gate(&self) {
        match self.is_open() {
            true => tracing::info!("new flows can be bonded again"),
            false => tracing::warn!(
                "no more flows can be bonded: {} flows are bonded, and each may need two open files (raise LimitNOFILE= of the service, or ulimit -Hn); new flows go direct",
                self.counts.all
            ),
        }
        self.set_gate();
    }

    fn set_gate(&self) {
        let Some(redirect) = &self.redirect else { return };
        if let Err(error) = redirect.set_ready(if self.is_open() { Taking::All } else { Taking::Nothing }) {
            tracing::warn!("{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_from_the_number_of_open_files() {
        assert_eq!(FlowCaps::of(65_536), FlowCaps { all: 32_512, per_user: 8128 });
        assert_eq!(FlowCaps::of(u64::MAX).per_user, MAX_PER_USER);
        assert_eq!(FlowCaps::of(400), FlowCaps { all: 100, per_user: 25 });
        assert!([0, 1, 2, 3].iter().all(|files| FlowCaps::of(*files).per_user > 0));
    }

    #[test]
    fn one_user_is_limited_before_the_total_and_released_later() {
        let mut counts = Counts::new(FlowCaps { all: 32, per_user: 8 });
        let changes: Vec<LimitChange> = (0..12).flat_map(|_| counts.enter(1000)).collect();
        assert_eq!(changes, [LimitChange::Heavy(1000, true)]);
        assert_eq!(counts.enter(1001), []);
        let changes: Vec<LimitChange> = (0..12).flat_map(|_| counts.leave(1000)).collect();
        assert_eq!(changes, [LimitChange::Heavy(1000, false)]);
        assert_eq!((counts.users.len(), counts.all, counts.heavy.len()), (1, 1, 0));
        assert_eq!(counts.leave(1000), [], "the user has no flow left");
    }

    #[test]
    fn the_total_is_limited_too() {
        let mut counts = Counts::new(FlowCaps { all: 8, per_user: 4 });
        let changes: Vec<LimitChange> = (0..8).flat_map(|user| counts.enter(user)).collect();
        assert_eq!(changes, [LimitChange::Full(true)]);
        assert_eq!((counts.leave(0), counts.leave(1)), (vec![LimitChange::Full(false)], vec![]));
    }
}
