//! Bad days of a gateway: what others do to its rules, its links and its LAN.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::bonded::{Relay, good_paths};
use crate::support::gateway::*;
use crate::support::*;
use braid_lab::{Builder, Filter, Lab, LinkSpec, Namespace, Responder, Watch, Web, mbps, ms};
use braid_model::{ByteCount, Direction};
use braid_platform::linux::sys::tun;
use socket2::{Domain, Socket, Type};

const GATEWAY: &str = "scheduler = \"round-robin\"\nprobe = \"continuous\"\n[gateway]\nlan = [\"lan0\"]\n";
const VIRTUAL: &str = "[virtual]\naddress = [\"10.9.0.1\", \"fd09::1\"]\n";
const REMOVED: &str = "were removed, by another program";

/// A lab of two links without limits, to be started.
fn two() -> Builder {
    Lab::builder().link(LinkSpec::new("wlan0")).link(LinkSpec::new("lte0"))
}

/// The same, with links of 20 Mbit/s.
fn limited() -> Builder {
    let links = ["wlan0", "lte0"].map(|name| LinkSpec::new(name).rate(mbps(20)).delay(ms(5)));
    links.into_iter().fold(Lab::builder(), Builder::link)
}

/// What Braid has set in the kernel, without counters.
fn set(lab: &Lab) -> String {
    let list = |table: &str| {
        let output = lab.client().command("nft").unwrap().args(["-s", "list", "table", "inet", table]).output().unwrap();
        text(&output.stdout)
    };
    let tables = ["braid_gateway", "braid_gateway_restore"].map(list).concat();
    let addresses = lab.client().command("ip").unwrap().args("-brief address show dev braid0".split(' ')).output().unwrap();
    let addresses = text(&addresses.stdout);
    // Routes of the kernel's own may be reported in another order.
    let mut lines: Vec<String> =
        routing(lab).lines().filter(|line| line.contains("proto 177") || line.contains("proto 178")).map(str::to_owned).collect();
    let rules = ["ip rule", "ip -6 rule"].map(|command| client(lab, command));
    lines.extend(rules.iter().flat_map(|rules| rules.lines()).map(str::to_owned));
    lines.sort();
    format!("{tables}\n{}\n{}", addresses.split_whitespace().collect::<Vec<_>>().join(" "), lines.join("\n"))
}

#[test]
fn what_somebody_removes_is_set_again() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let before = traces(&lab);
    let rules = "[[app]]\nmatch = { client = \"192.168.7.20\", port = 7000 }\nlinks = [\"lte0\"]\n";
    let mut up = Up::start(&lab, &format!("{GATEWAY}{VIRTUAL}{rules}"));
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok_and(|link| link == 1));
    let wanted = set(&lab);
    assert!(wanted.contains("braid_gateway_restore") && wanted.contains("10.9.0.1"), "{wanted}");
    // An administrator who removes everything adds the system's own rules again.
    let removals = [
        "nft flush ruleset",
        "nft delete table inet braid_gateway",
        "nft flush chain inet braid_gateway postrouting",
        "ip rule flush; ip rule add lookup main priority 32766; ip rule add lookup default priority 32767",
        "ip -6 rule flush; ip -6 rule add lookup main priority 32766",
        "ip route flush table 47000; ip -6 route flush table 47001",
        "ip link delete braid0",
    ];
    for removal in removals {
        // What was just set is set again a little later.
        thread::sleep(ms(1100));
        assert!(lab.client().command("sh").unwrap().args(["-c", removal]).status().unwrap().success(), "{removal}");
        let took = within(Duration::from_secs(20), &format!("it is set again after {removal}"), || set(&lab) == wanted);
        println!("{removal}: set again after {took:?}");
        eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok_and(|link| link == 1));
    }
    let lines = up.log().matches(REMOVED).count();
    assert!((removals.len()..=removals.len() + 3).contains(&lines), "{lines} lines in the log");
    // The former values of the settings are not lost.
    up.signal("TERM");
    up.wait_end();
    assert_eq!(traces(&lab), before);
}

