//! The gateway's fast path: large flows of devices pass the kernel's forwarding, until the kernel would do anything else with them.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::{Filter, Lab, LinkSpec, mbps, ms};
use braid_model::Direction;
use serde_json::Value;
use socket2::{Domain, Socket, Type};

const GATEWAY: &str = "scheduler = \"round-robin\"\n[gateway]\nlan = [\"lan0\"]\n";
/// The server's port that sends all bytes back.
const ECHO: u16 = 7100;

fn lab() -> Lab {
    let links = [("wlan0", 40), ("lte0", 40)].map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(2)));
    links.into_iter().fold(Lab::builder(), |builder, link| builder.link(link)).lan(1).start().unwrap()
}

/// A server that sends back what it gets, over TCP and UDP, until it is dropped.
struct Echo {
    stop: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Echo {
    fn start(lab: &Lab) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for address in [remote(10, ECHO), remote6(10, ECHO)] {
            let (listener, socket) = lab.server().run(|| (TcpListener::bind(address).unwrap(), UdpSocket::bind(address).unwrap())).unwrap();
            listener.set_nonblocking(true).unwrap();
            socket.set_read_timeout(Some(ms(20))).unwrap();
            let stopped = stop.clone();
            threads.push(thread::spawn(move || {
                let mut buffer = [0; 2000];
                while !stopped.load(Ordering::Relaxed) {
                    if let Ok((length, from)) = socket.recv_from(&mut buffer) {
                        let _ = socket.send_to(&buffer[..length], from);
                    }
                }
            }));
            let stopped = stop.clone();
            threads.push(thread::spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    match listener.accept() {
                        Ok((stream, _)) => drop(thread::spawn(move || send_back(stream))),
                        Err(_) => thread::sleep(ms(5)),
                    }
                }
            }));
        }
        Self { stop, threads }
    }
}

