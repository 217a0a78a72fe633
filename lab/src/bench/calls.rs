//! What Braid costs a connection and a datagram, call by call.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use socket2::Socket;

use super::overhead::{daemon, interval, note_other_daemons};
use super::report::Report;
use super::sockets::{connect, listener, swallow_datagrams};
use super::stats::{Pairs, median, quantile};
use super::{Settings, progress};
use crate::lab::Lab;
use crate::spec::LinkSpec;

const LINKS: [&str; 2] = ["eth0", "eth1"];
/// Which of the batches is shown besides: a machine that shares its cores with others is slower by a third for seconds at a time, whatever it
/// runs, and how many batches that meets differs by chance more than what is measured.
const QUIET: f64 = 0.25;
const SETTLE: Duration = Duration::from_millis(500);

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "calls",
        "Calls",
        "Two links joined by veth pairs without limits or emulator; the daemon is started (max-throughput) for one half of each pair and \
         stopped for the other, in changing order. Connect: one non-blocking connect() to a listening socket, the whole handshake, timed in \
         the thread that calls it and accepts it afterwards; its life: socket(), connect(), accept() and close(). Datagram: sendto() of 100 bytes by an \
         unconnected socket.",
    );
    let calls = calls(settings)?;
    report.raw = tell(&calls, &mut report);
    note_other_daemons(&mut report)?;
    Ok(report)
}

/// Microseconds by call.
#[derive(Debug, Default)]
struct Calls {
    connect: [Vec<f64>; 2],
    life: Pairs,
    datagram: Pairs,
    connect_medians: Pairs,
}

fn calls(settings: &Settings) -> Result<Calls> {
    let lab = LINKS.iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let (listener, to) = listener(&lab, 9000)?;
    listener.set_nonblocking(true)?;
    let swallower = swallow_datagrams(&lab, 9001)?;
    let (pairs, batch) = if settings.quick { (4, 250) } else { (40, 250) };
    let mut calls = Calls::default();
    for pair in 0..pairs {
        for with in [pair % 2 == 0, pair % 2 != 0] {
            let daemon = daemon(&lab, settings, with, SETTLE)?;
            let (connects, life) = lab.client().run(|| time_connects(to, &listener, batch))??;
            let datagram = lab.client().run(|| time_datagrams(swallower, 10 * batch))??;
            drop(daemon);
            calls.connect_medians.push(with, median(&connects));
            calls.connect[usize::from(with)].extend(connects);
            calls.life.push(with, life);
            calls.datagram.push(with, datagram);
        }
    }
    progress(&format!("{} connects a side", calls.connect[0].len()));
    Ok(calls)
}

/// Microseconds: of each connect(), and the mean of a connection's whole life. The other end is served by the same thread between two
/// connects: one that sleeps on another CPU makes a connect wait for its waking or not, as it happens to be awake still, which takes more
/// than what is measured here.
fn time_connects(to: SocketAddr, listener: &Socket, count: usize) -> io::Result<(Vec<f64>, f64)> {
    let one = || -> io::Result<Duration> {
        let (took, _) = connect(to)?;
        // What was reset before it was accepted may be gone.
        let _ = listener.accept();
        Ok(took)
    };
    // Caches first.
    for _ in 0..50 {
        one()?;
    }
    let begin = Instant::now();
    let times = (0..count).map(|_| one().map(|took| took.as_secs_f64() * 1e6)).collect::<io::Result<_>>()?;
    Ok((times, begin.elapsed().as_secs_f64() * 1e6 / count as f64))
}

/// The median microseconds of one sendto().
fn time_datagrams(to: SocketAddr, count: usize) -> io::Result<f64> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begin = Instant::now();
        socket.send_to(&[0; 100], to)?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&times))
}

fn tell(calls: &Calls, report: &mut Report) -> Value {
    let [without, with] = &calls.connect;
    let row = |what: &str, without: f64, with: f64| {
        vec![what.to_owned(), format!("{without:.2} µs"), format!("{with:.2} µs"), format!("{:+.2} µs", with - without)]
    };
    let middle = |pairs: &Pairs| (median(&pairs.without), median(&pairs.with));
    let quiet = |pairs: &Pairs| (quantile(&pairs.without, QUIET), quantile(&pairs.with, QUIET));
    let (life, datagram) = (middle(&calls.life), middle(&calls.datagram));
    let (connect, sending) = (quiet(&calls.connect_medians), quiet(&calls.datagram));
    let rows = vec![
        row(&format!("connect(), median of {}", without.len()), median(without), median(with)),
        row("connect(), 95th percentile", quantile(without, 0.95), quantile(with, 0.95)),
        row("connect(), lower quartile of the batches' medians", connect.0, connect.1),
        row("a connection's life (median of the batches' means)", life.0, life.1),
        row("sendto(), unconnected (median of the batches' medians)", datagram.0, datagram.1),
        row("sendto(), lower quartile of the batches' medians", sending.0, sending.1),
    ];
    report.table("Two links; what one call takes:", "what | without | with | more", rows);
    report.notes.push(format!(
        "The sides without Braid have had its rules before: in a namespace that never had a rule of its own the kernel skips them, and a \
         connect takes less. Batch by batch the median connect() takes {} µs more (95 % interval of the mean).",
        interval(&calls.connect_medians.more())
    ));
    let more = |(without, with): (f64, f64)| format!("{:+.2} µs of {without:.2}", with - without);
    let all = (median(without), median(with));
    report.aim(format!("a connect takes at most 2 µs more (median of {})", without.len()), more(all), all.1 - all.0 <= 2.0);
    report.aim("the cost of an unconnected datagram is stated", more(sending), true);
    json!({ "connect_median_us": calls.connect_medians.json(), "life_us": calls.life.json(), "datagram_us": calls.datagram.json() })
}
