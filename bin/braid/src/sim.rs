//! `braid sim`: runs the papers' experiments, and instances of the user's.

mod instance;
mod progress;
mod run;

use std::io;
use std::process::ExitCode;

use anyhow::bail;
use braid_sim::experiment::{About, Experiment, Report, Setting};
use braid_sim::experiments;
use serde::Serialize;

use crate::cli::{Sampling, Sim, SimRun};
use crate::table::{Page, cell, words};

/// Runs the command.
pub(crate) fn run(command: &Sim) -> anyhow::Result<ExitCode> {
    match command {
        Sim::List { json } => list(*json)?,
        Sim::Run(wanted) => run_some(wanted)?,
        Sim::Report { out, sampling } => run::write_page(out, &measure(&experiments::all(), sampling)?)?,
        Sim::Fair(wanted) => return instance::fair(wanted),
        Sim::Operetta(wanted) => return instance::operetta(wanted),
    }
    Ok(ExitCode::SUCCESS)
}

/// Output of `braid sim list --json`.
#[derive(Serialize)]
struct List {
    experiments: Vec<&'static About>,
}

/// Output of `braid sim run --json`.
#[derive(Serialize)]
struct Results {
    experiments: Vec<Report>,
}

fn list(json: bool) -> io::Result<()> {
    let experiments = experiments::all().iter().map(|experiment| experiment.about()).collect();
    crate::print(json, &List { experiments }, |page: &mut Page<'_>, List { experiments }| {
        let columns = [words("NAME"), words("FIGURE"), words("SHOWS")];
        let row = |about: &&About| vec![cell(Some(about.name)), cell(Some(about.figure)), cell(Some(about.title))];
        let rows: Vec<_> = experiments.iter().map(row).collect();
        page.table(&columns, &rows, "no experiments")
    })
}

fn run_some(wanted: &SimRun) -> anyhow::Result<()> {
    let chosen = choose(&wanted.name)?;
    let reports = measure(&chosen, &wanted.sampling)?;
    if let Some(folder) = &wanted.out {
        run::write_files(folder, &reports)?;
    }
    let results = Results { experiments: reports };
    Ok(crate::print(wanted.json, &results, |page, results| run::show(page, &results.experiments, &wanted.sampling))?)
}

fn measure(experiments: &[&'static dyn Experiment], sampling: &Sampling) -> anyhow::Result<Vec<Report>> {
    let threads = sampling.threads.map_or_else(run::processors, std::num::NonZero::get);
    run::measure(experiments, Setting { runs: sampling.runs, seed: sampling.seed }, threads)
}

/// The experiments that a name selects.
fn choose(name: &str) -> anyhow::Result<Vec<&'static dyn Experiment>> {
    let all = experiments::all();
    if name == "all" {
        return Ok(all);
    }
    if let Some(found) = all.iter().find(|experiment| experiment.about().name == name) {
        return Ok(vec![*found]);
    }
    let likeness = |other: &str| strsim::jaro_winkler(name, other);
    let names = all.iter().map(|experiment| experiment.about().name).chain(["all"]);
    match names.max_by(|a, b| likeness(a).total_cmp(&likeness(b))) {
        Some(nearest) if likeness(nearest) > 0.6 => {
            bail!("there is no experiment {name:?}: did you mean {nearest:?}? `braid sim list` shows all")
        }
        _ => bail!("there is no experiment {name:?}: `braid sim list` shows all"),
    }
}
