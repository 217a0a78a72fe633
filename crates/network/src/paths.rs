//! Paths and trees. All ways of delivery are one: a spanning tree, and the places at which a packet is delivered.
//!
//! A switch sends a packet along each edge of the tree behind which there is a receiver, except where it came from. So each link carries a packet once,
//! and nothing can loop, from wherever it comes. One receiver makes the shortest path (of the tree that starts at the receiver), two attachments of a
//! host make a bicast, all attachments an n-cast (thesis section 5.5.1), the members of a group multicast (section 5.5.3), all edge ports broadcast.
//!
//! The thesis installs one multicast tree for each sender. One tree for all senders has the same property on each link, and n times fewer entries.

use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::rc::Rc;

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
#[derive(Debug, Clone, Default)]
pub struct Graph {
    switches: BTreeMap<DatapathId, BTreeMap<PortNo, (Place, Weight)>>,
    /// Made of `switches` when the first tree grows.
    dense: OnceCell<Rc<Dense>>,
}

/// A graph whose switches have numbers from 0, in the order of their identifiers: trees of many hosts grow in it.
#[derive(Debug, PartialEq, Eq)]
struct Dense {
    switches: Vec<DatapathId>,
    links: Vec<Vec<Edge>>,
}

/// A link from one of its switches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Edge {
    port: PortNo,
    to: usize,
    to_port: PortNo,
    weight: Weight,
}

impl Graph {
    /// Adds a switch without links.
    pub fn add_switch(&mut self, datapath: DatapathId) {
        self.dense.take();
        self.switches.entry(datapath).or_default();
    }

    /// Adds a link in both directions.
    pub fn add_link(&mut self, one: Place, other: Place, weight: Weight) {
        self.dense.take();
        for (from, to) in [(one, other), (other, one)] {
            self.switches.entry(from.datapath).or_default().insert(from.port, (to, weight));
        }
    }

    /// The same graph with links that paths use only where there is no other, the less the more often they count here. They are named by either end.
    pub fn burdened(&self, counts: &BTreeMap<Place, u32>) -> Self {
        let mut switches = self.switches.clone();
        for (datapath, links) in &mut switches {
            for (port, (to, weight)) in links {
                let count = counts.get(&Place { datapath: *datapath, port: *port }).or_else(|| counts.get(to));
                weight.0 = weight.0.saturating_add(count.copied().unwrap_or_default().saturating_mul(BURDEN));
            }
        }
        Self { switches, dense: OnceCell::new() }
    }

    /// The other end of a link.
    pub fn peer(&self, place: Place) -> Option<Place> {
        Some(self.switches.get(&place.datapath)?.get(&place.port)?.0)
    }

    fn dense(&self) -> &Rc<Dense> {
        self.dense.get_or_init(|| {
            let switches: Vec<DatapathId> = self.switches.keys().copied().collect();
            let edge = |(port, (to, weight)): (&PortNo, &(Place, Weight))| {
                let number = switches.binary_search(&to.datapath).ok()?;
                Some(Edge { port: *port, to: number, to_port: to.port, weight: *weight })
            };
            let links = self.switches.values().map(|links| links.iter().filter_map(edge).collect()).collect();
            Dense { switches, links }.into()
        })
    }
}

/// A spanning tree of each connected part of the graph.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forest {
    dense: Rc<Dense>,
    /// For each switch its parent; `None` at a root.
    parents: Vec<Option<Parent>>,
    /// Parents come before their children.
    order: Vec<usize>,
}

/// The link from a switch towards the root. The lesser of two is the better one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Parent {
    /// From the switch to the root.
    distance: u64,
    switch: usize,
    /// The parent's port to the switch.
    port: PortNo,
    /// The switch's port to the parent.
    up: PortNo,
}

