//! The gateway: a device of a LAN behind the client, beside forwarding by the kernel's own means.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::{ByteCount, Rate};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};

use super::footprint::resident;
use super::overhead::{answer_bursts, note_other_daemons, send_bursts, told, transfer};
use super::report::Report;
use super::stats::{Mean, Pairs, median};
use super::whole::{WARM_UP, copy_of_curl};
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::forwarding::{Forwarding, Way, nft};
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;
use crate::workload;

/// Pause after a start or stop of the forwarding.
pub(super) const SETTLE: Duration = Duration::from_millis(1500);
/// How long new connections are counted.
const SPAN: Duration = Duration::from_secs(1);
/// Timeout until devices are forwarded.
pub(super) const LIMIT: Duration = Duration::from_secs(30);
/// Maximum half width of a meaningful interval.
pub(super) const TELLING: f64 = 0.05;
/// Exchanges of one measurement of the latency.
const EXCHANGES: usize = 4000;
/// Threads that open connections.
const OPENERS: u8 = 4;
/// Flows of the measurement of memory, by addresses of the device, its ports for each, and ports of the server.
const FLOWS: (u8, u16, u16) = (10, 10, 1000);
/// Rates of the links of the five downloads, in Mbit/s.
pub(super) const RATES: [u64; 2] = [20, 10];
/// Number and duration of the downloads.
pub(super) const DOWNLOADS: (usize, Duration) = (5, Duration::from_secs(20));
/// The payload's share of a link's rate, without headers and acknowledgements.
pub(super) const PAYLOAD: f64 = 0.965;
/// The gateway's configuration.
const CONFIG: &str = "[gateway]\nlan = [\"lan0\"]\n";

/// How the client forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Plain,
    Hand,
    Braid,
}

const ALL: [By; 3] = [By::Plain, By::Hand, By::Braid];

/// What is measured on the fast links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    One,
    Many,
    Datagrams,
    Echo,
    Connects,
}

const KINDS: [(Kind, &str); 5] = [
    (Kind::One, "one TCP flow, Gbit/s"),
    (Kind::Many, "64 TCP flows, Gbit/s"),
    (Kind::Datagrams, "UDP, thousand datagrams of 1400 bytes a second"),
    (Kind::Echo, "round trip of a small datagram, median, microseconds"),
    (Kind::Connects, "new TCP connections, thousand a second"),
];

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "gateway",
        "Gateway",
        "A device behind the client, whose packets the client forwards to the server. Compared are: plain forwarding by the kernel with one masquerade; \
         mwan3's rules written by hand (nftables: new connections take turns on the links, connection marks, a routing rule and a table for each link, \
         masquerade); and Braid with `[gateway] lan = [\"lan0\"]` and no other rule. Speed: veth pairs without emulator, two links. Each round has three \
         parts, in changing order, one for each way to forward; after each change the machine rests for 1.5 s. One and 64 TCP flows by iperf3 with windows \
         of 64 KiB, and UDP in bursts of 32, each for 1 s; 4,000 round trips of a datagram of 64 bytes, one after the other; new connections by four threads, \
         one after the other, each opened and reset. Ratios to plain forwarding are computed per round. The table shows geometric means with 95 % \
         confidence intervals (Student's t, of the logarithms); an aim is met if the interval reaches it and is no wider than 0.05 to each side. Added latency: the difference of the medians, per round. Sum of links: five downloads from one device for 20 s over \
         emulated links of 20 and 10 Mbit/s with 10 ms each way; the goodput divided by the sum of the links, without headers (0.965). Before, three bulk \
         downloads per link for 8 s let Braid learn the capacities. Memory: 100,000 UDP flows, by ten addresses of the device, each with ten ports, to 1,000 ports.",
    );
    speed(settings, &mut report)?;
    settings.keep(&report)?;
    memory(settings, &mut report)?;
    settings.keep(&report)?;
    sum(settings, &mut report)?;
    note_other_daemons(&mut report)?;
    Ok(report)
}

/// What forwards, until it is dropped.
enum Running<'a> {
    Kernel { _forwarding: Forwarding<'a> },
    Braid { _daemon: Daemon },
}

