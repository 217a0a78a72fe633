//! Mode detection (DBAS II.A): finds the hosts that run Braid, so that flows to them can be bonded without a relay.
//!
//! Braid probes a host that has answered a flow, once, over the flow's link, and caches the result for a while: the host runs Braid with a certain
//! key, or it does not answer. The first key of a host is *pinned*. Braid never trusts a different key until the user removes the host. A positive
//! answer counts only for the links over which the host proved that key: an attacker who controls one link can impersonate the host there and must
//! not attract flows from other links. So a host with a pinned key is probed over each link separately. Links are identified by their slots. `K` is
//! the type of keys.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate, Time};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::bucket::Bucket;

/// A positive answer expires this long after the last contact with the host.
pub const FRESH: Duration = Duration::from_secs(24 * 3600);
/// A host that does not answer is probed again after this time. The time doubles with each miss, up to [`FRESH`].
pub const INITIAL_RETRY: Duration = Duration::from_secs(3600);
const MAX_RETRY: Duration = FRESH;
/// Initial retry time for a host that ran Braid and is unreachable now. It doubles in the same way.
const INITIAL_LOST_RETRY: Duration = Duration::from_secs(60);
/// A pending probe expires after this time.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// A host that was due for a probe and did not get one counts as settled for this time.
const SKIP: Duration = Duration::from_secs(60);
/// Maximum number of such hosts. Further ones are not recorded.
const MAX_SKIPPED: usize = 1024;
/// Time until a service that was refused over a bond is tried again.
const CLOSED_LIFETIME: Duration = Duration::from_secs(600);
const MAX_CLOSED: usize = 1024;
/// Maximum number of cached hosts, including pinned ones. At most half of them are pinned.
pub const MAX_HOSTS: usize = 8192;
/// Size, sustained rate and burst of probes. The limit keeps an application that contacts hundreds of hosts from flooding a link.
const PROBE_SIZE: ByteCount = ByteCount::new(1200);
const PROBES_PER_SECOND: u64 = 4;
const PROBE_BURST: u64 = 32;

/// Result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DetectionAnswer<K> {
    /// The host runs Braid and has proved this key.
    Runs(K),
    /// No answer, or an answer that is not Braid's.
    Silent,
    /// The host answered, but the handshake did not complete. It is probed again soon.
    Unfinished,
    /// The host presented a key other than the pinned one.
    KeyMismatch,
}

/// Current state of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostStatus<K> {
    /// The host runs Braid with this key, over at least one link ([`Detection::seen_over`]).
    Runs(K),
    /// Over some link the host presents a key other than this pinned one.
    KeyMismatch(K),
    /// The host did not answer, or its answer could not be used.
    Silent,
    /// A probe is pending.
    Asked,
    /// Nothing is cached, or the cached result has expired.
    Nothing,
}

/// Cache of detection results.
#[derive(Debug, Clone)]
pub struct Detection<K> {
    hosts: BTreeMap<IpAddr, Host<K>>,
    /// Number of hosts with a pinned key.
    pinned: usize,
    /// Services that hosts do not open over a bond, with the expiry of that result.
    closed: BTreeMap<(IpAddr, u16), Time>,
    /// Separate from `hosts`: a skipped host may still be probed, and it evicts no result.
    skipped: Skipped,
    probe_budget: Bucket,
}

/// Hosts that were due for a probe and did not get one, each until it expires.
#[derive(Debug, Clone, Default)]
struct Skipped {
    until: BTreeMap<IpAddr, Time>,
    /// The same entries, the first to expire first.
    by_expiry: BTreeSet<(Time, IpAddr)>,
}

#[derive(Debug, Clone)]
struct Host<K> {
    pin: Option<K>,
    /// Probe results by link slot.
    links: BTreeMap<usize, LinkResult>,
    /// Time of the last probe or contact.
    touched: Time,
}

/// Probe result of one link.
#[derive(Debug, Clone, Copy)]
struct LinkResult {
    state: State,
    /// Expiry of the state; then the host is probed again.
    until: Time,
    /// Number of consecutive misses.
    misses: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Pending,
    Present,
    /// The host ran Braid and is unreachable now.
    Lost,
    Absent,
    KeyMismatch,
}

impl<K: Copy + PartialEq> Detection<K> {
    /// Creates an empty cache.
    pub fn new(now: Time) -> Self {
        let rate = Rate::from_bps(PROBE_SIZE.get() * PROBES_PER_SECOND * 8);
        Self {
            hosts: BTreeMap::new(),
            pinned: 0,
            closed: BTreeMap::new(),
            skipped: Skipped::default(),
            probe_budget: Bucket::new(rate, ByteCount::new(PROBE_SIZE.get() * PROBE_BURST), now),
        }
    }

