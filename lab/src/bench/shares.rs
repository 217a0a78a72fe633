//! Preferences of flows without a relay: how fast and how exactly connections reach their max-min rates, what a call beside a download waits, and what it
//! costs.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use braid_decide::fair::{FairFlow, Problem, solve};
use braid_model::{ByteCount, Direction, Rate};
use serde_json::json;

use super::report::Report;
use super::stats::{median, quantile};
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;

/// Time between two readings of the counters, and readings in the window over which rates are taken.
const SAMPLE: Duration = Duration::from_millis(100);
const WINDOW: usize = 10;
/// The rates of figure 4.5, in Mbit/s.
const LINKS: [(&str, u64); 2] = [("wlan0", 3), ("lte0", 10)];
/// Share of TCP payload in packets of 1500 bytes.
const PAYLOAD: f64 = 1448.0 / 1500.0;
/// Port of the server whose congestion control is CUBIC, of sinks, and of the call.
const CUBIC: u16 = 8080;
const SINK: u16 = 9000;
const CALL: u16 = 9001;
/// More than any download receives.
const FILE: ByteCount = ByteCount::new(4_000_000_000);

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "shares",
        "Rates of flows without a relay",
        "Phases: figure 4.5 of Yap's thesis, links of 3 and 10 Mbit/s with round trips of 40 and 60 ms; a (weight 1, wlan0), b (weight 2) and c (weight \
         1, lte0) are curls that download without end; b has a second set of connections on wlan0 once a has ended. Servers: nginx (BBR) or the \
         lab's HTTP server (CUBIC). A connection stays on its link, so the max-min rates (`decide::fair`) are those of the connections where they are. \
         Rates are taken over 1 s, in steps of 0.1 s. Settled: the time since the phase began after which all classes are within 10 % of max-min for \
         the first time. Then: the share of the following windows in which they are, and the mean error of the class that is furthest off. Out: two \
         uploads of weights 1 and 3, the second begins 4 s after the first. Capacities are configured. Call: a message of 160 bytes each 20 ms over a \
         link of 5 Mbit/s and 40 ms with a queue of 1 MB at the far end, beside one download; extra: the median round trip above that of the idle link. \
         Cost: utime and stime of the daemon with 100 downloads that share 100 Mbit/s, with a rule of weight 2 for half of them and without rules.",
    );
    let cases = [("BBR", 80, 1, false), ("CUBIC", CUBIC, 1, false), ("BBR", 80, 3, false), ("CUBIC", CUBIC, 3, true)];
    let cases = if settings.quick { &cases[..1] } else { &cases[..] };
    for (control, port, count, v6) in cases.iter().copied() {
        phases(settings, &mut report, &Case { control, port, count, v6 })?;
        settings.keep(&report)?;
    }
    for control in if settings.quick { &["bbr"][..] } else { &["bbr", "cubic"] } {
        uploads(settings, &mut report, control)?;
    }
    for (control, port) in [("BBR", 80), ("CUBIC", CUBIC)] {
        for udp in [false, true] {
            call(settings, &mut report, control, port, udp)?;
        }
    }
    settings.keep(&report)?;
    cost(settings, &mut report)?;
    Ok(report)
}

struct Case {
    control: &'static str,
    port: u16,
    count: usize,
    v6: bool,
}

/// Downloads or uploads of one class, with the bytes they have moved.
struct Class {
    moved: Arc<AtomicU64>,
    children: Vec<Child>,
    stop: Arc<AtomicBool>,
}

impl Class {
    fn new() -> Self {
        Self { moved: Arc::default(), children: Vec::new(), stop: Arc::default() }
    }

