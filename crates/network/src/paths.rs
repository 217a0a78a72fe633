//! Paths and trees. All ways of delivery are one: a spanning tree, and the places at which a packet is delivered.
//!
//! A switch sends a packet along each edge of the tree behind which there is a receiver, except where it came from. So each link carries a packet once,
//! and nothing can loop, from wherever it comes. One receiver makes the shortest path (of the tree that starts at the receiver), two attachments of a
//! host make a bicast, all attachments an n-cast (thesis section 5.5.1), the members of a group multicast (section 5.5.3), all edge ports broadcast.
//!
//! The thesis installs one multicast tree for each sender. One tree for all senders has the same property on each link, and n times fewer entries.

use std::collections::{BTreeMap, BTreeSet};

use braid_openflow::ids::{DatapathId, PortNo};

use crate::ids::Place;

/// Cost of a link. Paths have the least sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Weight(pub u32);

impl Default for Weight {
    fn default() -> Self {
        Self(10)
    }
}

/// What a link weighs more for each flow of a spread that uses it already: more than any path without it.
const BURDEN: u32 = 1 << 28;

/// Ports out of which a switch sends the packets of a delivery. A switch that is not in the map has no entry for it.
pub type Outputs = BTreeMap<DatapathId, BTreeSet<PortNo>>;

/// Switches and usable links.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Graph {
    switches: BTreeMap<DatapathId, BTreeMap<PortNo, (Place, Weight)>>,
}

impl Graph {
    /// Adds a switch without links.
    pub fn add_switch(&mut self, datapath: DatapathId) {
        self.switches.entry(datapath).or_default();
    }

    /// Adds a link in both directions.
    pub fn add_link(&mut self, one: Place, other: Place, weight: Weight) {
        for (from, to) in [(one, other), (other, one)] {
            self.switches.entry(from.datapath).or_default().insert(from.port, (to, weight));
        }
    }

    /// The same graph with links that paths use only where there is no other, the less the more often they count here. They are named by either end.
    pub fn burdened(&self, counts: &BTreeMap<Place, u32>) -> Self {
        let mut graph = self.clone();
        for (datapath, links) in &mut graph.switches {
            for (port, (to, weight)) in links {
                let count = counts.get(&Place { datapath: *datapath, port: *port }).or_else(|| counts.get(to));
                weight.0 = weight.0.saturating_add(count.copied().unwrap_or_default().saturating_mul(BURDEN));
            }
        }
        graph
    }

    /// The other end of a link.
    pub fn peer(&self, place: Place) -> Option<Place> {
        Some(self.switches.get(&place.datapath)?.get(&place.port)?.0)
    }

    fn has(&self, datapath: DatapathId) -> bool {
        self.switches.contains_key(&datapath)
    }
}

/// A spanning tree of each connected part of the graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forest {
    /// For each switch the port to its parent and the parent's port to it; `None` at a root.
    parents: BTreeMap<DatapathId, Option<(PortNo, Place)>>,
    /// Parents come before their children.
    order: Vec<DatapathId>,
}

impl Forest {
    /// The tree of shortest paths to `root`, and trees of what is not connected to it. Links of switches in `avoided` are not used. Among paths of equal
    /// weight the one over smaller numbers is taken, so that the same graph has the same trees after a restart.
    pub fn grow(graph: &Graph, root: Option<DatapathId>, avoided: &BTreeSet<DatapathId>) -> Self {
        let mut forest = Self { parents: BTreeMap::new(), order: Vec::new() };
        for start in root.into_iter().filter(|root| graph.has(*root)).chain(graph.switches.keys().copied()) {
            if !forest.parents.contains_key(&start) {
                forest.grow_from(graph, start, avoided);
            }
        }
        forest
    }

