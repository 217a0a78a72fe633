//! Resolves the host names in `detect` periodically, since a server's address may change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use braid_model::address::HostName;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::Change;
use super::servers::PORT;

/// Time between two lookups of all names.
const REFRESH_AFTER: Duration = Duration::from_secs(300);
/// Time until the next lookup after one failed.
const RETRY_AFTER: Duration = Duration::from_secs(15);

/// The names that are resolved now.
#[derive(Default)]
pub(super) struct Names {
    wanted: Vec<HostName>,
    task: Option<JoinHandle<()>>,
}

impl Names {
    /// Resolves these names from now on. Their addresses arrive as [`Change::Named`].
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
                tokio::time::sleep(if all { REFRESH_AFTER } else { RETRY_AFTER }).await;
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

/// Resolves all names into `found`; false if a lookup failed. The old addresses of a failed name are kept: they may still be valid.
async fn look_up(names: &[HostName], found: &mut BTreeMap<HostName, BTreeSet<IpAddr>>) -> bool {
    let mut all = true;
    for name in names {
        match tokio::net::lookup_host((name.as_str(), PORT)).await {
            Ok(addresses) => drop(found.insert(name.clone(), addresses.map(|address| address.ip()).collect())),
            Err(error) => {
                tracing::debug!(name = name.as_str(), %error, "cannot resolve a name in `detect`");
                all = false;
            }
        }
    }
    all
}
