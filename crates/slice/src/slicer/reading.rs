//! Puts a switch in order when it connects: its tables are read, and what differs from what controllers asked for is changed.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::{ByteCount, Time};
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::ConfigFlags;
use braid_openflow::flow::FlowCommand;
use braid_openflow::group::{GroupMod, MeterMod, ModCommand};
use braid_openflow::ids::{DatapathId, GroupId, MaxLen, MeterId, PortNo, Seconds};
use braid_openflow::multipart::{FlowQuery, FlowStats, GroupDescription, MeterConfig, ReplyBody, RequestBody};
use braid_openflow::switch::SwitchConfig;
use braid_openflow::{Message, Version};

use super::{Pending, Slicer, SwitchPhase};
use crate::journal::Record;
use crate::table::{Key, removal};

/// What is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Ports,
    MeterFeatures,
    Meters,
    Groups,
    Flows,
}

/// What a switch has.
#[derive(Debug, Default)]
pub(super) struct Reading {
    meters: Vec<MeterConfig>,
    groups: Vec<GroupDescription>,
}

impl Slicer {
    pub(super) fn read_tables(&mut self, now: Time, datapath: DatapathId) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        switch.reading = Some(Reading::default());
        switch.has_meters = false;
        let is_newer = switch.version == Version::V1_3;
        // Slices choose what of a packet they get.
        let config = SwitchConfig { flags: ConfigFlags::NONE, miss_send_len: MaxLen::NO_BUFFER };
        self.transmit(now, datapath, Message::SetConfig(config), Pending::Command { origin: None });
        if is_newer {
            self.ask(now, datapath, RequestBody::PortDescription, Pending::Reading(Part::Ports));
            self.ask(now, datapath, RequestBody::MeterFeatures, Pending::Reading(Part::MeterFeatures));
            self.ask(now, datapath, RequestBody::MeterConfig(MeterId::ALL), Pending::Reading(Part::Meters));
            self.ask(now, datapath, RequestBody::GroupDescription, Pending::Reading(Part::Groups));
        }
        self.ask(now, datapath, RequestBody::Flow(FlowQuery::default()), Pending::Reading(Part::Flows));
    }

    /// A part was read; `None` if the switch has no such thing.
    pub(super) fn read(&mut self, now: Time, datapath: DatapathId, part: Part, body: Option<ReplyBody>) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some(reading) = &mut switch.reading else { return };
        match (part, body) {
            (Part::Ports, Some(ReplyBody::PortDescription(ports))) => switch.set_ports(ports.into_iter()),
            (Part::MeterFeatures, Some(ReplyBody::MeterFeatures(features))) => switch.has_meters = features.max_meters > 0,
            (Part::Meters, Some(ReplyBody::MeterConfig(meters))) => reading.meters = meters,
            (Part::Groups, Some(ReplyBody::GroupDescription(groups))) => reading.groups = groups,
            // It was asked for last.
            (Part::Flows, Some(ReplyBody::Flow(flows))) => self.compare(now, datapath, flows),
            (Part::Flows, _) => {
                self.trouble(now, None, Some(datapath), None, "it does not show its flow entries, so no slice can use it".to_owned());
            }
            _ => {}
        }
    }

    fn compare(&mut self, now: Time, datapath: DatapathId, flows: Vec<FlowStats>) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let reading = switch.reading.take().unwrap_or_default();
        // What slices have that are no more.
        let known = |slice| self.plan.slices.contains_key(&slice);
        let orphans: Vec<u64> = switch.table.entries.iter().filter(|(_, entry)| !known(entry.slice)).map(|(number, _)| *number).collect();
        orphans.into_iter().for_each(|number| drop(switch.table.remove(number)));
        switch.groups.retain(|(slice, _), _| known(*slice));
        switch.meters.retain(|(slice, _), _| known(*slice));
        switch.rates.retain(|slice, _| known(*slice));
        // What entries need now. The messages are not sent, because the switch may have it.
        let numbers: Vec<u64> = switch.table.entries.keys().copied().collect();
        self.set_rates(now, datapath, false);
        let _ = self.renewed(now, datapath, numbers);
        self.set_system(now, datapath, false);
        self.compare_numbers(now, datapath, &reading);
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let mut found: BTreeMap<Key, FlowStats> =
            flows.into_iter().map(|flow| (Key::of(flow.table, flow.priority, &flow.matching), flow)).collect();
        let (mut write, mut expired) = (Vec::new(), Vec::new());
        for (key, row) in &switch.table.rows {
            let (has_timeout, number) = (row.idle != Seconds(0) || row.hard != Seconds(0), crate::table::read_cookie(row.cookie));
            match found.remove(key) {
                Some(flow) => {
                    let same = flow.cookie == row.cookie && flow.idle_timeout == row.idle && flow.hard_timeout == row.hard;
                    if !same || plain(&flow.instructions) != plain(&row.instructions) {
                        write.push((row.message(FlowCommand::Add, key), key.clone()));
                    }
                }
                // Its time was over while the slicer was away.
                None if has_timeout => expired.extend(number.map(|(_, number)| (number, key.clone()))),
                None => write.push((row.message(FlowCommand::Add, key), key.clone())),
            }
        }
        for (number, key) in expired {
            if switch.table.row_gone(number, &key, (0, ByteCount::ZERO)).is_some() {
                Record::NoEntry(datapath, number).write(&mut self.records);
            }
        }
        let foreign: Vec<Key> = found.into_keys().collect();
        let (written, removed) = (write.len(), foreign.len());
        self.send_rows(now, datapath, write, None);
        self.send_rows(now, datapath, foreign.into_iter().map(|key| (removal(&key), key)).collect(), None);
        if written + removed > 0 {
            self.note(now, None, Some(datapath), format!("put in order: {written} entries written, {removed} removed"));
        }
        self.transmit(now, datapath, Message::BarrierRequest, Pending::Settled);
    }

    /// Adds the groups and meters that are missing, and removes others.
    fn compare_numbers(&mut self, now: Time, datapath: DatapathId, reading: &Reading) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        if switch.version != Version::V1_3 {
            return;
        }
        let mut messages = Vec::new();
        let has_meter = |real: u32| reading.meters.iter().find(|meter| meter.meter.0 == real);
        let mut used: BTreeSet<u32> = BTreeSet::new();
        for (real, meter) in switch.meters.values() {
            used.insert(*real);
            let command = match has_meter(*real) {
                Some(found) if found.bands == meter.bands => continue,
                Some(_) => ModCommand::Modify,
                None => ModCommand::Add,
            };
            messages.push(Message::MeterMod(MeterMod { command, meter: MeterId(*real), ..meter.clone() }));
        }
        for (real, kbps) in switch.rates.values() {
            used.insert(*real);
            let meter = super::numbers::rate_meter(*real, *kbps, ModCommand::Add);
            match has_meter(*real) {
                Some(found) if found.bands == meter.bands => {}
                Some(_) => messages.push(Message::MeterMod(MeterMod { command: ModCommand::Modify, ..meter })),
                None => messages.push(Message::MeterMod(meter)),
            }
        }
        let mut last = Vec::new();
        for meter in reading.meters.iter().filter(|meter| !used.contains(&meter.meter.0) && meter.meter <= MeterId::MAX) {
            last.push(Message::MeterMod(super::numbers::rate_meter(meter.meter.0, 1, ModCommand::Delete)));
        }
        let mut used: BTreeSet<u32> = BTreeSet::new();
        let mut gone = Vec::new();
        for ((slice, number), (real, group)) in &switch.groups {
            let Some(planned) = self.plan.slices.get(slice) else { continue };
            let Ok(buckets) = switch.bounds(planned, *slice).buckets(group.kind, &group.buckets) else {
                gone.push((*slice, *number));
                continue;
            };
            used.insert(*real);
            let command = match reading.groups.iter().find(|found| found.group.0 == *real) {
                Some(found) if found.kind == group.kind && found.buckets == buckets => continue,
                Some(_) => ModCommand::Modify,
                None => ModCommand::Add,
            };
            messages.push(Message::GroupMod(GroupMod { command, group: GroupId(*real), buckets, kind: group.kind }));
        }
        for key in gone {
            switch.groups.remove(&key);
            Record::NoGroup(datapath, key.0, key.1).write(&mut self.records);
        }
        for group in reading.groups.iter().filter(|group| !used.contains(&group.group.0)) {
            let (command, buckets) = (ModCommand::Delete, Vec::new());
            last.push(Message::GroupMod(GroupMod { command, group: group.group, buckets, kind: group.kind }));
        }
        let is_any = !messages.is_empty() || !last.is_empty();
        // Removing a group or a meter removes the entries that use it, which are foreign ones or are written below.
        for message in last.into_iter().chain(messages) {
            self.transmit(now, datapath, message, Pending::Command { origin: None });
        }
        if is_any {
            self.barrier(now, datapath, None);
        }
    }

    /// All that was missing in a switch is there.
    pub(super) fn settled(&mut self, now: Time, datapath: DatapathId) {
        if let Some(switch) = self.switches.get_mut(&datapath).filter(|switch| switch.phase == SwitchPhase::Reading) {
            switch.phase = SwitchPhase::Live;
            self.note(now, None, Some(datapath), "in order: controllers may use it".to_owned());
            self.sync_links(now);
        }
    }
}

/// Instructions in the form in which all that mean the same are alike: switches return them in another order, and forget what has no meaning.
fn plain(instructions: &[Instruction]) -> Vec<Instruction> {
    let action = |action: &Action| match action {
        Action::Output { port, .. } if *port != PortNo::CONTROLLER => Action::Output { port: *port, max_len: MaxLen(0) },
        other => other.clone(),
    };
    let mut plain: Vec<Instruction> = instructions
        .iter()
        .map(|instruction| match instruction {
            Instruction::ApplyActions(actions) => Instruction::ApplyActions(actions.iter().map(action).collect()),
            Instruction::WriteActions(actions) => Instruction::WriteActions(actions.iter().map(action).collect()),
            other => other.clone(),
        })
        .filter(|instruction| !matches!(instruction, Instruction::ApplyActions(actions) if actions.is_empty()))
        .collect();
    plain.sort_by_key(|instruction| match instruction {
        Instruction::Meter(_) => 0,
        Instruction::ApplyActions(_) => 1,
        Instruction::ClearActions => 2,
        Instruction::WriteActions(_) => 3,
        Instruction::WriteMetadata { .. } => 4,
        Instruction::GotoTable(_) => 5,
        Instruction::Experimenter { .. } => 6,
    });
    plain
}
