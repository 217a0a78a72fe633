//! Maximum flow in integers (Dinic's algorithm), for networks source -> flows -> links -> sink.

use std::collections::VecDeque;

/// A directed network. Edges are identified by the number that [`Network::add`] returns.
#[derive(Debug, Clone)]
pub(super) struct Network {
    edges: Vec<Edge>,
    leaving: Vec<Vec<usize>>,
}

/// One direction of an edge; the reverse direction has the number `number ^ 1`.
#[derive(Debug, Clone, Copy)]
struct Edge {
    to: usize,
    room: u128,
}

impl Network {
    /// Creates a network of `nodes` nodes without edges.
    pub(super) fn new(nodes: usize) -> Self {
        Self { edges: Vec::new(), leaving: vec![Vec::new(); nodes] }
    }

    /// Adds an edge with a capacity of `room`.
    pub(super) fn add(&mut self, from: usize, to: usize, room: u128) -> usize {
        let number = self.edges.len();
        self.edges.push(Edge { to, room });
        self.edges.push(Edge { to: from, room: 0 });
        self.leaving[from].push(number);
        self.leaving[to].push(number + 1);
        number
    }

    /// The flow over `edge`.
    pub(super) fn carried(&self, edge: usize) -> u128 {
        self.edges[edge ^ 1].room
    }

    /// Increases the flow from `source` to `sink` to the maximum; returns the increase.
    ///
    /// At most one phase per path length, each O(nodes * edges) in the worst case and far less in practice.
    pub(super) fn run(&mut self, source: usize, sink: usize) -> u128 {
        let mut sent = 0;
        loop {
            let depth = self.depths(source);
            if depth[sink].is_none() {
                return sent;
            }
            let mut tried = vec![0; self.leaving.len()];
            loop {
                let pushed = self.push(source, sink, u128::MAX, &depth, &mut tried);
                if pushed == 0 {
                    break;
                }
                sent += pushed;
            }
        }
    }

    /// The nodes that `from` reaches over edges with residual capacity.
    pub(super) fn reached(&self, from: usize) -> Vec<bool> {
        self.depths(from).iter().map(Option::is_some).collect()
    }

    fn depths(&self, from: usize) -> Vec<Option<usize>> {
        let mut depth = vec![None; self.leaving.len()];
        let mut queue = VecDeque::from([(from, 0)]);
        depth[from] = Some(0);
        while let Some((node, steps)) = queue.pop_front() {
            for &edge in &self.leaving[node] {
                let Edge { to, room } = self.edges[edge];
                if room > 0 && depth[to].is_none() {
                    depth[to] = Some(steps + 1);
                    queue.push_back((to, steps + 1));
                }
            }
        }
        depth
    }

    /// Augments one path from `node` along increasing depths. The recursion depth is the length of the path, at most twice the number of links plus
    /// two.
    fn push(&mut self, node: usize, sink: usize, most: u128, depth: &[Option<usize>], tried: &mut [usize]) -> u128 {
        if node == sink {
            return most;
        }
        while let Some(&edge) = self.leaving[node].get(tried[node]) {
            let Edge { to, room } = self.edges[edge];
            if room > 0 && depth[to] == depth[node].map(|steps| steps + 1) {
                let pushed = self.push(to, sink, most.min(room), depth, tried);
                if pushed > 0 {
                    self.edges[edge].room -= pushed;
                    self.edges[edge ^ 1].room += pushed;
                    return pushed;
                }
            }
            tried[node] += 1;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_are_rerouted_to_make_room() {
        // 0 -> {1, 2} -> {3, 4} -> 5; node 2 may use 3 only, so node 1 must release it.
        let mut network = Network::new(6);
        network.add(0, 1, 5);
        network.add(0, 2, 4);
        for (from, to) in [(1, 3), (1, 4), (2, 3)] {
            network.add(from, to, 100);
        }
        network.add(3, 5, 4);
        let last = network.add(4, 5, 3);
        assert_eq!(network.run(0, 5), 7);
        assert_eq!(network.carried(last), 3);
        assert_eq!(network.run(0, 5), 0);
        assert_eq!(network.reached(0), [true, true, true, true, true, false]);
        network.add(3, 5, 10);
        assert_eq!(network.run(0, 5), 2);
        assert_eq!(network.reached(0), [true, false, false, false, false, false]);
    }
}