/// A shell command in the client that runs until it is dropped.
struct Loop(Child);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_program_that_always_removes_the_rules_is_not_fought_and_said() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = Up::start(&lab, GATEWAY);
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok());
    let wanted = client(&lab, "nft -s list table inet braid_gateway");
    let warned = |what: &str| up.status().unwrap()["warnings"].to_string().contains(&format!("another program has removed Braid's {what}"));
    assert!(!warned("firewall rules") && !warned("routing rules"));
    let script = "while sleep 0.02; do nft delete table inet braid_gateway; ip route flush table 47000; done 2>/dev/null";
    let mut shell = lab.client().command("sh").unwrap();
    let fight = Loop(shell.args(["-c", script]).stdin(Stdio::null()).spawn().unwrap());
    let took = eventually("the fight is said", || warned("firewall rules") && warned("routing rules"));
    let lines = up.log().matches(REMOVED).count();
    println!("said after {took:?}; {lines} lines in the log");
    assert!(lines <= 2 * (4 + took.as_secs() as usize), "{lines} lines in {took:?}");
    drop(fight);
    let took = eventually("it is set again", || {
        let output = lab.client().command("nft").unwrap().args("-s list table inet braid_gateway".split(' ')).output().unwrap();
        text(&output.stdout) == wanted && !client(&lab, "ip route show table 47000").is_empty()
    });
    println!("set again {took:?} after the end of the fight");
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok());
}

