//! Priorities of entries: each level of the space has a band of its own, in which the order of a slice's priorities stays.

use std::collections::BTreeMap;

use crate::space::Level;

/// Priorities of a band. The first one is that of guards.
const BAND: u16 = 5041;
/// The slicer's own entries.
pub(crate) const SYSTEM: u16 = u16::MAX;

/// Priorities that keep their distances: at the start, around the default of 0x8000, and at the end. Those between share what is left.
const LOW: u16 = 2600;
const MIDDLE: (u16, u16) = (32_468, 33_068);
const HIGH: u16 = 64_535;
/// Their places in the band.
const MIDDLE_AT: u16 = 2800;
const HIGH_AT: u16 = 4040;

/// The priority of the entries that keep packets of a level from lower ones.
pub(crate) fn guard(level: Level) -> u16 {
    u16::from(level.number()) * BAND
}

/// The place of a priority in its band, if all places are free.
fn ideal(priority: u16) -> u16 {
    let between = |from: u16, to: u16, at: u16, end: u16| {
        let part = u32::from(priority - from) * u32::from(end - at) / u32::from(to - from);
        at + part as u16
    };
    match priority {
        0..LOW => 1 + priority,
        LOW..=32_467 => between(LOW, MIDDLE.0, LOW + 1, MIDDLE_AT),
        32_468..=33_068 => MIDDLE_AT + (priority - MIDDLE.0),
        33_069..=64_534 => between(MIDDLE.1, HIGH, MIDDLE_AT + (MIDDLE.1 - MIDDLE.0) + 1, HIGH_AT),
        _ => HIGH_AT + (priority - HIGH),
    }
}

/// The priorities that a slice uses in one level of a table.
#[derive(Debug, Clone, Default)]
pub(crate) struct Priorities {
    /// Place in the band, and number of users.
    used: BTreeMap<u16, (u16, usize)>,
}

impl Priorities {
    /// Takes a place. `None` if there is none between those of the neighbours; then [`Self::spread`] helps.
    pub(crate) fn take(&mut self, level: Level, priority: u16) -> Option<u16> {
        if let Some((place, users)) = self.used.get_mut(&priority) {
            *users += 1;
            return Some(guard(level) + *place);
        }
        let below = self.used.range(..priority).next_back().map_or(0, |(_, (place, _))| *place);
        let above = self.used.range(priority..).next().map_or(BAND, |(_, (place, _))| *place);
        let place = Some(ideal(priority)).filter(|place| (below + 1..above).contains(place)).unwrap_or(below.midpoint(above));
        if place <= below {
            return None;
        }
        self.used.insert(priority, (place, 1));
        Some(guard(level) + place)
    }

    /// Moves all to equal distances. The rows of all that have places must be written anew.
    pub(crate) fn spread(&mut self) {
        let count = self.used.len() as u32 + 1;
        for (at, (place, _)) in (1u32..).zip(self.used.values_mut()) {
            *place = (at * u32::from(BAND) / count) as u16;
        }
    }

    /// Gives a place back.
    pub(crate) fn release(&mut self, priority: u16) {
        if let Some((_, users)) = self.used.get_mut(&priority) {
            *users -= 1;
            if *users == 0 {
                self.used.remove(&priority);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_keep_the_order_and_stay_within_the_band() {
        let all: Vec<u16> = (0..=u16::MAX).map(ideal).collect();
        assert!(all.is_sorted() && all.first() == Some(&1) && all.iter().all(|place| *place < BAND), "{:?}", all.last());
        assert!(guard(Level::staged(3)) + (BAND - 1) < SYSTEM);
        let mut priorities = Priorities::default();
        let level = Level::of(1);
        let mut places = BTreeMap::new();
        for priority in [0, 1, 3100, 65_000, 0x8000, 0x8001, 20_000, 20_003, 3, 2, 65_535, 40_000] {
            places.insert(priority, priorities.take(level, priority).unwrap());
        }
        assert!(places.values().is_sorted() && places.values().all(|place| *place > guard(level) && *place < guard(Level::users(1))));
        assert_eq!(priorities.take(level, 3100), places.get(&3100).copied());
    }

    #[test]
    fn a_place_that_is_not_there_is_made() {
        let (mut priorities, level) = (Priorities::default(), Level::of(0));
        let missing = (10_000..20_000).rev().find(|priority| priorities.take(level, *priority).is_none()).unwrap();
        let count = priorities.used.len();
        priorities.spread();
        let places: Vec<Option<u16>> = (missing..20_000).map(|priority| priorities.take(level, priority)).collect();
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}");
        priorities.release(missing);
        assert_eq!(priorities.used.len(), count);
    }
}
