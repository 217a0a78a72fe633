//! Changes of slices, users and versions of controllers, while everything runs; and what a former slicer has written down.

use std::collections::BTreeSet;

use braid_model::Time;
use braid_openflow::flow::{FlowMod, RemovedReason};
use braid_openflow::group::ModCommand;
use braid_openflow::ids::{DatapathId, Xid};
use braid_openflow::matching::Match;
use braid_openflow::switch::Features;
use braid_openflow::{Message, Version};

use super::{LinkPhase, Pending, SliceState, Slicer, Snapshot, SwitchPhase, SwitchState, UplinkState};
use crate::journal::Record;
use crate::plan::{Owned, Plan, PlanError, SliceNo, User, Wanted};

impl Slicer {
    /// The slices and users in force.
    pub fn wanted(&self) -> &Wanted {
        &self.wanted
    }

    /// Puts slices and users into force. Of what stays as it is, nobody notices anything.
    ///
    /// # Errors
    /// They cannot be as they are described; then nothing changes.
    pub fn set(&mut self, now: Time, wanted: Wanted) -> Result<(), PlanError> {
        self.now = now;
        let mut numbers = self.numbers.clone();
        numbers.retain(|name, _| wanted.slices.contains_key(name));
        let plan = Plan::of(&wanted, &self.hosts, &mut numbers)?;
        let gone: Vec<(String, SliceNo)> =
            self.numbers.iter().filter(|(name, _)| !numbers.contains_key(*name)).map(|(name, number)| (name.clone(), *number)).collect();
        let new: Vec<(String, SliceNo)> = numbers
            .iter()
            .filter(|(name, number)| self.numbers.get(*name) != Some(*number))
            .map(|(name, number)| (name.clone(), *number))
            .collect();
        // What other slices take the number of, goes first.
        for (name, slice) in gone {
            self.remove_slice(now, slice);
            self.hosts.remove(&name);
            self.record(&Record::NoSlice(slice));
        }
        for (name, slice) in new {
            self.record(&Record::Number(slice, name));
        }
        let limits = |plan: &Plan, slice: &SliceNo| plan.slices.get(slice).map(|planned| planned.spec.limits);
        for switch in self.switches.values_mut() {
            switch.rates_of.retain(|slice, _| limits(&self.plan, slice) == limits(&plan, slice));
        }
        (self.plan, self.wanted, self.numbers) = (plan, wanted, numbers);
        let staged = |name: &String| self.wanted.slices.values().any(|spec| spec.stage.as_ref().is_some_and(|stage| stage.of == *name));
        self.hosts.retain(|name, _| staged(name));
        let switches: Vec<DatapathId> = self.switches.keys().copied().collect();
        for datapath in switches {
            self.space_changed(now, datapath);
        }
        self.sync_links(now);
        Ok(())
    }

    /// Takes away all that a slice has.
    fn remove_slice(&mut self, now: Time, slice: SliceNo) {
        let switches: Vec<DatapathId> = self.switches.keys().copied().collect();
        for datapath in switches {
            let Some(switch) = self.switches.get_mut(&datapath) else { continue };
            let entries = switch.table.of(slice);
            let groups: Vec<u32> = switch.groups.range((slice, 0)..=(slice, u32::MAX)).map(|((_, number), _)| *number).collect();
            let meters: Vec<u32> = switch.meters.range((slice, 0)..=(slice, u32::MAX)).map(|((_, number), _)| *number).collect();
            switch.roles.remove(&slice);
            switch.rates_of.remove(&slice);
            self.delete_entries(now, datapath, entries, RemovedReason::Delete);
            groups.into_iter().for_each(|group| self.delete_group(now, datapath, slice, group));
            meters.into_iter().for_each(|meter| self.delete_meter(now, datapath, slice, meter));
        }
        self.counters.remove(&slice);
    }

    /// The space at a switch, without what its version cannot express.
    pub(super) fn space_at(&mut self, now: Time, datapath: DatapathId, version: Version) -> Vec<Owned> {
        let (space, unfit): (Vec<Owned>, Vec<Owned>) = self.plan.at(datapath).into_iter().partition(|owned| {
            let flow = FlowMod { matching: Match::new(owned.region.header.oxms()), ..FlowMod::default() };
            Message::FlowMod(flow).encode(version, Xid(0), &mut Vec::new()).is_ok()
        });
        for owned in unfit {
            let text = format!("OpenFlow {version} cannot express {}: the slice has no such packets at this switch", owned.region);
            self.trouble(now, Some(owned.slice), Some(datapath), None, text);
        }
        space
    }

    fn space_changed(&mut self, now: Time, datapath: DatapathId) {
        let Some((version, phase)) = self.switches.get(&datapath).map(|switch| (switch.version, switch.phase)) else { return };
        let space = self.space_at(now, datapath, version);
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        switch.space = space;
        // The others are compared with what they have when they are read.
        if phase != SwitchPhase::Live {
            return;
        }
        let before = switch.rates.clone();
        self.set_rates(now, datapath, true);
        let Some(switch) = self.switches.get(&datapath) else { return };
        let numbers: Vec<u64> = switch.table.entries.keys().copied().collect();
        self.renew_entries(now, datapath, numbers);
        self.renew_groups(now, datapath);
        self.set_system(now, datapath, true);
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let known: BTreeSet<SliceNo> = self.plan.slices.keys().copied().collect();
        switch.rates.retain(|slice, _| known.contains(slice));
        let gone: Vec<u32> = before.iter().filter(|(slice, _)| !switch.rates.contains_key(slice)).map(|(_, (real, _))| *real).collect();
        for real in gone {
            let message = Message::MeterMod(super::numbers::rate_meter(real, 1, ModCommand::Delete));
            self.transmit(now, datapath, message, Pending::Command { origin: None });
        }
    }

