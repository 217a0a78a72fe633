//! Shares between the clients of a gateway: `weight` and `rate` of their direct TCP flows, which have no socket on the gateway, and of bonded flows.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::bonded::Relay;
use crate::support::gateway::*;
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::{Lab, LinkSpec, Namespace, mbps, ms};
use braid_model::ByteCount;

const GATEWAY: &str = "[gateway]\nlan = [\"lan0\"]\n";
/// Port of the source, which sends to whoever connects, and of the sink.
const SOURCE: u16 = 9_000;
const SINK: u16 = 9_001;
/// Length of the bytes that all transfers repeat: a prime, so that no segment or buffer is a multiple of it.
const PERIOD: usize = 65_521;
/// Time over which rates are measured.
const SPAN: Duration = Duration::from_secs(2);

/// A lab with devices behind one link of this rate each way, 20 ms one-way delay, and a deep queue at the far end.
fn one_link(rate: u64) -> Lab {
    let link = LinkSpec::new("wlan0").rate(mbps(rate)).delay(ms(20)).queue(ByteCount::new(1_000_000));
    Lab::builder().link(link).lan(2).start().unwrap()
}

/// A link whose capacity the user knows.
fn known(rate: u64) -> String {
    format!("[[link]]\nname = \"wlan0\"\ncapacity_down = \"{rate} Mbit/s\"\ncapacity_up = \"{rate} Mbit/s\"\n")
}

/// An `[[app]]` entry for a device of the lab.
fn rule(device: usize, preference: &str) -> String {
    format!("[[app]]\nmatch = {{ client = \"{}\" }}\n{preference}\n", Lab::device_address(device))
}

fn pattern() -> Arc<Vec<u8>> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    // Twice, so that every piece of up to one period is a slice.
    let once: Vec<u8> = (0..PERIOD).map(|_| next()).collect();
    Arc::new([once.clone(), once].concat())
}

/// Writes the pattern until the stream ends.
fn send(stream: &mut TcpStream, pattern: &[u8]) {
    let mut at = 0;
    while let Ok(size @ 1..) = stream.write(&pattern[at..at + 32_768]) {
        at = (at + size) % PERIOD;
    }
}

/// Bytes that arrived, and whether all were those that were sent.
#[derive(Default)]
struct Meter {
    taken: AtomicU64,
    wrong: AtomicBool,
}

impl Meter {
    /// Reads until the stream ends.
    fn receive(&self, stream: &mut TcpStream, pattern: &[u8]) {
        let (mut buffer, mut at) = (vec![0; 32_768], 0);
        while let Ok(size @ 1..) = stream.read(&mut buffer) {
            if buffer[..size] != pattern[at..at + size] {
                self.wrong.store(true, Ordering::Relaxed);
            }
            at = (at + size) % PERIOD;
            self.taken.fetch_add(size as u64, Ordering::Relaxed);
        }
    }
}

/// Transfers between one program and one host, until they are dropped.
struct Transfers {
    meter: Arc<Meter>,
    streams: Vec<TcpStream>,
}

impl Transfers {
    /// A device downloads from a host of its own over this many connections.
    fn down(lab: &Lab, device: usize, count: usize) -> Self {
        Self::down_from(lab, lab.device(device), remote(11 + device as u8, SOURCE), count)
    }

    fn down_from(lab: &Lab, by: &Namespace, from: SocketAddr, count: usize) -> Self {
        let (sent, received, meter) = (pattern(), pattern(), Arc::new(Meter::default()));
        accept(lab, from, count, move |mut stream| send(&mut stream, &sent));
        let counting = meter.clone();
        Self { streams: connect(by, from, count, move |mut stream| counting.receive(&mut stream, &received)), meter }
    }

    /// A device uploads to a host of its own over this many connections.
    fn up(lab: &Lab, device: usize, count: usize) -> Self {
        let (sent, received, meter) = (pattern(), pattern(), Arc::new(Meter::default()));
        let to = remote(11 + device as u8, SINK);
        let counting = meter.clone();
        accept(lab, to, count, move |mut stream| counting.receive(&mut stream, &received));
        Self { streams: connect(lab.device(device), to, count, move |mut stream| send(&mut stream, &sent)), meter }
    }

