//! How much of its links' sum one transfer gets, beside the kernel's multipath TCP.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::{Bytes, Rate};
use serde_json::{Value, json};

use super::origin::{Carrier, Origin};
use super::{Bonded, Settings, allow_multipath};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;

/// A link: Mbit/s, and its round trip in milliseconds.
type Link = (u64, u64);

/// Links, and what is wanted of them.
struct Case {
    title: &'static str,
    links: &'static [Link],
    /// The queue of each link in each direction, unless it is the laboratory's usual one.
    queue: Option<Bytes>,
    loss: f64,
    /// The share of the links' sum, less their loss, that is wanted.
    aim: f64,
    /// How many times the goodput of multipath TCP with CUBIC is wanted.
    times_cubic: Option<f64>,
}

impl Case {
    const fn new(title: &'static str, links: &'static [Link]) -> Self {
        Self { title, links, queue: None, loss: 0.0, aim: 0.93, times_cubic: None }
    }

    fn sum(&self) -> Rate {
        mbps(self.links.iter().map(|(rate, _)| rate).sum())
    }
}

const TEN: [Link; 10] = [(15, 10), (15, 10), (8, 50), (8, 50), (8, 50), (4, 80), (4, 80), (4, 80), (2, 200), (2, 200)];

const CASES: [Case; 7] = [
    Case::new("20 + 20 Mbit/s, 20 ms", &[(20, 20), (20, 20)]),
    Case::new("20 + 5 Mbit/s, 20 ms", &[(20, 20), (5, 20)]),
    Case::new("20 Mbit/s (10 ms) + 10 (100 ms)", &[(20, 10), (10, 100)]),
    Case { queue: Some(Bytes::new(1_000_000)), ..Case::new("20 + 5 Mbit/s, 5 ms, queues of 1 MB", &[(20, 5), (5, 5)]) },
    Case { aim: 0.90, ..Case::new("ten links of four kinds, 70 Mbit/s", &TEN) },
    Case { loss: 0.01, aim: 0.90, times_cubic: Some(4.0), ..Case::new("20 + 10 Mbit/s, 20 ms, 1 % loss", &[(20, 20), (10, 20)]) },
    Case { loss: 0.03, aim: 0.90, times_cubic: Some(8.0), ..Case::new("20 + 10 Mbit/s, 20 ms, 3 % loss", &[(20, 20), (10, 20)]) },
];
/// Of multipath TCP with BBR.
const OF_BBR: f64 = 0.98;

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond",
        "One transfer over all links",
        "One download by curl from nginx and one upload by `curl -T`, through `braid relay`, which runs on the server's machine; each as \
         long as the links' sum would carry in 20 s. Shares are payload over the sum of the links' rates, from curl's start to its end, \
         handshakes included; a packet's headers are part of the sum (a full TCP packet's payload is 0.965 of it, one of the bond's about \
         0.95). Beside them, over the same links in the same run, the kernel's multipath TCP from end to end with BBR and with CUBIC on \
         every subflow, the daemon stopped; those transfers are cut off after twice the time. Milliseconds are round trips; queues \
         hold 100 ms, 64 kB at least, unless said.",
    );
    let span = Duration::from_secs(if settings.quick { 10 } else { 20 });
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for case in &CASES {
        let outcomes = one(settings, case, span).with_context(|| case.title)?;
        for (direction, outcome) in ["download", "upload"].into_iter().zip(outcomes) {
            progress(&format!("{}, {direction}: {outcome:?}", case.title));
            rows.push(row(case, direction, &outcome));
            judge(case, direction, &outcome, &mut report);
            raw.push(json!({
                "case": case.title, "direction": direction, "sum_bps": case.sum().bps(), "braid_bps": outcome.braid.bps(),
                "mptcp_bbr_bps": outcome.bbr.bps(), "mptcp_cubic_bps": outcome.cubic.bps(), "paths": outcome.paths,
            }));
        }
    }
    let head = "links | | Braid, of the sum | MPTCP BBR | MPTCP CUBIC | Braid / MPTCP BBR | Braid / MPTCP CUBIC";
    report.table("Goodput of one transfer:", head, rows);
    report.notes.push("The kernel's multipath TCP uses nine of the ten links: it has eight endpoints at most beside the first.".to_owned());
    report.raw = json!(raw);
    Ok(report)
}

/// The goodputs of one direction.
#[derive(Debug)]
struct Outcome {
    braid: Rate,
    bbr: Rate,
    cubic: Rate,
    /// What the daemon says of its paths afterwards.
    paths: Value,
}

fn ratio(over: Rate, under: Rate) -> f64 {
    over.bps() as f64 / under.bps().max(1) as f64
}

fn row(case: &Case, direction: &str, outcome: &Outcome) -> Vec<String> {
    let shares = [outcome.braid, outcome.bbr, outcome.cubic].map(|rate| format!("{:.3}", ratio(rate, case.sum())));
    let ratios = [outcome.bbr, outcome.cubic].map(|other| format!("{:.2}", ratio(outcome.braid, other)));
    [case.title.to_owned(), direction.to_owned()].into_iter().chain(shares).chain(ratios).collect()
}

