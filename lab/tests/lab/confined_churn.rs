//! Strict rules while Braid is killed and links change in random order: nothing but the exceptions leaves.
//!
//! `BRAID_LAB_CHURN` sets the number of changes (8 without it), `BRAID_LAB_SEED` repeats a run.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::support::bonded::{Relay, good_paths};
use crate::support::gateway::{connected, device, echoed, on, url};
use crate::support::user::two_links;
use crate::support::*;
use braid_lab::churn::any_seed;
use braid_lab::{Filter, Lab, Namespace, Responder, Watch, Web, ms};
use braid_model::{ByteCount, Direction, Protocol};
use braid_netem::Random;

/// Sources that do not belong to the LAN: of the Internet, of a link's network, and the address of a link.
const SPOOFED: [&str; 5] = ["198.51.100.7", "10.77.1.9", "10.77.1.2", "2001:db8:dead::7", "fd77:0:0:1::9"];
const ALLOWED: [&str; 4] = ["--allow", "203.0.113.0/24", "--allow", "2001:db8::/32"];

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is no number")))
}

/// Does `work` while programs send datagrams, connect and ping to these hosts without pause: from the first device, and from this machine if `own`. The second
/// device sends with foreign sources. Returns how often something was sent.
fn during_traffic(lab: &Lab, hosts: &[IpAddr], own: bool, work: impl FnOnce()) -> u64 {
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let senders: Vec<&Namespace> = if own { vec![lab.device(0), lab.client()] } else { vec![lab.device(0)] };
    let repeat = |namespace: &Namespace, send: &(dyn Fn() + Sync)| {
        let send = || {
            while !stop.load(Ordering::Relaxed) {
                send();
                sent.fetch_add(1, Ordering::Relaxed);
                thread::sleep(ms(4));
            }
        };
        namespace.run(send).unwrap();
    };
    let spoof = || {
        for source in SPOOFED {
            let source: IpAddr = source.parse().unwrap();
            let to = if source.is_ipv4() { remote(12, 7) } else { remote6(12, 7) };
            let _ = UdpSocket::bind((source, 0)).and_then(|socket| socket.send_to(b"spoofed", to));
        }
    };
    let mut pings = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| repeat(lab.device(1), &spoof));
        for (namespace, host) in senders.iter().flat_map(|namespace| hosts.iter().map(move |host| (*namespace, *host))) {
            let ping = namespace.command("ping").unwrap().args(["-q", "-i", "0.02", &host.to_string()]).quiet().spawn().unwrap();
            pings.push(ping);
            // One exchange lives throughout, the others begin anew.
            let kept = namespace.run(|| UdpSocket::bind(any(host)).unwrap()).unwrap();
            let repeat = &repeat;
            // New ones are fewer, so that no limit of flows is reached.
            let turns = AtomicU64::new(0);
            let send = move || {
                let _ = kept.send_to(b"kept", (host, 7));
                if turns.fetch_add(1, Ordering::Relaxed).is_multiple_of(16) {
                    let _ = UdpSocket::bind(any(host)).and_then(|socket| socket.send_to(b"new", (host, 7)));
                    let _ = local_of((host, 80).into());
                }
            };
            scope.spawn(move || repeat(namespace, &send));
        }
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        stop.store(true, Ordering::Relaxed);
        pings.iter_mut().for_each(|ping| drop(ping.kill().and_then(|()| ping.wait())));
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    sent.into_inner()
}

trait Quiet {
    fn quiet(&mut self) -> &mut Self;
}

impl Quiet for Command {
    fn quiet(&mut self) -> &mut Self {
        self.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
    }
}

fn any(host: IpAddr) -> SocketAddr {
    if host.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { (Ipv6Addr::UNSPECIFIED, 0).into() }
}

/// Counters of what must not leave, by name.
struct Leaks<'a> {
    lab: &'a Lab,
    watches: Vec<(String, Vec<Watch>)>,
}

impl<'a> Leaks<'a> {
    fn none(lab: &'a Lab) -> Self {
        let sources = (0..2).flat_map(|n| [IpAddr::from(Lab::device_address(n)), Lab::device_address6(n).into()]);
        let spoofed =
            SPOOFED.iter().map(|source| source.parse().unwrap()).filter(|source: &IpAddr| *source != IpAddr::from([10, 77, 1, 2]));
        let mut leaks = Self { lab, watches: Vec::new() };
        for source in sources.chain(spoofed) {
            leaks.add(format!("from {source}"), Filter { source: Some(source), direction: Some(Direction::Up), ..Filter::default() });
        }
        leaks
    }

    fn add(&mut self, name: String, filter: Filter) {
        self.add_except(name, filter, &[]);
    }

    fn add_except(&mut self, name: String, filter: Filter, except: &[Filter]) {
        let watch = |link| self.lab.watch_except(link, filter, except).unwrap();
        self.watches.push((name, (0..self.lab.links().len()).map(watch).collect()));
    }