    fn bytes(&self) -> u64 {
        assert!(!self.meter.wrong.load(Ordering::Relaxed), "other bytes arrived than were sent");
        self.meter.taken.load(Ordering::Relaxed)
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        for stream in &self.streams {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

/// Opens this many connections in a namespace, each served by a thread.
fn connect(by: &Namespace, to: SocketAddr, count: usize, work: impl Fn(TcpStream) + Clone + Send + 'static) -> Vec<TcpStream> {
    let open = || TcpStream::connect_timeout(&to, LIMIT).unwrap();
    let streams: Vec<TcpStream> = (0..count).map(|_| by.run(open).unwrap()).collect();
    for stream in &streams {
        let (stream, work) = (stream.try_clone().unwrap(), work.clone());
        thread::spawn(move || work(stream));
    }
    streams
}

/// Serves this many connections in the server's namespace, each on a thread.
fn accept(lab: &Lab, at: SocketAddr, count: usize, work: impl Fn(TcpStream) + Clone + Send + 'static) {
    let listener = lab.server().run(|| TcpListener::bind(at).unwrap()).unwrap();
    thread::spawn(move || {
        for _ in 0..count {
            let (stream, _) = listener.accept().unwrap();
            let work = work.clone();
            thread::spawn(move || work(stream));
        }
    });
}

/// Bits per second of each during `SPAN`.
fn rates<const N: usize>(of: [&Transfers; N]) -> [f64; N] {
    let (before, begin) = (of.map(Transfers::bytes), Instant::now());
    thread::sleep(SPAN);
    let after = of.map(Transfers::bytes);
    std::array::from_fn(|place| (after[place] - before[place]) as f64 * 8.0 / begin.elapsed().as_secs_f64())
}

/// Waits until the rates satisfy `holds` in two spans in a row, and prints all in Mbit/s.
#[track_caller]
fn settles<const N: usize>(what: &str, of: [&Transfers; N], holds: impl Fn([f64; N]) -> bool) {
    let (begin, mut seen, mut held) = (Instant::now(), Vec::new(), 0);
    while held < 2 {
        let now = rates(of);
        seen.push(now.map(|rate| (rate / 1e4).round() / 100.0));
        held = if holds(now) { held + 1 } else { 0 };
        assert!(begin.elapsed() < LIMIT, "{what} does not settle: {seen:?}");
    }
    println!("{what}: {seen:?} Mbit/s after {:?}", begin.elapsed());
}

fn near(value: f64, target: f64) -> bool {
    (value / target - 1.0).abs() < 0.1
}

/// Starts the daemon and waits until it forwards.
#[track_caller]
fn start<'a>(lab: &'a Lab, mirror: &Mirror, rules: &str) -> Up<'a> {
    let up = Up::start(lab, &format!("{GATEWAY}{rules}"));
    eventually("devices are forwarded", || asked(lab, 0, mirror.at(10)).is_ok());
    up
}

#[test]
fn clients_of_equal_weight_get_equal_shares_whatever_their_number_of_flows() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let mirror = Mirror::start(&lab);
    let equal = [rule(0, "weight = 1"), rule(1, "weight = 1"), known(20)].concat();
    let up = start(&lab, &mirror, &equal);
    let (many, one) = (Transfers::down(&lab, 0, 8), Transfers::down(&lab, 1, 1));
    settles("eight downloads beside one", [&many, &one], |[many, one]| near(many / one, 1.0) && many + one > 15e6);
    drop((many, one));
    let (many, one) = (Transfers::up(&lab, 0, 8), Transfers::up(&lab, 1, 1));
    settles("eight uploads beside one", [&many, &one], |[many, one]| near(many / one, 1.0) && many + one > 15e6);
    // Running flows follow the configuration.
    up.configure(&format!("{GATEWAY}{}", [rule(0, "weight = 1"), rule(1, "weight = 2"), known(20)].concat()));
    assert!(up.braid(&["reload"]).status.success());
    settles("eight uploads beside one of twice the weight", [&many, &one], |[many, one]| near(one / many, 2.0) && many + one > 15e6);
    drop((many, one));
    let (many, one) = (Transfers::down(&lab, 0, 8), Transfers::down(&lab, 1, 1));
    settles("eight downloads beside one of twice the weight", [&many, &one], |[many, one]| near(one / many, 2.0) && many + one > 15e6);
}

