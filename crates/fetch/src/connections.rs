//! State shared by all connections: commands, events, and the HTTP connection itself.

use std::sync::Arc;
use std::time::Duration;

use braid_range::{ConnectionId, Failure, Head, RequestId};
use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::{http1, http2};
use hyper::header::HeaderMap;
use tokio::sync::mpsc;
use url::Url;

use crate::answer::{Asked, Validator};
use crate::error::FetchError;
use crate::network::Network;
use crate::throttle::Throttle;
use crate::tls::Tls;

/// State shared by all connections.
pub(crate) struct Shared {
    pub(crate) network: Arc<dyn Network>,
    /// `None` if no server uses TLS.
    pub(crate) tls: Option<Tls>,
    pub(crate) throttle: Throttle,
    pub(crate) connect_timeout: Duration,
    pub(crate) events: mpsc::Sender<ConnectionEvent>,
}

/// Command to a connection.
pub(crate) enum ConnectionCommand {
    Ask { request: RequestId, asked: Box<Asked>, headers: HeaderMap },
    Stop(RequestId),
}

/// Event of a connection.
#[derive(Debug)]
pub(crate) enum ConnectionEvent {
    Connected {
        connection: ConnectionId,
        depth: usize,
    },
    Lost {
        connection: ConnectionId,
        error: FetchError,
    },
    Head {
        request: RequestId,
        head: Head,
        validator: Option<Validator>,
    },
    Data {
        request: RequestId,
        bytes: Bytes,
    },
    End {
        request: RequestId,
    },
    Redirect {
        request: RequestId,
        from: Url,
        to: Url,
    },
    /// Cookies that a response from `url` sets. This event precedes all others of the response.
    Cookies {
        url: Url,
        lines: Vec<String>,
    },
    Failed {
        request: RequestId,
        failure: Failure,
        error: FetchError,
    },
}

/// An open HTTP connection.
pub(crate) enum HttpConnection {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
}
