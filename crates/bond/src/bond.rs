//! The state machine of one bond: flows above, paths below. What the other end says comes in by `intake`; `upkeep` keeps flows, paths and the
//! scheduler in step; `transmit` says what goes out.

pub(crate) mod choice;
mod intake;
mod upkeep;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use braid_decide::midrr::{self, Flags, Midrr};
use braid_model::{ByteCount, LinkSet, Time};
use bytes::Bytes;

use crate::flow::FlowState;
use crate::path::{Path, PathState};

use crate::report::{Event, FlowError, FlowView, PathView};
use crate::tracker::Control;
use crate::window::Window;
use crate::{FlowKey, FlowPolicy, Limits, Open, PathFacts, PathId, PathUpdate, Side};
use choice::{Chooser, SchedulingPlan};

/// What a flow of weight 1 is given in a turn.
const QUANTUM: ByteCount = ByteCount::new(1500);
/// How far each flow, and all flows, may go before any credit is given: part of the protocol's version.
const INITIAL_WINDOW: u64 = 512 << 10;
const INITIAL_TOTAL: u64 = 16 << 20;
/// How late both ends' programs may be, at most, with what they could do at once.
const WAKING: Duration = Duration::from_millis(10);
/// What a flow may always have written and unacknowledged.
const MIN_SEND_BUFFER: u64 = 256 << 10;
/// The part of all flows' window that messages may take, in each direction.
const MESSAGES_SHARE: u64 = 4;
/// Paths of one bond: as many as the scheduler has links.
const MAX_PATHS: usize = braid_model::LinkSet::CAPACITY;

/// One end of a bond.
pub struct Bond {
    pub(crate) side: Side,
    pub(crate) limits: Limits,
    pub(crate) paths: BTreeMap<PathId, Path>,
    /// Which path has which slot of the scheduler.
    pub(crate) slots: Vec<Option<PathId>>,
    pub(crate) flows: BTreeMap<FlowKey, FlowState>,
    pub(crate) scheduler: Midrr,
    pub(crate) keys: BTreeMap<midrr::FlowKey, FlowKey>,
    /// When flows that are kept from slow paths may use them again: what is known of paths changes.
    pub(crate) reconsider: Option<Time>,
    /// How this end spreads what it sends. Client: how the server is to do it, and whether it obeys. The version of the server's plan.
    pub(crate) plan: SchedulingPlan,
    pub(crate) servers_plan: SchedulingPlan,
    pub(crate) plan_version: u64,
    pub(crate) obeyed: bool,
    /// What chooses paths in place of the scheduler.
    pub(crate) chooser: Option<Chooser>,
    /// Urgent flows that have something to send.
    pub(crate) urgent: BTreeSet<FlowKey>,
    /// When something urgent was last sent.
    pub(crate) hurried_at: Option<Time>,
    pub(crate) control: VecDeque<Control>,
    pub(crate) events: VecDeque<Event>,
    next_flow: u64,
    finished: Window<{ intake::MAX_AHEAD }>,
    /// Sum of the highest offsets of all flows, sent and received, and how far each may go.
    pub(crate) sent_total: u64,
    /// Bytes of all flows written and not acknowledged.
    held_total: u64,
    pub(crate) send_limit: u64,
    received_total: u64,
    read_total: u64,
    pub(crate) receive_limit: u64,
    /// Paths of which an update is to be sent.
    pub(crate) path_updates: BTreeMap<PathId, PathUpdate>,
    /// Flows that could send but for the credit of all.
    pub(crate) starved: BTreeSet<FlowKey>,
    /// Flows that could be written to but for what all flows hold.
    blocked: BTreeSet<FlowKey>,
    /// Flows that are kept from some paths for a while.
    pub(crate) kept: BTreeSet<FlowKey>,
    /// How often a flow was refreshed.
    #[cfg(test)]
    pub(crate) refreshed: usize,
    /// Pieces of all flows that came too early.
    pieces: usize,
    /// In how many ranges, at most, what one flow has sent fell apart.
    pub(crate) most_ranges: usize,
    /// What the messages of all flows cost that wait to be read, and to be sent.
    unread_messages: usize,
    pub(crate) queued_messages: usize,
}

