//! Braid's decisions as pure functions and state machines: the caller passes in the time, the facts and the seed.
//!
//! The daemon, `braid run` and the simulator call the same code.

#![forbid(unsafe_code)]

pub mod adhoc;
pub mod allowance;
pub mod bucket;
pub mod capacity;
pub mod class;
pub mod connection;
pub mod counters;
pub mod demand;
pub mod detection;
pub mod energy;
pub mod fair;
pub mod gateway;
pub mod health;
pub mod instance;
pub mod late;
pub mod midrr;
pub mod motion;
pub mod operetta;
pub mod outlet;
pub mod packet;
pub mod pattern;
pub mod policy;
pub mod refusals;
pub mod shaping;
pub mod stability;
pub mod steer;
pub mod tables;
pub mod tradeoff;
pub mod tunnel;
pub mod virtual_device;
pub mod virtual_interface;
