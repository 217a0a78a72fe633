//! A peer's addresses, as far as they are known.

use std::net::SocketAddr;

use braid_model::address::{Address, Host};
use tokio::task::JoinHandle;

/// Where the peer is. Names are looked up beside everything else: a resolver that does not answer must not hold paths up.
pub(crate) struct Found {
    names: Vec<Address>,
    /// Those given as addresses.
    given: Vec<SocketAddr>,
    /// Those that names led to last.
    named: Vec<SocketAddr>,
    resolving: Option<JoinHandle<Vec<SocketAddr>>>,
}

impl Found {
    pub(crate) fn new(addresses: &[Address]) -> Self {
        let given = addresses.iter().filter_map(|address| match address.host {
            Host::Ip(ip) => Some(SocketAddr::new(ip, address.port())),
            Host::Name(_) => None,
        });
        let names = addresses.iter().filter(|address| matches!(address.host, Host::Name(_))).cloned().collect();
        Self { names, given: given.collect(), named: Vec::new(), resolving: None }
    }

    /// The address to try now: those of the family in turn.
    pub(crate) fn address(&self, ipv6: bool, place: usize) -> Option<SocketAddr> {
        let all = self.all(ipv6);
        (!all.is_empty()).then(|| all[place % all.len()])
    }

    /// Where `address` stands among those of its family.
    pub(crate) fn place(&self, ipv6: bool, address: SocketAddr) -> Option<usize> {
        self.all(ipv6).into_iter().position(|other| other == address)
    }

    fn all(&self, ipv6: bool) -> Vec<SocketAddr> {
        self.given.iter().chain(&self.named).copied().filter(|address| address.is_ipv6() == ipv6).collect()
    }

    /// Begins to look names up, unless that goes on already.
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

    /// Waits for what is being looked up; whether there are addresses that were not known.
    pub(crate) async fn changed(&mut self) -> bool {
        let Some(resolving) = &mut self.resolving else { return std::future::pending().await };
        let found = resolving.await.unwrap_or_default();
        self.resolving = None;
        let fresh = found.iter().any(|address| !self.named.contains(address));
        // One that cannot be looked up now may still be where it was.
        if !found.is_empty() {
            self.named = found;
        }
        fresh
    }
}

impl Drop for Found {
    fn drop(&mut self) {
        if let Some(resolving) = &self.resolving {
            resolving.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(addresses: &[&str]) -> Found {
        Found::new(&addresses.iter().map(|address| address.parse().unwrap()).collect::<Vec<_>>())
    }

    #[tokio::test]
    async fn addresses_take_turns_in_their_family_and_need_no_look_up() {
        let mut found = found(&["192.0.2.1:1", "[2001:db8::1]:2", "192.0.2.2:3"]);
        let turns: Vec<String> = (0..3).filter_map(|place| found.address(false, place)).map(|address| address.to_string()).collect();
        assert_eq!(turns, ["192.0.2.1:1", "192.0.2.2:3", "192.0.2.1:1"]);
        assert_eq!(found.address(true, 7).unwrap().to_string(), "[2001:db8::1]:2");
        found.resolve();
        assert!(found.resolving.is_none());
    }

    #[tokio::test]
    async fn a_name_is_news_once_and_kept_when_it_cannot_be_looked_up() {
        let mut found = found(&["localhost:5757"]);
        assert_eq!((found.address(false, 0), found.address(true, 0)), (None, None));
        found.resolve();
        assert!(found.changed().await);
        let first = [false, true].map(|ipv6| found.address(ipv6, 0));
        assert!(first.iter().flatten().all(|address| address.ip().is_loopback()) && first != [None, None]);
        found.resolve();
        assert!(!found.changed().await, "the same again is no news");
        found.names = vec!["no-such-host.invalid:5757".parse().unwrap()];
        found.resolve();
        assert!(!found.changed().await);
        assert_eq!([false, true].map(|ipv6| found.address(ipv6, 0)), first);
    }
}
