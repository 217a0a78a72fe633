//! Body that is delivered to the client.

use std::pin::Pin;
use std::task::{Context, Poll};

use braid_model::ByteCount;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::mpsc;

use super::{Command, Share};

/// Step in which the client's progress is reported, in bytes.
const STEP: u64 = 64 * 1024;

/// Error that ends a download after part of it was delivered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the download cannot continue: {0}")]
pub struct SpliceError(pub(crate) String);

/// A download's bytes in order, from any link. Dropping it early stops the download.
pub struct Spliced {
    number: u64,
    size: u64,
    out: u64,
    reported: u64,
    pieces: mpsc::UnboundedReceiver<Result<bytes::Bytes, SpliceError>>,
    commands: mpsc::UnboundedSender<Command>,
    _memory: Share,
}

impl Spliced {
    pub(super) fn new(
        number: u64,
        size: ByteCount,
        pieces: mpsc::UnboundedReceiver<Result<bytes::Bytes, SpliceError>>,
        commands: mpsc::UnboundedSender<Command>,
        memory: Share,
    ) -> Self {
        Self { number, size: size.get(), out: 0, reported: 0, pieces, commands, _memory: memory }
    }
}

impl Drop for Spliced {
    fn drop(&mut self) {
        // Fails only if the run has ended.
        let _ = self.commands.send(Command::Gone { number: self.number });
    }
}

impl Body for Spliced {
    type Data = bytes::Bytes;
    type Error = SpliceError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<bytes::Bytes>, SpliceError>>> {
        if self.out >= self.size {
            return Poll::Ready(None);
        }
        match std::task::ready!(self.pieces.poll_recv(context)) {
            Some(Ok(piece)) => {
                self.out += piece.len() as u64;
                if self.out - self.reported >= STEP || self.pieces.is_empty() {
                    self.reported = self.out;
                    let _ = self.commands.send(Command::Taken { number: self.number, upto: ByteCount::new(self.out) });
                }
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            None => Poll::Ready(Some(Err(SpliceError("the download task has ended".to_owned())))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.out >= self.size
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.size.saturating_sub(self.out))
    }
}
