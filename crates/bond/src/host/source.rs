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
