//! The server's end of control flows: flows between a client and this host, outside the bond, that the client moves to another of its links.
//!
//! A client may move a flow only to an address at which it has proved to receive (that of a path), and only a flow that began at such an address and whose
//! sequence numbers it knows. So nobody moves the flow of another host that has the same address, behind a NAT or later.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use braid_bond::host::ProvenPath;
use braid_bond::{BondId, PathId};
use braid_model::SequenceNumbers;

use crate::control::{MAX_FLOWS, MoveAnswer, MoveRequest, PeerFlow, read, write};
use crate::host_driver::{BondFlow, HostDriver};
use crate::stream::FlowStream;

/// Maximum number of flows that one control flow has moved at a time.
const MAX_MOVED: usize = 4096;
/// The longest lease. A client that is gone for longer gets its flows' packets at their own addresses.
const MAX_LEASE: Duration = Duration::from_secs(60);
/// Interval at which the addresses are noted at which the client has proved to receive.
const NOTE_INTERVAL: Duration = Duration::from_secs(1);

/// A flow of this host and the addresses of its packets on the way, each as source and destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowToMove {
    /// In the socket.
    pub own: (SocketAddr, SocketAddr),
    /// On the way.
    pub wire: (SocketAddr, SocketAddr),
    /// The sequence numbers with which it began for the client.
    pub numbers: SequenceNumbers,
}

/// What a [`Mover`] returns: why the flows stay where they are, if they do.
pub type MoveResult<'a> = Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>>;

/// Rewrites the packets of this host's flows.
pub trait Mover: Send + Sync {
    /// Moves flows for the time of a lease: all of them, or none. `None`: they have their own addresses again. Completes once packets are rewritten.
    fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>) -> MoveResult<'_>;
}

/// Serves the control flows of a server.
#[derive(Clone)]
pub(super) struct ControlServer {
    pub(super) mover: Arc<dyn Mover>,
    pub(super) driver: HostDriver,
}

impl ControlServer {
    /// Answers the requests of a control flow until it ends. The leases of what it has moved run out then.
    pub(super) async fn serve(&self, flow: BondFlow) {
        flow.answer(0);
        let bond = flow.bond();
        let mut stream = FlowStream::new(flow);
        let mut proven = BTreeSet::new();
        let mut moved: BTreeSet<(SocketAddr, SocketAddr)> = BTreeSet::new();
        loop {
            let request = {
                let reading = read::<MoveRequest>(&mut stream);
                tokio::pin!(reading);
                loop {
                    self.note(bond, &mut proven);
                    tokio::select! {
                        request = &mut reading => break request,
                        () = tokio::time::sleep(NOTE_INTERVAL) => {}
                    }
                }
            };
            let request = match request {
                Ok(request) => request,
                Err(error) => return tracing::debug!(%bond, "a control flow has ended: {error}"),
            };
            let paths = self.note(bond, &mut proven);
            let refused = self.move_flows(&request, &paths, (&proven, &mut moved)).await;
            if !refused.is_empty() {
                tracing::info!(%bond, refused = refused.len(), first = refused.values().next(), "flows of a client were not moved");
            }
            if write(&mut stream, &MoveAnswer { id: request.id, refused }).await.is_err() {
                return;
            }
        }
    }

    /// Notes the addresses at which the client has proved to receive. Returns the paths.
    fn note(&self, bond: BondId, proven: &mut BTreeSet<IpAddr>) -> Vec<ProvenPath> {
        let paths = self.driver.with(|host, _| host.proven_paths(bond));
        proven.extend(paths.iter().map(|path| path.remote));
        paths
    }

