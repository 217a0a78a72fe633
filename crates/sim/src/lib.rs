//! A discrete-event simulator of a device with several links. It has virtual time, a segment-level TCP model and the daemon's own scheduling
//! code.
//!
//! ```
//! use braid_model::{ByteCount, Rate};
//! use braid_sim::{Arrivals, Class, LinkSpec, Scenario, Size, simulate};
//! use std::time::Duration;
//!
//! let ms = Duration::from_millis;
//! let scenario = Scenario {
//!     links: vec![LinkSpec::symmetric("wifi", Rate::from_mbps(20), ms(20)), LinkSpec::symmetric("lte", Rate::from_mbps(10), ms(60))],
//!     workload: vec![Class::downloads("web", Arrivals::Poisson { per_second: 5.0 }, Size::Exponential(ByteCount::new(200_000)))],
//!     duration: Duration::from_secs(10),
//!     ..Scenario::default()
//! };
//! let outcome = simulate(&scenario)?;
//! assert!(outcome.goodput() > Rate::from_mbps(4));
//! # Ok::<(), braid_sim::ScenarioError>(())
//! ```
//!
//! A scenario gives the same outcome on every machine: time is in integer nanoseconds, all randomness comes from the scenario's seed, and
//! logarithms, roots and powers are computed by [`math`], not by the platform.
//!
//! Topology: one client, whose links each have a rate, delay, loss and queue per direction. Behind the links are servers, each with an own
//! link that all flows to it share. Links may share a radio channel ([`Medium`]). A connection-oriented stream is one TCP connection on one
//! link. A packet-oriented stream (to a server that runs Braid) has one TCP connection on each link, and a scheduler of
//! [`braid_decide::packet`] distributes its chunks over them. With [`Scenario::bond`] it is instead a flow of the daemon's own bond: real
//! QUIC over the same links, in competition with the same TCP.
//!
//! [`fetch_ranges`] simulates downloads by byte range over several links. It runs the engine of [`braid_range`] over the same link and TCP
//! models.

#![forbid(unsafe_code)]

mod adhoc;
pub mod coverage;
mod energy;
mod event;
pub mod experiment;
pub mod experiments;
pub mod fairness;
mod knowledge;
pub mod math;
mod operetta;
mod pair;
mod pipe;
mod ranges;
mod scenario;
mod schedule;
mod spread;
mod stats;
mod steer;
mod stream;
pub mod tcp;
mod virtual_interface;
mod workload;
mod world;

pub use operetta::{Aim, Operetta};
pub use pair::{Pair, Quic};
pub use ranges::{Fetched, Ranged, RangedFile, RangedLink, fetch_ranges};
pub use scenario::{
    Battery, Bonding, CapacityKnowledge, Change, DemandKnowledge, Knowledge, LinkChange, LinkPower, LinkSpec, LoadKnowledge, Medium,
    Scenario, ScenarioError, Scheduling, ServerLink, ServerSpec,
};
pub use schedule::{LinkView, NewStream, Scheduler, View};
pub use spread::{Packets, Spreading};
pub use stats::{Counters, FlowOutcome, LinkOutcome, Outcome, Summary};
pub use virtual_interface::VirtualInterface;
pub use workload::{Arrivals, Class, Size};
pub use world::{simulate, simulate_with};
