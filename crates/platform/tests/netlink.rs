//! Follows and changes the kernel's network, in namespaces created by the test.

#[allow(unreachable_pub)]
mod support {
    pub mod world;
}

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use braid_decide::tables;
use braid_model::{Family, LinkFacts, LinkKind, NetworkSnapshot, RouteFacts, RuleAction};
use braid_platform::linux::netlink::firewall::Firewall;
use braid_platform::linux::netlink::{self, Files, Follower, Swept};
use support::world::{TestNamespace, World, advertise, may_make_namespaces};
use tokio::sync::watch;

/// Maximum time for an expected event on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

type Snapshots = watch::Receiver<Arc<NetworkSnapshot>>;

/// Waits until the network matches `wanted`.
fn until(snapshots: &mut Snapshots, what: &str, wanted: impl Fn(&NetworkSnapshot) -> bool) -> Arc<NetworkSnapshot> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let found = runtime.block_on(async {
        let found = tokio::time::timeout(LIMIT, snapshots.wait_for(|network| wanted(network))).await;
        found.ok().map(|network| network.expect("the follower is running").clone())
    });
    found.unwrap_or_else(|| panic!("never seen: {what}; last: {:#?}", snapshots.borrow().interfaces))
}

fn link<'a>(network: &'a NetworkSnapshot, name: &str) -> &'a LinkFacts {
    network.interfaces.iter().find(|facts| facts.name == name).unwrap_or_else(|| panic!("{name} exists"))
}

fn has(network: &NetworkSnapshot, name: &str, test: impl Fn(&LinkFacts) -> bool) -> bool {
    network.interfaces.iter().any(|facts| facts.name == name && test(facts))
}

fn snapshot(namespace: &TestNamespace) -> NetworkSnapshot {
    namespace.run(|| netlink::snapshot(&Files::default()).unwrap())
}

/// All rules and routes in iproute2's notation.
fn dump(namespace: &TestNamespace) -> String {
    namespace.run(|| {
        let mut all = String::new();
        for words in ["-4 rule", "-6 rule", "-4 route show table all", "-6 route show table all"] {
            let output = Command::new("ip").args(words.split(' ')).output().unwrap();
            all += &String::from_utf8_lossy(&output.stdout);
        }
        all
    })
}

fn plan(network: &NetworkSnapshot) -> tables::TablePlan {
    let names = |facts: &&LinkFacts| facts.name.starts_with("link");
    let slots: BTreeMap<_, _> = network.interfaces.iter().filter(names).enumerate().map(|(slot, facts)| (facts.index, slot)).collect();
    tables::plan(network, &slots)
}

fn braid_up(namespace: &TestNamespace) -> NetworkSnapshot {
    let network = snapshot(namespace);
    let plan = plan(&network);
    namespace.run(move || netlink::apply(&plan, &network)).unwrap();
    snapshot(namespace)
}

#[test]
fn the_smallest_packet_size_that_a_route_states_is_known() {
    if !may_make_namespaces("the packet size of routes") {
        return;
    }
    let world = World::new(1).unwrap();
    assert_eq!(snapshot(&world.client).route_mtu, None);
    world.client.ip("route add 198.51.100.0/24 via 10.77.0.1 mtu 1400");
    world.client.ip("route add 192.0.2.0/24 via 10.77.0.1 mtu 1300 table 99");
    world.client.ip("-6 route add 2001:db8:1::/64 via fd77::1 mtu 1280");
    assert_eq!(snapshot(&world.client).route_mtu, Some(1300));
}

