//! A link is cut during a bonded download: the gap in delivery, and the time until the link is used again.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::ByteCount;
use serde_json::json;

use super::origin::{Origin, TcpVariant};
use super::{Bonded, Settings, allow_multipath};
use crate::bench::cut::switch;
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::{median, worst};
use crate::lab::Lab;
use crate::relay::await_paths;
use crate::spec::{LinkSpec, mbps, ms};

/// Mbit/s, and the RTT in milliseconds.
const LINKS: [(u64, u64); 2] = [(20, 10), (10, 60)];
/// Before the cut, without the link, and with it again.
const SPANS: [Duration; 3] = [Duration::from_secs(3), Duration::from_secs(3), Duration::from_secs(5)];
/// A link that has carried this much since its return carries data, not only probes.
const DATA: ByteCount = ByteCount::new(50_000);
/// Aims: seconds until a returned link carries data, and between deliveries after its return.
const BACK: (f64, f64) = (1.0, 0.150);

/// Transport of the download, and kind of the failure.
#[derive(Debug, Clone, Copy)]
struct Case {
    who: &'static str,
    variant: TcpVariant,
    victim: usize,
    /// Whether the link also loses its carrier.
    pulled: bool,
}

impl Case {
    fn title(&self) -> String {
        let (rate, round_trip) = LINKS[self.victim];
        let how = if self.pulled { "carrier lost" } else { "dark" };
        format!("{}: {rate} Mbit/s, {round_trip} ms: {how}", self.who)
    }

    /// Aim for the longest gap, in seconds.
    fn aim(&self) -> f64 {
        let round_trip = |link: usize| LINKS[link].1 as f64 / 1e3;
        if self.pulled { round_trip(1 - self.victim) + 0.040 } else { round_trip(0) + round_trip(1) + 0.080 }
    }
}

/// Seconds.
#[derive(Debug, Clone, Copy)]
struct Outcome {
    /// Mbit/s in the last second before the cut.
    before: f64,
    /// The longest gap between deliveries while the link was away.
    gap: f64,
    /// Until it carried data again; `None` if it did not at all.
    back: Option<f64>,
    /// The longest gap after its return.
    gap_after: f64,
}

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-cut",
        "A link is cut during one download",
        "Two links, 20 Mbit/s with an RTT of 10 ms and 10 Mbit/s with one of 60 ms; one download through the relay, whose bytes are compared with \
         the original. After 3 s one link goes dark (its carrier stays) or loses its carrier, for 3 s. Gap: the longest time without data for the \
         program, from the cut on, and from the link's return on. Carries data: the time from its return until it has carried 50 kB. For \
         comparison with the dark links: the kernel's multipath TCP with BBR.",
    );
    let count = if settings.quick { 2 } else { 10 };
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for multipath in [false, true] {
        for (case, outcomes) in measure(settings, multipath, count)? {
            let of = |figure: fn(&Outcome) -> f64| outcomes.iter().map(figure).collect::<Vec<_>>();
            let (gaps, after) = (of(|o| o.gap), of(|o| o.gap_after));
            let backs = of(|o| o.back.unwrap_or(f64::INFINITY));
            let figures = [median(&gaps), worst(&gaps), median(&backs), worst(&backs), median(&after), worst(&after)].map(shown);
            let before = format!("{:.1}", median(&of(|o| o.before)));
            rows.push([case.title(), before].into_iter().chain(figures).collect());
            raw.push(json!({ "case": case.title(), "before_mbps": of(|o| o.before), "gap_s": gaps, "back_s": of(|o| o.back.unwrap_or(-1.0)), "gap_after_s": after }));
            if !multipath {
                judge(&case, median(&gaps), median(&backs), worst(&after), &mut report);
            }
        }
    }
    let head = "what | Mbit/s before | gap: median | worst | carries data again: median | worst | gap after the return: median | worst";
    report.table(format!("{count} cuts each:"), head, rows);
    report.raw = json!(raw);
    Ok(report)
}

fn shown(seconds: f64) -> String {
    if seconds.is_finite() { format!("{seconds:.3} s") } else { format!("not in {} s", SPANS[2].as_secs()) }
}

fn judge(case: &Case, gap: f64, back: f64, after: f64, report: &mut Report) {
    let title = case.title();
    report.aim(format!("{title}: a gap of at most {:.3} s (median)", case.aim()), shown(gap), gap <= case.aim());
    report.aim(format!("{title}: carries data within {} s of its return (median)", BACK.0), shown(back), back <= BACK.0);
    report.aim(format!("{title}: no gap over {} s after it", BACK.1), shown(after), after <= BACK.1);
}