    /// What was counted on these links, with the first packets.
    fn found(&self, links: &[usize]) -> Vec<String> {
        let watches = self.watches.iter().flat_map(|(name, watches)| links.iter().map(move |link| (name, *link, watches[*link])));
        let counted = watches.map(|(name, link, watch)| (name, link, watch, self.lab.watched(watch).packets));
        let text = |(name, link, watch, count)| format!("{name} over link {link}: {count}, first {:?}", self.lab.first(watch));
        counted.filter(|(.., count)| *count > 0).map(text).collect()
    }
}

/// Makes changes in random order.
struct Churn<'a> {
    lab: &'a Lab,
    random: Random,
    config: String,
    up: Option<Up<'a>>,
    relay: Option<Relay<'a>>,
    /// Whether there is a relay at all.
    bonds: bool,
    done: Vec<&'static str>,
}

impl<'a> Churn<'a> {
    fn state(&self) -> PathBuf {
        self.lab.directory().join("braid/state")
    }

    fn kill(&mut self) {
        if let Some(mut up) = self.up.take() {
            up.signal("KILL");
            up.wait_end();
        }
    }

    fn start(&mut self) {
        if self.up.is_none() {
            self.up = Some(Up::start_with(self.lab, &self.config, &self.state()));
        }
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.random.up_to(count - 1) == 0
    }

    fn pause(&mut self) {
        thread::sleep(ms(self.random.up_to(400)));
    }

    fn step(&mut self) {
        let link = self.random.up_to(1) as usize;
        let name = NAMES[link];
        let what = match self.random.up_to(if self.bonds { 9 } else { 8 }) {
            0..=3 => {
                self.kill();
                self.pause();
                // Sometimes the next one is killed as well, while it starts.
                if self.one_in(3) {
                    let mut early = Up::begin(self.lab, &self.state());
                    self.pause();
                    early.kill().unwrap();
                    early.wait().unwrap();
                }
                if self.one_in(3) {
                    self.carrier(link);
                }
                self.start();
                "kill"
            }
            4 => {
                self.carrier(link);
                "carrier"
            }
            5 => {
                self.lab.dark(link).unwrap();
                self.pause();
                self.lab.bright(link).unwrap();
                "dark"
            }
            6 => {
                client(self.lab, &format!("ip link set dev {name} down"));
                self.pause();
                restore_link(self.lab, link);
                "down and up"
            }
            7 => {
                // The kernel removes the routes through the device.
                client(self.lab, &format!("ip link set dev {name} down"));
                restore_link(self.lab, link);
                "bounce"
            }
            8 => {
                let scheduler = ["round-robin", "least-finish"][self.random.up_to(1) as usize];
                let up = self.up.as_ref().unwrap();
                up.configure(&format!("scheduler = \"{scheduler}\"\n{}", self.config));
                assert!(up.braid(&["reload"]).status.success());
                "reload"
            }
            _ => {
                self.relay = None;
                self.pause();
                self.relay = Some(Relay::start_told(self.lab, &ALLOWED));
                "relay"
            }
        };
        self.done.push(what);
        self.pause();
    }

    fn carrier(&mut self, link: usize) {
        self.lab.carrier(link, false).unwrap();
        self.pause();
        self.lab.carrier(link, true).unwrap();
    }

    fn run(&mut self) {
        let count = from_environment("BRAID_LAB_CHURN").unwrap_or(8);
        for _ in 0..count {
            self.step();
        }
        let times = |what| self.done.iter().filter(|done| **done == what).count();
        let kinds = ["kill", "carrier", "dark", "down and up", "bounce", "reload", "relay"].map(|what| format!("{what} {}", times(what)));
        println!("{count} changes: {}", kinds.join(", "));
    }
}

/// What a program that manages the network does when a device is up again.
fn restore_link(lab: &Lab, link: usize) {
    let name = NAMES[link];
    client(lab, &format!("ip link set dev {name} up"));
    for line in [
        format!("ip route replace default via 10.77.{link}.1 dev {name} metric {}", 100 + link),
        format!("ip address replace fd77:0:0:{link}::2/64 dev {name} nodad"),
        format!("ip route replace ::/0 via fd77:0:0:{link}::1 dev {name} metric {}", 100 + link),
    ] {
        client(lab, &line);
    }
}

fn random() -> Random {
    let seed = from_environment("BRAID_LAB_SEED").unwrap_or_else(any_seed);
    println!("BRAID_LAB_SEED={seed}");
    Random::new(seed)
}

fn own_sources(lab: &Lab) {
    for source in SPOOFED {
        device(lab, 1, &format!("ip address add {source}/{} dev lo", if source.contains(':') { "128 nodad" } else { "32" }));
    }
}

fn downloads(lab: &Lab, host: IpAddr) -> bool {
    let mut command = on(lab, 0, "curl -sS --fail --max-time 3 -o /dev/null");
    command.arg(url(&host.to_string(), "1000.bin")).quiet().status().unwrap().success()
}