#[test]
fn links_are_followed_from_creation_to_removal() {
    if !may_make_namespaces("following the network") {
        return;
    }
    let world = World::new(2).unwrap();
    let (_follower, mut snapshots) = world.client.run(|| Follower::start().unwrap());
    let network =
        until(&mut snapshots, "two links", |network| has(network, "link1", |link| link.usable(Family::V4) && link.usable(Family::V6)));
    let link0 = link(&network, "link0");
    assert_eq!((link0.kind, link0.mtu, link0.nominal), (LinkKind::Virtual, 1500, None));
    assert_eq!(link(&network, "lo").kind, LinkKind::Loopback);
    assert!(link0.mac.is_some() && link0.carrier);
    assert_eq!(link0.source(Family::V4), Some("10.77.0.2".parse().unwrap()));
    assert_eq!(link0.source(Family::V6), Some("fd77::2".parse().unwrap()));
    assert_eq!(link0.gateways.v4[0].gateway, Some("10.77.0.1".parse().unwrap()));
    assert_eq!(link0.gateways.v6[0].gateway, Some("fd77::1".parse().unwrap()));
    assert_eq!(link(&network, "link1").gateways.v4[0].metric, 101);

    world.server.ip("link set dev peer0 down");
    until(&mut snapshots, "carrier lost", |network| has(network, "link0", |link| !link.carrier));
    world.server.ip("link set dev peer0 up");
    until(&mut snapshots, "carrier back", |network| has(network, "link0", |link| link.carrier));

    world.client.ip("addr add 10.99.0.5/24 dev link0");
    world.client.ip("addr del 10.77.0.2/24 dev link0");
    until(&mut snapshots, "another address", |network| {
        has(network, "link0", |link| link.source(Family::V4) == Some("10.99.0.5".parse().unwrap()))
    });
    world.client.ip("route replace default via 10.99.0.1 dev link0 metric 7");
    world.client.ip("route add default via 10.99.0.9 dev link0 metric 3");
    until(&mut snapshots, "three default routes, the best first", |network| {
        has(network, "link0", |link| link.gateways.v4.iter().map(|route| route.metric).collect::<Vec<_>>() == [3, 7, 100])
    });
    world.client.ip("link set dev link0 mtu 1400");
    until(&mut snapshots, "another packet size", |network| has(network, "link0", |link| link.mtu == 1400));
    world.client.ip("rule add fwmark 0x7 lookup 99 priority 500");
    let network = until(&mut snapshots, "a rule", |network| network.rules.iter().any(|rule| rule.priority == 500));
    let rule = network.rules.iter().find(|rule| rule.priority == 500).unwrap();
    assert_eq!((rule.mark, rule.action, rule.conditional, rule.ours), (Some((7, u32::MAX)), RuleAction::Table(99), false, false));

    world.client.ip("link del dev link1");
    until(&mut snapshots, "a link gone", |network| !has(network, "link1", |_| true));
    world.client.ip("link add dev late type veth peer name etal");
    until(&mut snapshots, "a new link", |network| has(network, "late", |_| true));
}

#[test]
fn resolvers_advertised_by_a_router_are_followed() {
    if !may_make_namespaces("router advertisements") {
        return;
    }
    let world = World::new(1).unwrap();
    world.client.sysctl("net.ipv6.conf.link0.accept_ra", "2");
    let (_follower, mut snapshots) = world.client.run(|| Follower::start().unwrap());
    // The kernel accepts an advertisement only from and to a link-local address that is not tentative.
    for (namespace, device) in [(&world.client, "link0"), (&world.server, "peer0")] {
        namespace.wait_for_link_local(device);
    }
    let resolvers = |wanted: &'static [&'static str]| {
        move |network: &NetworkSnapshot| {
            let wanted: Vec<IpAddr> = wanted.iter().map(|server| server.parse().unwrap()).collect();
            has(network, "link0", |link| link.resolvers == wanted)
        }
    };
    world.server.run(|| advertise("peer0", 0, &[(600, &["2001:db8:53::1"]), (2, &["2001:db8:53::2"])]));
    until(&mut snapshots, "two resolvers", resolvers(&["2001:db8:53::1", "2001:db8:53::2"]));
    until(&mut snapshots, "one that expired", resolvers(&["2001:db8:53::1"]));
    world.server.run(|| advertise("peer0", 0, &[(0, &["2001:db8:53::1"]), (600, &["2001:db8:53::3"])]));
    until(&mut snapshots, "one withdrawn", resolvers(&["2001:db8:53::3"]));
    world.server.ip("link set dev peer0 down");
    until(&mut snapshots, "a network that went away", resolvers(&[]));
}

