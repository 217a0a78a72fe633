//! Running direct flows change their link, in agreement with the server's Braid (Hercules; Yap's thesis, figure 2.6 and 2.3.2).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use braid_model::ByteCount;
use serde_json::{Value, json};

use super::cut::gap;
use super::origin::{Origin, TcpVariant};
use super::{Settings, allow_multipath};
use crate::bench::progress;
use crate::bench::report::Report;
use crate::bench::stats::{median, worst};
use crate::daemon::Daemon;
use crate::lab::{Builder, Lab};
use crate::moves::{FAR, MovesRelay, ServerDaemon, firewall, nat};
use crate::namespace::Namespace;
use crate::spec::{LinkSpec, mbps, ms};

/// Mbit/s, and the RTT in milliseconds.
const LINKS: [(u64, u64); 2] = [(20, 10), (20, 30)];
const NAMES: [&str; 2] = ["wlan0", "lte0"];
/// Port of the flows that move.
pub(super) const PORT: u16 = 8080;
/// Flows over the link that dies.
const FLOWS: usize = 20;
/// Flows that move at once.
const MANY: usize = 1000;
/// Before the cut, and after it.
const SPANS: [Duration; 2] = [Duration::from_secs(3), Duration::from_secs(5)];
/// Timeout of every step.
const LIMIT: Duration = Duration::from_secs(60);
/// All flows use the first link.
pub(super) const RULES: &str = "[detect]\nhosts = true\nmoves = true\n[[app]]\nmatch = { port = 8080 }\ncarry = \"direct\"\n";

/// A daemon and its relay. The daemon ends last.
struct Host {
    relay: MovesRelay,
    daemon: ServerDaemon,
}

impl Host {
    fn start(settings: &Settings, host: &Namespace, home: PathBuf, options: &[&str]) -> Result<Self> {
        let daemon = ServerDaemon::start_on(host, home.clone(), &settings.braid)?;
        Ok(Self { relay: MovesRelay::start_on(host, home, &settings.braid, options)?, daemon })
    }
}

/// Two hosts that run Braid. The server's programs end last.
pub(super) struct World {
    daemon: Daemon,
    server: Host,
    braid: PathBuf,
}

impl World {
    fn start(settings: &Settings, lab: &Lab) -> Result<Self> {
        Self::start_with(settings, lab, RULES)
    }

    /// Starts them with this configuration of the client, in addition to the scheduler.
    pub(super) fn start_with(settings: &Settings, lab: &Lab, config: &str) -> Result<Self> {
        let server = Host::start(settings, lab.host(), lab.directory().join("server"), &["--local", "--moves"])?;
        Self::with_server(settings, lab, server, config)
    }

    fn with_server(settings: &Settings, lab: &Lab, server: Host, config: &str) -> Result<Self> {
        let daemon = Daemon::start(lab, &settings.braid, "only-one", config)?;
        Ok(Self { daemon, server, braid: settings.braid.clone() })
    }

