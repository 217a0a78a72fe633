//! Planning of requests: files by miDRR, sizes by rates, and the end game.

use std::collections::BTreeSet;
use std::time::Duration;

use braid_decide::midrr::FlowKey;
use braid_model::{ByteCount, LinkSet, Time};

use crate::engine::{Connection, ENDLESS, Engine, Request};
use crate::file::File;
use crate::meter::Meter;
use crate::spans::Span;
use crate::types::{Action, Cause, ConnectionId, FileId, LinkId, RequestId, ServerId};

/// Minimum size of a request, and minimum size of a part taken over in the end game.
pub(crate) const MIN_REQUEST: u64 = 64 * 1024;
const MIN_TAKEOVER: u64 = 16 * 1024;
/// Maximum size of a request. miDRR does not accept larger heads.
const MAX_REQUEST: u64 = 16 * 1024 * 1024;
/// Size of the first request of a file over a link of unknown rate.
pub(crate) const FIRST_REQUEST: u64 = 256 * 1024;
/// Minimum and maximum target duration of a request.
const MIN_DURATION: Duration = Duration::from_millis(300);
const MAX_DURATION: Duration = Duration::from_secs(4);
/// Minimum target duration of a request if a reader needs the file in order.
const READER_MIN_DURATION: Duration = Duration::from_millis(250);
/// Minimum gain in time of an end-game takeover.
const MIN_GAIN: Duration = Duration::from_millis(50);
/// A request is cut if it would take this many times as long as everything that is left, plus this much.
const LATE_FACTOR: f64 = 1.5;
const LATE_EXTRA: Duration = Duration::from_millis(500);
/// Interval between end-game reviews.
const REVIEW_INTERVAL: Duration = Duration::from_millis(100);
/// An idle connection is closed after this time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
/// A request that delivers nothing for this long fails, and its connection is closed.
const DEAD_TIMEOUT: Duration = Duration::from_secs(15);

/// A possible takeover in the end game.
struct Takeover {
    victim: RequestId,
    /// The range that the idle connection requests.
    span: Span,
    /// The victim also continues to the end.
    duplicate: bool,
    gain: f64,
}

impl Engine {
    /// Handles everything that took too long.
    pub(crate) fn handle_overdue(&mut self, now: Time) {
        self.review = None;
        self.check_requests(now);
        self.check_files(now);
        self.check_connections(now);
    }

    fn check_requests(&mut self, now: Time) {
        let (mut stalled, mut dead) = (Vec::new(), BTreeSet::new());
        let mut next: Option<Time> = None;
        for (id, request) in &self.requests {
            // A request behind another one on its connection waits for that one.
            if self.connections.get(&request.connection).is_some_and(|connection| connection.requests.first() != Some(id))
                || self.ignores_silence(request)
            {
                continue;
            }
            let timeout = self.links[request.link.0].stall();
            let stall = request.last_event + timeout;
            let end = request.last_event + DEAD_TIMEOUT.max(timeout * 2);
            if end <= now {
                dead.insert(request.connection);
            } else if !request.stalled && stall <= now {
                stalled.push(*id);
            }
            let due = if request.stalled || stall <= now { end } else { stall };
            next = Some(next.map_or(due, |next| next.min(due)));
        }
        for id in stalled {
            self.stall(now, id);
        }
        for connection in dead {
            self.on_connection_lost(now, connection);
            self.actions.push_back(Action::Close { connection });
        }
        next.into_iter().for_each(|next| self.review_at(next));
    }

    /// Handles a stalled request: its range becomes free for others.
    fn stall(&mut self, now: Time, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.stalled = true;
        let (link, file_id, rest, whole) = (request.link, request.file, request.rest(), request.whole);
        if whole {
            // A file in one piece cannot continue elsewhere. The request gets more time, and then the file restarts.
            return;
        }
        if let Some(file) = self.files.get_mut(&file_id) {
            let free = file.got.without(rest);
            if file.size.is_some() {
                free.into_iter().for_each(|span| file.free.insert(span));
            }
        }
        for other in self.requests.values().filter(|other| other.file == file_id && !other.stalled) {
            if let Some(file) = self.files.get_mut(&file_id) {
                file.free.remove(other.rest());
            }
        }
        if self.requests.values().filter(|other| other.link == link).all(|other| other.stalled) {
            self.links[link.0].on_silence(now);
            self.midrr.forget();
        }
    }

