//! Plain downloads through `braid proxy`: one over all links, and three that share links by weight and preference (the thesis's figures 4.5
//! and 4.8, on real links).

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use braid_decide::fair::{FairFlow, Problem, solve};
use braid_model::{ByteCount, Direction, Rate};
use serde_json::json;

use super::footprint::resident;
use super::report::{Figure, Report};
use super::stats::{median, worst};
use super::{Settings, progress};
use crate::browser::{self, PICTURES};
use crate::lab::Lab;
use crate::spec::{LinkSpec, mbps, ms};
use crate::web::Web;
use braid_plot::{Run, stacked};

/// Links of the single download: Mbit/s, RTT in milliseconds, share lost.
const LINKS: [(&str, u64, u64, f64); 3] = [("wlan0", 20, 10, 0.0), ("eth0", 10, 60, 0.0), ("lte0", 5, 100, 0.01)];
/// Links of the three downloads: names and RTT in milliseconds.
const SHARED: [&str; 2] = ["wlan0", "lte0"];
const ROUND_TRIP: u64 = 20;
/// The payload's share of a link's rate, without headers.
const PAYLOAD: f64 = 0.965;
/// Aims: share of the sum, and largest error of the rates.
const SHARE: f64 = 0.90;
const TOLERANCE: f64 = 0.10;
/// After a change rates count from here on, over any window of this length, looked at in these steps.
const SETTLED: Duration = Duration::from_secs(3);
const WINDOW: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(250);
/// Step of the plot.
const BIN: Duration = Duration::from_millis(500);
const PROXY: &str = "127.0.0.1:5758";
/// Timeout of one transfer.
const LIMIT: &str = "60";
/// Readers that are slower than the links: how many, of how large a file, over links of how many Mbit/s each, and what each takes how often.
const READERS: usize = 200;
const READ: ByteCount = ByteCount::new(20_000_000);
const READERS_LINKS: u64 = 200;
const SIP: usize = 16 * 1024;
const SIP_EVERY: Duration = Duration::from_millis(250);
/// Aim for the proxy's resident memory, in megabytes (10^6).
const MEMORY: f64 = 64.0;

/// Arrival times of a download's bytes.
type Arrivals = Vec<(Duration, usize)>;

/// A phase without changes: its duration, the links' rates in Mbit/s, and the number of flows that ended before.
type Phase = (Duration, [u64; 2], usize);

/// Three downloads, each with its name, weight and links.
struct Sharing {
    name: &'static str,
    title: &'static str,
    flows: [(&'static str, f64, &'static [usize]); 3],
    phases: Vec<Phase>,
}

