//! The daemon's mind on a fake system: what it decides when links come, die, return and fill up.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use braid_decide::detection::{Answer, FRESH};
use braid_decide::energy::{Profile, Row, Technology};
use braid_decide::health::Outcome;
use braid_decide::policy::{AppMatcher, AppRule, Carry, LinkMatcher, LinkRule, LinkSelector, Pattern, Policy, ProbeMode, Scheduler};
use braid_decide::tradeoff::{Supply, UtilityFunction, UtilityRule, Weights};
use braid_engine::config::Config;
use braid_engine::core::{Core, Names, Question, ServerNews};
use braid_model::{
    Application, Bytes, Class, DefaultRoute, Direction, Family, FlowId, LinkFacts, LinkIndex, LinkKind, NetworkSnapshot, NextHop,
    PerFamily, Power, Rate, Role, RouteFacts, RouteKind, RuleAction, RuleFacts, Time,
};
use braid_peer::keys::PublicKey;
use braid_platform::fake::{FakeSteering, Steered};
use braid_platform::steering::{AppId, ExeId, FlowRow, RedirectedFlow, Steering, SteeringEvent};

const RTT: Duration = Duration::from_millis(20);
const SERVER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 10));
/// 21 November 2026.
const UNIX: i64 = 1_795_219_200;

struct FakeNames(BTreeMap<String, u64>);

impl Names for FakeNames {
    fn executable(&mut self, path: &Path) -> Option<ExeId> {
        self.0.get(path.to_str()?).map(|inode| ExeId { device: 1, inode: *inode })
    }
    fn cgroup(&mut self, _path: &str) -> Option<(u64, u32)> {
        None
    }
    fn application(&mut self, app: &AppId, _process: u32, _cgroup: u64) -> (Application, Option<String>) {
        (Application { exe: Some(format!("/usr/bin/{}", app.name).into()), name: app.name.clone() }, None)
    }
    fn model(&mut self, device: &str) -> Option<String> {
        (device == "wlan0").then(|| "Intel 82559".to_owned())
    }
}

fn facts(index: u32, name: &str) -> LinkFacts {
    let route = DefaultRoute { gateway: Some(format!("10.0.{index}.1").parse().unwrap()), metric: 100 + index };
    LinkFacts {
        index: LinkIndex(index),
        name: name.to_owned(),
        kind: LinkKind::Wired,
        mac: None,
        mtu: 1500,
        carrier: true,
        nominal: None,
        addresses: vec![format!("10.0.{index}.2/24").parse().unwrap()],
        gateways: PerFamily { v4: vec![route], v6: vec![] },
        resolvers: vec![],
    }
}

fn main_rule() -> RuleFacts {
    RuleFacts {
        family: Family::V4,
        priority: 32766,
        source: None,
        destination: None,
        mark: None,
        input: None,
        output: None,
        conditional: false,
        invert: false,
        action: RuleAction::Table(254),
        suppress_prefix_len: None,
        suppress_group: false,
        ours: false,
    }
}

fn network(devices: &[LinkFacts]) -> NetworkSnapshot {
    let routes = devices.iter().flat_map(|device| {
        device.gateways.v4.iter().map(|route| RouteFacts {
            table: 254,
            destination: "0.0.0.0/0".parse().unwrap(),
            kind: RouteKind::Unicast,
            metric: route.metric,
            hops: vec![NextHop { device: device.index, gateway: route.gateway, dead: false }],
            source: None,
            conditional: false,
            ours: false,
        })
    });
    NetworkSnapshot { interfaces: devices.to_vec(), routes: routes.collect(), rules: vec![main_rule()] }
}

/// A core with two links, on a clock of the test's own.
struct World {
    core: Core<FakeSteering>,
    now: Time,
    devices: Vec<LinkFacts>,
    /// Which links answer probes.
    answering: BTreeMap<LinkIndex, bool>,
    /// Probes under way: when they end, and how.
    probes: Vec<(Time, LinkIndex, Family, Outcome)>,
    beat: u64,
    /// Hosts that were to be asked whether they run Braid.
    questions: Vec<Question>,
}

impl World {
    fn new(config: Config) -> Self {
        Self::with(FakeSteering::default(), config)
    }

    fn with(steering: FakeSteering, config: Config) -> Self {
        let names = FakeNames([("/usr/bin/curl".to_owned(), 7)].into());
        let now = Time::from_millis(1000);
        let devices = vec![facts(1, "wlan0"), facts(2, "lte0")];
        let core = Core::new(steering, Box::new(names), config, now).unwrap();
        let mut world = Self { core, now, devices, answering: BTreeMap::new(), probes: Vec::new(), beat: 0, questions: Vec::new() };
        world.set_network();
        world
    }

    fn set_network(&mut self) {
        let network = network(&self.devices);
        self.core.on_network(self.now, network).unwrap();
    }

    /// Lets time pass as the live loop does.
    fn run(&mut self, span: Duration) {
        let end = self.now + span;
        while self.now < end {
            self.now = self.now + Duration::from_millis(10);
            self.beat += 1;
            let done: Vec<_> = self.probes.iter().filter(|(at, ..)| *at <= self.now).copied().collect();
            self.probes.retain(|(at, ..)| *at > self.now);
            for (_, link, family, outcome) in done {
                self.core.on_probe(self.now, link, family, outcome).unwrap();
            }
            let events = self.core.steering().events(100);
            self.core.on_events(self.now, events).unwrap();
            if self.beat.is_multiple_of(25) {
                self.core.look(self.now).unwrap();
            }
            self.core.tick(self.now).unwrap();
            let todo = self.core.todo();
            self.questions.extend(todo.questions);
            for order in todo.probes {
                let alive = self.answering.get(&order.link).copied().unwrap_or(true);
                let (after, outcome) = if alive { (RTT, Outcome::Alive { rtt: RTT }) } else { (order.timeout, Outcome::Silent) };
                self.probes.push((self.now + after, order.link, order.family, outcome));
            }
        }
    }

