//! Links fail and return at random during downloads and an SSH session over a bond; then all links are dark for a while.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use braid_model::ByteCount;
use braid_netem::Random;

use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::relay::{Relay, await_paths};
use crate::spec::{LinkSpec, mbps, ms};
use crate::ssh::{Session, Ssh};
use crate::web::Web;

/// Name, Mbit/s, and RTT in milliseconds.
const LINKS: [(&str, u64, u64); 3] = [("wlan0", 20, 10), ("lte0", 10, 50), ("eth0", 6, 100)];
/// Milliseconds from one failure or return to the next.
const PAUSE: (u64, u64) = (150, 2500);
/// Size of the downloads, as a share of the capacity of all links during the churn.
const SHARE: f64 = 0.6;
/// Time that the downloads run before all links go dark, and about as long after.
const AROUND_DARK: Duration = Duration::from_secs(2);
/// Timeout of the downloads after all links have returned.
const REST: Duration = Duration::from_secs(120);

/// Parameters of a run.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Determines which links fail when.
    pub seed: u64,
    /// Number of concurrent downloads.
    pub downloads: usize,
    /// Duration of the random failures; at least one link always works.
    pub churn: Duration,
    /// Duration of the following period in which all links are dark.
    pub dark: Duration,
}

/// Results of a run. All transfers completed with the right bytes unless `failures` says otherwise.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Number of link failures.
    pub deaths: usize,
    /// Number of echoed lines of the SSH session.
    pub echoed: usize,
    /// The phase of random failures, then the dark phase.
    pub phases: [Phase; 2],
    /// Lost, changed or truncated transfers.
    pub failures: Vec<String>,
}

/// Results of one phase.
#[derive(Debug, Clone, Copy)]
pub struct Phase {
    /// Downloaded bytes.
    pub moved: ByteCount,
    /// Time until all downloads were complete.
    pub took: Duration,
    /// The longest time in which no download received a byte.
    pub all_stalled: Duration,
    /// The longest time in which one of the downloads received none.
    pub one_stalled: Duration,
    /// The longest wait for an echo of the SSH session.
    pub echo: Duration,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { moved, took, all_stalled, one_stalled, echo } = self;
        write!(f, "{moved} in {took:.1?}; without a byte: all {all_stalled:.2?}, one {one_stalled:.2?}; an echo {echo:.2?}")
    }
}

/// A new seed, short enough to type.
pub fn any_seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Random::new(since.as_nanos() as u64).up_to(999_999)
}

/// Runs the plan in a new lab. Needs root. Calls `done` after the first phase with its results and the number of failures.
pub fn run(braid: &Path, plan: Plan, done: impl FnOnce(usize, &Phase) -> Result<()>) -> Result<Outcome> {
    let links = LINKS.iter().map(|(name, rate, round_trip)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(*round_trip) / 2));
    let lab = links.fold(Lab::builder().seed(plan.seed), |builder, link| builder.link(link)).start()?;
    let (web, ssh) = (Web::start(&lab)?, Ssh::start(&lab)?);
    let relay = Relay::start(&lab, braid)?;
    let rules = [22, 80].map(|port| format!("[[app]]\nmatch = {{ port = {port} }}\ncarry = \"bond\"\n")).concat();
    let daemon = Daemon::start(&lab, braid, "max-throughput", &rules)?;
    relay.admit(&lab, &daemon)?;
    let session = ssh.session(&lab)?;
    let mut world = World { lab: &lab, session: &session, random: Random::new(plan.seed), alive: [true; LINKS.len()], deaths: 0 };

    let mut failures = Vec::new();
    let churned = {
        let downloads = Downloads::begin(&lab, &web, plan.downloads, carried_in(plan.churn.mul_f64(SHARE)), plan.seed)?;
        let end = Instant::now() + plan.churn;
        world.watch(downloads, |world| world.churn(end), &mut failures)?
    };
    done(world.deaths, &churned)?;
    await_paths(&lab, &daemon)?;
    let dark = {
        let downloads = Downloads::begin(&lab, &web, plan.downloads, carried_in(AROUND_DARK * 2), plan.seed + 1)?;
        world.watch(downloads, |world| world.all_dark(plan.dark), &mut failures)?
    };
    let deaths = world.deaths;
    let echoed = session.echoed();
    if let Err(error) = session.end() {
        failures.push(format!("{error:#}"));
    }
    Ok(Outcome { deaths, echoed, phases: [churned, dark], failures })
}