#[test]
fn dropping_a_follower_stops_it() {
    // Reads the machine's own network without changing it.
    let (follower, mut snapshots) = Follower::start().unwrap();
    assert!(has(&snapshots.borrow(), "lo", |lo| lo.kind == LinkKind::Loopback));
    drop(follower);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let ended = runtime.block_on(async { tokio::time::timeout(LIMIT, async { while snapshots.changed().await.is_ok() {} }).await });
    assert!(ended.is_ok(), "the sender is gone with the thread");
}

#[test]
fn unusable_addresses_are_omitted_and_other_tables_are_used_if_main_has_no_route() {
    if !may_make_namespaces("reading addresses") {
        return;
    }
    let world = World::new(1).unwrap();
    world.client.ip("-6 addr add 2001:db8::5/64 dev link0 nodad preferred_lft 0");
    world.client.ip("-4 route del default dev link0");
    world.client.ip("route add default via 10.77.0.1 dev link0 table 77");
    let network = snapshot(&world.client);
    let link0 = link(&network, "link0");
    let addresses: Vec<_> = link0.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.77.0.2/24", "fd77::2/64"], "neither the deprecated nor the link-local address");
    assert_eq!(link0.gateways.v4.len(), 1);
    assert!(network.routes.iter().any(|route| route.table == 77 && !route.ours));
}

#[test]
fn the_rules_of_wg_quick_are_read() {
    if !may_make_namespaces("reading rules") {
        return;
    }
    let namespace = TestNamespace::new().unwrap();
    namespace.ip("-4 rule add not fwmark 0xca6c table 51820");
    namespace.ip("-4 rule add table main suppress_prefixlength 0");
    namespace.ip("-4 rule add from 10.0.0.0/8 to 192.0.2.0/24 iif lo ipproto tcp blackhole priority 9");
    namespace.ip("-4 rule add goto 32766 priority 10");
    let rules = snapshot(&namespace).rules;
    let with = |priority| rules.iter().find(|rule| rule.family == Family::V4 && rule.priority == priority).unwrap();
    assert!(with(32765).invert && with(32765).mark == Some((0xca6c, u32::MAX)));
    assert_eq!((with(32764).suppress_prefix_len, with(32764).action), (Some(0), RuleAction::Table(254)));
    assert_eq!((with(10).action, with(9).action), (RuleAction::Goto(32766), RuleAction::Refuse));
    assert!(with(9).conditional && with(9).input.as_deref() == Some("lo"));
    assert_eq!(with(9).source.map(|net| net.to_string()).as_deref(), Some("10.0.0.0/8"));
    assert_eq!(with(0).action, RuleAction::Table(255));
    let order: Vec<_> = rules.iter().filter(|rule| rule.family == Family::V4).map(|rule| rule.priority).collect();
    assert!(order.is_sorted(), "{order:?}");
}

