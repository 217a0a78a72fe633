//! Questions sent out of one link: does anybody answer there, and is it the Internet?
//!
//! Every socket is bound to the link's device, so the kernel routes by that device alone, and the BPF programs leave it alone.
//! Names are not resolved. Nothing is spawned: a future that is dropped closes its sockets, and connections are reset instead of
//! closed, so that no half-closed socket stays in the kernel.

mod echo;
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

/// Ports of a gateway that are tried where echo requests are not allowed to this process: a refusal is an answer too.
const GATEWAY_PORTS: [u16; 2] = [53, 80];

/// One question out of one link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeSpec {
    /// The name of the link's device.
    pub device: String,
    /// Whom to ask, and what.
    pub target: Target,
}

/// Whom to ask, and what. The target's address says which family of the link is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The link's gateway: an echo request, or TCP connects where this process may send none.
    Gateway(IpAddr),
    /// An echo request.
    Icmp(IpAddr),
    /// A connect; an answer of either kind counts.
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

/// What came of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeOutcome {
    /// It was answered as hoped.
    Alive {
        /// From the request (for TCP and HTTP: from the first SYN) to its first answer.
        rtt: Duration,
    },
    /// Nobody answered in time, or the network said that nobody can. For a page also: refused, or closed without an answer.
    Silent,
    /// Somebody else answered in the place of the page: a captive portal.
    Portal {
        /// What was answered, for the user.
        detail: String,
    },
    /// The question could not be put; this says nothing about the link's other end.
    Failed {
        /// What was tried, what the system said, and the remedy where there is one.
        reason: String,
    },
}

/// Sends the probe that a link's health orders, and says what came of it.
pub async fn perform(plan: ProbePlan) -> Outcome {
    let mut targets: Vec<_> = plan.gateways.iter().map(|gateway| Target::Gateway(*gateway)).collect();
    targets.extend(plan.targets.into_iter().map(Target::from));
    match probe_any(&plan.device, &targets, plan.timeout).await {
        ProbeOutcome::Alive { rtt } => Outcome::Alive { rtt },
        ProbeOutcome::Silent => Outcome::Silent,
        ProbeOutcome::Portal { .. } => Outcome::Portal,
        ProbeOutcome::Failed { reason } => {
            tracing::debug!(device = plan.device, "a probe could not be sent: {reason}");
            Outcome::Unasked
        }
    }
}

/// Asks one target, and takes at most `timeout`.
///
/// Must run inside a tokio runtime with I/O and time enabled, on a thread of the network namespace meant.
pub async fn probe(spec: &ProbeSpec, timeout: Duration) -> ProbeOutcome {
    ask(&spec.device, &spec.target, timeout).await
}

/// Asks all `targets` side by side out of `device`, and takes at most `timeout`.
///
/// Without a page ([`Target::Http`]) among them, the first that is alive decides. With pages, only they tell the Internet from a
/// captive portal: one page as expected decides at once; else, when all pages are through, a portal decides, then an address that
/// answered echo or connect. The gateway then counts for nothing: that it answers does not prove that there is an Internet
/// behind it. Nobody alive: `Silent` if any question could be put, else `Failed` with every reason.
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

/// What has come in of several questions.
struct Tally {
    /// Pages that are still out; `None` when none was asked for.
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

    /// Takes one answer; says so when it decides.
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
        // A page that could still come as expected would overrule.
        if self.pages == Some(0) { self.portal.take().or_else(|| self.alive.take()) } else { None }
    }

    /// All answers are in and none has decided.
    fn end(self, device: &str) -> ProbeOutcome {
        if self.silent {
            return ProbeOutcome::Silent;
        }
        let mut reasons = self.reasons;
        reasons.sort();
        reasons.dedup();
        let reason = if reasons.is_empty() { format!("no target to probe out of {device}; name one") } else { reasons.join("; ") };
        ProbeOutcome::Failed { reason }
    }
}

