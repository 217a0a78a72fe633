//! The demonstration: the same downloads with one link and with all links, and with a link that goes dark meanwhile.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use braid_model::ByteCount;
use braid_plot::{self as plot, Run};
use serde::Serialize;

use crate::air;
use crate::daemon::{Daemon, run_under};
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;
use crate::workload::{self, Download, Record, Summary};

/// Timeout of one download.
const LIMIT: Duration = Duration::from_secs(60);
/// Times at which the first link goes dark and returns.
const CUT: (Duration, Duration) = (Duration::from_secs(4), Duration::from_secs(9));
/// Number of samples averaged per step of the plot.
const SAMPLES_A_STEP: usize = 3;

/// How the programs use Braid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// Without Braid: only the first link is used.
    Without,
    /// With the daemon, for the whole namespace. Needs root.
    Daemon(PathBuf),
    /// All programs under one `braid run`.
    Run(PathBuf),
}

/// One line of the result.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// The scheduler.
    pub scheduler: String,
    /// Whether the first link was dark for a while.
    pub cut: bool,
    /// Summary of the downloads.
    pub summary: Summary,
}

/// Runs the demonstration and returns the outcomes and the plot (SVG). Prints progress on standard error.
pub fn run(mode: &Mode, schedulers: &[String]) -> Result<(Vec<Outcome>, String)> {
    let builder = Lab::builder()
        .link(LinkSpec::new("wlan0").rate(mbps(20)).delay(ms(10)))
        .link(LinkSpec::new("eth0").rate(mbps(12)).delay(ms(40)))
        .link(LinkSpec::new("lte0").rate(mbps(6)).delay(ms(80)).loss(0.01));
    // `braid run` cannot add the source rules that a strict filter needs.
    let lab = builder.rp_filter(if matches!(mode, Mode::Run(_)) { 2 } else { 1 }).start()?;
    let web = Web::start(&lab)?;
    let schedulers: Vec<&str> = match mode {
        Mode::Without => Vec::new(),
        _ => schedulers.iter().map(String::as_str).collect(),
    };
    let (mut outcomes, mut runs) = (Vec::new(), Vec::new());
    let best = schedulers.last().copied();
    let plain = [None].into_iter().chain(schedulers.iter().copied().map(Some)).map(|s| (s, false));
    let cut = [None, best].into_iter().enumerate().filter(|(i, s)| *i == 0 || s.is_some()).map(|(_, s)| (s, true));
    for (scheduler, cut) in plain.chain(cut) {
        let name = scheduler.unwrap_or("only-one");
        let what = if cut { format!("{name}, {} dark for 5 s", lab.links()[0].name()) } else { name.to_owned() };
        eprint!("  {what} ... ");
        let _ = std::io::stderr().flush();
        let (records, run) = one(&lab, &web, mode, scheduler, cut, what).with_context(|| format!("the run with {name} failed"))?;
        let summary = workload::summarise(&records);
        eprintln!("{} in {:.1} s", summary.goodput, summary.makespan.as_secs_f64());
        outcomes.push(Outcome { scheduler: name.to_owned(), cut, summary });
        runs.push(run);
    }
    let names: Vec<_> = lab.links().iter().map(describe).collect();
    Ok((outcomes, plot::stacked("Traffic received per link", &names, &runs)))
}

/// The outcomes as a readable table.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut text = format!(
        "{:<34} {:>9} {:>7} {:>12} {:>10} {:>10} {:>8}\n",
        "", "downloads", "failed", "goodput", "mean time", "all done", "speed-up"
    );
    for cut in [false, true] {
        let group: Vec<_> = outcomes.iter().filter(|outcome| outcome.cut == cut).collect();
        for outcome in &group {
            let Summary { complete, failed, goodput, mean_time, makespan } = outcome.summary;
            let speed_up = goodput.bps() as f64 / group[0].summary.goodput.bps().max(1) as f64;
            let name = if cut { format!("{}, first link dark 5 s", outcome.scheduler) } else { outcome.scheduler.clone() };
            text += &format!(
                "{name:<34} {complete:>9} {failed:>7} {goodput:>12} {:>8.2} s {:>8.1} s {speed_up:>7.2}x\n",
                mean_time.as_secs_f64(),
                makespan.as_secs_f64()
            );
        }
    }
    text
}