    /// New hosts may belong to another version of their slice's controller.
    pub(super) fn plan_hosts(&mut self, now: Time) {
        let wanted = self.wanted.clone();
        if let Err(error) = self.set(now, wanted) {
            self.trouble(now, None, None, None, format!("a host stays where it is: {error}"));
        }
    }

    /// Restores what a former slicer has written down.
    pub(super) fn replay(&mut self, records: Vec<Record>) {
        let features = |datapath| Features {
            datapath,
            buffers: 0,
            tables: 0,
            auxiliary: 0,
            capabilities: Default::default(),
            actions: 0,
            ports: Vec::new(),
        };
        for record in records {
            match record {
                Record::Number(slice, name) => drop(self.numbers.insert(name, slice)),
                Record::NoSlice(slice) => {
                    self.numbers.retain(|_, number| *number != slice);
                    for switch in self.switches.values_mut() {
                        let entries: Vec<u64> =
                            switch.table.entries.iter().filter(|(_, entry)| entry.slice == slice).map(|(number, _)| *number).collect();
                        entries.into_iter().for_each(|number| switch.table.unrestore(number));
                        switch.groups.retain(|(owner, _), _| *owner != slice);
                        switch.meters.retain(|(owner, _), _| *owner != slice);
                    }
                }
                Record::Entry(datapath, version, slice, number, flow) => {
                    self.switch(datapath, version, &features(datapath)).table.restore(number, slice, *flow);
                }
                Record::NoEntry(datapath, number) => {
                    if let Some(switch) = self.switches.get_mut(&datapath) {
                        switch.table.unrestore(number);
                    }
                }
                Record::Group(datapath, slice, real, group) => {
                    let key = (slice, group.group.0);
                    self.switch(datapath, Version::V1_3, &features(datapath)).groups.insert(key, (real, *group));
                }
                Record::NoGroup(datapath, slice, group) => {
                    self.switches.get_mut(&datapath).map(|switch| switch.groups.remove(&(slice, group)));
                }
                Record::Meter(datapath, slice, real, meter) => {
                    let key = (slice, meter.meter.0);
                    self.switch(datapath, Version::V1_3, &features(datapath)).meters.insert(key, (real, *meter));
                }
                Record::NoMeter(datapath, slice, meter) => {
                    self.switches.get_mut(&datapath).map(|switch| switch.meters.remove(&(slice, meter)));
                }
                Record::Host(slice, host) => {
                    let name = self.numbers.iter().find(|(_, number)| **number == slice).map(|(name, _)| name.clone());
                    if let Some(name) = name {
                        self.hosts.entry(name).or_default().insert(host);
                    }
                }
            }
        }
    }

    /// A journal with all that is known now, without what is over.
    pub fn journal(&self) -> Vec<u8> {
        let mut journal = Vec::new();
        for (name, slice) in &self.numbers {
            Record::Number(*slice, name.clone()).write(&mut journal);
        }
        for (name, hosts) in &self.hosts {
            let Some(slice) = self.numbers.get(name) else { continue };
            hosts.iter().for_each(|host| Record::Host(*slice, *host).write(&mut journal));
        }
        for (datapath, switch) in &self.switches {
            for ((slice, _), (real, group)) in &switch.groups {
                Record::Group(*datapath, *slice, *real, Box::new(group.clone())).write(&mut journal);
            }
            for ((slice, _), (real, meter)) in &switch.meters {
                Record::Meter(*datapath, *slice, *real, Box::new(meter.clone())).write(&mut journal);
            }
            for (number, entry) in &switch.table.entries {
                Record::Entry(*datapath, switch.version, entry.slice, *number, Box::new(entry.flow.clone())).write(&mut journal);
            }
        }
        journal
    }

    /// All that the API shows.
    pub fn snapshot(&self) -> Snapshot {
        let slice = |(number, planned): (&SliceNo, &crate::plan::Planned)| {
            let links = self.links.iter().filter(|(link, _)| link.slice == planned.name).map(|(link, state)| UplinkState {
                link: link.clone(),
                version: match state.state {
                    LinkPhase::Up(id) => self.ups.get(&id).and_then(|up| up.version),
                    _ => None,
                },
            });
            let own = |switch: &super::Switch| {
                (switch.table.entries.values().filter(|entry| entry.slice == *number).count(), switch.table.count(*number))
            };
            let entries = self.switches.values().map(own).fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            let users: Vec<User> = self.wanted.users.iter().filter(|(_, name)| **name == planned.name).map(|(user, _)| *user).collect();
            let staged = planned.spec.stage.as_ref().map(|stage| {
                let known = self.hosts.get(&stage.of).into_iter().flatten().filter(|host| stage.includes(**host));
                known.chain(&stage.hosts).copied().collect::<BTreeSet<_>>()
            });
            SliceState {
                name: planned.name.clone(),
                spec: planned.spec.clone(),
                users,
                staged: staged.unwrap_or_default().into_iter().collect(),
                links: links.collect(),
                entries,
                counters: self.counters.get(number).copied().unwrap_or_default(),
            }
        };
        let switch = |(datapath, switch): (&DatapathId, &super::Switch)| SwitchState {
            datapath: *datapath,
            peer: switch.peer.clone(),
            phase: switch.phase,
            version: switch.version,
            rows: switch.table.rows.len(),
            ports: switch.port_list.clone(),
        };
        Snapshot {
            slices: self.plan.slices.iter().map(slice).collect(),
            switches: self.switches.iter().map(switch).collect(),
            troubles: self.troubles.last().cloned().collect(),
        }
    }
}
