//! One file over HTTPS from an ordinary server: `braid get` compared with curl and aria2.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::{ByteCount, Direction};
use serde_json::json;

use super::footprint::resident;
use super::report::Report;
use super::stats::{median, worst};
use super::{Settings, progress};
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;

/// Mbit/s, RTT in milliseconds, share lost.
const LINKS: [(&str, u64, u64, f64); 3] = [("wlan0", 20, 10, 0.0), ("eth0", 10, 60, 0.0), ("lte0", 5, 100, 0.01)];
/// The payload's share of a link's rate, without headers.
const PAYLOAD: f64 = 0.965;
/// Timeout of one transfer.
const LIMIT: Duration = Duration::from_secs(60);
/// Listening address of go-dispatch-proxy.
const DISPATCHER: u16 = 8480;
/// Options of aria2, as set by a user who knows the links.
const ARIA2: [&str; 11] = [
    "-q",
    "-x16",
    "-s16",
    "--min-split-size=1M",
    "--file-allocation=none",
    "--check-certificate=false",
    "--disable-ipv6=true",
    "--timeout=5",
    "--connect-timeout=5",
    "--max-tries=0",
    "--out=file",
];
/// Small files fetched in one run, and the size of each.
const SMALL: usize = 1000;
const SMALL_SIZE: usize = 2000;
/// Interval between samples of memory; the kernel keeps the maximum.
const LOOK: Duration = Duration::from_millis(50);
/// Aim for the resident memory of `braid get`, in megabytes (10^6).
const MEMORY: f64 = 64.0;
/// Aims: share of the links' payload rate, and multiple of the ideal time.
const SHARE: f64 = 0.93;
const TIME: f64 = 1.07;

/// Event half-way through the download.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Turn {
    Nothing,
    /// The fastest link drops to a fifth.
    Slower,
    /// The fastest link drops everything.
    Dies,
}

/// A program that downloads.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Program {
    Braid,
    Aria2,
    /// aria2 through go-dispatch-proxy, which spreads connections over links.
    Dispatch,
    Curl,
}

const PROGRAMS: [Program; 4] = [Program::Braid, Program::Aria2, Program::Dispatch, Program::Curl];

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Braid => "braid get",
            Self::Aria2 => "aria2c",
            Self::Dispatch => "aria2c through go-dispatch-proxy",
            Self::Curl => "curl",
        }
    }

    /// Missing programs that it needs.
    fn missing(self) -> Option<&'static str> {
        let needs: &[&str] = match self {
            Self::Braid => &[],
            Self::Aria2 => &["aria2c"],
            Self::Dispatch => &["aria2c", "go-dispatch-proxy", "proxychains4"],
            Self::Curl => &["curl"],
        };
        let there = |name: &&&str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
        };
        needs.iter().find(|name| !there(name)).copied()
    }
}

const TURNS: [(Turn, &str); 3] = [
    (Turn::Nothing, "steady"),
    (Turn::Slower, "the 20 Mbit/s link drops to a fifth half-way"),
    (Turn::Dies, "the 20 Mbit/s link dies half-way"),
];

/// Results of one program's downloads in one case.
#[derive(Debug, Clone, Default)]
struct Came {
    /// Seconds of each download; an aborted one counts as [`LIMIT`].
    seconds: Vec<f64>,
    /// Maximum resident memory, in megabytes (10^6).
    memory: f64,
    /// Whether some downloads were aborted.
    hung: bool,
    /// Why the program was skipped, or its error.
    without: Option<String>,
}

