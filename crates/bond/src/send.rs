//! Sending half of a stream flow: buffers written bytes until they are acknowledged, and cuts them into chunks.

use std::collections::VecDeque;
use std::ops::Range;

use braid_model::ranges::RangeSet;
use bytes::{BufMut, Bytes};

/// Writes are merged into segments up to this size.
const JOINED: usize = 1024;
/// Overhead of a segment in bytes.
const SEGMENT: usize = 96;

/// Bytes of one direction of a flow, from the first unacknowledged to the last written.
#[derive(Debug, Default)]
pub(crate) struct SendHalf {
    /// Unacknowledged bytes in order. Each segment comes with the offset after its last byte.
    segments: VecDeque<(u64, Bytes)>,
    /// Offset of the first byte of `segments`.
    base: u64,
    /// Offset after the last byte written.
    end: u64,
    /// Offset of the first byte never sent.
    next: u64,
    /// Acknowledged ranges beyond `base`.
    acked: RangeSet,
    /// Lost ranges, to be retransmitted.
    again: RangeSet,
    /// Flow-control limit: the offset up to which this end may send.
    credit: u64,
    fin: Fin,
}

/// State of the end-of-flow flag.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Fin {
    #[default]
    Open,
    /// No more data will be written. The flag is to be sent.
    Pending,
    Sent,
    Acked,
}

/// A range of a flow to be sent in one chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: Range<u64>,
    pub(crate) fin: bool,
}

impl Piece {
    pub(crate) fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

impl SendHalf {
    pub(crate) fn new(credit: u64) -> Self {
        Self { credit, ..Self::default() }
    }

    pub(crate) fn write(&mut self, data: Bytes) {
        debug_assert!(self.fin == Fin::Open, "nothing is written behind the end");
        self.end += data.len() as u64;
        match self.segments.back_mut() {
            _ if data.is_empty() => {}
            // Many small segments would cost more than their bytes.
            Some((end, last)) if last.len() + data.len() <= JOINED => {
                (*end, *last) = (self.end, [&last[..], &data].concat().into());
            }
            _ => self.segments.push_back((self.end, data)),
        }
    }

    pub(crate) fn finish(&mut self) {
        if self.fin == Fin::Open {
            self.fin = Fin::Pending;
        }
    }

    /// Whether all data and the end of the flow are acknowledged.
    pub(crate) fn is_done(&self) -> bool {
        self.fin == Fin::Acked && self.base == self.end
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.fin != Fin::Open
    }

    /// Bytes written and not acknowledged (as a contiguous prefix).
    pub(crate) fn held(&self) -> u64 {
        self.end - self.base
    }

    /// Number of acknowledged and lost ranges.
    pub(crate) fn ranges(&self) -> usize {
        self.acked.ranges() + self.again.ranges()
    }

    /// Memory in bytes, beyond the held bytes.
    pub(crate) fn cost(&self) -> usize {
        self.segments.len() * SEGMENT + self.acked.cost() + self.again.cost()
    }

    /// Bytes never sent.
    pub(crate) fn unsent(&self) -> u64 {
        self.end - self.next
    }

    /// Offset after the last byte ever sent.
    pub(crate) fn sent(&self) -> u64 {
        self.next
    }

    pub(crate) fn set_credit(&mut self, credit: u64) {
        self.credit = self.credit.max(credit);
    }

    /// Number of bytes that can be sent now, of which at most `fresh` for the first time. `None` if there is not even an end-of-flow flag to send.
    pub(crate) fn pending(&self, fresh: u64) -> Option<u64> {
        let again = self.again.total();
        let fresh = self.end.min(self.credit).saturating_sub(self.next).min(fresh);
        let told = self.fin == Fin::Pending && self.next == self.end;
        (again + fresh > 0 || told).then_some(again + fresh)
    }

