//! Updates: what differs from the tables is written in stages, each of which begins when all switches have done the one before.
//!
//! An update that fails is not resumed. What stands is compared again with what should, and a new update is made of the difference.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

use braid_model::Time;
use braid_openflow::ids::{DatapathId, Xid};

use super::wanted::{Delivery, Forests};
use super::{Controller, Event, Phase, Switch};
use crate::ids::{ConnectionId, Place};
use crate::paths::Outputs;
use crate::rules::{Content, Key, Owner, reverses, steps};
use crate::topology::Link;

/// An update that runs.
#[derive(Debug)]
pub(super) struct Update {
    stages: VecDeque<Stage>,
    /// Barriers that are not answered.
    waiting: BTreeSet<(ConnectionId, Xid)>,
    /// When the stage is given up, or the next one begins.
    due: Time,
    /// Whether packets on the way need time to arrive between stages.
    drains: bool,
}

type Stage = BTreeMap<DatapathId, Vec<Write>>;

#[derive(Debug)]
struct Write {
    owner: Owner,
    key: Key,
    /// `None` removes the entry.
    content: Option<Content>,
}

/// The stage of entries that nothing needs any more.
const LAST: u32 = u32::MAX;
/// Rounds of planning before the caller gets control again.
const ROUNDS: u32 = 64;

impl Update {
    pub(super) fn due(&self) -> Option<Time> {
        Some(self.due)
    }

    /// Writes nothing more for an owner.
    fn abandon(&mut self, owner: Owner) {
        for writes in self.stages.iter_mut().flat_map(BTreeMap::values_mut) {
            writes.retain(|write| write.owner != owner);
        }
    }
}

/// An update that is being planned.
#[derive(Default)]
struct Plan {
    stages: BTreeMap<u32, Stage>,
    drains: bool,
}

impl Plan {
    fn write(&mut self, stage: u32, datapath: DatapathId, owner: Owner, key: Key, content: Option<Content>) {
        self.stages.entry(stage).or_default().entry(datapath).or_default().push(Write { owner, key, content });
    }
}

impl Controller {
    /// Plans and carries out updates as far as possible without waiting.
    pub(super) fn work(&mut self, now: Time) {
        for _ in 0..ROUNDS {
            self.settle_reservations();
            self.bound_waiting();
            while let Some(connection) = self.overflowed.pop_first() {
                self.connection_events(now, connection);
            }
            if self.dirty.urgent {
                // What was sent is done before what follows on the same connection.
                self.dirty.all |= self.update.take().is_some();
            }
            if self.update.is_none() {
                if !self.dirty.any() {
                    self.finish(now);
                    if !self.dirty.any() && self.overflowed.is_empty() {
                        return;
                    }
                }
                self.plan(now);
                if self.update.is_none() && self.dirty.any() && self.overflowed.is_empty() {
                    return;
                }
            }
            if !self.advance(now) && self.overflowed.is_empty() {
                return;
            }
        }
    }

    /// Sends the next stage if it may begin. `false` while the update waits.
    fn advance(&mut self, now: Time) -> bool {
        let Some(update) = &mut self.update else { return true };
        if now < update.due {
            return false;
        }
        if !update.waiting.is_empty() {
            self.give_up(now);
            return true;
        }
        let drains = update.drains;
        let Some(stage) = update.stages.pop_front() else {
            self.update = None;
            return true;
        };
        let mut waiting = BTreeSet::new();
        for (datapath, writes) in stage {
            let Some(switch) = self.switches.get_mut(&datapath) else { continue };
            let commands = writes.iter().flat_map(|write| switch.table.change(write.owner, &write.key, write.content.as_ref())).collect();
            waiting.extend(self.command(now, datapath, commands));
            self.bound_waiting();
        }
        let Some(update) = &mut self.update else { return true };
        update.due = match (waiting.is_empty(), drains) {
            (false, _) => now + self.config.stage_timeout,
            (true, _) => now,
        };
        update.waiting = waiting;
        true
    }

    /// A barrier is answered.
    pub(super) fn barrier_done(&mut self, now: Time, connection: ConnectionId, xid: Xid) {
        let Some(update) = &mut self.update else { return };
        if update.waiting.remove(&(connection, xid)) && update.waiting.is_empty() {
            let pause = if update.drains && !update.stages.is_empty() { self.config.drain } else { Duration::ZERO };
            update.due = now + pause;
        }
    }

    /// Switches did not answer in time: the others go on without them.
    fn give_up(&mut self, _now: Time) {
        let Some(update) = self.update.take() else { return };
        for (connection, _) in update.waiting {
            let Some(datapath) = self.peers.get(&connection).and_then(|peer| peer.datapath) else { continue };
            let Some(switch) = self.switches.get_mut(&datapath).filter(|switch| switch.phase == Phase::Live) else { continue };
            switch.phase = Phase::Silent;
            self.topology.set_absent(datapath);
            self.log(Event::SwitchSilent { datapath });
        }
        self.dirty.all = true;
    }

