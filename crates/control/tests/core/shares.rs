//! Preferences for flows without a relay: which flows are limited, to what, and until when.

use std::collections::BTreeMap;
use std::time::Duration;

use braid_api::{ExplainRequest, NetworkReservation};
use braid_control::config::Config;
use braid_control::fake::Steered;
use braid_control::steering::{AppId, ExeId, Shape};
use braid_decide::policy::{AppMatcher, AppRule, ClientMatcher, LinkRule, Portion, Scheduler};
use braid_model::{ByteCount, FlowId, Rate};

use super::world::*;

fn rule(name: &str, preference: AppRule) -> AppRule {
    AppRule { matcher: AppMatcher { name: Some(name.to_owned()), ..AppMatcher::default() }, ..preference }
}

/// All flows use wlan0, with 10 Mbit/s each way.
fn world(rules: Vec<AppRule>) -> World {
    let mut config = config(Scheduler::OnlyOne);
    let capacity = Some(Rate::from_mbps(10));
    config.policy.links = vec![LinkRule { capacity_down: capacity, capacity_up: capacity, ..link_rule("wlan0") }];
    config.policy.apps = rules;
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    world
}

impl World {
    fn begin(&mut self, name: &str) -> FlowId {
        let app = AppId { exe: ExeId { device: 1, inode: 3 }, name: name.to_owned() };
        let Steered::To(_, id) = self.core.steering().connect(self.now, &app, 1000, (SERVER, 443)) else { panic!("{name}") };
        let now = self.now;
        self.core.steering().answer(now, id);
        id
    }

    /// Moves data for a while: each flow at up to its rate in bit/s, or less if its pacing allows less (out), or as given (in).
    fn send(&mut self, span: Duration, flows: &[(FlowId, f64)]) {
        for _ in 0..span.as_millis() / 20 {
            for (id, most) in flows {
                let pacing =
                    self.core.steering().shapes().get(id).and_then(|shape| shape.pacing).map_or(f64::INFINITY, |rate| rate.bps() as f64);
                self.core.steering().transfer(*id, ByteCount::ZERO, ByteCount::new((most.min(pacing) * 0.02 / 8.0) as u64));
            }
            self.run(Duration::from_millis(20));
        }
    }

    fn pacing(&mut self, id: FlowId) -> Option<u64> {
        self.core.steering().shapes().get(&id)?.pacing.map(Rate::bps)
    }

    fn shapes(&mut self) -> BTreeMap<FlowId, Shape> {
        self.core.steering().shapes().clone()
    }
}

fn near(value: Option<u64>, target: f64) -> bool {
    value.is_some_and(|value| (value as f64 / target - 1.0).abs() < 0.06)
}

#[test]
fn a_rate_limits_the_flows_of_its_rule_together_and_no_other() {
    let mut world = world(vec![rule("curl", AppRule { rate: Some(Portion::Rate(Rate::from_mbps(4))), ..AppRule::default() })]);
    let (one, two, other) = (world.begin("curl"), world.begin("curl"), world.begin("other"));
    world.send(Duration::from_secs(3), &[(one, 2e7), (two, 2e7), (other, 2e6)]);
    assert!(near(world.pacing(one), 2e6) && near(world.pacing(two), 2e6), "{:?}", world.shapes());
    assert_eq!(world.shapes()[&other], Shape::default(), "it is measured only");
    let window = world.shapes()[&one].window;
    assert!(window.is_some(), "{:?}", world.shapes());
    // What one of them does not want, the other may have.
    world.send(Duration::from_secs(3), &[(one, 0.0), (two, 2e7)]);
    assert!(world.pacing(two) > Some(3_500_000), "{:?}", world.shapes());
}

#[test]
fn a_percentage_follows_the_capacity_and_has_no_effect_without_one() {
    let mut world = world(vec![rule("curl", AppRule { rate: Some(Portion::Share(0.1)), ..AppRule::default() })]);
    let one = world.begin("curl");
    world.send(Duration::from_secs(2), &[(one, 2e7)]);
    assert_eq!(world.pacing(one), Some(1_000_000));
    let mut config = config(Scheduler::OnlyOne);
    config.policy.apps = vec![rule("curl", AppRule { rate: Some(Portion::Share(0.1)), ..AppRule::default() })];
    world.core.reconfigure(world.now, config).unwrap();
    world.run(Duration::from_secs(1));
    assert_eq!(world.shapes()[&one], Shape::default());
    let note = world.core.explain(world.now, &ExplainRequest { flow: Some(one.0), ..Default::default() }).unwrap().share.unwrap().note;
    assert!(note.is_some_and(|note| note.contains("capacity is not known")));
}

