//! Hosts reserve rates at an access point of Open vSwitch, by `braid net join` and by the rules of a daemon.

use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use crate::support::*;
use braid_lab::network::{Controller, Host, Switches};
use braid_lab::wifi::{AccessPoint, Roamer, Stream, configuration, serve_clients};
use braid_lab::{Lab, LinkSpec};
use serde_json::Value;

/// What the access point carries, and what the controller is told.
const CARRIES: u32 = 6;
const CAPACITY: u32 = 5;
/// Datagrams of a count.
const COUNTED: u32 = 300;
/// An address behind the other host, which is no neighbour.
const FAR: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);

/// Two hosts at one access point of [`CARRIES`] Mbit/s, and one elsewhere.
struct Site<'a> {
    host: Roamer,
    neighbour: Roamer,
    other: Host,
    controller: Controller<'a>,
    access: String,
    _switches: Switches<'a>,
}

fn ip(roamer: &Roamer, words: &str) {
    let done = roamer.namespace().command("ip").unwrap().args(words.split(' ')).output().unwrap();
    assert!(done.status.success(), "{words}: {}", text(&done.stderr));
}

fn site(lab: &Lab) -> Site<'_> {
    let switches = Switches::ring(lab, "OpenFlow13").unwrap();
    let mut access = AccessPoint::start(lab, &switches, 1, ("s1", 1), Duration::ZERO).unwrap();
    access.capacity_mbps = CAPACITY;
    access.limit(lab, CARRIES).unwrap();
    let accesses = [access];
    serve_clients(lab, &switches, "s2").unwrap();
    let start = |number| Roamer::start(lab, number, 1, &accesses, Duration::ZERO).unwrap();
    let (host, neighbour) = (start(1), start(7));
    let key = host.key(&braid()).unwrap();
    let controller = Controller::start_with(lab, &braid(), &configuration(&accesses, &[(&host.mac, &key)], "")).unwrap();
    let other = Host::start(&switches, 2, &["s3"]).unwrap();
    controller.converges(3, 3).unwrap();
    [&host, &neighbour].into_iter().for_each(|roamer| roamer.radios()[0].enter(0, Duration::ZERO));
    ip(&neighbour, &format!("address add {}/24 dev wlan0", neighbour.address));
    let [AccessPoint { bssid, .. }] = accesses;
    Site { host, neighbour, other, controller, access: bssid, _switches: switches }
}

impl Site<'_> {
    fn access(&self) -> Value {
        self.controller.status().unwrap()["accesses"][0].clone()
    }

    fn reservation(&self) -> Value {
        let status = self.controller.status().unwrap();
        let hosts = status["hosts"].as_array().cloned().unwrap_or_default();
        hosts.into_iter().find(|host| host["mac"] == self.host.mac).map(|host| host["reservation"].clone()).unwrap_or_default()
    }

    fn reaches(&self, roamer: &Roamer) {
        eventually("the hosts reach each other", || self.other.reaches(roamer.address).unwrap());
    }
}

/// How many of the next [`COUNTED`] datagrams of a stream do not arrive, give or take those that are under way.
fn lost(stream: &Stream) -> usize {
    let (sent, arrived) = (stream.sent(), stream.arrived());
    eventually("the datagrams are sent", || stream.sent() >= sent + COUNTED);
    let sent = (stream.sent() - sent) as usize;
    sent.saturating_sub(stream.arrived() - arrived)
}

