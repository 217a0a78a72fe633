//! `braid proxy`, run by an unprivileged user of a lab of two links.

use std::io::{BufRead, BufReader};
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, Stdio};

use braid_lab::Web;
use braid_lab::relay::Relay;
use braid_model::ByteCount;

use super::user::{User, sha256};

/// Where the proxy listens.
pub const PROXY: &str = "127.0.0.1:5758";

/// A proxy that an unprivileged user runs.
pub struct Proxied {
    proxy: Option<Child>,
    pub web: Web,
    _relay: Option<Relay>,
    pub user: User,
}

impl Deref for Proxied {
    type Target = User;

    fn deref(&self) -> &User {
        &self.user
    }
}

impl Drop for Proxied {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Proxied {
    /// With these arguments and this configuration.
    pub fn new(words: &[&str], config: &str, with_relay: bool) -> Self {
        let user = User::new();
        std::fs::write(user.home.join("braid.toml"), config).unwrap();
        user.keep("passwords", "ann:one\nbob:two\n");
        let web = Web::start(&user.lab).unwrap();
        let relay = with_relay.then(|| user.join());
        let mut proxied = Self { proxy: None, web, _relay: relay, user };
        let mut command = proxied.braid(&[&["proxy", "--config", "braid.toml"], words].concat());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("HTTP and SOCKS5 on") {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "braid proxy has ended: {line}");
        }
        // The writer must not block on this pipe.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        proxied.proxy = Some(child);
        proxied
    }

    /// Ends the proxy; the rest of the lab stays.
    pub fn stop(&mut self) {
        if let Some(mut proxy) = self.proxy.take() {
            let _ = proxy.kill();
            let _ = proxy.wait();
        }
    }

    /// Starts a curl through the proxy that writes to `to`.
    pub fn curl(&self, size: u64, words: &[&str], to: &Path) -> Child {
        let mut command = self.lab.client().command("curl").unwrap();
        command.args(["-sS", "--max-time", "120", "-o"]).arg(to).args(words).arg(self.web.url(ByteCount::new(size)).unwrap());
        command.stdin(Stdio::null()).spawn().unwrap()
    }

    #[track_caller]
    pub fn fetch(&self, size: u64, words: &[&str]) {
        let to = self.home.join("got");
        assert!(self.curl(size, words, &to).wait().unwrap().success());
        assert_eq!(sha256(&to), sha256(&self.web.file(ByteCount::new(size)).unwrap()));
    }

    /// Bytes that arrived over each link during `act`.
    pub fn received_during(&self, act: impl FnOnce()) -> [u64; 2] {
        let before = self.received();
        act();
        let after = self.received();
        [0, 1].map(|link| after[link] - before[link])
    }
}
