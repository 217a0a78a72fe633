//! Theorem 4: whether an allocation is weighted max-min fair, determined from its split.
//!
//! The thesis: a work-conserving system is max-min fair if and only if (1) flows served by a common link have the same rate, and (2) a flow that may
//! use a link but is not served by it has at least the rate of those that are. With weights, rates are r_i/φ_i. Without demands this is correct: a
//! gain through several flows would need increasing rates along the way, which (2) excludes.
//!
//! **With demands it is not correct**, although the thesis's model has them (constraint 1 of 3.3.1). Two corrections are needed:
//! - a flow with a satisfied demand may have less than others on its link, so both conditions apply only to unsatisfied flows;
//! - considering one link at a time is then not sufficient. A satisfied flow in the middle breaks the chain of inequalities of Lemma 2's second case.
//!   Take links of 10 and 10, flow j on link 1 only, flow m on both with a demand of 2, flow k on link 2 only: the rates (8, 2, 10) with m on link 1
//!   meet both conditions, but moving m to link 2 gives (9, 2, 9), which is max-min fair. Similarly, both links can be as busy as the flows that may
//!   use them allow while one of them idles, so "work-conserving" does not imply Lemma 1 either.
//!
//! So [`is_max_min`] first checks the thesis's two conditions, and then the general one, which is necessary and sufficient with and without demands:
//! no unsatisfied flow reaches, over a chain of flows that could move to other links, a link with room or a flow with a higher r_i/φ_i. (This is the
//! absence of an improving exchange in a polymatroid: Federgruen and Groenevelt 1986.)

use super::{Allocation, Problem};

/// Why an allocation is not max-min fair. Flows and links are given by their indices.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Violation {
    /// The lists do not have the problem's lengths, or a number in them is negative or not finite.
    #[error("the allocation does not fit the problem: {0}")]
    Shape(&'static str),
    /// π_ij = 0 but r_ij > 0.
    #[error("flow {flow} is served by link {link}, which it may not use")]
    Preference {
        /// Index of the flow.
        flow: usize,
        /// Index of the link.
        link: usize,
    },
    /// r_i is not the sum of its r_ij, or exceeds D_i.
    #[error("flow {flow} has {rate_bps} bit/s, but {why}")]
    Rate {
        /// Index of the flow.
        flow: usize,
        /// Rate r_i of the flow.
        rate_bps: f64,
        /// What is wrong with the rate.
        why: &'static str,
    },
    /// The r_ij of a link exceed C_j.
    #[error("link {link} carries {carried_bps} bit/s, more than it can")]
    Capacity {
        /// Index of the link.
        link: usize,
        /// Σ_i r_ij.
        carried_bps: f64,
    },
    /// A link has room for an unsatisfied flow that may use it.
    #[error("not work-conserving: link {link} has room and flow {flow} wants more")]
    Idle {
        /// Index of the link.
        link: usize,
        /// Index of the flow.
        flow: usize,
    },
    /// Theorem 4's first condition: a common link serves both flows, and the one with less is unsatisfied.
    #[error("link {link} serves both flow {more} and flow {less}, which has less for its weight and wants more")]
    UnequalOnLink {
        /// Index of the link.
        link: usize,
        /// Index of the flow with the greater r_i/φ_i.
        more: usize,
        /// Index of the flow with the lesser r_i/φ_i.
        less: usize,
    },
    /// Theorem 4's second condition: a link does not serve a flow that has less.
    #[error("link {link} serves flow {more} and passes over flow {less}, which has less for its weight and wants more")]
    PassedOver {
        /// Index of the link.
        link: usize,
        /// Index of the flow that it serves.
        more: usize,
        /// Index of the flow that it does not serve.
        less: usize,
    },
    /// Both conditions hold, but other flows could make room for `less`. This is only possible with demands.
    #[error("flow {less} could have more: flows that have their demand could move over to link {link}")]
    Chain {
        /// Index of the flow that could gain.
        less: usize,
        /// Index of the link at the end of the chain of moves; it has room or serves a flow with more.
        link: usize,
    },
}

/// Whether `allocation` is weighted max-min fair, and its rates match its split.
///
/// `tolerance` is relative: rates and levels may differ by that share (1e-9 for the solver's results, 0.01 for measured ones), and a link serves a
/// flow if it carries more than that share of the flow's rate.
///
/// # Errors
/// The first violation found: shape and feasibility, then work conservation, Theorem 4's conditions, and chains.
pub fn is_max_min(problem: &Problem, allocation: &Allocation, tolerance: f64) -> Result<(), Violation> {
    is_feasible(problem, allocation, tolerance)?;
    let view = View::new(problem, allocation, tolerance);
    view.conserves_work()?;
    view.links_are_fair()?;
    view.chains_are_fair()
}

