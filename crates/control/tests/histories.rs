//! Random histories of the whole core in virtual time, checked against a small model: links appear, disappear, change their address, stop
//! and start answering; flows of every kind; relays and servers come and go; reloads, jumps of the wall clock, and a failing backend.
//!
//! Time jumps from one due time to the next, as [`Core::poll_timeout`] reports them. A tick between two of them must have no effect.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use braid_api::{FactChange, Reserve};
use braid_bond::codes;
use braid_control::Cause;
use braid_control::config::{Config, Detect, EnergyService};
use braid_control::core::{Core, Due, Kept, Names, NewRule, ProfileQuestion, Program, Question, ServerEvent};
use braid_control::fake::network::{facts, network};
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, ExeId, RedirectedFlow, Steering, SteeringError};
use braid_decide::detection::DetectionAnswer;
use braid_decide::health::Outcome;
use braid_decide::policy::{
    AppMatcher, AppRule, LinkMatcher, LinkRule, LinkSelector, Pattern, Portion, Preference, ProbeMode, Scheduler, When,
};
use braid_decide::refusals::BELIEVED;
use braid_decide::tradeoff::Supply;
use braid_model::key::PublicKey;
use braid_model::{Application, ByteCount, Class, DeviceModel, Direction, Family, FlowId, LinkFacts, LinkIndex, Rate, Time, Traffic};

/// Environment variable with the seed of one history, to reproduce a failure.
const SEED: &str = "BRAID_SEED";
/// Environment variable with the number of histories.
const HISTORIES: &str = "BRAID_HISTORIES";
const DEFAULT_HISTORIES: u64 = 200;

/// Number of inputs in one history.
const STEPS: usize = 60;
/// A link that has worked, or has been silent while it was probed, for this long must be judged so.
const LONG: Duration = Duration::from_secs(400);
/// No flow of a link that has worked for this long may be ended.
const SOUND: Duration = Duration::from_secs(60);

/// Random numbers from a seed (splitmix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> Option<T> {
        (!all.is_empty()).then(|| all[self.below(all.len())].clone())
    }

    /// A random duration from a microsecond to half a minute; each magnitude is equally likely.
    fn span(&mut self) -> Duration {
        let max = [20, 200, 1_000, 5_000, 30_000][self.below(5)];
        Duration::from_micros(1 + self.next() % (max * 1000))
    }
}

struct FakeNames;

impl Names for FakeNames {
    fn executable(&mut self, _path: &Path) -> Option<ExeId> {
        None
    }
    fn cgroup(&mut self, _path: &str) -> Option<(u64, u32)> {
        None
    }
    fn application(&mut self, app: &AppId, _process: u32, _cgroup: u64) -> (Application, Option<String>) {
        (Application { exe: None, name: app.name.clone() }, None)
    }
}

/// A device of the model, with the state of its network.
struct Device {
    facts: LinkFacts,
    answering: bool,
    /// Since when nothing about it has changed.
    since: Time,
    /// Since when every probe of it could be sent.
    asked: Time,
}

