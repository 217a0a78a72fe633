//! Named networks, and random networks against a simple, slow reference evaluator.

use braid_model::{LinkFacts, LinkKind, NextHop};
use proptest::prelude::*;

use super::*;

const LAN: u32 = 2;
const WLAN: u32 = 3;
const TUN: u32 = 7;
const DOCKER: u32 = 8;
const MAIN: u32 = 254;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn interface(index: u32, address: &str) -> LinkFacts {
    LinkFacts { addresses: vec![net(address)], ..LinkFacts::new(LinkIndex(index), format!("if{index}"), LinkKind::Wired) }
}

fn route(table: u32, to: &str, device: u32, metric: u32) -> RouteFacts {
    let hops = vec![NextHop { device: LinkIndex(device), gateway: None, dead: false }];
    let (destination, kind) = (net(to), RouteKind::Unicast);
    RouteFacts { table, destination, kind, metric, hops, source: None, conditional: false, ours: false }
}

fn rule(family: Family, priority: u32, table: u32) -> RuleFacts {
    RuleFacts {
        ports: None,
        family,
        priority,
        source: None,
        destination: None,
        mark: None,
        input: None,
        output: None,
        conditional: false,
        invert: false,
        action: RuleAction::Table(table),
        suppress_prefix_len: None,
        suppress_group: false,
        ours: false,
    }
}

/// Two links with default routes, and the usual system routes and rules.
fn two_links() -> NetworkSnapshot {
    let mut snapshot = NetworkSnapshot {
        interfaces: vec![interface(LAN, "192.168.1.5/24"), interface(WLAN, "10.0.0.9/24")],
        routes: vec![
            route(MAIN, "0.0.0.0/0", LAN, 100),
            route(MAIN, "0.0.0.0/0", WLAN, 600),
            route(MAIN, "192.168.1.0/24", LAN, 100),
            route(MAIN, "10.0.0.0/24", WLAN, 600),
            route(MAIN, "::/0", LAN, 100),
            route(MAIN, "2001:db8:1::/64", LAN, 100),
        ],
        ..NetworkSnapshot::default()
    };
    for family in Family::ALL {
        for (priority, table) in [(0, 255), (32766, MAIN), (32767, 253)] {
            snapshot.rules.push(rule(family, priority, table));
        }
    }
    snapshot
}

fn links() -> BTreeSet<LinkIndex> {
    BTreeSet::from([LinkIndex(LAN), LinkIndex(WLAN)])
}

fn look(map: &[(IpNet, bool)], address: IpAddr) -> bool {
    map.iter().filter(|(net, _)| net.contains(&address)).max_by_key(|(net, _)| net.prefix_len()).expect("/0 is there").1
}

fn is_steered(snapshot: &NetworkSnapshot, address: &str) -> bool {
    let address: IpAddr = address.parse().unwrap();
    let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
    look(&prefix_map(snapshot, &links(), family), address)
}

fn insert_rule(snapshot: &mut NetworkSnapshot, new: RuleFacts) {
    let position = snapshot.rules.iter().position(|old| old.family == new.family && old.priority >= new.priority);
    snapshot.rules.insert(position.unwrap_or(snapshot.rules.len()), new);
}

#[test]
fn the_internet_is_steered_and_local_networks_are_not() {
    let snapshot = two_links();
    for address in ["8.8.8.8", "1.0.0.1", "192.168.2.1", "100.64.0.1", "223.255.255.255", "2001:db8:2::1", "64:ff9b::808:808"] {
        assert!(is_steered(&snapshot, address), "{address}");
    }
    let left = [
        "192.168.1.1",
        "192.168.1.5",
        "10.0.0.77",
        "127.0.0.53",
        "0.0.0.0",
        "169.254.169.254",
        "224.0.0.251",
        "240.0.0.1",
        "255.255.255.255",
        "2001:db8:1::9",
        "::",
        "::1",
        "::ffff:8.8.8.8",
        "fe80::1",
        "ff02::fb",
    ];
    for address in left {
        assert!(!is_steered(&snapshot, address), "{address}");
    }
}

