//! Shared code of the tests of bonded flows: a relay on the server's side, and programs whose flows it carries.

use std::fs::File;
use std::process::{Child, Stdio};

use braid_lab::{Lab, ms};
use serde_json::Value;

use super::{LIMIT, Up, braid, eventually};

/// A relay in the server's namespace.
pub struct Relay<'a> {
    lab: &'a Lab,
    pub child: Child,
}

impl<'a> Relay<'a> {
    pub fn start(lab: &'a Lab) -> Self {
        Self::start_told(lab, &["--allow", "203.0.113.0/24"])
    }

    pub fn start_told(lab: &'a Lab, more: &[&str]) -> Self {
        let home = lab.directory().join("relay");
        std::fs::create_dir_all(&home).unwrap();
        let log = File::options().create(true).append(true).open(home.join("log")).unwrap();
        let mut command = lab.server().command(braid()).unwrap();
        command.args(["relay", "--listen", "[::]:5757"]).args(more).arg("--state-dir").arg(home.join("state"));
        let child = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        eventually("the relay is up", || std::fs::read_to_string(home.join("log")).is_ok_and(|log| log.contains("the relay is up")));
        Self { lab, child }
    }

    pub fn signal(&self, name: &str) {
        let sent = std::process::Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status();
        assert!(sent.unwrap().success());
    }

    /// A daemon with this configuration that has joined the relay over both links.
    pub fn join(&self, config: &str) -> Up<'a> {
        let up = Up::start(self.lab, config);
        let joined = up.braid(&["join", &self.invite(), "--name", "home"]);
        assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
        let mut good = 0;
        let begin = std::time::Instant::now();
        while good < 2 {
            good = good_paths(&up);
            assert!(begin.elapsed() < LIMIT, "{good} of 2 paths are good: {}", up.status().unwrap()["peers"]);
            std::thread::sleep(ms(20));
        }
        up
    }

    pub fn invite(&self) -> String {
        self.invite_to(20)
    }

    /// An invitation to this host of the lab's Internet, whether or not the relay runs.
    pub fn invite_to(&self, host: u8) -> String {
        let mut command = self.lab.server().command(braid()).unwrap();
        let address = format!("{}:5757", Lab::internet(host));
        command.args(["relay", "invite", "--address", &address]).arg("--state-dir").arg(self.lab.directory().join("relay/state"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for Relay<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("relay:\n{}", std::fs::read_to_string(self.lab.directory().join("relay/log")).unwrap_or_default());
        }
    }
}

/// Number of good paths to the first peer.
pub fn good_paths(up: &Up<'_>) -> usize {
    let status = up.status().unwrap();
    let peer = &status["peers"][0];
    let paths = peer["paths"].as_array().map_or(&[][..], Vec::as_slice);
    paths.iter().filter(|path| path["state"] == "good").count()
}

/// The first bonded flow.
pub fn bond_flow(up: &Up<'_>) -> Option<Value> {
    up.flows().into_iter().find(|flow| flow["carry"] == "bond")
}

/// Starts a download.
pub fn curl(lab: &Lab, url: &str) -> Child {
    let mut command = lab.client().command("curl").unwrap();
    command.args(["-sS", "--fail", "--max-time", "60", "-o", "/dev/null", "-w", "%{size_download} %{remote_ip}"]).arg(url);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Output of curl: bytes, and the remote address that it sees.
pub fn ended(child: Child) -> (u64, String) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "curl: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let (size, peer) = text.split_once(' ').unwrap();
    (size.parse().unwrap(), peer.to_owned())
}
