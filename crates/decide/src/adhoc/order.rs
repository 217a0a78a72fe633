//! Frames of a flow that is spread over radios arrive in the order in which they were sent.
//!
//! While each frame gets a radio anew (`spread = "frame"`), the sender numbers the frames of a flow for a neighbour that understands it, by eight bytes behind the
//! addresses. What has no number passes as it is.
//!
//! | bytes | content |
//! |---|---|
//! | 0..12 | Ethernet addresses |
//! | 12..14 | EtherType 0x88b5, as in [`super::frame`] |
//! | 14 | 0xd0 + place of the sender's radio |
//! | 15 | zero |
//! | 16..18 | the flow, a digest: flows with the same digest share their numbers |
//! | 18..20 | sequence number of the flow |
//! | 20.. | the frame from its own EtherType on |
//!
//! A frame that is missing is waited for: as long as the caller says, or until each radio that carries the flow has delivered a later one, because a radio keeps the
//! order. The paper leaves the order to TCP (section 3.2.3), which takes a late segment for a lost one.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_model::{Mac, Time};

use super::MAX_RADIOS;
use super::frame::ETHER_TYPE;

/// Length of the number in a frame in bytes.
pub const NUMBER_LENGTH: usize = 8;
/// First four bits of the byte that names the radio (`BRAID_SPREAD` in `ebpf/adhoc.h`).
const SPREAD: u8 = 0xd0;
/// Where the number begins, and the frame's own EtherType.
const ADDRESSES: usize = 12;
/// Most flows whose order is restored at once, of all neighbours and of one.
const MAX_FLOWS: usize = 4096;
const MAX_FLOWS_OF_ONE: usize = 512;
/// Most frames that wait.
const MAX_WAITING: usize = 4096;
/// A number that is further ahead or behind begins anew: the sender has forgotten the flow.
const WINDOW: i16 = 4096;
/// So many frames before the first of a flow may arrive after it.
const EARLIER: u16 = 32;
/// A flow without frames for this time begins anew. Longer than a frame waits.
const FORGOTTEN: Duration = Duration::from_secs(1);

/// The number of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number {
    /// Place of the sender's radio, below [`MAX_RADIOS`].
    pub radio: u8,
    /// The flow.
    pub flow: u16,
    /// Sequence number.
    pub sequence: u16,
}

/// A frame with a number, as it arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbered<'a> {
    /// Ethernet destination.
    pub to: Mac,
    /// Ethernet source.
    pub from: Mac,
    /// Its number.
    pub number: Number,
    rest: &'a [u8],
}

impl<'a> Numbered<'a> {
    /// The frame in these bytes; `None` if it has no number.
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mac = |at: usize| bytes.get(at..at + 6).and_then(|part| part.try_into().ok()).map(Mac);
        let two = |at: usize| bytes.get(at..at + 2).and_then(|part| part.try_into().ok()).map(u16::from_be_bytes);
        let kind = *bytes.get(ADDRESSES + 2)?;
        let radio = kind & 0x0f;
        if two(ADDRESSES)? != ETHER_TYPE || kind & 0xf0 != SPREAD || usize::from(radio) >= MAX_RADIOS {
            return None;
        }
        let number = Number { radio, flow: two(ADDRESSES + 4)?, sequence: two(ADDRESSES + 6)? };
        // The frame has an EtherType of its own.
        two(ADDRESSES + NUMBER_LENGTH)?;
        Some(Self { to: mac(0)?, from: mac(6)?, number, rest: &bytes[ADDRESSES + NUMBER_LENGTH..] })
    }

    /// The frame without its number, between these addresses.
    pub fn plain(&self, to: Mac, from: Mac) -> Vec<u8> {
        [&to.0[..], &from.0[..], self.rest].concat()
    }
}

/// A frame that waits for earlier ones, until the time.
type Waiting<T> = (Time, T);

/// The order of one flow.
#[derive(Debug)]
struct Flow<T> {
    /// The number that is due.
    next: u16,
    /// When a frame of it arrived last.
    last: Time,
    /// Frames that arrived too early, by number.
    waiting: BTreeMap<u16, Waiting<T>>,
    /// Which of the [`WINDOW`] numbers before `next` were delivered: a bit for each, by [`place`].
    delivered: Box<[u64; WINDOW as usize / 64]>,
    /// The latest number that each radio has delivered, and when.
    latest: [Option<(u16, Time)>; MAX_RADIOS],
}

/// How many frames `number` is behind `base`; negative: before it.
fn distance(number: u16, base: u16) -> i16 {
    number.wrapping_sub(base) as i16
}

