//! Few long flows: whole connections cannot be split over links, but a bond can split them (DBAS, fig. 6).

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use braid_model::{ByteCount, Direction};
use serde_json::json;

use super::sums::course;
use super::{Bonded, Settings};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::Mean;
use crate::bench::whole::warm_up;
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;
use crate::workload::{self, DBAS_BULK, Download};

/// Mbit/s. The paper's, and links that differ.
const PAIRS: [[u64; 2]; 2] = [[2, 2], [2, 1]];
/// Short downloads a second beside the long one: none, and the paper's.
const SHORT: [f64; 2] = [0.0, 0.25];
/// More than any run moves.
const LONG: ByteCount = ByteCount::new(1_000_000_000);
/// Number of bulk flows per link during the warm-up, and their duration.
const WARM_UP: (usize, Duration) = (3, Duration::from_secs(8));
/// Below the sum of the links' rates at most, in the paper's words "9% difference in the worst case".
const OF_SUM: f64 = 0.91;
/// The long flow alone on connections is a single link's within this.
const SAME: f64 = 0.05;

/// Transport of the flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Method {
    Single,
    Connections,
    Packets,
}

const METHODS: [Method; 3] = [Method::Single, Method::Connections, Method::Packets];

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Single => "one link (only-one)",
            Self::Connections => "connections (max-throughput)",
            Self::Packets => "packets (the bond)",
        }
    }
}

/// Links, and short downloads a second.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Case {
    rates: [u64; 2],
    short: f64,
}

impl Case {
    fn title(&self) -> String {
        let beside = if self.short > 0.0 { format!("short ones at {}/s beside it", self.short) } else { "alone".to_owned() };
        format!("{} + {} Mbit/s, {beside}", self.rates[0], self.rates[1])
    }

    fn sum(&self) -> f64 {
        self.rates.iter().sum::<u64>() as f64
    }

    fn downloads(&self, span: Duration, seed: u64) -> Vec<Download> {
        let long = Download { at: Duration::ZERO, size: LONG };
        [vec![long], workload::poisson(&[(DBAS_BULK.0, self.short)], span, seed)].concat()
    }
}

/// One run's result.
#[derive(Debug, Clone)]
struct Found {
    case: Case,
    method: Method,
    seed: u64,
    /// Mbit/s of payload within the span, of all downloads.
    goodput: f64,
    /// Mbit/s that each link carried, second by second.
    course: Vec<Vec<f64>>,
}

