//! The engine: its state, and the handling of events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use braid_decide::midrr::{Flags, Midrr};
use braid_model::{ByteCount, Time};

use crate::file::File;
use crate::link::{RETRY_MAX, RETRY_MIN, ScheduledLink};
use crate::meter::Meter;
use crate::spans::{Span, Spans};
use crate::types::{
    Action, Cause, Config, ConnectionId, Failure, FileId, FileSetup, FileView, LinkId, LinkSetup, LinkView, RangeError, RequestId,
    ServerId, SourceId,
};

/// miDRR quantum of a file of weight 1.
const QUANTUM: ByteCount = ByteCount::new(64 * 1024);
/// One of several sources is dropped after this many consecutive failed connections.
const MAX_FAULTS: u32 = 3;
/// Maximum number of restarts of a file that comes in one piece, even if each attempt delivered something.
const MAX_RESTARTS: u32 = 3;
/// End of a file of unknown size: far beyond any real one.
pub(crate) const ENDLESS: u64 = u64::MAX / 2;

/// Decides on the next requests; see the crate's documentation.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: Config,
    pub(crate) links: Vec<ScheduledLink>,
    servers: BTreeSet<ServerId>,
    pub(crate) files: BTreeMap<FileId, File>,
    pub(crate) connections: BTreeMap<ConnectionId, Connection>,
    pub(crate) requests: BTreeMap<RequestId, Request>,
    pub(crate) reach: BTreeMap<(LinkId, ServerId), Reach>,
    pub(crate) midrr: Midrr,
    pub(crate) actions: VecDeque<Action>,
    next: u64,
    /// An event occurred since the last plan.
    pub(crate) dirty: bool,
    /// When to run the plan again.
    pub(crate) review: Option<Time>,
}

/// State of one connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) link: LinkId,
    pub(crate) server: ServerId,
    pub(crate) since: Time,
    pub(crate) connected: bool,
    /// Maximum number of overlapping requests.
    pub(crate) depth: usize,
    pub(crate) requests: Vec<RequestId>,
    /// The connection closes after its first request.
    pub(crate) once: bool,
}

/// State of one active request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) connection: ConnectionId,
    pub(crate) link: LinkId,
    pub(crate) file: FileId,
    pub(crate) source: SourceId,
    /// The first byte, the next byte to arrive, and the end.
    pub(crate) from: u64,
    pub(crate) at: u64,
    pub(crate) end: u64,
    /// End of the range that the server was asked for, or said that it sends.
    pub(crate) requested_end: u64,
    /// The whole file was requested.
    pub(crate) whole: bool,
    pub(crate) asked: Time,
    /// When the last event of the answer occurred.
    pub(crate) last_event: Time,
    pub(crate) head: bool,
    pub(crate) meter: Meter,
    /// The request has stalled: its range is free for others.
    pub(crate) stalled: bool,
}

impl Request {
    pub(crate) fn rest(&self) -> Span {
        Span::raw(self.at, self.end)
    }
}

/// Reachability of one server over one link.
#[derive(Debug, Default)]
pub(crate) struct Reach {
    /// Maximum number of connections that the server accepts at a time.
    pub(crate) limit: Option<usize>,
    pub(crate) not_before: Time,
    pub(crate) failures: u32,
}

impl Reach {
    /// Whether the last attempts failed.
    pub(crate) fn failing(&self) -> bool {
        self.failures > 0
    }

    fn on_failure(&mut self, now: Time, wait: Option<Duration>) {
        let pause = RETRY_MIN.saturating_mul(1 << self.failures.min(8)).min(RETRY_MAX);
        self.failures += 1;
        self.not_before = self.not_before.max(now + wait.unwrap_or(pause));
    }
}

impl Engine {
    /// Creates an engine without links and files.
    pub fn new(config: Config) -> Self {
        // The quantum and the counter are valid.
        let midrr = Midrr::new(0, QUANTUM, Flags::COUNTED).unwrap_or_else(|error| unreachable!("{error}"));
        Self {
            config,
            links: Vec::new(),
            servers: BTreeSet::new(),
            files: BTreeMap::new(),
            connections: BTreeMap::new(),
            requests: BTreeMap::new(),
            reach: BTreeMap::new(),
            midrr,
            actions: VecDeque::new(),
            next: 0,
            dirty: true,
            review: None,
        }
    }

