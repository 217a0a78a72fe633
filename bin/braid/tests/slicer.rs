//! A slicer from outside: its socket, its commands, its users, and what stays when it is killed. Needs no privileges.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Timeout of every expected event, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A slicer without switches. Dropping it kills it.
struct Slicer<'a> {
    folder: &'a Path,
    process: Child,
}

impl<'a> Slicer<'a> {
    /// Starts it, and waits until it answers.
    fn start(folder: &'a Path) -> Self {
        let process = command(folder).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let slicer = Self { folder, process };
        let begin = Instant::now();
        while !slicer.slice(&["list"]).status.success() {
            assert!(begin.elapsed() < LIMIT, "the slicer does not answer: {:?}", slicer.slice(&["list"]));
            std::thread::sleep(Duration::from_millis(20));
        }
        slicer
    }

    fn slice(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
        command.args(["net", "slice"]).args(words).arg("--socket").arg(self.folder.join("slicer.sock"));
        command.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap()
    }

    fn done(&self, words: &[&str]) -> String {
        let output = self.slice(words);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn refused(&self, words: &[&str]) -> String {
        let output = self.slice(words);
        assert!(!output.status.success(), "{words:?}: {}", text(&output.stdout));
        text(&output.stderr)
    }

    fn names(&self) -> Vec<String> {
        let status: Value = serde_json::from_slice(&self.slice(&["list", "--json"]).stdout).unwrap();
        status["slices"].as_array().unwrap().iter().map(|slice| slice["name"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Slicer<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn command(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_braid"));
    command.args(["net", "slicer", "--listen", "127.0.0.1:0", "--state-dir"]).arg(folder.join("state"));
    command.arg("--socket").arg(folder.join("slicer.sock")).arg("--config").arg(folder.join("slicer.toml"));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const FILE: &str = "[[slice]]\nname = \"base\"\ncontrollers = [\"127.0.0.1:1\"]\n[[slice.space]]\nports = [1]\n";

#[test]
fn slices_are_made_changed_and_removed_and_stay_when_the_slicer_is_killed() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("slicer.toml"), FILE).unwrap();
    let slicer = Slicer::start(folder.path());
    assert_eq!(slicer.names(), ["production", "base"]);
    slicer.done(&["add", "vlan", "--controller", "127.0.0.1:2", "--match", "vlan=10", "--priority", "1"]);
    let overlap = slicer.refused(&["add", "other", "--port", "1"]);
    assert!(overlap.contains("slices base and other overlap") && overlap.contains("priorities"), "{overlap}");
    assert!(slicer.refused(&["add", "vlan", "--match", "vlan=11"]).contains("there is a slice vlan already"));
    assert!(slicer.refused(&["add", "x", "--match", "colour=red"]).contains("there is no condition"));
    assert!(slicer.refused(&["remove", "base"]).contains("is in the configuration file"));
    // What is not said stays.
    slicer.done(&["change", "vlan", "--rate", "10 Mbit/s"]);
    let status: Value = serde_json::from_slice(&slicer.slice(&["list", "--json"]).stdout).unwrap();
    let slice = status["slices"].as_array().unwrap().iter().find(|slice| slice["name"] == "vlan").unwrap();
    assert_eq!((slice["rate_bps"].as_u64(), slice["controllers"][0].as_str()), (Some(10_000_000), Some("127.0.0.1:2")));
    assert_eq!(slice["space"][0]["match"], "vlan_vid=0x100a");
    slicer.done(&["stage", "next", "--of", "vlan", "--controller", "127.0.0.1:3", "--percent", "10"]);
    drop(slicer);
    let slicer = Slicer::start(folder.path());
    assert_eq!(slicer.names(), ["production", "base", "vlan", "next"]);
    assert!(slicer.refused(&["rollback", "vlan"]).contains("no new version"));
    slicer.done(&["rollback", "next"]);
    slicer.done(&["remove", "vlan"]);
    assert_eq!(slicer.names(), ["production", "base"]);
    assert!(slicer.refused(&["remove", "vlan"]).contains("there is no slice vlan"));
}

#[test]
fn users_opt_in_and_out_by_themselves_or_by_an_operator() {
    let folder = tempfile::tempdir().unwrap();
    // A port that is free now.
    let users = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let open = "[[slice]]\nname = \"open\"\npriority = 2\nopt_in = true\n";
    std::fs::write(folder.path().join("slicer.toml"), format!("users_listen = [\"{users}\"]\n{FILE}{open}")).unwrap();
    let slicer = Slicer::start(folder.path());
    assert!(slicer.done(&["opt-in", "open", "--at", &users]).contains("127.0.0.1"));
    slicer.done(&["opt-in", "open", "--user", "02:00:5e:10:00:01"]);
    let shown = slicer.done(&["list"]);
    assert!(shown.contains("2 users"), "{shown}");
    assert!(slicer.refused(&["opt-in", "base", "--at", &users]).contains("takes no users"));
    assert!(slicer.refused(&["opt-in", "open", "--user", "somebody"]).contains("neither an Ethernet address nor an IP address"));
    slicer.done(&["opt-out", "--at", &users]);
    assert!(slicer.refused(&["opt-out", "--user", "127.0.0.1"]).contains("is in no slice"));
}

#[test]
fn what_is_wrong_with_the_configuration_is_said_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("slicer.toml"), format!("{FILE}{}", FILE.replace("base", "twin"))).unwrap();
    let Output { status, stderr, .. } = command(folder.path()).output().unwrap();
    let said = text(&stderr);
    assert!(!status.success() && said.contains("slices base and twin overlap"), "{said}");
}