    fn connect(&mut self, name: &str, inode: u64) -> Steered {
        let app = AppId { exe: ExeId { device: 1, inode }, name: name.to_owned() };
        let now = self.now;
        self.core.steering().connect(now, &app, 1000, (SERVER, 443))
    }

    /// The names of the links that ten new flows of one program use.
    fn used(&mut self) -> Vec<String> {
        let mut slots: Vec<_> = (0..10)
            .filter_map(|_| match self.connect("test", 99) {
                Steered::To(slot, id) => {
                    let now = self.now;
                    self.core.steering().close(now, id);
                    Some(slot)
                }
                _ => None,
            })
            .collect();
        slots.sort_unstable();
        slots.dedup();
        let params = self.core.steering().params().unwrap().clone();
        slots.into_iter().filter_map(|slot| Some(params.links[slot].as_ref()?.name.clone())).collect()
    }

    fn state(&mut self, name: &str) -> String {
        let now = self.now;
        self.core.links(now).into_iter().find(|link| link.name == name).map_or("absent".to_owned(), |link| link.state)
    }
}

fn config(scheduler: Scheduler) -> Config {
    Config { policy: Policy { scheduler, ..Policy::default() }, ..Config::default() }
}

fn link_rule(name: &str) -> LinkRule {
    LinkRule { matcher: LinkMatcher { name: Some(Pattern::new(name)), ..LinkMatcher::default() }, reset_day: 1, ..LinkRule::default() }
}

fn only(names: &[&str]) -> Option<Vec<LinkSelector>> {
    Some(names.iter().map(|name| LinkSelector::Name(Pattern::new(*name))).collect())
}

#[test]
fn both_links_are_used_and_shown() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
    assert_eq!((world.state("wlan0"), world.state("lte0")), ("up".to_owned(), "up".to_owned()));
    let now = world.now;
    let status = world.core.status(now);
    assert_eq!((status.schema_version, status.scheduler.as_str(), status.links.len()), (1, "round-robin", 2));
}

#[test]
fn only_one_follows_the_systems_metric() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["wlan0"]);
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(world.used(), ["lte0"], "and the next best when that is gone");
}

#[test]
fn an_idle_link_that_goes_dark_is_left_within_a_second_and_used_again_within_two() {
    let mut config = config(Scheduler::RoundRobin);
    config.probe = ProbeMode::Eager;
    let mut world = World::new(config);
    world.run(Duration::from_secs(3));
    world.answering.insert(LinkIndex(1), false);
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["lte0"]);
    assert_eq!(world.state("wlan0"), "dead");
    world.answering.insert(LinkIndex(1), true);
    world.run(Duration::from_secs(2));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
}

#[test]
fn a_stall_is_noticed_within_a_second_without_eager_probes() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    let flows: Vec<FlowId> =
        (0..2).filter_map(|_| if let Steered::To(_, id) = world.connect("bulk", 8) { Some(id) } else { None }).collect();
    for _ in 0..20 {
        flows.iter().for_each(|id| world.core.steering().transfer(*id, Bytes::new(100_000), Bytes::new(100)));
        world.run(Duration::from_millis(100));
    }
    world.answering.insert(LinkIndex(1), false);
    for _ in 0..10 {
        // The flow on the other link goes on.
        world.core.steering().transfer(flows[1], Bytes::new(100_000), Bytes::new(100));
        world.run(Duration::from_millis(100));
    }
    assert_eq!(world.state("wlan0"), "dead");
    assert_eq!(world.used(), ["lte0"]);
}

#[test]
fn flows_stuck_on_a_dead_link_are_ended_after_the_grace_but_pinned_ones_are_not() {
    let mut config = config(Scheduler::OnlyOne);
    config.probe = ProbeMode::Eager;
    config.destroy_stuck_after = Some(Duration::from_secs(2));
    config.policy.apps = vec![AppRule {
        matcher: AppMatcher { exe: Some("/usr/bin/curl".into()), ..AppMatcher::default() },
        links: only(&["wlan0"]),
        ..AppRule::default()
    }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let Steered::To(0, free) = world.connect("free", 9) else { panic!() };
    let Steered::To(0, _pinned) = world.connect("curl", 7) else { panic!() };
    world.run(Duration::from_secs(1));
    world.answering.insert(LinkIndex(1), false);
    let mut ended = Vec::new();
    for _ in 0..50 {
        world.run(Duration::from_millis(10));
        assert!(world.core.todo().stuck.is_empty() || world.state("wlan0") == "dead");
    }
    for step in 0..500 {
        let end = world.now + Duration::from_millis(10);
        world.core.tick(end).unwrap();
        if step % 25 == 0 {
            world.core.look(end).unwrap();
        }
        world.now = end;
        let todo = world.core.todo();
        ended.extend(todo.stuck.iter().map(|stuck| stuck.id));
        for order in todo.probes {
            world
                .core
                .on_probe(end, order.link, order.family, if order.link.0 == 1 { Outcome::Silent } else { Outcome::Alive { rtt: RTT } })
                .unwrap();
        }
    }
    assert_eq!(ended, [free], "once, and the pinned one never");
}

#[test]
fn if_every_link_is_judged_dead_all_are_treated_as_up() {
    let mut config = config(Scheduler::RoundRobin);
    config.probe = ProbeMode::Eager;
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.answering = [(LinkIndex(1), false), (LinkIndex(2), false)].into();
    world.run(Duration::from_secs(2));
    assert_eq!((world.state("wlan0"), world.state("lte0")), ("dead".to_owned(), "dead".to_owned()));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
    let now = world.now;
    assert!(world.core.status(now).warnings.iter().any(|warning| warning.contains("treated as up")));
}

#[test]
fn a_backup_link_serves_only_while_no_other_does() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.links = vec![LinkRule { role: Role::Backup, ..link_rule("lte0") }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["wlan0"]);
    assert_eq!(world.state("lte0"), "backup");
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(world.used(), ["lte0"]);
}

