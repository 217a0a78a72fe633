//! Flows that the other host opens. They begin on the link whose address that host chose. Both hosts agree about another link as about any other move, and
//! this machine, whose links they are, asks for it. If the other host moves them, too, its moves count.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use braid_decide::policy::Subject;
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
            openers.extend(known.chain(self.moving.hosts.iter().copied()).map(|host: IpAddr| (IpNet::from(host), true)));
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

    /// Finds the rules of accepted flows, which no program of the kernel has judged. Flows that a rule excludes, or that are to be bonded, are not moved, and so
    /// not listed. Of one that is listed no more, no program of the kernel reports the end.
    pub(in crate::core) fn judge_accepted(&mut self, now: Time, rows: &mut Vec<FlowRow>) -> Result<(), SteeringError> {
        let listed: BTreeSet<_> = rows.iter().filter(|row| row.accepted).map(|row| (living::key(row), row.started)).collect();
        let known = self.flows.iter().map(|living| &living.row).filter(|row| row.accepted);
        let gone: Vec<FlowRow> = known.filter(|row| !listed.contains(&(living::key(row), row.started))).cloned().collect();
        let ended = gone.iter().map(|row| self.on_ended(row)).fold(Ok(()), Result::and);
        if listed.is_empty() {
            return ended;
        }
        for row in rows.iter().filter(|row| row.accepted) {
            if self.apps.get(&row.app).is_some() {
                continue;
            }
            let (application, cgroup) = self.names.application(&row.app, row.process, row.cgroup);
            self.apps.record(row.app.clone(), application, cgroup, row.class, now);
        }
        rows.retain_mut(|row| {
            if row.accepted {
                let known = self.flows.find(&living::key(row)).filter(|known| known.row.started == row.started);
                match known.map_or_else(|| self.first_rule(row), |known| Some(known.row.rule)) {
                    Some(rule) => row.rule = rule,
                    None => return false,
                }
                // The kernel names the link whose address it has. Other flows are booked where they have moved.
                let slot = self.moving.flows.get(&Ends::of(row)).and_then(Move::agreed).and_then(|way| way.slot);
                if let Some(link) = slot.and_then(|slot| self.links.in_slot(slot)) {
                    (row.slot, row.link) = (link.slot, link.facts.index);
                }
            }
            true
        });
        ended
    }

    /// Number of the rule that holds for a new flow like this one; `None`: it is left alone.
    fn first_rule(&self, row: &FlowRow) -> Option<Option<u8>> {
        let record = self.apps.get(&row.app);
        let subject = Subject {
            exe: record.and_then(|record| record.application.exe.as_deref()),
            name: &row.app.name,
            port: row.service(),
            destination: row.remote.0,
            cgroup: record.and_then(|record| record.cgroup.as_deref()),
            user: Some(row.user),
            client: None,
            class: record.map_or(row.class, AppRecord::class_for_rules),
        };
        if self.config.policy.excludes(&subject) {
            return None;
        }
        let place = self.in_force.first_match(&subject);
        if self.in_force.bonds(place.map(|place| &self.in_force.apps[place])) {
            return None;
        }
        Some(place.and_then(|place| u8::try_from(rules::exclusions(&self.config.policy) + place).ok()))
    }

    /// Whether the other host, or a program of this machine, moves the flow.
    pub(super) fn is_moved_by_others(&self, now: Time, own: &Ends) -> bool {
        !self.moving.flows.contains_key(own) && self.relocated.leased(own, now).is_some()
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
