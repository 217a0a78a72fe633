//! The core of the daemon: takes events, makes decisions and returns actions. It does no I/O, reads no clock and starts no threads, so that
//! the daemon, the simulator and tests run the same code.

#![forbid(unsafe_code)]

pub mod adhoc;
pub mod config;
pub mod core;
pub mod datapath;
pub mod fake;
pub mod hardware;
pub mod history;
pub mod links;
pub mod profiles;
mod request_error;
pub mod steering;

pub use request_error::{Cause, RequestError};
