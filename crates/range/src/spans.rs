//! Sets of byte ranges.

use std::ops::Range;

use braid_model::ByteCount;
use braid_model::ranges::RangeSet;

/// The bytes of a file from `start` (inclusive) to `end` (exclusive). `start <= end` always holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Span {
    /// The range from `start` to `end`; empty at `start` if `end` is less.
    pub const fn new(start: ByteCount, end: ByteCount) -> Self {
        Self::raw(start.get(), end.get())
    }

    pub(crate) const fn raw(start: u64, end: u64) -> Self {
        Self { start, end: if end < start { start } else { end } }
    }

    /// Position of the first byte.
    pub const fn start(self) -> ByteCount {
        ByteCount::new(self.start)
    }

    /// Position after the last byte.
    pub const fn end(self) -> ByteCount {
        ByteCount::new(self.end)
    }

    /// Number of bytes.
    pub const fn len(self) -> ByteCount {
        ByteCount::new(self.end - self.start)
    }

    /// Whether the range is empty.
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    const fn range(self) -> Range<u64> {
        self.start..self.end
    }

    pub(crate) const fn size(self) -> u64 {
        self.end - self.start
    }
}

impl From<Range<u64>> for Span {
    fn from(range: Range<u64>) -> Self {
        Self::raw(range.start, range.end)
    }
}

/// A set of bytes of a file, as ranges that neither touch nor overlap.
///
/// ```
/// use braid_model::ByteCount;
/// use braid_range::{Span, Spans};
///
/// let mut got = Spans::default();
/// got.insert(Span::new(ByteCount::new(0), ByteCount::new(10)));
/// got.insert(Span::new(ByteCount::new(10), ByteCount::new(20)));
/// assert_eq!(got.iter().count(), 1);
/// assert_eq!(got.count(), ByteCount::new(20));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spans(RangeSet);

impl Spans {
    /// The set of the bytes of one range.
    pub fn of(span: Span) -> Self {
        let mut set = Self::default();
        set.insert(span);
        set
    }

    /// Adds the bytes of `span`.
    pub fn insert(&mut self, span: Span) {
        self.0.insert(span.range());
    }

    /// Removes the bytes of `span`.
    pub fn remove(&mut self, span: Span) {
        self.0.remove(span.range());
    }

    /// The parts of `span` that are in the set, in ascending order.
    pub fn within(&self, span: Span) -> Vec<Span> {
        self.0.within(span.range()).map(Span::from).collect()
    }

    /// The parts of `span` that are not in the set, in ascending order.
    pub fn without(&self, span: Span) -> Vec<Span> {
        self.0.without(span.range()).map(Span::from).collect()
    }

    /// The ranges in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Span> + '_ {
        self.0.iter().cloned().map(Span::from)
    }

    /// Number of bytes.
    pub fn count(&self) -> ByteCount {
        ByteCount::new(self.0.total())
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The lowest range that starts before `limit`, cut there.
    pub(crate) fn first_below(&self, limit: u64) -> Option<Span> {
        let first = self.0.first().filter(|first| first.start < limit)?;
        Some(Span::raw(first.start, first.end.min(limit)))
    }

    /// Number of bytes below `limit`.
    pub(crate) fn below(&self, limit: u64) -> u64 {
        if self.0.last().is_none_or(|last| last.end <= limit) {
            return self.0.total();
        }
        self.0.within(0..limit).map(|range| range.end - range.start).sum()
    }

    /// End of the contiguous bytes from `start` on; `start` if there are none.
    pub fn contiguous(&self, start: ByteCount) -> ByteCount {
        ByteCount::new(self.0.reach(start.get()))
    }
}

impl FromIterator<Span> for Spans {
    fn from_iter<I: IntoIterator<Item = Span>>(spans: I) -> Self {
        let mut set = Self::default();
        spans.into_iter().for_each(|span| set.insert(span));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spans_agree_with_a_set_of_bytes(steps in prop::collection::vec((any::<bool>(), 0u64..60, 0u64..20), 0..40), look in (0u64..60, 0u64..30)) {
            let (mut set, mut model) = (Spans::default(), [false; 90]);
            for (insert, start, len) in steps {
                let span = Span::raw(start, start + len);
                if insert { set.insert(span) } else { set.remove(span) }
                (start..start + len).for_each(|at| model[at as usize] = insert);
            }
            let flat: Vec<u64> = set.iter().flat_map(|span| span.start..span.end).collect();
            let wanted: Vec<u64> = (0..90).filter(|at| model[*at as usize]).collect();
            prop_assert_eq!(&flat, &wanted);
            prop_assert_eq!(set.count().get() as usize, wanted.len());
            let spans: Vec<Span> = set.iter().collect();
            prop_assert!(spans.windows(2).all(|pair| pair[0].end < pair[1].start), "ranges neither touch nor overlap");
            let look = Span::raw(look.0, look.0 + look.1);
            let flat = |spans: Vec<Span>| spans.into_iter().flat_map(|span| span.start..span.end).collect::<Vec<_>>();
            prop_assert_eq!(flat(set.within(look)), (look.start..look.end).filter(|at| model[*at as usize]).collect::<Vec<_>>());
            prop_assert_eq!(flat(set.without(look)), (look.start..look.end).filter(|at| !model[*at as usize]).collect::<Vec<_>>());
            prop_assert_eq!(set.below(look.start), (0..look.start).filter(|at| model[*at as usize]).count() as u64);
            let reached = (look.start..).find(|at| !model[*at as usize]).unwrap();
            prop_assert_eq!(set.contiguous(look.start()).get(), reached);
        }
    }
}
