//! Explains why a flow gets its link: applies the same rule to the same loads and gives the reasons.

use std::net::IpAddr;
use std::path::Path;

use crate::RequestError;
use braid_api::{Candidate, ExplainRequest, Explanation, Outcome, SkippedRule};
use braid_decide::connection::{LoadTable, Mode, Request};
use braid_decide::policy::{Admission, AppRule, Client, LinkSelector, Subject, admit};
use braid_model::{Affinity, ByteCount, Class, Direction, Family, LinkSet, Mac, Protocol, Time};

use super::Core;
use super::apps::AppRecord;
use super::views::{affinity_name, matcher_text, when_text};
use crate::steering::{AppId, DemandEstimate, FlowRow, Steering};

/// The explanation for a program of this machine, while Braid serves only the gateway's clients.
fn unsteered(would: Explanation) -> Explanation {
    let reason = "Braid serves only the clients of the gateway here (`braid status` says why), so the system's routes decide".to_owned();
    Explanation { outcome: Outcome::LeftAlone, link: None, runner_up: None, peer: None, reason, ..would }
}

/// A normalised request.
struct Question {
    exe: Option<String>,
    name: String,
    destination: IpAddr,
    port: u16,
    protocol: Protocol,
    user: Option<u32>,
    cgroup: Option<String>,
    /// Whether foreign BPF programs filtered its cgroup when the flow started.
    filtered: bool,
    /// The client of the gateway whose flow it is, or the address of the virtual interface that it passes.
    client: Option<Sender>,
}

/// Who sends a forwarded flow, as rules see it.
struct Sender {
    address: IpAddr,
    mac: Option<Mac>,
    /// Name that it gave by DHCP.
    name: Option<String>,
}

/// Links that the rule allows, or the reason why a flow is not steered.
struct RuleAnswer {
    mask: LinkSet,
    outcome: Outcome,
    reason: String,
    /// Links that the rule names in `links` and `prefer`, if any.
    strict: Option<LinkSet>,
    prefer: Option<LinkSet>,
}

impl RuleAnswer {
    /// Why the flow may not use a usable link. `waits` is true for a backup link while a better one is usable.
    fn why_not(&self, slot: usize, waits: bool) -> &'static str {
        let without = |mask: Option<LinkSet>| mask.is_some_and(|mask| !mask.contains(slot));
        match self.outcome {
            Outcome::LeftAlone => "Braid does not choose a link for it: the system's routes decide",
            _ if without(self.strict) => "the rule does not name this link (links)",
            // Preferred links count only while one of them is usable.
            _ if without(self.prefer) && self.prefer.is_some_and(|prefer| prefer.0 & self.mask.0 != 0) => {
                "the rule prefers other links (prefer)"
            }
            _ if waits => "unused while a link with a better role or priority is usable",
            _ => "other links are usable",
        }
    }
}

impl<S: Steering> Core<S> {
    /// `POST /v1/explain`.
    pub fn explain(&mut self, now: Time, request: &ExplainRequest) -> Result<Explanation, RequestError> {
        let load_table = self.steering.load_table().map_err(|error| RequestError::failed("Not explained", error.to_string()))?;
        if let Some(id) = request.flow {
            let row = self.flows.iter().map(|living| &living.row).find(|row| row.id.0 == id).cloned();
            let row = row.ok_or_else(|| {
                RequestError::not_found("No such flow", format!("no living flow has the id {id}: `braid flows` lists the ids"))
            })?;
            return Ok(self.explain_flow(now, &row, &load_table));
        }
        let question = self.question(request)?;
        let explanation = self.answer(now, &question, &load_table);
        if !self.steering.steers_host() {
            return Ok(unsteered(explanation));
        }
        Ok(self.or_bonded(now, explanation, question.destination, question.port))
    }

