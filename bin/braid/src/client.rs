//! Client of the daemon's API: HTTP on its Unix socket.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use braid_api::{List, Listed, Problem, Versioned};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, header};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::net::unix::UCred;

/// Slightly longer than the daemon's own timeout for requests to its core.
const TIMEOUT: Duration = Duration::from_secs(8);

/// Reasons why a request to the daemon failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    #[error("the Braid daemon is not running, or does not answer on {0}: {START}, or name its socket with --socket or BRAID_SOCKET")]
    NotRunning(PathBuf),
    #[error("this user may not connect to {0}: run the command with sudo")]
    NotAllowed(PathBuf),
    #[error("cannot connect to {path}: {error}; name the daemon's socket with --socket or BRAID_SOCKET")]
    Connect { path: PathBuf, error: io::Error },
    #[error("{0}")]
    Problem(Problem),
    #[error("the daemon on {0} does not answer: check its log, and restart it if this persists (traffic continues without it)")]
    Silent(PathBuf),
    #[error("{path} does not answer like a Braid daemon of this version ({reason}): restart the daemon after an upgrade")]
    InvalidResponse { path: PathBuf, reason: String },
}

impl ClientError {
    /// Whether the error means that no daemon runs.
    pub(crate) fn is_not_running(&self) -> bool {
        matches!(self, Self::NotRunning(_))
    }
}

/// Remedy for a daemon that is not running.
pub(crate) const START: &str = "start it with `sudo braid up`";

/// Reads `path` of the API.
pub(crate) fn read<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, ClientError> {
    Ok(exchange(socket, Method::GET, path, Bytes::new(), TIMEOUT)?.0)
}

/// Reads `path` of the API within `timeout`. Also returns the credentials of the answering process, as the kernel reports them.
pub(crate) fn read_from<T: DeserializeOwned>(socket: &Path, path: &str, timeout: Duration) -> Result<(T, UCred), ClientError> {
    exchange(socket, Method::GET, path, Bytes::new(), timeout)
}

/// Returns the credentials of the process that listens on the daemon's socket, as the kernel reports them.
pub(crate) fn listener(socket: &Path) -> Result<UCred, ClientError> {
    runtime(socket)?.block_on(async {
        let stream = connect(socket).await?;
        stream.peer_cred().map_err(|error| ClientError::Connect { path: socket.into(), error })
    })
}

/// Reads a list of the API.
pub(crate) fn list<T: Listed + DeserializeOwned>(socket: &Path, path: &str) -> Result<Vec<T>, ClientError> {
    read::<List<T>>(socket, path).map(|list| list.items)
}

/// Sends `body` to `path` of the API.
pub(crate) fn send<T: DeserializeOwned>(socket: &Path, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
    let body = serde_json::to_vec(body).map_err(|error| ClientError::InvalidResponse { path: socket.into(), reason: error.to_string() })?;
    Ok(exchange(socket, Method::POST, path, body.into(), TIMEOUT)?.0)
}

fn exchange<T: DeserializeOwned>(
    socket: &Path,
    method: Method,
    path: &str,
    body: Bytes,
    timeout: Duration,
) -> Result<(T, UCred), ClientError> {
    let answer = runtime(socket)?.block_on(async { tokio::time::timeout(timeout, request(socket, method, path, body)).await });
    let (server, status, body) = answer.unwrap_or_else(|_| Err(ClientError::Silent(socket.into())))?;
    let invalid = |error: serde_json::Error| ClientError::InvalidResponse { path: socket.into(), reason: error.to_string() };
    if status == 200 {
        let answer = serde_json::from_slice::<Versioned<T>>(&body).map_err(invalid)?;
        return Ok((answer.content, server));
    }
    Err(serde_json::from_slice(&body).map_or_else(invalid, ClientError::Problem))
}

fn runtime(socket: &Path) -> Result<tokio::runtime::Runtime, ClientError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| ClientError::Connect { path: socket.into(), error })
}

