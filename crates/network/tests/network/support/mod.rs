//! A model network: switches that execute the entries of the controller on frames, hosts, access points.
pub(crate) mod frames;
pub(crate) mod switch;
pub(crate) mod world;
