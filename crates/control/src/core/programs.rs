//! Rules that programs add over the API for a limited time, and the rates that they reserve (Yap's thesis, 2.3: the control plane lets applications state
//! their intents).
//!
//! They follow the `[[app]]` entries in the list of rules, so that there is one matcher and one decision, and what the user has written comes first. Each has
//! a place of its own, so that the numbers of the other rules stay valid while programs come and go. A reservation is placed on one link, which its rule then
//! prefers, and the other flows of that link share what is left ([`super::shares`]).

use std::time::Duration;

use braid_api::{Accepted, Reservation, Reserve};
use braid_decide::policy::{AppRule, Carry, LinkSelector, Objection, Pattern, Portion};
use braid_decide::shaping::Reserved;
use braid_model::{Direction, Family, LinkFacts, LinkIndex, PerDirection, Rate, Role, Time};

use super::Core;
use super::datapath::{ControllerRule, REMOTE_CONTROLLER, RuleId};
use super::views::matcher_text;
use crate::RequestError;
use crate::links::Link;
use crate::steering::{Steering, SteeringError};

/// Maximum number of rules of all programs.
pub const MAX_PROGRAM_RULES: usize = 32;
/// Maximum number of rules of one program.
pub const MAX_RULES_OF_PROGRAM: usize = 8;
/// Bounds of a lease.
const LEASES: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
/// Longest name of a rule.
const MAX_NAME: usize = 32;
/// Share of a link's capacity that programs may reserve. One that is reserved already stays until it exceeds the capacity, because estimates change.
const RESERVABLE: f64 = 0.8;
/// The lowest rate that can be reserved; lower ones cannot be kept (`guarantee` has the same bound).
const MIN_RESERVED: Rate = Rate::from_bps(48_000);

/// A process that adds rules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Program {
    /// Its id.
    pub process: u32,
    /// When it started, which tells it from an earlier process with the same id.
    pub started: u64,
    /// Its name.
    pub name: String,
}

/// A program's request to add a rule.
#[derive(Debug, Clone)]
pub struct NewRule<'a> {
    /// Name of the rule.
    pub name: &'a str,
    /// The program with which the rule ends; `None`: only its lease ends it.
    pub program: Option<Program>,
    /// The rule.
    pub rule: AppRule,
    /// What to keep free for its flows.
    pub reserve: Option<&'a Reserve>,
    /// For how long.
    pub lease: Duration,
}

/// The programs' rules, and those of the remote controller.
#[derive(Debug, Clone, Default)]
pub(super) struct ProgramRules {
    /// By their places after the `[[app]]` entries. Those of the remote controller are together at the end.
    places: Vec<Option<ProgramRule>>,
}

#[derive(Debug, Clone)]
struct ProgramRule {
    name: String,
    program: Option<Program>,
    /// The remote controller's number of it, if it is a rule of that.
    controllers: Option<RuleId>,
    /// The rule that was asked for.
    asked: AppRule,
    /// What flows are matched to: without conditions if it does not apply now.
    applied: AppRule,
    objection: Option<Objection>,
    reserved: Option<Placement>,
    /// Flows that had started by then have not matched it.
    since: Time,
    until: Time,
}

/// A reservation, and the link that keeps it.
#[derive(Debug, Clone, PartialEq)]
struct Placement {
    rates: PerDirection<Option<Rate>>,
    /// The only link that may keep it, if one is named.
    wanted: Option<String>,
    link: Option<LinkIndex>,
    /// Why no link keeps it.
    reason: Option<String>,
}

impl ProgramRules {
    fn iter(&self) -> impl Iterator<Item = (usize, &ProgramRule)> {
        self.places.iter().enumerate().filter_map(|(place, rule)| Some((place, rule.as_ref()?)))
    }

    /// The place of the rule with this name.
    pub(super) fn place_of(&self, name: &str) -> Option<usize> {
        self.iter().find(|(_, rule)| rule.name == name).map(|(place, _)| place)
    }

    /// Every place's rule as flows are matched to it: an empty one for a place without a rule.
    pub(super) fn applied(&self) -> impl Iterator<Item = AppRule> {
        self.places.iter().map(|rule| rule.as_ref().map(|rule| rule.applied.clone()).unwrap_or_default())
    }

    /// The rule at this place that a flow has matched which started then; `None` if it is gone.
    pub(super) fn matched(&self, place: usize, started: Time) -> Option<&AppRule> {
        let rule = self.places.get(place)?.as_ref()?;
        (started > rule.since).then_some(&rule.applied)
    }

