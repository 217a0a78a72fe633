//! Three flows of different weights and preferences share two links: the thesis's figure 4.5, on real links.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_decide::fair::{FairFlow, Problem, solve};
use braid_model::{ByteCount, Rate};
use serde_json::json;

use super::Settings;
use super::origin::{Origin, TcpVariant};
use crate::bench::progress;
use crate::bench::report::{Figure, Report};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::relay::Relay;
use crate::spec::{LinkSpec, mbps, ms};
use braid_plot::{Run, stacked};

/// Name, Mbit/s, and the RTT in milliseconds.
const LINKS: [(&str, u64, u64); 2] = [("wlan0", 3, 20), ("lte0", 10, 20)];
/// Name, weight, and the links it may use.
const FLOWS: [(&str, u16, &[usize]); 3] = [("a", 1, &[0]), ("b", 2, &[0, 1]), ("c", 1, &[1])];
/// The servers of the flows, and of those that measure the links, one a link.
const FLOW_PORTS: [u16; 3] = [8081, 8082, 8083];
const LINK_PORTS: [u16; 2] = [8091, 8092];
/// Tolerated relative error of the rates.
const TOLERANCE: f64 = 0.05;
/// Time after the start of a phase from which its rates count.
const SETTLED: Duration = Duration::from_secs(2);
/// Rates count as settled if they hold over a window of this length.
const WINDOW: Duration = Duration::from_secs(1);
/// From one place of the window to the next, and in the plot.
const STEP: Duration = Duration::from_millis(100);
const BIN: Duration = Duration::from_millis(500);

/// Arrival times of a flow's bytes.
type Arrivals = Vec<(Duration, usize)>;

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-fair",
        "Weights and preferences: the thesis's figure 4.5 on real links",
        "Two links of 3 and 10 Mbit/s with RTTs of 20 ms. Flow a may use the first link, c the second, b both, and b has twice the weight (`links` \
         and `weight` in [[app]]). Each is one download through the relay that always has more data. First all three run, then a ends, then b. A \
         link's capacity is the rate of one such download over it alone, the better of one before and one after. Exact: weighted max-min rates \
         over those capacities (`braid_decide::fair`). Measured: from 2 s after the start of the phase to its end. Settled: the start of the first \
         second in which every flow is within 5 % of its exact rate.",
    );
    let (phase, alone) = if settings.quick { (8, 4) } else { (20, 8) };
    let (phase, alone) = (Duration::from_secs(phase), Duration::from_secs(alone));
    let links = LINKS.iter().map(|(name, rate, round_trip)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(*round_trip) / 2));
    let lab = links.fold(Lab::builder(), |builder, link| builder.link(link)).start()?;
    let origins = |ports: &[u16]| ports.iter().map(|port| Origin::start(&lab, 10, *port, TcpVariant::PLAIN)).collect::<Result<Vec<_>>>();
    let (origins, probes) = (origins(&FLOW_PORTS)?, origins(&LINK_PORTS)?);
    let relay = Relay::start(&lab, &settings.braid)?;
    let daemon = Daemon::start(&lab, &settings.braid, "max-throughput", &rules())?;
    relay.admit(&lab, &daemon)?;

    let before = capacities(&lab, &probes, alone)?;
    let began = Instant::now();
    // A new thread inherits the namespace of its creator.
    let arrivals = lab.client().run(|| {
        thread::scope(|scope| {
            let downloads = origins.iter().zip(1u32..).map(|(origin, phases)| scope.spawn(move || download(origin, began, phase * phases)));
            let downloads: Vec<_> = downloads.collect();
            downloads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .collect::<Result<Vec<_>>>()
        })
    })??;
    let after = capacities(&lab, &probes, alone)?;
    // Other work of the machine can only reduce it.
    let capacities: Vec<f64> = before.iter().zip(&after).map(|(before, after)| before.max(*after)).collect();
    let missed: u64 = (0..LINKS.len()).map(|link| lab.counters(link).map(|counters| counters.missed)).sum::<Result<u64>>()?;
    ensure!(missed == 0, "the lab was too slow: it dropped {missed} frames");
    report.raw = json!({ "capacities_bps": [before, after], "phase_s": phase.as_secs() });
    report_results(&capacities, &arrivals, phase, &mut report)?;
    Ok(report)
}

