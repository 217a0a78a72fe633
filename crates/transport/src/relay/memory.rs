//! Limits the memory of bonds at the relay, per client and in total.
//!
//! The credit of a bond bounds its memory. The sum over many bonds is bounded by ending bonds that actually use too much: reserving the full amount
//! for each bond would admit few clients, and hardly any bond uses it.

use std::collections::BTreeMap;

use braid_bond::{BondId, Limits};
use braid_model::ByteCount;

/// Limits in bytes of streams and messages that are received and not forwarded yet, or kept until they are acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// All bonds of one client. With the default, a single bond cannot exceed it.
    pub client: ByteCount,
    /// All bonds together.
    pub total: ByteCount,
}

impl Default for MemoryLimits {
    fn default() -> Self {
        Self { client: ByteCount::new(160 << 20), total: ByteCount::new(1 << 30) }
    }
}

/// Smallest window of a bond: the protocol grants this much initially.
const MIN_WINDOW: u64 = 16 << 20;

impl MemoryLimits {
    /// The limits of a new bond of a client that has `others` other bonds. The more bonds, the less each may hold.
    pub(super) fn part(self, flows: usize, others: usize) -> Limits {
        let whole = Limits { flows, ..Limits::default() };
        // Both directions, plus a quarter of each for messages.
        let own = self.client.get() / 5 * 2 / (others as u64 + 1);
        let window = own.clamp(MIN_WINDOW, whole.total_window);
        Limits { total_window: window, max_window: whole.max_window.min(window), send_buffer: whole.send_buffer.min(window), ..whole }
    }

    /// The bonds to end so that no limit is exceeded: the largest ones first, first of clients over their limit, then of all clients. `held` lists
    /// each bond with its owner and its memory.
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

/// The limit that was exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Excess {
    /// The limit of the client.
    Client,
    /// The limit of all clients together.
    Total,
}

impl Excess {
    /// Reason for the client and the log.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Client => "the client uses more of the relay's memory than allowed",
            Self::Total => "the relay's memory limit is reached, and this bond uses the most",
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
    fn the_largest_bonds_end_first_and_others_stay() {
        let memory = MemoryLimits { client: ByteCount::new(100), total: ByteCount::new(150) };
        assert_eq!(ended(memory, &[(1, 1, 60), (2, 1, 40), (3, 2, 50)]), []);
        assert_eq!(ended(memory, &[(1, 1, 60), (2, 1, 50), (3, 2, 70)]), [(1, Excess::Client)]);
        assert_eq!(ended(memory, &[(1, 1, 60), (2, 1, 40), (3, 2, 70)]), [(3, Excess::Total)]);
        let many = [(1, 1, 500), (2, 1, 400), (3, 2, 90), (4, 3, 80)];
        assert_eq!(ended(memory, &many), [(1, Excess::Client), (2, Excess::Client), (3, Excess::Total)]);
    }

    #[test]
    fn one_bond_fits_and_many_bonds_get_less_each() {
        let memory = MemoryLimits::default();
        let whole = memory.part(7, 0);
        assert_eq!(whole, Limits { flows: 7, ..Limits::default() });
        assert!(whole.total_window * 5 / 2 <= memory.client.get(), "a single bond never exceeds the limit");
        assert_eq!((memory.part(7, 1).total_window, memory.part(7, 15).total_window), (32 << 20, 16 << 20));
    }
}