    /// Number of places.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Name of the rule at this place.
    pub(super) fn name(&self, place: usize) -> Option<&str> {
        self.places.get(place)?.as_ref().map(|rule| rule.name.as_str())
    }

    /// Each place's rule by name, and since when flows have matched it, for a snapshot.
    pub(super) fn names(&self) -> Vec<Option<(String, Time)>> {
        self.places.iter().map(|rule| rule.as_ref().map(|rule| (rule.name.clone(), rule.since))).collect()
    }

    /// When the next lease ends.
    pub(super) fn due(&self) -> Option<Time> {
        self.iter().map(|(_, rule)| rule.until).min()
    }

    /// The remote controller's number of the rule at this place, if it is one of those.
    pub(super) fn controllers(&self, place: usize) -> Option<RuleId> {
        self.places.get(place)?.as_ref()?.controllers
    }

    /// The place of the remote controller's first rule.
    fn first_of_controller(&self) -> Option<usize> {
        self.iter().find(|(_, rule)| rule.controllers.is_some()).map(|(place, _)| place)
    }

    /// Number of places before those of the remote controller.
    pub(super) fn places_of_programs(&self) -> usize {
        self.first_of_controller().unwrap_or(self.places.len())
    }

    /// The place for a new rule of a program: the first free one, else the one behind the last.
    fn next_place(&self) -> usize {
        self.places.iter().position(Option::is_none).unwrap_or(self.places_of_programs())
    }

    /// Puts a rule of a program at a place. Rules of the remote controller make room for a new one: flows that have matched them match them no longer.
    fn put(&mut self, now: Time, place: usize, rule: ProgramRule) {
        if place >= self.places_of_programs() {
            self.places.insert(place, None);
            self.places.iter_mut().flatten().filter(|rule| rule.controllers.is_some()).for_each(|rule| rule.since = now);
        }
        self.places[place] = Some(rule);
    }

    /// Makes these the rules of the remote controller, in this order. A flow that matched one before still does if the rule has its place and its conditions.
    /// Returns whether anything changed.
    pub(super) fn set_controllers(&mut self, now: Time, rules: Vec<ControllerRule>) -> bool {
        let first = self.places_of_programs();
        let old: Vec<&ProgramRule> = self.places.iter().skip(first).flatten().collect();
        let same = |(old, new): (&&ProgramRule, &ControllerRule)| old.controllers == Some(new.id) && old.asked == new.rule;
        if old.len() == rules.len() && old.iter().zip(&rules).all(same) {
            return false;
        }
        let before = self.places.split_off(first);
        self.trim();
        let stays = self.places.len() == first;
        for (place, ControllerRule { id, rule }) in rules.into_iter().enumerate() {
            let old = before.get(place).and_then(Option::as_ref).filter(|_| stays);
            let old = old.filter(|old| old.controllers == Some(id) && old.asked.matcher == rule.matcher);
            self.places.push(Some(ProgramRule {
                name: id.to_string(),
                program: None,
                controllers: Some(id),
                applied: rule.clone(),
                asked: rule,
                objection: None,
                reserved: None,
                since: old.map_or(now, |old| old.since),
                // The controller's connection is the lease.
                until: Time::MAX,
            }));
        }
        true
    }

    fn trim(&mut self) {
        while self.places.pop_if(|last| last.is_none()).is_some() {}
    }

    /// Removes rules. Returns whether there were any.
    fn remove(&mut self, is_over: impl Fn(&ProgramRule) -> bool) -> bool {
        let mut removed = false;
        for rule in &mut self.places {
            removed |= rule.take_if(|rule| is_over(rule)).is_some();
        }
        self.trim();
        removed
    }
}

impl<S: Steering> Core<S> {
    /// `GET /v1/rules`.
    pub fn program_rules(&self, now: Time) -> Vec<braid_api::ProgramRule> {
        let view = |(_, rule): (usize, &ProgramRule)| braid_api::ProgramRule {
            name: rule.name.clone(),
            process: rule.program.as_ref().map(|program| program.process),
            program: match rule.controllers {
                Some(_) => Some(REMOTE_CONTROLLER.to_owned()),
                None => rule.program.as_ref().map(|program| program.name.clone()),
            },
            remaining_ms: if rule.controllers.is_some() { 0 } else { rule.until.since(now).as_millis() as u64 },
            entry: braid_api::AppEntry { unmet: rule.objection.as_ref().map(ToString::to_string), ..self.app_entry(&rule.asked) },
            reservation: rule.reserved.as_ref().map(|reserved| Reservation {
                down_bps: reserved.rates.down.map(Rate::bps),
                up_bps: reserved.rates.up.map(Rate::bps),
                link: reserved.link.and_then(|link| Some(self.links.get(link)?.facts.name.clone())),
                kept: reserved.link.is_some(),
                reason: reserved.reason.clone(),
            }),
        };
        self.programs.iter().filter(|(_, rule)| rule.until > now).map(view).collect()
    }