pub(super) fn run(settings: &Settings) -> Result<Report> {
    let mut report = Report::new(
        "proxy",
        "Plain downloads through the proxy",
        "curl fetches files from nginx over plain HTTP through `braid proxy`, which requests parts of them over all links. One download over links \
         of 20 Mbit/s (10 ms RTT), 10 (60 ms) and 5 (100 ms, 1 % loss each way): its bytes over the payload that the links could carry (0.965 of \
         their rates), from curl's start to its end. Three downloads over two links with RTTs of 20 ms, each with its own password, which selects \
         its `weight` and `links` in [[app]]: a may use the first link, c the second, b both. First with weights 1, 2 and 1 over 3 and 10 Mbit/s, \
         where a ends and then b (the thesis's figure 4.5); then with equal weights, while the links swap their rates (figure 4.8). Exact: \
         weighted max-min rates (`braid_decide::fair`) over the links' payload. Furthest off: the largest error over any 5 s, from 3 s after each \
         change, of the data received by curl. Memory: VmHWM of `braid proxy` at the end of each case; the last case has 200 downloads of 20 MB at \
         once over two links of 200 Mbit/s, each read at 64 kB/s.",
    );
    let mut memory = vec![("one download", single(settings, &mut report)?)];
    memory.extend(pages(settings, &mut report)?.map(|most| ("a page in a browser", most)));
    let long = Duration::from_secs(if settings.quick { 10 } else { 20 });
    let short = Duration::from_secs(if settings.quick { 9 } else { 12 });
    let weights = Sharing {
        name: "proxy-weights",
        title: "a: 3 Mbit/s link only; b: both, twice the weight; c: 10 Mbit/s link only",
        flows: [("a", 1.0, &[0]), ("b", 2.0, &[0, 1]), ("c", 1.0, &[1])],
        phases: (0..3).map(|ended| (long, [3, 10], ended)).collect(),
    };
    let varying = Sharing {
        name: "proxy-varying",
        title: "a: first link only; b: both; c: second link only; links of 4 and 10 Mbit/s change places",
        flows: [("a", 1.0, &[0]), ("b", 1.0, &[0, 1]), ("c", 1.0, &[1])],
        phases: [[4, 10], [10, 4], [4, 10], [10, 4]].map(|rates| (short, rates, 0)).to_vec(),
    };
    let (weights, most) = shared(settings, &weights, &mut report)?;
    memory.push(("three downloads, one after the other ends", most));
    let (varying, most) = shared(settings, &varying, &mut report)?;
    memory.push(("three downloads, links change places", most));
    report.raw["sharing"] = json!([weights, varying]);
    memory.push(("200 slow readers", slow_readers(settings)?));
    tell_memory(&memory, &mut report);
    Ok(report)
}

fn tell_memory(memory: &[(&str, f64)], report: &mut Report) {
    let rows = memory.iter().map(|(case, most)| vec![(*case).to_owned(), format!("{most:.1} MB")]).collect();
    report.table("Memory of the proxy at most, in megabytes (10^6):", "case | VmHWM", rows);
    let most = memory.iter().map(|(_, most)| *most).fold(0.0, f64::max);
    report.aim(format!("memory of the proxy at most {MEMORY:.0} MB"), format!("{most:.1} MB"), most <= MEMORY);
    report.raw["memory_mb"] = json!(memory);
}

/// `braid proxy` in a lab. It ends when this value is dropped.
struct Proxy(Child);

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Proxy {
    fn start(settings: &Settings, lab: &Lab, config: &str, passwords: &str) -> Result<Self> {
        let home = lab.directory().join("proxy");
        std::fs::create_dir_all(&home)?;
        let (config_file, password_file) = (home.join("braid.toml"), home.join("passwords"));
        std::fs::write(&config_file, config)?;
        std::fs::write(&password_file, passwords)?;
        std::fs::set_permissions(&password_file, PermissionsExt::from_mode(0o600))?;
        let mut command = lab.client().command(&settings.braid)?;
        command.args(["proxy", "--listen", PROXY, "--config"]).arg(config_file).env("XDG_STATE_HOME", &home).env_remove("RUST_LOG");
        if !passwords.is_empty() {
            command.arg("--passwords").arg(password_file);
        }
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().context("cannot run braid proxy")?;
        let mut log = BufReader::new(child.stderr.take().context("braid proxy has no standard error")?);
        let proxy = Self(child);
        let mut line = String::new();
        while !line.contains("HTTP and SOCKS5 on") {
            line.clear();
            ensure!(log.read_line(&mut line)? > 0, "braid proxy has ended");
        }
        // The writer must not block on this pipe.
        thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Ok(proxy)
    }

    /// Maximum resident memory so far, in megabytes (10^6).
    fn most(&self) -> Result<f64> {
        Ok(resident(self.0.id())?.1)
    }
}

