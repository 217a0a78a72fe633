//! What the remote controller ([`crate::datapath`]) decides and is told: its rules, which follow those of programs, the links, and the flows.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use braid_decide::policy::{AppRule, MAX_RULES, Objection, Policy};
use braid_model::{ByteCount, Direction, Family, LinkFacts, LinkIndex, Mac, Protocol, Rate, Role, Time, Traffic};

use super::{Core, living, rules};
use crate::steering::{FlowRow, Steering, SteeringError};

/// Most rules of the remote controller.
pub const MAX_CONTROLLER_RULES: usize = 32;
/// How the owner of these rules is called.
pub const REMOTE_CONTROLLER: &str = "remote controller";
/// Most notes that wait. What a flow moves meanwhile is in a later one.
const MAX_NOTES: usize = 4096;
/// What the names of its rules begin with. No name of a program's rule has a colon.
const PREFIX: &str = "controller:";

/// Number of a rule of the remote controller. It is not used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RuleId(pub u64);

impl RuleId {
    /// Whether a rule with this name is one of the remote controller.
    pub(super) fn is_name(name: &str) -> bool {
        name.starts_with(PREFIX)
    }
}

/// Its name.
impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.0)
    }
}

/// A rule of the remote controller.
#[derive(Debug, Clone, PartialEq)]
pub struct ControllerRule {
    /// Its number.
    pub id: RuleId,
    /// The rule.
    pub rule: AppRule,
}

/// The user's policy at one moment, for rules of the remote controller.
#[derive(Debug, Clone)]
pub struct ControllerJudge {
    policy: Policy,
    /// The links with the role backup.
    backups: Vec<LinkFacts>,
}

impl ControllerJudge {
    /// Why the policy forbids a rule.
    pub fn objection(&self, rule: &AppRule) -> Option<Objection> {
        self.policy.objection(rule, 0, &self.backups.iter().collect::<Vec<_>>())
    }
}

/// A link that the remote controller may choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkPort {
    /// Index of its device.
    pub index: LinkIndex,
    /// Name of its device.
    pub name: String,
    /// Hardware address of its device.
    pub mac: Option<Mac>,
    /// Whether it gets flows.
    pub up: bool,
    /// Its capacity towards this machine, if known.
    pub rate: Option<Rate>,
    /// What its device has moved, if known.
    pub traffic: Option<Traffic>,
}

/// What happened to a flow since the last note about it: it is new, or has moved something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowNote {
    /// Its transport protocol.
    pub protocol: Protocol,
    /// Local address and port; of a forwarded flow those of its client. The address is unspecified if unknown.
    pub local: (IpAddr, u16),
    /// Remote address and port.
    pub remote: (IpAddr, u16),
    /// The remote controller's rule that it matched; `None`: it matched no rule at all.
    pub rule: Option<RuleId>,
    /// Whether it is new.
    pub is_new: bool,
    /// Bytes in both directions since the last note.
    pub moved: ByteCount,
}

/// The flows that are noted.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// The living flows; `None`: no flow is noted.
    seen: Option<BTreeMap<living::Key, Seen>>,
    notes: Vec<FlowNote>,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    started: Time,
    rule: Option<RuleId>,
    /// Bytes up to the last note.
    moved: ByteCount,
}

impl<S: Steering> Core<S> {
    /// Makes these the rules of the remote controller, in the order in which they are tried. They follow those of programs. What the kernel does not take is
    /// tried again.
    pub fn set_controller_rules(&mut self, now: Time, rules: Vec<ControllerRule>) -> Result<(), SteeringError> {
        if !self.programs.set_controllers(now, rules) {
            return Ok(());
        }
        // They name no executables, and have no preferences of rates.
        self.set_in_force(now);
        self.actions.rules_changed = true;
        self.update_params(now)
    }

    /// The most rules that the remote controller may have beside the present exclusions, entries and rules of programs.
    pub fn controller_room(&self) -> usize {
        let others = rules::exclusions(&self.config.policy) + self.config.policy.apps.len() + self.programs.places_of_programs();
        MAX_RULES.saturating_sub(others).min(MAX_CONTROLLER_RULES)
    }

    /// What judges rules of the remote controller by the present policy.
    pub fn controller_judge(&self, now: Time) -> ControllerJudge {
        ControllerJudge { policy: self.in_force_without_programs(now), backups: self.backups().into_iter().cloned().collect() }
    }

    /// The links that the remote controller may choose, in the order of their devices' indexes.
    pub fn link_ports(&self, now: Time) -> Vec<LinkPort> {
        let links = self.links.values().filter(|link| link.refused.is_none() && link.rule.role != Role::Excluded);
        let port = |link: &crate::links::Link| LinkPort {
            index: link.facts.index,
            name: link.facts.name.clone(),
            mac: link.facts.mac,
            up: Family::ALL.iter().any(|family| link.usable(*family)),
            rate: link.known_capacity(Direction::Down, now),
            traffic: link.device.last().map(|(_, counters)| counters),
        };
        links.map(port).collect()
    }

    /// Begins or ends to note flows. Those that were listed at the last poll are not new.
    pub fn watch_flows(&mut self, watch: bool) {
        self.watch = Watch::default();
        if watch {
            let seen = |living: &living::Living| (living.key(), Seen { moved: moved(&living.row), ..self.first_seen(&living.row) });
            self.watch.seen = Some(self.flows.iter().map(seen).collect());
        }
    }

    /// The notes since the last call.
    pub fn take_flow_notes(&mut self) -> Vec<FlowNote> {
        std::mem::take(&mut self.watch.notes)
    }

    /// Notes the flows of a poll.
    pub(super) fn note_flows(&mut self) {
        let Some(mut before) = self.watch.seen.take() else { return };
        let mut seen = BTreeMap::new();
        for living in self.flows.clone().iter() {
            let known = before.remove(&living.key());
            seen.insert(living.key(), self.note(&living.row, known));
        }
        self.watch.seen = Some(seen);
    }

    /// Notes a flow that has ended.
    pub(super) fn note_end(&mut self, row: &FlowRow) {
        let Some(seen) = &mut self.watch.seen else { return };
        let known = seen.remove(&living::key(row));
        self.note(row, known);
    }

    fn note(&mut self, row: &FlowRow, known: Option<Seen>) -> Seen {
        let known = known.filter(|known| known.started == row.started);
        let seen = known.unwrap_or_else(|| self.first_seen(row));
        let more = moved(row).saturating_sub(seen.moved);
        // Others decide about flows that match a rule of theirs, and the other host about what it has opened.
        let counts = !row.accepted && (seen.rule.is_some() || row.rule.is_none());
        let is_news = known.is_none() || seen.rule.is_some() && more > ByteCount::ZERO;
        if !counts || !is_news || self.watch.notes.len() >= MAX_NOTES {
            return seen;
        }
        self.watch.notes.push(FlowNote {
            protocol: row.protocol,
            local: row.local,
            remote: row.remote,
            rule: seen.rule,
            is_new: known.is_none(),
            moved: more,
        });
        Seen { moved: moved(row), ..seen }
    }

    /// A flow that was not seen before. Its rule may have another place later.
    fn first_seen(&self, row: &FlowRow) -> Seen {
        let place = self.rule_at(row.started, row.rule).and_then(|(place, _)| self.program_place(row.started, place));
        Seen { started: row.started, rule: place.and_then(|place| self.programs.controllers(place)), moved: ByteCount::ZERO }
    }
}

fn moved(row: &FlowRow) -> ByteCount {
    row.rx + row.tx
}
