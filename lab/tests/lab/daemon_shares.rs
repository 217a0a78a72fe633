//! Preferences for flows without a relay: `rate`, `weight` and `guarantee` hold on real traffic, out and in, and end with the daemon.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::*;
use braid_lab::{Lab, LinkSpec, Web, mbps, ms};
use braid_model::ByteCount;
use serde_json::Value;

/// Bytes of the downloaded file: more than any test moves.
const FILE: ByteCount = ByteCount::new(200_000_000);
/// Port of the sink.
const SINK: u16 = 9_000;

/// A lab with one link of this rate each way, 20 ms one-way delay, and a deep queue at the far end.
fn one_link(rate: u64) -> Lab {
    let link = LinkSpec::new("wlan0").rate(mbps(rate)).delay(ms(20)).queue(ByteCount::new(1_000_000));
    Lab::builder().link(link).start().unwrap()
}

/// An `[[app]]` entry for this host of the lab's Internet.
fn rule(host: u8, preference: &str) -> String {
    format!("[[app]]\nmatch = {{ destination = \"{}\" }}\n{preference}\n", Lab::internet(host))
}

/// The rule's link with a capacity that the user knows.
fn known(rate: u64) -> String {
    format!("[[link]]\nname = \"wlan0\"\ncapacity_down = \"{rate} Mbit/s\"\ncapacity_up = \"{rate} Mbit/s\"\n")
}

/// curl that downloads from a host, until it is dropped.
struct Download(Child);