    /// Whether to probe the host over `link` now. If so, returns the key that the host must prove; an inner `None` accepts any key. After a `Some`
    /// the caller must report the result to [`on_answer`](Self::on_answer).
    pub fn ask(&mut self, now: Time, host: IpAddr, link: usize) -> Option<Option<K>> {
        if !self.needs_probe(now, host, link) || !self.probe_budget.take(PROBE_SIZE, now) {
            return None;
        }
        self.evict_oldest(host);
        self.skipped.remove(host);
        let entry = self.hosts.entry(host).or_insert(Host { pin: None, links: BTreeMap::new(), touched: now });
        entry.touched = now;
        entry.set_state(link, State::Pending, now + PROBE_TIMEOUT);
        Some(entry.pin)
    }

    /// The host does not get a probe now. It counts as settled for [`SKIP`], or until it is probed after all. Returns whether this changed
    /// [`settled`](Self::settled). A skip neither keeps the host from being probed nor affects any result.
    pub fn skip(&mut self, now: Time, host: IpAddr) -> bool {
        !self.hosts.get(&host).is_some_and(|entry| entry.has_result(now)) && self.skipped.insert(now, host)
    }

    /// Whether no unexpired result exists. While a host has no pinned key, a result over one link counts for all links.
    pub fn needs_probe(&self, now: Time, host: IpAddr, link: usize) -> bool {
        self.hosts.get(&host).is_none_or(|known| match known.pin {
            None => !known.has_result(now),
            Some(_) => known.links.get(&link).is_none_or(|result| result.until <= now),
        })
    }

    /// Records the result of a probe over `link`. Ignored if the host or the link was removed in the meantime.
    pub fn on_answer(&mut self, now: Time, host: IpAddr, link: usize, answer: DetectionAnswer<K>) {
        let pins_full = self.pinned >= MAX_HOSTS / 2;
        let Some(entry) = self.hosts.get_mut(&host).filter(|entry| entry.links.contains_key(&link)) else { return };
        entry.touched = now;
        self.skipped.remove(host);
        match answer {
            DetectionAnswer::Runs(key) if entry.pin.is_some_and(|pin| pin != key) => {
                entry.set_state(link, State::KeyMismatch, now + INITIAL_RETRY)
            }
            // New pins do not evict old ones. Otherwise an attacker with thousands of hosts could evict a pin and present another key.
            DetectionAnswer::Runs(_) if entry.pin.is_none() && pins_full => entry.set_state(link, State::Absent, now + MAX_RETRY),
            DetectionAnswer::Runs(key) => {
                self.pinned += usize::from(entry.pin.is_none());
                entry.pin = Some(key);
                entry.set_state(link, State::Present, now + FRESH);
            }
            DetectionAnswer::KeyMismatch => entry.set_state(link, State::KeyMismatch, now + INITIAL_RETRY),
            DetectionAnswer::Silent => entry.record_miss(link, now, State::Absent, INITIAL_RETRY),
            DetectionAnswer::Unfinished => entry.record_miss(link, now, State::Absent, INITIAL_LOST_RETRY),
        }
    }

    /// The host was reached and proved its pinned key.
    pub fn on_reached(&mut self, now: Time, host: IpAddr) {
        self.update_links(host, &[State::Present, State::Lost], |entry, link| entry.set_state(link, State::Present, now + FRESH));
        if let Some(entry) = self.hosts.get_mut(&host) {
            entry.touched = now;
        }
    }

    /// The host ran Braid and is unreachable over these links now.
    pub fn on_lost(&mut self, now: Time, host: IpAddr) {
        self.update_links(host, &[State::Present], |entry, link| entry.record_miss(link, now, State::Lost, INITIAL_LOST_RETRY));
    }

    /// The host presented a key other than the pinned one.
    pub fn on_key_mismatch(&mut self, now: Time, host: IpAddr) {
        let known = [State::Pending, State::Present, State::Lost, State::Absent];
        self.update_links(host, &known, |entry, link| entry.set_state(link, State::KeyMismatch, now + INITIAL_RETRY));
    }

    /// The host runs Braid but cannot open connections to its own address: a load balancer or a NAT stands in between.
    pub fn on_elsewhere(&mut self, now: Time, host: IpAddr) {
        self.update_links(host, &[State::Present, State::Lost], |entry, link| entry.set_state(link, State::Absent, now + MAX_RETRY));
    }

