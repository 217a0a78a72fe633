//! Which link stands in which slot of the scheduling rule.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::{LinkIndex, MAX_LINKS};

/// Keeps each link in one slot while its device exists. A free slot is reused as late as possible, since flows of the link that
/// had it may still end.
#[derive(Debug, Default)]
pub(super) struct Slots {
    held: BTreeMap<LinkIndex, usize>,
    next: usize,
}

impl Slots {
    /// Gives every link a slot and takes those of links that are gone. Links beyond [`MAX_LINKS`] get none and are returned.
    pub(super) fn update(&mut self, links: &BTreeSet<LinkIndex>) -> Vec<LinkIndex> {
        self.held.retain(|link, _| links.contains(link));
        let mut without = Vec::new();
        for link in links {
            if self.held.contains_key(link) {
                continue;
            }
            let taken: BTreeSet<_> = self.held.values().copied().collect();
            let free = (0..MAX_LINKS).map(|step| (self.next + step) % MAX_LINKS).find(|slot| !taken.contains(slot));
            match free {
                Some(slot) => {
                    self.held.insert(*link, slot);
                    self.next = (slot + 1) % MAX_LINKS;
                }
                None => without.push(*link),
            }
        }
        without
    }

    /// The link's slot.
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
    fn a_link_keeps_its_slot_and_a_free_one_rests() {
        let mut slots = Slots::default();
        slots.update(&set([4, 7]));
        assert_eq!((slots.get(LinkIndex(4)), slots.get(LinkIndex(7))), (Some(0), Some(1)));
        slots.update(&set([7]));
        slots.update(&set([7, 9]));
        assert_eq!((slots.get(LinkIndex(7)), slots.get(LinkIndex(9))), (Some(1), Some(2)));
    }

    #[test]
    fn too_many_links_are_named() {
        let mut slots = Slots::default();
        assert_eq!(slots.update(&set(1..=33)), [LinkIndex(33)]);
        slots.update(&set(2..=33));
        assert_eq!(slots.get(LinkIndex(33)), Some(0), "a free slot is used again when there is no other");
    }
}