    /// Starts this many curls in the client.
    fn download(lab: &Lab, url: &str, count: usize) -> Result<Self> {
        let mut class = Self::new();
        for _ in 0..count {
            let mut curl = lab.client().command("curl")?;
            let mut child = curl.args(["-sgN", url]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot run curl")?;
            let mut body = child.stdout.take().context("curl has no output")?;
            let moved = class.moved.clone();
            thread::spawn(move || {
                let mut buffer = vec![0; 65_536];
                while let Ok(size @ 1..) = body.read(&mut buffer) {
                    moved.fetch_add(size as u64, Ordering::Relaxed);
                }
            });
            class.children.push(child);
        }
        Ok(class)
    }

    /// Starts a sender in the client to a sink that counts.
    fn upload(lab: &Lab, to: SocketAddr, control: &'static str) -> Result<Self> {
        let class = Self::new();
        let listener = lab.server().run(|| TcpListener::bind(to))??;
        let (moved, stop) = (class.moved.clone(), class.stop.clone());
        thread::spawn(move || {
            let Ok((mut stream, _)) = listener.accept() else { return };
            let mut buffer = vec![0; 65_536];
            while let Ok(size @ 1..) = stream.read(&mut buffer) {
                moved.fetch_add(size as u64, Ordering::Relaxed);
            }
        });
        let mut stream = lab.client().run(|| TcpStream::connect(to))??;
        socket2::SockRef::from(&stream).set_tcp_congestion(control.as_bytes())?;
        stream.set_write_timeout(Some(Duration::from_millis(200)))?;
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let _ = stream.write(&[0; 16_384]);
            }
        });
        Ok(class)
    }

    fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }
}

impl Drop for Class {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// An HTTP server at every address that answers any request with bytes without end, by this congestion control.
fn endless_server(lab: &Lab, port: u16, control: &'static str) -> Result<()> {
    let listener = lab.server().run(|| TcpListener::bind(("::", port)))??;
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || -> std::io::Result<()> {
                socket2::SockRef::from(&stream).set_tcp_congestion(control.as_bytes())?;
                stream.read_exact(&mut [0; 16])?;
                stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n\r\n")?;
                loop {
                    stream.write_all(&[0; 65_536])?;
                }
            });
        }
    });
    Ok(())
}

fn host(n: u8, v6: bool) -> IpAddr {
    if v6 { Lab::internet6(n).into() } else { Lab::internet(n).into() }
}

fn url(n: u8, port: u16, v6: bool) -> String {
    format!("http://{}/{}.bin", SocketAddr::new(host(n, v6), port), FILE.get())
}

fn rule(n: u8, v6: bool, rest: &str) -> String {
    format!("[[app]]\nmatch = {{ destination = \"{}\" }}\n{rest}\n", host(n, v6))
}

/// The links' capacities, as the user knows them.
fn capacities(links: &[(&str, u64)]) -> String {
    let link = |(name, rate): &(&str, u64)| {
        format!("[[link]]\nname = \"{name}\"\ncapacity_down = \"{rate} Mbit/s\"\ncapacity_up = \"{rate} Mbit/s\"\n")
    };
    links.iter().map(link).collect()
}

/// Rates in bits per second of some classes over windows, from a time when their traffic changed.
#[derive(Debug)]
struct Outcome {
    settled: Option<Duration>,
    within: f64,
    error: f64,
    rates: Vec<f64>,
}

/// Watches classes for this long. `expected`: their max-min rates.
fn watch(classes: &[&Class], expected: &[f64], span: Duration) -> Outcome {
    let begin = Instant::now();
    let mut readings: Vec<(f64, Vec<u64>)> = Vec::new();
    while begin.elapsed() < span {
        readings.push((begin.elapsed().as_secs_f64(), classes.iter().map(|class| class.moved()).collect()));
        thread::sleep(SAMPLE);
    }
    judge(&readings, expected)
}