    async fn move_flows(
        &self,
        request: &MoveRequest,
        paths: &[ProvenPath],
        (proven, moved): (&BTreeSet<IpAddr>, &mut BTreeSet<(SocketAddr, SocketAddr)>),
    ) -> BTreeMap<usize, String> {
        let all = |reason: &str| (0..request.flows.len()).map(|place| (place, reason.to_owned())).collect();
        if request.flows.len() > MAX_FLOWS {
            return all("a request has too many flows");
        }
        let lease = request.lease_ms.map(|lease| Duration::from_millis(lease).min(MAX_LEASE));
        let path = paths.iter().find(|path| path.path == PathId(request.path));
        let mut refused = BTreeMap::new();
        let mut wanted = Vec::new();
        for (place, flow) in request.flows.iter().enumerate() {
            let ends = (flow.client, flow.server);
            let checked = match lease {
                // Only what this client has moved comes back at its word.
                None if moved.contains(&ends) => Ok(flow_to_move(flow, flow.client, flow.server.ip())),
                None => Err("it is not moved".to_owned()),
                Some(_) => check(flow, path, proven).and_then(|found| {
                    let fits = moved.contains(&ends) || moved.len() < MAX_MOVED;
                    fits.then_some(found).ok_or_else(|| format!("{MAX_MOVED} flows are moved already"))
                }),
            };
            match checked {
                Ok(found) => {
                    wanted.push((place, found));
                    if lease.is_some() {
                        moved.insert(ends)
                    } else {
                        moved.remove(&ends)
                    };
                }
                Err(reason) => drop(refused.insert(place, reason)),
            }
        }
        if wanted.is_empty() || self.mover.rewrite(wanted.iter().map(|(_, flow)| *flow).collect(), lease).await.is_ok() {
            return refused;
        }
        // One of them cannot be moved, perhaps because it has just ended: none was.
        for (place, flow) in wanted {
            if let Err(reason) = self.mover.rewrite(vec![flow], lease).await {
                moved.remove(&(flow.own.1, flow.own.0));
                refused.insert(place, reason);
            }
        }
        refused
    }
}

/// Checks a flow against what the client has proved.
fn check(flow: &PeerFlow, path: Option<&ProvenPath>, proven: &BTreeSet<IpAddr>) -> Result<FlowToMove, String> {
    let path = path.ok_or("the path is not there, or has changed its address")?;
    if !proven.contains(&flow.client.ip()) {
        return Err(format!("no path of this bond came from {}, or a NAT translates it", flow.client.ip()));
    }
    if flow.port == 0 || flow.client.port() == 0 {
        return Err("it has no port".to_owned());
    }
    Ok(flow_to_move(flow, SocketAddr::new(path.remote, flow.port), path.local))
}

