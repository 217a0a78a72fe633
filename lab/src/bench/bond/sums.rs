//! The share of the links' total rate that one transfer reaches, compared with the kernel's multipath TCP.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::{ByteCount, Direction, Rate};
use serde_json::{Value, json};

use super::origin::{Origin, TcpVariant};
use super::{Bonded, Settings, allow_multipath};
use crate::air::{Counters, Sample};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;

/// A link: Mbit/s, and its RTT in milliseconds.
type RateRtt = (u64, u64);

/// Links, and the aims for them.
struct Case {
    title: &'static str,
    links: &'static [RateRtt],
    /// The queue of each link in each direction, unless it is the lab's default.
    queue: Option<ByteCount>,
    loss: f64,
    /// Aim: share of the links' sum, less their loss.
    aim: f64,
    /// Aim: multiple of the goodput of multipath TCP with CUBIC.
    times_cubic: Option<f64>,
}

impl Case {
    const fn new(title: &'static str, links: &'static [RateRtt]) -> Self {
        Self { title, links, queue: None, loss: 0.0, aim: 0.93, times_cubic: None }
    }

    fn sum(&self) -> Rate {
        mbps(self.links.iter().map(|(rate, _)| rate).sum())
    }
}

const TEN: [RateRtt; 10] = [(15, 10), (15, 10), (8, 50), (8, 50), (8, 50), (4, 80), (4, 80), (4, 80), (2, 200), (2, 200)];

const CASES: [Case; 11] = [
    Case::new("20 + 20 Mbit/s, 20 ms", &[(20, 20), (20, 20)]),
    Case::new("20 + 5 Mbit/s, 20 ms", &[(20, 20), (5, 20)]),
    Case::new("20 Mbit/s (20 ms) + 10 (200 ms)", &[(20, 20), (10, 200)]),
    Case { queue: Some(ByteCount::new(1_000_000)), ..Case::new("20 + 5 Mbit/s, 10 ms, queues of 1 MB", &[(20, 10), (5, 10)]) },
    Case { aim: 0.90, ..Case::new("ten links of four kinds, 70 Mbit/s", &TEN) },
    lossy("20 + 10 Mbit/s, 20 ms, 1 % loss", 0.01, &[(20, 20), (10, 20)]),
    lossy("20 + 10 Mbit/s, 60 ms, 1 % loss", 0.01, &[(20, 60), (10, 60)]),
    lossy("20 + 10 Mbit/s, 120 ms, 1 % loss", 0.01, &[(20, 120), (10, 120)]),
    lossy("20 + 10 Mbit/s, 20 ms, 3 % loss", 0.03, &[(20, 20), (10, 20)]),
    lossy("20 + 10 Mbit/s, 60 ms, 3 % loss", 0.03, &[(20, 60), (10, 60)]),
    lossy("20 + 10 Mbit/s, 120 ms, 3 % loss", 0.03, &[(20, 120), (10, 120)]),
];
/// The cases that `--quick` runs.
const QUICK: [usize; 4] = [0, 2, 4, 6];

/// CUBIC's rate falls with loss and with the RTT alike (RFC 9438, 5.1), so a multiple of it depends on both. The RTTs are those of Wi-Fi,
/// LTE, and distant servers.
const fn lossy(title: &'static str, loss: f64, links: &'static [RateRtt]) -> Case {
    let times = if loss < 0.02 { 4.0 } else { 8.0 };
    Case { loss, aim: 0.90, times_cubic: Some(times), ..Case::new(title, links) }
}
/// Aim: multiple of multipath TCP with BBR.
const OF_BBR: f64 = 0.98;

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond",
        "One transfer over all links",
        "One download by curl from nginx and one upload by `curl -T`, through `braid relay`, which runs on the server's machine. Each is as long \
         as the sum of the links would carry in 25 s. Shares are payload over the sum of the links' rates, from curl's start to its end, including \
         handshakes. A packet's headers are part of the sum: a full TCP packet's payload is 0.965 of it, a bond packet's about 0.95. For \
         comparison, over the same links in the same run and without the daemon, the kernel's multipath TCP runs end to end with BBR and with \
         CUBIC on every subflow. Those transfers are cut off after 1.25 times the time that the sum of the links would take. Milliseconds are \
         RTTs; queues hold 100 ms, 64 kB at least, unless stated otherwise. Used: the data that each link carried for Braid, including headers and \
         retransmissions, as a share of its capacity.",
    );
    report
        .notes
        .push("The kernel's multipath TCP uses nine of the ten links: it supports at most eight endpoints besides the first.".to_owned());
    let span = Duration::from_secs(if settings.quick { 5 } else { 25 });
    for case in CASES.iter().enumerate().filter(|(at, _)| !settings.quick || QUICK.contains(at)).map(|(_, case)| case) {
        match one(settings, case, span) {
            Ok(outcomes) => {
                outcomes.iter().zip(["download", "upload"]).for_each(|(outcome, way)| report_results(case, way, outcome, &mut report))
            }
            // The other cases still run.
            Err(error) => report.aim(format!("{}: measured", case.title), format!("no: {error:#}"), false),
        }
        settings.keep(&report)?;
    }
    Ok(report)
}

