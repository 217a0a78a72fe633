//! Corrects the load table if it differs from the sum of what the active flows reserve.

use braid_model::{Direction, MAX_LINKS};
use std::sync::Arc;

use crate::linux::sys::abi;
use braid_control::steering::{BondedLoads, FlowRow};

/// Compares the loads with the flows and computes corrections for each link.
#[derive(Debug, Default)]
pub(super) struct Heal {
    /// Idle datagram flows that have ended and have not been reported yet.
    pub(super) ended: Vec<FlowRow>,
}

/// Detects overlapping dumps. Each dump updates reservations as it runs, so the sums of another dump no longer match the loads.
#[derive(Debug, Default)]
pub(super) struct Dumps {
    begun: u64,
    open: Arc<()>,
}

/// One dump, until it is dropped.
#[derive(Debug)]
pub(super) struct DumpToken {
    number: u64,
    alone: bool,
    _open: Arc<()>,
}

impl Dumps {
    pub(super) fn begin(&mut self) -> DumpToken {
        self.begun += 1;
        DumpToken { number: self.begun, alone: Arc::strong_count(&self.open) == 1, _open: self.open.clone() }
    }

    /// Whether no other dump overlapped this one.
    pub(super) fn had_no_overlap(&self, token: &DumpToken) -> bool {
        token.alone && token.number == self.begun
    }
}

/// Reservations of the active flows, summed up by slot.
#[derive(Debug, Default)]
pub(super) struct Loads {
    loads: [[u64; 2]; MAX_LINKS],
    flows: [u32; MAX_LINKS],
    /// The largest load that one of these flows may have.
    largest: u64,
}

impl Loads {
    /// Adds these flows.
    pub(super) fn add(&mut self, rows: &[abi::FlowRow]) {
        for flow in rows.iter().map(|row| &row.flow) {
            let slot = flow.slot as usize % MAX_LINKS;
            let load = &mut self.loads[slot][usize::from(flow.direction & 1)];
            *load = load.wrapping_add(flow.reserved);
            self.flows[slot] = self.flows[slot].wrapping_add(1);
            self.largest = self.largest.max(flow.reserved).max(flow.demand);
        }
    }

    /// Adds what bonded flows weigh.
    pub(super) fn add_bonded(&mut self, bonded: &BondedLoads) {
        for (slot, weight) in bonded.iter().enumerate() {
            for (direction, load) in Direction::ALL.into_iter().zip(&mut self.loads[slot]) {
                *load = load.wrapping_add(weight.load[direction].get());
            }
            self.flows[slot] = self.flows[slot].wrapping_add(weight.flows);
        }
    }
}

/// What changed between two readings of the load table.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Changes {
    /// Number of reservations that were added, and their bytes.
    added: u64,
    bytes: u64,
    /// Number of reservations that were removed or moved.
    removed: u64,
}

impl Changes {
    pub(super) fn between(began: &abi::LoadTable, after: &abi::LoadTable) -> Self {
        Self {
            added: after.commits.wrapping_sub(began.commits),
            bytes: after.added.wrapping_sub(began.added),
            removed: u64::from(after.removals.wrapping_sub(began.removals)),
        }
    }
}