impl<'a> Running<'a> {
    /// Starts it, with these weights of the links where they are written by hand, and waits until the device's datagrams to `echo` are answered.
    fn start(by: By, lab: &'a Lab, weights: &[u32], settings: &Settings, echo: SocketAddr) -> Result<Self> {
        let this = match by {
            By::Plain => Self::Kernel { _forwarding: Forwarding::start(lab, Way::Plain)? },
            By::Hand => Self::Kernel { _forwarding: Forwarding::start(lab, Way::Balanced(weights))? },
            By::Braid => return Ok(Self::Braid { _daemon: braid(lab, settings, echo)? }),
        };
        await_answers(lab, echo)?;
        Ok(this)
    }
}

/// Starts the daemon, and waits until it forwards.
fn braid(lab: &Lab, settings: &Settings, echo: SocketAddr) -> Result<Daemon> {
    let daemon = Daemon::start(lab, &settings.braid, "max-throughput", CONFIG)?;
    await_answers(lab, echo)?;
    Ok(daemon)
}

/// Waits until the device's datagrams are answered, and the machine is at rest.
fn await_answers(lab: &Lab, echo: SocketAddr) -> Result<()> {
    let begin = Instant::now();
    while !lab.device(0).run(|| round_trip(echo))?.is_ok_and(|took| took < Duration::from_secs(1)) {
        ensure!(begin.elapsed() < LIMIT, "the device is not forwarded after {LIMIT:?}");
        thread::sleep(Duration::from_millis(20));
    }
    thread::sleep(SETTLE);
    Ok(())
}

/// Results of one kind, beside plain forwarding.
#[derive(Debug, Default)]
struct Results {
    hand: Pairs,
    braid: Pairs,
}

impl Results {
    fn push(&mut self, by: By, value: f64) {
        match by {
            By::Plain => {
                self.hand.push(false, value);
                self.braid.push(false, value);
            }
            By::Hand => self.hand.push(true, value),
            By::Braid => self.braid.push(true, value),
        }
    }

    fn json(&self, what: &str) -> Value {
        json!({ "what": what, "hand": self.hand.json(), "braid": self.braid.json() })
    }
}

fn speed(settings: &Settings, report: &mut Report) -> Result<()> {
    let lab = Lab::builder().link(LinkSpec::direct("wlan0")).link(LinkSpec::direct("lte0")).lan_cable().start()?;
    forget_soon(&lab)?;
    let servers = Servers::start(&lab)?;
    let mut results: Vec<_> = KINDS.iter().map(|_| Results::default()).collect();
    for round in 0..if settings.quick { 3 } else { 30 } {
        let mut order = ALL;
        order.rotate_left(round % 3);
        if round / 3 % 2 == 1 {
            order.reverse();
        }
        for by in order {
            let _running = Running::start(by, &lab, &[1, 1], settings, servers.bursts)?;
            for ((kind, what), results) in KINDS.iter().zip(&mut results) {
                let value = servers.measure(&lab, *kind).with_context(|| format!("{by:?}: {what}"))?;
                results.push(by, value);
            }
        }
        if round % 3 == 2 {
            let said: Vec<_> = results.iter().map(|it| told(&it.braid)).collect();
            progress(&format!("{} rounds: {}", round + 1, said.join(", ")));
        }
    }
    tell_speed(&results, report);
    judge_speed(&results, report);
    let raw = KINDS.iter().zip(&results).map(|((_, what), it)| it.json(what)).collect::<Vec<_>>();
    report.measured(json!({ "speed": raw }));
    Ok(())
}

/// Ended connections leave the table of connections at once: it must not fill while new ones are counted.
fn forget_soon(lab: &Lab) -> Result<()> {
    for state in ["close", "time_wait"] {
        lab.client().sysctl(&format!("netfilter/nf_conntrack_tcp_timeout_{state}"), "1")?;
    }
    Ok(())
}

fn tell_speed(results: &[Results], report: &mut Report) {
    let figure = |values: &[f64]| format!("{:.2}", Mean::of(values).mean);
    let row = |((_, what), it): (&(Kind, &str), &Results)| {
        let rates = [figure(&it.braid.without), figure(&it.hand.with), figure(&it.braid.with)];
        [(*what).to_owned()].into_iter().chain(rates).chain([told(&it.hand), told(&it.braid)]).collect()
    };
    let rounds = results.first().map_or(0, |it| it.braid.with.len());
    let head = "traffic | plain | by hand | Braid | by hand : plain (95 % interval) | Braid : plain (95 % interval)";
    report.table(format!("{rounds} rounds:"), head, KINDS.iter().zip(results).map(row).collect());
}

