//! The ad-hoc device: a routing daemon over it, and over its radios.

use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::super::report::Report;
use super::super::stats::{median, worst};
use super::super::{Settings, progress};
use super::{DELAY, RADIOS, devices};
use crate::adhoc::{AdhocHost, Babel, adhoc_host};
use crate::lab::Lab;
use crate::spec::LinkSpec;

/// Interval of pings.
const PING: Duration = Duration::from_millis(20);
/// Traffic before a radio fails.
const BEFORE: Duration = Duration::from_secs(1);
/// Time in which the route has to come back.
const LIMIT: Duration = Duration::from_secs(60);

pub(in super::super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "adhoc-routes",
        "babeld over the ad-hoc device and over its radios",
        "Two hosts with three radios each. babeld, with its own intervals (hellos every 4 s), announces an address of each host: over `braid adhoc up`, which has all radios, or over the three radios. \
         A host pings the other's address every 20 ms, and the radio that carries it loses its carrier, or delivers nothing any more. Measured: the longest time between two answers. The ways alternate.",
    );
    let rounds = if settings.quick { 1 } else { 5 };
    // By way, then by kind of failure.
    let mut gaps = [const { [const { Vec::new() }; 2] }; 2];
    for round in 0..rounds {
        for over_device in [true, false] {
            for black_hole in [false, true] {
                let gap = gap(settings, over_device, black_hole)?;
                progress(&format!("round {}: over the device: {over_device}, black hole: {black_hole}: {gap:.2} s", round + 1));
                gaps[usize::from(over_device)][usize::from(black_hole)].push(gap);
            }
        }
    }
    for (black_hole, what) in ["the radio loses its carrier", "the radio delivers nothing any more"].into_iter().enumerate() {
        for (over_device, way) in ["over three radios", "over the ad-hoc device"].into_iter().enumerate() {
            let gaps = &gaps[over_device][black_hole];
            let cells = vec![format!("babeld {way}: {what}"), format!("{:.2} s", median(gaps)), format!("{:.2} s", worst(gaps))];
            report.row("Time without answers:", "case | median | longest", cells);
        }
        let [radios, device] = [0, 1].map(|over_device: usize| &gaps[over_device][black_hole]);
        report.aim(
            format!("{what}: the median gap over the device is shorter"),
            format!("{:.2} s, {:.2} s", median(device), median(radios)),
            median(device) < median(radios),
        );
    }
    report.measured(json!({ "over_radios_s": gaps[0], "over_device_s": gaps[1], "kinds": ["carrier", "black hole"] }));
    Ok(report)
}

/// The longest time between two answers in seconds, while the radio in use fails.
fn gap(settings: &Settings, over_device: bool, black_hole: bool) -> Result<f64> {
    let lab = RADIOS.iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::new(name).delay(DELAY))).start()?;
    // The way back may lead over another radio.
    for key in ["all", "default"].into_iter().chain(RADIOS) {
        lab.client().sysctl(&format!("ipv4/conf/{key}/rp_filter"), "0")?;
    }
    let prefers = format!("--priority {}=1 --priority {}=2", RADIOS[1], RADIOS[2]);
    let _devices = over_device.then(|| devices(settings, &lab, &prefers)).transpose()?;
    let of = |number: usize| -> Vec<String> {
        if over_device { vec!["vi0".to_owned()] } else { (0..RADIOS.len()).map(|link| AdhocHost::radio(&lab, number, link)).collect() }
    };
    let _daemons = [Babel::start(&lab, 0, &of(0))?, Babel::start(&lab, 1, &of(1))?];
    let [from, to] = Babel::ADDRESSES;
    let begin = Instant::now();
    let reaches = || -> Result<bool> {
        let mut ping = adhoc_host(&lab, 0).command("ping")?;
        Ok(ping.args(["-n", "-c", "1", "-W", "1", "-I", from, to]).stdin(Stdio::null()).output()?.status.success())
    };
    while !reaches()? {
        ensure!(begin.elapsed() < LIMIT, "babeld found no route within {LIMIT:?}");
        thread::sleep(Duration::from_millis(50));
    }
    // babeld settles on a radio.
    thread::sleep(if settings.quick { BEFORE } else { 5 * BEFORE });
    let used = if over_device {
        0
    } else {
        let shown = adhoc_host(&lab, 0).command("ip")?.args(["-o", "route", "get", to, "from", from]).output()?;
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        let device = shown.split(" dev ").nth(1).and_then(|rest| rest.split(' ').next()).with_context(|| format!("no device: {shown}"))?;
        RADIOS.iter().position(|radio| *radio == device).with_context(|| format!("the route leads over {device}"))?
    };
    let mut command = adhoc_host(&lab, 0).command("ping")?;
    let count = (LIMIT.as_millis() / PING.as_millis()).to_string();
    command.args(["-n", "-i", "0.02", "-c", &count, "-W", "1", "-I", from, to]);
    let pinging = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot run ping")?;
    let process = pinging.id();
    let reading = thread::spawn(move || pinging.wait_with_output());
    thread::sleep(BEFORE);
    if black_hole {
        lab.dark(used)?
    } else {
        lab.carrier(used, false)?
    }
    // It is over when pings are answered again for a while.
    let begin = Instant::now();
    thread::sleep(Duration::from_millis(500));
    while begin.elapsed() < LIMIT - 5 * BEFORE && !reaches()? {
        thread::sleep(Duration::from_millis(100));
    }
    thread::sleep(BEFORE);
    crate::sys::interrupt(process)?;
    let output = reading.join().expect("the thread does not panic")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let sequence = |line: &str| line.split_once("icmp_seq=")?.1.split(' ').next()?.parse::<usize>().ok();
    let answers: Vec<usize> = text.lines().filter(|line| line.contains("time=")).filter_map(sequence).collect();
    ensure!(answers.len() > 30, "only {} pings were answered: {text}", answers.len());
    let last = answers.last().copied().unwrap_or(0);
    let longest = answers.windows(2).map(|two| two[1] - two[0]).max().unwrap_or(0);
    ensure!(last > answers[0] + 30, "no answer came after the failure");
    Ok(longest as f64 * PING.as_secs_f64())
}