#[test]
fn a_capped_link_is_given_no_more_flows_until_its_month_ends() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.links = vec![LinkRule { metered: true, cap: Some(Bytes::new(1_000_000)), ..link_rule("lte0") }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let counters = |lte: u64| [(LinkIndex(1), Bytes::ZERO, Bytes::ZERO), (LinkIndex(2), Bytes::new(lte), Bytes::ZERO)];
    world.core.on_counters(world.now, UNIX, &counters(5_000_000));
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0", "lte0"], "what the device carried before does not count");
    world.core.on_counters(world.now, UNIX + 1, &counters(6_000_000));
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0"]);
    assert_eq!(world.state("lte0"), "capped");
    world.core.on_counters(world.now, UNIX + 40 * 86_400, &counters(6_000_100));
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0", "lte0"]);
}

#[test]
fn a_strict_rule_fails_and_a_preference_gives_way_when_its_link_is_gone() {
    let mut config = config(Scheduler::RoundRobin);
    let matcher = |name: &str| AppMatcher { name: Some(name.to_owned()), ..AppMatcher::default() };
    config.policy.apps = vec![
        AppRule { matcher: matcher("bank"), links: only(&["wlan0"]), ..AppRule::default() },
        AppRule { matcher: matcher("radio"), prefer: only(&["wlan0"]).unwrap(), ..AppRule::default() },
    ];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    assert!(matches!(world.connect("bank", 1), Steered::To(0, _)));
    assert!(matches!(world.connect("radio", 2), Steered::To(0, _)));
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(world.connect("bank", 1), Steered::Denied);
    assert!(matches!(world.connect("radio", 2), Steered::To(1, _)));
}

#[test]
fn what_asks_for_a_relay_is_redirected_while_that_can_be_reached() {
    let mut config = config(Scheduler::RoundRobin);
    let rule = |name: &str, carry, relay: Option<&str>| AppRule {
        matcher: AppMatcher { name: Some(name.to_owned()), ..AppMatcher::default() },
        carry,
        relay: relay.map(str::to_owned),
        ..AppRule::default()
    };
    config.policy.exclude.users = vec![7];
    config.policy.apps =
        vec![rule("curl", Carry::Bond, None), rule("call", Carry::Duplicate, Some("home")), rule("ssh", Carry::Direct, None)];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.core.steering().set_redirect_ready(true);
    let redirected = |world: &mut World| ["curl", "call", "ssh", "other"].map(|name| matches!(world.connect(name, 1), Steered::Redirected));
    assert_eq!(redirected(&mut world), [false; 4]);
    world.core.set_peer_ready(world.now, "work", true).unwrap();
    assert_eq!(redirected(&mut world), [true, false, false, false]);
    world.core.set_peer_ready(world.now, "home", true).unwrap();
    assert_eq!(redirected(&mut world), [true, true, false, false]);
    world.core.set_peer_ready(world.now, "work", false).unwrap();
    assert_eq!(redirected(&mut world), [true, true, false, false]);
    world.core.set_peer_ready(world.now, "home", false).unwrap();
    assert_eq!(redirected(&mut world), [false; 4]);
    let flow = |rule| RedirectedFlow {
        id: FlowId(1),
        remote: (SERVER, 443).into(),
        app: AppId { exe: ExeId { device: 1, inode: 1 }, name: "call".into() },
        process: 1,
        user: 1,
        cgroup: 1,
        class: Class::Unclassified,
        rule,
        direction: Direction::Down,
        demand: Bytes::ZERO,
        started: world.now,
    };
    let relays = [Some(2), Some(3), Some(0), Some(9), None].map(|rule| world.core.rule_of(&flow(rule)).map(|rule| rule.relay.clone()));
    assert_eq!(relays, [Some(Some("home".to_owned())), Some(None), None, None, None], "the first rule is an exclusion");
}

impl World {
    /// A program has a flow to `to` that is answered; closed at once if `short`.
    fn spoken_with(&mut self, name: &str, to: (&str, u16), short: bool) {
        let app = AppId { exe: ExeId { device: 1, inode: 5 }, name: name.to_owned() };
        let now = self.now;
        let Steered::To(_, id) = self.core.steering().connect(now, &app, 1000, (to.0.parse().unwrap(), to.1)) else { return };
        self.core.steering().transfer(id, Bytes::new(100), Bytes::new(100));
        if short {
            self.core.steering().close(now, id);
        }
        self.run(Duration::from_millis(300));
    }

    fn asked(&mut self) -> Vec<String> {
        std::mem::take(&mut self.questions).into_iter().map(|question| question.host.to_string()).collect()
    }

    fn answer(&mut self, answer: Answer<PublicKey>) {
        self.core.on_answer(self.now, SERVER, answer).unwrap();
    }