/// Carries the IP packets of a device without Ethernet headers in one namespace to one in another, until it is dropped.
struct RawWire {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl RawWire {
    fn start(one: (&Namespace, &str), other: (&Namespace, &str)) -> Self {
        let open = |(namespace, name): (&Namespace, &str)| {
            let file = namespace.run(|| tun::open(name, tun::Kind::Packets)).unwrap().unwrap();
            assert!(namespace.command("ip").unwrap().args(["link", "set", name, "up"]).status().unwrap().success());
            file
        };
        let (one, other) = (open(one), open(other));
        let stop = Arc::new(AtomicBool::new(false));
        let carry = |mut from: File, mut to: File| {
            let stop = stop.clone();
            thread::spawn(move || {
                let mut packet = vec![0; 65_536];
                while !stop.load(Ordering::Relaxed) {
                    match from.read(&mut packet) {
                        Ok(length) => drop(to.write(&packet[..length])),
                        Err(_) => thread::sleep(Duration::from_micros(200)),
                    }
                }
            })
        };
        let threads = vec![carry(one.try_clone().unwrap(), other.try_clone().unwrap()), carry(other, one)];
        Self { stop, threads }
    }
}

impl Drop for RawWire {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

/// Makes a LAN without Ethernet headers whose only device is the second one. Where such a header has the type, this device's packets have bytes of their source
/// address, which are the same here: 8.0 and 86dd.
fn raw_lan(lab: &Lab) -> RawWire {
    let wire = RawWire::start((lab.client(), "raw0"), (lab.device(1), "raw0"));
    client(lab, "ip address add 8.0.9.1/24 dev raw0");
    client(lab, "ip address add fd08:0:86dd::1/64 dev raw0 nodad");
    for line in [
        "ip address add 8.0.9.20/24 dev raw0",
        "ip address add fd08:0:86dd::20/64 dev raw0 nodad",
        "ip route delete default",
        "ip -6 route delete default",
        "ip route add default dev raw0",
        "ip route add ::/0 dev raw0",
    ] {
        device(lab, 1, line);
    }
    wire
}

#[test]
fn flows_of_a_lan_without_ethernet_headers_are_bonded_and_limited() {
    if !able() {
        return;
    }
    let lab = limited().lan(2).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(1_000_000)).unwrap();
    web.file(ByteCount::new(3_000_000)).unwrap();
    let _lan = raw_lan(&lab);
    let relay = Relay::start_told(&lab, &["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"]);
    let rule = "[[app]]\nmatch = { client = \"8.0.9.20\", destination = \"203.0.113.13\" }\ncarry = \"direct\"\nrate = \"2 Mbit/s\"\n";
    let _up = relay.join(&format!("carry = \"bond\"\n{}{rule}", GATEWAY.replace("\"lan0\"", "\"raw0\"")));
    let direct = [Lab::internet(11).into(), IpAddr::from(Lab::internet6(11))].map(|host| watch_all(&lab, Filter::to(host)));
    for host in ["203.0.113.11", "2001:db8:113::11"] {
        eventually("datagrams are bonded", || echoed(&lab, 1, SocketAddr::new(host.parse().unwrap(), 7), 1000).is_ok());
        assert_eq!(downloaded(curl(&lab, 1, &url(host, "1000000.bin"))), 1_000_000);
    }
    // The first packets may have been sent before the switch knew the device.
    let before = direct.each_ref().map(|watches| packets(&lab, watches));
    assert_eq!(downloaded(curl(&lab, 1, &url("203.0.113.11", "1000000.bin"))), 1_000_000);
    assert_eq!(direct.each_ref().map(|watches| packets(&lab, watches)), before, "nothing goes direct");
    let begin = Instant::now();
    assert_eq!(downloaded(curl(&lab, 1, &url("203.0.113.13", "3000000.bin"))), 3_000_000);
    println!("24 Mbit at 2 Mbit/s took {:?}", begin.elapsed());
    // The limit begins after a moment.
    assert!(begin.elapsed() > Duration::from_secs(4), "{:?}: it takes 1.2 s without a limit", begin.elapsed());
}

#[test]
fn devices_and_links_without_ethernet_headers_mix_with_others() {
    if !able() {
        return;
    }
    let lab = two().lan(2).far(1500).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let mirror = Mirror::start(&lab);
    // A third link, as a modem or PPP makes it.
    let _link = RawWire::start((lab.client(), "eth0"), (lab.server(), "l2"));
    let _lan = raw_lan(&lab);
    for line in [
        "ip address add 10.77.2.2/32 dev eth0",
        "ip address add fd77:0:0:2::2/64 dev eth0 nodad",
        "ip route add default dev eth0 metric 102",
        "ip route add ::/0 dev eth0 metric 102",
    ] {
        client(&lab, line);
    }
    for line in ["ip address add 10.77.2.1/32 peer 10.77.2.2/32 dev l2", "ip address add fd77:0:0:2::1/64 dev l2 nodad"] {
        server(&lab, line);
    }
    let rules = "[[app]]\nmatch = { client = \"8.0.9.20\", destination = \"203.0.113.12\" }\nlinks = [\"eth0\"]\n";
    let config = GATEWAY.replace("\"lan0\"", "\"lan0\", \"raw0\"");
    let up = Up::start_with(&lab, &format!("{config}{rules}"), &lab.directory().join("braid/state"));
    // Without a gateway there is nothing to probe before something has answered.
    eventually("the link is there", || up.state("eth0") == "unknown");
    for number in 0..2 {
        for to in [mirror.at(11), mirror.at6(11)] {
            eventually("connections use every link", || {
                let links: Vec<_> = (0..9).filter_map(|_| connected(&lab, number, to).ok()).collect();
                (0..3).all(|link| links.contains(&link))
            });
            let links: Vec<_> = (0..9).filter_map(|_| asked(&lab, number, to).ok()).collect();
            assert!((0..3).all(|link| links.contains(&link)), "UDP of device {number} to {to}: {links:?}");
        }
        for to in [remote(13, 7), remote6(13, 7)] {
            (0..3).for_each(|_| echoed(&lab, number, to, 8000).unwrap());
            (0..3).for_each(|_| assert!(pings(&lab, number, &to.ip().to_string()), "{to}"));
        }
    }
    for _ in 0..6 {
        assert_eq!(connected(&lab, 1, mirror.at(12)).unwrap(), 2, "a strict rule");
    }
    large_transfers(&lab, 1, FAR[0]);
    for (address, mac) in [("8.0.9.20", None), ("fd08:0:86dd::20", None), ("192.168.7.20", Some(Lab::device_mac(0)))] {
        let found = clients(&up).into_iter().find(|client| client["address"] == address).unwrap();
        assert_eq!(found["mac"].as_str(), mac.as_deref(), "{found}");
    }
}

/// Gives the second link another address and gateway in both families, as a new lease does, and returns counters of what leaves with an old address from
/// then on. With `gap`, the old addresses are gone before the new ones are there.
fn renumber(lab: &Lab, old: u8, new: u8, gap: bool) -> Vec<Watch> {
    // Below 10.77.1 and fd77:0:0:1::
    let (address, gateway) = (|host: u8| host + 2, |host: u8| host + 1);
    // In one subnet the second address would go with the first.
    let length = |host: u8| if host == 0 { 24 } else { 25 };
    let add = || {
        server(lab, &format!("ip address replace 10.77.1.{}/32 dev l1", gateway(new)));
        server(lab, &format!("ip address replace fd77:0:0:1::{}/128 dev l1 nodad", gateway(new)));
        client(lab, &format!("ip address add 10.77.1.{}/{} dev lte0", address(new), length(new)));
        client(lab, &format!("ip address add fd77:0:0:1::{}/64 dev lte0 nodad", address(new)));
    };
    let delete = || {
        client(lab, &format!("ip address delete 10.77.1.{}/{} dev lte0", address(old), length(old)));
        client(lab, &format!("ip address delete fd77:0:0:1::{}/64 dev lte0", address(old)));
    };
    if gap {
        delete();
        thread::sleep(ms(300));
    }
    add();
    client(lab, &format!("ip route replace default via 10.77.1.{} dev lte0 metric 101", gateway(new)));
    client(lab, &format!("ip -6 route replace default via fd77:0:0:1::{} dev lte0 metric 101", gateway(new)));
    if !gap {
        delete();
    }
    let sources: [IpAddr; 2] = [[10, 77, 1, address(old)].into(), format!("fd77:0:0:1::{}", address(old)).parse().unwrap()];
    let watch = || {
        sources.map(|source| lab.watch(1, Filter { source: Some(source), direction: Some(Direction::Up), ..Filter::default() }).unwrap())
    };
    // The kernel deletes them on a thread of its own, which waits on a busy machine.
    eventually("the translations to the old addresses are deleted", || {
        let watches = watch();
        thread::sleep(ms(300));
        watches.iter().all(|watch| lab.watched(*watch).packets == 0)
    });
    watch().into()
}

#[test]
fn flows_of_devices_continue_when_their_link_is_renumbered() {
    if !able() {
        return;
    }
    let lab = limited().lan(1).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(1_000_000_000)).unwrap();
    let mirror = Mirror::start(&lab);
    // No other link may take them.
    let rule = |client: &str| format!("[[app]]\nmatch = {{ client = \"{client}\" }}\nlinks = [\"lte0\"]\n");
    let up = Up::start(&lab, &format!("{GATEWAY}{}{}", rule("192.168.7.20"), rule("fd07::20")));
    let reached =
        || connected(&lab, 0, mirror.at(11)).is_ok_and(|link| link == 1) && connected(&lab, 0, mirror.at6(11)).is_ok_and(|link| link == 1);
    eventually("the device is forwarded", reached);
    let (mut old, mut new) = (0, 40);
    for (to, gap) in [(remote(11, 7), false), (remote6(11, 7), false), (remote(11, 7), true), (remote6(11, 7), true)] {
        let downloads: Vec<Child> = ["203.0.113.10", "2001:db8:113::10"].map(|host| curl(&lab, 0, &url(host, "1000000000.bin"))).into();
        let (mut watches, mut took) = (Vec::new(), Duration::ZERO);
        let (silence, answered) = call(&lab, 0, to, Duration::from_secs(8), || {
            watches = renumber(&lab, old, new, gap);
            took = within(Duration::from_secs(10), "new connections work", reached);
        });
        println!("{to}, gap {gap}: {silence:?} of silence, new connections after {took:?}");
        assert!(silence < Duration::from_secs(6) && answered > 0.7, "{to}: {silence:?} of silence, {answered} of the last second answered");
        assert_eq!(watches.iter().map(|watch| lab.watched(*watch).packets).sum::<u64>(), 0, "packets with an old address");
        for mut download in downloads {
            download.kill().unwrap();
            download.wait().unwrap();
        }
        (old, new) = (new, old);
    }
    up.wait_state("lte0", "up");
    assert!(!up.log().contains(REMOVED), "the kernel itself has removed the routes of the old address");
}