/// Goodputs by seed.
type Outcomes = BTreeMap<Method, Vec<f64>>;

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-few",
        "Few long flows",
        "DBAS's fig. 6 with real programs: one endless download by curl from nginx, alone, and together with short downloads of 0.285 MB that \
         start in a Poisson process, over two links with 25 ms each way and queues of 100 ms, 64 kB at least. Goodput is the payload of all \
         downloads in a span of 20 s (15 s with --quick), over that span. The runs alternate between one link (only-one), connections \
         (max-throughput) and packets, through `braid relay`. Capacities are learnt in a warm-up as above. Every pair of links and seed has its \
         own lab; the labs run in parallel. Means over seeds ± standard deviation.",
    );
    let (seeds, span) = if settings.quick { (1, Duration::from_secs(15)) } else { (3, Duration::from_secs(20)) };
    let labs: Vec<([u64; 2], u64)> = PAIRS.iter().flat_map(|rates| (0..seeds).map(|number| (*rates, settings.seed + number))).collect();
    let part = Mutex::new(report.clone());
    let keep = |found: &Found| -> Result<()> {
        let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
        let row = [found.case.title(), found.method.name().to_owned(), found.seed.to_string(), format!("{:.2}", found.goodput)];
        part.row("Single runs:", "links and load | by | seed | goodput, Mbit/s", row.to_vec());
        settings.keep(&part)
    };
    let found: Vec<Result<Vec<Found>>> = thread::scope(|scope| {
        let runs: Vec<_> = labs.iter().map(|(rates, seed)| scope.spawn(|| one_lab(settings, *rates, *seed, span, keep))).collect();
        runs.into_iter().map(|run| run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let found: Vec<_> = found.into_iter().collect::<Result<Vec<_>>>()?.concat();
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for case in PAIRS.iter().flat_map(|rates| SHORT.map(|short| Case { rates: *rates, short })) {
        let mut outcomes = Outcomes::new();
        for Found { method, seed, goodput, course, .. } in found.iter().filter(|found| found.case == case) {
            outcomes.entry(*method).or_default().push(*goodput);
            raw.push(json!({ "case": case.title(), "way": method.name(), "seed": seed, "mbps": goodput, "mbps_by_second": course }));
        }
        rows.extend(METHODS.map(|method| row(&case, method, &outcomes)));
        judge(&case, &outcomes, &mut report);
    }
    report.table("The long download, and those beside it:", "links and load | by | goodput, Mbit/s | of the sum | / one link", rows);
    report.notes.push(
        "The payload of full TCP packets is 0.965 of a link's rate, that of full bond packets about 0.95. Short downloads use the link that the \
         long one leaves free."
            .to_owned(),
    );
    report.raw = json!(raw);
    Ok(report)
}

fn one_lab(settings: &Settings, rates: [u64; 2], seed: u64, span: Duration, keep: impl Fn(&Found) -> Result<()>) -> Result<Vec<Found>> {
    let links = ["wlan0", "lte0"].iter().zip(rates).map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(25)));
    let lab = links.fold(Lab::builder().rp_filter(2).seed(seed), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    warm_up(&lab, &web, &settings.braid, WARM_UP)?;
    let mut found = Vec::new();
    for method in METHODS {
        // A joined relay stays joined, so packets come last.
        let _carriers: (Option<Daemon>, Option<Bonded>) = match method {
            Method::Single => (Some(Daemon::start(&lab, &settings.braid, "only-one", "")?), None),
            Method::Connections => (Some(Daemon::start(&lab, &settings.braid, "max-throughput", "")?), None),
            Method::Packets => (None, Some(Bonded::start(settings, &lab)?)),
        };
        for short in SHORT {
            let case = Case { rates, short };
            let began = lab.age();
            let records = workload::run_until(&web, &case.downloads(span, seed), span, |curl| lab.client().command(curl))?;
            let broken = records.iter().find(|record| !record.complete() && record.exit_code != Some(28));
            ensure!(broken.is_none(), "{}, {}: a download failed: {broken:?}", case.title(), method.name());
            let bytes: u64 = records.iter().map(|record| record.bytes.get()).sum();
            let goodput = ByteCount::new(bytes).per(span).bps() as f64 / 1e6;
            progress(&format!("{}, seed {seed}, {}: {goodput:.2} Mbit/s", case.title(), method.name()));
            let course = (0..rates.len()).map(|link| Ok(course(&lab.samples(link)?, began, Direction::Down))).collect::<Result<_>>()?;
            let one = Found { case, method, seed, goodput, course };
            keep(&one)?;
            found.push(one);
        }
    }
    for link in 0..rates.len() {
        let missed = lab.counters(link).with_context(|| format!("link {link}"))?.missed;
        ensure!(missed == 0, "the lab was too slow and lost {missed} frames: the machine is too busy to measure");
    }
    Ok(found)
}

fn row(case: &Case, method: Method, outcomes: &Outcomes) -> Vec<String> {
    let (mine, single) = (Mean::of(&outcomes[&method]), Mean::of(&outcomes[&Method::Single]));
    let goodput = format!("{:.2} ± {:.2}", mine.mean, mine.deviation);
    vec![
        case.title(),
        method.name().to_owned(),
        goodput,
        format!("{:.3}", mine.mean / case.sum()),
        format!("{:.2}", mine.mean / single.mean),
    ]
}

fn judge(case: &Case, outcomes: &Outcomes, report: &mut Report) {
    let [single, connections, packets] = METHODS.map(|method| Mean::of(&outcomes[&method]).mean);
    let title = case.title();
    if case.short == 0.0 {
        let ratio = connections / single;
        let aim = format!("{title}: connections the same as one link, within {:.0} %", SAME * 100.0);
        report.aim(aim, format!("{ratio:.3} times"), (ratio - 1.0).abs() <= SAME);
    }
    report.aim(format!("{title}: packets beat connections"), format!("{:.2} times", packets / connections), packets > connections);
    let share = packets / case.sum();
    report.aim(format!("{title}: packets within 9 % of the sum"), format!("{:.1} % below", (1.0 - share) * 100.0), share >= OF_SUM);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_long_download_comes_first_and_short_ones_as_drawn() {
        let span = Duration::from_secs(400);
        let downloads = Case { rates: [2, 2], short: 0.25 }.downloads(span, 1);
        assert_eq!(downloads[0], Download { at: Duration::ZERO, size: LONG });
        assert!((80..120).contains(&downloads.len()) && downloads[1..].iter().all(|short| short.size == DBAS_BULK.0));
        assert_eq!(Case { rates: [2, 2], short: 0.0 }.downloads(span, 1).len(), 1);
    }

    #[test]
    fn every_shortfall_is_told() {
        let case = Case { rates: [2, 2], short: 0.0 };
        let outcomes = |single, connections, packets| {
            Outcomes::from([(Method::Single, vec![single]), (Method::Connections, vec![connections]), (Method::Packets, vec![packets])])
        };
        let mut report = Report::new("bond-few", "", "");
        judge(&case, &outcomes(1.9, 1.9, 3.7), &mut report);
        assert!(report.aims.len() == 3 && report.aims.iter().all(|aim| aim.met), "{:?}", report.aims);
        judge(&case, &outcomes(1.9, 1.5, 1.4), &mut report);
        assert!(report.aims[3..].iter().all(|aim| !aim.met), "{:?}", report.aims);
        judge(&Case { short: 0.25, ..case }, &outcomes(1.9, 2.4, 3.7), &mut report);
        assert_eq!(report.aims.len(), 8, "beside others connections may have more than one link");
        assert_eq!(row(&case, Method::Packets, &outcomes(2.0, 2.0, 3.8))[2..], ["3.80 ± 0.00", "0.950", "1.90"]);
    }
}
