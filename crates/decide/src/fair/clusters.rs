//! Rate clusters (Definition 2): sets of flows and links with a common rate.
//!
//! Clusters are the connected components of the relation "link k serves flow i". If two components have the same rate and a flow of one may use a
//! link of the other, another split could serve it from there. Such components count as one cluster, so that clusters do not depend on which of the
//! possible splits was found.
//!
//! Two interpretations where the thesis is silent: rates are per weight, r_i/φ_i, although its second point writes r_a = r_b. And a flow with a
//! satisfied demand may have less than its cluster: a cluster's rate is that of its unsatisfied flows, which is the highest; if all are satisfied, it
//! is the highest too. Links that serve no flow are in no cluster.

use super::{Allocation, Problem, check::Violation, check::is_feasible};

/// Flows with one rate per weight, and the links that serve them, in ascending order of their indices.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// Indices of the flows; a flow that gets nothing forms a cluster of its own, without links.
    pub flows: Vec<usize>,
    /// Indices of the links that serve them.
    pub links: Vec<usize>,
    /// r(C): r_i/φ_i in bits per second.
    pub rate_per_weight_bps: f64,
}

/// A violation of Definition 2. Flows, links and clusters are given by their indices.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClusterViolation {
    /// The allocation itself violates a constraint.
    #[error("no clusters without a feasible allocation: {0}")]
    Infeasible(#[from] Violation),
    /// Point 1: an item is not in exactly one cluster.
    #[error("{what} {place} is in {count} clusters instead of one")]
    NotDisjoint {
        /// "flow" or "link".
        what: &'static str,
        /// Index of the flow or link.
        place: usize,
        /// Number of clusters that contain it.
        count: usize,
    },
    /// Point 2: a flow is served by a link outside its cluster.
    #[error("flow {flow} is served by link {link} of another cluster")]
    Crossing {
        /// Index of the flow.
        flow: usize,
        /// Index of the link.
        link: usize,
    },
    /// Point 2: a flow's rate differs from its cluster's.
    #[error("flow {flow} has {ratio_bps} bit/s for its weight, another rate than its cluster")]
    Rate {
        /// Index of the flow.
        flow: usize,
        /// r_i/φ_i of the flow.
        ratio_bps: f64,
    },
    /// Point 3: a flow may use a link of a cluster with a higher rate than its own.
    #[error("flow {flow} wants more and may use link {link}, whose cluster has a higher rate than its own")]
    NotHighest {
        /// Index of the flow.
        flow: usize,
        /// Index of the link.
        link: usize,
    },
}

/// The rate clusters of `allocation`, in the order of their first flows. Rates that differ by less than `tolerance` (relative) count as equal.
///
/// For an allocation that is not max-min fair, the result is only the connected components; [`check`] detects that.
pub fn clusters(problem: &Problem, allocation: &Allocation, tolerance: f64) -> Vec<Cluster> {
    let (flows, links) = (problem.flows.len(), problem.links.len());
    let mut parts = Parts::new(flows + links);
    let serves = |link: usize, flow: usize| allocation.serves(link, flow, tolerance);
    for (flow, facts) in problem.flows.iter().enumerate() {
        facts.links.iter().filter(|link| serves(**link, flow)).for_each(|link| parts.join(flow, flows + link));
    }
    let ratios = allocation.ratios(problem);
    let mut highest = vec![0.0_f64; flows + links];
    for (flow, ratio) in ratios.iter().enumerate() {
        let part = parts.of(flow);
        highest[part] = highest[part].max(*ratio);
    }
    let levels: Vec<f64> = (0..flows + links).map(|node| highest[parts.of(node)]).collect();
    for (flow, facts) in problem.flows.iter().enumerate() {
        for link in &facts.links {
            let (ours, theirs) = (levels[flow], levels[flows + link]);
            if ours > 0.0 && (ours - theirs).abs() <= tolerance * ours.max(theirs) {
                parts.join(flow, flows + link);
            }
        }
    }
    gather(&mut parts, flows, links, &ratios)
}

