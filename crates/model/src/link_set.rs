//! Sets of links.

use std::ops::{BitAnd, BitOr, Sub};

/// Maximum number of links that Braid schedules at once.
pub const MAX_LINKS: usize = 32;

/// A set of link slots or of path numbers, one bit each, from 0 to 63.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LinkSet(pub u64);

impl LinkSet {
    /// The empty set.
    pub const EMPTY: Self = Self(0);
    /// The set of all 64 elements.
    pub const ALL: Self = Self(u64::MAX);
    /// Maximum number of elements.
    pub const CAPACITY: usize = 64;

    /// The set that contains only `link`; empty if `link` is [`CAPACITY`](Self::CAPACITY) or more.
    pub const fn only(link: usize) -> Self {
        Self(if link < Self::CAPACITY { 1 << link } else { 0 })
    }

    /// Whether `link` is in the set.
    pub const fn contains(self, link: usize) -> bool {
        self.0 & Self::only(link).0 != 0
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Adds `link`. Does nothing if `link` is [`CAPACITY`](Self::CAPACITY) or more.
    pub fn insert(&mut self, link: usize) {
        *self = *self | Self::only(link);
    }

    /// The links in ascending order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let link = rest.trailing_zeros() as usize;
            // Clear the lowest set bit.
            rest &= rest.wrapping_sub(1);
            (link < Self::CAPACITY).then_some(link)
        })
    }
}

impl BitAnd for LinkSet {
    type Output = Self;
    /// Intersection.
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOr for LinkSet {
    type Output = Self;
    /// Union.
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Sub for LinkSet {
    type Output = Self;
    /// Difference: the links that are not in `other`.
    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl FromIterator<usize> for LinkSet {
    /// The set of these links. Links of [`CAPACITY`](LinkSet::CAPACITY) or more are ignored.
    fn from_iter<I: IntoIterator<Item = usize>>(links: I) -> Self {
        links.into_iter().map(Self::only).fold(Self::EMPTY, Self::bitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn behaves_like_a_set_of_link_numbers(one in any::<u64>(), other in any::<u64>(), link in 0usize..70) {
            let (one, other) = (LinkSet(one), LinkSet(other));
            prop_assert_eq!(one.iter().collect::<LinkSet>(), one);
            prop_assert!(one.iter().is_sorted());
            prop_assert_eq!(one.contains(link), one.iter().any(|of| of == link));
            let both = |of: usize| (one.contains(of), other.contains(of));
            prop_assert!((0..64).all(|of| (one & other).contains(of) == (both(of) == (true, true))));
            prop_assert!((0..64).all(|of| (one | other).contains(of) == (both(of) != (false, false))));
            prop_assert!((0..64).all(|of| (one - other).contains(of) == (both(of) == (true, false))));
            let mut more = one;
            more.insert(link);
            prop_assert_eq!(more.contains(link), link < LinkSet::CAPACITY);
            prop_assert_eq!((more - LinkSet::only(link)).is_empty(), (one - LinkSet::only(link)).is_empty());
        }
    }
}
