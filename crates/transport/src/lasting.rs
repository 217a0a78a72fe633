//! Long-lived connections: detects a far end that is gone, and ends a connection that is idle for very long.

use std::io;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Idle timeout: a connection without data for this long is reset, even if both ends are alive. Programs do not keep a connection idle for longer if
/// they want to use it again, and it is far longer than the two hours that NATs must keep a mapping (RFC 5382, section 5).
pub(crate) const IDLE_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// TCP keepalive: after 15 min of silence the system probes the far end for another 15 min. This outlasts most link failures and rarely wakes a radio.
const KEEPALIVE_TIME: Duration = Duration::from_secs(15 * 60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(75);
const KEEPALIVE_PROBES: u32 = 12;

/// Enables TCP keepalive, so that the system ends the connection with an error if its far end is gone.
pub fn keep_alive(stream: &TcpStream) {
    let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_TIME).with_interval(KEEPALIVE_INTERVAL).with_retries(KEEPALIVE_PROBES);
    let _ = SockRef::from(stream).set_tcp_keepalive(&keepalive);
}

/// Copies both ways between a socket and `onward` until both directions have ended.
///
/// # Errors
/// The first error of either side; `TimedOut` after a day without data.
pub async fn copy_both(stream: &mut TcpStream, onward: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    copy_within(stream, onward, IDLE_TIMEOUT).await
}

pub(crate) async fn copy_within(
    stream: &mut TcpStream,
    onward: &mut (impl AsyncRead + AsyncWrite + Unpin),
    idle: Duration,
) -> io::Result<()> {
    keep_alive(stream);
    let idle_timer = IdleTimer::default();
    let mut watched = Watched { stream, idle_timer: &idle_timer };
    tokio::select! {
        copied = copy_bidirectional(&mut watched, onward) => copied.map(drop),
        () = idle_timer.expired(idle) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Measures how long no data was transferred.
#[derive(Debug)]
pub(crate) struct IdleTimer(Mutex<Instant>);

impl Default for IdleTimer {
    fn default() -> Self {
        Self(Mutex::new(Instant::now()))
    }
}

impl IdleTimer {
    /// Records a transfer.
    pub(crate) fn reset(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Waits until there was no transfer for `limit`.
    pub(crate) async fn expired(&self, limit: Duration) {
        loop {
            let since = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if since.elapsed() >= limit {
                return;
            }
            tokio::time::sleep_until(since + limit).await;
        }
    }
}

/// A socket that records its transfers.
struct Watched<'a> {
    stream: &'a mut TcpStream,
    idle_timer: &'a IdleTimer,
}

impl AsyncRead for Watched<'_> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut *self.stream).poll_read(context, buffer);
        if polled.is_ready() {
            self.idle_timer.reset();
        }
        polled
    }
}

impl AsyncWrite for Watched<'_> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut *self.stream).poll_write(context, data);
        if polled.is_ready() {
            self.idle_timer.reset();
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_transfer_resets_the_idle_timer() {
        let (idle_timer, limit) = (IdleTimer::default(), Duration::from_secs(3600));
        let hour_ago = Instant::now().checked_sub(limit).unwrap();
        *idle_timer.0.lock().unwrap() = hour_ago;
        idle_timer.expired(limit).await;
        idle_timer.reset();
        let mut later = Box::pin(idle_timer.expired(limit));
        assert!(std::future::poll_fn(|context| Poll::Ready(later.as_mut().poll(context).is_pending())).await);
    }
}
