//! Shared code of the tests of bonded flows: a relay on the server's side, and programs whose flows it carries.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use braid_lab::{Filter, Lab, Watch, ms};
use braid_model::{Direction, Protocol};
use serde_json::Value;

use super::{LIMIT, Up, braid, eventually, remote};

/// UDP port of the relay.
const PORT: u16 = 5757;

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
        self.join_from(Up::start(self.lab, config))
    }

    /// Lets a running daemon join the relay over both links.
    pub fn join_from(&self, up: Up<'a>) -> Up<'a> {
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

/// Counts the datagrams between the client and the relay on each of two links, as they enter the link.
pub struct Capture<'a> {
    lab: &'a Lab,
    watches: [[Watch; 2]; 2],
}

impl<'a> Capture<'a> {
    pub fn start(lab: &'a Lab) -> Self {
        let udp = Filter { protocol: Some(Protocol::Udp), ..Filter::default() };
        let up = Filter { direction: Some(Direction::Up), port: Some(PORT), ..udp };
        let down = Filter { direction: Some(Direction::Down), source_port: Some(PORT), ..udp };
        Self { lab, watches: [0, 1].map(|link| [up, down].map(|filter| lab.watch(link, filter).unwrap())) }
    }

    /// Bytes on each link in one direction.
    pub fn bytes(&self, direction: Direction) -> [u64; 2] {
        let way = usize::from(direction == Direction::Down);
        self.watches.map(|watches| self.lab.watched(watches[way]).bytes.get())
    }

    /// Bytes on a link in both directions.
    pub fn sum(&self, link: usize) -> u64 {
        [Direction::Up, Direction::Down].map(|direction| self.bytes(direction)[link]).iter().sum()
    }
}

/// Starts an HTTP server in the server's namespace that accepts one upload and discards it.
pub fn start_sink(lab: &Lab, host: u8, port: u16) {
    let listener = lab.server().run(|| TcpListener::bind(remote(host, port)).unwrap()).unwrap();
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream);
        let mut left = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if let Some(length) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                left = length.trim().parse().unwrap();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let taken = std::io::copy(&mut reader.by_ref().take(left), &mut std::io::sink()).unwrap();
        assert_eq!(taken, left);
        reader.into_inner().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
    });
}

/// Starts an upload to [`start_sink`].
pub fn curl_upload(lab: &Lab, file: &Path, host: u8, port: u16) -> Child {
    let mut command = lab.client().command("curl").unwrap();
    command.args(["-sS", "--fail", "--max-time", "60", "-H", "Expect:", "-w", "%{size_upload} %{remote_ip}", "-T"]).arg(file);
    command.arg(format!("http://{}/", remote(host, port)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Starts an HTTP server in the server's namespace that sends every client `size` bytes at `rate` bytes a second, in pieces of 5 ms.
pub fn start_paced(lab: &Lab, host: u8, port: u16, size: u64, rate: u64) {
    let listener = lab.server().run(|| TcpListener::bind(remote(host, port)).unwrap()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.set_nodelay(true);
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            if write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n").is_err() {
                continue;
            }
            let (begin, mut sent) = (Instant::now(), 0);
            while sent < size {
                let due = ((begin.elapsed().as_secs_f64() * rate as f64) as u64).min(size);
                if stream.write_all(&vec![7; (due - sent) as usize]).is_err() {
                    break;
                }
                sent = due;
                thread::sleep(Duration::from_millis(5));
            }
        }
    });
}