fn judge(readings: &[(f64, Vec<u64>)], expected: &[f64]) -> Outcome {
    let rates = |(from, before): &(f64, Vec<u64>), (to, after): &(f64, Vec<u64>)| -> Vec<f64> {
        before.iter().zip(after).map(|(before, after)| (after - before) as f64 * 8.0 / (to - from)).collect()
    };
    let error = |rates: &[f64]| rates.iter().zip(expected).map(|(rate, expected)| (rate / expected - 1.0).abs()).fold(0.0, f64::max);
    let windows: Vec<(f64, f64)> = readings.windows(WINDOW + 1).map(|of| (of[WINDOW].0, error(&rates(&of[0], &of[WINDOW])))).collect();
    let first = windows.iter().position(|(_, error)| *error < 0.1);
    let after = &windows[first.unwrap_or(0)..];
    let within = after.iter().filter(|(_, error)| *error < 0.1).count() as f64 / after.len().max(1) as f64;
    // The whole time after the first settled window.
    let start = first.map_or(0, |first| first + 1);
    let mean = rates(&readings[start], &readings[readings.len() - 1]);
    Outcome { settled: first.map(|first| Duration::from_secs_f64(windows[first].0)), within, error: error(&mean), rates: mean }
}

/// The payload's max-min rates of connections: (link, weight, count) of each class.
fn max_min(classes: &[(usize, f64, usize)]) -> Result<Vec<f64>> {
    let links = LINKS.iter().map(|(_, rate)| mbps(*rate)).collect();
    let flows = classes.iter().flat_map(|(link, weight, count)| vec![FairFlow::backlogged(*weight, &[*link]); *count]).collect();
    let mut rates = solve(&Problem { links, flows })?.rates_bps.into_iter();
    Ok(classes.iter().map(|(_, _, count)| rates.by_ref().take(*count).sum::<f64>() * PAYLOAD).collect())
}

const PHASES: &str = "servers | connections a class | phase | max-min, Mbit/s | measured | settled after | then within 10 % | mean error";

fn row(report: &mut Report, case: (&str, String), phase: &str, expected: &[f64], outcome: &Outcome) {
    let list = |rates: &[f64]| rates.iter().map(|rate| format!("{:.2}", rate / 1e6)).collect::<Vec<_>>().join(", ");
    let settled = outcome.settled.map_or("never".to_owned(), |settled| format!("{:.1} s", settled.as_secs_f64()));
    progress(&format!("{} {} {phase}: {} ({}), {settled}, {:.2}", case.0, case.1, list(&outcome.rates), list(expected), outcome.within));
    report.row(
        "Shares:",
        PHASES,
        vec![
            case.0.to_owned(),
            case.1.clone(),
            phase.to_owned(),
            list(expected),
            list(&outcome.rates),
            settled.clone(),
            format!("{:.0} %", outcome.within * 100.0),
            format!("{:.1} %", outcome.error * 100.0),
        ],
    );
    let met = outcome.settled.is_some_and(|settled| settled <= Duration::from_secs(3)) && outcome.error < 0.1;
    report.aim(
        format!("{}, {}, {phase}: within 10 % of max-min within 3 s", case.0, case.1),
        format!("{settled}, then {:.1} % off", outcome.error * 100.0),
        met,
    );
    report.measured(json!({ "servers": case.0, "connections": case.1, "phase": phase, "expected": expected, "rates": outcome.rates,
        "settled_s": outcome.settled.map(|settled| settled.as_secs_f64()), "within": outcome.within, "error": outcome.error }));
}

