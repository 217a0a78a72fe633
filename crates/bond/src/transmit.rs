//! Builds the next datagram of a path. Late binding: the driver polls a path only when the path can send, and the bond then picks the data that is
//! best for it. All other data stays in its flow.

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Time, Traffic};
use bytes::{Bytes, BytesMut};

use crate::bond::Bond;
use crate::path::{Extra, Path, PathState};
use crate::send::Piece;
use crate::tracker::{Control, Item, Items};
use crate::wire::{self, Frame, Header, MAX_CHUNK_HEAD};
use crate::{FlowKey, PathId};

/// A datagram with less room than this counts as full.
const MIN_CHUNK_ROOM: usize = MAX_CHUNK_HEAD + 32;
/// Upper bound of the bytes before the payload of a message or fragment in a datagram.
const MESSAGE_HEAD: usize = 64;
/// Smallest datagram size that a path must support: part of the protocol's version. QUIC's smallest packets hold more.
pub const MIN_DATAGRAM: usize = 1000;
/// Ranges of an acknowledgement that is due, and of one that accompanies data (at most 4 + 2 x 2 x 2 bytes long).
const RANGES: usize = 32;
const RANGES_ALONG: usize = 2;
/// A copy, or a wait for a faster path, must gain at least this much time.
const MARGIN: Duration = Duration::from_millis(5);
/// While urgent data is expected, a datagram holds at most what its path sends in a millisecond, but no less than this.
const MIN_URGENT_DATAGRAM: u64 = 600;
/// An exclusion of a flow from a path expires after this time.
const RECONSIDER: Duration = Duration::from_millis(10);
/// Copies that may wait for one path. A path with more waiting gets no further copies.
const MAX_EXTRA: usize = 256;

/// A datagram under construction.
struct Draft<'a> {
    out: &'a mut BytesMut,
    start: usize,
    max: usize,
    items: Items,
    /// Whether some items are copies of data that was also given to another path.
    copies: bool,
    /// Whether the datagram contains a frame that elicits an acknowledgement.
    eliciting: bool,
}

impl Draft<'_> {
    fn room(&self) -> usize {
        self.max.saturating_sub(self.out.len() - self.start)
    }

    /// Whether the datagram contains nothing but acknowledgements.
    fn is_empty(&self) -> bool {
        self.items.is_empty() && !self.eliciting
    }

    /// Adds a frame if it fits.
    fn add(&mut self, frame: &Frame) -> bool {
        let before = self.out.len();
        frame.encode(self.out);
        if self.out.len() - self.start > self.max {
            self.out.truncate(before);
            return false;
        }
        true
    }
}

impl Bond {
    /// Appends the next datagram of a path to `out`. It has at most `max` bytes; `max` must be at least [`MIN_DATAGRAM`]. Returns `false` if the path
    /// has nothing to send now, or no room (see [`PathFacts::room`](crate::PathFacts::room)).
    pub fn poll_datagram(&mut self, now: Time, id: PathId, max: usize, out: &mut BytesMut) -> bool {
        let Some(path) = self.paths.get(&id).filter(|_| max >= MIN_DATAGRAM) else { return false };
        let (sequence, state, down) = (path.tracker.next_sequence(), path.state, path.is_down());
        if down {
            return false;
        }
        let room = path.facts.room.get() > 0;
        let largest = self.max_datagram(now, path, max);
        // Count a shortened datagram at its full size, so that no other datagram queues behind it.
        let (uncounted, max) = (max - largest, largest);
        let start = out.len();
        let mut draft = Draft { out, start, max, items: Items::new(), copies: false, eliciting: false };
        Header { sequence: Some(sequence) }.encode(draft.out);
        let head = draft.out.len();
        self.put_due_acks(now, id, &mut draft);
        if self.paths.get_mut(&id).is_some_and(|path| std::mem::take(&mut path.initial_ping)) {
            draft.eliciting |= draft.add(&Frame::Ping);
        }
        if state == PathState::Good && room {
            self.put_controls(&mut draft);
            self.put_extra(id, &mut draft);
            self.put_flows(now, id, &mut draft);
            if draft.is_empty() {
                self.put_repeats(now, id, &mut draft);
            }
            if !draft.is_empty() {
                self.put_ack_along(now, id, &mut draft);
            }
        } else if state != PathState::Good {
            self.put_probe(now, id, &mut draft);
        }
        if draft.out.len() == head {
            draft.out.truncate(start);
            return false;
        }
        let Draft { items, copies, eliciting, .. } = draft;
        let size = out.len() - start;
        if !items.is_empty() || eliciting {
            if let Some(path) = self.paths.get_mut(&id) {
                path.tracker.on_sent(now, size, items, copies);
                path.facts.room = path.facts.room.saturating_sub(ByteCount::new((size + uncounted) as u64));
            }
            return true;
        }
        // The datagram contains only acknowledgements. It gets no sequence number, so that it is not acknowledged in turn.
        let body = Bytes::copy_from_slice(&out[head..]);
        out.truncate(start);
        Header { sequence: None }.encode(out);
        out.extend_from_slice(&body);
        true
    }

