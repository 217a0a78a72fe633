//! The schedulers of bonds on real traffic: each link's share of a download through a relay.

use std::time::Instant;

use crate::support::bonded::{Capture, Relay, bond_flow, curl, ended, start_paced};
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Lab, Web, ms};
use braid_model::{ByteCount, Direction};
use serde_json::Value;

/// Two links whose capacities are known, and the program whose flows are bonded. A byte over lte0 costs a third of one over wlan0.
fn config(top: &str, tables: &str) -> String {
    format!(
        "{top}
[[link]]
name = \"wlan0\"
capacity_down = \"20 Mbit/s\"
capacity_up = \"20 Mbit/s\"
energy = {{ idle_mw = 100, receive_mw = 6100, transmit_mw = 6100 }}
[[link]]
name = \"lte0\"
capacity_down = \"10 Mbit/s\"
capacity_up = \"10 Mbit/s\"
energy = {{ idle_mw = 100, receive_mw = 1100, transmit_mw = 1100 }}
[[app]]
match = {{ name = \"curl\" }}
carry = \"bond\"
{tables}"
    )
}

fn reload(up: &Up<'_>, config: &str) {
    up.configure(config);
    let reloaded = up.braid(&["reload"]);
    assert!(reloaded.status.success(), "{}", text(&reloaded.stderr));
}

/// Bytes of a bonded flow received over wlan0 and over lte0.
fn received(flow: &Value) -> [f64; 2] {
    ["wlan0", "lte0"].map(|name| {
        let links = flow["by_link"].as_array().map_or(&[][..], Vec::as_slice);
        let link = links.iter().find(|link| link["link"] == name);
        link.and_then(|link| link["rx_bytes"].as_f64()).unwrap_or(0.0)
    })
}

/// The share of wlan0 in a download of 10 MB, without its first and last part.
fn share(lab: &Lab, up: &Up<'_>, web: &Web) -> f64 {
    let size = 10_000_000.0;
    let child = curl(lab, &web.url(ByteCount::new(size as u64)).unwrap());
    eventually("the flow is listed", || bond_flow(up).is_some());
    let mut first = [0.0; 2];
    let mut last = [0.0; 2];
    let begin = Instant::now();
    while begin.elapsed() < LIMIT {
        let Some(flow) = bond_flow(up) else { break };
        let now = received(&flow);
        let sum: f64 = now.iter().sum();
        if sum < size * 0.25 {
            first = now;
        } else if sum < size * 0.9 {
            last = now;
        } else {
            break;
        }
        std::thread::sleep(ms(30));
    }
    assert_eq!(ended(child).0, size as u64);
    eventually("the flow is gone", || bond_flow(up).is_none());
    let moved = [last[0] - first[0], last[1] - first[1]];
    moved[0] / (moved[0] + moved[1])
}

/// Shares within 5 % of what each rule says, for data that the relay sends: it obeys the client's plan.
#[test]
fn each_scheduler_of_bonds_shares_links_as_its_rule_says() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start(&lab);
    let up = relay.join(&config("", ""));
    for (scheduler, expected) in [
        ("midrr", 2.0 / 3.0),
        ("round-robin", 0.5),
        ("weighted-round-robin", 2.0 / 3.0),
        ("earliest-completion", 2.0 / 3.0),
        ("min-rtt", 2.0 / 3.0),
    ] {
        reload(&up, &config("", &format!("[bond]\nscheduler = \"{scheduler}\"\n")));
        let child = curl(&lab, &web.url(ByteCount::new(1_000_000)).unwrap());
        eventually("flows say which rule schedules them", || bond_flow(&up).is_some_and(|flow| flow["scheduler"] == scheduler));
        ended(child);
        let share = share(&lab, &up, &web);
        println!("{scheduler}: wlan0 carries {share:.3}, expected {expected:.3}");
        assert!((share - expected).abs() < 0.05, "{scheduler}: {share}, not {expected}");
    }
    reload(&up, &config("", "[bond]\nscheduler = \"rtt-share\"\n"));
    ended(curl(&lab, &web.url(ByteCount::new(1_000_000)).unwrap()));
    let share = share(&lab, &up, &web);
    println!("rtt-share: wlan0 carries {share:.3}");
    assert!((0.6..0.9).contains(&share), "20 ms against 60 ms, and what queues add: {share}");
}

/// A stream that the server limits to less than the links carry, so that no queue changes a round trip: under `rtt-share` 20 ms against 60 ms are
/// three bytes against one; under `redundant` each link carries the whole stream. By capture.
#[test]
fn round_trips_and_copies_share_a_limited_stream_as_their_rules_say() {
    if !able() {
        return;
    }
    const SIZE: u64 = 3_000_000;
    let lab = two_links().start().unwrap();
    let relay = Relay::start(&lab);
    let up = relay.join(&config("", ""));
    let url = |port: u16| format!("http://{}/", remote(12, port));
    // 6 Mbit/s, less than either link carries.
    start_paced(&lab, 12, 8080, SIZE, 750_000);
    let run = |scheduler: &str, says: &str| {
        reload(&up, &config("", &format!("[bond]\nscheduler = \"{scheduler}\"\n")));
        // The relay measures round trips on both paths, and takes over the rule.
        let first = curl(&lab, &url(8080));
        eventually("the rule is in force and explained", || {
            let Some(flow) = bond_flow(&up).filter(|flow| flow["scheduler"] == scheduler) else { return false };
            text(&up.braid(&["explain", &flow["id"].to_string()]).stdout).contains(says)
        });
        assert_eq!(ended(first).0, SIZE);
        let capture = Capture::start(&lab);
        assert_eq!(ended(curl(&lab, &url(8080))).0, SIZE);
        capture.bytes(Direction::Down).map(|bytes| bytes as f64)
    };
    let [wlan, lte] = run("rtt-share", "in inverse proportion to its round-trip time");
    let share = wlan / (wlan + lte);
    println!("rtt-share: {wlan} and {lte} bytes, wlan0 carries {share:.3}");
    assert!((share - 0.75).abs() < 0.05, "{share}, not 3 of 4 bytes");
    let [wlan, lte] = run("redundant", "each piece goes over 2 links");
    println!("redundant: {wlan} and {lte} bytes of a stream of {SIZE}");
    for (link, bytes) in [("wlan0", wlan), ("lte0", lte)] {
        // Headers and control add some 8 %.
        assert!((1.0..1.12).contains(&(bytes / SIZE as f64)), "{link} carried {bytes} bytes of {SIZE}");
    }
    assert!((wlan / lte - 1.0).abs() < 0.05, "{wlan} and {lte} bytes");
}

/// OPERETTA's weights: at least energy the cheap link alone; at most throughput both, by their capacity; halfway 10 of 20 Mbit/s each.
#[test]
fn operettas_weights_hold_at_the_relay_and_are_explained() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start(&lab);
    let with = |utility: &str| config(&format!("scheduler = \"operetta\"\nutility = {utility}\n"), "");
    let up = relay.join(&with("0"));
    for (utility, expected) in [("0", 0.0), ("0.5", 0.5), ("1", 2.0 / 3.0)] {
        reload(&up, &with(utility));
        let child = curl(&lab, &web.url(ByteCount::new(3_000_000)).unwrap());
        let mut explained = Value::Null;
        eventually("the weights are explained", || {
            let Some(id) = bond_flow(&up).and_then(|flow| flow["id"].as_u64()) else { return false };
            explained = serde_json::from_slice(&up.braid(&["explain", &id.to_string(), "--json"]).stdout).unwrap_or_default();
            let weights = explained["optimum"]["weights"].as_array().map_or(&[][..], Vec::as_slice);
            let wlan = weights.iter().find(|of| of["link"] == "wlan0").and_then(|of| of["weight"].as_f64()).unwrap_or(0.0);
            !weights.is_empty() && (wlan - expected).abs() < 0.03
        });
        assert_eq!((explained["scheduler"].as_str(), explained["optimum"]["feasible"].as_bool()), (Some("weights"), Some(true)));
        ended(child);
        let share = share(&lab, &up, &web);
        println!("utility {utility}: wlan0 carries {share:.3}, expected {expected:.3}; {}", explained["optimum"]);
        assert!((share - expected).abs() < 0.05, "utility {utility}: {share}, not {expected}");
    }
}

