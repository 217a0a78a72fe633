//! The entries of one switch: what controllers asked for, and the rows that stand for it in the switch.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::ByteCount;
use braid_openflow::ErrorCode;
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::FlowFlags;
use braid_openflow::flow::{FlowCommand, FlowMod};
use braid_openflow::ids::{Cookie, GroupId, MeterId, PortNo, Seconds, TableId};
use braid_openflow::matching::Match;
use braid_openflow::multipart::FlowQuery;
use braid_openflow::oxm::{Field, Oxm};

use crate::actions::{Bounds, Packets, Refusal};
use crate::packet::LLDP;
use crate::plan::SliceNo;
use crate::priorities::Priorities;
use crate::space::{Header, Level, Ports};

/// Most rows of one entry.
const MAX_ROWS: usize = 1024;

/// First twelve bits of the cookies of a slicer's entries. The next twelve are the slice, the rest is the entry.
const MAGIC: u64 = 0xb5c;
const MAGIC_SHIFT: u32 = 52;
const SLICE_SHIFT: u32 = 40;
const NUMBER: u64 = (1 << SLICE_SHIFT) - 1;
/// In the place of the slice in the cookies of the slicer's own entries.
const SYSTEM: u16 = 0xfff;

/// The mark of an entry in the switch.
pub(crate) fn cookie(slice: SliceNo, number: u64) -> Cookie {
    Cookie(MAGIC << MAGIC_SHIFT | u64::from(slice.0) << SLICE_SHIFT | number & NUMBER)
}

/// The bits of a cookie that say which slice it belongs to.
pub(crate) const SLICE_MASK: Cookie = Cookie(!NUMBER);

/// The mark of the slicer's own entries.
pub(crate) fn system_cookie() -> Cookie {
    cookie(SliceNo(SYSTEM), 0)
}

/// The slice and the number of an entry.
pub(crate) fn read_cookie(cookie: Cookie) -> Option<(SliceNo, u64)> {
    let slice = (cookie.0 >> SLICE_SHIFT & 0xfff) as u16;
    (cookie.0 >> MAGIC_SHIFT == MAGIC && slice != SYSTEM).then_some((SliceNo(slice), cookie.0 & NUMBER))
}

/// Identity of a row: no table has two with the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) table: TableId,
    pub(crate) priority: u16,
    /// In canonical form.
    pub(crate) fields: Vec<Oxm>,
}

impl Key {
    pub(crate) fn of(table: TableId, priority: u16, matching: &Match) -> Self {
        Self { table, priority, fields: matching.canonical().fields }
    }
}

/// What a row does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) cookie: Cookie,
    pub(crate) instructions: Vec<Instruction>,
    pub(crate) idle: Seconds,
    pub(crate) hard: Seconds,
    pub(crate) flags: FlowFlags,
}

impl Row {
    /// A row of the slicer itself.
    pub(crate) fn system(instructions: Vec<Instruction>) -> Self {
        Self { cookie: system_cookie(), instructions, idle: Seconds(0), hard: Seconds(0), flags: FlowFlags::NONE }
    }

    /// The message that adds it, or changes it.
    pub(crate) fn message(&self, command: FlowCommand, key: &Key) -> FlowMod {
        FlowMod {
            cookie: self.cookie,
            table: key.table,
            command,
            idle_timeout: self.idle,
            hard_timeout: self.hard,
            priority: key.priority,
            flags: self.flags,
            matching: ordered(&key.fields),
            instructions: self.instructions.clone(),
            ..FlowMod::default()
        }
    }
}

/// The message that removes a row.
pub(crate) fn removal(key: &Key) -> FlowMod {
    FlowMod {
        table: key.table,
        command: FlowCommand::DeleteStrict,
        priority: key.priority,
        matching: ordered(&key.fields),
        ..FlowMod::default()
    }
}

/// Canonical fields are in the order of their numbers, in which each comes after those that it depends on.
fn ordered(fields: &[Oxm]) -> Match {
    Match { fields: fields.to_vec() }
}

/// What a controller asked for.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) slice: SliceNo,
    /// As the controller sent it.
    pub(crate) flow: FlowMod,
    /// The rows that stand for it.
    pub(crate) rows: Vec<Key>,
    /// The places of its priority that it uses.
    levels: Vec<Level>,
    /// Packets and bytes of rows that are gone.
    pub(crate) gone: (u64, ByteCount),
}

impl Entry {
    /// Whether the switch reports when a row goes.
    pub(crate) fn reports(&self) -> bool {
        reports(&self.flow)
    }

