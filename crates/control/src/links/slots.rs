//! Assigns links to slots of the connection rule.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use braid_model::{LinkIndex, MAX_LINKS};

/// Keeps each link in one slot while its interface exists. A free slot is reused as late as possible, since flows of its previous link may
/// still end.
#[derive(Debug)]
pub(super) struct Slots {
    held: BTreeMap<LinkIndex, usize>,
    /// Free slots; the one that has been free longest comes first.
    free: VecDeque<usize>,
}

impl Default for Slots {
    fn default() -> Self {
        Self { held: BTreeMap::new(), free: (0..MAX_LINKS).collect() }
    }
}

impl Slots {
    /// Assigns a slot to every link and frees those of removed links. Returns the links beyond [`MAX_LINKS`], which get no slot.
    pub(super) fn update(&mut self, links: &BTreeSet<LinkIndex>) -> Vec<LinkIndex> {
        let free = &mut self.free;
        self.held.retain(|link, slot| {
            let stays = links.contains(link);
            free.extend((!stays).then_some(*slot));
            stays
        });
        let mut without = Vec::new();
        for link in links {
            if self.held.contains_key(link) {
                continue;
            }
            match self.free.pop_front() {
                Some(slot) => {
                    self.held.insert(*link, slot);
                }
                None => without.push(*link),
            }
        }
        without
    }

    /// Slot of a link.
    pub(super) fn get(&self, link: LinkIndex) -> Option<usize> {
        self.held.get(&link).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(links: impl IntoIterator<Item = u32>) -> BTreeSet<LinkIndex> {
        links.into_iter().map(LinkIndex).collect()
    }

    #[test]
    fn a_link_keeps_its_slot_and_free_ones_are_reused_late() {
        let mut slots = Slots::default();
        slots.update(&set([4, 7]));
        assert_eq!((slots.get(LinkIndex(4)), slots.get(LinkIndex(7))), (Some(0), Some(1)));
        slots.update(&set([7]));
        slots.update(&set([7, 9]));
        assert_eq!((slots.get(LinkIndex(7)), slots.get(LinkIndex(9))), (Some(1), Some(2)));
    }

    #[test]
    fn excess_links_are_returned() {
        let mut slots = Slots::default();
        assert_eq!(slots.update(&set(1..=33)), [LinkIndex(33)]);
        slots.update(&set(2..=33));
        assert_eq!(slots.get(LinkIndex(33)), Some(0), "a free slot is reused if there is no other");
    }
}
