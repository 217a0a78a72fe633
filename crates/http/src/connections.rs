//! Client connections with limits on their number and with timeouts.
//!
//! Each connection takes a descriptor, and the daemon needs descriptors for probes and for the kernel's tables.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use braid_peer::quota::{Ended, Quota};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

use super::access::ApiClient;
use crate::access::{ApiPermit, Origin};

/// Maximum number of connections; further ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 256;
/// Maximum number of connections of all read-only clients, so that they cannot exclude others; and of one user among them.
const MAX_READERS: usize = 192;
const MAX_PER_READER: usize = 32;
/// A connection without traffic for this long is closed. Longer than any answer takes, and shorter than clients wait.
const IDLE_TIMEOUT: Duration = Duration::from_secs(6);
/// Time limit from the first byte of a request to the first byte of its answer. It ends clients that send single bytes slowly.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);

/// Timeouts of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    idle: Duration,
    request: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { idle: IDLE_TIMEOUT, request: REQUEST_TIMEOUT }
    }
}

/// Accepts clients on the Unix socket.
pub(super) struct Connections {
    listener: UnixListener,
    free: Arc<Semaphore>,
    readers: Quota<Origin>,
    timeouts: Timeouts,
    own: u32,
}

impl Connections {
    /// `own` is the daemon's user.
    pub(super) fn of(listener: UnixListener, own: u32) -> Self {
        let readers = Quota::new(MAX_READERS, MAX_PER_READER);
        Self { listener, free: Semaphore::new(MAX_CONNECTIONS).into(), readers, timeouts: Timeouts::default(), own }
    }
}

