//! Which running flows leave their links, and where they go.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::{Direction, LinkSet, Time};

use super::super::Core;
use super::{Goal, Judged, Move, REFUSAL, Stage, can_move, destination, judged};
use crate::links::Link;
use crate::steering::{Ends, FlowRow, RedirectedFlow, Steering, SteeringError};

/// How long nothing may come from a waypoint while segments are sent again.
const SILENCE: Duration = Duration::from_secs(1);

impl<S: Steering> Core<S> {
    /// Whether the flow is moving, or has moved to a link that works, so that it must not be ended. The list of flows may be older than that.
    pub(in crate::core) fn is_moved(&self, row: &FlowRow) -> bool {
        let works = |slot: Option<usize>| match slot {
            Some(slot) => self.links.in_slot(slot).is_some_and(|link| link.usable(row.family)),
            None => self.moving.tunnels.contains_key(&row.remote.0.to_canonical()),
        };
        let known = if self.moving.flows.is_empty() { None } else { self.moving.flows.get(&Ends::of(row)) };
        known.is_some_and(|known| !matches!(known.stage, Stage::Moved(_)) || works(known.way.slot))
    }

    /// Moves flows away from links that new flows like them would not get now: dead ones, those whose allowance is used up, those that the rules of the present
    /// context exclude, standby ones. A flow that the user has moved stays while its link works.
    pub(in crate::core) fn find_moves(&mut self, now: Time) {
        self.moving.refused.retain(|_, refusal| refusal.until + REFUSAL > now);
        self.moving.blocked.retain(|_, blocked| blocked.at + blocked.pause * 2 > now);
        self.moving.leave = false;
        if self.moving.hosts.is_empty() {
            return;
        }
        let is_candidate = |row: &FlowRow| {
            can_move(row)
                && self.moving.hosts.contains(&row.remote.0.to_canonical())
                && !self.moving.is_moving(&Ends::of(row))
                && !self.is_moved_by_others(now, row)
                && self.moving.refused.get(&Ends::of(row)).is_none_or(|refusal| refusal.until <= now)
        };
        // A way that has dropped packets is tried by one flow again. The others follow if it passes them.
        let tests = self.moving.flows.iter().filter(|(_, known)| !matches!(known.stage, Stage::Moved(_)));
        let mut tries: BTreeSet<Judged> = tests.map(|(own, known)| known.judged(own)).collect();
        let mut moves = Vec::new();
        // Flows that leave a link spread over the others.
        let mut loads: Option<BTreeMap<usize, u32>> = None;
        for living in self.flows.iter().filter(|living| is_candidate(&living.row) && !self.has_ended(living)) {
            let row = &living.row;
            if self.rule_expired(row.started, row.rule) {
                continue;
            }
            let links = self.admitted(self.rule_of(now, &RedirectedFlow::of(row)), row.family);
            let known = self.moving.flows.get(&Ends::of(row));
            let by_hand = known.is_some_and(|known| known.by_hand);
            let in_tunnel = known.is_some_and(|known| known.way.slot.is_none());
            // The kernel counts a flow on the link over which it leaves. A tunnel is none.
            let is_own = |(_, link): &(_, &Link)| link.facts.source(row.family) == Some(row.local.0);
            let current = if in_tunnel { self.links.iter().find(is_own).map(|(_, link)| link) } else { self.links.get(row.link) };
            let stays = current
                .is_some_and(|link| link.configured(row.family) && (links.contains(link.slot) || by_hand && link.usable(row.family)));
            let service = |slot: usize| {
                let address = self.links.in_slot(slot).and_then(|link| link.facts.source(row.family));
                address.map(|address| judged(known, address, destination(known, &Ends::of(row)), (row.service(), row.accepted)))
            };
            let blocked = |slot: usize| service(slot).and_then(|service| Some((service, self.moving.blocked.get(&service)?)));
            let is_open = |slot: &usize| blocked(*slot).is_none_or(|(service, blocked)| blocked.is_over(now) && !tries.contains(&service));
            let open: LinkSet = links.iter().filter(is_open).collect();
            if stays {
                // A tunnel costs more than the flow's own link.
                if in_tunnel {
                    moves.push((row.clone(), Goal::Home));
                }
                continue;
            }
            let loads = loads.get_or_insert_with(|| self.flows_by_slot());
            if let Some(slot) = self.roomiest(now, open, loads) {
                *loads.entry(slot).or_default() += 1;
                tries.extend(blocked(slot).map(|(service, _)| service));
                moves.push((row.clone(), Goal::Link(slot)));
            } else if !links.is_empty() {
                moves.push((row.clone(), Goal::Tunnel));
            }
        }
        let results = self.begin_moves(now, &moves, false);
        for ((row, _), result) in moves.iter().zip(results) {
            if let Err(reason) = result {
                self.moving.refuse(now, Ends::of(row), reason);
            }
        }
    }

    /// Lets flows go home whose waypoint has fallen silent, with all on the way there.
    pub(in crate::core) fn leave_silent_waypoints(&mut self, now: Time) -> Result<(), SteeringError> {
        let passes = |known: &Move| known.way.waypoint.is_some() && matches!(known.stage, Stage::Moved(_));
        if !self.moving.flows.values().any(passes) {
            return Ok(());
        }
        let sent_again = |row: &FlowRow| (Ends::of(row), row.retransmissions.unwrap_or(0));
        let rows: BTreeMap<Ends, u32> = self.flows.iter().map(|living| sent_again(&living.row)).collect();
        let has_lost = |own: &Ends, known: &Move| rows.get(own).is_some_and(|count| *count > known.answered);
        if !self.moving.flows.iter().any(|(own, known)| passes(known) && has_lost(own, known)) {
            return Ok(());
        }
        let sockets = self.look(now, false)?;
        let mut silent = Vec::new();
        for (own, known) in self.moving.flows.iter_mut().filter(|(_, known)| passes(known)) {
            let (Some(count), Some(waypoint)) = (rows.get(own).filter(|count| **count > known.answered), &known.way.waypoint) else {
                continue;
            };
            let since = *known.silent.get_or_insert(now);
            if sockets.get(own).and_then(|socket| socket.moved).is_some_and(|at| at >= since) {
                (known.answered, known.silent) = (*count, None);
            } else if since + SILENCE <= now {
                silent.push((*own, format!("nothing comes from the waypoint {} any more", waypoint.relay)));
            }
        }
        self.give_up(now, silent)
    }

    /// Number of direct flows by the slot of the link over which they leave.
    fn flows_by_slot(&self) -> BTreeMap<usize, u32> {
        let mut loads = BTreeMap::new();
        for row in self.flows.iter().map(|living| &living.row) {
            let slot = self.moving.flows.get(&Ends::of(row)).map_or(Some(row.slot), |moved| moved.way.slot);
            slot.into_iter().for_each(|slot| *loads.entry(slot).or_default() += 1);
        }
        loads
    }

    /// Of these links, the one with the largest share for one more flow.
    fn roomiest(&self, now: Time, of: LinkSet, flows: &BTreeMap<usize, u32>) -> Option<usize> {
        let share = |slot: &usize| {
            let rate = |direction| self.links.in_slot(*slot).map_or(0, |link| link.estimate(direction, now).rate.bps());
            (rate(Direction::Down) + rate(Direction::Up)) / u64::from(flows.get(slot).copied().unwrap_or(0) + 1)
        };
        of.iter().max_by_key(share)
    }
}
