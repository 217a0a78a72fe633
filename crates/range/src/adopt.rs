//! Files that come with an answer of all of it: one that goes through for somebody else, and may be shared with other links on its way.

use std::time::Duration;

use braid_model::{ByteCount, Time};

use crate::engine::{Connection, Engine, Request};
use crate::file::{Adopted, File};
use crate::meter::Meter;
use crate::plan::{FIRST, LEAST};
use crate::spans::{Span, Spans};
use crate::types::{Cause, ConnectionId, Failure, FileId, FileSetup, LinkId, RangeError, RequestId};

/// How far ahead of the answer the first range elsewhere begins, besides the round trips it takes.
const AHEAD: Duration = Duration::from_millis(100);
/// An answer's first moments.
const EARLY: Duration = Duration::from_millis(50);

impl Engine {
    /// Takes on a file whose whole answer is under way over `link`, from its first byte, on a connection that is good for nothing else.
    /// Gives the file, and the names of that connection and of its request, for which [`Self::on_data`] and so on are called as for any.
    ///
    /// The file is asked for in ranges elsewhere once another answer has shown that they fit; the first answer then ends where others took
    /// over ([`crate::Action::Stop`]). If none does, it brings everything, over its one link. It must be read only while its place is within
    /// the file's window.
    ///
    /// # Errors
    /// As [`Self::add_file`], and without a size or with an unknown link.
    pub fn adopt(&mut self, now: Time, link: LinkId, setup: FileSetup) -> Result<(FileId, ConnectionId, RequestId), RangeError> {
        let size = setup.size.ok_or(RangeError::NoSize)?.get();
        if link.0 >= self.links.len() {
            return Err(RangeError::UnknownLink(link));
        }
        let server = *setup.sources.first().ok_or(RangeError::NoSource)?;
        let id = self.add_file(now, setup)?;
        let (connection, request) = (ConnectionId(self.fresh_id()), RequestId(self.fresh_id()));
        let Some(file) = self.files.get_mut(&id).filter(|_| size > 0) else { return Ok((id, connection, request)) };
        (file.active, file.adopted, file.free) = (true, Some(Adopted::Doubt(request)), Spans::default());
        let source = file.source_at(server).unwrap_or_else(|| unreachable!("a file's sources are good at first"));
        self.connections
            .insert(connection, Connection { link, server, since: now, connected: true, depth: 1, requests: vec![request], once: true });
        self.links[link.0].meter.begin(now);
        let mut meter = Meter::default();
        meter.begin(now);
        let entry = Request {
            connection,
            link,
            file: id,
            source,
            from: 0,
            at: 0,
            end: size,
            told: size,
            whole: true,
            asked: now,
            heard: now,
            head: true,
            meter,
            stalled: false,
        };
        self.requests.insert(request, entry);
        Ok((id, connection, request))
    }

    /// The place before which the answer of an adopted file may be read now.
    pub fn limit(&self, id: FileId) -> ByteCount {
        ByteCount::new(self.files.get(&id).map_or(0, File::limit))
    }

    /// The range by which `link` would find out whether there are ranges, while the first answer goes on; `None`: it would gain nothing.
    pub(crate) fn trial(&self, now: Time, link: LinkId, id: FileId, file: &File) -> Option<Span> {
        let Some(Adopted::Doubt(first)) = file.adopted else { return None };
        let first = self.requests.get(&first)?;
        let others = self.requests.values().any(|other| other.file == id && !other.whole && !other.stalled);
        if others || first.link == link && !self.regulated(id, link) {
            return None;
        }
        let (size, limit) = (file.size?, file.limit());
        // What it brought in its first moments says little of what it will: not much is left to it on that account.
        let early = first.at as f64 / now.since(first.asked).max(EARLY).as_secs_f64();
        let (pace, most) = Some(self.pace(now, first)).filter(|pace| *pace > 0.0).map_or((early, FIRST), |pace| (pace, u64::MAX));
        let ahead = pace * (self.links[link.0].latency() * 2 + AHEAD).as_secs_f64();
        let ahead = if first.stalled { 0 } else { (ahead as u64).clamp(LEAST, most) };
        let start = first.at.saturating_add(ahead);
        if start.saturating_add(2 * LEAST) > size.min(limit) {
            return None;
        }
        let share = self.links[link.0].share(now).map_or(LEAST, |share| (share / 4.0) as u64).clamp(LEAST, FIRST);
        Some(Span::raw(start, size.min(limit).min(start + share)))
    }

