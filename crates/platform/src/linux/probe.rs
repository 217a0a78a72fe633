//! Probes through one link: whether a target answers, and whether the link reaches the Internet or a captive portal.
//!
//! Every socket is bound to the link's device, so that the kernel routes by that device alone and the BPF programs skip the socket. Names are not
//! resolved. No task is spawned: a dropped future closes its sockets. Connections are reset instead of closed, so that no half-closed socket stays in
//! the kernel.

pub(super) mod echo;
pub(super) mod http;

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use braid_control::links::ProbePlan;
use braid_decide::health::Outcome;
use braid_decide::policy::{HttpTarget, ProbeTarget};
use futures_util::stream::{FuturesUnordered, StreamExt};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpStream;

/// Gateway ports to connect to if this process may not send echo requests. A refusal counts as an answer.
const GATEWAY_PORTS: [u16; 2] = [53, 80];

/// One probe through one link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeSpec {
    /// Name of the link's device.
    pub device: String,
    /// Target and kind of the probe.
    pub target: Target,
}

/// Target and kind of a probe. The address family of the target selects the link's family to probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The link's gateway: an echo request, or TCP connects if this process may not send echo requests.
    Gateway(IpAddr),
    /// An echo request.
    Icmp(IpAddr),
    /// A TCP connect. Both acceptance and refusal count as an answer.
    Tcp(SocketAddr),
    /// A page with a known answer.
    Http(HttpTarget),
}

impl From<ProbeTarget> for Target {
    fn from(target: ProbeTarget) -> Self {
        match target {
            ProbeTarget::Tcp(address) => Self::Tcp(address),
            ProbeTarget::Icmp(address) => Self::Icmp(address),
            ProbeTarget::Http(page) => Self::Http(page),
        }
    }
}

/// Result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// The target answered as expected.
    Alive {
        /// Time from the request to its first answer; for TCP and HTTP, from the first SYN.
        rtt: Duration,
    },
    /// No answer arrived in time, or the network reported that the target is unreachable. For a page also: the connection was refused, or closed
    /// without an answer.
    Silent,
    /// Another host answered instead of the page's server: a captive portal.
    Portal {
        /// Description of the answer, for the user.
        detail: String,
    },
    /// The probe could not be sent. This says nothing about the remote end of the link.
    Failed {
        /// What was tried, the system's error, and the remedy if there is one.
        reason: String,
    },
}

/// Sends the probe that the health state of a link requests, and returns its outcome.
pub async fn perform(plan: ProbePlan) -> Outcome {
    let mut targets: Vec<_> = plan.gateways.iter().map(|gateway| Target::Gateway(*gateway)).collect();
    targets.extend(plan.targets.into_iter().map(Target::from));
    match probe_any(&plan.device, &targets, plan.timeout).await {
        ProbeOutcome::Alive { rtt } => Outcome::Alive { rtt },
        ProbeOutcome::Silent => Outcome::Silent,
        ProbeOutcome::Portal { .. } => Outcome::Portal,
        ProbeOutcome::Failed { reason } => {
            tracing::debug!(device = plan.device, "a probe could not be sent: {reason}");
            Outcome::NotSent
        }
    }
}

/// Probes one target. Takes at most `timeout`.
///
/// Must run inside a tokio runtime with I/O and time enabled, on a thread in the intended network namespace.
pub async fn probe(spec: &ProbeSpec, timeout: Duration) -> ProbeOutcome {
    ask(&spec.device, &spec.target, timeout).await
}

/// Probes all `targets` concurrently through `device`. Takes at most `timeout`.
///
/// If `targets` contains no page ([`Target::Http`]), the first live target decides. If it contains pages, only they distinguish the Internet from a
/// captive portal. An expected page decides at once. Otherwise, after all pages have completed, a portal decides, then an address that answered an
/// echo request or connect. The gateway does not count then: its answer does not prove that there is an Internet connection behind it. If no target
/// is alive, the outcome is `Silent` if any probe could be sent, otherwise `Failed` with every reason.
pub async fn probe_any(device: &str, targets: &[Target], timeout: Duration) -> ProbeOutcome {
    let mut asked: FuturesUnordered<_> = targets.iter().map(|target| async move { (target, ask(device, target, timeout).await) }).collect();
    let mut tally = Tally::new(targets);
    while let Some((target, outcome)) = asked.next().await {
        if let Some(decided) = tally.add(target, outcome) {
            return decided;
        }
    }
    tally.end(device)
}

