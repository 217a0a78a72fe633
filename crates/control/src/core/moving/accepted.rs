//! Flows that the other host opens. They begin on the link whose address that host chose. Both hosts agree about another link as about any other move, and
//! this machine, whose links they are, asks for it. If the other host moves them, too, its moves count.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use braid_decide::policy::{AppMatcher, Subject};
use braid_model::Time;
use ipnet::IpNet;

use super::super::apps::AppRecord;
use super::super::timeouts::RETRY;
use super::super::{Core, living, rules};
use super::Move;
use crate::steering::{Ends, FlowRow, Steering, SteeringError};

impl<S: Steering> Core<S> {
    /// Names the hosts whose connections to this machine are listed: those that agree to moves, those that are known to run Braid, and those that the user has
    /// named. Nobody else makes this machine ask questions by connecting to it.
    pub(in crate::core) fn update_openers(&mut self, now: Time) -> Result<(), SteeringError> {
        let mut openers = BTreeMap::new();
        if self.moves_flows() {
            openers = self.config.named_prefixes(&self.detected_names);
            let known = self.detection.servers(now).into_iter().filter(|host| self.may_ask(*host));
            // Also those that cannot be asked for a moment: their flows stay where they have moved.
            let moved = self.moving.flows.values().filter(|known| known.accepted).map(|known| known.host);
            openers.extend(known.chain(self.moving.hosts.iter().copied()).chain(moved).map(|host: IpAddr| (IpNet::from(host), true)));
        }
        // Without a host that counts, nothing needs to be listed.
        let openers: Vec<_> = if openers.values().any(|counts| *counts) { openers.into_iter().collect() } else { Vec::new() };
        if openers != self.moving.openers {
            if let Err(error) = self.steering.set_openers(&openers) {
                self.servers_due = Some(now + RETRY);
                return Err(error);
            }
            self.moving.openers = openers;
        }
        Ok(())
    }

    /// Takes over a list of flows: accepted ones that are listed no more have ended, since no program of the kernel reports their ends, and others are judged.
    pub(in crate::core) fn take_accepted(&mut self, now: Time, rows: &mut Vec<FlowRow>) -> Result<(), SteeringError> {
        let listed: BTreeSet<_> = rows.iter().filter(|row| row.accepted).map(living::key).collect();
        let known = self.flows.iter().map(|living| &living.row).filter(|row| row.accepted);
        let gone: Vec<FlowRow> = known.filter(|row| !listed.contains(&living::key(row))).cloned().collect();
        let ended = gone.iter().map(|row| self.on_ended(row)).fold(Ok(()), Result::and);
        self.judge_accepted(now, rows);
        ended
    }

    /// Finds the rules of accepted flows, which no program of the kernel has judged. Flows that a rule excludes, or that are to be bonded, do not move, and so
    /// are not listed.
    pub(in crate::core) fn judge_accepted(&mut self, now: Time, rows: &mut Vec<FlowRow>) {
        rows.retain_mut(|row| {
            if !row.accepted {
                return true;
            }
            // A flow keeps the policy under which it was first listed. Its key contains its socket's cookie, which no other one has.
            let known = self.flows.find(&living::key(row)).map(|known| (known.row.started, known.row.rule));
            let Some((started, rule)) = known.or_else(|| Some((now, self.first_rule(row, now)?))) else { return false };
            (row.started, row.rule) = (started, rule);
            // The kernel names the link on which it began. Other flows are booked where they have moved.
            let slot = self.moving.flows.get(&Ends::of(row)).and_then(Move::agreed).and_then(|way| way.slot);
            if let Some(link) = slot.and_then(|slot| self.links.in_slot(slot)) {
                (row.slot, row.link) = (link.slot, link.facts.index);
            }
            true
        });
    }

    /// Number of the rule that holds for a new flow like this one; `None`: it is left alone.
    fn first_rule(&mut self, row: &FlowRow, now: Time) -> Option<Option<u8>> {
        let (application, cgroup) = self.names.application(&row.app, row.process, row.cgroup);
        if self.apps.get(&row.app).is_none() {
            self.apps.record(row.app.clone(), application.clone(), cgroup.clone(), row.class, now);
        }
        let subject = Subject {
            exe: application.exe.as_deref(),
            name: &row.app.name,
            port: row.service(),
            protocol: Some(row.protocol),
            destination: row.remote.0,
            cgroup: cgroup.as_deref(),
            user: Some(row.user),
            client: None,
            class: self.apps.get(&row.app).map_or(row.class, AppRecord::class_for_rules),
        };
        let matches = |matcher: &AppMatcher| self.matches(matcher, &row.app, subject);
        if self.config.policy.exclude.matchers().iter().any(matches) {
            return None;
        }
        let place = self.in_force.apps.iter().position(|rule| matches(&rule.matcher));
        if self.in_force.bonds(place.map(|place| &self.in_force.apps[place])) {
            return None;
        }
        Some(place.and_then(|place| u8::try_from(rules::exclusions(&self.config.policy) + place).ok()))
    }

    /// Whether the other host, or a program of this machine, moves the flow, and this one leaves it to them: unless it has opened the flow, and the flow's own link
    /// is dead, so that there is nothing to lose.
    pub(super) fn is_moved_by_others(&self, now: Time, row: &FlowRow) -> bool {
        let own = Ends::of(row);
        let may_wait = row.accepted || self.links.get(row.link).is_some_and(|link| link.usable(row.family));
        may_wait && !self.moving.flows.contains_key(&own) && self.relocated.leased(&own, now).is_some()
    }

    /// Whether this machine moves the flow and goes on to when somebody else asks: it opened it. So two hosts that could both do it do not contradict each other.
    pub(in crate::core) fn keeps_move(&self, own: &Ends) -> bool {
        self.moving.flows.get(own).is_some_and(|known| !known.accepted)
    }

    /// Leaves a flow to the other host, which moves it now.
    pub(in crate::core) fn leave_move(&mut self, own: &Ends) {
        self.moving.flows.remove(own);
    }
}