    /// Output of a command of Braid in the client.
    fn braid(&self, lab: &Lab, arguments: &[&str]) -> Result<String> {
        let output = lab.client().command(&self.braid)?.args(arguments).env("BRAID_SOCKET", self.daemon.socket()).output()?;
        ensure!(output.status.success(), "braid {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Ids and links of the living flows.
    fn flows(&self, lab: &Lab) -> Result<Vec<(String, String)>> {
        let flows: Value = serde_json::from_str(&self.braid(lab, &["flows", "--json"])?)?;
        let ours = |flow: &&Value| flow["remote"].as_str().is_some_and(|remote| remote.ends_with(&format!(":{PORT}")));
        let of = |flow: &Value| (flow["id"].to_string(), flow["link"].as_str().unwrap_or_default().to_owned());
        Ok(flows["flows"].as_array().into_iter().flatten().filter(ours).map(of).collect())
    }

    /// Waits until `count` flows run and the server agrees to moves. Returns their ids.
    pub(super) fn movable(&self, lab: &Lab, count: usize) -> Result<Vec<(String, String)>> {
        let begin = Instant::now();
        loop {
            let flows = self.flows(lab)?;
            if flows.len() >= count && self.braid(lab, &["explain", &flows[0].0])?.contains("can change its link") {
                return Ok(flows);
            }
            ensure!(begin.elapsed() < LIMIT, "{} of {count} flows run, or the server does not agree to moves", flows.len());
            thread::sleep(ms(50));
        }
    }

    /// Flows whose packets from the server have other addresses on the way than in the socket.
    fn moved(&self, lab: &Lab) -> Result<usize> {
        let mut command = lab.client().command("curl")?;
        command.args(["-sS", "--unix-socket"]).arg(self.server.daemon.socket()).arg("http://braid/v1/rewrites");
        let listed: Value = serde_json::from_slice(&command.output()?.stdout).context("the server's daemon does not answer")?;
        let sends = |flow: &&Value| flow["sends"] == true && flow["active"] == true;
        Ok(listed["rewrites"].as_array().into_iter().flatten().filter(sends).count())
    }
}

pub(in crate::bench) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "moves",
        "Running direct flows change their link",
        "Two links of 20 Mbit/s with RTTs of 10 and 30 ms; direct TCP connections to a host that runs Braid, over the first link. For comparison the kernel's \
         multipath TCP (BBR) over the same links, in the same run. Gap: the longest time without data for the program. Every byte is compared with what was \
         sent.",
    );
    let mut raw = serde_json::Map::new();
    raw.insert("transfer".into(), transfer(settings, &mut report)?);
    settings.keep(&report)?;
    raw.insert("dead_link".into(), dead_link(settings, &mut report)?);
    settings.keep(&report)?;
    raw.insert("every_second".into(), every_second(settings, &mut report)?);
    settings.keep(&report)?;
    raw.insert("at_once".into(), at_once(settings, &mut report)?);
    report.raw = Value::Object(raw);
    Ok(report)
}

fn builder() -> Builder {
    let links = LINKS.iter().zip(NAMES);
    let links = links.map(|((rate, round_trip), name)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(*round_trip) / 2));
    links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link))
}

/// When data arrived, and how much.
pub(super) type Arrivals = Vec<(Instant, usize)>;

/// Downloads over `count` connections for `span`, while `act` runs. Returns the arrivals of each; an error if one ended early.
fn downloads<T: Send>(
    lab: &Lab,
    origin: &Origin,
    variant: TcpVariant,
    (count, span): (usize, Duration),
    act: impl FnOnce() -> Result<T> + Send,
) -> Result<(Vec<Result<Arrivals>>, T)> {
    thread::scope(|scope| {
        let one = || {
            let arrivals = Mutex::new(Vec::new());
            let note = |count| arrivals.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((Instant::now(), count));
            lab.client().run(|| origin.get(variant, ByteCount::new(1 << 40), span, note))??;
            Ok(arrivals.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
        };
        let running: Vec<_> = (0..count).map(|_| scope.spawn(one)).collect();
        let acted = act();
        let arrivals = running.into_iter().map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect();
        Ok((arrivals, acted?))
    })
}

/// Mbit/s between two times.
pub(super) fn rate(arrivals: &Arrivals, from: Instant, to: Instant) -> f64 {
    let bytes: usize = arrivals.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, count)| count).sum();
    bytes as f64 * 8.0 / 1e6 / to.saturating_duration_since(from).as_secs_f64()
}

/// The longest time without data that touches the span, in seconds.
pub(super) fn gaps(arrivals: &Arrivals, from: Instant, to: Instant) -> f64 {
    gap(&arrivals.iter().map(|(at, _)| *at).collect::<Vec<_>>(), from, to)
}

