//! The context: facts that users and sensors set, and the rules whose conditions hold because of them (thesis, fig. 2.10).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use braid_api::{Accepted, Fact, FactChange};
use braid_decide::policy::{
    AppMatcher, AppRule, Clock, FACT_NAME_LIMIT, FACT_VALUE_LIMIT, Facts, LinkMatcher, MAX_RULES, MOVING, Policy, RESERVED_FACTS, Subject,
    When, is_fact_name, is_fact_value, names_program,
};
use braid_model::Time;

use super::apps::AppRecord;
use super::timeouts::RETRY;
use super::{Core, rules};
use crate::RequestError;
use crate::links::Link;
use crate::steering::{AppId, RedirectedFlow, Steering, SteeringError};

/// Maximum number of facts that users may set at the same time.
pub const MAX_FACTS: usize = 64;
/// Maximum time for which a fact may be set.
const MAX_FOR: Duration = Duration::from_secs(366 * 86_400);
const DAY: Duration = Duration::from_secs(86_400);

/// A fact that a user has set.
struct SetFact {
    value: String,
    until: Option<Time>,
}

/// What is known about the context, and its last evaluation.
#[derive(Default)]
pub(super) struct Context {
    set: BTreeMap<String, SetFact>,
    /// Whether the machine moves, according to its accelerometers; `None` without one.
    moving: Option<bool>,
    ssids: BTreeSet<String>,
    /// Time since local midnight, and when it was read.
    clock: Option<(Time, Duration)>,
    /// Applications with living bonded flows.
    bonded: BTreeSet<AppId>,
    /// Applications with living direct flows, as of the last evaluation, if a condition asks for them.
    direct: BTreeSet<AppId>,
    /// Whether each condition of the configured and of the past rules held at the last evaluation.
    held: Vec<bool>,
    evaluated: Time,
    /// The links must be updated again, because the steering failed.
    links_stale: bool,
    /// When a fact expires, a time window begins or ends, or a failed update is retried.
    due: Option<Time>,
}

impl Context {
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    fn time_of_day(&self, now: Time) -> Option<Duration> {
        let (at, then) = self.clock?;
        let nanos = (then + now.since(at)).as_nanos() % DAY.as_nanos();
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)))
    }

    /// All facts with a value. A value that a user has set takes precedence over a sensor.
    fn values(&self) -> BTreeMap<String, String> {
        let sensed = self.moving.map(|moving| (MOVING.to_owned(), moving.to_string()));
        sensed.into_iter().chain(self.set.iter().map(|(name, fact)| (name.clone(), fact.value.clone()))).collect()
    }
}

impl<S: Steering> Core<S> {
    /// Processes a reading of the accelerometers: whether the machine moves; `None` without accelerometer.
    pub fn on_moving(&mut self, now: Time, moving: Option<bool>) -> Result<(), SteeringError> {
        self.context.moving = moving;
        self.reevaluate(now)
    }

    /// Processes the names of the wireless networks that interfaces are associated with.
    pub fn on_ssids(&mut self, now: Time, ssids: BTreeSet<String>) -> Result<(), SteeringError> {
        self.context.ssids = ssids;
        self.reevaluate(now)
    }

    /// Processes the local time, counted from midnight. Call it about once a second: the clock and the time zone may change.
    pub fn on_clock(&mut self, now: Time, time_of_day: Duration) -> Result<(), SteeringError> {
        self.context.clock = Some((now, time_of_day));
        let context = self.update_context(now);
        context.and(self.update_params(now))
    }

    /// Processes the applications that have living bonded flows.
    pub fn on_bonded_apps(&mut self, now: Time, apps: BTreeSet<AppId>) -> Result<(), SteeringError> {
        if self.context.bonded == apps {
            return Ok(());
        }
        self.context.bonded = apps;
        self.reevaluate(now)
    }

    /// Whether any rule depends on whether the machine moves.
    pub fn asks_moving(&self) -> bool {
        self.config.policy.conditions().any(|when| when.facts.contains_key(MOVING))
    }

    /// Whether any rule depends on a wireless network's name.
    pub fn asks_ssid(&self) -> bool {
        self.config.policy.conditions().any(|when| when.ssid.is_some())
    }

