//! The run: one engine for all downloads, its decisions carried out, and what comes put in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use braid_model::LinkSet;
use braid_model::{ByteCount, Time};
use braid_range::{Action, Cause, Config, ConnectionId, Engine, Failure, FileId, FileSetup, LinkId, LinkSetup, RequestId, ServerId, Span};
use http_body_util::BodyExt;
use hyper::Uri;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName};
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;
use url::Url;

use super::{Begun, Command, SpliceError};
use crate::answer::{Asked, Validator};
use crate::connection::{self, Origin};
use crate::connections::{ConnectionCommand, ConnectionEvent, Shared};
use crate::error::FetchError;
use crate::exchange::reason;
use crate::throttle::Throttle;

/// Pieces that connections may have read and the run not yet taken.
const AHEAD: usize = 64;
/// A connection that takes longer is given up.
const CONNECT: Duration = Duration::from_secs(15);
/// Requests at once on a link, at first: one more than for files, since ranges are shorter.
const PLACES: usize = 4;
/// What a range's request does not repeat of the first one's header: conditions that held, and what is said anew.
const OWN: [HeaderName; 8] = [
    header::RANGE,
    header::IF_RANGE,
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_UNMODIFIED_SINCE,
    header::EXPECT,
    header::CONTENT_LENGTH,
];

/// Works until nobody can order anything any more.
pub(super) async fn work(mut commands: mpsc::UnboundedReceiver<Command>) {
    let (sender, mut events) = mpsc::channel(AHEAD);
    let mut run = Run::new(sender);
    loop {
        run.pump();
        let due = run.engine.poll_timeout().map_or(Duration::from_secs(3600), |due| due.since(run.now()));
        tokio::select! {
            command = commands.recv() => match command {
                Some(command) => run.on_command(command),
                None => return,
            },
            Some(first) = events.recv() => {
                run.on_event(first);
                while let Ok(next) = events.try_recv() {
                    // What an answer's head changes is done before its body is kept.
                    run.pump();
                    run.on_event(next);
                }
            }
            () = tokio::time::sleep(due) => {}
        }
    }
}

struct Run {
    engine: Engine,
    begin: Instant,
    events: mpsc::Sender<ConnectionEvent>,
    links: usize,
    servers: BTreeMap<ServerId, Server>,
    downloads: BTreeMap<FileId, Download>,
    files: BTreeMap<u64, FileId>,
    connections: BTreeMap<ConnectionId, ConnectionTask>,
    requests: BTreeMap<RequestId, (FileId, ConnectionId)>,
}

/// Where downloads of one name come from.
struct Server {
    name: String,
    shared: Arc<Shared>,
    origin: Origin,
}

struct Download {
    number: u64,
    server: ServerId,
    url: Url,
    target: Uri,
    headers: HeaderMap,
    validator: Validator,
    pieces: mpsc::UnboundedSender<Result<bytes::Bytes, SpliceError>>,
    /// Bytes that came before their turn, by place.
    waiting: BTreeMap<u64, bytes::Bytes>,
    out: u64,
    trouble: Option<FetchError>,
}

/// A connection's task, which ends with it.
enum ConnectionTask {
    /// The one that a download came with, and how far it may be read.
    First {
        task: AbortHandle,
        file: FileId,
        limit: watch::Sender<u64>,
    },
    Further {
        task: AbortHandle,
        server: ServerId,
        commands: mpsc::UnboundedSender<ConnectionCommand>,
    },
}

impl Drop for ConnectionTask {
    fn drop(&mut self) {
        match self {
            Self::First { task, .. } | Self::Further { task, .. } => task.abort(),
        }
    }
}

impl Run {
    fn new(events: mpsc::Sender<ConnectionEvent>) -> Self {
        // Every download is under way when it comes: none can wait for others to end.
        let engine = Engine::new(Config { files_at_once: usize::MAX, connections_first: PLACES, ..Config::default() });
        Self {
            engine,
            begin: Instant::now(),
            events,
            links: 0,
            servers: BTreeMap::new(),
            downloads: BTreeMap::new(),
            files: BTreeMap::new(),
            connections: BTreeMap::new(),
            requests: BTreeMap::new(),
        }
    }

