//! `braid proxy` without a daemon and without privilege: real clients, both links.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use braid_lab::relay::Relay;
use braid_lab::{Lab, Web};
use braid_model::Bytes;
use support::user::{User, sha256};
use support::*;

const PROXY: &str = "127.0.0.1:5758";

/// A proxy that an unprivileged user runs.
struct Proxied {
    proxy: Option<Child>,
    web: Web,
    _relay: Option<Relay>,
    user: User,
}

impl Deref for Proxied {
    type Target = User;

    fn deref(&self) -> &User {
        &self.user
    }
}

impl Drop for Proxied {
    fn drop(&mut self) {
        if let Some(proxy) = &mut self.proxy {
            let _ = proxy.kill();
            let _ = proxy.wait();
        }
    }
}

impl Proxied {
    /// With these arguments and this configuration.
    fn new(words: &[&str], config: &str, with_relay: bool) -> Self {
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
        // Whoever writes must not wait for a reader.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        proxied.proxy = Some(child);
        proxied
    }

    /// Starts a curl through the proxy that writes to `to`.
    fn curl(&self, size: u64, words: &[&str], to: &Path) -> Child {
        let mut command = self.lab.client().command("curl").unwrap();
        command.args(["-sS", "--max-time", "120", "-o"]).arg(to).args(words).arg(self.web.url(Bytes::new(size)).unwrap());
        command.stdin(Stdio::null()).spawn().unwrap()
    }

    #[track_caller]
    fn fetch(&self, size: u64, words: &[&str]) {
        let to = self.home.join("got");
        assert!(self.curl(size, words, &to).wait().unwrap().success());
        assert_eq!(sha256(&to), sha256(&self.web.file(Bytes::new(size)).unwrap()));
    }

    /// Bytes that came over each link meanwhile.
    fn received_during(&self, act: impl FnOnce()) -> [u64; 2] {
        let before = self.received();
        act();
        let after = self.received();
        [0, 1].map(|link| after[link] - before[link])
    }
}

#[test]
fn connections_of_http_and_socks_clients_share_the_links() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&["--scheduler", "round-robin"], "", false);
    let socks = format!("socks5h://{PROXY}");
    let size = 400_000;
    let received = proxied.received_during(|| {
        let ways: [&[&str]; 4] = [&["--proxy", PROXY], &["--proxy", &socks], &["--proxytunnel", "--proxy", PROXY], &["--proxy", PROXY]];
        let running: Vec<(Child, PathBuf)> = ways
            .iter()
            .enumerate()
            .map(|(at, words)| {
                let to = proxied.home.join(format!("got{at}"));
                (proxied.curl(size, words, &to), to)
            })
            .collect();
        for (mut child, to) in running {
            assert!(child.wait().unwrap().success());
            assert_eq!(sha256(&to), sha256(&proxied.web.file(Bytes::new(size)).unwrap()));
        }
    });
    assert!(received.iter().all(|bytes| *bytes > size), "{received:?}");
}

#[test]
fn a_client_s_rule_holds_and_the_password_names_it() {
    if !able() {
        return;
    }
    let config =
        "[[app]]\nmatch = { client = \"ann\" }\nlinks = [\"wlan0\"]\n[[app]]\nmatch = { client = \"127.0.0.0/8\" }\nlinks = [\"lte0\"]\n";
    let proxied = Proxied::new(&["--passwords", "passwords"], config, false);
    let as_user = |user: &'static str| ["--proxy", PROXY, "--proxy-user", user];
    let wrong = proxied.curl(1000, &[&["--fail"][..], &as_user("ann:no")].concat(), &proxied.home.join("none")).wait().unwrap();
    assert!(!wrong.success());
    for (user, link) in [("ann:one", 0), ("bob:two", 1)] {
        let received = proxied.received_during(|| (0..3).for_each(|_| proxied.fetch(200_000, &as_user(user))));
        assert!(received[link] > 600_000 && received[1 - link] < 20_000, "{user}: {received:?}");
    }
}

#[test]
fn a_bond_carries_one_download_over_both_links() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&["--carry", "bond"], "", true);
    let begin = Instant::now();
    loop {
        let received = proxied.received_during(|| proxied.fetch(4_000_000, &["--proxy", PROXY]));
        if received.iter().all(|bytes| *bytes > 500_000) {
            break;
        }
        // The relay may have been reached a moment later than the proxy.
        assert!(begin.elapsed() < Duration::from_secs(30), "{received:?}");
    }
}

#[test]
fn a_socks_client_s_datagrams_get_their_answers() {
    if !able() {
        return;
    }
    let proxied = Proxied::new(&[], "", false);
    let far = proxied.lab.server().run(|| UdpSocket::bind((Lab::internet(11), 5000)).unwrap()).unwrap();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = far.recv_from(&mut buffer) {
            let _ = far.send_to(&buffer[..length], from);
        }
    });
    proxied
        .lab
        .client()
        .run(|| {
            let mut control = TcpStream::connect(PROXY).unwrap();
            control.write_all(&[5, 1, 0, 5, 3, 0, 1, 0, 0, 0, 0, 0, 0]).unwrap();
            let mut answer = [0; 12];
            control.read_exact(&mut answer).unwrap();
            assert_eq!(answer[..6], [5, 0, 5, 0, 0, 1]);
            let relay = SocketAddr::from(([127, 0, 0, 1], u16::from_be_bytes([answer[10], answer[11]])));
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
            let mut datagram = vec![0, 0, 0, 1];
            datagram.extend(Lab::internet(11).octets());
            datagram.extend(5000u16.to_be_bytes());
            datagram.extend(b"hello");
            let begin = Instant::now();
            let mut buffer = [0; 2048];
            loop {
                socket.send_to(&datagram, relay).unwrap();
                if let Ok(length) = socket.recv(&mut buffer) {
                    assert_eq!(buffer[..length], datagram);
                    return;
                }
                assert!(begin.elapsed() < Duration::from_secs(20), "no answer");
            }
        })
        .unwrap();
}
