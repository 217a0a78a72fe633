//! Multiple-interface fair queueing: the exact reference against which packet schedulers are tested.
//!
//! Source: Yap's thesis "Using All Networks Around Us" (2013), chapter 3 and section 4.3. The model: flow i with weight φ_i may use the links in its
//! interface preference Π, link j has capacity C_j, and flow i wants at most D_i. An allocation is weighted max-min fair if no flow's r_i/φ_i can be
//! raised without lowering one that is not higher (Definition 1). It is the lexicographic maximum of the sorted r_i/φ_i, and its r_i are unique.
//! Their split over links is not.
//!
//! Feasible rates: r is feasible if and only if r(S) <= C(N(S)) for each set S of flows, where N(S) are the links that S may use, and r <= D. C(N(S))
//! is a coverage function, so the feasible set is a polymatroid cut by a box, which is a polymatroid again. Nearly everything here rests on that: see
//! [`proportional`] for the consequences for the thesis's Theorem 1, and [`check`] for Theorem 4.
//!
//! | module | content |
//! |---|---|
//! | [`solver`] | the exact weighted max-min allocation |
//! | [`check`] | Theorem 4: whether an allocation is max-min fair, and if not, why |
//! | [`mod@clusters`] | Definition 2: rate clusters of an allocation |
//! | [`proportional`] | Theorem 1: when proportional fairness equals max-min fairness, and when it does not |
//! | [`guarantees`] | Theorems 2, 3, 5 and 6, Lemmas 7 to 10 as functions |
//! | [`pgps`] | fluid GPS and packet-by-packet GPS over several links |
//! | [`instance`] | the file formats of instances and results |
//!
//! This module is for tests and simulation. A packet scheduler does not use it at run time.

pub mod check;
pub mod clusters;
pub mod guarantees;
pub mod instance;
mod maxflow;
pub mod pgps;
pub mod proportional;
pub mod solver;

use braid_model::Rate;

pub use check::{Violation, is_max_min};
pub use clusters::{Cluster, clusters};
pub use solver::solve;

/// Minimum and maximum weight of a flow.
pub const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-12..=1e12;

/// A fair queueing problem. Flows and links are identified by their indices in these lists.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// Capacity C_j of each link.
    pub links: Vec<Rate>,
    /// The flows; all of them are backlogged.
    pub flows: Vec<FairFlow>,
}

/// One flow of a [`Problem`].
#[derive(Debug, Clone, PartialEq)]
pub struct FairFlow {
    /// Weight φ_i, within [`WEIGHTS`].
    pub weight: f64,
    /// The links it may use (its row of Π), in any order. A flow without links gets nothing.
    pub links: Vec<usize>,
    /// Demand D_i, the maximum rate it wants; `None` means unlimited.
    pub demand: Option<Rate>,
}

/// An allocation of rates, in bits per second as real numbers: integers would be too coarse for comparisons.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// Rate r_i of each flow.
    pub rates_bps: Vec<f64>,
    /// r_ij: for each flow and each link, the flow's rate over that link.
    pub split_bps: Vec<Vec<f64>>,
}

/// The error for an invalid problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// A weight outside [`WEIGHTS`].
    #[error("flow {flow} has weight {weight}: give it one from 1e-12 to 1e12")]
    Weight {
        /// Index of the flow.
        flow: usize,
        /// Weight of the flow.
        weight: f64,
    },
    /// A flow refers to a link that does not exist.
    #[error("flow {flow} may use link {link}, but there are {links} links, counted from 0: name one of those")]
    NoSuchLink {
        /// Index of the flow.
        flow: usize,
        /// Index of the link.
        link: usize,
        /// Number of links.
        links: usize,
    },
    /// A flow lists a link twice.
    #[error("flow {flow} names link {link} twice: name it once")]
    TwiceTheLink {
        /// Index of the flow.
        flow: usize,
        /// Index of the link.
        link: usize,
    },
}

impl Problem {
    /// Checks weights and links.
    ///
    /// # Errors
    /// The first invalid flow.
    pub fn validate(&self) -> Result<(), ProblemError> {
        for (flow, facts) in self.flows.iter().enumerate() {
            if !WEIGHTS.contains(&facts.weight) {
                return Err(ProblemError::Weight { flow, weight: facts.weight });
            }
            for (place, &link) in facts.links.iter().enumerate() {
                if link >= self.links.len() {
                    return Err(ProblemError::NoSuchLink { flow, link, links: self.links.len() });
                }
                if facts.links[..place].contains(&link) {
                    return Err(ProblemError::TwiceTheLink { flow, link });
                }
            }
        }
        Ok(())
    }
}

impl FairFlow {
    /// A flow without a demand limit, with this weight over these links.
    pub fn backlogged(weight: f64, links: &[usize]) -> Self {
        Self { weight, links: links.to_vec(), demand: None }
    }

    /// The same flow, with a demand of at most `demand`.
    pub fn with_demand(mut self, demand: Rate) -> Self {
        self.demand = Some(demand);
        self
    }

    /// D_i in bits per second; infinite if unlimited.
    fn demand_bps(&self) -> f64 {
        self.demand.map_or(f64::INFINITY, |demand| demand.bps() as f64)
    }
}

impl Allocation {
    /// r_i/φ_i of each flow of `problem`, in bits per second.
    pub fn ratios(&self, problem: &Problem) -> Vec<f64> {
        self.rates_bps.iter().zip(&problem.flows).map(|(rate, flow)| rate / flow.weight).collect()
    }

    /// Whether `link` serves the flow: it carries more than `tolerance` of the flow's rate.
    fn serves(&self, link: usize, flow: usize, tolerance: f64) -> bool {
        self.split_bps[flow][link] > tolerance * self.rates_bps[flow]
    }
}
