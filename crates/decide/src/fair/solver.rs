//! The exact weighted max-min allocation.
//!
//! The method is the decomposition algorithm for separable convex functions over the bases of a polymatroid (Fujishige 1980, Groenevelt 1991). It
//! finds the levels of progressive filling (Megiddo 1974, the thesis's reference 31) by divide and conquer instead of increasing a level: distribute
//! the capacity of all links to all flows at one common level λ, `Σ min(D_i, λφ_i) = Σ C_j`, and test by maximum flow whether the links can be split
//! that way. If so, that is the answer. If not, the minimum cut identifies flows S whose links N(S) are too small. S shares N(S), the other flows
//! share the other links, and each half is a separate problem. Each split removes links, so there are at most about twice as many maximum flows as
//! links, independent of the number of flows.
//!
//! Precision: a level is the quotient of two sums, accurate to about 1e-15. The maximum flow is computed in integer units of 2^-50 bit/s, so that a
//! link of 1 kbit/s beside one of 100 Gbit/s is handled precisely. Targets are reduced by a relative 1e-13 before the test, so that rounding alone
//! never causes a cut. A cut is missed only if the levels on both sides differ by less than that.

use super::{Allocation, FairFlow, Problem, ProblemError, maxflow::Network};

/// Units of the maximum flow per bit/s; a power of two.
const UNITS: f64 = (1_u64 << 50) as f64;
/// Relative reduction of the targets before the test.
const SLACK: f64 = 1e-13;

/// The weighted max-min fair allocation of `problem`: rates in bits per second, accurate to about 1e-12 of each, and one feasible split.
///
/// Flows may have demands, and may have no link (their rate is zero). Links of rate zero are down.
///
/// # Errors
/// [`ProblemError`] for weights out of range and links that do not exist.
pub fn solve(problem: &Problem) -> Result<Allocation, ProblemError> {
    problem.validate()?;
    let (flows, links) = (problem.flows.len(), problem.links.len());
    let mut allocation = Allocation { rates_bps: vec![0.0; flows], split_bps: vec![vec![0.0; links]; flows] };
    let mut parts = vec![Part { flows: (0..flows).collect(), links: (0..links).collect() }];
    while let Some(part) = parts.pop() {
        if part.flows.is_empty() || part.links.is_empty() {
            continue;
        }
        if let Some(halves) = solve_part(problem, &part, &mut allocation) {
            parts.extend(halves);
        }
    }
    Ok(allocation)
}

/// Flows and the links that they share, both in ascending order.
struct Part {
    flows: Vec<usize>,
    links: Vec<usize>,
}

/// Gives every flow of the part the same level, or returns the halves that must be solved separately.
fn solve_part(problem: &Problem, part: &Part, allocation: &mut Allocation) -> Option<[Part; 2]> {
    let capacity: f64 = part.links.iter().map(|&link| problem.links[link].bps() as f64).sum();
    let level = level(part.flows.iter().map(|&flow| &problem.flows[flow]), capacity);
    let target_flow = TargetFlow::new(problem, part, level);
    let short = target_flow.short();
    if short.contains(&true) {
        let halves = target_flow.halves(part, &short);
        // Only rounding could make all flows fall short with all links, and the slack excludes that. Assigning the level in this case guarantees
        // termination.
        if halves[0].flows.len() < part.flows.len() || halves[0].links.len() < part.links.len() {
            return Some(halves);
        }
    }
    for (place, &flow) in part.flows.iter().enumerate() {
        let rate = capped_rate(&problem.flows[flow], level);
        allocation.rates_bps[flow] = rate;
        target_flow.split(place, rate, &mut allocation.split_bps[flow]);
    }
    None
}

/// The level λ at which the flows together use `capacity`; infinite if their demands do not exceed it.
pub(super) fn level<'a>(flows: impl Iterator<Item = &'a FairFlow>, capacity: f64) -> f64 {
    level_of(flows.map(|flow| (flow.weight, flow.demand_bps())), capacity)
}

/// The same for flows as (weight φ_i, demand D_i in bits per second, infinite if unlimited).
pub(crate) fn level_of(flows: impl Iterator<Item = (f64, f64)>, capacity: f64) -> f64 {
    let mut flows: Vec<_> = flows.map(|(weight, demand)| (demand / weight, weight, demand)).collect();
    flows.sort_by(|a, b| a.0.total_cmp(&b.0));
    // Sorted by the level at which each flow is satisfied: flows satisfied below a level take their demand.
    let mut unsatisfied_weight = vec![0.0; flows.len() + 1];
    for place in (0..flows.len()).rev() {
        unsatisfied_weight[place] = unsatisfied_weight[place + 1] + flows[place].1;
    }
    let mut satisfied = 0.0;
    for (place, &(satisfied_at, _, demand)) in flows.iter().enumerate() {
        let level = ((capacity - satisfied) / unsatisfied_weight[place]).max(0.0);
        if level < satisfied_at {
            return level;
        }
        satisfied += demand;
    }
    f64::INFINITY
}