fn gather(parts: &mut Parts, flows: usize, links: usize, ratios: &[f64]) -> Vec<Cluster> {
    let mut place = vec![None; flows + links];
    let mut clusters: Vec<Cluster> = Vec::new();
    for flow in 0..flows {
        let at = *place[parts.of(flow)].get_or_insert_with(|| {
            clusters.push(Cluster { flows: Vec::new(), links: Vec::new(), rate_per_weight_bps: 0.0 });
            clusters.len() - 1
        });
        clusters[at].flows.push(flow);
        clusters[at].rate_per_weight_bps = clusters[at].rate_per_weight_bps.max(ratios[flow]);
    }
    for link in 0..links {
        if let Some(at) = place[parts.of(flows + link)] {
            clusters[at].links.push(link);
        }
    }
    clusters
}

/// Checks whether `clusters` are clusters of `allocation` according to Definition 2, up to `tolerance` (relative).
///
/// Without demands, a split into such clusters is equivalent to the condition of Theorem 4. With demands it is necessary but not sufficient
/// ([`super::check`]).
///
/// # Errors
/// The first point of the definition that is violated.
pub fn check(problem: &Problem, allocation: &Allocation, clusters: &[Cluster], tolerance: f64) -> Result<(), ClusterViolation> {
    is_feasible(problem, allocation, tolerance)?;
    let holding = |of: fn(&Cluster) -> &[usize], place: usize| -> Vec<usize> {
        (0..clusters.len()).filter(|at| of(&clusters[*at]).contains(&place)).collect()
    };
    let mut home_of_link = vec![None; problem.links.len()];
    for (place, home) in home_of_link.iter_mut().enumerate() {
        let homes = holding(|cluster| &cluster.links, place);
        let serves = (0..problem.flows.len()).any(|flow| allocation.serves(place, flow, tolerance));
        if homes.len() > 1 || (serves && homes.is_empty()) {
            return Err(ClusterViolation::NotDisjoint { what: "link", place, count: homes.len() });
        }
        *home = homes.first().copied();
    }
    for (flow, facts) in problem.flows.iter().enumerate() {
        let homes = holding(|cluster| &cluster.flows, flow);
        let [home] = homes[..] else {
            return Err(ClusterViolation::NotDisjoint { what: "flow", place: flow, count: homes.len() });
        };
        if let Some(&link) =
            facts.links.iter().find(|link| allocation.serves(**link, flow, tolerance) && home_of_link[**link] != Some(home))
        {
            return Err(ClusterViolation::Crossing { flow, link });
        }
        let ours = clusters[home].rate_per_weight_bps;
        let ratio_bps = allocation.rates_bps[flow] / facts.weight;
        let unsatisfied = allocation.rates_bps[flow] < facts.demand_bps() * (1.0 - tolerance);
        if ratio_bps > ours * (1.0 + tolerance) || (unsatisfied && ratio_bps < ours * (1.0 - tolerance)) {
            return Err(ClusterViolation::Rate { flow, ratio_bps });
        }
        let higher = |link: &&usize| home_of_link[**link].is_some_and(|at| clusters[at].rate_per_weight_bps * (1.0 - tolerance) > ours);
        if let (true, Some(&link)) = (unsatisfied, facts.links.iter().find(higher)) {
            return Err(ClusterViolation::NotHighest { flow, link });
        }
    }
    Ok(())
}

/// A union-find structure.
struct Parts(Vec<usize>);

impl Parts {
    fn new(nodes: usize) -> Self {
        Self((0..nodes).collect())
    }

