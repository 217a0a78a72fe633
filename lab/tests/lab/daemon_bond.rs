//! Flows through a relay: real programs, the real daemon, the real relay.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::process::{Child, Stdio};

use crate::support::bonded::{Relay, bond_flow, curl, ended, good_paths};
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Lab, Web, ms};
use braid_model::ByteCount;
use serde_json::Value;

const CONFIG: &str = "\
[[link]]
name = \"wlan0\"
energy = \"wifi\"
[[link]]
name = \"lte0\"
energy = \"lte\"
[[app]]
match = { name = \"curl\" }
carry = \"bond\"
";

/// Two links, a relay, and a daemon that has joined it over both.
fn bonded(lab: &Lab) -> (Relay<'_>, Up<'_>) {
    let relay = Relay::start(lab);
    let up = relay.join(CONFIG);
    (relay, up)
}

/// Opens connections to a server, one after the other, has each of them answered and keeps it; then waits for the end of its input.
const MANY: &str = r#"
import socket, sys
host, count = sys.argv[1], int(sys.argv[2])
kept = []
for number in range(count):
    connection = socket.create_connection((host, 80), timeout=50)
    connection.sendall(b"GET /1000.bin HTTP/1.1\r\nHost: lab\r\n\r\n")
    assert connection.recv(15).startswith(b"HTTP/1.1 200"), number
    kept.append(connection)
print("all", flush=True)
sys.stdin.read()
"#;

/// The daemon could open fewer files than the program had connections, which then hung or failed.
#[test]
fn regression_flows_beyond_a_users_limit_go_direct() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(1000)).unwrap();
    let relay = Relay::start(&lab);
    let config = "[[app]]\nmatch = { port = 80 }\ncarry = \"bond\"\n";
    let up = Up::start_by(&lab, &["prlimit", "--nofile=300:300"], config, &lab.directory().join("braid/state"));
    assert!(up.braid(&["join", &relay.invite(), "--name", "home"]).status.success());
    eventually("both paths are good", || good_paths(&up) == 2);
    let mut python = lab.client().command("python3").unwrap();
    python.args(["-c", MANY, &Lab::internet(10).to_string(), "350"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = python.spawn().unwrap();
    let mut said = [0; 3];
    let mut output = program.stdout.take().unwrap();
    output.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"all");
    let redirected = |up: &Up<'_>| {
        let counters = up.status().unwrap()["counters"].clone();
        (counters["redirected"].as_u64(), counters["not_redirected"].as_u64())
    };
    let (bonded, direct) = redirected(&up);
    assert!(bonded.is_some_and(|count| count > 0) && direct.is_some_and(|count| count > 100), "{bonded:?} bonded, {direct:?} direct");
    drop(program.stdin.take());
    let status = program.wait().unwrap();
    assert!(status.success(), "{status}");
    eventually("new flows are bonded again", || {
        let before = redirected(&up).0;
        ended(curl(&lab, &format!("http://{}/1000.bin", Lab::internet(10))));
        redirected(&up).0 > before
    });
}

/// Estimates of a program.
fn learnt(up: &Up<'_>, name: &str) -> Value {
    let apps: Value = serde_json::from_slice(&up.braid(&["apps", "--json"]).stdout).unwrap();
    apps["apps"].as_array().unwrap().iter().find(|app| app["name"] == name).cloned().unwrap_or_default()
}

fn stop(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[test]
fn short_flows_count_towards_energy() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (_relay, up) = bonded(&lab);
    let joules = |bytes: u64, samples: u64| {
        assert_eq!(ended(curl(&lab, &web.url(ByteCount::new(bytes)).unwrap())).0, bytes);
        eventually("it is learnt from", || learnt(&up, "curl")["samples"] == samples);
        learnt(&up, "curl")["energy_j"].as_f64().unwrap_or(0.0)
    };
    // A long flow first: the cost of a byte depends on the rate.
    let (long, both) = (joules(20_000_000, 1), joules(20_000, 2));
    assert!((1.0001..1.02).contains(&(both / long)), "{long} J, then {both} J");
}

