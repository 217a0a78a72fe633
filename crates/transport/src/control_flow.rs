//! The client's end of a control flow.

use std::net::Ipv4Addr;
use std::time::Duration;

use braid_bond::{FlowKind, FlowPolicy, Open, Target, codes};
use tokio::io::AsyncReadExt;

use crate::client::Client;
use crate::control::{
    ANSWER_TIMEOUT, ControlError, MoveAnswer, MoveRequest, MoveStep, PassRequest, PassingFlow, PeerFlow, Request, read, write,
};
use crate::host_driver::ResetCode;
use crate::stream::FlowStream;

/// Time in which the server takes or refuses a control flow.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

impl Client {
    /// Whether the server takes control flows. `false` until a path is up.
    pub fn takes_control(&self) -> bool {
        self.with_bond(|host, bond| host.takes(bond, FlowKind::Control))
    }

    /// Whether the server moves flows of datagrams. `false` until a path is up.
    pub fn moves_datagrams(&self) -> bool {
        self.with_bond(|host, bond| host.moves_datagrams(bond))
    }

    /// Whether the server lets flows to other hosts pass. `false` until a path is up.
    pub fn is_waypoint(&self) -> bool {
        self.with_bond(|host, bond| host.is_waypoint(bond))
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
    /// Asks the server to rewrite the packets of `flows` to the addresses of `path`, or not to (`lease`: `None`). At most [`MAX_FLOWS`](crate::control::MAX_FLOWS).
    ///
    /// # Errors
    /// There is no answer. The control flow is of no further use then. What was asked for may have been done.
    pub async fn ask(
        &mut self,
        path: u32,
        lease: Option<Duration>,
        step: MoveStep,
        flows: Vec<PeerFlow>,
    ) -> Result<MoveAnswer, ControlError> {
        self.last += 1;
        let lease_ms = lease.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
        let count = flows.len();
        self.exchange(Request::Move(MoveRequest { id: self.last, path, lease_ms, step, flows }), count).await
    }

    /// Asks the server to let flows pass that come from the address of `path`. At most [`MAX_FLOWS`](crate::control::MAX_FLOWS).
    ///
    /// # Errors
    /// As for [`ask`](Self::ask).
    pub async fn ask_to_pass(
        &mut self,
        path: u32,
        lease: Duration,
        step: MoveStep,
        passing: Vec<PassingFlow>,
    ) -> Result<MoveAnswer, ControlError> {
        self.last += 1;
        let (lease_ms, count) = (u64::try_from(lease.as_millis()).unwrap_or(u64::MAX), passing.len());
        self.exchange(Request::Pass(PassRequest { id: self.last, path, lease_ms, step, passing }), count).await
    }

    /// Sends a request about `count` flows, and receives the answer.
    async fn exchange(&mut self, request: Request, count: usize) -> Result<MoveAnswer, ControlError> {
        let exchange = async {
            write(&mut self.stream, &request).await?;
            read::<MoveAnswer>(&mut self.stream).await
        };
        let answer = tokio::time::timeout(ANSWER_TIMEOUT, exchange).await.map_err(|_| ControlError::Late)??;
        match answer {
            answer if answer.id == self.last && answer.refused.keys().chain(answer.passing.keys()).all(|place| *place < count) => {
                Ok(answer)
            }
            _ => Err(ControlError::Invalid("an answer to another request".to_owned())),
        }
    }

    /// Completes when the other end ends the control flow, which says nothing by itself. Cancel safe.
    pub async fn ended(&mut self) {
        // Any byte here would be an answer to nothing.
        let _ = self.stream.read_u8().await;
    }
}