impl Came {
    fn told(&self, ideal: f64) -> String {
        match (&self.without, self.hung) {
            (Some(reason), _) => reason.clone(),
            (None, true) => format!("not ended after {} s", LIMIT.as_secs()),
            (None, false) => format!("{:.2} s ({:.3})", median(&self.seconds), ideal / median(&self.seconds)),
        }
    }
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "get",
        "One file from any server",
        "One file over HTTPS from nginx, over links of 20 Mbit/s (10 ms RTT), 10 (60 ms) and 5 (100 ms, 1 % loss each way), by `braid get`; by \
         `aria2c -x16 -s16 --multiple-interface` with all three links; by the same aria2 through go-dispatch-proxy (and proxychains, since aria2 \
         has no SOCKS support); and by curl, which uses the first link. Each run has its own lab and directory. aria2 binds addresses, not \
         devices. The benchmark therefore adds the routing rules (`ip rule add from ADDRESS`) without which aria2's packets leave over the first \
         link with another link's address, and timeouts of 5 s, without which aria2 waits for a dead link for a minute. Braid and curl get no such \
         help. Shares are the file's bytes over the payload that the links could carry (0.965 of their rates) from the program's start to its end, \
         including names, handshakes and the disk. A transfer that does not end is cut off after 60 s, reported as such and not repeated. If a \
         link changes half-way, ideal is the time that the links would need at their rates. Memory: VmHWM of `braid get`, sampled every 50 ms \
         until its end; also of one run that fetches 1,000 files of 2 kB over HTTPS from the same server over the same links.",
    );
    let size = ByteCount::new(if settings.quick { 20_000_000 } else { 40_000_000 });
    let repeat = if settings.quick { 1 } else { 3 };
    let (mut rows, mut raw, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    for (turn, title) in TURNS {
        let ideal = ideal(turn, size);
        let mut came = PROGRAMS.map(|program| Came { without: skipped(program, turn), ..Came::default() });
        for _ in 0..repeat {
            for (program, came) in PROGRAMS.into_iter().zip(&mut came) {
                if came.without.is_some() || (came.hung && program != Program::Braid) {
                    continue;
                }
                let (seconds, most) = match one(settings, turn, program, size) {
                    Ok(came) => came,
                    // The failure of another program is reported and does not end the benchmark.
                    Err(error) if program != Program::Braid => {
                        progress(&format!("{title}: {} failed: {error:#}", program.name()));
                        came.without = Some(format!("failed: {error:#}"));
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                progress(&format!("{title}: {} {seconds:.2} s, {:.3} of the ideal rate", program.name(), ideal / seconds));
                raw.push(json!({ "case": title, "program": program.name(), "seconds": seconds, "ideal_s": ideal, "memory_mb": most }));
                came.hung |= seconds >= LIMIT.as_secs_f64();
                came.seconds.push(seconds);
                came.memory = came.memory.max(most);
            }
        }
        judge(&mut report, turn, title, ideal, &came);
        memory.push((title.to_owned(), came[0].memory));
        rows.push([title.to_owned(), format!("{ideal:.2} s")].into_iter().chain(came.iter().map(|came| came.told(ideal))).collect());
    }
    let head = format!("what | ideal | {}", PROGRAMS.map(Program::name).join(" | "));
    report.table("Median time (share of the ideal rate):", &head, rows);
    memory.push((format!("{SMALL} files of {} kB", SMALL_SIZE / 1000), small(settings)?));
    tell_memory(&memory, &mut report);
    report.raw = json!({ "runs": raw, "memory_mb": memory });
    Ok(report)
}

fn tell_memory(memory: &[(String, f64)], report: &mut Report) {
    let rows = memory.iter().map(|(case, most)| vec![case.clone(), format!("{most:.1} MB")]).collect();
    report.table("Memory of braid get at most, in megabytes (10^6):", "case | VmHWM", rows);
    let most = memory.iter().map(|(_, most)| *most).fold(0.0, f64::max);
    report.aim(format!("memory of braid get at most {MEMORY:.0} MB"), format!("{most:.1} MB"), most <= MEMORY);
}

/// Why a program is skipped in this case.
fn skipped(program: Program, turn: Turn) -> Option<String> {
    match program.missing() {
        Some(name) => Some(format!("skipped: {name} is not in PATH")),
        None => (program == Program::Curl && turn != Turn::Nothing).then(|| "skipped: it uses one link, the one that turns".to_owned()),
    }
}

/// Compares the results with the aims.
fn judge(report: &mut Report, turn: Turn, title: &str, ideal: f64, came: &[Came; 4]) {
    let ours = &came[0].seconds;
    let measured = format!("median {:.3}, worst {:.3}", ideal / median(ours), ideal / worst(ours));
    if turn == Turn::Nothing {
        report.aim(format!("{title}: at least {SHARE} of the sum's payload"), measured.clone(), ideal / median(ours) >= SHARE);
    }
    report.aim(format!("{title}: at most {TIME} of the ideal time"), measured, median(ours) <= ideal * TIME);
    let others = came.iter().skip(1).filter(|came| came.without.is_none()).map(|came| median(&came.seconds));
    let best = others.fold(f64::INFINITY, f64::min);
    if best.is_finite() {
        let measured = format!("{:.2} s and {best:.2} s", median(ours));
        report.aim(format!("{title}: no slower than the best of the others"), measured, median(ours) <= best);
    }
}

fn payload(rates: impl Iterator<Item = u64>) -> f64 {
    rates.sum::<u64>() as f64 * 1e6 / 8.0 * PAYLOAD
}

/// Time of the link's change.
fn half_way(size: ByteCount) -> f64 {
    size.get() as f64 / payload(LINKS.iter().map(|link| link.1)) / 2.0
}

/// Seconds that the links would need at their rates.
fn ideal(turn: Turn, size: ByteCount) -> f64 {
    let before = payload(LINKS.iter().map(|link| link.1));
    let after = match turn {
        Turn::Nothing => before,
        Turn::Slower => payload([LINKS[0].1 / 5, LINKS[1].1, LINKS[2].1].into_iter()),
        Turn::Dies => payload(LINKS[1..].iter().map(|link| link.1)),
    };
    let half = half_way(size);
    half + (size.get() as f64 - half * before) / after
}

fn three_links() -> Result<Lab> {
    let links = LINKS.iter().map(|(name, rate, trip, loss)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(trip / 2)).loss(*loss));
    links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()
}

/// Seconds of one download, and the program's maximum resident memory in megabytes.
fn one(settings: &Settings, turn: Turn, program: Program, size: ByteCount) -> Result<(f64, f64)> {
    let lab = three_links()?;
    let web = Web::start(&lab)?;
    if matches!(program, Program::Aria2 | Program::Dispatch) {
        route_by_source(&lab)?;
    }
    let folder = lab.directory().join("downloads");
    std::fs::create_dir_all(&folder)?;
    let url = web.secure_url(size)?;
    let _dispatcher = if program == Program::Dispatch { Some(dispatcher(&lab)?) } else { None };
    let mut command = command(settings, &lab, &web, program, &url, &folder)?;
    let begin = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run {program:?}"))?;
    let mut turned = turn == Turn::Nothing;
    let mut peak = PeakMemory::default();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        peak.look(child.id());
        if !turned && begin.elapsed().as_secs_f64() >= half_way(size) {
            turned = true;
            match turn {
                Turn::Slower => lab.set(0, Direction::Down, |profile| profile.rate = mbps(LINKS[0].1 / 5).into())?,
                _ => lab.dark(0)?,
            }
        }
        if begin.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            return Ok((LIMIT.as_secs_f64(), peak.most));
        }
        thread::sleep(Duration::from_millis(2));
    };
    let seconds = begin.elapsed().as_secs_f64();
    let mut told = String::new();
    if let Some(mut errors) = child.stderr.take() {
        std::io::Read::read_to_string(&mut errors, &mut told)?;
    }
    ensure!(status.success(), "{program:?} ended with {status}: {}", told.trim());
    if program == Program::Braid {
        told.lines().filter(|line| line.contains(" in ")).for_each(progress);
    }
    let there = std::fs::metadata(folder.join("file"))?.len();
    ensure!(there == size.get(), "{program:?} left {there} bytes of {size}");
    Ok((seconds, peak.most))
}