async fn ask(device: &str, target: &Target, timeout: Duration) -> ProbeOutcome {
    let asking = async {
        match target {
            Target::Gateway(address) => gateway(device, address.to_canonical(), timeout).await,
            Target::Icmp(address) => echo::ask(device, address.to_canonical(), timeout).await,
            Target::Tcp(address) => connects(device, canonical(*address)).await,
            Target::Http(page) => http::ask(device, page).await,
        }
    };
    match within(timeout, asking).await {
        None => ProbeOutcome::Silent,
        Some(Ok(outcome)) => outcome,
        Some(Err(Trouble::Unanswered)) => ProbeOutcome::Silent,
        Some(Err(Trouble::Impossible { tried, source })) => {
            let remedy = remedy(&source);
            ProbeOutcome::Failed { reason: format!("cannot probe {} out of {device}: {tried}: {source}{remedy}", Name(target)) }
        }
    }
}

/// `None` when the time is over; looks at the clock before the first question, so that no time at all asks nothing.
async fn within<T>(timeout: Duration, asking: impl Future<Output = T>) -> Option<T> {
    if timeout.is_zero() {
        return None;
    }
    tokio::time::timeout(timeout, asking).await.ok()
}

/// Why a question has no answer.
#[derive(Debug)]
pub(super) enum Trouble {
    /// The network, or the other end, said that none will come.
    Unanswered,
    /// It could not be put.
    Impossible { tried: &'static str, source: io::Error },
}

impl Trouble {
    fn impossible(tried: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Impossible { tried, source }
    }

    /// Of an error that a socket met after it was connected or began to connect: what routers (ICMP), a neighbour that does not
    /// answer, or the other end say is an answer of a kind, nobody is there.
    fn met(tried: &'static str, source: io::Error) -> Self {
        match source.raw_os_error() {
            Some(libc::EHOSTUNREACH | libc::ENETUNREACH | libc::EHOSTDOWN | libc::EACCES | libc::ENOPROTOOPT | libc::EPROTO) => {
                Self::Unanswered
            }
            Some(libc::ETIMEDOUT | libc::ECONNRESET | libc::ECONNREFUSED) => Self::Unanswered,
            _ => Self::Impossible { tried, source },
        }
    }

    fn forbidden(&self) -> bool {
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

struct Name<'a>(&'a Target);

impl std::fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Target::Gateway(address) => write!(f, "the gateway {address}"),
            Target::Icmp(address) => write!(f, "{address} (echo)"),
            Target::Tcp(address) => write!(f, "{address} (TCP)"),
            Target::Http(page) => write!(f, "http://{}{} at {}", page.host, page.path, page.address),
        }
    }
}

async fn gateway(device: &str, address: IpAddr, timeout: Duration) -> Result<ProbeOutcome, Trouble> {
    let forbidden = match echo::ask(device, address, timeout).await {
        Err(trouble) if trouble.forbidden() => trouble,
        answer => return answer,
    };
    let mut connects: FuturesUnordered<_> = GATEWAY_PORTS.iter().map(|port| connects(device, SocketAddr::new(address, *port))).collect();
    let mut trouble = forbidden;
    while let Some(answer) = connects.next().await {
        match answer {
            Ok(outcome) => return Ok(outcome),
            Err(met) => trouble = met,
        }
    }
    Err(trouble)
}

/// Alive when the other end takes the connection, and when it refuses.
async fn connects(device: &str, address: SocketAddr) -> Result<ProbeOutcome, Trouble> {
    let start = Instant::now();
    match connect(device, address).await {
        Ok(_) | Err(Connect::Refused) => Ok(ProbeOutcome::Alive { rtt: start.elapsed() }),
        Err(Connect::Trouble(trouble)) => Err(trouble),
    }
}

pub(super) enum Connect {
    Refused,
    Trouble(Trouble),
}

/// A connection out of `device` that is reset when it is dropped.
pub(super) async fn connect(device: &str, address: SocketAddr) -> Result<TcpStream, Connect> {
    let socket = bound(device, Domain::for_address(address), Type::STREAM, Protocol::TCP).map_err(Connect::Trouble)?;
    start_connecting(&socket, address).map_err(Connect::Trouble)?;
    let stream = TcpStream::from_std(socket.into()).map_err(|error| Connect::Trouble(Trouble::impossible("wait for the socket")(error)))?;
    let outcome = stream.writable().await.and_then(|()| stream.take_error());
    match outcome.unwrap_or_else(Some) {
        None => Ok(stream),
        Some(error) if error.kind() == io::ErrorKind::ConnectionRefused => Err(Connect::Refused),
        Some(error) => Err(Connect::Trouble(Trouble::met("connect", error))),
    }
}

