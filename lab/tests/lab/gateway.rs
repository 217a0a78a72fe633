//! Devices of a LAN behind the host with the daemon: `[gateway]` alone makes it forward, and new flows get links by policy.
//!
//! No test sets a sysctl or a rule of nftables. Times are printed; the bounds are wide, so that they hold on a busy machine.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::gateway::*;
use crate::support::*;
use braid_lab::{Builder, Filter, Lab, LinkSpec, Responder, Watch, Web, mbps, ms};
use braid_model::{ByteCount, Direction, Protocol};
use serde_json::Value;

const GATEWAY: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n[gateway]\nlan = [\"lan0\"]\n";

/// A lab of two links without limits, to be started.
fn two() -> Builder {
    Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0"))
}

/// Starts the daemon, and waits until a device's datagrams are answered.
#[track_caller]
fn start<'a>(lab: &'a Lab, mirror: &Mirror, config: &str) -> Up<'a> {
    let up = Up::start(lab, config);
    eventually("devices are forwarded", || asked(lab, 0, mirror.at(10)).is_ok() && asked(lab, 0, mirror.at6(10)).is_ok());
    up
}

/// Tries to reach this host from a device: TCP, UDP and echo, both families; no answer is needed.
fn try_all(lab: &Lab, device: usize, host: u8) {
    let work = || {
        for to in [remote(host, 7000), remote6(host, 7000)] {
            for _ in 0..4 {
                let _ = local_of(to);
                let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() };
                let _ = UdpSocket::bind((any, 0)).unwrap().send_to(b"x", to);
            }
        }
    };
    lab.device(device).run(work).unwrap();
    for address in [Lab::internet(host).to_string(), Lab::internet6(host).to_string()] {
        let _ = on(lab, device, &format!("ping -c 2 -i 0.1 -W 1 {address}")).output().unwrap();
    }
}

/// Counters of the packets to this host, in both families, for each link.
fn watch_host(lab: &Lab, host: u8) -> [Vec<Watch>; 2] {
    [watch_all(lab, Filter::to(Lab::internet(host))), watch_all(lab, Filter::to(Lab::internet6(host)))]
}

fn seen(lab: &Lab, watches: &[Vec<Watch>; 2]) -> Vec<u64> {
    packets(lab, &watches[0]).iter().zip(packets(lab, &watches[1])).map(|(four, six)| four + six).collect()
}

/// Packets to this host that entered each link while `work` ran and 200 ms longer, in which retries show.
fn captured(lab: &Lab, host: u8, work: impl FnOnce()) -> Vec<u64> {
    let watches = watch_host(lab, host);
    work();
    thread::sleep(ms(200));
    seen(lab, &watches)
}

/// Counters of packets that leave with an address of the LAN, which no router on the Internet would answer.
fn untranslated(lab: &Lab, devices: usize) -> Vec<Watch> {
    let addresses = (0..devices).flat_map(|n| [IpAddr::from(Lab::device_address(n)), Lab::device_address6(n).into()]);
    addresses
        .flat_map(|source| watch_all(lab, Filter { source: Some(source), direction: Some(Direction::Up), ..Filter::default() }))
        .collect()
}

#[track_caller]
fn assert_translated(lab: &Lab, watches: &[Watch]) {
    assert_eq!(packets(lab, watches).iter().sum::<u64>(), 0, "packets with an address of the LAN left");
}

/// The links that `count` new TCP connections of a device get, which must all succeed.
#[track_caller]
fn links_of(lab: &Lab, device: usize, to: SocketAddr, count: usize) -> Vec<usize> {
    (0..count).map(|_| connected(lab, device, to).unwrap_or_else(|error| panic!("{to}: {error}"))).collect()
}

