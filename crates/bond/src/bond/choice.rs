//! Other rules than miDRR for which path carries the next piece: the packet schedulers of [`braid_decide::packet`].
//!
//! They choose a path for a piece, while a bond is asked path by path. So a choice is made when any path asks, and kept until the chosen
//! path takes the piece. Flows take turns.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;

use braid_decide::packet::{
    Binding, Chunk, EarliestCompletion, MinRtt, PacketScheduler, PathView, Redundant, RoundRobin, RttShare, WeightedRoundRobin, Weights,
};
use braid_decide::policy::BondScheduler;
use braid_model::{ByteCount, LinkSet};

use super::Bond;
use crate::tracker::Control;
use crate::{FlowKey, PathId, Side};

/// What a scheduler is told of a piece's size at most: a datagram's worth.
const PIECE: u64 = 1400;

/// How one end of a bond spreads what it sends over the paths: the rule, and the share of each link under [`BondScheduler::Weights`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulingPlan {
    scheduler: BondScheduler,
    /// By link number, in parts of [`u16::MAX`].
    shares: [u16; LinkSet::CAPACITY],
}

impl Default for SchedulingPlan {
    fn default() -> Self {
        Self::new(BondScheduler::default())
    }
}

impl SchedulingPlan {
    /// A plan in which no link has a share.
    pub const fn new(scheduler: BondScheduler) -> Self {
        Self { scheduler, shares: [0; LinkSet::CAPACITY] }
    }

    /// A plan with OPERETTA's weights `w_j` (eq. 9): the link's number and its share from 0 to 1. What is beyond that counts as the nearest.
    pub fn weights(weights: impl IntoIterator<Item = (u8, f64)>) -> Self {
        let mut plan = Self::new(BondScheduler::Weights);
        for (link, weight) in weights {
            // `as` saturates, and turns what is no number into zero.
            plan.set_share(link, (weight * f64::from(u16::MAX)).round() as u16);
        }
        plan
    }

    /// The rule.
    pub const fn scheduler(&self) -> BondScheduler {
        self.scheduler
    }

    /// The links that have a share, in order of their numbers.
    pub fn shares(&self) -> impl Iterator<Item = (u8, u16)> {
        self.shares.iter().enumerate().filter(|(_, share)| **share > 0).map(|(link, share)| (link as u8, *share))
    }

    /// Sets a link's share in parts of [`u16::MAX`]; `false` where there can be no such link.
    pub(crate) fn set_share(&mut self, link: u8, share: u16) -> bool {
        self.shares.get_mut(usize::from(link)).map(|known| *known = share).is_some()
    }

    /// A link's share from 0 to 1.
    pub(crate) fn share(&self, link: u8) -> f64 {
        self.shares.get(usize::from(link)).map_or(0.0, |share| f64::from(*share) / f64::from(u16::MAX))
    }
}

/// The bond's rule at work.
enum Rule {
    /// One for all flows.
    All(Box<dyn PacketScheduler + Send>),
    /// Shares by round-trip time, kept within each flow (virtual interface 3.2.3).
    EachFlow(BTreeMap<FlowKey, RttShare>),
}

/// A packet scheduler at work.
pub(crate) struct Chooser {
    rule: Rule,
    /// Flows that have something to send and are not urgent.
    ready: BTreeSet<FlowKey>,
    last: Option<FlowKey>,
    /// The flow whose piece is next, and the slots of the paths that are to carry it.
    chosen: Option<(FlowKey, LinkSet)>,
    views: Vec<PathView>,
    /// Whether pieces go over several paths.
    copies: bool,
    /// Whether shares are to hold exactly, so that no path repeats what another carries.
    strict: bool,
}

impl fmt::Debug for Chooser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chooser").field("ready", &self.ready).field("chosen", &self.chosen).finish_non_exhaustive()
    }
}