    /// A switch refused an entry: what would lead to it is not written.
    pub(super) fn abandon(&mut self, owner: Owner) {
        if let Some(update) = &mut self.update {
            update.abandon(owner);
        }
    }

    /// Makes an update of what is dirty and differs.
    fn plan(&mut self, now: Time) {
        let dirty = std::mem::take(&mut self.dirty);
        let mut owners = if dirty.all { self.all_owners() } else { dirty.owners };
        let most = (self.config.planned_at_once / self.switches.len().max(1)).max(1);
        if owners.len() > most && !dirty.urgent {
            // Goes on after the last one, so that those who always change do not keep others waiting.
            let last = self.planned.map_or(Bound::Unbounded, Bound::Excluded);
            let turn: Vec<Owner> = owners.range((last, Bound::Unbounded)).chain(&owners).take(most).copied().collect();
            self.planned = turn.last().copied();
            let turn: BTreeSet<Owner> = turn.into_iter().collect();
            self.dirty.owners = &owners - &turn;
            owners = turn;
        }
        let mut plan = Plan::default();
        let mut forests = Forests::new(self.topology.graph());
        for owner in owners {
            match owner {
                Owner::Base | Owner::Source(_) | Owner::Block(_) => self.plan_flat(owner, &mut plan),
                Owner::Up(_) => self.plan_merged(now, owner, &mut forests, &mut plan),
                _ => self.plan_delivery(now, owner, &mut forests, &mut plan),
            }
        }
        let drains = plan.drains && !dirty.urgent;
        if !plan.stages.is_empty() {
            let stages = plan.stages.into_values().collect();
            self.update = Some(Update { stages, waiting: BTreeSet::new(), due: now, drains });
        }
    }

    /// What a lost link may change, if all else is as it should be; `None`: anything. A way of delivery that does not use the link stays: all edges of its
    /// tree are used, and a tree stays when an edge is lost that is not in it.
    pub(super) fn changed_by(&self, lost: Link) -> Option<BTreeSet<Owner>> {
        let is_settled = self.switches.values().all(|switch| switch.phase == Phase::Live && switch.uncertain.is_empty());
        if !is_settled || !self.refused.is_empty() || self.inherit_until.is_some() {
            return None;
        }
        let mut owners = BTreeSet::from([Owner::Base, Owner::Broadcast]);
        owners.extend(self.flows.keys().flat_map(|id| [Owner::Flow(*id), Owner::Up(*id)]));
        owners.extend(self.groups.keys().map(|id| Owner::Group(*id)));
        for end in [lost.one, lost.other] {
            owners.extend(self.switches.get(&end.datapath)?.table.users(end.port));
        }
        Some(owners)
    }

    fn is_writable(&self, owner: Owner, datapath: DatapathId, switch: &Switch) -> bool {
        switch.phase == Phase::Live && !self.refused.contains_key(&(owner, datapath))
    }

    /// Entries that do not depend on paths. They are needed before others, and not needed after.
    fn plan_flat(&self, owner: Owner, plan: &mut Plan) {
        for (datapath, switch) in &self.switches {
            // What a switch needs in any network does no harm while its links are found.
            let early =
                owner == Owner::Base && matches!(switch.phase, Phase::Settling { .. }) && !self.refused.contains_key(&(owner, *datapath));
            let writable = self.is_writable(owner, *datapath, switch);
            if !writable && !early {
                continue;
            }
            let wanted = self.flat_entries(owner, switch.table.style, *datapath);
            if writable && (self.exists(owner) || self.ended.contains(&owner) || self.inherit_until.is_none()) {
                for (key, _) in switch.table.of(owner).filter(|(key, _)| wanted.iter().all(|(wanted, _)| wanted != *key)) {
                    plan.write(LAST, *datapath, owner, key.clone(), None);
                }
            }
            for (key, content) in wanted {
                if !switch.table.has(owner, &key, &content) {
                    plan.write(0, *datapath, owner, key, Some(content));
                }
            }
        }
    }

