//! Drawings as SVG, readable without colour: the figures of experiments, and what links brought over time.

#![forbid(unsafe_code)]

mod chart;
mod figure;
mod stacked;
mod svg;

pub use chart::{Axis, Chart, Dot, Series, Shape};
pub use stacked::{Run, stacked};
