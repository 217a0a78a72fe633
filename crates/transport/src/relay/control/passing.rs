//! Flows between a client and another host that pass this one (docs/protocol.md, *Control*): each end sees only this host.
//!
//! A flow passes only from an address at which the client has proved to receive, and to a destination that this relay would open for it. The ports that it has
//! here are bound, so that nobody else gets them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use braid_bond::PathId;
use braid_bond::host::ProvenPath;
use braid_peer::destination::Policy;
use socket2::{Domain, Socket, Type};
use tokio::sync::OwnedSemaphorePermit;

use super::{ControlServer, FlowToMove, MAX_LEASE, MAX_REASON};
use crate::account::Account;
use crate::control::{FlowProtocol, MAX_FLOWS, MoveAnswer, MoveStep, PassRequest, Passage, PassingFlow};

/// How much longer than asked for the daemon may let a flow pass: it rounds leases up to whole seconds.
const MARGIN: Duration = Duration::from_secs(2);

/// The flows of a control flow, by this host's address and port towards the other host.
#[derive(Default)]
pub(super) struct Passing(BTreeMap<SocketAddr, Passed>);

struct Passed {
    server: SocketAddr,
    near: SocketAddr,
    /// When its lease ends at the latest. Its ports and places are taken until then.
    until: Instant,
    /// Hold the ports.
    _sockets: [Socket; 2],
    _places: [OwnedSemaphorePermit; 2],
}

impl ControlServer {
    /// Answers a request to let flows pass.
    pub(super) async fn pass_flows(
        &self,
        request: &PassRequest,
        paths: &[ProvenPath],
        passing: &mut Passing,
        account: &Account,
        policy: &Policy,
    ) -> MoveAnswer {
        let now = Instant::now();
        let mut answer = MoveAnswer { id: request.id, ..MoveAnswer::default() };
        let lease = Duration::from_millis(request.lease_ms).min(MAX_LEASE);
        let path = paths.iter().find(|path| path.path == PathId(request.path));
        let mut wanted: Vec<(usize, Passage, FlowToMove, bool)> = Vec::new();
        for (place, flow) in request.passing.iter().enumerate() {
            let found = match () {
                () if request.passing.len() > MAX_FLOWS => Err("a request has too many flows".to_owned()),
                () if lease.is_zero() => Err("a lease has no time".to_owned()),
                // The kernel sends the packets, and nobody counts them.
                () if account.meter(|meter| meter.limits_bytes()) => {
                    Err("this client has a limit of its rate or its monthly bytes here, which cannot be applied to packets that pass"
                        .to_owned())
                }
                () => {
                    check(flow, path, policy).and_then(|local| passing.take(flow, local, now + lease + MARGIN, || self.take_way(account)))
                }
            };
            match found {
                Ok((passage, is_new)) => {
                    let own = (passage.far, flow.server);
                    wanted.push((
                        place,
                        passage,
                        FlowToMove { own, wire: (passage.near, flow.client), protocol: FlowProtocol::Tcp, numbers: None },
                        is_new,
                    ));
                }
                Err(reason) => drop(answer.refused.insert(place, reason)),
            }
        }
        if wanted.is_empty() {
            return answer;
        }
        let flows = || wanted.iter().map(|(_, _, flow, _)| *flow).collect::<Vec<_>>();
        // A new flow has only one way to the client.
        let step = if wanted.iter().any(|(.., is_new)| *is_new) { MoveStep::Move } else { request.step };
        if step == MoveStep::Test && !self.arrived(flows, lease, path).await.contains(&true) {
            answer.blocked = true;
            return answer;
        }
        let done = self.rewrite(flows(), Some(lease), step).await;
        // Others may have been served before.
        let until = Instant::now() + lease + MARGIN;
        for (number, (place, passage, _, is_new)) in wanted.into_iter().enumerate() {
            if let Some(passed) = passing.0.get_mut(&passage.far) {
                passed.until = until;
            }
            let reason = match &done {
                Ok(refused) => refused.get(&number),
                Err(reason) => Some(reason),
            };
            match reason {
                Some(reason) => {
                    // Only if the daemon has said no, it does not pass.
                    if is_new && done.is_ok() {
                        passing.0.remove(&passage.far);
                    }
                    answer.refused.insert(place, reason.chars().take(MAX_REASON).collect());
                }
                None => drop(answer.passing.insert(place, passage)),
            }
        }
        answer
    }
}

impl Drop for Passing {
    /// The daemon lets flows pass until their leases end, even if nobody asks any more. So long nobody else may get their ports.
    fn drop(&mut self) {
        let mut left = std::mem::take(&mut self.0);
        if left.is_empty() || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        tokio::spawn(async move {
            while let Some(next) = left.values().map(|passed| passed.until).min() {
                tokio::time::sleep_until(next.into()).await;
                left.retain(|_, passed| passed.until > Instant::now());
            }
        });
    }
}

impl Passing {
    /// Forgets flows whose leases have ended.
    pub(super) fn expire(&mut self) {
        let now = Instant::now();
        self.0.retain(|_, passed| passed.until > now);
    }

    /// The ports of a flow: those that it has, whose lease then ends at `until`, or new ones of the address `local`. Returns whether they are new.
    fn take(
        &mut self,
        flow: &PassingFlow,
        local: IpAddr,
        until: Instant,
        places: impl Fn() -> Option<[OwnedSemaphorePermit; 2]>,
    ) -> Result<(Passage, bool), String> {
        if let Some(far) = flow.far {
            let known = self.0.get_mut(&far).filter(|known| known.server == flow.server && known.near.ip() == local);
            let known = known.ok_or("it does not pass this host, or its lease ended")?;
            known.until = until;
            return Ok((Passage { near: known.near, far }, false));
        }
        let places = places().ok_or("too many flows pass already")?;
        let cannot = |error: std::io::Error| format!("there is no free port: {error}");
        let (one, other) = (hold(local).map_err(cannot)?, hold(local).map_err(cannot)?);
        let passage = Passage { near: one.1, far: other.1 };
        self.0.insert(passage.far, Passed { server: flow.server, near: passage.near, until, _sockets: [one.0, other.0], _places: places });
        Ok((passage, true))
    }
}

/// Binds a free TCP port, so that no connection and no listener gets it.
fn hold(address: IpAddr) -> std::io::Result<(Socket, SocketAddr)> {
    let socket = Socket::new(Domain::for_address((address, 0).into()), Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(address, 0).into())?;
    let bound = socket.local_addr()?.as_socket().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
    Ok((socket, bound))
}

/// Checks a flow against what the client has proved and may reach. Returns this host's address on that path.
fn check(flow: &PassingFlow, path: Option<&ProvenPath>, policy: &Policy) -> Result<IpAddr, String> {
    let path = path.ok_or("the path is not there, or has changed its address")?;
    if flow.client.ip().is_ipv4() != path.remote.is_ipv4() || flow.server.is_ipv4() != path.remote.is_ipv4() {
        return Err("the client reaches this host over another family than that of the flow".to_owned());
    }
    if flow.client.ip() != path.remote {
        return Err(format!("a NAT translates {} to {}", flow.client.ip(), path.remote));
    }
    if flow.client.port() == 0 {
        return Err("it has no port".to_owned());
    }
    match policy.check(flow.server) {
        Ok(server) if server == flow.server => Ok(path.local),
        Ok(_) => Err("its address has a scope".to_owned()),
        Err(forbidden) => Err(forbidden.to_string()),
    }
}
