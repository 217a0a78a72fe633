//! Figure 2.9: ten links that come up one after the other.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::ByteCount;
use serde_json::json;

use super::flows::Downloads;
use super::{Carry, Settings, Up, ensure_none_missed, progress};
use crate::bench::gateway::{LIMIT, PAYLOAD};
use crate::bench::report::Report;
use crate::bench::stats::Mean;
use crate::bench::whole::{WARM_UP, shown, warm_up};
use crate::lab::Lab;
use crate::responder::Responder;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;

/// Mbit/s, in the order in which the links come up. Their sum is 3.75 times the fastest.
const RATES: [u64; 10] = [8, 5, 20, 3, 11, 6, 2, 9, 7, 4];
/// Downloads at a time, and their size.
const DOWNLOADS: (usize, ByteCount) = (24, ByteCount::new(500_000));
/// Aim: the goodput over all links, over the fastest link's rate (thesis, 2.3.2).
const AIM: f64 = 3.0;

pub(super) fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let mut goodputs = Vec::new();
    for carry in Carry::ALL {
        let repeats = (0..if settings.quick { 1 } else { 3 }).map(|_| one(settings, carry));
        let repeats = repeats.collect::<Result<Vec<_>>>().with_context(|| format!("ten links, {}", carry.name()))?;
        report.measured(json!({ "ten_links": carry.name(), "mbps": repeats }));
        goodputs.push((0..RATES.len()).map(|step| Mean::of(&repeats.iter().map(|it| it[step]).collect::<Vec<_>>()).mean).collect());
    }
    tell(&goodputs, report);
    Ok(())
}

/// Mbit/s that the downloads received after each link came up.
fn one(settings: &Settings, carry: Carry) -> Result<Vec<f64>> {
    let link = |(number, rate): (usize, &u64)| LinkSpec::new(&format!("link{number}")).rate(mbps(*rate)).delay(ms(10));
    let lab = RATES.iter().enumerate().map(link).fold(Lab::builder(), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    let _responder = Responder::start(&lab)?;
    web.file(DOWNLOADS.1)?;
    progress(&format!("ten links, {}: learnt {}", carry.name(), shown(&warm_up(&lab, &web, &settings.braid, WARM_UP)?)));
    let up = Up::start(settings, &lab, carry)?;
    for link in 1..RATES.len() {
        lab.carrier(link, false)?;
    }
    await_links(&lab, &up, 1)?;
    let downloads = Downloads::start(&lab, DOWNLOADS.0, DOWNLOADS.1)?;
    let (step, counted) = if settings.quick { (6, 3) } else { (10, 6) };
    let [settle, counted] = [step - counted, counted].map(Duration::from_secs);
    let mut goodputs = Vec::new();
    for link in 0..RATES.len() {
        if link > 0 {
            lab.carrier(link, true)?;
            await_links(&lab, &up, link + 1)?;
        }
        thread::sleep(settle);
        let (before, begin) = (downloads.moved(), Instant::now());
        thread::sleep(counted);
        goodputs.push((downloads.moved() - before) as f64 * 8.0 / 1e6 / begin.elapsed().as_secs_f64());
    }
    let broken = downloads.broken();
    drop((downloads, up));
    progress(&format!("ten links, {}: {goodputs:.1?} Mbit/s, {broken} downloads ended early", carry.name()));
    // The first link alone never loses its carrier.
    ensure_none_missed(&lab, 0..1)?;
    Ok(goodputs)
}

/// Waits until so many links work.
fn await_links(lab: &Lab, up: &Up, wanted: usize) -> Result<()> {
    let begin = Instant::now();
    loop {
        let status = up.daemon().status(lab)?;
        let links = status["links"].as_array();
        let working = links.map_or(0, |links| links.iter().filter(|link| link["state"] == "up").count());
        if working == wanted {
            return Ok(());
        }
        ensure!(begin.elapsed() < LIMIT, "{working} links work after {LIMIT:?}, not {wanted}: {}", status["links"]);
        thread::sleep(Duration::from_millis(50));
    }
}

/// `goodputs`: Mbit/s after each step, by each [`Carry`].
fn tell(goodputs: &[Vec<f64>], report: &mut Report) {
    let mut sum = 0;
    let row = |(step, rate): (usize, &u64)| {
        sum += rate;
        let of_sum = |rate: f64| format!("{rate:.1} ({:.2})", rate / (sum as f64 * PAYLOAD));
        let cells = [(step + 1).to_string(), format!("{rate} Mbit/s"), format!("{sum} Mbit/s")];
        cells.into_iter().chain(goodputs.iter().map(|of| of_sum(of[step]))).collect()
    };
    let rows = RATES.iter().enumerate().map(row).collect();
    let names = Carry::ALL.map(|carry| format!("{}, Mbit/s (of the sum's payload)", carry.name()));
    report.table("Ten links:", &format!("links | added | sum | {}", names.join(" | ")), rows);
    let fastest = RATES.iter().max().copied().unwrap_or_default() as f64;
    for (carry, of) in Carry::ALL.into_iter().zip(goodputs) {
        let ratio = of.last().copied().unwrap_or_default() / fastest;
        report.aim(format!("ten links, {}: {AIM} times the rate of the fastest", carry.name()), format!("{ratio:.2}"), ratio >= AIM);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_step_is_compared_with_the_fastest_link() {
        let mut report = Report::new("virtual", "", "");
        let rising = |last: f64| (1..=10).map(|step| last * f64::from(step) / 10.0).collect::<Vec<_>>();
        tell(&[rising(61.0), rising(59.0)], &mut report);
        assert_eq!(report.aims.iter().map(|aim| aim.met).collect::<Vec<_>>(), [true, false]);
        assert_eq!(report.tables[0].rows.len(), 10);
        assert_eq!(report.tables[0].rows[9][2], "75 Mbit/s");
    }
}