    /// Whether a file that may use one link only shares it with others: it is then asked for in ranges too, so that miDRR can regulate it.
    fn regulated(&self, id: FileId, link: LinkId) -> bool {
        let here = |file: &File| file.active && file.ended.is_none() && file.setup.links.contains(link.0);
        let alone =
            self.files.get(&id).is_some_and(|file| (0..self.links.len()).filter(|other| file.setup.links.contains(*other)).count() <= 1);
        alone && self.files.iter().any(|(other, file)| *other != id && here(file))
    }

    /// Another answer, from `start` on, has shown that there are ranges: the first one is wanted up to there only.
    pub(crate) fn prove(&mut self, now: Time, id: FileId, start: u64) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let Some(Adopted::Doubt(first)) = file.adopted else { return };
        file.adopted = Some(Adopted::Proven);
        let mut free: Spans = file.got.without(Span::raw(0, file.size.unwrap_or(0))).into_iter().collect();
        if let Some(request) = self.requests.get_mut(&first) {
            (request.end, request.whole) = (start.max(request.at), false);
        }
        for request in self.requests.values().filter(|request| request.file == id && !request.stalled) {
            free.remove(request.rest());
        }
        file.free = free;
        if self.requests.get(&first).is_some_and(|request| request.at >= request.end) {
            self.finish_request(now, first);
        }
    }

    /// There are no ranges that fit, or not now (`hope`): everything is left to the first answer.
    pub(crate) fn keep_whole(&mut self, now: Time, id: FileId, hope: bool) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let Some(Adopted::Doubt(first)) = file.adopted else { return };
        (file.adopted, file.ranged, file.free) = (Some(Adopted::Whole { first, hope }), Some(false), Spans::default());
        self.stop_all(now, id, Some(first));
        if let Some(file) = self.files.get_mut(&id) {
            file.free = Spans::default();
        }
        if let Some(request) = self.requests.get_mut(&first) {
            request.stalled = false;
        }
    }

    /// What a failure means for a file that came with an answer; false: the same as for any. The request is off already.
    pub(crate) fn fail_adopted(&mut self, now: Time, id: FileId, request: RequestId, failure: Failure, barren: bool) -> bool {
        let Some(file) = self.files.get_mut(&id) else { return false };
        match (file.adopted, failure) {
            (Some(Adopted::Whole { first, hope: false }), _) if first == request => self.give_up(now, id, Cause::Unjoinable),
            // What is left is asked for in ranges: nothing has shown that there are none.
            (Some(Adopted::Doubt(first) | Adopted::Whole { first, .. }), _) if first == request => {
                (file.adopted, file.ranged, file.failures) = (Some(Adopted::Proven), Some(true), 0);
                let rest = Span::raw(0, file.size.unwrap_or(0));
                self.release(id, rest);
                self.count_failure(now, id);
            }
            (Some(Adopted::Doubt(_)), Failure::Lost) | (None, _) => return false,
            (Some(Adopted::Doubt(_)), _) => self.keep_whole(now, id, matches!(failure, Failure::Refused { .. })),
            (Some(_), Failure::Lost | Failure::Refused { .. }) => return false,
            // Behind one address may stand several servers, of which some do not fit: it is asked again, for a while.
            (Some(_), _) if barren => self.count_failure(now, id),
            (Some(_), _) => {}
        }
        true
    }

    /// Whether a request's silence is nothing to act on: its reader takes no more, or it is the only way the file can come.
    pub(crate) fn excused(&self, request: &Request) -> bool {
        self.files.get(&request.file).is_some_and(|file| file.kept_whole() || file.adopted.is_some() && request.at >= file.limit())
    }
}