#[test]
fn weights_share_a_link_only_while_both_want_it() {
    let mut world = world(vec![rule("curl", AppRule { weight: 3.0, ..AppRule::default() })]);
    let (three, one) = (world.begin("curl"), world.begin("other"));
    world.send(Duration::from_secs(3), &[(three, 2e7), (one, 2e7)]);
    let (most, least) = (world.pacing(three).unwrap() as f64, world.pacing(one).unwrap() as f64);
    assert!((most / least - 3.0).abs() < 0.01 && most + least > 7.4e6 && most + least < 11.1e6, "{:?}", world.shapes());
    let share = world.core.explain(world.now, &ExplainRequest { flow: Some(one.0), ..Default::default() }).unwrap().share.unwrap();
    assert_eq!((share.up.guaranteed_bps, share.up.target_bps), (Some(2_500_000), world.pacing(one)));
    world.send(Duration::from_secs(3), &[(three, 0.0), (one, 2e7)]);
    assert!(world.pacing(one).is_none_or(|rate| rate > 9_000_000), "{:?}", world.shapes());
}

#[test]
fn guarantees_hold_beside_many_flows_and_a_sum_that_does_not_fit_is_reported() {
    let half = |name| rule(name, AppRule { guarantee: Some(Portion::Share(0.5)), ..AppRule::default() });
    let mut world = world(vec![half("call")]);
    let kept = world.begin("call");
    let bulk: Vec<FlowId> = (0..4).map(|_| world.begin("bulk")).collect();
    let mut all: Vec<(FlowId, f64)> = bulk.iter().map(|id| (*id, 2e7)).collect();
    all.push((kept, 2e7));
    world.send(Duration::from_secs(3), &all);
    assert!(world.pacing(kept) >= Some(5_000_000), "{:?}", world.shapes());
    assert_eq!(world.core.status(world.now).warnings, Vec::<String>::new());
    let mut config: Config = world.core.config().clone();
    config.policy.apps.extend([half("video"), half("game")]);
    world.core.reconfigure(world.now, config).unwrap();
    let warnings = world.core.status(world.now).warnings;
    assert!(warnings.iter().any(|text| text.contains("wlan0 cannot keep the guarantees of the [[app]] entries 1, 2, 3")), "{warnings:?}");
}

#[test]
fn everything_is_released_when_nothing_is_limited_any_more() {
    let limited = || vec![rule("curl", AppRule { rate: Some(Portion::Rate(Rate::from_mbps(4))), ..AppRule::default() })];
    let mut first = world(limited());
    first.begin("curl");
    first.run(Duration::from_secs(1));
    assert!(!first.shapes().is_empty());
    // By a reload.
    first.core.reconfigure(first.now, config(Scheduler::OnlyOne)).unwrap();
    first.run(Duration::from_millis(500));
    assert_eq!(first.shapes(), BTreeMap::new());
    // By the end of the last flow that a rule limits.
    let mut second = world(limited());
    let (one, other) = (second.begin("curl"), second.begin("other"));
    second.run(Duration::from_secs(1));
    assert!(second.shapes().contains_key(&other));
    second.core.steering().close(second.now, one);
    second.run(Duration::from_secs(1));
    assert_eq!(second.shapes(), BTreeMap::new());
    // By the daemon's end.
    let mut third = world(limited());
    third.begin("curl");
    third.run(Duration::from_secs(1));
    third.core.release_shares(third.now).unwrap();
    assert_eq!(third.shapes(), BTreeMap::new());
}

#[test]
fn a_failed_release_is_repeated() {
    let mut world = world(vec![rule("curl", AppRule { rate: Some(Portion::Rate(Rate::from_mbps(4))), ..AppRule::default() })]);
    world.begin("curl");
    world.run(Duration::from_secs(1));
    world.core.steering().set_chaos(Some(1));
    let _ = world.core.reconfigure(world.now, config(Scheduler::OnlyOne));
    for _ in 0..10 {
        world.now = world.now + Duration::from_millis(50);
        let _ = world.core.tick(world.now);
    }
    assert!(!world.shapes().is_empty());
    world.core.steering().set_chaos(None);
    world.run(Duration::from_secs(1));
    assert_eq!(world.shapes(), BTreeMap::new());
}

