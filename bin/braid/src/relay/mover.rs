//! `braid relay --moves`: asks this host's daemon to rewrite the packets of flows that clients move.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use braid_api::{Accepted, FlowEnds, MovedFlow, RewriteRequest, SequenceNumbers};
use braid_transport::relay::{FlowToMove, MoveResult, Mover};

use crate::client;

/// How long the daemon may take until the kernel rewrites packets. It may have to make a device.
const READY_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause between two looks. It doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// Uses the API of the daemon at this socket.
pub(super) struct DaemonMover(pub(super) PathBuf);

impl Mover for DaemonMover {
    fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>) -> MoveResult<'_> {
        let socket = self.0.clone();
        Box::pin(async move {
            let done = tokio::task::spawn_blocking(move || rewrite(&socket, &flows, lease)).await;
            done.unwrap_or_else(|error| Err(error.to_string()))
        })
    }
}

/// The client accepts rewritten packets already. So this host sends such as soon as it accepts them itself.
fn rewrite(socket: &Path, flows: &[FlowToMove], lease: Option<Duration>) -> Result<(), String> {
    let ends = |(source, destination)| FlowEnds { source, destination };
    let moved = |flow: &FlowToMove| MovedFlow {
        own: ends(flow.own),
        wire: ends(flow.wire),
        sends: false,
        active: false,
        remaining_ms: 0,
        numbers: Some(SequenceNumbers { sent: flow.numbers.sent, received: flow.numbers.received }),
    };
    let flows: Vec<MovedFlow> = flows.iter().map(moved).collect();
    let lease_ms = lease.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
    let post = |sends| {
        let request = RewriteRequest { flows: flows.clone(), lease_ms, sends };
        client::send::<Accepted>(socket, "/v1/rewrites", &request).map(drop).map_err(|error| error.to_string())
    };
    let is_ready = |sends: bool| {
        let listed = client::list::<MovedFlow>(socket, "/v1/rewrites").map_err(|error| error.to_string())?;
        let same = |flow: &MovedFlow, known: &MovedFlow| {
            (known.own, known.wire) == (flow.own, flow.wire) && known.active && (known.sends || !sends)
        };
        Ok::<_, String>(flows.iter().all(|flow| listed.iter().any(|known| same(flow, known))))
    };
    if lease.is_none() {
        return post(false);
    }
    if is_ready(true)? {
        // A longer lease for flows that are moved.
        return post(true);
    }
    post(false)?;
    let (begin, mut pause) = (Instant::now(), FIRST_PAUSE);
    while !is_ready(false)? {
        if begin.elapsed() > READY_TIMEOUT {
            // Their sockets do not follow: their programs bound or marked them.
            let request = RewriteRequest { flows: flows.clone(), lease_ms: None, sends: false };
            let _ = client::send::<Accepted>(socket, "/v1/rewrites", &request);
            return Err("the server's Braid cannot change the flow's socket".to_owned());
        }
        thread::sleep(pause);
        pause = (pause * 2).min(READY_TIMEOUT / 10);
    }
    post(true)
}
