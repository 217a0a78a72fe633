//! The gateway's clients: which relay takes their packets, and what the system needs for them.

use std::collections::BTreeSet;
use std::time::Duration;

use braid_decide::policy::{AppMatcher, AppRule, Carry, Policy, Scheduler};
use braid_decide::tables::{PACKET_DEVICE, PACKET_MARK};
use braid_model::{LinkKind, PerFamily};

use super::world::*;

fn rule(name: &str, carry: Carry, relay: Option<&str>) -> AppRule {
    let matcher = AppMatcher { port: Some(name.len() as u16), ..AppMatcher::default() };
    AppRule { matcher, carry, relay: relay.map(str::to_owned), ..AppRule::default() }
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// The relay that is chosen from those that offer to take packets.
fn chosen(policy: impl FnOnce(&mut Policy), offering: &[&str]) -> Option<String> {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.lan = vec!["lan0".into()];
    policy(&mut config.policy);
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let (relay, done) = world.core.choose_packet_relay(world.now, &names(offering));
    done.unwrap();
    relay
}

#[test]
fn one_relay_takes_packets_if_the_policy_bonds_anything_with_it() {
    let both = &["home", "office"];
    assert_eq!(chosen(|_| {}, both), None, "nothing is bonded");
    assert_eq!(chosen(|policy| policy.bonds_all = true, both), Some("home".into()));
    assert_eq!(chosen(|policy| policy.bonds_all = true, &[]), None);
    let all_by = |relay: &'static str| {
        move |policy: &mut Policy| {
            (policy.bonds_all, policy.relay) = (true, Some(relay.into()));
            policy.apps = vec![rule("a", Carry::Bond, Some("home"))];
        }
    };
    assert_eq!(chosen(all_by("office"), both), Some("office".into()));
    assert_eq!(chosen(all_by("office"), &["home"]), None, "the relay of everything takes none");
    assert_eq!(chosen(|policy| policy.apps = vec![rule("a", Carry::Bond, Some("office"))], both), Some("office".into()));
    assert_eq!(chosen(|policy| policy.apps = vec![rule("a", Carry::Bond, Some("office"))], &["home"]), None);
    assert_eq!(chosen(|policy| policy.apps = vec![rule("a", Carry::Bond, None)], both), Some("home".into()));
    assert_eq!(chosen(|policy| policy.apps = vec![rule("a", Carry::Direct, None)], both), None);
    let without_lan = |policy: &mut Policy| (policy.bonds_all, policy.lan) = (true, Vec::new());
    assert_eq!(chosen(without_lan, both), None, "only clients of a gateway have packets");
}

#[test]
fn rules_for_another_relay_keep_their_packets_from_the_one_that_takes_them() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.lan = vec!["lan0".into()];
    config.policy.exclude.users = vec![7];
    config.policy.apps =
        vec![rule("a", Carry::Bond, Some("home")), rule("bb", Carry::Bond, Some("office")), rule("ccc", Carry::Bond, None)];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let (relay, done) = world.core.choose_packet_relay(world.now, &names(&["home", "office"]));
    done.unwrap();
    assert_eq!(relay, Some("home".into()));
    world.run(Duration::from_secs(1));
    let params = world.core.steering().params().unwrap();
    assert_eq!(params.rules.iter().map(|rule| rule.no_packets).collect::<Vec<_>>(), [false, false, true, false]);
}

#[test]
fn rules_and_routes_follow_the_device_and_its_addresses() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.lan = vec!["lan0".into()];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let mut device = facts(9, PACKET_DEVICE);
    device.gateways = PerFamily::default();
    for kind in [LinkKind::Vpn, LinkKind::Wired] {
        device.kind = kind;
        for (addresses, families) in
            [(&["198.19.240.2/32", "fd62::2/128"][..], [true, true]), (&["198.19.240.2/32", "fe80::2/64"], [true, false])]
        {
            device.addresses = addresses.iter().map(|net| net.parse().unwrap()).collect();
            world.devices.truncate(2);
            world.devices.push(device.clone());
            world.set_network();
            assert!(world.core.all_links_mut().all(|link| link.facts.name != PACKET_DEVICE), "it is no link");
            let actions = world.core.take_actions();
            let (plan, gateway) = (actions.plan.unwrap(), actions.gateway.unwrap().unwrap());
            let marked = plan.rules.iter().filter(|rule| rule.mark == Some((PACKET_MARK, u32::MAX))).count();
            let routes = plan.routes.iter().filter(|route| route.hops.iter().any(|hop| hop.device == device.index)).count();
            let count = families.iter().filter(|has| **has).count();
            assert_eq!((marked, routes), (count, count));
            assert_eq!([gateway.packets.v4, gateway.packets.v6], families);
        }
    }
    world.devices.truncate(2);
    world.set_network();
    let gateway = world.core.take_actions().gateway.unwrap().unwrap();
    assert_eq!(gateway.packets, PerFamily::default());
}

#[test]
fn regression_the_firewall_gets_the_names_of_bridges() {
    let mut config = config(Scheduler::RoundRobin);
    config.policy.lan = vec!["lan0".into()];
    let mut world = World::new(config);
    world.run(Duration::from_secs(1));
    let _ = world.core.take_actions();
    let (mut bridge, mut port) = (facts(20, "docker0"), facts(21, "veth1"));
    for device in [&mut bridge, &mut port] {
        (device.kind, device.gateways) = (LinkKind::Virtual, PerFamily::default());
    }
    port.master = Some(bridge.index);
    world.devices.extend([bridge, port]);
    world.set_network();
    let gateway = world.core.take_actions().gateway.unwrap().unwrap();
    assert_eq!(gateway.bridges, names(&["docker0"]));
}