impl Download {
    fn start(lab: &Lab, web: &Web, host: u8) -> Self {
        let url = web.url_at(Lab::internet(host), FILE).unwrap();
        let mut curl = lab.client().command("curl").unwrap();
        Self(curl.args(["-s", "-o", "/dev/null", &url]).stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A sender in the client, and a sink in the server, until it is dropped.
struct Upload {
    stop: Arc<AtomicBool>,
    taken: Arc<AtomicU64>,
    stream: TcpStream,
}

impl Upload {
    fn start(lab: &Lab, host: u8) -> Self {
        let to: SocketAddr = remote(host, SINK);
        let listener = lab.server().run(|| TcpListener::bind(to).unwrap()).unwrap();
        let (stop, taken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let count = taken.clone();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = vec![0; 65_536];
            while let Ok(size @ 1..) = stream.read(&mut buffer) {
                count.fetch_add(size as u64, Ordering::Relaxed);
            }
        });
        let (mut sending, stopped) = (open(lab, to).0, stop.clone());
        let stream = sending.try_clone().unwrap();
        thread::spawn(move || {
            sending.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
            let block = vec![1; 16_384];
            while !stopped.load(Ordering::Relaxed) {
                let _ = sending.write(&block);
            }
        });
        Self { stop, taken, stream }
    }

    /// Bits per second that arrived during `span`.
    fn rate(&self, span: Duration) -> f64 {
        let (before, begin) = (self.taken.load(Ordering::Relaxed), Instant::now());
        thread::sleep(span);
        (self.taken.load(Ordering::Relaxed) - before) as f64 * 8.0 / begin.elapsed().as_secs_f64()
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Bytes received by the living flows to a host.
fn received(up: &Up<'_>, host: u8) -> u64 {
    let prefix = format!("{}:", Lab::internet(host));
    let flows = up.flows().into_iter().filter(|flow| flow["remote"].as_str().unwrap().starts_with(&prefix));
    flows.map(|flow| flow["rx_bytes"].as_u64().unwrap()).sum()
}

/// Bits per second that the flows to each host receive during `span`.
fn rates<const N: usize>(up: &Up<'_>, hosts: [u8; N], span: Duration) -> [f64; N] {
    let (before, begin) = (hosts.map(|host| received(up, host)), Instant::now());
    thread::sleep(span);
    let after = hosts.map(|host| received(up, host));
    let seconds = begin.elapsed().as_secs_f64();
    std::array::from_fn(|place| after[place].saturating_sub(before[place]) as f64 * 8.0 / seconds)
}

/// Waits until the figures that `measure` takes satisfy `holds`; returns the time from now and the figures.
#[track_caller]
fn settles<T: std::fmt::Debug + Copy>(what: &str, mut measure: impl FnMut() -> T, holds: impl Fn(T) -> bool) -> Duration {
    let begin = Instant::now();
    let mut seen = Vec::new();
    loop {
        let figures = measure();
        seen.push(figures);
        if holds(figures) {
            println!("{what}: {:?} after {:?}", seen, begin.elapsed());
            return begin.elapsed();
        }
        assert!(begin.elapsed() < LIMIT, "{what} does not settle: {seen:?}");
    }
}

fn near(value: f64, target: f64) -> bool {
    (value / target - 1.0).abs() < 0.1
}

/// What `explain` says of the flow to a host.
fn share(up: &Up<'_>, host: u8) -> Value {
    let prefix = format!("{}:", Lab::internet(host));
    let flow = up.flows().into_iter().find(|flow| flow["remote"].as_str().unwrap().starts_with(&prefix)).unwrap();
    up.api("POST /v1/explain", &serde_json::json!({ "flow": flow["id"] })).1["share"].clone()
}

#[test]
fn a_rate_limits_what_a_flow_sends_and_receives() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let up = Up::start(&lab, &rule(11, "rate = \"4 Mbit/s\""));
    let download = Download::start(&lab, &web, 11);
    settles("in", || rates(&up, [11], ms(2000))[0], |rate| near(rate, 4e6));
    let share = share(&up, 11);
    assert_eq!((share["rate"].as_str(), share["down"]["target_bps"].as_u64()), (Some("4.0 Mbit/s"), Some(4_000_000)), "{share}");
    drop(download);
    let upload = Upload::start(&lab, 11);
    settles("out", || upload.rate(ms(2000)), |rate| near(rate, 4e6));
    // A flow of another rule is not limited.
    let free = Upload::start(&lab, 12);
    settles("beside it", || free.rate(ms(2000)), |rate| rate > 12e6);
    // Removing the limit gives the running flow its own settings back.
    drop(free);
    up.configure("");
    assert!(up.braid(&["reload"]).status.success());
    settles("after reload", || upload.rate(ms(2000)), |rate| rate > 12e6);
}

#[test]
fn weights_share_one_link() {
    if !able() {
        return;
    }
    let lab = one_link(12);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let up = Up::start(&lab, &format!("{}{}{}", rule(11, "weight = 1"), rule(12, "weight = 3"), known(12)));
    let one = Download::start(&lab, &web, 11);
    let three = Download::start(&lab, &web, 12);
    eventually("both receive", || received(&up, 11) > 0 && received(&up, 12) > 0);
    settles("1:3 in", || rates(&up, [11, 12], ms(2000)), |[one, three]| near(three / one, 3.0) && one + three > 9e6);
    drop(three);
    settles("alone", || rates(&up, [11], ms(2000))[0], |rate| rate > 9e6);
    drop(one);
    let (one, three) = (Upload::start(&lab, 11), Upload::start(&lab, 12));
    let both = || {
        let (mine, begin) = (one.taken.load(Ordering::Relaxed), Instant::now());
        let theirs = three.rate(ms(2000));
        let mine = (one.taken.load(Ordering::Relaxed) - mine) as f64 * 8.0 / begin.elapsed().as_secs_f64();
        [mine, theirs]
    };
    settles("1:3 out", both, |[one, three]| near(three / one, 3.0) && one + three > 9e6);
}

#[test]
fn a_guarantee_holds_beside_bulk_downloads() {
    if !able() {
        return;
    }
    let lab = one_link(12);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let up = Up::start(&lab, &format!("{}{}", rule(11, "guarantee = \"50 %\""), known(12)));
    let _bulk: Vec<Download> = (0..4).map(|_| Download::start(&lab, &web, 12)).collect();
    eventually("bulk receives", || received(&up, 12) > 500_000);
    let _kept = Download::start(&lab, &web, 11);
    eventually("the flow receives", || received(&up, 11) > 0);
    settles("guarantee", || rates(&up, [11, 12], ms(2000)), |[kept, bulk]| kept > 0.9 * 0.475 * 12e6 && bulk > 3e6);
    let share = share(&up, 11);
    assert_eq!(share["down"]["guaranteed_bps"].as_u64(), Some(6_000_000), "{share}");
    assert_eq!(up.status().unwrap()["warnings"], serde_json::json!([]));
}

/// A program asks by the API that a rate is kept free.
#[test]
fn a_reservation_is_kept_beside_bulk_downloads_and_given_back() {
    if !able() {
        return;
    }
    let lab = one_link(12);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let up = Up::start(&lab, &known(12));
    let _bulk: Vec<Download> = (0..4).map(|_| Download::start(&lab, &web, 12)).collect();
    settles("all of it", || rates(&up, [12], ms(2000))[0], |bulk| bulk > 9e6);
    let rule = serde_json::json!({"match": {"destination": Lab::internet(11).to_string()}});
    let reserve = |bps: u64| serde_json::json!({"name": "call", "rule": rule, "reserve": {"down_bps": bps}, "lease_ms": 600_000});
    let (status, refused) = up.api("POST /v1/rules", &reserve(10_000_000));
    assert!(status == 409 && refused["detail"].as_str().unwrap().contains("wlan0 has 9.6 Mbit/s left down"), "{refused}");
    let (status, accepted) = up.api("POST /v1/rules", &reserve(6_000_000));
    assert_eq!((status, accepted["warnings"].clone()), (200, serde_json::json!([])), "{accepted}");
    settles("kept free", || rates(&up, [12], ms(2000))[0], |bulk| bulk < 7e6 && bulk > 2e6);
    let _kept = Download::start(&lab, &web, 11);
    eventually("the flow receives", || received(&up, 11) > 0);
    settles("reserved", || rates(&up, [11, 12], ms(2000)), |[kept, bulk]| kept > 0.9 * 0.95 * 6e6 && bulk > 2e6);
    let rules = up.api("GET /v1/rules", &Value::Null).1;
    assert_eq!(rules["rules"][0]["reservation"]["kept"], true, "{rules}");
    let share = share(&up, 11);
    assert_eq!(share["down"]["reserved_bps"].as_u64(), Some(6_000_000), "{share}");
    assert!(up.braid(&["rules", "remove", "call"]).status.success());
    // Five downloads share the link evenly.
    settles("given back", || rates(&up, [11, 12], ms(2000)), |[former, bulk]| bulk > 1.8 * former && former + bulk > 9e6);
}

/// A program may set what Braid sets. Its limit, and not its licence, counts.
#[test]
fn a_program_cannot_lift_its_limit() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let up = Up::start(&lab, &rule(11, "rate = \"4 Mbit/s\""));
    let upload = Upload::start(&lab, 11);
    settles("limited", || upload.rate(ms(2000)), |rate| near(rate, 4e6));
    set(&upload.stream, (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE), 10_000_000);
    let sockets = || client(&lab, "ss -tinH state established");
    eventually("the rate is set again", || !sockets().contains("pacing_rate 80Mbps/80"));
    settles("limited again", || upload.rate(ms(2000)), |rate| near(rate, 4e6));
    // A lower one is the program's own.
    set(&upload.stream, (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE), 250_000);
    settles("its own limit", || upload.rate(ms(2000)), |rate| near(rate, 2e6));
    up.configure("");
    assert!(up.braid(&["reload"]).status.success());
    thread::sleep(ms(500));
    settles("its own limit stays", || upload.rate(ms(2000)), |rate| near(rate, 2e6));
}

fn set(stream: &TcpStream, (level, name): (i32, i32), value: u32) {
    let value_at = (&raw const value).cast();
    // SAFETY: the option takes a u32, which lives through the call.
    let result = unsafe { libc::setsockopt(stream.as_raw_fd(), level, name, value_at, size_of::<u32>() as u32) };
    assert_eq!(result, 0);
}

/// Figure 4.5 of Yap's thesis: a and b each on a link of its own, c beside b; then a ends and b uses its link too; then b ends.
#[test]
fn the_phases_of_figure_4_5() {
    if !able() {
        return;
    }
    let link = |name, rate| LinkSpec::new(name).rate(mbps(rate)).delay(ms(20));
    let lab = Lab::builder().link(link("wlan0", 3)).link(link("lte0", 10)).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    let on = |host, link: &str, weight| rule(host, &format!("links = [\"{link}\"]\nweight = {weight}"));
    let links = "[[link]]\nname = \"wlan0\"\ncapacity_down = \"3 Mbit/s\"\n[[link]]\nname = \"lte0\"\ncapacity_down = \"10 Mbit/s\"\n";
    let config = [on(11, "wlan0", 1), on(12, "lte0", 2), on(13, "lte0", 1), on(14, "wlan0", 2), links.to_owned()].concat();
    let up = Up::start(&lab, &config);
    let [a, b, c] = [11, 12, 13].map(|host| [0, 1].map(|_| Download::start(&lab, &web, host)));
    eventually("all receive", || [11, 12, 13].iter().all(|host| received(&up, *host) > 0));
    let two_to_one = |b: f64, c: f64| near(b / c, 2.0) && b + c > 8e6;
    settles("1", || rates(&up, [11, 12, 13], ms(2000)), |[a, b, c]| a > 2.4e6 && two_to_one(b, c));
    drop(a);
    let more = Download::start(&lab, &web, 14);
    settles("2", || rates(&up, [14, 12, 13], ms(2000)), |[more, b, c]| more > 2.4e6 && two_to_one(b, c));
    drop((b, more));
    settles("3", || rates(&up, [13], ms(2000))[0], |c| c > 8e6);
    drop(c);
}

#[test]
fn a_daemon_that_dies_leaves_no_limit() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let web = Web::start(&lab).unwrap();
    web.file(FILE).unwrap();
    // The last two reach the watchdog too: systemd's own watchdog sends SIGABRT to all processes of the service, and SIGKILL leaves the work to the next
    // start.
    for (signal, both) in [("TERM", false), ("KILL", false), ("ABRT", true), ("KILL", true)] {
        let mut up = Up::start(&lab, &rule(11, "rate = \"2 Mbit/s\""));
        let (upload, _download) = (Upload::start(&lab, 11), Download::start(&lab, &web, 11));
        settles("out", || upload.rate(ms(2000)), |rate| near(rate, 2e6));
        let sockets = || client(&lab, "ss -tinH state established");
        let limited = || sockets().matches("pacing_rate").count();
        assert!(limited() >= 2, "{}", sockets());
        if both {
            up.signal("STOP");
            for watchdog in children(up.pid()) {
                assert!(Command::new("kill").args([&format!("-{signal}"), &watchdog.to_string()]).status().unwrap().success());
            }
        }
        up.signal(signal);
        up.signal("CONT");
        up.wait_end();
        let _next = (both && signal == "KILL").then(|| Up::start(&lab, ""));
        settles(signal, || upload.rate(ms(2000)), |rate| rate > 12e6);
        // The window of the receiving socket is free again, too: its bytes come fast.
        let begin = bytes_received(&sockets());
        eventually("the download is free", || bytes_received(&sockets()) > begin + 5_000_000);
    }
}

#[test]
fn a_daemon_that_hangs_leaves_no_limit_and_limits_again_when_it_goes_on() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let up = Up::start(&lab, &rule(11, "rate = \"2 Mbit/s\""));
    let upload = Upload::start(&lab, 11);
    // The watchdog's descriptor can be used once, so it gets another after each pause.
    for _ in 0..2 {
        settles("limited", || upload.rate(ms(2000)), |rate| near(rate, 2e6));
        up.signal("STOP");
        settles("stopped", || upload.rate(ms(2000)), |rate| rate > 12e6);
        up.signal("CONT");
    }
    settles("limited", || upload.rate(ms(2000)), |rate| near(rate, 2e6));
}

