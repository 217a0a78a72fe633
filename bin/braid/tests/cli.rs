//! End-to-end tests of the binary: without a daemon, with a fake daemon that answers from fixed data, and with files of all kinds.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use braid_api::{
    Accepted, AppHistory, AppSample, AppsSample, Compared, Gains, History, LinkGain, LinkSample, Note, Resolution, Sample, Status,
};
use braid_control::RequestError;
use braid_http::{Api, FlowList, InitialState, Request, Server};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

/// One hour ahead of UTC, two in summer; needs no time zone database.
const ZONE: &str = "CET-1CEST,M3.5.0,M10.5.0/3";

fn braid(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
    command.args(words).env("TZ", ZONE).env_remove("BRAID_SOCKET").env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Standard output of a command that must succeed.
fn succeed(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{command:?}: {}", text(&stderr));
    text(&stdout)
}

/// Standard error of a command that must fail with `code`.
fn fail(mut command: Command, code: i32) -> String {
    let Output { status, stderr, .. } = command.output().unwrap();
    assert_eq!(status.code(), Some(code), "{command:?}: {}", text(&stderr));
    text(&stderr)
}

/// A daemon that answers from fixed data until it is dropped.
struct FakeDaemon {
    folder: tempfile::TempDir,
    end: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl FakeDaemon {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("braid.sock");
        let (end, ended) = oneshot::channel();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let server = Server::bind(&path).unwrap();
                ready.send(()).unwrap();
                let (send, receive) = mpsc::channel(4);
                tokio::spawn(answer(receive));
                let (api, _feed, _spreader) = Api::new(send);
                server.serve(api, async { drop(ended.await) }).await.unwrap();
            });
        });
        is_ready.recv().unwrap();
        Self { folder, end: Some(end), thread: Some(thread) }
    }

    fn ask(&self, words: &[&str]) -> Command {
        let mut command = braid(words);
        command.env("BRAID_SOCKET", self.folder.path().join("braid.sock"));
        command
    }
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        drop(self.end.take());
        let _ = self.thread.take().unwrap().join();
    }
}

fn fixed(value: Value) -> Status {
    serde_json::from_value(value).unwrap()
}

fn status() -> Value {
    let link = json!({
        "name": "wlan0", "state": "up", "kind": "wireless", "addresses": ["10.0.0.2/24"], "capacity_down_bps": 20_000_000,
        "capacity_up_bps": null, "rtt_us": null, "loss": null, "rx_bytes": null, "tx_bytes": null, "flows": 0,
    });
    json!({"schema_version": 1, "version": "9.9.9", "scheduler": "round-robin", "links": [link], "flows": 0})
}

fn note(id: u64, text: &str) -> Note {
    Note { id, at_ms: 1_795_308_607_000, kind: "link".into(), level: "info".into(), text: text.into() }
}