    fn is_redirected(&mut self, name: &str) -> bool {
        matches!(self.connect(name, 5), Steered::Redirected)
    }
}

fn named(name: &str) -> AppRule {
    AppRule { matcher: AppMatcher { name: Some(name.to_owned()), ..AppMatcher::default() }, ..AppRule::default() }
}

const KEY: [u8; 32] = [7; 32];

/// A world whose server is known to run Braid.
fn straight(config: Config) -> World {
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.core.steering().set_redirect_ready(true);
    world.spoken_with("test", ("203.0.113.10", 443), false);
    assert_eq!(world.asked(), ["203.0.113.10"]);
    world.answer(Answer::Runs(KEY.into()));
    world
}

#[test]
fn a_host_is_asked_once_beside_its_first_flow_over_the_same_link() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    let Steered::To(slot, id) = world.connect("test", 5) else { panic!() };
    world.run(Duration::from_millis(500));
    assert_eq!(world.asked(), Vec::<String>::new(), "it has not answered the flow itself");
    let now = world.now;
    world.core.steering().answer(now, id);
    world.run(Duration::from_millis(500));
    let [question] = &std::mem::take(&mut world.questions)[..] else { panic!("{:?}", world.questions) };
    assert_eq!((question.host, question.expect, question.link.slot), (SERVER, None, slot));
    for short in [false, true] {
        world.spoken_with("test", ("203.0.113.10", 80), short);
    }
    assert_eq!(world.asked(), Vec::<String>::new());
    world.spoken_with("test", ("203.0.113.11", 80), true);
    assert_eq!(world.asked(), ["203.0.113.11"], "also when the flow is over before it is looked at");
    world.answer(Answer::Silent);
    world.run(Duration::from_secs(60));
    world.spoken_with("test", ("203.0.113.10", 80), false);
    assert_eq!(world.asked(), Vec::<String>::new());
    assert!(!world.is_redirected("test"));
}

#[test]
fn nobody_is_asked_whose_answer_would_not_be_used() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.exclude.names = vec!["excluded".to_owned()];
    config.policy.apps = vec![
        AppRule { carry: Carry::Direct, ..named("direct") },
        AppRule { relay: Some("home".to_owned()), ..named("relayed") },
        AppRule { links: only(&["lte0"]), ..named("pinned") },
        AppRule { prefer: only(&["lte0"]).unwrap(), ..named("preferring") },
        AppRule { carry: Carry::Bond, ..named("bonded") },
    ];
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    for name in ["excluded", "direct", "relayed", "pinned", "preferring"] {
        world.spoken_with(name, ("203.0.113.10", 443), false);
        assert_eq!(world.asked(), Vec::<String>::new(), "{name}");
    }
    for private in ["10.1.2.3", "192.168.7.7", "172.16.1.1", "100.64.1.1", "169.254.1.1"] {
        world.spoken_with("test", (private, 443), false);
    }
    world.spoken_with("test", ("203.0.113.10", 53), false);
    world.spoken_with("test", ("203.0.113.10", 853), false);
    assert_eq!(world.asked(), Vec::<String>::new());
    world.spoken_with("bonded", ("203.0.113.10", 443), false);
    assert_eq!(world.asked(), ["203.0.113.10"]);
    for scheduler in [Scheduler::OnlyOne, Scheduler::Operetta, Scheduler::Handover] {
        config.policy.scheduler = scheduler;
        let mut world = World::new(config.clone());
        world.run(Duration::from_secs(1));
        world.spoken_with("test", ("203.0.113.10", 443), false);
        assert_eq!(world.asked(), Vec::<String>::new(), "{scheduler}");
        world.spoken_with("bonded", ("203.0.113.10", 443), false);
        assert_eq!(world.asked(), ["203.0.113.10"], "{scheduler}");
    }
    config.detect = false;
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.spoken_with("bonded", ("203.0.113.10", 443), false);
    assert_eq!(world.asked(), Vec::<String>::new());
}

#[test]
fn flows_to_a_server_that_runs_braid_are_redirected_while_it_is_there() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.apps = vec![
        AppRule { carry: Carry::Direct, ..named("direct") },
        AppRule { relay: Some("home".to_owned()), ..named("relayed") },
        AppRule { carry: Carry::Bond, ..named("bonded") },
    ];
    let mut world = straight(config.clone());
    let which = |world: &mut World| ["test", "bonded", "direct", "relayed"].map(|name| world.is_redirected(name));
    assert_eq!(which(&mut world), [true, true, false, false]);
    for (news, there) in [(ServerNews::Lost, false), (ServerNews::Reached, true), (ServerNews::AnotherKey, false)] {
        world.core.on_server(world.now, SERVER, news).unwrap();
        assert_eq!(which(&mut world), [there, there, false, false], "{news:?}");
    }
    let now = world.now;
    let warnings = world.core.status(now).warnings;
    assert!(warnings.iter().any(|text| text.contains("203.0.113.10") && text.contains("braid leave")), "{warnings:?}");
    assert!(world.core.forget_server(now, SERVER).unwrap());
    world.spoken_with("test", ("203.0.113.10", 443), false);
    assert_eq!(world.questions[0].expect, None);
    world.answer(Answer::Runs([8; 32].into()));
    assert_eq!(which(&mut world), [true, true, false, false]);
    // One link is left: there is nothing to bond.
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(which(&mut world), [false; 4]);
    world.devices[0].carrier = true;
    world.set_network();
    config.detect = false;
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(which(&mut world), [false; 4]);
}

