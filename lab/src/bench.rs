//! Benchmarks of Braid's performance goals. One command repeats each.
//!
//! Absolute figures depend on the machine. The benchmarks therefore measure the compared variants in turns within one run, and report
//! ratios wherever possible.

mod adhoc;
mod api;
mod bond;
mod calls;
mod copies;
mod cut;
mod decision;
mod footprint;
mod gateway;
mod get;
mod handover;
mod mixes;
mod network;
mod overhead;
mod proxy;
mod report;
mod run_calls;
mod schedulers;
mod shares;
mod slicer;
mod sockets;
mod stats;
mod virtual_device;
mod whole;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};

pub use overhead::placebo;
pub use report::{Aim, Figure, Report, Table};

/// Settings of all benchmarks.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of the `braid` program.
    pub braid: PathBuf,
    /// Fewer and shorter repetitions: a check that everything works, not a measurement.
    pub quick: bool,
    /// Seed of all randomness.
    pub seed: u64,
    /// Directory for results, and for the finished parts of an aborted run.
    pub out: PathBuf,
}

impl Settings {
    /// Saves the results so far in `NAME.part.md` and `NAME.part.json`, in case the run is aborted.
    fn keep(&self, report: &Report) -> Result<()> {
        report.save_part(&self.out, &self.command(&report.name))
    }

    fn command(&self, name: &str) -> String {
        format!("braid-lab bench{} {name}", if self.quick { " --quick" } else { "" })
    }
}

/// Times connects for the benchmark `run-calls`, which starts this program under `braid run`.
pub fn time_connects(to: std::net::SocketAddr, count: usize) -> Result<()> {
    run_calls::time_connects(to, count)
}

/// A benchmark.
type Bench = fn(&Settings) -> Result<Report>;

/// The benchmarks, in the order of the report.
const ALL: &[(&str, Bench)] = &[
    ("whole-connections", whole::run),
    ("mixes", mixes::run),
    ("overhead", overhead::run),
    ("overhead-udp", overhead::datagrams),
    ("calls", calls::run),
    ("run-calls", run_calls::run),
    ("decision", decision::run),
    ("cut", cut::run),
    ("footprint", footprint::run),
    ("api", api::run),
    ("schedulers", schedulers::run),
    ("shares", shares::run),
    ("bond", bond::sums::run),
    ("bond-few", bond::few::run),
    ("bond-cut", bond::cut::run),
    ("moves", bond::moves::run),
    ("late", bond::late::run),
    ("bond-simult", bond::simult::run),
    ("bond-matrix", bond::matrix::run),
    ("bond-churn", bond::churn::run),
    ("bond-fair", bond::fair::run),
    ("bond-messages", bond::messages::run),
    ("bond-speed", bond::speed::run),
    ("bond-relay", bond::relay::run),
    ("relay-crowd", bond::crowd::run),
    ("get", get::run),
    ("proxy", proxy::run),
    ("gateway", gateway::run),
    ("virtual", virtual_device::run),
    ("adhoc-speed", adhoc::speed::run),
    ("adhoc", adhoc::run),
    ("adhoc-access", adhoc::access::run),
    ("adhoc-routes", adhoc::routes::run),
    ("network", network::run),
    ("handover", handover::run),
    ("net-copies", copies::run),
    ("slicer", slicer::run),
];

/// Runs the named benchmarks, or all, and returns their reports. Prints progress on standard error. Writes `bench.md` and `bench.json`
/// to the directory of the settings; results of benchmarks that do not run now stay in them.
pub fn run(settings: &Settings, names: &[String]) -> Result<Vec<Report>> {
    let out = settings.out.as_path();
    let known: Vec<&str> = ALL.iter().map(|(name, _)| *name).collect();
    if let Some(unknown) = names.iter().find(|name| !known.contains(&name.as_str())) {
        bail!("there is no benchmark {unknown:?}: there are {}", known.join(", "));
    }
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    crate::sys::raise_open_files().context("cannot raise the limit of open files")?;
    let mut reports = Vec::new();
    for (name, bench) in ALL.iter().filter(|(name, _)| names.is_empty() || names.iter().any(|wanted| wanted == name)) {
        eprintln!("{name}:");
        let begin = Instant::now();
        let mut report = bench(settings).with_context(|| format!("the benchmark {name} failed"))?;
        eprintln!("{name}: {:.0} s", begin.elapsed().as_secs_f64());
        report.command = settings.command(name);
        report.save(out)?;
        report::assemble(out, &known, &machine())?;
        reports.push(report);
    }
    Ok(reports)
}

/// Description of the machine, kernel and TCP congestion control.
fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")).and_then(|line| line.split_once(':'));
    let model = model.map_or("unknown processor", |(_, model)| model.trim());
    let congestion = read("/proc/sys/net/ipv4/tcp_congestion_control");
    format!("Measured on Linux {}, {cpus} CPUs ({model}), TCP {congestion}.", read("/proc/sys/kernel/osrelease"))
}

/// Prints a line of progress, indented below the benchmark's name.
fn progress(text: &str) {
    eprintln!("  {text}");
}