struct History {
    chance: Chance,
    core: Core<FakeSteering>,
    now: Time,
    devices: BTreeMap<u32, Device>,
    /// Pending probes: when they end, and how.
    probes: Vec<(Time, LinkIndex, Family, Outcome)>,
    /// Pending questions: when they are answered.
    questions: Vec<(Time, Question)>,
    /// Devices to be identified, and questions for the energy service.
    identify: Vec<(LinkIndex, String)>,
    profile_questions: Vec<ProfileQuestion>,
    flows: Vec<FlowId>,
    /// Flows that the core has ended.
    stuck: BTreeSet<FlowId>,
    relays: BTreeSet<&'static str>,
    /// Destinations that each relay refuses, and since when.
    refusals: BTreeMap<(&'static str, IpAddr), Time>,
    /// Held connections, with the latest time at which they must go on, and the number of held ones so far.
    held: BTreeMap<FlowId, Time>,
    all_held: u64,
    /// Hosts that have answered that they run Braid.
    ran: BTreeSet<IpAddr>,
    /// Whether every n-th call of the backend fails, and since when no call does.
    chaos: bool,
    calm_since: Time,
    /// Log of events for the message of a failure.
    log: Vec<String>,
}

const RELAYS: [&str; 2] = ["home", "office"];

/// Destinations: public ones, and private ones that relays may refuse.
fn hosts() -> Vec<IpAddr> {
    ["1.1.1.1", "8.8.4.4", "93.184.216.34", "192.168.77.1", "172.16.9.9"].map(|host| host.parse().unwrap()).into()
}

fn config(chance: &mut Chance) -> Config {
    let mut config = Config::default();
    config.policy.scheduler = chance.of(&Scheduler::ALL).unwrap();
    config.policy.power_saving = chance.one_in(4);
    config.probe = if chance.one_in(2) { ProbeMode::Continuous } else { ProbeMode::OnDemand };
    config.reconnect_after =
        [None, Some(Duration::from_millis(200)), Some(Duration::from_secs(5)), Some(Duration::from_secs(90))][chance.below(4)];
    config.destroy_pinned = chance.one_in(3);
    if chance.one_in(2) {
        let address = format!("192.0.2.1:{}", 1 + chance.below(2)).parse().unwrap();
        config.energy_service = Some(EnergyService { address, key: PublicKey::from([7; 32]) });
    }
    config.detect = [Detect::Nobody, Detect::Everybody][chance.below(2)].clone();
    if chance.one_in(2) {
        config.detect_networks = vec!["192.168.0.0/16".parse().unwrap()];
    }
    config.hold = [Duration::ZERO, Duration::from_millis(300), Duration::from_secs(2)][chance.below(3)];
    if chance.one_in(3) {
        let matcher = LinkMatcher { name: Some(Pattern::new("net2")), ..LinkMatcher::default() };
        config.policy.links.push(LinkRule {
            matcher,
            reset_day: 1,
            metered: true,
            cap: Some(ByteCount::new(5_000_000)),
            ..LinkRule::default()
        });
    }
    let when = |chance: &mut Chance| match chance.below(6) {
        0 => When { facts: [("moving".to_owned(), "true".to_owned())].into(), ..When::default() },
        1 => When { running: Some("curl".to_owned()), ..When::default() },
        2 => When { time: Some("11:59-12:01".parse().unwrap()), ..When::default() },
        3 => When { battery_below: Some(0.5), ..When::default() },
        4 => When { ssid: Some("home".to_owned()), ..When::default() },
        _ => When::default(),
    };
    if chance.one_in(2) {
        let matcher = LinkMatcher { name: Some(Pattern::new("net3")), ..LinkMatcher::default() };
        config.policy.links.push(LinkRule { matcher, when: when(chance), priority: 1, reset_day: 1, ..LinkRule::default() });
    }
    if chance.one_in(2) {
        let matcher = AppMatcher { port: Some(443), ..AppMatcher::default() };
        let prefer = vec![LinkSelector::Name(Pattern::new("net2"))];
        config.policy.apps.push(AppRule { matcher, when: when(chance), prefer, ..AppRule::default() });
    }
    if chance.one_in(3) {
        let links = Some(vec![LinkSelector::Name(Pattern::new("net1"))]);
        let matcher = AppMatcher { port: Some(22), ..AppMatcher::default() };
        config.policy.apps.push(AppRule { matcher, links, ..AppRule::default() });
        let matcher = AppMatcher { class: Some(Class::RealTime), ..AppMatcher::default() };
        config.policy.apps.push(AppRule { matcher, class: Some(Class::Bulk), ..AppRule::default() });
    }
    if chance.one_in(2) {
        let portion = |chance: &mut Chance| [None, Some(Portion::Rate(Rate::from_mbps(2))), Some(Portion::Share(0.3))][chance.below(3)];
        let matcher = AppMatcher { port: Some(443), ..AppMatcher::default() };
        let (weight, rate, guarantee) = ([0.5, 1.0, 3.0][chance.below(3)], portion(chance), portion(chance));
        config.policy.apps.push(AppRule { matcher, weight, rate, guarantee, ..AppRule::default() });
    }
    config
}

impl History {
    fn new(seed: u64) -> Self {
        let mut chance = Chance(seed);
        let now = Time::from_millis(1000);
        let mut steering = FakeSteering::default();
        steering.set_moves_connects(chance.one_in(2));
        let core = Core::new(steering, Box::new(FakeNames), config(&mut chance), now).unwrap();
        let mut history = Self {
            chance,
            core,
            now,
            devices: BTreeMap::new(),
            probes: Vec::new(),
            questions: Vec::new(),
            identify: Vec::new(),
            profile_questions: Vec::new(),
            flows: Vec::new(),
            stuck: BTreeSet::new(),
            relays: BTreeSet::new(),
            refusals: BTreeMap::new(),
            held: BTreeMap::new(),
            all_held: 0,
            ran: BTreeSet::new(),
            chaos: false,
            calm_since: now,
            log: Vec::new(),
        };
        (1..=2).for_each(|index| history.add(index));
        let filter = history.core.set_owner_filter(now, None);
        history.check(filter);
        history.set_network();
        history
    }