#[test]
fn own_addresses_are_left_alone_even_without_a_route() {
    let mut snapshot = two_links();
    snapshot.interfaces.push(interface(9, "198.51.100.7/32"));
    assert!(!is_steered(&snapshot, "198.51.100.7"));
    assert!(is_steered(&snapshot, "198.51.100.8"));
}

#[test]
fn nothing_is_steered_without_a_default_route() {
    let mut snapshot = two_links();
    snapshot.routes.retain(|route| !is_default(route.destination));
    for family in Family::ALL {
        assert_eq!(prefix_map(&snapshot, &links(), family), [(everything(family), false)]);
    }
    snapshot.rules.clear();
    assert_eq!(prefix_map(&snapshot, &links(), Family::V4), [(everything(Family::V4), false)]);
}

#[test]
fn wg_quick_takes_everything_but_specific_routes() {
    let mut snapshot = two_links();
    for family in Family::ALL {
        insert_rule(&mut snapshot, RuleFacts { mark: Some((0xca6c, u32::MAX)), invert: true, ..rule(family, 32765, 51820) });
        insert_rule(&mut snapshot, RuleFacts { suppress_prefix_len: Some(0), ..rule(family, 32764, MAIN) });
        snapshot.routes.push(route(51820, if family == Family::V4 { "0.0.0.0/0" } else { "::/0" }, TUN, 0));
    }
    for address in ["8.8.8.8", "192.168.1.1", "2001:db8:2::1"] {
        assert!(!is_steered(&snapshot, address), "{address}");
    }
    // If a VPN table covers only some destinations, the others fall through to main and to the links.
    snapshot.routes.retain(|route| route.table != 51820);
    snapshot.routes.push(route(51820, "10.0.0.0/8", TUN, 0));
    assert!(is_steered(&snapshot, "8.8.8.8"));
    assert!(!is_steered(&snapshot, "10.9.9.9"));
}

#[test]
fn openvpn_halves_hide_the_default_route() {
    let mut snapshot = two_links();
    snapshot.routes.extend([route(MAIN, "0.0.0.0/1", TUN, 0), route(MAIN, "128.0.0.0/1", TUN, 0), route(MAIN, "203.0.113.9/32", LAN, 0)]);
    for address in ["8.8.8.8", "203.0.113.8", "203.0.113.9"] {
        assert!(!is_steered(&snapshot, address), "{address}");
    }
    snapshot.routes.iter_mut().filter(|route| route.hops[0].device == LinkIndex(TUN)).for_each(|route| route.hops[0].dead = true);
    assert!(is_steered(&snapshot, "8.8.8.8"));
}

#[test]
fn containers_are_left_alone() {
    let mut snapshot = two_links();
    snapshot.routes.push(route(MAIN, "172.17.0.0/16", DOCKER, 0));
    assert!(!is_steered(&snapshot, "172.17.0.2"));
    assert!(is_steered(&snapshot, "172.18.0.2"));
}

#[test]
fn the_best_default_route_decides() {
    let mut snapshot = two_links();
    snapshot.routes.push(route(MAIN, "0.0.0.0/0", TUN, 50));
    assert!(!is_steered(&snapshot, "8.8.8.8"));
    snapshot.routes.last_mut().unwrap().metric = 700;
    assert!(is_steered(&snapshot, "8.8.8.8"));
    // Either of two routes with the same metric may be chosen.
    snapshot.routes.last_mut().unwrap().metric = 100;
    assert!(!is_steered(&snapshot, "8.8.8.8"));
}

#[test]
fn a_multipath_route_is_steered_if_every_live_hop_is_a_link() {
    let mut snapshot = two_links();
    snapshot.routes[0].hops.push(NextHop { device: LinkIndex(TUN), gateway: None, dead: false });
    assert!(!is_steered(&snapshot, "8.8.8.8"));
    snapshot.routes[0].hops[1].dead = true;
    assert!(is_steered(&snapshot, "8.8.8.8"));
}

