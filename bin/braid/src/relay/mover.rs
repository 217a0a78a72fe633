//! `braid relay --moves` and `--waypoint`: asks this host's daemon to rewrite the packets of flows that clients move.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use braid_api::{FlowEnds, MovedFlow, MovedProtocol, RewriteRequest, RewriteState, Rewritten, SequenceNumbers};
use braid_transport::control::{FlowProtocol, MoveStep};
use braid_transport::relay::{ArrivalResult, FlowToMove, MoveResult, Mover};

use crate::client;

/// How long the daemon may take until the kernel rewrites packets. It may have to make a device.
const READY_TIMEOUT: Duration = Duration::from_secs(3);
/// First pause between two looks. It doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Uses the API of the daemon at this socket.
pub(super) struct DaemonMover(pub(super) PathBuf);

impl Mover for DaemonMover {
    fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>, step: MoveStep) -> MoveResult<'_> {
        let socket = self.0.clone();
        Box::pin(blocking(move || rewrite(&socket, &flows, lease, step)))
    }

    fn arrived(&self, flows: Vec<FlowToMove>, lease: Duration) -> ArrivalResult<'_> {
        let socket = self.0.clone();
        Box::pin(blocking(move || Ok(post(&socket, &flows, Some(lease), false)?.iter().map(|state| state.arrives).collect())))
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, String> + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(error.to_string()))
}

/// What the daemon says of each flow.
fn post<'a>(
    socket: &Path,
    flows: impl IntoIterator<Item = &'a FlowToMove>,
    lease: Option<Duration>,
    sends: bool,
) -> Result<Vec<RewriteState>, String> {
    let request =
        RewriteRequest { flows: flows.into_iter().map(moved).collect(), lease_ms: millis(lease), sends, partial: true, prove: false };
    let done: Rewritten = client::send(socket, "/v1/rewrites", &request).map_err(|error| error.to_string())?;
    Ok(done.flows)
}

fn millis(lease: Option<Duration>) -> Option<u64> {
    lease.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX))
}

/// Sends proofs to the own addresses of flows of datagrams.
fn prove(socket: &Path, flows: &[FlowToMove], lease: Option<Duration>) -> Result<BTreeMap<usize, String>, String> {
    let flows = flows.iter().map(moved).collect();
    let request = RewriteRequest { flows, lease_ms: millis(lease), sends: false, partial: true, prove: true };
    let done: Rewritten = client::send(socket, "/v1/rewrites", &request).map_err(|error| error.to_string())?;
    Ok(done.flows.into_iter().enumerate().filter_map(|(place, state)| Some((place, state.refused?))).collect())
}

/// The client accepts rewritten packets already. So this host may send such as soon as it accepts them itself.
fn rewrite(socket: &Path, flows: &[FlowToMove], lease: Option<Duration>, step: MoveStep) -> Result<BTreeMap<usize, String>, String> {
    let post = |places: &[usize], lease, sends| -> Result<Vec<(usize, RewriteState)>, String> {
        let states = post(socket, places.iter().map(|place| &flows[*place]), lease, sends)?;
        Ok(places.iter().copied().zip(states).collect())
    };
    if step == MoveStep::Prove {
        return prove(socket, flows, lease);
    }
    let mut refused = BTreeMap::new();
    let mut left: Vec<usize> = (0..flows.len()).collect();
    if lease.is_none() {
        return post(&left, None, false).map(|_| refused);
    }
    let (begin, mut pause) = (Instant::now(), FIRST_PAUSE);
    let ready = loop {
        // It accepts them since an earlier step.
        if step == MoveStep::Test {
            break left;
        }
        let states = post(&left, lease, false)?;
        refused.extend(states.iter().filter_map(|(place, state)| Some((*place, state.refused.clone()?))));
        let (ready, late): (Vec<_>, Vec<_>) =
            states.into_iter().filter(|(_, state)| state.refused.is_none()).partition(|(_, state)| state.active);
        left = ready.iter().chain(&late).map(|(place, _)| *place).collect();
        let places = |of: Vec<(usize, RewriteState)>| of.into_iter().map(|(place, _)| place).collect::<Vec<_>>();
        if late.is_empty() {
            break places(ready);
        }
        if begin.elapsed() > READY_TIMEOUT {
            let late = places(late);
            post(&late, None, false)?;
            refused.extend(late.into_iter().map(|place| (place, "Braid there does not rewrite its packets in time".to_owned())));
            break places(ready);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(READY_TIMEOUT / 10);
    };
    if step != MoveStep::Accept {
        refused.extend(post(&ready, lease, true)?.into_iter().filter_map(|(place, state)| Some((place, state.refused?))));
    }
    Ok(refused)
}

fn moved(flow: &FlowToMove) -> MovedFlow {
    let ends = |(source, destination)| FlowEnds { source, destination };
    MovedFlow {
        own: ends(flow.own),
        wire: ends(flow.wire),
        protocol: if flow.protocol == FlowProtocol::Udp { MovedProtocol::Udp } else { MovedProtocol::Tcp },
        sends: false,
        active: false,
        remaining_ms: 0,
        passes: flow.numbers.is_none(),
        numbers: flow.numbers.map(|numbers| SequenceNumbers { sent: numbers.sent, received: numbers.received }),
    }
}
