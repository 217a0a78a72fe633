//! The run: one engine for all downloads. It executes the engine's decisions and puts the data in order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use braid_model::ByteCount;
use braid_model::LinkSet;
use braid_range::{Cause, Config, Failure, FileId, FileSetup, LinkId, LinkSetup, RequestId, ServerId};
use http_body_util::BodyExt;
use hyper::Uri;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName};
use tokio::sync::{mpsc, watch};
use url::Url;

use super::{Command, SpliceError, StartedDownload};
use crate::answer::{Asked, Validator};
use crate::connection::Origin;
use crate::connections::{ConnectionEvent, Shared};
use crate::driver::{Driver, FileAction, FileEvent, RangeRequest};
use crate::error::FetchError;
use crate::exchange::reason;
use crate::throttle::Throttle;

/// Number of pieces that connections may read before the run takes them.
const QUEUE_LENGTH: usize = 64;
/// Time limit for a connection to be established.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// Initial number of concurrent requests on a link: one more than for files, because ranges are shorter.
const REQUESTS_FIRST: usize = 4;
/// Fields of the first request that range requests do not repeat: conditions that were met, and fields that are set again.
const NOT_REPEATED: [HeaderName; 8] = [
    header::RANGE,
    header::IF_RANGE,
    header::IF_MATCH,
    header::IF_NONE_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_UNMODIFIED_SINCE,
    header::EXPECT,
    header::CONTENT_LENGTH,
];

/// Runs until all command senders are gone.
pub(super) async fn work(mut commands: mpsc::UnboundedReceiver<Command>) {
    let (sender, mut events) = mpsc::channel(QUEUE_LENGTH);
    let mut run = Run::new(sender);
    loop {
        run.pump();
        let due = run.driver.due();
        tokio::select! {
            command = commands.recv() => match command {
                Some(command) => run.on_command(command),
                None => return,
            },
            Some(first) = events.recv() => {
                run.on_event(first);
                while let Ok(next) = events.try_recv() {
                    // The effects of a response's head must precede its body.
                    run.pump();
                    run.on_event(next);
                }
            }
            () = tokio::time::sleep(due) => {}
        }
    }
}

struct Run {
    driver: Driver,
    events: mpsc::Sender<ConnectionEvent>,
    links: usize,
    /// Server of each download name.
    names: BTreeMap<String, ServerId>,
    downloads: BTreeMap<FileId, Download>,
    files: BTreeMap<u64, FileId>,
}

struct Download {
    number: u64,
    server: ServerId,
    url: Url,
    target: Uri,
    headers: HeaderMap,
    validator: Validator,
    pieces: mpsc::UnboundedSender<Result<bytes::Bytes, SpliceError>>,
    /// Bytes that wait for earlier ones, by offset.
    waiting: BTreeMap<u64, bytes::Bytes>,
    out: u64,
    /// Offset up to which the first response may be read.
    limit: watch::Sender<u64>,
    last_error: Option<FetchError>,
}