#[test]
fn a_client_with_two_addresses_has_one_weight_and_this_hosts_own_flows_count_too() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let mirror = Mirror::start(&lab);
    let by_mac = format!("[[app]]\nmatch = {{ client = \"{}\" }}\nweight = 2\n", Lab::device_mac(0));
    let _up = start(&lab, &mirror, &[by_mac, known(20)].concat());
    let four = Transfers::down(&lab, 0, 4);
    let six = Transfers::down_from(&lab, lab.device(0), remote6(11, SOURCE), 4);
    let other = Transfers::down(&lab, 1, 3);
    let own = Transfers::down_from(&lab, lab.client(), remote(13, SOURCE), 1);
    settles("IPv4, IPv6, another device and this host", [&four, &six, &other, &own], |[four, six, other, own]| {
        near(four + six, 2.0 * own) && near(other, own) && four + six + other + own > 15e6
    });
}

#[test]
fn a_rate_holds_for_a_client_while_the_daemon_lives() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let mirror = Mirror::start(&lab);
    let mut up = start(&lab, &mirror, &rule(0, "rate = \"4 Mbit/s\""));
    let (down, out) = (Transfers::down(&lab, 0, 2), Transfers::up(&lab, 0, 1));
    settles("limited", [&down, &out], |[down, out]| near(down, 4e6) && near(out, 4e6));
    let free = Transfers::down(&lab, 1, 1);
    settles("another client", [&free], |[free]| free > 10e6);
    drop(free);
    up.signal("STOP");
    settles("while the daemon hangs", [&down, &out], |[down, out]| down > 12e6 && out > 12e6);
    up.signal("CONT");
    settles("limited again", [&down, &out], |[down, out]| near(down, 4e6) && near(out, 4e6));
    // Without the rule.
    up.configure(GATEWAY);
    assert!(up.braid(&["reload"]).status.success());
    settles("without the rule", [&down, &out], |[down, out]| down > 12e6 && out > 12e6);
    up.configure(&format!("{GATEWAY}{}", rule(0, "rate = \"4 Mbit/s\"")));
    assert!(up.braid(&["reload"]).status.success());
    drop((down, out));
    let (down, out) = (Transfers::down(&lab, 0, 2), Transfers::up(&lab, 0, 1));
    settles("with the rule", [&down, &out], |[down, out]| near(down, 4e6) && near(out, 4e6));
    up.signal("KILL");
    up.wait_end();
    settles("after the kill", [&down, &out], |[down, out]| down > 12e6 && out > 12e6);
}

/// Clients without the options of RFC 7323: no timestamps, which show round trips, and no window scale.
#[test]
fn clients_without_tcp_options_get_their_shares() {
    if !able() {
        return;
    }
    let lab = one_link(12);
    lab.device(0).sysctl("ipv4/tcp_timestamps", "0").unwrap();
    lab.device(1).sysctl("ipv4/tcp_timestamps", "0").unwrap();
    lab.device(1).sysctl("ipv4/tcp_window_scaling", "0").unwrap();
    let of_all = "[[app]]\nmatch = { client = \"192.168.7.0/24\" }\nweight = 1\n";
    let mirror = Mirror::start(&lab);
    let _up = start(&lab, &mirror, &[of_all.to_owned(), known(12)].concat());
    let (many, one) = (Transfers::down(&lab, 0, 3), Transfers::down(&lab, 1, 1));
    settles("three downloads beside one", [&many, &one], |[many, one]| near(many / one, 1.0) && many + one > 9e6);
    drop((many, one));
    let (many, one) = (Transfers::up(&lab, 0, 3), Transfers::up(&lab, 1, 1));
    settles("three uploads beside one", [&many, &one], |[many, one]| near(many / one, 1.0) && many + one > 9e6);
}