#[test]
fn a_lan_alone_makes_devices_reach_the_internet_over_every_link() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    web.file(ByteCount::new(1_000_000)).unwrap();
    let mirror = Mirror::start(&lab);
    let untranslated = untranslated(&lab, 2);
    let _up = start(&lab, &mirror, GATEWAY);
    for device in 0..2 {
        for host in [Lab::internet(10).to_string(), Lab::internet6(10).to_string()] {
            assert_eq!(downloaded(curl(&lab, device, &url(&host, "1000000.bin"))), 1_000_000, "{host}");
            assert!(pings(&lab, device, &host), "{host}");
        }
        assert_eq!(downloaded(curl(&lab, device, "http://n11.lab/1000000.bin")), 1_000_000, "by name");
        for to in [remote(11, 7), remote6(11, 7)] {
            echoed(&lab, device, to, 1000).unwrap();
        }
        assert!(pings(&lab, device, "192.168.7.1") && pings(&lab, device, "fd07::1"), "the gateway itself");
        assert!(pings(&lab, device, &Lab::device_address(1 - device).to_string()), "another device");
        for to in [mirror.at(12), mirror.at6(12)] {
            let links = links_of(&lab, device, to, 8);
            assert!(links.contains(&0) && links.contains(&1), "{to}: {links:?}");
            let links: Vec<_> = (0..8).filter_map(|_| asked(&lab, device, to).ok()).collect();
            assert!(links.len() == 8 && links.contains(&0) && links.contains(&1), "UDP {to}: {links:?}");
        }
    }
    // The host's own flows are steered as before.
    let own = chosen_many(&lab, remote(13, 7000), 8);
    assert!(own.contains(&0) && own.contains(&1), "{own:?}");
    assert_translated(&lab, &untranslated);
}

#[test]
fn nine_devices_share_two_links_in_proportion() {
    if !able() {
        return;
    }
    let links = [("wlan0", 20), ("lte0", 10)].map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(10)));
    let lab = links.into_iter().fold(Lab::builder(), Builder::link).lan(9).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(2_000_000)).unwrap();
    let mirror = Mirror::start(&lab);
    let known = "scheduler = \"max-throughput\"\n[gateway]\nlan = [\"lan0\"]\n\
                 [[link]]\nname = \"wlan0\"\ncapacity_down = \"20 Mbit/s\"\ncapacity_up = \"20 Mbit/s\"\n\
                 [[link]]\nname = \"lte0\"\ncapacity_down = \"10 Mbit/s\"\ncapacity_up = \"10 Mbit/s\"\n";
    let _up = start(&lab, &mirror, known);
    let counted = || [0, 1].map(|link| lab.counters(link).unwrap().down.delivered_bytes.get());
    let before = counted();
    let begin = Instant::now();
    let downloads: Vec<_> = (0..9).map(|device| curl(&lab, device, &url("203.0.113.10", "2000000.bin"))).collect();
    for download in downloads {
        assert_eq!(downloaded(download), 2_000_000);
    }
    let took = begin.elapsed();
    let [wlan, lte] = [0, 1].map(|link| (counted()[link] - before[link]) as f64);
    let share = wlan / (wlan + lte);
    println!("nine downloads took {took:?}; wlan0 carried {:.0} % of the bytes; the sum of the links needs 5 s", share * 100.0);
    assert!((0.5..0.85).contains(&share), "wlan0 carried {share:.2} of the bytes");
    assert!(took < Duration::from_secs(12), "{took:?}: wlan0 alone needs 7.5 s, and lte0 alone 15 s");
}

/// Keeps a TCP connection of a device to this server, and begins writing to it.
fn keep(lab: &Lab, device: usize, to: SocketAddr) -> TcpStream {
    let stream = lab.device(device).run(|| TcpStream::connect_timeout(&to, LIMIT)).unwrap().unwrap();
    stream.set_nonblocking(true).unwrap();
    stream
}