impl Run {
    fn new(events: mpsc::Sender<ConnectionEvent>) -> Self {
        // Every download is already in progress when it is added, so none can wait for others.
        let driver = Driver::new(Config { files_at_once: usize::MAX, connections_first: REQUESTS_FIRST, ..Config::default() });
        Self { driver, events, links: 0, names: BTreeMap::new(), downloads: BTreeMap::new(), files: BTreeMap::new() }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Begin { number, begun, url, window, pieces } => self.begin(number, *begun, url, window, pieces),
            Command::Taken { number, upto } => {
                if let Some(file) = self.files.get(&number) {
                    self.driver.engine.on_taken(self.driver.now(), *file, upto);
                    self.update_limit(*file);
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
        begun: StartedDownload,
        url: Url,
        window: ByteCount,
        pieces: mpsc::UnboundedSender<Result<bytes::Bytes, SpliceError>>,
    ) {
        let StartedDownload { name, network, links, link, weight, address, mut headers, offer, body } = begun;
        let server = self.server(name, network, &url);
        NOT_REPEATED.iter().for_each(|name| drop(headers.remove(name)));
        let target = address.path_and_query().map_or("/", |path| path.as_str()).parse().unwrap_or(Uri::from_static("/"));
        let mut setup = FileSetup::new(vec![server]);
        (setup.weight, setup.size, setup.window) = (weight, Some(offer.size), Some(window));
        setup.links = links.iter().copied().chain([link]).collect::<LinkSet>();
        let (limit, readable) = watch::channel(0);
        let host = url.host_str().unwrap_or("").to_owned();
        let events = self.events.clone();
        let adopted = self.add_links(&setup).and_then(|()| {
            let read = |request| tokio::spawn(read(body, request, host, events, readable)).abort_handle();
            self.driver.adopt(LinkId(link), server, setup, read).map_err(|error| error.to_string())
        });
        let file = match adopted {
            Ok(file) => file,
            Err(error) => {
                let _ = pieces.send(Err(SpliceError(error)));
                return self.clean(server);
            }
        };
        self.files.insert(number, file);
        let (validator, waiting) = (offer.validator, BTreeMap::new());
        let download = Download { number, server, url, target, headers, validator, pieces, waiting, out: 0, limit, last_error: None };
        self.downloads.insert(file, download);
        self.update_limit(file);
    }

    /// The server of this name.
    fn server(&mut self, name: String, network: Arc<dyn crate::network::Network>, url: &Url) -> ServerId {
        if let Some(id) = self.names.get(&name) {
            return *id;
        }
        let shared =
            Shared { network, tls: None, throttle: Throttle::new(None), connect_timeout: CONNECT_TIMEOUT, events: self.events.clone() };
        let (host, port) = (url.host_str().unwrap_or("").to_owned(), url.port_or_known_default().unwrap_or(80));
        let id = self.driver.add_server(Arc::new(shared), Origin { tls: false, host, port, proxy: None });
        self.names.insert(name, id);
        id
    }

    /// The engine numbers links from 0. Links keep their own indices here, so indices below the highest may be unused.
    fn add_links(&mut self, setup: &FileSetup) -> Result<(), String> {
        let needed = setup.links.iter().max().map_or(0, |highest| highest + 1);
        while self.links < needed {
            self.driver.engine.add_link(LinkSetup::default()).map_err(|error| error.to_string())?;
            self.links += 1;
        }
        Ok(())
    }

    /// Executes all pending actions of the engine.
    fn pump(&mut self) {
        while let Some(action) = self.driver.poll() {
            match action {
                FileAction::Ask(question) => self.ask(&question),
                FileAction::Done { file, .. } => self.forget(file),
                FileAction::GiveUp { file, cause } => self.give_up(file, cause),
                // Only files without validators restart; these have one.
                FileAction::Restart(_) => {}
            }
        }
    }

    fn ask(&mut self, question: &RangeRequest) {
        let Some(download) = self.downloads.get(&question.file) else { return };
        let asked = Asked {
            url: download.url.clone(),
            target: Some(download.target.clone()),
            span: question.span,
            expected: Some(download.validator.clone()),
            encoded: false,
        };
        self.driver.send(question, asked, download.headers.clone());
    }

    fn on_event(&mut self, event: ConnectionEvent) {
        match self.driver.on_event(event) {
            Some(FileEvent::Lost { server, error, .. }) => {
                let here = self.downloads.values_mut().filter(|download| download.server == server);
                here.for_each(|download| download.last_error = Some(error.clone()));
            }
            Some(FileEvent::Head { request, head, .. }) => self.driver.engine.on_head(self.driver.now(), request, head),
            Some(FileEvent::Data { active, pieces }) => {
                let Some(download) = self.downloads.get_mut(&active.file) else { return };
                pieces.into_iter().for_each(|(at, piece)| download.keep(at.get(), &piece));
            }
            Some(FileEvent::Redirect { request, active, from, to }) => {
                let reason = format!("a part of the file redirects to {to}");
                self.note_error(active.file, FetchError::Protocol { url: from.to_string(), reason });
                self.driver.fail(request, Failure::NoRanges);
            }
            Some(FileEvent::Failed { active, error }) => self.note_error(active.file, error),
            // The client got its cookies with the first response.
            Some(FileEvent::Cookies { .. }) | None => {}
        }
    }

    fn note_error(&mut self, file: FileId, error: FetchError) {
        if let Some(download) = self.downloads.get_mut(&file) {
            download.last_error = Some(error);
        }
    }

    /// Updates how far a first response may be read.
    fn update_limit(&self, file: FileId) {
        if let Some(download) = self.downloads.get(&file) {
            download.limit.send_replace(self.driver.engine.limit(file).get());
        }
    }

    fn give_up(&mut self, file: FileId, cause: Cause) {
        if let Some(download) = self.downloads.get_mut(&file) {
            let why = match (download.last_error.take(), cause) {
                (Some(last_error), _) => last_error.to_string(),
                (None, Cause::Unjoinable) => {
                    format!("{}: the transfer broke off, and the server supports no ranges to resume it", download.url)
                }
                (None, _) => format!("{}: no more data arrives", download.url),
            };
            let _ = download.pieces.send(Err(SpliceError(why)));
        }
        self.forget(file);
    }

    /// Ends a download and its requests.
    fn forget(&mut self, file: FileId) {
        let Some(download) = self.downloads.remove(&file) else { return };
        self.files.remove(&download.number);
        self.driver.remove_file(file);
        self.clean(download.server);
    }

    /// Removes a server without downloads.
    fn clean(&mut self, server: ServerId) {
        if !self.downloads.values().any(|download| download.server == server) {
            self.driver.remove_server(server);
            self.names.retain(|_, of| *of != server);
        }
    }
}

impl Download {
    /// Inserts bytes at their offset, and delivers the bytes that are in order. The bytes are copied: a piece is often a small part of its read
    /// buffer and would keep all of it alive, and windows count only the piece.
    fn keep(&mut self, at: u64, bytes: &[u8]) {
        self.waiting.insert(at, bytes::Bytes::copy_from_slice(bytes));
        while let Some(next) = self.waiting.remove(&self.out) {
            self.out += next.len() as u64;
            // A client that is gone is detected elsewhere.
            let _ = self.pieces.send(Ok(next));
        }
    }
}

/// Reads a first response up to its limit.
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
