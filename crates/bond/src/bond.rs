//! State machine of one bond: flows above, paths below. `intake` processes received frames; `upkeep` keeps flows, paths and the scheduler consistent;
//! `transmit` builds datagrams.

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

use crate::plan::SchedulingPlan;
use crate::report::{Event, FlowError, FlowView, PathView};
use crate::tracker::Control;
use crate::window::Window;
use crate::{FlowKey, FlowPolicy, Limits, Open, PathFacts, PathId, PathUpdate, Side};
use choice::Chooser;

/// Scheduling quantum of a flow of weight 1.
const QUANTUM: ByteCount = ByteCount::new(1500);
/// Initial credit of each flow, and of all flows together. Part of the protocol's version.
const INITIAL_WINDOW: u64 = 512 << 10;
const INITIAL_TOTAL: u64 = 16 << 20;
/// Upper bound of the wake-up latency of both ends' programs.
const WAKE_LATENCY: Duration = Duration::from_millis(10);
/// Lower bound of the send buffer of a flow.
const MIN_SEND_BUFFER: u64 = 256 << 10;
/// Messages may take this fraction (one over it) of the window of all flows, in each direction.
const MESSAGES_SHARE: u64 = 4;
/// Paths of one bond. The scheduler supports as many links.
const MAX_PATHS: usize = braid_model::LinkSet::CAPACITY;