fn rules() -> String {
    let rule = |port: u16, weight: u16, links: &[usize]| {
        let names: Vec<_> = links.iter().map(|link| format!("\"{}\"", LINKS[*link].0)).collect();
        format!("[[app]]\nmatch = {{ port = {port} }}\ncarry = \"bond\"\nweight = {weight}.0\nlinks = [{}]\n", names.join(", "))
    };
    let flows = FLOWS.iter().zip(FLOW_PORTS).map(|((_, weight, links), port)| rule(port, *weight, links));
    flows.chain(LINK_PORTS.iter().enumerate().map(|(link, port)| rule(*port, 1, &[link]))).collect()
}

/// Downloads until `end`, counted from `began`.
fn download(origin: &Origin, began: Instant, end: Duration) -> Result<Arrivals> {
    let arrivals = Mutex::new(Vec::new());
    let note = |count| arrivals.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((began.elapsed(), count));
    origin.get(TcpVariant::PLAIN, ByteCount::new(1 << 40), end.saturating_sub(began.elapsed()), note)?;
    Ok(arrivals.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// What one download over each link alone brings, in bits per second, without its first second.
fn capacities(lab: &Lab, probes: &[Origin], span: Duration) -> Result<Vec<f64>> {
    let one = |probe: &Origin| {
        let arrivals = lab.client().run(|| download(probe, Instant::now(), span))??;
        let rate = rate(&arrivals, WINDOW, span);
        ensure!(rate > 0.0, "no data arrived");
        Ok(rate)
    };
    let rates = probes.iter().map(|probe| one(probe).context("cannot measure a link alone")).collect::<Result<Vec<_>>>()?;
    progress(&format!("the links alone: {:.2?} Mbit/s", rates.iter().map(|bps| bps / 1e6).collect::<Vec<_>>()));
    Ok(rates)
}

/// Mean bits per second.
fn rate(arrivals: &Arrivals, from: Duration, to: Duration) -> f64 {
    let bytes: usize = arrivals.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, count)| count).sum();
    bytes as f64 * 8.0 / (to - from).as_secs_f64()
}

/// Exact max-min rates of the flows from `first` on.
fn exact(capacities: &[f64], first: usize) -> Result<Vec<f64>> {
    let flows = FLOWS[first..].iter().map(|(_, weight, links)| FairFlow::backlogged(f64::from(*weight), links)).collect();
    let links = capacities.iter().map(|bps| Rate::from_bps(*bps as u64)).collect();
    Ok(solve(&Problem { links, flows })?.rates_bps)
}

/// Start, within a phase, of the first window in which all flows had their rates; `None`: never.
fn settled(arrivals: &[Arrivals], (from, to): (Duration, Duration), wanted: &[f64]) -> Option<Duration> {
    let starts = (0..).map(|step| from + STEP * step).take_while(|start| *start + WINDOW <= to);
    let near = |start: &Duration| {
        arrivals.iter().zip(wanted).all(|(flow, wanted)| (rate(flow, *start, *start + WINDOW) / wanted - 1.0).abs() <= TOLERANCE)
    };
    starts.into_iter().find(near).map(|start| start - from)
}

