//! A request body that waits until the server requests it (`Expect: 100-continue`).

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// A server that does not support the header sends nothing (RFC 9110, section 10.1.1, requires not to wait forever).
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// A body that is read only after "100 Continue" from the server, or after a timeout. Reading it makes the client send it.
pub(crate) struct DeferredBody {
    body: Incoming,
    wanted: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl DeferredBody {
    /// A body that does not wait.
    pub(crate) fn ready(body: Incoming) -> Self {
        Self { body, wanted: None }
    }

    /// A body that waits until `wanted` receives a message.
    pub(crate) fn waiting(body: Incoming, wanted: oneshot::Receiver<()>) -> Self {
        let wanted = async { drop(timeout(CONTINUE_TIMEOUT, wanted).await) };
        Self { body, wanted: Some(Box::pin(wanted)) }
    }
}

impl Body for DeferredBody {
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