#[test]
fn devices_routes_and_rules_of_all_kinds_are_read() {
    if !may_make_namespaces("reading many kinds of entries") {
        return;
    }
    let world = World::new(2).unwrap();
    // The kernel may lack some of these. All kernels that Braid supports have the first ones.
    let zoo = [
        "link add zoo0 type bridge",
        "link add link link0 name zoo1 type vlan id 7",
        "link add zoo2 type bond mode active-backup",
        "link add zoo3 type vxlan id 9 dstport 4789 dev link0",
        "link add zoo4 type wireguard",
        "link add link link1 name zoo5 type macvlan mode bridge",
        "link add zoo6 type vrf table 55",
        "link add zoo7 type sit local 10.77.0.2 remote 10.77.0.1",
        "link add zoo8 type gretap local 10.77.0.2 remote 10.77.0.1",
        "link add zoo9 type geneve id 3 remote 10.77.0.1",
        "tuntap add zoo10 mode tun",
        "link add zoo11 type dummy",
        "link set zoo11 master zoo0",
        "link set zoo0 up",
        "nexthop add id 5 via 10.77.0.1 dev link0",
        "route add 198.51.100.0/25 nhid 5",
        "route add 198.51.100.128/25 nexthop via 10.77.0.1 dev link0 weight 2 nexthop via 10.77.1.1 dev link1",
        "route add 192.0.2.0/25 via 10.77.0.1 dev link0 mtu 1300 initcwnd 20 congctl reno quickack 1 realm 4",
        "route add 192.0.2.128/25 via 10.77.0.1 dev link0 table 70000",
        "route add 192.0.2.7/32 encap ip id 30 dst 10.77.0.1 dev link0",
        "route add blackhole 192.0.2.8/32",
        "-6 route add fd99::/64 encap seg6 mode encap segs fd77::1 dev link0",
        "-6 route add fd98::/64 from fd77::/64 via fd77::1 dev link0 expires 300 pref high",
        "-6 route add fd97::/64 nexthop via fd77::1 dev link0 nexthop via fd77:0:0:1::1 dev link1",
        "rule add uidrange 5-9 ipproto udp dport 53-54 lookup 55 priority 20",
        "rule add dscp 5 lookup 55 priority 21",
        "rule add tun_id 3 lookup 55 priority 22",
        "rule add lookup 55 suppress_ifgroup 4 priority 23",
        "-6 rule add from fd77::/64 sport 7 prohibit priority 24",
    ];
    let count = |words: &'static str| {
        world.client.run(move || {
            let output = Command::new("ip").args(words.split(' ')).output().unwrap();
            assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
            output.stdout.iter().filter(|byte| **byte == b'\n').count()
        })
    };
    let lacks = |words: &&'static str| {
        let words = *words;
        world.client.run(move || !Command::new("ip").args(words.split(' ')).output().unwrap().status.success())
    };
    let lacking: Vec<_> = zoo.into_iter().filter(lacks).collect();
    eprintln!("not supported by this kernel: {lacking:#?}");
    let network = snapshot(&world.client);
    assert_eq!(network.interfaces.len(), count("-o link"));
    for (family, routes, rules) in
        [(Family::V4, "-o -4 route show table all", "-o -4 rule"), (Family::V6, "-o -6 route show table all", "-o -6 rule")]
    {
        assert_eq!(network.routes.iter().filter(|route| route.family() == family).count(), count(routes), "{family} routes");
        assert_eq!(network.rules.iter().filter(|rule| rule.family == family).count(), count(rules), "{family} rules");
    }
    let odd = |facts: &&LinkFacts| facts.name.starts_with("zoo") && !matches!(facts.kind, LinkKind::Virtual | LinkKind::Vpn);
    assert_eq!(
        network.interfaces.iter().filter(odd).collect::<Vec<_>>(),
        Vec::<&LinkFacts>::new(),
        "software devices are not classified as links"
    );
    let to = |net: &str| network.routes.iter().find(|route| route.destination == net.parse().unwrap());
    for route in network.routes.iter().filter(|route| route.conditional) {
        assert_eq!(route.destination.to_string(), "fd98::/64", "only a route with a selector is conditional");
    }
    let hops = |net| to(net).map_or(2, |route: &RouteFacts| route.hops.len());
    assert_eq!((hops("198.51.100.128/25"), hops("fd97::/64")), (2, 2));
    assert!(to("192.0.2.128/25").is_none_or(|route| route.table == 70_000));
    let selected = network.rules.iter().filter(|rule| (20..25).contains(&rule.priority) && rule.priority != 23);
    assert!(selected.clone().count() > 1 && selected.clone().all(|rule| rule.conditional), "{:#?}", selected.collect::<Vec<_>>());
}

