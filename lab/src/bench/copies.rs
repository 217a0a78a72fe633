//! Figure 5.6 of Yap's thesis: a video that goes to three attachments of its viewer at once, and one that goes to one.

use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use braid_plot::{Axis, Chart};
use serde_json::json;

use super::report::{Figure, Report};
use super::stats::{Mean, worst};
use super::{Settings, progress};
use crate::lab::Lab;
use crate::network::eventually;
use crate::spec::LinkSpec;
use crate::wifi::{Received, Stream, Walk, WalkPlan};

/// Loss of each radio in percent, as in the thesis.
const LOSS: u32 = 3;
/// Bytes of a datagram of the video: seven packets of an MPEG transport stream.
const DATAGRAM: usize = 7 * 188;
/// Frames of the video in a second.
const FRAMES: u32 = 25;
/// Time to enter an access point of Wi-Fi, and a cellular one.
const ENTRY: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(3)];
/// Numbers of copies.
const COPIES: [u8; 3] = [1, 2, 3];

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "net-copies",
        "A video in several copies",
        "A host with three radios (`braid net join`), two at access points of Wi-Fi and one at a cellular one, each of which loses 3 % of its packets (nftables), in a network of three Open vSwitch switches with \
         `braid net controller`. A video of MPEG-2 (ffmpeg's test picture, 640 x 360, 25 frames a second, 2 Mbit/s) goes to it in datagrams of seven transport packets, as a chosen flow \
         (`[[flow]]`) with one, two and three copies; the host drops what it has. The datagrams that arrived are put together and decoded by ffmpeg; a frame is whole if its checksum is that of the sent video's. \
         Ten rounds, the ways alternate.",
    );
    let (rounds, seconds) = if settings.quick { (1, 10) } else { (10, 30) };
    let directory = settings.out.join("net-copies-video");
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let measured = measure(&directory, settings, rounds, seconds);
    let _ = fs::remove_dir_all(&directory);
    let all = measured?;
    let mut bars = [Vec::new(), Vec::new()];
    for (copies, rounds) in COPIES.into_iter().zip(&all) {
        let lost: Vec<f64> = rounds.iter().map(|(received, _)| 100.0 * received.lost as f64 / f64::from(received.sent.max(1))).collect();
        let whole: Vec<f64> = rounds.iter().map(|(_, whole)| 100.0 * whole).collect();
        let repeated: u32 = rounds.iter().map(|(received, _)| received.repeated).sum();
        let (of_lost, of_whole) = (Mean::of(&lost), Mean::of(&whole));
        report.row(
            "Figure 5.6, each radio loses 3 %:",
            "copies | datagrams lost | most in a round | expected, if losses are independent | copies that reached the program | whole frames",
            vec![
                copies.to_string(),
                format!("{:.3} % (σ {:.3})", of_lost.mean, of_lost.deviation),
                format!("{:.3} %", worst(&lost)),
                format!("{:.4} %", 100.0 * (f64::from(LOSS) / 100.0).powi(copies.into())),
                repeated.to_string(),
                format!("{:.1} % (σ {:.1})", of_whole.mean, of_whole.deviation),
            ],
        );
        bars[0].push(of_lost.mean);
        bars[1].push(of_whole.mean);
    }
    let repeated: u32 = all.iter().flatten().map(|(received, _)| received.repeated).sum();
    report.aim("no copy reaches the program", repeated.to_string(), repeated == 0);
    report.aim("three copies lose less than 0.05 %", format!("{:.3} %", bars[0][2]), bars[0][2] < 0.05);
    report.aim("more copies, more whole frames", format!("{:.1}, {:.1}, {:.1} %", bars[1][0], bars[1][1], bars[1][2]), bars[1].is_sorted());
    for (name, title, axis, bars) in [
        ("net-copies-lost", "Figure 5.6: datagrams of a video that are lost", Axis::new("lost", "%"), &bars[0]),
        ("net-copies-frames", "Figure 5.6: whole frames of a video", Axis::new("whole frames", "%"), &bars[1]),
    ] {
        let values: Vec<(f64, f64)> = bars.iter().enumerate().map(|(place, value)| (place as f64, *value)).collect();
        let chart = Chart::bars("", title, &["unicast", "two copies", "three copies"], axis).curve("average", &values);
        report.figures.push(Figure { name: name.to_owned(), title: title.to_owned(), svg: chart.svg() });
    }
    report
        .notes
        .push("The thesis shows pictures of the decoded video in figure 5.6, and no numbers but the 3 % of the access points.".to_owned());
    let raw: Vec<_> = all
        .iter()
        .map(|rounds| {
            rounds.iter().map(|(received, whole)| json!({ "sent": received.sent, "lost": received.lost, "whole": whole })).collect()
        })
        .map(|rounds: Vec<_>| json!(rounds))
        .collect();
    report.measured(json!({ "copies": COPIES, "rounds": raw }));
    Ok(report)
}

