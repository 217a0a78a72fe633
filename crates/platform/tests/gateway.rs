//! The gateway in the kernel: a device on a LAN, a router with two links, and a server that has no route to the LAN.

#[allow(unreachable_pub)]
mod support {
    pub mod world;
}

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use braid_decide::gateway::{ClientPorts, ForwardRule, GatewayPlan, OwnRules, ruleset};
use braid_decide::tables;
use braid_decide::virtual_device::VirtualDevice;
use braid_model::{LinkIndex, Mac, PerFamily};
use braid_platform::linux::gateway::{self, GatewayError};
use braid_platform::linux::netlink::{self, Files};
use braid_platform::linux::sys::process::drop_privileges;
use support::world::{TestNamespace, World, advertise, may_make_namespaces};

/// Maximum time for an answer on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);
/// Time after which a packet counts as dropped.
const LOST: Duration = Duration::from_millis(600);
const SERVER_V4: &str = "203.0.113.10";
const SERVER_V6: &str = "2001:db8:113::10";
const CAP_NET_ADMIN: u64 = 12;

struct Lan {
    world: World,
    device: TestNamespace,
}

impl Lan {
    /// A LAN behind `lan0` of a router with `link0` and `link1`, and Braid's routing rules.
    fn new(what: &str) -> Option<Self> {
        if !may_make_namespaces(what) {
            return None;
        }
        let lan = Self { world: World::new(2).unwrap(), device: TestNamespace::new().unwrap() };
        let router = &lan.world.client;
        router.ip(&format!("link add dev lan0 type veth peer name eth0 netns {}", lan.device.path));
        for (namespace, device, last) in [(router, "lan0", 1), (&lan.device, "eth0", 2)] {
            namespace.ip(&format!("addr add 192.168.50.{last}/24 dev {device}"));
            namespace.ip(&format!("addr add fd50::{last}/64 dev {device} nodad"));
            namespace.ip(&format!("link set dev {device} up"));
        }
        lan.device.ip("route add default via 192.168.50.1");
        lan.device.ip("-6 route add default via fd50::1");
        // The server drops packets that arrive over another link than that of their source address.
        lan.world.server.sysctl("net.ipv4.conf.all.rp_filter", "1");
        router.run(|| {
            let network = netlink::snapshot(&Files::default()).unwrap();
            let index = |name| network.interfaces.iter().find(|facts| facts.name == name).unwrap().index;
            let plan = tables::plan(&network, &[(index("link0"), 0), (index("link1"), 1)].into());
            netlink::apply(&plan, &network).unwrap();
        });
        lan.serve();
        Some(lan)
    }

    fn router(&self) -> &TestNamespace {
        &self.world.client
    }

    fn apply(&self, plan: GatewayPlan) {
        self.router().run(move || gateway::Keeper::default().apply(&plan)).unwrap();
    }

    fn sweep(&self) -> bool {
        self.router().run(gateway::sweep).unwrap()
    }

    /// Gives every packet from the LAN the mark of the link in `slot` before the gateway's rules see it.
    fn mark(&self, slot: usize) {
        let rule = format!("type filter hook prerouting priority raw; iifname \"lan0\" meta mark set {:#x}", tables::mark(slot));
        nft(self.router(), &format!("table inet test {{}}\ndelete table inet test\ntable inet test {{ chain test {{ {rule}; }}; }}\n"));
    }

    /// Starts servers that tell every sender its address: the TCP server then echoes. All use port 7000.
    fn serve(&self) {
        self.world.server.run(|| {
            let listener = TcpListener::bind("[::]:7000").unwrap();
            std::thread::spawn(move || {
                listener.incoming().map_while(Result::ok).for_each(|stream| drop(std::thread::spawn(|| echo(stream))))
            });
            for address in [SERVER_V4, SERVER_V6] {
                let socket = UdpSocket::bind((address.parse::<IpAddr>().unwrap(), 7000)).unwrap();
                std::thread::spawn(move || {
                    while let Ok((_, peer)) = socket.recv_from(&mut [0; 100]) {
                        let _ = socket.send_to(peer.ip().to_string().as_bytes(), peer);
                    }
                });
            }
        });
    }

    /// Connects from the device, and returns the address that the server saw.
    fn connect(&self, server: &str, limit: Duration) -> std::io::Result<(TcpStream, String)> {
        let server = SocketAddr::new(server.parse().unwrap(), 7000);
        self.device.run(move || {
            let mut stream = TcpStream::connect_timeout(&server, limit)?;
            stream.set_read_timeout(Some(LIMIT))?;
            let mut seen = [0; 40];
            stream.read_exact(&mut seen)?;
            Ok((stream, String::from_utf8_lossy(&seen).trim().to_owned()))
        })
    }

    /// The address that the server saw at a new connection.
    fn seen_by_tcp(&self, server: &str) -> String {
        self.connect(server, LIMIT).unwrap().1
    }

