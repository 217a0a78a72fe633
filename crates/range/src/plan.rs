//! What is asked for next: files by miDRR, sizes by rates, and the end game.

use std::collections::BTreeSet;
use std::time::Duration;

use braid_decide::midrr::FlowKey;
use braid_model::{ByteCount, LinkSet, Time};

use crate::engine::{Connection, ENDLESS, Engine, Request};
use crate::file::File;
use crate::meter::Meter;
use crate::spans::Span;
use crate::types::{Action, Cause, ConnectionId, FileId, LinkId, RequestId, ServerId};

/// The least that is worth a request of its own, and the least of a part taken over.
pub(crate) const LEAST: u64 = 64 * 1024;
const LEAST_STOLEN: u64 = 16 * 1024;
/// The most that is asked for at once; miDRR knows no larger heads.
const MOST: u64 = 16 * 1024 * 1024;
/// Asked for first of a file, over a link of unknown rate.
pub(crate) const FIRST: u64 = 256 * 1024;
/// The shortest and the longest time that a request is to take.
const SHORTEST: Duration = Duration::from_millis(300);
const LONGEST: Duration = Duration::from_secs(4);
/// The shortest time of one where a reader wants all in order.
const READER: Duration = Duration::from_millis(250);
/// What taking over must gain.
const GAIN: Duration = Duration::from_millis(50);
/// A request is cut that would take so many times as long as all that is left, and so much longer.
const LATE: f64 = 1.5;
const LATE_LEAST: Duration = Duration::from_millis(500);
/// How often the end game is looked at again.
const REVIEW: Duration = Duration::from_millis(100);
/// A connection that stands idle for so long is closed.
const IDLE: Duration = Duration::from_secs(20);
/// A request that brings nothing for so long is stopped and its connection closed.
const DEAD: Duration = Duration::from_secs(15);

/// What a link could do in the end game.
struct Theft {
    victim: RequestId,
    /// What the thief asks for.
    span: Span,
    /// The victim goes on to the end too.
    twice: bool,
    gain: f64,
}

impl Engine {
    /// Looks for what took too long.
    pub(crate) fn watch(&mut self, now: Time) {
        self.review = None;
        self.watch_requests(now);
        self.watch_files(now);
        self.watch_connections(now);
    }

