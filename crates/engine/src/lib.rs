//! Braid's live loop: intercept, decide, carry, observe.

#![forbid(unsafe_code)]

pub mod config;
pub mod server;
pub mod store;
