//! `carry = "bond"` for protocols other than TCP and UDP: packets of devices behind a gateway go through a relay with `--packets`.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::bonded::{Relay, good_paths};
use crate::support::gateway::*;
use crate::support::user::two_links;
use crate::support::*;
use braid_bond::{FlowKind, FlowPolicy, Open, Target};
use braid_lab::{Builder, Filter, Lab, LinkSpec, Namespace, ms};
use braid_peer::invite::Invite;
use braid_peer::keys::KeyPair;
use braid_transport::FromRelay;
use braid_transport::client::{Client, ClientLink, Peer};
use bytes::Bytes;
use socket2::{Domain, Protocol, Socket, Type};

const CONFIG: &str = "carry = \"bond\"\n[gateway]\nlan = [\"lan0\"]\n";
/// The relay's own addresses towards the host behind it.
const OUTSIDE: [&str; 2] = ["198.51.100.1", "2001:db8:100::1"];
/// Networks that the lab's relay must allow, because they are for documentation.
const ALLOW: [&str; 6] = ["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32", "--allow", "198.51.100.0/24"];
/// A number for experiments (RFC 3692).
const UNKNOWN: i32 = 253;

/// Two links, a LAN, a host behind the server, and a system there that forwards nothing by itself.
fn lab_with_far() -> Lab {
    forwarding_nothing(two_links().lan(1).far(1500))
}

/// Starts a lab in which the server forwards nothing by itself: what reaches the far host came through the relay.
fn forwarding_nothing(lab: Builder) -> Lab {
    let lab = lab.start().unwrap();
    for setting in ["net.ipv4.ip_forward=0", "net.ipv6.conf.all.forwarding=0"] {
        server(&lab, &format!("sysctl -qw {setting}"));
    }
    lab
}

fn start_relay<'a>(lab: &'a Lab, more: &[&str]) -> Relay<'a> {
    Relay::start_told(lab, &[&ALLOW[..], more].concat())
}

/// A relay that takes packets, and a daemon whose clients' packets go there.
fn start<'a>(lab: &'a Lab, config: &str) -> (Relay<'a>, Up<'a>) {
    let relay = start_relay(lab, &["--packets"]);
    let up = relay.join(config);
    eventually("both paths are good", || good_paths(&up) == 2);
    await_packets(lab);
    (relay, up)
}

/// Waits until packets go through the relay: directly none leaves the server.
fn await_packets(lab: &Lab) {
    for host in FAR {
        eventually("a ping goes through the relay", || ping(lab, host, "-c 1 -W 1").contains(" 1 received"));
    }
}

/// Runs ping on the first device and returns what it says.
fn ping(lab: &Lab, host: &str, options: &str) -> String {
    text(&on(lab, 0, &format!("ping {options} {host}")).output().unwrap().stdout)
}

/// Runs a program in a namespace; returns its output, whether or not it succeeds.
fn said(namespace: &Namespace, command: &str) -> String {
    let mut words = command.split_whitespace();
    let output = namespace.command(words.next().unwrap()).unwrap().args(words).stdin(Stdio::null()).output().unwrap();
    text(&output.stdout) + &text(&output.stderr)
}

/// Counts the echo requests that reach the far host: from the relay, and from anybody else.
fn count_requests(lab: &Lab) {
    let rules = [
        "table inet seen {",
        "counter relay {}",
        "counter other {}",
        "chain in {",
        "type filter hook input priority 0;",
        "ip saddr 198.51.100.1 icmp type echo-request counter name relay accept",
        "ip6 saddr 2001:db8:100::1 icmpv6 type echo-request counter name relay accept",
        "icmp type echo-request counter name other",
        "icmpv6 type echo-request counter name other",
        "}",
        "}",
        "",
    ];
    let mut nft = lab.far().command("nft").unwrap().args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    nft.stdin.take().unwrap().write_all(rules.join("\n").as_bytes()).unwrap();
    assert!(nft.wait().unwrap().success());
}

