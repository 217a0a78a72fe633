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
/// Number of different chunks for which a search remembers that the scheduler waits.
const MAX_WAITING: usize = 8;
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
    /// The flow of the last choice, until it is known how much of it was sent.
    open: Option<FlowKey>,
    views: Vec<PathView>,
    /// Whether the scheduler sends copies over several paths.
    copies: bool,
    /// Whether a choice depends on the bytes behind the chunk.
    looks_behind: bool,
    /// Chunks for which the scheduler waits, in the current search.
    waiting: Vec<(LinkSet, Chunk)>,
    /// Number of times that the scheduler was asked.
    #[cfg(test)]
    asked: usize,
    /// Whether to ask the scheduler for each flow: the reference for tests.
    #[cfg(test)]
    exhaustive: bool,
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
            open: None,
            views: Vec::new(),
            copies: matches!(scheduler, BondScheduler::Redundant(2..)),
            looks_behind: scheduler == BondScheduler::EarliestCompletion,
            waiting: Vec::new(),
            #[cfg(test)]
            asked: 0,
            #[cfg(test)]
            exhaustive: false,
            strict: matches!(scheduler, BondScheduler::RoundRobin | BondScheduler::RttShare | BondScheduler::Weights),
        }
    }

    /// Takes over the ready flows of the previous rule.
    fn succeed(&mut self, before: Self) {
        (self.ready, self.last) = (before.ready, before.last);
    }

    /// Whether flows with the same chunk and links get the same answer. They do not if each has its own scheduler. The list is searched for each
    /// flow, so it is bounded.
    fn may_skip(&self) -> bool {
        #[cfg(test)]
        if self.exhaustive {
            return false;
        }
        matches!(self.rule, Rule::All(_)) && self.waiting.len() < MAX_WAITING
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

    /// Tells the scheduler how much of the last choice was sent.
    fn correct(&mut self, sent: ByteCount) {
        let Some(flow) = self.open.take() else { return };
        match &mut self.rule {
            Rule::All(rule) => rule.correct(sent),
            Rule::EachFlow(rules) => rules.get_mut(&flow).into_iter().for_each(|rule| rule.correct(sent)),
        }
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

    /// A chunk of the flow was sent: of this size, which follows from the path's datagrams and not only from the choice.
    pub(crate) fn on_chosen_sent(&mut self, flow: FlowKey, size: u64) {
        if let Some(chooser) = self.chooser.as_mut().filter(|chooser| chooser.open == Some(flow) && chooser.chosen.is_none()) {
            // The end of a flow may have no bytes. It takes a turn too.
            chooser.correct(ByteCount::new(size.max(1)));
        }
    }

    /// The choice for the first flow, in round-robin order, that has a usable path now.
    ///
    /// The scheduler is asked once for all flows whose next chunks and links are the same: a scheduler that waits changes nothing, so that it would
    /// wait for the other flows too. Thousands of flows that wait for one path cost one visit each.
    fn choose(&self, chooser: &mut Chooser) -> Option<(FlowKey, LinkSet)> {
        chooser.waiting.clear();
        // The last choice was dropped, unless the bond has reported it.
        chooser.correct(ByteCount::ZERO);
        for _ in 0..chooser.ready.len() {
            let id = chooser.turn()?;
            let flow = self.flows.get(&id)?;
            let waiting = flow.send.pending(self.send_limit - self.sent_total).unwrap_or(0) + flow.messages.head().unwrap_or(0) as u64;
            let size = waiting.min(PIECE);
            let chunk = Chunk { size: ByteCount::new(size), behind: ByteCount::new(waiting - size) };
            let kind = (flow.policy.links, if chooser.looks_behind { chunk } else { Chunk::of(chunk.size) });
            if !chooser.waiting.contains(&kind) {
                let slots = self.ask(chooser, id, flow.policy.links, chunk);
                if !slots.is_empty() {
                    chooser.open = Some(id);
                    return Some((id, slots));
                }
                if chooser.may_skip() {
                    chooser.waiting.push(kind);
                }
            }
            chooser.last = Some(id);
        }
        None
    }

    /// The slots that the scheduler chooses for a flow's next chunk.
    fn ask(&self, chooser: &mut Chooser, id: FlowKey, links: LinkSet, chunk: Chunk) -> LinkSet {
        #[cfg(test)]
        {
            chooser.asked += 1;
        }
        chooser.views.clear();
        let all = chooser.copies;
        chooser.views.extend(self.slots.iter().map(|path| self.path_view(*path, links, all)));
        let choice = match &mut chooser.rule {
            Rule::All(rule) => rule.choose(&chooser.views, chunk),
            Rule::EachFlow(rules) => rules.entry(id).or_insert_with(|| RttShare::new(Binding::Strict)).choose(&chooser.views, chunk),
        };
        choice.paths()
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

#[cfg(test)]
mod tests {
    use bytes::{Bytes, BytesMut};
    use proptest::prelude::*;

    use super::*;
    use crate::{FlowKind, FlowPolicy, Limits, Open, PathFacts, Target};

    /// Paths of a bond and flows with data; the first flows may use few links.
    fn bond(scheduler: BondScheduler, exhaustive: bool, paths: &[(u64, u64, f64)], flows: &[(u64, u64)]) -> Bond {
        let mut bond = Bond::new(Side::Client, Limits::default(), Time::ZERO);
        for (number, (room, millis, share)) in paths.iter().enumerate() {
            let facts = PathFacts { rtt: Duration::from_millis(*millis), room: ByteCount::new(*room), ..PathFacts::default() };
            assert!(bond.add_path(Time::ZERO, PathId(number as u32), number as u8, facts));
            bond.set_share(PathId(number as u32), *share);
        }
        bond.set_scheduler(scheduler);
        bond.chooser.as_mut().unwrap().exhaustive = exhaustive;
        for (size, links) in flows {
            let policy = FlowPolicy { links: LinkSet(*links), ..FlowPolicy::default() };
            let target = Target::Address("192.0.2.1:80".parse().unwrap());
            let id = bond.open(Time::ZERO, Open { kind: FlowKind::Stream, target, policy }).unwrap();
            bond.write(id, Bytes::from(vec![1; *size as usize]));
        }
        bond
    }

    /// Every datagram of the paths, polled in turn, with more room for one path after each round.
    fn datagrams(bond: &mut Bond, paths: usize, rounds: &[(usize, u64)]) -> Vec<(usize, BytesMut)> {
        let mut sent = Vec::new();
        for (path, room) in rounds {
            let facts = PathFacts { room: ByteCount::new(*room), ..PathFacts::default() };
            bond.set_facts(PathId((path % paths) as u32), facts);
            for number in 0..paths {
                let mut out = BytesMut::new();
                while bond.poll_datagram(Time::ZERO, PathId(number as u32), 1200, &mut out) {
                    sent.push((number, std::mem::take(&mut out)));
                }
            }
        }
        sent
    }

    fn scheduler() -> impl Strategy<Value = BondScheduler> {
        prop::sample::select(BondScheduler::ALL.into_iter().filter(|one| *one != BondScheduler::Midrr).collect::<Vec<_>>())
    }

    proptest! {
        /// Asking once for flows with the same chunk and links sends the same datagrams as asking for each flow.
        #[test]
        fn flows_that_wait_alike_are_asked_about_once(
            scheduler in scheduler(),
            paths in prop::collection::vec((0u64..6_000, 1u64..200, prop_oneof![Just(0.0), 0.0..1.0f64]), 1..5),
            flows in prop::collection::vec((prop_oneof![1u64..6_000, Just(5_000)], prop_oneof![Just(u64::MAX), 1u64..16]), 1..30),
            rounds in prop::collection::vec((0usize..5, 0u64..8_000), 1..20),
        ) {
            let [mut short, mut long] = [false, true].map(|exhaustive| bond(scheduler, exhaustive, &paths, &flows));
            prop_assert_eq!(datagrams(&mut short, paths.len(), &rounds), datagrams(&mut long, paths.len(), &rounds));
        }
    }

    /// Bytes sent over two paths of equal shares, whose datagrams have these sizes. The first path has much more room than the second. `disturb` runs
    /// before each path is polled.
    fn sent_by_halves(sizes: [usize; 2], disturb: impl Fn(&mut Bond)) -> [usize; 2] {
        let mut bond = bond(BondScheduler::Weights, false, &[(0, 10, 0.5), (0, 10, 0.5)], &[(300_000, u64::MAX); 2]);
        let mut sent = [0; 2];
        for _ in 0..1000 {
            for (number, room) in [6000, 1000].into_iter().enumerate() {
                bond.set_facts(PathId(number as u32), PathFacts { room: ByteCount::new(room), ..PathFacts::default() });
            }
            for (number, max) in sizes.into_iter().enumerate() {
                disturb(&mut bond);
                let mut out = BytesMut::new();
                while bond.poll_datagram(Time::ZERO, PathId(number as u32), max, &mut out) {
                    sent[number] += out.len();
                    out.clear();
                }
            }
        }
        assert!(sent.iter().sum::<usize>() > 400_000, "{sent:?}");
        sent
    }

    /// The path MTU of a link may fall to QUIC's least one.
    #[test]
    fn shares_hold_in_bytes_whatever_the_size_of_each_paths_datagrams() {
        let sent = sent_by_halves([1450, 1000], |_| {});
        assert!(sent[0].abs_diff(sent[1]) < 10_000, "{sent:?}");
    }

    /// Each new policy of a flow drops the choice that waits for a path.
    #[test]
    fn shares_hold_while_choices_are_dropped() {
        let sent = sent_by_halves([1450; 2], |bond| bond.apply_policies());
        assert!(sent[0].abs_diff(sent[1]) < 10_000, "{sent:?}");
    }

    #[test]
    fn a_thousand_flows_that_wait_cost_one_question() {
        // Strict weights give all bytes to path 0, which has no room.
        let mut bond = bond(BondScheduler::Weights, false, &[(0, 10, 1.0), (60_000, 10, 0.0)], &[(5_000, u64::MAX); 1000]);
        let mut out = BytesMut::new();
        // The opening messages of the flows are control data.
        while bond.poll_datagram(Time::ZERO, PathId(1), 1200, &mut out) {}
        bond.chooser.as_mut().unwrap().asked = 0;
        assert!(bond.take_choice(1).is_none());
        assert_eq!(bond.chooser.as_ref().unwrap().asked, 1);
    }
}
