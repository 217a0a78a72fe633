//! Clients' connections: a bounded number, and none that says nothing for long.
//!
//! Each takes a descriptor, and the daemon needs descriptors for probes and for the kernel's tables.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

use super::access::Client;

/// The most connections at a time; further ones wait in the kernel's queue.
const MOST: usize = 256;
/// The most of those who may not change anything, so that they keep nobody out who may.
const STRANGERS: usize = 192;
/// A connection over which nothing has come or gone for so long is closed. Longer than any answer takes, shorter than
/// clients wait.
pub(super) const IDLE: Duration = Duration::from_secs(6);

/// Accepts clients of the Unix socket.
pub(super) struct Connections {
    listener: UnixListener,
    free: Arc<Semaphore>,
    strangers: Arc<Semaphore>,
    idle: Duration,
    own: u32,
}

impl Connections {
    /// For a daemon of this user.
    pub(super) fn of(listener: UnixListener, own: u32) -> Self {
        Self { listener, free: Semaphore::new(MOST).into(), strangers: Semaphore::new(STRANGERS).into(), idle: IDLE, own }
    }
}

impl Listener for Connections {
    type Io = Connection<UnixStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection<UnixStream>, SocketAddr) {
        loop {
            // The semaphores are never closed.
            let mut places: Vec<_> = self.free.clone().acquire_owned().await.into_iter().collect();
            let (stream, address) = Listener::accept(&mut self.listener).await;
            let client = Client::of(&stream, self.own);
            if !matches!(client, Client::Local { may_change: true, .. }) {
                // One too many is let go at once.
                let Ok(place) = self.strangers.clone().try_acquire_owned() else { continue };
                places.push(place);
            }
            return (Connection::of(stream, client, self.idle, places), address);
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// One client's connection.
pub(super) struct Connection<S> {
    stream: S,
    client: Client,
    idle: Duration,
    silence: Pin<Box<Sleep>>,
    _places: Vec<OwnedSemaphorePermit>,
}

impl<S> Connection<S> {
    /// A connection that ends when nothing moves for `idle`, and gives its places back then.
    pub(super) fn of(stream: S, client: Client, idle: Duration, places: Vec<OwnedSemaphorePermit>) -> Self {
        Self { stream, client, idle, silence: Box::pin(sleep(idle)), _places: places }
    }

    /// Who is at the other end.
    pub(super) fn client(&self) -> Client {
        self.client
    }

    /// Passes on what became of an attempt, unless nothing has moved for too long.
    fn heard<T>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            let end = Instant::now() + self.idle;
            self.silence.as_mut().reset(end);
            return outcome;
        }
        self.silence.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.heard(context, outcome)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.heard(context, outcome)
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn regression_silent_clients_keep_no_descriptors_and_nobody_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut connections = Connections::of(UnixListener::bind(&path).unwrap(), own_user());
        connections.idle = Duration::from_millis(50);
        let mut clients = Vec::new();
        for _ in 0..MOST + 1 {
            clients.push(UnixStream::connect(&path).await.unwrap());
        }
        let mut accepted = Vec::new();
        for _ in 0..MOST {
            accepted.push(connections.accept().await.0);
        }
        let full = tokio::time::timeout(Duration::from_millis(20), connections.accept()).await;
        assert!(full.is_err(), "one more than may be was accepted");
        let silent = accepted[0].read(&mut [0]).await.unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        accepted.swap_remove(0);
        let (mut last, _) = connections.accept().await;
        clients[MOST].write_all(b"x").await.unwrap();
        assert_eq!(last.read_u8().await.unwrap(), b'x');
    }

    #[tokio::test]
    async fn those_who_may_only_read_keep_nobody_else_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // For a daemon of another user, this process is a stranger unless it is root's.
        let mut connections = Connections::of(UnixListener::bind(&path).unwrap(), own_user().wrapping_add(1));
        connections.strangers = Semaphore::new(1).into();
        let _clients = [UnixStream::connect(&path).await.unwrap(), UnixStream::connect(&path).await.unwrap()];
        let (first, _) = connections.accept().await;
        let second = tokio::time::timeout(Duration::from_millis(50), connections.accept()).await;
        assert_eq!(second.is_ok(), matches!(first.client(), Client::Local { may_change: true, .. }));
    }

    #[tokio::test]
    async fn regression_a_client_that_reads_nothing_is_let_go() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let mut connections = Connections::of(UnixListener::bind(&path).unwrap(), own_user());
        connections.idle = Duration::from_millis(50);
        let _client = UnixStream::connect(&path).await.unwrap();
        let (mut connection, _) = connections.accept().await;
        let error = connection.write_all(&vec![0; 1 << 24]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
