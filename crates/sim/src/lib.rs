//! A simulator of a device with several links: discrete events, virtual time, TCP by the segment, the daemon's own scheduling rule.
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
//! A scenario gives the same outcome on every machine: time is whole nanoseconds, chance comes from the scenario's seed, and no
//! logarithm, root or power is the platform's ([`math`]).
//!
//! The topology: one client; each of its links has a rate, delay, loss and queue in either direction; behind them, servers, each with a
//! link of its own that all flows to it share. Links may share a radio channel ([`Medium`]). A connection-oriented stream is one TCP
//! connection on one link. A packet-oriented stream (to a server that runs Braid) is one TCP connection on each link, over which its
//! chunks are spread by one of [`braid_decide::packet`]'s schedulers; or, with [`Scenario::bond`], a flow of the daemon's own bond: real
//! QUIC over the same links, beside the same TCP.
//!
//! Downloads by byte range over several links ([`fetch_ranges`]) run [`braid_range`]'s engine over the same links and the same TCP.

#![forbid(unsafe_code)]

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
