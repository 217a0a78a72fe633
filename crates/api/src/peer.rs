//! `GET /v1/peers` and `POST /v1/join`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{PathState, PeerKind, PeerState};

/// A host that carries flows over several links.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Peer {
    /// What it is called here: a relay's name, which `relay` of an `[[app]]` entry may be; a server's address.
    pub name: String,
    /// What it is.
    #[serde(default)]
    pub kind: PeerKind,
    /// Where it may be found.
    pub address: String,
    /// Whether it can be reached.
    pub state: PeerState,
    /// Why, where it is not up; of an `idle` server, why flows do not go straight to it.
    #[serde(default)]
    pub reason: Option<String>,
    /// Its paths.
    pub paths: Vec<Path>,
}

/// One QUIC connection to a peer, over one link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Path {
    /// The link's device.
    pub link: String,
    /// How it does; `none` for a link without a path to the peer.
    pub state: PathState,
    /// Why there is none.
    #[serde(default)]
    pub reason: Option<String>,
    /// Smoothed round-trip time.
    pub rtt_us: Option<u64>,
    /// Congestion window in bytes.
    pub cwnd: Option<u64>,
    /// What it can deliver from here, that is upwards: what comes from the peer is the peer's to know.
    pub rate_bps: Option<u64>,
    /// Share of the bytes sent from here that was lost.
    pub loss: Option<f64>,
    /// Bytes sent and not acknowledged yet.
    pub queued: Option<u64>,
    /// Bytes received.
    #[serde(default)]
    pub rx_bytes: Option<u64>,
    /// Bytes sent that arrived.
    #[serde(default)]
    pub tx_bytes: Option<u64>,
}

/// What `POST /v1/join` takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JoinRequest {
    /// The invitation.
    pub line: String,
    /// What the relay shall be called here; left out: the host of its first address.
    #[serde(default)]
    pub name: Option<String>,
}

/// What `POST /v1/leave` takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LeaveRequest {
    /// The peer's name; a server's address, whose key is forgotten.
    pub name: String,
}

/// What `POST /v1/move` takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MoveRequest {
    /// A flow's id, or an application's path or name.
    pub what: String,
    /// The link's device; `null`: all links again.
    pub to: Option<String>,
}