#[test]
fn a_locked_socket_stops_neither_the_daemon_nor_its_watchdog() {
    if !able() {
        return;
    }
    let lab = one_link(20);
    let mut up = Up::start(&lab, &rule(11, "rate = \"2 Mbit/s\""));
    let upload = Upload::start(&lab, 11);
    settles("limited", || upload.rate(ms(2000)), |rate| near(rate, 2e6));
    let listener = lab.server().run(|| TcpListener::bind(remote(12, SINK)).unwrap()).unwrap();
    let locked = LockedSocket::new(open(&lab, remote(12, SINK)).0);
    eventually("the warning", || up.status().is_some_and(|status| status["warnings"].to_string().contains("keeps a TCP socket locked")));
    // The daemon still serves, and its rules go when it is killed.
    assert!(up.braid(&["reload"]).status.success());
    assert!(!client(&lab, "ip rule").trim().is_empty());
    let rules = || client(&lab, "ip rule").lines().count();
    let with = rules();
    up.signal("KILL");
    eventually("the rules are gone", || rules() < with);
    // The dead daemon's thread still waits for the socket, but holds nothing that the next one needs.
    let _next = Up::start(&lab, "");
    drop(locked);
    up.wait_end();
    settles("free", || upload.rate(ms(2000)), |rate| rate > 12e6);
    drop(listener);
}