    /// Checks the result of an input: it may fail only while the backend does.
    fn check(&self, result: Result<(), SteeringError>) {
        assert!(self.chaos || result.is_ok(), "{result:?} after {:#?}", self.log);
    }

    fn note(&mut self, what: String) {
        self.log.push(format!("{:?} {what}", self.now));
    }

    fn add(&mut self, index: u32) {
        let device =
            Device { facts: facts(index, &format!("net{index}")), answering: !self.chance.one_in(5), since: self.now, asked: self.now };
        self.devices.insert(index, device);
    }

    /// The daemon repeats this until it succeeds, which happens when the backend works again.
    fn set_network(&mut self) {
        let devices: Vec<_> = self.devices.values().map(|device| device.facts.clone()).collect();
        let mut taken = self.core.on_network(self.now, network(&devices));
        if taken.is_err() && self.chaos {
            self.calm();
            taken = self.core.on_network(self.now, network(&devices));
        }
        self.check(taken);
        self.act();
    }

    /// Whether a flow's link delivers answers.
    fn answers(&mut self, id: FlowId) -> bool {
        let link = self.core.steering().living().find(|row| row.id == id).map(|row| row.link.0);
        link.and_then(|index| self.devices.get(&index)).is_some_and(|device| device.answering && device.facts.carrier)
    }

    fn calm(&mut self) {
        (self.chaos, self.calm_since) = (false, self.now);
        self.core.steering().set_chaos(None);
        // State that could not be read meanwhile is read at the next tick.
        let taken = self.core.tick(self.now);
        self.check(taken);
    }

    /// Carries out the actions of the core.
    fn act(&mut self) {
        let actions = self.core.take_actions();
        // The network never shows them, so they count as removed by somebody else.
        if actions.plan.is_some() && self.chance.one_in(2) {
            self.core.on_set(self.now, Kept::Tables);
        }
        for plan in actions.probes {
            let answering = self.devices.get(&plan.link.0).is_some_and(|device| device.answering && device.facts.carrier);
            let rtt = Duration::from_millis(5 + self.chance.next() % 60);
            let not_sent = self.chance.one_in(20) || plan.gateways.is_empty() && plan.targets.is_empty();
            if let Some(device) = self.devices.get_mut(&plan.link.0).filter(|_| not_sent) {
                device.asked = self.now;
            }
            let (after, outcome) = match answering {
                _ if not_sent => (Duration::ZERO, Outcome::NotSent),
                true => (rtt, Outcome::Alive { rtt }),
                false => (plan.timeout, Outcome::Silent),
            };
            self.probes.push((self.now + after, plan.link, plan.family, outcome));
        }
        for flow in actions.stuck {
            assert!(self.stuck.insert(flow.id), "{flow:?} is ended twice: {:#?}", self.log);
            let sound = self.devices.get(&flow.link.0).filter(|device| device.answering && device.facts.carrier);
            let capped = self
                .core
                .links(self.now)
                .iter()
                .any(|link| link.name == format!("net{}", flow.link.0) && link.state == braid_api::LinkState::Capped);
            let sound = sound.is_some_and(|device| self.now.since(device.since) > SOUND) && !capped;
            assert!(flow.tunnelled || !sound, "{flow:?} is ended on a sound link: {:#?}", self.log);
            self.core.steering().close(self.now, flow.id);
            self.flows.retain(|known| *known != flow.id);
        }
        self.identify.extend(actions.identify);
        self.profile_questions.extend(actions.profile_questions);
        for released in actions.released {
            assert!(self.held.remove(&released).is_some(), "{released:?} goes on, but was not held: {:#?}", self.log);
        }
        let late = self.held.values().find(|until| **until < self.now);
        assert!(self.chaos || late.is_none(), "a connection is held longer than allowed: {late:?}, {:#?}", self.log);
        for question in actions.questions {
            let after = Duration::from_millis(1 + self.chance.next() % 4000);
            self.questions.push((self.now + after, question));
        }
    }

