//! Groups and meters: each slice has numbers of its own, which are others in the switch.

use std::collections::BTreeSet;

use braid_model::Time;
use braid_openflow::flags::MeterFlags;
use braid_openflow::group::{Band, BandKind, GroupMod, MeterMod, ModCommand};
use braid_openflow::ids::{DatapathId, GroupId, MeterId};
use braid_openflow::{ErrorCode, Message};

use super::{Origin, Pending, Slicer, Switch};
use crate::actions::Refusal;
use crate::journal::Record;
use crate::plan::SliceNo;

/// Burst of the meter of a slice with a rate, in parts of a second. TCP gets its rate only with 0.4 s or more.
const BURST_DIVISOR: u32 = 2;

/// The meter of a slice with a rate.
pub(super) fn rate_meter(real: u32, kbps: u32, command: ModCommand) -> MeterMod {
    let band = Band { rate: kbps, burst: (kbps / BURST_DIVISOR).max(1), kind: BandKind::Drop };
    let bands = if command == ModCommand::Delete { Vec::new() } else { vec![band] };
    MeterMod { command, flags: MeterFlags::KBPS | MeterFlags::BURST, meter: MeterId(real), bands }
}

impl Switch {
    fn free_meter(&self) -> u32 {
        let used: BTreeSet<u32> = self.meters.values().map(|(real, _)| *real).chain(self.rates.values().map(|(real, _)| *real)).collect();
        (1..).find(|number| !used.contains(number)).unwrap_or(u32::MAX)
    }

    fn free_group(&self) -> u32 {
        let used: BTreeSet<u32> = self.groups.values().map(|(real, _)| *real).collect();
        (1..).find(|number| !used.contains(number)).unwrap_or(u32::MAX)
    }
}

impl Slicer {
    pub(super) fn group_mod(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: Origin, group: &GroupMod) {
        if let Err(refusal) = self.try_group_mod(now, datapath, slice, &origin, group) {
            self.refuse(now, &origin, &refusal);
        }
    }

    fn try_group_mod(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: &Origin, group: &GroupMod) -> Result<(), Refusal> {
        let (Some(switch), Some(planned)) = (self.switches.get_mut(&datapath), self.plan.slices.get(&slice)) else { return Ok(()) };
        let refused = |code, reason: &str| Err(Refusal::new(code, reason));
        let key = (slice, group.group.0);
        if group.command == ModCommand::Delete {
            let gone: Vec<u32> = match group.group {
                GroupId::ALL => switch.groups.range((slice, 0)..=(slice, u32::MAX)).map(|((_, number), _)| *number).collect(),
                _ => switch.groups.contains_key(&key).then_some(group.group.0).into_iter().collect(),
            };
            for number in gone {
                self.delete_group(now, datapath, slice, number);
            }
            return Ok(());
        }
        if group.group > GroupId::MAX {
            return refused(ErrorCode::GroupModFailedInvalidGroup, "groups have numbers up to 0xffffff00");
        }
        let before = switch.groups.get(&key).cloned();
        let real = match (group.command, &before) {
            (ModCommand::Add, Some(_)) => return refused(ErrorCode::GroupModFailedGroupExists, "it has this group: modify it"),
            (ModCommand::Modify, None) => return refused(ErrorCode::GroupModFailedUnknownGroup, "it has no such group: add it"),
            (_, Some((real, _))) => *real,
            (_, None) if switch.groups.range((slice, 0)..=(slice, u32::MAX)).count() >= planned.spec.limits.groups => {
                return refused(ErrorCode::GroupModFailedOutOfGroups, "it has as many groups as it may have: delete some");
            }
            (_, None) => switch.free_group(),
        };
        let buckets = switch.bounds(planned, slice).buckets(group.kind, &group.buckets)?;
        switch.groups.insert(key, (real, GroupMod { command: ModCommand::Add, ..group.clone() }));
        let kept = switch.groups.get(&key).map(|(_, group)| group.clone());
        self.records_group(datapath, slice, real, kept);
        let message = Message::GroupMod(GroupMod { group: GroupId(real), buckets, ..group.clone() });
        let pending = Pending::Group { slice, group: group.group.0, before: before.map(|(_, group)| group), origin: Some(origin.clone()) };
        self.transmit(now, datapath, message, pending);
        Ok(())
    }

