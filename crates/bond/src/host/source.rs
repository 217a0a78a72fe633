//! Whom strangers are counted by, and how much of what costs something they may begin.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// A network that one stranger may have: an IPv4 address, or an IPv6 network. Access networks give a customer 64, 56 or 48 bits (RFC 6177).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    bits: u8,
    network: u128,
}

/// The networks that an address is in, the narrowest first, and how much each may have: of what one stranger may, so many times.
pub fn sources(remote: SocketAddr) -> Vec<(Source, u32)> {
    match remote.ip().to_canonical() {
        IpAddr::V4(ip) => vec![(Source { bits: 128, network: u128::from(ip.to_bits()) }, 1)],
        IpAddr::V6(ip) => {
            let network = |(bits, times)| (Source { bits, network: ip.to_bits() >> (128 - bits) << (128 - bits) }, times);
            [(64, 1), (56, 2), (48, 4)].map(network).to_vec()
        }
    }
}

/// The narrowest network that an address is in.
pub fn source(remote: SocketAddr) -> Source {
    sources(remote)[0].0
}

/// What strangers begin: each source so many times at once, and then once for each pause.
#[derive(Debug)]
pub struct Begins {
    at_once: u32,
    pause: Duration,
    /// Sources that are remembered at a time: whoever comes when there are as many has to wait.
    most: usize,
    spent: BTreeMap<Source, Spent>,
    swept: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Spent {
    left: u32,
    /// Since when it has so much left.
    since: Instant,
}

/// Sources that have everything left are forgotten this often.
const SWEEP: Duration = Duration::from_secs(1);

impl Begins {
    /// For one stranger: `at_once`, and then one for each `pause`.
    pub fn new(at_once: u32, pause: Duration, most: usize) -> Self {
        Self { at_once, pause, most, spent: BTreeMap::new(), swept: None }
    }

    /// Counts one, if all networks that the address is in may begin one more.
    pub fn take(&mut self, now: Instant, remote: SocketAddr) -> bool {
        self.sweep(now);
        let sources = sources(remote);
        let left: Vec<Spent> = sources.iter().map(|(source, times)| self.of(now, *source, *times)).collect();
        let fresh = sources.iter().filter(|(source, _)| !self.spent.contains_key(source)).count();
        if left.iter().any(|spent| spent.left == 0) || self.spent.len() + fresh > self.most {
            return false;
        }
        for ((source, _), spent) in sources.into_iter().zip(left) {
            self.spent.insert(source, Spent { left: spent.left - 1, ..spent });
        }
        true
    }

    /// What a source has left by now.
    fn of(&self, now: Instant, source: Source, times: u32) -> Spent {
        let (most, pause) = (self.at_once.saturating_mul(times), self.pause / times);
        let Some(spent) = self.spent.get(&source) else { return Spent { left: most, since: now } };
        let gained = now.saturating_duration_since(spent.since).as_nanos() / pause.as_nanos().max(1);
        let gained = u32::try_from(gained).unwrap_or(u32::MAX);
        Spent { left: spent.left.saturating_add(gained).min(most), since: spent.since + pause.saturating_mul(gained) }
    }

    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now.saturating_duration_since(swept) < SWEEP) {
            return;
        }
        self.swept = Some(now);
        // The widest networks may have most.
        let all = |spent: &Spent| now.saturating_duration_since(spent.since) >= self.pause * self.at_once;
        self.spent.retain(|_, spent| !all(spent));
    }

    /// Sources that are remembered.
    pub fn remembered(&self) -> usize {
        self.spent.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(100);

    fn from(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn taken(begins: &mut Begins, now: Instant, remotes: impl IntoIterator<Item = String>) -> usize {
        remotes.into_iter().filter(|remote| begins.take(now, from(remote))).count()
    }

    #[allow(clippy::disallowed_methods, reason = "only differences count")]
    fn now() -> Instant {
        Instant::now()
    }

    #[test]
    fn one_source_is_slowed_down_and_no_other_is() {
        let (mut begins, now) = (Begins::new(8, PAUSE, 1000), now());
        let ports = |address: &str| (0..50).map(|port| format!("{address}:{port}")).collect::<Vec<_>>();
        assert_eq!(taken(&mut begins, now, ports("198.51.100.1")), 8);
        assert_eq!(taken(&mut begins, now, ports("[::ffff:198.51.100.1]")), 0, "the same address");
        assert_eq!(taken(&mut begins, now, ports("198.51.100.2")), 8);
        assert_eq!(taken(&mut begins, now + 3 * PAUSE, ports("198.51.100.1")), 3);
        assert_eq!(taken(&mut begins, now + 3 * PAUSE + PAUSE / 2, ports("198.51.100.1")), 0);
        assert_eq!(taken(&mut begins, now + 4 * PAUSE, ports("198.51.100.1")), 1);
        assert_eq!(begins.remembered(), 2);
        begins.sweep(now + 20 * PAUSE);
        assert_eq!(begins.remembered(), 0);
    }

    /// Whoever has a network of 48 bits had 65,536 sources.
    #[test]
    fn regression_neighbouring_networks_share_what_wider_ones_may() {
        let (mut begins, now) = (Begins::new(8, PAUSE, 1000), now());
        let hosts = |count: u16| (0..count).map(|host| format!("[2001:db8:1:aa00::{host:x}]:1")).collect::<Vec<_>>();
        assert_eq!(taken(&mut begins, now, hosts(50)), 8, "64 bits");
        let nets = |first: u16| (0..256).map(move |net: u16| format!("[2001:db8:1:{:x}::1]:1", first + net)).collect::<Vec<_>>();
        assert_eq!(taken(&mut begins, now, nets(0xaa00)), 8, "56 bits: 16 in all");
        assert_eq!(taken(&mut begins, now, nets(0xab00)), 16, "48 bits: 32 in all");
        assert_eq!(taken(&mut begins, now, nets(0xac00)), 0);
        assert!(begins.take(now, from("[2001:db8:2::1]:1")), "somebody else");
    }

    #[test]
    fn no_more_sources_are_remembered_than_may_be() {
        let (mut begins, now) = (Begins::new(8, PAUSE, 10), now());
        assert_eq!(taken(&mut begins, now, (0..50).map(|host| format!("198.51.100.{host}:1"))), 10);
        assert!(begins.take(now, from("198.51.100.3:1")), "one that is known");
        assert!(begins.take(now + 20 * PAUSE, from("198.51.100.60:1")));
    }
}