/// Outcomes received so far.
struct Tally {
    /// Pages still outstanding; `None` if the targets contain no page.
    pages: Option<usize>,
    portal: Option<ProbeOutcome>,
    alive: Option<ProbeOutcome>,
    silent: bool,
    reasons: Vec<String>,
}

impl Tally {
    fn new(targets: &[Target]) -> Self {
        let pages = targets.iter().filter(|target| matches!(target, Target::Http(_))).count();
        Self { pages: (pages > 0).then_some(pages), portal: None, alive: None, silent: false, reasons: Vec::new() }
    }

    /// Adds one outcome. Returns the decision if this outcome decides.
    fn add(&mut self, target: &Target, outcome: ProbeOutcome) -> Option<ProbeOutcome> {
        let page = matches!(target, Target::Http(_));
        match outcome {
            ProbeOutcome::Alive { .. } if page || self.pages.is_none() => return Some(outcome),
            ProbeOutcome::Alive { .. } if matches!(target, Target::Gateway(_)) => self.silent = true,
            ProbeOutcome::Alive { .. } => self.alive = self.alive.take().or(Some(outcome)),
            ProbeOutcome::Portal { .. } => self.portal = self.portal.take().or(Some(outcome)),
            ProbeOutcome::Silent => self.silent = true,
            ProbeOutcome::Failed { reason } => self.reasons.push(reason),
        }
        if page {
            self.pages = self.pages.map(|pages| pages - 1);
        }
        // An outstanding page could still overrule the others.
        if self.pages == Some(0) { self.portal.take().or_else(|| self.alive.take()) } else { None }
    }

    /// Result if all outcomes are in and none decided.
    fn end(self, device: &str) -> ProbeOutcome {
        if self.silent {
            return ProbeOutcome::Silent;
        }
        let mut reasons = self.reasons;
        reasons.sort();
        reasons.dedup();
        let reason = if reasons.is_empty() { format!("no target to probe out of {device}; configure one") } else { reasons.join("; ") };
        ProbeOutcome::Failed { reason }
    }
}

async fn ask(device: &str, target: &Target, timeout: Duration) -> ProbeOutcome {
    let asking = async {
        match target {
            Target::Gateway(address) => gateway(device, address.to_canonical(), timeout).await,
            Target::Icmp(address) => echo::ask(device, address.to_canonical(), timeout).await,
            Target::Tcp(address) => probe_tcp(device, canonical(*address)).await,
            Target::Http(page) => http::ask(device, page).await,
        }
    };
    match within(timeout, asking).await {
        None => ProbeOutcome::Silent,
        Some(Ok(outcome)) => outcome,
        Some(Err(ProbeError::Unanswered)) => ProbeOutcome::Silent,
        Some(Err(ProbeError::Impossible { tried, source })) => {
            let remedy = remedy(&source);
            ProbeOutcome::Failed { reason: format!("cannot probe {} out of {device}: {tried}: {source}{remedy}", TargetName(target)) }
        }
    }
}

/// Returns `None` if the time is over. Checks for a zero timeout first, so that it sends no probe.
async fn within<T>(timeout: Duration, asking: impl Future<Output = T>) -> Option<T> {
    if timeout.is_zero() {
        return None;
    }
    tokio::time::timeout(timeout, asking).await.ok()
}

/// Why a probe has no answer.
#[derive(Debug)]
pub(super) enum ProbeError {
    /// The network or the remote end reported that no answer will come.
    Unanswered,
    /// The probe could not be sent.
    Impossible { tried: &'static str, source: io::Error },
}

impl ProbeError {
    fn impossible(tried: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Impossible { tried, source }
    }