    /// Size limit of the next datagram. Urgent data waits for the datagram before it, so on a slow path that datagram must be small.
    fn max_datagram(&self, now: Time, path: &Path, max: usize) -> usize {
        if !self.has_recent_urgent(now) {
            return max;
        }
        let small = (path.rate().bytes_per_second() / 1000).max(MIN_URGENT_DATAGRAM).min(max as u64) as usize;
        let head = |flow: &FlowKey| self.flows.get(flow).and_then(|flow| flow.messages.head()).unwrap_or(0);
        let waiting = match path.extra.front() {
            Some(Extra::Message(.., data) | Extra::Fragment(.., data)) => data.len(),
            _ => 0,
        };
        let message = self.urgent.iter().map(head).max().unwrap_or(0).max(waiting);
        if message + MAX_CHUNK_HEAD + 24 > small { max } else { small }
    }

    /// Adds the acknowledgements that are due, of this path and of paths that cannot send their own.
    fn put_due_acks(&mut self, now: Time, id: PathId, draft: &mut Draft<'_>) {
        let good = self.paths.get(&id).is_some_and(|path| path.is_good());
        for (other, path) in &mut self.paths {
            let speaks_for = *other == id || good && !path.is_good();
            let due = speaks_for && path.received.due.is_some_and(|due| due <= now);
            if due && !draft.add(&Frame::Ack(path.received.ack(now, *other, RANGES))) {
                // It does not fit beside the acknowledgements of other paths. Send it in the next datagram.
                path.received.due = Some(now);
                return;
            }
        }
    }

    /// An acknowledgement costs little beside data, so it is sent before it is due.
    fn put_ack_along(&mut self, now: Time, id: PathId, draft: &mut Draft<'_>) {
        if let Some(path) = self.paths.get_mut(&id).filter(|path| path.received.has_news())
            && draft.room() > MIN_CHUNK_ROOM
        {
            draft.add(&Frame::Ack(path.received.ack(now, id, RANGES_ALONG)));
        }
    }

    fn put_controls(&mut self, draft: &mut Draft<'_>) {
        while let Some(control) = self.control.pop_front() {
            let Some(frame) = self.control_frame(&control) else { continue };
            if !draft.add(&frame) {
                self.control.push_front(control);
                return;
            }
            draft.items.push(Item::Control(control));
        }
    }

    fn control_frame(&self, control: &Control) -> Option<Frame> {
        let flow = |id: &FlowKey| self.flows.get(id);
        Some(match control {
            Control::Open(id) => Frame::Open { flow: *id, open: flow(id)?.open.clone()? },
            Control::Opened(id, code) => Frame::Opened { flow: *id, code: *code },
            Control::Reset(id, code) => Frame::Reset { flow: *id, code: *code, size: flow(id).map_or(0, |flow| flow.send.sent()) },
            Control::Stop(id, code) => Frame::Stop { flow: *id, code: *code },
            Control::Credit(id) => Frame::Credit { flow: *id, limit: flow(id)?.receive.limit() },
            Control::TotalCredit => Frame::TotalCredit { limit: self.receive_limit },
            Control::Path(id) => Frame::Path { path: *id, update: *self.path_updates.get(id)? },
            Control::Scheduling(version) => Frame::Scheduling { version: *version, plan: self.servers_plan },
            Control::Policy(id, version) => Frame::Policy { flow: *id, version: *version, policy: flow(id)?.policy },
        })
    }

