//! The server's end of control flows: flows between a client and this host, outside the bond, that the client moves to another of its links.
//!
//! A client may move a flow only to an address at which it has proved to receive (that of a path), and only a flow that began at such an address and whose
//! sequence numbers it knows, each time it asks. So nobody moves the flow of another host that has the same address, behind a NAT or later. Datagrams have no
//! sequence numbers. The server sends a proof to the flow's own addresses instead, which the client repeats.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use braid_bond::host::ProvenPath;
use braid_bond::{BondId, PathId, codes};
use braid_decide::tunnel::{End, Tunnel};
use braid_model::{Family, SequenceNumbers};
use braid_peer::destination::Policy;
use ring::hmac;
use ring::rand::SystemRandom;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::account::Account;
use crate::control::{FlowProtocol, MAX_FLOWS, MoveAnswer, MoveRequest, MoveStep, PeerFlow, Request, read, write};
use crate::host_driver::{BondFlow, HostDriver};
use crate::relay::RelayError;
use crate::relay::tunnels::Tunnels;
use crate::stream::FlowStream;

mod passing;

use passing::Passing;

/// How long a packet of a way that is tested may take to arrive: the client sends again every 250 ms. Round trips of the path to it are added, up to the longest.
const TEST: Duration = Duration::from_millis(350);
const LONGEST_TEST: Duration = Duration::from_secs(2);
/// Pauses between two looks for one: the first, which doubles, and the longest.
const TEST_PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(40)];
/// Maximum number of flows of all clients that pass this host. Each has two ports.
const MAX_WAYS: usize = 4096;
/// Maximum number of flows that one control flow has moved at a time.
const MAX_MOVED: usize = 4096;
/// The longest lease. A client that is gone for longer gets its flows' packets at their own addresses.
const MAX_LEASE: Duration = Duration::from_secs(60);
/// Interval at which the addresses are noted at which the client has proved to receive.
const NOTE_INTERVAL: Duration = Duration::from_secs(1);
/// How long such an address counts after its last path has ended. Later another host may have it.
const PROVEN_FOR: Duration = Duration::from_secs(60);
/// A proof is the same for this time, and counts for this number of further such times, in case one is lost.
const PROOF_PERIOD: Duration = Duration::from_secs(60);
const PROOF_PERIODS: u64 = 2;
/// Maximum number of flows of datagrams of a client that are moved at a time. The server's host moves 64 of all clients.
const MAX_DATAGRAM_FLOWS: usize = 16;
/// Maximum number of flows for which a client gets proofs in this time.
const MAX_PROOFS: usize = 64;
const PROOF_INTERVAL: Duration = Duration::from_secs(1);
/// Pause between two requests of one client.
const PAUSE: Duration = Duration::from_millis(5);
/// Longest reason, in characters.
const MAX_REASON: usize = 150;

/// A flow, and the addresses of its packets on the way, each as source and destination from this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowToMove {
    /// In the socket; or, if it passes this host, towards the other host.
    pub own: (SocketAddr, SocketAddr),
    /// On the way.
    pub wire: (SocketAddr, SocketAddr),
    /// Its protocol.
    pub protocol: FlowProtocol,
    /// The sequence numbers with which it began for the client, or the proof of a flow of datagrams; `None`: it is a flow to another host, and passes this one.
    pub numbers: Option<SequenceNumbers>,
}

/// What a [`Mover`] returns: why flows stay where they are, by their places; or why none can be moved.
pub type MoveResult<'a> = Pin<Box<dyn Future<Output = Result<BTreeMap<usize, String>, String>> + Send + 'a>>;

/// What [`Mover::arrived`] returns.
pub type ArrivalResult<'a> = Pin<Box<dyn Future<Output = Result<Vec<bool>, String>> + Send + 'a>>;

/// Rewrites the packets of this host's flows.
pub trait Mover: Send + Sync {
    /// Takes a step of moving flows for the time of a lease. `None`: they have their own addresses again. Completes once packets are rewritten.
    fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>, step: MoveStep) -> MoveResult<'_>;

    /// Of which flows a packet has arrived with the new addresses, since [`rewrite`](Self::rewrite) has made this host accept them.
    fn arrived(&self, flows: Vec<FlowToMove>, lease: Duration) -> ArrivalResult<'_>;
}

/// Serves the control flows of a server.
#[derive(Clone)]
pub(super) struct ControlServer(Arc<Shared>);