/// Returns the proxy's maximum memory.
fn single(settings: &Settings, report: &mut Report) -> Result<f64> {
    let size = ByteCount::new(if settings.quick { 20_000_000 } else { 40_000_000 });
    let ideal = size.get() as f64 / (LINKS.iter().map(|link| link.1).sum::<u64>() as f64 * 1e6 / 8.0 * PAYLOAD);
    let (mut through, mut alone, mut memory) = (Vec::new(), Vec::new(), 0.0_f64);
    for round in 0..if settings.quick { 1 } else { 5 } {
        for (proxied, seconds) in [(true, &mut through), (false, &mut alone)] {
            if proxied || round == 0 {
                let (took, most) = one(settings, size, proxied)?;
                seconds.push(took);
                memory = memory.max(most);
                progress(&format!("one download, proxy {proxied}: {:.3} of the sum", ideal / seconds[seconds.len() - 1]));
            }
        }
    }
    let told = |seconds: &[f64]| format!("{:.2} s ({:.3})", median(seconds), ideal / median(seconds));
    let rows = vec![vec![format!("{ideal:.2} s"), told(&through), told(&alone)]];
    report.table("One download, median time (share of the sum):", "ideal | through the proxy | without", rows);
    let measured = format!("median {:.3}, worst {:.3}", ideal / median(&through), ideal / worst(&through));
    report.aim(format!("one download: at least {SHARE} of the sum"), measured, ideal / median(&through) >= SHARE);
    report.raw = json!({ "single_s": through, "alone_s": alone, "ideal_s": ideal });
    Ok(memory)
}

/// Seconds of one download, and the proxy's maximum memory.
fn one(settings: &Settings, size: ByteCount, proxied: bool) -> Result<(f64, f64)> {
    let links = LINKS.iter().map(|(name, rate, trip, loss)| LinkSpec::new(name).rate(mbps(*rate)).delay(ms(trip / 2)).loss(*loss));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    let proxy = Proxy::start(settings, &lab, "", "")?;
    let mut command = lab.client().command("curl")?;
    command.args(["-sS", "--fail", "--max-time", LIMIT, "-o", "/dev/null", "-w", "%{size_download}"]);
    if proxied {
        command.args(["--proxy", PROXY]);
    }
    let begin = Instant::now();
    let output = command.arg(web.url(size)?).stdin(Stdio::null()).output().context("cannot run curl")?;
    let seconds = begin.elapsed().as_secs_f64();
    let told = String::from_utf8_lossy(&output.stdout);
    let by_link: Vec<String> = (0..LINKS.len())
        .map(|link| Ok((lab.counters(link)?.down.delivered_bytes.get() as f64 * 8.0 / seconds / 1e6, LINKS[link].1)))
        .map(|found: Result<(f64, u64)>| found.map(|(rate, most)| format!("{rate:.2} of {most}")))
        .collect::<Result<_>>()?;
    progress(&format!("Mbit/s by link: {}", by_link.join(", ")));
    ensure!(output.status.success() && told == size.get().to_string(), "curl got {told} bytes of {size}, and ended with {}", output.status);
    Ok((seconds, proxy.most()?))
}

/// A browser loads a page of many pictures over HTTP and HTTPS. Returns the proxy's maximum memory; `None` without a browser.
fn pages(settings: &Settings, report: &mut Report) -> Result<Option<f64>> {
    if !browser::installed()? {
        report.notes.push("The page in a browser was left out: there is no chromium here.".to_owned());
        return Ok(None);
    }
    let links = SHARED.iter().map(|name| LinkSpec::new(name).rate(mbps(10)).delay(ms(ROUND_TRIP / 2)));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    let proxy = Proxy::start(settings, &lab, "", "")?;
    let url = browser::publish(&web)?;
    let mut rows = Vec::new();
    for (scheme, url) in [("http", url.clone()), ("https", url.replace("http:", "https:"))] {
        let begin = Instant::now();
        let shown = browser::pictures(&lab, PROXY, &url)?;
        let seconds = begin.elapsed().as_secs_f64();
        progress(&format!("a page over {scheme}: {shown} of {PICTURES} pictures, {seconds:.1} s"));
        rows.push(vec![scheme.to_owned(), format!("{seconds:.1} s")]);
        let aim = format!("a browser's page of {PICTURES} pictures over {scheme}: all of them");
        report.aim(aim, shown.to_string(), shown == PICTURES);
    }
    report.table("A page in a headless browser, its start included:", "scheme | time", rows);
    Ok(Some(proxy.most()?))
}