    fn plan_delivery(&self, now: Time, owner: Owner, forests: &mut Forests, plan: &mut Plan) {
        // Entries of a former controller stay until all switches had time to connect.
        let inherits = self.inherit_until.is_some() && (self.exists(owner) || !self.ended.contains(&owner));
        if !self.exists(owner) && inherits {
            return;
        }
        let mut delivery = self.delivery(now, owner, forests);
        let mut new = std::mem::take(&mut delivery.outputs);
        new.retain(|datapath, _| !delivery.left.contains(datapath));
        let switches = || self.switches.iter().filter(|(datapath, _)| !delivery.left.contains(datapath));
        let steps = if switches().all(|(datapath, switch)| self.installed(owner, switch) == new.get(datapath)) {
            Vec::new()
        } else {
            let installed = |(datapath, switch): (&DatapathId, &Switch)| Some((*datapath, self.installed(owner, switch)?.clone()));
            let old: Outputs = switches().filter_map(installed).collect();
            let steps = steps(&forests.graph, &old, &new, &distances(&delivery, &old));
            plan.drains |= !steps.is_empty() && reverses(&forests.graph, &old, &new);
            steps
        };
        let mut stages: BTreeMap<DatapathId, u32> = BTreeMap::new();
        for step in steps {
            let Some(switch) = self.switches.get(&step.datapath).filter(|switch| self.is_writable(owner, step.datapath, switch)) else {
                continue;
            };
            match step.outputs {
                Some(outputs) => {
                    stages.insert(step.datapath, step.stage);
                    for (key, content) in self.entries(owner, switch.table.style, step.datapath, &outputs) {
                        plan.write(step.stage, step.datapath, owner, key, Some(content));
                    }
                }
                None if inherits => {}
                None => {
                    for (key, _) in switch.table.of(owner) {
                        plan.write(step.stage, step.datapath, owner, key.clone(), None);
                    }
                }
            }
        }
        // What differs in something else than outputs.
        for (datapath, outputs) in &new {
            let Some(switch) = self.switches.get(datapath).filter(|switch| self.is_writable(owner, *datapath, switch)) else { continue };
            let wanted = self.entries(owner, switch.table.style, *datapath, outputs);
            if switch.table.has_only(owner, &wanted) {
                continue;
            }
            for (key, _) in switch.table.of(owner).filter(|(key, _)| wanted.iter().all(|(wanted, _)| wanted != *key)) {
                plan.write(LAST, *datapath, owner, key.clone(), None);
            }
            for (key, content) in wanted.into_iter().filter(|_| !stages.contains_key(datapath)) {
                if !switch.table.has(owner, &key, &content) {
                    plan.write(0, *datapath, owner, key, Some(content));
                }
            }
        }
    }

    /// A flow to where duplicates are removed. Without these entries it goes to its receiver with all copies, so nothing is lost while they change. No entry
    /// leads to the place while those from there are missing: a packet could go there again and again.
    fn plan_merged(&self, now: Time, owner: Owner, forests: &mut Forests, plan: &mut Plan) {
        let Owner::Up(id) = owner else { return };
        if !self.exists(owner) && self.inherit_until.is_some() && !self.ended.contains(&owner) {
            return;
        }
        let mut wanted = BTreeMap::new();
        if self.exists(owner) {
            let delivery = self.delivery(now, owner, forests);
            for (datapath, switch) in &self.switches {
                if self.is_writable(owner, *datapath, switch) && !delivery.left.contains(datapath) {
                    wanted.insert(*datapath, self.merged_entries(id, switch.table.style, *datapath, &delivery));
                }
            }
        }
        let differs = self.switches.iter().any(|(datapath, switch)| {
            let entries: Vec<&(Key, Content)> = wanted.get(datapath).into_iter().flatten().flatten().collect();
            let count = switch.table.of(owner).count();
            switch.phase == Phase::Live
                && (count != entries.len() || entries.iter().any(|(key, content)| !switch.table.has(owner, key, content)))
        });
        if !differs {
            return;
        }
        for (datapath, switch) in self.switches.iter().filter(|(datapath, switch)| self.is_writable(owner, **datapath, switch)) {
            let is_merged = |key: &Key| key.fields.iter().any(|oxm| oxm.field() == Some(braid_openflow::oxm::Field::InPort));
            for (key, _) in switch.table.of(owner) {
                plan.write(u32::from(is_merged(key)), *datapath, owner, key.clone(), None);
            }
        }
        for (datapath, [up, merged]) in wanted {
            merged.into_iter().for_each(|(key, content)| plan.write(2, datapath, owner, key, Some(content)));
            up.into_iter().for_each(|(key, content)| plan.write(3, datapath, owner, key, Some(content)));
        }
    }
}

/// Links between each switch and the nearest receiver that is new; if none is, and all of them otherwise.
fn distances(delivery: &Delivery, old: &Outputs) -> BTreeMap<DatapathId, u32> {
    let is_new = |place: &&Place| !old.get(&place.datapath).is_some_and(|ports| ports.contains(&place.port));
    let new: BTreeSet<Place> = delivery.members.iter().filter(is_new).copied().collect();
    delivery.forest.distances(if new.is_empty() { &delivery.members } else { &new })
}
