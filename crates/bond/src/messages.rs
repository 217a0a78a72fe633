//! Messages of a datagram flow: unordered, each delivered at most once; what does not fit into a datagram is cut and put together again.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Bytes, BytesMut};

use crate::window::Window;

/// The largest message, as in UDP.
pub(crate) const MAX_MESSAGE: usize = 65_507;
/// What a message costs beside its bytes.
const OVERHEAD: usize = 64;
/// What a piece of a cut message costs beside its bytes.
const PIECE_OVERHEAD: usize = 40;
/// Waiting to be sent, at most, with what each costs; older ones are dropped first, as a router's queue would drop.
const MAX_QUEUED: usize = 1 << 20;
/// Waiting to be read, at most, with what each costs.
const MAX_UNREAD: usize = 1 << 20;
/// Numbers remembered, so that copies are known as such; older ones count as copies.
const REMEMBERED: u64 = 8192;
/// Cut messages being put together at a time.
const MAX_PARTIAL: usize = 8;

/// Both directions of a datagram flow.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    outgoing: VecDeque<(u64, Bytes)>,
    queued: usize,
    next: u64,
    incoming: VecDeque<Bytes>,
    unread: usize,
    seen: Window<REMEMBERED>,
    partial: BTreeMap<u64, Partial>,
    /// What `partial` costs.
    gathering: usize,
    /// Dropped here, for want of room, in both directions.
    pub(crate) dropped: u64,
}

#[derive(Debug)]
struct Partial {
    pieces: Vec<Option<Bytes>>,
    size: usize,
}

impl Messages {
    /// Queues a message; `false` if it is too large to be one.
    pub(crate) fn push(&mut self, data: Bytes) -> bool {
        if data.len() > MAX_MESSAGE {
            return false;
        }
        self.queued += data.len() + OVERHEAD;
        self.outgoing.push_back((self.next, data));
        self.next += 1;
        while self.queued > MAX_QUEUED {
            if let Some((_, old)) = self.outgoing.pop_front() {
                self.queued -= old.len() + OVERHEAD;
                self.dropped += 1;
            }
        }
        true
    }

    /// What the messages that wait to be sent cost.
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// What the messages cost that wait to be read or for their other pieces.
    pub(crate) fn unread(&self) -> usize {
        self.unread + self.gathering
    }

    /// Bytes that remembering numbers takes.
    pub(crate) fn remembered(&self) -> usize {
        self.seen.cost()
    }

    /// Size of the next message to send.
    pub(crate) fn head(&self) -> Option<usize> {
        self.outgoing.front().map(|(_, data)| data.len())
    }

    pub(crate) fn take(&mut self) -> Option<(u64, Bytes)> {
        let (number, data) = self.outgoing.pop_front()?;
        self.queued -= data.len() + OVERHEAD;
        Some((number, data))
    }

    /// Next message to read.
    pub(crate) fn read(&mut self) -> Option<Bytes> {
        let data = self.incoming.pop_front()?;
        self.unread -= data.len() + OVERHEAD;
        Some(data)
    }

    /// Takes a message in; whether there is something new to read.
    pub(crate) fn insert(&mut self, number: u64, data: Bytes) -> bool {
        if data.len() > MAX_MESSAGE || !self.seen.insert(number) {
            return false;
        }
        self.give_up(number);
        self.deliver(data);
        true
    }

    /// Takes a piece of a message in; whether that completed one.
    pub(crate) fn insert_fragment(&mut self, number: u64, index: u8, count: u8, data: Bytes) -> bool {
        if self.seen.contains(number) {
            return false;
        }
        let partial = self.partial.entry(number).or_insert_with(|| {
            let partial = Partial { pieces: vec![None; usize::from(count)], size: 0 };
            self.gathering += partial.cost();
            partial
        });
        let fits = partial.pieces.len() == usize::from(count) && partial.size + data.len() <= MAX_MESSAGE;
        let Some(piece) = partial.pieces.get_mut(usize::from(index)).filter(|piece| piece.is_none() && fits) else { return false };
        partial.size += data.len();
        self.gathering += data.len();
        *piece = Some(Bytes::copy_from_slice(&data));
        if partial.pieces.iter().any(Option::is_none) {
            if self.partial.len() > MAX_PARTIAL
                && let Some((oldest, _)) = self.partial.first_key_value()
            {
                self.give_up(*oldest);
                self.dropped += 1;
            }
            return false;
        }
        let Some(partial) = self.give_up(number) else { return false };
        if !self.seen.insert(number) {
            return false;
        }
        let mut whole = BytesMut::with_capacity(partial.size);
        partial.pieces.into_iter().flatten().for_each(|piece| whole.extend_from_slice(&piece));
        self.deliver(whole.freeze());
        true
    }

