//! The order in which switches change from one way of delivery to another, so that no packet is lost and none loops.
//!
//! - **One output at each switch, before and after**: the switch nearest to the receiver changes first. A packet at a switch that has changed follows the
//!   new path, on which all have changed. One at another switch follows the old path, to its end or to a switch that has changed.
//! - **Old and new edges together are a tree**: no mixture of both can loop, because no switch returns a packet to where it came from.
//! - **Else** switches first keep only the outputs that stay, then get the new ones. All outputs are edges of the old tree, then of the new one. Packets of
//!   some receivers are lost in between. This happens only if the tree of a group, of broadcasts or of an n-cast changes because links do.
//!
//! Entries that are not needed any more go last.

use std::collections::{BTreeMap, BTreeSet};

use braid_openflow::ids::{DatapathId, PortNo};

use crate::ids::Place;
use crate::paths::{Graph, Outputs};

/// A change of one switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    /// Steps of a stage begin when all of earlier ones are done.
    pub(crate) stage: u32,
    pub(crate) datapath: DatapathId,
    /// The new outputs; `None`: the entry goes.
    pub(crate) outputs: Option<BTreeSet<PortNo>>,
}

/// The steps from `old` to `new`. `distances` are the links between each switch and the nearest new receiver.
pub(crate) fn steps(graph: &Graph, old: &Outputs, new: &Outputs, distances: &BTreeMap<DatapathId, u32>) -> Vec<Step> {
    let mut steps = Vec::new();
    let none = BTreeSet::new();
    let narrows = !(is_single(old) && is_single(new)) && has_cycle(graph, old, new);
    for (datapath, before) in old {
        let Some(after) = new.get(datapath).filter(|_| narrows) else { continue };
        let stays: BTreeSet<PortNo> = before.intersection(after).copied().collect();
        if stays != *before && stays != *after {
            steps.push(Step { stage: 0, datapath: *datapath, outputs: Some(stays) });
        }
    }
    let mut last = 0;
    for (datapath, after) in new.iter().filter(|(datapath, after)| old.get(datapath) != Some(after)) {
        let distance = distances.get(datapath).copied().unwrap_or_default();
        // What only loses outputs does so before others gain them.
        let loses = narrows && old.get(datapath).unwrap_or(&none).is_superset(after);
        let stage = if loses { 0 } else { distance + u32::from(narrows) };
        last = last.max(stage);
        steps.push(Step { stage, datapath: *datapath, outputs: Some(after.clone()) });
    }
    // If trees change, what goes is an edge of the old one.
    let stage = if narrows || steps.is_empty() { 0 } else { last + 1 };
    let gone = old.keys().filter(|datapath| !new.contains_key(datapath));
    steps.extend(gone.map(|datapath| Step { stage, datapath: *datapath, outputs: None }));
    steps
}

/// Whether a switch begins to send packets to one that sent them to it. Those on the way would be dropped, because no switch returns a packet to where
/// it came from: before the second one changes, they need time to arrive.
pub(crate) fn reverses(graph: &Graph, old: &Outputs, new: &Outputs) -> bool {
    let sends = |outputs: &Outputs, place: Place| outputs.get(&place.datapath).is_some_and(|ports| ports.contains(&place.port));
    let gained = new.iter().flat_map(|(datapath, ports)| ports.iter().map(|port| Place { datapath: *datapath, port: *port }));
    gained.filter(|place| !sends(old, *place)).any(|place| graph.peer(place).is_some_and(|peer| sends(old, peer)))
}

fn is_single(outputs: &Outputs) -> bool {
    outputs.values().all(|ports| ports.len() <= 1)
}

/// Whether the links that either uses have a cycle.
fn has_cycle(graph: &Graph, old: &Outputs, new: &Outputs) -> bool {
    let mut edges = BTreeSet::new();
    for (datapath, ports) in old.iter().chain(new) {
        for port in ports {
            let place = Place { datapath: *datapath, port: *port };
            edges.extend(graph.peer(place).map(|peer| (place.min(peer), place.max(peer))));
        }
    }
    // Switches of one tree have the same root.
    let mut roots: BTreeMap<DatapathId, DatapathId> = BTreeMap::new();
    for (one, other) in edges {
        let (one, other) = (root(&roots, one.datapath), root(&roots, other.datapath));
        if one == other {
            return true;
        }
        roots.insert(one, other);
    }
    false
}