/// The flow as this host has it, and on the way.
fn flow_to_move(flow: &PeerFlow, client: SocketAddr, server: IpAddr) -> FlowToMove {
    FlowToMove { own: (flow.server, flow.client), wire: (SocketAddr::new(server, flow.server.port()), client), numbers: flow.numbers() }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn flow(client: &str) -> PeerFlow {
        PeerFlow { client: client.parse().unwrap(), server: "192.0.2.1:80".parse().unwrap(), port: 7, sent: 1, received: 2 }
    }

    fn path(remote: &str) -> ProvenPath {
        ProvenPath { path: PathId(3), remote: remote.parse().unwrap(), local: "192.0.2.9".parse().unwrap() }
    }

    #[test]
    fn a_flow_moves_only_between_addresses_that_the_client_has_proved() {
        let proven = BTreeSet::from(["10.0.0.1".parse().unwrap()]);
        let path = path("10.1.0.1");
        let moved = check(&flow("10.0.0.1:50"), Some(&path), &proven).unwrap();
        assert_eq!(moved.own, ("192.0.2.1:80".parse().unwrap(), "10.0.0.1:50".parse().unwrap()));
        assert_eq!(moved.wire, ("192.0.2.9:80".parse().unwrap(), "10.1.0.1:7".parse().unwrap()));
        assert!(check(&flow("10.0.0.2:50"), Some(&path), &proven).unwrap_err().contains("10.0.0.2"));
        assert!(check(&flow("10.0.0.1:50"), None, &proven).unwrap_err().contains("path"));
        assert!(check(&flow("10.0.0.1:0"), Some(&path), &proven).is_err());
    }

    /// Refuses requests with the flow from this port.
    struct Picky(u16, Mutex<Vec<(usize, Option<Duration>)>>);

    impl Mover for Picky {
        fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>) -> MoveResult<'_> {
            self.1.lock().unwrap().push((flows.len(), lease));
            let refused = flows.iter().any(|flow| flow.own.1.port() == self.0);
            Box::pin(async move { if refused { Err("no".to_owned()) } else { Ok(()) } })
        }
    }

    #[tokio::test]
    async fn one_bad_flow_does_not_keep_the_others_and_only_moved_ones_come_back() {
        let mover = Arc::new(Picky(51, Mutex::default()));
        let (driver, _notices) = HostDriver::start(braid_bond::host::Host::client([1; 32], std::time::Instant::now()));
        let server = ControlServer { mover: mover.clone(), driver };
        let proven = BTreeSet::from(["10.0.0.1".parse().unwrap()]);
        let mut moved = BTreeSet::new();
        let flows = ["10.0.0.1:50", "10.0.0.1:51", "10.0.0.9:52", "10.0.0.1:53"].map(flow).to_vec();
        let mut request = MoveRequest { id: 1, path: 3, lease_ms: Some(3_600_000), flows };
        let refused = server.move_flows(&request, &[path("10.1.0.1")], (&proven, &mut moved)).await;
        assert_eq!(refused.keys().copied().collect::<Vec<_>>(), [1, 2], "{refused:?}");
        assert_eq!(
            std::mem::take(&mut *mover.1.lock().unwrap()),
            [(3, Some(MAX_LEASE)), (1, Some(MAX_LEASE)), (1, Some(MAX_LEASE)), (1, Some(MAX_LEASE))]
        );
        request.lease_ms = None;
        let refused = server.move_flows(&request, &[], (&proven, &mut moved)).await;
        assert_eq!(refused.keys().copied().collect::<Vec<_>>(), [1, 2], "{refused:?}");
        assert_eq!(*mover.1.lock().unwrap(), [(2, None)]);
        request.flows = vec![flow("10.0.0.1:50"); MAX_FLOWS + 1];
        assert_eq!(server.move_flows(&request, &[], (&proven, &mut moved)).await.len(), MAX_FLOWS + 1);
    }

    /// Notes what it is asked for.
    #[derive(Default)]
    struct Notes(Mutex<Vec<(FlowToMove, bool)>>);

    impl Mover for Notes {
        fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>) -> MoveResult<'_> {
            self.0.lock().unwrap().extend(flows.into_iter().map(|flow| (flow, lease.is_some())));
            Box::pin(async { Ok(()) })
        }
    }

    /// Each number decides about one thing. So every combination of right and wrong occurs.
    #[tokio::test]
    async fn forged_requests_move_nothing() {
        const FORGED: u32 = 100_000;
        let notes = Arc::new(Notes::default());
        let (driver, _notices) = HostDriver::start(braid_bond::host::Host::client([1; 32], std::time::Instant::now()));
        let server = ControlServer { mover: notes.clone(), driver };
        let own: IpAddr = "10.0.0.1".parse().unwrap();
        let (proven, paths) = (BTreeSet::from([own]), [path("10.1.0.1")]);
        let (mut moved, mut refused) = (BTreeSet::new(), 0);
        for number in 0..FORGED {
            let [one, two, three] = [number % 7, number / 7 % 5, number / 35 % 3];
            // Never all right at once: an address that was not proved, or a path that does not exist, or a flow that was not moved.
            let client = if one == 0 { own } else { IpAddr::from((0x0a00_0001_u32 + number * 7 + 1).to_be_bytes()) };
            let path = if one == 0 && three != 2 { 4 + number } else { 3 };
            let port = if one == 0 && three == 2 { 0 } else { 1 + (number % 60_000) as u16 };
            let flow = PeerFlow {
                client: SocketAddr::new(client, 1 + two as u16),
                server: "192.0.2.1:80".parse().unwrap(),
                port,
                sent: number,
                received: two,
            };
            let lease_ms = (one == 0 || two != 0).then_some(u64::MAX - u64::from(number));
            let request = MoveRequest { id: number.into(), path, lease_ms, flows: vec![flow] };
            refused += server.move_flows(&request, &paths, (&proven, &mut moved)).await.len() as u32;
        }
        assert_eq!((refused, notes.0.lock().unwrap().len(), moved.len()), (FORGED, 0, 0));
    }
}
