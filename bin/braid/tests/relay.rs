//! Tests of the relay's client management: the binary on a state directory.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, chown, lchown, symlink};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::SystemTime;

use braid_peer::invite::Invite;
use braid_peer::keys::{KeyPair, RELAY_KEY};
use braid_peer::registry::Registry;
use braid_peer::state::StateDir;
use serde_json::Value;

/// State directory of a relay.
struct Relay {
    folder: tempfile::TempDir,
}

impl Relay {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn dir(&self) -> PathBuf {
        self.folder.path().join("relay")
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
        command.arg("relay").args(words).env("BRAID_RELAY_STATE_DIR", self.dir()).env_remove("RUST_LOG").stdin(Stdio::null());
        command.output().unwrap()
    }

    /// Standard output of a command that must succeed.
    fn ask(&self, words: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.run(words);
        assert!(status.success(), "{words:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }

    /// Standard error of a command that must fail.
    fn fail(&self, words: &[&str]) -> String {
        let Output { status, stderr, .. } = self.run(words);
        assert!(!status.success(), "{words:?} must fail");
        String::from_utf8(stderr).unwrap()
    }

    fn clients(&self) -> Value {
        let view: Value = serde_json::from_str(&self.ask(&["clients", "--json"])).unwrap();
        assert_eq!(view["schema_version"], 1);
        view["clients"].clone()
    }

    /// Does what the relay does when a client joins with an invitation.
    fn join(&self, line: &str) -> String {
        let invite = Invite::parse(line).unwrap();
        let key = KeyPair::generate().unwrap().public();
        let mut registry = Registry::open(&StateDir::open(&self.dir()).unwrap()).unwrap();
        registry.redeem(&invite.token, &key, invite.name.as_ref(), SystemTime::now()).unwrap();
        key.to_string()
    }
}

#[test]
fn an_invitation_is_one_line_with_the_relays_addresses() {
    let relay = Relay::new();
    let line = relay.ask(&["invite", "--address", "relay.example.org:5757", "--address", "[2001:db8::1]:443", "--name", "phone"]);
    assert_eq!(line.lines().count(), 1, "no QR code without a terminal: {line}");
    let invite = Invite::parse(&line).unwrap();
    let key = KeyPair::load(&relay.dir().join(RELAY_KEY)).unwrap().unwrap().public();
    assert_eq!((invite.relay, invite.addresses().len(), invite.name.as_ref().map(|name| name.as_str())), (key, 2, Some("phone")));
    let view: Value = serde_json::from_str(&relay.ask(&["invite", "--address", "192.0.2.1:1", "--expires", "1h", "--json"])).unwrap();
    assert_eq!(view["relay_key"], key.to_string(), "the relay keeps its key");
    let other = Invite::parse(view["line"].as_str().unwrap()).unwrap();
    assert_ne!(other.token, invite.token);
    let left = view["expires_unix"].as_u64().unwrap() as i64 - unix();
    assert!((3000..=3600).contains(&left), "{left}");
}

#[test]
fn regression_root_does_not_follow_another_users_link_to_a_state_directory() {
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        return; // only root can act for another user
    }
    let relay = Relay::new();
    let (home, ours) = (relay.folder.path(), tempfile::tempdir().unwrap());
    chown(home, Some(65534), Some(65534)).unwrap();
    symlink(ours.path(), relay.dir()).unwrap();
    lchown(relay.dir(), Some(65534), Some(65534)).unwrap();
    relay.fail(&["invite", "--address", "192.0.2.1:1"]);
    assert_eq!(std::fs::read_dir(ours.path()).unwrap().count(), 0, "nothing is created at the link's target");
    std::fs::remove_file(relay.dir()).unwrap();
    relay.ask(&["invite", "--address", "192.0.2.1:1"]);
    let made = std::fs::read_dir(relay.dir()).unwrap().map(|entry| entry.unwrap().path()).chain([relay.dir()]);
    let owners: Vec<u32> = made.map(|path| path.symlink_metadata().unwrap().uid()).collect();
    assert!(owners.len() >= 3 && owners.iter().all(|owner| *owner == 65534), "the directory and its files belong to its user: {owners:?}");
}

fn unix() -> i64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() as i64
}