type Round = (Received, f64);

fn measure(directory: &std::path::Path, settings: &Settings, rounds: usize, seconds: u32) -> Result<Vec<Vec<Round>>> {
    let file = directory.join("sent.ts");
    let source = format!("testsrc2=size=640x360:rate={FRAMES}:duration={seconds}");
    let mut command = Command::new("ffmpeg");
    command.args([
        "-nostdin",
        "-v",
        "error",
        "-y",
        "-f",
        "lavfi",
        "-i",
        &source,
        "-c:v",
        "mpeg2video",
        "-b:v",
        "2M",
        "-bf",
        "0",
        "-g",
        "25",
    ]);
    ran(command.args(["-f", "mpegts"]).arg(&file))?;
    let video = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let sent = frames(&file)?;
    ensure!(sent.len() as u32 == FRAMES * seconds, "ffmpeg made {} frames", sent.len());
    let mut all: Vec<Vec<Round>> = COPIES.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for (copies, all) in COPIES.into_iter().zip(&mut all) {
            let arrived = stream(settings, copies, &video, seconds).with_context(|| format!("{copies} copies"))?;
            let received = Received::of(&arrived);
            let mut numbers = arrived;
            numbers.sort_unstable();
            numbers.dedup();
            let whole = numbers.iter().filter_map(|number| video.chunks(DATAGRAM).nth(*number as usize - 1)).collect::<Vec<_>>().concat();
            let file = directory.join("received.ts");
            fs::write(&file, whole).with_context(|| format!("cannot write {}", file.display()))?;
            let there = frames(&file)?;
            let whole = sent.iter().filter(|frame| there.contains(frame)).count() as f64 / sent.len() as f64;
            progress(&format!(
                "round {}: {copies} copies: {} of {} lost, {:.1} % whole",
                round + 1,
                received.lost,
                received.sent,
                100.0 * whole
            ));
            all.push((received, whole));
        }
    }
    Ok(all)
}

fn ran(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().context("cannot run ffmpeg: apt-get install ffmpeg")?;
    ensure!(output.status.success(), "ffmpeg failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Presentation time and checksum of each decoded frame.
fn frames(file: &std::path::Path) -> Result<std::collections::BTreeSet<(String, String)>> {
    let mut command = Command::new("ffmpeg");
    let text =
        ran(command.args(["-nostdin", "-v", "quiet", "-copyts", "-i"]).arg(file).args(["-vsync", "passthrough", "-f", "framemd5", "-"]))?;
    // stream, decoding time, presentation time, duration, size, checksum
    let frame = |line: &str| {
        let mut fields = line.split(',').map(|field| field.trim().to_owned());
        Some((fields.nth(2)?, fields.nth(2)?))
    };
    Ok(text.lines().filter(|line| !line.starts_with('#')).filter_map(frame).collect())
}

/// Numbers of the datagrams that arrived, in order.
fn stream(settings: &Settings, copies: u8, video: &[u8], seconds: u32) -> Result<Vec<u32>> {
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start()?;
    let flow = "[[flow]]\nto = \"02:00:00:00:09:01\"\nprotocol = \"udp\"\n";
    let options = if copies > 1 { format!("manager = \"hard\"\n{flow}copies = {copies}\n") } else { "manager = \"hard\"\n".to_owned() };
    let walk =
        Walk::start(&lab, &settings.braid, WalkPlan { options: &options, accesses: 3, radios: 3, entry: ENTRY, hunt: Duration::ZERO })?;
    for (place, radio) in walk.roamer.radios().iter().enumerate().skip(1) {
        radio.enter(place, Duration::ZERO);
    }
    eventually("all radios are attached", || Ok(walk.attachments()? == 3))?;
    eventually("the flow is in force", || Ok(copies == 1 || walk.controller.log().contains("the flow to 02:00:00:00:09:01 is in force")))?;
    walk.controller.converges(3, 3)?;
    walk.roamer.lose(&lab, LOSS)?;
    let count = video.len().div_ceil(DATAGRAM);
    let interval = Duration::from_secs(seconds.into()) / count as u32;
    let stream = Stream::start(walk.other.namespace(), (walk.roamer.namespace(), walk.roamer.address), interval, DATAGRAM)?;
    while stream.sent() < count as u32 {
        thread::sleep(Duration::from_millis(50));
    }
    let mut arrived = stream.numbers();
    arrived.retain(|number| *number <= count as u32);
    Ok(arrived)
}