#[test]
fn bonded_flows_continue_when_a_link_is_renumbered() {
    if !able() {
        return;
    }
    let lab = limited().lan(1).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let relay = Relay::start_told(&lab, &["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"]);
    let up = relay.join(&format!("carry = \"bond\"\n{GATEWAY}"));
    eventually("devices are forwarded", || echoed(&lab, 0, remote(11, 7), 100).is_ok() && good_paths(&up) == 2);
    let (mut old, mut new) = (0, 40);
    for gap in [false, true] {
        let mut watches = Vec::new();
        let to_relay = lab.watch(1, Filter { direction: Some(Direction::Up), port: Some(5757), ..Filter::default() }).unwrap();
        let (silence, answered) = call(&lab, 0, remote(11, 7), Duration::from_secs(8), || watches = renumber(&lab, old, new, gap));
        println!("gap {gap}: {silence:?} of silence");
        assert!(silence < Duration::from_secs(6) && answered > 0.7, "{silence:?} of silence, {answered} of the last second answered");
        eventually("both paths are good again", || good_paths(&up) == 2 && lab.watched(to_relay).packets > 0);
        assert_eq!(watches.iter().map(|watch| lab.watched(*watch).packets).sum::<u64>(), 0, "packets with an old address");
        (old, new) = (new, old);
    }
}

