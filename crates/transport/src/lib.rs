//! Bonds over real sockets: UDP below, TCP and UDP flows above.
//!
//! `braid_bond` makes the decisions and does no I/O. This crate adds sockets, a clock and randomness. [`HostDriver`] drives the bonds of a host,
//! [`BondFlow`] is a task's handle to one flow of a bond, [`relay`] serves clients, and [`client`] maintains a bond to a relay over the available
//! links.

#![forbid(unsafe_code)]

mod account;
pub mod client;
pub mod control;
mod control_flow;
pub mod datagram;
mod found;
mod host_driver;
mod lasting;
mod opening;
mod packet_flow;
mod packets;
pub mod relay;
mod socket;
mod sockets;
mod sources;
mod splice;
mod stream;

pub use control_flow::ControlFlow;
pub use datagram::UdpExchange;
pub use host_driver::{BondFlow, HostDriver, Moved, Notice, ResetCode};
pub use lasting::{copy_both, keep_alive};
pub use opening::{DirectReason, Opening};
pub use packet_flow::{FromRelay, PacketFlow};
pub use packets::PACKET_MTU;
pub use socket::{Binding, UdpLink};
pub use splice::{splice, splice_connections};
pub use stream::{FlowStream, TcpConnection};