    fn records_group(&mut self, datapath: DatapathId, slice: SliceNo, real: u32, group: Option<GroupMod>) {
        if let Some(group) = group {
            self.record(&Record::Group(datapath, slice, real, Box::new(group)));
        }
    }

    /// Deletes a group, and the entries that use it.
    pub(super) fn delete_group(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, group: u32) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some((real, known)) = switch.groups.remove(&(slice, group)) else { return };
        let uses = |entry: &crate::table::Entry| entry.slice == slice && entry.uses_group(GroupId(group));
        let entries: Vec<u64> = switch.table.entries.iter().filter(|(_, entry)| uses(entry)).map(|(number, _)| *number).collect();
        self.record(&Record::NoGroup(datapath, slice, group));
        self.delete_entries(now, datapath, entries, braid_openflow::flow::RemovedReason::GroupDelete);
        let message = GroupMod { command: ModCommand::Delete, kind: known.kind, group: GroupId(real), buckets: Vec::new() };
        self.transmit(now, datapath, Message::GroupMod(message), Pending::Command { origin: None });
    }

    /// The switch has refused a group.
    pub(super) fn group_refused(&mut self, datapath: DatapathId, slice: SliceNo, group: u32, before: Option<GroupMod>) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some((real, known)) = switch.groups.get_mut(&(slice, group)) else { return };
        match before {
            Some(before) => {
                *known = before.clone();
                let real = *real;
                self.records_group(datapath, slice, real, Some(before));
            }
            None => {
                switch.groups.remove(&(slice, group));
                self.record(&Record::NoGroup(datapath, slice, group));
            }
        }
    }

    /// Gives groups the buckets that they need now.
    pub(super) fn renew_groups(&mut self, now: Time, datapath: DatapathId) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let (mut changed, mut gone) = (Vec::new(), Vec::new());
        for ((slice, number), (real, group)) in &switch.groups {
            let Some(planned) = self.plan.slices.get(slice) else { continue };
            match switch.bounds(planned, *slice).buckets(group.kind, &group.buckets) {
                Ok(buckets) => changed.push(GroupMod { command: ModCommand::Modify, group: GroupId(*real), buckets, kind: group.kind }),
                Err(refusal) => gone.push((*slice, *number, refusal.reason)),
            }
        }
        for message in changed {
            self.transmit(now, datapath, Message::GroupMod(message), Pending::Command { origin: None });
        }
        for (slice, number, reason) in gone {
            self.trouble(now, Some(slice), Some(datapath), None, format!("its group {number} was removed: {reason}"));
            self.delete_group(now, datapath, slice, number);
        }
    }

    pub(super) fn meter_mod(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: Origin, meter: &MeterMod) {
        if let Err(refusal) = self.try_meter_mod(now, datapath, slice, &origin, meter) {
            self.refuse(now, &origin, &refusal);
        }
    }

    fn try_meter_mod(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: &Origin, meter: &MeterMod) -> Result<(), Refusal> {
        let (Some(switch), Some(planned)) = (self.switches.get_mut(&datapath), self.plan.slices.get(&slice)) else { return Ok(()) };
        let refused = |code, reason: &str| Err(Refusal::new(code, reason));
        let key = (slice, meter.meter.0);
        if meter.command == ModCommand::Delete {
            let gone: Vec<u32> = match meter.meter {
                MeterId::ALL => switch.meters.range((slice, 0)..=(slice, u32::MAX)).map(|((_, number), _)| *number).collect(),
                _ => switch.meters.contains_key(&key).then_some(meter.meter.0).into_iter().collect(),
            };
            for number in gone {
                self.delete_meter(now, datapath, slice, number);
            }
            return Ok(());
        }
        if planned.spec.rate.is_some() {
            return refused(ErrorCode::MeterModFailedOutOfMeters, "the slice has a rate, which needs the meter that an entry can have");
        }
        if meter.meter > MeterId::MAX || meter.meter.0 == 0 {
            return refused(ErrorCode::MeterModFailedInvalidMeter, "meters have numbers from 1 to 0xffff0000");
        }
        let before = switch.meters.get(&key).cloned();
        let real = match (meter.command, &before) {
            (ModCommand::Add, Some(_)) => return refused(ErrorCode::MeterModFailedMeterExists, "it has this meter: modify it"),
            (ModCommand::Modify, None) => return refused(ErrorCode::MeterModFailedUnknownMeter, "it has no such meter: add it"),
            (_, Some((real, _))) => *real,
            (_, None) if switch.meters.range((slice, 0)..=(slice, u32::MAX)).count() >= planned.spec.limits.groups => {
                return refused(ErrorCode::MeterModFailedOutOfMeters, "it has as many meters as it may have: delete some");
            }
            (_, None) => switch.free_meter(),
        };
        let kept = MeterMod { command: ModCommand::Add, ..meter.clone() };
        switch.meters.insert(key, (real, kept.clone()));
        self.record(&Record::Meter(datapath, slice, real, Box::new(kept)));
        let pending = Pending::Meter { slice, meter: meter.meter.0, before: before.map(|(_, meter)| meter), origin: Some(origin.clone()) };
        self.transmit(now, datapath, Message::MeterMod(MeterMod { meter: MeterId(real), ..meter.clone() }), pending);
        Ok(())
    }

    /// Deletes a meter, and the entries that use it.
    pub(super) fn delete_meter(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, meter: u32) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some((real, _)) = switch.meters.remove(&(slice, meter)) else { return };
        let uses = |entry: &crate::table::Entry| entry.slice == slice && entry.uses_meter(MeterId(meter));
        let entries: Vec<u64> = switch.table.entries.iter().filter(|(_, entry)| uses(entry)).map(|(number, _)| *number).collect();
        self.record(&Record::NoMeter(datapath, slice, meter));
        self.delete_entries(now, datapath, entries, braid_openflow::flow::RemovedReason::Delete);
        self.transmit(now, datapath, Message::MeterMod(rate_meter(real, 1, ModCommand::Delete)), Pending::Command { origin: None });
    }

    /// The switch has refused a meter.
    pub(super) fn meter_refused(&mut self, datapath: DatapathId, slice: SliceNo, meter: u32, before: Option<MeterMod>) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some((real, known)) = switch.meters.get_mut(&(slice, meter)) else { return };
        let record = match before {
            Some(before) => {
                *known = before.clone();
                Record::Meter(datapath, slice, *real, Box::new(before))
            }
            None => {
                switch.meters.remove(&(slice, meter));
                Record::NoMeter(datapath, slice, meter)
            }
        };
        self.record(&record);
    }

    /// Gives slices with a rate their meters. `sends`: whether the switch does not have them anyway.
    pub(super) fn set_rates(&mut self, now: Time, datapath: DatapathId, sends: bool) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let mut messages = Vec::new();
        for (slice, planned) in &self.plan.slices {
            let wanted =
                planned.spec.rate.filter(|_| switch.has_meters).map(|rate| u32::try_from(rate.bps() / 1000).unwrap_or(u32::MAX).max(1));
            match (switch.rates.get(slice).copied(), wanted) {
                (Some((_, before)), Some(kbps)) if before == kbps => {}
                (Some((real, _)), Some(kbps)) => {
                    switch.rates.insert(*slice, (real, kbps));
                    messages.push(rate_meter(real, kbps, ModCommand::Modify));
                }
                (None, Some(kbps)) => {
                    let real = switch.free_meter();
                    switch.rates.insert(*slice, (real, kbps));
                    messages.push(rate_meter(real, kbps, ModCommand::Add));
                }
                (Some(_), None) => drop(switch.rates.remove(slice)),
                (None, None) => {}
            }
        }
        for message in messages.into_iter().filter(|_| sends) {
            self.transmit(now, datapath, Message::MeterMod(message), Pending::Command { origin: None });
        }
    }
}
