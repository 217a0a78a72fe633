//! The types that all crates of Braid share: ids, typed units, and data about links, flows and applications.
//!
//! This crate does no I/O, reads no clock and makes no decisions.

#![forbid(unsafe_code)]

pub mod address;
mod application;
mod checksum;
mod energy;
mod flow;
pub mod key;
mod link;
mod link_set;
mod mac;
mod network;
pub mod ranges;
pub mod special;
mod text;
mod units;

pub use application::{Application, Class};
pub use checksum::checksum;
pub use energy::{DeviceModel, Joules, Power};
pub use flow::{Affinity, Direction, FlowId, PerDirection, Protocol, SequenceNumbers, Traffic};
pub use link::{DefaultRoute, Family, LinkFacts, LinkIndex, LinkKind, LinkState, PerFamily, Role};
pub use link_set::{LinkSet, MAX_LINKS};
pub use mac::{Mac, NoMac};
pub use network::{FlowPorts, NetworkSnapshot, NextHop, RouteFacts, RouteKind, RuleAction, RuleFacts};
pub use text::{printable, steers};
pub use units::{ByteCount, Rate, Time, UnitError};
