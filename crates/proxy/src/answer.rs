//! The proxy's own answers.

use braid_peer::destination::{DialError, Reason};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// Size of a connection's read buffer and of its write buffer, in bytes, and therefore the maximum length of a message head. Up to four times
/// as much may be buffered for a client that reads slowly; the rest waits at the sender.
pub(crate) const BUFFER: usize = 24 * 1024;

/// A response of the proxy.
pub(crate) type ProxyResponse = Response<UnsyncBoxBody<Bytes, BodyError>>;

/// Reason why a body ends early.
pub(crate) type BodyError = Box<dyn std::error::Error + Send + Sync>;

/// The response if the target cannot be reached.
pub(crate) fn unreachable(error: &DialError) -> ProxyResponse {
    let status = match error.reason {
        Reason::TimedOut => StatusCode::GATEWAY_TIMEOUT,
        Reason::Forbidden(_) => StatusCode::FORBIDDEN,
        Reason::Exhausted => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::BAD_GATEWAY,
    };
    plain(status, &error.to_string())
}

/// A response with one line of text.
pub(crate) fn plain(status: StatusCode, text: &str) -> ProxyResponse {
    let mut answer = Response::new(whole(format!("braid proxy: {text}\n")));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    answer
}

pub(crate) fn whole(bytes: impl Into<Bytes>) -> UnsyncBoxBody<Bytes, BodyError> {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}