/// Figure 2.6: a transfer moves to another link while it runs, and then to a waypoint.
fn transfer(settings: &Settings, report: &mut Report) -> Result<Value> {
    let [whole, at, through] = (if settings.quick { [18, 6, 12] } else { [120, 30, 50] }).map(Duration::from_secs);
    let lab = builder().far(1500).start()?;
    let origin = Origin::start(&lab, 10, PORT, TcpVariant::PLAIN)?;
    let way = Host::start(settings, lab.far(), lab.directory().join("way"), &["--waypoint", "--allow", "203.0.113.0/24"])?;
    let server = Host::start(settings, lab.server(), lab.directory().join("server"), &["--local", "--moves", "--through", FAR[0]])?;
    let world = World::with_server(settings, &lab, server, RULES)?;
    let mut invite = lab.far().command(&settings.braid)?;
    invite.args(["relay", "invite", "--address", &format!("{}:5757", FAR[0]), "--state-dir"]).arg(way.relay.state());
    let line = String::from_utf8(invite.output()?.stdout)?;
    world.braid(&lab, &["join", line.trim(), "--name", "way"])?;
    let (mut done, (begin, moved, passes)) = downloads(&lab, &origin, TcpVariant::PLAIN, (1, whole), || {
        let begin = Instant::now();
        let flows = world.movable(&lab, 1)?;
        thread::sleep(at.saturating_sub(begin.elapsed()));
        let moved = Instant::now();
        world.braid(&lab, &["move", &flows[0].0, "--to", NAMES[1]])?;
        thread::sleep(through.saturating_sub(begin.elapsed()));
        let passes = Instant::now();
        world.braid(&lab, &["move", &flows[0].0, "--to", NAMES[1], "--through", "way"])?;
        thread::sleep(Duration::from_secs(2));
        let explained = world.braid(&lab, &["explain", &flows[0].0])?;
        ensure!(explained.contains("through the waypoint way"), "the transfer does not pass the waypoint: {explained}");
        Ok((begin, moved, passes))
    })?;
    let arrivals = done.remove(0)?;
    let (second, end) = (Duration::from_secs(1), begin + whole);
    let spans = [(begin + second * 2, moved), (moved + second, passes), (passes + second, end - second)];
    let rates = spans.map(|(from, to)| rate(&arrivals, from, to));
    let longest = [moved, passes].map(|at| gaps(&arrivals, at, at + second * 3));
    progress(&format!("a transfer: {rates:.1?} Mbit/s, gaps {longest:.3?} s"));
    let rate = |at: usize| format!("{:.1}", rates[at]);
    let gap = |at: usize| format!("{:.3} s", longest[at]);
    let title = format!(
        "A transfer of {} s moves to the other link after {} s, and to a waypoint after {} s (figure 2.6):",
        whole.as_secs(),
        at.as_secs(),
        through.as_secs()
    );
    report.table(
        title,
        "Mbit/s before | gap | on the other link | gap | through the waypoint",
        vec![vec![rate(0), gap(0), rate(1), gap(1), rate(2)]],
    );
    for (what, after) in [("moves", rates[1]), ("passes a waypoint", rates[2])] {
        let ratio = after / rates[0];
        report.aim(format!("a transfer that {what}: at least 0.95 of the rate before"), format!("{ratio:.3}"), ratio >= 0.95);
    }
    Ok(json!({ "mbps": rates, "gaps_s": longest }))
}

/// What is on the new way of flows whose link dies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Middle {
    Nothing,
    Firewall,
    Nat,
}

impl Middle {
    /// How it is called in the report.
    fn text(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::Firewall => ", a stateful firewall on the other link",
            Self::Nat => ", a NAT on the other link",
        }
    }

    /// The lab, and the address of the downloads.
    fn lab(self) -> Result<(Lab, SocketAddr)> {
        let lab = if self == Self::Nothing { builder() } else { builder().far(1500) }.start()?;
        match self {
            Self::Nothing => return Ok((lab, (Lab::internet(10), PORT).into())),
            Self::Firewall => firewall(&lab, true, true)?,
            Self::Nat => nat(&lab)?,
        }
        Ok((lab, (FAR[0].parse::<std::net::Ipv4Addr>()?, PORT).into()))
    }
}

