//! The flow table: the controller's entries, and the rules that they are in the core.

use std::time::Duration;

use braid_decide::policy::{AppRule, LinkSelector, Objection, Pattern};
use braid_model::{ByteCount, Time};
use braid_openflow::ErrorCode;
use braid_openflow::action::Instruction;
use braid_openflow::flags::FlowFlags;
use braid_openflow::flow::{FlowCommand, FlowMod, FlowRemoved, RemovedReason};
use braid_openflow::ids::{Cookie, GroupId, PortNo, Seconds, TableId};
use braid_openflow::matching::Match;
use braid_openflow::multipart::{FlowQuery, FlowStats, Traffic};
use braid_openflow::oxm::Oxm;

use super::meaning::{Conditions, Target};
use super::ports::Ports;
use crate::core::{ControllerRule, FlowNote, RuleId};

/// The only table.
pub(super) const TABLE: TableId = TableId(0);

/// What bounds the entries.
pub(super) struct Bounds<'a> {
    pub(super) ports: &'a Ports,
    /// The most rules.
    pub(super) room: usize,
    /// Why the user's policy forbids a rule.
    pub(super) objection: &'a dyn Fn(&AppRule) -> Option<Objection>,
}

/// An entry.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    priority: u16,
    /// In canonical form.
    matching: Match,
    conditions: Conditions,
    instructions: Vec<Instruction>,
    target: Target,
    cookie: Cookie,
    idle: Seconds,
    hard: Seconds,
    flags: FlowFlags,
    /// Numbers of its rules.
    rules: Vec<RuleId>,
    created: Time,
    /// When its flows moved something last.
    used: Time,
    bytes: ByteCount,
}

/// The entries, those of the highest priority first. Among equals the oldest comes first.
#[derive(Debug, Default)]
pub(super) struct FlowTable {
    entries: Vec<Entry>,
    last: u64,
}

impl Entry {
    /// Whether it is for the flows that no other entry matches.
    fn is_miss(&self) -> bool {
        self.priority == 0 && self.matching.fields.is_empty()
    }

    fn is(&self, priority: u16, matching: &Match) -> bool {
        self.priority == priority && self.matching == *matching
    }

    /// Its rules. Flows without a rule are those of a miss that leaves them to the local policy.
    fn app_rules(&self, ports: &Ports) -> Vec<AppRule> {
        let prefer: Vec<LinkSelector> = match self.target {
            Target::Link(port) => ports.name(port).map(|name| LinkSelector::Name(Pattern::new(name))).into_iter().collect(),
            Target::Policy | Target::Controller if self.is_miss() => return Vec::new(),
            Target::Policy | Target::Controller => Vec::new(),
        };
        let rule = |matcher| AppRule { matcher, prefer: prefer.clone(), ..AppRule::default() };
        self.conditions.matchers().into_iter().map(rule).collect()
    }

    fn due(&self) -> Option<(Time, RemovedReason)> {
        let at = |from: Time, span: Seconds, reason| (span.0 > 0).then(|| (from + Duration::from_secs(span.0.into()), reason));
        let both = [at(self.created, self.hard, RemovedReason::HardTimeout), at(self.used, self.idle, RemovedReason::IdleTimeout)];
        both.into_iter().flatten().min()
    }

    fn removed(&self, now: Time, reason: RemovedReason) -> Option<FlowRemoved> {
        self.flags.contains(FlowFlags::SEND_FLOW_REM).then(|| FlowRemoved {
            cookie: self.cookie,
            priority: self.priority,
            reason,
            table: TABLE,
            duration: Some(now.since(self.created)),
            idle_timeout: self.idle,
            hard_timeout: self.hard,
            packets: None,
            bytes: Some(self.bytes),
            matching: self.matching.clone(),
        })
    }

    /// If the controller is told about its flows: its mark, and whether it is the entry for misses.
    pub(super) fn report(&self) -> Option<(Cookie, bool)> {
        (self.target == Target::Controller).then_some((self.cookie, self.is_miss()))
    }
}