    fn now(&self) -> Time {
        Time::ZERO + self.begin.elapsed()
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Begin { number, begun, url, window, pieces } => self.begin(number, *begun, url, window, pieces),
            Command::Taken { number, upto } => {
                if let Some(file) = self.files.get(&number) {
                    self.engine.on_taken(self.now(), *file, upto);
                    self.tell_limit(*file);
                }
            }
            Command::Gone { number } => {
                if let Some(file) = self.files.get(&number) {
                    self.forget(*file);
                }
            }
        }
    }

    fn begin(
        &mut self,
        number: u64,
        begun: Begun,
        url: Url,
        window: ByteCount,
        pieces: mpsc::UnboundedSender<Result<bytes::Bytes, SpliceError>>,
    ) {
        let Begun { name, network, links, link, weight, address, mut headers, offer, body } = begun;
        let server = self.server(name, network, &url);
        OWN.iter().for_each(|name| drop(headers.remove(name)));
        let target = address.path_and_query().map_or("/", |path| path.as_str()).parse().unwrap_or(Uri::from_static("/"));
        let now = self.now();
        let mut setup = FileSetup::new(vec![server]);
        (setup.weight, setup.size, setup.window) = (weight, Some(offer.size), Some(window));
        setup.links = links.iter().copied().chain([link]).collect::<LinkSet>();
        let adopted = self.know_links(&setup).and_then(|()| self.engine.adopt(now, LinkId(link), setup).map_err(|error| error.to_string()));
        let (file, connection, request) = match adopted {
            Ok(adopted) => adopted,
            Err(error) => {
                let _ = pieces.send(Err(SpliceError(error)));
                return self.clean(server);
            }
        };
        let (limit, readable) = watch::channel(self.engine.limit(file).get());
        let host = url.host_str().unwrap_or("").to_owned();
        let task = tokio::spawn(read(body, request, host, self.events.clone(), readable)).abort_handle();
        self.connections.insert(connection, ConnectionTask::First { task, file, limit });
        self.requests.insert(request, (file, connection));
        self.files.insert(number, file);
        let (validator, waiting) = (offer.validator, BTreeMap::new());
        let download = Download { number, server, url, target, headers, validator, pieces, waiting, out: 0, trouble: None };
        self.downloads.insert(file, download);
    }

    /// The server of that name.
    fn server(&mut self, name: String, network: Arc<dyn crate::network::Network>, url: &Url) -> ServerId {
        if let Some((id, _)) = self.servers.iter().find(|(_, server)| server.name == name) {
            return *id;
        }
        let shared = Shared { network, tls: None, throttle: Throttle::new(None), connect_timeout: CONNECT, events: self.events.clone() };
        let (host, port) = (url.host_str().unwrap_or("").to_owned(), url.port_or_known_default().unwrap_or(80));
        let origin = Origin { tls: false, host, port, proxy: None };
        let id = self.engine.add_server();
        self.servers.insert(id, Server { name, shared: Arc::new(shared), origin });
        id
    }

    /// The engine numbers links from 0 on; here they have places of their own, of which those before the highest may be empty.
    fn know_links(&mut self, setup: &FileSetup) -> Result<(), String> {
        let needed = setup.links.iter().max().map_or(0, |highest| highest + 1);
        while self.links < needed {
            self.engine.add_link(LinkSetup::default()).map_err(|error| error.to_string())?;
            self.links += 1;
        }
        Ok(())
    }

    /// Does all that the engine wants done now.
    fn pump(&mut self) {
        let now = self.now();
        while let Some(action) = self.engine.poll(now) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Connect { connection, link, server } => {
                let Some(there) = self.servers.get(&server) else { return };
                let (commands, receiver) = mpsc::unbounded_channel();
                let task =
                    tokio::spawn(connection::run(there.shared.clone(), connection, link.0, there.origin.clone(), receiver)).abort_handle();
                self.connections.insert(connection, ConnectionTask::Further { task, server, commands });
            }
            Action::Ask { request, connection, file, span, .. } => self.ask(request, connection, file, span),
            Action::Stop { request } => {
                match self.requests.remove(&request).map(|(_, connection)| (connection, self.connections.get(&connection))) {
                    Some((_, Some(ConnectionTask::Further { commands, .. }))) => drop(commands.send(ConnectionCommand::Stop(request))),
                    Some((connection, Some(ConnectionTask::First { .. }))) => drop(self.connections.remove(&connection)),
                    _ => {}
                }
            }
            Action::Close { connection } => {
                self.connections.remove(&connection);
                self.requests.retain(|_, (_, of)| *of != connection);
            }
            Action::Done { file, .. } => self.forget(file),
            Action::GiveUp { file, cause } => self.give_up(file, cause),
            // Only for files that come without validators, and these have one.
            Action::Restart { .. } => {}
        }
    }

    fn ask(&mut self, request: RequestId, connection: ConnectionId, file: FileId, span: Option<Span>) {
        let (Some(ConnectionTask::Further { commands, .. }), Some(download)) =
            (self.connections.get(&connection), self.downloads.get(&file))
        else {
            return;
        };
        self.requests.insert(request, (file, connection));
        let asked = Asked {
            url: download.url.clone(),
            target: Some(download.target.clone()),
            span,
            expected: Some(download.validator.clone()),
            encoded: false,
        };
        let _ = commands.send(ConnectionCommand::Ask { request, asked: Box::new(asked), headers: download.headers.clone() });
    }

    fn on_event(&mut self, event: ConnectionEvent) {
        let now = self.now();
        match event {
            ConnectionEvent::Connected { connection, depth } => self.engine.on_connected(now, connection, depth),
            ConnectionEvent::Lost { connection, error } => self.on_lost(now, connection, error),
            ConnectionEvent::Head { request, head, .. } => self.engine.on_head(now, request, head),
            ConnectionEvent::Data { request, bytes } => self.on_data(now, request, bytes),
            ConnectionEvent::End { request } => {
                self.requests.remove(&request);
                self.engine.on_end(now, request);
            }
            // The client has its cookies from the first answer.
            ConnectionEvent::Cookies { .. } => {}
            ConnectionEvent::Elsewhere { request, from, to } => {
                let reason = format!("a part of the file is said to be elsewhere, at {to}");
                self.on_failed(now, request, Failure::NoRanges, FetchError::Protocol { url: from.to_string(), reason });
            }
            ConnectionEvent::Failed { request, failure, error } => self.on_failed(now, request, failure, error),
        }
    }

    fn on_failed(&mut self, now: Time, request: RequestId, failure: Failure, error: FetchError) {
        let download = self.requests.remove(&request).and_then(|(file, _)| self.downloads.get_mut(&file));
        download.into_iter().for_each(|download| download.trouble = Some(error.clone()));
        self.engine.on_failed(now, request, failure);
    }

    fn on_lost(&mut self, now: Time, connection: ConnectionId, error: FetchError) {
        if let Some(ConnectionTask::Further { server, .. }) = self.connections.remove(&connection).as_ref() {
            let here = self.downloads.values_mut().filter(|download| download.server == *server);
            here.for_each(|download| download.trouble = Some(error.clone()));
        }
        self.requests.retain(|_, (_, of)| *of != connection);
        self.engine.on_connection_lost(now, connection);
    }

    fn on_data(&mut self, now: Time, request: RequestId, bytes: bytes::Bytes) {
        let (Some((file, _)), Some(at)) = (self.requests.get(&request).copied(), self.engine.place(request)) else { return };
        let fresh = self.engine.on_data(now, request, ByteCount::new(bytes.len() as u64));
        let Some(download) = self.downloads.get_mut(&file) else { return };
        for span in fresh {
            let from = (span.start().get() - at.get()) as usize;
            download.keep(span.start().get(), &bytes[from..from + span.len().get() as usize]);
        }
    }

    /// A first answer may be read further.
    fn tell_limit(&self, file: FileId) {
        let upto = self.engine.limit(file).get();
        for connection in self.connections.values() {
            if let ConnectionTask::First { file: of, limit, .. } = connection
                && *of == file
            {
                limit.send_replace(upto);
            }
        }
    }

    fn give_up(&mut self, file: FileId, cause: Cause) {
        if let Some(download) = self.downloads.get_mut(&file) {
            let why = match (download.trouble.take(), cause) {
                (Some(trouble), _) => trouble.to_string(),
                (None, Cause::Unjoinable) => format!("{}: the transfer broke, and there are no ranges to go on with", download.url),
                (None, _) => format!("{}: nothing comes any more", download.url),
            };
            let _ = download.pieces.send(Err(SpliceError(why)));
        }
        self.forget(file);
    }

    /// Ends all that is under way for a download.
    fn forget(&mut self, file: FileId) {
        let Some(download) = self.downloads.remove(&file) else { return };
        self.files.remove(&download.number);
        self.engine.remove_file(self.now(), file);
        self.clean(download.server);
    }

    /// Forgets a server that nothing comes from any more.
    fn clean(&mut self, server: ServerId) {
        if !self.downloads.values().any(|download| download.server == server) {
            self.engine.remove_server(self.now(), server);
            self.servers.remove(&server);
        }
    }
}

