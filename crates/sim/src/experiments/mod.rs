//! The papers' experiments.

use crate::experiment::Experiment;

/// All experiments, paper by paper, in the order of figures.
pub fn all() -> Vec<&'static dyn Experiment> {
    Vec::new()
}
