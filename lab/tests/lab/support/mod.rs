//! Shared code of the daemon's tests: the real `braid daemon` in a lab, and helpers that find the link of a flow.

#![allow(unreachable_pub)]

pub mod bonded;
pub mod gateway;
pub mod moves;
pub mod pinging;
pub mod proxied;
pub mod user;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use braid_lab::{Filter, Lab, LinkSpec, Watch, effective_user};
use serde_json::Value;
use socket2::{Domain, Protocol, Socket, Type};

/// The names of the lab's links, in the order of their numbers.
pub const NAMES: [&str; 3] = ["wlan0", "lte0", "eth0"];
/// An unprivileged user.
pub const NOBODY: u32 = 65534;
/// Timeout of every expected event, also on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Whether labs can be created. In CI it is an error if they cannot.
pub fn able() -> bool {
    if effective_user() == 0 {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "the daemon's tests need root");
    println!("skipped: needs root");
    false
}

/// A lab of `count` emulated links without limits.
pub fn lab(count: usize) -> Lab {
    NAMES[..count].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name))).start().unwrap()
}

/// The program under test: the one that `BRAID` names, else the one built into the same directory as this test.
pub fn braid() -> PathBuf {
    let beside = || std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("braid");
    let path = std::env::var_os("BRAID").map_or_else(beside, PathBuf::from);
    assert!(path.exists(), "{} is missing: run `cargo build -p braid` first, or name it in BRAID", path.display());
    path
}

/// Waits until `check` holds; fails after [`LIMIT`].
#[track_caller]
pub fn eventually(what: &str, check: impl FnMut() -> bool) -> Duration {
    within(LIMIT, what, check)
}

/// Waits until `check` holds and returns how long that took; fails after `limit`.
#[track_caller]
pub fn within(limit: Duration, what: &str, mut check: impl FnMut() -> bool) -> Duration {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < limit, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
    begin.elapsed()
}

/// One exchange of HTTP: the status, and the body with its head before it.
pub fn http(mut stream: impl Read + Write, what: &str, headers: &str, body: &str) -> (u16, String, String) {
    let length = body.len();
    let request = format!(
        "{what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), body.to_owned(), head.to_owned())
}

/// A running `braid daemon`. Dropping it sends SIGTERM, and SIGKILL if the daemon does not end; shows its log if the test fails.
pub struct Up<'a> {
    pub lab: &'a Lab,
    child: Child,
    home: PathBuf,
}

impl<'a> Up<'a> {
    /// Starts the daemon with this configuration (see [`configure`](Self::configure)) and waits until it has judged every link of the lab.
    #[track_caller]
    pub fn start(lab: &'a Lab, config: &str) -> Self {
        let up = Self::start_with(lab, config, &lab.directory().join("braid/state"));
        let known = |link: &Value| link["state"] != "unknown" && link["state"] != "down";
        eventually("every link is judged", || {
            up.status().is_some_and(|s| s["links"].as_array().unwrap().iter().filter(|link| known(link)).count() == lab.links().len())
        });
        up
    }

    /// Starts it and waits until it answers.
    #[track_caller]
    pub fn start_with(lab: &'a Lab, config: &str, state_dir: &Path) -> Self {
        Self::start_told(lab, config, state_dir, &[])
    }

    /// The same with more arguments.
    #[track_caller]
    pub fn start_told(lab: &'a Lab, config: &str, state_dir: &Path, more: &[&str]) -> Self {
        Self::start_whole(lab, &[], config, state_dir, more)
    }

    /// The same through another program, such as `unshare`.
    #[track_caller]
    pub fn start_by(lab: &'a Lab, wrapper: &[&str], config: &str, state_dir: &Path) -> Self {
        Self::start_whole(lab, wrapper, config, state_dir, &[])
    }

    #[track_caller]
    fn start_whole(lab: &'a Lab, wrapper: &[&str], config: &str, state_dir: &Path, more: &[&str]) -> Self {
        let home = lab.directory().join("braid");
        fs::create_dir_all(&home).unwrap();
        fs::write(home.join("braid.toml"), with_links(config)).unwrap();
        let child = Self::command(lab, wrapper, &home, state_dir).args(more).spawn().unwrap();
        let mut up = Self { lab, child, home };
        eventually("the daemon answers", || {
            let ended = up.child.try_wait().unwrap();
            assert!(ended.is_none(), "the daemon ended at once: {}", up.log());
            up.status().is_some()
        });
        up
    }

