//! State that outlives the daemon: connects the [`Store`] and the [`Core`].
//!
//! A disk can be slow, full or unavailable for minutes, and the event loop must keep running. So all disk access is on separate threads.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use braid_control::core::Core;
use braid_control::history;
use braid_control::steering::{AppId, DemandEstimate, ExeId, Steering};
use braid_decide::capacity::Capacity;
use braid_model::{ByteCount, Rate, Time};
use braid_platform::linux::process;
use braid_store::{AppKey, AppRow, LinkKey, LinkRow, MeasuredRow, StabilityRow, Store, UsageRow};

/// Time that the start waits for the executables to be found; it continues without them.
const RECALL_TIMEOUT: Duration = Duration::from_millis(30);
/// A write that takes longer causes a warning.
const SLOW_WRITE: Duration = Duration::from_secs(5);
/// Interval at which a task that waits for a write looks for its end.
const WRITE_PAUSE: Duration = Duration::from_millis(10);
/// Time that the shutdown waits for the disk.
const FINAL_WRITE_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum number of history rows that wait for the disk: those of three days.
const HISTORY_LIMIT: usize = 1000;

/// The learned values and the history. A separate thread writes them to disk.
pub(crate) struct StateStore {
    folder: PathBuf,
    /// Locked while a thread writes.
    store: Arc<Mutex<Store>>,
    /// Learned demand, once the executables are found.
    recalled: Option<mpsc::Receiver<Vec<DemandEstimate>>>,
    learnt: braid_store::Learnt,
    /// Rows that the store has not received yet.
    pending: PendingRows,
    warnings: Vec<String>,
    /// When the last write started.
    written: Instant,
    /// Links that were already given their stored values.
    recognised: BTreeSet<LinkKey>,
}

/// Rows for the store.
#[derive(Default)]
struct PendingRows {
    apps: BTreeMap<AppKey, AppRow>,
    links: BTreeMap<LinkKey, LinkRow>,
    usage: BTreeMap<LinkKey, UsageRow>,
    stability: BTreeMap<LinkKey, StabilityRow>,
    measured: BTreeMap<LinkKey, MeasuredRow>,
    history: history::Rows,
}

impl StateStore {
    /// Opens the store. Errors become warnings; they never keep the daemon from running.
    pub(crate) fn open(folder: &Path) -> Self {
        let (store, learnt, warnings) = Store::open(folder);
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        let recalled = None;
        let (store, pending, recognised) = (Arc::new(Mutex::new(store)), PendingRows::default(), BTreeSet::new());
        Self { folder: folder.to_owned(), store, recalled, learnt, pending, warnings, written: Instant::now(), recognised }
    }

    /// History rows of earlier runs. Returns them once.
    pub(crate) fn take_history(&mut self) -> BTreeMap<(String, u64), String> {
        std::mem::take(&mut self.learnt.history)
    }

    /// Adds history rows to the next [`keep`](Self::keep).
    pub(crate) fn keep_history(&mut self, rows: history::Rows) {
        self.pending.history.extend(rows);
        while self.pending.history.len() > HISTORY_LIMIT {
            self.pending.history.pop_first();
        }
    }

    /// Warnings for the user.
    pub(crate) fn trouble(&self) -> Vec<String> {
        let now = match try_store(&self.store) {
            Some(store) => store.trouble().map(str::to_owned),
            None if self.written.elapsed() < SLOW_WRITE => None,
            None => {
                Some(format!("the disk of {} does not respond: learned values are kept in memory until it does", self.folder.display()))
            }
        };
        let now = now.filter(|trouble| !self.warnings.contains(trouble));
        self.warnings.iter().cloned().chain(now).collect()
    }

    /// Starts to look for the executables of the stored demand, on a thread: a path may be on a network file system that does not respond.
    pub(crate) fn begin_recall<S: Steering>(&mut self, core: &mut Core<S>, now: Time, unix: i64) {
        let rows: Vec<_> = self.learnt.apps.iter().map(|(key, row)| (key.clone(), *row)).collect();
        let (found, recalled) = mpsc::sync_channel(1);
        let find = move || {
            // A removed program, or one replaced by another file at the same path, starts with the default expectation.
            let learnt = rows.iter().filter_map(|(key, row)| Some(learnt(process::exe_id(Path::new(&key.exe))?, key, row, now, unix)));
            let _ = found.send(learnt.collect());
        };
        if let Err(error) = thread::Builder::new().spawn(find) {
            tracing::warn!("learned demand of earlier runs is not used: {error}");
        }
        let first = recalled.recv_timeout(RECALL_TIMEOUT);
        self.recalled = Some(recalled);
        self.seed(core, first.ok());
    }

