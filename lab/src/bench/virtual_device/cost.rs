//! Figure 2.3: goodput, round trip and CPU time without Braid, with it, and through the virtual interface.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{Carry, OWN, Settings, Up, ensure_none_missed, progress};
use crate::bench::gateway::{SETTLE, TELLING};
use crate::bench::overhead::{SPAN, Servers, cpu, daemon, told, transfer};
use crate::bench::report::Report;
use crate::bench::stats::{Mean, Pairs, median};
use crate::lab::Lab;
use crate::responder::Responder;
use crate::spec::{LinkSpec, mbps, ms};

/// Pings of one measurement (thesis, 2.3.2), and seconds between two.
const PINGS: (usize, &str) = (300, "0.005");
/// Parallel TCP flows (thesis, 2.3.2).
const FLOWS: usize = 10;
/// Bit/s of each of them where they are paced.
const PACE: &str = "400M";
/// Aims for ratios: of what should be high, and of what should be low.
const AIMS: (f64, f64) = (0.95, 1.05);

/// The process that runs, and what programs are bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    Nothing,
    Braid,
    Virtual,
}

const ALL: [By; 3] = [By::Nothing, By::Braid, By::Virtual];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// This many TCP flows, Gbit/s.
    Flows(usize),
    /// [`FLOWS`] TCP flows at [`PACE`], Gbit/s.
    Paced,
    /// Median round trip, microseconds.
    Ping,
    /// CPU seconds of the machine per gigabyte.
    Cpu,
}

/// What is measured on a link.
struct Case {
    link: &'static str,
    kinds: &'static [(Kind, &'static str)],
    window: &'static [&'static str],
}

const CASES: [Case; 2] = [
    Case {
        link: "veth pair",
        kinds: &[
            (Kind::Flows(FLOWS), "ten TCP flows, Gbit/s"),
            (Kind::Flows(1), "one TCP flow, Gbit/s"),
            (Kind::Paced, "ten TCP flows paced to 4 Gbit/s together, Gbit/s"),
            (Kind::Ping, "ping, median, microseconds"),
            (Kind::Cpu, "CPU seconds per gigabyte at 4 Gbit/s"),
        ],
        window: &["-w", "64K"],
    },
    Case {
        link: "100 Mbit/s",
        kinds: &[(Kind::Flows(FLOWS), "ten TCP flows, Gbit/s"), (Kind::Ping, "ping, median, microseconds")],
        window: &[],
    },
];

/// Results of one kind, beside those without Braid.
#[derive(Debug)]
struct Results {
    kind: Kind,
    what: String,
    braid: Pairs,
    bound: Pairs,
}

impl Results {
    fn push(&mut self, by: By, value: f64) {
        match by {
            By::Nothing => {
                self.braid.push(false, value);
                self.bound.push(false, value);
            }
            By::Braid => self.braid.push(true, value),
            By::Virtual => self.bound.push(true, value),
        }
    }
}

pub(super) fn run(settings: &Settings, report: &mut Report) -> Result<()> {
    let mut results = Vec::new();
    for case in &CASES {
        results.extend(measure_case(settings, case).with_context(|| format!("cost, {}", case.link))?);
    }
    tell(&results, report);
    judge(&results, report);
    let raw = results.iter().map(|it| json!({ "what": it.what, "braid": it.braid.json(), "virtual": it.bound.json() }));
    report.measured(json!({ "cost": raw.collect::<Vec<_>>() }));
    Ok(())
}

fn measure_case(settings: &Settings, case: &Case) -> Result<Vec<Results>> {
    let bare = case.link == CASES[0].link;
    let link = if bare { LinkSpec::direct("wlan0") } else { LinkSpec::new("wlan0").rate(mbps(100)).delay(ms(5)) };
    let lab = Lab::builder().link(link).start()?;
    let _servers = Servers::start(&lab)?;
    let _responder = Responder::start(&lab)?;
    let result = |(kind, what): &(Kind, &str)| Results {
        kind: *kind,
        what: format!("{}: {what}", case.link),
        braid: Pairs::default(),
        bound: Pairs::default(),
    };
    let mut results: Vec<_> = case.kinds.iter().map(result).collect();
    for round in 0..if settings.quick { 3 } else { 20 } {
        let mut order = ALL;
        order.rotate_left(round % 3);
        if round / 3 % 2 == 1 {
            order.reverse();
        }
        for by in order {
            let _up = match by {
                By::Virtual => (None, Some(Up::start(settings, &lab, Carry::Direct)?)),
                _ => (daemon(&lab, settings, by == By::Braid, SETTLE)?, None),
            };
            for it in &mut results {
                let value = measure(&lab, it.kind, by, case.window).with_context(|| format!("{by:?}: {}", it.what))?;
                it.push(by, value);
            }
        }
        if round % 3 == 2 {
            let said: Vec<_> = results.iter().map(|it| told(&it.bound)).collect();
            progress(&format!("cost, {}, {} rounds: {}", case.link, round + 1, said.join(", ")));
        }
    }
    if !bare {
        ensure_none_missed(&lab, 0..1)?;
    }
    Ok(results)
}