/// Every case of Braid, or of multipath TCP, in a separate lab.
fn measure(settings: &Settings, multipath: bool, count: usize) -> Result<Vec<(Case, Vec<Outcome>)>> {
    let links = LINKS.iter().zip(["wlan0", "lte0"]);
    let links = links.map(|((rate, round_trip), name)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(*round_trip) / 2));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let (who, variant) = if multipath { ("MPTCP BBR", TcpVariant::multipath("bbr")) } else { ("Braid", TcpVariant::PLAIN) };
    let origin = Origin::start(&lab, 10, 8080, variant)?;
    let bonded = if multipath {
        allow_multipath(&lab)?;
        None
    } else {
        Some(Bonded::start(settings, &lab)?)
    };
    let mut cases = Vec::new();
    for pulled in if multipath { &[false][..] } else { &[false, true] } {
        for victim in 0..LINKS.len() {
            let case = Case { who, variant, victim, pulled: *pulled };
            let mut outcomes = Vec::new();
            for number in 0..count {
                if let Some(bonded) = &bonded {
                    await_paths(&lab, &bonded.daemon)?;
                }
                let outcome = one(&lab, &origin, &case).with_context(|| format!("{}, cut {number}", case.title()))?;
                progress(&format!("{}, {number}: {outcome:?}", case.title()));
                outcomes.push(outcome);
            }
            cases.push((case, outcomes));
        }
    }
    Ok(cases)
}

fn one(lab: &Lab, origin: &Origin, case: &Case) -> Result<Outcome> {
    let arrivals = Mutex::new(Vec::new());
    let whole: Duration = SPANS.iter().sum();
    let note = |count| arrivals.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((Instant::now(), count));
    let download = || lab.client().run(|| origin.get(case.variant, ByteCount::new(1 << 40), whole + ms(500), note))?;
    let (cut, returned, back) = thread::scope(|scope| -> Result<_> {
        let download = scope.spawn(download);
        thread::sleep(SPANS[0]);
        let cut = Instant::now();
        switch(lab, case.victim, case.pulled, false)?;
        thread::sleep(SPANS[1]);
        let before = lab.counters(case.victim)?.down.delivered_bytes;
        let returned = Instant::now();
        switch(lab, case.victim, case.pulled, true)?;
        let mut back = None;
        while returned.elapsed() < SPANS[2] {
            let now = lab.counters(case.victim)?.down.delivered_bytes;
            if back.is_none() && now.saturating_sub(before) >= DATA {
                back = Some(returned.elapsed().as_secs_f64());
            }
            thread::sleep(ms(5));
        }
        download.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((cut, returned, back))
    })?;
    let arrivals = arrivals.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (last, bytes) = (cut - Duration::from_secs(1)..cut, |(_, count): &(Instant, usize)| *count as f64);
    let before = arrivals.iter().filter(|(at, _)| last.contains(at)).map(bytes).sum::<f64>() * 8.0 / 1e6;
    ensure!(before > 0.0, "nothing came in the second before the cut");
    let arrivals: Vec<Instant> = arrivals.into_iter().map(|(at, _)| at).collect();
    Ok(Outcome { before, gap: gap(&arrivals, cut, returned), back, gap_after: gap(&arrivals, returned, returned + SPANS[2]) })
}

/// The longest time, in seconds, between two of `arrivals` (in order) that lies in the span at least in part; its end counts as an arrival.
pub(in crate::bench) fn gap(arrivals: &[Instant], from: Instant, to: Instant) -> f64 {
    let ends = arrivals.iter().copied().filter(|at| *at < to).chain([to]);
    let gaps = arrivals.iter().zip(ends.skip(1)).filter(|(_, end)| *end > from).map(|(start, end)| end.saturating_duration_since(*start));
    gaps.max().unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_where_it_touches_the_span() {
        let zero = Instant::now();
        let at = |millis: u64| zero + ms(millis);
        let arrivals = [0, 500, 1000, 1100, 1400, 1500].map(at);
        assert_eq!(gap(&arrivals, at(1050), at(1500)), 0.3);
        assert_eq!(gap(&arrivals, at(600), at(1500)), 0.5);
        assert_eq!(gap(&arrivals, at(1200), at(2500)), 1.0);
        assert_eq!(gap(&[], at(0), at(1)), 0.0);
    }

    #[test]
    fn a_link_that_never_returned_is_reported() {
        let case = Case { who: "Braid", variant: TcpVariant::PLAIN, victim: 0, pulled: true };
        assert!((case.aim() - 0.1).abs() < 1e-9);
        let mut report = Report::new("bond-cut", "", "");
        judge(&case, 0.2, f64::INFINITY, 0.1, &mut report);
        assert_eq!(report.aims.iter().map(|aim| aim.met).collect::<Vec<_>>(), [false, false, true]);
        assert_eq!(report.aims[1].measured, "not in 5 s");
    }
}
