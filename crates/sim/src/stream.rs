//! Streams: the data of a flow in each direction, divided into chunks of one segment each.

use std::collections::VecDeque;

use braid_model::{ByteCount, Direction, LinkSet, PerDirection, Traffic};

use crate::tcp::SEGMENT;

/// A flow, live or ended.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) class: usize,
    /// Its connections: one for a connection-oriented stream, otherwise one for each allowed link.
    pub(crate) connections: Vec<u32>,
    pub(crate) spread: bool,
    pub(crate) allowed: LinkSet,
    /// Expected bytes, and expected main direction.
    pub(crate) expected: ByteCount,
    pub(crate) direction: Direction,
    /// Bytes moved, by direction: payload that arrived for the first time.
    pub(crate) moved: Traffic,
    /// Value of `moved` at the last measurement of capacities.
    pub(crate) measured: Traffic,
    pub(crate) sources: PerDirection<Source>,
    pub(crate) sinks: PerDirection<Sink>,
    pub(crate) ended: bool,
}

/// Send side of one end.
#[derive(Debug)]
pub(crate) struct Source {
    total: u64,
    next: u32,
    chunks: u32,
    /// Whether it may send. A server waits for the whole request.
    pub(crate) open: bool,
    /// Chunks that must also be sent over another link, because their link timed out.
    again: VecDeque<u32>,
    repeated: bool,
}

impl Source {
    pub(crate) fn new(total: ByteCount) -> Self {
        let chunks = u32::try_from(total.get().div_ceil(SEGMENT.get())).unwrap_or(u32::MAX);
        Self { total: total.get(), next: 0, chunks, open: false, again: VecDeque::new(), repeated: false }
    }

    /// Total bytes.
    pub(crate) fn total(&self) -> ByteCount {
        ByteCount::new(self.total)
    }

    /// The next chunk to send.
    pub(crate) fn peek(&self) -> Option<u32> {
        if !self.open {
            return None;
        }
        self.again.front().copied().or((self.next < self.chunks).then_some(self.next))
    }

    /// Bytes after the chunk that [`peek`](Self::peek) returned.
    pub(crate) fn behind(&self) -> ByteCount {
        let chunks = self.again.len() as u64 + u64::from(self.chunks - self.next);
        ByteCount::new(chunks.saturating_sub(1) * SEGMENT.get())
    }

    /// Removes and returns the chunk that [`peek`](Self::peek) returned.
    pub(crate) fn take(&mut self) -> Option<u32> {
        let chunk = self.peek()?;
        if self.again.pop_front().is_none() {
            self.next += 1;
        }
        Some(chunk)
    }

    pub(crate) fn repeat(&mut self, chunks: impl Iterator<Item = u32>) {
        self.again.extend(chunks);
        self.repeated = true;
    }

    /// Records that a chunk is sent on several connections.
    pub(crate) fn copy(&mut self) {
        self.repeated = true;
    }

    /// Whether any chunk was ever scheduled to be sent twice.
    pub(crate) fn has_repeated(&self) -> bool {
        self.repeated
    }

    /// Size of a chunk in bytes. Only the last chunk may be smaller than a segment.
    pub(crate) fn size(&self, chunk: u32) -> u16 {
        (self.total - u64::from(chunk) * SEGMENT.get()).min(SEGMENT.get()) as u16
    }
}

/// Receive side of one end.
#[derive(Debug)]
pub(crate) struct Sink {
    chunks: u32,
    next: u32,
    /// Which chunks from `next` on have arrived.
    ahead: VecDeque<bool>,
}

impl Sink {
    pub(crate) fn new(source: &Source) -> Self {
        Self { chunks: source.chunks, next: 0, ahead: VecDeque::new() }
    }

    /// Records the arrival of a chunk. Returns whether it is new.
    pub(crate) fn take(&mut self, chunk: u32) -> bool {
        if chunk < self.next {
            return false;
        }
        if chunk == self.next && self.ahead.is_empty() {
            self.next += 1;
            return true;
        }
        let place = (chunk - self.next) as usize;
        if self.ahead.len() <= place {
            self.ahead.resize(place + 1, false);
        }
        if std::mem::replace(&mut self.ahead[place], true) {
            return false;
        }
        while self.ahead.front() == Some(&true) {
            self.ahead.pop_front();
            self.next += 1;
        }
        true
    }

    pub(crate) fn has(&self, chunk: u32) -> bool {
        chunk < self.next || self.ahead.get((chunk - self.next) as usize) == Some(&true)
    }

    /// The first missing chunk.
    pub(crate) fn next(&self) -> u32 {
        self.next
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.next >= self.chunks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_source_yields_every_chunk_with_its_size() {
        let mut source = Source::new(ByteCount::new(4000));
        assert_eq!(source.take(), None);
        source.open = true;
        let mut sizes = Vec::new();
        while let Some(chunk) = source.take() {
            sizes.push(source.size(chunk));
        }
        assert_eq!(sizes, [1448, 1448, 1104]);
        source.repeat([1].into_iter());
        assert_eq!((source.take(), source.take()), (Some(1), None));
    }

    proptest! {
        #[test]
        fn a_sink_accepts_each_chunk_once(order in prop::collection::vec(0u32..30, 0..90)) {
            let mut source = Source::new(ByteCount::new(30 * 1448));
            source.open = true;
            let mut sink = Sink::new(&source);
            let mut have = [false; 31];
            for chunk in order {
                prop_assert_eq!(sink.has(chunk), have[chunk as usize]);
                prop_assert_eq!(sink.take(chunk), !have[chunk as usize]);
                have[chunk as usize] = true;
                prop_assert_eq!(sink.next() as usize, have.iter().position(|have| !have).unwrap());
                prop_assert_eq!(sink.is_complete(), have[..30].iter().all(|have| *have));
            }
        }
    }
}
