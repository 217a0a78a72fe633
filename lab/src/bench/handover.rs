//! Tables 5.1 and 5.2 and figures 5.7 and 5.8 of Yap's thesis: handovers under each mobility manager, live.

use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use braid_plot::{Axis, Chart};
use serde_json::json;

use super::report::{Figure, Report};
use super::stats::{Mean, median, worst};
use super::{Settings, progress};
use crate::lab::Lab;
use crate::spec::LinkSpec;
use crate::wifi::{Transfer, Walk, WalkPlan};

/// Interval of pings.
const PING: Duration = Duration::from_millis(20);
/// Time to enter an access point of Wi-Fi once its channel is known, and to find the channel: together some 38 pings, as a hard handover of the thesis.
const ENTRY: Duration = Duration::from_millis(100);
const HUNT: Duration = Duration::from_millis(600);
/// Time to enter a cellular network: "several seconds" in the thesis.
const SLOW_ENTRY: Duration = Duration::from_secs(3);
/// What a radio carries, in Mbit/s: the most of table 5.2.
const RATE: u32 = 23;
/// Traffic before a handover begins, and after it has ended.
const MARGIN: Duration = Duration::from_millis(600);

/// A scheme of table 5.1.
struct Scheme {
    name: &'static str,
    /// In the figure.
    bar: &'static str,
    manager: &'static str,
    /// Time for which the old link is held.
    hold: u64,
    radios: usize,
    /// Whether the network tells the channel; else the radio goes by itself, and hunts.
    told: bool,
    /// Whether the second access point is a cellular one.
    vertical: bool,
    /// Packets lost in the thesis: average to the second access point and back, if they differ.
    paper: &'static str,
}

const SCHEMES: [Scheme; 9] = [
    Scheme { name: "hard", bar: "hard", manager: "hard", hold: 0, radios: 1, told: false, vertical: false, paper: "37.72 (1 to 98)" },
    Scheme { name: "hard, channel told", bar: "told", manager: "hard", hold: 0, radios: 1, told: true, vertical: false, paper: "" },
    Scheme {
        name: "Hoolock, 1 s",
        bar: "Hoolock 1",
        manager: "hoolock",
        hold: 1,
        radios: 2,
        told: true,
        vertical: false,
        paper: "7.1 (0 to 39)",
    },
    Scheme {
        name: "Hoolock, 2 s",
        bar: "Hoolock 2",
        manager: "hoolock",
        hold: 2,
        radios: 2,
        told: true,
        vertical: false,
        paper: "0.034 (0 to 1)",
    },
    Scheme { name: "bicast, 1 s", bar: "bicast 1", manager: "n-cast", hold: 1, radios: 2, told: true, vertical: false, paper: "0" },
    Scheme { name: "bicast, 2 s", bar: "bicast 2", manager: "n-cast", hold: 2, radios: 2, told: true, vertical: false, paper: "0" },
    Scheme {
        name: "vertical, 1 s",
        bar: "vert. 1",
        manager: "hoolock",
        hold: 1,
        radios: 2,
        told: true,
        vertical: true,
        paper: "161.25 and 6.1",
    },
    Scheme {
        name: "vertical, 2 s",
        bar: "vert. 2",
        manager: "hoolock",
        hold: 2,
        radios: 2,
        told: true,
        vertical: true,
        paper: "87.2 and 1.3",
    },
    Scheme {
        name: "vertical, 4 s",
        bar: "vert. 4",
        manager: "hoolock",
        hold: 4,
        radios: 2,
        told: true,
        vertical: true,
        paper: "39.9 and 0",
    },
];

/// Schemes of table 5.2, by their places above, and its averages in Mbit/s.
const STREAMS: [(usize, &str); 3] = [(0, "13.7"), (3, "18.0"), (5, "17.1")];

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "handover",
        "Handovers between access points",
        "Three Open vSwitch switches in a ring (userspace datapath) with an access point each at two of them, `braid net controller`, and a host with one or two radios \
         (`braid net join`). An access point is a bridge; a thread plays wpa_supplicant, and moves a radio's cable from bridge to bridge. To find an access point \
         whose channel is not known takes 600 ms, to enter it 100 ms, and 3 s if it is cellular. Table 5.1: another host pings every 20 ms while the host goes to the other \
         access point; 20 handovers in turn, ten times. Table 5.2: iperf3 to the host for 300 s over radios of 23 Mbit/s; every 60 s it goes to the other one; five times. All schemes of a \
         round run at the same time, each in its own lab.",
    );
    let (rounds, handovers) = if settings.quick { (1, 4) } else { (10, 20) };
    let mut lost: Vec<Vec<Vec<u32>>> = SCHEMES.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        let ones = at_once(SCHEMES.iter(), |scheme| losses(settings, scheme, handovers).with_context(|| scheme.name))?;
        for ((scheme, all), one) in SCHEMES.iter().zip(&mut lost).zip(ones) {
            progress(&format!("round {}: {}: {one:?} pings lost", round + 1, scheme.name));
            all.push(one);
        }
    }
    table(&mut report, &lost);
    settings.keep(&report)?;
    streams(settings, &mut report)?;
    Ok(report)
}