    /// `POST /v1/rules` with a rule: adds it, or renews and changes the one with its name.
    pub fn put_rule(&mut self, now: Time, request: NewRule<'_>) -> Result<Accepted, RequestError> {
        let name = request.name;
        check_name(name)?;
        if !LEASES.contains(&request.lease) {
            let detail = format!("lease_ms of {name:?} is {}: write 1000 to {}", request.lease.as_millis(), LEASES.end().as_millis());
            return Err(RequestError::unclear(detail));
        }
        self.expire_program_rules(now);
        let known = self.programs.place_of(name);
        self.check_owner(name, known, request.program.as_ref())?;
        let place = known.unwrap_or_else(|| self.programs.next_place());
        let new = self.new_rule(now, place, request)?;
        let (until, since) = (new.until, known.map(|place| &self.programs.places[place]).and_then(|old| same_flows(old.as_ref()?, &new)));
        let before = self.programs.clone();
        self.programs.put(now, place, ProgramRule { since: since.unwrap_or(now), ..new });
        self.apply_program_rules(now);
        if let Err(error) = self.update_params(now) {
            self.programs = before;
            self.apply_program_rules(now);
            // Retried, if this fails, too.
            let _ = self.update_params(now);
            return Err(not_applied(name, &error));
        }
        let verb = if known.is_some() { "renewed" } else { "added" };
        let (lease, link) = (until.since(now).as_secs_f64(), self.reserved_link(place).map(|link| format!(", reserved on {link}")));
        let reserved = self.programs.places[place].as_ref().and_then(|rule| rule.reserved.as_ref());
        let unkept =
            reserved.and_then(|reserved| reserved.reason.as_ref()).map(|reason| format!("the reservation is not kept now: {reason}"));
        let message = format!("the rule {name} is {verb} for {lease} s{}", link.unwrap_or_default());
        Ok(Accepted { message, warnings: unkept.into_iter().collect() })
    }

    /// `POST /v1/rules` without a rule: removes it.
    pub fn remove_rule(&mut self, now: Time, name: &str) -> Result<Accepted, RequestError> {
        if self.programs.place_of(name).is_some_and(|place| self.programs.controllers(place).is_some()) {
            let detail = format!(
                "{name} belongs to the {REMOTE_CONTROLLER}, which removes it: without [datapath] in the configuration there is none"
            );
            return Err(RequestError::conflict("Not removed", detail));
        }
        check_name(name)?;
        if !self.programs.remove(|rule| rule.name == name) {
            let detail = format!("no program has added a rule {name}, or its lease has ended: \"braid rules\" lists them");
            return Err(RequestError::not_found("No such rule", detail));
        }
        self.apply_program_rules(now);
        let removed = self.update_params(now);
        removed.map_err(|error| RequestError::failed("Not removed", format!("{name} is not removed yet ({error}); Braid tries again")))?;
        Ok(Accepted { message: format!("the rule {name} is removed"), warnings: Vec::new() })
    }

    /// Removes the rules of a program that has ended. Returns whether there were any.
    pub fn on_program_ended(&mut self, now: Time, program: &Program) -> Result<bool, SteeringError> {
        if !self.programs.remove(|rule| rule.program.as_ref().is_some_and(|owner| is_same(owner, program))) {
            return Ok(false);
        }
        self.apply_program_rules(now);
        self.update_params(now).map(|()| true)
    }

    /// Whether a program has added a rule with this name.
    pub fn has_program_rule(&self, name: &str) -> bool {
        self.programs.place_of(name).is_some()
    }

