//! Energy, money and the battery.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_control::config::{Config, EnergyService};
use braid_control::core::{PacketLoad, ProfileQuestion};
use braid_control::fake::Steered;
use braid_control::steering::Steering;
use braid_decide::energy::{Profile, Row, Technology};
use braid_decide::policy::{BondScheduler, LinkRule, Policy, Scheduler};
use braid_decide::tradeoff::{UtilityFunction, UtilityRule, Weights};
use braid_model::key::PublicKey;
use braid_model::{ByteCount, DeviceModel, Direction, LinkIndex, PerDirection, Rate, Time, Traffic};

use super::world::*;

/// Two links of 10 Mbit/s: a cheap one of 1 W, and one of 3 W that the system prefers.
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

#[test]
fn operetta_uses_the_cheap_link_as_far_as_the_target_allows() {
    let mut world = World::new(operetta(fixed(0.0)));
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [0, 10], "least energy: only the link with the cheapest byte");
    let now = world.now;
    let status = world.core.status(now);
    assert_eq!((status.utility, status.battery), (Some(0.0), None));
    // The kernel gets capacities rounded to about 3 %.
    assert!(status.target_down_bps.is_some_and(|bps| (9_700_000..=10_000_000).contains(&bps)), "{status:?}");
    // A reload applies to the next flow.
    world.core.reconfigure(world.now, operetta(fixed(1.0))).unwrap();
    assert_eq!(world.ten(), [5, 5], "most throughput: both equally");
    world.core.reconfigure(world.now, operetta(UtilityRule { utility: UtilityFunction::MatchDefault, plugged_in: None })).unwrap();
    assert_eq!(world.ten(), [0, 10], "the throughput of the system's choice at less energy");
}

#[test]
fn operetta_follows_the_battery_and_the_mains() {
    let step = UtilityFunction::Step { threshold: 0.3, above: 1.0, below: 0.0 };
    let mut world = World::new(operetta(UtilityRule { utility: step, plugged_in: Some(1.0) }));
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [5, 5], "no battery counts as plugged in");
    world.supply(0.2, false, Some(7.5));
    assert_eq!(world.ten(), [0, 10]);
    let now = world.now;
    let battery = world.core.status(now).battery.unwrap();
    assert_eq!((battery.level, battery.plugged, battery.power_w), (0.2, false, Some(7.5)));
    world.supply(0.2, true, None);
    assert_eq!(world.ten(), [5, 5]);
}

#[test]
fn money_can_make_the_low_power_link_the_expensive_one() {
    let mut config = operetta(fixed(0.0));
    config.policy.links[1].cost_per_gb = 8.0;
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    assert_eq!(world.ten(), [0, 10], "money has no weight by default");
    config.policy.weights = Weights { energy: 1.0, money: 1.0 };
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(world.ten(), [10, 0], "0.8 kJ plus a price of 8 per GB is more than 2.4 kJ");
}

#[test]
fn joules_are_counted_by_flow_application_and_link() {
    let mut world = World::new(operetta(fixed(0.0)));
    world.run(Duration::from_secs(1));
    let Steered::To(1, id) = world.connect("test", 99) else { panic!() };
    world.core.steering().transfer(id, ByteCount::new(1_000_000), ByteCount::new(500_000));
    let now = world.now;
    world.core.on_counters(now, UNIX, &[(LinkIndex(2), Traffic::default())]);
    world.run(Duration::from_secs(1));
    let now = world.now;
    world.core.on_counters(now, UNIX, &[(LinkIndex(2), [ByteCount::new(1_000_000), ByteCount::new(500_000)].into())]);
    // 1.5 MB at 10 Mbit/s and 1 W take 1.2 J, except for the rounding of the capacity.
    let close = |joules: Option<f64>, wanted: f64| joules.is_some_and(|joules| (joules / wanted - 1.0).abs() < 0.04);
    let flows = world.core.flows(now);
    assert!(close(flows[0].energy_j, 1.2), "{:?}", flows[0]);
    let link = world.core.links(now).into_iter().find(|link| link.name == "lte0").unwrap();
    assert!(close(link.energy_j, 1.2) && link.energy_source.as_deref() == Some("a test"), "{link:?}");
    world.core.steering().transfer(id, ByteCount::new(1_000_000), ByteCount::ZERO);
    world.core.steering().close(now, id);
    world.run(Duration::from_millis(300));
    let now = world.now;
    let app = world.core.applications(now, BTreeMap::new()).into_iter().find(|app| app.name == "test").unwrap();
    assert!(close(app.energy_j, 2.0), "{app:?}");
    assert!(world.core.flows(now).is_empty());
}

