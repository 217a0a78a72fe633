//! Late binding: what a link that dies takes with it, and how long an urgent packet waits (Yap's thesis, 2.4.3, figures 2.14 to 2.19).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::Direction;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};

use super::moves::{Arrivals, PORT, RULES, World, gaps, rate};
use super::speed::spent;
use super::{Settings, allow_multipath};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::{median, quantile, worst};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::{LinkSpec, ms};
use crate::sys::{TcpState, tcp_state};

const NAMES: [&str; 2] = ["wlan0", "lte0"];
/// Of a device, as in the thesis.
const SLOW: u64 = 5;
/// Packets that the device and its queue take without late binding: the thesis's usual driver.
const RING: u32 = 50;
/// Port of urgent datagrams, and of those that mark the begin of a burst.
const URGENT: u16 = 8090;
/// A burst before an urgent packet (figure 2.19).
const BURST: usize = 50;
/// Timeout of every step.
const LIMIT: Duration = Duration::from_secs(30);

/// How packets get their link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Early: the device takes [`RING`] packets.
    Early,
    /// Late, with this number of packets below the binding point.
    Late(u32),
    /// The kernel's multipath TCP, with the same devices.
    Multipath,
}

impl Way {
    fn name(self) -> String {
        match self {
            Self::Early => format!("early, {RING} packets in the device"),
            Self::Late(below) => format!("late, {below} below the binding point"),
            Self::Multipath => "MPTCP".to_owned(),
        }
    }

    fn config(self) -> String {
        match self {
            Self::Late(below) => format!("[late]\nbelow = {below}\n"),
            _ => String::new(),
        }
    }
}

const LATE: [Way; 4] = [Way::Late(50), Way::Late(5), Way::Late(2), Way::Late(1)];

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "late",
        "Late binding",
        "The client's devices carry 5 Mbit/s (a token bucket at the device); acknowledgements return after 100 ms. Uploads by TCP CUBIC. Without late \
         binding a device takes 50 packets, as the thesis's driver does.",
    );
    let mut raw = serde_json::Map::new();
    raw.insert("lost_with_a_link".into(), lost_with_a_link(settings, &mut report)?);
    settings.keep(&report)?;
    raw.insert("urgent_after_a_burst".into(), urgent_after_a_burst(settings, &mut report)?);
    settings.keep(&report)?;
    raw.insert("urgent_beside_bulk".into(), urgent_beside_bulk(settings, &mut report)?);
    settings.keep(&report)?;
    raw.insert("throughput".into(), throughput(settings, &mut report)?);
    report.raw = Value::Object(raw);
    Ok(report)
}

