//! Sets of numbers kept as ranges.

use std::collections::VecDeque;
use std::ops::Range;

/// A set of `u64` as disjoint, non-adjacent, rising ranges. Adding at the end, the usual case, is O(1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RangeSet(VecDeque<Range<u64>>);

impl RangeSet {
    /// How many ranges.
    pub(crate) fn ranges(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Range<u64>> {
        self.0.iter()
    }

    pub(crate) fn first(&self) -> Option<Range<u64>> {
        self.0.front().cloned()
    }

    pub(crate) fn last(&self) -> Option<Range<u64>> {
        self.0.back().cloned()
    }

    pub(crate) fn pop_first(&mut self) -> Option<Range<u64>> {
        self.0.pop_front()
    }

    pub(crate) fn contains(&self, number: u64) -> bool {
        let at = self.0.partition_point(|range| range.end <= number);
        self.0.get(at).is_some_and(|range| range.start <= number)
    }

    /// Adds `added`; whether all of it was new.
    pub(crate) fn insert(&mut self, added: Range<u64>) -> bool {
        if added.is_empty() {
            return true;
        }
        if let Some(last) = self.0.back_mut()
            && last.end == added.start
        {
            last.end = added.end;
            return true;
        }
        // The ranges that touch or overlap it become one with it.
        let from = self.0.partition_point(|range| range.end < added.start);
        let to = self.0.partition_point(|range| range.start <= added.end);
        if from >= to {
            self.0.insert(from, added);
            return true;
        }
        let fresh = self.0.range(from..to).all(|range| range.end <= added.start || range.start >= added.end);
        let merged = self.0[from].start.min(added.start)..self.0[to - 1].end.max(added.end);
        self.0.drain(from + 1..to);
        self.0[from] = merged;
        fresh
    }

    /// Takes `removed` out.
    pub(crate) fn remove(&mut self, removed: Range<u64>) {
        let from = self.0.partition_point(|range| range.end <= removed.start);
        let to = self.0.partition_point(|range| range.start < removed.end);
        if removed.is_empty() || from >= to {
            return;
        }
        let head = self.0[from].start..removed.start;
        let tail = removed.end..self.0[to - 1].end;
        self.0.drain(from..to);
        for rest in [tail, head] {
            if !rest.is_empty() {
                self.0.insert(from, rest);
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
        fn is_the_set_it_stands_for(steps in proptest::collection::vec((any::<bool>(), 0u64..60, 0u64..12), 0..60)) {
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
                prop_assert!(ranges.0.iter().zip(ranges.0.iter().skip(1)).all(|(one, next)| one.end < next.start));
                prop_assert_eq!(ranges.iter().cloned().flatten().collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
                prop_assert!((0..80).all(|number| ranges.contains(number) == model.contains(&number)));
            }
        }
    }
}
