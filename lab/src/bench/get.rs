//! One file over HTTPS from a server that knows nothing of Braid: `braid get` beside curl and aria2.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::Bytes;
use serde_json::json;

use super::report::Report;
use super::stats::{median, worst};
use super::{Settings, progress};
use crate::frame::Way;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;

/// Mbit/s, round trip in milliseconds, share lost.
const LINKS: [(&str, u64, u64, f64); 3] = [("wlan0", 20, 10, 0.0), ("eth0", 10, 60, 0.0), ("lte0", 5, 100, 0.01)];
/// What is left for the payload of a link's rate, headers taken off.
const PAYLOAD: f64 = 0.965;
/// How long one transfer may take.
const LIMIT: Duration = Duration::from_secs(60);
/// Wanted of the links' payload, in share and in time.
const SHARE: f64 = 0.93;
const TIME: f64 = 1.07;

/// What happens half-way.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Turn {
    Nothing,
    /// The fastest link drops to a fifth.
    Slower,
    /// The fastest link swallows everything.
    Dies,
}

/// A program that downloads.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Program {
    Braid,
    Aria2,
    Curl,
}

const TURNS: [(Turn, &str); 3] = [
    (Turn::Nothing, "steady"),
    (Turn::Slower, "the 20 Mbit/s link drops to a fifth half-way"),
    (Turn::Dies, "the 20 Mbit/s link dies half-way"),
];

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "get",
        "One file from any server",
        "One file over HTTPS from nginx, over links of 20 Mbit/s (10 ms round trip), 10 (60 ms) and 5 (100 ms, 1 % loss each way), by `braid \
         get`, by `aria2c -x16 -s16` told of all three links (over plain HTTP, since over HTTPS it comes to a halt here), and by curl, which uses the first; in turns, each with a directory of its own. Shares \
         are the file's bytes over what the links could carry of payload (0.965 of their rates) from the program's start to its end, names, handshakes and \
         the disk included. Where a link turns half-way, ideal is the time that the links would need at their rates.",
    );
    let size = Bytes::new(if settings.quick { 20_000_000 } else { 40_000_000 });
    let repeat = if settings.quick { 1 } else { 3 };
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for (turn, title) in TURNS {
        let (ideal, mut ours, mut theirs) = (ideal(turn, size), Vec::new(), Vec::new());
        let mut other = Vec::new();
        for _ in 0..repeat {
            for program in [Program::Braid, Program::Aria2, Program::Curl] {
                if program == Program::Curl && turn != Turn::Nothing {
                    continue;
                }
                let seconds = one(settings, turn, program, size)?;
                progress(&format!("{title}: {program:?} {:.2} s, {:.3} of the ideal rate", seconds, ideal / seconds));
                raw.push(json!({ "case": title, "program": format!("{program:?}"), "seconds": seconds, "ideal_s": ideal }));
                match program {
                    Program::Braid => ours.push(seconds),
                    Program::Aria2 => theirs.push(seconds),
                    Program::Curl => other.push(seconds),
                }
            }
        }
        let told = |seconds: &[f64]| match seconds {
            [] => String::new(),
            _ => format!("{:.2} s ({:.3})", median(seconds), ideal / median(seconds)),
        };
        rows.push(vec![title.to_owned(), format!("{ideal:.2} s"), told(&ours), told(&theirs), told(&other)]);
        let measured = format!("median {:.3}, worst {:.3}", ideal / median(&ours), ideal / worst(&ours));
        if turn == Turn::Nothing {
            report.aim(format!("{title}: at least {SHARE} of the sum's payload"), measured.clone(), ideal / median(&ours) >= SHARE);
        }
        report.aim(format!("{title}: at most {TIME} of the ideal time"), measured, median(&ours) <= ideal * TIME);
        let measured = format!("{:.2} s and {:.2} s", median(&ours), median(&theirs));
        report.aim(format!("{title}: no slower than aria2"), measured, median(&ours) <= median(&theirs));
    }
    report.table("Median time (share of the ideal rate):", "what | ideal | braid get | aria2c | curl", rows);
    report.raw = json!(raw);
    Ok(report)
}