struct Shared {
    mover: Arc<dyn Mover>,
    tunnels: Option<Tunnels>,
    /// Addresses of the waypoints to which clients may move flows of this host.
    waypoints: Vec<IpAddr>,
    /// Whether flows to other hosts pass this one.
    passes: bool,
    /// Flows that may still pass.
    ways: Arc<Semaphore>,
    driver: HostDriver,
    /// Bonds that have a control flow: each may have one.
    serving: Mutex<BTreeSet<BondId>>,
    /// One request at a time, whoever asks: the daemon has other work.
    turn: Semaphore,
    proofs: Proofs,
}

/// The place of a bond among those that have a control flow, until it is dropped.
struct Serving<'a>(&'a Shared, BondId);

impl Drop for Serving<'_> {
    fn drop(&mut self) {
        self.0.serving().remove(&self.1);
    }
}

impl Shared {
    fn serving(&self) -> std::sync::MutexGuard<'_, BTreeSet<BondId>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known about a client.
#[derive(Default)]
struct Known {
    /// Addresses at which it has proved to receive, and when it last did.
    proven: BTreeMap<IpAddr, Instant>,
    /// The flows that it has moved, as client and server have them.
    moved: BTreeMap<Flow, MovedFlow>,
    /// Flows for which it has asked for proofs, since when.
    proved: (Option<Instant>, usize),
}

/// A flow that a client has moved.
struct MovedFlow {
    /// When its lease ends.
    until: Instant,
    /// The numbers that the client gave.
    numbers: SequenceNumbers,
    /// Its address and port on the way, and whether a packet has come from there.
    via: SocketAddr,
    tested: bool,
}

/// A flow as client and server have it.
type Flow = (FlowProtocol, SocketAddr, SocketAddr);

/// Makes proofs for flows of datagrams. Nothing is stored: the server computes a proof again.
struct Proofs {
    key: hmac::Key,
    begin: Instant,
}

impl Proofs {
    fn new() -> Result<Self, ring::error::Unspecified> {
        Ok(Self { key: hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new())?, begin: Instant::now() })
    }

    /// The proof of a flow, `ago` periods ago; `None`: this server did not run then. It does not depend on who asks: who else asks for it changes nothing for the flow's
    /// owner.
    fn of(&self, flow: &PeerFlow, ago: u64) -> Option<SequenceNumbers> {
        let period = (self.begin.elapsed().as_secs() / PROOF_PERIOD.as_secs()).checked_sub(ago)?;
        let said = format!("{} {} {period}", flow.client, flow.server);
        let tag = hmac::sign(&self.key, said.as_bytes());
        let word = |at: usize| tag.as_ref().get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_be_bytes);
        // Zero is no proof.
        Some(SequenceNumbers { sent: word(0) | 1, received: word(4) })
    }

    /// Whether a proof of this flow was sent of late.
    fn check(&self, flow: &PeerFlow) -> bool {
        let (sent, received) = (flow.sent.to_be_bytes(), flow.received.to_be_bytes());
        let is = |proof: SequenceNumbers| {
            let expected = [proof.sent.to_be_bytes(), proof.received.to_be_bytes()].concat();
            expected.iter().zip([sent, received].concat()).fold(0, |differs, (one, other)| differs | one ^ other) == 0
        };
        (0..=PROOF_PERIODS).filter_map(|ago| self.of(flow, ago)).any(is)
    }
}

impl ControlServer {
    pub(super) fn new(
        mover: Arc<dyn Mover>,
        driver: HostDriver,
        tunnels: Option<Tunnels>,
        waypoints: Vec<IpAddr>,
        passes: bool,
    ) -> Result<Self, RelayError> {
        let waypoints = waypoints.into_iter().map(|ip| ip.to_canonical()).collect();
        let ways = Arc::new(Semaphore::new(MAX_WAYS));
        let proofs = Proofs::new().map_err(|_| RelayError::Random)?;
        let (serving, turn) = (Mutex::default(), Semaphore::new(1));
        Ok(Self(Arc::new(Shared { mover, tunnels, waypoints, passes, ways, driver, serving, turn, proofs })))
    }