    fn key(&self) -> (SliceNo, Key) {
        (self.slice, Key::of(self.flow.table, self.flow.priority, &self.flow.matching))
    }

    pub(crate) fn uses_group(&self, group: GroupId) -> bool {
        actions(&self.flow.instructions).any(|action| *action == Action::Group(group))
    }

    pub(crate) fn uses_meter(&self, meter: MeterId) -> bool {
        self.flow.instructions.contains(&Instruction::Meter(meter))
    }

    /// Whether a request of a controller is about it. Source: OpenFlow 1.3.5 section 6.4.
    pub(crate) fn is_asked_for(&self, query: &FlowQuery) -> bool {
        let flow = &self.flow;
        (query.table == TableId::ALL || query.table == flow.table)
            && (flow.cookie.0 ^ query.cookie.0) & query.cookie_mask.0 == 0
            && is_within(&flow.matching, &query.matching)
            && (query.out_port == PortNo::ANY || actions(&flow.instructions).any(|action| outputs_to(action, query.out_port)))
            && (query.out_group == GroupId::ANY || self.uses_group(query.out_group))
    }
}

fn reports(flow: &FlowMod) -> bool {
    flow.flags.contains(FlowFlags::SEND_FLOW_REM) || flow.idle_timeout != Seconds(0) || flow.hard_timeout != Seconds(0)
}

fn outputs_to(action: &Action, to: PortNo) -> bool {
    matches!(action, Action::Output { port, .. } | Action::Enqueue { port, .. } if *port == to)
}

pub(crate) fn actions(instructions: &[Instruction]) -> impl Iterator<Item = &Action> {
    instructions.iter().flat_map(|instruction| match instruction {
        Instruction::ApplyActions(actions) | Instruction::WriteActions(actions) => actions.as_slice(),
        _ => &[],
    })
}

/// Whether all packets of one match are in the other.
fn is_within(one: &Match, other: &Match) -> bool {
    let has = |oxm: &Oxm| match oxm {
        Oxm::Basic { field, value, mask } => {
            let mask = mask.unwrap_or(field.full_mask());
            one.get(*field).is_some_and(|(own, bits)| bits & mask == mask && own & mask == value & mask) || mask == 0
        }
        other => one.fields.contains(other),
    };
    other.fields.iter().all(has)
}

/// A row that an entry needs.
#[derive(Debug, Clone)]
struct Wanted {
    level: Level,
    fields: Vec<Oxm>,
    instructions: Vec<Instruction>,
}

/// What became of a change.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Messages for the switch, in this order, and the rows that they write.
    pub(crate) messages: Vec<(FlowMod, Key)>,
    /// Entries that are no more.
    pub(crate) removed: Vec<(u64, Entry)>,
}

/// The entries of one switch.
#[derive(Debug, Clone, Default)]
pub(crate) struct Table {
    pub(crate) entries: BTreeMap<u64, Entry>,
    by_key: BTreeMap<(SliceNo, Key), u64>,
    pub(crate) rows: BTreeMap<Key, Row>,
    places: BTreeMap<(SliceNo, TableId, Level), Priorities>,
    counts: BTreeMap<SliceNo, usize>,
    /// Tables of slices whose priorities have moved.
    stale: BTreeSet<(SliceNo, TableId)>,
    last: u64,
}

impl Table {
    /// The rows of a slice.
    pub(crate) fn count(&self, slice: SliceNo) -> usize {
        self.counts.get(&slice).copied().unwrap_or_default()
    }

    /// The tables other than the first that have entries.
    pub(crate) fn later_tables(&self) -> BTreeSet<TableId> {
        self.entries.values().map(|entry| entry.flow.table).filter(|table| *table != TableId(0)).collect()
    }

    /// The entries of a slice that a request is about.
    pub(crate) fn asked_for(&self, slice: SliceNo, query: &FlowQuery) -> Vec<u64> {
        let from = (slice, Key { table: TableId(0), priority: 0, fields: Vec::new() });
        let own = self.by_key.range(from..).take_while(|((owner, _), _)| *owner == slice).map(|(_, number)| *number);
        own.filter(|number| self.entries.get(number).is_some_and(|entry| entry.is_asked_for(query))).collect()
    }

    /// The entries of a slice.
    pub(crate) fn of(&self, slice: SliceNo) -> Vec<u64> {
        self.asked_for(slice, &FlowQuery::default())
    }

    /// The entry with the same match and priority.
    pub(crate) fn same(&self, slice: SliceNo, flow: &FlowMod) -> Option<u64> {
        self.by_key.get(&(slice, Key::of(flow.table, flow.priority, &flow.matching))).copied()
    }