    /// Sends a datagram from this socket of the device, and returns the address that the server saw; `None` without an answer.
    fn ask(&self, socket: &UdpSocket, server: &str, limit: Duration) -> Option<String> {
        let server = SocketAddr::new(server.parse().unwrap(), 7000);
        socket.set_read_timeout(Some(limit)).unwrap();
        socket.send_to(b"?", server).unwrap();
        let mut seen = [0; 100];
        let length = socket.recv(&mut seen).ok()?;
        Some(String::from_utf8_lossy(&seen[..length]).into_owned())
    }

    fn socket(&self, address: &str) -> UdpSocket {
        let address: IpAddr = address.parse().unwrap();
        self.device.run(move || UdpSocket::bind((address, 0)).unwrap())
    }

    fn setting(&self, name: &'static str) -> String {
        self.router().run(move || std::fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap().trim().to_owned())
    }

    /// All settings that the gateway might change.
    fn settings(&self) -> Vec<(String, String)> {
        self.router().run(|| {
            let mut all = vec!["ipv4/ip_forward".to_owned()];
            for (family, names) in [
                ("ipv4", &["forwarding", "accept_redirects", "src_valid_mark", "rp_filter"][..]),
                ("ipv6", &["forwarding", "accept_ra", "accept_redirects"]),
            ] {
                let devices = ["all", "default", "lo", "lan0", "link0", "link1"];
                all.extend(devices.iter().flat_map(|device| names.iter().map(move |name| format!("{family}/conf/{device}/{name}"))));
            }
            all.into_iter().map(|name| (name.clone(), std::fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap())).collect()
        })
    }
}

fn echo(mut stream: TcpStream) {
    let peer = stream.peer_addr().unwrap().ip().to_canonical();
    let _ = stream.write_all(format!("{peer:<40}").as_bytes());
    let mut piece = [0; 65_536];
    while let Ok(length @ 1..) = stream.read(&mut piece) {
        if stream.write_all(&piece[..length]).is_err() {
            break;
        }
    }
}

/// Runs a script of nft in this namespace and returns what it prints.
fn nft(namespace: &TestNamespace, script: &str) -> String {
    let script = script.to_owned();
    namespace.run(move || {
        let mut child =
            Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("nftables is installed");
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{script}");
        String::from_utf8(output.stdout).unwrap()
    })
}

