//! A network lab: a client and a server in separate namespaces, connected by emulated links, with real programs in both.
//!
//! ```no_run
//! use braid_lab::{Lab, LinkSpec, mbps, ms};
//!
//! let lab = Lab::builder()
//!     .link(LinkSpec::new("wlan0").rate(mbps(20)).delay(ms(10)))
//!     .link(LinkSpec::new("lte0").rate(mbps(6)).delay(ms(80)).loss(0.01))
//!     .start()?;
//! let ping = lab.client().command("ping")?.args(["-c", "1", "203.0.113.10"]).output()?;
//! lab.dark(0)?;
//! # anyhow::Ok(())
//! ```
//!
//! It needs root, or a user namespace in which it is root. It is invisible outside: its namespaces have no names, and vanish with the
//! process even if that is killed.
//!
//! It models radio contention only between links that are put on one channel ([`Builder::channel`]). It models a NAT only
//! in [`backhaul`], and neither other stateful middleboxes nor routes that differ by destination.

#![deny(unsafe_code)]

mod adhoc;
mod air;
mod ask;
pub mod backhaul;
pub mod bench;
pub mod browser;
mod channel;
pub mod churn;
pub mod daemon;
pub mod demo;
mod flood;
pub mod forwarding;
mod frame;
mod lab;
mod lan;
mod mesh;
mod moves;
mod namespace;
pub mod net_demo;
pub mod network;
pub mod relay;
mod responder;
mod site;
pub mod slicer;
mod spec;
pub mod ssh;
#[allow(unsafe_code)]
mod sys;
pub mod verifier;
mod watchdog;
mod web;
pub mod wifi;
pub mod workload;

pub use adhoc::{AdhocHost, Babel, adhoc_host};
pub use air::{Count, Counters, SAMPLE_EVERY, Sample, Watch};
pub use ask::ask;
pub use braid_model::Direction;
pub use flood::flood_addresses;
pub use frame::Filter;
pub use lab::{Builder, Lab};
pub use mesh::{Mesh, Reach};
pub use moves::{FAR, MovesRelay, ServerDaemon, firewall, nat, nft};
pub use namespace::Namespace;
pub use responder::Responder;
pub use spec::{LinkSpec, mbps, ms};
pub use sys::{become_root_of_a_user_namespace, effective_group, effective_user};
pub use web::Web;
