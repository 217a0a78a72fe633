//! Braid's decisions, pure: every function takes the time, the facts and the seed it needs as arguments.
//!
//! The daemon, `braid run` and the simulator call the same code.

#![forbid(unsafe_code)]

pub mod connection;
pub mod policy;
pub mod steer;
pub mod tables;