/// The word and the bit of a number in [`Flow::delivered`].
fn place(number: u16) -> (usize, u64) {
    let at = usize::from(number) % WINDOW as usize;
    (at / 64, 1 << (at % 64))
}

impl<T> Flow<T> {
    fn new(now: Time, next: u16) -> Self {
        let mut delivered = Box::new([u64::MAX; WINDOW as usize / 64]);
        for (word, bit) in (1..=EARLIER).map(|back| place(next.wrapping_sub(back))) {
            delivered[word] &= !bit;
        }
        Self { next, last: now, waiting: BTreeMap::new(), delivered, latest: [None; MAX_RADIOS] }
    }

    /// The waiting frame with the first number.
    fn first(&self) -> Option<u16> {
        self.waiting.keys().copied().min_by_key(|number| distance(*number, self.next))
    }

    /// Delivers what is due.
    fn advance(&mut self, deliver: &mut impl FnMut(T)) {
        while let Some((_, frame)) = self.waiting.remove(&self.next) {
            deliver(frame);
            self.pass(true);
        }
    }

    /// Goes on to the next number.
    fn pass(&mut self, was_delivered: bool) {
        let (word, bit) = place(self.next);
        self.delivered[word] = self.delivered[word] & !bit | if was_delivered { bit } else { 0 };
        self.next = self.next.wrapping_add(1);
    }

    /// Gives up what is missing before the first waiting frame, and delivers from there on.
    fn skip(&mut self, deliver: &mut impl FnMut(T)) {
        let Some(first) = self.first() else { return };
        while self.next != first {
            self.pass(false);
        }
        self.advance(deliver);
    }

    /// Whether every radio that carries the flow has delivered something later than what is due. A single radio proves nothing: another may just begin.
    fn is_lost(&self, now: Time) -> bool {
        let carrying = || self.latest.iter().flatten().filter(|(_, at)| now.since(*at) < FORGOTTEN);
        carrying().count() > 1 && carrying().all(|(number, _)| distance(*number, self.next) > 0)
    }
}

/// Puts the frames of all flows in order. `T` is what the caller delivers.
#[derive(Debug)]
pub struct Order<T> {
    flows: BTreeMap<(Mac, u16), Flow<T>>,
    /// Number of frames that wait.
    waiting: usize,
    /// When a frame may have waited long enough; `None`: none waits.
    due: Option<Time>,
    /// When flows that ended were forgotten last.
    cleaned: Time,
}

impl<T> Default for Order<T> {
    fn default() -> Self {
        Self { flows: BTreeMap::new(), waiting: 0, due: None, cleaned: Time::ZERO }
    }
}

impl<T> Order<T> {
    /// A frame of this neighbour arrived. Delivers what is due; drops a copy. A frame that arrives before earlier ones waits for them, for `patience` at most.
    pub fn on_frame(&mut self, now: Time, neighbour: Mac, number: Number, frame: T, patience: Duration, mut deliver: impl FnMut(T)) {
        let key = (neighbour, number.flow);
        if !self.flows.contains_key(&key) && !self.has_room(now, neighbour) {
            return deliver(frame);
        }
        let flow = self.flows.entry(key).or_insert_with(|| Flow::new(now, number.sequence));
        let before = flow.waiting.len();
        if distance(number.sequence, flow.next).unsigned_abs() >= WINDOW.unsigned_abs() || now.since(flow.last) >= FORGOTTEN {
            std::mem::take(&mut flow.waiting).into_values().for_each(|(_, frame)| deliver(frame));
            *flow = Flow::new(now, number.sequence);
        }
        flow.last = now;
        let ahead = distance(number.sequence, flow.next);
        let latest = &mut flow.latest[usize::from(number.radio) % MAX_RADIOS];
        if latest.is_none_or(|(seen, at)| distance(number.sequence, seen) > 0 || now.since(at) >= FORGOTTEN) {
            *latest = Some((number.sequence, now));
        }
        if ahead < 0 {
            let (word, bit) = place(number.sequence);
            if flow.delivered[word] & bit == 0 {
                flow.delivered[word] |= bit;
                deliver(frame);
            }
        } else {
            let until = now + patience;
            flow.waiting.entry(number.sequence).or_insert((until, frame));
            flow.advance(&mut deliver);
            if !flow.waiting.is_empty() {
                self.due = Some(self.due.map_or(until, |due| due.min(until)));
            }
        }
        while !flow.waiting.is_empty() && (flow.is_lost(now) || self.waiting - before + flow.waiting.len() > MAX_WAITING) {
            flow.skip(&mut deliver);
        }
        self.waiting = self.waiting - before + flow.waiting.len();
    }