/// Reads the server-sent events of `path` until the stream ends or `on_event` (name, data) returns `Break`.
pub(crate) fn listen(socket: &Path, path: &str, mut on_event: impl FnMut(&str, &str) -> ControlFlow<()>) -> Result<(), ClientError> {
    let runtime = runtime(socket)?;
    let invalid = |error: &dyn std::fmt::Display| ClientError::InvalidResponse { path: socket.into(), reason: error.to_string() };
    runtime.block_on(async {
        let begin = tokio::time::timeout(TIMEOUT, ask(socket, Method::GET, path, Bytes::new())).await;
        let (_, answer) = begin.unwrap_or_else(|_| Err(ClientError::Silent(socket.into())))?;
        let status = answer.status();
        let mut body = answer.into_body();
        if status != 200 {
            let body = body.collect().await.map_err(|error| invalid(&error))?.to_bytes();
            return Err(serde_json::from_slice(&body).map_or_else(|error| invalid(&error), ClientError::Problem));
        }
        let mut text = Vec::new();
        loop {
            // The daemon sends an event at least every second.
            let frame = tokio::time::timeout(TIMEOUT, body.frame()).await.map_err(|_| ClientError::Silent(socket.into()))?;
            let Some(frame) = frame else { return Ok(()) };
            text.extend_from_slice(&frame.map_err(|error| invalid(&error))?.into_data().unwrap_or_default());
            if messages(&mut text, &mut on_event).is_break() {
                return Ok(());
            }
        }
    })
}

/// Parses the complete messages in `text` and removes them.
fn messages(text: &mut Vec<u8>, on_event: &mut impl FnMut(&str, &str) -> ControlFlow<()>) -> ControlFlow<()> {
    let mut begin = 0;
    while let Some(length) = text[begin..].windows(2).position(|two| two == b"\n\n") {
        let message = String::from_utf8_lossy(&text[begin..begin + length]);
        let field = |name: &str| message.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        on_event(field("event: "), field("data: "))?;
        begin += length + 2;
    }
    text.drain(..begin);
    ControlFlow::Continue(())
}

async fn request(socket: &Path, method: Method, path: &str, body: Bytes) -> Result<(UCred, u16, Bytes), ClientError> {
    let (server, answer) = ask(socket, method, path, body).await?;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await;
    let body = body.map_err(|error| ClientError::InvalidResponse { path: socket.into(), reason: error.to_string() })?;
    Ok((server, status, body.to_bytes()))
}

async fn ask(socket: &Path, method: Method, path: &str, body: Bytes) -> Result<(UCred, Response<Incoming>), ClientError> {
    let invalid = |error: &dyn std::fmt::Display| ClientError::InvalidResponse { path: socket.into(), reason: error.to_string() };
    let stream = connect(socket).await?;
    let server = stream.peer_cred().map_err(|error| ClientError::Connect { path: socket.into(), error })?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| invalid(&error))?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "braid")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .map_err(|error| invalid(&error))?;
    Ok((server, sender.send_request(request).await.map_err(|error| invalid(&error))?))
}

async fn connect(socket: &Path) -> Result<UnixStream, ClientError> {
    UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NotRunning(socket.into()),
        io::ErrorKind::PermissionDenied => ClientError::NotAllowed(socket.into()),
        _ => ClientError::Connect { path: socket.into(), error },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_daemon_is_reported_with_the_remedy() {
        let said = ClientError::NotRunning("/run/x".into()).to_string();
        assert!(said.starts_with("the Braid daemon is not running, or does not answer on /run/x: start it with `sudo braid up`"), "{said}");
    }

    #[test]
    fn messages_are_parsed_wherever_the_stream_is_split() {
        let stream = "event: note\nid: 7\ndata: {\"a\":1}\n\nevent: status\ndata: ü\n\nevent: sample\ndata: x";
        for cut in 0..stream.len() {
            let (mut text, mut received) = (Vec::new(), Vec::new());
            for part in [&stream.as_bytes()[..cut], &stream.as_bytes()[cut..]] {
                text.extend_from_slice(part);
                let mut on_event = |name: &str, data: &str| {
                    received.push(format!("{name} {data}"));
                    ControlFlow::Continue(())
                };
                assert!(messages(&mut text, &mut on_event).is_continue());
            }
            assert_eq!(received, ["note {\"a\":1}", "status ü"]);
            assert_eq!(text, b"event: sample\ndata: x");
        }
    }
}
