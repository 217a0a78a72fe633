//! A link fails and returns: the time until new flows avoid it, and until they use it again.

use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use braid_model::ByteCount;
use serde_json::json;

use super::report::Report;
use super::sockets::{connect, link_of};
use super::stats::{median, worst};
use super::{Settings, progress};
use crate::daemon::Daemon;
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;

/// Kind of the failure, and the traffic during it.
#[derive(Debug, Clone, Copy)]
struct Case {
    title: &'static str,
    /// Whether the link also loses its carrier.
    carrier: bool,
    /// Whether downloads run over all links.
    busy: bool,
    probe: &'static str,
    /// Aim, in seconds, for the time until new flows avoid the link.
    aim: f64,
}

const CASES: [Case; 4] = [
    Case { title: "dark, flows in progress, sparing probes", carrier: false, busy: true, probe: "on-demand", aim: 1.0 },
    Case { title: "dark, flows in progress, eager probes", carrier: false, busy: true, probe: "continuous", aim: 1.0 },
    Case { title: "dark, idle, eager probes", carrier: false, busy: false, probe: "continuous", aim: 1.0 },
    Case { title: "carrier lost, idle, sparing probes", carrier: true, busy: false, probe: "on-demand", aim: 0.1 },
];
/// Aim, in seconds, for the time from the return to the first use.
const BACK: f64 = 2.0;
/// The link that is cut.
const VICTIM: usize = 0;
/// Interval between new flows.
const EVERY: Duration = Duration::from_millis(3);
/// The link counts as left when no new flow has used it for this long.
const QUIET: Duration = Duration::from_millis(700);
/// Timeout of every step.
const LIMIT: Duration = Duration::from_secs(15);

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "cut",
        "A link is cut",
        "Three links of 10 Mbit/s with RTTs of 20, 80 and 160 ms, round robin, so that every third new flow would use the link that is cut; a new \
         TCP connection starts every 3 ms. Left: the time from the cut until the last new flow on the dead link; three connections are completed \
         after it. Used again: the time from the link's return until the first new flow on it. Dark: the link drops every packet and keeps its \
         carrier. Flows in progress: six endless downloads. Every repetition has a new daemon without stored state.",
    );
    let count = if settings.quick { 2 } else { 10 };
    let (mut rows, mut raw) = (Vec::new(), Vec::new());
    for case in &CASES {
        let (mut left, mut back) = (Vec::new(), Vec::new());
        for number in 0..count {
            let (leaving, returning) = one(settings, case)?;
            progress(&format!("{}, {number}: left after {leaving:.3} s, used again after {returning:.3} s", case.title));
            left.push(leaving);
            back.push(returning);
        }
        let figures = [median(&left), worst(&left), median(&back), worst(&back)].map(|seconds| format!("{seconds:.3} s"));
        rows.push([case.title.to_owned()].into_iter().chain(figures).collect());
        let measured = format!("median {:.3} s, worst {:.3} s", median(&left), worst(&left));
        report.aim(format!("{}: left within {} s", case.title, case.aim), measured, worst(&left) <= case.aim);
        let measured = format!("median {:.3} s, worst {:.3} s", median(&back), worst(&back));
        report.aim(format!("{}: used again within {BACK} s of coming back", case.title), measured, worst(&back) <= BACK);
        raw.push(json!({ "case": case.title, "left_s": left, "used_again_s": back }));
    }
    report.table(format!("{count} cuts each:"), "what | left: median | worst | used again: median | worst", rows);
    report.raw = json!(raw);
    Ok(report)
}

/// Seconds until the link is left, and until it is used again.
fn one(settings: &Settings, case: &Case) -> Result<(f64, f64)> {
    let links = ["wlan0", "lte0", "eth0"].iter().zip([10, 40, 80]).map(|(name, delay)| LinkSpec::new(name).rate(mbps(10)).delay(ms(delay)));
    let lab = links.fold(Lab::builder(), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    let daemon = Daemon::start(&lab, &settings.braid, "round-robin", &format!("probe = \"{}\"", case.probe))?;
    let downloads = if case.busy { Downloads::start(&lab, &web)? } else { Downloads(Vec::new()) };
    let to = SocketAddr::from((Lab::internet(11), 80));
    // The kernel delays carrier events for up to a second after the previous one (linkwatch), and the lab has just started.
    thread::sleep(Duration::from_millis(1500));
    // The link must carry flows, not only be listed.
    first_use(&lab, to)?;
    switch(&lab, VICTIM, case.carrier, false)?;
    let left = last_use(&lab, to)?;
    for _ in 0..3 {
        lab.client().run(|| std::net::TcpStream::connect_timeout(&to, Duration::from_secs(2)))??;
    }
    switch(&lab, VICTIM, case.carrier, true)?;
    let back = first_use(&lab, to)?;
    drop((downloads, daemon));
    Ok((left, back))
}

/// Cuts a link, or restores it: its carrier, or only its packets.
pub(super) fn switch(lab: &Lab, link: usize, carrier: bool, on: bool) -> Result<()> {
    match (carrier, on) {
        (true, _) => lab.carrier(link, on),
        (false, true) => lab.bright(link),
        (false, false) => lab.dark(link),
    }
}

/// Starts flows until none has used the link for a while. Returns when the last one did, in seconds from now.
fn last_use(lab: &Lab, to: SocketAddr) -> Result<f64> {
    lab.client().run(|| {
        let begin = Instant::now();
        let mut last = Duration::ZERO;
        while begin.elapsed() < last + QUIET {
            let at = begin.elapsed();
            if link_of(connect(to)?.1) == Some(VICTIM) {
                last = at;
            }
            ensure!(last < LIMIT, "the dead link still gets flows after {LIMIT:?}");
            thread::sleep(EVERY);
        }
        Ok(last.as_secs_f64())
    })?
}

/// Starts flows until one uses the link. Returns when, in seconds from now.
fn first_use(lab: &Lab, to: SocketAddr) -> Result<f64> {
    lab.client().run(|| {
        let begin = Instant::now();
        loop {
            let at = begin.elapsed();
            if link_of(connect(to)?.1) == Some(VICTIM) {
                return Ok(at.as_secs_f64());
            }
            ensure!(at < LIMIT, "the link gets no flow in {LIMIT:?}");
            thread::sleep(EVERY);
        }
    })?
}

/// Endless downloads, two on each link. They end when this value is dropped.
struct Downloads(Vec<Child>);

impl Downloads {
    /// Starts them and waits until every link has moved something.
    fn start(lab: &Lab, web: &Web) -> Result<Self> {
        let url = web.url(ByteCount::new(1_000_000_000))?;
        let mut downloads = Self(Vec::new());
        for _ in 0..2 * lab.links().len() {
            let mut command = lab.client().command("curl")?;
            command.args(["-s", "-o", "/dev/null"]).arg(&url);
            downloads.0.push(command.stdin(Stdio::null()).spawn()?);
        }
        let begin = Instant::now();
        let moved = |link| lab.counters(link).map(|counters| counters.down.delivered_bytes);
        for link in 0..lab.links().len() {
            while moved(link)? < ByteCount::new(500_000) {
                ensure!(begin.elapsed() < LIMIT, "link {link} got no download in {LIMIT:?}");
                thread::sleep(Duration::from_millis(10));
            }
        }
        Ok(downloads)
    }
}

impl Drop for Downloads {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