#[test]
fn a_locked_socket_on_a_dead_link_stops_neither_the_daemon_nor_its_end() {
    if !able() {
        return;
    }
    let lab = lab(2);
    let config = "scheduler = \"round-robin\"\nprobe = \"continuous\"\nreconnect_after = \"500 ms\"\n";
    let mut up = Up::start(&lab, config);
    let _listener = lab.server().run(|| TcpListener::bind(remote(12, SINK)).unwrap()).unwrap();
    let (stream, link) = open(&lab, remote(12, SINK));
    let locked = LockedSocket::new(stream);
    lab.dark(link).unwrap();
    eventually("the daemon ends the flow", || text(&up.braid(&["log"]).stdout).contains("ended 1 flow on"));
    assert!(up.braid(&["reload"]).status.success());
    assert!(!up.log().contains("destroyed the socket"), "the socket is not locked");
    let rules = || client(&lab, "ip rule").lines().count();
    let with = rules();
    up.signal("TERM");
    eventually("the rules are gone", || rules() < with);
    let _next = Up::start(&lab, config);
    drop(locked);
    up.wait_end();
}

/// A socket that a system call keeps locked until this is dropped: it sends from memory whose page does not arrive (userfaultfd(2)).
struct LockedSocket {
    fault: OwnedFd,
    page: usize,
    sending: Option<thread::JoinHandle<()>>,
}

