//! Workloads: downloads by real curl processes, one each, as in the papers' experiments.

use std::net::IpAddr;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use braid_model::{ByteCount, Rate};
use braid_netem::Random;
use serde::{Deserialize, Serialize};

use crate::web::Web;

/// DBAS's browser class: size, and arrivals a second (DBAS, section IV).
pub const DBAS_BROWSER: (ByteCount, f64) = (ByteCount::new(22_380), 13.0);
/// DBAS's bulk class (FTP).
pub const DBAS_BULK: (ByteCount, f64) = (ByteCount::new(285_000), 1.0);

/// A planned download.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Download {
    /// Start time, from the beginning of the workload.
    pub at: Duration,
    /// Size of the file.
    pub size: ByteCount,
}

/// A finished download.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Requested size.
    pub size: ByteCount,
    /// Start time of curl, from the beginning of the workload.
    pub started: Duration,
    /// End time of curl.
    pub ended: Duration,
    /// Received bytes.
    pub bytes: ByteCount,
    /// The local address, which shows the link; `None` if curl never connected.
    pub local: Option<IpAddr>,
    /// Exit code of curl (28: timeout); `None` if it was killed.
    pub exit_code: Option<i32>,
}

impl Record {
    /// Whether all bytes arrived.
    pub fn complete(&self) -> bool {
        self.exit_code == Some(0) && self.bytes == self.size
    }

    /// Duration of the download.
    pub fn took(&self) -> Duration {
        self.ended.saturating_sub(self.started)
    }
}

/// `count` downloads of `size`, started together.
pub fn together(count: usize, size: ByteCount) -> Vec<Download> {
    vec![Download { at: Duration::ZERO, size }; count]
}

/// Poisson arrivals of each class (size, arrivals a second) over `span`, in order of time.
pub fn poisson(classes: &[(ByteCount, f64)], span: Duration, seed: u64) -> Vec<Download> {
    let mut downloads = Vec::new();
    for (number, (size, rate)) in classes.iter().enumerate() {
        let mut random = Random::new(seed.wrapping_mul(1_000_003).wrapping_add(number as u64));
        let mut at = 0.0;
        loop {
            // 53 bits, above 0 and up to 1.
            let uniform = ((random.next() >> 11) + 1) as f64 / (1u64 << 53) as f64;
            at -= uniform.ln() / rate;
            if at.is_nan() || at >= span.as_secs_f64() {
                break;
            }
            downloads.push(Download { at: Duration::from_secs_f64(at), size: *size });
        }
    }
    downloads.sort_by_key(|download| download.at);
    downloads
}

/// DNIS's mix: long and short downloads, each Poisson (DNIS, section IV).
pub fn dnis(long: (ByteCount, f64), short: (ByteCount, f64), span: Duration, seed: u64) -> Vec<Download> {
    poisson(&[long, short], span, seed)
}

/// DBAS's mix, with its arrival rates times `scale`.
pub fn dbas(scale: f64, span: Duration, seed: u64) -> Vec<Download> {
    poisson(&[DBAS_BROWSER, DBAS_BULK].map(|(size, rate)| (size, rate * scale)), span, seed)
}

/// Makes the downloads, each by a curl of its own that `launch` prepares: `launch(program)` gives the command to which the arguments are
/// added, so that it says where curl runs, as whom and under what. `limit` is how long one download may take.
pub fn run(web: &Web, downloads: &[Download], limit: Duration, launch: impl Fn(&str) -> Result<Command>) -> Result<Vec<Record>> {
    run_each(web, downloads, limit, |_| launch("curl"))
}

/// Runs downloads like [`run`], but `launch` prepares a curl of any name for each download, so that classes can be separate programs.
pub fn run_each(web: &Web, downloads: &[Download], limit: Duration, launch: impl Fn(&Download) -> Result<Command>) -> Result<Vec<Record>> {
    perform(&planned(web, downloads, |_| limit)?, launch)
}

/// Runs downloads with curl; downloads that are incomplete at `end`, from the beginning of the workload, are cut off.
pub fn run_until(web: &Web, downloads: &[Download], end: Duration, launch: impl Fn(&str) -> Result<Command>) -> Result<Vec<Record>> {
    // For curl, zero means no limit.
    let rest = |download: &Download| end.saturating_sub(download.at).max(Duration::from_millis(1));
    perform(&planned(web, downloads, rest)?, |_| launch("curl"))
}

/// Runs all downloads from one process, which `launch` prepares from a program and its arguments: `braid run` steers it and its children.
pub fn run_in_one(web: &Web, downloads: &[Download], limit: Duration, launch: impl Fn(&str) -> Result<Command>) -> Result<Vec<Record>> {
    let planned = planned(web, downloads, |_| limit)?;
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    let mut command = launch(&program.to_string_lossy())?;
    let mut child = command.arg("download").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start the downloads")?;
    let input = child.stdin.take().context("the downloads' process has no input")?;
    serde_json::to_writer(input, &planned)?;
    let output = child.wait_with_output()?;
    anyhow::ensure!(output.status.success(), "the downloads' process failed: {}", output.status);
    serde_json::from_slice(&output.stdout).context("the downloads' process printed no results")
}

/// Runs the downloads that standard input lists, and prints the results on standard output: the other end of [`run_in_one`].
pub fn serve_downloads() -> Result<()> {
    let planned: Vec<PlannedDownload> = serde_json::from_reader(std::io::stdin()).context("standard input lists no downloads")?;
    let records = perform(&planned, |_| Ok(Command::new("curl")))?;
    Ok(serde_json::to_writer(std::io::stdout(), &records)?)
}