/// Compares Braid with the aims.
fn judge_speed(results: &[Results], report: &mut Report) {
    for ((kind, what), Results { braid, .. }) in KINDS.iter().zip(results) {
        if *kind == Kind::Echo {
            let more = braid.more();
            let measured = format!("{:.1} ± {:.1} microseconds", more.mean, more.half_width);
            report.aim("a round trip takes less than 20 microseconds longer than by plain forwarding", measured, more.mean < 20.0);
            continue;
        }
        let aim = if *kind == Kind::Connects { 0.8 } else { 0.95 };
        let [_, low, high] = braid.geometric();
        let telling = high - low <= 2.0 * TELLING;
        let measured = told(braid) + if telling { "" } else { ", too wide to tell" };
        report.aim(format!("{what}: {aim} of plain forwarding"), measured, telling && high >= aim);
    }
}

/// The far ends of the traffic on the fast links.
struct Servers {
    iperf: Child,
    bursts: SocketAddr,
    /// One listener for each opener, so that their ports suffice.
    listeners: Vec<SocketAddr>,
}

impl Servers {
    fn start(lab: &Lab) -> Result<Self> {
        let mut command = lab.server().command("iperf3")?;
        let child = command.args(["-s", "-p", "5201"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut servers = Self {
            iperf: child.context("cannot run iperf3: run lab/install-deps.sh")?,
            bursts: answer_bursts(lab, 5202)?,
            listeners: Vec::new(),
        };
        for number in 0..OPENERS {
            let to = SocketAddr::from((Lab::internet(11 + number), 5203));
            let listener = lab.server().run(|| listen(to))??;
            thread::spawn(move || {
                while let Ok((stream, _)) = listener.accept() {
                    serve(stream)
                }
            });
            servers.listeners.push(to);
        }
        let begin = Instant::now();
        while lab.server().run(|| TcpStream::connect((Lab::internet(10), 5201)).is_err())? {
            ensure!(begin.elapsed() < LIMIT, "iperf3 does not answer after {LIMIT:?}");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(servers)
    }

    fn measure(&self, lab: &Lab, kind: Kind) -> Result<f64> {
        let device = lab.device(0);
        match kind {
            Kind::One => transfer(device, 1, &["-w", "64K"]),
            Kind::Many => transfer(device, 64, &["-w", "64K"]),
            Kind::Datagrams => Ok(device.run(|| send_bursts(self.bursts))??),
            Kind::Echo => Ok(device.run(|| echo(self.bursts))??),
            Kind::Connects => {
                let counts = thread::scope(|scope| {
                    let openers: Vec<_> =
                        self.listeners.iter().map(|to| scope.spawn(|| device.run(|| open_many(*to))?.context("cannot connect"))).collect();
                    openers.into_iter().map(|opener| opener.join().expect("the thread does not panic")).collect::<Result<Vec<_>>>()
                })?;
                Ok(counts.iter().sum::<f64>() / 1e3)
            }
        }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        let _ = self.iperf.kill();
        let _ = self.iperf.wait();
    }
}

fn listen(to: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&to.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

/// Waits for the client to reset the connection.
fn serve(mut stream: TcpStream) {
    let _ = stream.read(&mut [0]);
}

/// Opens connections and resets each at once; connections a second.
fn open_many(to: SocketAddr) -> io::Result<f64> {
    let (begin, mut count) = (Instant::now(), 0);
    while begin.elapsed() < SPAN {
        let stream = TcpStream::connect_timeout(&to, Duration::from_secs(5))?;
        Socket::from(stream).set_linger(Some(Duration::ZERO))?;
        count += 1;
    }
    Ok(f64::from(count) / begin.elapsed().as_secs_f64())
}

/// Median round trip of small datagrams on one socket, in microseconds.
fn echo(to: SocketAddr) -> io::Result<f64> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut times = Vec::with_capacity(EXCHANGES);
    for _ in 0..EXCHANGES {
        let begin = Instant::now();
        // A first byte of 1 asks for an answer.
        socket.send(&[1; 64])?;
        socket.recv(&mut [0; 64])?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&times))
}

/// One exchange from a new socket.
fn round_trip(to: SocketAddr) -> io::Result<Duration> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let begin = Instant::now();
    socket.send(&[1; 64])?;
    socket.recv(&mut [0; 64])?;
    Ok(begin.elapsed())
}

/// Memory of the daemon and of its maps in the kernel, without flows and with a hundred thousand.
fn memory(settings: &Settings, report: &mut Report) -> Result<()> {
    let lab = Lab::builder().link(LinkSpec::direct("wlan0")).link(LinkSpec::direct("lte0")).lan_cable().start()?;
    let echo = answer_bursts(&lab, 5202)?;
    // Nobody answers, not even that nobody listens.
    let first = 20_000;
    nft(
        lab.server(),
        &format!(
            "table inet sink {{\nchain arriving {{\ntype filter hook input priority filter\nudp dport {first}-{} drop\n}}\n}}\n",
            first + FLOWS.2 - 1
        ),
    )?;
    let wanted = usize::from(FLOWS.0) * usize::from(FLOWS.1) * usize::from(FLOWS.2);
    let daemon = braid(&lab, settings, echo)?;
    let before = (resident(daemon.pid())?.0, maps(daemon.pid())?);
    let begin = Instant::now();
    let added: String = (0..FLOWS.0).map(|number| format!("address add {}/24 dev eth0\n", more(number))).collect();
    lab.device(0).ip(&added)?;
    lab.device(0).run(|| begin_flows(first))??;
    let tracked: usize = lab.client().run(|| std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count"))??.trim().parse()?;
    ensure!(tracked >= wanted * 9 / 10, "the kernel tracks {tracked} flows, not {wanted}");
    // Several polls of the daemon; unanswered flows are kept for 30 s.
    thread::sleep(Duration::from_secs(10));
    let after = (resident(daemon.pid())?, maps(daemon.pid())?);
    progress(&format!("{tracked} flows after {:.1} s: {:.1} MB", begin.elapsed().as_secs_f64(), after.0.0));
    let megabytes = |value: f64| format!("{value:.1} MB");
    report.table(
        format!("Memory in megabytes (10^6), {tracked} flows in the kernel's table:"),
        "what | without flows | with them",
        vec![
            vec!["the daemon, resident".to_owned(), megabytes(before.0), megabytes(after.0.0)],
            vec!["the same, most ever".to_owned(), String::new(), megabytes(after.0.1)],
            vec!["its maps in the kernel".to_owned(), megabytes(before.1), megabytes(after.1)],
        ],
    );
    report.measured(json!({ "memory": { "flows": tracked, "before": before, "after": after } }));
    Ok(())
}

/// Another address of the device.
fn more(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 7, 101 + number)
}

/// Sends one datagram from each port of the device's other addresses to each port of the server.
fn begin_flows(first: u16) -> io::Result<()> {
    for number in 0..FLOWS.0 {
        // All at once, so that their ports differ.
        let sockets = (0..FLOWS.1).map(|_| UdpSocket::bind((more(number), 0))).collect::<io::Result<Vec<_>>>()?;
        for socket in &sockets {
            for port in first..first + FLOWS.2 {
                socket.send_to(&[0; 16], (Lab::internet(12), port))?;
            }
        }
    }
    Ok(())
}

/// Memory of the BPF maps that a process holds, in megabytes (10^6), as the kernel charges it.
fn maps(pid: u32) -> Result<f64> {
    let mut maps = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo")).context("the daemon is gone")? {
        let Ok(text) = std::fs::read_to_string(entry?.path()) else { continue };
        if let Some((id, bytes)) = map(&text) {
            maps.insert(id, bytes);
        }
    }
    Ok(maps.values().sum::<u64>() as f64 / 1e6)
}