    fn question(&self, request: &ExplainRequest) -> Result<Question, RequestError> {
        let unclear = |detail: String| RequestError::unclear(detail);
        let destination =
            request.destination.as_deref().ok_or_else(|| unclear("name a flow, or a program and a destination address".into()))?;
        let destination = destination.parse::<IpAddr>().map_err(|_| {
            unclear(format!("{destination:?} is not an IP address: names are not resolved here, since the answer may differ by link"))
        })?;
        let exe = request.exe.clone();
        let from_exe =
            exe.as_deref().and_then(|exe| Path::new(exe).file_name()).map(|name| name.to_string_lossy().chars().take(15).collect());
        let name = request.name.clone().or(from_exe).unwrap_or_default();
        Ok(Question {
            exe,
            name,
            destination: destination.to_canonical(),
            port: request.port.unwrap_or(443),
            protocol: if request.protocol.as_deref() == Some("udp") { Protocol::Udp } else { Protocol::Tcp },
            user: request.user,
            cgroup: request.cgroup.clone(),
            filtered: false,
            client: None,
        })
    }

    /// Who sends this flow, if the switch forwards it.
    fn sender(&mut self, row: &FlowRow) -> Option<Sender> {
        let address = row.forwarded.then_some(row.local.0)?;
        let known = self.steering.clients().unwrap_or_default().into_iter().find(|client| client.address == address);
        let mac = known.and_then(|client| client.mac);
        Some(Sender { address, mac, name: self.clients.name_of(address, mac).map(str::to_owned) })
    }

    /// Explains a living flow. Its link is fixed; the rest describes how a new flow like it would be steered now.
    fn explain_flow(&mut self, now: Time, row: &FlowRow, load_table: &LoadTable) -> Explanation {
        let exe = self.apps.get(&row.app).and_then(|record| record.application.exe.as_ref()).map(|exe| exe.display().to_string());
        let cgroup = self.apps.get(&row.app).and_then(|record| record.cgroup.clone());
        let question = Question {
            exe,
            name: row.app.name.clone(),
            destination: row.remote.0,
            port: row.service(),
            protocol: row.protocol,
            // Nobody knows the users of a client.
            user: row.app.client_address().is_none().then_some(row.user),
            cgroup,
            filtered: row.filtered,
            client: self.sender(row),
        };
        let mut explanation = self.answer(now, &question, load_table);
        let link = self.device_name(row);
        let age = now.since(row.started).as_secs_f64();
        let scheduler =
            braid_decide::policy::Scheduler::ALL.get(usize::from(row.scheduler)).map_or("unknown", |scheduler| scheduler.name());
        let moved = if row.moves > 0 { ", after its connect on another link was not answered," } else { "" };
        let through = self.virtual_device().filter(|_| row.is_through_virtual_device());
        let through = through.map(|own| format!(", through the virtual interface {},", own.name)).unwrap_or_default();
        let late = if self.is_late(row.slot) { "; its packets wait in a queue of their own until the link can take them" } else { "" };
        let now_there = self.explain_move(row).unwrap_or_else(|| "and it stays there".to_owned());
        let begun = match row.accepted {
            true => {
                let own = self.links.iter().map(|(_, link)| &link.facts).find(|facts| facts.source(row.family) == Some(row.local.0));
                let own = own.map_or("a link that is gone", |facts| &facts.name);
                format!("the other host opened it {age:.1} s ago to an address of {own}")
            }
            false => format!("{scheduler} gave it {link} {age:.1} s ago"),
        };
        explanation.reason =
            format!("{begun}{through}{moved} {now_there}{late}; for a new flow like it, the reason would be: {}", explanation.reason);
        explanation.link = Some(link);
        explanation.outcome = Outcome::Steered;
        explanation.demand_bytes = Some(row.demand.get());
        explanation.program_known = None;
        explanation.share = self.explain_share(now, row);
        explanation
    }

