//! A link emulator without I/O: rate, delay, jitter, loss, queue, recorded traces.
//!
//! [`EmulatedLink`] is one direction of a link. The caller pushes packets in, pops packets out and asks for the time of the next event:
//!
//! ```
//! use braid_model::{ByteCount, Rate, Time};
//! use braid_netem::{EmulatedLink, Profile, PushOutcome};
//! use std::time::Duration;
//!
//! let profile = Profile { rate: Rate::from_mbps(12).into(), delay: Duration::from_millis(10), ..Profile::default() };
//! let mut link = EmulatedLink::new(profile, 1, Time::ZERO);
//! assert_eq!(link.push(Time::ZERO, vec![0u8; 1500]), PushOutcome::Queued);
//! let due = link.poll_timeout().unwrap();
//! assert_eq!(due, Time::from_millis(11)); // 1 ms on the wire, 10 ms on the way
//! assert!(link.pop(due).is_some());
//! ```
//!
//! The emulation is deterministic: the same pushes at the same times with the same seed give the same results on every machine.

#![forbid(unsafe_code)]

mod link;
mod loss;
mod random;
mod trace;

pub use link::{EmulatedLink, LinkStats, Packet, Profile, PushOutcome, RateSource};
pub use loss::{Loss, Probability};
pub use random::Random;
pub use trace::{Trace, TraceError};
