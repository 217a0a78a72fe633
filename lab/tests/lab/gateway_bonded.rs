//! `carry = "bond"` for everything: this host's own flows, and those of devices behind its gateway, use all links through the relay.

use std::time::{Duration, Instant};

use crate::support::bonded::{Capture, Relay, bond_flow, good_paths};
use crate::support::gateway::*;
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Lab, Responder, Web};
use braid_model::{ByteCount, Direction};

const CONFIG: &str = "carry = \"bond\"\n[gateway]\nlan = [\"lan0\"]\n";

/// Two links, devices, a relay, and a daemon that has joined it over both.
fn start<'a>(lab: &'a Lab, config: &str) -> (Relay<'a>, Up<'a>) {
    let relay = Relay::start_told(lab, &["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"]);
    let up = relay.join(config);
    eventually("both paths are good", || good_paths(&up) == 2);
    (relay, up)
}

#[test]
fn one_download_of_a_device_uses_both_links_in_both_families() {
    if !able() {
        return;
    }
    let lab = two_links().lan(2).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(12_000_000)).unwrap();
    let (_relay, up) = start(&lab, CONFIG);
    for host in [Lab::internet(10).to_string(), Lab::internet6(10).to_string()] {
        let capture = Capture::start(&lab);
        let download = curl(&lab, 0, &url(&host, "12000000.bin"));
        eventually("the flow is listed with its client", || bond_flow(&up).is_some_and(|flow| flow["client"].is_string()));
        eventually("the client is listed with its rate", || {
            clients(&up).iter().any(|client| client["flows"].as_u64() == Some(1) && client["rate_down_bps"].as_u64() > Some(5_000_000))
        });
        assert_eq!(downloaded(download), 12_000_000);
        let [wlan, lte] = capture.bytes(Direction::Down);
        println!("{host}: {wlan} bytes over wlan0, {lte} over lte0");
        assert!(wlan > 1_000_000 && lte > 1_000_000 && wlan + lte > 12_000_000, "{host}: {wlan}, {lte}");
    }
    eventually("no flow is left", || up.flows().iter().all(|flow| flow["carry"] != "bond"));
}

#[test]
fn datagrams_of_a_device_are_answered_through_the_relay() {
    if !able() {
        return;
    }
    let lab = two_links().lan(2).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let (_relay, up) = start(&lab, CONFIG);
    for to in [remote(11, 7), remote6(11, 7)] {
        let watches = watch_all(&lab, braid_lab::Filter::to(to.ip()));
        for size in [1, 1000] {
            echoed(&lab, 0, to, size).unwrap();
            echoed(&lab, 1, to, size).unwrap();
        }
        assert_eq!(packets(&lab, &watches), [0, 0], "{to}: nothing goes there directly");
    }
    // The first datagrams of an exchange, which arrive together, are one flow.
    let burst = || {
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
        for _ in 0..5 {
            socket.send_to(b"x", remote(12, 7)).unwrap();
        }
    };
    lab.device(0).run(burst).unwrap();
    let bonded = || up.flows().iter().filter(|flow| flow["remote"] == "203.0.113.12:7").count();
    eventually("the exchange is listed", || bonded() > 0);
    assert_eq!(bonded(), 1);
    assert_eq!(clients(&up).len(), 4);
}

#[test]
fn a_call_of_a_device_goes_on_while_links_are_cut() {
    if !able() {
        return;
    }
    let lab = two_links().lan(1).start().unwrap();
    let _responder = Responder::start(&lab).unwrap();
    let (_relay, up) = start(&lab, CONFIG);
    for (link, name) in ["wlan0", "lte0"].into_iter().enumerate() {
        let (gap, answered) = call(&lab, 0, remote(11, 7), Duration::from_secs(4), || lab.dark(link).unwrap());
        println!("{name} cut: {gap:?} of silence, {answered:.2} of the last second answered");
        assert!(gap < Duration::from_secs(1) && answered > 0.8, "{name}: {gap:?}, {answered}");
        lab.bright(link).unwrap();
        eventually("both paths are good", || good_paths(&up) == 2);
    }
}

#[test]
fn rules_except_and_without_a_relay_everything_goes_direct() {
    if !able() {
        return;
    }
    let lab = two_links().lan(2).start().unwrap();
    let mirror = Mirror::start(&lab);
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(100_000)).unwrap();
    let direct = "[[app]]\nmatch = { client = \"192.168.7.21\" }\ncarry = \"direct\"\nlinks = [\"lte0\"]\n";
    let (relay, up) = start(&lab, &format!("{CONFIG}{direct}"));
    let page = url(&Lab::internet(10).to_string(), "100000.bin");
    let through_relay = || {
        let capture = Capture::start(&lab);
        assert_eq!(downloaded(curl(&lab, 0, &page)), 100_000);
        capture.bytes(Direction::Down).iter().sum::<u64>() > 100_000
    };
    assert!(through_relay());
    assert_eq!(connected(&lab, 1, mirror.at(12)).unwrap(), 1, "the rule's client goes direct");
    // This host's own flows are bonded too.
    let capture = Capture::start(&lab);
    assert_eq!(crate::support::bonded::ended(crate::support::bonded::curl(&lab, &page)).0, 100_000);
    assert!(capture.bytes(Direction::Down).iter().sum::<u64>() > 100_000);
    relay.signal("KILL");
    let begin = Instant::now();
    eventually("new connections go direct", || connected(&lab, 0, mirror.at(11)).is_ok());
    println!("direct {:?} after the relay was killed", begin.elapsed());
    let status = up.status().unwrap();
    assert!(status["counters"]["forwarded"].as_u64() > Some(0), "{status}");
}

