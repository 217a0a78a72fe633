//! Packets wait in a queue for each flow until their link can take them (late binding; Yap's thesis, 2.4).

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::gateway::traces;
use crate::support::moves::{Far, MOVES, Relay, exchange, mirror, movable};
use crate::support::*;
use braid_lab::Lab;
use serde_json::Value;

/// Port that sends back what it gets.
const MIRROR: u16 = 7000;
/// Port that reads what it gets.
const SINK: u16 = 7001;

/// Starts servers on these ports, and one that answers datagrams on the first.
#[must_use]
fn serve(lab: &Lab) -> Echo {
    let run = || {
        let sink = TcpListener::bind(("::", SINK)).unwrap();
        thread::spawn(move || {
            for mut stream in sink.incoming().map_while(Result::ok) {
                thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
            }
        });
    };
    lab.server().run(run).unwrap();
    mirror(lab.server(), MIRROR);
    Echo::start(lab, 10, MIRROR)
}

/// Makes the device of the client slow: it then says when it can take more, as a modem's or a radio's device does.
fn slow(lab: &Lab, device: &str) {
    client(lab, &format!("tc qdisc add dev {device} root tbf rate 5mbit burst 2000 limit 100000"));
}

/// Uploads until it is dropped.
struct Upload(TcpStream);