/// Whether a rule with this text has counted packets.
fn has_counted(namespace: &TestNamespace, rule: &str) -> bool {
    let rules = nft(namespace, "list ruleset\n");
    let line = rules.lines().find(|line| line.contains(rule)).unwrap_or_else(|| panic!("{rule} in {rules}"));
    !line.contains("counter packets 0 ")
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn plan() -> GatewayPlan {
    GatewayPlan {
        lan: names(&["lan0"]),
        links: names(&["link0", "link1"]),
        bridges: names(&["br0", "docker0"]).into_iter().collect(),
        slots: vec![(0, LinkIndex(11)), (1, LinkIndex(12))],
        ipv6: true,
        ..Default::default()
    }
}

fn with(rule: ForwardRule) -> GatewayPlan {
    GatewayPlan { rules: vec![rule], ..plan() }
}

#[test]
fn connections_leave_by_their_marked_link_with_its_address() {
    let Some(lan) = Lan::new("forwarding over a marked link") else { return };
    lan.apply(plan());
    nft(
        &lan.world.server,
        "table inet test { chain test { type filter hook input priority 0
            iifname \"peer1\" ip saddr 10.77.1.2 icmp type echo-request counter
            iifname \"peer1\" ip6 saddr fd77:0:0:1::2 icmpv6 type echo-request counter\n}\n}\n",
    );
    for slot in [1, 0] {
        lan.mark(slot);
        let (v4, v6) = (format!("10.77.{slot}.2"), if slot == 0 { "fd77::2".to_owned() } else { "fd77:0:0:1::2".to_owned() });
        assert_eq!(lan.seen_by_tcp(SERVER_V4), v4);
        assert_eq!(lan.seen_by_tcp(SERVER_V6), v6);
        assert_eq!(lan.ask(&lan.socket("0.0.0.0"), SERVER_V4, LIMIT), Some(v4));
        assert_eq!(lan.ask(&lan.socket("::"), SERVER_V6, LIMIT), Some(v6));
        let ping = |server| Command::new("ping").args(["-n", "-c", "1", "-W", "10", server]).output().unwrap().status.success();
        assert!(lan.device.run(move || ping(SERVER_V4) && ping(SERVER_V6)));
    }
    assert!(has_counted(&lan.world.server, "icmp type echo-request") && has_counted(&lan.world.server, "icmpv6 type echo-request"));
}

#[test]
fn a_tcp_connection_keeps_its_link_and_a_datagram_exchange_follows_its_mark() {
    let Some(lan) = Lan::new("connections that keep their link") else { return };
    lan.apply(plan());
    lan.mark(1);
    for (server, first, second) in [(SERVER_V4, "10.77.1.2", "10.77.0.2"), (SERVER_V6, "fd77:0:0:1::2", "fd77::2")] {
        lan.mark(1);
        let (mut stream, seen) = lan.connect(server, LIMIT).unwrap();
        let socket = lan.socket(if server == SERVER_V4 { "0.0.0.0" } else { "::" });
        assert_eq!((seen.as_str(), lan.ask(&socket, server, LIMIT).as_deref()), (first, Some(first)));
        lan.mark(0);
        stream.write_all(b"more").unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
        // The kernel drops the datagram that shows the change.
        assert_eq!(lan.ask(&socket, server, LOST), None);
        assert_eq!(lan.ask(&socket, server, LIMIT).as_deref(), Some(second));
        assert_eq!(lan.seen_by_tcp(server), second);
        // Rules that are replaced change nothing for it either.
        lan.apply(with(ForwardRule { port: Some(9), links: Some(Vec::new()), ..Default::default() }));
        stream.write_all(b"more").unwrap();
        stream.read_exact(&mut [0; 4]).unwrap();
    }
}

#[test]
fn a_connection_without_a_mark_never_gets_one() {
    let Some(lan) = Lan::new("connections without a mark") else { return };
    lan.apply(plan());
    let (mut stream, seen) = lan.connect(SERVER_V4, LIMIT).unwrap();
    assert_eq!(seen, "10.77.0.2", "the system's default route");
    lan.mark(1);
    stream.write_all(b"more").unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
}

#[test]
fn connection_marks_of_others_stay() {
    let Some(lan) = Lan::new("connection marks of others") else { return };
    lan.apply(plan());
    nft(lan.router(), "table inet other { chain c { type filter hook prerouting priority -160; ct state new ct mark set 0x77; }; }\n");
    lan.mark(1);
    assert_eq!(lan.seen_by_tcp(SERVER_V4), "10.77.0.2");
    nft(
        lan.router(),
        "table inet counting { chain c { type filter hook postrouting priority 0; ct mark 0x77 meta mark 0x0 counter; }; }\n",
    );
    lan.seen_by_tcp(SERVER_V4);
    assert!(has_counted(lan.router(), "ct mark 0x00000077 meta mark 0x00000000"));
}

#[test]
fn regression_the_retransmission_of_a_dropped_first_packet_takes_the_current_mark() {
    let Some(lan) = Lan::new("retransmitted first packets") else { return };
    lan.apply(plan());
    lan.mark(0);
    // Dropped before conntrack confirms the entry, and lost after it.
    for (hook, seen) in [("postrouting priority 150", "10.77.1.2"), ("input priority 0", "10.77.0.2")] {
        let namespace = if hook.starts_with("input") { &lan.world.server } else { lan.router() };
        nft(
            namespace,
            &format!("table inet lossy {{ chain c {{ type filter hook {hook}; tcp flags syn tcp dport 7000 counter drop; }}; }}\n"),
        );
        lan.mark(0);
        std::thread::scope(|scope| {
            let connecting = scope.spawn(|| lan.connect(SERVER_V4, LIMIT).unwrap().1);
            let end = Instant::now() + LIMIT;
            while !has_counted(namespace, "tcp flags") {
                assert!(Instant::now() < end);
                std::thread::sleep(Duration::from_millis(10));
            }
            lan.mark(1);
            nft(namespace, "delete table inet lossy\n");
            assert_eq!(connecting.join().unwrap(), seen, "{hook}");
        });
    }
}

#[test]
fn answers_pass_a_strict_reverse_path_filter() {
    let Some(lan) = Lan::new("strict reverse path filtering") else { return };
    for name in ["all", "lan0", "link0", "link1"] {
        lan.router().sysctl(&format!("net.ipv4.conf.{name}.rp_filter"), "1");
    }
    lan.apply(plan());
    assert_eq!(lan.setting("ipv4/conf/all/src_valid_mark"), "1");
    for slot in [1, 0] {
        lan.mark(slot);
        assert_eq!(lan.seen_by_tcp(SERVER_V4), format!("10.77.{slot}.2"));
    }
    assert!(lan.sweep());
    assert_eq!(lan.setting("ipv4/conf/all/src_valid_mark"), "0");
}

#[test]
fn spoofed_sources_are_dropped_and_counted() {
    let Some(lan) = Lan::new("spoofed sources") else { return };
    for name in ["all", "default", "lan0"] {
        lan.router().sysctl(&format!("net.ipv4.conf.{name}.rp_filter"), "0");
    }
    lan.apply(plan());
    lan.device.ip("addr add 172.16.9.9/32 dev lo");
    lan.device.ip("addr add fd99::9/128 dev lo nodad");
    lan.mark(0);
    for (address, server) in [("172.16.9.9", SERVER_V4), ("fd99::9", SERVER_V6)] {
        // The device resolves the router's address first.
        lan.seen_by_tcp(server);
        assert!(!has_counted(lan.router(), "fib saddr . iif oif missing"), "{address}");
        assert_eq!(lan.ask(&lan.socket(address), server, LOST), None, "{address}");
        assert!(has_counted(lan.router(), "fib saddr . iif oif missing"), "{address}");
        lan.apply(plan());
        // With a route to the LAN it is no longer a foreign source.
        let via = if server == SERVER_V4 { "192.168.50.2" } else { "fd50::2" };
        lan.router().ip(&format!("route add {address} via {via} dev lan0"));
        assert!(lan.ask(&lan.socket(address), server, LIMIT).is_some(), "{address}");
        assert!(!has_counted(lan.router(), "fib saddr . iif oif missing"), "{address}");
    }
}

#[test]
fn strict_rules_hold_without_a_daemon() {
    let Some(lan) = Lan::new("strict rules") else { return };
    let rule = ForwardRule { port: Some(7000), links: Some(names(&["link1"])), ..Default::default() };
    let [device, other]: [Option<ipnet::IpNet>; 2] = ["192.168.50.2/32", "192.168.50.3/32"].map(|net| net.parse().ok());
    let mac = lan.device.run(|| {
        let network = netlink::snapshot(&Files::default()).unwrap();
        network.interfaces.iter().find(|facts| facts.name == "eth0").unwrap().mac.unwrap()
    });
    let cases = [
        (rule.clone(), true),
        (ForwardRule { client: device, ..rule.clone() }, true),
        (ForwardRule { client: other, ..rule.clone() }, false),
        (ForwardRule { mac: Some(mac), ..rule.clone() }, true),
        (ForwardRule { mac: Some(Mac([2; 6])), ..rule.clone() }, false),
        (ForwardRule { destination: "203.0.113.0/24".parse().ok(), ..rule.clone() }, true),
        (ForwardRule { destination: "203.0.114.0/24".parse().ok(), ..rule.clone() }, false),
        (ForwardRule { port: Some(7001), ..rule.clone() }, false),
        (ForwardRule { port: None, ..rule.clone() }, true),
        (ForwardRule { destination: "::/0".parse().ok(), ..rule.clone() }, false),
    ];
    for (rule, matches) in cases {
        lan.apply(with(rule.clone()));
        lan.mark(0);
        assert_eq!(lan.connect(SERVER_V4, if matches { LOST } else { LIMIT }).is_err(), matches, "{rule:?}");
        lan.mark(1);
        assert_eq!(lan.seen_by_tcp(SERVER_V4), "10.77.1.2", "{rule:?}");
    }
    lan.apply(with(ForwardRule { links: Some(Vec::new()), ..rule }));
    for server in [SERVER_V4, SERVER_V6] {
        assert!(lan.connect(server, LOST).is_err(), "no link is allowed");
    }
}

#[test]
fn nobody_outside_reaches_the_lan_if_nothing_was_forwarded_before() {
    let Some(lan) = Lan::new("connections from outside") else { return };
    lan.world.server.ip("route add 192.168.50.0/24 via 10.77.0.2");
    let listener = lan.device.run(|| TcpListener::bind("192.168.50.2:7000").unwrap());
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let from_outside = |to: &'static str| lan.world.server.run(move || TcpStream::connect_timeout(&to.parse().unwrap(), LOST).is_ok());
    lan.apply(plan());
    assert!(!from_outside("192.168.50.2:7000"));
    nft(
        lan.router(),
        "table ip port { chain c { type nat hook prerouting priority dstnat; iifname \"link0\" tcp dport 99 dnat to 192.168.50.2:7000; }; }\n",
    );
    assert!(from_outside("10.77.0.2:99"), "a forwarded port");
    // A router remains a router.
    lan.sweep();
    lan.router().sysctl("net.ipv4.ip_forward", "1");
    lan.apply(plan());
    assert!(from_outside("192.168.50.2:7000"));
}

#[test]
fn settings_are_restored_and_changes_by_others_kept() {
    let Some(lan) = Lan::new("restoring the kernel's settings") else { return };
    let router = lan.router();
    router.ip("link add dev br-lan.5 type veth peer name odd@#{}");
    for name in ["ipv4.conf.all.rp_filter", "ipv4.conf.link1.forwarding", "ipv6.conf.link0.forwarding"] {
        router.sysctl(&format!("net.{name}"), "1");
    }
    router.sysctl("net.ipv4.conf.all.accept_redirects", "0");
    router.sysctl("net.ipv6.conf.link1.accept_ra", "0");
    let odd =
        |value: &str| assert_eq!([lan.setting("ipv6/conf/br-lan.5/accept_ra"), lan.setting("ipv6/conf/odd@#{}/accept_ra")], [value; 2]);
    let before = lan.settings();
    odd("1");
    lan.apply(plan());
    let during = lan.settings();
    odd("2");
    for (name, value) in [
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
        ("ipv4/conf/all/src_valid_mark", "1"),
        ("ipv6/conf/link0/accept_ra", "2"),
        ("ipv6/conf/default/accept_ra", "2"),
        ("ipv6/conf/link1/accept_ra", "0"),
    ] {
        assert_eq!(lan.setting(name), value, "{name}");
    }
    // A second time nothing changes, and a device that is new gets the default.
    lan.apply(GatewayPlan { rules: vec![ForwardRule { links: Some(Vec::new()), ..Default::default() }], ..plan() });
    assert_eq!(lan.settings(), during);
    router.ip("link add dev late type veth peer name etal");
    assert_eq!(lan.setting("ipv6/conf/late/accept_ra"), "2");
    router.ip("link del dev br-lan.5");
    assert!(lan.sweep());
    assert_eq!(lan.settings(), before);
    assert!(!nft(router, "list tables\n").contains("braid"));
    assert!(!lan.sweep());

    lan.apply(plan());
    router.sysctl("net.ipv6.conf.lan0.accept_ra", "0");
    router.sysctl("net.ipv4.conf.all.src_valid_mark", "2");
    assert!(lan.sweep());
    assert_eq!((lan.setting("ipv6/conf/lan0/accept_ra").as_str(), lan.setting("ipv4/conf/all/src_valid_mark").as_str()), ("0", "2"));
}

#[test]
fn what_others_remove_is_noticed_and_its_records_are_not_lost() {
    let Some(lan) = Lan::new("rules that others remove") else { return };
    let router = lan.router();
    let before = lan.settings();
    let keeper = gateway::Keeper::default();
    let apply = || {
        let (keeper, plan) = (keeper.clone(), plan());
        router.run(move || keeper.apply(&plan)).unwrap();
    };
    let follower = keeper.clone();
    let (_follower, lost) = router.run(move || follower.follow()).unwrap();
    apply();
    let await_lost = |wanted: bool| {
        let begin = Instant::now();
        while *lost.borrow() != wanted {
            assert!(begin.elapsed() < LIMIT, "it was not noticed");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // What others add is not missing.
    nft(router, "add rule inet braid_gateway forward counter\nadd table inet other\n");
    std::thread::sleep(Duration::from_millis(200));
    assert!(!*lost.borrow());
    let saved = nft(router, "list table inet braid_gateway\n");
    for removal in [
        "flush ruleset\n",
        "delete table inet braid_gateway_restore\n",
        "flush chain inet braid_gateway rules\nflush chain inet braid_gateway postrouting\n",
        "add table inet braid_gateway { flags dormant; }\n",
        // The same, from a saved ruleset.
        &format!("delete table inet braid_gateway\n{saved}"),
    ] {
        nft(router, removal);
        await_lost(true);
        // Forwarding counts as turned on by Braid, though it is on already.
        let closed = "ct state new ct status ! dnat";
        apply();
        assert!(!*lost.borrow() && nft(router, "list table inet braid_gateway\n").contains(closed), "{removal}");
    }
    let sweeper = keeper.clone();
    assert!(router.run(move || sweeper.sweep()).unwrap());
    assert_eq!(lan.settings(), before);
    std::thread::sleep(Duration::from_millis(200));
    assert!(!*lost.borrow(), "nothing is wanted");
}

#[test]
fn connections_without_translation_end() {
    let Some(lan) = Lan::new("connections that began without rules") else { return };
    let router = lan.router();
    router.sysctl("net.ipv4.ip_forward", "1");
    router.sysctl("net.ipv6.conf.all.forwarding", "1");
    // Connection tracking without translation.
    nft(router, "table inet test { chain track { type filter hook forward priority 0; ct state new counter; }; }\n");
    let clients: [(&str, &str); 2] = [("192.168.50.2", SERVER_V4), ("fd50::2", SERVER_V6)];
    let send = |client: &'static str, server: &'static str| {
        lan.device.run(move || UdpSocket::bind((client, 5000)).unwrap().send_to(b"x", (server, 9)).unwrap());
    };
    let forget = |client: &str, server: &str| {
        let addresses = (SocketAddr::new(client.parse().unwrap(), 5000), SocketAddr::new(server.parse().unwrap(), 9));
        router.run(move || gateway::forget(17, addresses.0, addresses.1)).unwrap()
    };
    for (client, server) in clients {
        let begin = Instant::now();
        let tracked = || {
            send(client, server);
            std::thread::sleep(Duration::from_millis(20));
            forget(client, server)
        };
        // Neighbours must be resolved first.
        while !tracked() {
            assert!(begin.elapsed() < LIMIT, "{client} is not tracked");
        }
        send(client, server);
        std::thread::sleep(Duration::from_millis(100));
    }
    let other: ipnet::IpNet = "10.0.0.0/8".parse().unwrap();
    assert_eq!(router.run(move || gateway::forget_untranslated(&[other])).unwrap(), 0);
    let lans: Vec<ipnet::IpNet> = vec!["192.168.50.0/24".parse().unwrap(), "fd50::/64".parse().unwrap()];
    assert_eq!(router.run(move || gateway::forget_untranslated(&lans)).unwrap(), 2);
    for (client, server) in clients {
        assert!(!forget(client, server), "{client}");
    }
}

#[test]
fn what_is_already_wanted_is_neither_changed_nor_recorded() {
    let Some(lan) = Lan::new("settings that are already as wanted") else { return };
    lan.router().sysctl("net.ipv4.ip_forward", "1");
    lan.router().sysctl("net.ipv6.conf.all.forwarding", "1");
    let before = lan.settings();
    lan.apply(plan());
    assert_eq!(lan.settings(), before);
    assert!(!nft(lan.router(), "list tables\n").contains("braid_gateway_restore"));
    assert!(lan.sweep());
    assert_eq!(lan.settings(), before);
}

#[test]
fn a_lan_without_ipv6_leaves_ipv6_alone() {
    let Some(lan) = Lan::new("a LAN without IPv6") else { return };
    lan.apply(GatewayPlan { ipv6: false, ..plan() });
    assert_eq!((lan.setting("ipv4/ip_forward").as_str(), lan.setting("ipv6/conf/all/forwarding").as_str()), ("1", "0"));
    assert_eq!(lan.setting("ipv6/conf/link0/accept_ra"), "1");
}

#[test]
fn advertised_routes_stay_and_advertisements_are_followed() {
    let Some(lan) = Lan::new("router advertisements at a gateway") else { return };
    let until = |wanted: bool, what: &str| {
        let end = Instant::now() + LIMIT;
        let routes = || Command::new("ip").args("-6 route show default dev link0 proto ra".split(' ')).output().unwrap().stdout;
        while lan.router().run(move || routes().is_empty()) == wanted {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    let send = |lifetime| lan.world.server.run(move || advertise("peer0", lifetime, &[]));
    lan.router().wait_for_link_local("link0");
    lan.world.server.wait_for_link_local("peer0");
    send(1800);
    until(true, "a route before");
    lan.apply(plan());
    until(true, "the route stays");
    send(0);
    until(false, "an advertisement that withdraws it");
    send(1800);
    until(true, "an advertisement of a route");
    assert!(lan.sweep());
    until(true, "the route stays afterwards");
    send(0);
    until(false, "advertisements are followed afterwards");
}

#[test]
fn a_clean_system_is_left_alone() {
    if !may_make_namespaces("sweeping a clean system") {
        return;
    }
    let namespace = TestNamespace::new().unwrap();
    let other = "table inet braid {\n\tchain braid_gateway {\n\t}\n}\ntable ip braid_gateway {\n}\n";
    nft(&namespace, other);
    assert!(!namespace.run(gateway::sweep).unwrap());
    assert_eq!(nft(&namespace, "list ruleset\n"), other);
}

#[test]
fn a_path_with_a_small_packet_size_works() {
    let Some(lan) = Lan::new("small packets") else { return };
    lan.apply(plan());
    lan.mark(1);
    // Behind the server's router, packets of 1280 bytes at most.
    let far = TestNamespace::new().unwrap();
    lan.world.server.ip(&format!("link add dev far type veth peer name near netns {}", far.path));
    lan.world.server.sysctl("net.ipv6.conf.all.forwarding", "1");
    for (namespace, device, last) in [(&lan.world.server, "far", 1), (&far, "near", 2)] {
        namespace.ip(&format!("addr add 198.51.100.{last}/24 dev {device}"));
        namespace.ip(&format!("addr add fd98::{last}/64 dev {device} nodad"));
        namespace.ip(&format!("link set dev {device} up"));
    }
    far.ip("route add default via 198.51.100.1");
    far.ip("-6 route add default via fd98::1");
    lan.world.server.ip("link set dev far mtu 1280");
    let listener = far.run(|| TcpListener::bind("[::]:7000").unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            stream.write_all(format!("{:<40}", "far").as_bytes()).unwrap();
            std::thread::spawn(move || {
                std::io::copy(&mut stream.try_clone().unwrap().take(300_000), &mut std::io::sink()).map(|_| stream.write(b"!"))
            });
        }
    });
    for server in ["198.51.100.2", "fd98::2"] {
        let (mut stream, _) = lan.connect(server, LIMIT).unwrap();
        stream.write_all(&[7; 300_000]).unwrap();
        stream.read_exact(&mut [0]).unwrap();
    }

    // The link itself has small packets.
    for (namespace, device) in [(lan.router(), "link1"), (&lan.world.server, "peer1")] {
        namespace.ip(&format!("link set dev {device} mtu 1280"));
    }
    lan.apply(GatewayPlan { mtu: Some(1280), ..plan() });
    nft(
        &lan.world.server,
        "table inet test { chain test { type filter hook input priority 0
            ip saddr 10.77.1.2 tcp flags syn tcp option maxseg size 1240 counter
            ip6 saddr fd77:0:0:1::2 tcp flags syn tcp option maxseg size 1220 counter\n}\n}\n",
    );
    for server in [SERVER_V4, SERVER_V6] {
        let (mut stream, _) = lan.connect(server, LIMIT).unwrap();
        let mut writing = stream.try_clone().unwrap();
        let writer = std::thread::spawn(move || writing.write_all(&[7; 300_000]).unwrap());
        stream.read_exact(&mut vec![0; 300_000]).unwrap();
        writer.join().unwrap();
    }
    assert!(has_counted(&lan.world.server, "maxseg size 1240") && has_counted(&lan.world.server, "maxseg size 1220"));
}

#[test]
fn a_forgotten_flow_begins_anew() {
    let Some(lan) = Lan::new("forgetting a flow") else { return };
    lan.apply(plan());
    for (server, client, first, second) in
        [(SERVER_V4, "192.168.50.2", "10.77.1.2", "10.77.0.2"), (SERVER_V6, "fd50::2", "fd77:0:0:1::2", "fd77::2")]
    {
        let socket = lan.socket(client);
        let (local, remote) = (socket.local_addr().unwrap(), SocketAddr::new(server.parse().unwrap(), 7000));
        lan.mark(1);
        assert_eq!(lan.ask(&socket, server, LIMIT).as_deref(), Some(first));
        let router = lan.router();
        assert!(!router.run(move || forget(libc::IPPROTO_TCP, local, remote)));
        assert!(router.run(move || forget(libc::IPPROTO_UDP, local, remote)));
        assert!(!router.run(move || forget(libc::IPPROTO_UDP, local, remote)));
        lan.mark(0);
        assert_eq!(lan.ask(&socket, server, LIMIT).as_deref(), Some(second));

        lan.device.run(move || {
            let status = Command::new("ping").args(["-n", "-c", "1", "-W", "10", "-e", "4660", server]).output().unwrap().status;
            assert!(status.success());
        });
        let (echo, to) = (SocketAddr::new(local.ip(), 4660), SocketAddr::new(remote.ip(), 0));
        let protocol = if local.is_ipv4() { libc::IPPROTO_ICMP } else { libc::IPPROTO_ICMPV6 };
        assert!(router.run(move || forget(protocol, echo, to)));
        assert!(!router.run(move || forget(protocol, echo, to)));
    }
    // A protocol without ports: an unknown one.
    let unknown = lan.device.run(|| socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::RAW, Some(253.into())).unwrap());
    let to: SocketAddr = format!("{SERVER_V4}:0").parse().unwrap();
    unknown.send_to(b"?", &to.into()).unwrap();
    let client: SocketAddr = "192.168.50.2:5".parse().unwrap();
    assert!(lan.router().run(move || forget(253, client, to)));
    assert!(!lan.router().run(move || forget(253, client, to)));
}

