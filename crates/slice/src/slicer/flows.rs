//! Flow entries: what controllers ask for, and what becomes of it in switches.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use braid_model::Time;
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::FlowFlags;
use braid_openflow::flow::{FlowCommand, FlowMod, FlowRemoved, RemovedReason};
use braid_openflow::ids::{Cookie, DatapathId, PortNo, TableId};
use braid_openflow::matching::Match;
use braid_openflow::multipart::FlowQuery;
use braid_openflow::oxm::{Field, Oxm};
use braid_openflow::{ErrorCode, Message, Version};

use super::{Origin, Slicer};
use crate::actions::Refusal;
use crate::journal::Record;
use crate::packet::LLDP;
use crate::plan::SliceNo;
use crate::priorities::{SYSTEM, guard};
use crate::space::Ports;
use crate::table::{Changes, Entry, Key, Row, read_cookie};

/// Time after which a deleted entry is reported although the switch has not reported all of its rows.
const REPORT: Duration = Duration::from_secs(5);
/// Most deleted entries of which reports are awaited.
const MAX_DYING: usize = 16_384;

/// An entry that a controller has deleted, until the switch has reported its rows.
#[derive(Debug)]
pub(super) struct Dying {
    pub(super) entry: Entry,
    reason: RemovedReason,
    left: BTreeSet<Key>,
    pub(super) due: Time,
}

impl Slicer {
    pub(super) fn flow_mod(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: Origin, flow: &FlowMod) {
        let done = match flow.command {
            FlowCommand::Add => self.add(now, datapath, slice, &origin, flow),
            FlowCommand::Modify | FlowCommand::ModifyStrict => self.modify(now, datapath, slice, &origin, flow),
            FlowCommand::Delete | FlowCommand::DeleteStrict => self.delete(now, datapath, slice, flow),
        };
        let done = done.and_then(|()| match flow.buffer {
            Some(buffer) => self.release_buffer(now, datapath, slice, &origin, buffer),
            None => Ok(()),
        });
        if let Err(refusal) = done {
            self.refuse(now, &origin, &refusal);
        }
    }

    fn add(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: &Origin, flow: &FlowMod) -> Result<(), Refusal> {
        let (Some(switch), Some(planned)) = (self.switches.get_mut(&datapath), self.plan.slices.get(&slice)) else { return Ok(()) };
        let version = switch.version;
        flow.matching.check().map_err(|code| Refusal::new(code, "the specification forbids this match"))?;
        if flow.flags.contains(FlowFlags::EMERG) {
            return Err(Refusal::new(ErrorCode::FlowModFailedUnsupported, "emergency entries would be all slices': use others"));
        }
        let meter = switch.rate(slice);
        let (bounds, table) = switch.parts(planned, slice);
        if flow.table.0 >= bounds.tables {
            return Err(Refusal::new(ErrorCode::FlowModFailedBadTableId, format!("the switch has no table {}", flow.table.0)));
        }
        let kept = FlowMod { command: FlowCommand::Add, buffer: None, cookie_mask: Cookie(0), out_port: PortNo::ANY, ..flow.clone() };
        let (number, changes) = table.add(&bounds, kept.clone(), meter)?;
        // 1.0 has no masks of Ethernet addresses and the like.
        if version == Version::V1_0 {
            let mut scratch = Vec::new();
            let unfit = changes
                .messages
                .iter()
                .find_map(|(flow, _)| Message::FlowMod(flow.clone()).encode(version, braid_openflow::ids::Xid(0), &mut scratch).err());
            if let Some(error) = unfit {
                // What it would have replaced goes, too: the switch would have both.
                let gone = table.remove(number);
                let removed = changes.removed.into_iter().chain(gone.removed);
                removed.for_each(|(number, _)| Record::NoEntry(datapath, number).write(&mut self.records));
                let removals = gone.messages;
                self.send_rows(now, datapath, removals, None);
                return Err(Refusal::new(
                    ErrorCode::FlowModFailedEperm,
                    format!("{error}: narrow the slice's space, or the match, to what it has"),
                ));
            }
        }
        for (before, _) in &changes.removed {
            Record::NoEntry(datapath, *before).write(&mut self.records);
        }
        let is_new_table = flow.table != TableId(0) && !switch.has_guards(flow.table);
        self.record(&Record::Entry(datapath, version, slice, number, Box::new(kept)));
        if is_new_table {
            self.set_system(now, datapath, true);
        }
        self.send_rows(now, datapath, changes.messages, Some(origin));
        self.renew_stale(now, datapath);
        Ok(())
    }

