//! Measures the rates of a link with several servers at once, and several connections to each (DBAS II.C.1, OPERETTA III.B).
//!
//! The rate is that of all connections together: the link is the bottleneck, and a slow or distant server does not limit it. The bytes are bounded over
//! all connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use braid_decide::policy::MeasureServer;
use braid_model::{ByteCount, Direction, Rate, Traffic};
use braid_platform::linux::sys::socket::unacknowledged;
use futures_util::future::join_all;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf, ReadHalf};

use crate::network::BoxStream;
use crate::socket::connect;
use crate::tls::Tls;

/// Maximum duration of the transfers of one direction.
const MAX_DURATION: Duration = Duration::from_secs(4);
/// Time for connecting and for the TLS handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(4);
/// Data that moves earlier is ignored, because the connections are still in slow start.
const WARM_UP: Duration = Duration::from_millis(700);
/// Least time of the steady part.
const STEADY: Duration = Duration::from_millis(500);
/// Maximum number of connections at once.
const MAX_CONNECTIONS: usize = 32;
/// Size of one read or write.
const BLOCK: usize = 64 * 1024;
/// Maximum size of the head of an answer.
const MAX_HEAD: usize = 16 * 1024;
/// What servers may send beyond the budget, for handshakes, heads and the framing of TLS.
const MARGIN: u64 = 1024 * 1024;
/// Interval in which acknowledged bytes are read.
const SAMPLE: Duration = Duration::from_millis(20);

/// A measurement of one link.
#[derive(Debug, Clone)]
pub struct MeasurePlan {
    /// Device of the link.
    pub device: String,
    /// The servers.
    pub servers: Vec<MeasureServer>,
    /// Connections to each server, as far as there are at most 32 of all.
    pub connections: usize,
    /// Whether to measure the rate towards this machine.
    pub down: bool,
    /// Whether to measure the rate away from this machine.
    pub up: bool,
    /// Maximum number of bytes of content, in both directions together. What servers send beyond it, such as padding of TLS, is at most 1 MiB per direction.
    pub budget: ByteCount,
    /// File with root certificates; `None`: those of the system.
    pub certificates: Option<PathBuf>,
}

/// Result of a measurement.
#[derive(Debug, Default)]
pub struct LinkRates {
    /// Rate towards this machine; `None`: not measured.
    pub down: Option<Rate>,
    /// Rate away from this machine; `None`: not measured.
    pub up: Option<Rate>,
    /// Bytes moved.
    pub moved: Traffic,
    /// Number of servers with which a transfer worked.
    pub servers: usize,
    /// The servers with which one did not work, once each.
    pub failures: Vec<MeasureError>,
}

/// Why a transfer with a server failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot measure {device} with {url} at {address}: {source}")]
pub struct MeasureError {
    device: String,
    url: String,
    address: SocketAddr,
    source: io::Error,
}