    fn watch_requests(&mut self, now: Time) {
        let (mut stalled, mut dead) = (Vec::new(), BTreeSet::new());
        let mut next: Option<Time> = None;
        for (id, request) in &self.requests {
            // A request behind another on its connection waits for that one.
            if self.connections.get(&request.connection).is_some_and(|connection| connection.requests.first() != Some(id))
                || self.excused(request)
            {
                continue;
            }
            let patience = self.links[request.link.0].stall();
            let stall = request.heard + patience;
            let end = request.heard + DEAD.max(patience * 2);
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
        next.into_iter().for_each(|next| self.remind(next));
    }

    /// A request brings nothing: its range is free for others.
    fn stall(&mut self, now: Time, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.stalled = true;
        let (link, file_id, rest, whole) = (request.link, request.file, request.rest(), request.whole);
        if whole {
            // What comes in one piece cannot go on elsewhere: it is given more time, and then begun anew.
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

    fn watch_files(&mut self, now: Time) {
        let patience = self.config.patience;
        let mut free = self.config.files_at_once.saturating_sub(self.files.values().filter(|file| file.active).count());
        for file in self.files.values_mut().filter(|file| !file.active && file.ended.is_none()) {
            if free == 0 {
                break;
            }
            (file.active, file.progress) = (true, now);
            free -= 1;
        }
        let waits = |file: &File| file.active && file.ended.is_none();
        // A reader that takes nothing is no silence.
        let blocked = |file: &File| file.size.is_some() && file.open() == 0;
        let mut silent = Vec::new();
        let mut next: Option<Time> = None;
        for (id, file) in self.files.iter_mut().filter(|(_, file)| waits(file)) {
            let waits = |request: &Request| request.file == *id && request.at < file.limit();
            if file.kept_whole() || blocked(file) && !self.requests.values().any(waits) {
                file.progress = now;
            }
            let due = file.progress + patience;
            if due <= now {
                silent.push(*id);
            } else {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        next.into_iter().for_each(|next| self.remind(next));
        silent.into_iter().for_each(|id| self.give_up(now, id, Cause::Silent));
    }

    fn watch_connections(&mut self, now: Time) {
        let wanted: BTreeSet<ServerId> =
            self.files.values().filter(|file| file.ended.is_none()).flat_map(|file| file.sources().map(|(_, server)| server)).collect();
        let idle = |connection: &Connection| {
            connection.connected
                && connection.requests.is_empty()
                && (now.since(connection.since) > IDLE || !wanted.contains(&connection.server))
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
                self.remind(now + Duration::from_millis(500));
            }
        }
    }

    fn remind(&mut self, at: Time) {
        self.review = Some(self.review.map_or(at, |review| review.min(at)));
    }

    /// Places of a link that are taken: connections at work or on the way.
    fn at_work(&self, link: LinkId) -> usize {
        self.connections
            .values()
            .filter(|connection| connection.link == link && !(connection.connected && connection.requests.is_empty()))
            .count()
    }

    /// Gives every link requests up to its limit.
    pub(crate) fn plan(&mut self, now: Time) {
        self.cut_slow(now);
        let mut order: Vec<usize> = (0..self.links.len()).collect();
        let rate = |link: &usize| std::cmp::Reverse(self.links[*link].rate(now));
        order.sort_by_key(rate);
        for link in order {
            self.plan_link(now, LinkId(link));
        }
        if self.nobody_may(now) {
            let stuck: Vec<FileId> = self.files.iter().filter(|(_, file)| file.active && file.ended.is_none()).map(|(id, _)| *id).collect();
            stuck.into_iter().for_each(|id| self.give_up(now, id, Cause::Budget));
        }
    }

    /// A request that would go on long after all else is there, since its link has become slower, keeps what it can bring until then. It is
    /// not left to the end game, in which only idle connections take over, each from one request.
    fn cut_slow(&mut self, now: Time) {
        if self.contended() {
            return;
        }
        let cuts: Vec<_> = self.files.iter().flat_map(|(id, file)| self.late(now, *id, file)).collect();
        for (id, connection, keep) in cuts {
            // Behind what the server has sent of the rest already, nothing would come soon.
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

    /// The requests of a file that would end late, their connections, and how many bytes each can still bring in time.
    fn late(&self, now: Time, id: FileId, file: &File) -> Vec<(RequestId, ConnectionId, u64)> {
        if !file.active || file.ended.is_some() || file.ranged != Some(true) || file.doubt() || file.setup.window.is_some() {
            return Vec::new();
        }
        let ours = |request: &Request| request.file == id && !request.stalled && !request.whole;
        let asked: u64 = self.requests.values().filter(|request| ours(request)).map(|request| request.rest().size()).sum();
        let time = (file.free.count().get() + asked) as f64 / self.together(now, file).max(1.0);
        let keeps = |request: &Request| {
            let (pace, rest) = (request.meter.rate(now)?.bps() as f64 / 8.0, request.rest().size());
            let keep = ((pace * time) as u64).max(LEAST);
            let late = rest as f64 > pace * (time * LATE + LATE_LEAST.as_secs_f64());
            (late && keep + LEAST * 2 < rest).then_some(keep)
        };
        let at_work = self.requests.iter().filter(|(_, request)| ours(request) && !self.queued(request));
        at_work.filter_map(|(id, request)| Some((*id, request.connection, keeps(request)?))).collect()
    }

    /// What all usable links bring of `file` together, in bytes per second.
    fn together(&self, now: Time, file: &File) -> f64 {
        (0..self.links.len())
            .filter(|other| file.setup.links.contains(*other) && self.links[*other].usable(now))
            .filter_map(|other| self.links[other].rate(now))
            .map(|rate| rate.bps() as f64 / 8.0)
            .sum()
    }

    /// Whether allowances keep every link from bringing anything, with nothing under way.
    fn nobody_may(&self, _: Time) -> bool {
        let limited = |link: &crate::link::ScheduledLink| {
            link.setup.allowance.is_some() || self.config.budget.is_some() && link.setup.price_per_gb > 0.0
        };
        let empty = |index: usize| limited(&self.links[index]) && self.allowed(LinkId(index)) < LEAST_STOLEN;
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
            return self.remind(silent.again);
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
            if !self.give(now, link) && !self.steal(now, link) {
                break;
            }
        }
        self.warm(now, link);
        let later = self.reach.iter().filter(|((of, _), reach)| *of == link && reach.not_before > now).map(|(_, reach)| reach.not_before);
        later.min().into_iter().for_each(|at| self.remind(at));
    }

    /// How many requests a link has at once: many small files take more than a few large ones.
    fn request_limit(&self, link: LinkId) -> usize {
        let small = |file: &&File| file.active && file.setup.links.contains(link.0) && file.size.is_none_or(|size| size <= FIRST);
        let small = self.files.values().filter(small).count().div_ceil(self.links.len().max(1));
        self.links[link.0].request_limit.max(small).min(self.config.connections_most)
    }

    /// What a link may still be asked for, by its allowance and the budget.
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

    /// Gives one file a range over `link`, which is below its limit of requests; false if there is nothing to give.
    fn give(&mut self, now: Time, link: LinkId) -> bool {
        let allowed = self.allowed(link);
        let here = self.files.iter().filter(|(_, file)| file.setup.links.contains(link.0));
        let heads: Vec<(FlowKey, FileId, Option<u64>)> =
            here.map(|(id, file)| (file.flow, *id, self.head(now, link, *id, file, allowed))).collect();
        heads.iter().for_each(|(_, id, size)| self.offer(*id, link, *size));
        let Some(grant) = self.midrr.next(link.0) else { return false };
        let Some(file) = heads.into_iter().find(|(flow, _, _)| *flow == grant.flow).map(|(_, file, _)| file) else { return false };
        let Some((server, connection)) = self.door(now, link, &self.files[&file]) else { return false };
        match connection {
            Some(connection) => self.ask_next(now, connection, file, grant.size.get()),
            None => self.connect(now, link, server),
        }
        true
    }

    /// Tells miDRR what `file` would ask for on `link`. One that has something, but not here now, keeps what it was given so far.
    fn offer(&mut self, id: FileId, link: LinkId, size: Option<u64>) {
        let Some(file) = self.files.get(&id) else { return };
        let all = file.setup.links;
        let _ = match size {
            None if file.open() > 0 => self.midrr.narrow(file.flow, all - LinkSet::only(link.0)),
            _ => self.midrr.narrow(file.flow, all).and_then(|()| self.midrr.set_head(file.flow, size.map(ByteCount::new))),
        };
    }

    /// What `file` would ask for on `link`; `None`: nothing, or there is no way to its servers now.
    fn head(&self, now: Time, link: LinkId, id: FileId, file: &File, allowed: u64) -> Option<u64> {
        if !file.active || file.ended.is_some() || allowed < LEAST_STOLEN {
            return None;
        }
        let mut of_file = self.requests.values().filter(|request| request.file == id);
        let size = match file.ranged {
            // One first question at a time, unless it stalls.
            None if of_file.any(|request| !request.stalled) => return None,
            None => self.links[link.0].share(now).map_or(FIRST, |share| share as u64).clamp(FIRST / 2, MOST / 4),
            Some(false) if of_file.any(|_| true) || !self.best(now, link, file) => return None,
            Some(false) if file.size.unwrap_or(ENDLESS) > allowed => return None,
            Some(false) => MOST,
            Some(true) if file.doubt() => self.trial(now, link, id, file)?.size(),
            Some(true) => self.size(now, link, file)?,
        };
        self.door(now, link, file)?;
        let window = file.setup.window.map_or(MOST, ByteCount::get);
        Some(size.min(allowed).min(window).clamp(1, MOST))
    }

    /// Whether no other usable link of the file is known to be faster.
    fn best(&self, now: Time, link: LinkId, file: &File) -> bool {
        let mine = self.links[link.0].rate(now);
        let others = (0..self.links.len()).filter(|other| file.setup.links.contains(*other) && self.links[*other].usable(now));
        others.filter_map(|other| self.links[other].rate(now)).max() <= mine
    }

    /// How much of `file` a request over `link` should ask for now; `None`: nothing is left to ask for.
    fn size(&self, now: Time, link: LinkId, file: &File) -> Option<u64> {
        let gap = file.free.first_below(file.limit())?;
        let unknown = if file.setup.window.is_some() { LEAST } else { FIRST };
        let Some(share) = self.links[link.0].share(now) else { return Some(gap.size().min(unknown)) };
        let open = file.open();
        let together = self.together(now, file);
        // While a queue is what an answer waits for, the link has enough to do.
        let idle = self.links[link.0].latency_idle();
        let shortest = SHORTEST.max(idle * 3).as_secs_f64();
        let time = match file.setup.window {
            // A reader gets nothing of what comes behind a gap: ranges beside each other are short.
            Some(_) => READER.max(idle * 4).as_secs_f64(),
            // Where files share links, what was asked for is what cannot be shared out anew.
            None if self.contended() => shortest,
            None => (open as f64 / together.max(1.0) / 3.0).clamp(shortest, LONGEST.as_secs_f64().max(shortest)),
        };
        // What was only heard of may be wrong by much.
        let most = if self.links[link.0].meter.rate(now).is_some() { MOST } else { FIRST * 4 };
        let mut size = ((share * time) as u64).clamp(LEAST, most);
        if let Some(window) = file.setup.window {
            let turn = share * time * self.in_turn(now, link, time);
            size = (turn as u64).clamp(LEAST_STOLEN, most).min((window.get() / 8).max(LEAST_STOLEN));
        }
        Some(if gap.size() < size + size / 3 { gap.size() } else { size }.min(MOST))
    }

    /// What part of a range a request over `link` should ask for so that its requests end in turns: beside a full one that was asked for just now,
    /// less. Otherwise all would wait for their next answers at the same time.
    fn in_turn(&self, now: Time, link: LinkId, time: f64) -> f64 {
        let request_limit = self.links[link.0].request_limit.max(1) as f64;
        let beside = |request: &&Request| request.link == link && now.since(request.asked).as_secs_f64() < time / request_limit / 2.0;
        let beside = self.requests.values().filter(beside).count() as f64;
        (1.0 - beside / request_limit).max(1.0 / request_limit)
    }

    /// Whether several files have bytes to ask for.
    fn contended(&self) -> bool {
        self.files.values().filter(|file| file.active && file.ended.is_none() && file.open() > 0).count() > 1
    }

    /// A way to one of the file's servers over `link`: the one that is least busy, by an idle connection, else by leave to open one.
    fn door(&self, now: Time, link: LinkId, file: &File) -> Option<(ServerId, Option<ConnectionId>)> {
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
            // A server that failed is tried with one connection first.
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

    /// Opens one connection over a link that waits to learn more of a file.
    fn warm(&mut self, now: Time, link: LinkId) {
        if self.files.values().filter(|file| file.active).count() > 2 || self.connections.values().any(|connection| connection.link == link)
        {
            return;
        }
        let waits = |file: &File| file.active && (file.ranged.is_none() || file.doubt()) && file.setup.links.contains(link.0);
        let door = self.files.values().filter(|file| waits(file)).find_map(|file| self.door(now, link, file));
        if let Some((server, None)) = door {
            self.connect(now, link, server);
        }
    }

    /// Asks for the lowest free part of a file.
    fn ask_next(&mut self, now: Time, connection: ConnectionId, id: FileId, size: u64) {
        let Some(file) = self.files.get(&id) else { return };
        if file.doubt() {
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
            told: range.end,
            whole: span.is_none(),
            asked: now,
            heard: now,
            head: false,
            meter: Meter::default(),
            stalled: false,
        };
        self.requests.insert(request, entry);
        self.actions.push_back(Action::Ask { request, connection: connection_id, file: id, source, span });
        let patience = self.links[self.requests[&request].link.0].stall();
        self.remind(now + patience);
    }

    /// Where requests may overlap on a connection: asks for the next range before the last one ends.
    fn pipeline(&mut self, now: Time, link: LinkId) {
        let share = self.links[link.0].share(now).unwrap_or(0.0);
        let ahead = share * self.links[link.0].latency().as_secs_f64() * 1.5;
        let ends = |connection: &Connection| {
            let rest: u64 = connection.requests.iter().filter_map(|id| self.requests.get(id)).map(|request| request.rest().size()).sum();
            let flows = connection
                .requests
                .iter()
                .filter_map(|id| self.requests.get(id))
                .all(|request| request.head && !request.stalled && !request.whole && request.told <= request.end);
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
                let ready = file.active && file.ended.is_none() && allowed >= LEAST_STOLEN;
                ready && file.ranged == Some(true) && !file.doubt() && file.source_at(server).is_some()
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

    /// The end game: an idle connection of `link` takes over part of what would end last elsewhere.
    fn steal(&mut self, now: Time, link: LinkId) -> bool {
        if self.requests.values().any(|request| !request.stalled) {
            self.remind(now + REVIEW);
        }
        let connections = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.link == link && connection.connected && connection.requests.is_empty());
        let connections: Vec<(ConnectionId, ServerId)> = connections.map(|(id, connection)| (*id, connection.server)).collect();
        let allowed = self.allowed(link);
        let best = connections.iter().filter_map(|(connection, server)| Some((*connection, self.theft(now, link, *server, allowed)?)));
        let Some((connection, theft)) = best.max_by(|(_, a), (_, b)| a.gain.total_cmp(&b.gain)) else { return false };
        let Some(victim) = self.requests.get_mut(&theft.victim) else { return false };
        let file = victim.file;
        if !theft.twice {
            victim.end = theft.span.start;
        }
        if victim.rest().size() == 0 {
            self.finish_request(now, theft.victim);
        }
        self.ask(now, connection, file, Some(theft.span));
        true
    }

    /// What taking over would gain most, for a connection of `link` to `server`.
    fn theft(&self, now: Time, link: LinkId, server: ServerId, allowed: u64) -> Option<Theft> {
        let thief = &self.links[link.0];
        let busy = self.at_work(link);
        let capacity = thief.capacity(now).map(|rate| rate.bps() as f64 / 8.0);
        // Connections that are slower than their share leave room: it is not theirs that is taken.
        let at_work = self.requests.values().filter(|request| request.link == link && !request.stalled && !self.queued(request));
        let taken: f64 = at_work.map(|request| self.pace(now, request)).sum();
        let spare = capacity.map(|capacity| (capacity - taken).max(0.0));
        let share = capacity.map(|capacity| capacity / (busy + 1) as f64);
        let delay = if busy == 0 { thief.latency_idle() } else { thief.latency() }.as_secs_f64();
        let mut best: Option<Theft> = None;
        for (id, victim) in &self.requests {
            let Some(file) = self.files.get(&victim.file) else { continue };
            let fits = file.ranged == Some(true)
                && !file.doubt()
                && file.ended.is_none()
                && file.setup.links.contains(link.0)
                && file.source_at(server).is_some();
            if !fits || victim.stalled || victim.whole || file.open() > 0 {
                continue;
            }
            let rest = victim.rest().size() as f64;
            let pace = self.pace(now, victim);
            // A link that nothing is known of may be as good.
            let known = if victim.link == link { spare } else { spare.zip(share).map(|(spare, share)| spare.max(share)) };
            let speed = known.unwrap_or(pace.max(LEAST as f64));
            let wait = self.wait(now, victim);
            let end = wait + rest / pace.max(1.0);
            // Both end at the same time: delay + x / speed = wait + (rest - x) / pace.
            let x = (speed * (rest + pace * (wait - delay)) / (speed + pace)).min(rest) as u64;
            let x = x.min(allowed);
            let alone = delay + rest / speed.max(1.0);
            // What has not begun is taken as a whole, too.
            let theft = if x >= LEAST_STOLEN && (x < victim.rest().size() || self.queued(victim)) {
                let gain = end - (delay + x as f64 / speed.max(1.0));
                Theft { victim: *id, span: Span::raw(victim.end - x, victim.end), twice: false, gain }
            } else if self.alone(victim) && victim.rest().size() <= allowed {
                Theft { victim: *id, span: victim.rest(), twice: true, gain: end - alone }
            } else {
                continue;
            };
            if theft.gain > GAIN.as_secs_f64().max(delay / 2.0) && best.as_ref().is_none_or(|best| theft.gain > best.gain) {
                best = Some(theft);
            }
        }
        best.filter(|theft| !theft.span.is_empty())
    }

    /// The request that a connection is at, where this one waits behind it; else this one.
    fn front<'a>(&'a self, request: &'a Request) -> &'a Request {
        let first = self.connections.get(&request.connection).and_then(|connection| connection.requests.first());
        first.and_then(|first| self.requests.get(first)).unwrap_or(request)
    }

    /// Whether a request waits behind another on its connection.
    fn queued(&self, request: &Request) -> bool {
        !std::ptr::eq(self.front(request), request)
    }

    /// Seconds until a request brings its next byte.
    fn wait(&self, now: Time, request: &Request) -> f64 {
        let front = self.front(request);
        match request.head {
            _ if self.queued(request) => front.rest().size() as f64 / self.pace(now, front).max(1.0),
            true => 0.0,
            false => self.links[request.link.0].latency().as_secs_f64(),
        }
    }

    /// How fast a request goes on, in bytes per second: as it did, else by its share of its link.
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
        // Silence tells before the means do.
        let silence = now.since(request.heard).as_secs_f64();
        let pace = own.unwrap_or(link);
        if silence > 0.5 { pace.min(LEAST_STOLEN as f64 / silence) } else { pace }
    }

    /// Whether nobody else was asked for what this one still has to bring.
    fn alone(&self, victim: &Request) -> bool {
        let overlap = |other: &Request| other.at.max(victim.at) < other.end.min(victim.end);
        self.requests.values().filter(|other| other.file == victim.file && overlap(other)).count() <= 1
    }
}