#[test]
fn bound_sockets_use_their_link_under_strict_filtering_and_a_sweep_removes_everything() {
    if !may_make_namespaces("changing the network") {
        return;
    }
    let world = World::new(3).unwrap();
    for name in ["all", "link0", "link1", "link2"] {
        world.client.sysctl(&format!("net.ipv4.conf.{name}.rp_filter"), "1");
    }
    let before = dump(&world.client);
    let listener = world.server.run(|| TcpListener::bind("[::]:7000").unwrap());
    let echo = std::thread::spawn(move || {
        for _ in 0..6 {
            let (mut stream, from) = listener.accept().unwrap();
            stream.write_all(from.ip().to_canonical().to_string().as_bytes()).unwrap();
        }
    });

    let network = braid_up(&world.client);
    let (ours, wanted) = (network.rules.iter().filter(|rule| rule.ours).count(), plan(&network));
    assert_eq!((ours, network.routes.iter().filter(|route| route.ours).count()), (wanted.rules.len(), wanted.routes.len()));
    for index in 0..3 {
        let families = [(format!("10.77.{index}.2"), "203.0.113.10:7000"), (format!("fd77:0:0:{index}::2"), "[2001:db8:113::10]:7000")];
        for (source, server) in families {
            let (source, server): (IpAddr, SocketAddr) = (source.parse().unwrap(), server.parse().unwrap());
            let counters = world.client.run(|| netlink::device_counters().unwrap());
            let answer = world.client.run(move || {
                let socket = socket2::Socket::new(socket2::Domain::for_address(server), socket2::Type::STREAM, None).unwrap();
                socket.bind(&SocketAddr::new(source, 0).into()).unwrap();
                socket.connect_timeout(&server.into(), LIMIT).unwrap();
                let mut text = String::new();
                TcpStream::from(socket).read_to_string(&mut text).unwrap();
                text
            });
            assert_eq!(answer, source.to_string());
            let after = world.client.run(|| netlink::device_counters().unwrap());
            let moved = |name: &str| {
                let of = |list: &[(braid_model::LinkIndex, braid_model::Traffic)]| {
                    list.iter().find(|(index, ..)| *index == link(&network, name).index).map(|(_, moved)| moved.sum().get()).unwrap()
                };
                of(&after) - of(&counters)
            };
            assert!(moved(&format!("link{index}")) > 300, "{source} uses its link");
        }
    }
    echo.join().unwrap();

    assert_eq!(
        dump(&world.client),
        {
            braid_up(&world.client);
            dump(&world.client)
        },
        "applying again changes nothing"
    );
    let swept = world.client.run(|| netlink::sweep().unwrap());
    assert_eq!(swept, Swept { rules: wanted.rules.len(), routes: wanted.routes.len() });
    assert_eq!(dump(&world.client), before);
    assert_eq!(world.client.run(|| netlink::sweep().unwrap()), Swept::default());
}

#[test]
fn a_changed_gateway_and_a_lost_link_replace_their_routes() {
    if !may_make_namespaces("changing a network that changes") {
        return;
    }
    let world = World::new(2).unwrap();
    braid_up(&world.client);
    world.client.ip("route replace default via 10.77.0.99 dev link0 metric 100");
    world.client.ip("-6 route del default dev link0");
    world.client.ip("-6 route add default via fd77::99 dev link0 metric 100");
    world.server.ip("link set dev peer1 down");
    let (_follower, mut snapshots) = world.client.run(|| Follower::start().unwrap());
    until(&mut snapshots, "no carrier", |network| has(network, "link1", |link| !link.carrier));
    let network = braid_up(&world.client);
    let ours: Vec<_> = network.routes.iter().filter(|route| route.ours && route.destination.prefix_len() == 0).collect();
    let gateways: Vec<_> =
        ours.iter().flat_map(|route| &route.hops).filter_map(|hop| hop.gateway).map(|gateway| gateway.to_string()).collect();
    assert_eq!(gateways, ["10.77.0.99", "fd77::99"], "only the new gateways of the link with carrier");
}

