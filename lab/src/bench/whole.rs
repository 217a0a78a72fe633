//! Equal downloads started together, compared with the best split of whole connections.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use braid_model::{ByteCount, Rate};
use braid_netem::LinkStats;
use serde_json::{Value, json};

use super::report::Report;
use super::sockets::link_of;
use super::stats::Mean;
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;
use crate::workload::{self, Summary};

/// The payload's share of a link's rate, without headers and acknowledgements.
const PAYLOAD: f64 = 0.965;
/// Timeout of one download.
const LIMIT: Duration = Duration::from_secs(300);
/// Number of bulk flows per link during the warm-up, and their duration.
pub(super) const WARM_UP: (usize, Duration) = (3, Duration::from_secs(8));

/// Downloads on links.
struct Case {
    rates: [u64; 2],
    counts: &'static [usize],
}

const CASES: [Case; 2] = [Case { rates: [20, 10], counts: &[9, 18] }, Case { rates: [20, 2], counts: &[11] }];

/// One run's result.
struct Outcome {
    share: f64,
    split: Vec<usize>,
    summary: Summary,
    capacities: Vec<Option<u64>>,
    /// Per link: packets dropped by its queue, as a share of its arriving packets.
    dropped: Vec<f64>,
    /// Per link: carried data, including headers and retransmissions, as a share of its capacity in that time.
    carried: Vec<f64>,
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "whole-connections",
        "Equal downloads, started together",
        "Each row is a number of curls that download 4 MB each from nginx, all started at once. The best possible goodput is that of the best \
         split of whole downloads over the links (shortest time until the last one ends), times 0.965 for the payload's share of packets. Links \
         have 10 ms each way and a queue of 100 ms. Capacities are not configured: before the runs a copy of curl loads each link with three bulk \
         flows for 8 s under round robin, and the state directory keeps the learnt capacities. The column \"believed\" shows max-throughput's \
         capacity estimate of each link, in Mbit/s, at the start of its run. Schedulers take turns. Used: the data that each link carried, \
         including headers and retransmissions, as a share of its capacity until the last download ended. Dropped: the share of packets that its \
         full queue dropped.",
    );
    let size = ByteCount::new(if settings.quick { 1_000_000 } else { 4_000_000 });
    let mut raw = Vec::new();
    for Case { rates, counts } in &CASES {
        let links = ["wlan0", "lte0"].iter().zip(rates).map(|(name, rate)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(10)));
        let lab = links.fold(Lab::builder(), |builder, link| builder.link(link)).start()?;
        let web = Web::start(&lab)?;
        let learnt = warm_up(&lab, &web, &settings.braid, WARM_UP)?;
        progress(&format!("{rates:?} Mbit/s: learnt {}", shown(&learnt)));
        for count in *counts {
            compare(settings, &lab, &web, (*rates, *count, size), &mut report, &mut raw)?;
        }
        let missed: u64 = (0..2).map(|link| lab.counters(link).map(|c| c.missed)).sum::<Result<u64>>()?;
        ensure!(missed == 0, "the lab was too slow and lost {missed} frames: the machine is too busy to measure");
    }
    report.raw = Value::Array(raw);
    Ok(report)
}

