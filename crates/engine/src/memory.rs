//! What outlives the daemon: between the [`Store`] and the [`Core`].

use std::collections::BTreeSet;
use std::path::Path;

use braid_model::{Bytes, Rate, Time};
use braid_platform::linux::process;
use braid_platform::steering::{AppId, Learnt, Steering};

use crate::core::Core;
use crate::store::{self, AppKey, AppRow, LinkKey, LinkRow, Store, UsageRow};

/// The memory.
pub(crate) struct Memory {
    store: Store,
    learnt: store::Learnt,
    warnings: Vec<String>,
    /// Links that were reminded of what was learnt about them.
    recognised: BTreeSet<LinkKey>,
}

impl Memory {
    /// Opens the store; troubles become warnings, never a reason not to run.
    pub(crate) fn open(folder: &Path) -> Self {
        let (store, learnt, warnings) = Store::open(folder);
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        Self { store, learnt, warnings, recognised: BTreeSet::new() }
    }

    /// What the user should know.
    pub(crate) fn trouble(&self) -> Vec<String> {
        let now = self.store.trouble().filter(|trouble| !self.warnings.iter().any(|warning| warning == trouble));
        self.warnings.iter().cloned().chain(now.map(str::to_owned)).collect()
    }

    /// Teaches the steering what applications' flows moved.
    pub(crate) fn recall<S: Steering>(&mut self, core: &mut Core<S>, now: Time, unix: i64) {
        for (key, row) in &self.learnt.apps {
            // A program that is gone, or was replaced by another file of the same path, begins with the same expectation.
            let Some(exe) = process::exe_id(Path::new(&key.exe)) else { continue };
            let age = u64::try_from(unix).unwrap_or(0).saturating_sub(row.updated);
            let updated = Time::from_nanos(now.as_nanos().saturating_sub(age.saturating_mul(1_000_000_000)));
            let learnt = Learnt {
                app: AppId { exe, name: key.name.clone() },
                port: key.port,
                down: Bytes::new(row.demand_down),
                up: Bytes::new(row.demand_up),
                count: row.samples,
                updated,
            };
            if let Err(error) = core.steering().teach(&learnt) {
                tracing::warn!("{error}");
                return;
            }
        }
    }

    /// Reminds links that appeared of their capacity and of what they used of their allowance.
    pub(crate) fn recognise<S: Steering>(&mut self, core: &mut Core<S>) {
        let mut present = BTreeSet::new();
        for link in core.all_links_mut() {
            let key = link_key(link);
            if !self.recognised.contains(&key) {
                if let Some(row) = self.learnt.links.get(&key) {
                    let learnt = [row.capacity_down, row.capacity_up];
                    for (capacity, bps) in link.capacity.iter_mut().zip(learnt) {
                        capacity.recall(Rate::from_bps(bps.unwrap_or(0)));
                    }
                }
                if let Some(row) = self.learnt.usage.get(&usage_key(&key)) {
                    link.recall_usage(Bytes::new(row.used), row.period);
                }
            }
            present.insert(key);
        }
        self.recognised = present;
    }

    /// Writes what was learnt since.
    pub(crate) fn keep<S: Steering>(&mut self, core: &mut Core<S>, now: Time, unix: i64) {
        let unix = u64::try_from(unix).unwrap_or(0);
        for learnt in core.steering().learnt().unwrap_or_default() {
            let Some(exe) = core.executable_of(&learnt.app) else { continue };
            let key = AppKey { exe, name: learnt.app.name.clone(), port: learnt.port };
            let row = AppRow {
                demand_down: learnt.down.get(),
                demand_up: learnt.up.get(),
                samples: learnt.count,
                updated: unix.saturating_sub(now.since(learnt.updated).as_secs()),
            };
            if self.learnt.apps.get(&key) != Some(&row) {
                self.store.put_app(key.clone(), row);
                self.learnt.apps.insert(key, row);
            }
        }
        for link in core.all_links_mut() {
            let key = link_key(link);
            let learnt = |index: usize| {
                let estimate = link.capacity[index].estimate(now);
                (!link.capacity[index].is_fixed() && estimate.age.is_some()).then(|| estimate.rate.bps())
            };
            let row = LinkRow { capacity_down: learnt(0), capacity_up: learnt(1), updated: unix };
            if row.capacity_down.is_some() || row.capacity_up.is_some() {
                self.learnt.links.insert(key.clone(), row);
                self.store.put_link(key.clone(), row);
            }
            if let Some(allowance) = &link.allowance {
                let row = UsageRow { used: allowance.used().get(), period: allowance.period(), updated: unix };
                self.learnt.usage.insert(usage_key(&key), row);
                self.store.put_usage(usage_key(&key), row);
            }
        }
        if let Some(trouble) = self.store.flush() {
            tracing::warn!("{trouble}");
        }
    }
}

fn link_key(link: &crate::core::Link) -> LinkKey {
    let gateway = [&link.facts.gateways.v4, &link.facts.gateways.v6].into_iter().flatten().find_map(|route| route.gateway);
    LinkKey {
        name: link.facts.name.clone(),
        kind: link.facts.kind.to_string(),
        network: gateway.map(|gateway| gateway.to_string()).unwrap_or_default(),
    }
}

/// An allowance belongs to the device whatever network it is in.
fn usage_key(key: &LinkKey) -> LinkKey {
    LinkKey { network: String::new(), ..key.clone() }
}