#[test]
fn what_a_tunnel_has_taken_over_is_neither_asked_nor_bonded() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    let Steered::To(_, id) = world.connect("test", 5) else { panic!() };
    let now = world.now;
    world.core.steering().transfer(id, Bytes::new(100), Bytes::new(100));
    let mut tunnel = facts(9, "wg0");
    (tunnel.gateways, tunnel.addresses) = (PerFamily::default(), vec![]);
    let mut network = network(&world.devices);
    network.interfaces.push(tunnel);
    network.routes.push(RouteFacts {
        destination: "203.0.113.0/24".parse().unwrap(),
        hops: vec![NextHop { device: LinkIndex(9), gateway: None, dead: false }],
        ..network.routes[0].clone()
    });
    world.core.on_network(now, network).unwrap();
    world.core.steering().close(now, id);
    world.run(Duration::from_secs(1));
    assert_eq!(world.asked(), Vec::<String>::new());
    world.core.recall_servers(world.now, [(SERVER, KEY.into(), Duration::ZERO)]).unwrap();
    let flow = RedirectedFlow {
        id: FlowId(1),
        remote: (SERVER, 443).into(),
        app: AppId { exe: ExeId { device: 1, inode: 1 }, name: "test".into() },
        process: 1,
        user: 1,
        cgroup: 1,
        class: Class::Unclassified,
        rule: None,
        direction: Direction::Down,
        demand: Bytes::ZERO,
        started: world.now,
    };
    assert_eq!(world.core.server_of(world.now, &flow), None);
    world.set_network();
    assert_eq!(world.core.server_of(world.now, &flow), Some(KEY.into()));
}

#[test]
fn what_is_known_of_a_server_grows_old_and_its_key_does_not() {
    let mut world = straight(config(Scheduler::RoundRobin));
    assert!(world.is_redirected("test"));
    world.now = world.now + FRESH;
    world.run(Duration::from_secs(1));
    assert!(!world.is_redirected("test"));
    world.spoken_with("test", ("203.0.113.10", 443), false);
    assert_eq!(world.questions[0].expect, Some(KEY.into()));
    let mut later = World::new(config(Scheduler::RoundRobin));
    let pins: Vec<_> = world.core.pinned_servers().map(|(host, key, _)| (host, key, Duration::from_secs(60))).collect();
    later.core.recall_servers(later.now, pins).unwrap();
    later.run(Duration::from_secs(1));
    later.core.steering().set_redirect_ready(true);
    assert!(later.is_redirected("test"), "the next life begins with what this one knew");
}

#[test]
fn a_service_that_is_shut_goes_direct_and_the_others_do_not() {
    let mut world = straight(config(Scheduler::RoundRobin));
    world.core.on_server(world.now, SERVER, ServerNews::Shut(443)).unwrap();
    assert!(!world.is_redirected("test"));
    let app = AppId { exe: ExeId { device: 1, inode: 5 }, name: "test".to_owned() };
    let now = world.now;
    assert_eq!(world.core.steering().connect(now, &app, 1000, (SERVER, 80)), Steered::Redirected);
    world.run(Duration::from_secs(601));
    assert!(world.is_redirected("test"), "it may be open by now");
    world.core.on_server(world.now, SERVER, ServerNews::Elsewhere).unwrap();
    assert!(!world.is_redirected("test"));
}

#[test]
fn without_the_keys_of_before_nobody_is_trusted() {
    let mut world = straight(config(Scheduler::RoundRobin));
    world.core.distrust_servers("servers.json cannot be read".to_owned());
    world.core.recall_servers(world.now, []).unwrap();
    assert!(!world.is_redirected("test"));
    world.spoken_with("test", ("203.0.113.11", 443), false);
    assert_eq!(world.asked(), Vec::<String>::new());
    let now = world.now;
    assert!(world.core.status(now).warnings.iter().any(|text| text.contains("servers.json")));
}

#[test]
fn a_kernel_that_cannot_be_told_of_a_server_is_told_again() {
    let mut world = World::with(FakeSteering::chaos(1_000_000), config(Scheduler::RoundRobin));
    world.core.on_answer(world.now, SERVER, Answer::Silent).unwrap();
    world.core.recall_servers(world.now, [(SERVER, KEY.into(), Duration::ZERO)]).unwrap();
    assert_eq!(world.core.steering().servers(), [SERVER]);
    world.core.steering().set_chaos(Some(1));
    assert!(world.core.on_server(world.now, SERVER, ServerNews::Lost).is_err());
    world.core.steering().set_chaos(None);
    world.run(Duration::from_secs(2));
    assert!(world.core.steering().servers().is_empty());
}

#[test]
fn a_new_configuration_holds_for_new_flows_and_keeps_what_was_learnt() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    world.run(Duration::from_secs(1));
    let Steered::To(0, id) = world.connect("old", 5) else { panic!() };
    world.core.steering().transfer(id, Bytes::new(5000), Bytes::new(10));
    world.run(Duration::from_millis(500));
    let mut next = config(Scheduler::RoundRobin);
    next.policy.links = vec![LinkRule { role: Role::Backup, ..link_rule("wlan0") }];
    world.core.reconfigure(world.now, next).unwrap();
    world.run(Duration::from_millis(500));
    assert_eq!(world.used(), ["lte0"]);
    let now = world.now;
    assert_eq!(world.core.flows(now)[0].link, "wlan0", "a living flow stays where it is");
    let wlan = world.core.links(now).into_iter().find(|link| link.name == "wlan0").unwrap();
    assert_eq!((wlan.state.as_str(), wlan.rx_bytes), ("backup", Some(5000)));
}

