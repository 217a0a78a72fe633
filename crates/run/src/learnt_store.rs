//! Persists what one run learns for the next: link capacities and program demands, in the user's own state directory.
//!
//! A separate thread waits for the disk, because a home directory on an unresponsive server must not delay the command.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use braid_platform::linux::owner::as_owner_of;
use braid_store::{AppKey, AppRow, Learnt, LinkKey, LinkRow, Store};

/// Time that the command's first connections wait for the stored values.
const RECALL_TIMEOUT: Duration = Duration::from_millis(100);
/// Time that the end of a run waits for the disk.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// Values to store.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Estimates {
    pub(super) apps: Vec<(AppKey, AppRow)>,
    pub(super) links: Vec<(LinkKey, LinkRow)>,
}

/// The store of learnt values; a separate thread reads and writes it.
pub(super) struct LearntStore {
    recalled: mpsc::Receiver<Learnt>,
    estimates: mpsc::Sender<Estimates>,
    written: mpsc::Receiver<()>,
}

impl LearntStore {
    /// Reads the stored values. Creates no file or directory.
    pub(super) fn recall_from(folder: &Path) -> Learnt {
        let (found, recalled) = mpsc::channel();
        let folder = folder.to_owned();
        std::thread::spawn(move || {
            let learnt = as_owner_of(&folder, || if Store::exists(&folder) { Store::open(&folder).1 } else { Learnt::default() });
            let _ = found.send(learnt.unwrap_or_default());
        });
        recalled.recv_timeout(RECALL_TIMEOUT).unwrap_or_default()
    }

    /// Starts to read the stored values.
    pub(super) fn open(folder: &Path) -> Self {
        let (found, recalled) = mpsc::channel();
        let (estimates, taken) = mpsc::channel::<Estimates>();
        let (done, written) = mpsc::channel();
        let folder = folder.to_owned();
        let remember = move |folder: &Path| {
            // Errors are not reported: they do not matter enough to disturb the command's standard error.
            let (mut store, learnt, _) = Store::open(folder);
            let _ = found.send(learnt);
            for Estimates { apps, links } in taken {
                apps.into_iter().for_each(|(key, row)| store.put_app(key, row));
                links.into_iter().for_each(|(key, row)| store.put_link(key, row));
                store.flush();
                let _ = done.send(());
            }
        };
        // Under sudo the directory may belong to another user.
        std::thread::spawn(move || as_owner_of(&folder, || remember(&folder)));
        Self { recalled, estimates, written }
    }

    /// The stored values; empty if they cannot be read within [`RECALL_TIMEOUT`].
    pub(super) fn recall(&self) -> Learnt {
        self.recalled.recv_timeout(RECALL_TIMEOUT).unwrap_or_default()
    }

    /// Stores values, and waits for the disk for at most [`WRITE_TIMEOUT`].
    pub(super) fn keep(&self, estimates: Estimates) {
        if self.estimates.send(estimates).is_ok() {
            let _ = self.written.recv_timeout(WRITE_TIMEOUT);
        }
    }
}

/// This user's store directory; `None` without a home. See the XDG base directory specification.
pub(super) fn folder(variable: impl Fn(&str) -> Option<std::ffi::OsString>) -> Option<PathBuf> {
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")));
    state.map(|state| state.join("braid"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimates() -> Estimates {
        let app = AppKey { exe: "/bin/x".into(), name: String::new(), port: 80 };
        let link = LinkKey { name: "wlan0".into(), kind: "wireless".into(), network: String::new() };
        Estimates {
            apps: vec![(app, AppRow { demand_down: 5, demand_up: 6, samples: 2, updated: 9 })],
            links: vec![(link, LinkRow { capacity_down: Some(7), capacity_up: None, updated: 9 })],
        }
    }

    #[test]
    fn the_next_run_reads_what_this_run_stored() {
        let folder = tempfile::tempdir().unwrap();
        let store = LearntStore::open(folder.path());
        assert_eq!(store.recall(), Learnt::default());
        store.keep(estimates());
        let learnt = LearntStore::open(folder.path()).recall();
        let found = Estimates { apps: learnt.apps.into_iter().collect(), links: learnt.links.into_iter().collect() };
        assert_eq!(found, estimates());
    }

    #[test]
    fn reading_creates_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("none");
        assert_eq!(LearntStore::recall_from(&home), Learnt::default());
        assert!(!home.exists());
        LearntStore::open(&home).keep(estimates());
        assert_eq!(LearntStore::recall_from(&home).links.into_iter().collect::<Vec<_>>(), estimates().links);
    }

    #[test]
    fn an_unusable_directory_causes_no_error_and_stores_nothing() {
        let store = LearntStore::open(Path::new("/proc/no such place"));
        assert_eq!(store.recall(), Learnt::default());
        store.keep(estimates());
    }

    #[test]
    fn the_directory_is_in_the_users_state_directory() {
        let environment =
            |pairs: &'static [(&str, &str)]| folder(move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()));
        assert_eq!(environment(&[("HOME", "/home/a")]), Some("/home/a/.local/state/braid".into()));
        assert_eq!(environment(&[("HOME", "/home/a"), ("XDG_STATE_HOME", "/s")]), Some("/s/braid".into()));
        assert_eq!(environment(&[("HOME", "/home/a"), ("XDG_STATE_HOME", "s")]), Some("/home/a/.local/state/braid".into()));
        assert_eq!(environment(&[]), None);
    }
}