    fn modify(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, origin: &Origin, flow: &FlowMod) -> Result<(), Refusal> {
        let (Some(switch), Some(planned)) = (self.switches.get_mut(&datapath), self.plan.slices.get(&slice)) else { return Ok(()) };
        flow.matching.check().map_err(|code| Refusal::new(code, "the specification forbids this match"))?;
        let version = switch.version;
        let strict = flow.command == FlowCommand::ModifyStrict;
        let query = FlowQuery { out_port: PortNo::ANY, out_group: braid_openflow::ids::GroupId::ANY, ..query(flow) };
        let numbers: Vec<u64> = if strict {
            let has_cookie = |number: &u64| switch.table.entries.get(number).is_some_and(|entry| entry.is_asked_for(&query));
            switch.table.same(slice, flow).into_iter().filter(has_cookie).collect()
        } else {
            switch.table.asked_for(slice, &query)
        };
        if numbers.is_empty() && version == Version::V1_0 {
            return self.add(now, datapath, slice, origin, flow);
        }
        let meter = switch.rate(slice);
        let (bounds, table) = switch.parts(planned, slice);
        // All of them, or none.
        for number in &numbers {
            table.may_modify(&bounds, *number, &flow.instructions, meter)?;
        }
        for number in &numbers {
            if let Some(entry) = table.entries.get_mut(number) {
                entry.flow.instructions.clone_from(&flow.instructions);
                Record::Entry(datapath, version, slice, *number, Box::new(entry.flow.clone())).write(&mut self.records);
            }
        }
        let messages = self.renewed(now, datapath, numbers);
        self.send_rows(now, datapath, messages, Some(origin));
        self.renew_stale(now, datapath);
        Ok(())
    }

    fn delete(&mut self, now: Time, datapath: DatapathId, slice: SliceNo, flow: &FlowMod) -> Result<(), Refusal> {
        let Some(switch) = self.switches.get_mut(&datapath) else { return Ok(()) };
        flow.matching.check().map_err(|code| Refusal::new(code, "the specification forbids this match"))?;
        let query = query(flow);
        let asked = |number: &u64| switch.table.entries.get(number).is_some_and(|entry| entry.is_asked_for(&query));
        let numbers = match flow.command {
            FlowCommand::DeleteStrict => switch.table.same(slice, flow).into_iter().filter(asked).collect(),
            _ => switch.table.asked_for(slice, &query),
        };
        self.delete_entries(now, datapath, numbers, RemovedReason::Delete);
        Ok(())
    }

    /// Deletes entries, and reports them to their controllers once the switch has.
    pub(super) fn delete_entries(&mut self, now: Time, datapath: DatapathId, numbers: Vec<u64>, reason: RemovedReason) {
        for number in numbers {
            let Some(switch) = self.switches.get_mut(&datapath) else { return };
            let Changes { messages, removed } = switch.table.remove(number);
            let is_away = switch.connection.is_none();
            for (number, entry) in removed {
                Record::NoEntry(datapath, number).write(&mut self.records);
                if entry.reports() && !is_away && switch.dying.len() < MAX_DYING {
                    let left = entry.rows.iter().cloned().collect();
                    switch.dying.insert(number, Dying { entry, reason, left, due: now + REPORT });
                }
            }
            self.send_rows(now, datapath, messages, None);
        }
    }