async fn answer(mut requests: mpsc::Receiver<Request>) {
    while let Some(request) = requests.recv().await {
        match request {
            Request::Status(answer) => drop(answer.send(Ok(fixed(status())))),
            Request::Flows(answer) => drop(answer.send(Ok(FlowList::default().into()))),
            Request::Notes(_, answer) => drop(answer.send(Ok(vec![note(1, "one"), note(2, "two\u{1b}[2J")]))),
            Request::Subscribe(_, answer) => {
                let notes = vec![note(2, "two"), note(3, "three")];
                let first = InitialState {
                    status: fixed(status()),
                    flows: Default::default(),
                    apps: vec![],
                    peers: vec![],
                    last_note: 3,
                    notes,
                    sample: None,
                    app_sample: None,
                };
                drop(answer.send(Ok(Box::new(first))));
            }
            Request::History(resolution, _, answer) => {
                let link = LinkSample { name: "wlan0".into(), rx_bps: Some(8000), ..LinkSample::default() };
                let samples = vec![Sample { at_ms: 1_795_308_607_000, links: vec![link] }];
                let resolution_ms = if resolution == Resolution::Hour { 3_600_000 } else { 1000 };
                drop(answer.send(Ok(History { resolution_ms, samples })));
            }
            Request::AppHistory(_, _, application, answer) => {
                let app = AppSample { application: application.unwrap_or("curl".into()), rx_bps: 8000, tx_bps: 80, flows: 2 };
                let sample = AppsSample { at_ms: 1_795_308_607_000, apps: vec![app], rest_rx_bps: 1000, rest_tx_bps: 0 };
                drop(answer.send(Ok(AppHistory { resolution_ms: 1000, samples: vec![sample] })));
            }
            Request::Gains(days, answer) => {
                let energy_j = Compared { actual: Some(7.0), only_one: Some(4.0) };
                let links = vec![LinkGain { name: "wlan0".into(), rx_bytes: 1000, tx_bytes: 2000 }];
                let gains = Gains { days, links, flows_moved: 12, flows_ended: 3, outage_bridged_s: 75, energy_j, ..Gains::default() };
                drop(answer.send(Ok(gains)));
            }
            Request::Reload(answer) => drop(answer.send(Err(RequestError::invalid("Refused", "line 3 is wrong")))),
            Request::Down(answer) => drop(answer.send(Ok(Accepted { message: "going down".into(), warnings: Vec::new() }))),
            _ => {}
        }
    }
}

#[test]
fn a_missing_daemon_is_reported_with_the_remedy() {
    for words in [&["status"][..], &["flows", "--json"], &["reload"], &["explain", "3"]] {
        let mut command = braid(words);
        command.env("BRAID_SOCKET", "/nonexistent/braid.sock");
        let said = fail(command, 1);
        assert!(said.contains("/nonexistent/braid.sock") && said.contains("sudo braid up"), "{said}");
    }
}

#[test]
fn every_way_to_start_the_daemon_needs_root() {
    use std::os::unix::process::CommandExt;
    for words in [&["up"][..], &["up", "--foreground"], &["daemon"]] {
        // A user other than root may not be able to reach the program, and only root can switch users.
        let asked = braid(words).uid(65534).output();
        let Ok(asked) = asked else { return eprintln!("skipped, the user nobody cannot run the program: {asked:?}") };
        let said = text(&asked.stderr);
        assert!(asked.status.code() == Some(1) && said.contains("must run as root"), "{words:?}: {said}");
    }
    assert!(fail(braid(&["up", "--detached"]), 2).contains("--detached"));
    let help = succeed(braid(&["daemon", "--help"]));
    assert!(help.contains("--state-dir") && !help.contains("--detached") && !help.contains("--foreground"), "{help}");
}

#[test]
fn facts_are_printed_as_tables_or_json_with_null_for_unknown_values() {
    let daemon = FakeDaemon::start();
    let table = succeed(daemon.ask(&["status"]));
    let expected = "braid 9.9.9: round-robin, 0 flows\nLINK   STATE  KIND             DOWN  UP  RTT  LOSS  FLOWS  ENERGY\nwlan0  up     wireless  20.0 Mbit/s   -    -     -      0       -\n";
    assert_eq!(table, expected);
    let read: Value = serde_json::from_str(&succeed(daemon.ask(&["status", "--json"]))).unwrap();
    assert_eq!((&read["links"][0]["rtt_us"], &read["schema_version"]), (&Value::Null, &json!(1)));
    assert_eq!(succeed(daemon.ask(&["flows", "--json"])), "{\n  \"schema_version\": 1,\n  \"flows\": []\n}\n");
}