impl Listener for Connections {
    type Io = Connection<UnixStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection<UnixStream>, SocketAddr) {
        loop {
            // The semaphore is never closed.
            let free = self.free.clone().acquire_owned().await.ok();
            let (stream, address) = Listener::accept(&mut self.listener).await;
            let client = ApiClient::of(&stream, self.own);
            let mut connection = Connection::of(stream, client.clone(), self.timeouts);
            connection._free = free;
            if !client.may_change() {
                // A connection over the limit is closed at once.
                let Some((permit, ended)) = self.readers.take(client.origin()) else { continue };
                connection = connection.at(permit.into(), ended);
            }
            return (connection, address);
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A client's connection.
pub(super) struct Connection<S> {
    stream: S,
    client: ApiClient,
    timeouts: Timeouts,
    silence: Pin<Box<Sleep>>,
    /// Time when a request began to arrive, while it is not answered.
    asked: Option<Instant>,
    ended: Option<Ended>,
    is_over: bool,
    _free: Option<OwnedSemaphorePermit>,
    _permit: Option<Arc<ApiPermit>>,
}

impl<S> Connection<S> {
    /// A connection with timeouts.
    pub(super) fn of(stream: S, client: ApiClient, timeouts: Timeouts) -> Self {
        let silence = Box::pin(sleep(timeouts.idle));
        Self { stream, client, timeouts, silence, asked: None, ended: None, is_over: false, _free: None, _permit: None }
    }

    /// Adds a permit; the connection ends if the permit is revoked.
    pub(super) fn at(self, permit: Arc<ApiPermit>, ended: Ended) -> Self {
        Self { ended: Some(ended), _permit: Some(permit), ..self }
    }

    /// The client at the other end.
    pub(super) fn client(&self) -> ApiClient {
        self.client.clone()
    }

    /// Returns the outcome of an I/O attempt, or an error if the permit is revoked or a timeout has passed.
    fn check_timeouts<T>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        // try_recv too: tokio's cooperative scheduling may make the poll return pending.
        let is_over = |ended: &mut Ended| ended.try_recv() == Err(TryRecvError::Closed) || Pin::new(ended).poll(context).is_ready();
        if self.ended.as_mut().is_some_and(is_over) {
            (self.ended, self.is_over) = (None, true);
        }
        if self.is_over {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if self.asked.is_some_and(|asked| asked.elapsed() >= self.timeouts.request) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        if outcome.is_ready() {
            let end = Instant::now() + self.timeouts.idle;
            self.silence.as_mut().reset(end);
            return outcome;
        }
        self.silence.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.asked.get_or_insert_with(Instant::now);
        }
        self.check_timeouts(context, outcome)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        if matches!(outcome, Poll::Ready(Ok(written)) if written > 0) {
            self.asked = None;
        }
        self.check_timeouts(context, outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_platform::linux::sys::process::own_user;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn regression_silent_clients_free_their_descriptors_and_exclude_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut connections = Connections::of(UnixListener::bind(&path).unwrap(), own_user());
        connections.timeouts.idle = Duration::from_millis(50);
        let mut clients = Vec::new();
        for _ in 0..MAX_CONNECTIONS + 1 {
            clients.push(UnixStream::connect(&path).await.unwrap());
        }
        let mut accepted = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            accepted.push(connections.accept().await.0);
        }
        let full = tokio::time::timeout(Duration::from_millis(20), connections.accept()).await;
        assert!(full.is_err(), "a connection over the limit was accepted");
        let silent = accepted[0].read(&mut [0]).await.unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        accepted.swap_remove(0);
        let (mut last, _) = connections.accept().await;
        clients[MAX_CONNECTIONS].write_all(b"x").await.unwrap();
        assert_eq!(last.read_u8().await.unwrap(), b'x');
    }

    /// Opens `count` connections as a user, and sends one byte over each.
    struct Visitor(std::process::Child);

    impl Visitor {
        fn of(user: u32, path: &std::path::Path, count: usize) -> Self {
            let script = "import socket, sys\nkept = []\nfor _ in range(int(sys.argv[2])):\n one = socket.socket(1, 1)\n one.connect(sys.argv[1])\n \
                          one.send(b'x')\n kept.append(one)\nsys.stdin.read()";
            let mut command = std::process::Command::new("python3");
            command.args(["-c", script]).arg(path).arg(count.to_string()).uid(user).gid(user);
            Self(command.stdin(std::process::Stdio::piped()).spawn().unwrap())
        }
    }

    impl Drop for Visitor {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A single read-only user could hold all permits of the read-only clients.
    #[tokio::test]
    async fn regression_a_read_only_user_excludes_nobody() {
        if own_user() != 0 {
            assert!(std::env::var_os("CI").is_none(), "users need root");
            return println!("skipped: needs root");
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = folder.path().join("socket");
        let mut connections = Connections::of(UnixListener::bind(&path).unwrap(), 0);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let _greedy = Visitor::of(65_534, &path, MAX_READERS);
        let mut served = Vec::new();
        for _ in 0..MAX_READERS {
            served.push(connections.accept().await.0);
        }
        let mut living = 0;
        for connection in &mut served {
            assert!(!connection.client().may_change());
            living += usize::from(connection.read_u8().await.is_ok());
        }
        assert_eq!(living, MAX_PER_READER);
        for (user, may_change) in [(65_533, false), (0, true)] {
            let _visitor = Visitor::of(user, &path, 1);
            let accepted = tokio::time::timeout(Duration::from_secs(60), connections.accept()).await;
            let (mut connection, _) = accepted.expect("it is accepted");
            assert_eq!(connection.client().may_change(), may_change);
            assert_eq!(connection.read_u8().await.unwrap(), b'x');
        }
    }

    /// Each byte restarted the timeout.
    #[tokio::test]
    async fn regression_a_request_that_arrives_byte_by_byte_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut connections = Connections::of(UnixListener::bind(&path).unwrap(), own_user());
        connections.timeouts = Timeouts { idle: Duration::from_secs(60), request: Duration::from_millis(50) };
        let mut client = UnixStream::connect(&path).await.unwrap();
        let (mut connection, _) = connections.accept().await;
        // A connection whose requests are answered continues.
        for _ in 0..3 {
            client.write_all(b"x").await.unwrap();
            connection.read_u8().await.unwrap();
            connection.write_all(b"y").await.unwrap();
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
        for _ in 0..5000 {
            client.write_all(b"x").await.unwrap();
            if let Err(error) = connection.read_u8().await {
                return assert_eq!(error.kind(), io::ErrorKind::TimedOut);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("the request has not timed out");
    }

    #[tokio::test]
    async fn regression_a_client_that_reads_nothing_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut connections = Connections::of(UnixListener::bind(&path).unwrap(), own_user());
        connections.timeouts.idle = Duration::from_millis(50);
        let _client = UnixStream::connect(&path).await.unwrap();
        let (mut connection, _) = connections.accept().await;
        let error = connection.write_all(&vec![0; 1 << 24]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
