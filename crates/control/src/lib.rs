//! What the daemon decides: takes in what the system tells, decides, and says what is to be done. It does no I/O, reads no clock and starts
//! nothing, so that the live loop, the simulator and tests run the same code.

#![forbid(unsafe_code)]

pub mod config;
pub mod core;
pub mod fake;
pub mod history;
pub mod links;
pub mod profiles;
mod request_error;
pub mod steering;

pub use request_error::{Cause, RequestError};
