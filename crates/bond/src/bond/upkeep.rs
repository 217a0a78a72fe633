//! Keeps flows, paths and the scheduler consistent.

use std::collections::VecDeque;

use braid_model::{ByteCount, LinkSet, Time};

use super::choice::Chooser;
use super::{Bond, INITIAL_WINDOW, QUANTUM};
use crate::flow::FlowState;
use crate::path::{Extra, PathState};
use crate::report::Event;
use crate::tracker::{Control, Item};
use crate::{FlowKey, FlowPolicy, Open, PathId, Side};

/// Number of flows that may be urgent at a time, since each datagram searches them all. Further urgent flows take turns with the rest.
const MAX_URGENT: usize = 256;

impl Bond {
    pub(crate) fn set_state(&mut self, now: Time, id: PathId, state: PathState) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        if path.state == state {
            return;
        }
        path.set_state(now, state);
        self.events.push_back(Event::Path { path: id, state });
        if matches!(state, PathState::Suspect | PathState::Dead) {
            let mut items = Vec::new();
            path.tracker.repeat_all(&mut items);
            let extra = std::mem::take(&mut path.extra);
            self.requeue(items);
            self.reroute(extra);
        }
        self.scheduler.forget();
        self.chooser.iter_mut().for_each(Chooser::reconsider);
        self.release_all();
        if self.paths.values().any(|path| path.backup) {
            // A flow uses backups while none of its other paths is good.
            self.apply_policies();
        }
    }

    /// Moves items that were queued on one path to other paths.
    pub(super) fn reroute(&mut self, extra: VecDeque<Extra>) {
        let best = self.paths.iter().filter(|(_, path)| path.is_good()).min_by_key(|(_, path)| path.srtt).map(|(id, _)| *id);
        for extra in extra {
            match extra {
                Extra::Copy(item) => self.requeue(vec![item]),
                message => {
                    if let Some(best) = best.and_then(|id| self.paths.get_mut(&id)) {
                        best.extra.push_back(message);
                    }
                }
            }
        }
    }

    pub(super) fn look_for_losses(&mut self, now: Time, id: PathId) {
        let Some(path) = self.paths.get_mut(&id) else { return };
        let mut lost = Vec::new();
        let loss_delay = path.loss_delay();
        path.loss_due = path.tracker.detect_lost(now, loss_delay, &mut lost);
        self.requeue(lost);
    }

    /// Queues lost items for retransmission.
    pub(crate) fn requeue(&mut self, items: Vec<Item>) {
        for item in items {
            match item {
                Item::Piece(id, piece) => {
                    if let Some(flow) = self.flows.get_mut(&id).filter(|flow| flow.reset_sent.is_none()) {
                        flow.send.on_lost(&piece);
                        self.max_ranges = self.max_ranges.max(flow.send.ranges());
                        self.refresh(id);
                    }
                }
                Item::Control(control) if self.is_current(&control) => self.control.push_back(control),
                Item::Control(_) => {}
            }
        }
    }

    fn is_current(&self, control: &Control) -> bool {
        match control {
            Control::Policy(id, version) => self.flows.get(id).is_some_and(|flow| flow.policy_version == *version),
            Control::Credit(id) | Control::Open(id) => self.flows.contains_key(id),
            Control::Path(id) => self.paths.contains_key(id),
            Control::Scheduling(version) => *version == self.plan_version,
            Control::Reset(..) | Control::Stop(..) | Control::Opened(..) | Control::TotalCredit => true,
        }
    }

    pub(super) fn insert_flow(&mut self, now: Time, id: FlowKey, open: Option<Open>) {
        let policy = open.as_ref().map_or_else(FlowPolicy::default, |open| open.policy);
        let key = match self.scheduler.add_flow(f64::from(policy.weight.max(5)) / 100.0, LinkSet::EMPTY) {
            Ok(key) => key,
            Err(_) => unreachable!("weights from 0.05 are allowed with this quantum"),
        };
        self.keys.insert(key, id);
        self.flows.insert(id, FlowState::new(now, open, policy, INITIAL_WINDOW, key));
        self.apply_policy(id);
    }

    /// Links with a good path that is not a backup.
    pub(crate) fn regular_links(&self) -> LinkSet {
        self.paths.values().filter(|path| path.is_good() && !path.backup).map(|path| usize::from(path.link)).collect()
    }

    /// Slots of the paths that a flow may use now.
    fn slots_of(&self, flow: &FlowState) -> LinkSet {
        let regular = self.regular_links();
        let all = self.paths.values().filter(|path| path.serves(flow.policy.links, regular)).map(|path| path.slot).collect::<LinkSet>();
        all - flow.excluded_slots
    }

    /// Updates the scheduler after `excluded_slots` of a flow changed.
    pub(crate) fn narrow(&mut self, id: FlowKey) {
        if let Some(flow) = self.flows.get(&id) {
            let _ = self.scheduler.narrow(flow.key, self.slots_of(flow));
        }
    }

    pub(super) fn apply_policy(&mut self, id: FlowKey) {
        self.chooser.iter_mut().for_each(Chooser::reconsider);
        let Some(flow) = self.flows.get(&id) else { return };
        let slots = self.slots_of(flow);
        let weight = f64::from(flow.policy.weight.max(5)) / 100.0;
        let known = self.scheduler.set_weight(flow.key, weight).is_ok() && self.scheduler.set_links(flow.key, slots).is_ok();
        debug_assert!(known, "a flow's key is valid while the flow is there");
    }

    pub(super) fn apply_policies(&mut self) {
        let ids: Vec<FlowKey> = self.flows.keys().copied().collect();
        ids.into_iter().for_each(|id| self.apply_policy(id));
    }

    /// Allows a flow to use slow paths again.
    pub(crate) fn release(&mut self, id: FlowKey) {
        let Some(flow) = self.flows.get_mut(&id).filter(|flow| !flow.excluded_slots.is_empty()) else { return };
        flow.excluded_slots = LinkSet::EMPTY;
        self.narrowed.remove(&id);
        self.narrow(id);
    }

    pub(super) fn release_all(&mut self) {
        std::mem::take(&mut self.narrowed).into_iter().for_each(|id| self.release(id));
    }

    /// Updates the scheduler with the flow's pending data.
    pub(crate) fn refresh(&mut self, id: FlowKey) {
        #[cfg(test)]
        {
            self.refreshed += 1;
        }
        let fresh = self.send_limit - self.sent_total;
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let stream = flow.send.pending(fresh);
        if fresh == 0 && flow.send.unsent() > 0 {
            self.starved.insert(id);
        }
        let head = stream.or(flow.messages.head().map(|size| size as u64));
        let head = head.map(|size| ByteCount::new(size.min(QUANTUM.get())));
        if let Some(chooser) = &mut self.chooser {
            chooser.set_ready(id, head.is_some() && !flow.policy.urgent);
        }
        if flow.policy.urgent && (self.urgent.len() < MAX_URGENT || self.urgent.contains(&id)) {
            if head.is_some() {
                self.urgent.insert(id)
            } else {
                self.urgent.remove(&id)
            };
            let _ = self.scheduler.set_head(flow.key, None);
        } else {
            self.urgent.remove(&id);
            let _ = self.scheduler.set_head(flow.key, head);
        }
    }

    pub(crate) fn refresh_all(&mut self) {
        let ids: Vec<FlowKey> = self.flows.keys().copied().collect();
        ids.into_iter().for_each(|id| self.refresh(id));
    }

    /// Removes a flow that is over.
    pub(super) fn remove_if_over(&mut self, _now: Time, id: FlowKey) {
        let Some(flow) = self.flows.get(&id).filter(|flow| flow.is_over()) else { return };
        let by_link = flow.by_link.clone();
        self.keys.remove(&flow.key);
        let _ = self.scheduler.remove_flow(flow.key);
        for waiting in [&mut self.urgent, &mut self.starved, &mut self.blocked, &mut self.narrowed] {
            waiting.remove(&id);
        }
        self.unread_messages -= flow.messages.unread();
        self.queued_messages -= flow.messages.queued();
        self.chooser.iter_mut().for_each(|chooser| chooser.forget(id));
        self.flows.remove(&id);
        if self.side == Side::Server {
            self.finished.insert(id.0);
        }
        self.events.push_back(Event::Closed { flow: id, by_link });
    }

    /// Whether a flow carries messages.
    pub(crate) fn is_messages(&self, id: FlowKey) -> bool {
        self.flows.get(&id).and_then(|flow| flow.open.as_ref()).is_some_and(|open| open.kind.is_messages())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use braid_model::Rate;
    use bytes::{Bytes, BytesMut};

    use super::*;
    use crate::wire::{Frame, Header};
    use crate::{FlowKind, Limits, PathFacts, Target};

    const FLOWS: usize = 1000;

    /// A client with many flows. The first has pending bytes, but the connection-level credit is used up.
    fn bond_with_many_flows() -> (Bond, FlowKey) {
        let now = Time::from_millis(1000);
        let mut bond = Bond::new(Side::Client, Limits::default(), now);
        let (rtt, amount) = (Duration::from_millis(20), ByteCount::new(1 << 20));
        assert!(bond.add_path(now, PathId(0), 0, PathFacts { rtt, rate: Rate::from_mbps(100), room: amount, window: amount }));
        let open = || Open { kind: FlowKind::Stream, target: Target::Address(([192, 0, 2, 1], 80).into()), policy: FlowPolicy::default() };
        let flows: Vec<FlowKey> = (0..FLOWS).map(|_| bond.open(now, open()).unwrap()).collect();
        bond.send_limit = bond.sent_total;
        bond.write(flows[0], Bytes::from_static(b"late"));
        bond.refreshed = 0;
        (bond, flows[0])
    }

    #[test]
    fn regression_total_credit_refreshes_only_starved_flows() {
        let (mut bond, waiting) = bond_with_many_flows();
        let mut credit = BytesMut::new();
        Header { sequence: None }.encode(&mut credit);
        Frame::TotalCredit { limit: 1 << 20 }.encode(&mut credit);
        bond.receive(Time::from_millis(1001), PathId(0), credit.freeze()).unwrap();
        assert_eq!(bond.refreshed, 1, "one of {FLOWS} flows waited");
        let mut sent = BytesMut::new();
        while bond.poll_datagram(Time::from_millis(1002), PathId(0), 1200, &mut sent) {}
        assert!(sent.windows(4).any(|part| part == b"late"), "the waiting bytes were not sent");
        assert_eq!(bond.flow(waiting).unwrap().held, ByteCount::new(4));
    }
}
