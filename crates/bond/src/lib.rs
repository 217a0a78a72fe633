//! Bonding without I/O: a bond splits flows into chunks, sends them over any set of paths and reassembles them in order at the other end.
//!
//! A [`Bond`] is the state that two hosts share: flows (TCP connections as byte streams, UDP exchanges as messages) and paths. Each path is a QUIC
//! connection over one link. This crate decides which chunk of which flow goes over which path, and when. QUIC provides encryption, congestion
//! control and path MTU discovery. Chunks travel in QUIC DATAGRAM frames (RFC 9221). The bond numbers and acknowledges the datagrams and retransmits
//! lost chunks over the best path. `docs/protocol.md` specifies the format.
//!
//! Why the bond does not use one QUIC stream per path: data that a stream holds when its path dies is stuck there, a stream's data waits for
//! retransmissions on its own path although another path is idle, and a sender cannot see which bytes arrived. With datagrams the bond controls all
//! of this.
//!
//! # The run loop
//!
//! This crate reads no clock, opens no socket and draws no random numbers. The driver of a bond passes in all inputs, then drains the outputs:
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
//! After each input: call `poll_event` until it returns `None`; for each path call `set_facts`, then `poll_datagram` until it returns `false`; then
//! wait until `poll_timeout` and call `handle_timeout`.

#![forbid(unsafe_code)]

mod bond;
pub mod controller;
pub mod dialler;
mod flow;
mod hello;
pub mod host;
mod messages;
mod path;
mod plan;
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

pub use bond::{Bond, codes};
pub use braid_decide::policy::BondScheduler;
pub use hello::{BondId, Hello, HelloError, Secret, VERSION, Welcome};
pub use path::PathState;
pub use plan::SchedulingPlan;
pub use receive::ReceiveError;
pub use report::{BondError, Event, FlowError, FlowView, PathView};
pub use transmit::MIN_DATAGRAM;
pub use wire::WireError;

/// The end of a bond. Only the client opens flows and paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The device with several links.
    Client,
    /// The relay or the server.
    Server,
}

/// Identifier of a flow within its bond. The client numbers flows from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowKey(pub u64);

impl fmt::Display for FlowKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "flow {}", self.0)
    }
}

/// Identifier of a path within its bond. The client assigns it and never reuses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u32);

impl fmt::Display for PathId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path {}", self.0)
    }
}

/// How the bond transports a flow's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowKind {
    /// Reliable, ordered bytes: TCP.
    Stream = 0,
    /// Messages that may be lost or reordered: UDP.
    Messages = 1,
    /// IP packets, as messages. Only a server that [offers](host::Host::offer) it takes such flows.
    Packets = 2,
    /// Requests about flows outside the bond, and their answers, as a stream. Only a server that [offers](host::Host::offer) it takes such flows.
    Control = 3,
}

impl FlowKind {
    /// Whether its data are messages rather than a stream of bytes.
    pub fn is_messages(self) -> bool {
        matches!(self, Self::Messages | Self::Packets)
    }

    /// Whether such flows last as long as their bond, and carry no connection of a program.
    pub fn is_lasting(self) -> bool {
        matches!(self, Self::Packets | Self::Control)
    }
}

/// Destination of a flow, as seen from the server.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// An address and port.
    Address(SocketAddr),
    /// A host name that the server resolves, and a port. The name has at most 255 bytes of letters, digits, `.`, `-` and `_`.
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

/// The client's policy for a flow. Both ends schedule by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowPolicy {
    /// Weight φ, in hundredths.
    pub weight: u16,
    /// Interface preference Π: the links that the flow may use, one bit each.
    pub links: LinkSet,
    /// Number of paths that carry each chunk (n-cast).
    pub copies: u8,
    /// Whether the flow has priority over flows that are not urgent.
    pub urgent: bool,
}

impl Default for FlowPolicy {
    /// Weight 1, all links, once, not urgent.
    fn default() -> Self {
        Self { weight: 100, links: LinkSet::ALL, copies: 1, urgent: false }
    }
}

/// Content of the OPEN frame, the first frame of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Open {
    /// Byte stream or messages.
    pub kind: FlowKind,
    /// Destination of the flow.
    pub target: Target,
    /// Scheduling policy of the flow.
    pub policy: FlowPolicy,
}

/// A change of a path's link that one end reports to the other. The report may travel over any path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathUpdate {
    /// The link is up (again).
    Up = 0,
    /// The link is down. Data in flight on the path is retransmitted over other paths at once.
    Down = 1,
    /// The path is a backup: it carries data only while no other path is good.
    Backup = 2,
}

/// The state of a path's congestion controller. The driver updates it before it polls the path for datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathFacts {
    /// QUIC's smoothed round-trip time.
    pub rtt: Duration,
    /// Delivery rate; zero if not measured yet.
    pub rate: Rate,
    /// Bytes that the path can send now. Acknowledgements and probes do not need room.
    pub room: ByteCount,
    /// Congestion window.
    pub window: ByteCount,
}

impl Default for PathFacts {
    /// Facts of a path without measurements. The window is QUIC's initial window.
    fn default() -> Self {
        let window = ByteCount::new(12_000);
        Self { rtt: Duration::from_millis(100), rate: Rate::ZERO, room: window, window }
    }
}

/// Upper bounds of the memory that one end spends on behalf of the other, so that no peer can exhaust it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Number of simultaneous flows.
    pub flows: usize,
    /// Received and unread bytes of one flow. A flow's window grows up to this limit on demand.
    pub max_window: u64,
    /// Received and unread bytes of all flows. The same limit applies to the send buffers of all flows together.
    pub total_window: u64,
    /// Written and unacknowledged bytes of one flow.
    pub send_buffer: u64,
}

impl Limits {
    /// Limits for a bond with a client that presents no key. Anonymous clients share a fixed amount of memory, so their limits are small. The
    /// protocol does not allow a smaller window.
    pub const ANONYMOUS: Self = Self { flows: 64, max_window: 8 << 20, total_window: 16 << 20, send_buffer: 8 << 20 };
}

impl Default for Limits {
    fn default() -> Self {
        Self { flows: 10_000, max_window: 16 << 20, total_window: 64 << 20, send_buffer: 16 << 20 }
    }
}