/// Makes a measurement: first downloads, then uploads, each for at most four seconds.
///
/// Must run inside a tokio runtime with I/O and time enabled, on a thread in the intended network namespace.
pub async fn measure(plan: &MeasurePlan) -> LinkRates {
    let mut rates = LinkRates::default();
    let mut good = vec![false; plan.servers.len()];
    let directions = [(Direction::Down, plan.down), (Direction::Up, plan.up)].into_iter().filter(|(_, wanted)| *wanted);
    let directions: Vec<_> = directions.map(|(direction, _)| direction).collect();
    let tls = plan.servers.iter().any(|server| server.tls).then(|| Tls::new(plan.certificates.as_deref(), true));
    let tls = tls.map(|tls| tls.map_err(|error| error.to_string()));
    for direction in &directions {
        let run = Run::new(ByteCount::new(plan.budget.get() / directions.len() as u64));
        let servers = plan.servers.iter().enumerate().filter(|(_, server)| *direction == Direction::Down || server.upload.is_some());
        let servers: Vec<_> = servers.collect();
        let each = plan.connections.clamp(1, (MAX_CONNECTIONS / servers.len().max(1)).max(1));
        let share = run.budget.load(Ordering::Relaxed) / (each * servers.len()).max(1) as u64;
        let transfers = servers.iter().flat_map(|(place, server)| {
            let (run, tls) = (&run, &tls);
            (0..each).map(move |_| async move { (*place, transfer(plan, server, tls, *direction, share, run).await) })
        });
        let mut failed: Vec<Option<io::Error>> = plan.servers.iter().map(|_| None).collect();
        for (place, done) in join_all(transfers).await {
            match done {
                Ok(()) => good[place] = true,
                Err(error) => failed[place] = Some(error),
            }
        }
        for (server, source) in plan.servers.iter().zip(failed).filter_map(|(server, error)| Some((server, error?))) {
            let (scheme, path) = (if server.tls { "https" } else { "http" }, path_of(server, *direction));
            let url = format!("{scheme}://{}{path}", server.page.host);
            rates.failures.push(MeasureError { device: plan.device.clone(), url, address: server.page.address, source });
        }
        let tally = run.tally.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        rates.moved.rx += ByteCount::new(run.received.load(Ordering::Relaxed));
        match direction {
            Direction::Down => rates.down = tally.rate(),
            Direction::Up => (rates.up, rates.moved.tx) = (tally.rate(), ByteCount::new(tally.total)),
        }
    }
    rates.servers = good.iter().filter(|good| **good).count();
    rates
}

fn path_of(server: &MeasureServer, direction: Direction) -> &str {
    match direction {
        Direction::Down => &server.page.path,
        Direction::Up => server.upload.as_deref().unwrap_or("/"),
    }
}

/// What the connections of one direction share.
struct Run {
    start: Instant,
    /// Bytes that may still move.
    budget: AtomicU64,
    /// Bytes that the connections received, with the framing of TLS, and their limit.
    received: Arc<AtomicU64>,
    limit: u64,
    tally: Mutex<Tally>,
}

impl Run {
    fn new(budget: ByteCount) -> Self {
        Self {
            start: Instant::now(),
            budget: AtomicU64::new(budget.get()),
            received: Arc::default(),
            limit: budget.get().saturating_add(MARGIN),
            tally: Mutex::default(),
        }
    }

    /// Takes up to one block from the budget.
    fn take(&self) -> usize {
        let taken = self.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left - left.min(BLOCK as u64)));
        taken.map_or(0, |before| before.min(BLOCK as u64) as usize)
    }

    fn give_back(&self, count: usize) {
        self.budget.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn add(&self, count: u64) {
        self.tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(self.start.elapsed(), count);
    }

    /// A connection has nothing more to move, so the rate falls from now on.
    fn ended(&self) {
        let at = self.start.elapsed();
        self.tally.lock().unwrap_or_else(std::sync::PoisonError::into_inner).full_until.get_or_insert(at);
    }

    /// Time left for transfers; `None` after the end.
    fn left(&self) -> Option<Duration> {
        (CONNECT_TIMEOUT.min(WARM_UP) + MAX_DURATION).checked_sub(self.start.elapsed()).filter(|left| !left.is_zero())
    }
}

/// One connection: opens it, and moves data until the time or the bytes are used up.
async fn transfer(
    plan: &MeasurePlan,
    server: &MeasureServer,
    tls: &Option<Result<Tls, String>>,
    direction: Direction,
    share: u64,
    run: &Run,
) -> io::Result<()> {
    let opening = tokio::time::timeout(CONNECT_TIMEOUT, open(plan, server, tls, run));
    let (stream, socket) = opening.await.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))??;
    // Resets the connection at its end, so that neither side goes on to send what is not measured.
    socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO))?;
    let result = match direction {
        Direction::Down => download(stream, server, run).await,
        Direction::Up => upload(stream, &socket, server, share, run).await,
    };
    run.ended();
    result
}

