//! Preferences for flows without a relay: `rate`, `weight` and `guarantee` hold on real traffic, out and in, and end with the daemon.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use braid_lab::{Lab, LinkSpec, Web, mbps, ms};
use braid_model::ByteCount;
use serde_json::Value;
use support::*;

/// Bytes of the downloaded file: more than any test moves.
const FILE: ByteCount = ByteCount::new(200_000_000);
/// Port of the sink.
const SINK: u16 = 9_000;

/// A lab with one link of this rate each way, 20 ms one-way delay, and a deep queue at the far end.
fn one_link(rate: u64) -> Lab {
    let link = LinkSpec::new("wlan0").rate(mbps(rate)).delay(ms(20)).queue(ByteCount::new(1_000_000));
    Lab::builder().link(link).start().unwrap()
}

/// An `[[app]]` entry for this host of the lab's Internet.
fn rule(host: u8, preference: &str) -> String {
    format!("[[app]]\nmatch = {{ destination = \"{}\" }}\n{preference}\n", Lab::internet(host))
}

/// The rule's link with a capacity that the user knows.
fn known(rate: u64) -> String {
    format!("[[link]]\nname = \"wlan0\"\ncapacity_down = \"{rate} Mbit/s\"\ncapacity_up = \"{rate} Mbit/s\"\n")
}

/// curl that downloads from a host, until it is dropped.
struct Download(Child);