    /// The next piece of at most `most` bytes, of which at most `fresh` for the first time. Lost bytes go first.
    pub(crate) fn take(&mut self, most: u64, fresh: u64) -> Option<Piece> {
        let range = match self.again.first() {
            Some(first) => {
                let range = first.start..first.end.min(first.start + most);
                self.again.remove(range.clone());
                range
            }
            None => {
                let end = self.end.min(self.credit).min(self.next + most.min(fresh));
                let range = self.next..end.max(self.next);
                self.next = range.end;
                range
            }
        };
        let fin = range.end == self.end && matches!(self.fin, Fin::Pending | Fin::Sent);
        if range.is_empty() && !(fin && self.fin == Fin::Pending) {
            return None;
        }
        if fin {
            self.fin = Fin::Sent;
        }
        Some(Piece { range, fin })
    }

    /// Appends the bytes of `range` to `out`. The range must not start below the acknowledged prefix.
    pub(crate) fn copy(&self, range: Range<u64>, out: &mut impl BufMut) {
        let mut from = range.start;
        let first = self.segments.partition_point(|(end, _)| *end <= from);
        for (end, segment) in self.segments.range(first..) {
            let at = end - segment.len() as u64;
            let part = &segment[(from - at) as usize..(range.end.min(*end) - at) as usize];
            out.put_slice(part);
            from += part.len() as u64;
            if from >= range.end {
                return;
            }
        }
    }

    /// The part of a sent piece that is still unacknowledged, except for acknowledged ranges within it; `None` if there is none.
    pub(crate) fn outstanding(&self, piece: &Piece) -> Option<Piece> {
        let range = piece.range.start.max(self.base)..piece.range.end;
        let arrived = self.acked.covers(range.clone());
        let told = !piece.fin || self.fin == Fin::Acked;
        (!told || !range.is_empty() && !arrived).then(|| Piece { range: range.start.min(range.end)..range.end, fin: piece.fin })
    }

    /// Processes an acknowledged piece. Returns the number of bytes released.
    pub(crate) fn on_acked(&mut self, piece: &Piece) -> u64 {
        if piece.fin {
            self.fin = Fin::Acked;
        }
        self.again.remove(piece.range.clone());
        if piece.range.end <= self.base {
            return 0;
        }
        if piece.range.start > self.base {
            self.acked.insert(piece.range.clone());
            return 0;
        }
        let mut to = piece.range.end;
        while let Some(first) = self.acked.first().filter(|first| first.start <= to) {
            to = to.max(first.end);
            self.acked.pop_first();
        }
        let freed = to - self.base;
        self.release(to);
        freed
    }

    /// Marks the unacknowledged part of a piece for retransmission.
    pub(crate) fn on_lost(&mut self, piece: &Piece) {
        if piece.fin && self.fin == Fin::Sent {
            self.fin = Fin::Pending;
        }
        let range = piece.range.start.max(self.base)..piece.range.end;
        if range.is_empty() {
            return;
        }
        self.again.insert(range.clone());
        for acked in self.acked.within(range) {
            self.again.remove(acked);
        }
    }

    /// Drops all buffered bytes because the flow was reset. Returns the number of bytes that were held.
    pub(crate) fn clear(&mut self) -> u64 {
        let held = self.held();
        let (base, next) = (self.next, self.next);
        *self = Self { base, next, end: next, fin: Fin::Acked, ..Self::default() };
        held
    }