const HEAD: &str = "links | | Braid, of the sum | MPTCP BBR | MPTCP CUBIC | Braid / MPTCP BBR | Braid / MPTCP CUBIC | Braid used";
const LOSSY_HEAD: &str =
    "links | | Braid, of the sum less the loss | / MPTCP CUBIC | MPTCP CUBIC, of the sum less the loss | most that any could be of it";

fn report_results(case: &Case, direction: &str, outcome: &Outcome, report: &mut Report) {
    let row = row(case, direction, outcome);
    progress(&row.join(", "));
    report.row("Goodput of one transfer:", HEAD, row);
    if case.times_cubic.is_some() {
        report.row("Loss, and the multiple of CUBIC by round trip:", LOSSY_HEAD, lossy_row(case, direction, outcome));
    }
    judge(case, direction, outcome, report);
    report.measured(json!({
        "case": case.title, "direction": direction, "sum_bps": case.sum().bps(), "braid_bps": outcome.braid.bps(),
        "mptcp_bbr_bps": outcome.bbr.bps(), "mptcp_cubic_bps": outcome.cubic.bps(), "used": outcome.used,
        "mbps_by_second": outcome.course, "paths": outcome.paths,
    }));
}

/// Possible gain over CUBIC: an ideal transfer would reach the sum less the loss.
fn lossy_row(case: &Case, direction: &str, outcome: &Outcome) -> Vec<String> {
    let most = case.sum().bps() as f64 * (1.0 - case.loss);
    let [braid, cubic] = [outcome.braid, outcome.cubic].map(|rate| rate.bps() as f64 / most);
    let of_cubic = ratio(outcome.braid, outcome.cubic);
    [
        case.title.to_owned(),
        direction.to_owned(),
        format!("{braid:.3}"),
        format!("{of_cubic:.1}"),
        format!("{cubic:.3}"),
        format!("{:.1}", 1.0 / cubic.max(1e-3)),
    ]
    .into()
}

/// The goodputs of one direction.
#[derive(Debug)]
struct Outcome {
    braid: Rate,
    bbr: Rate,
    cubic: Rate,
    /// Of what each link could have carried meanwhile, headers and repetitions included, what it carried for Braid.
    used: Vec<f64>,
    /// Mbit/s that each link carried for Braid, second by second.
    course: Vec<Vec<f64>>,
    /// The daemon's report of its paths afterwards.
    paths: Value,
}

/// A transfer through the bond.
struct Transfer {
    rate: Rate,
    used: Vec<f64>,
    course: Vec<Vec<f64>>,
    paths: Value,
}

fn ratio(over: Rate, under: Rate) -> f64 {
    over.bps() as f64 / under.bps().max(1) as f64
}

fn row(case: &Case, direction: &str, outcome: &Outcome) -> Vec<String> {
    let shares = [outcome.braid, outcome.bbr, outcome.cubic].map(|rate| format!("{:.3}", ratio(rate, case.sum())));
    let ratios = [outcome.bbr, outcome.cubic].map(|other| format!("{:.2}", ratio(outcome.braid, other)));
    let used = outcome.used.iter().map(|share| format!("{:.0} %", share * 100.0)).collect::<Vec<_>>().join(", ");
    [case.title.to_owned(), direction.to_owned()].into_iter().chain(shares).chain(ratios).chain([used]).collect()
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
    let size = ByteCount::new(case.sum().bytes_per_second() * span.as_secs());
    allow_multipath(&lab)?;
    let mut peers = Vec::new();
    for (port, congestion) in [(8081, "bbr"), (8082, "cubic")] {
        let variant = TcpVariant::multipath(congestion);
        let origin = Origin::start(&lab, 10, port, variant)?;
        peers.push(multipath(&lab, &origin, variant, size, span * 5 / 4)?);
    }
    let (web, origin) = (Web::start(&lab)?, Origin::start(&lab, 10, 8080, TcpVariant::PLAIN)?);
    let url = web.url(size)?;
    let bonded = Bonded::start(settings, &lab)?;
    let transfer = |arguments: &[&str], size: &str, direction: Direction| -> Result<Transfer> {
        let (began, before) = (lab.age(), carried(&lab, direction)?);
        let (rate, took) = curl(&lab, arguments, size, 4 * span)?;
        let after = carried(&lab, direction)?;
        let moved = case.links.iter().zip(before.iter().zip(&after));
        let used = moved.map(|((rate, _), (before, after))| (after - before) * 8.0 / took.as_secs_f64() / (*rate as f64 * 1e6)).collect();
        let course = (0..case.links.len()).map(|link| Ok(course(&lab.samples(link)?, began, direction))).collect::<Result<_>>()?;
        Ok(Transfer { rate, used, course, paths: bonded.daemon.status(&lab)?["peers"][0]["paths"].clone() })
    };
    let down = transfer(&["-o", "/dev/null", &url], "%{size_download}", Direction::Down)?;
    let file = web.file(size)?;
    let up = transfer(&["-T", &name(&file), &format!("http://{}/", origin.address)], "%{size_upload}", Direction::Up)?;
    let missed: u64 = (0..case.links.len()).map(|link| lab.counters(link).map(|c| c.missed)).sum::<Result<u64>>()?;
    ensure!(missed == 0, "the lab was too slow: it dropped {missed} frames");
    let outcome = |transfer: Transfer, way: usize| {
        let Transfer { rate, used, course, paths } = transfer;
        Outcome { braid: rate, bbr: peers[0][way], cubic: peers[1][way], used, course, paths }
    };
    Ok([outcome(down, 0), outcome(up, 1)])
}

