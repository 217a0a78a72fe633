//! Reads, solves and shows instances of the user's.

use std::fmt::Display;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use braid_decide::fair;
use braid_decide::operetta::{InstanceResult, solve_instance};
use braid_model::Rate;
use braid_sim::fairness;

use crate::cli::Instance;
use crate::table::{Page, cell, numbers, percent, words};

/// Maximum size of an instance file in bytes.
const MAX_SIZE: u64 = 64 << 20;

/// `braid sim fair`.
pub(super) fn fair(wanted: &Instance) -> anyhow::Result<ExitCode> {
    let instance = match fair::instance::Instance::read(&read(&wanted.instance)?) {
        Ok(instance) => instance,
        Err(error) => return Ok(refuse(&wanted.instance, &error)),
    };
    match fairness::solve_instance(&instance) {
        Ok(report) => crate::print(wanted.json, &report, show_fair)?,
        Err(error) => return Ok(refuse(&wanted.instance, &error)),
    }
    Ok(ExitCode::SUCCESS)
}

fn show_fair(page: &mut Page<'_>, report: &fair::instance::Report) -> io::Result<()> {
    let rate = |bps: Option<&f64>| cell(bps.map(|bps| Rate::from_bps(bps.round() as u64)));
    let row = |(flow, bps): (&String, &f64)| {
        let reached = |midrr: &fair::instance::MidrrReport| rate(midrr.rates_bps.get(flow));
        vec![cell(Some(flow)), rate(Some(bps)), reached(&report.midrr), reached(&report.midrr_flags)]
    };
    let rows: Vec<_> = report.rates_bps.iter().map(row).collect();
    page.table(&[words("FLOW"), numbers("MAX-MIN"), numbers("MIDRR"), numbers("WITH FLAGS")], &rows, "no flows")?;
    let deviation = |midrr: &fair::instance::MidrrReport| midrr.max_relative_deviation * 100.0;
    let (counted, flagged) = (deviation(&report.midrr), deviation(&report.midrr_flags));
    page.line(format!(
        "largest deviation of miDRR: {counted:.2} %; of the thesis's, with one service flag a flow and link: {flagged:.2} %"
    ))?;
    page.line("")?;
    let row = |cluster: &fair::instance::ClusterReport| {
        vec![cell(Some(cluster.flows.join(" "))), cell(Some(cluster.links.join(" "))), rate(Some(&cluster.rate_per_weight_bps))]
    };
    let rows: Vec<_> = report.clusters.iter().map(row).collect();
    page.table(&[words("CLUSTER"), words("LINKS"), numbers("RATE PER WEIGHT")], &rows, "no clusters")
}

/// `braid sim operetta`.
pub(super) fn operetta(wanted: &Instance) -> anyhow::Result<ExitCode> {
    match solve_instance(&read(&wanted.instance)?) {
        Ok(result) => crate::print(wanted.json, &result, show_operetta)?,
        Err(error) => return Ok(refuse(&wanted.instance, &error)),
    }
    Ok(ExitCode::SUCCESS)
}

fn show_operetta(page: &mut Page<'_>, result: &InstanceResult) -> io::Result<()> {
    let rate = |bps: f64| Rate::from_bps(bps as u64);
    match &result.assignment {
        Some(link) => page.line(format!("the new stream goes to {link}"))?,
        None => page.line("the new stream is spread as packets are")?,
    }
    let reached = if result.feasible { "reached" } else { "not reached" };
    page.line(format!("throughput {}, target {} ({reached})", rate(result.throughput_bps), rate(result.target_bps)))?;
    page.line(format!("energy {:.3} J", result.energy_j))?;
    let rows: Vec<_> = result.weights.iter().map(|(link, share)| vec![cell(Some(link)), cell(percent(Some(*share)))]).collect();
    page.table(&[words("LINK"), numbers("PACKETS")], &rows, "no links")
}

/// Reads a file, or standard input for `-`.
fn read(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let name = name_of(path);
    let file: Box<dyn Read> = if is_standard_input(path) {
        Box::new(io::stdin())
    } else {
        let remedy = || format!("cannot open {name}; name a file with an instance, or - for standard input");
        Box::new(std::fs::File::open(path).with_context(remedy)?)
    };
    let read = file.take(MAX_SIZE + 1).read_to_string(&mut text).with_context(|| format!("cannot read {name} as text"))?;
    anyhow::ensure!(read as u64 <= MAX_SIZE, "{name} is larger than {} MiB, the limit for an instance", MAX_SIZE >> 20);
    Ok(text)
}

fn is_standard_input(path: &Path) -> bool {
    path == Path::new("-")
}

fn name_of(path: &Path) -> String {
    if is_standard_input(path) { "standard input".to_owned() } else { path.display().to_string() }
}

/// Exit status 2: the input is invalid.
fn refuse(path: &Path, error: &impl Display) -> ExitCode {
    let _ = writeln!(io::stderr(), "braid: {}: {error}", name_of(path));
    ExitCode::from(2)
}