    /// `GET /v1/context`: facts that were set, then sensed, then those of the system.
    pub fn facts(&self, now: Time) -> Vec<Fact> {
        let fact =
            |name: &str, value: String, source: &str| Fact { name: name.to_owned(), value, source: source.to_owned(), remaining_ms: None };
        let set = self.context.set.iter().filter(|(_, known)| known.until.is_none_or(|until| until > now)).map(|(name, known)| Fact {
            remaining_ms: known.until.map(|until| until.since(now).as_millis() as u64),
            ..fact(name, known.value.clone(), "set")
        });
        let moving = self.context.moving.filter(|_| !self.context.set.contains_key(MOVING));
        let system = [
            moving.map(|moving| fact(MOVING, moving.to_string(), "sensor")),
            self.context.time_of_day(now).map(|time| fact("time", Clock::of(time).to_string(), "system")),
            self.supply.map(|supply| fact("battery", format!("{:.2}", supply.level), "system")),
        ];
        let ssids = self.context.ssids.iter().map(|ssid| fact("ssid", ssid.clone(), "system"));
        set.chain(system.into_iter().flatten()).chain(ssids).collect()
    }

    /// `POST /v1/context`: sets or clears a fact, and applies the rules that depend on it at once.
    pub fn set_fact(&mut self, now: Time, change: &FactChange) -> Result<Accepted, RequestError> {
        let name = &change.name;
        if RESERVED_FACTS.contains(&name.as_str()) {
            return Err(RequestError::unclear(format!("{name} cannot be set: Braid determines it itself; choose another name")));
        }
        if !is_fact_name(name) {
            let shown: String = name.chars().take(FACT_NAME_LIMIT).collect();
            return Err(RequestError::unclear(format!(
                "{shown:?} is not the name of a fact: write 1 to {FACT_NAME_LIMIT} lower-case letters, digits, - and _, starting with a letter"
            )));
        }
        let before = self.in_force.clone();
        let message = match &change.value {
            Some(value) => {
                if !is_fact_value(value) {
                    let detail =
                        format!("the value of {name} is not valid: write 1 to {FACT_VALUE_LIMIT} bytes without control characters");
                    return Err(RequestError::unclear(detail));
                }
                let span = change.for_ms.map(Duration::from_millis);
                if span.is_some_and(|span| span.is_zero() || span > MAX_FOR) {
                    return Err(RequestError::unclear(format!("{name} can be set for up to 366 days, and for more than no time")));
                }
                if self.context.set.len() >= MAX_FACTS && !self.context.set.contains_key(name) {
                    let detail =
                        format!("{MAX_FACTS} facts are set already, which is the limit: clear one with \"braid context clear NAME\"");
                    return Err(RequestError::conflict("Too many facts", detail));
                }
                let until = span.map(|span| now + span);
                self.context.set.insert(name.clone(), SetFact { value: value.clone(), until });
                format!("{name} is now {value}{}", span.map(|span| format!(" for {} s", span.as_secs_f64())).unwrap_or_default())
            }
            None if self.context.set.remove(name).is_none() => {
                let detail = format!("{name} is not set, so it cannot be cleared: \"braid context\" lists the facts");
                return Err(RequestError::not_found("No such fact", detail));
            }
            None => format!("{name} is cleared"),
        };
        self.reevaluate(now).map_err(|error| {
            RequestError::failed("Not applied", format!("{message}, but the kernel's rules were not changed ({error}); Braid retries"))
        })?;
        let unused = !self.config.policy.conditions().any(|when| when.facts.contains_key(name));
        let warnings = unused.then(|| format!("no rule refers to {name}: write when = {{ {name} = ... }} in an [[app]] or [[link]] entry"));
        let effects: String =
            effects(&before, &self.in_force, self.config.policy.apps.len()).iter().map(|effect| format!("; {effect}")).collect();
        Ok(Accepted { message: message + &effects, warnings: warnings.into_iter().collect() })
    }

