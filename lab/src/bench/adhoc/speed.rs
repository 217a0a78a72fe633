//! The ad-hoc device: its speed beside that of bare radios.

use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::super::gateway::TELLING;
use super::super::overhead::{Servers, cpu, told};
use super::super::report::Report;
use super::super::stats::{Mean, Pairs};
use super::super::{Settings, progress};
use super::{RADIOS, bare, devices, transfer};
use crate::adhoc::AdhocHost;
use crate::lab::Lab;
use crate::spec::LinkSpec;

/// A second server for transfers, beside that of [`Servers`].
const SECOND_PORT: u16 = 5203;

pub(in super::super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "adhoc-speed",
        "Speed of the ad-hoc device",
        "Two hosts, each with `braid adhoc up`, and before or after that without (the radio's own address). Radios are bare veth pairs. iperf3 for 2 s with eight flows, or one; two radios: two transfers \
         of four flows at the same time, both over the device, or one over each bare radio; CPU seconds of the whole machine (/proc/stat) per gigabyte. Ratios are computed per round, and the ways \
         alternate; the table shows geometric means with 95 % confidence intervals.",
    );
    speed(settings, &mut report)?;
    Ok(report)
}

/// A second iperf3 server, until it is dropped.
struct Second(std::process::Child);

impl Second {
    fn start(lab: &Lab) -> Result<Self> {
        let mut command = lab.server().command("iperf3")?;
        let child = command
            .args(["-s", "-p", &SECOND_PORT.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        thread::sleep(Duration::from_millis(300));
        Ok(Self(child))
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn speed(settings: &Settings, report: &mut Report) -> Result<()> {
    let (seconds, rounds) = if settings.quick { (1, 3) } else { (2, 12) };
    let own = AdhocHost::ADDRESSES[1];
    let window = ["-w", "64K"];
    let mut rows = Vec::new();
    for radios in [1, 2] {
        let lab = RADIOS[..radios].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
        let _servers = (Servers::start(&lab)?, Second::start(&lab)?);
        let (mut rate, mut one, mut cost) = (Pairs::default(), Pairs::default(), Pairs::default());
        for round in 0..rounds {
            for with in if round % 2 == 0 { [false, true] } else { [true, false] } {
                let _devices = with.then(|| devices(settings, &lab, "")).transpose()?;
                let before = cpu()?;
                let value = if radios == 1 {
                    transfer(&lab, if with { own } else { "10.77.0.1" }, 5201, seconds, &[&window[..], &["-P", "8"]].concat())?
                } else {
                    // Two processes, because iperf3 runs all its flows on one processor.
                    let (first, second) = if with { (own.to_owned(), own.to_owned()) } else { (bare(0), bare(1)) };
                    let four = [&window[..], &["-P", "4"]].concat();
                    thread::scope(|scope| {
                        let other = scope.spawn(|| transfer(&lab, &second, SECOND_PORT, seconds, &four));
                        let rate = transfer(&lab, &first, 5201, seconds, &four)?;
                        Ok::<f64, anyhow::Error>(rate + other.join().expect("the thread does not panic")?)
                    })?
                };
                let spent = cpu()?.since(&before).all;
                rate.push(with, value);
                cost.push(with, spent / (value / 8e3 * seconds as f64));
                if radios == 1 {
                    one.push(with, transfer(&lab, if with { own } else { "10.77.0.1" }, 5201, seconds, &window)?);
                }
            }
        }
        progress(&format!("speed, {radios} radios: {}", told(&rate)));
        let mut tell = |what: &str, pairs: &Pairs, high: bool| {
            let [ratio, low, upper] = pairs.geometric();
            rows.push(vec![
                what.to_owned(),
                format!("{:.2}", Mean::of(&pairs.without).mean),
                format!("{:.2}", Mean::of(&pairs.with).mean),
                told(pairs),
            ]);
            if high {
                let telling = upper - low <= 2.0 * TELLING;
                let measured = format!("{ratio:.3} ({low:.3} to {upper:.3}){}", if telling { "" } else { ", too wide to tell" });
                report.aim(format!("{what}: at least 0.95"), measured, telling && upper >= 0.95);
            }
        };
        if radios == 1 {
            tell("one bare radio, one flow, Mbit/s", &one, true);
            tell("one bare radio, eight flows, Mbit/s", &rate, true);
            tell("the same, CPU seconds per gigabyte", &cost, false);
        } else {
            tell("two radios, eight flows, Mbit/s: the sum of both", &rate, true);
            tell("the same, CPU seconds per gigabyte", &cost, false);
        }
        report.measured(json!({ "radios": radios, "mbps": rate.json(), "one_flow": one.json(), "cpu": cost.json() }));
    }
    report.table(format!("Speed, {rounds} rounds:"), "traffic | bare radios | device | device : bare (95 % interval)", rows);
    Ok(())
}
