//! Hosts with radios in a network with a controller: they go from access point to access point under each mobility manager.

use std::time::Duration;

use crate::support::*;
use braid_lab::wifi::{Received, Stream, Walk, WalkPlan};
use braid_lab::{Lab, LinkSpec};

/// Interval of datagrams.
const INTERVAL: Duration = Duration::from_millis(5);
/// What a busy machine may lose in its switches of three handovers, or get twice while a host changes its radio. One radio loses ten times as many in each;
/// `braid-lab bench handover` counts.
const STRAY: usize = 3;

fn one_link() -> Lab {
    Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap()
}

fn plan(options: &str, radios: usize) -> WalkPlan<'_> {
    WalkPlan { options, accesses: 3, radios, entry: [Duration::from_millis(100); 2], hunt: Duration::from_millis(300) }
}

/// What becomes of datagrams in both directions while the host walks over all access points and back.
fn walk(walk: &Walk<'_>) -> [Received; 2] {
    let (roamer, other) = (&walk.roamer, &walk.other);
    let down = Stream::start(other.namespace(), (roamer.namespace(), roamer.address), INTERVAL, 400).unwrap();
    let up = Stream::start(roamer.namespace(), (other.namespace(), other.address), INTERVAL, 400).unwrap();
    eventually("both streams flow", || down.arrived() > 20 && up.arrived() > 20);
    for access in [1, 2, 0] {
        walk.walk_to(access).unwrap();
        let passed = (down.arrived(), up.arrived());
        eventually("both streams flow at the new place", || down.arrived() > passed.0 + 50 && up.arrived() > passed.1 + 50);
    }
    [down.end(), up.end()]
}

#[test]
fn two_radios_lose_next_to_nothing() {
    if !able() {
        return;
    }
    for options in ["manager = \"hoolock\"\nhold = \"500ms\"\n", "manager = \"n-cast\"\nhold = \"500ms\"\n"] {
        let lab = one_link();
        let made = Walk::start(&lab, &braid(), plan(options, 2)).unwrap();
        for one in walk(&made) {
            assert!(one.sent > 200 && one.lost + one.repeated as usize <= STRAY, "{options}{one:?}\n{}", made.joined.log());
        }
    }
}

#[test]
fn packets_arrive_in_order_when_the_new_way_is_shorter() {
    if !able() {
        return;
    }
    for options in ["manager = \"hoolock\"\nhold = \"1s\"\n", "manager = \"n-cast\"\nhold = \"1s\"\n"] {
        let lab = one_link();
        let made = Walk::start(&lab, &braid(), plan(options, 2)).unwrap();
        // More than the first access point carries, so that packets wait there for some 60 ms.
        made.accesses[0].limit(&lab, 8).unwrap();
        let (roamer, other) = (&made.roamer, &made.other);
        let stream = Stream::start(other.namespace(), (roamer.namespace(), roamer.address), Duration::from_millis(1), 1200).unwrap();
        eventually("the stream flows", || stream.arrived() > 300);
        made.walk_to(1).unwrap();
        let passed = stream.arrived();
        eventually("it flows at the new place", || stream.arrived() > passed + 300);
        let received = stream.end();
        // The last of them may be passed by the first one that does not wait.
        assert!(received.late as usize <= STRAY, "{options}{received:?}");
    }
}

#[test]
fn one_radio_moves_and_its_flows_go_on() {
    if !able() {
        return;
    }
    let lab = one_link();
    let made = Walk::start(&lab, &braid(), plan("", 1)).unwrap();
    for one in walk(&made) {
        // Entering takes 100 ms each time.
        assert!(one.lost > 3 * 100 / 5 / 2 && one.repeated == 0, "{one:?}");
    }
}

#[test]
fn a_client_and_its_controller_may_end_at_any_time() {
    if !able() {
        return;
    }
    let lab = one_link();
    let Walk { joined, controller, roamer, other, accesses, switches } =
        Walk::start(&lab, &braid(), plan("manager = \"hoolock\"\n", 2)).unwrap();
    let stream = Stream::start(other.namespace(), (roamer.namespace(), roamer.address), INTERVAL, 400).unwrap();
    eventually("the stream flows", || stream.arrived() > 20);
    controller.kill().unwrap();
    let again = braid_lab::network::Controller::start_with(
        &lab,
        &braid(),
        &braid_lab::wifi::configuration(&accesses, &[(&roamer.mac, &roamer.key(&braid()).unwrap())], "manager = \"hoolock\"\n"),
    )
    .unwrap();
    let walk = Walk { joined, controller: again, roamer, other, accesses, switches };
    walk.controller.converges(3, 3).unwrap();
    eventually("the client has joined the new controller", || walk.is_client().unwrap());
    let received = stream.end();
    assert_eq!((received.lost, received.repeated), (0, 0), "{received:?}");
    walk.walk_to(1).unwrap();
    // The client is killed: its device goes with it, and its radios are as before.
    drop(walk.joined);
    eventually("the device is gone", || {
        let shown = walk.roamer.namespace().command("ip").unwrap().args(["-o", "link"]).output().unwrap();
        !text(&shown.stdout).contains("net0")
    });
    let address = format!("ip address add {}/24 dev wlan1", walk.roamer.address);
    assert!(walk.roamer.namespace().command("sh").unwrap().args(["-c", &address]).status().unwrap().success());
    eventually("the radio works without Braid", || walk.other.reaches(walk.roamer.address).unwrap());
}