    /// Advances the time from one due time to the next.
    fn pass(&mut self, span: Duration) {
        let end = self.now + span;
        loop {
            let (due, why) = self.core.poll_timeout(self.now);
            let answers = self.probes.iter().map(|probe| probe.0).chain(self.questions.iter().map(|question| question.0));
            let next = answers.chain([end, due]).min().unwrap().max(self.now);
            self.tick_between(next.min(due));
            self.now = next;
            if let Some(at) = self.probes.iter().position(|probe| probe.0 <= self.now) {
                let (_, link, family, outcome) = self.probes.swap_remove(at);
                let taken = self.core.on_probe(self.now, link, family, outcome);
                self.check(taken);
            } else if let Some(at) = self.questions.iter().position(|question| question.0 <= self.now) {
                let (_, question) = self.questions.swap_remove(at);
                self.answer(&question);
            } else if due <= self.now {
                if why == Due::Heartbeat && !self.chaos {
                    self.tick_without_effect(self.now, &format!("only a heartbeat was due at {due:?}"));
                }
                let taken = self.core.tick(self.now);
                self.check(taken);
                let (after, reason) = self.core.poll_timeout(self.now);
                assert!(after > self.now, "{why:?} was due and {reason:?} is overdue after a tick: {:#?}", self.log);
            } else {
                return;
            }
            self.act();
        }
    }

    /// Ticks before `until`, when nothing is due, and checks that this changes nothing.
    fn tick_between(&mut self, until: Time) {
        let room = until.since(self.now).as_nanos() as u64;
        if room < 2 || self.chaos || !self.chance.one_in(3) {
            return;
        }
        // A forgotten timer shows most likely just before the next due time.
        let ahead = if self.chance.one_in(2) { room - 1 } else { 1 + self.chance.next() % (room - 1) };
        let at = self.now + Duration::from_nanos(ahead);
        self.tick_without_effect(at, &format!("nothing was due before {:?}", self.core.poll_timeout(self.now)));
        self.now = at;
    }

    /// Ticks and checks that there was nothing to do.
    fn tick_without_effect(&mut self, at: Time, why: &str) {
        let before = self.core.steering().changes();
        self.core.tick(at).unwrap();
        let actions = self.core.take_actions();
        let idle = actions.plan.is_none() && actions.probes.is_empty() && actions.stuck.is_empty() && actions.questions.is_empty();
        let idle = idle && actions.released.is_empty() && actions.identify.is_empty() && actions.profile_questions.is_empty();
        let quiet = self.core.steering().changes() == before;
        assert!(idle && quiet, "a tick at {at:?} had an effect, although {why}: {actions:?}, {:#?}", self.log);
    }

    fn answer(&mut self, question: &Question) {
        let key = |number| PublicKey::from([number; 32]);
        let answer = match self.chance.below(8) {
            0 => DetectionAnswer::Silent,
            1 => DetectionAnswer::Unfinished,
            2 if question.expect.is_some() => DetectionAnswer::KeyMismatch,
            _ => DetectionAnswer::Runs(question.expect.unwrap_or(key(7))),
        };
        self.note(format!("{} answers over slot {}: {answer:?}", question.host, question.link.slot));
        if matches!(answer, DetectionAnswer::Runs(_)) {
            self.ran.insert(question.host);
        }
        let taken = self.core.on_answer(self.now, question.host, question.link.slot, answer);
        self.check(taken);
    }

