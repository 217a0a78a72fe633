//! The fake backend must decide like the kernel. Also tests the meaning of the parameters.

use std::net::IpAddr;

use braid_control::fake::{FakeSteering, Steered};
use braid_control::steering::{
    AppId, DemandEstimate, ExeId, PeerDirect, RedirectPolicy, SteerLink, SteerMatch, SteerParams, SteerRule, Steering, SteeringEvent,
};
use braid_decide::connection::Mode;
use braid_model::{ByteCount, Class, Direction, Family, FlowId, LinkIndex, LinkSet, MAX_LINKS, PerDirection, PerFamily, Rate, Time};

const NOW: Time = Time::from_millis(1000);
const HOST: &str = "203.0.113.10";

/// Two links of 8 Mbit/s; slot 0 is the system's choice.
fn params() -> SteerParams {
    let link = |slot: usize| SteerLink {
        index: LinkIndex(slot as u32 + 1),
        name: format!("net{slot}"),
        rank: 100 + slot as u32,
        source4: None,
        source6: None,
        rate: PerDirection::both(Rate::from_mbps(8)),
        price: 0,
        step: 1,
    };
    let both = LinkSet::only(0) | LinkSet::only(1);
    SteerParams {
        mode: Mode::VirtualStart,
        targets: PerDirection::default(),
        scheduler: 3,
        default_demand: ByteCount::new(1000),
        affinity: None,
        links: std::array::from_fn::<_, MAX_LINKS, _>(|slot| (slot < 2).then(|| link(slot))),
        usable: PerFamily { v4: both, v6: LinkSet::EMPTY },
        backup: LinkSet::EMPTY,
        rules: Vec::new(),
        redirected: Vec::new(),
        peer_direct: false,
        confined: false,
    }
}

fn with_rule(rule: SteerRule) -> SteerParams {
    SteerParams { rules: vec![rule], ..params() }
}

fn ready(params: &SteerParams) -> FakeSteering {
    let mut steering = FakeSteering::default();
    steering.set_prefixes(Family::V4, &[("0.0.0.0/0".parse().unwrap(), true), ("10.0.0.0/8".parse().unwrap(), false)]).unwrap();
    steering.set_params(params).unwrap();
    steering.set_redirect_ready(true);
    steering
}

