//! One connection over one link to one server. It is opened, used for requests, and reopened when the server closes it.

use std::sync::Arc;

use braid_range::{ConnectionId, RequestId};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use url::Url;

use crate::connections::{ConnectionCommand, ConnectionEvent, HttpConnection, Shared};
use crate::error::FetchError;
use crate::exchange::{self, OutgoingRequest};
use crate::proxy;

/// Concurrent requests on one HTTP/2 connection.
const DEPTH: usize = 2;
/// HTTP/2 flow-control windows of one stream and of one connection.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 2 << 20;
/// Maximum size of one read of a body.
const READ_SIZE: usize = 128 * 1024;

/// Server of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) tls: bool,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) proxy: Option<Url>,
}

/// A running exchange on a connection.
struct Work {
    request: RequestId,
    /// The exchange shares its connection with others (HTTP/2).
    overlaps: bool,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Option<HttpConnection>>,
}

impl Drop for Work {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Opens connections and runs exchanges until the command channel closes.
pub(crate) async fn run(
    shared: Arc<Shared>,
    id: ConnectionId,
    link: usize,
    origin: Origin,
    mut commands: mpsc::UnboundedReceiver<ConnectionCommand>,
) {
    let name = shared.network.links()[link].name.clone();
    let mut idle = match open(&shared, link, &origin).await {
        Ok(connection) => {
            let depth = if matches!(connection, HttpConnection::Http2(_)) { DEPTH } else { 1 };
            let _ = shared.events.send(ConnectionEvent::Connected { connection: id, depth }).await;
            Some(connection)
        }
        Err(error) => return drop(shared.events.send(ConnectionEvent::Lost { connection: id, error }).await),
    };
    let mut works: Vec<Work> = Vec::new();
    while let Some(command) = commands.recv().await {
        works.retain(|work| !(work.overlaps && work.task.is_finished()));
        match command {
            ConnectionCommand::Stop(request) => {
                let Some(place) = works.iter().position(|work| work.request == request) else { continue };
                if let Some(stop) = works[place].stop.take() {
                    let _ = stop.send(());
                }
                // Data that the server has already sent would delay all else and keep the link busy, so the connection is closed.
                if works[place].overlaps && matches!((&mut works.swap_remove(place).task).await, Ok(None)) {
                    idle = None;
                }
            }
            ConnectionCommand::Ask { request, asked, headers } => {
                let connection = match ready(&shared, link, &origin, &mut idle, &mut works).await {
                    Ok(connection) => connection,
                    Err(error) => return drop(shared.events.send(ConnectionEvent::Lost { connection: id, error }).await),
                };
                let (stop, stopped) = oneshot::channel();
                let overlaps = matches!(connection, HttpConnection::Http2(_));
                let through_proxy = !origin.tls && origin.proxy.as_ref().is_some_and(|proxy| !proxy::is_socks(proxy));
                let outgoing = OutgoingRequest { request, asked: *asked, headers, link: name.clone(), through_proxy };
                let task = tokio::spawn(exchange::run(shared.clone(), connection, outgoing, stopped));
                works.push(Work { request, overlaps, stop: Some(stop), task });
            }
        }
    }
}

/// Returns a connection for the next request: the existing one, or a new one.
async fn ready(
    shared: &Shared,
    link: usize,
    origin: &Origin,
    idle: &mut Option<HttpConnection>,
    works: &mut Vec<Work>,
) -> Result<HttpConnection, FetchError> {
    if let Some(HttpConnection::Http2(sender)) = idle
        && !sender.is_closed()
    {
        return Ok(HttpConnection::Http2(sender.clone()));
    }
    let mut kept = idle.take();
    // A finished HTTP/1.1 exchange returns its connection.
    for mut work in works.extract_if(.., |work| !work.overlaps) {
        kept = (&mut work.task).await.unwrap_or(None).or(kept);
    }
    match kept {
        Some(HttpConnection::Http1(sender)) if !sender.is_closed() => Ok(HttpConnection::Http1(sender)),
        _ => {
            let new = open(shared, link, origin).await?;
            if let HttpConnection::Http2(sender) = &new {
                *idle = Some(HttpConnection::Http2(sender.clone()));
            }
            Ok(new)
        }
    }
}

/// Opens a connection, with TLS and through the proxy if required.
async fn open(shared: &Shared, link: usize, origin: &Origin) -> Result<HttpConnection, FetchError> {
    let name = shared.network.links()[link].name.clone();
    let target = format!("{}:{}", origin.host, origin.port);
    let opened = tokio::time::timeout(shared.connect_timeout, open_untimed(shared, link, origin)).await;
    opened.unwrap_or_else(|_| {
        let reason = format!("no answer within {} s", shared.connect_timeout.as_secs());
        Err(FetchError::Connect { host: target, link: name, reason })
    })
}

async fn open_untimed(shared: &Shared, link: usize, origin: &Origin) -> Result<HttpConnection, FetchError> {
    let (host, port) = match &origin.proxy {
        Some(proxy) => (proxy.host_str().unwrap_or(""), proxy::port(proxy)),
        None => (origin.host.as_str(), origin.port),
    };
    let mut stream = shared.network.connect(link, host.trim_matches(['[', ']']), port).await?;
    let mut two = false;
    match &origin.proxy {
        Some(proxy) if proxy::is_socks(proxy) => stream = proxy::socks(stream, proxy, &origin.host, origin.port).await?,
        Some(proxy) if origin.tls => stream = proxy::tunnel(stream, proxy, &origin.host, origin.port).await?,
        _ => {}
    }
    if origin.tls {
        let none = || FetchError::Tls { host: origin.host.clone(), reason: "TLS is not set up".to_owned() };
        (stream, two) = shared.tls.as_ref().ok_or_else(none)?.wrap(&origin.host, stream).await?;
    }
    let broken = |error: hyper::Error| {
        let link = shared.network.links()[link].name.clone();
        FetchError::Broken { host: origin.host.clone(), link, reason: exchange::reason(&error) }
    };
    let io = TokioIo::new(stream);
    if two {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
        let (sender, connection) = builder.handshake(io).await.map_err(broken)?;
        tokio::spawn(connection);
        return Ok(HttpConnection::Http2(sender));
    }
    let (sender, connection) = http1::Builder::new().max_buf_size(READ_SIZE).handshake(io).await.map_err(broken)?;
    tokio::spawn(connection);
    Ok(HttpConnection::Http1(sender))
}
