//! Braid's live loop: intercept, decide, carry, observe.

#![forbid(unsafe_code)]

pub mod api_handler;
pub mod background;
pub mod config;
pub mod daemon;
mod lock;
mod memory;
mod named_file;
pub mod peers;
mod places;
mod privilege;
pub mod profile_service;
pub mod profiles;
pub mod proxy;
pub mod run;
pub mod server;
pub mod settings;
pub mod store;
pub mod watchdog;