/// Two links whose devices carry so many Mbit/s upstream. Acknowledgements return after `back`.
fn lab(rate: u64, back: Duration) -> Result<Lab> {
    let lab = NAMES.iter().fold(Lab::builder().rp_filter(2), |builder, name| builder.link(LinkSpec::new(name))).start()?;
    let ring = u64::from(RING) * 1514;
    for (link, name) in NAMES.iter().enumerate() {
        lab.set(link, Direction::Down, |profile| profile.delay = back)?;
        let shape = format!("qdisc add dev {name} root tbf rate {rate}mbit burst {} limit {ring}", (rate * 1_000_000 / 8 / 1000).max(1600));
        let output = lab.client().command("tc")?.args(shape.split(' ')).output().context("cannot run tc: install iproute2")?;
        ensure!(output.status.success(), "tc {shape}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(lab)
}

/// A server that reads uploads. It ends with its last connection.
struct Sink(Arc<Mutex<Arrivals>>);

impl Sink {
    fn start(lab: &Lab, multipath: bool) -> Result<Self> {
        let listener = lab.server().run(|| -> std::io::Result<TcpListener> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(if multipath { Protocol::MPTCP } else { Protocol::TCP }))?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddr::from((Lab::internet(10), PORT)).into())?;
            socket.listen(16)?;
            Ok(socket.into())
        })??;
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let all = arrivals.clone();
        thread::spawn(move || {
            for mut stream in listener.incoming().map_while(std::io::Result::ok) {
                let arrivals = all.clone();
                thread::spawn(move || {
                    let mut buffer = [0; 65_536];
                    while let Ok(count @ 1..) = stream.read(&mut buffer) {
                        arrivals.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), count));
                    }
                });
            }
        });
        Ok(Self(arrivals))
    }

    fn take(&self) -> Arrivals {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// An upload that lasts until this is dropped, and what its socket said.
struct Upload {
    stream: TcpStream,
    ends: Arc<AtomicBool>,
    states: Arc<Mutex<Vec<(Instant, TcpState)>>>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Upload {
    fn start(lab: &Lab, multipath: bool) -> Result<Self> {
        let stream: TcpStream = lab.client().run(|| -> std::io::Result<TcpStream> {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(if multipath { Protocol::MPTCP } else { Protocol::TCP }))?;
            if !multipath {
                socket.set_tcp_congestion(b"cubic")?;
            }
            socket.connect_timeout(&SocketAddr::from((Lab::internet(10), PORT)).into(), LIMIT)?;
            Ok(socket.into())
        })??;
        let (ends, states) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let mut writing = stream.try_clone()?;
        let writer = thread::spawn(move || while writing.write_all(&[7; 16_384]).is_ok() {});
        let (looking, over, seen) = (stream.try_clone()?, ends.clone(), states.clone());
        let looker = thread::spawn(move || {
            while !over.load(Ordering::Relaxed) && !multipath {
                if let Ok(state) = tcp_state(looking.as_fd()) {
                    seen.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), state));
                }
                thread::sleep(ms(2));
            }
        });
        Ok(Self { stream, ends, states, threads: vec![writer, looker] })
    }

    fn states(&self) -> Vec<(Instant, TcpState)> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// What a dead link did to an upload.
struct Death {
    /// Segments sent again in the three seconds after, and those of them that had arrived.
    retransmitted: f64,
    needless: f64,
    /// Seconds in recovery, or after a timeout, in the three seconds after.
    recovery: f64,
    /// Mbit/s before, and in the second after.
    rates: [f64; 2],
    /// Longest time without data at the server, in seconds.
    gap: f64,
}

fn death(settings: &Settings, way: Way) -> Result<Death> {
    let lab = lab(SLOW, ms(100))?;
    let multipath = way == Way::Multipath;
    let sink = Sink::start(&lab, multipath)?;
    let world = if multipath {
        allow_multipath(&lab)?;
        None
    } else {
        Some(World::start_with(settings, &lab, &format!("{}{RULES}", way.config()))?)
    };
    let upload = Upload::start(&lab, multipath)?;
    if let Some(world) = &world {
        let flows = world.movable(&lab, 1)?;
        ensure!(flows[0].1 == NAMES[0], "the upload uses {}", flows[0].1);
    }
    thread::sleep(Duration::from_secs(4));
    let begin = Instant::now();
    lab.carrier(0, false)?;
    thread::sleep(Duration::from_secs(4));
    let states = upload.states();
    drop(upload);
    let arrivals = sink.take();
    let after = |seconds| begin + Duration::from_secs(seconds);
    let state_at = |at: Instant| states.iter().rev().find(|(seen, _)| *seen <= at).map(|(_, state)| *state).unwrap_or_default();
    let (then, later) = (state_at(begin), state_at(after(3)));
    let pairs = states.iter().zip(states.iter().skip(1)).filter(|((at, state), _)| *at >= begin && *at < after(3) && state.is_recovering());
    Ok(Death {
        retransmitted: f64::from(later.retransmitted - then.retransmitted),
        needless: f64::from(later.needless - then.needless),
        recovery: pairs.map(|((from, _), (to, _))| to.saturating_duration_since(*from).as_secs_f64()).sum::<f64>().abs(),
        rates: [rate(&arrivals, begin - Duration::from_secs(2), begin), rate(&arrivals, begin, after(1))],
        gap: gaps(&arrivals, begin, after(4)),
    })
}

