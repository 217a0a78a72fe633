//! The demonstration of the network's side: a host walks over four access points while a video and a download run, under each mobility manager.

use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use braid_plot::{Axis, Chart};
use serde::Serialize;

use crate::lab::Lab;
use crate::spec::LinkSpec;
use crate::wifi::{Stream, Transfer, Walk, WalkPlan};

/// Datagrams of the video, 2.1 Mbit/s.
const FRAME: (Duration, usize) = (Duration::from_millis(5), 1316);
/// What a radio carries, in Mbit/s.
const RATE: u32 = 20;
/// Time to enter an access point, and to find the channel of one that nobody has named.
const ENTRY: Duration = Duration::from_millis(100);
const HUNT: Duration = Duration::from_millis(600);
/// When the host goes to the second, third and fourth access point.
const MOVES: [Duration; 3] = [Duration::from_secs(4), Duration::from_secs(10), Duration::from_secs(16)];
/// How long video and download run.
const SPAN: Duration = Duration::from_secs(22);
/// Time between two readings of the video.
const READ: Duration = Duration::from_millis(250);

/// How the host moves.
struct Scheme {
    name: &'static str,
    manager: &'static str,
    radios: usize,
    /// Whether the network tells the host to move, and names the channel.
    told: bool,
}

const SCHEMES: [Scheme; 3] = [
    Scheme { name: "hard: one radio, by itself", manager: "hard", radios: 1, told: false },
    Scheme { name: "hoolock: two radios, the old link is held", manager: "hoolock", radios: 2, told: true },
    Scheme { name: "n-cast: two radios, packets go to both", manager: "n-cast", radios: 2, told: true },
];

/// What became of the traffic under a manager.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// How the host moved.
    pub scheme: &'static str,
    /// Datagrams of the video that were sent.
    pub sent: u32,
    /// How many did not arrive.
    pub lost: usize,
    /// How many arrived after a later one.
    pub late: u32,
    /// How many arrived once more.
    pub repeated: u32,
    /// Goodput of the download in Mbit/s, on average.
    pub download_mbps: f64,
    /// Datagrams of the video that arrived, in percent of those due: time in seconds, value.
    #[serde(skip)]
    video: Vec<(f64, f64)>,
    /// The same of the download, in Mbit/s.
    #[serde(skip)]
    download: Vec<(f64, f64)>,
}

/// Runs the demonstration. Returns the outcomes, and the pictures of the video and of the download (SVG). Prints progress on standard error.
///
/// # Errors
/// A program of the lab is missing, or something does not start.
pub fn run(braid: &Path) -> Result<(Vec<Outcome>, [String; 2])> {
    let mut outcomes = Vec::new();
    for scheme in &SCHEMES {
        eprint!("  {} ... ", scheme.name);
        let _ = std::io::stderr().flush();
        let outcome = one(braid, scheme).with_context(|| scheme.name)?;
        eprintln!("{} of {} datagrams lost, {:.1} Mbit/s", outcome.lost, outcome.sent, outcome.download_mbps);
        outcomes.push(outcome);
    }
    let chart = |title: &str, y: Axis, of: fn(&Outcome) -> &[(f64, f64)]| {
        let steps = Chart::steps("", title, Axis::new("time", "s").between(0.0, SPAN.as_secs_f64()), y);
        let steps = MOVES.iter().zip(2..).fold(steps, |chart, (at, access)| chart.mark(at.as_secs_f64(), format!("to {access}")));
        outcomes.iter().fold(steps, |chart, outcome| chart.curve(outcome.scheme, of(outcome))).svg()
    };
    let video = chart("A video while its viewer walks", Axis::new("received", "%"), |outcome| &outcome.video);
    let download = chart("A download while its host walks", Axis::new("goodput", "Mbit/s"), |outcome| &outcome.download);
    Ok((outcomes, [video, download]))
}

/// The outcomes as a readable table.
pub fn table(outcomes: &[Outcome]) -> String {
    let mut text = format!("{:<44} {:>11} {:>5} {:>5} {:>9} {:>14}\n", "", "video: sent", "lost", "late", "repeated", "download");
    for Outcome { scheme, sent, lost, late, repeated, download_mbps, .. } in outcomes {
        text += &format!("{scheme:<44} {sent:>11} {lost:>5} {late:>5} {repeated:>9} {download_mbps:>7.1} Mbit/s\n");
    }
    text
}

fn one(braid: &Path, scheme: &Scheme) -> Result<Outcome> {
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start()?;
    let options = format!("manager = \"{}\"\nhold = \"2s\"\n", scheme.manager);
    let walk = Walk::start(&lab, braid, WalkPlan { options: &options, accesses: 4, radios: scheme.radios, entry: [ENTRY; 2], hunt: HUNT })?;
    walk.roamer.limit(&lab, RATE)?;
    let (viewer, other) = ((walk.roamer.namespace(), walk.roamer.address), walk.other.namespace());
    let download = Transfer::start(other, viewer, SPAN.as_secs())?;
    let stream = Stream::start(other, viewer, FRAME.0, FRAME.1)?;
    let begin = Instant::now();
    let (mut video, mut read, mut moves) = (Vec::new(), (begin, 0), MOVES.iter().zip(1..).peekable());
    while begin.elapsed() < SPAN {
        if let Some((_, access)) = moves.next_if(|(at, _)| begin.elapsed() >= **at) {
            if scheme.told {
                walk.go_to(access)?;
            } else {
                walk.roamer.radios()[0].enter(access, HUNT + ENTRY);
            }
        }
        thread::sleep(READ);
        let (now, arrived) = (Instant::now(), stream.arrived());
        let due = (now - read.0).as_secs_f64() / FRAME.0.as_secs_f64();
        video.push(((now - begin).as_secs_f64(), 100.0 * (arrived - read.1) as f64 / due));
        read = (now, arrived);
    }
    let received = stream.end();
    let download: Vec<(f64, f64)> = download.end()?.into_iter().enumerate().map(|(second, mbps)| (second as f64, mbps)).collect();
    let download_mbps = download.iter().map(|(_, mbps)| mbps).sum::<f64>() / download.len().max(1) as f64;
    let crate::wifi::Received { sent, lost, late, repeated, .. } = received;
    Ok(Outcome { scheme: scheme.name, sent, lost, late, repeated, download_mbps, video, download })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_manager() {
        let outcome = |scheme: &Scheme| Outcome {
            scheme: scheme.name,
            sent: 4400,
            lost: 7,
            late: 0,
            repeated: 0,
            download_mbps: 12.34,
            video: Vec::new(),
            download: Vec::new(),
        };
        let table = table(&SCHEMES.iter().map(outcome).collect::<Vec<_>>());
        assert_eq!(table.lines().count(), 4);
        assert!(table.lines().skip(1).all(|line| line.contains("4400") && line.ends_with("12.3 Mbit/s")), "{table}");
    }
}
