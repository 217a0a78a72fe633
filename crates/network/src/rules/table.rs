//! What a switch has in its tables, and the commands that change it.

use std::collections::{BTreeMap, BTreeSet};

use braid_model::Direction;
use braid_openflow::Message;
use braid_openflow::Version;
use braid_openflow::action::{Action, Instruction};
use braid_openflow::flags::MeterFlags;
use braid_openflow::flow::{FlowCommand, FlowMod};
use braid_openflow::group::{Band, BandKind, Bucket, GroupKind, GroupMod, MeterMod, ModCommand};
use braid_openflow::ids::{GroupId, Kbps, MeterId, PortNo, TableId};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{FlowStats, GroupDescription, MeterConfig};

use super::{Content, Key, Limit, Owner, Style};

/// First group and meter of this controller. Some switches have few meters, with small numbers.
const FIRST_GROUP: u32 = 0x4252_0000;
const FIRST_METER: u32 = 1000;
/// Numbers of each that are ours.
const NUMBERS: u32 = 0x8000;
/// First meter that entries share: there are two for each port, so that a controller that was restarted finds them.
const FIRST_SHARED: u32 = FIRST_METER + NUMBERS;
/// Burst of a meter, as time at its rate. TCP gets its rate only with 0.4 s or more.
const BURST_TENTHS: u32 = 5;

/// An entry of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) owner: Owner,
    pub(crate) content: Content,
    group: Option<GroupId>,
    meter: Option<MeterId>,
    /// Whether it does something that this controller does not ask for.
    foreign: bool,
    /// Packets when it was last read.
    packets: u64,
}

/// A message for the switch, and what it changes.
#[derive(Debug, Clone)]
pub(crate) struct Command {
    pub(crate) message: Message,
    pub(crate) effect: Effect,
}

/// What to restore if the switch refuses a command.
#[derive(Debug, Clone)]
pub(crate) enum Effect {
    Flow {
        owner: Owner,
        key: Key,
        before: Option<Entry>,
    },
    Group,
    Meter,
    /// What remains on the switch does no harm.
    Removal,
}

/// What a switch answered about its tables.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    pub(crate) flows: Vec<FlowStats>,
    pub(crate) groups: Vec<GroupDescription>,
    pub(crate) meters: Vec<MeterConfig>,
}

/// The entries of this controller in a switch, with all commands done that were sent.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) style: Style,
    entries: BTreeMap<Key, Entry>,
    owned: BTreeMap<Owner, BTreeSet<Key>>,
    groups: BTreeMap<GroupId, BTreeSet<PortNo>>,
    meters: BTreeMap<MeterId, Kbps>,
    /// Numbers that were in use since the last reading. The switch gets removals last, so none of these is given away before they are done.
    retired_groups: BTreeSet<GroupId>,
    retired_meters: BTreeSet<MeterId>,
}

