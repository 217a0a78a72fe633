//! The daemon's mind on a fake system: what it decides when links come, die, return and fill up.

mod apps;
mod detect;
mod energy;
mod faults;
mod links;

mod policy;
mod world;