#[test]
fn two_links_with_one_address_are_refused_with_the_reason() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.devices[1].addresses = world.devices[0].addresses.clone();
    world.set_network();
    world.run(Duration::from_millis(100));
    assert_eq!(world.used(), ["wlan0"]);
    let now = world.now;
    let lte = world.core.links(now).into_iter().find(|link| link.name == "lte0").unwrap();
    assert_eq!(lte.state, "excluded");
    assert!(lte.reason.unwrap().contains("10.0.1.2"));
}

#[test]
fn an_explanation_names_the_rule_the_loads_and_the_runner_up() {
    let mut config = config(Scheduler::MaxThroughput);
    config.policy.apps =
        vec![AppRule { matcher: AppMatcher { port: Some(25), ..AppMatcher::default() }, links: only(&["eth9"]), ..AppRule::default() }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.connect("busy", 3);
    let ask = |port| braid_api::ExplainRequest {
        exe: Some("/usr/bin/curl".into()),
        destination: Some(SERVER.to_string()),
        port: Some(port),
        ..Default::default()
    };
    let now = world.now;
    let answer = world.core.explain(now, &ask(443)).unwrap();
    assert_eq!((answer.link.as_deref(), answer.runner_up.as_deref()), (Some("lte0"), Some("wlan0")), "{answer:?}");
    let text = "it is expected to end first there, in 0.081 s: 1.0 MB of its own behind 0 B of the link's load, 0 B of 0 flows";
    assert!(answer.reason.starts_with(text), "{}", answer.reason);
    assert_eq!(answer.candidates.len(), 2);
    assert!(answer.candidates.iter().all(|candidate| candidate.end_us <= candidate.finish_us && candidate.end_us.is_some()), "{answer:?}");
    let denied = world.core.explain(now, &ask(25)).unwrap();
    assert_eq!((denied.outcome, denied.rule), (braid_api::Outcome::Denied, Some(1)));
    let mut unclear = ask(1);
    unclear.destination = Some("example.org".into());
    assert_eq!(world.core.explain(now, &unclear).unwrap_err().status, 400);
}

#[test]
fn whatever_fails_is_an_error_and_never_a_panic() {
    for every in 1..40 {
        let names = FakeNames(BTreeMap::new());
        let Ok(mut core) = Core::new(FakeSteering::chaos(every), Box::new(names), config(Scheduler::MaxThroughput), Time::ZERO) else {
            continue;
        };
        let mut now = Time::from_millis(1);
        for step in 0..200 {
            now = now + Duration::from_millis(50);
            let _ = match step % 5 {
                0 => core.on_network(now, network(&[facts(1, "wlan0"), facts(2, "lte0")])),
                1 => core.look(now),
                2 => core.tick(now),
                3 => core.on_probe(now, LinkIndex(1 + step % 3), Family::V4, Outcome::Silent),
                _ => core.reconfigure(now, config(Scheduler::RoundRobin)),
            };
            core.status(now);
            core.todo();
        }
    }
}

#[test]
fn regression_an_event_that_fails_does_not_swallow_those_behind_it() {
    let mut donor = World::new(config(Scheduler::RoundRobin));
    donor.connect("ssh", 22);
    let now = donor.now;
    let pattern = donor.core.steering().flows(now).unwrap().remove(0);
    let events = |number: u64| {
        let app = AppId { name: format!("app{number}"), ..pattern.app.clone() };
        let row = FlowRow { id: FlowId(number), app: app.clone(), remote: (SERVER, 22), rx: Bytes::new(100), ..pattern.clone() };
        [SteeringEvent::NewApp { app, process: 1, cgroup: 1, class: Class::Unclassified }, SteeringEvent::Ended(row)]
    };
    let mut failed = 0;
    for every in 2..20 {
        let names = Box::new(FakeNames(BTreeMap::new()));
        let mut core = Core::new(FakeSteering::chaos(every), names, config(Scheduler::RoundRobin), Time::ZERO).unwrap();
        // Links are known even where the kernel's side could not be told of them.
        let _ = core.on_network(now, network(&donor.devices));
        failed += u32::from(core.on_events(now, (1..=10).flat_map(events).collect()).is_err());
        let moved: u64 = core.links(now).iter().map(|link| link.rx_bytes.unwrap()).sum();
        assert_eq!(moved, 1000, "every {every}th call fails");
    }
    assert!(failed > 0, "the test tests nothing");
}

/// Two links of 10 Mbit/s: a cheap one that needs 1 W, and one that needs 3 W and that the system itself prefers.
fn operetta(utility: UtilityRule) -> Config {
    let link = |name: &str, milliwatts: f64| {
        let row = Row {
            model: "*".to_owned(),
            technology: Technology::Wifi,
            idle_mw: 0.0,
            receive_mw: milliwatts,
            transmit_mw: milliwatts,
            down_mw_per_mbps: 0.0,
            up_mw_per_mbps: 0.0,
            limit_down_mbps: None,
            limit_up_mbps: None,
            source: "a test".to_owned(),
        };
        let ten = Some(Rate::from_mbps(10));
        LinkRule { energy: Some(Profile::try_from(row).unwrap()), capacity_down: ten, capacity_up: ten, ..link_rule(name) }
    };
    let policy =
        Policy { scheduler: Scheduler::Operetta, utility, links: vec![link("wlan0", 3000.0), link("lte0", 1000.0)], ..Policy::default() };
    Config { policy, ..Config::default() }
}

fn fixed(utility: f64) -> UtilityRule {
    UtilityRule { utility: UtilityFunction::Fixed(utility), plugged_in: None }
}

impl World {
    /// The links of ten flows of 1 MB that are there together.
    fn ten(&mut self) -> Vec<usize> {
        let flows: Vec<_> = (0..10).map(|_| self.connect("test", 99)).collect();
        let mut counts = vec![0; 2];
        for flow in flows {
            let Steered::To(slot, id) = flow else { panic!("{flow:?}") };
            counts[slot] += 1;
            let now = self.now;
            self.core.steering().transfer(id, Bytes::new(1_000_000), Bytes::ZERO);
            self.core.steering().close(now, id);
        }
        counts
    }

    fn supply(&mut self, level: f64, plugged: bool, watts: Option<f64>) {
        let now = self.now;
        self.core.on_supply(now, Some(Supply { level, plugged, power: watts.map(Power::from_watts) })).unwrap();
    }
}

#[test]
fn operetta_takes_the_cheap_link_as_far_as_throughput_allows() {
    let mut world = World::new(operetta(fixed(0.0)));
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [0, 10], "least energy: the link with the cheapest byte alone");
    let now = world.now;
    let status = world.core.status(now);
    assert_eq!((status.utility, status.battery), (Some(0.0), None));
    // The kernel is told capacities to about 3 %.
    assert!(status.target_down_bps.is_some_and(|bps| (9_700_000..=10_000_000).contains(&bps)), "{status:?}");
    // A reload holds for the next flow.
    world.core.reconfigure(world.now, operetta(fixed(1.0))).unwrap();
    assert_eq!(world.ten(), [5, 5], "most throughput: both alike");
    world.core.reconfigure(world.now, operetta(UtilityRule { utility: UtilityFunction::MatchDefault, plugged_in: None })).unwrap();
    assert_eq!(world.ten(), [0, 10], "the system's own throughput, at less energy than its own choice");
}