impl Table {
    pub(crate) fn new(style: Style) -> Self {
        let (entries, owned, groups, meters, retired_groups, retired_meters) = Default::default();
        Self { style, entries, owned, groups, meters, retired_groups, retired_meters }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn owners(&self) -> impl Iterator<Item = Owner> {
        self.owned.keys().copied()
    }

    /// The entries of an owner.
    pub(crate) fn of(&self, owner: Owner) -> impl Iterator<Item = (&Key, &Entry)> {
        self.owned.get(&owner).into_iter().flatten().filter_map(|key| Some((key, self.entries.get(key)?)))
    }

    /// Whether an entry is there, and does only this.
    pub(crate) fn has(&self, owner: Owner, key: &Key, content: &Content) -> bool {
        self.entries.get(key).is_some_and(|entry| entry.owner == owner && entry.content == *content && !entry.foreign)
    }

    /// Whether these are the entries of an owner, and do only this.
    pub(crate) fn has_only(&self, owner: Owner, wanted: &[(Key, Content)]) -> bool {
        let is_wanted =
            |(key, entry): (&Key, &Entry)| !entry.foreign && wanted.iter().any(|(of, content)| of == key && *content == entry.content);
        self.of(owner).count() == wanted.len() && self.of(owner).all(is_wanted)
    }

    /// Owners of the entries that send packets out of a port.
    pub(crate) fn users(&self, port: PortNo) -> impl Iterator<Item = Owner> {
        self.entries.values().filter(move |entry| entry.content.outputs.contains(&port)).map(|entry| entry.owner)
    }

    /// Replaces all by what the switch answered. Returns commands that remove groups and meters of this controller that no entry uses, the owners whose
    /// entries have counted packets since the last reading, and those whose entries are not what was written.
    pub(crate) fn read(&mut self, reading: &Reading) -> (Vec<Command>, BTreeSet<Owner>, BTreeSet<Owner>) {
        let former = std::mem::take(&mut self.entries);
        self.owned.clear();
        self.retired_groups.clear();
        self.retired_meters.clear();
        let ports = |buckets: &[Bucket]| -> Option<BTreeSet<PortNo>> {
            let port = |bucket: &Bucket| match bucket.actions.as_slice() {
                [Action::Output { port, .. }] => Some(*port),
                _ => None,
            };
            buckets.iter().map(port).collect()
        };
        let ours = |number: u32, first: u32| (first..first + NUMBERS).contains(&number);
        let groups = reading.groups.iter().filter(|group| ours(group.group.0, FIRST_GROUP));
        self.groups = groups.map(|group| (group.group, ports(&group.buckets).unwrap_or_default())).collect();
        let rate = |meter: &MeterConfig| match meter.bands.as_slice() {
            [Band { rate, kind: BandKind::Drop, .. }] => Kbps(*rate),
            _ => Kbps(0),
        };
        let meters = reading.meters.iter().filter(|meter| ours(meter.meter.0, FIRST_METER) || is_shared(meter.meter));
        self.meters = meters.map(|meter| (meter.meter, rate(meter))).collect();
        let (mut lively, mut changed) = (BTreeSet::new(), BTreeSet::new());
        for flow in &reading.flows {
            let Some((owner, here)) = Owner::of(flow.cookie) else { continue };
            let key = Key { table: flow.table, priority: flow.priority, fields: flow.matching.canonical().fields };
            let mut entry = self.understand(owner, &flow.instructions);
            entry.content.here = here;
            entry.packets = flow.traffic.packets.unwrap_or_default();
            if former.get(&key).is_none_or(|former| former.packets < entry.packets) && entry.packets > 0 {
                lively.insert(owner);
            }
            let same = |former: &Entry| former.owner == owner && former.content == entry.content && !entry.foreign;
            if !former.get(&key).is_some_and(same) {
                changed.insert(owner);
            }
            self.owned.entry(owner).or_default().insert(key.clone());
            self.entries.insert(key, entry);
        }
        changed.extend(former.iter().filter(|(key, _)| !self.entries.contains_key(key)).map(|(_, entry)| entry.owner));
        let (used_groups, used_meters): (BTreeSet<_>, BTreeSet<_>) = (
            self.entries.values().filter_map(|entry| entry.group).collect(),
            self.entries.values().filter_map(|entry| entry.meter).collect(),
        );
        let groups: Vec<GroupId> = self.groups.keys().filter(|group| !used_groups.contains(group)).copied().collect();
        let meters: Vec<MeterId> = self.meters.keys().filter(|meter| !used_meters.contains(meter)).copied().collect();
        let mut commands: Vec<Command> = groups.into_iter().map(|group| self.remove_group(group)).collect();
        commands.extend(meters.into_iter().map(|meter| self.remove_meter(meter)));
        (commands, lively, changed)
    }

    /// What the instructions of an entry mean.
    fn understand(&self, owner: Owner, instructions: &[Instruction]) -> Entry {
        let mut entry = Entry { owner, content: Content::default(), group: None, meter: None, foreign: false, packets: 0 };
        for instruction in instructions {
            match instruction {
                Instruction::Meter(meter) if self.meters.contains_key(meter) => {
                    entry.meter = Some(*meter);
                    let shared = Some(*meter).filter(|meter| is_shared(*meter));
                    entry.content.meter = self.meters.get(meter).map(|rate| Limit { rate: *rate, shared });
                }
                Instruction::GotoTable(TableId(1)) => entry.content.next = true,
                Instruction::ApplyActions(actions) => {
                    for action in actions {
                        match action {
                            Action::Output { port: PortNo::CONTROLLER, .. } => entry.content.controller = true,
                            Action::Output { port, .. } => {
                                entry.content.outputs.insert(*port);
                            }
                            Action::Group(group) if self.groups.contains_key(group) => {
                                entry.group = Some(*group);
                                entry.content.outputs.extend(self.groups.get(group).into_iter().flatten());
                            }
                            _ => entry.foreign = true,
                        }
                    }
                }
                _ => entry.foreign = true,
            }
        }
        entry
    }

    /// The commands that make an entry do `content`, or remove it.
    pub(crate) fn change(&mut self, owner: Owner, key: &Key, content: Option<&Content>) -> Vec<Command> {
        match (self.entries.get(key).cloned(), content) {
            (None, None) => Vec::new(),
            (Some(before), None) => self.remove(key, before),
            (Some(before), Some(content)) if before.owner == owner && before.content == *content && !before.foreign => Vec::new(),
            (before, Some(content)) => self.write(owner, key, before, content),
        }
    }

    fn remove(&mut self, key: &Key, before: Entry) -> Vec<Command> {
        self.entries.remove(key);
        self.disown(before.owner, key);
        let message = FlowMod { command: FlowCommand::DeleteStrict, ..flow_mod(key) };
        let (group, meter, owner) = (before.group, before.meter, before.owner);
        let effect = Effect::Flow { owner, key: key.clone(), before: Some(before) };
        let mut commands = vec![Command { message: Message::FlowMod(message), effect }];
        commands.extend(group.map(|group| self.remove_group(group)));
        // A shared meter is removed by the next reading: others may begin to use it before.
        commands.extend(meter.filter(|meter| !is_shared(*meter)).map(|meter| self.remove_meter(meter)));
        commands
    }

    fn write(&mut self, owner: Owner, key: &Key, before: Option<Entry>, content: &Content) -> Vec<Command> {
        let mut commands = Vec::new();
        let (old_group, old_meter) = before.as_ref().map_or((None, None), |before| (before.group, before.meter));
        let group = (self.style.groups && content.outputs.len() > 1).then(|| self.write_group(old_group, content, &mut commands));
        let group = group.flatten();
        let meter = content.meter.and_then(|limit| self.write_meter(old_meter, limit, &mut commands));
        let entry = Entry { owner, content: content.clone(), group, meter, foreign: false, packets: 0 };
        // A command that modifies keeps the counters, but not the cookie.
        let known = before.as_ref().filter(|before| before.owner == owner && before.content.here == content.here);
        let instructions = self.instructions(&entry);
        if known.is_none_or(|known| known.foreign || self.instructions(known) != instructions) {
            let command = if known.is_some() { FlowCommand::ModifyStrict } else { FlowCommand::Add };
            let message = FlowMod { cookie: owner.cookie(content.here), command, instructions, ..flow_mod(key) };
            let effect = Effect::Flow { owner, key: key.clone(), before: before.clone() };
            commands.push(Command { message: Message::FlowMod(message), effect });
        }
        if let Some(before) = &before {
            self.disown(before.owner, key);
        }
        self.owned.entry(owner).or_default().insert(key.clone());
        let packets = before.map_or(0, |before| before.packets);
        self.entries.insert(key.clone(), Entry { packets, ..entry });
        commands.extend(old_group.filter(|old| group != Some(*old)).map(|old| self.remove_group(old)));
        commands.extend(old_meter.filter(|old| meter != Some(*old) && !is_shared(*old)).map(|old| self.remove_meter(old)));
        commands
    }

    fn write_group(&mut self, old: Option<GroupId>, content: &Content, commands: &mut Vec<Command>) -> Option<GroupId> {
        let free = || {
            (FIRST_GROUP..FIRST_GROUP + NUMBERS)
                .map(GroupId)
                .find(|group| !self.groups.contains_key(group) && !self.retired_groups.contains(group))
        };
        let group = old.or_else(free)?;
        if self.groups.get(&group) != Some(&content.outputs) {
            let bucket = |port: &PortNo| Bucket {
                weight: 0,
                watch_port: PortNo::ANY,
                watch_group: GroupId::ANY,
                actions: vec![Action::output(*port)],
            };
            let command = if old.is_some() { ModCommand::Modify } else { ModCommand::Add };
            let buckets = content.outputs.iter().map(bucket).collect();
            let message = Message::GroupMod(GroupMod { command, kind: GroupKind::All, group, buckets });
            commands.push(Command { message, effect: Effect::Group });
            self.groups.insert(group, content.outputs.clone());
        }
        Some(group)
    }

    fn write_meter(&mut self, old: Option<MeterId>, limit: Limit, commands: &mut Vec<Command>) -> Option<MeterId> {
        let Limit { rate, shared } = limit;
        let free = || {
            (FIRST_METER..(FIRST_METER + NUMBERS).min(self.style.most_meters.saturating_add(1)))
                .map(MeterId)
                .find(|meter| !self.meters.contains_key(meter) && !self.retired_meters.contains(meter))
        };
        let meter = shared.or(old.filter(|old| !is_shared(*old))).or_else(free)?;
        // One more would be refused, and a switch that refuses a meter counts as one without any.
        if !self.meters.contains_key(&meter) && self.meters.len() + self.retired_meters.len() >= self.style.most_meters as usize {
            return None;
        }
        if self.meters.get(&meter) != Some(&rate) {
            let command = if self.meters.contains_key(&meter) { ModCommand::Modify } else { ModCommand::Add };
            let burst = (rate.0 / 10).saturating_mul(BURST_TENTHS).max(1);
            let bands = vec![Band { rate: rate.0, burst, kind: BandKind::Drop }];
            let message = MeterMod { command, flags: MeterFlags::KBPS | MeterFlags::BURST, meter, bands };
            commands.push(Command { message: Message::MeterMod(message), effect: Effect::Meter });
            self.meters.insert(meter, rate);
        }
        Some(meter)
    }

    /// The meter of an entry.
    pub(crate) fn meter_of(&self, key: &Key) -> Option<MeterId> {
        self.entries.get(key)?.meter
    }

    fn remove_group(&mut self, group: GroupId) -> Command {
        self.groups.remove(&group);
        self.retired_groups.insert(group);
        let message = GroupMod { command: ModCommand::Delete, kind: GroupKind::All, group, buckets: Vec::new() };
        Command { message: Message::GroupMod(message), effect: Effect::Removal }
    }

    fn remove_meter(&mut self, meter: MeterId) -> Command {
        self.meters.remove(&meter);
        self.retired_meters.insert(meter);
        let message = MeterMod { command: ModCommand::Delete, flags: MeterFlags::KBPS, meter, bands: Vec::new() };
        Command { message: Message::MeterMod(message), effect: Effect::Removal }
    }

    /// The switch refused a command.
    pub(crate) fn undo(&mut self, effect: &Effect) {
        match effect {
            Effect::Flow { owner, key, before } => {
                self.entries.remove(key);
                self.disown(*owner, key);
                if let Some(before) = before {
                    self.owned.entry(before.owner).or_default().insert(key.clone());
                    self.entries.insert(key.clone(), before.clone());
                }
            }
            // It has none of these, or too few: go without.
            Effect::Group => self.style.groups = false,
            Effect::Meter => self.style.meters = false,
            Effect::Removal => {}
        }
    }

    fn disown(&mut self, owner: Owner, key: &Key) {
        if let Some(keys) = self.owned.get_mut(&owner) {
            keys.remove(key);
            if keys.is_empty() {
                self.owned.remove(&owner);
            }
        }
    }

    fn instructions(&self, entry: &Entry) -> Vec<Instruction> {
        let to_controller = entry.content.controller.then(|| Action::output(PortNo::CONTROLLER));
        let outputs = entry.content.outputs.iter().filter(|_| entry.group.is_none()).map(|port| Action::output(*port));
        let actions: Vec<Action> = to_controller.into_iter().chain(entry.group.map(Action::Group)).chain(outputs).collect();
        let apply = (!actions.is_empty()).then_some(Instruction::ApplyActions(actions));
        if self.style.version == Version::V1_0 {
            return apply.into_iter().collect();
        }
        let next = entry.content.next.then_some(Instruction::GotoTable(TableId(1)));
        entry.meter.map(Instruction::Meter).into_iter().chain(apply).chain(next).collect()
    }
}

/// The meter that packets to hosts at a port share (`Down`), or those from them. None has a number for a port beyond the first 16,384.
pub(crate) fn shared_meter(port: PortNo, direction: Direction) -> Option<MeterId> {
    let number = port.0.checked_mul(2)?.checked_add((direction == Direction::Up).into())?;
    (number < NUMBERS).then_some(MeterId(FIRST_SHARED + number))
}

fn is_shared(meter: MeterId) -> bool {
    (FIRST_SHARED..FIRST_SHARED + NUMBERS).contains(&meter.0)
}

fn flow_mod(key: &Key) -> FlowMod {
    FlowMod { table: key.table, priority: key.priority, matching: Match::new(key.fields.clone()), ..FlowMod::default() }
}