    fn answer(&mut self, now: Time, question: &Question, load_table: &LoadTable) -> Explanation {
        let family = Family::of(question.destination);
        let (demand, direction, class, learnt) = self.expected(question);
        let subject = Subject {
            exe: question.exe.as_deref().map(Path::new),
            name: &question.name,
            port: question.port,
            protocol: Some(question.protocol),
            destination: question.destination,
            cgroup: question.cgroup.as_deref(),
            user: question.user,
            client: question.client.as_ref().map(|client| Client {
                address: client.address,
                user: client.name.as_deref(),
                mac: client.mac,
            }),
            class: if class == Class::Unclassified { learnt } else { class },
        };
        let policy = &self.config.policy;
        let rule = self.in_force.first_match(&subject);
        let entry = rule.map(|rule| self.entry_in_force(rule));
        let program_rule = rule.and_then(|rule| self.program_rule_in_force(rule));
        let answer = self.rule_answer(&subject, rule, family);
        let class = entry.and_then(|entry| entry.class).unwrap_or(class);
        let affinity = policy.affinity(entry, class);
        let request = Request { allowed: answer.mask, direction, demand };
        let mode = self.params.as_ref().map_or(policy.scheduler.mode(), |params| params.mode_for(direction));
        let chosen = load_table.pick(mode, &request);
        let second = chosen.and_then(|slot| load_table.pick(mode, &Request { allowed: LinkSet(answer.mask.0 & !(1 << slot)), ..request }));
        let name = |slot: usize| self.links.in_slot(slot).map(|link| link.facts.name.clone());
        let reason = match chosen {
            Some(slot) => self.why(mode, slot, &request, load_table, affinity),
            None => answer.reason.clone(),
        };
        let how = (question.protocol, question.filtered);
        let server = chosen.map(|_| self.explain_server(now, question.destination, entry, how));
        let peer_direct = matches!(server, Some((true, _)));
        let (link, reason) = match server {
            Some((true, Some(text))) => {
                let links: Vec<String> = answer.mask.iter().filter_map(name).collect();
                (Some(links.join("+")), format!("{text} over {}", links.join(" and ")))
            }
            Some((_, Some(text))) => (chosen.and_then(name), format!("{reason}; {text}")),
            _ => (chosen.and_then(name), reason),
        };
        Explanation {
            subject: format!(
                "{} to {}",
                question.exe.as_deref().unwrap_or(&question.name),
                std::net::SocketAddr::new(question.destination, question.port)
            ),
            outcome: match chosen {
                Some(_) if peer_direct => Outcome::Bonded,
                Some(_) => Outcome::Steered,
                None => answer.outcome,
            },
            confined: false,
            exceptions: Vec::new(),
            link,
            runner_up: second.filter(|_| !peer_direct).and_then(name),
            reason,
            rule: rule.filter(|_| program_rule.is_none()).map(|rule| rule as u32 + 1),
            program_rule: program_rule.map(str::to_owned),
            rule_text: entry.map(|entry| matcher_text(&entry.matcher)),
            when: entry.and_then(|entry| when_text(&entry.when)),
            skipped: self.skipped(&subject, rule),
            scheduler: policy.scheduler.to_string(),
            class: Some(class.to_string()),
            affinity: Some(affinity_name(affinity).to_owned()),
            demand_bytes: Some(demand.get()),
            direction: Some(if direction == Direction::Up { "up" } else { "down" }.to_owned()),
            candidates: self.candidates(now, family, mode, &request, load_table, &answer),
            peer: peer_direct.then(|| question.destination.to_string()),
            paths: Vec::new(),
            program_known: Some(self.is_known(question)),
            optimum: self.optimum_view(direction),
            share: None,
        }
    }

    /// An entry of the policy in force, which has its condition.
    fn entry_in_force(&self, index: usize) -> &AppRule {
        self.config.policy.apps.get(index).unwrap_or(&self.in_force.apps[index])
    }

    /// Entries before `rule` that match, but whose condition does not hold now.
    fn skipped(&self, subject: &Subject<'_>, rule: Option<usize>) -> Vec<SkippedRule> {
        let earlier = self.config.policy.apps.iter().enumerate().take(rule.unwrap_or(usize::MAX));
        let skipped = earlier.filter(|(_, entry)| entry.matcher.matches(subject)).filter_map(|(place, entry)| {
            Some(SkippedRule {
                rule: place as u32 + 1,
                rule_text: matcher_text(&entry.matcher),
                when: when_text(&entry.when)?,
                unmet: self.unmet(&entry.when)?,
            })
        });
        skipped.collect()
    }