#[test]
fn a_client_rule_holds_for_every_packet_dead_or_alive() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(1000)).unwrap();
    let mirror = Mirror::start(&lab);
    let rules = "[[app]]\nmatch = { client = \"192.168.7.20\" }\nlinks = [\"wlan0\"]\n\
                 [[app]]\nmatch = { client = \"fd07::20\" }\nlinks = [\"wlan0\"]\n";
    let untranslated = untranslated(&lab, 2);
    let up = start(&lab, &mirror, &format!("{GATEWAY}{rules}"));
    let pinned = captured(&lab, 11, || try_all(&lab, 0, 11));
    assert!(pinned[0] >= 16 && pinned[1] == 0, "{pinned:?}");
    let free = captured(&lab, 12, || try_all(&lab, 1, 12));
    assert!(free.iter().all(|count| *count > 0), "{free:?}");

    // A connection that waits for its server is in mid-flow when its link dies, and retransmits.
    let mut kept = [remote(11, 80), remote6(11, 80)].map(|to| keep(&lab, 0, to));
    lab.dark(0).unwrap();
    let pinned = captured(&lab, 11, || {
        for stream in &mut kept {
            stream.write_all(b"GET /1000.bin HTTP/1.0\r\n").unwrap();
        }
        up.wait_state("wlan0", "dead");
        try_all(&lab, 0, 11);
    });
    assert_eq!(pinned[1], 0, "a strict rule without a living link: {pinned:?}");
    assert_eq!(links_of(&lab, 1, mirror.at(12), 4), [1; 4], "other devices use the other link");
    lab.carrier(0, false).unwrap();
    up.wait_state("wlan0", "down");
    let pinned = captured(&lab, 11, || try_all(&lab, 0, 11));
    assert_eq!(pinned, [0, 0], "without carrier");
    assert_eq!(links_of(&lab, 1, mirror.at(12), 4), [1; 4]);

    lab.carrier(0, true).unwrap();
    lab.bright(0).unwrap();
    up.wait_state("wlan0", "up");
    // On a busy machine the link may be judged dead for another moment.
    eventually("the device reaches the server again", || {
        let pinned = captured(&lab, 11, || try_all(&lab, 0, 11));
        assert_eq!(pinned[1], 0, "{pinned:?}");
        pinned[0] >= 16
    });
    assert_translated(&lab, &untranslated);
}

/// Processes that this one started.
fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

fn runs(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn a_strict_client_rule_holds_when_the_daemon_is_killed() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    // Not the system's own choice, which is wlan0.
    let rules = "[[app]]\nmatch = { client = \"192.168.7.20\" }\nlinks = [\"lte0\"]\n\
                 [[app]]\nmatch = { client = \"fd07::20\" }\nlinks = [\"lte0\"]\n";
    let untranslated = untranslated(&lab, 1);
    let mut up = start(&lab, &mirror, &format!("{GATEWAY}{rules}"));
    let helpers = children(up.pid());
    let pinned = captured(&lab, 11, || {
        try_all(&lab, 0, 11);
        up.signal("KILL");
        up.wait_end();
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(4) || helpers.iter().any(|pid| runs(*pid)) {
            assert!(begin.elapsed() < LIMIT, "the watchdog still runs");
            try_all(&lab, 0, 11);
        }
        try_all(&lab, 0, 11);
    });
    assert!(pinned[0] == 0 && pinned[1] >= 16, "{pinned:?}");
    let pinned = captured(&lab, 11, || {
        assert!(up.braid(&["down"]).status.success());
        try_all(&lab, 0, 11);
    });
    assert_eq!(pinned[0], 0, "after braid down: {pinned:?}");
    assert_translated(&lab, &untranslated);
}

#[test]
fn rules_by_destination_and_port_apply_to_devices() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let (mirror, other) = (Mirror::start(&lab), Mirror::start_at(&lab, 7001));
    let rules = "[[app]]\nmatch = { destination = \"203.0.113.12\", port = 7000 }\nlinks = [\"lte0\"]\n\
                 [[app]]\nmatch = { destination = \"2001:db8:113::12\" }\nlinks = [\"lte0\"]\n\
                 [[app]]\nmatch = { client = \"192.168.7.21\", port = 7001 }\nlinks = [\"wlan0\"]\n";
    let _up = start(&lab, &mirror, &format!("{GATEWAY}{rules}"));
    for device in 0..2 {
        assert_eq!(links_of(&lab, device, mirror.at(12), 6), [1; 6]);
        assert_eq!(links_of(&lab, device, mirror.at6(12), 6), [1; 6]);
        assert_eq!((0..6).map(|_| asked(&lab, device, mirror.at(12)).unwrap()).collect::<Vec<_>>(), [1; 6]);
        let free = links_of(&lab, device, mirror.at(13), 6);
        assert!(free.contains(&0) && free.contains(&1), "another destination: {free:?}");
    }
    let free = links_of(&lab, 0, other.at(12), 6);
    assert!(free.contains(&0) && free.contains(&1), "another port of the destination, another device: {free:?}");
    assert_eq!(links_of(&lab, 1, other.at(12), 6), [0; 6]);
}