#[test]
fn one_curl_uses_both_links_transparently() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (_relay, up) = bonded(&lab);
    let size = 20_000_000;
    let child = curl(&lab, &web.url(ByteCount::new(size)).unwrap());
    let mut seen = Value::Null;
    eventually("the flow is shown with both links", || {
        seen = bond_flow(&up).unwrap_or_default();
        seen["by_link"]
            .as_array()
            .is_some_and(|links| links.len() == 2 && links.iter().all(|link| link["rx_bytes"].as_u64() > Some(500_000)))
    });
    assert_eq!((seen["peer"].as_str(), seen["name"].as_str()), (Some("home"), Some("curl")), "{seen}");
    let (got, peer) = ended(child);
    assert_eq!(got, size);
    assert!(peer.starts_with("203.0.113."), "it sees the relay: {peer}");
    eventually("the flow is gone", || bond_flow(&up).is_none());
    // Its bytes count for its program, as if one link had carried them.
    let mut app = Value::Null;
    eventually("its demand is learnt", || {
        app = learnt(&up, "curl");
        app["samples"] == 1
    });
    let [demand, mean, most] = ["demand_bytes", "rate_down_bps", "max_rate_down_bps"].map(|key| app[key].as_u64().unwrap_or(0));
    assert!((size..size + 10_000).contains(&demand) && mean > 1_000_000 && mean.abs_diff(most) < 2, "{app}");
    assert!(app["energy_j"].as_f64() > Some(0.0), "{app}");
    assert_eq!((app["class"].as_str(), app["class_source"].as_str(), app["flows"].as_u64()), (Some("bulk"), Some("executable"), Some(0)));
    let child = curl(&lab, &web.url(ByteCount::new(size)).unwrap());
    eventually("a living one is counted", || learnt(&up, "curl")["flows"] == 1);
    assert_eq!(ended(child).0, size);
    eventually("and learnt from", || learnt(&up, "curl")["samples"] == 2);
}

#[test]
fn a_link_that_dies_during_a_download_costs_only_time() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (_relay, up) = bonded(&lab);
    let size = 15_000_000;
    let child = curl(&lab, &web.url(ByteCount::new(size)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(2_000_000)));
    lab.dark(0).unwrap();
    eventually("the other carries on", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(5_000_000)));
    lab.bright(0).unwrap();
    lab.carrier(1, false).unwrap();
    assert_eq!(ended(child).0, size);
    lab.carrier(1, true).unwrap();
}

#[test]
fn bonded_traffic_alone_reveals_a_dark_link_and_its_return() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (_relay, up) = bonded(&lab);
    let child = curl(&lab, &web.url(ByteCount::new(400_000_000)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(2_000_000)));
    let wlan = || up.link("wlan0")["state_v4"].as_str().map(str::to_owned);
    assert_eq!(wlan().as_deref(), Some("up"));
    lab.dark(0).unwrap();
    println!("noted dead after {:?}", eventually("wlan0 is dead", || wlan().as_deref() == Some("dead")));
    lab.bright(0).unwrap();
    println!("noted up after {:?}", eventually("wlan0 is up", || wlan().as_deref() == Some("up")));
    stop(child);
}

#[test]
fn braid_move_moves_a_flow() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (_relay, up) = bonded(&lab);
    let child = curl(&lab, &web.url(ByteCount::new(12_000_000)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(1_000_000)));
    let moved = up.braid(&["move", "curl", "--to", "lte0"]);
    assert!(moved.status.success(), "{}", String::from_utf8_lossy(&moved.stderr));
    let over = || {
        let flow = bond_flow(&up).expect("it has not ended");
        let links = flow["by_link"].as_array().unwrap().clone();
        let bytes = |link| links.iter().find(|entry| entry["link"] == link).and_then(|entry| entry["rx_bytes"].as_u64()).unwrap_or(0);
        (bytes("wlan0"), bytes("lte0"))
    };
    // What was under way still arrives; then a piece of a megabyte comes over lte0 alone.
    eventually("lte0 alone carries it", || {
        let (wlan, lte) = over();
        let mut now = (wlan, lte);
        eventually("it goes on", || {
            now = over();
            now.0 > wlan + 100_000 || now.1 > lte + 1_000_000
        });
        now.0 <= wlan + 100_000
    });
    let refused = up.braid(&["move", "curl", "--to", "wlan7"]);
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("wlan7"));
    assert_eq!(ended(child).0, 12_000_000);
}

