//! Resolves the addresses of a peer.

use std::net::SocketAddr;

use braid_model::address::{Address, Host};
use tokio::task::JoinHandle;

/// Known addresses of a peer. Names are resolved in a separate task: a resolver that does not answer must not delay paths.
pub(crate) struct PeerAddresses {
    names: Vec<Address>,
    /// Addresses given as IP addresses.
    given: Vec<SocketAddr>,
    /// Addresses of the last successful resolution of the names.
    named: Vec<SocketAddr>,
    resolving: Option<JoinHandle<Vec<SocketAddr>>>,
}

impl PeerAddresses {
    pub(crate) fn new(addresses: &[Address]) -> Self {
        let given = addresses.iter().filter_map(|address| match address.host {
            Host::Ip(ip) => Some(SocketAddr::new(ip, address.port())),
            Host::Name(_) => None,
        });
        let names = addresses.iter().filter(|address| matches!(address.host, Host::Name(_))).cloned().collect();
        Self { names, given: given.collect(), named: Vec::new(), resolving: None }
    }

    /// The address of a family at index `place`, modulo the number of addresses.
    pub(crate) fn address(&self, ipv6: bool, place: usize) -> Option<SocketAddr> {
        let all = self.all(ipv6);
        (!all.is_empty()).then(|| all[place % all.len()])
    }

    /// Index of `address` within its family.
    pub(crate) fn place(&self, ipv6: bool, address: SocketAddr) -> Option<usize> {
        self.all(ipv6).into_iter().position(|other| other == address)
    }

    fn all(&self, ipv6: bool) -> Vec<SocketAddr> {
        self.given.iter().chain(&self.named).copied().filter(|address| address.is_ipv6() == ipv6).collect()
    }

    /// Starts to resolve the names, unless this is already in progress.
    pub(crate) fn resolve(&mut self) {
        if self.resolving.is_some() || self.names.is_empty() {
            return;
        }
        let names = self.names.clone();
        self.resolving = Some(tokio::spawn(async move {
            let mut found = Vec::new();
            for name in names {
                found.extend(tokio::net::lookup_host(name.to_string()).await.into_iter().flatten());
            }
            found
        }));
    }

    /// Waits for a resolution in progress. Returns whether it found new addresses.
    pub(crate) async fn changed(&mut self) -> bool {
        let Some(resolving) = &mut self.resolving else { return std::future::pending().await };
        let found = resolving.await.unwrap_or_default();
        self.resolving = None;
        let fresh = found.iter().any(|address| !self.named.contains(address));
        // If the resolution fails now, the previous addresses may still be valid.
        if !found.is_empty() {
            self.named = found;
        }
        fresh
    }
}

impl Drop for PeerAddresses {
    fn drop(&mut self) {
        if let Some(resolving) = &self.resolving {
            resolving.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(addresses: &[&str]) -> PeerAddresses {
        PeerAddresses::new(&addresses.iter().map(|address| address.parse().unwrap()).collect::<Vec<_>>())
    }

    #[tokio::test]
    async fn addresses_rotate_within_their_family_without_a_lookup() {
        let mut found = found(&["192.0.2.1:1", "[2001:db8::1]:2", "192.0.2.2:3"]);
        let turns: Vec<String> = (0..3).filter_map(|place| found.address(false, place)).map(|address| address.to_string()).collect();
        assert_eq!(turns, ["192.0.2.1:1", "192.0.2.2:3", "192.0.2.1:1"]);
        assert_eq!(found.address(true, 7).unwrap().to_string(), "[2001:db8::1]:2");
        found.resolve();
        assert!(found.resolving.is_none());
    }

    #[tokio::test]
    async fn a_name_is_reported_once_and_kept_when_resolution_fails() {
        let mut found = found(&["localhost:5757"]);
        assert_eq!((found.address(false, 0), found.address(true, 0)), (None, None));
        found.resolve();
        assert!(found.changed().await);
        let first = [false, true].map(|ipv6| found.address(ipv6, 0));
        assert!(first.iter().flatten().all(|address| address.ip().is_loopback()) && first != [None, None]);
        found.resolve();
        assert!(!found.changed().await, "the same addresses are not new");
        found.names = vec!["no-such-host.invalid:5757".parse().unwrap()];
        found.resolve();
        assert!(!found.changed().await);
        assert_eq!([false, true].map(|ipv6| found.address(ipv6, 0)), first);
    }
}
