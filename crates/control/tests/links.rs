//! Tests of the link table's public interface: slots, failures, probe targets, allowances, and state kept across configuration changes.

use std::net::IpAddr;
use std::time::Duration;

use braid_control::fake::network::facts;
use braid_control::links::{Link, LinkTable, NO_SLOT, ProbePlan};
use braid_decide::energy::ByteCost;
use braid_decide::health::Outcome;
use braid_decide::policy::{LinkRule, ProbeMode, ProbeTarget};
use braid_decide::steer::Prefixes;
use braid_model::{
    ByteCount, DefaultRoute, Direction, Family, Joules, LinkFacts, LinkIndex, LinkKind, LinkSet, LinkState, PerDirection, Rate, Role, Time,
    Traffic,
};

const RTT: Duration = Duration::from_millis(20);
const STEP: Duration = Duration::from_millis(10);
const DAY: i64 = 86_400;
/// 1 November 2026.
const UNIX: i64 = 20_758 * DAY;

/// A link table with a simulated clock, and its probes.
struct World {
    table: LinkTable,
    now: Time,
    devices: Vec<LinkFacts>,
    /// Rule of every new link.
    rule: LinkRule,
    mode: ProbeMode,
    targets: Vec<ProbeTarget>,
    /// Links that do not answer.
    silent: Vec<u32>,
    /// Pending probes.
    flying: Vec<(Time, LinkIndex, Family, Outcome)>,
    /// All probes so far, and when they were sent.
    asked: Vec<(Time, ProbePlan)>,
}

impl World {
    fn with(mode: ProbeMode, rule: LinkRule, devices: &[u32]) -> Self {
        let mut world = Self {
            table: LinkTable::default(),
            now: Time::from_millis(1000),
            devices: Vec::new(),
            rule,
            mode,
            targets: Vec::new(),
            silent: Vec::new(),
            flying: Vec::new(),
            asked: Vec::new(),
        };
        world.table.set_steerable(Family::V4, Prefixes::new([("0.0.0.0/0".parse().unwrap(), true)]));
        world.have(devices);
        world
    }

    fn new(devices: &[u32]) -> Self {
        Self::with(ProbeMode::Continuous, rule(), devices)
    }

    /// Sets the system's devices. Returns the slots whose network has changed.
    fn have(&mut self, devices: &[u32]) -> Vec<usize> {
        self.devices = devices.iter().map(|index| facts(*index, &format!("net{index}"))).collect();
        self.update()
    }

    /// Passes the current devices to the table.
    fn update(&mut self) -> Vec<usize> {
        let (now, mode, rule) = (self.now, self.mode, &self.rule);
        let new = |facts: &LinkFacts, slot| Link::new(facts.clone(), slot, rule.clone(), mode, now);
        self.table.on_devices(now, &self.devices, |_| None, new)
    }

    fn carrier(&mut self, device: usize, carrier: bool) {
        self.devices[device].carrier = carrier;
        self.update();
    }

    fn link(&mut self, index: u32) -> &mut Link {
        self.table.get_mut(LinkIndex(index)).unwrap()
    }

    fn slot(&self, index: u32) -> Option<usize> {
        self.table.get(LinkIndex(index)).map(|link| link.slot)
    }

    fn state(&self, index: u32) -> LinkState {
        self.table.get(LinkIndex(index)).unwrap().state()
    }

    /// Slots that may get IPv4 flows.
    fn usable(&self) -> Vec<usize> {
        self.table.usable(Family::V4).iter().collect()
    }

    /// Advances the time; probes are answered after [`RTT`] or not at all.
    fn run(&mut self, span: Duration) {
        let end = self.now + span;
        while self.now < end {
            self.now = self.now + STEP;
            let now = self.now;
            let (ended, flying) = std::mem::take(&mut self.flying).into_iter().partition(|(at, ..)| *at <= now);
            self.flying = flying;
            let ended: Vec<(Time, LinkIndex, Family, Outcome)> = ended;
            ended.into_iter().for_each(|(_, link, family, outcome)| self.table.on_probe(now, link, family, outcome));
            for plan in self.table.poll_probes(now, &self.targets, true) {
                let silent = self.silent.contains(&plan.link.0);
                let (after, outcome) = if silent { (plan.timeout, Outcome::Silent) } else { (RTT, Outcome::Alive { rtt: RTT }) };
                self.flying.push((now + after, plan.link, plan.family, outcome));
                self.asked.push((now, plan));
            }
        }
    }

