//! Links with a default route found only by source rules, two links on one subnet, and gateways of the other family: sockets bound to the device must
//! reach the server.

#[allow(unreachable_pub)]
mod support {
    pub mod world;
}

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use braid_decide::steer::prefix_map;
use braid_decide::tables;
use braid_model::{Family, NetworkSnapshot};
use braid_platform::linux::netlink::{self, Files};
use support::world::{TestNamespace, World, may_make_namespaces};

fn snapshot(namespace: &TestNamespace) -> NetworkSnapshot {
    namespace.run(|| netlink::snapshot(&Files::default()).unwrap())
}

fn slots(network: &NetworkSnapshot) -> BTreeMap<braid_model::LinkIndex, usize> {
    let links = network.interfaces.iter().filter(|facts| facts.name.starts_with("link"));
    links.enumerate().map(|(slot, facts)| (facts.index, slot)).collect()
}

fn shape(namespace: &TestNamespace) -> NetworkSnapshot {
    let network = snapshot(namespace);
    let plan = tables::plan(&network, &slots(&network));
    namespace.run(move || netlink::apply(&plan, &network)).unwrap();
    snapshot(namespace)
}

/// Connects from a socket bound to `device` and returns its source address.
fn connect_by(namespace: &TestNamespace, device: &'static str, server: &str) -> std::io::Result<SocketAddr> {
    let server: SocketAddr = server.parse().unwrap();
    namespace.run(move || {
        let socket = socket2::Socket::new(socket2::Domain::for_address(server), socket2::Type::STREAM, None)?;
        socket.bind_device(Some(device.as_bytes()))?;
        socket.connect_timeout(&server.into(), Duration::from_secs(2))?;
        Ok(socket.local_addr()?.as_socket().unwrap())
    })
}

/// Does the same, repeated until it succeeds: on a new link neighbour resolution fails while its link-local address is tentative.
fn connect_at_last(namespace: &TestNamespace, device: &'static str, server: &str) -> SocketAddr {
    let attempts = (0..20).map(|_| connect_by(namespace, device, server)).find(|outcome| outcome.is_ok());
    attempts.unwrap_or_else(|| panic!("{server} was never reached through {device}")).unwrap()
}

/// Serves on every address of the server. The server answers ARP only for addresses of the receiving link, as gateways do.
fn serve(world: &World) {
    world.server.sysctl("net.ipv4.conf.all.arp_ignore", "1");
    let listener = world.server.run(|| TcpListener::bind("[::]:7000").unwrap());
    std::thread::spawn(move || listener.incoming().for_each(drop));
}

#[test]
fn a_link_with_its_default_route_in_a_separate_table_is_usable_by_its_device() {
    if !may_make_namespaces("multi-homing by source rules") {
        return;
    }
    let world = World::new(2).unwrap();
    serve(&world);
    for (family, source, gateway) in [("-4", "10.77.1.2", "10.77.1.1"), ("-6", "fd77:0:0:1::2", "fd77:0:0:1::1")] {
        world.client.ip(&format!("{family} route del default dev link1"));
        world.client.ip(&format!("{family} route add default via {gateway} dev link1 table 100"));
        world.client.ip(&format!("{family} rule add from {source} lookup 100"));
    }
    let without = connect_by(&world.client, "link1", "[2001:db8:113::10]:7000");
    assert!(without.is_err(), "otherwise the rule by device would not be needed: {without:?}");
    let network = shape(&world.client);
    assert_eq!(connect_at_last(&world.client, "link1", "203.0.113.10:7000").ip().to_string(), "10.77.1.2");
    assert_eq!(connect_at_last(&world.client, "link1", "[2001:db8:113::10]:7000").ip().to_string(), "fd77:0:0:1::2");
    let links: BTreeSet<_> = slots(&network).into_keys().collect();
    let map = prefix_map(&network, &links, Family::V4);
    assert!(map[0].1);
    assert!(map.contains(&("10.77.0.0/24".parse().unwrap(), false)), "{map:?}");
    world.client.run(|| netlink::sweep().unwrap());
    assert!(snapshot(&world.client).rules.iter().all(|rule| !rule.ours && rule.output.is_none()));
}

#[test]
fn two_links_on_one_subnet_reach_their_neighbours_under_strict_filtering() {
    if !may_make_namespaces("two links on one subnet") {
        return;
    }
    let world = World::new(2).unwrap();
    // Like two tethered phones, each with the same subnet and the same gateway address.
    let other = TestNamespace::new().unwrap();
    world.client.ip(&format!("link add dev link2 type veth peer name peer2 netns {}", other.path));
    other.ip("addr add 10.77.0.1/24 dev peer2");
    other.ip("link set dev peer2 up");
    world.client.ip("addr add 10.77.0.9/24 dev link2");
    world.client.ip("link set dev link2 up");
    world.client.ip("route add default via 10.77.0.1 dev link2 metric 300");
    for name in ["all", "link0", "link2"] {
        world.client.sysctl(&format!("net.ipv4.conf.{name}.rp_filter"), "1");
        world.client.sysctl(&format!("net.ipv4.conf.{name}.arp_filter"), "1");
    }
    serve(&world);
    let second = other.run(|| TcpListener::bind("0.0.0.0:7000").unwrap());
    std::thread::spawn(move || second.incoming().for_each(drop));
    shape(&world.client);
    assert_eq!(connect_at_last(&world.client, "link0", "10.77.0.1:7000").ip().to_string(), "10.77.0.2");
    assert_eq!(connect_at_last(&world.client, "link2", "10.77.0.1:7000").ip().to_string(), "10.77.0.9");
}

#[test]
fn a_gateway_of_the_other_family_is_kept() {
    if !may_make_namespaces("IPv4 through an IPv6 gateway") {
        return;
    }
    let world = World::new(1).unwrap();
    serve(&world);
    world.client.ip("-4 route replace default via inet6 fd77::1 dev link0 metric 100");
    let network = shape(&world.client);
    let ours: Vec<_> = network.routes.iter().filter(|route| route.ours && route.destination == "0.0.0.0/0".parse().unwrap()).collect();
    assert_eq!(ours[0].hops[0].gateway, Some("fd77::1".parse().unwrap()));
    assert_eq!(connect_at_last(&world.client, "link0", "203.0.113.10:7000").ip().to_string(), "10.77.0.2");
    let plan = tables::plan(&network, &slots(&network));
    let again = world.client.run(move || netlink::apply(&plan, &network));
    assert!(again.is_ok(), "{again:?}");
}