#[test]
fn the_explanation_of_a_flow_without_preferences_shows_no_share() {
    let mut world = world(vec![rule("curl", AppRule { weight: 2.0, ..AppRule::default() })]);
    let id = world.begin("elsewhere");
    world.run(Duration::from_secs(1));
    let share = world.core.explain(world.now, &ExplainRequest { flow: Some(id.0), ..Default::default() }).unwrap().share;
    assert_eq!(share, None, "no preference concerns the flow");
}

/// Clients have no sockets here: windows limit their flows in both directions, and one weight belongs to all flows of a client.
#[test]
fn forwarded_flows_share_a_link_with_own_ones_by_client() {
    let mut config = config(Scheduler::OnlyOne);
    let capacity = Some(Rate::from_mbps(10));
    config.policy.links = vec![LinkRule { capacity_down: capacity, capacity_up: capacity, ..link_rule("wlan0") }];
    config.policy.lan = vec!["lan0".into()];
    let matcher = AppMatcher { client: Some(ClientMatcher::Network("192.168.7.9/32".parse().unwrap())), ..AppMatcher::default() };
    // A weight of 1 counts as well, if it is given to clients.
    config.policy.apps = vec![AppRule { weighs: true, matcher, ..AppRule::default() }];
    let mut world = World::new(config);
    world.devices.push(facts(3, "lan0"));
    world.set_network();
    world.run(Duration::from_secs(1));
    let mut forward = |host: u8| {
        let now = world.now;
        let address = std::net::IpAddr::from([192, 168, 7, host]);
        let Steered::To(_, id) = world.core.steering().forward(now, address, (SERVER, 443)) else { panic!("{address}") };
        id
    };
    // The fake does not match rules by client, so the flow of the first client gets the rule by its number.
    let first = forward(9);
    let (second, third) = ([forward(10), forward(10), forward(10)], forward(11));
    world.core.steering().set_rule(first, 0);
    let own = world.begin("curl");
    let all: Vec<(FlowId, f64)> = second.into_iter().chain([first, third, own]).map(|id| (id, 2e7)).collect();
    world.send(Duration::from_secs(3), &all);
    let target = |world: &mut World, id: FlowId| {
        let explained = world.core.explain(world.now, &ExplainRequest { flow: Some(id.0), ..Default::default() }).unwrap();
        explained.share.unwrap().up.target_bps.unwrap() as f64
    };
    let each = target(&mut world, first);
    let sum: f64 = second.into_iter().map(|id| target(&mut world, id)).sum();
    for other in [sum, target(&mut world, third), target(&mut world, own)] {
        assert!((other / each - 1.0).abs() < 0.01, "{other} and {each} of {:?}", world.shapes());
    }
    let shapes = world.shapes();
    assert!(shapes[&first].client_window.is_some() && shapes[&first].pacing.is_none(), "{shapes:?}");
    assert!(shapes[&own].pacing.is_some() && shapes[&own].client_window.is_none(), "{shapes:?}");
}

#[test]
fn what_rules_guarantee_is_asked_of_the_network_of_their_device() {
    let guarantee = |rate| AppRule { guarantee: Some(Portion::Rate(Rate::from_mbps(rate))), ..AppRule::default() };
    let mut world = world(vec![rule("call", guarantee(2)), rule("video", guarantee(3))]);
    let promised = |world: &World, device: &str| world.core.promised_on(world.now, device).map(Rate::bps).to_array();
    assert_eq!(promised(&world, "wlan0"), [0, 0]);
    let (call, other) = (world.begin("call"), world.begin("call"));
    world.run(Duration::from_secs(2));
    assert_eq!((promised(&world, "wlan0"), promised(&world, "none")), ([2_000_000; 2], [0, 0]));
    let explain = |world: &mut World| {
        world.core.explain(world.now, &ExplainRequest { flow: Some(call.0), ..Default::default() }).unwrap().share.unwrap().network
    };
    assert_eq!(explain(&mut world), None);
    let reservation =
        NetworkReservation { asked_down_bps: 2_000_000, asked_up_bps: 2_000_000, kept: Vec::new(), reason: Some("it is full".to_owned()) };
    for (device, shown) in [("wlan0", Some(reservation.clone())), ("other0", None)] {
        world.core.on_reservation(device, Some(reservation.clone()));
        assert_eq!(explain(&mut world), shown);
    }
    for id in [call, other] {
        let now = world.now;
        world.core.steering().close(now, id);
    }
    world.run(Duration::from_secs(3));
    assert_eq!(promised(&world, "wlan0"), [0, 0]);
}
