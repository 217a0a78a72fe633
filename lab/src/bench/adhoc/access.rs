//! Hosts at access points, which is not ad hoc: the server has no Braid, and one address behind all access points. The paper's tables 5 to 7, and a handover.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{DELAY, RATES, SATURATED, bare, pings, transfer_and_losses};
use crate::adhoc::AdhocHost;
use crate::bench::overhead::Servers;
use crate::bench::report::Report;
use crate::bench::stats::{Mean, median, worst};
use crate::bench::virtual_device::ensure_none_missed;
use crate::bench::{Settings, progress};
use crate::lab::{Builder, Lab};
use crate::spec::{LinkSpec, mbps};

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "adhoc-access",
        "The ad-hoc device at access points",
        "Not ad hoc: a host with `braid adhoc up`, and a server that has no Braid and one address, behind one access point for each radio. Tables of the paper of 2011 on emulated links. \
         Table 5: iperf3 for 20 s, one flow and eight flows over two radios of 30 Mbit/s, and one flow whose frames are spread, beside the first radio without the device (raw). Table 6: the same, if the first \
         radio has only 12 Mbit/s. Pings every 10 ms over two radios, of which the one in use loses its carrier, or delivers nothing any more; the longest time between two answers. \
         Table 7: three radios, of 25, 25 and 6 Mbit/s, at one access point, on one channel with a station that sends all the time; whoever waits for the channel is as likely to be next.",
    );
    two(settings, &mut report)?;
    settings.keep(&report)?;
    handover(settings, &mut report)?;
    settings.keep(&report)?;
    shared(settings, &mut report)?;
    Ok(report)
}

/// Names of the radios.
pub(super) const RADIOS: [&str; 3] = ["wlan0", "wlan1", "wlan2"];
/// Rate of an 802.11b radio in Mbit/s: TCP carries some 5.8, a usual value. The paper gives none.
pub(super) const SLOW: u64 = 6;
/// Interval between pings, in milliseconds.
const EVERY: u64 = 10;
/// How long pings without an answer are waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// The address of the server, which has no Braid.
pub(super) const SERVER: &str = AdhocHost::ADDRESSES[1];

/// A lab whose links lead to access points of one network, in which the server has one device.
pub(super) fn start(builder: Builder) -> Result<Lab> {
    let lab = builder.start()?;
    let server = lab.server();
    let mut lines = "link add name lan address 02:07:00:00:00:02 up type bridge forward_delay 0 mcast_snooping 0\n".to_owned();
    for link in 0..lab.links().len() {
        lines += &format!("address flush dev l{link}\nlink set dev l{link} master lan\n");
    }
    lines += &format!("address add {}/24 dev lan\naddress add {SERVER}/24 dev lan\n", bare(0));
    server.ip(&lines)?;
    // Without the device, only the radio that has an address answers for it.
    lab.client().sysctl("ipv4/conf/all/arp_ignore", "1")?;
    Ok(lab)
}

/// The client's device, once it reaches the server over all radios. `translates`: each radio carries only its own address, as at access points.
pub(super) fn device<'a>(settings: &Settings, lab: &'a Lab, translates: bool, more: &str) -> Result<AdhocHost<'a>> {
    let on = if translates { "on" } else { "off" };
    let translate: String = lab.links().iter().map(|link| format!(" --translate {}={on}", link.name())).collect();
    let device = AdhocHost::start(lab, &settings.braid, 0, &format!("{translate} {more}"))?;
    let begin = Instant::now();
    while pings(lab, SERVER, 1, "0.01")?.is_empty() {
        ensure!(begin.elapsed() < PATIENCE, "the server is not reached after {PATIENCE:?}: {}", device.log());
    }
    device.wait_pairs(lab.links().len(), false)?;
    Ok(device)
}

/// Transfers of a table: rates in Mbit/s, and the share of segments that were sent again in percent.
#[derive(Debug, Default)]
struct Transfers(Vec<f64>, Vec<f64>);

impl Transfers {
    fn push(&mut self, (rate, losses): (f64, f64)) {
        self.0.push(rate);
        self.1.push(losses);
    }

    fn mean(&self) -> f64 {
        Mean::of(&self.0).mean
    }

    fn row(&self, what: String, raw: &Self, paper: &str) -> Vec<String> {
        let Mean { mean, deviation, .. } = Mean::of(&self.0);
        let losses = format!("{:.1} %", Mean::of(&self.1).mean);
        vec![what, format!("{mean:.2}"), format!("{deviation:.2}"), losses, format!("{:.2}", mean / raw.mean()), paper.to_owned()]
    }
}

const HEAD: &str = "case | here | σ | sent again | to raw | paper (rate, σ, losses)";