/// Sends a datagram with this source from a device, by a raw socket.
fn send_from(lab: &Lab, number: usize, source: IpAddr, to: IpAddr) {
    let udp = [[0x1b, 0x58], [0x1b, 0x58], [0, 12], [0, 0]].concat();
    let payload = [&udp[..], b"lost"].concat();
    let mut packet = match (source, to) {
        (IpAddr::V4(source), IpAddr::V4(to)) => {
            let head = [0x45, 0, 0, 32, 0, 0, 0, 0, 9, 17, 0, 0];
            [&head[..], &source.octets(), &to.octets()].concat()
        }
        (IpAddr::V6(source), IpAddr::V6(to)) => [&[0x60, 0, 0, 0, 0, 12, 17, 9][..], &source.octets(), &to.octets()].concat(),
        other => panic!("{other:?}"),
    };
    packet.extend(payload);
    let send = || {
        let raw = Socket::new(Domain::for_address((to, 0).into()), Type::RAW, Some(libc::IPPROTO_RAW.into()))?;
        raw.bind_device(Some(b"eth0"))?;
        raw.set_broadcast(true)?;
        raw.send_to(&packet, &SocketAddr::new(to, 0).into())
    };
    lab.device(number).run(send).unwrap().unwrap_or_else(|error| panic!("{source} to {to}: {error}"));
}