#[test]
fn refuse_and_throw_routes_differ() {
    let mut snapshot = two_links();
    snapshot.routes.push(RouteFacts { kind: RouteKind::Refuse, hops: Vec::new(), ..route(MAIN, "198.51.100.0/24", 0, 0) });
    assert!(!is_steered(&snapshot, "198.51.100.1"));
    // A throw route ends the lookup in its own table only, and hides that table's shorter prefixes.
    insert_rule(&mut snapshot, rule(Family::V4, 100, 77));
    snapshot.routes.push(route(77, "203.0.0.0/8", TUN, 0));
    snapshot.routes.push(RouteFacts { kind: RouteKind::Throw, hops: Vec::new(), ..route(77, "203.0.113.0/24", 0, 0) });
    assert!(is_steered(&snapshot, "203.0.113.1"));
    assert!(!is_steered(&snapshot, "203.0.114.1"));
}

#[test]
fn conditional_rules_prevent_steering_unless_both_outcomes_agree() {
    let mut snapshot = two_links();
    insert_rule(&mut snapshot, RuleFacts { conditional: true, ..rule(Family::V4, 100, 77) });
    assert!(is_steered(&snapshot, "8.8.8.8"), "the rule's table is empty");
    snapshot.routes.push(route(77, "0.0.0.0/0", WLAN, 0));
    assert!(is_steered(&snapshot, "8.8.8.8"), "both outcomes use a link");
    snapshot.routes.last_mut().unwrap().hops[0].device = LinkIndex(TUN);
    assert!(!is_steered(&snapshot, "8.8.8.8"));
}

#[test]
fn goto_jumps_forward_and_is_ignored_without_a_target() {
    let mut snapshot = two_links();
    insert_rule(&mut snapshot, rule(Family::V4, 200, 77));
    snapshot.routes.push(route(77, "0.0.0.0/0", TUN, 0));
    assert!(!is_steered(&snapshot, "8.8.8.8"));
    insert_rule(&mut snapshot, RuleFacts { action: RuleAction::Goto(300), ..rule(Family::V4, 100, 0) });
    assert!(!is_steered(&snapshot, "8.8.8.8"), "no rule has priority 300");
    insert_rule(&mut snapshot, RuleFacts { action: RuleAction::Nop, ..rule(Family::V4, 300, 0) });
    assert!(is_steered(&snapshot, "8.8.8.8"));
    snapshot.rules.iter_mut().find(|rule| rule.priority == 100).unwrap().conditional = true;
    assert!(!is_steered(&snapshot, "8.8.8.8"));
}

#[test]
fn braids_own_rules_and_routes_are_ignored() {
    let mut snapshot = two_links();
    let before = prefix_map(&snapshot, &links(), Family::V4);
    insert_rule(&mut snapshot, RuleFacts { ours: true, suppress_prefix_len: Some(0), ..rule(Family::V4, 10, MAIN) });
    insert_rule(&mut snapshot, RuleFacts { ours: true, action: RuleAction::Refuse, ..rule(Family::V4, 11, 0) });
    snapshot.routes.push(RouteFacts { ours: true, ..route(MAIN, "8.0.0.0/8", LAN, 0) });
    assert_eq!(prefix_map(&snapshot, &links(), Family::V4), before);
}

#[test]
fn ten_thousand_routes_make_a_map_of_about_the_same_size() {
    let mut snapshot = two_links();
    for number in 0..10_000u32 {
        let address = Ipv4Addr::from((20 << 24) | (number << 9));
        snapshot.routes.push(route(MAIN, &format!("{address}/24"), TUN, 0));
    }
    let map = prefix_map(&snapshot, &links(), Family::V4);
    assert_eq!(map.len(), 10_000 + 1 + never_steered(Family::V4).len() + 2);
    assert_eq!(map.iter().filter(|(_, steer)| *steer).count(), 1);
}

/// The reference: all outcomes that the kernel may reach for one address, found by exhaustive evaluation.
mod reference {
    use super::*;

    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub(super) enum End {
        Default,
        Elsewhere,
        FallsThrough,
    }

