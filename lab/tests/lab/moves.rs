//! Running direct flows change their link by mirrored rewriting: a program asks the daemons of both hosts for it over their APIs.

use std::fs;
use std::iter;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::gateway::{FAR, traces};
use crate::support::moves::*;
use crate::support::*;
use braid_decide::tunnel::SERVER_DEVICE;
use braid_lab::{Filter, Lab, LinkSpec, firewall, ms, nat, nft};
use braid_model::Protocol;
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

/// What moves a flow between `own` and `server`, so that packets have `other` instead of `own`: for the client and for the server.
fn requests([own, server, other]: [SocketAddr; 3], lease: Option<u64>, sends: bool) -> [Value; 2] {
    let of = |own: [SocketAddr; 2], wire: [SocketAddr; 2]| {
        let ends = |[source, destination]: [SocketAddr; 2]| json!({ "source": source, "destination": destination });
        json!({ "flows": [{ "own": ends(own), "wire": ends(wire) }], "lease_ms": lease, "sends": sends })
    };
    [of([own, server], [other, server]), of([server, own], [server, other])]
}

fn address_of(link: usize, family: &SocketAddr) -> IpAddr {
    if family.is_ipv4() { format!("10.77.{link}.2") } else { format!("fd77:0:0:{link}::2") }.parse().unwrap()
}

#[test]
fn a_direct_flow_leaves_a_link_that_dies_and_comes_back() {
    if !able() {
        return;
    }
    let lab = lab(2);
    mirror(lab.host(), 7000);
    let before = traces(&lab);
    let far = Far::start(&lab);
    let near = Up::start(&lab, "scheduler = \"round-robin\"\nreconnect_after = \"never\"\n");
    for server in [remote(10, 7000), remote6(10, 7000)] {
        let (mut stream, from) = open(&lab, server);
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let own = stream.local_addr().unwrap();
        let to = 1 - from;
        exchange(&mut stream, 1, 100_000);
        let other = SocketAddr::new(address_of(to, &server), own.port());
        let ask = |lease, sends| {
            let [here, there] = requests([own, server, other], lease, sends);
            for (status, answer) in [far.api("POST /v1/rewrites", &there), near.api("POST /v1/rewrites", &here)] {
                assert_eq!(status, 200, "{answer}");
            }
            let is_active = |listed: (u16, Value)| listed.1["rewrites"][0]["active"] == true;
            if lease.is_some() {
                eventually("both rewrite the flow", || {
                    is_active(far.api("GET /v1/rewrites", &Value::Null)) && is_active(near.api("GET /v1/rewrites", &Value::Null))
                });
            }
        };
        // An end that receives what it does not expect would end the connection.
        ask(Some(60_000), false);
        exchange(&mut stream, 2, 100_000);
        ask(Some(60_000), true);
        uses(&lab, &mut stream, to);
        lab.dark(from).unwrap();
        exchange(&mut stream, 100, 200_000);
        lab.bright(from).unwrap();
        ask(None, false);
        uses(&lab, &mut stream, from);
        lab.dark(to).unwrap();
        exchange(&mut stream, 200, 100_000);
        lab.bright(to).unwrap();
    }
    drop(near);
    drop(far);
    assert_eq!(traces(&lab), before);
}

#[test]
fn a_socket_that_its_program_bound_does_not_move() {
    if !able() {
        return;
    }
    let lab = lab(2);
    mirror(lab.host(), 7000);
    let near = Up::start(&lab, "scheduler = \"round-robin\"\n");
    let server = remote(10, 7000);
    let mut stream: TcpStream = lab
        .client()
        .run(|| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.bind_device(Some(b"wlan0")).unwrap();
            socket.connect(&server.into()).unwrap();
            socket.into()
        })
        .unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let (own, other) = (stream.local_addr().unwrap(), "10.77.1.2:40000".parse().unwrap());
    assert_eq!(near.api("POST /v1/rewrites", &requests([own, server, other], Some(60_000), false)[0]).0, 200);
    // The daemon makes the device after its answer: until then, `ip link show braid-moves` would fail.
    let is_up = |device: &str| device.contains("braid-moves") && device.contains("UP");
    eventually("the device is there", || client(&lab, "ip -o link show").lines().any(is_up));
    let rounds = (1..20).filter(|round| {
        exchange(&mut stream, *round, 1000);
        near.api("GET /v1/rewrites", &Value::Null).1["rewrites"][0]["active"] == true
    });
    assert_eq!(rounds.count(), 0);
}

