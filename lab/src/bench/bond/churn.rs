//! Links fail and return at random during downloads and a session, and then all at once.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::Settings;
use crate::bench::progress;
use crate::bench::report::Report;
use crate::churn::{Outcome, Phase, Plan, run as churn};

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-churn",
        "Links fail and return during downloads and an SSH session",
        "Three links, 20, 10 and 6 Mbit/s with RTTs of 10, 50 and 100 ms. Twenty downloads by curl from nginx, each of a different file, and an \
         SSH session with sshd in which a line is typed every 100 ms, all through the relay. Every 0.15 to 2.5 s a random link fails (randomly \
         goes dark or loses its carrier) or returns; at least one link always works. Then all links return, twenty more downloads start, and after \
         2 s all links go dark at once. Received files are compared by SHA-256; lines must return complete and in order. Without a byte: the \
         longest time in which no download received data, and in which one of them received none. With fewer links, each of twenty downloads waits \
         longer for its turn.",
    );
    let (span, dark) = if settings.quick { (15, 10) } else { (60, 30) };
    let plan = Plan { seed: settings.seed, downloads: 20, churn: Duration::from_secs(span), dark: Duration::from_secs(dark) };
    progress(&format!("seed {}", plan.seed));
    let outcome = churn(&settings.braid, plan, |deaths, phase| {
        add(&title(&plan, deaths), phase, &mut report);
        settings.keep(&report)
    })?;
    report_results(&plan, &outcome, &mut report);
    Ok(report)
}

fn title(plan: &Plan, deaths: usize) -> String {
    format!("{deaths} deaths in {} s (seed {})", plan.churn.as_secs(), plan.seed)
}

fn add(title: &str, phase: &Phase, report: &mut Report) {
    progress(&format!("{title}: {phase}"));
    let times = [phase.took, phase.all_stalled, phase.one_stalled, phase.echo].map(|span| format!("{:.2} s", span.as_secs_f64()));
    let row = [title.to_owned(), format!("{:.1} MB", phase.moved.get() as f64 / 1e6)].into_iter().chain(times).collect();
    let head = "what | downloaded | in | without a byte: all | one | longest wait for an echo";
    report.row("Twenty downloads and a session at a time:", head, row);
}

/// Adds the row of the dark phase and the aim.
fn report_results(plan: &Plan, outcome: &Outcome, report: &mut Report) {
    add(&format!("all dark for {} s", plan.dark.as_secs()), &outcome.phases[1], report);
    let measured = if outcome.failures.is_empty() { format!("all, and {} lines", outcome.echoed) } else { outcome.failures.join("; ") };
    report.aim("every download complete and byte-exact, the session alive, no line lost", measured, outcome.failures.is_empty());
    let raw = |phase: &Phase| {
        json!({
            "bytes": phase.moved.get(), "took_s": phase.took.as_secs_f64(), "all_stalled_s": phase.all_stalled.as_secs_f64(),
            "one_stalled_s": phase.one_stalled.as_secs_f64(), "echo_s": phase.echo.as_secs_f64(),
        })
    };
    report.raw = json!({
        "seed": plan.seed, "deaths": outcome.deaths, "echoed": outcome.echoed, "failures": outcome.failures,
        "phases": outcome.phases.iter().map(raw).collect::<Vec<_>>(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use braid_model::ByteCount;

    #[test]
    fn what_was_lost_is_told() {
        let second = Duration::from_secs(1);
        let phase = Phase { moved: ByteCount::new(5_000_000), took: second, all_stalled: second, one_stalled: second, echo: second };
        let mut outcome = Outcome { deaths: 7, echoed: 600, phases: [phase; 2], failures: Vec::new() };
        let plan = Plan { seed: 3, downloads: 20, churn: second * 60, dark: second * 30 };
        let mut report = Report::new("bond-churn", "", "");
        add(&title(&plan, 7), &phase, &mut report);
        report_results(&plan, &outcome, &mut report);
        assert!(report.tables[0].rows.len() == 2 && report.aims[0].met && report.tables[0].rows[0][0].contains("seed 3"), "{report:?}");
        outcome.failures.push("download 4: changed".to_owned());
        report_results(&plan, &outcome, &mut report);
        assert!(!report.aims[1].met && report.aims[1].measured.contains("download 4"), "{report:?}");
    }
}