fn phases(settings: &Settings, report: &mut Report, case: &Case) -> Result<()> {
    let link = |(name, rate): (&str, u64), delay| LinkSpec::new(name).rate(mbps(rate)).delay(ms(delay));
    let lab = Lab::builder().link(link(LINKS[0], 20)).link(link(LINKS[1], 30)).start()?;
    let web = Web::start(&lab)?;
    web.file(FILE)?;
    endless_server(&lab, CUBIC, "cubic")?;
    let config = [
        rule(11, case.v6, "links = [\"wlan0\"]\nweight = 1"),
        rule(12, case.v6, "links = [\"lte0\"]\nweight = 2"),
        rule(14, case.v6, "links = [\"wlan0\"]\nweight = 2"),
        rule(13, case.v6, "links = [\"lte0\"]\nweight = 1"),
        capacities(&LINKS),
    ];
    let daemon = Daemon::start(&lab, &settings.braid, "max-throughput", &config.concat())?;
    let begin = |n| Class::download(&lab, &url(n, case.port, case.v6), case.count);
    let span = Duration::from_secs(if settings.quick { 6 } else { 8 });
    let name = || (case.control, format!("{}{}", case.count, if case.v6 { ", IPv6" } else { "" }));
    let n = case.count;

    let (a, b, c) = (begin(11)?, begin(12)?, begin(13)?);
    let expected = max_min(&[(0, 1.0, n), (1, 2.0, n), (1, 1.0, n)])?;
    row(report, name(), "1: a; b and c", &expected, &watch(&[&a, &b, &c], &expected, span));
    drop(a);
    let more = begin(14)?;
    let expected = max_min(&[(0, 2.0, n), (1, 2.0, n), (1, 1.0, n)])?;
    row(report, name(), "2: a has ended; b on both links", &expected, &watch(&[&more, &b, &c], &expected, span));
    drop((b, more));
    let expected = max_min(&[(1, 1.0, n)])?;
    row(report, name(), "3: c alone", &expected, &watch(&[&c], &expected, span));
    let b = begin(12)?;
    let expected = max_min(&[(1, 2.0, n), (1, 1.0, n)])?;
    row(report, name(), "4: b joins c", &expected, &watch(&[&b, &c], &expected, span));
    for delay in [60, 15] {
        for direction in Direction::ALL {
            lab.set(1, direction, |profile| profile.delay = ms(delay))?;
        }
        row(report, name(), &format!("5: the round trip becomes {} ms", 2 * delay), &expected, &watch(&[&b, &c], &expected, span));
    }
    drop((b, c, daemon));
    reference(settings, report, case, &lab)
}

/// What the servers' congestion control itself makes of a round trip that becomes longer: one class alone, and two.
fn reference(settings: &Settings, report: &mut Report, case: &Case, lab: &Lab) -> Result<()> {
    let set = |delay| -> Result<()> {
        for direction in Direction::ALL {
            lab.set(1, direction, |profile| profile.delay = ms(delay))?;
        }
        Ok(())
    };
    let config = [rule(12, case.v6, "links = [\"lte0\"]"), rule(13, case.v6, "links = [\"lte0\"]")];
    let _daemon = Daemon::start(lab, &settings.braid, "max-throughput", &config.concat())?;
    for (hosts, classes) in [(&[13][..], "c"), (&[12, 13], "b and c")] {
        set(30)?;
        let downloads = hosts.iter().map(|n| Class::download(lab, &url(*n, case.port, case.v6), case.count)).collect::<Result<Vec<_>>>()?;
        let moved = || downloads.iter().map(Class::moved).sum::<u64>();
        thread::sleep(Duration::from_secs(8));
        set(60)?;
        let (before, start) = (moved(), Instant::now());
        thread::sleep(Duration::from_secs(if settings.quick { 6 } else { 8 }));
        let bps = (moved() - before) as f64 * 8.0 / start.elapsed().as_secs_f64();
        let of_link = bps / (LINKS[1].1 as f64 * 1e6 * PAYLOAD);
        progress(&format!(
            "{} {}: without weights, {classes}: the round trip becomes 120 ms: {of_link:.2} of the link",
            case.control, case.count
        ));
        let name = format!("{}{}", case.count, if case.v6 { ", IPv6" } else { "" });
        report.row(
            "Without weights, the round trip becomes 120 ms:",
            "servers | connections a class | classes | Mbit/s together | of the link",
            vec![case.control.to_owned(), name, classes.to_owned(), format!("{:.2}", bps / 1e6), format!("{:.0} %", of_link * 100.0)],
        );
        report.measured(json!({ "servers": case.control, "connections": case.count, "classes": classes, "reference_bps": bps }));
    }
    Ok(())
}