    /// Runs until the link is in this state; fails after ten minutes.
    fn run_until(&mut self, index: u32, state: LinkState) -> Duration {
        let from = self.now;
        while self.state(index) != state {
            assert!(self.now.since(from) < Duration::from_secs(600), "{index} is never {state}");
            self.run(STEP);
        }
        self.now.since(from)
    }

    /// The probes that a link sends within `span`.
    fn probes(&mut self, index: u32, span: Duration) -> Vec<(Time, ProbePlan)> {
        self.asked.clear();
        self.run(span);
        std::mem::take(&mut self.asked).into_iter().filter(|(_, plan)| plan.link.0 == index).collect()
    }

    /// The first probe of a new link, which is thorough.
    fn first_probe(&mut self, index: u32) -> ProbePlan {
        let probes = self.table.poll_probes(self.now, &self.targets, true);
        probes.into_iter().find(|plan| plan.link.0 == index && plan.family == Family::V4).unwrap()
    }

    /// Records that `remote` answered over the link.
    fn answered(&mut self, index: u32, remote: &str) {
        self.link(index).last_answer.v4 = Some((ip(remote), 443));
    }

    /// Reads the device's counters, this many seconds after the last reading.
    fn read(&mut self, index: u32, seconds: u64, unix: i64, [rx, tx]: [u64; 2]) {
        self.now = self.now + Duration::from_secs(seconds);
        let now = self.now;
        self.link(index).on_device(now, [ByteCount::new(rx), ByteCount::new(tx)].into(), unix, PerDirection::default(), None);
    }

    /// Changes the link's configuration entry.
    fn reconfigure(&mut self, index: u32, rule: LinkRule) {
        let (now, mode) = (self.now, self.mode);
        let link = self.link(index);
        let replacement = Link::new(link.facts.clone(), link.slot, rule, mode, now);
        let before = std::mem::replace(link, replacement);
        link.take_over(before, now);
    }
}

fn rule() -> LinkRule {
    LinkRule { reset_day: 1, ..LinkRule::default() }
}

