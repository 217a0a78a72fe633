//! Late binding: packets wait in a queue for each flow, above the links, and get a link when it can take one.
//!
//! Source: Yap, *Using all networks around us* (2013), section 2.4. Packets below the binding point are lost with their link, and delay urgent ones. So
//! few are there, and a packet that has not left yet goes over another link if its own one dies.
//!
//! The thesis serves flows in a round, each with its own queue. Here miDRR serves them ([`Midrr`], Algorithm 4.4.2), because a flow may use several links. A
//! flow whose queue was empty sends its first packet before the others (the thesis: "can also be prioritized if so desired"; RFC 8290, 4.2: new flows).
//!
//! A device that says when its packets have left needs no rate. Behind one that takes everything, such as a modem at a fast cable, packets leave at the rate
//! that the link is known to carry.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, MAX_LINKS, Rate, Time};

use crate::midrr::{Flags, FlowKey, Midrr};

/// Default of [`LateBinding::below`]: as in the thesis, the least that does not stop the device between two packets.
pub const BELOW: u32 = 2;
/// Largest value of [`LateBinding::below`].
pub const MAX_BELOW: u32 = 256;
/// Default of [`LateBinding::up_to`].
pub const UP_TO: Rate = Rate::from_mbps(300);

/// A full packet with its Ethernet header.
const PACKET: ByteCount = ByteCount::new(1514);
/// Most flows with a queue of their own. The packets of further ones share a queue.
const MAX_FLOWS: usize = 4096;
/// All that may wait.
const MAX_BYTES: ByteCount = ByteCount::new(16 << 20);
/// A flow may have as much waiting as its link carries in this time, but at least [`LEAST`] and at most [`MOST`].
const DEPTH: Duration = Duration::from_millis(100);
const LEAST: ByteCount = ByteCount::new(64 * 1514);
const MOST: ByteCount = ByteCount::new(2 << 20);
/// A packet that waits longer is dropped: its flow's link is dead, and nothing else may carry it.
const MAX_WAIT: Duration = Duration::from_secs(2);
/// A flow without packets for this long is new again: its next packet leaves before those of others.
const REST: Duration = Duration::from_millis(10);
/// A flow without packets for this long is forgotten.
const IDLE: Duration = Duration::from_secs(5);
/// What a link that is paced may send at once, if the queue was served late.
const BURST: Duration = Duration::from_millis(2);
/// Now and then a link is asked for more than its known rate, because nothing else would show that it carries more.
const PROBE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_millis(1500));
/// Multiples of the known rate at which packets leave: while it is probed, and otherwise. The known rate is a little below the true one.
const PACE: (f64, f64) = (1.25, 1.02);

/// `[late]` of the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LateBinding {
    /// How many full packets may be below the binding point, in the device and its queue. 1 to [`MAX_BELOW`].
    pub below: u32,
    /// Only while the links together carry no more than this upstream: each packet passes user space.
    pub up_to: Rate,
}

impl Default for LateBinding {
    fn default() -> Self {
        Self { below: BELOW, up_to: UP_TO }
    }
}

/// State of a link that works.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkState {
    /// What it is known to carry, in bytes of whole frames; `None`: only its device says when it can take more.
    pub rate: Option<Rate>,
    /// Whether the user gave the rate: it is never exceeded.
    pub is_fixed: bool,
}

/// Where the packets of a flow may go, and its weight φ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// Slots of the links (its row of Π).
    pub links: LinkSet,
    /// Weight among the flows of a link.
    pub weight: f64,
}

/// What became of the packets so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Packets that got a link.
    pub bound: u64,
    /// Packets that were dropped because too many waited.
    pub dropped: u64,
    /// Packets that were dropped because no link took them in time, or the system refused them.
    pub expired: u64,
    /// Packets that got another link than the flow's last one.
    pub rebound: u64,
}

/// A packet that waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting<P> {
    /// The packet.
    pub packet: P,
    /// Its size.
    pub size: ByteCount,
    /// Since when it waits.
    pub since: Time,
}

#[derive(Debug)]
struct Flow<P> {
    key: FlowKey,
    terms: Terms,
    queue: VecDeque<Waiting<P>>,
    bytes: ByteCount,
    /// When its last packet came or left.
    active: Time,
    /// Whether its first packet leaves before those of others.
    is_new: bool,
    last: Option<usize>,
}

