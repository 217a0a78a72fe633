//! What all connections share: commands to them, what they report, and the HTTP connection itself.

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

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) network: Arc<dyn Network>,
    /// `None`: where no server of TLS is asked.
    pub(crate) tls: Option<Tls>,
    pub(crate) throttle: Throttle,
    pub(crate) connect_timeout: Duration,
    pub(crate) events: mpsc::Sender<ConnectionEvent>,
}

/// What a connection is told.
pub(crate) enum ConnectionCommand {
    Ask { request: RequestId, asked: Box<Asked>, headers: HeaderMap },
    Stop(RequestId),
}

/// What connections tell.
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
    Elsewhere {
        request: RequestId,
        from: Url,
        to: Url,
    },
    /// What an answer from `url` sets, before what else it says.
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

/// A connection that can be asked.
pub(crate) enum HttpConnection {
    One(http1::SendRequest<Empty<Bytes>>),
    Two(http2::SendRequest<Empty<Bytes>>),
}