async fn open(
    plan: &MeasurePlan,
    server: &MeasureServer,
    tls: &Option<Result<Tls, String>>,
    run: &Run,
) -> io::Result<(BoxStream, OwnedFd)> {
    let stream = connect(&plan.device, server.page.address).await?;
    let socket = stream.as_fd().try_clone_to_owned()?;
    let stream: BoxStream = Box::new(Counted { stream, received: run.received.clone(), limit: run.limit });
    let Some(tls) = tls.as_ref().filter(|_| server.tls) else { return Ok((stream, socket)) };
    let tls = tls.as_ref().map_err(|reason| io::Error::other(reason.clone()))?;
    let (stream, _) = tls.wrap(&server.page.host, stream).await.map_err(io::Error::other)?;
    Ok((stream, socket))
}

/// A connection that counts what it receives, and fails when all connections of the run have received more than `limit` bytes: content is limited where it is
/// read, but TLS has records without content.
struct Counted<S> {
    stream: S,
    received: Arc<AtomicU64>,
    limit: u64,
}

impl<S: AsyncRead + Unpin> AsyncRead for Counted<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = std::task::ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        let count = (buffer.filled().len() - before) as u64;
        if self.received.fetch_add(count, Ordering::Relaxed) + count > self.limit {
            return Poll::Ready(Err(io::Error::other("the servers send more than the measurement may receive")));
        }
        Poll::Ready(result)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Counted<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