/// Echo requests at the far host: from the relay, and from anybody else.
fn requests(lab: &Lab) -> [u64; 2] {
    ["relay", "other"].map(|name| {
        let listed = said(lab.far(), &format!("nft list counter inet seen {name}"));
        let count = listed.split_whitespace().skip_while(|word| *word != "packets").nth(1);
        count.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{listed}"))
    })
}

/// The flows of `braid switch flows`.
fn switch_flows(up: &Up<'_>) -> Vec<serde_json::Value> {
    let output = up.braid(&["switch", "flows", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["flows"].as_array().unwrap().clone()
}

/// Sends back what comes over an unknown protocol from the relay, until it is dropped.
struct Echo {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Echo {
    fn start(lab: &Lab) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = OUTSIDE.map(|relay| {
            // A connected socket receives from the relay only.
            let mut socket = lab.far().run(|| raw(relay.parse().unwrap())).unwrap();
            let stopped = stop.clone();
            thread::spawn(move || {
                let mut buffer = [0; 2000];
                while !stopped.load(Ordering::Relaxed) {
                    if let Ok(length) = socket.read(&mut buffer) {
                        let _ = socket.write_all(payload(&buffer[..length]));
                    }
                }
            })
        });
        Self { stop, threads: threads.into() }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// A socket for an unknown protocol, connected to a host, of the calling thread's namespace.
fn raw(to: IpAddr) -> Socket {
    let to = SocketAddr::new(to, 0);
    let socket = Socket::new(Domain::for_address(to), Type::RAW, Some(Protocol::from(UNKNOWN))).unwrap();
    socket.set_read_timeout(Some(ms(100))).unwrap();
    socket.connect(&to.into()).unwrap();
    socket
}

/// What follows the header, which IPv4 shows to raw sockets and IPv6 does not.
fn payload(received: &[u8]) -> &[u8] {
    if received.first() == Some(&0x45) { &received[20..] } else { received }
}

#[test]
fn pings_and_unknown_protocols_of_a_device_go_through_the_relay_in_both_families() {
    if !able() {
        return;
    }
    let lab = lab_with_far();
    count_requests(&lab);
    let (_relay, up) = start(&lab, CONFIG);
    let _echo = Echo::start(&lab);
    for host in FAR {
        let watches = watch_all(&lab, Filter::to(host.parse::<IpAddr>().unwrap()));
        let before = requests(&lab);
        assert!(ping(&lab, host, "-c 3 -i 0.2 -W 2").contains(" 3 received"));
        assert_eq!(requests(&lab), [before[0] + 3, 0], "{host}: the far host sees the relay");
        let listed = switch_flows(&up);
        let flow = listed.iter().find(|flow| flow["remote"].as_str().is_some_and(|remote| remote.contains(host)));
        let flow = flow.unwrap_or_else(|| panic!("{host} is not listed: {listed:?}"));
        assert_eq!((&flow["carry"], &flow["peer"]), (&"bond".into(), &"home".into()), "{flow}");
        assert!(flow["rx_bytes"].as_u64() > Some(0) && flow["client"].is_string(), "{flow}");
        // Larger than every link's packets. Over IPv6 the first answer may find the limit of the path.
        assert!(!ping(&lab, host, "-c 5 -i 0.2 -W 2 -s 4000").contains(" 0 received"), "{host}: a large ping passes");
        let mut unknown = lab.device(0).run(|| raw(host.parse().unwrap())).unwrap();
        let mut buffer = [0; 2000];
        eventually("an unknown protocol is answered", || {
            unknown.write_all(b"what is this?").unwrap();
            unknown.read(&mut buffer).is_ok_and(|length| payload(&buffer[..length]) == b"what is this?")
        });
        assert_eq!(packets(&lab, &watches), [0, 0], "{host}: nothing goes there directly");
    }
    // A route with a smaller limit is found by the device, as over any network: the packets are as long as the relay's device takes them.
    let probed = ping(&lab, FAR[0], "-c 2 -i 0.2 -W 1 -M do -s 1450");
    assert!(probed.contains("mtu") && probed.contains("1400"), "{probed}");
    assert!(ping(&lab, FAR[0], "-c 2 -i 0.2 -W 1 -M do -s 1372").contains(" 2 received"));
    // The device is told of a packet whose time to live ends on the way.
    let expired = ping(&lab, FAR[0], "-c 2 -i 0.2 -W 1 -t 2");
    assert!(expired.contains("Time to live exceeded"), "{expired}");
    assert_eq!(up.status().unwrap()["peers"][0]["packets"], true);
    let client = clients(&up);
    assert!(client.iter().any(|client| client["flows"].as_u64() > Some(0)), "{client:?}");
}

#[test]
fn links_with_a_small_mtu_carry_whole_packets() {
    if !able() {
        return;
    }
    let link = |name| LinkSpec::new(name).mtu(1280);
    let lab = forwarding_nothing(Lab::builder().link(link("wlan0")).link(link("lte0")).lan(1).far(1500));
    let (_relay, _up) = start(&lab, CONFIG);
    for (host, size) in FAR.iter().zip([1372, 1352]) {
        let pinged = ping(&lab, host, &format!("-c 3 -i 0.2 -W 2 -M do -s {size}"));
        assert!(pinged.contains(" 3 received"), "packets of 1,400 bytes: {pinged}");
    }
}

#[test]
fn a_ping_of_a_device_goes_on_while_links_are_cut() {
    if !able() {
        return;
    }
    let lab = lab_with_far();
    let (_relay, up) = start(&lab, CONFIG);
    for (link, name) in ["wlan0", "lte0"].into_iter().enumerate() {
        let pinging = on(&lab, 0, &format!("ping -i 0.05 -c 80 -W 1 {}", FAR[0])).stdout(Stdio::piped()).spawn().unwrap();
        thread::sleep(Duration::from_secs(1));
        lab.dark(link).unwrap();
        let output = text(&pinging.wait_with_output().unwrap().stdout);
        let answered = output.lines().filter_map(|line| line.split("icmp_seq=").nth(1)?.split(' ').next()?.parse::<u32>().ok());
        let mut last = 0;
        let gap = answered.chain([81]).fold(0, |gap, number| gap.max(number - std::mem::replace(&mut last, number).min(number)));
        println!("{name} cut: {} ms of silence", gap * 50);
        assert!(gap < 20, "{name}: {gap} pings in a row are missing:\n{output}");
        lab.bright(link).unwrap();
        eventually("both paths are good", || good_paths(&up) == 2);
    }
}

#[test]
fn without_the_right_and_without_the_relay_packets_go_direct() {
    if !able() {
        return;
    }
    let lab = two_links().lan(1).far(1500).start().unwrap();
    count_requests(&lab);
    let relay = start_relay(&lab, &[]);
    let up = relay.join(CONFIG);
    eventually("both paths are good", || good_paths(&up) == 2);
    for host in FAR {
        assert!(ping(&lab, host, "-c 3 -i 0.2 -W 2").contains(" 3 received"));
    }
    assert_eq!(requests(&lab), [0, 6], "this relay takes no packets");
    assert!(switch_flows(&up).iter().all(|flow| flow["carry"] == "direct"));
    assert_eq!(up.status().unwrap()["peers"][0]["packets"], false);
    assert!(!client(&lab, "ip link show").contains("braid-packets"));
    drop(relay);
    // The same relay again, with packets.
    let relay = start_relay(&lab, &["--packets"]);
    eventually("packets go through the relay", || ping(&lab, FAR[0], "-c 1 -W 1").contains(" 1 received") && requests(&lab)[0] > 0);
    // One flow from here to the end.
    let pinging = on(&lab, 0, &format!("ping -i 0.1 -W 1 {}", FAR[0])).stdout(Stdio::null()).spawn().unwrap();
    let begun = requests(&lab)[0];
    eventually("it goes through the relay", || requests(&lab)[0] > begun + 2);
    relay.signal("KILL");
    let direct = requests(&lab)[1];
    let took = eventually("the running ping goes direct", || requests(&lab)[1] > direct + 2);
    println!("direct {took:?} after the relay was killed");
    eventually("its device is gone", || !client(&lab, "ip link show").contains("braid-packets"));
    let mut pinging = pinging;
    let _ = pinging.kill();
    let _ = pinging.wait();
}

#[test]
fn rules_hold_for_packets_too() {
    if !able() {
        return;
    }
    let lab = two_links().lan(1).far(1500).start().unwrap();
    count_requests(&lab);
    let direct = "[[app]]\nmatch = { destination = \"198.51.100.0/24\" }\ncarry = \"direct\"\n";
    let strict = "[[app]]\nmatch = { destination = \"2001:db8:100::/48\" }\nlinks = [\"lte0\"]\n";
    let relay = start_relay(&lab, &["--packets"]);
    let up = relay.join(&format!("{CONFIG}{direct}{strict}"));
    // The relay's own host is no destination for packets: the relay says so, and flows there go direct.
    eventually("the relay has refused a packet", || {
        ping(&lab, "203.0.113.10", "-c 1 -W 1");
        up.log().contains("the relay forwards no packets there")
    });
    eventually("its address is reached directly", || ping(&lab, "203.0.113.10", "-c 1 -W 1").contains(" 1 received"));
    let watches = watch_all(&lab, Filter::to(FAR[1].parse::<IpAddr>().unwrap()));
    for host in FAR {
        assert!(ping(&lab, host, "-c 3 -i 0.2 -W 2").contains(" 3 received"), "{host}");
    }
    assert_eq!(requests(&lab), [0, 6]);
    let far = |flow: &&serde_json::Value| FAR.iter().any(|host| flow["remote"].as_str().is_some_and(|remote| remote.contains(host)));
    assert!(switch_flows(&up).iter().filter(far).all(|flow| flow["carry"] == "direct"));
    assert_eq!(packets(&lab, &watches), [0, 3], "the strict rule's link");
}

/// Acts as a client of the relay that follows no rules.
fn as_client(lab: &Lab, relay: &Relay<'_>, act: impl AsyncFnOnce(&Client) + Send) {
    let invite = Invite::parse(&relay.invite()).unwrap();
    let (addresses, token) = (invite.addresses().to_vec(), Some(*invite.token.reveal()));
    let peer = Peer { addresses, key: Some(invite.relay), token, name: "hostile".into() };
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = Client::start(peer, Some(&KeyPair::generate().unwrap()), None).unwrap();
            let v4 = Some("10.77.0.2".parse().unwrap());
            client.set_links(vec![ClientLink { number: 0, device: None, v4, v6: None, backup: false, dead: Default::default() }]);
            assert!(client.wait_until_up(|| Instant::now() + LIMIT, |_| false).await);
            act(&client).await;
        });
    };
    lab.client().run(work).unwrap();
}

/// An ICMP echo request over IPv4, with valid checksums.
fn echo_request(source: Ipv4Addr, to: Ipv4Addr, number: u16) -> Vec<u8> {
    let sum = |bytes: &[u8]| {
        let total: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum();
        !((total & 0xffff) + (total >> 16)) as u16
    };
    let mut icmp = vec![8, 0, 0, 0, 0x77, 0x77];
    icmp.extend(number.to_be_bytes());
    let check = sum(&icmp);
    icmp[2..4].copy_from_slice(&check.to_be_bytes());
    let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0];
    packet.extend(source.octets());
    packet.extend(to.octets());
    let check = sum(&packet);
    packet[10..12].copy_from_slice(&check.to_be_bytes());
    packet.extend(icmp);
    packet
}

