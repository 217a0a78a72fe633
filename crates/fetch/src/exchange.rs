//! One request and its response.

use std::error::Error as _;
use std::sync::Arc;
use std::time::Duration;

use braid_range::{Failure, Head, RequestId};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderMap};
use hyper::{Method, Request, Response, Uri, Version};
use tokio::sync::oneshot;

use crate::answer::{Asked, ResponseAction, evaluate};
use crate::connections::{ConnectionEvent, HttpConnection, Shared};
use crate::error::FetchError;

/// An unwanted rest of a response up to this size is read and discarded; for a longer rest, the connection is closed.
const MAX_DISCARD: u64 = 32 * 1024;
/// Time limit to read the rest.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(1);

/// A request to send.
pub(crate) struct OutgoingRequest {
    pub(crate) request: RequestId,
    pub(crate) asked: Asked,
    pub(crate) headers: HeaderMap,
    /// Name of the link.
    pub(crate) link: String,
    /// The request goes to an HTTP proxy, which needs the absolute URL.
    pub(crate) through_proxy: bool,
}

/// Sends the request and reports events. Returns the connection if it can be reused: not if much of an unwanted response is still to come.
pub(crate) async fn run(
    shared: Arc<Shared>,
    connection: HttpConnection,
    outgoing: OutgoingRequest,
    mut stop: oneshot::Receiver<()>,
) -> Option<HttpConnection> {
    let request = outgoing.request;
    let (connection, answer) = match send(connection, &outgoing, &mut stop).await? {
        Ok(sent) => sent,
        Err(error) => {
            let _ = shared.events.send(ConnectionEvent::Failed { request, failure: Failure::Lost, error }).await;
            return None;
        }
    };
    let (parts, body) = answer.into_parts();
    let set = parts.headers.get_all(header::SET_COOKIE).iter();
    let lines: Vec<String> = set.filter_map(|line| Some(line.to_str().ok()?.to_owned())).collect();
    if !lines.is_empty() {
        shared.events.send(ConnectionEvent::Cookies { url: outgoing.asked.url.clone(), lines }).await.ok()?;
    }
    let event = match evaluate(&outgoing.asked, parts.status, &parts.headers) {
        ResponseAction::Body { head, validator } => ConnectionEvent::Head { request, head, validator },
        ResponseAction::Empty => {
            let head = Head { size: Some(braid_model::ByteCount::ZERO), span: None, joinable: true };
            ConnectionEvent::Head { request, head, validator: None }
        }
        ResponseAction::Redirect(to) => ConnectionEvent::Redirect { request, from: outgoing.asked.url.clone(), to },
        ResponseAction::Refused(failure, error) => ConnectionEvent::Failed { request, failure, error },
    };
    let wanted = matches!(event, ConnectionEvent::Head { .. });
    shared.events.send(event).await.ok()?;
    if !wanted {
        return drain(&connection, body).await.then_some(connection);
    }
    read(&shared, &outgoing, &connection, body, &mut stop).await.then_some(connection)
}

/// Sends the request; `None` if it is stopped meanwhile.
async fn send(
    connection: HttpConnection,
    outgoing: &OutgoingRequest,
    stop: &mut oneshot::Receiver<()>,
) -> Option<Result<(HttpConnection, Response<Incoming>), FetchError>> {
    let broken = |reason: String| FetchError::Broken { host: host(outgoing), link: outgoing.link.clone(), reason };
    let sending = async {
        match connection {
            HttpConnection::Http1(mut sender) => {
                sender.ready().await.map_err(|error| reason(&error))?;
                let answer = sender.send_request(build(outgoing, Version::HTTP_11)?).await.map_err(|error| reason(&error))?;
                Ok((HttpConnection::Http1(sender), answer))
            }
            HttpConnection::Http2(mut sender) => {
                sender.ready().await.map_err(|error| reason(&error))?;
                let answer = sender.send_request(build(outgoing, Version::HTTP_2)?).await.map_err(|error| reason(&error))?;
                Ok((HttpConnection::Http2(sender), answer))
            }
        }
    };
    tokio::select! {
        sent = sending => Some(sent.map_err(broken)),
        _ = stop => None,
    }
}

