//! Classes and learned demand of applications.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_api::{ExplainRequest, Outcome};
use braid_control::config::Config;
use braid_control::core::Ended;
use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{AppId, ExeId, Steering, SteeringEvent};
use braid_decide::energy::{ByteCost, EnergyMeter};
use braid_decide::policy::{AppMatcher, AppRule, Scheduler};
use braid_model::{ByteCount, Class, FlowId, Joules};

use super::world::*;

const INODE: u64 = 77;

fn id(name: &str) -> AppId {
    AppId { exe: ExeId { device: 1, inode: INODE }, name: name.to_owned() }
}

fn open(world: &mut World, name: &str) -> FlowId {
    match world.connect(name, INODE) {
        Steered::To(_, id) => id,
        other => panic!("{other:?}"),
    }
}

/// Opens `count` flows of a program that last a tenth of a second each.
fn requests(world: &mut World, name: &str, count: u32) {
    for _ in 0..count {
        let flow = open(world, name);
        world.core.steering().transfer(flow, ByteCount::new(20_000), ByteCount::new(600));
        world.run(Duration::from_millis(100));
        let now = world.now;
        world.core.steering().close(now, flow);
    }
    world.run(Duration::from_millis(500));
}

/// The displayed class of a program, and its source.
fn shown(world: &mut World, name: &str) -> (String, Option<String>) {
    let now = world.now;
    let app = world.core.applications(now, BTreeMap::new()).into_iter().find(|app| app.name == name).unwrap();
    (app.class, app.class_source)
}

#[test]
fn a_program_that_ended_before_its_path_was_read_gets_it_from_a_later_flow() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    let path = |world: &mut World| {
        let now = world.now;
        world.core.applications(now, BTreeMap::new()).into_iter().find(|app| app.name == "brief").unwrap().application
    };
    requests(&mut world, "brief", 1);
    let ended = SteeringEvent::NewApp { app: id("brief"), process: 0, cgroup: 1, class: Class::Unclassified };
    let now = world.now;
    world.core.on_events(now, vec![ended]).unwrap();
    assert_eq!(path(&mut world), "brief");
    open(&mut world, "brief");
    world.run(Duration::from_millis(500));
    assert_eq!(path(&mut world), "/usr/bin/brief");
}

#[test]
fn many_small_flows_are_classified_as_browser_and_a_few_are_not_classified() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    requests(&mut world, "script", 6);
    assert_eq!(shown(&mut world, "script"), ("unclassified".to_owned(), None), "six requests in a second are not sixty a minute");
    requests(&mut world, "pages", 20);
    assert_eq!(shown(&mut world, "pages"), ("browser".to_owned(), Some("pattern".to_owned())));
    assert_eq!(world.core.steering().class_set(&id("pages")), Some(Class::Unclassified), "a class by pattern gives no affinity");
}

#[test]
fn a_confident_class_by_pattern_counts_for_rules_and_survives_other_flows() {
    let mut config = config(Scheduler::RoundRobin);
    let matcher = AppMatcher { class: Some(Class::Browser), ..AppMatcher::default() };
    config.policy.apps = vec![AppRule { matcher, links: only(&["lte0"]), ..AppRule::default() }];
    let mut world = World::new(config);
    let on = |world: &mut World| {
        let explained =
            ExplainRequest { name: Some("pages".to_owned()), destination: Some("203.0.113.10".to_owned()), ..Default::default() };
        let now = world.now;
        world.core.explain(now, &explained).unwrap().rule
    };
    // The pattern needs a dozen flows, and the confidence eight more of which it says the same.
    let mut flows = 0;
    while world.core.steering().learnt_class(&id("pages")) != Some(Class::Browser) {
        let ruled = on(&mut world);
        assert_eq!(ruled, None, "after {flows} flows");
        requests(&mut world, "pages", 1);
        flows += 1;
        assert!(flows < 40);
    }
    assert!(flows >= 19, "{flows}");
    assert_eq!(on(&mut world), Some(1));
    let slot = match world.connect("pages", INODE) {
        Steered::To(slot, _) => slot,
        other => panic!("{other:?}"),
    };
    assert_eq!(world.core.links(world.now).iter().position(|link| link.name == "lte0"), Some(slot));
    // The kernel reports the program again after dropping it from a full map: it gets its classes again.
    let now = world.now;
    world.core.steering().set_class(&id("pages"), Class::Unclassified, Class::Unclassified).unwrap();
    let met = SteeringEvent::NewApp { app: id("pages"), process: 1, cgroup: 1, class: Class::Unclassified };
    world.core.on_events(now, vec![met]).unwrap();
    assert_eq!(world.core.steering().learnt_class(&id("pages")), Some(Class::Browser));
}

