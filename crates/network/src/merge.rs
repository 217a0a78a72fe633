//! What a device does with packets that arrive by several ways: at a client with two radios, or in the network where copies of one sender meet.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use braid_model::Time;

/// Most frames that are remembered, or wait.
const MAX_FRAMES: usize = 8192;

/// Removes duplicates: of the copies of a frame that arrive over several radios, one passes.
///
/// Equal frames that one radio delivers twice are two frames, because a sender may repeat itself: the n-th arrival over any radio is one frame. Where the
/// radios are not known, as in the network, all equal frames are copies.
#[derive(Debug)]
pub struct Duplicates {
    window: Duration,
    seed: u64,
    frames: BTreeMap<u64, Copies>,
    order: VecDeque<(Time, u64)>,
}

#[derive(Debug, Default)]
struct Copies {
    by_radio: BTreeMap<u8, u32>,
    passed: u32,
}

impl Duplicates {
    /// Copies arrive within `window`. The seed keeps others from making frames that look equal.
    pub fn new(window: Duration, seed: u64) -> Self {
        Self { window, seed, frames: BTreeMap::new(), order: VecDeque::new() }
    }

    /// Whether a frame that arrived, over this radio if that is known, is no duplicate.
    pub fn passes(&mut self, now: Time, radio: Option<u8>, frame: &[u8]) -> bool {
        while self.order.front().is_some_and(|(at, _)| now.since(*at) > self.window || self.order.len() >= MAX_FRAMES) {
            if let Some((_, digest)) = self.order.pop_front() {
                self.frames.remove(&digest);
            }
        }
        let digest = digest(self.seed, frame);
        let copies = self.frames.entry(digest).or_insert_with(|| {
            self.order.push_back((now, digest));
            Copies::default()
        });
        let arrivals = radio.map_or(1, |radio| {
            let own = copies.by_radio.entry(radio).or_default();
            *own = own.saturating_add(1);
            *own
        });
        let is_new = arrivals > copies.passed;
        copies.passed += u32::from(is_new);
        is_new
    }
}

/// A digest that others cannot foresee without the seed: the words of the frame, each multiplied and folded.
fn digest(seed: u64, frame: &[u8]) -> u64 {
    const FACTOR: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
    let fold = |state: u64, word: u64| {
        let product = u128::from(state ^ word).wrapping_mul(FACTOR | 1);
        (product >> 64) as u64 ^ product as u64
    };
    let state = frame.chunks(8).fold(seed | 1, |state, chunk| {
        let mut word = [0; 8];
        word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
        fold(state, u64::from_le_bytes(word))
    });
    fold(state ^ seed, frame.len() as u64)
}

/// Keeps the order of packets while a route changes from one radio to another: what comes over the new one waits until nothing has come over the old one
/// for a while (thesis section 5.5.2, Hoolock).
#[derive(Debug)]
pub struct InOrder<T> {
    quiet: Duration,
    limit: Duration,
    /// When a change ends at the latest, and when a packet last came over the old radio.
    change: Option<(Time, Time)>,
    waiting: VecDeque<T>,
}

impl<T> InOrder<T> {
    /// The old radio is done when it is quiet for `quiet`, or `limit` after the change began.
    pub fn new(quiet: Duration, limit: Duration) -> Self {
        Self { quiet, limit, change: None, waiting: VecDeque::new() }
    }

    /// The route begins to change.
    pub fn begin(&mut self, now: Time) {
        self.change = Some((now + self.limit, now));
    }

    /// A packet arrived. Appends what is to be delivered to `out`.
    pub fn receive(&mut self, now: Time, over_new: bool, packet: T, out: &mut Vec<T>) {
        self.handle_timeout(now, out);
        match &mut self.change {
            Some(_) if over_new && self.waiting.len() < MAX_FRAMES => self.waiting.push_back(packet),
            Some((_, last)) if !over_new => {
                *last = now;
                out.push(packet);
            }
            _ => out.push(packet),
        }
    }

    /// When packets that wait are to be delivered.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.change.map(|(limit, last)| limit.min(last + self.quiet))
    }

    /// Delivers what is due.
    pub fn handle_timeout(&mut self, now: Time, out: &mut Vec<T>) {
        if self.poll_timeout().is_some_and(|due| due <= now) {
            self.change = None;
            out.extend(self.waiting.drain(..));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_copy_of_each_frame_passes() {
        let mut duplicates = Duplicates::new(Duration::from_secs(1), 7);
        let arrivals = [(0, 1u8, b"one"), (1, 2, b"one"), (2, 1, b"two"), (3, 1, b"two"), (4, 2, b"two"), (5, 2, b"two"), (6, 2, b"two")];
        let passed = arrivals.map(|(at, radio, frame)| duplicates.passes(Time::from_millis(at), Some(radio), frame));
        assert_eq!(passed, [true, false, true, true, false, false, true], "a repeated frame is not a copy");
        assert!(duplicates.passes(Time::from_millis(2000), Some(2), b"one"), "the window is over");
        for number in 0..100_000u32 {
            assert!(duplicates.passes(Time::from_millis(2000), None, &number.to_be_bytes()));
        }
        assert!(duplicates.frames.len() <= MAX_FRAMES);
    }

    #[test]
    fn packets_of_the_new_radio_wait_for_those_of_the_old_one() {
        let mut order = InOrder::new(Duration::from_millis(20), Duration::from_millis(100));
        let mut out = Vec::new();
        order.begin(Time::ZERO);
        for (at, over_new, packet) in [(1, false, 1), (2, true, 3), (10, false, 2), (25, true, 4), (31, true, 5)] {
            order.receive(Time::from_millis(at), over_new, packet, &mut out);
        }
        assert_eq!((out, order.poll_timeout()), (vec![1, 2, 3, 4, 5], None));
    }
}
