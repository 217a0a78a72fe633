//! Runs experiments on all cores, and shows and writes the results.

use std::fs;
use std::io;
use std::panic;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::Context;
use braid_model::Time;
use braid_peer::keys::KeyPair;
use braid_peer::tls;
use braid_sim::Quic;
use braid_sim::coverage;
use braid_sim::experiment::{Experiment, Job, Judgement, Machine, Report, Sample, Samples, Sampling, Setting, Summary, conclude, markdown};

use super::progress::Progress;
use crate::cli;
use crate::table::{Page, Tone, cell, numbers, toned, words};

/// Number of threads that run at once on this machine.
pub(super) fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Measures all samples of `experiments`, and draws the conclusions. Results do not depend on `threads`: experiments that measure real time run one by
/// one, after all others.
pub(super) fn measure(experiments: &[&'static dyn Experiment], setting: Setting, threads: usize) -> anyhow::Result<Vec<Report>> {
    let timed = |place: &usize| experiments[*place].about().sampling == Sampling::Timed;
    let (alone, together): (Vec<usize>, Vec<usize>) = (0..experiments.len()).partition(timed);
    let jobs = |places: &[usize]| -> Vec<(usize, Job)> {
        places.iter().flat_map(|place| setting.jobs(experiments[*place]).into_iter().map(|job| (*place, job))).collect()
    };
    let (alone, together) = (jobs(&alone), jobs(&together));
    let count = |place| alone.iter().chain(&together).filter(|(of, _)| *of == place).count();
    let progress =
        Progress::new(experiments.iter().enumerate().map(|(place, experiment)| (experiment.about().name, count(place))).collect());

    let quic = quic()?;
    let mut samples: Vec<Vec<(Job, Sample)>> = experiments.iter().map(|_| Vec::new()).collect();
    for (place, sample) in spread(&together, threads, |(place, job)| {
        let sample = job.clone().measure_on(experiments[*place], &Machine { quic: Some(&quic), ..Machine::NONE });
        progress.step(*place);
        (*place, sample)
    }) {
        samples[place].push(sample);
    }
    // Timed measurements run alone, so that nothing else disturbs them.
    let begin = Instant::now();
    let clock = || Time::ZERO + begin.elapsed();
    for (place, job) in alone {
        samples[place].push(job.measure_on(experiments[place], &Machine { clock: &clock, quic: Some(&quic) }));
        progress.step(place);
    }
    let concluded = experiments.iter().zip(samples).map(|(experiment, samples)| conclude(*experiment, &setting, Samples::new(samples)));
    concluded.collect::<Result<_, _>>().context("this is a bug in Braid")
}

/// TLS configurations of a client and its relay, for experiments with real bonds.
fn quic() -> anyhow::Result<Quic> {
    let (mine, theirs) = (KeyPair::generate()?, KeyPair::generate()?);
    let client = tls::client(Some(&mine), tls::Expect::Pinned(theirs.public()))?;
    Ok(Quic { epoch: Instant::now(), client, server: tls::server(&theirs, tls::Clients::Keyed)? })
}

/// Applies `work` to all `items` on this many threads. The results are in the order of the items.
fn spread<T: Sync, A: Send>(items: &[T], threads: usize, work: impl Fn(&T) -> A + Sync) -> Vec<A> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut answers = Vec::new();
        while let Some((index, item)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|index| Some((index, items.get(index)?))) {
            answers.push((index, work(item)));
        }
        answers
    };
    let mut answers: Vec<(usize, A)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.clamp(1, items.len().max(1))).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_else(|cause| panic::resume_unwind(cause))).collect()
    });
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Writes the plots and results of each experiment into `folder`.
pub(super) fn write_files(folder: &Path, reports: &[Report]) -> anyhow::Result<()> {
    create(folder)?;
    write_plots(folder, reports)?;
    for report in reports {
        let mut text = serde_json::to_string_pretty(report)?;
        text.push('\n');
        write(&folder.join(format!("{}.json", report.about.name)), &text)?;
    }
    Ok(())
}

/// Writes a page with all experiments, and its plots, into `folder`.
pub(super) fn write_page(folder: &Path, reports: &[Report]) -> anyhow::Result<()> {
    let plots = folder.join("reproduction");
    create(&plots)?;
    write_plots(&plots, reports)?;
    write(&folder.join("reproduction.md"), &markdown(reports, "reproduction", &coverage::list(reports)))
}

