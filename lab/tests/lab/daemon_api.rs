//! The daemon's API and page: changes of the configuration at run time, the log, and the page over TCP.

use std::fs;
use std::net::TcpStream;

use crate::support::*;
use braid_lab::{Lab, Web};
use braid_model::ByteCount;
use serde_json::{Value, json};

const ROUND_ROBIN: &str = "# Ours.\nscheduler = \"round-robin\" # steady\n";

/// Waits until new flows use exactly these addresses.
#[track_caller]
fn use_exactly(lab: &Lab, addresses: &[&str]) {
    eventually(&format!("flows use {addresses:?}"), || {
        let mut found: Vec<String> =
            lab.client().run(|| (0..8).filter_map(|_| local_of(remote(10, 9)).ok()).map(|ip| ip.to_string()).collect()).unwrap();
        found.sort();
        found.dedup();
        found == addresses
    });
}

fn notes(up: &Up<'_>) -> Vec<String> {
    let (_, notes) = up.api("GET /v1/notes", &Value::Null);
    notes["notes"].as_array().unwrap().iter().map(|note| note["text"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_rule_from_the_page_applies_to_new_flows_and_is_logged() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let web = Web::start(&lab).unwrap();
    web.url(ByteCount::new(1000)).unwrap();
    let up = Up::start(&lab, ROUND_ROBIN);
    use_exactly(&lab, &["10.77.0.2", "10.77.1.2"]);
    let file = lab.directory().join("braid/braid.toml");
    let before = fs::read_to_string(&file).unwrap();
    let (_, config) = up.api("GET /v1/config", &Value::Null);
    assert_eq!((config["text"].as_str().unwrap(), &config["writable"]), (before.as_str(), &json!(true)));
    let rule = json!({"match": {"port": 9}, "links": ["lte0"]});
    let change = json!({"revision": config["revision"], "edits": [{"op": "app-add", "value": rule}]});
    let (status, preview) = up.api("POST /v1/config/preview", &change);
    assert!(status == 200 && preview["changes"][0].as_str().unwrap().starts_with("rule 1 is added for port = 9"), "{preview}");
    use_exactly(&lab, &["10.77.0.2", "10.77.1.2"]);
    let (status, applied) = up.api("POST /v1/config", &change);
    assert_eq!((status, applied["text"].as_str().unwrap()), (200, fs::read_to_string(&file).unwrap().as_str()));
    assert!(applied["text"].as_str().unwrap().contains("# Ours.\nscheduler = \"round-robin\" # steady\n"));
    use_exactly(&lab, &["10.77.1.2"]);
    let (status, undone) = up.api("POST /v1/config/undo", &Value::Null);
    assert_eq!((status, undone["text"].as_str().unwrap(), fs::read_to_string(&file).unwrap()), (200, before.as_str(), before.clone()));
    use_exactly(&lab, &["10.77.0.2", "10.77.1.2"]);

    client(&lab, "ip link set lte0 down");
    eventually("the end of a link is told", || notes(&up).iter().any(|note| note.starts_with("lte0 went") && note.contains("wlan0")));
    eventually("seconds are remembered", || {
        let (_, history) = up.api("GET /v1/history?resolution=1s", &Value::Null);
        history["samples"].as_array().unwrap().len() >= 3
    });
    let told = notes(&up);
    assert!(told.iter().any(|note| note.contains("undone")), "{told:?}");
}

#[test]
fn the_page_over_tcp_needs_a_token() {
    if !able() {
        return;
    }
    let lab = lab(1);
    let up = Up::start_told(&lab, ROUND_ROBIN, &lab.directory().join("state"), &["--ui"]);
    let ask = |what: &str, headers: &str, body: &str| {
        lab.client().run(|| http(TcpStream::connect(("127.0.0.1", 5759)).unwrap(), what, headers, body)).unwrap()
    };
    let (status, page, _) = ask("GET /", "", "");
    assert!(status == 200 && page.to_lowercase().starts_with("<!doctype html>"), "{page}");
    assert_eq!(ask("GET /v1/status", "", "").0, 401);
    let told = up.braid(&["ui", "--print"]);
    let url = String::from_utf8(told.stdout).unwrap();
    let ticket = url.trim().strip_prefix("http://127.0.0.1:5759/#token=").unwrap_or_else(|| panic!("{url}")).to_owned();
    let (status, _, head) = ask("POST /v1/session", "", &json!({"token": ticket}).to_string());
    let cookie = head.lines().find_map(|line| line.strip_prefix("set-cookie: ")).unwrap().split(';').next().unwrap().to_owned();
    assert_eq!(status, 200);
    let (status, facts, _) = ask("GET /v1/status", &format!("cookie: {cookie}\r\n"), "");
    assert_eq!((status, &serde_json::from_str::<Value>(&facts).unwrap()["ui"]), (200, &json!("http://127.0.0.1:5759/")));
    assert_eq!(ask("POST /v1/reload", &format!("cookie: {cookie}\r\norigin: http://evil.example\r\n"), "").0, 403);
    assert_eq!(ask("POST /v1/reload", &format!("cookie: {cookie}\r\n"), "").0, 200);
}
