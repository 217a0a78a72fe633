//! Rules with conditions on the context.

use std::collections::BTreeSet;
use std::time::Duration;

use braid_api::{ExplainRequest, FactChange};
use braid_control::Cause;
use braid_control::config::Config;
use braid_control::core::{Core, Due, MAX_FACTS};
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, ExeId, RedirectedFlow, Steering};
use braid_decide::policy::{AppMatcher, AppRule, Carry, LinkRule, Scheduler, When};
use braid_decide::steer::prefix_map;
use braid_decide::tradeoff::Supply;
use braid_model::{ByteCount, Class, Direction, Family, FlowId, LinkIndex, LinkSet, Role, Time};

use super::world::*;

fn moving() -> When {
    When { facts: [("moving".to_owned(), "true".to_owned())].into(), ..When::default() }
}

/// Every flow of the program "test" uses lte0 while `when` holds, else wlan0.
fn either(when: When) -> Config {
    let mut config = config(Scheduler::RoundRobin);
    let matcher = AppMatcher { name: Some("test".into()), ..AppMatcher::default() };
    config.policy.apps = vec![
        AppRule { matcher: matcher.clone(), when, links: only(&["lte0"]), carry: Carry::Bond, weight: 2.0, ..AppRule::default() },
        AppRule { matcher, links: only(&["wlan0"]), carry: Carry::Bond, ..AppRule::default() },
    ];
    config
}

fn set(world: &mut World, name: &str, value: Option<&str>, span: Option<Duration>) -> Result<String, Cause> {
    let for_ms = span.map(|span| span.as_millis() as u64);
    let change = FactChange { name: name.to_owned(), value: value.map(str::to_owned), for_ms };
    world.core.set_fact(world.now, &change).map(|done| done.message).map_err(|error| error.cause)
}

fn started(config: Config) -> World {
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.core.take_actions();
    world
}

#[test]
fn a_fact_applies_to_new_flows_at_once_and_expires_on_time() {
    let mut world = started(either(moving()));
    assert_eq!(world.used(), ["wlan0"]);
    let said = set(&mut world, "moving", Some("true"), Some(Duration::from_secs(10))).unwrap();
    assert_eq!(said, "moving is now true for 10 s; [[app]] entry 1 applies now");
    assert!(world.core.take_actions().rules_changed);
    assert_eq!(world.used(), ["lte0"], "without a tick");
    let until = world.now + Duration::from_secs(10);
    world.run(Duration::from_millis(9_900));
    assert_eq!(world.used(), ["lte0"]);
    world.core.tick(world.now).unwrap();
    assert!(world.core.poll_timeout(world.now).0 <= until);
    world.core.tick(until).unwrap();
    assert!(world.core.take_actions().rules_changed);
    assert_eq!(world.used(), ["wlan0"]);
    assert_ne!(world.core.poll_timeout(until).1, Due::Context);
    set(&mut world, "moving", Some("true"), None).unwrap();
    assert_eq!(set(&mut world, "moving", None, None).unwrap(), "moving is cleared; [[app]] entry 1 no longer applies");
    assert_eq!(world.used(), ["wlan0"]);
}

#[test]
fn a_time_window_begins_and_ends_without_a_tick_in_between() {
    let mut world = started(either(When { time: Some("22:00-06:00".parse().unwrap()), ..When::default() }));
    assert_eq!(world.used(), ["wlan0"], "the time is unknown");
    world.core.on_clock(world.now, Duration::from_secs(22 * 3600 - 2)).unwrap();
    let due = world.now + Duration::from_secs(2);
    world.core.tick(due).unwrap();
    world.now = due;
    assert_eq!(world.used(), ["lte0"]);
    // The user sets the clock, or travels to another time zone.
    world.core.on_clock(world.now, Duration::from_secs(12 * 3600)).unwrap();
    assert_eq!(world.used(), ["wlan0"]);
    world.core.on_clock(world.now, Duration::from_secs(24 * 3600 - 1)).unwrap();
    assert_eq!(world.used(), ["lte0"]);
    world.now = world.now + Duration::from_secs(2);
    world.core.tick(world.now).unwrap();
    assert_eq!(world.used(), ["lte0"], "after midnight");
}

#[test]
fn sensors_the_battery_and_networks_change_the_rules() {
    let mut world = started(either(moving()));
    world.core.on_moving(world.now, Some(true)).unwrap();
    assert_eq!(world.used(), ["lte0"]);
    set(&mut world, "moving", Some("false"), None).unwrap();
    assert_eq!(world.used(), ["wlan0"], "the user's word takes precedence over the sensor");
    set(&mut world, "moving", None, None).unwrap();
    assert_eq!(world.used(), ["lte0"]);
    world.core.on_moving(world.now, None).unwrap();
    assert_eq!(world.used(), ["wlan0"]);

    let mut world = started(either(When { battery_below: Some(0.3), ..When::default() }));
    let supply = |level| Some(Supply { level, plugged: false, power: None });
    for (level, link) in [(0.5, "wlan0"), (0.29, "lte0"), (0.3, "wlan0")] {
        world.core.on_supply(world.now, supply(level)).unwrap();
        assert_eq!(world.used(), [link], "{level}");
    }

    let mut world = started(either(When { ssid: Some("home".into()), ..When::default() }));
    assert!(world.core.asks_ssid() && !world.core.asks_moving());
    world.core.on_ssids(world.now, BTreeSet::from(["home".to_owned()])).unwrap();
    assert_eq!(world.used(), ["lte0"]);
    world.core.on_ssids(world.now, BTreeSet::new()).unwrap();
    assert_eq!(world.used(), ["wlan0"]);
}

