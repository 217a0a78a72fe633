//! Rules that programs add over the API, on real traffic: a rule leads new flows over its link until its lease or its program ends, and nothing remains of
//! it after the daemon.

use std::net::SocketAddr;
use std::process::{Child, Stdio};

use crate::support::*;
use braid_lab::Lab;
use serde_json::{Value, json};

const CONFIG: &str = "scheduler = \"only-one\"\n";
const PORT: u16 = 9_100;

/// A program that adds a rule and then runs until it is killed. It keeps no connection.
fn program(up: &Up<'_>, name: &str, host: u8, link: &str) -> Child {
    let script = "import json, socket, sys\nbody = sys.argv[2]\none = socket.socket(1, 1)\none.connect(sys.argv[1])\n\
        one.sendall(f'POST /v1/rules HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\ncontent-length: {len(body)}\\r\\n\
        connection: close\\r\\n\\r\\n{body}'.encode())\nwhile one.recv(4096): pass\none.close()\nsys.stdin.read()";
    let rule = json!({"match": {"destination": Lab::internet(host).to_string()}, "links": [link]});
    let body = json!({"name": name, "rule": rule, "lease_ms": 3_600_000}).to_string();
    let mut command = up.lab.client().command("python3").unwrap();
    command.args(["-c", script]).arg(up.socket()).arg(body).stdin(Stdio::piped()).spawn().unwrap()
}

fn end(mut program: Child) {
    program.kill().unwrap();
    program.wait().unwrap();
}

fn names(up: &Up<'_>) -> Vec<String> {
    let rules = up.api("GET /v1/rules", &Value::Null).1;
    rules["rules"].as_array().unwrap().iter().map(|rule| rule["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_rule_leads_new_flows_over_its_link_until_its_program_ends() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let (one, other): (SocketAddr, SocketAddr) = (remote(11, PORT), remote(12, PORT));
    let _sinks = [one, other].map(|to| lab.server().run(|| std::net::TcpListener::bind(to).unwrap()).unwrap());
    let mut up = Up::start(&lab, CONFIG);
    let usual = chosen(&lab, one).unwrap();
    let link = up.lab.links()[1 - usual].name().to_owned();
    let running = program(&up, "mine", 11, &link);
    eventually("the rule is there", || names(&up) == ["mine"]);
    let (stream, led) = open(&lab, one);
    assert_eq!((led, chosen(&lab, other).unwrap()), (1 - usual, usual), "only flows that the rule matches");
    let local = stream.local_addr().unwrap().to_string();
    let id = || up.flows().into_iter().find(|flow| flow["local"] == local.as_str()).map(|flow| flow["id"].clone());
    eventually("the flow is listed", || id().is_some());
    let explained = up.api("POST /v1/explain", &json!({"flow": id()})).1;
    assert_eq!((&explained["program_rule"], &explained["rule"]), (&json!("mine"), &Value::Null), "{explained}");
    end(running);
    eventually("the rule ends with the program", || names(&up).is_empty());
    assert_eq!(chosen(&lab, one).unwrap(), usual, "the policy decides again");

    // From the command line, only the lease ends it. Nothing of it remains after the daemon.
    let rule = format!("match = {{ destination = \"{}\" }}, links = [\"{link}\"]", Lab::internet(11));
    let added = up.braid(&["rules", "add", "typed", &rule, "--for", "1h"]);
    assert!(added.status.success(), "{}", text(&added.stderr));
    assert_eq!((names(&up), chosen(&lab, one).unwrap()), (vec!["typed".to_owned()], 1 - usual));
    let shown = text(&up.braid(&["rules"]).stdout);
    assert!(shown.starts_with("typed { destination = ") && shown.contains(&format!("only {link}")), "{shown}");
    up.signal("KILL");
    up.wait_end();
    let up = Up::start(&lab, CONFIG);
    assert_eq!((names(&up), chosen(&lab, one).unwrap()), (Vec::<String>::new(), usual));
}

#[test]
fn the_users_strict_entry_holds_against_a_program() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let to = remote(11, PORT);
    let _sink = lab.server().run(|| std::net::TcpListener::bind(to).unwrap()).unwrap();
    let [strict, wanted] = [0, 1].map(|number| lab.links()[number].name().to_owned());
    let up = Up::start(&lab, &format!("{CONFIG}[[app]]\nmatch = {{ port = {PORT} }}\nlinks = [\"{strict}\"]\n"));
    // Narrower than the entry: refused. Wider: the entry decides about its flows.
    let rule = |name: &str, matching: &Value| json!({"name": name, "rule": {"match": matching, "links": [wanted]}, "lease_ms": 600_000});
    let host = Lab::internet(11).to_string();
    let (status, refused) = up.api("POST /v1/rules", &rule("narrow", &json!({"port": PORT, "destination": host})));
    assert!(status == 409 && refused["detail"].as_str().unwrap().contains("[[app]] entry 1"), "{refused}");
    let (status, accepted) = up.api("POST /v1/rules", &rule("wide", &json!({"destination": host})));
    assert_eq!(status, 200, "{accepted}");
    assert_eq!(chosen_many(&lab, to, 8), [0; 8]);
}