    /// Source: Dijkstra, 1959.
    fn grow_from(&mut self, graph: &Graph, start: DatapathId, avoided: &BTreeSet<DatapathId>) {
        let mut reached = BTreeMap::from([(start, (0u64, None))]);
        let mut next = BTreeSet::from([(0u64, start)]);
        while let Some((distance, datapath)) = next.pop_first() {
            let parent = reached.get(&datapath).and_then(|(_, parent)| *parent);
            self.parents.insert(datapath, parent);
            self.order.push(datapath);
            if avoided.contains(&datapath) {
                continue;
            }
            for (port, (to, weight)) in graph.switches.get(&datapath).into_iter().flatten() {
                if self.parents.contains_key(&to.datapath) || avoided.contains(&to.datapath) {
                    continue;
                }
                let candidate = (distance + u64::from(weight.0), Some((to.port, Place { datapath, port: *port })));
                let known = reached.get(&to.datapath).copied();
                let closer = known.is_none_or(|(known, parent)| (candidate.0, key(candidate.1)) < (known, key(parent)));
                if closer {
                    if let Some((known, _)) = known {
                        next.remove(&(known, to.datapath));
                    }
                    reached.insert(to.datapath, candidate);
                    next.insert((candidate.0, to.datapath));
                }
            }
        }
    }

    /// Ports out of which each switch sends what is for `members`. Every switch of a tree with members is in it.
    pub fn outputs(&self, members: &BTreeSet<Place>) -> Outputs {
        let mut below: BTreeMap<DatapathId, usize> = BTreeMap::new();
        for member in members.iter().filter(|member| self.parents.contains_key(&member.datapath)) {
            *below.entry(member.datapath).or_default() += 1;
        }
        for datapath in self.order.iter().rev() {
            let count = below.get(datapath).copied().unwrap_or_default();
            if let Some(Some((_, parent))) = self.parents.get(datapath) {
                *below.entry(parent.datapath).or_default() += count;
            }
        }
        let mut outputs = Outputs::new();
        let mut totals: BTreeMap<DatapathId, usize> = BTreeMap::new();
        for datapath in &self.order {
            let own = below.get(datapath).copied().unwrap_or_default();
            let parent = self.parents.get(datapath).copied().flatten();
            let total = parent.and_then(|(_, parent)| totals.get(&parent.datapath).copied()).unwrap_or(own);
            totals.insert(*datapath, total);
            if total == 0 {
                continue;
            }
            outputs.entry(*datapath).or_default();
            if let Some((port, parent)) = parent {
                if total > own {
                    outputs.entry(*datapath).or_default().insert(port);
                }
                if own > 0 {
                    outputs.entry(parent.datapath).or_default().insert(parent.port);
                }
            }
        }
        for member in members {
            outputs.entry(member.datapath).and_modify(|ports| {
                ports.insert(member.port);
            });
        }
        outputs
    }

    /// Links between each switch and the nearest of `places`, along the tree.
    pub fn distances(&self, places: &BTreeSet<Place>) -> BTreeMap<DatapathId, u32> {
        let mut distances: BTreeMap<DatapathId, u32> = places.iter().map(|place| (place.datapath, 0)).collect();
        // Up, then down: the nearest is below, or beyond the parent.
        for datapath in self.order.iter().rev() {
            if let (Some(own), Some(Some((_, parent)))) = (distances.get(datapath).copied(), self.parents.get(datapath)) {
                let nearest = distances.entry(parent.datapath).or_insert(u32::MAX);
                *nearest = (*nearest).min(own + 1);
            }
        }
        for datapath in &self.order {
            let parent = self.parents.get(datapath).copied().flatten().and_then(|(_, parent)| distances.get(&parent.datapath).copied());
            if let Some(above) = parent {
                let nearest = distances.entry(*datapath).or_insert(u32::MAX);
                *nearest = (*nearest).min(above + 1);
            }
        }
        distances
    }

    /// The port of `datapath` to its parent.
    pub fn port_to_root(&self, datapath: DatapathId) -> Option<PortNo> {
        self.parents.get(&datapath).copied().flatten().map(|(port, _)| port)
    }

    /// Switches on the path from one to another, both included. Empty if they are not connected.
    pub fn path(&self, from: DatapathId, to: DatapathId) -> Vec<DatapathId> {
        let (mut up, down) = (self.to_root(from), self.to_root(to));
        let Some(meeting) = up.iter().position(|datapath| down.contains(datapath)) else { return Vec::new() };
        let common = up.get(meeting).copied();
        up.truncate(meeting + 1);
        up.extend(down.iter().rev().skip_while(|datapath| Some(**datapath) != common).skip(1));
        up
    }

