//! Shared code of the tests of a gateway: programs on the devices of the lab's LAN, and what the client's kernel is configured to do.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use braid_lab::{Lab, ms};
use serde_json::Value;

use super::{Up, client, eventually, number, routing, text};

/// The host behind the server.
pub const FAR: [&str; 2] = braid_lab::FAR;
/// Timeout of one attempt to reach a server.
pub const TRY: Duration = Duration::from_millis(1000);
/// Bytes of a large transfer.
const LARGE: u64 = 5_000_000;

/// Runs a program on a device and returns its output; it must succeed.
#[track_caller]
pub fn device(lab: &Lab, number: usize, command: &str) -> String {
    let output = on(lab, number, command).output().unwrap();
    assert!(output.status.success(), "{command}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// A program on a device.
pub fn on(lab: &Lab, number: usize, command: &str) -> Command {
    let mut words = command.split_whitespace();
    let mut command = lab.device(number).command(words.next().unwrap()).unwrap();
    command.args(words).stdin(Stdio::null());
    command
}

/// Whether a host answers one of three pings.
pub fn pings(lab: &Lab, number: usize, host: &str) -> bool {
    on(lab, number, &format!("ping -c 3 -i 0.2 -W 1 {host}")).stdout(Stdio::null()).status().unwrap().success()
}

/// The URL of a file; IPv6 addresses are put into brackets.
pub fn url(host: &str, file: &str) -> String {
    if host.contains(':') { format!("http://[{host}]/{file}") } else { format!("http://{host}/{file}") }
}

/// Starts a download on a device.
pub fn curl(lab: &Lab, number: usize, url: &str) -> Child {
    let mut command = on(lab, number, "curl -s -o /dev/null -w %{size_download} --max-time 60");
    command.arg(url).stdout(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end of a download and returns its number of bytes.
#[track_caller]
pub fn downloaded(curl: Child) -> u64 {
    let output = curl.wait_with_output().unwrap();
    assert!(output.status.success(), "curl: {}", output.status);
    text(&output.stdout).parse().unwrap()
}

/// Sends one datagram of this size from a device to an echo server, up to five times, and waits for the same bytes.
pub fn echoed(lab: &Lab, number: usize, to: SocketAddr, size: usize) -> io::Result<()> {
    let exchange = || -> io::Result<()> {
        let socket = udp(to)?;
        let sent: Vec<u8> = (0..size).map(|at| (at * 7 + at / 256) as u8).collect();
        let mut buffer = vec![0; size + 1];
        for _ in 0..5 {
            socket.send(&sent)?;
            if let Ok(length) = socket.recv(&mut buffer) {
                return if buffer[..length] == sent { Ok(()) } else { Err(io::Error::other("other bytes came back")) };
            }
        }
        Err(io::Error::other(format!("{to} does not echo {size} bytes")))
    };
    lab.device(number).run(exchange).unwrap()
}

/// A connected socket of the calling thread's namespace.
fn udp(to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(TRY))?;
    Ok(socket)
}

/// The link of a new TCP connection of a device to a [`Mirror`].
pub fn connected(lab: &Lab, number: usize, to: SocketAddr) -> io::Result<usize> {
    let connect = || -> io::Result<usize> {
        let mut stream = TcpStream::connect_timeout(&to, TRY)?;
        stream.set_read_timeout(Some(TRY))?;
        let mut seen = String::new();
        stream.read_to_string(&mut seen)?;
        link(&seen)
    };
    lab.device(number).run(connect).unwrap()
}

/// The link of a new UDP exchange of a device with a [`Mirror`]. The datagram is sent once.
pub fn asked(lab: &Lab, number: usize, to: SocketAddr) -> io::Result<usize> {
    let ask = || -> io::Result<usize> {
        let socket = udp(to)?;
        socket.send(b"who am I?")?;
        let mut buffer = [0; 100];
        let length = socket.recv(&mut buffer)?;
        link(&text(&buffer[..length]))
    };
    lab.device(number).run(ask).unwrap()
}

fn link(seen: &str) -> io::Result<usize> {
    let address: IpAddr = seen.parse().map_err(|_| io::Error::other(format!("{seen:?} is no address")))?;
    Ok(number(address.to_canonical()))
}

/// A server that tells each TCP connection and each datagram from which address it came, until it is dropped. It serves hosts 10 to 13.
pub struct Mirror {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
    port: u16,
}

impl Mirror {
    pub fn start(lab: &Lab) -> Self {
        Self::start_at(lab, 7000)
    }

    /// The same at another port.
    pub fn start_at(lab: &Lab, port: u16) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let hosts = (10..=13).flat_map(|n| [IpAddr::from(Lab::internet(n)), Lab::internet6(n).into()]);
        let mut threads = Vec::new();
        for host in hosts {
            let (listener, socket) =
                lab.server().run(|| (TcpListener::bind((host, port)).unwrap(), UdpSocket::bind((host, port)).unwrap())).unwrap();
            listener.set_nonblocking(true).unwrap();
            socket.set_read_timeout(Some(ms(5))).unwrap();
            let stopped = stop.clone();
            threads.push(thread::spawn(move || mirror(&listener, &socket, &stopped)));
        }
        Self { stop, threads, port }
    }

    pub fn at(&self, host: u8) -> SocketAddr {
        (Lab::internet(host), self.port).into()
    }

    pub fn at6(&self, host: u8) -> SocketAddr {
        (Lab::internet6(host), self.port).into()
    }
}

fn mirror(listener: &TcpListener, socket: &UdpSocket, stop: &AtomicBool) {
    let mut buffer = [0; 2000];
    while !stop.load(Ordering::Relaxed) {
        while let Ok((mut stream, from)) = listener.accept() {
            let _ = stream.write_all(from.ip().to_string().as_bytes());
        }
        if let Ok((_, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(from.ip().to_string().as_bytes(), from);
        }
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Transfers some megabytes over TCP in both directions between a device and the lab's far host, at this address of it.
#[track_caller]
pub fn large_transfers(lab: &Lab, number: usize, host: &str) {
    large_transfers_by(lab, host, |command| on(lab, number, command));
}

/// The same, with iperf3's client in the place that `run` chooses.
#[track_caller]
pub fn large_transfers_by(lab: &Lab, host: &str, run: impl Fn(&str) -> Command) {
    let mut server = lab.far().command("iperf3").unwrap();
    let mut server = server.args(["-s", "-p", "5201"]).stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let listens = || text(&lab.far().command("ss").unwrap().args(["-Htln", "sport", "=", ":5201"]).output().unwrap().stdout);
        eventually("iperf3 listens", || !listens().is_empty());
        for direction in ["", "-R"] {
            let output = run(&format!("timeout 60 iperf3 -J -c {host} -n {LARGE} {direction}")).output().unwrap();
            let result: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let received = result["end"]["sum_received"]["bytes"].as_u64();
            // The receiver does not count what arrives after the sender's end.
            assert!(received > Some(LARGE / 3), "{host} {direction}: {received:?} bytes of {LARGE} arrived: {}", result["error"]);
        }
    }));
    let _ = server.kill();
    let _ = server.wait();
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// All that a gateway may leave behind in the client: rules, routes, nftables, filters and queueing disciplines, and settings.
pub fn traces(lab: &Lab) -> String {
    let nft = client(lab, "nft list ruleset");
    let mut all = format!("{}\n{nft}\n{}", routing(lab), client(lab, "tc qdisc show"));
    let devices = client(lab, "ls /sys/class/net");
    for device in devices.split_whitespace() {
        for hook in ["", "ingress", "egress"] {
            let output = lab.client().command("tc").unwrap().args(["filter", "show", "dev", device]).args(hook.split_whitespace()).output();
            all += &text(&output.unwrap().stdout);
        }
    }
    all + &settings(lab)
}

/// The settings of the client's kernel that concern forwarding.
pub fn settings(lab: &Lab) -> String {
    const KEYS: [&str; 6] = ["forwarding", "rp_filter", "src_valid_mark", "accept_ra", "send_redirects", "proxy_ndp"];
    let read = || {
        let mut all = String::new();
        for family in ["ipv4", "ipv6"] {
            let mut places: Vec<_> =
                fs::read_dir(format!("/proc/sys/net/{family}/conf")).unwrap().map(|entry| entry.unwrap().path()).collect();
            places.sort();
            for path in places.iter().flat_map(|place| KEYS.map(|key| place.join(key))) {
                all += &fs::read_to_string(&path).map(|value| format!("{} = {value}", path.display())).unwrap_or_default();
            }
        }
        all
    };
    lab.client().run(read).unwrap()
}

/// Sends a datagram every 10 ms from one port of a device to an echo server, and calls `cut` after a second. Returns the longest time without an answer,
/// and the share of the datagrams of the last second that were answered.
pub fn call(lab: &Lab, device: usize, to: SocketAddr, span: Duration, cut: impl FnOnce() + Send) -> (Duration, f64) {
    const EVERY: Duration = Duration::from_millis(10);
    let begin = Instant::now();
    let talk = || {
        let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).unwrap();
        socket.connect(to).unwrap();
        let (mut last, mut gap, mut answered) = (begin, Duration::ZERO, 0);
        for number in 0.. {
            let at = EVERY * number;
            if at >= span {
                break;
            }
            let _ = socket.send(&[0; 200]);
            while let Some(left) = (EVERY * (number + 1)).checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
                socket.set_read_timeout(Some(left)).unwrap();
                if socket.recv(&mut [0; 300]).is_ok() {
                    gap = gap.max(last.elapsed());
                    last = Instant::now();
                    answered += u32::from(begin.elapsed() + Duration::from_secs(1) > span);
                }
            }
        }
        (gap.max(last.elapsed()), f64::from(answered) / 100.0)
    };
    thread::scope(|scope| {
        let talk = scope.spawn(|| lab.device(device).run(talk).unwrap());
        thread::sleep(Duration::from_secs(1));
        cut();
        talk.join().unwrap()
    })
}

/// The clients, by `braid clients --json`.
#[track_caller]
pub fn clients(up: &Up<'_>) -> Vec<Value> {
    let output = up.braid(&["clients", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["clients"].as_array().unwrap().clone()
}

/// A control group of this machine, removed when dropped.
pub struct Group {
    directory: PathBuf,
    /// Its path in the hierarchy.
    pub path: String,
}

impl Group {
    pub fn new() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("0::")).expect("the system has cgroup v2");
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 ")).and_then(|line| line.split(' ').nth(4));
        let path = format!("{}/braid-lab-{}", own.trim_end_matches('/'), std::process::id());
        let directory = PathBuf::from(format!("{}{path}/inner", mount.expect("cgroup v2 is mounted")));
        fs::create_dir_all(&directory).unwrap();
        Self { directory, path }
    }

    /// A shell command in the network namespace of a process, in a group below this one.
    pub fn inside(&self, lab: &Lab, process: u32, command: &str) -> Command {
        let mut shell = lab.client().command("nsenter").unwrap();
        let joined = format!("echo $$ >{}/cgroup.procs && exec {command}", self.directory.display());
        shell.args([&format!("--net=/proc/{process}/ns/net"), "sh", "-c", &joined]);
        shell
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for directory in [Some(self.directory.as_path()), self.directory.parent()].into_iter().flatten() {
            let _ = fs::remove_dir(directory);
        }
    }
}

/// A container as engines make it: a network namespace behind a bridge. It ends when dropped.
pub struct Container(Child);

impl Container {
    pub fn start(lab: &Lab) -> Self {
        let mut hold = lab.client().command("unshare").unwrap();
        let container = Self(hold.args(["--net", "sleep", "600"]).spawn().unwrap());
        let id = container.0.id();
        let namespace = |id: &str| fs::read_link(format!("/proc/{id}/ns/net")).unwrap();
        eventually("it has a namespace", || namespace(&id.to_string()) != lab.client().run(|| namespace("thread-self")).unwrap());
        for line in [
            "ip link add br9 up type bridge",
            "ip address add 10.88.0.1/24 dev br9",
            "ip address add fd88::1/64 dev br9 nodad",
            "ip link add port9 up master br9 type veth peer name eth9",
            &format!("ip link set eth9 netns {id}"),
        ] {
            client(lab, line);
        }
        for line in [
            "ip link set eth9 up",
            "ip address add 10.88.0.2/24 dev eth9",
            "ip address add fd88::2/64 dev eth9 nodad",
            "ip route add default via 10.88.0.1",
            "ip route add default via fd88::1",
        ] {
            client(lab, &format!("nsenter --net=/proc/{id}/ns/net {line}"));
        }
        container
    }

    /// The process whose network namespace it is.
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// A program in it.
    pub fn command(&self, lab: &Lab, line: &str) -> Command {
        let mut command = lab.client().command("nsenter").unwrap();
        command.arg(format!("--net=/proc/{}/ns/net", self.id())).args(line.split_whitespace());
        command
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
