//! Streams: what a flow moves either way, cut into chunks of one segment each.

use std::collections::VecDeque;

use braid_model::{ByteCount, Direction, LinkSet, PerDirection, Traffic};

use crate::tcp::SEGMENT;

/// A flow that lives or has ended.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) class: usize,
    /// Its connections, one for a connection-oriented stream, else one for each link allowed.
    pub(crate) connections: Vec<u32>,
    pub(crate) spread: bool,
    pub(crate) allowed: LinkSet,
    /// What it was thought to move, and which way mostly.
    pub(crate) expected: ByteCount,
    pub(crate) direction: Direction,
    /// What it has moved, by direction: payload that arrived for the first time.
    pub(crate) moved: Traffic,
    /// The same when capacities were last measured.
    pub(crate) measured: Traffic,
    pub(crate) sources: PerDirection<Source>,
    pub(crate) sinks: PerDirection<Sink>,
    pub(crate) ended: bool,
}

/// What one end has to send.
#[derive(Debug)]
pub(crate) struct Source {
    total: u64,
    next: u32,
    chunks: u32,
    /// Whether it may send yet: a server waits for the whole request.
    pub(crate) open: bool,
    /// Chunks that are to go over another link as well, since theirs timed out.
    again: VecDeque<u32>,
    repeated: bool,
}

impl Source {
    pub(crate) fn new(total: ByteCount) -> Self {
        let chunks = u32::try_from(total.get().div_ceil(SEGMENT.get())).unwrap_or(u32::MAX);
        Self { total: total.get(), next: 0, chunks, open: false, again: VecDeque::new(), repeated: false }
    }

    /// All that it has.
    pub(crate) fn total(&self) -> ByteCount {
        ByteCount::new(self.total)
    }

    /// The chunk that is to go next.
    pub(crate) fn peek(&self) -> Option<u32> {
        if !self.open {
            return None;
        }
        self.again.front().copied().or((self.next < self.chunks).then_some(self.next))
    }

    /// What comes after the chunk that [`peek`](Self::peek) gave.
    pub(crate) fn behind(&self) -> ByteCount {
        let chunks = self.again.len() as u64 + u64::from(self.chunks - self.next);
        ByteCount::new(chunks.saturating_sub(1) * SEGMENT.get())
    }

    /// Takes the chunk that [`peek`](Self::peek) gave.
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

    /// A chunk goes on several connections.
    pub(crate) fn copy(&mut self) {
        self.repeated = true;
    }

    /// Whether any chunk was ever to go twice.
    pub(crate) fn has_repeated(&self) -> bool {
        self.repeated
    }

    /// Bytes of a chunk; only the last is not full.
    pub(crate) fn size(&self, chunk: u32) -> u16 {
        (self.total - u64::from(chunk) * SEGMENT.get()).min(SEGMENT.get()) as u16
    }
}

/// What the other end has.
#[derive(Debug)]
pub(crate) struct Sink {
    chunks: u32,
    next: u32,
    /// Which chunks from `next` on are there.
    ahead: VecDeque<bool>,
}

impl Sink {
    pub(crate) fn new(source: &Source) -> Self {
        Self { chunks: source.chunks, next: 0, ahead: VecDeque::new() }
    }

    /// A chunk came; whether it is new.
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

    /// The first chunk that is missing.
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
    fn a_source_gives_every_chunk_and_all_its_bytes() {
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
        fn a_sink_takes_each_chunk_once(order in prop::collection::vec(0u32..30, 0..90)) {
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