fn judge(case: &Case, direction: &str, outcome: &Outcome, report: &mut Report) {
    let share = ratio(outcome.braid, case.sum());
    let wanted = case.aim * (1.0 - case.loss);
    let what = format!("{}, {direction}", case.title);
    report.aim(format!("{what}: {wanted:.3} of the sum"), format!("{share:.3}"), share >= wanted);
    let of_bbr = ratio(outcome.braid, outcome.bbr);
    report.aim(format!("{what}: {OF_BBR} of MPTCP with BBR"), format!("{of_bbr:.3}"), of_bbr >= OF_BBR);
    if let Some(times) = case.times_cubic {
        let of_cubic = ratio(outcome.braid, outcome.cubic);
        report.aim(format!("{what}: {times} times MPTCP with CUBIC"), format!("{of_cubic:.1}"), of_cubic >= times);
    }
}

/// Down and up.
fn one(settings: &Settings, case: &Case, span: Duration) -> Result<[Outcome; 2]> {
    let mut builder = Lab::builder().rp_filter(2);
    for (number, (rate, round_trip)) in case.links.iter().enumerate() {
        let link = LinkSpec::new(&format!("link{number}")).delay(ms(*round_trip) / 2).loss(case.loss);
        let link = match case.queue {
            Some(queue) => link.queue(queue),
            None => link,
        };
        builder = builder.link(link.rate(mbps(*rate)));
    }
    let lab = builder.start()?;
    let size = Bytes::new(case.sum().bytes_per_second() * span.as_secs());
    allow_multipath(&lab)?;
    let mut peers = Vec::new();
    for (port, congestion) in [(8081, "bbr"), (8082, "cubic")] {
        let carrier = Carrier::multipath(congestion);
        let origin = Origin::start(&lab, 10, port, carrier)?;
        peers.push(multipath(&lab, &origin, carrier, size, 2 * span)?);
    }
    let (web, origin) = (Web::start(&lab)?, Origin::start(&lab, 10, 8080, Carrier::PLAIN)?);
    let url = web.url(size)?;
    let bonded = Bonded::start(settings, &lab)?;
    let paths = || Ok::<_, anyhow::Error>(bonded.daemon.status(&lab)?["peers"][0]["paths"].clone());
    let down = curl(&lab, &["-o", "/dev/null", &url], "%{size_download}", 4 * span)?;
    let after_down = paths()?;
    let file = web.file(size)?;
    let up = curl(&lab, &["-T", &name(&file), &format!("http://{}/", origin.address)], "%{size_upload}", 4 * span)?;
    let missed: u64 = (0..case.links.len()).map(|link| lab.counters(link).map(|c| c.missed)).sum::<Result<u64>>()?;
    ensure!(missed == 0, "the laboratory was too slow: it dropped {missed} frames");
    Ok([
        Outcome { braid: down, bbr: peers[0][0], cubic: peers[1][0], paths: after_down },
        Outcome { braid: up, bbr: peers[0][1], cubic: peers[1][1], paths: paths()? },
    ])
}

fn name(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Down and up by multipath TCP.
fn multipath(lab: &Lab, origin: &Origin, carrier: Carrier, size: Bytes, limit: Duration) -> Result<[Rate; 2]> {
    lab.client().run(|| {
        let (begin, mut got) = (Instant::now(), 0);
        origin.get(carrier, size, limit, |count| got += count as u64)?;
        let down = Bytes::new(got).per(begin.elapsed());
        let (sent, took) = origin.put(carrier, size, limit)?;
        Ok([down, sent.per(took)])
    })?
}

/// The goodput of a transfer by curl, of which `size` is what it prints of the bytes that went.
fn curl(lab: &Lab, arguments: &[&str], size: &str, limit: Duration) -> Result<Rate> {
    let mut command = lab.client().command("curl")?;
    command.args(["-sS", "--fail", "--max-time", &limit.as_secs().to_string(), "-w", &format!("\\n{size} %{{time_total}}")]);
    let output = command.args(arguments).stdin(Stdio::null()).output().context("cannot run curl: run lab/install-deps.sh")?;
    let said = String::from_utf8_lossy(&output.stdout);
    // Out of time is a slow transfer, and told as such.
    ensure!(matches!(output.status.code(), Some(0 | 28)), "curl: {}", String::from_utf8_lossy(&output.stderr).trim());
    let figures = said.lines().last().and_then(|line| line.split_once(' '));
    let (bytes, seconds) = figures.with_context(|| format!("curl says {said:?}"))?;
    Ok(Bytes::new(bytes.parse()?).per(Duration::from_secs_f64(seconds.parse()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_links_carry_seventy_megabits_and_every_shortfall_is_told() {
        assert!(CASES.iter().any(|case| case.links.len() == 10 && case.sum() == mbps(70)));
        let mut report = Report::new("bond", "", "");
        let case = CASES.iter().find(|case| case.times_cubic.is_some()).unwrap();
        let outcome = |braid| Outcome { braid: mbps(braid), bbr: mbps(27), cubic: mbps(6), paths: Value::Null };
        judge(case, "download", &outcome(20), &mut report);
        assert!(report.aims.len() == 3 && report.aims.iter().all(|aim| !aim.met), "{:?}", report.aims);
        judge(case, "download", &outcome(27), &mut report);
        assert!(report.aims[3..].iter().all(|aim| aim.met), "{:?}", report.aims);
        assert_eq!(row(case, "upload", &outcome(27))[2..], ["0.900", "0.900", "0.200", "1.00", "4.50"]);
    }
}