    /// Applies `change` to those links of `host` that are in one of `states`.
    fn update_links(&mut self, host: IpAddr, states: &[State], change: impl Fn(&mut Host<K>, usize)) {
        let Some(entry) = self.hosts.get_mut(&host) else { return };
        let links: Vec<_> = entry.links.iter().filter(|(_, result)| states.contains(&result.state)).map(|(link, _)| *link).collect();
        links.into_iter().for_each(|link| change(entry, link));
    }

    /// A link is gone, or leads to another network now. Removes the results obtained over it.
    pub fn forget_link(&mut self, link: usize) {
        for entry in self.hosts.values_mut() {
            entry.links.remove(&link);
        }
    }

    /// A host does not open this port over a bond: nothing listens there, or its policy forbids it.
    pub fn on_closed(&mut self, now: Time, host: IpAddr, port: u16) {
        self.closed.retain(|_, until| now < *until);
        if self.closed.len() >= MAX_CLOSED
            && let Some(soonest) = self.closed.iter().min_by_key(|(_, until)| **until).map(|(service, _)| *service)
        {
            self.closed.remove(&soonest);
        }
        self.closed.insert((host, port), now + CLOSED_LIFETIME);
    }

    /// Services that are currently not opened over a bond.
    pub fn closed(&self, now: Time) -> impl Iterator<Item = (IpAddr, u16)> {
        self.closed.iter().filter(move |(_, until)| now < **until).map(|(service, _)| *service)
    }

    /// The current state of the host.
    pub fn status(&self, now: Time, host: IpAddr) -> HostStatus<K> {
        let Some(entry) = self.hosts.get(&host) else { return HostStatus::Nothing };
        let is = |state: State| entry.links.values().any(|result| now < result.until && result.state == state);
        match entry.pin {
            Some(pin) if is(State::KeyMismatch) => HostStatus::KeyMismatch(pin),
            Some(pin) if is(State::Present) => HostStatus::Runs(pin),
            _ if is(State::Pending) => HostStatus::Asked,
            _ if entry.has_result(now) => HostStatus::Silent,
            _ => HostStatus::Nothing,
        }
    }

    /// The hosts with an unexpired result, a pending probe or a skipped one: what they run is known as far as it can be.
    pub fn settled(&self, now: Time) -> impl Iterator<Item = IpAddr> {
        let known = self.hosts.iter().filter(move |(_, entry)| entry.has_result(now)).map(|(host, _)| *host);
        known.chain(self.skipped.unexpired(now).map(|(_, host)| host))
    }

    /// Whether an answer of the host is awaited over some link.
    pub fn is_pending(&self, now: Time, host: IpAddr) -> bool {
        let pending = |entry: &Host<K>| entry.links.values().any(|result| result.state == State::Pending && now < result.until);
        self.hosts.get(&host).is_some_and(pending)
    }

    /// When the next result of [`settled`](Self::settled) or [`is_pending`](Self::is_pending) expires.
    pub fn next_expiry(&self, now: Time) -> Option<Time> {
        let results = self.hosts.values().flat_map(|entry| entry.links.values()).map(|result| result.until).filter(|until| now < *until);
        results.chain(self.skipped.unexpired(now).next().map(|(until, _)| until)).min()
    }

    /// The links over which the host has proved its pinned key.
    pub fn seen_over(&self, now: Time, host: IpAddr) -> LinkSet {
        let mut mask = LinkSet::default();
        let links = self.hosts.get(&host).into_iter().flat_map(|entry| &entry.links);
        links.filter(|(_, result)| result.state == State::Present && now < result.until).for_each(|(link, _)| mask.insert(*link));
        mask
    }

