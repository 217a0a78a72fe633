//! Bonding without I/O: flows as chunks over any set of paths, put in order again at the other end.
//!
//! A [`Bond`] is what two hosts share: flows (TCP connections as streams of bytes, UDP exchanges as messages) and paths, each a QUIC
//! connection over one link. This crate decides which piece of which flow goes over which path and when; QUIC does what QUIC does well:
//! encryption, congestion control, path MTU. Pieces travel in QUIC DATAGRAM frames (RFC 9221), are numbered and acknowledged here, and are
//! sent again over whichever path is best. `docs/protocol.md` specifies the format.
//!
//! Why not QUIC streams, one per path: what a stream holds when its path dies stays with it, a stream's data waits for its own path's
//! retransmissions though another path is idle, and a sender cannot see what arrived. Datagrams leave all of that to the bond.
//!
//! # The run loop
//!
//! Nothing here reads a clock, opens a socket or rolls dice. Whoever drives a bond passes everything in, then drains it:
//!
//! ```
//! use braid_bond::{Bond, FlowKind, Event, FlowPolicy, Limits, Open, PathFacts, PathId, Side, Target};
//! use braid_model::Time;
//! use bytes::{Bytes, BytesMut};
//!
//! let now = Time::ZERO;
//! let mut client = Bond::new(Side::Client, Limits::default(), now);
//! let mut server = Bond::new(Side::Server, Limits::default(), now);
//! let path = PathId(0);
//! client.add_path(now, path, 0, PathFacts::default());
//! server.add_path(now, path, 0, PathFacts::default());
//!
//! let target = Target::Name("example.org".into(), 80);
//! let flow = client.open(now, Open { kind: FlowKind::Stream, target, policy: FlowPolicy::default() })?;
//! client.write(flow, Bytes::from_static(b"hello"));
//! let mut datagram = BytesMut::new();
//! while client.poll_datagram(now, path, 1200, &mut datagram) {
//!     server.receive(now, path, datagram.split().freeze())?; // over the network
//! }
//! assert!(matches!(server.poll_event(), Some(Event::Incoming { .. })));
//! assert_eq!(server.read(now, flow, usize::MAX), Some(Bytes::from_static(b"hello")));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! After each input: `poll_event` until `None`; for each path `set_facts`, then `poll_datagram` until `false`; then wait until `poll_timeout`
//! and call `handle_timeout`.

#![forbid(unsafe_code)]

mod bond;
pub mod controller;
pub mod dialler;
mod flow;
mod hello;
pub mod host;
mod messages;
mod path;
mod receive;
mod report;
mod send;
mod tracker;
mod transmit;
#[cfg(test)]
mod vectors;
mod window;
mod wire;

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Rate};

pub use bond::choice::SchedulingPlan;
pub use bond::{Bond, codes};
pub use braid_decide::policy::BondScheduler;
pub use hello::{BondId, Hello, HelloError, Secret, VERSION, Welcome};
pub use path::PathState;
pub use receive::ReceiveError;
pub use report::{BondError, Event, FlowError, FlowView, PathView};
pub use transmit::MIN_DATAGRAM;
pub use wire::WireError;

/// Which end of a bond: clients open flows and paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The device with several links.
    Client,
    /// The relay or the server.
    Server,
}

/// A flow of one bond, numbered by the client from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey(pub u64);

impl fmt::Display for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flow {}", self.0)
    }
}

/// A path of one bond, numbered by the client; a number is used once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u32);

impl fmt::Display for PathId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path {}", self.0)
    }
}

/// How a flow's data travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowKind {
    /// As bytes in order, none missing: TCP.
    Stream = 0,
    /// As messages that may be lost: UDP.
    Messages = 1,
}

/// Whom a flow is for, as the server sees it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// An address and port.
    Address(SocketAddr),
    /// A name to resolve there, at most 255 bytes of letters, digits, `.`, `-` and `_`, and a port.
    Name(String, u16),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "{address}"),
            Self::Name(name, port) => write!(f, "{name}:{port}"),
        }
    }
}

/// What the client's policy says of a flow; both ends schedule by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowPolicy {
    /// φ in hundredths.
    pub weight: u16,
    /// Π: the links it may use, one bit each.
    pub links: LinkSet,
    /// On how many paths each piece goes (n-cast).
    pub copies: u8,
    /// Goes before flows that are not.
    pub urgent: bool,
}

impl Default for FlowPolicy {
    /// Weight 1, all links, once, not urgent.
    fn default() -> Self {
        Self { weight: 100, links: LinkSet::ALL, copies: 1, urgent: false }
    }
}

/// The first thing said of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// Bytes or messages.
    pub kind: FlowKind,
    /// Whom it is for.
    pub target: Target,
    /// How it is to be treated.
    pub policy: FlowPolicy,
}

/// What one end tells the other of a path, over any path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathUpdate {
    /// Its link is there (again).
    Up = 0,
    /// Its link is gone: what it holds must go elsewhere at once.
    Down = 1,
    /// To be used only while no other is good.
    Backup = 2,
}

/// What a path's congestion controller knows; given anew before the path is asked for datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathFacts {
    /// QUIC's smoothed round-trip time.
    pub rtt: Duration,
    /// What it can deliver; zero if nothing is known.
    pub rate: Rate,
    /// What it can send at once; acknowledgements and probes are sent without.
    pub room: ByteCount,
    /// Its congestion window.
    pub window: ByteCount,
}

impl Default for PathFacts {
    /// A path of which nothing is known: QUIC's initial window.
    fn default() -> Self {
        let window = ByteCount::new(12_000);
        Self { rtt: Duration::from_millis(100), rate: Rate::ZERO, room: window, window }
    }
}

/// What one end holds for the other at most, so that no peer can exhaust its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Flows at a time.
    pub flows: usize,
    /// Received and unread bytes of one flow, once it has shown that it needs as much.
    pub max_window: u64,
    /// Received and unread bytes of all flows; as much is kept for sending.
    pub total_window: u64,
    /// Unacknowledged bytes of one flow that are kept for sending.
    pub send_buffer: u64,
}

impl Limits {
    /// For a bond in which one end shows no key: its share of the memory that strangers can claim. The protocol allows no smaller window.
    pub const ANONYMOUS: Self = Self { flows: 64, max_window: 8 << 20, total_window: 16 << 20, send_buffer: 8 << 20 };
}

impl Default for Limits {
    fn default() -> Self {
        Self { flows: 10_000, max_window: 16 << 20, total_window: 64 << 20, send_buffer: 16 << 20 }
    }
}
