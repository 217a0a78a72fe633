//! Detection of servers that run Braid: which hosts are asked, and the effects of their answers.

use std::time::Duration;

use braid_api::ExplainRequest;
use braid_control::config::{Config, Detect};
use braid_control::core::{ServerEvent, UNREAD};
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, ExeId, RedirectedFlow};
use braid_decide::detection::{DetectionAnswer, FRESH};
use braid_decide::policy::{AppMatcher, AppRule, Carry, Scheduler};
use braid_decide::tradeoff::{UtilityFunction, UtilityRule};
use braid_model::key::PublicKey;
use braid_model::{ByteCount, Class, Direction, FlowId, LinkIndex, NextHop, PerFamily, RouteFacts, Time};

use super::world::*;

impl World {
    /// Opens an answered flow of a program to `to`; closes it at once if `short`.
    fn talk_to(&mut self, name: &str, to: (&str, u16), short: bool) {
        let app = AppId { exe: ExeId { device: 1, inode: 5 }, name: name.to_owned() };
        let now = self.now;
        let Steered::To(_, id) = self.core.steering().connect(now, &app, 1000, (to.0.parse().unwrap(), to.1)) else { return };
        self.core.steering().transfer(id, ByteCount::new(100), ByteCount::new(100));
        if short {
            self.core.steering().close(now, id);
        }
        self.run(Duration::from_millis(300));
    }

    fn asked(&mut self) -> Vec<String> {
        std::mem::take(&mut self.questions).into_iter().map(|question| question.host.to_string()).collect()
    }

    /// Gives this answer over each link that the host is asked over.
    fn answer(&mut self, answer: DetectionAnswer<PublicKey>) {
        while let Some(question) = (!self.questions.is_empty()).then(|| self.questions.remove(0)) {
            self.answer_over(question.link.slot, answer);
        }
    }

    fn answer_over(&mut self, link: usize, answer: DetectionAnswer<PublicKey>) {
        self.core.on_answer(self.now, SERVER, link, answer).unwrap();
        self.run(Duration::from_millis(10));
    }

    fn is_redirected(&mut self, name: &str) -> bool {
        matches!(self.connect(name, 5), Steered::Redirected)
    }
}

/// A redirected flow to the server.
fn redirected_flow(now: Time) -> RedirectedFlow {
    RedirectedFlow {
        id: FlowId(1),
        remote: (SERVER, 443).into(),
        app: AppId { exe: ExeId { device: 1, inode: 1 }, name: "test".into() },
        process: 1,
        user: 1,
        cgroup: 1,
        class: Class::Unclassified,
        rule: None,
        direction: Direction::Down,
        demand: ByteCount::ZERO,
        started: now,
        filtered: false,
        held: false,
        forwarded: false,
    }
}

fn explained(world: &mut World, name: &str) -> String {
    let request = ExplainRequest { name: Some(name.to_owned()), destination: Some(SERVER.to_string()), ..Default::default() };
    world.core.explain(world.now, &request).unwrap().reason
}

fn named(name: &str) -> AppRule {
    AppRule { matcher: AppMatcher { name: Some(name.to_owned()), ..AppMatcher::default() }, ..AppRule::default() }
}

/// A configuration that asks every host.
fn config(scheduler: Scheduler) -> Config {
    Config { detect: Detect::Everybody, ..super::world::config(scheduler) }
}

const KEY: [u8; 32] = [7; 32];

/// A world whose server is known to run Braid.
fn peer_direct(config: Config) -> World {
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.core.steering().set_redirect_ready(true);
    world.talk_to("test", ("203.0.113.10", 443), false);
    assert_eq!(world.questions.len(), 1);
    world.answer(DetectionAnswer::Runs(KEY.into()));
    world
}

#[test]
fn a_host_is_asked_once_over_the_link_of_its_first_flow() {
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
        world.talk_to("test", ("203.0.113.10", 80), short);
    }
    assert_eq!(world.asked(), Vec::<String>::new());
    world.talk_to("test", ("203.0.113.11", 80), true);
    assert_eq!(world.asked(), ["203.0.113.11"], "also if the flow ends before the next poll");
    world.answer_over(slot, DetectionAnswer::Silent);
    world.run(Duration::from_secs(60));
    world.talk_to("test", ("203.0.113.10", 80), false);
    assert_eq!(world.asked(), Vec::<String>::new());
    assert!(!world.is_redirected("test"));
}

