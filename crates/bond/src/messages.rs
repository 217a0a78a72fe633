//! Messages of a datagram flow: unordered, each delivered at most once. A message that does not fit into one datagram is fragmented and reassembled.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Bytes, BytesMut};

use crate::window::Window;

/// Largest message, as in UDP.
pub(crate) const MAX_MESSAGE: usize = 65_507;
/// Overhead of a message, in bytes.
const OVERHEAD: usize = 64;
/// Overhead of a fragment of an incomplete message, in bytes.
const PIECE_OVERHEAD: usize = 40;
/// Limit of the messages waiting to be sent, including overhead. The oldest are dropped first.
const MAX_QUEUED: usize = 1 << 20;
/// Limit of the messages waiting to be read, including overhead.
const MAX_UNREAD: usize = 1 << 20;
/// Message numbers remembered to detect duplicates. Older numbers count as duplicates.
const REMEMBERED: u64 = 8192;
/// Number of incomplete messages at a time.
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
    /// Memory of `partial`, in bytes.
    gathering: usize,
    /// Messages dropped because a limit was reached, in both directions.
    pub(crate) dropped: u64,
}

#[derive(Debug)]
struct Partial {
    pieces: Vec<Option<Bytes>>,
    size: usize,
}

impl Messages {
    /// Queues a message. Returns `false` if it exceeds the size limit.
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

    /// Memory of the messages waiting to be sent, in bytes.
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// Memory of the messages waiting to be read and of incomplete messages, in bytes.
    pub(crate) fn unread(&self) -> usize {
        self.unread + self.gathering
    }

    /// Memory of the remembered message numbers, in bytes.
    pub(crate) fn remembered(&self) -> usize {
        self.seen.cost()
    }

    /// Size of the next message to send, in bytes.
    pub(crate) fn head(&self) -> Option<usize> {
        self.outgoing.front().map(|(_, data)| data.len())
    }

    pub(crate) fn take(&mut self) -> Option<(u64, Bytes)> {
        let (number, data) = self.outgoing.pop_front()?;
        self.queued -= data.len() + OVERHEAD;
        Some((number, data))
    }

    /// Returns the next message to read.
    pub(crate) fn read(&mut self) -> Option<Bytes> {
        let data = self.incoming.pop_front()?;
        self.unread -= data.len() + OVERHEAD;
        Some(data)
    }

    /// Accepts a received message. Returns whether there is a new message to read.
    pub(crate) fn insert(&mut self, number: u64, data: Bytes) -> bool {
        if data.len() > MAX_MESSAGE || !self.seen.insert(number) {
            return false;
        }
        self.remove_partial(number);
        self.deliver(data);
        true
    }

    /// Accepts a received fragment. Returns whether it completed a message.
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
                self.remove_partial(*oldest);
                self.dropped += 1;
            }
            return false;
        }
        let Some(partial) = self.remove_partial(number) else { return false };
        if !self.seen.insert(number) {
            return false;
        }
        let mut whole = BytesMut::with_capacity(partial.size);
        partial.pieces.into_iter().flatten().for_each(|piece| whole.extend_from_slice(&piece));
        self.deliver(whole.freeze());
        true
    }

    fn remove_partial(&mut self, number: u64) -> Option<Partial> {
        let partial = self.partial.remove(&number)?;
        self.gathering -= partial.cost();
        Some(partial)
    }

    fn deliver(&mut self, data: Bytes) {
        // Copy, so that a small message does not keep a large datagram buffer alive.
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
    fn duplicates_and_old_messages_are_dropped() {
        let mut messages = Messages::default();
        assert!(messages.insert(5, Bytes::from_static(b"a")) && !messages.insert(5, Bytes::from_static(b"a")));
        assert!(messages.insert(3, Bytes::from_static(b"b")));
        assert!(messages.insert(5 + REMEMBERED, Bytes::from_static(b"c")));
        assert!(!messages.insert(4, Bytes::from_static(b"d")));
        assert_eq!(std::iter::from_fn(|| messages.read()).collect::<Vec<_>>(), ["a", "b", "c"]);
    }

    #[test]
    fn fragments_in_any_order_make_a_message() {
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
    fn regression_empty_messages_count_against_the_limits() {
        let mut messages = Messages::default();
        for number in 0..100_000 {
            messages.push(Bytes::new());
            messages.insert(number, Bytes::new());
        }
        assert!(messages.outgoing.len() <= MAX_QUEUED / OVERHEAD && messages.incoming.len() <= MAX_UNREAD / OVERHEAD);
    }

    #[test]
    fn counted_memory_matches_buffered_memory() {
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
    fn memory_is_bounded_for_any_input() {
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