impl Download {
    fn start(lab: &Lab, web: &Web, host: u8) -> Self {
        let url = web.url_at(Lab::internet(host), FILE).unwrap();
        let mut curl = lab.client().command("curl").unwrap();
        Self(curl.args(["-s", "-o", "/dev/null", &url]).stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A sender in the client, and a sink in the server, until it is dropped.
struct Upload {
    stop: Arc<AtomicBool>,
    taken: Arc<AtomicU64>,
}

impl Upload {
    fn start(lab: &Lab, host: u8) -> Self {
        let to: SocketAddr = remote(host, SINK);
        let listener = lab.server().run(|| TcpListener::bind(to).unwrap()).unwrap();
        let (stop, taken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let count = taken.clone();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = vec![0; 65_536];
            while let Ok(size @ 1..) = stream.read(&mut buffer) {
                count.fetch_add(size as u64, Ordering::Relaxed);
            }
        });
        let (mut stream, stopped) = (open(lab, to).0, stop.clone());
        thread::spawn(move || {
            stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
            let block = vec![1; 16_384];
            while !stopped.load(Ordering::Relaxed) {
                let _ = stream.write(&block);
            }
        });
        Self { stop, taken }
    }

    /// Bits per second that arrived during `span`.
    fn rate(&self, span: Duration) -> f64 {
        let (before, begin) = (self.taken.load(Ordering::Relaxed), Instant::now());
        thread::sleep(span);
        (self.taken.load(Ordering::Relaxed) - before) as f64 * 8.0 / begin.elapsed().as_secs_f64()
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Bytes received by the living flows to a host.
fn received(up: &Up<'_>, host: u8) -> u64 {
    let prefix = format!("{}:", Lab::internet(host));
    let flows = up.flows().into_iter().filter(|flow| flow["remote"].as_str().unwrap().starts_with(&prefix));
    flows.map(|flow| flow["rx_bytes"].as_u64().unwrap()).sum()
}

/// Bits per second that the flows to each host receive during `span`.
fn rates<const N: usize>(up: &Up<'_>, hosts: [u8; N], span: Duration) -> [f64; N] {
    let (before, begin) = (hosts.map(|host| received(up, host)), Instant::now());
    thread::sleep(span);
    let after = hosts.map(|host| received(up, host));
    let seconds = begin.elapsed().as_secs_f64();
    std::array::from_fn(|place| after[place].saturating_sub(before[place]) as f64 * 8.0 / seconds)
}

/// Waits until the figures that `measure` takes satisfy `holds`; returns the time from now and the figures.
#[track_caller]
fn settles<T: std::fmt::Debug + Copy>(what: &str, mut measure: impl FnMut() -> T, holds: impl Fn(T) -> bool) -> Duration {
    let begin = Instant::now();
    let mut seen = Vec::new();
    loop {
        let figures = measure();
        seen.push(figures);
        if holds(figures) {
            println!("{what}: {:?} after {:?}", seen, begin.elapsed());
            return begin.elapsed();
        }
        assert!(begin.elapsed() < LIMIT, "{what} does not settle: {seen:?}");
    }
}

fn near(value: f64, target: f64) -> bool {
    (value / target - 1.0).abs() < 0.1
}

/// What `explain` says of the flow to a host.
fn share(up: &Up<'_>, host: u8) -> Value {
    let prefix = format!("{}:", Lab::internet(host));
    let flow = up.flows().into_iter().find(|flow| flow["remote"].as_str().unwrap().starts_with(&prefix)).unwrap();
    up.api("POST /v1/explain", &serde_json::json!({ "flow": flow["id"] })).1["share"].clone()
}

#[test]
fn a_rate_limits_what_a_flow_sends_and_receives() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let up = Up::start(&lab, &rule(11, "rate = \"4 Mbit/s\""));
    let download = Download::start(&lab, &web, 11);
    settles("in", || rates(&up, [11], ms(2000))[0], |rate| near(rate, 4e6));
    let share = share(&up, 11);
    assert_eq!((share["rate"].as_str(), share["down"]["target_bps"].as_u64()), (Some("4.0 Mbit/s"), Some(4_000_000)), "{share}");
    drop(download);
    let upload = Upload::start(&lab, 11);
    settles("out", || upload.rate(ms(2000)), |rate| near(rate, 4e6));
    // A flow of another rule is not limited.
    let free = Upload::start(&lab, 12);
    settles("beside it", || free.rate(ms(2000)), |rate| rate > 12e6);
    // Removing the limit gives the running flow its own settings back.
    drop(free);
    up.configure("");
    assert!(up.braid(&["reload"]).status.success());
    settles("after reload", || upload.rate(ms(2000)), |rate| rate > 12e6);
}

#[test]
fn weights_share_one_link() {
    if !able() {
        return;
    }
    let lab = one_link(12);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let up = Up::start(&lab, &format!("{}{}{}", rule(11, "weight = 1"), rule(12, "weight = 3"), known(12)));
    let one = Download::start(&lab, &web, 11);
    let three = Download::start(&lab, &web, 12);
    eventually("both receive", || received(&up, 11) > 0 && received(&up, 12) > 0);
    settles("1:3 in", || rates(&up, [11, 12], ms(2000)), |[one, three]| near(three / one, 3.0) && one + three > 9e6);
    drop(three);
    settles("alone", || rates(&up, [11], ms(2000))[0], |rate| rate > 9e6);
    drop(one);
    let (one, three) = (Upload::start(&lab, 11), Upload::start(&lab, 12));
    let both = || {
        let (mine, begin) = (one.taken.load(Ordering::Relaxed), Instant::now());
        let theirs = three.rate(ms(2000));
        let mine = (one.taken.load(Ordering::Relaxed) - mine) as f64 * 8.0 / begin.elapsed().as_secs_f64();
        [mine, theirs]
    };
    settles("1:3 out", both, |[one, three]| near(three / one, 3.0) && one + three > 9e6);
}

#[test]
fn a_guarantee_holds_beside_bulk_downloads() {
    if !able() {
        return;
    }
    let lab = one_link(12);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let up = Up::start(&lab, &format!("{}{}", rule(11, "guarantee = \"50 %\""), known(12)));
    let _bulk: Vec<Download> = (0..4).map(|_| Download::start(&lab, &web, 12)).collect();
    eventually("bulk receives", || received(&up, 12) > 500_000);
    let _kept = Download::start(&lab, &web, 11);
    eventually("the flow receives", || received(&up, 11) > 0);
    settles("guarantee", || rates(&up, [11, 12], ms(2000)), |[kept, bulk]| kept > 0.9 * 0.475 * 12e6 && bulk > 3e6);
    let share = share(&up, 11);
    assert_eq!(share["down"]["guaranteed_bps"].as_u64(), Some(6_000_000), "{share}");
    assert_eq!(up.status().unwrap()["warnings"], serde_json::json!([]));
}

#[test]
fn a_daemon_that_dies_leaves_no_limit() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    for signal in ["TERM", "KILL"] {
        let mut up = Up::start(&lab, &rule(11, "rate = \"2 Mbit/s\""));
        let (upload, _download) = (Upload::start(&lab, 11), Download::start(&lab, &web, 11));
        settles("out", || upload.rate(ms(2000)), |rate| near(rate, 2e6));
        let sockets = || client(&lab, "ss -tinH state established");
        let limited = || sockets().matches("pacing_rate").count();
        assert!(limited() >= 2, "{}", sockets());
        up.signal(signal);
        up.wait_end();
        settles(signal, || upload.rate(ms(2000)), |rate| rate > 12e6);
        // The window of the receiving socket is free again, too: its bytes come fast.
        let begin = bytes_received(&sockets());
        eventually("the download is free", || bytes_received(&sockets()) > begin + 5_000_000);
    }
}

/// The largest `bytes_received` that `ss` shows.
fn bytes_received(sockets: &str) -> u64 {
    sockets.split_whitespace().filter_map(|word| word.strip_prefix("bytes_received:")?.parse().ok()).max().unwrap_or(0)
}

/// Round trips of small messages over a connection for this long, in milliseconds: a call's packets.
fn round_trips(stream: &mut TcpStream, span: Duration) -> Vec<f64> {
    stream.set_nodelay(true).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let (begin, mut took) = (Instant::now(), Vec::new());
    while begin.elapsed() < span {
        let sent = Instant::now();
        stream.write_all(&[1; 160]).unwrap();
        stream.read_exact(&mut [0; 160]).unwrap();
        took.push(sent.elapsed().as_secs_f64() * 1e3);
        thread::sleep(ms(20).saturating_sub(sent.elapsed()));
    }
    took
}

/// A server that sends without end, by this congestion control, to each client that connects.
fn source(lab: &Lab, at: SocketAddr, control: &'static [u8]) {
    let listener = lab.server().run(|| TcpListener::bind(at).unwrap()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            socket2::SockRef::from(&stream).set_tcp_congestion(control).unwrap();
            thread::spawn(move || while stream.write(&[0; 65_536]).is_ok() {});
        }
    });
}