/// Whether the allocation satisfies the three constraints of 3.3.1: demands, capacities, Π.
///
/// # Errors
/// The first constraint that is violated by more than `tolerance` (relative).
pub fn is_feasible(problem: &Problem, allocation: &Allocation, tolerance: f64) -> Result<(), Violation> {
    let Allocation { rates_bps, split_bps } = allocation;
    if rates_bps.len() != problem.flows.len() || split_bps.len() != problem.flows.len() {
        return Err(Violation::Shape("the number of flows differs"));
    }
    if split_bps.iter().any(|row| row.len() != problem.links.len()) {
        return Err(Violation::Shape("the number of links differs"));
    }
    if !rates_bps.iter().chain(split_bps.iter().flatten()).all(|rate| rate.is_finite() && *rate >= 0.0) {
        return Err(Violation::Shape("a rate is negative or not finite"));
    }
    for (flow, facts) in problem.flows.iter().enumerate() {
        if let Some(link) = (0..problem.links.len()).find(|link| split_bps[flow][*link] > 0.0 && !facts.links.contains(link)) {
            return Err(Violation::Preference { flow, link });
        }
        let rate_bps = rates_bps[flow];
        let sum: f64 = split_bps[flow].iter().sum();
        if (sum - rate_bps).abs() > tolerance * rate_bps.max(sum) {
            return Err(Violation::Rate { flow, rate_bps, why: "its rates over the links have a different sum" });
        }
        if rate_bps > facts.demand_bps() * (1.0 + tolerance) {
            return Err(Violation::Rate { flow, rate_bps, why: "its demand is lower" });
        }
    }
    for (link, capacity) in problem.links.iter().enumerate() {
        let carried_bps: f64 = split_bps.iter().map(|row| row[link]).sum();
        if carried_bps > capacity.bps() as f64 * (1.0 + tolerance) {
            return Err(Violation::Capacity { link, carried_bps });
        }
    }
    Ok(())
}

/// An allocation, with the data that the conditions need.
struct View<'a> {
    problem: &'a Problem,
    tolerance: f64,
    ratios: Vec<f64>,
    /// Whether the flow is unsatisfied.
    unsatisfied: Vec<bool>,
    /// Whether the link has room.
    room: Vec<bool>,
    /// U_k: the flows that link k serves.
    served: Vec<Vec<usize>>,
}

impl<'a> View<'a> {
    fn new(problem: &'a Problem, allocation: &Allocation, tolerance: f64) -> Self {
        let rates = &allocation.rates_bps;
        let unsatisfied = problem.flows.iter().zip(rates).map(|(flow, rate)| *rate < flow.demand_bps() * (1.0 - tolerance)).collect();
        let room = problem.links.iter().enumerate().map(|(link, capacity)| {
            let carried: f64 = allocation.split_bps.iter().map(|row| row[link]).sum();
            carried < capacity.bps() as f64 * (1.0 - tolerance)
        });
        let served = |link| (0..rates.len()).filter(|flow| allocation.serves(link, *flow, tolerance)).collect();
        Self {
            problem,
            tolerance,
            ratios: allocation.ratios(problem),
            unsatisfied,
            room: room.collect(),
            served: (0..problem.links.len()).map(served).collect(),
        }
    }

    fn unsatisfied(&self) -> impl Iterator<Item = usize> {
        (0..self.unsatisfied.len()).filter(|flow| self.unsatisfied[*flow])
    }

    fn better(&self, more: usize, less: usize) -> bool {
        self.ratios[less] < self.ratios[more] * (1.0 - self.tolerance)
    }

    fn conserves_work(&self) -> Result<(), Violation> {
        for flow in self.unsatisfied() {
            if let Some(&link) = self.problem.flows[flow].links.iter().find(|link| self.room[**link]) {
                return Err(Violation::Idle { link, flow });
            }
        }
        Ok(())
    }

    /// Theorem 4's two conditions.
    fn links_are_fair(&self) -> Result<(), Violation> {
        for less in self.unsatisfied() {
            for &link in &self.problem.flows[less].links {
                if let Some(&more) = self.served[link].iter().find(|more| self.better(**more, less)) {
                    let unequal = self.served[link].contains(&less);
                    return Err(if unequal {
                        Violation::UnequalOnLink { link, more, less }
                    } else {
                        Violation::PassedOver { link, more, less }
                    });
                }
            }
        }
        Ok(())
    }

    fn chains_are_fair(&self) -> Result<(), Violation> {
        let reach = self.reach();
        for less in self.unsatisfied() {
            for &first in &self.problem.flows[less].links {
                let bad = |link: &usize| self.room[*link] || self.served[*link].iter().any(|more| self.better(*more, less));
                if let Some(link) = (0..reach.len()).filter(|link| reach[first][*link]).find(bad) {
                    return Err(Violation::Chain { less, link });
                }
            }
        }
        Ok(())
    }

