//! Cost of many flows at the relay and the daemon.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::{Bonded, Settings};
use crate::bench::footprint::resident;
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::{median, quantile, worst};
use crate::lab::Lab;
use crate::spec::LinkSpec;
use crate::web::Web;

const LINKS: [&str; 2] = ["wlan0", "lte0"];
/// Flows at a time, and the relay's memory with them, in megabytes.
const MANY: (usize, f64) = (5000, 300.0);
/// New flows a second.
const FRESH: u32 = 500;
/// New flows a second while memory is watched.
const STEADY: u32 = 200;
/// Looks at memory meanwhile: what the first of them see is warming up.
const LOOKS: usize = 50;
/// Memory at the end may be more than it was at the beginning by this part, and so many megabytes.
const GROWTH: (f64, f64) = (0.03, 1.0);
/// Threads that make them.
const MAKERS: u32 = 32;

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "bond-relay",
        "Many flows through the relay",
        "Two links without limits. Memory: many open TCP flows, over each of which the server has sent a byte; VmRSS of `braid relay` and `braid \
         up` some seconds later. New flows: each is a connection that requests 1,000 bytes from nginx and is closed by nginx, 500 started every \
         second; the time is from the scheduled start until all bytes and the end arrived. Churn: the same at 200 a second for ten minutes (with \
         --quick half a minute) with a new relay and daemon. Memory is sampled 50 times; the maximum of the last fifth is compared with the \
         maximum of the second fifth.",
    );
    let lab = LINKS.iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let web = Web::start(&lab)?;
    let greeter = greeter(&lab)?;
    let bonded = Bonded::start(settings, &lab)?;
    let memory = || -> Result<[f64; 2]> { Ok([resident(bonded.relay.pid())?.0, resident(bonded.daemon.pid())?.0]) };
    let idle = memory()?;
    let (took, busy) = hold(&lab, greeter, MANY.0, || {
        thread::sleep(Duration::from_secs(if settings.quick { 2 } else { 10 }));
        memory()
    })?;
    progress(&format!("{} flows after {took:.1} s: relay {:.1} MB, daemon {:.1} MB", MANY.0, busy[0], busy[1]));
    thread::sleep(Duration::from_secs(3));
    let emptied = memory()?;
    remember(&mut report, "resident with no flow", idle, "MB");
    remember(&mut report, &format!("resident with {} flows", MANY.0), busy, "MB");
    remember(&mut report, "resident after their end", emptied, "MB");
    report.aim(format!("{} flows at the relay under {} MB", MANY.0, MANY.1), format!("{:.1} MB", busy[0]), busy[0] < MANY.1);
    settings.keep(&report)?;
    web.file(braid_model::ByteCount::new(1000))?;
    let before = spent(&bonded)?;
    let churn = churn(&lab, if settings.quick { 10 } else { 20 }, FRESH)?;
    let after = spent(&bonded)?;
    let churned = memory()?;
    let cost = |who: usize| (after[who] - before[who]) * 1e6 / churn.times.len().max(1) as f64;
    progress(&format!("{:.0} new flows a second, {} failed", churn.rate, churn.failed));
    remember(&mut report, "resident after the new flows", churned, "MB");
    remember(&mut report, "CPU of one new flow", [cost(0), cost(1)], "µs");
    let times = [median(&churn.times), quantile(&churn.times, 0.99), worst(&churn.times)].map(|time| format!("{:.1} ms", time * 1e3));
    let row = [format!("{:.0}/s", churn.rate), churn.failed.to_string()].into_iter().chain(times.clone()).collect();
    report.row("New flows:", "made | failed | time: median | 99 % | worst", row);
    let met = churn.failed == 0 && churn.rate >= 0.99 * f64::from(FRESH) && quantile(&churn.times, 0.99) < 1.0;
    report.aim(
        format!("{FRESH} new flows a second, none lost, 99 % within a second"),
        format!("{:.0}/s, {} lost, 99 % within {}", churn.rate, churn.failed, times[1]),
        met,
    );
    settings.keep(&report)?;
    // Others, for in these the memory of many flows is free to be used again, and would hide what is never given back.
    drop(bonded);
    let fresh = Bonded::start(settings, &lab)?;
    let memory = || -> Result<[f64; 2]> { Ok([resident(fresh.relay.pid())?.0, resident(fresh.daemon.pid())?.0]) };
    let (steady, looks) = watch(&lab, if settings.quick { 30 } else { 600 }, memory)?;
    let [relay, daemon] = [0, 1].map(|who| grown(&looks.iter().map(|look| look[who]).collect::<Vec<_>>()));
    let grown = |(from, to): (f64, f64)| to <= from * (1.0 + GROWTH.0) + GROWTH.1;
    let told = |who: &str, (from, to): (f64, f64)| format!("{who} {from:.1} to {to:.1} MB");
    report.aim(
        "No growth while flows come and go, none lost".to_owned(),
        format!("{}, {}; {} flows, {} lost", told("relay", relay), told("daemon", daemon), steady.times.len(), steady.failed),
        grown(relay) && grown(daemon) && steady.failed == 0,
    );
    report.raw = json!({
        "steady_mb": looks, "steady_failed": steady.failed, "steady_errors": steady.errors,
        "idle_mb": idle, "busy_mb": busy, "emptied_mb": emptied, "churned_mb": churned, "opening_s": took, "rate": churn.rate,
        "failed": churn.failed, "errors": churn.errors, "cpu_us": [cost(0), cost(1)],
    });
    Ok(report)
}