fn payload(rates: impl Iterator<Item = u64>) -> f64 {
    rates.sum::<u64>() as f64 * 1e6 / 8.0 * PAYLOAD
}

/// When the link turns.
fn half_way(size: Bytes) -> f64 {
    size.get() as f64 / payload(LINKS.iter().map(|link| link.1)) / 2.0
}

/// Seconds that the links need at their rates.
fn ideal(turn: Turn, size: Bytes) -> f64 {
    let before = payload(LINKS.iter().map(|link| link.1));
    let after = match turn {
        Turn::Nothing => before,
        Turn::Slower => payload([LINKS[0].1 / 5, LINKS[1].1, LINKS[2].1].into_iter()),
        Turn::Dies => payload(LINKS[1..].iter().map(|link| link.1)),
    };
    let half = half_way(size);
    half + (size.get() as f64 - half * before) / after
}

/// Seconds that one download takes.
fn one(settings: &Settings, turn: Turn, program: Program, size: Bytes) -> Result<f64> {
    let links = LINKS.iter().map(|(name, rate, trip, loss)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(trip / 2)).loss(*loss));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    let folder = lab.directory().join("downloads");
    std::fs::create_dir_all(&folder)?;
    // aria2's TLS comes to a halt on such links: it is spared it.
    let url = if program == Program::Aria2 { web.url(size)? } else { web.secure_url(size)? };
    let mut command = command(settings, &lab, &web, program, &url, &folder)?;
    let begin = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program:?}"))?;
    let mut turned = turn == Turn::Nothing;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if !turned && begin.elapsed().as_secs_f64() >= half_way(size) {
            turned = true;
            match turn {
                Turn::Slower => lab.set(0, Way::Down, |profile| profile.rate = mbps(LINKS[0].1 / 5).into())?,
                _ => lab.dark(0)?,
            }
        }
        if begin.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            return Ok(LIMIT.as_secs_f64());
        }
        thread::sleep(Duration::from_millis(2));
    };
    let seconds = begin.elapsed().as_secs_f64();
    let mut told = String::new();
    if let Some(mut errors) = child.stderr.take() {
        std::io::Read::read_to_string(&mut errors, &mut told)?;
    }
    ensure!(status.success(), "{program:?} ended with {status}: {}", told.trim());
    if program == Program::Braid {
        told.lines().filter(|line| line.contains(" in ")).for_each(progress);
    }
    let there = std::fs::metadata(folder.join("file"))?.len();
    ensure!(there == size.get(), "{program:?} left {there} bytes of {size}");
    Ok(seconds)
}

fn command(settings: &Settings, lab: &Lab, web: &Web, program: Program, url: &str, folder: &Path) -> Result<Command> {
    let client = lab.client();
    let target = folder.join("file");
    let mut command;
    match program {
        Program::Braid => {
            command = client.command(&settings.braid)?;
            // Nothing learnt before, nothing kept.
            command.env("XDG_STATE_HOME", folder).arg("get").arg("--cacert").arg(web.certificate()).arg("-o").arg(&target);
        }
        Program::Aria2 => {
            command = client.command("aria2c")?;
            let all = LINKS.map(|link| link.0).join(",");
            command.args(["-q", "-x16", "-s16", "--min-split-size=1M", "--file-allocation=none", "--check-certificate=false"]);
            command.arg(format!("--multiple-interface={all}")).arg("-d").arg(folder).args(["-o", "file"]);
        }
        Program::Curl => {
            command = client.command("curl")?;
            command.arg("-s").arg("--cacert").arg(web.certificate()).arg("-o").arg(&target);
        }
    }
    command.arg(url);
    Ok(command)
}
