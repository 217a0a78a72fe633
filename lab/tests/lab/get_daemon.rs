//! `braid get` with a daemon: it uses the daemon's links, allowances and rates.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;

use crate::support::*;
use braid_lab::{Lab, LinkSpec, Web, mbps, ms};
use braid_model::ByteCount;
use serde_json::{Value, json};

const SIZE: ByteCount = ByteCount::new(4_000_000);

fn three() -> Lab {
    let links = NAMES.iter().map(|name| LinkSpec::new(name).rate(mbps(20)).delay(ms(5)));
    links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start().unwrap()
}

/// `braid get URL` with these options, asking the daemon on `socket`.
fn get(lab: &Lab, folder: &Path, socket: &Path, url: &str, options: &[&str]) -> Output {
    let mut command: Command = lab.client().command(braid()).unwrap();
    command.env("XDG_STATE_HOME", folder.join("state")).env("BRAID_SOCKET", socket).arg("get").arg("--json").args(options);
    command.arg("--output-dir").arg(folder).arg(url).stdin(Stdio::null()).output().unwrap()
}

/// Bytes of a successful download per link.
fn brought(output: &Output) -> [u64; 3] {
    assert!(output.status.success(), "{}{}", text(&output.stderr), text(&output.stdout));
    let events = text(&output.stdout);
    let finished = events.lines().find(|line| line.contains("\"finished\"")).unwrap_or_else(|| panic!("not finished: {events}"));
    let finished: Value = serde_json::from_str(finished).unwrap();
    NAMES.map(|name| finished["links"][name].as_u64().unwrap_or(0))
}

/// A daemon that only answers: `links` to `/v1/links`, no rules to `/v1/policy`.
fn fake(folder: &Path, links: Value) -> PathBuf {
    let path = folder.join("fake-daemon");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || listener.incoming().flatten().for_each(|stream| answer(stream, &links)));
    path
}

fn answer(mut stream: UnixStream, links: &Value) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut first, mut line) = (String::new(), String::new());
    let _ = reader.read_line(&mut first);
    while reader.read_line(&mut line).is_ok_and(|count| count > 2) {
        line.clear();
    }
    let policy = json!({ "schema_version": 1, "scheduler": "max-throughput", "affinity": null, "default_demand_bytes": 1, "links": [], "apps": [],
        "exclude": [] });
    let body = if first.contains("/v1/links") { json!({ "schema_version": 1, "links": links }).to_string() } else { policy.to_string() };
    let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    // Until the client disconnects.
    let _ = reader.read_to_end(&mut Vec::new());
}

fn link(name: &str, more: Value) -> Value {
    let mut link = json!({ "name": name, "state": "up", "kind": "wired", "addresses": [], "capacity_down_bps": null, "capacity_up_bps": null,
        "rtt_us": null, "loss": null, "rx_bytes": null, "tx_bytes": null, "flows": 0 });
    link.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    link
}

#[test]
fn the_daemons_link_states_allowances_and_prices_apply() {
    if !able() {
        return;
    }
    let (lab, folder) = (three(), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let url = web.url(SIZE).unwrap();
    let links = json!([
        link("wlan0", json!({ "metered": true, "cap_bytes": 10_000_000, "used_bytes": 9_500_000, "capacity_down_bps": 20_000_000 })),
        link("lte0", json!({ "state": "excluded", "reason": "an entry excludes it" })),
        link("eth0", json!({ "cost_per_gb": 1000.0 })),
    ]);
    let socket = fake(folder.path(), links);
    let [wlan, lte, eth] = brought(&get(&lab, folder.path(), &socket, &url, &[]));
    assert!(wlan <= 500_000, "{wlan} bytes of an allowance of 500,000");
    assert_eq!((lte, wlan + eth), (0, SIZE.get()));
    assert!(std::fs::read(folder.path().join("4000000.bin")).unwrap() == std::fs::read(web.file(SIZE).unwrap()).unwrap());
    // A link that the user names is used; the daemon still sets its price.
    let [wlan, lte, eth] = brought(&get(&lab, folder.path(), &socket, &url, &["--link", "lte0", "--link", "eth0", "--max-cost", "1"]));
    assert_eq!((wlan, lte + eth), (0, SIZE.get()));
    assert!(eth <= 1_000_000, "{eth} bytes for the price of 1,000,000");
    let broke = get(&lab, folder.path(), &socket, &url, &["--link", "eth0", "--max-cost", "1"]);
    assert!(!broke.status.success() && text(&broke.stdout).contains("cost"), "{}", text(&broke.stdout));
}

#[test]
fn links_that_the_daemon_holds_back_are_not_used_as_a_fallback() {
    if !able() {
        return;
    }
    let (lab, folder) = (three(), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let url = web.url(SIZE).unwrap();
    let state = |state: &str| json!({ "state": state, "reason": "so it is" });
    let links = json!([link("wlan0", state("excluded")), link("lte0", state("capped")), link("eth0", state("excluded"))]);
    let output = get(&lab, folder.path(), &fake(folder.path(), links), &url, &[]);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("wlan0: so it is") && said.contains("--link"), "{said}");
    // Dead and backup links are used if there are no others.
    std::fs::remove_file(folder.path().join("fake-daemon")).unwrap();
    let links = json!([link("wlan0", state("backup")), link("lte0", state("capped")), link("eth0", state("excluded"))]);
    let output = get(&lab, folder.path(), &fake(folder.path(), links), &url, &[]);
    assert_eq!(brought(&output), [SIZE.get(), 0, 0]);
}

#[test]
fn the_daemons_rules_apply() {
    if !able() {
        return;
    }
    let (lab, folder) = (three(), tempfile::tempdir().unwrap());
    let web = Web::start(&lab).unwrap();
    let url = web.url(SIZE).unwrap();
    let rule = |links: &str| format!("[[app]]\nmatch = {{ exe = \"{}\" }}\nlinks = [{links}]\n", braid().canonicalize().unwrap().display());
    let up = Up::start(&lab, &format!("scheduler = \"max-throughput\"\n{}", rule("\"lte0\", \"eth0\"")));
    for name in NAMES {
        up.wait_state(name, "up");
    }
    let socket = lab.directory().join("braid/socket");
    let [wlan, lte, eth] = brought(&get(&lab, folder.path(), &socket, &url, &[]));
    assert_eq!((wlan, lte + eth), (0, SIZE.get()));
    let [wlan, ..] = brought(&get(&lab, folder.path(), &socket, &url, &["--link", "wlan0"]));
    assert_eq!(wlan, SIZE.get());
}
