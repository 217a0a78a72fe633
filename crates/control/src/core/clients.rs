//! What is known about the clients of the gateway.

use std::collections::BTreeMap;
use std::net::IpAddr;

use braid_model::{Time, Traffic};

/// Maximum number of leases that are kept.
pub(super) const MAX_LEASES: usize = 4096;

/// A client's name and hardware address, as the DHCP server of the LAN knows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The client's address.
    pub address: IpAddr,
    /// Its hardware address.
    pub mac: Option<[u8; 6]>,
    /// The name that it gave.
    pub name: String,
}

/// The names and rates of the clients.
#[derive(Debug, Default)]
pub(super) struct Clients {
    pub(super) leases: Vec<Lease>,
    /// Rates in bytes per second, towards and away from the clients with any, over the last interval.
    pub(super) rates: BTreeMap<IpAddr, Traffic>,
    pub(super) measured: Time,
}

impl Clients {
    /// The hardware addresses of the clients with this name.
    pub(super) fn named(&self, name: &str) -> Option<[u8; 6]> {
        self.leases.iter().filter(|lease| lease.name == name).find_map(|lease| lease.mac)
    }
}