    pub(super) fn steers(snapshot: &NetworkSnapshot, links: &BTreeSet<LinkIndex>, address: IpAddr) -> bool {
        let never = match address {
            IpAddr::V4(v4) => {
                let first = v4.octets()[0];
                first == 0 || v4.is_loopback() || v4.is_link_local() || first >= 224
            }
            IpAddr::V6(v6) => {
                v6.is_unspecified() || v6.is_loopback() || v6.is_unicast_link_local() || v6.is_multicast() || v6.to_ipv4_mapped().is_some()
            }
        };
        let own = snapshot.interfaces.iter().flat_map(|facts| &facts.addresses).any(|net| net.addr() == address);
        let family = if address.is_ipv4() { Family::V4 } else { Family::V6 };
        let rules: Vec<_> = snapshot.rules.iter().filter(|rule| rule.family == family && !rule.ours).collect();

        !never && !own && from(snapshot, links, &rules, address).iter().all(|end| *end == End::Default)
    }

    fn from(snapshot: &NetworkSnapshot, links: &BTreeSet<LinkIndex>, rules: &[&RuleFacts], address: IpAddr) -> BTreeSet<End> {
        let Some((rule, rest)) = rules.split_first() else { return BTreeSet::from([End::Elsewhere]) };
        let mut ends = BTreeSet::new();
        let selected = rule.source.is_none_or(|net| net.prefix_len() == 0)
            && rule.destination.is_none_or(|net| net.contains(&address))
            && rule.mark.is_none_or(|(value, mask)| value & mask == 0)
            && rule.input.as_ref().is_none_or(|name| name == "lo")
            && rule.output.is_none();
        // A conditional rule may or may not match, in addition to its other selectors.
        for condition in [true, false] {
            if !condition && !rule.conditional {
                continue;
            }
            if (selected && condition) == rule.invert {
                ends.extend(from(snapshot, links, rest, address));
                continue;
            }
            match rule.action {
                RuleAction::Nop => ends.extend(from(snapshot, links, rest, address)),
                RuleAction::Refuse | RuleAction::Other => ends.extend([End::Elsewhere]),
                RuleAction::Goto(to) => {
                    let position = rest.iter().position(|rule| rule.priority == to).unwrap_or(0);
                    ends.extend(from(snapshot, links, &rest[position..], address));
                }
                RuleAction::Table(table) => {
                    let mut found = look_up(snapshot, links, rule, table, address);
                    if found.remove(&End::FallsThrough) {
                        ends.extend(from(snapshot, links, rest, address));
                    }
                    ends.extend(found);
                }
            }
        }
        ends
    }

    fn look_up(s: &NetworkSnapshot, links: &BTreeSet<LinkIndex>, rule: &RuleFacts, table: u32, address: IpAddr) -> BTreeSet<End> {
        let mut routes: Vec<_> = s.routes.iter().filter(|r| !r.ours && r.table == table && r.destination.contains(&address)).collect();
        routes.retain(|route| route.hops.is_empty() || route.hops.iter().any(|hop| !hop.dead));
        routes.sort_by_key(|route| (128 - route.destination.prefix_len(), route.metric));
        let mut ends = BTreeSet::new();
        for (position, route) in routes.iter().enumerate() {
            let key = |route: &RouteFacts| (route.destination.prefix_len(), route.metric);
            let hidden = routes[..position].iter().any(|before| !before.conditional && key(before) != key(route));
            if hidden {
                return ends;
            }
            let suppressed = rule.suppress_prefix_len.is_some_and(|len| route.destination.prefix_len() <= len);
            let by_link = route.hops.iter().filter(|hop| !hop.dead).all(|hop| links.contains(&hop.device));
            match route.kind {
                RouteKind::Throw => drop(ends.insert(End::FallsThrough)),
                RouteKind::Refuse => drop(ends.insert(End::Elsewhere)),
                _ if suppressed => drop(ends.insert(End::FallsThrough)),
                kind => {
                    let good = kind == RouteKind::Unicast && !route.hops.is_empty() && by_link && is_default(route.destination);
                    ends.insert(if good { End::Default } else { End::Elsewhere });
                    if rule.suppress_group {
                        ends.insert(End::FallsThrough);
                    }
                }
            }
        }
        if routes.iter().all(|route| route.conditional) {
            ends.insert(End::FallsThrough);
        }
        ends
    }
}

