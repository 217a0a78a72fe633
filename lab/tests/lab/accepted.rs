//! Flows that the other host opens to this machine leave their link, too.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::gateway::{FAR, traces};
use crate::support::moves::*;
use crate::support::*;
use braid_lab::{Lab, LinkSpec, ms};
use serde_json::Value;

/// Two links, and a host behind the server that opens connections to the client's port 7000.
fn lab_of_opener() -> Lab {
    let lab = NAMES[..2].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name))).far(1500).start().unwrap();
    mirror(lab.client(), 7000);
    lab
}

/// Only this host is asked whether it runs Braid.
fn named() -> String {
    format!("reconnect_after = \"never\"\nscheduler = \"round-robin\"\n[detect]\nhosts = {FAR:?}\nmoves = true\n")
}

/// Opens a connection from the host to the client's address on a link.
fn from_host(lab: &Lab, link: usize, v6: bool) -> TcpStream {
    let to: IpAddr = if v6 { format!("fd77:0:0:{link}::2") } else { format!("10.77.{link}.2") }.parse().unwrap();
    let stream = lab.host().run(|| TcpStream::connect_timeout(&SocketAddr::new(to, 7000), LIMIT)).unwrap().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// The flow as the client's daemon lists it.
fn listed(near: &Up<'_>, stream: &TcpStream) -> Option<Value> {
    let opener = stream.local_addr().unwrap().to_string();
    near.flows().into_iter().find(|flow| flow["remote"] == opener)
}

#[test]
fn a_flow_that_the_other_host_opened_leaves_a_link_that_dies_and_comes_back() {
    if !able() {
        return;
    }
    let lab = lab_of_opener();
    let before = traces(&lab);
    let far = Far::start(&lab);
    let relay = Relay::start(&lab);
    let near = Up::start(&lab, &named());
    for v6 in [false, true] {
        let mut stream = from_host(&lab, 0, v6);
        exchange(&mut stream, 1, 100_000);
        let mut id = String::new();
        eventually("the flow can move", || {
            id = listed(&near, &stream).unwrap_or_default()["id"].to_string();
            near.explain_flow(&id).contains("can change its link")
        });
        let flow = listed(&near, &stream).unwrap();
        assert_eq!((flow["accepted"].clone(), flow["link"].clone()), (true.into(), NAMES[0].into()), "{flow}");
        assert_eq!(flow["pid"], std::process::id(), "{flow}");
        let explained = near.explain_flow(&id);
        assert!(explained.contains("the other host opened it") && explained.contains(NAMES[0]), "{explained}");
        assert!(near.braid(&["move", &id, "--to", NAMES[1]]).status.success());
        uses(&lab, &mut stream, 1);
        // Without a command, when the link dies.
        lab.dark(1).unwrap();
        exchange(&mut stream, 100, 200_000);
        lab.bright(1).unwrap();
        uses(&lab, &mut stream, 0);
        drop(stream);
        eventually("the flow has ended", || near.flows().iter().all(|flow| flow["accepted"] != true));
    }
    drop(near);
    drop(relay);
    drop(far);
    assert_eq!(traces(&lab), before);
}

/// Longer than a lease.
const LEASE: Duration = Duration::from_secs(32);

#[test]
fn an_accepted_flow_stays_where_it_moved_without_its_address_and_its_listener() {
    if !able() {
        return;
    }
    let lab = NAMES[..2].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name))).far(1500).start().unwrap();
    let listener = lab.client().run(|| TcpListener::bind(("::", 7000))).unwrap().unwrap();
    let _far = Far::start(&lab);
    let _relay = Relay::start(&lab);
    let near = Up::start(&lab, &named());
    let mut stream = from_host(&lab, 0, false);
    let (accepted, _) = listener.accept().unwrap();
    thread::spawn(move || std::io::copy(&mut accepted.try_clone().unwrap(), &mut &accepted));
    exchange(&mut stream, 1, 1000);
    let mut id = String::new();
    eventually("the flow can move", || {
        id = listed(&near, &stream).unwrap_or_default()["id"].to_string();
        near.explain_flow(&id).contains("can change its link")
    });
    drop(listener);
    client(&lab, &format!("ip link set {} down", NAMES[0]));
    client(&lab, &format!("ip addr flush dev {}", NAMES[0]));
    let begun = Instant::now();
    let mut round = 1_u8;
    while begun.elapsed() < LEASE {
        round = round.wrapping_add(1);
        exchange(&mut stream, round, 10_000);
        thread::sleep(ms(100));
    }
    let flow = listed(&near, &stream).unwrap();
    assert_eq!((flow["id"].to_string(), flow["moved_to"].clone()), (id, NAMES[1].into()), "{flow}");
}

#[test]
fn new_flows_of_the_other_host_use_the_link_that_a_rule_names() {
    if !able() {
        return;
    }
    let lab = lab_of_opener();
    let _far = Far::start(&lab);
    let _relay = Relay::start(&lab);
    let near = Up::start(&lab, &format!("{}[[app]]\nmatch = {{ port = 7000 }}\nlinks = [{:?}]\n", named(), NAMES[1]));
    let mut streams: Vec<TcpStream> = [false, true].iter().cycle().take(10).map(|v6| from_host(&lab, 0, *v6)).collect();
    for (round, stream) in (1..).zip(&mut streams) {
        exchange(stream, round, 10_000);
        uses(&lab, stream, 1);
        eventually("it is listed there", || listed(&near, stream).unwrap_or_default()["moved_to"] == NAMES[1]);
    }
}

#[test]
fn connections_of_hosts_that_nobody_named_are_listed_once_the_host_agrees_to_moves() {
    if !able() {
        return;
    }
    let lab = lab_of_opener();
    mirror(lab.host(), 7000);
    let _far = Far::start(&lab);
    let _relay = Relay::start(&lab);
    let near = Up::start(&lab, MOVES);
    let mut stranger = from_host(&lab, 0, false);
    exchange(&mut stranger, 1, 1000);
    // Several polls.
    for round in 2..6 {
        exchange(&mut stranger, round, 1000);
        assert_eq!(listed(&near, &stranger), None);
    }
    // Now this machine opens a flow to the host.
    let server = SocketAddr::new(FAR[0].parse().unwrap(), 7000);
    let (mut own, _) = open(&lab, server);
    exchange(&mut own, 6, 1000);
    movable(&near, server);
    eventually("it is listed", || listed(&near, &stranger).is_some());
}