#[test]
fn nothing_is_left_after_a_kill_and_the_next_daemon_frees_the_sockets() {
    if !able() {
        return;
    }
    let lab = lab(2);
    mirror(lab.host(), 7000);
    let before = traces(&lab);
    let config = "scheduler = \"round-robin\"\n";
    let mut near = Up::start(&lab, config);
    let server = remote(10, 7000);
    let (stream, from) = open(&lab, server);
    let own = stream.local_addr().unwrap();
    let other = SocketAddr::new(address_of(1 - from, &server), own.port());
    let [here, _] = requests([own, server, other], Some(60_000), true);
    assert_eq!(near.api("POST /v1/rewrites", &here).0, 200);
    let mark =
        || client(&lab, "ss -tneH dport = :7000").split("fwmark:").nth(1).map(|rest| rest.split_whitespace().next().unwrap().to_owned());
    eventually("the socket sends through Braid's device", || mark().as_deref() == Some("0xb1d000fb"));
    near.signal("KILL");
    near.wait_end();
    eventually("the watchdog has removed everything", || traces(&lab) == before);
    exchange(&mut open(&lab, server).0, 1, 1000);
    drop(near);
    let near = Up::start(&lab, config);
    eventually("the socket has no mark", || mark().is_none());
    assert_eq!(near.api("GET /v1/rewrites", &Value::Null).1["rewrites"], json!([]));
    drop(near);
    assert_eq!(traces(&lab), before);
}

#[test]
fn requests_for_what_is_not_this_machines_are_refused() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let near = Up::start(&lab, "scheduler = \"round-robin\"\n");
    let (server, own): (SocketAddr, SocketAddr) = (remote(10, 7000), "10.77.0.2:40000".parse().unwrap());
    let other: SocketAddr = "10.77.1.2:40000".parse().unwrap();
    let post = |own, server, other, lease| near.api("POST /v1/rewrites", &requests([own, server, other], lease, true)[0]);
    let foreign: SocketAddr = "10.77.1.77:40000".parse().unwrap();
    for (what, (status, answer), word) in [
        ("another host's address on the way", post(own, server, foreign, Some(1000)), "10.77.1.77 is not an address of this machine"),
        ("another host's flow", post(foreign, server, other, Some(1000)), "10.77.1.77 is not an address of this machine"),
        ("two families", post(own, remote6(10, 7000), other, Some(1000)), "same family"),
        ("to this machine", post(own, other, other, Some(1000)), "not the address of another host"),
        ("no lease", post(own, server, other, Some(0)), "a lease is between"),
        ("a lease of days", post(own, server, other, Some(86_400_000)), "a lease is between"),
    ] {
        assert_eq!(status, 400, "{what}: {answer}");
        assert!(answer["detail"].as_str().unwrap().contains(word), "{what}: {answer}");
    }
    assert_eq!(near.api("GET /v1/rewrites", &Value::Null).1["rewrites"], json!([]));
    assert_eq!(post(own, server, other, Some(60_000)).0, 200);
    let taken = post(SocketAddr::new(own.ip(), 40_001), server, other, Some(1000));
    assert_eq!(taken.0, 409, "{}", taken.1);
}

#[test]
fn two_hosts_move_a_running_flow_by_themselves() {
    if !able() {
        return;
    }
    let lab = lab(2);
    mirror(lab.host(), 7000);
    let before = traces(&lab);
    let far = Far::start(&lab);
    let relay = Relay::start(&lab);
    let near = Up::start(&lab, MOVES);
    for server in [remote(10, 7000), remote6(10, 7000)] {
        let (mut stream, from) = open(&lab, server);
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        exchange(&mut stream, 1, 100_000);
        let id = movable(&near, server);
        let moved = near.braid(&["move", &id, "--to", NAMES[1 - from]]);
        assert!(moved.status.success(), "{}", text(&moved.stderr));
        uses(&lab, &mut stream, 1 - from);
        let explained = near.explain_flow(&id);
        assert!(explained.contains("it has moved to") && explained.contains("does not encrypt"), "{explained}");
        // Without a command, when the link dies.
        lab.dark(1 - from).unwrap();
        exchange(&mut stream, 200, 200_000);
        lab.bright(1 - from).unwrap();
        uses(&lab, &mut stream, from);
        drop(stream);
    }
    drop(near);
    drop(relay);
    drop(far);
    assert_eq!(traces(&lab), before);
}