/// Maximum resident memory of a running program, in megabytes.
#[derive(Default)]
struct PeakMemory {
    most: f64,
    looked: Option<Instant>,
}

impl PeakMemory {
    /// Samples the memory if a sample is due. A program that has ended has no more samples.
    fn look(&mut self, pid: u32) {
        if self.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            self.looked = Some(Instant::now());
            self.most = resident(pid).map_or(self.most, |(_, most)| most);
        }
    }
}

/// The most megabytes that `braid get` keeps resident while it fetches many small files.
fn small(settings: &Settings) -> Result<f64> {
    let lab = three_links()?;
    let web = Web::start(&lab)?;
    let folder = lab.directory().join("downloads");
    std::fs::create_dir_all(&folder)?;
    let content = [7; SMALL_SIZE];
    let urls = (0..SMALL).map(|number| Ok(web.publish(&format!("{number}.small"), &content)?.0.replace("http:", "https:")));
    let urls: Vec<String> = urls.collect::<Result<_>>()?;
    let mut command = lab.client().command(&settings.braid)?;
    command.env("XDG_STATE_HOME", &folder).arg("get").arg("--cacert").arg(web.certificate()).arg("--output-dir").arg(&folder).args(urls);
    let begin = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("cannot run braid get")?;
    let mut peak = PeakMemory::default();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        peak.look(child.id());
        if begin.elapsed() > LIMIT {
            child.kill()?;
        }
        thread::sleep(Duration::from_millis(2));
    };
    let came = (0..SMALL).filter(|number| folder.join(format!("{number}.small")).is_file()).count();
    ensure!(status.success() && came == SMALL, "braid get ended with {status} and {came} of {SMALL} files");
    progress(&format!("{SMALL} small files: {:.1} s, {:.1} MB resident", begin.elapsed().as_secs_f64(), peak.most));
    Ok(peak.most)
}

