//! Packet schedulers other than miDRR: adapters for [`braid_decide::packet`].
//!
//! These schedulers choose a path for each chunk, while a bond is polled path by path. So the bond makes a choice when any path is polled, and keeps
//! it until the chosen path takes the chunk. Flows take turns.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;
use std::time::Duration;

use braid_decide::packet::{
    Binding, Chunk, EarliestCompletion, MinRtt, PacketScheduler, PathView, Redundant, RoundRobin, RttShare, WeightedRoundRobin, Weights,
};
use braid_decide::policy::BondScheduler;
use braid_model::{ByteCount, LinkSet, Time};

use super::Bond;
use crate::plan::SchedulingPlan;
use crate::tracker::Control;
use crate::{FlowKey, PathId, Side};

/// Minimum time between two plans of a client that take effect.
const PLAN_INTERVAL: Duration = Duration::from_millis(100);
/// Upper bound of the chunk size that a scheduler sees: the payload of one datagram.
const PIECE: u64 = 1400;

/// State of the rule in force.
enum Rule {
    /// One scheduler for all flows.
    All(Box<dyn PacketScheduler + Send>),
    /// A scheduler for each flow: shares by round-trip time hold within each flow (virtual interface 3.2.3).
    EachFlow(BTreeMap<FlowKey, RttShare>),
}

/// A packet scheduler and its current choice.
pub(crate) struct Chooser {
    rule: Rule,
    /// Flows with pending data that are not urgent.
    ready: BTreeSet<FlowKey>,
    last: Option<FlowKey>,
    /// The flow of the next chunk, and the slots of the paths that are to carry it.
    chosen: Option<(FlowKey, LinkSet)>,
    views: Vec<PathView>,
    /// Whether the scheduler sends copies over several paths.
    copies: bool,
    /// Whether shares must hold exactly. Then the bond waits for the path whose turn it is, and no path retransmits data of another.
    strict: bool,
}

impl fmt::Debug for Chooser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chooser").field("ready", &self.ready).field("chosen", &self.chosen).finish_non_exhaustive()
    }
}

impl Chooser {
    /// Returns `None` for miDRR, which every bond has. Round robin, shares by round-trip time, and weights wait for the path whose turn it is: only
    /// then do the papers' shares hold, and the energy that OPERETTA computes. Shares by rate do not wait: the rate of a path that carries little
    /// cannot be measured.
    pub(crate) fn new(scheduler: BondScheduler) -> Option<Self> {
        let rule: Box<dyn PacketScheduler + Send> = match scheduler {
            BondScheduler::Midrr => return None,
            BondScheduler::RoundRobin => Box::new(RoundRobin::new(Binding::Strict)),
            BondScheduler::WeightedRoundRobin => Box::new(WeightedRoundRobin::default()),
            BondScheduler::RttShare => return Some(Self::of(Rule::EachFlow(BTreeMap::new()), scheduler)),
            BondScheduler::EarliestCompletion => Box::new(EarliestCompletion),
            BondScheduler::MinRtt => Box::new(MinRtt),
            BondScheduler::Redundant(copies) => Box::new(Redundant::new(usize::from(copies))),
            BondScheduler::Weights => Box::new(Weights::new(Binding::Strict)),
        };
        Some(Self::of(Rule::All(rule), scheduler))
    }

    fn of(rule: Rule, scheduler: BondScheduler) -> Self {
        Self {
            rule,
            ready: BTreeSet::new(),
            last: None,
            chosen: None,
            views: Vec::new(),
            copies: matches!(scheduler, BondScheduler::Redundant(2..)),
            strict: matches!(scheduler, BondScheduler::RoundRobin | BondScheduler::RttShare | BondScheduler::Weights),
        }
    }

    /// Takes over the ready flows of the previous rule.
    fn succeed(&mut self, before: Self) {
        (self.ready, self.last) = (before.ready, before.last);
    }

    /// Removes the state of a flow that ended.
    pub(crate) fn forget(&mut self, flow: FlowKey) {
        self.set_ready(flow, false);
        if let Rule::EachFlow(rules) = &mut self.rule {
            rules.remove(&flow);
        }
    }

    pub(crate) fn set_ready(&mut self, flow: FlowKey, ready: bool) {
        if ready {
            self.ready.insert(flow);
            return;
        }
        self.ready.remove(&flow);
        if self.chosen.is_some_and(|(of, _)| of == flow) {
            self.chosen = None;
        }
    }

    /// Discards the current choice: a path was added or removed, or its state changed.
    pub(crate) fn reconsider(&mut self) {
        self.chosen = None;
    }

    /// The flow after the one that was served last.
    fn turn(&self) -> Option<FlowKey> {
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        self.ready.range((after, Bound::Unbounded)).next().or_else(|| self.ready.first()).copied()
    }
}

impl Bond {
    /// Client: sets the plan of this end and the plan of the server. They may differ, since the capacity of a link may differ by direction. The server
    /// receives its plan if it supports plans ([`Self::obeys`]).
    pub fn set_plans(&mut self, own: SchedulingPlan, servers: SchedulingPlan) {
        if self.side == Side::Server {
            return;
        }
        self.apply_plan(own);
        if servers != self.servers_plan {
            self.servers_plan = servers;
            self.plan_version += 1;
            self.announce_plan();
        }
    }

    /// Client: the server supports plans.
    pub(crate) fn on_obedient(&mut self) {
        if !std::mem::replace(&mut self.obeyed, true) && self.plan_version > 0 {
            self.announce_plan();
        }
    }

    /// Client: whether the server supports plans.
    pub fn obeys(&self) -> bool {
        self.obeyed
    }

    /// The plan of this end.
    pub fn plan(&self) -> &SchedulingPlan {
        &self.plan
    }

