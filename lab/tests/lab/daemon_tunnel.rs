//! Traffic that the system sends through a tunnel never leaves over a link: wg-quick's rules, and a default route of a lower metric.

use std::fs;
use std::net::UdpSocket;

use crate::support::*;
use braid_lab::{Filter, Lab, Watch, Web};
use socket2::{Domain, Socket, Type};

const EAGER: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n";

/// A device that is no link and drops all its packets.
fn add_tunnel(lab: &Lab) {
    client(lab, "ip link add wg0 type veth peer name wg0peer");
    // Like a tun device it knows no neighbours.
    client(lab, "ip link set wg0 arp off");
    for command in
        ["link set wg0 up", "link set wg0peer up", "address add 10.200.0.2/32 dev wg0", "-6 address add fd20::2/128 dev wg0 nodad"]
    {
        client(lab, &format!("ip {command}"));
    }
}

/// The rules and routes of `wg-quick up` for AllowedIPs = 0.0.0.0/0, ::/0.
fn wg_quick(lab: &Lab) {
    add_tunnel(lab);
    for family in ["-4", "-6"] {
        client(lab, &format!("ip {family} route add default dev wg0 table 51820"));
        client(lab, &format!("ip {family} rule add not fwmark 51820 table 51820"));
        client(lab, &format!("ip {family} rule add table main suppress_prefixlength 0"));
    }
}

/// The other way: a default route that wins by its metric.
fn lower_metric(lab: &Lab) {
    add_tunnel(lab);
    for family in ["-4", "-6"] {
        client(lab, &format!("ip {family} route add default dev wg0 metric 5"));
    }
}

/// Two half default routes (/1), which win by their prefix length.
fn two_halves(lab: &Lab) {
    add_tunnel(lab);
    for route in ["-4 route add 0.0.0.0/1", "-4 route add 128.0.0.0/1", "-6 route add ::/1", "-6 route add 8000::/1"] {
        client(lab, &format!("ip {route} dev wg0"));
    }
}

/// Frames sent to the tunnel.
fn tunnelled(lab: &Lab) -> u64 {
    let count = lab.client().run(|| fs::read_to_string("/sys/class/net/wg0/statistics/tx_packets")).unwrap().unwrap();
    count.trim().parse().unwrap()
}

/// Packets that [`try_all`] sends to each host.
const EACH: u64 = 12;

/// Sends to these hosts with every kind of socket.
fn try_all(lab: &Lab, hosts: std::ops::Range<u8>) {
    for user in [None, Some(NOBODY)] {
        let work = || {
            for host in hosts.clone() {
                for (any, to) in [("0.0.0.0:0", remote(host, 9)), ("[::]:0", remote6(host, 9))] {
                    let _ = local_of(to);
                    let _ = UdpSocket::from(Socket::new(Domain::for_address(to), Type::DGRAM, None).unwrap()).send_to(b"x", to);
                    let connected = UdpSocket::bind(any).unwrap();
                    if connected.connect(to).is_ok() {
                        let _ = connected.send(b"x");
                    }
                }
            }
        };
        lab.client().run_as(user, work).unwrap();
    }
}

/// Counts what enters any link for these hosts.
fn watch_hosts(lab: &Lab, hosts: std::ops::Range<u8>) -> Vec<Watch> {
    let to = |host| [Filter::to(Lab::internet(host)), Filter::to(Lab::internet6(host))];
    hosts.flat_map(to).flat_map(|filter| watch_all(lab, filter)).collect()
}

fn sum(lab: &Lab, watches: &[Watch]) -> u64 {
    packets(lab, watches).iter().sum()
}

/// Sets the tunnel up before Braid starts, then again after.
fn nothing_leaves(set_up: fn(&Lab)) {
    if !able() {
        return;
    }
    let lab = lab(2);
    set_up(&lab);
    let watches = watch_hosts(&lab, 10..20);
    let _up = Up::start(&lab, EAGER);
    try_all(&lab, 10..20);
    eventually("all datagrams and first segments are in the tunnel", || tunnelled(&lab) >= 10 * EACH);
    assert_eq!(sum(&lab, &watches), 0);
}

/// Waits until flows follow the tunnel that has just come.
#[track_caller]
fn followed(lab: &Lab) {
    let follows = || {
        let before = tunnelled(lab);
        try_all(lab, 20..21);
        tunnelled(lab) >= before + EACH
    };
    println!("the tunnel is followed after {:?}", eventually("the tunnel is followed", follows));
}

/// Starts Braid, uses the links, then sets the tunnel up, and takes it down again.
fn nothing_leaves_from_then_on(set_up: fn(&Lab)) {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _up = Up::start(&lab, EAGER);
    let before = watch_hosts(&lab, 10..14);
    try_all(&lab, 10..14);
    eventually("without the tunnel they go by the links", || sum(&lab, &before) > 0);
    set_up(&lab);
    followed(&lab);
    let (watches, frames) = (watch_hosts(&lab, 10..20), tunnelled(&lab));
    try_all(&lab, 10..20);
    eventually("all datagrams and first segments are in the tunnel", || tunnelled(&lab) >= frames + 10 * EACH);
    assert_eq!(packets(&lab, &watches), vec![0; watches.len()]);

    client(&lab, "ip link del wg0");
    for family in ["-4", "-6"] {
        if client(&lab, &format!("ip {family} rule")).contains("not from all fwmark 0xca6c") {
            client(&lab, &format!("ip {family} rule del not fwmark 51820 table 51820"));
            client(&lab, &format!("ip {family} rule del table main suppress_prefixlength 0"));
        }
    }
    let every_link = || {
        let links = lab.client().run(|| [(); 4].map(|()| local_of(remote(11, 9)).ok())).unwrap();
        ["10.77.0.2", "10.77.1.2"].map(|own| links.contains(&own.parse().ok())) == [true; 2]
    };
    eventually("the links are used again", every_link);
}