/// A few prefixes of any length that nest and adjoin.
fn a_net(family: Family) -> BoxedStrategy<IpNet> {
    let bits = prop_oneof![Just(0x2000_0000u32), Just(0x0808_0000), Just(0xffff_ffff), Just(0x2001_0db8), any::<u32>()];
    let lens = prop_oneof![2 => Just(0u8), 1 => Just(1), 1 => Just(3), 4 => 0..=32u8];
    (bits, lens)
        .prop_map(move |(bits, len)| match family {
            Family::V4 => IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::from(bits), len).trunc()),
            Family::V6 => IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from(u128::from(bits) << 96), len).trunc()),
        })
        .boxed()
}

fn a_route(family: Family) -> impl Strategy<Value = RouteFacts> {
    let kind = prop_oneof![
        8 => Just(RouteKind::Unicast),
        1 => Just(RouteKind::Local),
        1 => Just(RouteKind::Refuse),
        1 => Just(RouteKind::Throw)
    ];
    let hop = (1..5u32, prop::bool::weighted(0.2)).prop_map(|(device, dead)| NextHop { device: LinkIndex(device), gateway: None, dead });
    (1..4u32, a_net(family), kind, 0..3u32, prop::collection::vec(hop, 0..3), prop::bool::weighted(0.15), prop::bool::weighted(0.1))
        .prop_map(|(table, destination, kind, metric, hops, conditional, ours)| RouteFacts {
            table,
            destination,
            kind,
            metric,
            hops,
            source: None,
            conditional,
            ours,
        })
}

fn a_rule(family: Family) -> impl Strategy<Value = RuleFacts> {
    let action = prop_oneof![
        8 => (1..4u32).prop_map(RuleAction::Table),
        1 => (0..10u32).prop_map(RuleAction::Goto),
        1 => Just(RuleAction::Nop),
        1 => Just(RuleAction::Refuse)
    ];
    let mark = prop::option::weighted(0.2, (0..2u32, 0..2u32));
    let devices = (prop::option::weighted(0.1, Just("lo".to_owned())), prop::option::weighted(0.1, Just("if2".to_owned())));
    let nets = (prop::option::weighted(0.1, a_net(family)), prop::option::weighted(0.3, a_net(family)));
    let flags = (prop::bool::weighted(0.15), prop::bool::weighted(0.2), prop::bool::weighted(0.1), prop::bool::weighted(0.1));
    (action, mark, devices, nets, flags, prop::option::weighted(0.2, 0..4u8)).prop_map(
        move |(action, mark, devices, nets, flags, suppress)| {
            RuleFacts {
                family,
                ports: None,
                priority: 0,
                // The unspecified address lies in 0.0.0.0/1 and similar prefixes; the reference does not model that corner case.
                source: nets.0.filter(|net| net.prefix_len() == 0 || net.network() != everything(family).network()),
                destination: nets.1,
                mark,
                input: devices.0,
                output: devices.1,
                conditional: flags.0,
                invert: flags.1,
                action,
                suppress_prefix_len: suppress,
                suppress_group: flags.2,
                ours: flags.3,
            }
        },
    )
}

fn a_network(family: Family) -> impl Strategy<Value = NetworkSnapshot> {
    (prop::collection::vec(a_route(family), 0..12), prop::collection::vec(a_rule(family), 0..6), a_net(family)).prop_map(
        |(routes, mut rules, own)| {
            for (priority, rule) in rules.iter_mut().enumerate() {
                rule.priority = priority as u32;
                if let RuleAction::Goto(to) = &mut rule.action {
                    *to += priority as u32 + 1;
                }
            }
            NetworkSnapshot { interfaces: vec![interface(2, &own.to_string())], routes, rules, ..NetworkSnapshot::default() }
        },
    )
}

