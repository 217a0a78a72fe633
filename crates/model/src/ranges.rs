//! Sets of numbers, stored as ranges.

use std::collections::VecDeque;
use std::ops::Range;

/// A set of `u64`, stored as disjoint, non-adjacent ranges in ascending order. Insertion at the end, the usual case, is O(1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet {
    ranges: VecDeque<Range<u64>>,
    total: u64,
}

impl RangeSet {
    /// Number of ranges.
    pub fn ranges(&self) -> usize {
        self.ranges.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The ranges in ascending order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Range<u64>> {
        self.ranges.iter()
    }

    /// The lowest range.
    pub fn first(&self) -> Option<Range<u64>> {
        self.ranges.front().cloned()
    }

    /// The highest range.
    pub fn last(&self) -> Option<Range<u64>> {
        self.ranges.back().cloned()
    }

    /// Removes and returns the lowest range.
    pub fn pop_first(&mut self) -> Option<Range<u64>> {
        let first = self.ranges.pop_front()?;
        self.total -= first.end - first.start;
        Some(first)
    }

    /// Number of elements in the set.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The parts of `range` that are in the set.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let from = self.ranges.partition_point(|of| of.end <= range.start);
        let of = self.ranges.range(from..).take_while(move |of| of.start < range.end);
        of.map(move |of| of.start.max(range.start)..of.end.min(range.end)).filter(|of| !of.is_empty())
    }

    /// The parts of `range` that are not in the set.
    pub fn without(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let starts = std::iter::once(range.start).chain(self.within(range.clone()).map(|of| of.end));
        let ends = self.within(range.clone()).map(|of| of.start).chain(std::iter::once(range.end));
        starts.zip(ends).filter(|(start, end)| start < end).map(|(start, end)| start..end)
    }

    /// The first number at or after `start` that is not in the set; `start` itself if `start` is not in the set.
    pub fn reach(&self, start: u64) -> u64 {
        let at = self.ranges.partition_point(|of| of.end <= start);
        self.ranges.get(at).filter(|of| of.start <= start).map_or(start, |of| of.end)
    }

    /// Whether the set contains all of `range`.
    pub fn covers(&self, range: Range<u64>) -> bool {
        self.within(range.clone()).next() == Some(range)
    }

    /// Memory used by the ranges, in bytes.
    pub fn cost(&self) -> usize {
        self.ranges.len() * size_of::<Range<u64>>()
    }

    /// Adds `added`. Returns whether none of it was in the set before.
    pub fn insert(&mut self, added: Range<u64>) -> bool {
        if added.is_empty() {
            return true;
        }
        if let Some(last) = self.ranges.back_mut()
            && last.end == added.start
        {
            self.total += added.end - added.start;
            last.end = added.end;
            return true;
        }
        // Merge with the ranges that touch or overlap it.
        let from = self.ranges.partition_point(|range| range.end < added.start);
        let to = self.ranges.partition_point(|range| range.start <= added.end);
        if from >= to {
            self.total += added.end - added.start;
            self.ranges.insert(from, added);
            return true;
        }
        let before: u64 = self.ranges.range(from..to).map(|range| range.end - range.start).sum();
        let fresh = self.ranges.range(from..to).all(|range| range.end <= added.start || range.start >= added.end);
        let merged = self.ranges[from].start.min(added.start)..self.ranges[to - 1].end.max(added.end);
        self.total += merged.end - merged.start - before;
        self.ranges.drain(from + 1..to);
        self.ranges[from] = merged;
        fresh
    }

    /// Removes all numbers of `removed`.
    pub fn remove(&mut self, removed: Range<u64>) {
        let from = self.ranges.partition_point(|range| range.end <= removed.start);
        let to = self.ranges.partition_point(|range| range.start < removed.end);
        if removed.is_empty() || from >= to {
            return;
        }
        let head = self.ranges[from].start..removed.start;
        let tail = removed.end..self.ranges[to - 1].end;
        self.total -= self.ranges.drain(from..to).map(|range| range.end - range.start).sum::<u64>();
        for rest in [tail, head] {
            if !rest.is_empty() {
                self.total += rest.end - rest.start;
                self.ranges.insert(from, rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn behaves_like_a_set_of_numbers(steps in proptest::collection::vec((any::<bool>(), 0u64..60, 0u64..12), 0..60)) {
            let (mut ranges, mut model) = (RangeSet::default(), BTreeSet::new());
            for (add, start, length) in steps {
                let range = start..start + length;
                if add {
                    let fresh = range.clone().all(|number| !model.contains(&number));
                    prop_assert_eq!(ranges.insert(range.clone()), fresh);
                    model.extend(range);
                } else {
                    ranges.remove(range.clone());
                    range.for_each(|number| { model.remove(&number); });
                }
                prop_assert!(ranges.ranges.iter().zip(ranges.ranges.iter().skip(1)).all(|(one, next)| one.end < next.start));
                prop_assert_eq!(ranges.iter().cloned().flatten().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
                prop_assert_eq!(ranges.total(), model.len() as u64);
                let part = start / 2..start + 7;
                let inside: Vec<_> = model.range(part.clone()).copied().collect();
                prop_assert_eq!(ranges.within(part.clone()).flatten().collect::<Vec<_>>(), inside.clone());
                let outside: Vec<_> = part.clone().filter(|number| !model.contains(number)).collect();
                prop_assert_eq!(ranges.without(part.clone()).flatten().collect::<Vec<_>>(), outside);
                prop_assert_eq!(ranges.reach(start), (start..).find(|number| !model.contains(number)).unwrap());
                prop_assert_eq!(ranges.is_empty(), model.is_empty());
                prop_assert_eq!(ranges.covers(part.clone()), inside.len() as u64 == part.end - part.start);
            }
        }
    }
}