/// Rules that move curl and port 4242 from wlan0 to lte0 while the machine moves.
const MIGRATION: &str = "\
[[link]]
name = \"wlan0\"
[[link]]
name = \"lte0\"
[[app]]
match = { name = \"curl\" }
when = { moving = true }
carry = \"bond\"
links = [\"lte0\"]
[[app]]
match = { name = \"curl\" }
carry = \"bond\"
links = [\"wlan0\"]
[[app]]
match = { port = 4242 }
when = { moving = true }
links = [\"lte0\"]
[[app]]
match = { port = 4242 }
links = [\"wlan0\"]
";

#[test]
fn a_fact_moves_a_running_bonded_flow_and_new_direct_flows() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (_relay, up) = bonded(&lab);
    up.configure(MIGRATION);
    assert!(up.braid(&["reload"]).status.success());
    let child = curl(&lab, &web.url(ByteCount::new(400_000_000)).unwrap());
    let by_link = || {
        let flow = bond_flow(&up).expect("it has not ended");
        let links = flow["by_link"].as_array().unwrap().clone();
        ["wlan0", "lte0"]
            .map(|link| links.iter().find(|entry| entry["link"] == link).and_then(|entry| entry["rx_bytes"].as_u64()).unwrap_or(0))
    };
    // Chunks that were on their way over the other link still arrive.
    let alone = |link: usize| {
        eventually(&format!("only {} carries the flow", NAMES[link]), || {
            let before = by_link();
            let mut now = before;
            eventually("the flow continues", || {
                now = by_link();
                now[link] > before[link] + 1_000_000 || now[1 - link] > before[1 - link] + 100_000
            });
            now[1 - link] <= before[1 - link] + 100_000
        })
    };
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(1_000_000)));
    assert_eq!(by_link()[1], 0, "lte0 is used only while the machine moves");
    assert_eq!(chosen_many(&lab, remote(10, 4242), 4), [0; 4]);
    let policy = text(&up.braid(&["policy"]).stdout);
    assert!(policy.contains("when { moving = true }: does not apply now, because moving is not set"), "{policy}");
    let explained = text(&up.braid(&["explain", "nc", "203.0.113.10:4242"]).stdout);
    assert!(explained.contains("skipped    [[app]] entry 3") && explained.contains("moving is not set"), "{explained}");

    let set = up.braid(&["context", "set", "moving=true"]);
    let said = text(&set.stdout);
    assert!(
        set.status.success() && said.contains("moving is now true; [[app]] entry 1 applies now; [[app]] entry 3 applies now"),
        "{said}"
    );
    assert_eq!(chosen_many(&lab, remote(10, 4242), 4), [1; 4], "new direct flows obey at once");
    println!("moved after {:?}", alone(1));
    let id = bond_flow(&up).unwrap()["id"].to_string();
    let explained = text(&up.braid(&["explain", &id]).stdout);
    assert!(explained.contains("[[app]] entry 1") && explained.contains("when { moving = true }, which holds now"), "{explained}");
    let listed = text(&up.braid(&["context"]).stdout);
    assert!(listed.contains("moving") && listed.contains("set"), "{listed}");

    assert!(up.braid(&["context", "clear", "moving"]).status.success());
    assert_eq!(chosen_many(&lab, remote(10, 4242), 4), [0; 4]);
    alone(0);
    assert!(up.braid(&["context", "set", "moving=true", "--for", "3s"]).status.success());
    eventually("new direct flows obey", || chosen(&lab, remote(10, 4242)).is_ok_and(|link| link == 1));
    eventually("the fact expires", || chosen(&lab, remote(10, 4242)).is_ok_and(|link| link == 0));
    alone(0);
    let refused = up.braid(&["context", "set", "time=noon"]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("time cannot be set"), "{refused:?}");

    // The links of a rule that stays are those that are usable now.
    up.configure("[[app]]\nmatch = { name = \"curl\" }\ncarry = \"bond\"\nprefer = [\"lte0\"]\n");
    assert!(up.braid(&["reload"]).status.success());
    stop(child);
    lab.carrier(1, false).unwrap();
    eventually("lte0 is not usable", || up.state("lte0") != "up");
    let child = curl(&lab, &web.url(ByteCount::new(400_000_000)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(1_000_000)));
    lab.carrier(1, true).unwrap();
    alone(1);
    stop(child);
}

#[test]
fn regression_a_flow_is_not_moved_to_a_link_without_a_path() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start(&lab);
    let up = Up::start(&lab, CONFIG);
    lab.carrier(1, false).unwrap();
    up.wait_state("lte0", "down");
    assert!(up.braid(&["join", &relay.invite(), "--name", "home"]).status.success());
    eventually("one path is good", || good_paths(&up) == 1);
    let peers = text(&up.braid(&["peers"]).stdout);
    assert!(peers.contains("none: the link is down"), "{peers}");
    let child = curl(&lab, &web.url(ByteCount::new(12_000_000)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(500_000)));
    let refused = up.braid(&["move", "curl", "--to", "lte0"]);
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && said.contains("lte0 has no path to home") && said.contains("no flow was moved"), "{said}");
    let id = bond_flow(&up).unwrap()["id"].to_string();
    let explained = text(&up.braid(&["explain", &id]).stdout);
    assert!(
        explained.contains("no path over it: the link is down") && explained.contains("over every link that its rule allows"),
        "{explained}"
    );
    let moved = text(&up.braid(&["move", "curl", "--to", "wlan0"]).stdout);
    assert!(moved.contains("1 flow moved to wlan0"), "{moved}");
    let explained = text(&up.braid(&["explain", &id]).stdout);
    assert!(explained.contains("only over wlan0, where \"braid move\" put it") && !explained.contains("over every link"), "{explained}");
    assert_eq!(ended(child).0, 12_000_000);
}

#[test]
fn regression_a_relay_joined_twice_keeps_its_name_its_addresses_and_its_session() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (relay, up) = bonded(&lab);
    let child = curl(&lab, &web.url(ByteCount::new(12_000_000)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some());
    let refused = up.braid(&["join", &relay.invite(), "--name", "other"]);
    let said = text(&refused.stderr);
    assert!(!refused.status.success() && said.contains("joined as home") && said.contains("braid leave home"), "{said}");
    // An address without a host.
    let renewed = up.braid(&["join", &relay.invite_to(77)]);
    assert!(renewed.status.success() && text(&renewed.stdout).contains("home was joined before and is up"), "{renewed:?}");
    assert_eq!(good_paths(&up), 2);
    assert_eq!(ended(child).0, 12_000_000, "it lives through all of that");
    // Under another name: the end of the old session must not affect the new one.
    assert!(up.braid(&["leave", "home"]).status.success());
    assert!(up.braid(&["join", &relay.invite(), "--name", "other"]).status.success());
    eventually("both paths are good again", || good_paths(&up) == 2);
    let log = || text(&up.braid(&["log"]).stdout);
    eventually("all is told", || log().contains("the relay other is reachable"));
    let said = log();
    let [left, reached] = ["left the relay home", "the relay other is reachable"].map(|what| said.find(what).expect("it is told"));
    assert!(left < reached && !said.contains("is unreachable"), "{said}");
    assert!(!said.contains("its flows have ended"), "one act, one note: {said}");
    let explained = text(&up.braid(&["explain", "curl", "203.0.113.10:80"]).stdout);
    assert!(explained.contains("carried by other"), "{explained}");
}

#[test]
fn a_bonded_flow_is_explained_with_its_rule_and_its_links() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (relay, up) = bonded(&lab);
    let explain = |arguments: &[&str]| -> Value {
        let output = up.braid(&[&["explain"], arguments, &["--json"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    up.configure(&CONFIG.replace("\"bond\"", "\"bond\"\nrelay = \"hoem\""));
    let reloaded = up.braid(&["reload"]);
    let said = text(&reloaded.stderr);
    assert!(!reloaded.status.success() && said.contains("did you mean \"home\"?"), "{said}");
    let file = lab.directory().join("braid/braid.toml");
    let checked = up.braid(&["check", file.to_str().unwrap()]);
    assert!(!checked.status.success() && text(&checked.stdout).contains("no relay is called hoem here"), "{checked:?}");
    up.configure(CONFIG);
    let to_come = explain(&["curl", "203.0.113.10:80"]);
    assert_eq!((to_come["outcome"].as_str(), to_come["peer"].as_str()), (Some("bonded"), Some("home")), "{to_come}");
    let child = curl(&lab, &web.url(ByteCount::new(16_000_000)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(2_000_000)));
    let row = bond_flow(&up).unwrap();
    assert_eq!(row["rule"], 1, "{row}");
    assert!(row["class"].is_string() && row["demand_bytes"].is_u64(), "{row}");
    let id = row["id"].to_string();
    let living = explain(&[&id]);
    assert_eq!((living["outcome"].as_str(), living["peer"].as_str(), living["rule"].as_u64()), (Some("bonded"), Some("home"), Some(1)));
    let reason = living["reason"].as_str().unwrap();
    assert!(reason.contains("carry = \"bond\"") && reason.contains("wlan0 (") && reason.contains("lte0 ("), "{reason}");
    let paths = living["paths"].as_array().unwrap();
    let shares: f64 = paths.iter().map(|path| path["share"].as_f64().unwrap()).sum();
    assert!(paths.len() == 2 && paths.iter().all(|path| path["allowed"] == true && path["state"].is_string()), "{living}");
    assert!((shares - 1.0).abs() < 1e-6, "{living}");
    assert!(up.braid(&["move", &id, "--to", "lte0"]).status.success());
    let moved = text(&up.braid(&["explain", &id]).stdout);
    assert!(moved.contains("\"braid move\" moved the flow to another link") && moved.contains("carried by home"), "{moved}");
    assert_eq!(ended(child).0, 16_000_000);
    drop(relay);
    // The first flow to it detects that it is gone.
    assert_eq!(ended(curl(&lab, &web.url(ByteCount::new(1000)).unwrap())).0, 1000);
    eventually("it goes direct, and why is told", || {
        let direct = explain(&["curl", "203.0.113.10:80"]);
        direct["outcome"] == "steered"
            && direct["reason"].as_str().unwrap().contains("the rule asks for a relay, but none is reachable now")
    });
}

#[test]
fn flows_go_direct_without_the_relay_and_return_to_it() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (relay, up) = bonded(&lab);
    drop(relay);
    let url = web.url(ByteCount::new(50_000)).unwrap();
    let begin = std::time::Instant::now();
    assert_eq!(ended(curl(&lab, &url)).0, 50_000, "the first flow without the relay");
    let first = begin.elapsed();
    println!("the first flow without its relay took {first:?}");
    let _again = Relay::start(&lab);
    eventually("the relay is used again", || good_paths(&up) == 2);
    assert_eq!(ended(curl(&lab, &url)).0, 50_000);
}

/// Flows that the daemon forwards directly leave through its own sockets, which no BPF program follows.
#[test]
fn regression_flows_that_the_daemon_forwards_directly_end_when_a_tunnel_comes_up() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start_told(&lab, &[]);
    let up = relay.join(CONFIG);
    let child = curl(&lab, &web.url(ByteCount::new(40_000_000)).unwrap());
    eventually("the relay has declined it", || text(&up.braid(&["log"]).stdout).contains("home does not open 203.0.113.10"));
    assert_eq!(up.status().unwrap()["counters"]["redirected"].as_u64(), Some(1));
    // A flow that is not yet connected when the tunnel comes up goes through the tunnel.
    eventually("it runs", || [0, 1].iter().any(|link| lab.counters(*link).unwrap().down.delivered_bytes > ByteCount::new(2_000_000)));
    client(&lab, "ip link add wg0 type veth peer name wg0peer");
    client(&lab, "ip link set wg0 arp off up");
    client(&lab, "ip link set wg0peer up");
    client(&lab, "ip address add 10.200.0.2/32 dev wg0");
    client(&lab, "ip route add 203.0.113.10/32 dev wg0");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(56), "reset, so that it begins anew inside: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn regression_destinations_that_the_relay_does_not_open_go_direct_and_are_logged_once() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start_told(&lab, &[]);
    let up = relay.join(CONFIG);
    let url = web.url(ByteCount::new(50_000)).unwrap();
    assert_eq!(ended(curl(&lab, &url)), (50_000, "203.0.113.10".to_owned()), "the relay's operator allows no private address");
    let told = || text(&up.braid(&["log"]).stdout).matches("home does not open 203.0.113.10, a documentation address").count();
    eventually("the refusal is told", || told() == 1);
    let explained = text(&up.braid(&["explain", "curl", "203.0.113.10:80"]).stdout);
    assert!(explained.contains("home does not open 203.0.113.10") && explained.contains("--allow 203.0.113.10"), "{explained}");
    let elsewhere = text(&up.braid(&["explain", "curl", "203.0.113.11:80"]).stdout);
    assert!(elsewhere.contains("carried by home"), "{elsewhere}");
    // The kernel's map has the destination now: the next flow is steered like any other.
    let redirected = || up.status().unwrap()["counters"]["redirected"].as_u64().unwrap();
    let before = redirected();
    let child = curl(&lab, &web.url(ByteCount::new(3_000_000)).unwrap());
    eventually("it has a link of its own", || up.flows().iter().any(|flow| flow["name"] == "curl" && flow["carry"] != "bond"));
    assert_eq!((ended(child).0, redirected(), told()), (3_000_000, before, 1));
    // Its operator now allows it: the next session tries again.
    drop(relay);
    let _again = Relay::start(&lab);
    eventually("flows there are bonded again", || {
        assert_eq!(ended(curl(&lab, &url)).0, 50_000);
        redirected() > before
    });
}

#[test]
fn the_end_of_the_daemon_resets_its_bonded_flows() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let _web = Web::start(&lab).unwrap();
    let relay = Relay::start(&lab);
    for signal in ["TERM", "KILL"] {
        let mut up = Up::start(&lab, "[[app]]\nmatch = { port = 80 }\ncarry = \"bond\"\n");
        assert!(up.braid(&["join", &relay.invite(), "--name", "home"]).status.success());
        eventually("both paths are good", || good_paths(&up) == 2);
        let (mut idle, mut busy) =
            lab.client().run(|| [10, 11].map(|host| TcpStream::connect_timeout(&remote(host, 80), LIMIT).unwrap())).unwrap().into();
        // One waits for an answer to half a question, one is in the middle of its answer.
        idle.write_all(b"GET / HT").unwrap();
        let _ = std::fs::write(lab.directory().join("web/files/large"), vec![0; 8_000_000]);
        busy.write_all(b"GET /large HTTP/1.0\r\n\r\n").unwrap();
        busy.read_exact(&mut [0; 100_000]).unwrap();
        eventually("both are bonded", || up.flows().iter().filter(|flow| flow["carry"] == "bond").count() == 2);
        up.signal(signal);
        for stream in [&mut idle, &mut busy] {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let error = stream.read_to_end(&mut Vec::new()).expect_err("no end that looks as if all had come");
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{signal}: {error}");
        }
        up.wait_end();
    }
}

#[test]
fn a_stopping_relay_lets_transfers_finish() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let (mut relay, up) = bonded(&lab);
    let child = curl(&lab, &web.url(ByteCount::new(10_000_000)).unwrap());
    eventually("it runs", || bond_flow(&up).is_some_and(|flow| flow["rx_bytes"].as_u64() > Some(1_000_000)));
    relay.signal("TERM");
    // A new flow is refused there, or goes direct. It must not hang.
    let mut new = lab.client().command("curl").unwrap();
    new.args(["-sS", "--max-time", "60", "-o", "/dev/null"]).arg(web.url(ByteCount::new(1000)).unwrap());
    let code = new.status().unwrap().code();
    assert!(matches!(code, Some(0 | 7 | 52 | 56)), "{code:?}");
    assert_eq!(ended(child).0, 10_000_000);
    let mut end = None;
    eventually("the relay ends", || {
        end = relay.child.try_wait().unwrap();
        end.is_some()
    });
    assert!(end.unwrap().success(), "{end:?}");
}