impl FlowTable {
    /// Changes the table by a flow-mod, or not at all. Returns what is to be reported as removed.
    pub(super) fn change(&mut self, now: Time, flow: &FlowMod, bounds: &Bounds<'_>) -> Result<Vec<FlowRemoved>, ErrorCode> {
        flow.matching.check()?;
        let deletes = matches!(flow.command, FlowCommand::Delete | FlowCommand::DeleteStrict);
        if flow.table != TABLE && !(deletes && flow.table == TableId::ALL) {
            return Err(ErrorCode::FlowModFailedBadTableId);
        }
        if deletes {
            return Ok(self.delete(now, flow));
        }
        let known = FlowFlags::SEND_FLOW_REM
            | FlowFlags::CHECK_OVERLAP
            | FlowFlags::RESET_COUNTS
            | FlowFlags::NO_PKT_COUNTS
            | FlowFlags::NO_BYT_COUNTS;
        if !known.contains(flow.flags) {
            return Err(ErrorCode::FlowModFailedBadFlags);
        }
        // This device keeps no packets.
        if flow.buffer.is_some() {
            return Err(ErrorCode::BadRequestBufferUnknown);
        }
        let target = Target::of(&flow.instructions, |port| bounds.ports.name(port).is_some())?;
        match flow.command {
            FlowCommand::Add => self.add(now, flow, target, bounds)?,
            _ => self.modify(flow, target, bounds)?,
        }
        Ok(Vec::new())
    }

    fn add(&mut self, now: Time, flow: &FlowMod, target: Target, bounds: &Bounds<'_>) -> Result<(), ErrorCode> {
        let (matching, conditions) = (flow.matching.canonical(), Conditions::of(&flow.matching)?);
        let overlaps = |entry: &Entry| entry.priority == flow.priority && entry.conditions.overlap(&conditions);
        if flow.flags.contains(FlowFlags::CHECK_OVERLAP) && self.entries.iter().any(overlaps) {
            return Err(ErrorCode::FlowModFailedOverlap);
        }
        let mut entry = Entry {
            priority: flow.priority,
            matching,
            conditions,
            instructions: flow.instructions.clone(),
            target,
            cookie: flow.cookie,
            idle: flow.idle_timeout,
            hard: flow.hard_timeout,
            flags: flow.flags,
            rules: Vec::new(),
            created: now,
            used: now,
            bytes: ByteCount::ZERO,
        };
        let known = self.entries.iter().position(|other| other.is(entry.priority, &entry.matching));
        if let Some(old) = known.and_then(|place| self.entries.get(place)) {
            // Its flows go on under the new entry.
            entry.rules.clone_from(&old.rules);
            if !flow.flags.contains(FlowFlags::RESET_COUNTS) {
                entry.bytes = old.bytes;
            }
        }
        let count = permitted(&entry, bounds)?;
        let others = self.entries.iter().enumerate().filter(|(place, _)| Some(*place) != known);
        if others.map(|(_, other)| other.rules.len()).sum::<usize>() + count > bounds.room {
            return Err(ErrorCode::FlowModFailedTableFull);
        }
        number(&mut self.last, &mut entry, count);
        match known.and_then(|place| self.entries.get_mut(place)) {
            Some(old) => *old = entry,
            None => {
                let place = self.entries.partition_point(|other| other.priority >= entry.priority);
                self.entries.insert(place, entry);
            }
        }
        Ok(())
    }

    fn modify(&mut self, flow: &FlowMod, target: Target, bounds: &Bounds<'_>) -> Result<(), ErrorCode> {
        let (mut entries, mut last) = (self.entries.clone(), self.last);
        let matching = flow.matching.canonical();
        for entry in entries.iter_mut().filter(|entry| is_meant(flow, &matching, entry)) {
            (entry.target, entry.instructions) = (target, flow.instructions.clone());
            if flow.flags.contains(FlowFlags::RESET_COUNTS) {
                entry.bytes = ByteCount::ZERO;
            }
            let count = permitted(entry, bounds)?;
            number(&mut last, entry, count);
        }
        if entries.iter().map(|entry| entry.rules.len()).sum::<usize>() > bounds.room {
            return Err(ErrorCode::FlowModFailedTableFull);
        }
        (self.entries, self.last) = (entries, last);
        Ok(())
    }

    fn delete(&mut self, now: Time, flow: &FlowMod) -> Vec<FlowRemoved> {
        let matching = flow.matching.canonical();
        let sends_there = |entry: &Entry| sends(entry, flow.out_port, flow.out_group);
        let gone = self.entries.extract_if(.., |entry| is_meant(flow, &matching, entry) && sends_there(entry));
        gone.filter_map(|entry| entry.removed(now, RemovedReason::Delete)).collect()
    }

    /// Removes the entries whose time is over. Returns whether there were any, and what is to be reported.
    pub(super) fn expire(&mut self, now: Time) -> (bool, Vec<FlowRemoved>) {
        let before = self.entries.len();
        let due = |entry: &Entry| entry.due().filter(|(at, _)| *at <= now).map(|(_, reason)| reason);
        let gone = self.entries.extract_if(.., |entry| due(entry).is_some());
        let removed = gone.filter_map(|entry| entry.removed(now, due(&entry)?)).collect();
        (self.entries.len() < before, removed)
    }