/// Routes packets with a link's address over that link.
fn route_by_source(lab: &Lab) -> Result<()> {
    for (number, (name, ..)) in LINKS.iter().enumerate() {
        let table = format!("{}", 100 + number);
        let gateway = format!("10.77.{number}.1");
        ip(lab, &["route", "add", "default", "via", &gateway, "dev", name, "table", &table])?;
        ip(lab, &["rule", "add", "from", &address(number), "table", &table])?;
    }
    Ok(())
}

fn ip(lab: &Lab, arguments: &[&str]) -> Result<()> {
    let output = lab.client().command("ip")?.args(arguments).output().context("cannot run ip")?;
    ensure!(output.status.success(), "ip {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// The client's address on a link.
fn address(number: usize) -> String {
    format!("10.77.{number}.2")
}

/// A program that is ended when this value is dropped.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// go-dispatch-proxy over all links, on [`DISPATCHER`].
fn dispatcher(lab: &Lab) -> Result<Running> {
    let mut command = lab.client().command("go-dispatch-proxy")?;
    command.args(["-quiet", "-lport", &DISPATCHER.to_string()]).args((0..LINKS.len()).map(address));
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let running = Running(child.context("cannot run go-dispatch-proxy")?);
    let begin = Instant::now();
    while !lab.client().run(|| std::net::TcpStream::connect(("127.0.0.1", DISPATCHER)).is_ok())? {
        ensure!(begin.elapsed() < Duration::from_secs(10), "go-dispatch-proxy does not answer after 10 s");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(running)
}

fn command(settings: &Settings, lab: &Lab, web: &Web, program: Program, url: &str, folder: &Path) -> Result<Command> {
    let client = lab.client();
    let target = folder.join("file");
    let mut command = client.command(match program {
        Program::Braid => settings.braid.as_path(),
        Program::Aria2 => Path::new("aria2c"),
        Program::Dispatch => Path::new("proxychains4"),
        Program::Curl => Path::new("curl"),
    })?;
    match program {
        Program::Braid => {
            // No earlier estimates, no stored state.
            command.env("XDG_STATE_HOME", folder).arg("get").arg("--cacert").arg(web.certificate()).arg("-o").arg(&target);
        }
        Program::Aria2 => {
            command.args(ARIA2).arg(format!("--multiple-interface={}", LINKS.map(|link| link.0).join(","))).arg("-d").arg(folder);
        }
        Program::Dispatch => {
            let config = folder.join("proxychains.conf");
            std::fs::write(&config, format!("strict_chain\n[ProxyList]\nsocks5 127.0.0.1 {DISPATCHER}\n"))?;
            command.args(["-q", "-f"]).arg(config).arg("aria2c").args(ARIA2).arg("-d").arg(folder);
        }
        Program::Curl => {
            command.arg("-s").arg("--cacert").arg(web.certificate()).arg("-o").arg(&target);
        }
    }
    command.arg(url);
    Ok(command)
}