    /// The entries of slices whose priorities have moved: [`Self::renew`] them.
    pub(crate) fn take_stale(&mut self) -> Vec<(SliceNo, Vec<u64>)> {
        let stale = std::mem::take(&mut self.stale);
        stale.into_iter().map(|(slice, table)| (slice, self.asked_for(slice, &FlowQuery { table, ..FlowQuery::default() }))).collect()
    }

    /// Restores what a former slicer wrote down. Its rows come with [`Self::renew`].
    pub(crate) fn restore(&mut self, number: u64, slice: SliceNo, flow: FlowMod) {
        let entry = Entry { slice, flow, rows: Vec::new(), levels: Vec::new(), gone: (0, ByteCount::ZERO) };
        self.last = self.last.max(number);
        if let Some(before) = self.by_key.insert(entry.key(), number) {
            self.entries.remove(&before);
        }
        self.entries.insert(number, entry);
    }

    /// Forgets an entry that [`Self::restore`] restored.
    pub(crate) fn unrestore(&mut self, number: u64) {
        if let Some(entry) = self.entries.remove(&number) {
            self.by_key.remove(&entry.key());
        }
    }

    /// Adds an entry, or replaces the one with the same match and priority. Returns its number.
    pub(crate) fn add(&mut self, bounds: &Bounds<'_>, flow: FlowMod, meter: Option<MeterId>) -> Result<(u64, Changes), Refusal> {
        let slice = bounds.slice;
        let wanted = expand(bounds, &flow, meter)?;
        let before = self.same(slice, &flow);
        let replaced = before.and_then(|number| self.entries.get(&number)).map_or(0, |entry| entry.rows.len());
        let count = self.count(slice) + wanted.len() - replaced;
        if count > bounds.spec.limits.entries {
            let reason = format!("it would have {count} entries in this switch, and may have {}: delete some", bounds.spec.limits.entries);
            return Err(Refusal::new(ErrorCode::FlowModFailedTableFull, reason));
        }
        let number = self.last + 1;
        let (places, levels) = self.take_places(slice, &flow, &wanted)?;
        let mut changes = Changes::default();
        if let Some((number, entry)) = before.and_then(|number| Some((number, self.entries.remove(&number)?))) {
            self.forget(&entry);
            changes.removed.push((number, entry));
        }
        self.last = number;
        let mut entry = Entry { slice, flow, rows: Vec::new(), levels, gone: (0, ByteCount::ZERO) };
        for (wanted, priority) in wanted.into_iter().zip(places) {
            let (key, row) = row(number, &entry, wanted, priority);
            changes.messages.push((row.message(FlowCommand::Add, &key), key.clone()));
            entry.rows.push(key.clone());
            self.rows.insert(key, row);
        }
        let old = changes.removed.iter().flat_map(|(_, entry)| &entry.rows);
        let gone: Vec<Key> = old.filter(|key| !entry.rows.contains(key)).cloned().collect();
        for key in gone {
            self.rows.remove(&key);
            changes.messages.push((removal(&key), key));
        }
        *self.counts.entry(slice).or_default() += entry.rows.len();
        self.by_key.insert(entry.key(), number);
        self.entries.insert(number, entry);
        Ok((number, changes))
    }

    /// Checks whether an entry could have other instructions.
    pub(crate) fn may_modify(
        &self,
        bounds: &Bounds<'_>,
        number: u64,
        instructions: &[Instruction],
        meter: Option<MeterId>,
    ) -> Result<(), Refusal> {
        let Some(entry) = self.entries.get(&number) else { return Ok(()) };
        let flow = FlowMod { instructions: instructions.to_vec(), ..entry.flow.clone() };
        expand(bounds, &flow, meter).map(drop)
    }

