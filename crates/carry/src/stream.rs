//! A flow as a stream of bytes that is read and written like a socket.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::flow::{Flow, FlowEnd};

/// A flow that is open. Its shutdown finishes it; dropped before, it is reset. A reset shows as the error that `read` or `write` would have
/// given at the far end.
pub struct FlowStream {
    flow: Flow,
    unread: Bytes,
}

impl FlowStream {
    /// The flow, to be used by nobody else.
    pub fn new(flow: Flow) -> Self {
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

/// What the far end's socket said; what only the protocol knows is a reset.
fn error(FlowEnd(code): FlowEnd) -> io::Error {
    match i32::try_from(code) {
        Ok(errno @ 1..=4095) => io::Error::from_raw_os_error(errno),
        _ => io::ErrorKind::ConnectionReset.into(),
    }
}