#[test]
fn regression_a_download_among_small_requests_is_classified_as_bulk() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    requests(&mut world, "fetcher", 20);
    assert_eq!(shown(&mut world, "fetcher").0, "browser");
    let download = open(&mut world, "fetcher");
    for _ in 0..8 {
        world.core.steering().transfer(download, ByteCount::new(1_000_000), ByteCount::new(500));
        world.run(Duration::from_millis(500));
    }
    let now = world.now;
    let flow = world.core.flows(now).into_iter().find(|flow| flow.id == download.0).unwrap();
    assert_eq!(flow.class.as_deref(), Some("bulk"));
    assert_eq!(shown(&mut world, "fetcher"), ("bulk".to_owned(), Some("pattern".to_owned())));
    world.core.steering().close(now, download);
    requests(&mut world, "fetcher", 3);
    assert_eq!(shown(&mut world, "fetcher").0, "bulk", "most of its bytes belong to the download");
    assert_eq!(world.core.steering().class_set(&id("fetcher")), Some(Class::Unclassified), "a class by pattern gives no affinity");
    assert_eq!(world.core.steering().learnt_class(&id("fetcher")), Some(Class::Browser), "three flows do not change a confident class");
}

#[test]
fn a_long_call_is_not_classified_as_a_download() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    let call = open(&mut world, "phone");
    for _ in 0..60 {
        world.core.steering().transfer(call, ByteCount::new(150_000), ByteCount::new(140_000));
        world.run(Duration::from_millis(500));
    }
    let now = world.now;
    let flow = world.core.flows(now).into_iter().find(|flow| flow.id == call.0).unwrap();
    assert_eq!(flow.class.as_deref(), Some("unclassified"), "it moved {:?}", flow.rx_bytes);
}

#[test]
fn bonded_flows_count_like_flows_over_one_link() {
    let mut world = World::new(config(Scheduler::RoundRobin));
    // By its profile it needs no more power active than idle.
    world.model(1, "wlan0", "Intel 82559");
    requests(&mut world, "backup", 1);
    let ended = |world: &World, rx: u64, seconds: u64| Ended {
        app: id("backup"),
        port: 443,
        started: world.now,
        at: world.now + Duration::from_secs(seconds),
        rx: ByteCount::new(rx),
        tx: ByteCount::new(600),
    };
    let flow = ended(&world, 8_000_000, 2);
    let joules = |joules: f64| {
        let mut meter = EnergyMeter::default();
        meter.count(Some(ByteCost { down: Joules::new(joules), up: Joules::ZERO }), ByteCount::new(1), ByteCount::ZERO);
        meter
    };
    world.core.on_bonded_ended(&flow, joules(5.0)).unwrap();
    let now = flow.at;
    let bonded = BTreeMap::from([((id("backup"), 443), (3, joules(2.0))), ((id("backup"), 80), (1, EnergyMeter::default()))]);
    let apps = world.core.applications(now, bonded.clone());
    let app = apps.iter().find(|app| app.name == "backup").unwrap();
    assert_eq!((app.samples, app.flows, app.port), (2, 3, Some(443)));
    assert_eq!(app.energy_j, Some(7.0), "of ended and living flows");
    // One eighth of the way from the first flow's to the second's.
    assert_eq!(app.demand_bytes, Some(20_000 - 2_500 + 1_000_000 + 600 - 75 + 75));
    assert_eq!(app.max_rate_down_bps, Some(32_000_000));
    assert!(app.rate_down_bps > Some(20_000_000) && app.age_ms == Some(0), "{app:?}");
    assert_eq!(app.class, "bulk", "by its traffic");
    // A program that was never seen otherwise.
    let other = Ended { app: AppId { name: "new".to_owned(), ..id("new") }, ..ended(&world, 5_000, 1) };
    world.core.on_bonded_ended(&other, EnergyMeter::default()).unwrap();
    let apps = world.core.applications(now, bonded);
    assert_eq!(apps.iter().find(|app| app.name == "new").unwrap().demand_bytes, Some(5_600));
}

#[test]
fn a_backend_for_clients_only_explains_that_programs_are_left_alone() {
    let curl = ExplainRequest { name: Some("curl".into()), destination: Some(SERVER.to_string()), ..Default::default() };
    for (steering, interception) in [(FakeSteering::default(), "ebpf"), (FakeSteering::clients_only(), "gateway")] {
        let mut world = World::with(steering, Config::default());
        world.run(Duration::from_secs(2));
        assert_eq!(world.core.status(world.now).interception.as_deref(), Some(interception));
        let explained = world.core.explain(world.now, &curl).unwrap();
        if interception == "ebpf" {
            assert!(explained.outcome == Outcome::Steered && explained.link.is_some(), "{explained:?}");
        } else {
            assert_eq!((explained.outcome, explained.link, explained.runner_up), (Outcome::LeftAlone, None, None));
            assert!(explained.reason.contains("only the clients of the gateway"), "{}", explained.reason);
        }
    }
}
