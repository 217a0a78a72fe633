//! Processes received datagrams, frame by frame.

use std::time::Duration;

use braid_model::{ByteCount, LinkSet, Time, Traffic};
use bytes::Bytes;

use super::{Bond, codes};
use crate::flow::FlowState;
use crate::path::PathState;
use crate::report::{BondError, Event};
use crate::tracker::{Acked, Control, Item};
use crate::wire::{Ack, Frame, Header};
use crate::{FlowKey, Open, PathId, PathUpdate, Side};

/// How far a client's flow numbers may run ahead of the highest that the server has seen. Chunks of later flows may arrive first.
pub(super) const MAX_AHEAD: u64 = 1 << 16;
/// Limit of the queued control frames. An end that exceeds it causes more answers than it accepts.
const MAX_CONTROL: usize = 1 << 16;
/// Limit of the unacknowledged datagrams of all paths, and of the control items in them. An end that exceeds it acknowledges more slowly than it
/// causes answers. 10 Gbit/s over a round trip of 200 ms stay below it.
const MAX_REMEMBERED: usize = 1 << 18;
/// Limit of the acknowledged and lost ranges of one flow. A window of full-size datagrams of which every second one is lost stays below it.
const MAX_RANGES: usize = 1 << 15;
/// Limit of the out-of-order chunks of all flows. A window of full-size datagrams stays below it.
const MAX_PIECES: usize = 1 << 17;

/// Datagrams that arrive over a path this long after a report that its link is down were sent after the report.
const LATE: Duration = Duration::from_secs(1);

impl Bond {
    /// Processes a datagram that arrived over a path. After an error the caller must close the bond.
    pub fn receive(&mut self, now: Time, id: PathId, mut datagram: Bytes) -> Result<(), BondError> {
        let size = datagram.len();
        let Some(path) = self.paths.get_mut(&id) else { return Ok(()) };
        let link = path.link;
        if path.down_there && now.since(path.down_there_at) >= LATE {
            // Data over the path proves that its link is up again, whatever the last update said. Only datagrams that the other end sent before its
            // report arrive earlier, because the report may take a faster path.
            path.down_there = false;
            if !path.down_here {
                path.next_probe = Some(now);
            }
        }
        let header = Header::decode(&mut datagram)?;
        if path.down_here && header.sequence.is_some() && now.since(path.down_reported_at) >= LATE {
            // The other end still sends over the path: an allowance is used up, for example, and each byte costs money.
            path.down_reported_at = now;
            self.control.push_back(Control::Path(id));
        }
        let mut urgent = false;
        let mut acknowledged = Vec::new();
        while let Some(frame) = Frame::decode(&mut datagram)? {
            if let Frame::Ack(ack) = &frame
                && self.paths.contains_key(&ack.path)
            {
                // Each ACK frame costs a walk over the datagrams that the path has sent.
                if acknowledged.contains(&ack.path) {
                    return Err(BondError::Repeated);
                }
                acknowledged.push(ack.path);
            }
            urgent |= matches!(frame, Frame::Ping | Frame::Path { .. } | Frame::Chunk { fin: true, .. } | Frame::Reset { .. });
            self.on_frame(now, link, frame)?;
        }
        self.apply_pending_plan(now);
        if let (Some(sequence), Some(path)) = (header.sequence, self.paths.get_mut(&id)) {
            path.received.on_datagram(now, sequence, size, urgent);
        }
        if self.max_ranges > MAX_RANGES {
            return Err(BondError::Gaps(self.max_ranges));
        }
        let (datagrams, controls) = self.remembered();
        let bounds = [(self.control.len(), MAX_CONTROL), (controls, MAX_REMEMBERED), (datagrams, MAX_REMEMBERED)];
        bounds.into_iter().find(|(waiting, most)| waiting > most).map_or(Ok(()), |(waiting, _)| Err(BondError::Backlog(waiting)))
    }