#[test]
fn a_relay_with_a_full_disk_continues_and_stores_usage_later() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let state = lab.directory().join("relay/state");
    std::fs::create_dir_all(&state).unwrap();
    server(&lab, &format!("mount -t tmpfs -o size=256k,mode=700 tmpfs {}", state.display()));
    let (_relay, up) = bonded(&lab);
    lab.server().run(|| std::fs::write(state.join("filler"), vec![0; 1 << 20]).unwrap_err()).unwrap();
    assert_eq!(ended(curl(&lab, &web.url(ByteCount::new(300_000)).unwrap())).0, 300_000);
    let log = || std::fs::read_to_string(lab.directory().join("relay/log")).unwrap();
    eventually("the trouble is told", || log().contains("counted, but cannot be saved"));
    assert_eq!(ended(curl(&lab, &web.url(ByteCount::new(200_000)).unwrap())).0, 200_000);
    lab.server().run(|| std::fs::remove_file(state.join("filler")).unwrap()).unwrap();
    eventually("its end is told", || log().contains("can be written again"));
    assert_eq!(good_paths(&up), 2);
    let mut command = lab.server().command(braid()).unwrap();
    let clients = command.args(["relay", "clients", "--json", "--state-dir"]).arg(&state).output().unwrap();
    let clients: Value = serde_json::from_slice(&clients.stdout).unwrap();
    assert!(clients["clients"][0]["month"]["down_bytes"].as_u64() >= Some(500_000), "{clients}");
}