impl Heal {
    /// What to add to each link's load (modulo 2^64). A link is corrected only if it is off by more than the flows that started and ended during the
    /// dump can explain. Such a difference means that an event was missed or an entry was evicted.
    pub(super) fn corrections(&mut self, living: &Loads, load_table: &abi::LoadTable, changes: Changes) -> Vec<(u32, abi::LinkLoad)> {
        // A flow that began may be missing among those listed, and one that ended may be among them.
        let slack = i128::from(changes.bytes) + i128::from(changes.removed) * i128::from(living.largest);
        let churn = changes.added + changes.removed;
        let mut corrections = Vec::new();
        for slot in 0..MAX_LINKS {
            let link_load = &load_table.loads[slot];
            let mut correction = abi::LinkLoad::default();
            for (direction, load) in living.loads[slot].iter().enumerate() {
                let off = load.wrapping_sub(link_load.load[direction]);
                if i128::from(off as i64).abs() > slack {
                    correction.load[direction] = off;
                }
            }
            let off = living.flows[slot].wrapping_sub(link_load.flows);
            if u64::from((off as i32).unsigned_abs()) > churn {
                correction.flows = off;
            }
            if correction != abi::LinkLoad::default() {
                corrections.push((slot as u32, correction));
            }
        }
        corrections
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(slot: u32, reserved: u64) -> abi::FlowRow {
        abi::FlowRow { flow: abi::Flow { slot, reserved, ..Default::default() }, ..Default::default() }
    }

    #[test]
    fn overlapping_dumps_are_detected() {
        let mut dumps = Dumps::default();
        let first = dumps.begin();
        assert!(dumps.had_no_overlap(&first));
        let second = dumps.begin();
        assert!(!dumps.had_no_overlap(&first) && !dumps.had_no_overlap(&second));
        drop((first, second));
        let third = dumps.begin();
        assert!(dumps.had_no_overlap(&third), "a dump that failed and was dropped does not count");
    }

    fn loads(rows: &[abi::FlowRow]) -> Loads {
        let mut loads = Loads::default();
        loads.add(rows);
        loads
    }

    #[test]
    fn correct_loads_are_not_changed() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[1].load[0] = 300;
        load_table.loads[1].flows = 2;
        assert!(Heal::default().corrections(&loads(&[row(1, 100), row(1, 200)]), &load_table, Changes::default()).is_empty());
    }

    #[test]
    fn a_missed_end_is_corrected() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[1].load[0] = 1_000_000;
        load_table.loads[1].flows = 2;
        let corrections = Heal::default().corrections(&loads(&[row(1, 100)]), &load_table, Changes::default());
        assert_eq!(corrections.len(), 1);
        let (slot, link_load) = corrections[0];
        assert_eq!(slot, 1);
        assert_eq!(load_table.loads[1].load[0].wrapping_add(link_load.load[0]), 100);
        assert_eq!(load_table.loads[1].flows.wrapping_add(link_load.flows), 1);
    }

    #[test]
    fn churn_explains_small_differences_but_not_large_ones() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[0].load[0] = 250;
        load_table.loads[0].flows = 2;
        assert!(Heal::default().corrections(&loads(&[row(0, 100)]), &load_table, Changes { removed: 2, ..Changes::default() }).is_empty());
        load_table.loads[0].load[0] = 100_000;
        assert_eq!(Heal::default().corrections(&loads(&[row(0, 100)]), &load_table, Changes { removed: 2, ..Changes::default() }).len(), 1);
    }

    #[test]
    fn additions_and_removals_count_as_changes() {
        let began = abi::LoadTable { commits: u64::MAX, removals: u32::MAX, added: u64::MAX, ..Default::default() };
        let after = abi::LoadTable { commits: 1, removals: 2, added: 99, ..Default::default() };
        let Changes { added, bytes, removed } = Changes::between(&began, &after);
        assert_eq!((added, bytes, removed), (2, 100, 3));
    }

    #[test]
    fn regression_a_first_flow_that_began_during_the_dump_is_no_error() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[0] = abi::LinkLoad { load: [500_000, 0], flows: 1, ..Default::default() };
        let began = Changes { added: 1, bytes: 500_000, removed: 0 };
        assert!(Heal::default().corrections(&loads(&[]), &load_table, began).is_empty());
    }

    #[test]
    fn a_load_that_fell_below_zero_is_corrected() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[0].load[1] = 0u64.wrapping_sub(500);
        let corrections = Heal::default().corrections(&loads(&[]), &load_table, Changes::default());
        assert_eq!(load_table.loads[0].load[1].wrapping_add(corrections[0].1.load[1]), 0);
    }
}
