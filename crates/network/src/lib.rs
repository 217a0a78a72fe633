//! The network's side without I/O: one OpenFlow controller over Wi-Fi, cellular and wire, for devices that use many networks at once.
//!
//! Source: Yap, *Using All Networks Around Us*, chapter 5 (OpenFlow Wireless). Handover is the same for all kinds of radio: flows are routed anew.
//!
//! # Data flow
//!
//! ```text
//! bytes of switches -> Connection -> topology (LLDP), hosts (packets), readings of tables
//! reports of clients ------------------------------> hosts -> mobility managers -> routes, notices
//! requests of operators ------> flows, groups, limits            |
//!                                                                v
//!                     paths: trees -> rules: wanted entries, compared with what stands -> stages -> bytes to switches
//! ```
//!
//! A [`Controller`] joins all. It gets bytes of connections, reports of clients, requests and the time, and gives bytes, notices and events. It has no
//! clock, socket or randomness.
//!
//! ```
//! use braid_model::Time;
//! use braid_network::{Config, ConnectionId, Controller};
//!
//! let now = Time::ZERO;
//! let mut controller = Controller::new(Config::new([7; 32]), now);
//! controller.connected(now, ConnectionId(1), "192.0.2.1:40000");
//! let mut bytes = Vec::new();
//! while controller.poll_output(ConnectionId(1), &mut bytes) {} // its hello: write it to the socket
//! assert_eq!(bytes[1], 0);
//! let due = controller.poll_timeout().unwrap(); // when to call `handle_timeout` at the latest
//! assert!(due > now);
//! ```

#![forbid(unsafe_code)]

mod controller;
mod discovery;
mod frame;
mod hosts;
mod ids;
mod lldp;
pub mod merge;
pub mod mobility;
pub mod paths;
mod reservation;
mod rules;
pub mod sfnet;
pub mod station;
mod topology;
pub mod wire;

pub use controller::{
    AccessState, Config, Controller, Event, HostState, MAX_APART, Phase, Request, RequestError, Scope, Snapshot, SwitchState,
};
pub use frame::group_address;
pub use hosts::{Attachment, Client, Host, HostLimits, HostRefusal};
pub use ids::{
    Access, AccessId, AccessKind, BlockSpec, Channel, ConnectionId, FlowId, FlowSpec, GroupSpec, Place, Sender, Signal, SliceId,
};
pub use lldp::LldpError;
pub use reservation::{Refusal, Reservation};
pub use rules::Owner;
pub use topology::Link;