    /// The links from a switch to the root, each by its end that is nearer to the switch.
    pub fn links_to_root(&self, from: DatapathId) -> Vec<Place> {
        self.to_root(from).into_iter().filter_map(|datapath| Some(Place { datapath, port: self.port_to_root(datapath)? })).collect()
    }

    fn to_root(&self, datapath: DatapathId) -> Vec<DatapathId> {
        let parent = |datapath: &DatapathId| self.parents.get(datapath).copied().flatten().map(|(_, parent)| parent.datapath);
        let first = Some(datapath).filter(|datapath| self.parents.contains_key(datapath));
        std::iter::successors(first, parent).collect()
    }
}

/// Orders parents by their numbers.
fn key(parent: Option<(PortNo, Place)>) -> Option<(Place, PortNo)> {
    parent.map(|(port, parent)| (parent, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Switches 1 to 4 in a ring, and 5 behind 3. Port n leads to switch n.
    fn ring() -> Graph {
        let mut graph = Graph::default();
        for (one, other) in [(1, 2), (2, 3), (3, 4), (4, 1), (3, 5)] {
            graph.add_link(Place::new(one, other as u32), Place::new(other, one as u32), Weight::default());
        }
        graph
    }

    fn ports(outputs: &Outputs, datapath: u64) -> Vec<u32> {
        outputs.get(&DatapathId(datapath)).into_iter().flatten().map(|port| port.0).collect()
    }

    #[test]
    fn one_receiver_gets_shortest_paths() {
        let forest = Forest::grow(&ring(), Some(DatapathId(3)), &BTreeSet::new());
        let outputs = forest.outputs(&BTreeSet::from([Place::new(3, 9)]));
        let all: Vec<_> = (1..=5).map(|datapath| ports(&outputs, datapath)).collect();
        assert_eq!(all, [vec![2], vec![3], vec![9], vec![3], vec![3]], "of equal paths the one over the smaller number");
        assert_eq!(forest.path(DatapathId(1), DatapathId(5)), [1, 2, 3, 5].map(DatapathId));
    }

    #[test]
    fn several_receivers_share_links() {
        let forest = Forest::grow(&ring(), Some(DatapathId(3)), &BTreeSet::new());
        let outputs = forest.outputs(&BTreeSet::from([Place::new(1, 8), Place::new(5, 9), Place::new(5, 10)]));
        let all: Vec<_> = (1..=5).map(|datapath| ports(&outputs, datapath)).collect();
        assert_eq!(all, [vec![2, 8], vec![1, 3], vec![2, 5], vec![3], vec![3, 9, 10]]);
        let distances = forest.distances(&BTreeSet::from([Place::new(1, 8), Place::new(5, 9)]));
        assert_eq!(distances.into_values().collect::<Vec<_>>(), [0, 1, 1, 2, 0]);
    }

    #[test]
    fn burdened_links_are_used_only_if_there_is_no_other_way() {
        let root = Some(DatapathId(3));
        let first = Forest::grow(&ring(), root, &BTreeSet::new()).links_to_root(DatapathId(1));
        assert_eq!(first, [Place::new(1, 2), Place::new(2, 3)]);
        let counts: BTreeMap<Place, u32> = first.into_iter().map(|place| (place, 1)).collect();
        let second = Forest::grow(&ring().burdened(&counts), root, &BTreeSet::new());
        assert_eq!(second.links_to_root(DatapathId(1)), [Place::new(1, 4), Place::new(4, 3)]);
        assert_eq!(second.links_to_root(DatapathId(2)), [Place::new(2, 3)], "all its ways are burdened");
        assert_eq!(second.links_to_root(DatapathId(5)), [Place::new(5, 3)]);
        assert_eq!(second.links_to_root(DatapathId(9)), []);
    }

    #[test]
    fn avoided_switches_carry_nothing_for_others() {
        let forest = Forest::grow(&ring(), Some(DatapathId(3)), &BTreeSet::from([DatapathId(2)]));
        let outputs = forest.outputs(&BTreeSet::from([Place::new(3, 9)]));
        assert_eq!((ports(&outputs, 1), ports(&outputs, 2)), (vec![4], vec![]));
        assert!(!outputs.contains_key(&DatapathId(2)));
        assert_eq!(forest.path(DatapathId(1), DatapathId(2)), []);
    }
}