    /// When the next entry's time is over.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.entries.iter().filter_map(|entry| Some(entry.due()?.0)).min()
    }

    /// Counts what a flow has moved. Returns the entry that it matched.
    pub(super) fn count(&mut self, now: Time, note: &FlowNote) -> Option<&Entry> {
        let is_meant = |entry: &&mut Entry| match note.rule {
            Some(rule) => entry.rules.contains(&rule),
            None => entry.rules.is_empty() && entry.is_miss(),
        };
        let entry = self.entries.iter_mut().find(is_meant)?;
        entry.bytes += note.moved;
        entry.used = now;
        Some(entry)
    }

    /// The rules in the order of their entries.
    pub(super) fn rules(&self, ports: &Ports) -> Vec<ControllerRule> {
        let of = |entry: &Entry| -> Vec<ControllerRule> {
            entry.rules.iter().zip(entry.app_rules(ports)).map(|(id, rule)| ControllerRule { id: *id, rule }).collect()
        };
        self.entries.iter().flat_map(of).collect()
    }

    /// The entries that a request asks for.
    pub(super) fn stats(&self, now: Time, query: &FlowQuery) -> Vec<FlowStats> {
        let matching = query.matching.canonical();
        let is_meant = |entry: &&Entry| {
            (query.table == TABLE || query.table == TableId::ALL)
                && covers(&matching, &entry.matching)
                && has_cookie(entry, query.cookie, query.cookie_mask)
                && sends(entry, query.out_port, query.out_group)
        };
        let stats = |entry: &Entry| FlowStats {
            table: TABLE,
            duration: Some(now.since(entry.created)),
            priority: entry.priority,
            idle_timeout: entry.idle,
            hard_timeout: entry.hard,
            flags: entry.flags,
            cookie: entry.cookie,
            traffic: Traffic { packets: None, bytes: Some(entry.bytes) },
            matching: entry.matching.clone(),
            instructions: entry.instructions.clone(),
        };
        self.entries.iter().filter(is_meant).map(stats).collect()
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Removes all entries. Numbers of rules are not used again.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}

/// How many rules an entry takes, if the user's policy permits them. Where the policy decides about some of its flows alone, it comes first.
fn permitted(entry: &Entry, bounds: &Bounds<'_>) -> Result<usize, ErrorCode> {
    let rules = entry.app_rules(bounds.ports);
    let objections: Vec<Option<Objection>> = rules.iter().map(bounds.objection).collect();
    let decides = |objection: &Option<Objection>| matches!(objection, Some(Objection::Shadowed(_) | Objection::Excluded));
    match objections.iter().find(|objection| objection.is_some() && !decides(objection)) {
        Some(Some(Objection::NoRoom)) => Err(ErrorCode::FlowModFailedTableFull),
        Some(_) => Err(ErrorCode::FlowModFailedEperm),
        None if !objections.is_empty() && objections.iter().all(decides) => Err(ErrorCode::FlowModFailedEperm),
        None => Ok(rules.len()),
    }
}

/// Gives an entry so many rules.
fn number(last: &mut u64, entry: &mut Entry, count: usize) {
    entry.rules.truncate(count);
    while entry.rules.len() < count {
        *last += 1;
        entry.rules.push(RuleId(*last));
    }
}

/// Whether a flow-mod is about an entry. Source: OpenFlow 1.3.5 section 6.4.
fn is_meant(flow: &FlowMod, matching: &Match, entry: &Entry) -> bool {
    let same = match flow.command {
        FlowCommand::Modify | FlowCommand::Delete => covers(matching, &entry.matching),
        FlowCommand::Add | FlowCommand::ModifyStrict | FlowCommand::DeleteStrict => entry.is(flow.priority, matching),
    };
    same && has_cookie(entry, flow.cookie, flow.cookie_mask)
}

fn has_cookie(entry: &Entry, cookie: Cookie, mask: Cookie) -> bool {
    (entry.cookie.0 ^ cookie.0) & mask.0 == 0
}

fn sends(entry: &Entry, port: PortNo, group: GroupId) -> bool {
    (port == PortNo::ANY || entry.target.port() == port) && group == GroupId::ANY
}

/// Whether all packets of the second match have the fields of the first one. Both are in canonical form.
fn covers(wide: &Match, narrow: &Match) -> bool {
    wide.fields.iter().all(|oxm| {
        let Oxm::Basic { field, value, mask } = oxm else { return false };
        let wanted = mask.unwrap_or(field.full_mask());
        narrow.get(*field).is_some_and(|(have, known)| wanted & !known == 0 && have & wanted == *value)
    })
}