/// Figures 2.14, 2.15, 2.16 and 2.18: the link of an upload loses its carrier.
fn lost_with_a_link(settings: &Settings, report: &mut Report) -> Result<Value> {
    let count = if settings.quick { 2 } else { 10 };
    let mut raw = Vec::new();
    let mut losses = Vec::new();
    let mut gaps = Vec::new();
    for way in [Way::Early].into_iter().chain(LATE).chain([Way::Multipath]) {
        let deaths = (0..count).map(|_| death(settings, way)).collect::<Result<Vec<_>>>()?;
        let all = |of: fn(&Death) -> f64| deaths.iter().map(of).collect::<Vec<f64>>();
        let (again, recovery, gap) = (all(|death| death.retransmitted), all(|death| death.recovery), all(|death| death.gap));
        let lost = all(|death| (death.retransmitted - death.needless).max(0.0));
        let (before, after) = (all(|death| death.rates[0]), all(|death| death.rates[1]));
        progress(&format!(
            "{}: {:.0} segments lost, {:.0} sent again, recovery {:.3} s, gap {:.3} s, {:.2} then {:.2} Mbit/s",
            way.name(),
            median(&lost),
            median(&again),
            median(&recovery),
            median(&gap),
            median(&before),
            median(&after)
        ));
        let of_tcp = |text: String| if way == Way::Multipath { "-".to_owned() } else { text };
        report.row(
            &format!("The device of an upload loses its carrier, {count} times each; the flow moves (figures 2.14, 2.15, 2.16, 2.18):"),
            "packets | lost: median | most | sent again | in recovery: median | longest | gap: median | longest | Mbit/s before | in the second after",
            vec![
                way.name(),
                of_tcp(format!("{:.0}", median(&lost))),
                of_tcp(format!("{:.0}", worst(&lost))),
                of_tcp(format!("{:.0}", median(&again))),
                of_tcp(format!("{:.3} s", median(&recovery))),
                of_tcp(format!("{:.3} s", worst(&recovery))),
                format!("{:.3} s", median(&gap)),
                format!("{:.3} s", worst(&gap)),
                format!("{:.2}", median(&before)),
                format!("{:.2}", median(&after)),
            ],
        );
        raw.push(json!({ "way": way.name(), "lost": lost, "retransmitted": again, "recovery_s": recovery, "gap_s": gap, "before_mbps": before, "after_mbps": after }));
        losses.push((way, median(&lost)));
        gaps.push((way, median(&gap)));
    }
    let of = |wanted: Way, all: &[(Way, f64)]| all.iter().find(|(way, _)| *way == wanted).map_or(f64::NAN, |(_, value)| *value);
    let (fifty, two) = (of(Way::Late(50), &losses), of(Way::Late(2), &losses));
    report.aim(
        "with 2 packets below the binding point a dead link costs at most 4 segments, with 50 more than 25 (thesis: 3.9 with 5, 26.3 with 50)",
        format!("{two:.0} and {fifty:.0}"),
        two <= 4.0 && fifty > 25.0,
    );
    let ratio = of(Way::Late(2), &gaps) / of(Way::Multipath, &gaps);
    report.aim("the gap is at most MPTCP's", format!("{ratio:.2} of it"), ratio <= 1.0);
    Ok(json!(raw))
}

/// A daemon that binds as this way says, over the first link only.
fn daemon(settings: &Settings, lab: &Lab, way: Way) -> Result<Daemon> {
    Daemon::start(lab, &settings.braid, "only-one", &way.config())
}