    /// Evaluates all conditions, and applies the rules that hold now if that changes any.
    pub(super) fn update_context(&mut self, now: Time) -> Result<(), SteeringError> {
        self.context.set.retain(|_, fact| fact.until.is_none_or(|until| until > now));
        self.context.due = self.next_change(now);
        self.context.evaluated = now;
        self.find_running();
        let held = self.held(now);
        let mut gateway = Ok(());
        if held != self.context.held {
            self.context.held = held;
            self.set_in_force(now);
            self.actions.rules_changed = true;
            self.context.links_stale |= self.config.policy.links.iter().any(|rule| !rule.when.is_empty());
            gateway = self.update_gateway();
        }
        if !self.context.links_stale {
            return gateway;
        }
        self.context.links_stale = false;
        let updated = self.apply_link_rules(now, false);
        if updated.is_err() {
            self.context.links_stale = true;
            self.context.due = Some(self.context.due.map_or(now + RETRY, |due| due.min(now + RETRY)));
        }
        updated.and(gateway)
    }

    /// Evaluates all conditions for a new configuration.
    pub(super) fn reset_context(&mut self, now: Time) {
        self.find_running();
        self.context.held = self.held(now);
        self.context.due = self.next_change(now);
        self.set_in_force(now);
    }

    /// The configured policy that applies in the present context.
    pub(super) fn in_force_without_programs(&self, now: Time) -> Policy {
        self.with_facts(now, |facts| self.config.policy.in_force(facts))
    }

    /// Determines the policy in force: the configured one in the present context, then the rules of programs.
    pub(super) fn set_in_force(&mut self, now: Time) {
        self.judge_program_rules(now);
        self.in_force = self.in_force_without_programs(now);
        let left = MAX_RULES.saturating_sub(rules::exclusions(&self.in_force) + self.in_force.apps.len());
        self.in_force.apps.extend(self.programs.applied().take(left));
    }

    /// Gives each link the rule that matches it now. Links whose rule changed keep their learned values.
    pub(super) fn apply_link_rules(&mut self, now: Time, all: bool) -> Result<(), SteeringError> {
        for link in self.links.values_mut() {
            let rule = self.in_force.link_rule(&link.facts).cloned().unwrap_or_default();
            if rule != link.rule || all {
                let kept = std::mem::replace(link, Link::new(link.facts.clone(), link.slot, rule, self.config.probe, now));
                link.take_over(kept, now);
            }
        }
        let network = self.network.clone();
        self.on_network(now, network)
    }

    /// Whether any rule depends on running programs.
    pub fn asks_running(&self) -> bool {
        self.all_conditions().any(|when| when.running.is_some())
    }

    /// Finds the applications with direct flows, once for all conditions.
    fn find_running(&mut self) {
        self.context.direct = if self.asks_running() {
            self.flows.iter().filter(|living| !self.has_ended(living)).map(|living| living.row.app.clone()).collect()
        } else {
            BTreeSet::new()
        };
    }

    /// Why a condition does not hold, as of the last evaluation; `None` if it holds.
    pub(super) fn unmet(&self, when: &When) -> Option<String> {
        self.with_facts(self.context.evaluated, |facts| when.unmet(facts))
    }

