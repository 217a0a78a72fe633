//! What one command's run teaches the next: capacities of links and demands of programs, in the user's own state directory.
//!
//! The disk is waited for by a thread of its own: a home on a server that does not answer must not hold up the command.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use braid_platform::linux::owner::as_owner_of;
use braid_store::{AppKey, AppRow, Learnt, LinkKey, LinkRow, Store};

/// How long the command's first connections wait for what earlier runs learnt.
const RECALL_PATIENCE: Duration = Duration::from_millis(100);
/// How long the end waits for the disk.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// What is to be remembered.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Estimates {
    pub(super) apps: Vec<(AppKey, AppRow)>,
    pub(super) links: Vec<(LinkKey, LinkRow)>,
}

/// The learnt values, read and written by a thread of its own.
pub(super) struct LearntStore {
    recalled: mpsc::Receiver<Learnt>,
    estimates: mpsc::Sender<Estimates>,
    written: mpsc::Receiver<()>,
}

impl LearntStore {
    /// Reads what was learnt before, without making anything where nothing is.
    pub(super) fn recall_from(folder: &Path) -> Learnt {
        let (found, recalled) = mpsc::channel();
        let folder = folder.to_owned();
        std::thread::spawn(move || {
            let learnt = as_owner_of(&folder, || if Store::exists(&folder) { Store::open(&folder).1 } else { Learnt::default() });
            let _ = found.send(learnt.unwrap_or_default());
        });
        recalled.recv_timeout(RECALL_PATIENCE).unwrap_or_default()
    }

    /// Begins to read what was learnt before.
    pub(super) fn open(folder: &Path) -> Self {
        let (found, recalled) = mpsc::channel();
        let (estimates, taken) = mpsc::channel::<Estimates>();
        let (done, written) = mpsc::channel();
        let folder = folder.to_owned();
        let remember = move |folder: &Path| {
            // What goes wrong with it is not worth a word on the command's own standard error.
            let (mut store, learnt, _) = Store::open(folder);
            let _ = found.send(learnt);
            for Estimates { apps, links } in taken {
                apps.into_iter().for_each(|(key, row)| store.put_app(key, row));
                links.into_iter().for_each(|(key, row)| store.put_link(key, row));
                store.flush();
                let _ = done.send(());
            }
        };
        // Under sudo the folder may be another user's.
        std::thread::spawn(move || as_owner_of(&folder, || remember(&folder)));
        Self { recalled, estimates, written }
    }

    /// What was learnt before; nothing if that cannot be read soon.
    pub(super) fn recall(&self) -> Learnt {
        self.recalled.recv_timeout(RECALL_PATIENCE).unwrap_or_default()
    }

    /// Remembers, and waits for the disk, but not for long.
    pub(super) fn keep(&self, estimates: Estimates) {
        if self.estimates.send(estimates).is_ok() {
            let _ = self.written.recv_timeout(LAST_PATIENCE);
        }
    }
}

/// Where this user's store is; `None` without a home. See the XDG base directory specification.
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
    fn the_next_run_recalls_what_this_one_keeps() {
        let folder = tempfile::tempdir().unwrap();
        let store = LearntStore::open(folder.path());
        assert_eq!(store.recall(), Learnt::default());
        store.keep(estimates());
        let learnt = LearntStore::open(folder.path()).recall();
        let found = Estimates { apps: learnt.apps.into_iter().collect(), links: learnt.links.into_iter().collect() };
        assert_eq!(found, estimates());
    }

    #[test]
    fn reading_makes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join("none");
        assert_eq!(LearntStore::recall_from(&home), Learnt::default());
        assert!(!home.exists());
        LearntStore::open(&home).keep(estimates());
        assert_eq!(LearntStore::recall_from(&home).links.into_iter().collect::<Vec<_>>(), estimates().links);
    }

    #[test]
    fn without_a_place_nothing_is_kept_and_nothing_fails() {
        let store = LearntStore::open(Path::new("/proc/no such place"));
        assert_eq!(store.recall(), Learnt::default());
        store.keep(estimates());
    }

    #[test]
    fn the_place_is_the_users_own() {
        let environment =
            |pairs: &'static [(&str, &str)]| folder(move |name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()));
        assert_eq!(environment(&[("HOME", "/home/a")]), Some("/home/a/.local/state/braid".into()));
        assert_eq!(environment(&[("HOME", "/home/a"), ("XDG_STATE_HOME", "/s")]), Some("/s/braid".into()));
        assert_eq!(environment(&[("HOME", "/home/a"), ("XDG_STATE_HOME", "s")]), Some("/home/a/.local/state/braid".into()));
        assert_eq!(environment(&[]), None);
    }
}