fn compare(
    settings: &Settings,
    lab: &Lab,
    web: &Web,
    (rates, count, size): ([u64; 2], usize, ByteCount),
    report: &mut Report,
    raw: &mut Vec<Value>,
) -> Result<()> {
    let best = best_goodput(&rates.map(mbps), count, size) * PAYLOAD;
    let title = format!("{count} downloads over {} and {} Mbit/s", rates[0], rates[1]);
    let repeat = if settings.quick { 1 } else { 3 };
    let rest = ["round-robin", "only-one", "weighted-round-robin"];
    // The other schedulers run once each, between the runs of max-throughput.
    let order = (0..repeat).flat_map(|i| ["max-throughput"].into_iter().chain(rest.get(i).copied()));
    let order: Vec<_> = order.chain(rest.into_iter().skip(repeat)).collect();
    let mut outcomes: Vec<(&str, Outcome)> = Vec::new();
    for scheduler in order {
        let outcome = one(settings, lab, web, scheduler, count, size, best)?;
        progress(&format!("{title}, {scheduler}: {:.3} of the best, split {:?}", outcome.share, outcome.split));
        raw.push(json!({
            "case": title, "scheduler": scheduler, "share": outcome.share, "split": outcome.split,
            "capacities_down_bps": outcome.capacities, "used": outcome.carried, "dropped": outcome.dropped, "summary": outcome.summary,
        }));
        outcomes.push((scheduler, outcome));
    }
    let row = |scheduler: &&str| {
        let of: Vec<_> = outcomes.iter().filter(|(name, _)| name == scheduler).map(|(_, outcome)| outcome).collect();
        let join = |text: fn(&Outcome) -> String| of.iter().map(|outcome| text(outcome)).collect::<Vec<_>>().join("; ");
        vec![
            (*scheduler).to_owned(),
            join(|o| format!("{:.3}", o.share)),
            join(|o| o.split.iter().map(usize::to_string).collect::<Vec<_>>().join("+")),
            join(|o| o.summary.goodput.to_string()),
            join(|o| format!("{:.1} s", o.summary.makespan.as_secs_f64())),
            join(|o| percents(&o.carried)),
            join(|o| percents(&o.dropped)),
            if *scheduler == "max-throughput" { join(|o| shown(&o.capacities)) } else { String::new() },
        ]
    };
    let rows = ["max-throughput", "weighted-round-robin", "round-robin", "only-one"].iter().map(row).collect();
    report.table(
        format!("{title} (best possible: {:.2} Mbit/s):", best / 1e6),
        "scheduler | of the best | downloads per link | goodput | until the last ended | used | dropped | believed",
        rows,
    );
    let shares: Vec<_> = outcomes.iter().filter(|(name, _)| *name == "max-throughput").map(|(_, o)| o.share).collect();
    let mean = Mean::of(&shares);
    let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
    report.aim(
        format!("{title}: max-throughput reaches 0.90 of the best"),
        format!("{:.3} (least of {}: {least:.3})", mean.mean, shares.len()),
        mean.mean >= 0.90,
    );
    Ok(())
}

fn one(settings: &Settings, lab: &Lab, web: &Web, scheduler: &str, count: usize, size: ByteCount, best: f64) -> Result<Outcome> {
    let daemon = Daemon::start(lab, &settings.braid, scheduler, "")?;
    let capacities = capacities(lab, &daemon.status(lab)?);
    let before = counted(lab)?;
    let records = workload::run(web, &workload::together(count, size), LIMIT, |curl| lab.client().command(curl))?;
    let after = counted(lab)?;
    drop(daemon);
    let summary = workload::summarise(&records);
    ensure!(summary.failed == 0, "{} of {count} downloads failed under {scheduler}", summary.failed);
    let mut split = vec![0; lab.links().len()];
    for link in records.iter().filter_map(|record| record.local).filter_map(link_of) {
        split[link] += 1;
    }
    let spans = || before.iter().zip(&after);
    let dropped = spans().map(|(b, a)| (a.queue_full - b.queue_full) as f64 / (a.offered - b.offered).max(1) as f64).collect();
    let could = |rate: Rate| rate.bps() as f64 / 8.0 * summary.makespan.as_secs_f64();
    let bytes = |(b, a): (&LinkStats, &LinkStats)| a.delivered_bytes.saturating_sub(b.delivered_bytes).get() as f64;
    let carried = spans().map(bytes).zip(lab.links()).map(|(bytes, link)| bytes / could(link.down_rate().unwrap_or_default())).collect();
    Ok(Outcome { share: summary.goodput.bps() as f64 / best, split, summary, capacities, dropped, carried })
}

/// Counters of each link towards the client so far.
fn counted(lab: &Lab) -> Result<Vec<LinkStats>> {
    (0..lab.links().len()).map(|link| lab.counters(link).map(|counters| counters.down)).collect()
}