#[test]
fn the_batterys_measurement_takes_precedence_over_a_profile() {
    let mut config = config(Scheduler::Operetta);
    let ten = Some(Rate::from_mbps(10));
    config.policy.links = ["wlan0", "lte0"].map(|name| LinkRule { capacity_down: ten, capacity_up: ten, ..link_rule(name) }).into();
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.model(1, "wlan0", "Intel 82559");
    let now = world.now;
    let joules = |world: &mut World, name: &str| {
        let now = world.now;
        let link = world.core.links(now).into_iter().find(|link| link.name == name).unwrap();
        (link.energy_down_j_per_gb.unwrap(), link.energy_source.unwrap())
    };
    assert!(joules(&mut world, "lte0").1.contains("802.3az"));
    let mut moved = ByteCount::ZERO;
    world.core.on_counters(now, UNIX, &[(LinkIndex(2), Traffic::received(moved))]);
    for second in 0..600u64 {
        // In every other 3 seconds it receives at full rate, which takes 2.5 W more from the battery.
        let busy = second / 3 % 2 == 1;
        world.now = world.now + Duration::from_secs(1);
        moved += ByteCount::new(if busy { 1_250_000 } else { 0 });
        let now = world.now;
        world.core.on_counters(now, UNIX, &[(LinkIndex(2), Traffic::received(moved))]);
        world.supply(0.8, false, Some(if busy { 8.5 } else { 6.0 }));
    }
    let (found, source) = joules(&mut world, "lte0");
    assert!(source.contains("battery") && (found / 2000.0 - 1.0).abs() < 0.1, "{found} {source}");
    // Nothing was learned about the link that was never used, so the profile of its model applies.
    assert!(joules(&mut world, "wlan0").1.contains("Intel 8255x"));
}

#[test]
fn a_low_battery_puts_all_flows_on_the_low_power_link() {
    let mut config = operetta(fixed(1.0));
    config.policy.scheduler = Scheduler::RoundRobin;
    let mut world = World::new(config.clone());
    world.round_trip(1, 20);
    world.round_trip(2, 20);
    world.supply(0.05, false, None);
    assert_eq!(world.ten(), [5, 5], "power saving is off by default");
    config.policy.power_saving = true;
    world.core.reconfigure(world.now, config).unwrap();
    assert_eq!(world.ten(), [0, 10], "1 W against 3 W");
    world.supply(0.05, true, None);
    assert_eq!(world.ten(), [5, 5], "plugged in");
    world.supply(0.15, false, None);
    assert_eq!(world.ten(), [5, 5], "charged enough");
}

fn packets(megabytes: u64, flows: u32) -> PacketLoad {
    let load = PerDirection { down: ByteCount::new(megabytes * 1_000_000), up: ByteCount::ZERO };
    PacketLoad { load, unmoved: load, flows }
}

/// The weights of bonded traffic, by slot, in hundredths.
fn weights(world: &World) -> Vec<(usize, u64)> {
    let scheduling = world.core.bond_scheduling();
    assert_eq!(scheduling.scheduler, BondScheduler::Weights);
    scheduling.weights.down.iter().map(|(slot, weight)| (*slot, (weight * 100.0).round() as u64)).collect()
}

/// Two links of 10 Mbit/s. At least energy packets take the cheap one alone; at most throughput both, alike; halfway the cheap one carries
/// 10 of 15 Mbit/s.
#[test]
fn operettas_weights_follow_the_utility() {
    for (utility, expected) in [(0.0, vec![(1, 100)]), (0.5, vec![(0, 33), (1, 67)]), (1.0, vec![(0, 50), (1, 50)])] {
        let mut world = World::new(operetta(fixed(utility)));
        world.run(Duration::from_secs(1));
        assert_eq!(weights(&world), expected, "at {utility}, without any load");
        world.core.on_packet_load(world.now, packets(40, 2)).unwrap();
        assert_eq!(weights(&world), expected, "at {utility}");
        let optimum = world.core.optimum_view(Direction::Down).unwrap();
        assert!(optimum.feasible, "{optimum:?}");
        assert_eq!(optimum.marginal_link.as_deref(), Some(if utility == 0.0 { "lte0" } else { "wlan0" }));
    }
}