/// First and last addresses of every prefix, and the adjacent addresses outside.
fn edges(snapshot: &NetworkSnapshot, map: &[(IpNet, bool)]) -> Vec<IpAddr> {
    let nets = snapshot.routes.iter().map(|route| route.destination).chain(snapshot.rules.iter().filter_map(|rule| rule.destination));
    let step = |address: IpAddr, by: i128| match address {
        IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from(v4.to_bits().wrapping_add(by as u32))),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(v6.to_bits().wrapping_add(by as u128))),
    };
    let ends = nets.chain(map.iter().map(|(net, _)| *net)).flat_map(|net| [(net.network(), -1), (net.broadcast(), 1)]);
    ends.flat_map(|(address, by)| [address, step(address, by)]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn the_map_agrees_with_the_reference(
        (family, snapshot) in prop_oneof![Just(Family::V4), Just(Family::V6)].prop_flat_map(|family| (Just(family), a_network(family))),
        samples in prop::collection::vec(any::<u128>(), 8),
    ) {
        let links = links();
        let map = prefix_map(&snapshot, &links, family);
        prop_assert_eq!(map.first().map(|(net, _)| *net), Some(everything(family)));
        for (position, (net, steer)) in map.iter().enumerate() {
            let above = map[..position].iter().filter(|(above, _)| above.contains(net)).max_by_key(|(above, _)| above.prefix_len());
            prop_assert!(above.is_none_or(|(_, other)| other != steer), "{} repeats what covers it", net);
        }
        let samples = samples.into_iter().map(|bits| match family {
            Family::V4 => IpAddr::V4(Ipv4Addr::from(bits as u32)),
            Family::V6 => IpAddr::V6(Ipv6Addr::from(bits)),
        });
        for address in edges(&snapshot, &map).into_iter().chain(samples) {
            prop_assert_eq!(look(&map, address), reference::steers(&snapshot, &links, address), "{}", address);
        }
    }
}

#[test]
fn regression_destinations_of_ipsec_policies_are_left_alone() {
    let mut snapshot = two_links();
    let links = [LAN, WLAN].map(LinkIndex).into();
    let steers = |snapshot: &NetworkSnapshot, address: &str| {
        let address: IpAddr = address.parse().unwrap();
        let map = prefix_map(snapshot, &links, Family::of(address));
        map.iter().filter(|(net, _)| net.contains(&address)).max_by_key(|(net, _)| net.prefix_len()).unwrap().1
    };
    assert!(steers(&snapshot, "203.0.113.9") && steers(&snapshot, "2001:db8:9::1"));
    snapshot.protected = vec!["203.0.113.77/24".parse().unwrap(), net("2001:db8:9::/48")];
    assert_eq!(
        ["203.0.113.9", "203.0.114.9", "2001:db8:9::1", "2001:db8:a::1"].map(|address| steers(&snapshot, address)),
        [false, true, false, true]
    );
    // The default route of another table does not override the IPsec policy.
    snapshot.protected = vec![net("0.0.0.0/0")];
    assert_eq!(["203.0.113.9", "1.1.1.1", "2001:db8:9::1"].map(|address| steers(&snapshot, address)), [false, false, true]);
}

#[test]
fn regression_a_default_route_with_a_foreign_source_address_is_left_alone() {
    let mut snapshot = two_links();
    let links = [LAN, WLAN].map(LinkIndex).into();
    let steered = |snapshot: &NetworkSnapshot| prefix_map(snapshot, &links, Family::V4)[0].1;
    snapshot.routes[0].source = "192.168.1.5".parse().ok();
    assert!(steered(&snapshot), "the link's own address");
    snapshot.routes[0].source = "10.99.0.1".parse().ok();
    assert!(!steered(&snapshot), "an address assigned by a VPN");
}
