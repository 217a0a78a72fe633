//! Sliding window of received numbers.

/// Set of the last `N` numbers received, one bit each. Neither its size nor its running time depends on values that the other end chooses.
#[derive(Debug, Default)]
pub(crate) struct Window<const N: u64> {
    /// One beyond the highest number received.
    next: u64,
    /// Empty until the first number is received.
    bits: Vec<u64>,
}

impl<const N: u64> Window<N> {
    /// Bits kept: one word more than `N`, so that clearing the word of the highest number clears no remembered number.
    const RING: u64 = N + 64;

    /// Whether the number was received, or is too old to tell.
    pub(crate) fn contains(&self, number: u64) -> bool {
        number < self.next && (self.next - number > N || self.bits.get(Self::word(number)).is_some_and(|bits| bits & bit(number) != 0))
    }

    /// Adds a number. Returns whether it is new.
    pub(crate) fn insert(&mut self, number: u64) -> bool {
        if self.contains(number) {
            return false;
        }
        if self.bits.is_empty() {
            self.bits = vec![0; Self::RING as usize / 64];
        }
        if number >= self.next {
            if number - self.next >= N {
                self.bits.fill(0);
            } else {
                // Clear the rest of the first word, then whole words. Bits of future numbers are never read.
                (self.next..(self.next | 63) + 1).for_each(|passed| self.bits[Self::word(passed)] &= !bit(passed));
                ((self.next >> 6) + 1..=number >> 6).for_each(|at| self.bits[Self::word(at << 6)] = 0);
            }
            self.next = number + 1;
        }
        self.bits[Self::word(number)] |= bit(number);
        true
    }

    /// Memory in bytes.
    pub(crate) fn cost(&self) -> usize {
        size_of_val(self.bits.as_slice())
    }

    fn word(number: u64) -> usize {
        (number % Self::RING / 64) as usize
    }
}

fn bit(number: u64) -> u64 {
    1 << (number % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_number_is_new_exactly_once(steps in proptest::collection::vec(prop_oneof![0u64..200, 8190u64..8400, 8190u64..8400, 0u64..40_000, (1u64 << 62) - 9..1 << 62], 1..200)) {
            let (mut window, mut model) = (Window::<8192>::default(), BTreeSet::new());
            for number in steps {
                let floor = model.last().map_or(0, |last| (last + 1u64).saturating_sub(8192));
                prop_assert_eq!(window.insert(number), number >= floor && !model.contains(&number), "{}", number);
                prop_assert!(window.contains(number));
                model.insert(number);
            }
        }
    }
}
