//! Overhead of Braid on a single link without limits, where it brings no gain.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aya::sys::{Stats, enable_stats};
use serde_json::{Value, json};

use super::decision::programs;
use super::report::Report;
use super::stats::{Mean, Pairs, median};
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::namespace::Namespace;
use crate::spec::LinkSpec;

/// Pause after a start or stop of the daemon.
const SETTLE: Duration = Duration::from_millis(1500);
/// How long each kind of traffic runs in each part of a round.
pub(super) const SPAN: Duration = Duration::from_secs(1);
/// Parallel TCP streams of the bulk transfers.
const STREAMS: usize = 10;
/// Connections that exchange small messages, and the size of a message.
const CONNECTIONS: usize = 64;
const MESSAGE: usize = 64;
/// Datagrams of one burst, whose last one is answered, and their size.
const BURST: usize = 32;
const DATAGRAM: usize = 1400;
/// Interval between the datagrams of the unconnected socket during a bulk transfer.
const PULSE: Duration = Duration::from_millis(100);
/// Maximum half width of a meaningful interval.
const TELLING: f64 = 0.03;

/// Kinds of traffic, with the unit of their rates.
const TRAFFIC: [(Traffic, &str); 6] = [
    (Traffic::Bulk, "bulk TCP, windows of 64 KiB, Gbit/s"),
    (Traffic::WideBulk, "bulk TCP, the kernel's windows, Gbit/s"),
    (Traffic::Messages, "64-byte requests and answers on 64 connections, thousand a second"),
    // Datagrams are counted from here on.
    (Traffic::Datagrams, "bulk UDP, thousand datagrams of 1400 bytes a second"),
    (Traffic::BulkBeside, "bulk TCP, windows of 64 KiB, beside an unconnected UDP socket that Braid steers, Gbit/s"),
    (Traffic::MessagesBeside, "64-byte requests and answers beside such a socket, thousand a second"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Traffic {
    /// The windows are so small that all data stays in the processor's caches: the rate repeats within a few per cent.
    Bulk,
    /// The programs that count datagrams are attached to the whole machine while any socket needs them.
    BulkBeside,
    MessagesBeside,
    /// The rate has two levels, more than a factor of two apart, and stays at one for seconds whether or not Braid runs.
    WideBulk,
    Datagrams,
    Messages,
}

/// The process that runs during the traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    Daemon,
    /// A process that holds as much memory as the daemon and wakes as often, and does nothing.
    Placebo,
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "overhead",
        "Overhead",
        "One lab: a client and a server joined by a veth pair without limits or emulator. Each round has two or three parts, in changing order: \
         with the daemon (only-one), without it, and (in every third round, for the kernel's windows) with a placebo, a process that holds 20 MB \
         and wakes four times a second. After each start and end the machine rests for 1.5 s; then each kind of traffic runs for 1 s. Ratios are \
         computed per round. The table shows geometric means with 95 % confidence intervals (Student's t, of the logarithms). An aim is met if the \
         interval reaches it and is no wider than 0.03 to each side. Braid's own CPU time is measured separately, with ten streams and the daemon \
         running. The kernel counts how long each BPF program runs (BPF_ENABLE_STATS, which itself costs some 20 ns a run), and schedstat counts \
         the time of the daemon's threads. Both are given as a share of the machine's CPU time.",
    );
    let rounds = rounds(settings, &TRAFFIC)?;
    let own = [own(settings, Traffic::WideBulk)?, own(settings, Traffic::BulkBeside)?];
    tell_rounds(&rounds, &mut report);
    tell_own("Braid's own CPU time while ten streams run:", &own[0], &mut report);
    tell_own("The same beside an unconnected UDP socket that Braid steers:", &own[1], &mut report);
    judge(&rounds, &own, &mut report);
    let raw: Vec<Value> =
        rounds.iter().map(|it| json!({ "traffic": it.what, "daemon": it.daemon.json(), "placebo": it.placebo.json() })).collect();
    report.raw = json!({ "rounds": raw, "own": own.each_ref().map(Own::json) });
    report.notes.push(
        "CPU time per gigabyte has no row: all traffic here is limited by the CPU only, so CPU time is the inverse of the rate.".to_owned(),
    );
    note_other_daemons(&mut report)?;
    Ok(report)
}

/// The rates of one kind of traffic: with the daemon and with the placebo, each compared with neither.
#[derive(Debug, Default)]
struct Rates {
    what: &'static str,
    daemon: Pairs,
    placebo: Pairs,
}

