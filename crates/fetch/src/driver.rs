//! The part that `braid get` and downloads through a proxy share: the engine, its connections and its requests.
//!
//! [`Driver::poll`] executes the engine's actions for connections and returns those for files to the caller. [`Driver::on_event`] passes connection
//! events to the engine and returns what the caller needs of them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use braid_model::{ByteCount, Time};
use braid_range::{
    Action, Cause, Config, ConnectionId, Engine, Failure, FileId, FileSetup, Head, LinkId, RangeError, RequestId, ServerId, SourceId, Span,
};
use bytes::Bytes;
use hyper::header::HeaderMap;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use url::Url;

use crate::answer::{Asked, Validator};
use crate::connection::{self, Origin};
use crate::connections::{ConnectionCommand, ConnectionEvent, Shared};
use crate::error::FetchError;

/// The engine, and its connections and requests.
pub(crate) struct Driver {
    pub(crate) engine: Engine,
    begin: Instant,
    servers: BTreeMap<ServerId, (Arc<Shared>, Origin)>,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Requests in progress. A request is removed when its connection ends it, or when the engine stops it.
    requests: BTreeMap<RequestId, ActiveRequest>,
}

/// Task of a connection; dropping it aborts the task.
struct Connection {
    task: AbortHandle,
    link: LinkId,
    server: ServerId,
    /// `None` for an adopted connection, which only delivers the rest of one response.
    commands: Option<mpsc::UnboundedSender<ConnectionCommand>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A request that was sent and has not ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActiveRequest {
    pub(crate) file: FileId,
    pub(crate) source: SourceId,
    pub(crate) link: LinkId,
    connection: ConnectionId,
}

/// An action of the engine for a file.
pub(crate) enum FileAction {
    /// Request `span` of the file; the caller calls [`Driver::send`].
    Ask(RangeRequest),
    /// Restart the file from its beginning.
    Restart(FileId),
    /// The file is complete.
    Done {
        file: FileId,
        size: ByteCount,
    },
    GiveUp {
        file: FileId,
        cause: Cause,
    },
}

/// A request that the engine wants to send.
pub(crate) struct RangeRequest {
    request: RequestId,
    connection: ConnectionId,
    pub(crate) file: FileId,
    pub(crate) source: SourceId,
    pub(crate) span: Option<Span>,
}

/// An event of a file's requests.
pub(crate) enum FileEvent {
    /// A connection was lost. The engine has been informed.
    Lost {
        server: ServerId,
        link: LinkId,
        error: FetchError,
    },
    /// A response began. The caller must pass its head, or a failure, to the engine.
    Head {
        request: RequestId,
        active: ActiveRequest,
        head: Head,
        validator: Option<Validator>,
    },
    /// New bytes of the file: pieces with their offsets.
    Data {
        active: ActiveRequest,
        pieces: Vec<(ByteCount, Bytes)>,
    },
    /// A redirect. The caller must report the failure of the request to the engine.
    Redirect {
        request: RequestId,
        active: ActiveRequest,
        from: Url,
        to: Url,
    },
    Cookies {
        url: Url,
        lines: Vec<String>,
    },
    /// A request failed. The engine has been informed.
    Failed {
        active: ActiveRequest,
        error: FetchError,
    },
}

impl Driver {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            engine: Engine::new(config),
            begin: Instant::now(),
            servers: BTreeMap::new(),
            connections: BTreeMap::new(),
            requests: BTreeMap::new(),
        }
    }

    pub(crate) fn now(&self) -> Time {
        Time::ZERO + self.begin.elapsed()
    }

    /// Time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Time until the engine must be polled again if nothing happens.
    pub(crate) fn due(&self) -> Duration {
        self.engine.poll_timeout().map_or(Duration::from_secs(3600), |due| due.since(self.now()))
    }

    pub(crate) fn add_server(&mut self, shared: Arc<Shared>, origin: Origin) -> ServerId {
        let id = self.engine.add_server();
        self.servers.insert(id, (shared, origin));
        id
    }

    pub(crate) fn remove_server(&mut self, id: ServerId) {
        self.engine.remove_server(self.now(), id);
        self.servers.remove(&id);
    }

    /// Server of this origin, if it exists.
    pub(crate) fn server_of(&self, origin: &Origin) -> Option<ServerId> {
        self.servers.iter().find(|(_, (_, known))| known == origin).map(|(id, _)| *id)
    }

    /// Adopts a file whose whole response is already in progress. `read` starts the task that reports the response under the given request.
    ///
    /// # Errors
    /// Errors of the engine, if it rejects the setup.
    pub(crate) fn adopt(
        &mut self,
        link: LinkId,
        server: ServerId,
        setup: FileSetup,
        read: impl FnOnce(RequestId) -> AbortHandle,
    ) -> Result<FileId, RangeError> {
        let (file, connection, request) = self.engine.adopt(self.now(), link, setup)?;
        let task = read(request);
        self.connections.insert(connection, Connection { task, link, server, commands: None });
        self.requests.insert(request, ActiveRequest { file, source: SourceId(0), link, connection });
        Ok(file)
    }

    /// Executes the engine's actions for connections until there is one for a file.
    pub(crate) fn poll(&mut self) -> Option<FileAction> {
        let now = self.now();
        while let Some(action) = self.engine.poll(now) {
            match action {
                Action::Connect { connection, link, server } => self.connect(connection, link, server),
                Action::Stop { request } => self.stop(request),
                Action::Close { connection } => drop(self.forget_connection(connection)),
                Action::Ask { request, connection, file, source, span } => {
                    return Some(FileAction::Ask(RangeRequest { request, connection, file, source, span }));
                }
                Action::Restart { file } => return Some(FileAction::Restart(file)),
                Action::Done { file, size } => return Some(FileAction::Done { file, size }),
                Action::GiveUp { file, cause } => return Some(FileAction::GiveUp { file, cause }),
            }
        }
        None
    }

    fn connect(&mut self, id: ConnectionId, link: LinkId, server: ServerId) {
        let Some((shared, origin)) = self.servers.get(&server) else { return };
        let (commands, receiver) = mpsc::unbounded_channel();
        let task = tokio::spawn(connection::run(shared.clone(), id, link.0, origin.clone(), receiver)).abort_handle();
        self.connections.insert(id, Connection { task, link, server, commands: Some(commands) });
    }

    fn stop(&mut self, request: RequestId) {
        let Some(active) = self.requests.remove(&request) else { return };
        match self.connections.get(&active.connection).map(|connection| &connection.commands) {
            Some(Some(commands)) => drop(commands.send(ConnectionCommand::Stop(request))),
            Some(None) => drop(self.connections.remove(&active.connection)),
            None => {}
        }
    }

    fn forget_connection(&mut self, id: ConnectionId) -> Option<Connection> {
        self.requests.retain(|_, active| active.connection != id);
        self.connections.remove(&id)
    }

    /// Sends a request of the engine.
    pub(crate) fn send(&mut self, question: &RangeRequest, asked: Asked, headers: HeaderMap) {
        let RangeRequest { request, connection, file, source, .. } = *question;
        let Some(Connection { link, commands: Some(commands), .. }) = self.connections.get(&connection) else { return };
        self.requests.insert(request, ActiveRequest { file, source, link: *link, connection });
        // A closed connection has already reported its end.
        let _ = commands.send(ConnectionCommand::Ask { request, asked: Box::new(asked), headers });
    }

    /// Passes a connection's event to the engine; returns an event for a file.
    pub(crate) fn on_event(&mut self, event: ConnectionEvent) -> Option<FileEvent> {
        let now = self.now();
        match event {
            ConnectionEvent::Connected { connection, depth } => self.engine.on_connected(now, connection, depth),
            ConnectionEvent::End { request } => {
                self.requests.remove(&request);
                self.engine.on_end(now, request);
            }
            ConnectionEvent::Lost { connection, error } => {
                let lost = self.forget_connection(connection)?;
                self.engine.on_connection_lost(now, connection);
                return Some(FileEvent::Lost { server: lost.server, link: lost.link, error });
            }
            ConnectionEvent::Failed { request, failure, error } => {
                let active = self.requests.remove(&request);
                self.engine.on_failed(now, request, failure);
                return active.map(|active| FileEvent::Failed { active, error });
            }
            ConnectionEvent::Head { request, head, validator } => {
                let active = *self.requests.get(&request)?;
                return Some(FileEvent::Head { request, active, head, validator });
            }
            ConnectionEvent::Data { request, bytes } => {
                let active = *self.requests.get(&request)?;
                let at = self.engine.place(request)?;
                let fresh = self.engine.on_data(now, request, ByteCount::new(bytes.len() as u64));
                let piece = |span: Span| {
                    let from = (span.start().get() - at.get()) as usize;
                    (span.start(), bytes.slice(from..from + span.len().get() as usize))
                };
                return Some(FileEvent::Data { active, pieces: fresh.into_iter().map(piece).collect() });
            }
            ConnectionEvent::Redirect { request, from, to } => {
                let active = *self.requests.get(&request)?;
                return Some(FileEvent::Redirect { request, active, from, to });
            }
            ConnectionEvent::Cookies { url, lines } => return Some(FileEvent::Cookies { url, lines }),
        }
        None
    }

    /// Reports a failure that the caller detected.
    pub(crate) fn fail(&mut self, request: RequestId, failure: Failure) {
        self.engine.on_failed(self.now(), request, failure);
    }

    /// Removes a file; the engine then stops its requests.
    pub(crate) fn remove_file(&mut self, file: FileId) {
        self.engine.remove_file(self.now(), file);
    }

    /// Closes all connections.
    pub(crate) fn close(&mut self) {
        self.connections.clear();
    }
}