/// A link of lower priority carries bonded traffic only while no better one delivers.
#[test]
fn bonded_traffic_waits_for_priority() {
    if !able() {
        return;
    }
    let lab = two_links().start().unwrap();
    let web = Web::start(&lab).unwrap();
    let relay = Relay::start(&lab);
    let prior = config("", "").replace("capacity_down = \"20 Mbit/s\"", "priority = 1\ncapacity_down = \"20 Mbit/s\"");
    let up = relay.join(&prior.replace("priority = 1\n", ""));
    reload(&up, &prior);
    eventually("wlan0 is a backup", || {
        let status = up.status().unwrap();
        let paths = status["peers"][0]["paths"].as_array().cloned().unwrap_or_default();
        paths.iter().any(|path| path["link"] == "wlan0" && path["state"] == "backup")
    });
    let child = curl(&lab, &web.url(ByteCount::new(6_000_000)).unwrap());
    eventually("lte0 carries it", || bond_flow(&up).is_some_and(|flow| received(&flow)[1] > 1_000_000.0));
    assert!(received(&bond_flow(&up).unwrap())[0] < 50_000.0);
    lab.dark(1).unwrap();
    eventually("wlan0 takes over", || bond_flow(&up).is_none_or(|flow| received(&flow)[0] > 1_000_000.0));
    assert_eq!(ended(child).0, 6_000_000);
}