fn lab() -> Result<Lab> {
    Lab::builder().link(LinkSpec::direct("eth0")).start()
}

/// The row of bulk UDP alone: it takes a sixth of the time, so that it can be repeated.
pub(super) fn datagrams(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "overhead-udp",
        "Overhead of bulk UDP",
        "As `overhead`, with bulk UDP only. An aim is met if the interval reaches it and is no wider than 0.03 to each side.",
    );
    let traffic: Vec<_> = TRAFFIC.into_iter().filter(|(traffic, _)| *traffic == Traffic::Datagrams).collect();
    let rounds = rounds(settings, &traffic)?;
    tell_rounds(&rounds, &mut report);
    judge_rates(&rounds, &mut report);
    report.raw = json!({ "rounds": rounds.iter().map(|it| it.daemon.json()).collect::<Vec<_>>() });
    note_other_daemons(&mut report)?;
    Ok(report)
}

fn rounds(settings: &Settings, traffic: &[(Traffic, &'static str)]) -> Result<Vec<Rates>> {
    let lab = lab()?;
    let servers = Servers::start(&lab)?;
    let mut rates: Vec<Rates> = traffic.iter().map(|(_, what)| Rates { what, ..Rates::default() }).collect();
    let all = if settings.quick { 3 } else { 60 };
    for round in 0..all {
        let mut order = [Beside::Nothing, Beside::Daemon, Beside::Placebo];
        order.rotate_left(round % 3);
        if round / 3 % 2 == 1 {
            order.reverse();
        }
        let explained = round % 3 == 0 && traffic.iter().any(|(traffic, _)| *traffic == Traffic::WideBulk);
        for beside in order.into_iter().filter(|beside| explained || *beside != Beside::Placebo) {
            let _running = Running::start(beside, &lab, settings)?;
            for ((traffic, _), rates) in traffic.iter().zip(&mut rates) {
                // The placebo explains only the two levels of the rate with the kernel's windows.
                if beside == Beside::Placebo && *traffic != Traffic::WideBulk {
                    continue;
                }
                let rate = servers.measure(&lab, *traffic)?;
                match beside {
                    Beside::Nothing => {
                        rates.daemon.push(false, rate);
                        if explained {
                            rates.placebo.push(false, rate);
                        }
                    }
                    Beside::Daemon => rates.daemon.push(true, rate),
                    Beside::Placebo => rates.placebo.push(true, rate),
                }
            }
        }
        if round % 6 == 5 {
            let told: Vec<_> = rates.iter().map(|it| told(&it.daemon)).collect();
            progress(&format!("{} rounds: {}", round + 1, told.join(", ")));
        }
    }
    Ok(rates)
}

/// The process that runs during the traffic, until it is dropped.
struct Running {
    _daemon: Option<Daemon>,
    placebo: Option<Child>,
}

impl Running {
    fn start(beside: Beside, lab: &Lab, settings: &Settings) -> Result<Self> {
        let _daemon = match beside {
            Beside::Daemon => Some(Daemon::start(lab, &settings.braid, "only-one", "")?),
            _ => None,
        };
        let placebo = match beside {
            Beside::Placebo => Some(lab.client().command(std::env::current_exe()?)?.arg("placebo").stdin(Stdio::null()).spawn()?),
            _ => None,
        };
        thread::sleep(SETTLE);
        Ok(Self { _daemon, placebo })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(placebo) = &mut self.placebo {
            let _ = placebo.kill();
            let _ = placebo.wait();
        }
    }
}

/// Holds as much memory as the daemon and wakes as often, without further work: the command `braid-lab placebo`.
pub fn placebo() -> ! {
    let memory = vec![1u8; 20_000_000];
    loop {
        thread::sleep(Duration::from_millis(250));
        std::hint::black_box(&memory);
    }
}

/// Starts the daemon if requested, and waits until the machine is at rest.
pub(super) fn daemon(lab: &Lab, settings: &Settings, with: bool, settle: Duration) -> Result<Option<Daemon>> {
    let daemon = if with { Some(Daemon::start(lab, &settings.braid, "max-throughput", "")?) } else { None };
    thread::sleep(settle);
    Ok(daemon)
}

/// Notes which other daemons ran on the machine.
pub(super) fn note_other_daemons(report: &mut Report) -> Result<()> {
    let others = programs()?.values().filter(|program| program.name == "braid_connect4").count();
    if others > 0 {
        report
            .notes
            .push(format!("{others} other daemons ran on the machine in other namespaces; their programs met these connections too."));
    }
    Ok(())
}

fn tell_rounds(rounds: &[Rates], report: &mut Report) {
    let figure = |values: &[f64]| format!("{:.3}", Mean::of(values).mean);
    let row = |it: &Rates| {
        let rates = [figure(&it.daemon.without), figure(&it.daemon.with)];
        let placebo = if it.placebo.with.is_empty() { "-".to_owned() } else { told(&it.placebo) };
        let ratios = [told(&it.daemon), format!("{:.3}", median(&it.daemon.ratios())), placebo];
        [it.what.to_owned()].into_iter().chain(rates).chain(ratios).collect()
    };
    let caption = format!("{} rounds:", rounds.first().map_or(0, |it| it.daemon.with.len()));
    let head = "traffic | without | with Braid | ratio (95 % interval) | median ratio | placebo (95 % interval)";
    report.table(caption, head, rounds.iter().map(row).collect());
}

/// For example "0.991 (0.980 to 1.002)".
pub(super) fn told(pairs: &Pairs) -> String {
    let [middle, low, high] = pairs.geometric();
    format!("{middle:.3} ({low:.3} to {high:.3})")
}

/// Compares the rounds with the aims.
fn judge(rounds: &[Rates], own: &[Own], report: &mut Report) {
    judge_rates(rounds, report);
    let share = own.iter().map(Own::share).fold(0.0, f64::max);
    report.aim("Braid's own work is at most 0.02 of the CPU", format!("{share:.5}"), share <= 0.02);
}

fn judge_rates(rounds: &[Rates], report: &mut Report) {
    for it in rounds {
        let [_, low, high] = it.daemon.geometric();
        let telling = high - low <= 2.0 * TELLING;
        let measured = told(&it.daemon) + if telling { "" } else { ", too wide to tell" };
        report.aim(format!("{}: 0.98 of that without", it.what), measured, telling && high >= 0.98);
    }
}

/// CPU seconds while the ten streams ran, by their transfers: in Braid's programs, in its daemon, and of the whole machine.
#[derive(Debug, Default)]
struct Own {
    programs: f64,
    daemon: f64,
    all: f64,
}

impl Own {
    fn share(&self) -> f64 {
        (self.programs + self.daemon) / self.all
    }

    fn json(&self) -> Value {
        json!({ "programs_s": self.programs, "daemon_s": self.daemon, "machine_s": self.all })
    }
}

fn own(settings: &Settings, traffic: Traffic) -> Result<Own> {
    let lab = lab()?;
    let servers = Servers::start(&lab)?;
    let foreign = programs()?;
    let daemon = daemon(&lab, settings, true, SETTLE)?.context("the daemon was asked for")?;
    let _counting = enable_stats(Stats::RunTime).context("the kernel does not count BPF run times (BPF_ENABLE_STATS, Linux 5.8)")?;
    let in_programs = || -> Result<f64> {
        let ours = programs()?.into_iter().filter(|(id, _)| !foreign.contains_key(id));
        Ok(ours.map(|(_, program)| program.time.as_secs_f64()).sum())
    };
    let before = (in_programs()?, thread_time(daemon.pid())?, cpu()?);
    for _ in 0..if settings.quick { 4 } else { 20 } {
        servers.measure(&lab, traffic)?;
    }
    Ok(Own { programs: in_programs()? - before.0, daemon: thread_time(daemon.pid())? - before.1, all: cpu()?.since(&before.2).all })
}

/// Seconds that a process's threads have run (proc_pid_schedstat: nanoseconds on a CPU come first).
pub(super) fn thread_time(pid: u32) -> Result<f64> {
    let mut nanoseconds = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).context("the daemon is gone")? {
        let Ok(text) = std::fs::read_to_string(thread?.path().join("schedstat")) else { continue };
        nanoseconds += text.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(nanoseconds as f64 / 1e9)
}

fn tell_own(caption: &str, own: &Own, report: &mut Report) {
    let row = |what: &str, time: f64| vec![what.to_owned(), format!("{time:.4} s"), format!("{:.3} %", 100.0 * time / own.all)];
    let rows = vec![row("Braid's programs in the kernel", own.programs), row("its daemon", own.daemon), row("the whole machine", own.all)];
    report.table(caption, "what | CPU | of all", rows);
}

pub(super) fn interval(mean: &Mean) -> String {
    format!("{:.3} ± {:.3}", mean.mean, mean.half_width)
}

/// The far ends of all kinds of traffic.
pub(super) struct Servers {
    iperf: Child,
    datagrams: SocketAddr,
}

impl Servers {
    pub(super) fn start(lab: &Lab) -> Result<Self> {
        let mut command = lab.server().command("iperf3")?;
        let child = command.args(["-s", "-p", "5201"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let iperf = child.context("cannot run iperf3: run lab/install-deps.sh")?;
        let servers = Self { iperf, datagrams: answer_bursts(lab, 5202)? };
        let begin = Instant::now();
        while lab.client().run(|| TcpStream::connect((Lab::internet(10), 5201)).is_err())? {
            ensure!(begin.elapsed() < Duration::from_secs(5), "iperf3 does not answer after 5 s");
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(100));
        Ok(servers)
    }

    /// The rate of this traffic over `SPAN`.
    fn measure(&self, lab: &Lab, traffic: Traffic) -> Result<f64> {
        match traffic {
            Traffic::Bulk => transfer(lab.client(), STREAMS, &["-w", "64K"]),
            Traffic::WideBulk => transfer(lab.client(), STREAMS, &[]),
            Traffic::BulkBeside => self.beside_pulses(lab, || transfer(lab.client(), STREAMS, &["-w", "64K"])),
            Traffic::MessagesBeside => self.beside_pulses(lab, || exchange(lab)),
            Traffic::Datagrams => Ok(lab.client().run(|| send_bursts(self.datagrams))??),
            Traffic::Messages => exchange(lab),
        }
    }
}

impl Servers {
    /// Measures while an unconnected socket sends periodically.
    fn beside_pulses(&self, lab: &Lab, measure: impl FnOnce() -> Result<f64>) -> Result<f64> {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let pulses = scope.spawn(|| lab.client().run(|| send_pulses(self.datagrams, &over))?.context("cannot send datagrams"));
            let rate = measure();
            over.store(true, Ordering::Relaxed);
            pulses.join().expect("the thread does not panic")?;
            rate
        })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        let _ = self.iperf.kill();
        let _ = self.iperf.wait();
    }
}

/// Runs this many streams from `client` to port 5201 of 203.0.113.10 and returns the received rate in Gbit/s.
pub(super) fn transfer(client: &Namespace, streams: usize, more: &[&str]) -> Result<f64> {
    let mut command: Command = client.command("iperf3")?;
    let (server, streams, span) = (Lab::internet(10).to_string(), streams.to_string(), SPAN.as_secs().to_string());
    command.args(["-c", &server, "-P", &streams, "-J", "-t", &span]).args(more);
    let output = command.stdin(Stdio::null()).output().context("cannot run iperf3: run lab/install-deps.sh")?;
    let result: Value = serde_json::from_slice(&output.stdout).context("iperf3 printed no JSON")?;
    let rate = result["end"]["sum_received"]["bits_per_second"].as_f64();
    Ok(rate.with_context(|| format!("iperf3 failed: {}", result["error"]))? / 1e9)
}

/// The first byte of a burst's last datagram, which is answered.
const LAST: u8 = 1;

/// Takes datagrams at 203.0.113.10 and answers those that end a burst, for as long as the lab lives.
pub(super) fn answer_bursts(lab: &Lab, port: u16) -> Result<SocketAddr> {
    let to: SocketAddr = (Lab::internet(10), port).into();
    let socket = lab.server().run(|| UdpSocket::bind(to))??;
    thread::spawn(move || {
        let mut datagram = [0; DATAGRAM];
        while let Ok((_, from)) = socket.recv_from(&mut datagram) {
            if datagram[0] == LAST {
                let _ = socket.send_to(&[LAST], from);
            }
        }
    });
    Ok(to)
}

/// Sends small datagrams periodically on an unconnected socket, until `over`.
fn send_pulses(to: SocketAddr, over: &AtomicBool) -> io::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    while !over.load(Ordering::Relaxed) {
        socket.send_to(&[0], to)?;
        thread::sleep(PULSE);
    }
    Ok(())
}

/// Sends bursts by a connected socket, one after the other's answer; thousand datagrams a second.
pub(super) fn send_bursts(to: SocketAddr) -> io::Result<f64> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(Duration::from_millis(100)))?;
    let (begin, mut sent) = (Instant::now(), 0);
    while begin.elapsed() < SPAN {
        for number in 1..=BURST {
            socket.send(&[if number == BURST { LAST } else { 0 }; DATAGRAM])?;
        }
        match socket.recv(&mut [0; 1]) {
            Ok(_) => sent += BURST,
            // A datagram was dropped at a full queue: this burst does not count.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sent as f64 / begin.elapsed().as_secs_f64() / 1e3)
}

/// Messages on many connections that are opened for it, thousand exchanges a second.
fn exchange(lab: &Lab) -> Result<f64> {
    let listener = lab.server().run(|| TcpListener::bind((Lab::internet(10), 0)))??;
    let to = listener.local_addr()?;
    let server = thread::spawn(move || -> io::Result<()> {
        let mut streams = (0..CONNECTIONS).map(|_| listener.accept().map(|it| it.0)).collect::<io::Result<Vec<_>>>()?;
        streams.iter().try_for_each(|stream| stream.set_nodelay(true))?;
        let mut message = [0; MESSAGE];
        // Ends when the client has closed.
        loop {
            for stream in &mut streams {
                stream.read_exact(&mut message)?;
                stream.write_all(&message)?;
            }
        }
    });
    let rate = lab.client().run(|| -> io::Result<f64> {
        let mut streams = (0..CONNECTIONS).map(|_| TcpStream::connect(to)).collect::<io::Result<Vec<_>>>()?;
        streams.iter().try_for_each(|stream| stream.set_nodelay(true))?;
        let (begin, mut exchanged) = (Instant::now(), 0);
        while begin.elapsed() < SPAN {
            streams.iter_mut().try_for_each(|stream| stream.write_all(&[0; MESSAGE]))?;
            streams.iter_mut().try_for_each(|stream| stream.read_exact(&mut [0; MESSAGE]))?;
            exchanged += CONNECTIONS;
        }
        Ok(exchanged as f64 / begin.elapsed().as_secs_f64() / 1e3)
    })??;
    let _ = server.join();
    Ok(rate)
}

/// CPU time of the whole machine, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cpu {
    pub(super) all: f64,
    pub(super) kernel: f64,
}