/// Sockets of the client to the server's port for urgent datagrams, and the server's.
fn datagrams(lab: &Lab, count: usize) -> Result<(Vec<UdpSocket>, UdpSocket)> {
    let to = SocketAddr::from((Lab::internet(10), URGENT));
    let server = lab.server().run(|| UdpSocket::bind(to))??;
    server.set_read_timeout(Some(Duration::from_secs(2)))?;
    let open = || -> std::io::Result<UdpSocket> {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect(to)?;
        Ok(socket)
    };
    let sockets = lab.client().run(|| (0..count).map(|_| open()).collect::<std::io::Result<Vec<_>>>())??;
    Ok((sockets, server))
}

/// Figure 2.19: an urgent packet after a burst of 50.
fn urgent_after_a_burst(settings: &Settings, report: &mut Report) -> Result<Value> {
    let count = if settings.quick { 10 } else { 50 };
    let mut raw = Vec::new();
    let mut medians = Vec::new();
    for way in [Way::Early].into_iter().chain(LATE) {
        let lab = lab(SLOW, Duration::ZERO)?;
        let _daemon = daemon(settings, &lab, way)?;
        let (sockets, server) = datagrams(&lab, 3)?;
        let [marker, bulk, urgent] = &sockets[..] else { unreachable!("three sockets") };
        let mut waits = Vec::new();
        let mut buffer = [0; 2000];
        for _ in 0..count {
            marker.send(&[0; 100])?;
            for _ in 0..BURST - 2 {
                bulk.send(&[1; 1458])?;
            }
            urgent.send(&[2; 100])?;
            let mut marked = None;
            // The device drops what it has no room for.
            while let Ok(size @ 1..) = server.recv(&mut buffer) {
                let now = Instant::now();
                match (buffer[0], size) {
                    (0, _) => marked = Some(now),
                    (2, _) => {
                        waits.extend(marked.map(|marked: Instant| now.saturating_duration_since(marked).as_secs_f64() * 1000.0));
                        break;
                    }
                    _ => {}
                }
            }
            thread::sleep(ms(150));
            server.set_read_timeout(Some(ms(1)))?;
            while server.recv(&mut buffer).is_ok() {}
            server.set_read_timeout(Some(Duration::from_secs(2)))?;
        }
        ensure!(waits.len() * 2 > count, "{}: {} of {count} urgent packets arrived", way.name(), waits.len());
        progress(&format!("{}: an urgent packet after a burst waits {:.1} ms", way.name(), median(&waits)));
        report.row(
            &format!("An urgent packet after a burst of {BURST} of another flow, {count} times each (figure 2.19), in ms:"),
            "packets | median | 90th percentile | longest | arrived",
            vec![
                way.name(),
                format!("{:.1}", median(&waits)),
                format!("{:.1}", quantile(&waits, 0.9)),
                format!("{:.1}", worst(&waits)),
                format!("{} of {count}", waits.len()),
            ],
        );
        raw.push(json!({ "way": way.name(), "wait_ms": waits }));
        medians.push((way, median(&waits)));
    }
    let two = medians.iter().find(|(way, _)| *way == Way::Late(2)).map_or(f64::NAN, |(_, wait)| *wait);
    report.aim(
        "an urgent packet after a burst: median at most 7.4 ms with 2 packets below (thesis: 7.4 ms, 135 ms with 50)",
        format!("{two:.1} ms"),
        two <= 7.4,
    );
    Ok(json!(raw))
}