fn app(name: &str) -> AppId {
    AppId { exe: ExeId { device: 1, inode: name.len() as u64 }, name: name.to_owned() }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn connect(steering: &mut FakeSteering, name: &str, host: &str, port: u16) -> Steered {
    steering.connect(NOW, &app(name), 1000, (ip(host), port))
}

/// The default connect.
fn curl(steering: &mut FakeSteering) -> Steered {
    connect(steering, "curl", HOST, 443)
}

fn placed(steered: Steered) -> (usize, FlowId) {
    let Steered::To(slot, id) = steered else { panic!("{steered:?}") };
    (slot, id)
}

#[test]
fn destinations_without_a_links_default_route_are_left_alone() {
    let mut steering = ready(&params());
    assert_eq!(placed(curl(&mut steering)).0, 0);
    assert_eq!(["10.1.2.3", "2001:db8::1"].map(|host| connect(&mut steering, "curl", host, 443)), [Steered::LeftAlone; 2]);
    let mut fresh = FakeSteering::default();
    assert_eq!(curl(&mut fresh), Steered::LeftAlone, "before the daemon has set parameters");
}

#[test]
fn the_first_rule_whose_conditions_all_match_applies() {
    let matching = SteerMatch { name: Some("curl".into()), port: Some(443), user: Some(1000), ..SteerMatch::default() };
    let mut params = with_rule(SteerRule { matching, links: Some(LinkSet::only(1)), ..SteerRule::default() });
    params.rules.push(SteerRule { exclude: true, ..SteerRule::default() });
    let mut steering = ready(&params);
    assert_eq!(placed(curl(&mut steering)).0, 1);
    let row = steering.living().next().unwrap();
    assert_eq!((row.rule, row.link, row.scheduler), (Some(0), LinkIndex(2), 3));
    assert_eq!(connect(&mut steering, "curl", HOST, 80), Steered::LeftAlone);
    assert_eq!(connect(&mut steering, "wget", HOST, 443), Steered::LeftAlone);
    assert_eq!(steering.connect(NOW, &app("curl"), 1001, (ip(HOST), 443)), Steered::LeftAlone);
}

#[test]
fn a_rule_for_a_missing_program_or_cgroup_matches_nothing() {
    let denied = |matching| {
        let mut steering = ready(&with_rule(SteerRule { matching, links: Some(LinkSet::EMPTY), ..SteerRule::default() }));
        curl(&mut steering) == Steered::Denied
    };
    let exe = |files: &[u64]| SteerMatch {
        exe: Some(files.iter().map(|inode| ExeId { device: 1, inode: *inode }).collect()),
        ..SteerMatch::default()
    };
    let to = |net: &str| SteerMatch { destination: Some(net.parse().unwrap()), ..SteerMatch::default() };
    assert_eq!([exe(&[]), exe(&[9, 4]), exe(&[5])].map(denied), [false, true, false], "curl has inode 4");
    assert_eq!([to("203.0.113.0/24"), to("203.0.114.0/24")].map(denied), [true, false]);
    assert!(!denied(SteerMatch { cgroup: Some(None), ..SteerMatch::default() }));
}

#[test]
fn a_strict_rule_denies_without_its_links_and_a_preference_yields() {
    let mut params = with_rule(SteerRule { prefer: Some(LinkSet::only(1)), ..SteerRule::default() });
    params.usable.v4 = LinkSet::only(0);
    let mut steering = ready(&params);
    assert_eq!(placed(curl(&mut steering)).0, 0);
    params.rules[0].links = Some(LinkSet::only(1));
    steering.set_params(&params).unwrap();
    assert_eq!((curl(&mut steering), steering.counters().unwrap().denied), (Steered::Denied, 1));
    params.rules.clear();
    params.usable.v4 = LinkSet::EMPTY;
    steering.set_params(&params).unwrap();
    assert_eq!(curl(&mut steering), Steered::LeftAlone, "no rule denies it");
}

#[test]
fn a_backup_is_used_only_while_no_other_link_is_usable() {
    let mut params = SteerParams { backup: LinkSet::only(0), ..params() };
    let mut steering = ready(&params);
    assert_eq!([placed(curl(&mut steering)).0, placed(curl(&mut steering)).0], [1, 1]);
    params.usable.v4 = LinkSet::only(0);
    steering.set_params(&params).unwrap();
    assert_eq!(placed(curl(&mut steering)).0, 0);
}

#[test]
fn the_named_classes_are_redirected_unless_a_rule_decides_otherwise() {
    let rule = |class, redirect| SteerRule { class, redirect, ..SteerRule::default() };
    let redirected = |rule: SteerRule, ready_for_it: bool| {
        let mut steering = ready(&SteerParams { redirected: vec![Class::RealTime], ..with_rule(rule) });
        steering.set_redirect_ready(ready_for_it);
        let redirected = curl(&mut steering) == Steered::Redirected;
        assert_eq!(steering.counters().unwrap().redirected, u64::from(redirected));
        redirected
    };
    assert!(redirected(rule(Some(Class::RealTime), None), true));
    assert!(!redirected(rule(Some(Class::Bulk), None), true));
    assert!(!redirected(rule(Some(Class::RealTime), Some(RedirectPolicy::Direct)), true));
    assert!(redirected(rule(Some(Class::Bulk), Some(RedirectPolicy::Redirect)), true));
    assert!(!redirected(rule(Some(Class::RealTime), None), false), "the daemon does not accept it, so it goes direct");
}

#[test]
fn refused_destinations_go_direct_until_the_refusal_is_removed() {
    let mut steering = ready(&with_rule(SteerRule { redirect: Some(RedirectPolicy::Redirect), ..SteerRule::default() }));
    steering.set_refused(&[ip(HOST)]).unwrap();
    assert_eq!(placed(curl(&mut steering)).0, 0);
    assert_eq!(connect(&mut steering, "curl", "203.0.113.11", 443), Steered::Redirected);
    steering.set_refused(&[]).unwrap();
    assert_eq!(curl(&mut steering), Steered::Redirected);
}

#[test]
fn flows_to_a_server_are_bonded_unless_only_one_link_may_be_used() {
    let bonded = |peer_direct, rule: SteerRule, prepare: fn(&mut FakeSteering)| {
        let mut steering = ready(&SteerParams { peer_direct, ..with_rule(rule) });
        steering.set_servers(&[ip(HOST)], &[(ip(HOST), 22)]).unwrap();
        prepare(&mut steering);
        curl(&mut steering) == Steered::Redirected
    };
    let peers = |peer_direct| SteerRule { peer_direct, ..SteerRule::default() };
    assert!(bonded(true, peers(PeerDirect::Usual), |_| ()) && bonded(false, peers(PeerDirect::All), |_| ()));
    assert!(!bonded(false, peers(PeerDirect::Usual), |_| ()) && !bonded(true, peers(PeerDirect::Nothing), |_| ()));
    assert!(!bonded(true, SteerRule { redirect: Some(RedirectPolicy::Direct), ..peers(PeerDirect::All) }, |_| ()));
    assert!(!bonded(true, SteerRule { links: Some(LinkSet::only(1)), ..SteerRule::default() }, |_| ()));
    assert!(!bonded(true, SteerRule::default(), |steering| steering.set_servers(&[ip("203.0.113.1")], &[]).unwrap()));
    assert!(!bonded(true, SteerRule::default(), |steering| steering.set_servers(&[ip(HOST)], &[(ip(HOST), 443)]).unwrap()), "closed");
    assert!(!bonded(true, SteerRule::default(), |steering| steering.filter(&app("curl"))), "foreign filters see only direct flows");
}

#[test]
fn a_flow_that_goes_direct_because_of_a_filter_is_marked() {
    let mut steering = ready(&SteerParams { peer_direct: true, ..params() });
    steering.set_servers(&[ip(HOST)], &[]).unwrap();
    steering.filter(&app("curl"));
    curl(&mut steering);
    connect(&mut steering, "curl", "203.0.113.99", 443);
    assert_eq!(steering.living().map(|row| row.filtered).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn a_flow_counts_with_its_expected_bytes_until_it_ends() {
    let mut steering = ready(&params());
    let (slot, id) = placed(curl(&mut steering));
    let load = |steering: &mut FakeSteering| {
        let loads = steering.load_table().unwrap().loads[slot];
        (loads.load.down, loads.flows)
    };
    assert_eq!(load(&mut steering), (1000, 1));
    steering.transfer(id, ByteCount::new(300), ByteCount::new(100));
    assert_eq!(load(&mut steering), (1000, 1), "only a dump updates it");
    let rows = steering.flows(NOW).unwrap();
    assert_eq!((load(&mut steering), rows[0].reserved), ((600, 1), ByteCount::new(600)));
    steering.transfer(id, ByteCount::new(4600), ByteCount::ZERO);
    steering.flows(NOW).unwrap();
    assert_eq!(load(&mut steering), (5000, 1), "a flow beyond its estimate still counts");
    steering.close(NOW, id);
    assert_eq!((load(&mut steering), steering.living().count()), ((0, 0), 0));
    steering.close(NOW, id);
    assert_eq!((load(&mut steering), steering.counters().unwrap().ended), ((0, 0), 1), "it ends once");
}

#[test]
fn the_bytes_on_a_port_determine_its_demand_and_direction() {
    let mut steering = ready(&params());
    let (_, id) = placed(connect(&mut steering, "sync", HOST, 873));
    steering.transfer(id, ByteCount::new(100), ByteCount::new(8000));
    steering.close(NOW, id);
    connect(&mut steering, "sync", HOST, 873);
    connect(&mut steering, "sync", HOST, 22);
    let rows: Vec<_> = steering.living().map(|row| (row.demand.get(), row.direction)).collect();
    assert_eq!(rows, [(8100, Direction::Up), (1000, Direction::Down)]);
    // By DBAS eq. 1 a further flow counts one eighth; a flow without bytes changes nothing.
    steering.learn(&app("sync"), 873, ByteCount::new(900), ByteCount::ZERO, NOW).unwrap();
    steering.learn(&app("sync"), 873, ByteCount::ZERO, ByteCount::ZERO, NOW).unwrap();
    let learnt = steering.estimates().unwrap().remove(0);
    assert_eq!((learnt.down.get(), learnt.up.get(), learnt.count), (88 + 112, 7000, 2));
    let seed = DemandEstimate { up: ByteCount::ZERO, down: ByteCount::new(77), ..learnt };
    steering.seed(&seed).unwrap();
    assert_eq!(steering.estimates().unwrap(), [seed]);
}

#[test]
fn an_application_is_reported_once_and_events_arrive_in_order() {
    let mut steering = ready(&params());
    let (_, id) = placed(curl(&mut steering));
    steering.time_out(id);
    steering.answer(NOW, id);
    steering.time_out(id);
    steering.close(NOW, id);
    curl(&mut steering);
    let mut events = steering.events(3);
    assert!(matches!(&events[0], SteeringEvent::NewApp { app, .. } if app.name == "curl"));
    let connecting = |event: &SteeringEvent| matches!(event, SteeringEvent::Symptom { connecting: true, .. });
    assert_eq!(events.drain(1..).map(|event| connecting(&event)).collect::<Vec<_>>(), [true, false]);
    let rest = steering.events(10);
    assert!(matches!(&rest[..], [SteeringEvent::Ended(row)] if row.id == id), "{rest:?}");
    assert!(steering.events(10).is_empty());
    let signs = steering.signs(0, Family::V4).unwrap();
    assert_eq!((signs.answered, signs.answered_at, signs.remote), (1, NOW, Some((ip(HOST), 443))));
    assert_eq!(steering.signs(1, Family::V4).unwrap().answered, 0);
}

#[test]
fn a_failed_call_changes_nothing() {
    let mut steering = ready(&params());
    let changes = steering.changes();
    steering.set_chaos(Some(1));
    let error = steering.set_params(&SteerParams { scheduler: 9, ..params() }).unwrap_err();
    assert_eq!(error.to_string(), "cannot apply a new policy: the fake fails on request");
    assert!(steering.set_servers(&[ip(HOST)], &[]).is_err() && steering.set_refused(&[ip(HOST)]).is_err());
    assert!(steering.set_resolvers(&[(ip(HOST), LinkSet::only(0))]).is_err() && steering.heartbeat(NOW).is_err());
    assert!(steering.set_class(&app("curl"), Class::Bulk, Class::Unclassified).is_err() && steering.flows(NOW).is_err());
    assert_eq!((steering.params().unwrap().scheduler, steering.changes(), steering.last_heartbeat()), (3, changes, None));
    assert!(steering.servers().is_empty() && steering.refused().is_empty() && steering.resolvers().is_empty());
    assert_eq!(steering.class_set(&app("curl")), None);
    steering.set_chaos(None);
    steering.set_class(&app("curl"), Class::Bulk, Class::Unclassified).unwrap();
    steering.heartbeat(NOW).unwrap();
    assert_eq!((steering.class_set(&app("curl")), steering.last_heartbeat()), (Some(Class::Bulk), Some(NOW)));
    let mut third = FakeSteering::chaos(3);
    assert_eq!([(); 6].map(|()| third.heartbeat(NOW).is_ok()), [true, true, false, true, true, false]);
}

#[test]
fn without_redirection_all_flows_go_direct_and_nothing_else_changes() {
    let rule = SteerRule {
        redirect: Some(RedirectPolicy::Redirect),
        peer_direct: PeerDirect::All,
        links: Some(LinkSet::only(1)),
        ..SteerRule::default()
    };
    let all = SteerParams { redirected: vec![Class::Bulk], peer_direct: true, ..with_rule(rule) };
    let direct = all.without_redirection();
    let expected = SteerRule { redirect: Some(RedirectPolicy::Direct), peer_direct: PeerDirect::Nothing, ..all.rules[0].clone() };
    assert_eq!(direct, SteerParams { redirected: Vec::new(), peer_direct: false, rules: vec![expected], ..all.clone() });
    assert_eq!(with_rule(SteerRule::default()).without_redirection().rules[0].redirect, None, "a rule without a redirect keeps none");
}

#[test]
fn parameters_redirect_if_a_class_or_rule_does_but_not_for_servers_alone() {
    let of = |rule| with_rule(rule).redirects();
    assert!(!params().redirects() && !SteerParams { peer_direct: true, ..params() }.redirects());
    assert!(SteerParams { redirected: vec![Class::RealTime], ..params() }.redirects());
    assert!(of(SteerRule { redirect: Some(RedirectPolicy::Redirect), ..SteerRule::default() }));
    assert!(of(SteerRule { peer_direct: PeerDirect::All, ..SteerRule::default() }));
    assert!(!of(SteerRule { redirect: Some(RedirectPolicy::Direct), peer_direct: PeerDirect::Nothing, ..SteerRule::default() }));
}

#[test]
fn a_direction_without_its_own_target_uses_the_common_one() {
    let target = |mbps| Mode::CheapestInTime { target: Some(Rate::from_mbps(mbps)) };
    let mut params = SteerParams { mode: target(8), targets: PerDirection { down: None, up: Some(Rate::from_mbps(2)) }, ..params() };
    assert_eq!([Direction::Down, Direction::Up].map(|way| params.mode_for(way)), [target(8), target(2)]);
    params.mode = Mode::OnlyOne;
    assert_eq!(params.mode_for(Direction::Up), Mode::OnlyOne);
}