#[test]
fn the_log_is_printed_and_followed() {
    let daemon = FakeDaemon::start();
    assert_eq!(succeed(daemon.ask(&["log"])), "2026-11-22 01:50:07  one\n2026-11-22 01:50:07  two\u{fffd}[2J\n");
    assert!(succeed(daemon.ask(&["log", "--utc"])).starts_with("2026-11-22 00:50:07  one\n"));
    assert_eq!(succeed(daemon.ask(&["log", "-n", "1", "--json"])).matches("\"id\"").count(), 1);
    let read: Value = serde_json::from_str(&succeed(daemon.ask(&["log", "--json"]))).unwrap();
    assert_eq!((&read["schema_version"], &read["notes"][0]["at_ms"]), (&json!(1), &json!(1_795_308_607_000u64)));
    let mut follow = daemon.ask(&["log", "--follow", "-n", "0"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follow.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "2026-11-22 01:50:07  three");
    follow.kill().unwrap();
    follow.wait().unwrap();
}

#[test]
fn a_time_zone_can_be_named_and_an_unknown_one_is_utc() {
    let daemon = FakeDaemon::start();
    let first = |zone: &str| {
        let mut log = daemon.ask(&["log", "-n", "2"]);
        log.env("TZ", zone);
        succeed(log).lines().next().unwrap().to_owned()
    };
    assert_eq!(first("Nowhere/Nothing"), "2026-11-22 00:50:07  one");
    if !Path::new("/usr/share/zoneinfo/America/New_York").exists() {
        return eprintln!("skipped, this system has no time zone database: install tzdata");
    }
    assert_eq!(first("America/New_York"), "2026-11-21 19:50:07  one");
}

#[test]
fn history_and_gains_are_printed() {
    let daemon = FakeDaemon::start();
    let links = succeed(daemon.ask(&["history", "--resolution", "1h"]));
    let expected =
        "WHEN                 LINK         DOWN  UP  RTT  LOSS  POWER\n2026-11-22 01:50:07  wlan0  8.0 kbit/s   -    -     -      -\n";
    assert_eq!(links, expected);
    assert!(succeed(daemon.ask(&["history", "--utc", "--resolution", "1h"])).contains("\n2026-11-22 00:50:07  wlan0"));
    let read: Value = serde_json::from_str(&succeed(daemon.ask(&["history", "--resolution", "1h", "--json"]))).unwrap();
    assert_eq!(read["resolution_ms"], json!(3_600_000));
    let apps = succeed(daemon.ask(&["history", "--apps"]));
    assert!(
        apps.lines().nth(1).unwrap().starts_with("2026-11-22 01:50:07  curl") && apps.lines().nth(2).unwrap().contains("(others)"),
        "{apps}"
    );
    assert!(succeed(daemon.ask(&["history", "--apps", "--utc"])).contains("\n2026-11-22 00:50:07  curl"));
    let one = succeed(daemon.ask(&["history", "--apps", "--app", "a b/&ü"]));
    assert!(one.contains("a b/&ü") && !one.contains("others"), "{one}");
    assert!(fail(daemon.ask(&["history", "--app", "curl"]), 2).contains("--apps"));
    let gains = succeed(daemon.ask(&["gains", "--days", "7"]));
    for part in ["the last 7 days", "another link     12", "1 min 15 s", "7.0 J, over the default link alone 4.0 J", "wlan0"] {
        assert!(gains.contains(part), "{part}: {gains}");
    }
    assert!(!gains.contains("money  "), "{gains}");
    assert!(fail(daemon.ask(&["gains", "--days", "401"]), 2).contains("401"));
}

#[test]
fn errors_of_the_daemon_are_passed_on() {
    let daemon = FakeDaemon::start();
    assert_eq!(fail(daemon.ask(&["reload"]), 1), "braid: Refused: line 3 is wrong\n");
    assert_eq!(succeed(daemon.ask(&["down"])), "going down\n");
    assert!(fail(daemon.ask(&["apps"]), 1).contains("ending"));
}

#[test]
fn a_server_other_than_braid_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let other = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut stream, b"220 mail.example ESMTP\r\n").unwrap();
    });
    let said = fail(braid(&["status", "--socket", path.to_str().unwrap()]), 1);
    assert!(said.contains("does not answer like a Braid daemon"), "{said}");
    other.join().unwrap();
}