impl Bond {
    /// One end of a new bond.
    pub fn new(side: Side, limits: Limits, _now: Time) -> Self {
        let scheduler = match Midrr::new(0, QUANTUM, Flags::COUNTED) {
            Ok(scheduler) => scheduler,
            Err(_) => unreachable!("no links and six bits are always allowed"),
        };
        Self {
            side,
            limits,
            paths: BTreeMap::new(),
            slots: Vec::new(),
            flows: BTreeMap::new(),
            scheduler,
            keys: BTreeMap::new(),
            reconsider: None,
            plan: SchedulingPlan::default(),
            servers_plan: SchedulingPlan::default(),
            plan_version: 0,
            obeyed: false,
            chooser: None,
            urgent: BTreeSet::new(),
            hurried_at: None,
            control: VecDeque::new(),
            events: VecDeque::new(),
            next_flow: 0,
            finished: Window::default(),
            sent_total: 0,
            held_total: 0,
            send_limit: INITIAL_TOTAL,
            received_total: 0,
            read_total: 0,
            receive_limit: INITIAL_TOTAL,
            path_updates: BTreeMap::new(),
            starved: BTreeSet::new(),
            blocked: BTreeSet::new(),
            kept: BTreeSet::new(),
            #[cfg(test)]
            refreshed: 0,
            pieces: 0,
            most_ranges: 0,
            unread_messages: 0,
            queued_messages: 0,
        }
    }

    // Paths.

    /// A QUIC connection over link `link` (0 to 63) has proven itself and joined the bond. `false` if there are too many paths.
    pub fn add_path(&mut self, now: Time, id: PathId, link: u8, facts: PathFacts) -> bool {
        if self.paths.contains_key(&id) {
            return false;
        }
        let slot = match self.slots.iter().position(Option::is_none) {
            Some(slot) => slot,
            None if self.slots.len() < MAX_PATHS => {
                self.slots.push(None);
                if self.scheduler.add_link().is_err() {
                    return false;
                }
                self.slots.len() - 1
            }
            None => return false,
        };
        self.slots[slot] = Some(id);
        let mut path = Path::new(now, link, slot, facts);
        // The server waits for a word before it sends.
        path.greets = self.side == Side::Client;
        path.share = self.plan.share(link);
        self.paths.insert(id, path);
        self.scheduler.forget();
        self.chooser.iter_mut().for_each(Chooser::reconsider);
        self.apply_policies();
        true
    }

    /// A path's connection is gone for good: what it held goes elsewhere.
    pub fn remove_path(&mut self, id: PathId) {
        let Some(mut path) = self.paths.remove(&id) else { return };
        self.slots[path.slot] = None;
        self.path_updates.remove(&id);
        let mut items = Vec::new();
        path.tracker.abandon(&mut items);
        self.again(items);
        self.reroute(path.extra);
        self.scheduler.forget();
        self.chooser.iter_mut().for_each(Chooser::reconsider);
        self.apply_policies();
    }