/// Runs three downloads, reports the results, and returns them as data with the proxy's maximum memory.
fn shared(settings: &Settings, sharing: &Sharing, report: &mut Report) -> Result<(serde_json::Value, f64)> {
    let first = sharing.phases[0].1;
    let links = SHARED.iter().zip(first).map(|(name, rate)| LinkSpec::new(name).rate(mbps(rate)).delay(ms(ROUND_TRIP / 2)));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    let proxy = Proxy::start(settings, &lab, &rules(sharing), &sharing.flows.map(|(name, ..)| format!("{name}:{name}\n")).concat())?;
    let url = web.url(ByteCount::new(1 << 30))?;
    let began = Instant::now();
    let mut flows = Vec::new();
    for (name, ..) in &sharing.flows {
        flows.push(Download::start(&lab, name, &url, began)?);
    }
    let mut begins = Duration::ZERO;
    for (length, rates, ended) in &sharing.phases {
        flows.iter_mut().take(*ended).for_each(Download::stop);
        for (link, rate) in rates.iter().enumerate() {
            lab.set(link, Direction::Down, |profile| profile.rate = mbps(*rate).into())?;
        }
        begins += *length;
        thread::sleep(begins.saturating_sub(began.elapsed()));
    }
    let missed: u64 = (0..SHARED.len()).map(|link| lab.counters(link).map(|counters| counters.missed)).sum::<Result<u64>>()?;
    ensure!(missed == 0, "the lab was too slow: it dropped {missed} frames");
    let arrivals: Vec<Arrivals> = flows.into_iter().map(Download::end).collect();
    Ok((report_results(sharing, &arrivals, report)?, proxy.most()?))
}

/// Many downloads at once by readers that are slower than the links. Returns the proxy's maximum memory.
fn slow_readers(settings: &Settings) -> Result<f64> {
    let links = SHARED.iter().map(|name| LinkSpec::new(name).rate(mbps(READERS_LINKS)).delay(ms(ROUND_TRIP / 2)));
    let lab = links.fold(Lab::builder().rp_filter(2), |builder, link| builder.link(link)).start()?;
    let web = Web::start(&lab)?;
    let proxy = Proxy::start(settings, &lab, "", "")?;
    let ask = format!("GET {} HTTP/1.1\r\nHost: {}\r\n\r\n", web.url(READ)?, Lab::internet(10));
    let long = Duration::from_secs(if settings.quick { 8 } else { 30 });
    let taken = lab.client().run(|| read_slowly(&ask, long))??;
    let most = proxy.most()?;
    let (least, all) = (taken.iter().min().copied().unwrap_or(0), taken.iter().sum::<usize>());
    progress(&format!(
        "{READERS} slow readers: {:.1} MB, the least of them {:.2} MB; {most:.1} MB resident",
        all as f64 / 1e6,
        least as f64 / 1e6
    ));
    ensure!(least >= SIP, "one of {READERS} readers got {least} bytes in {long:?}");
    Ok(most)
}

/// What each reader took.
fn read_slowly(ask: &str, long: Duration) -> Result<Vec<usize>> {
    let mut readers = Vec::new();
    for _ in 0..READERS {
        let mut stream = TcpStream::connect(PROXY).context("cannot reach the proxy")?;
        stream.write_all(ask.as_bytes())?;
        stream.set_nonblocking(true)?;
        readers.push((stream, 0));
    }
    let (begin, mut buffer) = (Instant::now(), vec![0; SIP]);
    while begin.elapsed() < long {
        for (stream, taken) in &mut readers {
            match stream.read(&mut buffer) {
                Ok(0) => bail!("a download ended after {taken} bytes"),
                Ok(count) => *taken += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("a download broke off"),
            }
        }
        thread::sleep(SIP_EVERY);
    }
    Ok(readers.into_iter().map(|(_, taken)| taken).collect())
}

