//! The network's controller: many emulated switches, and traffic through Open vSwitch.

mod emulator;
mod open_vswitch;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::footprint::resident;
use super::overhead::thread_time;
use super::report::Report;
use super::stats::{median, quantile, worst};
use super::{Settings, progress};
use crate::lab::Lab;
use crate::network::{CONTROLLER, Controller, count, eventually, is_complete};
use crate::spec::LinkSpec;
use emulator::Emulator;

/// Switches, and hosts at them.
const SIZES: [(usize, usize); 5] = [(10, 10), (50, 50), (100, 100), (200, 200), (400, 400)];
/// How many of them a quick run measures.
const QUICK: usize = 2;
/// Aim for new paths, in milliseconds.
const AIM: f64 = 100.0;
/// Time without a change after which the controller is asked whether it has converged.
const QUIET: Duration = Duration::from_millis(300);
/// Timeout until the controller has converged.
const LIMIT: Duration = Duration::from_secs(300);

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "network",
        "The network's controller",
        "`braid net controller` in a namespace. Emulated switches: one thread serves switches of OpenFlow 1.3 with two tables, each on a TCP connection over \
         loopback. They execute flow entries and groups, answer barriers and requests, and pass LLDP frames and broadcasts along cables: a ring, and \
         a chord from each switch over the square root of the ring's length. Found: the time from the first connection until the controller knows all links and a barrier has confirmed the last \
         entry. Served: the same from the moment at which each host has sent an ARP announcement. Breaks: the time from the first of the two port-status messages of a cable until \
         the last change of an entry, group or meter is confirmed; the removal of entries that nothing needs is included. Returns: the same for the cable's return. The cables are spread over \
         ring and chords. Memory: VmRSS when the hosts are served, and VmHWM at the end. CPU: \
         the controller's share of one processor over 30 s without changes, in which it sends an LLDP frame to each port every second and reads all tables once. Open vSwitch: three switches in a ring, with \
         their datapath in user space; one host sends the other a datagram every millisecond, and gets each back. Gap: the longest time between two answers. The cable between the \
         hosts' switches loses its carrier and gets it back; then the controller is killed (SIGKILL) and started anew, until the entries of its predecessor are checked (30 s).",
    );
    for (switches, hosts) in SIZES.into_iter().take(if settings.quick { QUICK } else { SIZES.len() }) {
        let outcome = emulated(settings, switches, hosts).with_context(|| format!("{switches} switches, {hosts} hosts"))?;
        tell(&outcome, &mut report);
        settings.keep(&report)?;
    }
    open_vswitch::run(settings, &mut report)?;
    report.notes.push("The entries grow with switches times hosts.".to_owned());
    Ok(report)
}

/// What emulated switches and hosts cost.
struct Outcome {
    switches: usize,
    hosts: usize,
    cables: usize,
    /// Entries of all switches.
    entries: usize,
    /// Seconds.
    found: f64,
    served: f64,
    /// Megabytes (10^6): when the hosts are served, and at most.
    memory: (f64, f64),
    /// CPU seconds of the controller in each second without changes.
    rest: f64,
    /// Milliseconds until a cable that breaks is avoided, and until one that returns is used.
    breaks: Vec<f64>,
    returns: Vec<f64>,
}

fn emulated(settings: &Settings, switches: usize, hosts: usize) -> Result<Outcome> {
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start()?;
    let controller = Controller::start(&lab, &settings.braid)?;
    eventually("the controller answers", || Ok(controller.status()?.is_object()))?;
    let mut network = Emulator::new(switches, hosts);
    let cables = network.cables();
    let found = time(&mut network, &controller, (cables, 0), |network| network.connect(&lab, CONTROLLER))?;
    let served = time(&mut network, &controller, (cables, hosts), Emulator::announce)?;
    let (memory, _) = resident(controller.pid())?;
    let entries = network.entries();
    let count = if settings.quick { 5 } else { 20 };
    let (mut breaks, mut returns) = (Vec::new(), Vec::new());
    for cable in (0..count).map(|number| number * cables / count) {
        breaks.push(1e3 * time(&mut network, &controller, (cables - 1, hosts), |network| network.set_cable(cable, false))?);
        returns.push(1e3 * time(&mut network, &controller, (cables, hosts), |network| network.set_cable(cable, true))?);
    }
    let span = Duration::from_secs(if settings.quick { 3 } else { 30 });
    let before = thread_time(controller.pid())?;
    network.run(span)?;
    let rest = (thread_time(controller.pid())? - before) / span.as_secs_f64();
    let (_, most) = resident(controller.pid())?;
    Ok(Outcome { switches, hosts, cables, entries, found, served, memory: (memory, most), rest, breaks, returns })
}

