//! What is known about the clients of the gateway.

use std::collections::BTreeMap;
use std::net::IpAddr;

use braid_decide::policy::ClientMatcher;
use braid_model::{Mac, PerDirection, Rate, Time};
use ipnet::IpNet;

/// Maximum number of leases that are kept.
pub(super) const MAX_LEASES: usize = 4096;

/// A client's name and hardware address, as the DHCP server of the LAN knows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The client's address.
    pub address: IpAddr,
    /// Its hardware address.
    pub mac: Option<Mac>,
    /// The name that it gave.
    pub name: String,
}

/// The names and rates of the clients.
#[derive(Debug, Default)]
pub(super) struct Clients {
    pub(super) leases: Vec<Lease>,
    /// Rates of the clients that moved any bytes in the last interval, by address.
    pub(super) rates: BTreeMap<IpAddr, PerDirection<Rate>>,
    pub(super) measured: Time,
    /// Hardware addresses of the clients, by address; only up to date while rules divide links by weight.
    pub(super) macs: BTreeMap<IpAddr, Mac>,
    /// When they were read.
    pub(super) macs_read: Option<Time>,
}

impl Clients {
    /// Name of the client with this address, or with this hardware address.
    pub(super) fn name_of(&self, address: IpAddr, mac: Option<Mac>) -> Option<&str> {
        let same = |lease: &&Lease| lease.address == address || mac.is_some() && lease.mac == mac;
        self.leases.iter().find(same).map(|lease| &*lease.name)
    }

    /// How packets show a client: by the prefix of its address, or by its hardware address. `None` if they do not: it is a user of the proxy, or no client
    /// had a lease with this name.
    pub(super) fn find(&self, client: &ClientMatcher) -> Option<(Option<IpNet>, Option<Mac>)> {
        match client {
            ClientMatcher::Network(net) => Some((Some(*net), None)),
            ClientMatcher::Mac(mac) => Some((None, Some(*mac))),
            ClientMatcher::User(name) => {
                let named = self.leases.iter().filter(|lease| lease.name == *name).find_map(|lease| lease.mac)?;
                Some((None, Some(named)))
            }
        }
    }
}