fn uploads(settings: &Settings, report: &mut Report, control: &'static str) -> Result<()> {
    let lab = Lab::builder().link(LinkSpec::new("wlan0").rate(mbps(12)).delay(ms(20)).queue(ByteCount::new(500_000))).start()?;
    let config = rule(11, false, "weight = 1") + &rule(12, false, "weight = 3") + &capacities(&[("wlan0", 12)]);
    let _daemon = Daemon::start(&lab, &settings.braid, "max-throughput", &config)?;
    let one = Class::upload(&lab, SocketAddr::new(host(11, false), SINK), control)?;
    thread::sleep(Duration::from_secs(4));
    let three = Class::upload(&lab, SocketAddr::new(host(12, false), SINK), control)?;
    let expected = [3e6 * PAYLOAD, 9e6 * PAYLOAD];
    let outcome = watch(&[&one, &three], &expected, Duration::from_secs(12));
    row(report, (if control == "bbr" { "BBR" } else { "CUBIC" }, "1".to_owned()), "out: 1 and 3 on 12 Mbit/s", &expected, &outcome);
    Ok(())
}

/// Round trips of a call's messages for this long, in milliseconds.
fn exchange(span: Duration, mut once: impl FnMut() -> std::io::Result<()>) -> std::io::Result<Vec<f64>> {
    let (begin, mut took) = (Instant::now(), Vec::new());
    while begin.elapsed() < span {
        let sent = Instant::now();
        once()?;
        took.push(sent.elapsed().as_secs_f64() * 1e3);
        thread::sleep(Duration::from_millis(20).saturating_sub(sent.elapsed()));
    }
    Ok(took)
}

/// A server that returns each message, over TCP and UDP.
fn echo(lab: &Lab, at: SocketAddr) -> Result<()> {
    let (listener, socket) = lab.server().run(|| -> std::io::Result<_> { Ok((TcpListener::bind(at)?, UdpSocket::bind(at)?)) })??;
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.set_nodelay(true);
            let mut buffer = [0; 160];
            thread::spawn(move || while stream.read_exact(&mut buffer).is_ok() && stream.write_all(&buffer).is_ok() {});
        }
    });
    thread::spawn(move || {
        let mut buffer = [0; 160];
        while let Ok((size, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..size], from);
        }
    });
    Ok(())
}

fn call(settings: &Settings, report: &mut Report, control: &str, port: u16, udp: bool) -> Result<()> {
    let lab = Lab::builder().link(LinkSpec::new("wlan0").rate(mbps(5)).delay(ms(20)).queue(ByteCount::new(1_000_000))).start()?;
    let web = Web::start(&lab)?;
    web.file(FILE)?;
    endless_server(&lab, CUBIC, "cubic")?;
    let at = SocketAddr::new(host(11, false), CALL);
    echo(&lab, at)?;
    for (name, config) in [
        ("none", String::new()),
        ("guarantee 10 %", rule(11, false, "guarantee = \"10 %\"")),
        ("guarantee 10 %, capacity configured", rule(11, false, "guarantee = \"10 %\"") + &capacities(&[("wlan0", 5)])),
    ] {
        let _daemon = Daemon::start(&lab, &settings.braid, "max-throughput", &config)?;
        let mut stream = lab.client().run(|| TcpStream::connect(at))??;
        stream.set_nodelay(true)?;
        let socket = lab.client().run(|| -> std::io::Result<UdpSocket> {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(at)?;
            socket.set_read_timeout(Some(Duration::from_secs(10)))?;
            Ok(socket)
        })??;
        let mut once = || {
            if udp {
                socket.send(&[1; 160])?;
                return socket.recv(&mut [0; 160]).map(drop);
            }
            stream.write_all(&[1; 160])?;
            stream.read_exact(&mut [0; 160])
        };
        let idle = median(&exchange(Duration::from_secs(3), &mut once)?);
        let bulk = Class::download(&lab, &url(12, port, false), 1)?;
        let early = exchange(Duration::from_secs(3), &mut once)?;
        let (before, begin) = (bulk.moved(), Instant::now());
        let later = exchange(Duration::from_secs(if settings.quick { 5 } else { 10 }), &mut once)?;
        let rate = (bulk.moved() - before) as f64 * 8.0 / 1e6 / begin.elapsed().as_secs_f64();
        let (extra, kind) = (median(&later) - idle, if udp { "UDP" } else { "TCP" });
        let text = |value: f64| format!("{value:.0} ms");
        progress(&format!("{kind} call, {control}, {name}: idle {idle:.1}, extra {extra:.1} ms, bulk {rate:.2} Mbit/s"));
        report.row(
            "A call beside a download:",
            "call | download's server | rule of the call | idle | median in the first 3 s | median after | extra | 95th percentile after | download, Mbit/s",
            vec![
                kind.to_owned(),
                control.to_owned(),
                name.to_owned(),
                text(idle),
                text(median(&early)),
                text(median(&later)),
                text(extra),
                text(quantile(&later, 0.95)),
                format!("{rate:.2}"),
            ],
        );
        if name != "none" {
            report.aim(format!("{kind} call, {control}, {name}: median extra delay under 20 ms"), format!("{extra:.1} ms"), extra < 20.0);
        }
        report.measured(json!({ "call": kind, "control": control, "rule": name, "idle_ms": idle, "extra_ms": extra, "bulk_mbps": rate }));
    }
    Ok(())
}