    /// Whether the program may change the rule at `known`, or add one.
    fn check_owner(&self, name: &str, known: Option<usize>, program: Option<&Program>) -> Result<(), RequestError> {
        let same = |owner: Option<&Program>| match (owner, program) {
            (Some(owner), Some(program)) => is_same(owner, program),
            (owner, program) => owner.is_none() && program.is_none(),
        };
        if let Some(rule) = known.and_then(|place| self.programs.places[place].as_ref()) {
            if same(rule.program.as_ref()) {
                return Ok(());
            }
            let owner = rule.program.as_ref().map_or("no program: only its lease ends it".to_owned(), Program::to_string);
            let detail =
                format!("there is a rule {name} already, which belongs to {owner}: choose another name, or remove that rule first");
            return Err(RequestError::conflict("Name taken", detail));
        }
        let programs = || self.programs.iter().filter(|(_, rule)| rule.controllers.is_none());
        let (all, own) = (programs().count(), programs().filter(|(_, rule)| same(rule.program.as_ref())).count());
        let full = |detail| Err(RequestError::conflict("Too many rules", detail));
        if own >= MAX_RULES_OF_PROGRAM && program.is_some() {
            return full(format!("this program has {own} rules, which is the limit: remove one, or merge some"));
        }
        if all >= MAX_PROGRAM_RULES {
            return full(format!("programs have {all} rules together, which is the limit: \"braid rules\" lists them, remove one"));
        }
        Ok(())
    }

    /// The rule of a request, checked against the policy and the links.
    fn new_rule(&self, now: Time, place: usize, request: NewRule<'_>) -> Result<ProgramRule, RequestError> {
        let NewRule { name, program, rule: mut asked, reserve, lease } = request;
        let mut reserved = reserve.map(|reserve| placement(name, reserve, &mut asked)).transpose()?;
        if let Some(objection) = self.in_force_without_programs(now).objection(&asked, place, &self.backups()) {
            let detail = format!("the rule {name} {{ {} }} is refused: {objection}", matcher_text(&asked.matcher));
            return Err(RequestError::conflict("Against the policy", detail));
        }
        let old = self.programs.places.get(place).and_then(|old| old.as_ref()?.reserved.as_ref());
        match (&mut reserved, old) {
            // What was admitted stays, also while no link can keep it.
            (Some(reserved), Some(old)) if (reserved.rates, &reserved.wanted) == (old.rates, &old.wanted) => reserved.link = old.link,
            (Some(reserved), _) => {
                let refused = |reason| format!("the rule {name} reserves what no link can keep: {reason}");
                let found = self.find_link(now, place, &asked, reserved).map_err(refused);
                found.map_err(|detail| RequestError::conflict("Not reserved", detail))?;
            }
            (None, _) => {}
        }
        let until = now + lease;
        let (name, applied, controllers) = (name.to_owned(), asked.clone(), None);
        Ok(ProgramRule { name, program, controllers, applied, asked, objection: None, reserved, since: now, until })
    }

    /// Removes rules whose lease has ended, and judges the others again: the policy and the links may have changed. The caller updates the parameters.
    pub(super) fn expire_program_rules(&mut self, now: Time) {
        if self.programs.places.is_empty() {
            return;
        }
        let expired = self.programs.remove(|rule| rule.until <= now);
        let before = self.programs.clone();
        self.judge_program_rules(now);
        let differs = |(old, new): (&Option<ProgramRule>, &Option<ProgramRule>)| {
            let state = |rule: &Option<ProgramRule>| rule.as_ref().map(|rule| (rule.applied.clone(), rule.reserved.clone()));
            state(old) != state(new)
        };
        if expired || before.places.iter().zip(&self.programs.places).any(differs) {
            self.apply_program_rules(now);
        }
    }

    /// Finds out which rules apply now, and which links keep the reservations.
    pub(super) fn judge_program_rules(&mut self, now: Time) {
        if self.programs.places.is_empty() {
            return;
        }
        let policy = self.in_force_without_programs(now);
        for place in 0..self.programs.places.len() {
            let Some(rule) = &self.programs.places[place] else { continue };
            let objection = policy.objection(&rule.asked, place, &self.backups());
            let found = rule.reserved.as_ref().map(|reserved| match &objection {
                Some(_) => Err("the rule does not apply now".to_owned()),
                None => self.find_link(now, place, &rule.asked, reserved),
            });
            let device = |link: &LinkIndex| Some(self.links.get(*link)?.facts.name.clone());
            let device = found.as_ref().and_then(|found| found.as_ref().ok()).and_then(device);
            let Some(rule) = &mut self.programs.places[place] else { continue };
            rule.applied = if objection.is_some() { AppRule::default() } else { rule.asked.clone() };
            rule.applied.prefer.extend(device.map(|name| LinkSelector::Name(Pattern::new(name))));
            rule.objection = objection;
            if let (Some(reserved), Some(found)) = (&mut rule.reserved, found) {
                (reserved.link, reserved.reason) = found.map_or_else(|reason| (None, Some(reason)), |link| (Some(link), None));
            }
        }
    }