fn rules(sharing: &Sharing) -> String {
    let rule = |(name, weight, links): &(&str, f64, &[usize])| {
        let names: Vec<_> = links.iter().map(|link| format!("\"{}\"", SHARED[*link])).collect();
        format!("[[app]]\nmatch = {{ client = \"{name}\" }}\nweight = {weight:.1}\nlinks = [{}]\n", names.join(", "))
    };
    sharing.flows.iter().map(rule).collect()
}

/// A curl that downloads until it is stopped.
struct Download {
    curl: Child,
    arrivals: Arc<Mutex<Arrivals>>,
}

impl Download {
    fn start(lab: &Lab, user: &str, url: &str, began: Instant) -> Result<Self> {
        let mut command = lab.client().command("curl")?;
        command.args(["-sS", "--fail", "--proxy", PROXY, "--proxy-user", &format!("{user}:{user}"), "-o", "-", url]);
        let mut curl = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot run curl")?;
        let mut body = curl.stdout.take().context("curl has no standard output")?;
        let arrivals = Arc::new(Mutex::new(Vec::new()));
        let noted = arrivals.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(count @ 1..) = body.read(&mut buffer) {
                noted.lock().unwrap_or_else(PoisonError::into_inner).push((began.elapsed(), count));
            }
        });
        Ok(Self { curl, arrivals })
    }

    fn stop(&mut self) {
        let _ = self.curl.kill();
        let _ = self.curl.wait();
    }

    fn end(mut self) -> Arrivals {
        self.stop();
        std::mem::take(&mut *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Mean bits per second.
fn rate(arrivals: &Arrivals, from: Duration, to: Duration) -> f64 {
    let bytes: usize = arrivals.iter().filter(|(at, _)| (from..to).contains(at)).map(|(_, count)| count).sum();
    bytes as f64 * 8.0 / (to - from).as_secs_f64()
}

/// Exact max-min rates of a phase's flows.
fn exact(sharing: &Sharing, (_, rates, ended): &Phase) -> Result<Vec<f64>> {
    let flows = sharing.flows[*ended..].iter().map(|(_, weight, links)| FairFlow::backlogged(*weight, links)).collect();
    let links = rates.iter().map(|rate| Rate::from_bps((*rate as f64 * 1e6 * PAYLOAD) as u64)).collect();
    Ok(solve(&Problem { links, flows })?.rates_bps)
}

/// Largest relative error of a flow's rate from `wanted` in any window.
fn off(arrivals: &Arrivals, (from, to): (Duration, Duration), wanted: f64) -> f64 {
    let starts = (0..).map(|step| from + SETTLED + STEP * step).take_while(|start| *start + WINDOW <= to);
    starts.map(|start| (rate(arrivals, start, start + WINDOW) / wanted - 1.0).abs()).fold(0.0, f64::max)
}

fn report_results(sharing: &Sharing, arrivals: &[Arrivals], report: &mut Report) -> Result<serde_json::Value> {
    let list = |rates: &[f64]| rates.iter().map(|bps| format!("{:.2}", bps / 1e6)).collect::<Vec<_>>().join(", ");
    let (mut rows, mut raw, mut events, mut begins, mut most) = (Vec::new(), Vec::new(), Vec::new(), Duration::ZERO, 0.0_f64);
    for phase @ (length, rates, ended) in &sharing.phases {
        let (from, to) = (begins, begins + *length);
        begins = to;
        let wanted = exact(sharing, phase)?;
        let flows = &arrivals[*ended..];
        let found: Vec<f64> = flows.iter().map(|flow| rate(flow, from + SETTLED, to)).collect();
        let furthest = flows.iter().zip(&wanted).map(|(flow, wanted)| off(flow, (from, to), *wanted)).fold(0.0, f64::max);
        most = most.max(furthest);
        let names: Vec<&str> = sharing.flows[*ended..].iter().map(|(name, ..)| *name).collect();
        let what = format!("{} over {} and {} Mbit/s", names.join(", "), rates[0], rates[1]);
        progress(&format!("{what}: exact {}, measured {}, furthest off {:.1} %", list(&wanted), list(&found), furthest * 100.0));
        if from > Duration::ZERO {
            let changed =
                if *ended > 0 { format!("{} ends", sharing.flows[ended - 1].0) } else { format!("{} and {}", rates[0], rates[1]) };
            events.push((from.as_secs_f64(), changed));
        }
        rows.push(vec![what, list(&wanted), list(&found), format!("{:.1} %", furthest * 100.0)]);
        raw.push(json!({ "flows": names, "links_mbps": rates, "exact_bps": wanted, "measured_bps": found, "furthest": furthest }));
    }
    report.table(format!("{}:", sharing.title), "flows | exact, Mbit/s | measured, Mbit/s | furthest off over 5 s", rows);
    let aim = format!("{}: within {:.0} % of the exact rates over any 5 s after 3 s", sharing.name, TOLERANCE * 100.0);
    report.aim(aim, format!("{:.1} % off at most", most * 100.0), most <= TOLERANCE);
    let title = "Rates of three downloads through the proxy";
    let svg = plot(title, sharing, arrivals, begins, events);
    report.figures.push(Figure { name: sharing.name.to_owned(), title: title.to_owned(), svg });
    Ok(json!(raw))
}

fn plot(title: &str, sharing: &Sharing, arrivals: &[Arrivals], end: Duration, events: Vec<(f64, String)>) -> String {
    let bins = (end.as_secs_f64() / BIN.as_secs_f64()) as u32;
    let point = |flow: &Arrivals, bin: u32| {
        let (from, to) = (BIN * bin, BIN * (bin + 1));
        (to.as_secs_f64(), Rate::from_bps(rate(flow, from, to) as u64))
    };
    let links = arrivals.iter().map(|flow| (0..bins).map(|bin| point(flow, bin)).collect()).collect();
    let names: Vec<_> = sharing.flows.iter().map(|(name, ..)| format!("flow {name}")).collect();
    stacked(title, &names, &[Run { title: sharing.title.to_owned(), links, events }])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sharing(flows: [(&'static str, f64, &'static [usize]); 3]) -> Sharing {
        Sharing { name: "", title: "", flows, phases: Vec::new() }
    }

    #[test]
    fn exact_rates_equal_the_thesis() {
        let weights = sharing([("a", 1.0, &[0]), ("b", 2.0, &[0, 1]), ("c", 1.0, &[1])]);
        let equal = sharing([("a", 1.0, &[0]), ("b", 1.0, &[0, 1]), ("c", 1.0, &[1])]);
        let rates = |sharing, links, ended| {
            let rates = exact(sharing, &(WINDOW, links, ended)).unwrap();
            rates.iter().map(|rate| (rate / PAYLOAD / 1e4).round() / 100.0).collect::<Vec<_>>()
        };
        assert_eq!((rates(&weights, [3, 10], 0), rates(&weights, [3, 10], 1)), (vec![3.0, 6.67, 3.33], vec![8.67, 4.33]));
        assert_eq!((rates(&equal, [4, 10], 0), rates(&equal, [10, 4], 0)), (vec![4.0, 5.0, 5.0], vec![5.0, 5.0, 4.0]));
        assert!(rules(&weights).contains("client = \"b\" }\nweight = 2.0\nlinks = [\"wlan0\", \"lte0\"]"), "{}", rules(&weights));
    }

    #[test]
    fn the_furthest_window_counts_and_the_first_seconds_do_not() {
        // 10 kB every 10 ms are 8 Mbit/s; from 12 s on nothing comes.
        let flow: Arrivals = (200..1200).map(|step| (ms(step * 10), 10_000)).collect();
        assert!(off(&flow, (Duration::ZERO, Duration::from_secs(12)), 8e6) < 0.01);
        assert!(off(&flow, (Duration::ZERO, Duration::from_secs(13)), 8e6) > 0.19);
    }
}
