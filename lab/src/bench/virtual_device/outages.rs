//! Figure 2.8: each link fails in turn while flows run through the virtual interface.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use braid_model::ByteCount;
use serde_json::{Value, json};

use super::flows::{Downloads, exchange, open_many};
use super::sum::{LINKS, two_links};
use super::{Carry, ECHO, Settings, Up, ensure_none_missed, progress};
use crate::bench::bond::cut::gap;
use crate::bench::cut::switch;
use crate::bench::report::Report;
use crate::lab::Lab;
use crate::responder::Responder;
use crate::web::Web;

/// More than any download receives.
const FILE: ByteCount = ByteCount::new(4_000_000_000);
/// A page that new connections request.
const PAGE: ByteCount = ByteCount::new(64);
/// Downloads, and UDP exchanges.
const COUNTS: (usize, u8) = (5, 4);

/// The links that are cut in each phase.
const PHASES: [Option<usize>; 5] = [None, Some(0), None, Some(1), None];

/// What became of the flows.
#[derive(Debug, Clone, Default)]
struct Outcome {
    /// Mbit/s that the downloads received in each phase.
    mbps: Vec<f64>,
    downloads_ended: u64,
    /// Exchanges without an answer in the second half of an outage.
    exchanges_ended: usize,
    /// The longest time in seconds without an answer to an exchange.
    silence: f64,
    connections: usize,
    connections_failed: usize,
    /// When they began, in seconds since the first phase did.
    failed_at: Vec<f64>,
    /// The longest time in seconds until the first byte of a connection that did not fail.
    wait: f64,
}

impl Outcome {
    fn json(&self) -> Value {
        json!({
            "mbps": self.mbps, "downloads_ended": self.downloads_ended, "exchanges_ended": self.exchanges_ended, "silence_s": self.silence,
            "connections": self.connections, "connections_failed": self.connections_failed, "failed_at_s": self.failed_at, "wait_s": self.wait,
        })
    }
}

pub(super) fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let span = Duration::from_secs(if settings.quick { 5 } else { 20 });
    for carry in Carry::ALL {
        for carrier in [false, true] {
            let title = format!("{}, {}", carry.name(), if carrier { "carrier lost" } else { "dark" });
            let outcome = one(settings, carry, carrier, span).with_context(|| format!("outages, {title}"))?;
            progress(&format!("outages, {title}: {outcome:?}"));
            report.measured(json!({ "outages": title, "outcome": outcome.json() }));
            tell(&title, carry, span, &outcome, report);
            settings.keep(report)?;
        }
    }
    Ok(())
}

fn one(settings: &Settings, carry: Carry, carrier: bool, span: Duration) -> Result<Outcome> {
    let lab = two_links()?;
    let web = Web::start(&lab)?;
    web.file(FILE)?;
    web.file(PAGE)?;
    let _responder = Responder::start(&lab)?;
    let up = Up::start(settings, &lab, carry)?;
    let stop = AtomicBool::new(false);
    let outcome = thread::scope(|scope| {
        let (lab, stop) = (&lab, &stop);
        let echo = |number| SocketAddr::from((Lab::internet(11 + number), ECHO));
        let exchanges: Vec<_> =
            (0..COUNTS.1).map(|number| scope.spawn(move || lab.client().run(|| exchange(echo(number), stop)))).collect();
        let path = format!("/{}.bin", PAGE.get());
        let connections = scope.spawn(move || lab.client().run(|| open_many((Lab::internet(15), 80).into(), &path, stop)));
        let driven = drive(lab, carrier, span);
        stop.store(true, Ordering::Relaxed);
        let answers = exchanges.into_iter().map(|it| Ok(it.join().expect("the thread does not panic")??)).collect::<Result<Vec<_>>>()?;
        let connections = connections.join().expect("the thread does not panic")?;
        let (times, mut outcome) = driven?;
        count(&times, &answers, &connections, &mut outcome);
        Ok::<_, anyhow::Error>(outcome)
    })?;
    drop(up);
    if !carrier {
        ensure_none_missed(&lab, 0..LINKS.len())?;
    }
    Ok(outcome)
}

/// Runs the downloads, and cuts the links. Returns the times at which the phases began, and the last one's end.
fn drive(lab: &Lab, carrier: bool, span: Duration) -> Result<(Vec<Instant>, Outcome)> {
    let downloads = Downloads::start(lab, COUNTS.0, FILE)?;
    let (mut times, mut outcome) = (vec![Instant::now()], Outcome::default());
    for cut in PHASES {
        if let Some(link) = cut {
            switch(lab, link, carrier, false)?;
        }
        let before = downloads.moved();
        let begin = Instant::now();
        thread::sleep(span);
        outcome.mbps.push((downloads.moved() - before) as f64 * 8.0 / 1e6 / begin.elapsed().as_secs_f64());
        if let Some(link) = cut {
            switch(lab, link, carrier, true)?;
        }
        times.push(Instant::now());
    }
    outcome.downloads_ended = downloads.broken();
    Ok((times, outcome))
}