#[test]
fn operetta_follows_the_battery_and_the_mains() {
    let step = UtilityFunction::Step { threshold: 0.3, above: 1.0, below: 0.0 };
    let mut world = World::new(operetta(UtilityRule { utility: step, plugged_in: Some(1.0) }));
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [5, 5], "no battery is like being plugged in");
    world.supply(0.2, false, Some(7.5));
    assert_eq!(world.ten(), [0, 10]);
    let now = world.now;
    let battery = world.core.status(now).battery.unwrap();
    assert_eq!((battery.level, battery.plugged, battery.power_w), (0.2, false, Some(7.5)));
    world.supply(0.2, true, None);
    assert_eq!(world.ten(), [5, 5]);
}

#[test]
fn money_can_make_the_thrifty_link_the_dear_one() {
    let mut config = operetta(fixed(0.0));
    config.policy.links[1].cost_per_gb = 8.0;
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [0, 10], "money has no weight unless it is given one");
    config.policy.weights = Weights { energy: 1.0, money: 1.0 };
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(world.ten(), [10, 0], "0.8 kJ and 8 a GB are more than 2.4 kJ");
}

#[test]
fn joules_are_counted_by_flow_application_and_link() {
    let mut world = World::new(operetta(fixed(0.0)));
    world.run(Duration::from_secs(1));
    let Steered::To(1, id) = world.connect("test", 99) else { panic!() };
    world.core.steering().transfer(id, Bytes::new(1_000_000), Bytes::new(500_000));
    let now = world.now;
    world.core.on_counters(now, UNIX, &[(LinkIndex(2), Bytes::ZERO, Bytes::ZERO)]);
    world.run(Duration::from_secs(1));
    let now = world.now;
    world.core.on_counters(now, UNIX, &[(LinkIndex(2), Bytes::new(1_000_000), Bytes::new(500_000))]);
    // 1.5 MB at 10 Mbit/s and 1 W take 1.2 J, give or take what the kernel is not told of the capacity.
    let close = |joules: Option<f64>, wanted: f64| joules.is_some_and(|joules| (joules / wanted - 1.0).abs() < 0.04);
    let flows = world.core.flows(now);
    assert!(close(flows[0].energy_j, 1.2), "{:?}", flows[0]);
    let link = world.core.links(now).into_iter().find(|link| link.name == "lte0").unwrap();
    assert!(close(link.energy_j, 1.2) && link.energy_source.as_deref() == Some("a test"), "{link:?}");
    world.core.steering().transfer(id, Bytes::new(1_000_000), Bytes::ZERO);
    world.core.steering().close(now, id);
    world.run(Duration::from_millis(300));
    let now = world.now;
    let app = world.core.applications(now).into_iter().find(|app| app.name == "test").unwrap();
    assert!(close(app.energy_j, 2.0), "{app:?}");
    assert!(world.core.flows(now).is_empty());
}

#[test]
fn what_the_battery_shows_goes_before_a_profile_of_the_kind() {
    let mut config = config(Scheduler::Operetta);
    let ten = Some(Rate::from_mbps(10));
    config.policy.links = ["wlan0", "lte0"].map(|name| LinkRule { capacity_down: ten, capacity_up: ten, ..link_rule(name) }).into();
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let now = world.now;
    let joules = |world: &mut World, name: &str| {
        let now = world.now;
        let link = world.core.links(now).into_iter().find(|link| link.name == name).unwrap();
        (link.energy_down_j_per_gb.unwrap(), link.energy_source.unwrap())
    };
    assert!(joules(&mut world, "lte0").1.contains("802.3az"));
    let mut moved = Bytes::ZERO;
    world.core.on_counters(now, UNIX, &[(LinkIndex(2), moved, Bytes::ZERO)]);
    for second in 0..600u64 {
        // Every other 3 seconds it receives at full rate, which takes 2.5 W more of the battery.
        let busy = second / 3 % 2 == 1;
        world.now = world.now + Duration::from_secs(1);
        moved += Bytes::new(if busy { 1_250_000 } else { 0 });
        let now = world.now;
        world.core.on_counters(now, UNIX, &[(LinkIndex(2), moved, Bytes::ZERO)]);
        world.supply(0.8, false, Some(if busy { 8.5 } else { 6.0 }));
    }
    let (found, source) = joules(&mut world, "lte0");
    assert!(source.contains("battery") && (found / 2000.0 - 1.0).abs() < 0.1, "{found} {source}");
    // Of a link that was never used nothing was learnt, and its model is known.
    assert!(joules(&mut world, "wlan0").1.contains("Intel 8255x"));
}