fn root(roots: &BTreeMap<DatapathId, DatapathId>, mut datapath: DatapathId) -> DatapathId {
    while let Some(next) = roots.get(&datapath) {
        datapath = *next;
    }
    datapath
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::{Forest, Weight};

    fn ring() -> Graph {
        let mut graph = Graph::default();
        for (one, other) in [(1u64, 2u64), (2, 3), (3, 4), (4, 1)] {
            graph.add_link(Place::new(one, other as u32), Place::new(other, one as u32), Weight::default());
        }
        graph
    }

    fn outputs(graph: &Graph, root: u64, members: &[Place]) -> Outputs {
        Forest::grow(graph, Some(DatapathId(root)), &BTreeSet::new()).outputs(&members.iter().copied().collect())
    }

    /// Visits of a packet that starts at each switch; `None` if it loops.
    fn flows(graph: &Graph, outputs: &Outputs) -> Option<()> {
        for start in 1..=4 {
            let mut packets = vec![(DatapathId(start), None)];
            for _ in 0..20 {
                let next: Vec<(DatapathId, Option<PortNo>)> = packets
                    .iter()
                    .flat_map(|(datapath, from)| {
                        let ports = outputs.get(datapath).into_iter().flatten().filter(move |port| Some(**port) != *from);
                        ports.filter_map(|port| graph.peer(Place { datapath: *datapath, port: *port }))
                    })
                    .map(|to| (to.datapath, Some(to.port)))
                    .collect();
                packets = next;
            }
            if !packets.is_empty() {
                return None;
            }
        }
        Some(())
    }

    #[test]
    fn no_order_of_steps_within_a_stage_loops() {
        let graph = ring();
        let places = [Place::new(1, 9), Place::new(2, 9), Place::new(3, 9), Place::new(4, 9)];
        let members = |bits: u32| -> Vec<Place> { (0..4).filter(|bit| bits >> bit & 1 == 1).map(|bit| places[bit]).collect() };
        for (root, bits) in (1..=4).flat_map(|root| (1..16).map(move |bits| (root, bits))) {
            for (other, after) in (1..=4).flat_map(|root| (1..16).map(move |bits| (root, bits))) {
                // One output everywhere only if the tree starts at the receiver.
                let (old, new) = (outputs(&graph, root, &members(bits)), outputs(&graph, other, &members(after)));
                let forest = Forest::grow(&graph, Some(DatapathId(other)), &BTreeSet::new());
                let steps = steps(&graph, &old, &new, &forest.distances(&members(after).into_iter().collect()));
                let last = steps.iter().map(|step| step.stage).max().unwrap_or_default();
                let mut state = old.clone();
                for stage in 0..=last {
                    let now: Vec<&Step> = steps.iter().filter(|step| step.stage == stage).collect();
                    for mixture in 0..1u32 << now.len() {
                        let mut mixed = state.clone();
                        for (number, step) in now.iter().enumerate().filter(|(number, _)| mixture >> number & 1 == 1) {
                            let _ = number;
                            match &step.outputs {
                                Some(outputs) => mixed.insert(step.datapath, outputs.clone()),
                                None => mixed.remove(&step.datapath),
                            };
                        }
                        assert_eq!(flows(&graph, &mixed), Some(()), "{old:?} -> {new:?}: {mixed:?}");
                        if mixture == (1 << now.len()) - 1 {
                            state = mixed;
                        }
                    }
                }
                assert_eq!(state, new);
            }
        }
    }

    #[test]
    fn the_far_end_changes_first() {
        let graph = ring();
        let (old, new) = (outputs(&graph, 1, &[Place::new(1, 9)]), outputs(&graph, 3, &[Place::new(3, 9)]));
        let distances = Forest::grow(&graph, Some(DatapathId(3)), &BTreeSet::new()).distances(&BTreeSet::from([Place::new(3, 9)]));
        let stages: Vec<_> = steps(&graph, &old, &new, &distances).iter().map(|step| (step.datapath.0, step.stage)).collect();
        assert_eq!(stages, [(1, 2), (2, 1), (3, 0), (4, 1)]);
        assert!(reverses(&graph, &old, &new));
    }
}