#[test]
fn a_relay_drops_spoofed_sources_and_forbidden_destinations() {
    if !able() {
        return;
    }
    let lab = lab_with_far();
    count_requests(&lab);
    // A network beside the far host's, which the relay must not open.
    server(&lab, "ip address add 192.168.99.1/24 dev far0");
    assert!(lab.far().command("ip").unwrap().args("address add 192.168.99.2/24 dev eth0".split(' ')).status().unwrap().success());
    let relay = start_relay(&lab, &["--packets", "--packets-net", "10.200.0.0/24"]);
    let far: Ipv4Addr = FAR[0].parse().unwrap();
    as_client(&lab, &relay, async |client| {
        assert!(client.takes_packets());
        let flow = client.open_packets().await.unwrap();
        let own = flow.addresses().v4.unwrap();
        assert_eq!(own.octets()[..3], [10, 200, 0]);
        let send = |packet: Vec<u8>| flow.flow().send(Bytes::from(packet));
        let other = Ipv4Addr::from(u32::from(own) + 1);
        for source in [other, Ipv4Addr::new(203, 0, 113, 20), far, Ipv4Addr::new(10, 200, 0, 1), Ipv4Addr::UNSPECIFIED] {
            send(echo_request(source, far, 1));
        }
        let forbidden = [[192, 168, 99, 2], [127, 0, 0, 1], [203, 0, 113, 20], [10, 200, 0, 1], [169, 254, 169, 254], [224, 0, 0, 1]];
        let forbidden = forbidden.map(Ipv4Addr::from).into_iter().chain([other]);
        for host in forbidden.clone() {
            send(echo_request(own, host, 2));
        }
        // Broken packets, and messages that are none.
        let mut options = echo_request(own, far, 3);
        options[0] = 0x46;
        send(options);
        for cut in [1, 19, 20, 27] {
            send(echo_request(own, far, 3)[..cut].to_vec());
        }
        send(vec![]);
        send(vec![0xff; 2000]);
        // What is allowed passes, after all of these.
        let mut told = std::collections::BTreeSet::new();
        let answered = async {
            loop {
                send(echo_request(own, far, 4));
                let Ok(received) = tokio::time::timeout(ms(500), flow.receive()).await else { continue };
                match received.unwrap() {
                    FromRelay::Closed(host) => drop(told.insert(host)),
                    FromRelay::Packet(packet) => return assert_eq!((packet[9], &packet[12..16]), (1, &far.octets()[..])),
                }
            }
        };
        tokio::time::timeout(LIMIT, answered).await.expect("what is allowed passes");
        assert_eq!(told, forbidden.map(IpAddr::from).collect());
    });
    let [from_relay, other] = requests(&lab);
    assert!(from_relay > 0 && other == 0, "{from_relay}, {other}");
    // A relay that was started without the option refuses such a flow, also of a client that does not ask whether it may.
    drop(relay);
    let relay = start_relay(&lab, &[]);
    as_client(&lab, &relay, async |client| {
        assert!(!client.takes_packets());
        let target = Target::Address((Ipv6Addr::UNSPECIFIED, 0).into());
        let flow = client.open(Open { kind: FlowKind::Packets, target, policy: FlowPolicy::default() }).unwrap();
        assert_eq!(flow.opened().await.unwrap_err().0, braid_bond::codes::NOT_OPENED);
    });
}