#[test]
fn a_silent_host_that_the_user_has_named_is_asked_again_after_a_minute() {
    let nets = vec!["203.0.113.10/32".parse().unwrap()];
    for (detect, again) in [(Detect::Everybody, 0), (Detect::Listed { nets, names: Vec::new() }, 1)] {
        let mut world = World::new(Config { detect, ..config(Scheduler::RoundRobin) });
        world.run(Duration::from_secs(1));
        world.talk_to("test", ("203.0.113.10", 80), false);
        assert_eq!(world.asked().len(), 1);
        for link in 0..2 {
            world.answer_over(link, DetectionAnswer::Silent);
        }
        world.talk_to("test", ("203.0.113.10", 80), false);
        assert_eq!(world.asked().len(), 0);
        world.run(Duration::from_secs(61));
        world.talk_to("test", ("203.0.113.10", 80), true);
        assert_eq!(world.asked().len(), again);
    }
}

#[test]
fn a_host_is_not_asked_if_its_answer_would_not_be_used() {
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
        world.talk_to(name, ("203.0.113.10", 443), false);
        assert_eq!(world.asked(), Vec::<String>::new(), "{name}");
    }
    for private in ["10.1.2.3", "192.168.7.7", "172.16.1.1", "100.64.1.1", "169.254.1.1"] {
        world.talk_to("test", (private, 443), false);
    }
    world.talk_to("test", ("203.0.113.10", 53), false);
    world.talk_to("test", ("203.0.113.10", 853), false);
    assert_eq!(world.asked(), Vec::<String>::new());
    world.talk_to("bonded", ("203.0.113.10", 443), false);
    assert_eq!(world.asked(), ["203.0.113.10"]);
    for scheduler in [Scheduler::OnlyOne, Scheduler::Operetta, Scheduler::Handover] {
        config.policy.scheduler = scheduler;
        // At least energy one link is enough.
        config.policy.utility = UtilityRule { utility: UtilityFunction::Fixed(0.0), plugged_in: None };
        let mut world = World::new(config.clone());
        world.run(Duration::from_secs(1));
        world.talk_to("test", ("203.0.113.10", 443), false);
        assert_eq!(world.asked(), Vec::<String>::new(), "{scheduler}");
        world.talk_to("bonded", ("203.0.113.10", 443), false);
        assert_eq!(world.asked(), ["203.0.113.10"], "{scheduler}");
    }
    for (detect, expected) in [
        (Detect::Nobody, None),
        (Detect::Listed { nets: vec!["203.0.113.11".parse::<std::net::IpAddr>().unwrap().into()], names: vec![] }, None),
        (Detect::Listed { nets: vec!["203.0.113.0/24".parse().unwrap()], names: vec![] }, Some("203.0.113.10")),
        (Detect::Listed { nets: vec![], names: vec!["server.example.org".parse().unwrap()] }, Some("203.0.113.10")),
    ] {
        config.detect = detect;
        let mut world = World::new(config.clone());
        let names = world.core.names_to_detect().len();
        world.core.set_detected_names(world.now, (0..names).map(|_| SERVER).collect()).unwrap();
        world.run(Duration::from_secs(1));
        world.talk_to("bonded", ("203.0.113.10", 443), false);
        assert_eq!(world.asked(), Vec::from_iter(expected), "{:?}", config.detect);
    }
}