fn metered(cap: u64) -> LinkRule {
    LinkRule { metered: true, cap: Some(ByteCount::new(cap)), ..rule() }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn tcp(text: &str) -> ProbeTarget {
    ProbeTarget::Tcp(text.parse().unwrap())
}

fn used(link: &Link) -> Option<u64> {
    link.allowance.as_ref().map(|allowance| allowance.used().get())
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[test]
fn a_link_without_carrier_keeps_its_slot_and_its_learned_values() {
    let mut world = World::new(&[3, 8]);
    world.run(seconds(1));
    world.link(8).ended = [ByteCount::new(7), ByteCount::new(9)].into();
    for carrier in [false, true, false, true] {
        world.carrier(1, carrier);
        world.run(seconds(1));
        assert_eq!((world.slot(3), world.slot(8)), (Some(0), Some(1)));
        assert_eq!(world.usable(), if carrier { vec![0, 1] } else { vec![0] });
    }
    assert_eq!(world.link(8).moved(), [ByteCount::new(7), ByteCount::new(9)].into());
}

#[test]
fn a_device_that_reappears_is_a_new_link_in_an_unused_slot() {
    let mut world = World::new(&[3, 8]);
    world.link(8).ended.rx = ByteCount::new(7);
    world.have(&[3]);
    world.have(&[3, 8]);
    assert_eq!((world.slot(3), world.slot(8)), (Some(0), Some(2)));
    assert_eq!(world.link(8).moved(), Traffic::default());
    assert!(world.table.in_slot(1).is_none(), "flows of the removed link may still end there");
}

#[test]
fn regression_the_slot_that_has_been_free_longest_is_reused_first() {
    let mut world = World::new(&[1, 2, 3]);
    // A modem that appears with ever new indexes, until every slot has been used once.
    let mut last = 3;
    for index in 4..=31 {
        last = index;
        world.have(&[1, 2, 3, last]);
        world.have(&[1, 2, 3]);
    }
    world.have(&[1, 2, 3, 40]);
    assert_eq!((last, world.slot(40)), (31, Some(31)));
    // The next free slot by number was freed just now: flows that end there still belong to link 1.
    world.have(&[2, 3, 40]);
    world.have(&[2, 3, 40, 41]);
    assert_eq!(world.slot(41), Some(3), "the slot that was freed first");
    world.have(&[2, 3, 40, 41, 42]);
    assert_eq!(world.slot(42), Some(4));
}

#[test]
fn excess_links_are_listed_and_get_the_next_free_slot() {
    let all: Vec<u32> = (1..=34).collect();
    let mut world = World::new(&all);
    let overflow = |world: &World| world.table.overflow().iter().map(|facts| facts.index.0).collect::<Vec<_>>();
    assert_eq!((overflow(&world), world.table.values().count()), (vec![33, 34], 32));
    assert!(NO_SLOT.contains("32"));
    world.have(&all[1..]);
    assert_eq!((overflow(&world), world.slot(33), world.slot(2)), (vec![34], Some(0), Some(1)));
    world.have(&all[2..]);
    assert_eq!((overflow(&world), world.slot(34)), (vec![], Some(1)));
}

#[test]
fn only_links_with_another_network_are_returned() {
    let mut world = World::new(&[]);
    assert_eq!(world.have(&[1, 2]), [0, 1], "new links count");
    assert_eq!(world.update(), [0; 0]);
    world.devices[0].carrier = false;
    world.devices[0].gateways.v4[0].metric = 900;
    world.devices[0].resolvers = vec![ip("10.0.1.1")];
    assert_eq!(world.update(), [0; 0], "a change of carrier or metric is not another network");
    world.devices[1].addresses = vec!["192.168.1.7/24".parse().unwrap()];
    assert_eq!(world.update(), [1]);
    world.devices[0].gateways.v4[0].gateway = Some(ip("10.0.1.254"));
    assert_eq!(world.update(), [0]);
}

#[test]
fn resolvers_belong_to_existing_links_and_may_be_shared() {
    let mut world = World::new(&[1, 2]);
    world.devices[0].resolvers = vec![ip("9.9.9.9"), ip("10.0.1.1")];
    world.devices[1].resolvers = vec![ip("9.9.9.9")];
    world.update();
    let both = LinkSet::only(0) | LinkSet::only(1);
    let known = |world: &World| world.table.resolvers().iter().map(|(addr, links)| (*addr, *links)).collect::<Vec<_>>();
    assert_eq!(known(&world), [(ip("9.9.9.9"), both), (ip("10.0.1.1"), LinkSet::only(0))]);
    world.devices.remove(0);
    world.update();
    assert_eq!(known(&world), [(ip("9.9.9.9"), LinkSet::only(1))]);
}

#[test]
fn a_link_that_loses_one_family_stays_up_in_the_other() {
    let mut world = World::new(&[1]);
    world.devices[0].addresses.push("2001:db8::2/64".parse().unwrap());
    world.devices[0].gateways.v6 = vec![DefaultRoute { gateway: Some(ip("fe80::1")), metric: 100 }];
    world.update();
    world.run(seconds(1));
    let states = |world: &mut World| Family::ALL.map(|family| world.link(1).family_state(family));
    assert_eq!(states(&mut world), [LinkState::Up, LinkState::Up]);
    world.devices[0].addresses.remove(0);
    world.update();
    assert_eq!((states(&mut world), world.state(1)), ([LinkState::Down, LinkState::Up], LinkState::Up));
    assert_eq!((world.usable(), world.table.usable(Family::V6)), (vec![], LinkSet::only(0)));
    let bond = &world.table.bond_links()[0];
    assert_eq!((bond.v4, bond.v6, bond.dead.v4, bond.dead.v6), (None, Some(ip("2001:db8::2")), true, false));
    let probes = world.probes(1, seconds(1));
    assert!(!probes.is_empty() && probes.iter().all(|(_, plan)| plan.family == Family::V6), "{probes:?}");
}

#[test]
fn a_down_link_has_a_reason() {
    let mut world = World::new(&[1]);
    let mut reason = |change: fn(&mut LinkFacts)| {
        change(&mut world.devices[0]);
        world.update();
        (world.state(1), world.link(1).reason())
    };
    let down = |text: &str| (LinkState::Down, Some(text.to_owned()));
    assert_eq!(reason(|facts| facts.gateways.v4.clear()), down("no default route"));
    assert_eq!(reason(|facts| facts.addresses.clear()), down("no address"));
    assert_eq!(reason(|facts| facts.carrier = false), down("no carrier"));
}

#[test]
fn two_unanswered_probes_make_an_idle_link_dead_within_a_second_and_one_does_not() {
    let mut world = World::new(&[1, 2]);
    world.run(seconds(3));
    world.silent = vec![1];
    let since = world.now;
    let died = world.run_until(1, LinkState::Dead);
    assert!(died <= seconds(1), "{died:?}");
    let asked = world.asked.iter().filter(|(at, plan)| *at > since && plan.link.0 == 1).count();
    assert_eq!((asked, world.usable()), (2, vec![1]));
    assert_eq!(world.link(1).reason().as_deref(), Some("probes get no answer"));
    // One lost probe of the other link.
    world.run_until(2, LinkState::Up);
    let now = world.now;
    world.table.on_probe(now, LinkIndex(2), Family::V4, Outcome::Silent);
    assert_eq!((world.state(2), world.usable()), (LinkState::Up, vec![1]), "it is probed again first");
    world.run(seconds(5));
    assert_eq!(world.link(2).falls, 0);
}

#[test]
fn probes_without_an_outcome_count_as_unanswered() {
    let mut world = World::new(&[1, 2]);
    world.run(seconds(1));
    for _ in 0..1000 {
        world.now = world.now + STEP;
        world.table.poll_probes(world.now, &[], true);
    }
    assert_eq!([world.state(1), world.state(2)], [LinkState::Dead; 2]);
    assert_eq!([1, 2].map(|index| world.link(index).falls), [1, 1]);
}

#[test]
fn if_every_link_is_dead_all_are_used_and_the_first_to_answer_gets_all_flows() {
    let mut world = World::new(&[1, 2, 3]);
    world.run(seconds(1));
    world.link(3).rule.role = Role::Excluded;
    world.silent = vec![1, 2];
    world.run_until(1, LinkState::Dead);
    world.run_until(2, LinkState::Dead);
    assert_eq!(world.usable(), [0, 1], "neither is better, and an excluded link is not used");
    world.silent = vec![1];
    world.run_until(2, LinkState::Up);
    assert_eq!(world.usable(), [1]);
}

#[test]
fn a_flapping_link_is_unused_for_increasing_times_and_has_a_reason() {
    let mut world = World::new(&[1, 2]);
    let mut outages = Vec::new();
    for _ in 0..6 {
        world.run_until(1, LinkState::Up);
        world.run(seconds(1));
        world.carrier(0, false);
        world.run(STEP);
        world.carrier(0, true);
        outages.push(world.run_until(1, LinkState::Up));
    }
    assert!(outages[..2].iter().all(|outage| *outage < seconds(1)), "{outages:?}");
    assert!(outages[5] > outages[4] && outages[4] > outages[2] && outages[5] >= seconds(4), "{outages:?}");
    assert_eq!(world.link(1).falls, 6);
    world.carrier(0, false);
    world.carrier(0, true);
    assert_eq!((world.state(1), world.usable()), (LinkState::Dead, vec![1]));
    assert_eq!(world.link(1).reason().as_deref(), Some("the link is flapping: Braid does not use it until it stays up"));
}

#[test]
fn a_dead_link_is_probed_with_a_long_timeout_and_less_and_less_on_demand() {
    let gaps = |mode| {
        let mut world = World::with(mode, rule(), &[1]);
        world.silent = vec![1];
        world.run_until(1, LinkState::Dead);
        let probes = world.probes(1, seconds(120));
        assert!(probes.iter().all(|(_, plan)| plan.timeout == seconds(3)), "it may return with a high RTT");
        probes.windows(2).map(|pair| pair[1].0.since(pair[0].0)).collect::<Vec<_>>()
    };
    let eager = gaps(ProbeMode::Continuous);
    assert!(eager.iter().all(|gap| *gap == eager[0]) && eager[0] < seconds(4), "{eager:?}");
    let sparing = gaps(ProbeMode::OnDemand);
    assert!(sparing.is_sorted() && sparing[0] < seconds(4) && sparing.last().is_some_and(|gap| *gap == seconds(8)), "{sparing:?}");
}

#[test]
fn an_idle_link_is_probed_rarely_on_demand_and_often_continuously() {
    let asked = |mode| {
        let mut world = World::with(mode, rule(), &[1]);
        world.run(seconds(1));
        world.probes(1, seconds(60)).len()
    };
    let (eager, sparing) = (asked(ProbeMode::Continuous), asked(ProbeMode::OnDemand));
    assert!(eager > 100 && (1..=2).contains(&sparing), "{eager} {sparing}");
    // The link's own entry overrides the default.
    let mut own = World::with(ProbeMode::OnDemand, LinkRule { probe: Some(ProbeMode::Continuous), ..rule() }, &[1]);
    assert!(own.probes(1, seconds(60)).len() > 100);
}

#[test]
fn continuous_probes_go_to_the_gateway_and_sometimes_to_a_destination() {
    let mut world = World::new(&[1]);
    world.run(seconds(1));
    world.targets = vec![tcp("1.1.1.1:443")];
    let probes = world.probes(1, seconds(32));
    let (far, near): (Vec<_>, Vec<_>) = probes.iter().map(|(_, plan)| plan).partition(|plan| !plan.targets.is_empty());
    assert!(near.iter().all(|plan| plan.gateways == [ip("10.0.1.1")]));
    assert!(far.iter().all(|plan| plan.gateways.is_empty() && plan.targets == [tcp("1.1.1.1:443")]), "a gateway is not the Internet");
    assert!((8..=12).contains(&(near.len() / far.len())), "{} {}", near.len(), far.len());
}

#[test]
fn a_links_own_targets_replace_the_default_ones_in_each_family() {
    let own = vec![tcp("[2001:db8::9]:443"), ProbeTarget::Icmp(ip("9.9.9.9"))];
    let mut world = World::with(ProbeMode::OnDemand, LinkRule { probe_targets: own, ..rule() }, &[1]);
    world.targets = vec![tcp("1.1.1.1:443")];
    assert_eq!(world.first_probe(1).targets, [ProbeTarget::Icmp(ip("9.9.9.9"))]);
    world.rule = rule();
    world.have(&[2]);
    assert_eq!(world.first_probe(2).targets, [tcp("1.1.1.1:443")]);
    world.targets = vec![tcp("[2001:db8::9]:443")];
    world.have(&[3]);
    let plan = world.first_probe(3);
    assert_eq!((plan.targets, plan.gateways), (vec![], vec![ip("10.0.3.1")]), "no target has its family");
}

#[test]
fn a_link_probes_its_last_answering_destination_first_and_none_in_a_tunnel() {
    let mut world = World::with(ProbeMode::OnDemand, rule(), &[1, 2]);
    world.answered(1, "198.51.100.1");
    world.answered(2, "198.51.100.2");
    assert_eq!(world.first_probe(2).targets, [tcp("198.51.100.2:443"), tcp("198.51.100.1:443")]);
    let mut world = World::with(ProbeMode::OnDemand, rule(), &[1, 2]);
    world.answered(1, "198.51.100.1");
    world.answered(2, "203.0.113.2");
    let steerable = Prefixes::new([("0.0.0.0/0".parse().unwrap(), true), ("203.0.113.0/24".parse().unwrap(), false)]);
    assert!(world.table.set_steerable(Family::V4, steerable.clone()) && !world.table.set_steerable(Family::V4, steerable));
    assert_eq!(world.first_probe(2).targets, [tcp("198.51.100.1:443")]);
}

#[test]
fn regression_a_destination_known_to_several_links_is_probed_once() {
    let mut world = World::with(ProbeMode::OnDemand, rule(), &[1, 2, 3]);
    world.answered(1, "198.51.100.1");
    world.answered(2, "198.51.100.1");
    world.answered(3, "198.51.100.3");
    assert_eq!(
        world.first_probe(1).targets,
        [tcp("198.51.100.1:443"), tcp("198.51.100.3:443")],
        "the first destination may be silent everywhere"
    );
}

#[test]
fn at_most_three_destinations_are_probed_besides_the_configured_ones() {
    let mut world = World::with(ProbeMode::OnDemand, rule(), &[1, 2, 3, 4, 5]);
    world.targets = vec![tcp("1.1.1.1:443")];
    (1..=5).for_each(|index| world.answered(index, &format!("198.51.100.{index}")));
    let expected = ["1.1.1.1:443", "198.51.100.5:443", "198.51.100.1:443", "198.51.100.2:443"].map(tcp);
    assert_eq!(world.first_probe(5).targets, expected);
}

#[test]
fn a_restarted_counter_counts_the_new_devices_bytes_and_never_decreases() {
    let mut world = World::with(ProbeMode::OnDemand, metered(1_000_000), &[1]);
    world.read(1, 0, UNIX, [500_000, 500_000]);
    assert_eq!((used(world.link(1)), world.link(1).rate), (Some(0), PerDirection::default()), "earlier bytes do not count");
    world.read(1, 2, UNIX, [501_000, 500_500]);
    assert_eq!((used(world.link(1)), world.link(1).rate), (Some(1500), [Some(Rate::from_bps(4000)), Some(Rate::from_bps(2000))].into()));
    world.read(1, 1, UNIX, [300, 500_500]);
    assert_eq!((used(world.link(1)), world.link(1).rate.down), (Some(1800), Some(Rate::from_bps(2400))));
    world.read(1, 0, UNIX, [400, 500_500]);
    assert_eq!(world.link(1).rate, PerDirection::default(), "no rate without time");
}

#[test]
fn a_link_with_a_used_up_allowance_gets_no_flows_until_its_reset_day() {
    let mut world = World::with(ProbeMode::Continuous, metered(1000), &[1]);
    world.rule = rule();
    world.have(&[1, 2]);
    world.run(seconds(1));
    world.read(1, 0, UNIX, [0, 0]);
    world.read(1, 1, UNIX, [400, 599]);
    assert_eq!(world.usable(), [0, 1]);
    world.read(1, 1, UNIX, [400, 600]);
    assert_eq!((world.usable(), world.state(1)), (vec![1], LinkState::Capped));
    assert_eq!(world.link(1).reason().as_deref(), Some("its monthly allowance is used up"));
    assert_eq!(
        world.table.bond_links().iter().map(|link| link.v4.is_some()).collect::<Vec<_>>(),
        [false, true],
        "bonds do not use it either"
    );
    // The clock of a board without a battery: a month that was never counted counts as the current one.
    world.read(1, 1, 0, [400, 600]);
    assert_eq!(world.usable(), [1]);
    world.silent = vec![2];
    world.run_until(2, LinkState::Dead);
    assert_eq!(world.usable(), [1], "not even if all others are dead");
    world.read(1, 1, UNIX + 30 * DAY, [450, 600]);
    assert_eq!((used(world.link(1)), world.usable()), (Some(50), vec![0]));
}

#[test]
fn the_usage_of_an_earlier_run_counts_before_and_after_the_first_reading() {
    for early in [true, false] {
        let mut world = World::with(ProbeMode::OnDemand, metered(1000), &[1]);
        if !early {
            world.read(1, 0, UNIX, [0, 0]);
        }
        world.link(1).recall_usage(ByteCount::new(990), UNIX / DAY);
        if early {
            world.read(1, 0, UNIX, [0, 0]);
        }
        assert_eq!((used(world.link(1)), world.link(1).capped()), (Some(990), false), "{early}");
        world.read(1, 1, UNIX, [10, 0]);
        assert!(world.link(1).capped(), "{early}");
    }
}

#[test]
fn a_changed_entry_keeps_the_usage_even_if_it_was_unmetered_meanwhile() {
    let mut world = World::with(ProbeMode::OnDemand, metered(1000), &[1]);
    world.read(1, 0, UNIX, [0, 0]);
    world.read(1, 1, UNIX, [700, 0]);
    for rule in [rule(), rule(), metered(800)] {
        world.reconfigure(1, rule);
        assert!(!world.link(1).capped());
    }
    world.read(1, 1, UNIX, [800, 0]);
    assert_eq!((used(world.link(1)), world.link(1).capped()), (Some(800), true));
}

#[test]
fn bytes_count_while_a_condition_suspends_metering_and_a_lower_cap_holds_at_once() {
    let mut world = World::with(ProbeMode::OnDemand, metered(1000), &[1]);
    world.read(1, 0, UNIX, [0, 0]);
    world.read(1, 1, UNIX, [700, 0]);
    world.reconfigure(1, rule());
    world.read(1, 2, UNIX, [2000, 0]);
    assert!(!world.link(1).capped());
    world.reconfigure(1, metered(1500));
    assert_eq!((used(world.link(1)), world.link(1).capped()), (Some(2000), true), "before the next reading");
}

#[test]
fn a_dead_link_stays_dead_when_its_entry_changes_and_uses_the_new_probe_mode() {
    let mut world = World::with(ProbeMode::OnDemand, rule(), &[1, 2]);
    world.run(seconds(1));
    world.silent = vec![1];
    world.run(seconds(60));
    assert_eq!((world.state(1), world.usable()), (LinkState::Dead, vec![1]));
    world.reconfigure(1, LinkRule { priority: 3, probe: Some(ProbeMode::Continuous), ..rule() });
    assert_eq!((world.state(1), world.usable(), world.link(1).falls), (LinkState::Dead, vec![1], 1));
    world.silent.clear();
    let back = world.run_until(1, LinkState::Up);
    assert!(back < seconds(4), "{back:?}");
    world.run(seconds(1));
    assert!(world.probes(1, seconds(10)).len() > 20);
}

#[test]
fn a_configured_capacity_is_not_replaced_by_a_learned_one() {
    let mut world = World::new(&[1]);
    let now = world.now;
    Direction::ALL.into_iter().for_each(|direction| world.link(1).capacity[direction].recall(Rate::from_mbps(7)));
    let rates = |world: &mut World| [Direction::Down, Direction::Up].map(|way| world.link(1).estimate(way, now).rate);
    world.reconfigure(1, LinkRule { capacity_down: Some(Rate::from_mbps(40)), ..rule() });
    assert_eq!(rates(&mut world), [Rate::from_mbps(40), Rate::from_mbps(7)]);
    world.reconfigure(1, rule());
    assert_eq!(rates(&mut world), [Rate::from_mbps(100), Rate::from_mbps(7)], "without the configured value the default guess applies");
}

#[test]
fn the_capacity_of_a_new_link_depends_on_its_kind() {
    let guess = |kind, nominal: Option<u64>| {
        let facts = LinkFacts { kind, nominal: nominal.map(Rate::from_mbps), ..facts(1, "net1") };
        let link = Link::new(facts, 0, rule(), ProbeMode::OnDemand, Time::ZERO);
        let estimate = link.estimate(Direction::Down, Time::ZERO);
        assert!(!estimate.is_known());
        estimate.rate
    };
    let guesses = [(LinkKind::Wired, Some(1000)), (LinkKind::Wireless, Some(866)), (LinkKind::Cellular, None), (LinkKind::Wired, Some(0))];
    assert_eq!(guesses.map(|(kind, nominal)| guess(kind, nominal)), [1000, 433, 20, 100].map(Rate::from_mbps));
}

#[test]
fn energy_is_unknown_until_bytes_of_known_cost_are_counted() {
    let mut world = World::new(&[1]);
    let cost = ByteCost { down: Joules::new(1e-3), up: Joules::new(3e-3) };
    let mut now = world.now;
    let mut read = |rx: u64, tx: u64, cost| {
        now = now + seconds(1);
        let link = world.link(1);
        link.on_device(now, [ByteCount::new(rx), ByteCount::new(tx)].into(), UNIX, PerDirection::default(), cost);
        link.energy.total().map(|joules| (joules.get() * 1e6).round())
    };
    assert_eq!(read(1_000_000, 0, Some(cost)), None, "the first reading counts no bytes");
    assert_eq!(read(2_000_000, 0, None), None);
    assert_eq!(read(2_001_000, 2_000, Some(cost)), Some(7e6));
}

#[test]
fn bonds_get_no_excluded_or_refused_links_and_backups_are_marked() {
    let mut world = World::new(&[1, 2, 3, 4]);
    world.link(1).rule.role = Role::Excluded;
    world.link(2).refused = Some("its address is another's".to_owned());
    world.link(3).rule.role = Role::Backup;
    world.link(4).rule.metered = true;
    let bonds: Vec<_> = world.table.bond_links().into_iter().map(|link| (link.device, link.slot, link.backup, link.metered)).collect();
    assert_eq!(bonds, [("net3".to_owned(), 2, true, false), ("net4".to_owned(), 3, false, true)]);
    let reasons = [1, 2].map(|index| (world.state(index), world.link(index).reason().unwrap()));
    let expected = [(LinkState::Excluded, "the configuration excludes it"), (LinkState::Excluded, "its address is another's")];
    assert_eq!(reasons, expected.map(|(state, text)| (state, text.to_owned())));
}

#[test]
fn an_answer_to_a_probe_of_a_removed_link_is_ignored() {
    let mut world = World::new(&[1, 2]);
    let plan = world.first_probe(1);
    world.have(&[2]);
    let now = world.now;
    world.table.on_probe(now, plan.link, plan.family, Outcome::Silent);
    assert_eq!((world.usable(), world.table.iter().count()), (vec![1], 1));
}
