//! Braid's live loop: intercept, decide, carry, observe.

#![forbid(unsafe_code)]

pub mod config;
pub mod store;
pub mod server;
