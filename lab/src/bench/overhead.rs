//! What Braid costs where there is nothing to gain: links without limits.

use std::process::{Child, Command, Stdio};
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
use crate::spec::LinkSpec;

/// How long the machine is left alone after the daemon has started or stopped: what its start allocates and frees, the kernel and the
/// hypervisor below it sort out in the seconds after.
const SETTLE: Duration = Duration::from_secs(4);
/// How long the streams run in each half of a pair, in seconds.
const SPAN: u32 = 1;

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "overhead",
        "Overhead",
        "Two laboratories side by side, in each a client and a server joined by a veth pair without limits or emulator; the daemon runs \
         (max-throughput) in one of them, in the other after every twelve pairs. A pair: 10 parallel iperf3 streams for 1 s in the one, then in \
         the other, in changing order, so that a machine that is slower at times is slower for both. CPU: /proc/stat of the whole machine over \
         the transfer, by gigabyte received; the kernel's share is system, irq and softirq. Ratios are taken pair by pair, with 95 % confidence \
         intervals of their means. What Braid does on the machine whether or not the streams are its clients' is the same for both, and is \
         measured apart: ten streams with the daemon up and the kernel counting how long each of its programs runs (BPF_ENABLE_STATS, which \
         itself costs some 20 ns a run), and the time its threads ran (schedstat), of all the CPU that the machine used meanwhile. The aims are \
         held to both together.",
    );
    let streams = streams(settings)?;
    let own = own(settings)?;
    tell_streams(&streams, &mut report);
    tell_own(&own, &mut report);
    judge(&streams, &own, &mut report);
    report.raw = json!({ "streams": streams.json(), "own": own.json() });
    note_other_daemons(&mut report)?;
    Ok(report)
}

/// Goodput in Gbit/s, and CPU seconds by gigabyte.
#[derive(Debug, Default)]
struct Streams {
    goodput: Pairs,
    cpu: Pairs,
    kernel: Pairs,
}

impl Streams {
    fn json(&self) -> Value {
        json!({ "goodput_gbps": self.goodput.json(), "cpu_s_per_gb": self.cpu.json(), "kernel_s_per_gb": self.kernel.json() })
    }
}

fn lab() -> Result<Lab> {
    Lab::builder().link(LinkSpec::direct("eth0")).start()
}

fn streams(settings: &Settings) -> Result<Streams> {
    let labs = [lab()?, lab()?];
    let _servers = [Server::start(&labs[0])?, Server::start(&labs[1])?];
    let (rounds, pairs) = if settings.quick { (2, 3) } else { (10, 12) };
    let mut streams = Streams::default();
    for round in 0..rounds {
        let (ours, theirs) = (&labs[round % 2], &labs[(round + 1) % 2]);
        let _daemon = daemon(ours, settings, true, settle(settings))?;
        for pair in 0..pairs {
            for with in [pair % 2 == 0, pair % 2 != 0] {
                let before = cpu()?;
                let (rate, gigabytes) = transfer(if with { ours } else { theirs }, SPAN)?;
                let used = cpu()?.since(&before);
                streams.goodput.push(with, rate);
                streams.cpu.push(with, used.all / gigabytes);
                streams.kernel.push(with, used.kernel / gigabytes);
            }
        }
        let (goodput, cpu) = (interval(&streams.goodput.ratio()), interval(&streams.cpu.ratio()));
        progress(&format!("{} pairs: goodput {goodput}, CPU {cpu}", (round + 1) * pairs));
    }
    Ok(streams)
}

fn settle(settings: &Settings) -> Duration {
    if settings.quick { SETTLE / 8 } else { SETTLE }
}

/// The daemon if asked for, and the machine at rest.
pub(super) fn daemon(lab: &Lab, settings: &Settings, with: bool, settle: Duration) -> Result<Option<Daemon>> {
    let daemon = if with { Some(Daemon::start(lab, &settings.braid, "max-throughput", "")?) } else { None };
    thread::sleep(settle);
    Ok(daemon)
}

/// Says which daemons were not part of the measurement.
pub(super) fn note_other_daemons(report: &mut Report) -> Result<()> {
    let others = programs()?.values().filter(|program| program.name == "braid_connect4").count();
    if others > 0 {
        report
            .notes
            .push(format!("{others} other daemons ran on the machine in other namespaces; their programs met these connections too."));
    }
    Ok(())
}

fn tell_streams(streams: &Streams, report: &mut Report) {
    let row = |what: &str, pairs: &Pairs| {
        let (low, high) = pairs.ratio().interval();
        let figure = |values: &[f64]| format!("{:.3}", Mean::of(values).mean);
        let interval = format!("{:.3} ({low:.3} to {high:.3})", pairs.ratio().mean);
        vec![what.to_owned(), figure(&pairs.without), figure(&pairs.with), interval, format!("{:.3}", median(&pairs.ratios()))]
    };
    let rows = vec![
        row("goodput, Gbit/s", &streams.goodput),
        row("CPU seconds a gigabyte", &streams.cpu),
        row("of these in the kernel", &streams.kernel),
    ];
    let caption = format!("{} pairs:", streams.goodput.with.len());
    report.table(caption, "what | without | with | ratio (95 % interval) | median ratio", rows);
}

