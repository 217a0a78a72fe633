//! What programs may, and how much.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::Mac;

/// What a program may see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sees {
    /// Its own host: where it is attached, the load of its access points, the delay of paths to hosts whose addresses it has.
    #[default]
    Own,
    /// Also all switches, links and access points. Other hosts never.
    Network,
}

/// What programs may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// What programs see.
    pub sees: Sees,
    /// Services that programs may ask for; `None`: all.
    pub services: Option<BTreeSet<String>>,
    /// Hosts whose programs may more, or less.
    pub hosts: BTreeMap<Mac, HostRights>,
    /// How much they may.
    pub quotas: Quotas,
}

/// What the programs of one host may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostRights {
    /// Nothing.
    Nothing,
    /// What all may, and see this.
    Sees(Sees),
}

/// How much programs may.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Most connections of a host.
    pub sessions: usize,
    /// Most leases of a connection.
    pub leases_of_session: usize,
    /// Most leases of a host.
    pub leases_of_host: usize,
    /// Most leases.
    pub leases: usize,
    /// Most requests of a host in a second.
    pub requests: u32,
    /// Longest time for which a lease stays after its connection.
    pub keep: Duration,
}

impl Default for Quotas {
    fn default() -> Self {
        Self { sessions: 32, leases_of_session: 32, leases_of_host: 64, leases: 8192, requests: 50, keep: Duration::from_secs(300) }
    }
}

impl Settings {
    pub(super) fn sees(&self, host: Mac) -> Sees {
        match self.hosts.get(&host) {
            Some(HostRights::Sees(sees)) => *sees,
            _ => self.sees,
        }
    }

    pub(super) fn admits(&self, host: Mac) -> bool {
        self.hosts.get(&host) != Some(&HostRights::Nothing)
    }

    pub(super) fn offers(&self, service: &str) -> bool {
        self.services.as_ref().is_none_or(|services| services.contains(service))
    }
}