/// Both hosts, a flow that has moved to another link than its own, and that link.
struct Moved<'a> {
    near: Up<'a>,
    _relay: Relay,
    far: Far,
    stream: TcpStream,
    server: SocketAddr,
    id: String,
    to: usize,
}

fn moved(lab: &Lab) -> Moved<'_> {
    mirror(lab.host(), 7000);
    let far = Far::start(lab);
    let relay = Relay::start(lab);
    let near = Up::start_told(lab, MOVES, &lab.directory().join("braid/state"), &["-v"]);
    let server = remote(10, 7000);
    let (mut stream, from) = open(lab, server);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    exchange(&mut stream, 1, 1000);
    let id = movable(&near, server);
    assert!(near.braid(&["move", &id, "--to", NAMES[1 - from]]).status.success());
    eventually("it has moved", || near.explain_flow(&id).contains("it has moved to"));
    exchange(&mut stream, 2, 1000);
    Moved { near, _relay: relay, far, stream, server, id, to: 1 - from }
}

#[test]
fn a_flow_leaves_a_link_that_loses_its_address() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let mut flow = moved(&lab);
    for down in [flow.to, 1 - flow.to] {
        client(&lab, &format!("ip link set {} down", NAMES[down]));
        for round in 3..6 {
            exchange(&mut flow.stream, round, 50_000);
        }
        client(&lab, &format!("ip link set {} up", NAMES[down]));
        client(&lab, &format!("ip addr replace 10.77.{down}.2/24 dev {}", NAMES[down]));
        client(&lab, &format!("ip route replace default via 10.77.{down}.1 dev {} metric {}", NAMES[down], 100 + down));
        eventually("the link is used again", || text(&flow.near.braid(&["links"]).stdout).matches(" up ").count() >= 2);
    }
}

#[test]
fn a_moved_flow_survives_the_death_of_either_daemon() {
    if !able() {
        return;
    }
    for kills_near in [false, true] {
        let lab = lab(2);
        let before = traces(&lab);
        let mut flow = moved(&lab);
        if kills_near {
            flow.near.signal("KILL");
            flow.near.wait_end();
        } else {
            flow.far.0.kill().unwrap();
        }
        // Each end learns by the other one's resets that it is rewritten no more, and they do not end the flow.
        for round in 3..8 {
            exchange(&mut flow.stream, round, 50_000);
        }
        let links = watch_all(&lab, Filter { protocol: Some(Protocol::Tcp), port: Some(7000), ..Filter::default() });
        exchange(&mut flow.stream, 9, 50_000);
        assert_eq!(packets(&lab, &links)[flow.to], 0, "it is on its own link");
        if !kills_near {
            eventually("it is explained", || flow.near.explain_flow(&flow.id).contains("cannot move"));
            assert_eq!(flow.server.port(), 7000);
        }
        drop(flow);
        eventually("nothing is left", || traces(&lab) == before);
    }
}

#[test]
fn a_flow_that_moves_every_second_loses_nothing() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let mut flow = moved(&lab);
    let mut to = flow.to;
    for round in 10..20 {
        to = 1 - to;
        assert!(flow.near.braid(&["move", &flow.id, "--to", NAMES[to]]).status.success());
        exchange(&mut flow.stream, round, 300_000);
        eventually("it has moved", || {
            let explained = flow.near.explain_flow(&flow.id);
            !explained.contains("is moving") && explained.contains("it has moved to") == (to == flow.to)
        });
    }
}

/// Two links to a host behind the server, which plays a firewall or NAT on the second one.
fn lab_with_middlebox() -> Lab {
    let lab = NAMES[..2].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name))).far(1500).start().unwrap();
    mirror(lab.host(), 7000);
    lab
}

/// Flows over the first link, half of them in IPv6.
struct Flows<'a> {
    near: Up<'a>,
    _relay: Relay,
    _far: Far,
    streams: Vec<TcpStream>,
    /// Of those that are the first of their family.
    ids: [String; 2],
}