#[test]
fn foreign_rules_precede_ours_and_survive_a_sweep() {
    if !may_make_namespaces("coexisting with a VPN") {
        return;
    }
    let world = World::new(1).unwrap();
    world.client.ip("-4 rule add not fwmark 0xca6c table 51820");
    world.client.ip("-4 rule add table main suppress_prefixlength 0");
    // A foreign route with the same protocol number as ours.
    world.client.ip(&format!("route add 198.51.100.0/24 via 10.77.0.1 proto {}", tables::PROTOCOL));
    let before = dump(&world.client);
    braid_up(&world.client);
    world.client.ip("-4 rule add not fwmark 0xca6d table 51821");
    let network = snapshot(&world.client);
    let v4: Vec<_> = network.rules.iter().filter(|rule| rule.family == Family::V4 && rule.priority > 0 && rule.priority < 32766).collect();
    for priority in [32764, 32765] {
        let marks: Vec<_> = v4.iter().filter(|rule| rule.priority == priority).map(|rule| rule.ours).collect();
        assert!(marks.len() > 1 && marks.is_sorted(), "foreign rules come first: {v4:#?}");
    }
    assert!(!v4[0].ours, "a rule that is added later precedes ours: {v4:#?}");
    world.client.ip("-4 rule del not fwmark 0xca6d table 51821");
    world.client.run(|| netlink::sweep().unwrap());
    assert_eq!(dump(&world.client), before);
}