/// Id and memory of a map, from its descriptor's description.
fn map(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Some((field("map_id:")?, field("memlock:")?))
}

/// Five downloads over two links against the sum of the links.
fn sum(settings: &Settings, report: &mut Report) -> Result<()> {
    let links = ["wlan0", "lte0"].iter().zip(RATES).map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(10)));
    let lab = links.fold(Lab::builder(), |builder, link| builder.link(link)).lan(1).start()?;
    let web = Web::start(&lab)?;
    let echo = answer_bursts(&lab, 5202)?;
    let all = Rate::from_mbps(RATES.iter().sum());
    learn(settings, &lab, &web, echo)?;
    let mut shares: [Vec<f64>; 3] = Default::default();
    let mut splits: [Vec<String>; 3] = Default::default();
    for round in 0..if settings.quick { 1 } else { 5 } {
        let mut order = [0, 1, 2];
        order.rotate_left(round % 3);
        for number in order {
            let running = Running::start(ALL[number], &lab, &[2, 1], settings, echo)?;
            let (count, span) = if settings.quick { (DOWNLOADS.0, DOWNLOADS.1 / 3) } else { DOWNLOADS };
            let before = delivered(&lab)?;
            let downloads = workload::together(count, ByteCount::new(1_000_000_000));
            let records = workload::run_until(&web, &downloads, span, |curl| lab.device(0).command(curl))?;
            let after = delivered(&lab)?;
            drop(running);
            let share = workload::summarise(&records).goodput.bps() as f64 / (all.bps() as f64 * PAYLOAD);
            let split: Vec<_> = before.iter().zip(&after).map(|(before, after)| format!("{:.0}", (after - before) as f64 / 1e6)).collect();
            progress(&format!("five downloads, {:?}: {share:.3} of the sum, {} MB", ALL[number], split.join(" + ")));
            shares[number].push(share);
            splits[number].push(split.join(" + "));
        }
    }
    let missed: u64 = (0..RATES.len()).map(|link| lab.counters(link).map(|c| c.missed)).sum::<Result<u64>>()?;
    ensure!(missed == 0, "the lab was too slow and lost {missed} frames: the machine is too busy to measure");
    let names = ["plain forwarding", "by hand, weights 2 and 1", "Braid, max-throughput"];
    let row = |number: usize| {
        let mean = Mean::of(&shares[number]);
        vec![names[number].to_owned(), format!("{:.3} ± {:.3}", mean.mean, mean.half_width), splits[number].join("; ")]
    };
    report.table("Five downloads over 20 and 10 Mbit/s:", "by | of the sum | megabytes over the links", (0..3).map(row).collect());
    let mean = Mean::of(&shares[2]);
    report.aim("five downloads: 0.95 of the sum of the links", format!("{:.3} ± {:.3}", mean.mean, mean.half_width), mean.mean >= 0.95);
    report.measured(json!({ "sum": { "plain": shares[0], "hand": shares[1], "braid": shares[2] } }));
    Ok(())
}

