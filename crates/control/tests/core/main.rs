//! The core on a fake backend: its decisions when links appear, die, return and use up their allowance.

mod accepted;
mod apps;
mod context;
mod datagrams;
mod datapath;
mod detect;
mod energy;
mod fast;
mod faults;
mod late;
mod links;
mod moving;
mod packets;
mod policy;
mod programs;
mod relocated;
mod shares;
mod upkeep;
mod virtual_device;
mod world;
