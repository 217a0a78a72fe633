//! Adopted files: a file whose whole answer is already in progress for another party, and which other links may help to fetch.

use std::time::Duration;

use braid_model::{ByteCount, Time};

use crate::engine::{Connection, Engine, Request};
use crate::file::{Adopted, File};
use crate::meter::Meter;
use crate::plan::{FIRST_REQUEST, MIN_REQUEST};
use crate::spans::{Span, Spans};
use crate::types::{Cause, ConnectionId, Failure, FileId, FileSetup, LinkId, RangeError, RequestId};

/// Lead of the first range on another link over the answer, in addition to the round trips it takes.
const LEAD: Duration = Duration::from_millis(100);
/// Minimum age of an answer for an estimate of its initial rate.
const EARLY_AGE: Duration = Duration::from_millis(50);

impl Engine {
    /// Adopts a file whose whole answer is in progress over `link`, from its first byte, on a connection that is used for nothing else. Returns the
    /// file and the IDs of that connection and its request. The caller reports their events with [`Self::on_data`] and so on, as for any request.
    ///
    /// Once another answer has shown that matching ranges are available, other links fetch ranges of the file, and the first answer ends where they
    /// took over ([`crate::Action::Stop`]). Otherwise the first answer delivers everything over its link. The caller must read the first answer only
    /// while its position is within the file's window.
    ///
    /// # Errors
    /// As [`Self::add_file`]; also without a size or with an unknown link.
    pub fn adopt(&mut self, now: Time, link: LinkId, setup: FileSetup) -> Result<(FileId, ConnectionId, RequestId), RangeError> {
        let size = setup.size.ok_or(RangeError::NoSize)?.get();
        if link.0 >= self.links.len() {
            return Err(RangeError::UnknownLink(link));
        }
        let server = *setup.sources.first().ok_or(RangeError::NoSource)?;
        let id = self.add_file(now, setup)?;
        let (connection, request) = (ConnectionId(self.fresh_id()), RequestId(self.fresh_id()));
        let Some(file) = self.files.get_mut(&id).filter(|_| size > 0) else { return Ok((id, connection, request)) };
        (file.active, file.adopted, file.free) = (true, Some(Adopted::Unproven(request)), Spans::default());
        let source = file.source_at(server).unwrap_or_else(|| unreachable!("every source is usable initially"));
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
            requested_end: size,
            whole: true,
            asked: now,
            last_event: now,
            head: true,
            meter,
            stalled: false,
        };
        self.requests.insert(request, entry);
        Ok((id, connection, request))
    }

    /// Position before which the caller may read the answer of an adopted file now.
    pub fn limit(&self, id: FileId) -> ByteCount {
        ByteCount::new(self.files.get(&id).map_or(0, File::limit))
    }

    /// The trial range by which `link` would find out whether ranges are available while the first answer continues; `None` if it would gain nothing.
    pub(crate) fn trial(&self, now: Time, link: LinkId, id: FileId, file: &File) -> Option<Span> {
        let Some(Adopted::Unproven(first)) = file.adopted else { return None };
        let first = self.requests.get(&first)?;
        let others = self.requests.values().any(|other| other.file == id && !other.whole && !other.stalled);
        if others || first.link == link && !self.shares_only_link(id, link) {
            return None;
        }
        let (size, limit) = (file.size?, file.limit());
        // The rate in the first moments is not reliable, so the first answer keeps at most a small part on that basis.
        let early = first.at as f64 / now.since(first.asked).max(EARLY_AGE).as_secs_f64();
        let (pace, most) = Some(self.pace(now, first)).filter(|pace| *pace > 0.0).map_or((early, FIRST_REQUEST), |pace| (pace, u64::MAX));
        let ahead = pace * (self.links[link.0].latency() * 2 + LEAD).as_secs_f64();
        let ahead = if first.stalled { 0 } else { (ahead as u64).clamp(MIN_REQUEST, most) };
        let start = first.at.saturating_add(ahead);
        if start.saturating_add(2 * MIN_REQUEST) > size.min(limit) {
            return None;
        }
        let share = self.links[link.0].share(now).map_or(MIN_REQUEST, |share| (share / 4.0) as u64).clamp(MIN_REQUEST, FIRST_REQUEST);
        Some(Span::raw(start, size.min(limit).min(start + share)))
    }

    /// Whether a file that may use only one link shares it with other files. Such a file is also fetched in ranges, so that miDRR can schedule it.
    fn shares_only_link(&self, id: FileId, link: LinkId) -> bool {
        let here = |file: &File| file.active && file.ended.is_none() && file.setup.links.contains(link.0);
        let alone =
            self.files.get(&id).is_some_and(|file| (0..self.links.len()).filter(|other| file.setup.links.contains(*other)).count() <= 1);
        alone && self.files.iter().any(|(other, file)| *other != id && here(file))
    }

    /// Another answer, from `start` on, has shown that ranges are available: the first answer is only needed up to there.
    pub(crate) fn confirm_ranges(&mut self, now: Time, id: FileId, start: u64) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let Some(Adopted::Unproven(first)) = file.adopted else { return };
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

    /// No matching ranges are available, or not now (`may_retry`): the first answer must deliver everything.
    pub(crate) fn keep_whole(&mut self, now: Time, id: FileId, may_retry: bool) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let Some(Adopted::Unproven(first)) = file.adopted else { return };
        (file.adopted, file.ranged, file.free) = (Some(Adopted::Whole { first, may_retry }), Some(false), Spans::default());
        self.stop_all(now, id, Some(first));
        if let Some(file) = self.files.get_mut(&id) {
            file.free = Spans::default();
        }
        if let Some(request) = self.requests.get_mut(&first) {
            request.stalled = false;
        }
    }

    /// Handles a failure of an adopted file. Returns false if it is to be handled as for any file. The request has already been removed.
    pub(crate) fn fail_adopted(&mut self, now: Time, id: FileId, request: RequestId, failure: Failure, barren: bool) -> bool {
        let Some(file) = self.files.get_mut(&id) else { return false };
        match (file.adopted, failure) {
            (Some(Adopted::Whole { first, may_retry: false }), _) if first == request => self.give_up(now, id, Cause::Unjoinable),
            // Request the rest in ranges: nothing has shown that none are available.
            (Some(Adopted::Unproven(first) | Adopted::Whole { first, .. }), _) if first == request => {
                (file.adopted, file.ranged, file.failures) = (Some(Adopted::Proven), Some(true), 0);
                let rest = Span::raw(0, file.size.unwrap_or(0));
                self.release(id, rest);
                self.count_failure(now, id);
            }
            (Some(Adopted::Unproven(_)), Failure::Lost) | (None, _) => return false,
            (Some(Adopted::Unproven(_)), _) => self.keep_whole(now, id, matches!(failure, Failure::Refused { .. })),
            (Some(_), Failure::Lost | Failure::Refused { .. }) => return false,
            // Several servers may share one address, and some of them may not match: try again for a while.
            (Some(_), _) if barren => self.count_failure(now, id),
            (Some(_), _) => {}
        }
        true
    }

    /// Whether a silence of the request is to be ignored: the reader takes no more, or the file cannot come in another way.
    pub(crate) fn ignores_silence(&self, request: &Request) -> bool {
        self.files.get(&request.file).is_some_and(|file| file.kept_whole() || file.adopted.is_some() && request.at >= file.limit())
    }
}