    fn give_up(&mut self, number: u64) -> Option<Partial> {
        let partial = self.partial.remove(&number)?;
        self.gathering -= partial.cost();
        Some(partial)
    }

    fn deliver(&mut self, data: Bytes) {
        // A small message must not hold the large buffer that it came in.
        let data = Bytes::copy_from_slice(&data);
        self.unread += data.len() + OVERHEAD;
        self.incoming.push_back(data);
        while self.unread > MAX_UNREAD {
            if let Some(old) = self.incoming.pop_front() {
                self.unread -= old.len() + OVERHEAD;
                self.dropped += 1;
            }
        }
    }
}

impl Partial {
    fn cost(&self) -> usize {
        OVERHEAD + self.pieces.len() * PIECE_OVERHEAD + self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_the_far_past_are_dropped() {
        let mut messages = Messages::default();
        assert!(messages.insert(5, Bytes::from_static(b"a")) && !messages.insert(5, Bytes::from_static(b"a")));
        assert!(messages.insert(3, Bytes::from_static(b"b")));
        assert!(messages.insert(5 + REMEMBERED, Bytes::from_static(b"c")));
        assert!(!messages.insert(4, Bytes::from_static(b"d")));
        assert_eq!(std::iter::from_fn(|| messages.read()).collect::<Vec<_>>(), ["a", "b", "c"]);
    }

    #[test]
    fn pieces_in_any_order_make_a_message() {
        let mut messages = Messages::default();
        let piece = |text: &'static str| Bytes::from_static(text.as_bytes());
        assert!(!messages.insert_fragment(0, 2, 3, piece("c")));
        assert!(!messages.insert_fragment(0, 0, 3, piece("a")));
        assert!(!messages.insert_fragment(0, 0, 3, piece("a")));
        assert!(!messages.insert_fragment(0, 1, 4, piece("x")));
        assert!(messages.insert_fragment(0, 1, 3, piece("b")));
        assert_eq!(messages.read().unwrap(), "abc");
        assert!(!messages.insert_fragment(0, 1, 3, piece("b")) && messages.partial.is_empty());
    }

    #[test]
    fn regression_messages_without_bytes_count_too() {
        let mut messages = Messages::default();
        for number in 0..100_000 {
            messages.push(Bytes::new());
            messages.insert(number, Bytes::new());
        }
        assert!(messages.outgoing.len() <= MAX_QUEUED / OVERHEAD && messages.incoming.len() <= MAX_UNREAD / OVERHEAD);
    }

    #[test]
    fn what_is_counted_is_what_is_there() {
        let mut messages = Messages::default();
        for number in 0..40u64 {
            messages.insert_fragment(number, 0, if number % 3 == 0 { 1 } else { 255 }, Bytes::from_static(&[0; 10]));
            messages.insert(number ^ 3, Bytes::from_static(b"abc"));
        }
        assert_eq!(messages.gathering, messages.partial.values().map(Partial::cost).sum::<usize>());
        while messages.read().is_some() {}
        assert_eq!(messages.unread(), messages.gathering);
    }

    #[test]
    fn memory_is_bounded_whatever_comes() {
        let mut messages = Messages::default();
        for number in 0..100_000 {
            messages.insert_fragment(number * 3, 0, 2, Bytes::from_static(&[0; 1000]));
            messages.insert(number * 3 + 1, Bytes::from_static(&[0; 100]));
            messages.push(Bytes::from_static(&[0; 1000]));
        }
        assert!(messages.partial.len() <= MAX_PARTIAL && messages.unread <= MAX_UNREAD && messages.queued <= MAX_QUEUED);
        assert!(!messages.push(Bytes::from(vec![0; MAX_MESSAGE + 1])));
    }
}
