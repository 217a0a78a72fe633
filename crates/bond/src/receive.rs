//! The receiving half of a stream flow: chunks in any order become bytes in order.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Bytes, BytesMut};
use thiserror::Error;

/// In-order bytes are gathered in buffers of this size, so that what is held is about what is counted, whatever the chunks' sizes.
const GATHER: usize = 64 << 10;
/// What came early and fills this much is read as it is; less is copied to what is gathered.
const WHOLE: usize = 16 << 10;

/// What a piece that came too early costs beside its bytes: its place in the list and its allocation.
const PIECE: usize = 96;

/// What a chunk does that its flow's rules forbid. The bond ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ReceiveError {
    /// More bytes than credit was given for.
    #[error("a flow goes beyond its credit")]
    Credit,
    /// The flow's end moves, or bytes come behind it.
    #[error("a flow's end moves")]
    End,
}

/// Bytes of one direction of a flow that were received and not yet read.
#[derive(Debug)]
pub(crate) struct ReceiveHalf {
    /// In order and ready to read.
    ready: VecDeque<Bytes>,
    /// The end of what is ready, still growing.
    tail: BytesMut,
    /// Offset behind the last byte in order.
    next: u64,
    /// Offset behind the last byte read.
    read: u64,
    /// What came too early, by offset, disjoint.
    early: BTreeMap<u64, BytesMut>,
    /// Offset behind the highest byte that came.
    highest: u64,
    /// Where the flow ends, once that is known.
    size: Option<u64>,
    /// How far the other end may send.
    limit: u64,
    window: u64,
}

impl ReceiveHalf {
    pub(crate) fn new(window: u64) -> Self {
        Self {
            ready: VecDeque::new(),
            tail: BytesMut::new(),
            next: 0,
            read: 0,
            early: BTreeMap::new(),
            highest: 0,
            size: None,
            limit: window,
            window,
        }
    }

    pub(crate) fn read_offset(&self) -> u64 {
        self.read
    }

    /// Bytes that buffers take beside the bytes that came.
    pub(crate) fn cost(&self) -> usize {
        self.tail.capacity() - self.tail.len() + self.early.len() * PIECE
    }

    /// In how many pieces that is kept which came too early.
    pub(crate) fn pieces(&self) -> usize {
        self.early.len()
    }

    /// How far the other end may send.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether bytes, or the end, can be read.
    pub(crate) fn is_readable(&self) -> bool {
        self.read < self.next || self.is_at_end()
    }

    /// Whether all was read.
    pub(crate) fn is_at_end(&self) -> bool {
        self.size == Some(self.read)
    }

    /// Takes a chunk in; by how much the highest offset rose.
    pub(crate) fn insert(&mut self, offset: u64, mut data: Bytes, fin: bool) -> Result<u64, ReceiveError> {
        let end = offset + data.len() as u64;
        if end > self.limit {
            return Err(ReceiveError::Credit);
        }
        if self.size.is_some_and(|size| end > size || (fin && end != size)) || (fin && end < self.highest) {
            return Err(ReceiveError::End);
        }
        if fin {
            self.size = Some(end);
        }
        let rise = end.saturating_sub(self.highest);
        self.highest = self.highest.max(end);
        let mut at = offset;
        if at < self.next {
            if end <= self.next {
                return Ok(rise);
            }
            let _ = data.split_to((self.next - at) as usize);
            at = self.next;
        }
        if at == self.next {
            self.append(&data);
            self.close_gap();
        } else if !data.is_empty() {
            self.keep(at, data);
        }
        Ok(rise)
    }

    /// Up to `most` bytes in order; `None` if there are none now.
    pub(crate) fn read(&mut self, most: usize) -> Option<Bytes> {
        if self.ready.is_empty() && !self.tail.is_empty() {
            // Nothing is kept of the buffer: a flow may be idle from now on.
            self.ready.push_back(std::mem::take(&mut self.tail).freeze());
        }
        let first = self.ready.front_mut()?;
        let part = if first.len() <= most { self.ready.pop_front()? } else { first.split_to(most) };
        self.read += part.len() as u64;
        Some(part)
    }

    /// A new limit to tell the other end, once half of the window is used up; `grow` doubles the window up to `most` first.
    pub(crate) fn grant(&mut self, grow: bool, most: u64) -> Option<u64> {
        if self.size.is_some() || self.limit - self.read > self.window / 2 {
            return None;
        }
        if grow {
            self.window = self.window.saturating_mul(2).min(most.max(self.window));
        }
        self.limit = self.read + self.window;
        Some(self.limit)
    }

    /// The flow ends at `size` with a reset: what is held is dropped. By how much the highest offset rose.
    pub(crate) fn reset(&mut self, size: u64) -> Result<u64, ReceiveError> {
        if size > self.limit {
            return Err(ReceiveError::Credit);
        }
        if size < self.highest || self.size.is_some_and(|known| known != size) {
            return Err(ReceiveError::End);
        }
        let rise = size - self.highest;
        self.ready.clear();
        self.early.clear();
        self.tail = BytesMut::new();
        (self.highest, self.next, self.read, self.size) = (size, size, size, Some(size));
        Ok(rise)
    }

    fn append(&mut self, data: &[u8]) {
        let mut rest = data;
        self.next += data.len() as u64;
        while !rest.is_empty() {
            if self.tail.capacity() == self.tail.len() {
                if !self.tail.is_empty() {
                    self.ready.push_back(self.tail.split().freeze());
                }
                self.tail.reserve(if rest.len() < GATHER / 16 && self.ready.is_empty() { rest.len().max(2048) } else { GATHER });
            }
            let fits = rest.len().min(self.tail.capacity() - self.tail.len());
            self.tail.extend_from_slice(&rest[..fits]);
            rest = &rest[fits..];
        }
    }