/// A link dies under many flows.
fn dead_link(settings: &Settings, report: &mut Report) -> Result<Value> {
    let count = if settings.quick { 2 } else { 10 };
    let (mut rows, mut raw, mut worsts) = (Vec::new(), Vec::new(), Vec::new());
    let cases = [Middle::Nothing, Middle::Firewall, Middle::Nat].into_iter().flat_map(|middle| {
        [("Braid", TcpVariant::PLAIN), ("MPTCP BBR", TcpVariant::multipath("bbr"))].map(|(who, variant)| (middle, who, variant))
    });
    for (middle, who, variant) in cases {
        let who = format!("{who}{}", middle.text());
        let (mut medians, mut longest, mut lost) = (Vec::new(), Vec::new(), 0);
        for number in 0..count {
            let (lab, address) = middle.lab()?;
            let origin = Origin::start_on(lab.host(), address, variant)?;
            let world = if variant.multipath {
                allow_multipath(&lab)?;
                None
            } else {
                Some(World::start(settings, &lab)?)
            };
            let whole = SPANS[0] + SPANS[1] + Duration::from_secs(5);
            if let Some(world) = &world {
                // The one datagram that asks the host whether it runs Braid must not be lost among the downloads.
                let _first = lab.client().run(|| TcpStream::connect(address))??;
                world.movable(&lab, 1)?;
            }
            let (done, cut) = downloads(&lab, &origin, variant, (FLOWS, whole), || {
                if let Some(world) = &world {
                    let flows = world.movable(&lab, FLOWS)?;
                    ensure!(flows.iter().all(|(_, link)| link == NAMES[0]), "a flow uses another link: {flows:?}");
                }
                thread::sleep(SPANS[0]);
                let cut = Instant::now();
                lab.dark(0)?;
                thread::sleep(SPANS[1]);
                Ok(cut)
            })?;
            let each: Vec<f64> = done.iter().flatten().map(|arrivals| gaps(arrivals, cut, cut + SPANS[1])).collect();
            lost += FLOWS - each.len();
            progress(&format!(
                "{who}, {number}: gaps of {:.3} s (median), {:.3} s (longest), {} flows lost",
                median(&each),
                worst(&each),
                FLOWS - each.len()
            ));
            medians.push(median(&each));
            longest.push(worst(&each));
        }
        let figures = [median(&medians), median(&longest), worst(&longest)].map(|seconds| format!("{seconds:.3} s"));
        rows.push([who.clone()].into_iter().chain(figures).chain([format!("{lost} of {}", FLOWS * count)]).collect());
        raw.push(json!({ "who": who, "median_gap_s": medians, "longest_gap_s": longest, "lost": lost }));
        worsts.push(median(&longest));
        if !variant.multipath {
            report.aim(format!("a dead link under {FLOWS} flows{}: none is lost", middle.text()), lost.to_string(), lost == 0);
        } else if let [.., braid, mptcp] = worsts[..] {
            let what = format!("a dead link under {FLOWS} flows{}: the longest gap is at most MPTCP's", middle.text());
            let ratio = braid / mptcp;
            report.aim(what, format!("{ratio:.2} of it"), ratio <= 1.0);
        }
    }
    report.table(
        format!("The link of {FLOWS} downloads goes dark, {count} times each:"),
        "what | gap of the median flow | of the worst flow: median | worst | flows lost",
        rows,
    );
    Ok(json!(raw))
}

