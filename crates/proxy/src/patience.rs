//! A request's body that waits until the server wants it (`Expect: 100-continue`).

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// A server that does not know the header says nothing (RFC 9110, section 10.1.1, asks not to wait for ever).
const PATIENCE: Duration = Duration::from_secs(1);

/// The body, read only once the server has said "100 Continue", or nothing for a while. Reading it is what makes the client send it.
pub(crate) struct Patient {
    body: Incoming,
    wanted: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Patient {
    /// One that need not wait.
    pub(crate) fn ready(body: Incoming) -> Self {
        Self { body, wanted: None }
    }

    /// One that waits until something is sent.
    pub(crate) fn waiting(body: Incoming, wanted: oneshot::Receiver<()>) -> Self {
        let wanted = async { drop(timeout(PATIENCE, wanted).await) };
        Self { body, wanted: Some(Box::pin(wanted)) }
    }
}

impl Body for Patient {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(wanted) = &mut self.wanted {
            std::task::ready!(wanted.as_mut().poll(context));
            self.wanted = None;
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