#[test]
fn a_running_program_changes_the_rules_of_others_until_its_last_flow_ends() {
    let mut world = started(either(When { running: Some("game".into()), ..When::default() }));
    let Steered::To(_, first) = world.connect("game", 7) else { panic!("it was not steered") };
    world.run(Duration::from_millis(500));
    assert_eq!(world.used(), ["lte0"]);
    world.core.steering().close(world.now, first);
    let events = world.core.steering().events(100);
    world.core.on_events(world.now, events).unwrap();
    assert_eq!(world.used(), ["wlan0"]);
    let game = AppId { exe: ExeId { device: 1, inode: 7 }, name: "game".into() };
    world.core.on_bonded_apps(world.now, BTreeSet::from([game])).unwrap();
    assert_eq!(world.used(), ["lte0"], "a bonded flow counts too");
    world.core.on_bonded_apps(world.now, BTreeSet::new()).unwrap();
    assert_eq!(world.used(), ["wlan0"]);
}

#[test]
fn a_running_program_given_by_path_is_the_file_there() {
    let mut world = started(either(When { running: Some("/usr/bin/curl".into()), ..When::default() }));
    // Its path is the same in another mount namespace.
    assert!(matches!(world.connect("curl", 8), Steered::To(..)));
    world.run(Duration::from_millis(500));
    assert_eq!(world.used(), ["wlan0"]);
    // A symbolic link to it.
    assert!(matches!(world.connect("other", 7), Steered::To(..)));
    world.run(Duration::from_millis(500));
    assert_eq!(world.used(), ["lte0"]);
}

/// A bonded flow of "test" that the kernel matched with this rule.
fn bonded(world: &World, rule: u8) -> RedirectedFlow {
    RedirectedFlow {
        id: FlowId(1),
        remote: (SERVER, 443).into(),
        app: AppId { exe: ExeId { device: 1, inode: 99 }, name: "test".into() },
        process: 1,
        user: 1,
        cgroup: 1,
        class: Class::Unclassified,
        rule: Some(rule),
        direction: Direction::Down,
        demand: ByteCount::ZERO,
        started: world.now,
        filtered: false,
        held: false,
        forwarded: false,
    }
}

#[test]
fn a_bonded_flow_gets_the_rule_that_holds_now_among_those_of_its_start() {
    let mut world = started(either(moving()));
    let flow = bonded(&world, 1);
    let policy = |world: &World| {
        let policy = world.core.bond_policy(world.now, &flow);
        (policy.rule, policy.weight, policy.links)
    };
    assert_eq!(policy(&world), (Some(1), 1.0, LinkSet(0b01)));
    set(&mut world, "moving", Some("true"), None).unwrap();
    assert_eq!(policy(&world), (Some(0), 2.0, LinkSet(0b10)));
    assert!(world.core.bond_reason(world.now, &flow, false).when.is_some_and(|when| when == "moving = true"));
    // A reload changes the rules of later flows only; the context still decides among those of its start.
    world.run(Duration::from_millis(10));
    let mut config = either(moving());
    config.policy.apps.remove(0);
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(policy(&world).0, Some(0));
    world.core.take_actions();
    set(&mut world, "moving", None, None).unwrap();
    assert!(world.core.take_actions().rules_changed, "although no configured rule depends on it");
    assert_eq!(policy(&world), (Some(1), 1.0, LinkSet(0b01)));
}

#[test]
fn a_flow_without_an_entry_gets_only_one_whose_condition_has_changed() {
    let mut world = started(either(moving()));
    // The kernel knows what this process could not tell, for example the flow's cgroup.
    let flow = RedirectedFlow { rule: None, ..bonded(&world, 1) };
    assert_eq!(world.core.bond_policy(world.now, &flow).rule, None);
    set(&mut world, "moving", Some("true"), None).unwrap();
    assert_eq!(world.core.bond_policy(world.now, &flow).rule, Some(0));
}

#[test]
fn a_link_s_entry_applies_only_in_its_context() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.links = vec![LinkRule { role: Role::Excluded, when: moving(), ..link_rule("wlan0") }];
    let mut world = started(config);
    assert_eq!(world.used(), ["wlan0", "lte0"]);
    set(&mut world, "moving", Some("true"), None).unwrap();
    assert_eq!((world.used(), world.state("wlan0")), (vec!["lte0".to_owned()], "excluded".to_owned()));
    set(&mut world, "moving", None, None).unwrap();
    assert_eq!(world.used().len(), 2);
}