    /// What a path's congestion controller knows now.
    pub fn set_facts(&mut self, id: PathId, facts: PathFacts) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.facts = facts;
        }
    }

    /// The system says that a path's link is gone, or back, or that the user wants it as a backup only; the other end is told over the
    /// others.
    pub fn set_link(&mut self, now: Time, id: PathId, update: PathUpdate) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        match update {
            PathUpdate::Down => path.down_here = true,
            PathUpdate::Up => (path.down_here, path.backup) = (false, false),
            PathUpdate::Backup => (path.down_here, path.backup) = (false, true),
        }
        if !path.down_here {
            // What the other end said of it may be as old as the silence: it is asked, or both would wait for a word over this path.
            path.down_there = false;
        }
        let down = path.down_here;
        self.path_updates.insert(id, update);
        self.control.push_back(Control::Path(id));
        self.on_link(now, id, down);
        self.apply_policies();
    }

    /// The client wants a path as a backup only, or not: known at the start, so that nobody has to be told.
    pub fn set_backup(&mut self, id: PathId, backup: bool) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.backup = backup;
        }
        self.apply_policies();
    }

    /// Whether a path that is not good is to be asked for a sign of life now, for which it needs no window.
    pub fn wants_probe(&self, now: Time, id: PathId) -> bool {
        self.paths.get(&id).is_some_and(|path| path.next_probe.is_some_and(|due| due <= now))
    }

    /// Paths in order of their numbers.
    pub fn paths(&self) -> impl Iterator<Item = (PathId, PathView)> {
        self.paths.iter().map(|(id, path)| (*id, view(path)))
    }

    // Flows.

    /// Opens a flow; its first bytes may be written at once.
    pub fn open(&mut self, now: Time, open: Open) -> Result<FlowKey, FlowError> {
        if self.side == Side::Server {
            return Err(FlowError::Server);
        }
        if self.flows.len() >= self.limits.flows {
            return Err(FlowError::TooMany(self.limits.flows));
        }
        let id = FlowKey(self.next_flow);
        self.next_flow += 1;
        self.insert_flow(now, id, Some(open));
        self.control.push_back(Control::Open(id));
        Ok(id)
    }

    /// The server's answer to [`Event::Incoming`]: 0, or why the flow cannot be (which also resets it).
    pub fn opened(&mut self, now: Time, id: FlowKey, code: u64) {
        if !self.flows.contains_key(&id) {
            return;
        }
        self.control.push_back(Control::Opened(id, code));
        if code != 0 {
            self.reset(now, id, code);
        }
    }

    /// How many bytes a flow takes now; 0 asks for an [`Event::Writable`] later.
    pub fn writable(&mut self, now: Time, id: FlowKey) -> usize {
        let limit = self.send_buffer();
        let Some(flow) = self.flows.get_mut(&id) else { return 0 };
        if flow.reset_sent.is_some() || flow.send.is_finished() {
            return 0;
        }
        let own = limit.saturating_sub(flow.send.held());
        if own < limit / 4 {
            // A few large writes cost less than many small ones: it is told again when a quarter is free.
            flow.full_at = now;
            flow.blocked = Some(limit - limit / 4);
            return 0;
        }
        let room = own.min(self.limits.total_window.saturating_sub(self.held_total));
        if room == 0 {
            flow.blocked = Some(flow.send.held());
            self.blocked.insert(id);
        }
        usize::try_from(room).unwrap_or(usize::MAX)
    }

    /// The memory that it holds, about: bytes received and not read, or not acknowledged yet, messages that wait, and what flows and datagrams that
    /// are not acknowledged cost beside their bytes. Looks at each of them.
    pub fn held(&self) -> ByteCount {
        let unread = self.received_total.saturating_sub(self.read_total);
        let remembered: usize = self.paths.values().map(|path| path.tracker.cost()).sum();
        let flows: usize = self.flows.values().map(FlowState::cost).sum();
        let kept = remembered + flows + self.control.len() * size_of::<Control>() + self.finished.cost();
        ByteCount::new(unread + self.held_total + (self.unread_messages + self.queued_messages + kept) as u64)
    }

    /// What a flow may keep: what all paths carry in four round trips of the slowest: all of
    /// that may wait for one datagram of that path, which may have to be sent again.
    fn send_buffer(&self) -> u64 {
        let slowest = self.paths.values().map(|path| path.srtt).max().unwrap_or_default();
        let carried = |path: &Path| path.facts.window.get() as u128 * slowest.as_nanos() / path.srtt.as_nanos().max(1);
        let all: u128 = self.paths.values().filter(|path| path.is_good()).map(carried).sum();
        u64::try_from(4 * all).unwrap_or(u64::MAX).clamp(MIN_SEND_BUFFER, self.limits.send_buffer.max(MIN_SEND_BUFFER))
    }

    /// Appends bytes to a stream flow; more than [`Self::writable`] allows is taken too, but should not be given.
    pub fn write(&mut self, id: FlowKey, data: Bytes) {
        if let Some(flow) = self.flows.get_mut(&id)
            && flow.reset_sent.is_none()
            && !flow.send.is_finished()
        {
            self.held_total += data.len() as u64;
            flow.send.write(data);
            self.release(id);
            self.refresh(id);
        }
    }

    /// Nothing more will be written: the other end reads the end behind the last byte.
    pub fn finish(&mut self, now: Time, id: FlowKey) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.send.finish();
            self.refresh(id);
            self.tidy(now, id);
        }
    }

    /// Ends a flow's sending side at once; what was written may not arrive.
    pub fn reset(&mut self, now: Time, id: FlowKey, code: u64) {
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| flow.reset_sent.is_none()) else { return };
        if flow.send.is_done() {
            return;
        }
        flow.reset_sent = Some(code);
        self.held_total -= flow.send.clear();
        self.wake_blocked();
        self.control.push_back(Control::Reset(id, code));
        self.refresh(id);
        self.tidy(now, id);
    }

    /// Nobody uses a flow any more: what was finished still arrives, the rest is reset and stopped.
    pub fn abandon(&mut self, now: Time, id: FlowKey, code: u64) {
        if self.flows.get(&id).is_some_and(|flow| !flow.send.is_finished()) {
            self.reset(now, id, code);
        }
        self.stop(now, id, code);
    }

    /// Nothing more will be read of a flow; the other end is asked to stop sending.
    pub fn stop(&mut self, now: Time, id: FlowKey, code: u64) {
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| !flow.stopped) else { return };
        flow.stopped = true;
        if !flow.receive.is_at_end() {
            self.control.push_back(Control::Stop(id, code));
        }
        while self.read(now, id, usize::MAX).is_some() {}
    }

    /// Next bytes of a stream flow, at most `most`; `None` if there are none now (see [`Self::is_finished`] for the end).
    pub fn read(&mut self, now: Time, id: FlowKey, most: usize) -> Option<Bytes> {
        let max_window = self.limits.max_window;
        let flow = self.flows.get_mut(&id)?;
        flow.readable_told = false;
        let srtt = self.paths.values().map(|path| path.srtt).max().unwrap_or_default();
        let data = flow.receive.read(most);
        if let Some(data) = &data {
            self.read_total += data.len() as u64;
        }
        // A window that is used up within two round trips is what holds the flow back. On the fastest paths a round trip is less than
        // what programs take to wake up.
        let grow = now.since(flow.credit_told) < srtt * 2 + WAKING;
        if flow.reset_received.is_none() && flow.receive.grant(grow, max_window).is_some() {
            flow.credit_told = now;
            self.control.push_back(Control::Credit(id));
        }
        self.grant_total();
        if data.is_none() {
            self.tidy(now, id);
        }
        data
    }

    /// Whether all of a flow was read, to its end.
    pub fn is_finished(&self, id: FlowKey) -> bool {
        self.flows.get(&id).is_none_or(|flow| flow.receive.is_at_end() && flow.reset_received.is_none())
    }

    /// Queues a message of a datagram flow. `false` if it is larger than UDP allows, or there is no such flow.
    pub fn send_message(&mut self, id: FlowKey, data: Bytes) -> bool {
        let full = self.queued_messages + data.len() > self.messages_limit();
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| flow.reset_sent.is_none()) else { return false };
        if full {
            // As a router's queue would; which message goes is chance.
            flow.messages.dropped += 1;
            return data.len() <= crate::messages::MAX_MESSAGE;
        }
        self.queued_messages -= flow.messages.queued();
        let taken = flow.messages.push(data);
        self.queued_messages += flow.messages.queued();
        self.refresh(id);
        taken
    }

    /// Next message of a datagram flow.
    pub fn read_message(&mut self, id: FlowKey) -> Option<Bytes> {
        let flow = self.flows.get_mut(&id)?;
        flow.readable_told = false;
        self.unread_messages -= flow.messages.unread();
        let message = flow.messages.read();
        self.unread_messages += flow.messages.unread();
        message
    }

    fn messages_limit(&self) -> usize {
        usize::try_from(self.limits.total_window / MESSAGES_SHARE).unwrap_or(usize::MAX)
    }

    /// Client: changes how a flow is treated, at both ends, from now on: this is how it is moved to other links.
    pub fn set_policy(&mut self, id: FlowKey, policy: FlowPolicy) {
        let Some(flow) = self.flows.get_mut(&id).filter(|_| self.side == Side::Client) else { return };
        flow.policy_version += 1;
        (flow.policy, flow.held) = (policy, LinkSet::EMPTY);
        let version = flow.policy_version;
        self.control.push_back(Control::Policy(id, version));
        self.apply_policy(id);
        self.refresh(id);
    }

    /// Whether something urgent was sent within the last second, and more is to be expected.
    pub fn hurries(&self, now: Time) -> bool {
        self.hurried_at.is_some_and(|at| now.since(at) < Duration::from_secs(1))
    }

    /// How many flows there are.
    pub fn flows(&self) -> usize {
        self.flows.len()
    }

    /// What can be told of a flow.
    pub fn flow(&self, id: FlowKey) -> Option<FlowView> {
        let flow = self.flows.get(&id)?;
        Some(FlowView { policy: flow.policy, by_link: flow.by_link.clone(), held: ByteCount::new(flow.send.held()) })
    }

    /// What happened, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    // Time.

    /// When [`Self::handle_timeout`] is to be called.
    pub fn poll_timeout(&self) -> Option<Time> {
        let good = self.paths.values().any(Path::is_good);
        let due = |path: &Path| {
            // A path that is down cannot speak; what it is to tell goes over a good one, if there is one.
            let ack = path.received.due.filter(|_| good || !path.is_down());
            [path.suspect_at(), path.dead_at(), path.next_probe, path.loss_due, ack]
        };
        self.paths.values().flat_map(due).flatten().chain(self.reconsider).min()
    }

    /// Time has passed: losses, silences and probes. Then ask for datagrams.
    pub fn handle_timeout(&mut self, now: Time) {
        let ids: Vec<PathId> = self.paths.keys().copied().collect();
        if self.reconsider.take_if(|due| *due <= now).is_some() {
            self.release_all();
        }
        for id in ids {
            self.look_for_losses(now, id);
            let Some(path) = self.paths.get_mut(&id) else { continue };
            path.relax(now);
            if path.suspect_at().is_some_and(|due| due <= now) {
                self.on_silence(now, id);
            } else if path.dead_at().is_some_and(|due| due <= now) {
                self.set_state(now, id, PathState::Dead);
            }
        }
    }

    /// A path owes an acknowledgement.
    fn on_silence(&mut self, now: Time, id: PathId) {
        let others = self.paths.iter().any(|(other, path)| *other != id && path.is_good());
        let Some(path) = self.paths.get_mut(&id) else { return };
        if path.state == PathState::Probing {
            self.set_state(now, id, PathState::Dead);
        } else if others || !path.go_on(now) {
            self.set_state(now, id, PathState::Suspect);
        } else {
            let mut items = Vec::new();
            path.tracker.repeat_all(&mut items);
            self.again(items);
        }
    }
}

/// Codes with which flows are refused and reset, beside Linux's error numbers (`docs/protocol.md`).
pub mod codes {
    /// The server does not open that destination (Linux: EACCES).
    pub const NOT_OPENED: u64 = 13;
    /// Nobody listens there (Linux: ECONNREFUSED).
    pub const REFUSED: u64 = 111;
    /// The address is not the server's own, and it opens no others (Linux: EADDRNOTAVAIL).
    pub const NOT_ITS_OWN: u64 = 99;
    /// As many flows as there may be.
    pub const BUSY: u64 = 0x1001;
    /// The client's bytes of the month are used up.
    pub const QUOTA: u64 = 0x1002;
}

fn view(path: &Path) -> PathView {
    PathView {
        link: path.link,
        state: path.state,
        backup: path.backup,
        srtt: path.srtt,
        rate: path.facts.rate,
        window: path.facts.window,
        in_flight: ByteCount::new(path.tracker.in_flight()),
        delivered: ByteCount::new(path.tracker.delivered),
        lost: ByteCount::new(path.tracker.lost),
        received: ByteCount::new(path.received.bytes),
    }
}