    fn step(&mut self) {
        let index = 1 + self.chance.below(4) as u32;
        match self.chance.below(26) {
            0 => {
                match self.devices.remove(&index) {
                    Some(_) => self.note(format!("net{index} disappears")),
                    None => {
                        self.add(index);
                        self.note(format!("net{index} appears"));
                    }
                }
                self.set_network();
            }
            1 | 2 => {
                let (now, renumber) = (self.now, self.chance.one_in(3));
                let Some(device) = self.devices.get_mut(&index) else { return };
                device.since = now;
                if renumber {
                    let host = 2 + (now.as_nanos() % 200) as u8;
                    device.facts.addresses = vec![ipnet::IpNet::new(IpAddr::from([10, 0, index as u8, host]), 24).unwrap()];
                } else {
                    device.facts.carrier = !device.facts.carrier;
                }
                let text = format!("net{index} is now {:?} {}", device.facts.addresses, device.facts.carrier);
                self.note(text);
                self.set_network();
            }
            3 => {
                let now = self.now;
                let Some(device) = self.devices.get_mut(&index) else { return };
                (device.answering, device.since) = (!device.answering, now);
                let text = format!("net{index} answers: {}", device.answering);
                self.note(text);
            }
            4..8 => {
                let (host, port) = (self.chance.of(&hosts()).unwrap(), [22, 443, 5060][self.chance.below(3)]);
                let app = AppId { exe: ExeId { device: 1, inode: 9 }, name: ["ssh", "curl", "firefox"][self.chance.below(3)].to_owned() };
                let steered = self.core.steering().connect(self.now, &app, 1000, (host, port));
                self.note(format!("{} connects to {host}:{port}: {steered:?}", app.name));
                if self.chance.one_in(2) {
                    self.arrive(app.clone(), (host, port).into());
                }
                if let Steered::To(_, id) = steered {
                    self.flows.push(id);
                    if self.answers(id) && !self.chance.one_in(4) {
                        self.core.steering().answer(self.now, id);
                        // Answered handshakes cause no event: they are read at each tick.
                        let taken = self.core.tick(self.now);
                        self.check(taken);
                    }
                }
                let events = self.core.steering().events(100);
                let taken = self.core.on_events(self.now, events);
                self.check(taken);
            }
            8..11 => {
                let Some(id) = self.chance.of(&self.flows) else { return };
                let (rx, tx) = (self.chance.next() % 2_000_000, self.chance.next() % 20_000);
                match self.chance.below(4) {
                    0 => self.core.steering().time_out(id),
                    1 => {
                        self.core.steering().close(self.now, id);
                        self.flows.retain(|known| *known != id);
                    }
                    _ if self.answers(id) => self.core.steering().transfer(id, ByteCount::new(rx), ByteCount::new(tx)),
                    _ => self.core.steering().transfer(id, ByteCount::ZERO, ByteCount::new(tx)),
                }
                let events = self.core.steering().events(100);
                let taken = self.core.on_events(self.now, events);
                self.check(taken);
            }
            11 => {
                let (relay, ready) = (RELAYS[self.chance.below(2)], self.chance.one_in(2));
                self.note(format!("{relay} is reachable: {ready}"));
                let taken = self.core.set_peer_ready(self.now, relay, ready);
                self.check(taken);
                if !ready {
                    self.relays.remove(relay);
                } else if self.relays.insert(relay) {
                    // The new session may have other rights.
                    self.refusals.retain(|(of, _), _| *of != relay);
                }
            }
            12 => {
                let (relay, host) = (RELAYS[self.chance.below(2)], self.chance.of(&hosts()[3..]).unwrap());
                self.note(format!("{relay} refuses {host}"));
                let (_, taken) = self.core.on_refused(self.now, relay, host, codes::NOT_OPENED);
                self.refusals.insert((relay, host), self.now);
                self.check(taken);
            }
            13 => {
                let next = config(&mut self.chance);
                self.note(format!("reload: {} {:?} {:?}", next.policy.scheduler.name(), next.reconnect_after, next.detect));
                let mut taken = self.core.reconfigure(self.now, next.clone());
                if taken.is_err() && self.chaos {
                    self.calm();
                    taken = self.core.reconfigure(self.now, next);
                }
                self.check(taken);
            }
            14 => {
                let supply = (!self.chance.one_in(3)).then(|| Supply {
                    level: self.chance.below(101) as f64 / 100.0,
                    plugged: self.chance.one_in(2),
                    power: None,
                });
                let taken = self.core.on_supply(self.now, supply);
                self.check(taken);
            }
            15 => {
                if self.chaos {
                    self.note("the backend works again".to_owned());
                    self.calm();
                } else {
                    let every = 2 + self.chance.next() % 9;
                    self.note(format!("each {every}th call of the backend fails"));
                    self.chaos = true;
                    self.core.steering().set_chaos(Some(every));
                }
            }
            20 => {
                let span = self.chance.one_in(2).then(|| 1 + self.chance.next() % 60_000);
                let value = (!self.chance.one_in(3)).then(|| ["true", "false"][self.chance.below(2)].to_owned());
                self.note(format!("moving is set to {value:?} for {span:?}"));
                let change = FactChange { name: "moving".to_owned(), value, for_ms: span };
                let set = self.core.set_fact(self.now, &change);
                assert!(self.chaos || set.is_ok_and(|_| true) || change.value.is_none(), "{:#?}", self.log);
            }
            21 => {
                // The local time jumps, mostly to just before a rule's window begins or ends.
                let noon = 12 * 3600 + self.chance.next() % 150;
                let time = if self.chance.one_in(3) { self.chance.next() % 86_400 } else { noon - 75 };
                self.note(format!("the local time is {time} s"));
                let taken = self.core.on_clock(self.now, Duration::from_secs(time));
                self.check(taken);
            }
            22 => {
                let moving = [None, Some(true), Some(false)][self.chance.below(3)];
                let taken = self.core.on_moving(self.now, moving);
                self.check(taken);
            }
            23 => {
                let ssids = if self.chance.one_in(2) { BTreeSet::from(["home".to_owned()]) } else { BTreeSet::new() };
                let taken = self.core.on_ssids(self.now, ssids);
                self.check(taken);
                let app = AppId { exe: ExeId { device: 1, inode: 9 }, name: "curl".to_owned() };
                let apps = if self.chance.one_in(2) { BTreeSet::from([app]) } else { BTreeSet::new() };
                let taken = self.core.on_bonded_apps(self.now, apps);
                self.check(taken);
            }
            16 | 17 => {
                // Mostly a server whose flows are redirected, so that closed ports of such servers are common enough to see them expire.
                let used = self.core.steering().servers().to_vec();
                let ran: Vec<_> = self.ran.iter().copied().collect();
                let known = if used.is_empty() || self.chance.one_in(4) { ran } else { used };
                let Some(host) = self.chance.of(&known) else { return };
                let events = [ServerEvent::Lost, ServerEvent::Reached, ServerEvent::KeyMismatch, ServerEvent::NotLocal];
                let port = [443, 22][self.chance.below(2)];
                let event = if self.chance.one_in(2) { ServerEvent::Closed(port) } else { events[self.chance.below(4)] };
                self.note(format!("event of {host}: {event:?}"));
                let taken = self.core.on_server(self.now, host, event);
                self.check(taken);
            }
            24 | 25 => self.change_program_rule(),
            18 => self.answer_about_devices(),
            _ => self.poll(),
        }
        self.act();
    }