/// Packets make room for connections, and the other way round: all load together meets the target.
#[test]
fn connections_and_packets_share_one_target() {
    let mut world = World::new(operetta(fixed(0.5)));
    world.run(Duration::from_secs(1));
    // 30 MB of packets and ten connections of 1 MB at 15 Mbit/s in all: 21 s, in which the cheap link moves 26 of the 40 MB.
    world.core.on_packet_load(world.now, packets(30, 1)).unwrap();
    assert_eq!(world.ten(), [0, 10], "each connection fits on the cheap link, since packets leave it");
    let flows: Vec<_> = (0..20).map(|_| world.connect("test", 99)).collect();
    world.core.poll(world.now).unwrap();
    world.core.on_packet_load(world.now, packets(30, 1)).unwrap();
    let found = weights(&world);
    let cheap = found.iter().find(|(slot, _)| *slot == 1).map_or(0, |(_, weight)| *weight);
    assert!((30..67).contains(&cheap), "connections on the cheap link push packets off it: {found:?}");
    assert_eq!(flows.len(), 20);
}

/// Weights change when load arrives or vanishes, not while links carry it: a connection that is ahead on the expensive link moves no packets there.
#[test]
fn operettas_weights_hold_until_the_next_arrival() {
    let mut world = World::new(operetta(fixed(0.5)));
    world.run(Duration::from_secs(1));
    world.core.on_packet_load(world.now, packets(20, 1)).unwrap();
    for _ in 0..10 {
        world.connect("test", 99);
    }
    world.core.poll(world.now).unwrap();
    world.core.on_packet_load(world.now, packets(20, 1)).unwrap();
    let planned = weights(&world);
    // The links carry 20 Mbit/s: 2.5 MB in a second. Packets are slower than planned, which a new solution would answer with other weights.
    world.run(Duration::from_secs(1));
    world.core.on_packet_load(world.now, packets(19, 1)).unwrap();
    assert_eq!(weights(&world), planned);
    // A flow with the rest of the packets ends early.
    world.core.on_packet_load(world.now, packets(1, 1)).unwrap();
    let vanished = weights(&world);
    assert_ne!(vanished, planned);
    world.core.on_packet_load(world.now, packets(40, 2)).unwrap();
    let arrived = weights(&world);
    assert_ne!(arrived, vanished);
    // Without bonded flows the weights are those of a new stream.
    world.core.on_packet_load(world.now, packets(0, 0)).unwrap();
    assert_ne!(weights(&world), arrived);
}

/// A flow that has moved more than half of what it was expected to counts as more load than before (`demand::remaining`), and all of that vanishes when
/// it ends. Both were taken for changes of the load, and bonded traffic moved to the expensive link.
#[test]
fn regression_operettas_weights_hold_while_flows_end_as_expected() {
    let mut world = World::new(operetta(fixed(0.5)));
    world.run(Duration::from_secs(1));
    let flows: Vec<_> = (0..10).map(|_| world.connect("test", 99)).collect();
    world.core.poll(world.now).unwrap();
    world.core.on_packet_load(world.now, packets(20, 1)).unwrap();
    let planned = weights(&world);
    let ids = flows.iter().filter_map(|flow| if let Steered::To(_, id) = flow { Some(*id) } else { None }).collect::<Vec<_>>();
    assert_eq!(ids.len(), 10);
    for _ in 0..10 {
        world.run(Duration::from_millis(600));
        ids.iter().for_each(|id| world.core.steering().transfer(*id, ByteCount::new(100_000), ByteCount::ZERO));
        world.core.poll(world.now).unwrap();
        world.core.on_packet_load(world.now, packets(20, 1)).unwrap();
        assert_eq!(weights(&world), planned);
    }
    let now = world.now;
    ids.iter().for_each(|id| world.core.steering().close(now, *id));
    world.core.poll(world.now).unwrap();
    world.core.on_packet_load(world.now, packets(20, 1)).unwrap();
    assert_eq!(weights(&world), planned);
}

