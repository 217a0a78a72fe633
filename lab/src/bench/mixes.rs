//! The papers' mixes of long and short downloads, under every scheduler.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use braid_model::ByteCount;
use serde_json::{Value, json};

use super::report::Report;
use super::stats::Mean;
use super::whole::{copy_of_curl, warm_up};
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;
use crate::workload::{self, DBAS_BROWSER, DBAS_BULK, Download, Record, Summary};

const SCHEDULERS: [&str; 4] = ["only-one", "round-robin", "weighted-round-robin", "max-throughput"];
/// Timeout of one download.
const LIMIT: Duration = Duration::from_secs(300);
/// Number of bulk flows per link during the warm-up, and their duration.
const WARM_UP: (usize, Duration) = (3, Duration::from_secs(8));

/// Poisson arrivals of two classes over two links.
struct Case {
    title: String,
    rates: [u64; 2],
    long: (ByteCount, f64),
    short: (ByteCount, f64),
    span: Duration,
}

/// One run's result.
struct Outcome {
    summary: Summary,
    long: f64,
    short: f64,
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "mixes",
        "Mixes of long and short downloads",
        "Poisson arrivals of two classes of downloads from nginx; each class is a separate program (a copy of curl). Goodput is the received data \
         over the time from the first start to the last end. DNIS: long downloads of 5 MB (the paper's 150 MB divided by 30) and short ones of 250 \
         KB over 11 and 10 Mbit/s, arrivals for 40 s. DBAS: 22.38 KB at 13/s and 0.285 MB at 1/s over 2 and 1 Mbit/s, which is 1.53 of the links' \
         capacity; and the same with lower arrival rates; arrivals for 20 s. only-one is the system's own choice, the faster link. Links have 10 \
         ms each way and queues of 100 ms, 64 kB at least. Every seed has its own lab. Capacities are learnt in a warm-up as above, demands during \
         the runs. The order of the schedulers differs by seed; all get the same arrivals. Failed downloads count with the bytes that they \
         received. The tables show means over seeds ± standard deviation; ratios are computed per seed.",
    );
    let seeds = if settings.quick { 2 } else { 5 };
    let mut raw = Vec::new();
    for case in cases(settings.quick) {
        let outcomes = measure(settings, &case, seeds)?;
        report_results(&case, &outcomes, &mut report);
        for (scheduler, seeds) in &outcomes {
            let runs = seeds.iter().map(|o| json!({ "summary": o.summary, "long_s": o.long, "short_s": o.short })).collect();
            raw.push(json!({ "case": case.title, "scheduler": scheduler, "seeds": Value::Array(runs) }));
        }
    }
    report.raw = Value::Array(raw);
    Ok(report)
}

fn cases(quick: bool) -> Vec<Case> {
    let seconds = |full| Duration::from_secs(if quick { 8 } else { full });
    let mut cases = Vec::new();
    for load in if quick { vec![0.6] } else { vec![0.3, 0.6, 0.9] } {
        // A third of the bytes in short downloads.
        let bytes = load * 21e6 / 8.0;
        let (long, short) = (ByteCount::new(5_000_000), ByteCount::new(250_000));
        let rate = |share: f64, size: ByteCount| bytes * share / size.get() as f64;
        let classes = ((long, rate(2.0 / 3.0, long)), (short, rate(1.0 / 3.0, short)));
        cases.push(Case { title: format!("DNIS at {load}"), rates: [11, 10], long: classes.0, short: classes.1, span: seconds(40) });
    }
    let offered = [DBAS_BROWSER, DBAS_BULK].map(|(size, rate)| size.get() as f64 * 8.0 * rate).iter().sum::<f64>() / 3e6;
    for load in if quick { vec![0.6] } else { vec![0.3, 0.6, 0.9, offered] } {
        let scaled = |(size, rate): (ByteCount, f64)| (size, rate * load / offered);
        let title = if load == offered { format!("DBAS as it was ({offered:.2})") } else { format!("DBAS at {load}") };
        cases.push(Case { title, rates: [2, 1], long: scaled(DBAS_BULK), short: scaled(DBAS_BROWSER), span: seconds(20) });
    }
    cases
}

