//! Processing of answers: their heads, and the positions of their bytes.

use braid_model::{ByteCount, Time};

use crate::engine::{ENDLESS, Engine, Request};
use crate::file::File;
use crate::spans::{Span, Spans};
use crate::types::{Action, Cause, Failure, FileId, Head, RequestId};

impl Engine {
    /// Reports the head of an answer.
    pub fn on_head(&mut self, now: Time, id: RequestId, head: Head) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        self.dirty = true;
        let first = !std::mem::replace(&mut request.head, true);
        if first {
            // Behind another request on the same connection, an answer takes longer than the link's latency.
            if self.connections.get(&request.connection).is_some_and(|connection| connection.requests.first() == Some(&id)) {
                self.links[request.link.0].on_latency(now.since(request.asked));
            }
            request.meter.begin(now);
        }
        request.last_event = now;
        let (file_id, source, at) = (request.file, request.source, request.at);
        if let Some(reach) =
            self.connections.get(&request.connection).and_then(|connection| self.reach.get_mut(&(connection.link, connection.server)))
        {
            reach.failures = 0;
        }
        let Some(file) = self.files.get_mut(&file_id) else { return };
        if file.size.is_some() && head.size.is_some_and(|size| Some(size.get()) != file.size) {
            return self.fail_request(now, id, Failure::Source);
        }
        if file.adopted.is_some() && (head.span.is_none() || !head.joinable) {
            return self.fail_request(now, id, Failure::NoRanges);
        }
        match head.span {
            Some(span) if span.start != at || span.is_empty() => self.fail_request(now, id, Failure::NoRanges),
            Some(span) => self.on_range(now, id, span, head),
            None if file.sources().any(|(other, _)| other != source) && file.ranged == Some(true) => {
                // Another source may support ranges.
                self.fail_request(now, id, Failure::Source);
            }
            None => self.on_whole(now, id, head),
        }
    }

    /// A range of the file follows.
    fn on_range(&mut self, now: Time, id: RequestId, span: Span, head: Head) {
        let request = &self.requests[&id];
        let (file_id, asked_whole) = (request.file, request.whole);
        let Some(file) = self.files.get_mut(&file_id) else { return };
        let complete = span.start == 0 && head.size == Some(span.end());
        if asked_whole {
            return self.fail_request(now, id, Failure::Source);
        }
        if !head.joinable && !complete {
            // Ranges cannot be joined: request the whole file in one piece.
            file.ranged = Some(false);
            file.joinable = false;
            if let Some(size) = head.size {
                file.learn_size(size.get());
            }
            return self.stop_all(now, file_id, None);
        }
        if let Some(size) = head.size {
            file.learn_size(size.get());
        }
        file.ranged = Some(true);
        file.joinable = head.joinable;
        self.confirm_ranges(now, file_id, span.start);
        let Some(file) = self.files.get_mut(&file_id) else { return };
        let request = self.requests.get_mut(&id).unwrap_or_else(|| unreachable!("looked up above"));
        request.requested_end = span.end;
        let old_end = request.end.min(file.size.unwrap_or(ENDLESS));
        request.end = old_end.min(span.end);
        // The range of a stalled request stays free, or belongs to another request, until it delivers something.
        if !request.stalled {
            file.free.remove(request.rest());
        }
        if span.end < old_end {
            self.release(file_id, Span::raw(span.end, old_end));
        }
        // If the first answer reveals the size, the other initial requests become ordinary ones.
        if let Some(size) = self.files.get(&file_id).and_then(|file| file.size) {
            self.requests.values_mut().filter(|other| other.file == file_id).for_each(|other| other.end = other.end.min(size));
        }
        self.end_if_done(now, file_id);
    }

    /// The whole file follows.
    fn on_whole(&mut self, now: Time, id: RequestId, head: Head) {
        let file_id = self.requests[&id].file;
        self.stop_all(now, file_id, Some(id));
        let Some(file) = self.files.get_mut(&file_id) else { return };
        file.ranged = Some(false);
        if !head.joinable && !file.got.is_empty() {
            if file.taken > 0 {
                return self.give_up(now, file_id, Cause::Unjoinable);
            }
            file.got = Spans::default();
            self.actions.push_back(Action::Restart { file: file_id });
        }
        file.joinable = head.joinable;
        if let Some(size) = head.size {
            file.learn_size(size.get());
        }
        file.free = Spans::default();
        let end = file.size.unwrap_or(ENDLESS);
        let request = self.requests.get_mut(&id).unwrap_or_else(|| unreachable!("looked up by the caller"));
        (request.from, request.at, request.end, request.requested_end) = (0, 0, end, end);
        (request.whole, request.stalled) = (true, false);
        self.end_if_done(now, file_id);
    }

    /// Reports the next `count` bytes of an answer. Returns the ranges in the file that are fresh; the caller must keep these and no others. The
    /// bytes start at the [`Self::place`] before the call.
    pub fn on_data(&mut self, now: Time, id: RequestId, count: ByteCount) -> Vec<Span> {
        let Some(request) = self.requests.get_mut(&id) else { return Vec::new() };
        let came = Span::raw(request.at, (request.at.saturating_add(count.get())).min(request.end));
        request.at = came.end;
        request.last_event = now;
        request.meter.add(now, count.get());
        let (file_id, link, revived) = (request.file, request.link, request.stalled);
        let finished = request.at >= request.end;
        let Some(file) = self.files.get_mut(&file_id) else { return Vec::new() };
        let fresh = file.got.without(came);
        let fresh_count: u64 = fresh.iter().map(|span| span.size()).sum();
        file.got.insert(came);
        file.free.remove(came);
        if fresh_count > 0 {
            (file.progress, file.failures) = (now, 0);
        }
        self.links[link.0].on_data(now, count.get(), fresh_count);
        if revived && !finished {
            self.revive(id);
        }
        let whole_done = self.files.get(&file_id).is_some_and(File::done);
        if finished || whole_done {
            self.dirty = true;
        }
        if finished {
            self.finish_request(now, id);
        }
        if fresh_count > 0 && !whole_done {
            self.stop_overtaken(now, file_id);
        }
        self.end_if_done(now, file_id);
        fresh
    }

    /// Position in its file of the next byte of a request; `None` if the request is no longer active.
    pub fn place(&self, id: RequestId) -> Option<ByteCount> {
        self.requests.get(&id).map(|request| ByteCount::new(request.at))
    }

    /// Reports the end of an answer according to its framing.
    pub fn on_end(&mut self, now: Time, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        let (file_id, at, end) = (request.file, request.at, request.end);
        self.dirty = true;
        if end == ENDLESS {
            // The end reveals the size.
            if let Some(file) = self.files.get_mut(&file_id) {
                file.size = Some(at);
                file.free = Spans::default();
            }
            self.finish_request(now, id);
            return self.end_if_done(now, file_id);
        }
        if at < end {
            self.fail_request(now, id, Failure::Lost);
        }
    }

    /// Removes a request that ended or failed. Its missing bytes become free unless another request covers them.
    pub(crate) fn finish_request(&mut self, _: Time, id: RequestId) {
        let Some(request) = self.requests.remove(&id) else { return };
        if let Some(connection) = self.connections.get_mut(&request.connection) {
            connection.requests.retain(|other| *other != id);
        }
        let link = request.link;
        if !self.requests.values().any(|other| other.link == link) {
            self.links[link.0].meter.pause();
        }
        if !request.whole {
            self.release(request.file, request.rest());
        }
        // The server was asked for more bytes than are wanted now: stop it.
        if request.at < request.requested_end {
            self.actions.push_back(Action::Stop { request: id });
        }
        if self.connections.get(&request.connection).is_some_and(|connection| connection.once) {
            self.connections.remove(&request.connection);
            self.actions.push_back(Action::Close { connection: request.connection });
        }
    }

    /// Marks bytes as free unless another request covers them.
    pub(crate) fn release(&mut self, id: FileId, span: Span) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let Some(size) = file.size else { return };
        let mut back: Spans = file.got.without(Span::raw(span.start, span.end.min(size))).into_iter().collect();
        for other in self.requests.values().filter(|other| other.file == id && !other.stalled) {
            back.remove(other.rest());
        }
        back.iter().for_each(|span| file.free.insert(span));
    }

    /// Handles a stalled request that delivers again: it keeps the contiguous part from its position that no other request has taken.
    fn revive(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        let (file_id, rest, whole) = (request.file, request.rest(), request.whole);
        if whole {
            // Its range was never free for others.
            self.requests.get_mut(&id).into_iter().for_each(|request| request.stalled = false);
            return;
        }
        let others: Spans = self
            .requests
            .iter()
            .filter(|(other, there)| **other != id && there.file == file_id && !there.stalled)
            .map(|(_, there)| there.rest())
            .collect();
        let end = others.within(rest).first().map_or(rest.end, |taken| taken.start.max(rest.start + 1));
        let Some(file) = self.files.get_mut(&file_id) else { return };
        file.free.remove(Span::raw(rest.start, end));
        if let Some(request) = self.requests.get_mut(&id) {
            (request.stalled, request.end) = (false, end);
        }
        // The head may have claimed the part behind it.
        self.release(file_id, Span::raw(end, rest.end));
        self.dirty = true;
    }

    /// Stops requests of a file whose bytes have all arrived over others.
    fn stop_overtaken(&mut self, now: Time, id: FileId) {
        let Some(file) = self.files.get(&id) else { return };
        let over =
            |request: &Request| request.file == id && !request.whole && file.size.is_some() && file.got.without(request.rest()).is_empty();
        let overtaken: Vec<RequestId> = self.requests.iter().filter(|(_, request)| over(request)).map(|(id, _)| *id).collect();
        for request in overtaken {
            self.dirty = true;
            self.finish_request(now, request);
        }
    }
}