    /// The `[[app]]` entry that applies to a redirected flow now, among the entries in force at its start, and its index, from 0. `matched` is
    /// the entry that the kernel matched then; `None`: no entry. A rule of a program that is gone is `None` among `rules`.
    pub(super) fn match_again<'a>(
        &self,
        now: Time,
        flow: &RedirectedFlow,
        rules: impl Iterator<Item = Option<&'a AppRule>>,
        matched: Option<usize>,
    ) -> Option<(usize, &'a AppRule)> {
        self.with_facts(now, |facts| self.applicable(flow, rules, matched).find(|(_, rule)| rule.when.holds(facts)))
    }

    /// The entries that apply to a flow if their conditions hold and those of the ones before do not. The kernel's verdict holds for the entries before
    /// `matched`, unless they have conditions: those may have changed. Of these, an entry with a cgroup never matches, since only the kernel knows the flow's
    /// cgroup for certain.
    pub(super) fn applicable<'a, 'b, R: Iterator<Item = Option<&'a AppRule>>>(
        &'b self,
        flow: &'b RedirectedFlow,
        rules: R,
        matched: Option<usize>,
    ) -> impl Iterator<Item = (usize, &'a AppRule)> + use<'a, 'b, R, S> {
        let record = self.apps.get(&flow.app);
        let exe = record.and_then(|record| record.application.exe.as_deref());
        let subject = Subject {
            exe,
            name: &flow.app.name,
            port: flow.remote.port(),
            protocol: None,
            destination: flow.remote.ip(),
            cgroup: record.and_then(|record| record.cgroup.as_deref()),
            user: Some(flow.user),
            // The class of the flow may come from the rule that it matched.
            class: record.map_or(flow.class, AppRecord::class_for_rules),
            client: None,
        };
        let matches = move |matcher: &AppMatcher| self.matches(matcher, &flow.app, subject);
        let may = move |place: usize, rule: &AppRule| match matched {
            Some(matched) if place == matched => true,
            // The matched entry no longer applies, so the kernel has not judged this one.
            Some(matched) if place > matched => matches(&rule.matcher),
            _ => !rule.when.is_empty() && rule.matcher.cgroup.is_none() && matches(&rule.matcher),
        };
        let known = rules.enumerate().filter_map(|(place, rule)| Some((place, rule?)));
        known.filter(move |(place, rule)| may(*place, rule))
    }

    /// Whether a rule matches a flow of this application. The kernel compares executables by inode, and a rule may name a symbolic link.
    pub(super) fn matches(&self, matcher: &AppMatcher, app: &AppId, subject: Subject<'_>) -> bool {
        let named = matcher.exe.as_deref().filter(|path| self.executables.of(path).contains(&app.exe));
        matcher.matches(&Subject { exe: named.or(subject.exe), ..subject })
    }

    /// The conditions of the configured rules and of those that older flows still follow.
    fn all_conditions(&self) -> impl Iterator<Item = &When> {
        self.config.policy.conditions().chain(self.past.conditions())
    }

    fn held(&self, now: Time) -> Vec<bool> {
        self.with_facts(now, |facts| self.all_conditions().map(|when| when.holds(facts)).collect())
    }

    fn next_change(&self, now: Time) -> Option<Time> {
        let expiries = self.context.set.values().filter_map(|fact| fact.until);
        let time_of_day = self.context.time_of_day(now);
        let windows = self.all_conditions().filter_map(|when| Some(now + when.time?.next_change(time_of_day?)));
        expiries.chain(windows).min()
    }

    fn with_facts<T>(&self, now: Time, use_facts: impl FnOnce(&Facts<'_>) -> T) -> T {
        let names = |program: &str, app: &AppId| {
            // As in rules, a path may be a symbolic link, and a process in another mount namespace may have the same path.
            let versions = self.executables.of(Path::new(program));
            if !versions.is_empty() {
                return versions.contains(&app.exe);
            }
            let exe = self.apps.get(app).and_then(|record| record.application.exe.as_ref()).and_then(|exe| exe.to_str());
            names_program(program, &app.name, exe)
        };
        let running = |program: &str| self.context.direct.iter().chain(&self.context.bonded).any(|app| names(program, app));
        use_facts(&Facts {
            values: &self.context.values(),
            running: &running,
            time_of_day: self.context.time_of_day(now),
            battery: self.supply.map(|supply| supply.level),
            ssids: &self.context.ssids,
        })
    }
}

/// The entries that start or stop to apply. Those of the configuration come first.
fn effects(before: &Policy, after: &Policy, configured: usize) -> Vec<String> {
    let change = |table: &str, place: usize, before: bool, after: bool| match (before, after) {
        (false, true) => Some(format!("[[{table}]] entry {} applies now", place + 1)),
        (true, false) => Some(format!("[[{table}]] entry {} no longer applies", place + 1)),
        _ => None,
    };
    let apps = before.apps.iter().zip(&after.apps).enumerate().take(configured);
    let apps = apps.filter_map(|(place, (old, new))| change("app", place, applies(&old.matcher), applies(&new.matcher)));
    let links = before.links.iter().zip(&after.links).enumerate();
    let unmatched = LinkMatcher::default();
    let links = links.filter_map(|(place, (old, new))| change("link", place, old.matcher != unmatched, new.matcher != unmatched));
    apps.chain(links).collect()
}

/// Whether an entry of the policy in force applies: one whose condition does not hold has an empty matcher.
fn applies(matcher: &AppMatcher) -> bool {
    !matcher.is_empty()
}