const PAGE: usize = 4096;
/// Requests of `linux/userfaultfd.h`.
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
const UFFD_API: u64 = 0xaa;
const MODE_MISSING: u64 = 1;

impl LockedSocket {
    fn new(stream: TcpStream) -> Self {
        // SAFETY: the mapping is new, and the kernel writes only into the two arrays, which have the sizes of its structures.
        let (fault, page) = unsafe {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let page = libc::mmap(std::ptr::null_mut(), PAGE, protection, flags, -1, 0) as usize;
            let fault = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) as i32;
            assert!(fault >= 0, "userfaultfd: {}", std::io::Error::last_os_error());
            let mut api = [UFFD_API, 0, 0];
            assert_eq!(libc::ioctl(fault, UFFDIO_API, api.as_mut_ptr()), 0);
            let mut range = [page as u64, PAGE as u64, MODE_MISSING, 0];
            assert_eq!(libc::ioctl(fault, UFFDIO_REGISTER, range.as_mut_ptr()), 0);
            (OwnedFd::from_raw_fd(fault), page)
        };
        let sending = thread::spawn(move || {
            // SAFETY: the page is mapped until this thread has ended.
            unsafe { libc::send(stream.as_raw_fd(), page as *const libc::c_void, PAGE, 0) };
        });
        Self { fault, page, sending: Some(sending) }
    }
}

impl Drop for LockedSocket {
    fn drop(&mut self) {
        let mut range = [self.page as u64, PAGE as u64];
        // SAFETY: the array has the size of the kernel's structure.
        unsafe { libc::ioctl(self.fault.as_raw_fd(), UFFDIO_UNREGISTER, range.as_mut_ptr()) };
        let _ = self.sending.take().map(thread::JoinHandle::join);
        // SAFETY: the mapping is this object's own, and the thread that read it has ended.
        unsafe { libc::munmap(self.page as *mut libc::c_void, PAGE) };
    }
}

/// Processes that this one started.
fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// The largest `bytes_received` that `ss` shows.
fn bytes_received(sockets: &str) -> u64 {
    sockets.split_whitespace().filter_map(|word| word.strip_prefix("bytes_received:")?.parse().ok()).max().unwrap_or(0)
}