    /// Seeds the steering with the executables found since the last call.
    pub(crate) fn poll_recall<S: Steering>(&mut self, core: &mut Core<S>) {
        let found = self.recalled.as_ref().and_then(|recalled| recalled.try_recv().ok());
        self.seed(core, found);
    }

    fn seed<S: Steering>(&mut self, core: &mut Core<S>, found: Option<Vec<DemandEstimate>>) {
        let Some(found) = found else { return };
        self.recalled = None;
        if let Err(error) = found.iter().try_for_each(|learnt| core.steering().seed(learnt)) {
            tracing::warn!("{error}");
        }
    }

    /// Gives links that appeared their stored capacity, stability, used allowance and bytes spent on measurements. `unix` is the Unix time in seconds.
    pub(crate) fn restore_links<S: Steering>(&mut self, core: &mut Core<S>, now: Time, unix: i64) {
        let mut present = BTreeSet::new();
        for link in core.all_links_mut() {
            let key = LinkKey::of(&link.facts);
            if !self.recognised.contains(&key) {
                if let Some(row) = self.learnt.links.get(&key) {
                    let learnt = [row.capacity_down, row.capacity_up];
                    for (capacity, bps) in link.capacity.iter_mut().zip(learnt) {
                        capacity.recall(Rate::from_bps(bps.unwrap_or(0)));
                    }
                }
                if let Some(row) = self.learnt.usage.get(&device_key(&key)) {
                    link.recall_usage(ByteCount::new(row.used), row.period);
                }
                if let Some(row) = self.learnt.stability.get(&device_key(&key)) {
                    link.stability.recall(row.sums);
                }
                if let Some(row) = self.learnt.measured.get(&device_key(&key)) {
                    // A clock that was set back makes the day longer, and never ends it early.
                    let age = u64::try_from(unix).unwrap_or(0).saturating_sub(row.since);
                    link.measurements.recall(now, ByteCount::new(row.spent), Duration::from_secs(age));
                }
            }
            present.insert(key);
        }
        self.recognised = present;
    }

    /// Writes new values in the background. The receiver gets whether they are on the disk ([`is_on_disk`]). `None`: an earlier write still waits
    /// for the disk, so the new values wait for the next call.
    pub(crate) fn keep<S: Steering>(&mut self, core: &mut Core<S>, now: Time, unix: i64) -> Option<mpsc::Receiver<bool>> {
        self.gather(core, now, unix);
        self.fill_store().then(|| self.write())
    }

    /// Whether an earlier write still waits for the disk.
    pub(crate) fn is_writing(&self) -> bool {
        try_store(&self.store).is_none()
    }