    /// Gives an entry the rows that it needs now: after a change of the space, of ports, or of its instructions. If it can have none, it goes.
    pub(crate) fn renew(&mut self, bounds: &Bounds<'_>, number: u64, meter: Option<MeterId>) -> (Changes, Option<Refusal>) {
        let mut changes = Changes::default();
        let Some(mut entry) = self.entries.remove(&number) else { return (changes, None) };
        let former = std::mem::take(&mut entry.rows);
        let levels = std::mem::take(&mut entry.levels);
        let planned = expand(bounds, &entry.flow, meter).and_then(|wanted| {
            let count = self.count(entry.slice) + wanted.len() - former.len().min(self.count(entry.slice));
            if count > bounds.spec.limits.entries {
                return Err(Refusal::new(ErrorCode::FlowModFailedTableFull, "it has too many entries in this switch"));
            }
            let (places, levels) = self.take_places(entry.slice, &entry.flow, &wanted)?;
            Ok((wanted, places, levels))
        });
        self.release(&entry, &levels);
        let counted = self.counts.entry(entry.slice).or_default();
        *counted = counted.saturating_sub(former.len());
        let refusal = match planned {
            Ok((wanted, places, levels)) => {
                for (wanted, priority) in wanted.into_iter().zip(places) {
                    let (key, row) = row(number, &entry, wanted, priority);
                    let command = if former.contains(&key) { FlowCommand::ModifyStrict } else { FlowCommand::Add };
                    if self.rows.get(&key) != Some(&row) {
                        changes.messages.push((row.message(command, &key), key.clone()));
                    }
                    entry.rows.push(key.clone());
                    self.rows.insert(key, row);
                }
                entry.levels = levels;
                None
            }
            Err(refusal) => Some(refusal),
        };
        let own = cookie(entry.slice, number);
        for key in former.into_iter().filter(|key| !entry.rows.contains(key)) {
            // Another entry may have taken its place.
            if self.rows.get(&key).is_some_and(|row| row.cookie == own) {
                self.rows.remove(&key);
                changes.messages.push((removal(&key), key));
            }
        }
        *self.counts.entry(entry.slice).or_default() += entry.rows.len();
        if refusal.is_some() {
            self.by_key.remove(&entry.key());
            changes.removed.push((number, entry));
        } else {
            self.entries.insert(number, entry);
        }
        (changes, refusal)
    }

    /// Removes an entry.
    pub(crate) fn remove(&mut self, number: u64) -> Changes {
        let mut changes = Changes::default();
        if let Some(entry) = self.entries.remove(&number) {
            self.forget(&entry);
            for key in &entry.rows {
                self.rows.remove(key);
                changes.messages.push((removal(key), key.clone()));
            }
            changes.removed.push((number, entry));
        }
        changes
    }

    /// The switch has no such row any more. Returns the entry if that was its last one.
    pub(crate) fn row_gone(&mut self, number: u64, key: &Key, traffic: (u64, ByteCount)) -> Option<Entry> {
        let entry = self.entries.get_mut(&number)?;
        let at = entry.rows.iter().position(|row| row == key)?;
        entry.rows.remove(at);
        entry.gone = (entry.gone.0 + traffic.0, entry.gone.1 + traffic.1);
        let (slice, is_last) = (entry.slice, entry.rows.is_empty());
        self.rows.remove(key);
        if let Some(count) = self.counts.get_mut(&slice) {
            *count = count.saturating_sub(1);
        }
        if !is_last {
            return None;
        }
        let entry = self.entries.remove(&number)?;
        self.forget(&entry);
        Some(entry)
    }

    /// Sets the slicer's own rows. Returns the messages for the switch.
    pub(crate) fn set_system(&mut self, wanted: &BTreeMap<Key, Row>) -> Vec<(FlowMod, Key)> {
        let mut messages = Vec::new();
        for (key, row) in wanted {
            if self.rows.get(key) != Some(row) {
                messages.push((row.message(FlowCommand::Add, key), key.clone()));
                self.rows.insert(key.clone(), row.clone());
            }
        }
        let is_gone = |(key, row): &(&Key, &Row)| row.cookie == system_cookie() && !wanted.contains_key(key);
        let gone: Vec<Key> = self.rows.iter().filter(is_gone).map(|(key, _)| key.clone()).collect();
        for key in gone {
            self.rows.remove(&key);
            messages.push((removal(&key), key));
        }
        messages
    }

    /// Forgets the places, the count and the name of an entry that was taken out.
    fn forget(&mut self, entry: &Entry) {
        self.release(entry, &entry.levels);
        if let Some(count) = self.counts.get_mut(&entry.slice) {
            *count = count.saturating_sub(entry.rows.len());
        }
        self.by_key.remove(&entry.key());
    }

    fn release(&mut self, entry: &Entry, levels: &[Level]) {
        for level in levels {
            if let Some(places) = self.places.get_mut(&(entry.slice, entry.flow.table, *level)) {
                places.release(entry.flow.priority);
            }
        }
    }