    /// For each link, the links to which its traffic can move, in any number of steps.
    fn reach(&self) -> Vec<Vec<bool>> {
        let links = self.room.len();
        let mut reach = vec![vec![false; links]; links];
        for (link, row) in reach.iter_mut().enumerate() {
            row[link] = true;
            for flow in &self.served[link] {
                self.problem.flows[*flow].links.iter().for_each(|other| row[*other] = true);
            }
        }
        for middle in 0..links {
            let onward = reach[middle].clone();
            for row in reach.iter_mut().filter(|row| row[middle]) {
                row.iter_mut().zip(&onward).for_each(|(to, further)| *to |= further);
            }
        }
        reach
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fair::{FairFlow, solve};
    use braid_model::Rate;

    fn problem(flows: &[FairFlow]) -> Problem {
        Problem { links: vec![Rate::from_bps(10); 2], flows: flows.to_vec() }
    }

    fn allocation(split: &[[f64; 2]]) -> Allocation {
        Allocation {
            rates_bps: split.iter().map(|row| row.iter().sum()).collect(),
            split_bps: split.iter().map(|row| row.to_vec()).collect(),
        }
    }

    /// Weighted fair queueing on each link separately, figure 3.1(c): flow a has 1.5, flow b 0.5.
    #[test]
    fn fair_queueing_per_link_is_not_max_min_fair() {
        let problem = problem(&[FairFlow::backlogged(1.0, &[0, 1]), FairFlow::backlogged(1.0, &[1])]);
        let judge = |split: &[[f64; 2]]| is_max_min(&problem, &allocation(split), 1e-9);
        assert_eq!(judge(&[[10.0, 5.0], [0.0, 5.0]]), Err(Violation::UnequalOnLink { link: 1, more: 0, less: 1 }));
        assert_eq!(judge(&[[10.0, 0.0], [0.0, 10.0]]), Ok(()));
        assert_eq!(judge(&[[10.0, 10.0], [0.0, 0.0]]), Err(Violation::PassedOver { link: 1, more: 0, less: 1 }));
        assert_eq!(judge(&[[10.0, 0.0], [0.0, 9.0]]), Err(Violation::Idle { link: 1, flow: 0 }));
        assert_eq!(judge(&[[10.0, 1.0], [0.0, 10.0]]), Err(Violation::Capacity { link: 1, carried_bps: 11.0 }));
        assert_eq!(judge(&[[5.0, 0.0], [5.0, 5.0]]), Err(Violation::Preference { flow: 1, link: 0 }));
        assert!(matches!(judge(&[[5.0, 0.0]]), Err(Violation::Shape(_))));
        assert!(matches!(judge(&[[f64::NAN, 0.0], [0.0, 0.0]]), Err(Violation::Shape(_))));
    }

    /// A case in which Theorem 4 as printed accepts an allocation that is not max-min fair.
    #[test]
    fn a_satisfied_flow_in_the_middle_defeats_the_two_conditions() {
        let middle = FairFlow::backlogged(1.0, &[0, 1]).with_demand(Rate::from_bps(2));
        let problem = problem(&[FairFlow::backlogged(1.0, &[0]), middle, FairFlow::backlogged(1.0, &[1])]);
        let unfair = allocation(&[[8.0, 0.0], [2.0, 0.0], [0.0, 10.0]]);
        let view = View::new(&problem, &unfair, 1e-9);
        assert_eq!((view.conserves_work(), view.links_are_fair()), (Ok(()), Ok(())));
        assert_eq!(is_max_min(&problem, &unfair, 1e-9), Err(Violation::Chain { less: 0, link: 1 }));
        let fair = solve(&problem).expect("a valid problem");
        assert!(fair.rates_bps.iter().zip([9.0, 2.0, 9.0]).all(|(rate, exact)| (rate - exact).abs() < 1e-9));
        assert_eq!(is_max_min(&problem, &fair, 1e-9), Ok(()));
    }

    /// Every flow that may use the idle link is satisfied, but a flow elsewhere could get what it wants.
    #[test]
    fn an_idle_link_behind_a_satisfied_flow_is_found() {
        let middle = FairFlow::backlogged(1.0, &[0, 1]).with_demand(Rate::from_bps(2));
        let problem = problem(&[FairFlow::backlogged(1.0, &[0]), middle]);
        let judged = is_max_min(&problem, &allocation(&[[8.0, 0.0], [2.0, 0.0]]), 1e-9);
        assert_eq!(judged, Err(Violation::Chain { less: 0, link: 1 }));
    }

    /// The first satisfied flow can move only if the second one moves to the idle link 2.
    #[test]
    fn a_chain_of_two_satisfied_flows_is_found() {
        let small = |links: &[usize]| FairFlow::backlogged(1.0, links).with_demand(Rate::from_bps(2));
        let flows = vec![FairFlow::backlogged(1.0, &[0]), small(&[0, 1]), small(&[1, 2])];
        let problem = Problem { links: [10, 2, 2].map(Rate::from_bps).to_vec(), flows };
        let split_bps = vec![vec![8.0, 0.0, 0.0], vec![2.0, 0.0, 0.0], vec![0.0, 2.0, 0.0]];
        let unfair = Allocation { rates_bps: vec![8.0, 2.0, 2.0], split_bps };
        assert_eq!(is_max_min(&problem, &unfair, 1e-9), Err(Violation::Chain { less: 0, link: 2 }));
    }
}