#[test]
fn datagrams_go_through_the_relay() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let _relay = Relay::start(&lab);
    let up = Up::start(&lab, "[[app]]\nmatch = { port = 4000 }\ncarry = \"duplicate\"\n");
    assert!(up.braid(&["join", &_relay.invite(), "--name", "home"]).status.success());
    eventually("both paths are good", || good_paths(&up) == 2);
    let _echo = Echo::start(&lab, 11, 4000);
    let to: SocketAddr = (Lab::internet(11), 4000).into();
    let connected =
        lab.client().run(|| UdpSocket::bind("0.0.0.0:0").and_then(|socket| socket.connect(to).map(|()| socket)).unwrap()).unwrap();
    connected.set_read_timeout(Some(ms(500))).unwrap();
    eventually("an answer comes", || connected.send(b"hello").is_ok() && connected.recv(&mut [0; 100]).is_ok_and(|size| size == 5));
    assert_eq!(connected.peer_addr().unwrap(), to);
    let flow = bond_flow(&up).expect("it is listed");
    assert_eq!((flow["protocol"].as_str(), flow["remote"].as_str()), (Some("udp"), Some(to.to_string().as_str())), "{flow}");
    eventually("each datagram goes over both links", || {
        let _ = connected.send(b"hello");
        bond_flow(&up).is_some_and(|flow| flow["by_link"].as_array().unwrap().len() == 2)
    });
    let plain = lab.client().run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    plain.set_read_timeout(Some(ms(500))).unwrap();
    let mut from = None;
    eventually("an answer comes to one that is not connected", || {
        plain.send_to(b"hello", to).unwrap();
        from = plain.recv_from(&mut [0; 100]).ok().map(|(_, from)| from);
        from.is_some()
    });
    assert_eq!(from, Some(to), "it sees who answered");
}

