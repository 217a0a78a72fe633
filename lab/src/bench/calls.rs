//! Cost of Braid per connect and per datagram.

use std::io::{self, Read, Write};
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
/// Pause after a start: a starting daemon uses more CPU time than a running one, which affects measurements on a machine with few cores.
const SETTLE: Duration = Duration::from_millis(1500);

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "calls",
        "Cost of system calls",
        "Two links joined by veth pairs without limits or emulator. In one half of each pair of runs the daemon (max-throughput) runs, in the \
         other it does not, in changing order. Connect: one non-blocking connect() to a listening socket with the whole handshake, timed in the \
         thread that calls it and accepts it afterwards. A connection's life: socket(), connect(), a byte, accept() and close(). Datagram: \
         sendto() of 100 bytes on an unconnected socket. Every ten calls the benchmark measures the machine's speed by the time of pipe \
         operations. Times are scaled to the median speed.",
    );
    let calls = calls(settings)?;
    report.raw = report_results(&calls, &mut report);
    note_other_daemons(&mut report)?;
    Ok(report)
}

/// For each round of calls, the microseconds of the reference operation and the results of the calls.
type Rounds<T> = Vec<(f64, Vec<T>)>;

/// A batch of calls with the daemon or without. Connections: microseconds of connect(), and of the whole life.
struct Batch {
    with: bool,
    connections: Rounds<(f64, f64)>,
    datagrams: Rounds<f64>,
}

/// Microseconds per call, scaled to the machine's median speed.
#[derive(Debug, Default)]
struct Calls {
    connect: [Vec<f64>; 2],
    /// Microseconds per call, not scaled.
    unscaled: [Vec<f64>; 2],
    connect_medians: Pairs,
    life: Pairs,
    datagram: Pairs,
}

impl Calls {
    fn of(batches: &[Batch]) -> Self {
        let looks =
            |batch: &Batch| batch.connections.iter().map(|round| round.0).chain(batch.datagrams.iter().map(|round| round.0)).collect();
        let usual = median(&batches.iter().flat_map(|batch| -> Vec<f64> { looks(batch) }).collect::<Vec<_>>());
        let mut calls = Self::default();
        for Batch { with, connections, datagrams } in batches {
            let connections: Vec<_> = connections
                .iter()
                .flat_map(|(look, round)| round.iter().map(move |(connect, life)| (*connect, connect * usual / look, life * usual / look)))
                .collect();
            let connects: Vec<f64> = connections.iter().map(|it| it.1).collect();
            let datagrams: Vec<f64> = datagrams.iter().flat_map(|(look, round)| round.iter().map(move |it| it * usual / look)).collect();
            calls.connect_medians.push(*with, median(&connects));
            calls.life.push(*with, median(&connections.iter().map(|it| it.2).collect::<Vec<_>>()));
            calls.datagram.push(*with, median(&datagrams));
            calls.unscaled[usize::from(*with)].extend(connections.iter().map(|it| it.0));
            calls.connect[usize::from(*with)].extend(connects);
        }
        calls
    }
}

fn calls(settings: &Settings) -> Result<Calls> {
    let lab = LINKS.iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let (listener, to) = listener(&lab, 9000)?;
    listener.set_nonblocking(true)?;
    let swallower = swallow_datagrams(&lab, 9001)?;
    let (pairs, batch) = if settings.quick { (4, 250) } else { (40, 620) };
    let mut batches = Vec::new();
    for pair in 0..pairs {
        for with in [pair % 2 == 0, pair % 2 != 0] {
            let daemon = daemon(&lab, settings, with, SETTLE)?;
            let connections = lab.client().run(|| time_connects(to, &listener, batch))??;
            let datagrams = lab.client().run(|| time_datagrams(swallower, 10 * batch))??;
            drop(daemon);
            batches.push(Batch { with, connections, datagrams });
        }
    }
    progress(&format!("{} connects a side", pairs * batch));
    Ok(Calls::of(&batches))
}

/// A round of calls between two measurements of the reference operation.
const ROUND: usize = 10;

/// On a machine that shares its cores, the time of the same operation varies by half within a second, far more than the measured difference.
/// Each round of calls is therefore compared with an operation that Braid does not affect: a few bytes written to a pipe and read.
struct Yardstick {
    pipe: (io::PipeReader, io::PipeWriter),
}

