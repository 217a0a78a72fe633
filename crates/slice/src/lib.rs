//! An OpenFlow slicer without I/O: several controllers share one network of switches, and each sees and changes only its own part of it.
//!
//! Sources: Sherwood et al., *FlowVisor: A Network Virtualization Layer* (2009) for the idea; Yap, *Using All Networks Around Us*, chapter 5, for slices of
//! OpenFlow Wireless; OpenFlow 1.0.1 and 1.3.5.
//!
//! A [`Slicer`] is a controller to switches and a switch to controllers, so one slicer can stand behind another one.
//!
//! # What keeps slices apart
//!
//! - A slice has [regions](Region): packets at ports. Regions of one [level](Level) do not overlap. Where regions of different levels do, the higher one has
//!   the packets: each region has a guard, an entry above all entries of lower levels.
//! - An entry of a slice becomes rows: one for each region that it meets, narrowed to that region.
//! - Actions are checked symbolically: whatever packets match a row, what the actions make of them stays within the slice's space.
//! - Cookies of rows name the slice and the entry. What a controller asked for is written down, so it survives the slicer.
//!
//! ```
//! use braid_model::Time;
//! use braid_slice::{ConnectionId, Settings, Slicer, Wanted};
//!
//! let now = Time::ZERO;
//! let mut slicer = Slicer::new(Settings::new([7; 32]), Wanted::default(), now).unwrap();
//! slicer.accepted(now, ConnectionId(1), "192.0.2.1:40000"); // a switch
//! let mut hello = Vec::new();
//! assert!(slicer.poll_part(ConnectionId(1), 1 << 16, &mut hello));
//! assert!(slicer.poll_timeout().is_some_and(|due| due > now));
//! ```

#![forbid(unsafe_code)]

mod actions;
mod journal;
mod packet;
mod plan;
mod priorities;
mod slicer;
pub mod space;
mod table;
mod words;

pub use packet::header_of;
pub use plan::{Limits, MAX_SLICES, MAX_USERS, PRODUCTION, Part, PlanError, SliceNo, SliceSpec, Stage, User, Wanted};
pub use slicer::{
    ConnectionId, Counters, Dial, LinkId, Settings, SliceState, Slicer, Snapshot, SwitchPhase, SwitchState, Trouble, UplinkState,
};
pub use space::{Level, Permission, Ports, Region};
pub use words::{WordsError, headers};
