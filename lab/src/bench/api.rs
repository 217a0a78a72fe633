//! Response times of the daemon's API with thousands of active flows.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::report::Report;
use super::sockets::accept_and_keep;
use super::stats::{median, quantile, worst};
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::LinkSpec;

/// Number of active flows.
const FLOWS: usize = 5_000;
/// Requested paths, in turn.
const PATHS: [&str; 5] = ["/v1/status", "/v1/links", "/v1/apps", "/v1/config", "/v1/flows"];
/// Pause between an answer and the next request.
const PAUSE: Duration = Duration::from_millis(20);
/// Aim for the duration of an answer.
const AIM_MS: f64 = 20.0;

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "api",
        "Response times of the API",
        "Two links, 5,000 TCP connections held open by one program, and one client of the Unix socket. The client sends one request after the \
         other, 20 ms after each answer, each on a new connection. The time is from the connection to the answer's last byte, first without other \
         clients, then while another client listens to `/v1/events`, as the page does.",
    );
    let lab = ["wlan0", "lte0"].iter().fold(Lab::builder(), |builder, name| builder.link(LinkSpec::direct(name))).start()?;
    let to = accept_and_keep(&lab, 9000)?;
    let daemon = Daemon::start(&lab, &settings.braid, "max-throughput", "")?;
    let _flows = lab.client().run(|| (0..FLOWS).map(|_| TcpStream::connect(to)).collect::<std::io::Result<Vec<_>>>())??;
    let begin = Instant::now();
    while daemon.status(&lab)?["flows"].as_u64() < Some(FLOWS as u64) {
        ensure!(begin.elapsed() < Duration::from_secs(30), "the daemon does not know {FLOWS} flows");
        thread::sleep(Duration::from_millis(100));
    }
    let rounds = if settings.quick { 100 } else { 500 };
    let (mut rows, mut raw, mut slowest) = (Vec::new(), Vec::new(), 0.0);
    for listened in [false, true] {
        let listener = listened.then(|| listen(daemon.socket())).transpose()?;
        for (path, answers) in PATHS.iter().zip(ask(daemon.socket(), rounds)?) {
            let took: Vec<f64> = answers.iter().map(|(took, _)| *took).collect();
            let bytes = answers.last().map_or(0, |(_, bytes)| *bytes);
            let (middle, late, last) = (median(&took), quantile(&took, 0.99), worst(&took));
            slowest = f64::max(slowest, late);
            progress(&format!("{path}{}: median {middle:.1} ms, 99 % {late:.1} ms", if listened { ", listened to" } else { "" }));
            rows.push(vec![
                format!("`{path}`{}", if listened { ", listened to" } else { "" }),
                format!("{:.0} kB", bytes as f64 / 1e3),
                format!("{middle:.1} ms"),
                format!("{late:.1} ms"),
                format!("{last:.1} ms"),
            ]);
            raw.push(json!({ "path": path, "listened": listened, "bytes": bytes, "ms": took }));
        }
        drop(listener);
    }
    report.table(format!("{rounds} answers each:"), "asked for | answer | median | 99 % | worst", rows);
    report.aim("99 % of answers within 20 ms", format!("{slowest:.1} ms"), slowest < AIM_MS);
    report.raw = Value::Array(raw);
    Ok(report)
}

/// Milliseconds and bytes of every answer, by path.
fn ask(socket: &Path, rounds: usize) -> Result<Vec<Vec<(f64, usize)>>> {
    let mut answers = vec![Vec::with_capacity(rounds); PATHS.len()];
    for _ in 0..rounds {
        for (path, answers) in PATHS.iter().zip(&mut answers) {
            let begin = Instant::now();
            let bytes = get(socket, path)?;
            answers.push((begin.elapsed().as_secs_f64() * 1e3, bytes));
            thread::sleep(PAUSE);
        }
    }
    Ok(answers)
}

fn request(socket: &Path, path: &str) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(socket).context("nobody answers on the daemon's socket")?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: braid\r\nconnection: close\r\n\r\n")?;
    Ok(stream)
}

fn get(socket: &Path, path: &str) -> Result<usize> {
    let mut answer = Vec::new();
    request(socket, path)?.read_to_end(&mut answer)?;
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "{path}: {}", String::from_utf8_lossy(&answer[..answer.len().min(300)]));
    Ok(answer.len())
}

/// Opens an event stream that receives until it is dropped.
fn listen(socket: &Path) -> Result<Listener> {
    let stream = request(socket, "/v1/events")?;
    let mut reader = stream.try_clone()?;
    let thread = thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while reader.read(&mut buffer).is_ok_and(|read| read > 0) {}
    });
    Ok(Listener { stream, thread: Some(thread) })
}

struct Listener {
    stream: UnixStream,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}