/// One workload under one scheduler (`None`: without Braid).
fn one(lab: &Lab, web: &Web, mode: &Mode, scheduler: Option<&str>, cut: bool, title: String) -> Result<(Vec<Record>, Run)> {
    let daemon = match (mode, scheduler) {
        (Mode::Daemon(braid), Some(scheduler)) => Some(Daemon::start(lab, braid, scheduler, "")?),
        _ => None,
    };
    let begin = lab.age();
    let downloads = if cut { steady() } else { mixed() };
    let records = thread::scope(|scope| {
        let cutter = scope.spawn(|| -> Result<()> {
            if cut {
                thread::sleep(CUT.0);
                lab.dark(0)?;
                thread::sleep(CUT.1 - CUT.0);
                lab.bright(0)?;
            }
            Ok(())
        });
        let records = match (mode, scheduler) {
            (Mode::Run(braid), Some(scheduler)) => {
                workload::run_in_one(web, &downloads, LIMIT, |program| run_under(lab, braid, scheduler, program))
            }
            _ => workload::run(web, &downloads, LIMIT, |program| lab.client().command(program)),
        };
        cutter.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).and(records)
    })?;
    let end = lab.age();
    drop(daemon);
    let rates = |link| Ok(air::rates(&lab.samples(link)?, SAMPLES_A_STEP, begin.as_secs_f64(), end.as_secs_f64()));
    let links = (0..lab.links().len()).map(rates).collect::<Result<_>>()?;
    let name = lab.links()[0].name();
    let events = [(CUT.0, format!("{name} dark")), (CUT.1, format!("{name} back"))];
    let events = events.into_iter().filter(|_| cut).map(|(at, what)| (at.as_secs_f64(), what)).collect();
    Ok((records, Run { title, links, events }))
}

/// Large, medium and small downloads at once, and DBAS's two classes for some seconds.
fn mixed() -> Vec<Download> {
    let mut downloads = Vec::new();
    for (count, size) in [(4, 4_000_000), (10, 1_000_000), (20, 250_000)] {
        downloads.extend(workload::together(count, ByteCount::new(size)));
    }
    downloads.extend(workload::dbas(1.0, Duration::from_secs(6), 1));
    downloads.sort_by_key(|download| download.at);
    downloads
}

/// A continuous load of about 11 Mbit/s, which one link can carry.
fn steady() -> Vec<Download> {
    workload::poisson(&[(workload::DBAS_BROWSER.0, 13.0), (ByteCount::new(250_000), 4.5)], Duration::from_secs(13), 2)
}

fn describe(link: &LinkSpec) -> String {
    match link.down_rate() {
        Some(rate) => format!("{} ({rate})", link.name()),
        None => link.name().to_owned(),
    }
}

/// Path of the `braid` program: beside this one.
pub fn beside(program: &Path) -> Option<PathBuf> {
    let braid = program.parent()?.join("braid");
    braid.exists().then_some(braid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::Rate;

    #[test]
    fn the_table_compares_with_the_first_of_its_kind() {
        let outcome = |scheduler: &str, cut, mbps| Outcome {
            scheduler: scheduler.to_owned(),
            cut,
            summary: Summary {
                complete: 3,
                failed: 0,
                goodput: Rate::from_mbps(mbps),
                mean_time: Duration::from_millis(1500),
                makespan: Duration::from_secs(9),
            },
        };
        let table = table(&[outcome("only-one", false, 18), outcome("max-throughput", false, 36), outcome("only-one", true, 5)]);
        let lines: Vec<_> = table.lines().collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[1].ends_with("1.00x") && lines[2].ends_with("2.00x") && lines[3].ends_with("1.00x"), "{table}");
        assert!(lines[3].contains("dark"), "{table}");
    }

    #[test]
    fn the_work_fits_the_time() {
        let bytes = |downloads: &[Download]| downloads.iter().map(|d| d.size.get()).sum::<u64>();
        assert!((30_000_000..40_000_000).contains(&bytes(&mixed())), "{}", bytes(&mixed()));
        let rate = ByteCount::new(bytes(&steady())).per(Duration::from_secs(13));
        assert!((mbps(8)..mbps(14)).contains(&rate), "{rate}");
    }
}