/// The queues. `K` identifies a flow, or the queue that further ones share.
#[derive(Debug)]
pub struct LateQueue<K, P> {
    midrr: Midrr,
    flows: BTreeMap<K, Flow<P>>,
    keys: BTreeMap<FlowKey, K>,
    /// New flows of each link, whose first packet leaves before those of others, and flows that were new.
    fresh: [VecDeque<K>; MAX_LINKS],
    /// Links that take packets.
    links: [Option<LinkState>; MAX_LINKS],
    /// When each link may take the next packet, as its rate allows.
    free: [Time; MAX_LINKS],
    bytes: ByteCount,
    packets: usize,
    tidied: Time,
    totals: Totals,
}

impl<K: Copy + Ord, P> Default for LateQueue<K, P> {
    fn default() -> Self {
        // This number of links and this counter are valid.
        let midrr = Midrr::new(MAX_LINKS, PACKET, Flags::COUNTED).unwrap_or_else(|error| unreachable!("{error}"));
        Self {
            midrr,
            flows: BTreeMap::new(),
            keys: BTreeMap::new(),
            fresh: [const { VecDeque::new() }; MAX_LINKS],
            links: [None; MAX_LINKS],
            free: [Time::ZERO; MAX_LINKS],
            bytes: ByteCount::ZERO,
            packets: 0,
            tidied: Time::ZERO,
            totals: Totals::default(),
        }
    }
}

impl<K: Copy + Ord, P> LateQueue<K, P> {
    /// Sets the state of the link in `slot`; `None`: it takes no packets.
    pub fn set_link(&mut self, slot: usize, state: Option<LinkState>) {
        if let Some(link) = self.links.get_mut(slot) {
            *link = state;
            if state.is_none() {
                self.fresh[slot].clear();
            }
        }
    }

    /// What became of the packets so far.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Packets that wait, and their bytes.
    pub fn waiting(&self) -> (usize, ByteCount) {
        (self.packets, self.bytes)
    }

    /// Changes where the waiting packets of all flows may go.
    pub fn bind(&mut self, terms: impl Fn(&K) -> Terms) {
        for (key, flow) in &mut self.flows {
            apply(&mut self.midrr, flow, terms(key));
        }
    }

    /// Counts a packet as lost that [`next`](Self::next) returned.
    pub fn lose(&mut self) {
        self.totals.bound = self.totals.bound.saturating_sub(1);
        self.totals.expired += 1;
    }

    /// Takes a packet of `size` bytes. If there are too many flows it joins those of the key `rest`.
    pub fn push(&mut self, now: Time, [key, rest]: [K; 2], terms: Terms, size: ByteCount, packet: P) {
        let is_known = self.flows.len() < MAX_FLOWS || self.flows.contains_key(&key);
        let key = if is_known { key } else { rest };
        if !self.flows.contains_key(&key) {
            let Ok(place) = self.midrr.add_flow(weight(terms), terms.links) else { return };
            self.keys.insert(place, key);
            let flow =
                Flow { key: place, terms, queue: VecDeque::new(), bytes: ByteCount::ZERO, active: Time::ZERO, is_new: false, last: None };
            self.flows.insert(key, flow);
        }
        let limit = self.depth(terms.links);
        let Some(flow) = self.flows.get_mut(&key) else { return };
        apply(&mut self.midrr, flow, terms);
        let is_new = flow.queue.is_empty() && (flow.active == Time::ZERO || now.since(flow.active) >= REST);
        flow.is_new |= is_new;
        flow.active = now;
        flow.queue.push_back(Waiting { packet, size, since: now });
        flow.bytes += size;
        (self.bytes, self.packets) = (self.bytes + size, self.packets + 1);
        if is_new {
            for slot in terms.links.iter().filter(|slot| self.links.get(*slot).is_some_and(Option::is_some)) {
                self.fresh[slot].push_back(key);
            }
        }
        let _ = self.midrr.set_head(flow.key, flow.queue.front().map(|first| first.size));
        // From the head: the sender learns about the loss soonest.
        while self.flows.get(&key).is_some_and(|flow| flow.bytes > limit && flow.queue.len() > 1) {
            self.totals.dropped += u64::from(self.take(&key).is_some());
        }
        if self.bytes > MAX_BYTES {
            self.shed();
        }
    }