/// Clock ticks of 10 ms that a process has used, in user mode and in the kernel.
fn ticks(pid: u32) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("cannot read the daemon's processor time")?;
    let (_, fields) = text.rsplit_once(')').context("the daemon's stat has no name")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    Ok(fields[11].parse::<u64>()? + fields[12].parse::<u64>()?)
}

fn cost(settings: &Settings, report: &mut Report) -> Result<()> {
    let rate = Rate::from_mbps(100);
    let lab = Lab::builder().link(LinkSpec::new("wlan0").rate(rate).delay(ms(20))).start()?;
    endless_server(&lab, CUBIC, "cubic")?;
    let span = Duration::from_secs(if settings.quick { 5 } else { 30 });
    let mut used = Vec::new();
    for (name, config) in [("none", String::new()), ("weight 2", rule(11, false, "weight = 2") + &capacities(&[("wlan0", 100)]))] {
        let daemon = Daemon::start(&lab, &settings.braid, "max-throughput", &config)?;
        let _flows = [11, 12].map(|n| Class::download(&lab, &url(n, CUBIC, false), 50));
        thread::sleep(Duration::from_secs(5));
        let (before, begin) = (ticks(daemon.pid())?, Instant::now());
        thread::sleep(span);
        let share = (ticks(daemon.pid())? - before) as f64 / begin.elapsed().as_secs_f64();
        progress(&format!("100 flows, rule {name}: {share:.2} % of a core"));
        report.row("Cost of 100 flows:", "rule | share of one core", vec![name.to_owned(), format!("{share:.2} %")]);
        used.push(share);
    }
    let more = used[1] - used[0];
    report.aim("shaping 100 flows costs under 1 % of a core more than none", format!("{more:.2} %"), more < 1.0);
    report.measured(json!({ "cost_percent": used }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_window_within_a_tenth_counts_as_settled() {
        // 1 Mbit/s for a second, then 2 Mbit/s.
        let readings: Vec<(f64, Vec<u64>)> =
            (0..60_u64).map(|at| (at as f64 * 0.1, vec![at.min(10) * 12_500 + at.saturating_sub(10) * 25_000])).collect();
        let outcome = judge(&readings, &[2e6]);
        assert!((outcome.settled.unwrap().as_secs_f64() - 1.9).abs() < 0.11, "{outcome:?}");
        assert!(outcome.within == 1.0 && outcome.error < 0.05, "{outcome:?}");
        assert_eq!(judge(&readings, &[9e6]).settled, None);
    }

    #[test]
    fn the_phases_of_figure_4_5_have_its_rates() {
        let rates = max_min(&[(0, 1.0, 1), (1, 2.0, 1), (1, 1.0, 1)]).unwrap();
        for (rate, expected) in rates.iter().zip([3e6, 6.667e6, 3.333e6]) {
            assert!((rate / (expected * PAYLOAD) - 1.0).abs() < 1e-3, "{rates:?}");
        }
    }
}