/// Runs all seeds in parallel, each in its own lab. Returns the results by scheduler, in the order of the seeds.
fn measure(settings: &Settings, case: &Case, seeds: u64) -> Result<BTreeMap<&'static str, Vec<Outcome>>> {
    let by_seed: Vec<Result<Vec<(&str, Outcome)>>> = thread::scope(|scope| {
        let runs: Vec<_> = (0..seeds).map(|seed| scope.spawn(move || one_seed(settings, case, seed))).collect();
        runs.into_iter().map(|run| run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let mut outcomes: BTreeMap<&str, Vec<Outcome>> = BTreeMap::new();
    for seed in by_seed {
        for (scheduler, outcome) in seed? {
            outcomes.entry(scheduler).or_default().push(outcome);
        }
    }
    Ok(outcomes)
}

fn one_seed(settings: &Settings, case: &Case, seed: u64) -> Result<Vec<(&'static str, Outcome)>> {
    let links = ["wlan0", "lte0"].iter().zip(case.rates).map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(10)));
    let lab = links.fold(Lab::builder().seed(seed), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    warm_up(&lab, &web, &settings.braid, WARM_UP)?;
    let programs = [copy_of_curl(&lab, "long")?, copy_of_curl(&lab, "short")?];
    let downloads = workload::poisson(&[case.long, case.short], case.span, seed + 1);
    let mut outcomes = Vec::new();
    for turn in 0..SCHEDULERS.len() {
        let scheduler = SCHEDULERS[(turn + seed as usize) % SCHEDULERS.len()];
        let daemon = Daemon::start(&lab, &settings.braid, scheduler, "")?;
        let program = |download: &Download| &programs[usize::from(download.size != case.long.0)];
        let records = workload::run_each(&web, &downloads, LIMIT, |download| lab.client().command(program(download)))?;
        drop(daemon);
        let outcome = sum_up(&records, case);
        let Summary { goodput, mean_time, failed, .. } = outcome.summary;
        progress(&format!("{}, seed {seed}, {scheduler}: {goodput}, {:.2} s a download", case.title, mean_time.as_secs_f64()));
        for record in records.iter().filter(|record| !record.complete()) {
            progress(&format!("failed: {record:?}"));
        }
        ensure!(failed * 20 < records.len(), "{failed} of {} downloads failed under {scheduler}", records.len());
        outcomes.push((scheduler, outcome));
    }
    for link in 0..2 {
        let missed = lab.counters(link)?.missed;
        ensure!(missed == 0, "the lab was too slow and lost {missed} frames: the machine is too busy to measure");
    }
    Ok(outcomes)
}

fn sum_up(records: &[Record], case: &Case) -> Outcome {
    let of = |size: ByteCount| -> Vec<f64> { records.iter().filter(|r| r.size == size).map(|r| r.took().as_secs_f64()).collect() };
    Outcome { summary: workload::summarise(records), long: Mean::of(&of(case.long.0)).mean, short: Mean::of(&of(case.short.0)).mean }
}

fn report_results(case: &Case, outcomes: &BTreeMap<&str, Vec<Outcome>>, report: &mut Report) {
    let goodput = |scheduler: &str| -> Vec<f64> { outcomes[scheduler].iter().map(|o| o.summary.goodput.bps() as f64 / 1e6).collect() };
    let time = |scheduler: &str| -> Vec<f64> { outcomes[scheduler].iter().map(|o| o.summary.mean_time.as_secs_f64()).collect() };
    let row = |scheduler: &&str| {
        let class = |pick: fn(&Outcome) -> f64| Mean::of(&outcomes[scheduler].iter().map(pick).collect::<Vec<_>>()).mean;
        vec![
            (*scheduler).to_owned(),
            spread(&goodput(scheduler)),
            ratio(&goodput(scheduler), &goodput(SCHEDULERS[0])),
            spread(&time(scheduler)),
            ratio(&time(scheduler), &time(SCHEDULERS[0])),
            format!("{:.2} s", class(|o| o.long)),
            format!("{:.2} s", class(|o| o.short)),
            outcomes[scheduler].iter().map(|o| o.summary.failed).sum::<usize>().to_string(),
        ]
    };
    let [long, short] = [case.long, case.short].map(|(size, rate)| format!("{} at {rate:.2}/s", size));
    report.table(
        format!("{}: {long} and {short}, over {} and {} Mbit/s:", case.title, case.rates[0], case.rates[1]),
        "scheduler | goodput, Mbit/s | / only-one | mean time, s | / only-one | long | short | failed",
        SCHEDULERS.iter().map(row).collect(),
    );
    let best = "max-throughput";
    for (what, values, more) in [("goodput", SCHEDULERS.map(&goodput), true), ("mean time", SCHEDULERS.map(&time), false)] {
        let rivals = || SCHEDULERS.iter().zip(&values).filter(|(name, _)| **name != best);
        let ours = &values[SCHEDULERS.len() - 1];
        let (mut measured, mut met) = (Vec::new(), true);
        for (rival, theirs) in rivals() {
            let ratio = Mean::of_ratios(ours, theirs);
            let (low, high) = ratio.interval();
            met &= if more { high >= 1.0 } else { low <= 1.0 };
            measured.push(format!("{rival} {:.2} ± {:.2}", ratio.mean, ratio.half_width));
        }
        let title =
            format!("{}: max-throughput's {what} is first, or 1 lies in the 95 % interval of its ratio to every other's", case.title);
        report.aim(title, measured.join(", "), met);
    }
}

fn spread(values: &[f64]) -> String {
    let mean = Mean::of(values);
    format!("{:.2} ± {:.2}", mean.mean, mean.deviation)
}

fn ratio(over: &[f64], under: &[f64]) -> String {
    let mean = Mean::of_ratios(over, under);
    format!("{:.2} ± {:.2}", mean.mean, mean.deviation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_offer_the_load_they_are_named_after() {
        for case in cases(false) {
            let bits = |(size, rate): (ByteCount, f64)| size.get() as f64 * 8.0 * rate;
            let load = (bits(case.long) + bits(case.short)) / (case.rates.iter().sum::<u64>() as f64 * 1e6);
            let named: f64 = case.title.trim_end_matches(')').rsplit([' ', '(']).next().unwrap().parse().unwrap();
            assert!((load - named).abs() < 0.006, "{}: {load}", case.title);
        }
    }

    #[test]
    fn the_papers_rates_are_kept_where_nothing_is_scaled() {
        let case = cases(false).pop().unwrap();
        assert_eq!((case.long.0, case.short.0), (DBAS_BULK.0, DBAS_BROWSER.0));
        assert!((case.long.1 - 1.0).abs() < 1e-9 && (case.short.1 - 13.0).abs() < 1e-9);
    }

    #[test]
    fn max_throughput_is_judged_against_each_rival() {
        let case = &cases(true)[0];
        let outcome = |mbps_, seconds| Outcome {
            summary: Summary { complete: 1, failed: 0, goodput: mbps(mbps_), mean_time: Duration::from_secs(seconds), makespan: ms(1) },
            long: 1.0,
            short: 0.1,
        };
        let mut outcomes: BTreeMap<&str, Vec<Outcome>> = SCHEDULERS.map(|name| (name, vec![outcome(10, 4), outcome(12, 4)])).into();
        let mut report = Report::new("mixes", "", "");
        report_results(case, &outcomes, &mut report);
        assert!(report.aims.iter().all(|aim| aim.met), "equal is within noise: {:?}", report.aims);
        outcomes.insert("round-robin", vec![outcome(20, 2), outcome(24, 2)]);
        report_results(case, &outcomes, &mut report);
        assert!(report.aims[2..].iter().all(|aim| !aim.met), "{:?}", report.aims);
        assert_eq!(report.tables[0].rows.len(), 4);
    }
}