    /// Adds a link; it is up initially.
    ///
    /// # Errors
    /// If there are 64 links already.
    pub fn add_link(&mut self, setup: LinkSetup) -> Result<LinkId, RangeError> {
        let index = self.midrr.add_link()?;
        self.links.push(ScheduledLink::new(setup, &self.config));
        self.dirty = true;
        Ok(LinkId(index))
    }

    /// Reports that a link went up or down. A link that goes down loses its connections.
    pub fn set_link(&mut self, now: Time, link: LinkId, up: bool) {
        let Some(there) = self.links.get_mut(link.0) else { return };
        if std::mem::replace(&mut there.up, up) == up {
            return;
        }
        there.silent = None;
        self.midrr.forget();
        if !up {
            let connections: Vec<ConnectionId> =
                self.connections.iter().filter(|(_, connection)| connection.link == link).map(|(id, _)| *id).collect();
            connections.into_iter().for_each(|connection| self.close(now, connection));
        }
        self.dirty = true;
    }

    /// Adds a server.
    pub fn add_server(&mut self) -> ServerId {
        let free = (0..).map(ServerId).find(|id| !self.servers.contains(id)).unwrap_or(ServerId(usize::MAX));
        self.servers.insert(free);
        free
    }

    /// Removes a server and its connections, unless a file uses it. Its ID may be reused.
    pub fn remove_server(&mut self, now: Time, id: ServerId) {
        if self.files.values().any(|file| file.setup.sources.contains(&id)) || !self.servers.remove(&id) {
            return;
        }
        let connections: Vec<ConnectionId> =
            self.connections.iter().filter(|(_, connection)| connection.server == id).map(|(id, _)| *id).collect();
        connections.into_iter().for_each(|connection| self.close(now, connection));
        self.reach.retain(|(_, server), _| *server != id);
    }

    /// Adds a file.
    ///
    /// # Errors
    /// If it has no source or an unknown one, or if the weight is not a positive number.
    pub fn add_file(&mut self, now: Time, setup: FileSetup) -> Result<FileId, RangeError> {
        if setup.sources.is_empty() {
            return Err(RangeError::NoSource);
        }
        if let Some(unknown) = setup.sources.iter().find(|server| !self.servers.contains(server)) {
            return Err(RangeError::UnknownServer(*unknown));
        }
        let flow = self.midrr.add_flow(setup.weight, setup.links)?;
        let id = FileId(self.fresh_id());
        self.files.insert(id, File::new(now, setup, flow));
        self.dirty = true;
        self.end_if_done(now, id);
        Ok(id)
    }

    /// Removes a file, complete or not, and stops its requests.
    pub fn remove_file(&mut self, now: Time, id: FileId) {
        self.stop_all(now, id, None);
        if let Some(file) = self.files.remove(&id) {
            let _ = self.midrr.remove_flow(file.flow);
        }
        self.dirty = true;
    }

    /// Reports that a source is now another server, after a redirect.
    pub fn move_source(&mut self, id: FileId, source: SourceId, server: ServerId) {
        if let Some(file) = self.files.get_mut(&id)
            && self.servers.contains(&server)
            && let Some(place) = file.setup.sources.get_mut(source.0)
        {
            *place = server;
            self.dirty = true;
        }
    }

