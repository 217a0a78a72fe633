//! Opens destinations: resolves names, checks the addresses, and races connects to the allowed ones.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::{Forbidden, Policy};
use braid_model::address::{Address, Host};

/// Delay before the next address is tried in parallel (RFC 8305, section 5).
const STAGGER: Duration = Duration::from_millis(250);

/// Time limit for all attempts together.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);

/// Time limit for a name lookup.
const LOOKUP_LIMIT: Duration = Duration::from_secs(10);

/// Maximum number of a name's addresses that are tried.
const ADDRESS_LIMIT: usize = 16;

/// Maximum number of addresses of each family that are checked: the owner of a name chooses how many it has.
const MAX_CHECKED: usize = 32;

/// Maximum number of parallel attempts, to bound the sockets of one flow. At the limit, a new attempt replaces the oldest.
const MAX_ATTEMPTS: usize = 4;

/// Maximum number of concurrent name lookups, because each one occupies a thread.
static LOOKUPS: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(64)));

/// Error of opening a destination.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {target}: {reason}")]
pub struct DialError {
    /// The destination.
    pub target: Address,
    /// Reason, in a form that the other end can map to the error its program would have received.
    pub reason: Reason,
}

/// Reason why a destination cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// No process listens there.
    #[error("connection refused")]
    Refused,
    /// The host does not answer address resolution on its network.
    #[error("no route to host")]
    HostUnreachable,
    /// There is no route to its network.
    #[error("network unreachable")]
    NetworkUnreachable,
    /// No answer arrived in time.
    #[error("timed out")]
    TimedOut,
    /// The policy does not allow it.
    #[error("{0}")]
    Forbidden(Forbidden),
    /// The name has no address.
    #[error("the relay found no address for this name")]
    NameNotFound,
    /// The relay has run out of sockets, ports or memory.
    #[error("the relay has run out of resources")]
    Exhausted,
    /// Another system error (`errno`).
    #[error("{}", io::Error::from_raw_os_error(*.0))]
    Other(i32),
}

impl Reason {
    /// Maps a socket error to a reason.
    pub fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => Self::Refused,
            Some(libc::EHOSTUNREACH | libc::EHOSTDOWN) => Self::HostUnreachable,
            Some(libc::ENETUNREACH | libc::ENETDOWN) => Self::NetworkUnreachable,
            Some(libc::ETIMEDOUT) => Self::TimedOut,
            Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL | libc::EAGAIN) => Self::Exhausted,
            Some(other) => Self::Other(other),
            None if error.kind() == io::ErrorKind::TimedOut => Self::TimedOut,
            None => Self::Other(libc::EIO),
        }
    }

    /// Linux `errno` for `connect` at the far end.
    pub fn errno(self) -> i32 {
        match self {
            Self::Refused => libc::ECONNREFUSED,
            Self::HostUnreachable | Self::NameNotFound => libc::EHOSTUNREACH,
            Self::NetworkUnreachable | Self::Exhausted => libc::ENETUNREACH,
            Self::TimedOut => libc::ETIMEDOUT,
            Self::Forbidden(Forbidden::NotOwn) => libc::EADDRNOTAVAIL,
            Self::Forbidden(_) => libc::EACCES,
            // A router on the path forbids it; EACCES stands for the relay's own refusal.
            Self::Other(libc::EACCES) => libc::EHOSTUNREACH,
            Self::Other(errno) => errno,
        }
    }

    /// Rank of a failure: if several addresses fail, the most informative failure is reported.
    fn weight(self) -> u8 {
        match self {
            Self::Refused => 5,
            Self::TimedOut => 4,
            Self::HostUnreachable => 3,
            Self::NetworkUnreachable => 2,
            _ => 1,
        }
    }
}

