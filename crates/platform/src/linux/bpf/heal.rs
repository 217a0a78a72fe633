//! Keeps the loads true: what the load table holds must be what the living flows reserve.

use braid_model::{Direction, MAX_LINKS};
use std::sync::Arc;

use crate::linux::sys::abi;
use braid_control::steering::{BondedLoads, FlowRow};

/// Compares the loads with the flows and says what to add to which link.
#[derive(Debug, Default)]
pub(super) struct Heal {
    /// Datagram flows that fell idle and have not been reported yet.
    pub(super) ended: Vec<FlowRow>,
}

/// Tells dumps apart that overlap. Each brings reservations up to date as it goes, so that what another has summed up fits the loads no
/// more.
#[derive(Debug, Default)]
pub(super) struct Dumps {
    begun: u64,
    open: Arc<()>,
}

/// A dump, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    number: u64,
    alone: bool,
    _open: Arc<()>,
}

impl Dumps {
    pub(super) fn begin(&mut self) -> Turn {
        self.begun += 1;
        Turn { number: self.begun, alone: Arc::strong_count(&self.open) == 1, _open: self.open.clone() }
    }

    /// Whether no other dump was on its way at any time of this one.
    pub(super) fn undisturbed(&self, turn: &Turn) -> bool {
        turn.alone && turn.number == self.begun
    }
}

/// What living flows weigh, summed up by slot.
#[derive(Debug, Default)]
pub(super) struct Loads {
    loads: [[u64; 2]; MAX_LINKS],
    flows: [u32; MAX_LINKS],
    /// What one of them may weigh.
    largest: u64,
}

impl Loads {
    /// Adds these.
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

impl Heal {
    /// What must be added to each link (modulo 2^64), where it is off by more than the flows that came and went during the dump can
    /// explain: an event was missed, or an entry was evicted.
    pub(super) fn corrections(&mut self, living: &Loads, load_table: &abi::LoadTable, churn: u64) -> Vec<(u32, abi::LinkLoad)> {
        let slack = i128::from(churn) * i128::from(living.largest);
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
    fn dumps_that_overlap_are_told() {
        let mut dumps = Dumps::default();
        let first = dumps.begin();
        assert!(dumps.undisturbed(&first));
        let second = dumps.begin();
        assert!(!dumps.undisturbed(&first) && !dumps.undisturbed(&second));
        drop((first, second));
        let third = dumps.begin();
        assert!(dumps.undisturbed(&third), "one that failed and was dropped stands in nobody's way");
    }

    fn loads(rows: &[abi::FlowRow]) -> Loads {
        let mut loads = Loads::default();
        loads.add(rows);
        loads
    }

    #[test]
    fn true_loads_are_left_alone() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[1].load[0] = 300;
        load_table.loads[1].flows = 2;
        assert!(Heal::default().corrections(&loads(&[row(1, 100), row(1, 200)]), &load_table, 0).is_empty());
    }

    #[test]
    fn a_missed_end_is_healed() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[1].load[0] = 1_000_000;
        load_table.loads[1].flows = 2;
        let corrections = Heal::default().corrections(&loads(&[row(1, 100)]), &load_table, 0);
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
        assert!(Heal::default().corrections(&loads(&[row(0, 100)]), &load_table, 2).is_empty());
        load_table.loads[0].load[0] = 100_000;
        assert_eq!(Heal::default().corrections(&loads(&[row(0, 100)]), &load_table, 2).len(), 1);
    }

    #[test]
    fn a_load_that_fell_below_zero_is_healed_too() {
        let mut load_table = abi::LoadTable::default();
        load_table.loads[0].load[1] = 0u64.wrapping_sub(500);
        let corrections = Heal::default().corrections(&loads(&[]), &load_table, 0);
        assert_eq!(load_table.loads[0].load[1].wrapping_add(corrections[0].1.load[1]), 0);
    }
}
