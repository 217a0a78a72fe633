//! Control flows: a client asks a server about flows outside the bond (docs/protocol.md).

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use braid_bond::{FlowKind, FlowPolicy, Open, Target, codes};
use braid_model::SequenceNumbers;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::client::Client;
use crate::host_driver::ResetCode;
use crate::stream::FlowStream;

/// Maximum number of flows of a request.
pub const MAX_FLOWS: usize = 256;
/// Time in which the server takes or refuses a control flow.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for an answer. The server's daemon may have to make a device first.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);

/// A running TCP flow between the client and the server, outside the bond.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerFlow {
    /// Address and port of the client in its socket.
    pub client: SocketAddr,
    /// Address and port of the server in its socket.
    pub server: SocketAddr,
    /// Port of the client on the way.
    pub port: u16,
    /// Sequence number of the first byte that the client sent, or of its SYN.
    pub sent: u32,
    /// Sequence number of the first byte that the client received.
    pub received: u32,
}

impl PeerFlow {
    /// The client's sequence numbers.
    pub fn numbers(&self) -> SequenceNumbers {
        SequenceNumbers { sent: self.sent, received: self.received }
    }
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
    /// The flows, at most [`MAX_FLOWS`].
    pub flows: Vec<PeerFlow>,
}

/// A server's answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveAnswer {
    /// Number of the request.
    pub id: u64,
    /// Why flows were refused, by their places in the request. The others were moved.
    pub refused: BTreeMap<usize, String>,
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

impl Client {
    /// Whether the server takes control flows. `false` until a path is up.
    pub fn takes_control(&self) -> bool {
        self.with_bond(|host, bond| host.takes(bond, FlowKind::Control))
    }

    /// Opens a control flow.
    ///
    /// # Errors
    /// The server refuses, or the bond ends; `ETIMEDOUT` if the server does not answer.
    pub async fn open_control(&self) -> Result<ControlFlow, ResetCode> {
        let target = Target::Address((Ipv4Addr::UNSPECIFIED, 0).into());
        let open = Open { kind: FlowKind::Control, target, policy: FlowPolicy { urgent: true, ..FlowPolicy::default() } };
        let flow = self.open(open).map_err(|_| ResetCode(codes::BUSY))?;
        tokio::time::timeout(OPEN_TIMEOUT, flow.opened()).await.map_err(|_| ResetCode(libc::ETIMEDOUT as u64))??;
        Ok(ControlFlow { stream: FlowStream::new(flow), last: 0 })
    }
}

/// The client's end of a control flow.
pub struct ControlFlow {
    stream: FlowStream,
    last: u64,
}

impl ControlFlow {
    /// Asks the server to rewrite the packets of `flows` to the addresses of `path`, or not to (`lease`: `None`). At most [`MAX_FLOWS`]. Returns why flows
    /// were refused, by their places.
    ///
    /// # Errors
    /// There is no answer. The control flow is of no further use then. What was asked for may have been done.
    pub async fn ask(&mut self, path: u32, lease: Option<Duration>, flows: Vec<PeerFlow>) -> Result<BTreeMap<usize, String>, ControlError> {
        self.last += 1;
        let lease_ms = lease.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
        let request = MoveRequest { id: self.last, path, lease_ms, flows };
        let exchange = async {
            write(&mut self.stream, &request).await?;
            read::<MoveAnswer>(&mut self.stream).await
        };
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await.map_err(|_| ControlError::Late)??;
        match answer {
            MoveAnswer { id, refused } if id == request.id && refused.keys().all(|place| *place < request.flows.len()) => Ok(refused),
            _ => Err(ControlError::Invalid("an answer to another request".to_owned())),
        }
    }

    /// Completes when the other end ends the control flow, which says nothing by itself. Cancel safe.
    pub async fn ended(&mut self) {
        // Any byte here would be an answer to nothing.
        let _ = self.stream.read_u8().await;
    }
}