    /// Reports that the reader took everything before `upto`. For files with a window.
    pub fn on_taken(&mut self, now: Time, id: FileId, upto: ByteCount) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let before = file.limit();
        file.taken = file.taken.max(upto.get());
        self.dirty = true;
        // A request that waited for the reader did not stall.
        self.requests
            .values_mut()
            .filter(|request| request.file == id && request.at >= before)
            .for_each(|request| request.last_event = now);
    }

    /// Reports an established connection. `depth` is the number of requests that may overlap on it.
    pub fn on_connected(&mut self, now: Time, id: ConnectionId, depth: usize) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.connected {
            return;
        }
        (connection.connected, connection.depth) = (true, depth.max(1));
        for file in self.files.values_mut() {
            if let Some(source) = file.source_at(connection.server) {
                file.faults[source.0] = 0;
            }
        }
        let took = now.since(connection.since);
        self.links[connection.link.0].on_first_handshake(took, self.config.connections_most);
        self.dirty = true;
    }

    /// Reports that a connection could not be established, or was lost with its requests.
    pub fn on_connection_lost(&mut self, now: Time, id: ConnectionId) {
        let Some(connection) = self.connections.remove(&id) else { return };
        let unanswered = connection.requests.iter().any(|request| self.requests.get(request).is_some_and(|request| !request.head));
        if connection.connected && unanswered {
            self.reach.entry((connection.link, connection.server)).or_default().on_failure(now, None);
        }
        for request in &connection.requests {
            self.fail_request(now, *request, Failure::Lost);
        }
        if !connection.connected {
            self.reach.entry((connection.link, connection.server)).or_default().on_failure(now, None);
            let alone = !self.connections.values().any(|other| other.link == connection.link && other.connected);
            if alone {
                self.links[connection.link.0].on_silence(now);
            }
            let waiting: Vec<FileId> = self.waiting_for(connection.server).collect();
            for file in waiting {
                self.on_unreachable(now, file, connection.server);
            }
        }
        self.dirty = true;
    }

    /// Files that need `server` and have several sources or no active request.
    fn waiting_for(&self, server: ServerId) -> impl Iterator<Item = FileId> + '_ {
        let idle = |id: &FileId| !self.requests.values().any(|request| request.file == *id && !request.stalled);
        let wants = move |file: &File| file.active && file.ended.is_none() && file.source_at(server).is_some();
        self.files.iter().filter(move |(id, file)| wants(file) && (file.sources().count() > 1 || idle(id))).map(|(id, _)| *id)
    }

    /// Reports that a server is unreachable. If the file has several sources, this one is dropped eventually; if it has one, an attempt has failed.
    fn on_unreachable(&mut self, now: Time, id: FileId, server: ServerId) {
        let Some(file) = self.files.get_mut(&id) else { return };
        match file.source_at(server) {
            Some(source) if file.sources().count() > 1 => {
                file.faults[source.0] += 1;
                file.good[source.0] = file.faults[source.0] < MAX_FAULTS;
            }
            _ => self.count_failure(now, id),
        }
    }

    /// Reports that a request failed.
    pub fn on_failed(&mut self, now: Time, id: RequestId, failure: Failure) {
        self.dirty = true;
        self.fail_request(now, id, failure);
    }

    /// The next action; `None` until the next event or [`Self::poll_timeout`].
    pub fn poll(&mut self, now: Time) -> Option<Action> {
        if self.actions.is_empty() && (self.dirty || self.review.is_some_and(|review| review <= now)) {
            self.dirty = false;
            self.handle_overdue(now);
            self.plan(now);
        }
        self.actions.pop_front()
    }

    /// When to call [`Self::poll`] again if no event occurs before.
    pub fn poll_timeout(&self) -> Option<Time> {
        if self.dirty || !self.actions.is_empty() { Some(Time::ZERO) } else { self.review }
    }

    /// Current state of a file.
    pub fn file(&self, id: FileId) -> Option<FileView> {
        let file = self.files.get(&id)?;
        let requests = self.requests.values().filter(|request| request.file == id).count();
        Some(FileView { size: file.size.map(ByteCount::new), got: file.got.count(), requests, ranged: file.ranged })
    }

    /// The file of a request; `None` if the request is no longer active.
    pub fn file_of(&self, id: RequestId) -> Option<FileId> {
        self.requests.get(&id).map(|request| request.file)
    }

    /// The parts of a file that are present.
    pub fn got(&self, id: FileId) -> Option<&Spans> {
        self.files.get(&id).map(|file| &file.got)
    }

    /// Current state of a link.
    pub fn link(&self, now: Time, id: LinkId) -> Option<LinkView> {
        let link = self.links.get(id.0)?;
        Some(LinkView {
            moved: ByteCount::new(link.moved),
            twice: ByteCount::new(link.twice),
            rate: link.meter.rate(now),
            latency: link.latency,
            requests: self.requests.values().filter(|request| request.link == id).count(),
            used: link.usable(now),
        })
    }

    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Stops all requests of a file except `but`.
    pub(crate) fn stop_all(&mut self, now: Time, id: FileId, but: Option<RequestId>) {
        let there: Vec<RequestId> = self.requests.iter().filter(|(_, request)| request.file == id).map(|(id, _)| *id).collect();
        for request in there.into_iter().filter(|request| Some(*request) != but) {
            if let Some(request) = self.requests.get_mut(&request) {
                request.requested_end = request.requested_end.max(request.at + 1);
            }
            self.finish_request(now, request);
        }
    }

    /// Closes a connection on the engine's own initiative.
    pub(crate) fn close(&mut self, now: Time, id: ConnectionId) {
        let Some(connection) = self.connections.remove(&id) else { return };
        for request in connection.requests {
            // Closing the connection stops its requests.
            if let Some(request) = self.requests.get_mut(&request) {
                request.requested_end = request.at;
            }
            self.finish_request(now, request);
        }
        self.actions.push_back(Action::Close { connection: id });
    }

    pub(crate) fn fail_request(&mut self, now: Time, id: RequestId, failure: Failure) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let (file_id, source, link, whole, answered) = (request.file, request.source, request.link, request.whole, request.head);
        let barren = request.at == request.from;
        // A failure reported by the caller has ended the answer. An answer that the engine rejects must still be stopped.
        request.requested_end = request.requested_end.max(request.at + 1);
        let connection = request.connection;
        self.finish_request(now, id);
        let server = self.connections.get(&connection).map(|connection| connection.server);
        let several = self.files.get(&file_id).is_some_and(|file| file.sources().count() > 1);
        if self.fail_adopted(now, file_id, id, failure, barren) {
            return;
        }
        match failure {
            Failure::Moved => return,
            Failure::Changed => return self.give_up(now, file_id, Cause::Changed),
            Failure::Source => {
                let Some(file) = self.files.get_mut(&file_id) else { return };
                file.good[source.0] = false;
                if file.sources().next().is_none() {
                    self.give_up(now, file_id, Cause::Source);
                }
                return;
            }
            Failure::NoRanges if several => {
                if let Some(file) = self.files.get_mut(&file_id) {
                    file.good[source.0] = false;
                }
                return;
            }
            Failure::NoRanges => {
                self.stop_all(now, file_id, None);
                if let Some(file) = self.files.get_mut(&file_id) {
                    file.ranged = Some(false);
                }
            }
            Failure::Refused { wait } => {
                let Some(server) = server else { return self.count_failure(now, file_id) };
                let at_work = self
                    .connections
                    .values()
                    .filter(|connection| (connection.link, connection.server) == (link, server) && !connection.requests.is_empty())
                    .count();
                // The active requests may be the reason for the refusal. Count a failed attempt only when there are none.
                let elsewhere = self.requests.values().any(|other| other.file == file_id);
                let reach = self.reach.entry((link, server)).or_default();
                reach.limit = Some(at_work.max(1));
                if at_work == 0 {
                    reach.on_failure(now, wait);
                }
                if at_work > 0 || elsewhere {
                    return;
                }
            }
            Failure::Lost => {
                if let Some(server) = server.filter(|_| !answered) {
                    self.reach.entry((link, server)).or_default().on_failure(now, None);
                }
            }
        }
        if whole {
            self.restart(now, file_id);
        }
        // Many requests may break at once, so only those that delivered nothing count.
        if barren {
            self.count_failure(now, file_id);
        }
    }

    /// Restarts a file that comes in one piece.
    pub(crate) fn restart(&mut self, now: Time, id: FileId) {
        let Some(file) = self.files.get_mut(&id) else { return };
        if file.joinable || file.got.is_empty() {
            return;
        }
        if file.taken > 0 {
            return self.give_up(now, id, Cause::Unjoinable);
        }
        file.got = Spans::default();
        file.restarts += 1;
        if file.restarts > MAX_RESTARTS {
            return self.give_up(now, id, Cause::Tries);
        }
        self.actions.push_back(Action::Restart { file: id });
    }

    pub(crate) fn count_failure(&mut self, now: Time, id: FileId) {
        let Some(file) = self.files.get_mut(&id) else { return };
        file.failures += 1;
        if file.failures >= self.config.tries && file.unproven() {
            self.keep_whole(now, id, true);
        } else if file.failures >= self.config.tries {
            self.give_up(now, id, Cause::Tries);
        }
    }

    pub(crate) fn give_up(&mut self, now: Time, id: FileId, cause: Cause) {
        self.end(now, id, Err(cause));
    }

    /// Ends a file that is complete.
    pub(crate) fn end_if_done(&mut self, now: Time, id: FileId) {
        if self.files.get(&id).is_some_and(File::done) {
            self.end(now, id, Ok(()));
        }
    }

    fn end(&mut self, now: Time, id: FileId, outcome: Result<(), Cause>) {
        let Some(file) = self.files.get_mut(&id).filter(|file| file.ended.is_none()) else { return };
        file.ended = Some(outcome);
        file.active = false;
        let (flow, size) = (file.flow, ByteCount::new(file.size.unwrap_or(0)));
        let _ = self.midrr.set_head(flow, None);
        self.stop_all(now, id, None);
        self.dirty = true;
        self.actions.push_back(match outcome {
            Ok(()) => Action::Done { file: id, size },
            Err(cause) => Action::GiveUp { file: id, cause },
        });
    }
}