    /// Puts the rules in force. The firewall does not hold them: they promise nothing that must outlive the daemon.
    fn apply_program_rules(&mut self, now: Time) {
        self.set_in_force(now);
        self.refresh_executables();
        self.actions.rules_changed = true;
        self.follow_shares(now);
    }

    /// The link that can keep a reservation: the present one as long as it can, else the one with the most left; or why there is none.
    fn find_link(&self, now: Time, place: usize, rule: &AppRule, reserved: &Placement) -> Result<LinkIndex, String> {
        let named = |link: &&Link| reserved.wanted.as_ref().is_none_or(|wanted| *wanted == link.facts.name);
        let allowed = |link: &&Link| rule.links.as_ref().is_none_or(|links| links.iter().any(|selector| selector.matches(&link.facts)));
        let mut reasons = Vec::new();
        let mut best: Option<(Rate, LinkIndex)> = None;
        for link in self.links.values().filter(named) {
            let index = link.facts.index;
            let is_kept = reserved.link == Some(index);
            match self.room(now, place, link, if is_kept { 1.0 } else { RESERVABLE }) {
                _ if !allowed(&link) => reasons.push(format!("the rule does not allow {}", link.facts.name)),
                Err(reason) => reasons.push(reason),
                Ok(room) => {
                    let short = Direction::ALL
                        .into_iter()
                        .find(|way| reserved.rates[*way].is_some_and(|rate| room[*way].is_none_or(|room| rate > room)));
                    let least = Direction::ALL.into_iter().filter(|way| reserved.rates[*way].is_some()).filter_map(|way| room[way]).min();
                    match (short, least) {
                        (None, Some(_)) if is_kept => return Ok(index),
                        (None, Some(least)) => best = best.max(Some((least, index))),
                        (Some(way), _) => reasons.push(self.shortage(link, way, room[way])),
                        (None, None) => {}
                    }
                }
            }
        }
        let nothing = || reserved.wanted.as_ref().map_or("there is no link".to_owned(), |wanted| format!("there is no link {wanted}"));
        best.map(|(_, index)| index).ok_or_else(|| if reasons.is_empty() { nothing() } else { reasons.join("; ") })
    }

    fn shortage(&self, link: &Link, way: Direction, room: Option<Rate>) -> String {
        let (name, way) = (&link.facts.name, if way == Direction::Down { "down" } else { "up" });
        match room {
            Some(room) => format!("{name} has {room} left {way} of the {} % of its capacity that programs may reserve", RESERVABLE * 100.0),
            None => format!(
                "the capacity of {name} ({way}) is not known yet: wait for traffic to show it, or set capacity_{way} in its [[link]] entry"
            ),
        }
    }

    /// What may still be reserved on a link beside the reservations at other places and what the configuration guarantees; `None` in a direction whose
    /// capacity is not known.
    fn room(&self, now: Time, place: usize, link: &Link, share: f64) -> Result<PerDirection<Option<Rate>>, String> {
        if !Family::ALL.iter().any(|family| link.usable(*family)) {
            let state = link.reason().map(|reason| format!(" ({reason})")).unwrap_or_default();
            return Err(format!("{} is not usable now{state}", link.facts.name));
        }
        if link.rule.role == Role::Backup {
            return Err(format!("{} has role = \"backup\"", link.facts.name));
        }
        let here = |reserved: &&Placement| reserved.link == Some(link.facts.index);
        let others = || self.programs.iter().filter(|(other, _)| *other != place).filter_map(|(_, rule)| rule.reserved.as_ref());
        let uses = |rule: &&AppRule| rule.links.as_ref().is_none_or(|links| links.iter().any(|selector| selector.matches(&link.facts)));
        Ok(PerDirection::from_fn(|direction| {
            let capacity = link.known_capacity(direction, now)?;
            let reserved = others().filter(here).filter_map(|reserved| reserved.rates[direction]);
            let guaranteed = self.config.policy.apps.iter().filter(uses).filter_map(|rule| rule.guarantee?.of(Some(capacity)));
            Some(reserved.chain(guaranteed).fold(capacity.scale(share), Rate::saturating_sub))
        }))
    }