    /// The packet that the link in `slot` is to send now, and its flow.
    pub fn next(&mut self, now: Time, slot: usize) -> Option<(K, Waiting<P>)> {
        let link = (*self.links.get(slot)?)?;
        if self.free[slot] > now {
            return None;
        }
        loop {
            let key = self.first_fresh(slot).or_else(|| self.midrr.next(slot).and_then(|grant| self.keys.get(&grant.flow).copied()))?;
            let waiting = self.take(&key)?;
            if now.since(waiting.since) > MAX_WAIT {
                self.totals.expired += 1;
                continue;
            }
            if let Some(flow) = self.flows.get_mut(&key) {
                flow.active = now;
                self.totals.rebound += u64::from(flow.last.replace(slot).is_some_and(|last| last != slot));
            }
            self.totals.bound += 1;
            if let Some(rate) = link.rate.filter(|rate| *rate > Rate::ZERO) {
                let pace = if link.is_fixed { rate } else { rate.scale(if is_probed(now) { PACE.0 } else { PACE.1 }) };
                let from = self.free[slot].max(Time::from_nanos(now.as_nanos().saturating_sub(BURST.as_nanos() as u64)));
                self.free[slot] = from + pace.time_for(waiting.size);
            }
            return Some((key, waiting));
        }
    }

    /// Takes a packet back that the device of its link did not take. It stays the first of its flow.
    pub fn put_back(&mut self, key: K, waiting: Waiting<P>) {
        self.totals.bound = self.totals.bound.saturating_sub(1);
        let Some(flow) = self.flows.get_mut(&key) else { return };
        let size = waiting.size;
        flow.queue.push_front(waiting);
        flow.bytes += size;
        (self.bytes, self.packets) = (self.bytes + size, self.packets + 1);
        let _ = self.midrr.set_head(flow.key, Some(size));
    }

    /// When [`next`](Self::next) may return something for a link for which it returns nothing now, although packets wait.
    pub fn poll_timeout(&self, now: Time, slot: usize) -> Option<Time> {
        let waits = self.packets > 0 && self.links.get(slot).is_some_and(Option::is_some);
        self.free.get(slot).copied().filter(|free| waits && *free > now)
    }

    /// What a flow over these links may have waiting.
    fn depth(&self, links: LinkSet) -> ByteCount {
        let rates = links.iter().filter_map(|slot| self.links.get(slot)?.as_ref()?.rate);
        let most = rates.max().map_or(0, |rate| (rate.bytes_per_second() as f64 * DEPTH.as_secs_f64()) as u64);
        ByteCount::new(most).clamp(LEAST, MOST)
    }

    /// Drops half of what waits for the flow with the most bytes (RFC 8290, 4.1: more than one packet, since the search takes a while).
    fn shed(&mut self) {
        let Some((key, flow)) = self.flows.iter().max_by_key(|(_, flow)| flow.bytes) else { return };
        let (key, count) = (*key, flow.queue.len().div_ceil(2));
        for _ in 0..count {
            self.totals.dropped += u64::from(self.take(&key).is_some());
        }
    }

    /// A new flow that may use this link.
    fn first_fresh(&mut self, slot: usize) -> Option<K> {
        loop {
            let key = self.fresh.get_mut(slot)?.pop_front()?;
            if self.flows.get(&key).is_some_and(|flow| flow.is_new && flow.terms.links.contains(slot)) {
                return Some(key);
            }
        }
    }

    /// Removes the first packet of a flow.
    fn take(&mut self, key: &K) -> Option<Waiting<P>> {
        let flow = self.flows.get_mut(key)?;
        let first = flow.queue.pop_front()?;
        flow.is_new = false;
        flow.bytes = flow.bytes.saturating_sub(first.size);
        (self.bytes, self.packets) = (self.bytes.saturating_sub(first.size), self.packets - 1);
        let _ = self.midrr.set_head(flow.key, flow.queue.front().map(|next| next.size));
        Some(first)
    }

    /// Forgets flows that have sent nothing for a while, and packets that nothing takes. Call it several times a second.
    pub fn tidy(&mut self, now: Time) {
        if now.since(self.tidied) < MAX_WAIT {
            return;
        }
        self.tidied = now;
        let late: Vec<K> = self.flows.iter().filter(|(_, flow)| is_over(flow, now)).map(|(key, _)| *key).collect();
        for key in late {
            while self.flows.get(&key).is_some_and(|flow| is_over(flow, now)) && self.take(&key).is_some() {
                self.totals.expired += 1;
            }
        }
        let Self { flows, keys, midrr, .. } = self;
        flows.retain(|_, flow| {
            let stays = !flow.queue.is_empty() || now.since(flow.active) < IDLE;
            if !stays {
                keys.remove(&flow.key);
                let _ = midrr.remove_flow(flow.key);
            }
            stays
        });
    }
}

