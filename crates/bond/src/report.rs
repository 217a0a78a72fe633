//! What a bond tells its driver: events, views and errors.

use std::time::Duration;

use braid_model::{ByteCount, Rate, Traffic};
use thiserror::Error;

use crate::path::PathState;
use crate::{FlowKey, FlowPolicy, Open, PathId, ReceiveError, WireError};

/// The other end broke the protocol: its bond ends, others do not notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BondError {
    /// A datagram is malformed.
    #[error("the other end sent what is no datagram of this protocol: {0}")]
    Wire(#[from] WireError),
    /// A flow's rules are broken.
    #[error("the other end broke the rules of {0}: {1}")]
    Receive(FlowKey, ReceiveError),
    /// Bytes of all flows beyond the credit given for all.
    #[error("the other end sent more than it has credit for")]
    TotalCredit,
    /// Too many pieces of streams with holes between them, or of what it acknowledges.
    #[error("the other end leaves holes in its streams, or in what it acknowledges: {0} pieces wait for what is missing")]
    Holes(usize),
    /// It does not take, or does not acknowledge, what it is told.
    #[error("the other end takes or acknowledges no answers: {0} wait for it")]
    Deaf(usize),
    /// A frame twice in a datagram that may be there once.
    #[error("the other end acknowledges a path twice in one datagram")]
    Repeated,
    /// A frame that only the other side of a bond may send.
    #[error("the other end sent {0}, which only the other side of a bond may")]
    Role(&'static str),
    /// Something is acknowledged that was never sent, or speaks of a flow that never was.
    #[error("the other end speaks of {0} that never was")]
    Never(&'static str),
}

/// Why a flow cannot be opened or written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum FlowError {
    /// Only clients open flows.
    #[error("only the client of a bond opens flows")]
    Server,
    /// As many as there may be.
    #[error("the bond carries {0} flows already, its limit: close some, or raise the limit")]
    TooMany(usize),
}

/// What happened that the driver should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The client opened a flow.
    Incoming {
        /// Its number.
        flow: FlowKey,
        /// For whom, and how.
        open: Open,
    },
    /// The server says how opening went: 0, or an error code.
    Opened {
        /// The flow.
        flow: FlowKey,
        /// 0 if it is open, else why not (`docs/protocol.md`).
        code: u64,
    },
    /// There are bytes, a message or the end to read. Told again only after a read that found nothing more.
    Readable(FlowKey),
    /// A flow that could take no more can take bytes again.
    Writable(FlowKey),
    /// The other end reset a flow: nothing more comes.
    Reset {
        /// The flow.
        flow: FlowKey,
        /// Why.
        code: u64,
    },
    /// The other end reads no more of a flow.
    Stopped {
        /// The flow.
        flow: FlowKey,
        /// Why.
        code: u64,
    },
    /// A flow is over and forgotten.
    Closed {
        /// The flow.
        flow: FlowKey,
        /// Bytes sent and received on each link.
        by_link: Vec<(u8, Traffic)>,
    },
    /// A path's state changed.
    Path {
        /// The path.
        path: PathId,
        /// What it is now.
        state: PathState,
    },
}

/// What can be told of a flow.
#[derive(Debug, Clone, PartialEq)]
pub struct FlowView {
    /// Its policy now.
    pub policy: FlowPolicy,
    /// Bytes sent (first copies) and received by link.
    pub by_link: Vec<(u8, Traffic)>,
    /// Written and not yet acknowledged.
    pub held: ByteCount,
}

/// What can be told of a path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PathView {
    /// The client's number of its link.
    pub link: u8,
    /// Whether it delivers.
    pub state: PathState,
    /// Used only while no other is good.
    pub backup: bool,
    /// Smoothed round-trip time of the bond's own acknowledgements.
    pub srtt: Duration,
    /// What it can deliver.
    pub rate: Rate,
    /// Its congestion window.
    pub window: ByteCount,
    /// Sent and not acknowledged.
    pub in_flight: ByteCount,
    /// Delivered and lost, as the bond counts them.
    pub delivered: ByteCount,
    /// Given up as lost.
    pub lost: ByteCount,
    /// Received.
    pub received: ByteCount,
}