fn head(method: &str, path: &str, server: &MeasureServer, more: &str) -> String {
    let agent = concat!("braid/", env!("CARGO_PKG_VERSION"));
    let host = &server.page.host;
    format!(
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: {agent}\r\nAccept: */*\r\nCache-Control: no-cache\r\nConnection: close\r\n{more}\r\n"
    )
}

async fn download(mut stream: BoxStream, server: &MeasureServer, run: &Run) -> io::Result<()> {
    stream.write_all(head("GET", &server.page.path, server, "").as_bytes()).await?;
    let (mut reader, _writer) = tokio::io::split(stream);
    let Some(left) = run.left() else { return Ok(()) };
    let answer = tokio::time::timeout(left, read_head(&mut reader, run)).await;
    let (status, _) = answer.map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "no answer in time"))??;
    if status != server.page.status {
        return Err(io::Error::other(format!("the answer has status {status} instead of {}", server.page.status)));
    }
    let mut buffer = vec![0; BLOCK];
    while let Some(left) = run.left() {
        let room = run.take();
        if room == 0 {
            break;
        }
        let read = tokio::time::timeout(left, reader.read(&mut buffer[..room])).await;
        let count = match read {
            Ok(Ok(count)) => count,
            Ok(Err(error)) => return Err(error),
            Err(_) => 0,
        };
        run.give_back(room - count);
        run.add(count as u64);
        if count == 0 {
            break;
        }
    }
    Ok(())
}

/// Reads the head of an answer and returns its status. The bytes count.
async fn read_head(reader: &mut ReadHalf<BoxStream>, run: &Run) -> io::Result<(u16, Vec<u8>)> {
    let mut answer = Vec::with_capacity(1024);
    loop {
        if let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") {
            let line = String::from_utf8_lossy(&answer[..end]);
            let status =
                line.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)).and_then(|status| status.get(..3)?.parse().ok());
            return Ok((status.ok_or_else(|| io::Error::other("the answer is not HTTP/1"))?, answer));
        }
        if answer.len() >= MAX_HEAD {
            return Err(io::Error::other("the head of the answer is longer than 16 KiB"));
        }
        let mut block = [0; 1024];
        let count = reader.read(&mut block).await?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server closed the connection without an answer"));
        }
        answer.extend_from_slice(&block[..count]);
        run.budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| Some(left.saturating_sub(count as u64))).ok();
        run.add(count as u64);
    }
}

/// Sends data that does not compress. What the other end has acknowledged counts, not what the socket's buffer took.
async fn upload(stream: BoxStream, socket: &OwnedFd, server: &MeasureServer, share: u64, run: &Run) -> io::Result<()> {
    let path = server.upload.as_deref().unwrap_or("/");
    let (mut reader, mut writer) = tokio::io::split(stream);
    let length = format!("Content-Type: application/octet-stream\r\nContent-Length: {share}\r\n");
    writer.write_all(head("POST", path, server, &length).as_bytes()).await?;
    let (written, counted) = (AtomicU64::new(0), AtomicU64::new(0));
    let count_acknowledged = || -> io::Result<bool> {
        let written = written.load(Ordering::Relaxed);
        let waiting = unacknowledged(socket.as_fd())?;
        let acknowledged = written.saturating_sub(waiting);
        run.add(acknowledged.saturating_sub(counted.fetch_max(acknowledged, Ordering::Relaxed)));
        Ok(waiting == 0)
    };
    let send = async {
        let block = noise();
        let mut left = share;
        while left > 0 && run.left().is_some() {
            let room = run.take();
            let size = (room as u64).min(left) as usize;
            run.give_back(room - size);
            if size == 0 {
                break;
            }
            writer.write_all(&block[..size]).await?;
            left -= size as u64;
            written.fetch_add(size as u64, Ordering::Relaxed);
        }
        writer.flush().await?;
        run.ended();
        std::future::pending::<io::Result<()>>().await
    };
    let sample = async {
        let mut ticks = tokio::time::interval(SAMPLE);
        while run.left().is_some() {
            ticks.tick().await;
            if count_acknowledged()? && written.load(Ordering::Relaxed) >= share {
                // The server may refuse what it has received.
                break;
            }
        }
        Ok::<_, io::Error>(())
    };
    let no_bytes = Run::new(ByteCount::ZERO);
    let answered = tokio::select! {
        answered = read_head(&mut reader, &no_bytes) => Some(answered),
        sent = send => return sent,
        sampled = sample => {
            sampled?;
            tokio::time::timeout(Duration::from_millis(500), read_head(&mut reader, &no_bytes)).await.ok()
        }
    };
    let _ = count_acknowledged();
    match answered {
        Some(Ok((200..=299, _))) | None => Ok(()),
        Some(Ok((status, _))) => Err(io::Error::other(format!("the server refused the upload with status {status}"))),
        // Some servers close the connection instead of an answer.
        Some(Err(error)) if counted.load(Ordering::Relaxed) == 0 => Err(error),
        Some(Err(_)) => Ok(()),
    }
}

/// A block that links do not compress.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = (0..BLOCK / 8).flat_map(|_| {
        // Xorshift (Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

/// Bytes moved by all connections, with their times.
#[derive(Debug, Default)]
struct Tally {
    total: u64,
    first: Option<Duration>,
    /// Time and total at the end of the warm-up.
    warm: Option<(Duration, u64)>,
    /// Time and total of the last bytes while every connection had data.
    last: (Duration, u64),
    /// When the first connection had no more data.
    full_until: Option<Duration>,
}

impl Tally {
    fn add(&mut self, at: Duration, count: u64) {
        if count == 0 {
            return;
        }
        let first = *self.first.get_or_insert(at);
        self.total += count;
        if at.saturating_sub(first) >= WARM_UP && self.warm.is_none() {
            self.warm = Some((at, self.total));
        }
        let steady = self.warm.is_some_and(|(from, _)| self.last.0.saturating_sub(from) >= STEADY);
        // After a connection has ended, the others may not fill the link. What came before is enough, if there is enough of it.
        if !(self.full_until.is_some() && steady) {
            self.last = (at, self.total);
        }
    }

    fn rate(&self) -> Option<Rate> {
        if let Some((from, before)) = self.warm.filter(|(from, _)| self.last.0.saturating_sub(*from) >= STEADY) {
            return Some(ByteCount::new(self.last.1 - before).per(self.last.0 - from));
        }
        let span = self.last.0.saturating_sub(self.first?);
        // Less data than this reflects the first burst rather than the link.
        (self.total >= 100_000 && span >= Duration::from_millis(20)).then(|| ByteCount::new(self.last.1).per(span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_decide::policy::HttpTarget;

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn the_warm_up_does_not_count() {
        let mut tally = Tally::default();
        tally.add(ms(1100), 1000);
        for step in 0..20 {
            tally.add(ms(1800 + step * 100), 100_000);
        }
        assert_eq!(tally.rate(), Some(Rate::from_mbps(8)));
    }

    #[test]
    fn the_time_after_the_end_of_a_connection_does_not_count() {
        let mut tally = Tally::default();
        for step in 0..20 {
            tally.add(ms(step * 100), 100_000);
        }
        tally.full_until = Some(ms(1900));
        for step in 20..40 {
            tally.add(ms(step * 100), 10_000);
        }
        assert_eq!((tally.rate(), tally.total), (Some(Rate::from_mbps(8)), 2_200_000));
    }

    #[test]
    fn a_few_bytes_give_no_rate() {
        let mut tally = Tally::default();
        tally.add(ms(10), 500);
        tally.add(ms(11), 500);
        assert_eq!(tally.rate(), None);
    }

    #[test]
    fn the_budget_is_shared_and_never_exceeded() {
        let run = Run::new(ByteCount::new(BLOCK as u64 + 10));
        assert_eq!([run.take(), run.take(), run.take()], [BLOCK, 10, 0]);
        run.give_back(7);
        assert_eq!(run.take(), 7);
    }

    fn plan(address: SocketAddr) -> MeasurePlan {
        let page = HttpTarget { address, host: "example".into(), path: "/big".into(), status: 200, body: String::new() };
        let server = MeasureServer { page, tls: false, upload: Some("/up".to_owned()) };
        MeasurePlan {
            device: "lo".to_owned(),
            servers: vec![server],
            connections: 2,
            down: true,
            up: true,
            budget: ByteCount::new(2_000_000),
            certificates: None,
        }
    }

    #[tokio::test]
    async fn an_unreachable_server_is_named_in_the_error() {
        let rates = measure(&plan("127.0.0.1:9".parse().unwrap())).await;
        let errors: Vec<_> = rates.failures.iter().map(ToString::to_string).collect();
        assert!(errors[0].contains("lo with http://example/big at 127.0.0.1:9"), "{errors:?}");
        assert_eq!((errors.len(), rates.servers, rates.down, rates.moved), (2, 0, None, Traffic::default()));
    }

    #[tokio::test]
    async fn both_directions_stay_within_the_bytes_and_a_wrong_status_gives_no_rate() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut request = vec![0; 4096];
                    let count = stream.read(&mut request).await.unwrap_or(0);
                    let upload = request[..count].starts_with(b"POST");
                    let _ = match upload {
                        true => tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.map(drop),
                        false => {
                            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                            loop {
                                if let Err(error) = stream.write_all(&[0; 65536]).await {
                                    break Err(error);
                                }
                            }
                        }
                    };
                });
            }
        });
        let rates = measure(&plan(address)).await;
        assert!(rates.failures.is_empty() && rates.servers == 1, "{rates:?}");
        assert!(rates.moved.rx <= ByteCount::new(1_000_000 + 2048) && rates.moved.rx >= ByteCount::new(900_000), "{:?}", rates.moved);
        assert!(rates.moved.tx <= ByteCount::new(1_000_000) && rates.moved.tx >= ByteCount::new(900_000), "{:?}", rates.moved);
        let mut other = plan(address);
        (other.up, other.servers[0].page.status) = (false, 204);
        let rates = measure(&other).await;
        assert_eq!((rates.servers, rates.down), (0, None));
        assert!(rates.failures[0].to_string().contains("status 200 instead of 204"), "{:?}", rates.failures);
    }

    #[test]
    fn bytes_without_content_are_limited_over_all_connections() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let received = Arc::new(AtomicU64::new(0));
            let mut ends: Vec<_> = (0..2).map(|_| tokio::io::duplex(1000)).collect();
            let mut read = Vec::new();
            for (near, mut far) in ends.drain(..) {
                far.write_all(&[0; 600]).await.unwrap();
                let mut counted = Counted { stream: near, received: received.clone(), limit: 1000 };
                read.push(counted.read(&mut [0; 1000]).await.map_err(|error| error.to_string()));
            }
            let refused = Err("the servers send more than the measurement may receive".to_owned());
            assert_eq!((read, received.load(Ordering::Relaxed)), (vec![Ok(600), refused], 1200));
        });
    }
}