/// A flow moves every second, beside one that does not.
fn every_second(settings: &Settings, report: &mut Report) -> Result<Value> {
    let (rounds, seconds) = if settings.quick { (1, 10) } else { (3, 60) };
    let span = Duration::from_secs(seconds);
    let lab = builder().start()?;
    let origin = Origin::start(&lab, 10, PORT, TcpVariant::PLAIN)?;
    let world = World::start(settings, &lab)?;
    let (mut ratios, mut pairs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let mut rates = Vec::new();
        for moves in [false, true] {
            let settle = Duration::from_secs(3);
            let (mut done, (from, to)) = downloads(&lab, &origin, TcpVariant::PLAIN, (1, settle + span + ms(500)), || {
                let begin = Instant::now();
                let flows = world.movable(&lab, 1)?;
                thread::sleep(settle.saturating_sub(begin.elapsed()));
                let from = Instant::now();
                for second in 1..=seconds {
                    if moves {
                        world.braid(&lab, &["move", &flows[0].0, "--to", NAMES[(second % 2) as usize]])?;
                    }
                    thread::sleep((from + Duration::from_secs(second)).saturating_duration_since(Instant::now()));
                }
                Ok((from, Instant::now()))
            })?;
            rates.push(rate(&done.remove(0)?, from, to));
        }
        progress(&format!("still {:.1} Mbit/s, moving every second {:.1} Mbit/s", rates[0], rates[1]));
        ratios.push(rates[1] / rates[0]);
        pairs.push(rates);
    }
    let row =
        [median(&pairs.iter().map(|pair| pair[0]).collect::<Vec<_>>()), median(&pairs.iter().map(|pair| pair[1]).collect::<Vec<_>>())];
    let row = row.map(|rate| format!("{rate:.1}")).into_iter().chain([format!("{:.3}", median(&ratios))]).collect();
    report.table(
        format!("A download moves every second for {seconds} s, {rounds} times:"),
        "Mbit/s without | Mbit/s with moves | ratio",
        vec![row],
    );
    Ok(json!({ "mbps": pairs }))
}

/// Many flows move at once.
fn at_once(settings: &Settings, report: &mut Report) -> Result<Value> {
    let lab = builder().start()?;
    let to: SocketAddr = (Lab::internet(10), PORT).into();
    let listener = lab.server().run(|| TcpListener::bind(to))??;
    thread::spawn(move || {
        for stream in listener.incoming().map_while(std::io::Result::ok) {
            thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    let world = World::start(settings, &lab)?;
    let mut streams = lab.client().run(|| (0..MANY).map(|_| TcpStream::connect(to)).collect::<std::io::Result<Vec<_>>>())??;
    let mut echo = |what: &str| -> Result<usize> {
        let mut lost = 0;
        for stream in &mut streams {
            stream.set_read_timeout(Some(LIMIT))?;
            let done = stream.write_all(b"x").and_then(|()| stream.read_exact(&mut [0]));
            lost += usize::from(done.is_err());
        }
        progress(&format!("{what}: {lost} of {MANY} flows lost"));
        Ok(lost)
    };
    echo("before")?;
    world.movable(&lab, MANY)?;
    let name =
        std::env::current_exe()?.file_name().context("this program has no name")?.to_string_lossy().chars().take(15).collect::<String>();
    let begin = Instant::now();
    world.braid(&lab, &["move", &name, "--to", NAMES[1]])?;
    while world.moved(&lab)? < MANY {
        ensure!(begin.elapsed() < LIMIT, "{} of {MANY} flows have moved after {LIMIT:?}", world.moved(&lab)?);
        thread::sleep(ms(20));
    }
    let took = begin.elapsed().as_secs_f64();
    let lost = echo("after")?;
    report.table(format!("{MANY} flows move at once:"), "time | flows lost", vec![vec![format!("{took:.2} s"), lost.to_string()]]);
    report.aim(format!("{MANY} flows move at once: none is lost"), lost.to_string(), lost == 0);
    Ok(json!({ "seconds": took, "lost": lost }))
}