impl Forest {
    /// The tree of shortest paths to `root`, and trees of what is not connected to it. Links of switches in `avoided` are not used. Among paths of equal
    /// weight the one over smaller numbers is taken, so that the same graph has the same trees after a restart.
    ///
    /// Source: Dijkstra, 1959.
    pub fn grow(graph: &Graph, root: Option<DatapathId>, avoided: &BTreeSet<DatapathId>) -> Self {
        let dense = graph.dense();
        let count = dense.switches.len();
        let mut forest = Self { dense: dense.clone(), parents: vec![None; count], order: Vec::with_capacity(count) };
        let avoided: Vec<bool> = dense.switches.iter().map(|datapath| avoided.contains(datapath)).collect();
        let mut done = vec![false; count];
        for start in root.and_then(|root| forest.number(root)).into_iter().chain(0..count) {
            // A switch is in the heap once for each way to it that was the best one: the first counts.
            let mut next = BinaryHeap::from([Reverse((0, start))]);
            while let Some(Reverse((distance, switch))) = next.pop() {
                if std::mem::replace(&mut done[switch], true) {
                    continue;
                }
                forest.order.push(switch);
                for edge in dense.links[switch].iter().filter(|edge| !avoided[switch] && !avoided[edge.to] && !done[edge.to]) {
                    let parent = Parent { distance: distance + u64::from(edge.weight.0), switch, port: edge.port, up: edge.to_port };
                    let known = &mut forest.parents[edge.to];
                    if known.is_none_or(|known| parent < known) {
                        *known = Some(parent);
                        next.push(Reverse((parent.distance, edge.to)));
                    }
                }
            }
        }
        forest
    }

    fn number(&self, datapath: DatapathId) -> Option<usize> {
        self.dense.switches.binary_search(&datapath).ok()
    }

    /// Ports out of which each switch sends what is for `members`. Every switch of a tree with members is in it.
    pub fn outputs(&self, members: &BTreeSet<Place>) -> Outputs {
        let members: Vec<(usize, PortNo)> =
            members.iter().filter_map(|member| Some((self.number(member.datapath)?, member.port))).collect();
        let mut below = vec![0usize; self.order.len()];
        members.iter().for_each(|(switch, _)| below[*switch] += 1);
        for switch in self.order.iter().rev() {
            if let Some(parent) = self.parents[*switch] {
                below[parent.switch] += below[*switch];
            }
        }
        let mut totals = below.clone();
        let mut ports = vec![BTreeSet::new(); self.order.len()];
        for switch in &self.order {
            let Some(parent) = self.parents[*switch] else { continue };
            totals[*switch] = totals[parent.switch];
            if totals[*switch] > below[*switch] {
                ports[*switch].insert(parent.up);
            }
            if below[*switch] > 0 {
                ports[parent.switch].insert(parent.port);
            }
        }
        for (switch, port) in members {
            ports[switch].insert(port);
        }
        let outputs = self.dense.switches.iter().copied().zip(ports).zip(totals);
        outputs.filter(|(_, total)| *total > 0).map(|(outputs, _)| outputs).collect()
    }

    /// Links between each switch and the nearest of `places`, along the tree.
    pub fn distances(&self, places: &BTreeSet<Place>) -> BTreeMap<DatapathId, u32> {
        let mut distances: Vec<Option<u32>> = vec![None; self.order.len()];
        places.iter().filter_map(|place| self.number(place.datapath)).for_each(|switch| distances[switch] = Some(0));
        // Up, then down: the nearest is below, or beyond the parent.
        let nearer = |distances: &mut Vec<Option<u32>>, from: usize, to: usize| {
            if let Some(distance) = distances[from] {
                let known = distances[to].unwrap_or(u32::MAX);
                distances[to] = Some(known.min(distance + 1));
            }
        };
        for switch in self.order.iter().rev() {
            if let Some(parent) = self.parents[*switch] {
                nearer(&mut distances, *switch, parent.switch);
            }
        }
        for switch in &self.order {
            if let Some(parent) = self.parents[*switch] {
                nearer(&mut distances, parent.switch, *switch);
            }
        }
        self.dense.switches.iter().zip(distances).filter_map(|(datapath, distance)| Some((*datapath, distance?))).collect()
    }

    /// The port of `datapath` to its parent.
    pub fn port_to_root(&self, datapath: DatapathId) -> Option<PortNo> {
        Some(self.parents[self.number(datapath)?]?.up)
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
        let up = std::iter::successors(self.number(datapath), |switch| self.parents[*switch].map(|parent| parent.switch));
        up.map(|switch| self.dense.switches[switch]).collect()
    }
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