    fn close_gap(&mut self) {
        while let Some(entry) = self.early.first_entry().filter(|entry| *entry.key() <= self.next) {
            let (offset, data) = entry.remove_entry();
            let end = offset + data.len() as u64;
            if end <= self.next {
                continue;
            }
            let skip = (self.next - offset) as usize;
            if data.len() - skip < WHOLE {
                self.append(&data[skip..]);
                continue;
            }
            if !self.tail.is_empty() {
                self.ready.push_back(self.tail.split().freeze());
            }
            self.ready.push_back(data.freeze().slice(skip..));
            self.next = end;
        }
    }

    /// Keeps what came early, without what is already there, in one piece with what is right before it. Copies: the datagram's buffer may be
    /// much larger.
    fn keep(&mut self, offset: u64, data: Bytes) {
        let end = offset + data.len() as u64;
        let mut at = offset;
        if let Some((start, before)) = self.early.range(..=offset).next_back() {
            at = at.max(start + before.len() as u64);
        }
        while at < end {
            let next = self.early.range(at..).next().map(|(start, data)| (*start, *start + data.len() as u64));
            let until = next.map_or(end, |(start, _)| start.min(end));
            if until > at {
                let part = &data[(at - offset) as usize..(until - offset) as usize];
                match self.early.range_mut(..at).next_back() {
                    Some((start, before)) if start + before.len() as u64 == at && before.len() + part.len() <= GATHER => {
                        before.extend_from_slice(part);
                    }
                    _ => {
                        self.early.insert(at, BytesMut::from(part));
                    }
                }
            }
            at = next.map_or(end, |(_, behind)| behind);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn drain(half: &mut ReceiveHalf) -> Vec<u8> {
        std::iter::from_fn(|| half.read(7)).flatten().collect()
    }

    #[test]
    fn hostile_offsets_are_refused() {
        let mut half = ReceiveHalf::new(10);
        assert_eq!(half.insert(5, Bytes::from_static(b"abcdef"), false), Err(ReceiveError::Credit));
        assert_eq!(half.insert(5, Bytes::from_static(b"abc"), true), Ok(8));
        assert_eq!(half.insert(5, Bytes::from_static(b"abcd"), false), Err(ReceiveError::End));
        assert_eq!(half.insert(0, Bytes::from_static(b"abc"), true), Err(ReceiveError::End));
        assert_eq!(half.reset(7), Err(ReceiveError::End));
        assert_eq!(half.reset(8), Ok(0));
        assert!(half.is_at_end());
    }

    #[test]
    fn credit_follows_what_is_read_and_the_window_grows_on_demand() {
        let mut half = ReceiveHalf::new(8);
        half.insert(0, Bytes::from_static(b"12345678"), false).unwrap();
        assert_eq!(half.grant(false, 100), None);
        assert_eq!(half.read(4).unwrap(), "1234");
        assert_eq!(half.grant(true, 100), Some(4 + 16));
        assert_eq!(half.grant(true, 100), None);
    }

    #[test]
    fn small_pieces_that_touch_are_one() {
        let mut half = ReceiveHalf::new(100_000);
        for at in 1..20_000u64 {
            half.insert(at, Bytes::from_static(b"x"), false).unwrap();
        }
        assert!(half.pieces() <= 20_000 / GATHER + 1, "{}", half.pieces());
        half.insert(0, Bytes::from_static(b"x"), true).unwrap_err();
        half.insert(0, Bytes::from_static(b"x"), false).unwrap();
        assert_eq!((drain(&mut half).len(), half.pieces()), (20_000, 0));
    }

    #[test]
    fn a_run_that_came_early_is_read_in_few_pieces() {
        const DATAGRAM: usize = 1400;
        let all: Vec<u8> = (0..100 * DATAGRAM).map(|at| (at % 251) as u8).collect();
        let mut half = ReceiveHalf::new(all.len() as u64);
        for (number, chunk) in all.chunks(DATAGRAM).enumerate().skip(1) {
            half.insert((number * DATAGRAM) as u64, Bytes::copy_from_slice(chunk), false).unwrap();
        }
        assert!(half.pieces() <= all.len() / (GATHER - DATAGRAM) + 1, "{}", half.pieces());
        // What overlaps the run is not read twice.
        half.insert(0, Bytes::copy_from_slice(&all[..DATAGRAM + 9]), false).unwrap();
        let parts: Vec<Bytes> = std::iter::from_fn(|| half.read(usize::MAX)).collect();
        assert!(parts.len() <= 5, "{}", parts.len());
        assert_eq!((parts.concat(), half.pieces()), (all, 0));
    }

    proptest! {
        #[test]
        fn order_does_not_matter(length in 1usize..300, pieces in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..60), 0..80)) {
            let all: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let mut half = ReceiveHalf::new(1000);
            let mut out = Vec::new();
            for (start, size) in pieces {
                let start = start.index(length);
                let end = (start + size).min(length);
                half.insert(start as u64, Bytes::copy_from_slice(&all[start..end]), false).unwrap();
                if size % 3 == 0 { out.extend(drain(&mut half)); }
            }
            half.insert(0, Bytes::copy_from_slice(&all), true).unwrap();
            out.extend(drain(&mut half));
            prop_assert_eq!(out, all);
            prop_assert!(half.is_at_end() && half.early.is_empty());
            prop_assert_eq!(half.highest, length as u64);
        }
    }
}