    /// A first connection to an unknown host arrives at the daemon.
    fn arrive(&mut self, app: AppId, remote: SocketAddr) {
        self.all_held += 1;
        let flow = RedirectedFlow {
            id: FlowId(1 << 40 | self.all_held),
            remote,
            app,
            process: 1,
            user: 1000,
            cgroup: 1,
            class: Class::Unclassified,
            rule: None,
            direction: Direction::Down,
            demand: ByteCount::ZERO,
            started: self.now,
            filtered: self.chance.one_in(8),
            held: !self.chance.one_in(8),
            forwarded: false,
        };
        let until = self.now + self.core.config().hold;
        let held = self.core.hold(self.now, &flow);
        self.note(format!("a first connection to {remote} is held: {held}"));
        if held {
            self.held.insert(flow.id, until);
        }
    }

    /// A program adds or removes a rule, or ends.
    fn change_program_rule(&mut self) {
        let name = ["one", "two", "three"][self.chance.below(3)];
        let program = self.chance.one_in(2).then(|| Program { process: 7, started: 1, name: "client".to_owned() });
        if self.chance.one_in(5) {
            self.note("a program ends".to_owned());
            let ended = self.core.on_program_ended(self.now, &Program { process: 7, started: 1, name: "client".to_owned() });
            return self.check(ended.map(drop));
        }
        if self.chance.one_in(5) {
            let removed = self.core.remove_rule(self.now, name);
            self.note(format!("the rule {name} is removed: {removed:?}"));
            return assert!(self.chaos || removed.is_ok_and(|_| true) || !self.core.has_program_rule(name));
        }
        let matcher = match self.chance.below(3) {
            0 => AppMatcher { port: Some(443), ..AppMatcher::default() },
            1 => AppMatcher { name: Some("curl".to_owned()), ..AppMatcher::default() },
            _ => AppMatcher { port: Some(5060), ..AppMatcher::default() },
        };
        let links = self.chance.one_in(3).then(|| vec![LinkSelector::Name(Pattern::new("net1"))]);
        let rule = AppRule { matcher, links, weight: [1.0, 2.0][self.chance.below(2)], ..AppRule::default() };
        let reserve = self.chance.one_in(2).then(|| Reserve { down_bps: Some(48_000 << self.chance.below(8)), ..Reserve::default() });
        let lease = Duration::from_millis(1000 + self.chance.next() % 60_000);
        let new = NewRule { name, program, rule, reserve: reserve.as_ref(), lease };
        let put = self.core.put_rule(self.now, new);
        self.note(format!("a program asks for the rule {name} for {lease:?}, reserving {reserve:?}: {put:?}"));
        assert!(self.chaos || put.is_ok() || put.is_err_and(|error| error.cause == Cause::Conflict), "{:#?}", self.log);
    }