/// min(D_i, λφ_i).
fn capped_rate(flow: &FairFlow, level: f64) -> f64 {
    flow.demand_bps().min(level * flow.weight)
}

/// Tests whether a part's links can give every flow its target, as a maximum flow.
struct TargetFlow {
    network: Network,
    /// For each flow of the part: the edge from the source, and the edges to links.
    flows: Vec<(usize, Vec<(usize, usize)>)>,
}

impl TargetFlow {
    /// Nodes: the source, the sink, the part's flows, the part's links.
    fn new(problem: &Problem, part: &Part, level: f64) -> Self {
        let mut network = Network::new(2 + part.flows.len() + part.links.len());
        let first_link = 2 + part.flows.len();
        for (place, &link) in part.links.iter().enumerate() {
            network.add(first_link + place, 1, units(problem.links[link].bps() as f64));
        }
        let flows = part.flows.iter().enumerate().map(|(place, &flow)| {
            let facts = &problem.flows[flow];
            let target = facts.demand_bps().min(level * facts.weight * (1.0 - SLACK));
            let source = network.add(0, 2 + place, units(target));
            let mut links = Vec::with_capacity(facts.links.len());
            for &link in &facts.links {
                if let Ok(at) = part.links.binary_search(&link) {
                    links.push((link, network.add(2 + place, first_link + at, u128::MAX / 4)));
                }
            }
            (source, links)
        });
        let flows = flows.collect();
        network.run(0, 1);
        Self { network, flows }
    }

    /// The flows on the source's side of the minimum cut: none if all reach their target.
    fn short(&self) -> Vec<bool> {
        let reached = self.network.reached(0);
        (0..self.flows.len()).map(|place| reached[2 + place]).collect()
    }

    /// The flows that fall short with all the links they may use, and the other flows with the other links.
    fn halves(&self, part: &Part, short: &[bool]) -> [Part; 2] {
        let mut taken: Vec<usize> = Vec::new();
        for (_, (_, links)) in short.iter().zip(&self.flows).filter(|(short, _)| **short) {
            taken.extend(links.iter().map(|(link, _)| *link));
        }
        taken.sort_unstable();
        taken.dedup();
        let flows = |which: bool| part.flows.iter().zip(short).filter(|(_, short)| **short == which).map(|(flow, _)| *flow).collect();
        let others = part.links.iter().copied().filter(|link| taken.binary_search(link).is_err()).collect();
        [Part { flows: flows(true), links: taken }, Part { flows: flows(false), links: others }]
    }

    /// Writes `rate` into `row`, in proportion to the flow over each link of the flow at `place`.
    fn split(&self, place: usize, rate: f64, row: &mut [f64]) {
        let (source, links) = &self.flows[place];
        let whole = self.network.carried(*source);
        for &(link, edge) in links {
            if whole > 0 {
                row[link] = rate * (self.network.carried(edge) as f64 / whole as f64);
            }
        }
        if let (0, Some((link, _))) = (whole, links.first()) {
            row[*link] = rate;
        }
    }
}

