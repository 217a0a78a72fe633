//! Cost of `braid run` per connect.

use std::io;
use std::net::SocketAddr;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::overhead::interval;
use super::report::Report;
use super::sockets::{accept_and_drop, connect};
use super::stats::{Pairs, median};
use super::{Settings, progress};
use crate::lab::Lab;
use crate::spec::LinkSpec;

const LINKS: [&str; 2] = ["eth0", "eth1"];

/// Microseconds of each connect.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Connects {
    nonblocking: Vec<f64>,
    blocking: Vec<f64>,
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "run-calls",
        "Cost of a connect under `braid run`",
        "Two links joined by veth pairs without limits or emulator. One program connects to a listening socket, alternately with a non-blocking \
         and a blocking socket, and times each connect(), which includes the handshake. It runs alone and under `braid run` (max-throughput), in \
         changing order. Each run is a process of its own; the first tenth of its connects does not count.",
    );
    let lab = LINKS.iter().fold(Lab::builder().rp_filter(2), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let to = accept_and_drop(&lab, 9000)?;
    let (pairs, count) = if settings.quick { (3, 200) } else { (30, 2000) };
    let (mut nonblocking, mut blocking) = (Pairs::default(), Pairs::default());
    for pair in 0..pairs {
        for with in [pair % 2 == 0, pair % 2 != 0] {
            let connects = connects(settings, &lab, with, to, count)?;
            nonblocking.push(with, median(&connects.nonblocking));
            blocking.push(with, median(&connects.blocking));
        }
    }
    progress(&format!("{} connects of each kind", pairs * count));
    let row = |what: &str, pairs: &Pairs| {
        let (without, with) = (median(&pairs.without), median(&pairs.with));
        vec![what.to_owned(), format!("{without:.1} µs"), format!("{with:.1} µs"), format!("{:+.1} µs", with - without)]
    };
    let rows = vec![row("connect(), non-blocking", &nonblocking), row("connect(), blocking", &blocking)];
    report.table("Median of the runs' medians:", "what | alone | under braid run | more", rows);
    report.notes.push(format!(
        "Per pair of runs, the median connect() takes {} µs more non-blocking and {} µs more blocking (95 % interval of the mean).",
        interval(&nonblocking.more()),
        interval(&blocking.more())
    ));
    report.raw = json!({ "nonblocking_us": nonblocking.json(), "blocking_us": blocking.json() });
    Ok(report)
}

/// Runs [`time_connects`] in a process of its own in the lab.
fn connects(settings: &Settings, lab: &Lab, with: bool, to: SocketAddr, count: usize) -> Result<Connects> {
    let own = std::env::current_exe()?;
    let mut command = lab.client().command(if with { &settings.braid } else { &own })?;
    if with {
        command.args(["run", "--"]).arg(&own);
    }
    command.arg("connects").arg(to.to_string()).arg(count.to_string());
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot run braid run")?;
    ensure!(output.status.success(), "the program that connects failed ({})", output.status);
    let mut connects: Connects = serde_json::from_slice(&output.stdout).context("the program that connects printed no result")?;
    for all in [&mut connects.nonblocking, &mut connects.blocking] {
        all.drain(..all.len() / 10);
    }
    Ok(connects)
}

/// Times `count` connects of each kind and prints the result for [`run`].
pub(super) fn time_connects(to: SocketAddr, count: usize) -> Result<()> {
    let mut connects = Connects::default();
    for _ in 0..count {
        connects.nonblocking.push(connect(to)?.0.as_secs_f64() * 1e6);
        connects.blocking.push(block(to)?);
    }
    Ok(serde_json::to_writer(io::stdout(), &connects)?)
}

fn block(to: SocketAddr) -> io::Result<f64> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_linger(Some(Duration::ZERO))?;
    let begin = Instant::now();
    socket.connect(&to.into())?;
    Ok(begin.elapsed().as_secs_f64() * 1e6)
}