fn forget(protocol: i32, client: SocketAddr, remote: SocketAddr) -> bool {
    gateway::forget(protocol as u8, client, remote).unwrap()
}

/// Runs `job` in this namespace on a thread of its own that `narrow` deprives of its privileges.
fn narrowed<T: Send + 'static>(namespace: &TestNamespace, narrow: fn(), job: impl FnOnce() -> T + Send + 'static) -> T {
    namespace.run(move || {
        let thread = std::thread::spawn(move || {
            narrow();
            job()
        });
        thread.join().unwrap()
    })
}

/// Keeps the five capabilities of the daemon (`privilege::narrow`).
fn become_daemon() {
    drop_privileges(1 << CAP_NET_ADMIN | 1 << 13 | 1 << 39 | 1 << 19 | 1 << 2).unwrap();
}

fn become_watchdog() {
    drop_privileges(1 << CAP_NET_ADMIN).unwrap();
}

/// Becomes a thread as in the service: another user, and one capability that programs inherit.
fn become_service() {
    const USER: libc::c_int = 65_534;
    let header = [0x2008_0522u32, 0];
    let mut sets = [0u32; 6];
    sets[..3].fill(1 << CAP_NET_ADMIN);
    // SAFETY: the raw system calls affect this thread only; they take integers, or read the arrays above.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0), 0);
        assert_eq!(libc::syscall(libc::SYS_setresgid, USER, USER, USER), 0);
        assert_eq!(libc::syscall(libc::SYS_setresuid, USER, USER, USER), 0);
        assert_eq!(libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()), 0);
        assert_eq!(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, CAP_NET_ADMIN, 0, 0), 0);
    }
    drop_privileges(1 << CAP_NET_ADMIN).unwrap();
}