    fn release(&mut self, to: u64) {
        while let Some((end, first)) = self.segments.front_mut() {
            if *end > to {
                let _ = first.split_to((to - self.base) as usize);
                self.base = to;
                break;
            }
            self.base = *end;
            self.segments.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn half(data: &'static [u8], credit: u64) -> SendHalf {
        let mut half = SendHalf::new(credit);
        half.write(Bytes::from_static(data));
        half
    }

    fn text(half: &SendHalf, piece: &Piece) -> Vec<u8> {
        let mut out = Vec::new();
        half.copy(piece.range.clone(), &mut out);
        out
    }

    #[test]
    fn credit_bounds_sending_and_the_end_comes_last() {
        let mut half = half(b"abcdef", 4);
        half.finish();
        let first = half.take(3, u64::MAX).unwrap();
        assert_eq!((text(&half, &first), first.fin), (b"abc".to_vec(), false));
        assert_eq!(half.take(3, u64::MAX).unwrap().range, 3..4);
        assert_eq!((half.take(3, u64::MAX), half.pending(u64::MAX)), (None, None));
        half.set_credit(100);
        let last = half.take(30, u64::MAX).unwrap();
        assert_eq!((last.range.clone(), last.fin), (4..6, true));
        half.on_acked(&last);
        assert!(!half.is_done());
        half.on_acked(&Piece { range: 0..4, fin: false });
        assert!(half.is_done() && half.held() == 0);
    }

    #[test]
    fn an_end_without_bytes_is_sent_and_retransmitted() {
        let mut half = SendHalf::new(10);
        half.finish();
        let fin = half.take(10, u64::MAX).unwrap();
        assert!(fin.fin && fin.range.is_empty() && half.pending(9).is_none());
        half.on_lost(&fin);
        assert_eq!(half.pending(9), Some(0));
        assert_eq!(half.take(10, 9), Some(fin.clone()));
        half.on_acked(&fin);
        assert!(half.is_done());
    }

    #[test]
    fn lost_bytes_go_first_unless_acknowledged_meanwhile() {
        let mut half = half(b"abcdefgh", 100);
        let pieces: Vec<_> = (0..3).map(|_| half.take(2, u64::MAX).unwrap()).collect();
        half.on_acked(&pieces[1]);
        half.on_lost(&Piece { range: 0..6, fin: false });
        assert_eq!(half.take(9, 0).unwrap().range, 0..2);
        assert_eq!(half.take(9, 0).unwrap().range, 4..6);
        half.on_lost(&pieces[0]);
        half.on_acked(&pieces[0]);
        assert_eq!(half.take(9, 9).unwrap().range, 6..8);
    }

    proptest! {
        /// For any order of sending, loss and acknowledgement: all bytes arrive and none is held at the end.
        #[test]
        fn all_bytes_are_delivered(writes in proptest::collection::vec(1usize..50, 1..10), steps in proptest::collection::vec((0u8..3, 1u64..40, any::<prop::sample::Index>()), 0..200)) {
            let mut half = SendHalf::new(u64::MAX);
            let mut all = Vec::new();
            for length in writes {
                let data: Vec<u8> = (0..length).map(|at| (all.len() + at) as u8).collect();
                all.extend_from_slice(&data);
                half.write(Bytes::from(data));
            }
            half.finish();
            let mut got = vec![None; all.len()];
            let mut flying = Vec::new();
            let deliver = |half: &mut SendHalf, piece: &Piece, data: &[u8], got: &mut Vec<Option<u8>>| {
                data.iter().enumerate().for_each(|(at, byte)| got[piece.range.start as usize + at] = Some(*byte));
                half.on_acked(piece);
            };
            for (what, most, which) in steps {
                match what {
                    0 => if let Some(piece) = half.take(most, u64::MAX) {
                        let data = text(&half, &piece);
                        prop_assert_eq!(data.len() as u64, piece.len());
                        flying.push((piece, data));
                    },
                    1 if !flying.is_empty() => {
                        let (piece, data) = flying.remove(which.index(flying.len()));
                        deliver(&mut half, &piece, &data, &mut got);
                    }
                    2 if !flying.is_empty() => {
                        // Declared lost, and perhaps acknowledged later.
                        let at = which.index(flying.len());
                        half.on_lost(&flying[at].0);
                        if most % 2 == 0 { flying.remove(at); }
                    }
                    _ => {}
                }
            }
            for (piece, _) in flying.drain(..) { half.on_lost(&piece); }
            while let Some(piece) = half.take(7, u64::MAX) {
                let data = text(&half, &piece);
                deliver(&mut half, &piece, &data, &mut got);
            }
            prop_assert!(half.is_done() && half.held() == 0);
            prop_assert_eq!(got.into_iter().map(Option::unwrap).collect::<Vec<_>>(), all);
        }
    }
}