#[test]
fn nothing_leaves_but_through_the_relay_whatever_is_killed_or_changes() {
    if !able() {
        return;
    }
    let lab = two_links().lan(2).rp_filter(0).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(1000)).unwrap();
    let _responder = Responder::start(&lab).unwrap();
    own_sources(&lab);
    let excepted: IpAddr = Lab::internet(13).into();
    let config = format!(
        "carry = \"bond\"\nfallback = \"none\"\n[gateway]\nlan = [\"lan0\"]\n[[app]]\nmatch = {{ destination = \"{excepted}\" }}\ncarry = \"direct\"\n"
    );
    let up_only = Filter { direction: Some(Direction::Up), ..Filter::default() };
    let of = |protocol| Filter { protocol: Some(protocol), ..up_only };
    let hosts = [IpAddr::from(Lab::internet(10)), Lab::internet6(10).into()];
    let mut leaks = Leaks::none(&lab);
    hosts
        .iter()
        .chain(&[IpAddr::from(Lab::internet(12)), Lab::internet6(12).into()])
        .for_each(|host| leaks.add(format!("to {host}"), Filter::to(*host)));
    // All TCP and UDP but that to the relay and to the exception.
    let to_relay = up_only.port(Protocol::Udp, 5757);
    for protocol in [Protocol::Tcp, Protocol::Udp] {
        leaks.add_except(format!("other {protocol}"), of(protocol), &[Filter::to(excepted), to_relay]);
    }
    let by_relay = watch_all(&lab, to_relay);
    let to_exception = watch_all(&lab, Filter::to(excepted));

    let random = random();
    let relay = Relay::start_told(&lab, &ALLOWED);
    let up = relay.join(&config);
    let reached = || downloads(&lab, hosts[0]) && echoed(&lab, 0, (hosts[1], 7).into(), 100).is_ok();
    eventually("flows go through the relay", || good_paths(&up) == 2 && reached());

    let mut churn = Churn { lab: &lab, random, config, up: Some(up), relay: Some(relay), bonds: true, done: Vec::new() };
    let sent = during_traffic(&lab, &[hosts[0], hosts[1], excepted], true, || churn.run());
    eventually("flows go through the relay again", reached);
    println!("{sent} times sent, {:?} packets to the relay", packets(&lab, &by_relay));
    assert_eq!(leaks.found(&[0, 1]), [""; 0]);
    assert!(packets(&lab, &to_exception).iter().sum::<u64>() > 100 && sent > 1000, "the exception goes direct");
}

#[test]
fn a_client_leaves_over_its_links_only_whatever_is_killed_or_changes() {
    if !able() {
        return;
    }
    let lab = two_links().lan(2).rp_filter(0).start().unwrap();
    let web = Web::start(&lab).unwrap();
    web.file(ByteCount::new(1000)).unwrap();
    let mirror = crate::support::gateway::Mirror::start(&lab);
    own_sources(&lab);
    // Not the link that the system itself would use.
    let rule = |client: &str| format!("[[app]]\nmatch = {{ client = \"{client}\" }}\nlinks = [\"lte0\"]\n");
    let config = format!("[gateway]\nlan = [\"lan0\"]\n{}{}", rule("192.168.7.20"), rule("fd07::20"));
    let random = random();
    let up = Up::start(&lab, &config);
    let reached =
        || connected(&lab, 0, mirror.at(11)).is_ok_and(|link| link == 1) && connected(&lab, 0, mirror.at6(11)).is_ok_and(|link| link == 1);
    eventually("the device is forwarded", reached);

    // Only the device sends to this host, so what is for it belongs to the rule.
    let (host, host6) = (IpAddr::from(Lab::internet(10)), IpAddr::from(Lab::internet6(10)));
    let mut leaks = Leaks::none(&lab);
    [host, host6].iter().for_each(|host| leaks.add(format!("to {host}"), Filter::to(*host)));
    let by_rule = [host, host6].map(|host| watch_all(&lab, Filter::to(host)));
    let spoofed: Vec<Vec<Watch>> =
        [IpAddr::from(Lab::internet(12)), Lab::internet6(12).into()].map(|host| watch_all(&lab, Filter::to(host))).into();

    let mut churn = Churn { lab: &lab, random, config, up: Some(up), relay: None, bonds: false, done: Vec::new() };
    let sent = during_traffic(&lab, &[host, host6], false, || churn.run());
    eventually("the device is forwarded again", reached);
    thread::sleep(ms(200));
    let by_rule: Vec<u64> = by_rule.iter().map(|watches| packets(&lab, watches)[1]).collect();
    println!("{sent} times sent, {by_rule:?} packets over lte0");
    assert_eq!(leaks.found(&[0]), [""; 0]);
    let sources = Leaks { lab: &lab, watches: leaks.watches.into_iter().filter(|(name, _)| name.starts_with("from")).collect() };
    assert_eq!(sources.found(&[1]), [""; 0]);
    assert_eq!(spoofed.iter().flat_map(|watches| packets(&lab, watches)).sum::<u64>(), 0, "spoofed packets");
    assert!(by_rule.iter().all(|count| *count > 100) && sent > 1000, "{by_rule:?}");
}