/// What becomes of all schemes of a round, each in a lab of its own. They mostly wait, and so the same noise of the machine reaches all.
fn at_once<'a, T: Send>(schemes: impl Iterator<Item = &'a Scheme>, run: impl Fn(&Scheme) -> Result<T> + Sync) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = schemes.map(|scheme| scope.spawn(move || run(scheme))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a scheme's thread has panicked"))?).collect()
    })
}

fn start<'a>(settings: &Settings, lab: &'a Lab, scheme: &Scheme) -> Result<Walk<'a>> {
    let options = format!("manager = \"{}\"\nhold = \"{}s\"\n", scheme.manager, scheme.hold.max(1));
    let entry = [ENTRY, if scheme.vertical { SLOW_ENTRY } else { ENTRY }];
    Walk::start(lab, &settings.braid, WalkPlan { options: &options, accesses: 2, radios: scheme.radios, entry, hunt: HUNT })
}

fn go(walk: &Walk<'_>, scheme: &Scheme, access: usize) -> Result<()> {
    if scheme.told {
        return walk.go_to(access);
    }
    walk.roamer.radios()[0].enter(access, HUNT + ENTRY);
    Ok(())
}

/// Pings lost in each of so many handovers.
fn losses(settings: &Settings, scheme: &Scheme, handovers: usize) -> Result<Vec<u32>> {
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start()?;
    let walk = start(settings, &lab, scheme)?;
    let mut lost = Vec::new();
    for number in 0..handovers {
        let to = (number + 1) % 2;
        let entry = if scheme.vertical && to == 1 { SLOW_ENTRY } else { ENTRY };
        let span = MARGIN + HUNT + entry + Duration::from_secs(scheme.hold) + MARGIN;
        let count = (span.as_millis() / PING.as_millis()).to_string();
        let mut ping = walk.other.namespace().command("ping")?;
        ping.args(["-q", "-i", "0.02", "-c", &count, "-W", "1", &walk.roamer.address.to_string()]);
        let pinging = ping.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot run ping")?;
        thread::sleep(MARGIN);
        go(&walk, scheme, to)?;
        walk.arrives(to)?;
        let said = pinging.wait_with_output()?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let word = |before: &str| text.split(before).next()?.rsplit([' ', '\n']).next()?.parse::<u32>().ok();
        let (sent, answered) = (word(" packets transmitted"), word(" received"));
        let (sent, answered) = sent.zip(answered).with_context(|| format!("ping printed no counts: {text}"))?;
        lost.push(sent - answered);
    }
    Ok(lost)
}

fn table(report: &mut Report, lost: &[Vec<Vec<u32>>]) {
    let mut bars = Vec::new();
    for (scheme, rounds) in SCHEMES.iter().zip(lost) {
        // To the second access point and back.
        let directions: &[(usize, &str)] = if scheme.vertical { &[(0, " to cellular"), (1, " to Wi-Fi")] } else { &[(2, "")] };
        for (direction, suffix) in directions {
            let of = |round: &Vec<u32>| -> Vec<f64> {
                round
                    .iter()
                    .enumerate()
                    .filter(|(number, _)| *direction == 2 || number % 2 == *direction)
                    .map(|(_, lost)| f64::from(*lost))
                    .collect()
            };
            let all: Vec<f64> = rounds.iter().flat_map(of).collect();
            let means: Vec<f64> = rounds.iter().map(|round| Mean::of(&of(round)).mean).collect();
            let mean = Mean::of(&all);
            let least = all.iter().copied().fold(f64::INFINITY, f64::min);
            let spread = means.iter().copied().fold(f64::INFINITY, f64::min);
            report.row(
                "Table 5.1 and figure 5.7, pings lost in a handover (20 ms each):",
                "scheme | average | standard deviation | least | most | median of the rounds' averages, and their range | thesis: average",
                vec![
                    format!("{}{suffix}", scheme.name),
                    format!("{:.2}", mean.mean),
                    format!("{:.2}", mean.deviation),
                    format!("{least:.0}"),
                    format!("{:.0}", worst(&all)),
                    format!("{:.2} ({spread:.2} to {:.2})", median(&means), worst(&means)),
                    scheme.paper.to_owned(),
                ],
            );
        }
        bars.push((scheme.bar, Mean::of(&rounds.iter().flatten().map(|lost| f64::from(*lost)).collect::<Vec<_>>()).mean));
    }
    let all = |place: usize| lost[place].iter().flatten().copied();
    let most = |places: &[usize]| places.iter().flat_map(|place| all(*place)).max().unwrap_or(0);
    let hoolock: u32 = lost[3].iter().map(|round| round.iter().sum()).max().unwrap_or(0);
    report.aim("Hoolock, 2 s: at most one packet lost in twenty handovers", hoolock.to_string(), hoolock <= 1);
    report.aim("bicast loses no packet", most(&[4, 5]).to_string(), most(&[4, 5]) == 0);
    let mean = |place: usize| Mean::of(&all(place).map(f64::from).collect::<Vec<_>>()).mean;
    let (hunts, told) = (mean(0), mean(1));
    report.aim(
        "the channel that the network tells shortens a hard handover",
        format!("{:.2} of the pings", told / hunts.max(1.0)),
        told < hunts,
    );
    let names: Vec<&str> = bars.iter().map(|(name, _)| *name).collect();
    let values: Vec<(f64, f64)> = bars.iter().enumerate().map(|(place, (_, value))| (place as f64, *value)).collect();
    let title = "Figure 5.7: pings lost in a handover, by scheme and holding time in seconds";
    let chart = Chart::bars("", title, &names, Axis::new("pings lost", "")).curve("average", &values);
    report.figures.push(Figure { name: "handover-losses".to_owned(), title: title.to_owned(), svg: chart.svg() });
    report.measured(json!({ "lost": SCHEMES.iter().zip(lost).map(|(scheme, lost)| json!({ "scheme": scheme.name, "rounds": lost })).collect::<Vec<_>>() }));
    report.notes.push(
        "The thesis's vertical handovers lose packets because the old link is left after the holding time, also if the new one does not stand yet. Here the holding time begins when the client can \
         send and receive over the new link, and a client never leaves the link that it uses. `HoldFrom::Entering` in `crates/network` is the thesis's way."
            .to_owned(),
    );
}