/// The ways of a table: raw, one flow, eight flows, and one flow whose frames are spread.
fn transfers(settings: &Settings, lab: &Lab, rounds: usize, seconds: u64) -> Result<[Transfers; 4]> {
    let _servers = Servers::start(lab)?;
    let [mut raw, mut one, mut several, mut frames] = [(); 4].map(|()| Transfers::default());
    for _ in 0..rounds {
        raw.push(transfer_and_losses(lab, &bare(0), 5201, seconds, &[])?);
        {
            let _device = device(settings, lab, true, "")?;
            one.push(transfer_and_losses(lab, SERVER, 5201, seconds, &[])?);
            several.push(transfer_and_losses(lab, SERVER, 5201, seconds, &["-P", "8"])?);
        }
        let _device = device(settings, lab, true, "--spread frame")?;
        frames.push(transfer_and_losses(lab, SERVER, 5201, seconds, &[])?);
    }
    ensure_none_missed(lab, 0..lab.links().len())?;
    Ok([raw, one, several, frames])
}

fn rounds(settings: &Settings) -> (usize, u64) {
    if settings.quick { (1, 4) } else { (5, 20) }
}

/// What the four ways of a table are, beside the paper's values of the first three.
fn rows(ways: &[Transfers; 4], table: &str, paper: [&str; 3]) -> Vec<Vec<String>> {
    let names = ["raw", "one flow", "eight flows", "one flow, each frame over another radio"];
    let papers = paper.into_iter().chain([""]);
    ways.iter().zip(names).zip(papers).map(|((way, name), paper)| way.row(format!("table {table}: {name}"), &ways[0], paper)).collect()
}

/// Tables 5 and 6, as the paper has them: with access points and a server without its device.
fn two(settings: &Settings, report: &mut Report) -> Result<()> {
    let (count, seconds) = rounds(settings);
    let cases = [
        ("5", RATES.1, 1.79, ["28.9, 0.4, 0 %", "23.6, 0.6, 1 %", "42.6, 5.2, 3 %"]),
        ("6", SATURATED, 2.87, ["11.7, 0.4, 1 %", "19.1, 5.5, 2 %", "33.6, 5.6, 3 %"]),
    ];
    let mut all = Vec::new();
    for (table, other, wanted, paper) in cases {
        let link = |name: &str, rate| LinkSpec::new(name).rate(mbps(rate)).delay(DELAY);
        // The raw transfer takes the slower radio, as the paper's.
        let lab = start(Lab::builder().link(link(RADIOS[0], other)).link(link(RADIOS[1], RATES.1)))?;
        let ways = transfers(settings, &lab, count, seconds)?;
        progress(&format!("table {table}, access points: {ways:?}"));
        let ratio = ways[2].mean() / ways[0].mean();
        report.aim(format!("table {table}: eight flows carry {wanted} of raw, as in the paper"), format!("{ratio:.2}"), ratio >= wanted);
        report.measured(
            json!({ "access_points": table, "mbps": ways.each_ref().map(|way| &way.0), "again": ways.each_ref().map(|way| &way.1) }),
        );
        all.extend(rows(&ways, table, paper));
    }
    report.table("Tables 5 and 6, to a server without Braid, Mbit/s:", HEAD, all);
    Ok(())
}

/// Table 7: three radios at one access point, on one channel with another station that sends all the time.
fn shared(settings: &Settings, report: &mut Report) -> Result<()> {
    let (count, seconds) = rounds(settings);
    let link = |name: &str, rate| LinkSpec::new(name).rate(mbps(rate)).delay(DELAY);
    let links = [link(RADIOS[0], RATES.0), link(RADIOS[1], RATES.0), link(RADIOS[2], SLOW)];
    let builder = links.into_iter().fold(Lab::builder(), Builder::link).channel(&[0, 1, 2], Some(mbps(RATES.0))).seed(settings.seed);
    let lab = start(builder)?;
    let ways = transfers(settings, &lab, count, seconds)?;
    progress(&format!("table 7: {ways:?}"));
    report.table(
        "Table 7: three radios at one saturated access point, to a server without Braid, Mbit/s:",
        HEAD,
        rows(&ways, "7", ["11.7, 0.4, 1 %", "9.9, 2.7, 2 %", "14.8, 1.0, 4 %"]),
    );
    for (way, name, wanted) in [(1, "one flow carries", 0.85), (2, "eight flows carry", 1.26)] {
        let ratio = ways[way].mean() / ways[0].mean();
        report.aim(format!("table 7: {name} {wanted} of raw, as in the paper"), format!("{ratio:.2}"), ratio >= wanted);
    }
    report.measured(json!({ "table": "7", "mbps": ways.each_ref().map(|way| &way.0), "again": ways.each_ref().map(|way| &way.1) }));
    report.notes.push(
        "The paper's text says that losses grow by one point in table 7; the table has one point more for one flow, and three more for several. On a channel where each station sends \
         as many packets, those of an 802.11b radio take four times as long, and slow all others down."
            .to_owned(),
    );
    Ok(())
}

/// Pings until this value is dropped.
struct Pinging {
    child: Child,
    answers: Arc<Mutex<Vec<(u64, Instant)>>>,
}

