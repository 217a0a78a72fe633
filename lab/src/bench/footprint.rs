//! The daemon's memory, and its start time.

use std::fs::File;
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::json;

use super::report::Report;
use super::sockets::{accept_and_drop, accept_and_keep, connect, link_of};
use super::stats::{median, worst};
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::LinkSpec;
use crate::sys;

/// Timeout of a start.
const LIMIT: Duration = Duration::from_secs(10);
const LINKS: [&str; 2] = ["wlan0", "lte0"];

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "footprint",
        "Memory and start time",
        "Memory: two links, 1,000 TCP connections held open by one program, VmRSS, RssAnon and VmHWM of `braid up` twenty seconds later. \
         What is not its own are pages of the program file, as many as the kernel maps at once around those that are used. Start: the time \
         from exec to the start of the first connection that a rule sends over the second link, which the system would never choose; a connection \
         starts every millisecond. The first start has an empty state directory, the others use the state that it left.",
    );
    let Memory { idle, now, most, own } = memory(settings)?;
    progress(&format!("{now:.1} MB with 1,000 flows, {own:.1} of them its own, {most:.1} MB at most, {idle:.1} MB idle"));
    let starts = starts(settings, if settings.quick { 3 } else { 20 })?;
    report.table(
        "Memory in megabytes (10^6), and time:",
        "what | measured",
        vec![
            vec!["resident with no flow".to_owned(), format!("{idle:.1} MB")],
            vec!["resident with 1,000 live flows".to_owned(), format!("{now:.1} MB")],
            vec!["of these its own (RssAnon)".to_owned(), format!("{own:.1} MB")],
            vec!["most ever resident (VmHWM)".to_owned(), format!("{most:.1} MB")],
            vec!["start to first scheduled flow, first start".to_owned(), format!("{:.0} ms", starts[0])],
            vec![format!("the same, median of {}", starts.len()), format!("{:.0} ms", median(&starts))],
            vec!["the same, worst".to_owned(), format!("{:.0} ms", worst(&starts))],
        ],
    );
    report.aim("under 20 MB resident with 1,000 live flows", format!("{now:.1} MB"), now < 20.0);
    let (middle, last) = (median(&starts), worst(&starts));
    report.aim("start to first scheduled flow under 300 ms", format!("median {middle:.0} ms, worst {last:.0} ms"), last < 300.0);
    report.raw = json!({ "resident_mb": now, "own_mb": own, "high_water_mb": most, "idle_mb": idle, "starts_ms": starts });
    Ok(report)
}

/// The daemon's memory in megabytes (10^6).
struct Memory {
    idle: f64,
    /// With a thousand flows.
    now: f64,
    most: f64,
    /// What `now` has of the daemon's own, without pages of files.
    own: f64,
}

fn memory(settings: &Settings) -> Result<Memory> {
    let lab = LINKS.iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let to = accept_and_keep(&lab, 9000)?;
    let daemon = Daemon::start(&lab, &settings.braid, "max-throughput", "")?;
    thread::sleep(Duration::from_secs(2));
    let (idle, _) = resident(daemon.pid())?;
    let flows = lab.client().run(|| (0..1000).map(|_| TcpStream::connect(to)).collect::<std::io::Result<Vec<_>>>())??;
    thread::sleep(Duration::from_secs(if settings.quick { 2 } else { 20 }));
    let known = daemon.status(&lab)?["flows"].as_u64();
    ensure!(known >= Some(1000), "the daemon lists {known:?} flows, not 1,000");
    let (now, most) = resident(daemon.pid())?;
    let own = field(daemon.pid(), "RssAnon:")?;
    drop(flows);
    Ok(Memory { idle, now, most, own })
}

/// Current and maximum resident memory, in megabytes (10^6).
pub(super) fn resident(pid: u32) -> Result<(f64, f64)> {
    Ok((field(pid, "VmRSS:")?, field(pid, "VmHWM:")?))
}

fn field(pid: u32, name: &str) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).context("cannot read the daemon's status")?;
    memory_field(&status, name).with_context(|| format!("no {name} in the daemon's status"))
}

fn memory_field(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024.0 / 1e6)
}

/// Milliseconds from exec to the first steered flow, one value per start.
fn starts(settings: &Settings, count: usize) -> Result<Vec<f64>> {
    let lab = LINKS.iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let to = accept_and_drop(&lab, 9000)?;
    let mut starts = Vec::new();
    for number in 0..count {
        let took = start(settings, &lab, to).with_context(|| format!("start {number}"))?;
        progress(&format!("start {number}: {:.0} ms", took.as_secs_f64() * 1e3));
        starts.push(took.as_secs_f64() * 1e3);
    }
    Ok(starts)
}

fn start(settings: &Settings, lab: &Lab, to: SocketAddr) -> Result<Duration> {
    let home = lab.directory().join("start");
    std::fs::create_dir_all(&home)?;
    let links: String = LINKS.iter().map(|name| format!("[[link]]\nname = \"{name}\"\n")).collect();
    let rule = format!("[[app]]\nmatch = {{ port = {} }}\nlinks = [\"{}\"]\n", to.port(), LINKS[1]);
    std::fs::write(home.join("braid.toml"), links + &rule)?;
    let mut command = lab.client().command(&settings.braid)?;
    command.arg("daemon").arg("--config").arg(home.join("braid.toml")).arg("--state-dir").arg(home.join("state"));
    command.arg("--socket").arg(home.join("socket")).stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(home.join("log"))?);
    let begin = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot run {}", settings.braid.display()))?;
    let outcome = lab.client().run(|| -> Result<Duration> {
        loop {
            let at = begin.elapsed();
            if link_of(connect(to)?.1) == Some(1) {
                return Ok(at);
            }
            if let Some(status) = child.try_wait()? {
                bail!("braid daemon ended ({status}): {}", std::fs::read_to_string(home.join("log")).unwrap_or_default().trim());
            }
            ensure!(at < LIMIT, "no flow was scheduled in {LIMIT:?}");
            thread::sleep(Duration::from_millis(1));
        }
    });
    end(&mut child);
    outcome?
}

fn end(child: &mut Child) {
    let _ = sys::terminate(child.id());
    let begin = Instant::now();
    while matches!(child.try_wait(), Ok(None)) && begin.elapsed() < Duration::from_secs(3) {
        thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_megabytes() {
        let status = "Name:\tbraid\nVmHWM:\t   20000 kB\nVmRSS:\t   10000 kB\n";
        assert_eq!(memory_field(status, "VmRSS:"), Some(10.24));
        assert_eq!(memory_field(status, "VmHWM:"), Some(20.48));
        assert_eq!(memory_field(status, "VmSwap:"), None);
    }

    #[test]
    fn the_memory_of_this_process_is_found() {
        let (now, most) = resident(std::process::id()).unwrap();
        assert!(now > 0.1 && most >= now * 0.5);
    }
}