    /// Links that the flow may use, or why there are none.
    fn rule_answer(&self, subject: &Subject<'_>, rule: Option<usize>, family: Family) -> RuleAnswer {
        let none = |outcome, reason: String| RuleAnswer { mask: LinkSet::EMPTY, outcome, reason, strict: None, prefer: None };
        if self.config.policy.excludes(subject) {
            return none(Outcome::LeftAlone, "the configuration excludes it ([exclude])".to_owned());
        }
        if let Some(net) = self.network.protected.iter().find(|net| net.contains(&subject.destination)) {
            return none(Outcome::LeftAlone, format!("an IPsec policy covers {net}, so Braid leaves the flow alone"));
        }
        if !self.may_steer(subject.destination) {
            return none(
                Outcome::LeftAlone,
                "the system does not route it through a link's default route (a VPN, a static route, a local or on-link destination), so Braid leaves it alone".to_owned(),
            );
        }
        let devices = self.links.devices();
        let mask = |selectors: &[LinkSelector]| LinkSelector::mask(selectors, devices.iter().copied());
        let entry = rule.map(|rule| self.entry_in_force(rule));
        let strict = entry.and_then(|entry| entry.links.as_deref()).map(mask);
        let prefer = entry.map(|entry| &entry.prefer[..]).filter(|prefer| !prefer.is_empty()).map(mask);
        let answer = match admit(self.links.usable(family), self.standby(), strict, prefer) {
            Admission::Use(mask) => RuleAnswer { mask, ..none(Outcome::Steered, String::new()) },
            Admission::Deny => none(Outcome::Denied, "the rule is strict (links = [...]) and none of its links is usable now".to_owned()),
            Admission::LeaveAlone => none(Outcome::LeftAlone, format!("no link is usable for {family} now")),
        };
        RuleAnswer { strict, prefer, ..answer }
    }

    /// Whether flows of the program have been seen, or a rule names it.
    fn is_known(&self, question: &Question) -> bool {
        let seen = match &question.exe {
            Some(exe) => self.apps.ids_of(exe).next().is_some(),
            None => self.apps.iter().any(|(id, _)| id.name == question.name),
        };
        let policy = &self.config.policy;
        let programs = self.programs.applied().map(|rule| rule.matcher);
        let mut matchers = policy.apps.iter().map(|rule| rule.matcher.clone()).chain(policy.exclude.matchers()).chain(programs);
        seen || matchers.any(|matcher| {
            matcher.name.as_ref() == Some(&question.name)
                || matcher.exe.as_deref() == question.exe.as_deref().map(Path::new) && matcher.exe.is_some()
        })
    }

    /// What the kernel expects of such a flow: demand, direction, class, and class by pattern for rules.
    fn expected(&mut self, question: &Question) -> (ByteCount, Direction, Class, Class) {
        let ids: Vec<_> = match &question.exe {
            Some(exe) => self.apps.ids_of(exe).cloned().collect(),
            None => self.apps.iter().filter(|(id, _)| id.name == question.name).map(|(id, _)| id.clone()).collect(),
        };
        let classes = ids.iter().find_map(|id| self.apps.get(id)).map(AppRecord::kernel_classes);
        let by_name = || (braid_decide::class::by_name(&question.name).unwrap_or_default(), Class::Unclassified);
        let (class, by_pattern) = classes.unwrap_or_else(by_name);
        let learnt = self.steering.estimates().unwrap_or_default();
        // Demand of an earlier run is available before the program is seen in this run.
        // A client's path is not looked up in the file system: a program that no rule names is found by its name.
        let named = question.exe.as_deref().map(|exe| self.executables.of(Path::new(exe))).unwrap_or_default();
        let recalled = |app: &AppId| if named.is_empty() { app.name == question.name } else { named.contains(&app.exe) };
        let fits = |known: &&DemandEstimate| known.port == question.port && (ids.contains(&known.app) || recalled(&known.app));
        match learnt.iter().filter(fits).max_by_key(|known| known.count) {
            Some(known) if known.up > known.down => (known.down + known.up, Direction::Up, class, by_pattern),
            Some(known) => (known.down + known.up, Direction::Down, class, by_pattern),
            None => (self.config.policy.default_demand, Direction::Down, class, by_pattern),
        }
    }

