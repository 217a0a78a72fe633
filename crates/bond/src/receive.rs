//! Receiving half of a stream flow: reassembles chunks that arrive in any order.

use std::collections::{BTreeMap, VecDeque};

use bytes::{Bytes, BytesMut};
use thiserror::Error;

/// Size of the buffers that in-order bytes are collected in. Copying keeps the allocated memory close to the counted bytes, whatever the chunk sizes.
const GATHER: usize = 64 << 10;
/// An out-of-order piece of at least this size is passed on without a copy. Smaller pieces are copied into the collecting buffer.
const WHOLE: usize = 16 << 10;

/// Overhead of an out-of-order piece in bytes: its map entry and its allocation.
const PIECE: usize = 96;

/// A chunk that violates the rules of its flow. The bond ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ReceiveError {
    /// More bytes than the flow's credit allows.
    #[error("the flow exceeds its credit")]
    Credit,
    /// The final size of the flow changes, or bytes follow it.
    #[error("the final size of the flow changed")]
    End,
}

/// Received and unread bytes of one direction of a flow.
#[derive(Debug)]
pub(crate) struct ReceiveHalf {
    /// Bytes in order, ready to be read.
    ready: VecDeque<Bytes>,
    /// The last buffer of the in-order bytes, still being filled.
    tail: BytesMut,
    /// Offset after the last byte in order.
    next: u64,
    /// Offset after the last byte read.
    read: u64,
    /// Out-of-order pieces by offset, disjoint.
    early: BTreeMap<u64, BytesMut>,
    /// Offset after the highest byte received.
    highest: u64,
    /// Final size of the flow, once known.
    size: Option<u64>,
    /// Flow-control limit: the offset up to which the other end may send.
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

    /// Memory of the buffers in bytes, beyond the received bytes.
    pub(crate) fn cost(&self) -> usize {
        self.tail.capacity() - self.tail.len() + self.early.len() * PIECE
    }

    /// Number of out-of-order pieces.
    pub(crate) fn pieces(&self) -> usize {
        self.early.len()
    }

    /// Flow-control limit.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether bytes, or the end of the flow, can be read.
    pub(crate) fn is_readable(&self) -> bool {
        self.read < self.next || self.is_at_end()
    }

    /// Whether the flow was read to its end.
    pub(crate) fn is_at_end(&self) -> bool {
        self.size == Some(self.read)
    }

    /// Accepts a chunk. Returns by how much the highest offset rose.
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

    /// Returns up to `most` bytes in order; `None` if there are none now.
    pub(crate) fn read(&mut self, most: usize) -> Option<Bytes> {
        if self.ready.is_empty() && !self.tail.is_empty() {
            // Give the whole buffer away: the flow may be idle from now on.
            self.ready.push_back(std::mem::take(&mut self.tail).freeze());
        }
        let first = self.ready.front_mut()?;
        let part = if first.len() <= most { self.ready.pop_front()? } else { first.split_to(most) };
        self.read += part.len() as u64;
        Some(part)
    }

    /// Returns a new limit to be sent to the other end, once half of the window is used. With `grow`, doubles the window first, up to `most`.
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

    /// Ends the flow at `size` because of a reset and drops the buffered bytes. Returns by how much the highest offset rose.
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

    /// Buffers the part of an out-of-order chunk that is not buffered yet, and appends it to the piece right before it. Copies, since the datagram's
    /// buffer may be much larger.
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
    fn invalid_offsets_are_rejected() {
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
    fn credit_follows_reads_and_the_window_grows_on_demand() {
        let mut half = ReceiveHalf::new(8);
        half.insert(0, Bytes::from_static(b"12345678"), false).unwrap();
        assert_eq!(half.grant(false, 100), None);
        assert_eq!(half.read(4).unwrap(), "1234");
        assert_eq!(half.grant(true, 100), Some(4 + 16));
        assert_eq!(half.grant(true, 100), None);
    }

    #[test]
    fn small_adjacent_pieces_are_merged() {
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
    fn an_out_of_order_run_is_read_in_few_pieces() {
        const DATAGRAM: usize = 1400;
        let all: Vec<u8> = (0..100 * DATAGRAM).map(|at| (at % 251) as u8).collect();
        let mut half = ReceiveHalf::new(all.len() as u64);
        for (number, chunk) in all.chunks(DATAGRAM).enumerate().skip(1) {
            half.insert((number * DATAGRAM) as u64, Bytes::copy_from_slice(chunk), false).unwrap();
        }
        assert!(half.pieces() <= all.len() / (GATHER - DATAGRAM) + 1, "{}", half.pieces());
        // Overlapping bytes are read once.
        half.insert(0, Bytes::copy_from_slice(&all[..DATAGRAM + 9]), false).unwrap();
        let parts: Vec<Bytes> = std::iter::from_fn(|| half.read(usize::MAX)).collect();
        assert!(parts.len() <= 5, "{}", parts.len());
        assert_eq!((parts.concat(), half.pieces()), (all, 0));
    }

    proptest! {
        #[test]
        fn chunks_in_any_order_are_reassembled(length in 1usize..300, pieces in proptest::collection::vec((any::<prop::sample::Index>(), 0usize..60), 0..80)) {
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