#[test]
fn martians_broadcasts_and_multicasts_do_not_leave() {
    if !able() {
        return;
    }
    // Without the kernel's own filter.
    let lab = two().lan(2).rp_filter(0).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = Up::start(&lab, GATEWAY);
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok() && connected(&lab, 0, mirror.at6(10)).is_ok());
    let watch = |filter: Filter| watch_all(&lab, Filter { direction: Some(Direction::Up), ..filter });
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let own = ["192.168.7.20", "fd07::20"].map(address);
    let host = |of: IpAddr, number| if of.is_ipv4() { IpAddr::from(Lab::internet(number)) } else { Lab::internet6(number).into() };
    let martians = [
        "127.0.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.168.7.1",
        "192.168.7.255",
        "10.77.0.2",
        "::1",
        "ff02::1",
        "fd07::1",
        "fd77::2",
    ];
    let groups = [
        "255.255.255.255",
        "192.168.7.255",
        "10.77.0.255",
        "10.77.1.255",
        "224.0.0.251",
        "239.255.255.250",
        "ff02::fb",
        "ff05::2",
        "ff0e::1",
    ];
    let good = own.map(|own| watch(Filter::to(host(own, 12))));
    let bad = own.map(|own| watch(Filter::to(host(own, 11))));
    let away = groups.map(|group| watch(Filter { destination: Some(address(group)), source_port: Some(7000), ..Filter::default() }));
    for _ in 0..3 {
        own.iter().for_each(|own| send_from(&lab, 0, *own, host(*own, 12)));
        martians.iter().map(|source| address(source)).for_each(|source| send_from(&lab, 0, source, host(source, 11)));
        for group in groups.map(address) {
            send_from(&lab, 0, own[usize::from(group.is_ipv6())], group);
        }
    }
    let sum = |watches: &[Watch]| packets(&lab, watches).iter().sum::<u64>();
    eventually("what a device may send leaves", || good.iter().all(|watches| sum(watches) >= 3));
    thread::sleep(ms(200));
    assert_eq!(bad.map(|watches| sum(&watches)), [0; 2], "martians");
    assert_eq!(away.map(|watches| sum(&watches)), [0; 9], "broadcasts and multicasts");
    // The switch lists no flow to a group.
    let flows: serde_json::Value = serde_json::from_slice(&up.braid(&["switch", "flows", "--json"]).stdout).unwrap();
    let remotes: Vec<&str> = flows["flows"].as_array().unwrap().iter().filter_map(|flow| flow["remote"].as_str()).collect();
    assert!(remotes.contains(&"203.0.113.12:7000"), "{remotes:?}");
    for group in ["255.255.255.255", "192.168.7.255", "224.0.0.251", "239.255.255.250", "ff02::fb", "ff05::2", "ff0e::1"] {
        assert!(!remotes.iter().any(|remote| remote.contains(group)), "{group}: {remotes:?}");
    }
}

#[test]
fn a_port_that_the_system_forwards_works_from_outside_and_from_the_lan() {
    if !able() {
        return;
    }
    let lab = two().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    // What an administrator writes for a server on the LAN.
    let rules = "table ip ports {\nchain in {\ntype nat hook prerouting priority dstnat\nfib daddr type local tcp dport 8080 dnat to 192.168.7.21:80\n}\n\
                 chain out {\ntype nat hook postrouting priority srcnat - 5\niifname lan0 oifname lan0 ct status dnat masquerade\n}\n}\n";
    braid_lab::forwarding::nft(lab.client(), rules).unwrap();
    let listener = lab.device(1).run(|| TcpListener::bind("192.168.7.21:80").unwrap()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = (&stream).write_all(b"from the LAN");
        }
    });
    let said = |namespace: &Namespace, to: &str| {
        let read = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&to.parse().unwrap(), TRY)?;
            stream.set_read_timeout(Some(TRY))?;
            let mut all = String::new();
            stream.read_to_string(&mut all).map(|_| all)
        };
        namespace.run(read).unwrap().is_ok_and(|said| said == "from the LAN")
    };
    // Not the link that has the address which the device asks for.
    let rule = "[[app]]\nmatch = { client = \"192.168.7.20\" }\nlinks = [\"lte0\"]\n";
    let _up = Up::start(&lab, &format!("{GATEWAY}{rule}"));
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok_and(|link| link == 1));
    for _ in 0..8 {
        assert!(said(lab.device(0), "10.77.0.2:8080"), "from a device, at the address of a link that its rule forbids");
        assert!(said(lab.device(0), "10.77.1.2:8080") && said(lab.device(0), "192.168.7.1:8080"), "from a device");
        assert!(said(lab.server(), "10.77.0.2:8080"), "from outside, over the system's default link");
    }
    assert!(pings(&lab, 0, "10.77.0.2") && pings(&lab, 0, "fd77::2"), "the gateway itself, at the address of a link");
}

