//! Moved flows: running flows whose packets have other addresses on the way than in their sockets.

use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Addresses and ports of packets from this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowEnds {
    /// Where they come from, for example `192.0.2.7:50123` or `[2001:db8::7]:50123`.
    #[schemars(with = "String")]
    pub source: SocketAddr,
    /// Where they go to.
    #[schemars(with = "String")]
    pub destination: SocketAddr,
}

/// Protocol of a moved flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MovedProtocol {
    /// A TCP connection.
    #[default]
    Tcp,
    /// An exchange of datagrams.
    Udp,
}

impl MovedProtocol {
    fn is_tcp(&self) -> bool {
        *self == Self::Tcp
    }
}

/// A running flow of this machine whose packets have other addresses on the way than in its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MovedFlow {
    /// Addresses and ports in the socket.
    pub own: FlowEnds,
    /// Addresses and ports on the way. The other host must exchange them back.
    pub wire: FlowEnds,
    /// Its protocol.
    #[serde(default, skip_serializing_if = "MovedProtocol::is_tcp")]
    pub protocol: MovedProtocol,
    /// Whether its packets from this machine are rewritten, too; else only those that arrive are. Ignored in requests.
    #[serde(default)]
    pub sends: bool,
    /// Whether the kernel rewrites it already. Ignored in requests.
    #[serde(default)]
    pub active: bool,
    /// It is no flow of this machine: packets between two other hosts pass this machine, which exchanges both ends. `own` is the side of the destination, and
    /// `wire` that of the host that moves the flow, each from this machine. No program of this machine may use these ports.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub passes: bool,
    /// Rest of its lease. Ignored in requests.
    #[serde(default)]
    pub remaining_ms: u64,
    /// The sequence numbers with which the connection began for the other end. If a request gives them, a flow that began with others is refused. For datagrams, the
    /// two halves of the proof that the other end got, which whoever asks has checked. Never in answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numbers: Option<SequenceNumbers>,
}

/// The sequence numbers with which a TCP connection began, as one end knows them. An end may count its SYN or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SequenceNumbers {
    /// Of the first byte that this end sent.
    pub sent: u32,
    /// Of the first byte that it received.
    pub received: u32,
}

/// Request of `POST /v1/rewrites`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RewriteRequest {
    /// The flows.
    pub flows: Vec<MovedFlow>,
    /// For how long, in milliseconds, unless it is asked for again; at most an hour. `null`: from now on they have their own addresses on the way.
    pub lease_ms: Option<u64>,
    /// `false`: for now, only packets that arrive are rewritten; flows that already send with these addresses continue to. Ask both hosts for this first, and let them send when both are `active`: an end that receives
    /// what it does not expect ends the connection. An end that begins to send also sends a segment that the connection ignores, so that something `arrives`.
    #[serde(default)]
    pub sends: bool,
    /// `true`: the flows that can be moved are; `false`: all are, or none.
    #[serde(default)]
    pub partial: bool,
    /// `true`: nothing is moved. To each flow, which must be one of datagrams, a datagram with its `numbers` is sent with its own addresses. Braid at the other end takes it. Whoever
    /// repeats the numbers later receives what is sent to these addresses.
    #[serde(default)]
    pub prove: bool,
}

/// Answer to a [`RewriteRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Rewritten {
    /// Description of what was done.
    pub message: String,
    /// The flows, in the order of the request.
    pub flows: Vec<RewriteState>,
}

/// What became of a flow of a [`RewriteRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RewriteState {
    /// Whether the kernel rewrites it as asked.
    pub active: bool,
    /// Whether a packet has arrived with the addresses on the way since they were asked for.
    #[serde(default)]
    pub arrives: bool,
    /// Why it stays as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}