#[test]
fn the_daemon_and_its_watchdog_have_the_privileges() {
    let Some(lan) = Lan::new("the gateway with few capabilities") else { return };
    let before = lan.settings();
    let router = lan.router();
    for (daemon, watchdog) in [(become_daemon as fn(), become_watchdog as fn()), (become_service, become_service)] {
        narrowed(router, daemon, || gateway::Keeper::default().apply(&plan())).unwrap();
        assert_eq!(lan.setting("ipv4/ip_forward"), "1");
        assert!(narrowed(router, watchdog, gateway::sweep).unwrap());
        assert_eq!(lan.settings(), before);
    }
    let denied = narrowed(router, || drop_privileges(0).unwrap(), || (gateway::Keeper::default().apply(&plan()), gateway::sweep()));
    let text = denied.0.unwrap_err().to_string();
    assert!(matches!(denied.1, Err(GatewayError::Tables { .. })) && text.contains("CAP_NET_ADMIN"), "{text}");
}

#[test]
fn nft_accepts_the_rules_and_takes_names_literally() {
    if !may_make_namespaces("checking rules with nft") {
        return;
    }
    let namespace = TestNamespace::new().unwrap();
    let odd: Vec<String> =
        (b'!'..=b'~').filter(|byte| !b"\"*\\".contains(byte)).map(|byte| format!("a{0}b{0}", char::from(byte))).collect();
    let nets = [None, Some("192.0.2.0/24"), Some("::/0"), Some("0.0.0.0/0"), Some("2001:db8::1/128")]
        .map(|net| net.map(|net| net.parse().unwrap()));
    let mut strict = Vec::new();
    for (client, destination) in nets.iter().flat_map(|client| nets.iter().map(move |destination| (*client, *destination))) {
        for (mac, port, links) in
            [(None, None, odd.clone()), (Some(Mac([0xff; 6])), Some(0), Vec::new()), (None, Some(65_535), names(&["eth0"]))]
        {
            strict.push(ForwardRule {
                unknown: Vec::new(),
                user: None,
                client,
                mac,
                destination,
                port,
                class_ports: port.into_iter().collect(),
                links: Some(links),
            });
        }
    }
    let closed = PerFamily { v4: true, v6: true };
    let all = GatewayPlan {
        own: Some(OwnRules {
            passed: ["br0".into(), "x\"y".into()].into(),
            local: vec![("l0".into(), ["192.0.2.0/24".parse().unwrap(), "2001:db8::/64".parse().unwrap()].into())],
            gateways: ["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()].into(),
            rules: vec![ForwardRule { user: Some(0), port: Some(53), ..ForwardRule::default() }],
        }),
        lan: odd.clone(),
        links: odd.clone(),
        bridges: odd.iter().cloned().collect(),
        slots: (0..32).map(|slot| (slot, LinkIndex(slot as u32 * 3 + 1))).collect(),
        mtu: Some(1500),
        ipv6: true,
        virtual_device: Some(VirtualDevice {
            name: "braid0".into(),
            addresses: vec!["192.0.2.5".parse().unwrap(), "2001:db8::1".parse().unwrap()],
        }),
        rules: strict.clone(),
        clients: ClientPorts {
            connections: PerFamily { v4: Some(4001), v6: Some(4002) },
            datagrams: PerFamily { v4: Some(4003), v6: Some(4004) },
        },
        closed,
        packets: closed,
    };
    let plans = [
        all.clone(),
        GatewayPlan::default(),
        GatewayPlan { lan: Vec::new(), ..all.clone() },
        GatewayPlan { links: Vec::new(), ..all.clone() },
        GatewayPlan { lan: names(&["lan"]), links: names(&["link"]), ..all.clone() },
    ];
    for plan in plans {
        let script = ruleset(&plan).unwrap();
        // Twice: without and with rules to replace.
        nft(&namespace, &script);
        nft(&namespace, &script);
    }
    nft(&namespace, &ruleset(&all).unwrap());
    let listed = nft(&namespace, "list table inet braid_gateway\n");
    assert!(odd.iter().all(|name| listed.contains(&format!("\"{name}\""))), "{listed}");
}

#[test]
fn regression_frames_between_ports_of_a_bridge_are_not_taken_for_forwarded_packets() {
    let Some(lan) = Lan::new("bridges that pass the firewall") else { return };
    let router = lan.router();
    if !router.run(|| std::path::Path::new("/proc/sys/net/bridge").exists()) {
        println!("skipped: this kernel has no br_netfilter, so no firewall sees the frames of a bridge");
        return;
    }
    router.sysctl("net.bridge.bridge-nf-call-ip6tables", "1");
    router.ip("link add dev br0 type bridge");
    router.ip("link set dev br0 up");
    let ports = [1, 2].map(|number| {
        let namespace = TestNamespace::new().unwrap();
        router.ip(&format!("link add dev port{number} type veth peer name eth0 netns {}", namespace.path));
        router.ip(&format!("link set dev port{number} master br0 up"));
        namespace.ip(&format!("addr add fd60::{number}/64 dev eth0 nodad"));
        namespace.ip("link set dev eth0 up");
        namespace
    });
    let [from, to] = &ports;
    let passes = |limit: Duration| {
        let (receiver, target) = to.run(|| {
            let socket = UdpSocket::bind("[fd60::2]:0").unwrap();
            (socket.try_clone().unwrap(), socket.local_addr().unwrap())
        });
        receiver.set_read_timeout(Some(LOST)).unwrap();
        let end = Instant::now() + limit;
        while Instant::now() < end {
            from.run(move || UdpSocket::bind("[fd60::1]:0").unwrap().send_to(b"?", target)).unwrap();
            if receiver.recv(&mut [0; 10]).is_ok() {
                return true;
            }
        }
        false
    };
    assert!(passes(LIMIT), "the bridge works");
    // Braid turns on forwarding, so nobody outside may use it.
    lan.apply(GatewayPlan { bridges: Default::default(), ..plan() });
    assert!(!passes(LOST), "the firewall sees the frames");
    lan.apply(plan());
    assert!(passes(LIMIT));
}
