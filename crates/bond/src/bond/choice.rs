//! Packet schedulers other than miDRR: adapters for [`braid_decide::packet`].
//!
//! These schedulers choose a path for each chunk, while a bond is polled path by path. So the bond makes a choice when any path is polled, and keeps
//! it until the chosen path takes the chunk. Flows take turns.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Bound;

use braid_decide::packet::{
    Chunk, EarliestCompletion, PacketScheduler, PathView, Redundant, RoundRobin, RttShare, WeightedRoundRobin, Weights,
};
use braid_model::{ByteCount, LinkSet};

use super::Bond;
use crate::{FlowKey, PathId};

/// Upper bound of the chunk size that a scheduler sees: the payload of one datagram.
const PIECE: u64 = 1400;

/// Rule that chooses the path of the next chunk. Urgent flows use earliest completion under every rule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Scheduling {
    /// Each path with room takes a chunk of the flow that miDRR selects, unless the chunk would arrive sooner over another path.
    #[default]
    Midrr,
    /// Round robin over the paths (DBAS II.D).
    RoundRobin,
    /// In proportion to the paths' rates (DBAS II.D).
    WeightedRoundRobin,
    /// In inverse proportion to the paths' round-trip times (virtual interface, equation 2).
    RttShare,
    /// Where the chunk arrives first, which may mean waiting for a better path (ECF).
    EarliestCompletion,
    /// On this many paths at once.
    Redundant(u8),
    /// By the shares set with [`Bond::set_share`] (OPERETTA's `w_j`).
    Weights,
}

/// A packet scheduler and its current choice.
pub(crate) struct Chooser {
    rule: Box<dyn PacketScheduler + Send>,
    /// Flows with pending data that are not urgent.
    ready: BTreeSet<FlowKey>,
    last: Option<FlowKey>,
    /// The flow of the next chunk, and the slots of the paths that are to carry it.
    chosen: Option<(FlowKey, LinkSet)>,
    views: Vec<PathView>,
    /// Whether the scheduler sends copies over several paths.
    copies: bool,
    /// Whether a path without a share carries nothing.
    shares: bool,
}

impl fmt::Debug for Chooser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chooser").field("ready", &self.ready).field("chosen", &self.chosen).finish_non_exhaustive()
    }
}

impl Chooser {
    /// Returns `None` for miDRR, which every bond has.
    pub(crate) fn new(scheduling: Scheduling) -> Option<Self> {
        let rule: Box<dyn PacketScheduler + Send> = match scheduling {
            Scheduling::Midrr => return None,
            Scheduling::RoundRobin => Box::new(RoundRobin::default()),
            Scheduling::WeightedRoundRobin => Box::new(WeightedRoundRobin::default()),
            Scheduling::RttShare => Box::new(RttShare::default()),
            Scheduling::EarliestCompletion => Box::new(EarliestCompletion),
            Scheduling::Redundant(copies) => Box::new(Redundant::new(usize::from(copies))),
            Scheduling::Weights => Box::new(Weights::default()),
        };
        Some(Self {
            rule,
            ready: BTreeSet::new(),
            last: None,
            chosen: None,
            views: Vec::new(),
            copies: matches!(scheduling, Scheduling::Redundant(2..)),
            shares: scheduling == Scheduling::Weights,
        })
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
    /// Sets the rule that assigns chunks to paths. It applies to what this end sends; the other end has its own rule.
    pub fn set_scheduling(&mut self, scheduling: Scheduling) {
        self.chooser = Chooser::new(scheduling);
        self.refresh_all();
    }

    /// Whether a rule other than miDRR is set. Then a path that had nothing to send may have something once another path was polled.
    pub fn has_packet_scheduler(&self) -> bool {
        self.chooser.is_some()
    }

    /// Sets the share of all bytes that a path is to carry under [`Scheduling::Weights`], from 0 to 1.
    pub fn set_share(&mut self, id: PathId, share: f64) {
        if let Some(path) = self.paths.get_mut(&id) {
            path.share = share;
        }
    }

    /// Whether a path may retransmit data of other paths. A path with a zero share may not.
    pub(crate) fn may_repeat(&self, id: PathId) -> bool {
        let by_share = self.chooser.as_ref().is_some_and(|chooser| chooser.shares);
        !by_share || self.paths.get(&id).is_some_and(|path| path.share > 0.0)
    }

    /// The flow whose next chunk the path in `slot` is to carry, and the slots of the paths that carry copies of it.
    pub(crate) fn take_choice(&mut self, slot: usize) -> Option<(FlowKey, LinkSet)> {
        let mut chooser = self.chooser.take()?;
        let has_room = |slots: LinkSet| self.slots_with_room() & slots.0 != 0;
        if !chooser.chosen.is_some_and(|(_, slots)| has_room(slots)) {
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
            let slots = chooser.rule.choose(&chooser.views, chunk).paths();
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