#[test]
fn a_relay_reaches_neither_the_gateway_nor_its_clients() {
    if !able() {
        return;
    }
    let lab = lab_with_far();
    let (_relay, _up) = start(&lab, CONFIG);
    let own = client(&lab, "ip -o -4 address show dev braid-packets");
    let own = own.split_whitespace().skip_while(|word| *word != "inet").nth(1).unwrap().split('/').next().unwrap().to_owned();
    let dropped = || {
        let rules = client(&lab, "nft list chain inet braid_gateway input");
        let rule = rules.lines().find(|line| line.contains("braid-packets")).unwrap();
        rule.split_whitespace().skip_while(|word| *word != "packets").nth(1).unwrap().parse::<u64>().unwrap()
    };
    assert_eq!(dropped(), 0);
    // The relay's system sends this to the gateway's address over its device, and the gateway would answer.
    let pinged = said(lab.server(), &format!("ping -c 3 -i 0.2 -W 1 {own}"));
    assert!(pinged.contains(" 0 received"), "{pinged}");
    assert_eq!(dropped(), 3, "they came");
    // An answer that nobody waits for, to a client behind the gateway.
    server(&lab, "ip route add 192.168.7.0/24 dev braid-relay");
    assert!(said(lab.server(), "ping -c 2 -i 0.2 -W 1 192.168.7.20").contains(" 0 received"));
    assert_eq!(dropped(), 3);
    assert!(ping(&lab, FAR[0], "-c 1 -W 2").contains(" 1 received"), "what a client asks for is answered");
}