#[test]
fn the_daemon_joins_and_takes_what_the_network_says_as_its_links_capacity() {
    if !able() {
        return;
    }
    let lab = one_link();
    let Walk { joined, controller, roamer, other, accesses, switches } =
        Walk::start(&lab, &braid(), plan("manager = \"hoolock\"\nhold = \"500ms\"\n", 2)).unwrap();
    drop(joined);
    let joined = roamer.join_by_daemon(&braid()).unwrap();
    let made = Walk { joined, controller, roamer, other, accesses, switches };
    eventually("the host is a client again", || made.is_client().unwrap());
    let ask = |arguments: &[&str]| {
        made.roamer.namespace().command(braid()).unwrap().args(arguments).arg("--socket").arg(made.roamer.socket()).output().unwrap()
    };
    // Its access points carry 54 Mbit/s, and nobody else uses them.
    eventually("the link has the capacity that the controller reports", || {
        let status: serde_json::Value = serde_json::from_slice(&ask(&["status", "--json"]).stdout).unwrap_or_default();
        let link = status["links"].as_array().and_then(|links| links.iter().find(|link| link["name"] == "net0").cloned());
        link.is_some_and(|link| {
            ["down", "up"].iter().all(|way| (50e6..55e6).contains(&link[format!("capacity_{way}_bps")].as_f64().unwrap_or(0.0)))
        })
    });
    for one in walk(&made) {
        assert!(one.sent > 200 && one.lost + one.repeated as usize <= STRAY, "{one:?}\n{}", made.joined.log());
    }
    let refused = ask(&["adhoc", "set", "--priority", "wlan0=1"]);
    assert!(text(&refused.stderr).contains("change [network] in the configuration"), "{}", text(&refused.stderr));
    let down = ask(&["adhoc", "down"]);
    assert!(down.status.success(), "{}", text(&down.stderr));
    eventually("the device is gone", || {
        !text(&made.roamer.namespace().command("ip").unwrap().args(["-o", "link"]).output().unwrap().stdout).contains("net0")
    });
}

#[test]
fn only_hosts_with_their_keys_are_clients() {
    if !able() {
        return;
    }
    let lab = one_link();
    let walk = Walk::start(&lab, &braid(), plan("", 2)).unwrap();
    let stranger = braid_lab::wifi::Roamer::start(&lab, 7, 1, &walk.accesses, Duration::ZERO).unwrap();
    stranger.radios()[0].enter(1, Duration::ZERO);
    let joined = stranger.join(&braid(), None).unwrap();
    eventually("the stranger is refused", || joined.log().contains("no [[host]] of the controller has the key"));
    // It is served as a host without Braid.
    eventually("it reaches others", || walk.other.reaches(stranger.address).unwrap());
    let refused = |arguments: &[&str], reason: &str| {
        let output = walk.controller.net(arguments).unwrap();
        assert!(!output.status.success() && text(&output.stderr).contains(reason), "{}", text(&output.stderr));
    };
    refused(&["move", &stranger.mac, &walk.accesses[0].bssid], "is no client");
    refused(&["move", &walk.roamer.mac, "02:00:00:00:0a:77"], "no access point has the address");
}

#[test]
fn a_client_follows_only_the_controller_whose_key_it_names() {
    if !able() {
        return;
    }
    let lab = one_link();
    let walk = Walk::start(&lab, &braid(), plan("", 2)).unwrap();
    drop(walk.joined);
    let of_itself = walk.roamer.key(&braid()).unwrap();
    let joined = walk.roamer.join(&braid(), Some(&of_itself)).unwrap();
    eventually("the client refuses the controller", || joined.log().contains("it does not prove the key that --controller-key names"));
    eventually("its device works", || walk.other.reaches(walk.roamer.address).unwrap());
    drop(joined);
    let log = walk.controller.log();
    let key = log.split("--controller-key ").nth(1).and_then(|rest| rest.split('`').next()).expect("the controller says its key");
    let joined = walk.roamer.join(&braid(), Some(key)).unwrap();
    eventually("the client has connected", || joined.log().contains("connected to the controller"));
}