    /// Answers a look-up of a device's model, and a question for the energy service.
    fn answer_about_devices(&mut self) {
        if !self.identify.is_empty() {
            let at = self.chance.below(self.identify.len());
            let (link, device) = self.identify.swap_remove(at);
            let model = (!self.chance.one_in(3)).then(|| DeviceModel { id: Some("8086:1229".to_owned()), ..DeviceModel::default() });
            self.note(format!("{device} is {model:?}"));
            let taken = self.core.on_model(self.now, link, &device, model);
            self.check(taken);
        }
        if !self.profile_questions.is_empty() {
            let at = self.chance.below(self.profile_questions.len());
            let question = self.profile_questions.swap_remove(at);
            let answer = if self.chance.one_in(2) { Ok(Vec::new()) } else { Err("no answer".to_owned()) };
            self.note(format!("the energy service answers {question:?}: {answer:?}"));
            let taken = self.core.on_profiles(self.now, &question, answer);
            self.check(taken);
        }
    }

    /// Polls like the daemon: first the devices' counters, with a wall clock that may jump, then the flows.
    fn poll(&mut self) {
        let mut moved: BTreeMap<LinkIndex, Traffic> = BTreeMap::new();
        for row in self.core.steering().living() {
            *moved.entry(row.link).or_default() += Traffic { rx: row.rx, tx: row.tx };
        }
        let counters: Vec<_> = self
            .devices
            .keys()
            .map(|index| LinkIndex(*index))
            .map(|index| (index, moved.get(&index).copied().unwrap_or_default()))
            .collect();
        let unix = if self.chance.one_in(20) { (self.chance.next() % 4_000_000_000) as i64 } else { 1_795_219_200 };
        self.core.on_counters(self.now, unix, &counters);
        if self.chance.one_in(4) {
            let rates = [(self.chance.below(4) as u8, Rate::from_mbps(1 + self.chance.next() % 100))].into();
            let taken = self.core.on_path_rates(self.now, &rates);
            self.check(taken);
        }
        let taken = self.core.poll(self.now);
        self.check(taken);
    }