/// Bytes that each link has delivered so far.
fn carried(lab: &Lab, direction: Direction) -> Result<Vec<f64>> {
    let bytes = |counters: Counters| match direction {
        Direction::Up => counters.up.delivered_bytes.get() as f64,
        Direction::Down => counters.down.delivered_bytes.get() as f64,
    };
    (0..lab.links().len()).map(|link| lab.counters(link).map(bytes)).collect()
}

/// Mbit/s, second by second, since `began`.
pub(super) fn course(samples: &[Sample], began: Duration, direction: Direction) -> Vec<f64> {
    let at = |sample: &Sample| if direction == Direction::Up { sample.up } else { sample.down };
    let since: Vec<f64> = samples.iter().filter(|sample| sample.at >= began).map(|sample| at(sample).get() as f64).collect();
    let seconds: Vec<f64> = since.iter().copied().step_by(10).collect();
    seconds.windows(2).map(|pair| ((pair[1] - pair[0]) * 8.0 / 1e5).round() / 10.0).collect()
}

fn name(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Down and up by multipath TCP.
fn multipath(lab: &Lab, origin: &Origin, variant: TcpVariant, size: ByteCount, limit: Duration) -> Result<[Rate; 2]> {
    lab.client().run(|| {
        let (begin, mut got) = (Instant::now(), 0);
        origin.get(variant, size, limit, |count| got += count as u64)?;
        let down = ByteCount::new(got).per(begin.elapsed());
        let (sent, took) = origin.put(variant, size, limit)?;
        Ok([down, sent.per(took)])
    })?
}

/// The goodput and the time of a transfer by curl, of which `size` is what it prints of the bytes that went.
fn curl(lab: &Lab, arguments: &[&str], size: &str, limit: Duration) -> Result<(Rate, Duration)> {
    let mut command = lab.client().command("curl")?;
    command.args(["-sS", "--fail", "--max-time", &limit.as_secs().to_string(), "-w", &format!("\\n{size} %{{time_total}}")]);
    let output = command.args(arguments).stdin(Stdio::null()).output().context("cannot run curl: run lab/install-deps.sh")?;
    let said = String::from_utf8_lossy(&output.stdout);
    // A timeout is reported as a slow transfer.
    ensure!(matches!(output.status.code(), Some(0 | 28)), "curl: {}", String::from_utf8_lossy(&output.stderr).trim());
    let figures = said.lines().last().and_then(|line| line.split_once(' '));
    let (bytes, seconds) = figures.with_context(|| format!("curl printed {said:?}"))?;
    let took = Duration::from_secs_f64(seconds.parse()?);
    Ok((ByteCount::new(bytes.parse()?).per(took), took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_links_carry_seventy_megabits_and_every_shortfall_is_reported() {
        assert!(CASES.iter().any(|case| case.links.len() == 10 && case.sum() == mbps(70)));
        let mut report = Report::new("bond", "", "");
        let case = CASES.iter().find(|case| case.times_cubic.is_some()).unwrap();
        let outcome = |braid| Outcome {
            braid: mbps(braid),
            bbr: mbps(27),
            cubic: mbps(6),
            used: vec![0.98, 0.5],
            course: Vec::new(),
            paths: Value::Null,
        };
        judge(case, "download", &outcome(20), &mut report);
        assert!(report.aims.len() == 3 && report.aims.iter().all(|aim| !aim.met), "{:?}", report.aims);
        judge(case, "download", &outcome(27), &mut report);
        assert!(report.aims[3..].iter().all(|aim| aim.met), "{:?}", report.aims);
        assert_eq!(lossy_row(case, "upload", &outcome(27))[2..], ["0.909", "4.5", "0.202", "5.0"]);
        assert!(QUICK.iter().all(|at| *at < CASES.len()) && CASES[QUICK[3]].loss > 0.0);
        assert_eq!(row(case, "upload", &outcome(27))[2..], ["0.900", "0.900", "0.200", "1.00", "4.50", "98 %, 50 %"]);
    }
}