    /// The hosts that currently run Braid, the most recent contact first.
    pub fn servers(&self, now: Time) -> Vec<IpAddr> {
        let here = |host: &IpAddr| matches!(self.status(now, *host), HostStatus::Runs(_));
        let mut found: Vec<_> = self.hosts.iter().filter(|(host, _)| here(host)).map(|(host, entry)| (entry.touched, *host)).collect();
        found.sort_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, host)| host).collect()
    }

    /// The hosts that present a key other than their pinned one.
    pub fn key_mismatches(&self) -> impl Iterator<Item = IpAddr> {
        let shown = |entry: &Host<K>| entry.links.values().any(|result| result.state == State::KeyMismatch);
        self.hosts.iter().filter(move |(_, entry)| shown(entry)).map(|(host, _)| *host)
    }

    /// When the next result of [`servers`](Self::servers) or [`closed`](Self::closed) expires.
    pub fn poll_timeout(&self, now: Time) -> Option<Time> {
        let result = self.hosts.values().flat_map(|entry| entry.links.values());
        let ends = result.filter(|result| matches!(result.state, State::Present | State::KeyMismatch)).map(|result| result.until);
        ends.chain(self.closed.values().copied()).filter(|until| now < *until).min()
    }

    /// Removes a host and its pin. Returns whether it had a pin.
    pub fn forget(&mut self, host: IpAddr) -> bool {
        self.closed.retain(|(of, _), _| *of != host);
        self.skipped.remove(host);
        let pinned = self.hosts.remove(&host).is_some_and(|entry| entry.pin.is_some());
        self.pinned -= usize::from(pinned);
        pinned
    }

    /// The state to persist: pinned hosts, their keys, and the time of the last contact.
    pub fn pins(&self) -> impl Iterator<Item = (IpAddr, K, Time)> {
        self.hosts.iter().filter_map(|(host, entry)| Some((*host, entry.pin?, entry.touched)))
    }

    /// Restores a persisted pin. The last contact was `ago` before `now`. The host must prove its key again over each link.
    pub fn recall(&mut self, now: Time, host: IpAddr, key: K, ago: Duration) {
        if self.pinned < MAX_HOSTS / 2 && !self.hosts.contains_key(&host) {
            self.pinned += 1;
            let touched = Time::from_nanos(now.as_nanos().saturating_sub(u64::try_from(ago.as_nanos()).unwrap_or(u64::MAX)));
            self.hosts.insert(host, Host { pin: Some(key), links: BTreeMap::new(), touched });
        }
    }

    /// Evicts the least recently touched host without a pin.
    fn evict_oldest(&mut self, host: IpAddr) {
        if self.hosts.len() >= MAX_HOSTS && !self.hosts.contains_key(&host) {
            let oldest = self.hosts.iter().filter(|(_, entry)| entry.pin.is_none()).min_by_key(|(_, entry)| entry.touched);
            if let Some(oldest) = oldest.map(|(host, _)| *host) {
                self.hosts.remove(&oldest);
            }
        }
    }
}

impl<K> Host<K> {
    /// Whether there is an unexpired result or a pending probe over any link.
    fn has_result(&self, now: Time) -> bool {
        self.links.values().any(|result| now < result.until)
    }

    fn set_state(&mut self, link: usize, state: State, until: Time) {
        let misses = if state == State::Pending { self.misses(link) } else { 0 };
        self.links.insert(link, LinkResult { state, until, misses });
    }

    fn record_miss(&mut self, link: usize, now: Time, state: State, first: Duration) {
        let misses = self.misses(link);
        let holds = first.saturating_mul(1 << misses.min(16)).min(MAX_RETRY);
        self.links.insert(link, LinkResult { state, until: now + holds, misses: misses + 1 });
    }

    /// Consecutive misses over this link. While the host has no pinned key, the maximum over all links.
    fn misses(&self, link: usize) -> u32 {
        match self.pin {
            None => self.links.values().map(|result| result.misses).max().unwrap_or(0),
            Some(_) => self.links.get(&link).map_or(0, |result| result.misses),
        }
    }
}

impl Skipped {
    /// Adds a host; `false` if it is already present or if there is no room.
    fn insert(&mut self, now: Time, host: IpAddr) -> bool {
        while let Some((until, expired)) = self.by_expiry.first().copied()
            && until <= now
        {
            self.remove(expired);
        }
        if self.until.len() >= MAX_SKIPPED || self.until.contains_key(&host) {
            return false;
        }
        self.until.insert(host, now + SKIP);
        self.by_expiry.insert((now + SKIP, host))
    }

    fn remove(&mut self, host: IpAddr) {
        if let Some(until) = self.until.remove(&host) {
            self.by_expiry.remove(&(until, host));
        }
    }

    /// The unexpired entries, the first to expire first.
    fn unexpired(&self, now: Time) -> impl Iterator<Item = (Time, IpAddr)> {
        self.by_expiry.iter().copied().skip_while(move |(until, _)| *until <= now)
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, length: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length))
}