/// Braid may ask destinations that answered whether a link lives, but not those that have gone behind a tunnel since.
#[test]
fn braid_itself_asks_nobody_behind_a_tunnel() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    let _up = Up::start(&lab, EAGER);
    for host in 10..14 {
        drop(open(&lab, remote(host, 80)));
        drop(open(&lab, remote6(host, 80)));
    }
    let hosts = watch_hosts(&lab, 10..14);
    eventually("Braid asks one that answered", || sum(&lab, &hosts) > 0);
    wg_quick(&lab);
    followed(&lab);
    let hosts = watch_hosts(&lab, 10..14);
    let gateways: Vec<_> = (0..2).map(|link| lab.watch(link, Filter::to([10, 77, link as u8, 1])).unwrap()).collect();
    // One probe in ten goes to a destination.
    eventually("many probes were sent", || packets(&lab, &gateways).iter().all(|count| *count > 30));
    assert_eq!(packets(&lab, &hosts), vec![0; hosts.len()]);
}

/// Flows that were begun on a link before the tunnel came. Without Braid the system would send them into the tunnel.
#[test]
fn flows_begun_before_the_tunnel_do_not_go_on_outside() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _web = Web::start(&lab).unwrap();
    let _up = Up::start(&lab, EAGER);
    let flows: Vec<_> = (0..2).map(|_| open(&lab, remote(10, 80)).0).collect();
    wg_quick(&lab);
    followed(&lab);
    eventually("flows outside are ended", || flows.iter().all(|flow| flow.peer_addr().is_err()));
    let watches = watch_hosts(&lab, 10..11);
    for mut flow in flows {
        let _ = fetch(&mut flow, "/");
    }
    assert_eq!(sum(&lab, &watches), 0);
}

#[test]
fn no_flow_bypasses_wg_quick() {
    nothing_leaves(wg_quick);
}

#[test]
fn no_flow_bypasses_wg_quick_started_later() {
    nothing_leaves_from_then_on(wg_quick);
}

#[test]
fn no_flow_bypasses_a_default_route_of_lower_metric() {
    nothing_leaves(lower_metric);
}

#[test]
fn no_flow_bypasses_a_later_default_route_of_lower_metric() {
    nothing_leaves_from_then_on(lower_metric);
}

#[test]
fn no_flow_bypasses_two_half_default_routes() {
    nothing_leaves(two_halves);
}

#[test]
fn no_flow_bypasses_later_half_default_routes() {
    nothing_leaves_from_then_on(two_halves);
}

#[test]
fn the_tunnels_own_packets_use_a_link() {
    if !able() {
        return;
    }
    let lab = lab(2);
    wg_quick(&lab);
    let _up = Up::start(&lab, EAGER);
    let watches = watch_all(&lab, Filter::to(Lab::internet(20)));
    lab.client()
        .run(|| {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
            socket.set_mark(51820).unwrap();
            UdpSocket::from(socket).send_to(b"encrypted", remote(20, 51820)).unwrap();
        })
        .unwrap();
    eventually("the marked datagram is on a link", || packets(&lab, &watches) == [1, 0]);
}

/// What strongSwan does for a tunnel that takes all IPv4: no device, a policy for what has the address that it gave, and a route that gives it.
fn ipsec(lab: &Lab) {
    let default = client(lab, &format!("ip -4 route show default dev {}", NAMES[0]));
    let gateway = default.split_whitespace().nth(2).unwrap().to_owned();
    client(lab, &format!("ip address add 10.200.0.2/32 dev {}", NAMES[0]));
    client(lab, &format!("ip route add default via {gateway} dev {} src 10.200.0.2 table 220", NAMES[0]));
    client(lab, "ip rule add priority 220 table 220");
    client(lab, "ip xfrm policy add dir out src 10.200.0.2/32 dst 0.0.0.0/0 tmpl src 10.200.0.2 dst 203.0.113.30 proto esp mode tunnel");
}

#[test]
fn regression_traffic_covered_by_an_ipsec_policy_never_leaves_unencrypted() {
    if !able() {
        return;
    }
    let lab = lab(2);
    ipsec(&lab);
    let watches: Vec<_> = (10..20).flat_map(|host| watch_all(&lab, Filter::to(Lab::internet(host)))).collect();
    let up = Up::start(&lab, EAGER);
    try_all(&lab, 10..15);
    assert_eq!(sum(&lab, &watches), 0);
    let explained = || {
        let output = up.braid(&["explain", "curl", "203.0.113.10:80"]);
        text(&output.stdout) + &text(&output.stderr)
    };
    assert!(explained().contains("an IPsec policy covers 0.0.0.0/0"), "{}", explained());
    // The policy is removed, and added again while the daemon runs.
    client(&lab, "ip xfrm policy flush");
    client(&lab, "ip rule del priority 220");
    eventually("flows use links again", || {
        try_all(&lab, 10..11);
        sum(&lab, &watches) > 0 && !explained().contains("IPsec")
    });
    client(&lab, "ip rule add priority 220 table 220");
    client(&lab, "ip xfrm policy add dir out src 10.200.0.2/32 dst 0.0.0.0/0 tmpl src 10.200.0.2 dst 203.0.113.30 proto esp mode tunnel");
    eventually("the daemon has heard of it", || explained().contains("an IPsec policy covers"));
    let before = sum(&lab, &watches);
    try_all(&lab, 15..20);
    assert_eq!(sum(&lab, &watches), before);
}
