//! The names of `detect`: looked up over and over, since a server may move.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_model::address::HostName;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::Change;
use super::servers::PORT;

/// Names are looked up again after this,
const AGAIN: Duration = Duration::from_secs(300);
/// and after this where one could not be.
const SOON: Duration = Duration::from_secs(15);

/// The names that are looked up now.
#[derive(Default)]
pub(super) struct Names {
    wanted: Vec<HostName>,
    task: Option<JoinHandle<()>>,
}

impl Names {
    /// Looks these up from now on, and no others; what they lead to comes as [`Change::Named`].
    pub(super) fn want(&mut self, names: &[HostName], changes: &mpsc::UnboundedSender<Change>) {
        if self.wanted == names {
            return;
        }
        self.end();
        self.wanted = names.to_vec();
        let (wanted, changes) = (self.wanted.clone(), changes.clone());
        self.task = Some(tokio::spawn(async move {
            let mut found = BTreeMap::new();
            loop {
                let all = look_up(&wanted, &mut found).await;
                let hosts = found.values().flatten().copied().collect();
                if changes.send(Change::Named { hosts }).is_err() || wanted.is_empty() {
                    return;
                }
                tokio::time::sleep(if all { AGAIN } else { SOON }).await;
            }
        }));
    }

    fn end(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.end();
    }
}

/// Looks all names up; whether that could be done. One that cannot be looked up now may still be where it was.
async fn look_up(names: &[HostName], found: &mut BTreeMap<HostName, BTreeSet<IpAddr>>) -> bool {
    let mut all = true;
    for name in names {
        match tokio::net::lookup_host((name.as_str(), PORT)).await {
            Ok(addresses) => drop(found.insert(name.clone(), addresses.map(|address| address.ip()).collect())),
            Err(error) => {
                tracing::debug!(name = name.as_str(), %error, "a name of `detect` cannot be looked up");
                all = false;
            }
        }
    }
    all
}