#[test]
fn a_rule_by_mac_address_applies_to_both_families() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    let rules = format!("[[app]]\nmatch = {{ client = \"{}\" }}\nlinks = [\"lte0\"]\n", Lab::device_mac(0));
    let up = start(&lab, &mirror, &format!("{GATEWAY}{rules}"));
    let pinned = captured(&lab, 11, || try_all(&lab, 0, 11));
    assert!(pinned[0] == 0 && pinned[1] >= 16, "{pinned:?}");
    let free = captured(&lab, 12, || try_all(&lab, 1, 12));
    assert!(free.iter().all(|count| *count > 0), "{free:?}");
    // The device gets other addresses, as by DHCP: it is still the same device.
    device(&lab, 0, "ip address delete 192.168.7.20/24 dev eth0");
    device(&lab, 0, "ip address replace 192.168.7.120/24 dev eth0");
    device(&lab, 0, "ip route replace default via 192.168.7.1 dev eth0");
    device(&lab, 0, "ip address replace fd07::120/64 dev eth0 nodad");
    device(&lab, 0, "ip address delete fd07::20/64 dev eth0");
    let pinned = captured(&lab, 11, || try_all(&lab, 0, 11));
    assert!(pinned[0] == 0 && pinned[1] > 0, "from the first packet of a new address: {pinned:?}");
    lab.dark(1).unwrap();
    up.wait_state("lte0", "dead");
    let pinned = captured(&lab, 11, || try_all(&lab, 0, 11));
    assert_eq!(pinned[0], 0, "{pinned:?}");
}

#[test]
fn new_connections_of_devices_leave_a_dark_link() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, GATEWAY);
    for to in [mirror.at(11), mirror.at6(11)] {
        let links = links_of(&lab, 0, to, 6);
        assert!(links.contains(&0), "{links:?}");
        lab.dark(0).unwrap();
        let begin = Instant::now();
        let noticed = up.wait_state("wlan0", "dead");
        // Ten in a row, none of which takes more than `TRY`.
        let mut row = 0;
        let took = within(Duration::from_secs(20), "new connections use the other link", || {
            row = if connected(&lab, 0, to).is_ok_and(|link| link == 1) { row + 1 } else { 0 };
            row == 10
        });
        println!("{to}: noticed after {noticed:?}; {took:?} later ten new connections had succeeded ({:?} after the cut)", begin.elapsed());
        assert!(took < Duration::from_secs(5), "{took:?}");
        lab.bright(0).unwrap();
        up.wait_state("wlan0", "up");
        eventually("it is used again", || links_of(&lab, 0, to, 4).contains(&0));
    }
}

#[test]
fn a_call_of_a_device_continues_over_the_other_link() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, GATEWAY);
    // Two for each family: the call may be on either link.
    for to in [remote(11, 7), remote6(11, 7)] {
        for link in [0, 1] {
            let watches = watch_all(&lab, Filter::to(to.ip()).port(Protocol::Udp, 7));
            let (gap, answered) = call(&lab, 0, to, Duration::from_secs(8), || lab.dark(link).unwrap());
            println!("{to}, {} cut: {gap:?} of silence, packets by link {:?}", NAMES[link], packets(&lab, &watches));
            assert!(gap < Duration::from_secs(5) && answered > 0.8, "{to}: {gap:?} of silence, {answered} of the last second answered");
            lab.bright(link).unwrap();
            up.wait_state(NAMES[link], "up");
        }
    }
}

#[test]
fn forwarding_continues_after_a_kill_and_the_sweep_leaves_nothing() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let before = traces(&lab);
    for ends in ["down", "up"] {
        let mut up = start(&lab, &mirror, GATEWAY);
        assert_ne!(traces(&lab), before);
        let untranslated = untranslated(&lab, 1);
        up.signal("KILL");
        up.wait_end();
        for to in [mirror.at(11), mirror.at6(11)] {
            let took = within(Duration::from_secs(10), "new connections use the system's link", || {
                (0..4).all(|_| connected(&lab, 0, to).is_ok_and(|link| link == 0))
            });
            println!("killed: {to} by the system's default link after {took:?}");
            assert!(took < Duration::from_secs(4), "{took:?}");
        }
        assert_translated(&lab, &untranslated);
        if ends == "down" {
            let output = up.braid(&["down"]);
            assert!(output.status.success(), "{}", text(&output.stderr));
        } else {
            drop(start(&lab, &mirror, GATEWAY));
        }
        eventually("nothing is left", || traces(&lab) == before);
    }
}