/// Without an emulated link, and at a cable, the kernel passes packets of up to 64 kB with unfinished checksums.
#[test]
fn checksums_stay_right_in_large_packets() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::direct("wlan0")).lan_cable().start().unwrap();
    let mirror = Mirror::start(&lab);
    let _up = start(&lab, &mirror, &format!("[[app]]\nmatch = {{ client = \"{}\" }}\nrate = \"400 Mbit/s\"\n", Lab::device_mac(0)));
    let transfers =
        [Transfers::down(&lab, 0, 1), Transfers::down_from(&lab, lab.device(0), remote6(11, SOURCE), 1), Transfers::up(&lab, 0, 1)];
    let window = |namespace: &Namespace, port: u16| {
        let mut ss = namespace.command("ss").unwrap();
        let sockets = text(
            &ss.args(["-Htin", "state", "established"]).arg(format!("( sport = :{port} or dport = :{port} )")).output().unwrap().stdout,
        );
        let windows = sockets.split_whitespace().filter_map(|word| word.strip_prefix("snd_wnd:")?.parse::<u64>().ok());
        windows.max().unwrap_or(u64::MAX)
    };
    // Twice what 400 Mbit/s need in 2 ms.
    eventually("both ends' windows are lowered", || window(lab.server(), SOURCE) < 200_000 && window(lab.device(0), SINK) < 200_000);
    let before = transfers.each_ref().map(Transfers::bytes);
    eventually("more arrives", || transfers.iter().zip(before).all(|(transfer, before)| transfer.bytes() > before + 20_000_000));
    for namespace in [lab.device(0), lab.server(), lab.client()] {
        let nstat = text(&namespace.command("nstat").unwrap().args(["-asz", "TcpInCsumErrors", "IpInHdrErrors"]).output().unwrap().stdout);
        let counts: Vec<&str> = nstat.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
        assert!(counts.len() == 2 && counts.iter().all(|count| *count == "0"), "{nstat}");
    }
}

#[test]
fn bonded_flows_share_by_client_as_well() {
    if !able() {
        return;
    }
    let lab = two_links().lan(2).start().unwrap();
    let relay = Relay::start_told(&lab, &["--allow", "203.0.113.0/24"]);
    let rules = |first| [format!("carry = \"bond\"\n{GATEWAY}"), rule(0, first), rule(1, "weight = 1")].concat();
    let up = relay.join(&format!("carry = \"bond\"\n{GATEWAY}"));
    // Three quarters of the links' sum.
    let total = 22e6;
    let (many, one) = (Transfers::down(&lab, 0, 8), Transfers::down(&lab, 1, 1));
    eventually("all are bonded", || up.flows().iter().filter(|flow| flow["carry"] == "bond").count() == 9);
    settles("without weights each flow has a share", [&many, &one], |[many, one]| many > 6.0 * one && many + one > total);
    up.configure(&rules("weight = 1"));
    assert!(up.braid(&["reload"]).status.success());
    settles("eight bonded downloads beside one", [&many, &one], |[many, one]| near(many / one, 1.0) && many + one > total);
    drop((many, one));
    let (many, one) = (Transfers::up(&lab, 0, 8), Transfers::up(&lab, 1, 1));
    settles("eight bonded uploads beside one", [&many, &one], |[many, one]| near(many / one, 1.0) && many + one > total);
    drop((many, one));
    up.configure(&rules("weight = 2"));
    assert!(up.braid(&["reload"]).status.success());
    let (many, one) = (Transfers::down(&lab, 0, 8), Transfers::down(&lab, 1, 1));
    settles("eight bonded downloads of twice the weight beside one", [&many, &one], |[many, one]| {
        near(many / one, 2.0) && many + one > total
    });
}
