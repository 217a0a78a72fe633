//! What strangers use of a server that serves anyone, by where they come from.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_bond::host::source;

use crate::relay::Account;

/// Bonds of one source at a time.
const BONDS: usize = 16;
/// Paths that one source may begin at once, and then one for each pause: each costs a handshake.
const PATHS_AT_ONCE: u32 = 64;
const PAUSE: Duration = Duration::from_millis(125);
/// Sources at a time. Each has proved its address.
const SOURCES: usize = 65_536;

/// All sources; a source is an IPv4 address or an IPv6 network of 64 bits.
#[derive(Default)]
pub(crate) struct Sources(BTreeMap<u128, Source>);

struct Source {
    account: Arc<Account>,
    bonds: usize,
    /// Paths it may begin now, and since when that is so.
    paths: u32,
    counted: Instant,
}

impl Source {
    fn refill(&mut self, now: Instant) {
        let gained = now.saturating_duration_since(self.counted).as_nanos() / PAUSE.as_nanos();
        let gained = u32::try_from(gained).unwrap_or(u32::MAX);
        self.paths = self.paths.saturating_add(gained).min(PATHS_AT_ONCE);
        self.counted += PAUSE.saturating_mul(gained);
    }
}

impl Sources {
    /// Counts a path that is asked for from `remote`, of a bond that is `new` or not. Why it may not be, or what its bonds share.
    pub(crate) fn take(
        &mut self,
        now: Instant,
        remote: SocketAddr,
        new: bool,
        account: impl FnOnce() -> Account,
    ) -> Result<Arc<Account>, &'static str> {
        let id = source(remote);
        if self.0.len() >= SOURCES && !self.0.contains_key(&id) {
            return Err("as many others as there may be use this server now: try again later");
        }
        let fresh = || Source { account: Arc::new(account()), bonds: 0, paths: PATHS_AT_ONCE, counted: now };
        let entry = self.0.entry(id).or_insert_with(fresh);
        entry.refill(now);
        if entry.paths == 0 {
            return Err("too many paths from this address: try again later");
        }
        if new && entry.bonds >= BONDS {
            return Err("as many bonds from this address as there may be: end one first");
        }
        entry.paths -= 1;
        Ok(entry.account.clone())
    }

    /// A bond from `remote` has begun.
    pub(crate) fn begun(&mut self, remote: SocketAddr) {
        if let Some(entry) = self.0.get_mut(&source(remote)) {
            entry.bonds += 1;
        }
    }

    /// It has ended.
    pub(crate) fn ended(&mut self, remote: SocketAddr) {
        if let Some(entry) = self.0.get_mut(&source(remote)) {
            entry.bonds = entry.bonds.saturating_sub(1);
        }
    }

    /// Forgets those of whom there is nothing to remember.
    pub(crate) fn sweep(&mut self, now: Instant) {
        self.0.retain(|_, entry| {
            entry.refill(now);
            entry.bonds > 0 || entry.paths < PATHS_AT_ONCE
        });
    }
}

#[cfg(test)]
mod tests {
    use braid_peer::destination::{Policy, Ports};
    use braid_peer::limits::Limits;

    use super::*;
    use crate::relay::account;

    fn from(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn fresh() -> Account {
        account(Limits::default(), None, &Policy::local(Vec::new(), Vec::new(), Ports::default(), 5757))
    }

    #[test]
    fn paths_of_one_source_are_slowed_down_and_no_other_is() {
        let (mut sources, now) = (Sources::default(), Instant::now());
        let (one, other) = (from("198.51.100.1:9"), from("198.51.100.2:9"));
        let begun = (0..200).filter(|_| sources.take(now, one, false, fresh).is_ok()).count();
        assert_eq!(begun, PATHS_AT_ONCE as usize);
        assert!(sources.take(now, other, true, fresh).is_ok());
        let later = now + 3 * PAUSE;
        assert_eq!((0..200).filter(|_| sources.take(later, one, false, fresh).is_ok()).count(), 3);
        sources.sweep(later);
        assert_eq!(sources.0.len(), 1, "the other has nothing any more that is worth remembering");
        sources.sweep(later + PAUSE * PATHS_AT_ONCE);
        assert!(sources.0.is_empty());
    }

    #[test]
    fn bonds_of_one_source_are_few_whatever_port_they_come_from() {
        let (mut sources, mut now) = (Sources::default(), Instant::now());
        for port in 0..BONDS as u16 {
            let remote = SocketAddr::new(from("[2001:db8::1]:0").ip(), port);
            assert!(sources.take(now, remote, true, fresh).is_ok());
            sources.begun(remote);
            now += PAUSE;
        }
        let neighbour = from("[2001:db8::ffff]:7");
        assert!(sources.take(now, neighbour, true, fresh).is_err_and(|why| why.contains("bonds")));
        assert!(sources.take(now, neighbour, false, fresh).is_ok(), "a path of a bond that is there");
        assert!(sources.take(now, from("[2001:db8:0:1::1]:7"), true, fresh).is_ok(), "another network");
        sources.ended(from("[2001:db8::1]:3"));
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