/// Reads from a server until it is dropped.
struct Reader(TcpStream);

impl Reader {
    fn start(lab: &Lab, from: SocketAddr) -> Self {
        let (stream, _) = open(lab, from);
        let mut reading = stream.try_clone().unwrap();
        thread::spawn(move || while matches!(reading.read(&mut [0; 65_536]), Ok(1..)) {});
        Self(stream)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.shutdown(std::net::Shutdown::Both);
    }
}

/// Prints figures. `cargo test -p braid-lab --test daemon_shares -- --ignored --nocapture --test-threads 1`
#[test]
#[ignore = "measures; run it by hand"]
fn measure_a_call_beside_a_bulk_download() {
    if !able() {
        return;
    }
    let lab = one_link(5);
    let listener = lab.server().run(|| TcpListener::bind(remote(11, SINK)).unwrap()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            thread::spawn(move || {
                let mut buffer = [0; 160];
                while stream.read_exact(&mut buffer).is_ok() && stream.write_all(&buffer).is_ok() {}
            });
        }
    });
    let controls: [(&str, &[u8], u16); 2] = [("BBR", b"bbr", 1), ("CUBIC", b"cubic", 2)];
    for (_, control, port) in controls {
        source(&lab, remote(12, port), control);
    }
    let preferred = rule(11, "guarantee = \"10 %\"");
    for (name, config) in
        [("no rule", String::new()), ("guarantee", preferred.clone()), ("guarantee, known capacity", preferred + &known(5))]
    {
        for (control, _, port) in controls {
            let up = Up::start(&lab, &config);
            let (mut call, _) = open(&lab, remote(11, SINK));
            let figures = |mut values: Vec<f64>| {
                values.sort_by(f64::total_cmp);
                (values[values.len() / 2], values[values.len() * 95 / 100])
            };
            let idle = figures(round_trips(&mut call, ms(2000)));
            let _bulk = Reader::start(&lab, remote(12, port));
            let first = figures(round_trips(&mut call, ms(3000)));
            let (before, begin) = (received(&up, 12), Instant::now());
            let settled = figures(round_trips(&mut call, ms(10_000)));
            let bulk = (received(&up, 12) - before) as f64 * 8.0 / 1e6 / begin.elapsed().as_secs_f64();
            println!(
                "{name}, {control}: median and 95th percentile in ms: idle {idle:.1?}, first 3 s {first:.1?}, settled {settled:.1?}; bulk {bulk:.2} Mbit/s"
            );
        }
    }
}

/// Prints how long it takes until two downloads share a link 1:3, by half seconds.
#[test]
#[ignore = "measures; run it by hand"]
fn measure_settling() {
    if !able() {
        return;
    }
    let lab = one_link(12);
    for (control, port) in [(&b"bbr"[..], 1), (&b"cubic"[..], 2)] {
        for host in [11, 12] {
            source(&lab, remote(host, port), control);
        }
        let up = Up::start(&lab, &format!("{}{}", rule(12, "weight = 3"), known(12)));
        let _one = Reader::start(&lab, remote(11, port));
        thread::sleep(ms(3000));
        let _three = Reader::start(&lab, remote(12, port));
        let begin = Instant::now();
        for _ in 0..20 {
            let [one, three] = rates(&up, [11, 12], ms(1000));
            let name = String::from_utf8_lossy(control);
            println!(
                "{name}: {:.1} s: {:.2} and {:.2} Mbit/s, ratio {:.2}",
                begin.elapsed().as_secs_f64(),
                one / 1e6,
                three / 1e6,
                three / one
            );
        }
    }
}

/// Prints the daemon's processor time with 100 flows that move data, without and with a rule.
#[test]
#[ignore = "measures; run it by hand"]
fn measure_the_cost_of_100_flows() {
    if !able() {
        return;
    }
    let lab = one_link(100);
    source(&lab, remote(11, 1), b"cubic");
    for (name, config) in [("no rule", String::new()), ("rate", rule(11, "rate = \"40 Mbit/s\""))] {
        let up = Up::start(&lab, &config);
        let _readers: Vec<Reader> = (0..100).map(|_| Reader::start(&lab, remote(11, 1))).collect();
        thread::sleep(ms(5000));
        let ticks = || -> u64 {
            let text = std::fs::read_to_string(format!("/proc/{}/stat", up.pid())).unwrap();
            let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
            fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
        };
        let (before, begin) = (ticks(), Instant::now());
        thread::sleep(ms(20_000));
        // A tick is 10 ms.
        println!("{name}: {:.2} % of one core", (ticks() - before) as f64 / begin.elapsed().as_secs_f64());
    }
}