    fn announce_plan(&mut self) {
        if self.obeyed {
            self.control.push_back(Control::Scheduling(self.plan_version));
        }
    }

    /// Server: the client has sent a plan. It is applied by [`Self::apply_pending_plan`].
    pub(super) fn on_plan(&mut self, version: u64, plan: SchedulingPlan) {
        if version > self.plan_version {
            self.plan_version = version;
            self.pending_plan = Some(plan);
        }
    }

    /// Applies the newest plan, at most once per [`PLAN_INTERVAL`]: another rule costs a visit to each flow.
    pub(super) fn apply_pending_plan(&mut self, now: Time) {
        if self.plan_due.is_none_or(|due| due <= now)
            && let Some(plan) = self.pending_plan.take()
        {
            self.plan_due = Some(now + PLAN_INTERVAL);
            self.apply_plan(plan);
        }
    }

    /// When a pending plan is due.
    pub(super) fn pending_plan_due(&self) -> Option<Time> {
        self.plan_due.filter(|_| self.pending_plan.is_some())
    }

    fn apply_plan(&mut self, plan: SchedulingPlan) {
        if plan == self.plan {
            return;
        }
        let before = std::mem::replace(&mut self.plan, plan);
        if plan.scheduler() != before.scheduler() {
            self.set_scheduler(plan.scheduler());
        }
        for path in self.paths.values_mut() {
            path.share = plan.share(path.link);
        }
    }

    /// Sets the rule of this end only ([`Self::set_plans`] sets those of both ends).
    pub fn set_scheduler(&mut self, scheduler: BondScheduler) {
        let before = std::mem::replace(&mut self.chooser, Chooser::new(scheduler));
        match (&mut self.chooser, before) {
            (Some(chooser), Some(before)) => chooser.succeed(before),
            (Some(_), None) => self.refresh_all(),
            (None, _) => {}
        }
    }

    /// Whether a rule other than miDRR is set. Then a path that had nothing to send may have something once another path was polled.
    pub fn has_packet_scheduler(&self) -> bool {
        self.chooser.is_some()
    }

    /// Sets the share, from 0 to 1, of all bytes from this end that a path is to carry under [`BondScheduler::Weights`].
    pub fn set_share(&mut self, id: PathId, share: f64) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.share = share;
        }
    }

    /// Whether paths may retransmit data of other paths. They may not if shares must hold.
    pub(crate) fn may_repeat(&self) -> bool {
        !self.chooser.as_ref().is_some_and(|chooser| chooser.strict)
    }

    /// The flow whose next chunk the path in `slot` is to carry, and the slots of the paths that carry copies of it.
    pub(crate) fn take_choice(&mut self, slot: usize) -> Option<(FlowKey, LinkSet)> {
        let mut chooser = self.chooser.take()?;
        let has_room = |slots: LinkSet| self.slots_with_room() & slots.0 != 0;
        // If the chosen path has no room any more, choose again. If shares must hold, wait for the path instead.
        if !chooser.chosen.is_some_and(|(_, slots)| chooser.strict || has_room(slots)) {
            chooser.chosen = self.choose(&mut chooser);
        }
        let taken = chooser.chosen.filter(|(_, slots)| slots.contains(slot));
        if let Some((flow, _)) = taken {
            (chooser.chosen, chooser.last) = (None, Some(flow));
        }
        self.chooser = Some(chooser);
        taken.map(|(flow, slots)| (flow, LinkSet(slots.0 & !(1 << slot))))
    }

    /// The choice for the first flow, in round-robin order, that has a usable path now.
    fn choose(&self, chooser: &mut Chooser) -> Option<(FlowKey, LinkSet)> {
        for _ in 0..chooser.ready.len() {
            let id = chooser.turn()?;
            let flow = self.flows.get(&id)?;
            let waiting = flow.send.pending(self.send_limit - self.sent_total).unwrap_or(0) + flow.messages.head().unwrap_or(0) as u64;
            let size = waiting.min(PIECE);
            chooser.views.clear();
            let all = chooser.copies;
            chooser.views.extend(self.slots.iter().map(|path| self.path_view(*path, flow.policy.links, all)));
            let chunk = Chunk { size: ByteCount::new(size), behind: ByteCount::new(waiting - size) };
            let choice = match &mut chooser.rule {
                Rule::All(rule) => rule.choose(&chooser.views, chunk),
                Rule::EachFlow(rules) => rules.entry(id).or_insert_with(|| RttShare::new(Binding::Strict)).choose(&chooser.views, chunk),
            };
            let slots = choice.paths();
            if slots != LinkSet::default() {
                return Some((id, slots));
            }
            chooser.last = Some(id);
        }
        None
    }

    fn slots_with_room(&self) -> u64 {
        self.paths.values().filter(|path| path.is_good() && path.facts.room > ByteCount::ZERO).fold(0, |set, path| set | 1 << path.slot)
    }

    /// A path as the scheduler sees it, restricted to the links that a flow may use. Copies may wait, so their room is what the congestion window has
    /// left.
    fn path_view(&self, id: Option<PathId>, links: LinkSet, copies: bool) -> PathView {
        let Some(path) = id.and_then(|id| self.paths.get(&id)) else { return PathView { up: false, ..PathView::UP } };
        let in_flight = ByteCount::new(path.tracker.in_flight());
        PathView {
            rate: path.rate(),
            srtt: Some(path.srtt),
            room: if copies { path.facts.window.saturating_sub(in_flight).max(path.facts.room) } else { path.facts.room },
            queued: ByteCount::ZERO,
            in_flight,
            up: !path.is_down() && links.contains(path.link.into()),
            suspect: !path.is_good(),
            backup: path.backup,
            share: path.share,
            cost: 0,
        }
    }
}