    fn put_extra(&mut self, id: PathId, draft: &mut Draft<'_>) {
        while draft.room() > MIN_CHUNK_ROOM {
            let Some(extra) = self.paths.get_mut(&id).and_then(|path| path.extra.pop_front()) else { return };
            let rest: Vec<Extra> = match extra {
                Extra::Copy(item) => self.put_copy(item, draft).map(Extra::Copy).into_iter().collect(),
                Extra::Message(flow, number, data) => {
                    let put = draft.add(&Frame::Message { flow, number, data: data.clone() });
                    draft.eliciting |= put;
                    match put {
                        true => Vec::new(),
                        // The message was cut for a path with a larger MTU.
                        false if draft.is_empty() => cut(flow, number, &data, draft.max),
                        false => vec![Extra::Message(flow, number, data)],
                    }
                }
                Extra::Fragment(flow, number, index, count, data) => {
                    let put = draft.add(&Frame::Fragment { flow, number, index, count, data: data.clone() });
                    draft.eliciting |= put;
                    // A fragment that does not fit into any datagram of this path was a copy. The original is still on its way.
                    if put || draft.is_empty() { Vec::new() } else { vec![Extra::Fragment(flow, number, index, count, data)] }
                }
            };
            if rest.is_empty() {
                continue;
            }
            if let Some(path) = self.paths.get_mut(&id) {
                rest.into_iter().rev().for_each(|extra| path.extra.push_front(extra));
            }
            if !draft.is_empty() {
                return;
            }
        }
    }

    /// Adds a copy of an item that another path was given. Returns the part that did not fit. Datagrams differ in size, if only by the length of
    /// their sequence numbers.
    fn put_copy(&mut self, item: Item, draft: &mut Draft<'_>) -> Option<Item> {
        match item {
            Item::Control(control) => {
                let frame = self.control_frame(&control)?;
                if draft.add(&frame) {
                    draft.items.push(Item::Control(control));
                } else if draft.is_empty() {
                    // It never fits into a datagram of this path.
                    self.control.push_back(control);
                } else {
                    return Some(Item::Control(control));
                }
                None
            }
            Item::Piece(id, piece) => {
                let flow = self.flows.get(&id).filter(|flow| flow.reset_sent.is_none())?;
                let piece = flow.send.outstanding(&piece)?;
                let fits = draft.room().saturating_sub(MAX_CHUNK_HEAD) as u64;
                let end = piece.range.end.min(piece.range.start + fits);
                let rest = (end < piece.range.end).then_some(Item::Piece(id, Piece { range: end..piece.range.end, fin: piece.fin }));
                let part = Piece { range: piece.range.start..end, fin: piece.fin && rest.is_none() };
                if fits == 0 {
                    return Some(Item::Piece(id, piece));
                }
                wire::put_chunk_head(draft.out, id, part.range.start, part.len() as usize, part.fin);
                flow.send.copy(part.range.clone(), draft.out);
                draft.items.push(Item::Piece(id, part));
                draft.copies = true;
                rest
            }
        }
    }

    fn put_flows(&mut self, now: Time, id: PathId, draft: &mut Draft<'_>) {
        let Some(slot) = self.paths.get(&id).map(|path| path.slot) else { return };
        while draft.room() > MIN_CHUNK_ROOM {
            let Some((flow, also)) = self.next_flow(now, id, slot) else { return };
            let put = if self.is_messages(flow) { self.put_message(id, flow, also, draft) } else { self.put_piece(id, flow, also, draft) };
            self.refresh(flow);
            if !put {
                return;
            }
        }
    }