/// What a relay may leave behind: firewall rules, the settings that concern forwarding, and its device.
fn relay_traces(lab: &Lab) -> String {
    let keys = "net.ipv4.ip_forward net.ipv6.conf.all.forwarding net.ipv6.conf.l0.accept_ra net.ipv4.conf.l0.forwarding";
    said(lab.server(), "nft list ruleset") + &said(lab.server(), &format!("sysctl {keys}")) + &said(lab.server(), "ip -o link show")
}

#[test]
fn nothing_is_left_after_the_end_of_a_relay_or_of_the_daemon() {
    if !able() {
        return;
    }
    let lab = lab_with_far();
    let (at_relay, at_client) = (relay_traces(&lab), traces(&lab));
    for signal in ["TERM", "KILL"] {
        let (mut relay, mut up) = start(&lab, CONFIG);
        assert!(relay_traces(&lab) != at_relay);
        up.signal(signal);
        up.wait_end();
        eventually("its device is gone", || !client(&lab, "ip link show").contains("braid-packets"));
        assert!(signal == "TERM" || up.braid(&["down"]).status.success());
        eventually("nothing is left by the daemon", || traces(&lab) == at_client);
        let began = Instant::now();
        relay.signal(signal);
        relay.child.wait().unwrap();
        eventually("nothing is left by the relay", || relay_traces(&lab) == at_relay);
        assert!(
            signal == "KILL" || began.elapsed() < Duration::from_secs(20),
            "packets do not delay the relay's end: {:?}",
            began.elapsed()
        );
        drop(up);
        // The next daemon joins the next relay.
        for state in ["relay", "braid"] {
            std::fs::remove_dir_all(lab.directory().join(state)).unwrap();
        }
    }
}