fn count(times: &[Instant], answers: &[Vec<Instant>], connections: &[(Instant, Option<Duration>)], outcome: &mut Outcome) {
    let phases = || times.windows(2).map(|it| (it[0], it[1]));
    let outages: Vec<_> = phases().zip(PHASES).filter(|(_, cut)| cut.is_some()).map(|(phase, _)| phase).collect();
    let silent = |answers: &Vec<Instant>, (from, to): (Instant, Instant)| {
        let half = from + (to - from) / 2;
        !answers.iter().any(|at| (half..to).contains(at))
    };
    outcome.exchanges_ended = answers.iter().filter(|answers| outages.iter().any(|outage| silent(answers, *outage))).count();
    let (Some(first), Some(last)) = (times.first(), times.last()) else { return };
    outcome.silence = answers.iter().map(|answers| gap(answers, *first, *last)).fold(0.0, f64::max);
    outcome.connections = connections.len();
    let failed = connections.iter().filter(|(_, wait)| wait.is_none());
    outcome.failed_at = failed.map(|(at, _)| at.saturating_duration_since(*first).as_secs_f64()).collect();
    outcome.connections_failed = outcome.failed_at.len();
    outcome.wait = connections.iter().filter_map(|(_, wait)| *wait).max().unwrap_or_default().as_secs_f64();
}

fn tell(title: &str, carry: Carry, span: Duration, outcome: &Outcome, report: &mut Report) {
    let Outcome { mbps, downloads_ended, exchanges_ended, silence, connections, connections_failed, wait, .. } = outcome;
    let head = "what | Mbit/s of the downloads in the phases | downloads ended | UDP exchanges ended | longest silence | connections failed | longest wait of the others";
    let row = vec![
        title.to_owned(),
        mbps.iter().map(|rate| format!("{rate:.1}")).collect::<Vec<_>>().join(", "),
        format!("{downloads_ended} (of {})", COUNTS.0),
        format!("{exchanges_ended} of {}", COUNTS.1),
        format!("{silence:.2} s"),
        format!("{connections_failed} of {connections}"),
        format!("{wait:.2} s"),
    ];
    let [first, second] = LINKS;
    report.row(&format!("Outages of {} s (both links; without {first}; both; without {second}; both):", span.as_secs()), head, row);
    let (aim, ended) = match carry {
        // An established connection cannot change its link.
        Carry::Direct => ("no UDP exchange ends and no new connection fails", exchanges_ended + connections_failed),
        Carry::Bonded => ("no flow ends", exchanges_ended + connections_failed + *downloads_ended as usize),
    };
    report.aim(format!("outages, {title}: {aim}"), format!("{ended}"), ended == 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_that_end_in_an_outage_count() {
        let zero = Instant::now();
        let at = |seconds: f64| zero + Duration::from_secs_f64(seconds);
        let times: Vec<_> = (0..6).map(|number| at(f64::from(number) * 10.0)).collect();
        let all: Vec<_> = (0..500).map(|number| at(f64::from(number) / 10.0)).collect();
        // The first outage is from 10 to 20 s.
        let without = |from: f64, to: f64| all.iter().copied().filter(|it| !(at(from)..at(to)).contains(it)).collect::<Vec<_>>();
        let mut outcome = Outcome::default();
        let connections = [(at(1.0), Some(Duration::from_millis(30))), (at(11.0), None)];
        count(&times, &[all.clone(), without(10.05, 12.0), without(14.0, 20.5), without(35.0, 40.0)], &connections, &mut outcome);
        assert_eq!((outcome.exchanges_ended, outcome.connections, outcome.connections_failed, outcome.wait), (2, 2, 1, 0.03));
        assert!((outcome.silence - 6.6).abs() < 0.01, "{outcome:?}");
    }

    #[test]
    fn only_bonded_downloads_must_go_on() {
        let met = |carry, outcome: &Outcome| {
            let mut report = Report::new("virtual", "", "");
            tell("it", carry, Duration::from_secs(20), outcome, &mut report);
            report.aims[0].met
        };
        let broken = Outcome { downloads_ended: 2, ..Outcome::default() };
        assert!(met(Carry::Direct, &broken) && !met(Carry::Bonded, &broken));
        let failed = Outcome { connections_failed: 1, ..Outcome::default() };
        assert!(!met(Carry::Direct, &failed) && !met(Carry::Bonded, &failed));
    }
}