/// An urgent packet beside an upload.
fn urgent_beside_bulk(settings: &Settings, report: &mut Report) -> Result<Value> {
    let count = if settings.quick { 50 } else { 300 };
    let mut raw = Vec::new();
    let mut medians = Vec::new();
    for way in [Way::Early].into_iter().chain(LATE) {
        let lab = lab(SLOW, ms(100))?;
        let _daemon = daemon(settings, &lab, way)?;
        let _sink = Sink::start(&lab, false)?;
        let _upload = Upload::start(&lab, false)?;
        let (sockets, server) = datagrams(&lab, 1)?;
        thread::sleep(Duration::from_secs(4));
        let mut waits = Vec::new();
        for _ in 0..count {
            let begin = Instant::now();
            sockets[0].send(&[2; 100])?;
            if server.recv(&mut [0; 200]).is_ok() {
                waits.push(begin.elapsed().as_secs_f64() * 1000.0);
            }
            thread::sleep(ms(23));
        }
        ensure!(waits.len() * 2 > count, "{}: {} of {count} urgent packets arrived", way.name(), waits.len());
        progress(&format!("{}: an urgent packet beside an upload waits {:.1} ms", way.name(), median(&waits)));
        report.row(
            &format!("One way of an urgent packet beside an upload, {count} times each, in ms:"),
            "packets | median | 90th percentile | longest",
            vec![way.name(), format!("{:.1}", median(&waits)), format!("{:.1}", quantile(&waits, 0.9)), format!("{:.1}", worst(&waits))],
        );
        raw.push(json!({ "way": way.name(), "wait_ms": waits }));
        medians.push((way, median(&waits)));
    }
    let two = medians.iter().find(|(way, _)| *way == Way::Late(2)).map_or(f64::NAN, |(_, wait)| *wait);
    report.aim(format!("an urgent packet beside an upload at {SLOW} Mbit/s: median under 5 ms"), format!("{two:.1} ms"), two < 5.0);
    Ok(json!(raw))
}

/// What two links of 50 Mbit/s carry, and what it costs.
fn throughput(settings: &Settings, report: &mut Report) -> Result<Value> {
    const RATE: u64 = 50;
    let (rounds, seconds) = if settings.quick { (1, 5) } else { (5, 15) };
    let mut raw = Vec::new();
    let mut ratios = Vec::new();
    // TCP and IP take 66 of 1514 bytes, and the token bucket counts the Ethernet header.
    let most = 2.0 * RATE as f64 * 1448.0 / 1514.0;
    for _ in 0..rounds {
        let mut rates = Vec::new();
        for way in [Way::Early, Way::Late(2)] {
            let lab = lab(RATE, ms(20))?;
            let daemon = Daemon::start(&lab, &settings.braid, "round-robin", &way.config())?;
            let sink = Sink::start(&lab, false)?;
            let _uploads = (0..4).map(|_| Upload::start(&lab, false)).collect::<Result<Vec<_>>>()?;
            thread::sleep(Duration::from_secs(3));
            let (from, used) = (Instant::now(), spent(daemon.pid())?.iter().sum::<f64>());
            sink.take();
            thread::sleep(Duration::from_secs(seconds));
            let span = from.elapsed().as_secs_f64();
            let bytes: usize = sink.take().iter().map(|(_, count)| count).sum();
            let processor = (spent(daemon.pid())?.iter().sum::<f64>() - used) / span;
            rates.push((bytes as f64 * 8.0 / 1e6 / span, processor));
        }
        progress(&format!(
            "two links of {RATE} Mbit/s: early {:.1} Mbit/s, late {:.1} Mbit/s with {:.2} of a core",
            rates[0].0, rates[1].0, rates[1].1
        ));
        ratios.push(rates[1].0 / most);
        raw.push(rates);
    }
    let column = |of: fn(&[(f64, f64)]) -> f64| median(&raw.iter().map(|rates| of(rates)).collect::<Vec<_>>());
    report.table(
        format!("Four uploads over two links of {RATE} Mbit/s, {rounds} times; {most:.1} Mbit/s would fill them:"),
        "Mbit/s early | late, 2 below | share of both links, late | processor time of the daemon: early | late",
        vec![vec![
            format!("{:.1}", column(|rates| rates[0].0)),
            format!("{:.1}", column(|rates| rates[1].0)),
            format!("{:.3}", median(&ratios)),
            format!("{:.3} of a core", column(|rates| rates[0].1)),
            format!("{:.3} of a core", column(|rates| rates[1].1)),
        ]],
    );
    report.aim("late binding carries at least 0.97 of the links' sum", format!("{:.3}", median(&ratios)), median(&ratios) >= 0.97);
    Ok(json!(raw))
}
