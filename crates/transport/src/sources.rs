//! Limits for anonymous clients of a server that serves anyone, by source network.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_bond::host::{Source, SourceLimiter, source, sources};

use crate::account::Account;

/// Bonds of one source at a time. Wider IPv6 networks may have a multiple of it.
const MAX_BONDS: usize = 16;
/// Paths that one source may start at once, and the interval after which it may start another: each costs a handshake.
const PATH_BURST: u32 = 64;
const PATH_INTERVAL: Duration = Duration::from_millis(125);
/// Number of sources at a time. Each has proved its address.
const MAX_SOURCES: usize = 65_536;

/// All sources by network (see [`sources`]). Only the narrowest networks have accounts.
pub(crate) struct Sources {
    paths: SourceLimiter,
    bonds: BTreeMap<Source, usize>,
    accounts: BTreeMap<Source, Held>,
}

struct Held {
    account: Arc<Account>,
    /// When a path was last requested.
    asked: Instant,
}

impl Default for Sources {
    fn default() -> Self {
        Self { paths: SourceLimiter::new(PATH_BURST, PATH_INTERVAL, MAX_SOURCES), bonds: BTreeMap::new(), accounts: BTreeMap::new() }
    }
}

impl Sources {
    /// Counts a path requested from `remote`, of a bond that is `new` or exists already. Returns the account that the source's bonds share, or why
    /// the path is refused.
    pub(crate) fn take(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        new: bool,
        account: impl FnOnce() -> Account,
    ) -> Result<Arc<Account>, &'static str> {
        let id = source(remote);
        if self.accounts.len() >= MAX_SOURCES && !self.accounts.contains_key(&id) {
            return Err("the server has reached its limit of clients: try again later");
        }
        let has = |source: &Source| self.bonds.get(source).copied().unwrap_or(0);
        if new && sources(remote).iter().any(|(source, times)| has(source) >= MAX_BONDS * *times as usize) {
            return Err("too many bonds from this address or its network: end one first");
        }
        if !self.paths.take(now, remote) {
            return Err("too many paths from this address or its network: try again later");
        }
        let held = self.accounts.entry(id).or_insert_with(|| Held { account: Arc::new(account()), asked: now });
        held.asked = now;
        Ok(held.account.clone())
    }

    /// Records the start of a bond from `remote`.
    pub(crate) fn on_bond_started(&mut self, remote: SocketAddr) {
        sources(remote).into_iter().for_each(|(source, _)| *self.bonds.entry(source).or_default() += 1);
    }

    /// Records the end of a bond from `remote`.
    pub(crate) fn on_bond_ended(&mut self, remote: SocketAddr) {
        for (source, _) in sources(remote) {
            match self.bonds.get_mut(&source) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(self.bonds.remove(&source)),
            }
        }
    }

    /// Removes accounts without bonds that have not been used for a while.
    pub(crate) fn sweep(&mut self, now: Instant) {
        let Self { bonds, accounts, .. } = self;
        accounts.retain(|id, held| bonds.contains_key(id) || now.saturating_duration_since(held.asked) < PATH_INTERVAL * PATH_BURST);
    }
}

#[cfg(test)]
mod tests {
    use braid_peer::destination::{Policy, Ports};
    use braid_peer::limits::Limits;

    use super::*;

    fn from(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn fresh() -> Account {
        Account::new(Limits::default(), None, &Policy::local(Vec::new(), Vec::new(), Ports::default(), 5757))
    }

    #[test]
    fn paths_are_rate_limited_per_source() {
        let (mut sources, now) = (Sources::default(), Instant::now());
        let (one, other) = (from("198.51.100.1:9"), from("198.51.100.2:9"));
        let begun = (0..200).filter(|_| sources.take(now, one, false, fresh).is_ok()).count();
        assert_eq!(begun, PATH_BURST as usize);
        assert!(sources.take(now, other, true, fresh).is_ok());
        sources.on_bond_started(other);
        let later = now + 3 * PATH_INTERVAL;
        assert_eq!((0..200).filter(|_| sources.take(later, one, false, fresh).is_ok()).count(), 3);
        sources.sweep(later + PATH_INTERVAL * PATH_BURST);
        assert_eq!(sources.accounts.len(), 1, "the first source has no bonds and is forgotten");
        sources.on_bond_ended(other);
        sources.sweep(later + PATH_INTERVAL * PATH_BURST);
        assert!(sources.accounts.is_empty() && sources.bonds.is_empty());
    }

    /// The owner of a /48 network was allowed the bonds of 65,536 sources.
    #[test]
    fn regression_bonds_of_neighbouring_networks_are_bounded_together() {
        let (mut sources, mut now) = (Sources::default(), Instant::now());
        let mut begin = |net: u16| {
            let remote = from(&format!("[2001:db8:7:{net:x}::1]:9"));
            now += PATH_INTERVAL;
            let begun = sources.take(now, remote, true, fresh).is_ok();
            if begun {
                sources.on_bond_started(remote);
            }
            begun
        };
        assert_eq!((0..256).filter(|net| begin(*net)).count(), 2 * MAX_BONDS, "of a /56 network");
        assert_eq!((0x100..0x1000).filter(|net| begin(*net)).count(), 2 * MAX_BONDS, "of a /48 network");
    }

    #[test]
    fn bonds_of_one_source_are_limited_across_ports() {
        let (mut sources, mut now) = (Sources::default(), Instant::now());
        for port in 0..MAX_BONDS as u16 {
            let remote = SocketAddr::new(from("[2001:db8::1]:0").ip(), port);
            assert!(sources.take(now, remote, true, fresh).is_ok());
            sources.on_bond_started(remote);
            now += PATH_INTERVAL;
        }
        let neighbour = from("[2001:db8::ffff]:7");
        assert!(sources.take(now, neighbour, true, fresh).is_err_and(|why| why.contains("bonds")));
        assert!(sources.take(now, neighbour, false, fresh).is_ok(), "a path of an existing bond");
        assert!(sources.take(now, from("[2001:db8:0:1::1]:7"), true, fresh).is_ok(), "another network");
        sources.on_bond_ended(from("[2001:db8::1]:3"));
        assert!(sources.take(now, neighbour, true, fresh).is_ok());
    }

    #[test]
    fn all_bonds_of_a_source_share_one_account() {
        let (mut sources, now) = (Sources::default(), Instant::now());
        let first = sources.take(now, from("198.51.100.1:9"), true, fresh).ok().unwrap();
        let second = sources.take(now, from("198.51.100.1:10"), true, fresh).ok().unwrap();
        assert!(Arc::ptr_eq(&first, &second));
    }
}