/// Connects to the first address of `target` that answers, of those that `policy` allows.
pub async fn dial_tcp(target: &Address, policy: &Policy) -> Result<TcpStream, DialError> {
    let stream = dial_by(target, policy, TcpStream::connect).await?;
    // The far program's writes already arrive as the path delivers them; do not delay them again.
    stream.set_nodelay(true).map_err(|error| failed(target, Reason::of(&error)))?;
    Ok(stream)
}

/// Like [`dial_tcp`], with a connect function of the caller.
pub async fn dial_by<T, F>(target: &Address, policy: &Policy, connect: impl Fn(SocketAddr) -> F) -> Result<T, DialError>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    let addresses = resolve(target, policy).await?;
    let raced = timeout(CONNECT_LIMIT, race(addresses, connect)).await.unwrap_or(Err(Reason::TimedOut));
    raced.map_err(|reason| failed(target, reason))
}

/// The addresses of `target` that `policy` allows, in the order to try them, with alternating families; at least one.
///
/// Dial only these addresses and do not resolve again: a second lookup may return other addresses.
pub async fn resolve(target: &Address, policy: &Policy) -> Result<Vec<SocketAddr>, DialError> {
    let found = match &target.host {
        Host::Ip(ip) => vec![SocketAddr::new(*ip, target.port())],
        Host::Name(name) => {
            let found = timeout(LOOKUP_LIMIT, look_up(name.as_str().to_owned(), target.port(), &policy.lookups)).await;
            found.ok().flatten().ok_or_else(|| failed(target, Reason::NameNotFound))?
        }
    };
    let (mut allowed, mut forbidden) = (Vec::new(), None);
    for address in found {
        match policy.check(address) {
            Ok(address) if !allowed.contains(&address) => allowed.push(address),
            Ok(_) => {}
            Err(reason) => forbidden = Some(reason),
        }
    }
    match forbidden {
        Some(reason) if allowed.is_empty() => Err(failed(target, Reason::Forbidden(reason))),
        None if allowed.is_empty() => Err(failed(target, Reason::NameNotFound)),
        _ => Ok(alternate(allowed)),
    }
}

fn failed(target: &Address, reason: Reason) -> DialError {
    DialError { target: target.clone(), reason }
}

/// Queries the system's resolver; `None` if it has no answer.
async fn look_up(name: String, port: u16, share: &Arc<Semaphore>) -> Option<Vec<SocketAddr>> {
    let permit = (share.clone().acquire_owned().await.ok()?, LOOKUPS.clone().acquire_owned().await.ok()?);
    let asked = tokio::task::spawn_blocking(move || {
        // The thread holds the permit, because it continues even if the caller stops waiting.
        let _permit = permit;
        (name.as_str(), port).to_socket_addrs().map(first_of_each_family)
    });
    asked.await.ok()?.ok()
}

/// The first [`MAX_CHECKED`] addresses of each family.
fn first_of_each_family(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut left = [MAX_CHECKED; 2];
    let mut takes = |address: &SocketAddr| {
        let left = &mut left[usize::from(address.is_ipv6())];
        let takes = *left > 0;
        *left = left.saturating_sub(1);
        takes
    };
    addresses.filter(|address| takes(address)).collect()
}