/// The lab and the programs in it.
struct World<'a> {
    lab: &'a Lab,
    session: &'a Session,
    random: Random,
    alive: [bool; LINKS.len()],
    deaths: usize,
}

impl World<'_> {
    /// Watches the downloads while `work` runs and until they end.
    fn watch(&mut self, downloads: Downloads, work: impl FnOnce(&mut Self) -> Result<()>, failures: &mut Vec<String>) -> Result<Phase> {
        let begin = Instant::now();
        let watched = thread::scope(|scope| {
            let watcher = scope.spawn(move || downloads.watch());
            work(self)?;
            watcher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        let took = begin.elapsed();
        failures.extend(watched.failures);
        let echo = self.session.longest_wait(begin, Instant::now());
        Ok(Phase { moved: watched.moved, took, all_stalled: watched.all_stalled, one_stalled: watched.one_stalled, echo })
    }

    /// Fails and restores links until `end`, then restores all.
    fn churn(&mut self, end: Instant) -> Result<()> {
        while Instant::now() < end {
            thread::sleep(ms(PAUSE.0 + self.random.up_to(PAUSE.1 - PAUSE.0)).min(end.saturating_duration_since(Instant::now())));
            let link = self.random.up_to(LINKS.len() as u64 - 1) as usize;
            let last = self.alive[link] && self.alive.iter().filter(|alive| **alive).count() == 1;
            let pulled = self.random.up_to(1) == 0;
            match (self.alive[link], last, pulled) {
                (true, true, _) => continue,
                (true, false, true) => self.lab.carrier(link, false)?,
                (true, false, false) => self.lab.dark(link)?,
                (false, ..) => self.revive(link)?,
            }
            self.deaths += usize::from(self.alive[link]);
            self.alive[link] = !self.alive[link];
        }
        for link in (0..LINKS.len()).filter(|link| !self.alive[*link]) {
            self.revive(link)?;
        }
        self.alive = [true; LINKS.len()];
        Ok(())
    }

    fn revive(&self, link: usize) -> Result<()> {
        self.lab.bright(link)?;
        self.lab.carrier(link, true)
    }

    fn all_dark(&mut self, span: Duration) -> Result<()> {
        thread::sleep(AROUND_DARK);
        (0..LINKS.len()).try_for_each(|link| self.lab.dark(link))?;
        thread::sleep(span);
        (0..LINKS.len()).try_for_each(|link| self.lab.bright(link))
    }
}

/// Downloads by curl, each of a different file.
struct Downloads {
    curls: Vec<Download>,
    size: ByteCount,
}

struct Download {
    curl: Child,
    original: PathBuf,
    copy: PathBuf,
    log: PathBuf,
}

/// Observations of the downloads.
struct Watched {
    moved: ByteCount,
    all_stalled: Duration,
    one_stalled: Duration,
    failures: Vec<String>,
}

impl Downloads {
    /// Starts `count` downloads, which move `total` together.
    fn begin(lab: &Lab, web: &Web, count: usize, total: ByteCount, seed: u64) -> Result<Self> {
        let home = lab.directory().join("downloads");
        fs::create_dir_all(&home)?;
        let size = ByteCount::new(total.get() / count as u64);
        let mut random = Random::new(seed);
        let mut published = Vec::new();
        for number in 0..count {
            let name = format!("{seed}-{number}");
            let content: Vec<u8> =
                (0..size.get().div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).take(size.get() as usize).collect();
            let (url, original) = web.publish(&name, &content)?;
            published.push((name, url, original));
        }
        // On a busy machine, creating the files takes longer than downloading the first.
        let mut curls = Vec::new();
        for (name, url, original) in published {
            let (copy, log) = (home.join(&name), home.join(format!("{name}.log")));
            File::create(&copy)?;
            let mut command = lab.client().command("curl")?;
            command.args(["-sS", "--fail", "-o"]).arg(&copy).arg(&url).stdin(Stdio::null()).stdout(Stdio::null());
            let curl = command.stderr(File::create(&log)?).spawn().context("cannot run curl: run lab/install-deps.sh")?;
            curls.push(Download { curl, original, copy, log });
        }
        Ok(Self { curls, size })
    }

    /// Waits for the ends of the downloads, and compares the received files with the originals.
    fn watch(mut self) -> Result<Watched> {
        let begin = Instant::now();
        // Per download: bytes, and the time of their last growth.
        let mut seen = vec![(0, begin); self.curls.len()];
        let mut watched =
            Watched { moved: ByteCount::ZERO, all_stalled: Duration::ZERO, one_stalled: Duration::ZERO, failures: Vec::new() };
        let mut last = begin;
        let limit = begin + REST * 2;
        while seen.iter().any(|(bytes, _)| *bytes < self.size.get()) && Instant::now() < limit {
            for (download, (bytes, grown)) in self.curls.iter().zip(&mut seen) {
                if *bytes == self.size.get() {
                    continue;
                }
                let (now, there) = (Instant::now(), fs::metadata(&download.copy)?.len());
                watched.one_stalled = watched.one_stalled.max(now - *grown);
                watched.all_stalled = watched.all_stalled.max(now - last);
                if there > *bytes {
                    (*bytes, *grown, last) = (there, now, now);
                }
            }
            let ended = self.curls.iter_mut().filter_map(|download| download.curl.try_wait().ok().flatten());
            if ended.filter(|status| !status.success()).count() > 0 {
                break;
            }
            thread::sleep(ms(10));
        }
        watched.moved = ByteCount::new(seen.iter().map(|(bytes, _)| *bytes).sum());
        for (number, download) in self.curls.iter_mut().enumerate() {
            if let Err(error) = download.end(Instant::now() + REST) {
                watched.failures.push(format!("download {number}: {error:#}"));
            }
        }
        Ok(watched)
    }
}

impl Download {
    fn end(&mut self, limit: Instant) -> Result<()> {
        let status = loop {
            if let Some(status) = self.curl.try_wait()? {
                break status;
            }
            if Instant::now() > limit {
                let there = fs::metadata(&self.copy)?.len();
                self.curl.kill()?;
                self.curl.wait()?;
                anyhow::bail!("the download stopped at {there} bytes");
            }
            thread::sleep(ms(10));
        };
        ensure!(status.success(), "{status}: {}", fs::read_to_string(&self.log)?.trim());
        let (wanted, got) = (digest(&self.original)?, digest(&self.copy)?);
        ensure!(wanted == got, "the file's SHA-256 is {got}, not {wanted}");
        // Saves disk space.
        fs::remove_file(&self.original)?;
        Ok(fs::remove_file(&self.copy)?)
    }
}

impl Drop for Downloads {
    fn drop(&mut self) {
        for download in &mut self.curls {
            let _ = download.curl.kill();
            let _ = download.curl.wait();
        }
    }
}

/// Capacity of all links together in the time.
fn carried_in(span: Duration) -> ByteCount {
    let sum: u64 = LINKS.iter().map(|(_, rate, _)| mbps(*rate).bytes_per_second()).sum();
    ByteCount::new((sum as f64 * span.as_secs_f64()) as u64)
}

/// A file's SHA-256.
fn digest(path: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg(path).output().context("cannot run sha256sum: install coreutils")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "sha256sum: {}", String::from_utf8_lossy(&output.stderr).trim());
    said.split(' ').next().map(str::to_owned).context("sha256sum printed nothing")
}