impl Download {
    /// Takes bytes at their place, and hands on what stands in order. They are copied: what was read is often a small part of the memory that
    /// it was read into, all of which it would keep, and windows count bytes.
    fn keep(&mut self, at: u64, bytes: &[u8]) {
        self.waiting.insert(at, bytes::Bytes::copy_from_slice(bytes));
        while let Some(next) = self.waiting.remove(&self.out) {
            self.out += next.len() as u64;
            // Whether the client is there yet shows otherwise.
            let _ = self.pieces.send(Ok(next));
        }
    }
}

/// Reads a first answer, as far as it may be.
async fn read(
    mut body: Incoming,
    request: RequestId,
    host: String,
    events: mpsc::Sender<ConnectionEvent>,
    mut limit: watch::Receiver<u64>,
) {
    let mut at = 0;
    let last = loop {
        if limit.wait_for(|limit| at < *limit).await.is_err() {
            return;
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                let Ok(bytes) = frame.into_data() else { continue };
                at += bytes.len() as u64;
                if !bytes.is_empty() && events.send(ConnectionEvent::Data { request, bytes }).await.is_err() {
                    return;
                }
            }
            Some(Err(error)) => {
                let error = FetchError::Broken { host, link: "the first link".to_owned(), reason: reason(&error) };
                break ConnectionEvent::Failed { request, failure: Failure::Lost, error };
            }
            None => break ConnectionEvent::End { request },
        }
    };
    let _ = events.send(last).await;
}