/// Alternates the families, starting with the family of the first address (RFC 8305, section 4).
fn alternate(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let first_family = addresses.first().map(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = addresses.into_iter().partition(|address| Some(address.is_ipv6()) == first_family);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut ordered = Vec::new();
    while ordered.len() < ADDRESS_LIMIT {
        let before = ordered.len();
        ordered.extend(first.next());
        ordered.extend(second.next());
        if ordered.len() == before {
            break;
        }
    }
    ordered
}

/// Starts a connect to one address after the other without waiting for the first to fail; the first connection wins.
async fn race<T, F>(addresses: Vec<SocketAddr>, connect: impl Fn(SocketAddr) -> F) -> Result<T, Reason>
where
    T: Send + 'static,
    F: Future<Output = io::Result<T>> + Send + 'static,
{
    let mut waiting = addresses.into_iter();
    let mut running = JoinSet::new();
    let mut worst: Option<Reason> = None;
    let mut attempts: VecDeque<AbortHandle> = VecDeque::new();
    let mut begin = |running: &mut JoinSet<io::Result<T>>, address: Option<SocketAddr>| {
        let Some(address) = address else { return };
        attempts.retain(|attempt| !attempt.is_finished());
        if attempts.len() >= MAX_ATTEMPTS
            && let Some(oldest) = attempts.pop_front()
        {
            oldest.abort();
        }
        attempts.push_back(running.spawn(connect(address)));
    };
    begin(&mut running, waiting.next());
    while !running.is_empty() {
        tokio::select! {
            Some(done) = running.join_next() => match done.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
                Ok(stream) => return Ok(stream),
                Err(error) => {
                    let reason = Reason::of(&error);
                    worst = worst.into_iter().chain([reason]).max_by_key(|reason| reason.weight());
                    // An attempt aborted to make room for another also ends here as failed; it must not start one more.
                    if running.len() < MAX_ATTEMPTS {
                        begin(&mut running, waiting.next());
                    }
                }
            },
            () = sleep(STAGGER), if waiting.len() > 0 => begin(&mut running, waiting.next()),
        }
    }
    Err(worst.unwrap_or(Reason::NameNotFound))
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    #[test]
    fn regression_only_some_of_a_names_thousand_addresses_are_checked() {
        let both =
            |at: u16| [SocketAddr::from(([10, 0, (at >> 8) as u8, at as u8], 80)), SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, at], 80))];
        let checked = first_of_each_family((0..1000).flat_map(both));
        assert_eq!(checked, (0..MAX_CHECKED as u16).flat_map(both).collect::<Vec<_>>());
    }

    /// Decrements the counter when dropped.
    struct Counted(Arc<AtomicUsize>);

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn regression_the_sockets_of_one_flow_are_limited_however_many_addresses_its_name_has() {
        let (running, most, tried) = <(Arc<AtomicUsize>, Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
        let addresses = (1..=16).map(|last| SocketAddr::from(([192, 0, 2, last], 80))).collect();
        let silent = |_| {
            let (running, most, tried) = (running.clone(), most.clone(), tried.clone());
            async move {
                most.fetch_max(running.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
                tried.fetch_add(1, Ordering::Relaxed);
                let _counted = Counted(running);
                std::future::pending::<io::Result<()>>().await
            }
        };
        let all_tried = async {
            while tried.load(Ordering::Relaxed) < 16 {
                sleep(STAGGER).await;
            }
        };
        tokio::select! {
            _ = race(addresses, silent) => panic!("no address answers"),
            () = all_tried => assert_eq!(most.load(Ordering::Relaxed), MAX_ATTEMPTS),
        }
    }

    fn open() -> Policy {
        Policy::relay(vec!["127.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()], Vec::new())
    }

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// A closed port: bound, so that no other socket gets it while this one lives, and not listening.
    fn closed() -> (Socket, SocketAddr) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        (socket, address)
    }

    /// A listener whose queue is full, so that further attempts get no answer.
    fn silent() -> (Socket, Vec<std::net::TcpStream>, SocketAddr) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).unwrap();
        socket.listen(0).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let connect = || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200));
        let queued = std::iter::from_fn(|| connect().ok()).take(100).collect();
        (socket, queued, address)
    }

    fn reason(error: DialError) -> Reason {
        error.reason
    }

    #[tokio::test]
    async fn an_allowed_address_is_opened() {
        let (listener, address) = listener();
        let stream = dial_tcp(&address.into(), &open()).await.unwrap();
        assert_eq!(listener.accept().unwrap().1, stream.local_addr().unwrap());
        assert!(stream.nodelay().unwrap());
        let named: Address = format!("localhost:{}", address.port()).parse().unwrap();
        assert_eq!(dial_tcp(&named, &open()).await.unwrap().peer_addr().unwrap(), address);
    }

    #[tokio::test]
    async fn a_forbidden_address_is_not_dialled() {
        let (listener, address) = listener();
        listener.set_nonblocking(true).unwrap();
        let closed_policy = Policy::relay(Vec::new(), Vec::new());
        let mapped = SocketAddr::new(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), address.port());
        let named: Address = format!("localhost:{}", address.port()).parse().unwrap();
        for target in [address.into(), mapped.into(), named] {
            let refused = dial_tcp(&target, &closed_policy).await.unwrap_err();
            assert!(refused.to_string().contains("loopback"), "{refused}");
            assert_eq!((refused.reason, refused.reason.errno()), (Reason::Forbidden(Forbidden::Special("loopback")), libc::EACCES));
        }
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn slow_lookups_of_one_client_do_not_delay_another() {
        let busy = open();
        let _slow = busy.lookups.clone().acquire_many_owned(8).await.unwrap();
        let target: Address = "localhost:80".parse().unwrap();
        let waiting = timeout(Duration::from_millis(50), resolve(&target, &busy.clone())).await;
        assert!(waiting.is_err(), "its own share is used up");
        assert!(resolve(&target, &busy.for_another_client()).await.is_ok());
    }

    #[tokio::test]
    async fn failures_map_to_the_errors_a_program_expects() {
        let (_closed, address) = closed();
        assert_eq!(reason(dial_tcp(&address.into(), &open()).await.unwrap_err()), Reason::Refused);
        let nowhere: Address = "no-such-host.invalid:80".parse().unwrap();
        assert_eq!(reason(dial_tcp(&nowhere, &open()).await.unwrap_err()), Reason::NameNotFound);
        for (errno, reason) in [(libc::ENETUNREACH, Reason::NetworkUnreachable), (libc::EHOSTUNREACH, Reason::HostUnreachable)] {
            assert_eq!(Reason::of(&io::Error::from_raw_os_error(errno)), reason);
            assert_eq!(reason.errno(), errno);
        }
        assert_eq!(Reason::of(&io::Error::from_raw_os_error(libc::EMFILE)), Reason::Exhausted);
    }

    #[tokio::test]
    async fn a_silent_address_does_not_delay_the_next() {
        let (_socket, _queued, silent) = silent();
        let (_listener, good) = listener();
        let begun = Instant::now();
        let stream = race(vec![silent, good], TcpStream::connect).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), good);
        assert!(begun.elapsed() >= STAGGER, "the first attempt had its head start");
        assert!(begun.elapsed() < Duration::from_secs(20), "an unanswered connect takes two minutes to fail");
    }

    #[tokio::test]
    async fn a_failure_starts_the_next_attempt_at_once_and_the_most_informative_failure_is_reported() {
        let ((_listener, good), (_first, one), (_second, other)) = (listener(), closed(), closed());
        assert_eq!(race(vec![one, other, good], TcpStream::connect).await.unwrap().peer_addr().unwrap(), good);
        // A refusal is more informative than the system's error for a broadcast address.
        let broadcast = SocketAddr::from((Ipv4Addr::BROADCAST, 9));
        assert_eq!(race(vec![broadcast, one], TcpStream::connect).await.unwrap_err(), Reason::Refused);
        assert_eq!(race(vec![one, broadcast], TcpStream::connect).await.unwrap_err(), Reason::Refused);
    }

    #[test]
    fn families_alternate_and_the_number_of_addresses_is_limited() {
        let four = |last: u8| SocketAddr::from(([192, 0, 2, last], 1));
        let six = |last: u16| SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, last], 1));
        assert_eq!(alternate(vec![six(1), six(2), four(1), six(3)]), [six(1), four(1), six(2), six(3)]);
        assert_eq!(alternate(vec![four(1), six(1), six(2)]), [four(1), six(1), six(2)]);
        assert_eq!(alternate((0..200).map(four).collect()).len(), ADDRESS_LIMIT);
    }
}