#[test]
fn a_regular_end_restores_the_settings_that_it_found() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let clean = traces(&lab);
    {
        let mut up = start(&lab, &mirror, GATEWAY);
        assert!(up.braid(&["down"]).status.success());
        up.wait_end();
        assert_eq!(traces(&lab), clean);
    }
    // Another program forwards already, and has tables of its own.
    lab.client().sysctl("ipv4/ip_forward", "1").unwrap();
    client(&lab, "nft add table inet other");
    client(&lab, "nft add chain inet other kept");
    let before = traces(&lab);
    let mut up = start(&lab, &mirror, GATEWAY);
    up.signal("TERM");
    up.wait_end();
    assert_eq!(traces(&lab), before);
}

#[test]
fn a_reload_without_the_gateway_ends_it() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, GATEWAY);
    let before = settings(&lab);
    up.configure("scheduler = \"round-robin\"\nprobe = \"continuous\"\n");
    assert!(up.braid(&["reload"]).status.success());
    eventually("devices are not forwarded", || connected(&lab, 0, mirror.at(11)).is_err());
    assert_ne!(settings(&lab), before);
    up.configure(GATEWAY);
    assert!(up.braid(&["reload"]).status.success());
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(11)).is_ok() && connected(&lab, 0, mirror.at6(11)).is_ok());
}

#[test]
fn while_the_daemon_is_stopped_new_flows_take_the_systems_way() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, GATEWAY);
    let untranslated = untranslated(&lab, 1);
    up.signal("STOP");
    for to in [mirror.at(11), mirror.at6(11)] {
        let took = eventually("new flows use the system's link", || (0..6).all(|_| connected(&lab, 0, to).is_ok_and(|link| link == 0)));
        println!("stopped: {to} by the system's default link after {took:?}");
        assert!(took < Duration::from_secs(8), "{took:?}");
    }
    assert_translated(&lab, &untranslated);
    up.signal("CONT");
    eventually("flows get links again", || connected(&lab, 0, mirror.at(11)).is_ok_and(|link| link == 1));
}

#[test]
fn packets_with_foreign_sources_never_leave() {
    if !able() {
        return;
    }
    // Without the kernel's own filter, which knows only IPv4.
    let lab = two().lan(1).rp_filter(0).start().unwrap();
    let mirror = Mirror::start(&lab);
    let _up = start(&lab, &mirror, GATEWAY);
    // Addresses of the Internet, of the links' networks, and of the host itself.
    let foreign = [
        "198.51.100.7",
        "10.77.0.9",
        "10.77.1.9",
        "10.77.1.2",
        "192.168.8.20",
        "2001:db8:dead::7",
        "fd77:0:0:1::9",
        "fd77:0:0:1::2",
        "fd08::20",
    ];
    let send = |source: &str, host: u8| {
        let source: IpAddr = source.parse().unwrap();
        let to = if source.is_ipv4() { remote(host, 7000) } else { remote6(host, 7000) };
        let work = || {
            let socket = UdpSocket::bind((source, 0)).unwrap();
            for _ in 0..5 {
                let _ = socket.send_to(b"x", to);
            }
            let domain = socket2::Domain::for_address(to);
            let stream = socket2::Socket::new(domain, socket2::Type::STREAM, None).unwrap();
            stream.bind(&SocketAddr::new(source, 0).into()).unwrap();
            stream.set_nonblocking(true).unwrap();
            let _ = stream.connect(&to.into());
        };
        lab.device(0).run(work).unwrap();
    };
    let own = captured(&lab, 11, || ["192.168.7.20", "fd07::20"].iter().for_each(|source| send(source, 11)));
    assert!(own.iter().sum::<u64>() >= 12, "its own addresses: {own:?}");
    for source in foreign {
        let length = if source.contains(':') { "128 nodad" } else { "32" };
        device(&lab, 0, &format!("ip address add {source}/{length} dev lo"));
    }
    let spoofed = captured(&lab, 12, || foreign.iter().for_each(|source| send(source, 12)));
    assert_eq!(spoofed, [0, 0]);
}