/// Holds the aims to the pairs and to what both sides of them bear.
fn judge(streams: &Streams, own: &Own, report: &mut Report) {
    let share = own.share();
    let goodput = streams.goodput.ratio().times(1.0 - share);
    report.aim("goodput of 10 streams at least 0.98 of that without", interval(&goodput), goodput.mean >= 0.98);
    let cpu = streams.cpu.ratio().times(1.0 + share);
    report.aim("CPU a gigabyte at most 1.03 of that without", interval(&cpu), cpu.mean <= 1.03);
    report.aim("Braid's own work is at most 0.02 of the CPU", format!("{share:.5}"), share <= 0.02);
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

fn own(settings: &Settings) -> Result<Own> {
    let lab = lab()?;
    let _server = Server::start(&lab)?;
    let foreign = programs()?;
    let daemon = daemon(&lab, settings, true, settle(settings))?.context("the daemon was asked for")?;
    let _counting = enable_stats(Stats::RunTime).context("the kernel does not count BPF run times (BPF_ENABLE_STATS, Linux 5.8)")?;
    let in_programs = || -> Result<f64> {
        let ours = programs()?.into_iter().filter(|(id, _)| !foreign.contains_key(id));
        Ok(ours.map(|(_, program)| program.time.as_secs_f64()).sum())
    };
    let before = (in_programs()?, thread_time(daemon.pid())?, cpu()?);
    for _ in 0..if settings.quick { 2 } else { 10 } {
        transfer(&lab, 2)?;
    }
    Ok(Own { programs: in_programs()? - before.0, daemon: thread_time(daemon.pid())? - before.1, all: cpu()?.since(&before.2).all })
}

/// Seconds that a process's threads have run (proc_pid_schedstat: nanoseconds on a CPU come first).
fn thread_time(pid: u32) -> Result<f64> {
    let mut nanoseconds = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).context("the daemon is gone")? {
        let Ok(text) = std::fs::read_to_string(thread?.path().join("schedstat")) else { continue };
        nanoseconds += text.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(nanoseconds as f64 / 1e9)
}

fn tell_own(own: &Own, report: &mut Report) {
    let row = |what: &str, time: f64| vec![what.to_owned(), format!("{time:.4} s"), format!("{:.3} %", 100.0 * time / own.all)];
    let rows = vec![row("Braid's programs in the kernel", own.programs), row("its daemon", own.daemon), row("the whole machine", own.all)];
    report.table("Braid's own CPU time while ten streams run:", "what | CPU | of all", rows);
}

pub(super) fn interval(mean: &Mean) -> String {
    format!("{:.3} ± {:.3}", mean.mean, mean.half_width)
}

/// An iperf3 server, for as long as this value lives.
struct Server(Child);

impl Server {
    fn start(lab: &Lab) -> Result<Self> {
        let mut command = lab.server().command("iperf3")?;
        let child = command.args(["-s", "-p", "5201"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let server = Self(child.context("cannot run iperf3: run lab/install-deps.sh")?);
        let begin = Instant::now();
        while lab.client().run(|| std::net::TcpStream::connect((Lab::internet(10), 5201)).is_err())? {
            ensure!(begin.elapsed() < Duration::from_secs(5), "iperf3 does not answer after 5 s");
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(100));
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ten streams for so many seconds; gives what was received, as a rate in Gbit/s and in gigabytes.
fn transfer(lab: &Lab, seconds: u32) -> Result<(f64, f64)> {
    let mut command: Command = lab.client().command("iperf3")?;
    command.args(["-c", &Lab::internet(10).to_string(), "-P", "10", "-J", "-t", &seconds.to_string()]);
    let output = command.stdin(Stdio::null()).output().context("cannot run iperf3: run lab/install-deps.sh")?;
    let result: Value = serde_json::from_slice(&output.stdout).context("iperf3 gives no JSON")?;
    let received = &result["end"]["sum_received"];
    let figure = |name| received[name].as_f64().with_context(|| format!("iperf3 failed: {}", result["error"]));
    Ok((figure("bits_per_second")? / 1e9, figure("bytes")? / 1e9))
}

/// CPU time the whole machine used, in seconds.
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
    fn cpu_time_counts_neither_idling_nor_what_is_niced() {
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
    fn what_costs_too_much_is_told() {
        let pairs = |without: f64, with: f64| Pairs { without: vec![without; 3], with: vec![with; 3] };
        let streams = Streams { goodput: pairs(40.0, 39.6), cpu: pairs(0.5, 0.505), kernel: pairs(0.5, 0.505) };
        let told = |own: Own| {
            let mut report = Report::new("overhead", "", "");
            judge(&streams, &own, &mut report);
            report.aims
        };
        let cheap = told(Own { programs: 0.005, daemon: 0.001, all: 1.0 });
        assert!(cheap.len() == 3 && cheap.iter().all(|aim| aim.met), "{cheap:?}");
        assert_eq!(cheap[0].measured, "0.984 ± 0.000");
        let dear = told(Own { programs: 0.02, daemon: 0.01, all: 1.0 });
        assert!(dear.iter().all(|aim| !aim.met), "{dear:?}");
    }
}