#[test]
fn the_policy_and_explanations_show_what_holds() {
    let mut world = started(either(moving()));
    let request = ExplainRequest { name: Some("test".into()), destination: Some(SERVER.to_string()), ..ExplainRequest::default() };
    let explained = world.core.explain(world.now, &request).unwrap();
    assert_eq!((explained.rule, explained.when.clone(), explained.skipped.len()), (Some(2), None, 1));
    let skipped = &explained.skipped[0];
    assert_eq!((skipped.rule, skipped.when.as_str(), skipped.unmet.as_str()), (1, "moving = true", "moving is not set"));
    let entry = |world: &World| world.core.policy().apps[0].clone();
    assert_eq!((entry(&world).when.as_deref(), entry(&world).unmet.as_deref()), (Some("moving = true"), Some("moving is not set")));
    set(&mut world, "moving", Some("true"), None).unwrap();
    let explained = world.core.explain(world.now, &request).unwrap();
    assert_eq!((explained.rule, explained.when.as_deref(), explained.skipped.len()), (Some(1), Some("moving = true"), 0));
    assert_eq!(entry(&world).unmet, None);
}

#[test]
fn facts_are_bounded_and_checked() {
    let mut world = started(either(moving()));
    for name in ["", "time", "Moving", "a b", &"x".repeat(33)] {
        assert_eq!(set(&mut world, name, Some("true"), None), Err(Cause::Unclear), "{name}");
    }
    assert_eq!(set(&mut world, "moving", Some(""), None), Err(Cause::Unclear));
    assert_eq!(set(&mut world, "moving", Some(&"x".repeat(65)), None), Err(Cause::Unclear));
    assert_eq!(set(&mut world, "moving", Some("true"), Some(Duration::ZERO)), Err(Cause::Unclear));
    assert_eq!(set(&mut world, "moving", Some("true"), Some(Duration::from_secs(400 * 86_400))), Err(Cause::Unclear));
    assert_eq!(set(&mut world, "docked", None, None), Err(Cause::NotFound));
    for number in 0..MAX_FACTS {
        set(&mut world, &format!("fact{number}"), Some("true"), None).unwrap();
    }
    assert_eq!(set(&mut world, "moving", Some("true"), None), Err(Cause::Conflict));
    set(&mut world, "fact0", Some("false"), None).unwrap();
    assert_eq!(world.core.facts(world.now).len(), MAX_FACTS);
    let change = FactChange { name: "fact1".into(), value: Some("x".into()), for_ms: None };
    let accepted = world.core.set_fact(world.now, &change).unwrap();
    assert!(accepted.warnings[0].contains("no rule refers to fact1"), "{accepted:?}");
}

#[test]
fn a_failing_backend_does_not_lose_a_change() {
    let mut world = started(either(moving()));
    world.core.steering().set_chaos(Some(1));
    assert_eq!(set(&mut world, "moving", Some("true"), None), Err(Cause::Failed));
    world.core.steering().set_chaos(None);
    let (due, _) = world.core.poll_timeout(world.now);
    world.core.tick(due).unwrap();
    world.now = due;
    assert_eq!(world.used(), ["lte0"]);
}

/// The first network sets the prefixes that may be steered before the parameters. With parameters that name no link, strict rules would refuse flows.
#[test]
fn regression_strict_rules_refuse_no_flow_before_the_first_network() {
    let now = Time::from_millis(1000);
    let mut core = Core::new(FakeSteering::default(), Box::new(FakeNames([].into())), either(moving()), now).unwrap();
    core.on_clock(now, Duration::from_secs(3600)).unwrap();
    core.on_moving(now, Some(true)).unwrap();
    core.tick(now).unwrap();
    let links = network(&[facts(1, "wlan0"), facts(2, "lte0")]);
    let map = prefix_map(&links, &[LinkIndex(1), LinkIndex(2)].into(), Family::V4);
    core.steering().set_prefixes(Family::V4, &map).unwrap();
    let app = AppId { exe: ExeId { device: 1, inode: 99 }, name: "test".to_owned() };
    assert_eq!(core.steering().connect(now, &app, 1000, (SERVER, 443)), Steered::LeftAlone);
    core.on_network(now, links).unwrap();
    assert!(matches!(core.steering().connect(now, &app, 1000, (SERVER, 443)), Steered::To(..)));
}

/// A running bonded flow kept the links that its rule had when it began.
#[test]
fn regression_links_that_come_and_go_change_the_policy_of_running_bonded_flows() {
    let mut config = config(Scheduler::RoundRobin);
    let matcher = AppMatcher { name: Some("test".into()), ..AppMatcher::default() };
    config.policy.apps = vec![AppRule { matcher, prefer: only(&["lte0"]).unwrap(), carry: Carry::Bond, ..AppRule::default() }];
    let mut world = started(config);
    world.devices[1].carrier = false;
    world.set_network();
    assert!(world.core.take_actions().rules_changed);
    world.run(Duration::from_secs(1));
    assert!(!world.core.take_actions().rules_changed);
    world.devices.push(facts(3, "eth0"));
    world.set_network();
    assert!(world.core.take_actions().rules_changed);
}
