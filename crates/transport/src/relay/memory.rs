//! What bonds may hold at the relay, of one client and of all together.
//!
//! One bond's part is bounded by its credit. Many bonds are bounded by what they hold: promising each its whole part would let few clients
//! in, and hardly any uses it.

use std::collections::BTreeMap;

use braid_bond::{BondId, Limits};
use braid_model::ByteCount;

/// Bytes of streams and messages, received and not passed on yet, or kept until they are acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Of all bonds of one client. By default a single bond stays below this by itself.
    pub client: ByteCount,
    /// Of all bonds.
    pub total: ByteCount,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { client: ByteCount::new(160 << 20), total: ByteCount::new(1 << 30) }
    }
}

/// No bond is given a smaller part: the protocol promises this much before a word is spoken.
const LEAST: u64 = 16 << 20;

impl MemoryLimits {
    /// The limits of a new bond of a client that has so many others: the more it has, the less each may hold.
    pub(super) fn part(self, flows: usize, others: usize) -> Limits {
        let whole = Limits { flows, ..Limits::default() };
        // Both directions, and a quarter of each for messages.
        let own = self.client.get() / 5 * 2 / (others as u64 + 1);
        let window = own.clamp(LEAST, whole.total_window);
        Limits { total_window: window, max_window: whole.max_window.min(window), send_buffer: whole.send_buffer.min(window), ..whole }
    }

    /// The bonds that must end so that nobody holds too much: those that hold most, first of clients with too much, then of all.
    /// `held` is, by bond, its owner and what it holds.
    pub(super) fn excess<K: Ord + Copy>(self, held: &[(BondId, K, ByteCount)]) -> Vec<(BondId, Excess)> {
        let mut left = held.to_vec();
        left.sort_by_key(|(_, _, bytes)| std::cmp::Reverse(*bytes));
        let mut owners: BTreeMap<K, u64> = BTreeMap::new();
        for (_, owner, bytes) in &left {
            *owners.entry(*owner).or_default() += bytes.get();
        }
        let mut ending = Vec::new();
        left.retain(|(bond, owner, bytes)| {
            let sum = owners.entry(*owner).or_default();
            let over = *sum > self.client.get();
            if over {
                *sum -= bytes.get();
                ending.push((*bond, Excess::Client));
            }
            !over
        });
        let mut sum: u64 = left.iter().map(|(_, _, bytes)| bytes.get()).sum();
        for (bond, _, bytes) in left {
            if sum <= self.total.get() {
                break;
            }
            sum -= bytes.get();
            ending.push((bond, Excess::Total));
        }
        ending
    }
}

/// Whose part was too much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Excess {
    /// The client's own.
    Client,
    /// All clients' together.
    Total,
}

impl Excess {
    /// For the client and the log.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Client => "its client holds more of the relay's memory than one client may",
            Self::Total => "the relay's memory is used up, and this bond holds most of it",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(memory: MemoryLimits, list: &[(u8, u8, u64)]) -> Vec<(u8, Excess)> {
        let held: Vec<_> = list.iter().map(|(bond, owner, bytes)| (BondId([*bond; 16]), *owner, ByteCount::new(*bytes))).collect();
        memory.excess(&held).into_iter().map(|(bond, why)| (bond.0[0], why)).collect()
    }

    #[test]
    fn who_holds_most_goes_first_and_others_stay() {
        let memory = MemoryLimits { client: ByteCount::new(100), total: ByteCount::new(150) };
        assert_eq!(ended(memory, &[(1, 1, 60), (2, 1, 40), (3, 2, 50)]), []);
        assert_eq!(ended(memory, &[(1, 1, 60), (2, 1, 50), (3, 2, 70)]), [(1, Excess::Client)]);
        assert_eq!(ended(memory, &[(1, 1, 60), (2, 1, 40), (3, 2, 70)]), [(3, Excess::Total)]);
        let many = [(1, 1, 500), (2, 1, 400), (3, 2, 90), (4, 3, 80)];
        assert_eq!(ended(memory, &many), [(1, Excess::Client), (2, Excess::Client), (3, Excess::Total)]);
    }

    #[test]
    fn one_bond_fits_and_many_have_less_each() {
        let memory = MemoryLimits::default();
        let whole = memory.part(7, 0);
        assert_eq!(whole, Limits { flows: 7, ..Limits::default() });
        assert!(whole.total_window * 5 / 2 <= memory.client.get(), "a single bond never goes beyond");
        assert_eq!((memory.part(7, 1).total_window, memory.part(7, 15).total_window), (32 << 20, 16 << 20));
    }
}