#[test]
fn clients_are_listed_limited_and_revoked() {
    let relay = Relay::new();
    let phone = relay.join(&relay.ask(&["invite", "--address", "192.0.2.1:1", "--name", "phone"]));
    let laptop = relay.join(&relay.ask(&["invite", "--address", "192.0.2.1:1", "--name", "laptop"]));
    let listed = relay.clients();
    assert_eq!((listed[0]["name"].as_str(), listed[0]["key"].as_str()), (Some("laptop"), Some(laptop.as_str())));
    assert_eq!((listed[1]["name"].as_str(), listed[1]["state"].as_str()), (Some("phone"), Some("admitted")));
    assert_eq!((&listed[1]["limits"]["flows"], &listed[1]["month"]["down_bytes"]), (&Value::Null, &Value::from(0)));

    let said = relay.ask(&["limit", "phone", "--rate", "10Mbit/s", "--flows", "100", "--monthly", "50GB"]);
    assert!(said.contains("10.0 Mbit/s down, 10.0 Mbit/s up, 100 flows, 50.0 GB a month"), "{said}");
    relay.ask(&["limit", &phone, "--rate-up", "1Mbit/s", "--flows", "none"]);
    let limits = &relay.clients()[1]["limits"];
    assert_eq!((&limits["rate_down_bps"], &limits["rate_up_bps"]), (&Value::from(10_000_000), &Value::from(1_000_000)));
    assert_eq!((&limits["flows"], &limits["monthly_bytes"]), (&Value::Null, &Value::from(50_000_000_000u64)));

    let table = relay.ask(&["clients"]);
    let head = table.lines().next().unwrap();
    assert!(
        ["MAX MONTH", "MAX DOWN", "MAX UP", "MAX FLOWS"].iter().all(|limit| head.contains(limit)),
        "limits are labelled as limits: {table}"
    );

    let invited = [
        "invite",
        "--address",
        "192.0.2.1:1",
        "--name",
        "guest",
        "--rate-down",
        "2Mbit/s",
        "--max-flows",
        "50",
        "--monthly",
        "1GB",
        "--json",
    ];
    let view: Value = serde_json::from_str(&relay.ask(&invited)).unwrap();
    assert_eq!((&view["limits"]["flows"], &view["limits"]["rate_up_bps"]), (&Value::from(50), &Value::Null), "{view}");
    relay.join(view["line"].as_str().unwrap());
    assert_eq!((&relay.clients()[0]["name"], &relay.clients()[0]["limits"]), (&Value::from("guest"), &view["limits"]));
    let table = relay.ask(&["clients"]);
    assert!(["2.0 Mbit/s", "1.0 GB", "50"].iter().all(|limit| table.contains(limit)), "{table}");
    assert!(relay.fail(&["invite", "--address", "192.0.2.1:1", "--flows", "0"]).contains("revoke"));
    relay.ask(&["revoke", "guest"]);

    assert!(relay.ask(&["revoke", &laptop[..8]]).contains("laptop"));
    assert!(relay.ask(&["revoke", "laptop"]).contains("already"));
    assert_eq!(relay.clients()[1]["state"], "revoked");
    let table = relay.ask(&["clients"]);
    assert!(table.contains("revoked") && table.contains("admitted") && table.contains(&phone[..8]), "{table}");
}

#[test]
fn regression_a_relay_raises_its_limit_of_open_files() {
    let relay = Relay::new();
    let mut command = Command::new("prlimit");
    command.args(["--nofile=256:1024", env!("CARGO_BIN_EXE_braid"), "relay", "--listen", "127.0.0.1:0"]);
    command.env("BRAID_RELAY_STATE_DIR", relay.dir()).env_remove("RUST_LOG").stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let (said, errors) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let up = |line: std::io::Result<String>| line.unwrap().contains("the relay is up");
    let found = std::thread::scope(|scope| {
        let wait = |from: Box<dyn std::io::Read + Send>| scope.spawn(move || BufReader::new(from).lines().any(up));
        let waiting = [wait(Box::new(said)), wait(Box::new(errors))];
        while !waiting.iter().any(std::thread::ScopedJoinHandle::is_finished) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let said = waiting.map(|thread| thread.join().unwrap());
        assert!(said.contains(&true), "it is up");
        limits
    });
    let files: Vec<&str> = found.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap().split_whitespace().collect();
    assert_eq!(files[..2], ["1024", "1024"]);
}

#[test]
fn errors_name_the_remedy() {
    let relay = Relay::new();
    for words in [&["clients"][..], &["revoke", "phone"], &["limit", "phone", "--flows", "1"]] {
        assert!(relay.fail(words).contains("--state-dir"));
        assert!(!relay.dir().exists(), "a query creates nothing");
    }
    assert!(relay.fail(&["invite"]).contains("--address"));
    assert!(relay.fail(&["invite", "--address", "relay.example.org"]).contains("no port"));
    assert!(relay.fail(&["invite", "--address", "192.0.2.1:1", "--name", "a b"]).contains("letters"));
    let many = ["--address=192.0.2.1:1"; 9];
    assert!(relay.fail(&[&["invite"], &many[..]].concat()).contains("1 to 8"));
    relay.ask(&["invite", "--address", "192.0.2.1:1"]);
    assert!(relay.ask(&["clients"]).contains("no clients yet"));
    assert!(relay.fail(&["revoke", "tablet"]).contains("braid relay clients"));
    assert!(relay.fail(&["limit", "phone"]).contains("--monthly"));
    std::fs::write(relay.dir().join("relay.sqlite"), vec![7; 5000]).unwrap();
    assert!(relay.fail(&["clients"]).contains("restore a copy"));
}
