//! Events, views and errors that a bond reports to its driver.

use std::time::Duration;

use braid_model::{ByteCount, Rate, Traffic};
use thiserror::Error;

use crate::path::PathState;
use crate::{FlowKey, FlowPolicy, Open, PathId, ReceiveError, WireError};

/// The other end violated the protocol. Its bond ends; other bonds are not affected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BondError {
    /// A datagram is malformed.
    #[error("the other end sent a malformed datagram: {0}")]
    Wire(#[from] WireError),
    /// A frame violates the rules of its flow.
    #[error("the other end violated the protocol in {0}: {1}")]
    Receive(FlowKey, ReceiveError),
    /// More bytes over all flows than the connection-level credit allows.
    #[error("the other end sent more bytes than the credit of all flows allows")]
    TotalCredit,
    /// Too many out-of-order chunks, or too many gaps in the acknowledgements.
    #[error("the other end leaves too many gaps in its streams or acknowledgements: {0} out-of-order pieces are pending")]
    Gaps(usize),
    /// The other end does not acknowledge the frames that it causes.
    #[error("the other end does not accept or acknowledge answers: {0} are pending")]
    Backlog(usize),
    /// A datagram acknowledges the same path twice.
    #[error("the other end acknowledges a path twice in one datagram")]
    Repeated,
    /// A frame that only the opposite side of a bond may send.
    #[error("the other end sent {0}, which only the opposite side of a bond may send")]
    Role(&'static str),
    /// A frame acknowledges a datagram that was never sent, or refers to a flow that never existed.
    #[error("the other end refers to {0} that never existed")]
    Nonexistent(&'static str),
}

/// Why a flow cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FlowError {
    /// Only the client opens flows.
    #[error("only the client of a bond can open flows")]
    Server,
    /// The limit of simultaneous flows is reached.
    #[error("the bond has reached its limit of {0} flows: close some, or raise the limit")]
    TooMany(usize),
}

/// An event for the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Server: the client opened a flow.
    Incoming {
        /// Key of the flow.
        flow: FlowKey,
        /// Destination and policy.
        open: Open,
    },
    /// Client: the server reports the result of opening a flow.
    Opened {
        /// Key of the flow.
        flow: FlowKey,
        /// 0 for success, or an error code (`docs/protocol.md`).
        code: u64,
    },
    /// Bytes, a message or the end of the stream can be read. Emitted again only after a read.
    Readable(FlowKey),
    /// A flow whose send buffer was full accepts bytes again.
    Writable(FlowKey),
    /// The other end reset a flow. No more data arrives.
    Reset {
        /// Key of the flow.
        flow: FlowKey,
        /// Error code.
        code: u64,
    },
    /// The other end stopped reading a flow.
    Stopped {
        /// Key of the flow.
        flow: FlowKey,
        /// Error code.
        code: u64,
    },
    /// A flow is over. Its key is no longer valid.
    Closed {
        /// Key of the flow.
        flow: FlowKey,
        /// Bytes sent and received on each link.
        by_link: Vec<(u8, Traffic)>,
    },
    /// The state of a path changed.
    Path {
        /// Identifier of the path.
        path: PathId,
        /// New state.
        state: PathState,
    },
}

/// Statistics of a flow.
#[derive(Debug, Clone, PartialEq)]
pub struct FlowView {
    /// Current policy.
    pub policy: FlowPolicy,
    /// Bytes sent (first copies only) and received, by link.
    pub by_link: Vec<(u8, Traffic)>,
    /// Bytes written and not yet acknowledged.
    pub held: ByteCount,
}

/// Statistics of a path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathView {
    /// The client's number of the path's link.
    pub link: u8,
    /// Whether the path delivers.
    pub state: PathState,
    /// Whether the path carries data only while no other path is good.
    pub backup: bool,
    /// Smoothed round-trip time, from the bond's own acknowledgements.
    pub srtt: Duration,
    /// Delivery rate.
    pub rate: Rate,
    /// Congestion window.
    pub window: ByteCount,
    /// Bytes sent and neither acknowledged nor lost.
    pub in_flight: ByteCount,
    /// Bytes acknowledged so far.
    pub delivered: ByteCount,
    /// Bytes declared lost so far.
    pub lost: ByteCount,
    /// Bytes received so far.
    pub received: ByteCount,
}