#[test]
fn flows_to_a_server_that_runs_braid_are_redirected_while_it_is_reachable() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.apps = vec![
        AppRule { carry: Carry::Direct, ..named("direct") },
        AppRule { relay: Some("home".to_owned()), ..named("relayed") },
        AppRule { carry: Carry::Bond, ..named("bonded") },
    ];
    let mut world = peer_direct(config.clone());
    let which = |world: &mut World| ["test", "bonded", "direct", "relayed"].map(|name| world.is_redirected(name));
    assert_eq!(which(&mut world), [true, true, false, false]);
    for (event, there) in [(ServerEvent::Lost, false), (ServerEvent::Reached, true), (ServerEvent::KeyMismatch, false)] {
        world.core.on_server(world.now, SERVER, event).unwrap();
        assert_eq!(which(&mut world), [there, there, false, false], "{event:?}");
    }
    let now = world.now;
    let warnings = world.core.status(now).warnings;
    assert!(warnings.iter().any(|text| text.contains("203.0.113.10") && text.contains("braid leave")), "{warnings:?}");
    assert!(world.core.forget_server(now, SERVER).unwrap());
    world.talk_to("test", ("203.0.113.10", 443), false);
    assert_eq!(world.questions[0].expect, None);
    world.answer(DetectionAnswer::Runs([8; 32].into()));
    assert_eq!(which(&mut world), [true, true, false, false]);
    // Only one link is left, so there is nothing to bond.
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(which(&mut world), [false; 4]);
    world.devices[0].carrier = true;
    world.set_network();
    config.detect = Detect::Nobody;
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(which(&mut world), [false; 4]);
}

/// An attacker on one link could answer there in place of a host that flows also reach over the other link.
#[test]
fn regression_a_key_seen_over_one_link_attracts_no_flow_from_another() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    world.core.steering().set_redirect_ready(true);
    world.talk_to("test", ("203.0.113.10", 443), false);
    let first = world.questions.remove(0);
    world.answer_over(first.link.slot, DetectionAnswer::Runs(KEY.into()));
    assert!(!world.is_redirected("test"));
    let other = world.questions.remove(0);
    assert_eq!((other.expect, other.host), (Some(KEY.into()), SERVER));
    assert_ne!(other.link.slot, first.link.slot);
    let known = world.core.known_servers(world.now);
    let reason = known[0].2.as_deref().unwrap_or_default();
    assert!(reason.contains(&format!("it has not proved its key over {}", other.link.device)), "{reason}");
    world.answer_over(other.link.slot, DetectionAnswer::Silent);
    assert!(!world.is_redirected("test"));
    world.answer_over(other.link.slot, DetectionAnswer::Runs(KEY.into()));
    assert!(world.is_redirected("test"));
    world.answer_over(other.link.slot, DetectionAnswer::KeyMismatch);
    assert!(!world.is_redirected("test"), "one of the two answers is not from the host");
}

/// A key seen over a link's former network says nothing about its current network.
#[test]
fn regression_a_link_with_a_new_network_must_see_the_key_again() {
    let mut world = peer_direct(config(Scheduler::RoundRobin));
    assert!(world.is_redirected("test"));
    world.devices[0].gateways.v4[0].gateway = "10.9.9.1".parse().ok();
    world.set_network();
    assert!(!world.is_redirected("test"));
    for _ in 0..4 {
        world.talk_to("test", ("203.0.113.10", 443), false);
    }
    world.answer(DetectionAnswer::Runs(KEY.into()));
    assert!(world.is_redirected("test"));
}

#[test]
fn destinations_of_a_tunnel_are_neither_asked_nor_bonded() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    let Steered::To(_, id) = world.connect("test", 5) else { panic!() };
    let now = world.now;
    world.core.steering().transfer(id, ByteCount::new(100), ByteCount::new(100));
    let mut tunnel = facts(9, "wg0");
    (tunnel.gateways, tunnel.addresses) = (PerFamily::default(), vec![]);
    let mut network = network(&world.devices);
    network.interfaces.push(tunnel);
    network.routes.push(RouteFacts {
        destination: "203.0.113.0/24".parse().unwrap(),
        hops: vec![NextHop { device: LinkIndex(9), gateway: None, dead: false }],
        ..network.routes[0].clone()
    });
    world.core.on_network(now, network.clone()).unwrap();
    world.core.steering().close(now, id);
    world.run(Duration::from_secs(1));
    assert_eq!(world.asked(), Vec::<String>::new());
    world.set_network();
    world.talk_to("test", ("203.0.113.10", 443), false);
    world.answer(DetectionAnswer::Runs(KEY.into()));
    let flow = redirected_flow(world.now);
    assert_eq!(world.core.server_of(world.now, &flow), Some(KEY.into()));
    world.core.on_network(world.now, network).unwrap();
    assert_eq!(world.core.server_of(world.now, &flow), None);
}