/// Does something, and serves the switches until the controller knows so many links and hosts and has converged. Returns the seconds until a barrier
/// confirmed the last change.
fn time(
    network: &mut Emulator,
    controller: &Controller<'_>,
    (links, hosts): (usize, usize),
    deed: impl FnOnce(&mut Emulator) -> Result<()>,
) -> Result<f64> {
    let begin = Instant::now();
    deed(network)?;
    loop {
        // A question would take the controller's time from the change.
        network.run_until_quiet(QUIET)?;
        let status = controller.status()?;
        let known = (count(&status, "links"), count(&status, "hosts"));
        if known == (links, hosts) && is_complete(&status, network.switches(), links) {
            let last = network.changed().filter(|at| *at > begin).context("the controller changed nothing")?;
            return Ok(last.duration_since(begin).as_secs_f64());
        }
        ensure!(
            begin.elapsed() < LIMIT,
            "after {LIMIT:?} the controller knows {} of {links} links and {} of {hosts} hosts, converged: {}",
            known.0,
            known.1,
            status["converged"]
        );
    }
}

fn tell(outcome: &Outcome, report: &mut Report) {
    let Outcome { switches, hosts, cables, entries, found, served, memory, rest, breaks, returns } = outcome;
    let times = |times: &[f64]| [median(times), quantile(times, 0.95), worst(times)].map(|ms| format!("{ms:.1} ms"));
    let figures = [
        format!("{switches} and {hosts}"),
        cables.to_string(),
        entries.to_string(),
        format!("{found:.2} s"),
        format!("{served:.2} s"),
        format!("{:.1} and {:.1} MB", memory.0, memory.1),
        format!("{:.1} %", 100.0 * rest),
    ];
    let row: Vec<String> = figures.into_iter().chain(times(breaks)).chain(times(returns)).collect();
    progress(&row.join(", "));
    let head = "switches and hosts | links | entries | found | served | memory, and at most | CPU at rest \
                | breaks: median | 95 % | worst | returns: median | 95 % | worst";
    report.row("Emulated switches:", head, row);
    let measured = format!("median {:.1} ms, worst {:.1} ms", median(breaks), worst(breaks));
    report.aim(format!("{switches} switches, {hosts} hosts: new paths in under {AIM} ms"), measured, worst(breaks) < AIM);
    report.measured(json!({
        "switches": switches, "hosts": hosts, "links": cables, "entries": entries, "found_s": found, "served_s": served,
        "resident_mb": memory.0, "high_water_mb": memory.1, "cpu_at_rest": rest, "breaks_ms": breaks, "returns_ms": returns,
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_time_decides() {
        let met = |breaks: &[f64]| {
            let outcome = Outcome {
                switches: 10,
                hosts: 10,
                cables: 20,
                entries: 200,
                found: 2.0,
                served: 0.1,
                memory: (10.0, 11.0),
                rest: 0.01,
                breaks: breaks.to_vec(),
                returns: vec![3.0],
            };
            let mut report = Report::new("network", "", "");
            tell(&outcome, &mut report);
            assert_eq!(report.tables[0].rows[0].len(), report.tables[0].head.len());
            report.aims[0].met
        };
        assert!(met(&[5.0, 99.0]) && !met(&[5.0, 101.0]));
    }
}
