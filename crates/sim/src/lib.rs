//! A simulator of a device with several links, and the papers' experiments on it.
//!
//! Nothing here does I/O, reads a clock or rolls dice: the same seed gives the same bytes on every machine.

#![forbid(unsafe_code)]

pub mod experiment;
pub mod experiments;