/// Other schedulers see bonded flows as load of the links that carry them.
#[test]
fn bonded_flows_weigh_on_links() {
    let mut config = operetta(fixed(1.0));
    config.policy.scheduler = Scheduler::MaxThroughput;
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world.core.on_packet_load(world.now, packets(40, 3)).unwrap();
    let loads = world.core.steering().load_table().unwrap().loads;
    for link_load in &loads[..2] {
        assert!((19_000_000..=20_000_000).contains(&link_load.load.down), "{link_load:?}");
        assert_eq!(link_load.flows, 3);
    }
    world.core.on_packet_load(world.now, PacketLoad::default()).unwrap();
    let loads = world.core.steering().load_table().unwrap().loads;
    assert!(loads.iter().all(|link_load| link_load.load.down == 0 && link_load.flows == 0));
}

/// A bond helps where a target needs more than one link: not at least energy, where one link is enough.
#[test]
fn operetta_bonds_straight_to_servers_where_it_helps() {
    for (utility, expected) in [(0.0, false), (0.5, true), (1.0, true)] {
        let mut world = World::new(operetta(fixed(utility)));
        world.run(Duration::from_secs(1));
        assert_eq!(world.core.steering().params().unwrap().peer_direct, expected, "at {utility}");
    }
}

/// Bonds keep to the links that connections keep to: the rest are backups, which take over at once.
#[test]
fn bonds_obey_priorities_handover_and_a_low_battery() {
    let backups = |world: &World| world.core.bond_links().iter().map(|link| link.backup).collect::<Vec<_>>();
    let mut config = operetta(fixed(1.0));
    config.policy.scheduler = Scheduler::MaxThroughput;
    let mut world = World::new(config.clone());
    world.run(Duration::from_secs(1));
    assert_eq!(backups(&world), [false, false]);
    let mut prior = config.clone();
    prior.policy.links[0].priority = 1;
    world.core.reconfigure(world.now, prior).unwrap();
    assert_eq!(backups(&world), [true, false], "wlan0 waits");
    let mut saving = config;
    saving.policy.power_saving = true;
    world.core.reconfigure(world.now, saving).unwrap();
    [1, 2].into_iter().for_each(|link| world.round_trip(link, 20));
    world.supply(0.05, false, None);
    assert_eq!(backups(&world), [true, false], "lte0 takes least energy");
    world.supply(0.9, false, None);
    assert_eq!(backups(&world), [false, false]);
    let mut handover = World::new(Config { policy: Policy { scheduler: Scheduler::Handover, ..Policy::default() }, ..Config::default() });
    handover.round_trip(1, 40);
    handover.round_trip(2, 10);
    handover.run(Duration::from_secs(1));
    assert_eq!(backups(&handover), [true, false], "lte0 answers sooner");
}

/// A configuration with an energy service.
fn with_service(port: u16) -> Config {
    let address = format!("profiles.example.org:{port}").parse().unwrap();
    Config { energy_service: Some(EnergyService { address, key: PublicKey::from([7; 32]) }), ..config(Scheduler::MaxThroughput) }
}

fn row(model: &str, technology: Technology, source: &str) -> Profile {
    let (model, source) = (model.to_owned(), source.to_owned());
    let (down_mw_per_mbps, up_mw_per_mbps, limit_down_mbps, limit_up_mbps) = (0.0, 0.0, None, None);
    let (idle_mw, receive_mw, transmit_mw) = (1.0, 2.0, 3.0);
    Profile::try_from(Row {
        model,
        technology,
        idle_mw,
        receive_mw,
        transmit_mw,
        down_mw_per_mbps,
        up_mw_per_mbps,
        limit_down_mbps,
        limit_up_mbps,
        source,
    })
    .unwrap()
}

impl World {
    pub(crate) fn model(&mut self, link: u32, device: &str, name: &str) {
        let model = DeviceModel { name: Some(name.to_owned()), ..DeviceModel::default() };
        self.core.on_model(self.now, LinkIndex(link), device, Some(model)).unwrap();
    }

    fn profile_questions(&mut self) -> Vec<ProfileQuestion> {
        self.core.take_actions().profile_questions
    }

    fn origin(&mut self, name: &str) -> (String, String) {
        let now = self.now;
        let link = self.core.links(now).into_iter().find(|link| link.name == name).unwrap();
        let profile = link.energy_profile.unwrap();
        (profile.origin, link.energy_source.unwrap())
    }

    fn later(&mut self, seconds: u64) -> Time {
        self.now = self.now + Duration::from_secs(seconds);
        self.core.tick(self.now).unwrap();
        self.now
    }
}