impl Flows<'_> {
    fn start(lab: &Lab, count: usize) -> Flows<'_> {
        let far = Far::start(lab);
        let relay = Relay::start(lab);
        let near = Up::start(lab, &format!("reconnect_after = \"never\"\n{MOVES}"));
        let servers: [SocketAddr; 2] = FAR.map(|host| (host.parse::<IpAddr>().unwrap(), 7000).into());
        let open = |at: usize| {
            iter::repeat_with(|| open(lab, servers[at % 2])).find(|(_, link)| *link == 0).map(|(stream, _)| {
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                stream
            })
        };
        let streams = (0..count).filter_map(open).collect();
        let mut flows = Flows { near, _relay: relay, _far: far, streams, ids: Default::default() };
        flows.exchange(1);
        flows.ids = [0, 1].map(|at| {
            let local = flows.streams[at].local_addr().unwrap();
            let is_it = |flow: &Value| flow["local"] == local.to_string();
            let mut id = String::new();
            eventually("the flow can move", || {
                let found = flows.near.flows().into_iter().find(is_it).unwrap_or_default();
                id = found["id"].to_string();
                flows.near.explain_flow(&id).contains("can change its link")
            });
            id
        });
        flows
    }

    fn exchange(&mut self, round: u8) {
        self.streams.iter_mut().for_each(|stream| exchange(stream, round, 20_000));
    }

    fn ask(&self, id: &str) -> std::process::Output {
        self.near.braid(&["move", id, "--to", NAMES[1]])
    }

    /// Waits until it is explained why the flows stay.
    fn stays(&self, why: &str) {
        for id in &self.ids {
            eventually("it is explained", || self.near.explain_flow(id).contains(why));
        }
    }
}

const FIREWALL: &str = "a firewall or NAT on the way over that link drops packets of connections whose start it did not see";

#[test]
fn flows_stay_where_a_firewall_drops_what_it_did_not_see_begin() {
    if !able() {
        return;
    }
    for drops_both_ways in [true, false] {
        let lab = lab_with_middlebox();
        firewall(&lab, true, drops_both_ways).unwrap();
        let mut flows = Flows::start(&lab, 20);
        for id in &flows.ids {
            assert!(flows.ask(id).status.success());
        }
        flows.exchange(2);
        flows.stays(FIREWALL);
        for id in &flows.ids {
            let refused = flows.ask(id);
            assert!(!refused.status.success() && text(&refused.stderr).contains(FIREWALL), "{refused:?}");
        }
        flows.exchange(3);
        let links = watch_all(&lab, Filter { protocol: Some(Protocol::Tcp), port: Some(7000), ..Filter::default() });
        flows.exchange(4);
        assert_eq!(packets(&lab, &links)[1], 0);
        nft(&lab, "flush ruleset").unwrap();
        for id in &flows.ids {
            eventually("it moves without the firewall", || flows.ask(id).status.success());
            eventually("it has moved", || flows.near.explain_flow(id).contains("it has moved to"));
        }
        flows.exchange(5);
    }
}

/// The flows leave a dead link although the second one does not pass their packets, and come back once it works again.
fn go_on_in_udp(lab: &Lab) {
    let mut flows = Flows::start(lab, 20);
    let links = watch_all(lab, Filter { protocol: Some(Protocol::Tcp), port: Some(7000), ..Filter::default() });
    lab.dark(0).unwrap();
    flows.exchange(2);
    for id in &flows.ids {
        eventually("it is explained", || flows.near.explain_flow(id).contains("it goes on in UDP"));
    }
    let moved = || flows.near.flows().iter().filter(|flow| flow["moved_to"] == "bond").count();
    eventually("all flows are seen there", || moved() == 20);
    // More than fits into windows, in segments that were too large for the tunnel.
    for stream in &mut flows.streams[..2] {
        exchange(stream, 3, 3_000_000);
    }
    let direct = packets(lab, &links)[1];
    lab.bright(0).unwrap();
    let home = |id: &String| flows.near.explain_flow(id).contains("can change its link");
    for id in &flows.ids {
        eventually("it goes home", || home(id));
    }
    flows.exchange(4);
    assert!(direct <= 4 * 20 * 4, "{direct} segments of tests, of which none carried data");
    assert!(packets(lab, &links)[0] > 0);
}

#[test]
fn flows_of_a_dead_link_go_on_in_udp_behind_a_firewall() {
    if !able() {
        return;
    }
    let lab = lab_with_middlebox();
    firewall(&lab, true, true).unwrap();
    go_on_in_udp(&lab);
}

#[test]
fn flows_of_a_dead_link_go_on_in_udp_behind_a_nat() {
    if !able() {
        return;
    }
    let lab = lab_with_middlebox();
    nat(&lab).unwrap();
    go_on_in_udp(&lab);
}