    /// Classifies an error of a socket that is connected or connecting. Errors reported by a router (ICMP), by failed neighbour resolution or by the
    /// remote end count as "unanswered".
    fn from_socket(tried: &'static str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EHOSTDOWN | libc::EACCES | libc::ENOPROTOOPT | libc::EPROTO) => {
                Self::Unanswered
            }
            Some(libc::ETIMEDOUT | libc::ECONNRESET | libc::ECONNREFUSED) => Self::Unanswered,
            _ => Self::Impossible { tried, source },
        }
    }

    fn is_forbidden(&self) -> bool {
        matches!(self, Self::Impossible { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
    }
}

fn remedy(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENODEV) => "; the device is gone",
        Some(libc::ENETDOWN) => "; set the device up",
        Some(libc::ENETUNREACH | libc::EADDRNOTAVAIL) => "; the device needs an address and a route of that family",
        Some(libc::EACCES | libc::EPERM) => {
            "; allow this group in sysctl net.ipv4.ping_group_range or give CAP_NET_RAW, and look at the firewall"
        }
        Some(libc::EMFILE | libc::ENFILE) => "; allow more open files (ulimit -n)",
        _ => "",
    }
}

struct TargetName<'a>(&'a Target);

impl std::fmt::Display for TargetName<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Target::Gateway(address) => write!(f, "the gateway {address}"),
            Target::Icmp(address) => write!(f, "{address} (echo)"),
            Target::Tcp(address) => write!(f, "{address} (TCP)"),
            Target::Http(page) => write!(f, "http://{}{} at {}", page.host, page.path, page.address),
        }
    }
}

async fn gateway(device: &str, address: IpAddr, timeout: Duration) -> Result<ProbeOutcome, ProbeError> {
    let forbidden = match echo::ask(device, address, timeout).await {
        Err(error) if error.is_forbidden() => error,
        answer => return answer,
    };
    let mut attempts: FuturesUnordered<_> = GATEWAY_PORTS.iter().map(|port| probe_tcp(device, SocketAddr::new(address, *port))).collect();
    let mut error = forbidden;
    while let Some(answer) = attempts.next().await {
        match answer {
            Ok(outcome) => return Ok(outcome),
            Err(failed) => error = failed,
        }
    }
    Err(error)
}

/// Alive if the remote end accepts or refuses the connection.
async fn probe_tcp(device: &str, address: SocketAddr) -> Result<ProbeOutcome, ProbeError> {
    let start = Instant::now();
    match connect(device, address).await {
        Ok(_) | Err(ConnectError::Refused) => Ok(ProbeOutcome::Alive { rtt: start.elapsed() }),
        Err(ConnectError::Probe(error)) => Err(error),
    }
}

pub(super) enum ConnectError {
    Refused,
    Probe(ProbeError),
}

/// Opens a connection through `device` that is reset when it is dropped.
pub(super) async fn connect(device: &str, address: SocketAddr) -> Result<TcpStream, ConnectError> {
    let socket = bound(device, Domain::for_address(address), Type::STREAM, Protocol::TCP).map_err(ConnectError::Probe)?;
    start_connect(&socket, address).map_err(ConnectError::Probe)?;
    let stream =
        TcpStream::from_std(socket.into()).map_err(|error| ConnectError::Probe(ProbeError::impossible("wait for the socket")(error)))?;
    let outcome = stream.writable().await.and_then(|()| stream.take_error());
    match outcome.unwrap_or_else(Some) {
        None => Ok(stream),
        Some(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(ConnectError::Refused),
        Some(error) => Err(ConnectError::Probe(ProbeError::from_socket("connect", error))),
    }
}

/// Uses the raw call instead of tokio's connect, because an error of the call itself (no route) is local, whereas a later error comes from the
/// network.
fn start_connect(socket: &Socket, address: SocketAddr) -> Result<(), ProbeError> {
    socket.set_linger(Some(Duration::ZERO)).map_err(ProbeError::impossible("set SO_LINGER"))?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(ProbeError::impossible("connect")(error)),
        _ => Ok(()),
    }
}

/// Opens a non-blocking socket that sends and receives through `device` only.
fn bound(device: &str, domain: Domain, kind: Type, protocol: Protocol) -> Result<Socket, ProbeError> {
    if device.is_empty() {
        // The kernel treats an empty name as "any device".
        return Err(ProbeError::impossible("bind to a device without a name")(io::Error::from_raw_os_error(libc::ENODEV)));
    }
    let socket = Socket::new(domain, kind.nonblocking().cloexec(), Some(protocol)).map_err(ProbeError::impossible("open a socket"))?;
    socket.bind_device(Some(device.as_bytes())).map_err(ProbeError::impossible("bind it to the device (SO_BINDTODEVICE)"))?;
    Ok(socket)
}