#[test]
fn a_reader_that_closes_the_pipe_is_not_an_error() {
    let daemon = FakeDaemon::start();
    let mut child = daemon.ask(&["status"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{}", text(&done.stderr));
    let mut child = braid(&["completions", "bash"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait_with_output().unwrap().stderr.is_empty());
}

fn check(file: &Path, more: &[&str]) -> Output {
    braid(&["check", file.to_str().unwrap()]).args(more).output().unwrap()
}

#[test]
fn check_shows_what_is_wrong_and_where() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("braid.toml");
    std::fs::write(&file, "version = 1\nsheduler = \"only-one\"\n").unwrap();
    let checked = check(&file, &[]);
    let said = text(&checked.stdout);
    assert_eq!(checked.status.code(), Some(1), "{said}");
    assert!(said.contains("braid.toml:2:1: error: ") && said.contains("did you mean \"scheduler\"?") && said.contains("1 error"), "{said}");

    let read: Value = serde_json::from_slice(&check(&file, &["--json"]).stdout).unwrap();
    assert_eq!((&read["ok"], &read["findings"][0]["line"]), (&json!(false), &json!(2)));

    std::fs::write(&file, "scheduler = \"only-one\"\n[[app]]\nmatch = { exe = \"/opt/none/such\" }\n").unwrap();
    let said = text(&check(&file, &[]).stdout).to_owned();
    assert!(said.contains("there is currently no program /opt/none/such") && said.contains("valid (1 warning)"), "{said}");
    std::fs::write(&file, "[[app]]\nmatch = { name = \"curl\" }\nlinks = [\"no-such-link\"]\n").unwrap();
    assert_eq!(check(&file, &[]).status.code(), Some(1));
    let portable = check(&file, &["--portable"]);
    assert!(portable.status.success() && text(&portable.stdout).contains("valid (1 warning)"), "{}", text(&portable.stdout));
    let said = fail(braid(&["check", "/nonexistent"]), 1);
    assert!(said.contains("there is no file /nonexistent: give the path") && !said.contains("--config"), "{said}");
}

#[test]
fn the_shipped_example_is_valid() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../braid.example.toml");
    let checked = check(&example, &[]);
    assert!(checked.status.success(), "{}", text(&checked.stdout));
}

#[test]
fn wrong_usage_ends_with_2() {
    for words in [&["statsu"][..], &[], &["run"], &["run", "-s", "fastest", "true"], &["check", "a", "b"]] {
        fail(braid(words), 2);
    }
}

#[test]
fn the_doctor_reports_checks_with_remedies() {
    let output = braid(&["doctor", "--json"]).output().unwrap();
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(read["checks"].as_array().unwrap().len() >= 10 && read["whole_machine"].is_boolean());
    let checks = read["checks"].as_array().unwrap();
    assert!(checks.iter().all(|check| check["verdict"] != "missing" || check["remedy"].is_string()), "{read:#}");
}

/// An invitation to a relay that need not exist.
fn invitation() -> String {
    let key = braid_peer::keys::KeyPair::generate().unwrap().public();
    let token = braid_peer::invite::Token::generate().unwrap();
    braid_peer::invite::Invite::new(key, token, vec!["192.0.2.1:5757".parse().unwrap()], None).unwrap().to_line()
}

#[test]
fn regression_an_invitation_can_be_read_from_standard_input() {
    let line = invitation();
    for words in [&["join", "--user", "--name", "home"][..], &["join", "--user", "--name", "home", "-"]] {
        let home = tempfile::tempdir().unwrap();
        let joining = || {
            let mut command = braid(words);
            command.env("XDG_STATE_HOME", home.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command
        };
        let refused = fail(joining(), 1);
        assert!(refused.contains("standard input has no invitation"), "{refused}");
        let mut child = joining().stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(format!("{line}\nnot this\n").as_bytes()).unwrap();
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success() && text(&done.stdout).contains("home is joined"), "{}", text(&done.stderr));
    }
}

#[test]
fn an_invitation_is_asked_for_on_a_terminal_and_not_shown() {
    if !Path::new("/usr/bin/script").exists() {
        return;
    }
    let (line, home) = (invitation(), tempfile::tempdir().unwrap());
    let mut command = Command::new("script");
    let join = format!("{} join --user --name home", env!("CARGO_BIN_EXE_braid"));
    command.args(["-qec", &join, "/dev/null"]).env("XDG_STATE_HOME", home.path()).env("TERM", "xterm").env_remove("BRAID_SOCKET");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut shown, mut said) = (child.stdout.take().unwrap(), String::new());
    let mut until = |wanted: &str| {
        let mut byte = [0];
        while !said.contains(wanted) {
            assert!(std::io::Read::read(&mut shown, &mut byte).unwrap() == 1, "the output ended before {wanted:?}: {said}");
            said.push(byte[0].into());
        }
        said.clone()
    };
    until("invitation: ");
    child.stdin.as_mut().unwrap().write_all(format!("{line}\r").as_bytes()).unwrap();
    let said = until("home is joined");
    assert!(!said.contains(&line[..12]), "{said}");
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn regression_secrets_of_a_download_can_be_read_from_files() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("fields");
    std::fs::write(&file, "X-Key: one\n\nX-Other: two\nwrong\n").unwrap();
    let get = |words: &[&str]| {
        let mut command =
            braid(&[&["get", "http://192.0.2.1/file", "-o"][..], &[home.path().join("out").to_str().unwrap()], words].concat());
        command.env("XDG_STATE_HOME", home.path());
        command
    };
    let from = format!("@{}", file.display());
    let error = fail(get(&["--header", &from]), 26);
    assert!(error.contains("line 4") && error.contains("NAME: VALUE"), "{error}");
    let error = fail(get(&["--user", "ann"]), 2);
    assert!(error.contains("ann") && error.contains("--netrc-file"), "{error}");
}

