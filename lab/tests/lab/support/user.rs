//! Shared code of the tests without a daemon and without privilege: a user of a lab with two links, and the relay that the user joined.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use braid_lab::relay::Relay;
use braid_lab::{Builder, Lab, LinkSpec, mbps, ms};

use super::{NOBODY, braid, text};

/// A lab of two links, the first of which is faster; to be started.
pub fn two_links() -> Builder {
    let wlan = LinkSpec::new("wlan0").rate(mbps(20)).delay(ms(10));
    Lab::builder().link(wlan).link(LinkSpec::new("lte0").rate(mbps(10)).delay(ms(30)))
}

/// An unprivileged user of a lab of two links.
pub struct User {
    /// The user's directory, in which commands run.
    pub home: PathBuf,
    pub lab: Lab,
}

impl User {
    pub fn new() -> Self {
        Self::of(two_links())
    }

    /// The user of a lab that is to be started.
    pub fn of(lab: Builder) -> Self {
        // Without a daemon's rules a strict filter would block the second link.
        let lab = lab.rp_filter(2).start().unwrap();
        let home = tempfile::Builder::new().prefix("user").tempdir_in(lab.directory()).unwrap().keep();
        for place in [lab.directory(), &home] {
            fs::set_permissions(place, Permissions::from_mode(0o755)).unwrap();
        }
        chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
        // The user may not have access to the build directory.
        fs::copy(braid(), home.join("braid")).unwrap();
        Self { home, lab }
    }

    /// Starts a relay, which the user joins as `home`.
    pub fn join(&self) -> Relay {
        let relay = Relay::start(&self.lab, &braid()).unwrap();
        let line = relay.invite(&self.lab).unwrap();
        let output = self.braid(&["join", "--user", &line, "--name", "home"]).output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        relay
    }

    /// A `braid` command of the user.
    pub fn braid(&self, words: &[&str]) -> Command {
        let mut command = self.lab.client().command("setpriv").unwrap();
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--", "env", "-C"]).arg(&self.home);
        command.arg(self.home.join("braid")).args(words);
        command.env("HOME", &self.home).env("PATH", "/usr/bin:/bin").env_remove("XDG_STATE_HOME").env_remove("RUST_LOG");
        command.stdin(Stdio::null());
        command
    }

    /// Writes a file in the user's directory that nobody else may read.
    pub fn keep(&self, name: &str, text: &str) {
        let path = self.home.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
    }

    /// Bytes that came over each link.
    pub fn received(&self) -> [u64; 2] {
        [0, 1].map(|link| self.lab.counters(link).unwrap().down.delivered_bytes.get())
    }
}

/// The complete output of a program.
pub fn said(output: &Output) -> String {
    text(&output.stdout) + &text(&output.stderr)
}

pub fn sha256(file: &Path) -> String {
    let output = Command::new("sha256sum").arg(file).output().unwrap();
    text(&output.stdout).split_whitespace().next().unwrap().to_owned()
}