impl Chooser {
    /// `None` for miDRR, which the bond has anyway. Rules that share wait for the path whose turn it is: the papers' shares, and the energy that
    /// OPERETTA computes from its weights, hold only then. Shares by rate do not wait: a path that is seldom used cannot show its rate.
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

    /// Takes over who is ready from the rule before.
    fn succeed(&mut self, before: Self) {
        (self.ready, self.last) = (before.ready, before.last);
    }

    /// A flow is over.
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

    /// Paths have come, gone or changed their state: what was chosen is to be chosen anew.
    pub(crate) fn reconsider(&mut self) {
        self.chosen = None;
    }

    /// The flow that comes after the one that was served last.
    fn turn(&self) -> Option<FlowKey> {
        let after = self.last.map_or(Bound::Unbounded, Bound::Excluded);
        self.ready.range((after, Bound::Unbounded)).next().or_else(|| self.ready.first()).copied()
    }
}

impl Bond {
    /// Client: how this end is to spread what it sends, and how the server is: links need not be alike in both directions. The server is told
    /// if it can obey ([`Self::obeys`]).
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

    /// Client: the server can obey a plan.
    pub(crate) fn on_obedient(&mut self) {
        if !std::mem::replace(&mut self.obeyed, true) && self.plan_version > 0 {
            self.announce_plan();
        }
    }

    /// Client: whether the server obeys its plan.
    pub fn obeys(&self) -> bool {
        self.obeyed
    }

    /// The plan in force here.
    pub fn plan(&self) -> &SchedulingPlan {
        &self.plan
    }

    fn announce_plan(&mut self) {
        if self.obeyed {
            self.control.push_back(Control::Scheduling(self.plan_version));
        }
    }

    pub(super) fn on_plan(&mut self, version: u64, plan: SchedulingPlan) {
        if version > self.plan_version {
            self.plan_version = version;
            self.apply_plan(plan);
        }
    }

    fn apply_plan(&mut self, plan: SchedulingPlan) {
        if plan == self.plan {
            return;
        }
        let before = std::mem::replace(&mut self.plan, plan);
        if plan.scheduler != before.scheduler {
            self.set_scheduler(plan.scheduler);
        }
        for path in self.paths.values_mut() {
            path.share = plan.share(path.link);
        }
    }

    /// Chooses the rule for what this end sends, and for nothing else ([`Self::set_plans`] is for both ends).
    pub fn set_scheduler(&mut self, scheduler: BondScheduler) {
        let before = std::mem::replace(&mut self.chooser, Chooser::new(scheduler));
        match (&mut self.chooser, before) {
            (Some(chooser), Some(before)) => chooser.succeed(before),
            (Some(_), None) => self.refresh_all(),
            (None, _) => {}
        }
    }

    /// Whether paths are chosen by another rule than miDRR. Then a path that had nothing to send may have something once another was asked.
    pub fn is_chosen(&self) -> bool {
        self.chooser.is_some()
    }

    /// The share of all bytes that a path is to carry under [`BondScheduler::Weights`], from 0 to 1, for what this end sends.
    pub fn set_share(&mut self, id: PathId, share: f64) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.share = share;
        }
    }

    /// Whether a path may repeat what others carry: not where shares are to hold.
    pub(crate) fn may_repeat(&self) -> bool {
        !self.chooser.as_ref().is_some_and(|chooser| chooser.strict)
    }

    /// The flow whose next piece the path in `slot` is to carry, and the slots of those that carry copies of it.
    pub(crate) fn take_choice(&mut self, slot: usize) -> Option<(FlowKey, LinkSet)> {
        let mut chooser = self.chooser.take()?;
        let has_room = |slots: LinkSet| self.slots_with_room() & slots.0 != 0;
        // What has no room any more is chosen anew, unless shares are to hold: then the path is waited for.
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

    /// The choice for the first flow, in their turn, that has a path to go by now.
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

    /// What a scheduler sees of a path, given the links that a flow may use. Copies need not leave at once: for them its window has room.
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