impl Yardstick {
    fn new() -> io::Result<Self> {
        Ok(Self { pipe: io::pipe()? })
    }

    /// The median microseconds of a few reference operations.
    fn look(&mut self) -> io::Result<f64> {
        let one = |_| -> io::Result<f64> {
            let begin = Instant::now();
            for _ in 0..4 {
                self.pipe.1.write_all(&[0; 100])?;
                self.pipe.0.read_exact(&mut [0; 100])?;
            }
            Ok(begin.elapsed().as_secs_f64() * 1e6)
        };
        Ok(median(&(0..9).map(one).collect::<io::Result<Vec<_>>>()?))
    }

    fn rounds<T>(&mut self, count: usize, mut call: impl FnMut() -> io::Result<T>) -> io::Result<Rounds<T>> {
        (0..count / ROUND)
            .map(|_| {
                let before = self.look()?;
                let round = (0..ROUND).map(|_| call()).collect::<io::Result<_>>()?;
                Ok(((before + self.look()?) / 2.0, round))
            })
            .collect()
    }
}

/// Measures connections in rounds: for each round the time of the reference operation, and for each connection the microseconds of its connect() and of
/// its whole life. The same thread accepts each connection after its connect(). A separate thread would sometimes have to wake up first, which takes longer
/// than what is measured here.
fn time_connects(to: SocketAddr, listener: &Socket, count: usize) -> io::Result<Rounds<(f64, f64)>> {
    let one = || -> io::Result<(f64, f64)> {
        let begin = Instant::now();
        let (took, _) = connect(to)?;
        // A connection that was reset before accept() may no longer exist.
        let _ = listener.accept();
        Ok((took.as_secs_f64() * 1e6, begin.elapsed().as_secs_f64() * 1e6))
    };
    // Warms up caches.
    for _ in 0..50 {
        one()?;
    }
    Yardstick::new()?.rounds(count, one)
}

/// Measures datagrams in rounds: the microseconds of each sendto().
fn time_datagrams(to: SocketAddr, count: usize) -> io::Result<Rounds<f64>> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    let one = || -> io::Result<f64> {
        let begin = Instant::now();
        socket.send_to(&[0; 100], to)?;
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    };
    Yardstick::new()?.rounds(count, one)
}

fn report_results(calls: &Calls, report: &mut Report) -> Value {
    let [without, with] = &calls.connect;
    let row = |what: &str, without: f64, with: f64| {
        vec![what.to_owned(), format!("{without:.2} µs"), format!("{with:.2} µs"), format!("{:+.2} µs", with - without)]
    };
    let middle = |pairs: &Pairs| (median(&pairs.without), median(&pairs.with));
    let (connect, life, datagram) = (middle(&calls.connect_medians), middle(&calls.life), middle(&calls.datagram));
    let rows = vec![
        row(&format!("connect(), median of {}", without.len()), median(without), median(with)),
        row("connect(), 95th percentile", quantile(without, 0.95), quantile(with, 0.95)),
        row("connect(), median of the batches' medians", connect.0, connect.1),
        row("connect(), median, not scaled", median(&calls.unscaled[0]), median(&calls.unscaled[1])),
        row("a connection's life, median of the batches' medians", life.0, life.1),
        row("sendto(), unconnected, median of the batches' medians", datagram.0, datagram.1),
    ];
    report.table("Two links; what one call takes:", "what | without | with | more", rows);
    report.notes.push(format!(
        "The runs without Braid use a namespace that had Braid's routing rules before: in a namespace that never had custom rules the kernel \
         skips them, and a connect takes less time. Per batch, the median connect() takes {} µs more (95 % interval of the mean).",
        interval(&calls.connect_medians.more())
    ));
    let more = |(without, with): (f64, f64)| format!("{:+.2} µs of {without:.2}", with - without);
    let all = (median(without), median(with));
    report.aim(format!("a connect takes at most 2 µs more (median of {})", without.len()), more(all), all.1 - all.0 <= 2.0);
    report.aim("the cost of an unconnected datagram is stated", more(datagram), true);
    json!({ "connect_median_us": calls.connect_medians.json(), "life_us": calls.life.json(), "datagram_us": calls.datagram.json() })
}