#[test]
fn the_doctor_reports_to_scripts_by_its_exit_status() {
    let asked = |mode: &str| braid(&["doctor", "--json", "--for", mode]).output().unwrap();
    let run = asked("run");
    assert_eq!(run.status.code(), Some(0), "{run:?}");
    let read: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!((read["modes"][0]["name"].as_str(), read["modes"][0]["verdict"].as_str()), (Some("run"), Some("ok")));
    assert!(read["checks"].as_array().unwrap().iter().all(|check| check["needed_by_run"] == true), "{read:#}");
    let up = asked("up");
    let read: Value = serde_json::from_slice(&up.stdout).unwrap();
    let expected = match read["modes"][0]["verdict"].as_str().unwrap() {
        "ok" => 0,
        "missing" => 1,
        _ => 3,
    };
    assert_eq!(up.status.code(), Some(expected), "{read:#}");
    let programs = read["checks"].as_array().unwrap().iter().find(|check| check["name"] == "BPF programs").unwrap();
    assert!(programs["verdict"] != "ok" || programs["found"].as_str().unwrap().contains("accepts"), "{programs}");
}

#[test]
fn the_doctor_refers_an_unprivileged_user_to_root() {
    use std::os::unix::process::CommandExt;
    // A user other than root may not be able to reach the program, and only root can switch users.
    let asked = braid(&["doctor", "--for", "up", "--socket", "/nonexistent"]).uid(65534).output();
    let Ok(asked) = asked else { return eprintln!("skipped, the user nobody cannot run the program: {asked:?}") };
    let said = text(&asked.stdout);
    if said.contains("no: ") {
        return eprintln!("skipped, up cannot work on this system, and no root is needed to see it: {said}");
    }
    assert_eq!(asked.status.code(), Some(3), "{said}");
    assert!(said.contains("sudo braid doctor") && said.contains("braid up:  not known: privilege, BPF programs"), "{said}");
}

#[test]
fn completions_and_manual_pages_are_written() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(succeed(braid(&["completions", shell])).contains("explain"), "{shell}");
    }
    let page = succeed(braid(&["man"]));
    assert!(page.contains(".TH braid") && !page.contains("watchdog"), "{page}");
    let folder = tempfile::tempdir().unwrap();
    succeed(braid(&["man", folder.path().to_str().unwrap()]));
    assert!(folder.path().join("braid-up.1").exists() && folder.path().join("braid-daemon.1").exists());
}