impl Cpu {
    pub(super) fn since(&self, before: &Self) -> Self {
        Self { all: self.all - before.all, kernel: self.kernel - before.kernel }
    }
}

pub(super) fn cpu() -> Result<Cpu> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_cpu(&stat).context("/proc/stat has no line of all CPUs")
}

/// The first line: user, nice, system, idle, iowait, irq, softirq, steal in hundredths of a second (proc_stat(5)). What is niced is none
/// of ours, and left out.
fn parse_cpu(stat: &str) -> Option<Cpu> {
    let fields: Vec<f64> = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().map_while(|field| field.parse().ok()).collect();
    let [user, _, system, _, _, irq, softirq, ..] = fields[..] else { return None };
    let kernel = (system + irq + softirq) / 100.0;
    Some(Cpu { all: user / 100.0 + kernel, kernel })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_excludes_idle_and_niced_time() {
        let stat = "cpu  100 20 300 4000 50 6 94 9 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n";
        assert_eq!(parse_cpu(stat), Some(Cpu { all: 5.0, kernel: 4.0 }));
        assert_eq!(parse_cpu("cpu 1 2"), None);
        assert_eq!(parse_cpu(""), None);
        let (before, after) = (Cpu { all: 1.0, kernel: 0.5 }, Cpu { all: 3.0, kernel: 2.0 });
        assert_eq!(after.since(&before), Cpu { all: 2.0, kernel: 1.5 });
    }

    #[test]
    fn threads_have_run() {
        let begin = Instant::now();
        while thread_time(std::process::id()).unwrap() < 0.01 {
            assert!(begin.elapsed() < Duration::from_secs(10), "this thread has run for 10 s, and it does not show");
        }
        assert!(thread_time(u32::MAX).is_err());
    }

    #[test]
    fn excessive_costs_are_reported() {
        let pairs = |without: f64, with: f64| Pairs { without: vec![without; 3], with: vec![with; 3] };
        let told = |with: f64, own: [Own; 1]| {
            let mut report = Report::new("overhead", "", "");
            judge(&[Rates { what: "bulk", daemon: pairs(40.0, with), placebo: pairs(40.0, 40.0) }], &own, &mut report);
            report.aims
        };
        let cheap = told(39.3, [Own { programs: 0.005, daemon: 0.001, all: 1.0 }]);
        assert!(cheap.len() == 2 && cheap.iter().all(|aim| aim.met), "{cheap:?}");
        let dear = told(39.1, [Own { programs: 0.02, daemon: 0.01, all: 1.0 }]);
        assert!(dear.iter().all(|aim| !aim.met), "{dear:?}");
    }
}
