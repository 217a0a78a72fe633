//! `GET /v1/peers` and `POST /v1/join`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{PathState, PeerKind, PeerState};

/// A host that carries flows over several links.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Peer {
    /// Local name of the peer. For a relay, the name that `relay` of an `[[app]]` entry refers to; for a server, its address.
    pub name: String,
    /// Kind of peer.
    #[serde(default)]
    pub kind: PeerKind,
    /// Address of the peer.
    pub address: String,
    /// Reachability of the peer.
    pub state: PeerState,
    /// Reason if the peer is not up. For an `idle` server: the reason why flows do not use a bond to it.
    #[serde(default)]
    pub reason: Option<String>,
    /// Paths to the peer.
    pub paths: Vec<Path>,
    /// Whether it takes packets of protocols other than TCP and UDP from clients of a gateway (`braid relay --packets`). Unknown, so `false`, until a path is up.
    #[serde(default)]
    pub packets: bool,
}

/// One QUIC connection to a peer, over one link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Path {
    /// Device of the link.
    pub link: String,
    /// State of the path; `none` for a link without a path to the peer.
    pub state: PathState,
    /// Reason why there is no path.
    #[serde(default)]
    pub reason: Option<String>,
    /// Smoothed round-trip time.
    pub rtt_us: Option<u64>,
    /// Congestion window in bytes.
    pub cwnd: Option<u64>,
    /// Delivery rate of the path in the upward direction. Only the peer can measure the downward direction.
    pub rate_bps: Option<u64>,
    /// Fraction of the bytes sent from this machine that were lost, 0 to 1.
    pub loss: Option<f64>,
    /// Bytes sent but not acknowledged yet.
    pub queued: Option<u64>,
    /// Bytes received.
    #[serde(default)]
    pub rx_bytes: Option<u64>,
    /// Bytes sent and acknowledged.
    #[serde(default)]
    pub tx_bytes: Option<u64>,
}

/// Request of `POST /v1/join`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JoinRequest {
    /// The invitation text.
    pub line: String,
    /// Local name for the relay. Default: the host of its first address.
    #[serde(default)]
    pub name: Option<String>,
}

/// Request of `POST /v1/leave`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LeaveRequest {
    /// Name of the relay, or address of the server whose key is to be deleted.
    pub name: String,
}

/// Request of `POST /v1/move`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MoveRequest {
    /// Id of a flow, or path or name of an application.
    pub what: String,
    /// Device of the link; `null`: a bonded flow uses all links again, and a direct one the link that it began on.
    pub to: Option<String>,
    /// A direct flow is to pass the host of this relay on the way, over the link, or `null` over the best one. Until it has its own way again, `to` changes the
    /// link between this machine and that host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub through: Option<String>,
}