    /// Unacknowledged datagrams of all paths, and the control items in them.
    fn remembered(&self) -> (usize, usize) {
        let each = self.paths.values().map(|path| path.tracker.remembered());
        each.fold((0, 0), |sum, path| (sum.0 + path.0, sum.1 + path.1))
    }

    fn on_frame(&mut self, now: Time, link: u8, frame: Frame) -> Result<(), BondError> {
        match frame {
            Frame::Ack(ack) => self.on_ack(now, &ack),
            Frame::Chunk { flow, offset, fin, data } => self.on_chunk(now, link, flow, offset, fin, data),
            Frame::Reset { flow, code, size } => self.on_reset(now, flow, code, size),
            Frame::Stop { flow, code } => {
                if self.find_or_create(now, flow)?
                    && let Some(found) = self.flows.get_mut(&flow).filter(|found| found.stop_received.is_none())
                {
                    found.stop_received = Some(code);
                    if found.open.is_some() {
                        self.events.push_back(Event::Stopped { flow, code });
                    }
                    self.reset(now, flow, code);
                }
                Ok(())
            }
            Frame::Credit { flow, limit } => {
                if self.find_or_create(now, flow)?
                    && let Some(found) = self.flows.get_mut(&flow)
                {
                    found.send.set_credit(limit);
                    self.refresh(flow);
                }
                Ok(())
            }
            Frame::TotalCredit { limit } => {
                if limit > self.send_limit {
                    self.send_limit = limit;
                    std::mem::take(&mut self.starved).into_iter().for_each(|id| self.refresh(id));
                }
                Ok(())
            }
            Frame::Path { path, update } => {
                self.on_path_update(now, path, update);
                Ok(())
            }
            Frame::Ping => Ok(()),
            Frame::Message { flow, number, data } => {
                self.on_message(now, link, flow, data.len(), |flow| flow.messages.insert(number, data))
            }
            Frame::Fragment { flow, number, index, count, data } => {
                self.on_message(now, link, flow, data.len(), |flow| flow.messages.insert_fragment(number, index, count, data))
            }
            Frame::Open { flow, open } => self.on_open(now, flow, open),
            Frame::Opened { .. } if self.side == Side::Server => Err(BondError::Role("OPENED")),
            Frame::Policy { .. } if self.side == Side::Client => Err(BondError::Role("POLICY")),
            Frame::Scheduling { .. } if self.side == Side::Client => Err(BondError::Role("SCHEDULING")),
            Frame::Scheduling { version, plan } => {
                self.on_plan(version, plan);
                Ok(())
            }
            Frame::Opened { flow, code } => {
                if self.find_or_create(now, flow)?
                    && let Some(found) = self.flows.get_mut(&flow).filter(|found| !found.answered)
                {
                    found.answered = true;
                    self.events.push_back(Event::Opened { flow, code });
                }
                Ok(())
            }
            Frame::Policy { flow, version, policy } => {
                if self.find_or_create(now, flow)?
                    && let Some(found) = self.flows.get_mut(&flow).filter(|found| found.policy_version < version)
                {
                    (found.policy, found.policy_version, found.excluded_slots) = (policy, version, LinkSet::EMPTY);
                    self.apply_policy(flow);
                    self.refresh(flow);
                }
                Ok(())
            }
        }
    }

    fn on_ack(&mut self, now: Time, ack: &Ack) -> Result<(), BondError> {
        let Some(path) = self.paths.get_mut(&ack.path) else { return Ok(()) };
        let mut acked = Acked::default();
        path.tracker.on_ack(now, ack, &mut acked).map_err(|()| BondError::Nonexistent("a datagram"))?;
        if let Some(sent) = acked.newest {
            path.on_sample(now, sent, ack.delay);
        }
        if acked.any && !path.is_down() {
            let state = path.on_delivery();
            self.set_state(now, ack.path, state);
        }
        for item in acked.items {
            self.on_delivered(now, item);
        }
        self.look_for_losses(now, ack.path);
        Ok(())
    }