#[test]
fn a_relay_without_privilege_says_what_it_needs() {
    if !able() {
        return;
    }
    let lab = lab_with_far();
    let before = relay_traces(&lab);
    let state = lab.directory().join("state");
    let run = |prefix: &[&str], more: &[&str]| {
        let mut words = prefix.iter().map(|word| (*word).to_owned()).chain([braid().display().to_string()]);
        let mut command = lab.server().command(words.next().unwrap()).unwrap();
        command.args(words).args(["relay", "--packets", "--state-dir"]).arg(&state).args(more).stdin(Stdio::null());
        let output = command.output().unwrap();
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let said = run(&["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"], &[]);
    assert!(said.contains("braid-relay") && said.contains("CAP_NET_ADMIN"), "{said}");
    let said = run(&["timeout", "60"], &["--packets-net", "8.8.8.0/24"]);
    assert!(said.contains("8.8.8.0/24") && said.contains("198.18.0.0/15"), "{said}");
    assert_eq!(relay_traces(&lab), before);
    // Two relays of one network namespace.
    let relay = start_relay(&lab, &["--packets"]);
    let said = run(&["timeout", "60"], &["--listen", "127.0.0.1:5858"]);
    assert!(said.contains("another process has a device of this name"), "{said}");
    drop(relay);
    eventually("nothing is left", || relay_traces(&lab) == before);
}