    /// The priorities of rows, and the levels for which they were taken.
    fn take_places(&mut self, slice: SliceNo, flow: &FlowMod, wanted: &[Wanted]) -> Result<(Vec<u16>, Vec<Level>), Refusal> {
        let mut taken: BTreeMap<Level, u16> = BTreeMap::new();
        let mut all = Vec::with_capacity(wanted.len());
        for Wanted { level, .. } in wanted {
            if let Some(place) = taken.get(level) {
                all.push(*place);
                continue;
            }
            let places = self.places.entry((slice, flow.table, *level)).or_default();
            let mut place = places.take(*level, flow.priority);
            if place.is_none() {
                places.spread();
                self.stale.insert((slice, flow.table));
                place = places.take(*level, flow.priority);
            }
            let Some(place) = place else {
                for level in taken.keys() {
                    if let Some(places) = self.places.get_mut(&(slice, flow.table, *level)) {
                        places.release(flow.priority);
                    }
                }
                return Err(Refusal::new(ErrorCode::FlowModFailedEperm, "the slice uses too many priorities in this table: use fewer"));
            };
            taken.insert(*level, place);
            all.push(place);
        }
        Ok((all, taken.into_keys().collect()))
    }
}

fn row(number: u64, entry: &Entry, wanted: Wanted, priority: u16) -> (Key, Row) {
    let flow = &entry.flow;
    let key = Key::of(flow.table, priority, &Match { fields: wanted.fields });
    let flags = if reports(flow) { flow.flags | FlowFlags::SEND_FLOW_REM } else { flow.flags };
    let row = Row {
        cookie: cookie(entry.slice, number),
        instructions: wanted.instructions,
        idle: flow.idle_timeout,
        hard: flow.hard_timeout,
        flags,
    };
    (key, row)
}

/// The rows that an entry needs, for the parts of its slice's space that it meets.
fn expand(bounds: &Bounds<'_>, flow: &FlowMod, meter: Option<MeterId>) -> Result<Vec<Wanted>, Refusal> {
    let header = Header::of(&flow.matching);
    let Some(header) = header else {
        return Err(Refusal::new(ErrorCode::BadMatchBadField, "the slicer cannot tell which packets fields of other classes match"));
    };
    let mut wanted: Vec<Wanted> = Vec::new();
    // Whether ports may come at which it matches.
    let mut waits = false;
    let mut seen: Vec<(Level, Option<PortNo>, Header)> = Vec::new();
    for own in bounds.space.iter().filter(|owned| owned.slice == bounds.slice && owned.region.permission.write) {
        let region = &own.region;
        let Some(both) = header.intersect(&region.header) else { continue };
        waits |= flow.matching.in_port().is_none();
        let ports: Vec<Option<PortNo>> = match (flow.matching.in_port(), &region.ports) {
            (Some(port), ports) if ports.contains(port) => vec![Some(port)],
            (Some(_), _) => Vec::new(),
            (None, Ports::All) => vec![None],
            // Where there is no port, nothing comes in. The entry is renewed when there is one.
            (None, Ports::Only(ports)) => ports.iter().map(|port| PortNo(*port)).filter(|port| bounds.has_port(*port)).map(Some).collect(),
        };
        for port in ports {
            let covers = |(level, other, header): &(Level, Option<PortNo>, Header)| {
                *level == region.level && (other.is_none() || *other == port) && both.is_within(header)
            };
            if seen.iter().any(covers) {
                continue;
            }
            seen.push((region.level, port, both.clone()));
            let packets = Packets {
                ports: port.map_or(Ports::All, |port| Ports::Only([port.0].into())),
                header: both.clone(),
                changed: Vec::new(),
                level: Some(region.level),
            };
            let mut instructions = bounds.instructions(flow.table, &packets, &flow.instructions)?;
            if let Some(meter) = meter.filter(|_| flow.table == TableId(0)) {
                instructions.insert(0, Instruction::Meter(meter));
            }
            let fields = port.map(Oxm::in_port).into_iter().chain(both.oxms()).collect();
            wanted.push(Wanted { level: region.level, fields, instructions });
            if wanted.len() > MAX_ROWS {
                let reason = format!("it meets more than {MAX_ROWS} parts of the slice's space: match fewer");
                return Err(Refusal::new(ErrorCode::FlowModFailedEperm, reason));
            }
        }
    }
    // Frames of LLDP come to their slice by the slicer's own entry, whatever its space is.
    if wanted.is_empty() && !is_discovery(flow) && !waits {
        return Err(Refusal::new(
            ErrorCode::FlowModFailedEperm,
            "what it matches is outside the slice's space: match packets and ports of the slice",
        ));
    }
    Ok(wanted)
}

/// Whether an entry only sends LLDP frames to the controller.
fn is_discovery(flow: &FlowMod) -> bool {
    let to_controller = |action: &Action| matches!(action, Action::Output { port: PortNo::CONTROLLER, .. });
    flow.matching.exact(Field::EthType) == Some(LLDP.into())
        && matches!(flow.instructions.as_slice(), [Instruction::ApplyActions(actions)] if actions.iter().all(to_controller))
}