/// Which addresses are globally unique. The longest prefix decides; an address without a prefix is not unique.
pub const PUBLIC_PREFIXES: &[(IpNet, bool)] = &[
    (v4(0, 0, 0, 0, 0), true),
    (v4(0, 0, 0, 0, 32), false),
    (v4(10, 0, 0, 0, 8), false),
    // Shared by carriers (RFC 6598).
    (v4(100, 64, 0, 0, 10), false),
    (v4(127, 0, 0, 0, 8), false),
    (v4(169, 254, 0, 0, 16), false),
    (v4(172, 16, 0, 0, 12), false),
    (v4(192, 168, 0, 0, 16), false),
    (v4(224, 0, 0, 0, 4), false),
    (v4(255, 255, 255, 255, 32), false),
    (IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3)), true),
];

/// Whether the address is globally unique. A private address belongs to different hosts in different networks, and they have different keys.
pub fn is_public(host: IpAddr) -> bool {
    let covering = PUBLIC_PREFIXES.iter().filter(|(net, _)| net.contains(&host));
    covering.max_by_key(|(net, _)| net.prefix_len()).is_some_and(|(_, public)| *public)
}

/// Whether no address of the network is globally unique.
pub fn is_private(net: &IpNet) -> bool {
    let overlaps = |public: &IpNet| net.contains(public) || public.contains(net);
    let within = PUBLIC_PREFIXES.iter().any(|(known, public)| !public && known.contains(net));
    within || !PUBLIC_PREFIXES.iter().any(|(known, public)| *public && overlaps(known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn host(number: u32) -> IpAddr {
        IpAddr::from((0xc633_6400 + number).to_be_bytes())
    }

    fn start() -> (Detection<u8>, Time) {
        let now = Time::from_nanos(5_000_000_000);
        (Detection::new(now), now)
    }

    #[test]
    fn a_host_is_probed_once_and_its_answer_is_valid_for_a_day() {
        let (mut known, now) = start();
        assert_eq!(known.ask(now, host(1), 0), Some(None));
        assert_eq!((known.ask(now, host(1), 0), known.status(now, host(1))), (None, HostStatus::Asked));
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        assert_eq!(known.status(now, host(1)), HostStatus::Runs(7));
        assert_eq!(known.servers(now), [host(1)]);
        let end = known.poll_timeout(now).unwrap();
        assert_eq!(end, now + FRESH);
        assert_eq!(known.ask(now + 23 * HOUR, host(1), 0), None);
        assert_eq!((known.status(end, host(1)), known.servers(end)), (HostStatus::Nothing, vec![]));
        assert_eq!(known.ask(end, host(1), 0), Some(Some(7)), "the key stays pinned");
    }

    #[test]
    fn contact_renews_a_positive_answer() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        known.on_reached(now + 20 * HOUR, host(1));
        assert_eq!(known.status(now + 40 * HOUR, host(1)), HostStatus::Runs(7));
    }

    #[test]
    fn the_retry_time_of_a_silent_host_doubles_up_to_a_day() {
        let (mut known, mut now) = start();
        let mut spans = Vec::new();
        for _ in 0..7 {
            assert!(known.ask(now, host(1), 0).is_some());
            known.on_answer(now, host(1), 0, DetectionAnswer::Silent);
            assert_eq!((known.ask(now, host(1), 0), known.status(now, host(1))), (None, HostStatus::Silent));
            let begin = now;
            while !known.needs_probe(now, host(1), 0) {
                now = now + HOUR;
            }
            spans.push(now.since(begin).as_secs() / 3600);
        }
        assert_eq!(spans, [1, 2, 4, 8, 16, 24, 24]);
        assert!(known.ask(now, host(1), 0).is_some());
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(1));
        assert_eq!(known.status(now, host(1)), HostStatus::Runs(1), "a silent host may start to run Braid");
    }

    #[test]
    fn another_key_is_rejected_until_the_host_is_forgotten() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        let later = now + FRESH;
        assert_eq!(known.ask(later, host(1), 0), Some(Some(7)));
        known.on_answer(later, host(1), 0, DetectionAnswer::KeyMismatch);
        assert_eq!(known.status(later, host(1)), HostStatus::KeyMismatch(7));
        assert_eq!((known.servers(later), known.key_mismatches().collect::<Vec<_>>()), (vec![], vec![host(1)]));
        known.on_lost(later, host(1));
        assert_eq!(known.status(later, host(1)), HostStatus::KeyMismatch(7));
        // The answer to an earlier probe that did not carry the pin: the pin holds nevertheless.
        known.on_answer(later, host(1), 0, DetectionAnswer::Runs(8));
        assert_eq!(known.status(later, host(1)), HostStatus::KeyMismatch(7));
        assert!(known.forget(host(1)) && !known.forget(host(1)));
        assert_eq!(known.ask(later, host(1), 0), Some(None));
        known.on_answer(later, host(1), 0, DetectionAnswer::Runs(8));
        assert_eq!(known.status(later, host(1)), HostStatus::Runs(8));
    }

    #[test]
    fn a_lost_server_is_probed_again_soon() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        known.on_lost(now, host(1));
        assert_eq!((known.status(now, host(1)), known.servers(now)), (HostStatus::Silent, vec![]));
        known.on_reached(now, host(1));
        assert_eq!(known.status(now, host(1)), HostStatus::Runs(7), "a host that returns counts at once");
        known.on_lost(now, host(1));
        assert_eq!(known.ask(now + INITIAL_LOST_RETRY, host(1), 0), Some(Some(7)));
    }

    /// An attacker who controls one link can impersonate there a host that is reached over the others.
    #[test]
    fn regression_a_positive_answer_counts_only_for_links_over_which_the_key_was_proved() {
        let (mut known, now) = start();
        let over = |known: &Detection<u8>| known.seen_over(now, host(1)).iter().collect::<Vec<_>>();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        assert_eq!(over(&known), [0]);
        assert_eq!(known.ask(now, host(1), 1), Some(Some(7)), "the other links are probed for that key");
        known.on_reached(now, host(1));
        assert_eq!(over(&known), [0], "contact over one link proves nothing about the others");
        known.on_answer(now, host(1), 1, DetectionAnswer::Runs(7));
        assert_eq!(over(&known), [0, 1]);
        known.forget_link(0);
        assert_eq!((over(&known), known.status(now, host(1))), (vec![1], HostStatus::Runs(7)));
        known.on_answer(now, host(1), 0, DetectionAnswer::Runs(7));
        assert_eq!(over(&known), [1], "an answer over a removed link is ignored");
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::KeyMismatch);
        assert_eq!((known.status(now, host(1)), known.servers(now)), (HostStatus::KeyMismatch(7), vec![]));
    }

    #[test]
    fn a_host_without_a_pin_is_probed_over_one_link_only() {
        let (mut known, now) = start();
        assert_eq!((known.ask(now, host(1), 0), known.ask(now, host(1), 1)), (Some(None), None));
        known.on_answer(now, host(1), 0, DetectionAnswer::Silent);
        assert_eq!(known.ask(now, host(1), 1), None);
        assert_eq!(known.ask(now + HOUR, host(1), 1), Some(None));
        known.on_answer(now + HOUR, host(1), 1, DetectionAnswer::Silent);
        assert!(
            !known.needs_probe(now + 2 * HOUR, host(1), 0) && known.needs_probe(now + 3 * HOUR, host(1), 0),
            "its misses over all links count together"
        );
    }

    #[test]
    fn a_closed_service_is_tried_again_after_a_while() {
        let (mut known, now) = start();
        known.on_closed(now, host(1), 25);
        known.on_closed(now, host(2), 80);
        assert_eq!(known.closed(now).collect::<Vec<_>>(), [(host(1), 25), (host(2), 80)]);
        assert_eq!(known.poll_timeout(now), Some(now + CLOSED_LIFETIME));
        known.forget(host(1));
        assert_eq!(known.closed(now).collect::<Vec<_>>(), [(host(2), 80)]);
        assert_eq!((known.closed(now + CLOSED_LIFETIME).count(), known.poll_timeout(now + CLOSED_LIFETIME)), (0, None));
        for port in 0..2 * MAX_CLOSED as u16 {
            known.on_closed(now + Duration::from_millis(port.into()), host(3), port);
        }
        assert_eq!(known.closed.len(), MAX_CLOSED);
        assert!(known.closed.contains_key(&(host(3), 2 * MAX_CLOSED as u16 - 1)), "the oldest is evicted first");
    }

    #[test]
    fn a_host_with_an_unfinished_answer_is_probed_again_soon() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        known.on_answer(now, host(1), 0, DetectionAnswer::Unfinished);
        assert_eq!((known.status(now, host(1)), known.ask(now + INITIAL_LOST_RETRY, host(1), 0)), (HostStatus::Silent, Some(None)));
    }

    #[test]
    fn a_probe_without_a_reported_result_expires() {
        let (mut known, now) = start();
        known.ask(now, host(1), 0);
        assert!(!known.needs_probe(now + Duration::from_secs(9), host(1), 0));
        assert_eq!(known.ask(now + PROBE_TIMEOUT, host(1), 0), Some(None));
    }

    #[test]
    fn probes_to_many_hosts_are_rate_limited() {
        let (mut known, now) = start();
        let asked =
            |known: &mut Detection<u8>, now, from: u32| (from..from + 200).filter(|at| known.ask(now, host(*at), 0).is_some()).count();
        assert_eq!(asked(&mut known, now, 0), PROBE_BURST as usize);
        assert_eq!(asked(&mut known, now + Duration::from_secs(2), 1000), 2 * PROBES_PER_SECOND as usize);
        let refused = (0..200).filter(|at| known.needs_probe(now, host(*at), 0)).count();
        assert_eq!(refused, 200 - PROBE_BURST as usize, "hosts without a probe are not cached");
    }

    #[test]
    fn a_recalled_host_must_prove_its_key_again() {
        let (mut known, now) = start();
        known.recall(now, host(1), 7, 23 * HOUR);
        known.recall(now, host(2), 8, 90 * FRESH);
        assert_eq!([1, 2].map(|at| known.status(now, host(at))), [HostStatus::Nothing; 2], "the host must prove its key again");
        assert_eq!([1, 2].map(|at| known.ask(now, host(at), 0)), [Some(Some(7)), Some(Some(8))]);
        assert_eq!(known.pins().map(|(host, key, _)| (host, key)).collect::<Vec<_>>(), [(host(1), 7), (host(2), 8)]);
    }

    #[test]
    fn the_cache_is_bounded_and_pins_are_not_evicted() {
        let (mut known, mut now) = start();
        for at in 0..MAX_HOSTS as u32 + 200 {
            known.ask(now, host(at), 0).unwrap();
            known.on_answer(now, host(at), 0, if at % 2 == 0 { DetectionAnswer::Runs(1) } else { DetectionAnswer::Silent });
            now = now + Duration::from_secs(1);
        }
        assert_eq!((known.hosts.len(), known.pinned), (MAX_HOSTS, MAX_HOSTS / 2));
        assert_eq!(known.hosts[&host(0)].pin, Some(1));
        assert!(!known.hosts.contains_key(&host(1)), "the oldest host without a pin is evicted");
    }

    /// Skips are free of charge, so one user could cause thousands of them.
    #[test]
    fn regression_skipped_hosts_are_few_and_affect_no_result() {
        let (mut known, now) = start();
        known.ask(now, host(0), 0);
        known.on_answer(now, host(0), 0, DetectionAnswer::Silent);
        let skipped = (0..=MAX_HOSTS as u32).filter(|at| known.skip(now, host(*at))).count();
        assert_eq!((skipped, known.settled(now).count(), known.hosts.len()), (MAX_SKIPPED, MAX_SKIPPED + 1, 1));
        assert_eq!((known.needs_probe(now, host(0), 0), known.needs_probe(now, host(1), 0)), (false, true));
        let later = now + SKIP / 2;
        assert!(!known.skip(later, host(1)), "a skip is not prolonged");
        assert_eq!((known.next_expiry(later), known.status(later, host(1))), (Some(now + SKIP), HostStatus::Nothing));
        assert_eq!(known.ask(later, host(1), 0), Some(None));
        assert_eq!((known.settled(later).count(), known.skipped.until.len()), (MAX_SKIPPED + 1, MAX_SKIPPED - 1));
        known.forget(host(2));
        assert_eq!(known.settled(later).count(), MAX_SKIPPED);
        let end = now + SKIP;
        assert_eq!(known.settled(end).collect::<Vec<_>>(), [host(0)]);
        assert!(known.skip(end, host(3)));
        assert_eq!((known.skipped.until.len(), known.skipped.by_expiry.len()), (1, 1), "expired skips make room");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Ask(u32, usize),
        Skip(u32),
        Answer(u32, usize, u8),
        Reached(u32),
        Lost(u32),
        KeyMismatch(u32),
        Elsewhere(u32),
        Forget(u32),
        ForgetLink(usize),
        Wait(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..4u32, 0..3usize).prop_map(|(host, link)| Step::Ask(host, link)),
            (0..4u32).prop_map(Step::Skip),
            (0..4u32, 0..3usize, 0..6u8).prop_map(|(host, link, answer)| Step::Answer(host, link, answer)),
            (0..4u32).prop_map(Step::Reached),
            (0..4u32).prop_map(Step::Lost),
            (0..4u32).prop_map(Step::KeyMismatch),
            (0..4u32).prop_map(Step::Elsewhere),
            (0..3usize).prop_map(Step::ForgetLink),
            (0..4u32).prop_map(Step::Forget),
            (0..200_000u32).prop_map(Step::Wait),
            (0..90u32).prop_map(Step::Wait),
        ];
        proptest::collection::vec(step, 0..60)
    }

    proptest! {
        /// For any sequence of events: only a pinned key is used, a pin changes only by `forget`, a link counts only after the key was proved over
        /// it, no probe is sent while a result is valid, and a skip settles its host for a while, without another effect.
        #[test]
        fn only_the_pinned_key_is_used(steps in steps()) {
            let (mut known, mut now) = start();
            let mut pins: BTreeMap<IpAddr, u8> = BTreeMap::new();
            let mut shown: BTreeSet<(IpAddr, usize)> = BTreeSet::new();
            let mut skipped: BTreeMap<IpAddr, Time> = BTreeMap::new();
            let due = |known: &Detection<u8>, now| {
                (0..12).map(|at| known.needs_probe(now, host(at % 4), at as usize / 4)).collect::<Vec<_>>()
            };
            for step in steps {
                match step {
                    Step::Ask(at, link) => {
                        let news = known.needs_probe(now, host(at), link);
                        if let Some(pin) = known.ask(now, host(at), link) {
                            prop_assert!(news);
                            prop_assert_eq!(pin, pins.get(&host(at)).copied());
                            shown.remove(&(host(at), link));
                            skipped.remove(&host(at));
                        }
                    }
                    Step::Skip(at) => {
                        let before = (due(&known, now), known.status(now, host(at)), known.hosts.len());
                        let news = !known.settled(now).any(|settled| settled == host(at));
                        prop_assert_eq!(known.skip(now, host(at)), news);
                        prop_assert_eq!((due(&known, now), known.status(now, host(at)), known.hosts.len()), before);
                        if news {
                            skipped.insert(host(at), now + SKIP);
                        }
                    }
                    Step::Answer(at, link, kind) => {
                        let there = known.hosts.get(&host(at)).is_some_and(|host| host.links.contains_key(&link));
                        let answer = match kind {
                            0 => DetectionAnswer::Silent,
                            1 => DetectionAnswer::KeyMismatch,
                            2 => DetectionAnswer::Unfinished,
                            key => DetectionAnswer::Runs(key),
                        };
                        known.on_answer(now, host(at), link, answer);
                        if there {
                            skipped.remove(&host(at));
                        }
                        if let (DetectionAnswer::Runs(key), true) = (answer, there)
                            && *pins.entry(host(at)).or_insert(key) == key
                        {
                            shown.insert((host(at), link));
                        }
                    }
                    Step::Reached(at) => known.on_reached(now, host(at)),
                    Step::Lost(at) => known.on_lost(now, host(at)),
                    Step::KeyMismatch(at) => known.on_key_mismatch(now, host(at)),
                    Step::Elsewhere(at) => known.on_elsewhere(now, host(at)),
                    Step::Forget(at) => {
                        prop_assert_eq!(known.forget(host(at)), pins.remove(&host(at)).is_some());
                        shown.retain(|(of, _)| *of != host(at));
                        skipped.remove(&host(at));
                    }
                    Step::ForgetLink(link) => {
                        known.forget_link(link);
                        shown.retain(|(_, of)| *of != link);
                    }
                    Step::Wait(seconds) => now = now + Duration::from_secs(seconds.into()),
                }
                for at in 0..4 {
                    prop_assert!(known.seen_over(now, host(at)).iter().all(|link| shown.contains(&(host(at), link))));
                }
                skipped.retain(|_, until| now < *until);
                let results = known.hosts.iter().filter(|(_, entry)| entry.has_result(now)).map(|(host, _)| *host);
                let settled: BTreeSet<_> = results.chain(skipped.keys().copied()).collect();
                prop_assert_eq!(known.settled(now).collect::<BTreeSet<_>>(), settled.clone());
                let expiry = known.next_expiry(now);
                prop_assert_eq!(expiry.is_some(), !settled.is_empty());
                prop_assert!(skipped.values().all(|until| expiry.is_some_and(|expiry| expiry <= *until)));
                for server in known.servers(now) {
                    prop_assert_eq!(known.status(now, server), HostStatus::Runs(pins[&server]));
                }
                prop_assert_eq!(known.pinned, pins.len());
                prop_assert!(known.poll_timeout(now).is_some() || known.servers(now).is_empty());
            }
        }
    }
}