    /// Answers the requests of a control flow until it ends. The leases of what it has moved run out then.
    pub(super) async fn serve(&self, flow: BondFlow, account: &Account, policy: &Policy) {
        let bond = flow.bond();
        if !self.0.serving().insert(bond) {
            return flow.answer(codes::BUSY);
        }
        let _serving = Serving(&self.0, bond);
        flow.answer(0);
        let mut stream = FlowStream::new(flow);
        let (mut known, mut passing) = (Known::default(), Passing::default());
        loop {
            let request = {
                let reading = read::<Request>(&mut stream);
                tokio::pin!(reading);
                loop {
                    self.note(bond, &mut known);
                    passing.expire();
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
            let paths = self.note(bond, &mut known);
            let answer = match request {
                // A waypoint's own connections are its operator's affair.
                Request::Move(_) if self.0.passes => {
                    return tracing::debug!(%bond, "a control flow has ended: this host is a waypoint only");
                }
                Request::Move(request) => {
                    let tunnel = self.0.tunnels.as_ref().and_then(|tunnels| tunnels.of(bond));
                    self.move_flows(&request, &paths, tunnel, &mut known).await
                }
                Request::Pass(request) if self.0.passes => self.pass_flows(&request, &paths, &mut passing, account, policy).await,
                Request::Pass(_) => return tracing::debug!(%bond, "a control flow has ended: this host is no waypoint"),
            };
            if answer.blocked || !answer.refused.is_empty() {
                let (blocked, refused, first) = (answer.blocked, answer.refused.len(), answer.refused.values().next());
                tracing::debug!(%bond, blocked, refused, first, "flows of a client were not moved");
            }
            if write(&mut stream, &answer).await.is_err() {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Notes the addresses at which the client has proved to receive. Returns the paths.
    fn note(&self, bond: BondId, known: &mut Known) -> Vec<ProvenPath> {
        let (paths, now) = (self.0.driver.with(|host, _| host.proven_paths(bond)), Instant::now());
        known.proven.extend(paths.iter().map(|path| (path.remote, now)));
        known.proven.retain(|_, at| now.saturating_duration_since(*at) < PROVEN_FOR);
        known.moved.retain(|_, moved| moved.until > now);
        paths
    }

    /// Waits until a packet of each flow of datagrams, or of one connection, has arrived with the new addresses. Returns of which ones it has. An error is left to the next
    /// operation.
    async fn arrived(&self, flows: impl Fn() -> Vec<FlowToMove>, lease: Duration, path: Option<&ProvenPath>) -> Vec<bool> {
        let (begin, [mut pause, longest]) = (Instant::now(), TEST_PAUSES);
        let limit = (TEST + path.map_or(Duration::ZERO, |path| path.rtt) * 2).min(LONGEST_TEST);
        loop {
            let asked = flows();
            let arrived = {
                let Ok(_turn) = self.0.turn.acquire().await else { return vec![false; asked.len()] };
                let done = self.0.mover.arrived(asked.clone(), lease).await;
                done.unwrap_or_else(|_| asked.iter().map(|flow| flow.protocol == FlowProtocol::Tcp).collect())
            };
            let mut waits = asked.iter().zip(&arrived).filter(|(_, arrived)| !**arrived).map(|(flow, _)| flow.protocol);
            let is_enough = if arrived.contains(&true) { waits.all(|protocol| protocol == FlowProtocol::Tcp) } else { false };
            if is_enough || begin.elapsed() > limit {
                return arrived;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    }

    /// Lets the mover work, once nobody else does.
    async fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>, step: MoveStep) -> Result<BTreeMap<usize, String>, String> {
        let Ok(_turn) = self.0.turn.acquire().await else { return Err("this server ends".to_owned()) };
        self.0.mover.rewrite(flows, lease, step).await
    }

    /// The places of a flow that is to pass, its client's and this host's; `None`: there are none.
    fn take_way(&self, account: &Account) -> Option<[OwnedSemaphorePermit; 2]> {
        Some([account.ways.clone().try_acquire_owned().ok()?, self.0.ways.clone().try_acquire_owned().ok()?])
    }

    async fn move_flows(&self, request: &MoveRequest, paths: &[ProvenPath], tunnel: Option<Tunnel>, known: &mut Known) -> MoveAnswer {
        let answer = |refused| MoveAnswer { id: request.id, refused, ..MoveAnswer::default() };
        let all = |reason: &str| answer((0..request.flows.len()).map(|place| (place, reason.to_owned())).collect());
        let lease = request.lease_ms.map(|lease| Duration::from_millis(lease).min(MAX_LEASE));
        if request.flows.len() > MAX_FLOWS {
            return all("a request has too many flows");
        }
        if lease.is_some_and(|lease| lease.is_zero()) {
            return all("a lease has no time");
        }
        if request.step == MoveStep::Prove {
            if known.proved.0.is_none_or(|since| since.elapsed() >= PROOF_INTERVAL) {
                known.proved = (Some(Instant::now()), 0);
            }
            known.proved.1 += request.flows.len();
            if known.proved.1 > MAX_PROOFS {
                return all("too many proofs are asked for at a time");
            }
        }
        let path = paths.iter().find(|path| path.path == PathId(request.path));
        let (mut refused, mut wanted, mut named) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
        let mut translated = false;
        for (place, flow) in request.flows.iter().enumerate() {
            let ends = (flow.protocol, flow.client, flow.server);
            let is_moved = known.moved.contains_key(&ends);
            let checked = match lease {
                _ if !named.insert(ends) => Err("it is named twice".to_owned()),
                // Only what this client has moved comes back at its word.
                None if is_moved => Ok(flow_to_move(flow, flow.client, flow.server.ip())),
                None => Err("it is not moved".to_owned()),
                Some(_) if !is_moved && known.moved.len() + wanted.len() >= MAX_MOVED => {
                    Err(format!("{MAX_MOVED} flows are moved already"))
                }
                Some(_) if request.step == MoveStep::Prove && (flow.protocol, flow.via) != (FlowProtocol::Udp, flow.client) => {
                    Err("only the own addresses of datagrams are proved".to_owned())
                }
                Some(_) => {
                    let found = check(flow, path, tunnel, &self.0.waypoints, |address| is_moved || known.proven.contains_key(&address));
                    translated |= matches!(found, Err(Unproved::Translated(..)));
                    let found = found.map_err(|error| error.to_string());
                    self.check_datagrams(request.step, flow, known).map_err(str::to_owned).and(found)
                }
            };
            match checked {
                Ok(mut found) => {
                    if request.step == MoveStep::Prove {
                        found.numbers = self.0.proofs.of(flow, 0);
                    }
                    wanted.push((place, ends, found));
                }
                Err(reason) => drop(refused.insert(place, reason)),
            }
        }
        if wanted.is_empty() {
            return MoveAnswer { blocked: translated, ..answer(refused) };
        }
        let flows = || wanted.iter().map(|(.., flow)| *flow).collect::<Vec<_>>();
        if let Some(lease) = lease.filter(|_| request.step == MoveStep::Test) {
            let arrived = self.arrived(flows, lease, path).await;
            if !arrived.contains(&true) {
                return MoveAnswer { blocked: true, ..answer(refused) };
            }
            // Of connections, one speaks for all. Of datagrams, nothing else shows whose the new address is.
            let is_open = |number: usize, found: &FlowToMove| found.protocol == FlowProtocol::Tcp || arrived.get(number) == Some(&true);
            let (open, closed): (Vec<_>, Vec<_>) =
                wanted.into_iter().enumerate().partition(|(number, (.., found))| is_open(*number, found));
            refused.extend(closed.into_iter().map(|(_, (place, ..))| (place, "its proof has not come by the new way".to_owned())));
            wanted = open.into_iter().map(|(_, found)| found).collect();
        }
        let flows = || wanted.iter().map(|(.., flow)| *flow).collect::<Vec<_>>();
        let done = self.rewrite(flows(), lease, request.step).await;
        let until = lease.map(|lease| Instant::now() + lease);
        let mut inside = Vec::new();
        for (number, (place, ends, _)) in wanted.into_iter().enumerate() {
            let reason = match &done {
                Ok(refused) => refused.get(&number),
                Err(reason) => Some(reason),
            };
            match (reason, until) {
                (Some(reason), _) => drop(refused.insert(place, reason.chars().take(MAX_REASON).collect())),
                (None, Some(_)) if request.step == MoveStep::Prove => {}
                (None, Some(until)) => {
                    let flow = &request.flows[place];
                    let was_tested = known.moved.get(&ends).is_some_and(|moved| moved.tested && moved.via == flow.via);
                    let tested = was_tested || request.step == MoveStep::Test;
                    known.moved.insert(ends, MovedFlow { until, numbers: flow.numbers(), via: flow.via, tested });
                    inside.extend(Tunnel::of(request.flows[place].via.ip()).map(|_| (request.flows[place].via, ends.2.port())));
                }
                (None, None) => drop(known.moved.remove(&ends)),
            }
        }
        if let (Some(tunnels), Some(until)) = (&self.0.tunnels, until) {
            tunnels.allow(inside.into_iter(), until);
        }
        answer(refused)
    }
}

impl ControlServer {
    /// Checks what concerns datagrams only. A flow that has moved keeps the proof with which it did: a dead link brings no other.
    fn check_datagrams(&self, step: MoveStep, flow: &PeerFlow, known: &Known) -> Result<(), &'static str> {
        let moved = known.moved.get(&(flow.protocol, flow.client, flow.server));
        let others = known.moved.keys().filter(|(protocol, ..)| *protocol == FlowProtocol::Udp).count();
        let is_known = moved.is_some_and(|moved| moved.numbers == flow.numbers());
        match step {
            _ if flow.protocol == FlowProtocol::Tcp => Ok(()),
            _ if Tunnel::of(flow.via.ip()).is_some() || self.0.waypoints.contains(&flow.via.ip()) => {
                Err("datagrams pass neither tunnels nor waypoints")
            }
            MoveStep::Prove => Ok(()),
            _ if !is_known && !self.0.proofs.check(flow) => Err("it gives no proof that its datagrams arrive there, or an old one"),
            _ if moved.is_none() && others >= MAX_DATAGRAM_FLOWS => Err("a client moves too many flows of datagrams"),
            // It might be another flow's address and port.
            MoveStep::Move if !moved.is_some_and(|moved| moved.tested && moved.via == flow.via) => {
                Err("nothing has come by the new way yet (\"test\")")
            }
            _ => Ok(()),
        }
    }
}

/// Why a flow does not move.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Unproved {
    #[error("the path is not there, or has changed its address")]
    Path,
    #[error("no path of this bond has come from {0} lately, or a NAT translates it")]
    Client(IpAddr),
    #[error("it has no port")]
    Port,
    #[error("it is not the client's end of this bond's tunnel")]
    Tunnel,
    #[error(
        "a NAT translates {0} to {1}, or it is another host's, and the server names no such waypoint (\"braid relay --local --moves --through\")"
    )]
    Translated(IpAddr, IpAddr),
}

/// Checks a flow against what the client has proved.
fn check(
    flow: &PeerFlow,
    path: Option<&ProvenPath>,
    tunnel: Option<Tunnel>,
    waypoints: &[IpAddr],
    is_proven: impl Fn(IpAddr) -> bool,
) -> Result<FlowToMove, Unproved> {
    let path = path.ok_or(Unproved::Path)?;
    if !is_proven(flow.client.ip()) {
        return Err(Unproved::Client(flow.client.ip()));
    }
    if flow.via.port() == 0 || flow.client.port() == 0 {
        return Err(Unproved::Port);
    }
    if let Some(of) = Tunnel::of(flow.via.ip()) {
        let server = tunnel.filter(|tunnel| of == (*tunnel, End::Client)).ok_or(Unproved::Tunnel)?;
        return Ok(flow_to_move(flow, flow.via, server.address(End::Server, Family::of(flow.via.ip()))));
    }
    // The operator trusts these hosts to send on only what their clients may receive.
    if waypoints.contains(&flow.via.ip()) {
        return Ok(flow_to_move(flow, flow.via, flow.server.ip()));
    }
    if flow.via.ip() != path.remote {
        return Err(Unproved::Translated(flow.via.ip(), path.remote));
    }
    Ok(flow_to_move(flow, flow.via, path.local))
}

/// The flow as this host has it, and on the way.
fn flow_to_move(flow: &PeerFlow, client: SocketAddr, server: IpAddr) -> FlowToMove {
    FlowToMove {
        own: (flow.server, flow.client),
        wire: (SocketAddr::new(server, flow.server.port()), client),
        protocol: flow.protocol,
        numbers: Some(flow.numbers()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn flow(client: &str) -> PeerFlow {
        PeerFlow {
            client: client.parse().unwrap(),
            server: "192.0.2.1:80".parse().unwrap(),
            via: "10.1.0.1:7".parse().unwrap(),
            protocol: FlowProtocol::Tcp,
            sent: 1,
            received: 2,
        }
    }

    fn path(remote: &str) -> ProvenPath {
        ProvenPath { path: PathId(3), remote: remote.parse().unwrap(), local: "192.0.2.9".parse().unwrap(), rtt: Duration::from_millis(20) }
    }

    #[test]
    fn a_flow_moves_only_between_addresses_that_the_client_has_proved() {
        let proven = |address: IpAddr| address == IpAddr::from([10, 0, 0, 1]);
        let path = path("10.1.0.1");
        let check = |flow: &PeerFlow, path: Option<&ProvenPath>, proven| {
            super::check(flow, path, Some(Tunnel::new(1)), &["198.51.100.7".parse().unwrap()], proven)
        };
        let moved = check(&flow("10.0.0.1:50"), Some(&path), proven).unwrap();
        assert_eq!(moved.own, ("192.0.2.1:80".parse().unwrap(), "10.0.0.1:50".parse().unwrap()));
        assert_eq!(moved.wire, ("192.0.2.9:80".parse().unwrap(), "10.1.0.1:7".parse().unwrap()));
        assert_eq!(check(&flow("10.0.0.2:50"), Some(&path), proven).unwrap_err(), Unproved::Client("10.0.0.2".parse().unwrap()));
        assert_eq!(check(&flow("10.0.0.1:50"), None, proven).unwrap_err(), Unproved::Path);
        let via = |via: &str| PeerFlow { via: via.parse().unwrap(), ..flow("10.0.0.1:50") };
        assert!(check(&via("192.168.1.2:7"), Some(&path), proven).unwrap_err().to_string().contains("NAT"));
        assert_eq!(check(&flow("10.0.0.1:0"), Some(&path), proven).unwrap_err(), Unproved::Port);
        // The tunnel of this bond has the number 1.
        let inside = check(&via("244.0.0.2:7"), Some(&path), proven).unwrap();
        assert_eq!(inside.wire, ("244.0.0.3:80".parse().unwrap(), "244.0.0.2:7".parse().unwrap()));
        for other in ["244.0.0.3:7", "244.0.0.4:7", "[100::4]:7"] {
            assert_eq!(check(&via(other), Some(&path), proven).unwrap_err(), Unproved::Tunnel, "{other}");
        }
    }

    fn known() -> Known {
        Known { proven: BTreeMap::from([("10.0.0.1".parse().unwrap(), Instant::now())]), moved: BTreeMap::new(), proved: (None, 0) }
    }

    fn server(mover: Arc<dyn Mover>) -> ControlServer {
        let (driver, _notices) = HostDriver::start(braid_bond::host::Host::client([1; 32], Instant::now()));
        ControlServer::new(mover, driver, None, vec!["198.51.100.7".parse().unwrap()], false).unwrap()
    }

    /// Refuses the flow from this port.
    struct Picky(u16, Mutex<Vec<(usize, Option<Duration>)>>);

    impl Mover for Picky {
        fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>, _step: MoveStep) -> MoveResult<'_> {
            self.1.lock().unwrap().push((flows.len(), lease));
            let refused = |(place, flow): (usize, &FlowToMove)| (flow.own.1.port() == self.0).then(|| (place, "no".repeat(1000)));
            let refused = flows.iter().enumerate().filter_map(refused).collect();
            Box::pin(async move { Ok(refused) })
        }

        fn arrived(&self, flows: Vec<FlowToMove>, _lease: Duration) -> ArrivalResult<'_> {
            Box::pin(async move { Ok(flows.iter().map(|flow| flow.own.1.port() != self.0).collect()) })
        }
    }

    #[tokio::test]
    async fn one_bad_flow_does_not_keep_the_others_and_only_moved_ones_come_back() {
        let mover = Arc::new(Picky(51, Mutex::default()));
        let (server, mut known) = (server(mover.clone()), known());
        let flows = ["10.0.0.1:50", "10.0.0.1:51", "10.0.0.9:52", "10.0.0.1:53", "10.0.0.1:53"].map(flow).to_vec();
        let mut request = MoveRequest { id: 1, path: 3, lease_ms: Some(3_600_000), step: MoveStep::Move, flows };
        let refused = server.move_flows(&request, &[path("10.1.0.1")], None, &mut known).await.refused;
        assert_eq!(refused.keys().copied().collect::<Vec<_>>(), [1, 2, 4], "{refused:?}");
        assert_eq!((refused[&1].len(), known.moved.len()), (MAX_REASON, 2));
        assert_eq!(std::mem::take(&mut *mover.1.lock().unwrap()), [(3, Some(MAX_LEASE))]);
        request.lease_ms = None;
        let refused = server.move_flows(&request, &[], None, &mut known).await.refused;
        assert_eq!(refused.keys().copied().collect::<Vec<_>>(), [1, 2, 4], "{refused:?}");
        assert_eq!((std::mem::take(&mut *mover.1.lock().unwrap()), known.moved.len()), (vec![(2, None)], 0));
        request.lease_ms = Some(0);
        assert_eq!(server.move_flows(&request, &[path("10.1.0.1")], None, &mut known).await.refused.len(), 5);
        request.flows = vec![flow("10.0.0.1:50"); MAX_FLOWS + 1];
        assert_eq!(server.move_flows(&request, &[], None, &mut known).await.refused.len(), MAX_FLOWS + 1);
        assert!(mover.1.lock().unwrap().is_empty());
    }

    /// Notes what it is asked for.
    #[derive(Default)]
    struct Notes(Mutex<Vec<(FlowToMove, bool)>>);

    impl Mover for Notes {
        fn rewrite(&self, flows: Vec<FlowToMove>, lease: Option<Duration>, _step: MoveStep) -> MoveResult<'_> {
            self.0.lock().unwrap().extend(flows.into_iter().map(|flow| (flow, lease.is_some())));
            Box::pin(async { Ok(BTreeMap::new()) })
        }

        fn arrived(&self, flows: Vec<FlowToMove>, _lease: Duration) -> ArrivalResult<'_> {
            // A stranger's flow, whose datagrams do not carry the proof.
            Box::pin(async move { Ok(flows.iter().map(|flow| flow.wire.1.port() != 666).collect()) })
        }
    }

    /// Each number decides about one thing. So every combination of right and wrong occurs.
    #[tokio::test]
    async fn forged_requests_move_nothing() {
        const FORGED: u32 = 100_000;
        let notes = Arc::new(Notes::default());
        let (server, mut known) = (server(notes.clone()), known());
        let own: IpAddr = "10.0.0.1".parse().unwrap();
        let paths = [path("10.1.0.1")];
        let mut refused = 0;
        for number in 0..FORGED {
            let [one, two, three] = [number % 7, number / 7 % 5, number / 35 % 3];
            // Never all right at once: an address that was not proved, or a path that does not exist, or a flow that was not moved.
            let client = if one == 0 { own } else { IpAddr::from((0x0a00_0001_u32 + number * 7 + 1).to_be_bytes()) };
            let path = if one == 0 && three != 2 { 4 + number } else { 3 };
            let port = if one == 0 && three == 2 { 0 } else { 1 + (number % 60_000) as u16 };
            let client = SocketAddr::new(client, 1 + two as u16);
            let via = SocketAddr::new("10.1.0.1".parse().unwrap(), port);
            let protocol = if number % 2 == 0 { FlowProtocol::Tcp } else { FlowProtocol::Udp };
            let flow = PeerFlow { client, server: "192.0.2.1:80".parse().unwrap(), via, protocol, sent: number, received: two };
            let lease_ms = (one == 0 || two != 0).then_some(u64::MAX - u64::from(number));
            let request = MoveRequest { id: number.into(), path, lease_ms, step: MoveStep::Move, flows: vec![flow] };
            refused += server.move_flows(&request, &paths, None, &mut known).await.refused.len() as u32;
        }
        assert_eq!((refused, notes.0.lock().unwrap().len(), known.moved.len()), (FORGED, 0, 0));
    }

    fn datagrams(client: &str, numbers: SequenceNumbers) -> PeerFlow {
        PeerFlow { protocol: FlowProtocol::Udp, sent: numbers.sent, received: numbers.received, ..flow(client) }
    }

    #[tokio::test]
    async fn datagrams_move_only_with_the_proof_that_was_sent_to_them() {
        let notes = Arc::new(Notes::default());
        let (server, mut known) = (server(notes.clone()), known());
        let none = SequenceNumbers { sent: 0, received: 0 };
        let ask = async |known: &mut Known, path, step, flows: Vec<PeerFlow>| {
            let request = MoveRequest { id: 1, path: 3, lease_ms: Some(30_000), step, flows };
            server.move_flows(&request, &[path], None, known).await.refused
        };
        // It goes to the flow's own address, which must be that of the path.
        let own = PeerFlow { via: "10.0.0.1:50".parse().unwrap(), ..datagrams("10.0.0.1:50", none) };
        assert_eq!(ask(&mut known, path("10.1.0.1"), MoveStep::Prove, vec![own]).await.len(), 1);
        assert_eq!(ask(&mut known, path("10.0.0.1"), MoveStep::Prove, vec![datagrams("10.0.0.1:50", none)]).await.len(), 1);
        let tcp = PeerFlow { protocol: FlowProtocol::Tcp, ..own };
        assert_eq!(ask(&mut known, path("10.0.0.1"), MoveStep::Prove, vec![tcp]).await.len(), 1);
        assert!(notes.0.lock().unwrap().is_empty());
        assert!(ask(&mut known, path("10.0.0.1"), MoveStep::Prove, vec![own]).await.is_empty());
        let (proved, _) = notes.0.lock().unwrap().pop().unwrap();
        let proof = proved.numbers.unwrap();
        assert_eq!((proved.own, proved.wire.1), ((own.server, own.client), own.client));
        assert!(known.moved.is_empty());
        // Nothing else moves it.
        for wrong in
            [none, SequenceNumbers { sent: proof.sent ^ 2, ..proof }, SequenceNumbers { sent: proof.received, received: proof.sent }]
        {
            assert_eq!(ask(&mut known, path("10.1.0.1"), MoveStep::Move, vec![datagrams("10.0.0.1:50", wrong)]).await.len(), 1);
        }
        assert_eq!(ask(&mut known, path("10.1.0.1"), MoveStep::Move, vec![datagrams("10.0.0.1:51", proof)]).await.len(), 1, "another flow");
        // Until the proof has come by the new way, it may be another flow's, and nothing is sent there.
        let right = || vec![datagrams("10.0.0.1:50", proof)];
        assert_eq!(ask(&mut known, path("10.1.0.1"), MoveStep::Move, right()).await.len(), 1);
        assert!(ask(&mut known, path("10.1.0.1"), MoveStep::Accept, right()).await.is_empty());
        assert_eq!(ask(&mut known, path("10.1.0.1"), MoveStep::Move, right()).await.len(), 1);
        let stolen = || vec![PeerFlow { via: "10.1.0.1:666".parse().unwrap(), ..right()[0] }];
        assert!(ask(&mut known, path("10.1.0.1"), MoveStep::Accept, stolen()).await.is_empty());
        notes.0.lock().unwrap().clear();
        ask(&mut known, path("10.1.0.1"), MoveStep::Test, stolen()).await;
        assert_eq!(ask(&mut known, path("10.1.0.1"), MoveStep::Move, stolen()).await.len(), 1);
        assert!(notes.0.lock().unwrap().is_empty());
        assert!(ask(&mut known, path("10.1.0.1"), MoveStep::Accept, right()).await.is_empty());
        assert!(ask(&mut known, path("10.1.0.1"), MoveStep::Test, right()).await.is_empty());
        assert!(ask(&mut known, path("10.1.0.1"), MoveStep::Move, right()).await.is_empty());
        // Waypoints and tunnels take none.
        for via in ["198.51.100.7:53", "244.0.0.2:7"] {
            let inside = PeerFlow { via: via.parse().unwrap(), ..right()[0] };
            assert_eq!(ask(&mut known, path("10.1.0.1"), MoveStep::Accept, vec![inside]).await.len(), 1, "{via}");
        }
        // Not more of them than a client may need.
        let many: Vec<PeerFlow> =
            (0..MAX_PROOFS as u16 + 1).map(|port| PeerFlow { client: SocketAddr::new(own.client.ip(), 100 + port), ..own }).collect();
        assert_eq!(ask(&mut known, path("10.0.0.1"), MoveStep::Prove, many).await.len(), MAX_PROOFS + 1);
    }

    #[test]
    fn a_proof_is_of_one_flow_and_ends() {
        let proofs = Proofs::new().unwrap();
        let of = |flow: &PeerFlow| proofs.of(flow, 0).unwrap();
        let flows = [flow("10.0.0.1:50"), flow("10.0.0.1:51"), PeerFlow { server: "192.0.2.1:81".parse().unwrap(), ..flow("10.0.0.1:50") }];
        let all: BTreeSet<(u32, u32)> = flows.iter().map(of).map(|proof| (proof.sent, proof.received)).collect();
        assert_eq!(all.len(), 3);
        assert_eq!(proofs.of(&flows[0], 1), None, "it has just begun");
        let Some(begin) = Instant::now().checked_sub(PROOF_PERIOD * (PROOF_PERIODS as u32 + 2)) else { return };
        let older = Proofs { begin, ..proofs };
        let with = |proof: SequenceNumbers| PeerFlow { sent: proof.sent, received: proof.received, ..flows[0] };
        for ago in 0..=PROOF_PERIODS + 1 {
            let proof = older.of(&flows[0], ago).unwrap();
            assert_eq!(older.check(&with(proof)), ago <= PROOF_PERIODS, "{ago} periods ago");
        }
    }
}
