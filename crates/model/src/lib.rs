//! Braid's words: ids, units with types, and facts about links, flows and applications.
//!
//! Nothing here does I/O, reads a clock or decides anything; every other crate speaks in these types.

#![forbid(unsafe_code)]

pub mod address;
mod application;
mod energy;
mod flow;
pub mod key;
mod link;
mod link_set;
mod network;
pub mod ranges;
pub mod special;
mod text;
mod units;

pub use application::{Application, Class};
pub use energy::{Joules, Power};
pub use flow::{Affinity, Direction, FlowId, PerDirection, Protocol, Traffic};
pub use link::{DefaultRoute, Family, LinkFacts, LinkIndex, LinkKind, LinkState, PerFamily, Role};
pub use link_set::{LinkSet, MAX_LINKS};
pub use network::{NetworkSnapshot, NextHop, RouteFacts, RouteKind, RuleAction, RuleFacts};
pub use text::{printable, steers};
pub use units::{ByteCount, Rate, Time, UnitError};
