//! Duration of the decision in the kernel, from the kernel's own statistics.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::programs::loaded_programs;
use aya::sys::{Stats, enable_stats};
use braid_model::LinkSet;
use braid_platform::linux::bpf::trial::KernelRule;
use braid_platform::linux::sys::abi;
use serde_json::json;

use super::report::Report;
use super::sockets::{accept_and_drop, connect, swallow_datagrams};
use super::stats::median;
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::LinkSpec;

/// Links in the lab.
const LINKS: usize = 16;
/// Number of connects per batch.
const BATCH: usize = 2_000;

/// The kernel's statistics of one program.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Program {
    pub(super) name: String,
    runs: u64,
    pub(super) time: Duration,
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "decision",
        "The decision in the kernel",
        "16 links (veth, no limits), max-throughput, consecutive TCP connects and unconnected datagrams. The kernel's run statistics \
         (BPF_ENABLE_STATS) give the mean time per run of each of the daemon's programs; the table shows the median of batches. The connect \
         programs do all the work of a connect: they identify the calling program, match the policy, decide under the lock, reserve demand, record \
         the flow and bind the socket. The decision alone: the same code under BPF_PROG_TEST_RUN, mean of 100,000 runs.",
    );
    let batches = programs_at_work(settings)?;
    let mut rows = Vec::new();
    let mut raw = json!({});
    let mut connect_time = 0.0;
    for (name, times) in &batches {
        progress(&format!("{name}: {:.0} ns", median(times)));
        rows.push(vec![format!("`{name}`"), format!("{:.0} ns", median(times)), format!("{:.0} to {:.0} ns", least(times), most(times))]);
        raw[name] = json!(times);
        if name == "braid_connect4" {
            connect_time = median(times);
        }
    }
    report.table(format!("Programs at work, {LINKS} links:"), "program | mean time a run | over batches", rows);
    let mut alone = Vec::new();
    for links in [2, 8, 16, 32] {
        let times = decision_alone(links)?;
        progress(&format!("the decision alone, {links} links: {:.0} ns", median(&times)));
        alone.push(vec![links.to_string(), format!("{:.0} ns", median(&times)), format!("{:.0} to {:.0} ns", least(&times), most(&times))]);
        if links == LINKS {
            let time = median(&times);
            report.aim("the decision under 1 µs with 16 links", format!("{time:.0} ns"), time < 1000.0);
        }
        raw[format!("decision_{links}_links_ns")] = json!(times);
    }
    report.table("The decision alone:", "links | mean time | over batches", alone);
    let aim = "the whole connect program under 1 µs with 16 links, by the kernel's run statistics";
    report.aim(aim, format!("{connect_time:.0} ns"), connect_time > 0.0 && connect_time < 1000.0);
    report.raw = raw;
    Ok(report)
}

fn least(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

fn most(times: &[f64]) -> f64 {
    times.iter().copied().fold(0.0, f64::max)
}

/// Mean nanoseconds by run of each of the daemon's programs, by batch.
fn programs_at_work(settings: &Settings) -> Result<BTreeMap<String, Vec<f64>>> {
    let links = (0..LINKS).map(|i| LinkSpec::direct(&format!("eth{i}")));
    let lab = links.fold(Lab::builder(), |builder, link| builder.link(link)).start()?;
    let to = accept_and_drop(&lab, 9000)?;
    let swallower = swallow_datagrams(&lab, 9001)?;
    let foreign = programs()?;
    let _daemon = Daemon::start(&lab, &settings.braid, "max-throughput", "")?;
    let _counting = enable_stats(Stats::RunTime).context("the kernel does not count BPF run times (BPF_ENABLE_STATS, Linux 5.8)")?;
    let mut batches: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for _ in 0..if settings.quick { 3 } else { 15 } {
        let before = programs()?;
        lab.client().run(|| (0..BATCH).try_for_each(|_| connect(to).map(drop)))??;
        lab.client().run(|| -> std::io::Result<()> {
            let socket = std::net::UdpSocket::bind(("0.0.0.0", 0))?;
            (0..BATCH).try_for_each(|_| socket.send_to(&[0; 100], swallower).map(drop))
        })??;
        for (id, after) in programs()?.into_iter().filter(|(id, _)| !foreign.contains_key(id)) {
            let Some(before) = before.get(&id) else { continue };
            // Programs with few runs were not part of the measurement.
            let runs = after.runs - before.runs;
            if runs >= BATCH as u64 / 2 {
                batches.entry(after.name).or_default().push((after.time - before.time).as_nanos() as f64 / runs as f64);
            }
        }
    }
    ensure!(batches.contains_key("braid_connect4"), "the kernel counted no run of braid_connect4");
    Ok(batches)
}

/// Braid's programs that are loaded now, by the kernel's number.
pub(super) fn programs() -> Result<BTreeMap<u32, Program>> {
    let mut found = BTreeMap::new();
    // A program that disappears meanwhile is not Braid's.
    for info in loaded_programs().filter_map(Result::ok) {
        let name = info.name_as_str().unwrap_or_default();
        if name.starts_with("braid_") {
            found.insert(info.id(), Program { name: name.to_owned(), runs: info.run_count(), time: info.run_time() });
        }
    }
    Ok(found)
}

/// Nanoseconds of the decision over so many links, by batch.
fn decision_alone(links: usize) -> Result<Vec<f64>> {
    let mut rule = KernelRule::load().context("cannot load the rule's program")?;
    let allowed: LinkSet = (0..links).collect();
    let mut params = abi::Params { mode: 2, ..Default::default() };
    for (number, slot) in params.slots.iter_mut().enumerate().take(links) {
        (slot.rate, slot.step, slot.rank) = ([1_000_000 * (number as u64 + 1); 2], 1 << 20, number as u32);
    }
    let trial = abi::Trial { allowed: allowed.0 as u32, demand: 1_000_000, ..Default::default() };
    rule.decide(params, trial)?;
    (0..11).map(|_| Ok(f64::from(rule.time(100_000, allowed)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_of_batches_is_reported() {
        let times = [300.0, 200.0, 900.0];
        assert_eq!((least(&times), most(&times)), (200.0, 900.0));
    }
}
