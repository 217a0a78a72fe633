//! A flow as a byte stream with the interface of a socket.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::host_driver::{BondFlow, ResetCode};
use crate::lasting::keep_alive;

/// Byte stream over an open flow. Shutdown finishes the flow; dropping it before resets the flow. A reset appears as the error that `read` or `write`
/// would have returned at the far end.
pub struct FlowStream {
    flow: BondFlow,
    unread: Bytes,
}

impl FlowStream {
    /// Wraps a flow, which must have no other user.
    pub fn new(flow: BondFlow) -> Self {
        Self { flow, unread: Bytes::new() }
    }
}

impl AsyncRead for FlowStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            match ready!(self.flow.poll_read(context)) {
                Ok(Some(data)) => self.unread = data,
                Ok(None) => return Poll::Ready(Ok(())),
                Err(end) => return Poll::Ready(Err(error(end))),
            }
        }
        let part = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread[..part]);
        self.unread.advance(part);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for FlowStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        if data.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let part = match ready!(self.flow.poll_room(context)) {
            Ok(room) => room.min(data.len()),
            Err(end) => return Poll::Ready(Err(error(end))),
        };
        self.flow.write(Bytes::copy_from_slice(&data[..part]));
        Poll::Ready(Ok(part))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.flow.finish();
        Poll::Ready(Ok(()))
    }
}

/// A TCP connection that is reset if it is dropped before its shutdown, like a [`FlowStream`]: a truncated transfer must not look complete.
#[derive(Debug)]
pub struct TcpConnection {
    stream: TcpStream,
    finished: bool,
}

impl TcpConnection {
    /// Wraps a socket and enables TCP keepalive.
    pub fn new(stream: TcpStream) -> Self {
        keep_alive(&stream);
        Self { stream, finished: false }
    }
}

impl Drop for TcpConnection {
    fn drop(&mut self) {
        if !self.finished {
            let _ = SockRef::from(&self.stream).set_linger(Some(Duration::ZERO));
        }
    }
}

impl AsyncRead for TcpConnection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for TcpConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.finished = true;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The error of the far end's socket. Codes that only the protocol defines become a reset.
fn error(ResetCode(code): ResetCode) -> io::Error {
    match i32::try_from(code) {
        Ok(errno @ 1..=4095) => io::Error::from_raw_os_error(errno),
        _ => io::ErrorKind::ConnectionReset.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    #[tokio::test]
    async fn regression_a_connection_dropped_before_shutdown_is_reset() {
        for orderly in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut connection = TcpConnection::new(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
            let mut far = listener.accept().await.unwrap().0;
            connection.write_all(b"some").await.unwrap();
            far.read_exact(&mut [0; 4]).await.unwrap();
            if orderly {
                connection.shutdown().await.unwrap();
            }
            drop(connection);
            let end = far.read(&mut [0; 1]).await.map_err(|error| error.kind());
            assert_eq!(end, if orderly { Ok(0) } else { Err(io::ErrorKind::ConnectionReset) });
        }
    }
}