#[test]
fn datagrams_of_a_host_with_a_reservation_survive_a_flood_to_its_neighbour() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap();
    let site = site(&lab);
    let joined = site.host.join(&braid(), None).unwrap();
    site.reaches(&site.host);
    site.reaches(&site.neighbour);
    let stream = Stream::start(site.other.namespace(), (site.host.namespace(), site.host.address), Duration::from_millis(5), 400).unwrap();
    eventually("the stream flows", || stream.arrived() > 50);
    // Some 20 Mbit/s.
    let flooded = (site.neighbour.namespace(), site.neighbour.address);
    let flood = Stream::start(site.other.namespace(), flooded, Duration::from_micros(500), 1300).unwrap();
    eventually("the flood fills the access point", || flood.arrived() > 500 && lost(&stream) > COUNTED as usize / 4);
    drop(joined);
    let refused = site.host.join_with(&braid(), None, &["--reserve-down", "3 Mbit/s"]).unwrap();
    eventually("too much is refused", || {
        let log = refused.log();
        log.contains(&format!("access point {} cannot reserve 3.0 Mbit/s towards the host", site.access)) && log.contains("2.5 Mbit/s")
    });
    assert_eq!(site.access()["reserved_down_bps"], 0);
    drop(refused);
    let joined = site.host.join_with(&braid(), None, &["--reserve-down", "2 Mbit/s"]).unwrap();
    eventually("the access point keeps it", || {
        let access = site.access();
        access["reserved_down_bps"] == 2_000_000 && access["enforces_down"] == true && access["reserved_up_bps"] == 0
    });
    eventually("the stream flows again", || lost(&stream) < COUNTED as usize);
    // The meter of the others begins with a burst.
    eventually("nothing of the stream is lost", || lost(&stream) <= 3);
    let (before, mut losses) = (flood.arrived(), Vec::new());
    losses.extend((0..4).map(|_| lost(&stream)));
    assert!(losses.iter().sum::<usize>() <= 4 * COUNTED as usize / 50, "{losses:?} of {COUNTED} each\n{}", joined.log());
    assert!(flood.arrived() > before + 100, "the neighbour gets the rest");
    let shown = site.host.namespace().command(braid()).unwrap().args(["adhoc", "--socket"]).arg(site.host.socket()).output().unwrap();
    assert!(text(&shown.stdout).contains(&format!("{} keeps 2.0 Mbit/s down", site.access)), "{}", text(&shown.stdout));
    let shown = site.controller.net(&["status"]).unwrap();
    assert!(text(&shown.stdout).contains("RESERVED TO"), "{}", text(&shown.stdout));
    // It ends with the connection.
    drop(joined);
    eventually("nothing is reserved any more", || site.access()["reserved_down_bps"] == 0);
}

#[test]
fn a_daemon_reserves_what_rules_guarantee_to_living_flows() {
    if !able() {
        return;
    }
    let lab = Lab::builder().link(LinkSpec::new("wlan0")).start().unwrap();
    let site = site(&lab);
    let rule = "\n[[app]]\nmatch = { destination = \"203.0.113.0/24\" }\nguarantee = \"1500 kbit/s\"\n";
    let _joined = site.host.join_by_daemon_with(&braid(), rule).unwrap();
    ip(&site.host, "route add default via 10.9.0.2 dev net0");
    site.other.sh(&format!("ip address add {FAR}/32 dev lo; ip link set lo up")).unwrap();
    site.reaches(&site.host);
    let listener = site.other.namespace().run(|| TcpListener::bind((FAR, 8000))).unwrap().unwrap();
    thread::spawn(move || {
        while listener.accept().map(|accepted| thread::spawn(move || std::io::copy(&mut { accepted.0 }, &mut std::io::sink()))).is_ok() {}
    });
    assert_eq!(site.reservation(), Value::Null);
    let ask = |arguments: &[&str]| {
        let mut command = site.host.namespace().command(braid()).unwrap();
        text(&command.args(arguments).arg("--socket").arg(site.host.socket()).output().unwrap().stdout)
    };
    let ids = || -> Vec<String> {
        let flows: Value = serde_json::from_str(&ask(&["flows", "--json"])).unwrap_or_default();
        let far = flows["flows"].as_array().into_iter().flatten().filter(|flow| flow["remote"] == format!("{FAR}:8000"));
        far.map(|flow| flow["id"].to_string()).collect()
    };
    let mut flow = None;
    eventually("the daemon leads a connection over the device", || {
        // One that begins before the device is in use as a link does not count.
        flow = site.host.namespace().run(|| TcpStream::connect((FAR, 8000))).unwrap().ok();
        let _ = flow.as_mut().map(|flow| flow.write_all(b"something"));
        !ids().is_empty()
    });
    eventually("the network keeps what the rule guarantees", || {
        let reservation = site.reservation();
        reservation["kept"][0]["down_bps"] == 1_500_000 && reservation["kept"][0]["up_bps"] == 1_500_000 && reservation["reason"].is_null()
    });
    let kept = format!("{} keeps 1.5 Mbit/s down and 1.5 Mbit/s up", site.access);
    eventually("the device shows it", || ask(&["adhoc"]).contains(&kept));
    eventually("the flow shows it", || ids().iter().any(|id| ask(&["explain", id]).contains(&kept)));
    drop(flow);
    eventually("it ends with the flow", || site.reservation() == Value::Null);
}