    /// Checks the invariants; while the backend fails, only those that hold anyway.
    fn check_model(&mut self) {
        let now = self.now;
        let links = self.core.links(now);
        let names: BTreeSet<_> = self.devices.values().map(|device| device.facts.name.clone()).collect();
        assert_eq!(links.iter().map(|link| link.name.clone()).collect::<BTreeSet<_>>(), names, "{:#?}", self.log);
        if self.chaos || now < self.calm_since + Duration::from_secs(1) {
            return;
        }
        let params = self.core.steering().params().expect("there are parameters").clone();
        let of = |name: &str| (0..32).find(|slot| params.links[*slot].as_ref().is_some_and(|link| link.name == name));
        let slots: BTreeSet<_> = names.iter().map(|name| of(name)).collect();
        assert!(slots.len() == names.len() && !slots.contains(&None), "each link has its own slot: {:#?}", self.log);
        let states: Vec<_> = links.iter().map(|link| (&link.name, &link.state)).collect();
        let configured = |device: &&Device| device.facts.carrier;
        let uncapped =
            |device: &&Device| links.iter().any(|link| link.name == device.facts.name && link.state != braid_api::LinkState::Capped);
        let usable = |device: &Device| params.usable.v4.contains(of(&device.facts.name).unwrap());
        for device in self.devices.values() {
            assert!(!usable(device) || device.facts.carrier, "{} has no carrier: {:#?}", device.facts.name, self.log);
        }
        let able: Vec<_> = self.devices.values().filter(configured).filter(uncapped).collect();
        assert!(
            able.is_empty() || able.iter().any(|device| usable(device)),
            "no link is usable although some are configured: {:#?}",
            self.log
        );
        let settled = |device: &&&Device| now.since(device.since.max(device.asked)) > LONG;
        for device in able.iter().filter(settled).filter(|device| device.answering) {
            assert!(usable(device), "{} has answered for a long time: {states:?} {:#?}", device.facts.name, self.log);
        }
        if able.iter().filter(settled).any(|device| device.answering) {
            for device in able.iter().filter(settled).filter(|device| !device.answering) {
                assert!(!usable(device), "{} is silent: {states:?} {:#?}", device.facts.name, self.log);
            }
        }
        let believed = |relay: &&str, host: &IpAddr| self.refusals.get(&(*relay, *host)).is_some_and(|at| now < *at + BELIEVED);
        let refused = |host: &IpAddr| !self.relays.is_empty() && self.relays.iter().all(|relay| believed(relay, host));
        let refused: BTreeSet<_> = hosts().into_iter().filter(refused).collect();
        assert_eq!(self.core.steering().refused().iter().copied().collect::<BTreeSet<_>>(), refused, "{:#?}", self.log);
        let servers: Vec<_> = self.core.steering().servers().to_vec();
        assert!(servers.iter().all(|host| self.ran.contains(host)), "{servers:?} {:#?}", self.log);
        // The kernel's rules are those whose condition holds, as the policy shows it.
        let shown: Vec<bool> = self.core.policy().apps.iter().map(|entry| entry.unmet.is_none()).collect();
        let kernel: Vec<bool> = params.rules.iter().map(|rule| rule.matching.exe.as_ref().is_none_or(|exes| !exes.is_empty())).collect();
        assert_eq!(kernel[..shown.len()], shown, "{:#?}", self.log);
        let programs = self.core.program_rules(now);
        let (applied, in_kernel) =
            (programs.iter().filter(|rule| rule.entry.unmet.is_none()).count(), kernel[shown.len()..].iter().filter(|rule| **rule).count());
        assert_eq!(in_kernel, applied, "{programs:?} {:#?}", self.log);
        let asks_now = |rule: &braid_api::ProgramRule| rule.reservation.is_some() || rule.entry.weight != 1.0;
        let asks = |rule: &AppRule| rule.preference() != Preference::default();
        if !self.core.config().policy.apps.iter().any(asks) && !programs.iter().any(asks_now) {
            assert!(self.core.steering().shapes().is_empty(), "flows are limited although nothing asks for it: {:#?}", self.log);
        }
        let beat = self.core.steering().last_heartbeat().unwrap_or_default();
        assert!(now.since(beat) < Duration::from_secs(2), "steering has stopped: {:#?}", self.log);
    }
}

/// Runs one history from `seed`.
fn run(seed: u64) {
    let mut history = History::new(seed);
    for _ in 0..STEPS {
        history.step();
        let mut span = history.chance.span();
        // Refusals expire after an hour, which would take too long with continuous probes.
        if history.core.config().probe == ProbeMode::OnDemand && history.chance.one_in(STEPS) {
            span += BELIEVED;
        }
        history.pass(span);
        history.check_model();
    }
    // The backend works again; after a while the state must be correct.
    history.calm();
    history.pass(Duration::from_secs(3));
    history.poll();
    history.act();
    history.pass(LONG + Duration::from_secs(1));
    history.check_model();
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the seed comes from the environment, and the test prints its speed")]
fn random_histories_leave_nothing_overdue_and_match_the_model() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")));
    let given = number(SEED);
    let count = given.map_or_else(|| number(HISTORIES).unwrap_or(DEFAULT_HISTORIES), |_| 1);
    let first = given.unwrap_or_else(|| std::process::id().into());
    let began = Instant::now();
    for index in 0..count {
        let seed = first.wrapping_add(index.wrapping_mul(0x1_0000_0001));
        if std::panic::catch_unwind(|| run(seed)).is_err() {
            panic!("{SEED}={seed} reproduces this history");
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{count} histories of {STEPS} inputs from seed {first}: {:.0} a second", count as f64 / seconds);
}