#[test]
fn regression_no_flow_bypasses_a_firewall_that_filters_by_socket_owner() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.apps = vec![AppRule { carry: Carry::Bond, ..named("relayed") }];
    let mut world = peer_direct(config);
    world.core.set_peer_ready(world.now, "home", true).unwrap();
    assert!(world.is_redirected("test"));
    world.core.set_owner_filter(world.now, Some("a rule filters by user".into())).unwrap();
    assert!(world.core.steering().servers().is_empty() && !world.is_redirected("test"));
    assert!(world.is_redirected("relayed"), "its rule requires it");
    let to_server = RedirectedFlow { filtered: false, ..redirected_flow(world.now) };
    assert_eq!(world.core.server_of(world.now, &to_server), None, "a relay carries the flow");
    let reason = explained(&mut world, "test");
    assert!(reason.contains("runs Braid, but a rule filters by user, so the flow goes direct"), "{reason}");
    let reason = explained(&mut world, "relayed");
    assert!(reason.contains("do not recognise them"), "{reason}");
    let warnings = world.core.status(world.now).warnings;
    assert!(warnings.iter().any(|text| text.contains("a rule filters by user")), "{warnings:?}");
    world.core.set_owner_filter(world.now, None).unwrap();
    assert!(world.is_redirected("test"));
    assert_eq!(world.core.server_of(world.now, &to_server), Some(KEY.into()));
}

/// Until the firewall has been read, no flow may bypass it.
#[test]
fn regression_an_unread_firewall_prevents_direct_bonds() {
    let mut world = peer_direct(config(Scheduler::RoundRobin));
    world.core.set_owner_filter(world.now, Some(UNREAD.into())).unwrap();
    assert!(!world.is_redirected("test"));
    assert!(world.core.status(world.now).warnings.iter().all(|text| !text.contains(UNREAD)), "no warning for this state");
}

#[test]
fn regression_a_flow_in_a_filtered_cgroup_keeps_its_socket() {
    let mut world = peer_direct(config(Scheduler::RoundRobin));
    let app = AppId { exe: ExeId { device: 1, inode: 5 }, name: "sandboxed".to_owned() };
    world.core.steering().filter(&app);
    let Steered::To(_, id) = world.connect("sandboxed", 5) else { panic!("it goes direct") };
    assert!(world.is_redirected("test"), "other programs are redirected");
    world.run(Duration::from_millis(300));
    let reason = world.core.explain(world.now, &ExplainRequest { flow: Some(id.0), ..Default::default() }).unwrap().reason;
    assert!(reason.contains("another BPF program filters the flow's cgroup"), "{reason}");
    let flow = RedirectedFlow { filtered: true, ..redirected_flow(world.now) };
    assert_eq!(world.core.server_of(world.now, &flow), None, "bonding by a rule uses a relay");
}

#[test]
fn a_servers_detection_expires_but_its_key_does_not() {
    let mut world = peer_direct(config(Scheduler::RoundRobin));
    assert!(world.is_redirected("test"));
    world.now = world.now + FRESH;
    world.run(Duration::from_secs(1));
    assert!(!world.is_redirected("test"));
    world.talk_to("test", ("203.0.113.10", 443), false);
    assert_eq!(world.questions[0].expect, Some(KEY.into()));
    let mut later = World::new(config(Scheduler::RoundRobin));
    let pins: Vec<_> = world.core.pinned_servers().map(|(host, key, _)| (host, key, Duration::from_secs(60))).collect();
    later.core.recall_servers(later.now, pins).unwrap();
    later.run(Duration::from_secs(1));
    later.core.steering().set_redirect_ready(true);
    assert!(!later.is_redirected("test"), "it must prove its key again");
    later.talk_to("test", ("203.0.113.10", 443), false);
    assert_eq!(later.questions[0].expect, Some(KEY.into()), "pinned keys survive a restart");
    later.answer(DetectionAnswer::Runs(KEY.into()));
    assert!(later.is_redirected("test"));
}