    /// A row is no more.
    pub(super) fn flow_removed(&mut self, now: Time, datapath: DatapathId, removed: &FlowRemoved) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some((_, number)) = read_cookie(removed.cookie) else { return };
        let key = Key::of(removed.table, removed.priority, &removed.matching);
        let traffic = (removed.packets.unwrap_or_default(), removed.bytes.unwrap_or_default());
        if let Some(dying) = switch.dying.get_mut(&number) {
            dying.left.remove(&key);
            dying.entry.gone = (dying.entry.gone.0 + traffic.0, dying.entry.gone.1 + traffic.1);
            if dying.left.is_empty()
                && let Some(dying) = switch.dying.remove(&number)
            {
                self.report(now, datapath, &dying.entry, dying.reason, removed.duration);
            }
            return;
        }
        // Those that the slicer itself has removed are not in the table any more.
        if removed.reason == RemovedReason::Delete && switch.table.entries.get(&number).is_none_or(|entry| !entry.rows.contains(&key)) {
            return;
        }
        if let Some(entry) = switch.table.row_gone(number, &key, traffic) {
            Record::NoEntry(datapath, number).write(&mut self.records);
            self.report(now, datapath, &entry, removed.reason, removed.duration);
        }
    }

    fn report(&mut self, _now: Time, datapath: DatapathId, entry: &Entry, reason: RemovedReason, duration: Option<Duration>) {
        let flow = &entry.flow;
        if !flow.flags.contains(FlowFlags::SEND_FLOW_REM) {
            return;
        }
        let is_v10 = self.switches.get(&datapath).is_some_and(|switch| switch.version == Version::V1_0);
        let message = Message::FlowRemoved(FlowRemoved {
            cookie: flow.cookie,
            priority: flow.priority,
            reason: if is_v10 && reason == RemovedReason::GroupDelete { RemovedReason::Delete } else { reason },
            table: flow.table,
            duration,
            idle_timeout: flow.idle_timeout,
            hard_timeout: if is_v10 { braid_openflow::ids::Seconds(0) } else { flow.hard_timeout },
            packets: Some(entry.gone.0),
            bytes: Some(entry.gone.1),
            matching: flow.matching.clone(),
        });
        for id in self.ups_of(entry.slice, datapath) {
            self.notify(id, message.clone());
        }
    }

    /// Reports deleted entries whose rows the switch has not reported.
    pub(super) fn expire_dying(&mut self, now: Time, datapath: DatapathId) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let late: Vec<u64> = switch.dying.iter().filter(|(_, dying)| dying.due <= now).map(|(number, _)| *number).collect();
        let late: Vec<Dying> = late.into_iter().filter_map(|number| switch.dying.remove(&number)).collect();
        for dying in late {
            self.report(now, datapath, &dying.entry, dying.reason, None);
        }
    }

    /// The switch has refused a row: the entry goes.
    pub(super) fn row_refused(&mut self, now: Time, datapath: DatapathId, cookie: Cookie, key: &Key, is_own: bool, code: ErrorCode) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let Some((slice, number)) = read_cookie(cookie) else {
            if switch.table.rows.get(key).is_some_and(|row| row.cookie == cookie) {
                switch.table.rows.remove(key);
            }
            let text =
                format!("it refuses an entry of the slicer itself ({code}): its slices may not be kept apart; use a switch that has it");
            return self.trouble(now, None, Some(datapath), None, text);
        };
        if switch.table.entries.get(&number).is_none_or(|entry| !entry.rows.contains(key)) {
            return;
        }
        // The row is not in the switch, the others may be.
        self.delete_entries(now, datapath, vec![number], RemovedReason::Delete);
        if is_own {
            self.trouble(now, Some(slice), Some(datapath), None, format!("an entry was lost: the switch refuses it now ({code})"));
        }
    }

    /// Gives entries the rows that they need now, and sends the changes.
    pub(super) fn renew_entries(&mut self, now: Time, datapath: DatapathId, numbers: Vec<u64>) {
        let messages = self.renewed(now, datapath, numbers);
        self.send_rows(now, datapath, messages, None);
        self.renew_stale(now, datapath);
    }

    fn renew_stale(&mut self, now: Time, datapath: DatapathId) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let numbers: Vec<u64> = switch.table.take_stale().into_iter().flat_map(|(_, numbers)| numbers).collect();
        if !numbers.is_empty() {
            let messages = self.renewed(now, datapath, numbers);
            self.send_rows(now, datapath, messages, None);
        }
    }

    /// Gives entries the rows that they need now. What is added comes before what is removed.
    pub(super) fn renewed(&mut self, now: Time, datapath: DatapathId, numbers: Vec<u64>) -> Vec<(FlowMod, Key)> {
        let (mut messages, mut lost) = (Vec::new(), Vec::new());
        let Some(switch) = self.switches.get_mut(&datapath) else { return messages };
        for number in numbers {
            let Some(slice) = switch.table.entries.get(&number).map(|entry| entry.slice) else { continue };
            let Some(planned) = self.plan.slices.get(&slice) else { continue };
            let meter = switch.rate(slice);
            let (bounds, table) = switch.parts(planned, slice);
            let (changes, refusal) = table.renew(&bounds, number, meter);
            messages.extend(changes.messages);
            lost.extend(changes.removed.into_iter().zip(refusal));
        }
        for ((number, entry), refusal) in lost {
            self.record(&Record::NoEntry(datapath, number));
            let text =
                format!("an entry of table {} with priority {} was removed: {}", entry.flow.table.0, entry.flow.priority, refusal.reason);
            self.trouble(now, Some(entry.slice), Some(datapath), None, text);
            self.report(now, datapath, &entry, RemovedReason::Delete, None);
        }
        messages.sort_by_key(|(flow, _)| flow.command == FlowCommand::DeleteStrict);
        // A row that another entry has taken over is not removed.
        let written: BTreeSet<Key> =
            messages.iter().filter(|(flow, _)| flow.command != FlowCommand::DeleteStrict).map(|(_, key)| key.clone()).collect();
        messages.retain(|(flow, key)| flow.command != FlowCommand::DeleteStrict || !written.contains(key));
        messages
    }

    /// Sets the slicer's own entries: guards of the slices' spaces, LLDP, and what nobody claims.
    pub(super) fn set_system(&mut self, now: Time, datapath: DatapathId, sends: bool) {
        let Some(switch) = self.switches.get_mut(&datapath) else { return };
        let to_controller = vec![Instruction::ApplyActions(vec![Action::output(PortNo::CONTROLLER)])];
        let is_v10 = switch.version == Version::V1_0;
        let mut rows: BTreeMap<Key, Row> = BTreeMap::new();
        let discovery = Match::new([Oxm::exact(Field::EthType, LLDP)]);
        rows.insert(Key::of(TableId(0), SYSTEM, &discovery), Row::system(to_controller.clone()));
        let production = self.plan.slices.get(&SliceNo::PRODUCTION);
        if production.is_none_or(|planned| planned.spec.controllers.is_empty()) {
            let forward = vec![Instruction::ApplyActions(vec![Action::output(PortNo::NORMAL)])];
            rows.insert(Key::of(TableId(0), 1, &Match::ALL), Row::system(forward));
        }
        let mut tables = switch.table.later_tables();
        tables.insert(TableId(0));
        let miss = if is_v10 { to_controller } else { Vec::new() };
        for owned in switch.space.iter().filter(|owned| owned.region.permission.write && owned.slice != SliceNo::PRODUCTION) {
            let region = &owned.region;
            let ports: Vec<Option<Oxm>> = match &region.ports {
                Ports::All => vec![None],
                Ports::Only(ports) => {
                    let has = |port: &PortNo| *port >= PortNo::MAX || switch.port_list.contains(port);
                    ports.iter().map(|port| PortNo(*port)).filter(has).map(|port| Some(Oxm::in_port(port))).collect()
                }
            };
            for (table, port) in tables.iter().flat_map(|table| ports.iter().map(move |port| (*table, port))) {
                let fields = port.clone().into_iter().chain(region.header.oxms());
                rows.insert(Key::of(table, guard(region.level), &Match::new(fields)), Row::system(miss.clone()));
            }
        }
        let messages = switch.table.set_system(&rows);
        if sends {
            self.send_rows(now, datapath, messages, None);
        }
    }
}

impl super::Switch {
    /// Whether the slices are kept apart in a table.
    fn has_guards(&self, table: TableId) -> bool {
        let from = Key { table, priority: 0, fields: Vec::new() };
        let is_guard = |row: &Row| row.cookie == crate::table::system_cookie();
        self.table.rows.range(from..).take_while(|(key, _)| key.table == table).any(|(_, row)| is_guard(row))
    }
}

/// Which entries a message that modifies or deletes is about.
fn query(flow: &FlowMod) -> FlowQuery {
    FlowQuery {
        table: flow.table,
        out_port: flow.out_port,
        out_group: flow.out_group,
        cookie: flow.cookie,
        cookie_mask: flow.cookie_mask,
        matching: flow.matching.clone(),
    }
}