/// Adds what the relay's and the daemon's figures are.
fn remember(report: &mut Report, what: &str, figures: [f64; 2], unit: &str) {
    let [relay, daemon] = figures.map(|figure| format!("{figure:.1} {unit}"));
    report.row("Memory in megabytes (10^6):", "what | relay | daemon", vec![what.to_owned(), relay, daemon]);
}

/// A server that sends a byte over every connection and keeps it, for as long as the lab lives.
pub(super) fn greeter(lab: &Lab) -> Result<SocketAddr> {
    let to: SocketAddr = (Lab::internet(10), 8080).into();
    let listener = lab.server().run(|| -> std::io::Result<_> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        socket.bind(&to.into())?;
        socket.listen(4096)?;
        Ok(TcpListener::from(socket))
    })??;
    thread::spawn(move || {
        let mut kept: Vec<TcpStream> = Vec::new();
        for mut stream in listener.incoming().flatten() {
            if stream.write_all(b"!").is_ok() {
                kept.push(stream);
            }
        }
    });
    Ok(to)
}

/// Opens the flows and waits for their bytes; gives the seconds that took, and what `work` gives while they are open.
fn hold<T: Send>(lab: &Lab, to: SocketAddr, count: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<(f64, T)> {
    lab.client().run(|| {
        let begin = Instant::now();
        let mut flows = Vec::new();
        for number in 0..count {
            flows.push(TcpStream::connect(to).with_context(|| format!("flow {number} cannot begin"))?);
        }
        for (number, flow) in flows.iter_mut().enumerate() {
            flow.set_read_timeout(Some(Duration::from_secs(30)))?;
            flow.read_exact(&mut [0]).with_context(|| format!("flow {number} of {count} brought nothing"))?;
        }
        Ok((begin.elapsed().as_secs_f64(), work()?))
    })?
}

/// Opens and closes flows continuously. Returns their results and samples of memory.
fn watch(lab: &Lab, seconds: u32, memory: impl Fn() -> Result<[f64; 2]> + Sync) -> Result<(Churn, Vec<[f64; 2]>)> {
    let pause = Duration::from_secs(u64::from(seconds)) / LOOKS as u32;
    thread::scope(|scope| {
        let looking = scope.spawn(|| {
            let look = |_| {
                thread::sleep(pause);
                memory()
            };
            (0..LOOKS).map(look).collect::<Result<Vec<_>>>()
        });
        let churn = churn(lab, seconds, STEADY)?;
        progress(&format!("{} flows, {} failed", churn.times.len(), churn.failed));
        Ok((churn, looking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?))
    })
}

/// The greatest of the second fifth of the looks, and of the last.
fn grown(looks: &[f64]) -> (f64, f64) {
    let fifth = (looks.len() / 5).max(1);
    let part = |number: usize| worst(&looks[(number * fifth).min(looks.len() - 1)..((number + 1) * fifth).min(looks.len())]);
    (part(1), part(4))
}

/// Results of new flows.
#[derive(Debug, Default)]
struct Churn {
    /// Completed ones a second.
    rate: f64,
    failed: usize,
    /// The first few reasons.
    errors: Vec<String>,
    /// Of each that was completed, in seconds.
    times: Vec<f64>,
}

fn churn(lab: &Lab, seconds: u32, rate: u32) -> Result<Churn> {
    lab.client().run(|| {
        let begin = Instant::now();
        let made = thread::scope(|scope| {
            let makers: Vec<_> = (0..MAKERS).map(|maker| scope.spawn(move || make(begin, maker, seconds * rate, rate))).collect();
            makers.into_iter().flat_map(|maker| maker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect::<Vec<_>>()
        });
        let mut churn = Churn::default();
        for outcome in made {
            match outcome {
                Ok(time) => churn.times.push(time),
                Err(error) => {
                    churn.failed += 1;
                    churn.errors.push(format!("{error:#}"));
                }
            }
        }
        churn.errors.truncate(5);
        churn.rate = churn.times.len() as f64 / begin.elapsed().as_secs_f64();
        churn
    })
}

/// Opens one thread's share of the flows, each at its scheduled time.
fn make(begin: Instant, maker: u32, count: u32, rate: u32) -> Vec<Result<f64>> {
    // A new thread inherits the namespace of its creator.
    let due = |number: u32| begin + Duration::from_secs(1) * number / rate;
    let one = |number: u32| {
        let due = due(number);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        fetch(Lab::internet(10))?;
        Ok(due.elapsed().as_secs_f64())
    };
    (maker..count).step_by(MAKERS as usize).map(one).collect()
}

fn fetch(host: Ipv4Addr) -> Result<()> {
    let mut stream = TcpStream::connect((host, 80))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    stream.write_all(b"GET /1000.bin HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let body = answer.windows(4).position(|four| four == b"\r\n\r\n").map(|end| answer.len() - end - 4);
    ensure!(body == Some(1000), "{body:?} bytes came");
    Ok(())
}

/// CPU seconds that the relay and the daemon have used.
fn spent(bonded: &Bonded) -> Result<[f64; 2]> {
    let of = |pid| super::speed::spent(pid).map(|[user, kernel]| user + kernel);
    Ok([of(bonded.relay.pid())?, of(bonded.daemon.pid())?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_distinguished_from_warm_up() {
        let flat: Vec<f64> = (0..50).map(|look| if look < 10 { f64::from(look) } else { 10.0 }).collect();
        assert_eq!(grown(&flat), (10.0, 10.0));
        let leaking: Vec<f64> = (0..50).map(f64::from).collect();
        assert_eq!(grown(&leaking), (19.0, 49.0));
    }
}