#[test]
fn a_closed_port_goes_direct_and_other_ports_do_not() {
    let mut world = peer_direct(config(Scheduler::RoundRobin));
    world.core.on_server(world.now, SERVER, ServerEvent::Closed(443)).unwrap();
    assert!(!world.is_redirected("test"));
    let app = AppId { exe: ExeId { device: 1, inode: 5 }, name: "test".to_owned() };
    let now = world.now;
    assert_eq!(world.core.steering().connect(now, &app, 1000, (SERVER, 80)), Steered::Redirected);
    world.run(Duration::from_secs(601));
    assert!(world.is_redirected("test"), "the port may be open again");
    world.core.on_server(world.now, SERVER, ServerEvent::NotLocal).unwrap();
    assert!(!world.is_redirected("test"));
}

#[test]
fn without_the_pinned_keys_no_server_is_trusted() {
    let mut world = peer_direct(config(Scheduler::RoundRobin));
    world.core.distrust_servers("servers.json cannot be read".to_owned());
    world.core.recall_servers(world.now, []).unwrap();
    assert!(!world.is_redirected("test"));
    world.talk_to("test", ("203.0.113.11", 443), false);
    assert_eq!(world.asked(), Vec::<String>::new());
    let now = world.now;
    assert!(world.core.status(now).warnings.iter().any(|text| text.contains("servers.json")));
}