#[test]
fn regression_udp_flows_restart_when_their_bond_or_relay_ends() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let relay = Relay::start(&lab);
    let up = Up::start(&lab, "[[app]]\nmatch = { port = 4000 }\ncarry = \"bond\"\n");
    assert!(up.braid(&["join", &relay.invite(), "--name", "home"]).status.success());
    eventually("both paths are good", || good_paths(&up) == 2);
    let _echo = Echo::start(&lab, 11, 4000);
    let to: SocketAddr = (Lab::internet(11), 4000).into();
    let socket = |connected: bool| {
        let socket = lab.client().run(|| {
            UdpSocket::bind("0.0.0.0:0").and_then(|socket| if connected { socket.connect(to).map(|()| socket) } else { Ok(socket) })
        });
        let socket = socket.unwrap().unwrap();
        socket.set_read_timeout(Some(ms(100))).unwrap();
        socket
    };
    let (connected, plain) = (socket(true), socket(false));
    let answers = |socket: &UdpSocket, sent: bool| sent && socket.recv(&mut [0; 100]).is_ok_and(|size| size == 5);
    let both = || {
        let first = answers(&connected, connected.send(b"hello").is_ok());
        first & answers(&plain, plain.send_to(b"hello", to).is_ok())
    };
    let bonded = || up.flows().iter().filter(|flow| flow["carry"] == "bond").count();
    eventually("answers come", both);
    eventually("both are bonded", || both() && bonded() == 2);
    // The next relay has no record of its flows. Datagrams sent meanwhile would go direct, and stay direct.
    let log = lab.directory().join("relay/log");
    let joins = || std::fs::read_to_string(&log).unwrap().matches("a path has joined").count();
    relay.signal("KILL");
    drop(relay);
    let before = joins();
    let _again = Relay::start(&lab);
    eventually("both links have joined anew", || joins() >= before + 2);
    eventually("both paths are good again", || good_paths(&up) == 2);
    eventually("answers come again", both);
    assert_eq!(bonded(), 2, "by the relay");
}
