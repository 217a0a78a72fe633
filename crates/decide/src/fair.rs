//! Multiple-interface fair queueing: its exact reference, against which packet schedulers are held.
//!
//! Source: Yap's thesis "Using All Networks Around Us" (2013), chapter 3 and section 4.3. The model: flow i with weight φ_i may use the
//! links that its interface preference Π names, link j carries C_j, flow i wants at most D_i. An allocation is weighted max-min fair if
//! no flow's r_i/φ_i can be raised without lowering one that is no higher (Definition 1); it is the lexicographic maximum of the sorted
//! r_i/φ_i, and its r_i are unique. How they are split over links is not.
//!
//! What rates are possible: r is feasible if and only if r(S) <= C(N(S)) for each set S of flows, where N(S) are the links that S may
//! use, and r <= D. C(N(S)) is a coverage function, so that is a polymatroid, cut by a box, which is a polymatroid again. Nearly
//! everything here rests on that: see [`proportional`] for what becomes of the thesis's Theorem 1, [`check`] for Theorem 4.
//!
//! | module | holds |
//! |---|---|
//! | [`solver`] | the exact weighted max-min allocation |
//! | [`check`] | Theorem 4: is an allocation max-min fair, and if not, why not |
//! | [`mod@clusters`] | Definition 2: rate clusters of an allocation |
//! | [`proportional`] | Theorem 1: when proportional fairness is max-min fairness, and when it is not |
//! | [`guarantees`] | Theorems 2, 3, 5 and 6, Lemmas 7 to 10 as functions |
//! | [`pgps`] | fluid GPS and packet-by-packet GPS over several links |
//! | [`instance`] | instances and results as they stand in files |
//!
//! For tests and simulation: a packet scheduler needs none of this at run time.

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

/// The least and the greatest weight that a flow may have.
pub const WEIGHTS: std::ops::RangeInclusive<f64> = 1e-12..=1e12;

/// Flows and links; both are known by their place in these lists.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    /// C_j of each link.
    pub links: Vec<Rate>,
    /// The flows, all of them with something to send.
    pub flows: Vec<FairFlow>,
}

/// One flow of a [`Problem`].
#[derive(Debug, Clone, PartialEq)]
pub struct FairFlow {
    /// φ_i, within [`WEIGHTS`].
    pub weight: f64,
    /// The links it may use (its row of Π), in any order; none means that it gets nothing.
    pub links: Vec<usize>,
    /// D_i, the most it wants; `None` is without limit.
    pub demand: Option<Rate>,
}

/// Who gets what. In bits per second, as real numbers: whole ones would be too coarse to compare.
#[derive(Debug, Clone, PartialEq)]
pub struct Allocation {
    /// r_i of each flow.
    pub rates_bps: Vec<f64>,
    /// r_ij: for each flow, for each link, what that flow gets over that link.
    pub split_bps: Vec<Vec<f64>>,
}

/// Why a problem cannot be solved.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// A weight outside [`WEIGHTS`].
    #[error("flow {flow} has weight {weight}: give it one from 1e-12 to 1e12")]
    Weight {
        /// The flow's place.
        flow: usize,
        /// Its weight.
        weight: f64,
    },
    /// A flow names a link that is not there.
    #[error("flow {flow} may use link {link}, but there are {links} links, counted from 0: name one of those")]
    NoSuchLink {
        /// The flow's place.
        flow: usize,
        /// The link it names.
        link: usize,
        /// How many there are.
        links: usize,
    },
    /// A flow names a link twice.
    #[error("flow {flow} names link {link} twice: name it once")]
    TwiceTheLink {
        /// The flow's place.
        flow: usize,
        /// The link it repeats.
        link: usize,
    },
}

impl Problem {
    /// Whether weights and links make sense.
    ///
    /// # Errors
    /// The first flow that does not.
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
    /// A flow of this weight over these links that takes all it gets.
    pub fn backlogged(weight: f64, links: &[usize]) -> Self {
        Self { weight, links: links.to_vec(), demand: None }
    }

    /// The same, but wanting no more than `demand`.
    pub fn with_demand(mut self, demand: Rate) -> Self {
        self.demand = Some(demand);
        self
    }

    /// D_i in bits per second; infinite if there is no limit.
    fn demand_bps(&self) -> f64 {
        self.demand.map_or(f64::INFINITY, |demand| demand.bps() as f64)
    }
}

impl Allocation {
    /// r_i/φ_i of each flow of `problem`, in bits per second.
    pub fn ratios(&self, problem: &Problem) -> Vec<f64> {
        self.rates_bps.iter().zip(&problem.flows).map(|(rate, flow)| rate / flow.weight).collect()
    }

    /// Whether flow i is served by `link`: more than `tolerance` of its rate comes from there.
    fn serves(&self, link: usize, flow: usize, tolerance: f64) -> bool {
        self.split_bps[flow][link] > tolerance * self.rates_bps[flow]
    }
}