/// Makes the daemon learn the capacities from downloads of the device.
fn learn(settings: &Settings, lab: &Lab, web: &Web, echo: SocketAddr) -> Result<()> {
    let daemon = braid(lab, settings, echo)?;
    let curl = copy_of_curl(lab, "warm-up")?;
    let downloads = workload::together(WARM_UP.0 * RATES.len(), ByteCount::new(1_000_000_000));
    workload::run_until(web, &downloads, WARM_UP.1, |_| lab.device(0).command(&curl))?;
    let learnt = super::whole::capacities(lab, &daemon.status(lab)?);
    progress(&format!("learnt {}", super::whole::shown(&learnt)));
    Ok(())
}

/// Bytes that each link has delivered to the client.
fn delivered(lab: &Lab) -> Result<Vec<u64>> {
    (0..lab.links().len()).map(|link| lab.counters(link).map(|counters| counters.down.delivered_bytes.get())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_maps_is_read() {
        let text = "pos:\t0\nflags:\t02000002\nmap_type:\t1\nmemlock:\t4096\nmap_id:\t77\nfrozen:\t0\n";
        assert_eq!(map(text), Some((77, 4096)));
        assert_eq!(map("pos:\t0\nprog_id:\t3\nmemlock:\t4096\n"), None);
    }

    #[test]
    fn slow_gateways_are_reported() {
        let results = |ratio: f64, more: f64| -> Vec<Results> {
            let of = |kind: Kind| {
                let (without, with) = if kind == Kind::Echo { (30.0, 30.0 + more) } else { (10.0, 10.0 * ratio) };
                Results { hand: Pairs::default(), braid: Pairs { without: vec![without; 3], with: vec![with; 3] } }
            };
            KINDS.iter().map(|(kind, _)| of(*kind)).collect()
        };
        let met = |ratio, more| {
            let mut report = Report::new("gateway", "", "");
            judge_speed(&results(ratio, more), &mut report);
            report.aims.iter().map(|aim| aim.met).collect::<Vec<_>>()
        };
        assert_eq!(met(0.96, 5.0), [true; 5]);
        assert_eq!(met(0.85, 25.0), [false, false, false, false, true]);
        assert_eq!(met(0.7, 0.0), [false, false, false, true, false]);
    }
}