#[test]
fn links_in_one_subnet_and_with_one_address() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    // Two modems of one kind: the same network and gateway behind both.
    for (link, host) in [(0, 3), (1, 4)] {
        let name = NAMES[link];
        client(&lab, &format!("ip address flush dev {name} scope global"));
        server(&lab, &format!("ip address replace 10.77.{link}.1/32 dev l{link}"));
        server(&lab, &format!("ip address add 192.168.8.1/32 dev l{link}"));
        server(&lab, &format!("ip route add 192.168.8.{host}/32 dev l{link}"));
        client(&lab, &format!("ip address add 192.168.8.{host}/24 dev {name}"));
        client(&lab, &format!("ip route add default via 192.168.8.1 dev {name} metric 10{link}"));
    }
    let up = Up::start_with(&lab, GATEWAY, &lab.directory().join("braid/state"));
    let watches = watch_all(&lab, Filter::to(Lab::internet(11)));
    // The mirror answers with the address that it sees.
    let ask = || {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect_timeout(&mirror.at(11), TRY)?;
            stream.set_read_timeout(Some(TRY))?;
            let mut seen = String::new();
            stream.read_to_string(&mut seen).map(|_| seen)
        };
        lab.device(0).run(ask).unwrap().unwrap_or_default()
    };
    eventually("connections of a device use both links", || {
        let seen: Vec<String> = (0..6).map(|_| ask()).collect();
        ["192.168.8.3", "192.168.8.4"].iter().all(|address| seen.iter().any(|seen| seen.ends_with(address)))
    });
    assert!(packets(&lab, &watches).iter().all(|count| *count > 0));
    // With the same address the second link cannot be used, and the first one goes on.
    client(&lab, "ip address flush dev lte0 scope global");
    client(&lab, "ip address add 192.168.8.3/24 dev lte0");
    client(&lab, "ip route add default via 192.168.8.1 dev lte0 metric 101");
    eventually("the second link is refused", || {
        up.link("lte0")["reason"].as_str().is_some_and(|reason| reason.contains("both have the address"))
    });
    eventually("connections use the first link", || (0..6).all(|_| ask().ends_with("192.168.8.3")));
    let watches = watch_all(&lab, Filter::to(Lab::internet(11)));
    (0..4).for_each(|_| assert!(ask().ends_with("192.168.8.3")));
    assert_eq!(packets(&lab, &watches)[1], 0);
}

#[test]
fn a_flood_of_made_up_clients_leaves_room_for_others() {
    if !able() {
        return;
    }
    /// Flows: more than fit into the table at once.
    const FLOWS: u32 = 150_000;
    /// Flows that begin together, at 6,000 a second.
    const BATCH: u32 = 6_000;
    /// Flows in the table after which the next batch still fits.
    const FULL: u64 = 110_000;
    let lab = two().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = Up::start(&lab, GATEWAY);
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok() && connected(&lab, 1, mirror.at(10)).is_ok());
    let others: Vec<IpAddr> = (100..108).map(|last| IpAddr::from([192, 168, 7, last])).collect();
    for address in &others {
        device(&lab, 0, &format!("ip address add {address}/24 dev eth0"));
    }
    let bind = || others.iter().map(|address| UdpSocket::bind((*address, 0)).unwrap()).collect::<Vec<_>>();
    let sockets = lab.device(0).run(bind).unwrap();
    for first in (0..FLOWS).step_by(BATCH as usize) {
        let begin = Instant::now();
        for number in 0..BATCH {
            let flow = first + number;
            let (socket, port) = (&sockets[flow as usize % sockets.len()], 1024 + flow / 8 % 60_000);
            let _ = socket.send_to(b"x", (Lab::internet(14), port as u16));
            if let Some(wait) = (Duration::from_micros(166) * number).checked_sub(begin.elapsed()).filter(|wait| *wait > ms(1)) {
                thread::sleep(wait);
            }
        }
        // A slow machine lists the flows rarely, so the next batch waits until old flows have made room. The links' numbers are the kernel's, of this moment.
        let count = |status: serde_json::Value| {
            status["links"].as_array().map(|links| links.iter().filter_map(|link| link["flows"].as_u64()).sum::<u64>())
        };
        eventually("there is room", || up.status().and_then(count).is_some_and(|flows| flows < FULL));
    }
    let overflowed = || up.status().and_then(|status| status["counters"]["overflowed"].as_u64());
    assert_eq!(overflowed(), Some(0), "{} flows", up.status().unwrap()["flows"]);
    connected(&lab, 1, mirror.at(11)).unwrap();
}