    /// Chooses the next flow for a path: urgent flows first, then miDRR, except flows whose last bytes would arrive sooner over another path. Also
    /// returns the slots of the paths that are to carry copies.
    fn next_flow(&mut self, now: Time, id: PathId, slot: usize) -> Option<(FlowKey, LinkSet)> {
        let path = self.paths.get(&id)?;
        let regular = if path.backup { self.regular_links() } else { LinkSet::EMPTY };
        let urgent = self.urgent.iter().copied().find(|flow| {
            self.flows.get(flow).is_some_and(|flow| path.serves(flow.policy.links, regular))
                && self.better_elsewhere(now, id, *flow).is_none()
        });
        if urgent.is_some() {
            self.urgent_sent_at = Some(now);
            return urgent.map(|flow| (flow, LinkSet::default()));
        }
        if self.chooser.is_some() {
            return self.take_choice(slot);
        }
        loop {
            let grant = self.scheduler.next(slot)?;
            let flow = *self.keys.get(&grant.flow)?;
            let Some(better) = self.better_elsewhere(now, id, flow) else { return Some((flow, LinkSet::default())) };
            let found = self.flows.get_mut(&flow)?;
            found.excluded_slots = (found.excluded_slots | LinkSet::only(slot)) - LinkSet::only(better);
            self.narrowed.insert(flow);
            self.reconsider.get_or_insert(now + RECONSIDER);
            self.narrow(flow);
        }
    }

    /// Earliest completion first (Lim et al., ECF, CoNEXT 2017). Returns the slot of a faster path that could deliver the flow's whole backlog,
    /// including the next chunk, before this path delivers the chunk. Returns `None` if the flow filled its send buffer recently, since then more
    /// data is likely to follow.
    fn better_elsewhere(&self, now: Time, id: PathId, flow: FlowKey) -> Option<usize> {
        let (path, found) = (self.paths.get(&id)?, self.flows.get(&flow)?);
        if !found.send.is_finished() && now.since(found.full_at) < path.srtt * 2 {
            return None;
        }
        let backlog = found.send.pending(self.send_limit - self.sent_total).unwrap_or(0) + found.messages.head().unwrap_or(0) as u64;
        let here = path.arrival(backlog.min(1400));
        let sooner = |(other, faster): &(&PathId, &Path)| {
            **other != id
                && faster.is_good()
                && !faster.backup
                && found.policy.links.contains(faster.link.into())
                && faster.arrival(backlog) + MARGIN < here
        };
        self.paths.iter().find(sooner).map(|(_, faster)| faster.slot)
    }

    fn put_piece(&mut self, id: PathId, flow: FlowKey, also: LinkSet, draft: &mut Draft<'_>) -> bool {
        let fresh = self.send_limit - self.sent_total;
        let Some(found) = self.flows.get_mut(&flow) else { return false };
        let before = found.send.sent();
        let most = (draft.room() - wire_head(flow, before)) as u64;
        let Some(piece) = found.send.take(most, fresh) else { return false };
        self.sent_total += found.send.sent() - before;
        wire::put_chunk_head(draft.out, flow, piece.range.start, piece.len() as usize, piece.fin);
        found.send.copy(piece.range.clone(), draft.out);
        let copies = found.policy.copies;
        if let Some(path) = self.paths.get(&id) {
            found.count(path.link, Traffic::sent(ByteCount::new(piece.len())));
        }
        self.on_chosen_sent(flow, piece.len());
        let item = Item::Piece(flow, piece);
        if copies > 1 || also != LinkSet::default() {
            self.spread(id, flow, (copies, also), &Extra::Copy(item.clone()));
        }
        draft.items.push(item);
        true
    }

    fn put_message(&mut self, id: PathId, flow: FlowKey, also: LinkSet, draft: &mut Draft<'_>) -> bool {
        let Some(found) = self.flows.get_mut(&flow) else { return false };
        let copies = found.policy.copies;
        let Some(size) = found.messages.head() else { return false };
        let whole = size + wire_head(flow, u64::MAX) <= draft.max - 24;
        if whole && draft.room() < size + wire_head(flow, u64::MAX) {
            return false;
        }
        self.queued_messages -= found.messages.queued();
        let taken = found.messages.take();
        self.queued_messages += found.messages.queued();
        let Some((number, data)) = taken else { return false };
        if let Some(path) = self.paths.get(&id) {
            found.count(path.link, Traffic::sent(ByteCount::new(size as u64)));
        }
        self.on_chosen_sent(flow, size as u64);
        let pieces: Vec<Extra> = if whole { vec![Extra::Message(flow, number, data)] } else { cut(flow, number, &data, draft.max) };
        for piece in &pieces {
            if copies > 1 || also != LinkSet::default() {
                self.spread(id, flow, (copies, also), piece);
            }
        }
        if let Some(path) = self.paths.get_mut(&id) {
            pieces.into_iter().rev().for_each(|piece| path.extra.push_front(piece));
        }
        self.put_extra(id, draft);
        // Fragments that did not fit go first in the next datagram. Nothing more is taken until then.
        self.paths.get(&id).is_some_and(|path| path.extra.is_empty())
    }