fn send_back(mut stream: TcpStream) {
    let _ = stream.set_nonblocking(false);
    let mut buffer = vec![0; 1 << 16];
    while let Ok(length) = stream.read(&mut buffer) {
        if length == 0 || stream.write_all(&buffer[..length]).is_err() {
            return;
        }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// Who exchanges data with the echo server.
#[derive(Debug, Clone, Copy, PartialEq)]
enum From {
    Device,
    /// A program of this machine that uses the virtual interface.
    Program,
}

impl From {
    /// Runs `work` in its namespace, with the address to bind.
    fn run<T: Send>(self, lab: &Lab, to: SocketAddr, work: impl FnOnce(SocketAddr) -> T + Send) -> T {
        let (namespace, address) = match (self, to.is_ipv4()) {
            (Self::Device, true) => (lab.device(0), "0.0.0.0:0"),
            (Self::Device, false) => (lab.device(0), "[::]:0"),
            (Self::Program, true) => (lab.client(), "10.99.0.1:0"),
            (Self::Program, false) => (lab.client(), "[fd99::1]:0"),
        };
        namespace.run(|| work(address.parse().unwrap())).unwrap()
    }

    /// The only flow to the echo server, by `braid flows --json`.
    fn flow(self, up: &Up<'_>, to: SocketAddr) -> Value {
        let ours = |flow: &Value| (flow["client"] == Value::Null) == (self == Self::Program) && flow["remote"] == to.to_string();
        up.flows().into_iter().find(ours).unwrap_or_default()
    }

    fn is_fast(self, up: &Up<'_>, to: SocketAddr) -> bool {
        self.flow(up, to)["fast_path"] == Value::Bool(true)
    }

    #[track_caller]
    fn takes_fast_path(self, up: &Up<'_>, to: SocketAddr) {
        eventually("the flow takes the fast path", || self.is_fast(up, to));
        let before = fast_packets(up);
        eventually("its packets are counted", || fast_packets(up) > before + 50);
    }
}

/// An exchange of data with the echo server: it compares what comes back with what it sent, until it is told to end.
struct Exchange {
    end: Arc<AtomicBool>,
    /// Bytes that came back.
    moved: Arc<AtomicU64>,
    thread: Option<thread::JoinHandle<Result<(), String>>>,
}

impl Exchange {
    /// A TCP connection that sends in blocks, and waits for each.
    fn tcp(lab: &Lab, from: From, to: SocketAddr) -> Self {
        let connect = |address: SocketAddr| {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
            socket.bind(&address.into()).unwrap();
            socket.connect(&to.into()).unwrap();
            TcpStream::from(socket)
        };
        let stream = from.run(lab, to, connect);
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Self::start(move |end, moved| {
            let (mut stream, mut seed) = (stream, 1u64);
            let (mut sent, mut back) = (vec![0; 100_000], vec![0; 100_000]);
            while !end.load(Ordering::Relaxed) {
                for byte in &mut sent {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    *byte = (seed >> 56) as u8;
                }
                stream.write_all(&sent).and_then(|()| stream.read_exact(&mut back)).map_err(|error| error.to_string())?;
                if sent != back {
                    return Err("other bytes came back".to_owned());
                }
                moved.fetch_add(back.len() as u64, Ordering::Relaxed);
            }
            Ok(())
        })
    }

    /// Datagrams, a hundred at a time. Lost ones are sent again.
    fn udp(lab: &Lab, from: From, to: SocketAddr) -> Self {
        let socket = from.run(lab, to, |address| UdpSocket::bind(address).and_then(|socket| socket.connect(to).map(|()| socket)).unwrap());
        socket.set_read_timeout(Some(ms(100))).unwrap();
        Self::start(move |end, moved| {
            let mut buffer = [0; 2000];
            while !end.load(Ordering::Relaxed) {
                for number in 0..20u8 {
                    let _ = socket.send(&[number; 1200]);
                }
                while let Ok(length) = socket.recv(&mut buffer) {
                    if length != 1200 || buffer[..length].iter().any(|byte| *byte != buffer[0]) {
                        return Err("other bytes came back".to_owned());
                    }
                    moved.fetch_add(length as u64, Ordering::Relaxed);
                    if buffer[0] == 19 {
                        break;
                    }
                }
            }
            Ok(())
        })
    }

    fn start(work: impl FnOnce(&AtomicBool, &AtomicU64) -> Result<(), String> + Send + 'static) -> Self {
        let (end, moved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ended, counted) = (end.clone(), moved.clone());
        Self { end, moved, thread: Some(thread::spawn(move || work(&ended, &counted))) }
    }

    fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    /// Whether bytes come back now.
    #[track_caller]
    fn goes_on(&self) {
        let before = self.moved();
        eventually("the exchange goes on", || self.moved() > before + 200_000);
    }

    /// Ends it; it must have been in order.
    #[track_caller]
    fn finish(mut self) -> u64 {
        self.end.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap().unwrap();
        self.moved()
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
    }
}

/// Packets that took the fast path so far.
fn fast_packets(up: &Up<'_>) -> u64 {
    up.status().unwrap()["counters"]["fast_packets"].as_u64().unwrap()
}

/// Adds rules to the client's firewall. They are in a table of their own.
fn nft(lab: &Lab, script: &str) {
    let output = lab.client().command("nft").unwrap().arg(script).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Each kind of flow, from its start into the fast path and for longer than a confirmation holds.
fn large_flows(config: &str, from: From) {
    if !able() {
        return;
    }
    let lab = lab();
    let _echo = Echo::start(&lab);
    let hidden =
        [IpAddr::from(Lab::device_address(0)), Lab::device_address6(0).into(), "10.99.0.1".parse().unwrap(), "fd99::1".parse().unwrap()];
    let untranslated =
        hidden.map(|source| watch_all(&lab, Filter { source: Some(source), direction: Some(Direction::Up), ..Filter::default() }));
    let up = Up::start(&lab, config);
    for to in [remote(10, ECHO), remote6(10, ECHO)] {
        eventually("packets are forwarded", || from.run(&lab, to, |address| asked(address, to)));
        eventually("that flow ends", || from.flow(&up, to) == Value::Null || from.flow(&up, to)["protocol"] == "udp");
        for udp in [false, true] {
            let exchange = if udp { Exchange::udp(&lab, from, to) } else { Exchange::tcp(&lab, from, to) };
            from.takes_fast_path(&up, to);
            let before = from.flow(&up, to)["rx_bytes"].as_u64().unwrap();
            exchange.goes_on();
            eventually("its bytes are counted", || from.flow(&up, to)["rx_bytes"].as_u64() > Some(before + 200_000));
            let end = Instant::now() + Duration::from_secs(4);
            while Instant::now() < end {
                assert!(from.is_fast(&up, to), "{to}, UDP {udp}: left the fast path");
                thread::sleep(ms(100));
            }
            if from == From::Program {
                let rate = || up.status().unwrap()["virtual_interface"]["rate_down_bps"].as_f64().unwrap_or(0.0);
                eventually("the interface's rate counts it", || rate() > 2e6);
            }
            let moved = exchange.finish();
            println!("{to}, UDP {udp}: {moved} bytes, {} packets so far took the fast path", fast_packets(&up));
            if !udp {
                eventually("the flow ends", || from.flow(&up, to) == Value::Null);
            }
        }
    }
    assert_eq!(untranslated.map(|watches| packets(&lab, &watches).iter().sum::<u64>()), [0; 4], "packets left untranslated");
}

/// Whether a TCP connection sends a byte and gets it back.
fn asked(from: SocketAddr, to: SocketAddr) -> bool {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
    if socket.bind(&from.into()).is_err() || socket.connect_timeout(&to.into(), ms(500)).is_err() {
        return false;
    }
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(ms(500))).unwrap();
    stream.write_all(b"x").and_then(|()| stream.read_exact(&mut [0])).is_ok()
}

#[test]
fn large_flows_of_devices_take_the_fast_path_and_nothing_in_them_changes() {
    large_flows(GATEWAY, From::Device);
}

#[test]
fn packets_of_large_flows_may_wait_for_their_link() {
    large_flows(&format!("late = true\n{GATEWAY}"), From::Device);
}

#[test]
fn large_flows_of_programs_on_the_virtual_interface_take_it_too() {
    large_flows("scheduler = \"round-robin\"\n[virtual]\naddress = [\"10.99.0.1/24\", \"fd99::1/64\"]\n", From::Program);
}

#[test]
fn without_the_fast_path_flows_go_on_as_before() {
    if !able() {
        return;
    }
    let (lab, to) = (lab(), remote(10, ECHO));
    let _echo = Echo::start(&lab);
    let up = Up::start(&lab, &GATEWAY.replace("[gateway]\n", "[gateway]\nfast_path = false\n"));
    let exchange = Exchange::tcp(&lab, From::Device, to);
    eventually("it has moved enough", || exchange.moved() > 2_000_000);
    assert_eq!((fast_packets(&up), From::Device.is_fast(&up, to)), (0, false));
    up.configure(GATEWAY);
    assert!(up.braid(&["reload"]).status.success());
    From::Device.takes_fast_path(&up, to);
    up.configure(&GATEWAY.replace("[gateway]\n", "[gateway]\nfast_path = false\n"));
    assert!(up.braid(&["reload"]).status.success());
    eventually("it leaves the fast path", || !From::Device.is_fast(&up, to));
    exchange.goes_on();
    exchange.finish();
}

#[test]
fn a_flow_that_a_firewall_begins_to_drop_ends_soon() {
    if !able() {
        return;
    }
    let (lab, to) = (lab(), remote(10, ECHO));
    let _echo = Echo::start(&lab);
    let up = Up::start(&lab, GATEWAY);
    for rule in ["ip saddr 192.168.7.20", "ip daddr 192.168.7.20"] {
        let exchange = Exchange::tcp(&lab, From::Device, to);
        From::Device.takes_fast_path(&up, to);
        nft(&lab, &format!("table ip foreign {{ chain forward {{ type filter hook forward priority filter; {rule} drop; }}\n}}"));
        let mut last = exchange.moved();
        eventually("nothing passes", || {
            let before = std::mem::replace(&mut last, exchange.moved());
            thread::sleep(ms(300));
            !From::Device.is_fast(&up, to) && before == last && exchange.moved() == last
        });
        nft(&lab, "delete table ip foreign");
        exchange.goes_on();
        From::Device.takes_fast_path(&up, to);
        exchange.finish();
        eventually("the flow ends", || From::Device.flow(&up, to) == Value::Null);
    }
}

/// Rules that change packets, as against tethering limits or for traffic control, keep their effect.
#[test]
fn flows_that_other_rules_change_keep_to_the_kernels_way() {
    if !able() {
        return;
    }
    let (lab, to) = (lab(), remote(10, ECHO));
    let _echo = Echo::start(&lab);
    let up = Up::start(&lab, GATEWAY);
    for change in ["ip ttl set 65", "ip dscp set ef", "meta mark set 7"] {
        let exchange = Exchange::tcp(&lab, From::Device, to);
        From::Device.takes_fast_path(&up, to);
        nft(
            &lab,
            &format!(
                "table ip foreign {{ chain out {{ type filter hook postrouting priority mangle; oifname {{ \"wlan0\", \"lte0\" }} {change}; }}\n}}"
            ),
        );
        eventually("it leaves the fast path", || !From::Device.is_fast(&up, to));
        let before = fast_packets(&up);
        exchange.goes_on();
        exchange.goes_on();
        assert_eq!(fast_packets(&up), before, "{change}");
        nft(&lab, "delete table ip foreign");
        From::Device.takes_fast_path(&up, to);
        exchange.finish();
        eventually("the flow ends", || From::Device.flow(&up, to) == Value::Null);
    }
}

#[test]
fn flows_survive_the_daemon_and_the_kernel_sees_their_end() {
    if !able() {
        return;
    }
    let (lab, to) = (lab(), remote(10, ECHO));
    let _echo = Echo::start(&lab);
    let mut up = Up::start(&lab, GATEWAY);
    let exchange = Exchange::tcp(&lab, From::Device, to);
    From::Device.takes_fast_path(&up, to);
    up.signal("KILL");
    up.wait_end();
    exchange.goes_on();
    let again = Up::start(&lab, GATEWAY);
    exchange.goes_on();
    From::Device.takes_fast_path(&again, to);
    exchange.finish();
    eventually("the flow ends", || From::Device.flow(&again, to) == Value::Null);
    let table = || lab.client().run(|| fs::read_to_string("/proc/thread-self/net/nf_conntrack")).unwrap();
    match table() {
        // Without it, the entries can only be seen by a program that this test does not need.
        Err(error) => println!("connection tracking cannot be read: {error}"),
        Ok(_) => drop(eventually("connection tracking has seen its end", || {
            !table().unwrap().lines().any(|line| line.contains("ESTABLISHED") && line.contains("dport=7100"))
        })),
    }
}
