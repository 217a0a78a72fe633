//! The congestion controller of a path, and what a bond reads from it.

mod crowd;
mod filters;
mod flight;
mod gauge;
mod probe;
mod radio;
mod rival;

pub use gauge::Gauge;
pub use radio::Radio;
