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
    /// When the first packet came over the new radio, if packets wait.
    began: Option<Time>,
    /// When a packet came over the old radio last.
    passed: Time,
    waiting: Vec<T>,
}

impl<T> InOrder<T> {
    /// Packets wait until the old radio was quiet for `quiet`, and for `limit` at most.
    pub fn new(quiet: Duration, limit: Duration) -> Self {
        Self { quiet, limit, began: None, passed: Time::ZERO, waiting: Vec::new() }
    }

    /// A packet came over the new radio. It waits.
    pub fn hold(&mut self, now: Time, packet: T) {
        self.began.get_or_insert(now);
        self.waiting.push(packet);
    }

    /// A packet came over the old radio at this time, and is delivered already.
    pub fn passed(&mut self, at: Time) {
        self.passed = self.passed.max(at);
    }

    /// When the packets that wait are to be delivered; `None`: none waits.
    pub fn poll_timeout(&self) -> Option<Time> {
        let began = self.began?;
        if self.waiting.len() >= MAX_FRAMES {
            return Some(began);
        }
        Some((began + self.limit).min(began.max(self.passed) + self.quiet))
    }

    /// Ends the change of the route. Returns the packets that waited, in their order.
    pub fn end(&mut self) -> Vec<T> {
        self.began = None;
        std::mem::take(&mut self.waiting)
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
        order.passed(Time::from_millis(1));
        assert_eq!(order.poll_timeout(), None);
        order.hold(Time::from_millis(2), 3);
        assert_eq!(order.poll_timeout(), Some(Time::from_millis(22)));
        order.passed(Time::from_millis(10));
        order.hold(Time::from_millis(25), 4);
        assert_eq!(order.poll_timeout(), Some(Time::from_millis(30)), "20 ms after the last one of the old radio");
        order.passed(Time::from_millis(95));
        assert_eq!(order.poll_timeout(), Some(Time::from_millis(102)), "the limit");
        assert_eq!((order.end(), order.poll_timeout()), (vec![3, 4], None));
    }

    #[test]
    fn a_flood_does_not_wait() {
        let mut order = InOrder::new(Duration::from_millis(20), Duration::from_millis(100));
        (0..MAX_FRAMES).for_each(|packet| order.hold(Time::from_millis(1), packet));
        assert_eq!((order.poll_timeout(), order.end().len()), (Some(Time::from_millis(1)), MAX_FRAMES));
    }
}