impl World {
    /// Answers of probes with this round trip.
    fn round_trip(&mut self, link: u32, milliseconds: u64) {
        let outcome = Outcome::Alive { rtt: Duration::from_millis(milliseconds) };
        for _ in 0..50 {
            let now = self.now;
            self.core.on_probe(now, LinkIndex(link), Family::V4, outcome).unwrap();
        }
        let now = self.now;
        self.core.tick(now).unwrap();
    }
}

#[test]
fn flows_share_links_in_inverse_proportion_to_their_round_trips() {
    let mut config = config(Scheduler::RttShare);
    let rates = [30, 10].map(|mbps| Some(Rate::from_mbps(mbps)));
    config.policy.links =
        ["wlan0", "lte0"].iter().zip(rates).map(|(name, rate)| LinkRule { capacity_down: rate, ..link_rule(name) }).collect();
    let mut world = World::new(config);
    world.round_trip(1, 60);
    let first = world.ten();
    assert!((7..=8).contains(&first[0]), "by capacity, 3 to 1, until both are measured: {first:?}");
    world.round_trip(2, 15);
    let shares: Vec<usize> = (0..4).map(|_| world.ten()[0]).collect();
    assert!((7..=9).contains(&shares.iter().sum::<usize>()), "1 to 4: {shares:?}");
}

#[test]
fn a_handover_needs_a_gain_of_more_than_maxdiff() {
    let mut world = World::new(config(Scheduler::Handover));
    world.round_trip(1, 30);
    assert_eq!(world.ten(), [10, 0]);
    world.round_trip(2, 25);
    assert_eq!(world.ten(), [10, 0], "5 ms are not worth it");
    world.round_trip(2, 15);
    assert_eq!(world.ten(), [0, 10]);
    world.round_trip(1, 10);
    assert_eq!(world.ten(), [0, 10], "nor are they on the way back");
    let mut eager = config(Scheduler::Handover);
    (eager.policy.maxdiff, eager.probe) = (Duration::from_millis(1), ProbeMode::Eager);
    world.core.reconfigure(world.now, eager).unwrap();
    assert_eq!(world.ten(), [10, 0]);
    world.answering.insert(LinkIndex(1), false);
    world.run(Duration::from_secs(3));
    assert_eq!(world.ten(), [0, 10], "a dead link is left at once");
}

#[test]
fn links_of_the_highest_priority_share_and_the_others_wait() {
    let mut config = Config { probe: ProbeMode::Eager, ..config(Scheduler::RoundRobin) };
    config.policy.links = vec![LinkRule { priority: 1, ..link_rule("wlan0") }];
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [0, 10]);
    world.answering.insert(LinkIndex(2), false);
    world.run(Duration::from_secs(3));
    assert_eq!(world.ten(), [10, 0], "the next priority when the first is dead");
    config.policy.links.push(LinkRule { priority: 1, ..link_rule("lte0") });
    world.answering.insert(LinkIndex(2), true);
    world.core.reconfigure(world.now, config).unwrap();
    world.run(Duration::from_secs(10));
    assert_eq!(world.ten(), [5, 5], "equal priorities share");
}

#[test]
fn a_low_battery_puts_all_on_the_thrifty_link() {
    let mut config = operetta(fixed(1.0));
    config.policy.scheduler = Scheduler::RoundRobin;
    let mut world = World::new(config.clone());
    world.round_trip(1, 20);
    world.round_trip(2, 20);
    world.supply(0.05, false, None);
    assert_eq!(world.ten(), [5, 5], "only if it is asked for");
    config.policy.power_saving = true;
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(world.ten(), [0, 10], "1 W against 3 W");
    world.supply(0.05, true, None);
    assert_eq!(world.ten(), [5, 5], "plugged in");
    world.supply(0.15, false, None);
    assert_eq!(world.ten(), [5, 5], "charged well enough");
}

#[test]
fn a_link_beyond_the_thirty_second_is_shown_with_the_reason() {
    let mut world = World::new(Config::default());
    world.devices = (1..=33).map(|number| facts(number, &format!("eth{number}"))).collect();
    world.set_network();
    let links = world.core.links(world.now);
    assert_eq!(links.len(), 33);
    let last = links.iter().find(|link| link.name == "eth33").unwrap();
    assert_eq!((last.state.as_str(), last.flows), ("excluded", 0));
    assert!(last.reason.as_ref().unwrap().contains("more links than the 32"), "{last:?}");
    assert!(links.iter().filter(|link| link.name != "eth33").all(|link| link.state != "excluded"));
    world.devices.remove(0);
    world.set_network();
    let links = world.core.links(world.now);
    assert!(links.len() == 32 && links.iter().all(|link| link.state != "excluded"), "it has the slot of one that is gone");
}
