//! The messages of control flows: a client asks a server about flows outside the bond (docs/protocol.md).

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use braid_model::SequenceNumbers;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::stream::FlowStream;

/// Maximum number of flows of a request.
pub const MAX_FLOWS: usize = 256;
/// Time for an answer. The server's daemon may have to make a device first.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// Protocol of a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowProtocol {
    /// A TCP connection.
    #[default]
    Tcp,
    /// An exchange of datagrams.
    Udp,
}

impl FlowProtocol {
    fn is_tcp(&self) -> bool {
        *self == Self::Tcp
    }
}

/// A running flow between the client and the server, outside the bond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerFlow {
    /// Address and port of the client in its socket.
    pub client: SocketAddr,
    /// Address and port of the server in its socket.
    pub server: SocketAddr,
    /// Address and port of the client on the way, as it has them itself.
    pub via: SocketAddr,
    /// Its protocol.
    #[serde(default, skip_serializing_if = "FlowProtocol::is_tcp")]
    pub protocol: FlowProtocol,
    /// Sequence number of the first byte that the client sent, or of its SYN. Of datagrams: the first half of the proof that the server sent last.
    pub sent: u32,
    /// Sequence number of the first byte that the client received. Of datagrams: the second half of the proof.
    pub received: u32,
}

impl PeerFlow {
    /// The client's sequence numbers.
    pub fn numbers(&self) -> SequenceNumbers {
        SequenceNumbers { sent: self.sent, received: self.received }
    }
}

/// What a server does at a request with a lease.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveStep {
    /// It accepts packets with the new addresses, and sends none.
    Accept,
    /// It sends such packets once one has arrived.
    Test,
    /// It accepts and sends them.
    #[default]
    Move,
    /// It sends proofs to the own addresses of flows of datagrams, and moves nothing.
    Prove,
}

/// A client's request: its flows use another path, or their own addresses again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// Number of the request in the control flow.
    pub id: u64,
    /// The path whose addresses the flows have on the way.
    pub path: u32,
    /// For how long, in milliseconds, unless the client asks again; `None`: from now on they have their own addresses.
    pub lease_ms: Option<u64>,
    /// What the server does now.
    #[serde(default)]
    pub step: MoveStep,
    /// The flows, at most [`MAX_FLOWS`].
    pub flows: Vec<PeerFlow>,
}

/// A flow to another host that is to pass the server, which has an address and port towards each end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassingFlow {
    /// Address and port of the client on the way, as it has them itself.
    pub client: SocketAddr,
    /// Address and port of the other host.
    pub server: SocketAddr,
    /// The server's address and port towards the other host, if it passes already.
    pub far: Option<SocketAddr>,
}

/// A client's request: its flows pass the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassRequest {
    /// Number of the request in the control flow.
    pub id: u64,
    /// The path from whose address the flows come.
    pub path: u32,
    /// For how long, in milliseconds, unless the client asks again.
    pub lease_ms: u64,
    /// What the server does now. A flow that does not pass yet takes no steps.
    #[serde(default)]
    pub step: MoveStep,
    /// The flows, at most [`MAX_FLOWS`].
    pub passing: Vec<PassingFlow>,
}

/// A request of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Request {
    /// To the host of the flows.
    Move(MoveRequest),
    /// To a waypoint.
    Pass(PassRequest),
}

/// The server's addresses and ports for a flow that passes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Passage {
    /// Towards the client.
    pub near: SocketAddr,
    /// Towards the other host.
    pub far: SocketAddr,
}

/// A server's answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveAnswer {
    /// Number of the request.
    pub id: u64,
    /// Why flows were refused, by their places in the request. The others were moved.
    pub refused: BTreeMap<usize, String>,
    /// The way drops packets of connections whose start it did not see: none has arrived, and no flow was moved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub blocked: bool,
    /// The flows that pass, by their places in a [`PassRequest`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub passing: BTreeMap<usize, Passage>,
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The flow, or its bond, has ended.
    #[error("the control flow has ended: {0}")]
    Ended(#[from] io::Error),
    /// The other end did not follow the protocol.
    #[error("the other end sent {0}")]
    Invalid(String),
    /// There was no answer in time.
    #[error("the other end has not answered for {} s", ANSWER_TIMEOUT.as_secs())]
    Late,
}

/// Reads a message: its length, and JSON.
pub(crate) async fn read<T: for<'a> Deserialize<'a>>(stream: &mut FlowStream) -> Result<T, ControlError> {
    let length = stream.read_u16().await?;
    let mut text = vec![0; usize::from(length)];
    stream.read_exact(&mut text).await?;
    serde_json::from_slice(&text).map_err(|error| ControlError::Invalid(format!("a message that cannot be read: {error}")))
}

/// Writes a message.
pub(crate) async fn write(stream: &mut FlowStream, message: &impl Serialize) -> Result<(), ControlError> {
    let text = serde_json::to_vec(message).map_err(|error| ControlError::Invalid(error.to_string()))?;
    let length = u16::try_from(text.len()).map_err(|_| ControlError::Invalid(format!("a message of {} bytes", text.len())))?;
    stream.write_u16(length).await?;
    stream.write_all(&text).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_of_an_earlier_version_moves_flows_in_one_step() {
        let request: MoveRequest = serde_json::from_str(r#"{"id":1,"path":0,"lease_ms":30000,"flows":[]}"#).unwrap();
        assert_eq!(request.step, MoveStep::Move);
        let same: Request = serde_json::from_str(r#"{"id":1,"path":0,"lease_ms":30000,"flows":[]}"#).unwrap();
        assert_eq!(same, Request::Move(request));
        let answer = serde_json::to_string(&MoveAnswer { id: 1, ..MoveAnswer::default() }).unwrap();
        assert_eq!(answer, r#"{"id":1,"refused":{}}"#, "it knows no other members");
    }
}