fn measure(lab: &Lab, kind: Kind, by: By, window: &[&str]) -> Result<f64> {
    let own = OWN.to_string();
    let bound: &[&str] = if by == By::Virtual { &["-B", &own] } else { &[] };
    let paced = || transfer(lab.client(), FLOWS, &[window, bound, &["-b", PACE]].concat());
    match kind {
        Kind::Flows(count) => transfer(lab.client(), count, &[window, bound].concat()),
        Kind::Paced => paced(),
        Kind::Ping => ping(lab, (by == By::Virtual).then_some(&own)),
        Kind::Cpu => {
            let before = cpu()?;
            let rate = paced()?;
            Ok(cpu()?.since(&before).all / (rate / 8.0 * SPAN.as_secs_f64()))
        }
    }
}

/// Median round trip of pings, in microseconds.
fn ping(lab: &Lab, own: Option<&String>) -> Result<f64> {
    let host = Lab::internet(10).to_string();
    let mut command = lab.client().command("ping")?;
    command.args(["-c", &PINGS.0.to_string(), "-i", PINGS.1, "-W", "1"]);
    if let Some(own) = own {
        command.args(["-I", own]);
    }
    let output = command.arg(&host).stdin(Stdio::null()).output().context("cannot run ping: run lab/install-deps.sh")?;
    let times = times(&String::from_utf8_lossy(&output.stdout));
    ensure!(
        times.len() >= PINGS.0 * 9 / 10,
        "only {} of {} pings are answered: {}",
        times.len(),
        PINGS.0,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(median(&times))
}

/// Round trips in ping's output, in microseconds.
fn times(output: &str) -> Vec<f64> {
    let milliseconds = |line: &str| line.split_once("time=")?.1.strip_suffix(" ms")?.parse::<f64>().ok();
    output.lines().filter_map(milliseconds).map(|time| time * 1e3).collect()
}

fn tell(results: &[Results], report: &mut Report) {
    let figure = |values: &[f64]| {
        let mean = Mean::of(values).mean;
        if mean < 10.0 { format!("{mean:.3}") } else { format!("{mean:.1}") }
    };
    let row = |it: &Results| {
        let values = [figure(&it.bound.without), figure(&it.braid.with), figure(&it.bound.with)];
        [it.what.clone()].into_iter().chain(values).chain([told(&it.braid), told(&it.bound)]).collect()
    };
    let rounds = results.first().map_or(0, |it| it.bound.with.len());
    let head = "link and traffic | no Braid | Braid, not bound | virtual interface | not bound : no Braid (95 % interval) | virtual interface : no Braid (95 % interval)";
    report.table(format!("Cost, {rounds} rounds:"), head, results.iter().map(row).collect());
}

/// Compares the virtual interface with the aims.
fn judge(results: &[Results], report: &mut Report) {
    for Results { kind, what, bound, .. } in results {
        let [_, low, high] = bound.geometric();
        let telling = high - low <= 2.0 * TELLING;
        let measured = told(bound) + if telling { "" } else { ", too wide to tell" };
        let (aim, reached) = match kind {
            Kind::Flows(_) | Kind::Paced => (format!("at least {} of that without", AIMS.0), high >= AIMS.0),
            Kind::Ping | Kind::Cpu => (format!("at most {} of that without", AIMS.1), low <= AIMS.1),
        };
        report.aim(format!("{what}: {aim}"), measured, telling && reached);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_are_read() {
        let output = "PING 203.0.113.10 (203.0.113.10) from 10.99.0.1 : 56(84) bytes of data.\n\
                      64 bytes from 203.0.113.10: icmp_seq=1 ttl=63 time=0.045 ms\n64 bytes from 203.0.113.10: icmp_seq=2 ttl=63 time=12.5 ms\n\
                      \n--- 203.0.113.10 ping statistics ---\n2 packets transmitted, 2 received, 0% packet loss, time 1001ms\n";
        assert_eq!(times(output), [45.0, 12_500.0]);
        assert!(times("ping: bind: Cannot assign requested address").is_empty());
    }

    #[test]
    fn excessive_costs_are_reported() {
        let met = |kind, ratio: f64| {
            let pairs = || Pairs { without: vec![10.0; 3], with: vec![10.0 * ratio; 3] };
            let mut report = Report::new("virtual", "", "");
            judge(&[Results { kind, what: "it".to_owned(), braid: pairs(), bound: pairs() }], &mut report);
            report.aims[0].met
        };
        assert!(met(Kind::Flows(1), 0.96) && !met(Kind::Paced, 0.94));
        assert!(met(Kind::Ping, 1.04) && !met(Kind::Ping, 1.06) && !met(Kind::Cpu, 1.5));
    }
}