    fn of(&mut self, node: usize) -> usize {
        let mut at = node;
        while self.0[at] != at {
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.of(one), self.of(other));
        self.0[one.max(other)] = one.min(other);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair::{FairFlow, solve};
    use braid_model::Rate;

    fn solved(links: &[u64], flows: Vec<FairFlow>) -> (Problem, Allocation) {
        let problem = Problem { links: links.iter().map(|&mbps| Rate::from_mbps(mbps)).collect(), flows };
        let allocation = solve(&problem).expect("a valid problem");
        (problem, allocation)
    }

    fn described(problem: &Problem, allocation: &Allocation) -> Vec<(Vec<usize>, Vec<usize>, f64)> {
        let found = clusters(problem, allocation, 1e-9);
        check(problem, allocation, &found, 1e-9).expect("clusters");
        found.into_iter().map(|c| (c.flows, c.links, (c.rate_per_weight_bps / 1e4).round() / 100.0)).collect()
    }

    /// Figure 4.5(b): flow a's cluster has 3 Mb/s, that of flows b and c 3.33 Mb/s. Without flow a, the rest is one cluster.
    #[test]
    fn figure_4_5_b() {
        let (a, b, c) = (FairFlow::backlogged(1.0, &[0]), FairFlow::backlogged(2.0, &[0, 1]), FairFlow::backlogged(1.0, &[1]));
        let (problem, allocation) = solved(&[3, 10], vec![a, b.clone(), c.clone()]);
        assert_eq!(described(&problem, &allocation), [(vec![0], vec![0], 3.0), (vec![1, 2], vec![1], 3.33)]);
        let (problem, allocation) = solved(&[3, 10], vec![b, c]);
        assert_eq!(described(&problem, &allocation), [(vec![0, 1], vec![0, 1], 4.33)]);
    }

    /// Figure 3.1(c): each flow could have a link of its own, but both form one pool.
    #[test]
    fn equal_neighbours_are_one_cluster() {
        let (problem, mut allocation) = solved(&[1, 1], vec![FairFlow::backlogged(1.0, &[0, 1]), FairFlow::backlogged(1.0, &[1])]);
        assert_eq!(described(&problem, &allocation), [(vec![0, 1], vec![0, 1], 1.0)]);
        for (rate_bps, count) in [(1e6 * (1.0 - 1e-12), 1), (0.5e6, 2)] {
            (allocation.rates_bps[1], allocation.split_bps[1][1]) = (rate_bps, rate_bps);
            assert_eq!(clusters(&problem, &allocation, 1e-9).len(), count);
        }
    }

    #[test]
    fn satisfied_flows_starved_flows_and_idle_links() {
        let small = FairFlow::backlogged(1.0, &[0]).with_demand(Rate::from_mbps(2));
        let flows = vec![FairFlow::backlogged(1.0, &[]), small, FairFlow::backlogged(2.0, &[0])];
        let (problem, allocation) = solved(&[10, 7], flows);
        assert_eq!(described(&problem, &allocation), [(vec![0], vec![], 0.0), (vec![1, 2], vec![0], 4.0)]);
    }

    #[test]
    fn each_kind_of_wrong_cluster_is_detected() {
        let flows = vec![FairFlow::backlogged(1.0, &[0]), FairFlow::backlogged(2.0, &[0, 1]), FairFlow::backlogged(1.0, &[1])];
        let (problem, allocation) = solved(&[3, 10], flows);
        let right = clusters(&problem, &allocation, 1e-9);
        let judge = |change: &dyn Fn(&mut Vec<Cluster>)| {
            let mut clusters = right.clone();
            change(&mut clusters);
            check(&problem, &allocation, &clusters, 1e-9).expect_err("wrong clusters")
        };
        assert_eq!(judge(&|c| c[0].flows.clear()), ClusterViolation::NotDisjoint { what: "flow", place: 0, count: 0 });
        assert_eq!(judge(&|c| c[0].links.push(1)), ClusterViolation::NotDisjoint { what: "link", place: 1, count: 2 });
        let exchange = |c: &mut Vec<Cluster>| (c[0].links, c[1].links) = (vec![1], vec![0]);
        assert_eq!(judge(&exchange), ClusterViolation::Crossing { flow: 0, link: 0 });
        assert!(matches!(judge(&|c| c[0].rate_per_weight_bps *= 1.1), ClusterViolation::Rate { flow: 0, .. }));
    }

    #[test]
    fn a_flow_that_may_join_a_faster_cluster_is_a_violation() {
        let flows = vec![FairFlow::backlogged(1.0, &[0, 1]), FairFlow::backlogged(1.0, &[1])];
        let problem = Problem { links: vec![Rate::from_bps(1), Rate::from_bps(9)], flows };
        let allocation = Allocation { rates_bps: vec![1.0, 9.0], split_bps: vec![vec![1.0, 0.0], vec![0.0, 9.0]] };
        let found = clusters(&problem, &allocation, 1e-9);
        assert_eq!(check(&problem, &allocation, &found, 1e-9), Err(ClusterViolation::NotHighest { flow: 0, link: 1 }));
    }
}
