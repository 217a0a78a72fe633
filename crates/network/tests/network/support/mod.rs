//! A model network: switches that execute the entries of the controller on frames, hosts, access points.
pub(crate) mod entry;
pub(crate) mod world;

pub(crate) use braid_switch::{self as switch, frames};
