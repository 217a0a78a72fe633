//! What downloads of `braid get` and downloads through a proxy share: the engine, and the connections and requests that it orders.
//!
//! [`Driver::poll`] carries out what the engine orders about connections and gives the rest, which concerns files, to the caller.
//! [`Driver::on_event`] tells the engine what connections report and gives the caller what it has to know of it.

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

/// The engine, and what it has ordered.
pub(crate) struct Driver {
    pub(crate) engine: Engine,
    begin: Instant,
    servers: BTreeMap<ServerId, (Arc<Shared>, Origin)>,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Requests that are not over. One leaves when its connection ends it, or when the engine stops it.
    requests: BTreeMap<RequestId, ActiveRequest>,
}

/// A connection's task, which is aborted with it.
struct Connection {
    task: AbortHandle,
    link: LinkId,
    server: ServerId,
    /// `None`: an adopted connection, which brings the rest of its one answer.
    commands: Option<mpsc::UnboundedSender<ConnectionCommand>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A request that was sent and is not over.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActiveRequest {
    pub(crate) file: FileId,
    pub(crate) source: SourceId,
    pub(crate) link: LinkId,
    connection: ConnectionId,
}

/// What the engine wants done for a file.
pub(crate) enum FileAction {
    /// Ask for `span` of the file; [`Driver::send`] does.
    Ask(Question),
    /// Begin the file again from its start.
    Restart(FileId),
    /// All of it is there.
    Done {
        file: FileId,
        size: ByteCount,
    },
    GiveUp {
        file: FileId,
        cause: Cause,
    },
}

/// A request that the engine wants sent.
pub(crate) struct Question {
    request: RequestId,
    connection: ConnectionId,
    pub(crate) file: FileId,
    pub(crate) source: SourceId,
    pub(crate) span: Option<Span>,
}

/// What came of a file's requests.
pub(crate) enum FileEvent {
    /// A connection was lost; the engine knows.
    Lost {
        server: ServerId,
        link: LinkId,
        error: FetchError,
    },
    /// An answer began. The caller tells the engine its head, or that the request failed.
    Head {
        request: RequestId,
        active: ActiveRequest,
        head: Head,
        validator: Option<Validator>,
    },
    /// Bytes came that were not there yet: each piece with its place in the file.
    Data {
        active: ActiveRequest,
        pieces: Vec<(ByteCount, Bytes)>,
    },
    /// A redirection. The caller tells the engine how the request failed.
    Elsewhere {
        request: RequestId,
        active: ActiveRequest,
        from: Url,
        to: Url,
    },
    Cookies {
        url: Url,
        lines: Vec<String>,
    },
    /// A request failed; the engine knows.
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

    /// How long it has run.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    /// How long the engine can wait if nothing happens.
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

    /// The server of that origin, if it is known.
    pub(crate) fn server_of(&self, origin: &Origin) -> Option<ServerId> {
        self.servers.iter().find(|(_, (_, known))| known == origin).map(|(id, _)| *id)
    }

    /// Takes over a file whose whole answer is under way. `read` starts the task that reports that answer as the request given to it.
    ///
    /// # Errors
    /// The engine's, for a setup that it refuses.
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

    /// Does what the engine wants done about connections, until it wants something done for a file.
    pub(crate) fn poll(&mut self) -> Option<FileAction> {
        let now = self.now();
        while let Some(action) = self.engine.poll(now) {
            match action {
                Action::Connect { connection, link, server } => self.connect(connection, link, server),
                Action::Stop { request } => self.stop(request),
                Action::Close { connection } => drop(self.forget_connection(connection)),
                Action::Ask { request, connection, file, source, span } => {
                    return Some(FileAction::Ask(Question { request, connection, file, source, span }));
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

    /// Sends a request that the engine wanted.
    pub(crate) fn send(&mut self, question: &Question, asked: Asked, headers: HeaderMap) {
        let Question { request, connection, file, source, .. } = *question;
        let Some(Connection { link, commands: Some(commands), .. }) = self.connections.get(&connection) else { return };
        self.requests.insert(request, ActiveRequest { file, source, link: *link, connection });
        // A connection that is gone has reported so.
        let _ = commands.send(ConnectionCommand::Ask { request, asked: Box::new(asked), headers });
    }

    /// Tells the engine what a connection reports; gives what concerns a file.
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
            ConnectionEvent::Elsewhere { request, from, to } => {
                let active = *self.requests.get(&request)?;
                return Some(FileEvent::Elsewhere { request, active, from, to });
            }
            ConnectionEvent::Cookies { url, lines } => return Some(FileEvent::Cookies { url, lines }),
        }
        None
    }

    /// The caller has found that a request failed.
    pub(crate) fn fail(&mut self, request: RequestId, failure: Failure) {
        self.engine.on_failed(self.now(), request, failure);
    }

    /// Ends all that is under way for a file: the engine then stops its requests.
    pub(crate) fn remove_file(&mut self, file: FileId) {
        self.engine.remove_file(self.now(), file);
    }

    /// Ends all connections.
    pub(crate) fn close(&mut self) {
        self.connections.clear();
    }
}