/// Priorities of the IPv4 rules in these notifications that say that a rule was removed.
fn removed_priorities(notifications: &[u8]) -> Vec<u32> {
    const DELETE_RULE: u16 = 33;
    const PRIORITY: u16 = 6;
    let u16_at = |bytes: &[u8], at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
    let u32_at = |bytes: &[u8], at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    let (mut found, mut rest) = (Vec::new(), notifications);
    while rest.len() >= 16 {
        let length = u32_at(rest, 0) as usize;
        // After the headers of netlink and of a rule.
        let mut attributes = rest.get(28..length).unwrap_or_default();
        while attributes.len() >= 4 {
            let size = usize::from(u16_at(attributes, 0));
            if u16_at(rest, 4) == DELETE_RULE && u16_at(attributes, 2) == PRIORITY {
                found.push(u32_at(attributes, 4));
            }
            attributes = attributes.get(size.max(4).next_multiple_of(4)..).unwrap_or_default();
        }
        rest = rest.get(length.max(16).next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

/// Otherwise packets for the clients of a gateway would leave over a link while the rules go: answers have the mark of their link.
#[test]
fn specific_routes_win_until_no_rule_leads_to_the_table_of_a_link() {
    if !may_make_namespaces("the order in which rules are removed") {
        return;
    }
    const IPV4_RULES: u32 = 8;
    let world = World::new(2).unwrap();
    let network = braid_up(&world.client);
    let without_links = NetworkSnapshot { interfaces: Vec::new(), ..network.clone() };
    for by_sweep in [false, true] {
        let (before, plan) = (snapshot(&world.client), plan(&without_links));
        let notifications = world.client.run(move || {
            let mut socket = netlink_sys::Socket::new(netlink_sys::protocols::NETLINK_ROUTE).unwrap();
            socket.bind_auto().unwrap();
            socket.add_membership(IPV4_RULES).unwrap();
            socket.set_non_blocking(true).unwrap();
            if by_sweep {
                netlink::sweep().map(drop).unwrap();
            } else {
                netlink::apply(&plan, &before).unwrap();
            }
            let (mut all, mut part) = (Vec::new(), vec![0; 1 << 16]);
            while let Ok(length) = socket.recv(&mut &mut part[..], 0) {
                all.extend(&part[..length]);
            }
            all
        });
        let removed = removed_priorities(&notifications);
        assert!(removed.contains(&32764) && removed.contains(&32765), "{removed:?}");
        assert!(removed.iter().rev().is_sorted(), "by sweep {by_sweep}: {removed:?}");
        braid_up(&world.client);
    }
}

#[test]
fn a_burst_of_ten_thousand_route_changes_ends_in_the_correct_snapshot() {
    if !may_make_namespaces("a burst of route changes") {
        return;
    }
    let world = World::new(1).unwrap();
    let (_follower, mut snapshots) = world.client.run(|| Follower::start().unwrap());
    let lines: String = (0..10_000).map(|n| format!("route add 100.{}.{}.0/24 via 10.77.0.1 dev link0\n", 64 + n / 250, n % 250)).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), lines).unwrap();
    world.client.ip(&format!("-batch {}", file.path().display()));
    let network = until(&mut snapshots, "all routes", |network| network.routes.len() > 10_000);
    assert!(network.routes.iter().filter(|route| route.table == 254 && route.family() == Family::V4).count() >= 10_000);
    let start = Instant::now();
    snapshot(&world.client);
    eprintln!("reading 10,000 routes took {:?}", start.elapsed());
    world.client.ip("link del dev link0");
    until(&mut snapshots, "no routes", |network| network.routes.len() < 100);
}

#[test]
fn without_privilege_the_network_is_read_and_changes_fail_with_a_remedy() {
    if !may_make_namespaces("dropping privilege") {
        return;
    }
    let world = World::new(1).unwrap();
    let network = braid_up(&world.client);
    let outcome = world.client.run(move || {
        // SAFETY: plain system calls of this thread, which ends with the test; only this thread's ids change.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
        let (_follower, snapshots) = Follower::start().unwrap();
        assert_eq!(snapshots.borrow().rules, network.rules);
        netlink::sweep()
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("remove") && error.contains("CAP_NET_ADMIN"), "{error}");
}

#[test]
fn regression_added_and_removed_rules_by_user_or_cgroup_are_detected() {
    if !may_make_namespaces("firewall rules") {
        return;
    }
    let world = World::new(1).unwrap();
    world.client.run(|| {
        let nft = |words: &str| assert!(Command::new("nft").args(words.split(' ')).status().unwrap().success(), "nft {words}");
        let (_firewall, mut filter_changes) = Firewall::start().unwrap();
        assert_eq!(*filter_changes.borrow(), None);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut until = |what: &str, wanted: fn(&str) -> bool| {
            let found = filter_changes.wait_for(|filter| wanted(filter.as_deref().unwrap_or("none")));
            let found = runtime.block_on(async { tokio::time::timeout(LIMIT, found).await.is_ok() });
            assert!(found, "{what}: {:?}", filter_changes.borrow());
        };
        nft("add table inet sandbox");
        nft("add chain inet sandbox out { type filter hook output priority 0 ; }");
        nft("add rule inet sandbox out ip daddr 192.0.2.1 tcp dport 25 drop");
        for rule in ["meta skuid 4711 drop", "meta skgid 4711 drop", "meta cgroup 7 drop"] {
            nft(&format!("add rule inet sandbox out {rule}"));
            until(rule, |filter| filter.contains("nftables, table sandbox, chain out"));
            nft("flush chain inet sandbox out");
            until("it is gone", |filter| filter == "none");
        }
        // A process that may not read the rules reports that, and treats them as matching on the sender.
        std::thread::spawn(|| {
            // SAFETY: no pointers; only this thread changes its user.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) }, 0);
            assert!(Firewall::start().map_or(true, |(_, filter_changes)| filter_changes.borrow().is_some()));
        })
        .join()
        .unwrap();
    });
}
