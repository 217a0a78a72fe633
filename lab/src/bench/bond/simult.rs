//! The kernel's own test of multipath TCP (`tools/testing/selftests/net/mptcp/simult_flows.sh`), applied to the bond.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use braid_model::ByteCount;
use serde_json::json;

use super::origin::{Origin, TcpVariant};
use super::{Bonded, Settings};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::{median, worst};
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};

/// A link: Mbit/s, and milliseconds one way.
type RateDelay = (u64, u64);

const CASES: [[RateDelay; 2]; 5] = [[(10, 1), (10, 1)], [(10, 1), (10, 50)], [(30, 1), (10, 1)], [(30, 1), (10, 50)], [(30, 50), (10, 1)]];
const SIZE: ByteCount = ByteCount::new(16 << 20);
const DIRECTIONS: [&str; 2] = ["download", "upload"];

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-simult",
        "The kernel's test of multipath TCP",
        "16 MiB over two links through the relay. The limit is size / (sum of the rates) x 10/9 + 450 ms, as in the kernel's own test of multipath \
         TCP (simult_flows.sh): a tenth for headers, the rest for start and end. Every run has a new lab, relay and daemon without learnt state. \
         The upload follows the download, from an end that has not sent yet.",
    );
    let count = if settings.quick { 1 } else { 5 };
    let caption = format!("{count} times each:");
    for case in &CASES {
        let runs = (0..count).map(|seed| one(settings, case, seed).with_context(|| title(case))).collect::<Result<Vec<_>>>()?;
        for (way, direction) in DIRECTIONS.iter().enumerate() {
            let took: Vec<f64> = runs.iter().map(|run| run[way]).collect();
            let (what, limit) = (format!("{}, {direction}", title(case)), limit(case));
            progress(&format!("{what}: {took:.2?} s, at most {limit:.2}"));
            report.row(
                &caption,
                "links (one way) | | median | worst | allowed",
                vec![title(case), (*direction).to_owned(), shown(median(&took)), shown(worst(&took)), shown(limit)],
            );
            report.aim(format!("{what}: within {}, every time", shown(limit)), shown(worst(&took)), worst(&took) <= limit);
            report.measured(json!({ "case": title(case), "direction": direction, "seconds": took, "limit": limit }));
        }
        settings.keep(&report)?;
    }
    Ok(report)
}

fn title(case: &[RateDelay; 2]) -> String {
    case.map(|(rate, delay)| format!("{rate} Mbit/s ({delay} ms)")).join(" + ")
}

fn shown(seconds: f64) -> String {
    format!("{seconds:.2} s")
}

/// Seconds that a transfer may take.
fn limit(case: &[RateDelay; 2]) -> f64 {
    let sum: u64 = case.iter().map(|(rate, _)| rate).sum();
    SIZE.get() as f64 * 8.0 / (sum as f64 * 1e6) * 10.0 / 9.0 + 0.450
}

/// How many seconds the download and the upload take.
fn one(settings: &Settings, case: &[RateDelay; 2], seed: u64) -> Result<[f64; 2]> {
    let links = case.iter().zip(["link0", "link1"]);
    let links = links.map(|((rate, delay), name)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(*delay)));
    let lab = links.fold(Lab::builder().rp_filter(2).seed(seed), |builder, link| builder.link(link)).start()?;
    let origin = Origin::start(&lab, 10, 8080, TcpVariant::PLAIN)?;
    let bonded = Bonded::start(settings, &lab)?;
    let patience = Duration::from_secs(60);
    let seconds = lab.client().run(|| -> Result<[f64; 2]> {
        let begin = Instant::now();
        origin.get(TcpVariant::PLAIN, SIZE, patience, |_| ())?;
        let down = begin.elapsed();
        let (_, up) = origin.put(TcpVariant::PLAIN, SIZE, patience)?;
        Ok([down, up].map(|took| took.as_secs_f64()))
    })?;
    drop(bonded);
    seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_the_kernels() {
        assert!((limit(&[(10, 1), (10, 1)]) - 7.907).abs() < 0.001);
        assert!((limit(&[(30, 1), (10, 50)]) - 4.178).abs() < 0.001);
        assert_eq!(title(&CASES[3]), "30 Mbit/s (1 ms) + 10 Mbit/s (50 ms)");
    }
}
