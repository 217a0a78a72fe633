//! Running flows of datagrams change their link: neither program sees another address, nor a datagram of Braid.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::support::gateway::traces;
use crate::support::moves::*;
use crate::support::*;
use braid_lab::{Filter, Lab, Namespace};
use braid_model::Protocol;
use serde_json::{Value, json};

const PAUSE: Duration = Duration::from_millis(20);

/// Starts a server that answers each datagram with the address from which it came, and the datagram.
fn addresses(host: &Namespace, local: SocketAddr) {
    let socket = host.run(move || UdpSocket::bind(local).unwrap()).unwrap();
    thread::spawn(move || {
        let mut buffer = [0; 2000];
        while let Ok((size, from)) = socket.recv_from(&mut buffer) {
            let from = SocketAddr::new(from.ip().to_canonical(), from.port());
            // A program that ends leaves errors on the server's socket, if they are reported at all.
            let _ = socket.send_to(&[format!("{from} ").as_bytes(), &buffer[..size]].concat(), from);
        }
    });
}

/// A program that sends a numbered datagram every 20 ms.
struct Program {
    socket: UdpSocket,
    server: SocketAddr,
    connected: bool,
    number: u32,
}

impl Program {
    fn start(lab: &Lab, server: SocketAddr, connected: bool) -> Self {
        let local = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let socket = lab.client().run(move || UdpSocket::bind(local).unwrap()).unwrap();
        if connected {
            let connecting = socket.try_clone().unwrap();
            lab.client().run(move || connecting.connect(server).unwrap()).unwrap();
        }
        socket.set_read_timeout(Some(PAUSE)).unwrap();
        Self { socket, server, connected, number: 0 }
    }

    /// Sends a datagram of `size` bytes. Returns the address that the server has seen, if an answer comes; it may be that to an earlier datagram.
    fn exchange(&mut self, size: usize) -> Option<SocketAddr> {
        self.number += 1;
        let mut sent = format!("{} ", self.number).into_bytes();
        sent.resize(size.max(sent.len()), b'x');
        // While its link is dead, the system may refuse it.
        let _ = if self.connected { self.socket.send(&sent) } else { self.socket.send_to(&sent, self.server) };
        let mut buffer = [0; 2000];
        let (size, from) = self.socket.recv_from(&mut buffer).ok()?;
        let text = std::str::from_utf8(&buffer[..size]).expect("no datagram of Braid");
        let mut words = text.split(' ');
        let seen = words.next().unwrap().parse().expect("the server's answer");
        let number: u32 = words.next().unwrap().parse().expect("the server's answer");
        assert!(from == self.server && (1..=self.number).contains(&number), "{from}: {text}");
        Some(seen)
    }

    /// The address that the server sees.
    fn seen(&mut self) -> SocketAddr {
        let mut seen = None;
        eventually("the server answers", || {
            seen = self.exchange(0);
            seen.is_some()
        });
        seen.unwrap()
    }

    /// Waits until all datagrams use this link.
    fn uses(&mut self, lab: &Lab, link: usize) {
        eventually(&format!("both directions use {} only", NAMES[link]), || {
            let watches = watch_all(lab, Filter { protocol: Some(Protocol::Udp), port: Some(7000), ..Filter::default() });
            let answered = (0..10).filter(|_| self.exchange(0).is_some()).count();
            let counts = packets(lab, &watches);
            counts[1 - link] == 0 && counts[link] >= 10 && answered == 10
        });
    }
}

fn works(up: &Up<'_>, link: usize) -> bool {
    let link = up.link(NAMES[link]);
    link["state_v4"] == "up" && link["state_v6"] == "up"
}

/// The only link that the program's datagrams use.
fn link_of(lab: &Lab, program: &mut Program) -> usize {
    let watches = watch_all(lab, Filter { protocol: Some(Protocol::Udp), port: Some(7000), ..Filter::default() });
    let mut counts = Vec::new();
    // An exchange may end with the answer to an earlier datagram, before its own one is on the link.
    eventually("datagrams use one link", || {
        program.exchange(0);
        counts = packets(lab, &watches);
        counts.iter().sum::<u64>() > 0
    });
    assert!(counts.contains(&0), "{counts:?}");
    usize::from(counts[1] > 0)
}

