//! Compares the controller with CUBIC and BBRv3, in tables (virtual time, real QUIC connections).
//!
//! `cargo run --release -p braid-bond --example controller [alone|loss|slow|beside|sweep|watch|late|lone]... [TRACE|PATH]...`; without arguments, all
//! except `watch`. A trace is a recording in mahimahi's format. `watch` prints the time course of a run on a trace, or beside CUBIC on a path given
//! as Mbit/s,ms,BDP (`late`: CUBIC is already running, `lone`: it never starts).

#[path = "../tests/support/mod.rs"]
mod support;

use std::sync::Arc;
use std::time::Duration;

use braid_bond::controller::PathMetrics;
use braid_model::{ByteCount, Time};
use braid_netem::{Loss, Profile, RateSource, Trace};
use support::{Controllers, Source, World, bdp, bottleneck};

fn main() {
    let (words, traces): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|word| ["alone", "loss", "slow", "beside", "sweep", "watch", "late", "lone"].contains(&word.as_str()));
    let wanted = |word: &str| {
        words.iter().any(|w| w == word) || (words.is_empty() && traces.is_empty() && word != "watch" && word != "late" && word != "lone")
    };
    if wanted("alone") {
        alone();
    }
    if wanted("loss") {
        loss();
    }
    if wanted("slow") {
        slow();
    }
    if wanted("beside") {
        beside(&[(20.0, 40)]);
    }
    if wanted("sweep") {
        beside(&[(5.0, 10), (5.0, 40), (5.0, 100), (20.0, 10), (20.0, 100), (50.0, 10), (50.0, 40), (50.0, 100)]);
    }
    for path in &traces {
        match read(path) {
            _ if wanted("watch") && path.contains(',') => watch(wanted("late"), wanted("lone"), path),
            Ok(trace) if wanted("watch") => watch_trace(trace),
            Ok(trace) => compare(path, trace),
            Err(error) => eprintln!("{path}: {error}; give a recording in mahimahi's format"),
        }
    }
}