#[test]
fn large_transfers_work_over_a_link_with_a_small_mtu() {
    if !able() {
        return;
    }
    let small = LinkSpec::new("wlan0").mtu(1280).rate(mbps(100)).delay(ms(5));
    let lab =
        Lab::builder().link(small).link(LinkSpec::new("lte0").mtu(1280).rate(mbps(100)).delay(ms(5))).lan(1).far(1500).start().unwrap();
    let mirror = Mirror::start(&lab);
    let _up = start(&lab, &mirror, GATEWAY);
    for host in FAR {
        large_transfers(&lab, 0, host);
    }
}

#[test]
fn large_transfers_work_over_a_small_path_mtu_behind_the_link() {
    if !able() {
        return;
    }
    let links = ["wlan0", "lte0"].map(|name| LinkSpec::new(name).rate(mbps(100)).delay(ms(5)));
    let lab = links.into_iter().fold(Lab::builder(), Builder::link).lan(1).far(1280).start().unwrap();
    let mirror = Mirror::start(&lab);
    let _up = start(&lab, &mirror, GATEWAY);
    for host in FAR {
        large_transfers(&lab, 0, host);
        let route = device(&lab, 0, &format!("ip route get {host}"));
        assert!(route.contains("mtu 1280"), "the device got the report: {route}");
    }
}

#[test]
fn fragments_pass_both_ways() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let mirror = Mirror::start(&lab);
    let _up = start(&lab, &mirror, GATEWAY);
    let watches = [watch_host(&lab, 11), watch_host(&lab, 12)];
    for device in 0..2 {
        for _ in 0..4 {
            for to in [remote(11, 7), remote6(11, 7), remote(12, 7), remote6(12, 7)] {
                echoed(&lab, device, to, 8000).unwrap();
            }
        }
    }
    let counts = watches.map(|watch| seen(&lab, &watch));
    // Each datagram takes six fragments, all by one link.
    assert!(counts.iter().flatten().all(|count| *count > 0 && count % 6 == 0), "{counts:?}");
}

#[test]
fn a_lan_device_that_vanishes_works_again_when_it_is_back() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, GATEWAY);
    for _ in 0..2 {
        lab.unplug_lan().unwrap();
        assert!(connected(&lab, 0, mirror.at(11)).is_err());
        // The daemon goes on, also for the host itself.
        assert!(up.status().is_some() && chosen(&lab, remote(13, 7000)).is_ok());
        lab.plug_lan().unwrap();
        for to in [mirror.at(11), mirror.at6(11)] {
            let took = eventually("devices are forwarded by policy", || {
                let links: Vec<_> = (0..4).filter_map(|_| connected(&lab, 0, to).ok()).collect();
                links.contains(&0) && links.contains(&1)
            });
            println!("plugged in: {to} by policy after {took:?}");
        }
        assert!(pings(&lab, 1, "203.0.113.11"));
    }
}

#[test]
fn the_daemon_starts_before_its_lan_device_exists() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    lab.unplug_lan().unwrap();
    let _up = Up::start(&lab, GATEWAY);
    lab.plug_lan().unwrap();
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(11)).is_ok() && connected(&lab, 0, mirror.at6(11)).is_ok());
}

/// Two devices behind two links of 20 Mbit/s, and a server with a file for downloads that do not end during a test.
fn limited() -> (Lab, Web) {
    let links = ["wlan0", "lte0"].map(|name| LinkSpec::new(name).rate(mbps(20)).delay(ms(5)));
    let lab = links.into_iter().fold(Lab::builder(), Builder::link).lan(2).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(1_000_000_000)).unwrap();
    (lab, web)
}

/// Stops downloads.
fn stop(downloads: &mut [Child]) {
    for download in downloads {
        download.kill().unwrap();
        download.wait().unwrap();
    }
}

/// Flows of this client, by `braid flows --json`.
fn flows_of(up: &Up<'_>, client: &str) -> Vec<Value> {
    up.flows().into_iter().filter(|flow| flow["client"] == client).collect()
}

