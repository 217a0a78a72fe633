//! Decisions that the configuration asks for: schedulers, rules, preferences.

use braid_api::LinkState;
use std::time::Duration;

use braid_control::config::Config;
use braid_control::core::Exit;
use braid_control::fake::Steered;
use braid_control::steering::{AppId, ExeId, RedirectedFlow};
use braid_decide::policy::{AppMatcher, AppRule, Carry, Fallback, LinkRule, ProbeMode, Scheduler};
use braid_model::{ByteCount, Class, Direction, FlowId, LinkIndex, LinkSet, Rate, Role, Time, Traffic};

use super::world::*;

#[test]
fn only_one_follows_the_systems_metric() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    world.run(Duration::from_secs(1));
    assert_eq!(world.used(), ["wlan0"]);
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(world.used(), ["lte0"], "the next best link when the first is gone");
}

#[test]
fn without_its_link_a_strict_rule_denies_and_a_preference_yields() {
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
fn rules_for_a_relay_redirect_while_it_is_reachable() {
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
    let relays = [Some(2), Some(3), Some(0), Some(9), None]
        .map(|rule| world.core.rule_of(world.now, &redirected_flow(rule)).map(|rule| rule.relay.clone()));
    assert_eq!(relays, [Some(Some("home".to_owned())), Some(None), None, None, None], "the first rule is an exclusion");
}

/// A redirected flow that matched the rule of this number.
fn redirected_flow(rule: Option<u8>) -> RedirectedFlow {
    RedirectedFlow {
        id: FlowId(1),
        remote: (SERVER, 443).into(),
        app: AppId { exe: ExeId { device: 1, inode: 1 }, name: "call".into() },
        process: 1,
        user: 1,
        cgroup: 1,
        class: Class::Unclassified,
        rule,
        direction: Direction::Down,
        demand: ByteCount::ZERO,
        started: Time::ZERO,
        filtered: false,
        held: false,
        forwarded: false,
    }
}

/// The daemon's own sockets are not steered, so it must apply the rules itself.
#[test]
fn regression_a_flow_that_no_relay_takes_leaves_as_the_kernel_would_steer_it() {
    let mut config = config(Scheduler::RoundRobin);
    let rule = |links: Option<&[&str]>, prefer: &[&str]| AppRule {
        matcher: AppMatcher { port: Some(443), ..AppMatcher::default() },
        links: links.and_then(only),
        prefer: only(prefer).unwrap_or_default(),
        carry: Carry::Bond,
        ..AppRule::default()
    };
    let (wlan, lte) = (&["wlan0"][..], &["lte0"][..]);
    config.policy.apps = vec![rule(None, &[]), rule(Some(wlan), &[]), rule(None, lte), rule(Some(wlan), lte)];
    config.policy.links = vec![LinkRule { capacity_down: Some(Rate::from_mbps(900)), ..link_rule("wlan0") }];
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    let found = |world: &World| {
        [0, 1, 2, 3].map(|rule| world.core.bond_policy(world.now, &redirected_flow(Some(rule)))).map(|policy| (policy.exit, policy.links))
    };
    let by = |name: &str| Exit::Device(name.to_owned());
    let all = LinkSet::ALL;
    assert_eq!(
        found(&world),
        [(by("wlan0"), all), (by("wlan0"), LinkSet(0b01)), (by("lte0"), LinkSet(0b10)), (by("wlan0"), LinkSet(0b01))]
    );
    // A strict rule stays strict; a preference yields.
    world.devices[0].carrier = false;
    world.set_network();
    assert_eq!(
        found(&world),
        [(by("lte0"), all), (Exit::Nowhere, LinkSet(0b01)), (by("lte0"), LinkSet(0b10)), (Exit::Nowhere, LinkSet(0b01))]
    );
    world.devices[0].carrier = true;
    world.set_network();
    config.policy.links = vec![LinkRule { role: Role::Excluded, ..link_rule("wlan0") }];
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(found(&world)[0], (by("lte0"), all), "an excluded link is never used, whatever the system's choice");
}

#[test]
fn regression_a_flow_whose_rule_is_no_longer_stored_is_refused() {
    let mut config = Config::default();
    let rule = |weight: f64| AppRule {
        links: Some(vec![braid_decide::policy::LinkSelector::Name(braid_decide::policy::Pattern::new("wlan0"))]),
        carry: Carry::Bond,
        weight,
        ..AppRule::default()
    };
    config.policy.apps = vec![rule(1.0)];
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    let flow = redirected_flow(Some(0));
    assert!(!world.core.bond_policy(world.now, &flow).rule_expired);
    for change in 0..20u32 {
        world.run(Duration::from_millis(10));
        config.policy.apps = vec![rule(2.0 + f64::from(change))];
        world.core.reconfigure(world.now, config.clone()).unwrap();
    }
    let policy = world.core.bond_policy(world.now, &flow);
    assert_eq!((policy.exit, policy.rule_expired), (Exit::Nowhere, true), "the rule may have been strict");
    let unruled = world.core.bond_policy(world.now, &redirected_flow(None));
    assert!(!unruled.rule_expired && unruled.exit != Exit::Nowhere, "a flow without a rule continues");
}

#[test]
fn refusals_are_noted_up_to_a_limit_and_stored_for_private_addresses_only() {
    use braid_bond::codes::{NOT_OPENED, QUOTA};
    let mut world = World::new(config(Scheduler::RoundRobin));
    world.run(Duration::from_secs(1));
    world.core.set_peer_ready(world.now, "home", true).unwrap();
    let now = world.now;
    let mut refused = |number: u32, code| world.core.on_refused(now, "home", std::net::Ipv4Addr::from_bits(number).into(), code).0;
    let private = 0x0a00_0000;
    let notes: Vec<String> = (0..100).filter_map(|number| refused(private + number, NOT_OPENED)).collect();
    assert_eq!(notes.len(), 16, "{notes:#?}");
    assert!(notes[0].contains("10.0.0.0, a private address") && notes[15].contains("further refusals are not noted"), "{notes:#?}");
    assert_eq!(refused(0x0808_0808, NOT_OPENED), None, "a router on the path may be the cause");
    let quota: Vec<String> = (0..3).filter_map(|_| refused(0x0808_0808, QUOTA)).collect();
    assert!(quota.len() == 1 && quota[0].contains("monthly quota"), "{quota:#?}");
    let refusing = |world: &World, remote: [u8; 4]| {
        let flow = RedirectedFlow { remote: (remote, 443).into(), ..redirected_flow(None) };
        world.core.bond_policy(world.now, &flow).refusing
    };
    assert_eq!((refusing(&world, [10, 0, 0, 7]), refusing(&world, [8, 8, 8, 8])), (vec!["home".to_owned()], Vec::new()));
}

#[test]
fn a_new_configuration_applies_to_new_flows_and_keeps_learned_values() {
    let mut world = World::new(config(Scheduler::OnlyOne));
    world.run(Duration::from_secs(1));
    let Steered::To(0, id) = world.connect("old", 5) else { panic!() };
    world.core.steering().transfer(id, ByteCount::new(5000), ByteCount::new(10));
    world.run(Duration::from_millis(500));
    let mut next = config(Scheduler::RoundRobin);
    next.policy.links = vec![LinkRule { role: Role::Backup, ..link_rule("wlan0") }];
    world.core.reconfigure(world.now, next).unwrap();
    world.run(Duration::from_millis(500));
    assert_eq!(world.used(), ["lte0"]);
    let now = world.now;
    assert_eq!(world.core.flows(now)[0].link, "wlan0", "a living flow stays where it is");
    let wlan = world.core.links(now).into_iter().find(|link| link.name == "wlan0").unwrap();
    assert_eq!((wlan.state, wlan.rx_bytes), (LinkState::Backup, Some(5000)));
}

#[test]
fn an_explanation_contains_the_rule_the_loads_and_the_runner_up() {
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
    let text = "the flow is expected to end first there, in 0.081 s: 1.0 MB of its own behind 0 B of the link's load, 0 B of 0 flows";
    assert!(answer.reason.starts_with(text), "{}", answer.reason);
    assert_eq!(answer.candidates.len(), 2);
    assert!(answer.candidates.iter().all(|candidate| candidate.end_us <= candidate.finish_us && candidate.end_us.is_some()), "{answer:?}");
    assert!(answer.candidates.iter().all(|candidate| candidate.capacity_assumed), "nothing has been measured: {answer:?}");
    assert_eq!(answer.program_known, Some(false));
    let denied = world.core.explain(now, &ask(25)).unwrap();
    assert_eq!((denied.outcome, denied.rule), (braid_api::Outcome::Denied, Some(1)));
    assert!(
        denied.candidates.iter().all(|candidate| candidate.reason.as_deref() == Some("the rule does not name this link (links)")),
        "{denied:?}"
    );
    let busy = braid_api::ExplainRequest { exe: None, name: Some("busy".into()), ..ask(443) };
    world.run(Duration::from_secs(1));
    assert_eq!(world.core.explain(world.now, &busy).unwrap().program_known, Some(true));
    let mut unclear = ask(1);
    unclear.destination = Some("example.org".into());
    assert_eq!(world.core.explain(now, &unclear).unwrap_err().cause, braid_control::Cause::Unclear);
}

#[test]
fn the_papers_rules_and_random_distribute_flows_and_are_explained() {
    // wlan0 comes first in the system's order, then lte0 and eth0. eth0 is busy for 4 s, with 20 flows of 2 MB at 10 MB/s.
    let rates = [("wlan0", 20), ("lte0", 80), ("eth0", 80)];
    let start = |scheduler| {
        let mut config = config(scheduler);
        let link = |(name, mbps): (&str, u64)| LinkRule { capacity_down: Some(Rate::from_mbps(mbps)), ..link_rule(name) };
        config.policy.links = rates.into_iter().map(link).collect();
        config.policy.default_demand = ByteCount::new(2_000_000);
        let matcher = AppMatcher { name: Some("busy".into()), ..AppMatcher::default() };
        config.policy.apps = vec![AppRule { matcher, links: only(&["eth0"]), ..AppRule::default() }];
        let mut world = World::new(config);
        world.devices.push(facts(3, "eth0"));
        world.set_network();
        world.run(Duration::from_secs(1));
        (0..20).for_each(|_| assert!(matches!(world.connect("busy", 1), Steered::To(2, _))));
        world
    };
    let ask = |world: &mut World| {
        let request = braid_api::ExplainRequest { name: Some("x".into()), destination: Some(SERVER.to_string()), ..Default::default() };
        let answer = world.core.explain(world.now, &request).unwrap();
        assert!(answer.candidates.iter().all(|candidate| candidate.finish_us.is_some() && candidate.end_us.is_none()), "{answer:?}");
        (answer.link.unwrap(), answer.reason)
    };
    let next = |world: &mut World, count: usize| -> Vec<usize> {
        let slot = |flow| if let Steered::To(slot, _) = flow { slot } else { panic!("{flow:?}") };
        (0..count).map(|_| slot(world.connect("x", 2))).collect()
    };
    let mut least = start(Scheduler::LeastFinish);
    let (link, why) = ask(&mut least);
    assert!(
        why.starts_with("it finishes its load and the flow first, in 0.2") && why.contains("0 B of load and 2.0 MB of the flow"),
        "{why}"
    );
    assert_eq!((link.as_str(), next(&mut least, 5)), ("lte0", vec![1, 1, 1, 0, 1]));
    let mut whole = start(Scheduler::LeastMakespan);
    let (link, why) = ask(&mut whole);
    assert!(why.starts_with("it finishes the flow in 0.8") && why.contains("before the busiest link finishes its load, in 4."), "{why}");
    assert_eq!((link.as_str(), next(&mut whole, 5)), ("wlan0", vec![0, 0, 0, 0, 0]));
    assert_eq!(next(&mut whole, 20), [1; 20], "then the next link in the system's order, until it is as busy");
    let (_, why) = ask(&mut whole);
    assert!(
        why.starts_with("no link finishes the flow before the busiest one finishes its load; with this one all are done first"),
        "{why}"
    );
    let mut random = start(Scheduler::Random);
    for _ in 0..5 {
        let (link, why) = ask(&mut random);
        assert!(why.starts_with("the next flow draws it at random among 3 links"), "{why}");
        assert_eq!(rates[next(&mut random, 1)[0]].0, link, "the next flow draws what the explanation says");
    }
    let drawn = next(&mut random, 300);
    // 100 expected, standard deviation 8.
    assert!((0..3).all(|link| (60..140).contains(&drawn.iter().filter(|slot| **slot == link).count())), "{drawn:?}");
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
fn a_handover_needs_a_gain_of_more_than_hysteresis() {
    let mut world = World::new(config(Scheduler::Handover));
    world.round_trip(1, 30);
    assert_eq!(world.ten(), [10, 0]);
    world.round_trip(2, 25);
    assert_eq!(world.ten(), [10, 0], "5 ms are not enough");
    world.round_trip(2, 15);
    assert_eq!(world.ten(), [0, 10]);
    world.round_trip(1, 10);
    assert_eq!(world.ten(), [0, 10], "nor for the way back");
    let mut eager = config(Scheduler::Handover);
    (eager.policy.hysteresis, eager.probe) = (Duration::from_millis(1), ProbeMode::Continuous);
    world.core.reconfigure(world.now, eager).unwrap();
    assert_eq!(world.ten(), [10, 0]);
    world.answering.insert(LinkIndex(1), false);
    world.run(Duration::from_secs(3));
    assert_eq!(world.ten(), [0, 10], "a dead link is left at once");
}

#[test]
fn a_handover_to_a_link_that_falls_often_needs_a_larger_gain() {
    let mut world = World::new(Config { probe: ProbeMode::Continuous, ..config(Scheduler::Handover) });
    let counters = |world: &mut World| {
        let now = world.now;
        world.core.on_counters(now, UNIX, &[1, 2].map(|index| (LinkIndex(index), Traffic::default())));
        world.core.tick(now).unwrap();
    };
    world.run(Duration::from_secs(1));
    counters(&mut world);
    for _ in 0..3 {
        for carrier in [false, true] {
            world.devices[1].carrier = carrier;
            world.set_network();
            counters(&mut world);
            world.run(Duration::from_secs(10));
            counters(&mut world);
        }
    }
    let now = world.now;
    let links = world.core.links(now);
    let of = |name: &str| links.iter().find(|link| link.name == name).unwrap();
    // Three falls in a minute, after an hour that is assumed to be without falls.
    assert!(of("lte0").falls_per_day.is_some_and(|falls| (65.0..72.0).contains(&falls)), "{:?}", of("lte0"));
    assert!(of("lte0").mean_life_s.is_some_and(|life| (5..25).contains(&life)), "{:?}", of("lte0"));
    assert_eq!((of("wlan0").falls_per_day, of("wlan0").mean_life_s), (Some(0.0), None));
    world.round_trip(2, 40);
    world.round_trip(1, 60);
    assert_eq!(world.ten(), [10, 0], "20 ms are more than hysteresis, but not enough for a link that falls");
    world.round_trip(2, 5);
    assert_eq!(world.ten(), [0, 10]);
}

#[test]
fn a_rule_by_class_applies_to_programs_of_the_class() {
    let mut config = config(Scheduler::OnlyOne);
    let matcher = AppMatcher { class: Some(Class::RealTime), ..AppMatcher::default() };
    config.policy.apps = vec![AppRule { matcher, links: only(&["lte0"]), ..AppRule::default() }];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    assert!(matches!(world.connect("ssh", 9), Steered::To(1, _)));
    assert!(matches!(world.connect("test", 99), Steered::To(0, _)));
    let now = world.now;
    let policy = world.core.policy();
    assert!(policy.apps[0].matches.contains("class = \"real-time\""), "{policy:?} {now:?}");
}

#[test]
fn links_of_the_highest_priority_share_and_others_stay_unused() {
    let mut config = Config { probe: ProbeMode::Continuous, ..config(Scheduler::RoundRobin) };
    config.policy.links = vec![LinkRule { priority: 1, ..link_rule("wlan0") }];
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [0, 10]);
    world.answering.insert(LinkIndex(2), false);
    world.run(Duration::from_secs(3));
    assert_eq!(world.ten(), [10, 0], "the next priority if the first is dead");
    config.policy.links.push(LinkRule { priority: 1, ..link_rule("lte0") });
    world.answering.insert(LinkIndex(2), true);
    world.core.reconfigure(world.now, config).unwrap();
    world.run(Duration::from_secs(10));
    assert_eq!(world.ten(), [5, 5], "equal priorities share");
}

#[test]
fn what_leaves_through_a_relay_only_has_no_other_exit() {
    let mut config = config(Scheduler::RoundRobin);
    let user = AppMatcher { user: Some(7), ..AppMatcher::default() };
    let program = AppMatcher { name: Some("curl".into()), ..AppMatcher::default() };
    config.policy.bonds_all = true;
    config.policy.fallback = Fallback::None;
    config.policy.apps = vec![
        AppRule { matcher: user, carry: Carry::Direct, ..AppRule::default() },
        AppRule { matcher: program, carry: Carry::Bond, fallback: Some(Fallback::Direct), ..AppRule::default() },
        AppRule { matcher: AppMatcher { port: Some(25), ..AppMatcher::default() }, ..AppRule::default() },
    ];
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    let exits = [None, Some(0), Some(1), Some(2)].map(|rule| world.core.bond_policy(world.now, &redirected_flow(rule)).exit);
    assert_eq!(exits.map(|exit| exit == Exit::Nowhere), [true, false, false, true]);
    let mut reloaded = World::new(Config::default());
    reloaded.run(Duration::from_secs(1));
    assert!(reloaded.core.take_actions().gateway.is_none());
    reloaded.core.reconfigure(reloaded.now, config.clone()).unwrap();
    let plan = reloaded.core.take_actions().gateway.flatten().expect("the firewall is to hold it without a gateway");
    assert!(plan.lan.is_empty() && !reloaded.core.is_gateway());
    let own = plan.own.unwrap();
    let conditions: Vec<_> = own.rules.iter().map(|rule| (rule.user, rule.port, rule.links.clone())).collect();
    assert_eq!(conditions, [(Some(7), None, None), (None, Some(25), Some(vec![]))], "the firewall knows no programs");
    assert!(!own.passed.contains("wlan0") && own.local.iter().any(|(link, nets)| link == "wlan0" && !nets.is_empty()));
    world.core.set_peer_ready(world.now, "home", true).unwrap();
    assert_eq!(world.core.bond_policy(world.now, &redirected_flow(None)).exit, Exit::Nowhere);
    config.policy.fallback = Fallback::Direct;
    world.core.reconfigure(world.now, config).unwrap();
    assert_ne!(world.core.bond_policy(world.now, &redirected_flow(None)).exit, Exit::Nowhere);
}
