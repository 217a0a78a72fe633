//! Bonding without I/O: flows as chunks over any set of paths, put in order again at the other end.

#![forbid(unsafe_code)]

pub mod controller;