    /// The rule at this index of the policy in force, for users.
    pub(super) fn rule_label(&self, index: usize) -> String {
        match self.program_rule_in_force(index) {
            Some(name) if RuleId::is_name(name) => format!("the rule {name} of the {REMOTE_CONTROLLER}"),
            Some(name) => format!("the rule {name} of a program"),
            None => format!("[[app]] entry {}", index + 1),
        }
    }

    /// The entries of the policy in force without the rules of programs.
    pub(super) fn configured_in_force(&self) -> impl Iterator<Item = &AppRule> {
        self.in_force.apps.iter().take(self.config.policy.apps.len())
    }

    /// Name of the program's rule at this index of the policy in force.
    pub(super) fn program_rule_in_force(&self, index: usize) -> Option<&str> {
        self.programs.name(index.checked_sub(self.config.policy.apps.len())?)
    }

    /// The links with the role backup.
    pub(super) fn backups(&self) -> Vec<&LinkFacts> {
        self.links.values().filter(|link| link.rule.role == Role::Backup).map(|link| &link.facts).collect()
    }

    fn reserved_link(&self, place: usize) -> Option<&str> {
        let link = self.programs.places.get(place)?.as_ref()?.reserved.as_ref()?.link?;
        self.links.get(link).map(|link| link.facts.name.as_str())
    }

    /// The reservations that links keep, with the numbers of their rules, and their links.
    pub(super) fn reservations(&self) -> Vec<(LinkIndex, Reserved)> {
        let first = self.config.policy.apps.len();
        let kept = self.programs.iter().filter_map(|(place, rule)| {
            let reserved = rule.reserved.as_ref()?;
            Some((reserved.link?, Reserved { rule: first + place, rates: reserved.rates }))
        });
        kept.collect()
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (process {})", self.name, self.process)
    }
}

fn is_same(one: &Program, other: &Program) -> bool {
    (one.process, one.started) == (other.process, other.started)
}

/// Since when flows have matched the rule, if the new one with its name matches the same.
fn same_flows(old: &ProgramRule, new: &ProgramRule) -> Option<Time> {
    (old.asked.matcher == new.asked.matcher).then_some(old.since)
}

/// The reservation of a request. Sets what it implies for the rule.
fn placement(name: &str, reserve: &Reserve, rule: &mut AppRule) -> Result<Placement, RequestError> {
    let unclear = |detail: &str| Err(RequestError::unclear(format!("the reservation of {name}: {detail}")));
    let rates = PerDirection { down: reserve.down_bps.map(Rate::from_bps), up: reserve.up_bps.map(Rate::from_bps) };
    let given: Vec<Rate> = Direction::ALL.into_iter().filter_map(|direction| rates[direction]).collect();
    if given.is_empty() {
        return unclear("it names no rate: write down_bps, up_bps or both");
    }
    if given.iter().any(|rate| *rate < MIN_RESERVED) {
        return unclear(&format!("a rate below {MIN_RESERVED} cannot be kept: write at least {}", MIN_RESERVED.bps()));
    }
    if !rule.prefer.is_empty() {
        return unclear("it selects the link, so leave out prefer, and write link to choose it");
    }
    if rule.carry.needs_peer() || rule.relay.is_some() {
        return unclear("it holds for direct flows, so leave out carry and relay");
    }
    if matches!(rule.rate, Some(Portion::Rate(most)) if given.iter().any(|rate| *rate > most)) {
        return unclear("it exceeds the rule's rate, which limits the same flows: lower it, or raise rate");
    }
    rule.carry = Carry::Direct;
    Ok(Placement { rates, wanted: reserve.link.clone(), link: None, reason: None })
}

fn check_name(name: &str) -> Result<(), RequestError> {
    let fits = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || matches!(letter, '-' | '_');
    if (1..=MAX_NAME).contains(&name.len()) && name.starts_with(|letter: char| letter.is_ascii_lowercase()) && name.chars().all(fits) {
        return Ok(());
    }
    let shown: String = name.chars().take(MAX_NAME).collect();
    Err(RequestError::unclear(format!(
        "{shown:?} is not the name of a rule: write 1 to {MAX_NAME} lower-case letters, digits, - and _, starting with a letter"
    )))
}

fn not_applied(name: &str, error: &SteeringError) -> RequestError {
    RequestError::failed("Not applied", format!("the rule {name} is not added, because the kernel's rules cannot be changed ({error})"))
}
