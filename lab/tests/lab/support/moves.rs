//! Hosts between which running flows move.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;

use braid_lab::{Filter, Lab, MovesRelay, Namespace, ServerDaemon};
use braid_model::Protocol;
use serde_json::Value;

use super::{NAMES, Up, braid, eventually, http, packets, text, watch_all};

/// The server's daemon.
pub struct Far(pub ServerDaemon);

impl Far {
    pub fn start(lab: &Lab) -> Self {
        Self(ServerDaemon::start(lab, &braid()).unwrap())
    }

    /// On another host.
    pub fn start_on(host: &Namespace, home: PathBuf) -> Self {
        Self(ServerDaemon::start_on(host, home, &braid()).unwrap())
    }

    pub fn api(&self, what: &str, body: &Value) -> (u16, Value) {
        let answer = http(UnixStream::connect(self.0.socket()).unwrap(), what, "", &body.to_string());
        (answer.0, serde_json::from_str(&answer.1).unwrap())
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- the log of a daemon\n{}", self.0.log());
        }
    }
}

/// The server's relay.
pub struct Relay(pub MovesRelay);

impl Relay {
    pub fn start(lab: &Lab) -> Self {
        Self(MovesRelay::start(lab, &braid()).unwrap())
    }

    /// Beside the daemon with these files.
    pub fn start_on(host: &Namespace, daemon: PathBuf, options: &[&str]) -> Self {
        Self(MovesRelay::start_on(host, daemon, &braid(), options).unwrap())
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- the log of a relay\n{}", self.0.log());
        }
    }
}

/// Starts a server that sends back what it gets.
pub fn mirror(host: &Namespace, port: u16) {
    host.run(move || {
        let listener = TcpListener::bind(("::", port)).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                thread::spawn(move || std::io::copy(&mut stream.try_clone().unwrap(), &mut &stream));
            }
        });
    })
    .unwrap();
}

/// Sends bytes that differ by `round` and place, and reads them back.
pub fn exchange(stream: &mut TcpStream, round: u8, size: usize) {
    let sent: Vec<u8> = (0..size).map(|place| (place as u8).wrapping_mul(31).wrapping_add(round)).collect();
    let (mut writing, copy) = (stream.try_clone().unwrap(), sent.clone());
    let writer = thread::spawn(move || writing.write_all(&copy).unwrap());
    let mut got = vec![0; size];
    stream.read_exact(&mut got).unwrap();
    writer.join().unwrap();
    assert!(got == sent, "round {round}");
}

/// Waits until all packets of the flow use this link.
pub fn uses(lab: &Lab, stream: &mut TcpStream, link: usize) {
    let mut round = 0_u8;
    eventually(&format!("both directions use {} only", NAMES[link]), || {
        let watches = watch_all(lab, Filter { protocol: Some(Protocol::Tcp), port: Some(7000), ..Filter::default() });
        round = round.wrapping_add(1);
        exchange(stream, round, 1000);
        let counts = packets(lab, &watches);
        counts[1 - link] == 0 && counts[link] > 0
    });
}

/// Direct flows move; all hosts of the lab are asked.
pub const MOVES: &str =
    "scheduler = \"round-robin\"\n[detect]\nhosts = true\nmoves = true\n[[app]]\nmatch = { port = 7000 }\ncarry = \"direct\"\n";

/// Waits until the newest flow to `server` can move, and returns its id. An earlier flow of datagrams is listed for a while after its end.
pub fn movable(up: &Up<'_>, server: SocketAddr) -> String {
    let mut id = String::new();
    eventually("the flow can move", || {
        let flows = up.flows().into_iter().filter(|flow| flow["remote"] == server.to_string());
        let flow = flows.min_by_key(|flow| flow["age_ms"].as_u64()).unwrap_or_default();
        id = flow["id"].to_string();
        up.explain_flow(&id).contains("can change its link")
    });
    id
}

impl Up<'_> {
    pub fn explain_flow(&self, id: &str) -> String {
        text(&self.braid(&["explain", id]).stdout)
    }
}
