//! Bonds on real sockets: UDP below, TCP and UDP flows above.
//!
//! `braid_bond` decides and does no I/O; this crate gives it sockets, a clock and chance. [`HostDriver`] drives a host's bonds, [`BondFlow`] is one
//! flow of a bond as a task uses it, [`relay`] serves clients, [`client`] keeps a bond to a relay over whatever links there are.

#![forbid(unsafe_code)]

mod account;
pub mod client;
pub mod datagram;
mod found;
mod host_driver;
mod lasting;
mod opening;
pub mod relay;
mod socket;
mod sockets;
mod sources;
mod splice;
mod stream;

pub use datagram::UdpExchange;
pub use host_driver::{BondFlow, FlowEnd, HostDriver, Moved, Notice};
pub use lasting::{copy_both, keep_alive};
pub use opening::{Opening, Unopened};
pub use socket::{Binding, UdpLink};
pub use splice::{splice, splice_connections};
pub use stream::{FlowStream, TcpConnection};