fn report_results(capacities: &[f64], arrivals: &[Arrivals], phase: Duration, report: &mut Report) -> Result<()> {
    let shown = |bps: f64| format!("{:.2}", bps / 1e6);
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for first in 0..FLOWS.len() {
        let (from, to) = (phase * first as u32, phase * (first as u32 + 1));
        let (wanted, flows) = (exact(capacities, first)?, &arrivals[first..]);
        let found: Vec<f64> = flows.iter().map(|flow| rate(flow, from + SETTLED, to)).collect();
        let off = found.iter().zip(&wanted).map(|(found, wanted)| (found / wanted - 1.0).abs()).fold(0.0, f64::max);
        let when = settled(flows, (from, to), &wanted);
        let names: Vec<&str> = FLOWS[first..].iter().map(|(name, ..)| *name).collect();
        let title = names.join(", ");
        let list = |rates: &[f64]| rates.iter().map(|rate| shown(*rate)).collect::<Vec<_>>().join(", ");
        let after = when.map_or("never".to_owned(), |when| format!("{:.1} s", when.as_secs_f64()));
        progress(&format!("{title}: exact {}, measured {}, settled {after}", list(&wanted), list(&found)));
        rows.push(vec![title.clone(), list(&wanted), list(&found), format!("{:.1} %", off * 100.0), after.clone()]);
        report.aim(format!("{title}: each within 5 % of its exact rate"), format!("{:.1} % off at most", off * 100.0), off <= TOLERANCE);
        report.aim(format!("{title}: settled within 2 s"), after, when.is_some_and(|when| when <= SETTLED));
        raw.push(json!({ "flows": names, "exact_bps": wanted, "measured_bps": found, "settled_s": when.map(|when| when.as_secs_f64()) }));
    }
    let links: Vec<_> = LINKS.iter().zip(capacities).map(|((name, rate, _), bps)| format!("{name} {} of {rate}", shown(*bps))).collect();
    let head = "flows that run | exact, Mbit/s | measured, Mbit/s | furthest off | settled after";
    report.table(format!("Payload capacities: {} Mbit/s. Weights: a 1, b 2, c 1:", links.join(", ")), head, rows);
    report.raw["phases"] = json!(raw);
    let title = "Rates of three flows through the bond";
    report.figures.push(Figure { name: "bond-fair".to_owned(), title: title.to_owned(), svg: plot(title, arrivals, phase) });
    Ok(())
}

fn plot(title: &str, arrivals: &[Arrivals], phase: Duration) -> String {
    let whole = phase * FLOWS.len() as u32;
    let bins = (whole.as_secs_f64() / BIN.as_secs_f64()) as u32;
    let point = |flow: &Arrivals, bin: u32| {
        let (from, to) = (BIN * bin, BIN * (bin + 1));
        (to.as_secs_f64(), Rate::from_bps(rate(flow, from, to) as u64))
    };
    let ends =
        FLOWS.iter().zip(1u32..).take(FLOWS.len() - 1).map(|((name, ..), phases)| ((phase * phases).as_secs_f64(), format!("{name} ends")));
    let what = "a: 3 Mbit/s link only; b: both, twice the weight; c: 10 Mbit/s link only";
    let run = Run {
        title: what.to_owned(),
        links: arrivals.iter().map(|flow| (0..bins).map(|bin| point(flow, bin)).collect()).collect(),
        events: ends.collect(),
    };
    let names: Vec<_> = FLOWS.iter().map(|(name, ..)| format!("flow {name}")).collect();
    stacked(title, &names, &[run])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_rates_equal_the_thesis() {
        let rates = |first| exact(&[3e6, 10e6], first).unwrap().iter().map(|rate| (rate / 1e4).round() / 100.0).collect::<Vec<_>>();
        assert_eq!((rates(0), rates(1), rates(2)), (vec![3.0, 6.67, 3.33], vec![8.67, 4.33], vec![10.0]));
        assert!(rules().contains("port = 8082 }\ncarry = \"bond\"\nweight = 2.0\nlinks = [\"wlan0\", \"lte0\"]"), "{}", rules());
    }

    #[test]
    fn a_late_or_short_flow_is_reported() {
        // 10 kB every 10 ms are 8 Mbit/s; the second flow begins after 3 s.
        let flow = |from: u64| (from * 100..2000).map(|step| (ms(step * 10), 10_000)).collect::<Arrivals>();
        let (flows, end) = ([flow(0), flow(3)], Duration::from_secs(20));
        assert_eq!(settled(&flows, (Duration::ZERO, end), &[8e6, 8e6]), Some(ms(3000)));
        assert_eq!(settled(&flows, (Duration::ZERO, end), &[8e6, 9e6]), None);
        let mut report = Report::new("bond-fair", "", "");
        let three = [flow(0), flow(0), flow(0)];
        report.raw = json!({});
        report_results(&[8e6, 8e6], &three, Duration::from_secs(5), &mut report).unwrap();
        let met: Vec<bool> = report.aims.iter().map(|aim| aim.met).collect();
        assert_eq!(met, [false, false, false, false, true, true], "{:?}", report.aims);
        assert!(report.figures[0].svg.contains("flow b") && report.figures[0].svg.contains("a ends"));
    }
}