/// Whether the first packet of a flow has waited too long.
fn is_over<P>(flow: &Flow<P>, now: Time) -> bool {
    flow.queue.front().is_some_and(|first| now.since(first.since) > MAX_WAIT)
}

fn apply<P>(midrr: &mut Midrr, flow: &mut Flow<P>, terms: Terms) {
    if flow.terms.links != terms.links {
        let _ = midrr.set_links(flow.key, terms.links);
    }
    if flow.terms.weight != terms.weight {
        let _ = midrr.set_weight(flow.key, weight(terms));
    }
    flow.terms = terms;
}

/// A weight that miDRR takes.
fn weight(terms: Terms) -> f64 {
    if terms.weight.is_finite() { terms.weight.clamp(0.1, 1000.0) } else { 1.0 }
}

fn is_probed(now: Time) -> bool {
    now.as_nanos() % (PROBE.0.as_nanos() as u64) < PROBE.1.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: ByteCount = PACKET;
    const A: LinkSet = LinkSet(0b01);
    const B: LinkSet = LinkSet(0b10);

    fn over(links: LinkSet) -> Terms {
        Terms { links, weight: 1.0 }
    }

    fn queue(links: usize, rate: Option<Rate>) -> LateQueue<u32, u32> {
        let mut queue = LateQueue::default();
        for slot in 0..links {
            queue.set_link(slot, Some(LinkState { rate, is_fixed: true }));
        }
        queue
    }

    fn next(queue: &mut LateQueue<u32, u32>, now: Time, slot: usize) -> Option<(u32, u32)> {
        queue.next(now, slot).map(|(key, waiting)| (key, waiting.packet))
    }

    fn at(millis: u64) -> Time {
        Time::from_millis(1_000_000 + millis)
    }

    #[test]
    fn flows_share_a_link_by_their_weights() {
        let mut queue = queue(1, None);
        let mut sent = [0; 2];
        for round in 0..300 {
            for flow in 0..2 {
                queue.push(at(round), [flow; 2], Terms { links: A, weight: 1.0 + f64::from(flow) }, FULL, flow);
            }
            if let Some((flow, _)) = queue.next(at(round), 0) {
                sent[flow as usize] += 1;
            }
        }
        assert!((190..=210).contains(&sent[1]) && sent[0] + sent[1] == 300, "{sent:?}");
    }

    #[test]
    fn a_link_gets_what_its_rate_allows_and_no_more() {
        // 5 Mbit/s is a full packet each 2.42 ms.
        let mut queue = queue(1, Some(Rate::from_mbps(5)));
        (0..60).for_each(|packet| queue.push(at(0), [1; 2], over(A), FULL, packet));
        let mut times = Vec::new();
        let mut now = at(0);
        while times.len() < 50 {
            match queue.next(now, 0) {
                Some(_) => times.push(now),
                None => now = queue.poll_timeout(now, 0).unwrap(),
            }
        }
        let span = times.last().unwrap().since(at(0)).as_secs_f64();
        let expected = 49.0 * 1514.0 * 8.0 / 5e6 - BURST.as_secs_f64();
        assert!((span - expected).abs() < 0.001, "{span} instead of {expected}");
    }

    #[test]
    fn an_urgent_packet_passes_those_that_wait() {
        let mut queue = queue(1, None);
        (0..50).for_each(|packet| queue.push(at(0), [1; 2], over(A), FULL, packet));
        assert_eq!(next(&mut queue, at(0), 0), Some((1, 0)));
        queue.push(at(1), [2; 2], over(A), ByteCount::new(100), 1000);
        assert_eq!(next(&mut queue, at(1), 0), Some((2, 1000)));
        // A flow that always has packets is not new.
        queue.push(at(2), [2; 2], over(A), FULL, 1001);
        let next: Vec<_> = (0..3).filter_map(|_| next(&mut queue, at(2), 0)).map(|(_, packet)| packet).collect();
        assert!(next.contains(&1) && next.contains(&1001), "{next:?}");
    }

    #[test]
    fn what_has_not_left_goes_over_another_link_when_its_own_dies() {
        let mut queue = queue(2, None);
        (0..10).for_each(|packet| queue.push(at(0), [1; 2], over(A), FULL, packet));
        for packet in 0..4 {
            assert_eq!(next(&mut queue, at(0), 0), Some((1, packet)));
        }
        queue.set_link(0, None);
        assert_eq!((next(&mut queue, at(1), 0), next(&mut queue, at(1), 1)), (None, None));
        queue.bind(|_| over(B));
        for packet in 4..10 {
            assert_eq!(next(&mut queue, at(1), 1), Some((1, packet)), "in the same order");
        }
        assert_eq!(queue.totals(), Totals { bound: 10, rebound: 1, ..Totals::default() });
        assert_eq!(queue.waiting(), (0, ByteCount::ZERO));
    }

    #[test]
    fn a_packet_that_the_device_refuses_stays_the_first() {
        let mut queue = queue(2, None);
        (0..3).for_each(|packet| queue.push(at(0), [1; 2], over(LinkSet(3)), FULL, packet));
        let (key, waiting) = queue.next(at(0), 0).unwrap();
        queue.put_back(key, waiting);
        let order: Vec<_> = (0..3).filter_map(|_| next(&mut queue, at(1), 1)).map(|(_, packet)| packet).collect();
        assert_eq!(order, [0, 1, 2]);
    }

    #[test]
    fn a_packet_that_nothing_takes_does_not_stay_the_first_for_ever() {
        let mut queue = queue(1, None);
        (0..2).for_each(|packet| queue.push(at(0), [1; 2], over(A), FULL, packet));
        for now in (0..3000).map(at) {
            let Some((key, waiting)) = queue.next(now, 0) else { break };
            queue.put_back(key, waiting);
        }
        assert_eq!((queue.waiting().0, queue.totals().expired), (0, 2));
    }

    #[test]
    fn no_flow_fills_the_queue_for_others_and_nothing_waits_for_ever() {
        let mut queue = queue(1, Some(Rate::from_mbps(8)));
        // 8 Mbit/s in 100 ms are 100,000 bytes.
        (0..1000).for_each(|packet| queue.push(at(0), [1; 2], over(A), FULL, packet));
        let (packets, bytes) = queue.waiting();
        assert_eq!((packets, bytes), (66, ByteCount::new(66 * 1514)));
        assert_eq!(next(&mut queue, at(0), 0), Some((1, 934)), "the oldest are dropped");
        queue.set_link(0, None);
        queue.tidy(at(3000));
        queue.push(at(3000), [2; 2], over(B), FULL, 2000);
        assert_eq!(queue.waiting().0, 1, "the others have waited too long");
        assert_eq!(queue.totals().expired, 65);
        queue.tidy(at(60_000));
        queue.push(at(60_000), [3; 2], over(B), FULL, 2001);
        assert_eq!((queue.flows.len(), queue.keys.len()), (1, 1), "flows without packets are forgotten");
    }

    #[test]
    fn more_flows_than_there_is_room_for_share_a_queue() {
        let mut queue = queue(1, None);
        (0..10_000).for_each(|flow| queue.push(at(0), [flow, u32::MAX], over(A), FULL, flow));
        assert_eq!(queue.flows.len(), MAX_FLOWS + 1);
        let mut seen = 0;
        while queue.next(at(0), 0).is_some() {
            seen += 1;
        }
        assert_eq!(seen + queue.totals().dropped, 10_000);
        assert!(seen > MAX_FLOWS as u64);
    }

    #[test]
    fn a_learnt_rate_is_exceeded_now_and_then() {
        let moved = |is_fixed| {
            let mut queue = queue(1, None);
            queue.set_link(0, Some(LinkState { rate: Some(Rate::from_mbps(10)), is_fixed }));
            let mut moved = 0;
            for now in (0..10_000).map(at) {
                (0..3).for_each(|packet| queue.push(now, [1; 2], over(A), FULL, packet));
                while queue.next(now, 0).is_some() {
                    moved += 1514 * 8;
                }
            }
            moved as f64 / 10.0
        };
        assert!((moved(true) / 10e6 - 1.0).abs() < 0.01, "{}", moved(true));
        assert!((1.03..1.08).contains(&(moved(false) / 10e6)), "{}", moved(false));
    }
}