/// Builds the request: with `Host` in HTTP/1.1, and with the absolute URL for a proxy.
fn build(outgoing: &OutgoingRequest, version: Version) -> Result<Request<Empty<Bytes>>, String> {
    let url = &outgoing.asked.url;
    let mut plain = url.clone();
    // The server must not see fragments or passwords.
    plain.set_fragment(None);
    let _ = plain.set_username("");
    let _ = plain.set_password(None);
    let origin_form = version == Version::HTTP_11 && !outgoing.through_proxy;
    let target = if origin_form { plain[url::Position::BeforePath..].to_owned() } else { plain.to_string() };
    let uri: Uri = match &outgoing.asked.target {
        Some(target) => target.clone(),
        None => target.parse().map_err(|error: hyper::http::uri::InvalidUri| error.to_string())?,
    };
    let mut request = Request::builder().method(Method::GET).uri(uri).version(version);
    if version == Version::HTTP_11 && !outgoing.headers.contains_key(header::HOST) {
        request = request.header(header::HOST, &plain[url::Position::BeforeHost..url::Position::AfterPort]);
    }
    if let Some(headers) = request.headers_mut() {
        headers.extend(outgoing.headers.clone());
        if version == Version::HTTP_2 {
            headers.remove(header::HOST);
        }
        if let Some(span) = outgoing.asked.span {
            let range = format!("bytes={}-{}", span.start().get(), span.end().get().saturating_sub(1));
            headers.insert(header::RANGE, range.parse().map_err(|_| "no range")?);
            if let Some(expected) = &outgoing.asked.expected {
                headers.insert(header::IF_RANGE, expected.value().parse().map_err(|_| "no validator")?);
            }
        }
    }
    request.body(Empty::new()).map_err(|error| error.to_string())
}

/// Reads a body to its end. Returns whether the connection can be reused.
async fn read(
    shared: &Shared,
    outgoing: &OutgoingRequest,
    connection: &HttpConnection,
    mut body: Incoming,
    stop: &mut oneshot::Receiver<()>,
) -> bool {
    let request = outgoing.request;
    loop {
        let frame = tokio::select! {
            biased;
            _ = &mut *stop => return drain(connection, body).await,
            frame = body.frame() => frame,
        };
        match frame {
            Some(Ok(frame)) => {
                let Ok(bytes) = frame.into_data() else { continue };
                if bytes.is_empty() {
                    continue;
                }
                tokio::select! {
                    _ = &mut *stop => return drain(connection, body).await,
                    () = shared.throttle.pass(bytes.len()) => {}
                }
                if shared.events.send(ConnectionEvent::Data { request, bytes }).await.is_err() {
                    return false;
                }
            }
            Some(Err(error)) => {
                let error = FetchError::Broken { host: host(outgoing), link: outgoing.link.clone(), reason: reason(&error) };
                let _ = shared.events.send(ConnectionEvent::Failed { request, failure: Failure::Lost, error }).await;
                return false;
            }
            None => return shared.events.send(ConnectionEvent::End { request }).await.is_ok(),
        }
    }
}

/// Reads a short rest of an unwanted body. An HTTP/2 connection is reusable at once, without reading the rest.
async fn drain(connection: &HttpConnection, mut body: Incoming) -> bool {
    if body.size_hint().upper().is_none_or(|left| left > MAX_DISCARD) {
        return false;
    }
    if matches!(connection, HttpConnection::Http2(_)) {
        return true;
    }
    let rest = async {
        while let Some(frame) = body.frame().await {
            if frame.is_err() {
                return false;
            }
        }
        true
    };
    tokio::time::timeout(DISCARD_TIMEOUT, rest).await.unwrap_or(false)
}

fn host(outgoing: &OutgoingRequest) -> String {
    outgoing.asked.url.host_str().unwrap_or("").to_owned()
}

/// The error message with its causes.
pub(crate) fn reason(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}