/// Table 5.2 and figure 5.8.
fn streams(settings: &Settings, report: &mut Report) -> Result<()> {
    let (rounds, seconds, every) = if settings.quick { (1, 20, 5) } else { (5, 300, 60) };
    let mut means: Vec<Vec<f64>> = STREAMS.iter().map(|_| Vec::new()).collect();
    let mut courses: Vec<Vec<f64>> = Vec::new();
    for round in 0..rounds {
        let schemes = STREAMS.iter().map(|(place, _)| &SCHEMES[*place]);
        let ones =
            at_once(schemes.clone(), |scheme| stream(settings, scheme, seconds, every).with_context(|| format!("TCP, {}", scheme.name)))?;
        for ((scheme, means), course) in schemes.zip(&mut means).zip(ones) {
            let mean = Mean::of(&course).mean;
            progress(&format!("round {}: TCP, {}: {mean:.1} Mbit/s", round + 1, scheme.name));
            means.push(mean);
            if round == 0 {
                courses.push(course);
            }
        }
    }
    let caption = format!(
        "Table 5.2, TCP for {seconds} s, a handover every {every} s, Mbit/s in seconds of the first round, and averages of all rounds:"
    );
    for (((place, paper), course), means) in STREAMS.iter().zip(&courses).zip(&means) {
        let of = Mean::of(course);
        let least = course.iter().copied().fold(f64::INFINITY, f64::min);
        report.row(
            &caption,
            "scheme | average | standard deviation | least | most | median of the rounds' averages | thesis: average",
            vec![
                SCHEMES[*place].name.to_owned(),
                format!("{:.1}", of.mean),
                format!("{:.2}", of.deviation),
                format!("{least:.1}"),
                format!("{:.1}", worst(course)),
                format!("{:.1}", median(means)),
                (*paper).to_owned(),
            ],
        );
    }
    let better = |place: usize| means[place].iter().zip(&means[0]).filter(|(one, hard)| one > hard).count();
    report.aim("TCP carries more with Hoolock than in hard handovers", format!("in {} of {rounds} rounds", better(1)), better(1) == rounds);
    report.aim("TCP carries more with bicast than in hard handovers", format!("in {} of {rounds} rounds", better(2)), better(2) == rounds);
    let title = "Figure 5.8: TCP with handovers";
    let mut chart = Chart::steps("", title, Axis::new("time", "s").between(0.0, seconds as f64), Axis::new("goodput", "Mbit/s"));
    for ((place, _), course) in STREAMS.iter().zip(&courses) {
        let curve: Vec<(f64, f64)> = course.iter().enumerate().map(|(second, mbps)| (second as f64, *mbps)).collect();
        chart = chart.curve(SCHEMES[*place].name, &curve);
    }
    report.figures.push(Figure { name: "handover-tcp".to_owned(), title: title.to_owned(), svg: chart.svg() });
    report.measured(json!({ "tcp": { "means": means, "courses": courses } }));
    Ok(())
}

/// Mbit/s in each second of a transfer to the host.
fn stream(settings: &Settings, scheme: &Scheme, seconds: u64, every: u64) -> Result<Vec<f64>> {
    let lab = Lab::builder().link(LinkSpec::direct("eth0")).start()?;
    let walk = start(settings, &lab, scheme)?;
    walk.roamer.limit(&lab, RATE)?;
    let transfer = Transfer::start(walk.other.namespace(), (walk.roamer.namespace(), walk.roamer.address), seconds)?;
    for number in 1..seconds / every {
        thread::sleep(Duration::from_secs(every));
        go(&walk, scheme, (number % 2) as usize)?;
    }
    transfer.end()
}
