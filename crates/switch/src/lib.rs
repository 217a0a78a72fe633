//! A model of an OpenFlow switch without I/O, for tests and benchmarks of the controller: it executes flow entries, groups and packet-outs on frames.
//!
//! ```
//! use braid_model::Time;
//! use braid_openflow::Version;
//! use braid_switch::SwitchModel;
//!
//! let mut switch = SwitchModel::new(1, Version::V1_3, 2);
//! switch.connect(Time::ZERO);
//! let mut bytes = Vec::new();
//! switch.connection.as_mut().unwrap().poll_output(&mut bytes); // its hello, for the controller
//! let frames = switch.receive(Time::ZERO, &[4, 0, 0, 8, 0, 0, 0, 1]); // the controller's
//! assert!(frames.is_empty()); // what to send out of ports
//! ```

#![forbid(unsafe_code)]

mod fields;
pub mod frames;
mod model;

pub use model::{Flow, Out, SwitchModel};