/// Converts an IPv4-mapped address to IPv4, because the kernel sends IPv4 for it.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), address.port()),
        // Keeps the scope id.
        IpAddr::V6(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIVE: ProbeOutcome = ProbeOutcome::Alive { rtt: Duration::from_millis(7) };

    fn portal() -> ProbeOutcome {
        ProbeOutcome::Portal { detail: "302".into() }
    }

    fn failed(reason: &str) -> ProbeOutcome {
        ProbeOutcome::Failed { reason: reason.into() }
    }

    fn gateway() -> Target {
        Target::Gateway("10.0.0.1".parse().unwrap())
    }

    fn tcp() -> Target {
        Target::Tcp("203.0.113.10:443".parse().unwrap())
    }

    fn page() -> Target {
        let address = "203.0.113.10:80".parse().unwrap();
        Target::Http(HttpTarget { address, host: "probe.example".into(), path: "/204".into(), status: 204, body: String::new() })
    }

    /// The decision after the given outcomes, in this order, and the number of outcomes that were needed.
    fn tally(answers: &[(Target, ProbeOutcome)]) -> (ProbeOutcome, usize) {
        let targets: Vec<Target> = answers.iter().map(|(target, _)| target.clone()).collect();
        let mut tally = Tally::new(&targets);
        for (index, (target, outcome)) in answers.iter().enumerate() {
            if let Some(decided) = tally.add(target, outcome.clone()) {
                return (decided, index + 1);
            }
        }
        (tally.end("wlan0"), answers.len())
    }

    #[test]
    fn without_pages_the_first_live_target_decides() {
        assert_eq!(tally(&[(tcp(), ProbeOutcome::Silent), (gateway(), ALIVE), (tcp(), ProbeOutcome::Silent)]), (ALIVE, 2));
        assert_eq!(tally(&[(tcp(), ALIVE), (gateway(), ProbeOutcome::Silent)]), (ALIVE, 1));
    }

    #[test]
    fn a_portal_overrules_everything_except_an_expected_page() {
        assert_eq!(tally(&[(gateway(), ALIVE), (tcp(), ALIVE), (page(), portal())]), (portal(), 3));
        assert_eq!(tally(&[(page(), portal()), (gateway(), ALIVE)]), (portal(), 1));
        assert_eq!(tally(&[(page(), portal()), (page(), ALIVE)]), (ALIVE, 2));
        assert_eq!(tally(&[(page(), ALIVE), (page(), portal())]), (ALIVE, 1));
    }

    #[test]
    fn if_pages_are_silent_a_public_address_counts_but_the_gateway_does_not() {
        assert_eq!(tally(&[(gateway(), ALIVE), (page(), ProbeOutcome::Silent)]), (ProbeOutcome::Silent, 2));
        assert_eq!(tally(&[(gateway(), ALIVE), (page(), failed("no socket"))]), (ProbeOutcome::Silent, 2));
        assert_eq!(tally(&[(tcp(), ALIVE), (page(), ProbeOutcome::Silent)]), (ALIVE, 2));
        assert_eq!(tally(&[(page(), ProbeOutcome::Silent), (tcp(), ALIVE)]), (ALIVE, 2));
    }

    #[test]
    fn the_outcome_is_failed_only_if_no_probe_could_be_sent() {
        assert_eq!(tally(&[(tcp(), failed("a")), (gateway(), ProbeOutcome::Silent)]).0, ProbeOutcome::Silent);
        assert_eq!(tally(&[(tcp(), failed("b")), (gateway(), failed("a")), (tcp(), failed("b"))]).0, failed("a; b"));
        assert_eq!(tally(&[]).0, failed("no target to probe out of wlan0; configure one"));
    }

    #[test]
    fn a_mapped_address_is_probed_as_ipv4() {
        assert_eq!(canonical("[::ffff:192.0.2.1]:80".parse().unwrap()), "192.0.2.1:80".parse().unwrap());
        let scoped = "[fe80::1%3]:80".parse().unwrap();
        assert_eq!(canonical(scoped), scoped);
    }
}