    fn on_delivered(&mut self, now: Time, item: Item) {
        match item {
            Item::Piece(id, piece) => {
                let Some(flow) = self.flows.get_mut(&id) else { return };
                if flow.reset_sent.is_some() {
                    return;
                }
                let freed = flow.send.on_acked(&piece);
                self.max_ranges = self.max_ranges.max(flow.send.ranges());
                self.held_total -= freed;
                if freed > 0 && flow.blocked.take_if(|until| flow.send.held() <= *until).is_some() {
                    self.events.push_back(Event::Writable(id));
                }
                if flow.send.is_done() {
                    self.remove_if_over(now, id);
                }
                self.wake_blocked();
            }
            Item::Control(Control::Reset(id, _)) => {
                if let Some(flow) = self.flows.get_mut(&id) {
                    flow.reset_acked = true;
                    self.remove_if_over(now, id);
                }
            }
            Item::Control(_) => {}
        }
    }

    /// Wakes flows that waited for space in the common send buffer. Such a flow may have no data in flight whose acknowledgement would wake it.
    pub(super) fn wake_blocked(&mut self) {
        if self.blocked.is_empty() || self.held_total > self.limits.total_window / 4 * 3 {
            return;
        }
        for id in std::mem::take(&mut self.blocked) {
            if self.flows.get_mut(&id).is_some_and(|flow| flow.blocked.take().is_some()) {
                self.events.push_back(Event::Writable(id));
            }
        }
    }

    fn on_chunk(&mut self, now: Time, link: u8, id: FlowKey, offset: u64, fin: bool, data: Bytes) -> Result<(), BondError> {
        if !self.find_or_create(now, id)? {
            return Ok(());
        }
        let Some(flow) = self.flows.get_mut(&id) else { return Ok(()) };
        if flow.reset_received.is_some() {
            return Ok(());
        }
        flow.count(link, Traffic::received(ByteCount::new(data.len() as u64)));
        let before = flow.receive.pieces();
        let rise = flow.receive.insert(offset, data, fin).map_err(|error| BondError::Receive(id, error))?;
        self.pieces = self.pieces - before + flow.receive.pieces();
        if self.pieces > MAX_PIECES {
            return Err(BondError::Gaps(self.pieces));
        }
        let stopped = flow.stopped;
        if flow.receive.is_readable() && flow.open.is_some() && !flow.readable_reported && !stopped {
            flow.readable_reported = true;
            self.events.push_back(Event::Readable(id));
        }
        self.count_received(rise)?;
        if stopped {
            while self.read(now, id, usize::MAX).is_some() {}
        }
        Ok(())
    }