impl Upload {
    fn start(lab: &Lab) -> Self {
        let stream = lab.client().run(|| TcpStream::connect(remote(10, SINK)).unwrap()).unwrap();
        let mut writing = stream.try_clone().unwrap();
        thread::spawn(move || while writing.write_all(&[7; 16_384]).is_ok() {});
        Self(stream)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// The median time until a datagram is answered.
fn round_trip(lab: &Lab) -> Duration {
    let socket = lab.client().run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    socket.connect(remote(10, MIRROR)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut spans = Vec::new();
    let mut buffer = [0; 100];
    for _ in 0..40 {
        let begin = Instant::now();
        socket.send(&[1; 60]).unwrap();
        if socket.recv(&mut buffer).is_ok() {
            spans.push(begin.elapsed());
        }
        thread::sleep(Duration::from_millis(20));
    }
    assert!(spans.len() > 20, "{} of 40 datagrams were answered", spans.len());
    spans.sort();
    spans[spans.len() / 2]
}

fn late(up: &Up<'_>) -> Value {
    up.status().unwrap_or_default()["late"].clone()
}

#[test]
fn an_urgent_packet_does_not_wait_behind_an_upload() {
    if !able() {
        return;
    }
    let lab = lab(1);
    let _echo = serve(&lab);
    slow(&lab, NAMES[0]);
    let mut spans = Vec::new();
    for config in ["late = false\n", "late = true\n"] {
        let up = Up::start(&lab, config);
        let _upload = Upload::start(&lab);
        if config.contains("true") {
            eventually("packets wait", || late(&up)["packets"].as_u64() > Some(5));
            let flow = up.flows().into_iter().find(|flow| flow["remote"].as_str().is_some_and(|to| to.ends_with(":7001"))).unwrap();
            assert_eq!(flow["late"], true);
            assert!(text(&up.braid(&["explain", &flow["id"].to_string()]).stdout).contains("wait in a queue of their own"));
        } else {
            thread::sleep(Duration::from_secs(2));
        }
        spans.push(round_trip(&lab));
    }
    assert!(spans[1] * 3 < spans[0], "{spans:?}");
}

#[test]
fn every_byte_arrives_and_nothing_is_left() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _echo = serve(&lab);
    let before = traces(&lab);
    let mut up = Up::start(&lab, "scheduler = \"round-robin\"\nlate = true\n");
    let servers = [remote(10, MIRROR), remote6(10, MIRROR), remote(11, MIRROR), remote6(11, MIRROR)];
    let mut streams: Vec<TcpStream> = servers.into_iter().map(|server| open(&lab, server).0).collect();
    for round in 0..3 {
        for stream in &mut streams {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            exchange(stream, round, 300_000);
        }
    }
    let datagram = lab.client().run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    datagram.set_read_timeout(Some(LIMIT)).unwrap();
    // Fragments too.
    datagram.send_to(&[3; 1900], remote(10, MIRROR)).unwrap();
    assert_eq!(datagram.recv(&mut [0; 2000]).unwrap(), 1900);
    let state = late(&up);
    assert!(state["bound"].as_u64() > Some(1000), "{state}");
    assert_eq!(state["links"].as_array().map(Vec::len), Some(2));
    // It hangs: packets leave as without it.
    up.signal("STOP");
    exchange(&mut streams[0], 9, 100_000);
    up.signal("CONT");
    exchange(&mut streams[0], 10, 100_000);
    // A change of the configuration turns it off, and on again.
    let reload = |config: &str| {
        up.configure(config);
        assert!(up.braid(&["reload"]).status.success());
    };
    reload("scheduler = \"round-robin\"\n");
    eventually("it is off", || late(&up).is_null());
    exchange(&mut streams[1], 11, 100_000);
    reload("scheduler = \"round-robin\"\nlate = true\n");
    eventually("it is on", || !late(&up).is_null());
    exchange(&mut streams[1], 12, 100_000);
    up.signal("KILL");
    up.wait_end();
    for stream in &mut streams {
        exchange(stream, 13, 50_000);
    }
    drop(up);
    eventually("nothing is left", || traces(&lab) == before);
}

#[test]
fn whoever_removes_its_device_takes_no_network_with_it() {
    if !able() {
        return;
    }
    let lab = lab(1);
    let _echo = serve(&lab);
    let up = Up::start(&lab, "late = true\n");
    let (mut stream, _) = open(&lab, remote(10, MIRROR));
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    eventually("packets are bound late", || late(&up)["links"].as_array().is_some_and(|links| links.len() == 1));
    exchange(&mut stream, 1, 100_000);
    client(&lab, "ip link set braid-late down");
    exchange(&mut stream, 2, 100_000);
    client(&lab, "ip link set braid-late up");
    exchange(&mut stream, 3, 100_000);
    client(&lab, "ip link del braid-late");
    exchange(&mut stream, 4, 100_000);
    eventually("it is there again", || client(&lab, "ip link show").contains("braid-late"));
    exchange(&mut stream, 5, 100_000);
    // A rule of the user that drops some packets delays no others.
    client(&lab, "nft add table netdev t");
    client(&lab, "nft add chain netdev t out { type filter hook egress device wlan0 priority 0; }");
    client(&lab, "nft add rule netdev t out udp dport 9999 drop");
    let socket = lab.client().run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    (0..200).for_each(|_| drop(socket.send_to(&[1; 100], remote(10, 9999))));
    exchange(&mut stream, 6, 300_000);
    // A link that is not usable keeps what it is, and its probes.
    lab.dark(0).unwrap();
    eventually("the link is dead", || up.state("wlan0") != "up");
    lab.bright(0).unwrap();
    eventually("the link works again", || up.state("wlan0") == "up");
    exchange(&mut stream, 7, 100_000);
}

#[test]
fn what_has_not_left_goes_over_another_link() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let _echo = serve(&lab);
    NAMES[..2].iter().for_each(|device| slow(&lab, device));
    let _far = Far::start(&lab);
    let _relay = Relay::start(&lab);
    let up = Up::start(&lab, &format!("late = true\n{MOVES}"));
    let server: SocketAddr = remote(10, MIRROR);
    let (mut stream, from) = open(&lab, server);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // It fills its queue, so that much waits when the link dies.
    socket2::SockRef::from(&stream).set_tcp_congestion(b"cubic").unwrap();
    exchange(&mut stream, 1, 10_000);
    movable(&up, server);
    let (mut copy, is_over) = (stream.try_clone().unwrap(), Arc::new(AtomicBool::new(false)));
    let running = thread::spawn({
        let is_over = is_over.clone();
        // On a busy machine, a transfer of any size may be over before the link dies.
        move || (2..).take_while(|_| !is_over.load(Ordering::Relaxed)).for_each(|round| exchange(&mut copy, round, 3_000_000))
    });
    let flow = || up.flows().into_iter().find(|flow| flow["remote"] == server.to_string()).unwrap_or_default();
    let leaves_over = |link: usize| flow()["moved_to"].as_str().map_or(link == from, |moved| moved == NAMES[link]);
    let rebound = || late(&up)["rebound"].as_u64() > Some(0);
    // The kernel notices changes of carrier once a second at most. On a busy machine, what waited may be gone by then, into the dead device.
    eventually("packets got another link", || {
        eventually("packets wait", || late(&up)["packets"].as_u64() > Some(40));
        let on = usize::from(!leaves_over(0));
        lab.carrier(on, false).unwrap();
        eventually("the flow has moved", || leaves_over(1 - on));
        let moved = Instant::now();
        while !rebound() && moved.elapsed() < Duration::from_secs(2) {
            thread::sleep(Duration::from_millis(20));
        }
        lab.carrier(on, true).unwrap();
        eventually("the link works again", || up.state(NAMES[on]) == "up");
        rebound()
    });
    is_over.store(true, Ordering::Relaxed);
    running.join().unwrap();
    drop(up);
}