#[test]
fn flows_of_devices_are_listed_with_their_client_and_bytes() {
    if !able() {
        return;
    }
    let (lab, _web) = limited();
    let _responder = Responder::start(&lab).unwrap();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, GATEWAY);
    let mut downloads =
        [("203.0.113.10", 0), ("2001:db8:113::10", 1)].map(|(host, number)| curl(&lab, number, &url(host, "1000000000.bin")));
    for (client, remote) in [("192.168.7.20", "203.0.113.10:80"), ("fd07::21", "[2001:db8:113::10]:80")] {
        let mut flow = Value::Null;
        eventually("the download is listed and counted", || {
            flow = flows_of(&up, client).into_iter().find(|flow| flow["remote"] == remote).unwrap_or_default();
            flow["rx_bytes"].as_u64() > Some(2_000_000)
        });
        assert_eq!((&flow["protocol"], &flow["carry"]), (&"tcp".into(), &"direct".into()), "{flow}");
        assert!(
            NAMES.iter().any(|name| flow["link"] == *name) && flow["local"].as_str().is_some_and(|local| local.contains(client)),
            "{flow}"
        );
        let before = flow["rx_bytes"].as_u64();
        eventually("it grows", || flows_of(&up, client).iter().any(|flow| flow["remote"] == remote && flow["rx_bytes"].as_u64() > before));
    }
    let sent = lab.device(0).run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect(remote(11, 7)).unwrap();
        for _ in 0..50 {
            socket.send(&[0; 1000]).unwrap();
        }
        socket
    });
    eventually("the UDP exchange is listed and counted", || {
        sent.as_ref().unwrap().send(&[0; 1000]).unwrap();
        flows_of(&up, "192.168.7.20").iter().any(|flow| flow["protocol"] == "udp" && flow["tx_bytes"].as_u64() > Some(50_000))
    });
    stop(&mut downloads);
    eventually("ended flows are gone", || !up.flows().iter().any(|flow| flow["client"] != Value::Null && flow["protocol"] == "tcp"));
}

#[test]
fn clients_are_listed_with_address_mac_rate_and_flows() {
    if !able() {
        return;
    }
    let (lab, _web) = limited();
    let mirror = Mirror::start(&lab);
    let up = start(&lab, &mirror, GATEWAY);
    let mut downloads: Vec<_> = (0..2).map(|_| curl(&lab, 1, &url("203.0.113.10", "1000000000.bin"))).collect();
    let mut found = Value::Null;
    let rate = |client: &Value| client["rate"].as_f64().unwrap_or(0.0);
    eventually("the device's rate is known", || {
        found = clients(&up).into_iter().find(|client| client["address"] == "192.168.7.21").unwrap_or_default();
        rate(&found) > 5e6 && found["flows"].as_u64() == Some(2)
    });
    assert_eq!(found["mac"], Lab::device_mac(1).as_str(), "{found}");
    assert!(found.as_object().unwrap().contains_key("name"), "{found}");
    assert!(rate(&found) < 45e6, "{found}");
    stop(&mut downloads);
    eventually("its rate falls", || {
        clients(&up).iter().find(|client| client["address"] == "192.168.7.21").is_none_or(|client| rate(client) < 1e6)
    });
}

/// A container's sockets are sockets of this machine, so they show their control group.
#[test]
fn rules_by_control_group_apply_to_containers() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let (group, container) = (Group::new(), Container::start(&lab));
    let config = GATEWAY.replace("\"lan0\"", "\"lan0\", \"br9\"");
    let rule = format!("[[app]]\nmatch = {{ cgroup = \"{}\" }}\nlinks = [\"lte0\"]\n", group.path);
    let _up = start(&lab, &mirror, &format!("{config}{rule}"));
    for host in [IpAddr::from(Lab::internet(12)), Lab::internet6(12).into()] {
        let server = SocketAddr::from((host, 7000));
        for program in [format!("ping -c 3 -i 0.1 -W 1 {host}"), format!("curl -sS --http0.9 --max-time 5 http://{server}/")] {
            let inside = captured(&lab, 12, || {
                for _ in 0..2 {
                    // The server does not read the request, so curl may report a reset.
                    group.inside(&lab, container.id(), &program).output().unwrap();
                }
            });
            assert!(inside[0] == 0 && inside[1] >= 6, "{program}: {inside:?}");
        }
    }
    let outside = captured(&lab, 13, || {
        for _ in 0..6 {
            assert!(container.command(&lab, &format!("ping -c 1 -W 1 {}", Lab::internet(13))).output().unwrap().status.success());
        }
    });
    assert!(outside[0] > 0, "its other programs use every link: {outside:?}");
}