/// One end of a bond.
pub struct Bond {
    pub(crate) side: Side,
    pub(crate) limits: Limits,
    pub(crate) paths: BTreeMap<PathId, Path>,
    /// The path in each slot of the scheduler.
    pub(crate) slots: Vec<Option<PathId>>,
    pub(crate) flows: BTreeMap<FlowKey, FlowState>,
    pub(crate) scheduler: Midrr,
    pub(crate) keys: BTreeMap<midrr::FlowKey, FlowKey>,
    /// When to release flows from `narrowed`: path conditions change, so an exclusion expires.
    pub(crate) reconsider: Option<Time>,
    /// How this end schedules what it sends. On the client also: the plan for the server, and whether the server supports plans.
    /// `plan_version` is the version of the server's plan.
    pub(crate) plan: SchedulingPlan,
    pub(crate) servers_plan: SchedulingPlan,
    /// Server: the newest plan, if it has not taken effect, and when it may.
    pending_plan: Option<SchedulingPlan>,
    plan_due: Option<Time>,
    pub(crate) plan_version: u64,
    pub(crate) obeyed: bool,
    /// The packet scheduler that replaces miDRR, if one is set.
    pub(crate) chooser: Option<Chooser>,
    /// Urgent flows with pending data.
    pub(crate) urgent: BTreeSet<FlowKey>,
    /// When urgent data was last sent.
    pub(crate) urgent_sent_at: Option<Time>,
    pub(crate) control: VecDeque<Control>,
    pub(crate) events: VecDeque<Event>,
    next_flow: u64,
    finished: Window<{ intake::MAX_AHEAD }>,
    /// Sum of the highest offsets of all flows, sent and received, and their limits.
    pub(crate) sent_total: u64,
    /// Written and unacknowledged bytes of all flows.
    held_total: u64,
    pub(crate) send_limit: u64,
    received_total: u64,
    read_total: u64,
    pub(crate) receive_limit: u64,
    /// The last update of each path, to be sent to the other end.
    pub(crate) path_updates: BTreeMap<PathId, PathUpdate>,
    /// Flows with pending data that lack connection-level credit (`send_limit`).
    pub(crate) starved: BTreeSet<FlowKey>,
    /// Flows that cannot be written to because the send buffers of all flows are full.
    blocked: BTreeSet<FlowKey>,
    /// Flows that may temporarily not use some paths (see `excluded_slots`).
    pub(crate) narrowed: BTreeSet<FlowKey>,
    /// Number of calls of `refresh` for a flow.
    #[cfg(test)]
    pub(crate) refreshed: usize,
    /// Out-of-order chunks buffered by all flows.
    pieces: usize,
    /// Largest number of ranges that the send state of one flow has had.
    pub(crate) max_ranges: usize,
    /// Memory of the unread messages of all flows, and of the queued ones.
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
            pending_plan: None,
            plan_due: None,
            plan_version: 0,
            obeyed: false,
            chooser: None,
            urgent: BTreeSet::new(),
            urgent_sent_at: None,
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
            narrowed: BTreeSet::new(),
            #[cfg(test)]
            refreshed: 0,
            pieces: 0,
            max_ranges: 0,
            unread_messages: 0,
            queued_messages: 0,
        }
    }

    // Paths.

    /// Adds a path: a QUIC connection over link `link` (0 to 63) that has proven membership of the bond. Returns `false` if there are too many paths
    /// or the bond already has path `id`.
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
        // The client sends a PING first. The server does not send before it has received something on the path.
        path.initial_ping = self.side == Side::Client;
        path.share = self.plan.share(link);
        self.paths.insert(id, path);
        self.scheduler.forget();
        self.chooser.iter_mut().for_each(Chooser::reconsider);
        self.apply_policies();
        true
    }

    /// Removes a path whose connection is gone. Its data in flight is retransmitted over other paths.
    pub fn remove_path(&mut self, id: PathId) {
        let Some(mut path) = self.paths.remove(&id) else { return };
        self.slots[path.slot] = None;
        self.path_updates.remove(&id);
        let mut items = Vec::new();
        path.tracker.abandon(&mut items);
        self.requeue(items);
        self.reroute(path.extra);
        self.scheduler.forget();
        self.chooser.iter_mut().for_each(Chooser::reconsider);
        self.apply_policies();
    }

    /// Updates the congestion controller's state of a path.
    pub fn set_facts(&mut self, id: PathId, facts: PathFacts) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.facts = facts;
        }
    }

    /// Reports that a path's link is down, up, or to be used as a backup only. The bond sends the update to the other end over any path.
    pub fn set_link(&mut self, now: Time, id: PathId, update: PathUpdate) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        match update {
            PathUpdate::Down => (path.down_here, path.down_reported_at) = (true, now),
            PathUpdate::Up => (path.down_here, path.backup) = (false, false),
            PathUpdate::Backup => (path.down_here, path.backup) = (false, true),
        }
        if !path.down_here {
            // The other end's report may be outdated. Clear it, so that this end probes the path; otherwise both ends would wait for a packet on it.
            path.down_there = false;
        }
        let down = path.down_here;
        self.path_updates.insert(id, update);
        self.control.push_back(Control::Path(id));
        self.on_link(now, id, down);
        self.apply_policies();
    }

    /// Sets whether a path is a backup. The other end already has this value from the Hello message, so no update is sent.
    pub fn set_backup(&mut self, id: PathId, backup: bool) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.backup = backup;
        }
        self.apply_policies();
    }

    /// Whether a probe is due on a path that is not good. A probe needs no room in the congestion window.
    pub fn is_probe_due(&self, now: Time, id: PathId) -> bool {
        self.paths.get(&id).is_some_and(|path| path.next_probe.is_some_and(|due| due <= now))
    }

    /// The paths, in order of their identifiers.
    pub fn paths(&self) -> impl Iterator<Item = (PathId, PathView)> {
        self.paths.iter().map(|(id, path)| (*id, view(path)))
    }

    // Flows.

    /// Opens a flow. Data may be written at once.
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

    /// The server's answer to [`Event::Incoming`]: 0 for success, or an error code, which also resets the flow.
    pub fn opened(&mut self, now: Time, id: FlowKey, code: u64) {
        if !self.flows.contains_key(&id) {
            return;
        }
        self.control.push_back(Control::Opened(id, code));
        if code != 0 {
            self.reset(now, id, code);
        }
    }

    /// Number of bytes that a flow accepts now. After 0, the bond emits [`Event::Writable`] when there is room again.
    pub fn writable(&mut self, now: Time, id: FlowKey) -> usize {
        let limit = self.send_buffer();
        let Some(flow) = self.flows.get_mut(&id) else { return 0 };
        if flow.reset_sent.is_some() || flow.send.is_finished() {
            return 0;
        }
        let own = limit.saturating_sub(flow.send.held());
        if own < limit / 4 {
            // Few large writes cost less than many small ones, so the event is emitted when a quarter of the buffer is free.
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

    /// Approximate memory of the bond: bytes received and not read, bytes written and not acknowledged, queued messages, and the bookkeeping of flows
    /// and unacknowledged datagrams. Takes time linear in the number of flows and datagrams.
    pub fn held(&self) -> ByteCount {
        let unread = self.received_total.saturating_sub(self.read_total);
        let remembered: usize = self.paths.values().map(|path| path.tracker.cost()).sum();
        let flows: usize = self.flows.values().map(FlowState::cost).sum();
        let kept = remembered + flows + self.control.len() * size_of::<Control>() + self.finished.cost();
        ByteCount::new(unread + self.held_total + (self.unread_messages + self.queued_messages + kept) as u64)
    }

    /// Send buffer of a flow: the amount that all paths carry in four round trips of the slowest path. All of that may have to wait for one datagram
    /// on the slowest path, which may need a retransmission.
    fn send_buffer(&self) -> u64 {
        let slowest = self.paths.values().map(|path| path.srtt).max().unwrap_or_default();
        let carried = |path: &Path| path.facts.window.get() as u128 * slowest.as_nanos() / path.srtt.as_nanos().max(1);
        let all: u128 = self.paths.values().filter(|path| path.is_good()).map(carried).sum();
        u64::try_from(4 * all).unwrap_or(u64::MAX).clamp(MIN_SEND_BUFFER, self.limits.send_buffer.max(MIN_SEND_BUFFER))
    }

    /// Appends bytes to a stream flow. The bond accepts more than [`Self::writable`] returns, but callers should not exceed it.
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

    /// Ends a flow's sending side. The other end reads the end of the stream after the last byte.
    pub fn finish(&mut self, now: Time, id: FlowKey) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.send.finish();
            self.refresh(id);
            self.remove_if_over(now, id);
        }
    }

    /// Resets a flow's sending side. Written data may not arrive.
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
        self.remove_if_over(now, id);
    }

    /// Releases a flow that the driver no longer uses. Data of a finished flow still arrives; an unfinished flow is reset. The receiving side is
    /// stopped.
    pub fn abandon(&mut self, now: Time, id: FlowKey, code: u64) {
        if self.flows.get(&id).is_some_and(|flow| !flow.send.is_finished()) {
            self.reset(now, id, code);
        }
        self.stop(now, id, code);
    }

    /// Stops reading a flow and asks the other end to stop sending.
    pub fn stop(&mut self, now: Time, id: FlowKey, code: u64) {
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| !flow.stopped) else { return };
        flow.stopped = true;
        if !flow.receive.is_at_end() {
            self.control.push_back(Control::Stop(id, code));
        }
        while self.read(now, id, usize::MAX).is_some() {}
    }

    /// Returns the next bytes of a stream flow, at most `most`; `None` if there are none now (see [`Self::is_finished`] for the end).
    pub fn read(&mut self, now: Time, id: FlowKey, most: usize) -> Option<Bytes> {
        let max_window = self.limits.max_window;
        let flow = self.flows.get_mut(&id)?;
        flow.readable_reported = false;
        let srtt = self.paths.values().map(|path| path.srtt).max().unwrap_or_default();
        let data = flow.receive.read(most);
        if let Some(data) = &data {
            self.read_total += data.len() as u64;
        }
        // If a window is used up within two round trips, the window limits the flow. On the fastest paths a round trip is shorter than the programs'
        // wake-up latency, hence the addition.
        let grow = now.since(flow.credit_sent_at) < srtt * 2 + WAKE_LATENCY;
        if flow.reset_received.is_none() && flow.receive.grant(grow, max_window).is_some() {
            flow.credit_sent_at = now;
            self.control.push_back(Control::Credit(id));
        }
        self.grant_total();
        if data.is_none() {
            self.remove_if_over(now, id);
        }
        data
    }

    /// Whether a flow was read to its end.
    pub fn is_finished(&self, id: FlowKey) -> bool {
        self.flows.get(&id).is_none_or(|flow| flow.receive.is_at_end() && flow.reset_received.is_none())
    }

    /// Queues a message of a datagram flow. Returns `false` if it is larger than UDP allows, or if there is no such flow.
    pub fn send_message(&mut self, id: FlowKey, data: Bytes) -> bool {
        let full = self.queued_messages + data.len() > self.messages_limit();
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| flow.reset_sent.is_none()) else { return false };
        if full {
            // Drop it, as a router's queue would.
            flow.messages.dropped += 1;
            return data.len() <= crate::messages::MAX_MESSAGE;
        }
        self.queued_messages -= flow.messages.queued();
        let taken = flow.messages.push(data);
        self.queued_messages += flow.messages.queued();
        self.refresh(id);
        taken
    }

    /// Returns the next message of a datagram flow.
    pub fn read_message(&mut self, id: FlowKey) -> Option<Bytes> {
        let flow = self.flows.get_mut(&id)?;
        flow.readable_reported = false;
        self.unread_messages -= flow.messages.unread();
        let message = flow.messages.read();
        self.unread_messages += flow.messages.unread();
        message
    }

    fn messages_limit(&self) -> usize {
        usize::try_from(self.limits.total_window / MESSAGES_SHARE).unwrap_or(usize::MAX)
    }

    /// Client: changes the policy of a flow at both ends from now on. This is how a flow moves to other links.
    pub fn set_policy(&mut self, id: FlowKey, policy: FlowPolicy) {
        let Some(flow) = self.flows.get_mut(&id).filter(|_| self.side == Side::Client) else { return };
        flow.policy_version += 1;
        (flow.policy, flow.excluded_slots) = (policy, LinkSet::EMPTY);
        let version = flow.policy_version;
        self.control.push_back(Control::Policy(id, version));
        self.apply_policy(id);
        self.refresh(id);
    }

    /// Whether urgent data was sent within the last second, so that more is likely.
    pub fn has_recent_urgent(&self, now: Time) -> bool {
        self.urgent_sent_at.is_some_and(|at| now.since(at) < Duration::from_secs(1))
    }

    /// Number of flows.
    pub fn flows(&self) -> usize {
        self.flows.len()
    }

    /// Whether there are flows other than those that do not end by themselves.
    pub fn has_ending_flows(&self) -> bool {
        let is_lasting = |flow: &FlowState| flow.open.as_ref().is_some_and(|open| open.kind.is_lasting());
        self.flows.values().any(|flow| !is_lasting(flow))
    }

    /// Statistics of a flow.
    pub fn flow(&self, id: FlowKey) -> Option<FlowView> {
        let flow = self.flows.get(&id)?;
        Some(FlowView { policy: flow.policy, by_link: flow.by_link.clone(), held: ByteCount::new(flow.send.held()) })
    }

    /// Returns the oldest pending event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    // Time.

    /// When to call [`Self::handle_timeout`] next.
    pub fn poll_timeout(&self) -> Option<Time> {
        let good = self.paths.values().any(Path::is_good);
        let due = |path: &Path| {
            // A path that is down cannot send. Its acknowledgements go over a good path, if there is one.
            let ack = path.received.due.filter(|_| good || !path.is_down());
            [path.suspect_at(), path.dead_at(), path.next_probe, path.loss_due, ack]
        };
        self.paths.values().flat_map(due).flatten().chain(self.reconsider).chain(self.pending_plan_due()).min()
    }

    /// Processes the passage of time: loss detection, silent paths and probes. Poll for datagrams afterwards.
    pub fn handle_timeout(&mut self, now: Time) {
        self.apply_pending_plan(now);
        let ids: Vec<PathId> = self.paths.keys().copied().collect();
        if self.reconsider.take_if(|due| *due <= now).is_some() {
            self.release_all();
        }
        for id in ids {
            self.look_for_losses(now, id);
            let Some(path) = self.paths.get_mut(&id) else { continue };
            path.relax_slack(now);
            if path.suspect_at().is_some_and(|due| due <= now) {
                self.on_silence(now, id);
            } else if path.dead_at().is_some_and(|due| due <= now) {
                self.set_state(now, id, PathState::Dead);
            }
        }
    }

    /// An acknowledgement is overdue on a path.
    fn on_silence(&mut self, now: Time, id: PathId) {
        let others = self.paths.iter().any(|(other, path)| *other != id && path.is_good());
        let Some(path) = self.paths.get_mut(&id) else { return };
        if path.state == PathState::Probing {
            self.set_state(now, id, PathState::Dead);
        } else if others || !path.on_overdue(now) {
            self.set_state(now, id, PathState::Suspect);
        } else {
            let mut items = Vec::new();
            path.tracker.repeat_all(&mut items);
            self.requeue(items);
        }
    }
}

/// Codes of refused and reset flows, in addition to Linux error numbers (`docs/protocol.md`).
pub mod codes {
    /// The server's policy does not allow this destination (Linux: EACCES).
    pub const NOT_OPENED: u64 = 13;
    /// The destination refused the connection (Linux: ECONNREFUSED).
    pub const REFUSED: u64 = 111;
    /// The address is not one of the server's own, and the server opens no others (Linux: EADDRNOTAVAIL).
    pub const NOT_ITS_OWN: u64 = 99;
    /// The limit of simultaneous flows is reached.
    pub const BUSY: u64 = 0x1001;
    /// The client has used up its monthly byte quota.
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