fn write_plots(folder: &Path, reports: &[Report]) -> anyhow::Result<()> {
    reports.iter().flat_map(Report::plots).try_for_each(|(name, svg)| write(&folder.join(name), &svg))
}

fn create(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}; name a directory that can be written", folder.display()))
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}; name a directory that can be written", path.display()))
}

/// Shows the results as text.
pub(super) fn show(page: &mut Page<'_>, reports: &[Report], sampling: &cli::Sampling) -> io::Result<()> {
    page.line(format!("seed {}, {} runs of each random experiment", sampling.seed, sampling.runs))?;
    reports.iter().try_for_each(|report| show_one(page, report))
}

fn show_one(page: &mut Page<'_>, report: &Report) -> io::Result<()> {
    let about = report.about;
    page.line("")?;
    page.toned(Tone::Strong, &format!("{}: {} ({})", about.name, about.title, about.figure))?;
    for chart in report.results.charts.iter().filter(|chart| chart.series.iter().all(|series| series.dots.len() <= 40)) {
        page.line("")?;
        page.toned(Tone::Faint, &format!("{}: {}", chart.title, axis(&chart.y)))?;
        let mut xs: Vec<f64> = chart.series.iter().flat_map(|series| &series.dots).map(|dot| dot.x).collect();
        xs.sort_by(f64::total_cmp);
        xs.dedup();
        let x = axis(&chart.x);
        let columns: Vec<_> = [words(&x)].into_iter().chain(chart.series.iter().map(|series| numbers(series.name.as_str()))).collect();
        let row = |x: &f64| {
            let place = chart.x.names.get(*x as usize).map_or_else(|| format!("{x}"), |name| name.replace('\n', " "));
            let dots = chart.series.iter().map(|series| series.dots.iter().find(|dot| dot.x == *x));
            let shown = dots.map(|dot| cell(dot.map(|dot| interval(dot.y, dot.half))));
            [cell(Some(place))].into_iter().chain(shown).collect()
        };
        page.table(&columns, &xs.iter().map(row).collect::<Vec<_>>(), "nothing")?;
    }
    for table in &report.results.tables {
        page.line("")?;
        page.toned(Tone::Faint, &table.title)?;
        let columns: Vec<_> = table.columns.iter().map(|column| words(column.as_str())).collect();
        let rows: Vec<_> = table.rows.iter().map(|row| row.iter().map(|text| cell(Some(text))).collect()).collect();
        page.table(&columns, &rows, "nothing")?;
    }
    comparisons(page, report)
}

fn comparisons(page: &mut Page<'_>, report: &Report) -> io::Result<()> {
    page.line("")?;
    let row = |comparison: &braid_sim::experiment::Comparison| {
        let tone = match comparison.judgement {
            Judgement::Met => Tone::Good,
            Judgement::Differs | Judgement::NotTested => Tone::Doubtful,
            Judgement::NotMet => Tone::Bad,
        };
        let texts = [comparison.claim.text, comparison.claim.paper, &comparison.here].map(|text| cell(Some(text)));
        texts.into_iter().chain([toned(Some(comparison.judgement), tone)]).collect()
    };
    let rows: Vec<_> = report.results.comparisons.iter().map(row).collect();
    page.table(&[words("CLAIM"), words("PAPER"), words("HERE"), words("VERDICT")], &rows, "the paper makes no claim")
}

fn axis(axis: &braid_sim::experiment::Axis) -> String {
    if axis.unit.is_empty() { axis.label.clone() } else { format!("{} ({})", axis.label, axis.unit) }
}

/// Formats a mean and its confidence interval with digits that fit its size.
fn interval(mean: f64, half: f64) -> String {
    let places = if mean.abs() >= 100.0 { 1 } else { 3 };
    let count = if half > 0.0 { 2 } else { 1 };
    format!("{:.places$}", Summary { count, mean, deviation: 0.0, half })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_items_with_any_number_of_threads() {
        let items: Vec<u64> = (0..1000).collect();
        for threads in [1, 2, 7] {
            assert_eq!(spread(&items, threads, |item| item * item), items.iter().map(|item| item * item).collect::<Vec<_>>());
        }
        assert!(spread(&[] as &[u64], 4, |item| *item).is_empty());
    }

    #[test]
    fn numbers_are_shown_with_their_interval() {
        assert_eq!(interval(1.0, 0.0), "1.000");
        assert_eq!(interval(123.45, 6.7), "123.5 ± 6.7");
    }
}