    /// Writes for the last time and waits for the disk, at most [`FINAL_WRITE_TIMEOUT`].
    pub(crate) fn keep_last<S: Steering>(&mut self, core: &mut Core<S>, now: Time, unix: i64) {
        self.gather(core, now, unix);
        let end = Instant::now() + FINAL_WRITE_TIMEOUT;
        while Instant::now() < end {
            if !self.fill_store() {
                thread::sleep(Duration::from_millis(5));
            } else if self.write().recv_timeout(end.saturating_duration_since(Instant::now())) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
        tracing::warn!("the last learned values are not stored: the disk of {} does not respond", self.folder.display());
    }

    /// Moves new rows into the store; false if a thread is writing it.
    fn fill_store(&mut self) -> bool {
        let Some(mut store) = try_store(&self.store) else { return false };
        let pending = std::mem::take(&mut self.pending);
        pending.apps.into_iter().for_each(|(key, row)| store.put_app(key, row));
        pending.links.into_iter().for_each(|(key, row)| store.put_link(key, row));
        pending.usage.into_iter().for_each(|(key, row)| store.put_usage(key, row));
        pending.stability.into_iter().for_each(|(key, row)| store.put_stability(key, row));
        pending.measured.into_iter().for_each(|(key, row)| store.put_measured(key, row));
        pending.history.into_iter().for_each(|((kind, at), body)| store.put_history(kind, at, body));
        true
    }

    /// Writes the pending rows on a separate thread. When the write has finished, the receiver gets whether the rows are on the disk. If no thread can be
    /// started, the receiver is closed, and the rows wait for the next write.
    fn write(&mut self) -> mpsc::Receiver<bool> {
        self.written = Instant::now();
        let store = Arc::clone(&self.store);
        let (done, ended) = mpsc::sync_channel(1);
        let write = move || {
            let mut store = store.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Some(trouble) = store.flush() {
                tracing::warn!("{trouble}");
            }
            let written = store.trouble().is_none();
            drop(store);
            let _ = done.send(written);
        };
        if let Err(error) = thread::Builder::new().spawn(write) {
            tracing::warn!("learned values are not stored now: {error}");
        }
        ended
    }

    /// Collects new values from the core.
    fn gather<S: Steering>(&mut self, core: &mut Core<S>, now: Time, unix: i64) {
        let unix = u64::try_from(unix).unwrap_or(0);
        for learnt in core.steering().estimates().unwrap_or_default() {
            let Some(exe) = core.executable_of(&learnt.app) else { continue };
            let key = AppKey { exe, name: learnt.app.name.clone(), port: learnt.port };
            let row = AppRow {
                demand_down: learnt.down.get(),
                demand_up: learnt.up.get(),
                samples: learnt.count,
                updated: unix.saturating_sub(now.since(learnt.updated).as_secs()),
            };
            // Times are rounded, so they may differ by a second.
            let same = |known: &AppRow| AppRow { updated: 0, ..*known } == AppRow { updated: 0, ..row };
            if !self.learnt.apps.get(&key).is_some_and(same) {
                self.pending.apps.insert(key.clone(), row);
                self.learnt.apps.insert(key, row);
            }
        }
        for apps in [&mut self.learnt.apps, &mut self.pending.apps] {
            braid_store::prune(apps, |row| row.updated);
        }
        for link in core.all_links_mut() {
            let key = LinkKey::of(&link.facts);
            let learnt = |capacity: &Capacity| {
                let estimate = capacity.estimate(now);
                (!capacity.is_fixed() && estimate.age.is_some()).then(|| estimate.rate.bps())
            };
            let row = LinkRow { capacity_down: learnt(&link.capacity.down), capacity_up: learnt(&link.capacity.up), updated: unix };
            if row.capacity_down.is_some() || row.capacity_up.is_some() {
                self.learnt.links.insert(key.clone(), row);
                self.pending.links.insert(key.clone(), row);
            }
            if let Some(allowance) = &link.allowance {
                let row = UsageRow { used: allowance.used().get(), period: allowance.period(), updated: unix };
                self.learnt.usage.insert(device_key(&key), row);
                self.pending.usage.insert(device_key(&key), row);
            }
            if let Some(sums) = link.stability.sums() {
                let row = StabilityRow { sums, updated: unix };
                self.learnt.stability.insert(device_key(&key), row);
                self.pending.stability.insert(device_key(&key), row);
            }
            if let Some((spent, age)) = link.measurements.day(now) {
                let row = MeasuredRow { spent: spent.get(), since: unix.saturating_sub(age.as_secs()) };
                // Times are rounded, so they may differ by a second. If they differ by more, the clock was set or the machine slept: a stored
                // start in the future would never let the day end.
                let same = |known: &MeasuredRow| known.spent == row.spent && known.since.abs_diff(row.since) <= 1;
                if !self.learnt.measured.get(&device_key(&key)).is_some_and(same) {
                    self.learnt.measured.insert(device_key(&key), row);
                    self.pending.measured.insert(device_key(&key), row);
                }
            }
        }
        for links in [&mut self.learnt.links, &mut self.pending.links] {
            braid_store::prune(links, |row| row.updated);
        }
        for links in [&mut self.learnt.stability, &mut self.pending.stability] {
            braid_store::prune(links, |row| row.updated);
        }
        for links in [&mut self.learnt.measured, &mut self.pending.measured] {
            braid_store::prune(links, |row| row.since);
        }
    }
}

/// Whether a write has reached the disk. Waits for it, at most [`SLOW_WRITE`].
pub(crate) async fn is_on_disk(write: Option<mpsc::Receiver<bool>>) -> bool {
    let Some(write) = write else { return false };
    let begin = Instant::now();
    // A thread that waits could not be started on a system that has no thread left.
    while begin.elapsed() < SLOW_WRITE {
        match write.try_recv() {
            Err(TryRecvError::Empty) => tokio::time::sleep(WRITE_PAUSE).await,
            ended => return ended == Ok(true),
        }
    }
    false
}

/// The store, unless a thread is writing it.
fn try_store(store: &Mutex<Store>) -> Option<MutexGuard<'_, Store>> {
    match store.try_lock() {
        Ok(store) => Some(store),
        // If a writer panicked, its rows are still pending.
        Err(TryLockError::Poisoned(store)) => Some(store.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Converts a stored row to an estimate.
fn learnt(exe: ExeId, key: &AppKey, row: &AppRow, now: Time, unix: i64) -> DemandEstimate {
    let age = u64::try_from(unix).unwrap_or(0).saturating_sub(row.updated);
    DemandEstimate {
        app: AppId { exe, name: key.name.clone() },
        port: key.port,
        down: ByteCount::new(row.demand_down),
        up: ByteCount::new(row.demand_up),
        count: row.samples,
        updated: Time::from_nanos(now.as_nanos().saturating_sub(age.saturating_mul(1_000_000_000))),
    }
}

/// Key of a row about the device, whatever network it is in: its allowance, its measurements, and its stability, since a link that is down has no network.
fn device_key(key: &LinkKey) -> LinkKey {
    LinkKey { network: String::new(), ..key.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_control::config::Config;
    use braid_control::core::Names;
    use braid_control::fake::FakeSteering;
    use braid_control::fake::network::{facts, network};
    use braid_control::steering::SteeringEvent;
    use braid_model::{Application, Class};

    const NOW: Time = Time::from_nanos(1_000_000_000_000);
    const UNIX: i64 = 1_800_000_000;
    const PROGRAM: &str = "/bin/sh";

    struct OneProgram;

    impl Names for OneProgram {
        fn executable(&mut self, path: &Path) -> Option<ExeId> {
            process::exe_id(path)
        }
        fn cgroup(&mut self, _: &str) -> Option<(u64, u32)> {
            None
        }
        fn application(&mut self, app: &AppId, _: u32, _: u64) -> (Application, Option<String>) {
            (Application { exe: Some(PROGRAM.into()), name: app.name.clone() }, None)
        }
    }

    fn core() -> Core<FakeSteering> {
        Core::new(FakeSteering::default(), Box::new(OneProgram), Config::default(), NOW).unwrap()
    }

    /// A core with one link.
    fn linked_core() -> Core<FakeSteering> {
        let mut core = core();
        core.on_network(NOW, network(&[facts(1, "wlan0")])).unwrap();
        core
    }

    /// Starts a measurement that may move this many bytes.
    fn start_measurement(core: &mut Core<FakeSteering>, bytes: u64) {
        core.all_links_mut().for_each(|link| link.measurements.on_start(NOW, ByteCount::new(bytes)));
    }

    /// Starts on `folder` at this Unix time. Returns the bytes that measurements have spent within the day.
    fn restart(folder: &Path, unix: i64) -> (StateStore, Core<FakeSteering>, u64) {
        let (mut state_store, mut core) = (StateStore::open(folder), linked_core());
        state_store.restore_links(&mut core, NOW, unix);
        let spent = core.all_links_mut().map(|link| link.measurements.spent(NOW).get()).sum();
        (state_store, core, spent)
    }

    /// Simulates flows of a program of this name that moved this many bytes.
    fn learn(core: &mut Core<FakeSteering>, name: &str, down: u64) {
        let app = AppId { exe: process::exe_id(Path::new(PROGRAM)).unwrap(), name: name.to_owned() };
        let met = SteeringEvent::NewApp { app: app.clone(), process: 1, cgroup: 0, class: Class::default() };
        core.on_events(NOW, vec![met]).unwrap();
        let learnt = DemandEstimate { app, port: 80, down: ByteCount::new(down), up: ByteCount::ZERO, count: down, updated: NOW };
        core.steering().seed(&learnt).unwrap();
    }

    fn recalled(folder: &Path) -> Vec<(String, u64)> {
        let (mut state_store, mut core) = (StateStore::open(folder), core());
        state_store.begin_recall(&mut core, NOW, UNIX);
        while state_store.recalled.is_some() {
            state_store.poll_recall(&mut core);
        }
        core.steering().estimates().unwrap().into_iter().map(|learnt| (learnt.app.name, learnt.down.get())).collect()
    }

    #[test]
    fn learned_demand_is_recalled_after_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let (mut state_store, mut core) = (StateStore::open(folder.path()), core());
        learn(&mut core, "curl", 1000);
        state_store.keep_last(&mut core, NOW, UNIX);
        drop(state_store);
        assert_eq!(recalled(folder.path()), [("curl".to_owned(), 1000)]);
    }

    #[test]
    fn regression_an_unresponsive_disk_neither_blocks_nor_loses_data() {
        let folder = tempfile::tempdir().unwrap();
        let (mut state_store, mut core) = (StateStore::open(folder.path()), core());
        let store = Arc::clone(&state_store.store);
        let disk = store.lock().unwrap();
        for (name, down) in [("curl", 1000), ("wget", 2000), ("curl", 3000)] {
            learn(&mut core, name, down);
            state_store.keep(&mut core, NOW, UNIX);
        }
        state_store.written -= SLOW_WRITE;
        assert!(state_store.trouble()[0].contains("does not respond"));
        drop(disk);
        state_store.keep_last(&mut core, NOW, UNIX);
        assert_eq!(state_store.trouble(), [""; 0]);
        drop(state_store);
        assert_eq!(recalled(folder.path()), [("curl".to_owned(), 3000), ("wget".to_owned(), 2000)]);
    }

    #[test]
    fn regression_many_new_programs_do_not_fill_the_memory() {
        let folder = tempfile::tempdir().unwrap();
        let (mut state_store, mut core) = (StateStore::open(folder.path()), core());
        let store = Arc::clone(&state_store.store);
        let _disk = store.lock().unwrap();
        for number in 0..13_000u64 {
            let key = AppKey { exe: PROGRAM.to_owned(), name: number.to_string(), port: 80 };
            state_store.learnt.apps.insert(key.clone(), AppRow { updated: number, ..AppRow::default() });
            state_store.pending.apps.insert(key, AppRow { updated: number, ..AppRow::default() });
        }
        state_store.keep(&mut core, NOW, UNIX);
        assert!(state_store.learnt.apps.len() <= 11_000 && state_store.pending.apps.len() <= 11_000);
        let latest = AppKey { exe: PROGRAM.to_owned(), name: "12999".to_owned(), port: 80 };
        assert!(state_store.pending.apps.contains_key(&latest), "the oldest rows are removed first");
    }

    /// A daemon that is killed again and again must not spend the bytes of a measurement each time.
    #[test]
    fn regression_the_bytes_of_a_measurement_are_on_the_disk_before_it_begins() {
        let folder = tempfile::tempdir().unwrap();
        let (mut state_store, mut core, _) = restart(folder.path(), UNIX);
        start_measurement(&mut core, 32_000_000);
        assert_eq!(state_store.keep(&mut core, NOW, UNIX).unwrap().recv(), Ok(true));
        assert_eq!(restart(folder.path(), UNIX + 5).2, 32_000_000);
        // The first measurement of the next day may move as many bytes as the last of the day before.
        let (mut state_store, mut core, spent) = restart(folder.path(), UNIX + 100_000);
        assert_eq!(spent, 0);
        start_measurement(&mut core, 32_000_000);
        assert_eq!(state_store.keep(&mut core, NOW, UNIX + 100_000).unwrap().recv(), Ok(true));
        assert_eq!(restart(folder.path(), UNIX + 100_005).2, 32_000_000);

        std::fs::write(folder.path().join("file"), "").unwrap();
        let mut state_store = StateStore::open(&folder.path().join("file/state"));
        start_measurement(&mut core, 1_000_000);
        assert_eq!(state_store.keep(&mut core, NOW, UNIX).unwrap().recv(), Ok(false), "there is no such folder");
        let store = Arc::clone(&state_store.store);
        let _disk = store.lock().unwrap();
        assert!(state_store.is_writing() && state_store.keep(&mut core, NOW, UNIX).is_none());
    }

    #[test]
    fn regression_a_day_that_begins_in_the_future_ends() {
        const DAY: i64 = 86_400;
        let folder = tempfile::tempdir().unwrap();
        let (mut state_store, mut core, _) = restart(folder.path(), UNIX + 100 * DAY);
        start_measurement(&mut core, 32_000_000);
        state_store.keep_last(&mut core, NOW, UNIX + 100 * DAY);
        // The clock is right again.
        let (mut state_store, mut core, spent) = restart(folder.path(), UNIX);
        assert_eq!(spent, 32_000_000);
        state_store.keep_last(&mut core, NOW, UNIX);
        assert_eq!(restart(folder.path(), UNIX + DAY - 1).2, 32_000_000);
        assert_eq!(restart(folder.path(), UNIX + DAY).2, 0);
    }

    #[test]
    fn unchanged_rows_are_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let (mut state_store, mut core) = (StateStore::open(folder.path()), core());
        learn(&mut core, "curl", 1000);
        state_store.gather(&mut core, NOW, UNIX);
        assert_eq!(state_store.pending.apps.len(), 1);
        state_store.fill_store();
        state_store.gather(&mut core, NOW, UNIX + 1);
        assert_eq!(state_store.pending.apps.len(), 0);
    }
}
