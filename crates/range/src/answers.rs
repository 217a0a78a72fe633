//! Answers: what their heads say, and where their bytes belong.

use braid_model::{ByteCount, Time};

use crate::engine::{ENDLESS, Engine, Request};
use crate::file::File;
use crate::spans::{Span, Spans};
use crate::types::{Action, Cause, Failure, FileId, Head, RequestId};

impl Engine {
    /// The head of an answer came.
    pub fn on_head(&mut self, now: Time, id: RequestId, head: Head) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        self.dirty = true;
        let first = !std::mem::replace(&mut request.head, true);
        if first {
            // Behind another request on the same connection an answer comes later than the link's latency.
            if self.connections.get(&request.connection).is_some_and(|connection| connection.requests.first() == Some(&id)) {
                self.links[request.link.0].on_latency(now.since(request.asked));
            }
            request.meter.begin(now);
        }
        request.heard = now;
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
                // Another source gives ranges.
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
            // Ranges cannot be joined: the whole file is asked for, in one piece.
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
        self.prove(now, file_id, span.start);
        let Some(file) = self.files.get_mut(&file_id) else { return };
        let request = self.requests.get_mut(&id).unwrap_or_else(|| unreachable!("looked up above"));
        request.told = span.end;
        let old_end = request.end.min(file.size.unwrap_or(ENDLESS));
        request.end = old_end.min(span.end);
        // What a stalled one was to bring is free, or another's by now, until it brings something.
        if !request.stalled {
            file.free.remove(request.rest());
        }
        if span.end < old_end {
            self.release(file_id, Span::raw(span.end, old_end));
        }
        // Where the first answer ends the doubt, other first questions are ordinary requests.
        if let Some(size) = self.files.get(&file_id).and_then(|file| file.size) {
            self.requests.values_mut().filter(|other| other.file == file_id).for_each(|other| other.end = other.end.min(size));
        }
        self.settle(now, file_id);
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
        (request.from, request.at, request.end, request.told) = (0, 0, end, end);
        (request.whole, request.stalled) = (true, false);
        self.settle(now, file_id);
    }

    /// The next `count` bytes of an answer came. Gives which of them are fresh, as places in the file: these and no others are to be kept.
    /// The bytes begin at [`Self::place`] of before the call.
    pub fn on_data(&mut self, now: Time, id: RequestId, count: ByteCount) -> Vec<Span> {
        let Some(request) = self.requests.get_mut(&id) else { return Vec::new() };
        let came = Span::raw(request.at, (request.at.saturating_add(count.get())).min(request.end));
        request.at = came.end;
        request.heard = now;
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
        self.settle(now, file_id);
        fresh
    }

    /// Where in its file the next byte of a request belongs; `None` if it is not at work any more.
    pub fn place(&self, id: RequestId) -> Option<ByteCount> {
        self.requests.get(&id).map(|request| ByteCount::new(request.at))
    }

    /// The answer ended as its framing said.
    pub fn on_end(&mut self, now: Time, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        let (file_id, at, end) = (request.file, request.at, request.end);
        self.dirty = true;
        if end == ENDLESS {
            // Its end tells the size.
            if let Some(file) = self.files.get_mut(&file_id) {
                file.size = Some(at);
                file.free = Spans::default();
            }
            self.finish_request(now, id);
            return self.settle(now, file_id);
        }
        if at < end {
            self.fail_request(now, id, Failure::Lost);
        }
    }

    /// Takes a request off, ended or failed; what it did not bring is free unless another brings it.
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
        // The server was told of more than is wanted now: it is not to send it.
        if request.at < request.told {
            self.actions.push_back(Action::Stop { request: id });
        }
        if self.connections.get(&request.connection).is_some_and(|connection| connection.once) {
            self.connections.remove(&request.connection);
            self.actions.push_back(Action::Close { connection: request.connection });
        }
    }

    /// Bytes nobody brings any more are free again.
    pub(crate) fn release(&mut self, id: FileId, span: Span) {
        let Some(file) = self.files.get_mut(&id) else { return };
        let Some(size) = file.size else { return };
        let mut back: Spans = file.got.without(Span::raw(span.start, span.end.min(size))).into_iter().collect();
        for other in self.requests.values().filter(|other| other.file == id && !other.stalled) {
            back.remove(other.rest());
        }
        back.iter().for_each(|span| file.free.insert(span));
    }

    /// A stalled request goes on: it keeps what nobody else has taken meanwhile, from its place on without a gap.
    fn revive(&mut self, id: RequestId) {
        let Some(request) = self.requests.get(&id) else { return };
        let (file_id, rest, whole) = (request.file, request.rest(), request.whole);
        if whole {
            // Nothing of it was free for others.
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
        // Its head may have claimed what lies behind.
        self.release(file_id, Span::raw(end, rest.end));
        self.dirty = true;
    }

    /// Stops requests of a file whose bytes all came by others.
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
