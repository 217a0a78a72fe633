//! Sources that connection attempts are counted by, and a rate limiter per source.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// A network that one client may control: an IPv4 address, or an IPv6 network. Access networks assign a customer a 64, 56 or 48 bit prefix (RFC
/// 6177).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Source {
    bits: u8,
    network: u128,
}

/// The networks that an address belongs to, narrowest first, and by which factor the limit of one client applies to each.
pub fn sources(remote: SocketAddr) -> Vec<(Source, u32)> {
    match remote.ip().to_canonical() {
        IpAddr::V4(ip) => vec![(Source { bits: 128, network: u128::from(ip.to_bits()) }, 1)],
        IpAddr::V6(ip) => {
            let network = |(bits, times)| (Source { bits, network: ip.to_bits() >> (128 - bits) << (128 - bits) }, times);
            [(64, 1), (56, 2), (48, 4)].map(network).to_vec()
        }
    }
}

/// The narrowest network that an address belongs to.
pub fn source(remote: SocketAddr) -> Source {
    sources(remote)[0].0
}

/// Rate limiter by source: a burst, and then one event per interval.
#[derive(Debug)]
pub struct SourceLimiter {
    at_once: u32,
    pause: Duration,
    /// Maximum number of remembered sources. Beyond it, events of new sources are rejected.
    most: usize,
    spent: BTreeMap<Source, Spent>,
    swept: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Spent {
    left: u32,
    /// The time to which `left` refers.
    since: Instant,
}

/// Interval at which sources with a full budget are removed.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

impl SourceLimiter {
    /// Allows `at_once` events of one source at once, and then one per `pause`.
    pub fn new(at_once: u32, pause: Duration, most: usize) -> Self {
        Self { at_once, pause, most, spent: BTreeMap::new(), swept: None }
    }

    /// Counts an event. Returns `false` if a network of the address has used up its budget.
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

    /// The current budget of a source.
    fn of(&self, now: Instant, source: Source, times: u32) -> Spent {
        let (most, pause) = (self.at_once.saturating_mul(times), self.pause / times);
        let Some(spent) = self.spent.get(&source) else { return Spent { left: most, since: now } };
        let gained = now.saturating_duration_since(spent.since).as_nanos() / pause.as_nanos().max(1);
        let gained = u32::try_from(gained).unwrap_or(u32::MAX);
        Spent { left: spent.left.saturating_add(gained).min(most), since: spent.since + pause.saturating_mul(gained) }
    }

    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now.saturating_duration_since(swept) < SWEEP_INTERVAL) {
            return;
        }
        self.swept = Some(now);
        // The time after which even the widest network has its full budget.
        let all = |spent: &Spent| now.saturating_duration_since(spent.since) >= self.pause * self.at_once;
        self.spent.retain(|_, spent| !all(spent));
    }

    /// Number of remembered sources.
    pub fn remembered(&self) -> usize {
        self.spent.len()
    }
}
