//! Plots as SVG, readable without colour: figures of experiments, and goodput of links over time.

#![forbid(unsafe_code)]

mod chart;
mod figure;
mod stacked;
mod svg;

pub use chart::{Axis, Chart, Dot, Series, Shape};
pub use stacked::{Run, stacked};