fn all() -> [Controllers; 3] {
    [Controllers::radio(), Controllers::Cubic, Controllers::Bbr3]
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn seconds(count: u64) -> Time {
    Time::from_millis(count * 1000)
}

fn millis(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

/// One flow alone, with a buffer of 1 MB.
fn alone() {
    println!("\nAlone, buffer 1 MB, seconds 5 to 30: goodput (part of the rate), queueing delay in ms (median, 95th percentile)");
    println!("{:>8} {:>7} {:>26} {:>26} {:>26}", "Mbit/s", "RTT ms", "rate", "CUBIC", "BBRv3");
    for (mbps, rtt) in [(5.0, 1), (5.0, 20), (5.0, 40), (5.0, 100), (5.0, 600), (20.0, 10), (20.0, 40), (50.0, 20), (50.0, 100), (1.0, 50)]
    {
        print!("{mbps:>8} {rtt:>7}");
        for controllers in all() {
            let mut world = World::new(bottleneck(mbps, ms(rtt), 1_000_000), 1);
            world.add(&controllers, Source::Bulk, Time::ZERO);
            world.run_until(seconds(30));
            let (from, to) = (seconds(5), seconds(30));
            let wait = |quantile| millis(world.wait(None, quantile, from, to));
            print!("       {:>5.3} {:>6.1} {:>6.1}", world.goodput(0, from, to) / mbps / 1e6, wait(0.5), wait(0.95));
        }
        println!();
    }
}

/// One flow on links that lose packets.
fn loss() {
    println!("\nRandom loss, 20 Mbit/s, 40 ms, buffer 1 BDP, 30 s from the beginning: goodput / (rate x (1 - loss)), median queue in ms");
    println!("{:>16} {:>14} {:>14} {:>14}", "loss", "rate", "CUBIC", "BBRv3");
    let (mbps, rtt) = (20.0, ms(40));
    let losses = [0.01, 0.03, 0.1].map(|p| (p, "random", Loss::random(p))).into_iter();
    for (p, kind, loss) in losses.chain([0.01, 0.03, 0.1].map(|p| (p, "bursts", Loss::bursts(p, 5.0)))) {
        print!("{:>9} {:>4.0} %", kind, p * 100.0);
        for controllers in all() {
            let profile = Profile { loss, ..bottleneck(mbps, rtt, bdp(mbps, rtt, 1.0)) };
            let mut world = World::new(profile, 3);
            world.add(&controllers, Source::Bulk, Time::ZERO);
            world.run_until(seconds(30));
            let part = world.goodput(0, Time::ZERO, seconds(30)) / mbps / 1e6 / (1.0 - p);
            print!("   {part:>5.3} {:>5.1}", millis(world.wait(None, 0.5, Time::ZERO, seconds(30))));
        }
        println!();
    }
}

/// One flow on slow links that lose packets: mean and minimum of ten seeds.
fn slow() {
    println!("\nSlow links, 60 s from the beginning: goodput / (rate x (1 - loss)), mean and least of 10 runs, and the median queue in ms");
    println!("{:>7} {:>7} {:>7} {:>6} {:>22} {:>22}", "Mbit/s", "RTT ms", "buffer", "loss", "rate", "BBRv3");
    for (mbps, rtt) in [(1.0, 20), (1.0, 50), (1.0, 120)] {
        for buffer in [18_000, 100_000] {
            for p in [0.0, 0.01, 0.03, 0.1] {
                print!("{mbps:>7} {rtt:>7} {buffer:>7} {:>4.0} %", p * 100.0);
                for controllers in [Controllers::radio(), Controllers::Bbr3] {
                    let (mut parts, mut waits) = (Vec::new(), 0.0);
                    for seed in 1..=10 {
                        let profile = Profile { loss: Loss::random(p), ..bottleneck(mbps, ms(rtt), buffer) };
                        let mut world = World::new(profile, seed);
                        world.add(&controllers, Source::Bulk, Time::ZERO);
                        world.run_until(seconds(60));
                        parts.push(world.goodput(0, Time::ZERO, seconds(60)) / mbps / 1e6 / (1.0 - p));
                        waits += millis(world.wait(None, 0.5, Time::ZERO, seconds(60))) / 10.0;
                    }
                    let least = parts.iter().copied().fold(f64::INFINITY, f64::min);
                    print!("    {:>5.3} {least:>5.3} {waits:>6.1}", parts.iter().sum::<f64>() / 10.0);
                }
                println!();
            }
        }
    }
}

/// Two flows, the later of which starts 5 s after the other; 60 s of both.
fn beside(paths: &[(f64, u64)]) {
    println!(
        "\nBeside one other flow for 60 s: our fraction of the rate and the other's, and the fraction of our packets dropped at a full queue"
    );
    println!("{:>7} {:>7} {:>7} {:>6} {:>22} {:>22}", "Mbit/s", "RTT ms", "buffer", "first", "CUBIC", "BBRv3");
    for (mbps, rtt) in paths {
        for buffer in [0.5, 1.0, 2.0, 4.0] {
            for ours_first in [true, false] {
                print!("{mbps:>7} {rtt:>7} {buffer:>7} {:>6}", if ours_first { "we" } else { "they" });
                for other in [Controllers::Cubic, Controllers::Bbr3] {
                    let mut world = World::new(bottleneck(*mbps, ms(*rtt), bdp(*mbps, ms(*rtt), buffer)), 1);
                    let (ours, theirs) = if ours_first { (0, 5) } else { (5, 0) };
                    world.add(&Controllers::radio(), Source::Bulk, seconds(ours));
                    world.add(&other, Source::Bulk, seconds(theirs));
                    world.run_until(seconds(65));
                    let part = |flow| world.goodput(flow, seconds(5), seconds(65)) / mbps / 1e6;
                    let low = if part(0).min(part(1)) < 1.0 / 3.0 { '*' } else { ' ' };
                    print!("   {:>5.3} {:>5.3}{low} {:>4.1} %", part(0), part(1), world.overrun(0) * 100.0);
                }
                println!();
            }
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "an example may read files")]
fn read(path: &str) -> Result<Arc<Trace>, Box<dyn std::error::Error>> {
    Ok(Arc::new(Trace::parse(&std::fs::read_to_string(path)?)?))
}

/// A recorded link, 20 ms each way, with a phone's buffer: 300 packets.
fn recorded(trace: Arc<Trace>) -> Profile {
    Profile { rate: RateSource::Trace(trace), delay: ms(20), queue: ByteCount::new(450_000), ..Profile::default() }
}

fn compare(path: &str, trace: Arc<Trace>) {
    println!("\n{path}: 60 s, 40 ms, buffer 450 kB: goodput in Mbit/s, queueing delay in ms (median, 95th percentile)");
    for controllers in all() {
        let mut world = World::new(recorded(trace.clone()), 1);
        world.add(&controllers, Source::Bulk, Time::ZERO);
        world.run_until(seconds(60));
        let wait = |quantile| millis(world.wait(None, quantile, Time::ZERO, seconds(60)));
        let goodput = world.goodput(0, Time::ZERO, seconds(60)) / 1e6;
        println!("{:>8} {goodput:>7.2} {:>8.0} {:>8.0}", controllers.name(), wait(0.5), wait(0.95));
    }
}

/// The time course of one flow beside CUBIC, which starts 5 s later or earlier and ends after 35 s.
fn watch(late: bool, lone: bool, path: &str) {
    let numbers: Vec<f64> = path.split(',').filter_map(|word| word.parse().ok()).collect();
    let [mbps, rtt, buffer] = numbers[..] else { return eprintln!("{path}: give a path as Mbit/s,ms,BDP, such as 20,40,1") };
    let metrics = Arc::new(PathMetrics::default());
    let rtt = Duration::from_secs_f64(rtt / 1e3);
    let mut world = World::new(bottleneck(mbps, rtt, bdp(mbps, rtt, buffer)), 1);
    let (ours, theirs) = if late { (5, 0) } else { (0, 5) };
    world.add(&Controllers::Rate(metrics.clone()), Source::Bulk, seconds(ours));
    let source = if lone { Source::Idle } else { Source::Bulk };
    let other = world.add(&Controllers::Cubic, source, seconds(theirs));
    course(&mut world, &metrics, Time::ZERO, seconds(35));
    world.flow(other).set_source(Source::Idle, seconds(35));
    course(&mut world, &metrics, seconds(35), seconds(45));
}

fn watch_trace(trace: Arc<Trace>) {
    let metrics = Arc::new(PathMetrics::default());
    let mut world = World::new(recorded(trace), 1);
    world.add(&Controllers::Rate(metrics.clone()), Source::Bulk, Time::ZERO);
    course(&mut world, &metrics, Time::ZERO, seconds(60));
}

/// Prints ten lines per second: bytes, Mbit/s, ms, and the goodput of the first flow and of all flows.
fn course(world: &mut World, metrics: &PathMetrics, from: Time, to: Time) {
    println!(
        "{:>6} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "s", "window", "flight", "pacing", "rate", "min RTT", "queue", "ours", "all"
    );
    let mut before = from;
    while before < to {
        let now = before + ms(100);
        world.run_until(now);
        println!(
            "{:>6.1} {:>8} {:>8} {:>8.2} {:>8.2} {:>8.1} {:>8.1} {:>8.2} {:>8.2}",
            now.as_nanos() as f64 / 1e9,
            metrics.window().get(),
            metrics.in_flight().get(),
            metrics.pacing().bps() as f64 / 1e6,
            metrics.delivery_rate().bps() as f64 / 1e6,
            millis(metrics.min_rtt().unwrap_or_default()),
            millis(metrics.queueing_delay()),
            world.goodput(0, before, now) / 1e6,
            world.total(before, now) / 1e6,
        );
        before = now;
    }
}