#[test]
fn each_new_device_is_identified_and_a_late_answer_about_another_device_is_ignored() {
    let mut world = World::new(with_service(1));
    assert_eq!(world.core.take_actions().identify, [(LinkIndex(1), "wlan0".to_owned()), (LinkIndex(2), "lte0".to_owned())]);
    world.set_network();
    assert_eq!(world.core.take_actions().identify, [], "each only once");
    world.model(1, "another", "Intel 82559");
    assert_eq!(world.profile_questions(), []);
    world.model(1, "wlan0", "Intel 82559");
    assert!(world.origin("wlan0").1.contains("8255x"));
}

#[test]
fn the_service_is_asked_once_for_each_device_and_its_profile_is_used() {
    let mut world = World::new(with_service(1));
    world.model(1, "wlan0", "Card One");
    let questions = world.profile_questions();
    assert_eq!(questions.iter().map(|question| (question.link.0, question.technology)).collect::<Vec<_>>(), [(1, Technology::Ethernet)]);
    world.later(3600);
    assert_eq!(world.profile_questions(), [], "the first question is not answered yet");
    let rows = vec![row("Card One", Technology::Ethernet, "the service"), row("Card One", Technology::Lte, "not asked for")];
    world.core.on_profiles(world.now, &questions[0], Ok(rows)).unwrap();
    assert_eq!(world.origin("wlan0"), ("service".into(), "the service".into()));
    world.later(100_000);
    assert_eq!(world.profile_questions(), []);

    // A profile of the user's file takes precedence.
    let mut own = with_service(1);
    own.profiles.extend(vec![row("Card One", Technology::Ethernet, "the file")]);
    world.core.reconfigure(world.now, own).unwrap();
    assert_eq!(world.origin("wlan0"), ("file".into(), "the file".into()));
    // Answers of a former service are forgotten, and the new one is asked.
    world.core.reconfigure(world.now, with_service(2)).unwrap();
    assert_eq!(world.origin("wlan0").0, "shipped");
    let asked = world.profile_questions();
    assert_eq!(asked.len(), 1);
    // So is an answer of the former one that arrives only now.
    let late = ProfileQuestion { service: questions[0].service.clone(), ..asked[0].clone() };
    world.core.on_profiles(world.now, &late, Ok(vec![row("Card One", Technology::Ethernet, "the former service")])).unwrap();
    assert_eq!(world.origin("wlan0").0, "shipped");
    world.core.on_profiles(world.now, &asked[0], Ok(vec![row("Card One", Technology::Ethernet, "the new service")])).unwrap();
    assert_eq!(world.origin("wlan0"), ("service".into(), "the new service".into()));
    // Without a service nobody is asked.
    world.core.reconfigure(world.now, config(Scheduler::MaxThroughput)).unwrap();
    world.model(2, "lte0", "Card Two");
    assert_eq!(world.profile_questions(), []);
}

#[test]
fn a_service_that_fails_is_asked_again_at_growing_intervals_and_the_status_says_so() {
    let mut world = World::new(with_service(1));
    world.model(1, "wlan0", "Card One");
    for wait in [60, 120, 240, 480, 960, 1920, 3600, 3600] {
        let questions = world.profile_questions();
        assert_eq!(questions.len(), 1, "after {wait}");
        let now = world.now;
        world.core.on_profiles(now, &questions[0], Err("no answer".to_owned())).unwrap();
        assert!(world.core.status(now).warnings.iter().any(|warning| warning.contains("energy_service: no answer")));
        world.later(wait - 1);
        assert_eq!(world.profile_questions(), [], "{wait}");
        world.later(1);
    }
    let question = world.profile_questions().remove(0);
    let now = world.now;
    world.core.on_profiles(now, &question, Ok(Vec::new())).unwrap();
    assert!(!world.core.status(now).warnings.iter().any(|warning| warning.contains("energy_service")));
}

#[test]
fn a_link_whose_energy_the_configuration_gives_is_not_asked_about() {
    let mut config = with_service(1);
    config.policy.links = vec![LinkRule { energy: Some(row("*", Technology::Ethernet, "the configuration")), ..link_rule("wlan0") }];
    let mut world = World::new(config);
    world.model(1, "wlan0", "Card One");
    assert_eq!(world.profile_questions(), []);
    assert_eq!(world.origin("wlan0"), ("configuration".into(), "the configuration".into()));
}