    /// Begins to start the daemon with the last configuration, without waiting for anything.
    pub fn begin(lab: &Lab, state_dir: &Path) -> Child {
        Self::command(lab, &[], &lab.directory().join("braid"), state_dir).spawn().unwrap()
    }

    fn command(lab: &Lab, wrapper: &[&str], home: &Path, state_dir: &Path) -> Command {
        let mut command = match wrapper {
            [] => lab.client().command(braid()).unwrap(),
            [program, words @ ..] => {
                let mut command = lab.client().command(program).unwrap();
                command.args(words).arg(braid());
                command
            }
        };
        command.arg("daemon").arg("--config").arg(home.join("braid.toml")).arg("--state-dir").arg(state_dir);
        command.arg("--socket").arg(home.join("socket")).stdin(Stdio::null());
        let log = File::options().create(true).append(true).open(home.join("log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        command
    }

    /// A `braid` command that uses this daemon.
    pub fn braid(&self, arguments: &[&str]) -> Output {
        let mut command = self.lab.client().command(braid()).unwrap();
        command.args(arguments).env("BRAID_SOCKET", self.home.join("socket")).stdin(Stdio::null()).output().unwrap()
    }

    /// The API's answer to `METHOD /path` over its socket: status and JSON.
    pub fn api(&self, what: &str, body: &Value) -> (u16, Value) {
        let answer = http(UnixStream::connect(self.home.join("socket")).unwrap(), what, "", &body.to_string());
        (answer.0, serde_json::from_str(&answer.1).unwrap())
    }

    /// Output of `braid WHAT --json`, if it succeeds.
    fn facts(&self, what: &str) -> Option<Value> {
        let output = self.braid(&[what, "--json"]);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    pub fn status(&self) -> Option<Value> {
        self.facts("status")
    }

    pub fn flows(&self) -> Vec<Value> {
        self.facts("flows").unwrap()["flows"].as_array().unwrap().clone()
    }

    /// One link of the status; `Null` if it is not there.
    pub fn link(&self, name: &str) -> Value {
        let status = self.status().unwrap();
        status["links"].as_array().unwrap().iter().find(|link| link["name"] == name).cloned().unwrap_or_default()
    }

    pub fn state(&self, name: &str) -> String {
        self.link(name)["state"].as_str().unwrap_or("gone").to_owned()
    }

    #[track_caller]
    pub fn wait_state(&self, name: &str, state: &str) -> Duration {
        eventually(&format!("{name} is {state}"), || self.state(name) == state)
    }

    /// Writes the configuration and adds an entry for each link of the lab without one: virtual devices are links only if named.
    pub fn configure(&self, config: &str) {
        fs::write(self.home.join("braid.toml"), with_links(config)).unwrap();
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.home.join("log")).unwrap_or_default()
    }

    /// Path of the API's socket.
    pub fn socket(&self) -> PathBuf {
        self.home.join("socket")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends this signal to the daemon only.
    pub fn signal(&self, name: &str) {
        assert!(Command::new("kill").arg(format!("-{name}")).arg(self.pid().to_string()).status().unwrap().success());
    }

    /// Waits for the daemon's end.
    #[track_caller]
    pub fn wait_end(&mut self) {
        eventually("the daemon ends", || self.child.try_wait().unwrap().is_some());
    }

    /// Resident memory in kilobytes.
    pub fn resident(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Up<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- the daemon's log\n{}---\n{}", self.log(), text(&self.braid(&["status"]).stdout));
        }
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal("TERM");
            self.signal("CONT");
            let begin = Instant::now();
            while matches!(self.child.try_wait(), Ok(None)) && begin.elapsed() < Duration::from_secs(20) {
                thread::sleep(Duration::from_millis(10));
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn with_links(config: &str) -> String {
    let missing = NAMES.iter().filter(|name| !config.contains(&format!("name = \"{name}\"")));
    missing.fold(config.to_owned(), |text, name| text + &format!("\n[[link]]\nname = \"{name}\"\n"))
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a program in the client and returns its output; it must succeed.
#[track_caller]
pub fn client(lab: &Lab, command: &str) -> String {
    let mut words = command.split_whitespace();
    let output = lab.client().command(words.next().unwrap()).unwrap().args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", text(&output.stderr));
    text(&output.stdout)
}

/// The same in the server.
#[track_caller]
pub fn server(lab: &Lab, command: &str) {
    let mut words = command.split_whitespace();
    let output = lab.server().command(words.next().unwrap()).unwrap().args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", text(&output.stderr));
}

/// Recreates a direct link after its device was removed.
pub fn make_direct(lab: &Lab, name: &str, number: usize) {
    client(lab, &format!("ip link add {name} type veth peer name l{number} netns {}", lab.server().path()));
    server(lab, &format!("ip link set l{number} up"));
    server(lab, &format!("ip address add 10.77.{number}.1/24 dev l{number}"));
    client(lab, &format!("ip link set {name} up"));
    client(lab, &format!("ip address add 10.77.{number}.2/24 dev {name}"));
    client(lab, &format!("ip route add default via 10.77.{number}.1 dev {name} metric 10{number}"));
}

/// All rules and routes of the client, as text.
pub fn routing(lab: &Lab) -> String {
    ["ip rule", "ip -6 rule", "ip route show table all", "ip -6 route show table all"].map(|command| client(lab, command)).concat()
}

/// The number of the link that has this address.
pub fn number(local: IpAddr) -> usize {
    match local {
        IpAddr::V4(v4) if v4.octets()[..2] == [10, 77] => v4.octets()[2].into(),
        IpAddr::V6(v6) if v6.segments()[0] == 0xfd77 => v6.segments()[3].into(),
        IpAddr::V6(v6) => number(v6.to_ipv4_mapped().unwrap_or_else(|| panic!("{v6} is no link's address")).into()),
        other => panic!("{other} is no link's address"),
    }
}

/// `ADDRESS:PORT` of the Internet.
pub fn remote(host: u8, port: u16) -> SocketAddr {
    (Lab::internet(host), port).into()
}

/// The same in IPv6.
pub fn remote6(host: u8, port: u16) -> SocketAddr {
    (Lab::internet6(host), port).into()
}

/// Opens a TCP connection on the calling thread, returns its local address, and drops it.
pub fn local_of(to: SocketAddr) -> io::Result<IpAddr> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&to.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
        _ => {}
    }
    Ok(socket.local_addr()?.as_socket().unwrap().ip())
}

/// The link a new TCP connection of the client gets.
pub fn chosen(lab: &Lab, to: SocketAddr) -> io::Result<usize> {
    lab.client().run(|| local_of(to).map(number)).unwrap()
}

/// The links of `count` new TCP connections, begun one after the other.
pub fn chosen_many(lab: &Lab, to: SocketAddr, count: usize) -> Vec<usize> {
    lab.client().run(|| (0..count).map(|_| number(local_of(to).unwrap())).collect()).unwrap()
}

/// A connection of the client to a server, with its link.
#[track_caller]
pub fn open(lab: &Lab, to: SocketAddr) -> (TcpStream, usize) {
    let stream = lab.client().run(|| TcpStream::connect_timeout(&to, LIMIT)).unwrap().unwrap();
    let link = number(stream.local_addr().unwrap().ip());
    (stream, link)
}

/// Asks the web server for `path` and reads the answer to its end.
pub fn fetch(stream: &mut TcpStream, path: &str) -> io::Result<usize> {
    use io::{Read, Write};
    stream.set_read_timeout(Some(LIMIT))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)
}

/// Sends a datagram to the echo server and waits for it to come back; `from` unconnected.
pub fn echo(from: &UdpSocket, to: SocketAddr) -> io::Result<()> {
    from.set_read_timeout(Some(LIMIT))?;
    from.send_to(b"hello", to)?;
    let mut buffer = [0; 64];
    let (length, by) = from.recv_from(&mut buffer)?;
    let same = by.ip().to_canonical() == to.ip().to_canonical() && by.port() == to.port() && &buffer[..length] == b"hello";
    if same { Ok(()) } else { Err(io::Error::other(format!("{to} was asked and {by} answered"))) }
}

/// Echoes every datagram to this address of the lab's Internet, until it is dropped.
pub struct Echo {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Echo {
    pub fn start(lab: &Lab, host: u8, port: u16) -> Self {
        let socket = lab.server().run(|| UdpSocket::bind((Lab::internet(host), port)).unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let work = move || {
            let mut buffer = [0; 2000];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((size, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..size], from);
                }
            }
        };
        Self { stop, thread: Some(thread::spawn(work)) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// Counts packets that enter each link for this destination.
pub fn watch_all(lab: &Lab, filter: Filter) -> Vec<Watch> {
    (0..lab.links().len()).map(|link| lab.watch(link, filter).unwrap()).collect()
}

/// Packets counted by each watch.
pub fn packets(lab: &Lab, watches: &[Watch]) -> Vec<u64> {
    watches.iter().map(|watch| lab.watched(*watch).packets).collect()
}