    /// Whether there is room for one more flow of this neighbour.
    fn has_room(&mut self, now: Time, neighbour: Mac) -> bool {
        let has_room = |flows: &BTreeMap<(Mac, u16), Flow<T>>| {
            flows.len() < MAX_FLOWS && flows.range((neighbour, 0)..=(neighbour, u16::MAX)).nth(MAX_FLOWS_OF_ONE - 1).is_none()
        };
        if !has_room(&self.flows) && now.since(self.cleaned) >= FORGOTTEN {
            self.flows.retain(|_, flow| !flow.waiting.is_empty() || now.since(flow.last) < FORGOTTEN);
            self.cleaned = now;
        }
        has_room(&self.flows)
    }

    /// Delivers what has waited long enough. Returns when it must be called again; `None`: nothing waits.
    pub fn expire(&mut self, now: Time, mut deliver: impl FnMut(T)) -> Option<Time> {
        if self.due.is_none_or(|due| due > now) {
            return self.due;
        }
        self.due = None;
        for flow in self.flows.values_mut() {
            while let Some((until, _)) = flow.first().and_then(|first| flow.waiting.get(&first)) {
                if *until > now {
                    self.due = Some(self.due.map_or(*until, |due| due.min(*until)));
                    break;
                }
                flow.skip(&mut deliver);
            }
        }
        self.waiting = self.flows.values().map(|flow| flow.waiting.len()).sum();
        self.due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PEER: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PATIENCE: Duration = Duration::from_millis(20);

    fn at(ms: u64) -> Time {
        Time::ZERO + Duration::from_millis(ms)
    }

    /// Frames that arrive as (time in ms, radio, sequence); returns what is delivered until the last, and later.
    fn delivered(arrivals: &[(u64, u8, u16)]) -> (Vec<u16>, Vec<u16>) {
        let (mut order, mut now, mut later) = (Order::default(), Vec::new(), Vec::new());
        for &(ms, radio, sequence) in arrivals {
            order.expire(at(ms), |frame| now.push(frame));
            order.on_frame(at(ms), PEER, Number { radio, flow: 7, sequence }, sequence, PATIENCE, |frame| now.push(frame));
        }
        let last = arrivals.last().map_or(0, |last| last.0);
        if let Some(next) = order.expire(at(last), |frame| now.push(frame)) {
            order.expire(next, |frame| later.push(frame));
        }
        (now, later)
    }

    #[test]
    fn frames_of_two_radios_arrive_in_order() {
        assert_eq!(delivered(&[(0, 0, 5), (1, 0, 7), (2, 1, 6), (3, 0, 9), (3, 1, 8)]).0, [5, 6, 7, 8, 9]);
        assert_eq!(delivered(&[(0, 0, 65_534), (1, 0, 0), (2, 1, 65_535), (3, 0, 1)]).0, [65_534, 65_535, 0, 1], "numbers wrap");
    }

    #[test]
    fn a_copy_is_dropped_and_a_late_frame_is_not() {
        assert_eq!(delivered(&[(0, 0, 5), (1, 1, 5), (2, 0, 6), (3, 1, 5)]).0, [5, 6]);
        // 6 is given up after 20 ms, arrives later, and then once more.
        assert_eq!(delivered(&[(0, 0, 5), (0, 1, 4), (1, 0, 7), (30, 0, 8), (31, 1, 6), (32, 1, 6)]).0, [5, 4, 7, 8, 6]);
    }

    #[test]
    fn what_is_missing_is_waited_for_and_no_longer() {
        let waits = [(0, 0, 5), (0, 1, 6), (1, 0, 8)];
        assert_eq!(delivered(&waits), (vec![5, 6], vec![8]));
        let both = [&waits[..], &[(2, 1, 9)]].concat();
        assert_eq!(delivered(&both).0, [5, 6, 8, 9], "both radios have delivered later frames, so 7 is lost");
    }

    #[test]
    fn a_sender_that_begins_anew_is_followed() {
        assert_eq!(delivered(&[(0, 0, 5), (1, 0, 6), (2, 0, 40_000), (3, 0, 40_001)]).0, [5, 6, 40_000, 40_001]);
        assert_eq!(delivered(&[(0, 0, 5), (1, 0, 6), (1500, 0, 3), (1501, 0, 4)]).0, [5, 6, 3, 4], "after a pause");
    }

    #[test]
    fn waiting_frames_and_flows_are_bounded() {
        let mut order = Order::default();
        let mut count = 0;
        for flow in 0..=u16::MAX {
            for (radio, sequence) in [(1, 1), (0, 0), (0, 3)] {
                order.on_frame(at(0), PEER, Number { radio, flow, sequence }, (), PATIENCE, |()| count += 1);
            }
        }
        assert!(order.flows.len() == MAX_FLOWS_OF_ONE && order.waiting <= MAX_WAITING, "{} {}", order.flows.len(), order.waiting);
        for neighbour in 0..=200 {
            for flow in 0..100 {
                order.on_frame(at(0), Mac([2, 0, 0, 0, 1, neighbour]), Number { radio: 0, flow, sequence: 0 }, (), PATIENCE, |()| {});
            }
        }
        assert_eq!(order.flows.len(), MAX_FLOWS);
        order.expire(at(5000), |()| count += 1);
        assert!(order.has_room(at(5000), PEER) && order.flows.is_empty() && order.waiting == 0);
        assert_eq!(count, 3 * 65_536);
    }

    #[test]
    fn one_number_far_ahead_costs_no_frame_and_little_time() {
        // The numbers that it skips arrive afterwards.
        let ahead = [(0, 0, 5), (1, 0, 3905), (25, 0, 3906)];
        let rest: Vec<(u64, u8, u16)> = (6..3905).map(|number| (26, 1, number)).collect();
        let all = delivered(&[&ahead[..], &rest].concat()).0;
        assert_eq!((all.len(), &all[..4]), (3902, &[5, 3905, 3906, 6][..]));
        let (mut order, mut steps) = (Order::default(), 0);
        for flow in 0..512 {
            for sequence in [0, 4095] {
                order.on_frame(at(0), PEER, Number { radio: 0, flow, sequence }, (), PATIENCE, |()| steps += 1);
            }
        }
        order.expire(at(100), |()| steps += 1);
        assert_eq!((steps, order.waiting), (1024, 0));
    }

    #[test]
    fn numbered_frames_are_as_documented() {
        let mut bytes = vec![1, 2, 3, 4, 5, 6, 2, 0, 0, 0, 0, 9, 0x88, 0xb5, 0xd3, 0, 0x12, 0x34, 0xab, 0xcd, 0x08, 0x00, 0x45];
        let frame = Numbered::decode(&bytes).unwrap();
        assert_eq!(frame.number, Number { radio: 3, flow: 0x1234, sequence: 0xabcd });
        assert_eq!((frame.to, frame.from), (Mac([1, 2, 3, 4, 5, 6]), Mac([2, 0, 0, 0, 0, 9])));
        let plain = frame.plain(Mac([7; 6]), PEER);
        assert_eq!(plain, [7, 7, 7, 7, 7, 7, 2, 0, 0, 0, 0, 1, 0x08, 0x00, 0x45]);
        assert_eq!(Numbered::decode(&bytes[..21]), None);
        bytes[14] = 0xd8;
        assert_eq!(Numbered::decode(&bytes), None, "no radio has this place");
        bytes[14] = b'B';
        assert_eq!(Numbered::decode(&bytes), None, "one of Braid's own frames");
    }

    proptest! {
        /// Each frame is delivered once, whatever is lost, late or repeated, and in order if nothing is lost and nothing late by more than the patience.
        #[test]
        fn every_frame_is_delivered_once(
            start: u16,
            arrivals in proptest::collection::vec((0u64..15, 0u8..2, 0u32..20), 1..200),
            lossy: bool,
        ) {
            let mut order = Order::default();
            let mut events: Vec<(u64, u16, u8)> = Vec::new();
            for (place, (late, radio, lost)) in arrivals.iter().enumerate() {
                let number = start.wrapping_add(place as u16);
                // Each radio keeps the order: its delay is constant.
                let late = if lossy { *late } else { u64::from(*radio) * 12 };
                if place < 2 || !lossy || *lost > 0 {
                    events.push((place as u64 + if place == 0 { 0 } else { late }, number, *radio));
                }
            }
            let sent = events.len();
            events.sort_by_key(|event| event.0);
            let mut delivered = Vec::new();
            for (ms, number, radio) in events {
                order.expire(at(ms), |frame| delivered.push(frame));
                let number = Number { radio, flow: 1, sequence: number };
                order.on_frame(at(ms), PEER, number, number.sequence, PATIENCE, |frame| delivered.push(frame));
            }
            order.expire(at(10_000), |frame| delivered.push(frame));
            let different: std::collections::BTreeSet<u16> = delivered.iter().copied().collect();
            prop_assert_eq!((different.len(), delivered.len()), (sent, sent));
            if !lossy {
                prop_assert!(delivered.windows(2).all(|two| two[1] == two[0].wrapping_add(1)), "{:?}", delivered);
            }
        }
    }
}