#[test]
fn flows_of_a_dead_link_wait_for_it_behind_a_firewall() {
    if !able() {
        return;
    }
    let lab = lab_with_middlebox();
    firewall(&lab, true, true).unwrap();
    // The relay so cannot make its device.
    let made = lab.host().command("ip").unwrap().args(["link", "add", SERVER_DEVICE, "type", "bridge"]).output().unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    let mut flows = Flows::start(&lab, 20);
    lab.dark(0).unwrap();
    flows.stays(FIREWALL);
    lab.bright(0).unwrap();
    flows.exchange(2);
    eventually("the link is used again", || flows.near.state(NAMES[0]) == "up");
    flows.exchange(3);
}

#[test]
fn a_firewall_that_accepts_running_connections_of_the_client_does_not_keep_them() {
    if !able() {
        return;
    }
    let lab = lab_with_middlebox();
    firewall(&lab, false, true).unwrap();
    let mut flows = Flows::start(&lab, 20);
    lab.dark(0).unwrap();
    flows.exchange(2);
    for stream in &mut flows.streams[..2] {
        uses(&lab, stream, 1);
    }
}

#[test]
fn a_flow_does_not_move_behind_a_nat() {
    if !able() {
        return;
    }
    let lab = lab_with_middlebox();
    nat(&lab).unwrap();
    let mut flows = Flows::start(&lab, 2);
    for id in &flows.ids {
        assert!(flows.ask(id).status.success());
    }
    flows.stays("a NAT translates");
    flows.exchange(2);
}

/// An accelerometer of the client, which shakes while `shakes` is set.
struct Sensor {
    shakes: Arc<AtomicBool>,
    ends: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Sensor {
    fn start(lab: &Lab) -> Self {
        let buses = lab.directory().join("buses");
        let device = buses.join("iio/devices/iio:device0");
        fs::create_dir_all(&device).unwrap();
        client(lab, &format!("mount --bind {} /sys/bus", buses.display()));
        let read = move |name: &str, value: i64| {
            // Never half written.
            fs::write(device.join("next"), format!("{value}\n")).unwrap();
            fs::rename(device.join("next"), device.join(name)).unwrap();
        };
        read("in_accel_x_raw", 0);
        read("in_accel_y_raw", 0);
        let (shakes, ends) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (shaken, ended) = (shakes.clone(), ends.clone());
        fs::write(buses.join("iio/devices/iio:device0/in_accel_scale"), "0.001\n").unwrap();
        let work = move || {
            for step in (0..).take_while(|_| !ended.load(Ordering::Relaxed)) {
                let swing = if shaken.load(Ordering::Relaxed) { 3000.0 * f64::from(step).sin() } else { 0.0 };
                read("in_accel_z_raw", 9810 + swing as i64);
                thread::sleep(ms(50));
            }
        };
        Self { shakes, ends, thread: Some(thread::spawn(work)) }
    }
}

impl Drop for Sensor {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// Figure 2.10 of Yap's thesis: the network on the road, and another one at rest.
const ON_THE_ROAD: &str = "\
scheduler = \"round-robin\"
[detect]
hosts = true
moves = true
[[app]]
match = { port = 7000 }
when = { moving = true }
carry = \"direct\"
links = [\"wlan0\"]
[[app]]
match = { port = 7000 }
carry = \"direct\"
links = [\"lte0\"]
";

#[test]
fn an_accelerometer_moves_a_running_flow_and_back() {
    if !able() {
        return;
    }
    let lab = lab(2);
    mirror(lab.host(), 7000);
    let sensor = Sensor::start(&lab);
    let _far = Far::start(&lab);
    let _relay = Relay::start(&lab);
    let near = Up::start(&lab, ON_THE_ROAD);
    let server = remote(10, 7000);
    let (mut stream, from) = open(&lab, server);
    assert_eq!(from, 1, "it is at rest");
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    exchange(&mut stream, 1, 100_000);
    let id = movable(&near, server);
    sensor.shakes.store(true, Ordering::Relaxed);
    uses(&lab, &mut stream, 0);
    assert!(near.explain_flow(&id).contains("it has moved to wlan0"));
    exchange(&mut stream, 100, 1_000_000);
    sensor.shakes.store(false, Ordering::Relaxed);
    // It counts as moving for a minute after it shook.
    within(LIMIT * 2, "the flow is at rest, too", || near.explain_flow(&id).contains("can change its link"));
    uses(&lab, &mut stream, 1);
    exchange(&mut stream, 200, 1_000_000);
}