/// Sends a TCP segment of no connection, from this address and port to that one.
fn stray(from: [u8; 4], to: [u8; 4]) {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(socket2::Protocol::from(255))).unwrap();
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
    packet.extend([from, to].concat());
    // FIN and RST at once: connection tracking takes that for no part of any connection.
    packet.extend([0x13, 0x88, 0, 80, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x05, 16, 0, 0, 0, 0, 0]);
    socket.send_to(&packet, &SocketAddr::from((to, 0)).into()).unwrap();
}

#[test]
fn what_connection_tracking_does_not_know_is_not_forwarded() {
    if !able() {
        return;
    }
    let lab = two().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let _up = Up::start(&lab, GATEWAY);
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok());
    let private =
        watch_all(&lab, Filter { source: Some("192.168.7.20".parse().unwrap()), direction: Some(Direction::Up), ..Filter::default() });
    lab.device(0).run(|| stray([192, 168, 7, 20], Lab::internet(10).octets())).unwrap();
    let dropped = || client(&lab, "nft list chain inet braid_gateway forward");
    eventually("it is dropped and counted", || {
        dropped().lines().any(|rule| rule.contains("invalid,untracked") && rule.contains("packets 1 "))
    });
    assert_eq!(packets(&lab, &private), [0, 0]);
    connected(&lab, 0, mirror.at(11)).unwrap();
}

#[test]
fn a_flood_that_fills_connection_tracking_leaves_the_gateway_working() {
    if !able() {
        return;
    }
    // The limit is the machine's, and no namespace may change it.
    let read =
        |name: &str| std::fs::read_to_string(format!("/proc/sys/net/netfilter/nf_conntrack_{name}")).ok()?.trim().parse::<usize>().ok();
    let Some(limit) = read("max").filter(|limit| *limit <= 300_000) else {
        println!("skipped: nf_conntrack_max is too large to be reached");
        return;
    };
    let lab = two().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    let up = Up::start(&lab, GATEWAY);
    eventually("devices are forwarded", || connected(&lab, 0, mirror.at(10)).is_ok() && connected(&lab, 1, mirror.at(10)).is_ok());
    let (before, begin) = (up.resident(), Instant::now());
    let entries = || lab.client().run(|| read("count")).unwrap().unwrap();
    // Nothing answers at these ports, so the kernel may drop the entries for new ones.
    let flood = || {
        for port in 1024..=u16::MAX {
            let Ok(socket) = UdpSocket::bind(("0.0.0.0", port)) else { continue };
            (14..19).for_each(|host| drop(socket.send_to(b"x", (Lab::internet(host), 9))));
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| lab.device(0).run(flood).unwrap());
        eventually("connection tracking is full", || entries() * 100 >= limit * 97);
        println!("{} of {limit} entries after {:?}", entries(), begin.elapsed());
        let took = eventually("another device's connections work", || (0..3).all(|_| connected(&lab, 1, mirror.at(11)).is_ok()));
        println!("connections of another device work after {took:?}");
        eventually("those of this machine work", || lab.client().run(|| TcpStream::connect_timeout(&mirror.at(12), TRY).is_ok()).unwrap());
        assert!(up.status().is_some());
    });
    eventually("the device's own connections work", || connected(&lab, 0, mirror.at(11)).is_ok());
    println!("resident memory grew from {before} to {} kB", up.resident());
    assert!(up.resident() < before + 60_000);
}