fn units(bps: f64) -> u128 {
    (bps * UNITS) as u128
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::Rate;

    fn rates(links: &[u64], flows: &[FairFlow]) -> Vec<f64> {
        let links = links.iter().map(|&mbps| Rate::from_mbps(mbps)).collect();
        let problem = Problem { links, flows: flows.to_vec() };
        let allocation = solve(&problem).expect("a valid problem");
        crate::fair::is_max_min(&problem, &allocation, 1e-9).expect("max-min fair");
        allocation.rates_bps.iter().map(|bps| (bps / 1e3).round() / 1e3).collect()
    }

    fn free(weight: f64, links: &[usize]) -> FairFlow {
        FairFlow::backlogged(weight, links)
    }

    /// Figure 3.1 and section 3.1: one link, two equal links, and flow b restricted to the second; then b with twice the weight.
    #[test]
    fn figure_3_1() {
        assert_eq!(rates(&[2], &[free(1.0, &[0]), free(1.0, &[0])]), [1.0, 1.0]);
        assert_eq!(rates(&[1, 1], &[free(1.0, &[0, 1]), free(1.0, &[0, 1])]), [1.0, 1.0]);
        assert_eq!(rates(&[1, 1], &[free(1.0, &[0, 1]), free(1.0, &[1])]), [1.0, 1.0]);
        assert_eq!(rates(&[1, 1], &[free(1.0, &[0, 1]), free(2.0, &[0, 1])]), [0.667, 1.333]);
        assert_eq!(rates(&[1, 1], &[free(1.0, &[0, 1]), free(2.0, &[1])]), [1.0, 1.0]);
    }

    /// Figure 4.5: links of 3 and 10 Mb/s, weights 1, 2, 1; flow a ends, then flow b.
    #[test]
    fn figure_4_5() {
        let (a, b, c) = (free(1.0, &[0]), free(2.0, &[0, 1]), free(1.0, &[1]));
        assert_eq!(rates(&[3, 10], &[a, b.clone(), c.clone()]), [3.0, 6.667, 3.333]);
        assert_eq!(rates(&[3, 10], &[b, c.clone()]), [8.667, 4.333]);
        assert_eq!(rates(&[3, 10], &[c]), [10.0]);
    }

    #[test]
    fn demands_leave_the_rest_to_others() {
        let small = free(1.0, &[0, 1]).with_demand(Rate::from_mbps(2));
        assert_eq!(rates(&[10, 10], &[free(1.0, &[0]), small.clone(), free(1.0, &[1])]), [9.0, 2.0, 9.0]);
        assert_eq!(rates(&[10, 10], std::slice::from_ref(&small)), [2.0]);
        assert_eq!(rates(&[1, 10], &[small, free(9.0, &[0])]), [2.0, 1.0]);
    }

    #[test]
    fn flows_or_links_without_capacity_get_zero() {
        assert_eq!(rates(&[5], &[free(1.0, &[]), free(1.0, &[0])]), [0.0, 5.0]);
        assert_eq!(rates(&[0, 5], &[free(1.0, &[0]), free(1.0, &[0, 1])]), [0.0, 5.0]);
        assert_eq!(rates(&[], &[free(1.0, &[])]), [0.0]);
        assert_eq!(rates(&[5], &[]), [0.0; 0]);
        assert_eq!(rates(&[5], &[free(1.0, &[0]).with_demand(Rate::ZERO), free(1.0, &[0])]), [0.0, 5.0]);
    }

    #[test]
    fn a_slow_link_beside_a_fast_one_is_exact() {
        let links = vec![Rate::from_bps(3), Rate::from_bps(1_000_000_000_007), Rate::from_bps(1)];
        let flows = vec![free(1.0, &[0, 1, 2]), free(7.0, &[0, 2]), free(1e-3, &[0]), free(1e9, &[1])];
        let allocation = solve(&Problem { links: links.clone(), flows: flows.clone() }).expect("a valid problem");
        let low = 4.0 / 7.001;
        let high = 1_000_000_000_007.0 / (1e9 + 1.0);
        for (rate, exact) in allocation.rates_bps.iter().zip([high, 7.0 * low, 1e-3 * low, 1e9 * high]) {
            assert!((rate / exact - 1.0).abs() < 1e-12, "{rate} for {exact}");
        }
        // The slow links' levels must stay separate from the fast one's, although the rounding error of the fast one exceeds their sum.
        is_fair(&Problem { links, flows }, &allocation);
    }

    /// The slow link's level is lower by 1e-5 only, which is 1e-17 of the fast one's: rounding must not hide it.
    #[test]
    fn close_levels_are_distinguished() {
        let fast = [1e12 / 7.0, 1e12 / 11.0, 1e12 / 13.0];
        for more in 0..200 {
            let capacity = 1_000_000_000_000 + more;
            let level = capacity as f64 / fast.iter().sum::<f64>();
            let mut flows = vec![free((1.0 + 1e-5) / level, &[1])];
            flows.extend(fast.map(|weight| free(weight, &[0])));
            let allocation = solve(&Problem { links: vec![Rate::from_bps(capacity), Rate::from_bps(1)], flows }).expect("a valid problem");
            assert!((allocation.rates_bps[0] - 1.0).abs() < 1e-12, "{} at {more}", allocation.rates_bps[0]);
        }
    }

    fn is_fair(problem: &Problem, allocation: &Allocation) {
        crate::fair::is_max_min(problem, allocation, 1e-9).expect("max-min fair");
    }

    #[test]
    fn invalid_problems_are_refused() {
        let one = |flow| solve(&Problem { links: vec![Rate::from_mbps(1)], flows: vec![flow] }).expect_err("nonsense").to_string();
        assert_eq!(one(free(0.0, &[0])), "flow 0 has weight 0: give it one from 1e-12 to 1e12");
        assert!(one(free(f64::NAN, &[0])).contains("weight NaN"));
        assert!(one(free(1.0, &[1])).contains("may use link 1, but there are 1 links"));
        assert!(one(free(1.0, &[0, 0])).contains("names link 0 twice"));
    }
}