/// By hand, since an error of the call itself (no route) is this machine's and a later one is the network's.
fn start_connecting(socket: &Socket, address: SocketAddr) -> Result<(), Trouble> {
    socket.set_linger(Some(Duration::ZERO)).map_err(Trouble::impossible("set SO_LINGER"))?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(Trouble::impossible("connect")(error)),
        _ => Ok(()),
    }
}

/// A non-blocking socket that sends and hears through `device` alone.
fn bound(device: &str, domain: Domain, kind: Type, protocol: Protocol) -> Result<Socket, Trouble> {
    if device.is_empty() {
        // The kernel would take it for "any device".
        return Err(Trouble::impossible("bind to a device without a name")(io::Error::from_raw_os_error(libc::ENODEV)));
    }
    let socket = Socket::new(domain, kind.nonblocking().cloexec(), Some(protocol)).map_err(Trouble::impossible("open a socket"))?;
    socket.bind_device(Some(device.as_bytes())).map_err(Trouble::impossible("bind it to the device (SO_BINDTODEVICE)"))?;
    Ok(socket)
}

/// The address with an IPv4-mapped one written as IPv4: the kernel sends IPv4 for it.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::new(v4.into(), address.port()),
        // Keeps the scope.
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

    /// The decision after the given answers, in this order, and how many were needed.
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
    fn without_pages_the_first_alive_decides() {
        assert_eq!(tally(&[(tcp(), ProbeOutcome::Silent), (gateway(), ALIVE), (tcp(), ProbeOutcome::Silent)]), (ALIVE, 2));
        assert_eq!(tally(&[(tcp(), ALIVE), (gateway(), ProbeOutcome::Silent)]), (ALIVE, 1));
    }

    #[test]
    fn a_portal_counts_over_everything_but_a_page_as_expected() {
        assert_eq!(tally(&[(gateway(), ALIVE), (tcp(), ALIVE), (page(), portal())]), (portal(), 3));
        assert_eq!(tally(&[(page(), portal()), (gateway(), ALIVE)]), (portal(), 1));
        assert_eq!(tally(&[(page(), portal()), (page(), ALIVE)]), (ALIVE, 2));
        assert_eq!(tally(&[(page(), ALIVE), (page(), portal())]), (ALIVE, 1));
    }

    #[test]
    fn beside_silent_pages_a_public_address_counts_and_the_gateway_does_not() {
        assert_eq!(tally(&[(gateway(), ALIVE), (page(), ProbeOutcome::Silent)]), (ProbeOutcome::Silent, 2));
        assert_eq!(tally(&[(gateway(), ALIVE), (page(), failed("no socket"))]), (ProbeOutcome::Silent, 2));
        assert_eq!(tally(&[(tcp(), ALIVE), (page(), ProbeOutcome::Silent)]), (ALIVE, 2));
        assert_eq!(tally(&[(page(), ProbeOutcome::Silent), (tcp(), ALIVE)]), (ALIVE, 2));
    }

    #[test]
    fn it_failed_only_when_no_question_could_be_put() {
        assert_eq!(tally(&[(tcp(), failed("a")), (gateway(), ProbeOutcome::Silent)]).0, ProbeOutcome::Silent);
        assert_eq!(tally(&[(tcp(), failed("b")), (gateway(), failed("a")), (tcp(), failed("b"))]).0, failed("a; b"));
        assert_eq!(tally(&[]).0, failed("no target to probe out of wlan0; name one"));
    }

    #[test]
    fn a_mapped_address_is_asked_as_ipv4() {
        assert_eq!(canonical("[::ffff:192.0.2.1]:80".parse().unwrap()), "192.0.2.1:80".parse().unwrap());
        let scoped = "[fe80::1%3]:80".parse().unwrap();
        assert_eq!(canonical(scoped), scoped);
    }
}