    fn on_reset(&mut self, now: Time, id: FlowKey, code: u64, size: u64) -> Result<(), BondError> {
        if !self.find_or_create(now, id)? {
            return Ok(());
        }
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| flow.reset_received.is_none()) else { return Ok(()) };
        let unread = size.saturating_sub(flow.receive.read_offset());
        self.pieces -= flow.receive.pieces();
        let rise = flow.receive.reset(size).map_err(|error| BondError::Receive(id, error))?;
        flow.reset_received = Some(code);
        self.count_received(rise)?;
        self.read_total += unread;
        self.grant_total();
        if self.flows.get(&id).is_some_and(|flow| flow.open.is_some()) {
            self.events.push_back(Event::Reset { flow: id, code });
        }
        self.remove_if_over(now, id);
        Ok(())
    }

    fn on_message(
        &mut self,
        now: Time,
        link: u8,
        id: FlowKey,
        size: usize,
        insert: impl FnOnce(&mut FlowState) -> bool,
    ) -> Result<(), BondError> {
        let full = self.unread_messages + size > self.messages_limit();
        if self.find_or_create(now, id)?
            && let Some(flow) = self.flows.get_mut(&id).filter(|flow| !flow.stopped && flow.reset_received.is_none())
        {
            flow.count(link, Traffic::received(ByteCount::new(size as u64)));
            if full {
                flow.messages.dropped += 1;
                return Ok(());
            }
            self.unread_messages -= flow.messages.unread();
            let readable = insert(flow);
            self.unread_messages += flow.messages.unread();
            if readable && flow.open.is_some() && !flow.readable_reported {
                flow.readable_reported = true;
                self.events.push_back(Event::Readable(id));
            }
        }
        Ok(())
    }

    fn on_open(&mut self, now: Time, id: FlowKey, open: Open) -> Result<(), BondError> {
        if self.side == Side::Client {
            return Err(BondError::Role("OPEN"));
        }
        if !self.find_or_create(now, id)? {
            return Ok(());
        }
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| flow.open.is_none()) else { return Ok(()) };
        if flow.policy_version == 0 {
            flow.policy = open.policy;
        }
        flow.open = Some(open.clone());
        let readable = flow.receive.is_readable() || flow.messages.unread() > 0;
        flow.readable_reported |= readable;
        let (reset, stop) = (flow.reset_received, flow.stop_received);
        self.apply_policy(id);
        self.events.push_back(Event::Incoming { flow: id, open });
        // Events of frames that arrived before the OPEN follow it.
        if readable {
            self.events.push_back(Event::Readable(id));
        }
        if let Some(code) = reset {
            self.events.push_back(Event::Reset { flow: id, code });
        }
        if let Some(code) = stop {
            self.events.push_back(Event::Stopped { flow: id, code });
        }
        Ok(())
    }

    fn on_path_update(&mut self, now: Time, id: PathId, update: PathUpdate) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        let before = path.backup;
        match update {
            PathUpdate::Down => (path.down_there, path.down_there_at) = (true, now),
            PathUpdate::Up => (path.down_there, path.backup) = (false, false),
            PathUpdate::Backup => (path.down_there, path.backup) = (false, true),
        }
        let (down, changed) = (path.down_there, path.backup != before);
        self.on_link(now, id, down);
        if changed {
            self.apply_policies();
        }
    }

    pub(super) fn on_link(&mut self, now: Time, id: PathId, down: bool) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        if down {
            path.next_probe = None;
            self.set_state(now, id, PathState::Dead);
        } else if !path.is_good() && !path.is_down() {
            path.next_probe = Some(now);
        }
    }

    /// Returns whether a flow exists. The server creates a flow with a new number. Returns an error if the number is not valid.
    fn find_or_create(&mut self, now: Time, id: FlowKey) -> Result<bool, BondError> {
        if self.flows.contains_key(&id) {
            return Ok(true);
        }
        if self.side == Side::Client {
            return if id.0 < self.next_flow { Ok(false) } else { Err(BondError::Nonexistent("a flow")) };
        }
        // No first frame arrives for a flow this old, so the bond need not remember each finished flow.
        if self.finished.contains(id.0) || id.0 + MAX_AHEAD < self.next_flow {
            return Ok(false);
        }
        if id.0 >= self.next_flow + MAX_AHEAD {
            return Err(BondError::Nonexistent("a flow"));
        }
        if id.0 >= self.next_flow {
            self.next_flow = id.0 + 1;
        }
        if self.flows.len() >= self.limits.flows {
            self.refuse(id);
            return Ok(false);
        }
        self.insert_flow(now, id, None);
        Ok(true)
    }

    /// Refuses a flow without keeping state for it.
    fn refuse(&mut self, id: FlowKey) {
        self.finished.insert(id.0);
        self.control.push_back(Control::Opened(id, codes::BUSY));
        self.control.push_back(Control::Reset(id, codes::BUSY));
        self.control.push_back(Control::Stop(id, codes::BUSY));
    }

    fn count_received(&mut self, rise: u64) -> Result<(), BondError> {
        self.received_total += rise;
        if self.received_total > self.receive_limit { Err(BondError::TotalCredit) } else { Ok(()) }
    }

    pub(super) fn grant_total(&mut self) {
        let window = self.limits.total_window;
        if self.receive_limit - self.read_total <= window / 2 {
            self.receive_limit = self.read_total + window;
            self.control.push_back(Control::TotalCredit);
        }
    }
}