    fn why(&self, mode: Mode, slot: usize, request: &Request, load_table: &LoadTable, affinity: Affinity) -> String {
        let seconds = |time: u64| time as f64 / f64::from(1 << 20);
        let mut text = match mode {
            Mode::OnlyOne => "it is the link that the system prefers (lowest metric)".to_owned(),
            Mode::VirtualStart => "its turn is next".to_owned(),
            Mode::CheapestInTime { target } => {
                let (finish, deadline) = (load_table.finish(slot, request), load_table.deadline(request, target));
                match target {
                    Some(target) if finish <= deadline => format!(
                        "it is the cheapest link that finishes within {:.3} s, the time that the total load takes at {target}",
                        seconds(deadline)
                    ),
                    Some(target) => {
                        format!("no link finishes in time to reach {target}, and this one finishes first, in {:.3} s", seconds(finish))
                    }
                    None => {
                        let (end, backlog) = (seconds(load_table.end(slot, request)), load_table.backlog(slot, request));
                        let (flows, load) = (load_table.loads[slot].flows, ByteCount::new(load_table.loads[slot].load[request.direction]));
                        format!(
                            "the flow is expected to end first there, in {end:.3} s: {} of its own behind {backlog} of the link's load, {load} of {flows} flow{}",
                            request.demand,
                            if flows == 1 { "" } else { "s" }
                        )
                    }
                }
            }
            Mode::LeastFinish => format!(
                "it finishes its load and the flow first, in {:.3} s: {} of load and {} of the flow",
                seconds(load_table.finish(slot, request)),
                ByteCount::new(load_table.loads[slot].load[request.direction]),
                request.demand
            ),
            Mode::LeastMakespan => {
                let (finish, makespan) = (seconds(load_table.finish(slot, request)), seconds(load_table.makespan(request)));
                if finish <= makespan {
                    format!(
                        "it finishes the flow in {finish:.3} s, before the busiest link finishes its load, in {makespan:.3} s; of such links the \
                         system prefers this one"
                    )
                } else {
                    format!(
                        "no link finishes the flow before the busiest one finishes its load; with this one all are done first, in {finish:.3} s"
                    )
                }
            }
            Mode::Random => {
                format!("the next flow draws it at random among {} links, each with the same probability", request.allowed.iter().count())
            }
        };
        if request.allowed.iter().count() == 1 {
            text = "it is the only allowed and usable link".to_owned();
        }
        match affinity {
            Affinity::None => {}
            Affinity::Destination => text += "; while the first flow lives, further flows of the program to this destination follow it",
            Affinity::Application => text += "; while the first flow lives, further flows of the program follow it",
        }
        text
    }

    fn candidates(
        &self,
        now: Time,
        family: Family,
        mode: Mode,
        request: &Request,
        load_table: &LoadTable,
        answer: &RuleAnswer,
    ) -> Vec<Candidate> {
        let standby = self.standby();
        let view = |link: &crate::links::Link| {
            let allowed = request.allowed.contains(link.slot);
            let (link_load, estimate) = (&load_table.loads[link.slot], link.estimate(request.direction, now));
            let never = |time: u64| (time != u64::MAX).then(|| ((u128::from(time) * 1_000_000) >> 20) as u64);
            Candidate {
                link: link.facts.name.clone(),
                allowed,
                reason: (!allowed).then(|| match link.usable(family) {
                    true => answer.why_not(link.slot, standby.contains(link.slot)).to_owned(),
                    false => link.reason().unwrap_or_else(|| format!("{family} is {} on it", link.family_state(family))),
                }),
                load_bytes: Some(link_load.load[request.direction]),
                capacity_bps: Some(estimate.rate.bps()),
                capacity_assumed: !estimate.is_known(),
                finish_us: never(load_table.finish(link.slot, request)),
                end_us: (mode == Mode::CheapestInTime { target: None }).then(|| load_table.end(link.slot, request)).and_then(never),
                virtual_start: (mode == Mode::VirtualStart)
                    .then(|| load_table.virtual_start(link.slot).saturating_sub(load_table.virtual_time) as f64 / f64::from(1 << 20)),
                rank: Some(link_load.rank).filter(|rank| *rank != u32::MAX),
                flows: Some(u64::from(link_load.flows)),
            }
        };
        self.links.values().map(view).collect()
    }
}