/// A download and its URL.
#[derive(Debug, Serialize, Deserialize)]
struct PlannedDownload {
    download: Download,
    url: String,
    limit: Duration,
}

fn planned(web: &Web, downloads: &[Download], limit: impl Fn(&Download) -> Duration) -> Result<Vec<PlannedDownload>> {
    downloads
        .iter()
        .map(|download| Ok(PlannedDownload { download: *download, url: web.url(download.size)?, limit: limit(download) }))
        .collect()
}

fn perform(planned: &[PlannedDownload], launch: impl Fn(&Download) -> Result<Command>) -> Result<Vec<Record>> {
    let (results, finished) = mpsc::channel();
    let begin = Instant::now();
    for (number, PlannedDownload { download, url, limit }) in planned.iter().enumerate() {
        let mut command = launch(download)?;
        command.args(["-s", "-o", "/dev/null", "-w", "%{size_download} %{local_ip}", "--max-time"]);
        command.arg(limit.as_secs_f64().to_string()).arg(url);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        thread::sleep(download.at.saturating_sub(begin.elapsed()));
        let started = begin.elapsed();
        let child = command.spawn().context("cannot run curl: run lab/install-deps.sh")?;
        let (results, size) = (results.clone(), download.size);
        thread::spawn(move || {
            let output = child.wait_with_output();
            let ended = begin.elapsed();
            let record = output.map(|output| {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                let (bytes, local) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
                let bytes = ByteCount::new(bytes.parse().unwrap_or(0));
                Record { size, started, ended, bytes, local: local.trim().parse().ok(), exit_code: output.status.code() }
            });
            // The receiver is gone if another download could not be started.
            let _ = results.send((number, record));
        });
    }
    drop(results);
    let mut records: Vec<_> = finished.iter().collect();
    records.sort_by_key(|(number, _)| *number);
    records.into_iter().map(|(_, record)| record.context("cannot wait for curl")).collect()
}

/// Fetches a page as browsers do: its HTML, then `objects` of `size` over six connections. Returns the duration.
pub fn page(web: &Web, objects: usize, size: ByteCount, launch: impl Fn(&str) -> Result<Command>) -> Result<Duration> {
    let begin = Instant::now();
    let html = web.url(ByteCount::new(22_380))?;
    let object = web.url(size)?;
    for urls in [vec![html], vec![object; objects]] {
        let mut command = launch("curl")?;
        command.args(["-s", "--fail", "--http1.1", "--parallel", "--parallel-immediate", "--parallel-max", "6"]);
        for url in urls {
            command.args(["-o", "/dev/null"]).arg(url);
        }
        let status = command.stdin(Stdio::null()).status().context("cannot run curl: run lab/install-deps.sh")?;
        anyhow::ensure!(status.success(), "curl could not fetch the page: {status}");
    }
    Ok(begin.elapsed())
}

/// Summary of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Summary {
    /// Number of complete downloads.
    pub complete: usize,
    /// Number of incomplete downloads.
    pub failed: usize,
    /// Received bytes of all downloads over the time from the first start to the last end.
    pub goodput: Rate,
    /// Mean duration of the complete downloads.
    pub mean_time: Duration,
    /// Time from the first start to the last end.
    pub makespan: Duration,
}

/// Summarises the records.
pub fn summarise(records: &[Record]) -> Summary {
    let complete: Vec<_> = records.iter().filter(|record| record.complete()).collect();
    let bytes = ByteCount::new(records.iter().map(|record| record.bytes.get()).sum());
    let first = records.iter().map(|record| record.started).min().unwrap_or_default();
    let last = records.iter().map(|record| record.ended).max().unwrap_or_default();
    let total: Duration = complete.iter().map(|record| record.took()).sum();
    Summary {
        complete: complete.len(),
        failed: records.len() - complete.len(),
        goodput: bytes.per(last - first),
        mean_time: total / complete.len().max(1) as u32,
        makespan: last - first,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_have_their_rates_and_follow_their_seed() {
        let hour = Duration::from_secs(3600);
        let mix = dbas(1.0, hour, 1);
        let browser = mix.iter().filter(|d| d.size == DBAS_BROWSER.0).count() as f64 / 3600.0;
        let bulk = mix.iter().filter(|d| d.size == DBAS_BULK.0).count() as f64 / 3600.0;
        assert!((browser - 13.0).abs() < 0.3 && (bulk - 1.0).abs() < 0.1, "{browser} {bulk}");
        assert!(mix.is_sorted_by_key(|d| d.at) && mix.iter().all(|d| d.at < hour));
        assert_eq!(dbas(0.1, hour, 1), dbas(0.1, hour, 1));
        assert_ne!(dbas(0.1, hour, 1), dbas(0.1, hour, 2));
        assert_eq!(poisson(&[(ByteCount::new(1), 0.0)], hour, 1), []);
    }

    #[test]
    fn a_summary_counts_received_bytes() {
        let record = |started, ended, bytes, exit_code| Record {
            size: ByteCount::new(1000),
            started: Duration::from_secs(started),
            ended: Duration::from_secs(ended),
            bytes: ByteCount::new(bytes),
            local: None,
            exit_code,
        };
        let records = [record(1, 2, 1000, Some(0)), record(1, 4, 1000, Some(0)), record(2, 5, 500, Some(28))];
        let summary = summarise(&records);
        assert_eq!((summary.complete, summary.failed), (2, 1));
        assert_eq!(summary.goodput, ByteCount::new(2500).per(Duration::from_secs(4)));
        assert_eq!((summary.mean_time, summary.makespan), (Duration::from_secs(2), Duration::from_secs(4)));
        assert_eq!(summarise(&[]).goodput, Rate::ZERO);
    }
}