impl Pinging {
    fn start(lab: &Lab) -> Result<Self> {
        let mut command = lab.client().command("ping")?;
        let interval = format!("{:.3}", EVERY as f64 / 1e3);
        command.args(["-n", "-i", &interval, "-W", "1", SERVER]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("cannot run ping: run lab/install-deps.sh")?;
        let (answers, output) = (Arc::new(Mutex::new(Vec::new())), child.stdout.take().context("ping has no output")?);
        let theirs = Arc::clone(&answers);
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let number = line.split_once("icmp_seq=").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
                if let Some(number) = number.filter(|_| line.contains("time=")) {
                    theirs.lock().unwrap_or_else(PoisonError::into_inner).push((number, Instant::now()));
                }
            }
        });
        Ok(Self { child, answers })
    }

    /// Answers so far: their numbers, and when they arrived.
    fn answers(&self) -> Vec<(u64, Instant)> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until so many answers have arrived since `begin`. Returns whether they have.
    fn wait(&self, count: usize, begin: Instant) -> bool {
        while begin.elapsed() < PATIENCE {
            if self.answers().iter().filter(|(_, at)| *at > begin).count() >= count {
                return true;
            }
            thread::sleep(Duration::from_millis(EVERY));
        }
        false
    }
}

impl Drop for Pinging {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The longest time without an answer in milliseconds while the radio in use fails; [`PATIENCE`] if none comes.
fn gap(lab: &Lab, black_hole: bool) -> Result<f64> {
    let pinging = Pinging::start(lab)?;
    ensure!(pinging.wait(50, Instant::now()), "the server does not answer");
    let before = pinging.answers().len();
    let failed = Instant::now();
    if black_hole {
        lab.dark(0)?
    } else {
        lab.carrier(0, false)?
    }
    // Answers that were on their way count for nothing.
    let settled = Instant::now() + DELAY * 4;
    let came = pinging.wait(50, settled);
    let answers = pinging.answers();
    if black_hole {
        lab.bright(0)?
    } else {
        lab.carrier(0, true)?
    }
    if !came {
        return Ok(failed.elapsed().as_secs_f64() * 1e3);
    }
    let around = &answers[before.saturating_sub(1)..];
    Ok(around.windows(2).map(|two| (two[1].0 - two[0].0) as f64 * EVERY as f64).fold(0.0, f64::max))
}

/// A handover between two access points.
fn handover(settings: &Settings, report: &mut Report) -> Result<()> {
    let mut rows = Vec::new();
    for translates in [false, true] {
        let builder = RADIOS[..2].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name).delay(DELAY)));
        let lab = start(builder)?;
        let device = device(settings, &lab, translates, &format!("--priority {}=1", RADIOS[1]))?;
        for black_hole in [false, true] {
            let mut gaps = Vec::new();
            for _ in 0..if settings.quick { 2 } else { 10 } {
                device.wait_pairs(2, false)?;
                wait_use(&lab, &device)?;
                gaps.push(gap(&lab, black_hole)?);
            }
            progress(&format!("handover between access points, translated {translates}, black hole {black_hole}: {gaps:?}"));
            let what = if black_hole { "delivers nothing any more" } else { "loses its carrier" };
            let addresses = if translates { "each radio has an address of its own" } else { "all radios have one address" };
            rows.push(vec![
                format!("{addresses}, the radio {what}"),
                format!("{:.0} ms", median(&gaps)),
                format!("{:.0} ms", worst(&gaps)),
                if black_hole { String::new() } else { "2.5 s".to_owned() },
            ]);
            let limit = if black_hole { 500.0 } else { 100.0 };
            report.aim(
                format!("access points, {addresses}, the radio {what}: longest gap under {limit} ms"),
                format!("{:.0} ms", worst(&gaps)),
                worst(&gaps) < limit,
            );
            report.measured(json!({ "access_points": "handover", "translated": translates, "black_hole": black_hole, "gaps_ms": gaps }));
        }
    }
    report.table(
        "Time without answers from the server at a handover between two access points:",
        "case | median | longest | paper (table 2, maxdiff 1000, pings every second)",
        rows,
    );
    report.notes.push("The paper gives no handover between access points; its table 2 is beside them.".to_owned());
    Ok(())
}

/// Waits until frames for the server leave over the first radio only.
fn wait_use(lab: &Lab, device: &AdhocHost<'_>) -> Result<()> {
    let begin = Instant::now();
    loop {
        // A host without Braid is measured by what it answers.
        let answered = !pings(lab, SERVER, 3, "0.01")?.is_empty();
        let used = device.neighbours()?.iter().any(|row| row["radio"] == RADIOS[0] && row["state"] == "up" && row["share"] == 1.0);
        if answered && used {
            return Ok(());
        }
        ensure!(begin.elapsed() < PATIENCE, "{} is not used again after {PATIENCE:?}: {:?}", RADIOS[0], device.neighbours()?);
    }
}