#[test]
fn two_hosts_move_a_running_flow_of_datagrams_by_themselves() {
    if !able() {
        return;
    }
    let lab = lab(2);
    addresses(lab.host(), remote(10, 7000));
    addresses(lab.host(), remote6(10, 7000));
    let before = traces(&lab);
    let far = Far::start(&lab);
    let relay = Relay::start(&lab);
    let near = Up::start(&lab, MOVES);
    for (server, connected) in [(remote(10, 7000), false), (remote(10, 7000), true), (remote6(10, 7000), false), (remote6(10, 7000), true)]
    {
        eprintln!("--- {server}, connected: {connected}");
        let mut program = Program::start(&lab, server, connected);
        let own = program.seen();
        // The flow must go on while it is proved.
        let running = Arc::new(AtomicBool::new(true));
        let (still, mut copy) = (running.clone(), Program { socket: program.socket.try_clone().unwrap(), server, connected, number: 0 });
        let sending = thread::spawn(move || {
            while still.load(Ordering::Relaxed) {
                copy.exchange(0);
            }
            copy.number
        });
        let id = movable(&near, server);
        running.store(false, Ordering::Relaxed);
        program.number = sending.join().unwrap();
        let from = link_of(&lab, &mut program);
        let moved = near.braid(&["move", &id, "--to", NAMES[1 - from]]);
        assert!(moved.status.success(), "{}", text(&moved.stderr));
        program.uses(&lab, 1 - from);
        assert_eq!(program.seen(), own);
        let explained = near.explain_flow(&id);
        assert!(explained.contains("it has moved to") && explained.contains("does not encrypt"), "{explained}");
        // Without a command, when the link dies.
        lab.dark(1 - from).unwrap();
        program.uses(&lab, from);
        assert_eq!(program.seen(), own);
        lab.bright(1 - from).unwrap();
        eventually("the other link works again", || works(&near, 1 - from));
        lab.dark(from).unwrap();
        program.uses(&lab, 1 - from);
        assert_eq!(program.seen(), own);
        // Datagrams as large as the link takes.
        let largest = 1500 - if server.is_ipv4() { 28 } else { 48 } - 50;
        eventually("a large datagram arrives", || program.exchange(largest).is_some());
        lab.bright(from).unwrap();
        eventually("the link works", || works(&near, from));
    }
    drop(near);
    drop(relay);
    drop(far);
    assert_eq!(traces(&lab), before);
}

#[test]
fn datagrams_go_on_after_either_daemon_is_killed() {
    if !able() {
        return;
    }
    let lab = lab(2);
    addresses(lab.host(), remote(10, 7000));
    for near_dies in [true, false] {
        let before = traces(&lab);
        let mut far = Some(Far::start(&lab));
        let relay = Relay::start(&lab);
        let mut near = Up::start(&lab, MOVES);
        let server = remote(10, 7000);
        let mut program = Program::start(&lab, server, true);
        let own = program.seen();
        eventually("the flow can move", || {
            (0..10).for_each(|_| _ = program.exchange(0));
            let flow = near.flows().into_iter().find(|flow| flow["remote"] == server.to_string()).unwrap_or_default();
            near.explain_flow(&flow["id"].to_string()).contains("can change its link")
        });
        let from = link_of(&lab, &mut program);
        assert!(near.braid(&["move", "--to", NAMES[1 - from], &flow_id(&near, &mut program)]).status.success());
        program.uses(&lab, 1 - from);
        if near_dies {
            near.signal("KILL");
            near.wait_end();
        } else {
            drop(far.take());
        }
        eventually("the flow goes on with its own address", || (0..10).all(|_| program.exchange(0) == Some(own)));
        drop(near);
        drop(relay);
        drop(far);
        eventually("nothing is left", || traces(&lab) == before);
    }
}

/// Waits until the program's flow is listed, and returns its id. A flow begins with the first datagram that is counted, and none is before the first flow.
fn flow_id(up: &Up<'_>, program: &mut Program) -> String {
    let (server, mut found) = (program.server, None);
    eventually("the flow is listed", || {
        program.exchange(0);
        found = up.flows().into_iter().find(|flow| flow["remote"] == server.to_string());
        found.is_some()
    });
    found.unwrap()["id"].to_string()
}

#[test]
fn what_nobody_has_proved_does_not_move() {
    if !able() {
        return;
    }
    let lab = lab(2);
    addresses(lab.host(), remote(10, 7000));
    let near = Up::start(&lab, MOVES);
    let server = remote(10, 7000);
    let mut program = Program::start(&lab, server, true);
    let refused = near.braid(&["move", &flow_id(&near, &mut program), "--to", NAMES[0]]);
    assert!(text(&refused.stderr).contains("does not agree to moves"), "{}", text(&refused.stderr));
    // A program that asks by the API has the right to it. Without a socket nothing is proved or moved.
    let ends = json!({ "source": "10.77.0.2:40000", "destination": server });
    let request = |proves: bool| json!({ "flows": [{ "own": ends, "wire": ends, "protocol": "udp", "numbers": { "sent": 1, "received": 2 } }], "lease_ms": 1000, "prove": proves });
    for proves in [true, false] {
        let answer: (u16, Value) = near.api("POST /v1/rewrites", &request(proves));
        assert!(answer.1.to_string().contains("no socket of this machine receives"), "{answer:?}");
    }
}