    fn check_files(&mut self, now: Time) {
        let timeout = self.config.timeout;
        let mut free = self.config.files_at_once.saturating_sub(self.files.values().filter(|file| file.active).count());
        for file in self.files.values_mut().filter(|file| !file.active && file.ended.is_none()) {
            if free == 0 {
                break;
            }
            (file.active, file.progress) = (true, now);
            free -= 1;
        }
        let waits = |file: &File| file.active && file.ended.is_none();
        // A reader that takes nothing is not a stall.
        let blocked = |file: &File| file.size.is_some() && file.open() == 0;
        let mut silent = Vec::new();
        let mut next: Option<Time> = None;
        for (id, file) in self.files.iter_mut().filter(|(_, file)| waits(file)) {
            let waits = |request: &Request| request.file == *id && request.at < file.limit();
            if file.kept_whole() || blocked(file) && !self.requests.values().any(waits) {
                file.progress = now;
            }
            let due = file.progress + timeout;
            if due <= now {
                silent.push(*id);
            } else {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        next.into_iter().for_each(|next| self.review_at(next));
        silent.into_iter().for_each(|id| self.give_up(now, id, Cause::Silent));
    }

    fn check_connections(&mut self, now: Time) {
        let wanted: BTreeSet<ServerId> =
            self.files.values().filter(|file| file.ended.is_none()).flat_map(|file| file.sources().map(|(_, server)| server)).collect();
        let idle = |connection: &Connection| {
            connection.connected
                && connection.requests.is_empty()
                && (now.since(connection.since) > IDLE_TIMEOUT || !wanted.contains(&connection.server))
        };
        let idle: Vec<ConnectionId> = self.connections.iter().filter(|(_, connection)| idle(connection)).map(|(id, _)| *id).collect();
        idle.into_iter().for_each(|connection| self.close(now, connection));
        for link in 0..self.links.len() {
            let busy = self.at_work(LinkId(link));
            self.links[link].on_busy(now, busy);
            let long = self.files.values().filter(|file| file.active && file.setup.links.contains(link)).map(File::open).sum::<u64>();
            let long = self.links[link].rate(now).is_some_and(|rate| rate.time_for(ByteCount::new(long)) > Duration::from_secs(1));
            let most = self.config.connections_most;
            self.links[link].climb(now, busy, most, long);
            if busy > 0 && long {
                self.review_at(now + Duration::from_millis(500));
            }
        }
    }

    fn review_at(&mut self, at: Time) {
        self.review = Some(self.review.map_or(at, |review| review.min(at)));
    }

    /// Number of occupied slots of a link: connections that are busy or being established.
    fn at_work(&self, link: LinkId) -> usize {
        self.connections
            .values()
            .filter(|connection| connection.link == link && !(connection.connected && connection.requests.is_empty()))
            .count()
    }

    /// Gives every link requests up to its limit.
    pub(crate) fn plan(&mut self, now: Time) {
        self.cut_slow_requests(now);
        let mut order: Vec<usize> = (0..self.links.len()).collect();
        let rate = |link: &usize| std::cmp::Reverse(self.links[*link].rate(now));
        order.sort_by_key(rate);
        for link in order {
            self.plan_link(now, LinkId(link));
        }
        if self.is_exhausted(now) {
            let stuck: Vec<FileId> = self.files.iter().filter(|(_, file)| file.active && file.ended.is_none()).map(|(id, _)| *id).collect();
            stuck.into_iter().for_each(|id| self.give_up(now, id, Cause::Budget));
        }
    }

    /// If a link has become slower, a request may last long after everything else has arrived. Such a request keeps only what it can deliver until
    /// then. The end game does not handle this case, because there only idle connections take over, each from one request.
    fn cut_slow_requests(&mut self, now: Time) {
        if self.is_contended() {
            return;
        }
        let cuts: Vec<_> = self.files.iter().flat_map(|(id, file)| self.late_requests(now, *id, file)).collect();
        for (id, connection, keep) in cuts {
            // The server has already sent part of the range that is cut off, so a request behind it would be answered late.
            let behind: Vec<RequestId> =
                self.connections.get(&connection).map_or(Vec::new(), |connection| connection.requests[1..].to_vec());
            behind.into_iter().for_each(|request| self.finish_request(now, request));
            let Some(request) = self.requests.get_mut(&id) else { continue };
            let old = request.rest();
            request.end = request.at + keep;
            let (file, rest) = (request.file, Span::raw(request.end, old.end));
            self.release(file, rest);
        }
    }

    /// The requests of a file that would end late, with their connections and the number of bytes that each can still deliver in time.
    fn late_requests(&self, now: Time, id: FileId, file: &File) -> Vec<(RequestId, ConnectionId, u64)> {
        if !file.active || file.ended.is_some() || file.ranged != Some(true) || file.unproven() || file.setup.window.is_some() {
            return Vec::new();
        }
        let ours = |request: &Request| request.file == id && !request.stalled && !request.whole;
        let asked: u64 = self.requests.values().filter(|request| ours(request)).map(|request| request.rest().size()).sum();
        let time = (file.free.count().get() + asked) as f64 / self.total_rate(now, file).max(1.0);
        let keeps = |request: &Request| {
            let (pace, rest) = (request.meter.rate(now)?.bps() as f64 / 8.0, request.rest().size());
            let keep = ((pace * time) as u64).max(MIN_REQUEST);
            let late = rest as f64 > pace * (time * LATE_FACTOR + LATE_EXTRA.as_secs_f64());
            (late && keep + MIN_REQUEST * 2 < rest).then_some(keep)
        };
        let at_work = self.requests.iter().filter(|(_, request)| ours(request) && !self.queued(request));
        at_work.filter_map(|(id, request)| Some((*id, request.connection, keeps(request)?))).collect()
    }

    /// Total rate of all usable links of `file`, in bytes per second.
    fn total_rate(&self, now: Time, file: &File) -> f64 {
        (0..self.links.len())
            .filter(|other| file.setup.links.contains(*other) && self.links[*other].usable(now))
            .filter_map(|other| self.links[other].rate(now))
            .map(|rate| rate.bps() as f64 / 8.0)
            .sum()
    }

    /// Whether allowances or the budget prevent every link from receiving more, and no request is active.
    fn is_exhausted(&self, _: Time) -> bool {
        let limited = |link: &crate::link::ScheduledLink| {
            link.setup.allowance.is_some() || self.config.budget.is_some() && link.setup.price_per_gb > 0.0
        };
        let empty = |index: usize| limited(&self.links[index]) && self.allowed(LinkId(index)) < MIN_TAKEOVER;
        !self.links.is_empty() && self.requests.is_empty() && (0..self.links.len()).all(empty)
    }

    fn plan_link(&mut self, now: Time, link: LinkId) {
        let there = &self.links[link.0];
        if !there.up {
            return;
        }
        if let Some(silent) = there.silent
            && silent.again > now
        {
            return self.review_at(silent.again);
        }
        let trying = there.silent.is_some();
        self.pipeline(now, link);
        loop {
            let request_limit = if trying { 1 } else { self.request_limit(link) };
            let stuck = if trying {
                self.connections.values().filter(|connection| connection.link == link && !connection.requests.is_empty()).count()
            } else {
                0
            };
            if self.at_work(link).saturating_sub(stuck) >= request_limit {
                return;
            }
            if !self.assign(now, link) && !self.take_over(now, link) {
                break;
            }
        }
        self.preconnect(now, link);
        let later = self.reach.iter().filter(|((of, _), reach)| *of == link && reach.not_before > now).map(|(_, reach)| reach.not_before);
        later.min().into_iter().for_each(|at| self.review_at(at));
    }

    /// Maximum number of concurrent requests of a link: many small files need more than a few large ones.
    fn request_limit(&self, link: LinkId) -> usize {
        let small = |file: &&File| file.active && file.setup.links.contains(link.0) && file.size.is_none_or(|size| size <= FIRST_REQUEST);
        let small = self.files.values().filter(small).count().div_ceil(self.links.len().max(1));
        self.links[link.0].request_limit.max(small).min(self.config.connections_most)
    }

    /// Number of bytes that may still be requested over a link, by its allowance and the budget.
    fn allowed(&self, link: LinkId) -> u64 {
        let pending =
            |link: LinkId| self.requests.values().filter(|request| request.link == link).map(|request| request.rest().size()).sum::<u64>();
        let there = &self.links[link.0];
        let budget = self.config.budget.filter(|_| there.setup.price_per_gb > 0.0).map(|budget| {
            let spent = |(index, other): (usize, &crate::link::ScheduledLink)| {
                (other.moved + pending(LinkId(index))) as f64 / 1e9 * other.setup.price_per_gb
            };
            let left = budget - self.links.iter().enumerate().map(spent).sum::<f64>();
            // `as` saturates.
            (left / there.setup.price_per_gb * 1e9) as u64
        });
        there.left(pending(link), budget)
    }

    /// Gives one file a range over `link`, which must be below its limit of requests. Returns false if there is nothing to give.
    fn assign(&mut self, now: Time, link: LinkId) -> bool {
        let allowed = self.allowed(link);
        let here = self.files.iter().filter(|(_, file)| file.setup.links.contains(link.0));
        let heads: Vec<(FlowKey, FileId, Option<u64>)> =
            here.map(|(id, file)| (file.flow, *id, self.head(now, link, *id, file, allowed))).collect();
        heads.iter().for_each(|(_, id, size)| self.offer(*id, link, *size));
        let Some(grant) = self.midrr.next(link.0) else { return false };
        let Some(file) = heads.into_iter().find(|(flow, _, _)| *flow == grant.flow).map(|(_, file, _)| file) else { return false };
        let Some((server, connection)) = self.find_server(now, link, &self.files[&file]) else { return false };
        match connection {
            Some(connection) => self.ask_next(now, connection, file, grant.size.get()),
            None => self.connect(now, link, server),
        }
        true
    }

    /// Sets the head of `file` in miDRR to the size of its request on `link`. A file that has bytes to request, but not on this link now, keeps its
    /// deficit.
    fn offer(&mut self, id: FileId, link: LinkId, size: Option<u64>) {
        let Some(file) = self.files.get(&id) else { return };
        let all = file.setup.links;
        let _ = match size {
            None if file.open() > 0 => self.midrr.narrow(file.flow, all - LinkSet::only(link.0)),
            _ => self.midrr.narrow(file.flow, all).and_then(|()| self.midrr.set_head(file.flow, size.map(ByteCount::new))),
        };
    }

    /// Size of the request for `file` on `link`; `None` if there is nothing to request, or if no server is available now.
    fn head(&self, now: Time, link: LinkId, id: FileId, file: &File, allowed: u64) -> Option<u64> {
        if !file.active || file.ended.is_some() || allowed < MIN_TAKEOVER {
            return None;
        }
        let mut of_file = self.requests.values().filter(|request| request.file == id);
        let size = match file.ranged {
            // One initial request at a time, unless it stalls.
            None if of_file.any(|request| !request.stalled) => return None,
            None => self.links[link.0].share(now).map_or(FIRST_REQUEST, |share| share as u64).clamp(FIRST_REQUEST / 2, MAX_REQUEST / 4),
            Some(false) if of_file.any(|_| true) || !self.is_fastest(now, link, file) => return None,
            Some(false) if file.size.unwrap_or(ENDLESS) > allowed => return None,
            Some(false) => MAX_REQUEST,
            Some(true) if file.unproven() => self.trial(now, link, id, file)?.size(),
            Some(true) => self.size(now, link, file)?,
        };
        self.find_server(now, link, file)?;
        let window = file.setup.window.map_or(MAX_REQUEST, ByteCount::get);
        Some(size.min(allowed).min(window).clamp(1, MAX_REQUEST))
    }

    /// Whether no other usable link of the file has a higher known rate.
    fn is_fastest(&self, now: Time, link: LinkId, file: &File) -> bool {
        let mine = self.links[link.0].rate(now);
        let others = (0..self.links.len()).filter(|other| file.setup.links.contains(*other) && self.links[*other].usable(now));
        others.filter_map(|other| self.links[other].rate(now)).max() <= mine
    }

    /// Size of the next range of `file` over `link`; `None` if nothing is left to request.
    fn size(&self, now: Time, link: LinkId, file: &File) -> Option<u64> {
        let gap = file.free.first_below(file.limit())?;
        let unknown = if file.setup.window.is_some() { MIN_REQUEST } else { FIRST_REQUEST };
        let Some(share) = self.links[link.0].share(now) else { return Some(gap.size().min(unknown)) };
        let open = file.open();
        let total_rate = self.total_rate(now, file);
        // If answers wait in a queue, the link has enough work, so only the idle latency counts.
        let idle = self.links[link.0].latency_idle();
        let shortest = MIN_DURATION.max(idle * 3).as_secs_f64();
        let time = match file.setup.window {
            // A reader cannot use what comes behind a gap, so parallel ranges are short.
            Some(_) => READER_MIN_DURATION.max(idle * 4).as_secs_f64(),
            // If files share links, requested bytes cannot be redistributed.
            None if self.is_contended() => shortest,
            None => (open as f64 / total_rate.max(1.0) / 3.0).clamp(shortest, MAX_DURATION.as_secs_f64().max(shortest)),
        };
        // A rate that was configured but not measured may be far off.
        let most = if self.links[link.0].meter.rate(now).is_some() { MAX_REQUEST } else { FIRST_REQUEST * 4 };
        let mut size = ((share * time) as u64).clamp(MIN_REQUEST, most);
        if let Some(window) = file.setup.window {
            let turn = share * time * self.stagger(now, link, time);
            size = (turn as u64).clamp(MIN_TAKEOVER, most).min((window.get() / 8).max(MIN_TAKEOVER));
        }
        Some(if gap.size() < size + size / 3 { gap.size() } else { size }.min(MAX_REQUEST))
    }

    /// The fraction of a range to request over `link` so that its requests end at different times: less if other requests have just started.
    /// Otherwise all of them would wait for their next answers at the same time.
    fn stagger(&self, now: Time, link: LinkId, time: f64) -> f64 {
        let request_limit = self.links[link.0].request_limit.max(1) as f64;
        let concurrent = |request: &&Request| request.link == link && now.since(request.asked).as_secs_f64() < time / request_limit / 2.0;
        let concurrent = self.requests.values().filter(concurrent).count() as f64;
        (1.0 - concurrent / request_limit).max(1.0 / request_limit)
    }

    /// Whether several files have bytes to request.
    fn is_contended(&self) -> bool {
        self.files.values().filter(|file| file.active && file.ended.is_none() && file.open() > 0).count() > 1
    }

    /// The least busy server of the file over `link`, with an idle connection, or with none if a new connection may be opened.
    fn find_server(&self, now: Time, link: LinkId, file: &File) -> Option<(ServerId, Option<ConnectionId>)> {
        let ways = file.sources().filter_map(|(_, server)| {
            let (mut here, mut idle, mut busy, mut coming, mut all) = (0, None, 0, 0, 0);
            for (id, connection) in self.connections.iter().filter(|(_, connection)| connection.server == server) {
                all += usize::from(!connection.connected || !connection.requests.is_empty());
                if connection.link == link {
                    here += 1;
                    busy += usize::from(!connection.requests.is_empty());
                    coming += usize::from(!connection.connected);
                    idle = if connection.connected && connection.requests.is_empty() { Some(*id) } else { idle };
                }
            }
            let reach = self.reach.get(&(link, server));
            let limit = reach.and_then(|reach| reach.limit).unwrap_or(usize::MAX);
            // A server that failed is tried with a single connection first.
            let barred = reach.is_some_and(|reach| reach.not_before > now || (reach.failing() && idle.is_none() && coming > 0));
            let open = !barred && busy < limit && (idle.is_some() || here < limit);
            open.then_some((all, server, idle))
        });
        ways.min_by_key(|(all, _, _)| *all).map(|(_, server, idle)| (server, idle))
    }

    fn connect(&mut self, now: Time, link: LinkId, server: ServerId) {
        let connection = ConnectionId(self.fresh_id());
        self.connections
            .insert(connection, Connection { link, server, since: now, connected: false, depth: 1, requests: Vec::new(), once: false });
        self.reach.entry((link, server)).or_default();
        self.actions.push_back(Action::Connect { connection, link, server });
    }

    /// Opens one connection over a link that waits for more information about a file.
    fn preconnect(&mut self, now: Time, link: LinkId) {
        if self.files.values().filter(|file| file.active).count() > 2 || self.connections.values().any(|connection| connection.link == link)
        {
            return;
        }
        let waits = |file: &File| file.active && (file.ranged.is_none() || file.unproven()) && file.setup.links.contains(link.0);
        let find_server = self.files.values().filter(|file| waits(file)).find_map(|file| self.find_server(now, link, file));
        if let Some((server, None)) = find_server {
            self.connect(now, link, server);
        }
    }

    /// Requests the lowest free part of a file.
    fn ask_next(&mut self, now: Time, connection: ConnectionId, id: FileId, size: u64) {
        let Some(file) = self.files.get(&id) else { return };
        if file.unproven() {
            let link = self.connections.get(&connection).map(|connection| connection.link);
            let trial = link.and_then(|link| self.trial(now, link, id, file));
            return trial.into_iter().for_each(|span| self.ask(now, connection, id, Some(span)));
        }
        let span = match (file.ranged, file.free.first_below(file.limit())) {
            (Some(false), _) => None,
            (None, _) => Some(Span::raw(0, size)),
            (Some(true), Some(gap)) => Some(Span::raw(gap.start, gap.end.min(gap.start + size))),
            (Some(true), None) => return,
        };
        self.ask(now, connection, id, span);
    }

    fn ask(&mut self, now: Time, connection_id: ConnectionId, id: FileId, span: Option<Span>) {
        let request = RequestId(self.fresh_id());
        let (Some(connection), Some(file)) = (self.connections.get_mut(&connection_id), self.files.get_mut(&id)) else { return };
        let Some(source) = file.source_at(connection.server) else { return };
        connection.requests.push(request);
        connection.since = now;
        let whole = Span::raw(0, file.size.unwrap_or(ENDLESS));
        let range = span.unwrap_or(whole);
        file.free.remove(range);
        self.links[connection.link.0].meter.begin(now);
        let entry = Request {
            connection: connection_id,
            link: connection.link,
            file: id,
            source,
            from: range.start,
            at: range.start,
            end: range.end,
            requested_end: range.end,
            whole: span.is_none(),
            asked: now,
            last_event: now,
            head: false,
            meter: Meter::default(),
            stalled: false,
        };
        self.requests.insert(request, entry);
        self.actions.push_back(Action::Ask { request, connection: connection_id, file: id, source, span });
        let timeout = self.links[self.requests[&request].link.0].stall();
        self.review_at(now + timeout);
    }

    /// On connections with overlapping requests: requests the next range before the last one ends.
    fn pipeline(&mut self, now: Time, link: LinkId) {
        let share = self.links[link.0].share(now).unwrap_or(0.0);
        let ahead = share * self.links[link.0].latency().as_secs_f64() * 1.5;
        let ends = |connection: &Connection| {
            let rest: u64 = connection.requests.iter().filter_map(|id| self.requests.get(id)).map(|request| request.rest().size()).sum();
            let flows = connection
                .requests
                .iter()
                .filter_map(|id| self.requests.get(id))
                .all(|request| request.head && !request.stalled && !request.whole && request.requested_end <= request.end);
            flows && (rest as f64) < ahead
        };
        let connections = self.connections.iter().filter(|(_, connection)| {
            connection.link == link && connection.connected && (1..connection.depth).contains(&connection.requests.len())
        });
        let connections: Vec<(ConnectionId, ServerId)> =
            connections.filter(|(_, connection)| ends(connection)).map(|(id, connection)| (*id, connection.server)).collect();
        let allowed = self.allowed(link);
        for (connection, server) in connections {
            let fits = |file: &File| {
                let ready = file.active && file.ended.is_none() && allowed >= MIN_TAKEOVER;
                ready && file.ranged == Some(true) && !file.unproven() && file.source_at(server).is_some()
            };
            let here = self.files.iter().filter(|(_, file)| file.setup.links.contains(link.0));
            let size = |file: &File| self.size(now, link, file).filter(|_| fits(file)).map(|size| size.min(allowed));
            let heads: Vec<(FileId, Option<u64>)> = here.map(|(id, file)| (*id, size(file))).collect();
            heads.into_iter().for_each(|(id, size)| self.offer(id, link, size));
            let Some(grant) = self.midrr.next(link.0) else { continue };
            let file = self.files.iter().find(|(_, file)| file.flow == grant.flow).map(|(id, _)| *id);
            file.into_iter().for_each(|file| self.ask_next(now, connection, file, grant.size.get()));
        }
    }

    /// The end game: an idle connection of `link` takes over part of the range that would end last elsewhere.
    fn take_over(&mut self, now: Time, link: LinkId) -> bool {
        if self.requests.values().any(|request| !request.stalled) {
            self.review_at(now + REVIEW_INTERVAL);
        }
        let connections = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.link == link && connection.connected && connection.requests.is_empty());
        let connections: Vec<(ConnectionId, ServerId)> = connections.map(|(id, connection)| (*id, connection.server)).collect();
        let allowed = self.allowed(link);
        let best = connections.iter().filter_map(|(connection, server)| Some((*connection, self.takeover(now, link, *server, allowed)?)));
        let Some((connection, takeover)) = best.max_by(|(_, a), (_, b)| a.gain.total_cmp(&b.gain)) else { return false };
        let Some(victim) = self.requests.get_mut(&takeover.victim) else { return false };
        let file = victim.file;
        if !takeover.duplicate {
            victim.end = takeover.span.start;
        }
        if victim.rest().size() == 0 {
            self.finish_request(now, takeover.victim);
        }
        self.ask(now, connection, file, Some(takeover.span));
        true
    }

    /// The takeover with the greatest gain for a connection of `link` to `server`.
    fn takeover(&self, now: Time, link: LinkId, server: ServerId, allowed: u64) -> Option<Takeover> {
        let taker = &self.links[link.0];
        let busy = self.at_work(link);
        let capacity = taker.capacity(now).map(|rate| rate.bps() as f64 / 8.0);
        // Connections that are slower than their share leave capacity unused, which a new request can use.
        let at_work = self.requests.values().filter(|request| request.link == link && !request.stalled && !self.queued(request));
        let taken: f64 = at_work.map(|request| self.pace(now, request)).sum();
        let spare = capacity.map(|capacity| (capacity - taken).max(0.0));
        let share = capacity.map(|capacity| capacity / (busy + 1) as f64);
        let delay = if busy == 0 { taker.latency_idle() } else { taker.latency() }.as_secs_f64();
        let mut best: Option<Takeover> = None;
        for (id, victim) in &self.requests {
            let Some(file) = self.files.get(&victim.file) else { continue };
            let fits = file.ranged == Some(true)
                && !file.unproven()
                && file.ended.is_none()
                && file.setup.links.contains(link.0)
                && file.source_at(server).is_some();
            if !fits || victim.stalled || victim.whole || file.open() > 0 {
                continue;
            }
            let rest = victim.rest().size() as f64;
            let pace = self.pace(now, victim);
            // A link of unknown rate is assumed to be equally fast.
            let known = if victim.link == link { spare } else { spare.zip(share).map(|(spare, share)| spare.max(share)) };
            let speed = known.unwrap_or(pace.max(MIN_REQUEST as f64));
            let wait = self.wait(now, victim);
            let end = wait + rest / pace.max(1.0);
            // Both end at the same time: delay + x / speed = wait + (rest - x) / pace.
            let x = (speed * (rest + pace * (wait - delay)) / (speed + pace)).min(rest) as u64;
            let x = x.min(allowed);
            let alone = delay + rest / speed.max(1.0);
            // A request that has not started may be taken over completely.
            let takeover = if x >= MIN_TAKEOVER && (x < victim.rest().size() || self.queued(victim)) {
                let gain = end - (delay + x as f64 / speed.max(1.0));
                Takeover { victim: *id, span: Span::raw(victim.end - x, victim.end), duplicate: false, gain }
            } else if self.is_sole_request(victim) && victim.rest().size() <= allowed {
                Takeover { victim: *id, span: victim.rest(), duplicate: true, gain: end - alone }
            } else {
                continue;
            };
            if takeover.gain > MIN_GAIN.as_secs_f64().max(delay / 2.0) && best.as_ref().is_none_or(|best| takeover.gain > best.gain) {
                best = Some(takeover);
            }
        }
        best.filter(|takeover| !takeover.span.is_empty())
    }

    /// The request that is being answered on the connection of `request`: itself, or the one in front of it.
    fn front<'a>(&'a self, request: &'a Request) -> &'a Request {
        let first = self.connections.get(&request.connection).and_then(|connection| connection.requests.first());
        first.and_then(|first| self.requests.get(first)).unwrap_or(request)
    }

    /// Whether a request waits behind another one on its connection.
    fn queued(&self, request: &Request) -> bool {
        !std::ptr::eq(self.front(request), request)
    }

    /// Seconds until a request receives its next byte.
    fn wait(&self, now: Time, request: &Request) -> f64 {
        let front = self.front(request);
        match request.head {
            _ if self.queued(request) => front.rest().size() as f64 / self.pace(now, front).max(1.0),
            true => 0.0,
            false => self.links[request.link.0].latency().as_secs_f64(),
        }
    }

    /// Rate of a request in bytes per second: its own measured rate, else its share of the link.
    pub(crate) fn pace(&self, now: Time, request: &Request) -> f64 {
        let request = self.front(request);
        let on_link = self
            .connections
            .values()
            .filter(|connection| connection.link == request.link && !connection.requests.is_empty())
            .count()
            .max(1);
        let link = self.links[request.link.0].rate(now).map_or(0.0, |rate| rate.bps() as f64 / 8.0 / on_link as f64);
        let own = request.meter.rate(now).map(|rate| rate.bps() as f64 / 8.0);
        // A silence shows a lower rate before the mean does.
        let silence = now.since(request.last_event).as_secs_f64();
        let pace = own.unwrap_or(link);
        if silence > 0.5 { pace.min(MIN_TAKEOVER as f64 / silence) } else { pace }
    }

    /// Whether no other request covers the remaining bytes of this one.
    fn is_sole_request(&self, victim: &Request) -> bool {
        let overlap = |other: &Request| other.at.max(victim.at) < other.end.min(victim.end);
        self.requests.values().filter(|other| other.file == victim.file && overlap(other)).count() <= 1
    }
}