fn percents(shares: &[f64]) -> String {
    shares.iter().map(|share| format!("{:.0} %", share * 100.0)).collect::<Vec<_>>().join(", ")
}

/// Makes the daemon learn the links from traffic of a program that the benchmark does not use otherwise. Returns its capacity estimates.
pub(super) fn warm_up(lab: &Lab, web: &Web, braid: &Path, (flows, span): (usize, Duration)) -> Result<Vec<Option<u64>>> {
    let daemon = Daemon::start(lab, braid, "round-robin", "")?;
    let curl = copy_of_curl(lab, "warm-up")?;
    let downloads = workload::together(flows * lab.links().len(), ByteCount::new(1_000_000_000));
    workload::run(web, &downloads, span, |_| lab.client().command(&curl))?;
    Ok(capacities(lab, &daemon.status(lab)?))
}

/// curl under another name and inode: another application.
pub(super) fn copy_of_curl(lab: &Lab, name: &str) -> Result<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let curl = std::env::split_paths(&paths).map(|directory| directory.join("curl")).find(|path| path.exists());
    let copy = lab.directory().join(name);
    // A separate process copies: a child that another thread starts meanwhile would inherit the open file, and the kernel
    // refuses to execute a file that is open for writing.
    let curl = curl.context("there is no curl: run lab/install-deps.sh")?;
    let status = Command::new("cp").arg(curl).arg(&copy).status().context("cannot run cp")?;
    ensure!(status.success(), "cannot copy curl to {}: {status}", copy.display());
    Ok(copy)
}

/// The capacities towards the client, in bit/s, in the order of the lab's links; `None` where it is not known.
pub(super) fn capacities(lab: &Lab, status: &Value) -> Vec<Option<u64>> {
    lab.links().iter().map(|link| capacity(status, link.name())).collect()
}

fn capacity(status: &Value, name: &str) -> Option<u64> {
    status["links"].as_array()?.iter().find(|link| link["name"] == name)?["capacity_down_bps"].as_u64()
}

/// Capacities as text, in Mbit/s.
pub(super) fn shown(capacities: &[Option<u64>]) -> String {
    let one = |capacity: &Option<u64>| capacity.map_or("?".to_owned(), |bps| format!("{:.1}", bps as f64 / 1e6));
    capacities.iter().map(one).collect::<Vec<_>>().join(" and ")
}

/// The goodput, in bit/s of link capacity, of the split of `count` equal downloads over two links that ends first.
fn best_goodput(rates: &[Rate; 2], count: usize, size: ByteCount) -> f64 {
    let bits = size.get() as f64 * 8.0;
    let time = |first: usize| {
        let spans = [first, count - first].into_iter().zip(rates).map(|(n, rate)| n as f64 * bits / rate.bps() as f64);
        spans.fold(0.0, f64::max)
    };
    let shortest = (0..=count).map(time).fold(f64::INFINITY, f64::min);
    count as f64 * bits / shortest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_split_of_whole_downloads_bounds_the_goodput() {
        let size = ByteCount::new(4_000_000);
        assert_eq!(best_goodput(&[mbps(20), mbps(10)], 9, size).round(), 30e6);
        assert_eq!(best_goodput(&[mbps(20), mbps(2)], 11, size).round(), 22e6);
        // Eight over 2:1 cannot be split evenly: 5 and 3 take 12 units where 16 would go.
        let eight = best_goodput(&[mbps(20), mbps(10)], 8, size);
        assert!((eight - 8.0 / 3.0 * 10e6).abs() < 1.0, "{eight}");
        assert_eq!(best_goodput(&[mbps(20), mbps(2)], 1, size).round(), 20e6);
    }

    #[test]
    fn unknown_capacities_are_shown_as_such() {
        let status = json!({ "links": [
            { "name": "lte0", "capacity_down_bps": null }, { "name": "wlan0", "capacity_down_bps": 19_500_000 },
        ] });
        let found = ["wlan0", "lte0", "eth0"].map(|name| capacity(&status, name));
        assert_eq!(shown(&found), "19.5 and ? and ?");
        assert_eq!(capacity(&json!({}), "wlan0"), None);
    }
}