#[test]
fn one_command_bonds_everything_and_another_one_nothing() {
    if !able() {
        return;
    }
    let lab = two_links().lan(1).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(100_000)).unwrap();
    let (_relay, up) = start(&lab, "[gateway]\nlan = [\"lan0\"]\n");
    let page = url(&Lab::internet(10).to_string(), "100000.bin");
    let through_relay = || {
        let capture = Capture::start(&lab);
        assert_eq!(downloaded(curl(&lab, 0, &page)), 100_000);
        assert_eq!(crate::support::bonded::ended(crate::support::bonded::curl(&lab, &page)).0, 100_000);
        capture.bytes(Direction::Down).iter().sum::<u64>() / 100_000
    };
    assert_eq!(through_relay(), 0);
    // Returns how the policy carries flows then, and by which relay.
    let after = |words: &[&str]| {
        let output = up.braid(words);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let policy: serde_json::Value = serde_json::from_slice(&up.braid(&["policy", "--json"]).stdout).unwrap();
        (policy["carry"].as_str().unwrap().to_owned(), policy["relay"].as_str().map(str::to_owned))
    };
    assert_eq!(after(&["bond", "on", "--relay", "home"]), ("bond".into(), Some("home".into())));
    assert_eq!(through_relay(), 2, "the device's flow and this host's");
    assert_eq!(after(&["bond", "on"]), ("bond".into(), None));
    assert_eq!(after(&["bond", "off"]), ("direct".into(), None));
    assert_eq!(through_relay(), 0);
    assert!(!up.braid(&["bond", "on", "--relay", "nobody"]).status.success());
}

#[test]
fn the_end_of_the_daemon_ends_carried_connections_and_new_ones_work() {
    if !able() {
        return;
    }
    let lab = two_links().lan(1).start().unwrap();
    let mirror = Mirror::start(&lab);
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(20_000_000)).unwrap();
    let before = traces(&lab);
    let (_relay, mut up) = start(&lab, CONFIG);
    let mut download = curl(&lab, 0, &url(&Lab::internet(10).to_string(), "20000000.bin"));
    eventually("it is bonded", || bond_flow(&up).is_some());
    up.signal("KILL");
    up.wait_end();
    assert!(!download.wait().unwrap().success(), "its connection belonged to the daemon");
    let took = within(Duration::from_secs(10), "new connections work", || connected(&lab, 0, mirror.at(11)).is_ok());
    println!("a new connection worked {took:?} after the kill");
    assert!(up.braid(&["down"]).status.success());
    eventually("nothing is left", || traces(&lab) == before);
}

/// Its bridge passes the firewall before the switch (br_netfilter), where the kernel has that.
#[test]
fn flows_of_containers_are_bonded() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    web.file(ByteCount::new(6_000_000)).unwrap();
    let container = Container::start(&lab);
    let (_relay, up) = start(&lab, "carry = \"bond\"\n[gateway]\nlan = [\"br9\"]\n");
    for host in [Lab::internet(10).to_string(), Lab::internet6(10).to_string()] {
        let capture = Capture::start(&lab);
        let line = format!("curl -sS --fail -o /dev/null -w %{{size_download}} --max-time 60 {}", url(&host, "6000000.bin"));
        let output = container.command(&lab, &line).output().unwrap();
        assert_eq!(text(&output.stdout), "6000000", "{}", text(&output.stderr));
        let bytes = capture.bytes(Direction::Down);
        println!("{host}: {bytes:?} bytes over wlan0 and lte0");
        assert!(bytes.iter().all(|bytes| *bytes > 500_000), "{host}: {bytes:?}");
    }
    let watches = watch_all(&lab, braid_lab::Filter::to(remote(11, 7).ip()));
    let echo = format!("exec 3<>/dev/udp/{}/7; echo hello >&3; timeout 5 dd bs=100 count=1 <&3 2>/dev/null", Lab::internet(11));
    let output = container.command(&lab, "bash -c").arg(echo).output().unwrap();
    assert_eq!(text(&output.stdout), "hello\n", "{}", text(&output.stderr));
    assert_eq!(packets(&lab, &watches), [0, 0], "nothing goes there directly");
    drop(up);
}