    /// Queues copies of `extra` on the paths in the slots `also`, or else on the next best paths.
    fn spread(&mut self, id: PathId, flow: FlowKey, (copies, also): (u8, LinkSet), extra: &Extra) {
        let links = self.flows.get(&flow).map_or(LinkSet::EMPTY, |flow| flow.policy.links);
        let mut others: Vec<(bool, Duration, PathId)> = self
            .paths
            .iter()
            .filter(|(other, path)| **other != id && path.is_good() && links.contains(path.link.into()))
            .filter(|(_, path)| also.is_empty() || also.contains(path.slot))
            .map(|(other, path)| (path.backup, path.srtt, *other))
            .collect();
        others.sort_unstable();
        let most = if also.is_empty() { usize::from(copies) - 1 } else { others.len() };
        for (.., other) in others.into_iter().take(most) {
            if let Some(path) = self.paths.get_mut(&other)
                && path.extra.len() < MAX_EXTRA
            {
                path.extra.push_back(extra.clone());
            }
        }
    }

    /// Retransmits data over an idle path if it would arrive sooner than over the path that was given it: the tail of a transfer, or data that blocks
    /// a flow's window.
    fn put_repeats(&mut self, now: Time, id: PathId, draft: &mut Draft<'_>) {
        let Some(path) = self.paths.get(&id) else { return };
        if !self.may_repeat() {
            return;
        }
        let (link, backup, regular) = (path.link, path.backup, self.regular_links());
        let serves = |links: LinkSet| links.contains(link.into()) && (!backup || (links & regular).is_empty());
        let here = now + path.arrival(draft.room() as u64) + MARGIN;
        let others: Vec<PathId> = self.paths.keys().copied().filter(|other| *other != id).collect();
        for other in others {
            while draft.room() > MIN_CHUNK_ROOM {
                let flows = &self.flows;
                let may = |item: &Item| match item {
                    Item::Piece(flow, _) => flows.get(flow).is_some_and(|flow| serves(flow.policy.links)),
                    Item::Control(_) => !backup || regular.is_empty(),
                };
                let Some(slow) = self.paths.get_mut(&other) else { break };
                let pace = slow.pace();
                let late = |sent: Time, before: u64, size: u64| sent + pace.arrival(before, size) > here;
                let Some(items) = slow.tracker.repeat_next(late, may).map(<[Item]>::to_vec) else { break };
                for item in items {
                    if let Some(rest) = self.put_copy(item, draft)
                        && let Some(path) = self.paths.get_mut(&id)
                    {
                        path.extra.push_back(Extra::Copy(rest));
                    }
                }
            }
        }
    }

    /// Adds a probe (PING) to a path that is not good, if one is due.
    fn put_probe(&mut self, now: Time, id: PathId, draft: &mut Draft<'_>) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        if path.next_probe.is_none_or(|due| due > now) {
            return;
        }
        path.on_probe(now);
        draft.eliciting |= draft.add(&Frame::Ping);
    }
}

/// Length of the header of a chunk or message, with a two-byte length field.
fn wire_head(flow: FlowKey, offset: u64) -> usize {
    1 + wire::varint_size(flow.0) + wire::varint_size(offset) + 2
}

/// Fragments a message that fits no datagram of at most `max` bytes. The fragments fit into the datagrams of every path, in case they are rerouted.
fn cut(flow: FlowKey, number: u64, data: &Bytes, max: usize) -> Vec<Extra> {
    let most = max.min(MIN_DATAGRAM) - MESSAGE_HEAD;
    let count = data.len().div_ceil(most.max(data.len().div_ceil(255)));
    let size = data.len().div_ceil(count.max(1)).max(1);
    let piece = |at: usize| data.slice((at * size).min(data.len())..((at + 1) * size).min(data.len()));
    (0..count).map(|at| Extra::Fragment(flow, number, at as u8, count as u8, piece(at))).collect()
}