#[test]
fn a_failed_update_of_the_servers_is_retried() {
    let mut world = World::with(FakeSteering::chaos(1_000_000), config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    world.talk_to("test", ("203.0.113.10", 443), false);
    world.answer(DetectionAnswer::Runs(KEY.into()));
    assert_eq!(world.core.steering().servers(), [SERVER]);
    world.core.steering().set_chaos(Some(1));
    assert!(world.core.on_server(world.now, SERVER, ServerEvent::Lost).is_err());
    world.core.steering().set_chaos(None);
    world.run(Duration::from_secs(2));
    assert!(world.core.steering().servers().is_empty());
}

/// A configuration that holds first connections.
fn holding() -> Config {
    Config { hold: Duration::from_millis(300), ..config(Scheduler::RoundRobin) }
}

fn holding_world(config: Config) -> World {
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.core.steering().set_redirect_ready(true);
    world
}

/// A first connection to the server that the kernel redirected.
fn first(world: &World, id: u64) -> RedirectedFlow {
    RedirectedFlow { id: FlowId(id), held: true, ..redirected_flow(world.now) }
}

#[test]
fn a_held_connection_goes_on_as_soon_as_its_host_has_proved_its_key_over_each_link() {
    let mut world = holding_world(holding());
    assert!(explained(&mut world, "test").contains("waits up to 300 ms"), "{}", explained(&mut world, "test"));
    assert!(world.is_redirected("test"), "the host is unknown");
    let flow = first(&world, 1);
    assert!(world.core.hold(world.now, &flow));
    world.run(Duration::from_millis(10));
    assert!(!world.is_redirected("test"), "only the first connection waits");
    assert!(explained(&mut world, "test").contains("waits for its answer"), "{}", explained(&mut world, "test"));
    assert_eq!(world.questions.len(), 1, "other networks do not learn of the destination before it has said that it runs Braid");
    let question = world.questions.remove(0);
    world.answer_over(question.link.slot, DetectionAnswer::Runs(KEY.into()));
    assert_eq!((world.questions.len(), world.released.len()), (1, 0), "it must prove its key over the other link, too");
    world.answer(DetectionAnswer::Runs(KEY.into()));
    assert_eq!(world.released, [FlowId(1)]);
    assert_eq!(world.core.server_of(world.now, &flow), Some(KEY.into()));
}

#[test]
fn a_held_connection_goes_direct_after_a_bounded_time_or_if_its_host_does_not_run_braid() {
    let mut world = holding_world(holding());
    let flow = first(&world, 1);
    assert!(world.core.hold(world.now, &flow));
    world.run(Duration::from_millis(290));
    assert_eq!(world.released, []);
    world.run(Duration::from_millis(20));
    assert_eq!((world.released.clone(), world.core.server_of(world.now, &flow)), (vec![FlowId(1)], None));
    world.answer(DetectionAnswer::Silent);
    assert!(!world.is_redirected("test"));
    assert!(explained(&mut world, "test").contains("has not said that it runs Braid"));
    // The result expires, and then the next first connection may wait.
    world.run(Duration::from_secs(3601));
    assert!(world.is_redirected("test"));
    let flow = first(&world, 2);
    assert!(world.core.hold(world.now, &flow));
    world.run(Duration::from_millis(20));
    world.answer(DetectionAnswer::Silent);
    assert_eq!(world.released, [FlowId(1), FlowId(2)], "at once after the answer");
    // A connection that waited for the daemon longer than that.
    let late = RedirectedFlow { started: world.now, remote: (std::net::IpAddr::from([203, 0, 113, 77]), 443).into(), ..first(&world, 3) };
    assert!(!world.core.hold(world.now + Duration::from_millis(300), &late));
}

#[test]
fn held_connections_are_limited_in_number_and_by_user() {
    let mut world = holding_world(holding());
    let mut held = [0; 2];
    for id in 0..32u64 {
        for (user, count) in held.iter_mut().enumerate() {
            let remote = (std::net::IpAddr::from([203, 0, 113, 100 + id as u8]), 443).into();
            let flow = RedirectedFlow { user: user as u32, remote, ..first(&world, 2 * id + user as u64) };
            *count += u32::from(world.core.hold(world.now, &flow));
        }
    }
    assert_eq!(held, [16, 16], "of one user");
    let mut all = 32;
    for id in 0..64u64 {
        let remote = (std::net::IpAddr::from([203, 0, 113, 100 + id as u8 % 16]), 443).into();
        all += u32::from(world.core.hold(world.now, &RedirectedFlow { user: 10 + id as u32, remote, ..first(&world, 1000 + id) }));
    }
    assert_eq!(all, 64);
    assert!(explained(&mut world, "test").contains("64 connections wait already"), "{}", explained(&mut world, "test"));
    world.run(Duration::from_millis(301));
    assert_eq!(world.released.len(), 64);
}

/// A world in which as many connections of user 1 wait as may.
fn crowded_world() -> World {
    let mut world = holding_world(holding());
    for id in 0..16u8 {
        let remote = (std::net::IpAddr::from([203, 0, 113, 100 + id]), 443).into();
        let flow = RedirectedFlow { remote, ..first(&world, id.into()) };
        assert!(world.core.hold(world.now, &flow));
    }
    world
}

#[test]
fn a_host_that_was_not_asked_is_not_held_for_a_while() {
    let mut world = crowded_world();
    let flow = first(&world, 100);
    assert!(!world.core.hold(world.now, &flow), "16 connections of its user wait");
    world.run(Duration::from_millis(110));
    assert!(!world.is_redirected("test"), "its next connections do not pass through the daemon");
    world.run(Duration::from_secs(61));
    assert!(world.is_redirected("test"));
    let flow = first(&world, 101);
    assert!(world.core.hold(world.now, &flow));
}

/// One user's waiting connections must not decide which hosts are asked for others.
#[test]
fn regression_a_host_whose_connection_did_not_wait_is_asked_nevertheless() {
    let mut world = crowded_world();
    let flow = first(&world, 100);
    let elsewhere = RedirectedFlow { remote: (std::net::IpAddr::from([203, 0, 113, 11]), 443).into(), ..first(&world, 101) };
    assert!(!world.core.hold(world.now, &flow) && !world.core.hold(world.now, &elsewhere));
    world.run(Duration::from_millis(10));
    world.asked();
    let other = RedirectedFlow { user: 2, ..first(&world, 102) };
    assert!(world.core.hold(world.now, &other), "a connection of another user waits");
    world.run(Duration::from_millis(110));
    assert_eq!(world.asked(), ["203.0.113.10"]);
    world.talk_to("test", ("203.0.113.11", 443), false);
    assert_eq!(world.asked(), ["203.0.113.11"], "a flow that did not wait causes the question, too");
}

#[test]
fn regression_many_hosts_that_are_not_asked_are_written_together() {
    let mut world = crowded_world();
    world.run(Duration::from_millis(10));
    let before = world.core.steering().changes();
    for id in 0..200u8 {
        let flow =
            RedirectedFlow { remote: (std::net::IpAddr::from([198, 51, 100, id]), 443).into(), ..first(&world, 100 + u64::from(id)) };
        assert!(!world.core.hold(world.now, &flow));
        world.core.tick(world.now).unwrap();
    }
    assert_eq!(world.core.steering().changes(), before);
    world.run(Duration::from_millis(110));
    assert_eq!(world.core.steering().changes(), before + 1);
    let app = AppId { exe: ExeId { device: 1, inode: 5 }, name: "test".to_owned() };
    for id in [0, 199] {
        let now = world.now;
        let steered = world.core.steering().connect(now, &app, 1000, (std::net::IpAddr::from([198, 51, 100, id]), 443));
        assert!(!matches!(steered, Steered::Redirected));
    }
}

#[test]
fn connections_are_not_held_where_their_host_may_not_be_asked_or_its_answer_would_not_be_used() {
    let mut config = holding();
    config.policy.apps = vec![
        AppRule { carry: Carry::Direct, ..named("direct") },
        AppRule { relay: Some("home".to_owned()), ..named("relayed") },
        AppRule { links: only(&["lte0"]), ..named("pinned") },
    ];
    let mut world = holding_world(config.clone());
    let which = |world: &mut World| ["test", "direct", "relayed", "pinned"].map(|name| world.is_redirected(name));
    assert_eq!(which(&mut world), [true, false, false, false]);
    world.core.set_owner_filter(world.now, Some("a rule matches on users".to_owned())).unwrap();
    assert_eq!(which(&mut world), [false; 4]);
    assert!(explained(&mut world, "test").contains("does not wait for the answer: a rule matches on users"));
    let now = world.now;
    let flow = RedirectedFlow { filtered: true, ..first(&world, 1) };
    assert!(!world.core.hold(now, &flow));
    for other in [
        Config { hold: Duration::ZERO, ..config.clone() },
        Config { detect: Detect::Nobody, ..config.clone() },
        Config { detect: Detect::Listed { nets: vec!["198.51.100.0/24".parse().unwrap()], names: vec![] }, ..config.clone() },
    ] {
        let mut world = holding_world(other);
        assert_eq!(which(&mut world), [false; 4]);
        let flow = first(&world, 1);
        assert!(!world.core.hold(world.now, &flow));
        assert!(!explained(&mut world, "test").contains("wait"));
    }
}

#[test]
fn private_hosts_are_asked_only_in_networks_that_are_named() {
    const PRIVATE: (&str, u16) = ("192.168.50.7", 443);
    for (networks, expected) in [(vec![], None), (vec!["192.168.51.0/24"], None), (vec!["192.168.50.0/24"], Some("192.168.50.7"))] {
        let detect_networks = networks.iter().map(|net| net.parse().unwrap()).collect();
        for detect in [Detect::Nobody, Detect::Everybody] {
            let mut world = holding_world(Config { detect, detect_networks: Vec::clone(&detect_networks), ..holding() });
            let app = AppId { exe: ExeId { device: 1, inode: 5 }, name: "test".to_owned() };
            let to = (PRIVATE.0.parse().unwrap(), PRIVATE.1);
            let now = world.now;
            let redirected = matches!(world.core.steering().connect(now, &app, 1000, to), Steered::Redirected);
            assert_eq!(redirected, expected.is_some(), "{networks:?}");
            let flow = RedirectedFlow { remote: to.into(), ..first(&world, 1) };
            assert_eq!(world.core.hold(world.now, &flow), expected.is_some());
            world.run(Duration::from_millis(10));
            assert_eq!(world.asked(), Vec::from_iter(expected), "{networks:?}");
        }
    }
}
